"""The diagnosis of failed starts: every known failure alone, whole logs, logs recorded from the real engines, damaged logs.

Run: pytest tests/test_failures.py (some seconds)
"""
import gzip
import json
import time
from pathlib import Path

import pytest
from failure_excerpts import EXCERPTS, MIXTURES, READY, begun, ended, raised, vllm_begun

from k2eagle import runs, watch
from k2eagle.failures import FAILURES, KINDS, diagnose, failure_table

FIXTURES = Path(__file__).parent / "fixtures"
RECORDED = {  # log of a real start that failed -> its cause; how it was made to fail stands in the .evidence.json beside it
    "sglang_missing_model": "model-not-found", "vllm_missing_model": "model-not-found",
    "sglang_no_memory": "pool-does-not-fit", "vllm_no_memory": "context-larger-than-cache", "vllm_too_long": "context-beyond-model",
    "sglang_eagle3_wrong_hidden": "aux-width", "vllm_eagle3_wrong_hidden": "aux-width",
    "sglang_eagle3_no_weights": "no-weight-files", "vllm_eagle3_no_weights": "no-weight-files",
    "sglang_eagle3_unknown_architecture": "drafter-architecture-unknown", "vllm_eagle3_unknown_architecture": "drafter-architecture-unknown",
    "sglang_interrupted_loading": "stopped-from-outside", "vllm_interrupted_loading": "stopped-from-outside",
    "sglang_engine_killed_loading": "rank-killed", "sglang_engine_killed_ready": "rank-killed",
    "sglang_rank_killed_loading": "other-rank-not-loaded",
    "sglang_ranks_unbound": "cpu-ranks-unbound", "sglang_port_taken": "port-in-use", "vllm_port_taken": "port-in-use",
    # vLLM does not log how its engine or a worker ended when it was killed: that is not in these logs
    "vllm_engine_killed_loading": "cause-not-in-log", "vllm_engine_killed_ready": "cause-not-in-log",
    "vllm_rank_killed_loading": "cause-not-in-log",
}
RECORDED_LOGS = {path.stem: path for path in FIXTURES.rglob("*.log")}
CUT_OFF = ("server_killed", "stopped")  # the log just ends there; only the exit code tells


def survived(path):
    "Did the server of this recorded log go on, or end without a word?"
    evidence = path.with_suffix(".evidence.json")
    known = json.loads(evidence.read_text())["about"] if evidence.exists() else {}
    return "exit_code" not in known or any(part in path.stem for part in CUT_OFF)


def errors(source, **known):
    return [finding.code for finding in diagnose(source, **known) if finding.severity == "error"]


def test_the_table_is_whole():
    table = failure_table()
    causes = table[table.kind != "consequence"]
    assert len(causes) >= 40 and set(table.kind) == set(KINDS) and table.code.is_unique
    assert set(table.status) <= {"read", "run", "thread", "inferred"} and (table.source != "").all() and (causes.fix != "").all()
    assert not table.cause.str.contains("{", regex=False).any() and (causes.engine.isin(["sglang", "vllm", "both"])).all()
    assert set(EXCERPTS) == set(causes.code), "an excerpt for each failure, and none beside"


@pytest.mark.parametrize("code", [failure.code for failure in FAILURES if not failure.consequence])
def test_an_excerpt_shows_its_failure_and_no_other(code):
    text = EXCERPTS[code][1]
    found = diagnose(text)
    assert [finding.code for finding in found if finding.severity == "error"] == [code]
    others = {failure.code for failure in FAILURES if not failure.consequence} - {code}
    assert not others & {finding.code for finding in found}
    assert found[0].evidence.startswith("line ") and found[0].fix and "{" not in found[0].message + found[0].fix.replace('\'{"method', "")


def test_the_cause_comes_first_in_whole_logs():
    named = {name: [finding.code for finding in diagnose(text)][:1] for name, (_, text) in MIXTURES.items()}
    wrong = {name: named[name] for name, (meant, _) in MIXTURES.items() if named[name] != [meant]}
    assert len(MIXTURES) >= 20 and len(wrong) <= 0.1 * len(MIXTURES), wrong
    for name, (_, text) in MIXTURES.items():
        assert sum(finding.severity == "error" for finding in diagnose(text)) == 1, name


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_the_first_offending_rank_is_named(rank):
    ranks = [rank, *(other for other in range(8) if other != rank)]
    log = begun() + "".join(raised("ModuleNotFoundError: No module named 'tiktoken'", f" TP{one}") for one in ranks) + ended()
    found = diagnose(log)
    assert found[0].subject == f"sglang TP{rank}" and "8 such lines" in found[0].evidence


def test_a_node_that_fails_before_another_begins_is_found():
    def on(node, text):
        return "".join(f"[pod/serve-{node}/main] {line}\n" for line in text.splitlines())
    failing, late = on(1, MIXTURES["oom on one rank, sglang"][1]), on(0, begun())
    found = diagnose(failing + late)
    assert found[0].code == "oom-capturing-graphs" and found[0].subject.startswith("serve-1/main")
    assert errors(failing + late + on(1, begun())) == [], "the node that failed was started again"
    assert watch.watch(failing + late).state == "failed"
    up = failing + late + on(0, READY)  # a server that is ready was another one, such as a pod with a new name
    assert watch.watch(up).state == "ready" and errors(up) == []


def test_starts_in_one_file_are_told_apart():
    failing, up = MIXTURES["oom on one rank, sglang"][1], begun() + READY
    other = MIXTURES["killed worker, vllm"][1]
    for text, code in ((failing + up, None), (up + failing, "oom-capturing-graphs"), (failing + begun(), None), (failing + other, "rank-killed")):
        assert errors(text) == ([code] if code else []), code


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_real_failures_are_named(name):
    found = diagnose(RECORDED_LOGS[name])
    assert [finding.code for finding in found if finding.severity == "error"] == [RECORDED[name]]
    assert found[0].code == RECORDED[name] and found[0].fix


def test_no_cause_is_named_where_nothing_failed():
    quiet = {name: path for name, path in RECORDED_LOGS.items() if survived(path)}
    assert not set(quiet) & set(RECORDED)
    assert len(quiet) >= 8
    assert {name: [f.code for f in diagnose(path)] for name, path in quiet.items() if diagnose(path)} == {}


def test_what_a_killed_server_leaves_is_judged_by_its_exit_code():
    cut = [path for name, path in RECORDED_LOGS.items() if "server_killed" in name]
    assert cut and all(errors(path) == [] and errors(path, exit_code=-9) == errors(path, exit_code=137) == ["rank-killed"] for path in cut)
    assert errors(begun(), exit_code=1) == ["cause-not-in-log"] and errors(begun(), exit_code=143) == ["stopped-from-outside"]
    assert errors(begun() + READY, exit_code=143) == [] and errors(begun() + READY, exit_code=0) == []


def test_a_vllm_that_was_told_to_stop_has_not_failed():
    "As vLLM 0.32.0 logs a SIGTERM to its process group while it serves: its client calls the engine dead."
    said = vllm_begun() + "INFO:     Application startup complete.\n" + "".join(f"({process}) {level} 01-04 01:03:00 [{where}] {text}\n" for process, level, where, text in (
        ("EngineCore pid=71", "INFO", "core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM"),
        ("APIServer pid=70", "WARNING", "utils.py:648", "[shutdown] Process manager: force killing remaining processes count=1"),
        ("APIServer pid=70", "ERROR", "async_llm.py:906", "AsyncLLM output_handler failed."),
        ("APIServer pid=70", "ERROR", "async_llm.py:906", "Traceback (most recent call last):"),
        ("APIServer pid=70", "ERROR", "async_llm.py:906", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for "
         "the root cause.")))
    assert errors(said) == []
    watched = watch.watch(said)
    assert (watched.state, watched.basis) == ("failed", "the server was told to stop") and not [f for f in watched.findings if f.severity == "error"]


@pytest.mark.parametrize("line", [
    "[2026-01-04 01:03:00] ERROR: a request was refused",
    "ERROR 01-04 01:03:00 [serving.py:9] Error with model: this model's maximum context length is 4096 tokens",
    "[2026-01-04 01:03:00] Receive: obj=GenerateReqInput(text='torch.OutOfMemoryError: CUDA out of memory. Tried to allocate')",
    "[2026-01-04 01:03:00] Traceback (most recent call last):\nValueError: The input is longer than the context.",
    "[2026-01-04 01:03:00 TP0] Ignore import error when loading sglang.srt.models.x: No module named 'torchaudio'",
    "(EngineCore pid=7) WARNING 01-04 01:03:00 [x.py:1] RuntimeError: CUDA error: no kernel image is available",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "[2026-01-04 01:03:00] SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
])
def test_alarming_words_in_a_healthy_log_are_no_failure(line):
    assert diagnose(begun() + READY + line + "\n") == []


def test_an_unknown_cause_is_said_to_be_unknown():
    text = vllm_begun() + "(EngineCore pid=7) ERROR 01-04 01:03:00 [core.py:1510] EngineCore failed to start.\n"
    found = diagnose(text + "(EngineCore pid=7) ERROR 01-04 01:03:00 [core.py:1510] RuntimeError: the flux is negative\n")
    assert found[0].code == "cause-not-in-log" and "the flux is negative" in found[0].evidence and "traceback" in found[0].fix
    silent = diagnose(text)
    assert silent[0].code == "cause-not-in-log" and "left no exception" in silent[0].message and "dmesg" in silent[0].fix


WRAPPED = {
    "colours": lambda line: f"\x1b[36m{line}\x1b[0m",
    "kubernetes": lambda line: f"2026-01-04T01:02:03.000000001Z stderr F {line}",
    "docker compose": lambda line: f"engine-1  | {line}", "another encoding": lambda line: line + " \udce9\udcff",
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_logs_are_understood(wrap, tmp_path):
    text = MIXTURES["oom on one rank, sglang"][1]
    path = tmp_path / "server.log"
    path.write_bytes("\n".join(map(wrap, text.split("\n"))).encode("utf-8", "surrogateescape"))
    assert errors(path) == ["oom-capturing-graphs"]


def test_any_form_of_a_log_gives_the_same_answer(tmp_path):
    text = MIXTURES["killed worker, vllm"][1]
    (tmp_path / "plain.log").write_text(text)
    (tmp_path / "packed.log.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(text.encode() + b"more\n" * 100_000)[:-40])
    (tmp_path / "wide.log").write_bytes(text.encode("utf-16"))
    files = (*sorted(tmp_path.iterdir()), str(tmp_path / "plain.log"))
    for source in (text, text.encode(), text.splitlines(), iter(text.splitlines(True)), *files):
        assert errors(source) == ["rank-killed"], source if isinstance(source, Path) else type(source)


def test_what_is_no_log_is_refused_or_found_empty(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 5000)
    (tmp_path / "empty").write_bytes(b"")
    assert diagnose(tmp_path / "binary") == [] and diagnose(tmp_path / "empty") == []
    for source, words in ((tmp_path, "is a folder"), (7, "expected the path of a log")):
        with pytest.raises(ValueError, match=words):
            diagnose(source)
    with pytest.raises(FileNotFoundError):
        diagnose(tmp_path / "nowhere.log")
    with pytest.raises(ValueError, match="expected a whole number"):
        diagnose(begun(), exit_code="9")


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_a_truncated_log_never_breaks_the_reader(name):
    text = MIXTURES[name][1]
    for end in range(0, len(text), max(1, len(text) // 40)):
        assert all(finding.message for finding in diagnose(text[:end] + "\n")) and diagnose(text[end:] + "\n") is not None


def test_a_long_log_is_read_quickly_whatever_it_holds(tmp_path):
    decode = ("[2026-01-04 01:04:22 TP0] Decode batch, #running-req: 8, #token: 200, token usage: 0.01, accept len: 2.85, "
              "gen throughput (token/s): 123.45, #queue-req: 0\n")
    path = tmp_path / "server.log"
    path.write_text(begun() + READY + decode * 200_000 + EXCERPTS["illegal-memory-access"][1])
    begin = time.perf_counter()
    assert errors(path) == ["illegal-memory-access"]
    assert path.stat().st_size / 1e6 / (time.perf_counter() - begin) > 8  # MB/s, on a busy machine
    path.write_text(begun() + "ValueError: of this kind there are many\n" * 30_000 + ended())  # failures and nothing else
    assert diagnose(path)[0].code == "cause-not-in-log"


@pytest.mark.parametrize(("name", "code"), [("damaged shard on one rank", "shard-damaged"), ("", None)], ids=["failed", "healthy"])
def test_the_run_notebook_names_the_cause(name, code, tmp_path):
    (tmp_path / "server.log").write_text(MIXTURES[name][1] if name else begun() + READY)
    runs.run("diagnose", out=tmp_path / "out", log=str(tmp_path / "server.log"))
    results = runs.read_results(tmp_path / "out")
    assert results["report"]["cause"] == code and ("TP5" if name else "Nothing in") in results["report"]["verdict"]
    assert list(results["findings"].code)[:1] == ([code] if code else [])
