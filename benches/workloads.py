"""The workloads of the table, each with peers, comparison and target."""

from __future__ import annotations

import contextlib
import gc
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import (
    capturing,
    data,
    device,
    larger,
    limits,
    others,
    pickles,
    plans,
    remote,
    stores,
    streams,
    tokens,
    use,
    writing,
    zarrs,
    zarrs3,
)
from benches.measure import (
    ROW_PAGES,
    Engine,
    NotPermitted,
    Row,
    compared,
    drop_page_cache,
    fio_iops,
    in_child,
    interleave,
    median,
)
from benches.peers import NumpyMemmap, SafetensorsRows, lmprobe_on, numpy_sequences
from benches.sizes import size, turns

ROWS = size(16_384, 512)
ROW_BYTES = data.SAEV["d_model"] * 4
CAST = size(4_000, 50)


def _open(path: Path, io: str = "mmap") -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bench's folder is not named by its hash
        return actshard.open(path, io=io)


def _same(ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape or not np.array_equal(ours, theirs):
        raise AssertionError(f"{what}: outputs differ; nothing is timed before they are equal")


def random_hot(repeats: int) -> Iterator[Row]:
    """16,384 random rows of 3 KiB, with all pages cached and mapped."""
    folder = data.saev()
    mapped, pread, peer = _open(folder), _open(folder, "pread"), NumpyMemmap(folder)
    layer = data.SAEV["layers"][1]
    rng = np.random.default_rng(0)
    n, t = data.SAEV["examples"], data.SAEV["content"] + 1
    out = np.ones((ROWS, data.SAEV["d_model"]), np.float32)
    source = rng.standard_normal(out.shape).astype(np.float32)
    for whole in peer.maps:
        whole.max()
    # A part of a file is mapped after three accesses (rust/core/src/source/warmth.rs).
    for first in [*range(0, n, 50)] * 4:
        mapped.sequences(range(first, min(n, first + 50)), layer)

    def indices() -> tuple[Any, ...]:
        return rng.integers(0, n, ROWS), rng.integers(0, t, ROWS)

    e, k = indices()
    want = peer.gather(1, e, k)
    for store in (mapped, pread):
        _same(store.gather(layer, e, k), want, "random rows")
    times = interleave(
        [
            Engine("numpy memmap", lambda e, k: peer.gather(1, e, k), indices),
            Engine("numpy memmap, reused output", lambda e, k: peer.gather(1, e, k, out), indices),
            Engine("actshard", lambda e, k: mapped.gather(layer, e, k), indices),
            Engine("actshard out=", lambda e, k: mapped.gather(layer, e, k, out=out), indices),
            Engine("actshard pread", lambda e, k: pread.gather(layer, e, k), indices),
            Engine("actshard pread out=", lambda e, k: pread.gather(layer, e, k, out=out), indices),
            Engine("np.copyto", lambda: np.copyto(out, source)),
            Engine("ndarray.copy", source.copy),
        ],
        repeats,
        warmup=3,
    )
    what = f"{ROWS:,} random rows (3 KiB)"
    # No targets against numpy, whose rows move at a fifth of a copy: the copy is the limit, and has the targets.
    yield compared(what, "hot, fresh output", "numpy memmap", times, "actshard", None)
    yield compared(what, "hot, reused output", "numpy memmap", times, "actshard out=", None)
    yield compared(what, "hot, both reuse output", "numpy memmap, reused output", times, "actshard out=", None)
    yield compared("  against a memory copy", "hot, fresh output", "ndarray.copy", times, "actshard", 0.5)
    yield compared("  against a memory copy", "hot, reused output", "np.copyto", times, "actshard out=", 0.9)
    yield compared(f"{what}, io=pread", "hot, fresh output", "numpy memmap", times, "actshard pread", None)
    yield compared(f"{what}, io=pread", "hot, reused output", "numpy memmap", times, "actshard pread out=", None)
    # No target: two threads of a C program that call pread for the same rows take as long (14.8 ms against 15.0 when it was tried).
    yield compared(
        "  against a memory copy, io=pread", "hot, reused output", "np.copyto", times, "actshard pread out=", None
    )


def random_cold(repeats: int) -> Iterator[Row]:
    """The same in separate processes: with a hot page cache but unmapped pages, then with a cold page cache."""
    file = sorted(data.saev().glob("acts*.bin"))[0]
    what = f"{ROWS:,} random rows (3 KiB)"
    for state in ("first-touch", "cold"):
        times: dict[str, list[float]] = {"numpy": [], "mmap": [], "pread": []}
        how = ""
        try:
            if state == "first-touch":
                # Pages that were cached one by one cost more faults than those of one long read.
                shards = sorted(data.saev().glob("acts*.bin"))
                with contextlib.suppress(NotPermitted):
                    drop_page_cache(shards)
                for shard in shards:
                    shard.read_bytes()
            for seed in range(turns(9 if state == "first-touch" else max(3, repeats // 3))):
                runs = {
                    "numpy": in_child("child", "numpy", state, str(seed), "mmap"),
                    "mmap": in_child("child", "ours", state, str(seed), "mmap"),
                    "pread": in_child("child", "ours", state, str(seed), "pread"),
                }
                if len({run["digest"] for run in runs.values()}) != 1:
                    raise AssertionError("cold rows differ")
                for name, run in runs.items():
                    times[name].append(run["seconds"])
                    how = run["how"]
        except NotPermitted as why:
            yield Row(what, state, "numpy", None, None, "ms", None, ">= 8x", None, f"skipped: {why}")
            return
        # Page faults bound the first touch of a map: its target is that of the same rows read with pread.
        targets: tuple[float | None, ...] = {"cold": (8, 6), "first-touch": (None, None)}[state]
        yield compared(what, state, "numpy", times, "mmap", targets[0], note=how)
        yield compared(f"{what}, io=pread", state, "numpy", times, "pread", targets[1], note=how)
        if state == "first-touch":
            # Not 1: io=mmap reads until a part of a file is hot, and tries which way is faster. In C, copying from a fresh map
            # takes 1.2 times as long as pread, and 2.2 times if pages were cached one by one.
            yield compared("  io=mmap against io=pread", state, "pread", times, "mmap", 0.9, note="both ours")
        if state == "cold":
            iops = fio_iops(file, ROW_PAGES)
            for name in ("mmap", "pread"):
                rate = ROWS / median(times[name])
                ratio = None if iops is None else rate / iops
                # fio reads for seconds. Of eleven C programs that read such rows once, by hints and by io_uring, direct or not,
                # the fastest had 0.91 of its rate (median of 7 rounds); equal runs of fio differ by 17 %. 0.95 of 0.91:
                met = None if ratio is None or name == "pread" else ratio >= 0.86
                target = ">= 0.86x" if name == "mmap" else ""
                note = (
                    "fio is not installed"
                    if iops is None
                    else "random reads of a row's one or two pages, direct, depth 64"
                )
                yield Row(f"  against fio, io={name}", state, "fio", iops, rate, "/s", ratio, target, met, note)


def one_row(repeats: int) -> Iterator[Row]:
    """Single rows in a Python loop."""
    folder = data.saev()
    store, peer = _open(folder), NumpyMemmap(folder)
    layer = data.SAEV["layers"][1]
    rng = np.random.default_rng(1)
    calls = size(2_000, 100)
    out = np.empty((1, data.SAEV["d_model"]), np.float32)
    e = rng.integers(0, data.SAEV["examples"], calls).tolist()
    t = rng.integers(0, data.SAEV["content"] + 1, calls).tolist()
    eps = peer.eps
    _same(store.gather(layer, e[0], t[0])[0], peer.maps[e[0] // eps][e[0] % eps, 1, t[0]], "one row")

    def numpy_view() -> None:
        for x, y in zip(e, t, strict=True):
            peer.maps[x // eps][x % eps, 1, y]

    def numpy_copy() -> None:
        for x, y in zip(e, t, strict=True):
            np.array(peer.maps[x // eps][x % eps, 1, y])

    def ours() -> None:
        for x, y in zip(e, t, strict=True):
            store.gather(layer, x, y)

    def ours_out() -> None:
        for x, y in zip(e, t, strict=True):
            store.gather(layer, x, y, out=out)

    times = interleave(
        [Engine("numpy memmap, copied", numpy_copy), Engine("numpy memmap, view only", numpy_view),
         Engine("actshard", ours), Engine("actshard out=", ours_out)], repeats, warmup=2,
    )  # fmt: skip
    per_call = ("us", 1e6 / calls)
    yield compared("one row a call", "hot", "numpy memmap, copied", times, "actshard", 1, unit=per_call)
    row = compared("  numpy copies nothing", "hot", "numpy memmap, view only", times, "actshard out=", 0, unit=per_call)
    row.target, row.met, row.note = "<= 3 us", (row.ours_value or 9) <= 3, "our whole call, the copy included"
    yield row


def last_tokens(repeats: int) -> Iterator[Row]:
    """1,000 random last-token rows of 16 KiB, and a whole layer in index order."""
    folder = data.pooled()
    store = _open(folder)
    n = store.num_examples
    per = n // data.POOLED["shards"]
    peer = SafetensorsRows(folder, 7, data.POOLED["shards"])
    rng = np.random.default_rng(2)

    def indices() -> tuple[Any, ...]:
        return (rng.integers(0, n, size(1_000, 20)),)

    e = indices()[0]
    _same(store.last_tokens(7, e), peer.rows((e // per).tolist(), (e % per).tolist()), "last tokens")
    times = interleave(
        [
            Engine(
                "safetensors get_slice per row", lambda e: peer.rows((e // per).tolist(), (e % per).tolist()), indices
            ),
            Engine("actshard", lambda e: store.last_tokens(7, e), indices),
        ],
        repeats,
    )
    yield compared("1,000 last-token rows (16 KiB)", "hot", "safetensors get_slice per row", times, "actshard", 5)
    try:
        import lmprobe  # noqa: F401 -- tests whether it is installed
    except ImportError:
        yield Row(
            "a whole pooled layer", "hot", "lmprobe", None, None, "ms", None, ">= 50x", None, "lmprobe is not installed"
        )
        return
    with tempfile.TemporaryDirectory() as cache, lmprobe_on(folder, Path(cache)) as sharing:
        want = store.last_tokens(7)

        def load() -> Any:
            return sharing.load_activations("bench/pooled", layers=[7], show_progress=False)[7]

        def load_dataset() -> Any:
            return sharing.load_activation_dataset("bench/pooled")[0]["hidden.layer_7"]

        _same(load(), want, "load_activations")
        _same(load_dataset(), want, "load_activation_dataset")
        engines = [
            Engine("lmprobe.load_activation_dataset", load_dataset),
            Engine("actshard", lambda: _open(folder).last_tokens(7)),
            Engine("actshard, store open", lambda: store.last_tokens(7)),
        ]
        times = interleave(engines, repeats)
        slow = interleave([Engine("lmprobe.load_activations", load)], 3, warmup=0)
        times.update(slow)
    what = "a whole pooled layer (98 MB)"
    yield compared(what, "hot", "lmprobe.load_activations", times, "actshard", 50, note="ours opens the dataset too")
    yield compared(
        what, "hot", "lmprobe.load_activation_dataset", times, "actshard", 1, note="ours opens the dataset too"
    )
    yield compared(what, "hot", "lmprobe.load_activation_dataset", times, "actshard, store open", 1)


def all_tokens(repeats: int) -> Iterator[Row]:
    """All tokens of 500 prompts in prompt order."""
    folder = data.full_sequence()
    store = _open(folder)
    shards = 1 + data.FULL["rest_shards"]
    lists = store.read_columns(["token_shard_ids", "token_shard_offsets"])
    ids = np.concatenate(lists["token_shard_ids"].to_numpy())
    rows = np.concatenate(lists["token_shard_offsets"].to_numpy())
    n = store.num_examples

    def theirs() -> Any:
        return numpy_sequences(folder, 7, shards, ids, rows)

    _same(np.concatenate(store.sequences(range(n), 7)), theirs(), "all tokens")
    times = interleave([Engine("numpy", theirs), Engine("actshard", lambda: store.sequences(range(n), 7))], repeats)
    what = f"all {len(ids):,} tokens of {n} prompts (4 KiB)"
    yield compared(what, "hot", "numpy", times, "actshard", 2, note="numpy: each shard read once, then a gather")
    try:
        import lmprobe  # noqa: F401 -- tests whether it is installed
    except ImportError:
        return
    # lmprobe reads all tokens of a dataset in two steps: it unpacks a file per prompt, then reads those.
    with tempfile.TemporaryDirectory() as cache, lmprobe_on(folder, Path(cache)) as sharing:
        from lmprobe.cache import load_prompt_activations

        texts = store.table["text"].to_pylist()

        def read() -> Any:
            return [load_prompt_activations(f"bench/{folder.name}", text, [7])[0].numpy() for text in texts]

        # Timed once, because lmprobe remembers in the process what it has unpacked.
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sharing.pull_dataset("bench/full", materialize=True)
        unpacked = time.perf_counter() - began
        for got, expected in zip(read(), store.sequences(range(n), 7), strict=True):
            _same(got.reshape(expected.shape), expected, "lmprobe materialised")
        times.update(interleave([Engine("lmprobe, reading what it unpacked", read)], 3, warmup=0))
        times["lmprobe, materialised read"] = [unpacked + t for t in times["lmprobe, reading what it unpacked"]]
    yield compared(
        what,
        "hot",
        "lmprobe, materialised read",
        times,
        "actshard",
        20,
        note="it unpacks a file per prompt, then reads",
    )
    row = compared(what, "hot", "lmprobe, reading what it unpacked", times, "actshard", 0)
    row.target, row.met, row.note = "", None, "reading alone, unpacked before"
    yield row


def cast(repeats: int) -> Iterator[Row]:
    """Reads float16 rows as float32."""
    store = _open(data.pooled("float16"))
    n = store.num_examples
    rng = np.random.default_rng(3)

    def indices() -> tuple[Any, ...]:
        return (rng.integers(0, n, CAST),)

    e = indices()[0]
    out = np.ones((CAST, store.d_model), np.float32)
    _same(store.last_tokens(7, e, dtype=np.float32), store.last_tokens(7, e).astype(np.float32), "float16 to float32")
    times = interleave(
        [
            Engine("gather, then astype", lambda e: store.last_tokens(7, e).astype(np.float32), indices),
            Engine("actshard dtype=", lambda e: store.last_tokens(7, e, dtype=np.float32), indices),
            Engine("actshard dtype=, out=", lambda e: store.last_tokens(7, e, dtype=np.float32, out=out), indices),
        ],
        repeats,
        warmup=2,
    )
    what = "4,000 float16 rows to float32"
    yield compared(what, "hot, fresh output", "gather, then astype", times, "actshard dtype=", 1.5)
    yield compared(what, "hot, reused output", "gather, then astype", times, "actshard dtype=, out=", 1.5)


def memory(repeats: int) -> Iterator[Row]:
    """Memory that a gather allocates besides its output, and memory of an index of a million prompts."""
    import subprocess
    import sys

    for what, target in (("gather", 16.0), ("index", 25.0)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"from benches.workloads import _memory_child; _memory_child({what!r})"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        used = float(done.stdout.split()[-1])
        name = (
            "memory beside the output of a gather"
            if what == "gather"
            else "lasting memory of 1,000,000 prompts x 100 tokens"
        )
        yield Row(
            name, "", "", None, used, "MB", None, f"<= {target:g} MB", used <= target, "anonymous memory (RssAnon)"
        )


def _anonymous() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _memory_child(what: str) -> None:
    import threading
    import time

    if what == "index":
        import pyarrow.parquet  # noqa: F401 -- imported first, so that its memory is not counted

        _open(data.pooled())
        gc.collect()
        before = _anonymous()
        store = _open(data.large_index())
        gc.collect()
        print(len(store), _anonymous() - before)
        return
    store = _open(data.saev())
    rng = np.random.default_rng(0)
    n = size(300_000, 2_000)
    e, t = rng.integers(0, data.SAEV["examples"], n), rng.integers(0, data.SAEV["content"] + 1, n)
    store.gather(7, e[:ROWS], t[:ROWS])
    out = np.ones((n, data.SAEV["d_model"]), np.float32)
    before = _anonymous()
    peak = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], _anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        store.gather(7, e, t, out=out)
    done.set()
    watcher.join()
    print(peak[0] - before)


def open_index(repeats: int) -> Iterator[Row]:
    """Opens an index of a million prompts with a hundred tokens each, compared with reading the same columns."""
    import pyarrow.parquet as pq

    folder = data.large_index()
    part = next((folder / "index").glob("*.parquet"))
    columns = ["shard_index", "row_offset", "token_shard_ids", "token_shard_offsets"]
    store = _open(folder)
    if len(store) != data.INDEX[0] or int(store.token_counts.sum()) != data.INDEX[0] * data.INDEX[1]:
        raise AssertionError("the index was read wrong")
    times = interleave(
        [
            Engine("pyarrow.read_table", lambda: pq.read_table(part, columns=columns)),
            Engine("actshard.open", lambda: _open(folder)),
        ],
        turns(max(3, repeats // 3)),
    )
    row = compared("open 1,000,000 prompts x 100 tokens", "hot", "pyarrow.read_table", times, "actshard.open", 0.5)
    row.note = "same columns; ours folds them into runs"
    yield row


ALL = {
    "random_hot": random_hot,
    "random_cold": random_cold,
    "half_cached": limits.half_cached,
    "casts": limits.casts,
    "busy_thread": limits.busy,
    "many_stores": limits.many_stores,
    "one_row": one_row,
    "last_tokens": last_tokens,
    "all_tokens": all_tokens,
    "cast": cast,
    "open_index": open_index,
    "memory": memory,
    "row_files": others.row_files,
    "use_filter": use.filtered,
    "use_array": use.as_array,
    "use_pca": use.pca,
    "use_sequences": use.sequences,
    "tables": others.tables,
    "stores_deepspec": stores.deepspec,
    "stores_copy": stores.drafts_copy,
    "stores_cold": stores.drafts_cold,
    "stores_speculators": stores.speculators,
    "stores_specforge": stores.specforge,
    "stores_torch": stores.torch_files,
    "stores_arrow": stores.arrow,
    "stores_saelens": stores.saelens,
    "stores_jkminder": stores.memmaps,
    "stores_npy": stores.npy,
    "stores_parquet": stores.parquet,
    "stores_many_files": stores.many_files,
    "stores_big_index": stores.big_index,
    "zarr_slices": zarrs.slices,
    "zarr_sixteen": zarrs.sixteen,
    "zarr_training": zarrs.training,
    "zarr_sharded": zarrs3.sharded,
    "zarr_coded": zarrs3.coded,
    "zarr_threads": zarrs3.threads,
    "pickle_inflate": pickles.inflate,
    "pickle_items": pickles.items,
    "pickle_memory": pickles.memory,
    "stream_hot": streams.hot,
    "stream_cold": streams.cold,
    "stream_indexed": streams.indexed,
    "stream_memory": streams.memory,
    "larger": larger.larger,
    "capture": capturing.capture,
    "stream_others": streams.others,
    "compat_lmprobe": streams.compat_lmprobe,
    "to_device": device.handing,
    "to_device_training": device.training,
    "write_saev": writing.saev,
    "write_zarr": writing.zarr,
    "write_processes": writing.processes,
    "write_lmprobe": writing.pooled,
    "write_pickle": limits.pickle_writers,
    "convert": writing.convert,
    "verify": writing.verify,
    "stats": writing.statistics_of,
    "plan_workers": plans.workers,
    "plan_tokenize": plans.tokenizing,
    "plan_overhead": plans.overhead,
    "plan_bookkeeping": plans.bookkeeping,
    "tokens_build": tokens.build,
    "tokens_write": tokens.write,
    "tokens_windows": tokens.windows,
    "tokens_rows": tokens.rows,
    "tokens_examples": tokens.examples,
    "tokens_plan": tokens.plan,
    "tokens_orders": tokens.orders,
    "tokens_shards": tokens.shards,
    "tokens_memory": tokens.memory,
    "remote_rows": remote.rows,
    "remote_zarr": remote.zarr_rows,
    "remote_streams": remote.streams,
    "remote_hub": remote.hub,
    "remote_open": remote.opening,
}
