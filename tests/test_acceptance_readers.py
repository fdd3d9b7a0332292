"""What the notebooks of the readers cannot hold: any counts in any dialect and back, damaged logs, memory.

K2EAGLE_FUZZ_SECONDS=1800 damages logs for half an hour instead of a few seconds, K2EAGLE_EXAMPLES=2000 draws so many runs a property.
"""
import json
import math
import os
import random
import re
import time
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from k2eagle import logs
from k2eagle.counters import parse_prometheus, read_counters
from k2eagle.dialects import DIALECTS, Setup, check, count, dialect_of, express, understand
from k2eagle.logs import NEW, OLD, describe_log, read_blocks, read_log

MENTION = re.compile(rb"(?<!block )accept len:|SpecDecoding metrics:|Speculative metrics:")
BLOCK = re.compile(  # that of another algorithm, wrapped anywhere
    rb"(?:\r?\n.{0,60}?)?".join([*(bytes([letter]) for letter in b"block"), b" ?", b"accept len:"]))
runs = st.integers(1, 7).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1, max_size=60)))
quick = settings(max_examples=int(os.environ.get("K2EAGLE_EXAMPLES", 80)), deadline=None)


def counted(run):
    "Counts of a drawn run."
    return count(run[1], run[0])


def decode_line(counts, tokens: int, version: str, second: int = 0, running: int = 8, rank: str = " TP0") -> str:
    "A decode line as a version of SGLang writes it; D tokens verified a step."
    length = counts.accept_len
    rate = {"0.5.3": "", "0.5.8": f" accept rate: {length / tokens:.2f},", "0.5.23": f" accept rate: {(length - 1) / (tokens - 1):.2f},"}[version]
    stop, end = ("." if version == "0.5.3" else ","), (", " if version == "0.5.3" else "")
    clock = f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
    return (f"[2026-01-{second // 86400 % 28 + 1:02d} {clock}{rank}] Decode batch{stop} #running-req: {running}, #token: 537, token usage: 0.07, "
            f"accept len: {length:.2f},{rate} cuda graph: True, gen throughput (token/s): 217.35, #queue-req: 0{end}\n")


def spec_line(counts, version: str) -> str:
    "A line as a version of vLLM writes it."
    shares = ", ".join(f"{share:.3f}" for share in counts.joint)
    if version == "0.9.2":
        return (f"INFO 07-02 10:00:10 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: {100 * counts.rate:.1f}%, Mean acceptance "
                f"length: {counts.accept_len:.2f}, Accepted: {counts.accepted} tokens, Drafted: {counts.drafted} tokens, Per-position acceptance "
                f"rate: {shares}\n")
    return (f"(APIServer pid=7) INFO 11-30 02:51:03 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {counts.accept_len:.2f}, "
            f"Accepted throughput: 27.96 tokens/s, Drafted throughput: 139.80 tokens/s, Accepted: {counts.accepted} tokens, Drafted: "
            f"{counts.drafted} tokens, Per-position acceptance rate: {shares}, Avg Draft acceptance rate: {100 * counts.rate:.1f}%\n")


@quick
@given(runs, st.integers(0, 20))
def test_every_dialect_leads_back(run, extra):
    counts = counted(run)
    for setup in (Setup(run[0]), Setup(run[0], run[0] + 1 + extra)):
        for name in DIALECTS:
            if setup.shape in dialect_of(name).length:
                reading = understand(express(counts, name, setup), name, setup)
                assert math.isclose(reading.accept_len, counts.accept_len)
                if setup.shape == "chain":
                    assert math.isclose(reading.rate, counts.rate, abs_tol=1e-12)


@quick
@given(runs)
def test_right_numbers_raise_no_finding_and_wrong_ones_do(run):
    counts = counted(run)
    length, joint = round(counts.accept_len, 2), [round(share, 3) for share in counts.joint]
    assert not check(length, round(counts.rate, 2), joint)
    with_bonus = counts.accept_len / (run[0] + 1)
    if abs(with_bonus - counts.rate) > 0.03:
        assert check(length, round(with_bonus, 2), num_draft=run[0])
    if counts.rate > 0.02:
        assert "percent-as-fraction" in [finding.code for finding in check(length, round(100 * counts.rate, 1), num_draft=run[0])]


@quick
@given(st.integers(1, 7).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.lists(st.integers(0, k), min_size=5, max_size=40), min_size=1,
                                                                          max_size=25))), st.sampled_from(["0.5.3", "0.5.8", "0.5.23"]))
def test_sglang_lines_lead_back(drawn, version):
    num_draft, steps = drawn
    windows = [count(own, num_draft) for own in steps]
    frame = read_log("".join(decode_line(own, num_draft + 1, version, n) for n, own in enumerate(windows)))
    assert np.allclose(frame.accept_len, [own.accept_len for own in windows], atol=0.00501)
    assert frame.line.tolist() == list(range(1, len(windows) + 1)) and frame["rank"].eq("TP0").all()
    setups, right = frame.attrs["log"]["setups"], {"0.5.8": OLD, "0.5.23": NEW, "0.5.3": None}[version]
    for setup in setups:
        low, high = setup["candidates"] or (setup["num_draft_tokens"],) * 2
        assert setup["definition"] in (right, None)
        assert low <= num_draft + 1 <= high
    known = frame.rate.notna()
    slack = 0.0051 + 0.0051 / num_draft
    assert np.allclose(frame.rate[known], np.array([own.rate for own in windows])[known], atol=slack)
    told = read_log("".join(decode_line(own, num_draft + 1, version, n) for n, own in enumerate(windows)), num_draft_tokens=num_draft + 1)
    assert np.allclose(told.rate, [own.rate for own in windows], atol=0.0051 / num_draft)


@quick
@given(runs, st.sampled_from(["0.9.2", "0.32.0"]), st.integers(1, 40))
def test_vllm_lines_lead_back(run, version, times):
    counts = count(run[1] * times, run[0])
    row = read_log(spec_line(counts, version)).iloc[0]
    assert (row.drafted, row.accepted) == (counts.drafted, counts.accepted)
    assert math.isclose(row.rate, counts.rate)
    assert row.drafts == counts.drafts and math.isclose(row.accept_len, counts.accept_len)
    shares = [row[f"pos_{k}"] / counts.drafts for k in range(1, run[0] + 1)]
    assert np.allclose(shares, counts.joint, atol=0.0005 + 0.5 / counts.drafts)
    if counts.drafts < 900:
        assert [row[f"pos_{k}"] for k in range(1, run[0] + 1)] == list(counts.kept)


@quick
@given(st.lists(runs, min_size=1, max_size=6), st.integers(1, 7))
def test_vllms_first_engine_leads_back(drawn, num_draft):
    windows, lines, drafted, emitted = [count([min(own, num_draft) for own in run[1]], num_draft) for run in drawn], "", 0, 0
    for own in windows:
        drafted, emitted = drafted + own.drafted, emitted + own.drafts + own.accepted
        lines += (f"INFO 10-16 19:05:47 metrics.py:367] Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of "
                  f"speculative tokens: {num_draft}, Number of accepted tokens: {drafted}, Number of draft tokens: {drafted}, Number of "
                  f"emitted tokens: {emitted}.\n")
    frame = read_log(lines)
    assert [list(row) for row in frame[["drafts", "drafted", "accepted"]].to_numpy()] == [[o.drafts, o.drafted, o.accepted] for o in windows]


label = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=12)


@quick
@given(st.dictionaries(st.sampled_from(["engine", "model_name", "pod"]), label), runs, runs)
def test_metrics_page_leads_back(labels, earlier, later):
    before, added = counted(earlier), count([min(kept, earlier[0]) for kept in later[1]], earlier[0])
    escaped = {k: v.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for k, v in labels.items()}

    def inside(named):
        return "{" + ",".join(f'{key}="{value}"' for key, value in named.items()) + "}"

    def page(kept):
        lines = {"drafts": len(kept), "draft_tokens": earlier[0] * len(kept), "accepted_tokens": sum(kept)}
        text = "# TYPE x counter\n"
        for name, value in lines.items():
            text += f"vllm:spec_decode_num_{name}_total{inside(escaped)} {float(value)}\n"
        for k in range(earlier[0]):
            own = {**escaped, "position": str(k)}
            text += f"vllm:spec_decode_num_accepted_tokens_per_pos_total{inside(own)} {float(sum(one > k for one in kept))}\n"
        return text

    first, second = page(earlier[1]), page(earlier[1] + [min(kept, earlier[0]) for kept in later[1]])
    samples, unread = parse_prometheus(first)
    theirs = [(s.name, s.labels, s.value) for family in text_string_to_metric_families(first) for s in family.samples]
    assert [sample[:3] for sample in samples] == theirs and not unread
    row, since = read_counters(first).iloc[0], read_counters(second, before=first).iloc[0]
    for own, counts in ((row, before), (since, added)):
        assert (own.drafts, own.drafted, own.accepted) == (counts.drafts, counts.drafted, counts.accepted)
        assert tuple(own[f"pos_{k}"] for k in range(1, earlier[0] + 1)) == counts.kept


@quick
@given(runs, st.sampled_from(["0.5.3", "0.5.5", "0.5.8", "0.5.9", "0.5.23", "vllm"]))
def test_answers_lead_back(run, version):
    counts = counted(run)
    histogram = np.bincount(run[1], minlength=1).tolist()
    meta = {"id": "a", "completion_tokens": 1 + counts.drafts + counts.accepted, "spec_verify_ct": counts.drafts}
    rate = {"spec_accept_rate": counts.rate, "spec_accept_length": (1 + counts.drafts + counts.accepted) / counts.drafts}
    record = {"0.5.3": meta, "0.5.5": meta | rate,
              "0.5.8": meta | rate | {"spec_accept_token_num": counts.accepted, "spec_draft_token_num": counts.drafted},
              "0.5.9": meta | rate | {"spec_accept_token_num": counts.accepted, "spec_draft_token_num": counts.drafted,
                                      "spec_accept_histogram": histogram},
              "0.5.23": meta | rate | {"spec_num_correct_drafts": counts.accepted, "spec_num_proposed_drafts": counts.drafted,
                                       "spec_correct_drafts_histogram": histogram},
              "vllm": {"acceptance_histogram": histogram + [0] * (run[0] + 1 - len(histogram)), "num_draft_tokens": counts.drafted}}[version]
    row = read_counters(json.dumps({"meta_info": record})).iloc[0]
    assert (row.drafts, row.accepted) == (counts.drafts, counts.accepted)
    assert math.isclose(row.accept_len, counts.accept_len)
    if version not in ("0.5.3", "0.5.5"):
        assert row.drafted == counts.drafted
    if version in ("0.5.9", "0.5.23", "vllm"):
        assert tuple(row[f"pos_{k}"] for k in range(1, run[0] + 1)) == counts.kept


def a_log(rng: random.Random) -> bytes:
    "A log of either engine or both, with what stands between and around the lines."
    prefix, lines = rng.choice(["", "", "sglang-1  | ", "2026-01-04T01:04:22.1234Z ", "Jan 04 01:04:22 node7 vllm[42]: ", "\x1b[32m"]), []
    num_draft, version = rng.randint(1, 7), rng.choice(["0.5.3", "0.5.8", "0.5.23"])
    for second in range(rng.randint(1, 25)):
        counts = count([rng.randint(0, num_draft) for _ in range(rng.randint(1, 90))], num_draft)
        lines += [rng.choice([
            lambda: decode_line(counts, num_draft + 1, version, second), lambda: decode_line(counts, num_draft + 1, version, second, 3, " DP1 TP0"),
            lambda: spec_line(counts, rng.choice(["0.9.2", "0.32.0"])),
            lambda: spec_line(counts, "0.32.0").replace("rate: ", f"rate: {rng.choice(['1.200', '0.001', '0.500'])}, ", 1).replace("length: ", "length: 1"),
            lambda: "INFO:     127.0.0.1:50210 - \"POST /generate HTTP/1.1\" 200 OK\n",
            lambda: "[2026-01-04 01:04:22 TP0] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0\n",
            lambda: "INFO 11-30 02:51:03 [loggers.py:259] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 138.7 "
                    "tokens/s, Running: 12 reqs, Waiting: 0 reqs\n",
            lambda: "[2026-01-04 01:00:00] server_args=ServerArgs(speculative_num_steps=3, speculative_num_draft_tokens=4)\n",
            lambda: "INFO 10-16 19:05:47 metrics.py:367] Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of "
                    "speculative tokens: 3, Number of accepted tokens: 8547, Number of draft tokens: 13311, Number of emitted tokens: 10616.\n",
            lambda: "Loading safetensors checkpoint shards:  12% Completed | 5/42\r"])()]
    return "".join(prefix + line for line in lines).encode()


def a_wrapped_log(rng: random.Random) -> bytes:
    "Decode lines of one width of terminal, some cut off, with other lines between them."
    prefix = rng.choice([b"", b"sglang-1  | ", b"\x1b[36mx-1 |\x1b[0m ", b"0: ", b"[pod/a/b] ", b"2026-01-04T01:04:22.1234Z "])
    width, num_draft, version, lines = rng.choice([40, 70, 80, 120, 150, 190]), rng.randint(1, 7), rng.choice(["0.5.3", "0.5.8", "0.5.23"]), []
    for second in range(rng.randint(1, 25)):
        counts = count([rng.randint(0, num_draft) for _ in range(rng.randint(1, 90))], num_draft)
        line = decode_line(counts, num_draft + 1, version, second).encode()[:-1]
        others = (b"", line[:rng.randint(20, 180)], b'INFO:     127.0.0.1:50210 - "POST /generate HTTP/1.1" 200 OK',
                  b"[2026-01-04 01:04:22 TP0] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, #queue-req: 0")
        lines.append(line if rng.random() < 0.7 else rng.choice(others))
    end = rng.choice([b"\n", b"\r\n"])
    return b"".join(prefix + line[at:at + width] + end for line in lines for at in range(0, max(len(line), 1), width))


def test_quick_ways_read_what_the_careful_way_reads(monkeypatch):
    data = [make(random.Random(seed)) for seed in range(400) for make in (a_log, a_wrapped_log)]
    line = decode_line(count([0, 1, 2, 3, 0], 3), 4, "0.5.23").encode()
    data.append(line * 3 + line.replace(b" accept rate", b"\xff\xfeaccept rate"))                           # not a line without a rate
    data.append(b"".join(lead + line[:130] + b"\nx-1 | " + line[130:] for lead in (b"x-1 | ", b"x-1 x-1 | ")))  # one prefix is damaged

    def everything():
        for text in data:
            try:
                frame = read_log(text)
                log = frame.attrs.pop("log")
                yield frame, log["unread"], log["partial"], log["examples"], log["impossible"], log["doubtful"]
            except ValueError as error:
                yield str(error)

    quick = list(everything())
    monkeypatch.setattr(logs, "_scan_plain", lambda block, state: False)
    monkeypatch.setattr(logs, "_put_aside", lambda text, line, state: False)
    read = 0
    for text, one, other in zip(data, quick, everything(), strict=True):
        if isinstance(one, tuple):
            assert one[1:] == other[1:], text
            pd.testing.assert_frame_equal(one[0], other[0], check_categorical=False)
            read += len(one[0])
        else:
            assert one == other
    assert read > 3000 and sum(one[4] for one in quick if isinstance(one, tuple)) > 300  # impossible numbers among them


PIECES = [b"\n", b"\r", b"\r\n", b"\x1b[0m", b"\x1b[1;31m", b"\x1b]0;title\x07", b"\x1b]", b"\x00", b"nan", b"inf", b",", b".", b"1,234", b"-", b"%",
          "日本語🚀".encode(), b"\xff\xfe", b"accept len: 2.85, ", b"accept len:", b"block accept len: 1.00, ", b"SpecDecoding metrics: ",
          b"Speculative metrics: ", b"Decode batch, ", b"[2026-13-45 99:99:99 TP0] ", b"99999999999999999999", b"tokens", b"Drafted: 0 tokens", b"\x85"]


def damage(data: bytes, rng: random.Random) -> bytes:
    "Cut, double, move, overwrite and insert at random places."
    for _ in range(rng.choice([0, 1, 2, 5, 20])):
        at, to = sorted(rng.randint(0, len(data)) for _ in range(2))
        to = min(to, at + rng.choice([1, 3, 30, 300]))
        data = rng.choice([
            lambda: data[:at] + data[to:], lambda: data[:at] + rng.choice(PIECES) + data[at:], lambda: data[:to] + data[at:],
            lambda: data[:at] + bytes(rng.randrange(256) for _ in range(to - at)) + data[to:] if to - at < 9 else data[:to],
            lambda: data[:at] + data[to:to + 50] + data[at:to] + data[to + 50:],
            lambda: re.sub(rb"(.{%d})" % rng.choice([40, 80, 120]), rb"\1\n", data)])()
    return data


def read_in_parts(data: bytes, rng: random.Random):
    "Read what is a log, some rows at a time: the same rows and the same account, wherever a part ends."
    try:
        whole = read_log(data)
    except ValueError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs._scan, "__defaults__", (rng.choice([200, 500, 1000]),))  # bytes read at once
        parts = list(read_blocks(data, rows=rng.choice([1, 3, 7])))
    log = whole.attrs.pop("log")
    assert all(str(part.attrs.pop("log")) == str(log) for part in parts)
    pd.testing.assert_frame_equal(pd.concat(parts, ignore_index=True), whole, check_dtype=False)


def read_damaged(data: bytes):
    "Read; nothing but ValueError may be raised, and every mention of the metrics is a row or counted."
    bare = re.sub(rb"\x1b\[[0-9;]*m", b"", data)
    mentions = len({found.end() for found in MENTION.finditer(bare)} - {found.end() for found in BLOCK.finditer(bare)})
    try:
        frame = read_log(data)
    except ValueError as error:
        assert re.search(r"is empty|none could be read|binary file|no log that is known|without speculation", str(error)), error
        assert not mentions or "could be read" in str(error), (mentions, error)
        return
    log = frame.attrs["log"]
    assert len(frame) + log["unread"] >= mentions, (len(frame), log["unread"], mentions)
    assert (frame.accepted.fillna(0) <= frame.drafted.fillna(np.inf) + 1e-9)[frame.rate_definition.eq("vllm rate")].all()
    rate = frame.rate[~frame.rate_definition.eq("vllm v0 rate")]
    assert rate.isna().all() or rate.dropna().between(0, 1.01).all()
    assert frame.accept_len.isna().all() or frame.accept_len.dropna().between(0.99, 256.01).all()
    describe_log(frame)


def test_damaged_logs_never_crash_and_lose_nothing_silently():
    end, seed = time.monotonic() + float(os.environ.get("K2EAGLE_FUZZ_SECONDS", 4)), int(os.environ.get("K2EAGLE_FUZZ_SEED", 0))
    done = 0
    while time.monotonic() < end:
        rng = random.Random(seed + done)
        data = damage((a_wrapped_log if done % 4 == 3 else a_log)(rng), rng)
        try:
            read_damaged(data)
            if done % 3 == 2:
                read_in_parts(data, rng)
        except Exception as error:
            raise AssertionError(f"seed {seed + done}: {error!r}\n{data[:3000]!r}") from error
        done += 1
    print(f"{done} damaged logs")
    assert done > 20


def test_damaged_counters_raise_nothing_but_value_errors():
    page = "".join(f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="m"}} {value}.0\n'
                   for name, value in (("drafts", 540), ("draft_tokens", 1620), ("accepted_tokens", 324)))
    page += 'sglang:spec_accept_length{tp_rank="0"} 1.62\nsglang:spec_accept_rate{tp_rank="0"} 0.206\n'
    answers = "\n".join(json.dumps({"meta_info": {"id": f"r{n}", "spec_verify_ct": 10, "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 30,
                                                  "spec_correct_drafts_histogram": [6, 2, 2], "spec_accept_rate": 0.2}}) for n in range(5))
    for seed in range(600):
        rng = random.Random(seed)
        data = damage(rng.choice([page, answers]).encode(), rng)
        try:
            read_counters(data)
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}\n{data!r}") from error


def lines_of(path, megabytes: int, gap: int = 0):
    "A log of decode lines, with other lines between them."
    other = "[2026-01-04 01:04:22 TP0] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.05\n" * gap
    text = (other + decode_line(count([0, 1, 2, 3, 0], 3), 4, "0.5.23")) * 50
    with path.open("w") as file:
        for _ in range(megabytes * 1_000_000 // len(text)):
            file.write(text)
    return path


def peak(work) -> tuple:
    "What a piece of work returns, and the most bytes it held."
    tracemalloc.start()
    done = work()
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return done, held


@pytest.mark.parametrize("gap", [0, 40])
def test_memory_grows_with_rows_only(tmp_path, gap):
    (few, small), (many, large) = (peak(lambda: len(read_log(lines_of(tmp_path / "server.log", size, gap)))) for size in (5, 20))
    assert large - small < 150 * (many - few) + 2e6, (small, large, few, many)  # bytes a row, whatever stands between


def test_memory_of_blocks_does_not_grow(tmp_path):
    read = lambda size: peak(lambda: sum(len(block) for block in read_blocks(lines_of(tmp_path / "server.log", size), rows=5000)))
    (few, small), (many, large) = read(5), read(20)
    assert many > 3.9 * few and large < small + 5e5, (small, large, few, many)
