"""A drafter in the real engines: counted as simulated, and the text unchanged.

Run: pytest tests/test_serving.py (about 4 minutes on two quiet cores)
"""
import pytest
from k2eagle import accept, capture, serving, text, train

PROMPTS, TOKENS = 4, 32


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A drafter trained a little in float32, its checkpoint, and held-out answers with their states."
    folder = tmp_path_factory.mktemp("trained")
    options = dict(max_new_tokens=TOKENS, dtype="float32", batch_size=8)
    learned = capture.capture("default", text.prompts(16, "train"), folder / "train", **options)
    measured = capture.capture("default", text.prompts(PROMPTS, "heldout"), folder / "heldout", **options)
    config = train.TrainConfig(steps=40, batch_tokens=512, dtype="float32", eval_every=1000, save_every=1000)
    result = train.train(learned, folder / "run", "default", config=config, draft_vocab_size=1024)
    return result.drafter.float(), result.folder / "drafter", measured


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_served_is_simulated_and_the_text_is_the_target_s(engine, trained, engine_python, tmp_path):
    engine_python(engine)
    drafter, checkpoint, measured = trained
    options = dict(max_new_tokens=TOKENS, dtype="float32", engine_options={"device": "cpu", "batch_documents": 1})
    prompts = text.prompts(PROMPTS, "heldout")
    served = serving.serve(engine, prompts, tmp_path / "drafted", drafter=checkpoint, **options)
    assert not served.findings and served.captured == (2, 15, 27)
    assert served.frame.id.tolist() == [prompt.id for prompt in prompts]
    assert (served.frame.accepted == served.frame[["pos_1", "pos_2", "pos_3"]].sum(axis=1)).all()
    assert served.frame.accepted.sum() > 0

    plain = serving.serve(engine, prompts, tmp_path / "plain", **options)
    assert not len(plain.frame) and plain.num_draft is None
    assert not serving.partings(plain, served, prompts).lossy.any()
    same = [name for name, answer in plain.answers.items() if served.answers[name] == answer]
    assert len(same) >= PROMPTS - 1, "one stream in float32: speculation must not change the text"

    simulated = accept.simulate(drafter, measured)
    known = {measured[index].id: measured[index] for index in range(len(measured))}
    exact = 0
    for row, other in zip(served.frame.itertuples(), simulated.frame.itertuples()):
        document = known[row.id]
        if document.tokens[document.loss_mask].tolist() == served.answers[row.id]:  # the very same text: the walk is what the engine did
            exact += 1
            assert row.id == other.id and 0 <= row.drafts - other.drafts <= 3 and 0 <= row.accepted - other.accepted <= 6, (row, other)
    assert exact >= PROMPTS - 1
    assert accept.compare_served(simulated, accept.of_served(served))[0].severity == "note"
    with pytest.raises(ValueError, match="drafted nothing"):
        accept.of_served(plain)


def test_tree_in_sglang_keeps_at_least_what_its_chain_keeps(trained, engine_python, tmp_path):
    engine_python("sglang")
    options = dict(max_new_tokens=TOKENS, dtype="float32", engine_options={"device": "cpu", "batch_documents": 4})
    tree = serving.serve("sglang", text.prompts(PROMPTS, "heldout"), tmp_path, drafter=trained[1], topk=4, num_draft_tokens=8, **options)
    assert tree.frame.drafted.sum() == 7 * tree.frame.drafts.sum()  # nodes of the tree, its root left out
    chain = accept.simulate(trained[0], trained[2])
    assert accept.of_served(tree).accept_len > chain.ci[0]


@pytest.mark.parametrize(("given", "message"), [
    (dict(engine="vllm", topk=4, num_draft_tokens=8), "drafts a chain"),
    (dict(engine="sglang", temperature=0.7), "verifies greedily on a CPU"),
])
def test_what_an_engine_cannot_do_is_said(given, message, trained, engine_python, tmp_path):
    from k2eagle.jobs import EngineError
    engine_python(given["engine"])
    with pytest.raises(EngineError, match=message):
        serving.serve(prompts=["What is rain?"], folder=tmp_path, drafter=trained[1], engine_options={"device": "cpu"}, **given)


def test_absent_drafter_is_refused_before_an_engine_starts(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        serving.serve("vllm", ["What is rain?"], tmp_path / "out", drafter=tmp_path / "nothing", engine_options={"device": "cpu"})
    assert not (tmp_path / "out").exists()
