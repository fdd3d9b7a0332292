"""What speculation gains on one machine, by engine, K, load, CUDA graphs and the limit of running requests; and our client beside the engines' own.

    python benchmarks/bench.py sweep OUT --drafter DRAFTER --engine sglang [--only plain K=3] [--limit-s 500]
    python benchmarks/bench.py beside OUT --engine sglang [--rounds 3]
    python benchmarks/bench.py report OUT

`sweep` measures the configurations of one engine in OUT/ENGINE; stopped and called again it goes on. `beside` puts one load on one
plain server with our client and with the engine's own tool in turn, and writes OUT/beside-ENGINE.csv with the ratios of both.
`report` writes results.csv, requests.csv, verdict.csv, findings.csv, costs.csv, charts and provenance.json from what is in OUT.
"""
import argparse
import json
import os
import subprocess
from pathlib import Path

import pandas as pd

from k2eagle import bench, engines, paired, plots, stepcost, verdict
from k2eagle.files import write_atomic, write_json
from k2eagle.load import random_prompts
from k2eagle.provenance import provenance

VLLM_SERVE = "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); serve.add_cli_args(parser); serve.main(parser.parse_args())"
PLAIN_KERNELS = {  # what small builds of the engines have on a GPU; on a CPU the plan chooses
    "sglang": {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "disable_prefill_cuda_graph": True}, "vllm": {}}
SLOW = {"sglang": {"disable_cuda_graph": True}, "vllm": {"enforce_eager": True}}


def configurations(options) -> dict:
    "The servers of one engine: K, without graphs, and with the limit of 48 running requests that SGLang sets for drafts by itself."
    engine, cuda = options.engine, engines.look(options.engine).device == "cuda"
    own = {"arguments": {engine: PLAIN_KERNELS[engine] if cuda else {}}, "context": 2048}
    made = bench.configurations(options.drafter, (engine,), options.num_drafts, requests=max(options.concurrency), **own)
    if cuda:
        slow = {"arguments": {engine: PLAIN_KERNELS[engine] | SLOW[engine]}, "context": 2048}
        made |= bench.configurations(options.drafter, (engine,), (3,), requests=max(options.concurrency), label="no graphs", port=30100, **slow)
        made |= bench.configurations(options.drafter, (engine,), (3,), requests=48, label="48 at most", port=30200, **own)
    return {name: plan for name, plan in made.items() if not options.only or any(name == f"{engine} {wanted}" for wanted in options.only)}


def sweep(options):
    "Measure one engine."
    loads = bench.loads(bench.chat_prompts(count=options.prompts), options.concurrency, requests_each=options.requests_each, max_tokens=options.max_tokens,
                        workload="held-out chat prompts")
    swept = bench.sweep(configurations(options), loads, options.out / options.engine, options.repeats, restart=options.restart, limit_s=options.limit_s,
                        said=lambda line: print(line, flush=True))
    print(swept, swept.findings, sep="\n")


def their_tool(engine: str, url: str, model: str, load, folder: Path, number: int) -> dict:
    "What the engine's own tool measures of the same load: random token ids, answers of one length."
    result = folder / f"{engine}-{number}.json"
    common = ["--base-url", url, "--model", model, "--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency), "--disable-tqdm",
              "--random-input-len", str(len(load.prompts[0])), "--random-output-len", str(load.max_tokens), "--random-range-ratio"]
    command = {
        "vllm": ["-c", VLLM_SERVE, *common, "0", "--dataset-name", "random", "--ignore-eos", "--temperature", "0", "--save-result", "--result-dir", str(folder),
                 "--result-filename", result.name, "--seed", str(number)],
        "sglang": ["-m", "sglang.bench_serving", *common, "1", "--backend", "sglang", "--dataset-name", "random-ids", "--tokenize-prompt",
                   "--output-file", str(result), "--flush-cache", "--seed", str(number)]}[engine]
    for name, function in (("datasets", "load_dataset"), ("tabulate", "tabulate")):  # SGLang's tool imports them; random prompts need neither
        (folder / f"{name}.py").write_text(f"def {function}(*_, **__):\n    raise RuntimeError\n")
    around = {**os.environ, **engines.surroundings(engine, engines.look(engine).device)}
    around["PYTHONPATH"] = os.pathsep.join(filter(None, (around.get("PYTHONPATH"), str(folder))))
    done = subprocess.run([engines.python(engine), *command], env=around, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{engine}'s tool failed: {(done.stdout + done.stderr)[-1500:]}")
    return bench.read_results(result).iloc[-1].to_dict()


def beside(options):
    "One load, two clients, in turn."
    plan = next(iter(configurations(options).values()))
    folder = options.out / f"beside-{options.engine}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with bench.served("beside", plan, folder, 600) as url:
        model = plan.layout.case.target.path
        for number in range(options.rounds + 1):
            load = bench.Load(random_prompts(options.requests, 64, 40000, seed=number), options.requests, concurrency=8, max_tokens=options.max_tokens)
            both = {"ours": lambda: bench.measure(url, load).row, "theirs": lambda: their_tool(options.engine, url, model, load, folder, number)}
            for client in sorted(both, reverse=number % 2 == 1):
                row = both[client]()
                whole = row.get("whole_output_tok_s", row["output_tok_s"])  # their rate is of the whole run, filling up and running out included
                rows.append(dict(round=number, client=client, output_tok_s=whole, **{name: row[name] for name in ("ttft_ms_mean", "tpot_ms_mean", "e2e_ms_mean", "requests", "failed")}))
                print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    measured = frame[frame["round"] > 0]  # the first round warms both up
    write_atomic(options.out / f"beside-{options.engine}.csv", frame.to_csv(index=False))
    for name in ("output_tok_s", "tpot_ms_mean", "ttft_ms_mean", "e2e_ms_mean"):
        ours, theirs = (measured[measured.client == client].sort_values("round")[name] for client in ("ours", "theirs"))
        if theirs.notna().all() and ours.notna().all():  # a tool need not tell all of them
            print(f"{options.engine} {name}, ours over theirs: {paired.compare(ours, theirs)}")


def report(options):
    "Tables and charts of what is there."
    swept = [bench.read_sweep(folder) for folder in sorted(options.out.iterdir()) if (folder / "runs").is_dir()]
    results = pd.concat([one.frame for one in swept], ignore_index=True)
    requests = pd.concat([one.requests for one in swept], ignore_index=True)
    found = [finding for one in swept for finding in one.findings]
    table = bench.verdict(results, allow=tuple(options.allow))
    write_atomic(options.out / "results.csv", results.to_csv(index=False))
    write_atomic(options.out / "requests.csv", requests.to_csv(index=False))
    write_atomic(options.out / "verdict.csv", table.to_csv(index=False))
    write_atomic(options.out / "findings.csv", verdict.gathered([*found, *table.attrs["findings"]]).frame.to_csv(index=False))
    curves = verdict.load_curves(verdict.usable_runs(results))
    note = f"SmolLM2-135M, {len(results)} runs, n = {results.repeat.nunique()} repeats; bars are 95 % intervals over repeats."
    plots.use_style()
    for name, ax in (("throughput", verdict.plot_throughput(curves)[0]), ("frontier", verdict.plot_frontier(curves)[0]),
                     ("verdict", verdict.plot_verdicts(table)), ("latencies", verdict.plot_latencies(requests)[0])):
        plots.save(plots.caption(ax, note), options.out / f"{name}.svg")
    costs = verdict.fit_costs(results)
    for name, model in costs.models.items():
        write_atomic(options.out / f"break_even-{name.replace(' ', '-')}.csv", stepcost.break_even(model).to_csv(index=False))
    print(costs.findings)
    write_json(options.out / "provenance.json", provenance() | {"verdict": verdict.sentences(table)})
    print(table.to_string(), json.dumps(verdict.sentences(table), indent=1), sep="\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("sweep", "beside", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--only", nargs="*", default=[], help="names without the engine: plain, K=3, 'K=3, no graphs', …")
    parser.add_argument("--num-drafts", type=int, nargs="*", default=[1, 3, 5, 7])
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--requests-each", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--allow", nargs="*", default=[])
    options = parser.parse_args()
    {"sweep": sweep, "beside": beside, "report": report}[options.command](options)


if __name__ == "__main__":
    main()
