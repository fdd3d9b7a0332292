"""How fast is a log read, and in how much memory? Writes logs of a realistic make, reads each in a process of its own.

    python benchmarks/logs.py outputs/logs [--megabytes 300 1000]

sparse   SGLang, one decode line among forty others (prefill lines, requests, progress bars)
dense    SGLang, decode lines only
vllm     vLLM, its two lines every interval among requests
wrapped  SGLang, every decode line broken in two by a terminal, in a container's prefix

Each is read by read_log, which returns all rows, and by read_blocks, which yields them 100,000 at a time. Written: speed.csv
(MB/s of one core, peak memory of the process, rows, lines unread) and provenance.json. The logs are deleted at the end. Memory
is the resident peak less that of the process before reading.
"""
import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from k2eagle.files import write_atomic, write_json
from k2eagle.provenance import provenance

READ = """
import json, re, sys, time
from k2eagle.logs import read_blocks, read_log

def peak():  # in this program; what getrusage says has that of the program which started it in it
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])

read_log("[2026-11-30 02:54:43] Decode batch, #running-req: 8, #token: 5, token usage: 0.07, accept len: 1.62, accept rate: 0.21, "
         "cpu graph: False, gen throughput (token/s): 17.35, #queue-req: 3\\n")  # imports are not measured
before, start, rows = peak(), time.process_time(), 0
for frame in read_blocks(sys.argv[1]) if sys.argv[2] == "read_blocks" else [read_log(sys.argv[1])]:
    rows += len(frame)
seconds = time.process_time() - start
print(json.dumps(dict(seconds=round(seconds, 2), rows=rows, unread=frame.attrs["log"]["unread"], peak_bytes=peak() - before)))
"""
REQUEST = "INFO:     10.0.0.{}:{} - \"POST /v1/chat/completions HTTP/1.1\" 200 OK\n"
PREFILL = "[{} TP0] Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: 0, token usage: 0.05, #running-req: 3, #queue-req: 0\n"
BAR = "Loading safetensors checkpoint shards:  {}% Completed | 5/42 [00:01<00:09,  3.9it/s]\r"


def clock(second: int) -> str:
    "A time that goes on."
    return str(pd.Timestamp("2026-01-01") + pd.Timedelta(seconds=second))


def decode(rng: random.Random, second: int) -> str:
    "A decode line of SGLang 0.5.23 with three drafts."
    kept = rng.random() * 2
    return (f"[{clock(second)} TP0] Decode batch, #running-req: {rng.randint(1, 40)}, #token: {rng.randint(1, 99999)}, token usage: 0.07, "
            f"accept len: {1 + kept:.2f}, accept rate: {kept / 3:.2f}, cuda graph: True, gen throughput (token/s): {rng.random() * 999:.2f}, "
            "#queue-req: 3\n")


def vllm(rng: random.Random, second: int) -> str:
    "An interval of vLLM 0.32 with three drafts."
    steps = rng.randint(50, 5000)
    kept = sorted((rng.randint(0, steps) for _ in range(3)), reverse=True)
    stamp = clock(second)[5:]
    shares = ", ".join(f"{own / steps:.3f}" for own in kept)
    return (f"(APIServer pid=7) INFO {stamp} [loggers.py:259] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 138.7 "
            "tokens/s, Running: 12 reqs, Waiting: 0 reqs, GPU KV cache usage: 19.8%, Prefix cache hit rate: 0.0%\n"
            f"(APIServer pid=7) INFO {stamp} [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {1 + sum(kept) / steps:.2f}, Accepted "
            f"throughput: 27.96 tokens/s, Drafted throughput: 139.80 tokens/s, Accepted: {sum(kept)} tokens, Drafted: {3 * steps} tokens, "
            f"Per-position acceptance rate: {shares}, Avg Draft acceptance rate: {100 * sum(kept) / steps / 3:.1f}%\n")


def piece(kind: str, rng: random.Random, second: int) -> str:
    "Some lines of a log."
    if kind == "dense":
        return decode(rng, second)
    if kind == "wrapped":
        line = decode(rng, second)
        return f"sglang-1  | {line[:120]}\nsglang-1  | {line[120:]}"
    others = "".join(rng.choice([REQUEST.format(rng.randint(0, 255), rng.randint(1024, 65535)), PREFILL.format(clock(second), rng.randint(1, 9999)),
                                 BAR.format(rng.randint(0, 100))]) for _ in range(40)) + "\n"
    return others + (vllm(rng, second) if kind == "vllm" else decode(rng, second))


def write(path: Path, kind: str, megabytes: int):
    "A log of that size: one megabyte that differs line by line, with its times, over and over."
    rng, second = random.Random(0), 0
    with path.open("w") as file:
        while file.tell() < megabytes * 1_000_000:
            block, size = [], 0
            while size < 4_000_000:
                block.append(piece(kind, rng, second))
                second, size = second + 1, size + len(block[-1])
            for _ in range(max(1, megabytes // 40)):  # making lines takes longer than reading them
                file.write("".join(block))


def main():
    "Write, read, delete."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[40])
    parser.add_argument("--only", nargs="+", default=["sparse", "dense", "vllm", "wrapped"])
    arguments, rows = parser.parse_args(), []
    for megabytes, kind in itertools.product(arguments.megabytes, arguments.only):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "server.log"
            write(path, kind, megabytes)
            size = path.stat().st_size
            for reader in ("read_log", "read_blocks"):
                done = json.loads(subprocess.run([sys.executable, "-c", READ, path, reader], check=True, capture_output=True, text=True).stdout)
                rows.append(dict(log=kind, reader=reader, file_bytes=size, mb_per_s=round(size / 1e6 / done["seconds"], 1), **done))
                print(rows[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_atomic(arguments.out / "speed.csv", pd.DataFrame(rows).to_csv(index=False))
    write_json(arguments.out / "provenance.json", provenance(megabytes=arguments.megabytes))


if __name__ == "__main__":
    main()
