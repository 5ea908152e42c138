"""Streams of whole sequences: each example once and whole, equal steps on all ranks, the same batches after any interruption."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard import SequenceBatch, SequenceStream, Store
from conftest import GOLDEN, refuses, saev_dump

WIDTH = 4


def values(example: int, tokens: int) -> np.ndarray:
    """Rows that name their example, layer and token: (2, tokens, WIDTH)."""
    rows = np.zeros((2, tokens, WIDTH), np.float32)
    rows[..., 0] = example
    rows[1, :, 1] = 1
    rows[..., 2] = np.arange(tokens)
    rows[..., 3] = 1
    return rows


def store_of(folder: Path, lengths: list[int], format: str = "lmprobe", **options: Any) -> Store:
    with actshard.create(folder / format, format, layers=[2, 5], d_model=WIDTH, **options) as writer:
        for i, n in enumerate(lengths):
            columns = {"ids": [list(range(100 * i, 100 * i + n))], "label": [i % 3]}
            writer.append([values(i, n)], columns=columns)
    return actshard.open(folder / format)


def lengths_of(count: int, most: int = 40) -> list[int]:
    return np.random.default_rng(0).integers(1, most, count).tolist()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("sequences")
    lengths = lengths_of(120)
    return {
        "lmprobe": store_of(folder, lengths),
        "pickle": store_of(folder, lengths, "pickle", compress=True, shard_bytes=4000),
    }


@pytest.fixture(params=["lmprobe", "pickle"])
def store(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    return stores[request.param]


def check(batch: SequenceBatch, store: Store, pack: bool) -> Iterator[tuple[int, int, int]]:
    """Compares a batch with single reads; yields (example, first token, length) of each sequence."""
    n = len(batch)
    assert batch.offsets.dtype == np.int32
    assert batch.segment_ids.dtype == np.int32
    assert batch.offsets.tolist() == [0, *np.cumsum(batch.lengths).tolist()]
    assert batch.max_length == batch.lengths.max()
    shape = batch.tokens.shape
    assert batch.position_ids.shape == batch.segment_ids.shape == shape == batch.activations.shape[: len(shape)]
    real = batch.tokens >= 0
    if batch.mask is None:
        assert pack
        assert real.all()
    else:
        assert (batch.mask == real).all()
    assert (batch.segment_ids[~real] == -1).all()
    assert (batch.position_ids[~real] == 0).all()
    assert (batch.activations[~real] == 0).all()
    for i in range(n):
        example, length = int(batch.examples[i]), int(batch.lengths[i])
        mine = batch.segment_ids == i
        assert mine.sum() == length
        where = np.flatnonzero(mine.reshape(-1))
        assert (np.diff(where) == 1).all()
        positions, tokens = batch.position_ids[mine], batch.tokens[mine]
        assert (np.diff(positions) == 1).all()
        rows = batch.activations[mine]
        for k, layer in enumerate(batch.layers.tolist()):
            of_layer = rows[:, k] if rows.ndim == 3 else rows
            assert (of_layer == store.gather(layer, example, tokens)).all()
        yield example, int(positions[0]), length


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shuffle", [None, "exact", "window"])
def test_every_example_comes_once_and_whole(store: Store, shuffle: Any, pack: bool) -> None:
    for layer in (5, [5, 2]):
        stream = store.sequences_stream(layer, 64, pack=pack, shuffle=shuffle, memory=8_000)
        for _ in range(2):
            seen = []
            batches = list(stream)
            assert len(batches) == len(stream)
            for batch in batches:
                seen += list(check(batch, store, pack))
                assert batch.tokens.size <= 64
            assert sorted(seen) == [(i, 0, n) for i, n in enumerate(store.token_counts.tolist())]
    assert stream.num_tokens == store.token_counts.sum()


def test_the_default_is_packed_in_nearly_stored_order(store: Store) -> None:
    batches = list(store.sequences_stream(2, 64))
    firsts = [int(b.examples[0]) for b in batches]
    assert firsts == sorted(firsts)
    assert all(b.mask is None and (np.diff(b.examples) > 0).all() for b in batches)
    assert sum(len(b.tokens) for b in batches) > 0.95 * 64 * len(batches)


@pytest.mark.parametrize("shuffle", ["exact", "window"])
def test_epochs_differ_and_have_equally_many_batches(store: Store, shuffle: Any) -> None:
    stream = store.sequences_stream(2, 64, shuffle=shuffle, memory=20_000)
    first, second = ([b.examples.tolist() for b in stream] for _ in range(2))
    assert len(first) == len(second) == len(stream)
    assert first != second
    again = store.sequences_stream(2, 64, shuffle=shuffle, memory=20_000, epoch=1)
    assert [b.examples.tolist() for b in again] == second
    other = store.sequences_stream(2, 64, shuffle=shuffle, memory=20_000, seed=1)
    assert [b.examples.tolist() for b in other] != first


@pytest.mark.filterwarnings("ignore:.*the stream has no rows")
@settings(max_examples=15)
@given(
    kept=st.lists(st.booleans(), min_size=120, max_size=120), ranks=st.integers(1, 5), pack=st.booleans(),
    shuffle=st.sampled_from([None, "exact", "window"]), budget=st.integers(40, 200), drop_last=st.booleans(),
)  # fmt: skip
def test_ranks_have_equal_steps_and_share_all_examples(
    stores: dict[str, Store], kept: list[bool], ranks: int, pack: bool, shuffle: Any, budget: int, drop_last: bool
) -> None:
    store = stores["lmprobe"]
    seen: list[int] = []
    steps = set()
    for rank in range(ranks):
        try:
            stream = store.sequences_stream(
                2, budget, pack=pack, shuffle=shuffle, keep=np.array(kept), rank=rank, world_size=ranks, memory=9_000,
                drop_last=drop_last,
            )  # fmt: skip
        except actshard.ArgumentError:
            assert sum(kept) < 2 * ranks  # too few to halve
            return
        batches = list(stream)
        assert len(batches) == len(stream)
        steps.add(len(batches))
        seen += [e for b in batches for e in b.examples.tolist()]
        assert all(len(b) for b in batches)
    assert len(steps) == 1
    assert len(set(seen)) == len(seen)
    if not drop_last:
        assert sorted(seen) == np.flatnonzero(kept).tolist()


def same(left: SequenceBatch, right: SequenceBatch) -> bool:
    theirs = right.arrays()
    return left.arrays().keys() == theirs.keys() and all(
        np.array_equal(array, theirs[name]) for name, array in left.arrays().items()
    )


@pytest.mark.parametrize("shuffle", [None, "exact", "window"])
def test_a_stream_resumes_at_any_batch(store: Store, shuffle: Any) -> None:
    def fresh() -> SequenceStream:
        return store.sequences_stream(2, 100, shuffle=shuffle, memory=9_000, columns=["ids"])

    whole = list(fresh()) + list(fresh().afresh())
    for stop in (0, 1, len(whole) // 4, len(fresh()) - 1):
        stream = fresh()
        loop = iter(stream)
        for _ in range(stop):
            next(loop)
        state = stream.state_dict()
        assert len(repr(state)) < 1500
        resumed = fresh()
        resumed.load_state_dict(state)
        unpickled = pickle.loads(pickle.dumps(stream))
        for again in (resumed, unpickled):
            rest = list(again)
            assert len(rest) == len(fresh()) - stop
            assert all(same(a, b) for a, b in zip(rest, whole[stop:], strict=False))
    # Workers read every n-th batch.
    third = list(fresh().batches(1, 3))
    assert all(same(a, b) for a, b in zip(third, whole[1 : len(fresh()) : 3], strict=True))


def test_a_state_of_other_settings_is_refused(stores: dict[str, Store]) -> None:
    store = stores["lmprobe"]
    state = store.sequences_stream(2, 64).state_dict()
    for other in (
        store.sequences_stream(2, 65),
        store.sequences_stream(2, 64, pack=False),
        store.sequences_stream(2, 64, scale=2),
        store.stream(2, 64),
    ):
        with pytest.raises(actshard.ArgumentError, match="belongs to another stream"):
            other.load_state_dict(state)


@pytest.mark.parametrize("shuffle", [None, "window"])
def test_a_state_of_another_memory_is_refused_if_batches_depend_on_it(store: Store, shuffle: Any) -> None:
    one, other = (store.sequences_stream(2, 64, memory=m, shuffle=shuffle) for m in (4_000, "1GiB"))
    alike = [b.examples.tolist() for b in one] == [b.examples.tolist() for b in other]
    if alike:
        other.load_state_dict(one.state_dict())
    else:
        with pytest.raises(actshard.ArgumentError, match=r"belongs to another stream.*window"):
            other.load_state_dict(one.state_dict())
    assert alike == (store.format == "lmprobe" and shuffle is None)
    exact = (store.sequences_stream(2, 64, memory=m, shuffle="exact") for m in (4_000, "1GiB"))
    next(exact).load_state_dict(next(exact).state_dict())


def test_a_long_example_is_an_error_that_names_it(stores: dict[str, Store]) -> None:
    store = stores["lmprobe"]
    counts = store.token_counts
    first, many = int(np.flatnonzero(counts > 20)[0]), int((counts > 20).sum())
    said = f"example {first} has {counts[first]} tokens, and {many} of 120 examples more than 20"
    with refuses(actshard.ArgumentError, store.path, match=said):
        store.sequences_stream(2, 20)
    with pytest.raises(actshard.ArgumentError, match="too_long"):
        store.sequences_stream(2, 20, too_long="cut")  # type: ignore[arg-type]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("too_long", ["truncate", "split", "drop"])
def test_long_examples_are_cut_split_or_left_out_as_told(store: Store, too_long: Any, pack: bool) -> None:
    counts = store.token_counts.tolist()
    expected = {
        "truncate": [(i, 0, min(n, 20)) for i, n in enumerate(counts)],
        "drop": [(i, 0, n) for i, n in enumerate(counts) if n <= 20],
        "split": [(i, k, min(n - k, 20)) for i, n in enumerate(counts) for k in range(0, n, 20)],
    }[too_long]
    lost = sum(counts) - sum(n for *_, n in expected)

    def made() -> SequenceStream:
        return store.sequences_stream(2, 20, too_long=too_long, pack=pack, shuffle="exact")

    if too_long == "split":
        stream = made()
    else:
        with pytest.warns(actshard.ActshardWarning, match=f"with {lost:,} tokens") as caught:
            stream = made()
        assert caught[0].message.code == "sequences-too-long"  # type: ignore[union-attr]
    assert stream.left_out["examples"] == (sum(n > 20 for n in counts) if too_long == "drop" else 0)
    assert stream.left_out["tokens"] == lost == sum(stream.left_out.values()) - stream.left_out["examples"]
    assert sorted(found for batch in stream for found in check(batch, store, pack)) == expected


def test_columns_lie_beside_the_tokens(store: Store) -> None:
    for pack in (True, False):
        for batch in store.sequences_stream(2, 64, pack=pack, columns=["ids", "label"], shuffle="exact"):
            ids, real = batch.columns["ids"], batch.tokens >= 0
            assert ids.shape == batch.tokens.shape
            assert (ids[real] == (100 * batch.examples[batch.segment_ids] + batch.tokens)[real]).all()
            assert (ids[~real] == 0).all()
            assert (batch.columns["label"] == batch.examples % 3).all()
            assert {"ids", "label", "activations", "offsets"} <= batch.arrays().keys()


@pytest.mark.parametrize("key", ["filter", "keep", "drop"])
def test_only_the_columns_of_selected_examples_are_needed(key: str, tmp_path: Path) -> None:
    """Such as those of a pickle shard that is left out, or of programs that label some examples."""
    ids: list[Any] = [[5, 6], None, [7, None], [8], [9, 9, 9, 9]]
    counts = [2, 3, 2, 2, 4]  # of the fourth example, not all tokens have an id
    with actshard.create(tmp_path / "d", "pickle", layers=[2], d_model=WIDTH) as writer:
        writer.append(
            [values(i, n)[:1] for i, n in enumerate(counts)],
            columns=pa.table({"ids": pa.array(ids, pa.list_(pa.int64())), "score": [0.5, None, None, None, 2.5]}),
        )
    store = actshard.open(tmp_path / "d")
    options: dict[str, Any] = {"columns": ["ids", "score"]}
    flags = np.array([True, False, False, False, True])
    if key == "filter":
        store = store.filter(flags)
    if key == "keep":
        options["keep"] = flags
    if key == "drop":
        with pytest.raises(actshard.FormatError, match="found null"):
            list(store.sequences_stream(2, 4, **options))
        store, options["too_long"] = store.filter([1, 4, 0, 0]), "drop"
        with pytest.warns(actshard.ActshardWarning):
            stream = store.sequences_stream(2, 2, **options)
        assert stream.num_sequences == 2
        expected = [([5, 6, 5, 6][:2], 0.5)] * 2
    else:
        stream, expected = store.sequences_stream(2, 8, **options), [([5, 6], 0.5), ([9, 9, 9, 9], 2.5)]
    pieces = []
    for batch in stream:
        for number, (start, stop) in enumerate(itertools.pairwise(batch.offsets.tolist())):
            pieces.append((batch.columns["ids"][start:stop].tolist(), batch.columns["score"][number]))
    assert sorted(pieces) == expected


def test_columns_that_fit_no_token_are_refused(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "lmprobe", layers=[2], d_model=WIDTH) as writer:
        writer.append([values(0, 3)[:1]], columns={"ids": [[1, 2]], "name": ["a"], "tokens": [1]})
    store = actshard.open(tmp_path / "d")
    for columns, match in (
        (["ids"], "'ids' has 2 entries in example 0, which has 3 stored tokens"),
        (["name"], "'name' has string|'name' has large_string"),
        (["tokens"], "'tokens' is an array of each batch"),
        (["ids", "ids"], "each name once"),
        ("ids", "expected a list of names"),
    ):
        with pytest.raises(actshard.ArgumentError, match=match):
            list(store.sequences_stream(2, 20, columns=columns))
    with pytest.raises(actshard.NotStoredError):
        store.sequences_stream(2, 20, columns=["missing"])


@pytest.mark.parametrize("pack", [True, False])
def test_labels_lie_beside_the_tokens_that_have_one(pack: bool) -> None:
    store = actshard.open(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    labels, layer = store.labels, store.layers[0]
    assert labels is not None
    budget = 3 * int(store.token_counts[0])
    for batch in store.sequences_stream(layer, budget, pack=pack, shuffle="exact"):
        assert batch.labels is not None
        assert batch.labels.dtype == (np.uint8 if pack else np.int16)
        assert (batch.labels == labels[batch.examples[batch.segment_ids], batch.tokens - 1]).all()
    for batch in store.sequences_stream(layer, budget, pack=pack, tokens="all"):
        assert batch.labels is not None
        assert (batch.labels[batch.tokens == 0] == -1).all()
        rest = batch.tokens > 0
        assert (batch.labels[rest] == labels[batch.examples[batch.segment_ids], batch.tokens - 1][rest]).all()


def test_labels_of_all_batches_have_one_dtype() -> None:
    store = actshard.open(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    tokens = int(store.token_counts[0])
    keep = np.ones((len(store), tokens), np.bool_)
    keep[::2, 3:] = False  # some batches have padding
    keep[0, 0] = False
    for options, dtype in (
        ({}, np.uint8), ({"fixed_shape": True}, np.int16), ({"pack": False}, np.int16), ({"tokens": "all"}, np.int16),
    ):  # fmt: skip
        batches = list(store.sequences_stream(store.layers[0], 2 * tokens, keep=keep, **options))
        assert {b.labels.dtype for b in batches if b.labels is not None} == {np.dtype(dtype)}


def test_fixed_shapes_are_padded_to_the_budget(stores: dict[str, Store]) -> None:
    store = stores["lmprobe"]
    batches = list(store.sequences_stream(2, 64, fixed_shape=True))
    assert {b.activations.shape for b in batches} == {(64, WIDTH)}
    assert sorted(f for b in batches for f in check(b, store, True)) == [
        (i, 0, n) for i, n in enumerate(store.token_counts.tolist())
    ]
    with pytest.raises(actshard.ArgumentError, match="fixed_shape"):
        store.sequences_stream(2, 64, pack=False, fixed_shape=True)


def test_rows_are_converted_as_in_a_stream_of_rows(store: Store) -> None:
    stats = store.stats(2)
    for options in ({"dtype": "float16"}, {"normalize": stats}, {"dtype": "float64", "scale": "unit-norm"}):
        rows = np.concatenate([b.activations for b in store.stream(2, 64, **options)])
        for pack in (True, False):
            for batch in store.sequences_stream(2, 64, pack=pack, **options):
                real = batch.tokens >= 0
                before = np.cumsum(store.token_counts) - store.token_counts
                at = before[batch.examples[batch.segment_ids[real]]] + batch.tokens[real]
                assert batch.activations.dtype == rows.dtype
                assert (batch.activations[real] == rows[at]).all()
                assert (batch.activations[~real] == 0).all()


def test_tokens_that_are_not_kept_leave_no_gap(stores: dict[str, Store]) -> None:
    store = stores["lmprobe"]
    keep = [np.arange(n) % 3 > 0 for n in store.token_counts]
    seen = []
    for batch in store.sequences_stream(2, 64, keep=keep, shuffle="exact"):
        assert (batch.tokens % 3 > 0).all()
        seen += list(check(batch, store, True))
    assert sorted(seen) == [(i, 0, int(k.sum())) for i, k in enumerate(keep) if k.any()]


def test_nothing_is_a_stream_without_batches(stores: dict[str, Store]) -> None:
    with pytest.warns(actshard.ActshardWarning, match="has no rows.*keep leaves out all") as told:
        stream = stores["lmprobe"].sequences_stream(2, 64, keep=np.zeros(120, np.bool_), world_size=3)
    assert told[0].filename == __file__
    assert len(stream) == 0
    assert list(stream) == []
    assert stream.fill == 1.0


def test_an_overflow_warns_once_and_errors_reach_the_loop(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "lmprobe", layers=[2], d_model=WIDTH) as writer:
        for i in range(8):
            writer.append([np.full((1, 3, WIDTH), 1e9, np.float32)], columns={"label": [i]})
    store = actshard.open(tmp_path / "d")
    with pytest.warns(actshard.OverflowWarning) as caught:
        assert len(list(store.sequences_stream(2, 6, dtype="float16"))) == 4
    assert len(caught) == 1
    stream = store.sequences_stream(2, 6)
    store.close()
    with pytest.raises(actshard.ClosedError):
        list(stream)


def test_a_filtered_store_and_a_closed_loop(stores: dict[str, Store]) -> None:
    part = stores["lmprobe"].filter(range(10, 60, 2))
    stream = part.sequences_stream([2, 5], 80, columns=["label"], shuffle="exact")
    loop = iter(stream)
    batch = next(loop)
    assert (batch.activations[:, 0, 0] == (10 + 2 * batch.examples)[batch.segment_ids]).all()
    assert (batch.columns["label"] == (10 + 2 * batch.examples) % 3).all()
    stream.close()
    assert list(loop) == []
    again = iter(stream)
    next(iter(stream))
    with pytest.raises(actshard.ClosedError, match="another loop"):
        next(again)
