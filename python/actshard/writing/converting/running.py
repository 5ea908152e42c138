"""Runs a conversion: all threads read a block of examples while the block before is written."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, ArgumentError, DtypeError, ExistsError, FormatError, boundary, warn
from actshard.base.layers import Layer, plain
from actshard.base.location import Location
from actshard.base.logs import LOG
from actshard.base.request import Request
from actshard.formats.options import FormatOptions
from actshard.formats.target import LOGITS, PATCH_LABELS, ROUTER, TEXTS, Block, Target, arrays_in
from actshard.reading.finding import find
from actshard.reading.inputs import changed_read, read_inputs
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.writing.columns import is_separate, plain_values, read_columns
from actshard.writing.converting.blocks import Layout, blocks, copy_blocks, lengths_of, read, survey
from actshard.writing.converting.columns import Columns, NumbersMatterError, Texts
from actshard.writing.converting.planning import (
    OVERFLOW,
    ConversionRequest,
    Loss,
    SourceSelection,
    TargetSettings,
    check_lengths,
    check_request,
    configure_target,
    conversion_record,
    list_losses,
    prepare_columns,
    refuse_target_within,
    source,
)
from actshard.writing.existing import check_same, complete_at
from actshard.writing.given import can_overflow
from actshard.writing.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa


# Compares the columns of a conversion's result with those of its source.


class ColumnComparison:
    """The columns of a result, to be compared with those of its source, block by block.

    Columns that the format changes (:attr:`Columns.turned`) are losses and not compared, nor are those of formats with a fixed set
    of columns (:attr:`Target.only_columns`).
    """

    def __init__(self, target: Target, result: Store, columns: Columns) -> None:
        self._target, self._result, self._columns = target, result, columns
        self._is_compared = target.only_columns is None
        names = list(result.contents.column_names) if self._is_compared and target.holds_columns else []
        self._stored: Mapping[str, pa.ChunkedArray] = read_columns(target, result.contents, names) if names else {}

    def difference(self, ids: NDArray[np.int64], unit: int | None, places: NDArray[np.int64]) -> str | None:
        """The first difference in some examples; None if they are equal.

        Args:
            ids: examples of the source.
            unit: the shard that contains them, as for :meth:`Columns.of`.
            places: their numbers in the result.
        """
        if not self._is_compared:
            return None
        table = self._columns.of(ids, unit, self._target)
        if table is None:
            return None
        for name in table.column_names:
            if name in self._columns.turned:
                continue
            if is_separate(self._target, name):
                where = self._array_difference(table, name, places)
            else:
                where = self._value_difference(name, table[name], places)
            if where is not None:
                return where
        return None

    def _value_difference(self, name: str, column: pa.ChunkedArray, places: NDArray[np.int64]) -> str | None:
        import pyarrow as pa

        if name not in self._stored:
            # Empty columns need no place in formats that find their columns in files.
            return None if column.null_count == len(column) else f"column {name!r} is missing"
        stored = self._stored[name].take(pa.array(places))
        if column.type.equals(stored.type) and column.equals(stored):
            return None
        before, after = plain_values(column), plain_values(stored)
        if before == after:
            return None
        i = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return f"example {int(places[i])}, column {name!r}: expected {column[i].as_py()!r:.60}, found {stored[i].as_py()!r:.60}"

    def _array_difference(self, table: pa.Table, name: str, places: NDArray[np.int64]) -> str | None:
        array = arrays_in(table, name)
        if name == PATCH_LABELS:
            labels = self._result.labels
            stored = None if labels is None else labels[places]
        elif name in LOGITS:
            stored = self._result.logits(places)[LOGITS.index(name)]
        else:
            stored = self._result.router(int(name.removeprefix(ROUTER)), places)
        if (
            stored is not None
            and array.shape == stored.shape
            and array.tobytes() == stored.astype(array.dtype).tobytes()
        ):
            return None
        return f"{name} of examples {int(places[0])} to {int(places[-1])} differ"


# Conversions of objects of other libraries, such as a ``datasets.Dataset``: saved next to the result, converted, and removed.


F = TypeVar("F", bound=Callable[..., Any])


class SavesToDisk(Protocol):
    """A ``datasets.Dataset``."""

    def save_to_disk(self, dataset_path: object) -> None:
        """Writes the dataset to a new folder."""


def saves(convert: F) -> F:
    """Extends a conversion to sources that are objects of formats' libraries (:meth:`Format.is_given`)."""

    @functools.wraps(convert)
    def wrapped(src: object, dst: object, format: str, **arguments: object) -> object:
        kind = formats.of_object(src)
        if kind is None:
            return convert(src, dst, format, **arguments)
        for name in ("src_format", "storage_options", "cache"):
            if arguments.get(name):
                raise ArgumentError(f"{name}: expected a path as src to use it for, found {type(src).__name__}")
        if arguments.get("resume"):
            raise ArgumentError(
                "resume: expected a path as src, which can be compared with that of the interrupted call, found "
                f"{type(src).__name__}; save it first"
            )
        import tempfile  # imported on use: it imports many modules

        parent = _arguments.local_path(dst, "dst").absolute().parent
        with boundary(parent, "write"):
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".actshard-", dir=parent) as scratch:
                folder = Path(scratch) / type(src).__name__
                kind.save(src, folder)
                return convert(str(folder), dst, format, src_format=kind.name, **arguments)

    return cast(F, wrapped)


# Conversions whose result is a URL: into a local scratch folder, then :func:`actshard.push`.


def uploads(convert: F) -> F:
    """Extends a conversion to targets that are URLs. Handles its arguments ``scratch`` and ``target_options``."""

    @functools.wraps(convert)
    def wrapped(src: object, dst: object, format: str, **arguments: object) -> object:
        scratch, options = arguments.pop("scratch", None), arguments.pop("target_options", None)
        if _arguments.is_url_elsewhere(dst):
            return _to_url(convert, src, (dst, options, scratch), format, arguments)
        for name, value in (("scratch", scratch), ("target_options", options)):
            if value is not None:
                raise ArgumentError(f"{name}: expected a URL as dst to use it for, found a local path")
        return convert(src, dst, format, **arguments)

    return cast(F, wrapped)


def _to_url(
    convert: F, src: object, target: tuple[str, Any, object], format: str, arguments: dict[str, object]
) -> object:
    from actshard.writing.pushing import Scratch  # only if it is used

    began = time.perf_counter()
    url, options, scratch_folder = target
    resume = _arguments.switch(arguments.get("resume", False), "resume")
    exist_ok = _arguments.switch(arguments.get("exist_ok", False), "exist_ok")
    scratch = Scratch(url, options, scratch_folder, f"convert {format}")
    scratch.check_free(resume, exist_ok)
    if (resume or exist_ok) and not scratch.has_work:
        _refuse_another_format(scratch.root, format)
    scratch.make()
    try:
        with scratch.named():
            conversion = convert(src, scratch.folder, format, **arguments)
    finally:
        scratch.remove_if_empty()
    scratch.push()
    return replace(conversion, path=scratch.place_of(conversion.path), seconds=time.perf_counter() - began)


def _refuse_another_format(root: Location, format: str) -> None:
    """Raises ExistsError, before anything is converted, for a dataset at the destination that cannot be the result."""
    try:
        path, name = find(root)
    except ActshardError:  # the destination is checked again before the upload
        return
    if name != format:
        raise ExistsError(
            f"contains other objects: a dataset, format: expected {format}, found {name}. Choose another URL", path=path
        )


_COMPARED = 66
"""Number of examples, including first and last, that ``exist_ok`` and ``resume`` compare with the source."""
BlockProgress = Callable[[int, int, int], object]
"""Called with (examples done, total examples, bytes of rows done)."""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        path: path of the new dataset.
        format: its format.
        examples: its number of examples.
        resumed_at: number of examples that an earlier call had written.
        bytes: bytes of rows that this call wrote.
        seconds: duration of this call.
        losses: properties of the source that the result lacks.
        verified: whether every row, and every value of columns that are not in ``losses``, was compared with the source afterwards.
        dtype: dtype of the result's rows; None if the result contains no rows.
    """

    path: Path
    format: str
    examples: int
    resumed_at: int
    bytes: int
    seconds: float
    losses: tuple[Loss, ...]
    verified: bool
    dtype: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"path": str(self.path), "losses": [x.as_dict() for x in self.losses]}


@uploads
@saves
def convert(
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Store | SavesToDisk,
    dst: str | os.PathLike[str],
    format: str,
    *,
    layers: Layer | Sequence[Layer] | Mapping[Layer, Layer] | None = None,
    examples: ArrayLike | slice | None = None,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    tokens: _arguments.Kept = "all",
    dtype: DTypeLike | None = None,
    pad: bool = False,
    truncate: bool = False,
    tokens_per_example: int | None = None,
    shard_bytes: int | str | None = None,
    metadata: Mapping[str, object] | None = None,
    src_format: str | None = None,
    resume: bool = False,
    exist_ok: bool = False,
    verify: bool = False,
    overflow: _arguments.Overflow = "refuse",
    progress: BlockProgress | None = None,
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
    target_options: Mapping[str, object] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    **options: Unpack[FormatOptions],
) -> Conversion:
    """Converts a dataset to another format, or copies a selection of it in the same format.

    Rows, texts, labels and all other contents that the target format supports are converted. ``losses`` lists the rest;
    ``actshard convert --dry-run`` lists it before writing. Memory is bounded: a few blocks of rows, plus one shard if the source
    must be decoded. After an interruption, the same call with ``resume=True`` continues after the last committed examples.

    Args:
        src: a path, a URL, or a list of paths, as for :func:`actshard.open`, or a store. Or a ``datasets.Dataset``: its rows, as
            selected and ordered, are saved to a hidden folder next to ``dst``, converted, and removed. If ``save_to_disk``
            already saved it, pass that folder instead.
        dst: the folder to create; for saev the folder of dumps, in which the dataset is ``<HASH>``. Or a URL: the result is
            written to ``scratch``, uploaded as by :func:`actshard.push`, and removed from ``scratch``.
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"``, ``"pickle"`` or another format of :func:`actshard.create`.
        layers: names of layers to convert, in this order; a mapping renames them: ``{-1: 23}``,
            ``{"blocks.5.hook_resid_post": 5}``. None: all.
        examples: integers, a slice or a bool per example: the examples to convert, in this order. None: all.
        columns: names of columns to convert, in this order; a mapping renames them: ``{"label": "verb"}``. None: all. Logits,
            router tensors and patch labels that are not columns are always converted.
        tokens: ``"all"``, ``"content"`` (without CLS) or ``"last"``.
        dtype: dtype to store. None keeps the source's; raises if the format does not support it.
        pad: fill short examples with zeros, for a format with the same number of tokens per example.
        truncate: cut long examples, for such a format.
        tokens_per_example: the number of tokens for ``pad`` and ``truncate``. None: that of the longest example with ``pad``,
            else of the shortest.
        shard_bytes: approximate size of a shard in bytes, or as ``"4GiB"``.
        metadata: added to the source's metadata; see :func:`actshard.create`.
        src_format: format of ``src``, as for :func:`actshard.open`; None detects it.
        resume: continue an interrupted conversion; starts a new one if there is none.
        exist_ok: return a finished result instead of raising, as with ``resume``, if its record has the same arguments (or it has
            none), and if rows and columns of up to 66 examples, including first and last, equal the source's. All examples are
            compared if the source's files are others than those on record. A difference raises ExistsError.
        verify: compare every row and every value of columns with the source afterwards. Columns of draft models' caches, which
            have fixed types, are not compared.
        overflow: ``"refuse"`` raises if a finite value is too large for ``dtype``; ``"allow"`` stores infinity and reports the
            count in ``losses``.
        progress: called with (examples done, total examples, bytes done) after every block.
        storage_options: options of the source's remote store, as for :func:`actshard.open`.
        cache: cache on disk of the source's remote store, as for :func:`actshard.open`.
        target_options: ``storage_options`` of a ``dst`` that is a URL.
        scratch: local folder for a ``dst`` that is a URL; None: the folder of temporary files. It contains the whole result until
            the upload ends.
        options: options of the target format; see :func:`actshard.create`.

    Returns:
        A :class:`Conversion`.

    Raises:
        Errors of :func:`actshard.open` and :func:`actshard.create`.
        ArgumentError: the target format cannot store the request; the message names a remedy.
        DtypeError: a finite value is too large for ``dtype``.
        FormatError: ``verify`` found a row that differs.
    """
    del target_options, scratch  # only for URLs: handled by uploads()
    began = time.perf_counter()
    if not _arguments.is_one_of(overflow, OVERFLOW):
        raise ArgumentError(f"overflow: expected {' or '.join(map(repr, OVERFLOW))}, found {overflow!r}")
    resume, exist_ok = _arguments.switch(resume, "resume"), _arguments.switch(exist_ok, "exist_ok")
    verify = _arguments.switch(verify, "verify")
    root = _arguments.local_path(dst, "dst")
    with boundary(root, "convert"):
        store = source(src, src_format, "pread", storage_options, cache)
        selection = SourceSelection(layers, examples, columns, tokens, pad, truncate)
        request = check_request(store, format, selection, cast=dtype is not None)
        settings = TargetSettings(dtype, tokens_per_example, shard_bytes, metadata, dict(options), None)
        make_target = partial(_make_target, request, root, overflow, settings)
        target = make_target()
        if store.contents.counts_are_cheap and target.tokens is not None:
            # Checked before the first row is written, if lengths are cheap to read.
            check_lengths(request, target, request.selected_counts(request.stored), 0)
        finished_path = complete_at(target)
        size, lost = 0, None
        if finished_path is not None:
            if not (exist_ok or resume):
                raise ExistsError.finished(finished_path)
            path = finished_path
            converted_columns, resumed_at, lost = _check_finished(request, target, finished_path, verify)
        else:
            target, converted_columns, (path, resumed_at, size, lost) = _write_checked(
                request, target, make_target, resume=resume, progress=progress, overflow=overflow
            )
        if verify or lost is None:
            lost = compare(request, target, path, converted_columns) if verify or _can_overflow(request, target) else 0
            if lost and overflow == "refuse":
                raise _already_infinite(request, target, lost)
        if target.finds_by_text:
            converted_columns.texts = Texts.of(open_quietly(path, target.format, "pread", "160MiB"))
        # Computed last: every shard has been read, so lengths are cached.
        lost_properties = tuple(list_losses(request, target, converted_columns, lost))
    dtype = None if target.dtype is None else str(target.dtype)
    return Conversion(
        path, format, request.count, resumed_at, size, time.perf_counter() - began, lost_properties, verify, dtype
    )


def _make_target(request: ConversionRequest, root: Path, overflow: str, settings: TargetSettings) -> Target:
    target = configure_target(request, root, settings)
    refuse_target_within(request, target)
    target.request = conversion_record(request, overflow, settings)
    return target


def _check_finished(
    request: ConversionRequest, target: Target, path: Path, verify: bool
) -> tuple[Columns, int, int | None]:
    """Returns columns, examples and overflows of a finished dataset. Raises ExistsError if it is not the requested one.

    Its record contains the request; contents of some examples must equal the source's. If the files of the source were
    others, all contents are compared. With ``verify`` the caller compares all.
    """
    columns = prepare_columns(request, target)
    count = check_same(target, path)
    record = Request.read(path)
    same = record is not None and record == target.request
    if not verify:
        _refuse_other(request, target, path, columns, compare_all=record is not None and not same)
    if not same:
        _refuse_other_columns(request, target, path, columns)
    return columns, count, record.overflows if record is not None and same else None


def _write_checked(
    request: ConversionRequest,
    target: Target,
    make_target: Callable[[], Target],
    *,
    resume: bool,
    progress: BlockProgress | None,
    overflow: str,
) -> tuple[Target, Columns, tuple[Path, int, int, int | None]]:
    """Checks the columns and writes. Returns the target, its columns, and the values of :func:`_write`."""
    columns = prepare_columns(request, target)
    if (advice := target.advice(request.count)) is not None:
        warn(f"{target.root}: {advice}", code=advice.code)
    try:
        return target, columns, _write(request, target, columns, resume, progress, overflow)
    except NumbersMatterError:
        # sample_id_range claims that samples are numbered by order, but they are not.
        target = make_target()
        columns = prepare_columns(request, target, numbers=True)
        return target, columns, _write(request, target, columns, False, progress, overflow)


def _write(
    request: ConversionRequest,
    target: Target,
    columns: Columns,
    resume: bool,
    progress: BlockProgress | None,
    overflow: str,
) -> tuple[Path, int, int, int | None]:
    """Writes the missing examples.

    Returns (path, examples already committed, bytes written, values that overflowed). The last is None if an earlier release wrote
    the committed examples and did not record it.
    """
    if request.store.contents.counts_are_cheap:
        target.all_lengths = lambda: Layout.of(request, target).by_layer(len(request.layers))
    sink = Sink(target, resume=resume)
    resumed_at, total = sink.committed, request.count
    LOG.info(
        "%s: converting to %s at %s, from example %d of %d",
        request.store.path,
        target.format,
        target.root,
        resumed_at,
        total,
    )
    inputs = read_inputs(request.store)
    report_progress = (
        (lambda position, size: None) if progress is None else (lambda position, size: progress(position, total, size))
    )
    try:
        survey(request, target)
        size = copy_blocks(request, sink, columns, (resumed_at, total, resumed_at), overflow, report_progress)
        columns.turned |= sink.columns.changes
        if (difference := changed_read(inputs, request.store, "the conversion began")) is not None:
            if not resumed_at:
                sink.discard()  # a refused conversion leaves no files
            raise FormatError(
                f"was changed while it was converted, and the result would be a mixture: {difference[1]} Convert again",
                path=difference[0],
            )
        return sink.finish(), resumed_at, size, sink.journal.overflows
    except (ArgumentError, DtypeError, NumbersMatterError) as error:
        if resumed_at:
            sink.abort()
            if isinstance(error, NumbersMatterError):
                raise FormatError(str(error), path=request.store.path) from error
        else:
            sink.discard()  # a refused conversion leaves no files
        raise
    except BaseException:
        sink.abort()
        raise


def write_all(request: ConversionRequest, make_target: Callable[[], Target], overflow: str) -> int:
    """Converts the whole request to a new dataset. Returns the number of values that overflowed."""
    _, _, written = _write_checked(request, make_target(), make_target, resume=False, progress=None, overflow=overflow)
    return written[3] or 0


def _already_infinite(request: ConversionRequest, target: Target, count: int) -> DtypeError:
    """Builds the error for infinite values that an earlier call wrote with ``overflow="allow"``."""
    return DtypeError(
        f"dtype: {many(count, f'finite {request.store.dtype} value', 'is', 'are')} infinite in {target.dtype}: an earlier call "
        "wrote them with overflow='allow'. Pass overflow='allow' (-o overflow=allow), or convert into another folder.",
        path=target.root,
    )


def _can_overflow(request: ConversionRequest, target: Target) -> bool:
    """Whether the source's dtype has finite values that the result's dtype cannot represent."""
    if target.dtype is None or (request.cast and request.store.contents.types_may_differ):
        return target.dtype is not None
    return can_overflow(request.store.dtype, target.dtype)


def _refuse_other(
    request: ConversionRequest, target: Target, path: Path, columns: Columns, *, compare_all: bool
) -> None:
    """Raises ExistsError if a finished dataset differs from the conversion's result, or in a sample of its examples."""
    count = request.count if compare_all else min(request.count, _COMPARED)
    positions = np.unique(np.linspace(0, request.count - 1, count).round().astype(np.int64))
    difference, _ = _difference(request, target, path, positions, columns)
    if difference is not None:
        raise ExistsError(
            f"contains another dataset than this conversion writes: {difference}. Choose another folder.",
            path=path,
        )


def _refuse_other_columns(request: ConversionRequest, target: Target, path: Path, columns: Columns) -> None:
    """Raises ExistsError if a finished dataset has other columns than ``columns=`` names."""
    if request.columns is None or not target.holds_columns:
        return
    result = open_quietly(path, target.format, "pread", "160MiB").contents
    carrying = formats.get(target.format).carrying()
    stored_names = {name for name in carrying.names(result) if not name.startswith(ROUTER)}
    # Formats name text columns differently, and some have placeholder columns.
    alike = {*TEXTS, PATCH_LABELS, *LOGITS, carrying.number_column, *carrying.fillers(result)}
    alike |= {
        request.columns[name] for name in columns.carrying.fillers(request.store.contents) if name in request.columns
    }
    expected_names = {request.columns[name] for name in columns.names}
    lacking, surplus = sorted(expected_names - stored_names - alike), sorted(stored_names - expected_names - alike)
    if lacking or surplus:
        difference = f"it has no column {lacking[0]!r}" if lacking else f"it has a column {surplus[0]!r}"
        raise ExistsError(
            f"contains another dataset than this conversion writes: {difference}. Choose another folder.",
            path=path,
        )


def compare(request: ConversionRequest, target: Target, path: Path, columns: Columns) -> int:
    """Compares every row of a result with its source, cast to the result's dtype, and all values of columns.

    Returns the number of finite source values that are infinite in the result.

    Raises:
        FormatError: a row or a value differs; the message names it.
    """
    difference, lost = _difference(request, target, path, np.arange(request.count), columns)
    if difference is not None:
        raise FormatError(difference, path=path)
    return lost


def _difference(
    request: ConversionRequest, target: Target, path: Path, positions: NDArray[np.int64], columns: Columns
) -> tuple[str | None, int]:
    """Returns the first difference between result and source in some examples (None if equal), and the number of overflows."""
    result = open_quietly(path, target.format, "pread", "160MiB", layout=target.reading_layout)
    if result.num_examples != request.count:
        return f"expected {request.count} examples, found {result.num_examples}", 0
    if result.dtype != target.dtype:
        return f"expected {target.dtype}, found {result.dtype}", 0
    survey(request, target)
    if len(positions) < request.count:
        ids = positions if request.examples is None else request.examples[positions]
        request = replace(request, examples=ids)
    names = [target.reading[name] for name in request.names]
    result_request = check_request(result, target.format, SourceSelection(names))
    offset = 0
    lost: list[int] = []
    comparison = ColumnComparison(target, result, columns)
    for ids, counts, unit in blocks(request, target, 0, 16 << 20):
        lengths = lengths_of(target, counts)
        rows = int(np.maximum(lengths, 0).sum())
        expected_rows = np.empty((rows, target.spec.d_model), target.dtype)
        read(request, ids, counts, lengths, expected_rows, lost)
        expected_rows = target.as_read(Block(expected_rows, lengths))
        places = positions[offset : offset + len(ids)]
        difference = comparison.difference(ids, unit, places)
        if difference is not None:
            return difference, 0
        is_present = lengths.reshape(-1) >= 0
        groups, examples = (
            np.tile(result_request.groups, len(ids))[is_present],
            np.repeat(places, len(request.layers))[is_present],
        )
        lengths = lengths.reshape(-1)[is_present]
        stored_counts = result.rows.tokens_of(groups, examples)
        if (stored_counts != np.maximum(lengths, 0).reshape(-1)).any():
            bad = int(np.flatnonzero(stored_counts != np.maximum(lengths, 0).reshape(-1))[0])
            expected_tokens = int(lengths.reshape(-1)[bad])
            return (
                f"example {int(examples[bad])}: expected {expected_tokens} tokens, found {int(stored_counts[bad])}",
                0,
            )
        result_rows = result.rows.gather_whole(groups, examples, None, target.dtype)
        size = target.spec.d_model * expected_rows.dtype.itemsize
        same = expected_rows.view(np.uint8).reshape(rows, size) == result_rows.view(np.uint8).reshape(rows, size)
        if not same.all():
            row = int(np.flatnonzero(~same.all(axis=1))[0])
            pair = int(np.searchsorted(np.cumsum(stored_counts), row, "right"))
            layer = request.names[int(np.flatnonzero(is_present)[pair]) % len(request.layers)]
            difference = (
                f"example {int(examples[pair])}, layer {plain(layer)}, token "
                f"{row - int(np.cumsum(stored_counts)[pair] - stored_counts[pair])}: differs from its source in "
                f"{store_name(request.store)}"
            )
            return difference, 0
        offset += len(ids)
    return None, sum(lost)


def store_name(store: Store) -> str:
    """Path and format of a store, for messages."""
    return f"{store.path} ({store.format})"
