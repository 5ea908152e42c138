"""Chunks: their names, order and tensors.

.. code-block:: text

    <cache_dir>/<hook point>/chunk-00000000.safetensors | .pt             one process
    <cache_dir>/<hook point>/shard-0-chunk-00000000.safetensors | .pt     several
      activation                    (B, T, d), (k, B, T, d) or (n, d)
      tokens                        the same without d, int64
      mask, attention_mask          as tokens, int32: 0 at padding and at BOS
    <cache_dir>/<hook point>/chunk-00000000.meta.json                     for safetensors: a list of objects; in .pt the key meta

Source: llamascopium 2.0.0b34, activation/writer.py and activation/processors/cached_activation.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import actshard._native as _native
from actshard._native import StoredArray
from actshard.base._json import read_json
from actshard.base.codes import Remark
from actshard.base.containers import read_torch
from actshard.base.errors import FormatError, MissingFileError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.numbered import SHOWN, Gap, Numbered, renumbered

ACTIVATION, TOKENS = "activation", "tokens"
PER_TOKEN = (TOKENS, "mask", "attention_mask")
_NAME = re.compile(r"(?:shard-([0-9]{1,9})-)?chunk-([0-9]{8,12})\.(safetensors|pt)")
_META = ".meta.json"
_LOOKED_AT = 256
"""Number of names in a folder that are examined to recognize it."""


def is_hook(folder: Location) -> bool:
    """Whether a folder has chunks."""
    return any(_NAME.fullmatch(entry.name) for entry in folder.first(_LOOKED_AT))


def hooks_of(path: Location) -> list[Location]:
    """The folders of hook points, sorted by the numbers in their names; or the folder itself, if it has chunks."""
    if is_hook(path):
        return [path]
    names = [entry.name for entry in path.entries() if entry.kind == "folder"]
    folders = [path / name for name in sorted(names, key=_natural)]
    return [folder for folder in folders if is_hook(folder)]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,9})", name)]


def chunks_of(hook: Location) -> tuple[dict[tuple[int, int], Location], set[str]]:
    """Chunks by shard and number, in order, and the names of files with their metadata.

    Raises:
        FormatError: two files contain the same chunk.
    """
    paths: dict[tuple[int, int], Location] = {}
    metadata: set[str] = set()
    for entry in hook.entries():
        if entry.name.endswith(_META):
            metadata.add(entry.name)
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        key = (int(match[1]) if match[1] else -1, int(match[2]))
        if key in paths:
            raise FormatError(f"{paths[key].name} and {entry.name} have the same chunk number: remove one", path=hook)
        paths[key] = hook / entry.name
    return {key: paths[key] for key in sorted(paths)}, metadata


def missing_chunks(chunks: Mapping[tuple[int, int], Location]) -> list[Remark]:
    """A warning about missing chunks. Each process numbers its chunks from 0."""

    def name(number: int, gap: Gap) -> str:
        shard, neighbor = gap.neighbor
        assert isinstance(shard, int)
        assert isinstance(neighbor, int)
        file_name = chunks[shard, neighbor].name
        match = _NAME.fullmatch(file_name)
        assert match is not None  # chunks_of found it by this pattern
        return renumbered(file_name, match.span(2), number)

    return Numbered.of(chunks, first=0).remarks(name, "chunks")


def missing_metadata(chunks: Iterable[Location], metadata: Collection[str]) -> list[Remark]:
    """A warning about chunks in safetensors without metadata, if others of the folder have a file ``metadata``."""
    names = [meta_of(chunk).name for chunk in chunks if chunk.name.endswith(".safetensors")]
    lost = [name for name in names if name not in metadata]
    if not lost or len(lost) == len(names):
        return []
    shown = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
    count = f"{len(lost)} of {len(names)} {_META} files {'is' if len(lost) == 1 else 'are'} missing"
    return [Remark("missing-file", f"{count}: {shown}. Columns from them are null")]


def meta_of(chunk: Location) -> Location:
    """The file with the metadata of a chunk in safetensors."""
    return chunk.parent / (chunk.name.removesuffix(".safetensors") + _META)


@dataclass(frozen=True)
class Chunk:
    """A parsed chunk: its arrays, and its sequences."""

    path: Location
    arrays: Mapping[str, StoredArray]
    meta: object
    """The key ``meta`` of a .pt file; for safetensors, see :meth:`objects`."""

    @property
    def leading(self) -> list[int]:
        """The shape of its tokens."""
        return list(self.arrays[TOKENS].shape)

    @property
    def examples(self) -> int:
        """Number of sequences, or of rows if the sequences were flattened."""
        return math.prod(self.leading[:-1]) if len(self.leading) > 1 else self.leading[0]

    @property
    def tokens(self) -> int:
        """Tokens of each sequence."""
        return self.leading[-1] if len(self.leading) > 1 else 1

    def check(self) -> None:
        """Raises FormatError unless the shapes of the tensors agree."""
        for name in (ACTIVATION, TOKENS):
            if name not in self.arrays:
                existing = ", ".join(self.arrays) or "nothing"
                raise FormatError(f"expected a tensor {name!r}, found {existing}", path=self.path)
        shape = self.arrays[ACTIVATION].shape
        if not 1 <= len(self.leading) <= 3 or list(shape[:-1]) != self.leading or not shape[-1]:
            raise FormatError(
                f"activation: expected the shape of tokens {self.leading} and d_model, found {list(shape)}",
                path=self.path,
            )
        for name in PER_TOKEN:
            array = self.arrays.get(name)
            if array is not None and list(array.shape) != self.leading:
                raise FormatError(
                    f"{name}: expected {self.leading} as tokens, found {list(array.shape)}", path=self.path
                )
        for name in (ACTIVATION, *PER_TOKEN):
            array = self.arrays.get(name)
            if array is not None and not _is_dense(array):
                raise UnsupportedError(
                    f"{name}: expected elements in order, found the strides {array.strides}", path=self.path
                )

    def objects(self) -> list[dict[str, object]] | None:
        """One object per sequence; None if the chunk has no objects.

        Raises:
            FormatError: the number of objects is not the number of sequences.
        """
        objects, path = self.meta, self.path
        if self.path.name.endswith(".safetensors"):
            path = meta_of(self.path)
            objects = read_json(path) if path.exists() else None
        if objects is None:
            return None
        while isinstance(objects, list) and objects and all(isinstance(record, list) for record in objects):
            objects = [inner for record in objects for inner in record]
        if not isinstance(objects, list) or not all(isinstance(record, dict) for record in objects):
            raise FormatError("meta: expected a list of objects", path=path)
        if len(objects) != self.examples:
            raise FormatError(
                f"meta: expected {self.examples} objects, one per sequence, found {len(objects)}", path=path
            )
        return objects


def _is_dense(array: StoredArray) -> bool:
    step = 1
    for n, stride in zip(array.shape[::-1], array.strides[::-1], strict=True):
        if n > 1 and stride != step:
            return False
        step *= max(n, 1)
    return True


def parsed(paths: Sequence[Location], limit: int) -> list[Chunk]:
    """Parses chunks in parallel. Reads no elements.

    Raises:
        FormatError, HeaderError, TruncatedFileError, UnsupportedError, UnsafePickleError: a chunk is damaged or unsupported.
    """
    torch = [path for path in paths if path.name.endswith(".pt")]
    plain = [path for path in paths if not path.name.endswith(".pt")]
    chunks: dict[Location, Chunk] = {}
    for path, (arrays, _) in zip(plain, _native.read_arrays(plain, "safetensors") if plain else [], strict=True):
        chunks[path] = Chunk(path, {name: array for name, array, kind in arrays if kind == "numbers"}, None)
    for file in read_torch(torch, limit) if torch else []:
        value = file.value
        if not isinstance(value, dict) or file.is_gzipped:
            raise FormatError(f"expected a dict of tensors, found {type(value).__name__}", path=file.path)
        tensors = {name: array for name, array in value.items() if isinstance(array, StoredArray)}
        chunks[file.path] = Chunk(file.path, tensors, value.get("meta"))
    for path in paths:
        chunks[path].check()
    return [chunks[path] for path in paths]


def check_same_chunks(hooks: Sequence[tuple[Location, Mapping[tuple[int, int], Location]]]) -> None:
    """Raises MissingFileError unless all hook points have the same chunks: the run was interrupted."""
    every = sorted({key for _, chunks in hooks for key in chunks})
    for folder, chunks in hooks:
        for shard, number in every:
            if (shard, number) not in chunks:
                where = f"chunk {number}" if shard < 0 else f"chunk {number} of shard {shard}"
                raise MissingFileError(
                    f"expected {where}, which other hook points have, found no file: the run is not finished, or was interrupted",
                    path=folder,
                )
