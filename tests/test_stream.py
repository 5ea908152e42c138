"""Streams: every row exactly once, with its own values, in a reproducible order, resumable at any batch, without leaked threads."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard import Batch, Stream
from conftest import GOLDEN, saev_dump
from waiting import PATIENCE, wait_for_the_end_of
from zarr_files import write_store

DATASETS = {
    "saev": saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"),
    "lmprobe": GOLDEN / "lmprobe/fullseq_f32",
    "bfloat16": GOLDEN / "lmprobe/fullseq_bf16",
    "pooled": GOLDEN / "lmprobe/pooled_f16",
    "zarr": GOLDEN / "zarr/run_20260122_101112",
    "grouped": GOLDEN / "zarr/grouped_chunks/activations.zarr",
    "coded": GOLDEN / "zarr/zstd/activations.zarr",
    "pickle": GOLDEN / "pickle/mixed_compression",
}
SHUFFLES = [None, "window", "exact"]
Key = tuple[int, int, int]


def opened(name: str, io: str = "mmap", **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(DATASETS[name], io=io, **options)


@pytest.fixture(params=list(DATASETS))
def store(request: pytest.FixtureRequest) -> actshard.Store:
    return opened(request.param)


@pytest.fixture(params=SHUFFLES)
def shuffle(request: pytest.FixtureRequest) -> str | None:
    return request.param


def small(store: actshard.Store, rows: int, layers: int = 1) -> int:
    """Memory for a pool of about this many rows."""
    return rows * (store.d_model * store.dtype.itemsize * layers + 28)


def keys(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.examples.tolist(), batch.tokens.tolist(), strict=True))


def every(store: actshard.Store) -> list[tuple[int, int]]:
    """All content rows in stored order."""
    return [(e, t) for e, n in enumerate(store.token_counts.tolist()) for t in range(store.special_tokens, n)]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        x.activations.tobytes() == y.activations.tobytes()
        and np.array_equal(x.examples, y.examples)
        and np.array_equal(x.tokens, y.tokens)
        and np.array_equal(x.layers, y.layers)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", list(DATASETS))
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_every_row_comes_once_with_its_own_values(name: str, io: str, shuffle: str | None, batch_size: int) -> None:
    store = opened(name, io)
    layer = store.layers[-1]
    for memory in (small(store, 5), small(store, 40), "1GiB"):
        stream = store.stream(layer, batch_size, shuffle=shuffle, memory=memory)
        batches = list(stream)
        assert len(batches) == len(stream) == -(-stream.num_rows // batch_size)
        assert all(len(b) == batch_size for b in batches[:-1])
        seen = [k for b in batches for k in keys(b)]
        assert sorted(seen) == every(store)
        assert shuffle is not None or seen == every(store)
        for b in batches:
            assert b.activations.dtype == store.dtype
            assert b.activations.shape == (len(b), store.d_model)
            assert b.activations.tobytes() == store.gather(layer, b.examples, b.tokens).tobytes()
            assert b.layers.tolist() == [layer]


def test_orders_differ_between_seeds_and_epochs_and_are_the_same_for_each(store: actshard.Store) -> None:
    for shuffle in ("window", "exact"):

        def order(shuffle: str = shuffle, **options: Any) -> list[tuple[int, int]]:
            stream = store.stream(store.layers[0], 4, shuffle=shuffle, memory=small(store, 6), **options)
            return [k for b in stream for k in keys(b)]

        assert order(seed=1) == order(seed=1)
        if len(every(store)) > 8:
            assert order(seed=1) != order(seed=2)
            assert order(seed=1) != order(seed=1, epoch=1)
            assert order() != every(store)
        stream = store.stream(store.layers[0], 4, shuffle=shuffle, memory=small(store, 6), seed=1)
        first, second = list(stream), list(stream)
        assert stream.epoch == 2
        assert [k for b in second for k in keys(b)] == order(seed=1, epoch=1)
        stream.set_epoch(0)
        assert same(list(stream), first)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_the_order_does_not_depend_on_threads(threads: str) -> None:
    code = (
        "import actshard,hashlib,sys\n"
        "s=actshard.open(sys.argv[1])\n"
        "h=hashlib.sha256()\n"
        "for shuffle in (None,'window','exact'):\n"
        "    for b in s.stream(s.layers[0],37,shuffle=shuffle,seed=3,memory=20000):\n"
        "        h.update(b.activations.tobytes()+b.examples.tobytes()+b.tokens.tobytes())\n"
        "print(h.hexdigest())"
    )
    environment = {**os.environ, "ACTSHARD_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [sys.executable, "-c", code, str(DATASETS["saev"])], env=environment, capture_output=True, text=True, check=True
    )
    # The order for a seed never changes.
    assert found.stdout.strip() == "a29696d7913f47a05ac51fa42fd8eda4682db0c46b090a94dccc8fa5dc5d02aa"


@pytest.mark.parametrize("name", ["saev", "lmprobe", "coded", "pickle"])
def test_layers_are_aligned_or_interleaved(name: str, shuffle: str | None) -> None:
    store = opened(name)
    n = len(store.layers)
    for layers in ("all", list(store.layers)[::-1]):
        names = list(store.layers) if layers == "all" else layers
        stream = store.stream(layers, 5, shuffle=shuffle, memory=small(store, 9, n))
        batches = list(stream)
        assert sorted(k for b in batches for k in keys(b)) == every(store)
        for b in batches:
            assert b.activations.shape == (len(b), n, store.d_model)
            assert b.layers.tolist() == names
            for k, layer in enumerate(names):
                assert b.activations[:, k].tobytes() == store.gather(layer, b.examples, b.tokens).tobytes()
        rows = []
        for b in store.stream(layers, 5, shuffle=shuffle, interleave=True, memory=small(store, 9)):
            assert b.layers.shape == b.examples.shape
            rows += [(*k, layer) for k, layer in zip(keys(b), b.layers.tolist(), strict=True)]
            for row, e, t, layer in zip(b.activations, b.examples, b.tokens, b.layers, strict=True):
                assert row.tobytes() == store.gather(int(layer), int(e), int(t)).tobytes()
        assert sorted(rows) == sorted((*k, layer) for k in every(store) for layer in names)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 7),
    shuffle=st.sampled_from(SHUFFLES),
    drop_last=st.booleans(),
    layers=st.integers(1, 2),
    pool=st.integers(1, 30),
    seed=st.integers(0, 2**63 - 1),
)
def test_ranks_share_all_rows(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    batch_size: int,
    world_size: int,
    shuffle: str | None,
    drop_last: bool,
    layers: int,
    pool: int,
    seed: int,
) -> None:
    values = np.arange(len(counts) * 2 * 9 * 2, dtype="f4").reshape(len(counts), 2, 9, 2)
    path = tmp_path_factory.mktemp("share") / "s.zarr"
    store = actshard.open(write_store(path, values, np.array(counts, "i4"), (1, 1, 4, 2)))
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "memory": pool * 36}
    interleave = layers == 2
    what: Any = "all" if interleave else 1
    total = sum(counts) * layers
    try:
        streams = [
            store.stream(what, batch_size, rank=r, world_size=world_size, interleave=interleave, **options)
            for r in range(world_size)
        ]
    except actshard.ArgumentError as refused:
        assert "drop_last" in str(refused)  # noqa: PT017 -- hypothesis finds the cases, some are refused
        assert not drop_last
        # Only if it is impossible: fewer rows than batches.
        assert -(-total // (batch_size * world_size)) * world_size > total
        return
    shares = [list(s) for s in streams]
    assert len({len(s) for s in streams}) == 1
    assert all(len(share) == len(s) for share, s in zip(shares, streams, strict=True))
    seen = [
        (*k, int(x))
        for share in shares
        for b in share
        for k, x in zip(keys(b), np.resize(b.layers, len(b)), strict=True)
    ]
    assert len(set(seen)) == len(seen)
    for share in shares:
        assert all(1 <= len(b) <= batch_size for b in share)
        for b in share:
            at = np.resize(b.layers, len(b))
            assert np.array_equal(b.activations, values[b.examples, at, b.tokens])
            assert not drop_last or len(b) == batch_size
    if drop_last:
        assert len(seen) == total // (batch_size * world_size) * batch_size * world_size
    else:
        assert len(seen) == total
    if shuffle != "window" and shares[0]:
        # Per round, all ranks together read what one rank reads with as large a batch.
        whole = list(store.stream(what, batch_size * world_size, interleave=interleave, **options))
        for j, one in enumerate(whole[:-2]):
            together = [k for share in shares for k in keys(share[j])]
            assert together == keys(one)


@pytest.mark.parametrize("name", ["saev", "lmprobe", "pickle"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_any_state_gives_what_was_left(name: str, shuffle: str | None, world_size: int) -> None:
    store = opened(name)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "memory": small(store, 17), "world_size": world_size}
    layer = store.layers[0]
    stream = store.stream(layer, 6, rank=world_size - 1, **options)
    batches, states = [], [stream.state_dict()]
    for batch in stream:
        batches.append(batch)
        states.append(stream.state_dict())
    again = list(stream)  # the next epoch
    for k, taken in enumerate(states):
        state = json.loads(json.dumps(taken))
        assert len(json.dumps(state)) < 1000
        other = store.stream(layer, 6, rank=world_size - 1, epoch=9, **options)
        other.load_state_dict(state)
        assert other.state_dict() == (states[k] if k < len(batches) else stream_at(other, 1))
        if k < len(batches):
            other.set_epoch(0)  # as training loops do
            assert same(list(other), batches[k:])
        assert same(list(other), again)
        carried = pickle.loads(pickle.dumps(stream_with(store, layer, options, state, world_size)))
        assert same(list(carried), batches[k:] if k < len(batches) else again)


def stream_at(stream: Stream, epoch: int) -> dict[str, Any]:
    return {**stream.state_dict(), "epoch": epoch, "batch": 0}


def stream_with(store: actshard.Store, layer: int, options: dict[str, Any], state: Any, world_size: int) -> Stream:
    made = store.stream(layer, 6, rank=world_size - 1, **options)
    made.load_state_dict(state)
    return made


def test_a_state_of_another_stream_is_refused() -> None:
    store = opened("saev")
    state = store.stream(5, 8, shuffle="exact", seed=1).state_dict()
    for changed in (
        {"seed": 2},
        {"shuffle": None},
        {"tokens": "all"},
        {"world_size": 2},
        {"keep": np.arange(store.num_examples) > 0},
    ):
        other = store.stream(5, 8, **{"shuffle": "exact", "seed": 1, **changed})
        with pytest.raises(actshard.ArgumentError, match="another stream"):
            other.load_state_dict(state)
    for bad in (None, {}, {"version": 2}, {**state, "batch": -1}, {**state, "batch": 10**6}):
        with pytest.raises(actshard.ArgumentError):
            store.stream(5, 8, shuffle="exact", seed=1).load_state_dict(bad)  # type: ignore[arg-type]


def test_a_loop_left_early_begins_again_and_its_thread_ends() -> None:
    store = opened("saev")
    stream = store.stream(5, 8, shuffle="window", seed=1, memory=20_000)
    first = next(iter(stream))
    gc.collect()
    check_no_threads()
    assert same([next(iter(stream))], [first])
    for batch in stream:
        assert same([batch], [first])
        break
    assert stream.state_dict()["batch"] == 1
    with pytest.raises(ZeroDivisionError):
        fail_in_the_loop(stream)
    gc.collect()
    check_no_threads()
    assert stream.epoch == 0


def fail_in_the_loop(stream: Stream) -> None:
    for _ in stream:
        raise ZeroDivisionError


def check_no_threads() -> None:
    """No thread reads ahead."""
    wait_for_the_end_of("actshard-ahead")


@pytest.mark.parametrize("shuffle", [None, "exact"])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_slow_consumer_stops_the_reader(tmp_path: Path, shuffle: str | None, reuse: bool) -> None:
    """Of 4 MiB in 256 batches, only a few are read while none is requested."""
    values = np.ones((64, 1, 64, 256), "f4")
    path = write_store(tmp_path / "s.zarr", values, np.full(64, 64, "i4"), (1, 1, 64, 256))
    stream = actshard.open(path, io="pread").stream(0, 16, shuffle=shuffle, reuse=reuse)
    before = bytes_read()
    batches = iter(stream)
    next(batches)
    time.sleep(0.3)  # long enough to read everything many times
    assert bytes_read() - before < 200_000
    for _ in batches:
        pass
    assert bytes_read() - before >= values.nbytes


def bytes_read() -> int:
    """Bytes read by system calls of this process."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_reused_arrays_come_back(shuffle: str | None) -> None:
    store = opened("saev")
    want = [b.activations.copy() for b in store.stream(5, 9, shuffle=shuffle, memory=30_000)]
    seen = set()
    for batch, rows in zip(store.stream(5, 9, shuffle=shuffle, memory=30_000, reuse=True), want, strict=True):
        assert np.array_equal(batch.activations, rows)
        seen.add(batch.activations.__array_interface__["data"][0])
    assert len(seen) <= 3
    mine = [np.full((9, store.d_model), np.nan, "f4") for _ in range(2)]
    for batch, rows in zip(store.stream(5, 9, shuffle=shuffle, memory=30_000, buffers=mine), want, strict=True):
        assert np.array_equal(batch.activations, rows)
        assert any(batch.activations is m or batch.activations.base is m for m in mine)
    fresh = list(store.stream(5, 9, shuffle=shuffle, memory=30_000))
    for batch, rows in zip(fresh, want, strict=True):
        assert np.array_equal(batch.activations, rows)
        assert batch.activations.flags.writeable
    for buffers, error in (
        ([np.zeros((9, store.d_model), "f4")], "at least 2"),
        ([np.zeros((8, store.d_model), "f4")] * 2, r"buffers\[0\]: expected an array or tensor of shape"),
    ):
        with pytest.raises(actshard.ArgumentError, match=error):
            iter(store.stream(5, 9, buffers=buffers))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_held_buffers_are_filled_again_only_after_their_release(shuffle: str | None) -> None:
    """For readers that hold several batches, such as copies to a device; what they take does not move the position."""
    store = opened("saev")
    want = [b.activations.copy() for b in store.stream(5, 9, shuffle=shuffle, memory=30_000)]
    stream = store.stream(5, 9, shuffle=shuffle, memory=30_000)
    held = [np.full(stream.batch_shape, np.nan, "f4") for _ in range(3)]
    loop = stream.loop(held)
    taken = [loop.take() for _ in held]
    assert stream.state_dict()["batch"] == 0
    at = [next(i for i, h in enumerate(held) if np.shares_memory(h, b.activations)) for b in taken if b is not None]
    assert sorted(at) == [0, 1, 2]
    time.sleep(0.05)
    assert not loop.ready(), "no buffer is free"
    for number, rows in zip(at, want, strict=False):
        assert np.array_equal(held[number], rows)
    for following, number in itertools.pairwise([*range(2, len(want)), None]):
        loop.release(at[0])
        loop.release(at[0])  # no second time
        loop.hand_out()
        batch = loop.take()
        if number is None:
            assert batch is None
            break
        assert following is not None
        assert batch is not None
        assert np.shares_memory(batch.activations, held[at[0]])
        assert np.array_equal(batch.activations, want[number])
        for other, rows in zip(at[1:], want[number - 2 : number], strict=True):
            assert np.array_equal(held[other][: len(rows)], rows)
        at = [*at[1:], at[0]]
    assert stream.state_dict()["batch"] == len(want) - 2
    loop.hand_out()
    loop.hand_out()
    loop.finish()
    assert (stream.state_dict()["batch"], stream.epoch) == (0, 1)
    loop.release(0)
    with pytest.raises(StopIteration):
        loop.take()


def test_tokens_that_are_read() -> None:
    store = opened("saev")
    t = int(store.token_counts[0])
    n = store.num_examples

    def read(**options: Any) -> list[tuple[int, int]]:
        return [k for b in store.stream(5, 10, **options) for k in keys(b)]

    assert read(tokens="all") == [(e, k) for e in range(n) for k in range(t)]
    assert read(tokens="special") == [(e, 0) for e in range(n)]
    assert read(tokens="last") == [(e, t - 1) for e in range(n)]
    assert read() == [(e, k) for e in range(n) for k in range(1, t)]
    labels = store.labels
    assert labels is not None
    ignore = [int(labels[0, 0]), int(labels[-1, -1])]
    kept = ~np.isin(labels, ignore)
    assert read(ignore_labels=ignore) == [(e, k + 1) for e, k in np.argwhere(kept).tolist()]
    assert read(ignore_labels=ignore, tokens="last") == [(e, t - 1) for e in np.flatnonzero(kept[:, -1]).tolist()]
    with_cls = np.concatenate([np.ones((n, 1), bool), kept], axis=1)
    assert read(ignore_labels=ignore, tokens="all") == [tuple(k) for k in np.argwhere(with_cls).tolist()]
    with pytest.warns(actshard.ActshardWarning, match="has no rows.*ignore_labels leaves out all"):
        assert read(ignore_labels=range(256)) == []
    with pytest.warns(actshard.ActshardWarning, match="ignore_labels leaves out all"):
        assert list(store.stream(5, 10, shuffle="window", ignore_labels=range(256))) == []
    for batch in store.stream(5, 10, shuffle="exact", ignore_labels=ignore):
        assert batch.labels is not None
        assert np.array_equal(batch.labels, labels[batch.examples, batch.tokens - 1])
        assert not np.isin(batch.labels, ignore).any()
    for batch in store.stream(5, 10, tokens="all"):
        assert batch.labels is not None
        assert np.array_equal(batch.labels == -1, batch.tokens == 0)
    assert all(b.labels is None for b in store.stream(5, 10, tokens="special"))
    for options in (
        {"tokens": "some"},
        {"ignore_labels": [256]},
        {"ignore_labels": ["a"]},
        {"tokens": "special", "ignore_labels": [1]},
    ):
        with pytest.raises(actshard.ArgumentError):
            store.stream(5, 10, **options)
    with pytest.raises(actshard.NotStoredError, match=r"labels\.bin not found"):
        actshard.open(saev_dump(GOLDEN / "saev/v21_nocls_oneshard")).stream(2, 10, ignore_labels=[1])
    with pytest.raises(actshard.NotStoredError, match="special"):
        opened("lmprobe").stream(opened("lmprobe").layers[0], 10, tokens="special")


def test_masks_of_every_kind() -> None:
    store = opened("lmprobe")
    layer = store.layers[0]
    counts = store.token_counts.tolist()
    rng = np.random.default_rng(0)
    each = [rng.random(c) < 0.5 for c in counts]
    want = [(e, t) for e, flags in enumerate(each) for t in np.flatnonzero(flags).tolist()]

    def read(keep: Any, tokens: Any = "content", shuffle: Any = None) -> list[tuple[int, int]]:
        stream = store.stream(layer, 10, keep=keep, tokens=tokens, shuffle=shuffle)
        return [k for b in stream for k in keys(b)]

    padded = np.zeros((len(counts), max(counts)), bool)
    for row, flags in zip(padded, each, strict=True):
        row[: len(flags)] = flags
    assert read(each) == want
    assert read(padded) == want
    assert read(lambda table: each) == want
    assert sorted(read(each, shuffle="window")) == want
    assert sorted(read(each, shuffle="exact")) == want
    assert read(each, "last") == [(e, len(f) - 1) for e, f in enumerate(each) if len(f) and f[-1]]
    some = rng.random(len(counts)) < 0.5
    by_example = [(e, t) for e, c in enumerate(counts) for t in range(c) if some[e]]
    assert read(some) == by_example
    assert read(some.tolist()) == by_example
    labels = np.array(store.table["label"].to_pylist())
    import pyarrow.compute as pc

    ones = [(e, t) for e, c in enumerate(counts) for t in range(c) if labels[e] == 1]
    assert read(lambda table: pc.equal(table["label"], 1)) == ones
    for bad in (
        some[:-1],
        each[:-1],
        [f[:-1] for f in each],
        padded.astype(int),
        lambda table: None,
        padded[:, :, None],
    ):
        with pytest.raises(actshard.ArgumentError, match="keep"):
            read(bad)
    saev = opened("saev")
    patches = rng.random((saev.num_examples, int(saev.token_counts[0]) - 1)) < 0.5
    got = [k for b in saev.stream(5, 10, keep=patches) for k in keys(b)]
    assert got == [(e, t + 1) for e, t in np.argwhere(patches).tolist()]


@pytest.mark.filterwarnings("ignore::actshard.OverflowWarning")
@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["saev", "bfloat16", "zarr"])
def test_rows_are_converted_centred_and_scaled(name: str, shuffle: str | None, dtype: Any) -> None:
    store = opened(name)
    layers = list(store.layers[:2])
    d = store.d_model
    rng = np.random.default_rng(1)
    center, factor = rng.standard_normal((2, d)), rng.standard_normal((2, d))
    for options in (
        {},
        {"center": center[0]},
        {"center": center, "scale": factor},
        {"scale": 0.5},
        {"scale": "unit-norm"},
        {"scale": "sqrt-d"},
    ):
        for b in store.stream(layers, 11, shuffle=shuffle, dtype=dtype, memory=small(store, 30, 2), **options):
            rows = np.stack([store.gather(x, b.examples, b.tokens) for x in layers], axis=1)
            assert b.activations.dtype == (store.dtype if dtype is None else np.dtype(b.activations.dtype))
            if not options:
                want = np.stack([store.gather(x, b.examples, b.tokens, dtype=dtype) for x in layers], axis=1)
                assert want.tobytes() == b.activations.tobytes()
                continue
            middle = np.float64 if dtype == "float64" else np.float32
            want = rows.astype(middle)
            if "center" in options:
                want = want - np.broadcast_to(options["center"], (2, d)).astype(middle)
            scale = options.get("scale", 1.0)
            if isinstance(scale, str):
                norms = np.linalg.norm(want.astype(np.float64), axis=-1, keepdims=True)
                want = want * (
                    np.where(norms > 0, (1 if scale == "unit-norm" else d**0.5) / np.maximum(norms, 1e-300), 1)
                )
            else:
                want = want * np.asarray(scale, middle)
            got = b.activations.astype(np.float64)
            step = {"float16": 1e-3, "bfloat16": 1e-2}.get(str(b.activations.dtype), 1e-6)
            with np.errstate(over="ignore"):
                want = want.astype(b.activations.dtype).astype(np.float64)
            assert np.allclose(got, want, rtol=step, atol=1e-7 if step < 1e-5 else 1e-4)
    for options in ({"center": np.zeros(d + 1)}, {"scale": "loud"}, {"scale": np.zeros((3, d))}, {"center": "x"}):
        with pytest.raises(actshard.ArgumentError):
            store.stream(layers, 3, **options)


def test_arguments_that_make_no_sense_are_refused() -> None:
    store = opened("saev")
    for layer, options in (
        (5, {"batch_size": 0}),
        (5, {"batch_size": 2.5}),
        (5, {"shuffle": "some"}),
        (5, {"rank": 1}),
        (5, {"world_size": 0}),
        (5, {"seed": -1}),
        (5, {"memory": 10, "shuffle": "window"}),
        (5, {"memory": "many"}),
        (5, {"interleave": True}),
        ([], {}),
        (2.5, {}),
        (None, {}),
        (5, {"reuse": True, "buffers": [1, 2]}),
    ):
        with pytest.raises(actshard.ArgumentError):
            store.stream(layer, **{"batch_size": 4, **options})  # type: ignore[arg-type]
    for layer in (99, "some", "5", ["5"]):
        with pytest.raises(actshard.LayerError):
            store.stream(layer, 4)
    with pytest.raises(actshard.DtypeError):
        store.stream(5, 4, dtype="int32")
    with pytest.raises(actshard.NotStoredError, match="no hidden states"):
        actshard.open(GOLDEN / "lmprobe/logits_only").stream("all", 4)
    stream = store.stream(5, 4)
    left = iter(stream)
    next(left)
    store.close()
    assert len(list(left)) == len(stream) - 1  # an unfinished loop keeps files open
    with pytest.raises(actshard.ClosedError):
        iter(stream)
    with pytest.raises(actshard.ClosedError):
        store.stream(5, 4)


def test_datasets_without_rows_have_no_batches(tmp_path: Path, shuffle: str | None) -> None:
    none = np.zeros((0, 2, 4, 3), "f4")
    for path, values, lengths in (("a.zarr", none, None), ("b.zarr", np.ones((3, 2, 4, 3), "f4"), np.zeros(3, "i4"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = actshard.open(write_store(tmp_path / path, values, lengths, (1, 1, 4, 3)))
        for tokens in ("content", "all", "last"):
            stream = store.stream("all", 4, shuffle=shuffle, tokens=tokens)
            assert len(stream) == len(list(stream)) == stream.num_rows == 0
        assert store.stats(0).rows == 0
        assert np.isnan(store.stats(0).mean).all()


def test_a_shard_that_disappears_is_one_clear_error(tmp_path: Path, shuffle: str | None, io: str) -> None:
    for what in ("removed", "cut"):
        copy = tmp_path / f"{what}-{shuffle}-{io}"
        shutil.copytree(DATASETS["saev"], copy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = actshard.open(copy, io=io)
        shard = sorted(copy.glob("acts*.bin"))[-1]
        stream = store.stream(5, 3, shuffle=shuffle, memory=small(store, 8))
        if what == "removed":
            shard.unlink()
            kind: type[actshard.ActshardError] = actshard.MissingFileError
        else:
            store.gather(5, store.num_examples - 1, 0)  # it was opened before
            os.truncate(shard, 100)
            kind = actshard.TruncatedFileError
        with pytest.raises(kind) as caught:
            for _ in stream:
                pass
        assert caught.value.path == shard
        gc.collect()
        check_no_threads()


def test_several_streams_of_one_store_at_once() -> None:
    store = opened("saev")
    want = list(store.stream(5, 8, shuffle="window", seed=2, memory=20_000))
    found: list[list[Batch]] = [[] for _ in range(6)]

    def read(k: int) -> None:
        found[k].extend(store.stream(5, 8, shuffle="window", seed=2, memory=20_000))

    threads = [threading.Thread(target=read, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(same(f, want) for f in found)
    for a, b in zip(store.stream(5, 8), store.stream(5, 8), strict=True):
        assert same([a], [b])


def test_one_thread_may_close_what_another_waits_for() -> None:
    store = opened("saev")
    for _ in range(20):
        stream = store.stream(5, 3, shuffle="window", memory=20_000)
        seen: list[int] = []

        def read(stream: Stream = stream, seen: list[int] = seen) -> None:
            for batch in stream:
                seen.append(len(batch))

        threads = [threading.Thread(target=read), threading.Thread(target=stream.close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    gc.collect()
    check_no_threads()


def _in_child(stream: Stream, left: Iterator[Batch], queue: Any) -> None:
    rest = [b.activations.tobytes() for b in left]
    whole = [b.activations.tobytes() for b in stream]
    queue.put((rest, whole))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_forked_child_goes_on_by_itself(shuffle: str | None) -> None:
    store = opened("saev")
    stream = store.stream(5, 8, shuffle=shuffle, memory=20_000)
    want = [b.activations.tobytes() for b in stream]
    second = [b.activations.tobytes() for b in stream]
    third = [b.activations.tobytes() for b in stream]
    stream.set_epoch(0)
    left = iter(stream)
    next(left)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(stream, left, queue))
    child.start()
    rest, whole = queue.get(timeout=PATIENCE)
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert rest == want[1:]
    assert whole in (want, second, third)
    assert [b.activations.tobytes() for b in left] == want[1:]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_workers_share_batches_that_stay_the_same(workers: int, shuffle: str | None) -> None:
    store = opened("saev")
    stream = store.stream(5, 7, shuffle=shuffle, seed=4, memory=small(store, 50))
    want = list(stream)
    for skip in (0, 5):
        shares = []
        for w in range(workers):
            mine = store.stream(5, 7, shuffle=shuffle, seed=4, memory=small(store, 50))
            mine.load_state_dict({**mine.state_dict(), "batch": skip})
            shares.append(list(mine.batches(w, workers)))
        together = [b for turn in itertools.zip_longest(*shares) for b in turn if b is not None]
        assert same(together, want[skip:])


@pytest.mark.slow
def test_the_interpreter_may_end_while_batches_are_read() -> None:
    code = (
        "import actshard,sys,numpy as np\n"
        "s=actshard.open(sys.argv[1])\n"
        "a=iter(s.stream(5,8,shuffle='window',memory=20000)); next(a)\n"
        "b=iter(s.stream(5,8,reuse=True)); next(b)\n"
        "c=iter(s.stream(5,8,buffers=[np.zeros((8,s.d_model),'f4') for _ in range(2)])); next(c)\n"
        "print('end')"
    )
    for _ in range(5):
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(DATASETS["saev"])],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (found.returncode, found.stdout.strip(), found.stderr) == (0, "end", "")


@pytest.mark.parametrize("name", ["saev", "bfloat16", "pooled", "zarr", "coded", "pickle"])
def test_stats_are_those_of_all_rows(name: str) -> None:
    store = opened(name)
    for layer in store.layers[:2]:
        rows = np.concatenate([b.activations for b in store.stream(layer, 1000)]).astype(np.float64)
        told: list[tuple[int, int]] = []
        found = store.stats(layer, progress=lambda done, total, told=told: told.append((done, total)))
        assert told[-1] == (len(rows), len(rows))
        assert found.rows == len(rows)
        for got, want in (
            (found.mean, rows.mean(axis=0)),
            (found.variance, rows.var(axis=0)),
            (found.std, rows.std(axis=0)),
            (found.mean_norm, np.linalg.norm(rows, axis=1).mean()),
        ):
            assert np.allclose(got, want, rtol=1e-9, atol=1e-12 * max(1.0, float(np.abs(rows).max()) ** 2))
        assert np.array_equal(found.min, rows.min(axis=0))
        assert np.array_equal(found.max, rows.max(axis=0))
        assert not found.nan.any()
        assert not found.inf.any()


def test_stats_count_what_is_no_number(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 1, 5, 4)).astype("f4")
    values[0, 0, 1, 2] = np.nan
    values[1, 0, 3, 0] = np.inf
    values[2, 0, :, 3] = -np.inf
    values[:2, 0, :, 3] = np.nan
    found = actshard.open(write_store(tmp_path / "s.zarr", values, np.array([5, 5, 5], "i4"), (1, 1, 5, 4))).stats(0)
    rows = values.reshape(-1, 4).astype(np.float64)
    assert found.nan.tolist() == np.isnan(rows).sum(axis=0).tolist()
    assert found.inf.tolist() == np.isinf(rows).sum(axis=0).tolist()
    rows[~np.isfinite(rows)] = np.nan
    assert np.allclose(found.mean[:3], np.nanmean(rows[:, :3], axis=0))
    assert np.allclose(found.variance[:3], np.nanvar(rows[:, :3], axis=0))
    assert np.isnan(found.mean[3])
    assert np.isnan(found.mean_norm)
    with pytest.raises(ZeroDivisionError):
        opened("saev").stats(5, progress=lambda done, total: 1 / 0)


@pytest.mark.parametrize("every", [1, 2])
def test_an_error_of_the_next_window_comes_when_all_batches_before_it_were_taken(tmp_path: Path, every: int) -> None:
    n = 60
    with actshard.create(tmp_path / "new", "saev", layers=[0], d_model=4, max_tokens_per_shard=1) as writer:
        writer.append([np.full((1, 1, 4), i, np.float32) for i in range(n)])
    options = {"shuffle": "window", "seed": 3, "memory": 20 * 44}
    stream = actshard.open(writer.path).stream(0, 3, **options)
    order = [int(e) for batch in stream for e in batch.examples]
    size = -(-n // -(-n // stream._native.window))
    assert n // 4 < size < n // 2
    wanted = [example for at, example in enumerate(order) if at // 3 % every == 0 and at >= size]
    for broken in wanted[:: len(wanted) // 3]:
        stream = actshard.open(writer.path).stream(0, 3, **options)
        shard = writer.path / f"acts{broken:06}.bin"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:5])
        read: list[int] = []
        batches = stream.batches(every=every) if every > 1 else iter(stream)
        with pytest.raises(actshard.TruncatedFileError):
            read.extend(e for batch in batches for e in batch.examples)
        window = order.index(broken) // size
        before = [b for b in range(-(-n // 3)) if (b + 1) * 3 <= window * size][::every]
        assert read[: 3 * len(before)] == [e for b in before for e in order[3 * b : 3 * b + 3]]
        shard.write_bytes(whole)


def test_the_least_memory_of_a_window_that_an_error_names_is_enough(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=6, dtype="float32") as writer:
        writer.append(np.ones((3, 1, 2, 6), np.float32))
    store = actshard.open(tmp_path / "d")
    with pytest.raises(
        actshard.ArgumentError, match="memory: expected at least 52 bytes, for one row and its number, found 51"
    ):
        store.stream(0, 2, shuffle="window", memory=51)
    assert store.stream(0, 2, shuffle="window", memory=52).window == 1
