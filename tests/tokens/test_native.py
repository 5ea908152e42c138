"""Guarantee: native code of token caches raises one ActshardError; no wrong data, hang, abort or panic."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import _native, tokens
from shell import run_script

NO_SHAPES = np.empty(0, np.int64)


def run(code: str, *arguments: str) -> str:
    """Runs code in a separate process, because it may abort, hang or change limits."""
    done = run_script(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL_DISK = """
import resource, sys
import numpy as np
import actshard
from actshard import tokens

rows = 1 << 20
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
path, storage = sys.argv[1:]
try:
    with tokens.CacheWriter(path, {"input_ids": np.int32, "mask": np.int32}, storage=storage) as writer:
        for k in range(12):
            values = np.random.default_rng(k).integers(0, 1 << 30, rows, np.int32)
            row = {"input_ids": values, "mask": values}
            if k == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
            try:
                writer.append([row])
            except actshard.ActshardError:
                # Space is freed, and the program continues as if nothing had been written.
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
                try:
                    writer.append([row])
                except actshard.ActshardError as error:
                    print("refused:", error)
except actshard.ActshardError as error:
    print("no cache:", error)
else:
    print("a cache")
"""


@pytest.mark.parametrize("storage", ["plain", "lz4"])
def test_a_writer_that_failed_once_makes_no_cache(storage: str, tmp_path: Path) -> None:
    said = run(FULL_DISK, str(tmp_path / "c"), storage)
    assert "refused:" in said
    assert "no cache:" in said
    assert not (tmp_path / "c").exists()


SIGNAL = """
import os, signal, sys
import numpy as np
import actshard
from actshard import _native, tokens

folder = sys.argv[1]
rows = [np.arange(1 << 16, dtype=np.int32)] * 200
with tokens.CacheWriter(folder + "/a", {"input_ids": np.int32}) as writer:
    writer.append([{"input_ids": row} for row in rows])
field = _native.TokenField([(folder + "/a/input_ids", None)], "mmap", _native.BlockCache(0))
os.mkdir(folder + "/b")
target = _native.TokenFieldWriter(folder + "/b", "I32", 1, "lz4", False)
said = []

def handler(number, frame):
    try:
        target.counts()
    except actshard.ActshardError as error:
        said.append(str(error))

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while not said:
    target.extend(field)
signal.setitimer(signal.ITIMER_REAL, 0)
print(said[0])
rows, elements, _ = target.finish()
assert elements == rows << 16, (rows, elements)
"""


def test_a_signal_handler_that_uses_a_busy_writer_is_refused_and_does_not_wait_for_itself(tmp_path: Path) -> None:
    assert "interrupted" in run(SIGNAL, str(tmp_path))


def test_threads_that_share_a_field_writer_take_turns(tmp_path: Path) -> None:
    writer = _native.TokenFieldWriter(tmp_path, "I32", 1, "plain", False)
    elements = np.arange(1000, dtype=np.int32).view(np.uint8)

    def work() -> None:
        for _ in range(50):
            writer.append(elements, np.array([1000], np.int64), NO_SHAPES)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.finish()[:2] == (200, 200_000)
    with pytest.raises(actshard.ActshardError, match="finished"):
        writer.append(elements, np.array([1000], np.int64), NO_SHAPES)


def test_sizes_beyond_all_memory_are_errors_of_ours(tmp_path: Path) -> None:
    for most in (1 << 60, 1 << 63):
        with pytest.raises(actshard.ActshardError):
            _native.run_lengths(np.zeros((2, 2), np.int32), most)
    with tokens.CacheWriter(tmp_path / "c", {"input_ids": np.int32}) as writer:
        writer.append([{"input_ids": np.arange(5)}])
    field = tokens.open_cache(tmp_path / "c").field("input_ids")
    for length in (1 << 50, 1 << 62):
        with pytest.raises(actshard.ActshardError):
            field.windows(
                np.zeros(4, np.int64), 0, 1, length, loss="all", field=None, weights=True, segments=True, eos=None
            )
    with pytest.raises(actshard.ActshardError):
        field.shape(1 << 40)


CLAIMS = """
import sys
import actshard
from actshard import tokens
try:
    print(tokens.open_cache(sys.argv[1])[0])
except actshard.ActshardError as error:
    print("refused:", error)
"""


def _claiming(folder: Path, change: Any) -> Path:
    with tokens.CacheWriter(folder / "c", {"input_ids": np.int64}) as writer:
        writer.append([{"input_ids": np.arange(5)}])
    for array in ("offsets", "data"):
        path = folder / "c" / "input_ids" / array / "zarr.json"
        meta = json.loads(path.read_text())
        change(meta, meta["codecs"][0]["configuration"])
        path.write_text(json.dumps(meta))
        (path.parent / "c" / "0").unlink()
    return folder / "c"


def _gzip(meta: dict[str, Any], sharding: dict[str, Any]) -> None:
    meta["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 50]
    sharding["chunk_shape"] = [1]
    sharding["codecs"][1] = {"name": "gzip", "configuration": {"level": 5}}


def _overflow(meta: dict[str, Any], sharding: dict[str, Any]) -> None:
    meta["shape"] = [10, 4]
    meta["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 62, 4]
    sharding["chunk_shape"] = [1, 4]


@pytest.mark.parametrize("change", [_gzip, _overflow])
def test_chunks_that_only_metadata_claim_are_refused(change: Any, tmp_path: Path) -> None:
    assert "refused:" in run(CLAIMS, str(_claiming(tmp_path, change)))
