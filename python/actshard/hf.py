"""Datasets of the Hugging Face library ``datasets`` with a store's rows.

Requires datasets, which actshard does not install.

>>> rows = actshard.hf.to_dataset(store, 5)                           # a row per token: activation, example, token
>>> rows.with_format("torch")[:4096]["activation"]                    # (4096, d_model)
>>> texts = actshard.hf.to_dataset(store, 5, each="example")          # a row per example: activations, and the store's columns
>>> rows = actshard.hf.to_dataset(store, 5, file="layer5.arrow")      # larger than memory: written once, then memory-mapped

Activations are Arrow lists of ``d_model`` elements of the stored dtype, without nulls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base._columns import pick_rows
from actshard.base.errors import ArgumentError, DtypeError, ExistsError, MissingExtraError, NotStoredError, boundary
from actshard.base.layers import Layer
from actshard.streaming import Stream
from actshard.streaming.selection import Limit, Mask, Selection, Tokens

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from actshard.reading.store import Store

__all__ = ["to_dataset"]

_BLOCK = 64 << 20
"""Bytes of activations that are written to a file at a time."""
_OWN = {"token": ("activation", "example", "token"), "example": ("activations", "example")}


def to_dataset(
    store: Store,
    layer: Layer,
    *,
    each: Literal["token", "example"] = "token",
    columns: Sequence[str] | None = None,
    tokens: Tokens = "content",
    ignore_labels: Sequence[int] = (),
    keep: Mask = None,
    max_norm: Limit = None,
    min_token: int = 0,
    dtype: DTypeLike | None = None,
    file: str | os.PathLike[str] | None = None,
) -> datasets.Dataset:
    """Returns one layer as a ``datasets.Dataset``.

    Without ``file`` the dataset is in memory: a view of the mapped file if all rows of the layer are included and contiguous in it
    (see :meth:`RowArray.__array__`), else one parallel read. With ``file`` the rows are written in blocks to an Arrow file, and the
    dataset maps it; ``datasets`` passes such a dataset to its processes without copying it.

    Args:
        store: an open store.
        layer: a name from ``store.layers``.
        each: ``"token"``: a row per token, with the columns ``activation`` (``d_model`` elements), ``example`` and ``token``
            (int64). ``"example"``: a row per example, with ``activations``, a list of its tokens, and ``example``.
        columns: columns of ``store.table`` to add; each token repeats those of its example. None: all with
            ``each="example"``, none with ``each="token"``.
        tokens: which tokens, as in ``store.stream``; like the next four only with ``each="token"``. Examples are always whole.
        ignore_labels: as in ``store.stream``.
        keep: as in ``store.stream``.
        max_norm: as in ``store.stream``.
        min_token: as in ``store.stream``.
        dtype: as in ``store.gather``. bfloat16 needs ``"float32"`` (exact) or ``"float16"``: Arrow has no bfloat16.
        file: a new file, local.

    Raises:
        DtypeError: bfloat16 rows, and no ``dtype``.
        ArgumentError, NotStoredError: an argument is invalid; the store has no such column.
        ExistsError: ``file`` exists.
        MissingExtraError: datasets is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError.of("actshard.hf", "datasets") from error
    import pyarrow as pa

    if not _arguments.is_one_of(each, tuple(_OWN)):
        raise ArgumentError(f'each: expected "token" or "example", found {each!r}')
    selection = Selection(tokens, ignore_labels, keep, max_norm, min_token)
    if each == "example" and not selection.is_default:
        raise ArgumentError(
            'tokens, ignore_labels, keep, max_norm, min_token: not supported with each="example"; use store.filter for some of '
            "the examples"
        )
    rows = _ArrowRows(store, layer, each, columns, selection, dtype)
    if file is None:
        return datasets.Dataset(rows.table(0, rows.count, is_whole=True))
    path = _arguments.local_path(file)
    if path.exists():
        raise ExistsError("exists already; datasets.Dataset.from_file(...) opens it", path=path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with boundary(path, "write"):
        try:
            with pa.OSFile(str(unfinished), "wb") as out, pa.ipc.new_stream(out, rows.schema()) as writer:
                for block in rows.blocks():
                    writer.write_table(block)
            Path(unfinished).replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return datasets.Dataset.from_file(str(path))


class _ArrowRows:
    """The rows of the dataset, as Arrow tables."""

    def __init__(
        self,
        store: Store,
        layer: Layer,
        each: Literal["token", "example"],
        columns: Sequence[str] | None,
        selection: Selection,
        dtype: DTypeLike | None,
    ) -> None:
        self._acts, self._store, self._layer, self._each, self._dtype = (
            store.layer(layer, dtype=dtype),
            store,
            layer,
            each,
            dtype,
        )
        if self._acts.dtype.name not in ("float16", "float32", "float64"):
            raise DtypeError(
                f'layer {layer!r}: datasets has no type for {self._acts.dtype}. Pass dtype="float32", which is exact, or '
                'dtype="float16"',
                path=store.path,
            )
        stored = store.table
        if columns is None:
            columns = [name for name in stored.column_names if name not in _OWN[each]] if each == "example" else []
        names = _arguments.listed(columns, "columns: expected a list of columns")
        if missing := [name for name in names if name not in stored.column_names]:
            raise NotStoredError(f"no column {missing[0]!r}; the columns are {stored.column_names}", path=store.path)
        if conflicts := [name for name in names if name in _OWN[each]]:
            raise ArgumentError(f"columns: {conflicts[0]!r} is a column of activations; leave it out")
        self._columns = stored.select(names)
        # Maps row numbers to (example, token); it is never read.
        self._chosen = Stream(store, layer, 1, selection) if each == "token" else None
        self.count = len(store) if self._chosen is None else self._chosen.num_rows

    def table(self, first: int, stop: int, is_whole: bool = False) -> pa.Table:
        """Some of the rows."""
        import pyarrow as pa

        if self._chosen is None:
            values, offsets = self._acts.ragged(None if is_whole else slice(first, stop))
            examples = np.arange(first, stop)
            columns = {"activations": pa.LargeListArray.from_arrays(offsets, self._lists(values)), "example": examples}
        else:
            examples, tokens = self._chosen.locate(np.arange(first, stop))
            everything = self._acts.rows() if is_whole else None
            if first == stop:  # the store warns of empty lists
                values = np.empty((0, self._store.d_model), self._acts.dtype)
            elif everything is not None and len(everything) == stop:
                values = np.asarray(everything)
            else:
                values = self._store.gather(self._layer, examples, tokens, dtype=self._dtype)
            columns = {"activation": self._lists(values), "example": examples, "token": tokens}
        table = pa.table(columns)
        picked = (
            pick_rows(self._columns, examples) if self._chosen is not None else self._columns.slice(first, stop - first)
        )
        for name in self._columns.column_names:
            table = table.append_column(self._columns.schema.field(name), picked[name])
        return table

    def _lists(self, values: NDArray[np.generic]) -> pa.Array:
        """Rows as Arrow lists that share their memory."""
        import pyarrow as pa

        values = np.ascontiguousarray(values)  # a strided view if examples have one token each
        flat = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, pa.py_buffer(values)])
        return pa.FixedSizeListArray.from_arrays(flat, self._store.d_model)

    def schema(self) -> pa.Schema:
        return self.table(0, 0).schema

    def blocks(self) -> Iterator[pa.Table]:
        """All rows, in blocks of about 64 MiB of activations."""
        row_bytes = self._store.d_model * self._acts.itemsize
        if self._chosen is not None:
            step = max(1, _BLOCK // row_bytes)
            for first in range(0, self.count, step):
                yield self.table(first, min(first + step, self.count))
            return
        ends = np.cumsum(self._store.tokens_in(self._layer)) * row_bytes
        first = 0
        while first < self.count:
            begin = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, begin + _BLOCK, "right")))
            yield self.table(first, stop)
            first = stop
