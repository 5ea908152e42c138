"""Streams leave out rows by position and norm, as a naive loop does."""

from __future__ import annotations

import logging
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
from actshard.streaming import selection
from conftest import GOLDEN


def made(folder: Path, values: list[np.ndarray]) -> actshard.Store:
    """An lmprobe dataset of examples ``(layers, tokens, d_model)``."""
    with actshard.create(folder, "lmprobe", layers=[2, 5], d_model=values[0].shape[2]) as writer:
        for i, example in enumerate(values):
            writer.append([example], columns={"label": [i % 2]})
    return actshard.open(folder)


@pytest.fixture
def values() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    found = [rng.normal(size=(2, 1 + 5 * i % 9, 7)).astype(np.float32) for i in range(40)]
    for i, example in enumerate(found):
        example[:, 0] *= 300  # sinks
        if i % 11 == 0:
            example[i % 2, -1] *= 50
    found[4][0, 1, 3] = np.nan
    found[7][1, 2, 0] = np.inf
    return found


def norm(row: np.ndarray) -> float:
    return math.hypot(*map(float, row))


def expected(values: list[np.ndarray], layers: list[int], limit: float | str, first: int = 0) -> list[tuple[int, int]]:
    """The (example, token) pairs that remain."""
    limits = []
    for layer in layers:
        all_norms = [n for e in values for n in map(norm, e[layer]) if np.isfinite(n)]
        limits.append(float(limit[:-8]) * float(np.median(all_norms)) if isinstance(limit, str) else limit)
    return [
        (i, t)
        for i, e in enumerate(values)
        for t in range(first, e.shape[1])
        if all(norm(e[layer, t]) <= most for layer, most in zip(layers, limits, strict=True))
    ]


def pairs(stream: Any) -> list[tuple[int, int]]:
    return [pair for b in stream for pair in zip(b.examples.tolist(), b.tokens.tolist(), strict=True)]


@pytest.mark.parametrize("limit", ["10x median", "1.5x median", 2.5, 40])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
@pytest.mark.parametrize("first", [0, 1])
def test_the_rows_of_a_naive_loop_remain(
    tmp_path: Path, values: list[np.ndarray], limit: float | str, layers: list[int], first: int
) -> None:
    store = made(tmp_path / "d", values)
    names = [store.layers[layer] for layer in layers]
    layer = names if len(names) > 1 else names[0]
    want = expected(values, layers, limit, first)
    stream = store.stream(layer, 16, max_norm=limit, min_token=first)
    assert pairs(stream) == want
    for shuffle in ("window", "exact"):
        assert sorted(pairs(store.stream(layer, 16, max_norm=limit, min_token=first, shuffle=shuffle))) == want
    rows = sum(e.shape[1] for e in values)
    assert stream.num_rows == len(want) == rows - sum(stream.left_out.values())
    assert stream.left_out["min_token"] == (len(values) if first else 0)
    odd = [(i, t) for i, e in enumerate(values) for t in range(e.shape[1]) if not np.isfinite(e[layers, t]).all()]
    assert stream.left_out["not_finite"] == len(odd) > 0


def test_keep_labels_and_last_tokens_combine_and_keep_is_asked_once(tmp_path: Path, values: list[np.ndarray]) -> None:
    store, asked = made(tmp_path / "d", values), []

    def keep(table: Any) -> Any:
        asked.append(1)
        return table["label"].to_numpy() == 1

    want = [(i, t) for i, t in expected(values, [0], "10x median", 1) if i % 2]
    assert pairs(store.stream(2, 16, keep=keep, max_norm="10x median", min_token=1)) == want
    assert asked == [1]
    last = [(i, t) for i, t in expected(values, [0], "10x median", 1) if t == values[i].shape[1] - 1]
    assert pairs(store.stream(2, 16, tokens="last", max_norm="10x median", min_token=1)) == last


def test_a_state_of_another_limit_is_refused_and_a_pickle_reads_the_same(
    tmp_path: Path, values: list[np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    store = made(tmp_path / "d", values)
    with caplog.at_level(logging.INFO, "actshard"):
        stream = store.stream(2, 16, max_norm="10x median", shuffle="exact")
    assert [r.message for r in caplog.records if "left out" in r.message and str(stream.left_out) in r.message]
    state = stream.state_dict()
    store.stream(2, 16, max_norm="10x median", shuffle="exact").load_state_dict(state)
    with pytest.raises(actshard.ActshardError):
        store.stream(2, 16, max_norm="1.5x median", shuffle="exact").load_state_dict(state)
    again = pickle.loads(pickle.dumps(stream))
    assert again.left_out == stream.left_out
    assert pairs(again) == pairs(stream)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float16", 6e4),
        ("bfloat16", 3e38),
        ("float32", 3e38),
        ("float64", 8e307),
        ("float64", 1e-300),
        ("float32", 1e-44),
    ],
)
def test_finite_rows_of_any_size_are_judged_by_their_norm(tmp_path: Path, dtype: str, size: float) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rows = np.array([[size, size, 0, 0], [size, size, size, size], [np.inf] * 4], np.float64).astype(kind)
    with actshard.create(tmp_path / "d", "lmprobe", layers=[2], d_model=4, dtype=dtype) as writer:
        writer.append([rows[None]], columns={"label": [0]})
    store = actshard.open(tmp_path / "d")
    exact = float(rows[0, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(actshard.ActshardWarning, match="no rows.*: left out: max_norm 2, not_finite 1") as told:
            assert list(store.stream(2, 8, max_norm=exact * 1.4)) == []
        assert told[0].filename == __file__
        for limit, kept in ((float("inf"), [0, 1]), (exact * 1.42, [0]), (exact * 1.99, [0]), (exact * 2.0001, [0, 1])):
            stream = store.stream(2, 8, max_norm=limit)
            assert [t for _, t in pairs(stream)] == kept
            assert stream.left_out == {"min_token": 0, "max_norm": 2 - len(kept), "not_finite": 1}


def test_a_norm_just_above_the_limit_is_above_it(tmp_path: Path) -> None:
    rows = np.array([[2.5, 0], [2.5000002, 0]], np.float32)
    store = made(tmp_path / "d", [np.stack([rows, rows])])
    assert pairs(store.stream(2, 8, max_norm=2.5)) == [(0, 0)]


def test_rows_without_norms_are_refused_by_their_dtype(tmp_path: Path) -> None:
    store = actshard.open(GOLDEN / "containers" / "st_layer_files_fp8")
    with pytest.raises(actshard.DtypeError, match=r"max_norm: expected rows of .* found float8_e4m3fn"):
        store.stream(store.layers[0], 8, max_norm="10x median")


def test_interleaved_rows_are_counted_one_by_one(tmp_path: Path, values: list[np.ndarray]) -> None:
    store = made(tmp_path / "d", values)
    whole = store.stream([2, 5], 16, interleave=True).num_rows
    stream = store.stream([2, 5], 16, interleave=True, max_norm="10x median", min_token=1)
    assert stream.num_rows + sum(stream.left_out.values()) == whole
    assert stream.left_out["min_token"] == 2 * len(values)


def test_norms_are_read_once_for_a_store_and_layer(
    tmp_path: Path, values: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = made(tmp_path / "d", values), []
    real = selection.norms_of_rows
    monkeypatch.setattr(selection, "norms_of_rows", lambda rows: (read.append(len(rows)), real(rows))[1])
    for limit in ("10x median", 3.0):
        store.stream(2, 16, max_norm=limit)
    assert sum(read) == sum(e.shape[1] for e in values)


def test_mixtures_take_the_same_options(tmp_path: Path, values: list[np.ndarray]) -> None:
    stores = [made(tmp_path / name, values) for name in "ab"]
    mixed = actshard.mix({stores[0]: 0.5, stores[1]: 0.5}).stream(2, 8, max_norm="10x median", min_token=1)
    seen = np.concatenate([b.tokens for b in mixed])
    assert len(seen)
    assert seen.min() == 1


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 1000])
def test_norms_are_those_of_numpy(width: int) -> None:
    rows = np.random.default_rng(width).normal(size=(50, width))
    rows[7] *= 1e-200
    rows[9] *= 1e200
    rows[11] = 0
    before = rows.copy()
    wanted = [math.hypot(*row) for row in rows.tolist()]
    assert np.allclose(selection.norms_of_rows(rows), wanted, rtol=1e-14, atol=0)
    assert (rows == before).all()
    assert selection.norms_of_rows(np.zeros((0, width))).shape == (0,)


@pytest.mark.parametrize("limit", [0, -1, True, "10 median", "median", "x median", "0x median", float("nan"), [1]])
def test_limits_that_are_no_number_or_multiple_are_refused(
    tmp_path: Path, values: list[np.ndarray], limit: Any
) -> None:
    store = made(tmp_path / "d", values)
    with pytest.raises(actshard.ArgumentError, match="max_norm: expected"):
        store.stream(2, 16, max_norm=limit)
    with pytest.raises(actshard.ArgumentError, match="min_token"):
        store.stream(2, 16, min_token=-1)


@pytest.mark.peers
def test_a_torch_dataset_has_the_same_rows(tmp_path: Path, values: list[np.ndarray]) -> None:
    pytest.importorskip("torch")
    from actshard.torch import Dataset

    data = Dataset(made(tmp_path / "d", values), 2, max_norm="10x median", min_token=1)
    items = [data[i] for i in range(len(data))]
    assert [(item["example"], item["token"]) for item in items] == expected(values, [0], "10x median", 1)


def test_a_dataset_without_tokens_does_not_warn(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4) as writer:
        writer.append([np.zeros((1, 0, 4), np.float32)])
    store = actshard.open(tmp_path / "d")
    assert "1 example, layers" in repr(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"max_norm": np.inf}, {"min_token": 1}, {"keep": [False]}, {}):
            assert len(store.stream(0, 4, **options)) == 0


@pytest.mark.parametrize("limit", [10**400, -(10**400), "9" * 400 + "x median"])
def test_a_limit_outside_of_float64_is_refused(tmp_path: Path, values: list[np.ndarray], limit: Any) -> None:
    store = made(tmp_path / "d", values)
    with pytest.raises(actshard.ArgumentError, match="max_norm: expected a positive number"):
        store.stream(2, 16, max_norm=limit)


def test_other_integers_outside_of_float64_are_refused(tmp_path: Path, values: list[np.ndarray]) -> None:
    store, large = made(tmp_path / "d", values), 10**400
    for options in ({"center": large}, {"scale": [large] * 8}, {"divide": large}):
        with pytest.raises(actshard.ArgumentError, match=f"{next(iter(options))}: expected numbers, found"):
            store.stream(2, 16, **options)
    with pytest.raises(actshard.ArgumentError, match="q: expected fractions"):
        store.stats(2).norms.quantile(large)
    with pytest.raises(actshard.ArgumentError, match=r"share of .*expected a positive number"):
        actshard.mix([(store, large)])
