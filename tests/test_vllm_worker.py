"The vLLM worker with the real engine on a CPU: its states are those of transformers, in prefill and in decode, and failures say why."
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from k2eagle import engines, targets

WORKER = ROOT / "k2eagle" / "workers" / "vllm_worker.py"
JOB = dict(format="k2eagle-job-1", task="capture", boundaries=[2, 15, 27], mode="prefill", max_new_tokens=0, temperature=0.0, seed=0,
           dtype="bfloat16", device="cpu", tp_size=1, quantization=None, trust_remote_code=False, chunked_prefill_tokens=0,
           prefix_cache=False, batch_documents=8, attention_backend=None, cuda_graphs=False, max_model_len=512, engine_args={})


@pytest.fixture(scope="module")
def interpreter() -> str:
    "A Python with vLLM for the CPU."
    try:
        return str(engines.python("vllm"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Path:
    return targets.mini_kimi(tmp_path_factory.mktemp("kimi") / "plain")


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory) -> Path:
    return targets.mini_kimi(tmp_path_factory.mktemp("kimi") / "wrapped", wrapper=True)


def documents(lengths, shared=0):
    "Random conversations, two thirds prompt, that begin alike."
    draw = torch.Generator().manual_seed(7)
    tokens = lambda count: torch.randint(5, 49152, (count,), generator=draw).tolist()
    begin = tokens(shared)
    rows = [begin + tokens(length) for length in lengths]
    return [dict(index=3 * i, id=f"d{i}", tokens=row, prompt=len(row) * 2 // 3) for i, row in enumerate(rows)]


def start(interpreter, folder, rows, model, around=None, **changes):
    "Start the worker; returns the process and its folder."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "documents.json").write_text(json.dumps(rows))
    job = {**JOB, "model": str(model), "documents": str(folder / "documents.json"), "out": str(folder / "out"), **changes}
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **(around or {})}
    with open(folder / "log", "wb") as log:
        return subprocess.Popen([interpreter, WORKER, folder / "job.json"], stdout=log, stderr=log, env=environment, start_new_session=True)


def read_events(folder):
    "Events so far, by kind."
    file, found = folder / "out" / "events.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        event = json.loads(line)
        found.setdefault(event["event"], []).append(event)
    return found


def run(interpreter, folder, *arguments, **changes):
    "Do a job to its end; returns events by kind."
    process = start(interpreter, folder, *arguments, **changes)
    try:
        process.wait(500)
    finally:
        end(process)
    return read_events(folder)


def end(process):
    "End a worker and what it started."
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def reference(model, rows, boundaries):
    "What transformers computes: states of the boundaries and the input of the final norm, by document."
    from transformers import AutoModelForCausalLM
    network, kept, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval(), {}, {}
    network.get_decoder().norm.register_forward_pre_hook(lambda _, inputs: kept.update(last=inputs[0][0]))
    with torch.no_grad():
        for row in rows:
            states = network(torch.tensor([row["tokens"]]), output_hidden_states=True).hidden_states
            found[row["index"]] = torch.stack([*(states[b][0] for b in boundaries), kept["last"]], 1).float()
    return found


def distance(folder, rows, expected, behind_prompt=False):
    "Relative L2 of the written states to the expected ones, [tokens, K+1]; every document must be there and whole."
    gaps = []
    for row in rows:
        written = load_file(folder / "out" / f"{row['index']:06d}.safetensors")
        assert written["token_ids"].tolist() == row["tokens"]
        states, wanted = written["hidden_states"].float(), expected[row["index"]]
        assert states.shape == wanted.shape
        gaps.append(((states - wanted).norm(dim=-1) / wanted.norm(dim=-1))[row["prompt"] if behind_prompt else 0:])
    return torch.cat(gaps)


@pytest.fixture(scope="module")
def smol(interpreter, tmp_path_factory):
    "Documents with a common beginning, and what transformers computes for them."
    rows = documents([60, 35, 80, 20], shared=260)
    return rows, reference(targets.default_target(), rows, JOB["boundaries"])


@pytest.mark.exhaustive
def test_prefill_in_chunks(interpreter, smol, tmp_path):
    rows, expected = smol
    events = run(interpreter, tmp_path, rows, targets.default_target(), chunked_prefill_tokens=96)
    ready, = events["ready"]
    assert ready["captured"] == JOB["boundaries"] and ready["last_norm"] == "pre_norm" and ready["chunked_prefill_tokens"] == 96
    assert ready["attention_backend"] == "CPU_ATTN" and ready["device"] == "cpu" and not ready["prefix_cache"]
    done, = events["done"]
    total = sum(len(row["tokens"]) for row in rows)
    assert done["tokens"] == done["counts"]["prefill_tokens"] == total and done["counts"]["prefill_chunks"] > len(rows)
    assert sorted(event["index"] for event in events["document"]) == [row["index"] for row in rows]
    # transformers in bfloat16 is itself 0.005 to 0.017 from float32 here
    assert (distance(tmp_path, rows, expected).median(0).values < torch.tensor([0.01, 0.03, 0.03, 0.03])).all()


def test_decode_after_a_cached_prefix(interpreter, smol, tmp_path):
    rows, expected = smol
    events = run(interpreter, tmp_path, rows, targets.default_target(), mode="decode", prefix_cache=True, batch_documents=2)
    assert events["ready"][0]["captured"] == JOB["boundaries"] and events["ready"][0]["prefix_cache"]
    counts = events["done"][0]["counts"]
    assert counts["decode_tokens"] == sum(len(row["tokens"]) - row["prompt"] for row in rows)
    assert counts["cached_tokens"] == 0 or counts["cached_tokens"] % 128 == 0
    assert counts["prefill_tokens"] + counts["cached_tokens"] == sum(row["prompt"] for row in rows)
    for behind_prompt in (False, True):
        gap = distance(tmp_path, rows, expected, behind_prompt)
        assert (gap.median(0).values < torch.tensor([0.01, 0.03, 0.03, 0.03])).all()
    assert not (tmp_path / "out" / ".prefixes").exists()


def test_decode_of_latent_attention_and_experts(interpreter, kimi, tmp_path):
    rows, boundaries = documents([20, 45, 31]), [2, 4, 5]
    events = run(interpreter, tmp_path, rows, kimi, mode="decode", boundaries=boundaries, prefix_cache=True)
    ready, = events["ready"]
    assert ready["captured"] == boundaries and ready["attention_backend"].endswith("MLA")
    gap = distance(tmp_path, rows, reference(kimi, rows, boundaries), behind_prompt=True)
    # random experts: a few tokens are routed otherwise, and are far off in any engine
    assert (gap.median(0).values < torch.tensor([0.02, 0.04, 0.06, 0.15])).all()


def test_wrapper_and_a_file_that_cannot_be_written(interpreter, kimi, wrapped, tmp_path):
    rows, boundaries = documents([20, 45, 31]), [2, 4, 5]
    (tmp_path / "out" / "000003.part").mkdir(parents=True)  # in the way of the second document
    events = run(interpreter, tmp_path, rows, wrapped, boundaries=boundaries)
    assert events["ready"][0]["captured"] == boundaries and events["ready"][0]["model_class"] == "KimiK25ForConditionalGeneration"
    message = events["failed"][0]["message"]
    assert "3 ('d1')" in message and "000003.part" in message and "finished documents are kept" in message
    kept = [rows[0], rows[2]]
    assert sorted(event["index"] for event in events["document"]) == [0, 6]
    gap = distance(tmp_path, kept, reference(kimi, kept, boundaries))
    assert (gap.median(0).values < torch.tensor([0.02, 0.04, 0.06, 0.15])).all()


@pytest.mark.exhaustive
def test_answers(interpreter, tmp_path):
    from transformers import AutoModelForCausalLM

    from k2eagle import text
    target = targets.default_target()
    tokenizer = text.load_tokenizer(target)
    prompts = [text.prompt_tokens(tokenizer, message) for message in ("Say hi.", "What is a tide?")]
    rows = [dict(index=i, id=f"p{i}", tokens=prompt, prompt=len(prompt)) for i, prompt in enumerate(prompts)]
    events = run(interpreter, tmp_path, rows, target, task="answer", boundaries=[], max_new_tokens=24, dtype="float32")
    assert events["ready"][0]["captured"] == [] and events["ready"][0]["dtype"] == "float32"
    answers = {event["index"]: event for event in events["answer"]}
    network = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    stops = network.generation_config.eos_token_id
    for row in rows:
        wanted = network.generate(torch.tensor([row["tokens"]]), max_new_tokens=24, do_sample=False)[0, len(row["tokens"]):].tolist()
        assert answers[row["index"]]["tokens"] == wanted
        assert answers[row["index"]]["finished"] == (wanted[-1] in (stops if isinstance(stops, list) else [stops]))
    assert events["done"][0]["tokens"] == sum(len(answer["tokens"]) for answer in answers.values())


def test_says_why_its_engine_did_not_start(interpreter, kimi, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in kimi.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:1_000_000] if file.suffix == ".safetensors" else content)
    # the engine in a process of its own, as on GPUs: the reason is in the log alone
    events = run(interpreter, tmp_path, documents([20]), broken, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, boundaries=[2, 4, 5])
    assert "ready" not in events
    assert "SafetensorError: Error while deserializing header" in events["failed"][0]["message"], events["failed"]


def children(pid):
    "Processes that a process started, and those that they started."
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def test_says_that_its_engine_died(interpreter, kimi, tmp_path):
    rows = documents([200] * 24)
    process = start(interpreter, tmp_path, rows, kimi, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, mode="decode", boundaries=[2, 4, 5],
                    batch_documents=2)
    try:
        deadline = time.monotonic() + 300
        while "document" not in read_events(tmp_path) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        victims = [pid for pid in children(process.pid) if "VLLM" in Path(f"/proc/{pid}/cmdline").read_text()]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert victims and process.wait(60) == 1
    finally:
        end(process)
    events = read_events(tmp_path)
    assert "EngineCore" in events["failed"][0]["message"] and "want of memory" in events["failed"][0]["message"], events["failed"]
    for event in events["document"]:  # what was finished before is whole
        assert len(load_file(tmp_path / "out" / event["file"])["hidden_states"]) == event["tokens"]


def test_refuses_before_it_starts_an_engine(interpreter, kimi, tmp_path):
    events = run(interpreter, tmp_path, documents([600]), kimi)
    assert "has 600 tokens; max_model_len 512 leaves room for 511" in events["failed"][0]["message"]
