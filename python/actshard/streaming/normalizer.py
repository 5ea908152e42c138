"""One rescaling of rows, for streams, direct reads and rows in memory, and in a file.

The file is JSON. Numbers are decimal with all their digits, so that a normalizer that was saved gives the same bits:

.. code-block:: text

    {"actshard_normalizer": 1, "layer": 5, "d_model": 768, "dtype": "float32", "center": [...], "scale": [...], "divide": null,
     "norm": null, "dataset": "1f0c...", "rows": 59740, "selection": "9ab2..."}
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import actshard._native as _native
from actshard.base import _arguments, _schema
from actshard.base._json import read_json, show
from actshard.base.errors import ArgumentError, ArgumentTypeError, DtypeError, FormatError, OverflowWarning, warn
from actshard.base.layers import Layer, plain
from actshard.base.work import as_json, write_bytes_at_once
from actshard.looking.stats import Stats

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Normalizer:
    """A rescaling of a layer's rows. :meth:`Store.normalizer` makes it; ``norm(rows)`` applies it.

    Streams (``normalize=norm``), direct reads (``store.gather(..., normalize=norm)``) and ``norm(rows)`` compute the same bits from
    the same stored rows: ``(row - center) * scale``, ``(row - center) / divide``, or ``row - center`` scaled to the L2 norm
    ``norm``. The arithmetic is float32, or float64 if the rows, the result or the dataset of :attr:`dtype` are float64, or if a
    number exceeds float32's range.

    Attributes:
        layer: the layer's name, by which rows of another layer are refused. None: not known.
        d_model: elements per row.
        dtype: dtype of the dataset's rows; float64 if they have several.
        center, scale, divide: ``(d_model,)`` float64, read-only, or None.
        norm: L2 norm of the results, or None.
        dataset: :attr:`Store.identity` of the dataset, for information.
        rows: number of rows that named statistics are of; None without any.
        selection: a digest of these rows; None without any.
    """

    layer: Layer | None
    d_model: int
    dtype: np.dtype[Any]
    center: NDArray[np.float64] | None = None
    scale: NDArray[np.float64] | None = None
    divide: NDArray[np.float64] | None = None
    norm: float | None = None
    dataset: str | None = None
    rows: int | None = None
    selection: str | None = None

    def __call__(self, rows: ArrayLike, *, dtype: DTypeLike = np.float32, out: object = None) -> NDArray[Any]:
        """Rescales rows in memory, in parallel.

        Args:
            rows: ``(..., d_model)``, as they are stored: float16, bfloat16, float32 or float64.
            dtype: dtype of the result, as in :meth:`Store.gather`.
            out: as in :meth:`Store.gather`. It must not overlap ``rows``.

        Returns:
            An array of the shape of ``rows``; a copy.

        Raises:
            ArgumentError: rows of another width.
            DtypeError: rows or a result of another dtype.
        """
        array = _arguments.as_array(rows, "rows: expected numbers")
        if array.ndim == 0 or array.shape[-1] != self.d_model:
            raise ArgumentError(f"rows: expected (..., {self.d_model}), found {array.shape}{self._source()}")
        target, name = _arguments.dtype(dtype)
        stored_rows, stored = _arguments.elements(array)
        rescaled = np.empty(array.shape, target) if out is None else out
        memory = _arguments.writable(rescaled, target, list(array.shape))
        if overflows := _native.rescale_rows(
            stored_rows, stored, memory, name, self.d_model, **self._numbers(), wide=self.is_wide
        ):
            warn(f"{overflows} finite values became infinite as {target}. Use a wider dtype=.", OverflowWarning)
        return rescaled  # type: ignore[return-value]  # the caller's own object, as gather(out=) returns it

    @property
    def is_wide(self) -> bool:
        """Whether the arithmetic is float64 because the dataset's rows are."""
        return self.dtype == np.float64

    def check(self, layer: Layer, d_model: int) -> None:
        """Raises ArgumentError unless this is a normalizer of such rows. Internal."""
        if self.layer is not None and self.layer != layer:
            raise ArgumentError(
                f"normalize: expected a normalizer of layer {plain(layer)}, found one of layer {plain(self.layer)}. Use "
                f"store.normalizer({layer!r})"
            )
        if self.d_model != d_model:
            raise ArgumentError(
                f"normalize: expected a normalizer of rows of {d_model}, found one of rows of {self.d_model}"
            )

    def without_layer(self) -> Normalizer:
        """Returns a normalizer for rows of any layer of this width."""
        return replace(self, layer=None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file. Replaces an existing one.

        Raises:
            FileAccessError: the file cannot be written.
        """
        write_bytes_at_once(_arguments.local_path(path), as_json(self._plain(), None) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Normalizer:
        """Reads a file that :meth:`save` wrote.

        Raises:
            MissingFileError, FileAccessError: there is no such file, or it cannot be read.
            FormatError: another file, or a damaged one.
        """
        file = _arguments.local_path(path)
        value = read_json(file)
        if not isinstance(value, dict) or "actshard_normalizer" not in value:
            kind = (
                f"an object with {', '.join(map(repr, list(value)[:5]))}"
                if isinstance(value, dict) and value
                else show(value)
            )
            raise FormatError(
                f"expected a file of Normalizer.save, with a field 'actshard_normalizer', found {kind}", path=file
            )
        saved = _schema.read(_Saved, value, file)
        try:
            dtype = _arguments.dtype(saved.dtype)[0]
        except DtypeError as error:
            raise FormatError(str(error), path=file) from error
        columns = {}
        for name in _COLUMNS:
            values = getattr(saved, name)
            if values is not None and len(values) != saved.d_model:
                raise FormatError(f"{name}: expected {saved.d_model} numbers, found {len(values)}", path=file)
            columns[name] = None if values is None else _arguments.shared(np.array(values, np.float64))
        if sum(value is not None for value in (saved.scale, saved.divide, saved.norm)) > 1:
            raise FormatError("expected one of scale, divide and norm", path=file)
        if saved.divide is not None and 0 in saved.divide:
            raise FormatError("divide: expected numbers other than 0, found 0", path=file)
        return cls(
            saved.layer, saved.d_model, dtype, **columns, norm=saved.norm, dataset=saved.dataset, rows=saved.rows,
            selection=saved.selection,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return self._plain() == other._plain() if isinstance(other, Normalizer) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.layer, self.d_model, self.dataset, self.selection))

    def __repr__(self) -> str:
        steps = [name for name in (*_COLUMNS, "norm") if getattr(self, name) is not None]
        return f"<actshard.Normalizer of rows of {self.d_model}{self._source()}: {', '.join(steps) or 'unchanged'}>"

    def _source(self) -> str:
        return "" if self.layer is None else f" of layer {plain(self.layer)}"

    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_COLUMNS, "norm")}

    def _plain(self) -> dict[str, object]:
        columns = {name: None if (c := getattr(self, name)) is None else c.tolist() for name in _COLUMNS}
        return {
            "actshard_normalizer": _VERSION,
            "layer": self.layer,
            "d_model": self.d_model,
            "dtype": self.dtype.name,
            **columns,
            "norm": self.norm,
            "dataset": self.dataset,
            "rows": self.rows,
            "selection": self.selection,
        }


_COLUMNS = ("center", "scale", "divide")


@dataclass(frozen=True)
class _Saved:
    """The values of a file."""

    actshard_normalizer: Literal[1]
    layer: int | str | None
    d_model: Annotated[int, _schema.at_least(1)]
    dtype: str
    center: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    divide: tuple[float, ...] | None = None
    norm: float | None = None
    dataset: str | None = None
    rows: int | None = None
    selection: str | None = None


def of_stats(stats: Stats) -> Normalizer:
    """Subtracts the mean and divides by the standard deviation; columns without variance are only centred."""
    return Normalizer(
        stats.layer,
        len(stats.mean),
        np.dtype(np.float32),
        center=np.nan_to_num(stats.mean, nan=0.0),
        scale=stats.inverse_std,
    )


@dataclass(frozen=True)
class RowKind:
    """The rows of a layer of a store."""

    layer: Layer
    d_model: int
    dtype: np.dtype[Any]
    is_mixed: bool
    """Whether some are stored in another dtype than ``dtype``."""
    is_converted: bool
    """Whether reads without ``dtype=`` convert these; otherwise they raise DtypeError."""

    def exact(self, normalize: object, dtype: DTypeLike | None) -> DTypeLike | None:
        """The dtype in which rows are read to be normalized to ``dtype``, as streams read them; None: as they are stored."""
        if self.is_mixed and dtype is None and not self.is_converted:
            return None
        return np.float64 if self.is_mixed or required(normalize).is_wide else None


def read_normalized(
    normalize: object,
    kind: RowKind,
    dtype: DTypeLike | None,
    out: object,
    read: Callable[[DTypeLike | None], NDArray[Any]],
) -> NDArray[Any]:
    """Rows of a direct read, rescaled.

    Args:
        normalize: a :class:`Normalizer`.
        kind: the rows of the layer.
        dtype: as in :meth:`Store.gather`.
        out: as in :meth:`Store.gather`.
        read: returns the rows with the dtype that it is called with, or as stored.
    """
    norm = required(normalize)
    norm.check(kind.layer, kind.d_model)
    target = kind.dtype if dtype is None else _arguments.dtype(dtype)[0]
    return norm(read(kind.exact(norm, dtype)), dtype=target, out=out)


def required(normalize: object) -> Normalizer:
    """Raises ArgumentTypeError for other values than a normalizer."""
    if not isinstance(normalize, Normalizer):
        raise ArgumentTypeError(
            f"normalize: expected store.normalizer(layer), found {normalize!r:.80}. Statistics and their names are of the rows of "
            "a stream, which a direct read does not have"
        )
    return normalize
