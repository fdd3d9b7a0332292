"""The linter: what it finds in published layouts, in damaged files and in any single corruption, and what it corrects.

Run alone with: python -m pytest tests/test_lint.py
"""
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import drafter_layouts
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from k2eagle import checkpoint, drafter, layers
from k2eagle.lint import fix, lint, verdict

ALL = ("sglang", "vllm", "vllm-v1", "vllm-v2")
LLAMA = drafter_layouts.target("Llama-3.1-8B")


def codes(found, *severities):
    return {one.code for one in found if one.severity in (severities or ("error", "warning"))}


def head(**changes):
    "A head of ours that fits the Llama target of the layouts."
    torch.manual_seed(0)
    config = drafter.config_for(LLAMA, drafter_layouts.DRAFT, **changes)
    made = drafter.Drafter(config).to(torch.bfloat16)
    kept = drafter_layouts.kept_tokens()
    made.d2t.copy_(kept - torch.arange(len(kept)))
    made.t2d.zero_()[kept] = True
    return made


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    "A checkpoint as this package writes it: config.json and the tensors."
    folder = checkpoint.save(head(), tmp_path_factory.mktemp("clean") / "drafter")
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def written(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", drafter_layouts.LAYOUTS)
def test_layouts_in_the_wild(name, tmp_path):
    folder, facts = drafter_layouts.write(name, tmp_path)
    for engines, expected in drafter_layouts.LAYOUTS[name].expected:
        found = lint(folder, facts, engines)
        assert codes(found) == set(expected), str(found)
        assert all(one.message and one.fix for one in found)


@pytest.mark.parametrize("changes", [{}, {"boundaries": (1, 10, 20)}, {"boundaries": (2, 9, 16, 29)}, {"fc_norm": True, "norm_output": True},
                                     {"norm_before_fc": True}, {"boundaries": (5,)}])
def test_our_own_checkpoints_are_clean(changes, tmp_path):
    folder = checkpoint.save(head(**changes), tmp_path / "drafter", target=LLAMA)
    found = lint(folder, LLAMA, ALL)
    assert codes(found) == set(), str(found)


def test_a_head_for_vllm_only_is_an_error_for_sglang(tmp_path):
    folder = checkpoint.save(head(norm_before_residual=True), tmp_path / "drafter", format="vllm", target=LLAMA)
    assert codes(lint(folder, LLAMA, ("vllm-v1", "vllm-v2"))) == set()
    found = lint(folder, LLAMA, "sglang")
    assert codes(found) == {"flag-ignored"} and "carry the raw state in the residual" in found[0].message


def test_the_consequence_is_said_in_boundaries(tmp_path):
    folder, facts = drafter_layouts.write("TorchSpec, ids + 1", tmp_path)
    found = [one for one in lint(folder, facts, ("sglang==0.5.12", "sglang==0.5.13")) if one.code == "layers-differ"]
    assert len(found) == 1 and found[0].severity == "error"
    assert found[0].message.startswith("sglang 0.5.12 will capture boundaries 3, 31, 59 instead of 2, 30, 58")
    assert "sglang 0.5.13: 2, 30, 58" in found[0].evidence


LAUNCHES = [
    ({"speculative_algorithm": "EAGLE"}, {"algorithm", "running-requests", "draft-backend"}),
    ({"speculative_algorithm": "EAGLE3", "attention_backend": "trtllm_mla", "max_running_requests": 8}, {"draft-backend"}),
    ({"speculative_algorithm": "EAGLE3", "attention_backend": "trtllm_mla", "max_running_requests": 8,
      "speculative_draft_attention_backend": "trtllm_mha"}, set()),
    ({"speculative_algorithm": "EAGLE3", "max_running_requests": 8, "attention_backend": "triton", "speculative_eagle_topk": 1}, {"draft-tokens"}),
    ({"speculative_algorithm": "EAGLE3", "max_running_requests": 8, "attention_backend": "triton", "speculative_num_steps": 3,
      "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "env": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}, {"simulated"}),
    ({"env": {"SIMULATE_ACC_LEN": "3"}}, {"simulated"}),
    ({"env": {"SGLANG_SIMULATE_ACC_LEN": "-1", "SIMULATE_ACC_LEN": "off"}}, set()),
    ({"speculative_algorithm": "eagle3", "max_running_requests": "8", "attention_backend": "triton", "speculative_num_steps": "3",
      "speculative_eagle_topk": "1", "speculative_num_draft_tokens": "8"}, {"draft-tokens"}),
    ({"speculative_algorithm": "eagle", "max_running_requests": 8, "attention_backend": "triton"}, {"algorithm"}),
    ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}, {"algorithm"}),
    ({"speculative_config": '{"method": "eagle3", "rejection_sample_method": "synthetic"}'}, {"simulated"}),
    ({"speculative_config": {"method": "eagle3"}}, set()),
]


@pytest.mark.parametrize("launch, expected", LAUNCHES)
def test_launch(launch, expected, tmp_path):
    folder, facts = drafter_layouts.write("SpecForge, Kimi-K2", tmp_path)
    assert codes(lint(folder, facts, "sglang", launch)) == expected


def test_what_is_no_launch_and_no_engine_is_refused(clean, tmp_path):
    folder = written(tmp_path / "drafter", *clean)
    with pytest.raises(ValueError, match=r"expected one such as sglang==\d"):
        lint(folder, LLAMA, engines=["sglang==x"])
    with pytest.raises(ValueError, match="engines is empty"):
        lint(folder, LLAMA, engines=())
    with pytest.raises(ValueError, match="env = 3; expected a dict"):
        lint(folder, LLAMA, launch={"env": 3})
    assert codes(lint(folder, LLAMA, engines=["vllm==0.32.0+cpu"]), "error", "warning", "note") == set()


DRAFT_VOCABS = [{"draft_vocab_size": str(drafter_layouts.DRAFT)}, {"draft_vocab_size": float(drafter_layouts.DRAFT)}, {"draft_vocab_size": True},
                {"draft_vocab_size": -3}, {"draft_vocab_size": None}, {"draft_vocabulary_size": drafter_layouts.DRAFT},
                {"draft_vocab": drafter_layouts.DRAFT}, {}]


@pytest.mark.parametrize("given", DRAFT_VOCABS)
@pytest.mark.parametrize("lost", [(), ("lm_head.weight",)])
def test_a_slip_in_the_draft_vocabularys_size_takes_no_map_away(given, lost, clean, tmp_path):
    config, tensors = clean
    found = lint(written(tmp_path / "drafter", {**without(config, "draft_vocab_size"), **given}, without(tensors, *lost)), LLAMA, ALL)
    null_for_the_targets_head = lost and given == {"draft_vocab_size": None}
    assert ("d2t-whole" in codes(found)) == bool(null_for_the_targets_head), str(found)
    if null_for_the_targets_head:
        return
    said = next(one for one in found if one.code == "draft-vocab")
    assert said.fix == f"set draft_vocab_size: {drafter_layouts.DRAFT}"
    misspelt = [name for name in given if name != "draft_vocab_size"]
    assert said.evidence == (f"{misspelt[0]} is there, which no engine reads: is it meant?" if misspelt else "")


def test_a_short_context_needs_no_long_drafter(tmp_path):
    folder, facts = drafter_layouts.write("SafeAILab, Llama-3.1-8B", tmp_path)
    assert codes(lint(folder, facts, "sglang", {"context_length": 2048})) == set()
    assert codes(lint(folder, facts, "vllm==0.25.1", {"max_model_len": "2048"})) == set()
    assert codes(lint(folder, facts, "sglang", {"context_length": 4096})) == {"positions"}


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def renamed(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def absolute(tensors):
    return {**tensors, "d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


def shifted(tensors, by):
    return {**tensors, "d2t": tensors["d2t"] + by}


CORRUPTIONS = {  # name -> (code that must be found, config change, tensor change)
    "no architecture": ("architecture", lambda c: {**c, "architectures": None}, None),
    "strange architecture": ("architecture", lambda c: {**c, "architectures": ["MyDrafter"]}, None),
    "size gone": ("config-field", lambda c: without(c, "hidden_size"), None),
    "size is text": ("config-type", lambda c: {**c, "hidden_size": "64"}, None),
    "ids are text": ("config-type", lambda c: {**c, "eagle_aux_hidden_state_layer_ids": "2,16,29"}, None),
    "scaling is text": ("config-type", lambda c: {**c, "rope_scaling": "yarn"}, None),
    "other width": ("hidden-size", lambda c: {**c, "hidden_size": 128}, None),
    "other vocabulary": ("vocab-size", lambda c: {**c, "vocab_size": 500}, None),
    "ids as outputs at the top": ("layers-differ", lambda c: {**c, "eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, None),
    "ids as boundaries below": ("layers-differ", lambda c: {**c, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, None),
    "ids outside": ("layers-refused", lambda c: {**c, "eagle_aux_hidden_state_layer_ids": [2, 16, 99]}, None),
    "id twice": ("layers-refused", lambda c: {**c, "eagle_aux_hidden_state_layer_ids": [2, 16, 16]}, None),
    "no aux states": ("layers-refused", lambda c: {**c, "eagle_config": {"use_aux_hidden_state": False}}, None),
    "count of four": ("fc-width", lambda c: {**c, "num_aux_hidden_states": 4}, None),
    "no draft vocabulary": ("draft-vocab", lambda c: without(c, "draft_vocab_size"), None),
    "null draft vocabulary": ("draft-vocab", lambda c: {**c, "draft_vocab_size": None}, None),
    "other draft vocabulary": ("head-rows", lambda c: {**c, "draft_vocab_size": 100}, None),
    "tied": ("tied", lambda c: {**c, "tie_word_embeddings": True}, None),
    "norm before the residual": ("flag-ignored", lambda c: {**c, "norm_before_residual": True}, None),
    "fc_norm without norms": ("tensor-missing", lambda c: {**c, "fc_norm": True}, None),
    "short": ("positions", lambda c: {**c, "max_position_embeddings": 2048}, None),
    "no theta": ("rope-theta", lambda c: without(c, "rope_theta"), None),
    "other theta": ("rope-theta", lambda c: {**c, "rope_theta": 10000.0}, None),
    "no scaling": ("rope-scaling", lambda c: without(c, "rope_scaling"), None),
    "other scaling": ("rope-scaling", lambda c: {**c, "rope_scaling": {**c["rope_scaling"], "factor": 4.0}}, None),
    "two thetas": ("rope-layout", lambda c: {**c, "rope_parameters": {"rope_theta": 1e4, **c["rope_scaling"]}}, None),
    "two layers": ("more-layers", lambda c: {**c, "num_hidden_layers": 2}, None),
    "gelu": ("activation", lambda c: {**c, "hidden_act": "gelu"}, None),
    "absolute d2t": ("d2t-absolute", None, absolute),
    "no d2t": ("d2t-missing", None, lambda t: without(t, "d2t")),
    "d2t too far": ("d2t-range", None, lambda t: shifted(t, 300)),
    "d2t below zero": ("d2t-range", None, lambda t: shifted(t, -10)),
    "d2t of zeros": ("d2t-zeros", None, lambda t: {**t, "d2t": torch.zeros_like(t["d2t"])}),
    "d2t short": ("d2t-length", None, lambda t: {**t, "d2t": t["d2t"][:-5]}),
    "d2t in floats": ("d2t-type", None, lambda t: {**t, "d2t": t["d2t"].float()}),
    "d2t reversed": ("d2t-order", None, lambda t: {**t, "d2t": (t["d2t"] + torch.arange(len(t["d2t"]))).flip(0) - torch.arange(len(t["d2t"]))}),
    "t2d inverted": ("t2d-differs", None, lambda t: {**t, "t2d": ~t["t2d"]}),
    "no head": ("head-missing", None, lambda t: without(t, "lm_head.weight")),
    "no norm": ("tensor-missing", None, lambda t: without(t, "norm.weight")),
    "no fc": ("tensor-missing", None, lambda t: without(t, "fc.weight")),
    "stray tensor": ("tensor-unknown", None, lambda t: {**t, "verifier_norm.weight": torch.zeros(4)}),
    "a bias": ("bias", None, lambda t: {**t, "midlayer.self_attn.q_proj.bias": torch.zeros(64)}),
    "norms without the flag": ("tensor-unknown", None, lambda t: {**t, "fc_norm.0.weight": torch.zeros(64)}),
    "narrow fc": ("fc-width", None, lambda t: {**t, "fc.weight": t["fc.weight"][:, :-64]}),
    "narrow query": ("qkv-width", None, lambda t: {**t, "midlayer.self_attn.q_proj.weight": t["midlayer.self_attn.q_proj.weight"][:, :64]}),
    "short mlp": ("tensor-shape", None, lambda t: {**t, "midlayer.mlp.up_proj.weight": t["midlayer.mlp.up_proj.weight"][:-1]}),
    "prefixed": ("model-prefix", None, lambda t: {f"model.{name}": tensor for name, tensor in t.items()}),
    "packed": ("quantised", None, lambda t: {**t, "fc.weight": torch.zeros(64, 192, dtype=torch.int8)}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_any_single_corruption_is_found(name, clean, tmp_path):
    code, change, harm = CORRUPTIONS[name]
    config, tensors = clean
    folder = written(tmp_path / "drafter", change(config) if change else config, harm(tensors) if harm else tensors)
    found = lint(folder, LLAMA, ALL)
    assert code in codes(found), str(found) or "nothing found"
    assert code not in codes(lint(written(tmp_path / "whole", config, tensors), LLAMA, ALL))
    lint(folder)  # without a target as well
    verdict(found)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_several_corruptions_never_crash_and_are_all_corrected_or_refused(data, clean, tmp_path_factory):
    names = data.draw(st.lists(st.sampled_from(sorted(CORRUPTIONS)), min_size=1, max_size=4, unique=True))
    folder = tmp_path_factory.mktemp("several")
    config, tensors = clean
    for name in names:
        _, change, harm = CORRUPTIONS[name]
        try:
            config, tensors = change(config) if change else config, harm(tensors) if harm else tensors
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier corruption took away what this one changes
    harmed = written(folder / "drafter", config, tensors)
    found = lint(harmed, LLAMA, ALL)
    assert codes(found), names
    try:
        mended = fix(harmed, folder / "out", LLAMA, ALL)
    except ValueError:
        assert found.worst == "error" and sorted(path.name for path in folder.iterdir()) == ["drafter"]
    else:
        assert lint(mended, LLAMA, ALL).worst != "error"
        again = load_file(mended / "model.safetensors")
        assert all(torch.equal(again[name], tensors[name]) for name in again if name in tensors and name not in ("d2t", "t2d"))


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-5, 300), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5),
                   st.lists(st.integers(-3, 70), max_size=5), st.dictionaries(st.sampled_from(
                       ["eagle_aux_hidden_state_layer_ids", "rope_theta", "factor", "rope_type", "layer_ids", "hidden_size"]),
                       st.one_of(st.none(), st.integers(-3, 70), st.text(max_size=3), st.lists(st.integers(-3, 70), max_size=4)), max_size=3))
FIELDS = ["architectures", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "eagle_config", "rope_scaling", "rope_parameters",
          "rope_theta", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "draft_vocab_size", "vocab_size", "tie_word_embeddings",
          "max_position_embeddings", "transformer_layer_config", "target_hidden_size", "num_hidden_layers", "attention_bias", "fc_norm",
          "norm_before_fc", "hidden_act", "quantization_config", "speculators_model_type"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4), data=st.data())
def test_no_config_makes_it_crash(changes, data, clean, tmp_path_factory):
    config, tensors = clean
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    written(folder, {**config, **changes}, tensors)
    engines = data.draw(st.lists(st.sampled_from([*ALL, "sglang==0.5.11", "sglang==0.4.10", "vllm==0.10.2", "vllm==0.25.1"]), min_size=1, max_size=3))
    for facts in (LLAMA, drafter_layouts.target("Kimi-K2.5"), None):
        found = lint(folder, facts, engines)
        assert all(one.message.strip() for one in found)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 3000), value=st.integers(0, 255), cut=st.one_of(st.none(), st.integers(0, 4000)))
def test_no_damaged_file_makes_it_crash(place, value, cut, clean, tmp_path_factory):
    config, tensors = clean
    folder = written(tmp_path_factory.getbasetemp() / "damaged", config, tensors)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[place] = value
    (folder / "model.safetensors").write_bytes(content[:cut])
    found = lint(folder, LLAMA)
    if cut is not None:
        assert "truncated" in codes(found)


def test_files_that_are_not_there(clean, tmp_path):
    config, tensors = clean
    folder = written(tmp_path / "drafter", config, tensors)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert codes(lint(folder, LLAMA)) == {"no-weights"}
    (folder / "pytorch_model.bin").write_bytes(whole)
    assert codes(lint(folder, LLAMA)) == {"pickle"}
    names = list(tensors)
    index = {"weight_map": {name: f"model-{i % 2 + 1}.safetensors" for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: tensors[name] for name in names[::2]}, folder / "model-1.safetensors")
    assert {"shards-missing", "tensor-missing"} <= codes(lint(folder, LLAMA))
    save_file({name: tensors[name] for name in names[1::2]}, folder / "model-2.safetensors")
    assert codes(lint(folder, LLAMA)) == set()
    (folder / "model-2.safetensors").write_bytes(whole[:-3])
    assert "truncated" in codes(lint(folder, LLAMA))
    with pytest.raises(FileNotFoundError, match="is not there"):
        lint(folder / "absent")


CORRECTED = ["no architecture", "ids as outputs at the top", "ids as boundaries below", "no draft vocabulary", "null draft vocabulary", "tied", "short",
             "absolute d2t", "prefixed"]


@pytest.mark.parametrize("name", CORRECTED)
def test_what_is_safe_is_corrected(name, clean, tmp_path, capsys):
    _, change, harm = CORRUPTIONS[name]
    config, tensors = clean
    folder = written(tmp_path / "drafter", change(config) if change else config, harm(tensors) if harm else tensors)
    mended = fix(folder, tmp_path / "fixed", LLAMA, ALL)
    assert capsys.readouterr().out.strip() not in ("", "nothing to correct; copied as it was")
    assert codes(lint(mended, LLAMA, ALL), "error") == set()
    again = load_file(mended / "model.safetensors")
    assert set(again) == set(tensors) and all(torch.equal(again[each], tensors[each]) for each in tensors)
    fixed = json.loads((mended / "config.json").read_text())
    for engine in ALL:
        assert layers.captured(fixed, engine, None, LLAMA.engine_arch, LLAMA.num_layers) == (2, 16, 29)


def test_four_states_are_counted_after_a_fix(tmp_path):
    folder, facts = drafter_layouts.write("four states, counted nowhere", tmp_path)
    mended = fix(folder, tmp_path / "fixed", facts, ALL)
    assert codes(lint(mended, facts, ALL)) == set()
    assert json.loads((mended / "config.json").read_text())["num_aux_hidden_states"] == 4


def test_command_line(clean, tmp_path):
    config, tensors = clean
    good, bad = written(tmp_path / "good", config, tensors), written(tmp_path / "bad", config, absolute(tensors))

    def run(*words):
        done = subprocess.run([sys.executable, "-m", "k2eagle.lint", *map(str, words)], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done

    assert run(good).returncode == 0
    seen = run(bad, "--engine", "vllm", "sglang==0.5.12")
    assert seen.returncode == 1 and "absolute ids" in seen.stdout and "vllm 0.32.0 and sglang 0.5.12" in seen.stdout
    assert run(bad, "--fix", tmp_path / "out").returncode == 0 and run(tmp_path / "out").returncode == 0
    assert run(tmp_path / "absent").returncode == 1
    assert run(good, "--engine", "tgi").returncode == 1


def test_a_wide_target_needs_an_embedding(clean, tmp_path):
    config, tensors = clean
    wide = replace(LLAMA, hidden_size=128)
    tensors = {**tensors, "fc.weight": torch.zeros(64, 384, dtype=torch.bfloat16)}
    folder = written(tmp_path / "drafter", {**config, "target_hidden_size": 128}, tensors)
    assert codes(lint(folder, wide, ALL)) == {"embedding"}
    written(folder, {**config, "target_hidden_size": 128}, {**tensors, "embed_tokens.weight": torch.zeros(400, 64, dtype=torch.bfloat16)})
    assert codes(lint(folder, wide, ALL)) == set()
