"""The run notebooks that start engines: capture, and the three-way diff of transformers, vLLM and SGLang.

Run: pytest tests/test_engine_runs.py (about 5 minutes)
"""
import pytest

from k2eagle import capture, runs, text
from k2eagle.files import read_json, write_json


def test_capture_run_reports_what_it_stored(tmp_path):
    folder = runs.run("capture", tmp_path / "capture", documents=4, max_new_tokens=8, boundaries=[2, 3, 15])
    results = runs.read_results(folder)
    assert results["store"]["engine"] == "hf" and results["store"]["boundaries"] == [2, 3, 15]
    assert list(results["norms"].boundary.astype(str)) == ["2", "3", "15", "last"]
    assert (folder / "norms.png").stat().st_size and (folder / "norms.svg").stat().st_size


def test_diff_of_three_engines_finds_agreement(engine_python, tmp_path):
    "Real engines on the default target: noise, and not one structural finding."
    engine_python("vllm"), engine_python("sglang")
    folder = runs.run("diff", tmp_path / "diff", documents=10, max_new_tokens=16)
    results = runs.read_results(folder)
    findings, boundaries = results["findings"], results["boundaries"]
    assert "error" not in set(findings.severity), findings.to_string()
    assert set(boundaries.source) == {"vllm", "sglang"} and set(boundaries.boundary.astype(str)) == {"2", "15", "27", "last"}
    assert boundaries.rel_l2.between(1e-4, 0.05).all(), boundaries.to_string()
    for engine in ("vllm", "sglang"):
        assert "hold the same hidden states to within noise" in results["verdicts"][engine]
    for name in ("boundaries", "map_vllm", "map_sglang"):
        assert (folder / f"{name}.png").stat().st_size


def test_another_batch_shape_is_agreement_and_bad_sides_start_nothing(tmp_path):
    folder = runs.run("diff", tmp_path / "diff", sides=["hf", "hf:batch_tokens=1"], documents=6, max_new_tokens=12)
    assert "error" not in set(runs.read_results(folder)["findings"].severity)
    with pytest.raises(runs.RunError, match="neither a store nor an engine"):
        runs.run("diff", tmp_path / "typo", sides=["hf", "vlm"])
    with pytest.raises(runs.ParameterError):
        runs.run("diff", tmp_path / "none", documents=0)


def test_states_of_the_wrong_layers_are_told_by_name(tmp_path):
    "The campaign's fault: one side captured every layer one too far, and says nothing of it."
    samples = capture.answer("default", text.prompts(6, "heldout"), tmp_path / "answers", max_new_tokens=12)
    for name, boundaries in (("right", (2, 15, 27)), ("wrong", (3, 16, 28))):
        capture.capture("default", samples, tmp_path / name, boundaries=boundaries, answers={"temperature": 0.0})
    manifest = tmp_path / "wrong" / "manifest.json"
    write_json(manifest, {**read_json(manifest), "boundaries": [2, 15, 27]})
    results = runs.read_results(runs.run("diff", tmp_path / "diff", sides=[str(tmp_path / "right"), str(tmp_path / "wrong")]))
    top = results["findings"].iloc[0]
    assert (top.code, top.severity) == ("layer-shift", "error") and "+1" in top.message, top
    assert "do not hold the same hidden states" in next(words for side, words in results["verdicts"].items() if side.endswith("wrong"))
