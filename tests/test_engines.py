"""Both real engines on this machine's CPU, from their environments to the stores they fill.

Run: pytest tests/test_engines.py (about 10 minutes, and some more the first time, when the environments are made)
"""
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from engine_server import QUICK, running

from k2eagle import capture, engines, jobs, measure, servers, targets, text
from k2eagle.store import open_store

BOTH = pytest.mark.parametrize("engine", ["vllm", "sglang"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    "Conversations and the states that transformers has over them, in float32."
    folder = tmp_path_factory.mktemp("reference")
    samples = capture.answer("default", text.prompts(12, "heldout"), folder / "answers", max_new_tokens=24)
    return capture.capture("default", samples, folder / "hf", dtype="float32", boundaries=(1, 2, 3, 14, 15, 16, 27), answers={"temperature": 0.0})


def difference(store, other, boundary: int, of: int | None = None) -> float:
    "Median relative L2 of a store's boundary from another's, first tokens left out."
    own, yardstick = store.manifest.boundaries.index(boundary), other.manifest.boundaries.index(of or boundary)
    rows = [((a.hidden[1:, own].float() - b.hidden[1:, yardstick].float()).norm(dim=-1) / b.hidden[1:, yardstick].float().norm(dim=-1))
            for a, b in zip(store, other, strict=True)]
    return float(torch.cat(rows).median())


def last_difference(store, other) -> float:
    "Median relative L2 of the last hidden state behind the final norm, first tokens left out."
    head = targets.head("default")
    sides = [[measure.post_norm(d.last[1:].float(), s.manifest.last_norm, head) for d in s] for s in (store, other)]
    return float(torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(*sides, strict=True)]).median())


@BOTH
def test_environment_is_healthy(engine, engine_python):
    assert engine_python(engine).is_file()
    assert not engines.health(engine, imports=False), engines.health(engine, imports=False)
    assert engines.look(engine).version.startswith(str(engines.NEWEST[engine]))


@BOTH
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_states_are_those_of_the_target(engine, mode, engine_python, reference, tmp_path):
    "Every boundary is nearest to its own in the reference, and not to a neighbour."
    engine_python(engine)
    samples = capture.conversations_of(reference)
    store = capture.capture("default", samples, tmp_path / "store", engine, engine_options={"mode": mode})
    made = store.manifest
    assert (made.engine, made.options["mode"], made.boundaries) == (engine, mode, (2, 15, 27))
    assert made.last_norm == {"vllm": "pre_norm", "sglang": "post_norm"}[engine] and made.attention_backend != "unknown"
    assert [d.tokens.tolist() for d in store] == [sample.tokens for sample in samples]
    for boundary in (2, 15, 27):
        assert difference(store, reference, boundary) < 0.03
    assert 0 < last_difference(store, reference) < 0.03
    for boundary in (2, 15):
        own, *others = (difference(store, reference, boundary, boundary + shift) for shift in (0, -1, 1))
        assert own < min(others), (boundary, own, others)


@BOTH
def test_answers_are_the_target_s_own(engine, engine_python, tmp_path):
    "Greedy answers of an engine are those of transformers, up to a near-tie, and stop where those stop."
    engine_python(engine)
    asked = text.prompts(6, "heldout")
    ours = capture.answer("default", asked, tmp_path / "hf", max_new_tokens=16, dtype="float32")
    theirs = capture.answer("default", asked, tmp_path / engine, max_new_tokens=16, dtype="float32", engine=engine)
    assert [sample.loss_mask.index(True) for sample in theirs] == [sample.loss_mask.index(True) for sample in ours]  # the same prompts
    same = [a.tokens == b.tokens and a.finished == b.finished for a, b in zip(ours, theirs)]
    assert sum(same) >= 5, same
    before = (tmp_path / engine / "answers.jsonl").read_bytes()
    again = capture.answer("default", asked, tmp_path / engine, max_new_tokens=16, dtype="float32", engine=engine)
    assert again == theirs and (tmp_path / engine / "answers.jsonl").read_bytes() == before


def engine_processes(folder) -> list[int]:
    "Processes that were started on a job under this folder."
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in listed if str(folder) in line and "_worker" in line]


@pytest.mark.parametrize("engine", ["vllm"])
def test_killed_capture_leaves_no_engine_behind_and_goes_on(engine, engine_python, reference, tmp_path, monkeypatch):
    engine_python(engine)
    source, store = reference.path, tmp_path / "store"
    code = (f"from k2eagle import capture; from k2eagle.store import open_store\n"
            f"samples = capture.conversations_of(open_store({str(source)!r}))\n"
            f"capture.capture('default', samples, {str(store)!r}, {engine!r}, engine_options={{'batch_documents': 1, 'mode': 'decode'}})")
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **QUICK})
    until = time.monotonic() + 300
    events = store / "exchange" / "events.jsonl"
    while not (events.is_file() and events.read_text().count('"event": "document"') >= 3):
        assert process.poll() is None and time.monotonic() < until, "the capture ended before it could be killed"
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 30
    while engine_processes(store):
        assert time.monotonic() < until, f"still running: {engine_processes(store)}"
        time.sleep(0.2)
    samples = capture.conversations_of(reference)
    options, spell_out, asked = {"batch_documents": 1, "mode": "decode"}, jobs.job, []
    monkeypatch.setattr(jobs, "job", lambda task, model, documents, *rest: asked.append(len(documents)) or spell_out(task, model, documents, *rest))
    resumed = capture.capture("default", samples, store, engine, engine_options=options)
    assert len(resumed) == len(samples) and not resumed.verify()
    assert len(asked) == 1 and asked[0] < len(samples), f"asked for {asked} documents: those that were finished were computed again"
    assert difference(resumed, reference, 27) < 0.03
    with pytest.raises(ValueError, match="captured otherwise: mode"):
        capture.capture("default", samples, store, engine, engine_options={"batch_documents": 1})


def test_engine_that_cannot_load_is_explained(engine_python, reference, tmp_path):
    engine_python("vllm")
    broken = tmp_path / "target"
    broken.mkdir()
    for file in targets.default_target().iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    whole = (targets.default_target() / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    job = jobs.job("capture", broken, [jobs.Document(0, "a", [1, 2, 3], 3)], (2, 15, 27))
    with pytest.raises(jobs.EngineError) as error, jobs.at_work("vllm", job, tmp_path / "store") as worker:
        worker.wait()
    assert "vllm.log" in str(error.value) and (tmp_path / "store" / "vllm.log").stat().st_size


def serving(engine, folder):
    "A server of an engine, started as `servers.launch_arguments` says."
    backend = ["--attention-backend", "torch_native"] if engine == "sglang" else []
    return running(engine, folder, "--dtype", "bfloat16", *backend, *servers.launch_arguments(engine, (2, 15, 27), 30, folder / "states", "cpu"))


@BOTH
def test_states_from_a_running_server(engine, engine_python, reference, tmp_path):
    engine_python(engine)
    samples = capture.conversations_of(reference)
    with serving(engine, tmp_path) as url:
        store = capture.capture("default", samples, tmp_path / "store", engine, url=url)
        if engine == "sglang":
            with pytest.raises(jobs.EngineError, match=r"keeps boundaries \(2, 15, 27\), asked for \(3, 15, 27\)"):
                capture.capture("default", samples, tmp_path / "other", engine, url=url, boundaries=(3, 15, 27))
    assert store.manifest.last_norm == {"vllm": "pre_norm", "sglang": "absent"}[engine]
    assert max(difference(store, reference, boundary) for boundary in (2, 15, 27)) < 0.03
    assert open_store(store.path, check=True)[0].tokens.tolist() == samples[0].tokens
