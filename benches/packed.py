"""Speed of packed and of plain Zarr 3 stores relative to flat files of the same rows, in one run.

python -m benches.packed [--folder FOLDER] [--megabytes 400] [--width 1024] [--tokens 512] [--repeats 3]

Writes one layer of bfloat16 rows, which pack to about 0.68, in `safetensors` files ("flat"), as Zarr 3 ("plain") and as Zarr 3
with ``pack="lossless"`` ("packed"), and prints: the rate of `create`; a window stream of all rows, hot and cold; random rows, hot
and cold; and the stream over a link of 200 MB/s with 30 ms of latency (:mod:`benches.slow_server`). Each store is opened anew for
each measurement, so that nothing is decoded yet. "Cold" files are dropped from the page cache with ``posix_fadvise``. All rates
are bytes of rows per second, the best of the repeats, which are interleaved. With short examples (``--tokens 20``) chunks are
small.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import actshard

KINDS = ("flat", "plain", "packed")
LAYER = 5
BATCH = 4096


def block_of_rows(rng: np.random.Generator, count: int, width: int) -> NDArray[np.generic]:
    """Rows whose exponents have the entropy of a residual stream."""
    scales = np.exp2(np.random.default_rng(1).normal(0, 1.2, width)).astype(np.float32)
    return (rng.standard_normal((count, width), np.float32) * scales).astype(ml_dtypes.bfloat16)


def create(path: Path, kind: str, width: int) -> actshard.Writer:
    """A writer of a kind of store."""
    if kind == "flat":
        return actshard.create(path, "safetensors", layers=[LAYER], d_model=width, dtype="bfloat16")
    pack: Literal["lossless"] | None = "lossless" if kind == "packed" else None
    return actshard.create(path, "zarr", version=3, pack=pack, layers=[LAYER], d_model=width, dtype="bfloat16")


def write(path: Path, kind: str, size: int, width: int, tokens: int) -> float:
    """Writes a store; returns bytes of rows per second."""
    per_block = max((8 << 20) // (2 * width * tokens), 1)
    blocks = [
        block_of_rows(np.random.default_rng(seed), per_block * tokens, width).reshape(per_block, tokens, width)
        for seed in range(8)
    ]
    count = max(size // blocks[0].nbytes, 1)
    start_time = time.perf_counter()
    with create(path, kind, width) as writer:
        for number in range(count):
            writer.append(blocks[number % len(blocks)][:, None])
    return count * blocks[0].nbytes / (time.perf_counter() - start_time)


def drop(path: Path) -> None:
    """Drops a folder's files from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stream(path: Path | str, options: dict[str, object] | None = None, memory: str = "64MiB") -> float:
    """Bytes per second of one epoch in windows."""
    store = actshard.open(path, storage_options=options)
    size, start_time = 0, time.perf_counter()
    for batch in store.stream(LAYER, BATCH, shuffle="window", seed=1, memory=memory):
        size += batch.activations.nbytes
    return size / (time.perf_counter() - start_time)


@contextmanager
def link(folder: Path) -> Iterator[Callable[[Path], float]]:
    """Streams of stores in ``folder`` over a slow link."""
    command = [sys.executable, "-m", "benches.slow_server", str(folder.parent), "--latency", "0.03", "--total", "200e6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
            options: dict[str, object] = {"endpoint_url": url, "anon": True, "region": "us-east-1"}
            yield lambda path: stream(f"s3://{folder.name}/{path.name}", options, "256MiB")
        finally:
            process.terminate()


def gather(path: Path, count: int) -> float:
    """Bytes per second of random rows."""
    store = actshard.open(path)
    rng = np.random.default_rng(2)
    examples = rng.integers(0, len(store), count)
    tokens = rng.integers(0, int(store.token_counts[0]), count)
    start_time = time.perf_counter()
    rows = store.gather(LAYER, examples, tokens)
    return rows.nbytes / (time.perf_counter() - start_time)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benches.packed")
    parser.add_argument("--folder", help="where the stores are written (default: a temporary one)")
    parser.add_argument("--megabytes", type=int, default=400, help="megabytes of rows (default: 400)")
    parser.add_argument("--width", type=int, default=1024, help="values of a row (default: 1024)")
    parser.add_argument("--tokens", type=int, default=512, help="rows of an example (default: 512)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement (default: 3)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="actshard-packed-", dir=options.folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = measure(folder, options.megabytes << 20, options.width, options.tokens, options.repeats)
        print(f"{options.megabytes} MB of bfloat16 rows, {options.width} values each, {options.tokens} per example\n")
        print(
            "| | flat MB/s | plain | packed | plain / flat | packed / flat | packed / plain |\n|---|---|---|---|---|---|---|"
        )
        for what, rates in table.items():
            flat, plain, packed = (rates[kind] / 1e6 for kind in KINDS)
            ratios = f"{plain / flat:.2f} | {packed / flat:.2f} | {packed / plain:.2f}"
            print(f"| {what} | {flat:,.0f} | {plain:,.0f} | {packed:,.0f} | {ratios} |")
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, size: int, width: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """The best rate of each measurement and kind of store."""
    table: dict[str, dict[str, float]] = {"create": dict.fromkeys(KINDS, 0.0)}
    paths = {kind: folder / kind for kind in KINDS}
    for _ in range(repeats):
        for kind, path in paths.items():
            shutil.rmtree(path, ignore_errors=True)
            table["create"][kind] = max(table["create"][kind], write(path, kind, size, width, tokens))
    stores = [actshard.open(path) for path in paths.values()]
    expected, *others = [np.asarray(store.sequence(len(store) // 2, LAYER)).view(np.uint16) for store in stores]
    if not all(np.array_equal(expected, other) for other in others):
        raise AssertionError("the stores differ")
    works: dict[str, Callable[[Path], float]] = {
        "window stream": stream,
        "16,384 random rows": lambda path: gather(path, 16_384),
        "512 random rows": lambda path: gather(path, 512),
    }
    for what, work in works.items():
        for state in ("hot", "cold"):
            rates = table.setdefault(f"{what}, {state}", dict.fromkeys(KINDS, 0.0))
            for _ in range(repeats):
                for kind, path in paths.items():
                    if state == "cold":
                        drop(path)
                    rates[kind] = max(rates[kind], work(path))
    with link(folder) as stream_far:
        table["window stream, 200 MB/s, 30 ms"] = {kind: stream_far(path) for kind, path in paths.items()}
    return table


if __name__ == "__main__":
    main()
