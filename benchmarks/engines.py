"""Does it matter how an engine is run? Captures the same conversations in every way it can be, and compares them.

    python benchmarks/engines.py capture OUT [--device cuda] [--only vllm sglang-fp8] [--documents 12] [--sglang-args JSON]
    python benchmarks/engines.py compare OUT [OTHER …]   # captures of several machines, first folder first

`capture` fills OUT/<target>/<case>/ with stores, for the default target and a tiny random Kimi-K2; cases that cannot run are
written to OUT/failed.csv with the engine's own words. int4 cases load the target's feed-forward blocks, or its experts, as packed
integers (`hf-int4` the numbers they stand for); tp cases share it between two GPUs, or two processes of a CPU.

`compare` writes differences.csv and provenance.json into the first folder: a row a pair of stores, with the relative L2 of the
median token at each boundary, beside the noise floor of the reference.
"""
import argparse
import itertools
import json
import time
from pathlib import Path

import pandas as pd
import torch
import variants

from k2eagle import align, capture, measure, targets, text
from k2eagle.files import portable, write_atomic, write_json
from k2eagle.jobs import EngineError
from k2eagle.provenance import provenance
from k2eagle.store import open_store

GREEDY = {"temperature": 0.0}
CASES = {  # name of the case: engine, options of the engine
    "hf": ("hf", {}), "hf-alone": ("hf", {"batch_tokens": 1}), "hf-float32": ("hf", {"dtype": "float32"}),
    "vllm-prefill": ("vllm", {}), "vllm-decode": ("vllm", {"mode": "decode"}),
    "vllm-alone": ("vllm", {"batch_documents": 1}),
    "vllm-graphs-prefill": ("vllm", {"cuda_graphs": True}), "vllm-graphs-decode": ("vllm", {"cuda_graphs": True, "mode": "decode"}),
    "vllm-fp8": ("vllm", {"quantization": "fp8"}),
    "sglang-prefill": ("sglang", {}), "sglang-decode": ("sglang", {"mode": "decode"}),
    "sglang-alone": ("sglang", {"batch_documents": 1}),
    "sglang-graphs-decode": ("sglang", {"cuda_graphs": True, "mode": "decode"}),
    "sglang-fp8": ("sglang", {"quantization": "fp8"}),
    "hf-int4": ("hf", {}), "vllm-int4": ("vllm", {}), "sglang-int4": ("sglang", {}),
    "vllm-tp1": ("vllm", {}), "vllm-tp2": ("vllm", {"tp_size": 2}),
    "sglang-tp1": ("sglang", {}), "sglang-tp2": ("sglang", {"tp_size": 2}),
}
VARIANTS = {"hf-int4": "unpacked", "vllm-int4": "int4", "sglang-int4": "int4",  # of the target's checkpoint
            **dict.fromkeys(("vllm-tp1", "vllm-tp2", "sglang-tp1", "sglang-tp2"), "even")}
ONLY_CUDA = ("graphs", "fp8")
PAIRS = [  # what a user would ask, as (case, case)
    ("hf", "hf-alone"), ("hf", "hf-float32"), ("hf", "vllm-prefill"), ("hf", "sglang-prefill"), ("vllm-prefill", "sglang-prefill"),
    ("vllm-prefill", "vllm-alone"), ("sglang-prefill", "sglang-alone"), ("vllm-prefill", "vllm-decode"),
    ("sglang-prefill", "sglang-decode"), ("vllm-decode", "sglang-decode"), ("vllm-prefill", "vllm-graphs-prefill"),
    ("vllm-decode", "vllm-graphs-decode"), ("sglang-decode", "sglang-graphs-decode"), ("vllm-graphs-decode", "sglang-graphs-decode"),
    ("vllm-prefill", "vllm-fp8"), ("sglang-prefill", "sglang-fp8"), ("vllm-fp8", "sglang-fp8"), ("hf", "hf-int4"),
    ("vllm-prefill", "vllm-int4"), ("sglang-prefill", "sglang-int4"), ("hf-int4", "vllm-int4"), ("hf-int4", "sglang-int4"),
    ("vllm-int4", "sglang-int4"), ("vllm-prefill", "vllm-tp1"), ("vllm-tp1", "vllm-tp2"), ("sglang-prefill", "sglang-tp1"),
    ("sglang-tp1", "sglang-tp2"), ("vllm-tp2", "sglang-tp2")]


def conversations(target: Path, documents: int) -> list:
    "The same on every machine: prompts with a fixed answer."
    tokenizer = text.load_tokenizer(target)
    answer = "Let us take this one step at a time, and check each step before we go on to the next. Then the answer is clear."
    chats = [[{"role": "user", "content": prompt.text}, {"role": "assistant", "content": answer}]
             for prompt in text.prompts(documents, "heldout")]
    return [text.encode(tokenizer, chat) for chat in chats]


def chosen(only: list, device: str) -> list:
    "The cases asked for that this machine can run."
    wanted = [name for name in CASES if name.startswith(tuple(only))]
    if device == "cpu":
        return [name for name in wanted if not any(word in name for word in ONLY_CUDA)]
    return [name for name in wanted if "tp2" not in name or torch.cuda.device_count() > 1]


def checkpoint(out: Path, target: Path, case: str) -> Path:
    "The form of the target that a case loads."
    variant = VARIANTS.get(case)
    return variants.VARIANTS[variant](target, out / "targets" / f"{target.name}-{variant}") if variant else target


def note_failures(out: Path, target: str, case: str, error: str | None):
    "Keep the words of a case that failed, and forget those of an earlier try."
    file = out / "failed.csv"
    rows = pd.read_csv(file).to_dict("records") if file.is_file() else []
    rows = [row for row in rows if (row["target"], row["case"]) != (target, case)]
    rows += [{"target": target, "case": case, "error": error}] if error else []
    if rows or file.is_file():
        write_atomic(file, pd.DataFrame(rows, columns=["target", "case", "error"]).to_csv(index=False))


def capture_all(out: Path, device: str, only: list, documents: int, engine_args: dict):
    "Fill stores for every target and case."
    for target in (targets.default_target(), targets.mini_kimi(out / "targets" / "mini-kimi", num_layers=12)):
        samples = conversations(target, documents)
        for name in chosen(only, device):
            engine, options = CASES[name]
            given = options if engine == "hf" else {"patience_s": 400, "engine_options": {**options, "engine_args": engine_args[engine]}}
            start, failure = time.perf_counter(), None
            try:
                capture.capture(checkpoint(out, target, name), samples, out / target.name / name, engine, device=device, answers=GREEDY, **given)
            except (EngineError, ValueError) as error:
                failure = str(error)
            note_failures(out, target.name, name, failure)
            print(f"{target.name} {name}: {time.perf_counter() - start:.1f} s{', failed: ' + failure[:300] if failure else ''}", flush=True)


def row(target: Path, one, other, names: tuple) -> dict:
    "How far two stores are apart."
    alignment = align.align(one, other, any_weights=True)
    table = measure.measure(one, other, alignment, head=targets.head(target)).boundaries.set_index("boundary")
    return {"target": target.name, "a": names[0], "b": names[1], "tokens": alignment.tokens,
            **{f"boundary_{name}": value for name, value in table.rel_l2.items()},
            **{f"p95_{name}": value for name, value in table.rel_l2_p95.items()}}


def pairs(machines: list) -> list:  # (machine, case), (machine, case)
    "What is compared: the cases of one machine, then each case between machines."
    within = [((machine, a), (machine, b)) for machine in machines for a, b in PAIRS]
    return within + [((one, case), (other, case)) for one, other in itertools.combinations(machines, 2) for case in CASES]


def compare_all(folders: list):
    "Compare the cases of each machine, and each case between machines."
    rows = []
    for target in (targets.default_target(), targets.mini_kimi(folders[0] / "targets" / "mini-kimi", num_layers=12)):
        kept = {(folder.name, case): folder / target.name / case for folder in folders for case in CASES}
        kept = {key: open_store(path) for key, path in kept.items() if (path / "manifest.json").is_file()}
        rows += [row(target, kept[a], kept[b], (": ".join(a), ": ".join(b)))
                 for a, b in pairs([folder.name for folder in folders]) if a in kept and b in kept]
    frame = pd.DataFrame(rows)
    write_atomic(folders[0] / "differences.csv", frame.to_csv(index=False))
    write_json(folders[0] / "provenance.json", provenance(folders=[portable(folder) for folder in folders]))
    print(frame.to_string(float_format="{:.4f}".format))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["capture", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    parser.add_argument("--documents", type=int, default=12)
    for engine in ("vllm", "sglang"):
        parser.add_argument(f"--{engine}-args", type=json.loads, default={}, help="JSON, passed to the engine as it is")
    options = parser.parse_args()
    if options.task == "capture":
        capture_all(options.folders[0], options.device, options.only, options.documents,
                    {"vllm": options.vllm_args, "sglang": options.sglang_args})
    else:
        compare_all(options.folders)
