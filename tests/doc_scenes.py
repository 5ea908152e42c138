"""What the blocks of documentation pages take for granted: files in the current folder, and names.

A scene is a function that makes files in an empty folder, which is the current one, and returns names.
"""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.compute
import pytest
from safetensors.numpy import save_file

import actshard
from actshard import tokens
from conftest import GOLDEN

Scene = Callable[[Path], dict[str, Any]]
Array = np.ndarray[Any, Any]


def nothing(folder: Path) -> dict[str, Any]:
    """A page that makes all that it needs."""
    return {}


def normal(*shape: int) -> Array:
    """Rows of float32."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def common(folder: Path) -> dict[str, Any]:
    """The store of pages that speak of 200 examples of 12 tokens."""
    columns = {"label": np.arange(200) % 2, "verb": [f"verb {i // 10}" for i in range(200)]}
    with actshard.create(folder / "data", "zarr", layers=[2, 5], d_model=64) as writer:
        writer.append(normal(200, 2, 12, 64), columns=columns)
    return {"store": actshard.open(folder / "data")}


def reading(folder: Path) -> dict[str, Any]:
    """The common store, and a dataset with logits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actshard.ActshardWarning)
        captured = actshard.open(GOLDEN / "lmprobe/fullseq_logits_router")
    return {**common(folder), "captured": captured}


def plans(folder: Path) -> dict[str, Any]:
    common(folder)
    return {"src": folder / "data", "dst": folder / "planned", "folder": folder}


def any_format(folder: Path) -> dict[str, Any]:
    common(folder)
    (folder / "path/to").mkdir(parents=True)
    (folder / "data").rename(folder / "path/to/dataset")
    return {}


def joining(folder: Path) -> dict[str, Any]:
    stores: dict[str, Any] = {"pc": pyarrow.compute}
    for name, format, n, columns in (
        ("a", "zarr", 200, {"label": np.arange(200) % 2}),
        ("b", "pickle", 50, {"split": ["train"] * 50}),
        ("chat", "zarr", 200, {}),
    ):
        with actshard.create(folder / name, format, layers=[2, 5], d_model=64) as writer:
            texts = {} if name == "b" else {"prompt": [f"prompt {i}" for i in range(n)]}
            writer.append(normal(n, 2, 12, 64), columns=columns | texts)
        stores[name] = actshard.open(folder / name)
    return stores


def sequences(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    with actshard.create(folder / "data", "lmprobe", layers=[2, 5], d_model=64) as writer:
        for i in range(300):
            many = 1 + 83 * i % 96
            ids, supervised = rng.integers(0, 1000, many), np.arange(many) % 10 > 4
            columns = {"label": [i % 2], "input_ids": [ids.tolist()], "loss_mask": [supervised.astype(int).tolist()]}
            writer.append([rng.normal(size=(2, many, 64)).astype(np.float16)], columns=columns)
    return {"store": actshard.open(folder / "data")}


def drafts(folder: Path, name: str = "data", examples: int = 40) -> dict[str, Any]:
    """The store and the folder that the page of draft models speaks of."""
    rng = np.random.default_rng(0)
    layers = [2, 18, 33, "last"]
    with actshard.create(folder / name, "deepspec", layers=layers, d_model=64, dtype="bfloat16") as writer:
        for i in range(examples):
            many = 3 + 5 * i % 22
            ids, mask = rng.integers(0, 1000, many).tolist(), rng.integers(0, 2, many).tolist()
            states = rng.normal(size=(4, many, 64)).astype(ml_dtypes.bfloat16)
            writer.append([states], columns={"input_ids": [ids], "loss_mask": [mask]})
    return {"store": actshard.open(folder / name), "folder": folder}


def streams(folder: Path) -> dict[str, Any]:
    """Stores with the layers and columns of the page; nearly all names of its blocks."""
    made: dict[str, Any] = {"pc": pyarrow.compute, "model": lambda rows: rows.sum(), "mask": np.arange(1000) % 3 > 0}
    for name in ("store", "web", "code"):
        with actshard.create(folder / name, "lmprobe", layers=[2, 5, 7, 11], d_model=32) as writer:
            writer.append(normal(1000, 4, 12, 32), columns={"label": np.arange(1000) % 2})
        made[name] = actshard.open(folder / name)
    with actshard.create(folder / "dump", "saev", layers=[7], d_model=32) as writer:
        writer.append(normal(20, 1, 9, 32), labels=np.arange(180).reshape(20, 9).astype(np.uint8) % 3)
    made["dump"] = actshard.open(folder / "dump")
    made |= {name: np.empty((4096, 32), np.float32) for name in "abc"}
    return made


def saev(folder: Path) -> dict[str, Any]:
    """A dump where saev writes it, under the name that the page has."""
    with actshard.create(folder / "dump", "saev", layers=[6, 13], d_model=32) as writer:
        writer.append(normal(40, 2, 9, 32))
    (dump,) = (path for path in (folder / "dump").rglob("metadata.json"))
    (folder / "saev/shards").mkdir(parents=True)
    dump.parent.rename(folder / "saev/shards/ab12cd34")
    return {}


def golden(source: str, name: str) -> Scene:
    """Golden data under the name that a page has."""

    def made(folder: Path) -> dict[str, Any]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(GOLDEN / source, folder / name, ignore=shutil.ignore_patterns("expected.*", "README.md"))
        return {}

    return made


def pickled(folder: Path) -> dict[str, Any]:
    """Pickle shards with the layer that the page names."""
    with actshard.create(folder / "extraction", "pickle", layers=[15], d_model=32) as writer:
        writer.append(normal(8, 1, 9, 32), columns={"text": [f"text {i}" for i in range(8)]})
    return {}


def batches(folder: Path) -> dict[str, Any]:
    """A model that is called on batches with texts, labels and lengths; and datasets to convert."""
    made = [
        SimpleNamespace(lengths=[5, 3], texts=["one", "two"], labels=[0, 1]),
        SimpleNamespace(lengths=[2, 6], texts=["three", "four"], labels=[1, 0]),
    ]
    with actshard.create(folder / "killed", "lmprobe", layers=[4, 8], d_model=4096) as writer:
        writer.append(normal(1, 2, 3, 4096))
    with actshard.create(folder / "source", "zarr", layers=[-1], d_model=64) as writer:
        for lengths in ([7, 9], [4, 8]):
            columns = {"prompt": ["a", "b"], "row_offset": [0, 1]}
            writer.append(normal(2, 1, 9, 64), lengths=lengths, columns=columns)
    return {
        "batches": made, "model": lambda batch: normal(2, 2, 6, 4096), "batches_from": lambda first: made,
        "rank": 0, "world_size": 1, "src": folder / "source", "dst": folder / "dst", "other": folder / "other",
        "path": folder / "planned", "states_of": lambda some: normal(len(some), 2, 3, 64),
    }  # fmt: skip


def documents(folder: Path) -> dict[str, Any]:
    """Text, a tokenizer and a configuration under the names of the page of token caches."""
    import gzip

    (folder / "data").mkdir()
    text = "".join('{"text": "' + "the farmer takes the train in the morning . " * 40 + '"}\n' for _ in range(300))
    (folder / "data/part.jsonl.gz").write_bytes(gzip.compress(text.encode(), 1))
    shutil.copytree(GOLDEN / "levanter/tokenizers/bpe_gpt2style", folder / "path/to/tokenizer")
    (folder / "data.yaml").write_text(
        "tokenizer: path/to/tokenizer\ncache_dir: caches\ncomponents:\n  web:\n    source:\n      type: url\n"
        "      train_urls: [data/*.jsonl.gz]\n    format: {type: text}\ntrain_weights: {web: 1.0}\n"
    )
    cache = tokens.build_cache("data/*.jsonl.gz", "small", "path/to/tokenizer", tokens.TextFormat())
    windows = tokens.CausalLmDataset(tokens.TokenSeqDataset(cache, 16), eos_id=1)
    return {"mixture": tokens.Mixture({"web": windows}, {"web": 1.0}, key=0)}


def deepspec_cache(folder: Path) -> dict[str, Any]:
    return drafts(folder, "deepspec_cache", 6)


def with_cache(source: str, name: str) -> Scene:
    """Golden data beside the cache that pages of draft models convert."""

    def made(folder: Path) -> dict[str, Any]:
        golden(source, name)(folder)
        states = np.zeros((4, 5, 4096), ml_dtypes.bfloat16)
        return {**deepspec_cache(folder), "states": states, "ids": [1, 2, 3, 4, 5], "mask": [0, 1, 1, 1, 1]}

    return made


def deepspec(folder: Path) -> dict[str, Any]:
    golden("draft/deepspec_v2_single", "target_cache")(folder)
    with actshard.create(folder / "activations", "lmprobe", layers=[3, 39], d_model=32) as writer:
        writer.append(normal(2, 2, 5, 32), columns={"input_ids": [[1, 2, 3, 4, 5]] * 2})
    ids = [[1, 2, 3, 4, 5]] * 2
    return {"hidden": np.zeros((2, 3, 5, 4096), ml_dtypes.bfloat16), "token_ids": ids, "masks": ids}


def hallulens(folder: Path) -> dict[str, Any]:
    store = actshard.open(GOLDEN / "hallulens_v1/full_capture/capture")
    return {"store": store, "layer": store.layers[0]}


def hf_arrow(folder: Path) -> dict[str, Any]:
    with actshard.create(folder / "source", "lmprobe", layers=[5], d_model=32) as writer:
        writer.append(normal(2, 1, 4, 32), columns={"input_ids": [[1, 2, 3, 4]] * 2})
    acts, ids = normal(2, 1, 4, 768), [[1, 2, 3, 4]] * 2
    return {
        "path": GOLDEN / "hf_arrow/saelens_f32_consolidated", "examples": [0, 1], "tokens": [0, -1],
        "batches": [None], "acts": acts, "ids": ids, "texts": ["one", "two"], "src": folder / "source",
    }  # fmt: skip


def pairs(folder: Path) -> dict[str, Any]:
    for model, name in (("tiny-base", "gemma"), ("tiny-ft", "gemma-it")):
        golden(f"jkminder/paired_bf16_bos/{model}/chat/train", f"{name}/web/train")(folder)
    return {}


def described(folder: Path) -> dict[str, Any]:
    (folder / "runs/probe").mkdir(parents=True)
    for i in range(3):
        np.save(folder / f"runs/probe/{i}.npy", normal(4 + i, 8))
    text = 'version = 1\n[activations]\nfiles = "{example:d}.npy"\naxes = ["token", "dim"]\n'
    for path in ("runs/probe/layout.toml", "probe.toml"):
        (folder / path).write_text(text)
    return {}


def plain(folder: Path) -> dict[str, Any]:
    with actshard.create(folder / "source", "lmprobe", layers=[5, -1], d_model=32) as writer:
        for many in (60, 90, 40, 70):
            writer.append([normal(2, many, 32)], columns={"text": [f"text of {many}"]})
    return {"src": folder / "source"}


def verifying(folder: Path) -> dict[str, Any]:
    common(folder)
    return {"path": folder / "data"}


def delphi_splits(folder: Path, locations: Array, values: Array, edges: list[int], tokens: Array | None) -> None:
    """Writes splits as save_splits of delphi/latents/cache.py; ``edges``: the first feature of each, and the end of the last."""
    for first, end in itertools.pairwise(edges):
        chosen = (locations[:, 2] >= first) & (locations[:, 2] < end)
        places = locations[chosen] - [0, 0, first]
        is_small = places[:, 2].max(initial=0) < 2**16 and places[:, 0].max(initial=0) < 2**16
        split = {"locations": places.astype(np.uint16 if is_small else np.uint32), "activations": values[chosen]}
        save_file(split | ({} if tokens is None else {"tokens": tokens}), folder / f"{first}_{end - 1}.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_name": "EleutherAI/pythia-160m", "ctx_len": 16}))


def sparse_latents(folder: Path) -> dict[str, Any]:
    """Two modules of delphi: 40 examples of 16 tokens, 100 features in 5 splits."""
    rng = np.random.default_rng(0)
    for module in ("layers.5", "layers.8"):
        (folder / "run/latents" / module).mkdir(parents=True)
        locations = np.argwhere(rng.random((40, 16, 100)) < 0.1)
        values = rng.random(len(locations)).astype(np.float16)
        tokens = rng.integers(0, 50_000, (40, 16))
        delphi_splits(folder / "run/latents" / module, locations, values, [0, 20, 40, 60, 80, 100], tokens)
    return {}


def torch_file(folder: Path) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    torch.save({"hidden_states": [torch.randn(4, 8) for _ in range(9)], "text": "a"}, folder / "sample_0.pt")
    return {}


def tiny_model(folder: Path) -> dict[str, Any]:
    """A GPT-2 of 3 layers with random weights, where the page loads one from the hub."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate(sorted(letters))}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    whole.save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=256, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2Model(config).save_pretrained(folder / "tiny")
    return {}


def requests(folder: Path) -> dict[str, Any]:
    """A folder of vLLM's request files."""
    shutil.copytree(GOLDEN / "draft/speculators_vllm_requests", folder / "requests")
    return {}


def prompts(folder: Path) -> dict[str, Any]:
    """The tiny model, a file of texts, and request files."""
    requests(folder)
    texts = ["the farmer takes the train", "the farmer took the train", "a child reads", "a child read"]
    lines = [json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(texts)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return tiny_model(folder)
