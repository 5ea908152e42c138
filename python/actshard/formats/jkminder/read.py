"""Reads ActivationCaches: a store's folder, or the folder of one submodule. See ``files`` for the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base import layers as naming
from actshard.base._arguments import stored
from actshard.base._json import show
from actshard.base.codes import Remark
from actshard.base.errors import FormatError, UnsupportedError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.jkminder.files import (
    RANGES,
    TOKENS,
    Submodule,
    TokenFile,
    checked_ranges,
    is_submodule,
    names_of,
    submodules,
)
from actshard.formats.per_token import TokenColumns

if TYPE_CHECKING:
    import pyarrow as pa

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
