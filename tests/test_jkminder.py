"""ActivationCaches of jkminder/dictionary_learning: golden data read bit for bit, pairs, sequences, hostile and broken caches."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits, refuses

FOLDER = GOLDEN / "jkminder"
BASE = FOLDER / "paired_bf16_bos/tiny-base/chat/train"
RANGED = FOLDER / "single_f32_sequence_ranges/tiny/web/validation_col_text2"
STORES = [
    (folder, name)
    for folder in sorted(FOLDER.iterdir())
    for name in json.loads((folder / "expected.json").read_text())["stores"]
]


def quietly(path: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


@pytest.mark.parametrize(("folder", "name"), STORES, ids=lambda x: x.name if isinstance(x, Path) else x)
def test_golden_caches_come_back(folder: Path, name: str, io: str) -> None:
    said = json.loads((folder / "expected.json").read_text())["stores"][name]
    z = np.load(folder / "expected.npz")
    key = name.replace("/", "|")
    store = quietly(folder / name, io=io)
    assert (store.format, list(store.layers), store.d_model) == ("jkminder", said["layers"], said["d_model"])
    assert f"torch.{store.dtype}" == said["dtype"]
    lost = said["boundaries"] == "none stored"
    lengths = [1] * said["total"] if lost else z[f"{key}|lengths"].tolist()
    assert store.token_counts.tolist() == lengths
    assert len(store.warnings) == lost
    assert np.concatenate(store.table["token_ids"].to_pylist()).tolist() == z[f"{key}|tokens"].tolist()
    ends = np.cumsum(lengths)
    for layer in store.layers:
        at = f"{key}|layer_{layer}"
        want = z[f"{at}_bits"] if f"{at}_bits" in z else bits(z[at])
        for i, rows in enumerate(np.split(want, ends[:-1])):
            assert np.array_equal(bits(store.sequence(i, layer)), rows)
        assert np.array_equal(bits(store.last_tokens(layer)), want[ends - 1])
        streamed = np.concatenate([batch.activations for batch in store.stream(layer, 3)])
        assert np.array_equal(bits(streamed), want)
        alone = quietly(folder / name / f"layer_{layer}_out", io=io)
        assert alone.layers == (layer,)
        assert np.array_equal(bits(alone.sequence(1, layer)), bits(store.sequence(1, layer)))
    report = actshard.verify(folder / name, deep=True)
    assert report.codes() == ({"layout"} if lost else set())


def test_a_pair_of_caches_reads_aligned_rows_and_compares_tokens(tmp_path: Path) -> None:
    tuned = BASE.parents[2] / "tiny-ft/chat/train"
    pair = actshard.pair({"base": BASE, "tuned": tuned})
    assert set(pair.compared) >= {"examples", "tokens", "token_ids"}
    z = np.load(FOLDER / "paired_bf16_bos/expected.npz")
    got = [(batch.activations, batch.examples, batch.tokens) for batch in pair.stream(13, 5, shuffle="exact", seed=3)]
    starts = np.cumsum([0, *z["tiny-base|chat|train|lengths"][:-1]])
    rows = np.concatenate([starts[examples] + tokens for _, examples, tokens in got])
    assert sorted(rows.tolist()) == list(range(32))
    made = bits(np.concatenate([activations for activations, *_ in got]))
    for i, model in enumerate(("tiny-base", "tiny-ft")):
        assert np.array_equal(made[:, i], z[f"{model}|chat|train|layer_13_bits"][rows])
    other = Path(shutil.copytree(tuned, tmp_path / "other"))
    changed(other / "tokens.pt", np.int64(49088 + 7), 2)
    with pytest.raises(actshard.ActshardError):
        actshard.pair({"base": BASE, "tuned": other})


def changed(path: Path, value: np.int64, at: int) -> None:
    """Writes an element of a tensor of a torch file in place."""
    (file,) = actshard.base.containers.read_torch([actshard.base.location.Location.of(path)])
    data = bytearray(path.read_bytes())
    data[file.value.offset + 8 * at : file.value.offset + 8 * at + 8] = value.tobytes()
    path.write_bytes(data)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "train"))


def test_a_first_token_that_does_not_begin_every_shard_is_no_bos(copied: Path) -> None:
    changed(copied / "tokens.pt", np.int64(77), 17)
    store = quietly(copied)
    assert store.token_counts.tolist() == [1] * 32
    assert "the starts of sequences are unknown" in str(store.warnings[0])


def test_a_sequence_longer_than_the_context_has_lost_its_bounds(copied: Path) -> None:
    for layer in ("layer_3_out", "layer_13_out"):
        edit(copied / layer / "config.json", context_len=2)
    assert quietly(copied).token_counts.tolist() == [1] * 32


def edit(path: Path, **fields: Any) -> None:
    value = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: field for name, field in value.items() if field is not None}))


def test_shuffled_layers_open_one_by_one(copied: Path) -> None:
    """Rows of each layer were permuted on their own, so that neither layers nor tokens align."""
    for layer in ("layer_3_out", "layer_13_out"):
        edit(copied / layer / "config.json", shuffle_shards=True)
    with refuses(actshard.UnsupportedError, copied, "layers do not align. Open the folder of a single layer"):
        actshard.open(copied)
    store = quietly(copied / "layer_3_out")
    assert (len(store), store.table.column_names) == (32, [])
    z = np.load(FOLDER / "paired_bf16_bos/expected.npz")
    assert np.array_equal(bits(store.gather(3, np.arange(32), 0)), z["tiny-base|chat|train|layer_3_bits"])


def test_folders_that_share_a_number_keep_their_names(copied: Path) -> None:
    (copied / "layer_3_out").rename(copied / "layer_13_in")
    assert actshard.open(copied).layers == ("layer_13_in", "layer_13_out")


def test_a_cache_without_tokens_has_an_example_per_row(copied: Path) -> None:
    (copied / "tokens.pt").unlink()
    store = quietly(copied)
    assert (len(store), store.table.column_names) == (32, [])
    assert "tokens.pt is missing" in str(store.warnings[0])


BROKEN: dict[str, tuple[Callable[[Path], object], type[actshard.ActshardError], str]] = {
    "no config": (
        lambda d: (d / "layer_3_out/config.json").unlink(),
        actshard.UnfinishedError,
        "has shards and no config.json, which is written last",
    ),
    "no meta": (lambda d: (d / "layer_3_out/shard_1.meta").unlink(), actshard.MissingFileError, "the .meta of a shard"),
    "shard count": (
        lambda d: edit(d / "layer_3_out/config.json", shard_count=1 << 40),
        actshard.FormatError,
        "shard_count",
    ),
    "negative rows": (lambda d: edit(d / "layer_3_out/shard_0.meta", shape=[-1, 16]), actshard.FormatError, "shape"),
    "huge rows": (lambda d: edit(d / "layer_3_out/shard_0.meta", shape=[1 << 60, 16]), actshard.FormatError, "shape"),
    "a shape of texts": (lambda d: edit(d / "layer_3_out/shard_0.meta", shape="17"), actshard.FormatError, "shape"),
    "another width": (
        lambda d: edit(d / "layer_3_out/shard_0.meta", shape=[17, 8]),
        actshard.FormatError,
        "[rows, 16], as in config.json",
    ),
    "a dtype that is none": (
        lambda d: edit(d / "layer_3_out/shard_0.meta", dtype="os.system"),
        actshard.UnsupportedError,
        "expected a dtype of torch",
    ),
    "another dtype": (
        lambda d: edit(d / "layer_3_out/shard_1.meta", dtype="torch.float16"),
        actshard.FormatError,
        "the dtype of the shards before",
    ),
    "fewer shards in a layer": (
        lambda d: edit(d / "layer_3_out/config.json", shard_count=2),
        actshard.FormatError,
        "rows per shard: expected [17, 10], as in layer_3_out, found [17, 10, 5]",
    ),
    "fewer tokens": (
        lambda d: [edit(d / layer / "config.json", shard_count=2) for layer in ("layer_3_out", "layer_13_out")],
        actshard.FormatError,
        "expected 27 tokens, one per row, found 32",
    ),
    "tokens of another type": (
        lambda d: shutil.copy(d / "layer_3_out/mean.pt", d / "tokens.pt"),
        actshard.FormatError,
        "expected a tensor of int64 with one axis, found BF16 [16]",
    ),
    "tokens that are no tensor": (
        lambda d: (d / "tokens.pt").write_bytes(b"PK\x03\x04"),
        actshard.FormatError,
        "",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_caches_are_refused_in_one_line(case: str, copied: Path) -> None:
    spoil, kind, message = BROKEN[case]
    spoil(copied)
    with pytest.raises(kind) as caught:
        actshard.open(copied)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert str(copied) in str(caught.value)
    assert not actshard.verify(copied).ok


@pytest.mark.parametrize(
    ("values", "ok"), [([0, 0, 32], True), ([0, 40], False), ([1, 32], False), ([0, 9, 3, 32], False)]
)
def test_ranges_ascend_from_zero_to_the_rows(values: list[int], ok: bool, copied: Path, tmp_path: Path) -> None:
    torch_file(copied / "sequence_ranges.pt", values)
    if ok:
        assert actshard.open(copied).token_counts.tolist() == np.diff(values).tolist()
    else:
        with refuses(actshard.FormatError, copied / "sequence_ranges.pt", "expected ascending numbers from 0 to 32"):
            actshard.open(copied)


def torch_file(path: Path, values: list[int]) -> None:
    """A tensor of int64 in the form before torch 1.6, built by hand."""
    n = len(values)
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    protocol = b"\x80\x02M\xe9\x03."
    system = b"\x80\x02}(X\x10\x00\x00\x00protocol_versionM\xe9\x03X\r\x00\x00\x00little_endian\x88u."
    value = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nLongStorage\nX\x01\x00\x00\x000"
    )
    value += (
        b"X\x03\x00\x00\x00cpuK"
        + bytes([n])
        + b"NtQK\x00K"
        + bytes([n])
        + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n"
    )
    value += b")RtR."
    keys = b"\x80\x02]X\x01\x00\x00\x000a."
    path.write_bytes(
        magic + protocol + system + value + keys + n.to_bytes(8, "little") + np.array(values, "<i8").tobytes()
    )


def test_a_shard_shorter_than_its_meta_is_an_error_with_its_name(copied: Path) -> None:
    path = copied / "layer_3_out/shard_1.memmap"
    path.write_bytes(path.read_bytes()[:-1])
    store = actshard.open(copied)
    with pytest.raises(actshard.ActshardError, match=r"layer_3_out/shard_1.memmap"):
        store.gather(3, np.arange(7), -1)
    assert actshard.verify(copied).codes() == {"truncated"}


def test_verify_names_what_does_not_fit(copied: Path) -> None:
    with (copied / "layer_3_out/shard_0.memmap").open("ab") as file:
        file.write(b"\0")
    (copied / "layer_13_out/shard_3.memmap").write_bytes(b"")
    edit(copied / "layer_13_out/config.json", total_size=31)
    assert actshard.verify(copied).codes() == {"too-long", "unlisted-file", "count-claim"}


def test_conversion_keeps_sequences_and_tokens(tmp_path: Path) -> None:
    actshard.convert(RANGED, tmp_path / "z", "zarr")
    before, after = actshard.open(RANGED), actshard.open(tmp_path / "z")
    assert before.token_counts.tolist() == after.token_counts.tolist()
    for i in range(len(before)):
        assert np.array_equal(bits(after.sequence(i, 7)), bits(before.sequence(i, 7)))


def test_no_damaged_byte_of_metadata_escapes_the_errors(copied: Path) -> None:
    refused: list[str] = []
    for path in (copied / "tokens.pt", copied / "layer_3_out/config.json", copied / "layer_3_out/shard_0.meta"):
        whole = path.read_bytes()
        for at in range(0, len(whole), 11):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            try:
                store = quietly(copied, format="jkminder")
                store.gather(store.layers[0], np.arange(len(store)), 0)
                store.table  # noqa: B018 -- reads the tokens
            except actshard.ActshardError as error:
                refused.append(str(error))
        path.write_bytes(whole)
    assert len(refused) > 10
    assert all(len(message.splitlines()) == 1 for message in refused)


def test_a_layer_without_its_first_shard_is_not_hidden(copied: Path) -> None:
    """It disappeared from the layers, without a word."""
    before = quietly(copied).layers
    (copied / "layer_3_out/shard_0.memmap").unlink()
    assert quietly(copied).layers == before
    with pytest.raises(actshard.ActshardError, match=r"layer_3_out/shard_0\.memmap"):
        quietly(copied).sequence(0, 3)
    assert not actshard.verify(copied).ok
