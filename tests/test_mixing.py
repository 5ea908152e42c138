"""``actshard.mix``: every batch holds each store's share, in an order that resumes, divides and repeats like any stream's."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard.streaming.mixing import MixedBatch, MixedStream

TOKENS, WIDTH = 4, 8


def written(
    path: Path, examples: int, first: int, *, layers: tuple[int, ...] = (5,), dtype: str = "float32"
) -> actshard.Store:
    """A dataset whose rows begin with their number, counted from ``first``."""
    rows = np.arange(first, first + examples * TOKENS, dtype=dtype).reshape(examples, TOKENS)
    acts = np.repeat(rows[:, None, :, None], len(layers), axis=1).repeat(WIDTH, axis=-1)
    with actshard.create(path, "lmprobe", layers=list(layers), d_model=WIDTH, dtype=dtype) as writer:
        writer.append(acts)
    return actshard.open(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[actshard.Store, actshard.Store]:
    folder = tmp_path_factory.mktemp("mixed")
    return written(folder / "a", 50, 0), written(folder / "b", 30, 1000)


def first_values(batch: MixedBatch) -> list[int]:
    return [int(x) for x in batch.activations[:, 0]]


def check(batch: MixedBatch, stream: MixedStream) -> None:
    """A batch is what its own numbers say."""
    assert isinstance(batch, MixedBatch)
    assert np.bincount(batch.sources, minlength=len(stream.counts)).tolist() == list(stream.counts)
    for i, store in enumerate(stream.mixture.stores):
        of = batch.sources == i
        expected = store.gather(5, batch.examples[of], batch.tokens[of])
        assert batch.activations[of].tobytes() == expected.tobytes()
    assert batch.layers.tolist() == [5]


def test_every_batch_has_exact_shares_of_rows_in_no_blocks(pair: Any) -> None:
    a, b = pair
    stream = actshard.mix({a: 0.7, b: 0.3}, seed=3).stream(5, 20)
    assert stream.counts == (14, 6)
    assert len(stream) == min(200 // 14, 120 // 6)
    batches = list(stream)
    assert len(batches) == len(stream)
    for batch in batches:
        check(batch, stream)
    assert any(np.diff(batch.sources).min() < 0 for batch in batches)
    seen = [value for batch in batches for value in first_values(batch)]
    assert len(set(seen)) == len(seen)
    again = actshard.mix([(a, 7), (b, 3)], seed=3).stream(5, 20)
    assert [first_values(x) for x in again] == [first_values(x) for x in batches]
    assert [first_values(x) for x in actshard.mix({a: 7, b: 3}, seed=4).stream(5, 20)] != [
        first_values(x) for x in batches
    ]


def test_stored_order_keeps_each_store_together(pair: Any) -> None:
    a, b = pair
    stream = actshard.mix({a: 1, b: 1}).stream(5, 8, shuffle=None)
    batches = list(stream)
    assert first_values(batches[0]) == [0, 1, 2, 3, 1000, 1001, 1002, 1003]
    assert first_values(batches[1]) == [4, 5, 6, 7, 1004, 1005, 1006, 1007]
    for batch in batches:
        check(batch, stream)


def test_stop_continues_the_longer_store_in_the_next_epoch(pair: Any) -> None:
    a, b = pair  # 200 and 120 rows, so 50 and 30 batches
    stream = actshard.mix({a: 1, b: 1}, exhausted="stop").stream(5, 8)
    assert len(stream) == 30
    seen = [Counter(v for batch in stream for v in first_values(batch) if v < 1000) for _ in range(5)]
    assert sum(seen, Counter()) == dict.fromkeys(range(200), 3)  # 150 batches of four: each row three times


def test_repeat_reads_the_longest_store_once_and_begins_the_others_again(pair: Any) -> None:
    a, b = pair
    stream = actshard.mix({a: 1, b: 1}, exhausted="repeat").stream(5, 8)
    assert len(stream) == 50
    batches = list(stream)
    values = [v for batch in batches for v in first_values(batch)]
    counted = Counter(values)
    assert sorted(v for v in counted if v < 1000) == list(range(200))
    assert {counted[v] for v in range(200)} == {1}
    assert {counted[v] for v in range(1000, 1120)} == {1, 2}
    of_b = [v for v in values if v >= 1000]
    assert of_b[:80] != of_b[120:]  # another order


@pytest.mark.slow
@settings(max_examples=40)
@given(
    shares=st.lists(st.floats(0.25, 1), min_size=1, max_size=4),
    batch=st.integers(24, 40),
    exhausted=st.sampled_from(["stop", "repeat"]),
    shuffle=st.sampled_from([None, "window", "exact"]),
    at=st.integers(0, 12),
    every=st.integers(1, 3),
)
def test_resuming_and_dividing_give_the_remaining_batches(
    pair: Any, shares: list[float], batch: int, exhausted: Any, shuffle: Any, at: int, every: int
) -> None:
    a, b = pair
    stores = [(s, share) for s, share in zip((a, b, a.filter(slice(10, 40)), b), shares, strict=False)]
    mixture = actshard.mix(stores, seed=1, exhausted=exhausted)

    def stream() -> MixedStream:
        return mixture.stream(5, batch, shuffle=shuffle)

    whole = stream()
    every_batch = [first_values(x) for _ in range(3) for x in whole]
    n = len(whole)
    assert len(every_batch) == 3 * n
    first = stream()
    taken, loop = [], iter(first)
    for _ in range(min(at, n - 1)):
        taken.append(first_values(next(loop)))
    state = first.state_dict()
    rest = stream()
    rest.load_state_dict(pickle.loads(pickle.dumps(state)))
    taken += [first_values(x) for x in rest]
    taken += [first_values(x) for x in rest]
    assert taken == every_batch[: 2 * n]
    workers = [[first_values(x) for x in stream().batches(w, every)] for w in range(every)]
    assert [workers[i % every][i // every] for i in range(n)] == every_batch[:n]


def test_ranks_have_equally_many_batches_and_no_row_twice(pair: Any) -> None:
    a, b = pair
    streams = [actshard.mix({a: 2, b: 1}).stream(5, 9, rank=r, world_size=3) for r in range(3)]
    assert len({len(s) for s in streams}) == 1
    values = [v for s in streams for x in s for v in first_values(x)]
    assert len(set(values)) == len(values) == 3 * 9 * len(streams[0])


def test_a_mixture_pickles_and_reuses_memory(pair: Any) -> None:
    a, b = pair
    stream = actshard.mix({a: 0.5, b: 0.5}).stream(5, 16, reuse=True)
    expected = [first_values(x) for x in stream]
    copy = pickle.loads(pickle.dumps(actshard.mix({a: 0.5, b: 0.5}).stream(5, 16)))
    assert [first_values(x) for x in copy] == expected
    addresses = {x.activations.ctypes.data for x in stream}
    assert len(addresses) <= 3


def _read_in_child(stream: MixedStream, to: Any) -> None:
    to.send([first_values(x) for x in stream])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_mixture_reads_in_a_child(pair: Any, method: str) -> None:
    a, b = pair
    stream = actshard.mix({a: 0.5, b: 0.5}).stream(5, 16)
    expected = [first_values(x) for x in stream]
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    fresh = actshard.mix({a: 0.5, b: 0.5}).stream(5, 16)
    next(iter(fresh))
    fresh.set_epoch(0)
    child = context.Process(target=_read_in_child, args=(fresh.afresh(), there))
    child.start()
    assert here.recv() == expected
    child.join()


def test_layers_are_stacked_or_interleaved_as_in_any_stream(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", 10, 0, layers=(5, 9)), written(tmp_path / "b", 10, 500, layers=(5, 9))
    stacked = next(iter(actshard.mix({a: 1, b: 1}).stream([5, 9], 10)))
    assert stacked.activations.shape == (10, 2, WIDTH)
    assert stacked.layers.tolist() == [5, 9]
    assert (stacked.activations[:, 0] == stacked.activations[:, 1]).all()
    mixed = actshard.mix({a: 1, b: 1}).stream([5, 9], 10, interleave=True)
    for batch in mixed:
        for i, store in enumerate((a, b)):
            for layer in (5, 9):
                of = (batch.sources == i) & (batch.layers == layer)
                if of.any():
                    expected = store.gather(layer, batch.examples[of], batch.tokens[of])
                    assert batch.activations[of].tobytes() == expected.tobytes()


def test_dtypes_are_converted_only_if_asked(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", 10, 0), written(tmp_path / "b", 10, 100, dtype="float16")
    with pytest.raises(actshard.ArgumentError, match=r"dtype='float32' converts"):
        actshard.mix({a: 1, b: 1}).stream(5, 8)
    stream = actshard.mix({a: 1, b: 1}).stream(5, 8, dtype="float64")
    assert {v >= 100 for v in first_values(next(iter(stream)))} == {True, False}


def test_bad_mixtures_are_refused_by_name(pair: Any, tmp_path: Path) -> None:
    a, b = pair
    for given_, said in (
        ({}, "at least one store"),
        ({a: 0}, "positive number"),
        ({a: True}, "positive number"),
        ({a: float("nan")}, "positive number"),
        ({a: "1"}, "positive number"),
        ([a, b], "pairs"),
        ([("a", 1)], r"open stores, found str. Open a path first: actshard.open\(path\)"),
        ("run", r"shares by store, such as .* with a = actshard.open\(path\), found str"),
        (3, "shares by store"),
    ):
        with pytest.raises(actshard.ArgumentError, match=said):
            actshard.mix(given_)  # type: ignore[arg-type]
    with pytest.raises(actshard.ArgumentError, match="exhausted"):
        actshard.mix({a: 1}, exhausted="loop")  # type: ignore[arg-type]
    mixture = actshard.mix({a: 0.999, b: 0.001})
    with pytest.raises(actshard.ArgumentError, match="leave no row for source 1"):
        mixture.stream(5, 16)
    with pytest.raises(actshard.ArgumentError, match="has 200"):
        actshard.mix({a: 0.5, b: 0.5}).stream(5, 1000)
    for name in ("seed", "drop_last", "buffers"):
        with pytest.raises(actshard.ArgumentError, match=name):
            mixture.stream(5, 16, **{name: 1})
    other = actshard.mix({a: 1, b: 1}).stream(5, 16)
    with pytest.raises(actshard.ArgumentError, match="another"):
        other.load_state_dict(actshard.mix({b: 1, a: 1}).stream(5, 16).state_dict())
    with pytest.raises(actshard.LayerError):
        actshard.mix({a: 1}).stream(6, 16)


def test_rows_that_are_left_out_are_told_by_store(pair: Any, tmp_path: Path) -> None:
    a, b = pair
    stream = actshard.mix({a: 1, b: 1}).stream(5, 10, min_token=1)
    assert [told["min_token"] for told in stream.left_out] == [50, 30]
    assert stream.left_out == tuple(s.stream(5, 5, min_token=1).left_out for s in (a, b))
    for batch in stream:
        assert batch.tokens.min() >= 1
        check(batch, stream)
    limited = actshard.mix({a: 1, b: 1}).stream(5, 10, max_norm=3000.0)
    assert [told["max_norm"] for told in limited.left_out] == [
        s.stream(5, 5, max_norm=3000.0).left_out["max_norm"] for s in (a, b)
    ]
    asked = []

    def keep(table: Any) -> Any:
        asked.append(len(table))
        return np.ones(len(table), bool)

    actshard.mix({a: 1, b: 1}).stream(5, 10, keep=keep)
    assert asked == [50, 30]  # once for each store


def _consume(stream: MixedStream, to: Any, at: int) -> None:
    """Sends batches, each with the state after it, and dies without a word."""
    for i, batch in enumerate(stream):
        to.send((first_values(batch), stream.state_dict()))
        if i == at:
            os._exit(9)


@pytest.mark.parametrize(("method", "exhausted"), [("fork", "stop"), ("fork", "repeat"), ("spawn", "repeat")])
def test_a_killed_consumer_continues_at_its_last_state(pair: Any, method: str, exhausted: Any) -> None:
    """Each process reads some batches and dies; the next one continues where the last state was, over epochs."""
    a, b = pair
    mixture = actshard.mix({a: 0.6, b: 0.4}, seed=5, exhausted=exhausted)
    whole = mixture.stream(5, 20)
    expected = [first_values(x) for _ in range(2) for x in whole]
    context = multiprocessing.get_context(method)
    stream, got, state = mixture.stream(5, 20), [], None
    next(iter(stream))  # the parent has used its threads
    stream.close()
    for at in (0, len(whole) // 2, len(whole) - 2)[: 3 if method == "fork" else 1]:
        fresh = mixture.stream(5, 20)
        if state is not None:
            fresh.load_state_dict(state)
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_consume, args=(fresh, there, at))
        child.start()
        there.close()
        while True:
            try:
                values, state = here.recv()
            except EOFError:
                break
            got.append(values)
        child.join()
        here.close()
    assert got
    assert got == expected[: len(got)]
    last = mixture.stream(5, 20)
    last.load_state_dict(state)
    rest = [first_values(x) for x in last]
    assert got + rest == expected[: len(got) + len(rest)]


def test_a_repr_fits_a_screen(pair: Any) -> None:
    a, b = pair
    mixture = actshard.mix([(a, 1), (b, 1)] * 20)
    assert len(repr(mixture)) < 800
    assert len(repr(mixture.stream(5, 80))) < 400


def test_a_state_of_a_release_whose_streams_named_less_continues_with_a_warning(pair: Any) -> None:
    a, b = pair
    mixture = actshard.mix({a: 0.7, b: 0.3}, seed=3)
    stream = mixture.stream(5, 20)
    expected = [first_values(batch) for batch in stream]
    state = {**stream.state_dict(), "epoch": 0, "batch": 4}
    for settings_of_source in state["settings"]["mixture"]:
        for name in ("sample", "dtype", "shape"):
            del settings_of_source[name]
    again = mixture.stream(5, 20)
    with pytest.warns(actshard.ActshardWarning, match="does not name its dataset completely"):
        again.load_state_dict(state)
    assert [first_values(batch) for batch in again] == expected[4:]
    state["settings"]["mixture"][1]["selection"] = "0"
    with pytest.raises(actshard.ArgumentError, match="mixture 1 selection: '0' in the state"):
        mixture.stream(5, 20).load_state_dict(state)
    state["settings"]["mixture"] = [1]
    with pytest.raises(actshard.ArgumentError, match="belongs to another stream"):
        mixture.stream(5, 20).load_state_dict(state)
