"Parts of published packages, unpacked for a test to read."
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def published(requirement: str, member: str, folder: Path) -> Path:
    "Unpack the files of a package whose names match; without an index the test is skipped."
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--only-binary=:all:", requirement, "-d", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        pytest.skip(f"needs {requirement} from a package index")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "site", [name for name in opened.namelist() if re.match(member, name)])
    return folder / "site"
