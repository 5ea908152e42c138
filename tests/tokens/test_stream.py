"""Guarantee: a token stream yields ``get_batch(order(range(...)))``, once per epoch, resumable, divided among ranks."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import pickle
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import tokens
from actshard.tokens.mixing import Sliced
from conftest import refuses
from waiting import PATIENCE, wait_until

ROWS, LENGTH = 23, 6


def write(path: Path, rows: int, storage: str = "plain") -> tokens.TokenCache:
    with tokens.CacheWriter(path, {"input_ids": np.int32}, storage=storage) as writer:
        for i in range(rows):
            writer.append([{"input_ids": np.arange(LENGTH, dtype=np.int32) + LENGTH * i}])
    return tokens.open_cache(path)


@pytest.fixture
def cache(tmp_path: Path) -> tokens.TokenCache:
    return write(tmp_path / "cache", ROWS)


def every_dataset(cache: tokens.TokenCache) -> dict[str, Any]:
    windows = tokens.TokenSeqDataset(cache, 4)
    causal = tokens.CausalLmDataset(windows, eos_id=5)
    packed = tokens.PackedTokenDataset(cache, 13)
    prebuilt = tokens.PrebuiltLmDataset(cache)
    return {
        "windows": windows,
        "causal": causal,
        "packed": packed,
        "prebuilt": prebuilt,
        "permuted": tokens.Permuted(causal, tokens.permutation("feistel", len(causal), 3)),
        "sliced": Sliced(causal, 3, 20),
        "mixture": tokens.Mixture(
            {"a": causal, "b": Sliced(causal, 0, 9)},
            {"a": 0.5, "b": 0.5},
            block_size=8,
            stop_strategy="first_exhausted",
        ),
    }


DATASETS = ["windows", "causal", "packed", "prebuilt", "permuted", "sliced", "mixture"]


def same(a: Any, b: Any) -> bool:
    one, other = tokens.stream.arrays(a), tokens.stream.arrays(b)
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_get_batch(cache: tokens.TokenCache, name: str) -> None:
    dataset = every_dataset(cache)[name]
    n = len(dataset)
    found = list(dataset.stream(4))
    assert len(found) == len(dataset.stream(4)) == -(-n // 4)
    for step, batch in enumerate(found):
        assert same(batch, dataset.get_batch(range(4 * step, min(4 * step + 4, n))))


@pytest.mark.parametrize("kind", ["block", "feistel", "linear"])
def test_orders_are_those_of_permutations(cache: tokens.TokenCache, kind: str) -> None:
    dataset = every_dataset(cache)["causal"]
    n = len(dataset)
    order = tokens.permutation(kind, n, 7)
    for stream in (dataset.stream(5, shuffle=kind, seed=7), dataset.stream(5, shuffle=order)):
        for step, batch in enumerate(stream):
            assert same(batch, dataset.get_batch(order(range(5 * step, min(5 * step + 5, n)))))
        assert step == len(stream) - 1
        # The next epoch's key has the epoch folded in.
        again = tokens.permutation(kind, n, tokens.fold_in(tokens.prng_key(7), 1))
        assert stream.epoch == 1
        assert same(next(iter(stream)), dataset.get_batch(again(range(5))))


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_index_comes_once_per_epoch_and_ranks_share_it(
    cache: tokens.TokenCache, name: str, drop_last: bool, ranks: int
) -> None:
    dataset = every_dataset(cache)[name]
    shuffle = None if name == "mixture" else "feistel"
    streams = [
        dataset.stream(3, shuffle=shuffle, rank=rank, world_size=ranks, drop_last=drop_last) for rank in range(ranks)
    ]
    assert len({len(stream) for stream in streams}) == 1
    for epoch in range(2):
        every = []
        for stream in streams:
            assert stream.epoch == epoch
            wanted = [stream.indices(i) for i in range(len(stream))]
            found = list(stream)
            assert len(found) == len(wanted)
            assert all(same(batch, dataset.get_batch(where)) for batch, where in zip(found, wanted, strict=True))
            assert all(1 <= len(where) <= 3 for where in wanted)
            every += [int(i) for where in wanted for i in where]
        assert len(every) == len(set(every))
        assert len(every) == (len(dataset) // (3 * ranks) * 3 * ranks if drop_last else len(dataset))


def test_what_ranks_read_together_does_not_depend_on_how_many_they_are(cache: tokens.TokenCache) -> None:
    dataset = every_dataset(cache)["causal"]
    one = dataset.stream(6, shuffle="block")
    two = [dataset.stream(3, shuffle="block", rank=rank, world_size=2) for rank in range(2)]
    for step in range(len(one) - 1):
        assert one.indices(step).tolist() == [int(i) for stream in two for i in stream.indices(step)]


@pytest.mark.parametrize("name", DATASETS)
def test_resuming_at_each_batch_gives_the_same(cache: tokens.TokenCache, name: str) -> None:
    dataset = every_dataset(cache)[name]

    def stream() -> tokens.TokenStream:
        return dataset.stream(4, shuffle=None if name == "mixture" else "block", seed=2, epoch=1)

    whole = list(stream())
    for at in range(len(whole) + 1):
        begun = stream()
        loop = iter(begun)
        for _ in range(at):
            next(loop)
        state = json.loads(json.dumps(begun.state_dict()))
        assert len(json.dumps(state)) < 600
        resumed = stream()
        resumed.load_state_dict(state)
        left = list(resumed)
        wanted = whole[at:] if at < len(whole) else list(dataset.stream(4, shuffle=begun.shuffle, seed=2, epoch=2))
        assert len(left) == len(wanted)
        assert all(same(a, b) for a, b in zip(left, wanted, strict=True))
        # So does a copy of the stream.
        begun.close()
        copied = list(pickle.loads(pickle.dumps(begun)))
        wanted = whole[at:]
        assert len(copied) == len(wanted)
        assert all(same(a, b) for a, b in zip(copied, wanted, strict=True))


def test_a_mixture_without_an_end_streams_on(cache: tokens.TokenCache) -> None:
    causal = every_dataset(cache)["causal"]
    mixture = tokens.Mixture({"a": causal, "b": Sliced(causal, 0, 3)}, {"a": 0.5, "b": 0.5}, block_size=16)
    stream = mixture.stream(8, rank=1, world_size=2)
    assert stream
    loop = iter(stream)
    for step in range(30):
        wanted = mixture.get_batch(range(16 * step + 8, 16 * step + 16))
        assert same(next(loop), wanted)
    state = stream.state_dict()
    assert state["batch"] == 30
    again = mixture.stream(8, rank=0, world_size=2)
    again.load_state_dict(state)
    assert same(next(iter(again)), mixture.get_batch(range(480, 488)))
    for endless in (stream, mixture):
        # TypeError, like any object without a length, so that progress bars and loaders handle it.
        with refuses(actshard.ArgumentTypeError, None, "is endless"):
            len(endless)
    with refuses(actshard.ArgumentError, None, "endless dataset"):
        mixture.stream(8, shuffle="block")
    stream.close()


def test_a_state_of_another_dataset_or_of_other_settings_is_refused(cache: tokens.TokenCache, tmp_path: Path) -> None:
    causal = every_dataset(cache)["causal"]
    state = causal.stream(4, shuffle="block").state_dict()
    other = write(tmp_path / "other", ROWS + 1)
    moved = write(tmp_path / "moved", ROWS)
    for stream in (
        causal.stream(5, shuffle="block"),
        causal.stream(4),
        causal.stream(4, shuffle="block", seed=1),
        causal.stream(4, shuffle="feistel"),
        causal.stream(4, shuffle="block", drop_last=True),
        causal.stream(4, shuffle="block", world_size=2),
        tokens.TokenSeqDataset(cache, 4).stream(4, shuffle="block"),
        every_dataset(other)["causal"].stream(4, shuffle="block"),
    ):
        with refuses(actshard.ArgumentError, None, "the state belongs to another"):
            stream.load_state_dict(state)
    same_rows = every_dataset(moved)["causal"].stream(4, shuffle="block")
    same_rows.load_state_dict(state)
    with refuses(actshard.ArgumentError, None, "expected a state"):
        same_rows.load_state_dict({"batch": 1})


class Slow:
    """A dataset that records the indices read, and waits or fails on request."""

    def __init__(self, fails_at: int | None = None, seconds: float = 0) -> None:
        self.fails_at, self.seconds, self.read = fails_at, seconds, []

    def __len__(self) -> int:
        return 40

    def get_batch(self, indices: Any) -> np.ndarray:
        time.sleep(self.seconds)
        if self.fails_at is not None and self.fails_at in np.asarray(indices).tolist():
            raise actshard.FormatError(f"example {self.fails_at} is broken")
        self.read += np.asarray(indices).tolist()
        return np.asarray(indices, np.int32)[:, None]


def test_an_error_of_the_reader_comes_at_its_batch_and_the_stream_can_go_on() -> None:
    dataset = Slow(fails_at=17)
    stream = tokens.TokenStream(dataset, 4)
    found = []
    loop = iter(stream)
    with refuses(actshard.FormatError, None, "example 17 is broken"):
        while True:
            found.append(next(loop))
    assert [int(b[0, 0]) for b in found] == [0, 4, 8, 12]
    with refuses(actshard.FormatError, None, "example 17 is broken"):
        next(loop)
    assert stream.state_dict()["batch"] == 4
    dataset.fails_at = None
    stream.load_state_dict(stream.state_dict())
    assert [int(b[0, 0]) for b in stream] == list(range(16, 40, 4))


def test_no_more_is_read_ahead_than_asked_for() -> None:
    dataset = Slow()
    stream = tokens.TokenStream(dataset, 4, ahead=3)
    _ = stream.identity
    dataset.read.clear()
    loop = iter(stream)
    next(loop)
    wait_until(lambda: len(dataset.read) >= 16, "batches ahead")
    time.sleep(0.1)
    # One with the user, three buffered.
    assert len(dataset.read) == 16
    stream.close()


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "actshard-batches"]


def test_a_loop_that_is_left_ends_its_thread(cache: tokens.TokenCache) -> None:
    stream = every_dataset(cache)["causal"].stream(2)
    for leave in ("close", "break", "drop", "end", "another"):
        if leave == "close":
            loop = iter(stream)
            next(loop)
            stream.close()
            with pytest.raises(StopIteration):
                next(loop)
        elif leave == "break":
            for _ in stream:
                break
        elif leave == "drop":
            loop = iter(stream)
            next(loop)
            del loop
        elif leave == "end":
            assert len(list(stream)) == len(stream)
        else:
            first, second = iter(stream), iter(stream)
            with pytest.raises(actshard.ClosedError, match="another loop"):
                next(first)
            next(second)
            del first, second
        gc.collect()
        assert readers() == []


def _child(stream: tokens.TokenStream, send: Any) -> None:
    send.send([tokens.stream.arrays(batch)["tokens"].tolist() for batch in stream])


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.parametrize("storage", ["plain", "lz4"])
def test_a_stream_travels_to_other_processes(tmp_path: Path, how: str, storage: str) -> None:
    dataset = tokens.CausalLmDataset(tokens.TokenSeqDataset(write(tmp_path / "cache", ROWS, storage), 4), eos_id=5)
    stream = dataset.stream(3, shuffle="block")
    loop = iter(stream)
    next(loop)
    next(loop)
    wanted = [stream.indices(i) for i in range(2, len(stream))]
    context = multiprocessing.get_context(how)
    receive, send = context.Pipe(duplex=False)
    if how == "fork":
        stream.load_state_dict(stream.state_dict())
    child = context.Process(target=_child, args=(stream, send))
    child.start()
    assert receive.poll(PATIENCE)
    found = receive.recv()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert found == [dataset.get_batch(where).tokens.tolist() for where in wanted]


def test_a_loop_goes_on_in_a_forked_child_and_in_its_parent(cache: tokens.TokenCache) -> None:
    dataset = every_dataset(cache)["causal"]
    for at in range(8):
        stream = dataset.stream(2)
        loop = iter(stream)
        for _ in range(at):
            next(loop)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if same(next(loop), dataset.get_batch([2 * at, 2 * at + 1])) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(next(loop), dataset.get_batch([2 * at, 2 * at + 1]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"shuffle": "exact"}, "shuffle"),
        ({"shuffle": tokens.permutation("block", 3)}, "does not fit"),
        ({"rank": 1}, "rank"),
        ({"world_size": 0}, "world_size"),
        ({"epoch": -1}, "epoch"),
        ({"ahead": 0}, "ahead"),
        ({"seed": "x", "shuffle": "block"}, "key"),
        ({"batch_size": 34, "world_size": 9}, "too few for 9 ranks"),
    ],
)
def test_settings_that_make_no_sense_are_refused(cache: tokens.TokenCache, options: dict, words: str) -> None:
    dataset = every_dataset(cache)["windows"]
    if options.get("world_size"):
        dataset = Sliced(dataset, 0, 5)
    with refuses(actshard.ArgumentError, None, words):
        dataset.stream(**{"batch_size": 4, **options})


def test_a_dataset_needs_get_batch_and_a_length() -> None:
    with refuses(actshard.ArgumentTypeError, None, "get_batch"):
        tokens.TokenStream([1, 2], 1)  # type: ignore[arg-type]


def test_an_empty_dataset_has_no_batches(tmp_path: Path) -> None:
    dataset = tokens.TokenSeqDataset(write(tmp_path / "cache", 0), 4)
    stream = dataset.stream(4)
    assert list(stream) == []
    assert not stream
    assert stream.epoch == 1


def test_levanters_get_batch_does_not_hold_the_event_loop(cache: tokens.TokenCache) -> None:
    from actshard.compat import levanter

    dataset = levanter.TokenSeqDataset(cache, 4)
    began, go = threading.Event(), threading.Event()
    read = dataset._read

    def slowly(indices: Any) -> Any:
        began.set()
        assert go.wait(PATIENCE)
        return read(indices)

    dataset._read = slowly

    async def both() -> Any:
        reading = asyncio.ensure_future(dataset.get_batch([0, 1]))
        while not began.is_set():
            await asyncio.sleep(0.001)
        go.set()  # reached only if the event loop is not blocked while the batch is read
        return await reading

    found = asyncio.run(both())
    assert np.array_equal(found[1]["input_ids"], [4, 5, 6, 7])


def test_a_dataset_whose_examples_are_longer_than_the_cache_warns(cache: tokens.TokenCache, tmp_path: Path) -> None:
    dataset = tokens.TokenSeqDataset(cache, 4096)
    with pytest.warns(
        actshard.ActshardWarning, match="no examples: TokenSeqDataset makes none of 23 documents, 138"
    ) as told:
        assert list(dataset.stream(8)) == []
    assert [x.filename for x in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(tokens.TokenSeqDataset(write(tmp_path / "empty", 0), 4096).stream(8)) == []


def test_weights_outside_of_float64_are_refused(cache: tokens.TokenCache) -> None:
    dataset = tokens.TokenSeqDataset(cache, 4)
    with pytest.raises(actshard.ArgumentError, match="must be finite"):
        tokens.Mixture({"a": dataset}, {"a": 10**400})
