"""Open JupyterLab on the k2eagle workspace: the index and the run notebooks in tabs. Options are passed on to JupyterLab.

Settings and the workspace live inside .venv, so the user's own JupyterLab settings stay as they are and in force.
"""
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAB = Path(sys.prefix) / "share" / "jupyter" / "lab"
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
}


def workspace(notebooks: list[str]) -> dict:
    "Workspace with a tab for each notebook, the first in front."
    tabs = [f"notebook:{path}" for path in notebooks]
    layout = {
        "main": {"dock": {"type": "tab-area", "currentIndex": 0, "widgets": tabs}, "current": tabs[0]},
        "left": {"collapsed": False, "visible": True, "current": "filebrowser", "widgets": ["filebrowser", "running-sessions"]},
    }
    data = {tab: {"data": {"path": path, "factory": "Notebook"}} for tab, path in zip(tabs, notebooks)}
    return {"data": {"layout-restorer:data": layout, "file-browser-filebrowser:cwd": {"path": "nbs"}, **data}, "metadata": {"id": "k2eagle"}}


def prepare() -> Path:
    "Write the settings, and the workspace if there is none yet; returns the folder of workspaces."
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    settings = LAB / "settings" / "overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(OVERRIDES, indent=2), encoding="utf-8")
    folder = Path(os.environ.get("JUPYTERLAB_WORKSPACES_DIR", LAB / "workspaces"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "nbs" / "runs").glob("*.ipynb"))
    manager = WorkspacesManager(str(folder))
    if not any(known["metadata"]["id"] == "k2eagle" for known in manager.list_workspaces()):
        manager.save("k2eagle", json.dumps(workspace(["nbs/index.ipynb", *runs])))
    return folder


if __name__ == "__main__":
    os.environ["JUPYTERLAB_WORKSPACES_DIR"] = str(prepare())
    options = [
        f"--ServerApp.root_dir={ROOT}",
        "--LabApp.default_url=/lab/workspaces/k2eagle",
        "--KernelManager.transport=ipc",  # kernels talk through files of this user, not through open ports
    ]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, *sys.argv[1:]])
