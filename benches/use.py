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
from actshard.streaming.rescaling import Shuffle
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


def _ragged() -> Path:
    """3,000 examples of 16 to 1,024 tokens (log-normal, median 120) x 768 float16 in one .npy file, with offsets: about 700 MB."""
    folder = data.ROOT / "sequences"
    if folder.exists():
        return folder
    rng, count = np.random.default_rng(4), size(3_000, 40)
    lengths = np.clip(rng.lognormal(np.log(size(120, 8)), 0.6, count), 1, size(1_024, 24)).astype(np.int64)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        rows = np.lib.format.open_memmap(
            Path(made) / "layer_1.npy", "w+", np.float16, (int(lengths.sum()), SHAPE["d_model"])
        )
        for first in range(0, len(rows), 50_000):
            rows[first : first + 50_000] = rng.standard_normal(rows[first : first + 50_000].shape, np.float32)
        rows.flush()
        np.save(Path(made) / "offsets.npy", np.concatenate([[0], lengths.cumsum()]))
        (Path(made) / "layout.toml").write_text(
            'version = 1\n[activations]\nfiles = "layer_{layer:d}.npy"\naxes = ["row", "dim"]\n'
            '[lengths]\nfile = "offsets.npy"\nkind = "offsets"\n'
        )
        shutil.copytree(made, folder)
    return folder


def sequences(repeats: int) -> Iterator[Row]:
    """An epoch of whole sequences: packed batches, and a DataLoader that pads them (torch's pad_sequence)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader

    folder = _ragged()
    rows, offsets = np.load(folder / "layer_1.npy", mmap_mode="r"), np.load(folder / "offsets.npy")
    rows.sum(axis=1, dtype=np.float32)  # into the page cache
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(folder, io="mmap")
    budget = size(16_384, 64)

    class Examples(torch.utils.data.Dataset[Any]):
        """One memory-mapped read per example."""

        def __len__(self) -> int:
            return len(offsets) - 1

        def __getitem__(self, i: int) -> Any:
            return torch.from_numpy(np.array(rows[offsets[i] : offsets[i + 1]]))

    def collate(examples: list[Any]) -> tuple[Any, Any]:
        return pad_sequence(examples, batch_first=True), torch.tensor([len(x) for x in examples])

    # As many sequences as fill the budget on average.
    per_batch = max(1, budget * (len(offsets) - 1) // len(rows))

    def padded(workers: int, shuffle: bool = True) -> Iterator[tuple[Any, Any]]:
        return iter(DataLoader(Examples(), per_batch, shuffle, collate_fn=collate, num_workers=workers))

    def ours(pack: bool, shuffle: Shuffle = "exact") -> Iterator[actshard.SequenceBatch]:
        return iter(store.sequences_stream(1, budget, pack=pack, shuffle=shuffle))

    theirs = [x[:n] for batch, lengths in padded(0, shuffle=False) for x, n in zip(batch, lengths, strict=True)]
    seen = {}
    for batch in ours(pack=True):
        parts = np.split(batch.activations, batch.offsets[1:-1])
        seen.update(zip(batch.examples.tolist(), parts, strict=True))
    _equal(np.concatenate([seen[i] for i in range(len(theirs))]), np.concatenate(theirs), "sequences")

    def epoch(batches: Iterator[Any]) -> int:
        return sum(1 for _ in batches)

    def copy() -> None:
        kept: list[Any] = []
        for first in range(0, len(rows) - budget + 1, budget):
            kept = [*kept[-2:], np.array(rows[first : first + budget])]  # a stream reads two batches ahead

    engines = [
        Engine("DataLoader", lambda: epoch(padded(0))),
        Engine("DataLoader, 2 workers", lambda: epoch(padded(2))),
        Engine("packed", lambda: epoch(ours(pack=True))),
        Engine("padded", lambda: epoch(ours(pack=False))),
        Engine("np.array", copy),
    ]
    times = interleave(engines, max(3, repeats // 3))
    stream = store.sequences_stream(1, budget, shuffle="exact")
    lengths = np.diff(offsets)
    waste = lengths.sum() / sum(len(x) * x.max() for x in np.array_split(lengths, len(lengths) // per_batch))
    note = f"fill {stream.fill:.3f}; the DataLoader's in stored order {waste:.2f}"
    what = "use: an epoch of whole sequences"
    yield compared(what, "hot", "DataLoader", times, "packed", 1, note=note)
    yield compared("  two workers", "hot", "DataLoader, 2 workers", times, "packed", 1)
    yield compared("  padded by length", "hot", "DataLoader", times, "padded", 1)
    yield compared("  beside a copy of the file", "hot", "np.array", times, "packed", 0.6,
                   note="stored order, a new array of 16,384 rows at a time")  # fmt: skip
