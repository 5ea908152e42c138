"""Tokens chosen by a list column: keep="loss_mask" and up_to_last, in both streams, against a loop over examples."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import actshard
from actshard import ArgumentError, NotStoredError
from actshard.streaming.selection import ColumnTokens, flags_of, nonzero

WIDTH = 3
MASKS = [[0, 0, 0], [0, 1, 0, 1, 0, 0], [1], [0], [1, 1, 1, 1], [0, 0, 0, 0, 1]]


def store_of(folder: Path, masks: list[list[int]]) -> actshard.Store:
    with actshard.create(folder, "lmprobe", layers=[0, 3], d_model=WIDTH) as writer:
        for i, mask in enumerate(masks):
            rows = np.zeros((2, len(mask), WIDTH), np.float32)
            rows[..., 0], rows[..., 1], rows[1, :, 2] = i, np.arange(len(mask)), 1
            columns = {"loss_mask": [mask], "label": [i], "text": [f"text {i}"]}
            writer.append([rows], columns=columns)
    return actshard.open(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> actshard.Store:
    return store_of(tmp_path_factory.mktemp("supervised") / "data", MASKS)


def wanted(masks: list[list[int]], context: bool, at_least: int = 0) -> list[tuple[int, int]]:
    """(example, token) of the tokens that are kept."""
    kept = []
    for i, mask in enumerate(masks):
        if sum(x != 0 for x in mask) < at_least:
            continue
        kept += [(i, t) for t in range(len(mask)) if (any(mask[t:]) if context else mask[t] != 0)]
    return kept


def seen(stream: Any) -> list[tuple[int, int]]:
    rows = np.concatenate([batch.activations.reshape(-1, WIDTH) for batch in stream] or [np.zeros((0, WIDTH))])
    return sorted((int(i), int(t)) for i, t in rows[:, :2])


@pytest.mark.filterwarnings("ignore:.*the stream has no rows")
@pytest.mark.parametrize(
    ("keep", "context", "at_least"),
    [
        ("loss_mask", False, 0),
        (actshard.up_to_last("loss_mask"), True, 1),
        (actshard.up_to_last("loss_mask", at_least=0), True, 0),
        (actshard.up_to_last("loss_mask", at_least=2), True, 2),
        (actshard.up_to_last("loss_mask", at_least=9), True, 9),
    ],
)
def test_streams_have_the_tokens_that_a_loop_finds(
    store: actshard.Store, keep: Any, context: bool, at_least: int
) -> None:
    want = wanted(MASKS, context, at_least)
    assert seen(store.stream(3, 4, keep=keep)) == want
    stream = store.sequences_stream(3, 8, keep=keep, columns=["loss_mask"])
    assert seen(pickle.loads(pickle.dumps(stream))) == want
    for batch in stream:
        for i, (first, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
            mask = MASKS[batch.examples[i]]
            assert batch.columns["loss_mask"][first:end].tolist() == [mask[t] for t in batch.tokens[first:end]]
            if context:
                assert mask[batch.tokens[end - 1]] == 1
                assert batch.tokens[first:end].tolist() == list(range(end - first))
    two = actshard.concat([store, store])
    assert seen(two.stream(3, 4, keep=keep)) == sorted(want * 2)
    assert pickle.loads(pickle.dumps(keep)) == keep


@given(
    st.lists(st.lists(st.integers(-1, 2), max_size=6), max_size=8), st.booleans(), st.integers(0, 4), st.integers(1, 3)
)
def test_flags_are_those_of_a_loop(masks: list[list[int]], context: bool, at_least: int, parts: int) -> None:
    """Whatever the chunks of the column."""
    column = pa.chunked_array([pa.array(masks[i::parts], pa.list_(pa.int8())) for i in range(parts)])
    ordered = [mask for i in range(parts) for mask in masks[i::parts]]
    lists = ColumnTokens("m", context, at_least)(pa.table({"m": column}))
    want = set(wanted(ordered, context, at_least))
    assert lists.to_pylist() == [[(i, t) in want for t in range(len(mask))] for i, mask in enumerate(ordered)]


@given(st.lists(st.tuples(st.lists(st.booleans(), max_size=5), st.booleans()), max_size=8), st.integers(0, 3))
def test_special_tokens_that_lists_leave_out_are_kept(examples: list[tuple[list[bool], bool]], special: int) -> None:
    lists = pa.array([mask for mask, _ in examples], pa.large_list(pa.bool_()))
    stored = np.array([len(mask) + special * short for mask, short in examples], np.int64)
    want = [flag for mask, short in examples for flag in [True] * (special * short) + mask]
    assert flags_of(lists, stored, special).tolist() == want


def test_sliced_columns_and_other_types_of_lists() -> None:
    for kind in (pa.list_(pa.bool_()), pa.large_list(pa.uint8()), pa.list_(pa.int64(), 3)):
        column = pa.array([[0, 0, 1], [0, 1, 0], [1, 0, 0]], pa.list_(pa.int64())).cast(
            pa.list_(pa.bool_()) if kind == pa.list_(pa.bool_()) else kind
        )
        lists = actshard.up_to_last("m")(pa.table({"m": column}).slice(1))
        assert lists.to_pylist() == [[True, True, False], [True, False, False]]


def test_other_columns_are_refused_in_one_line(store: actshard.Store) -> None:
    for column, error, said in (
        ("mask", NotStoredError, "no column 'mask'; there are"),
        ("label", ArgumentError, "expected a column of lists of integers or bools, found 'label' of int"),
        ("text", ArgumentError, "found 'text' of"),
    ):
        for keep in (column, actshard.up_to_last(column)):
            with pytest.raises(error, match=said):
                store.stream(3, 4, keep=keep)
            with pytest.raises(error, match=said):
                store.sequences_stream(3, 8, keep=keep)
    lacking = pa.table({"m": pa.array([[1], None, [None]], pa.list_(pa.int64()))})
    with pytest.raises(ArgumentError, match="example 1 has no list in 'm'"):
        nonzero("m")(lacking)
    with pytest.raises(ArgumentError, match="a list of 'm' has a missing entry"):
        nonzero("m")(lacking.take([0, 2]))
    with pytest.raises(ArgumentError, match=r"keep\[1\]: expected 3 flags \(or 2 without special tokens\).*found 1"):
        flags_of(pa.array([[True] * 3, [True]], pa.large_list(pa.bool_())), np.array([3, 3]), 1)
    with pytest.raises(ArgumentError, match="expected the name of a list column, found int"):
        actshard.up_to_last(3)  # type: ignore[arg-type]  # the wrong type is what is refused
    with pytest.raises(ArgumentError, match="at_least"):
        actshard.up_to_last("loss_mask", at_least=-1)
