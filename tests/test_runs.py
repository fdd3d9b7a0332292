"""The runner on small notebooks in a repository made for each test: refusals, execution, failure, record, exit codes.

Run: pytest tests/test_runs.py
"""
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from k2eagle import runs

PARAMETERS = '''
num_draft: int = 3            # draft tokens proposed a step
learning_rate: float = 1e-3   # peak learning rate
engine: str = "hf"            # engine that produced the hidden states
verify: bool = False          # check the store first?
boundaries: list[int] | None = None  # aux boundaries; None = the default
target: str = "default"       # model path
out_dir: str = "outputs/toy"  # folder for the results
'''.strip()
BEGIN = '''
import pandas as pd
from k2eagle import runs
run = runs.begin("toy", globals())
'''.strip()
WRITE = 'frame = run.table("lengths", pd.DataFrame({"ceiling": [num_draft + 1], "rate": [learning_rate]}))'
FINISH = 'run.record("verdict", {"engine": engine, "boundaries": boundaries})\nrun.finish()'


def write_notebook(path, *cells, parameters=PARAMETERS):
    tagged = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    cells = [new_markdown_cell("# Toy"), tagged, *(new_code_cell(cell) for cell in cells)]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    return path


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").write_text("[DEFAULT]\n")
    write_notebook(tmp_path / "nbs" / "runs" / "toy.ipynb", BEGIN, WRITE, FINISH)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_kernel(monkeypatch):
    def started(*args, **kwargs):
        pytest.fail("a kernel was about to start")
    monkeypatch.setattr(papermill, "execute_notebook", started)


@pytest.mark.parametrize("given, message", [
    ({"num_drft": 5}, "unknown parameter num_drft; did you mean num_draft? known: num_draft, learning_rate"),
    ({"num_draft": "abc"}, "num_draft: seen 'abc'; expected int >= 1"),
    ({"num_draft": "2.5"}, "expected int >= 1"),
    ({"num_draft": True}, "num_draft: seen True; expected int >= 1"),
    ({"num_draft": 0}, "num_draft: seen 0; expected int >= 1"),
    ({"num_draft": None}, "expected int >= 1"),
    ({"learning_rate": 0}, "expected float > 0"),
    ({"learning_rate": "inf"}, "expected float > 0"),
    ({"engine": "tgi"}, "engine: seen 'tgi'; expected one of hf, vllm, sglang"),
    ({"verify": 1}, "verify: seen 1; expected bool"),
    ({"verify": "perhaps"}, "expected bool"),
    ({"boundaries": [2, -1]}, "expected list[int], each >= 0, or None"),
    ({"boundaries": [True]}, "expected list[int], each >= 0, or None"),
    ({"target": 7}, "target: seen 7; expected str"),
])
def test_bad_parameters_are_refused_before_a_kernel_starts(repository, no_kernel, given, message):
    with pytest.raises(runs.ParameterError) as caught:
        runs.run("toy", **given)
    assert message in str(caught.value)
    assert not (repository / "outputs").exists()


@pytest.mark.parametrize("given, name, value", [
    ("4", "num_draft", 4), ("1e-3", "learning_rate", 1e-3), ("1", "learning_rate", 1.0), ("true", "verify", True),
    ("2,15,27", "boundaries", [2, 15, 27]), ("[2, 15]", "boundaries", [2, 15]), ("none", "boundaries", None),
    ("7", "target", "7"), ("none", "target", "none"), ("sglang", "engine", "sglang"),
])
def test_words_of_a_command_line_become_values(repository, given, name, value):
    found = runs.check(runs.parameters("nbs/runs/toy.ipynb"), {name: given})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("cell, message", [
    ("steps: int = 3", "parameter steps has no comment"),
    ("steps = 3  # training steps", "expected `name: type = literal  # help`"),
    ("import os", "expected `name: type = literal  # help`"),
    ("steps: int = 3 * count  # training steps", "expected a literal"),
    ("steps: Path = 3  # training steps", "has type `Path`"),
    ("steps: int | str = 3  # training steps", "has type `int | str`"),
    ("steps: int = (3  # training steps", "is not Python"),
])
def test_malformed_parameters_cells_are_named(repository, cell, message):
    notebook = write_notebook(repository / "bad.ipynb", parameters=cell)
    with pytest.raises(ValueError) as caught:
        runs.schema(notebook)
    assert message in str(caught.value)


def test_a_bad_default_is_refused_too(repository, no_kernel):
    write_notebook(repository / "nbs" / "runs" / "bad.ipynb", BEGIN,
                   parameters='num_draft: int = 0  # drafts\nout_dir: str = "outputs/bad"  # folder')
    with pytest.raises(runs.ParameterError, match="num_draft: seen 0"):
        runs.run("bad")


@pytest.mark.parametrize("cells", [0, 2])
def test_exactly_one_cell_is_tagged(repository, cells):
    tagged = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}) for _ in range(cells)]
    nbformat.write(new_notebook(cells=tagged), repository / "odd.ipynb")
    with pytest.raises(ValueError, match=f"seen {cells} cells tagged parameters"):
        runs.schema("odd.ipynb")


def test_notebooks_that_cannot_be_run(repository, no_kernel):
    with pytest.raises(runs.ParameterError, match="did you mean toy"):
        runs.run("tyo")
    with pytest.raises(runs.ParameterError, match="no run notebook"):
        runs.run("elsewhere/toy.ipynb")
    write_notebook(repository / "nbs" / "runs" / "nowhere.ipynb", parameters="seed: int = 0  # seed")
    with pytest.raises(runs.ParameterError, match="no parameter out_dir"):
        runs.run("nowhere")
    (repository / "text.ipynb").write_text("not a notebook")
    with pytest.raises(ValueError, match="text.ipynb is not JSON"):
        runs.run("text.ipynb")


def test_a_run_leaves_results_record_and_notebook(repository):
    folder = runs.run("toy", num_draft="4", boundaries="2,15")
    assert folder == repository / "outputs" / "toy"
    assert {path.name for path in folder.iterdir()} == {"toy.ipynb", "provenance.json", "lengths.csv", "verdict.json"}
    results = runs.read_results(folder)
    assert results["lengths"].ceiling.tolist() == [5]  # the parameter took effect
    assert results["verdict"] == {"engine": "hf", "boundaries": [2, 15]}
    record = results["provenance"]
    assert record["run"] == "toy" and record["finished"] and record["wall_s"] >= 0
    assert record["parameters"] == {"num_draft": 4, "learning_rate": 1e-3, "engine": "hf", "verify": False,
                                    "boundaries": [2, 15], "target": "default"}
    assert record["command"] == "python -m k2eagle.runs toy -p num_draft 4 -p boundaries '[2, 15]'"
    assert record["results"] == ["lengths.csv", "verdict.json"]
    assert "k2eagle" in record["packages"] and record["python"] and record["time"]
    for path in folder.iterdir():
        text = path.read_text()
        for machine in (str(repository), str(Path.home()) + "/", sys.prefix):
            assert machine not in text, f"{machine} in {path.name}"
    executed = json.loads((folder / "toy.ipynb").read_text())
    assert executed["metadata"]["papermill"]["input_path"] == "nbs/runs/toy.ipynb"

    with pytest.raises(runs.ParameterError, match="num_draft 4 -> 5.*--fresh"):
        runs.run("toy", num_draft=5, boundaries="2,15")
    (folder / "mine.txt").write_text("kept")
    (folder / "work").mkdir()
    runs.run("toy", num_draft=5, fresh=True)
    assert runs.read_results(folder)["lengths"].ceiling.tolist() == [6]
    assert (folder / "mine.txt").exists() and not (folder / "work").exists()
    (folder / "lengths.csv").unlink()
    with pytest.raises(FileNotFoundError, match="lengths.csv is listed"):
        runs.read_results(folder)


def test_a_failing_cell_gives_a_short_cause_and_keeps_results(repository, capfd):
    write_notebook(repository / "nbs" / "runs" / "toy.ipynb", BEGIN, WRITE, "# too much\nraise MemoryError('42 GB asked')")
    with pytest.raises(runs.RunError) as caught:
        runs.run("toy")
    message = str(caught.value)
    assert "MemoryError: 42 GB asked" in message and "# too much" in message and "outputs/toy/toy.ipynb" in message
    assert len(message.splitlines()) <= 4 and caught.value.__suppress_context__
    results = runs.read_results(repository / "outputs" / "toy")
    assert results["lengths"].ceiling.tolist() == [4] and results["provenance"]["finished"] is None
    assert runs.main(["toy"]) == 1
    err = capfd.readouterr().err
    assert "MemoryError: 42 GB asked" in err and "Traceback" not in err and len(err.splitlines()) <= 4


def test_a_killed_kernel_is_told(repository):
    write_notebook(repository / "nbs" / "runs" / "toy.ipynb", BEGIN, WRITE, "import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(runs.RunError, match="kernel died"):
        runs.run("toy")
    assert (repository / "outputs" / "toy" / "lengths.csv").is_file()


def test_a_notebook_without_finish_is_no_finished_run(repository):
    notebook = write_notebook(repository / "short.ipynb", "1 + 1")
    with pytest.raises(runs.RunError, match="without run.finish"):
        runs.run(notebook, out="outputs/short")


def test_plain_papermill_runs_and_refuses(repository):
    toy, executed = "nbs/runs/toy.ipynb", repository / "plain.ipynb"
    papermill.execute_notebook(toy, executed, {"num_draft": 7, "boundaries": "[2, 15]"}, kernel_name="python3",
                               progress_bar=False, cwd="nbs/runs")  # JupyterLab's working folder
    results = runs.read_results("outputs/toy")
    assert results["lengths"].ceiling.tolist() == [8]
    assert results["verdict"]["boundaries"] == [2, 15]  # the notebook's variable became a list
    wrong = {"num_drft": 7, "num_draft": 0}
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill.execute_notebook(toy, executed, wrong, kernel_name="python3", progress_bar=False)
    assert "unknown parameter num_drft; did you mean num_draft" in str(caught.value)
    assert "num_draft: seen 0; expected int >= 1" in str(caught.value)


def begin_toy(**changes):
    scope = {"num_draft": 3, "learning_rate": 1e-3, "engine": "hf", "verify": False, "boundaries": None,
             "target": "default", "out_dir": "outputs/toy"}
    return runs.begin("toy", {**scope, **changes})


def test_work_of_other_parameters_is_not_mixed_in(repository):
    (begin_toy().work / "store").mkdir()
    with pytest.raises(runs.ParameterError, match="num_draft 3 -> 5"):
        begin_toy(num_draft=5)
    assert (begin_toy().work / "store").is_dir()  # equal parameters resume


def test_a_failed_start_that_left_nothing_does_not_bind(repository):
    begin_toy(target="missing")
    assert begin_toy().provenance["parameters"]["target"] == "default"


def test_results_that_a_later_run_does_not_write_go(repository):
    first = begin_toy()
    first.record("old", {"x": 1})
    first.finish()
    second = begin_toy()
    second.record("new", {"x": 2})
    assert (second.folder / "old.json").is_file()  # a run that fails now keeps what was there
    second.finish()
    assert set(runs.read_results(second.folder)) == {"provenance", "new"} and not (second.folder / "old.json").exists()


def test_a_foreign_record_is_left_alone(repository):
    folder = repository / "outputs" / "toy"
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text('{"by": "another program"}')
    for fresh in (False, True):
        with pytest.raises(runs.ParameterError, match="no run's"):
            runs.run("toy", fresh=fresh)
    assert json.loads((folder / "provenance.json").read_text()) == {"by": "another program"}


def test_a_record_cannot_delete_outside_its_folder(repository):
    begin_toy().finish()
    precious = repository / "precious.csv"
    precious.write_text("a\n1\n")
    record = repository / "outputs" / "toy" / "provenance.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "results": ["../../precious.csv"]}))
    with pytest.raises(runs.ParameterError, match="results of toy, not of other"):
        runs._clear(record.parent, "other")  # --fresh never clears another notebook's folder
    runs._clear(record.parent, "toy")
    assert precious.is_file() and not record.exists()


def test_results_never_land_among_the_sources():
    with pytest.raises(runs.ParameterError, match="among the notebooks' sources"):
        runs.run("acceptance", out=runs.project_root() / "nbs" / "runs")


def test_figures_and_index_levels_are_kept(repository):
    import pandas as pd
    from k2eagle.plots import plot_training
    run = begin_toy()
    frame = run.table("history", pd.DataFrame({"loss": [2.0, 1.0]}, index=pd.Index([1, 2], name="step")))
    assert list(frame.columns) == ["step", "loss"]
    run.figure("history", plot_training(frame))
    run.finish()
    assert run.provenance["results"] == ["history.csv", "history.png", "history.svg"]


def test_the_command_runs_and_p_beats_f(repository):
    (repository / "params.yaml").write_text("num_draft: 6\nlearning_rate: 1e-4\n")  # YAML reads 1e-4 as text
    words = ["toy", "-f", "params.yaml", "-p", "num_draft", "2", "--out", "outputs/other"]
    done = subprocess.run([sys.executable, "-m", "k2eagle.runs", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == "toy finished; results in outputs/other\n"
    assert runs.read_results(repository / "outputs" / "other")["lengths"].iloc[0].tolist() == [3, 1e-4]


@pytest.mark.parametrize("words, message", [
    (["toy", "-p", "num_drft", "5"], "did you mean num_draft"), (["toy", "-p", "num_draft", "0"], "int >= 1"),
    (["tyo"], "did you mean toy"), (["toy", "-f", "absent.yaml"], "absent.yaml cannot be read"),
    (["toy", "-f", "settings.ini"], "expected lines like name: value"), (["toy", "-p", "out", "x"], "use --out"),
])
def test_bad_command_lines_end_with_2_and_a_line(repository, no_kernel, capsys, words, message):
    assert runs.main(words) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) <= 2 and "Traceback" not in err


def test_list_shows_parameters_with_help(repository, capsys):
    assert runs.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "toy\n" in out and "draft tokens proposed a step" in out and "int >= 1" in out
    assert runs.main([]) == 2


def test_import_is_light(repository):
    code = ("import sys, k2eagle.runs; heavy = {'torch', 'papermill', 'pydantic', 'pandas', 'matplotlib'} & set(sys.modules);"
            "assert not heavy, heavy; import k2eagle.plots; assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inputs_elsewhere_that_end_alike_are_told_apart(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "server.log").write_text("no log\n")
    given = [{"source": str(tmp_path / folder / "server.log"), "out_dir": "outputs/x"} for folder in ("one", "two")]
    first, second = map(runs._portable_values, given)
    assert first["source"].startswith("server.log (") and first != second
    monkeypatch.chdir(tmp_path)  # the kernel and whoever started it stand in different folders
    assert [runs._portable_values(one) for one in given] == [first, second]
    assert runs._portable_values({"source": str(runs.project_root() / "nbs" / "index.ipynb")}) == {"source": "nbs/index.ipynb"}
