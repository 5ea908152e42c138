"""Streams leave out rows by position and norm, as a naive loop does."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.stream import norms


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
    return float(np.float32(np.sqrt(sum(float(x) ** 2 for x in row))))


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


def test_norms_are_read_once_for_a_store_and_layer(
    tmp_path: Path, values: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = made(tmp_path / "d", values), []
    real = norms.norms_of_rows
    monkeypatch.setattr(norms, "norms_of_rows", lambda rows: (read.append(len(rows)), real(rows))[1])
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
    assert np.allclose(norms.norms_of_rows(rows.copy()), np.linalg.norm(rows, axis=1), rtol=1e-6)
    assert norms.norms_of_rows(np.zeros((0, width))).shape == (0,)


@pytest.mark.parametrize(
    "limit", [0, -1, True, "10 median", "median", "x median", "0x median", float("nan"), float("inf"), [1]]
)
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
