"""Writing, converting, verifying: compared with the tools used today, and with the disk."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import NotPermitted, Row, drop_page_cache
from benches.sizes import TINY, size

SAEV_SHAPE = size((50, 3, 197, 768), (5, 3, 17, 768))
"""A batch of 91 MB; 40 of them are 3.6 GB."""
BATCHES = size(40, 4)
EPS = size(500, 10)
ZARR_SHAPE = size((8, 6, 512, 4096), (2, 2, 256, 512))
ZARR_BATCHES = size(7, 2)
PAGES = size(64, 1) << 20
POOLED_SHAPE = size((4096, 4, 4096), (64, 4, 256))
POOLED_BATCHES = size(4, 2)


def _place() -> Path:
    folder = data.ROOT / "written"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Freed disk space is returned in the background, which would disturb the next measurement.
    if not TINY:
        os.sync()
        settle()
    return folder


def settle() -> None:
    """Waits until the disk is idle for a second, at most 30 seconds."""
    disks = Path("/proc/diskstats")
    deadline = time.monotonic() + 30
    before, quiet = "", 0
    while quiet < 4 and time.monotonic() < deadline:
        now = disks.read_text() if disks.exists() else ""
        quiet = quiet + 1 if now == before else 0
        before = now
        time.sleep(0.25)


def _several(engines: dict[str, Callable[[Path], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each engine, run in turn into empty folders. The first turn is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        for name, run in engines.items():
            folder = _place()
            began = time.perf_counter()
            run(folder)
            if turn:
                times[name].append(time.perf_counter() - began)
    return times


def _rate(
    workload: str, state: str, peer: str, times: dict[str, list[float]], size: int, target: float | None, note: str = ""
) -> Row:
    theirs, ours = (size / 1e6 / statistics.median(times[name]) for name in (peer, "actshard"))
    ratio = ours / theirs
    met = None if target is None else ratio >= target
    return Row(
        workload, state, peer, theirs, ours, "MB/s", ratio, f">= {target:g}x" if target else "", met, note, spread=times
    )


def saev(repeats: int) -> Iterator[Row]:
    """3.6 GB of float32 in four shards, synced: np.memmap as in saev's writer, and dd."""
    batch = np.random.default_rng(0).standard_normal(SAEV_SHAPE, np.float32)
    size = batch.nbytes * BATCHES

    def memmap(folder: Path) -> None:
        shard = None
        for i in range(BATCHES):
            row = i * len(batch)
            if row % EPS == 0:
                if shard is not None:
                    shard.flush()
                path = folder / f"acts{row // EPS:06}.bin"
                shard = np.memmap(path, np.float32, "w+", shape=(EPS, *SAEV_SHAPE[1:]))
            assert shard is not None
            shard[row % EPS : row % EPS + len(batch)] = batch
        assert shard is not None
        shard.flush()

    def ours(folder: Path) -> Path:
        with actshard.create(
            folder, "saev", layers=[2, 7, 11], d_model=768, max_tokens_per_shard=EPS * 3 * SAEV_SHAPE[2]
        ) as writer:
            for _ in range(BATCHES):
                writer.append(batch)
        return writer.path

    def dd(folder: Path) -> None:
        count = size >> 20
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={folder}/zeros", "bs=1M", f"count={count}", "conv=fdatasync"],
            check=True,
            capture_output=True,
        )

    folder = _place()
    memmap(folder)
    made = ours(folder)
    for i in range(BATCHES * len(batch) // EPS):
        name = f"acts{i:06}.bin"
        same = np.array_equal(np.fromfile(made / name, np.uint8), np.fromfile(folder / name, np.uint8))
        assert same, "outputs differ; nothing is timed before they are equal"
    times = _several({"np.memmap": memmap, "actshard": ours, "dd": dd}, min(repeats, 5))
    yield _rate("write: saev, 3.6 GB", "durable", "np.memmap", times, size, 1.5)
    yield _rate("write: saev, 3.6 GB", "durable", "dd", times, size, 0.8, "dd writes zeros, with fdatasync")


def zarr(repeats: int) -> Iterator[Row]:
    """1.4 GB of float16 in chunks of 1 MiB."""
    import zarr

    batch = np.random.default_rng(0).standard_normal(ZARR_SHAPE, np.float32).astype(np.float16)
    n, (_, layers, tokens, hidden) = ZARR_BATCHES * len(batch), ZARR_SHAPE

    def theirs(folder: Path) -> None:
        group = zarr.open_group(str(folder / "theirs.zarr"), mode="w", zarr_format=2)
        array = group.create_array(
            "arrays/activations",
            shape=(n, layers, tokens, hidden),
            chunks=(1, 1, 128, hidden),
            dtype="f2",
            compressors=None,
            filters=None,
        )
        for i in range(0, n, len(batch)):
            array[i : i + len(batch)] = batch

    def ours(folder: Path) -> None:
        with actshard.create(
            folder / "ours.zarr", "zarr", layers=range(layers), d_model=hidden, chunk_tokens=128
        ) as writer:
            for _ in range(ZARR_BATCHES):
                writer.append(batch)

    # O_DIRECT writes from memory that is aligned to pages.
    aligned = mmap.mmap(-1, PAGES)
    aligned[:] = batch.tobytes()[: len(aligned)]
    pages = memoryview(aligned)

    def bare(folder: Path) -> None:
        """Lower bound: writes the same number of equally large files from contiguous memory."""

        def some(first: int) -> None:
            for i in range(first, (batch.nbytes * ZARR_BATCHES) >> 20, 4):
                file = os.open(folder / f"{i}.0.0.0", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
                os.pwrite(file, pages[(i % (len(pages) >> 20)) << 20 :][: 1 << 20], 0)
                os.close(file)

        threads = [threading.Thread(target=some, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    folder = _place()
    theirs(folder)
    ours(folder)
    a = zarr.open_group(str(folder / "theirs.zarr"), mode="r")["arrays/activations"]
    b = zarr.open_group(str(folder / "ours.zarr"), mode="r")["arrays/activations"]
    assert a.shape == b.shape
    assert all(np.array_equal(a[i], b[i]) for i in range(n)), "outputs differ"
    engines = {"zarr-python 3": theirs, "actshard": ours, "files alone": bare}
    times = _several(engines, min(repeats, 5))
    size = batch.nbytes * ZARR_BATCHES
    yield _rate(
        "write: zarr, 1.4 GB", "ours durable", "files alone", times, size, None, "O_DIRECT, 4 threads, no metadata"
    )
    note = "ours is on the disk when it is closed; zarr-python leaves it in the page cache"
    yield _rate("write: zarr, 1.4 GB", "ours durable", "zarr-python 3", times, size, 3, note)


def _together(running: list[subprocess.Popen[bytes]]) -> list[bytes]:
    """Starts all processes at once and returns their outputs."""
    for p in running:
        assert p.stdin is not None
        p.stdin.write(b"go\n")
        p.stdin.flush()
    return [p.communicate()[0] for p in running]


def processes(repeats: int) -> Iterator[Row]:
    """1, 2 and 4 processes, each writing a part of one Zarr run, 0.7 GB in total."""
    each = {}
    for count in (1, 2, 4):
        rates = []
        for _ in range(min(repeats, 3)):
            folder = _place()
            running = [
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "benches.writing", "part", str(folder), str(i), str(count)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                for i in range(count)
            ]
            for p in running:  # all have created their data and wait
                assert p.stdout is not None
                p.stdout.readline()
            spans = [json.loads(out) for out in _together(running)]
            seconds = max(s["end"] for s in spans) - min(s["begin"] for s in spans)
            rates.append(sum(s["bytes"] for s in spans) / 1e6 / seconds)
            actshard.merge(folder / "run")
        each[count] = statistics.median(rates)
    one = each[1]
    for count in (2, 4):
        yield Row(
            f"write: {count} processes into one run",
            "durable",
            "one process",
            one,
            each[count],
            "MB/s",
            each[count] / one,
            "",
            None,
            f"1, 2, 4: {', '.join(f'{each[c]:,.0f}' for c in each)} MB/s together",
        )


def pooled(repeats: int) -> Iterator[Row]:
    """1.07 GB of pooled rows in lmprobe's format: safetensors and pyarrow, from contiguous arrays."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import save_file

    batch = np.random.default_rng(0).standard_normal(POOLED_SHAPE, np.float32)
    n = POOLED_BATCHES * len(batch)
    texts = [f"prompt {i}" for i in range(n)]

    def theirs(folder: Path) -> None:
        (folder / "tensors").mkdir()
        for layer in range(POOLED_SHAPE[1]):
            whole = np.concatenate([batch[:, layer]] * POOLED_BATCHES)
            save_file(
                {f"hidden.layer_{layer}": whole}, folder / f"tensors/hidden_layer{layer:03d}_shard000.safetensors"
            )
        index = {
            "text": texts,
            "label": pa.array([0] * n, pa.int32()),
            "num_tokens": pa.nulls(n, pa.int32()),
            "shard_index": pa.array([0] * n, pa.int32()),
            "row_offset": pa.array(np.arange(n, dtype=np.int32)),
        }
        pq.write_table(pa.table(index), folder / "train.parquet")

    def ours(folder: Path) -> None:
        with actshard.create(
            folder / "ours", "lmprobe", layers=range(POOLED_SHAPE[1]), d_model=POOLED_SHAPE[2]
        ) as writer:
            for i in range(POOLED_BATCHES):
                part = slice(i * len(batch), (i + 1) * len(batch))
                writer.append(batch, columns={"text": texts[part], "label": [0] * len(batch)})

    folder = _place()
    theirs(folder)
    ours(folder)
    from safetensors.numpy import load_file

    name = "tensors/hidden_layer002_shard000.safetensors"
    a, b = load_file(folder / name), load_file(folder / "ours" / name)
    assert np.array_equal(a["hidden.layer_2"], b["hidden.layer_2"]), "outputs differ"
    times = _several({"safetensors + pyarrow": theirs, "actshard": ours}, min(repeats, 5))
    note = "ours is on the disk when it is closed"
    yield _rate(
        "write: lmprobe pooled, 1.07 GB",
        "ours durable",
        "safetensors + pyarrow",
        times,
        batch.nbytes * POOLED_BATCHES,
        1,
        note,
    )


def convert(repeats: int) -> Iterator[Row]:
    """.pkl.gz to saev, compared with decoding alone; saev to zarr float16, compared with the disk."""
    source = data.pickles("gz4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(source)
    size = int(store.token_counts.sum()) * len(store.layers) * store.d_model * 4

    def decode(_: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = actshard.open(source, decoded_memory="160MiB", io="pread")
        units = again.contents.units
        assert units is not None
        for first, last in itertools.pairwise(units):
            for layer in again.layers:
                again.sequences(range(first, last), layer)

    def to_saev(folder: Path) -> None:
        actshard.convert(source, folder / "saev", "saev")

    folder = _place()
    to_saev(folder)
    made = actshard.open(folder / "saev")
    assert all(
        np.array_equal(made.sequence(e, la), store.sequence(e, la))
        for e in range(0, len(store), 7)
        for la in store.layers
    )
    times = _several({"decoding alone": decode, "actshard": to_saev}, min(repeats, 5))
    yield _rate("convert: .pkl.gz to saev", "hot", "decoding alone", times, size, 0.9)

    big = data.saev()
    shards = sorted(big.glob("acts*.bin"))
    size = sum(p.stat().st_size for p in shards)
    rates: dict[str, list[float]] = {"read": [], "write": [], "actshard": [], "rss": []}
    for _ in range(min(repeats, 3)):
        with contextlib.suppress(NotPermitted):
            drop_page_cache(shards)
        began = time.perf_counter()
        for path in shards:
            subprocess.run(
                ["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct"], check=True, capture_output=True
            )
        rates["read"].append(size / 1e6 / (time.perf_counter() - began))
        folder = _place()
        began = time.perf_counter()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={folder}/zeros", "bs=1M", f"count={size >> 20}", "conv=fdatasync"],
            check=True,
            capture_output=True,
        )
        rates["write"].append(size / 1e6 / (time.perf_counter() - began))
        folder = _place()
        with contextlib.suppress(NotPermitted):
            drop_page_cache(shards)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benches.writing", "convert", str(big), str(folder / "zarr")],
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads(done.stdout)
        rates["actshard"].append(size / 1e6 / found["seconds"])
        rates["rss"].append(found["rss"])
    slower = min(statistics.median(rates["read"]), statistics.median(rates["write"]))
    ours = statistics.median(rates["actshard"])
    note = f"disk: reads {statistics.median(rates['read']):,.0f}, writes {statistics.median(rates['write']):,.0f} MB/s"
    yield Row(
        "convert: saev to zarr float16, 3.6 GB", "cold", "the disk, slower way", slower, ours, "MB/s", ours / slower,
        ">= 0.7x", ours / slower >= 0.7, note, spread=rates,
    )  # fmt: skip
    rss = max(rates["rss"]) / 1e6
    yield Row("convert: peak RSS of that", "cold", "", None, rss, "MB", None, "< 512 MB", rss < 512)
    a = actshard.open(folder / "zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        b = actshard.open(big)
    for e in range(0, len(b), 101):
        assert np.array_equal(a.sequence(e, 7), b.sequence(e, 7).astype(np.float16)), "outputs differ"


def verify(repeats: int) -> Iterator[Row]:
    """Checks every value of 3.6 GB in the page cache, compared with sha256sum of the same bytes."""
    big = data.saev()
    shards = sorted(big.glob("acts*.bin"))
    size = sum(p.stat().st_size for p in shards)
    times: dict[str, list[float]] = {"sha256sum": [], "actshard": []}
    for turn in range(min(repeats, 5) + 1):
        began = time.perf_counter()
        subprocess.run(["sha256sum", *map(str, shards)], check=True, capture_output=True)
        middle = time.perf_counter()
        report = actshard.verify(big, deep=True)
        if turn:
            times["sha256sum"].append(middle - began)
            times["actshard"].append(time.perf_counter() - middle)
        assert report.checked["rows"] * SAEV_SHAPE[3] * 4 == size
    yield _rate("verify --deep, 3.6 GB", "hot", "sha256sum", times, size, 2)


def statistics_of(repeats: int) -> Iterator[Row]:
    """All statistics of 3.6 GB in the page cache, beside a deep check of the same bytes, and numpy's mean, std, min, max, norms."""
    big = data.saev()
    shards = sorted(big.glob("acts*.bin"))
    size = sum(p.stat().st_size for p in shards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(big)
    times: dict[str, list[float]] = {"verify --deep": [], "numpy": [], "actshard": []}
    for turn in range(min(repeats, 5) + 1):
        steps = (
            ("verify --deep", partial(actshard.verify, big, deep=True)),
            ("numpy", lambda: [_by_numpy(shards, number) for number in range(len(store.layers))]),
            ("actshard", lambda: [store.stats(layer, tokens="all") for layer in store.layers]),
        )
        for name, step in steps:
            began = time.perf_counter()
            found: Any = step()
            if turn:
                times[name].append(time.perf_counter() - began)
            if name == "numpy":
                expected = found
        for stats, layer in zip(found, expected, strict=True):
            for mine, theirs in zip((stats.mean, stats.std, stats.min, stats.max, stats.mean_norm), layer, strict=True):
                assert np.allclose(mine, theirs, rtol=1e-6, atol=1e-6), "outputs differ"
    yield _rate("stats, 3.6 GB", "hot", "verify --deep", times, size, 1 / 1.3, "a deep check of the same bytes")
    yield _rate("stats, 3.6 GB", "hot", "numpy", times, size, None, "mean, std, min, max, mean norm; ours has more")


def _by_numpy(shards: list[Path], layer: int) -> tuple[Any, ...]:
    """Sums in float64 over blocks of rows."""
    shape = (len(data.SAEV["layers"]), data.SAEV["content"] + 1, data.SAEV["d_model"])
    width = shape[-1]
    rows, total, squares, norms = 0, np.zeros(width), np.zeros(width), 0.0
    low, high = np.full(width, np.inf), np.full(width, -np.inf)
    for shard in shards:
        whole = np.memmap(shard, np.float32, "r").reshape(-1, *shape)
        for at in range(0, len(whole), 50):
            block = whole[at : at + 50, layer].reshape(-1, width).astype(np.float64)
            rows += len(block)
            total += block.sum(0)
            powers = block * block
            squares += powers.sum(0)
            norms += float(np.sqrt(powers.sum(1)).sum())
            low, high = np.minimum(low, block.min(0)), np.maximum(high, block.max(0))
    mean = total / rows
    return mean, np.sqrt(squares / rows - mean**2), low, high, norms / rows


def _part(folder: str, part: str, parts: str) -> None:
    shape = size((8, 6, 512, 4096), (8, 2, 128, 512))
    batch = np.random.default_rng(int(part)).standard_normal((1, *shape[1:]), np.float32).astype(np.float16)
    batch = np.repeat(batch, shape[0], axis=0)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.time()
    with actshard.create(
        Path(folder) / "run",
        "zarr",
        layers=range(shape[1]),
        d_model=shape[3],
        part=(int(part), int(parts)),
        chunk_tokens=128,
    ) as writer:
        for _ in range(8 // int(parts)):
            writer.append(batch)
    print(json.dumps({"begin": began, "end": time.time(), "bytes": batch.nbytes * (8 // int(parts))}))


def _convert(source: str, target: str) -> None:
    began = time.perf_counter()
    actshard.convert(source, target, "zarr", dtype="float16")
    seconds = time.perf_counter() - began
    # Not ru_maxrss, which is inherited from the parent through exec.
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "rss": rss}))


if __name__ == "__main__":
    {"part": _part, "convert": _convert}[sys.argv[1]](*sys.argv[2:])
