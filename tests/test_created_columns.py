"""``create`` and ``append`` mean the same in every format: the model's name, and columns of a padded batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats

LENGTHS = [1, 2, 3, 5]
DRAFTS = ("deepspec", "speculators", "automodel", "specforge", "modelopt", "angelslim", "eagle")
"""Formats whose last layer is named ``"last"``, and which require token ids."""
WITHOUT_MODEL = ("speculators", "specforge", "modelopt", "angelslim", "eagle")


def written(path: Path, format: str, columns: dict[str, Any], **options: Any) -> actshard.Store:
    """Two padded batches: of 4 examples with up to 5 tokens, and of 2 with 3 tokens each."""
    layers: list[Any] = ["last"] if format == "eagle" else [0, "last" if format in DRAFTS else 1]
    if format in ("saev", "automodel"):
        options |= {"pad": True, "num_examples": 6}
    if format == "automodel":
        fields = {"target_model_type": "m", "target_vocab_size": 100, "num_hidden_layers": 2}
        options |= {"metadata": fields | ({} if "model" in options else {"target_model": "m"})}
    rows = np.random.default_rng(0).standard_normal((4, len(layers), 5, 8)).astype(np.float32)
    with actshard.create(path, format, layers=layers, d_model=8, dtype="bfloat16" if format in DRAFTS else "float32",
                         **options) as writer:  # fmt: skip
        writer.append(rows, lengths=LENGTHS, columns=columns)
        shorter = {name: values[:2, :3] if np.ndim(values) == 2 else values[:2] for name, values in columns.items()}
        writer.append(rows[:2, :, :3], lengths=[3, 3], columns=shorter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(writer.path)


@pytest.mark.parametrize("format", [name for name in formats.written() if name != "saev"])
def test_columns_of_a_padded_batch_are_cut_like_its_states(format: str, tmp_path: Path) -> None:
    ids = np.arange(1, 21).reshape(4, 5)
    columns = {"input_ids": ids} if format in DRAFTS else {"input_ids": ids, "loss": ids % 3 == 0, "text": list("abcd")}
    store = written(tmp_path / "d", format, columns)
    table = store.read_columns([name for name in columns if name != "text"])
    counts = [*LENGTHS, 3, 3]
    expected = [list(range(1 + 5 * (e % 4), 1 + 5 * (e % 4) + n)) for e, n in enumerate(counts)]
    if format == "automodel":  # which pads all examples to one length
        expected = [(row + [0] * 5)[:5] for row in expected]
    assert table["input_ids"].to_pylist() == expected
    if "loss" in table.column_names:
        assert table["loss"].to_pylist() == [[x % 3 == 0 for x in row] for row in expected]
    assert actshard.verify(store.path).ok


def test_floats_as_wide_as_a_padded_batch_are_refused_unless_they_are_lists(tmp_path: Path) -> None:
    """They may be losses of tokens, or a vector that happens to be as wide: a vector that is cut is lost."""
    scores = np.arange(6.0).reshape(2, 3)
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=2) as writer:
        with pytest.raises(actshard.ArgumentError, match=r"'scores': float64 of \(2, 3\), as wide as the padded batch"):
            writer.append(np.zeros((2, 1, 3, 2), np.float32), lengths=[1, 2], columns={"scores": scores})
        cut = [row[:n] for row, n in zip(scores, [1, 2], strict=True)]
        writer.append(np.zeros((2, 1, 3, 2), np.float32), lengths=[1, 2], columns={"loss": cut, "scores": list(scores)})
    table = actshard.open(tmp_path / "d").table
    assert table["loss"].to_pylist() == [[0.0], [3.0, 4.0]]
    assert table["scores"].to_pylist() == scores.tolist()


def test_arrays_of_another_width_and_batches_without_lengths_are_kept(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=2) as writer:
        writer.append(np.zeros((2, 1, 3, 2), np.float32), lengths=[1, 2], columns={"scores": np.ones((2, 4))})
        writer.append(np.zeros((1, 1, 4, 2), np.float32), columns={"scores": np.ones((1, 4))})
    assert [len(row) for row in actshard.open(tmp_path / "d").table["scores"].to_pylist()] == [4, 4, 4]


@pytest.mark.parametrize("format", formats.written())
def test_model_names_the_model_in_every_format_that_stores_it(format: str, tmp_path: Path) -> None:
    columns: dict[str, Any] = {} if format == "saev" else {"input_ids": np.arange(20).reshape(4, 5)}
    if format in WITHOUT_MODEL:
        with pytest.raises(actshard.NotStoredError, match=f"model: {format} does not store the name of the model"):
            written(tmp_path / "d", format, columns, model="lab/model-1")
        return
    store = written(tmp_path / "d", format, columns, model="lab/model-1")
    assert str(store.contents.model).endswith("lab/model-1")  # saev adds its family
    assert actshard.verify(store.path).ok
    if format != "lmprobe":
        with pytest.raises(actshard.ArgumentError, match="model: expected the model's name, found 3"):
            written(tmp_path / "e", format, columns, model=3)
