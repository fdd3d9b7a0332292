"""The default target end to end: conversions that broke are redone, two processes do not clash, pickle is refused."""

import os
import shutil
import subprocess
import sys

import pytest

from k2eagle.files import home, sha256_file
from k2eagle.targets import default_target, facts, resolve

PRINT_TARGET = "from k2eagle.targets import default_target; print(default_target())"


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """A home of its own that has the downloaded wheel, and the converted target as hard links."""
    default_target()
    shared = home()
    monkeypatch.setenv("K2EAGLE_HOME", str(tmp_path))
    for part in ("downloads", "targets"):
        if (shared / part).is_dir():  # no downloads where the package is installed
            shutil.copytree(shared / part, tmp_path / part, copy_function=os.link)
    return tmp_path


def test_whole_target_is_left_alone(own_home):
    weights = own_home / "targets" / "smollm2-135m-instruct" / "model.safetensors"
    before = weights.stat()
    assert default_target() / "model.safetensors" == weights
    assert weights.stat().st_ino == before.st_ino


def test_cut_conversion_is_redone_by_two_processes_at_once(own_home):
    folder = own_home / "targets" / "smollm2-135m-instruct"
    weights = folder / "model.safetensors"
    expected = sha256_file(weights)
    weights.unlink()  # not truncated in place: the bytes are shared with the real cache
    weights.write_bytes(b"half a conversion")
    processes = [subprocess.Popen([sys.executable, "-c", PRINT_TARGET], stdout=subprocess.PIPE, text=True)
                 for _ in range(2)]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == [str(folder)] * 2
    assert sha256_file(weights) == expected
    assert not [path for path in folder.parent.iterdir() if ".making-" in path.name]
    assert facts("default").num_layers == 30


def test_pickle_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="only as pickle"):
        resolve(tmp_path)


def test_missing_path_is_named():
    with pytest.raises(FileNotFoundError, match="no target at nowhere/model"):
        facts("nowhere/model")
