"""Blocks of examples: divides the examples of a conversion into blocks, reads them, and queues them for writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, ArgumentError, DtypeError
from actshard.base.layers import plain
from actshard.formats.target import Block, Target
from actshard.writing.converting.columns import Columns
from actshard.writing.converting.planning import ConversionRequest, check_lengths
from actshard.writing.given import convert as to_type
from actshard.writing.sink import SegmentWriter

_AT_ONCE = 8192
"""Number of examples whose lengths are read at once."""


def blocks(
    request: ConversionRequest, target: Target, begin: int, block_bytes: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int | None]]:
    """Yields blocks of the source's examples from position ``begin`` on.

    Each block is (ids, counts, unit): int64 ids ``(n,)``, int64 tokens to take ``(n, layers)`` (-1: the example lacks the layer),
    and the number of the source's unit (shard) that contains all of them, or None. A block never crosses a unit. The next unit
    is read while the caller uses a block.
    """
    rows = request.store.rows
    try:
        yield from _blocks(request, target, begin, block_bytes)
    finally:
        if request.store.contents.units is not None:
            rows.read_ahead(None)


def _blocks(
    request: ConversionRequest, target: Target, begin: int, block_bytes: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int | None]]:
    for _, ids, counts, unit in groups(request, target, begin):
        for first, last in cuts(target, counts, block_bytes):
            yield ids[first:last], counts[first:last], unit


def groups(
    request: ConversionRequest, target: Target, begin: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], int | None]]:
    """Yields groups of examples, to be cut into blocks: (position of the first, ids, counts, unit), as for :func:`blocks`."""
    store, rows = request.store, request.store.rows
    layers = request.groups
    units = store.contents.units
    alike = not store.contents.layers_differ
    position = begin
    while position < request.count:
        ids = request.ids(position, min(position + _AT_ONCE, request.count))
        unit = None
        if units is not None:
            unit = int(np.searchsorted(units, ids[0], "right")) - 1
            in_unit = (ids >= units[unit]) & (ids < units[unit + 1])
            ids = ids[: int(np.argmin(in_unit)) if not in_unit.all() else len(ids)]
        if alike:
            unpadded_counts = request.without_padding(rows.tokens_of(int(layers[0]), np.ascontiguousarray(ids)), ids)
            counts = np.repeat(request.selected_counts(unpadded_counts)[:, None], len(layers), axis=1)
        else:
            stored_counts = rows.tokens_of(np.tile(layers, len(ids)), np.repeat(ids, len(layers)))
            counts = request.selected_counts(
                request.without_padding(stored_counts, np.repeat(ids, len(layers))).reshape(len(ids), len(layers))
            )
            counts = _mark_lacking(request, ids, counts)
            if not target.holds_partial_layers and (counts < 0).any() and not request.pad:
                example, layer = (int(x[0]) for x in np.nonzero(counts < 0))
                raise ArgumentError(
                    f"example {position + example}: lacks layer {plain(request.layers[layer])}, and {target.format} requires all "
                    "layers. Select other layers= or examples=, or pass pad=True (--pad) to fill the layer with zeros."
                )
        if target.tokens is not None:
            check_lengths(request, target, counts[:, 0], position)
        first, position = position, position + len(ids)
        if units is not None and position < request.count:
            # The unit of these examples was already decoded.
            rows.read_ahead(int(request.ids(position, position + 1)[0]))
        yield first, ids, counts, unit


def cuts(target: Target, counts: NDArray[np.int64], block_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields first and end of each block of a group."""
    most = max(1, (block_bytes or target.block_bytes) // target.row_bytes)
    ends = np.cumsum(np.maximum(lengths_of(target, counts), 0).sum(axis=1))
    first, before = 0, 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(ends, before + most, "right")))
        yield first, last
        first, before = last, int(ends[last - 1])


def _mark_lacking(request: ConversionRequest, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sets counts to -1 for layers that a sample lacks; 0 means that the layer has no tokens."""
    if (counts > 0).all():
        return counts
    contents = request.store.contents
    assert contents.units is not None
    assert contents.unit_columns is not None
    unit = int(np.searchsorted(contents.units, ids[0], "right")) - 1
    stored_layers = contents.unit_columns(unit)["layers"].to_pylist()
    counts = counts.copy()
    for row, example in zip(counts, ids.tolist(), strict=True):
        example_layers = stored_layers[example - contents.units[unit]] or ()  # None: left out of an incomplete dataset
        row[[layer not in example_layers for layer in request.layers]] = -1
    return counts


def read(
    request: ConversionRequest,
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    memory: NDArray[np.generic],
    lost: list[int] | None = None,
) -> None:
    """Reads the selected tokens of each example and layer into ``memory``, cut or zero-padded to ``lengths``.

    Args:
        request: the request.
        ids: int64 example numbers ``(n,)``.
        counts: int64 tokens to take ``(n, layers)``; -1 for a lacking layer.
        lengths: int64 tokens of the result ``(n, layers)``.
        memory: output, ``(lengths.sum(), d_model)``.
        lost: receives counts of finite values that became infinite.
    """
    store, rows = request.store, request.store.rows
    layers = len(request.layers)
    is_present = counts.reshape(-1) >= 0
    groups, examples = np.tile(request.groups, len(ids))[is_present], np.repeat(ids, layers)[is_present]
    selected_counts, result_lengths = counts.reshape(-1)[is_present], np.maximum(lengths.reshape(-1), 0)
    dtype = memory.dtype if request.cast or memory.dtype != store.dtype else None
    if request.tokens == "last" and is_present.all() and (selected_counts == 1).all() and (result_lengths == 1).all():
        out = memory.reshape(len(ids), layers, store.d_model)
        numbers = np.ascontiguousarray(ids)
        token = None
        for k, group in enumerate(request.groups.tolist()):
            if store.content_lengths is not None:
                token = request.skipped_counts(request.without_padding(rows.tokens_of(group, numbers), numbers))
            out[:, k] = rows.gather(group, numbers, token, None, dtype, lost)
        return
    stored_lengths = rows.tokens_of(groups, examples)
    offsets = (np.cumsum(result_lengths) - result_lengths)[is_present]
    if (
        (stored_lengths == selected_counts).all()
        and int(selected_counts.sum()) == len(memory)
        and (selected_counts == result_lengths[is_present]).all()
    ):
        rows.gather_whole(groups, examples, memory, dtype, lost)
        return
    # Cast after selecting: overflows are counted for the selected tokens only.
    exact = np.float64 if request.cast and store.contents.types_may_differ else None
    stored_rows = rows.gather_whole(groups, examples, None, exact if lost is not None else dtype)
    copied_counts = np.minimum(selected_counts, result_lengths[is_present])
    starts = (
        np.cumsum(stored_lengths)
        - stored_lengths
        + request.skipped_counts(request.without_padding(stored_lengths, examples))
    )
    positions = np.arange(int(copied_counts.sum())) - np.repeat(np.cumsum(copied_counts) - copied_counts, copied_counts)
    memory[:] = 0
    selected_rows = stored_rows[np.repeat(starts, copied_counts) + positions]
    if lost is not None and selected_rows.dtype != memory.dtype:
        lost.append(_native.count_overflows(selected_rows, memory.dtype))
        cast = np.empty(selected_rows.shape, memory.dtype)
        to_type(selected_rows, cast, memory.dtype)
        selected_rows = cast
    memory[np.repeat(offsets, copied_counts) + positions] = selected_rows


def survey(request: ConversionRequest, target: Target) -> None:
    """Reads all rows once for a target with a setting that depends on them. Raises DtypeError for rows that it refuses."""
    if not target.surveys:
        return
    position = 0
    for ids, counts, _ in blocks(request, target, 0):
        lengths = lengths_of(target, counts)
        memory = np.empty((int(np.maximum(lengths, 0).sum()), target.spec.d_model), target.dtype)
        read(request, ids, counts, lengths, memory)
        target.survey(Block(memory, lengths), position)
        position += len(ids)
    target.surveyed()


def lengths_of(target: Target, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the result's tokens ``(n, layers)`` for source tokens ``counts``. A lacking layer gets the length of the longest."""
    if target.tokens is not None:
        return np.full_like(counts, target.tokens)
    if not target.holds_partial_layers and (counts < 0).any():
        return np.where(counts < 0, counts.max(axis=1, keepdims=True), counts)
    return counts


def copy_blocks(
    request: ConversionRequest,
    writer: SegmentWriter,
    columns: Columns,
    span: tuple[int, int, int],
    overflow: str,
    progress: Callable[[int, int], object],
) -> int:
    """Reads the examples of a range, block by block, and queues them for writing. Returns the number of bytes of rows.

    Args:
        request: the request.
        writer: a writer that has written the examples before.
        columns: the columns to convert.
        span: first example, end, and the example at which the blocks begin.
        overflow: ``"refuse"`` or ``"allow"``.
        progress: called with (the end of the block, bytes of rows so far) after every block.

    Raises:
        DtypeError: a finite value is too large for the target's dtype, with ``overflow="refuse"``.
        ActshardError: others of reading and writing; those of reading name the examples.
    """
    first, end, position = span
    target = writer.target
    size = 0
    for block_ids, block_counts, unit in blocks(request, target, position):
        # Blocks that are not whole files are cut at the end.
        begin, position = position, min(position + len(block_ids), end)
        if begin < first:
            continue
        ids, counts = block_ids[: position - begin], block_counts[: position - begin]
        lengths = lengths_of(target, counts)
        rows = int(np.maximum(lengths, 0).sum())
        memory = writer.memory(rows)
        lost: list[int] = []
        try:
            table = columns.of(ids, unit, target)
            read(request, ids, counts, lengths, memory, lost)
        except ActshardError as error:
            if "example" not in error.detail:
                error.detail += f" (reading examples {begin} to {position - 1})"
            raise
        if sum(lost) and overflow == "refuse":
            raise too_large(request, target, sum(lost), f" of examples {begin} to {position - 1}")
        writer.put(Block(memory, lengths, table, overflows=sum(lost)))
        size += rows * target.row_bytes
        del memory
        progress(position, size)
        if position >= end:
            break
    return size


def too_large(request: ConversionRequest, target: Target, count: int, where: str = "") -> DtypeError:
    """Builds the error for finite values that the result's dtype cannot represent."""
    wider = "bfloat16 (if the format supports it) or float32" if str(target.dtype) == "float16" else "a wider dtype"
    return DtypeError(
        f"dtype: {many(count, f'finite {request.store.dtype} value')}{where} {'is' if count == 1 else 'are'} "
        f"too large for {target.dtype} and would become infinite. Store {wider}, or pass overflow='allow' (-o overflow=allow).",
        path=request.store.path,
    )


# A conversion in segments: tasks of a plan write ranges of examples, or groups of layers, separately; a commit combines them.
#
# A segment is written as by a writer that resumes at its first example. The target's state follows from the lengths of the
# examples before, and the segment has a separate folder (:class:`~actshard.formats.target.Apart`). Combined, the segments are
# the files of a single writer before it finishes the dataset. The commit then finishes the dataset as that writer does.


@dataclass(frozen=True)
class Layout:
    """How the examples of a conversion are divided into blocks.

    Attributes:
        lengths: tokens of the result ``(n, layers)``, or ``(n, 1)`` if all layers have the same; -1 for a lacking layer.
        firsts: the first example of each block.
        origins: for each block, the first example of its group. A reader must begin there to get the same blocks.
    """

    lengths: NDArray[np.int64]
    firsts: NDArray[np.int64]
    origins: NDArray[np.int64]

    @classmethod
    def of(cls, request: ConversionRequest, target: Target) -> Layout:
        """Reads the lengths of all examples."""
        lengths, firsts, origins = [], [], []
        same = True
        for position, _, counts, _ in groups(request, target, 0):
            group_lengths = lengths_of(target, counts)
            same = same and bool((group_lengths == group_lengths[:, :1]).all())
            lengths.append(np.ascontiguousarray(group_lengths[:, :1]) if same else group_lengths)
            for first, _ in cuts(target, counts):
                firsts.append(position + first)
                origins.append(position)
        wide = len(request.layers)
        parts = lengths if same else [np.broadcast_to(part, (len(part), wide)) for part in lengths]
        return cls(np.concatenate(parts), np.array(firsts, np.int64), np.array(origins, np.int64))

    def settle(self, request: ConversionRequest, target: Target) -> None:
        """Determines the target's remaining settings from the lengths of the first block, as a writer does."""
        if request.store.contents.counts_are_cheap:
            target.all_lengths = lambda: self.by_layer(len(request.layers))
        end = int(self.firsts[1]) if len(self.firsts) > 1 else request.count
        memory = np.empty((0, request.store.d_model), target.dtype)
        target.settle(Block(memory, self.by_layer(len(request.layers))[:end]))

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each example, of its longest layer."""
        tokens: NDArray[np.int64] = np.maximum(self.lengths, 0).max(axis=1)
        return tokens

    def rows(self, layers: int) -> NDArray[np.int64]:
        """Rows of each example, of all layers."""
        lengths = np.maximum(self.lengths, 0)
        row_counts: NDArray[np.int64] = lengths[:, 0] * layers if lengths.shape[1] == 1 else lengths.sum(axis=1)
        return row_counts

    def by_layer(self, layers: int) -> NDArray[np.int64]:
        """The lengths ``(n, layers)``, a view."""
        return np.broadcast_to(self.lengths, (len(self.lengths), layers))


def balanced(weights: NDArray[np.int64], borders: NDArray[np.int64], tasks: int) -> list[int]:
    """Returns the first numbers of at most ``tasks`` ranges of nearly equal weight. Ranges begin at ``borders``, sorted from 0."""
    ends = np.concatenate([[0], np.cumsum(weights)])
    border_weights = ends[borders]
    ideal_weights = ends[-1] * np.arange(1, tasks) / tasks
    right = np.clip(np.searchsorted(border_weights, ideal_weights), 1, max(len(border_weights) - 1, 1))
    if len(border_weights) == 1:
        return [0]
    nearer = np.where(
        ideal_weights - border_weights[right - 1] <= border_weights[right] - ideal_weights, right - 1, right
    )
    return [int(x) for x in borders[np.unique(np.concatenate([[0], nearer]))]]
