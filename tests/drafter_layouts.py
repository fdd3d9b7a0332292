"""Small stand-ins for drafters that are published or that exporters write: their names, flags, ids and layouts, few and narrow weights.

`write(name, folder)` makes one and returns its folder and the facts of its target; `LAYOUTS` says for each what a linter must find.
Layer counts, ids, flags and rotary parameters are those of the original; widths and vocabularies are scaled down.
"""
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from k2eagle.targets import TargetFacts

HIDDEN, INNER, HEADS, KV, DIM, VOCAB, DRAFT = 64, 96, 4, 2, 16, 400, 120
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TARGETS = {  # name -> architecture, wrapper, layers, rope, positions
    "Kimi-K2": ("DeepseekV3ForCausalLM", None, 61, {"rope_theta": 50000.0, **YARN, "factor": 32.0}, 131072),
    "Kimi-K2.5": ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", 61, {"rope_theta": 50000.0, **YARN}, 262144),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", None, 61, {"rope_theta": 10000.0, **YARN, "factor": 40.0, "beta_fast": 32.0}, 163840),
    "Llama-3.1-8B": ("LlamaForCausalLM", None, 32, {"rope_theta": 500000.0, **LLAMA3}, 131072),
    "Qwen3-8B": ("Qwen3ForCausalLM", None, 36, {"rope_type": "default", "rope_theta": 1000000.0}, 40960),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", None, 48, {"rope_type": "default", "rope_theta": 1000000.0}, 40960),
}


def target(name):
    "Facts of a target, as `targets.facts` would give them, at the width of these drafters."
    arch, wrapper, depth, rope, positions = TARGETS[name]
    return TargetFacts(
        path=Path(name), arch=arch, model_type="", num_layers=depth, hidden_size=HIDDEN, intermediate_size=INNER, num_heads=HEADS,
        num_kv_heads=KV, head_dim=DIM, vocab_size=VOCAB, tie_word_embeddings=False, rms_norm_eps=1e-5, rope=rope,
        max_position_embeddings=positions, dtype="bfloat16", quantization=None, weight_bytes=0, parameters=0, wrapper=wrapper,
        final_norm_key="", embed_key="", lm_head_key="", weight_fingerprint="", tokenizer_fingerprint=None)


@dataclass(frozen=True)
class Layout:
    "One way in which a drafter is written."
    target: str
    config: dict                    # over what `flat` gives
    expected: tuple                 # (engines, codes of errors and warnings) pairs
    prefix: str = "midlayer."
    latent: bool = False
    nested: dict | None = None      # top level of the nested layout of speculators
    leave_out: tuple = ()           # tensors that the writer does not write
    extra: dict = field(default_factory=dict)  # name -> shape
    absolute: bool = False          # d2t as absolute ids
    eagle1: bool = False
    beside: tuple = ()              # empty files beside the weights


NEWEST = ("sglang", "vllm")
SPECFORGE_61 = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True}}
WHOLE = {"draft_vocab_size": VOCAB}
LAYOUTS = {
    "SpecForge, Kimi-K2": Layout("Kimi-K2", SPECFORGE_61, (
        (NEWEST, ["runners-disagree"]), (("sglang==0.5.12",), []), (("vllm-v1",), ["layers-differ"]))),
    "SpecForge, DeepSeek-V3": Layout("DeepSeek-V3", {**SPECFORGE_61, "rope_scaling": None}, ((("sglang", "vllm-v2"), ["rope-scaling"]),)),
    "lightseek, Kimi-K2.5, plain attention": Layout("Kimi-K2.5", {**SPECFORGE_61, "rope_scaling": {**YARN, "beta_fast": 32.0}}, (
        (("sglang",), ["rope-scaling"]), (("vllm-v1",), ["layers-differ", "rope-scaling"]))),
    "lightseek, Kimi-K2.5, latent attention": Layout(
        "Kimi-K2.5", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}, **WHOLE}, (
            (("sglang==0.5.12",), ["layers-differ", "first-id"]), (("sglang==0.5.13",), ["first-id"]),
            (("sglang==0.5.11",), ["architecture", "first-id", "layer-prefix", "layers-differ"]), (("vllm",), [])),
        prefix="layers.0.", latent=True, leave_out=("d2t", "t2d")),
    "SafeAILab, Llama-3.1-8B": Layout("Llama-3.1-8B", {"max_position_embeddings": 2048}, (
        (("sglang",), ["positions"]), (("vllm==0.25.1",), ["positions"]), (("vllm",), []))),
    "SpecForge, Qwen3-8B, 2048 positions": Layout("Qwen3-8B", {"max_position_embeddings": 2048}, (
        (("sglang", "vllm"), ["positions"]), (("vllm",), []))),
    "speculators, Qwen3": Layout("Qwen3-8B", {"model_type": "llama"}, (
        (("sglang",), ["speculators-layout"]), (("vllm",), []), (("vllm==0.9.2",), ["speculators-layout"])), prefix="layers.0.",
        nested={"norm_before_residual": True, "norm_before_fc": False, "eagle_aux_hidden_state_layer_ids": [2, 18, 33]}),
    "RedHatAI, speculators, Llama-3.1-8B": Layout("Llama-3.1-8B", {}, (
        (("vllm",), ["flag-default"]), (NEWEST, ["flag-default", "speculators-layout"])), prefix="layers.0.", nested={}),
    "ModelOpt export, Kimi-K2": Layout("Kimi-K2", {"eagle_config": {
        **SPECFORGE_61["eagle_config"], "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "next_layer_regular": True, "parallel_draft_step": 1}}, (
            (("sglang",), []), (("sglang==0.5.11",), ["layer-prefix"]), (NEWEST, ["runners-disagree"])), prefix="layers.0.", leave_out=("t2d",)),
    "TorchSpec, ids + 1": Layout("Kimi-K2", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, (
        (("sglang", "vllm"), ["first-id"]), (("sglang==0.5.12",), ["first-id", "layers-differ"])), prefix="layers.0."),
    "TorchSpec, custom ids": Layout("Kimi-K2", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 19, 35]}}, (
        (("sglang",), ["first-id", "layers-differ"]), (("sglang==0.5.12",), ["first-id"]), (("vllm-v2",), ["layers-differ"]))),
    "AngelSlim, Qwen3-8B": Layout("Qwen3-8B", {"architectures": ["Eagle3LlamaForCausalLM"]}, (
        (("sglang",), ["architecture"]), (("vllm",), []))),
    "EAGLE-1 head": Layout("Llama-3.1-8B", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, (
        (NEWEST, ["eagle-1"]),), prefix="layers.0.", eagle1=True),
    "absolute d2t": Layout("Llama-3.1-8B", {}, ((NEWEST, ["d2t-absolute"]),), absolute=True),
    "d2t in a file beside": Layout("Llama-3.1-8B", {}, ((NEWEST, ["d2t-missing"]),), leave_out=("d2t", "t2d"), beside=("d2t.pt",)),
    "SpecForge, EAGLE-3.1, Qwen3-30B": Layout("Qwen3-30B-A3B", {"fc_norm": True, "norm_output": True}, (
        (NEWEST, []), (("sglang==0.5.11",), ["flag-ignored"]), (("vllm==0.21.0",), ["flag-ignored"])),
        extra={f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}),
    "four states, counted nowhere": Layout("Llama-3.1-8B", {"eagle_aux_hidden_state_layer_ids": [2, 9, 16, 29]}, (
        (("vllm",), ["aux-count", "fc-width"]), (NEWEST, ["aux-count", "fc-width", "layers-differ"])), extra={"fc.weight": (HIDDEN, 4 * HIDDEN)}),
}


def flat(layout):
    "The flat config of a layout, at the top level."
    arch, _, _, rope, positions = TARGETS[layout.target]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    kind = "Eagle3DeepseekV2ForCausalLM" if layout.latent else "LlamaForCausalLMEagle3"
    return {"architectures": [kind], "model_type": "deepseek_v3" if layout.latent else "llama", "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": rope["rope_theta"], "max_position_embeddings": positions,
            "rope_scaling": scaling if scaling["rope_type"] != "default" else None, "vocab_size": VOCAB, "draft_vocab_size": DRAFT,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", **(LATENT if layout.latent else {}), **layout.config}


def described(layout):
    "The config.json of a layout."
    config = flat(layout)
    if layout.nested is None:
        return config
    inner = {name: value for name, value in config.items() if name not in ("architectures", "draft_vocab_size", "torch_dtype")}
    return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "draft_vocab_size": DRAFT,
            "transformer_layer_config": inner, "torch_dtype": "bfloat16", "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": layout.target, "architectures": [TARGETS[layout.target][0]]}}, **layout.nested}


def shapes(layout):
    "Names and shapes of the weights of a layout."
    rows = flat(layout)["draft_vocab_size"]
    wide = HIDDEN if layout.eagle1 else 2 * HIDDEN
    if layout.latent:
        query, latent, nope, rope, value = LATENT.values()
        attention = {"q_a_proj": (query, wide), "q_a_layernorm": (query,), "q_b_proj": (HEADS * (nope + rope), query),
                     "kv_a_proj_with_mqa": (latent + rope, wide), "kv_a_layernorm": (latent,),
                     "kv_b_proj": (HEADS * (nope + value), latent), "o_proj": (HIDDEN, HEADS * value)}
    else:
        attention = {"q_proj": (HEADS * DIM, wide), "k_proj": (KV * DIM, wide), "v_proj": (KV * DIM, wide), "o_proj": (HIDDEN, HEADS * DIM)}
    block = {f"self_attn.{name}": shape for name, shape in attention.items()}
    block |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    block |= {name: (HIDDEN,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    found = {f"{layout.prefix}{name}.weight": shape for name, shape in block.items()}
    if layout.eagle1:
        return {**found, "fc.weight": (HIDDEN, 2 * HIDDEN)}
    return {**found, "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (rows, HIDDEN), **layout.extra}


def kept_tokens():
    "Ids of the target's vocabulary that the drafter proposes."
    return torch.arange(VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)) < DRAFT]


def weights(layout):
    "Random weights, and the two maps."
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes(layout).items()}
    if not layout.eagle1:
        kept = kept_tokens()
        made |= {"d2t": kept if layout.absolute else kept - torch.arange(DRAFT), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        made["t2d"][kept] = True
    return {name: tensor for name, tensor in made.items() if name not in layout.leave_out}


def write(name, folder):
    "Write a layout into a folder; return the folder and the facts of its target."
    layout, folder = LAYOUTS[name], Path(folder) / "drafter"
    folder.mkdir(parents=True)
    save_file(weights(layout), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described(layout)))
    for file in layout.beside:
        (folder / file).write_bytes(b"")
    return folder, target(layout.target)
