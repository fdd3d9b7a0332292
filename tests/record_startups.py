"""Record starts of real servers, good and bad: what the server wrote, and what its processes did meanwhile.

Run in the clone: python tests/record_startups.py [--case ENGINE_CASE …] [--list]; without a case all are recorded, one after the other (about 40 minutes)
Writes tests/fixtures/startup/ENGINE_CASE.log and .evidence.json. Names of this machine become $TARGET, $DRAFTER, $VENV and the like; process ids stay.
"""
import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine_server import COMMANDS, QUICK, free_port
from safetensors.torch import load_file, save_file

from k2eagle import engines, layers, targets, text
from k2eagle.checkpoint import save
from k2eagle.drafter import Drafter, config_for, new_drafter

FOLDER = Path(__file__).parent / "fixtures" / "startup"
READY = {"vllm": r"Application startup complete", "sglang": r"The server is fired up and ready to roll"}
LIMIT_S = 300                            # no start here takes longer
DRAFT_VOCAB = 1024


@dataclass(frozen=True)
class Case:
    "A start, and what is done to it."
    engine: str
    name: str
    did: str                       # in words, for the table
    arguments: list = field(default_factory=list)
    settings: dict = field(default_factory=dict)  # environment variables
    drafter: str | None = None     # how the drafter is made, a key of DRAFTERS
    after: str | None = None       # what the log must say before something is done; None: that the server is ready
    do: str | None = None          # a key of DEEDS
    then_s: float = 4.0            # recorded afterwards, unless the server ends first
    wait_s: float = 0.0            # between what the log must say and what is done
    step_s: float = 1.0            # between two looks at the processes
    target: str | None = None      # another model
    before: str | None = None      # a case whose log this one continues, as `>>` does
    port_taken: bool = False


EAGLE3 = {"vllm": [], "sglang": ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx", "--speculative-algorithm", "EAGLE3",
                                 "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]}
LOADING = {"vllm": r"Starting to load model", "sglang": r"Load weight begin"}


def cases() -> list:
    "All cases, of both engines alike where they can be."
    made = []
    for engine in ("vllm", "sglang"):
        def add(name, did, **more):
            made.append(Case(engine, name, did, **more))

        add("healthy", "started and asked for one token")
        add("missing_model", "the model's folder does not exist", target="/models/nothing-here")
        add("eagle3", "started with an EAGLE-3 drafter and asked for one token", drafter="good")
        add("eagle3_wrong_hidden", "a drafter made for another target: hidden size 512, not 576", drafter="wrong_hidden")
        add("eagle3_no_weights", "the drafter's folder has a config.json and no weights", drafter="no_weights")
        add("eagle3_no_fc", "the drafter's fc.weight is not in its file", drafter="no_fc")
        add("eagle3_unknown_architecture", "the drafter's config.json names an architecture that no engine has", drafter="unknown_architecture")
        add("port_taken", "another program listens on the server's port", port_taken=True, then_s=30)
        add("engine_killed_loading", "kill -9 of the engine's process while it loads", after=LOADING[engine], do="kill engine", then_s=25)
        add("engine_killed_ready", "kill -9 of the engine's process after the server was ready", do="kill engine", then_s=25, wait_s=3)
        add("server_killed_loading", "kill -9 of the server's first process while the engine loads", after=LOADING[engine], do="kill server", then_s=20)
        add("stopped_loading", "SIGTERM to the server's first process while the engine loads", after=LOADING[engine], do="stop server", then_s=25)
        add("interrupted_loading", "SIGINT (Ctrl-C) to the server's first process while the engine loads", after=LOADING[engine], do="interrupt server", then_s=25)
        add("frozen_loading", "kill -STOP of the engine's process while it loads", after=LOADING[engine], do="freeze engine", then_s=60, step_s=2)
        add("frozen_importing", "kill -STOP of the engine's process 3 s after it began to import", after=BORN[engine], do="freeze engine", then_s=60,
            wait_s=3, step_s=2)
        add("slow", "all its processes run 1 s in 8, as on a machine that has other work", do="slow down", step_s=2)
    made += [
        Case("vllm", "no_memory", "a cache of 1 GiB for one request of 65536 tokens of a model that takes 1.4 GiB", ["--max-model-len", "65536"],
             {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
        Case("vllm", "too_long", "--max-model-len 65536 for a model of 8192 positions", ["--max-model-len", "65536"]),
        Case("sglang", "no_memory", "--mem-fraction-static 0.001", ["--mem-fraction-static", "0.001"]),
        Case("vllm", "restarted", "killed while it loaded, then started again into the same file", before="server_killed_loading"),
        Case("sglang", "restarted", "killed while it loaded, then started again into the same file", before="server_killed_loading"),
        Case("vllm", "three_ranks", "tensor parallel over three ranks", ["--tensor-parallel-size", "3"], THREE),
        Case("sglang", "three_ranks", "tensor parallel over three ranks", ["--tp-size", "3"], BOUND),
        Case("sglang", "detokenizer_frozen", "kill -STOP of the detokenizer while it imports; one token asked for, 20 s", after=BORN["sglang"],
             do="freeze detokenizer", then_s=40, wait_s=3),
        Case("sglang", "ranks_unbound", "three ranks on one NUMA node, and no word of which cores they take", ["--tp-size", "3"]),
        Case("vllm", "rank_killed_loading", "kill -9 of rank 1 of three while it loads", ["--tensor-parallel-size", "3"], THREE,
             after=LOADING["vllm"], do="kill rank", then_s=40),
        Case("sglang", "rank_killed_loading", "kill -9 of rank 1 of three while it loads", ["--tp-size", "3"], BOUND,
             after=LOADING["sglang"], do="kill rank", then_s=40),
        Case("vllm", "rank_frozen_loading", "kill -STOP of rank 1 of three while it loads", ["--tensor-parallel-size", "3"], THREE,
             after=LOADING["vllm"], do="freeze rank", then_s=60, step_s=2),
        Case("sglang", "rank_frozen_loading", "kill -STOP of rank 1 of three while it loads", ["--tp-size", "3"], BOUND,
             after=LOADING["sglang"], do="freeze rank", then_s=60, step_s=2),
    ]
    return made


BORN = {"vllm": r"non-default args|Using max model len|max_model_len", "sglang": r"server_args="}
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0"}
THREE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


# drafters

def good(folder: Path):
    "An untrained drafter for the default target."
    facts = targets.facts(targets.default_target())
    counts = torch.ones(facts.vocab_size, dtype=torch.int64).numpy()
    made = new_drafter(config_for(facts, DRAFT_VOCAB), targets.head(facts.path), text.draft_vocab(counts, DRAFT_VOCAB))
    save(made.bfloat16(), folder)


def no_weights(folder: Path):
    "Only what describes the weights."
    good(folder)
    (folder / "model.safetensors").unlink()


def no_fc(folder: Path):
    "All weights but the first that is used."
    good(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def wrong_hidden(folder: Path):
    "A drafter for another, narrower target."
    facts = targets.facts(targets.default_target())
    torch.manual_seed(0)
    narrow = Drafter(config_for(facts, DRAFT_VOCAB, hidden_size=512, num_attention_heads=8, num_key_value_heads=4))
    narrow.t2d[:DRAFT_VOCAB] = True
    save(narrow.bfloat16(), folder)


def unknown_architecture(folder: Path):
    "A class that no registry has."
    good(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLMEagle9"]}, indent=2))


DRAFTERS = {make.__name__: make for make in (good, no_weights, no_fc, wrong_hidden, unknown_architecture)}


# processes

def stat(pid: int) -> tuple | None:
    "State, session and processor seconds of a process, and its name; None when it is gone."
    with contextlib.suppress(OSError):
        name, rest = re.match(r"\d+ \((.*)\) (.*)", Path(f"/proc/{pid}/stat").read_text(), re.S).groups()
        fields = rest.split()
        return fields[0], int(fields[3]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), name
    return None


def members(session: int) -> dict:
    "Processes of a session that are not gone, by id."
    seen = {int(entry): stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    return {pid: found for pid, found in sorted(seen.items()) if found and found[1] == session and found[0] != "Z"}


def number(path: str, name: str) -> int:
    "A number from a file of /proc; 0 when the process is gone."
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+)", Path(path).read_text(), re.M)
        return int(found[1]) if found else 0
    return 0


def look(session: int) -> dict:
    "What all processes of a session have done, summed; of those that are still there."
    there = members(session)
    return {"cpu_s": round(sum(found[2] for found in there.values()), 2),
            "read_bytes": sum(number(f"/proc/{pid}/io", "read_bytes") for pid in there),
            "rchar": sum(number(f"/proc/{pid}/io", "rchar") for pid in there),
            "rss_bytes": 1024 * sum(number(f"/proc/{pid}/status", "VmRSS") for pid in there),
            "children": len([pid for pid in there if pid != session]),
            "processes": {str(pid): [found[3], found[0], round(found[2], 2)] for pid, found in there.items()}}


ENGINE = re.compile(r"EngineCor|sglang::schedul")
RANK = re.compile(r"Worker|sglang::schedul")
DETOKENIZER = re.compile(r"sglang::detoken")


def titled(session: int, pattern, which: int = 0) -> int:
    "The process whose title a pattern finds; before titles are set, children are in the order of their birth."
    def title(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") + " " + Path(f"/proc/{pid}/comm").read_text()
        return ""

    titles = {pid: title(pid) for pid in members(session) if pid != session}
    found = [pid for pid, words in titles.items() if pattern.search(words)] or [pid for pid, words in titles.items() if "spawn_main" in words]
    return found[max(which, -1)] if which < len(found) else found[-1]


def breathe(session: int, over: threading.Event):
    "Let a session run 1 s in 8."
    while not over.is_set():
        for sent, seconds in ((signal.SIGSTOP, 1.75), (signal.SIGCONT, 0.25)):
            for pid in members(session):
                with contextlib.suppress(OSError):
                    os.kill(pid, sent)
            over.wait(seconds)


DEEDS = {
    "kill engine": lambda session: os.kill(titled(session, ENGINE), signal.SIGKILL),
    "kill rank": lambda session: os.kill(titled(session, RANK, 1), signal.SIGKILL),
    "kill server": lambda session: os.kill(session, signal.SIGKILL),
    "stop server": lambda session: os.kill(session, signal.SIGTERM),
    "freeze engine": lambda session: os.kill(titled(session, ENGINE), signal.SIGSTOP),
    "freeze detokenizer": lambda session: os.kill(titled(session, DETOKENIZER, -1), signal.SIGSTOP),
    "interrupt server": lambda session: os.kill(session, signal.SIGINT),
    "freeze rank": lambda session: os.kill(titled(session, RANK, 1), signal.SIGSTOP),
    "slow down": None,
}


# words

def portable(said: str, drafter: Path | None) -> str:
    "The same without names of this machine."
    venvs = [(str(Path(engines.python(engine)).parent.parent), "$VENV") for engine in ("vllm", "sglang")]
    own = [(str(targets.default_target()), "$TARGET"), (str(drafter), "$DRAFTER") if drafter else ("$DRAFTER", "$DRAFTER"), *venvs,
           (str(engines.package_folder()), "$K2EAGLE"), (sysconfig.get_paths()["stdlib"], "$PYTHON"), (str(Path.home()), "$HOME"),
           (socket.gethostname() + ":", "host:")]
    for name, other in own:
        said = said.replace(name, other)
    address = re.compile(r"(?<=://)(?!127\.0\.0\.1|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+(?=:)")
    return re.sub(r"/tmp/[\w.-]+(?:/[\w.-]+)*", "$TMP", address.sub("192.0.2.1", said))


KEPT = re.compile(r"'(?:model_path|host|port|tp_size|dp_size|device|mem_fraction_static|max_total_tokens|max_running_requests|\w*attention_backend|"
                  r"disable_cuda_graph|speculative_(?:algorithm|draft_model_path|num_\w+|eagle_topk))': (?:'[^']*'|[^,}]+)")


def shortened(line: str) -> str:
    "SGLang's line of all arguments with those that matter here; any other line unchanged."
    head, found, rest = line.partition("server_args=")
    return f"{head}server_args={{{', '.join(KEPT.findall(rest))}}}\n" if found else line


def cleaned(said: bytes, drafter: Path | None) -> bytes:
    "A log as it is kept."
    lines = portable(said.decode("utf-8", "replace"), drafter).splitlines(keepends=True)
    return "".join(map(shortened, lines)).encode()


# recording

def ask(port: int, target: str):
    "One token, from the server's own interface."
    body = json.dumps({"model": target, "prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]


def start(case: Case, folder: Path, port: int, words) -> subprocess.Popen:
    "Start the server of a case."
    target = case.target or str(targets.default_target())
    command = [word.format(target=target) for word in COMMANDS[case.engine]]
    drafting = []
    if case.drafter:
        DRAFTERS[case.drafter](folder / "drafter")
        drafting = [*EAGLE3["sglang"], "--speculative-draft-model-path", str(folder / "drafter")] if case.engine == "sglang" else [
            "--speculative-config", json.dumps({"method": "eagle3", "model": str(folder / "drafter"), "num_speculative_tokens": 3})]
    return subprocess.Popen([engines.python(case.engine), *command, "--host", "127.0.0.1", "--port", str(port), *case.arguments, *drafting],
                            stdout=words, stderr=subprocess.STDOUT, env={**os.environ, **engines.surroundings(case.engine), **QUICK, **case.settings},
                            start_new_session=True)


def observe(case: Case, process: subprocess.Popen, log: Path, port: int, samples: list) -> dict:
    "Look at a server until its case is over, and do to it what the case says; what happened when."
    begun, happened, done_at, over = time.monotonic(), {}, None, threading.Event()
    ready, after = READY[case.engine], case.after or READY[case.engine]
    if case.do == "slow down":
        threading.Thread(target=breathe, args=(process.pid, over), daemon=True).start()
    while True:
        seconds, size = time.monotonic() - begun, log.stat().st_size
        samples.append({"seconds": round(seconds, 2), **look(process.pid), "log_bytes": size})
        said = log.read_bytes().decode("utf-8", "replace")
        code = process.poll()
        if code is not None and not (done_at and case.do == "kill server" and seconds - done_at < case.then_s):
            happened |= {"ended_s": round(seconds, 1), "exit_code": code}
            break
        if done_at is None and re.search(after, said):
            happened["after_s"] = round(seconds, 2)
            time.sleep(case.wait_s)
            if DEEDS.get(case.do):
                DEEDS[case.do](process.pid)
            done_at = time.monotonic() - begun
            if case.do:
                happened["done_s"] = round(done_at, 2)
        if "ready_s" not in happened and re.search(ready, said):
            happened["ready_s"] = round(seconds, 2)
            happened["answer"] = None
            with contextlib.suppress(OSError):
                if case.do in (None, "slow down", "freeze detokenizer") and not case.port_taken:
                    happened["answer"] = ask(port, str(targets.default_target()))["text"]
            done_at = done_at if done_at and case.do else time.monotonic() - begun
        if (done_at and time.monotonic() - begun - done_at >= case.then_s) or seconds > LIMIT_S:
            break
        time.sleep(max(0, begun + case.step_s * (seconds // case.step_s + 1) - time.monotonic()))
    over.set()
    return happened


def end(session: int):
    "Leave no process of a session."
    for _ in range(20):
        for pid in members(session):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        if not members(session):
            return


def record(case: Case, folder: Path):
    "Start a server, look at it, keep what it wrote and what was seen."
    name, log, port, samples = f"{case.engine}_{case.name}", folder / "server.log", free_port(), []
    with contextlib.ExitStack() as stack:
        if case.port_taken:
            other = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert other.getsockname()[1] == port
        words = stack.enter_context(open(log, "wb"))
        process = start(case, folder, port, words)
        try:
            happened = observe(case, process, log, port, samples)
            written = log.read_bytes()[:samples[-1]["log_bytes"]] if "exit_code" not in happened else log.read_bytes()
        finally:
            end(process.pid)
            process.wait()
    drafter = folder / "drafter" if case.drafter else None
    earlier = (FOLDER / f"{case.engine}_{case.before}.log").read_bytes() if case.before else b""
    for sample in samples:  # as many bytes as this part of the log has where it is kept
        sample["log_bytes"] = len(earlier) + len(cleaned(written[:sample["log_bytes"]], drafter))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.log").write_bytes(earlier + cleaned(written, drafter))
    about = {"engine": case.engine, "version": str(layers.NEWEST[case.engine]), "case": case.name, "did": case.did, "pid": process.pid, **happened}
    rows = ",\n".join("  " + json.dumps(sample) for sample in samples)
    (FOLDER / f"{name}.evidence.json").write_text(f'{{"about": {json.dumps(about)},\n "samples": [\n{rows}\n]}}\n')
    print(f"{name:36} {len(samples):4} looks, {samples[-1]['seconds']:6.1f} s, {len(written):6} bytes, {happened}", flush=True)


def main():
    "Record the cases asked for."
    known = {f"{case.engine}_{case.name}": case for case in cases()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="*", default=list(known), help="names such as vllm_healthy")
    parser.add_argument("--list", action="store_true", help="print the cases and what is done in each")
    given = parser.parse_args()
    if unknown := [name for name in given.case if name not in known]:
        sys.exit(f"no case {', '.join(unknown)}; expected of {', '.join(known)}")
    if given.list:
        return print("\n".join(f"{name:36} {case.did}" for name, case in known.items()))
    for name in given.case:
        folder = Path(tempfile.mkdtemp())
        try:
            record(known[name], folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
