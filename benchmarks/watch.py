"""How often is a start judged rightly, and what does following a log cost?

    python benchmarks/watch.py outputs/watch [--megabytes 1000]

starts.csv     every recorded and written start, replayed look by look: lines with the right stage, whether a healthy one was
               ever called hung, after how long a stall was found, the cause that is named first and the one that is meant
following.csv  a server that is ready adds to its log at 0.1, 1 and 10 MB/s until it holds so many megabytes, and is looked at
               every 2 s with its 16 processes: share of a core and milliseconds a megabyte. The clock is not waited for: each
               look finds what two seconds would have added. `quiet` has ordinary lines of SGLang, `quoting` beside them one
               in a hundred that quotes a word which may mean the end of a server.
"""
import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from logs import write

from k2eagle.failures import diagnose
from k2eagle.files import write_atomic, write_json
from k2eagle.provenance import provenance
from k2eagle.watch import LIMITS, Watcher, observe, status, watch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from failure_excerpts import EXCERPTS, MIXTURES
from test_failures import RECORDED as CAUSES
from test_failures import RECORDED_LOGS, survived
from test_watch import BY_HAND, FOLDER, RECORDED, WRITTEN, by_hand, moving, recorded, replayed

EVERY_S = 2.0
QUOTE = b"[2026-01-04 01:04:22] Receive: obj=GenerateReqInput(text='Who died, and why was the worker Killed?')\n"


def stages(name: str) -> tuple:  # lines with the right stage, lines that have one
    "Read a start line by line."
    watcher, right, asked = Watcher(), 0, 0
    if name in WRITTEN:
        rows = [(stage, text.encode()) for stage, _, text in WRITTEN[name].rows]
    else:
        rows = zip(by_hand(name), (FOLDER / f"{name}.log").read_bytes().split(b"\n")[:-1], strict=True)
    for label, line in rows:
        watcher.feed(line + b"\n", 0)
        asked, right = asked + (label is not None), right + (watcher.start.stage == label)
    return right, asked


def looks(name: str) -> list:  # (seconds, state)
    "Replay a start with what its processes did; a written one 30 times as slowly, as a large model loads."
    if name not in WRITTEN:
        return [(at, one.state) for at, one in replayed(name)]
    watcher, clock, stage, seen = Watcher(), 0.0, "start", []
    watcher.following = True
    for after, seconds, text in WRITTEN[name].rows:
        while clock < 30 * seconds:
            observe(watcher, moving(stage, clock, {10: ("python", "R", clock)}))
            seen.append((clock, status(watcher).state))
            clock += 10
        watcher.feed(f"{text}\n".encode(), clock)
        stage = after
    return [*seen, (clock, status(watcher).state)]


def judged() -> pd.DataFrame:
    "One row a start."
    rows = []
    for name in [*RECORDED, *WRITTEN]:
        right, asked = stages(name) if name in BY_HAND or name in WRITTEN else (None, None)
        seen = looks(name)
        about = recorded(name)[1] if name in RECORDED else {}
        hung = [at for at, state in seen if state == "hung"]
        failed, frozen = "ended_s" in about, "frozen" in name and "ready_s" not in about
        rows.append(dict(start=name, kind="failed" if failed else "stalled" if frozen else "healthy", lines=asked, right=right,
                         last=seen[-1][1], hung_after_s=hung[0] - about.get("done_s", 0) if hung else None))
    for name, (meant, text) in [*MIXTURES.items(), *((code, (code, text)) for code, (_, text) in EXCERPTS.items()),
                                *((name, (CAUSES.get(name), path)) for name, path in RECORDED_LOGS.items() if name in CAUSES or survived(path)),
                                *((name, (None, start.text)) for name, start in WRITTEN.items())]:
        found = diagnose(text)
        kind = "whole log" if name in MIXTURES else "excerpt" if name in EXCERPTS else "written" if name in WRITTEN else "recorded"
        rows.append(dict(start=name, kind=f"diagnosis of {kind}", meant=meant or "nothing", named=found[0].code if found else "nothing"))
    return pd.DataFrame(rows)


def followed(folder: Path, kind: str, rate: float, megabytes: int, pid: int) -> dict:
    "What it costs to follow a log that grows."
    source, path = folder / "source", folder / "server.log"
    if not source.exists():
        write(source, "sparse", 40)
    data = source.read_bytes().replace(b"\r", b"\n")
    if kind == "quoting":
        rows = data.split(b"\n")
        data = b"\n".join(row + b"\n" + QUOTE.rstrip() if number % 100 == 0 else row for number, row in enumerate(rows))
    path.write_text(WRITTEN["sglang-0.5.23-eagle3-tp4"].text)
    following = watch(path, pid, follow=True, every_s=0.0, until=())
    next(following)
    size, at, spent, count = int(rate * EVERY_S * 1e6), 0, 0.0, 0
    with open(path, "ab", buffering=0) as file:
        while file.tell() < megabytes * 1e6:
            part = data[at:at + size]
            part, at = part + data[:size - len(part)], (at + size) % len(data)
            file.write(part)
            begun = time.process_time()
            found = next(following)
            spent, count = spent + time.process_time() - begun, count + 1
            assert found.state == "ready", found
    following.close()
    seconds, grown = count * EVERY_S, count * size / 1e6
    return dict(log=kind, grows_mb_per_s=rate, megabytes=round(grown), of_a_core=round(spent / seconds, 4), ms_per_mb=round(1e3 * spent / grown, 1),
                ms_per_look=round(1e3 * spent / count, 1))


def main():
    "Judge, follow, write."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    starts = judged()
    write_atomic(arguments.out / "starts.csv", starts.to_csv(index=False))
    marked = starts[starts.lines.notna()].groupby(starts.start.isin(list(WRITTEN)))[["right", "lines"]].sum()
    print(marked.rename({False: "recorded", True: "written"}).astype(int))
    states = starts[starts.kind.isin(["healthy", "stalled", "failed"])]
    print(states.groupby(["kind", "last"]).agg(starts=("start", "size"), hung=("hung_after_s", "count"), after_s=("hung_after_s", "max")))
    causes = starts[starts.meant.notna()]
    print((causes.meant == causes.named).groupby([causes.kind, causes.meant == "nothing"]).agg(["sum", "size"]))
    print("limits:", {name: limit.quiet_s for name, limit in LIMITS.items()})
    pause, rows = "import time; time.sleep(9999)", []
    family = f"import subprocess, sys; q = [subprocess.Popen([sys.executable, '-c', '{pause}']) for _ in range(15)]; {pause}"
    server = subprocess.Popen([sys.executable, "-c", family], start_new_session=True)
    try:
        time.sleep(3.0)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("quiet", "quoting"):
                for rate in (0.1, 1.0, 10.0):
                    rows.append(followed(Path(folder), kind, rate, arguments.megabytes, server.pid))
                    print(rows[-1], flush=True)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    write_atomic(arguments.out / "following.csv", pd.DataFrame(rows).to_csv(index=False))
    write_json(arguments.out / "provenance.json", provenance(megabytes=arguments.megabytes))


if __name__ == "__main__":
    main()
