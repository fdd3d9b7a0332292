"The real SGLang on a CPU: its worker's hidden states against transformers and against its own interface, in every mode."
import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from k2eagle import targets, text
from k2eagle.workers import sglang_worker

WORKER = ROOT / "k2eagle" / "workers" / "sglang_worker.py"
TOKENS = 8  # so few that a random drafter is right now and then, also on a branch other than the first
LAYERS = 7
BOUNDARIES = [2, 3, 4]
ENGINES = '''
import json, sys
from pathlib import Path
def main(workers, source, target):
    sys.path.insert(0, workers)
    import sglang_worker
    sglang_worker.prepare_cpu(Path(workers)/"sglang_cpu")
    import sglang
    replies = []
    for run in json.loads(Path(source).read_text()):
        engine = sglang.Engine(**run["arguments"])
        replies.append(engine.generate(input_ids=run["prompts"], sampling_params=run["sampling"], **run["options"]))
        engine.shutdown()
    Path(target).write_text(json.dumps(replies))
if __name__ == "__main__":
    main(*sys.argv[1:])
'''


@pytest.fixture(scope="session")
def python() -> str:
    "An interpreter that has SGLang."
    named = os.environ.get("K2EAGLE_SGLANG_PYTHON")
    if named:
        return named
    engines = pytest.importorskip("k2eagle.engines", reason="needs K2EAGLE_SGLANG_PYTHON, a Python with SGLang")
    try:
        return str(engines.python("sglang"))
    except FileNotFoundError as error:
        return pytest.skip(f"needs SGLang: {error}")


def environment() -> dict:
    "An environment in which the worker has to find everything by itself."
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"}


def block(random, hidden: int, inputs: int, prefix: str) -> dict:
    "Random weights of one Llama layer with 4 heads and 2 key heads, whose attention reads `inputs` channels."
    draw = lambda *shape: torch.randn(*shape, generator=random) * shape[-1] ** -0.5
    shapes = {"self_attn.q_proj": (hidden, inputs), "self_attn.k_proj": (hidden // 2, inputs),
              "self_attn.v_proj": (hidden // 2, inputs), "self_attn.o_proj": (hidden, hidden),
              "mlp.gate_proj": (2 * hidden, hidden), "mlp.up_proj": (2 * hidden, hidden), "mlp.down_proj": (hidden, 2 * hidden)}
    return {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}


def save(folder: Path, weights: dict, hidden: int, layers: int, **more) -> Path:
    "Write a Llama checkpoint."
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 2 * hidden,
              "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
              "vocab_size": TOKENS, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder


def llama(folder: Path, hidden: int = 64) -> Path:
    "A random Llama that knows eight tokens."
    random = torch.Generator().manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(TOKENS, hidden, generator=random), "model.norm.weight": torch.ones(hidden),
               "lm_head.weight": torch.randn(TOKENS, hidden, generator=random) * hidden ** -0.5}
    for layer in range(LAYERS):
        weights |= block(random, hidden, hidden, f"model.layers.{layer}.")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    return save(folder, weights, hidden, LAYERS)


def drafter(folder: Path, hidden: int) -> Path:
    "A random EAGLE-3 drafter for a target of this width."
    random = torch.Generator().manual_seed(1)
    weights = {"fc.weight": torch.randn(hidden, 3 * hidden, generator=random) * (3 * hidden) ** -0.5,
               "norm.weight": torch.ones(hidden), "lm_head.weight": torch.randn(TOKENS, hidden, generator=random) * hidden ** -0.5,
               "d2t": torch.zeros(TOKENS, dtype=torch.int64), "t2d": torch.ones(TOKENS, dtype=torch.bool),
               **block(random, hidden, 2 * hidden, "midlayer."),
               **{f"midlayer.{norm}.weight": torch.ones(hidden) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}}
    weights["midlayer.self_attn.o_proj.weight"] = weights["midlayer.self_attn.o_proj.weight"][:, :hidden].contiguous()
    return save(folder, weights, hidden, 1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=TOKENS, attention_bias=False)


def few_tokens(source: Path, folder: Path) -> Path:
    "A copy of a mini Kimi that knows eight tokens."
    folder.mkdir()
    weights = load_file(source / "model.safetensors")
    for name in weights:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weights[name] = weights[name][:TOKENS].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    language = config.get("text_config", config)
    language |= {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict:
    "Checkpoints by name: a Llama, a mini Kimi-K2, the same in Kimi-K2.5's wrapper, and drafters for the first two."
    folder = tmp_path_factory.mktemp("models")
    kimi, wrapped = (few_tokens(targets.mini_kimi(folder / f"whole{wrapper}", wrapper, num_layers=LAYERS), folder / f"kimi{wrapper}")
                     for wrapper in (False, True))
    return {"llama": llama(folder / "llama"), "kimi": kimi, "wrapped": wrapped,
            "llama-drafter": drafter(folder / "llama-drafter", 64), "kimi-drafter": drafter(folder / "kimi-drafter", 128)}


@pytest.fixture(scope="session")
def documents() -> list:
    "Conversations over eight tokens; the last three begin alike."
    random = torch.Generator().manual_seed(5)
    draw = lambda size: torch.randint(2, TOKENS, (size,), generator=random).tolist()
    beginning = draw(40)
    rows = [(draw(19), 7), (draw(5), 1)] + [(beginning + draw(size), 44) for size in (9, 23, 14)]
    return [sglang_worker.Document(10 + place, f"document-{place}", tokens, prompt) for place, (tokens, prompt) in enumerate(rows)]


@dataclasses.dataclass
class Outcome:
    "What a worker left behind."
    status: int
    events: list
    states: dict   # by index
    log: str

    @property
    def message(self) -> str:
        "Why it failed."
        return next(event["message"] for event in self.events if event["event"] == "failed")

    def event(self, kind: str) -> dict:
        "The first event of a kind."
        return next(event for event in self.events if event["event"] == kind)


def write_job(folder: Path, model: Path, documents: list, **changes) -> Path:
    "Write a job and its documents; return the job's file."
    (folder / "documents.json").write_text(json.dumps([dataclasses.asdict(document) for document in documents]))
    job = {"format": "k2eagle-job-1", "task": "capture", "model": str(model), "documents": str(folder / "documents.json"),
           "out": str(folder / "exchange"), "boundaries": BOUNDARIES, "mode": "prefill", "max_new_tokens": 0, "temperature": 0.0,
           "seed": 0, "dtype": "float32", "device": "cpu", "tp_size": 1, "quantization": None, "trust_remote_code": False,
           "chunked_prefill_tokens": 0, "prefix_cache": False, "batch_documents": 8, "attention_backend": None,
           "cuda_graphs": False, "max_model_len": 512, "engine_args": {}, **changes}
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def read_events(folder: Path) -> list:
    "Events so far."
    file = folder / "exchange" / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def work(python, tmp_path):
    "A function that does a job in SGLang's Python."
    def do(model: Path, documents: list, **changes) -> Outcome:
        job = write_job(tmp_path, model, documents, **changes)
        done = subprocess.run([python, WORKER, job], env=environment(), capture_output=True, text=True, timeout=900)
        states = {int(file.stem): load_file(file) for file in (tmp_path / "exchange").glob("0*.safetensors")}
        return Outcome(done.returncode, read_events(tmp_path), states, done.stdout + done.stderr)
    return do


def reference(model: Path, documents: list, boundaries: list, dtype=torch.float32) -> dict:
    "The same states from transformers, by index, [T, K+1, H]."
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    found = {}
    with torch.no_grad():
        for document in documents:
            given = network.model(input_ids=torch.tensor([document.tokens]), output_hidden_states=True)
            layers = [given.hidden_states[boundary][0] for boundary in boundaries]
            found[document.index] = torch.stack([*layers, given.last_hidden_state[0]], 1).float()
    return found


def errors(outcome: Outcome, right: dict) -> torch.Tensor:
    "Relative L2 of every token's states, [tokens, K+1]."
    assert outcome.status == 0, outcome.log[-3000:]
    assert outcome.states.keys() == right.keys()
    parts = [(outcome.states[index]["hidden_states"].float() - states).norm(dim=-1) / states.norm(dim=-1) for index, states in right.items()]
    return torch.cat(parts)


def test_smollm2_in_bfloat16(work):
    tokenizer = text.load_tokenizer(targets.default_target())
    prompts = [text.prompt_tokens(tokenizer, prompt.text) for prompt in text.prompts(4, seed=3)]
    samples = [sglang_worker.Document(place, str(place), tokens, len(tokens)) for place, tokens in enumerate(prompts)]
    outcome = work(targets.default_target(), samples, boundaries=[2, 15, 27], dtype="bfloat16")
    ready = outcome.event("ready")
    assert (ready["captured"], ready["last_norm"], ready["attention_backend"]) == ([2, 15, 27], "post_norm", "TorchNative")
    apart = errors(outcome, reference(targets.default_target(), samples, [2, 15, 27]))
    assert (apart.median(dim=0).values < torch.tensor([0.01, 0.02, 0.025, 0.03])).all(), apart.median(dim=0)
    neighbours = errors(outcome, reference(targets.default_target(), samples, [3, 16, 28]))
    assert (neighbours.median(dim=0).values > apart.median(dim=0).values)[:3].all(), "a neighbouring layer is closer"
    assert outcome.event("done")["tokens"] == sum(map(len, prompts))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama", "kimi"])
@pytest.mark.parametrize("way", [{}, {"mode": "decode"}, {"mode": "decode", "prefix_cache": True, "chunked_prefill_tokens": 16,
                                                         "batch_documents": 2}],
                         ids=["prefill", "decode", "decode-cached-chunked"])
def test_every_way_gives_the_states_of_transformers(work, models, documents, model, way):
    outcome = work(models[model], documents, **way)
    assert errors(outcome, reference(models[model], documents, BOUNDARIES)).max() < 1e-4
    for document in documents:
        assert outcome.states[document.index]["token_ids"].tolist() == document.tokens
    cached = any(f"#cached-token: {count}," in outcome.log for count in range(16, 64))
    assert cached == way.get("prefix_cache", False), "the second and third of the documents that begin alike read the cache"


@pytest.mark.exhaustive
def test_boundaries_that_look_like_another_spelling(work, models, documents):
    outcome = work(models["kimi"], documents[:2], boundaries=[1, 4, 6])
    assert outcome.event("ready")["captured"] == [1, 4, 6]
    assert errors(outcome, reference(models["kimi"], documents[:2], [1, 4, 6])).max() < 1e-4


def test_wrapped_kimi_is_the_same_model(work, models, documents):
    outcome = work(models["wrapped"], documents, chunked_prefill_tokens=16, prefix_cache=True)
    assert errors(outcome, reference(models["kimi"], documents, BOUNDARIES)).max() < 1e-4


@pytest.mark.exhaustive
def test_answers(work, models, documents):
    outcome = work(models["llama"], documents, task="answer", max_new_tokens=12)
    network = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32).eval()
    for document in documents:
        answer = next(event for event in outcome.events if event.get("index") == document.index)
        expected = network.generate(torch.tensor([document.tokens]), do_sample=False, max_new_tokens=12)[0, len(document.tokens):]
        assert answer["tokens"] == expected.tolist()
        assert answer["finished"] == (answer["tokens"][-1] == 1)


def engine_runs(model: Path, draft: Path, documents: list) -> list:
    "Runs of the engine itself: plain with its last hidden states, with aux states, a chain and a tree of drafts."
    base = {"model_path": str(model), "device": "cpu", "dtype": "float32", "disable_cuda_graph": True, "disable_overlap_schedule": True,
            "skip_server_warmup": True, "skip_tokenizer_init": True, "max_total_tokens": 4096, "mem_fraction_static": 0.5,
            "prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx", "disable_radix_cache": True,
            "chunked_prefill_size": -1, "log_level": "error"}
    speculate = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft), "speculative_num_steps": 3}
    kinds = [({"enable_return_hidden_states": True}, True),
             ({"enable_return_aux_hidden_states": True, "speculative_algorithm": "DFLASH",
               "return_aux_hidden_state_layer_ids": [boundary - 1 for boundary in BOUNDARIES]}, True),
             ({**speculate, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, False),
             ({**speculate, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}, False)]
    sampling = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    return [{"arguments": {**base, **more}, "prompts": [document.tokens for document in documents], "sampling": sampling,
             "options": {"return_hidden_states": True} if states else {}} for more, states in kinds]


@pytest.fixture(scope="session")
def replies(python, models, documents, tmp_path_factory) -> dict:
    "What the engine itself replied in the four runs, by model."
    folder, found = tmp_path_factory.mktemp("engine"), {}
    (folder / "engines.py").write_text(ENGINES)
    for name in ("llama", "kimi"):
        (folder / "runs.json").write_text(json.dumps(engine_runs(models[name], models[f"{name}-drafter"], documents)))
        done = subprocess.run([python, folder / "engines.py", WORKER.parent, folder / "runs.json", folder / f"{name}.json"],
                              env=environment(), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("model", ["llama", "kimi"])
def test_states_are_the_official_ones_bit_for_bit(work, replies, models, documents, model):
    last, aux = ([torch.tensor(reply["meta_info"]["hidden_states"][0]) for reply in run] for run in replies[model][:2])
    outcome = work(models[model], documents, attention_backend="intel_amx")
    for document, post_norm, layers in zip(documents, last, aux):
        ours = outcome.states[document.index]["hidden_states"]
        assert torch.equal(ours[:, -1], post_norm)
        assert torch.equal(ours[:, :-1].flatten(1), layers)


@pytest.mark.parametrize("model", ["llama", "kimi"])
def test_speculation_changes_no_token(replies, model):
    plain, _, chain, tree = replies[model]
    accepted = []
    for run in (chain, tree):
        assert [reply["output_ids"] for reply in run] == [reply["output_ids"] for reply in plain]
        accepted.append(sum(reply["meta_info"]["spec_num_correct_drafts"] for reply in run))
    assert accepted[0] > 10
    assert accepted[1] > 1.5 * accepted[0], "with three children a node, other branches than the first are accepted too"
    assert max(len(reply["meta_info"]["spec_correct_drafts_histogram"]) for reply in tree) >= 3


def test_too_long_a_document_is_refused_before_the_start(work, models, documents):
    outcome = work(models["llama"], documents, max_model_len=40)
    assert outcome.status == 1
    assert outcome.message.startswith("document document-2 takes 50 tokens; max_model_len is 40")
    assert [event["event"] for event in outcome.events] == ["starting", "failed"]


@pytest.mark.exhaustive
def test_what_the_engine_refuses_is_told(work, models, documents):
    outcome = work(models["llama"], documents, engine_args={"context_length": 100_000})
    assert outcome.status == 1
    assert "context_length" in outcome.message and "100000" in outcome.message


@pytest.mark.exhaustive
def test_a_missing_checkpoint_is_told(work, models, documents, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((models["llama"] / "config.json").read_text())
    outcome = work(tmp_path / "empty", documents)
    assert outcome.status == 1
    assert "Cannot find any model weights" in outcome.message


@pytest.mark.exhaustive
def test_a_document_that_cannot_be_written_ends_the_work(work, models, documents, tmp_path):
    (tmp_path / "exchange" / "000012.safetensors.tmp").mkdir(parents=True)  # in the way
    outcome = work(models["llama"], documents, mode="decode", batch_documents=1)
    assert outcome.status == 1
    assert "Is a directory" in outcome.message
    assert set(outcome.states) == {10, 11}, "what was finished before stays"


def test_an_engine_that_is_killed_ends_in_a_message_and_leaves_no_process(python, models, documents, tmp_path):
    many = [dataclasses.replace(documents[3], index=place, prompt=1) for place in range(400)]
    job = write_job(tmp_path, models["llama"], many, mode="decode", batch_documents=2)
    worker = subprocess.Popen([python, WORKER, job], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while worker.poll() is None and not any(event["event"] == "document" for event in read_events(tmp_path)):
            time.sleep(0.1)
        children = descendants(worker.pid)
        scheduler = next(child for child in children if "sglang::sched" in Path(f"/proc/{child}/cmdline").read_text())
        os.kill(scheduler, signal.SIGKILL)
        assert worker.wait(60) == 1
    finally:
        worker.kill()
    failed = read_events(tmp_path)[-1]
    assert failed["event"] == "failed" and "SGLang died without a word" in failed["message"]
    assert list((tmp_path / "exchange").glob("0*.safetensors")), "what was finished stays"
    time.sleep(1)
    assert not [child for child in children if Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]]


def descendants(process: int) -> list:
    "Process ids below a process."
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(file.read_text().rpartition(")")[2].split()[1]) == process:
                found += [int(file.parent.name), *descendants(int(file.parent.name))]
        except OSError:
            continue
    return found


@pytest.mark.exhaustive
def test_a_request_that_is_computed_once_more_is_not_a_decode(work, models, documents, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # SGLang's own switch: sets requests aside, and prefills their answers later
    outcome = work(models["llama"], documents, mode="decode")
    assert outcome.status == 1
    assert "computed it elsewhere or once more: raise max_total_tokens in engine_args" in outcome.message
