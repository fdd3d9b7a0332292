"""The run notebooks that start engines: capture, and the three-way diff of transformers, vLLM and SGLang.

Run: pytest tests/test_engine_runs.py (about 5 minutes)
"""
import pytest

from k2eagle import runs


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
    assert {"vllm", "sglang"} <= set(results["verdicts"])
    for name in ("boundaries", "map_vllm", "map_sglang"):
        assert (folder / f"{name}.png").stat().st_size


def test_another_batch_shape_is_agreement_and_bad_sides_start_nothing(tmp_path):
    folder = runs.run("diff", tmp_path / "diff", sides=["hf", "hf:batch_tokens=1"], documents=6, max_new_tokens=12)
    assert "error" not in set(runs.read_results(folder)["findings"].severity)
    with pytest.raises(runs.RunError, match="neither a store nor an engine"):
        runs.run("diff", tmp_path / "typo", sides=["hf", "vlm"])
    with pytest.raises(runs.ParameterError):
        runs.run("diff", tmp_path / "none", documents=0)
