"""What the notebooks of the comparison cannot hold: random texts and states, stores that are damaged or strange, memory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from k2eagle import capture, diff, targets, text
from k2eagle.align import MAX_SHIFT, align
from k2eagle.drafter import DrafterConfig
from k2eagle.measure import Floor, RowKernel, floor, measure, metrics
from k2eagle.store import create, open_store

FACTS = {"engine": "hf", "engine_version": "transformers 5.24.0", "model": "invented", "weight_fingerprint": "00ff", "num_layers": 30,
         "last_norm": "post_norm", "tokenizer_fingerprint": "aa11"}
BOUNDARIES, WIDTH = (2, 15), 16


def write(path, texts, ids=None, prompt=2, noise=0.0, boundaries=BOUNDARIES, width=WIDTH, dtype="float32", **facts):
    "A store whose states depend on their tokens alone, up to noise."
    table = torch.randn(64, len(boundaries) + 1, width, generator=torch.Generator().manual_seed(0))
    with create(path, {**FACTS, **facts}, [len(tokens) for tokens in texts], boundaries, width, ids, dtype, provenance={}) as writer:
        for number, tokens in enumerate(map(torch.tensor, texts)):
            states = table[tokens % 64]
            states = states * (1 + noise * torch.randn(states.shape, generator=torch.Generator().manual_seed(number)))
            states = states.to(getattr(torch, dtype))
            writer.append(tokens, states[:, :-1], states[:, -1], torch.arange(len(tokens)) >= prompt)
    return open_store(path)


# --- alignment

document = st.lists(st.integers(0, 50), min_size=1, max_size=30)
change = st.sampled_from(["none", "drop", "double", "cut", "answer", "prompt", "gone"])


def changed(tokens: list, how: str, place: int) -> list | None:
    "A document as another engine may have read it."
    if how == "drop":
        return tokens[1 + place % MAX_SHIFT:] or tokens
    if how == "double":
        return [tokens[0], *tokens]
    if how == "cut":
        return tokens[:1 + place % len(tokens)]
    if how in ("answer", "prompt"):
        at = min(2 if how == "answer" else 0, len(tokens) - 1) + (place if how == "answer" else 0) % len(tokens)
        return [*tokens[:at], 60, *tokens[at + 1:]]
    return None if how == "gone" else tokens


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(st.tuples(document, change, st.integers(0, 40)), min_size=1, max_size=6), order=st.randoms(), renamed=st.booleans())
def test_aligned_tokens_are_equal_and_each_is_used_once(texts, order, renamed):
    sides = [(f"{number}", tokens, changed(tokens, how, place)) for number, (tokens, how, place) in enumerate(texts)]
    other = [(f"other-{name}" if renamed else name, tokens) for name, _, tokens in sides if tokens is not None]
    assume(other)
    order.shuffle(other)
    with tempfile.TemporaryDirectory() as folder:
        a = write(Path(folder) / "a", [tokens for _, tokens, _ in sides], [name for name, _, _ in sides])
        b = write(Path(folder) / "b", [tokens for _, tokens in other], [name for name, _ in other])
        try:
            alignment = align(a, b)
        except ValueError as error:
            assert "no document" in str(error)
            assert not {tuple(tokens) for _, tokens, _ in sides} & {tuple(tokens) for _, tokens in other}
            return
        assert len({pair.index_a for pair in alignment.pairs}) == len({pair.index_b for pair in alignment.pairs}) == len(alignment.pairs)
        for pair in alignment.pairs:
            one, two = a[pair.index_a].tokens, b[pair.index_b].tokens
            assert pair.length > 0 and not (pair.start_a and pair.start_b)
            run = one[pair.start_a:pair.start_a + pair.length]
            assert len(run) == pair.length and torch.equal(run, two[pair.start_b:pair.start_b + pair.length])
        left = len(a) - len(alignment.pairs)
        missing = [finding for finding in alignment.findings if finding.code == "documents-missing"]
        assert bool(missing) == (left > 0 or len(b) > len(alignment.pairs))
        if all(how == "none" for _, how, _ in texts):
            assert not alignment.findings and alignment.tokens == sum(len(tokens) for tokens, _, _ in texts)
        elif not alignment.findings:
            assert sorted(tokens for _, tokens, _ in sides) == sorted(tokens for _, tokens in other)


CHANGES = {"drop": "bos-dropped", "double": "bos-doubled", "cut": "truncated", "answer": "answer-differs", "prompt": "template-differs"}


@pytest.mark.parametrize("how, renamed", [(how, renamed) for how in CHANGES for renamed in (False, True) if (how, renamed) != ("prompt", True)])
def test_a_changed_text_has_its_finding(tmp_path, how, renamed):
    texts = [[1, *(10 * number + np.arange(30) % 9 + 2)] for number in range(4)]
    texts = [[int(token) for token in tokens] for tokens in texts]
    place = {"cut": 19, "answer": 20}.get(how, 0)
    other = [changed(tokens, how, place) if how != "prompt" else [tokens[0], 60, *tokens[2:]] for tokens in texts]
    b = write(tmp_path / "b", other, list("wxyz") if renamed else None, engine="vllm", engine_version="0.32.0")
    found = align(write(tmp_path / "a", texts), b).findings
    assert [(finding.code, finding.subject) for finding in found] == [(CHANGES[how], "4 of 4 documents")]


def test_order_and_names_do_not_change_the_numbers(tmp_path):
    texts = [[1, *range(5 * number, 5 * number + 12)] for number in range(6)]
    a = write(tmp_path / "a", texts)
    ordered = measure(a, write(tmp_path / "b", texts, noise=0.01))
    order = [3, 0, 5, 1, 4, 2]
    moved = write(tmp_path / "moved", [texts[i] for i in order], [f"n{i}" for i in order])
    again = measure(a, moved)
    assert again.boundaries.rel_l2_max.max() == 0 < ordered.boundaries.rel_l2_max.min()


# --- the row kernel

dtypes = st.sampled_from(["bfloat16", "float16", "float32"])


@settings(max_examples=120, deadline=None)
@given(tokens=st.integers(1, 40), parts=st.lists(st.integers(1, 3), min_size=1, max_size=3), width=st.integers(1, 300), one=dtypes, two=dtypes,
       power=st.integers(-24, 24), noise=st.sampled_from([0.0, 1e-3, 1.0]), seed=st.integers(0, 2**20), block=st.integers(1, 5000))
def test_kernel_agrees_with_float64(tokens, parts, width, one, two, power, noise, seed, block):
    from k2eagle import measure as module
    random = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (power if "float16" not in (one, two) else power / 8)
    a = [torch.randn(tokens, part, width, generator=random) * scale for part in parts]
    b = [(states * (1 + noise * torch.randn(states.shape, generator=random))).to(getattr(torch, two)) for states in a]
    a = [states.to(getattr(torch, one)) for states in a]
    usual, module.BLOCK = module.BLOCK, block  # blocks of any size, down to a token
    try:
        sums = RowKernel(sum(parts), width)(a, b)
    finally:
        module.BLOCK = usual
    x, y = (torch.cat(side, 1).double() for side in ([part.double() for part in a], [part.double() for part in b]))
    expected = torch.stack([x.square().sum(-1), y.square().sum(-1), (x - y).square().sum(-1), (x - y).abs().amax(-1)]).numpy()
    assert np.allclose(sums, expected, rtol=2e-6, atol=0)
    rel_l2, gap, ratio, _ = metrics(sums)
    norm_x, norm_y = x.norm(dim=-1).numpy(), y.norm(dim=-1).numpy()
    there = (norm_x > 0) & (norm_y > 0)
    assert np.allclose(ratio[there], (norm_y / np.where(there, norm_x, 1))[there], rtol=1e-5)
    cosine = (x * y).sum(-1).numpy()[there] / (norm_x * norm_y)[there]
    unequal = ratio[there] + 1 / ratio[there]  # a state many times longer than the other hides its angle
    assert (np.abs(1 - gap[there] - cosine) <= 1e-6 * unequal).all() and (gap >= 0).all() and (rel_l2 >= 0).all()


# --- whole comparisons of a real target

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def samples():
    "Conversations of about a hundred tokens."
    tokenizer, words = text.load_tokenizer(targets.default_target()), "It depends on what you need. Start small, then measure. " * 3
    return [replace(text.encode(tokenizer, [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": words}]), id=prompt.id)
            for prompt in text.prompts(16, "heldout")]


@pytest.fixture(scope="module")
def stores(folder, samples):
    "The default target in transformers: bfloat16 twice, float32, and one boundary later."
    options = {"bfloat16": {}, "alone": dict(batch_tokens=1), "float32": dict(dtype="float32"), "later": dict(boundaries=(3, 16, 28))}
    return {name: capture.capture("default", samples, folder / name, answers={"temperature": 0.0}, **each) for name, each in options.items()}


@pytest.fixture(scope="module")
def noise(stores):
    return floor([(stores["bfloat16"], stores["alone"]), (stores["bfloat16"], stores["float32"])], ["batch shape", "float32"])


def rewrite(store, path, boundaries=None, document=lambda document: document, **facts):
    "A copy of a store with other documents, or other words about them."
    known = {name: getattr(store.manifest, name) for name in ("engine", "engine_version", "model", "weight_fingerprint", "num_layers", "last_norm",
                                                               "tokenizer_fingerprint", "answers", "quantization")}
    changed = [document(each) for each in store]
    with create(path, {**known, **facts}, [len(each.tokens) for each in changed], boundaries or store.manifest.boundaries,
                store.manifest.hidden_size, [each.id for each in changed], store.manifest.dtype) as writer:
        for each in changed:
            writer.append(*each[:4])
    return open_store(path)


def test_noise_is_called_noise(stores, noise):
    report = diff.compare(stores["alone"], stores["float32"], noise=noise, target="default")
    assert "hold the same hidden states to within noise" in report.verdict
    assert report.findings.worst in (None, "note")
    assert report.next_tokens.same_top1[0] > 0.9 and report.next_tokens.kl_mean[0] < 0.01


def test_other_layers_are_an_error(folder, stores, noise):
    later = rewrite(stores["later"], folder / "shifted", (2, 15, 27), engine="vllm", engine_version="0.32.0")
    report = diff.compare(stores["bfloat16"], later, noise=noise, target="default")
    assert report.findings[0].code == "layer-shift" and report.findings[0].severity == "error"
    assert "do not hold the same hidden states" in report.verdict
    assert report.boundaries.set_index("boundary").beyond[["2", "15", "27"]].min() > 0.9
    assert report.boundaries.set_index("boundary").beyond["last"] < 0.2


def test_a_dropped_bos_is_found_before_its_states(folder, stores):
    cut = rewrite(stores["bfloat16"], folder / "cut", document=lambda each: each._replace(
        **{name: getattr(each, name)[1:] for name in ("tokens", "hidden", "last", "loss_mask")}), engine="vllm", engine_version="0.32.0")
    report = diff.compare(stores["bfloat16"], cut)
    assert "bos-dropped" in [finding.code for finding in report.findings] and report.findings.worst == "error"
    assert report.boundaries.rel_l2_max.max() == 0  # the states left are those of the same tokens


def test_files_of_speculators_are_compared_by_their_tokens(folder, stores):
    path = folder / "foreign"
    path.mkdir()
    head = targets.head("default")
    for number, each in enumerate(reversed(list(stores["bfloat16"]))):
        pre_norm = (each.last.float() / head.norm_weight.float()).bfloat16()  # of another length; the norm forgets it
        save_file({"hidden_states": torch.cat([each.hidden, pre_norm[:, None]], 1).contiguous(), "token_ids": each.tokens.contiguous()},
                  path / f"hs_{number}.safetensors")
    report = diff.compare(stores["bfloat16"], open_store(path, num_layers=30), target="default")
    assert report.alignment.tokens == stores["bfloat16"].manifest.tokens
    table = report.boundaries.set_index("boundary")
    assert table.rel_l2_max[["2", "15", "27"]].max() == 0 and table.rel_l2["last"] < 0.005
    assert "norm-states-differ" in [finding.code for finding in report.findings]
    assert "last" not in list(diff.compare(stores["bfloat16"], open_store(path, num_layers=30)).boundaries.boundary)


class Counter:
    "A drafter that reads the next token off the states, one further for each draft; states that lie mislead it."
    config = DrafterConfig(hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16, vocab_size=16,
                           draft_vocab_size=16, boundaries=(2,), num_aux=1, rope={"rope_type": "default", "rope_theta": 1e4})
    fc = torch.nn.Linear(1, 1)
    fuse, lm_head, to_target = (staticmethod(each) for each in (lambda hidden: hidden[:, :, 0], lambda states: states, lambda tokens: tokens))

    def step(self, states, given, positions, cache):
        return states, states.roll(1, -1)


def test_a_difference_is_told_in_tokens_per_step(tmp_path):
    sides = []
    for name, wrong in (("right", 0), ("wrong", 5)):
        with create(tmp_path / name, {**FACTS, "answers": {"temperature": 0.0}}, [40] * 5, (2,), 16, dtype="float32") as writer:
            for number in range(5):
                tokens = (torch.arange(40) + number) % 16
                told = torch.nn.functional.one_hot((tokens + 2 + wrong * (number < 3)) % 16, 16).float()
                writer.append(tokens, told[:, None], told, torch.arange(40) > 3)
        sides.append(open_store(tmp_path / name))
    cost = diff.compare(*sides, drafter=Counter(), num_draft=3).acceptance
    assert cost.a.accept_len == 4 and cost.b.accept_len < 3 and cost.documents == 5
    assert cost.low <= cost.difference <= cost.high < 0


# --- stores that cannot be compared

def test_strangers_are_refused(folder, stores):
    for name, facts, message in (("tokenizer", dict(tokenizer_fingerprint="ffff"), "tokenizer_fingerprint"),
                                 ("weights", dict(weight_fingerprint="ffff"), "any_weights=True")):
        other = rewrite(stores["bfloat16"], folder / f"strange-{name}", **facts)
        with pytest.raises(ValueError, match=message):
            diff.compare(stores["bfloat16"], other)
    assert diff.compare(stores["bfloat16"], other, any_weights=True).boundaries.rel_l2_max.max() == 0
    with pytest.raises(ValueError, match="capture the same boundaries"):
        diff.compare(stores["bfloat16"], stores["later"])
    with pytest.raises(ValueError, match="pass the checkpoint"):
        diff.compare(stores["bfloat16"], stores["alone"], target=targets.mini_kimi(folder / "kimi"))


@pytest.mark.parametrize("damage, message", [
    (lambda path: path.write_bytes(path.read_bytes()[:-7]), r"shard-00000.safetensors is cut off or altered"),
    (lambda path: path.unlink(), r"shard-00000.safetensors is missing"),
    (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), r"shard-00000.safetensors is altered")])
def test_damaged_stores_are_named(tmp_path, stores, damage, message):
    copy = tmp_path / "copy"
    shutil.copytree(stores["alone"].path, copy)
    damage(copy / "shard-00000.safetensors")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        diff.compare(stores["bfloat16"], copy)


def test_an_unfinished_store_is_refused_until_allowed(tmp_path):
    texts = [[1, 2, 3, number] for number in range(6)]
    whole, path = write(tmp_path / "whole", texts), tmp_path / "part"
    with create(path, FACTS, [4] * 6, BOUNDARIES, WIDTH, dtype="float32", shard_bytes=500) as writer:
        for number in range(4):
            document = whole[number]
            writer.append(*document[:4])
    with pytest.raises(ValueError, match="is unfinished"):
        diff.compare(whole, path)
    report = diff.compare(whole, open_store(path, allow_partial=True))
    assert 0 < len(report.alignment.pairs) < 6
    assert "documents-missing" in [finding.code for finding in report.findings]


def test_results_are_plain_files(tmp_path, stores, noise):
    report = diff.compare(stores["bfloat16"], stores["float32"], noise=noise.save(tmp_path / "floor.csv"))
    files = {path.name for path in report.save(tmp_path / "report").iterdir()}
    assert {"boundaries.csv", "positions.csv", "findings.csv", "floor.csv", "report.json"} <= files
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    assert summary["verdict"] == report.verdict and summary["tokens"] == report.alignment.tokens
    assert Floor.load(tmp_path / "report" / "floor.csv").level("15") == pytest.approx(noise.level(15))


# --- memory

READER = """
import re, sys
from pathlib import Path
import torch
from k2eagle import diff
from k2eagle.store import open_store
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
torch.set_num_threads(1)
stores = [open_store(path) for path in sys.argv[1:]]
before = peak()
report = diff.compare(*stores)
print(peak() - before, report.bytes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc, which tells a process its peak memory")
def test_memory_does_not_grow_with_the_stores(tmp_path):
    states, used = torch.randn(2048, 4, 2048).bfloat16(), []
    for documents in (2, 8):  # 67 MB and 268 MB a store, in files of 67 MB
        paths = [tmp_path / f"{documents}-{side}" for side in "ab"]
        for path in paths:
            with create(path, FACTS, [2048] * documents, (2, 15, 27), 2048, shard_bytes=64 << 20) as writer:
                for number in range(documents):
                    writer.append((torch.arange(2048) + number) % 999, states[:, :3], states[:, 3], torch.arange(2048) > 5)
        done = subprocess.run([sys.executable, "-c", READER, *map(str, paths)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        used.append(list(map(int, done.stdout.split())))
    assert used[1][1] == 4 * used[0][1]
    assert used[1][0] < used[0][0] + 100_000  # kB
