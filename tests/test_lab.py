"JupyterLab comes up on the k2eagle workspace, without news and without touching the user's settings."
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from conftest import ROOT

SECONDS = 90  # longest wait for the server on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    "Address of a JupyterLab that `make lab` would open, with the user's folders elsewhere."
    home = tmp_path_factory.mktemp("home")
    folders = {f"JUPYTER{name}_DIR": str(home / name.lower()) for name in ("_CONFIG", "_RUNTIME", "LAB_WORKSPACES", "LAB_SETTINGS")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    log = (home / "log").open("w")
    process = subprocess.Popen([sys.executable, ROOT / "tools" / "lab.py", *options], env={**os.environ, **folders}, stdout=log, stderr=log)
    try:
        yield wait_for(f"http://127.0.0.1:{port}/", process, home / "log"), home
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def wait_for(address: str, process, log) -> str:
    "Return the address once the server answers."
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            fetch(address + "api")
            return address
        except urllib.error.URLError:
            time.sleep(0.3)
    raise AssertionError(log.read_text()[-3000:])


def fetch(address: str) -> bytes:
    "Body of a page."
    with urllib.request.urlopen(address, timeout=30) as reply:
        return reply.read()


def test_workspace_has_the_index_and_the_run_notebooks(server):
    tabs = json.loads(fetch(server[0] + "lab/api/workspaces/k2eagle"))["data"]["layout-restorer:data"]["main"]["dock"]["widgets"]
    runs = sorted((ROOT / "nbs" / "runs").glob("*.ipynb"))
    assert tabs == ["notebook:nbs/index.ipynb", *(f"notebook:nbs/runs/{path.name}" for path in runs)]
    assert b"jupyterlab" in fetch(server[0] + "lab/workspaces/k2eagle").lower()


def test_news_is_off_and_user_settings_are_untouched(server):
    address, home = server
    plugin = json.loads(fetch(address + "lab/api/settings/@jupyterlab/apputils-extension:notification"))
    assert plugin["schema"]["properties"]["fetchNews"]["default"] == "false"
    assert not list((home / "lab_settings").rglob("*.jupyterlab-settings"))
