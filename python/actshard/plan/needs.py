"""Predicts the bytes that tasks read and their memory, for tasks that read all rows.

Uncompressed rows are read in blocks. The core computes these reads and its buffers without reading (``Rows.scan_needs``,
``Rows.sum_needs``), including gaps between rows that one read spans. For large datasets only a sample of ranges and layers is
computed. Files that must be decoded are read whole: once if the cache holds all decoded files of a task, otherwise once per layer.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ActshardError
from actshard.base.location import Location
from actshard.base.work import existing_above, remove
from actshard.base.work.pool import processors
from actshard.formats.report import NOT_OF_DATA
from actshard.plan.plan import Plan
from actshard.reading.inputs import Input
from actshard.reading.store import Store
from actshard.writing.converting.planning import ConversionRequest

DECODED_MEMORY = 1 << 30
"""Bytes of decoded files that a store caches: the default of :func:`actshard.open`."""
_POOLED, _POOLED_BYTES = 8, 256 << 20
"""Maximum number and bytes of freed buffers that the core keeps for reuse (memory/output.rs)."""
_SMALL = 32 << 20
"""Buffers up to this size are reused for other files. A larger buffer is freed when one of another size is needed."""
_LAYERS, _TASKS, _ITEMS = 4, 8, 128
"""Limits of a sample: layers, tasks, and examples (or leaves) of each range."""
_ALL = 4096
"""Up to this number of examples (or leaves) in all ranges, no sample is taken."""

ReadRange = tuple[int, int, int, int]
"""A range of a layer that a task reads: layer (its index), first and end (examples or leaves), bytes of rows."""
RangeNeeds = Callable[[int, int, int, int], tuple[int | None, int]]
"""Maps layer, first, end and the bytes of the whole range to bytes read (None if unknown) and memory."""

ExamplesOf = Callable[[int, int, int], tuple[int, int]]
"""Maps layer, first and end to the first example of the range and the end of its examples."""


@dataclass(frozen=True)
class Needs:
    """Bytes that all tasks read, and memory of the largest task in addition to that of its process.

    ``loading``: if files are decoded, the memory of a process that has the dataset open and loads its largest file once more.
    """

    read: int
    memory: int
    loading: int = 0


def needs(
    store: Store, tasks: Sequence[Sequence[ReadRange]], plan: RangeNeeds, inputs: Sequence[Input], span: ExamplesOf
) -> Needs:
    """Predicts the needs of tasks that read these ranges in order.

    Args:
        store: the dataset.
        tasks: the ranges of each task.
        plan: returns the core's prediction for a range.
        inputs: the dataset's files with their sizes; used if files are decoded.
        span: returns the examples of a range.
    """
    range_lists = [ranges for ranges in tasks if ranges]
    if not range_lists:
        return Needs(0, 0)
    rows = sum(size for ranges in range_lists for *_, size in ranges)
    sample = _sample(range_lists)
    read, covered_bytes, memory, unknown = 0, 0, 0, False
    is_complete = len(sample) == sum(map(len, range_lists))
    for layer, first, end, size in sample:
        last = end if is_complete else min(end, first + _ITEMS)
        range_read, range_memory = plan(layer, first, last, size)
        memory = max(memory, range_memory)
        if range_read is None:
            unknown = True
            continue
        read += range_read
        covered_bytes += size * (last - first) // max(end - first, 1)
    if not unknown:
        return Needs(read if covered_bytes == rows else round(read * rows / max(covered_bytes, 1)), memory)
    return _decoded_needs(store, range_lists, memory, inputs, span)


def _sample(tasks: Sequence[Sequence[ReadRange]]) -> list[ReadRange]:
    """All ranges; or a sample of layers and tasks, which includes the largest range."""
    every = [entry for ranges in tasks for entry in ranges]
    if sum(end - first for _, first, end, _ in every) <= _ALL:
        return every
    chosen = {int(i) for i in np.linspace(0, len(tasks) - 1, min(_TASKS, len(tasks)))}
    sample = []
    for i in sorted(chosen):
        ranges = tasks[i]
        sample += [ranges[int(k)] for k in np.linspace(0, len(ranges) - 1, min(_LAYERS, len(ranges)))]
    return [max(every, key=lambda entry: entry[3]), *sample]


def _decoded_needs(
    store: Store, tasks: Sequence[Sequence[ReadRange]], planned: int, inputs: Sequence[Input], span: ExamplesOf
) -> Needs:
    """Needs of tasks whose files must be decoded or read whole; ``planned`` is the memory that the core predicted."""
    files = {input_file.path: input_file.size or 0 for input_file in inputs}
    rows = [sum(size for *_, size in ranges) for ranges in tasks]
    units = store.contents.units
    if units is None:
        if not store.rows.decodes:  # uncompressed rows on a server, which are read without gaps
            return Needs(sum(rows), planned)
        row_files = {str(Location.at(file)) for file in store.contents.files()}
        sizes = [size for path, size in files.items() if path in row_files]
        stored = sum(sizes) * len(row_files) // max(len(sizes), 1)
        return Needs(stored, planned + min(max(rows), DECODED_MEMORY))
    bounds = np.asarray(units, np.int64)
    stored_bytes = _stored_bytes(store, bounds, files)
    decoded_bytes = _decoded_bytes(store, bounds)
    read, memory = 0, 0
    for ranges, size in zip(tasks, rows, strict=True):
        touched: set[int] = set()
        for layer, first, end, _ in ranges:
            a, b = span(layer, first, end)
            touched |= set(range(*np.searchsorted(bounds, [a, b - 1], "right") - [1, 0])) if b > a else set()
        units_read = np.fromiter(sorted(touched), np.int64)
        fits = int(decoded_bytes[units_read].sum()) <= DECODED_MEMORY
        read += int(stored_bytes[units_read].sum()) * (1 if fits else len(ranges)) + (0 if store.rows.decodes else size)
        # Opening the dataset loads the first unit.
        units_loaded = np.union1d(units_read, [0])
        at_once = np.sort(stored_bytes[units_loaded])[-4 * processors() :]
        pooled = _pooled_bytes(at_once)
        memory = max(
            memory,
            min(int(decoded_bytes[units_loaded].sum()), DECODED_MEMORY) + max(int(at_once.sum()), planned + pooled),
        )
    return Needs(read, memory, int(decoded_bytes[0] + (stored_bytes + decoded_bytes).max()))


def conversion_reads(request: ConversionRequest, tasks: Sequence[Mapping[str, Any]], inputs: Sequence[Input]) -> int:
    """Bytes that the tasks of a conversion read for rows; reads of columns and lengths are not counted.

    Args:
        request: the request.
        tasks: the plan's tasks: ranges of ``examples``, or of ``layers``.
        inputs: the dataset's files.
    """
    store = request.store
    width = store.d_model * store.dtype.itemsize
    lengths = {int(group): np.maximum(store.tokens_in(store.layers[group]), 0) for group in request.groups}
    bounds = None if store.contents.units is None else np.asarray(store.contents.units, np.int64)
    stored_bytes = (
        None if bounds is None else _stored_bytes(store, bounds, {file.path: file.size or 0 for file in inputs})
    )
    rows, stored, ranges = 0, 0, []
    for task in tasks:
        a, b = task.get("examples", (0, request.count))
        ids, groups = request.ids(a, b), request.groups[slice(*task.get("layers", (None, None)))].tolist()
        sizes = [int(lengths[group][ids].sum()) * width for group in groups]
        rows += len(groups) * len(ids) * width if request.tokens == "last" else sum(sizes)
        if bounds is not None and stored_bytes is not None:
            stored += int(stored_bytes[np.unique(np.searchsorted(bounds, ids, "right") - 1)].sum())
        ranges.append([(group, a, b, size) for group, size in zip(groups, sizes, strict=True)])
    if stored_bytes is not None:
        return stored if store.rows.decodes else stored + rows
    if request.examples is not None or request.tokens == "last" or Location.at(store.path).is_remote:
        if not store.rows.decodes:
            return rows
        ranges = [[(int(g), 0, len(lengths[g]), int(lengths[g].sum()) * width) for g in lengths]]

    def planned(g: int, a: int, b: int, size: int) -> tuple[int | None, int]:
        try:
            return store.rows.scan_needs(g, (a, b), False, size)
        except NOT_OF_DATA:
            raise
        except ActshardError:  # a damaged file: its task will report it
            return size, 0

    scan_bytes = needs(store, ranges, planned, inputs, lambda g, a, b: (a, b)).read
    # If the layers of an example are consecutive in a file, a conversion reads no gaps, but a scan of one layer would.
    return scan_bytes if store.rows.decodes else min(rows, scan_bytes)


def converting(store: Store, share: float, blocks: int, inputs: Sequence[Input]) -> int:
    """Memory of a task that converts a share of a dataset in blocks of ``blocks`` bytes, in addition to that of its process.

    Decoded files are cached within the cache's limit; while a file is decoded, its encoded bytes are in memory, too.
    """
    if store.contents.units is None:
        if not store.rows.decodes:
            return blocks
        rows = sum(int(np.maximum(store.tokens_in(layer), 0).sum()) for layer in store.layers)
        return blocks + min(int(rows * share) * store.d_model * store.dtype.itemsize, DECODED_MEMORY)
    bounds = np.asarray(store.contents.units, np.int64)
    decoded_bytes = _decoded_bytes(store, bounds)
    stored = _stored_bytes(store, bounds, {input_file.path: input_file.size or 0 for input_file in inputs})
    if not store.rows.decodes:  # a file is read whole for its columns
        return blocks + int(stored.max())
    # One file is decoded when the dataset is opened, and another ahead during the conversion.
    cached_bytes = min(
        int(decoded_bytes.sum() * share) + int(decoded_bytes.max()), int(decoded_bytes.sum()), DECODED_MEMORY
    )
    # The allocator keeps the memory of one freed file.
    return cached_bytes + blocks + int(stored.max())


def _pooled_bytes(sizes: NDArray[np.int64]) -> int:
    """Bytes of buffers of these sizes that the process keeps after they are freed."""
    small = np.sort(sizes[sizes <= _SMALL])[-_POOLED:].sum()
    return int(min(max(small, sizes.max(initial=0)), _POOLED_BYTES))


def _stored_bytes(store: Store, bounds: NDArray[np.int64], files: Mapping[str, int]) -> NDArray[np.int64]:
    """Bytes of each unit's file; if units are not files, a share of all files in proportion to the unit's examples."""
    paths = [str(Location.at(file)) for file in store.contents.files()]
    total, count = sum(files.values()), np.diff(bounds)
    if len(paths) == len(count):
        mean = total // max(len(files), 1)
        return np.array([files.get(name, mean) for name in paths], np.int64)
    return total * count // max(int(bounds[-1]), 1)


def _decoded_bytes(store: Store, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of each unit's decoded rows, which are cached; 0 for files that are not decoded."""
    tokens = np.zeros(len(bounds) - 1, np.int64)
    if store.rows.decodes:
        for layer in store.layers:
            ends = np.concatenate([[0], np.cumsum(np.maximum(store.tokens_in(layer), 0))])
            tokens += np.diff(ends[bounds])
    return tokens * (store.d_model * store.dtype.itemsize)


# Measures how fast one process runs a plan: it runs a part of a task in a scratch folder next to the result.


LIMIT = 64 << 20
"""Bytes of a sample."""
_SHORT = 0.5
"""Seconds."""
_WARMING = 16
"""A first run does this fraction (1/16) of the sample. It also opens files and loads tokenizers, which must not count as work."""


@dataclass(frozen=True)
class Rate:
    """A measured rate.

    Attributes:
        bytes: size of the sample, in the unit of ``plan.tasks[i]["bytes"]``.
        seconds: time of one process, with all its threads.
    """

    bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


def measure(plan: Plan, limit: int = LIMIT) -> Rate | str:
    """Runs a sample of a plan's work on this machine, and removes the files that it wrote.

    Args:
        plan: the plan. Its working folder is not touched.
        limit: maximum bytes of the sample.

    Returns:
        The rate, or the reason why there is none: the smallest part of the work exceeds the limit (a compressed text file, a
        large file to copy, a model's capture), or the sample failed.
    """
    try:
        first = _time_sample(plan, max(limit // _WARMING, 1))
        total = _time_sample(plan, limit)
    except (ActshardError, OSError) as error:
        return f"a sample of the work failed: {error}"
    if first is None or total is None:
        return plan.implementation.undivided.format(limit=f"{limit:,} bytes")
    difference = Rate(total.bytes - first.bytes, total.seconds - first.seconds)
    # If both runs are short, their difference is noise.
    return difference if difference.bytes > 0 and difference.seconds > _SHORT else total


def _time_sample(plan: Plan, limit: int) -> Rate | None:
    verb = plan.implementation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = verb.part(plan, limit)
        if part is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix=".actshard-sample-", dir=existing_above(plan.work)))
        try:
            began = time.perf_counter()
            # The part runs as task 1, because task 0 does additional work in some verbs.
            verb.run(replace(plan, tasks=(plan.tasks[0], part)), 1, folder, lambda done, total: None)
            return Rate(int(part["bytes"]), max(time.perf_counter() - began, 1e-6))
        finally:
            remove(folder)
