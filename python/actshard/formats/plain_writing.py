"""Writes plain folders: a .npy or .safetensors file per layer, and the layout.toml that describes them; see :mod:`.plain_folders`.

Rows are appended to activations/LAYER after space reserved for a header, which is written at the end, when the shape is known.
layout.toml is written last: without it actshard does not open the folder, and without headers no other library opens the files.
"""

from __future__ import annotations

import json
import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.errors import ArgumentError, FormatError
from actshard.base.layers import Layer
from actshard.base.work import make_folder, sync_folders, whole_file, write_bytes, write_json
from actshard.formats.plain_folders import COLUMNS, MARK, METADATA, NAME
from actshard.formats.target import (
    AllExamples,
    Block,
    Spec,
    Target,
    as_float32,
    uniform,
    without_arrow_type,
)

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER, LENGTHS, KEY = "activations", "lengths", "activations"
_TEXT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,199}")
"""Layer names that are valid file names on every system."""
LARGEST = (10**15, 10**9)
"""Upper limits of examples and tokens. Headers reserve space for their digits."""


class PlainTarget(Target):
    """Writes a folder of one kind of files."""

    suffix: ClassVar[str]
    """The suffix of files."""
    hint: ClassVar[str]
    """How to load a file, for the comment in layout.toml; ``{file}`` is its name."""
    writes_parquet = True
    format_options: ClassVar[Mapping[str, str]] = {}
    holds_named_layers = True
    splits = "layers"
    takes_shard_bytes = False
    text_column: ClassVar[str | None] = "text"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.part is not None:
            raise ArgumentError(f"part: not supported by {self.format}; write one dataset")
        if spec.shard_bytes is not None:
            raise ArgumentError(
                f"shard_bytes: not supported by {self.format}, which has one file per layer; leave it out"
            )
        self.numbered = all(isinstance(name, int) and 0 <= name < 10**18 for name in spec.layers)
        texts = [str(name) for name in spec.layers]
        for name, text in zip(spec.layers, texts, strict=True):
            if not _TEXT.fullmatch(text):
                raise ArgumentError(
                    f"layers: {self.format} names files by layer: expected numbers from 0 on, or names of letters, "
                    f"digits and _.+=@-, found {name!r}; rename it, and list the layers that stay: "
                    f"convert(layers={{{name!r}: 'name', ...}})"
                )
        self.names: list[Layer] = list(spec.layers) if self.numbered else list(texts)
        """Layer names as they are read: numbers become strings if other names are strings."""
        self._rows = 0
        """Number of rows written per layer."""
        self._dirty: set[Path] = set()

    # -- of a kind of files ----------------------------------------------------------------------------------------

    @abstractmethod
    def header(self, key: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
        """The bytes before an array. Their number must not depend on the shape."""

    @property
    def room(self) -> int:
        """Bytes before the rows."""
        assert self.dtype is not None
        return len(self.header(KEY, self.dtype, (*LARGEST, self.spec.d_model)))

    # -- settings --------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> dict[Layer, Layer]:
        return dict(zip(self.spec.layers, self.names, strict=True))

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        changed = [str(name) for name, read in self.reading.items() if name != read]
        if not changed:
            return []
        return [
            (
                "layers",
                f"{', '.join(changed)} become strings, because other layers of the dataset have strings as names",
            )
        ]

    def check_columns(self, schema: pa.Schema) -> None:

        for name, dtype in without_arrow_type(schema).items():
            raise ArgumentError(f"columns: {name!r}: parquet has no {dtype}; convert the values to float32")

    def turned(self, schema: pa.Schema) -> dict[str, str]:
        return {
            name: f"{name} is converted to float32, because parquet has no {dtype}"
            for name, dtype in without_arrow_type(schema).items()
        }

    def turn(self, table: pa.Table) -> pa.Table:
        return as_float32(table)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _path(self, layer: int) -> Path:
        name = self.spec.layers[layer]
        return self.root / FOLDER / f"{name}{self.suffix}"

    @property
    def paths(self) -> list[Path]:
        """The files, by layer."""
        return [self._path(k) for k in range(len(self.spec.layers))]

    def restore(self, states: Sequence[dict[str, object]], lengths: NDArray[np.int64]) -> None:
        self.n, self._rows = len(lengths), int(lengths[:, 0].sum())

    def forget(self, lengths: NDArray[np.int64]) -> None:
        rows = int(lengths[:, 0].sum()) if len(lengths) else 0
        for path in self.paths if self.dtype is not None else ():
            if not len(lengths):
                path.unlink(missing_ok=True)
            size = self.room + rows * self.row_bytes
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)

    def write(self, block: Block) -> None:
        tokens = uniform(block.lengths, self.format, self.spec.layers)
        make_folder(self.root / FOLDER)
        layers, size = len(self.spec.layers), self.row_bytes
        firsts = self._rows + np.cumsum(tokens) - tokens
        of_layer = np.tile(np.arange(layers), len(tokens))
        places = self.room + np.repeat(firsts, layers) * size
        sizes = np.repeat(tokens, layers) * size
        table = np.stack([np.zeros_like(sizes), block.starts.reshape(-1) * size, sizes, of_layer, places], axis=1)
        table = _runs(table[np.argsort(of_layer, kind="stable")])
        if len(table):
            self.put([block.bytes], [(path, 0) for path in self.paths], table)
            self._dirty |= set(self.paths)
        self.n += len(block)
        self._rows += int(tokens.sum())

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return sorted(self._dirty), {}

    def committed(self) -> None:
        self._dirty.clear()

    # -- finishing -------------------------------------------------------------------------------------------------

    def finish(self, examples: AllExamples) -> None:
        tokens = np.ascontiguousarray(examples.lengths[:, 0])
        same = int(tokens[0]) > 0 and bool((tokens == tokens[0]).all())
        tokens_each = int(tokens[0]) if same else None
        rows, width = int(tokens.sum()), self.spec.d_model
        shape = (rows, width) if tokens_each in (None, 1) else (len(tokens), tokens_each, width)
        assert self.dtype is not None
        header = np.frombuffer(self.header(KEY, self.dtype, shape), np.uint8)
        make_folder(self.root / FOLDER)
        self.put(
            [header], [(path, 0) for path in self.paths], [(0, 0, header.size, k, 0) for k in range(len(self.paths))]
        )
        for path in self.paths:
            file_size, size = path.stat().st_size, self.room + rows * self.row_bytes
            if file_size != size:
                raise FormatError(f"expected {size} bytes of {rows} rows, found {file_size}", path=path)
        _native.sync_files(list(self.paths))
        sync_folders([self.root / FOLDER])
        if tokens_each is None:
            counts = tokens.astype("<i8")
            write_bytes(
                self.root / f"{LENGTHS}{self.suffix}",
                self.header(LENGTHS, counts.dtype, counts.shape) + counts.tobytes(),
            )
        if examples.columns is not None:
            import pyarrow.parquet as pq

            with whole_file(self.root / COLUMNS) as file:
                pq.write_table(examples.columns, file)
        if self.spec.metadata:
            write_json(self.root / METADATA, self.spec.metadata)
        text = self.description(tokens_each, columns=examples.columns is not None)
        write_bytes(self.root / NAME, text.encode())

    def description(self, tokens_each: int | None, *, columns: bool) -> str:
        """The text of layout.toml. ``tokens_each``: tokens per example; None: examples differ."""
        name = "{layer:d}" if self.numbered else "{layer:s}"
        axes = (
            ["row", "dim"]
            if tokens_each is None
            else ["example", "dim"]
            if tokens_each == 1
            else ["example", "token", "dim"]
        )
        first = f"{FOLDER}/{self.spec.layers[0]}{self.suffix}"
        lines = [
            f"{MARK}{self.format}",
            f"# Without actshard: {self.hint.format(file=first)}",
            "version = 1",
            "",
            "[activations]",
            f'files = "{FOLDER}/{name}{self.suffix}"',
            f"axes = {json.dumps(axes)}",
            f"layers = {json.dumps(self.names)}",
            *self.more_lines(KEY),
        ]
        if tokens_each is None:
            lines += [
                "",
                "[lengths]",
                f'file = "{LENGTHS}{self.suffix}"',
                'kind = "lengths"',
                *self.more_lines(LENGTHS),
            ]
        if columns:
            lines += ["", "[[columns]]", f'file = "{COLUMNS}"']
        return "\n".join(lines) + "\n"

    def more_lines(self, key: str) -> list[str]:
        """Additional lines for a table of the description."""
        return []

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        layers, item = len(self.spec.layers), 4 if self.dtype is None else self.itemsize
        ragged = len(tokens) > 0 and not (tokens == tokens[0]).all()
        return layers, layers + 1 + ragged, layers * (128 + int(tokens.sum()) * self.spec.d_model * item)


def _runs(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Joins pieces that are adjacent in memory and in the file, and drops empty ones."""
    pieces = pieces[pieces[:, 2] > 0]
    if len(pieces) < 2:
        return pieces
    a, b = pieces[:-1], pieces[1:]
    is_start = (a[:, 3] != b[:, 3]) | (a[:, 1] + a[:, 2] != b[:, 1]) | (a[:, 4] + a[:, 2] != b[:, 4])
    first = np.flatnonzero(np.concatenate([[True], is_start]))
    runs = pieces[first]
    runs[:, 2] = np.add.reduceat(pieces[:, 2], first)
    return runs
