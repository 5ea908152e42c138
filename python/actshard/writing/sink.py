"""Writes a dataset: commits its examples periodically to a journal, and finishes it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard import formats
from actshard.base._arguments import many
from actshard.base._columns import numbers
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ClosedError,
    ExistsError,
    FormatError,
    InternalError,
    MissingFileError,
    TruncatedFileError,
    from_os,
    warn,
)
from actshard.base.request import Digest, Digests, Request, joined_digests
from actshard.base.work import (
    EMPTY,
    Commit,
    Journal,
    make_folder,
    names_of,
    recorded_files,
    remove_empty_folders,
    remove_files,
    rename,
    sync_folders,
    write_json,
)
from actshard.base.work.journal import state_of
from actshard.formats.tables import concatenated
from actshard.formats.target import AllExamples, Block, Target
from actshard.reading.finding import check_opens
from actshard.writing.columns import Decided
from actshard.writing.existing import complete_at

if TYPE_CHECKING:
    import pyarrow as pa


# Writes consecutive examples of a dataset on a background thread: all of them, or the range of one task of a plan.
#
# A bounded queue connects the caller's thread and the writing thread: one block is written while others are filled or wait.


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
        block = self.target.encode(block)
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
        self._waiting.append(replace(block, memory=block.memory[:0], encoded=None))
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


COMMIT_BYTES = 1 << 30
"""Approximate bytes between two commits: the most that a crash loses."""


class Sink(SegmentWriter):
    """Writes all examples of a dataset, or of a part: a journal records each commit."""

    def __init__(self, target: Target, *, resume: bool) -> None:
        self.target = target
        self.journal = Journal(target.root)
        self._configured = False
        self._tried = False
        """Whether an earlier call began to finish the dataset."""
        self._finished: list[Path] = []
        """Files that completed the dataset."""
        self._since = 0
        """Bytes of rows since the last commit."""
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
                if resume:
                    self._tell_others()
            if self.journal.config:
                self._continue(self.journal.config)
            super().__init__(target, self.journal.tables())
        except BaseException:
            self.journal.lock.release()
            raise

    def _refuse_finished(self, resume: bool) -> None:
        """Raises ExistsError if another process finished the dataset before this one took the lock."""
        existing_path = complete_at(self.target)
        if existing_path is None and resume:
            existing_path = self.target.alike()
        if existing_path is not None:
            self.journal.remove()
            with contextlib.suppress(OSError):
                self.target.root.rmdir()  # saev's working folder: the finished dataset has another name
            raise ExistsError.finished(existing_path)

    def _tell_others(self) -> None:
        """Warns about unfinished datasets next to this one that were requested with other arguments: they are not continued."""
        target = self.target
        for folder in formats.get(target.format).begun(target.root.parent) if target.names_itself else ():
            journal = Journal(folder)
            with contextlib.suppress(ActshardError):
                if folder != target.root and journal.exists() and state_of(journal.folder) == "was interrupted":
                    journal.read()
                    if journal.request is None:
                        continue  # its writer was killed before its first line was complete
                    difference = journal.request.difference(target.request) or "its source was another"
                    warn(
                        f"{target.root.parent}: another dataset is begun: the unfinished one in {folder.name}, of "
                        f"{many(journal.examples, 'example')}, was requested otherwise ({difference}). Repeat its request to "
                        "continue it",
                        code="other-unfinished",
                    )

    def _continue(self, config: dict[str, object]) -> None:
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
            if not self.journal.closing:
                self._check_files()
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

    def _check_files(self) -> None:
        """Raises an error if a file is missing, or shorter than when its examples were committed: a scratch disk was cleaned."""
        for name, size in self.journal.files.items():
            present = self._size_of(name)
            if present is None or present < size:
                raise TruncatedFileError(
                    f"expected {many(size, 'byte')} of committed examples, found {'no file' if present is None else present}: it "
                    "was changed since. Restore it, or write to another folder",
                    path=self.target.root / name,
                )

    def _size_of(self, name: str) -> int | None:
        """Bytes of a file of the dataset, also under its temporary name; None without one."""
        for path in names_of(self.target.root / name):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return None

    def _agree(self, config: dict[str, object]) -> None:
        """Raises ArgumentError if the request or the settings differ from the journal's; the target adopts what was determined."""
        target, spec = self.target, self.target.spec
        assert self.journal.request is not None
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
        for name, journal_setting, request_setting in (
            ("dtype", target.dtype, spec.dtype),
            ("tokens_per_example", target.tokens, spec.tokens),
        ):
            if None not in (journal_setting, request_setting) and journal_setting != request_setting:
                raise self._differs(name, journal_setting, request_setting)

    def _refuse_other(self, journal_request: Request, request: Request) -> None:
        """Raises ArgumentError if a request differs from the one that began the dataset."""
        difference = journal_request.difference(request.completed(journal_request))
        if difference is not None:
            raise self._differs(*difference)
        if journal_request.sources != request.sources:
            raise self._differs("source", "the same files", "others")

    def _differs(self, name: str, expected: object, found: object) -> ArgumentError:
        return ArgumentError(
            f"{name}: expected {expected}, as in the unfinished dataset in {self.target.root}, found {found}. Repeat the request "
            "that began it, or write to another folder."
        )

    # -- the end ---------------------------------------------------------------------------------------------------

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
        self._tried = self.journal.closing
        self._stop()
        self._closed = True
        try:
            if not self.journal.finished:
                lengths, columns = self.read_back()
                if not target.ragged and target.content_lengths is None:
                    target.content_lengths = self._own_lengths
                # All checks were made on append: from here on only I/O errors can occur.
                self.journal.close()
                with recorded_files(self._is_other) as self._finished:
                    target.finish(AllExamples(lengths, columns))
                    files = formats.get(target.format).checked_files
                    target.keep_request(self.committed, self.journal.overflows, self.journal.digests, files)
                self.journal.finish()
            dataset_path = target.place()
            if dataset_path != target.root:
                self._move(dataset_path)
            sync_folders([dataset_path.parent])
            check_opens(dataset_path, target.format)  # a part, before a merge that waits for its journal may take it
            self.journal.remove()
            with contextlib.suppress(MissingFileError):  # a part may be merged from here on
                sync_folders([dataset_path])
        except OSError as error:
            if isinstance(error, ExistsError) and error.path is not None and target.root in Path(error.path).parents:
                self.journal.keep_other(Path(error.path).relative_to(target.root).as_posix())
            if isinstance(error, ActshardError):
                raise
            raise from_os(error, error.filename or target.root, "finish") from error
        finally:
            self.journal.lock.release()
        return dataset_path

    def _is_other(self, path: Path) -> bool:
        """Whether a file that exists under a name of the finished dataset is neither a committed one nor of an earlier attempt."""
        if self.target.root not in path.parents:
            return False  # the record next to a folder, of a dataset that was there before
        name = path.relative_to(self.target.root).as_posix()
        return name in self.journal.others or not (self._tried or name in self.journal.files)

    def _finish_empty(self) -> Path:
        """Finishes a part without examples. Its marker file shows merge that the part exists."""
        spec = self.target.spec
        assert spec.part is not None
        fields = {"actshard": 1, "examples": 0, "format": self.target.format, "layers": list(spec.layers)}
        temporary = self.journal.folder / "empty.json"
        write_json(temporary, {**fields, "d_model": spec.d_model, "part": list(spec.part)})
        rename(temporary, spec.path / EMPTY)
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

    def _move(self, dataset_path: Path) -> None:
        try:
            rename(self.target.root, dataset_path)
        except ActshardError as error:
            # Only if the name is taken: other errors, e.g. a full disk, are raised unchanged and the same call continues.
            if os.path.lexists(dataset_path):
                raise ExistsError(f"cannot rename the finished dataset: {error.detail}", path=dataset_path) from error
            raise
        self.journal.moved(dataset_path)

    def discard(self) -> None:
        """Removes all files that were written, and no others in the folder."""
        if not self._closed:
            self._closed = True
            self._stop()
        self._remove_files()

    def abort(self) -> None:
        """Stops without finishing. Committed examples stay and can be resumed."""
        if not self._closed:
            super().abort()
            self.journal.lock.release()

    # -- the background thread -------------------------------------------------------------------------------------

    def _write(self, block: Block) -> None:
        self.target.settle(block)
        self._configure()
        super()._write(block)
        self._since += int(np.maximum(block.lengths, 0).sum()) * self.target.row_bytes
        if self._since >= COMMIT_BYTES:
            self._commit()

    def _configure(self) -> None:
        if not self._configured:
            self.journal.begin_with(self.target.config(), self.target.request)
            self._configured = True

    def _record(self, commit: Commit) -> None:
        self.journal.commit(commit, {name: self._size_of(name) or 0 for name in commit.files})
        self._since = 0

    # -- lengths and columns of the examples -----------------------------------------------------------------------

    def _lengths_so_far(self) -> NDArray[np.int64]:
        layers = len(self.target.spec.layers)
        return lengths_in(self.journal.tables(), layers)

    def _own_lengths(self) -> NDArray[np.int64]:
        """Tokens of each example before padding; the stored number if the journal has none."""
        lengths = np.array(self._lengths_so_far()[:, 0])
        position = 0
        for table in self.journal.tables():
            if OWN in table.column_names:
                column = table[OWN]
                is_valid = column.is_valid().to_numpy()
                lengths[position : position + len(table)][is_valid] = column.drop_null().to_numpy()
            position += len(table)
        return lengths

    def read_back(self) -> tuple[NDArray[np.int64], object]:
        """Returns lengths and columns of all committed examples. Columns are memory-mapped."""
        lengths = self._lengths_so_far()
        columns, mixed = columns_in(self.journal.tables())
        if mixed:
            raise FormatError(
                f"column {mixed[0]!r}: expected values of one type, found several", path=self.journal.folder
            )
        return lengths, columns
