"""Zarr version 3 as it is written: shards that a plain reading of the specification accepts, resumed, in tasks, and damaged.

Of plain inner chunks, and of compressed ones (``pack``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

import actshard
from actshard.formats.zarr import write
from conftest import bits
from served import served

LAYERS, WIDTH = (2, 5), 6
SMALL = {"version": 3, "shard_bytes": 2000}
PACKS = (None, "lossless", "zstd", "blosc")


def examples(lengths: list[int], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((len(LAYERS), n, WIDTH)).astype(dtype) for n in lengths]


def written(path: Path, rows: list[np.ndarray], step: int = 7, **options: Any) -> Path:
    with actshard.create(path, "zarr", layers=LAYERS, d_model=WIDTH, **options) as writer:
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            numbers = list(range(first, first + len(part)))
            writer.append(part, columns={"label": numbers, "sample_key": [f"key {i}" for i in numbers]})
            writer.flush()
    return path


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def check_rows(path: Path, rows: list[np.ndarray]) -> None:
    store = actshard.open(path)
    assert store.token_counts.tolist() == [x.shape[1] for x in rows]
    for number, example in enumerate(rows):
        for k, layer in enumerate(LAYERS):
            assert np.array_equal(bits(store.sequence(number, layer)), bits(example[k])), (number, layer)
    assert store.table["label"].to_pylist() == list(range(len(rows)))
    assert store.table["sample_key"].to_pylist() == [f"key {i}" for i in range(len(rows))]
    report = actshard.verify(path, deep=True)
    assert report.ok
    assert not report.codes() - {"wide-dtype"}


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def decoded(chunk: bytes, codecs: list[dict[str, Any]], size: int) -> bytes:
    """An inner chunk by the texts of its codecs, except for blosc."""
    for codec in codecs[:0:-1]:
        if codec["name"] == "crc32c":
            chunk, checksum = chunk[:-4], chunk[-4:]
            assert struct.unpack("<I", checksum)[0] == crc32c(chunk)
        else:
            assert codec["name"] == "zstd"
            chunk = pa.Codec("zstd").decompress(chunk, size, asbytes=True)
    assert (codecs[0]["name"], len(chunk)) == ("bytes", size)
    return chunk


def read_shards(path: Path) -> tuple[np.ndarray, int]:
    """The array of activations by the text of Zarr 3 and its sharding codec, and its stored inner chunks. Checks every byte."""
    folder = path / "arrays/activations"
    meta = json.loads((folder / "zarr.json").read_text())
    (sharding,) = meta["codecs"]
    shape, shard = meta["shape"], meta["chunk_grid"]["configuration"]["chunk_shape"]
    inner = sharding["configuration"]["chunk_shape"]
    dtype = np.dtype(ml_dtypes.bfloat16 if meta["data_type"] == "bfloat16" else meta["data_type"])
    per_shard = [a // b for a, b in zip(shard, inner, strict=True)]
    padded = [-(-n // s) * s for n, s in zip(shape, shard, strict=True)]
    made, stored = np.zeros(padded, dtype), 0
    size, entries = int(np.prod(inner)) * dtype.itemsize, int(np.prod(per_shard))
    for file in folder.glob("c.*"):
        data = file.read_bytes()
        index, checksum = data[-16 * entries - 4 : -4], data[-4:]
        assert struct.unpack("<I", checksum)[0] == crc32c(index)
        pairs = np.frombuffer(index, "<u8").reshape(entries, 2)
        place = [int(i) * s for i, s in zip(file.name.split(".")[1:], shard, strict=True)]
        ends = 0
        for number, (offset, length) in enumerate(pairs.tolist()):
            if (offset, length) == (2**64 - 1, 2**64 - 1):
                continue
            assert offset == ends, "in order, without holes"
            ends, stored = ends + length, stored + 1
            chunk = decoded(data[offset:ends], sharding["configuration"]["codecs"], size)
            at = [p + int(i) * n for p, i, n in zip(place, np.unravel_index(number, per_shard), inner, strict=True)]
            values = np.frombuffer(chunk, dtype).reshape(inner)
            made[tuple(slice(a, a + n) for a, n in zip(at, inner, strict=True))] = values
        assert ends == len(data) - 16 * entries - 4, "no other bytes"
    return made[tuple(map(slice, shape))], stored


@pytest.mark.parametrize("pack", [None, "zstd"])
@pytest.mark.parametrize("options", [{}, {"shard_bytes": 2000}, {"shard_bytes": 1, "chunk_tokens": 3}, {"t_max": 40}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_shards_contain_what_was_appended_and_no_empty_chunk(
    tmp_path: Path, dtype: str, options: dict[str, Any], pack: Any
) -> None:
    lengths = np.random.default_rng(1).integers(0, 30, 25).tolist()
    rows = examples(lengths, dtype)
    path = written(tmp_path / "d", rows, version=3, pack=pack, **options)
    check_rows(path, rows)
    array, stored = read_shards(path)
    assert array.shape == (len(rows), len(LAYERS), options.get("t_max", max(lengths)), WIDTH)
    for number, example in enumerate(rows):
        assert np.array_equal(bits(array[number, :, : lengths[number]]), bits(example))
        assert not array[number, :, lengths[number] :].any()
    chunk = json.loads((path / "meta/config.json").read_text())["activation_chunks"][2]
    assert stored == len(LAYERS) * sum(-(-n // chunk) for n in lengths)


def test_chunks_of_default_options_have_little_padding(tmp_path: Path) -> None:
    for lengths, chunk in (([50] * 20, 50), ([64, 30, 51, 47] * 5, 16), ([1] * 20, 1), ([0, 0], 1)):
        path = written(tmp_path / f"{lengths[0]}", examples(lengths), version=3)
        assert json.loads((path / "meta/config.json").read_text())["activation_chunks"] == [1, 1, chunk, WIDTH]
        check_rows(path, examples(lengths))


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("lengths", [[3] * 20 + [200, 1, 90], [0] * 9 + [12, 40], [0, 0, 0]])
def test_later_examples_may_be_much_longer_than_the_first(tmp_path: Path, lengths: list[int], pack: Any) -> None:
    rows = examples(lengths)
    path = written(tmp_path / "d", rows, pack=pack, **SMALL)
    check_rows(path, rows)
    if pack in (None, "zstd"):
        assert np.array_equal(read_shards(path)[0][-1, :, : lengths[-1]], rows[-1])


@pytest.mark.parametrize("pack", PACKS[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_verb_reads_the_rows_of_packed_chunks(tmp_path: Path, dtype: str, pack: str) -> None:
    rows = examples(np.random.default_rng(4).integers(0, 150, 30).tolist(), dtype)
    plain = actshard.open(written(tmp_path / "plain", rows, version=3))
    packed = actshard.open(written(tmp_path / "packed", rows, version=3, pack=pack, shard_bytes=9000))
    check_rows(Path(packed.path), rows)
    numbers = np.flatnonzero(plain.token_counts)
    assert np.array_equal(bits(packed.last_tokens(5, numbers)), bits(plain.last_tokens(5, numbers)))
    assert np.array_equal(bits(packed.gather(2, numbers, 0)), bits(plain.gather(2, numbers, 0)))
    for shuffle in (None, "exact"):
        batches = [store.stream(5, 64, shuffle=shuffle) for store in (plain, packed)]
        for a, b in zip(*batches, strict=True):
            assert np.array_equal(bits(a.activations), bits(b.activations))
    repeated = [np.full((2, 300, WIDTH), 1.5, dtype)] * 3
    stored = [
        sum(file.stat().st_size for file in written(tmp_path / f"{p}", repeated, version=3, pack=p).rglob("c.*"))
        for p in (None, pack)
    ]
    assert stored[1] < stored[0] / 5


@pytest.mark.parametrize("pack", PACKS)
def test_chunks_of_a_conversion_follow_from_all_lengths_and_not_from_the_first_block(
    tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first block of short examples would give small chunks and many files, one of long ones large indexes."""
    monkeypatch.setattr("actshard.formats.target.Target.block_bytes", 1000)
    for name, lengths, most in (("rising", [1] * 40 + [300] * 4, 20), ("falling", [60] + [4] * 80, 13)):
        source = written(tmp_path / f"{name} source", examples(lengths))
        options: dict[str, Any] = {"version": 3, "shard_bytes": 30_000, "pack": pack}
        path = actshard.convert(source, tmp_path / name, "zarr", verify=True, **options).path
        shards = [file.stat().st_size for file in path.rglob("c.*") if "activations" in str(file)]
        assert len(shards) <= len(LAYERS) * most, name
        assert sum(shards) < 2 * sum(lengths) * WIDTH * 4 * 2.5, name
        plan = actshard.plan.convert(source, tmp_path / f"{name} in tasks", "zarr", tasks=3, **options)
        for task in range(len(plan)):
            plan.run(task)
        assert files(plan.commit().path / "arrays") == files(path / "arrays")


def test_chunks_are_no_longer_than_examples(tmp_path: Path) -> None:
    source = written(tmp_path / "source", examples([5, 9, 2]))
    for options, chunk in (({}, 9), ({"t_max": 30}, 9)):
        path = actshard.convert(
            source, tmp_path / f"{chunk}{options}", "zarr", version=3, chunk_tokens=4000, **options
        ).path
        assert json.loads((path / "meta/config.json").read_text())["activation_chunks"][2] == chunk
    path = written(tmp_path / "created", examples([5, 9, 2]), version=3, chunk_tokens=4000, t_max=30)
    assert json.loads((path / "meta/config.json").read_text())["activation_chunks"][2] == 30


def test_metadata_are_consolidated_and_named_as_the_standard_names_them(tmp_path: Path) -> None:
    path = written(tmp_path / "d", examples([4, 2], "bfloat16"), version=3)
    root = json.loads((path / "zarr.json").read_text())
    listed = root["consolidated_metadata"]["metadata"]
    assert {node: json.loads((path / node / "zarr.json").read_text()) for node in listed} == listed
    assert listed["arrays/activations"]["data_type"] == "bfloat16"
    (sharding,) = listed["arrays/activations"]["codecs"]
    inner = sharding["configuration"]
    assert [codec["name"] for codec in inner["codecs"]] == ["bytes"]
    assert [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"]
    assert (sharding["name"], inner["index_location"]) == ("sharding_indexed", "end")
    shutil.rmtree(path / "meta")
    assert actshard.open(path).metadata["num_layers"] == 2


@pytest.mark.parametrize("pack", PACKS)
def test_uncommitted_and_half_finished_work_is_cut_when_a_writer_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any
) -> None:
    """The bytes after a resume are those of an uninterrupted writer: after a stop in an append, and in the last step."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    rows = examples(np.random.default_rng(2).integers(0, 20, 40).tolist())
    options = {**SMALL, "pack": pack}
    expected = files(written(tmp_path / "whole", rows, **options))

    def fail(*_: Any) -> None:
        raise OSError("stopped")

    path = tmp_path / "d"
    writer = actshard.create(path, "zarr", layers=LAYERS, d_model=WIDTH, **options)
    writer.append(rows[:7], columns={"label": list(range(7)), "sample_key": [f"key {i}" for i in range(7)]})
    assert writer.flush() == 7
    writer.abort()
    shard = path / "arrays/activations/c.0.0.0.0"
    shard.write_bytes(shard.read_bytes() + b"uncommitted")
    (shard.parent / "c.9.0.0.0").write_bytes(b"uncommitted")
    with monkeypatch.context() as patch:
        patch.setattr(write, "write_store", fail)
        with pytest.raises(actshard.FileAccessError, match="stopped"):
            _continue(path, rows, options)
    with pytest.raises(actshard.UnfinishedError):
        actshard.open(path)
    _continue(path, rows, options)
    assert files(path) == expected
    check_rows(path, rows)


def _continue(path: Path, rows: list[np.ndarray], options: dict[str, Any]) -> None:
    with actshard.create(path, "zarr", layers=LAYERS, d_model=WIDTH, resume=True, **options) as writer:
        while not writer.complete and len(writer) < len(rows):
            numbers = list(range(len(writer), min(len(writer) + 7, len(rows))))
            columns = {"label": numbers, "sample_key": [f"key {i}" for i in numbers]}
            writer.append([rows[i] for i in numbers], columns=columns)
            writer.flush()


@pytest.mark.parametrize("sizes", ["AAAA", "!", 3, None, ""])
def test_a_journal_with_other_sizes_of_chunks_is_an_error(tmp_path: Path, sizes: Any) -> None:
    path = tmp_path / "d"
    options: dict[str, Any] = {**SMALL, "pack": "zstd"}
    writer = actshard.create(path, "zarr", layers=LAYERS, d_model=WIDTH, **options)
    writer.append(examples([9] * 7))
    writer.flush()
    writer.abort()
    (journal,) = path.glob(".actshard/*journal*")
    lines = journal.read_text().splitlines()
    commit = json.loads(lines[1])
    commit["state"]["sizes"] = sizes
    journal.write_text("\n".join([lines[0], json.dumps(commit), ""]))
    with pytest.raises(actshard.FormatError, match="state of zarr"):
        actshard.create(path, "zarr", layers=LAYERS, d_model=WIDTH, resume=True, **options)


@pytest.mark.parametrize(
    ("tasks", "pack"), [(1, None), (3, None), (100, None), (3, "zstd"), (4, "lossless"), (100, "blosc")]
)
def test_tasks_of_a_conversion_write_the_bytes_of_one_process(
    tmp_path: Path, tasks: int, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**SMALL, "pack": pack}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    source = written(tmp_path / "source", examples(np.random.default_rng(2).integers(0, 20, 60).tolist()))
    actshard.convert(source, tmp_path / "one", "zarr", verify=True, **options)
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=tasks, **options)
    for task in reversed(range(len(plan))):
        plan.run(task)
    plan.commit()
    assert files(tmp_path / "d") == files(tmp_path / "one")
    assert plan.predicted.exact
    assert plan.predicted.files == len(files(tmp_path / "one"))


def test_parts_are_merged_to_a_run_and_not_to_one_store(tmp_path: Path) -> None:
    rows = examples([3, 9, 4, 1, 12])
    parts = [written(tmp_path / "a", rows[:2], **SMALL), written(tmp_path / "b", rows[2:], **SMALL)]
    with pytest.raises(actshard.ArgumentError, match="plain version 2 chunks"):
        actshard.merge(tmp_path / "m", parts, physical=True)
    store = actshard.open(actshard.merge(tmp_path / "m", parts))
    assert all(np.array_equal(store.sequence(i, 5), rows[i][1]) for i in range(5))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"version": 4}, "version: expected 2 or 3, the version of Zarr, found 4"),
        ({"version": "3"}, "version: expected 2 or 3, the version of Zarr, found '3'"),
        ({"version": True}, "version: expected 2 or 3, the version of Zarr, found True"),
        ({"pack": "zstd"}, "pack: requires shards; pass version=3"),
        ({"pack": "lz4", "version": 3}, "pack: expected 'lossless' or .*, found 'lz4'"),
        ({"pack": True, "version": 3}, "pack: expected .*, found True"),
        ({"t_max": 1 << 40}, "t_max: expected at most 16,777,216 tokens, found 1,099,511,627,776"),
        ({"shard_bytes": 1000}, "shard_bytes: not supported by Zarr stores of version 2; use .* version=3"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(actshard.ArgumentError, match=match):
        actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4, **options)


def test_bfloat16_of_version_2_names_version_3(tmp_path: Path) -> None:
    with pytest.raises(actshard.DtypeError, match="version 2 has no such type, version=3 has"):
        actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4, dtype="bfloat16")


def test_keys_of_other_bytes_are_refused_because_version_3_has_no_type_for_them(tmp_path: Path) -> None:
    with (
        pytest.raises(actshard.ArgumentError, match="UTF-8"),
        actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4, version=3) as writer,
    ):
        writer.append(np.ones((1, 1, 2, 4), np.float32), columns={"sample_key": [b"\xff"]})


def damage_index(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)


def place_second_chunk(file: Path, offset: int, size: int) -> None:
    """Changes the index entry of the second inner chunk; the checksum stays valid."""
    data = bytearray(file.read_bytes())
    meta = json.loads((file.parent / "zarr.json").read_text())
    shard, inner = meta["chunk_grid"]["configuration"]["chunk_shape"], meta["codecs"][0]["configuration"]["chunk_shape"]
    begin = len(data) - 16 * int(np.prod(shard) // np.prod(inner)) - 4
    data[begin + 16 : begin + 32] = struct.pack("<QQ", offset, size)
    data[-4:] = struct.pack("<I", crc32c(bytes(data[begin:-4])))
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (damage_index, "checksum of the shard's index"),
        (lambda file: file.write_bytes(file.read_bytes()[:-3]), "checksum of the shard's index"),
        (lambda file: file.write_bytes(b""), "expected at least the .* bytes of a shard's index, found 0"),
        (lambda file: file.unlink(), "its writer stores every chunk"),
        (lambda file: place_second_chunk(file, 2**64 - 1, 2**64 - 1), "its writer stores every chunk"),
        (lambda file: place_second_chunk(file, 10**6, 216), "the shard index refers to 216 bytes at 1000000"),
    ],
)
def test_damaged_shards_are_errors_that_name_the_file(tmp_path: Path, damage: Any, match: str) -> None:
    path = written(tmp_path / "d", examples([9] * 12), **SMALL)
    file = path / "arrays/activations/c.0.1.0.0"
    damage(file)
    with pytest.raises(actshard.ActshardError, match=match) as caught:
        actshard.open(path).sequences([0, 1], 5)
    assert caught.value.path == file
    for deep in (False, True):
        findings = actshard.verify(path, deep=deep).errors
        assert findings
        assert {finding.path for finding in findings} == {file}


@pytest.mark.parametrize("pack", PACKS[1:])
def test_a_flipped_bit_of_a_packed_chunk_is_an_error_that_names_the_file(tmp_path: Path, pack: str) -> None:
    path = written(tmp_path / "d", examples([9] * 12), pack=pack, **SMALL)
    file = path / "arrays/activations/c.0.1.0.0"
    data = file.read_bytes()
    for offset in range(0, 400, 23):
        file.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
        with pytest.raises(actshard.FormatError, match="cannot decode this chunk") as caught:
            actshard.open(path).sequences(range(12), 5)
        assert caught.value.path == file
        findings = actshard.verify(path, deep=True).errors
        assert {finding.path for finding in findings} == {file}


def test_version_2_warns_once_of_many_files_and_version_3_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MANY_FILES", 20)
    for options, count in (({}, 1), ({"num_examples": 22}, 1), ({"version": 3}, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            written(tmp_path / f"{options}", examples([1] * 22), **options)
        assert [w.message.code for w in caught] == ["many-files"] * count  # type: ignore[union-attr]


@pytest.mark.parametrize(("dtype", "pack"), [("float16", None), ("bfloat16", "lossless"), ("float32", "blosc")])
def test_copies_of_layers_of_shards_are_shards_of_the_same_codecs(tmp_path: Path, dtype: str, pack: Any) -> None:
    rows = [np.full((2, n, 4), n, np.float32) for n in (1, 5, 2)]
    with actshard.create(tmp_path / "a", "zarr", layers=[0, 3], d_model=4, dtype=dtype, version=3, pack=pack) as writer:
        writer.append(rows)
    codecs = json.loads((tmp_path / "a/arrays/activations/zarr.json").read_text())["codecs"][0]["configuration"][
        "codecs"
    ]
    staged = actshard.stage(tmp_path / "a", tmp_path / "staged", layers=[3]).path
    plan = actshard.plan.stage(tmp_path / "a", tmp_path / "planned", layers=[3], tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    for path in (staged, plan.commit().path):
        (meta,) = Path(path).rglob("activations/zarr.json")
        assert json.loads(meta.read_text())["codecs"][0]["configuration"]["codecs"] == codecs
        store = actshard.open(path)
        assert [store.sequence(i, 3).astype(int).tolist() for i in range(3)] == [x[1].tolist() for x in rows]


def test_opening_remote_shards_names_what_single_rows_cost(tmp_path: Path) -> None:
    rows = examples([9] * 3)
    for pack in PACKS:
        written(tmp_path / f"bucket/{pack}", rows, version=3, pack=pack)
    with served(tmp_path) as server, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for pack in PACKS:
            store = actshard.open(f"s3://bucket/{pack}", storage_options=server.options)
            assert np.array_equal(store.sequence(1, 5), rows[1][1])
    assert [str(w.message).partition("/None: ")[2] for w in caught] == [
        f"inner chunks of remote shards are read whole (up to {9 * WIDTH * 4} bytes each): single rows transfer more bytes than "
        "they have; streams and whole examples do not"
    ]


def drop_from_page_cache(folder: Path) -> None:
    """A hint, which file systems in memory ignore."""
    for path in folder.rglob("c.*"):
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fadvise")
@pytest.mark.parametrize("pack", PACKS)
def test_streams_of_cold_files_and_of_a_server_are_those_of_warm_files(tmp_path: Path, pack: Any) -> None:
    """Cold rows are read ahead by several threads; windows are many, and chunks cross the pieces that a thread reads."""
    rng = np.random.default_rng(5)
    rows = [rng.standard_normal((2, n, 128)).astype(np.float32) for n in rng.integers(1, 90, 60)]
    path = tmp_path / "bucket" / "acts"
    with actshard.create(path, "zarr", version=3, pack=pack, layers=LAYERS, d_model=128, chunk_tokens=16) as writer:
        writer.append(rows)

    def batches(store: actshard.Store, **how: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        stream = store.stream(LAYERS, 100, seed=1, memory="700KiB", **how)
        return [(batch.examples, batch.tokens, np.array(batch.activations)) for batch in stream]

    with served(tmp_path) as server:
        for how in ({"shuffle": "window"}, {"shuffle": None}, {"shuffle": "window", "rank": 1, "world_size": 3}):
            warm = batches(actshard.open(path), **how)
            for examples, tokens, activations in warm:
                expected = [rows[example][:, token] for example, token in zip(examples, tokens, strict=True)]
                assert np.array_equal(bits(activations), bits(np.array(expected)))
            drop_from_page_cache(path)
            with warnings.catch_warnings(action="ignore"):  # plain chunks are read whole
                far = actshard.open("s3://bucket/acts", storage_options=server.options)
            for other in (batches(actshard.open(path), **how), batches(far, **how)):
                for batch, same in zip(other, warm, strict=True):
                    assert all(np.array_equal(*pair) for pair in zip(batch, same, strict=True))
    if pack is None:  # without checksums
        return
    shard = next(path.rglob("c.0.0.0.0"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    shard.write_bytes(damaged)
    drop_from_page_cache(path)
    with pytest.raises(actshard.FormatError, match=r"c\.0\.0\.0\.0"):
        batches(actshard.open(path))


def opened_shards() -> set[str]:
    """Names of the shards that this process has open."""
    names = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(descriptor.readlink().name)
    return {name for name in names if name.startswith("c.")}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("pack", [None, "lossless"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_shards_stay_open_and_are_mapped(tmp_path: Path, pack: Any, io: Any) -> None:
    rows = examples([20, 7, 33])
    path = written(tmp_path / "d", rows, version=3, pack=pack, chunk_tokens=16)
    before = opened_shards()
    store = actshard.open(path, io=io, decoded_memory=0)
    for example, tokens in ((0, [3, 19]), (2, [30, 1])):
        assert np.array_equal(bits(store.gather(LAYERS[0], example, tokens)), bits(rows[example][0][tokens]))
    # One shard per layer.
    assert len(opened_shards() - before) == 1
    shards = str(path / "arrays/activations/c.")
    is_mapped = any(shards in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert is_mapped == (io == "mmap")


@pytest.mark.parametrize("pack", [None, "lossless"])
def test_a_shard_written_again_while_a_store_is_open_is_never_read_with_its_old_index(
    tmp_path: Path, pack: Any
) -> None:
    rows, others = examples([20, 7, 33]), examples([20, 7, 33])[::-1]
    path = written(tmp_path / "d", rows, version=3, pack=pack, chunk_tokens=16)
    other = written(tmp_path / "e", others, version=3, pack=pack, chunk_tokens=16)
    store = actshard.open(path, decoded_memory=0)
    assert np.array_equal(bits(store.gather(LAYERS[0], 0, [3, 19])), bits(rows[0][0][[3, 19]]))
    for file in (other / "arrays/activations").glob("c.*"):
        shutil.copy(file, path / "arrays/activations" / (file.name + ".new"))
        (path / "arrays/activations" / (file.name + ".new")).rename(path / "arrays/activations" / file.name)
    try:
        again = store.gather(LAYERS[0], 0, [3, 19])
    except actshard.FormatError as error:
        assert "replaced" in str(error)  # noqa: PT017 -- either is right
    else:
        for row, token in zip(
            again, (3, 19), strict=True
        ):  # a decoded chunk that is in memory is not compared with its file
            assert any(np.array_equal(bits(row), bits(version[0][0][token])) for version in (rows, others))


def test_info_tells_the_ratio_of_stored_bytes_to_rows(tmp_path: Path) -> None:
    rows = [np.full((2, 300, WIDTH), 1.5, np.float32)] * 3
    ratios = [actshard.open(written(tmp_path / f"{p}", rows, version=3, pack=p)).info()["ratio"] for p in PACKS]
    assert ratios[0] == pytest.approx(1, abs=0.01)
    assert all(0 < ratio < 0.2 for ratio in ratios[1:])


def test_a_column_with_the_name_of_a_file_of_metadata_is_kept(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "a", "zarr", layers=[0], d_model=4, version=3) as writer:
        writer.append(np.ones((2, 1, 3, 4), np.float32), columns={"zarr.json": [1, 2]})
    assert actshard.open(tmp_path / "a").table["zarr.json"].to_pylist() == [1, 2]


@pytest.mark.parametrize("version", [2, 3])
def test_files_beside_chunks_are_kept_when_a_writer_resumes(tmp_path: Path, version: int) -> None:
    root = tmp_path / "a"
    writer = actshard.create(root, "zarr", layers=LAYERS, d_model=WIDTH, version=version)
    writer.append(examples([3, 2]))
    writer.abort()
    folder = root / "arrays" / "activations"
    notes = [folder / name for name in ("9.notes.txt", "09.0.0.0", "c.00.0.0.0", "c.7.notes.0.0")]
    for note in notes:
        note.write_text("kept")
    with actshard.create(root, "zarr", layers=LAYERS, d_model=WIDTH, version=version, resume=True) as writer:
        writer.append(examples([4]))
    assert [note.read_text() for note in notes] == ["kept"] * len(notes)
    assert actshard.open(root).token_counts.tolist() == [3, 2, 4]
