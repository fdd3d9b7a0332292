"""What the store's notebook cannot hold: real kills, real full disks, large stores, random documents."""

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k2eagle.store import create, open_store, plan

FACTS = {"engine": "hf", "model": "invented", "weight_fingerprint": "00ff", "num_layers": 30,
         "last_norm": "post_norm"}
SHAPE = {"boundaries": (2, 15, 27), "hidden_size": 64, "provenance": {"by": "a test"}}

LENGTHS = [20 + 7 * i % 13 for i in range(24)]
fork = multiprocessing.get_context("fork")  # a process of its own that need not import torch again


def _write(path, pipe, pause, check_space, file_limit):
    "Write or resume the store; tell through the pipe what happens."
    torch.set_num_threads(1)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    try:
        with create(path, FACTS, LENGTHS, shard_bytes=80_000, check_space=check_space, **SHAPE) as writer:
            pipe.send(writer.next_document)
            for index in range(writer.next_document, len(LENGTHS)):
                generator = torch.Generator().manual_seed(index)  # documents depend on their index alone
                states = torch.randn(LENGTHS[index], 4, 64, generator=generator).bfloat16()
                tokens = torch.arange(LENGTHS[index])
                writer.append(tokens, states[:, :3], states[:, 3], tokens > 5)
                pipe.send(index + 1)
                time.sleep(pause)
        pipe.send("complete")
    except Exception as error:
        pipe.send(error)


def begin(path, pause=0.0, check_space=True, file_limit=None):
    "Start a writing process; return it and the pipe it reports to."
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_write, args=(path, there, pause, check_space, file_limit))
    process.start()
    there.close()
    return process, here


def write(path, **options):
    "Write to the end; return the first document written and how it ended: 'complete' or the error."
    process, pipe = begin(path, **options)
    reports = []
    while not reports or isinstance(reports[-1], int):
        reports.append(pipe.recv())
    process.join(20)
    assert process.exitcode == 0
    return reports[0], reports[-1]


def contents(path):
    "Every file of a folder with its bytes."
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    "The bytes of a store written in one go."
    path = tmp_path_factory.mktemp("unbroken") / "states"
    assert write(path) == (0, "complete")
    assert len(list(path.glob("shard-*.safetensors"))) > 3
    return contents(path)


@pytest.mark.parametrize("documents", [1, 7, 16, 23])
def test_kill_leaves_a_store_that_resumes_to_the_same_bytes(tmp_path, unbroken, documents):
    path = tmp_path / "states"
    process, pipe = begin(path, pause=0.05)
    while pipe.recv() < documents:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(ValueError, match="is unfinished"):
        open_store(path)
    assert open_store(path, allow_partial=True).verify() == []
    first, end = write(path)
    assert first >= documents and end == "complete"  # what was finished was kept
    assert contents(path) == unbroken


def test_kills_at_any_moment(tmp_path, unbroken):
    path, moments = tmp_path / "states", random.Random(0)
    for _ in range(25):
        process, pipe = begin(path, pause=0.005)
        time.sleep(0.2 * moments.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for file in path.glob("shard-*.safetensors"):
            assert file.read_bytes() == unbroken[file.name]  # a file with its final name is whole
    first, end = write(path)
    assert first > 0 and end == "complete"
    assert contents(path) == unbroken


def test_file_size_limit(tmp_path, unbroken):
    path = tmp_path / "states"
    first, end = write(path, file_limit=50_000)
    assert first.errno == errno.EFBIG
    assert "no room for shard-00000.safetensors.part (File too large)" in str(end)
    assert [file.name for file in path.iterdir()] == ["manifest.json"]
    assert write(path) == (0, "complete")
    assert contents(path) == unbroken


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 300 kB, where this user may mount one."
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no right to mount a small disk: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk_is_refused_at_once(small_disk):
    _, end = write(small_disk / "states")
    assert end.errno == errno.ENOSPC and "still to write" in str(end)
    assert not list((small_disk / "states").iterdir())


def test_full_disk_in_the_middle_keeps_what_was_finished(small_disk, tmp_path, unbroken):
    path = small_disk / "states"
    first, end = write(path, check_space=False)
    assert first == 0 and end.errno == errno.ENOSPC
    assert "(No space left on device)" in str(end) and "what was finished is kept" in str(end)
    partial = open_store(path, allow_partial=True)
    assert len(partial) > 0 and partial.verify() == []
    assert not list(path.glob("*.part"))
    moved = tmp_path / "larger" / "states"  # as one who finds a larger disk
    shutil.copytree(path, moved)
    assert write(moved) == (len(partial), "complete")
    assert contents(moved) == unbroken


document = st.tuples(st.integers(1, 9), st.integers(0, 2**31))


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(document, min_size=1, max_size=7), hidden_size=st.integers(1, 9),
       boundaries=st.sets(st.integers(0, 29), min_size=1, max_size=4), shard_bytes=st.integers(1, 2000),
       dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
       breaks=st.lists(st.integers(0, 6), max_size=3), names=st.randoms())
def test_round_trip(documents, boundaries, hidden_size, dtype, shard_bytes, breaks, names):
    boundaries = tuple(sorted(boundaries))
    given = []
    for length, seed in documents:
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(length, len(boundaries) + 1, hidden_size, generator=generator).to(getattr(torch, dtype))
        given.append((torch.randint(0, 2**40, (length,), generator=generator), states[:, :-1], states[:, -1],
                      torch.rand(length, generator=generator) < 0.5))
    ids = [f"{chr(names.randrange(32, 0x2fff))}\"\\ {i}" for i in range(len(given))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states"
        for stop in [*sorted(breaks), len(given)]:
            with create(path, FACTS, [len(one[0]) for one in given], boundaries=boundaries, ids=ids, dtype=dtype,
                        hidden_size=hidden_size, shard_bytes=shard_bytes, provenance={}) as writer:
                for one in given[writer.next_document:stop]:
                    writer.append(*one)
        store = open_store(path, check=True)
        assert store.ids == ids and store.verify() == []
        for read, one in zip(store, given, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(read[:4], one))
        batches = list(store.batches(12, shuffle_seed=len(given)))
        assert sorted(one.id for batch in batches for one in batch) == sorted(ids)
        assert all(len(batch) == 1 or sum(len(one.tokens) for one in batch) <= 12 for batch in batches)


@pytest.fixture
def store(tmp_path, unbroken):
    "A store of 24 documents in several shards."
    path = tmp_path / "states"
    path.mkdir()
    for name, data in unbroken.items():
        (path / name).write_bytes(data)
    return path


@pytest.mark.parametrize("damage, code, message", [
    (lambda data: data[:-1], "shard-truncated", "cut off"),
    (lambda data: data[:100], "shard-truncated", "cut off"),
    (lambda data: b"", "shard-truncated", "cut off"),
    (lambda data: data + b"x", "shard-altered", "altered"),
    (lambda data: b"\xff" * 8 + data[8:], "shard-altered", "altered"),
    (lambda data: data.replace(b'"shape":[', b'"shape":{', 1), "shard-altered", "altered"),
    (lambda data: data.replace(b"BF16", b"F16 ", 1), "shard-altered", "altered")])
def test_bad_shard_is_named_and_the_rest_is_readable(store, damage, code, message):
    shard = store / "shard-00001.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    opened = open_store(store)
    assert [(finding.code, finding.subject) for finding in opened.verify()] == [(code, shard.name)]
    readable = opened.readable()
    assert 0 < len(readable) < 24
    for index in range(24):
        if index in readable:
            assert opened[index].hidden.shape[1:] == (3, 64)
        else:
            with pytest.raises(ValueError, match=f"shard-00001.safetensors is .*{message}"):
                opened[index]
    assert sum(len(batch) for batch in opened.batches(100, 0, documents=readable)) == len(readable)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_flipped_byte_goes_unnoticed(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states"
        with create(path, FACTS, [3, 2], boundaries=(2,), hidden_size=4, provenance={}) as writer:
            for length in (3, 2):
                states = torch.ones(length, 2, 4).bfloat16()
                writer.append(torch.arange(length), states[:, :1], states[:, 1], torch.ones(length) > 0)
        shard = path / "shard-00000.safetensors"
        content = bytearray(shard.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        shard.write_bytes(content)
        assert [finding.subject for finding in open_store(path).verify()] == [shard.name]
        try:
            list(open_store(path, check=True))  # passes where only a name or a space was changed
        except ValueError as error:
            assert shard.name in str(error)


@pytest.mark.parametrize("name", ["../other/shard-00000.safetensors", "/etc/passwd", "..", "",
                                  "shard-00000.safetensors/../x", "sub/shard-00000.safetensors",
                                  "shard-00000.safetensors\u0000"])
def test_manifest_cannot_leave_its_folder(store, name):
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["shards"][0]["file"] = name
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="inside the store's folder"):
        open_store(store)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"format": "k2eagle-store-1", "shards": 5}',
                                  '{"format": "k2eagle-store-1", "shards": [{}]}', "\udcff"])
def test_broken_manifest_is_refused(store, text):
    (store / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="manifest|format"):
        open_store(store)


READER = """
import resource, sys, torch
from k2eagle.store import open_store
store = open_store(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = 0
for batch in store.batches(4096, shuffle_seed=None if sys.argv[2] == "None" else 0):
    for document in batch:
        total += int(document.hidden.view(torch.int64).sum()) + int(document.last.view(torch.int64).sum())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    "A store of 1 GB in shards of 64 MB."
    path = tmp_path_factory.mktemp("large") / "states"
    lengths, width = [512] * 122, 2048
    if shutil.disk_usage(path.parent).free < 3 * plan(sum(lengths), width).bytes:
        pytest.skip("less than 3 GB of disk free")
    states = torch.randn(512, 4, width).bfloat16()
    with create(path, FACTS, lengths, boundaries=(2, 15, 27), hidden_size=width, shard_bytes=64 << 20) as writer:
        for _ in lengths:
            writer.append(torch.arange(512), states[:, :3], states[:, 3], torch.ones(512, dtype=torch.bool))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("order", ["None", "shuffled"])
def test_memory_does_not_grow_with_the_store(large, order):
    assert sum(file.stat().st_size for file in large.iterdir()) > 1e9
    command = [sys.executable, "-c", READER, str(large), order]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 200_000  # kB: a shard or two mapped, a batch, not the store


def test_plan_agrees_with_the_disk(large):
    planned = plan(122 * 512, 2048, documents=122, shard_bytes=64 << 20)
    assert abs(sum(file.stat().st_size for file in large.glob("shard-*")) - planned.bytes) < 2000 * planned.shards


def test_full_disk_error_is_an_os_error(tmp_path):
    with pytest.raises(OSError) as caught:
        create(tmp_path / "states", FACTS, [10**12], boundaries=(2,), hidden_size=7168)
    assert caught.value.errno == errno.ENOSPC


def test_many_documents_can_be_held_at_once(store):
    held = [one for _ in range(60) for one in open_store(store)]
    assert len(held) == 60 * 24 and len(os.listdir("/proc/self/fd")) < 200
