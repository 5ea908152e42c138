"""Reads ActivationCaches: a store's folder, or the folder of one submodule.

The files of an ActivationCache: shards of each submodule, tokens, and starts of sequences.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows, StoredArray
from actshard.base import layers as naming
from actshard.base._arguments import name_of, numpy_type, stored
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.containers import read_torch
from actshard.base.errors import (
    RAISE,
    ActshardError,
    Faults,
    FormatError,
    MissingFileError,
    UnfinishedError,
    UnsupportedError,
)
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.per_token import TokenColumns
from actshard.formats.report import Report

if TYPE_CHECKING:
    import pyarrow as pa


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


_LOOKED_FOR = "a folder with folders such as layer_13_out, of shard_0.memmap and config.json"
_COLUMN = "token_ids"


def detect(path: Location) -> Evidence:
    """Checks for a submodule's shards."""
    if path.kind() != "folder" or not path.lists:
        return Evidence(False, _LOOKED_FOR, "no folder that can be listed")
    folders = submodules(path)
    if not folders:
        return Evidence(False, _LOOKED_FOR, "no such folder")
    return Evidence(True, _LOOKED_FOR, f"the submodule {folders[0].name}")


class ActivationCache:
    """The layers of a store, its tokens, and the bounds of its sequences."""

    def __init__(self, path: Location, faults: Faults = RAISE) -> None:
        self.path = path
        self.warnings: list[Remark] = []
        folders = submodules(path)
        if not folders:
            raise FormatError(f"expected {_LOOKED_FOR}, found none", path=path)
        self.store = path.parent if is_submodule(path) else path
        names = names_of(folders)
        order = sorted(range(len(folders)), key=names.__getitem__)
        self.names = [names[i] for i in order]
        self.layers = faults.batch(
            [folders[i] for i in order], lambda batch: [Submodule.of(folder, faults) for folder in batch]
        )
        self._check_alike()
        self.total = sum(self.layers[0].rows)
        self.tokens: TokenFile | None = None
        with faults.noting(self.store / TOKENS):
            self.tokens = self._tokens()
        self.sequences = ""
        self.bounds: NDArray[np.uint64] | None = None
        with faults.noting(self.store / RANGES):
            self.bounds = self._bounds()

    def _check_alike(self) -> None:
        first = self.layers[0]
        for layer in self.layers[1:]:
            for what, expected, value in (
                ("rows per shard", first.rows, layer.rows),
                ("dtype", first.dtype, layer.dtype),
                ("d_model", first.d_model, layer.d_model),
            ):
                if expected != value:
                    raise FormatError(
                        f"{what}: expected {show(expected)}, as in {first.path.name}, found {show(value)}: open the folder of "
                        "a single layer",
                        path=layer.path,
                    )
        if len(self.layers) > 1 and any(layer.is_shuffled for layer in self.layers):
            raise UnsupportedError(
                "shuffle_shards: the rows of each layer were permuted differently, so layers do not align. Open the folder of a "
                f"single layer, such as {first.path.name}",
                path=self.path,
            )

    def _tokens(self) -> TokenFile | None:
        path = self.store / TOKENS
        if self.layers[0].is_shuffled:
            return None  # tokens are in the order before the shuffle
        if not path.exists():
            self._lost(f"{TOKENS} is missing")
            return None
        tokens = TokenFile.of(path)
        if len(tokens) != self.total:
            raise FormatError(f"expected {self.total} tokens, one per row, found {len(tokens)}", path=path)
        return tokens

    def _lost(self, why: str) -> None:
        text = f"{why}: the starts of sequences are unknown. Each row is an example of one token"
        self.warnings.append(Remark("layout", text))

    def _bounds(self) -> NDArray[np.uint64] | None:
        """First row of each sequence, then the number of rows; None if this is not recorded."""
        if self.layers[0].is_shuffled:
            self._lost("shards are shuffled")
            return None
        ranges = self.store / RANGES
        if ranges.exists():
            self.sequences = RANGES
            return checked_ranges(TokenFile.of(ranges).values(), self.total, ranges)
        return None if self.tokens is None else self._by_bos(self.tokens)

    def _by_bos(self, tokens: TokenFile) -> NDArray[np.uint64] | None:
        """Bounds of sequences that begin at a BOS token. Its id is not recorded; it is the first token of every shard.

        Sequences do not cross shards, so a first token that is not BOS is detected.
        """
        positions: list[NDArray[np.int64]] = []
        bos: int | None = None
        for first, piece in tokens.pieces():
            bos = int(piece[0]) if bos is None else bos
            positions.append(np.flatnonzero(piece == bos) + first)
        starts = np.concatenate([np.zeros(0, np.int64), *positions])
        bounds = np.append(starts, self.total)
        borders = np.cumsum([0, *self.layers[0].rows])[:-1]
        borders = borders[borders < self.total]
        most = self.layers[0].config.value.get("context_len")
        longest = int(np.diff(bounds).max(initial=0))
        if not np.isin(borders, starts).all() or (type(most) is int and longest > most):
            self._lost(f"without {RANGES}, and with no token that begins every shard and every {most} tokens")
            return None
        self.sequences = f"begin at token {bos} of {TOKENS}, the first of every shard"
        return bounds.astype(np.uint64)

    def cut(self) -> tuple[int, int] | NDArray[np.uint64]:
        """Examples, for the core."""
        return (self.total, 1) if self.bounds is None else self.bounds

    def counts(self) -> NDArray[np.int64]:
        """Tokens of each example."""
        if self.bounds is None:
            return np.ones(self.total, np.int64)
        bounds = self.bounds.astype(np.int64)
        return bounds[1:] - bounds[:-1]

    def rows(self, options: Options) -> Rows | None:
        """The rows of all layers; None if there are none."""
        first = self.layers[0]
        if not self.total:
            return None
        return Rows.joined(
            [(shard.path, 0, shard.rows, False, []) for layer in self.layers for shard in layer.shards],
            self.cut(),
            void=[],
            num_groups=len(self.layers),
            width=first.d_model,
            dtype=first.dtype,
            descr=stored(first.dtype),
            io=options.io,
        )

    def columns(self, options: Options) -> TokenColumns:
        """The token ids of each example."""
        columns: dict[str, Rows] = {}
        if self.tokens is not None and self.total:
            array = self.tokens.array
            columns[_COLUMN] = Rows.joined(
                [(self.tokens.path, array.offset, self.total, array.swapped, [])],
                self.cut(),
                void=[],
                num_groups=1,
                width=1,
                dtype="I64",
                descr=np.dtype(np.int64),
                io=options.io,
            )
        return TokenColumns(columns, len(self.counts()), self.path.place)

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        rows, columns, counts = self.rows(options), self.columns(options), self.counts()
        first = self.layers[0]
        same = int(counts[0]) if len(counts) and bool((counts == counts[0]).all()) else None
        files = [shard.path.place for layer in self.layers for shard in layer.shards]

        def head(names: Sequence[str], n: int) -> pa.Table:
            return columns.head(names, n)

        provenance: dict[str, object] = {"folder": "/".join(self.store.key.split("/")[-3:])}
        if self.sequences:
            provenance["sequences"] = self.sequences
        return Contents(
            format="jkminder",
            path=self.path.place,
            metadata=first.config.value,
            layers=naming.stored(tuple(self.names), self.path) if rows is not None else (),
            d_model=first.d_model,
            dtype=stored(first.dtype),
            num_examples=len(counts),
            token_counts=counts.copy,
            rows=rows,
            column_names=columns.names,
            columns=columns.columns,
            head_columns=head,
            column_batches=columns.batches,
            example_columns=columns.some,
            token_columns=columns.names,
            files=lambda: files,
            provenance=provenance,
            warnings=tuple(self.warnings),
            tokens_each=same,
            one_row_each=True if self.bounds is None else None,
        )


def open(path: Location, options: Options) -> Contents:
    """Reads config.json, the .meta of all shards, and the bounds of sequences, but no rows."""
    return ActivationCache(path).contents(options)


# Checks of ActivationCaches


_SHARD = re.compile(r"shard_([0-9]+)\.memmap")


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks sizes of shards, totals, equal shards in all layers, tokens, and bounds of sequences."""
    cache = report.faults.parse(root, lambda: ActivationCache(root, report.faults))
    if cache is None:
        return
    for number, layer in enumerate(cache.layers):
        tell("layers", number, len(cache.layers))
        row = layer.d_model * stored(layer.dtype).itemsize
        for shard in layer.shards:
            report.count("files")
            with report.noting(shard.path):
                size, need = shard.path.regular("read").size, shard.rows * row
                report.count("bytes", size)
                if size != need:
                    code = "truncated" if size < need else "too-long"
                    report.add(code, shard.path, f"{size} bytes", f"{need}, as its .meta states")
        total = layer.config.value.get("total_size")
        if total != cache.total:
            report.add(
                "count-claim",
                layer.path / CONFIG,
                total,
                f"{cache.total}, the rows of its shards",
                "field 'total_size'",
            )
        with report.noting(layer.path):
            for entry in layer.path.entries("shard_*.memmap"):
                match = _SHARD.fullmatch(entry.name)
                if match is not None and int(match[1]) >= len(layer.shards):
                    report.add(
                        "unlisted-file",
                        layer.path / entry.name,
                        entry.name,
                        f"{len(layer.shards)} shards, as in {CONFIG}",
                    )
