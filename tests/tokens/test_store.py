"""Guarantee: rows read back as written, from any storage; damaged files cause errors, never wrong numbers."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import shutil
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.conftest import GOLDEN, crc32c

import actshard
from actshard import tokens

INDEX = 512 * 16 + 4
FRAME = 262_144


def write(
    path: Path, rows: list[np.ndarray], storage: str = "plain", dtype: Any = np.int64, **more: Any
) -> tokens.TokenCache:
    with tokens.CacheWriter(path, {"input_ids": dtype}, storage=storage, **more) as writer:
        writer.append([{"input_ids": row} for row in rows])
    return tokens.open_cache(path)


def long_rows(total: int, seed: int = 0, high: int = 70_000) -> list[np.ndarray]:
    """Rows that cross inner chunk boundaries."""
    rng = np.random.default_rng(seed)
    flat = rng.integers(0, high, total)
    return np.split(flat, np.sort(rng.integers(0, total, 40)))


@settings(max_examples=40)
@given(
    rows=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=30), max_size=60),
    dtype=st.sampled_from(["int64", "int32", "uint32", "uint16"]),
    storage=st.sampled_from(["plain", "lz4"]),
    batch=st.integers(1, 20),
    length=st.integers(1, 40),
    io=st.sampled_from(["mmap", "pread"]),
)
def test_any_rows_come_back(rows, dtype, storage, batch, length, io, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("any") / "c"
    with tokens.CacheWriter(path, {"input_ids": dtype, "w": np.float32}, storage=storage) as writer:
        for first in range(0, len(rows), batch):
            writer.append([{"input_ids": r, "w": np.array(r, np.float32) / 3} for r in rows[first : first + batch]])
    cache = tokens.open_cache(path, io=io)
    assert [r["input_ids"].tolist() for r in cache] == rows
    assert [r["input_ids"].tolist() for r in cache.rows(range(len(rows)))] == rows
    flat = np.array([x for r in rows for x in r], np.int64)
    windows = tokens.TokenSeqDataset(cache, length, "w")
    made = windows.get_batch(range(len(windows)))
    assert np.array_equal(made.reshape(-1), flat[: len(windows) * length])
    examples = tokens.CausalLmDataset(windows, eos_id=7).get_batch(range(len(windows)))
    weights = (flat.astype(np.float32) / 3)[: len(windows) * length].reshape(-1, length).copy()
    if len(windows):
        weights[:, -1] = 0
        ends = np.cumsum(made == 7, axis=1) - (made == 7)
        assert np.array_equal(examples.segment_ids, ends)
        assert np.array_equal(examples.loss_weight, weights)
    assert actshard.verify(path, deep=True).ok


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 25), max_size=50),
    most=st.integers(1, 20),
    segments=st.integers(1, 5),
    how=st.sampled_from(["left", "right", "drop"]),
    masking=st.booleans(),
)
def test_packs_are_what_the_rule_says(lengths, most, segments, how, masking, tmp_path_factory) -> None:
    """The rule of levanter.md 3, implemented naively."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 50, n) for n in lengths]
    masks = [rng.integers(0, 2, n) for n in lengths]
    path = tmp_path_factory.mktemp("packs") / "c"
    with tokens.CacheWriter(path, {"input_ids": np.int32, "assistant_masks": np.int32}) as writer:
        writer.append([{"input_ids": r, "assistant_masks": m} for r, m in zip(rows, masks, strict=True)])
    chat = tokens.ChatDataset(tokens.open_cache(path), most, pack=segments, slice_strategy=how, mask_user_turns=masking)
    ranges, i = [], 0
    while i < len(rows):
        if how == "drop" and lengths[i] > most:
            i += 1
            continue
        start, total = i, 0
        while i < len(rows) and i - start < segments and not (how == "drop" and lengths[i] > most):
            if total + lengths[i] > most and i > start:
                break
            total += lengths[i]
            i += 1
            if total > most:
                break
        ranges.append((start, i))
    assert chat.pack_ranges.tolist() == [list(r) for r in ranges]
    batch = chat.get_batch(range(len(chat)))
    for e, (first, last) in enumerate(ranges):
        ids = np.concatenate([rows[r] for r in range(first, last)])
        mask = np.concatenate([masks[r] for r in range(first, last)])
        owner = np.concatenate([np.full(lengths[r], r) for r in range(first, last)])
        part = slice(-most, None) if how == "right" else slice(0, most)
        ids, mask, owner = ids[part], mask[part], owner[part]
        n, pad = len(ids), most - len(ids)
        assert batch.tokens[e].tolist() == [*ids.tolist(), *[0] * pad]
        assert batch.segment_ids is not None
        assert batch.segment_ids[e].tolist() == [*owner.tolist(), *[-1] * pad]
        rolled = np.roll(np.concatenate([mask, np.zeros(pad, int)]), -1) if masking else np.ones(most)
        rolled[-1] = 0
        rolled[max(n - 1, 0) :] = 0
        assert batch.loss_weight[e].tolist() == rolled.tolist()
        runs = [lengths[r] for r in range(first, last) if lengths[r]]
        runs = [min(runs[0], most)] if runs and runs[0] > most else runs
        runs += [pad] if pad else []
        assert batch.thd_num_segments[e] == len(runs)
        assert batch.thd_segment_lengths[e].tolist() == runs + [0] * (segments + 1 - len(runs))


@pytest.mark.parametrize("storage", ["plain", "lz4"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_rows_across_inner_chunks(storage: str, io: str, dtype: str, tmp_path: Path) -> None:
    rows = long_rows(3 * FRAME + 777, high=60_000)
    write(tmp_path / "c", rows, storage, dtype)
    for memory in (0, "64MiB"):
        cache = tokens.open_cache(tmp_path / "c", io=io, memory=memory)
        flat = np.concatenate(rows)
        assert np.array_equal(cache.view("input_ids").elements(), flat)
        windows = tokens.TokenSeqDataset(cache, 1000)
        for seed in range(3):
            numbers = np.random.default_rng(seed).integers(0, len(windows), 300)
            assert np.array_equal(windows.get_batch(numbers), flat[: len(windows) * 1000].reshape(-1, 1000)[numbers])
        numbers = np.random.default_rng(0).permutation(len(rows))
        assert all(np.array_equal(r["input_ids"], rows[i]) for r, i in zip(cache.rows(numbers), numbers, strict=True))


def test_stored_rows_are_views_that_outlive_the_cache(tmp_path: Path) -> None:
    rows = [*long_rows(FRAME + 5000), np.arange(50)]
    cache = write(tmp_path / "c", rows)
    inside = next(i for i, r in enumerate(rows) if len(r) > 10)
    view = cache[inside]["input_ids"]
    assert view.base is not None
    assert not view.flags.writeable
    assert np.shares_memory(view, cache.view("input_ids")[inside])
    tail = cache[len(rows) - 1]["input_ids"]
    assert not tail.flags.writeable, "the frame that is not full is mapped too"
    ends = np.cumsum([len(r) for r in rows])
    crossing = int(np.searchsorted(ends, FRAME))
    assert cache[crossing]["input_ids"].flags.writeable, "a row that crosses a border is a copy"
    packed = write(tmp_path / "lz4", rows, "lz4")
    assert packed[inside]["input_ids"].flags.writeable
    del cache
    gc.collect()
    shutil.rmtree(tmp_path / "c")
    assert np.array_equal(view, rows[inside])
    assert np.array_equal(tail, rows[-1])
    assert tokens.open_cache(tmp_path / "lz4", io="pread")[inside]["input_ids"].base is None


def test_small_caches_are_small_files(tmp_path: Path) -> None:
    """Levanter's inner chunks have 2 MB; trailing zeros of a partial one are not stored."""
    write(tmp_path / "c", [np.arange(100)])
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 100_000
    assert len(write(tmp_path / "empty", [])) == 0
    assert not list((tmp_path / "empty").rglob("c"))


@pytest.mark.parametrize(
    "n", [1, 4095, 4096, 4097, FRAME // 2 - 1, FRAME // 2, FRAME // 2 + 1, FRAME - 1, FRAME, FRAME + 1]
)
def test_other_readers_read_short_frames(n: int, tmp_path: Path) -> None:
    """zarrs and c-blosc decode our files, including whole chunks."""
    flat = np.random.default_rng(n).integers(0, 1 << 40, n)
    write(tmp_path / "c", [flat])
    array = tmp_path / "c" / "input_ids" / "data"
    # Sets the shape to the actual length, so that a Zarr reader decodes the array at once.
    meta = json.loads((array / "zarr.json").read_text())
    meta["shape"] = [n]
    from actshard import _native

    there = [[i] for i in range(-(-n // meta["chunk_grid"]["configuration"]["chunk_shape"][0]))]
    found = _native.read_zarr(array, json.dumps(meta).encode(), there, 1 << 40)
    assert np.array_equal(np.frombuffer(found, np.int64), flat)


def change_meta(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


@pytest.mark.peers
@pytest.mark.parametrize("codec", ["blosclz", "lz4hc", "zlib", "zstd"])
@pytest.mark.parametrize("shuffle", ["noshuffle", "shuffle", "bitshuffle"])
@pytest.mark.parametrize("blocksize", [0, 4096])
def test_frames_of_other_settings(codec: str, shuffle: str, blocksize: int, tmp_path: Path) -> None:
    """Files of other writers that Levanter's reader accepts (levanter.md 1.6) are read here too."""
    from numcodecs import blosc

    flat = np.random.default_rng(0).integers(0, 70_000, FRAME)
    write(tmp_path / "c", [flat[:1000], flat[1000:]], "lz4")
    how = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}[shuffle]
    frame = bytes(blosc.compress(flat.astype(np.int64), codec.encode(), 5, how, blocksize))
    (tmp_path / "c/input_ids/data/c/0").write_bytes(frame + _checked(_indexed(0, len(frame))))
    cache = tokens.open_cache(tmp_path / "c")
    assert np.array_equal(cache.view("input_ids").elements(), flat)
    assert np.array_equal(cache[0]["input_ids"], flat[:1000])


def sharding(meta: dict[str, Any]) -> dict[str, Any]:
    return meta["codecs"][0]["configuration"]


def _indexed(offset: int, n: int = 16 + FRAME * 8) -> bytes:
    """An index with one inner chunk."""
    return struct.pack("<QQ", offset, n) + b"\xff" * (511 * 16)


def _checked(index: bytes) -> bytes:
    return index + struct.pack("<I", crc32c(index))


VARIANTS: dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[bytes], bytes]]] = {
    "index without checksum": (
        lambda m: sharding(m).update(index_codecs=sharding(m)["index_codecs"][:1]),
        lambda frame: frame + _indexed(0),
    ),
    "index at the start": (
        lambda m: sharding(m).update(index_location="start"),
        lambda frame: _checked(_indexed(INDEX)) + frame,
    ),
    "plain numbers": (
        lambda m: sharding(m).update(codecs=sharding(m)["codecs"][:1]),
        lambda frame: frame[16:] + _checked(_indexed(0, FRAME * 8)),
    ),
    "big endian": (
        lambda m: sharding(m).update(codecs=[{"name": "bytes", "configuration": {"endian": "big"}}]),
        lambda frame: np.frombuffer(frame[16:], "<i8").astype(">i8").tobytes() + _checked(_indexed(0, FRAME * 8)),
    ),
    "no gaps": (lambda m: None, lambda frame: frame + _checked(_indexed(0))),
    "odd gaps": (lambda m: None, lambda frame: b"\0" * 1003 + frame + _checked(_indexed(1003))),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_arrays_of_other_layouts(name: str, io: str, tmp_path: Path) -> None:
    flat = np.random.default_rng(0).integers(0, 70_000, FRAME)
    write(tmp_path / "c", [flat])
    path = tmp_path / "c/input_ids/data/c/0"
    frame = path.read_bytes()[4080 : 4096 + FRAME * 8]
    change, lay = VARIANTS[name]
    change_meta(tmp_path / "c/input_ids/data/zarr.json", change)
    path.write_bytes(lay(frame))
    cache = tokens.open_cache(tmp_path / "c", io=io)
    assert np.array_equal(cache.view("input_ids").elements(), flat)
    assert np.array_equal(tokens.TokenSeqDataset(cache, 100).get_batch([7])[0], flat[700:800])


def flip(path: Path, at: int, by: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= by
    path.write_bytes(data)


DATA, OFFSETS = "input_ids/data/c/0", "input_ids/offsets/c/0"
DAMAGE: dict[str, tuple[Callable[[Path], object], type[actshard.ActshardError], str]] = {
    "no ledger": (lambda c: (c / "shard_ledger.json").unlink(), actshard.MissingFileError, "shard_ledger.json"),
    "a ledger that is no JSON": (lambda c: (c / "shard_ledger.json").write_text("{"), actshard.FormatError, "JSON"),
    "unfinished": (
        lambda c: change_meta(c / "shard_ledger.json", lambda m: m.pop("is_finished")),
        actshard.UnfinishedError,
        "is_finished",
    ),
    "no total": (
        lambda c: change_meta(c / "shard_ledger.json", lambda m: m.pop("total_num_rows")),
        actshard.FormatError,
        "total_num_rows",
    ),
    "a negative count": (
        lambda c: change_meta(c / "shard_ledger.json", lambda m: m.update(field_counts={"input_ids": -1})),
        actshard.FormatError,
        "field_counts",
    ),
    "an unknown layout": (
        lambda c: change_meta(c / "shard_ledger.json", lambda m: m.update(layout="x")),
        actshard.FormatError,
        "layout",
    ),
    "a field that is not there": (
        lambda c: shutil.rmtree(c / "input_ids"),
        actshard.MissingFileError,
        "expected a file",
    ),
    "no offsets": (lambda c: (c / OFFSETS).unlink(), actshard.MissingFileError, "missing"),
    "no data": (lambda c: (c / DATA).unlink(), actshard.MissingFileError, "missing"),
    "cut data": (lambda c: os.truncate(c / DATA, 5000), actshard.TruncatedFileError, "index"),
    "data without its end": (
        lambda c: os.truncate(c / DATA, (c / DATA).stat().st_size - 8),
        actshard.FormatError,
        "checksum",
    ),
    "an index that was changed": (lambda c: flip(c / DATA, -100), actshard.FormatError, "checksum"),
    "a frame of another size": (lambda c: flip(c / DATA, 4), actshard.FormatError, "blosc frame of"),
    "a frame of another length": (lambda c: flip(c / DATA, 13), actshard.FormatError, "bytes long"),
    "a frame of no version": (lambda c: flip(c / DATA, 0), actshard.FormatError, "version"),
    "a zarr.json that is no array": (
        lambda c: change_meta(c / "input_ids/data/zarr.json", lambda m: m.update(node_type="group")),
        actshard.FormatError,
        "node_type",
    ),
    "another version of Zarr": (
        lambda c: change_meta(c / "input_ids/data/zarr.json", lambda m: m.update(zarr_format=2)),
        actshard.FormatError,
        "zarr_format",
    ),
    "numbers of no type": (
        lambda c: change_meta(c / "input_ids/data/zarr.json", lambda m: m.update(data_type="string")),
        actshard.FormatError,
        "data_type",
    ),
    "chunks of nothing": (
        lambda c: change_meta(c / "input_ids/data/zarr.json", lambda m: sharding(m).update(chunk_shape=[0])),
        actshard.FormatError,
        "chunk_shape",
    ),
    "chunks that do not divide": (
        lambda c: change_meta(c / "input_ids/data/zarr.json", lambda m: sharding(m).update(chunk_shape=[1000])),
        actshard.FormatError,
        "chunk_shape",
    ),
    "huge chunks": (
        lambda c: change_meta(
            c / "input_ids/data/zarr.json",
            lambda m: (
                m["chunk_grid"]["configuration"].update(chunk_shape=[1 << 50]),
                sharding(m).update(chunk_shape=[1 << 50]),
            ),
        ),
        actshard.FormatError,
        "chunks of 1 to",
    ),
    "a folder in place of a file": (
        lambda c: ((c / DATA).unlink(), (c / DATA).mkdir()),
        actshard.NotAFileError,
        "folder",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_damage_is_an_error_and_verify_finds_it(name: str, io: str, tmp_path: Path) -> None:
    break_it, kind, said = DAMAGE[name]
    write(tmp_path / "c", long_rows(3000), "lz4")
    break_it(tmp_path / "c")
    with pytest.raises(kind, match=said):
        list(tokens.open_cache(tmp_path / "c", io=io))
    if name != "no ledger":
        report = actshard.verify(tmp_path / "c")
        assert report.status == 2
        assert any(said.split()[0] in str(f) or said in str(f) for f in report.errors), report.findings


def _with_offsets(path: Path, change: Callable[[np.ndarray], None]) -> None:
    """Changes offsets in place, in a frame stored without compression."""
    data = bytearray(path.read_bytes())
    start = struct.unpack_from("<I", data, 16)[0] + 4
    view = np.frombuffer(data, np.int64, 8, start)
    change(view)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.__setitem__(2, 10**9), "row ends in ascending order"),
        (lambda o: o.__setitem__(2, 0), "row ends in ascending order"),
        (lambda o: o.__setitem__(2, -5), "row ends in ascending order"),
        (lambda o: o.__setitem__(0, -5), "expected a count"),
        (lambda o: o.__setitem__(0, 1 << 62), "expected a count"),
    ],
)
def test_offsets_that_make_no_sense(change, said: str, tmp_path: Path) -> None:
    write(tmp_path / "c", [np.arange(10), np.arange(5), np.arange(7)])
    _with_offsets(tmp_path / "c" / OFFSETS, change)
    with pytest.raises(actshard.FormatError, match=said):
        tokens.open_cache(tmp_path / "c").rows([0, 1, 2])
    assert actshard.verify(tmp_path / "c").status == 2


def test_more_rows_than_there_are(tmp_path: Path) -> None:
    write(tmp_path / "c", [np.arange(10), np.arange(5)])
    _with_offsets(tmp_path / "c" / OFFSETS, lambda o: o.__setitem__(0, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = tokens.open_cache(tmp_path / "c")
    assert any("counts 2 rows, but offsets[0] is 4" in w for w in cache.warnings)
    with pytest.raises(actshard.FormatError, match="ascending"):
        cache.rows(range(4))


@pytest.mark.slow
def test_lz4_data_that_was_changed_is_told_or_read_as_it_is(tmp_path: Path) -> None:
    """Frames have no checksum: invalid LZ4 data raise an error; nothing crashes."""
    write(tmp_path / "c", long_rows(200_000), "lz4")
    path = tmp_path / "c" / DATA
    whole = path.read_bytes()
    refused = 0
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(16, len(whole) - INDEX, 3):
            data[at] = int(rng.integers(0, 256))
        path.write_bytes(data)
        try:
            tokens.open_cache(tmp_path / "c").view("input_ids").elements()
        except actshard.FormatError as error:
            refused += error.path is not None
    assert refused > 20


def test_a_shard_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    rows = long_rows(2 * FRAME)
    for io in ("mmap", "pread"):
        cache = write(tmp_path / io, rows)
        cache = tokens.open_cache(tmp_path / io, io=io)
        windows = tokens.TokenSeqDataset(cache, 500)
        windows.get_batch([0, len(windows) - 1])
        os.truncate(tmp_path / io / DATA, 4096)
        with pytest.raises(actshard.TruncatedFileError):
            windows.get_batch([len(windows) - 1])


def without_own_key(cache: Path) -> None:
    """Makes the ledger that of another writer."""
    path = cache / "shard_ledger.json"
    ledger = json.loads(path.read_text())
    ledger.pop("actshard", None)
    path.write_text(json.dumps(ledger))


def test_missing_chunks_of_another_writer_read_as_zeros_with_a_warning(tmp_path: Path) -> None:
    """tensorstore omits chunks of zeros, so all masks of a long stretch may be missing."""
    write(tmp_path / "c", [np.zeros(5000, np.int64)])
    (tmp_path / "c" / DATA).unlink()
    without_own_key(tmp_path / "c")
    with pytest.warns(actshard.ActshardWarning, match="is missing; the rows read as zeros"):
        cache = tokens.open_cache(tmp_path / "c")
    assert not cache[0]["input_ids"].any()
    assert len(cache[0]["input_ids"]) == 5000
    assert actshard.verify(tmp_path / "c").codes() == {"chunk-missing"}


class TestSharded:
    """Guarantee: the ledger of a sharded cache is checked against its shards."""

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        shutil.copytree(GOLDEN / "text_llama3style_sharded" / "cache" / "train", tmp_path / "c")
        return tmp_path / "c"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda m: m["finished_shards"].append("00000_0_jsonl"), "each shard once"),
            (lambda m: m["finished_shards"].append("../x"), "paths below the cache"),
            (lambda m: m["finished_shards"].append("/x"), "paths below the cache"),
            (lambda m: m["shard_rows"].pop("00000_0_jsonl"), "the rows of shard"),
            (lambda m: m.update(total_num_rows=49), "the sum of the shards' rows"),
            (lambda m: m["field_counts_by_shard"].update(x={"input_ids": 0}), "that are in finished_shards"),
            (lambda m: m["field_counts"].update(input_ids=5), "the sum over the shards"),
            (lambda m: m["field_counts_by_shard"].pop("00000_0_jsonl"), "sum over the shards|the count of"),
            (lambda m: m["shard_rows"].update({"00000_0_jsonl": -1}), "counts"),
        ],
    )
    def test_what_levanter_refuses_is_refused(self, change, said, cache) -> None:
        change_meta(cache / "shard_ledger.json", change)
        with pytest.raises(actshard.FormatError, match=said):
            tokens.open_cache(cache)
        assert actshard.verify(cache).status == 2

    def test_a_shard_of_other_rows_is_told_when_it_is_read(self, cache) -> None:
        def change(m):
            m["shard_rows"]["00000_0_jsonl"] += 1
            m["shard_rows"]["00001_1_jsonl_gz"] -= 1

        change_meta(cache / "shard_ledger.json", change)
        opened = tokens.open_cache(cache)
        with pytest.raises(actshard.FormatError, match=r"the ledger counts 18 rows here, offsets\[0\] is 17"):
            opened.rows(range(50))
        assert actshard.verify(cache).status == 2

    def test_a_shard_that_is_gone(self, cache) -> None:
        shutil.rmtree(cache / "00002_2_parquet")
        opened = tokens.open_cache(cache)
        assert len(opened[0]["input_ids"]) > 0
        with pytest.raises(actshard.MissingFileError, match="00002_2_parquet"):
            opened.rows(range(50))


class TestProcesses:
    """Guarantee: caches can be sent to other processes and used by many threads."""

    @pytest.mark.slow
    def test_pickled_and_forked(self, tmp_path: Path) -> None:
        rows = long_rows(FRAME + 100)
        cache = write(tmp_path / "c", rows, "lz4")
        wanted = cache.view("input_ids").elements()
        windows = tokens.TokenSeqDataset(cache, 1000)
        first = windows.get_batch(range(len(windows)))
        copied = pickle.loads(pickle.dumps(windows))
        mixture = tokens.Mixture(
            {"a": tokens.Permuted(tokens.CausalLmDataset(windows), tokens.permutation("block", len(windows)))}, {"a": 1}
        )
        assert np.array_equal(
            pickle.loads(pickle.dumps(mixture)).get_batch(range(5)).tokens, mixture.get_batch(range(5)).tokens
        )
        assert np.array_equal(copied.get_batch(range(len(windows))), first)
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                for made in pool.map(_read, [windows] * 4):
                    assert np.array_equal(made, first)
        assert np.array_equal(cache.view("input_ids").elements(), wanted)

    def test_many_threads(self, tmp_path: Path) -> None:
        rows = long_rows(2 * FRAME)
        flat = np.concatenate(rows)
        write(tmp_path / "c", rows, "lz4")
        cache = tokens.open_cache(tmp_path / "c", memory=1 << 20)
        windows = tokens.TokenSeqDataset(cache, 500)
        wrong: list[int] = []

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(15):
                numbers = rng.integers(0, len(windows), 40)
                if not np.array_equal(windows.get_batch(numbers), flat[: len(windows) * 500].reshape(-1, 500)[numbers]):
                    wrong.append(seed)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_decoded_blocks_stay_within_their_budget(self, tmp_path: Path) -> None:
        write(tmp_path / "c", long_rows(8 * FRAME), "lz4")
        cache = tokens.open_cache(tmp_path / "c", memory=2 << 20)
        windows = tokens.TokenSeqDataset(cache, 1000)
        for seed in range(10):
            windows.get_batch(np.random.default_rng(seed).integers(0, len(windows), 100))
            assert cache._memory.used <= 2 << 20


def _read(windows: tokens.TokenSeqDataset) -> np.ndarray:
    return windows.get_batch(range(len(windows)))


class TestWriter:
    """Guarantee: the cache appears only when complete, and contains only what was given."""

    def test_an_error_leaves_nothing(self, tmp_path: Path) -> None:
        def write_some() -> None:
            with tokens.CacheWriter(tmp_path / "c", {"a": np.int32}) as writer:
                writer.append([{"a": [1, 2]}])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_some()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([{}], "expected the field 'a'"),
            ([{"a": [1], "b": [2]}], "unknown field 'b'"),
            ([{"a": [1.5]}], "cannot be stored as int32"),
            ([{"a": [1 << 31]}], "do not fit int32"),
            ([{"a": [[1, 2]]}, {"a": [1]}], "expected 2 axes, found 1"),
            ([{"a": ["x"]}], "cannot be stored"),
        ],
    )
    def test_rows_that_do_not_fit(self, rows, said, tmp_path: Path) -> None:
        with (
            pytest.raises(actshard.ActshardError, match=said),
            tokens.CacheWriter(tmp_path / "c", {"a": np.int32}) as writer,
        ):
            writer.append(rows)

    def test_what_is_there_stays_unless_it_is_to_be_replaced(self, tmp_path: Path) -> None:
        write(tmp_path / "c", [np.arange(3)])
        with pytest.raises(actshard.ExistsError):
            tokens.CacheWriter(tmp_path / "c", {"a": np.int32})
        assert len(write(tmp_path / "c", [np.arange(4)] * 2, overwrite=True)) == 2

    def test_flat_rows_nested_names_and_axes(self, tmp_path: Path) -> None:
        with tokens.CacheWriter(tmp_path / "c", {"a/b": np.uint16, "c": np.float32}) as writer:
            writer.append_flat({"a/b": np.arange(6), "c": np.ones(6)}, np.array([2, 0, 4]))
            with pytest.raises(actshard.ArgumentError, match="sum"):
                writer.append_flat({"a/b": np.arange(6), "c": np.ones(6)}, np.array([2, 0, 5]))
        cache = tokens.open_cache(tmp_path / "c")
        assert cache.fields == ("a/b", "c")
        assert [r["a/b"].tolist() for r in cache] == [[0, 1], [], [2, 3, 4, 5]]
        with tokens.CacheWriter(tmp_path / "d", {"x": np.float32}) as writer:
            made = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) for n in (2, 0, 5)]
            writer.append([{"x": m} for m in made])
        for i, row in enumerate(tokens.open_cache(tmp_path / "d")):
            assert row["x"].shape == (made[i].shape if i != 1 else (0, 0))
            assert np.array_equal(row["x"].reshape(-1), made[i].reshape(-1))


@pytest.mark.parametrize("indices", [[50], [-51], [1.5], [[1, 2]], ["a"], [True, False]])
def test_indices_that_make_no_sense(indices) -> None:
    cache = tokens.open_cache(GOLDEN / "text_gpt2style_single" / "cache")
    with pytest.raises((actshard.OutOfRangeError, actshard.ArgumentError)):
        cache.rows(indices)
    with pytest.raises((actshard.OutOfRangeError, actshard.ArgumentError)):
        tokens.TokenSeqDataset(cache, 556).get_batch(indices)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda c: tokens.TokenSeqDataset(c, 0), "seq_len"),
        (lambda c: tokens.TokenSeqDataset(c, 8, "weights"), "no field 'weights'"),
        (lambda c: tokens.PackedTokenDataset(c, 8, slice_strategy="x"), "slice_strategy"),
        (
            lambda c: tokens.PackedTokenDataset(c, 8, slice_strategy="raise"),
            "document 0 has .* more than an example's 8",
        ),
        (lambda c: tokens.PackedTokenDataset(c, 8, pack=-1), "pack"),
        (lambda c: tokens.PackedTokenDataset(c, 8, pack="x"), "pack"),
        (lambda c: tokens.ChatDataset(c, 8), "no field 'assistant_masks'"),
        (lambda c: tokens.PrebuiltLmDataset(c, 8).get_batch([0]), "elements of 'input_ids', expected 8"),
        (lambda c: c["x"], "row"),
        (lambda c: tokens.open_cache(c.path, io="x"), "io"),
        (lambda c: tokens.open_cache(c.path, memory="x"), "memory"),
    ],
)
def test_datasets_that_make_no_sense(make, said: str) -> None:
    with pytest.raises(actshard.ActshardError, match=said):
        make(tokens.open_cache(GOLDEN / "text_gpt2style_single" / "cache"))


def test_tokens_that_do_not_fit_int32_are_no_other_tokens(tmp_path: Path) -> None:
    for storage in ("plain", "lz4"):
        cache = write(tmp_path / storage, [np.array([1, 2, 1 << 31, 4])], storage)
        with pytest.raises(actshard.FormatError, match="does not fit int32"):
            tokens.TokenSeqDataset(cache, 4).get_batch([0])
        assert cache[0]["input_ids"].tolist() == [1, 2, 1 << 31, 4]
    negative = write(tmp_path / "n", [np.array([-1, 5])], "lz4")
    assert tokens.TokenSeqDataset(negative, 2).get_batch([0]).tolist() == [[-1, 5]]


def test_activations_are_not_looked_for_in_a_token_cache() -> None:
    with pytest.raises(actshard.ArgumentError, match="token cache"):
        actshard.open(GOLDEN / "text_gpt2style_single" / "cache" / "train")


def test_old_ledgers_name_no_fields(tmp_path: Path) -> None:
    """Levanter of 2025 wrote no field_counts; fields are found by their folders."""
    shutil.copytree(GOLDEN / "chat_llama3style" / "cache", tmp_path / "c")
    change_meta(
        tmp_path / "c/train/shard_ledger.json",
        lambda m: [m.pop(k) for k in ("field_counts", "layout", "field_counts_by_shard")],
    )
    cache = tokens.open_cache(tmp_path / "c")
    assert cache.fields == ("assistant_masks", "input_ids")
    assert len(cache) == 20


def test_levanters_own_index_has_that_checksum() -> None:
    """The checksums used above are those that tensorstore writes."""
    index = (GOLDEN / "text_gpt2style_single/cache/train/input_ids/data/c/0").read_bytes()[-INDEX:]
    assert struct.unpack("<I", index[-4:])[0] == crc32c(index[:-4])
