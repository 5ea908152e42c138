"""Reads from a disk that fails, at default options: past the page cache, ahead of a stream, and from caches.

`disk.c` is loaded into a process of its own. It makes the machine seem so small that large reads pass the page cache, simulates
such reads on any file system, and injects a fault into the n-th of them: EIO, EINVAL, short and empty reads, EINTR, a file that is
truncated at that moment, a kill. Every row that is read equals the dataset's. Faults of reads past the page cache are not
noticed at all: such reads are repeated through it. Other faults are one ActshardError. The next pass over the same store reads
everything.

    python -m tests.torture.disk --runs 1000 --seed 3
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.torture.datasets import in_a_child
from tests.waiting import PATIENCE

import actshard

CC = shutil.which("cc") if sys.platform == "linux" else None
FAULTS = (
    "none",
    "fails",
    "invalid",
    "short_blocks",
    "short_bytes",
    "empty",
    "interrupted",
    "killed",
    "truncated",
    "refused",
    "replaced",
)
HARMLESS = {"none", "short_blocks", "short_bytes", "interrupted"}
"""Faults that no reader notices, whichever reads they hit."""
DIRECT, CACHED = 1, 2
FORMATS = ("saev", "lmprobe", "zarr", "pickle.gz")
LAYERS, D, EXAMPLES = (2, 5), 301, 60
"""Rows of 1,204 bytes: neither rows nor files end at a block of the disk."""


class Control(ctypes.Structure):
    """The block that disk.c reads."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("fault", "which", "first", "last", "length")),
        *((name, ctypes.c_int64) for name in ("number", "direct", "cached", "unaligned", "hit")),
        ("folder", ctypes.c_char * 4096),
    )


class Data:
    """A dataset of a few MB; `values[example]` is (layers, T, D)."""

    def __init__(self, format: str, root: Path) -> None:
        self.format = format
        rng = np.random.default_rng(FORMATS.index(format))
        counts = [30] * EXAMPLES if format == "saev" else rng.integers(1, 50, EXAMPLES).tolist()
        self.values = [rng.standard_normal((len(LAYERS), n, D)).astype("f4") for n in counts]
        options: dict[str, Any] = {
            "saev": {"max_tokens_per_shard": 14 * 30 * len(LAYERS)},
            "lmprobe": {"storage": "full_sequence", "shard_bytes": 1_000_000},
            "zarr": {},
            "pickle": {"compress": True, "shard_bytes": 1_000_000},
        }[format.partition(".")[0]]

        def made(name: str, sign: int) -> dict[Path, bytes]:
            with actshard.create(root / name, format.partition(".")[0], layers=LAYERS, d_model=D, **options) as writer:
                for first in range(0, EXAMPLES, 10):
                    writer.append([sign * rows for rows in self.values[first : first + 10]])
            self.path = writer.path
            files = sorted(file for file in writer.path.rglob("*") if file.is_file())
            return {file.relative_to(writer.path): file.read_bytes() for file in files}

        self.negated = made(f"{format}-negated", -1)
        shutil.rmtree(self.path)
        self.files = made(format, 1)
        self.times = {name: (self.path / name).stat().st_mtime_ns for name in self.files}
        self.replaced = self.may_replace = False
        self.mean = np.concatenate([v[1] for v in self.values]).astype("f8").mean(0)

    def repair(self) -> None:
        """Restores truncated and replaced files, with their times: those of files that are not open now are the listed ones."""
        for name, content in self.files.items():
            if self.replaced:
                self._put(name, content)
            elif (self.path / name).stat().st_size != len(content):
                with (self.path / name).open("r+b") as opened:
                    opened.write(content)
            else:
                continue
            os.utime(self.path / name, ns=(self.times[name], self.times[name]))
        self.replaced = False

    def replace(self) -> None:
        """Gives the files' names to files with negated values."""
        self.replaced = True
        for name, content in self.negated.items():
            if name in self.files and len(content) > 1 << 14:  # rows, and no index
                self._put(name, content)

    def _put(self, name: Path, content: bytes) -> None:
        (self.path / "new").write_bytes(content)
        (self.path / "new").rename(self.path / name)

    def cool(self, rng: random.Random) -> None:
        """Drops some files from the page cache, where the file system permits it."""
        for name in self.files:
            if rng.random() < 0.5:
                with (self.path / name).open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Disk:
    """The control block of this process, and its datasets."""

    def __init__(self, root: Path) -> None:
        with Path(os.environ["ACTSHARD_DISK"]).open("r+b") as file:
            self.control = Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self.control.folder = os.fsencode(str(root))
        self.data = {format: Data(format, root) for format in FORMATS}

    def inject(self, fault: str, which: int, first: int, last: int, length: int = 0) -> None:
        control = self.control
        control.fault = 0
        control.number = control.hit = 0
        control.which, control.first, control.last, control.length = which, first, last, length
        control.fault = FAULTS.index(fault)


class Wrong(AssertionError):
    """A guarantee was violated."""


def _stream(data: Data, store: actshard.Store, rng: random.Random) -> Iterator[Callable[[], Any]]:
    """A pass over all rows; each step checks a batch. A fork reads the rest in a child. Files may be replaced."""
    several = rng.random() < 0.5
    shuffle = rng.choice(["window", "window", None])
    size = rng.choice([1, 7, 64, 500, 3000])
    options = {
        "shuffle": shuffle,
        "tokens": "all",
        "memory": rng.choice(["200KiB", "1MiB", "1GiB"]),
        "seed": rng.randrange(9),
    }
    stream = store.stream(list(LAYERS) if several else LAYERS[1], size, **options)
    seen: Counter[tuple[int, int]] = Counter()
    forks, replaces = rng.randrange(3 * len(stream)), rng.randrange(len(stream))

    def check(batch: Any) -> None:
        for row, e, t in zip(batch.activations, batch.examples.tolist(), batch.tokens.tolist(), strict=True):
            want = data.values[e][:, t] if several else data.values[e][1, t]
            # Files are opened when they are needed: each row is of the old file or of the new one.
            if not all(
                np.array_equal(a, b) or (data.replaced and np.array_equal(a, -b))
                for a, b in zip(row.reshape(-1, D), want.reshape(-1, D), strict=True)
            ):
                raise Wrong(f"other values in example {e}, token {t} of {options}")
            seen[e, t] += 1

    loop = iter(stream)
    for step in range(len(stream)):
        if step == forks:

            def rest(loop: Any = loop) -> int:
                for batch in loop:
                    check(batch)
                return sum(seen.values())

            yield lambda rest=rest: in_a_child(rest)
        if step == replaces and data.may_replace:
            data.replace()
        yield lambda: check(next(loop))

    def end() -> None:
        if next(loop, None) is not None or len(seen) != sum(len(v[0]) for v in data.values) or max(seen.values()) != 1:
            raise Wrong(f"rows are missing or occur twice: {options}")

    yield end


def _stats(data: Data, store: actshard.Store, rng: random.Random) -> Iterator[Callable[[], Any]]:
    def check() -> None:
        if not np.allclose(store.stats(LAYERS[1]).mean, data.mean, atol=1e-6):
            raise Wrong("another mean")

    yield check


def _verify(data: Data, store: actshard.Store, rng: random.Random) -> Iterator[Callable[[], Any]]:
    def check() -> None:
        found = actshard.verify(data.path, deep=True)
        if found.errors:
            raise actshard.ActshardError(str(found.errors[0]))

    yield check


def _gather(data: Data, store: actshard.Store, rng: random.Random) -> Iterator[Callable[[], Any]]:
    """Three threads gather while the main thread forks: rows that must be decoded are in a cache with shelves."""

    def some(seed: int) -> None:
        mine = np.random.default_rng(seed)
        for _ in range(4):
            e = mine.integers(0, EXAMPLES, 40)
            t = np.array([mine.integers(0, data.values[i].shape[1]) for i in e])
            rows = store.gather(LAYERS[0], e, t)
            if not all(np.array_equal(row, data.values[i][0, j]) for row, i, j in zip(rows, e, t, strict=True)):
                raise Wrong("other rows")

    def check() -> None:
        failed: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                some(seed)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(rng.randrange(1 << 30),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            answer = in_a_child(lambda: some(1))
        finally:
            for thread in threads:
                thread.join()
        failed += [answer] if isinstance(answer, BaseException) else []
        # What is no error of ours comes first.
        failed.sort(key=lambda error: isinstance(error, actshard.ActshardError))
        if failed:
            raise failed[0]

    yield check


PASSES = {"stream": _stream, "stats": _stats, "verify": _verify, "gather": _gather}


def one(disk: Disk, seed: int) -> str:
    """One random pass with one random fault, and a second pass without. Returns how the first one ended."""
    rng = random.Random(seed)
    data = disk.data[rng.choice(FORMATS)]
    fault = rng.choice(FAULTS)
    # A mapped file that is truncated while it is copied raises SIGBUS (source/mmap.rs).
    io = "pread" if fault == "truncated" else rng.choice(["auto", "auto", "pread"])
    name = rng.choice(["stream", "stream", "stream", *PASSES])
    if name == "verify" and fault == "truncated":
        name = "stats"
    which = rng.choice([DIRECT, DIRECT, CACHED, DIRECT | CACHED])
    first = rng.choice([1, 1, 2, 3, rng.randrange(1, 40)])
    last = rng.choice([first, first, first + 2, 1 << 40])
    if fault == "interrupted":
        last = min(last, first + 2)
    if fault == "refused":
        which = DIRECT
    if fault == "replaced":
        name = "stream"
    # Repeated through the page cache, and then found to be no fault of the file.
    quiet = which == DIRECT and fault != "truncated"
    where = f"seed {seed}: {data.format} {name} {fault} reads {first} to {last} of kind {which}, io={io}"
    data.cool(rng)
    budget = rng.choice(["1GiB", "1MiB", 1])
    store = actshard.open(data.path, io=io, decoded_memory=budget)

    def whole(passing: Callable[..., Iterator[Callable[[], Any]]]) -> None:
        for step in passing(data, store, random.Random(seed)):
            answer = step()
            if isinstance(answer, BaseException):
                raise answer

    data.may_replace = fault == "replaced"
    disk.inject(fault, which, first, last, length=rng.choice([0, 4096, 70_001]))
    ended = "as without"
    try:
        if fault == "killed":
            _killed(lambda: whole(PASSES[name]))
        else:
            whole(PASSES[name])
    except actshard.ActshardError as error:
        ended = type(error).__name__
        if len(str(error).splitlines()) != 1 or isinstance(error, getattr(actshard, "InternalError", ())):
            raise Wrong(f"{where}: {error!r}") from error
        if not data.replaced and (fault in HARMLESS or quiet or not disk.control.hit):
            raise Wrong(f"{where}: a fault that is not noticed, and {error!r}") from error
    except BaseException as error:
        raise Wrong(f"{where}: {type(error).__name__}: {error}") from error
    hit = disk.control.hit or data.replaced
    disk.inject("none", 0, 0, 0)
    reopen, data.may_replace = data.replaced, False
    data.repair()
    if reopen:
        store.close()
        store = actshard.open(data.path, io=io, decoded_memory=budget)
    try:
        whole(PASSES[name])
    except BaseException as error:
        raise Wrong(f"{where} ({ended}): then without a fault: {type(error).__name__}: {error}") from error
    store.close()
    if disk.control.unaligned:
        raise Wrong(f"{where}: {disk.control.unaligned} direct reads that no disk takes")
    return f"{fault}: {ended}" if hit else "nothing hit"


def _killed(work: Callable[[], Any]) -> None:
    """Runs a pass in a child that a read may kill."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(PATIENCE)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0) and not (
        os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9
    ):
        raise Wrong(f"a child that should be killed ended with status {status}")


def run(runs: int, seed: int, seconds: int = 3600) -> dict[str, int]:
    """Runs passes in a process of its own; returns how they ended."""
    assert CC is not None
    with tempfile.TemporaryDirectory(prefix="actshard-disk-") as folder:
        library, control = Path(folder) / "disk.so", Path(folder) / "control"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([CC, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        control.write_bytes(bytes(ctypes.sizeof(Control)))
        command = [sys.executable, "-W", "ignore", "-m", "tests.torture.disk", "--here", folder]
        done = subprocess.run(
            [*command, "--runs", str(runs), "--seed", str(seed)],
            env={**os.environ, "LD_PRELOAD": str(library), "ACTSHARD_DISK": str(control)},
            capture_output=True, text=True, check=False, timeout=seconds,
        )  # fmt: skip
    if done.returncode:
        raise Wrong(f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Runs passes with the seeds `seed`, `seed` + 1, ..."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here is None:
        print(json.dumps(run(asked.runs, asked.seed)))
        return
    warnings.simplefilter("ignore")
    disk = Disk(Path(asked.here) / "data")
    count: Counter[str] = Counter()
    for seed in range(asked.seed, asked.seed + asked.runs):
        count[one(disk, seed)] += 1
    count["reads past the page cache"], count["reads through it"] = disk.control.direct, disk.control.cached
    print(json.dumps(dict(sorted(count.items()))))


if __name__ == "__main__":
    main()
