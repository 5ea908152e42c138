"""Files that people dump rows and tables into: HDF5, Arrow, safetensors, npy and parquet, each with its own reader."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import Engine, Row, compared, interleave
from benches.peers import SafetensorsRows
from benches.sizes import size

ROWS = size(1_000, 50)


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _dumps(rows: Any) -> Path:
    """The rows as an npy file, an HDF5 dataset and an Arrow dataset, made once."""
    folder = data.ROOT / "dumps"
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.npy").exists():
        np.save(folder / "rows.npy", rows)
    if _has("h5py") and not (folder / "rows.h5").exists():
        import h5py

        with h5py.File(folder / "rows.h5", "w") as file:
            file.create_dataset("x", data=rows)
    if _has("datasets") and not (folder / "arrow").exists():
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features({"x": datasets.List(datasets.Value("float32"), length=rows.shape[1])})
        datasets.Dataset.from_dict({"x": rows}, features=features).save_to_disk(folder / "arrow")
    return folder


def _readers(folder: Path, rows: Any) -> dict[str, Callable[[Any], Any]]:
    """Functions from indices to rows, by peer."""
    found: dict[str, Callable[[Any], Any]] = {}
    memory = np.load(folder / "rows.npy", mmap_mode="r")
    found["np.load(mmap_mode='r')"] = lambda e: memory[e]
    if _has("h5py"):
        import h5py

        dataset = h5py.File(folder / "rows.h5", "r")["x"]

        def hdf5(e: Any) -> Any:
            # h5py takes increasing indices without duplicates.
            unique, back = np.unique(e, return_inverse=True)
            return dataset[unique][back]

        found["h5py"] = hdf5
    if _has("datasets"):
        import datasets

        arrow = datasets.load_from_disk(folder / "arrow").with_format("numpy")
        found["Hugging Face datasets, numpy format"] = lambda e: np.asarray(arrow[e.tolist()]["x"])
    per = len(rows) // data.POOLED["shards"]
    slices = SafetensorsRows(data.pooled(), 7, data.POOLED["shards"])
    found["safetensors get_slice"] = lambda e: slices.rows((e // per).tolist(), (e % per).tolist())
    return found


def row_files(repeats: int) -> Iterator[Row]:
    """1,000 random rows of 16 KiB from 98 MB of float32, from the page cache."""
    store = actshard.open(data.pooled())
    rows = store.last_tokens(7)
    rng = np.random.default_rng(2)

    def indices() -> tuple[Any, ...]:
        return (rng.integers(0, len(rows), ROWS),)

    readers = _readers(_dumps(rows), rows)
    e = indices()[0]
    for name, read in readers.items():
        if not np.array_equal(np.asarray(read(e)), rows[e]):
            raise AssertionError(f"{name} differs")
    readers["actshard"] = lambda e: store.last_tokens(7, e)
    times = interleave([Engine(name, read, indices) for name, read in readers.items()], min(repeats, 11), warmup=2)
    for name in readers:
        if name != "actshard":
            target = 1.0 if name.startswith("np.load") else 5.0
            yield compared("1,000 rows (16 KiB) of a dump", "hot, fresh output", name, times, "actshard", target)


def tables(repeats: int) -> Iterator[Row]:
    """Texts and labels of a million prompts, from parquet in the page cache."""
    folder = data.large_index()
    part = next((folder / "index").glob("*.parquet"))
    names = ["text", "label"]
    import pyarrow.parquet as pq

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(folder)
    want = pq.read_table(part, columns=names)
    engines = {
        "pyarrow.read_table": lambda: pq.read_table(part, columns=names),
        "actshard": lambda: store.read_columns(names),
    }
    if _has("polars"):
        import polars

        engines["polars.read_parquet"] = lambda: polars.read_parquet(part, columns=names)
    for name, read in engines.items():
        made = read()
        for column in names:
            if made[column].to_numpy().tolist() != want[column].to_numpy().tolist():
                raise AssertionError(f"{name}: {column} differs")
    times = interleave([Engine(name, read) for name, read in engines.items()], min(repeats, 7))
    for name in engines:
        if name != "actshard":
            note = "ours reads texts as dictionaries, which bounds the memory of files that repeat a long text"
            yield compared("read 2 columns of 1,000,000 prompts", "hot", name, times, "actshard", None, note=note)
