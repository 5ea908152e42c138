"""Starts writers, kills them and starts them again; run by test_kills.py.

Its children are forked and take milliseconds, so that kills hit the work rather than the start of an interpreter.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from waiting import PATIENCE

LAYERS, WIDTH, N = [1, 4], 64, 48
OPTIONS: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 5 * 2 * 6},
    "lmprobe": {"shard_bytes": 12_000, "storage": "full_sequence"},
    "zarr": {},
    "zarr 3": {"version": 3, "shard_bytes": 12_000},
    "zarr 3 packed": {"version": 3, "shard_bytes": 12_000, "pack": "zstd"},
    "pickle": {"shard_bytes": 20_000},
    "hf_arrow": {"shard_bytes": 12_000},
    "npy": {},
}


def data(format: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    lengths = [6] * N if format == "saev" else rng.integers(1, 9, N).tolist()
    return [rng.standard_normal((2, n, WIDTH)).astype(np.float32) for n in lengths]


def columns(format: str, part: slice) -> dict[str, Any] | None:
    return None if format == "saev" else {"label": list(range(N))[part]}


def name_of(format: str) -> str:
    """The format's name, without a version."""
    return format.split(" ", maxsplit=1)[0]


def write(format: str, path: Path, tell: Callable[[int], None]) -> Path:
    examples = data(format)
    with actshard.create(path, name_of(format), layers=LAYERS, d_model=WIDTH, resume=True, **OPTIONS[format]) as writer:
        tell(writer.committed)
        while not writer.complete and len(writer) < N:
            part = slice(len(writer), len(writer) + 5)
            writer.append(examples[part], columns=columns(format, part))
            tell(writer.flush())
    tell(N)
    return writer.path


def convert(format: str, path: Path, tell: Callable[[int], None]) -> Path:
    source = path.parent / "source"
    done = actshard.convert(source, path, name_of(format), resume=True, pad=format == "saev", **OPTIONS[format])
    tell(done.examples)
    return done.path


def merge(format: str, path: Path, tell: Callable[[int], None]) -> Path:
    examples = data(format)
    bounds = [0, 13, 20, N]
    if not (path / ".merging-begins").exists():
        for i in range(3):
            part = slice(bounds[i], bounds[i + 1])
            with actshard.create(
                path, name_of(format), layers=LAYERS, d_model=WIDTH, part=(i, 3), resume=True, **OPTIONS[format]
            ) as writer:
                if not writer.complete:
                    at = bounds[i] + len(writer)
                    rest = slice(at, part.stop)
                    if at < part.stop:
                        writer.append(examples[rest], columns=columns(format, rest))
        (path.parent / f"{path.name}.written").touch()
    made = actshard.merge(path)
    tell(N)
    return made


def merge_only(format: str, path: Path, tell: Callable[[int], None]) -> Path:
    if not (path.parent / f"{path.name}.written").exists():
        return merge(format, path, tell)
    made = actshard.merge(path)
    tell(N)
    return made


DO = {"write": write, "convert": convert, "merge": merge_only}


def expected(what: str, format: str) -> list[np.ndarray]:
    examples = data("zarr" if what == "convert" else format)
    if what == "convert" and format == "saev":
        most = max(e.shape[1] for e in examples)
        return [np.pad(e, ((0, 0), (0, most - e.shape[1]), (0, 0))) for e in examples]
    return examples


def check(path: Path, wanted: list[np.ndarray]) -> None:
    store = actshard.open(path)
    assert len(store) == len(wanted)
    for e, example in enumerate(wanted):
        for k, layer in enumerate(store.layers):
            assert np.array_equal(store.sequence(e, layer), example[k]), (path, e, layer)
    if store.format != "saev":
        assert store.table["label"].to_pylist() == list(range(N))
    report = actshard.verify(path)
    assert report.ok, report.findings
    assert not list(path.rglob(".*.part")), list(path.rglob(".*.part"))


def main(what: str, format: str, folder: Path, kills: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    if what == "convert":
        with actshard.create(folder / "source", "zarr", layers=LAYERS, d_model=WIDTH) as writer:
            writer.append(data("zarr"), columns=columns("zarr", slice(0, N)))
    killed = finished = 0
    longest = 0.3
    safe = 0
    path = folder / "d0"
    while killed < kills or finished == 0:
        read, wrote = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                DO[what](format, path, partial(_tell, wrote))
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        os.close(wrote)
        limit = chance.random() * longest * 1.2 if killed < kills else PATIENCE
        while (
            time.monotonic() - began < limit
            and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        with os.fdopen(read) as lines:
            told = [int(line) for line in lines.read().split()]
        assert all(n >= safe for n in told), f"{safe} were safe, then {told}"
        safe = max([safe, *told])
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            longest = max(0.02, 0.7 * longest + 0.3 * (time.monotonic() - began))
            found = path if format != "saev" else next(p for p in path.iterdir() if not p.name.startswith("."))
            check(found, expected(what, format))
            finished += 1
            safe = 0
            shutil.rmtree(path)
            (folder / f"{path.name}.written").unlink(missing_ok=True)
            path = folder / f"d{finished}"
        else:
            killed += 1
            assert not _opens(path), "half of a dataset was taken for one"
    print(json.dumps({"killed": killed, "finished": finished}))


def _tell(pipe: int, n: int) -> None:
    os.write(pipe, f"{n}\n".encode())


def _opens(path: Path) -> bool:
    """Whether a dataset opens. If one does, it is complete."""
    try:
        store = actshard.open(path)
    except actshard.ActshardError:
        return False
    return len(store) != N


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
