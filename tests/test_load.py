"""The load generator against a server with known times, and beside vLLM's own tool on a real one.

Run: pytest tests/test_load.py (about half a minute without the engine, a minute more with it)
"""
import json
import math

import pytest
from engine_server import running
from fake_stream import serving
from k2eagle import load, targets
from k2eagle.jobs import EngineError
from k2eagle.load import Load, measure
from record_benchlogs import SERVE, tool

PROMPTS = load.random_prompts(64, 8, 1000)


def codes(measured) -> set:
    return {finding.code for finding in measured.findings}


def test_known_times_are_measured():
    with serving(cut_tcp=True, empty=2) as url:
        got = measure(url, Load(PROMPTS, 16, concurrency=2, max_tokens=11))
    row = got.row
    assert (row["requests"], row["failed"], row["asked"], row["engine"], row["engine_version"]) == (16, 0, 16, "vllm", "0.32.0")
    assert row["ttft_ms_median"] == pytest.approx(50, abs=10) and row["tpot_ms_median"] == pytest.approx(20, abs=1)
    assert row["e2e_ms_median"] == pytest.approx(250, abs=12) and row["user_tok_s"] == pytest.approx(50, abs=3)
    assert row["output_tok_s"] == pytest.approx(2 * 11 / 0.25, rel=0.06) and row["concurrency_mean"] == pytest.approx(2, abs=0.1)
    assert (got.frame.output_tokens == 11).all() and (got.frame.chunks == 11).all(), "empty chunks are no tokens"
    assert "no-steady-window" not in codes(got) and got.frame.counted.sum() == row["counted"] in (13, 14)


def test_several_tokens_a_chunk_come_from_the_server_s_count_and_so_does_the_accept_length():
    with serving(step_tokens=3) as url:
        got = measure(url, Load(PROMPTS, 12, concurrency=2, max_tokens=16))
    assert got.row["tpot_ms_median"] == pytest.approx(20 / 3, abs=0.5) and got.row["itl_ms_median"] == pytest.approx(20, abs=1.5)
    assert got.row["accept_len"] == 3 and got.row["drafts"] == 12 * 5, "warm-up is outside the counters"
    assert got.row["num_draft"] == 2 and got.row["speculative"] and {"itl-per-chunk", "cache-not-flushed"} <= codes(got)
    assert "other-traffic" not in codes(got)


def test_native_sglang_counts_by_request():
    with serving(step_tokens=3, native=True) as url:
        got = measure(url, Load(PROMPTS, 12, concurrency=2, max_tokens=16), api="generate")
    assert got.row["accept_len"] == 3 and got.row["drafts"] == 5 * got.row["counted"]
    assert (got.row["max_running_requests"], got.row["cuda_graphs"], got.row["flushed"], got.row["num_draft"]) == (8, False, True, 3)
    assert got.row["tpot_ms_median"] == pytest.approx(20 / 3, abs=0.5)


@pytest.mark.parametrize("usage", ["final", "none"])
def test_tokens_are_the_server_s_or_unknown(usage):
    with serving(usage=usage) as url:
        got = measure(url, Load(PROMPTS, 8, concurrency=2, max_tokens=6))
    assert got.row["failed"] == 0
    if usage == "final":
        assert (got.frame.output_tokens == 6).all() and got.row["tpot_ms_median"] == pytest.approx(20, abs=1.5)
    else:
        assert math.isnan(got.row["output_tok_s"]) and "tokens-not-told" in codes(got)


def test_open_loop_keeps_its_rate_and_counts_waiting_from_the_due_time():
    with serving(first_ms=20, step_ms=5) as url:
        got = measure(url, Load(PROMPTS, 60, request_rate=40, max_tokens=5))
    assert got.row["failed"] == 0 and got.row["ttft_ms_median"] == pytest.approx(20, abs=8)
    assert got.frame.sent_s.max() == pytest.approx(load.due_times(Load(PROMPTS, 60, request_rate=40))[-1] - load.due_times(Load(PROMPTS, 60, request_rate=40))[0], rel=0.05)
    assert "queue-grows" not in codes(got) and "client-late" not in codes(got)


@pytest.mark.parametrize(("way", "reason"), [(dict(fail_every=4), "HTTP 500: no room"), (dict(cut_every=4), "after 2 chunks")])
def test_failures_are_counted_and_the_rest_is_measured(way, reason):
    with serving(**way) as url:
        got = measure(url, Load(PROMPTS, 16, concurrency=2, max_tokens=5, warmup=0))
    assert (got.row["requests"], got.row["failed"]) == (12, 4) and "failed-requests" in codes(got)
    assert got.frame.error.dropna().str.contains(reason).all() and got.row["tpot_ms_median"] == pytest.approx(20, abs=5)


def test_a_server_that_dies_gives_a_partial_result():
    with serving(die_after=8) as url:
        got = measure(url, Load(PROMPTS, 40, concurrency=2, max_tokens=5, warmup=0))
    assert got.row["requests"] + got.row["failed"] == 40 and 6 <= got.row["requests"] <= 8
    assert got.findings[0].code == "server-gone" and "acceptance-unknown" in codes(got)
    assert math.isnan(got.row["accept_len"]) and got.row["tpot_ms_median"] == pytest.approx(20, abs=5)


def test_a_server_that_is_down_or_always_fails_is_said_before_the_run():
    with pytest.raises(EngineError, match="is the server up"):
        measure("http://127.0.0.1:9", Load(PROMPTS, 4, concurrency=1))
    with serving(fail_every=1) as url, pytest.raises(EngineError, match="HTTP 500"):
        measure(url, Load(PROMPTS, 4, concurrency=1))


def test_slow_answers_time_out_and_short_ones_are_named():
    with serving(slow_every=4, ignore_length=6) as url:
        got = measure(url, Load(PROMPTS, 8, concurrency=2, max_tokens=9, warmup=0, timeout_s=0.35))
    assert got.row["failed"] == 2 and got.frame.error.dropna().str.contains("within 0.35 s").all() and "length-not-kept" in codes(got)


def test_client_costs_little_at_64_streams():
    from k2eagle.servers import call
    with serving(first_ms=100, step_ms=40) as url:
        got = measure(url, Load(load.random_prompts(192, 64, 1000), 192, concurrency=64, max_tokens=50, warmup=0))
        server = [1e3 * lasted for lasted in call(url, "/lasted")]
    cost = got.frame.e2e_ms.mean() / (sum(server) / len(server)) - 1
    print(f"64 streams, {64 * 1000 / 40:.0f} chunks/s: client {100 * cost:.2f} % above the server's own times")
    assert got.row["failed"] == 0 and cost < 0.02


def test_vllm_beside_its_own_tool(engine_python, tmp_path, monkeypatch):
    engine_python("vllm")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with running("vllm", tmp_path, "--dtype", "bfloat16") as url:
        asked = Load(load.random_prompts(16, 32, 40000), 16, concurrency=2, max_tokens=24)
        ours = measure(url, asked).row
        tool("vllm", "-c", SERVE, "--base-url", url, "--model", str(targets.default_target()), "--dataset-name", "random", "--random-input-len", "32",
             "--random-output-len", "24", "--num-prompts", "16", "--max-concurrency", "2", "--ignore-eos", "--temperature", "0", "--save-result", "--result-dir", str(tmp_path),
             "--result-filename", "result.json", "--disable-tqdm", folder=tmp_path)
        again = measure(url, asked).row
    theirs = json.loads((tmp_path / "result.json").read_text())
    assert (ours["requests"], ours["failed"], ours["flushed"], ours["speculative"]) == (16, 0, True, False)
    assert ours["kv_tokens"] > 0 and (ours["engine"], ours["cuda_graphs"]) == ("vllm", False) and ours["max_running_requests"] > 0
    assert theirs["total_output_tokens"] == 16 * 24
    for name, measured, other in (("output tok/s", "whole_output_tok_s", "output_throughput"), ("TPOT", "tpot_ms_median", "median_tpot_ms"), ("TTFT", "ttft_ms_median", "median_ttft_ms")):
        print(f"{name}: {ours[measured]:.2f}, {again[measured]:.2f}; vllm bench serve {theirs[other]:.2f}")
    # between two runs of ours a shared machine itself differs by this much; benchmarks on a quiet one are held to 3 %
    assert (ours["whole_output_tok_s"] + again["whole_output_tok_s"]) / 2 == pytest.approx(theirs["output_throughput"], rel=0.3)
