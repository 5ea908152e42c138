"""Writes a dataset by appending examples."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actshard.base._arguments import many
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ClosedError,
    DtypeError,
    ExistsError,
    from_os,
    warn,
)
from actshard.base.late import Late
from actshard.base.work import Journal, tidy
from actshard.formats.tables import concatenated
from actshard.formats.target import Block, Target
from actshard.writing.columns import Fitted
from actshard.writing.existing import Fitting, check_same, complete_at
from actshard.writing.given import GivenExamples, overflows, table_of
from actshard.writing.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = Late("pyarrow")


class Writer:
    """Writes a dataset; created by :func:`actshard.create`.

    One thread at a time may use it: a call of :meth:`append`, :meth:`flush` or :meth:`close` during another thread's call raises
    ArgumentError. Threads share a writer with a lock; without one, the order of their examples is not defined either. Not usable
    in a forked child: create one writer per process, each for its own part.

    Attributes:
        format: name of the format.
        path: path of the dataset. For saev it is the working folder until the dataset is finished, then ``path/<HASH>``.
        complete: whether the dataset is finished; True from the start if it existed already (``exist_ok``).
    """

    def __init__(self, target: Target, fitting: Fitting, *, resume: bool, exist_ok: bool) -> None:
        self.format = target.format
        self._target = target
        self._fitting = fitting
        self._exist_ok = exist_ok or resume
        self._in_call = threading.Lock()
        self.complete = False
        self._existed = False
        """Whether the dataset was finished before this call."""
        self._stage: NDArray[np.generic] | None = None
        self._staged: list[tuple[int, NDArray[np.int64], NDArray[np.int64], pa.Table | None]] = []
        """Groups of examples in the stage: (end row, lengths ``(n, layers)``, lengths before padding ``(n,)``, columns)."""
        self._appended = 0
        self._sink: Sink | None = None
        self.path = target.root
        self._advised = False
        with _convert_errors(target.root):
            self._begin(resume)
        if not self.complete:
            self._advise(target.spec.num_examples or 0)

    def _begin(self, resume: bool) -> None:
        """Accepts a finished dataset, continues an unfinished one, or starts a new one."""
        if self._is_complete(resume):
            return
        try:
            self._sink = Sink(self._target, resume=resume)
        except ExistsError:
            # Another process may have finished the dataset before we took the lock.
            if not (self._exist_ok and self._is_complete(resume)):
                raise
            return
        self._appended = self._sink.committed
        if self._sink.journal.closing:
            # Killed while finishing: all shards have their final form, so only finishing remains.
            self.path = self._sink.finish()
            self.complete = True
            self._sink = None

    def _advise(self, examples: int) -> None:
        """Warns once if the format advises something for so many examples."""
        if not self._advised and (advice := self._target.advice(examples)) is not None:
            self._advised = True
            warn(f"{self.path}: {advice}", code=advice.code)

    def _is_complete(self, resume: bool) -> bool:
        """Whether the dataset exists and is finished; if so, this writer is complete. Raises ExistsError unless allowed."""
        target = self._target
        existing_path = complete_at(target)
        if existing_path is None and resume and not Journal(target.root).exists():
            existing_path = target.alike()
        if existing_path is None:
            return False
        if not self._exist_ok:
            raise ExistsError.finished(existing_path)
        self._appended = check_same(target, existing_path)
        tidy(existing_path)
        self.path = existing_path
        self.complete = self._existed = True
        return True

    def __repr__(self) -> str:
        state = (
            "complete" if self.complete else f"{many(self._appended, 'example')} appended, {self.committed} committed"
        )
        return f"<actshard.Writer {self.format} {str(self.path)!r}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __len__(self) -> int:
        return self._appended

    @property
    def committed(self) -> int:
        """Number of committed examples. They survive a kill or power failure, and a resumed writer continues after them.

        Commits happen about every GiB of rows, at :meth:`flush` and at the end.
        """
        return self._sink.committed if self._sink is not None else self._appended

    @property
    def working_folder(self) -> Path | None:
        """The folder of the journal, which is removed with its files at the end; None after it. Internal, as is the next one."""
        return None if self._sink is None else self._sink.journal.folder

    def stores_column(self, name: str) -> bool:
        """Whether the format can store a column of this name. Internal: for verbs that write columns of their own."""
        target = self._target
        return target.holds_columns and (target.only_columns is None or name in target.only_columns)

    def append(
        self,
        activations: ArrayLike | Sequence[ArrayLike],
        *,
        lengths: ArrayLike | None = None,
        columns: Mapping[str, object] | pa.Table | None = None,
        labels: ArrayLike | None = None,
        logits: tuple[ArrayLike, ArrayLike] | None = None,
        router: Mapping[int, ArrayLike] | None = None,
    ) -> None:
        """Appends examples. Copies arrays and tensors, so that they may be reused after the call. Arrow data are not copied.

        Args:
            activations: ``(batch, n_layers, tokens, d_model)``; ``(batch, n_layers, d_model)`` for one row per example; or a list
                of ``(n_layers, tokens_i, d_model)``. numpy arrays or torch tensors on any device (copied to the host once).
            lengths: ``(batch,)`` integers: number of valid tokens of each example in a right-padded batch.
            columns: mapping or Arrow table with ``batch`` values per column: texts, labels, ids. The first call fixes names and
                types. With ``lengths``, an array of ``(batch, tokens)``, such as ``input_ids``, is cut like the activations.
            labels: saev's patch labels, ``(batch, content tokens)`` uint8. Other formats store them as a column.
            logits: top-k values and token indices, ``(batch, k)`` each (lmprobe). Other formats store them as columns.
            router: router logits by layer, ``(batch, experts)`` each (lmprobe). Other formats store them as columns.

        Raises:
            ArgumentError: another thread is in a call of this writer; masked values; shapes that do not match each other, the
                layers or ``d_model``; examples that the format cannot store
                unchanged (the message names a remedy: ``pad=True``, ``truncate=True``, another ``storage=``).
            NotStoredError: the format stores no columns.
            DtypeError: another dtype than before without ``dtype=``; a dtype that the format does not support.
            DiskFullError, FileAccessError: a write failed, in this call or in the background since an earlier one.
            ClosedError: the writer was closed.
        """
        with self._exclusive(), _convert_errors(self.path):
            self._append(activations, lengths, columns, labels, logits, router)

    def _append(
        self,
        activations: ArrayLike | Sequence[ArrayLike],
        lengths: ArrayLike | None,
        columns: Mapping[str, object] | pa.Table | None,
        labels: ArrayLike | None,
        logits: tuple[ArrayLike, ArrayLike] | None,
        router: Mapping[int, ArrayLike] | None,
    ) -> None:
        sink, target = self._open(), self._target
        sink.check()
        examples = GivenExamples(activations, lengths, len(target.spec.layers), target.spec.d_model)
        if len(examples) == 0:
            return
        table = table_of(columns, labels, logits, router, len(examples), examples)
        # All checks come first, so that a failed call does not change the writer.
        before = {name: getattr(target, name) for name in target.decides}
        try:
            tokens, dtype, fitted = self._check_examples(sink, examples, table)
            for name in fitted.changes.keys() - sink.columns.changes.keys():
                warn(
                    f"{self.path}: column {fitted.changes[name]}, as {self.format} stores it",
                    code="column-type-changed",
                )
        except BaseException:
            for name, value in before.items():
                setattr(target, name, value)
            raise
        try:
            sink.columns.keep(fitted)
            self._copy(sink, examples, tokens, dtype, fitted.table)
        except BaseException:
            # Part of the batch may be staged: only committed examples count, and a resumed writer continues after them.
            self.abort()
            raise
        self._advise(self._appended)

    def _check_examples(
        self, sink: Sink, examples: GivenExamples, table: pa.Table | None
    ) -> tuple[NDArray[np.int64], np.dtype[np.generic], Fitted]:
        """Returns stored tokens per example, dtype and fitted columns. Raises if the format cannot store the examples."""
        target, tokens = self._target, examples.tokens
        if (tokens < target.special_tokens).any():
            i = int(np.flatnonzero(tokens < target.special_tokens)[0])
            raise ArgumentError(
                f"example {self._appended + i}: expected at least {many(target.special_tokens, 'special token')}, such as CLS, "
                f"found {many(tokens[i], 'token')}: append its row, or leave the example out"
            )
        expected = target.spec.num_examples
        if expected is not None and self._appended + len(examples) > expected:
            raise ArgumentError(
                f"num_examples: expected {expected}, found {len(examples)} more after {self._appended} appended examples"
            )
        if not target.ragged or target.tokens is not None:
            target.take_tokens(
                int(tokens.max())
                if self._fitting.pad
                else int(tokens.min())
                if self._fitting.truncate
                else int(tokens[0])
            )
            tokens = self._fit_lengths(tokens)
        else:
            target.take_tokens(int(tokens[0]) if examples.one_row else max(int(tokens.max()), 2))
            if target.tokens is not None:
                tokens = self._fit_lengths(tokens)
        tokens = self._cut(tokens)
        dtype = target.take_dtype(examples.dtype)
        fitted = sink.columns.fit(table, self._appended, len(examples), alike=True)
        if self._fitting.overflow == "refuse" and examples.dtype != dtype:
            self._refuse_overflow(examples, np.minimum(examples.tokens, tokens), dtype)
        return tokens, dtype, fitted

    def _cut(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Limits tokens to the format's maximum length, or raises without ``truncate``."""
        most = self._target.most_tokens
        if most is None or (tokens <= most[0]).all():
            return tokens
        if not self._fitting.truncate:
            i = int(np.flatnonzero(tokens > most[0])[0])
            raise ArgumentError(
                f"example {self._appended + i} has {many(tokens[i], 'token')}, {most[1]}. truncate=True to create() cuts "
                "longer ones."
            )
        return np.minimum(tokens, most[0])

    def _refuse_overflow(self, examples: GivenExamples, tokens: NDArray[np.int64], dtype: np.dtype[np.generic]) -> None:
        """Raises DtypeError if a finite value would become infinite."""
        arrays = examples.items if examples.dense is None else [examples.dense]
        for i, array in enumerate(arrays):
            count = overflows(array, dtype)
            if count and examples.dense is not None and (tokens < array.shape[2]).any():
                # Padding rows and truncated rows are not written, so they do not count.
                count = sum(overflows(x[:, :n], dtype) for x, n in zip(array, tokens.tolist(), strict=True))
            elif count and examples.dense is None:
                count = overflows(array[:, : tokens[i]], dtype)
            if count:
                where = f"example {self._appended + i}" if examples.dense is None else "the batch"
                raise DtypeError(
                    f"{many(count, 'value')} of {where} {'is' if count == 1 else 'are'} too large for {dtype} and would "
                    "become infinite. Store a wider dtype, or pass overflow='allow' to create()."
                )

    def _copy(
        self,
        sink: Sink,
        examples: GivenExamples,
        tokens: NDArray[np.int64],
        dtype: np.dtype[np.generic],
        table: pa.Table | None,
    ) -> None:
        """Copies examples into blocks and queues full blocks for writing."""
        target = self._target
        unpadded_counts = np.minimum(examples.tokens, tokens)
        layers = len(target.spec.layers)
        position = 0
        while position < len(examples):
            if self._stage is None:
                self._stage = sink.memory(max(target.block_bytes // target.row_bytes, int(tokens[position]) * layers))
            filled = self._staged[-1][0] if self._staged else 0
            count = int(np.searchsorted(np.cumsum(tokens[position:] * layers), len(self._stage) - filled, "right"))
            if count == 0:
                if self._staged:
                    self._hand_over()
                else:
                    sink.give_back(self._stage)
                    self._stage = None
                continue
            part = slice(position, position + count)
            end = filled + int(tokens[part].sum()) * layers
            examples.copy(part, tokens[part], self._stage[filled:end], dtype)
            lengths = np.broadcast_to(tokens[part, None], (count, layers))
            self._staged.append(
                (end, lengths, unpadded_counts[part], None if table is None else table.slice(position, count))
            )
            position += count
            self._appended += count

    def _fit_lengths(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the format's number of tokens for each example; raises if padding or truncation is needed but not allowed."""
        target_tokens = self._target.tokens
        assert target_tokens is not None
        for bad, allowed, what in (
            (tokens < target_tokens, self._fitting.pad, "pad=True to create() pads shorter ones with zeros"),
            (
                tokens > target_tokens,
                self._fitting.truncate,
                "truncate=True to create() cuts longer ones, tokens_per_example= with pad=True makes room for them",
            ),
        ):
            if bad.any() and not allowed:
                i = int(np.flatnonzero(bad)[0])
                keeping = self._target.keeping_all
                pooled = "" if keeping is None else f"{keeping}, or "
                raise ArgumentError(
                    f"example {self._appended + i}: expected {target_tokens} tokens as in all examples of this {self.format} "
                    f"dataset, found {tokens[i]}: {pooled}{what}"
                )
        return np.full_like(tokens, target_tokens)

    def _hand_over(self) -> None:
        """Queues the staged block for writing."""
        if self._stage is None or not self._staged:
            return
        assert self._sink is not None
        tables = [table for *_, table in self._staged if table is not None]
        columns = concatenated(tables)[0] if tables else None
        lengths = np.concatenate([part_lengths for _, part_lengths, _, _ in self._staged]).astype(np.int64)
        unpadded_counts = (
            None
            if self._target.ragged
            else np.concatenate([unpadded_counts for _, _, unpadded_counts, _ in self._staged])
        )
        block = Block(self._stage[: self._staged[-1][0]], lengths, columns, unpadded_counts)
        self._stage, self._staged = None, []
        try:
            self._sink.put_fitted(block)
        except BaseException:
            self._sink.abort()  # the block may or may not be queued: only committed examples count
            raise

    def flush(self) -> int:
        """Waits until all appended examples are committed and returns their number.

        A flush ends a pickle shard; other formats continue the current one.
        """
        sink = self._open()
        with self._exclusive(), _convert_errors(self.path):
            self._hand_over()
            return sink.commit()

    def close(self) -> None:
        """Commits and finishes the dataset: renames files and writes the manifest. May be called again.

        Raises:
            ArgumentError: no examples were appended, or fewer than ``num_examples``. A part may be empty.
            ExistsError: another process finished the same dataset. This one is kept, unfinished.
        """
        if self.complete or self._sink is None:
            return
        sink = self._open()
        with self._exclusive():
            try:
                with _convert_errors(self.path):
                    self._finish(sink)
            except BaseException:
                sink.abort()  # releases the lock, so that the dataset can be resumed
                raise

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Raises ArgumentError, and changes nothing, if another call is running."""
        if not self._in_call.acquire(blocking=False):
            raise ArgumentError(
                "another thread is in a call of this writer: share it with a threading.Lock, or create one writer per part",
                path=self.path,
            )
        try:
            yield
        finally:
            self._in_call.release()

    def _finish(self, sink: Sink) -> None:
        self._hand_over()
        sink.commit()
        existing_path = self._target.existing(sink.committed) if sink.committed else None
        if existing_path is not None:
            if not self._exist_ok:
                sink.abort()
                raise ExistsError.finished(existing_path)
            if (where := self._target.difference(existing_path)) is not None:
                # Kept, the folder of the unfinished dump would stand for the finished one's: both have one name.
                sink.discard()
                raise ExistsError(
                    f"contains a dump with these metadata and other rows ({where}); the new rows were removed. Give them metadata "
                    "of their own, such as the name of the data (metadata=), or another folder",
                    path=existing_path,
                )
            sink.discard()
            self.path = existing_path
        else:
            self.path = sink.finish()
        self.complete = True
        self._sink = None

    def abort(self) -> None:
        """Stops without finishing. Commits appended examples if possible; ``create(..., resume=True)`` continues after them."""
        if self._sink is None:
            return
        sink = self._sink
        try:
            # The caller's own error matters more; the journal's count stays correct either way.
            with contextlib.suppress(Exception):
                self._hand_over()
                sink.commit()
        finally:
            self._sink = None
            sink.abort()
            self._appended = sink.committed
            self._stage, self._staged = None, []

    def _open(self) -> Sink:
        if self._sink is None:
            why = "the dataset is complete" if self.complete else "the writer was closed"
            if self._existed:
                why += (
                    ": it was finished before this call, which accepts it (exist_ok, resume). Append only if writer.complete is "
                    "False, or give other data another folder, or metadata of their own"
                )
            raise ClosedError(why, path=self.path)
        return self._sink

    def __del__(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None and not sys.is_finalizing():
            sink.abort()


@contextlib.contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Converts OSErrors to ActshardErrors."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ActshardError):
            raise
        raise from_os(error, error.filename or path, "write") from error
