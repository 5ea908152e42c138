"""Levanter as a peer: a process that runs one job at a time and reports its time; see benches/tokens.py.

Runs in Levanter's own Python environment. The argument is the size of tensorstore's cache pool. Each line on stdin is a job in
JSON; each line on stdout is its result: seconds, and a digest of the outputs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import time
from typing import Any

import haliax as hax
import jax
import numpy as np
import tensorstore as ts
from levanter.data._prp import FeistelPermutation
from levanter.data.dataset import ListAsyncDataset
from levanter.data.packing import pack_documents
from levanter.data.sharded_datasource import UrlDataSource
from levanter.data.text import ChatLmDatasetFormat, TextLmDatasetFormat
from levanter.data.text.cache import build_lm_dataset_cache
from levanter.data.text.datasets import CausalLmDataset, ChatDataset, PackedTokenDataset, TokenSeqDataset
from levanter.store import jagged_array
from levanter.store.cache import TreeCache, write_levanter_cache
from levanter.tokenizers import load_tokenizer

EXEMPLAR = {"input_ids": np.zeros(0, np.int32)}
CHAT = {**EXEMPLAR, "assistant_masks": np.zeros(0, np.int32)}
KEPT: dict[str, Any] = {}


def digest(arrays: list[Any]) -> str:
    """Digest for comparing outputs, converted to int64 or float32."""
    made = hashlib.sha256()
    for array in map(np.asarray, arrays):
        made.update(np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int64).tobytes())
    return made.hexdigest()


def cache(path: str, chat: bool = False) -> Any:
    """Opens a cache once."""
    if path not in KEPT:
        KEPT[path] = TreeCache.load(path, CHAT if chat else EXEMPLAR)
    return KEPT[path]


def build(job: dict[str, Any]) -> tuple[float, Any]:
    """Builds a cache from one file."""
    shutil.rmtree(job["out"], ignore_errors=True)
    tokenizer = load_tokenizer(job["tokenizer"])
    form = ChatLmDatasetFormat(chat_template=job["template"]) if job.get("template") else TextLmDatasetFormat()
    began = time.perf_counter()
    build_lm_dataset_cache(job["out"], UrlDataSource([job["source"]]), form, tokenizer)
    return time.perf_counter() - began, None


def write(job: dict[str, Any]) -> tuple[float, Any]:
    """Writes tokenized rows."""
    flat = np.load(job["tokens"], mmap_mode="r")
    ends = np.load(job["ends"])
    rows = [{"input_ids": np.array(r, np.int32)} for r in np.split(flat, ends[:-1])]
    shutil.rmtree(job["out"], ignore_errors=True)
    began = time.perf_counter()
    write_levanter_cache(iter(rows), job["out"], metadata={})
    return time.perf_counter() - began, None


def loop() -> Any:
    """The event loop of all runs."""
    if "loop" not in KEPT:
        KEPT["loop"] = asyncio.new_event_loop()
    return KEPT["loop"]


def windows(job: dict[str, Any]) -> tuple[float, Any]:
    """Reads batches of windows."""
    dataset = TokenSeqDataset(cache(job["cache"]), job["length"])
    began = time.perf_counter()
    for indices in job["batches"]:
        made = loop().run_until_complete(dataset.get_batch(indices))
    return (time.perf_counter() - began) / len(job["batches"]), [m["input_ids"] for m in made]


def row(job: dict[str, Any]) -> tuple[float, Any]:
    """Reads single rows."""
    held = cache(job["cache"])
    began = time.perf_counter()
    made = [held[i] for i in job["indices"]]
    return (time.perf_counter() - began) / len(made), [m["input_ids"] for m in made]


def causal(job: dict[str, Any]) -> tuple[float, Any]:
    """Reads windows as training examples."""
    key = f"causal{job['length']}"
    if key not in KEPT:
        position = hax.Axis("position", job["length"])
        KEPT[key] = CausalLmDataset(TokenSeqDataset(cache(job["cache"]), job["length"]), position, eos_id=job["eos"])
    return examples(KEPT[key], job)


def packed(job: dict[str, Any]) -> tuple[float, Any]:
    """Reads packed documents, or conversations, as training examples."""
    key = f"packed{job['cache']}{job['length']}"
    if key not in KEPT:
        position = hax.Axis("position", job["length"])
        cls = ChatDataset if job["chat"] else PackedTokenDataset
        KEPT[key] = cls(cache(job["cache"], job["chat"]), position, max_segments_per_example=64)
    return examples(KEPT[key], job)


def examples(dataset: Any, job: dict[str, Any]) -> tuple[float, Any]:
    """Reads batches of examples."""
    began = time.perf_counter()
    for indices in job["batches"]:
        made = jax.block_until_ready(loop().run_until_complete(dataset.get_batch(indices)))
    took = (time.perf_counter() - began) / len(job["batches"])
    return took, [m.tokens for m in made] + [m.attn_mask.segment_ids[0] for m in made]


def plan(job: dict[str, Any]) -> tuple[float, Any]:
    """Assigns documents to examples."""
    lengths = np.load(job["lengths"])
    began = time.perf_counter()
    made = pack_documents(lengths, job["length"], max_segments_per_example=64, slice_strategy="left")
    took = time.perf_counter() - began
    return took, [np.array([[r.start, r.stop] for r in made])]


def feistel(job: dict[str, Any]) -> tuple[float, Any]:
    """Maps indices through the feistel permutation."""
    order = FeistelPermutation(job["n"], jax.random.PRNGKey(0))
    indices = np.arange(job["count"])
    began = time.perf_counter()
    made = order(indices)
    return time.perf_counter() - began, [made]


def block(job: dict[str, Any]) -> tuple[float, Any]:
    """Maps indices through the block shuffle."""
    order = KEPT.get("block")
    if order is None:
        dataset = ListAsyncDataset([])
        dataset.data = range(job["n"])
        order = KEPT["block"] = dataset.block_shuffle(
            io_block_size=256, window_blocks=512, key=jax.random.PRNGKey(0), perm_type="feistel"
        )
    indices = list(range(0, job["n"], job["n"] // job["count"]))[: job["count"]]
    began = time.perf_counter()
    made = loop().run_until_complete(order.get_batch(indices))
    return time.perf_counter() - began, [np.array(made)]


RUNS = {f.__name__: f for f in (build, write, windows, row, causal, packed, plan, feistel, block)}


def main() -> None:
    """Runs jobs line by line."""
    out = sys.stdout
    sys.stdout = sys.stderr
    if len(sys.argv) > 1:
        pool = {"total_bytes_limit": int(sys.argv[1])}
        jagged_array._READ_CONTEXT = ts.Context({"cache_pool": pool})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            took, made = RUNS[job["run"]](job)
            answer = {"seconds": took, "digest": None if made is None else digest(made)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
