"""Guarantee: caches written by Levanter read as in Levanter, by every way of reading."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.tokens.conftest import GOLDEN, crc32c, expected

import actshard
from actshard import tokens

EOS = {"text_gpt2style_single": 0, "text_wordpiece_nospecial": None}
VARIANTS = sorted(p.parent.parent.name for p in GOLDEN.glob("*/cache/*") if p.is_dir())
VARIANTS = sorted({v for v in VARIANTS if v != "serial_rank2"})


def compare(batch: tokens.TokenBatch, found: dict[str, np.ndarray], name: str) -> int:
    """Compares a batch with the golden arrays of that name. Returns the number of arrays compared."""
    wanted = {
        "tokens": lambda: batch.tokens,
        "loss_weight": lambda: batch.loss_weight,
        "segment_ids": lambda: batch.segment_ids,
        "thd_segment_lengths": lambda: batch.thd_segment_lengths,
        "thd_num_segments": lambda: batch.thd_num_segments,
    }
    done = 0
    for what, get in wanted.items():
        if f"{name}_{what}" in found:
            made, theirs = get(), found[f"{name}_{what}"]
            assert made is not None
            assert made.dtype == theirs.dtype
            assert np.array_equal(made, theirs), f"{name}_{what}"
            done += 1
    if f"{name}_segment_ids" not in found:
        assert batch.segment_ids is None
    return done


def every(dataset) -> tokens.TokenBatch:
    return dataset.get_batch(range(len(dataset)))


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_levanters(variant: str, io: str) -> None:
    cache = tokens.open_cache(GOLDEN / variant / "cache", io=io)
    found = expected(variant)
    assert len(cache) == found["num_rows"]
    together = cache.rows(range(len(cache)))
    for field in cache.fields:
        flat, offsets = found[f"rows_{field}"], found[f"rows_{field}_offsets"]
        view = cache.view(field)
        assert np.array_equal(view.elements(), flat)
        assert np.array_equal(view.offsets, offsets)
        for i in range(len(cache)):
            row = flat[offsets[i] : offsets[i + 1]]
            assert np.array_equal(cache[i][field], row)
            assert np.array_equal(cache[i - len(cache)][field], row)
            assert np.array_equal(view[i], row)
            assert np.array_equal(together[i][field], row)
    assert cache.num_tokens == len(found[f"rows_{cache.token_field}"])


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_examples_are_levanters(variant: str, io: str) -> None:
    cache = tokens.open_cache(GOLDEN / variant / "cache", io=io)
    found = expected(variant)
    eos = EOS.get(variant, 1)
    stored = "loss_weights" if "loss_weights" in cache.fields else None
    done = 0
    for name in found:
        if m := re.fullmatch(r"windows(\d+)_(\w+)", name):
            windows = tokens.TokenSeqDataset(cache, int(m[1]), stored)
            numbers = np.arange(len(windows))
            made = windows.get_batch(numbers) if m[2] == "input_ids" else windows.weights(numbers)
            assert np.array_equal(made, found[name])
            done += 1
        elif m := re.fullmatch(r"(causal(\d+)_(block|noblock|weights))_tokens", name):
            windows = tokens.TokenSeqDataset(cache, int(m[2]), stored if m[3] == "weights" else None)
            dataset = tokens.CausalLmDataset(windows, eos_id=eos, block_cross_document_attention=m[3] != "noblock")
            done += compare(every(dataset), found, m[1])
        elif m := re.fullmatch(r"((?:packed|supervised)(\d+)_(?:pack(\w+?)|weights|(seg2_right)))_tokens", name):
            if m[3] == "None":
                done += compare(
                    every(tokens.CausalLmDataset(tokens.TokenSeqDataset(cache, int(m[2]), stored), eos_id=eos)),
                    found,
                    m[1],
                )
                continue
            packed = tokens.PackedTokenDataset(
                cache,
                int(m[2]),
                pack=2 if m[4] else True if m[3] in ("True", None) else int(m[3]),
                slice_strategy="right" if m[4] else "left",
                loss_weights_key=stored,
                loss_mask_padding=False,
            )
            if f"{m[1]}_pack_ranges" in found:
                assert np.array_equal(packed.pack_ranges, found[f"{m[1]}_pack_ranges"])
            done += compare(every(packed), found, m[1])
        elif m := re.fullmatch(r"(chat(\d+)_pack(True|\d+)(?:_(noblock|nomask|right))?)_tokens", name):
            chat = tokens.ChatDataset(
                cache,
                int(m[2]),
                pack=True if m[3] == "True" else int(m[3]),
                mask_user_turns=m[4] != "nomask",
                slice_strategy="right" if m[4] == "right" else "left",
                block_cross_document_attention=m[4] != "noblock",
                loss_mask_padding=False,
            )
            assert np.array_equal(chat.pack_ranges, found[f"{m[1]}_pack_ranges"])
            done += compare(every(chat), found, m[1])
        elif m := re.fullmatch(
            r"(prebuilt(\d+)_(weights|noweights|weights_threshold)(?:_(eos|noeos|eos_noblock))?)_tokens", name
        ):
            prebuilt = tokens.PrebuiltLmDataset(
                cache,
                int(m[2]),
                loss_weights_key="" if m[3] == "noweights" else None,
                loss_weight_transform=(lambda w: w > 0.3) if "threshold" in m[3] else None,
                eos_id=None if m[4] == "noeos" else 1,
                block_cross_document_attention=m[4] != "eos_noblock",
            )
            done += compare(every(prebuilt), found, m[1])
    if "drop128_tokens" in found:
        dropped = tokens.ChatDataset(cache, 128, slice_strategy="drop")
        assert np.array_equal(dropped.pack_ranges, found["drop128_pack_ranges"])
        assert np.array_equal(every(dropped).tokens, found["drop128_tokens"])
        assert np.array_equal(every(dropped).segment_ids, found["drop128_segment_ids"])
    if "nonempty_rows" in found:
        rowwise = tokens.PrebuiltLmDataset(cache, loss_weights_key="loss_weights", eos_id=1)
        for j, i in enumerate(found["nonempty_rows"]):
            batch = rowwise.get_batch([i])
            for what in ("tokens", "loss_weight", "segment_ids"):
                begin, end = found[f"prebuilt_rowwise_{what}_offsets"][j : j + 2]
                assert np.array_equal(getattr(batch, what)[0], found[f"prebuilt_rowwise_{what}"][begin:end])
    assert done or variant == "prebuilt_serial_varlen"


def test_rows_of_several_axes_keep_their_shapes() -> None:
    cache = tokens.open_cache(GOLDEN / "serial_rank2" / "cache")
    for name, row in expected("serial_rank2").items():
        field, number = name.rsplit("_", 1)
        for made in (cache[int(number)][field], cache.rows([int(number)])[0][field], cache.view(field)[int(number)]):
            assert made.shape == row.shape
            assert np.array_equal(made, row)


def test_padding_counts_nothing_by_default() -> None:
    """The later mask is June's mask times (the next position is not padding): levanter.md 3."""
    cache = tokens.open_cache(GOLDEN / "text_gpt2style_single" / "cache")
    june = every(tokens.PackedTokenDataset(cache, 128, loss_mask_padding=False))
    later = every(tokens.PackedTokenDataset(cache, 128))
    assert june.segment_ids is not None
    following = np.concatenate([june.segment_ids[:, 1:], np.full((len(june), 1), -1)], axis=1)
    assert (following < 0).any()
    assert np.array_equal(later.loss_weight, june.loss_weight * (following >= 0))
    assert np.array_equal(later.tokens, june.tokens)


@pytest.mark.parametrize("pack", [False, 0, "pad", 1])
def test_one_conversation_per_example_where_packing_is_off(pack) -> None:
    """Levanter of June 2026 fails here; its documentation promises this."""
    cache = tokens.open_cache(GOLDEN / "chat_llama3style" / "cache")
    chat = tokens.ChatDataset(cache, 128, pack=pack, loss_mask_padding=False)
    assert compare(every(chat), expected("chat_llama3style"), "chat128_pack1") == 5


def test_a_row_twice_in_a_batch_is_twice_the_same() -> None:
    """Levanter 5.4 returns wrong rows if row 0 is requested twice."""
    cache = tokens.open_cache(GOLDEN / "prebuilt_weights" / "cache")
    rows = cache.rows([0, 3, 0, 0, 3])
    assert [
        np.array_equal(r["input_ids"], cache[i]["input_ids"]) for r, i in zip(rows, [0, 3, 0, 0, 3], strict=True)
    ] == [True] * 5
    batch = tokens.PrebuiltLmDataset(cache, 128).get_batch([0, 0, 1])
    assert np.array_equal(batch.tokens[0], batch.tokens[1])
    windows = tokens.TokenSeqDataset(cache, 64)
    assert np.array_equal(windows.get_batch([0, 5, 0]), windows.get_batch([0, 5, 0]))


def test_text_of_a_sharded_cache_packs() -> None:
    """Levanter 5.6 cannot; rows and examples equal those of the consolidated cache."""
    sharded = tokens.PackedTokenDataset(tokens.open_cache(GOLDEN / "text_llama3style_sharded" / "cache"), 256)
    whole = tokens.PackedTokenDataset(tokens.open_cache(GOLDEN / "text_llama3style_multishard" / "cache"), 256)
    assert np.array_equal(every(sharded).tokens, every(whole).tokens)
    assert np.array_equal(every(sharded).loss_weight, every(whole).loss_weight)


def test_all_golden_variants_are_here() -> None:
    here = {p.name for p in GOLDEN.iterdir() if (p / "expected.npz").exists()}
    assert here == set(VARIANTS) | {"serial_rank2", "shuffles", "mixtures"}
    assert len(VARIANTS) == 9


def test_opening_touches_no_data(tmp_path: Path) -> None:
    """``data`` may be a broken link, or missing, as long as no row is requested."""
    import shutil

    shutil.copytree(GOLDEN / "text_llama3style_sharded" / "cache", tmp_path / "cache")
    for data in tmp_path.glob("cache/train/*/input_ids/data/c"):
        shutil.rmtree(data)
    for offsets in tmp_path.glob("cache/train/*/input_ids/offsets/c"):
        shutil.rmtree(offsets)
    cache = tokens.open_cache(tmp_path / "cache")
    assert len(cache) == 50
    assert len(tokens.TokenSeqDataset(cache, 100)) == 264


def test_shapes_that_are_not_there_are_one_clear_error(tmp_path: Path) -> None:
    """Missing shapes read as zeros, so rows have too many elements."""
    copy = tmp_path / "cache"
    shutil.copytree(GOLDEN / "serial_rank2" / "cache", copy)
    (copy / "feats/shapes/c/0/0").unlink()
    with pytest.raises(actshard.FormatError, match="elements cannot be reshaped to rows of shape"):
        tokens.open_cache(copy).rows([0])


@pytest.mark.filterwarnings("ignore:.*the ledger counts")
@pytest.mark.parametrize("axis", [-1, -2, -(2**63), 2**63 - 1, 2**62, 2**33])
@pytest.mark.parametrize("empty", [False, True])
def test_shapes_that_numpy_does_not_take_are_one_clear_error(tmp_path: Path, axis: int, empty: bool) -> None:
    """Every number in a file is checked before use, also for rows without elements."""
    copy = tmp_path / "cache"
    shutil.copytree(GOLDEN / "serial_rank2" / "cache", copy)

    def store(name: str, values: np.ndarray) -> None:
        array = copy / "feats" / name
        meta = json.loads((array / "zarr.json").read_text())
        meta |= {"shape": values.shape, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}
        meta["chunk_grid"]["configuration"]["chunk_shape"] = values.shape
        (array / "zarr.json").write_text(json.dumps(meta))
        shutil.rmtree(array / "c")
        chunk = array.joinpath("c", *["0"] * values.ndim)
        chunk.parent.mkdir(parents=True)
        chunk.write_bytes(values.tobytes())

    store("shapes", np.full((9, 1), axis, np.int64))
    if empty:
        store("offsets", np.array([9] + [0] * 9, np.int64))
    cache = tokens.open_cache(copy)
    for read in (lambda: cache[0], lambda: cache.rows([0, 1])[0]):
        if empty and axis == 2**33:
            assert read()["feats"].shape == (axis, 0)
        else:
            with pytest.raises(actshard.FormatError, match="elements cannot be reshaped to rows of shape"):
                read()


def test_unsigned_indices_beyond_int64_are_no_negative_ones() -> None:
    cache = tokens.open_cache(GOLDEN / "text_gpt2style_single" / "cache")
    dataset = tokens.CausalLmDataset(tokens.TokenSeqDataset(cache, 8), eos_id=0)
    wrapped = np.array([2**64 - 1], np.uint64)  # the last example, if read as signed
    for read in (cache.rows, dataset.get_batch):
        with pytest.raises(actshard.OutOfRangeError):
            read(wrapped)


def _blocks_frame(values: np.ndarray, numbers: int, total: int) -> bytes:
    """A shuffled blosc frame of `total` bytes with blocks of `numbers` stored 64-bit numbers."""
    blocks = np.split(values, len(values) // numbers)
    planes = [block.view("u1").reshape(-1, 8).T.tobytes() for block in blocks]
    first = 16 + 4 * len(planes)
    starts = [first + i * (4 + len(planes[0])) for i in range(len(planes))]
    head = struct.pack("<BBBBIII", 2, 1, 1 << 5 | 0x11, 8, values.nbytes, numbers * 8, total)
    body = b"".join(struct.pack("<I", len(p)) + p for p in planes)
    return (head + struct.pack(f"<{len(starts)}I", *starts) + body).ljust(total, b"\0")


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_blocks_of_a_frame_that_was_written_anew_in_place_are_not_those_of_the_old_one(tmp_path: Path, io: str) -> None:
    """Cached blocks were identified by number, regardless of block size, so rows came from another part of the cache."""
    cache = tmp_path / "train"
    shutil.copytree(GOLDEN / "text_gpt2style_single/cache/train", cache)
    n, field = 1 << 16, cache / "input_ids/data"
    meta = json.loads((field / "zarr.json").read_text())
    meta["chunk_grid"]["configuration"]["chunk_shape"] = [n]
    meta["codecs"][0]["configuration"]["chunk_shape"] = [n]
    (field / "zarr.json").write_text(json.dumps(meta))
    values, total = np.arange(n, dtype="<i8"), n * 8 + 4096
    shards = []
    for numbers in (16384, 8192):
        frame = _blocks_frame(values, numbers, total)
        index = struct.pack("<QQ", 0, len(frame))
        shards.append(frame + index + struct.pack("<I", crc32c(index)))
    (field / "c/0").write_bytes(shards[0])
    view = tokens.open_cache(cache, io=io).view("input_ids")
    assert view.elements(16384, 16388).tolist() == [16384, 16385, 16386, 16387]
    with (field / "c/0").open("r+b") as file:
        file.write(shards[1])
    os.utime(field / "c/0", ns=(1, 1))  # writing again within a tick of the clock may keep the time
    with pytest.raises(actshard.FormatError, match=r"was replaced after it was opened: .*; open the dataset again"):
        view.elements(8192, 8196)
    view = tokens.open_cache(cache, io=io).view("input_ids")
    assert view.elements(8192, 8196).tolist() == [8192, 8193, 8194, 8195]
