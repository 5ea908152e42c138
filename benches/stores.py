"""The stores people have: caches of draft models, torch and numpy files, Hugging Face Arrow, memmaps of ActivationCache.

Each peer is the reader that the format's own project has. DeepSpec and jkminder/dictionary_learning are not on PyPI, and
speculators, specforge and sae-lens pin versions of torch that exclude each other: their rows appear if their modules can be
imported (``pip install --target DIR --no-deps``, or a checkout, on PYTHONPATH). All of them are asked for what they return;
tensors that are only mapped are copied once, as a batch would.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import actshard
from benches import data
from benches.measure import Engine, NotPermitted, Row, compared, drop_page_cache, in_child, interleave, median
from benches.sizes import size, turns
from benches.streams import fio_sequential

Rows = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
DRAFT = {
    "examples": size(160, 12),
    "low": size(128, 3),
    "high": size(1_024, 12),
    "d_model": size(1_024, 16),
    "layers": (3, 9, 17),
}
BUDGET = size(8_192, 40)
"""Tokens of a batch."""
ONE = 9
"""The layer whose random rows are read."""
ROWS, ITEMS = size(16_384, 64), size(256, 8)
"""Random rows of a call of ours, and of a turn of a peer that reads a file or an item for each."""


def _open(folder: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(folder, **options)


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """A dataset of the benches' folder, which `make` writes once."""
    folder = data.ROOT / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            make(Path(made) / "made")
            (Path(made) / "made").rename(folder)
    return folder


def _finite(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Rows:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _equal(ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = np.ascontiguousarray(ours), np.ascontiguousarray(theirs)
    if ours.shape != theirs.shape or not np.array_equal(ours.view(np.uint8), theirs.view(np.uint8)):
        raise AssertionError(f"{what}: outputs differ; nothing is timed before they are equal")


def _bits(tensor: Any) -> Rows:
    """A tensor as numpy sees it; torch has no numpy dtype for bfloat16."""
    import torch

    return tensor.view(torch.uint16).numpy().view(BF16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _warm(folder: Path) -> list[Path]:
    """The files of a dataset, in the page cache."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        file.read_bytes()
    return files


def _random(store: actshard.Store, count: int) -> tuple[Rows, Rows]:
    """Random examples, and a random token of each."""
    rng = np.random.default_rng(1)
    examples = rng.integers(0, len(store), count)
    return examples, rng.integers(0, np.asarray(store.token_counts)[examples])


def _draft(folder: Path) -> None:
    """160 examples of 128 to 1,024 tokens x 3 layers and "last" x 1,024 bfloat16: about 750 MB."""
    rng = np.random.default_rng(3)
    d = DRAFT["d_model"]
    with actshard.create(folder, "deepspec", layers=[*DRAFT["layers"], "last"], d_model=d, dtype="bfloat16") as writer:
        for k in rng.integers(DRAFT["low"], DRAFT["high"] + 1, DRAFT["examples"]).tolist():
            ids, mask = rng.integers(0, 32_000, k), (np.arange(k) >= k // 4).astype(np.uint8)
            states = _finite(rng, (len(DRAFT["layers"]) + 1, k, d), BF16)
            writer.append([states], columns={"input_ids": [ids], "loss_mask": [mask]})


def _drafts() -> Path:
    return _made("draft-deepspec", _draft)


def _speculators() -> Path:
    return _made("draft-speculators", lambda folder: actshard.convert(_drafts(), folder, "speculators"))


def _specforge() -> Path:
    def make(folder: Path) -> None:
        import torch

        store = _open(_drafts())
        masks, ids = (store.table[name] for name in ("loss_mask", "input_ids"))
        group = folder / "rows_0-2000"
        group.mkdir(parents=True)

        def tensor(rows: Rows) -> Any:
            return torch.from_numpy(np.array(rows).view(np.uint16)).view(torch.bfloat16)

        for i in range(len(store)):
            aux = np.concatenate([store.sequence(i, layer) for layer in DRAFT["layers"]], axis=1)
            sample = {
                "input_ids": torch.from_numpy(ids[i].values.to_numpy().astype(np.int64)),
                "loss_mask": torch.from_numpy(masks[i].values.to_numpy().astype(np.int64)),
                "aux_hidden_state": tensor(aux)[None],
                "hidden_state": tensor(store.sequence(i, "last"))[None],
            }
            torch.save(sample, group / f"data_{i}.ckpt")

    return _made("draft-specforge", make)


Item = Callable[[int], tuple[Any, Any]]
"""Auxiliary states ``(S, L * H)`` and last states ``(S, H)`` of an example, as tensors that own their bytes."""


def _draft_rows(folder: Path, peer: str, item: Item, repeats: int, names: list[Any]) -> Iterator[Row]:
    """An epoch of shuffled examples, and random rows of a layer."""
    import torch

    what = f"stores: {folder.name.partition('-')[2]}"
    _warm(folder)
    store = _open(folder)
    d, one = DRAFT["d_model"], names[DRAFT["layers"].index(ONE)]
    at = DRAFT["layers"].index(ONE) * d
    for i in range(0, len(store), 7):
        aux, last = item(i)
        for k, layer in enumerate(names[:-1]):
            _equal(store.sequence(i, layer), _bits(aux[:, k * d : (k + 1) * d].contiguous()), what)
        _equal(store.sequence(i, names[-1]), _bits(last), what)

    lengths = np.asarray(store.token_counts).tolist()

    def theirs() -> int:
        taken, auxes, lasts = 0, list[Any](), list[Any]()
        order = torch.randperm(len(store)).tolist()
        for n, i in enumerate(order):
            aux, last = item(i)
            auxes.append(aux)
            lasts.append(last)
            if n + 1 == len(order) or sum(map(len, lasts)) + lengths[order[n + 1]] > BUDGET:
                batch = torch.cat(auxes), torch.cat(lasts)
                taken += sum(part.nbytes for part in batch)
                auxes, lasts = [], []
        return taken

    def ours() -> int:
        return sum(batch.activations.nbytes for batch in store.sequences_stream("all", BUDGET, shuffle="exact"))

    if ours() != theirs():
        raise AssertionError(f"{what}: an epoch has other bytes")
    times = interleave([Engine(peer, theirs), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared(f"{what}, an epoch of examples", "hot", peer, times, "actshard", 1,
                   note=f"{theirs() / 1e6:.0f} MB, shuffled, in packed batches of at most {BUDGET} tokens")  # fmt: skip

    examples, tokens = _random(store, ROWS)
    few = list(zip(examples[:ITEMS].tolist(), tokens[:ITEMS].tolist(), strict=True))

    def their_rows() -> Any:
        return torch.stack([item(i)[0][t, at : at + d] for i, t in few])

    _equal(store.gather(one, examples[:ITEMS], tokens[:ITEMS]), _bits(their_rows()), what)
    yield _a_row(what, peer, their_rows, lambda: store.gather(one, examples, tokens), repeats)


def _a_row(what: str, peer: str, theirs: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> Row:
    """Random rows: time of one row, theirs of ITEMS, ours of ROWS."""
    times = interleave([Engine(peer, theirs), Engine("actshard", ours)], max(3, repeats // 3))
    each = {peer: [x / ITEMS for x in times[peer]], "actshard": [x / ROWS for x in times["actshard"]]}
    return compared("  a random row", "hot", peer, each, "actshard", 5, unit=("us", 1e6),
                    note=f"theirs {ITEMS} rows, ours {ROWS} in one call")  # fmt: skip


def deepspec(repeats: int) -> Iterator[Row]:
    """DeepSpec's CacheDataset; beside it a copy of the bytes, and the disk."""
    from deepspec.data.target_cache_dataset import CacheDataset

    folder = _drafts()
    dataset = CacheDataset(str(folder))

    def item(i: int) -> tuple[Any, Any]:
        found = dataset[i]
        return found["target_hidden_states"], found["target_last_hidden_states"]

    yield from _draft_rows(folder, "CacheDataset", item, repeats, [*DRAFT["layers"], "last"])


def drafts_copy(repeats: int) -> Iterator[Row]:
    """Batches of whole examples beside a copy of the same bytes into new arrays."""
    folder = _drafts()
    shards = [x for x in _warm(folder) if x.suffix == ".bin"]
    store = _open(folder, io="mmap")
    maps = [np.memmap(x, np.uint8, "r") for x in shards]
    step = BUDGET * (len(DRAFT["layers"]) + 1) * DRAFT["d_model"] * 2

    def copied() -> int:
        kept: list[Any] = []
        for mapped in maps:
            for first in range(0, len(mapped), step):
                kept = [*kept[-2:], np.array(mapped[first : first + step])]  # a stream reads two batches ahead
        return len(kept)

    def ours() -> int:
        return sum(1 for _ in store.sequences_stream("all", BUDGET, shuffle="exact"))

    what = "stores: deepspec, batches of whole examples"
    times = interleave([Engine("np.array", copied), Engine("actshard", ours)], max(3, repeats // 2))
    yield compared(what, "hot", "a copy into new arrays", {"a copy into new arrays": times["np.array"], **times}, "actshard",
                   0.6, note=f"{sum(map(len, maps)) / 1e6:.0f} MB in {BUDGET} tokens a batch")  # fmt: skip


def drafts_cold(repeats: int) -> Iterator[Row]:
    """The same batches from a cold page cache, beside the disk. No process may have mapped the files."""
    del repeats
    folder, what = _drafts(), "stores: deepspec, batches of whole examples"
    shards = sorted(folder.glob("*.bin"))
    rates, disk = [], []
    try:
        for _ in range(turns(3)):
            drop_page_cache(shards)
            disk.append(fio_sequential(shards[0]))
            drop_page_cache(shards)
            rates.append(in_child("stores", str(folder))["rate"])
    except NotPermitted as error:
        yield Row(what, "cold", "fio, sequential", None, None, "MB/s", None, ">= 0.9x", None, str(error))
        return
    known = [x for x in disk if x is not None]
    rate, peer = median(rates), median(known) if known else None
    ratio = rate / peer if peer else None
    yield Row(what, "cold", "fio, sequential", peer, rate, "MB/s", ratio, ">= 0.9x", None if ratio is None else ratio >= 0.9,
              "1 MiB reads past the cache at depth 16")  # fmt: skip


def speculators(repeats: int) -> Iterator[Row]:
    """speculators' ArrowDataset with its transfer of files."""
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    folder = _speculators()
    dataset = ArrowDataset(
        max_len=DRAFT["high"], datapath=folder, transfer=FileTransfer(folder / "hidden_states"), on_missing="raise"
    )

    def item(i: int) -> tuple[Any, Any]:
        found = dataset[i]
        return found["hidden_states"], found["verifier_last_hidden_states"]

    yield from _draft_rows(folder, "ArrowDataset", item, repeats, list(_open(folder).layers))


def specforge(repeats: int) -> Iterator[Row]:
    """SpecForge's reader of manifests and its feature store; and torch.load alone, mapped."""
    from specforge.algorithms.eagle3.data import build_offline_reader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    folder = _specforge()
    references = build_offline_reader(str(folder), run_id="bench", ttt_length=7, max_len=DRAFT["high"]).read()
    # Their order is that of the paths as text.
    by_number = {int(Path(r.feature_store_uri).stem.partition("_")[2]): r for r in references}
    features = LocalFeatureStore(clone_on_get=True)

    def item(i: int) -> tuple[Any, Any]:
        found, lease = features.get(by_number[i])
        features.release(lease)
        return found["aux_hidden_state"][0], found["hidden_state"][0]

    yield from _draft_rows(folder, "LocalFeatureStore", item, repeats, list(_open(folder).layers))


def torch_files(repeats: int) -> Iterator[Row]:
    """The same files with torch.load(mmap=True), which every project has in its own words."""
    import torch

    folder = _specforge()

    def item(i: int) -> tuple[Any, Any]:
        path = folder / "rows_0-2000" / f"data_{i}.ckpt"
        found = torch.load(path, mmap=True, weights_only=True)
        return found["aux_hidden_state"][0].clone(), found["hidden_state"][0].clone()

    yield from _draft_rows(folder, "torch.load(mmap=True)", item, repeats, list(_open(folder).layers))


ARROW = {"examples": size(1_000, 40), "context": size(64, 4), "d_model": size(512, 16), "prompts": size(32, 8)}


def _arrow() -> Path:
    """SAELens' cache of a hook: 1,000 sequences of 64 tokens x 512 float32, 131 MB, with token ids."""

    def make(folder: Path) -> None:
        import datasets

        n, context, d = ARROW["examples"], ARROW["context"], ARROW["d_model"]
        rng = np.random.default_rng(5)
        features = datasets.Features(
            {
                "blocks.3.hook_resid_pre": datasets.Array2D((context, d), "float32"),
                "token_ids": datasets.Sequence(datasets.Value("int32"), length=context),
            }
        )
        rows = {
            "blocks.3.hook_resid_pre": _finite(rng, (n, context, d), np.float32),
            "token_ids": rng.integers(0, 1_000, (n, context)).astype(np.int32),
        }
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)

    return _made("saelens", make)


def arrow(repeats: int) -> Iterator[Row]:
    """`datasets` with the numpy format: a shuffled epoch, and random rows."""
    import datasets

    folder = _arrow()
    _warm(folder)
    store, (layer,) = _open(folder), _open(folder).layers
    rows = datasets.load_from_disk(folder).with_format("numpy", columns=[layer])
    context, d, prompts = ARROW["context"], ARROW["d_model"], ARROW["prompts"]

    def theirs() -> int:
        order = np.random.default_rng(0).permutation(len(store))
        return sum(rows[order[i : i + prompts]][layer].nbytes for i in range(0, len(store), prompts))

    def ours() -> int:
        stream = store.sequences_stream(layer, prompts * context, shuffle="exact")
        return sum(batch.activations.nbytes for batch in stream)

    some = np.random.default_rng(2).permutation(len(store))[:prompts]
    mine = store.gather(layer, some[:, None], np.arange(context))
    _equal(mine, rows[some][layer], "sequences of Arrow")
    if ours() != theirs():
        raise AssertionError("an epoch of Arrow has other bytes")
    peer = "datasets, numpy format"
    times = interleave([Engine(peer, theirs), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("stores: hf_arrow, an epoch of sequences", "hot", peer, times, "actshard", 1,
                   note=f"{ARROW['examples'] * context * d * 4 / 1e6:.0f} MB, shuffled, {prompts} sequences a batch")  # fmt: skip
    examples, tokens = _random(store, ROWS)

    def their_rows() -> Any:
        return rows[examples[:ITEMS]][layer][np.arange(ITEMS), tokens[:ITEMS]]

    _equal(store.gather(layer, examples[:ITEMS], tokens[:ITEMS]), their_rows(), "rows of Arrow")
    yield _a_row("", peer, their_rows, lambda: store.gather(layer, examples, tokens), repeats)


def saelens(repeats: int) -> Iterator[Row]:
    """SAELens' ActivationsStore over a cache of activations, which it reads in stored order only."""
    import torch
    from sae_lens.training.activations_store import ActivationsStore

    folder = _arrow()
    _warm(folder)
    store, (layer,) = _open(folder), _open(folder).layers
    # Without a model, which a cache does not need: only what its reader of caches uses.
    peer = ActivationsStore.__new__(ActivationsStore)
    peer.cached_activations_path, peer.hook_name = str(folder), layer
    peer.context_size, peer.d_in = ARROW["context"], ARROW["d_model"]
    peer.device, peer.dtype, peer.store_batch_size_prompts = torch.device("cpu"), torch.float32, ARROW["prompts"]
    peer.seqpos_slice = (None,)
    peer.cached_activation_dataset = peer.load_cached_activation_dataset()
    batches = ARROW["examples"] // ARROW["prompts"]

    def theirs() -> int:
        return sum(peer.get_raw_llm_batch()[0].nbytes for _ in range(batches))

    size_of = ARROW["prompts"] * ARROW["context"]

    def ours() -> int:
        stream = store.stream(layer, size_of, tokens="all", drop_last=True)
        return sum(batch.activations.nbytes for batch in stream)

    first = next(iter(store.stream(layer, size_of, tokens="all")))
    _equal(first.activations, peer.get_raw_llm_batch()[0].numpy(), "rows of SAELens")
    peer.current_row_idx = 0
    if ours() != theirs():
        raise AssertionError("an epoch of SAELens has other bytes")
    times = interleave([Engine("ActivationsStore", theirs), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("stores: saelens, an epoch in stored order", "hot", "ActivationsStore", times, "actshard", 1)


MEMMAP = {"shards": 4, "rows": size(20_000, 300), "d_model": size(2_304, 16)}


def _memmaps() -> Path:
    """A store of ActivationCache: 80,000 rows of 2,304 bfloat16 in 4 shards, 369 MB, without tokens."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(6)
        shards, n, d = MEMMAP["shards"], MEMMAP["rows"], MEMMAP["d_model"]
        (folder / "layer_13_out").mkdir(parents=True)
        for k in range(shards):
            base = folder / "layer_13_out" / f"shard_{k}"
            _finite(rng, (n, d), BF16).tofile(f"{base}.memmap")
            Path(f"{base}.meta").write_text(json.dumps({"shape": [n, d], "dtype": "torch.bfloat16"}))
        config = {
            "batch_size": 64, "context_len": 1_024, "shard_size": n, "d_model": d, "shuffle_shards": False, "io": "out",
            "total_size": shards * n, "shard_count": shards, "store_tokens": False, "store_sequence_ranges": False,
        }  # fmt: skip
        (folder / "layer_13_out" / "config.json").write_text(json.dumps(config))

    return _made("activation-cache", make)


def memmaps(repeats: int) -> Iterator[Row]:
    """ActivationCache: rows in a random order, as its shuffled DataLoader reads them."""
    import torch
    from dictionary_learning.cache import ActivationCache

    folder = _memmaps()
    _warm(folder)
    cache, store = ActivationCache(str(folder), "layer_13_out"), _open(folder)
    (layer,), total = store.layers, MEMMAP["shards"] * MEMMAP["rows"]
    order = np.random.default_rng(0).permutation(total)
    some = order[:ITEMS].tolist()
    each = len(store) == total  # without tokens, nothing tells where a sequence begins

    def places(rows: Rows) -> tuple[Any, Any]:
        return (rows, 0) if each else (0, rows)

    def theirs() -> Any:
        return torch.stack([cache[i] for i in some])

    _equal(store.gather(layer, *places(np.array(some))), _bits(theirs()), "rows of ActivationCache")
    many = order[:ROWS]
    row = _a_row("", "ActivationCache", theirs, lambda: store.gather(layer, *places(many)), repeats)
    row.workload = "stores: jkminder, a random row"
    yield row
    step = size(4_096, 64)

    def slices() -> int:
        return sum(cache[i : i + step].nbytes for i in range(0, total, step))

    def ours() -> int:
        return sum(batch.activations.nbytes for batch in store.stream(layer, step, tokens="all"))

    if slices() != ours():
        raise AssertionError("an epoch of ActivationCache has other bytes")
    times = interleave([Engine("slices", slices), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("  an epoch in stored order", "hot", "slices", times, "actshard", 1,
                   note="a slice over the border of two shards is stacked row by row")  # fmt: skip


FILES = {"files": size(2_000, 30), "low": size(16, 2), "high": size(256, 9), "d_model": size(768, 16)}


def _arrays() -> Path:
    """2,000 .npy files of 16 to 256 tokens x 768 float16, one file per example: about 420 MB."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(7)
        folder.mkdir()
        for i in range(FILES["files"]):
            tokens = int(rng.integers(FILES["low"], FILES["high"] + 1))
            np.save(folder / f"example_{i:05}.npy", _finite(rng, (tokens, FILES["d_model"]), np.float16))
        (folder / "layout.toml").write_text(
            'version = 1\n[activations]\nfiles = "example_{example:d}.npy"\naxes = ["token", "dim"]\n'
        )

    return _made("npy-files", make)


def npy(repeats: int) -> Iterator[Row]:
    """np.load(mmap_mode="r") of one file per example."""
    folder = _arrays()
    _warm(folder)
    store = _open(folder)
    (layer,) = store.layers
    examples, tokens = _random(store, ROWS)
    few = list(zip(examples[:ITEMS].tolist(), tokens[:ITEMS].tolist(), strict=True))

    def load(i: int) -> Any:
        return np.load(folder / f"example_{i:05}.npy", mmap_mode="r")

    def theirs() -> Any:
        return np.stack([load(i)[t] for i, t in few])

    _equal(store.gather(layer, examples[:ITEMS], tokens[:ITEMS]), theirs(), "rows of npy files")
    peer = "np.load(mmap_mode)"
    row = _a_row("", peer, theirs, lambda: store.gather(layer, examples, tokens), repeats)
    row.workload = "stores: npy files, a random row"
    yield row

    def epoch() -> int:
        order = np.random.default_rng(0).permutation(len(store))
        return sum(np.array(load(i)).nbytes for i in order.tolist())

    def ours() -> int:
        return sum(batch.activations.nbytes for batch in store.sequences_stream(layer, BUDGET, shuffle="exact"))

    if epoch() != ours():
        raise AssertionError("an epoch of npy files has other bytes")
    times = interleave([Engine(peer, epoch), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("  an epoch of examples", "hot", peer, times, "actshard", 1)


def parquet(repeats: int) -> Iterator[Row]:
    """Random rows of a column of vectors: pyarrow's take of the table in memory; ours from decoded row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    n, d = size(60_000, 400), size(1_024, 16)

    def make(folder: Path) -> None:
        folder.mkdir()
        values = pa.array(_finite(np.random.default_rng(8), (n * d,), np.float32))
        column = pa.FixedSizeListArray.from_arrays(values, d)
        pq.write_table(
            pa.table({"activation_vector": column}), folder / "vectors.parquet", row_group_size=size(4_096, 64)
        )

    folder = _made("parquet-vectors", make)
    _warm(folder)
    store = _open(folder / "vectors.parquet")
    (layer,) = store.layers
    rows = np.random.default_rng(0).integers(0, n, ROWS)
    column = pq.read_table(folder / "vectors.parquet").column(0)

    def theirs() -> Any:
        return column.take(pa.array(rows)).combine_chunks().flatten().to_numpy().reshape(-1, d)

    def ours() -> Any:
        return store.gather(layer, rows, 0)

    _equal(ours(), theirs(), "rows of parquet")
    times = interleave([Engine("take", theirs), Engine("actshard", ours)], max(3, repeats // 3))
    yield compared("stores: parquet, 16,384 random rows", "hot", "take", times, "actshard", 5,
                   note="row groups are decoded: by pyarrow before the clock, by ours at the first read")  # fmt: skip


def many_files(repeats: int) -> Iterator[Row]:
    """12,000 torch files of one example each: opened for the first time, and again with the kept index."""
    import torch

    count = size(12_000, 60)

    def make(folder: Path) -> None:
        folder.mkdir()
        rng = np.random.default_rng(9)
        for i in range(count):
            rows = torch.from_numpy(_finite(rng, (int(rng.integers(2, 9)), 64), np.float16))
            torch.save({"activations": rows}, folder / f"example_{i:05}.pt")
        (folder / "layout.toml").write_text(
            'version = 1\n[activations]\nfiles = "example_{example:d}.pt"\ntensor = "activations"\naxes = ["token", "dim"]\n'
        )

    folder = _made("torch-files", make)
    _warm(folder)

    def peer() -> Any:
        return [
            torch.load(x, mmap=True, weights_only=True)["activations"].shape[0] for x in sorted(folder.glob("*.pt"))
        ]

    if list(_open(folder).token_counts) != peer():
        raise AssertionError("torch files have other lengths")
    engines = [
        Engine("torch.load(mmap=True) of each", peer),
        Engine("first", lambda: _open(folder, cache=False)),
        Engine("again", lambda: _open(folder)),
    ]
    times = interleave(engines, max(3, repeats // 3))
    first, again = median(times["first"]), median(times["again"])
    what = "stores: open 12,000 torch files"
    yield Row(what, "hot, no kept index", engines[0].name, median(times[engines[0].name]), first, "s",
              median(times[engines[0].name]) / first, "<= 10 s", first <= 10, "an index of their lengths")  # fmt: skip
    yield Row(what, "hot, again", "the first time", first, again, "s", first / again, "<= 0.2 s", again <= 0.2,
              "every file's size and times are looked at")  # fmt: skip


def big_index(repeats: int) -> Iterator[Row]:
    """A DeepSpec index of 1,000,000 samples is opened without being parsed."""
    count = size(1_000_000, 2_000)

    def make(folder: Path) -> None:
        folder.mkdir()
        h, lengths = 2, np.full(count, 3, np.uint64)
        bytes_each = lengths * np.uint64(6 + 2 * h * 2)
        starts = np.concatenate([[0], bytes_each.cumsum()[:-1]]).astype(np.uint64)
        record = np.dtype([("sample", "<u8"), ("shard", "<u4"), ("seq", "<u4"), ("at", "<u8", 5)])
        records = np.zeros(count, record)
        records["sample"], records["seq"] = np.arange(count), lengths
        steps = np.cumsum([np.zeros(count, np.uint64), lengths * 4, lengths, lengths, lengths * (2 * h)], axis=0)
        records["at"] = (starts + steps.astype(np.uint64)).T
        records.tofile(folder / "samples.idx")
        with (folder / "shard-00000.bin").open("wb") as file:
            file.truncate(int(bytes_each.sum()))
        manifest = {
            "version": 2, "num_samples": count, "num_shards": 1, "target_layer_ids": [1], "hidden_dtype": "bfloat16",
            "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56, "hidden_size": h,
            "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        }  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))

    folder = _made("deepspec-index", make)
    _warm(folder)
    if _open(folder).gather("last", count - 1, 2).shape != (1, 2):
        raise AssertionError("the last sample")
    times = interleave(
        [Engine("open", lambda: _open(folder, io="mmap")), Engine("default", lambda: _open(folder))], repeats
    )
    what = "stores: open a DeepSpec cache of 1,000,000 samples"
    for name, state in (("default", "hot"), ("open", "hot, io=mmap")):
        took = median(times[name]) * 1e3
        yield Row(what, state, "", None, took, "ms", None, "<= 50 ms", took <= 50)


def _main() -> None:
    """A cold epoch in a process of its own: bytes per second."""
    store = _open(Path(sys.argv[1]))
    began = time.perf_counter()
    taken = sum(batch.activations.nbytes for batch in store.sequences_stream("all", BUDGET, shuffle="exact"))
    print(json.dumps({"rate": taken / (time.perf_counter() - began) / 1e6}))


if __name__ == "__main__":
    _main()
