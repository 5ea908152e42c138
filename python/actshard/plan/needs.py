"""What tasks that read all rows take: bytes read, and memory.

Rows that lie in files as they are, are read in blocks: the core plans the same reads without reading (``Rows.scan_needs``,
``Rows.sum_needs``), with the gaps between rows that one read spans, and counts its own buffers. Of large datasets it plans some
ranges in some layers. Files that are decoded are read whole: once, while the cache of decoded files has room for what a task needs
of all layers, otherwise once for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.converting.planning import Asked
from actshard.errors import ActshardError
from actshard.formats.report import NOT_OF_DATA
from actshard.inputs import Input
from actshard.location import Location
from actshard.store import Store
from actshard.work.children import processors

DECODED_MEMORY = 1 << 30
"""Bytes of decoded files that a store keeps: the default of :func:`actshard.open`."""
_POOLED, _POOLED_BYTES = 8, 256 << 20
"""Freed buffers that the core keeps to use again, at most (memory/output.rs)."""
_SMALL = 32 << 20
"""Buffers of at most this size are used again by other files; of larger ones, the next buffer of another size frees the oldest."""
_LAYERS, _TASKS, _ITEMS = 4, 8, 128
"""Limits of a sample: layers, tasks, and examples (or leaves) of each."""
_ALL = 4096
"""Ranges times examples up to which all are planned."""

ReadRange = tuple[int, int, int, int]
"""A range of a layer that a task reads: layer (a position), first and end (examples or leaves), bytes of rows."""
RangeNeeds = Callable[[int, int, int, int], tuple[int | None, int]]
"""Of layer, first, end and the bytes of the whole range: bytes read (None: not known), and memory."""

ExamplesOf = Callable[[int, int, int], tuple[int, int]]
"""Of layer, first and end: the first of its examples, and their end."""


@dataclass(frozen=True)
class Needs:
    """What tasks take: ``read`` of all of them, ``memory`` of the largest beside that of its process.

    ``loading`` is that of a process that has the dataset open and loads its largest file once more, if files are decoded.
    """

    read: int
    memory: int
    loading: int = 0


def needs(
    store: Store, tasks: Sequence[Sequence[ReadRange]], plan: RangeNeeds, inputs: Sequence[Input], span: ExamplesOf
) -> Needs:
    """What tasks take that read these ranges, one after the other.

    Args:
        store: the dataset.
        tasks: the ranges of each task.
        plan: asks the core about a range.
        inputs: the dataset's files, for those that are decoded.
        span: the examples of a range.
    """
    some = [ranges for ranges in tasks if ranges]
    if not some:
        return Needs(0, 0)
    rows = sum(size for ranges in some for *_, size in ranges)
    asked = _sample(some)
    read, seen, memory, unknown = 0, 0, 0, False
    whole = len(asked) == sum(map(len, some))
    for layer, first, end, size in asked:
        last = end if whole else min(end, first + _ITEMS)
        found, held = plan(layer, first, last, size)
        memory = max(memory, held)
        if found is None:
            unknown = True
            continue
        read += found
        seen += size * (last - first) // max(end - first, 1)
    if not unknown:
        return Needs(read if seen == rows else round(read * rows / max(seen, 1)), memory)
    return _decoded(store, some, memory, inputs, span)


def _sample(tasks: Sequence[Sequence[ReadRange]]) -> list[ReadRange]:
    """All ranges, or those of some layers in some tasks, the largest among them."""
    every = [each for ranges in tasks for each in ranges]
    if sum(end - first for _, first, end, _ in every) <= _ALL:
        return every
    chosen = {int(i) for i in np.linspace(0, len(tasks) - 1, min(_TASKS, len(tasks)))}
    found = []
    for i in sorted(chosen):
        ranges = tasks[i]
        found += [ranges[int(k)] for k in np.linspace(0, len(ranges) - 1, min(_LAYERS, len(ranges)))]
    return [max(every, key=lambda each: each[3]), *found]


def _decoded(
    store: Store, tasks: Sequence[Sequence[ReadRange]], planned: int, inputs: Sequence[Input], span: ExamplesOf
) -> Needs:
    """What tasks take whose files must be decoded, or read whole to be understood; ``planned`` is the core's own memory."""
    files = {each.path: each.size or 0 for each in inputs}
    rows = [sum(size for *_, size in ranges) for ranges in tasks]
    units = store.contents.units
    if units is None:
        if not store.rows.decodes:  # rows of a server, which are read as they lie
            return Needs(sum(rows), planned)
        named = {str(Location.at(file)) for file in store.contents.files()}
        sizes = [size for path, size in files.items() if path in named]
        stored = sum(sizes) * len(named) // max(len(sizes), 1)
        return Needs(stored, planned + min(max(rows), DECODED_MEMORY))
    bounds = np.asarray(units, np.int64)
    each = _stored(store, bounds, files)
    held = _held(store, bounds)
    read, memory = 0, 0
    for ranges, size in zip(tasks, rows, strict=True):
        touched: set[int] = set()
        for layer, first, end, _ in ranges:
            a, b = span(layer, first, end)
            touched |= set(range(*np.searchsorted(bounds, [a, b - 1], "right") - [1, 0])) if b > a else set()
        some = np.fromiter(sorted(touched), np.int64)
        fits = int(held[some].sum()) <= DECODED_MEMORY
        read += int(each[some].sum()) * (1 if fits else len(ranges)) + (0 if store.rows.decodes else size)
        # Opening the dataset loads the first unit.
        both = np.union1d(some, [0])
        at_once = np.sort(each[both])[-4 * processors() :]
        pooled = _pooled(at_once)
        memory = max(memory, min(int(held[both].sum()), DECODED_MEMORY) + max(int(at_once.sum()), planned + pooled))
    return Needs(read, memory, int(held[0] + (each + held).max()))


def conversion_reads(asked: Asked, tasks: Sequence[Mapping[str, Any]], inputs: Sequence[Input]) -> int:
    """Bytes that the tasks of a conversion read for its rows. What they read for columns and lengths is not counted.

    Args:
        asked: the request.
        tasks: those of the plan: ranges of its ``examples``, or of its ``layers``.
        inputs: the dataset's files.
    """
    store = asked.store
    width = store.d_model * store.dtype.itemsize
    lengths = {int(group): np.maximum(store.tokens_in(store.layers[group]), 0) for group in asked.groups}
    bounds = None if store.contents.units is None else np.asarray(store.contents.units, np.int64)
    each = None if bounds is None else _stored(store, bounds, {file.path: file.size or 0 for file in inputs})
    rows, stored, ranges = 0, 0, []
    for task in tasks:
        a, b = task.get("examples", (0, asked.count))
        ids, groups = asked.ids(a, b), asked.groups[slice(*task.get("layers", (None, None)))].tolist()
        sizes = [int(lengths[group][ids].sum()) * width for group in groups]
        rows += len(groups) * len(ids) * width if asked.tokens == "last" else sum(sizes)
        if bounds is not None and each is not None:
            stored += int(each[np.unique(np.searchsorted(bounds, ids, "right") - 1)].sum())
        ranges.append([(group, a, b, size) for group, size in zip(groups, sizes, strict=True)])
    if each is not None:
        return stored if store.rows.decodes else stored + rows
    if asked.examples is not None or asked.tokens == "last" or Location.at(store.path).is_remote:
        if not store.rows.decodes:
            return rows
        ranges = [[(int(g), 0, len(lengths[g]), int(lengths[g].sum()) * width) for g in lengths]]

    def planned(g: int, a: int, b: int, size: int) -> tuple[int | None, int]:
        try:
            return store.rows.scan_needs(g, (a, b), False, size)
        except NOT_OF_DATA:
            raise
        except ActshardError:  # a damaged file, which its task reports
            return size, 0

    found = needs(store, ranges, planned, inputs, lambda g, a, b: (a, b)).read
    # Rows of all layers may lie together: then there are no gaps, which a scan of one layer would read.
    return found if store.rows.decodes else min(rows, found)


def converting(store: Store, share: float, blocks: int, inputs: Sequence[Input]) -> int:
    """Bytes of memory of a task that converts this share of a dataset, with blocks of so many bytes, beside its process's.

    Files that are decoded are kept, within the budget of the cache; while one is decoded, the file itself is in memory.
    """
    if store.contents.units is None:
        if not store.rows.decodes:
            return blocks
        rows = sum(int(np.maximum(store.tokens_in(layer), 0).sum()) for layer in store.layers)
        return blocks + min(int(rows * share) * store.d_model * store.dtype.itemsize, DECODED_MEMORY)
    bounds = np.asarray(store.contents.units, np.int64)
    held = _held(store, bounds)
    stored = _stored(store, bounds, {each.path: each.size or 0 for each in inputs})
    if not store.rows.decodes:  # a file is read whole for its columns
        return blocks + int(stored.max())
    # The first is decoded when the dataset is opened, and the next while one is converted.
    kept = min(int(held.sum() * share) + int(held.max()), int(held.sum()), DECODED_MEMORY)
    # A freed file stays with the process.
    return kept + blocks + int(stored.max())


def _pooled(sizes: NDArray[np.int64]) -> int:
    """Bytes of buffers of these sizes that stay with the process when they are freed."""
    small = np.sort(sizes[sizes <= _SMALL])[-_POOLED:].sum()
    return int(min(max(small, sizes.max(initial=0)), _POOLED_BYTES))


def _stored(store: Store, bounds: NDArray[np.int64], files: Mapping[str, int]) -> NDArray[np.int64]:
    """Bytes of the file of each unit, or its share of all files by examples."""
    named = [str(Location.at(file)) for file in store.contents.files()]
    total, count = sum(files.values()), np.diff(bounds)
    if len(named) == len(count):
        mean = total // max(len(files), 1)
        return np.array([files.get(name, mean) for name in named], np.int64)
    return total * count // max(int(bounds[-1]), 1)


def _held(store: Store, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of the decoded rows of each unit, which are kept; 0 for files that are read as they are."""
    made = np.zeros(len(bounds) - 1, np.int64)
    if store.rows.decodes:
        for layer in store.layers:
            ends = np.concatenate([[0], np.cumsum(np.maximum(store.tokens_in(layer), 0))])
            made += np.diff(ends[bounds])
    return made * (store.d_model * store.dtype.itemsize)
