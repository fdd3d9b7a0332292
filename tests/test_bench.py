"""Sweeps through the run notebook: both real engines with and without a drafter, and servers that break, by URL.

Run: pytest tests/test_bench.py (about 5 minutes on two quiet cores, half a minute without the engines)
"""
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_stream import serving
from k2eagle import bench, capture, runs, text, train
from k2eagle.files import read_json

QUICK = dict(engines=[], repeats=2, concurrency=[1, 2], max_tokens=8, prompts=24, requests_each=4)
SLOW, FAST = dict(first_ms=5, step_ms=10, drafts=False), dict(first_ms=5, step_ms=10, step_tokens=2)


def bench_run(folder, **parameters) -> dict:
    return runs.read_results(runs.run("bench", folder, **{**QUICK, **parameters}))


def test_both_engines_with_and_without_a_drafter(engine_python, tmp_path):
    "A CI-sized sweep. What it says depends on the machine; that it is complete, fair and lossless in its counts does not."
    engine_python("vllm"), engine_python("sglang")
    learned = capture.capture("default", text.prompts(16, "train"), tmp_path / "train", max_new_tokens=32, batch_size=8)
    config = train.TrainConfig(steps=40, batch_tokens=512, eval_every=1000, save_every=1000)
    drafter = train.train(learned, tmp_path / "drafter", "default", config=config, draft_vocab_size=1024).folder / "drafter"
    began = time.monotonic()
    results = bench_run(tmp_path / "bench", drafter=str(drafter), engines=["sglang", "vllm"], concurrency=[1, 4], restart=False, max_tokens=24,
                        requests=8)
    print(f"4 configurations, 2 loads, 2 repeats: {time.monotonic() - began:.0f} s")
    frame, table, findings = results["results"], results["verdict"], results["findings"]
    assert len(frame) == 16 and not frame.failed.any() and results["report"]["left"] == 0, findings.to_string()
    drafting = frame[frame.speculative]
    assert set(drafting.config) == {"sglang K=3", "vllm K=3"} and (drafting.num_draft == 3).all() and drafting.accept_len.between(1, 4).all()
    assert (drafting.drafted == 3 * drafting.drafts).mean() > 0.9, drafting[["drafts", "drafted"]]  # a last step may draft fewer
    plain = frame[~frame.speculative]
    assert plain.accept_len.isna().all() and set(table.verdict) <= {"pays", "loses", "no difference seen"}, table.to_string()
    assert len(table) == 4 and (table.pairs == 2).all(), "kernels, limits and loads are the same on both sides, or nothing would be compared"
    assert "repeats-share-a-start" in set(findings.code) and len(results["report"]["verdict"]) == 2
    for name in ("verdict", "throughput", "frontier", "latencies"):
        assert (tmp_path / "bench" / f"{name}.png").stat().st_size and (tmp_path / "bench" / f"{name}.svg").stat().st_size


def test_running_servers_are_compared_by_url(tmp_path):
    with serving(**SLOW) as slow, serving(**FAST) as fast:
        results = bench_run(tmp_path, servers={"plain": slow, "K=2": fast}, repeats=3)
    table = results["verdict"]
    assert set(table.verdict) == {"pays"} and table.speedup.between(1.5, 2.1).all() and (table.pairs == 3).all(), table.to_string()
    assert "K=2" in results["report"]["verdict"][0], results["report"]
    assert len(results["requests"]) == 2 * 3 * 2 * 8


def test_a_sweep_that_was_killed_goes_on(tmp_path):
    sweep = ("import sys; from k2eagle import bench; prompts = tuple([index + 5, 7] for index in range(24))\n"
             "bench.sweep({'plain': sys.argv[1], 'K=2': sys.argv[2]}, bench.loads(prompts, (1, 2), max_tokens=8, warmup=1), sys.argv[3], repeats=3)")
    with serving(**SLOW) as slow, serving(**FAST) as fast:
        command = [sys.executable, "-c", sweep, slow, fast, str(tmp_path)]
        process = subprocess.Popen(command)
        while len(list(tmp_path.glob("runs/*.json"))) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")}
        subprocess.run(command, check=True)
    swept = bench.read_sweep(tmp_path)
    assert 3 <= len(before) < 12 == len(swept.frame) and {path: path.stat().st_mtime_ns for path in before} == before
    assert not swept.frame.duplicated(["config", "repeat", "load"]).any() and set(swept.frame.place) == {1, 2}


def test_a_server_that_dies_costs_its_own_runs(tmp_path):
    with serving(**SLOW) as slow, serving(**FAST, die_after=30) as dying:
        results = bench_run(tmp_path, servers={"plain": slow, "K=2": dying})
    assert (results["results"].config == "plain").sum() == 4 and 0 < results["report"]["left"] < 4
    lost = results["findings"].set_index("code").loc[["not-measured"]]
    assert set(lost.subject) == {"K=2"} and results["report"]["verdict"][-1].startswith(f"{results['report']['left']} runs are missing")


@pytest.mark.parametrize(("wrong", "told"), [
    (dict(concurrency=[0]), "concurrency"), (dict(valu="tpot"), "unknown parameter valu"), (dict(repeats=0), "repeats"), (dict(value="speed"), "value")])
def test_bad_parameters_start_nothing(tmp_path, wrong, told):
    with pytest.raises(runs.ParameterError, match=told):
        bench_run(tmp_path / "bench", servers={"plain": "http://127.0.0.1:9"}, **wrong)
    assert not (tmp_path / "bench").exists()


def test_what_cannot_run_is_said_plainly(tmp_path):
    with pytest.raises(runs.RunError, match="nothing was measured: .*is the server up"):
        bench_run(tmp_path, servers={"plain": "http://127.0.0.1:9"})
    assert "not-measured" in (tmp_path / "findings.csv").read_text()
    light = bench.loads(([5, 6],), (1,))
    for refused, told in ((lambda: bench.sweep({"plain": "127.0.0.1:9"}, light, tmp_path), "expected plans or URLs"), (lambda: bench.sweep({}, light, tmp_path), "0 configurations"),
                          (lambda: bench.configurations(pythons={"sglang": "/no/python"}), "expected the Python of sglang"),
                          (lambda: bench.read_prompts("/no/prompts.jsonl"), "prompts.jsonl")):
        with pytest.raises((ValueError, OSError), match=told):
            refused()


def test_a_server_that_does_not_start_is_explained_and_the_others_are_measured(tmp_path):
    "A Python without the engine, in place of the engine's."
    plan = bench.configurations(engines=("vllm",), gpus="1x H100 80GB sm90", requests=8)["vllm plain"]
    broken = bench.replace(plan, command=(sys.executable, *plan.command[1:]))
    with serving(**SLOW) as slow:
        swept = bench.sweep({"broken": broken, "plain": slow}, bench.loads(([5, 6], [7, 8]), (1,), max_tokens=8), tmp_path, repeats=1, ready_s=60)
    assert (len(swept.frame), swept.left, swept.findings[0].subject) == (1, 1, "broken")
    assert "did not become ready (failed" in swept.findings[0].evidence and len(swept.findings) > 1, swept.findings
    assert read_json(tmp_path / "sweep.json")["configs"]["plain"] == "a running server"
