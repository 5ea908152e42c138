"""What a state and a pickle of a stream compare with the dataset that they continue over."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import actshard

ROWS = np.random.default_rng(0).normal(size=(40, 2, 3, 4)).astype(np.float32)


def written(path: Path, rows: NDArray[np.float32], format: str = "zarr", **options: Any) -> actshard.Store:
    shutil.rmtree(path, ignore_errors=True)
    with actshard.create(path, format, layers=[2, 5], d_model=4, **options) as writer:
        writer.append(rows)
    return actshard.open(path)


def streams(store: actshard.Store, layer: Any, **options: Any) -> list[Any]:
    return [
        store.stream(layer, 8, shuffle="exact", **options),
        store.sequences_stream(layer, 20, shuffle="exact", **options),
    ]


def test_a_state_names_rows_of_the_layers_of_its_stream(tmp_path: Path) -> None:
    """All rows of layer 5 were extracted again."""
    other = ROWS.copy()
    other[:, 1] = np.random.default_rng(1).normal(size=(40, 3, 4))
    first, second = written(tmp_path / "a", ROWS), written(tmp_path / "b", other)
    copy = actshard.open(shutil.copytree(tmp_path / "a", tmp_path / "copy"))
    for number in range(2):
        for layer, equal in ((2, True), (5, False), ([2, 5], False)):
            state = streams(first, layer)[number].state_dict()
            streams(copy, layer)[number].load_state_dict(state)
            if equal:
                streams(second, layer)[number].load_state_dict(state)
                continue
            with pytest.raises(actshard.ArgumentError, match=r"whose batches differ \(sample: "):
                streams(second, layer)[number].load_state_dict(state)


def test_a_state_of_compressed_shards_names_their_sizes(tmp_path: Path) -> None:
    """Only one example of data that is decoded as a whole is read; here the other 39 differ."""
    other = np.random.default_rng(1).normal(size=ROWS.shape).astype(np.float32) * 1000
    other[0], other[5:] = ROWS[0], 0
    first = written(tmp_path / "a", ROWS, "pickle", compress=True)
    second = written(tmp_path / "b", other, "pickle", compress=True)
    state = first.stream(2, 8, shuffle="exact").state_dict()
    actshard.open(shutil.copytree(tmp_path / "a", tmp_path / "c")).stream(2, 8, shuffle="exact").load_state_dict(state)
    with pytest.raises(actshard.ArgumentError, match=r"whose batches differ \(sample: "):
        second.stream(2, 8, shuffle="exact").load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("dtype", {"dtype": "float32"}, {"dtype": "float64"}), ("fixed_shape", {}, {"fixed_shape": True})],
)
def test_a_state_names_dtype_and_shape(tmp_path: Path, name: str, one: Any, other: Any) -> None:
    store = written(tmp_path / "a", ROWS)
    with pytest.raises(actshard.ArgumentError, match=rf"whose batches differ \({name}: "):
        store.sequences_stream(2, 20, **other).load_state_dict(store.sequences_stream(2, 20, **one).state_dict())
    if name == "dtype":
        with pytest.raises(actshard.ArgumentError, match=r"whose batches differ \(dtype: "):
            store.stream(2, 8, **other).load_state_dict(store.stream(2, 8, **one).state_dict())


def test_a_state_of_one_layer_is_not_that_of_a_list(tmp_path: Path) -> None:
    store = written(tmp_path / "a", ROWS)
    with pytest.raises(actshard.ArgumentError, match=r"shape: \[4\] in the state, \[1, 4\] here"):
        store.stream([2], 8).load_state_dict(store.stream(2, 8).state_dict())
    with pytest.raises(actshard.ArgumentError, match="stacked: False in the state, True here"):
        store.sequences_stream([2], 20).load_state_dict(store.sequences_stream(2, 20).state_dict())


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("looped", [False, True])
def test_a_pickled_stream_does_not_continue_over_another_dataset(tmp_path: Path, number: int, looped: bool) -> None:
    stream = streams(written(tmp_path / "a", ROWS), 2, center="mean")[number]
    if looped:
        next(iter(stream))
    data = pickle.dumps(stream)
    again = pickle.loads(data)
    assert len(list(again)) == len(stream) - looped
    assert len(list(pickle.loads(pickle.dumps(pickle.loads(data))))) == len(stream) - looped
    written(tmp_path / "a", ROWS + 5)
    again = pickle.loads(data)
    for _ in range(2):
        with pytest.raises(actshard.ArgumentError, match="pickled over another dataset, whose batches differ"):
            iter(again)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(actshard.ActshardError):
        pickle.loads(data)
