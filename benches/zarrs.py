"""Zarr stores: slices of one (sample, layer), hot and cold, singly and sixteen at once, and the text's training pattern."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import NotPermitted, Row, drop_page_cache
from benches.sizes import size, turns

H, CHUNK = data.ZARR["hidden"], data.ZARR["chunk"]


PIPELINE = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


class Store:
    """The store through every engine. Each reads ``[sample, layer, 0:seq_len, :]``."""

    def __init__(self) -> None:
        self.path = data.zarr()
        self.chunks = str(self.path / "arrays/activations")
        self.ours = actshard.open(self.path)
        self.lengths = self.ours.token_counts.tolist()

    def random(self, n: int, seed: int) -> list[tuple[int, int]]:
        """Random pairs of sample and layer."""
        rng = np.random.default_rng(seed)
        return list(
            zip(*(rng.integers(0, k, n).tolist() for k in (len(self.lengths), data.ZARR["layers"])), strict=True)
        )

    def zarr_python(self) -> Callable[[int, int], Any]:
        """zarr-python 3."""
        import zarr

        array = zarr.open_group(str(self.path), mode="r")["arrays/activations"]
        return lambda i, layer: array[i, layer, 0 : self.lengths[i], :]

    def zarrs(self) -> Callable[[int, int], Any] | None:
        """zarr-python 3 with the codec pipeline of zarrs; None if it is not installed."""
        if importlib.util.find_spec("zarrs") is None:
            return None
        import zarr

        with zarr.config.set(PIPELINE):
            array = zarr.open_group(str(self.path), mode="r")["arrays/activations"]
        return lambda i, layer: array[i, layer, 0 : self.lengths[i], :]

    def tensorstore(self) -> Any:
        """An open TensorStore."""
        import tensorstore

        return tensorstore.open({"driver": "zarr", "kvstore": {"driver": "file", "path": self.chunks}}).result()

    def fromfile(self, i: int, layer: int) -> Any:
        """np.fromfile of each chunk."""
        n = self.lengths[i]
        out = np.empty((n, H), np.float16)
        for c in range(-(-n // CHUNK)):
            rows = min(CHUNK, n - c * CHUNK)
            read = np.fromfile(f"{self.chunks}/{i}.{layer}.{c}.0", np.float16, rows * H)
            out[c * CHUNK : c * CHUNK + rows] = read.reshape(rows, H)
        return out

    def preadv(self, i: int, layer: int, out: Any) -> Any:
        """open + preadv into reused memory."""
        n = self.lengths[i]
        for c in range(-(-n // CHUNK)):
            rows = min(CHUNK, n - c * CHUNK)
            file = os.open(f"{self.chunks}/{i}.{layer}.{c}.0", os.O_RDONLY)
            os.preadv(file, [out[c * CHUNK : c * CHUNK + rows]], 0)
            os.close(file)
        return out[:n]


def _each(read: Callable[[int, int], Any], queries: list[tuple[int, int]]) -> list[float]:
    times = []
    for i, layer in queries:
        began = time.perf_counter()
        kept = read(i, layer)
        times.append(time.perf_counter() - began)
        del kept
    return times


def _shown(times: list[float]) -> str:
    ordered = sorted(times)
    return f"median {statistics.median(times) * 1e3:.2f}, p95 {ordered[int(len(ordered) * 0.95)] * 1e3:.2f} ms"


def slices(repeats: int) -> Iterator[Row]:
    """Random slices of up to 4 MiB, singly, from the page cache: mean latency of 300, in turns."""
    store = Store()
    reused = np.ones((data.ZARR["tokens"], H), np.float16)
    ts = store.tensorstore()
    engines: dict[str, Callable[[int, int], Any]] = {
        "zarr-python 3": store.zarr_python(),
        "tensorstore": lambda i, layer: ts[i, layer, 0 : store.lengths[i], :].read().result(),
        "np.fromfile per chunk": store.fromfile,
        "actshard": lambda i, layer: store.ours.sequences([i], layer)[0],
        "open + preadv": lambda i, layer: store.preadv(i, layer, reused),
        "actshard out=": lambda i, layer: store.ours.sequence(i, layer, out=reused[: store.lengths[i]]),
    }
    piped = store.zarrs()
    if piped is not None:
        engines["zarr-python 3 with zarrs"] = piped
    for i, layer in store.random(20, 1):
        want = store.fromfile(i, layer)
        for name, read in engines.items():
            if not np.array_equal(np.asarray(read(i, layer)), want):
                raise AssertionError(f"{name} differs")
    runs: dict[str, list[list[float]]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        for name, read in engines.items():
            took = _each(read, store.random(size(300, 3), 7))
            if turn:
                runs[name].append(took)
    means = {name: statistics.median([statistics.fmean(t) for t in taken]) for name, taken in runs.items()}
    for peer, ours, state, target in (
        ("zarr-python 3", "actshard", "hot, fresh output", 4),
        ("zarr-python 3 with zarrs", "actshard", "hot, fresh output", 2),
        ("tensorstore", "actshard", "hot, fresh output", 2),
        ("np.fromfile per chunk", "actshard", "hot, fresh output", 1.2),
        ("open + preadv", "actshard out=", "hot, reused output", 1.3),
    ):
        if peer not in means:
            continue
        ratio = means[peer] / means[ours]
        shown, peers = (_shown([t for turn in runs[engine] for t in turn]) for engine in (ours, peer))
        yield Row(
            "zarr: slices up to 4 MiB, mean", state, peer, means[peer] * 1e3, means[ours] * 1e3, "ms", ratio, f">= {target:g}x",
            ratio >= target, note=f"{shown}; peer {peers}",
            spread={k: sorted(statistics.fmean(t) * 1e3 for t in runs[k]) for k in (peer, ours)},
        )  # fmt: skip


def _together(store: Store, ts: Any, batch: list[tuple[int, int]]) -> Any:
    """Reads slices at once: with tensorstore, or with actshard if ``ts`` is None."""
    if ts is None:
        return store.ours.sequences([i for i, _ in batch], [layer for _, layer in batch])
    return [f.result() for f in [ts[i, layer, 0 : store.lengths[i], :].read() for i, layer in batch]]


def _sixteen(store: Store, engine: str, seeds: Iterator[int], n: int) -> float:
    """Seconds for reading sixteen slices at once, n times."""
    ts = store.tensorstore() if engine == "tensorstore" else None
    total = 0.0
    for seed in range(n):
        batch = store.random(16, next(seeds))
        began = time.perf_counter()
        kept = _together(store, ts, batch)
        total += time.perf_counter() - began
        del kept, seed
    return total


def sixteen(repeats: int) -> Iterator[Row]:
    """Sixteen slices at once. Cold runs use separate processes."""
    store = Store()
    batch = store.random(16, 0)
    for (i, layer), got in zip(batch, store.ours.sequences(*map(list, zip(*batch, strict=True))), strict=True):
        if not np.array_equal(got, store.fromfile(i, layer)):
            raise AssertionError("sixteen slices differ")
    times: dict[str, list[float]] = {"tensorstore": [], "actshard": []}
    for turn in range(repeats + 1):
        for engine, taken in times.items():
            took = _sixteen(store, engine, iter(range(turn * 20, turn * 20 + 20)), turns(20))
            if turn:
                taken.append(took / turns(20))
    yield _compare("zarr: 16 slices at once", "hot, fresh output", times, 1.5)
    cold: dict[str, list[float]] = {"tensorstore": [], "actshard": []}
    for seed in range(turns(max(5, repeats // 2))):
        for engine, taken in cold.items():
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "benches.zarrs", engine, str(seed)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode == 3:
                yield Row(
                    "zarr: 16 slices at once", "cold", "tensorstore", None, None, "ms", None, ">= 1x", None, done.stderr
                )
                return
            if done.returncode:
                raise RuntimeError(done.stderr)
            taken.append(float(done.stdout))
    yield _compare("zarr: 16 slices at once", "cold", cold, 1)


def _compare(what: str, state: str, times: dict[str, list[float]], target: float, note: str = "") -> Row:
    (peer, theirs), (_, ours) = times.items()
    a, b = statistics.median(theirs), statistics.median(ours)
    spread = {k: sorted(x * 1e3 for x in v) for k, v in times.items()}
    return Row(what, state, peer, a * 1e3, b * 1e3, "ms", a / b, f">= {target:g}x", a / b >= target, note, spread)


def training(repeats: int) -> Iterator[Row]:
    """The text's pattern: two random layers per sample, 10,000 queries; zarr-python in workers, actshard in threads."""
    queries = size(10_000, 60)
    store = Store()
    rng = np.random.default_rng(0)
    samples = rng.integers(0, len(store.lengths), queries // 2).tolist()
    pairs = [(i, int(layer)) for i in samples for layer in rng.choice(data.ZARR["layers"], 2, replace=False)]
    batches = [pairs[at : at + 32] for at in range(0, queries, 32)]

    def ours(batch: list[tuple[int, int]]) -> int:
        return sum(len(x) for x in store.ours.sequences([i for i, _ in batch], [layer for _, layer in batch]))

    taken: dict[int, float] = {}
    for threads in (1, 4, 8):
        runs = []
        for _ in range(turns(max(3, repeats // 4))):
            began = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                rows = sum(pool.map(ours, batches))
            runs.append(time.perf_counter() - began)
        taken[threads] = statistics.median(runs)
    read = store.zarr_python()
    some = pairs[: queries // 10]
    theirs: dict[int, float] = {}
    for workers in (0, 4, 8):
        began = time.perf_counter()
        if workers == 0:
            for i, layer in some:
                read(i, layer)
        else:
            import multiprocessing

            parts = [(some[w::workers], str(store.path), store.lengths) for w in range(workers)]
            with multiprocessing.get_context("spawn").Pool(workers) as pool:
                pool.map(_warm, range(workers * 2))
                began = time.perf_counter()
                for sent in pool.imap_unordered(_worker, parts):
                    del sent
        theirs[workers] = (time.perf_counter() - began) * 10
    if rows != sum(store.lengths[i] for i, _ in pairs):
        raise AssertionError("the training pattern read other rows")
    for threads, workers in ((1, 0), (4, 4), (8, 8)):
        a, b = theirs[workers], taken[threads]
        yield Row(
            "zarr: 10,000 training queries", f"hot, {workers} workers / {threads} threads", "zarr-python 3", a, b, "s", a / b,
            ">= 4x", a / b >= 4, note="the peer reads a tenth of the queries, times ten; its workers send back nothing",
        )  # fmt: skip
    slower = max(taken[4], taken[8]) / taken[1]
    yield Row(
        "zarr: 10,000 training queries", "hot, 4 and 8 threads against 1", "actshard", taken[1], max(taken[4], taken[8]), "s",
        1 / slower, ">= 0.95x", slower <= 1 / 0.95,
    )  # fmt: skip


def _warm(_: int) -> None:
    import zarr

    zarr.config.get("default_zarr_format")


def _worker(part: tuple[list[tuple[int, int]], str, list[int]]) -> int:
    import zarr

    pairs, path, lengths = part
    array = zarr.open_group(path, mode="r")["arrays/activations"]
    return sum(len(array[i, layer, 0 : lengths[i], :]) for i, layer in pairs)


def main() -> None:
    """Reads one batch of sixteen slices from a cold page cache."""
    engine, seed = sys.argv[1:3]
    store = Store()
    ts = store.tensorstore() if engine == "tensorstore" else None
    batch = store.random(16, int(seed))
    try:
        drop_page_cache([Path(f"{store.chunks}/{i}.{layer}.0.0") for i, layer in batch])
    except NotPermitted as why:
        print(why, file=sys.stderr)
        raise SystemExit(3) from None
    began = time.perf_counter()
    kept = _together(store, ts, batch)
    print(time.perf_counter() - began)
    del kept


if __name__ == "__main__":
    main()
