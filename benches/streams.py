"""Streams compared with saev's loaders, numpy, lmprobe and the loaders of the published texts.

saev is not on PyPI. Its rows appear if ``saev.data`` can be imported (a checkout on PYTHONPATH).
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from actshard.streaming.quality import measure
from benches import data
from benches.measure import NotPermitted, Row, drop_page_cache, in_child
from benches.sizes import size, turns

BATCH = size(16_384, 256)
LAYER = 7


def _open(path: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


def _saev() -> Any:
    try:
        import saev.data
    except ImportError:
        return None
    logging.disable(logging.INFO)
    return saev.data


def _rate(make: Callable[[], Any], rows: Callable[[Any], Any], seconds: float) -> tuple[float, list[Any]]:
    """Bytes per second, and batches, of a given number of seconds or one epoch. Timing includes ``make``."""
    began = time.perf_counter()
    total, kept = 0, []
    for batch in make():
        total += rows(batch).nbytes
        kept.append(batch)
        if time.perf_counter() - began > seconds:
            break
    took = time.perf_counter() - began
    return total / took, kept


def _several(run: Callable[[], float], repeats: int) -> list[float]:
    run()
    return sorted(run() for _ in range(turns(repeats)))


def _row(
    what: str,
    state: str,
    peer: str,
    theirs: float | None,
    ours: float,
    target: float | None,
    unit: str = "MB/s",
    note: str = "",
) -> Row:
    ratio = None if not theirs else ours / theirs
    met = None if ratio is None or target is None else ratio >= target
    return Row(
        what, state, peer, theirs, ours, unit, ratio, "" if target is None else f">= {target:g}x", met, note
    )  # fmt: skip


def _check(store: actshard.Store, batch: Any) -> None:
    want = store.gather(LAYER, batch.examples, batch.tokens)
    if not np.array_equal(batch.activations, want):
        raise AssertionError("a batch holds other rows than it says")


def hot(repeats: int) -> Iterator[Row]:
    """Window, exact and ordered streams of one layer from the page cache."""
    folder = data.saev()
    store = _open(folder)
    for file in folder.glob("acts*.bin"):
        file.read_bytes()
    repeats = max(3, repeats // 2)
    kept: dict[str, Any] = {}

    def ours(**options: Any) -> float:
        rate, batches = _rate(lambda: store.stream(LAYER, BATCH, **options), lambda b: b.activations, 60)
        kept["ours"] = [(b.examples, b.tokens) for b in batches]
        _check(store, batches[-1])
        return rate / 1e6

    saev = _saev()
    mine = statistics.median(_several(lambda: ours(shuffle="window"), repeats))
    quality = measure(kept["ours"])
    note = f"distinct examples {quality.distinct_ratio:.3f}, entropy {quality.entropy:.3f} of the ideal, 1 GiB pool"
    theirs = None
    if saev is not None:
        config = saev.ShuffledConfig(shards=folder, layer=LAYER, batch_size=BATCH, n_threads=4, min_buffer_fill=0.2)

        def shuffled() -> float:
            rate, batches = _rate(lambda: saev.ShuffledDataLoader(config), lambda b: b["act"], 60)
            kept["theirs"] = [(b["example_idx"].long().numpy(), b["token_idx"].long().numpy()) for b in batches]
            return rate / 1e6

        theirs = statistics.median(_several(shuffled, 2))
        q = measure(kept["theirs"])
        note += f"; saev's {q.distinct_ratio:.3f}, {q.entropy:.3f} with 3.2 GB and min_buffer_fill=0.2"
    yield _row("stream: shuffled (window)", "hot", "saev ShuffledDataLoader", theirs, mine, 15, note=note)
    met = quality.distinct_ratio >= 0.95
    yield Row("stream: distinct examples per batch", "window, 1 GiB", "ideal shuffle", quality.ideal_distinct, quality.distinct,
              "", quality.distinct_ratio, ">= 0.95x", met)  # fmt: skip

    exact = statistics.median(_several(lambda: ours(shuffle="exact"), repeats))
    n, t = store.num_examples, data.SAEV["content"]
    eps = n // data.SAEV["shards"]
    shape = (eps, len(data.SAEV["layers"]), t + 1, data.SAEV["d_model"])
    maps = [np.memmap(folder / f"acts{s:06}.bin", np.float32, "r", shape=shape) for s in range(data.SAEV["shards"])]
    at = store.layers.index(LAYER)

    def numpy_rows() -> float:
        order = np.random.default_rng(0).permutation(n * t)
        began = time.perf_counter()
        for first in range(0, n * t, BATCH):
            e, k = np.divmod(order[first : first + BATCH], t)
            out = np.empty((len(e), shape[3]), np.float32)
            for s, m in enumerate(maps):
                here = np.flatnonzero(e // eps == s)
                out[here] = m[e[here] % eps, at, k[here] + 1]
        return n * t * shape[3] * 4 / (time.perf_counter() - began) / 1e6

    peer = statistics.median(_several(numpy_rows, 3))
    yield _row(
        "stream: exact",
        "hot",
        "numpy memmap, random rows",
        peer,
        exact,
        None,
        note="orders are made outside the clock for numpy",
    )
    out, source = np.ones((BATCH, shape[3]), np.float32), np.full((BATCH, shape[3]), 2, np.float32)

    def copied() -> float:
        began = time.perf_counter()
        for _ in range(n * t // BATCH):
            np.copyto(out, source)
        return n * t // BATCH * out.nbytes / (time.perf_counter() - began) / 1e6

    # In turns: the clock of a virtual machine drifts by more than the targets allow.
    turns = [
        (copied(), ours(shuffle="exact", reuse=True), ours(shuffle="window", reuse=True)) for _ in range(repeats + 1)
    ]
    copy, exactly, windowed = (statistics.median(rates) for rates in zip(*turns[1:], strict=True))
    note = "batches of 50 MB in reused arrays; 1 GiB pool"
    yield _row("stream: shuffled (window)", "hot, reused output", "ours, exact", exactly, windowed, 0.95, note=note)
    yield _row("stream: shuffled (window)", "hot, reused output", "np.copyto", copy, windowed, 0.8, note=note)
    yield _row("stream: exact", "hot, reused output", "np.copyto", copy, exactly, 0.8, note=note)

    mine = statistics.median(_several(ours, repeats))
    theirs = None
    if saev is not None:
        loader = saev.OrderedDataLoader(saev.OrderedConfig(shards=folder, layer=LAYER, batch_size=BATCH))
        theirs = _rate(lambda: loader, lambda b: b["act"], 10)[0] / 1e6
        loader.shutdown()
    yield _row("stream: ordered", "hot", "saev OrderedDataLoader", theirs, mine, 60)

    def layers(what: Any) -> float:
        began = time.perf_counter()
        for one in what:
            for batch in store.stream(one, BATCH if isinstance(one, int) else BATCH // 3, shuffle="window"):
                del batch
        return time.perf_counter() - began

    aligned = statistics.median(_several(lambda: layers(["all"]), 3))
    passes = statistics.median(_several(lambda: layers(store.layers), 3))
    yield Row("stream: all 3 layers aligned", "hot", "three passes of one layer, ours", passes * 1e3, aligned * 1e3, "ms",
              passes / aligned, "", None, "both move the same bytes")  # fmt: skip


def indexed(repeats: int) -> Iterator[Row]:
    """Items by index, singly and in batches."""
    try:
        from actshard.compat.saev import IndexedConfig, IndexedDataset
    except ImportError:
        return
    folder = data.saev()
    mine = IndexedDataset(IndexedConfig(shards=folder, layer=LAYER))
    saev = _saev()
    theirs = None if saev is None else saev.IndexedDataset(saev.IndexedConfig(shards=folder, layer=LAYER))
    numbers = np.random.default_rng(0).integers(0, len(mine), size(4_096, 64)).tolist()
    if theirs is not None and not all((mine[i]["act"] == theirs[i]["act"]).all() for i in numbers[:50]):
        raise AssertionError("items differ")

    def each(data: Any) -> float:
        began = time.perf_counter()
        for i in numbers:
            data[i]
        return (time.perf_counter() - began) / len(numbers) * 1e6

    def together(data: Any) -> float:
        began = time.perf_counter()
        data.__getitems__(numbers)
        return (time.perf_counter() - began) / len(numbers) * 1e6

    repeats = max(3, repeats // 2)
    peer = None if theirs is None else statistics.median(_several(lambda: each(theirs), 3))
    for what, ours, target in (("__getitem__", each, 6), ("__getitems__", together, 50)):
        us = statistics.median(_several(lambda run=ours: run(mine), repeats))
        ratio = None if peer is None else peer / us
        yield Row(f"saev items, {what}", "hot", "saev IndexedDataset", peer, us, "us", ratio, f">= {target}x",
                  None if ratio is None else ratio >= target)  # fmt: skip


def cold(repeats: int) -> Iterator[Row]:
    """A window stream from a cold page cache, compared with the disk's read rate."""
    folder = data.saev()
    files = sorted(folder.glob("acts*.bin"))
    rates, firsts, disk = [], [], []
    try:
        for _ in range(turns(3)):
            drop_page_cache(files)
            disk.append(fio_sequential(files[0]))
            drop_page_cache(files)
            found = in_child("streams", "cold", str(folder))
            rates.append(found["rate"])
            firsts.append((found["first"], found["pool"]))
    except NotPermitted as error:
        yield Row("stream: shuffled (window)", "cold", "fio", None, None, "MB/s", None, ">= 0.8x", None, str(error))
        return
    known = [d for d in disk if d is not None]
    peer = statistics.median(known) if known else None
    yield _row("stream: shuffled (window)", "cold", "fio, sequential", peer, statistics.median(rates), 0.8,
               note="one of 3 layers; 1 MiB reads past the cache at depth 16")  # fmt: skip
    if peer is not None:
        first, pool = sorted(firsts)[len(firsts) // 2]
        allowed = pool / (peer * 1e6) + 0.2
        yield Row("stream: first batch, 1 GiB pool", "cold", "pool / fio's rate + 0.2 s", allowed, first, "s", allowed / first,
                  ">= 1x", first <= allowed, f"the pool's first window is {pool / 1e6:.0f} MB")  # fmt: skip


def fio_sequential(file: Path) -> float | None:
    if shutil.which("fio") is None:
        return None
    done = subprocess.run(
        ["fio", "--name=r", f"--filename={file}", "--rw=read", "--bs=1m", "--iodepth=16", "--ioengine=libaio", "--direct=1",
         "--readonly", "--output-format=json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return None
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e6


def memory(repeats: int) -> Iterator[Row]:
    """Peak anonymous memory of a streaming process."""
    del repeats
    for pool in size((256, 1024), (8,)):
        found = in_child("streams", "memory", str(data.saev()), str(pool))
        batch = BATCH * data.SAEV["d_model"] * 4
        allowed = (pool << 20) + 2 * batch + (64 << 20)
        yield Row("stream: memory", f"{pool} MiB pool", "", None, found["peak"] / 1e6, "MB", None,
                  f"<= {allowed / 1e6:.0f} MB", found["peak"] <= allowed, "anonymous, besides the process before it")  # fmt: skip


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _main() -> None:
    what, folder, *rest = sys.argv[1:]
    store = _open(Path(folder))
    if what == "cold":
        began = time.perf_counter()
        stream = store.stream(LAYER, BATCH, shuffle="window")
        total, first = 0, 0.0
        for batch in stream:
            first = first or time.perf_counter() - began
            total += batch.activations.nbytes
        windows = -(-stream.num_rows // stream.window)
        pool = stream.num_rows // windows * store.d_model * 4
        print(json.dumps({"rate": total / (time.perf_counter() - began) / 1e6, "first": first, "pool": pool}))
    else:
        before = _anonymous()
        peak = 0
        # Streams all layers, so that the pool is full.
        for batch in store.stream("all", BATCH // 3, shuffle="window", memory=f"{rest[0]}MiB"):
            peak = max(peak, _anonymous())
            del batch
        print(json.dumps({"peak": peak - before}))


def others(repeats: int) -> Iterator[Row]:
    """Zarr and pickle stores, compared with the loaders that their texts recommend."""
    try:
        import torch
        import zarr
    except ImportError as error:
        yield Row(
            "stream: zarr, pickle", "hot", "the texts' loaders", None, None, "MB/s", None, ">= 4x", None, str(error)
        )
        return
    from benches.pickles import TextDataset
    from benches.zarrs import Store as ZarrBench

    repeats = max(3, repeats // 3)
    bench = ZarrBench()

    class Slices(torch.utils.data.Dataset):
        """One layer of a sample, read as in the text."""

        def __len__(self) -> int:
            return len(bench.lengths)

        def __getitem__(self, i: int) -> Any:
            root = zarr.open_group(str(bench.path), mode="r")
            return root["arrays/activations"][i, 0, 0 : bench.lengths[i], :]

    def texts(make: Callable[[], Any], seconds: float) -> float:
        """A DataLoader as in the texts: random order, one process."""

        def loader() -> Any:
            return torch.utils.data.DataLoader(make(), batch_size=4, shuffle=True, collate_fn=np.concatenate)

        return _rate(loader, lambda b: b, seconds)[0] / 1e6

    def ours(make: Callable[[], actshard.Store], layer: int) -> float:
        return _rate(lambda: make().stream(layer, 2_048, shuffle="window"), lambda b: b.activations, 60)[0] / 1e6

    what = "ours rows in a random order, the text's whole items"
    mine = statistics.median(_several(lambda: ours(lambda: _open(bench.path), 0), repeats))
    theirs = statistics.median(_several(lambda: texts(Slices, 60), 2))
    yield _row(
        "stream: a layer of a zarr store", "hot", "the text's slices in a DataLoader", theirs, mine, 4, note=what
    )
    for name, shards, seconds in (("plain20", "20 .pkl shards", 10), ("gz4", "four .pkl.gz shards of 105 MB", 30)):
        path = data.pickles(name)
        layer = _open(path).layers[0]
        # Opened anew each time, like the text's Dataset, which loads every shard to count its items.
        mine = statistics.median(
            _several(lambda path=path, layer=layer: ours(lambda: _open(path, checksums=False), layer), 3)
        )
        checked = statistics.median(_several(lambda path=path, layer=layer: ours(lambda: _open(path), layer), 3))
        theirs = texts(lambda path=path, layer=layer: TextDataset(path, layer), seconds)
        note = f"{what}; both open the dataset; checksums are looked at by neither (with them ours gives {checked:,.0f} MB/s)"
        yield _row(
            f"stream: a layer of {shards}", "hot", "the text's Dataset in a DataLoader", theirs, mine, 4, note=note
        )


def compat_lmprobe(repeats: int) -> Iterator[Row]:
    """compat.lmprobe's load_activations, compared with lmprobe's own."""
    import tempfile

    from benches.peers import lmprobe_on

    try:
        import lmprobe  # noqa: F401 -- tests whether it is installed
    except ImportError:
        return
    from actshard.compat import lmprobe as ours

    folder = data.pooled()
    with tempfile.TemporaryDirectory() as cache, lmprobe_on(folder, Path(cache)) as sharing:

        def load() -> Any:
            return sharing.load_activations("bench/pooled", layers=[7], show_progress=False)[7]

        want = load()
        if not np.array_equal(ours.load_activations(folder, layers=[7])[7], want):
            raise AssertionError("load_activations differs")

        def timed(run: Callable[[], Any]) -> float:
            began = time.perf_counter()
            kept = run()
            took = time.perf_counter() - began
            del kept
            return took * 1e3

        theirs = statistics.median(_several(lambda: timed(load), 2))
        mine = statistics.median(
            _several(lambda: timed(lambda: ours.load_activations(folder, layers=[7])), max(3, repeats // 2))
        )
    yield Row("compat.lmprobe.load_activations, one layer", "hot", "lmprobe's own", theirs, mine, "ms", theirs / mine, ">= 30x",
              theirs / mine >= 30)  # fmt: skip


if __name__ == "__main__":
    _main()
