"""Datasets larger than memory, or than a cold page cache: every pass against two threads of plain reads of the same files.

The size is 12 GB; ``ACTSHARD_BENCH_LARGER_GB=36`` measures one of 36 GB, with shards of 10 GB. Each pass runs in a process of its
own, after the page cache was emptied.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import NotPermitted, Row, drop_page_cache, in_child
from benches.sizes import size, turns

GB = size(float(os.environ.get("ACTSHARD_BENCH_LARGER_GB", "12")), 0.02)
TOKENS, D_MODEL, LAYERS = 128, 768, (3, 7)
BATCH = size(8192, 256)
READ = 4 << 20
PASSES = {
    "window": ("window, both layers", 0.9),
    "window_one": ("window, one layer of two", 0.6),
    "stored": ("stored order, both layers", 0.9),
    "stats": ("stats of one layer of two", 0.6),
    "verify": ("verify --deep", 0.9),
}
"""Each pass's name, and its target against plain reads; bytes that are not asked for do not count."""
MEMORY = size(1 << 30, 4 << 20)


def dataset() -> Path:
    """Two layers interleaved, written by ``create``; an example's number is its first column."""
    folder = data.ROOT / f"larger-{GB:g}"
    if not (folder / "complete").exists():
        examples = int(GB * 1e9 / (len(LAYERS) * TOKENS * D_MODEL * 4))
        rows = np.random.default_rng(0).standard_normal((16, len(LAYERS), TOKENS, D_MODEL), dtype=np.float32)
        folder.mkdir(parents=True, exist_ok=True)
        with actshard.create(
            folder, "saev", layers=LAYERS, d_model=D_MODEL, num_examples=examples, tokens_per_example=TOKENS,
            shard_bytes=int(10e9 if GB > 20 else 4e9), exist_ok=True,
        ) as writer:  # fmt: skip
            for first in range(0, examples, len(rows)):
                some = rows[: examples - first]
                some[..., 0] = np.arange(first, first + len(some))[:, None, None]
                writer.append(some)
        (folder / "complete").touch()
    return next(folder.glob("*/metadata.json")).parent


def _plain(files: list[Path]) -> int:
    """Reads all files with two threads, 4 MiB at a time."""
    parts = iter([(file, at) for file in files for at in range(0, file.stat().st_size, READ)])
    lock, done = threading.Lock(), [0, 0]

    def work(number: int) -> None:
        into = bytearray(READ)
        opened: dict[Path, Any] = {}
        while True:
            with lock:
                file, at = next(parts, (None, 0))
            if file is None:
                return
            if file not in opened:
                opened[file] = file.open("rb", buffering=0)
            done[number] += os.preadv(opened[file].fileno(), [into], at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done)


def _pass(name: str, folder: Path) -> int:
    """One pass over the dataset; returns the bytes asked for."""
    if name == "verify":
        found = actshard.verify(folder, deep=True)
        if found.errors:
            raise AssertionError(str(found))
        return sum(file.stat().st_size for file in folder.glob("acts*.bin"))
    with actshard.open(folder) as store:
        layer_bytes = store.num_examples * TOKENS * D_MODEL * 4
        if name == "stats":
            if store.stats(LAYERS[0]).rows != store.num_examples * TOKENS:
                raise AssertionError("rows are missing in the statistics")
            return layer_bytes
        layers: Any = LAYERS[0] if name == "window_one" else list(LAYERS)
        shuffle: Any = None if name == "stored" else "window"
        got, examples = 0, 0
        for batch in store.stream(layers, BATCH, tokens="all", shuffle=shuffle, memory=MEMORY):
            got += batch.activations.nbytes
            examples += int(batch.examples.sum())
            if not np.array_equal(batch.activations.reshape(len(batch), -1)[:, 0], batch.examples):
                raise AssertionError("rows of other examples")
        if examples != TOKENS * store.num_examples * (store.num_examples - 1) // 2:
            raise AssertionError("rows are missing")
        return got


def _child(name: str) -> None:
    """Runs one pass with an empty page cache, and prints seconds, bytes and the most memory that was resident."""
    warnings.simplefilter("ignore")
    folder = dataset()
    files = sorted(folder.glob("acts*.bin"))
    drop_page_cache(files)
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
            most[0] = max(most[0], int(fields[0]) * 1024)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    count = _plain(files) if name == "plain" else _pass(name, folder)
    took = time.perf_counter() - began
    ended.set()
    print(json.dumps({"seconds": took, "bytes": count, "resident": most[0]}))


def larger(repeats: int) -> Iterator[Row]:
    """Every pass in turn with plain reads; medians of at most three turns, which take a minute each."""
    dataset()
    rates: dict[str, list[float]] = {name: [] for name in ("plain", *PASSES)}
    resident = dict.fromkeys(PASSES, 0)
    what = f"larger than memory: {GB:g} GB"
    try:
        for _ in range(turns(max(1, min(3, repeats // 3)))):
            for name, measured in rates.items():
                found = in_child("larger", name)
                measured.append(found["bytes"] / found["seconds"] / 1e6)
                if name in resident:
                    resident[name] = max(resident[name], found["resident"])
    except NotPermitted as why:
        yield Row(what, "cold", "plain reads", None, None, "MB/s", None, "", None, f"skipped: {why}")
        return
    peer = statistics.median(rates["plain"])
    for name, (title, target) in PASSES.items():
        ours = statistics.median(rates[name])
        yield Row(
            f"{what}, {title}", "cold", "plain reads, 2 threads", peer, ours, "MB/s", ours / peer, f">= {target:g}x",
            ours / peer >= target, note=f"{resident[name] / 2**20:.0f} MiB resident",
            spread={"plain reads, 2 threads": sorted(rates["plain"]), "actshard": sorted(rates[name])},
        )  # fmt: skip
    pool, most = MEMORY / 2**20, max(resident.values()) / 2**20
    yield Row(f"{what}, resident memory", "cold", "the pool alone", pool, most, "MiB", pool / most,
              "<= pool + 256 MiB", most <= pool + 256)  # fmt: skip


if __name__ == "__main__":
    try:
        _child(sys.argv[1])
    except NotPermitted as why:
        print(why, file=sys.stderr)
        sys.exit(3)
