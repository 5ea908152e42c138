"""Datasets as people use them: filtered streams, whole layers as arrays, rows in scikit-learn.

Each peer is what people do today with the same bytes. Outputs are compared before anything is timed.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import Engine, Row, compared, interleave
from benches.sizes import size

SHAPE = {"examples": size(2_000, 24), "layers": 2, "tokens": size(64, 5), "d_model": size(768, 32)}
LAYER = 1
BATCH = size(4_096, 16)
PARTS = size(8, 2)


def _store() -> actshard.Store:
    """2,000 examples x 2 layers x 64 tokens x 768 float32 in one shard: 786 MB, in the page cache."""
    folder = data.ROOT / "use"
    n, layers, t, d = SHAPE["examples"], SHAPE["layers"], SHAPE["tokens"], SHAPE["d_model"]
    if not folder.exists():
        rng, step = np.random.default_rng(0), size(100, 6)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            with actshard.create(
                Path(made) / "use", "saev", layers=range(layers), d_model=d, num_examples=n, tokens_per_example=t,
                max_tokens_per_shard=n * layers * t,
            ) as writer:  # fmt: skip
                for _ in range(0, n, step):
                    writer.append(rng.standard_normal((step, layers, t, d), np.float32))
            shutil.move(Path(made) / "use", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(folder, io="mmap")
    for file in store.path.glob("acts*.bin"):
        file.read_bytes()
    return store


def _memmap(store: actshard.Store) -> np.memmap[Any, Any]:
    """The shard as numpy sees it."""
    (file,) = store.path.glob("acts*.bin")
    shape = (SHAPE["examples"], SHAPE["layers"], SHAPE["tokens"], SHAPE["d_model"])
    return np.memmap(file, np.float32, "r", shape=shape)


def _equal(ours: Any, theirs: Any, what: str) -> None:
    if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
        raise AssertionError(f"{what}: outputs differ; nothing is timed before they are equal")


def filtered(repeats: int) -> Iterator[Row]:
    """The rows of the examples with label 1, in batches: a filtered store, and a filtered Hugging Face dataset of the same rows."""
    import datasets

    from actshard.hf import to_dataset

    store = _store()
    labels = np.arange(len(store)) % 4 == 1
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        rows = to_dataset(store, LAYER, file=Path(folder) / "rows.arrow")
        rows.cleanup_cache_files()

        def theirs() -> list[Any]:
            chosen = rows.filter(
                lambda examples: labels[np.asarray(examples)].tolist(), input_columns="example", batched=True,
                load_from_cache_file=False, keep_in_memory=True, batch_size=10_000,
            ).with_format("numpy", dtype=np.float32)  # fmt: skip
            return [batch["activation"] for batch in chosen.iter(BATCH)]

        def ours() -> list[Any]:
            return [batch.activations for batch in store.filter(labels).stream(LAYER, BATCH)]

        _equal(np.concatenate(ours()), np.concatenate(theirs()), "filtered rows")
        times = interleave([Engine("datasets", theirs), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("use: filter, then stream", "hot", "datasets", times, "actshard", 5,
                   note="a quarter of the examples; datasets: filter(batched=True), with_format, iter")  # fmt: skip


def as_array(repeats: int) -> Iterator[Row]:
    """A whole layer as an array."""
    store = _store()
    layer, whole = store.layer(LAYER), _memmap(store)

    def stacked() -> Any:
        return np.stack([whole[i, LAYER] for i in range(len(whole))])

    wanted = stacked()
    for found in (np.asarray(layer), np.array(layer)):
        _equal(found, wanted, "a layer")
    engines = [
        Engine("np.stack", stacked),
        Engine("asarray", lambda: np.asarray(layer)),
        Engine("array", lambda: np.array(layer)),
        Engine("np.stack, sum", lambda: stacked().sum()),
        Engine("asarray, sum", lambda: np.asarray(layer).sum()),
    ]
    times = interleave(engines, repeats)
    peer, what = "np.stack", "use: np.asarray(acts)"
    yield compared(what, "hot", peer, times, "asarray", 5, note="a view: pages are read when they are touched")
    yield compared("  and the sum of all elements", "hot", "np.stack, sum", times, "asarray, sum", 1)
    yield compared(
        "  as a copy, np.array(acts)", "hot", peer, times, "array", 1, note="peer: of a np.memmap's examples"
    )


def pca(repeats: int) -> Iterator[Row]:
    """Blocks of rows for scikit-learn's IncrementalPCA."""
    from sklearn.decomposition import IncrementalPCA

    store = _store()
    rows, whole = store.layer(LAYER).rows(), _memmap(store)
    n = len(whole) // PARTS // 4  # a part of the dataset: the fit itself takes nearly all of the time
    block = n * SHAPE["tokens"]
    components = size(8, 2)

    def by_hand() -> Any:
        fitted = IncrementalPCA(components)
        for first in range(0, n * PARTS, n):
            examples = [whole[i, LAYER] for i in range(first, first + n)]
            fitted.partial_fit(np.concatenate(examples))
        return fitted.components_

    def ours() -> Any:
        fitted = IncrementalPCA(components)
        for first in range(0, block * PARTS, block):
            fitted.partial_fit(rows[first : first + block])
        return fitted.components_

    def blocks() -> None:
        for first in range(0, block * PARTS, block):
            rows[first : first + block]

    def blocks_by_hand() -> None:
        for first in range(0, n * PARTS, n):
            np.concatenate([whole[i, LAYER] for i in range(first, first + n)])

    _equal(ours(), by_hand(), "components")
    times = interleave([Engine("a loop over examples", by_hand), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("use: IncrementalPCA of acts.rows()", "hot", "a loop over examples", times, "actshard", None,
                   note="nearly all of it is the fit, the same for both")  # fmt: skip
    times = interleave([Engine("a loop over examples", blocks_by_hand), Engine("actshard", blocks)], repeats)
    yield compared("  the blocks alone", "hot", "a loop over examples", times, "actshard", 1)
