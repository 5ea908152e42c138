"""Blocks of examples on their way to the disk: written by a thread of ours, committed now and then, finished at last.

The thread that makes blocks and the one that writes them meet in a queue of two: while one block is written the next is filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    ClosedError,
    ExistsError,
    FormatError,
    InternalError,
    from_os,
)
from actshard.formats.target import AllExamples, Block, Target
from actshard.work import EMPTY, Journal, make_folder, remove_made, rename, sync_folders, write_json
from actshard.writing.columns import Decided, together
from actshard.writing.existing import complete_at

COMMIT_BYTES = 1 << 30
"""Data between two commits, about: what a crash costs at most."""
MEMORY = 192 << 20
"""What blocks may take together, if two fit."""
_TOKENS, _BY_LAYER, _OWN = "actshard.tokens", "actshard.tokens_by_layer", "actshard.own_tokens"
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
        if self.journal.exists() and not resume:
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
            else:
                self._refuse_finished(resume)
            if self.journal.config:
                self._continue(self.journal.config)
            self.columns = Decided(target, self.journal.tables())
        except BaseException:
            self.journal.lock.release()
            raise
        self.committed = self._handed = self.journal.examples
        self._queue: queue.Queue[tuple[str, Block | None] | None] = queue.Queue(1)
        self._free: queue.Queue[NDArray[np.uint8] | None] = queue.Queue()
        for _ in range(2 if 3 * target.block_bytes > MEMORY else 3):
            self._free.put(None)
        self._thread = threading.Thread(target=self._work, name="actshard-writer", daemon=True)
        self._thread.start()

    def _refuse_finished(self, resume: bool) -> None:
        """Raises ExistsError if the dataset was finished between the first look and the lock."""
        found = complete_at(self.target)
        if found is None and resume:
            found = self.target.alike()
        if found is not None:
            self.journal.remove()
            with contextlib.suppress(OSError):
                self.target.root.rmdir()  # saev's, which has another name now
            raise ExistsError("holds this dataset already, finished; exist_ok=True takes it as it is", path=found)

    def _continue(self, config: dict[str, Any]) -> None:
        """Goes on after what is committed."""
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
        """What is asked for now is what was asked for then; what is left open now is as it was."""
        asked = self.target.config()
        try:
            self.target.adopt(config)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ActshardError):
                raise
            raise FormatError(
                f"line 1: field 'config': expected what a writer of {self.target.format} asks for: {error!r}",
                path=self.journal.path,
            ) from error
        for name, value in asked.items():
            # As JSON has it: the journal knows no tuples, and no keys but texts. Earlier releases did not note everything.
            same = name not in config or _as_json(value) == _as_json(config[name])
            if value is not None and not same and name != "created":
                raise ArgumentError(
                    f"{name}: the unfinished dataset in {self.target.root} was begun with {config.get(name)!r}, "
                    f"found {value!r}; say the same, or begin elsewhere"
                )

    # -- blocks ----------------------------------------------------------------------------------------------------

    def memory(self, rows: int) -> NDArray[Any]:
        """Memory for a block of so many rows, waiting for one to be written; it goes back with :meth:`put`."""
        self.check()
        need = rows * self.target.row_bytes
        held: NDArray[np.uint8] | None = None
        while True:
            try:
                held = self._free.get(timeout=0.5)
                break
            except queue.Empty:
                self.check()
        if held is None or held.size < need:
            held = np.empty(max(need, min(self.target.block_bytes, 4 * need)), np.uint8)
        dtype = self.target.dtype
        assert dtype is not None
        return held[:need].view(dtype).reshape(rows, self.target.spec.d_model)

    def put(self, block: Block) -> None:
        """Hands a block over; its memory is not the caller's any more. Its columns may be more than those of the first."""
        self.check()
        fitted = self.columns.fit(block.columns, self._handed, len(block), alike=False)
        self.columns.keep(fitted)
        self.put_fitted(Block(block.memory, block.lengths, fitted.table, block.own))

    def put_fitted(self, block: Block) -> None:
        """The same of a block whose columns are known to fit."""
        self.check()
        self._handed += len(block)
        self._send(("block", block))

    def give_back(self, memory: NDArray[Any]) -> None:
        """Memory that is not needed after all."""
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self._free.put(memory if memory.dtype == np.uint8 else None)

    def commit(self) -> int:
        """Waits until everything handed over is safe on the disk: how many examples that is."""
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
        """Raises what went wrong in the background."""
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
        expected = target.spec.num_examples
        if self.committed == 0 and (target.spec.part is None or expected is not None):
            self._forget()
            raise ArgumentError("nothing was appended: a dataset has at least one example")
        if expected is not None and expected != self.committed:
            self.abort()
            raise ArgumentError(
                f"num_examples: expected {expected}, {self.committed} were appended; they are kept, resume=True appends the others"
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
                # From here on nothing is refused: every check was made when the examples were given.
                self.journal.close()
                target.finish(AllExamples(lengths, columns))
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
        """Finishes a part without examples: merging has to know that it is none that is missing."""
        spec = self.target.spec
        assert spec.part is not None
        said = {"actshard": 1, "examples": 0, "format": self.target.format, "layers": list(spec.layers)}
        whole = self.journal.folder / "empty.json"
        write_json(whole, {**said, "d_model": spec.d_model, "part": list(spec.part)})
        rename(whole, spec.path / EMPTY)
        sync_folders([spec.path])
        self._forget()
        return spec.path

    def _forget(self) -> None:
        """Stops, and leaves no trace of a dataset without examples."""
        self._closed = True
        self._stop()
        if self._configured:  # a writer that was killed before its first commit leaves files that count for nothing
            remove_made(self.target.root, self.target.makes)
        self._forget_folder()

    def _forget_folder(self) -> None:
        self.journal.remove()
        with contextlib.suppress(OSError):
            self.target.root.rmdir()

    def _move(self, place: Path) -> None:
        try:
            rename(self.target.root, place)
        except ActshardError as error:
            # Only what is there already is somebody else's: a full disk stays a full disk, and the same call goes on.
            if os.path.lexists(place):
                raise ExistsError(f"cannot give the finished dataset its name: {error.detail}", path=place) from error
            raise
        self.journal.moved(place)

    def discard(self) -> None:
        """Removes everything that was written, and nothing else that is in the folder."""
        if not self._closed:
            self._closed = True
            self._stop()
        remove_made(self.target.root, self.target.makes)
        self._forget_folder()

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
                self._error = self._told(error)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _told(self, error: BaseException) -> BaseException:
        """An error as one of ours."""
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
        self._waiting.append(Block(block.memory[:0], block.lengths, block.columns, block.own))
        self.give_back(block.memory)

    def _configure(self) -> None:
        if not self._configured:
            self.journal.begin_with(self.target.config())
            self._configured = True

    def _commit(self) -> None:
        if not self._waiting:
            return
        paths, state = self.target.dirty()
        folders = {path.parent for path in paths}
        _native.sync_files([path for path in paths if path not in folders])
        sync_folders(sorted(folders))
        self.target.committed()
        self.journal.commit(self.target.n, _table(self._waiting), state)
        self._waiting.clear()
        self._since = 0
        self.committed = self.target.n

    # -- what is known of the examples -----------------------------------------------------------------------------

    def _lengths_so_far(self) -> NDArray[np.int64]:
        layers = len(self.target.spec.layers)
        parts = [_lengths(table, layers) for table in self.journal.tables()]
        if not parts:
            return np.zeros((0, layers), np.int64)
        if all(part.strides[1] == 0 or layers == 1 for part in parts):
            # One number per example, however many layers there are.
            return np.broadcast_to(
                np.concatenate([part[:, 0] for part in parts])[:, None], (self.journal.examples, layers)
            )
        return np.concatenate(parts)

    def _own_lengths(self) -> NDArray[np.int64]:
        """Tokens of each example before it was filled up; as many as are stored where none were noted."""
        made = np.array(self._lengths_so_far()[:, 0])
        at = 0
        for table in self.journal.tables():
            if _OWN in table.column_names:
                column = table[_OWN]
                there = column.is_valid().to_numpy()
                made[at : at + len(table)][there] = column.drop_null().to_numpy()
            at += len(table)
        return made

    def own_lengths_missing(self) -> int:
        """How many committed examples an earlier release wrote, which did not note their lengths before they were filled up."""
        tables = self.journal.tables()
        return sum(t[_OWN].null_count if _OWN in t.column_names else len(t) for t in tables)

    def read_back(self) -> tuple[NDArray[np.int64], Any]:
        """Lengths and columns of all committed examples; columns stay on the disk until they are looked at."""
        import pyarrow as pa

        tables = [
            t.drop_columns([c for c in (_TOKENS, _BY_LAYER, _OWN) if c in t.column_names])
            for t in self.journal.tables()
        ]
        lengths = self._lengths_so_far()
        if not any(t.num_columns for t in tables):
            return lengths, None
        try:
            every, mixed = together(tables)
        except pa.ArrowException as error:
            raise FormatError(
                f"columns of different commits do not fit together: {error}", path=self.journal.folder
            ) from error
        for name in mixed:
            said = f"column {name!r} was appended with different types by an earlier release: its values are texts"
            warnings.warn(ActshardWarning(f"{self.target.root}: {said}", code="mixed-column-types"), stacklevel=2)
        return lengths, every


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
        known = pa.table({name: column} | ({} if block.own is None else {_OWN: pa.array(block.own)}))
        if block.columns is not None:
            for field, values in zip(block.columns.schema, block.columns.columns, strict=True):
                known = known.append_column(field, values)
        tables.append(known)
    every, _ = together(tables)
    return every.combine_chunks()


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _lengths(table: Any, layers: int) -> NDArray[np.int64]:
    if _BY_LAYER not in table.column_names and _TOKENS in table.column_names and not table[_TOKENS].null_count:
        return np.broadcast_to(table[_TOKENS].to_numpy()[:, None], (table.num_rows, layers))
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
