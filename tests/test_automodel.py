"""NeMo Automodel caches: golden EAGLE-3 and DSpark caches read bit for bit; damaged ones are refused in one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

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
    assert store.read_columns(["target_probs"]).equals(table.select(["target_probs"])), "alone, too"
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


# -- writing -----------------------------------------------------------------------------------------------------------

MODEL = {"target_model": "m", "target_model_type": "qwen3", "target_vocab_size": 500, "num_hidden_layers": 40}


def begun(path: Path, **options: Any) -> actshard.Writer:
    """A writer of layers 3, last and -1, of width 4."""
    given: dict[str, Any] = {"layers": [3, "last", -1], "d_model": 4, "dtype": "float32", "num_examples": 7}
    return actshard.create(path, "automodel", **(given | {"metadata": MODEL, "shard_size": 3, "pad": True} | options))


def examples_of(lengths: list[int]) -> tuple[list[np.ndarray], dict[str, list[list[int]]]]:
    """States ``(3, S, 4)`` and columns of examples."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((3, n, 4)).astype(np.float32) for n in lengths]
    ids = [rng.integers(1, 500, n).tolist() for n in lengths]
    return rows, {"input_ids": ids, "loss_mask": [[(k + 1) % 2 for k in range(n)] for n in lengths]}


def part_of(columns: dict[str, list[list[int]]], part: slice) -> dict[str, list[list[int]]]:
    return {name: values[part] for name, values in columns.items()}


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("[!.]*")) if file.is_file()}


def test_a_copy_is_the_original_byte_for_byte(tmp_path: Path) -> None:
    """Manifest and shards; the weights are told as left behind."""
    done = actshard.convert(DSPARK, tmp_path / "copy", "automodel", verify=True)
    assert [str(loss) for loss in done.losses] == ["columns: not converted: target_weights.safetensors"]
    made = bytes_of(done.path)
    assert sorted(made) == ["manifest.json", *(f"shard-00000{i}.safetensors" for i in range(3))]
    for name, data in made.items():
        assert data == (DSPARK / name).read_bytes()


def test_a_store_between_keeps_the_settings(tmp_path: Path) -> None:
    store = actshard.convert(DSPARK, tmp_path / "store", "zarr", dtype="float32")
    back = actshard.convert(store.path, tmp_path / "back", "automodel", dtype="bfloat16", verify=True)
    for name, data in bytes_of(back.path).items():
        assert data == (DSPARK / name).read_bytes()


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_what_is_appended_comes_back_and_an_interrupted_writer_goes_on(tmp_path: Path, cut: int) -> None:
    """Whether the interruption is at a shard's end or within one."""
    rows, columns = examples_of([4, 1, 6, 2, 6, 3, 5])
    writer = begun(tmp_path / "a", tokens_per_example=6)
    writer.append(rows[:cut], columns=part_of(columns, slice(cut)))
    writer.flush()
    names = sorted(path.name for path in (tmp_path / "a").glob("*shard-*"))
    whole, begun_shard = (
        [f"shard-00000{i}.safetensors" for i in range(cut // 3)],
        f".shard-00000{cut // 3}.safetensors.part",
    )
    assert names == sorted([*whole, *([begun_shard] if cut % 3 else [])])
    writer.abort()
    with pytest.raises(actshard.UnfinishedError):
        opened(tmp_path / "a")
    with begun(tmp_path / "a", tokens_per_example=6, resume=True) as writer:
        assert writer.committed == cut
        writer.append(rows[cut:], columns=part_of(columns, slice(cut, None)))
    with begun(tmp_path / "b", tokens_per_example=6) as writer:
        writer.append(rows, columns=columns)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    store = opened(tmp_path / "a")
    assert (store.layers, store.d_model, store.dtype) == ((3, -1, "last"), 4, np.float32)
    assert store.token_counts.tolist() == [6] * 7
    for i, states in enumerate(rows):
        n = states.shape[1]
        for k, layer in enumerate([3, "last", -1]):
            assert np.array_equal(store.sequence(i, layer)[:n], states[k])
            assert not store.sequence(i, layer)[n:].any()
        for name, values in columns.items():
            assert store.table[name].to_pylist()[i] == values[i] + [0] * (6 - n)
    report = actshard.verify(tmp_path / "a", deep=True)
    assert report.ok
    with begun(tmp_path / "a", tokens_per_example=6, resume=True) as writer:
        assert (writer.complete, len(writer)) == (True, 7)


def test_a_shard_renamed_before_its_commit_was_recorded_is_written_again(tmp_path: Path) -> None:
    rows, columns = examples_of([6] * 7)
    writer = begun(tmp_path / "a")
    writer.append(rows[:4], columns=part_of(columns, slice(4)))
    writer.flush()
    writer.abort()
    (tmp_path / "a/.shard-000001.safetensors.part").rename(tmp_path / "a/shard-000001.safetensors")
    with begun(tmp_path / "a", resume=True) as writer:
        assert writer.committed == 4
        writer.append(rows[4:], columns=part_of(columns, slice(4, None)))
    assert np.array_equal(opened(tmp_path / "a").sequence(6, "last"), rows[6][1])


def test_padding_has_the_tokenizers_id_and_no_loss(tmp_path: Path) -> None:
    rows, columns = examples_of([2, 3])
    with begun(tmp_path / "a", num_examples=2, tokens_per_example=3, pad_token_id=151643) as writer:
        writer.append(rows, columns={"input_ids": columns["input_ids"]})
    table = opened(tmp_path / "a").table
    assert table["input_ids"].to_pylist()[0] == [*columns["input_ids"][0], 151643]
    assert table["loss_mask"].to_pylist() == [[1, 1, 0], [1, 1, 1]]


def test_long_examples_are_cut_with_their_columns(tmp_path: Path) -> None:
    rows, columns = examples_of([2, 5])
    with begun(tmp_path / "a", num_examples=2, tokens_per_example=3, truncate=True) as writer:
        writer.append(rows, columns=columns)
    store = opened(tmp_path / "a")
    assert store.table["input_ids"].to_pylist()[1] == columns["input_ids"][1][:3]
    assert np.array_equal(store.sequence(1, 3), rows[1][0, :3])
    source = DRAFT / "deepspec_v2_single"
    model = {**MODEL, "target_vocab_size": 1 << 20}
    fitted = {"tokens_per_example": 5, "pad": True, "truncate": True}
    done = actshard.convert(source, tmp_path / "b", "automodel", metadata=model, verify=True, **fitted)  # type: ignore[arg-type]  # options by name
    assert {loss.what for loss in done.losses} == {"padding", "tokens", "columns"}
    wanted_ids = opened(source).table["input_ids"].to_pylist()
    assert opened(done.path).table["input_ids"].to_pylist() == [(each + [0] * 5)[:5] for each in wanted_ids]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [3, 8]}, "DSpark caches store the last hidden state: name a layer 'last'"),
        ({"layers": ["last"]}, "stores other layers besides the last"),
        ({"layers": ["a", "last"]}, r"pass layer_ids=\[\.\.\.\]"),
        ({"layer_ids": [1]}, "layer_ids: expected 2 integers"),
        ({"last": 9}, "last: expected one of the layers"),
        ({"num_examples": None}, "num_examples: expected the number of examples"),
        ({"metadata": {"target_model": "m"}}, "target_model_type: expected str, found None"),
        ({"metadata": {**MODEL, "target_vocab_size": "5"}}, "target_vocab_size: expected int, found '5'"),
        ({"metadata": {**MODEL, "seq_length": 5}}, "'seq_length' describes the files"),
        ({"pad_token_id": -1}, "pad_token_id: expected a token id"),
        ({"shard_size": 0}, "shard_size: expected a positive integer"),
        ({"part": (0, 2)}, "part: not supported"),
        ({"dtype": "float64"}, "automodel supports"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(actshard.ActshardError, match=said):
        begun(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "automodel stores token ids"),
        ({"input_ids": [[1, 2]]}, "expected 3 values, one per token, found 2"),
        ({"input_ids": [[1, 2, None]]}, "found null in example 0"),
        (
            {"input_ids": [[1, 500, 2]]},
            "expected token ids below 500, metadata's target_vocab_size, found 500 in example 0",
        ),
        ({"input_ids": [[1, 2, 3]], "loss_mask": [[1]]}, "expected 3 values, one per token, found 1"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}, "stores input_ids, loss_mask only"),
    ],
)
def test_columns_that_are_not_one_value_per_token_are_refused(
    tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    rows, _ = examples_of([3])
    writer = begun(tmp_path / "a", num_examples=1)

    def everything() -> None:
        writer.append(rows, columns=columns)
        writer.flush()  # lists are compared with rows when they are written

    with pytest.raises(actshard.ActshardError, match=said):
        everything()
    writer.abort()


@pytest.mark.parametrize("golden", [DENSE, DSPARK], ids=lambda p: p.name)
def test_token_ids_outside_the_vocabulary_and_masks_of_other_values_are_found(tmp_path: Path, golden: Path) -> None:
    import actshard._native as _native

    path = copied(golden, tmp_path / "cache")
    vocabulary = json.loads((path / "manifest.json").read_text())["target_vocab_size"]
    shard = path / "shard-000001.safetensors"
    tensors, _, data = _native.safetensors_header(shard)
    places = {name: data + begin for name, _, _, begin, _ in tensors}
    raw = bytearray(shard.read_bytes())
    for name, value in (("input_ids", vocabulary), ("loss_mask", 2)):
        raw[places[name] + 16 : places[name] + 24] = value.to_bytes(8, "little")
    raw[places["input_ids"] + 32 : places["input_ids"] + 40] = (-1).to_bytes(8, "little", signed=True)
    shard.write_bytes(raw)
    first = json.loads((path / "manifest.json").read_text())["shard_size"]
    found = {finding.code: finding for finding in actshard.verify(path).errors}
    assert set(found) == {"token-range", "mask-value"}
    assert (found["token-range"].place, found["token-range"].found) == (
        f"example {first}, input_ids, token 2",
        str(vocabulary),
    )
    assert found["token-range"].expected == f"a token id, 0 to {vocabulary - 1}"
    assert (found["mask-value"].place, found["mask-value"].path) == (f"example {first}, loss_mask, token 2", shard)
