"""The pipeline on the real target, small: it runs, survives kill -9 at any moment, and its figures are what decoding gives.

Run alone with: python -m pytest tests/test_pipeline.py
"""
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from k2eagle import accept, capture, checkpoint, runs, targets, text, train
from k2eagle.drafter import draft
from k2eagle.store import open_store

SMALL = dict(prompts=12, heldout=6, max_new_tokens=16, steps=12, batch_tokens=256, draft_vocab_size=512)


def command(name, out, **parameters):
    words = [word for key, value in parameters.items() for word in ("-p", key, str(value))]
    return [sys.executable, "-m", "k2eagle.runs", name, "--out", str(out), *words]


def execute(name, out, **parameters):
    return subprocess.run(command(name, out, **parameters), capture_output=True, text=True, timeout=600)


def kill_when(name, out, happened, **parameters):
    "Start a run and kill -9 it, kernel included, as soon as `happened()`; return whether it was still running."
    process = subprocess.Popen(command(name, out, **parameters), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while process.poll() is None and not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    alive = process.poll() is None
    for pid in _descendants(process.pid) + [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
    return alive


def _descendants(pid):
    "Process ids of all children, theirs included; a kernel may have a session of its own."
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found = children.get(pid, [])
    return found + [grandchild for child in found for grandchild in _descendants(child)]


def digests(folder, pattern):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).glob(pattern))}


def same_result(one, other):
    for name in ("train", "heldout"):
        assert digests(one / "work" / name, "shard-*") == digests(other / "work" / name, "shard-*")
        assert digests(one / "work" / name, "answers.jsonl") == digests(other / "work" / name, "answers.jsonl")
    assert digests(one / "work/drafter/drafter", "*") == digests(other / "work/drafter/drafter", "*")
    losses = [pd.read_csv(folder / "training.csv")["loss"].tolist() for folder in (one, other)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("pipeline") / "unbroken"
    finished = execute("pipeline", out, **SMALL)
    assert finished.returncode == 0, finished.stderr
    return out


def test_a_run_leaves_tables_charts_and_its_origin(unbroken):
    results = runs.read_results(unbroken)
    assert results["provenance"]["parameters"]["prompts"] == 12
    assert results["provenance"]["finished"]
    assert 1 <= results["report"]["accept_len"] <= 4
    assert results["report"]["accept_len_low"] <= results["report"]["accept_len"] <= results["report"]["accept_len_high"]
    assert len(results["training"]) == 12
    for name in ("training", "positions", "accept_len"):
        assert (unbroken / f"{name}.png").stat().st_size > 5_000 and (unbroken / f"{name}.svg").exists()
    assert (unbroken / "pipeline.ipynb").exists()


def test_drafter_is_what_both_engines_load(unbroken):
    folder = unbroken / "work/drafter/drafter"
    drafter = checkpoint.load(folder, "default")
    assert drafter.config.draft_vocab_size == 512 and drafter.fc.weight.dtype == torch.bfloat16
    assert drafter.config.boundaries is None  # the default needs no ids in the checkpoint


@pytest.mark.parametrize("moment", ["answering", "capturing", "training"])
def test_killed_pipeline_goes_on_to_the_same_result(unbroken, tmp_path, moment):
    out = tmp_path / "killed"
    signs = {"answering": out / "work/train/answers.json", "capturing": out / "work/heldout/manifest.json",
             "training": out / "work/drafter/settings.json"}
    assert kill_when("pipeline", out, signs[moment].exists, **SMALL), "the run ended before it could be killed"
    finished = execute("pipeline", out, **SMALL)
    assert finished.returncode == 0, finished.stderr
    same_result(unbroken, out)


def test_killed_training_goes_on_from_its_checkpoint(unbroken, tmp_path):
    given = dict(store=unbroken / "work/train", heldout_store=unbroken / "work/heldout", target="default", steps=30,
                 batch_tokens=256, draft_vocab_size=512, save_every=5, eval_every=10)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert execute("train", whole, **given).returncode == 0
    state = killed / "work/drafter/state.pt"
    assert kill_when("train", killed, state.exists, **given)
    reached = torch.load(state, weights_only=True)["step"]
    assert reached < 30
    finished = execute("train", killed, **given)
    assert finished.returncode == 0, finished.stderr
    losses = [pd.read_csv(folder / "training.csv")["loss"].tolist() for folder in (whole, killed)]
    assert losses[0] == losses[1] and len(losses[0]) == 30
    assert digests(whole / "work/drafter/drafter", "*") == digests(killed / "work/drafter/drafter", "*")


def test_acceptance_run_repeats_the_figure_of_the_pipeline_and_serves(unbroken, engine_python, tmp_path):
    engine_python("vllm")
    finished = execute("acceptance", tmp_path / "acceptance", drafter=unbroken / "work/drafter/drafter",
                       store=unbroken / "work/heldout", num_draft=3, serve_in='["vllm"]', served_prompts=3, max_new_tokens=16)
    assert finished.returncode == 0, finished.stderr
    results = runs.read_results(tmp_path / "acceptance")
    served, lengths = results["served"], results["accept_len"]
    assert served["source"].tolist() == ["simulated", "served by vllm 0.32.0"] and served["drafts"].iloc[1] > 10
    assert results["findings"]["code"].tolist() == ["served-as-simulated"]
    assert lengths["num_draft"].tolist() == [1, 2, 3]
    assert lengths["accept_len"].iloc[-1] == pytest.approx(runs.read_results(unbroken)["report"]["accept_len"])


@pytest.fixture(scope="module")
def precise(tmp_path_factory):
    "A drafter trained a little in float32, its held-out store, and the target in float32."
    folder = tmp_path_factory.mktemp("precise")
    options = dict(max_new_tokens=32, dtype="float32", batch_size=8)
    learned = capture.capture("default", text.prompts(16, "train"), folder / "train", **options)
    measured = capture.capture("default", text.prompts(4, "heldout"), folder / "heldout", **options)
    config = train.TrainConfig(steps=40, batch_tokens=512, dtype="float32", eval_every=1000, save_every=1000)
    drafter = train.train(learned, folder / "run", "default", config=config, draft_vocab_size=1024).drafter.float()
    return drafter, measured, capture.load_model("default", "float32", "cpu")


def test_simulation_is_decoding_token_for_token(precise):
    drafter, measured, model = precise
    total = 0
    for document in measured:
        start = document.loss_mask.tolist().index(True)
        prompt, answer = document.tokens[:start].tolist(), document.tokens[start:].tolist()
        decoded, kept = accept.decode(model, drafter, prompt, 3, len(answer), stop=2)
        assert decoded == answer  # speculation must not change what the target says
        guesses = draft(drafter, document.hidden[None], document.tokens[None], 3)[0]
        ahead = torch.stack([torch.roll(document.tokens, -2 - k) for k in range(3)], -1)
        walked = accept.walk((guesses == ahead).numpy(), document.loss_mask.numpy())
        assert walked == kept[:len(walked)] and len(kept) - len(walked) <= 3
        total += sum(walked)
    assert total > 0, "nothing was accepted, so nothing was compared"
    simulated = accept.simulate(drafter, measured, 3)
    assert simulated.accepted == total


def test_states_of_the_wrong_boundary_cost_acceptance(precise):
    "A drafter fed with other states than it learned must do worse, or the states would not matter."
    drafter, measured, _ = precise
    class Shuffled:
        manifest = measured.manifest
        def batches(self, *given, **named):
            for batch in measured.batches(*given, **named):
                yield [document._replace(hidden=document.hidden.flip(1)) for document in batch]
    assert accept.simulate(drafter, Shuffled(), 3).accepted < accept.simulate(drafter, measured, 3).accepted


@pytest.mark.parametrize("parameters, said", [
    ({"num_draft": 0}, "num_draft"), ({"prompts": 0}, "prompts"), ({"num_drafts": 3}, "num_draft"),
    ({"dtype": "int3"}, "bfloat16"), ({"learning_rate": "fast"}, "learning_rate")])
def test_bad_parameters_start_nothing(tmp_path, parameters, said):
    finished = execute("pipeline", tmp_path / "out", **parameters)
    assert finished.returncode == 2 and said in finished.stderr
    assert "Traceback" not in finished.stderr and not (tmp_path / "out").exists()


def test_a_target_that_is_not_there_is_said_plainly(tmp_path):
    finished = execute("pipeline", tmp_path / "out", target=tmp_path / "absent")
    assert finished.returncode == 1 and "no target at" in finished.stderr and "Traceback" not in finished.stderr


def test_a_checkpoints_own_sampling_habits_stay_out_of_the_answers(tmp_path):
    "Suppressing the first token of an answer changes a greedy one, and no manifest would say so."
    plain = targets.resolve("default")
    prompt = [text.prompt_tokens(text.load_tokenizer(plain), "What is a tide?")]
    expected = capture.generate(capture.load_model(plain, device="cpu"), prompt, 4)
    for file in plain.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    habits = {"eos_token_id": 2, "suppress_tokens": [expected[0][0][0]], "do_sample": True, "top_p": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(habits))
    assert capture.generate(capture.load_model(tmp_path, device="cpu"), prompt, 4) == expected


def test_a_store_of_another_target_is_refused(unbroken, tmp_path):
    other = targets.mini_kimi(tmp_path / "other")
    with pytest.raises(ValueError, match="another target"):
        train.train(open_store(unbroken / "work/train"), tmp_path / "out", other)


def test_a_disk_that_fills_in_the_middle_of_a_capture(unbroken, tmp_path):
    "RLIMIT_FSIZE makes writes fail as a full disk does; what was finished stays, and the capture goes on later."
    made = open_store(unbroken / "work/heldout")
    samples = [text.Sample(d.id, d.tokens.tolist(), d.loss_mask.tolist()) for d in made]
    script = ("import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
              "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
              "from test_pipeline import capture_samples; capture_samples({source!r}, {out!r})")
    out = tmp_path / "out"
    failed = subprocess.run([sys.executable, "-c", script.format(source=str(unbroken / "work/heldout"), out=str(out))],
                            cwd=Path(__file__).parent, capture_output=True, text=True)
    assert failed.returncode != 0 and "Error" in failed.stderr
    resumed = capture_samples(unbroken / "work/heldout", out)
    assert len(resumed) == len(samples) and not resumed.verify()
    for before, after in zip(made, resumed):
        assert torch.equal(before.tokens, after.tokens)
        assert np.allclose(before.last.float(), after.last.float(), atol=0.5)


def capture_samples(source, out):
    "Capture the documents of a store once more."
    samples = [text.Sample(d.id, d.tokens.tolist(), d.loss_mask.tolist()) for d in open_store(source)]
    return capture.capture("default", samples, out, answers={"temperature": 0.0})
