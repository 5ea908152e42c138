"""A conversion in segments: tasks of a plan write ranges of examples, or groups of layers, separately; a commit combines them.

A segment is written as by a writer that resumes at its first example. The target's state follows from the lengths of the examples
before, and the segment has a separate folder (:class:`~actshard.formats.target.Apart`). Combined, the segments are the files of
a single writer before it finishes the dataset. The commit then finishes the dataset as that writer does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.converting.blocks import blocks, cuts, groups, lengths_of, read
from actshard.converting.columns import Columns
from actshard.converting.planning import Asked
from actshard.converting.running import overflowed
from actshard.errors import ActshardError
from actshard.formats.target import Apart, Block, Target
from actshard.work import make_folder, sync_folders
from actshard.writing.columns import Decided
from actshard.writing.recorded import table_of

if TYPE_CHECKING:
    import pyarrow as pa

_BUFFERS = 2
"""Blocks in memory: one is read while the other is written."""
_PAGE = 4096


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
    def of(cls, asked: Asked, target: Target) -> Layout:
        """Reads the lengths of all examples."""
        lengths, firsts, origins = [], [], []
        same = True
        for at, _, counts, _ in groups(asked, target, 0):
            own = lengths_of(target, counts)
            same = same and bool((own == own[:, :1]).all())
            lengths.append(np.ascontiguousarray(own[:, :1]) if same else own)
            for first, _ in cuts(target, counts):
                firsts.append(at + first)
                origins.append(at)
        wide = len(asked.layers)
        parts = lengths if same else [np.broadcast_to(part, (len(part), wide)) for part in lengths]
        return cls(np.concatenate(parts), np.array(firsts, np.int64), np.array(origins, np.int64))

    def settle(self, asked: Asked, target: Target) -> None:
        """Determines the target's remaining settings from the lengths of the first block, as a writer does."""
        end = int(self.firsts[1]) if len(self.firsts) > 1 else asked.count
        memory = np.empty((0, asked.store.d_model), target.dtype)
        target.settle(Block(memory, self.by_layer(len(asked.layers))[:end]))

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each example, of its longest layer."""
        tokens: NDArray[np.int64] = np.maximum(self.lengths, 0).max(axis=1)
        return tokens

    def rows(self, layers: int) -> NDArray[np.int64]:
        """Rows of each example, of all layers."""
        held = np.maximum(self.lengths, 0)
        made: NDArray[np.int64] = held[:, 0] * layers if held.shape[1] == 1 else held.sum(axis=1)
        return made

    def by_layer(self, layers: int) -> NDArray[np.int64]:
        """The lengths ``(n, layers)``, a view."""
        return np.broadcast_to(self.lengths, (len(self.lengths), layers))


def balanced(weights: NDArray[np.int64], borders: NDArray[np.int64], tasks: int) -> list[int]:
    """Returns the first numbers of at most ``tasks`` ranges of nearly equal weight. Ranges begin at ``borders``, sorted from 0."""
    ends = np.concatenate([[0], np.cumsum(weights)])
    at = ends[borders]
    wanted = ends[-1] * np.arange(1, tasks) / tasks
    right = np.clip(np.searchsorted(at, wanted), 1, max(len(at) - 1, 1))
    if len(at) == 1:
        return [0]
    nearer = np.where(wanted - at[right - 1] <= at[right] - wanted, right - 1, right)
    return [int(x) for x in borders[np.unique(np.concatenate([[0], nearer]))]]


@dataclass(frozen=True)
class Written:
    """The files and results of a written segment.

    Attributes:
        table: lengths and columns of its examples.
        state: the target's state, for :meth:`Target.together`.
        fragments: files that begin within a file of the dataset: (name, first byte, end).
        overflows: finite values that became infinite.
        rows: bytes of rows.
        changes: columns that the format stores as another type, with a description.
    """

    table: pa.Table
    state: dict[str, Any]
    fragments: list[tuple[str, int, int]]
    overflows: int
    rows: int
    changes: dict[str, str]


def write_segment(
    asked: Asked,
    target: Target,
    columns: Columns,
    span: tuple[int, int, int],
    *,
    overflow: str,
    tell: Callable[[int, int], object],
) -> Written:
    """Writes the examples of a segment to files below ``target.root`` and syncs them.

    Args:
        asked: the request.
        target: a target that has begun at the segment's first example.
        columns: the columns to convert.
        span: first example, end, and the origin of the first block.
        overflow: ``"refuse"`` or ``"allow"``.
        tell: function called with (examples done, examples).

    Raises:
        Errors of reading and writing; errors of reading name the examples.
    """
    first, end, origin = span
    decided = Decided(target, [])
    done: list[Block] = []
    over, size, at = 0, 0, origin
    make_folder(target.root)
    buffers: list[NDArray[np.uint8] | None] = [None] * _BUFFERS
    writing: list[Future[None]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="actshard-writer") as pool:
        for whole_ids, whole_counts, unit in blocks(asked, target, origin):
            begin = at
            at = min(begin + len(whole_ids), end)  # blocks that are not whole files are cut at the segment's end
            if begin < first:
                continue
            ids, counts = whole_ids[: at - begin], whole_counts[: at - begin]
            lengths = lengths_of(target, counts)
            rows = int(np.maximum(lengths, 0).sum())
            try:
                fitted = decided.fit(columns.of(ids, unit, target), begin, len(ids), alike=False)
                decided.keep(fitted)
                while len(writing) >= _BUFFERS:
                    writing.pop(0).result()
                memory = _memory(buffers, len(done) % _BUFFERS, rows, target)
                lost: list[int] = []
                read(asked, ids, counts, lengths, memory, lost)
                if sum(lost) and overflow == "refuse":
                    raise overflowed(asked, target, sum(lost), f" of examples {begin} to {begin + len(ids) - 1}")
            except ActshardError as error:
                if "example" not in error.detail:
                    error.detail += f" (reading examples {begin} to {begin + len(ids) - 1})"
                raise
            over += sum(lost)
            size += rows * target.row_bytes
            block = Block(memory, lengths, fitted.table)
            writing.append(pool.submit(target.write, block))
            done.append(Block(memory[:0], lengths, fitted.table))
            tell(at - first, end - first)
            if at >= end:
                break
        for each in writing:
            each.result()
    return _closed(target, done, over, size, decided.changes)


def _closed(target: Target, done: Sequence[Block], over: int, size: int, changes: dict[str, str]) -> Written:
    paths, state = target.dirty()
    folders = {path.parent for path in paths}
    _native.sync_files([path for path in paths if path not in folders])
    target.committed()
    sync_folders(sorted({Path(path) for path, _, _ in os.walk(target.root)}, reverse=True))
    return Written(table_of(done), state, _fragments(target), over, size, changes)


def _fragments(target: Target) -> list[tuple[str, int, int]]:
    made = []
    for path, (begin, end) in ({} if target.apart is None else target.apart.extents).items():
        if begin == 0:
            continue
        # Complete files were renamed by then.
        final = path if path.exists() else path.with_name(path.name.removeprefix(".").removesuffix(".part"))
        made.append((final.relative_to(target.root).as_posix(), begin, end))
    return sorted(made)


def apart(target: Target, root: Path, first: int, state: dict[str, Any]) -> Target:
    """Makes a target write the examples from ``first`` on to separate files below ``root``."""
    target.root = root
    target.apart = Apart(target.room)
    target.begin_at(first, state)
    return target


def _memory(buffers: list[NDArray[np.uint8] | None], k: int, rows: int, target: Target) -> NDArray[Any]:
    """A page-aligned array ``(rows, d_model)`` in the buffer k."""
    need = rows * target.row_bytes
    held = buffers[k]
    if held is None or held.size < need + _PAGE:
        held = buffers[k] = np.empty(max(need, min(target.block_bytes, 4 * need)) + _PAGE, np.uint8)
    first = -held.ctypes.data % _PAGE
    assert target.dtype is not None
    return held[first : first + need].view(target.dtype).reshape(rows, target.spec.d_model)
