"""NeMo Automodel caches: golden EAGLE-3 and DSpark caches read bit for bit; damaged ones are refused in one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import refuses
from draft_files import DRAFT, caches, copied, edit_json, opened

CACHES = caches("automodel")
DENSE, TOPK, DSPARK = (DRAFT / f"automodel_{name}" for name in ("eagle3_dense", "eagle3_topk", "dspark"))
ERRORS = DRAFT / "errors"


def wanted(golden: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "expected.npz"))


@pytest.mark.parametrize("golden", CACHES, ids=lambda p: p.name)
def test_golden_caches_read_bit_for_bit(golden: Path, io: str) -> None:
    want, store = wanted(golden), opened(golden, io)
    n, tokens = want["input_ids"].shape
    assert (store.format, len(store), store.token_counts.tolist()) == ("automodel", n, [tokens] * n)
    lengths = want.get("lengths")
    assert (store.content_lengths is None) == (lengths is None)
    if lengths is not None:
        assert store.content_lengths is not None
        assert store.content_lengths.tolist() == lengths.tolist()
    own = np.full(n, tokens) if lengths is None else lengths
    for layer in store.layers:
        rows = want[("last" if layer == "last" else f"layer_{layer}") + "_bits"]
        assert np.array_equal(np.stack(store.sequences(range(n), layer)).view(np.uint16), rows)
        assert np.array_equal(store.sequence(n - 1, layer).view(np.uint16), rows[-1])
        assert np.array_equal(store.last_tokens(layer).view(np.uint16), rows[np.arange(n), own - 1])
        for kept, count in (("all", n * tokens), ("content", int(own.sum()))):
            seen = 0
            for batch in store.stream(layer, 5, shuffle="window", tokens=kept):
                assert np.array_equal(batch.activations.view(np.uint16), rows[batch.examples, batch.tokens])
                seen += len(batch.examples)
            assert seen == count
    assert set(store.table.column_names) == {"input_ids", "attention_mask", "loss_mask", "position_mask"} & want.keys()
    for name in store.table.column_names:
        assert np.array_equal(np.array(store.table[name].to_pylist()), want[name])
    assert actshard.verify(golden, deep=True).ok


@pytest.mark.parametrize("golden", [DENSE, TOPK], ids=lambda p: p.name)
def test_the_targets_distribution_is_read_on_demand(golden: Path) -> None:
    store, want = opened(golden), wanted(golden)["target_probs"]
    table = store.read_columns(["loss_mask", "target_probs"])
    assert table.column_names == ["loss_mask", "target_probs"]
    assert np.array_equal(np.array(table["target_probs"].to_pylist(), np.float32), want)
    assert "target_probs" not in store.table.column_names
    with refuses(actshard.NotStoredError, DSPARK):
        opened(DSPARK).read_columns(["target_probs"])


def test_lengths_that_are_not_stored_are_told() -> None:
    with pytest.warns(actshard.ActshardWarning, match="lengths are not stored: padding counts as content"):
        store = actshard.open(DSPARK)
    assert [warning.code for warning in store.warnings] == ["layout"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actshard.open(DENSE)


def test_a_mask_with_holes_gives_no_lengths(tmp_path: Path) -> None:
    path = copied(DENSE, tmp_path / "cache")
    shard = path / "shard-000000.safetensors"
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + 8] = bytes(8)  # the first token of the first example
    shard.write_bytes(data)
    assert opened(path).content_lengths is None


REFUSED: dict[str, tuple[type[actshard.ActshardError], str, str]] = {
    "gap": (actshard.MissingFileError, "shard-000001.safetensors", "expected shard 1 of 0 to 2"),
    "extra": (actshard.FormatError, "shard-000003.safetensors", "expected 3 shards for 5 samples of 2, found shard 3"),
    "incomplete": (actshard.UnfinishedError, "manifest.json", "'complete': expected true, found false"),
    "version": (actshard.UnsupportedError, "manifest.json", "'format_version': expected 1, as of dspark, found 3"),
    "short_middle": (
        actshard.FormatError,
        "shard-000000.safetensors",
        r"expected I64 \[2, 5\], as manifest.json states",
    ),
    "wrong_width": (actshard.FormatError, "shard-000000.safetensors", r"expected BF16 \[2, 5, 24\]"),
    "truncated": (actshard.HeaderError, "shard-000001.safetensors", "the file has 636"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_caches_are_refused_on_opening(case: str) -> None:
    kind, name, said = REFUSED[case]
    path = ERRORS / f"automodel_{case}"
    with refuses(kind, path / name, said):
        opened(path)
    assert not actshard.verify(path).ok


def test_indices_outside_the_draft_vocabulary_concern_only_the_distribution() -> None:
    path = ERRORS / "automodel_topk_outside"
    store = opened(path)
    assert store.sequence(0, 2).shape[1] == 8
    with refuses(actshard.FormatError, path / "shard-000000.safetensors", "0 to 5, found 6"):
        store.read_columns(["target_probs"])
    assert actshard.verify(path).codes() == {"address-out-of-range"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", -1),
        ("num_samples", 1 << 61),
        ("shard_size", 0),
        ("seq_length", 0),
        ("seq_length", 1 << 60),
        ("dtype", "int8"),
        ("target_layer_ids", []),
        ("target_layer_ids", [1, True, 3]),
        ("target_layer_ids", [1, 2]),
        ("target_hidden_dim", 71),
        ("target_hidden_dim", 1 << 60),
        ("hidden_size", 25),
        ("target_last_hidden_dim", 23),
        ("complete", 1),
    ],
)
def test_fields_that_are_wrong_are_refused(tmp_path: Path, field: str, value: object) -> None:
    path = copied(DSPARK, tmp_path / "cache")
    edit_json(path / "manifest.json", **{field: value})
    with pytest.raises(actshard.ActshardError) as caught:
        opened(path)
    assert "\n" not in str(caught.value)
    assert not actshard.verify(path).ok


def test_conversions_tell_what_they_leave_behind(tmp_path: Path) -> None:
    done = actshard.convert(DSPARK, tmp_path / "deepspec", "deepspec", verify=True)
    assert [loss.what for loss in done.losses] == ["masks", "columns"]
    assert done.losses[0].detail == "the source has no attention_mask: it is written as ones"
    assert "target_weights.safetensors" in done.losses[1].detail
    store, want = opened(done.path), wanted(DSPARK)
    assert store.layers == (-1, 4, 39, "last")
    assert np.array_equal(
        np.concatenate(store.sequences(range(5), 39)).view(np.uint16), want["layer_39_bits"].reshape(-1, 24)
    )
    assert np.array_equal(np.array(store.table["input_ids"].to_pylist()), want["input_ids"])
    assert (
        store.metadata["target_model_name_or_path"]
        == json.loads((DSPARK / "manifest.json").read_text())["target_model"]
    )
    losses = actshard.convert(DENSE, tmp_path / "v4", "deepspec", version=4).losses
    assert "target_probs, target_embeddings.safetensors" in " ".join(loss.detail for loss in losses)
    assert "position_mask" in " ".join(loss.detail for loss in losses)


@pytest.mark.parametrize("format", ["deepspec", "lmprobe"])
def test_per_token_columns_are_those_of_the_tokens_that_are_converted(tmp_path: Path, format: str) -> None:
    """Padding is left out; ``tokens="last"`` keeps the last token's id."""
    want = wanted(DENSE)
    own = {"version": 4} if format == "deepspec" else {}
    ids = [row[:n].tolist() for row, n in zip(want["input_ids"], want["lengths"], strict=True)]
    for tokens, kept in (("all", ids), ("last", [row[-1:] for row in ids])):
        store = opened(actshard.convert(DENSE, tmp_path / tokens, format, tokens=tokens, **own).path)
        assert store.table["input_ids"].to_pylist() == kept
        assert store.token_counts.tolist() == [len(row) for row in kept]
