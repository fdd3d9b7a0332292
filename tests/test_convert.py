"""Conversions: byte for byte between all layouts, refusals, and the converted drafter in the real engines, which accept the same.

Run alone with: python -m pytest tests/test_convert.py
"""
import json
import subprocess
import sys
from pathlib import Path

import drafter_layouts
import pytest
import torch
from safetensors.torch import load_file, save_file

from k2eagle import capture, checkpoint, convert, lint, serving, targets, text, train
from k2eagle.jobs import EngineError

BOUNDARIES = (4, 12, 26)  # not the default, so a reader that does not find them is noticed
SERVED = {"vllm": ("original", "speculators", "back", "specforge"), "sglang": ("original", "modelopt")}  # a start of SGLang takes half a minute


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    "A drafter trained a little on the default target, reading boundaries of its own; saved for both engines."
    folder = tmp_path_factory.mktemp("trained")
    options = dict(max_new_tokens=24, dtype="float32", batch_size=8, boundaries=BOUNDARIES)
    learned = capture.capture("default", text.prompts(8, "train"), folder / "train", **options)
    config = train.TrainConfig(steps=40, batch_tokens=128, ttt_steps=3, dtype="float32", eval_every=1000, save_every=1000)
    drafter = train.train(learned, folder / "run", "default", config=config, draft_vocab_size=512).drafter.float()
    assert drafter.config.boundaries == BOUNDARIES
    return checkpoint.save(drafter, folder / "original", target=targets.facts("default"))


@pytest.fixture(scope="module")
def converted(trained) -> dict:
    "The same drafter in the layouts of others: name -> folder."
    folders = {"original": trained}
    for to in ("speculators", "modelopt", "specforge"):
        folders[to] = convert.convert(trained, trained.parent / to, to, "default")
    folders["back"] = convert.convert(folders["speculators"], trained.parent / "back", "both", "default")
    return folders


def serve(engine, drafter, folder):
    "What an engine answers and counts with a drafter, one prompt at a time."
    return serving.serve(engine, text.prompts(4, "train"), folder, drafter=drafter, max_new_tokens=24, dtype="float32",
                         engine_options={"device": "cpu", "batch_documents": 1})


def counted(served) -> tuple:
    "Accepted drafts and verify steps."
    return int(served.frame.accepted.sum()), int(served.frame.drafts.sum())


@pytest.mark.parametrize("engine", SERVED)
def test_a_converted_drafter_accepts_the_same_in_the_real_engine(engine, converted, engine_python, tmp_path):
    engine_python(engine)
    seen = {name: serve(engine, converted[name], tmp_path / name) for name in SERVED[engine]}
    original = seen.pop("original")
    assert counted(original)[0] > 5, "nothing was accepted, so nothing was compared"
    assert original.captured == BOUNDARIES
    runner = "vllm-v1" if engine == "vllm" else "sglang"  # vLLM's runner on a CPU
    for name, one in seen.items():
        found = lint.lint(converted[name], "default", runner)
        assert one.answers == original.answers, "speculation must not change what the target says"
        if found.worst == "error":  # specforge's ids in vLLM's V1 runner: one layer early, as the linter says
            assert [finding.code for finding in found if finding.severity == "error"] == ["layers-differ"]
            assert one.captured == tuple(boundary - 1 for boundary in BOUNDARIES)
            assert counted(one) != counted(original)
        else:
            assert one.captured == BOUNDARIES and one.frame.equals(original.frame), name


@pytest.mark.exhaustive
def test_vllm_refuses_the_map_of_a_whole_vocabulary(trained, engine_python, tmp_path):
    "Why `save` leaves it out, and what the linter says of one."
    head = targets.head("default")
    config, weights = json.loads((trained / "config.json").read_text()), load_file(trained / "model.safetensors")
    size = config["vocab_size"]
    weights |= {"lm_head.weight": head.lm_head.float().clone(), "d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}
    folder = tmp_path / "whole"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": size}))
    assert [one.code for one in lint.lint(folder, "default", "vllm-v1") if one.severity == "error"] == ["d2t-whole"]
    engine_python("vllm")
    with pytest.raises(EngineError, match="no module or parameter named 'draft_id_to_target_id'"):
        serve("vllm", folder, tmp_path / "refused")
    fixed = lint.fix(folder, tmp_path / "fixed", "default")
    assert counted(serve("vllm", fixed, tmp_path / "served"))[1] > 0


def test_several_files_become_one(trained, tmp_path):
    weights, source = load_file(trained / "model.safetensors"), tmp_path / "sharded"
    source.mkdir()
    names = sorted(weights)
    for number in (0, 1):
        save_file({name: weights[name] for name in names[number::2]}, source / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text((trained / "config.json").read_text())
    made = load_file(convert.convert(source, tmp_path / "one", "both", "default") / "model.safetensors")
    assert set(made) == set(weights) and all(torch.equal(made[name], weights[name]) for name in names)


@pytest.mark.parametrize("name", drafter_layouts.LAYOUTS)
def test_every_layout_is_converted_or_refused_with_a_reason(name, tmp_path):
    drafter, facts = drafter_layouts.write(name, tmp_path)
    before = {path: path.read_bytes() for path in drafter.iterdir()}
    for to in convert.LAYOUTS:
        try:
            made = convert.convert(drafter, tmp_path / to, to, facts)
        except ValueError as error:
            assert len(str(error)) > 40 and not (tmp_path / to).exists()
        else:
            assert lint.lint(made, facts, convert.LAYOUTS[to]).worst != "error"
    assert {path: path.read_bytes() for path in drafter.iterdir()} == before


def test_a_disk_that_fills_leaves_nothing(trained, tmp_path):
    script = ("import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
              "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
              f"from k2eagle.convert import convert; convert({str(trained)!r}, {str(tmp_path / 'out')!r}, 'modelopt', 'default')")
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert failed.returncode != 0 and "File too large" in failed.stderr
    assert list(tmp_path.iterdir()) == []
