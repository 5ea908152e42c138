"""Guarantee: what Levanter's code imports by these names yields Levanter's examples."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.tokens.conftest import GOLDEN, expected

import actshard
from actshard.compat import levanter


def batch(dataset: Any) -> list[Any]:
    async def read() -> list[Any]:
        return list(await dataset.get_batch(range(await dataset.async_len())))

    return asyncio.run(read())


def compare(examples: list[Any], variant: str, name: str) -> None:
    found = expected(variant)
    assert np.array_equal(np.stack([e.tokens for e in examples]), found[f"{name}_tokens"])
    assert np.array_equal(np.stack([e.loss_weight for e in examples]), found[f"{name}_loss_weight"])
    if f"{name}_segment_ids" in found:
        assert np.array_equal(np.stack([e.attn_mask.segment_ids[0] for e in examples]), found[f"{name}_segment_ids"])
    if f"{name}_thd_segment_lengths" in found:
        lengths = np.stack([e.attn_mask.thd_segment_metadata[0] for e in examples])
        assert np.array_equal(lengths, found[f"{name}_thd_segment_lengths"])


def test_datasets_yield_levanters_examples() -> None:
    text = levanter.TreeCache.load(GOLDEN / "text_gpt2style_single" / "cache" / "train")
    found = expected("text_gpt2style_single")
    lengths = sorted({int(k[6:].split("_")[0]) for k in found if k.startswith("causal")})
    for length in lengths:
        causal = levanter.CausalLmDataset(levanter.TokenSeqDataset(text, length), length, eos_id=0)
        compare(batch(causal), "text_gpt2style_single", f"causal{length}_block")
    packs = sorted({int(k[6:].split("_")[0]) for k in found if k.startswith("packed")})
    for length in packs:
        compare(batch(levanter.PackedTokenDataset(text, length, 3)), "text_gpt2style_single", f"packed{length}_pack3")

    class Axis:
        size = 128

    chat = levanter.TreeCache.load(str(GOLDEN / "chat_llama3style" / "cache" / "train"), exemplar={})
    compare(batch(levanter.ChatDataset(chat, Axis(), 4)), "chat_llama3style", "chat128_pack4")
    prebuilt = levanter.PrebuiltLmDataset(
        levanter.TreeCache.load(GOLDEN / "prebuilt_weights" / "cache" / "train"),
        Axis(),
        input_ids_key="input_ids",
        loss_weights_key="loss_weights",
        loss_weight_transform=lambda w: w > 0.3,
        eos_id=1,
    )
    compare(batch(prebuilt), "prebuilt_weights", "prebuilt128_weights_threshold")


def test_rows_and_flat_fields() -> None:
    cache = levanter.TreeCache.load(GOLDEN / "prebuilt_serial_varlen" / "cache")
    flat = expected("prebuilt_serial_varlen")["rows_input_ids"]
    assert len(cache) == asyncio.run(cache.async_len()) == 30
    assert cache.flat_field_length("input_ids") == asyncio.run(cache.async_flat_field_length("input_ids")) == len(flat)
    assert np.array_equal(np.concatenate([r["input_ids"] for r in cache[:]]), flat)
    assert np.array_equal(np.concatenate([r["input_ids"] for r in cache.get_batch_sync(slice(None))]), flat)
    assert np.array_equal(np.concatenate([r["input_ids"] for r in cache]), flat)
    (part,) = asyncio.run(cache.get_flat_field_batch("input_ids", [100], 50))
    assert np.array_equal(part, flat[100:150])
    windows = levanter.TokenSeqDataset(cache, 64, "loss_weights")
    one = asyncio.run(windows.getitem_async(3))
    assert np.array_equal(one["input_ids"], flat[192:256])
    assert len(one["loss_weights"]) == 64
    assert asyncio.run(windows.get_batch([])) == []
    assert windows.is_finite()
    with pytest.raises(actshard.ArgumentError, match="Pos"):
        levanter.ChatDataset(cache, "position")
