"""Guarantee: the names that Levanter's code imports yield Levanter's examples."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tokens.conftest import GOLDEN, GPT2, LLAMA, expected, write_lines

import actshard
from actshard import tokens
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


NAMES = """
    LmDataConfig DatasetComponent LmDatasetSourceConfigBase HfDatasetSourceConfig UrlDatasetSourceConfig LmDatasetFormatBase
    ChatLmDatasetFormat PrebuiltLmDatasetFormat TextLmDatasetFormat SupervisedLmDatasetFormat TokenSeqDataset CausalLmDataset
    ChatDataset PackedTokenDataset PrebuiltLmDataset dataset_for_component BlockShuffleConfig DEFAULT_LM_DATA_SHUFFLE
    load_lm_dataset_cache build_lm_dataset_cache cached_token_count NamedLmDataset
"""


def test_names_of_levanters_text_are_here(tmp_path: Path) -> None:
    """All names of the API section in levanter.md, and others that Levanter's code imports."""
    assert [name for name in NAMES.split() if not hasattr(levanter, name)] == []
    source = levanter.HfDatasetSourceConfig(id="a/b", format=levanter.TextLmDatasetFormat(text_key="body"))
    assert isinstance(source, levanter.LmDatasetSourceConfigBase)
    assert isinstance(source.format, levanter.LmDatasetFormatBase)
    with pytest.raises(actshard.MissingExtraError, match="requires Levanter"):
        levanter.NamedLmDataset(None, 3)

    class Own(levanter.LmDatasetFormatBase):
        """A third-party format."""

    rows = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(actshard.ArgumentError, match="found Own"):
        tokens.build_cache(rows, tmp_path / "c", str(GOLDEN / LLAMA), Own())


def test_a_configuration_trains_as_the_one_of_tokens_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(GOLDEN)
    components = {
        "web": levanter.DatasetComponent(
            levanter.UrlDatasetSourceConfig(train_urls=["text_gpt2style_single/train.jsonl"]), pack=True
        )
    }
    given: dict[str, Any] = {"tokenizer": GPT2, "cache_dir": str(tmp_path / "caches"), "components": components}
    config = levanter.LmDataConfig(**given)
    caches = config.build_caches("train")
    assert [len(cache) for cache in caches.values()] == [50]
    ours = tokens.LmDataConfig(**given, loss_mask_padding=False).train_set(64, 8, key=3).get_batch(range(16))
    made = asyncio.run(config.train_set(Axis64(), 8, key=3).get_batch(range(16)))
    assert np.array_equal(np.stack([e.tokens for e in made]), ours.tokens)
    assert np.array_equal(np.stack([e.loss_weight for e in made]), ours.loss_weight)
    dataset = levanter.dataset_for_component(
        components["web"], Axis64(), caches["web"], eos_id=0, block_cross_document_attention=True
    )
    assert np.array_equal(
        np.stack([e.tokens for e in batch(dataset)]),
        np.stack([e.tokens for e in batch(levanter.PackedTokenDataset(caches["web"], 64))]),
    )
    held = levanter.load_lm_dataset_cache(tmp_path / "caches/web/train", levanter.TextLmDatasetFormat(), GPT2)
    assert levanter.cached_token_count(held.cache.path) == held.flat_field_length("input_ids")
    with pytest.raises(actshard.ExistsError, match="append_eos"):
        levanter.load_lm_dataset_cache(held.cache.path, levanter.TextLmDatasetFormat(), GPT2, enforce_eos=False)
    again = levanter.build_lm_dataset_cache(
        tmp_path / "again", ["text_gpt2style_single/train.jsonl"], levanter.TextLmDatasetFormat(), GPT2
    )
    assert np.array_equal(again.cache.view("input_ids").elements(), held.cache.view("input_ids").elements())


class Axis64:
    """Has the attributes of a haliax axis."""

    size = 64


def test_format_objects_of_levanter_are_understood(tmp_path: Path) -> None:
    """Levanter's own dataclasses with the same fields: known ones are converted, others are errors."""

    @dataclass(frozen=True)
    class TextLmDatasetFormat:
        text_key: str = "text"

    @dataclass(frozen=True)
    class PrebuiltLmDatasetFormat:
        input_ids_key: str = "input_ids"
        something_new: bool = False

    rows = write_lines(tmp_path / "a.jsonl", [{"body": "one"}])
    made = tokens.build_cache(rows, tmp_path / "c", str(GOLDEN / LLAMA), TextLmDatasetFormat("body"))
    assert len(made) == 1
    rows = write_lines(tmp_path / "b.jsonl", [{"ids": [1, 2]}])
    assert len(tokens.build_cache(rows, tmp_path / "d", format=PrebuiltLmDatasetFormat("ids"))) == 1
    with pytest.raises(actshard.ArgumentError, match="something_new is not supported"):
        tokens.build_cache(rows, tmp_path / "e", format=PrebuiltLmDatasetFormat("ids", True))
    with pytest.raises(TypeError, match="found object"):
        tokens.build_cache(rows, tmp_path / "e", format=object())


def test_a_transform_is_given_a_row(tmp_path: Path) -> None:
    """As in Levanter: the transform loss_weight_transform: expected shape does not depend on its batch."""
    with tokens.CacheWriter(tmp_path / "c", {"input_ids": np.int32, "w": np.float32}) as writer:
        writer.append([{"input_ids": [1, 2, 3], "w": [1, 2, 4]}, {"input_ids": [4, 5, 6], "w": [10, 5, -1]}])
    cache = levanter.TreeCache.load(tmp_path / "c")

    def read(transform: Any, indices: list[int]) -> list[list[float]]:
        dataset = levanter.PrebuiltLmDataset(
            cache, 3, input_ids_key="input_ids", loss_weights_key="w", loss_weight_transform=transform
        )
        return [e.loss_weight.tolist() for e in asyncio.run(dataset.get_batch(indices))]

    assert read(lambda w: w / w.max(), [0, 1]) == [[0.25, 0.5, 0], [1, 0.5, 0]]
    assert read(lambda w: w / w.max(), [0]) == [[0.25, 0.5, 0]]
    assert read(lambda w: w * (np.arange(len(w)) > 0), [0, 1]) == [[0, 2, 0], [0, 5, 0]]
    assert not np.signbit(read(None, [1])[0][-1])
    with pytest.raises(actshard.ArgumentError, match="loss_weight_transform: expected shape"):
        read(lambda w: w[:2], [0])


def test_members_of_a_tree_cache() -> None:
    cache = levanter.TreeCache.load(GOLDEN / "text_gpt2style_single" / "cache" / "train")
    assert (cache.is_finished, cache.is_sharded) == (True, False)
    assert levanter.TreeCache.load(GOLDEN / "text_llama3style_sharded" / "cache").is_sharded
    assert cache.flat_field_num_rows("input_ids") == len(cache) == 50
    assert len(levanter.TreeCache.build_or_load(cache.cache.path, None, None)) == 50
    with pytest.raises(actshard.MissingExtraError, match="require Levanter"):
        cache.jagged_array_tree()
    windows = levanter.TokenSeqDataset(cache, 64)
    (one,) = asyncio.run(windows.get_batch([2]))
    assert one["input_ids"].dtype == cache.cache.dtype("input_ids") == np.int64
    assert np.array_equal(one["input_ids"], windows.windows.get_batch([2])[0])
    for dataset in (cache, windows):
        for wrong in (-1, 1 << 40):
            with pytest.raises(IndexError):
                asyncio.run(dataset.get_batch([wrong]))
