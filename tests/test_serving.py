"""A drafter in the real engines: counted as simulated, and the text unchanged.

Run: pytest tests/test_serving.py (about 6 minutes on two quiet cores)
"""
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from engine_server import running
from k2eagle import accept, asking, capture, counters, jobs, servers, serving, text, train

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


OPTIONS = dict(max_new_tokens=TOKENS, dtype="float32", engine_options={"device": "cpu", "batch_documents": 1})


@pytest.fixture(scope="module")
def served(trained, engine_python, tmp_path_factory):
    "A function that serves the drafter in an engine, once."
    known = {}

    def once(engine: str) -> serving.Served:
        if engine not in known:
            engine_python(engine)
            known[engine] = serving.serve(engine, text.prompts(PROMPTS, "heldout"), tmp_path_factory.mktemp(engine), drafter=trained[1], **OPTIONS)
        return known[engine]

    return once


def walked_alike(served: serving.Served, simulated: accept.Acceptance, measured) -> tuple:
    "Of the requests that the engine answered with the very text of the store: how many, and how many of them count as simulated."
    said = {document.id: document.tokens[document.loss_mask].tolist() for document in (measured[index] for index in range(len(measured)))}
    rows = [(row, other) for row, other in zip(served.frame.itertuples(), simulated.frame.itertuples()) if said[row.id] == served.answers[row.id]]
    assert all(row.id == other.id for row, other in rows)
    # the engine's last steps may reach past the answer; the walk leaves them out
    right = [0 <= row.drafts - other.drafts <= 3 and 0 <= row.accepted - other.accepted <= 6 for row, other in rows]
    return len(rows), sum(right)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_served_is_simulated_and_the_text_is_the_target_s(engine, trained, served, tmp_path):
    drafter, _, measured = trained
    prompts, served = text.prompts(PROMPTS, "heldout"), served(engine)
    assert not served.findings and served.captured == (2, 15, 27)
    assert served.frame.id.tolist() == [prompt.id for prompt in prompts]
    assert (served.frame.accepted == served.frame[["pos_1", "pos_2", "pos_3"]].sum(axis=1)).all()
    assert served.frame.accepted.sum() > 0

    plain = serving.serve(engine, prompts, tmp_path / "plain", **OPTIONS)
    assert not len(plain.frame) and plain.num_draft is None
    assert not serving.partings(plain, served, prompts).lossy.any()
    same = [name for name, answer in plain.answers.items() if served.answers[name] == answer]
    assert len(same) >= PROMPTS - 1, "one stream in float32: speculation must not change the text"

    simulated = accept.simulate(drafter, measured)
    compared, right = walked_alike(served, simulated, measured)
    assert right == compared >= PROMPTS - 1
    assert accept.compare_served(simulated, accept.of_served(served))[0].severity == "note"
    with pytest.raises(ValueError, match="drafted nothing"):
        accept.of_served(plain)


def test_tree_in_sglang_is_simulated_and_keeps_more_than_a_chain(trained, engine_python, tmp_path):
    engine_python("sglang")
    options = dict(max_new_tokens=TOKENS, dtype="float32", engine_options={"device": "cpu", "batch_documents": 4})
    tree = serving.serve("sglang", text.prompts(PROMPTS, "heldout"), tmp_path, drafter=trained[1], topk=4, num_draft_tokens=8, **options)
    assert tree.frame.drafted.sum() == 7 * tree.frame.drafts.sum()  # nodes of the tree, its root left out
    simulated, chain = (accept.simulate(trained[0], trained[2], **way) for way in (dict(topk=4, num_draft_tokens=8), {}))
    compared, right = walked_alike(tree, simulated, trained[2])
    assert right == compared >= PROMPTS - 2
    # on one prompt a chain keeps no draft in 29 steps, the tree 5 in 24: the tolerance must not take one for the other
    assert walked_alike(tree, chain, trained[2])[1] < right
    assert accept.compare_served(simulated, accept.of_served(tree))[0].severity == "note"
    assert accept.of_served(tree).accept_len > chain.accept_len + 0.05


@pytest.mark.parametrize(("given", "message"), [
    (dict(engine="vllm", topk=4, num_draft_tokens=8), "drafts a chain"),
    (dict(engine="sglang", temperature=0.7), "verifies greedily on a CPU"),
    (dict(engine="vllm", temperature=0.7), "loses the temperature"),
    (dict(engine="sglang", draft_sample_method="probabilistic"), "SGLang drafts greedily"),
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


DRAFTING = {"vllm": lambda drafter: ["--per-request-spec-decode-metrics", "summary", "--speculative-config",
                                     json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3})],
            "sglang": lambda drafter: ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx", "--enable-metrics",
                                       "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter),
                                       "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_running_server_counts_what_a_started_engine_counts(engine, trained, served, tmp_path):
    prompts, started = text.prompts(PROMPTS, "heldout"), served(engine)
    with running(engine, tmp_path, "--dtype", "float32", *DRAFTING[engine](trained[1])) as url:
        asked = serving.serve(engine, prompts, tmp_path, drafter=trained[1], url=url, **OPTIONS)
        with pytest.raises(ValueError, match="num_draft 5, the server drafts 3 steps"):
            serving.serve(engine, prompts, tmp_path / "never", num_draft=5, url=url, **OPTIONS)
        if engine == "sglang":
            with pytest.raises(ValueError, match="verifies greedily on a CPU"):
                serving.serve(engine, prompts, tmp_path / "never", url=url, **{**OPTIONS, "temperature": 0.7})
        else:
            totals_of_a_window(url, asked, tmp_path)
    assert not asked.findings and (asked.engine, asked.num_draft) == (engine, 3)
    same = [prompt.id for prompt in prompts if asked.answers[prompt.id] == started.answers[prompt.id]]
    assert len(same) >= PROMPTS - 1  # one stream in float32
    rows = [frame.set_index("id").loc[same] for frame in (asked.frame, started.frame)]
    assert rows[0].equals(rows[1])
    assert accept.of_served(asked).accept_len == pytest.approx(accept.of_served(started).accept_len, abs=0.1)
    kept = counters.read_counters(tmp_path / "counted.jsonl")
    assert [int(kept[name].sum()) for name in ("drafts", "drafted", "accepted")] == [asked.frame[name].sum() for name in ("drafts", "drafted", "accepted")]


def totals_of_a_window(url: str, asked: serving.Served, folder: Path):
    "vLLM's totals are those of its requests; a request of somebody else is noticed."
    before, page = (folder / name for name in ("metrics-before.txt", "metrics.txt"))
    row = counters.read_counters(page, before=before).iloc[0]
    columns = ["drafts", "drafted", "accepted", "pos_1", "pos_2", "pos_3"]
    assert row[columns].tolist() == asked.frame[columns].sum().tolist()
    model = servers.call(url, "/v1/models")["data"][0]["id"]
    tokens = sum(map(len, asked.answers.values()))
    servers.call(url, "/v1/completions", {"model": model, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
    found = asking.window(url, before.read_text(), tokens)[2]
    assert [finding.code for finding in found] == ["other-traffic"] and f"{tokens + 5} tokens generated" in found[0].evidence
    drawn = serving.serve("vllm", ["What is rain?"], folder / "drawn", url=url, max_new_tokens=16, temperature=0.7, seed=1)
    assert not drawn.findings and 16 <= 1 + drawn.frame.drafts[0] + drawn.frame.accepted[0] <= 16 + 3


@contextmanager
def playing(answers: dict):
    "A server that answers as it is told; of a list an item each time, and its last one for ever."
    class Played(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path)
            if isinstance(body, list):
                body = body.pop(0) if len(body) > 1 else body[0]
            if body == "gone":
                self.connection.close()
                return
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Played)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def vllm_page(drafts: int, kept: list, generated: int) -> str:
    "A metrics page as far as it matters."
    counts = {"num_drafts": drafts, "num_draft_tokens": len(kept) * drafts, "num_accepted_tokens": sum(kept)}
    lines = [f'vllm:spec_decode_{name}_total{{engine="0"}} {value}.0' for name, value in counts.items()]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {n}.0' for k, n in enumerate(kept)]
    return "\n".join([*lines, f'vllm:generation_tokens_total{{engine="0"}} {generated}.0', 'vllm:num_requests_running{engine="0"} 0.0', ""])


SGLANG = {"version": "0.5.23", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4, "device": "cuda"}
VLLM = {"/version": {"version": "0.28.0"}, "/v1/models": {"data": [{"id": "m", "root": "/elsewhere/smollm2-135m-instruct"}]},
        "/v1/completions": {"choices": [{"token_ids": [5, 6, 7, 8], "finish_reason": "length"}]}}
ANSWER = {"output_ids": [5, 6, 7, 8], "meta_info": {"finish_reason": {"type": "length"}, "completion_tokens": 4, "spec_verify_ct": 2,
                                                    "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 6}}


def ask(engine: str, url: str, folder, **more) -> serving.Served:
    return serving.serve(engine, ["What is rain?", "What is snow?", "What is hail?"], folder, url=url, engine_options={"batch_documents": 1}, **more)


@pytest.mark.parametrize(("engine", "pages", "message"), [
    ("sglang", {"/get_server_info": {**SGLANG, "speculative_algorithm": None}}, "drafts nothing"),
    ("sglang", {"/get_server_info": {**SGLANG, "speculative_num_steps": None, "speculative_num_draft_tokens": None}}, "does not say how far it drafts"),
    ("sglang", {"/get_server_info": {**SGLANG, "speculative_adaptive": True}}, "does not say how far it drafts"),
    ("sglang", {}, "answered 404"),
    ("sglang", {"/get_server_info": SGLANG, "/generate": [ANSWER, ANSWER, "gone"]}, "2 of 3 answers had come: no answer from"),
    ("sglang", {"/get_server_info": SGLANG, "/generate": [ANSWER, {"meta_info": {"finish_reason": {"type": "abort"}}}]}, "1 of 3 answers had come"),
    ("vllm", {**VLLM, "/metrics": 'vllm:generation_tokens_total{engine="0"} 3.0\n'}, "drafts nothing, or was started with --disable-log-stats"),
    ("vllm", {**VLLM, "/metrics": [vllm_page(0, [0, 0], 0), "gone"]}, "no answer from"),
    ("vllm", {**VLLM, "/metrics": vllm_page(0, [0, 0], 0), "/v1/completions": {"choices": [{"text": "rain"}]}}, "return_token_ids")])
def test_server_that_cannot_be_measured_is_refused(engine, pages, message, tmp_path):
    with playing(pages) as url, pytest.raises(jobs.EngineError, match=message):
        ask(engine, url, tmp_path)


def test_server_that_is_not_there_is_said_so(tmp_path):
    with playing({}) as url:
        pass
    with pytest.raises(jobs.EngineError, match="is the server up"):
        ask("vllm", url, tmp_path)


@pytest.mark.parametrize(("generated", "code"), [(12, None), (40, "other-traffic"), (8, "counters-of-another-server")])
def test_totals_are_of_the_window_and_the_answers(generated, code, tmp_path):
    with playing({**VLLM, "/metrics": [vllm_page(7, [5, 1], 100), vllm_page(15, [9, 2], 100 + generated)]}) as url:
        served = ask("vllm", url, tmp_path)
    assert served.frame.iloc[0].tolist() == ["all", 8, 16, 5, 4, 1] and served.num_draft == 2
    assert [finding.code for finding in served.findings] == ([code] if code else [])


def test_server_that_makes_acceptance_up_or_has_another_drafter_is_noticed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    told = {**SGLANG, "speculative_draft_model_path": "/elsewhere/head", "internal_states": [{"env_vars": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}]}
    with playing({"/get_server_info": told, "/generate": ANSWER}) as url:
        served = ask("sglang", url, tmp_path, drafter=tmp_path)
    assert [finding.code for finding in served.findings] == ["other-drafter", "acceptance-faked"]
