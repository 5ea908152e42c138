"""The functions of the pickle shards' published text, with the same names, arguments and results. Nothing is ever unpickled.

>>> from actshard.compat.pickle_shards import ActivationDataset, iter_activations, load_metadata, load_shard

A shard that names anything but what numpy arrays need is refused with :class:`~actshard.UnsafePickleError`. Shards are read once,
by all cores, and ``ActivationDataset`` reads rows where they lie instead of a whole shard whenever the next index is in another.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard
import actshard._native as _native
from actshard._json import Fields, read_json
from actshard.errors import ActshardWarning, FormatError, MissingExtraError, OutOfRangeError

__all__ = ["ActivationDataset", "iter_activations", "load_metadata", "load_shard"]

_LIMIT = 2 << 30
"""Bytes that any shard may inflate to, the text's largest; one whose file is larger than a sixteenth of that may inflate to sixteen
times its file."""


def load_metadata(output_dir: str | PathLike[str]) -> dict[str, Any]:
    """``metadata.json`` of a folder, as it is."""
    path = Path(output_dir) / "metadata.json"
    return Fields(read_json(path), path).value


def load_shard(shard_path: str | PathLike[str], compressed: bool = True) -> dict[str, list[dict[str, Any]]]:
    """All of a shard: for each ``layer_N`` its samples, as a stock reader would give them.

    Raises:
        UnsafePickleError: it would run or build something else; nothing of it was done.
        FormatError, MissingFileError: it is damaged, or not there.
    """
    made = _native.load_pickle_file(shard_path, compressed, _LIMIT)
    if not isinstance(made, dict):
        raise FormatError(f"expected a dict of layers, found a {type(made).__name__}", path=shard_path)
    return made


def iter_activations(output_dir: str | PathLike[str], layer_idx: int) -> Iterator[dict[str, Any]]:
    """Every sample of a layer, shard after shard: its dict, with ``activation`` and whatever was stored beside it."""
    folder, key = Path(output_dir), f"layer_{layer_idx}"
    path = folder / "metadata.json"
    for i, entry in enumerate(Fields(read_json(path), path).items("shards")):
        shard = Fields(entry.value, path, f"shards[{i}]")
        if layer_idx in shard.value.get("layers", ()):
            name = shard.text("filename")
            if Path(name).name != name or not name.isprintable():
                raise shard.error("filename", "the name of a file in this folder")
            yield from load_shard(folder / name, bool(shard.value.get("compressed"))).get(key, ())


class ActivationDataset:
    """The text's dataset: ``{"activation": (T, d_model), "sample_idx": int, "text": str}`` by number, for ``DataLoader``.

    Items are in the order of shards and of the samples in them. It keeps ``decoded_memory`` of what had to be inflated (1 GiB), so
    that a random order over compressed shards inflates each of them once as long as they fit, and ``.pkl`` shards are read row by
    row.
    ``__getitems__`` reads a whole batch at once, in parallel.

    A map-style dataset needs no base class of torch's; it pickles as its path.
    """

    def __init__(self, output_dir: str | PathLike[str], layer_idx: int, *, decoded_memory: int | str = "1GiB") -> None:
        self.output_dir = Path(output_dir)
        self.layer_idx, self.layer_key = layer_idx, f"layer_{layer_idx}"
        self.metadata = load_metadata(output_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ActshardWarning)
            self._store = actshard.open(self.output_dir, format="pickle", decoded_memory=decoded_memory)
        self._store.group_of(layer_idx)  # says which layers there are
        table = self._store.read_columns(["sample_idx", "text_preview", "layers"])
        self._examples = np.array(
            [i for i, held in enumerate(table["layers"].to_pylist()) if layer_idx in held], np.int64
        )
        self._ids, self._texts = table["sample_idx"].to_pylist(), table["text_preview"].to_pylist()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        numbers = np.asarray(indices, np.int64)
        n = len(self)
        if numbers.size and (numbers.min() < -n or numbers.max() >= n):
            raise OutOfRangeError(f"item {numbers[(numbers < -n) | (numbers >= n)][0]} is out of range: there are {n}")
        examples = self._examples[numbers]
        rows = self._sequences(examples)
        return [
            {"activation": row, "sample_idx": self._ids[e], "text": self._texts[e]}
            for row, e in zip(rows, examples.tolist(), strict=True)
        ]

    def _sequences(self, examples: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Each in the type that it is stored as, as unpickling gives it."""
        types = self._store.rows.stored_types(self._store.group_of(self.layer_idx), examples)
        if len(dict.fromkeys(types)) == 1:
            return self._store.sequences(examples, self.layer_idx, dtype=types[0])
        made: list[Any] = [None] * len(types)
        for dtype in dict.fromkeys(types):
            places = [i for i, other in enumerate(types) if other == dtype]
            for i, rows in zip(
                places, self._store.sequences(examples[places], self.layer_idx, dtype=dtype), strict=True
            ):
                made[i] = rows
        return made


def __getattr__(name: str) -> Any:
    if name == "DataLoader":  # the text imports it from torch beside its own
        try:
            from torch.utils.data import DataLoader
        except ImportError as error:
            raise MissingExtraError.of("DataLoader", "torch") from error
        return DataLoader
    raise AttributeError(name)
