"""Launches through the run notebook: both real engines on this CPU, a drafter that breaks the start, a plan for a machine that is not here.

Run: pytest tests/test_launch.py (about 3 minutes on two quiet cores)
"""
import json
import os
import re
import signal
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from engine_server import free_port
from record_startups import unknown_architecture
from test_plan import KIMI, WIDE_HEAD

from k2eagle import launch, runs
from k2eagle.plan import plan
from k2eagle.watch import probe


def launched(folder, **parameters) -> dict:
    "Results of the run notebook."
    runs.run("launch", out=folder / "out", **parameters)
    return runs.read_results(folder / "out")


def test_a_server_that_is_kept_answers_and_dies_with_its_group(engine_python, tmp_path):
    engine_python("sglang")
    port = free_port()
    results = launched(tmp_path, engine="sglang", port=port)
    report = results["report"]
    group = None
    try:
        assert report["state"] == "ready" and report["running"] and report["url"].endswith(str(port)) and report["exit_code"] == 0, report
        assert probe(report["url"])[0] is None  # the run and its kernel are over, the server is not
        group = next(int(entry) for entry in os.listdir("/proc") if entry.isdigit() and str(port) in command_of(entry) and os.getpgid(int(entry)) == int(entry))
        assert list(results["stages"].stage)[-1] in ("warm-up", "ready") and results["reasons"].why.notna().all()
        with pytest.raises(RuntimeError, match="nothing was started"):
            launched(tmp_path / "again", engine="sglang", port=port, anyway=True)
    finally:
        if group:
            os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + 20
    while probe(report["url"], 2)[0] is None:
        assert time.monotonic() < until


def command_of(pid: str) -> str:
    "Command line of a process, empty where it is gone."
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def test_a_broken_drafter_is_named_before_and_after_the_start(engine_python, tmp_path):
    engine_python("vllm")
    unknown_architecture(tmp_path / "drafter")
    port, drafter = free_port(), str(tmp_path / "drafter")
    report = launched(tmp_path / "refused", engine="vllm", port=port, drafter=drafter, keep_running=False)["report"]
    assert report["state"] == "not started" and report["errors"], report
    report = launched(tmp_path / "anyway", engine="vllm", port=port, drafter=drafter, keep_running=False, anyway=True)["report"]
    assert (report["state"], report["causes"][0], report["running"]) == ("failed", "drafter-architecture-unknown", False), report
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)


def test_a_launch_is_planned_from_configs_alone(tmp_path):
    for name, config in (("target", KIMI), ("drafter", WIDE_HEAD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    results = launched(tmp_path, target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"), dry_run=True, settings={"weight_bytes": 547e9},
                       gpus="8x RTX PRO 6000 96GB sm120 pcie", version="0.5.12")
    report = results["report"]
    assert report["fits"] and report["cache_tokens"] > 10_000 and report["exit_code"] == 0
    assert {"draft-outside", "pcie"} <= set(results["plan_findings"].code) and "port" not in set(results["preflight"].check)
    script = (tmp_path / "out" / "launch.sh").read_text()
    assert f"--model-path {tmp_path / 'target'}" in script.replace("\\\n ", "") and "--speculative-algorithm EAGLE3" in script


def test_a_plan_for_another_machine_needs_no_engine(tmp_path):
    results = launched(tmp_path, engine="vllm", gpus="8x H100 80GB sm90 nvlink", dry_run=True, settings={"tp": 1})
    assert results["report"]["verdict"] == f"vllm {plan('default', 'vllm', gpus='1x H100 80GB').version} was not started: dry run"
    assert "--tensor-parallel-size" not in results["plan"]["command"] or "--tensor-parallel-size 1" in results["plan"]["command"]


FAILING = """
import subprocess, sys, time
print("[2026-11-29 19:59:41] server_args=ServerArgs(model_path='small')", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
print("[2026-11-29 19:59:42] Scheduler hit an exception: Traceback (most recent call last):\\nRuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\\n", flush=True)
time.sleep(1.5)
sys.exit(1)
"""


def test_a_server_that_says_it_failed_and_ends_later_leaves_no_child(tmp_path):
    planned = plan("default", "sglang", device="cpu", port=free_port())
    failing = replace(planned, command=(sys.executable, "-c", FAILING, *planned.command[-4:]))
    server, status = launch.bring_up(failing, tmp_path / "server.log", every_s=0.1)
    child = re.search(r"child (\d+)", server.log.read_text())[1]
    assert (status.state, server.exit_code) == ("failed", 1) and launch.why(server)[0].code == "pool-does-not-fit"
    until = time.monotonic() + 5
    while "time.sleep(600)" in command_of(child):
        assert time.monotonic() < until, "the child is still there"
        time.sleep(0.05)


@pytest.mark.parametrize(("parameters", "said"), [
    ({"purpose": "speed"}, "one of latency, throughput, capture"),
    ({"port": 70000}, "port"), ({"patience_s": 0}, "patience_s"), ({"settings": {"tpp": 2}, "dry_run": True, "device": "cpu"}, "'tpp' is not known")])
def test_what_makes_no_sense_is_refused(parameters, said, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=said):
        launched(tmp_path, **parameters)
