"""The run notebook about logs: one convention out of each, and a plain refusal of what is no log.

Run: pytest tests/test_log_run.py (half a minute)
"""
import pytest

from k2eagle import runs

SGLANG_058 = "".join(f"[2026-01-04 01:0{minute}:22 TP0] Decode batch, #running-req: 1, #token: 200, token usage: 0.01, accept len: 1.00, accept rate: 0.25, "
                     "cuda graph: True, gen throughput (token/s): 40.80, #queue-req: 0\n" for minute in range(5))
VLLM = "".join(f"(EngineCore_0 pid=7) INFO 01-04 01:0{minute}:22 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 1.45, Accepted throughput: "
               f"15.00 tokens/s, Drafted throughput: 100.00 tokens/s, Accepted: {accepted} tokens, Drafted: 1000 tokens, Per-position acceptance "
               "rate: 0.300, 0.105, 0.045, Avg Draft acceptance rate: 15.0%\n" for minute, accepted in enumerate((150, 150, 150)))


@pytest.mark.parametrize(("log", "accept_len", "rate", "definition"), [
    (SGLANG_058, 1.0, 0.0, "sglang log rate 0.5.8"),  # the campaign's "rate 25 %": nothing was accepted
    (VLLM, 1.45, 0.15, "vllm rate"),
], ids=["sglang", "vllm"])
def test_a_log_becomes_one_convention(log, accept_len, rate, definition, tmp_path):
    (tmp_path / "server.log").write_text(log)
    runs.run("log", out=tmp_path / "out", source=str(tmp_path / "server.log"))
    results = runs.read_results(tmp_path / "out")
    assert results["report"]["definitions"] == [definition]
    row = results["accept_len"].iloc[0]
    assert row.accept_len == pytest.approx(accept_len, abs=0.01) and row["rate"] == pytest.approx(rate, abs=0.01)
    assert len(results["lines"]) == log.count("\n")
    assert (tmp_path / "out" / "over_time.png").stat().st_size > 5000


METRICS = "".join(f'vllm:spec_decode_num_{name} {value}\n' for name, value in (
    ('drafts_total{engine="0"}', 100.0), ('draft_tokens_total{engine="0"}', 300.0), ('accepted_tokens_total{engine="0"}', 65.0),
    *((f'accepted_tokens_per_pos_total{{engine="0",position="{place}"}}', value) for place, value in enumerate((41.0, 17.0, 7.0)))))


def test_a_metrics_page_is_read_where_it_is_no_log(tmp_path):
    (tmp_path / "metrics.txt").write_text(METRICS)
    runs.run("log", out=tmp_path / "out", source=str(tmp_path / "metrics.txt"))
    results = runs.read_results(tmp_path / "out")
    assert results["accept_len"].iloc[0].accept_len == pytest.approx(1.65) and results["positions"]["share"].tolist() == [0.41, 0.17, 0.07]


def test_two_engines_in_one_log_are_pooled_apart_and_only_one_is_an_estimate(tmp_path):
    (tmp_path / "both.log").write_text(SGLANG_058 + VLLM)
    runs.run("log", out=tmp_path / "out", source=str(tmp_path / "both.log"))
    pooled = runs.read_results(tmp_path / "out")["accept_len"].set_index("source").accept_len
    assert pooled.round(2).to_dict() == {"sglang (weighted by running requests)": 1.0, "vllm": 1.45}


def test_what_is_neither_log_nor_counters_is_refused_with_both_reasons(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing about drafts here\n")
    with pytest.raises(RuntimeError, match="as a log, .*as counters, "):
        runs.run("log", out=tmp_path / "out", source=str(tmp_path / "notes.txt"))


def test_lengths_that_no_run_can_have_are_no_idle_server(tmp_path):
    (tmp_path / "server.log").write_text(SGLANG_058.replace("accept len: 1.00", "accept len: 0.40"))
    runs.run("log", out=tmp_path / "out", source=str(tmp_path / "server.log"))
    (said,) = runs.read_results(tmp_path / "out")["report"]["verdict"]
    assert said.startswith("no acceptance: 5 lines have an accept length")
    assert not (tmp_path / "out" / "over_time.png").exists()  # an empty chart says nothing


def test_a_path_that_is_not_there_says_where_paths_start(tmp_path):
    with pytest.raises(RuntimeError, match=r"'not/there.log': no such file in .*, where relative paths start"):
        runs.run("log", out=tmp_path / "out", source="not/there.log")
