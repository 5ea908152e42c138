"""Counts that grow with examples, tokens, shards, layers and threads, and lines through them: the numbers of docs/scaling.md.

``python -m benches.scaling`` prints all tables, ``python -m benches.scaling shards threads`` some. It measures memory and counts
system calls (with ``strace``), no times, so a busy machine gives the same numbers.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 16_384
WIDTH = 64
THREADS = (1, 2, 4, 8, 16, 32, 64)
SHARDS = (1, 10, 100, 400)


def anonymous() -> int:
    """Anonymous memory of this process, in bytes."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The intercept and slope of the least-squares line."""
    x, y = np.array(points, np.float64).T
    slope, intercept = np.polyfit(x, y, 1)
    return float(intercept), float(slope)


def show(title: str, names: list[str], rows: list[list[object]]) -> None:
    """Prints a table in Markdown."""
    print(f"\n### {title}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(f"| {' | '.join(f'{x:,.2f}' if isinstance(x, float) else str(x) for x in row)} |")


def _child(code: str, *arguments: object, threads: int = 2, strace: bool = False) -> tuple[str, dict[str, int]]:
    """Runs a function of this module in a process of its own; returns its output, and its system calls with ``strace``."""
    command = [sys.executable, "-W", "ignore", "-m", "benches.scaling", "child", code, *map(str, arguments)]
    env = {**os.environ, "ACTSHARD_NUM_THREADS": str(threads)}
    with tempfile.NamedTemporaryFile() as counts:
        traced = ["strace", "-f", "-c", "-o", counts.name] if strace else []
        out = subprocess.run([*traced, *command], env=env, capture_output=True, text=True, check=True).stdout
        found = {}
        for text in Path(counts.name).read_text().splitlines():
            fields = text.split()
            if len(fields) >= 5 and fields[3].isdigit():
                found[fields[-1]] = int(fields[3])
    found.pop("total", None)
    return out, found


def _calls(code: str, *arguments: object, threads: int = 2) -> dict[str, float]:
    """System calls of one call of a function, on average: of a process that calls it 10 times less one that never does."""
    few = _child(code, *arguments, 0, threads=threads, strace=True)[1]
    many = _child(code, *arguments, 10, threads=threads, strace=True)[1]
    names = sorted(set(few) | set(many))
    return {name: (many.get(name, 0) - few.get(name, 0)) / 10 for name in names}


def _files(folder: Path, shards: int, rows: int) -> list[tuple[str, int]]:
    for s in range(shards):
        path = folder / str(s)
        if not path.exists():
            np.full((rows, WIDTH), s, np.float32).tofile(path)
    return [(str(folder / str(s)), rows) for s in range(shards)]


def _strided(folder: str, shards: str, io: str = "mmap") -> tuple[Any, int]:
    from actshard._native import Rows

    per = 4_096 // int(shards) * 10
    files = _files(Path(folder), int(shards), per)
    rows = Rows.strided(
        files, num_examples=per * len(files), examples_per_file=per, num_groups=1, num_tokens=1, width=WIDTH,
        dtype="F32", descr=np.dtype(np.float32), io=io,
    )  # fmt: skip
    return rows, per * len(files)


def _gathers(folder: str, shards: str, io: str, count: str, times: str) -> None:
    """Gathers random rows a number of times, after two unmeasured ones."""
    rows, n = _strided(folder, shards, io)
    e = np.random.default_rng(0).integers(0, n, int(count))
    out = np.empty((len(e), WIDTH), np.float32)
    tokens = np.zeros(len(e), np.int64)
    for _ in range(2 + int(times)):
        rows.gather(0, e, tokens, out, None)


def shards() -> None:
    """System calls of a gather as a function of shards; files all open, and more files than descriptors."""
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for io in ("mmap", "pread"):
            for count in (1, ROWS):
                for s in SHARDS:
                    calls = _calls("_gathers", f"{folder}/{s}" if _made(folder, s) else "", s, io, count, threads=1)
                    kept = {k: v for k, v in calls.items() if v >= 0.5}
                    table.append([io, count, s, sum(kept.values()), ", ".join(f"{k} {v:g}" for k, v in kept.items())])
    show("System calls of a gather, by shards (one thread, hot)", ["io", "rows", "shards", "calls", "which"], table)


def _made(folder: str, name: object) -> bool:
    Path(folder, str(name)).mkdir(exist_ok=True)
    return True


def threads() -> None:
    """System calls of a hot gather of 16,384 rows as a function of threads."""
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for t in THREADS:
            calls = _calls("_gathers", folder, 10, "mmap", ROWS, threads=t)
            other = sum(v for k, v in calls.items() if k not in ("futex", "fstat"))
            table.append([t, calls.get("futex", 0.0), calls.get("fstat", 0.0), other])
    show(
        "System calls of a gather of 16,384 rows from 10 shards, by threads",
        ["threads", "futex", "fstat", "others"],
        table,
    )


def _example_lists(n: int, tokens: int, order: str) -> tuple[np.ndarray, ...]:
    """The address columns of n examples as lmprobe writes them: the last token in a shard of its own."""
    rng = np.random.default_rng(0)
    lengths = np.full(n, tokens) if order == "equal lengths" else rng.integers(tokens // 2, tokens * 3 // 2 + 1, n)
    lengths = np.maximum(lengths, 2)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    last = ends[1:] - 1
    bodies = ends[:-1] - np.arange(n)
    if order == "shuffled examples":
        moved = rng.permutation(n)
        lengths, bodies, number = lengths[moved], bodies[moved], moved
        ends = np.concatenate([[0], np.cumsum(lengths)])
        last = ends[1:] - 1
    else:
        number = np.arange(n)
    rows = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths) + np.repeat(bodies, lengths)
    if order == "shuffled tokens":
        rows = rng.permutation(rows)
    ids = np.ones(len(rows), np.int64)
    ids[last], rows[last] = 0, number
    return np.zeros(n, np.int64), number, ends, ids, ends, rows


def _table(n: int, tokens: int, order: str, files: int = 2) -> float:
    """Bytes of the table of n examples."""
    from actshard._native import Addresses, Rows

    addresses = Addresses(files)
    if tokens == 0:
        number = np.arange(n) if order == "equal lengths" else np.random.default_rng(0).permutation(n)
        addresses.push(np.zeros(n, np.int64), number)
    else:
        shard, row, *lists = _example_lists(n, tokens, order)
        addresses.push(shard, row, tuple(lists))  # type: ignore[arg-type]  # always three lists
    paths = [(f"/none/{i}", "x") for i in range(files)]
    rows = Rows.table(
        paths, addresses, num_groups=1, width=8, dtype="F32", descr=np.dtype(np.float32), io="mmap"
    )  # fmt: skip
    return float(rows.table_bytes())


def examples() -> None:
    """Bytes of an lmprobe table as a function of examples and tokens."""
    table: list[list[object]] = []
    for order in ("equal lengths", "any lengths", "shuffled examples", "shuffled tokens"):
        for tokens in (0, 16, 128):
            if tokens == 0 and order in ("any lengths", "shuffled tokens"):
                continue
            points = [(n, _table(n, tokens, order)) for n in (6_400, 12_800, 25_600)]
            start, slope = line(points)
            what = "pooled" if tokens == 0 else f"{tokens}"
            table.append([order, what, slope, start, slope * 1e7 / 1e6, slope * 1e8 / 1e9])
    names = ["order", "tokens", "bytes per example", "bytes fixed", "MB for 10^7", "GB for 10^8"]
    show("Table of addresses, by examples and tokens", names, table)


def _resident(kind: str, n: str) -> None:
    """Prints the growth of anonymous memory by one object of a size."""
    make: dict[str, tuple[int, Callable[[int], object]]] = {
        "files of a table": (10, _file_table),
        "examples of a strided layout": (10, _strided_of),
    }
    small, one = make[kind]
    one(small)  # imports, and memory that is allocated once
    gc.collect()
    before = anonymous()
    kept = one(int(n))
    gc.collect()
    print(json.dumps(anonymous() - before))
    del kept


def _file_table(files: int) -> object:
    from actshard._native import Addresses, Rows

    addresses = Addresses(files)
    addresses.push(np.zeros(1, np.int64), np.zeros(1, np.int64))
    paths = [
        (f"/data/tensors/hidden_layer{i // 1000:03}_shard{i % 1000:03}.safetensors", "hidden") for i in range(files)
    ]
    return Rows.table(paths, addresses, num_groups=1, width=8, dtype="F32", descr=np.dtype(np.float32), io="mmap")


def _strided_of(examples: int) -> object:
    from actshard._native import Rows

    return Rows.strided(
        [("/none", examples)], num_examples=examples, examples_per_file=examples, num_groups=1, num_tokens=1,
        width=8, dtype="F32", descr=np.dtype(np.float32), io="mmap",
    )  # fmt: skip


def memory() -> None:
    """Anonymous memory as a function of files and examples."""
    table: list[list[object]] = []
    for kind, sizes in (
        ("files of a table", (20_000, 60_000, 100_000)),
        ("examples of a strided layout", (10**6, 10**9, 10**12)),
    ):
        points = [(n, float(json.loads(_child("_resident", kind, n)[0]))) for n in sizes]
        start, slope = line(points)
        table.append([kind, ", ".join(f"{n:.0e}: {b / 1e6:.1f} MB" for n, b in points), slope, start / 1e6])
    show("Anonymous memory", ["of", "measured", "bytes each", "MB fixed"], table)


def _open(folder: str, times: str) -> None:
    import actshard

    for _ in range(2 + int(times)):
        actshard.open(folder)


def opening() -> None:
    """System calls of opening a dataset of each format, by shards."""
    import actshard

    table: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("saev", "max_tokens_per_shard"), ("lmprobe", None), ("zarr", None), ("pickle", None)):
            for n in (8, 64):
                path = Path(folder, f"{name}{n}")
                few = {options: 8} if options else {}
                with actshard.create(path, name, layers=[0], d_model=8, **few) as writer:  # type: ignore[arg-type]  # one option
                    writer.append([np.zeros((1, 4, 8), np.float32)] * n)
                calls = _calls("_open", writer.path)
                kept = {k: v for k, v in sorted(calls.items(), key=lambda kv: -kv[1])[:5] if v >= 1}
                top = ", ".join(f"{k} {v:g}" for k, v in kept.items())
                table.append([name, n, sum(v for v in calls.values() if v > 0), top])
    show(
        "System calls of open(), by examples (saev: a shard for every 2)",
        ["format", "examples", "calls", "most"],
        table,
    )


def _streamed(folder: str, pool: str, batch: str, layers: str) -> None:
    """Prints the most anonymous memory that a window stream of data outside the page cache took, and its threads."""
    import actshard
    from benches.measure import drop_page_cache

    store = actshard.open(folder)
    store.gather(0, [0], [0])
    drop_page_cache([Path(file) for file in sorted(Path(store.path).glob("acts*.bin"))])
    ended, peak, most = threading.Event(), [0], [0]
    before = anonymous()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], anonymous())
            most[0] = max(most[0], sum(1 for _ in Path("/proc/self/task").iterdir()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    chosen: Any = list(range(int(layers))) if int(layers) > 1 else 0
    for _ in store.stream(chosen, int(batch), shuffle="window", memory=int(pool), reuse=True):
        pass
    ended.set()
    watcher.join()
    print(json.dumps([peak[0] - before, most[0] - 1]))


def streams() -> None:
    """Anonymous memory and threads of a window stream that reads from a disk, by pool, batch, layers and threads."""
    import actshard

    table: list[list[object]] = []
    # Not on tmpfs, whose files are always cached: cached windows need no pool.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        with actshard.create(Path(folder, "run"), "saev", layers=[0, 1, 2], d_model=512, num_examples=2_000,
                             tokens_per_example=64) as writer:  # fmt: skip
            for _ in range(20):
                writer.append(np.zeros((100, 3, 64, 512), np.float32))
        mib = 1 << 20
        cases = [(16 * mib, 1024, 1, 2), (64 * mib, 1024, 1, 2), (128 * mib, 1024, 1, 2), (64 * mib, 4096, 1, 2),
                 (64 * mib, 16384, 1, 2), (64 * mib, 1024, 3, 2), (64 * mib, 1024, 1, 16), (64 * mib, 1024, 1, 64)]  # fmt: skip
        for pool, batch, layers, count in cases:
            found = _child("_streamed", writer.path, pool, batch, layers, threads=count)[0]
            peak, threads_then = json.loads(found.splitlines()[-1])
            bytes_of = batch * layers * 512 * 4
            table.append([pool // mib, f"{bytes_of / mib:g}", layers, count, peak / mib, threads_then])
    names = ["pool MiB", "batch MiB", "layers", "ACTSHARD_NUM_THREADS", "most MiB", "threads then"]
    show("A window stream from a disk", names, table)


def _tokens(folder: str, windows: str, times: str) -> None:
    """Gets batches of random windows a number of times, after two unmeasured ones."""
    from actshard import tokens

    dataset = tokens.TokenSeqDataset(tokens.open_cache(folder), 128)
    rng = np.random.default_rng(0)
    for _ in range(2 + int(times)):
        dataset.get_batch(rng.integers(0, len(dataset), int(windows)))


def _token_cache(folder: str) -> None:
    """Prints the growth of anonymous memory by an open cache of which every shard was read."""
    from actshard import tokens

    def opened(count: int) -> object:
        dataset = tokens.TokenSeqDataset(tokens.open_cache(folder), 128)
        dataset.get_batch(np.arange(0, len(dataset), max(1, len(dataset) // count)))
        return dataset

    kept: list[object] = [opened(1)]
    gc.collect()
    before = anonymous()
    kept.append(opened(4_000))
    gc.collect()
    print(json.dumps(anonymous() - before))


def tokens() -> None:
    """System calls and memory of a token cache, by shards and windows."""
    from benches.tokens import _many_shards

    table: list[list[object]] = []
    points: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 10, 100, 400):
            path = Path(folder, str(count))
            _many_shards(path, count, 1_000_000 // count // 400 * 400)
            opening_calls = _calls("_open_tokens", path)
            memory_then = float(json.loads(_child("_token_cache", path)[0]))
            points.append((count, memory_then))
            batch = [sum(v for v in _calls("_tokens", path, windows).values() if v > 0) for windows in (1, 32, 256)]
            table.append([count, sum(v for v in opening_calls.values() if v > 0), *batch, memory_then / 1e3])
    start, slope = line(points)
    names = ["shards", "calls to open", "1 window", "32 windows", "256 windows", "kB of memory, all shards read"]
    show("A token cache", names, table)
    print(f"\nmemory: {start / 1e3:.0f} kB + {slope / 1e3:.1f} kB per shard that was read")


def _open_tokens(folder: str, times: str) -> None:
    from actshard import tokens

    for _ in range(2 + int(times)):
        tokens.open_cache(folder)


TABLES = {f.__name__: f for f in (examples, memory, shards, threads, opening, streams, tokens)}


def _names(asked: list[str]) -> Iterator[str]:
    yield from asked or TABLES


def main(arguments: list[str]) -> None:
    """Prints the tables asked for, or runs a child's function."""
    if arguments[:1] == ["child"]:
        globals()[arguments[1]](*arguments[2:])
        return
    for name in _names(arguments):
        TABLES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
