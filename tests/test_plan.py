"""Launch plans: against the parsers of many versions, against SGLang's own sum, and against servers that were started by them.

Run: pytest tests/test_plan.py (two servers are started; K2EAGLE_EXHAUSTIVE=1 starts two more)
`python tests/test_plan.py WHEEL...` records the arguments of unpacked or packed packages in fixtures/arguments.json.
"""
import ast
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import urllib.request
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_server import QUICK, free_port
from k2eagle import layers, plan, targets
from packaging.version import Version

RECORDED = Path(__file__).parent / "fixtures" / "arguments.json"
TEXT = {"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 163840, "num_attention_heads": 64,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "n_routed_experts": 384,
        "max_position_embeddings": 262144}
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": TEXT, "vision_config": {}}
DENSE = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "draft_vocab_size": 32000, "max_position_embeddings": 131072}
WIDE_HEAD = {**HEAD, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128, "vocab_size": 163840}
CARDS = "8x RTX PRO 6000 96GB sm120 pcie"


def known_names(engine):
    return {row.name for row in plan.ARGUMENTS if row.engine == engine}


def codes(made):
    return [finding.code for finding in made.warnings]


def opened():
    "Versions whose parser was read, and which arguments of the table it has."
    return [(*key.split("=="), set(names)) for key, names in json.loads(RECORDED.read_text()).items()]


@pytest.mark.parametrize("engine, version, names", opened(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_table_is_what_the_parsers_of_opened_versions_have(engine, version, names):
    said = {row.name for row in plan.ARGUMENTS if row.engine == engine and plan.argument(engine, row.name, Version(version)) == row.name}
    assert said == names


@pytest.mark.parametrize("engine, version, names", opened(), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("purpose", ["latency", "throughput"])
@pytest.mark.parametrize("target, drafter", [(KIMI, WIDE_HEAD), (DENSE, HEAD), (DENSE, None)], ids=["kimi", "dense", "plain"])
def test_a_command_has_only_arguments_of_its_version(engine, version, names, purpose, target, drafter):
    for gpus in (CARDS, "8x H100 80GB nvlink"):
        made = plan.plan(target, engine, version, gpus, drafter, purpose, weight_bytes=547e9 if target is KIMI else 16e9)
        flags = {word[2:].replace("-", "_") for word in made.command if word.startswith("--")}
        assert flags <= names, flags - names
        assert flags == {name[2:].replace("-", "_") for name in made.reasons.argument if name.startswith("--")}
        assert made.reasons.why.str.len().min() > 0
        assert made.memory.bytes.sum() == made.layout.case.machine.memory_bytes


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_installed_engine_has_what_the_table_says(engine, engine_python):
    found = plan.check_arguments(engine, str(layers.NEWEST[engine]), plan.package_of(engine, engine_python(engine)))
    assert not found, found
    wrong = plan.check_arguments(engine, str(layers.OLDEST[engine]), plan.package_of(engine))
    assert {finding.severity for finding in wrong} <= {"note", "error"} and wrong  # newer arguments are seen where an old version has none


def sglang_fraction(source: str, memory_mib: int, tp: int, latent: bool, drafting: bool) -> float:
    "Run the sum in SGLang's memory_hook.py, with stand-ins for all around it."
    functions = {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    off = dict.fromkeys(("chunked_prefill_size", "max_running_requests", "max_total_tokens", "mem_fraction_static"))
    args = SimpleNamespace(**off, device="cuda", tp_size=tp, pp_size=1, max_prefill_tokens=16384, language_only=False, language_model_only=False,
                           disaggregation_mode="null", model_path="", enable_symm_mem=False, moe_a2a_backend="none", attn_dp_size=1,
                           speculative_num_draft_tokens=4 if drafting else None, _cuda_graph_config_locked=(),
                           cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(max_bs=None, bs=None, backend="full"),
                                                             prefill=SimpleNamespace(max_bs=None, bs=[], backend="full", max_seq_len=None)))
    backend = SimpleNamespace(DISABLED="off", BREAKABLE="breakable")
    around = dict(get_device_memory_capacity=lambda device: memory_mib, resolving_view=lambda one: one, resolved_view=lambda one: one, copy=copy,
                  declare_resolution=lambda one, who, **values: vars(one).update(values), use_mla_backend=lambda one: latent, Backend=backend,
                  model_config_of=lambda one: SimpleNamespace(is_multimodal=False), post_capture_kv_sizing_planned=lambda one: False,
                  get_platform=lambda: SimpleNamespace(is_xpu=False), attn_dp_enabled_of=lambda one: False, Any=object)
    for name in ("reserve_for_graph_mb", "reserve_for_deepep_a2a_mb", "handle_gpu_memory_settings"):
        exec(textwrap.dedent(functions[name]), around)
    hook = types.ModuleType("sglang.srt.arg_groups.cuda_graph_hook")
    for name in ("generate_cpu_graph_batch_sizes", "generate_decode_cuda_graph_batch_sizes", "generate_prefill_cuda_graph_batch_sizes"):
        setattr(hook, name, lambda *given: [])
    qwen = types.ModuleType("sglang.srt.arg_groups.model_overrides.qwen3_vl")
    qwen.expand_multimodal_decode_graph_to_running_limit = lambda *given: None
    packages = {name: types.ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.arg_groups.model_overrides")}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {**packages, hook.__name__: hook, qwen.__name__: qwen}.items():
            patch.setitem(sys.modules, name, module)
        around["handle_gpu_memory_settings"](args)
    return args.mem_fraction_static


def test_the_share_is_what_sglang_itself_computes(engine_python):
    source = (plan.package_of("sglang", engine_python("sglang")) / "srt/arg_groups/memory_hook.py").read_text()
    for memory_mib in (15360, 24564, 40960, 81559, 97871, 143771, 183359):
        for tp in (1, 4, 8):
            for latent in (False, True):
                for drafting in (False, True):
                    target = replace(plan.sizes(KIMI if latent else DENSE, 1e10), vision=None)
                    case = plan.Case("sglang", layers.NEWEST["sglang"], target, plan.draft(HEAD) if drafting else None,
                                     plan.machine(f"8x any {memory_mib}MiB sm90"), "latency", tp, 8192, None)
                    own = sglang_fraction(source, memory_mib, tp, latent, drafting)
                    assert plan.static_fraction(case) == pytest.approx(own, abs=1e-3), (memory_mib, tp, latent, drafting)


def random_case(rng: random.Random) -> plan.Case:
    engine = rng.choice(["sglang", "vllm"])
    version = Version(rng.choice(["0.4.6.post5", "0.5.9", "0.5.12", "0.5.23"] if engine == "sglang" else ["0.13.0", "0.18.1", "0.32.0"]))
    target = plan.sizes(rng.choice([KIMI, DENSE]), rng.uniform(1e9, 9e11))
    return plan.Case(engine, version, target, plan.draft(rng.choice([HEAD, WIDE_HEAD])) if rng.random() < 0.7 else None,
                     plan.machine(f"8x any {rng.randint(8, 280)}GiB sm90"), "latency", rng.choice([1, 2, 4, 8]), rng.choice([512, 8192, 131072]),
                     rng.choice([1, 48, 512]), rng.choice([None, 0.5, 0.9]), rng.choice([None, "fp8_e4m3"]))


def test_parts_add_up_and_what_is_missing_is_what_would_do():
    rng, seen = random.Random(5), set()
    for _ in range(2000):
        case = random_case(rng)
        memory = plan.lay_out(case)
        assert sum(part.bytes for part in memory.parts) == case.machine.memory_bytes
        assert all(part.bytes >= 0 for part in memory.parts if part.part != "headroom")
        missing = plan.shortage(memory)
        larger = replace(case, machine=replace(case.machine, memory_bytes=case.machine.memory_bytes + missing))
        around = ("activations", "graphs")  # these follow the size of the card
        if missing > 0 and all(plan.lay_out(larger).bytes(part) == memory.bytes(part) for part in around):
            assert plan.shortage(plan.lay_out(larger)) == 0
        found = [finding.code for finding in plan.check_room(memory)]
        assert len(found) <= 1
        if "does-not-fit" in found:
            for remedy in plan.remedies(case):
                assert not remedy.startswith("an fp8 cache") or plan._fits(replace(case, kv_dtype="fp8_e4m3"))
        if not found:
            assert memory.tokens >= plan.needed_tokens(case) and memory.bytes("headroom") >= 0
        seen.update(found)
    assert seen == {"does-not-fit", "share-too-small", "share-too-large", "reserve-taken", "little-headroom"}


def test_more_memory_never_holds_fewer_tokens():
    for size in range(80, 140, 5):
        one, two = (plan.plan(KIMI, "vllm", "0.32.0", f"8x any {gib}GiB sm90", weight_bytes=547e9, fraction=0.9) for gib in (size, size + 5))
        assert (one.layout.tokens <= two.layout.tokens) == (one.layout.case.tp == two.layout.case.tp)  # fewer ranks hold less
        planned = plan.plan(KIMI, "vllm", "0.32.0", f"8x any {size}GiB sm90", weight_bytes=547e9)
        assert planned.fits == (plan.shortage(planned.layout) <= 0)  # a plan of ours never fails for a share that it chose itself


@pytest.mark.parametrize("version, expected, absent", [
    ("0.5.9", {"layers-refused", "draft-outside", "running-requests", "overlap"}, {"draft-pool"}),
    ("0.5.12", {"layers-differ", "first-id", "draft-outside", "running-requests"}, {"draft-pool", "overlap", "layers-refused"}),
    ("0.5.23", {"draft-pool", "first-id", "running-requests"}, {"draft-outside", "layers-differ", "overlap"})])
def test_the_traps_of_the_campaign_by_version(version, expected, absent):
    drafter = {**WIDE_HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True}}
    made = plan.plan(KIMI, "sglang", version, CARDS, drafter, weight_bytes=547e9,
                     arguments={"mem_fraction_static": 0.90, "max_running_requests": None, "speculative_num_draft_tokens": 4})
    assert expected <= set(codes(made)) and not absent & set(codes(made)), codes(made)
    assert "--mem-fraction-static 0.9 " in made.dry_run().replace("\\\n", "") and "--max-running-requests" not in made.command
    if "layers-differ" in expected:  # the correction is one: with it, the version captures what was meant
        fixed = {**drafter, **plan.corrected(made.layout.case)}
        again = plan.plan(KIMI, "sglang", version, CARDS, fixed, weight_bytes=547e9)
        assert not {"layers-differ", "layers-refused"} & set(codes(again))


def test_bad_input_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="hidden_size None; expected a whole number"):
        plan.plan({**DENSE, "hidden_size": None}, "sglang", gpus=CARDS, weight_bytes=1e9)
    with pytest.raises(ValueError, match="num_hidden_layers 'many'"):
        plan.plan({**DENSE, "num_hidden_layers": "many"}, "sglang", gpus=CARDS, weight_bytes=1e9)
    with pytest.raises(ValueError, match="not a version"):
        plan.plan(DENSE, "vllm", "main", CARDS, weight_bytes=1e9)
    with pytest.raises(ValueError, match="5 ranks do not divide 32 heads"):
        plan.plan(DENSE, "vllm", gpus=CARDS, weight_bytes=1e9, tp=5)
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        plan.plan(DENSE, "sglang", gpus=CARDS, weight_bytes=1e9, arguments={"mem_fraction_static": 90})
    with pytest.raises(FileNotFoundError, match="is not there"):
        plan.plan(DENSE, "sglang", gpus=CARDS, weight_bytes=1e9, drafter="nowhere/at/all")
    with pytest.raises(ValueError, match="port stands among the arguments"):  # it was left out without a word
        plan.plan(DENSE, "sglang", gpus=CARDS, weight_bytes=1e9, arguments={"port": 31000})
    for odd, said in ({"num_steps": "3"}, "num_steps is .3."), ({"arguments": [1]}, "arguments"), ({"assumed": 0.5}, "assumed"), ({"drafter": 5}, "drafter 5"), ({"target": []}, "target"):
        with pytest.raises(ValueError, match=f"{said}.*expected"):
            plan.plan(**{"target": DENSE, "gpus": CARDS, "weight_bytes": 1e9, **odd})
    with pytest.raises(ValueError, match="quantization_config 3; expected"):
        plan.plan({**DENSE, "quantization_config": 3}, gpus=CARDS, weight_bytes=1e9)
    with pytest.raises(ValueError, match="q_lora_rank None; expected a whole number"):
        plan.plan(DENSE, gpus=CARDS, weight_bytes=1e9, drafter={**DENSE, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    newer = plan.plan(DENSE, "sglang", "0.9.0", CARDS, weight_bytes=1e9)
    assert codes(newer)[0] == "engine-newer" and newer.version == str(layers.NEWEST["sglang"])


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    "A head of the default target with random weights, in the flat layout."
    import torch
    from safetensors.torch import save_file
    folder, facts = tmp_path_factory.mktemp("head"), targets.facts("default")
    width, inner, heads, vocab, small = facts.hidden_size, 256, facts.num_heads, facts.vocab_size, 512
    query, kv = heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    shapes = {"fc.weight": (width, 3 * width), "norm.weight": (width,), "lm_head.weight": (small, width)}
    block = {"self_attn.q_proj": (query, 2 * width), "self_attn.k_proj": (kv, 2 * width), "self_attn.v_proj": (kv, 2 * width),
             "self_attn.o_proj": (width, query), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
             "input_layernorm": (width,), "hidden_norm": (width,), "post_attention_layernorm": (width,)}
    shapes |= {f"midlayer.{name}.weight": shape for name, shape in block.items()}
    random_numbers = torch.Generator().manual_seed(0)
    weights = {name: (torch.randn(shape, generator=random_numbers) * shape[-1] ** -0.5).bfloat16() for name, shape in shapes.items()}
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[:small] = True
    save_file({**weights, "d2t": torch.zeros(small, dtype=torch.int64), "t2d": t2d}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
              "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": facts.num_kv_heads, "head_dim": facts.head_dim,
              "hidden_act": "silu", "rms_norm_eps": facts.rms_norm_eps, "rope_theta": facts.rope["rope_theta"], "vocab_size": vocab,
              "max_position_embeddings": facts.max_position_embeddings, "draft_vocab_size": small, "tie_word_embeddings": False,
              "attention_bias": False, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def started(made, port, log):
    "Start a plan's command; its log once it answers on /health."
    with open(log, "wb") as words:
        process = subprocess.Popen(made.command, stdout=words, stderr=subprocess.STDOUT, env={**os.environ, **made.env, **QUICK}, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, log.read_text(errors="replace")[-3000:]
                time.sleep(0.5)
        body = json.dumps({"model": made.layout.case.target.path, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"]
        return log.read_text(errors="replace")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("drafting", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["plain", "drafting"])
@pytest.mark.parametrize("engine, tokens", [("vllm", r"KV cache size: ([\d,]+) tokens"), ("sglang", r"max_total_num_tokens=(\d+)")])
def test_a_plan_starts_and_its_cache_is_as_large_as_planned(engine, tokens, drafting, drafter, engine_python, tmp_path):
    port = free_port()
    made = plan.plan("default", engine, None, device="cpu", drafter=drafter if drafting else None, context=512, port=port, python=engine_python(engine))
    assert made.fits and made.warnings.worst in (None, "note")
    log = started(made, port, tmp_path / "server.log")
    seen = int(re.findall(tokens, log)[-1].replace(",", ""))
    assert abs(seen - made.layout.tokens) <= 128, (seen, made.layout.tokens)  # blocks of 128 tokens in vLLM on a CPU


def record(packages):
    "Write which arguments of the table each package has."
    found = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for package in map(Path, packages):
        engine, version = ("sglang" if package.name.startswith("sglang") else "vllm"), package.name.split("-")[1]
        with tempfile.TemporaryDirectory() as folder:
            wheel = zipfile.ZipFile(package)
            wheel.extractall(folder, [name for name in wheel.namelist() if re.search(r"server_args\.py|arg_groups/fields/|arg_utils\.py|cli_args\.py", name)])
            names = plan.read_arguments(engine, Path(folder) / engine)
        found[f"{engine}=={version}"] = sorted(names & known_names(engine))
    ordered = dict(sorted(found.items(), key=lambda item: (item[0].split("==")[0], Version(item[0].split("==")[1]))))
    RECORDED.write_text("{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(names)}" for key, names in ordered.items()) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1:])
