"""Blocks of examples on their way to the disk: written by a thread of ours, committed now and then, finished at last.

The thread that makes blocks and the one that writes them meet in a queue of two: while one block is written the next is filled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard import _native
from actshard.errors import ActshardError, ArgumentError, ClosedError, ExistsError, FormatError
from actshard.writing.target import Block, Examples, Target
from actshard.writing.work import Journal, make_folder, rename

COMMIT_BYTES = 1 << 30
"""Data between two commits, about: what a crash costs at most."""
MEMORY = 192 << 20
"""What blocks may take together, if two fit."""
_TOKENS, _BY_LAYER = "actshard.tokens", "actshard.tokens_by_layer"
"""Columns of the journal's tables that hold lengths."""


class Sink:
    """Writes blocks of one dataset. Made by one thread, used by it alone."""

    def __init__(self, target: Target, *, resume: bool) -> None:
        self.target = target
        self.journal = Journal(target.root)
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._closed = False
        self._configured = False
        self._waiting: list[Block] = []
        """Written, not committed."""
        self._since = 0
        self.written_bytes = 0
        """Bytes of rows brought to files so far."""
        begun = self.journal.exists()
        if begun and not resume:
            self.journal.read()
            raise ExistsError(
                f"holds {self.journal.examples} examples of a dataset that is not finished: resume=True continues it, "
                "or remove the folder",
                path=target.root,
            )
        make_folder(self.journal.folder)
        self.journal.lock.take()
        try:
            if self.journal.exists():
                self.journal.read()
            if self.journal.config:
                self._agree(self.journal.config)
                self._configured = True
                lengths = self._lengths_so_far()
                if len(lengths) != self.journal.examples:
                    raise FormatError(
                        f"expected {self.journal.examples} examples, found tables of {len(lengths)}",
                        path=self.journal.folder,
                    )
                if self.journal.commits:
                    target.restore([c["state"] for c in self.journal.commits], lengths)
        except BaseException:
            self.journal.lock.release()
            raise
        self.committed = self.journal.examples
        self._queue: queue.Queue[tuple[str, Block | None] | None] = queue.Queue(1)
        self._free: queue.Queue[NDArray[np.uint8] | None] = queue.Queue()
        for _ in range(2 if 3 * target.block_bytes > MEMORY else 3):
            self._free.put(None)
        self._thread = threading.Thread(target=self._work, name="actshard-writer", daemon=True)
        self._thread.start()

    def _agree(self, config: dict[str, Any]) -> None:
        """What is asked for now is what was asked for then; what is left open now is as it was."""
        asked = self.target.config()
        self.target.adopt(config)
        for name, value in asked.items():
            if value is not None and value != config.get(name) and name != "created":
                raise ArgumentError(
                    f"{name}: the unfinished dataset in {self.target.root} was begun with {config.get(name)!r}, "
                    f"found {value!r}; say the same, or begin elsewhere"
                )

    # -- blocks ----------------------------------------------------------------------------------------------------

    def memory(self, rows: int) -> NDArray[Any]:
        """Memory for a block of so many rows, waiting for one to be written; it goes back with :meth:`put`."""
        self._check()
        need = rows * self.target.row_bytes
        held: NDArray[np.uint8] | None = None
        while True:
            try:
                held = self._free.get(timeout=0.5)
                break
            except queue.Empty:
                self._check()
        if held is None or held.size < need:
            held = np.empty(max(need, min(self.target.block_bytes, 4 * need)), np.uint8)
        dtype = self.target.dtype
        assert dtype is not None
        return held[:need].view(dtype).reshape(rows, self.target.spec.d_model)

    def put(self, block: Block) -> None:
        """Hands a block over; its memory is not the caller's any more."""
        self._check()
        self._send(("block", block))

    def commit(self) -> int:
        """Waits until everything handed over is safe on the disk: how many examples that is."""
        self._check()
        self._send(("commit", None))
        self._queue.join()
        self._check()
        return self.committed

    def _send(self, what: tuple[str, Block | None]) -> None:
        while True:
            try:
                self._queue.put(what, timeout=0.5)
                return
            except queue.Full:
                self._check()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this writer belongs to process {self._pid}; create one in each process (part=)", path=self.target.root
            )
        if self._closed:
            why = "" if self._error is None else f" by an error: {self._error}"
            raise ClosedError(f"the writer was closed{why}", path=self.target.root)
        if self._error is not None:
            self.abort()
            raise self._error

    def finish(self) -> Path:
        """Commits everything and completes the dataset: where it is."""
        self.commit()
        target = self.target
        if self.committed == 0:
            self.abort()
            with contextlib.suppress(OSError):
                shutil.rmtree(self.journal.folder)
                target.root.rmdir()
            raise ArgumentError("nothing was appended: a dataset has at least one example")
        expected = target.spec.num_examples
        if expected is not None and expected != self.committed:
            self.abort()
            raise ArgumentError(
                f"num_examples: expected {expected}, {self.committed} were appended; they are kept, resume=True appends the others"
            )
        self._stop()
        self._closed = True
        try:
            if not self.journal.finished:
                self.journal.close()
                lengths, columns = self.read_back()
                target.finish(Examples(lengths, columns))
                self.journal.finish()
            place = target.place()
            if place != target.root:
                self._move(place)
            self.journal.remove()
            _native.sync_files([place, place.parent])
        finally:
            self.journal.lock.release()
        return place

    def _move(self, place: Path) -> None:
        try:
            rename(self.target.root, place)
        except ActshardError as error:
            raise ExistsError(f"cannot give the finished dataset its name: {error.detail}", path=place) from error
        self.journal.moved(place)

    def discard(self) -> None:
        """Forgets everything that was written."""
        self.abort()
        shutil.rmtree(self.target.root, ignore_errors=True)

    def abort(self) -> None:
        """Stops without finishing. What was committed stays, to be continued."""
        if not self._closed:
            self._closed = True
            self._stop()
            self.journal.lock.release()

    def _stop(self) -> None:
        if self._thread.is_alive() and self._pid == os.getpid():
            self._queue.put(None)
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (what := self._queue.get()) is not None:
            try:
                if self._error is None:
                    kind, block = what
                    if block is not None:
                        self._write(block)
                    if kind == "commit" or self._since >= COMMIT_BYTES:
                        self._commit()
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, block: Block) -> None:
        self._configure()
        make_folder(self.target.root)
        self.target.write(block)
        size = int(np.maximum(block.lengths, 0).sum()) * self.target.row_bytes
        self.written_bytes += size
        self._since += size
        self._waiting.append(Block(block.memory[:0], block.lengths, block.columns))
        base = block.memory
        while isinstance(base.base, np.ndarray):
            base = base.base
        self._free.put(base if base.dtype == np.uint8 else None)

    def _configure(self) -> None:
        if not self._configured:
            self.journal.begin_with(self.target.config())
            self._configured = True

    def _commit(self) -> None:
        if not self._waiting:
            return
        paths, state = self.target.dirty()
        _native.sync_files(list(paths))
        self.target.committed()
        self.journal.commit(self.target.n, _table(self._waiting), state)
        self._waiting.clear()
        self._since = 0
        self.committed = self.target.n

    # -- what is known of the examples -----------------------------------------------------------------------------

    def _lengths_so_far(self) -> NDArray[np.int64]:
        layers = len(self.target.spec.layers)
        parts = [_lengths(table, layers) for table in self.journal.tables()]
        return np.concatenate(parts) if parts else np.zeros((0, layers), np.int64)

    def read_back(self) -> tuple[NDArray[np.int64], Any]:
        """Lengths and columns of all committed examples; columns stay on the disk until they are looked at."""
        import pyarrow as pa

        tables = [
            t.drop_columns([c for c in (_TOKENS, _BY_LAYER) if c in t.column_names]) for t in self.journal.tables()
        ]
        lengths = self._lengths_so_far()
        if not any(t.num_columns for t in tables):
            return lengths, None
        try:
            joined = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ArgumentError(f"columns: types of different batches do not fit together: {error}") from error
        return lengths, joined


def _table(blocks: list[Block]) -> Any:
    """What a commit notes about its examples."""
    import pyarrow as pa

    tables = []
    for block in blocks:
        same = (block.lengths == block.lengths[:, :1]).all()
        if same:
            name, column = _TOKENS, pa.array(block.lengths[:, 0])
        else:
            flat = pa.array(np.ascontiguousarray(block.lengths).reshape(-1))
            name, column = _BY_LAYER, pa.FixedSizeListArray.from_arrays(flat, block.lengths.shape[1])
        known = pa.table({name: column})
        if block.columns is not None:
            for field, values in zip(block.columns.schema, block.columns.columns, strict=True):
                known = known.append_column(field, values)
        tables.append(known)
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except pa.ArrowException as error:
        raise ArgumentError(f"columns: types of different batches do not fit together: {error}") from error


def _lengths(table: Any, layers: int) -> NDArray[np.int64]:
    made = np.zeros((table.num_rows, layers), np.int64)
    if _TOKENS in table.column_names:
        column = table[_TOKENS]
        there = column.is_valid().to_numpy()
        made[there] = column.drop_null().to_numpy()[:, None]
    if _BY_LAYER in table.column_names:
        column = table[_BY_LAYER]
        there = column.is_valid().to_numpy()
        flat = column.drop_null().combine_chunks()
        flat = flat if not hasattr(flat, "chunks") else flat.chunk(0)
        made[there] = flat.flatten().to_numpy().reshape(-1, layers)
    return made
