"""Orders of training examples, and batches of token datasets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from actshard import tokens
from digested import GOLDEN, of_arrays

LEVANTER = GOLDEN / "levanter"
LENGTHS = (1, 2, 97, 1000, 70_001)


def _orders() -> dict[str, str]:
    made: dict[str, str] = {}
    for n in LENGTHS:
        for seed in (0, 42):
            for kind in ("feistel", "linear"):
                made[f"{kind}, {n}, seed {seed}"] = of_arrays(tokens.permutation(kind, n, seed)(np.arange(n)))
                for name, options in (
                    ("block", {}),
                    ("block", {"io_block_size": 4, "window_blocks": 3}),
                    ("era", {"era_length": 10}),
                ):
                    order = tokens.permutation(name, n, seed, perm_type=kind, **options)
                    made[f"{name} {options} of {kind}, {n}, seed {seed}"] = of_arrays(order(np.arange(n)))
    at = np.random.RandomState(16).randint(0, 1 << 40, 1000)
    for kind in ("feistel", "linear", "block"):
        made[f"{kind}, 2**40"] = of_arrays(tokens.permutation(kind, 1 << 40, [1, 2])(at))
    for arithmetic in ("exact", "float64"):
        order = tokens.permutation("linear", 8_589_934_597, 0, arithmetic=arithmetic)
        made[f"linear, {arithmetic}, 8589934597"] = of_arrays(order(at % 8_589_934_597))
    keys = [tokens.prng_key(7), *tokens.split(7, 3), tokens.fold_in(7, 11), tokens.randint30(7)]
    made["keys"] = of_arrays(*(np.array(key, np.int64) for key in keys))
    return made


def _mixtures() -> dict[str, str]:
    made: dict[str, str] = {}
    sizes = {"a": 70, "b": 31, "c": 400}
    weights: dict[str, Any] = {
        "one stage": {"a": 1, "b": 2, "c": 5},
        "two stages": [(0, {"a": 1, "b": 1, "c": 1}), (64, {"b": 0.2, "c": 0.8})],
        "none of b": {"a": 0.5, "b": 0, "c": 0.5},
    }
    for name, given in weights.items():
        for stop in ("restart", "first_exhausted", "all_exhausted"):
            for block in (16, 2048):
                if block == 2048 and name == "two stages":
                    continue
                mixture = tokens.Mixture(sizes, given, block_size=block, key=5, stop_strategy=stop)
                n = min(len(mixture), 5000) if mixture.is_finite else 5000
                made[f"{name}, {stop}, blocks of {block}"] = f"{of_arrays(*mixture.locate(np.arange(n)))}, {n}"
    return made


def _batch(batch: tokens.Batch) -> str:
    segments = () if batch.segment_ids is None else (batch.segment_ids,)
    packed = () if batch.segment_ids is None or batch.max_segments is None else (batch.thd_segment_lengths,)
    return f"{of_arrays(batch.tokens, batch.loss_weight, *segments, *packed)}, {len(batch)}"


def _examples(folder: Path) -> dict[str, Any]:
    """Datasets of Levanter's caches, by name."""
    text = tokens.open_cache(LEVANTER / "text_gpt2style_single/cache")
    sharded = tokens.open_cache(LEVANTER / "text_llama3style_sharded/cache")
    chat = tokens.open_cache(LEVANTER / "chat_llama3style/cache")
    prebuilt = tokens.open_cache(LEVANTER / "prebuilt_weights/cache")
    made: dict[str, Any] = {}
    for name, cache in (("consolidated", text), ("sharded", sharded)):
        windows = tokens.TokenSeqDataset(cache, 48)
        made[f"causal, {name}"] = tokens.CausalLmDataset(windows, eos_id=0)
        made[f"causal, {name}, not kept apart"] = tokens.CausalLmDataset(windows)
        for pack in (True, 3, False):
            for way in ("left", "right", "drop"):
                made[f"packed, {name}, {pack}, {way}"] = tokens.PackedTokenDataset(
                    cache, 200, pack=pack, slice_strategy=way
                )
        made[f"packed, {name}, as of June 2026"] = tokens.PackedTokenDataset(cache, 200, loss_mask_padding=False)
    for pack in (True, 2, "pad"):
        for masked in (True, False):
            made[f"chat, {pack}, masked {masked}"] = tokens.ChatDataset(chat, 300, pack=pack, mask_user_turns=masked)
    made["chat, together"] = tokens.ChatDataset(chat, 300, block_cross_document_attention=False)
    made["prebuilt"] = tokens.PrebuiltLmDataset(prebuilt)
    made["prebuilt, no weights, eos"] = tokens.PrebuiltLmDataset(prebuilt, loss_weights_key="", eos_id=1)
    made["prebuilt, changed"] = tokens.PrebuiltLmDataset(prebuilt, 128, loss_weight_transform=lambda w: w > 0.3)
    made["prebuilt, windows"] = tokens.CausalLmDataset(tokens.TokenSeqDataset(prebuilt, 50, "loss_weights"), eos_id=3)
    causal = made["causal, consolidated"]
    made["permuted"] = tokens.Permuted(causal, tokens.permutation("block", len(causal), 3, io_block_size=4))
    return made


CONFIG = """
data:
  tokenizer: tokenizers/bpe_llama3style
  cache_dir: caches
  shuffle: {io_block_size: 4, window_blocks: 2}
  mixture_block_size: 16
  components:
    web:
      source: {type: url, train_urls: ["text_llama3style_multishard/part{0..2}.*"],
               validation_urls: [text_llama3style_multishard/part4.jsonl.zst]}
      format: {type: text, text_key: body}
    chat:
      source: {train_urls: [chat_llama3style/train.jsonl]}
      format: {type: chat, messages_key: messages}
      pack: 4
  train_weights: {web: 0.75, chat: 0.25}
"""


def _configured(folder: Path) -> dict[str, str]:
    """Training batches of a Levanter run, from its YAML."""
    for name in ("tokenizers", "text_llama3style_multishard", "chat_llama3style"):
        shutil.copytree(LEVANTER / name, folder / name)
    (folder / "data.yaml").write_text(CONFIG)
    config = tokens.LmDataConfig.from_yaml("data.yaml")
    config.build(jobs=1)
    train = config.train_set(64, 8, key=2)
    made = {"train": _batch(train.get_batch(np.arange(100)))}
    for name, examples in config.validation_sets(64).items():
        made[f"validation, {name}"] = _batch(examples.get_batch(np.arange(len(examples))))
    return made


def found(folder: Path) -> dict[str, Any]:
    """Digests of orders, mixtures and batches."""
    batches = {}
    for name, examples in _examples(folder).items():
        n = len(examples)
        back = np.random.RandomState(17).randint(0, n, 7)
        batches[name] = f"{_batch(examples.get_batch(np.arange(n)))}; {_batch(examples.get_batch(back))}"
    return {"orders": _orders(), "mixtures": _mixtures(), "batches": batches, "configured": _configured(folder)}
