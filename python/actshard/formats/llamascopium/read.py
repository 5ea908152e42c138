"""Reads folders of chunks.

Chunks: their names, order and tensors.

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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows, StoredArray
from actshard.base import layers as naming
from actshard.base._arguments import stored
from actshard.base._json import read_json
from actshard.base.codes import Remark
from actshard.base.containers import read_torch
from actshard.base.errors import RAISE, Faults, FormatError, MissingFileError, NotStoredError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.numbered import SHOWN, Gap, Numbered, renumbered
from actshard.formats.per_token import TokenColumns
from actshard.formats.report import Report
from actshard.formats.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa


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


_LOOKED_FOR = "a folder of hook points with chunk-00000000.safetensors or .pt"
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")


def detect(path: Location) -> Evidence:
    """Checks for chunks in a folder or in its folders."""
    if path.kind() != "folder" or not path.lists:
        return Evidence(False, _LOOKED_FOR, "no folder that can be listed")
    if is_hook(path):
        return Evidence(True, _LOOKED_FOR, "chunks")
    # Listing a remote folder costs a request, so only folders named like hook points are listed.
    folders = (e for e in path.first(64) if e.kind == "folder" and ("." in e.name or not path.is_remote))
    entry = next((e for e in folders if is_hook(path / e.name)), None)
    return Evidence(entry is not None, _LOOKED_FOR, "no chunks" if entry is None else f"chunks in {entry.name}")


def rows_of(
    name: str, hooks: Sequence[Sequence[Chunk]], width: int, tokens: NDArray[np.uint32], options: Options
) -> Rows:
    """The rows of a tensor: a group per hook point, ``width`` elements each."""
    array = hooks[0][0].arrays[name]
    row = width * stored(array.dtype).itemsize
    files, starts = [], []
    for chunks in hooks:
        for chunk in chunks:
            stored_array = chunk.arrays[name]
            decoded = stored_array if stored_array.deflated is not None else None
            files.append((chunk.path, row, stored_array.swapped and decoded is None, False, decoded))
            begin = 0 if decoded is not None else stored_array.offset
            starts.append(begin + np.arange(chunk.examples, dtype=np.uint64) * np.uint64(chunk.tokens * row))
    counts = [chunk.examples for chunks in hooks for chunk in chunks]
    return _native.placed_rows(
        files,
        np.repeat(np.arange(len(files), dtype=np.uint32), counts),
        np.concatenate(starts).astype(np.uint64),
        tokens,
        num_groups=len(hooks),
        width=width,
        dtype=array.dtype,
        decoded_memory=options.decoded_memory,
        descr=stored(array.dtype),
        io=options.io,
    )


class ChunkFolder:
    """The chunks of all hook points."""

    def __init__(self, path: Location, limit: int = 1 << 30, faults: Faults = RAISE) -> None:
        self.path = path
        self.warnings: list[Remark] = []
        hooks = hooks_of(path)
        if not hooks:
            raise FormatError(f"expected {_LOOKED_FOR}, found none", path=path)
        self.names = [hook.name for hook in hooks]
        listings = [chunks_of(hook) for hook in hooks]
        every = [(hook, chunks) for hook, (chunks, _) in zip(hooks, listings, strict=True)]
        check_same_chunks(every)
        chunks, metadata = listings[0]  # the other hook points have the same chunks, and their metadata are not read
        self.warnings += missing_chunks(chunks) + missing_metadata(chunks.values(), metadata)
        paths = [path for _, chunks in every for path in chunks.values()]
        flat = faults.batch(paths, lambda batch: parsed(batch, limit))
        chunks_per_hook = len(flat) // len(hooks)
        self.hooks = [flat[i * chunks_per_hook : (i + 1) * chunks_per_hook] for i in range(len(hooks))]
        self.first = self.hooks[0]
        self._check_alike()
        self.tokens = np.concatenate([np.full(chunk.examples, chunk.tokens, np.uint32) for chunk in self.first])
        self.units = np.cumsum([0, *(chunk.examples for chunk in self.first)]).tolist()
        self.per_token = self._per_token()
        self.meta = self._meta_names()

    def _check_alike(self) -> None:
        activations = self.first[0].arrays[ACTIVATION]
        self.d_model, self.dtype = activations.shape[-1], activations.dtype
        for chunks in self.hooks:
            for chunk, same in zip(chunks, self.first, strict=True):
                array = chunk.arrays[ACTIVATION]
                if (array.shape[-1], array.dtype) != (self.d_model, self.dtype):
                    raise FormatError(
                        f"activation: expected {self.dtype} and d_model {self.d_model} as in {self.first[0].path.name} of "
                        f"{self.names[0]}, found {array.dtype} and {array.shape[-1]}",
                        path=chunk.path,
                    )
                if chunk.leading != same.leading or (len(chunk.leading) == 1) != (len(self.first[0].leading) == 1):
                    raise FormatError(
                        f"tokens: expected the shape {same.leading}, as in {self.names[0]}, found {chunk.leading}",
                        path=chunk.path,
                    )

    def _per_token(self) -> list[str]:
        """The per-token columns with an integer dtype. Others were cast to the activations' dtype, which rounds ids."""
        names: list[str] = []
        for name in PER_TOKEN:
            types = {chunk.arrays[name].dtype if name in chunk.arrays else "" for chunk in self.first}
            if len(types) > 1:
                raise FormatError(f"{name}: expected one dtype in all chunks, found {sorted(types)}", path=self.path)
            (dtype,) = types
            if dtype in _INTEGERS:
                names.append(name)
            elif dtype:
                text = (
                    f"{name} were cast to {stored(dtype)} by override_dtype, which rounds token ids: they are not read "
                    "as a column"
                )
                self.warnings.append(Remark("layout", text))
        return names

    def _meta_names(self) -> list[str]:
        objects = self.first[0].objects()
        names = dict.fromkeys(str(key) for record in objects or [] for key in record)
        return [name for name in names if name not in PER_TOKEN]

    def objects(self, names: Sequence[str], most: int) -> dict[str, list[object]]:
        """Metadata values of the first examples."""
        columns: dict[str, list[object]] = {name: [] for name in names}
        for chunk, first in zip(self.first, self.units, strict=False):
            if first >= most:
                break
            for record in chunk.objects() or [{}] * chunk.examples:
                unknown = [key for key in record if key not in self.meta and key not in PER_TOKEN]
                if unknown:
                    raise FormatError(
                        f"meta: expected the fields of the first chunk, found {unknown[0]!r}", path=chunk.path
                    )
                for name in names:
                    columns[name].append(record.get(name))
        return {name: values[:most] for name, values in columns.items()}

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        n = len(self.tokens)
        rows = {name: rows_of(name, [self.first], 1, self.tokens, options) for name in self.per_token}
        columns = TokenColumns(rows, n, self.path.place)
        counts: NDArray[np.int64] = self.tokens.astype(np.int64)

        def read(names: Sequence[str], most: int = n) -> pa.Table:
            for name in names:
                if name not in (*self.per_token, *self.meta):
                    raise NotStoredError(f"has no column {name!r}", path=self.path.place)
            stop = min(most, n)
            values = self.objects([name for name in names if name in self.meta], stop)
            described = table_of(list(values), [(values, stop)])
            if len(values) == len(names):  # a table without columns has no rows, so no column can be appended to it
                return described.select(list(names))
            table = columns.head([name for name in names if name in self.per_token], stop)
            for name in described.column_names:
                table = table.append_column(name, described[name])
            return table.select(list(names))

        same = int(counts[0]) if n and bool((counts == counts[0]).all()) else None
        files = [chunk.path.place for chunks in self.hooks for chunk in chunks]
        return Contents(
            format="llamascopium",
            path=self.path.place,
            metadata={},
            layers=naming.stored(tuple(self.names), self.path),
            d_model=self.d_model,
            dtype=stored(self.dtype),
            num_examples=n,
            token_counts=counts.copy,
            rows=rows_of(ACTIVATION, self.hooks, self.d_model, self.tokens, options),
            column_names=(*self.per_token, *self.meta),
            columns=read,
            head_columns=read,
            token_columns=tuple(self.per_token),
            files=lambda: files,
            provenance={"chunks": len(self.first), "sequences": "none" if len(self.first[0].leading) == 1 else "whole"},
            warnings=tuple(self.warnings),
            tokens_each=same,
        )


def open(path: Location, options: Options) -> Contents:
    """Reads the headers of all chunks, but no elements."""
    return ChunkFolder(path, options.decoded_memory).contents(options)


# Checks of folders of chunks


def check(root: Location, report: Report, tell: Tell) -> None:
    """Parses all chunks. Compares tokens and masks between hook points, and the number of objects with that of sequences."""
    folder = report.faults.parse(root, lambda: ChunkFolder(root, faults=report.faults))
    if folder is None:
        return
    options = Options.of(root)
    report.count("files", sum(len(chunks) for chunks in folder.hooks))
    for number, chunk in enumerate(folder.first):
        tell("chunks", number, len(folder.first))
        with report.noting(chunk.path):
            chunk.objects()
        for name in folder.per_token:
            with report.noting(chunk.path):
                values = _values(chunk, name, options)
                if name != TOKENS and values.size and not np.isin(values, (0, 1)).all():
                    report.add("mask-value", chunk.path, sorted(set(values.tolist()))[-1], "0 or 1", f"tensor '{name}'")
                for hook, chunks in zip(folder.names[1:], folder.hooks[1:], strict=True):
                    other_chunk = chunks[number]
                    if name in other_chunk.arrays and not np.array_equal(values, _values(other_chunk, name, options)):
                        report.add(
                            "claim",
                            other_chunk.path,
                            f"other values in {hook}",
                            f"the values in {folder.names[0]}",
                            f"tensor '{name}'",
                        )


def _values(chunk: Chunk, name: str, options: Options) -> NDArray[np.generic]:
    tokens = np.full(chunk.examples, chunk.tokens, np.uint32)
    rows = rows_of(name, [[chunk]], 1, tokens, options)
    values: NDArray[np.generic] = rows.gather_whole(0, np.arange(chunk.examples), None, None)
    return values.reshape(-1)
