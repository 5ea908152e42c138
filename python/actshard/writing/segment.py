"""Writes consecutive examples of a dataset on a background thread: all of them, or the range of one task of a plan.

A bounded queue connects the caller's thread and the writing thread: one block is written while others are filled or wait.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._columns import numbers
from actshard.base.errors import ActshardError, ClosedError, InternalError, from_os
from actshard.base.request import Digest, Digests, joined_digests
from actshard.base.work import Commit, make_folder, sync_folders
from actshard.formats.tables import concatenated
from actshard.formats.target import Block, Target
from actshard.writing.columns import Decided

if TYPE_CHECKING:
    import pyarrow as pa


# Lengths and columns of examples as tables, which journals and tasks of plans keep until the dataset is finished.


TOKENS, BY_LAYER, OWN = "actshard.tokens", "actshard.tokens_by_layer", "actshard.own_tokens"
"""Names of the columns that contain lengths: of all layers, by layer, and before padding."""


def table_of(blocks: Sequence[Block]) -> pa.Table:
    """The lengths and columns of blocks; their rows are not used."""
    import pyarrow as pa

    tables = []
    for block in blocks:
        same = (block.lengths == block.lengths[:, :1]).all()
        if same:
            name, column = TOKENS, numbers(block.lengths[:, 0])
        else:
            flat = numbers(np.ascontiguousarray(block.lengths).reshape(-1))
            name, column = BY_LAYER, pa.FixedSizeListArray.from_arrays(flat, block.lengths.shape[1])
        table = pa.table(
            {name: column} | ({} if block.unpadded_lengths is None else {OWN: numbers(block.unpadded_lengths)})
        )
        if block.columns is not None:
            for field, values in zip(block.columns.schema, block.columns.columns, strict=True):
                table = table.append_column(field, values)
        tables.append(table)
    return concatenated(tables)[0].combine_chunks()


def lengths_in(tables: Iterable[pa.Table], layers: int) -> NDArray[np.int64]:
    """Tokens ``(n, layers)`` of the examples of tables, in order; equal lengths of all layers are stored once."""
    parts = [_lengths(table, layers) for table in tables]
    if not parts:
        return np.zeros((0, layers), np.int64)
    if all(part.strides[1] == 0 or layers == 1 for part in parts):
        token_counts = np.concatenate([part[:, 0] for part in parts])
        return np.broadcast_to(token_counts[:, None], (len(token_counts), layers))
    return np.concatenate(parts)


def columns_in(tables: Iterable[pa.Table]) -> tuple[pa.Table | None, list[str]]:
    """Columns of the examples of tables, and names of those whose types differ and became text; None if there are no columns."""
    user_tables = [t.drop_columns([c for c in (TOKENS, BY_LAYER, OWN) if c in t.column_names]) for t in tables]
    return concatenated(user_tables) if any(t.num_columns for t in user_tables) else (None, [])


def _lengths(table: pa.Table, layers: int) -> NDArray[np.int64]:
    if BY_LAYER not in table.column_names and TOKENS in table.column_names and not table[TOKENS].null_count:
        return np.broadcast_to(table[TOKENS].to_numpy()[:, None], (table.num_rows, layers))
    lengths = np.zeros((table.num_rows, layers), np.int64)
    if TOKENS in table.column_names:
        column = table[TOKENS]
        is_valid = column.is_valid().to_numpy()
        lengths[is_valid] = column.drop_null().to_numpy()[:, None]
    if BY_LAYER in table.column_names:
        column = table[BY_LAYER]
        is_valid = column.is_valid().to_numpy()
        flat = column.drop_null().combine_chunks()
        flat = flat if not hasattr(flat, "chunks") else flat.chunk(0)
        lengths[is_valid] = flat.flatten().to_numpy().reshape(-1, layers)
    return lengths


MEMORY = 192 << 20
"""Maximum bytes of three blocks; if they are larger, two are used."""
_WRITES = 4 * (4 << 20)
"""Bytes of the core's buffers for concurrent writes of rows whose alignment in memory differs from the file (write/pieces.rs)."""
_PAGE = 4096
"""Alignment of blocks in bytes: direct writes copy other memory first."""


def blocks_of(target: Target) -> int:
    """Number of blocks in memory at once."""
    return 2 if 3 * target.block_bytes > MEMORY else 3


def write_memory(target: Target, size: int) -> int:
    """Bytes of memory for writing rows of ``size`` bytes, unless single examples are larger than a block."""
    return min(blocks_of(target) * target.block_bytes, size) + min(_WRITES, size)


class SegmentWriter:
    """Writes blocks of examples. Not thread-safe: only the thread that creates it may use it."""

    def __init__(self, target: Target, tables: Iterable[pa.Table] = ()) -> None:
        """Starts after the examples that the target has written; ``tables`` are their lengths and columns."""
        self.target = target
        self.columns = Decided(target, tables)
        self.committed = self._handed = target.n
        self.last: Commit | None = None
        """The latest commit."""
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._closed = False
        self._waiting: list[Block] = []
        """Blocks that are written but not committed."""
        blocks = blocks_of(target)
        # All blocks may wait: blocks of a decoded shard are filled faster than a disk writes them.
        self._queue: queue.Queue[tuple[str, Block | None] | None] = queue.Queue(blocks)
        self._free: queue.Queue[NDArray[np.uint8] | None] = queue.Queue()
        for _ in range(blocks):
            self._free.put(None)
        self._thread = threading.Thread(target=self._work, name="actshard-writer", daemon=True)
        self._thread.start()

    # -- blocks ----------------------------------------------------------------------------------------------------

    def memory(self, rows: int) -> NDArray[np.generic]:
        """Returns an array ``(rows, d_model)`` to fill. Waits for a free block; :meth:`put` returns it to the pool."""
        self.check()
        need = rows * self.target.row_bytes
        buffer: NDArray[np.uint8] | None = None
        while True:
            try:
                buffer = self._free.get(timeout=0.5)
                break
            except queue.Empty:
                self.check()
        if buffer is None or buffer.size < need + _PAGE:
            buffer = np.empty(max(need, min(self.target.block_bytes, 4 * need)) + _PAGE, np.uint8)
        dtype = self.target.dtype
        assert dtype is not None
        first = -buffer.ctypes.data % _PAGE
        return buffer[first : first + need].view(dtype).reshape(rows, self.target.spec.d_model)

    def put(self, block: Block) -> None:
        """Queues a block for writing and takes ownership of its memory. The block may have new columns."""
        self.check()
        fitted = self.columns.fit(block.columns, self._handed, len(block), alike=False)
        self.columns.keep(fitted)
        self.put_fitted(replace(block, columns=fitted.table))

    def put_fitted(self, block: Block) -> None:
        """Queues a block whose columns were already fitted."""
        self.check()
        digests = self._digests_of(block)  # here, because the writing thread often waits for the disk
        self._handed += len(block)
        self._send(("block", replace(block, digests=digests)))

    def give_back(self, memory: NDArray[Any]) -> None:
        """Returns memory of :meth:`memory` to the pool."""
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self._free.put(memory if memory.dtype == np.uint8 else None)

    def commit(self) -> int:
        """Waits until all queued blocks are committed; returns the number of committed examples."""
        self.check()
        self._send(("commit", None))
        self._queue.join()
        self.check()
        return self.committed

    def _send(self, what: tuple[str, Block | None]) -> None:
        while True:
            try:
                self._queue.put(what, timeout=0.5)
                return
            except queue.Full:
                self.check()

    def check(self) -> None:
        """Raises ClosedError if the sink is closed or belongs to another process, or the background thread's error."""
        if self._pid != os.getpid():
            raise ClosedError(
                f"this writer belongs to process {self._pid}; create one in each process (part=)", path=self.target.root
            )
        if self._closed:
            why = "" if self._error is None else f" after an error: {self._error}"
            raise ClosedError(f"the writer was closed{why}", path=self.target.root)
        if self._error is not None:
            self.abort()
            raise self._error

    def abort(self) -> None:
        """Stops. Committed examples stay."""
        if not self._closed:
            self._closed = True
            self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive() and self._pid == os.getpid():
            self._queue.put(None)
            self._thread.join()

    # -- the background thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (what := self._queue.get()) is not None:
            try:
                if self._error is None:
                    kind, block = what
                    if block is not None:
                        self._write(block)
                    if kind == "commit":
                        self._commit()
            except BaseException as error:
                self._error = self._convert_error(error)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _convert_error(self, error: BaseException) -> BaseException:
        """Converts an error to an ActshardError."""
        if isinstance(error, ActshardError | MemoryError) or not isinstance(error, Exception):
            return error
        if isinstance(error, OSError):
            converted = from_os(error, error.filename or self.target.root, "write")
        else:
            converted = InternalError(f"{type(error).__name__}: {error}", path=self.target.root)
        converted.__cause__ = error
        return converted

    def _write(self, block: Block) -> None:
        make_folder(self.target.root)
        self.target.write(block)
        self._waiting.append(replace(block, memory=block.memory[:0]))
        self.give_back(block.memory)

    def _digests_of(self, block: Block) -> Digests:
        """Digests of the rows of the next block, as they will be read."""
        rows = self.target.as_read(block)
        counts = np.maximum(block.lengths, 0)
        row_bytes = self.target.spec.d_model * rows.itemsize
        hashes = _native.hash_rows(rows.reshape(-1).view(np.uint8), row_bytes, counts.reshape(-1))
        return tuple(Digest.of(layer, self._handed) for layer in hashes.reshape(counts.shape).T)

    def _commit(self) -> None:
        if not self._waiting:
            return
        target = self.target
        paths, state = target.dirty()
        folders = {path.parent for path in paths}
        files = [os.fspath(path) for path in paths if path not in folders]
        _native.sync_files([*files])
        sync_folders(sorted(folders))
        target.committed()
        prefix_length = len(os.fspath(target.root)) + 1
        overflows = sum(block.overflows for block in self._waiting)
        digests = joined_digests(block.digests for block in self._waiting)
        assert digests is not None
        names = [path[prefix_length:] for path in files]
        self.last = Commit(target.n, table_of(self._waiting), state, overflows, digests, names)
        self._waiting.clear()
        self._record(self.last)
        self.committed = target.n

    def _record(self, commit: Commit) -> None:
        """Records a commit, before it counts."""
