"""Guarantee: rows, windows and packed examples equal those computed with plain numpy, for every storage."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.tokens.conftest import write_lines
from tests.torture.budget import machine_settings

import actshard
from actshard import tokens

pytestmark = pytest.mark.machine

CHUNK = 262_144
EOS = 3
Rows = list[NDArray[np.int64]]

lengths = st.lists(st.one_of(st.integers(0, 12), st.sampled_from([0, 1, 40])), max_size=12)
ways = st.sampled_from([("plain", False), ("plain", True), ("lz4", False), ("lz4", True)])


def some_rows(sizes: list[int], seed: int, *, long: bool) -> Rows:
    """Rows of small ids. A long one crosses an inner chunk boundary."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 6, n) for n in [*sizes, *([CHUNK + 7] if long else [])]]


@contextmanager
def stored(
    rows: Rows, way: tuple[str, bool], *, extra: str = "loss_weights", io: str = "auto"
) -> Iterator[tokens.TokenCache]:
    """A cache of rows: consolidated, or sharded over two files. A second field is a function of the first."""
    root = Path(tempfile.mkdtemp(prefix="actshard-reads-"))
    storage, sharded = way
    try:
        if sharded:
            half = len(rows) // 2
            files = []
            for i, part in enumerate((rows[:half], rows[half:])):
                records = [{"input_ids": r.tolist(), "loss_weights": second(r).tolist()} for r in part]
                files.append(write_lines(root / f"{i}.jsonl", records))
            form = tokens.PrebuiltFormat(loss_weights_key="loss_weights")
            tokens.build_cache(files, root / "c", format=form, layout="sharded", storage=storage)
        else:
            dtype = np.float32 if extra == "loss_weights" else np.int32
            with tokens.CacheWriter(root / "c", {"input_ids": np.int32, extra: dtype}, storage=storage) as writer:
                for at in range(0, len(rows), 3):
                    writer.append([{"input_ids": r, extra: second(r).astype(dtype)} for r in rows[at : at + 3]])
        yield tokens.open_cache(root / "c", io=io)
    finally:
        shutil.rmtree(root)


def second(row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Weights or masks of a row."""
    return (row % 2).astype(np.int64)


def flat(rows: Rows) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *rows])


def packs_of(sizes: list[int], most: int, segments: int, strategy: str) -> list[tuple[int, int]]:
    """Levanter's greedy packing, implemented from its description."""
    made, i = [], 0
    while i < len(sizes):
        if strategy == "drop" and sizes[i] > most:
            i += 1
            continue
        start, total = i, 0
        while i < len(sizes) and i - start < segments and not (strategy == "drop" and sizes[i] > most):
            if total + sizes[i] > most and i > start:
                break
            total += sizes[i]
            i += 1
            if total > most:
                break
        made.append((start, i))
    return made


def packed(rows: Rows, pack: tuple[int, int], most: int, strategy: str) -> tuple[Any, Any, Any]:
    """Tokens, second field and segment ids of an example, padded with 0, 0 and -1."""
    cut = slice(-most, None) if strategy == "right" else slice(most)
    ids = flat([rows[i] for i in range(*pack)])[cut]
    marks = flat([second(rows[i]) for i in range(*pack)])[cut]
    segments = flat([np.full(len(rows[i]), i) for i in range(*pack)])[cut]
    rest = most - len(ids)
    return np.pad(ids, (0, rest)), np.pad(marks, (0, rest)), np.pad(segments, (0, rest), constant_values=-1)


def drawn(data: st.DataObject, count: int) -> list[int]:
    """Indices in any order, with repetitions and negative ones."""
    return data.draw(st.lists(st.integers(-count, count - 1), max_size=6)) if count else []


@machine_settings(25, 10_000)
@given(lengths, st.integers(0, 99), st.integers(0, 9), ways, st.sampled_from(["mmap", "pread"]), st.data())
def test_rows_and_ranges(sizes: list[int], seed: int, long: int, way: Any, io: str, data: st.DataObject) -> None:
    rows = some_rows(sizes, seed, long=long == 0)
    with stored(rows, way, io=io) as cache:
        assert len(cache) == len(rows)
        every = flat(rows)
        assert [row["input_ids"].tolist() for row in cache] == [r.tolist() for r in rows]
        for i, row in zip(picked := drawn(data, len(rows)), cache.rows(picked), strict=True):
            assert np.array_equal(row["input_ids"], rows[i])
            assert np.array_equal(row["loss_weights"], second(rows[i]))
            assert np.array_equal(cache[i]["input_ids"], rows[i])
        if rows:
            view = cache.view("input_ids")
            assert np.array_equal(view.offsets, np.cumsum([0, *map(len, rows)]))
            first, last = sorted(data.draw(st.tuples(st.integers(0, len(every)), st.integers(0, len(every)))))
            assert np.array_equal(view.elements(first, last), every[first:last])
        for wrong in (len(rows), -len(rows) - 1):
            with pytest.raises(actshard.OutOfRangeError):
                cache.rows([wrong])
        assert actshard.verify(cache.path, deep=True).ok


@machine_settings(25, 10_000)
@given(lengths, st.integers(0, 99), st.integers(0, 9), ways, st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_windows(
    sizes: list[int], seed: int, long: int, way: Any, width: int, apart: bool, weighted: bool, data: st.DataObject
) -> None:
    rows = some_rows(sizes, seed, long=long == 0)
    every, marks = flat(rows), flat([second(r) for r in rows])
    with stored(rows, way) as cache:
        windows = tokens.TokenSeqDataset(cache, width, "loss_weights" if weighted and rows else None)
        assert len(windows) == len(every) // width
        picked = drawn(data, len(windows))
        wanted = np.array(
            [every[:0].reshape(0)]
            if not picked
            else [every[i * width : (i + 1) * width] for i in np.mod(picked, len(windows))]
        )
        causal = tokens.CausalLmDataset(windows, eos_id=EOS, block_cross_document_attention=apart)
        batch = causal.get_batch(picked)
        assert batch.tokens.shape == (len(picked), width)
        if not picked:
            return
        assert np.array_equal(windows.get_batch(picked), wanted)
        assert np.array_equal(batch.tokens, wanted)
        loss = np.ones(wanted.shape, np.float32)
        if windows.loss_weights_key is not None:
            loss = np.array([marks[i * width : (i + 1) * width] for i in np.mod(picked, len(windows))], np.float32)
        loss[:, -1] = 0
        assert np.array_equal(batch.loss_weight, loss)
        ends = np.pad(np.cumsum(wanted == EOS, axis=1), ((0, 0), (1, 0)))[:, :-1]
        assert (batch.segment_ids is not None) == apart
        assert batch.segment_ids is None or np.array_equal(batch.segment_ids, ends)


@machine_settings(25, 10_000)
@given(
    lengths,
    st.integers(0, 99),
    st.sampled_from(["plain", "lz4"]),
    st.integers(1, 14),
    st.sampled_from([True, False, 1, 2, 5]),
    st.sampled_from(["left", "right", "drop"]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_packed_examples(
    sizes: list[int],
    seed: int,
    storage: str,
    most: int,
    pack: Any,
    how: str,
    masking: bool,
    chat: bool,
    data: st.DataObject,
) -> None:
    rows = some_rows(sizes, seed, long=False)
    key = "assistant_masks" if chat else "loss_weights"
    with stored(rows, (storage, False), extra=key) as cache:
        if chat:
            dataset: Any = tokens.ChatDataset(cache, most, pack=pack, slice_strategy=how, loss_mask_padding=masking)
        else:
            dataset = tokens.PackedTokenDataset(
                cache, most, pack=pack, slice_strategy=how, loss_mask_padding=masking, loss_weights_key=key
            )
        segments = 64 if pack is True else int(pack) or 1
        wanted = packs_of([len(r) for r in rows], most, segments, how)
        assert [tuple(p) for p in dataset.pack_ranges.tolist()] == wanted
        picked = drawn(data, len(wanted))
        batch = dataset.get_batch(picked)
        assert len(batch) == len(picked)
        for i, at in enumerate(picked):
            ids, marks, numbers = packed(rows, wanted[at], most, how)
            assert np.array_equal(batch.tokens[i], ids)
            assert np.array_equal(batch.segment_ids[i], numbers)
            loss = np.roll(marks, -1).astype(np.float32) if chat else marks.astype(np.float32)
            loss[-1] = 0
            if masking:
                loss[:-1] *= numbers[1:] >= 0
            assert np.array_equal(batch.loss_weight[i], loss)


@machine_settings(25, 10_000)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 99), ways, st.data())
def test_prebuilt_rows(count: int, width: int, seed: int, way: Any, data: st.DataObject) -> None:
    """The transform is applied to each row separately, so results do not depend on the batch."""
    rows = some_rows([width] * count, seed, long=False)
    with stored(rows, way) as cache:

        def scaled(weights: NDArray[np.float32]) -> NDArray[np.float32]:
            assert weights.shape == (width,)
            return weights * np.arange(len(weights)) - weights.max()

        dataset = tokens.PrebuiltLmDataset(
            cache, width, loss_weights_key="loss_weights", loss_weight_transform=scaled, eos_id=EOS
        )
        picked = drawn(data, count)
        batch = dataset.get_batch(picked)
        for i, at in enumerate(picked):
            assert np.array_equal(batch.tokens[i], rows[at])
            loss = scaled(second(rows[at]).astype(np.float32))
            loss[-1] = 0
            assert np.array_equal(batch.loss_weight[i], loss)
            assert not np.signbit(batch.loss_weight[i][-1])
