"Starts of servers, recorded and written, replayed: the right stage, no false alarm, every stall found; and logs in every state of damage."
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_server import COMMANDS, QUICK, free_port
from hypothesis import given, settings
from hypothesis import strategies as some
from written_startups import all_starts, sglang, vllm

from k2eagle import engines, startlog, stages, targets, watch
from k2eagle.watch import LIMITS, Evidence, Sampler, Watcher, observe, status

FOLDER = Path(__file__).parent / "fixtures" / "startup"
RECORDED = sorted(path.stem for path in FOLDER.glob("*.log"))
# Read by hand: the stage from this line on; `?` is a line that leaves two stages open
BY_HAND = {
    "sglang_healthy": "1 start 4 processes 25 distributed 28 weights 48 kv cache 53 server 60 warm-up 130 ready",
    "sglang_slow": "1 start 4 processes 25 distributed 28 weights 48 kv cache 53 server 60 warm-up 130 ready",
    "sglang_eagle3": "1 start 4 processes 27 distributed 30 weights 50 draft weights 56 kv cache 64 server 71 warm-up 141 ready",
    "sglang_three_ranks": "1 start 4 processes 38 distributed 53 ? 54 weights 113 kv cache 124 server 137 warm-up 139 ready",
    "vllm_healthy": "1 start 6 processes 40 distributed 42 weights 51 ? 52 kv cache 55 server 104 ready",
    "vllm_slow": "1 start 6 processes 40 distributed 42 weights 51 ? 52 kv cache 55 server 104 ready",
    "vllm_eagle3": "1 start 6 processes 45 distributed 48 weights 57 draft weights 72 ? 73 kv cache 77 server 127 ready",
    "vllm_three_ranks": "1 start 6 processes 54 distributed 62 ? 64 weights 73 kv cache 78 server 127 ready",
}
WRITTEN = all_starts()


def recorded(name: str) -> tuple:
    "Bytes of a log, what is known of it, and its looks as (seconds, size of the log, Evidence)."
    found = json.loads((FOLDER / f"{name}.evidence.json").read_text())
    pid, looks = str(found["about"]["pid"]), []
    for row in found["samples"]:
        first = row["processes"].get(pid)
        looks.append((row["seconds"], row["log_bytes"], Evidence(
            row["seconds"], first is not None and first[1] not in "ZX", row["cpu_s"], row["read_bytes"], row["rchar"], row["rss_bytes"],
            processes={int(one): tuple(what) for one, what in row["processes"].items()})))
    return (FOLDER / f"{name}.log").read_bytes(), found["about"], looks


def replayed(name: str) -> list:
    "(seconds, Status) at every look at a recorded start."
    data, _, looks = recorded(name)
    watcher, at, said = Watcher(), 0, []
    watcher.following = True
    for seconds, size, evidence in looks:
        watcher.feed(data[at:size], seconds)
        at = max(at, size)
        observe(watcher, evidence)
        said.append((seconds, status(watcher)))
    return said


def by_hand(name: str) -> list:
    "The stage after each line, None where it is open."
    found, labels = BY_HAND[name].split(" "), []
    marks, place = [], 0
    while place < len(found):
        end = next((at for at in range(place + 1, len(found)) if found[at].isdigit()), len(found))
        marks.append((int(found[place]), " ".join(found[place + 1:end])))
        place = end
    lines = (FOLDER / f"{name}.log").read_bytes().count(b"\n")
    for number in range(1, lines + 1):
        stage = [stage for begins, stage in marks if begins <= number][-1]
        labels.append(None if stage == "?" else stage)
    return labels


def test_recorded_lines_have_the_right_stage():
    right = asked = 0
    for name in BY_HAND:
        watcher = Watcher()
        for label, line in zip(by_hand(name), (FOLDER / f"{name}.log").read_bytes().split(b"\n")[:-1], strict=True):
            watcher.feed(line + b"\n", 0)
            if label is not None:
                asked, right = asked + 1, right + (watcher.start.stage == label)
                assert label in stages.STAGES
    assert asked > 900 and right / asked >= 0.99, f"{right} of {asked}"


def test_written_lines_have_the_right_stage():
    shares = {}
    for name, start in WRITTEN.items():
        watcher, right = Watcher(), 0
        for stage, seconds, text in start.rows:
            watcher.feed(f"{text}\n".encode(), seconds)
            right += watcher.start.stage == stage
        shares[name] = (right, len(start.rows))
    right, lines = map(sum, zip(*shares.values()))
    assert len(shares) == 128 and right / lines >= 0.99, sorted(shares.items(), key=lambda one: one[1][0] / one[1][1])[:5]
    assert min(own / count for own, count in shares.values()) >= 0.97, shares


def test_every_marker_is_written_by_some_start():
    text = "\n".join(start.text for start in WRITTEN.values()) + "".join((FOLDER / f"{name}.log").read_text(errors="replace") for name in RECORDED)
    unseen = {marker.key for marker in stages.MARKERS if marker.edge not in stages.ENDS and marker.key not in text}
    assert unseen <= {"KV Cache VA upper bound", "Post-capture KV sizing", "DeepGEMM JIT", "DeepGEMM warmup", "Compiling num tokens", "JIT kernel warmup",
                      "Starting torch.compile", "Directly load the", "Warming up model for the compilation", "Loading safetensors using"}, unseen


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_starts_end_as_they_did(name):
    _, about, _ = recorded(name)
    said = replayed(name)
    done = about.get("done_s", float("inf"))
    if "ready_s" in about and about.get("ended_s") is None and "frozen" not in name:
        assert {one.state for _, one in said} <= {"starting", "ready", "unknown"} and said[-1][1].exit_code == 0
        assert abs(next(at for at, one in said if one.state == "ready") - about["ready_s"]) <= 2.1
    elif "ended_s" in about:
        assert said[-1][1].exit_code == 1 and said[-1][1].findings, said[-1][1]
        assert all(one.state != "hung" for _, one in said)
    elif "ready_s" not in about:
        hung = [at for at, one in said if one.state == "hung"]
        assert hung and hung[0] - done <= LIMITS[said[-1][1].stage].quiet_s, said[-1]
        assert hung[0] > done and said[-1][1].exit_code == 2 and "kill -CONT" in said[-1][1].findings[0].fix


def moving(stage: str, seconds: float, processes: dict) -> Evidence:
    "What a healthy process does in a stage."
    if stage in ("weights", "draft weights", "start"):
        return Evidence(seconds, read_bytes=int(seconds * 2e8), cpu_s=seconds * 0.1, processes=processes)
    if stage == "compile":
        return Evidence(seconds, cpu_s=seconds, processes=processes | {900 + int(seconds / 2) % 3: ("cicc", "R", 1.0)})
    return Evidence(seconds, cpu_s=seconds, rss_bytes=int(seconds * 4e6), processes=processes)


@pytest.mark.parametrize("stretch", [1, 30])
@pytest.mark.parametrize("name", sorted(WRITTEN)[::5])
def test_a_healthy_start_is_never_called_hung(name, stretch):
    start, watcher = WRITTEN[name], Watcher()
    watcher.following = True
    clock, stage = 0.0, "start"
    for after, seconds, text in start.rows:
        while clock < seconds * stretch:
            observe(watcher, moving(stage, clock, {10: ("python", "R", clock)}))
            if clock % (10 if stretch > 1 else 2) == 0:  # a look costs little, a status more
                assert status(watcher).state in ("starting", "unknown", "ready"), (clock, stage, status(watcher))
            clock += 2
        watcher.feed(f"{text}\n".encode(), clock)
        stage = after
    assert status(watcher).state == "ready"


def until(stage: str) -> list:
    "The lines of a start up to the first of a stage."
    start = sglang("0.5.12", drafter=True) if stage not in ("compile",) else vllm("0.28.0", drafter=True)
    rows = start.rows
    return rows[:1 + next(at for at, row in enumerate(rows) if row[0] == stage)]


@pytest.mark.parametrize("stage", [name for name in LIMITS if name != "ready"])
@pytest.mark.parametrize("kind", ["quiet", "spinning", "reading", "memory", "compiling"])
def test_a_stall_is_found_within_the_limit_of_its_stage(stage, kind):
    watcher = Watcher()
    watcher.following = True
    for _, seconds, text in until(stage):
        watcher.feed(f"{text}\n".encode(), 0.0)
    limit, found = LIMITS[stage], None
    often = 2 if kind in ("quiet", "spinning") else 50
    for at in range(0, 4000, 2):
        cpu = at if kind in ("spinning", "compiling") else 0
        name = "cicc" if kind == "compiling" else "python"
        observe(watcher, Evidence(at, cpu_s=cpu, read_bytes=at * (1 << 19) if kind == "reading" else 0, rss_bytes=(1 << 33) + (at * (1 << 20) if kind == "memory" else 0),
                                  processes={10: (name, "R" if cpu else "S", float(cpu))}))
        if at % often == 0 and status(watcher).state == "hung":
            found = at
            break
    expected = {"quiet": limit.quiet_s, "spinning": limit.busy_s}.get(kind)
    assert found is None if expected is None else expected < found <= expected + 4, (found, expected)


def test_five_silent_minutes_of_reading_are_healthy():
    watcher = Watcher()
    watcher.following = True
    for _, _, text in until("weights"):
        watcher.feed(f"{text}\n".encode(), 0.0)
    for at in range(0, 313, 1):  # 313 s: as long as the campaign's load
        observe(watcher, Evidence(at, rchar=at * 1_900_000_000, processes={10: ("python", "D", at * 0.02)}))
        now = status(watcher)
        assert now.state == "starting" and now.stage == "weights"
    assert "reading" in now.basis


def test_a_pause_of_the_watcher_itself_is_no_stall():
    watcher = Watcher()
    watcher.feed(until("weights")[-1][2].encode() + b"\n", 0)
    for at in (0, 2, 4, 9000, 9002):
        observe(watcher, Evidence(at, processes={10: ("python", "S", 0.0)}))
    assert status(watcher).state == "starting"


def test_a_log_alone_says_how_long_it_is_silent_and_never_hung():
    watcher = Watcher()
    for _, _, text in until("weights"):
        watcher.feed(f"{text}\n".encode(), 0.0)
    assert status(watcher, 100).state == "starting" and "within" in status(watcher).basis
    later = status(watcher, 100_000)
    assert later.state == "starting" and "beyond" in later.basis and "give pid" in later.basis and later.exit_code == 3


def test_ranks_tell_which_of_them_is_stuck():
    rows = sglang("0.5.12", ranks=4).rows
    stuck = [text for stage, _, text in rows if stage in ("processes", "distributed", "weights")]
    ends = [text for _, _, text in rows if "Load weight end" in text]
    for lacking, expected in (("TP2", "hung"), (None, "starting")):
        watcher = Watcher()
        for text in (*stuck, *(one for one in ends if lacking is None or lacking not in one)):
            watcher.feed(f"{text}\n".encode(), 0.0)
        found = status(watcher, LIMITS["weights"].quiet_s + 1)
        assert found.state == expected
        if lacking:
            assert "TP2" in found.findings[0].message and set(found.ranks["rank"]) == {"TP0", "TP1", "TP2", "TP3"}
            assert found.ranks.set_index("rank").stage["TP2"] == "weights"


WRAPPINGS = {
    "ansi": lambda number, text: f"\x1b[36m{text}\x1b[0m", "pod": lambda number, text: f"[pod/serve-{number % 2}/main] {text}",
    "cri": lambda number, text: f"2026-11-29T07:{number // 60 % 60:02d}:{number % 60:02d}.123456789Z stderr F {text}",
    "compose": lambda number, text: f"serve-1  | {text}", "journald": lambda number, text: f"Nov 29 07:00:00 host7 python3[4711]: {text}",
    "json": lambda number, text: json.dumps({"log": text + "\n", "stream": "stderr", "time": "2026-11-29T07:00:00.1Z"}),
    "srun": lambda number, text: f"{number % 8}: {text}", "windows": lambda number, text: text + "\r", "stern": lambda number, text: f"serve-0 main │ {text}",
    "torchrun": lambda number, text: f"[default0]:{text}", "host": lambda number, text: f"node-7: {text}", "grep": lambda number, text: f"{number + 1}:{text}",
    "ts": lambda number, text: f"Nov 29 07:00:00 {text}", "tab": lambda number, text: f"2026-11-29 07:00:00.123\t{text}",
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapping_changes_no_stage(wrapping):
    for name in list(WRITTEN)[::7]:
        rows = WRITTEN[name].rows
        wrapped = [WRAPPINGS[wrapping](number, text) for number, (_, _, text) in enumerate(rows)]
        plain = [event.stage for event in stages.events(startlog.lines([text for _, _, text in rows]))]
        own = [event.stage for event in stages.events(startlog.lines(wrapped))]
        assert own == plain, name
        there, bare = watch.watch(wrapped), watch.watch([text for _, _, text in rows])
        assert (there.state, list(there.done.stage)) == (bare.state, list(bare.done.stage)) == ("ready", list(bare.done.stage)), name


@pytest.mark.parametrize("name", RECORDED)
def test_any_cut_of_the_bytes_gives_the_same(name):
    data, _, _ = recorded(name)
    chance, said = random.Random(name), set()
    for most in (1, 50, 5000, len(data)):
        watcher, at = Watcher(), 0
        while at < len(data):
            size = chance.randint(1, most)
            watcher.feed(data[at:at + size], 0)
            at += size
        for line in watcher.reader.close():
            watcher.take(line)
        found = status(watcher)
        said.add((found.state, found.stage, tuple(found.done.stage), tuple(found.done.seconds), watcher.reader.number))
    assert len(said) == 1, said


@given(data=some.binary(max_size=3000))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read(data):
    whole = list(startlog.Reader().feed(data + b"\n"))
    reader = startlog.Reader()
    parts = [line for at in range(0, len(data) + 1, 7) for line in reader.feed((data + b"\n")[at:at + 7])]
    assert [line.text for line in whole] == [line.text for line in parts]
    watcher = Watcher()
    watcher.feed(data, 0)
    assert status(watcher).state in ("unknown", "starting", "ready", "failed")


TEXT = b"".join((FOLDER / f"{name}.log").read_bytes() for name in RECORDED[:6]) + WRITTEN["vllm-0.9.2-eagle3-tp4"].text.encode()


@given(seed=some.integers(0, 2**32), damage=some.sampled_from(["flip", "cut", "join", "swap", "insert", "drop"]))
@settings(max_examples=150, deadline=None)
def test_damaged_logs_are_read(seed, damage):
    chance = random.Random(seed)
    begin = chance.randrange(len(TEXT) - 20_000)
    data = bytearray(TEXT[begin:begin + 20_000])
    for _ in range(30):
        at, size = chance.randrange(len(data)), chance.randint(1, 200)
        if damage == "flip":
            data[at] = chance.randrange(256)
        elif damage == "cut":
            del data[at:at + size]
        elif damage == "join":
            data = bytearray(bytes(data).replace(b"\n", b"", 2))
        elif damage == "swap":
            data[at:at + size], data[:size] = data[:size], data[at:at + size]
        elif damage == "insert":
            data[at:at] = bytes(chance.randrange(256) for _ in range(size))
        else:
            data = bytearray(b"\n".join(line for line in bytes(data).split(b"\n") if chance.random() > 0.02))
    watcher = Watcher()
    watcher.feed(bytes(data), 0)
    found = status(watcher, 5)
    assert found.stage in stages.STAGES and found.elapsed_s >= 0 and (found.done.seconds >= 0).all()
    assert found.progress is None or found.progress >= 0


@pytest.mark.parametrize("line", [b"0001-01-01T00:00:00Z Load", b'{"log": "half \\ud83d"}', b'{"log":' * 9999 + b"}"])
def test_what_cannot_be_a_time_or_a_text_is_passed_over(line):
    stamped = b"2026-11-29T19:59:41Z [2026-11-29 11:59:41] server_args=ServerArgs(model_path='small')"
    found = watch.watch([stamped, line, b"[2026-11-29 11:59:45] Load weight begin. avail mem=78.00 GB", b"RuntimeError: " + line])
    assert (found.stage, found.elapsed_s) == ("weights", 4) and str(found).encode() and found._repr_html_().encode()


def test_time_that_runs_backwards_adds_nothing():
    rows = sglang("0.5.12").rows
    place = len(rows) // 2
    late = [text for _, _, text in rows[:place]] + [text.replace("[2026-11-28 23:", "[2026-11-28 20:").replace("[2026-11-29 00:", "[2026-11-28 21:")
                                                    for _, _, text in rows[place:]]
    found = watch.watch("\n".join(late) + "\n")
    honest = watch.watch("\n".join(text for _, _, text in rows) + "\n")
    assert found.state == "ready" and (found.done.seconds >= 0).all() and honest.elapsed_s - 30 < found.elapsed_s <= honest.elapsed_s + 1


def test_nodes_in_one_log_are_one_start():
    rows = sglang("0.5.12", drafter=True, ranks=8).rows
    both = []
    for _, _, text in rows:
        node = 1 if any(f" TP{rank}]" in text for rank in range(4, 8)) else 0
        both.append(f"[pod/serve-{node}/main] {text}")
        if "server_args=" in text:
            both.append(f"[pod/serve-1/main] {text}")
    said = list(stages.events(startlog.lines(both)))
    assert all(event.edge != "restart" for event in said) and said[-1].stage == "ready"
    assert {line.node for line in startlog.lines(both)} == {"serve-0/main", "serve-1/main"}


def test_a_second_start_is_estimated_by_the_first():
    first, second = vllm("0.28.0"), vllm("0.28.0")
    half = [text for _, _, text in second.rows[:2 * len(second.rows) // 5]]
    found = watch.watch(first.text + "\n".join(half) + "\n")
    assert found.state == "starting" and "earlier start" in found.basis and found.eta_s > 0
    alone = watch.watch("\n".join(half) + "\n")
    assert "earlier start" not in alone.basis and list(found.done.stage) == list(alone.done.stage)


@pytest.mark.parametrize("how", ["rotate", "truncate", "late"])
def test_a_log_that_is_rotated_or_cut_is_followed(tmp_path, how):
    path, rows = tmp_path / "server.log", [f"{text}\n" for _, _, text in sglang("0.5.12").rows]

    def play():
        time.sleep(0.2 if how == "late" else 0)
        for number, text in enumerate(rows):
            if number == len(rows) // 2 and how == "rotate":
                path.rename(tmp_path / "server.log.1")
            if number == len(rows) // 2 and how == "truncate":
                time.sleep(0.1)
                os.truncate(path, 0)
            with open(path, "a") as file:
                file.write(text)
            time.sleep(0.004)

    thread = threading.Thread(target=play)
    thread.start()
    said = list(watch.watch(path, follow=True, every_s=0.02, timeout_s=30))
    thread.join()
    assert said[-1].state == "ready"


def test_packed_wide_and_foreign_logs_are_read(tmp_path):
    text = sglang("0.5.12").text
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "wide.log").write_text(text, encoding="utf-16")
    (tmp_path / "latin.log").write_bytes(text.replace("Fail to set", "Échec: café").encode("latin-1", "replace"))
    (tmp_path / "binary.log").write_bytes(os.urandom(1 << 20) + b"\n" + text.encode())
    for path in tmp_path.iterdir():
        assert watch.watch(path).state == "ready", path.name
    with pytest.raises(FileNotFoundError, match="expected the server's log"):
        watch.watch(tmp_path / "none.log")
    with pytest.raises(ValueError, match="give the file in it"):
        watch.watch(tmp_path)


@pytest.mark.parametrize("text", [
    '10.0.0.1 - - [30/Nov/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 12 "-" "curl"\n' * 50,
    "INFO:     Started server process [1]\nINFO:     Application startup complete.\nINFO:     Uvicorn running on http://127.0.0.1:8000\n",
    "llama_model_loader: loaded meta data\nmain: server is listening on http://127.0.0.1:8080\n",
    "Nov 29 07:00:00 host7 kernel: Out of memory: Killed process 4711 (python3) total-vm:1kB\n"])
def test_the_log_of_another_program_is_no_start(text):
    found = watch.watch(text)
    assert (found.state, found.engine, found.exit_code) == ("unknown", None, 3) and "no line of an engine" in found.basis and not found.findings


def test_an_ending_word_cut_by_the_blocks_is_found():
    text = sglang("0.5.12").text.encode()
    end = b"[2026-11-29 00:01:09 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    for cut in range(1, len(end)):
        watcher = Watcher()
        watcher.feed(text, 0)
        watcher.feed(end[:cut], 1)
        watcher.feed(end[cut:], 2)
        assert status(watcher).state == "failed", cut


def test_a_process_that_vanishes_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    said = watch.watch(pid=child.pid, follow=True, every_s=0.05, timeout_s=20)
    assert next(said).state == "starting"
    child.kill()
    child.wait()
    last = list(said)[-1]
    assert last.state == "failed" and last.findings[0].code == "process-gone" and last.exit_code == 1
    assert watch.watch(pid=child.pid).exit_code == 1


@pytest.mark.parametrize("broken", ["#!/nowhere/sh\n", "#!/bin/sh\nexec sleep 60\n"])
def test_a_gpu_tool_that_fails_or_hangs_ends_no_watch(broken, tmp_path, monkeypatch):
    tool, run = tmp_path / "nvidia-smi", subprocess.run
    tool.write_text(broken)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(watch.subprocess, "run", lambda *words, **more: run(*words, **{**more, "timeout": 0.2}))
    sampler = Sampler(os.getpid())
    assert sampler.smi == str(tool) and sampler().gpu_bytes is None and sampler().alive and sampler.smi is None


def test_children_count_as_the_server():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        time.sleep(1.0)
        look = Sampler(child.pid)
        first = look()
        time.sleep(0.5)
        second = look()
        assert len(second.processes) == 2 and "processor" in watch.movement(first, second)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


QUOTED = b"[2026-11-29 00:02:00] Receive: obj=GenerateReqInput(text='Who died, and why was the worker Killed?')\n"


@pytest.mark.parametrize("quoted", [b"", QUOTED], ids=["quiet", "quoting"])
def test_following_costs_little(quoted, tmp_path):
    path, line = tmp_path / "server.log", b"[2026-11-29 00:02:00 TP0] Decode batch. #running-req: 1, #token: 110, accept len: 2.85, gen throughput (token/s): 81.12\n"
    path.write_bytes(sglang("0.5.12").text.encode() + line * (20_000_000 // len(line)))
    following = watch.watch(path, pid=os.getpid(), follow=True, every_s=0.0, until=())
    next(following)
    spent, rounds = 0.0, 100
    with open(path, "ab") as file:
        for _ in range(rounds):  # each stands for two seconds in which 4000 lines are logged
            file.write((line * 100 + quoted) * 40)
            file.flush()
            begun = time.process_time()
            assert next(following).state == "ready"
            spent += time.process_time() - begun
    assert spent / (rounds * 2.0) <= 0.02, f"{spent:.2f} s of processor time for {rounds * 2} s"
    following.close()


def test_what_is_quoted_ends_no_server_and_what_follows_it_does():
    text = sglang("0.5.12").text.encode()
    crash = b"[2026-11-29 00:02:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n  File \"a.py\", line 1\nRuntimeError: x\n"
    restart = sglang("0.5.23").text.encode()
    for end, state in ((b"", "ready"), (crash, "failed"), (restart[:3000], "starting")):
        for most in (1, 7, 90, 10_000):  # bytes at a time
            watcher, data = Watcher(), text + QUOTED * 3 + end
            for at in range(0, len(data), most):
                watcher.feed(data[at:at + most], 1)
            found = status(watcher)
            assert (found.state, watcher.reader.number) == (state, data.count(b"\n")), (found, most)


@pytest.mark.parametrize(("growth", "hangs_after_s"), [(0, 120), (4 << 20, 600)], ids=["idle", "takes memory"])
def test_a_server_that_says_ready_and_never_answers_hangs(growth, hangs_after_s):
    watcher, hung = Watcher(), None
    watch.note_answer(watcher, ("no answer from http://127.0.0.1:8000/v1/models (refused)", None), 0)  # asked before it was ready
    watcher.feed((FOLDER / "vllm_healthy.log").read_bytes(), 0)
    assert status(watcher).state == "starting"
    for second in range(0, 700, 2):
        observe(watcher, Evidence(second, cpu_s=second, rss_bytes=(1 << 30) + growth * second, processes={1: ("python", "R", second)}))
        watch.note_answer(watcher, ("no answer from http://127.0.0.1:8000/v1/completions (timed out)", None), second)
        said = status(watcher)
        hung = second if hung is None and said.state == "hung" else hung
    assert hangs_after_s < hung < hangs_after_s + 5 and said.findings[0].code == "no-answer" and "py-spy" in said.findings[0].fix
    watch.note_answer(watcher, (None, 0.3), 701)  # late is better than never
    assert status(watcher).state == "ready"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_real_server_is_watched_until_a_request_is_answered(engine, tmp_path):
    port, log = free_port(), tmp_path / "server.log"
    command = [word.format(target=targets.default_target()) for word in COMMANDS[engine]]
    with open(log, "wb") as words:
        process = subprocess.Popen([engines.python(engine), *command, "--host", "127.0.0.1", "--port", str(port)], stdout=words, stderr=subprocess.STDOUT,
                                   env={**os.environ, **engines.surroundings(engine), **QUICK}, start_new_session=True)
    try:
        said = list(watch.watch(log, process.pid, f"http://127.0.0.1:{port}", follow=True, every_s=0.5, timeout_s=300))
        assert said[-1].state == "ready" and "a request was answered" in said[-1].basis and said[-1].engine == engine
        assert {"processes", "distributed", "weights", "kv cache", "server"} <= set(said[-1].done.stage) and all(one.state != "hung" for one in said)
        wrong = watch.watch(log, process.pid, f"http://127.0.0.1:{free_port()}")
        assert wrong.exit_code == 3 and wrong.findings[0].code == "no-answer" and str(port) in wrong.findings[0].evidence
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert watch.watch(log, process.pid).exit_code == 1


def test_what_cannot_be_watched_is_refused(tmp_path, capsys):
    text = sglang("0.5.12").text
    for wrong, words in ((dict(log=text, limits={"weight": LIMITS["weights"]}), "limits for weight"), (dict(log=text, limits={"weights": 5}), "a `Limit` each"),
                         (dict(pid="12"), "number of a process"), (dict(pid=0), "number of a process"), (dict(log=["a"], follow=True), "path of a file"),
                         (dict(log=tmp_path, follow=True), "path of a file"), (dict(), "nothing to watch")):
        with pytest.raises(ValueError, match=words):
            watch.watch(**wrong)
    for wrong in ([], ["--pid", "x"], [str(tmp_path), "--once"], [str(tmp_path / "none"), "--once"], ["--nonsense"]):
        assert watch.main(wrong) == 64, "neither failed (1) nor hung (2): nothing was watched"
    assert watch.main(["--help"]) == 0 and "is not there" in capsys.readouterr().err


def test_limits_and_states_are_whole():
    assert set(LIMITS) == set(stages.STAGES) and all(limit.quiet_s <= limit.busy_s and limit.why for limit in LIMITS.values())
    empty = status(Watcher())
    assert empty.state == "unknown" and empty.exit_code == 3 and len(empty.done) == 0
    for state, code in (("ready", 0), ("failed", 1), ("hung", 2), ("starting", 3), ("unknown", 3)):
        assert replace(empty, state=state).exit_code == code and state in str(replace(empty, state=state))
        assert "<div" in replace(empty, state=state)._repr_html_()
