"""``actshard.hf.to_dataset``: rows equal those of the store, with their dtype, in memory and in a file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN

pytestmark = pytest.mark.peers
datasets: Any = pytest.importorskip("datasets")
from actshard.hf import to_dataset  # noqa: E402 - skipped without datasets


def column(dataset: Any, name: str) -> np.ndarray:
    """A column of lists of one length, as Arrow holds it."""
    table = dataset.data.table.combine_chunks()
    lists = table.column(name).combine_chunks()
    lists = lists.chunk(0) if hasattr(lists, "chunks") else lists
    assert not lists.null_count
    return lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), -1)


@pytest.mark.parametrize("name", ["lmprobe/pooled_f16", "lmprobe/fullseq_f32", "pickle/float16", "zarr/single_minimal"])
@pytest.mark.parametrize("in_file", [False, True])
def test_rows_equal_the_streams(tmp_path: Path, name: str, in_file: bool) -> None:
    store = actshard.open(GOLDEN / name)
    layer = store.layers[0]
    wanted = list(store.stream(layer, 64))
    made = to_dataset(store, layer, file=tmp_path / "rows.arrow" if in_file else None)
    rows = np.concatenate([b.activations for b in wanted])
    found = column(made, "activation")
    assert found.dtype == rows.dtype == store.dtype
    assert np.array_equal(found, rows, equal_nan=True)
    assert made["example"][:] == np.concatenate([b.examples for b in wanted]).tolist()
    assert made["token"][:] == np.concatenate([b.tokens for b in wanted]).tolist()
    assert bool(made.cache_files) == in_file
    formatted = made.with_format("numpy", dtype=store.dtype)[:2]["activation"]
    assert np.array_equal(formatted, rows[:2], equal_nan=True)
    assert formatted.dtype == rows.dtype
    if in_file:
        assert len(pickle.dumps(made)) < 20_000
        assert [p.name for p in tmp_path.iterdir()] == ["rows.arrow"]
        with pytest.raises(actshard.ExistsError, match="from_file"):
            to_dataset(store, layer, file=tmp_path / "rows.arrow")


def test_examples_carry_the_stores_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actshard.hf._BLOCK", 500)  # many blocks
    store = actshard.open(GOLDEN / "lmprobe/fullseq_f32")
    layer = store.layers[0]
    for file in (None, tmp_path / "examples.arrow"):
        made = to_dataset(store, layer, each="example", file=file)
        assert made.column_names == ["activations", "example", *store.table.column_names]
        assert made["text"][:] == store.table["text"].to_pylist()
        for i, wanted in enumerate(store.sequences(range(len(store)), layer)):
            found = made.data.table.column("activations")[i].values.flatten().to_numpy().reshape(-1, store.d_model)
            assert np.array_equal(found, wanted, equal_nan=True)
    tokens = to_dataset(store, layer, columns=["text"], tokens="last", file=tmp_path / "last.arrow")
    assert tokens["text"][:] == store.table["text"].to_pylist()
    assert np.array_equal(column(tokens, "activation"), store.last_tokens(layer), equal_nan=True)
    train = to_dataset(store.filter(slice(1, 4)), layer, each="example")
    assert train["text"][:] == store.table["text"].to_pylist()[1:4]


def test_a_layer_that_lies_side_by_side_is_not_copied(tmp_path: Path) -> None:
    acts = np.random.default_rng(0).random((5, 1, 3, 4), np.float32)
    with actshard.create(tmp_path / "saev", "saev", layers=[0], d_model=4) as writer:
        writer.append(acts)
    store = actshard.open(tmp_path / "saev", io="mmap")
    made = to_dataset(store, 0)
    store.close()
    (chunk,) = made.data.table.column("activation").chunks
    assert chunk.values.buffers()[1].is_mutable is False
    assert np.array_equal(column(made, "activation"), acts.reshape(-1, 4))


def test_what_datasets_cannot_hold_is_refused_with_the_remedy() -> None:
    store = actshard.open(GOLDEN / "lmprobe/fullseq_bf16")
    layer = store.layers[0]
    with pytest.raises(actshard.DtypeError, match='dtype="float32"'):
        to_dataset(store, layer)
    made = to_dataset(store, layer, dtype="float32")
    wanted = np.concatenate([b.activations for b in store.stream(layer, 64, dtype="float32")])
    assert np.array_equal(column(made, "activation"), wanted, equal_nan=True)
    for more, error, said in (
        ({"each": "row"}, ValueError, "each"),
        ({"columns": ["nothing"]}, actshard.NotStoredError, "nothing"),
        ({"each": "example", "tokens": "last"}, ValueError, "store.filter"),
    ):
        with pytest.raises(error, match=said):
            to_dataset(store, layer, dtype="float32", **more)


def test_a_dataset_is_converted_with_its_selection_order_and_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(n, 4)).astype(np.float32) for n in (3, 2, 5, 4)]
    features = datasets.Features(
        {"acts": datasets.Array2D(shape=(None, 4), dtype="float32"), "label": datasets.Value("int64")}
    )
    whole = datasets.Dataset.from_dict({"acts": rows, "label": [0, 1, 2, 3]}, features=features)
    whole.save_to_disk(str(tmp_path / "folder"))
    given = {
        "whole": whole,
        "loaded": datasets.load_from_disk(str(tmp_path / "folder")),
        "folder": tmp_path / "folder",
        "selected": whole.select([2, 0, 2]),
        "shuffled": datasets.load_from_disk(str(tmp_path / "folder")).shuffle(seed=3),
        "renamed": whole.rename_column("acts", "h").remove_columns("label"),
    }
    orders = {"selected": [2, 0, 2], "shuffled": list(given["shuffled"]["label"])}
    for name, source in given.items():
        actshard.convert(source, tmp_path / "to" / name / "made", "zarr", verify=True)
        store = actshard.open(tmp_path / "to" / name / "made")
        order = orders.get(name, [0, 1, 2, 3])
        (layer,) = store.layers
        assert layer == ("h" if name == "renamed" else "acts")
        assert [store.sequence(i, layer).tobytes() for i in range(len(store))] == [rows[i].tobytes() for i in order]
        assert name == "renamed" or store.table["label"].to_pylist() == order
        assert [p.name for p in (tmp_path / "to" / name).iterdir() if p.name.startswith(".")] == []
    assert orders["shuffled"] != [0, 1, 2, 3]
    conversion = actshard.convert(whole, tmp_path / "to" / "whole" / "made", "zarr", exist_ok=True)
    assert conversion.resumed_at == 4
    with pytest.raises(actshard.ExistsError):
        actshard.convert(whole.select([1, 0, 2, 3]), tmp_path / "to" / "whole" / "made", "zarr", exist_ok=True)
    for source, options, said in (
        (datasets.DatasetDict({"train": whole}), {}, "pass one of its splits: 'train'"),
        (whole.to_iterable_dataset(), {}, "found IterableDataset"),
        (whole, {"resume": True}, "resume: expected a path as src"),
        (whole, {"src_format": "zarr"}, "src_format: expected a path as src"),
        (whole.remove_columns("acts"), {}, "expected a column of vectors, or of sequences of vectors, found label"),
        (3, {}, "path"),
    ):
        with pytest.raises(actshard.ActshardError, match=said):
            actshard.convert(source, tmp_path / "refused" / "made", "zarr", **options)
    assert [p.name for p in tmp_path.glob("refused/.*")] == []
