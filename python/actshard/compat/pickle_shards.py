"""The functions of the pickle shards' published text, with the same names, arguments and results, without unpickling.

>>> from actshard.compat.pickle_shards import ActivationDataset, iter_activations, load_metadata, load_shard

A shard that references anything beyond what numpy arrays require raises :class:`~actshard.UnsafePickleError`. All cores read a
shard together, and ``ActivationDataset`` reads single rows instead of loading a whole shard when the next index is in another one.
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
from actshard.base._json import Fields, read_json
from actshard.base.errors import ActshardWarning, FormatError, MissingExtraError, OutOfRangeError

__all__ = ["ActivationDataset", "iter_activations", "load_metadata", "load_shard"]

_LIMIT = 2 << 30
"""Maximum decompressed bytes of a shard, the largest size in the text. A shard may always decompress to 16 times its file size."""


def load_metadata(output_dir: str | PathLike[str]) -> dict[str, Any]:
    """Returns the contents of a folder's ``metadata.json`` unchanged."""
    path = Path(output_dir) / "metadata.json"
    return Fields(read_json(path), path).value


def load_shard(shard_path: str | PathLike[str], compressed: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Loads a whole shard: maps each ``layer_N`` to its list of samples, as ``pickle.load`` returns them.

    Raises:
        UnsafePickleError: the pickle would execute code or build other objects; none of it was executed.
        FormatError, MissingFileError: the file is damaged or missing.
    """
    layers = _native.load_pickle_file(shard_path, compressed, _LIMIT)
    if not isinstance(layers, dict):
        raise FormatError(f"expected a dict of layers, found a {type(layers).__name__}", path=shard_path)
    return layers


def iter_activations(output_dir: str | PathLike[str], layer_idx: int) -> Iterator[dict[str, Any]]:
    """Yields the samples of a layer, shard after shard, as dicts with ``activation`` and the other stored values."""
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
    """The text's map-style dataset: ``{"activation": (T, d_model), "sample_idx": int, "text": str}`` per item.

    Items are ordered by shard and by sample within a shard. Up to ``decoded_memory`` bytes (1 GiB) of decompressed data are
    cached, so random access decompresses each shard only once while they fit. ``.pkl`` shards are read row by row.
    ``__getitems__`` reads a whole batch in parallel.

    It works with ``DataLoader`` without a torch base class, and pickles as its path.
    """

    def __init__(self, output_dir: str | PathLike[str], layer_idx: int, *, decoded_memory: int | str = "1GiB") -> None:
        self.output_dir = Path(output_dir)
        self.layer_idx, self.layer_key = layer_idx, f"layer_{layer_idx}"
        self.metadata = load_metadata(output_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ActshardWarning)
            self._store = actshard.open(self.output_dir, format="pickle", decoded_memory=decoded_memory)
        self._store.group_of(layer_idx)  # raises for an unknown layer, listing the layers
        table = self._store.read_columns(["sample_idx", "text_preview", "layers"])
        self._examples = np.array(
            [i for i, stored_layers in enumerate(table["layers"].to_pylist()) if layer_idx in stored_layers], np.int64
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
            raise OutOfRangeError(
                f"item {numbers[(numbers < -n) | (numbers >= n)][0]} is out of range: there are {n} items"
            )
        examples = self._examples[numbers]
        rows = self._sequences(examples)
        return [
            {"activation": row, "sample_idx": self._ids[e], "text": self._texts[e]}
            for row, e in zip(rows, examples.tolist(), strict=True)
        ]

    def _sequences(self, examples: NDArray[np.int64]) -> list[NDArray[np.generic]]:
        """Reads each example in its stored dtype, as unpickling would."""
        types = self._store.rows.stored_types(self._store.group_of(self.layer_idx), examples)
        if len(dict.fromkeys(types)) == 1:
            return self._store.sequences(examples, self.layer_idx, dtype=types[0])
        sequences: list[Any] = [None] * len(types)
        for dtype in dict.fromkeys(types):
            places = [i for i, stored_dtype in enumerate(types) if stored_dtype == dtype]
            for i, rows in zip(
                places, self._store.sequences(examples[places], self.layer_idx, dtype=dtype), strict=True
            ):
                sequences[i] = rows
        return sequences


def __getattr__(name: str) -> object:
    if name == "DataLoader":  # the text imports it together with its own functions
        try:
            from torch.utils.data import DataLoader
        except ImportError as error:
            raise MissingExtraError.of("DataLoader", "torch") from error
        return DataLoader
    raise AttributeError(name)
