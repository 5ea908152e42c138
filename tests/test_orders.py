"""The order of a stream never changes: it depends only on the data's shape, the seed and the settings.

Each digest covers (example, token, layer) of every row of two epochs, batch by batch, of every rank in turn. If a digest changes,
users can no longer resume or repeat runs: fix the code, not the digest.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, saev_dump
from zarr_files import write_store

SHUFFLES = (None, "window", "exact")


def long_examples(folder: Path) -> actshard.Store:
    """Examples of 200 KiB each, larger than the units of a window."""
    return created(folder, "saev", np.zeros((9, 1, 100, 512), "f4"))


def many_rows(folder: Path) -> actshard.Store:
    """Too many rows for a shuffled table."""
    return created(folder, "saev", np.zeros((350, 1, 200, 1), "f4"))


def ragged(folder: Path) -> actshard.Store:
    """Examples of 0 to 40 rows of 4 KiB, so that some are larger than a unit."""
    lengths = np.random.default_rng(1).integers(0, 41, 25).astype("i4")
    return opened(write_store(folder / "s.zarr", np.zeros((25, 1, 40, 1024), "f4"), lengths, (1, 1, 40, 1024)))


def created(folder: Path, format: str, values: np.ndarray) -> actshard.Store:
    with actshard.create(folder / "d", format, layers=[3], d_model=values.shape[-1]) as writer:
        writer.append(values)
    return opened(writer.path)


def opened(path: Path) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path)


STORES: dict[str, Any] = {
    "strided": lambda _: opened(saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")),
    "table": lambda _: opened(GOLDEN / "lmprobe/fullseq_bf16"),
    "pooled table": lambda _: opened(GOLDEN / "lmprobe/pooled_f16"),
    "chunked": lambda _: opened(GOLDEN / "zarr/run_20260122_101112"),
    "grouped chunks": lambda _: opened(GOLDEN / "zarr/grouped_chunks/activations.zarr"),
    "coded": lambda _: opened(GOLDEN / "zarr/zstd/activations.zarr"),
    "pickle": lambda _: opened(GOLDEN / "pickle/mixed_compression"),
    "long examples": long_examples,
    "many rows": many_rows,
    "ragged": ragged,
}

DIGESTS: dict[str, str] = {
    "strided, None": "d2c53c6d4f7ba21add6ddf01",
    "strided, window": "31f675cef672079801963322",
    "strided, exact": "17b2b6d75ef9164dc3f238b1",
    "table, None": "44a5902f30b7f3a901576927",
    "table, window": "43779f652580bd8a06c9a1fd",
    "table, exact": "ad201bc7eccd6cfe23b1b5f1",
    "pooled table, None": "d6153a1a58fe6c51075ba04b",
    "pooled table, window": "7d54cedf180f59f3dddda1cf",
    "pooled table, exact": "168517b266dbfe409414754e",
    "chunked, None": "c180551f5fbdf7934281dfbc",
    "chunked, window": "d1f787454fc1504d2ba531ef",
    "chunked, exact": "56efeb2a13d027b11c6f1d63",
    "grouped chunks, None": "4ebabfcf1b3ac4f95ac0638e",
    "grouped chunks, window": "281ab0056a50705ce2c3723b",
    "grouped chunks, exact": "5d25f4a43c9ffd16d4ed9695",
    "coded, None": "3bb339380bdfa93b9c0cbcb9",
    "coded, window": "96680e004f278d51b050d15e",
    "coded, exact": "1b2e57eaf4dd2f6818c00e41",
    "pickle, None": "b1a696ef09f0ee6bed3efea1",
    "pickle, window": "217e69f6b51011254da45133",
    "pickle, exact": "60145848fd2dd7453b83295a",
    "long examples, None": "6fb8bd562a68c04e2a623cca",
    "long examples, window": "1546b86a92bf380637bcd496",
    "long examples, exact": "8a1ec73c4554a04bbd0621d8",
    "many rows, None": "bb55b85faa94337396872607",
    "many rows, window": "1e71a58bb2ee488bd16d2990",
    "many rows, exact": "f7c51a0ffbb9eecf64e0440d",
    "ragged, None": "9af8951659b513000b1bd38c",
    "ragged, window": "4c244da915217677c9f76228",
    "ragged, exact": "ee0f2f1944542bda2c86176e",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(STORES))
def test_orders_are_what_they_ever_were(name: str, tmp_path: Path) -> None:
    store = STORES[name](tmp_path)
    row = store.d_model * store.dtype.itemsize
    large = store.token_counts.sum() > 1000
    found = {}
    for shuffle in SHUFFLES:
        digest = hashlib.sha256()
        for rows in (17, 60, 1 << 20) if shuffle == "window" else (1,):
            if large and rows == 17:
                rows = 700  # noqa: PLW2901 -- one window of many units
            for ranks in (1, 3):
                for layers, interleave in ((store.layers[0], False), ("all", False), ("all", True)):
                    if interleave and len(store.layers) == 1 and large:
                        continue
                    memory = rows * (row * (1 if interleave or layers != "all" else len(store.layers)) + 28)
                    for rank in range(ranks):
                        stream = store.stream(
                            layers,
                            1000 if large else 5,
                            shuffle=shuffle,
                            seed=7,
                            memory=memory,
                            interleave=interleave,
                            rank=rank,
                            world_size=ranks,
                            drop_last=ranks > 1,
                        )
                        for _ in range(2):
                            for batch in stream:
                                digest.update(np.int64(len(batch)).tobytes())
                                for part in (batch.examples, batch.tokens, batch.layers):
                                    digest.update(part.astype("<i8").tobytes())
        found[f"{name}, {shuffle}"] = digest.hexdigest()[:24]
    assert found == {key: DIGESTS[key] for key in found}
