"Other forms of a target: int4 weights as an engine unpacks and runs them, and heads for two processes."
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from k2eagle import capture, diff, engines, jobs, targets
from k2eagle.faults import round_weight
from k2eagle.files import read_json

sys.path.insert(0, str(ROOT / "benchmarks"))
import variants  # noqa: E402
from engines import conversations  # noqa: E402

GREEDY = {"answers": {"temperature": 0.0}}
UNPACK = """
import sys
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
packed, found = load_file(sys.argv[1]), {}
args = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=True)
for name in [name for name in packed if name.endswith("weight_packed")]:
    stem = name.removesuffix("_packed")
    values = unpack_from_int32(packed[name], 4, torch.Size(packed[stem + "_shape"].tolist()))
    found[stem] = dequantize(values, packed[stem + "_scale"], None, args)
save_file(found, sys.argv[2])
"""


def made(variant: str, source, folder):
    return variants.VARIANTS[variant](source, folder / variant)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return targets.mini_kimi(tmp_path_factory.mktemp("kimi") / "plain")


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    "The default target as int4, and the numbers that stands for."
    folder = tmp_path_factory.mktemp("smol")
    return made("int4", targets.default_target(), folder), made("unpacked", targets.default_target(), folder)


def test_packing_to_the_bit():
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    packed = variants.pack(values)
    assert packed.shape == (3, 4) and packed.dtype == torch.int32
    back = [[(word >> 4 * place & 15) - 8 for word in row for place in range(8)] for row in packed.tolist()]
    assert back == values.tolist()


def test_rounding_is_the_one_that_the_diagnosis_knows():
    "The same integers; the scale is stored in bfloat16, where `faults` keeps it whole."
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    values, scale = variants.integers(weight)
    exact = round_weight(weight.float(), 4, variants.GROUP)
    whole = weight.float().unflatten(1, (-1, variants.GROUP)).abs().amax(2) / 7
    assert (values != torch.round(exact.unflatten(1, (-1, variants.GROUP)) / whole[..., None]).flatten(1)).float().mean() < 0.01
    assert (scale.float() / whole - 1).abs().max() <= 2**-8
    assert int(values.min()) >= -7 and int(values.max()) <= 7
    error = lambda rounded: (rounded.float() - weight.float()).norm() / weight.float().norm()
    assert abs(error(variants.stand_for(values, scale)) / error(exact) - 1) < 0.01


def test_only_what_kimi_k2_rounds_is_rounded(kimi, smol, tmp_path):
    packed = load_file(made("int4", kimi, tmp_path) / "model.safetensors")
    rounded = [name for name in packed if name.endswith("weight_packed")]
    assert len(rounded) == 7 * 8 * 3 and all(".mlp.experts." in name for name in rounded)
    dense = [name for name in load_file(smol[0] / "model.safetensors") if name.endswith("weight_packed")]
    assert len(dense) == 30 * 3 and all(".mlp." in name for name in dense)
    assert targets.facts(smol[0]).quantization == "compressed-tensors int4"
    assert targets.facts(smol[0]).tokenizer_fingerprint == targets.facts("default").tokenizer_fingerprint


def test_another_library_unpacks_the_same_numbers(smol, tmp_path):
    try:
        interpreter = engines.python("vllm")
    except FileNotFoundError as error:
        pytest.skip(f"the environment of vLLM holds compressed-tensors: {error}")
    subprocess.run([interpreter, "-c", UNPACK, smol[0] / "model.safetensors", tmp_path / "theirs"], check=True)
    ours, theirs = load_file(smol[1] / "model.safetensors"), load_file(tmp_path / "theirs")
    assert len(theirs) == 90 and all(torch.equal(weight, ours[name]) for name, weight in theirs.items())


def test_another_group_of_heads_changes_nothing(kimi, tmp_path):
    wide = made("even", targets.default_target(), tmp_path)
    config = read_json(wide / "config.json")
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (12, 4)
    tokens = torch.arange(40, 72)[None]
    one, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits for path in (targets.default_target(), wide))
    assert torch.allclose(one, other, atol=1e-3) and one.std() > 1
    assert made("even", kimi, tmp_path) == kimi


def captured(target, folder, engine="hf", **options):
    samples = conversations(targets.default_target(), 8)
    return capture.capture(target, samples, folder / "-".join([target.name, engine, *options]), engine, **GREEDY,
                           **({"engine_options": options} if engine != "hf" else {}))


def test_vllm_runs_int4_and_the_diff_says_so(smol, engine_python, tmp_path, monkeypatch):
    "It computes what transformers computes with the numbers that the integers stand for; against the target, the weights differ."
    engine_python("vllm")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")  # with AMX it would round the inputs of each product to 8 bits as well
    packed, unpacked = smol
    theirs = captured(packed, tmp_path, "vllm")
    assert theirs.manifest.quantization == "compressed-tensors int4"
    same = diff.compare(captured(unpacked, tmp_path), theirs, target=unpacked, ask=False, any_weights=True)
    table = same.boundaries.set_index("boundary")
    assert (table.rel_l2[["2", "15", "27", "last"]].to_numpy() < [0.01, 0.03, 0.03, 0.04]).all(), table.rel_l2
    assert not [finding for finding in same.findings if finding.severity == "error"]
    rounded = diff.compare(captured(targets.default_target(), tmp_path), theirs, target="default", ask=False)
    assert [finding.code for finding in rounded.findings if finding.severity == "warning"][0] == "quantisation", rounded.findings
    assert rounded.boundaries.set_index("boundary").rel_l2["2"] > 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_processes_compute_what_one_computes(engine, engine_python, tmp_path):
    engine_python(engine)
    wide = made("even", targets.default_target(), tmp_path)
    shared, alone = captured(wide, tmp_path, engine, tp_size=2), captured(wide, tmp_path, engine)
    assert shared.manifest.options["tp_size"] == 2
    report = diff.compare(alone, shared, target=wide, ask=False)
    assert (report.boundaries.rel_l2.to_numpy() < [0.01, 0.03, 0.03, 0.04]).all(), report.boundaries


@pytest.mark.exhaustive
def test_heads_that_two_processes_cannot_share_are_refused(engine_python, tmp_path):
    engine_python("vllm")
    with pytest.raises(jobs.EngineError, match="attention heads .* divisible by tensor parallel size"):
        captured(targets.default_target(), tmp_path, "vllm", tp_size=2)
