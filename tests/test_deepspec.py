"""DeepSpec target caches: golden caches of every version read bit for bit; damaged ones are refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import refuses
from draft_files import DRAFT, Expected, caches, check_reads, copied, edit_json, opened

CACHES = caches("deepspec")
SINGLE = DRAFT / "deepspec_v2_single"
ERRORS = DRAFT / "errors"


@pytest.mark.parametrize("golden", CACHES, ids=lambda p: p.name)
def test_golden_caches_read_bit_for_bit(golden: Path, io: str) -> None:
    said = json.loads((golden / "expected.json").read_text())
    store = opened(golden, io)
    assert store.format == "deepspec"
    last = [] if "nolast" in golden.name else ["last"]
    assert (list(store.layers), store.d_model, len(store)) == (said["layers"] + last, said["d_model"], said["examples"])
    check_reads(store, Expected(golden))
    assert actshard.verify(golden, deep=True).codes() <= {"duplicate-example"}
    again = pickle.loads(pickle.dumps(store))
    assert np.array_equal(again.last_tokens(store.layers[0]), store.last_tokens(store.layers[0]))


def test_last_hidden_states_are_views_and_layers_are_copies() -> None:
    store = opened(SINGLE)
    assert not store.sequence(1, "last").flags.writeable
    assert store.sequence(1, 9).flags.writeable


def test_columns_of_the_first_examples_and_of_a_part() -> None:
    store = opened(SINGLE)
    ids = store.table["input_ids"].to_pylist()
    head = store.contents.head_columns
    assert head is not None
    assert head(["input_ids"], 3)["input_ids"].to_pylist() == ids[:3]
    assert store.filter([5, 2]).table["input_ids"].to_pylist() == [ids[5], ids[2]]
    assert store.table.schema.names == ["input_ids", "attention_mask", "loss_mask"]
    with refuses(actshard.NotStoredError, SINGLE):
        store.read_columns(["text"])


REFUSED: dict[str, tuple[type[actshard.ActshardError], str]] = {
    "missing_shard": (actshard.MissingFileError, "shard-00000.bin"),
    "index_short": (actshard.FormatError, r"expected 224 bytes \(4 records of 56\), found 168"),
    "index_ragged": (actshard.FormatError, "found 221"),
    "unfinished": (actshard.UnfinishedError, "1 of 1 ranks have not finished"),
    "record_size": (actshard.FormatError, "'index_record_size': expected 56, as of version 2, found 64"),
    "version_5": (actshard.UnsupportedError, "'version': expected 2, 3 or 4, found 5"),
    "hidden_dtype": (actshard.UnsupportedError, "'hidden_dtype'"),
    "layers_unsorted": (actshard.FormatError, "'target_layer_ids': expected ascending layers"),
    "outside": (actshard.FormatError, r"'shards\[0\].file_name': expected the name of a file in the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_metadata_are_refused_on_opening(case: str) -> None:
    kind, said = REFUSED[case]
    path = ERRORS / f"deepspec_{case}"
    with pytest.raises(kind, match=said) as caught:
        opened(path)
    with refuses(kind, caught.value.path, said):
        opened(path)
    assert not actshard.verify(path).ok


DAMAGED: dict[str, tuple[list[int], str, str]] = {
    "truncated_shard": ([3], "ends at byte 594 of shard 0, which has 584 bytes", "truncated"),
    "ids_swapped": ([1, 2], "record 1: sample_id: expected 1, found 2", "duplicate-sample"),
    "id_twice": ([3], "record 3: sample_id: expected 3, found 2", "duplicate-sample"),
    "zero_length": ([1], "record 1: seq_len: expected a positive number, found 0", "format"),
    "no_such_shard": ([2], "record 2: shard_id: expected a shard, 0 to 0, found 7", "address-out-of-range"),
    "offset_huge": ([2], "target_hidden_states_offset: expected", "format"),
    "seq_len_huge": ([2], "record 2: attention_mask_offset: expected", "format"),
    "misordered": ([1], "record 1: ", "format"),
    "wrong_width": ([0, 1, 2, 3], "record 0: target_last_hidden_states_offset: expected", "format"),
    "overlap": ([2], "record 2: attention_mask_offset: expected 20 .*, found 12", "address-overlap"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_records_are_named_and_other_examples_read(case: str, io: str) -> None:
    bad, said, code = DAMAGED[case]
    path = ERRORS / f"deepspec_{case}"
    store = opened(path, io)
    for layer in store.layers:
        for i in range(len(store)):
            if i not in bad:
                assert store.sequence(i, layer).shape == (store.tokens_of([i])[0], 8)
                continue
            reads: list[Callable[[], object]] = [
                lambda i=i, layer=layer: store.sequence(i, layer),
                lambda i=i, layer=layer: store.sequences([0, i], layer),
                lambda i=i, layer=layer: store.gather(layer, i, 0),
                lambda i=i, layer=layer: store.last_tokens(layer, i),
                lambda i=i: store.tokens_of([i]),
                lambda i=i: store.read_columns(["loss_mask"]),
                lambda: store.token_counts,
                lambda layer=layer: list(store.stream(layer, 4)),
            ]
            for read in reads:
                with pytest.raises((actshard.FormatError, actshard.TruncatedFileError)) as caught:
                    read()
                assert caught.value.path == path / "samples.idx"
                assert "\n" not in str(caught.value)
    with pytest.raises(actshard.ActshardError, match=said):
        store.sequence(bad[0], store.layers[-1])
    found = actshard.verify(path)
    assert code in found.codes()
    assert not found.ok


def test_a_cache_without_examples_opens() -> None:
    store = opened(ERRORS / "deepspec_empty")
    assert len(store) == 0
    assert store.token_counts.tolist() == []
    assert store.table.num_rows == 0
    with pytest.raises(actshard.OutOfRangeError):
        store.sequence(0, "last")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", -1),
        ("num_samples", 1 << 61),
        ("num_shards", 2),
        ("hidden_size", 0),
        ("hidden_size", 1 << 40),
        ("target_layer_ids", []),
        ("target_layer_ids", [-2]),
        ("target_layer_ids", ["1"]),
        ("target_layer_ids", [1, True]),
        ("token_dtype", "int64"),
        ("mask_dtype", None),
        ("shards", [{"shard_id": 1, "file_name": "shard-00000.bin"}]),
        ("shards", [{"shard_id": 0, "file_name": "/etc/passwd"}]),
        ("shards", [{"shard_id": 0, "file_name": ""}]),
        ("version", True),
        ("version", 3),
    ],
)
def test_fields_that_are_wrong_are_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    path = copied(SINGLE, tmp_path / "cache")
    edit_json(path / "manifest.json", **{field: value})
    with pytest.raises(actshard.ActshardError) as caught:
        opened(path, format="deepspec")
    assert "\n" not in str(caught.value)
    assert not actshard.verify(path, format="deepspec").ok


def test_fields_of_ranks_are_checked(tmp_path: Path) -> None:
    for number, fields in enumerate(
        (
            {"index_files": ["samples.cp000.idx"]},
            {"index_files": ["samples.cp000.idx", "../samples.cp001.idx"]},
            {"context_layout": "zigzag"},
            {"cache_context_parallel_size": 1 << 20},
            {"stores_target_last_hidden_states": 1},
        )
    ):
        path = copied(DRAFT / "deepspec_v4_64_cp2", tmp_path / str(number))
        edit_json(path / "manifest.json", **fields)
        with refuses(actshard.FormatError, path / "manifest.json", next(iter(fields))):
            opened(path)


def test_a_repeated_layer_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = copied(SINGLE, tmp_path / "cache")
    edit_json(path / "manifest.json", target_layer_ids=[1, 9, 9])
    store = opened(path)
    assert store.layers == (1, 9, "9 (2)", "last")
    assert np.array_equal(store.last_tokens("9 (2)").view(np.uint16), opened(SINGLE).last_tokens(17).view(np.uint16))
    assert "layout" in actshard.verify(path).codes()


def head_tail(path: Path, lengths: list[int], ranks: int, record: int) -> list[np.ndarray]:
    """Writes a cache in the head-tail layout by its definition; returns each example's states ``(tokens, 2, 4)``."""
    rng = np.random.default_rng(0)
    whole = [rng.integers(0, 1 << 15, (n, 2, 4), dtype=np.uint16) for n in lengths]
    path.mkdir()
    for rank in range(ranks):
        index, shard = b"", b""
        for number, states in enumerate(whole):
            n = len(states)
            padded = -(-n // (2 * ranks)) * 2 * ranks
            chunks = np.split(np.concatenate([states, np.full((padded - n, 2, 4), 0xFFFF, np.uint16)]), 2 * ranks)
            mine = np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])
            first = len(shard)
            offsets = np.cumsum([first, 4 * n, n, n, mine[:, :1].nbytes]).tolist()
            shard += np.arange(n, dtype="<i4").tobytes() + bytes([1] * n) + bytes([number % 2] * n)
            shard += mine[:, :1].tobytes() + mine[:, 1:].tobytes()
            middle = struct.pack("<II", 0, len(mine)) if record == 64 else struct.pack("<I", len(mine))
            index += struct.pack("<QII", number, rank, n) + middle + struct.pack("<5Q", *offsets)
        (path / f"shard-{rank:05}.bin").write_bytes(shard)
        (path / f"samples.cp{rank:03}.idx").write_bytes(index)
    manifest = json.loads((DRAFT / "deepspec_v4_64_cp2/manifest.json").read_text())
    manifest |= {
        "cache_context_parallel_size": ranks,
        "context_layout": "native_head_tail",
        "hidden_size": 4,
        "index_files": [f"samples.cp{rank:03}.idx" for rank in range(ranks)],
        "index_record_size": record,
        "num_samples": len(lengths),
        "num_shards": ranks,
        "shards": [{"file_name": f"shard-{rank:05}.bin", "shard_id": rank} for rank in range(ranks)],
        "target_layer_ids": [7],
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return whole


@pytest.mark.parametrize("record", [60, 64])
def test_chunks_from_both_ends_are_joined_in_token_order(tmp_path: Path, record: int, io: str) -> None:
    whole = head_tail(tmp_path / "cache", [1, 5, 8, 9, 16, 23], 2, record)
    store = opened(tmp_path / "cache", io)
    assert store.token_counts.tolist() == [len(x) for x in whole]
    for i, states in enumerate(whole):
        assert np.array_equal(store.sequence(i, 7).view(np.uint16), states[:, 0])
        assert np.array_equal(store.sequence(i, "last").view(np.uint16), states[:, 1])
        for token in range(len(states)):
            assert np.array_equal(store.gather("last", i, token).view(np.uint16)[0], states[token, 1])
    assert store.table["input_ids"].to_pylist() == [list(range(len(x))) for x in whole]
    assert actshard.verify(tmp_path / "cache").findings == []


def test_a_shard_or_index_truncated_after_opening_is_an_error(tmp_path: Path, io: str) -> None:
    path = copied(SINGLE, tmp_path / "cache")
    store = opened(path, io)
    before = store.last_tokens("last")
    store.last_tokens(9)
    os.truncate(path / "shard-00000.bin", 100)
    with refuses(actshard.TruncatedFileError, path / "shard-00000.bin"):
        store.sequences([6, 7], 9)
    shutil.copy(SINGLE / "shard-00000.bin", path)
    os.truncate(path / "samples.idx", 56)
    if io == "mmap":
        with refuses(actshard.TruncatedFileError, path / "samples.idx"):
            store.last_tokens("last")
        with refuses(actshard.TruncatedFileError, path / "samples.idx"):
            _ = store.token_counts
    else:  # the index was read
        assert np.array_equal(store.last_tokens("last"), before)


def test_examples_that_share_bytes_are_found(tmp_path: Path) -> None:
    """Each record is sound by itself: readers cannot notice."""
    path = copied(SINGLE, tmp_path / "cache")
    index = bytearray((path / "samples.idx").read_bytes())
    for field in range(5):
        at = 5 * 56 + 16 + 8 * field
        (offset,) = struct.unpack_from("<Q", index, at)
        struct.pack_into("<Q", index, at, offset - 2)
    (path / "samples.idx").write_bytes(index)
    (found,) = [f for f in actshard.verify(path).findings if f.code == "address-overlap"]
    assert found.place == "record 5, byte 280"
    assert "; example 4 has bytes" in found.found


def test_gaps_and_unlisted_files_are_found(tmp_path: Path) -> None:
    path = copied(SINGLE, tmp_path / "cache")
    with (path / "shard-00000.bin").open("ab") as file:
        file.write(b"\0" * 10)
    (path / "shard-00001.bin").write_bytes(b"")
    found = {f.code: f for f in actshard.verify(path).findings}
    assert set(found) == {"layout", "unlisted-file"}
    assert found["layout"].found == "10 bytes that belong to no example"
    assert np.array_equal(opened(path).last_tokens(9), opened(SINGLE).last_tokens(9))


def test_opening_reads_no_record(tmp_path: Path) -> None:
    """A sparse index of ten million records, all damaged: opening and other examples do not notice."""
    path = copied(SINGLE, tmp_path / "cache")
    edit_json(path / "manifest.json", num_samples=10_000_000)
    os.truncate(path / "samples.idx", 56 * 10_000_000)
    store = opened(path)
    assert len(store) == 10_000_000
    assert np.array_equal(store.sequence(7, "last"), opened(SINGLE).sequence(7, "last"))
    with refuses(actshard.FormatError, path / "samples.idx", "record 9999999: seq_len"):
        store.sequence(9_999_999, "last")


def files_of(path: Path) -> dict[str, bytes]:
    """The cache's own files."""
    names = [p for p in path.iterdir() if p.suffix in (".idx", ".bin") or p.name == "manifest.json"]
    return {p.name: p.read_bytes() for p in names}


@pytest.mark.parametrize("name", ["deepspec_v2_single", "deepspec_v2_ranks", "deepspec_v4_60_nolast"])
def test_copies_are_the_original_byte_for_byte(tmp_path: Path, name: str) -> None:
    """Manifest, index and shards are those that DeepSpec's own writer made."""
    golden = DRAFT / name
    done = actshard.convert(golden, tmp_path / "copy", "deepspec", verify=True)
    assert done.losses == ()
    want, made = files_of(golden), files_of(done.path)
    if name == "deepspec_v2_ranks":  # four ranks, each with shards of its own
        check_reads(opened(done.path), Expected(golden))
        assert set(made) == {"manifest.json", "samples.idx", "shard-00000.bin"}
        return
    manifests = [json.loads(files.pop("manifest.json")) for files in (want, made)]
    assert made == want
    ours = {k: v for k, v in manifests[1].items() if k in manifests[0]}
    assert {**manifests[0], "version": manifests[1]["version"]} == ours
    assert set(manifests[1]) - set(manifests[0]) <= {"converted_from"}


def test_ranks_are_joined_by_a_conversion(tmp_path: Path) -> None:
    golden = DRAFT / "deepspec_v4_64_cp2"
    done = actshard.convert(golden, tmp_path / "copy", "deepspec")
    store = opened(done.path)
    check_reads(store, Expected(golden))
    assert (store.metadata["version"], store.metadata["cache_context_parallel_size"]) == (4, 1)
    check_reads(opened(actshard.convert(golden, tmp_path / "two", "deepspec", version=2).path), Expected(golden))


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
def test_other_formats_and_back_lose_nothing(tmp_path: Path, format: str) -> None:
    numbered = {1: 1, 9: 9, 17: 17, "last": 40}
    dtype = {} if format == "lmprobe" else {"dtype": "float32"}
    there = actshard.convert(SINGLE, tmp_path / "there", format, layers=numbered, verify=True, **dtype)
    back = actshard.convert(
        there.path, tmp_path / "back", "deepspec", layers={v: k for k, v in numbered.items()}, dtype="bfloat16"
    )
    check_reads(opened(back.path), Expected(SINGLE))
    want, made = files_of(SINGLE), files_of(back.path)
    assert json.loads(made["manifest.json"]) == json.loads(want["manifest.json"])
    assert {name: made[name] for name in want if name != "manifest.json"} == {
        name: data for name, data in want.items() if name != "manifest.json"
    }


def appended(path: Path, **options: object) -> actshard.Writer:
    """A writer of layers 3, 8 and last, of width 4."""
    given: dict[str, object] = {"layers": [3, 8, "last"], "d_model": 4, "dtype": "bfloat16"}
    return actshard.create(path, "deepspec", **(given | options))  # type: ignore[arg-type]


def examples_of(lengths: list[int]) -> tuple[list[np.ndarray], dict[str, list[list[int]]]]:
    """States ``(S, 3, 4)`` and columns of examples."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 1 << 14, (n, 3, 4), np.uint16).view(actshard.open(SINGLE).dtype) for n in lengths]
    ids = [rng.integers(0, 1 << 17, n).tolist() for n in lengths]
    return rows, {"input_ids": ids, "loss_mask": [[k % 2 for k in range(n)] for n in lengths]}


@pytest.mark.parametrize("shard_bytes", [None, 1, 200, 333])
def test_what_is_appended_comes_back_whatever_the_shards(tmp_path: Path, shard_bytes: int | None) -> None:
    lengths = [3, 1, 7, 2, 2, 9, 1]
    rows, columns = examples_of(lengths)
    with appended(tmp_path / "a", shard_bytes=shard_bytes) as writer:
        for first in range(0, 7, 2):
            part = {name: values[first : first + 2] for name, values in columns.items()}
            writer.append([x.transpose(1, 0, 2) for x in rows[first : first + 2]], columns=part)
    store = opened(tmp_path / "a")
    assert store.layers == (3, 8, "last")
    for i, x in enumerate(rows):
        for k, layer in enumerate(store.layers):
            assert np.array_equal(store.sequence(i, layer).view(np.uint16), x[:, k].view(np.uint16))
    assert {name: store.table[name].to_pylist() for name in columns} == columns
    assert store.table["attention_mask"].to_pylist() == [[1] * n for n in lengths]
    sizes = [p.stat().st_size for p in sorted((tmp_path / "a").glob("shard-*.bin"))]
    assert all(size <= (shard_bytes or 1 << 40) or size in {30 * n for n in lengths} for size in sizes)
    assert actshard.verify(tmp_path / "a", deep=True).ok
    assert sum(sizes) == sum(30 * n for n in lengths)


def test_an_interrupted_writer_goes_on(tmp_path: Path) -> None:
    rows, columns = examples_of([3, 1, 7, 2])
    given = [x.transpose(1, 0, 2) for x in rows]
    writer = appended(tmp_path / "a", shard_bytes=200)
    writer.append(given[:3], columns={name: values[:3] for name, values in columns.items()})
    writer.flush()
    writer.abort()
    with pytest.raises(actshard.UnfinishedError):
        opened(tmp_path / "a")
    with appended(tmp_path / "a", shard_bytes=200, resume=True) as writer:
        assert writer.committed == 3
        writer.append(given[3:], columns={name: values[3:] for name, values in columns.items()})
    with appended(tmp_path / "b", shard_bytes=200) as writer:
        writer.append(given, columns=columns)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [3, 8]}, "version 2 stores the last hidden state"),
        ({"layers": [3, "aux", "last"]}, r"pass layer_ids=\[...\]"),
        ({"layers": ["last"]}, "stores other layers besides the last hidden state"),
        ({"layers": [-2, "last"]}, "at least -1"),
        ({"version": 3}, "version: expected 2 or 4"),
        ({"index_record_size": 64}, "index_record_size"),
        ({"last": 9}, "last: expected one of the layers"),
        ({"layer_ids": [1]}, "layer_ids: expected 2 integers"),
        ({"metadata": {"num_samples": 3}}, "'num_samples' describes the files"),
        ({"part": (0, 2)}, "part: not supported"),
        ({"dtype": "float32"}, "deepspec supports bfloat16"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(actshard.ActshardError, match=said):
        appended(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (None, "deepspec stores token ids"),
        ({"loss_mask": [[1, 1, 1]]}, "deepspec stores token ids"),
        ({"input_ids": [[1, 2]]}, "example 0: expected 3 values, one per token, found 2"),
        ({"input_ids": [[1, 2, None]]}, "found null in example 0"),
        ({"input_ids": [None]}, "found nothing for example 0"),
        ({"input_ids": [[1, 2, 1 << 31]]}, "expected values that int32 holds, found 2147483648 in example 0"),
        ({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 256, 0]]}, "expected values that uint8 holds, found 256"),
        ({"input_ids": [[0.5, 1, 2]]}, "expected lists of integers, one per token, found list<"),
        ({"input_ids": [7]}, "expected lists of integers, one per token, found int64"),
        ({"input_ids": [[1, 2, 3]], "text": ["a"]}, "stores input_ids, attention_mask, loss_mask only, found 'text'"),
    ],
)
def test_columns_that_are_not_one_value_per_token_are_refused(
    tmp_path: Path, columns: dict[str, list[object]] | None, said: str
) -> None:
    rows, _ = examples_of([3])
    with pytest.raises(actshard.ActshardError, match=said), appended(tmp_path / "a") as writer:
        writer.append([rows[0].transpose(1, 0, 2)], columns=columns)


def test_layers_get_the_ids_that_are_given(tmp_path: Path) -> None:
    there = actshard.convert(SINGLE, tmp_path / "zarr", "zarr", layers={9: 0, 1: 1, "last": 2}, dtype="float32")
    made = actshard.convert(there.path, tmp_path / "a", "deepspec", dtype="bfloat16", last=2, layer_ids=[9, 1])
    store, want = opened(made.path), opened(SINGLE)
    assert store.layers == (1, 9, "last")
    for layer in store.layers:
        assert np.array_equal(store.last_tokens(layer).view(np.uint16), want.last_tokens(layer).view(np.uint16))


def test_columns_without_a_place_are_told(tmp_path: Path) -> None:
    rows, columns = examples_of([3, 2])
    with actshard.create(tmp_path / "a", "lmprobe", layers=[3, 8], d_model=4, dtype="bfloat16") as writer:
        writer.append(
            [x[:, :2].transpose(1, 0, 2) for x in rows], columns={**columns, "text": ["a", "b"], "topic": [1, 2]}
        )
    done = actshard.convert(tmp_path / "a", tmp_path / "b", "deepspec", version=4)
    assert "topic" in next(loss.detail for loss in done.losses if loss.what == "columns")
    store = opened(done.path)
    assert store.layers == (3, 8)
    assert store.table["input_ids"].to_pylist() == columns["input_ids"]
    with pytest.raises(actshard.ArgumentError, match="deepspec stores token ids"):
        actshard.convert(tmp_path / "a", tmp_path / "c", "deepspec", version=4, columns=["text"])


def test_negative_token_ids_and_masks_of_other_values_are_found(tmp_path: Path) -> None:
    """The first of each example, with its number and token."""
    path = copied(DRAFT / "deepspec_v2_single", tmp_path / "cache")
    record = np.dtype("<u8, <u4, <u4, (5,)<u8")
    records = np.frombuffer((path / "samples.idx").read_bytes(), record)
    raw = bytearray((path / "shard-00000.bin").read_bytes())
    ids, attention, loss = records[2]["f3"][:3].tolist()
    raw[ids : ids + 4] = (-7).to_bytes(4, "little", signed=True)
    raw[attention + 1] = 3
    raw[loss] = raw[loss + 1] = 255
    (path / "shard-00000.bin").write_bytes(raw)
    report = actshard.verify(path)
    found = [(f.code, f.place, f.found) for f in report.errors]
    assert found == [
        ("token-range", "example 2, input_ids, token 0", "-7"),
        ("mask-value", "example 2, attention_mask, token 1", "3"),
        ("mask-value", "example 2, loss_mask, token 0", "255"),
    ]
