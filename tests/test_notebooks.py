"Every library notebook: its own tests, and the rules that keep notebooks, package and README one thing."
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from nbdev.config import get_config
from nbdev.test import test_nb as run_nb  # under its own name pytest would collect it
from readme import joined, readme

NBS = ROOT / "nbs"
LIBRARY = sorted(path for path in NBS.glob("*.ipynb") if re.match(r"\d", path.name))
WORKERS = sorted((NBS / "workers").glob("*.ipynb"))  # exported like the library, run by an engine's Python
RUNS = sorted((NBS / "runs").glob("*.ipynb"))
TUTORIALS = sorted((NBS / "tutorials").glob("*.ipynb"))
MODULES = {re.sub(r"^\d+[a-z]*_", "", path.stem): path.stem for path in LIBRARY}
DIRECTIVE = re.compile(r"^#\s*\|\s*(\S+)(.*)$", re.M)
MACHINE_PATH = re.compile(r"(?<![\w.$])/(?:work|root|home|Users)/\w+")
LONGEST_CELL = 40


def cells_of(path: Path) -> list[dict]:
    "Cells of a notebook with their source as one string and their directives' names."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        cell["source"] = joined(cell["source"])
        cell["directives"] = {name.rstrip(":") for name, _ in DIRECTIVE.findall(cell["source"])} if cell["cell_type"] == "code" else set()
    return cells


def code_of(cell: dict) -> str:
    "Python of a cell, without notebook magics."
    return "\n".join(line for line in cell["source"].split("\n") if not line.startswith(("%", "!")))


def exported(path: Path) -> list[dict]:
    "Cells that become the package."
    return [cell for cell in cells_of(path) if cell["directives"] & {"export", "exports", "exporti"}]


def imports(code: str) -> list[tuple[str, str]]:
    "Modules and names that a piece of code imports, wherever it does."
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
    return found


def by_name(paths: list[Path]):
    "One test a notebook, named after it."
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@by_name(LIBRARY + WORKERS)
def test_runs(path):
    skip = get_config(path=ROOT).tst_flags.split()
    passed, _ = run_nb(path, skip_flags=skip, basepath=ROOT)
    assert passed, f"a cell failed (captured stderr); alone: nbdev_test --n_workers 0 --path {path.relative_to(ROOT)}"


@by_name(LIBRARY + WORKERS + RUNS + TUTORIALS)
def test_opens_with_title_and_sentence(path):
    first = cells_of(path)[0]
    assert first["cell_type"] == "markdown" and re.match(r"# \S.*\n+> \S", first["source"]), "cell 1 is `# Title` and `> one sentence`"


@by_name(LIBRARY)
def test_defines_its_module(path):
    module = re.sub(r"^\d+[a-z]*_", "", path.stem)
    names = [text for cell in cells_of(path) for text in re.findall(r"^#\s*\|\s*default_exp\s+(\S+)", cell["source"], re.M)]
    assert names == [module], f"{path.name} exports to {names}; expected ['{module}'] as its name says"


@by_name(WORKERS)
def test_worker_stands_alone(path):
    names = [text for cell in cells_of(path) for text in re.findall(r"^#\s*\|\s*default_exp\s+(\S+)", cell["source"], re.M)]
    assert len(names) == 1 and names[0].startswith("workers.") and names[0].endswith(f".{path.stem}"), names
    used = {module.split(".")[0] for cell in exported(path) for module, _ in imports(code_of(cell))}
    assert not used & {"k2eagle", "nbdev", "fastcore", "pandas"}, "an engine's environment has none of these"


@by_name(LIBRARY + WORKERS)
def test_exported_cells_are_short(path):
    long = {cell["source"].split("\n")[1]: n for cell in exported(path) if (n := cell["source"].count("\n") + 1) > LONGEST_CELL}
    assert not long, f"split these cells, {LONGEST_CELL} lines at most: {long}"


@by_name(LIBRARY)
def test_imports_by_name_and_downwards(path):
    own = path.stem
    for cell in cells_of(path):
        if cell["cell_type"] != "code":
            continue
        for module, name in imports(code_of(cell)):
            assert name != "*", f"star import of {module}: name what is used"
            used = name if module in ("k2eagle", ".") else module.removeprefix("k2eagle.").lstrip(".")
            if module.startswith(("k2eagle", ".")) and used in MODULES:
                assert MODULES[used] <= own, f"imports k2eagle.{used} ({MODULES[used]}), which comes later"


@by_name(LIBRARY + WORKERS)
def test_exported_code_needs_no_notebook_tooling(path):
    used = {module.split(".")[0] for cell in exported(path) for module, _ in imports(code_of(cell))}
    assert not used & {"nbdev", "fastcore", "execnb"}, "exported code runs where these are absent"


@by_name(LIBRARY + WORKERS)
def test_shows_tests_and_prose(path):
    cells = cells_of(path)
    shown = [cell for cell in cells if cell["cell_type"] == "code" and not cell["directives"] & {"default_exp", "hide"}]
    tests = [cell for cell in shown if "export" not in cell["directives"] and re.search(r"\btest_\w+\(|^\s*assert\b", cell["source"], re.M)]
    prose = [cell for cell in cells if cell["cell_type"] == "markdown"]
    assert tests, "no visible test"
    assert 2 * len(prose) >= len(shown), f"{len(prose)} prose cells for {len(shown)} code cells; expected one for two"


@by_name(LIBRARY + WORKERS + RUNS + TUTORIALS + [NBS / "index.ipynb"])
def test_names_no_machine(path):
    text = path.read_text(encoding="utf-8")
    outputs = json.dumps([cell.get("outputs", []) for cell in cells_of(path)])
    assert not MACHINE_PATH.findall(text) and not re.findall(r"(?<![\w.])/tmp/\w+", outputs)


@by_name(RUNS)
def test_run_notebook_is_a_template(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    tagged = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1, "exactly one cell is tagged `parameters`, for papermill"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "results belong in outputs/"
    for line in filter(None, joined(tagged[0]["source"]).split("\n")):
        assert line.startswith("#") or re.match(r"\w+: [^=]+ = .+  # .+", line), f"{line!r}: expected `name: type = default  # meaning`"


def nbdev(command: str, folder: Path) -> None:
    "Run an nbdev command in a copy of the repository."
    tool = Path(sys.executable).with_name(command)
    env = {**os.environ, "JUPYTER_DATA_DIR": str(folder / "jupyter"), "PYTHONPATH": str(folder)}
    env.pop("IN_TEST", None)  # the notebook runner sets it, and nbdev_export then does nothing
    done = subprocess.run([tool], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def differing(folder: Path, name: str, pattern: str) -> list[str]:
    "Files of the clone's folder `name` that the copy has otherwise, or only one of the two has."
    skip = ("__pycache__", ".ipynb_checkpoints")
    names = {path.relative_to(base).as_posix() for base in (ROOT, folder) for path in (base / name).rglob(pattern) if not set(skip) & set(path.parts)}
    read = lambda path: path.read_text(encoding="utf-8") if path.exists() else None
    return sorted(item for item in names if read(ROOT / item) != read(folder / item))


def test_package_is_what_the_notebooks_export(working_copy):
    for module in (working_copy / "k2eagle").rglob("*.py"):
        if module.name != "__init__.py":
            module.unlink()
    nbdev("nbdev_export", working_copy)
    assert not differing(working_copy, "k2eagle", "*.py"), "run nbdev_export and commit; k2eagle/ is never edited by hand"


def test_notebooks_are_clean(working_copy):
    path = working_copy / "nbs" / LIBRARY[0].name
    path.write_text(path.read_text(encoding="utf-8").replace('"execution_count": null', '"execution_count": 7'), encoding="utf-8")
    nbdev("nbdev_clean", working_copy)
    assert not differing(working_copy, "nbs", "*.ipynb"), "run nbdev_clean and commit"


def test_readme_is_the_index_notebook():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme(), "run python tools/readme.py and commit"
