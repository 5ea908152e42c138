"""Writes blocks of examples on a background thread, commits them periodically, and finishes the dataset.

A bounded queue connects the caller's thread and the writing thread: one block is written while others are filled or wait.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._arguments import many
from actshard.errors import (
    ActshardError,
    ArgumentError,
    ClosedError,
    ExistsError,
    FormatError,
    InternalError,
    from_os,
    warn,
)
from actshard.formats.target import AllExamples, Block, Target
from actshard.request import Request
from actshard.work import (
    EMPTY,
    Journal,
    make_folder,
    recorded_files,
    remove_empty_folders,
    remove_files,
    rename,
    sync_folders,
    write_json,
)
from actshard.writing.columns import Decided
from actshard.writing.existing import complete_at
from actshard.writing.recorded import OWN, columns_in, lengths_in, table_of

COMMIT_BYTES = 1 << 30
"""Approximate bytes between two commits: the most that a crash loses."""
MEMORY = 192 << 20
"""Maximum bytes of three blocks; if they are larger, two are used."""
_WRITES = 4 * (4 << 20)
"""Bytes of the core's buffers for concurrent writes of rows whose alignment in memory differs from the file (write/pieces.rs)."""
_PAGE = 4096
"""Alignment of blocks in bytes: direct writes copy other memory first."""


def blocks_of(target: Target) -> int:
    """Number of blocks in memory at once."""
    return 2 if 3 * target.block_bytes > MEMORY else 3


def block_memory(target: Target) -> int:
    """Bytes of the blocks in memory at once, unless single examples are larger than a block."""
    return blocks_of(target) * target.block_bytes


def write_memory(size: int) -> int:
    """Bytes of the core's buffers while it writes a block of this size."""
    return min(_WRITES, size)


class Sink:
    """Writes blocks of one dataset. Not thread-safe: only the thread that creates it may use it."""

    def __init__(self, target: Target, *, resume: bool) -> None:
        self.target = target
        self.journal = Journal(target.root)
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._closed = False
        self._configured = False
        self._finished: list[Path] = []
        """Files that completed the dataset."""
        self._waiting: list[Block] = []
        """Blocks that are written but not committed."""
        self._since = 0
        self.written_bytes = 0
        """Bytes of rows written to files so far."""
        make_folder(self.journal.folder)
        self.journal.lock.take()  # before a look at the journal, which another process may be writing
        try:
            if self.journal.exists():
                self.journal.read()
                if not resume:
                    raise ExistsError(
                        f"contains {many(self.journal.examples, 'example')} of an unfinished dataset. Pass resume=True "
                        "(--resume) to continue it, or choose another folder.",
                        path=target.root,
                    )
            else:
                self._refuse_finished(resume)
            if self.journal.config:
                self._continue(self.journal.config)
            self.columns = Decided(target, self.journal.tables())
        except BaseException:
            self.journal.lock.release()
            raise
        self.committed = self._handed = self.journal.examples
        blocks = blocks_of(target)
        # All blocks may wait: blocks of a decoded shard are filled faster than a disk writes them.
        self._queue: queue.Queue[tuple[str, Block | None] | None] = queue.Queue(blocks)
        self._free: queue.Queue[NDArray[np.uint8] | None] = queue.Queue()
        for _ in range(blocks):
            self._free.put(None)
        self._thread = threading.Thread(target=self._work, name="actshard-writer", daemon=True)
        self._thread.start()

    def _refuse_finished(self, resume: bool) -> None:
        """Raises ExistsError if another process finished the dataset before this one took the lock."""
        found = complete_at(self.target)
        if found is None and resume:
            found = self.target.alike()
        if found is not None:
            self.journal.remove()
            with contextlib.suppress(OSError):
                self.target.root.rmdir()  # saev's working folder: the finished dataset has another name
            raise ExistsError.finished(found)

    def _continue(self, config: dict[str, Any]) -> None:
        """Continues after the committed examples."""
        self._agree(config)
        self._configured = True
        lengths = self._lengths_so_far()
        if len(lengths) != self.journal.examples:
            raise FormatError(
                f"expected {self.journal.examples} examples, found tables of {len(lengths)}",
                path=self.journal.folder,
            )
        if self.journal.commits:
            try:
                self.target.restore([c["state"] for c in self.journal.commits], lengths)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, ActshardError):
                    raise
                raise FormatError(
                    f"expected a state of {self.target.format}: {error!r}", path=self.journal.path
                ) from error
        if not self.journal.closing:
            self.target.forget(lengths)

    def _agree(self, config: dict[str, Any]) -> None:
        """Raises ArgumentError if the request or the settings differ from the journal's; the target adopts what was determined."""
        target, spec = self.target, self.target.spec
        if self.journal.request is None:
            raise FormatError(
                "line 1: field 'record': expected the request of the writer, found none: an earlier release began this dataset; "
                "finish it with that release, or write to another folder",
                path=self.journal.path,
                code="metadata",
            )
        self._refuse_other(self.journal.request, target.request)
        try:
            target.adopt(config)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ActshardError):
                raise
            raise FormatError(
                f"line 1: field 'config': expected the settings of a {target.format} writer: {error!r}",
                path=self.journal.path,
            ) from error
        for name, decided, given in (
            ("dtype", target.dtype, spec.dtype),
            ("tokens_per_example", target.tokens, spec.tokens),
        ):
            if None not in (decided, given) and decided != given:
                raise self._differs(name, decided, given)

    def _refuse_other(self, begun: Request, request: Request) -> None:
        """Raises ArgumentError if a request differs from the one that began the dataset."""
        difference = begun.difference(request.completed(begun))
        if difference is not None:
            raise self._differs(*difference)
        if begun.sources != request.sources:
            raise self._differs("source", "the same files", "others")

    def _differs(self, name: str, expected: object, found: object) -> ArgumentError:
        return ArgumentError(
            f"{name}: expected {expected}, as in the unfinished dataset in {self.target.root}, found {found}. Repeat the request "
            "that began it, or write to another folder."
        )

    # -- blocks ----------------------------------------------------------------------------------------------------

    def memory(self, rows: int) -> NDArray[Any]:
        """Returns an array ``(rows, d_model)`` to fill. Waits for a free block; :meth:`put` returns it to the pool."""
        self.check()
        need = rows * self.target.row_bytes
        held: NDArray[np.uint8] | None = None
        while True:
            try:
                held = self._free.get(timeout=0.5)
                break
            except queue.Empty:
                self.check()
        if held is None or held.size < need + _PAGE:
            held = np.empty(max(need, min(self.target.block_bytes, 4 * need)) + _PAGE, np.uint8)
        dtype = self.target.dtype
        assert dtype is not None
        first = -held.ctypes.data % _PAGE
        return held[first : first + need].view(dtype).reshape(rows, self.target.spec.d_model)

    def put(self, block: Block) -> None:
        """Queues a block for writing and takes ownership of its memory. The block may have new columns."""
        self.check()
        fitted = self.columns.fit(block.columns, self._handed, len(block), alike=False)
        self.columns.keep(fitted)
        self.put_fitted(replace(block, columns=fitted.table))

    def put_fitted(self, block: Block) -> None:
        """Queues a block whose columns were already fitted."""
        self.check()
        self._handed += len(block)
        self._send(("block", block))

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

    def finish(self) -> Path:
        """Commits everything, completes the dataset and returns its path."""
        self.commit()
        target = self.target
        expected = target.spec.num_examples
        if self.committed == 0 and (target.spec.part is None or expected is not None):
            self._forget()
            raise ArgumentError("nothing was appended: expected at least one example")
        if expected is not None and expected != self.committed:
            self.abort()
            raise ArgumentError(
                f"num_examples: expected {expected}, found {self.committed} appended. They are kept: pass resume=True to append "
                "the others."
            )
        if self.committed == 0:
            return self._finish_empty()
        self._stop()
        self._closed = True
        try:
            if not self.journal.finished:
                lengths, columns = self.read_back()
                if not target.ragged and target.content_lengths is None:
                    target.content_lengths = self._own_lengths
                # All checks were made on append: from here on only I/O errors can occur.
                self.journal.close()
                with recorded_files() as self._finished:
                    target.finish(AllExamples(lengths, columns))
                    target.keep_request(self.committed, self.journal.overflows)
                self.journal.finish()
            place = target.place()
            if place != target.root:
                self._move(place)
            sync_folders([place.parent])
            self.journal.remove()
            sync_folders([place])
        except OSError as error:
            if isinstance(error, ActshardError):
                raise
            raise from_os(error, error.filename or target.root, "finish") from error
        finally:
            self.journal.lock.release()
        return place

    def _finish_empty(self) -> Path:
        """Finishes a part without examples. Its marker file shows merge that the part exists."""
        spec = self.target.spec
        assert spec.part is not None
        fields = {"actshard": 1, "examples": 0, "format": self.target.format, "layers": list(spec.layers)}
        whole = self.journal.folder / "empty.json"
        write_json(whole, {**fields, "d_model": spec.d_model, "part": list(spec.part)})
        rename(whole, spec.path / EMPTY)
        sync_folders([spec.path])
        self._forget()
        return spec.path

    def _forget(self) -> None:
        """Stops and removes all files of a dataset without examples."""
        self._closed = True
        self._stop()
        self._remove_files()

    def _remove_files(self) -> None:
        """Removes what this writer, or the one that it resumed, wrote, and its working folder."""
        root = self.target.root
        written = self.target.dirty()[0] if self.target.n > self.committed else []
        remove_files(root, [*(root / name for name in sorted(self.journal.files)), *written, *self._finished])
        self.journal.remove()
        if self._configured and not self.committed:  # a killed writer may have left folders that it recorded no file in
            remove_empty_folders(root)
        with contextlib.suppress(OSError):
            root.rmdir()

    def _move(self, place: Path) -> None:
        try:
            rename(self.target.root, place)
        except ActshardError as error:
            # Only if the name is taken: other errors, e.g. a full disk, are raised unchanged and the same call continues.
            if os.path.lexists(place):
                raise ExistsError(f"cannot rename the finished dataset: {error.detail}", path=place) from error
            raise
        self.journal.moved(place)

    def discard(self) -> None:
        """Removes all files that were written, and no others in the folder."""
        if not self._closed:
            self._closed = True
            self._stop()
        self._remove_files()

    def abort(self) -> None:
        """Stops without finishing. Committed examples stay and can be resumed."""
        if not self._closed:
            self._closed = True
            self._stop()
            self.journal.lock.release()

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
                    if kind == "commit" or self._since >= COMMIT_BYTES:
                        self._commit()
            except BaseException as error:
                self._error = self._told(error)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _told(self, error: BaseException) -> BaseException:
        """Converts an error to an ActshardError."""
        if isinstance(error, ActshardError | MemoryError) or not isinstance(error, Exception):
            return error
        if isinstance(error, OSError):
            made = from_os(error, error.filename or self.target.root, "write")
        else:
            made = InternalError(f"{type(error).__name__}: {error}", path=self.target.root)
        made.__cause__ = error
        return made

    def _write(self, block: Block) -> None:
        self.target.settle(block)
        self._configure()
        make_folder(self.target.root)
        self.target.write(block)
        size = int(np.maximum(block.lengths, 0).sum()) * self.target.row_bytes
        self.written_bytes += size
        self._since += size
        self._waiting.append(replace(block, memory=block.memory[:0]))
        self.give_back(block.memory)

    def _configure(self) -> None:
        if not self._configured:
            self.journal.begin_with(self.target.config(), self.target.request)
            self._configured = True

    def _commit(self) -> None:
        if not self._waiting:
            return
        paths, state = self.target.dirty()
        folders = {path.parent for path in paths}
        _native.sync_files([path for path in paths if path not in folders])
        sync_folders(sorted(folders))
        self.target.committed()
        below = len(os.fspath(self.target.root)) + 1
        files = [os.fspath(path)[below:] for path in paths if path not in folders]
        overflows = sum(block.overflows for block in self._waiting)
        self.journal.commit(self.target.n, table_of(self._waiting), state, overflows, files)
        self._waiting.clear()
        self._since = 0
        self.committed = self.target.n

    # -- lengths and columns of the examples -----------------------------------------------------------------------

    def _lengths_so_far(self) -> NDArray[np.int64]:
        layers = len(self.target.spec.layers)
        return lengths_in(self.journal.tables(), layers)

    def _own_lengths(self) -> NDArray[np.int64]:
        """Tokens of each example before padding; the stored number if the journal has none."""
        made = np.array(self._lengths_so_far()[:, 0])
        at = 0
        for table in self.journal.tables():
            if OWN in table.column_names:
                column = table[OWN]
                there = column.is_valid().to_numpy()
                made[at : at + len(table)][there] = column.drop_null().to_numpy()
            at += len(table)
        return made

    def own_lengths_missing(self) -> int:
        """Number of committed examples without a length before padding: earlier releases did not record it."""
        tables = self.journal.tables()
        return sum(t[OWN].null_count if OWN in t.column_names else len(t) for t in tables)

    def read_back(self) -> tuple[NDArray[np.int64], Any]:
        """Returns lengths and columns of all committed examples. Columns are memory-mapped."""
        lengths = self._lengths_so_far()
        every, mixed = columns_in(self.journal.tables())
        for name in mixed:
            text = f"column {name!r} was appended with different types by an earlier release: its values were converted to text"
            warn(f"{self.target.root}: {text}", code="mixed-column-types")
        return lengths, every
