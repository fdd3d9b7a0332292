"""What real servers wrote, read back: logs, metrics pages, answers and server info of one run each, whose counts are known.

The files in tests/fixtures/ were made by record.py there, with the version of the engine that their names say.
"""
import json

import numpy as np
import pytest
from conftest import ROOT
from k2eagle.counters import describe_counters, read_counters
from k2eagle.logs import describe_log, read_log

FOLDER = ROOT / "tests" / "fixtures"
COUNTS = ["drafts", "drafted", "accepted", "pos_1", "pos_2", "pos_3"]
KNOWN = {  # summed over the eight answers of each run
    "sglang-0.5.23-chain": [218, 654, 141, 92, 33, 16],
    "sglang-0.5.23-tree": [193, 1351, 172, 109, 44, 19],
    "vllm-0.32.0": [221, 663, 139, 87, 36, 16],
}
TOKENS = 366  # in the answers
SGLANG = [name for name in KNOWN if name.startswith("sglang")]


def recorded(name: str, kind: str):
    return FOLDER / f"{name}-{kind}"


@pytest.mark.parametrize("name", KNOWN)
def test_answers_add_up(name):
    frame = read_counters(recorded(name, "requests.jsonl"))
    assert len(frame) == 8 and frame[COUNTS].sum().tolist() == KNOWN[name]
    assert not [finding for finding in describe_counters(frame) if finding.severity != "note"]


def test_vllms_page_and_log_have_the_same_counts():
    page, log = read_counters(recorded("vllm-0.32.0", "metrics.txt")), read_log(recorded("vllm-0.32.0", "server.log"))
    for frame in (page, log):
        assert frame[COUNTS].sum().tolist() == KNOWN["vllm-0.32.0"]
    assert log.rate_definition.eq("vllm rate").all() and log.attrs["log"]["unread"] == 0
    assert np.allclose(log.accept_len, 1 + log.accepted / log.drafts)


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_page_counts_finished_answers(name):
    drafts, drafted, accepted, *_ = KNOWN[name]
    row = read_counters(recorded(name, "metrics.txt")).iloc[0]
    assert (row.drafts, row.drafted) == (drafts, drafted)
    assert accepted - 8 * 3 <= row.accepted <= accepted  # what was cut off at the ends of answers is missing
    assert row.accepted == TOKENS - 8 - drafts


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_log_is_within_rounding_of_its_answers(name):
    drafts, drafted, accepted, *_ = KNOWN[name]
    log = read_log(recorded(name, "server.log"))
    width = drafted // drafts + 1
    (setup,) = log.attrs["log"]["setups"]
    assert setup["num_draft_tokens"] == width and log.attrs["log"]["unread"] == 0
    assert not [finding for finding in describe_log(log) if finding.severity == "error"]
    assert np.allclose(log.rate_logged, (log.accept_len - 1) / (width - 1), atol=0.005 + 0.005 / (width - 1))
    said = json.loads(recorded(name, "server-info.json").read_text())
    assert (said["version"], said["speculative_num_draft_tokens"]) == ("0.5.23", width)
    average = read_counters(recorded(name, "server-info.json")).accept_len[0]  # of the steps that decode lines tell of
    pooled = np.average(log.accept_len, weights=log.running)  # requests at the end of an interval, not on its average
    if len(log) == 1:
        assert abs(average - log.accept_len[0]) < 0.005
    else:  # a line every 10 steps, and the last one with the last answer
        assert average == pytest.approx(1 + accepted / drafts) and abs(pooled - average) < 0.01
