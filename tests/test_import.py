"Importing k2eagle is quick, light modules leave torch alone, and the package builds."
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution

import pytest
from conftest import ROOT
from packaging.specifiers import SpecifierSet

LIGHT = ("", ".files", ".findings", ".provenance", ".layers", ".plots", ".runs")
TIMED = "import time; start = time.perf_counter(); import k2eagle; print(time.perf_counter() - start)"


def python(code: str, *options: str) -> str:
    "What a fresh interpreter prints for a piece of code."
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick():
    seconds = min(float(python(TIMED)) for _ in range(3))
    assert seconds <= 0.3, f"import k2eagle took {seconds:.2f} s"


@pytest.mark.parametrize("module", LIGHT, ids=lambda module: f"k2eagle{module}")
def test_import_leaves_torch_alone(module):
    heavy = python(f"import sys, k2eagle{module}; print(*{{'torch', 'transformers'}} & set(sys.modules))")
    assert not heavy, f"importing k2eagle{module} imports {heavy}"


def test_wheel_builds_and_imports(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "k2eagle", source / "k2eagle", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("k2eagle-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    shown = python(f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import k2eagle, k2eagle.files; print(k2eagle.files.__file__)")
    assert shown.startswith(str(tmp_path / "site"))
    modules = {path.name for path in (ROOT / "k2eagle").glob("*.py")}
    assert modules == {path.name for path in (tmp_path / "site" / "k2eagle").glob("*.py")}


def test_lock_is_installed_and_fits_the_oldest_python():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8"), re.M))
    installed = {name: distribution(name) for name in pins}
    others = {name: found.version for name, found in installed.items() if found.version.split("+")[0] != pins[name]}
    assert not others, f"run make setup: the lock names other versions than {others}"
    newer = {name: found.metadata["Requires-Python"] for name, found in installed.items() if not fits(found, "3.11.0")}
    assert not newer, f"pin older versions, which 3.11.0 can use: {newer}"


def fits(found, version: str) -> bool:
    "Does an installed package accept this Python?"
    return SpecifierSet(found.metadata["Requires-Python"] or "").contains(version)
