"""Timing: engines in turn, outputs compared first, medians; cold runs in processes of their own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One line of the table."""

    workload: str
    state: str
    peer: str
    peer_value: float | None
    ours_value: float | None
    unit: str
    ratio: float | None
    target: str
    met: bool | None
    note: str = ""
    spread: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """One way to do the work; `prepare` runs untimed before each run and its value is passed on."""

    name: str
    run: Callable[..., Any]
    prepare: Callable[[], tuple[Any, ...]] = tuple


def interleave(engines: list[Engine], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each run of each engine; engines take turns, so that a machine that drifts drifts for all."""
    times: dict[str, list[float]] = {e.name: [] for e in engines}
    for turn in range(warmup + repeats):
        for engine in engines:
            arguments = engine.prepare()
            began = time.perf_counter()
            kept = engine.run(*arguments)
            took = time.perf_counter() - began
            del kept  # giving memory back is not part of the work
            if turn >= warmup:
                times[engine.name].append(took)
    return times


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


class NotPermitted(Exception):  # noqa: N818 -- a state of the machine, not a fault
    """The page cache cannot be dropped here."""


def drop_page_cache(files: list[Path]) -> str:
    """Empties the page cache, all of it where permitted, else of these files; says how. No file may be mapped."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        how = "drop_caches"
    except OSError:
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        how = "posix_fadvise(DONTNEED)"
    if cached_fraction(files) > 0.02:
        raise NotPermitted(f"{how} left pages in the cache")
    return how


def cached_fraction(files: list[Path], samples: int = 64) -> float:
    """How much of some files is in the page cache, asked by reads that must not wait."""
    hits = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for i in range(samples):
                try:
                    hits += os.preadv(opened.fileno(), [bytearray(1)], size * i // samples, os.RWF_NOWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise NotPermitted("this file system cannot tell what is cached") from error
    return hits / (samples * len(files))


def in_child(engine: str, state: str, seed: int, mode: str = "mmap") -> dict[str, Any]:
    """Runs one gather of `benches.child` in a process of its own."""
    import json

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benches.child", engine, state, str(seed), mode],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 3:
        raise NotPermitted(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fio_iops(file: Path) -> float | None:
    """4 KiB random reads a second at depth 64, past the page cache; None where fio is not installed."""
    import json
    import shutil

    if shutil.which("fio") is None:
        return None
    done = subprocess.run(
        ["fio", "--name=r", f"--filename={file}", "--rw=randread", "--bs=4k", "--iodepth=64", "--ioengine=libaio",
         "--direct=1", "--runtime=3", "--time_based", "--readonly", "--output-format=json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return None
    return float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])
