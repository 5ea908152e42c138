"""Repeated examples are found by ids, texts or rows, as a comparison of all pairs finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import actshard
from actshard.looking.examining import _hashes, equal_examples, repeated_examples

D, T = 8, 5


def made(folder: Path, rows: Any, format: str = "zarr", **columns: Any) -> actshard.Store:
    with actshard.create(folder, format, layers=[1, 2], d_model=D) as writer:
        writer.append(rows.astype(np.float32), columns=columns or None)
    return actshard.open(folder)


def stats(store: actshard.Store) -> dict[Any, actshard.Stats]:
    return {layer: store.stats(layer) for layer in store.layers}


def test_equal_texts_are_repeated_whatever_their_rows(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 2, T, D))
    found = repeated_examples(made(tmp_path / "a", rows, prompt=["a", "b", "a", "c", "b", "a"]), {})
    assert found is not None
    assert (found.by, found.examples, found.repeated) == ("text", 6, 3)
    assert found.pairs == ((2, 0), (4, 1), (5, 2))
    (advice,) = found.advice()
    assert str(advice).startswith("3 examples of 6 have the text of an earlier one: 2 = 0, 4 = 1, 5 = 2. ")


def test_examples_without_a_text_are_not_compared(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 2, T, D))
    found = repeated_examples(made(tmp_path / "a", rows, prompt=["", "b", "", "b"]), {})
    assert found is not None
    assert (found.examples, found.repeated, found.pairs) == (2, 1, ((3, 1),))


def test_without_texts_rows_of_all_layers_are_compared(tmp_path: Path) -> None:
    """Examples 1 and 3 are equal in one layer only."""
    rows = np.random.default_rng(0).normal(size=(6, 2, T, D))
    rows[4], rows[3, 0] = rows[2], rows[1, 0]
    store = made(tmp_path / "a", rows)
    found = repeated_examples(store, stats(store))
    assert found is not None
    assert (found.by, found.repeated, found.pairs) == ("rows", 1, ((4, 2),))
    assert found.advice()[0].text.startswith("1 example of 6 equals an earlier one in every layer: 4 = 2.")
    assert repeated_examples(store, {}) is None


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_layers_with_rows_that_are_not_finite_do_not_hide_repeated_examples(
    layers: list[int], bad: float, tmp_path: Path
) -> None:
    """Such rows are not among a layer's repeated rows."""
    rows = np.random.default_rng(0).normal(size=(20, 2, T, D))
    rows[10:] = rows[:10]
    rows[:, layers, :, 3] = bad
    store = made(tmp_path / "a", rows)
    found = repeated_examples(store, stats(store))
    assert found is not None
    assert (found.by, found.repeated) == ("rows", 10)


def test_first_tokens_that_repeat_are_no_repeated_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows are not read again for them."""
    rows = np.random.default_rng(0).normal(size=(600, 2, T, D))
    rows[:, :, 0] = rows[0, :, 0]
    store = made(tmp_path / "a", rows)
    measured = stats(store)
    assert max(x.repeats.repeated for x in measured.values()) <= 1
    monkeypatch.setattr("actshard.looking.examining.equal_examples", None)
    found = repeated_examples(store, measured)
    assert found is not None
    assert (found.repeated, found.advice()) == (0, [])


@given(st.lists(st.integers(0, 3), max_size=12))
def test_pairs_are_those_of_a_comparison_of_all(values: list[int]) -> None:
    class Fake:
        token_counts = np.ones(len(values), np.int64)
        layers = (0,)

        def sequence(self, example: int, _: int) -> Any:
            return np.array([values[example]])

    count, pairs = equal_examples(Fake(), np.array(values, np.uint64))  # type: ignore[arg-type]  # the parts of a store that are used
    expected = [
        (i, max(k for k in range(i) if values[k] == values[i])) for i in range(len(values)) if values[i] in values[:i]
    ]
    assert (count, pairs) == (len(expected), expected)


def test_equal_hashes_of_other_rows_are_not_repeated() -> None:
    class Fake:
        token_counts = np.ones(2, np.int64)
        layers = (0,)

        def sequence(self, example: int, _: int) -> Any:
            return np.array([example])

    assert equal_examples(Fake(), np.array([7, 7], np.uint64)) == (0, [])  # type: ignore[arg-type]  # the parts of a store that are used


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.dictionary(pa.int32(), pa.string())],
)
def test_hashes_are_equal_where_values_are(kind: pa.DataType) -> None:
    """Also in slices, whose buffers begin elsewhere."""
    lists = [[9], [1, 2], [2, 1], [1, 2], [], [1], [2, 1]]
    values: list[Any] = lists if not pa.types.is_dictionary(kind) else ["".join(map(str, x)) for x in lists]
    column = (
        pa.array(values, pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
    )
    hashes = _hashes(column.slice(1)).tolist()
    for i, x in enumerate(values[1:]):
        for k, y in enumerate(values[1:]):
            assert (hashes[i] == hashes[k]) == (x == y)
    assert hashes[3] == 0
    assert (_hashes(pa.array([1.5, 2.5])) == 0).all()
    assert (_hashes(pa.array([[1], None])) == 0).all()
