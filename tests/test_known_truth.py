"""Acceptance that is known beforehand: the engines make it up, and counters and logs must give it back.

SGLang is told to by SGLANG_SIMULATE_ACC_LEN, vLLM by its synthetic rejection. The drafter is not trained: what it drafts does not matter.
Run: pytest tests/test_known_truth.py (about 2 minutes on two quiet cores; K2EAGLE_EXHAUSTIVE=1 adds 3)
"""
import math

import numpy as np
import pytest
import torch
from conftest import ROOT
from k2eagle import accept, checkpoint, drafter, serving, targets, text
from k2eagle.logs import read_log

PROMPTS, TOKENS, K = 6, 40, 3
COUNTS = ["drafts", "drafted", "accepted", "pos_1", "pos_2", "pos_3"]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    "A drafter with random weights."
    torch.manual_seed(0)
    facts, vocab = targets.facts(targets.default_target()), text.draft_vocab(np.ones(49152, dtype=int), 1024)
    made = drafter.new_drafter(drafter.config_for(facts, 1024), targets.head(facts.path), vocab)
    return checkpoint.save(made.to(torch.bfloat16), tmp_path_factory.mktemp("untrained"), target=facts)


def serve(engine, folder, untrained, **engine_args):
    options = {"device": "cpu", "batch_documents": 3, "engine_args": engine_args}
    return serving.serve(engine, text.prompts(PROMPTS, "heldout"), folder, drafter=untrained, num_draft=K, max_new_tokens=TOKENS, engine_options=options)


SGLANG = [("3", "fixed", "match-expected")]
MORE = [("1", "fixed", "match-expected"), ("4", "real-draft-token", "match-expected"), ("2.5", "real-draft-token", "match-expected"),
        ("2.5", "fixed", "multinomial")]


@pytest.mark.parametrize(("length", "tokens", "method"), [*SGLANG, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in MORE)])
def test_sglang_gives_the_length_it_was_told(length, tokens, method, untrained, engine_python, tmp_path, monkeypatch):
    engine_python("sglang")
    for name, value in {"LEN": length, "TOKEN_MODE": tokens, "METHOD": method}.items():
        monkeypatch.setenv(f"SGLANG_SIMULATE_ACC_{name}", value)
    served = serve("sglang", tmp_path, untrained, decode_log_interval=1)
    frame, truth = served.frame, float(length)
    assert [finding.code for finding in served.findings] == ["acceptance-faked"]
    assert f"SGLANG_SIMULATE_ACC_LEN={length}" in served.findings[0].evidence
    assert ("token 100 throughout" in served.findings[0].evidence) == (tokens == "fixed")
    got = accept.of_served(served)
    if truth == int(truth):  # every step keeps as many
        assert (frame.accepted == (truth - 1) * frame.drafts).all() and got.accept_len == truth
        assert got.per_position == tuple(float(k < truth) for k in range(1, K + 1))
        if tokens == "fixed":  # no stop token comes in between; the prefill gives one token
            assert set(frame.drafts) == {math.ceil((TOKENS - 1) / truth)}
    log = read_log(tmp_path / "sglang.log", num_draft_tokens=K + 1)
    warm = int(log.running.sum()) - got.drafts  # steps of the request that warms the engine up, which ran alone
    assert 1 <= warm <= 3 and (log.running[:warm] == 1).all()
    log = log.iloc[warm:]
    assert abs(np.average(log.accept_len, weights=log.running) - got.accept_len) < 0.005
    assert abs(np.average(log.rate, weights=log.running) - got.rate) < 0.005
    spread = {"match-expected": (truth - int(truth)) * (1 - truth + int(truth)), "multinomial": 1.0}[method] ** 0.5
    assert abs(got.accept_len - truth) <= 4 * spread / len(log) ** 0.5  # one draw a step, for all that run together


def test_vllm_gives_the_rates_it_was_told(untrained, engine_python, tmp_path, monkeypatch):
    engine_python("vllm")
    rates = [1.0, 0.6, 0.2]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # for the worker
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.0001")  # a line a step
    made_up = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    served = serve("vllm", tmp_path, untrained, speculative_config=made_up, worker_cls="synthetic_rejection.Worker")
    assert [finding.code for finding in served.findings] == ["acceptance-faked"] and "synthetic" in served.findings[0].evidence
    got = accept.of_served(served)
    assert got.kept[0] == got.drafts and got.per_position[0] == 1.0
    for share, rate in zip(got.per_position, rates):
        assert abs(share - rate) <= 4 * (rate * (1 - rate) / got.drafts) ** 0.5
    log = read_log(tmp_path / "vllm.log")
    assert (log[COUNTS].sum() == served.frame[COUNTS].sum()).all()
    assert np.allclose(log.accept_len, 1 + log.accepted / log.drafts)
