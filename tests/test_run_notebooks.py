"""Every notebook under nbs/runs keeps the form that papermill, JupyterLab and the runner rely on.

Run: pytest tests/test_run_notebooks.py
"""
import ast
from pathlib import Path

import nbformat
import pytest

from k2eagle import runs

FOLDER = Path(__file__).resolve().parent.parent / "nbs" / "runs"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FREE = {"str", "str | None", "bool", "dict", "list[str]", "list[str] | None"}  # paths, free text and switches

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_run_notebooks():
    assert {"pipeline", "train", "acceptance"} <= {path.stem for path in NOTEBOOKS}


def code_cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


@each_notebook
def test_one_tagged_cell_and_the_common_kernel(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    tags = [tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    assert tags.count("parameters") == 1
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in notebook.metadata


@each_notebook
def test_no_outputs_are_committed(path):
    assert [cell.id for cell in code_cells(path) if cell.outputs or cell.execution_count] == []


@each_notebook
def test_no_logic_before_the_parameters(path):
    first = code_cells(path)[0]
    assert "parameters" in first.metadata.get("tags", []), "the parameters cell is the first code cell"


@each_notebook
def test_parameters_are_annotated_commented_and_limited(path):
    known = runs.parameters(path)  # raises on a missing annotation or comment
    assert runs.schema(path)()     # the defaults pass their own limits
    loose = [one.name for one in known if one.name not in runs.RULES and one.annotation not in FREE]
    assert not loose, f"{loose} have no limits; add them to RULES in nbs/90_runs.ipynb"
    assert next(one.default for one in known if one.name == "out_dir") == f"outputs/{path.stem}"


@each_notebook
def test_the_run_begins_with_its_own_name_and_finishes(path):
    calls = [ast.unparse(node) for cell in code_cells(path) for node in ast.walk(ast.parse(cell.source))
             if isinstance(node, ast.Call)]
    assert f"runs.begin({path.stem!r}, globals())" in calls
    assert "run.finish()" in calls


@each_notebook
def test_cells_are_short(path):
    longest = max(len(cell.source.splitlines()) for cell in code_cells(path))
    functions = [node for cell in code_cells(path) for node in ast.walk(ast.parse(cell.source))
                 if isinstance(node, ast.FunctionDef)]
    assert longest <= 40
    assert all(node.end_lineno - node.lineno < 5 for node in functions), "move long functions to a library notebook"
