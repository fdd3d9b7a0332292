"""The same target in another form: int4 weights as engines load them, the numbers they stand for, heads for two GPUs.

    python benchmarks/variants.py int4|unpacked|even TARGET OUT

`int4` writes the format `pack-quantized` of compressed-tensors, in which Kimi-K2.5 comes: signed integers of four bits with a
bfloat16 scale for each 32 neighbouring inputs. As there, only feed-forward blocks are rounded, and in a mixture of experts only
the routed ones; a shape of the others may be one that Marlin kernels refuse. `unpacked` writes the bfloat16 weights that such
integers stand for. `even` gives a target with an odd number of key heads one group of heads more, whose weights are zero: it
computes the same, and two GPUs can share it.
"""
import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from k2eagle import targets
from k2eagle.files import read_json, write_json

GROUP = 32  # inputs with one scale, as in Kimi-K2.5
FEED_FORWARD, EXPERTS = (re.compile(rf"model\.layers\.\d+\.mlp\.{part}(gate|up|down)_proj\.weight$") for part in ("", r"experts\.\d+\."))


def integers(
    weight: torch.Tensor,  # [out, in]
    group: int = GROUP,
) -> tuple:                # int8 [out, in] from -8 to 7, bfloat16 scales [out, in / group]
    "Round a weight to four bits."
    grouped = weight.float().unflatten(1, (-1, group))
    scale = (grouped.abs().amax(2) / 7).clamp_min(1e-12).bfloat16()
    return torch.round(grouped / scale[..., None].float()).clamp(-8, 7).to(torch.int8).flatten(1), scale


def stand_for(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # bfloat16 [out, in]
    "The weight that integers and scales stand for."
    return (values.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None].float()).flatten(1).bfloat16()


def pack(values: torch.Tensor) -> torch.Tensor:  # int32 [out, in / 8]
    "Put eight neighbouring integers into one word, the first into its lowest bits, each raised by 8."
    nibbles = (values.to(torch.int64) + 8).unflatten(1, (-1, 8))
    words = (nibbles << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _rounded(names) -> list:
    "The weights that are to be int4: those of the experts, or of a dense model's feed-forward blocks."
    return [name for name in names if EXPERTS.search(name)] or [name for name in names if FEED_FORWARD.search(name)]


def _quantization(experts: bool) -> dict:
    "The entry of config.json that describes int4 weights, in the words of Kimi-K2.5's."
    spared = ["lm_head", "re:.*self_attn.*", *(["re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"] if experts else [])]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}},
            "ignore": spared, "kv_cache_scheme": None}


def _read(source: Path) -> tuple:
    "Config and tensors of a checkpoint that is one file."
    with safe_open(source / "model.safetensors", "pt") as file:
        return read_json(source / "config.json"), {name: file.get_tensor(name) for name in file.keys()}


def _write(source: Path, out: Path, config: dict, tensors: dict) -> Path:
    "Write a checkpoint with the tokenizer of another."
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "checksums.json"):
            shutil.copyfile(file, out / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    write_json(out / "config.json", config)
    return out


def int4(source: Path, out: Path) -> Path:
    "Write a target with int4 weights."
    config, tensors = _read(source)
    rounded = _rounded(tensors)
    config["quantization_config"] = _quantization(bool(EXPERTS.search(rounded[0])))
    for name in rounded:
        weight, stem = tensors.pop(name), name.removesuffix("weight")
        values, scale = integers(weight)
        tensors |= {f"{stem}weight_packed": pack(values), f"{stem}weight_scale": scale, f"{stem}weight_shape": torch.tensor(weight.shape)}
    return _write(source, out, config, tensors)


def unpacked(source: Path, out: Path) -> Path:
    "Write a target with the bfloat16 weights that its int4 form stands for."
    config, tensors = _read(source)
    return _write(source, out, config, tensors | {name: stand_for(*integers(tensors[name])) for name in _rounded(tensors)})


def even(source: Path, out: Path) -> Path:
    "Write a target with an even number of key heads; one that has it already stays where it is."
    config, tensors = _read(source)
    groups = config["num_key_value_heads"]
    if groups % 2 == 0:
        return source
    more = config["num_attention_heads"] // groups
    for name, weight in tensors.items():
        rows = config["head_dim"] * (more if "q_proj" in name else 1)
        if re.search(r"self_attn\.[qkv]_proj", name):
            tensors[name] = torch.cat([weight, weight.new_zeros(rows, weight.shape[1])])
        elif "self_attn.o_proj" in name:
            tensors[name] = torch.cat([weight, weight.new_zeros(len(weight), config["head_dim"] * more)], 1)
    return _write(source, out, config | {"num_key_value_heads": groups + 1, "num_attention_heads": (groups + 1) * more}, tensors)


VARIANTS = {"int4": int4, "unpacked": unpacked, "even": even}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("target", help="'default', or a checkpoint's folder")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(json.dumps({"written": str(VARIANTS[options.variant](targets.resolve(options.target), options.out))}))
