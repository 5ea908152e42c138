"""Timing: compares outputs, runs engines in turn, and reports medians. Cold runs use separate processes."""

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

from benches.sizes import TINY


@dataclass
class Row:
    """One row of the table."""

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
    """One implementation of a workload. `prepare` runs untimed before each run and returns the arguments of `run`."""

    name: str
    run: Callable[..., Any]
    prepare: Callable[[], tuple[Any, ...]] = tuple


def interleave(engines: list[Engine], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each run by engine. Engines take turns, so that drift of the machine affects all of them."""
    times: dict[str, list[float]] = {e.name: [] for e in engines}
    for turn in range(warmup + repeats):
        for engine in engines:
            arguments = engine.prepare()
            began = time.perf_counter()
            kept = engine.run(*arguments)
            took = time.perf_counter() - began
            del kept  # freeing memory is not timed
            if turn >= warmup:
                times[engine.name].append(took)
    return times


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def compared(
    workload: str, state: str, peer: str, times: dict[str, list[float]], ours: str, target: float | None, **more: Any
) -> Row:
    """A row of two engines' median times."""
    p, o = median(times[peer]), median(times[ours])
    ratio = p / o
    unit, scale = more.pop("unit", ("ms", 1e3))
    return Row(
        workload, state, peer, p * scale, o * scale, unit, ratio, "" if target is None else f">= {target:g}x",
        None if target is None else ratio >= target,
        spread={k: sorted(x * scale for x in v) for k, v in times.items()}, **more,
    )  # fmt: skip


class NotPermitted(Exception):  # noqa: N818 -- a property of the machine, not an error
    """The page cache cannot be dropped."""


def drop_page_cache(files: list[Path]) -> str:
    """Drops the page cache: all of it if permitted, else of these files. Returns the method. No file may be mapped."""
    if not TINY:  # which disturbs nothing else
        os.sync()
    try:
        if TINY:
            raise PermissionError
        Path("/proc/sys/vm/drop_caches").write_text("3")
        how = "drop_caches"
    except OSError:
        for file in files:
            with file.open("rb") as opened:
                os.fdatasync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        how = "posix_fadvise(DONTNEED)"
    if cached_fraction(files) > 0.02:
        raise NotPermitted(f"{how} left pages in the cache")
    return how


def cached_fraction(files: list[Path], samples: int = 64) -> float:
    """Fraction of the files in the page cache, sampled with RWF_NOWAIT reads. Holes do not count: they need no disk."""
    hits = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for i in range(samples):
                at = size * i // samples
                try:
                    if os.lseek(opened.fileno(), at, os.SEEK_DATA) != at:
                        continue
                except OSError:  # a hole up to the end
                    continue
                try:
                    hits += os.preadv(opened.fileno(), [bytearray(1)], at, os.RWF_NOWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise NotPermitted("this file system cannot tell what is cached") from error
    return hits / (samples * len(files)) if files else 0.0


def in_child(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Runs a module of benches in a separate process; returns what it prints as JSON. Status 3 means not permitted."""
    import json

    command = [sys.executable, "-W", "ignore", "-m", f"benches.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode == 3:
        raise NotPermitted(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


ROW_PAGES = "--bssplit=4k/50:8k/50"
"""Rows of 3 KiB begin at multiples of 3 KiB: half of them lie in one page of 4 KiB, half in two."""


def fio_iops(file: Path, blocks: str) -> float | None:
    """Direct random reads per second at depth 64, of blocks that an option of fio describes; None without fio."""
    import json
    import shutil

    if TINY or shutil.which("fio") is None:
        return None
    done = subprocess.run(
        ["fio", "--name=r", f"--filename={file}", "--rw=randread", blocks, "--iodepth=64", "--ioengine=libaio",
         "--direct=1", "--runtime=3", "--time_based", "--readonly", "--output-format=json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return None
    return float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])
