"""Estimates the size, error and read speed of a dataset in the forms in which it can be stored, from a sample."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base import _arguments
from actshard.base.errors import ActshardError, NotStoredError, boundary
from actshard.base.location import Location
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.writing.converting.planning import source
from actshard.writing.converting.previewing import preview, spread
from actshard.writing.converting.running import convert

SAMPLE_BYTES = 32 << 20
"""Bytes of the rows from which errors and speeds are measured."""
_SPEED_SECONDS = 0.2
"""A form is streamed for at least this long."""


@dataclass(frozen=True)
class Form:
    """A way to store a dataset: a format and its options."""

    name: str
    format: str
    options: Mapping[str, int | str]
    """Arguments of :func:`actshard.convert`."""


def all_forms() -> list[Form]:
    """The forms of :func:`estimate`: each format that actshard writes, and what its target names, :attr:`Target.forms`."""
    formats_alone = [Form(name, name, {}) for name in formats.written()]
    variants = [
        Form(form, name, options)
        for name in formats.written()
        for form, options in formats.get(name).target().forms.items()
    ]
    return formats_alone + variants


@dataclass(frozen=True)
class Estimate:
    """What one form of a dataset would cost. Sizes are of the whole dataset; error and speed are measured on a sample."""

    name: str
    format: str
    options: Mapping[str, Any]
    """Arguments of :func:`actshard.convert`."""
    dtype: str | None
    """The dtype of the rows as a reader returns them."""
    bytes: int
    """Bytes of all files."""
    uncertainty: int
    """Bytes by which two samples disagree about ``bytes``; 0 if the size does not depend on the values of the rows."""
    files: int
    ratio: float
    """``bytes`` divided by the bytes of the rows in the source's dtype."""
    relative_error: float | None
    """L2 norm of the differences of a layer's rows in the sample, divided by that of the rows; the root of the mean square of
    all layers. 0: the same values. None: no value is finite."""
    cosine: float | None
    """Mean cosine of stored and given rows of the sample."""
    stream_rate: float
    """Bytes per second of rows, in the source's dtype, streamed in random order from memory."""
    refused: str | None = None
    """Why the dataset cannot have this form; the numbers are 0 then."""

    def as_dict(self) -> dict[str, object]:
        """Returns plain values for JSON; without numbers if the dataset cannot have this form."""
        values = asdict(self)
        return (
            values
            if self.refused is None
            else {name: values[name] for name in ("name", "format", "options", "refused")}
        )


def estimate(
    src: str | PathLike[str] | Location | Store,
    forms: str | Sequence[str] | None = None,
    *,
    src_format: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    cache: str | PathLike[str] | int | bool | None = None,
) -> list[Estimate]:
    """Estimates the size, error and speed of a dataset in the forms in which it can be stored. Writes temporary files only.

    Forms are: each format that actshard writes; Zarr 3 in shards, plain and packed; and lossy ones: bfloat16, and int8 and
    float8 codes with scales where the dataset has what that format needs. Sizes are predicted as by
    ``actshard convert --dry-run``. Errors and speeds are measured on a sample of up to 32 MiB of rows, which is converted,
    opened and read. Speeds hold for this machine, with the data in memory: on a disk or link that is slower, fewer bytes are
    fewer seconds.

    Args:
        src: a path, a URL or a store.
        forms: names of forms, or one name. Default: all.
        src_format: the source's format. Default: it is detected.
        storage_options: see :func:`actshard.open`.
        cache: see :func:`actshard.open`.

    Returns:
        One estimate per form, the smallest first; forms that the dataset cannot have come last.

    Raises:
        ArgumentError: a form is unknown.
        NotStoredError: the dataset has no rows.
    """
    choices = all_forms()
    if forms is not None:
        forms = [forms] if isinstance(forms, str) else forms
        chosen = [_arguments.one_of(name, tuple(form.name for form in choices), "forms") for name in forms]
        choices = [form for form in choices if form.name in chosen]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = source(src, src_format, "auto", storage_options, cache)
    with boundary(store.path, "estimate"):
        if not store.layers or not len(store) or not int(store.token_counts.sum()):
            raise NotStoredError("expected rows, found none", path=store.path)
        sample = _RowSample(store)
        # A form with the dtype that the rows have is the same without it.
        choices = [form for form in choices if form.options.get("dtype") != store.dtype.name]
        estimates = [_estimate(store, form, sample) for form in choices]
    return sorted(estimates, key=lambda e: (e.refused is not None, e.bytes))


class _RowSample:
    """Runs of examples of a dataset, and their rows."""

    def __init__(self, store: Store) -> None:
        counts = np.maximum(store.token_counts, 0)
        row_bytes = store.d_model * store.dtype.itemsize * len(store.layers)
        self.numbers = spread(counts * row_bytes, SAMPLE_BYTES)
        self.layers = store.layers
        self.rows = [np.concatenate(store.sequences(self.numbers, layer)) for layer in store.layers]
        self.layer_bytes = self.rows[0].size * store.dtype.itemsize

    def errors(self, store: Store) -> tuple[float | None, float | None]:
        """Relative error and mean cosine of the rows of a conversion of these examples; None without a finite value.

        Values that are not finite in the source are left out. A finite one never becomes infinite: the conversion is refused.
        """
        squared_errors: list[float] = []
        cosines: list[NDArray[np.float64]] = []
        for layer, rows in zip(self.layers, self.rows, strict=True):
            source_rows = rows.astype(np.float64)
            stored = np.concatenate(store.sequences(np.arange(len(store)), layer)).astype(np.float64)
            finite = np.isfinite(source_rows)
            if not finite.any():
                continue
            # Squares of large float64 values would be infinite.
            unit = float(np.abs(source_rows[finite]).max()) or 1.0
            source_rows, stored = np.where(finite, source_rows / unit, 0.0), np.where(finite, stored / unit, 0.0)
            squares, differences = float((source_rows**2).sum()), float(((source_rows - stored) ** 2).sum())
            squared_errors.append(differences / squares if squares else differences)
            norms = np.linalg.norm(source_rows, axis=1) * np.linalg.norm(stored, axis=1)
            cosines.append((source_rows * stored).sum(axis=1)[norms > 0] / norms[norms > 0])
        if not squared_errors:
            return None, None
        error, angles = float(np.sqrt(np.mean(squared_errors))), np.concatenate(cosines)
        return error, float(angles.mean()) if error and len(angles) else 1.0


def _estimate(store: Store, form: Form, sample: _RowSample) -> Estimate:
    options: dict[str, Any] = dict(form.options)
    with tempfile.TemporaryDirectory(prefix="actshard-estimate-") as scratch:
        folder = Path(scratch) / "d"
        size = preview(store, folder, form.format, **options)[0]
        if size.refused is not None:
            return _refused(form, size.refused)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                conversion = convert(
                    store, folder, form.format,
                    examples=sample.numbers, **options,
                )  # fmt: skip
                with open_quietly(conversion.path, form.format, "auto") as stored:
                    relative_error, cosine = sample.errors(stored)
                    rate = _stream_rate(stored, sample)
        except ActshardError as error:
            return _refused(form, error.detail)
    rows = size.rows * store.d_model * store.dtype.itemsize
    return Estimate(
        form.name, form.format, options, size.dtype, size.bytes, size.uncertainty, size.files,
        size.bytes / rows, relative_error, cosine, rate,
    )  # fmt: skip


def _refused(form: Form, reason: str) -> Estimate:
    return Estimate(form.name, form.format, dict(form.options), None, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, reason)


def _stream_rate(store: Store, sample: _RowSample) -> float:
    """Bytes of rows per second, the best of several passes."""
    fastest, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < _SPEED_SECONDS:
        start = time.perf_counter()
        for _ in store.stream(sample.layers[0], batch_size=4096, seed=0):
            pass
        fastest = min(fastest, time.perf_counter() - start)
    return sample.layer_bytes / fastest
