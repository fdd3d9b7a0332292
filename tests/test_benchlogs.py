"""Results of benchmark tools: one meaning a column whatever wrote the file, and no number out of damaged or foreign input.

Run: pytest tests/test_benchlogs.py (15 s)
"""
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2eagle import accept
from k2eagle.benchlogs import COLUMNS, LATENCIES, MARKS, describe_results, read_results

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted((FIXTURES / "benchlogs").iterdir())
RECORDED = ("sglang-0.5.23", "vllm-0.32.0")
WRITTEN = [path for path in FILES if not path.name.startswith(RECORDED)]
TEXTS = [path for path in WRITTEN if path.suffix in (".txt", ".md", ".csv")]
JSONS = [path for path in WRITTEN if path not in TEXTS]
NUMBERS = [name for name in COLUMNS if name not in ("source", "tool", "tool_version", "engine", "engine_version", "model", "workload", "speculative", "notes")]
# the imagined run of the written files; one batch: 2 requests in 1.25 s
RUN = dict(concurrency=2, concurrency_mean=1.887, requests=8, failed=0, duration_s=4, input_tokens=256, output_tokens=192, output_tok_s=48, total_tok_s=112,
           requests_s=2, num_draft=3, drafts=112, drafted=336, accepted=72, acceptance_rate=72 / 336, accept_len=1 + 72 / 112,
           ttft_ms_mean=60.5, ttft_ms_median=55.25, ttft_ms_p90=90, ttft_ms_p99=99, tpot_ms_mean=38.4, tpot_ms_median=38.1, tpot_ms_p90=42, tpot_ms_p99=44.5,
           itl_ms_mean=61.2, itl_ms_median=60, itl_ms_p90=75, itl_ms_p99=80.5, e2e_ms_mean=943.7, e2e_ms_median=940, e2e_ms_p90=1010, e2e_ms_p99=1060)
BATCH = RUN | dict(requests=2, duration_s=1.25, input_tokens=64, output_tokens=48, output_tok_s=38.4, total_tok_s=89.6, requests_s=1.6, decode_tok_s=48,
                   tpot_ms_mean=1000 / 24)
named = pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
few = settings(max_examples=60, deadline=None)


def sane(frame: pd.DataFrame):
    "No number that a run cannot have."
    numbers = frame[[name for name in NUMBERS if name != "request_rate"]]
    assert not np.isinf(numbers.to_numpy()).any() and not (numbers < 0).any(axis=None)
    assert not (frame[list(LATENCIES)] == 0).any(axis=None)
    assert (frame.accept_len.isna() | (frame.accept_len >= 1)).all() and (frame.acceptance_rate.isna() | frame.acceptance_rate.between(0, 1)).all()
    assert not ((frame.accepted > frame.drafted) | (frame.accept_len > frame.num_draft + 1.02)).any()
    assert set(filter(None, ", ".join(frame.notes).split(", "))) <= MARKS.keys()
    assert all(value in (True, False, None) for value in frame.speculative)
    assert {finding.code for finding in describe_results(frame)} >= set(filter(None, ", ".join(frame.notes).split(", ")))


@named
def test_each_tool_and_version_tells_the_same_run(path):
    frame = read_results(path)
    row = frame.iloc[-1]  # SpecForge's first is the run without a drafter
    expected = BATCH if "one-batch" in path.name else RUN
    given_up = {"accept_len": 192 / 112} if "results" in path.name else {}  # the prefill's token cannot be told apart there
    for name, value in (expected | given_up).items():
        rounded = path in TEXTS or name == "accept_len" and "speedup" in path.name
        assert math.isnan(row[name]) or row[name] == pytest.approx(value, abs=6e-3 if rounded else 1e-9), name
    sane(frame)
    assert sum(not math.isnan(row[name]) for name in expected) >= 5


@pytest.mark.parametrize(("numbers", "printed"), [("sglang-0.5.23-serving.jsonl", "sglang-0.5.23-serving.txt"), ("vllm-0.32.0-serve.json", "vllm-0.32.0-serve.txt"),
                                                  ("sglang-0.5.23-one-batch.jsonl", "sglang-0.5.23-one-batch.txt")])
def test_a_recorded_run_reads_alike_from_its_file_and_from_what_was_printed(numbers, printed):
    first, second = (read_results(FIXTURES / "benchlogs" / name) for name in (numbers, printed))
    assert len(first) == len(second) and first.output_tok_s.notna().all() and second.output_tok_s.notna().all()
    for name in NUMBERS:
        both = first[name].notna() & second[name].notna() & np.isfinite(first[name])
        near = 0.02 if "tok_s" in name and "one-batch" in numbers else 6e-3  # those follow from a duration of two digits
        assert first[name][both].tolist() == pytest.approx(second[name][both].tolist(), abs=6e-3, rel=near), name
    assert set(first.tool) == set(second.tool)
    sane(first), sane(second)


def test_counts_of_a_result_pool_as_counts_of_a_log():
    frame = read_results([FIXTURES / "benchlogs" / name for name in ("vllm-0.14.1-serve.json", "aiperf-0.13.0-export.json")])
    pooled = accept.summarize(frame[["drafts", "drafted", "accepted", "pos_1", "pos_2", "pos_3"]])
    assert (pooled.accept_len, pooled.rate, pooled.num_draft) == (pytest.approx(1 + 72 / 112), pytest.approx(72 / 336), 3)


def test_a_folder_of_everything_is_one_table():
    frame = read_results(FIXTURES / "benchlogs")
    assert set(frame.tool) == {"sglang.bench_serving", "sglang.bench_one_batch_server", "vllm bench serve", "guidellm", "aiperf", "specforge"}
    assert {path.name for path in FILES} == {re.split(r"[/\\]", source)[-1].split(":")[0] for source in frame.source}
    sane(frame)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.*")) + sorted((FIXTURES / "startup").glob("*healthy*")), ids=lambda path: path.name)
def test_what_is_no_result_is_refused(path):
    with pytest.raises(ValueError, match="looked for: sglang.bench_serving"):
        read_results(path)


@pytest.mark.parametrize(("path", "said"), [("sglang-0.5.23-chain-server.log", "logs.read_log"), ("vllm-0.32.0-metrics.txt", "counters.read_counters"),
                                            ("sglang-0.5.23-chain-server-info.json", "counters.read_counters")])
def test_a_refusal_names_the_right_reader(path, said):
    with pytest.raises(ValueError, match=said):
        read_results(FIXTURES / path)


def places(value, path=()):
    "Where in a JSON value something can be changed."
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in parts for place in places(part, (*path, key)))]


def changed(value, path, new):
    "A copy with something else at a place."
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


ODD = st.sampled_from([None, float("nan"), float("inf"), -1, 0, 1e308, 10 ** 400, "", "n/a", "12.5", [], [None], {}, {"avg": None}, [[]], True, "a" * 50])


@few
@given(st.sampled_from(JSONS), st.lists(st.tuples(st.integers(0, 10 ** 6), ODD), min_size=1, max_size=4))
def test_odd_values_anywhere_give_an_empty_number_or_a_refusal(path, changes):
    record = json.loads(path.read_text())
    for number, new in changes:
        within = places(record)
        record = changed(record, within[number % len(within)], new)
    try:
        frame = read_results(json.dumps(record) + "\n")
    except ValueError as error:
        assert "looked for" in str(error) or "is empty" in str(error)
    else:
        sane(frame)


@few
@given(st.sampled_from([path for path in JSONS if path.suffix == ".jsonl" and "results" not in path.name]), st.integers(1, 4), st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(path, copies, data):
    line = path.read_text()
    text = line * copies
    cut = data.draw(st.integers(len(line), len(text)))
    frame = read_results(text[:cut] if "\n" in text[:cut] else text[:cut] + "\n")
    whole = cut // len(line) + (cut % len(line) == len(line) - 1)
    assert frame.source.tolist() == [f"text:{number}" for number in range(1, whole + 1)]
    assert ("lines-unread" in {finding.code for finding in describe_results(frame)}) == (cut % len(line) not in (0, len(line) - 1))


PREFIX = st.sampled_from(["", "> ", "    ", "2026-01-04T01:00:22.123Z ", "[2026-01-04 01:00:22] ", "(bench pid=7) INFO 01-04 01:00:22 [serve.py:12] ", "bench-0  | ",
                          "\x1b[36mbench-0  |\x1b[0m ", "stdout F "])


@few
@given(st.sampled_from([path for path in TEXTS if path.suffix != ".csv"]), st.lists(PREFIX, min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]))
def test_what_stands_before_each_line_changes_nothing(path, prefixes, ending):
    plain = read_results(path)
    lines = path.read_text().splitlines()
    pasted = read_results("".join(prefixes[number % len(prefixes)] + line + ending for number, line in enumerate(lines)))
    pd.testing.assert_frame_equal(plain.drop(columns="source"), pasted.drop(columns="source"))


@few
@given(st.sampled_from(TEXTS), st.data())
def test_a_printed_table_cut_anywhere_tells_no_other_number(path, data):
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(lines)), st.integers(0, len(lines)))))
    whole = read_results(path).iloc[0]
    try:
        frame = read_results("".join(lines[start:stop]) + "\n")
    except ValueError as error:
        assert "looked for" in str(error) or "is empty" in str(error)
    else:
        for name in set(NUMBERS) - {"accept_len", "acceptance_rate", "failed"}:  # these follow from counts where all are there
            values = [value for value in frame[name] if not math.isnan(value)]
            assert all(value == whole[name] for value in values), name


@few
@given(st.sampled_from(FILES), st.integers(0, 2 ** 32 - 1), st.integers(1, 30))
def test_damaged_bytes_never_break_the_reader(path, seed, count):
    random, data = np.random.default_rng(seed), bytearray(path.read_bytes())
    for _ in range(count):
        data[random.integers(len(data))] = random.integers(256)
    try:
        frame = read_results(data.decode("utf-8", "replace") + "\n")
    except ValueError as error:
        assert str(error)
    else:
        sane(frame)


def test_keys_that_are_not_known_and_their_order_do_not_matter():
    for path in JSONS:
        text = path.read_text()
        record = json.loads(text)
        if isinstance(record, dict) and "results" not in path.name:
            turned = dict(reversed([*record.items(), ("comment", "hello"), ("extra", [1, 2])]))
            columns = ["source", "notes"]
            pd.testing.assert_frame_equal(read_results(text).drop(columns=columns), read_results(json.dumps(turned) + "\n").drop(columns=columns))


def test_results_of_many_runs_are_read_fast(tmp_path):
    line = (FIXTURES / "benchlogs" / "vllm-0.14.1-serve.json").read_text()
    (tmp_path / "sweep.jsonl").write_text("".join(line.replace('"num_prompts": 8', f'"num_prompts": {number}') for number in range(1000)))
    frame = read_results(tmp_path / "sweep.jsonl")
    assert len(frame) == 1000 and frame.source.iloc[-1].endswith("sweep.jsonl:1000")
