"""``divide=``, ``normalize=`` and ``scale=`` give the values that numpy's arithmetic gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, saev_dump


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1.0, 1e-43, 1e34])
def test_rows_are_divided_and_normalized_to_the_last_bit(tmp_path: Path, dtype: str, size: float) -> None:
    """Whatever the size of a column: a factor beyond float32's range makes the arithmetic float64."""
    rng = np.random.default_rng(2)
    rows = rng.integers(-1000, 1000, (1, 60, 5)).astype(np.float32)
    rows[..., 1] *= np.float32(size)
    rows[..., 2] = 0
    with actshard.create(tmp_path / "d", "lmprobe", layers=[2], d_model=5) as writer:
        writer.append([rows], columns={"label": [0]})
    store = actshard.open(tmp_path / "d")
    stats = store.stats(2)
    kind = np.float64 if dtype == "float64" or size < 1e-38 else np.float32
    whole = rows[0].astype(kind)
    divisors = np.array([3.0, 7 * size, 7.0, -1.5, 10.0])

    def read(**options: Any) -> np.ndarray:
        return np.concatenate([b.activations for b in store.stream(2, 7, dtype=dtype, **options)])

    assert read(divide=divisors).tobytes() == (whole / divisors.astype(kind)).astype(dtype).tobytes()
    wanted = (whole - stats.mean.astype(kind)) * stats.inverse_std.astype(kind)
    found = read(normalize=stats)
    assert found.tobytes() == wanted.astype(dtype).tobytes()
    assert np.allclose(found.std(axis=0), [1, 1, 0, 1, 1], rtol=1e-5)
    lengths = np.linalg.norm(read(scale="unit-norm").astype(np.float64), axis=1)
    assert np.allclose(lengths, 1, rtol=1e-6)
    states = [store.stream(2, 7, divide=divisors, center=stats.mean).state_dict()]
    with pytest.raises(actshard.ArgumentError, match="divide"):
        store.stream(2, 7, center=stats.mean).load_state_dict(states[0])
    with pytest.raises(actshard.ArgumentError, match=r"divide|scale"):
        store.stream(2, 7, center=stats.mean, scale=divisors).load_state_dict(states[0])
    store.stream(2, 7, center=stats.mean, divide=divisors).load_state_dict(states[0])


def test_layers_without_an_order_are_refused() -> None:
    store = actshard.open(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    for layers in (set(store.layers), frozenset(store.layers), dict.fromkeys(store.layers), b"\x05"):
        for made in (store.stream, store.sequences_stream):
            with pytest.raises(actshard.ArgumentError, match="expected a layer's name, a list"):
                made(layers, 1000)  # type: ignore[operator]


def test_statistics_of_another_layer_are_refused() -> None:
    """In a list they follow the layers of the stream; what somebody computed has no layer and is taken."""
    store = actshard.open(GOLDEN / "lmprobe" / "fullseq_f32")
    first, second = store.layers[:2]
    stats = store.stats(first)
    with pytest.raises(actshard.ArgumentError, match=f"statistics of layer {second}, found those of layer {first}"):
        store.stream(second, 4, normalize=stats)
    with pytest.raises(actshard.ArgumentError, match=f"statistics of layer {first}, found those of layer {second}"):
        store.stream([first, second], 4, normalize=[store.stats(second), stats])
    store.stream([first, second], 4, normalize=[stats, store.stats(second)])
    store.stream(second, 4, normalize=dataclasses.replace(stats, layer=None))


def test_rows_whose_squares_are_beyond_float64_do_not_become_zeros(tmp_path: Path) -> None:
    rows = np.array([[[1.7e308, -1.7e308, 1.0], [-1.7e308, 1.7e308, 3.0]]])
    with actshard.create(tmp_path / "d", "npy", layers=[2], d_model=3, dtype="float64") as writer:
        writer.append(rows[:, None])
    store = actshard.open(tmp_path / "d")
    options_of_statistics: list[dict[str, Any]] = [
        {"scale": "mean-sqrt-d"},
        {"normalize": "stats"},
        {"normalize": store.stats(2)},
        {"center": "mean"},
        {"divide": "std"},
    ]
    for options in options_of_statistics:
        with pytest.raises(actshard.ArgumentError, match="beyond float64"):
            store.stream(2, 2, **options)
