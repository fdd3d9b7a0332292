"Shared by all tests: where the repository is, and an environment in which nothing is downloaded or drawn on a screen."
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def root() -> Path:
    "The clone."
    return ROOT


@pytest.fixture(scope="session")
def working_copy(tmp_path_factory) -> Path:
    "A copy of what nbdev reads and writes, which a test may change."
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "settings.ini", folder)
    unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("nbs", "k2eagle"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    return folder


@pytest.fixture(scope="session")
def chromium() -> str:
    "A browser to look at pages with; without one the test is skipped."
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or pytest.skip("needs chromium on PATH (Debian: apt install chromium)")


@pytest.fixture(scope="session")
def engine_python():
    "A function that gives an engine's interpreter; without one, its CPU environment is made first."
    from k2eagle import engines

    def find(engine: str) -> Path:
        if not os.environ.get(engines.RECIPES[engine].variable):
            engines.setup(engine)
        return engines.python(engine)

    return find


def pytest_collection_modifyitems(items):
    "Many engine starts take long: the exhaustive ones run where they are asked for."
    if not os.environ.get("K2EAGLE_EXHAUSTIVE"):
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="needs K2EAGLE_EXHAUSTIVE=1, and some minutes more"))
