"""Do engines accept what the simulation promises, however they draft? Serves one drafter in every way, and simulates each.

    python benchmarks/served.py run OUT --drafter outputs/pipeline/work/drafter/drafter [--device cuda] [--only vllm] [--prompts 96]
    python benchmarks/served.py report OUT

`run` answers held-out prompts greedily and at temperature 1 with the target alone, keeps its states, simulates on them, and lets each
engine answer the same prompts without the drafter, with a greedy chain, a tree (SGLang) and a sampled chain (vLLM). Every case is a
file in OUT, so that a run that was stopped goes on; a case that cannot run is kept with the engine's own words.

`report` writes served.csv (a row a case, beside its simulation), unchanged.csv (is the text what the target alone writes?),
failed.csv, served.png and provenance.json.
"""
import argparse
import json
import time
from pathlib import Path

import pandas as pd

from k2eagle import accept, capture, checkpoint, plots, serving, targets, text
from k2eagle.files import read_json, write_atomic, write_json
from k2eagle.jobs import EngineError
from k2eagle.provenance import provenance
from k2eagle.store import open_store

K = 3
WAYS = {"plain": {}, "chain": {}, "tree": dict(topk=4, num_draft_tokens=8), "sampled": dict(draft_sample_method="probabilistic")}
CASES = [  # engine, temperature, way, dtype, requests together
    ("vllm", 0.0, "plain", "bfloat16", 32), ("vllm", 0.0, "chain", "bfloat16", 32), ("vllm", 1.0, "chain", "bfloat16", 32),
    ("vllm", 1.0, "sampled", "bfloat16", 32), ("sglang", 0.0, "plain", "bfloat16", 32), ("sglang", 0.0, "chain", "bfloat16", 32),
    ("sglang", 0.0, "tree", "bfloat16", 32), ("sglang", 1.0, "chain", "bfloat16", 32), ("sglang", 1.0, "tree", "bfloat16", 32),
    *[(engine, 0.0, way, "float32", 1) for engine in ("vllm", "sglang") for way in ("plain", "chain")],
]


def name_of(engine: str, temperature: float, way: str, dtype: str, together: int) -> str:
    "Name a case."
    return f"{engine}-{temperature:g}-{way}-{dtype}-{together}"


def simulate_all(out: Path, drafter: Path, device: str, prompts: list, max_new_tokens: int):
    "Answers and states of the target at both temperatures, and every way to draft simulated on them."
    head = checkpoint.load(drafter, targets.default_target()).to(device)
    for temperature in (0.0, 1.0):
        file = out / f"simulated-{temperature:g}.json"
        if file.is_file():
            continue
        store = capture.capture("default", prompts, out / f"store-{temperature:g}", temperature=temperature, max_new_tokens=max_new_tokens,
                                device=device)
        ways = [way for way in WAYS if way != "plain" and (temperature or way != "sampled")]
        measured = {way: accept.simulate(head, store, K, temperature, **WAYS[way]) for way in ways}
        write_json(file, {way: one.frame.to_dict("list") for way, one in measured.items()})
        print(file.name, {way: round(one.accept_len, 3) for way, one in measured.items()}, flush=True)


def serve_case(out: Path, case: tuple, drafter: Path, device: str, prompts: list, max_new_tokens: int, engine_args: dict):
    "Let an engine answer, and keep counts and tokens; or the words it failed with."
    engine, temperature, way, dtype, together = case
    file, begun = out / f"{name_of(*case)}.json", time.perf_counter()
    if file.is_file() and "error" not in read_json(file):
        return
    try:
        served = serving.serve(engine, prompts, out / "exchange", drafter=None if way == "plain" else drafter, num_draft=K, **WAYS[way],
                               max_new_tokens=max_new_tokens, temperature=temperature, dtype=dtype, patience_s=400,
                               engine_options={"device": device, "batch_documents": together, "engine_args": engine_args})
        kept = dict(version=served.version, captured=served.captured, frame=served.frame.to_dict("list"), answers=served.answers, seconds=served.seconds,
                    findings=[finding.code for finding in served.findings])
    except (EngineError, ValueError) as error:
        kept = {"error": str(error)}
    write_json(file, kept)
    print(f"{file.stem}: {time.perf_counter() - begun:.0f} s {kept.get('error', '')[:300]}", flush=True)


def pooled(frame: dict, source: str) -> accept.Acceptance:
    "Counts from a file."
    return accept.summarize(pd.DataFrame(frame), K, source)


def served_row(out: Path, case: tuple) -> dict:
    "What an engine accepted, beside what was simulated."
    engine, temperature, way, _, _ = case
    kept = read_json(out / f"{name_of(*case)}.json")
    served = pooled(kept["frame"], f"{engine} {kept['version']}")
    simulated = pooled(read_json(out / f"simulated-{temperature:g}.json")[way], "simulated")
    gap, low, high = accept.served_gap(simulated, served)
    return dict(engine=engine, version=kept["version"], temperature=temperature, drafts=way, accept_len=served.accept_len, low=served.ci[0],
                high=served.ci[1], verify_steps=served.drafts, simulated=simulated.accept_len, simulated_low=simulated.ci[0],
                simulated_high=simulated.ci[1], gap=gap, gap_low=low, gap_high=high, finding=accept.compare_served(simulated, served)[0].code,
                rows=len(served.frame))


def beside(out: Path, done: list) -> pd.DataFrame:
    "Every simulation with what engines made of it below, as the chart takes them."
    shown = []
    for temperature in (0.0, 1.0):
        for way, frame in read_json(out / f"simulated-{temperature:g}.json").items():
            named = f"{way} at temperature {temperature:g}"
            shown.append(pooled(frame, f"simulated: {named}"))
            for case in done:
                if case[1:4] == (temperature, way, "bfloat16"):
                    shown.append(pooled(read_json(out / f"{name_of(*case)}.json")["frame"], f"{case[0]}: {named}"))
    return accept.accept_len_frame(*shown)


def unchanged_row(out: Path, case: tuple, prompts: list) -> dict:
    "How many greedy answers the drafter left as they are, and what parted the others."
    plain, drafted = (read_json(out / f"{name_of(*own)}.json") for own in ((*case[:2], "plain", *case[3:]), case))
    both = [serving.Served(case[0], one["version"], None, (), pd.DataFrame(), one["answers"], one["seconds"]) for one in (plain, drafted)]
    parted = serving.partings(*both, prompts)
    same = sum(plain["answers"][name] == drafted["answers"][name] for name in plain["answers"])
    return dict(engine=case[0], version=plain["version"], drafts=case[2], dtype=case[3], together=case[4], answers=len(plain["answers"]),
                same=same, parted=len(parted), lossy=int(parted.lossy.sum()), largest_margin=parted.margin.abs().max() if len(parted) else 0.0)


def report(out: Path):
    "Write the tables and the chart."
    told = read_json(out / "run.json")
    prompts = text.prompts(told["prompts"], "heldout")
    kept = {case: read_json(file) for case in CASES if (file := out / f"{name_of(*case)}.json").is_file()}
    failed = [dict(case=name_of(*case), error=one["error"]) for case, one in kept.items() if "error" in one]
    done = [case for case, one in kept.items() if "error" not in one]
    rows = pd.DataFrame([served_row(out, case) for case in done if case[2] != "plain" and case[3] == "bfloat16"])
    write_atomic(out / "served.csv", rows.to_csv(index=False))
    pairs = [case for case in done if case[1] == 0 and case[2] != "plain" and (*case[:2], "plain", *case[3:]) in done]
    write_atomic(out / "unchanged.csv", pd.DataFrame([unchanged_row(out, case, prompts) for case in pairs]).to_csv(index=False))
    write_atomic(out / "failed.csv", pd.DataFrame(failed, columns=["case", "error"]).to_csv(index=False))
    plots.use_style()
    note = f"SmolLM2-135M, K = {K}, {told['prompts']} prompts, answers up to {told['max_new_tokens']} tokens. Bars are 95 % intervals."
    plots.save(plots.caption(plots.plot_accept_length(beside(out, done)), note), out / "served")
    write_json(out / "provenance.json", provenance(**told))
    print(rows.to_string(float_format="{:.3f}".format), (out / "unchanged.csv").read_text(), sep="\n")


def main():
    "Run the cases, or report on them."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["run", "report"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="first letters of a case's name, such as sglang-0-tree")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--vllm-args", type=json.loads, default={})
    parser.add_argument("--sglang-args", type=json.loads, default={})
    given = parser.parse_args()
    if given.task == "report":
        return report(given.out)
    given.out.mkdir(parents=True, exist_ok=True)
    prompts = text.prompts(given.prompts, "heldout")
    write_json(given.out / "run.json", provenance(prompts=given.prompts, max_new_tokens=given.max_new_tokens, device_asked=given.device))
    simulate_all(given.out, given.drafter, given.device, prompts, given.max_new_tokens)
    for case in CASES:
        few = prompts if case[4] > 1 else prompts[:16]
        if name_of(*case).startswith(given.only):
            args = {"vllm": given.vllm_args, "sglang": given.sglang_args}[case[0]]
            serve_case(given.out, case, given.drafter, given.device, few, given.max_new_tokens, args)


if __name__ == "__main__":
    main()
