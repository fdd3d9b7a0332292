"""Every tutorial, run with small settings: its story still holds.

Each check below reads what a tutorial printed. K2EAGLE_EXHAUSTIVE=1 also runs the tutorials as committed.

Run: pytest tests/test_tutorials.py (about 2 minutes a tutorial on two quiet cores)
"""
import ast
from pathlib import Path
from typing import Callable, NamedTuple

import nbformat
import papermill
import pytest
from conftest import ROOT

FOLDER = ROOT / "nbs" / "tutorials"


def claims(cells: list) -> dict:
    "The dict that a tutorial ends in."
    last = [cell for cell in cells if cell.cell_type == "code"][-1]
    return ast.literal_eval(last.outputs[-1]["data"]["text/plain"])


def printed(cells: list) -> str:
    "All that a tutorial printed."
    return "".join(output.text for cell in cells if cell.cell_type == "code" for output in cell.outputs if output.output_type == "stream")


def check_conventions(cells: list, parameters: dict):
    "Ids mean other layers, order and shifts are found, the right capture passes; more is asserted in the tutorial itself."
    said = " ".join(printed(cells).split())
    assert "the ids [2, 15, 27] are boundaries [2, 15, 27] in vLLM and [3, 16, 28] in SGLang" in said
    assert ("SGLang, id 2: boundary 2 in the list that begins with 0, boundary 3" in said) == parameters.get("mini_kimi", True)
    assert said.count("layer-shift: ") == 2 and said.count("aux-order: ") == 1 and "quantisation: the weights differ" in said
    assert "vllm 0.32.0 and sglang 0.5.23 hold the same hidden states to within noise" in said


def check_wrong_boundaries(cells: list, parameters: dict):
    "The shift is named first, gone after the repair, and costs accepted drafts; engines serve what was simulated."
    said = claims(cells)
    assert said["findings"][0] == "layer-shift" and not said["findings after the repair"]
    lengths, faults = said["accept length"], said["by fault"]
    assert lengths["ids translated"] > lengths["ids copied"] > 1
    assert abs(lengths["ids translated"] - lengths["trained on"]) < 0.05
    assert faults["no fault"] > faults["layer-shift +1"] > faults["channels permuted"]
    assert set(said["served"]) == ({"vLLM", "SGLang, ids copied", "SGLang, ids translated"} if parameters.get("served_prompts", 1) else set())
    assert not said["served apart from simulated"]


def check_twenty_five_percent(cells: list, parameters: dict):
    "An engine accepts nothing and old versions call it 25 %; the linter names the cause, and the repaired drafter does what was simulated."
    said = claims(cells)
    assert said["campaign"] == {"vLLM 0.16, either drafter": (1.45, 0.15), "SGLang 0.5.8/0.5.9, public drafter": (1.65, 0.217),
                                "SGLang 0.5.8/0.5.9, own drafter": (1.0, 0.0)}
    exported = said["as exported"]
    assert exported["accepted"] == 0 and exported["drafted"] > 500
    assert list(exported["printed"].values()) == ["1.00", "0.25", "0.25", "0.00", "0.0 %"]
    assert said["findings"] == ["d2t-absolute"] and not said["findings after the repair"] and said["same table"]
    assert set(said["served"]) == set(parameters.get("repaired_in", ("sglang", "vllm")))
    assert min(said["low"].values()) > 1 and not said["served apart from simulated"]
    assert abs(said["by the log"] - said["served"]["sglang"]) < 0.05


def check_phantom_hang(cells: list, parameters: dict):
    "A rule of silence kills the healthy servers; the watch calls none of them hung, and finds the stuck ones within a minute."
    said = claims(cells)
    assert len(said["ready"]) == 2 * len(parameters.get("engines", ("sglang", "vllm")))
    assert all(said["killed by the rule"].values())
    for name, hung in said["called hung"].items():
        assert hung == ("frozen" in name) != said["ready"][name]
    assert said["stuck for (s)"] and max(said["stuck for (s)"].values()) < 60


def check_campaign(cells: list, parameters: dict):
    "The report's numbers give these figures; what K vLLM had moves only vLLM's, and one pair gives no verdict."
    said, k = claims(cells), parameters.get("vllm_num_draft", 3)
    assert said["accept length"] == {"vLLM, either drafter": round(1 + 0.15 * k, 3), "SGLang, public drafter": 1.65, "SGLang, own drafter": 1.0}
    assert said["step cost"] == {"vLLM, either drafter": round((1 + 0.15 * k) / 0.66, 2), "SGLang, public drafter": 1.67, "SGLang, own drafter": 1.56}
    assert said["one pair"] == "not known" and said["break-even"] == [1.56, 1.67] and said["level with plain vLLM"] == [2.02, 2.31]
    assert said["speedup"] == {2.0: [1.16, 1.28], 3.0: [1.58, 1.92]} and said["Amdahl"] == [2.06, 1.94]
    assert said["share of the limit"]["bounds"] == [0, 0.96] and said["peak at most"] == [2264, 2370]
    models = said["share of the limit"]["models"]
    assert len(models) == 3 and min(models) < 0.05 and 0.6 < max(models) < 0.7  # the models that fit do not agree: the story's point
    assert all(length > 3 for length in said["needed at 128"]) and all(20 <= batch < 100 for batch in said["pays up to"][3.0])
    assert 900 < said["lifted"][0] < said["lifted"][1] < 1200 and len(said["verdicts"]) == 10


class Tutorial(NamedTuple):
    "How a tutorial is run small, and what must hold then."
    parameters: dict        # settings of its `parameters` cell
    engines: tuple          # engines that it starts with these settings
    check: Callable         # takes the executed cells, and the parameters given


TUTORIALS = {
    "conventions": Tutorial(dict(documents=4, max_new_tokens=12, mini_kimi=False), ("vllm", "sglang"), check_conventions),
    "wrong_boundaries": Tutorial(dict(train_prompts=64, heldout_prompts=16, answer_tokens=40, steps=80, batch_tokens=512,
                                      learn_from="hf", served_prompts=0), ("sglang",), check_wrong_boundaries),
    "twenty_five_percent": Tutorial(dict(train_prompts=24, heldout_prompts=8, answer_tokens=32, steps=40, batch_tokens=512,
                                         draft_vocab_size=1024, served_prompts=8, repaired_in=["sglang"], log_steps=4),
                                    ("sglang",), check_twenty_five_percent),
    "phantom_hang": Tutorial(dict(engines=["vllm"], rule_s=30), (), check_phantom_hang),
    "campaign": Tutorial(dict(vllm_num_draft=5), (), check_campaign),
}
each_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def execute(name: str, parameters: dict, folder: Path):
    "Run a tutorial and return its cells."
    return papermill.execute_notebook(FOLDER / f"{name}.ipynb", folder / f"{name}.ipynb", parameters, cwd=folder, kernel_name="python3",
                                      progress_bar=False).cells


def test_every_tutorial_is_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(TUTORIALS)


@each_tutorial
def test_committed_outputs_tell_the_story(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
    assert not [output.evalue for cell in cells if cell.cell_type == "code" for output in cell.outputs if output.output_type == "error"]
    assert any("parameters" in cell.metadata.get("tags", []) for cell in cells)
    TUTORIALS[name].check(cells, {})


@each_tutorial
def test_story_holds_small(name, engine_python, tmp_path):
    for engine in TUTORIALS[name].engines:
        engine_python(engine)
    parameters = TUTORIALS[name].parameters
    TUTORIALS[name].check(execute(name, parameters, tmp_path), parameters)


@pytest.mark.exhaustive
@each_tutorial
def test_story_holds_as_committed(name, engine_python, tmp_path):
    for engine in ("vllm", "sglang"):
        engine_python(engine)
    TUTORIALS[name].check(execute(name, {}, tmp_path), {})
