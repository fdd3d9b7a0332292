"""How fast are two stores compared, and in how much memory? Ours against plain torch, on the same stores in the same run.

    python benchmarks/diff.py outputs/diff_speed --large 20

Three ways to the same numbers (relative L2, cosine, largest difference and norm ratio of every token at every boundary):

ours    `k2eagle.measure.measure`, tables by boundary and position included
chunks  torch, 64 tokens at a time, from the mapped files
load    torch, each file loaded and compared as a whole

They take turns on pairs of stores that lie in the page cache, on one thread; a ratio is taken within a turn, so whatever
else the machine does hits all three. Each way then runs once in a process of its own for its peak memory, and
`compare` runs on a pair of `--large` GB (both stores together). The stores are deleted at the end.
"""
import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from k2eagle.align import align
from k2eagle.files import write_atomic, write_json
from k2eagle.measure import measure
from k2eagle.provenance import provenance
from k2eagle.store import create, open_store

FACTS = dict(engine="hf", model="invented", weight_fingerprint="00ff", num_layers=30, last_norm="post_norm")
SHAPES = {  # name: documents, tokens a document, width
    "short, narrow": (512, 128, 576), "long, narrow": (64, 2048, 576), "long, wide": (10, 2048, 7168)}


def write(path: Path, documents: int, tokens: int, width: int, noise: float):
    "A store of invented states; with noise, one that differs from the one without."
    random = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, 4, width, generator=random)
    states = (states * (1 + noise * torch.randn(tokens, 4, width, generator=random))).bfloat16()
    with create(path, FACTS, [tokens] * documents, (2, 15, 27), width) as writer:
        for number in range(documents):
            ids = (torch.arange(tokens) * 7 + number) % 40_000
            writer.append(ids, states[:, :3], states[:, 3], torch.arange(tokens) > 5)


def pair(folder: Path, name: str, *shape) -> tuple:
    "Two stores of one shape."
    for side, noise in (("a", 0.0), ("b", 0.01)):
        write(folder / name / side, *shape, noise)
    return tuple(open_store(folder / name / side) for side in "ab")


def numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    "Relative L2, cosine, largest difference and norm ratio of each row, as one would write it down."
    x, y = x.float(), y.float()
    difference, norm_x, norm_y = x - y, x.norm(dim=-1), y.norm(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
    return torch.stack([difference.norm(dim=-1) / norm_x, cosine, difference.abs().amax(-1), norm_y / norm_x])


def ours(a, b):
    "Everything `measure` gives."
    return measure(a, b, align(a, b)).boundaries


def chunks(a, b, size: int = 64):
    "64 tokens at a time."
    rows = []
    for one, two in zip(a, b):
        for x, y in ((one.hidden, two.hidden), (one.last[:, None], two.last[:, None])):
            rows += [numbers(x[start:start + size], y[start:start + size]).flatten(1) for start in range(0, len(x), size)]
    return torch.cat(rows, 1).nanmedian(1)


def load(a, b):
    "Whole files."
    rows = []
    for shard in a.manifest.shards:
        x, y = (load_file(store.path / shard.file) for store in (a, b))
        rows += [numbers(x[part], y[part]).flatten(1) for part in ("hidden", "last")]
    return torch.cat(rows, 1).nanmedian(1)


def compare(a, b):
    "The whole report, without a target."
    from k2eagle.diff import compare
    return compare(a, b)


WAYS = {"ours": ours, "chunks": chunks, "load": load, "compare": compare}


def stored_bytes(*stores) -> int:
    "Bytes of hidden states in stores."
    return sum(store.manifest.tokens * (len(store.manifest.boundaries) + 1) * store.manifest.hidden_size * 2 for store in stores)


def timed(way, a, b) -> float:
    "Seconds of processor time."
    start = time.process_time()
    way(a, b)
    return time.process_time() - start


def speeds(name: str, a, b, turns: int) -> list:
    "GB/s of each way, and how many times as fast as it ours is, over turns."
    taken = {way: [] for way in ("ours", "chunks", "load")}
    for turn in range(turns + 1):
        for way, seconds in taken.items():
            seconds.append(timed(WAYS[way], a, b))
    size, rows = stored_bytes(a, b) / 1e9, []
    for way, seconds in taken.items():
        ratios = [theirs / own for theirs, own in zip(seconds[1:], taken["ours"][1:])]  # the first turn warms up
        rows.append(dict(stores=name, gb=size, way=way, gb_per_s=size / statistics.median(seconds[1:]), best_gb_per_s=size / min(seconds[1:]),
                         ours_is_times_faster=statistics.median(ratios), low=min(ratios), high=max(ratios), turns=turns))
    return rows


def memory(way: str, a, b) -> dict:
    "Peak memory of a process that compares two stores, and what it had before it began."
    command = [sys.executable, __file__, "--way", way, str(a.path), str(b.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int:
    "The most memory this process has had, mapped files included (Linux)."
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def alone(way: str, *paths):
    "In a process of its own: compare, and print peak memory in bytes and the time."
    torch.set_num_threads(1)
    a, b = map(open_store, paths)
    before, began = peak_bytes(), time.perf_counter()
    WAYS[way](a, b)
    print(json.dumps(dict(peak_bytes=peak_bytes(), imports_bytes=before, wall_s=time.perf_counter() - began)))


def main(out: Path, large: float, turns: int):
    "Measure speeds and memory; write speed.csv, memory.csv and provenance.json."
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(dir=out))
    try:
        rows, peaks = [], []
        for name, shape in SHAPES.items():
            a, b = pair(scratch, name, *shape)
            rows += speeds(name, a, b, turns)
            peaks += [dict(stores=name, gb=stored_bytes(a, b) / 1e9, way=way, **memory(way, a, b)) for way in ("ours", "chunks", "load")]
            shutil.rmtree(scratch / name)
        if large:
            tokens, width = 2048, 7168
            a, b = pair(scratch, "large", round(large * 1e9 / (2 * tokens * 4 * width * 2)), tokens, width)
            peaks.append(dict(stores="large", gb=stored_bytes(a, b) / 1e9, way="compare", **memory("compare", a, b)))
        for name, table in (("speed", pd.DataFrame(rows)), ("memory", pd.DataFrame(peaks))):
            write_atomic(out / f"{name}.csv", table.to_csv(index=False))
            print(table.round(2).to_string(index=False))
        write_json(out / "provenance.json", provenance(seed=0))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="*", type=Path, default=[Path("outputs/diff_speed")], help="folder for results and scratch")
    parser.add_argument("--large", type=float, default=20, help="GB of the pair of stores whose peak memory is shown; 0 leaves it out")
    parser.add_argument("--turns", type=int, default=5, help="times each way is taken")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        alone(arguments.way, *arguments.out)
    else:
        arguments.out[0].mkdir(parents=True, exist_ok=True)
        main(arguments.out[0], arguments.large, arguments.turns)
