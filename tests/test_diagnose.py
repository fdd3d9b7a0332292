"The diagnosis: faults made in real captures of three architectures, alone and in pairs, and clean pairs; from stores as well."
import itertools
import sys

import pytest
import torch
from conftest import ROOT

from k2eagle.align import align
from k2eagle.capture import capture
from k2eagle.diagnose import STRUCTURAL, candidates, diagnose, gather, refer
from k2eagle.faults import FAULTS, fault
from k2eagle.measure import Floor
from k2eagle.store import create, open_store
from k2eagle.targets import facts, head
from k2eagle.text import Sample

sys.path.insert(0, str(ROOT / "benchmarks"))
from diagnosis import TARGETS, Case, conversations, summary, trial, trials  # noqa: E402

PAIRS = (  # of every stage with every other, and of two faults at one stage
    ("layer-shift +1", "final norm missing"), ("layer-shift -1", "basis rotated"), ("layer-shift +1", "int4 weights, groups of 32"),
    ("aux slots in another order", "token shift -1"), ("aux slots in another order", "layer-shift +1"), ("rank 0 of 8", "scaled by 1.2"),
    ("rank 0 of 4", "coarse branches, 4 bits"), ("residual without branch", "token shift +1"), ("channels permuted", "final norm applied twice"),
    ("scaled by 12", "chunk of zeros"), ("token shift +1", "int4 weights, groups of 32"), ("layer-shift +2", "prefix of another document"),
    ("chunk of stale rows", "stored as fp8"), ("chunk read without what came before", "int8 weights"), ("rope base / 4", "layer-shift +1"),
    ("hidden leading token", "scaled by 12"))


@pytest.fixture(scope="module", params=["smollm2", "kimi", "qwen3", "gptoss"])
def case(request, tmp_path_factory) -> Case:
    "A target with a right side and a reference."
    return Case(request.param, tmp_path_factory.mktemp(request.param), conversations(8, 96))


def test_faults_alone(case):
    made = [trial(case, case.evidence(one), (one,), "single", case.reference) for one in FAULTS if case.usable(one)]
    missed = [(row["faults"], row["found"]) for row in made if not row["hit"]]
    assert len(missed) <= 0.05 * len(made), missed
    wrong = [(row["faults"], row["found"]) for row in made if row["false_structural"]]
    assert len(wrong) <= 0.05 * len(made), wrong


def test_faults_in_pairs(case):
    pairs = [tuple(map(fault, names)) for names in PAIRS]
    made = [trial(case, case.evidence(*pair), pair, "pair", case.reference) for pair in pairs]
    missed = [(row["faults"], row["found"]) for row in made if not row["hit"]]
    assert len(missed) <= 0.1 * len(made), missed  # one of sixteen
    assert sum(row["all_found"] for row in made) >= 0.75 * len(made)


def test_clean_pairs(case):
    for (name, evidence), reference in itertools.product(case.clean().items(), (case.reference, None)):
        found = diagnose(evidence, reference=reference)
        assert not [finding for finding in found if finding.code in STRUCTURAL], (case.name, name, reference is not None, str(found))


def test_neighbours_serve_without_a_reference(case):
    near = candidates(case.bench.boundaries, case.exact.recording().num_layers)
    right = {str(b): case.exact.recording().states[b].bfloat16() for b in near} | {"last": case.right["last"]}
    for name in ("layer-shift +1", "layer-shift -1", "layer-shift +2"):
        found = diagnose(case.evidence(fault(name), a=right))
        assert found[0].code == "layer-shift" and name.split()[1] in found[0].message, str(found)


def test_says_which_side_is_wrong(case):
    both = case.evidence(fault("layer-shift +1"))
    found = diagnose(case.evidence(a=both.b, b=both.a), reference=case.reference)
    assert found[0].code == "layer-shift" and found[0].subject.startswith("right,"), str(found)  # labels stay: a is called right
    assert not [finding for finding in found if finding.subject.startswith("engine,")]


def test_a_given_floor_decides(case):
    rows = [dict(boundary=slot, median=1.0, p95=2.0, p99=3.0, tokens=1, source="test") for slot in case.evidence().right]
    import pandas as pd
    found = diagnose(case.evidence(fault("coarse branches, 4 bits")), Floor(pd.DataFrame(rows)), case.reference)
    assert [finding.code for finding in found] == ["agreement"]


def test_summary_counts(case):
    rows = [run() for _, run in itertools.islice(trials(case, pairs=False), 4)]
    import pandas as pd
    counted = summary(pd.DataFrame(rows))
    assert counted.diagnoses.sum() == 4 and counted.false_structural.sum() == 0


def wrong_store(folder, right, change):
    "A copy of a store, its states changed."
    made = {name: getattr(right.manifest, name) for name in ("engine", "engine_version", "model", "arch", "weight_fingerprint", "num_layers",
                                                             "last_norm", "tokenizer_fingerprint", "template_fingerprint")}
    with create(folder, made, right.lengths, right.manifest.boundaries, right.manifest.hidden_size, right.ids, right.manifest.dtype) as writer:
        for document in right:
            hidden, last = change(document)
            writer.append(document.tokens, hidden, last, document.loss_mask)
    return open_store(folder)


def test_from_stores(tmp_path):
    samples = [Sample(f"s{i}", tokens, [False] + [True] * (len(tokens) - 1)) for i, tokens in enumerate(conversations(6, 96))]
    right = capture("default", samples, tmp_path / "right")
    swapped = wrong_store(tmp_path / "swapped", right, lambda document: (document.hidden.flip(1), 1.5 * document.last))
    evidence = gather(right, swapped, align(right, swapped), 400, head("default"))
    assert 400 <= len(evidence.rows) < 464 and evidence.num_layers == facts("default").num_layers
    assert evidence.about[1]["engine"] == "hf"
    for reference in (None, refer("default", evidence, rounding=False)):
        found = diagnose(evidence, reference=reference)
        assert {finding.code for finding in found if finding.severity == "error"} == {"aux-order", "scaled"}, str(found)


def test_rows_of_any_order_of_documents(tmp_path):
    samples = [Sample(f"s{i}", tokens, [False] + [True] * (len(tokens) - 1)) for i, tokens in enumerate(conversations(6, 64))]
    right = capture("default", samples, tmp_path / "right")
    other = capture("default", samples[::-1], tmp_path / "other", dtype="float32")
    found = diagnose(gather(right, other, align(right, other)))
    assert not [finding for finding in found if finding.code in STRUCTURAL], str(found)


def test_few_rows_are_no_obstacle(tmp_path):
    samples = [Sample("s0", conversations(6, 64)[0][:5], [False] + [True] * 4)]
    right = capture("default", samples, tmp_path / "right")
    for store in (right, wrong_store(tmp_path / "zeros", right, lambda document: (torch.zeros_like(document.hidden), document.last))):
        assert isinstance(diagnose(gather(right, store, align(right, store))), list)


def test_targets_have_their_architectures():
    assert set(TARGETS) == {"smollm2", "kimi", "qwen3", "gptoss"}
