"""The files of an ActivationCache: shards of each submodule, tokens, and starts of sequences.

.. code-block:: text

    <root>/<model>/<dataset>/<split>/
      tokens.pt                 int64 (N,)
      sequence_ranges.pt        int64 (n + 1,): first tokens; only for tokenizers without a BOS token
      layer_13_out/             one folder per submodule
        config.json             written last: shard_count, total_size, shuffle_shards, context_len, ...
        shard_0.memmap          rows (n_0, d_model), raw; bfloat16 as int16
        shard_0.meta            {"shape": [n_0, d_model], "dtype": "torch.bfloat16"}; float32 without "dtype"

Source: jkminder/dictionary_learning 48debb2, dictionary_learning/cache.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import StoredArray
from actshard.base._arguments import name_of, numpy_type
from actshard.base._json import Fields, read_json, show
from actshard.base.containers import read_torch
from actshard.base.errors import ActshardError, FormatError, MissingFileError, UnfinishedError, UnsupportedError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location

CONFIG, TOKENS, RANGES = "config.json", "tokens.pt", "sequence_ranges.pt"
_FOLDER = re.compile(r"(.+)_(in|out)")
_LAYER = re.compile(r"layer_(0|[1-9][0-9]{0,8})_(?:in|out)")
_MOST_SHARDS = 1 << 20
_PIECE = 1 << 20
"""Tokens that are read at once."""


def is_submodule(path: Location) -> bool:
    """Whether a folder has the configuration or the shards of a submodule."""
    if _FOLDER.fullmatch(path.name) is None:
        return False
    config = path / CONFIG
    if config.kind() != "file":
        return all((path / name).kind() == "file" for name in ("shard_0.memmap", "shard_0.meta"))
    try:
        value = read_json(config)
    except ActshardError:
        return (path / "shard_0.memmap").kind() == "file"  # open() raises an error that explains it
    return isinstance(value, dict) and {"shard_size", "d_model", "io"} <= value.keys()


def submodules(path: Location) -> list[Location]:
    """The folders of submodules of a store, or the folder itself if it is one."""
    if is_submodule(path):
        return [path]
    entries = [entry.name for entry in path.entries() if entry.kind == "folder" and _FOLDER.fullmatch(entry.name)]
    return [path / name for name in entries if is_submodule(path / name)]


def names_of(folders: list[Location]) -> list[int | str]:
    """Names of layers: N if all folders are named ``layer_N_out``; else the folders' names."""
    matches = [_LAYER.fullmatch(folder.name) for folder in folders]
    numbers = [int(match[1]) for match in matches if match is not None]
    return [folder.name for folder in folders] if len(set(numbers)) < len(folders) else list(numbers)


@dataclass(frozen=True)
class MemmapShard:
    """A shard: its file, and its number of rows according to its .meta file."""

    path: Location
    rows: int


@dataclass(frozen=True)
class Submodule:
    """One layer: its configuration and its shards."""

    path: Location
    config: Fields
    shards: list[MemmapShard]
    d_model: int
    dtype: str

    @classmethod
    def of(cls, path: Location, faults: Faults = RAISE) -> Submodule:
        """Reads config.json and the .meta of each shard.

        Raises:
            UnfinishedError: config.json, which is written last, is missing.
            FormatError, MissingFileError, UnsupportedError: a file is damaged or missing.
        """
        if not (path / CONFIG).exists():
            raise UnfinishedError(
                f"has shards and no {CONFIG}, which is written last: the run is not finished, or was interrupted. Run it again",
                path=path,
            )
        config = Fields(read_json(path / CONFIG), path / CONFIG)
        count = config.integer("shard_count", minimum=0)
        if count > _MOST_SHARDS:
            raise config.error("shard_count", f"at most {_MOST_SHARDS}")
        width = config.integer("d_model")
        described = [path / f"shard_{number}.meta" for number in range(count)]
        shapes = faults.batch(described, lambda batch: [_meta(meta, width) for meta in batch])
        first = shapes[0][1] if shapes else "F32"
        for meta, (_, dtype) in zip(described, shapes, strict=True):
            if dtype != first:
                raise FormatError(f"expected {first}, the dtype of the shards before, found {dtype}", path=meta)
        shards = [MemmapShard(path / f"shard_{number}.memmap", rows) for number, (rows, _) in enumerate(shapes)]
        return cls(path, config, shards, width, first)

    @property
    def rows(self) -> list[int]:
        """Rows of each shard."""
        return [shard.rows for shard in self.shards]

    @property
    def is_shuffled(self) -> bool:
        """Whether the rows of each shard were permuted, differently for each layer."""
        return self.config.value.get("shuffle_shards") is True


def _meta(path: Location, width: int) -> tuple[int, str]:
    if not path.exists():
        raise MissingFileError(
            "expected the .meta of a shard, which is written after it, found nothing: the run was interrupted",
            path=path,
        )
    fields = Fields(read_json(path), path)
    shape = fields.value.get("shape")
    sizes = [n for n in shape if type(n) is int] if isinstance(shape, list) else []
    if len(sizes) != 2 or not isinstance(shape, list) or len(shape) != 2 or not 0 <= sizes[0] < 1 << 40:
        raise fields.error("shape", "[rows, d_model]")
    if sizes[1] != width:
        raise fields.error("shape", f"[rows, {width}], as in {CONFIG},")
    name = fields.value.get("dtype", "torch.float32")
    try:
        if not isinstance(name, str):
            raise UnsupportedError("no text")
        dtype = name_of(numpy_type(name.removeprefix("torch."), "dtype "))
    except ActshardError as error:
        raise UnsupportedError(f"field 'dtype': expected a dtype of torch, found {show(name)}", path=path) from error
    return sizes[0], dtype


@dataclass(frozen=True)
class TokenFile:
    """``tokens.pt`` or ``sequence_ranges.pt``: integers in a file, read in pieces."""

    path: Location
    array: StoredArray

    @classmethod
    def of(cls, path: Location) -> TokenFile:
        """Finds the tensor.

        Raises:
            FormatError: the file has no int64 tensor of one axis.
        """
        (file,) = read_torch([path])
        value: Any = file.value
        sound = isinstance(value, StoredArray) and value.dtype == "I64" and len(value.shape) == 1
        if not sound or (value.shape[0] > 1 and value.strides[0] != 1) or value.deflated is not None:
            shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, StoredArray) else type(value).__name__
            raise FormatError(f"expected a tensor of int64 with one axis, found {shown}", path=path)
        if file.is_gzipped:
            raise UnsupportedError("expected a plain file of torch.save, found a gzipped one", path=path)
        return cls(path, value)

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def pieces(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The values in pieces, with the number of the first."""
        order = ">i8" if self.array.swapped else "<i8"
        for first in range(0, len(self), _PIECE):
            n = min(_PIECE, len(self) - first)
            yield first, np.frombuffer(self.path.read(self.array.offset + 8 * first, 8 * n), order).astype(np.int64)

    def values(self) -> NDArray[np.int64]:
        """All values."""
        return np.concatenate([np.zeros(0, np.int64), *(piece for _, piece in self.pieces())])


def checked_ranges(values: NDArray[np.int64], total: int, path: Location) -> NDArray[np.uint64]:
    """Bounds of sequences. Raises FormatError unless they ascend from 0 to the number of rows."""
    if not len(values) or values[0] != 0 or values[-1] != total or bool((np.diff(values) < 0).any()):
        raise FormatError(
            f"expected ascending numbers from 0 to {total}, found {show(values[:4].tolist())} to {show(values[-1:].tolist())}",
            path=path,
        )
    return values.astype(np.uint64)
