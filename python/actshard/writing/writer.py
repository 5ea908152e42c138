"""``actshard.create``: a dataset made by appending examples."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard import _arguments, formats
from actshard._json import parse_json
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    ClosedError,
    DtypeError,
    ExistsError,
    FormatError,
    from_os,
)
from actshard.formats.target import Block, Spec, Target
from actshard.work import PARTS, Journal, tidy
from actshard.writing.columns import Fitted, together
from actshard.writing.existing import check_same, complete_at
from actshard.writing.given import GivenExamples, overflows, table_of
from actshard.writing.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa


_AROUND = 10
"""Levels of a metadata file that may lie around what a user gives."""


class Writer:
    """A dataset while it is made; see :func:`actshard.create`.

    Not for several threads at once, nor for a forked child: each process makes a part of its own.

    Attributes:
        format: as asked for.
        path: of the dataset. saev's own name, a hash, is known when the dataset is finished; until then the folder it is
            written in.
        complete: whether the dataset is finished; True at once if it was there already (``exist_ok``).
    """

    def __init__(
        self, target: Target, *, resume: bool, exist_ok: bool, pad: bool, truncate: bool, overflow: str = "refuse"
    ) -> None:
        self.format = target.format
        self._target = target
        self._pad, self._truncate, self._overflow = pad, truncate, overflow
        self._exist_ok = exist_ok or resume
        self.complete = False
        self._stage: NDArray[Any] | None = None
        self._staged: list[tuple[int, NDArray[np.int64], NDArray[np.int64], pa.Table | None]] = []
        """Examples in the stage: its rows up to and with them, their lengths, those before they were filled up, their columns."""
        self._appended = 0
        self._sink: Sink | None = None
        self.path = target.root
        with _told(target.root):
            if self._is_complete(resume):
                return
            try:
                self._sink = Sink(target, resume=resume)
            except ExistsError:
                # Finished by another process, perhaps, between the look and the lock.
                if not (self._exist_ok and self._is_complete(resume)):
                    raise
                return
            self._appended = self._sink.committed
            self._tell_unknown(self._sink)
            if self._sink.journal.closing:
                # Killed while it was finished: shards have their last form, and there is nothing to append to.
                self.path = self._sink.finish()
                self.complete = True
                self._sink = None

    def _is_complete(self, resume: bool) -> bool:
        """Takes the finished dataset, if that is what is there."""
        target = self._target
        found = complete_at(target)
        if found is None and resume and not Journal(target.root).exists():
            found = target.alike()
        if found is None:
            return False
        if not self._exist_ok:
            raise ExistsError("holds this dataset already, finished; exist_ok=True takes it as it is", path=found)
        self._appended = check_same(target, found)
        tidy(found)
        self.path = found
        self.complete = True
        return True

    def __repr__(self) -> str:
        state = "complete" if self.complete else f"{self._appended} examples appended, {self.committed} committed"
        return f"<actshard.Writer {self.format} {str(self.path)!r}: {state}>"

    def __enter__(self) -> Writer:
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
        """Examples that are safe: they survive a kill and a power cut, and a resumed writer goes on after them.

        Counted when a commit is done: after about a GiB of rows, at :meth:`flush` and at the end.
        """
        return self._sink.committed if self._sink is not None else self._appended

    def append(
        self,
        activations: Any,
        *,
        lengths: ArrayLike | None = None,
        columns: Mapping[str, Any] | pa.Table | None = None,
        labels: ArrayLike | None = None,
        logits: tuple[ArrayLike, ArrayLike] | None = None,
        router: Mapping[int, ArrayLike] | None = None,
    ) -> None:
        """Adds examples.

        Args:
            activations: ``(batch, n_layers, tokens, d_model)``; ``(batch, n_layers, d_model)`` for one row per example; or a list
                of ``(n_layers, tokens_i, d_model)``. numpy arrays or torch tensors, on any device (copied from it once).
            lengths: ``(batch,)``: tokens that count, from the first, where a batch is padded on the right.
            columns: per example, ``batch`` values each: texts, labels, ids. Names are the format's. Names and types are the same
                for every call: the first decides.
            labels: saev's patch labels, ``(batch, content tokens)`` uint8. Other formats keep them as a column.
            logits: top-k values and token indices, ``(batch, k)`` each (lmprobe). Other formats keep them as columns.
            router: router logits by layer, ``(batch, experts)`` each (lmprobe). Other formats keep them as columns.

        Raises:
            ArgumentError: shapes that do not fit each other, the layers or ``d_model``; examples that the format cannot hold as
                they are, with what to do (``pad=True``, ``truncate=True``, another ``storage=``).
            NotStoredError: the format holds no columns.
            DtypeError: another type than before, and none was asked for; a type that the format cannot hold.
            DiskFullError, FileAccessError: of this call or, as files are written in the background, of one before.
            ClosedError: the writer was closed.
        """
        with _told(self.path):
            self._append(activations, lengths, columns, labels, logits, router)

    def _append(
        self,
        activations: Any,
        lengths: ArrayLike | None,
        columns: Mapping[str, Any] | pa.Table | None,
        labels: ArrayLike | None,
        logits: tuple[ArrayLike, ArrayLike] | None,
        router: Mapping[int, ArrayLike] | None,
    ) -> None:
        sink, target = self._open(), self._target
        sink.check()
        examples = GivenExamples(activations, lengths, len(target.spec.layers), target.spec.d_model)
        if len(examples) == 0:
            return
        table = table_of(columns, labels, logits, router, len(examples))
        # Everything is checked before anything is kept, so that a refused call leaves the writer as it was.
        before = {name: getattr(target, name) for name in target.decides}
        try:
            tokens, dtype, fitted = self._checked(sink, examples, table)
        except BaseException:
            for name, value in before.items():
                setattr(target, name, value)
            raise
        try:
            sink.columns.keep(fitted)
            self._copy(sink, examples, tokens, dtype, fitted.table)
        except BaseException:
            # Half of a batch would be in it: what is committed counts, and a resumed writer goes on after that.
            self.abort()
            raise

    def _checked(
        self, sink: Sink, examples: GivenExamples, table: pa.Table | None
    ) -> tuple[NDArray[np.int64], np.dtype[Any], Fitted]:
        """Tokens and type that examples will have, and their columns; raises for what the format cannot hold."""
        target, tokens = self._target, examples.tokens
        expected = target.spec.num_examples
        if expected is not None and self._appended + len(examples) > expected:
            raise ArgumentError(
                f"num_examples: expected {expected}, found {len(examples)} more where {self._appended} were appended"
            )
        if not target.ragged or target.tokens is not None:
            target.take_tokens(
                int(tokens.max()) if self._pad else int(tokens.min()) if self._truncate else int(tokens[0])
            )
            tokens = self._fitted(tokens)
        else:
            target.take_tokens(int(tokens[0]) if examples.one_row else max(int(tokens.max()), 2))
            if target.tokens is not None:
                tokens = self._fitted(tokens)
        tokens = self._cut(tokens)
        dtype = target.take_dtype(examples.dtype)
        fitted = sink.columns.fit(table, self._appended, len(examples), alike=True)
        if self._overflow == "refuse" and examples.dtype != dtype:
            self._refuse_overflow(examples, np.minimum(examples.tokens, tokens), dtype)
        return tokens, dtype, fitted

    def _cut(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of examples that are not longer than the format has room for."""
        most = self._target.most_tokens
        if most is None or (tokens <= most[0]).all():
            return tokens
        if not self._truncate:
            i = int(np.flatnonzero(tokens > most[0])[0])
            raise ArgumentError(
                f"example {self._appended + i} has {tokens[i]} tokens, {most[1]}; truncate=True to create() cuts longer ones"
            )
        return np.minimum(tokens, most[0])

    def _refuse_overflow(self, examples: GivenExamples, tokens: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
        """Raises where a finite value would become infinite."""
        arrays = examples.items if examples.dense is None else [examples.dense]
        for i, array in enumerate(arrays):
            count = overflows(array, dtype)
            if count and examples.dense is not None and (tokens < array.shape[2]).any():
                # Rows beyond an example's own fill up its batch, or are cut off: they are not written.
                count = sum(overflows(x[:, :n], dtype) for x, n in zip(array, tokens.tolist(), strict=True))
            elif count and examples.dense is None:
                count = overflows(array[:, : tokens[i]], dtype)
            if count:
                where = f"example {self._appended + i}" if examples.dense is None else "the batch"
                raise DtypeError(
                    f"{count:,} values of {where} are beyond what {dtype} holds and would become infinite: store a wider type, "
                    "or overflow='allow' to create() lets them"
                )

    def _copy(
        self,
        sink: Sink,
        examples: GivenExamples,
        tokens: NDArray[np.int64],
        dtype: np.dtype[Any],
        table: pa.Table | None,
    ) -> None:
        """Brings examples into blocks, which the writing thread takes."""
        target = self._target
        own = np.minimum(examples.tokens, tokens)
        layers = len(target.spec.layers)
        done = 0
        while done < len(examples):
            if self._stage is None:
                self._stage = sink.memory(max(target.block_bytes // target.row_bytes, int(tokens[done]) * layers))
            filled = self._staged[-1][0] if self._staged else 0
            count = int(np.searchsorted(np.cumsum(tokens[done:] * layers), len(self._stage) - filled, "right"))
            if count == 0:
                if self._staged:
                    self._hand_over()
                else:
                    sink.give_back(self._stage)
                    self._stage = None
                continue
            part = slice(done, done + count)
            end = filled + int(tokens[part].sum()) * layers
            examples.copy(part, tokens[part], self._stage[filled:end], dtype)
            each = np.broadcast_to(tokens[part, None], (count, layers))
            self._staged.append((end, each, own[part], None if table is None else table.slice(done, count)))
            done += count
            self._appended += count

    def _fitted(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens as the format will have them: all alike."""
        wanted = self._target.tokens
        assert wanted is not None
        for bad, allowed, what in (
            (tokens < wanted, self._pad, "pad=True to create() fills shorter ones up with zeros"),
            (
                tokens > wanted,
                self._truncate,
                "truncate=True to create() cuts longer ones, tokens_per_example= with pad=True makes room for them",
            ),
        ):
            if bad.any() and not allowed:
                i = int(np.flatnonzero(bad)[0])
                keeping = self._target.keeping_all
                pooled = "" if keeping is None else f"{keeping}, or "
                raise ArgumentError(
                    f"example {self._appended + i} has {tokens[i]} tokens where {self.format} has {wanted} of every example here: "
                    f"{pooled}{what}"
                )
        return np.full_like(tokens, wanted)

    def _hand_over(self) -> None:
        """What was filled goes to the writing thread."""
        if self._stage is None or not self._staged:
            return
        assert self._sink is not None
        tables = [table for *_, table in self._staged if table is not None]
        columns = together(tables)[0] if tables else None
        lengths = np.concatenate([each for _, each, _, _ in self._staged]).astype(np.int64)
        own = None if self._target.ragged else np.concatenate([own for _, _, own, _ in self._staged])
        block = Block(self._stage[: self._staged[-1][0]], lengths, columns, own)
        self._stage, self._staged = None, []
        try:
            self._sink.put_fitted(block)
        except BaseException:
            self._sink.abort()  # whether the block is on its way is not known: what is committed counts
            raise

    def flush(self) -> int:
        """Waits until everything appended is committed: the number of examples that are safe.

        Pickle shards end at a flush; other formats go on where they were.
        """
        sink = self._open()
        with _told(self.path):
            self._hand_over()
            return sink.commit()

    def close(self) -> None:
        """Commits and finishes: the files get their names, and the manifest is written. Twice does no harm.

        Raises:
            ArgumentError: nothing was appended, or less than ``num_examples``. A part may be empty.
            ExistsError: the same dataset was finished by somebody else meanwhile; ours is kept, unfinished.
        """
        if self.complete or self._sink is None:
            return
        sink = self._open()
        try:
            with _told(self.path):
                self._finish(sink)
        except BaseException:
            sink.abort()  # whoever comes next may go on
            raise

    def _finish(self, sink: Sink) -> None:
        self._hand_over()
        sink.commit()
        found = self._target.existing(sink.committed) if sink.committed else None
        if found is not None:
            if not self._exist_ok:
                sink.abort()
                raise ExistsError("holds this dataset already, finished; exist_ok=True takes it as it is", path=found)
            sink.discard()
            self.path = found
        else:
            self.path = sink.finish()
        self.complete = True
        self._sink = None

    def _tell_unknown(self, sink: Sink) -> None:
        """Warns if an earlier release padded examples without noting their lengths, as far as can be told."""
        if not self._pad or self._target.ragged:
            return
        missing = sink.own_lengths_missing()
        if missing:
            warnings.warn(
                ActshardWarning(
                    f"{self.path}: pad=True: lengths of {missing} examples that an earlier release wrote are not known; rows that "
                    "fill them up count as content: write the dataset again if any were padded",
                    code="unknown-lengths",
                ),
                stacklevel=4,
            )

    def abort(self) -> None:
        """Stops without finishing. What was appended is committed if it can be; ``create(..., resume=True)`` goes on after it."""
        if self._sink is None:
            return
        sink = self._sink
        try:
            # The error that brought us here is the one to be seen; what the journal counts is safe.
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
            raise ClosedError(why, path=self.path)
        return self._sink

    def __del__(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None and not sys.is_finalizing():
            sink.abort()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the system says about files is an error of ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ActshardError):
            raise
        raise from_os(error, error.filename or path, "write") from error


def part_folder(path: Path, part: int, parts: int) -> Path:
    """Where a part is written before it is merged."""
    return path / PARTS / f"part-{part:05}-of-{parts:05}"


def make_target(
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[int],
    d_model: int,
    dtype: DTypeLike | None,
    metadata: Mapping[str, Any] | None,
    num_examples: int | None,
    tokens_per_example: int | None,
    shard_bytes: int | str | None,
    part: tuple[int, int] | None,
    options: Mapping[str, Any],
) -> Target:
    """A target from what a user says, checked."""
    known = formats.written()
    if not _arguments.is_one_of(format, known):
        raise ArgumentError(f"format must be one of {', '.join(known)}, not {format!r}")
    root = _arguments.local_path(path)
    told: dict[str, dict[str, Any]] = {}
    for name, given in (("metadata", {} if metadata is None else metadata), ("options", options)):
        try:
            # As JSON has them: what is resumed is compared with what was read back, which knows no tuples.
            told[name] = _as_json(dict(given))
        except FormatError as error:
            raise ArgumentError(f"{name}: expected what JSON can hold: {error.detail}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"{name}: expected what JSON can hold: {error}") from error
    names, shape = _arguments.index(layers, "layers")
    if not names.size or len(shape) != 1 or len(set(names.tolist())) < names.size:
        raise ArgumentError(f"layers: expected a list of distinct integers, found {layers!r}")
    for name, value in (
        ("d_model", d_model),
        ("num_examples", num_examples),
        ("tokens_per_example", tokens_per_example),
    ):
        if value is None and name != "d_model":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(f"{name}: expected a positive integer, found {value!r}")
    if part is not None:
        try:
            index, count = (int(x) for x in part)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"part: expected (i, n), found {part!r}") from error
        if not 0 <= index < count <= 99_999:
            raise ArgumentError(f"part: expected (i, n) with 0 <= i < n, found {part!r}")
        part = (index, count)
        root = part_folder(root, index, count)
    spec = Spec(
        path=root,
        layers=tuple(names.tolist()),
        d_model=int(d_model),
        dtype=None if dtype is None else _arguments.dtype(dtype)[0],
        metadata=told["metadata"],
        num_examples=None if num_examples is None else int(num_examples),
        tokens=None if tokens_per_example is None else int(tokens_per_example),
        shard_bytes=None if shard_bytes is None else max(1, _arguments.size(shard_bytes, "shard_bytes")),
        part=part,
        options=told["options"],
    )
    return formats.get(format).target()(spec)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """What comes back from a metadata file; raises for what a reader would refuse there: no numbers, ever deeper lists."""
    within = "[" * _AROUND + json.dumps(value, allow_nan=False) + "]" * _AROUND
    made: Any = parse_json(within, "metadata")
    for _ in range(_AROUND):
        (made,) = made
    found: dict[str, Any] = made
    return found


def create(
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[int],
    d_model: int,
    dtype: DTypeLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    num_examples: int | None = None,
    tokens_per_example: int | None = None,
    pad: bool = False,
    truncate: bool = False,
    overflow: str = "refuse",
    shard_bytes: int | str | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    exist_ok: bool = False,
    **options: Any,
) -> Writer:
    """Makes a dataset that the format's own system reads.

    Nothing half-written is ever taken for a dataset: files are written under other names, the manifest comes last. Rows go to disk
    on threads of ours while the caller makes the next.

    Args:
        path: the dataset's folder. For saev the folder of dumps (``.../saev/shards``, if saev itself is to read it): the dataset is
            ``path/<HASH>``, and :attr:`Writer.path` tells it when it is closed.
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"`` or ``"pickle"``.
        layers: names of the layers, in the order of the arrays' layer axis.
        d_model: elements per row.
        dtype: the stored type; what is appended is converted to it while it is copied. None: that of what is appended first, and
            nothing is ever converted.
        metadata: what the format has a place for: saev's ``family``, ``ckpt``, ``data``, ``dataset``, ``pixel_agg``; a Zarr store's
            attributes; the pickle shards' ``extraction_config``; lmprobe's ``lmprobe:`` keys.
        num_examples: how many there will be, if it is known: another number at the end is an error; saev's name is known before.
        tokens_per_example: for formats that have as many of each (saev); None: as many as the first example.
        pad: fill shorter examples up with zeros, where a format cannot hold them as they are.
        truncate: cut longer ones.
        overflow: ``"refuse"`` raises an error where a finite value is beyond what ``dtype`` holds; ``"allow"`` makes it infinite.
        shard_bytes: about how large shards are; each format has its own default.
        part: ``(i, n)``: this process writes part i of n; :func:`actshard.merge` makes one dataset of them. A part may be empty.
        resume: continue an unfinished dataset after the examples that are safe: ``writer.committed``. Begins where nothing was
            begun, and takes what is finished: ``writer.complete``.
        exist_ok: if the dataset is there already, finished, take it: ``writer.complete`` is True and nothing can be appended.
        options: the format's own; an unknown one raises an error that lists them. saev: ``protocol``, ``cls_token``,
            ``max_tokens_per_shard``. lmprobe: ``storage``, ``pooling``, ``model``, ``revision``. zarr: ``chunk_tokens``, ``t_max``.
            pickle: ``compress``, ``level``, ``machine_id``, ``total_machines``, ``samples_per_machine``.

    Returns:
        A :class:`~actshard.Writer`; a context manager that finishes the dataset, or leaves it to be resumed after an exception.

    Raises:
        ArgumentError, DtypeError: arguments that make no sense, or that the format cannot hold.
        ExistsError: something is there already: another dataset, or this one, finished (``exist_ok``) or not (``resume``).
        LockedError: another writer is at work there.
        FormatError: a saev folder whose metadata do not match its hash.
    """
    if not _arguments.is_one_of(overflow, ("refuse", "allow")):
        raise ArgumentError(f'overflow: expected "refuse" or "allow", found {overflow!r}')
    target = make_target(
        path,
        format,
        layers=layers,
        d_model=d_model,
        dtype=dtype,
        metadata=metadata,
        num_examples=num_examples,
        tokens_per_example=tokens_per_example,
        shard_bytes=shard_bytes,
        part=part,
        options=options,
    )
    return Writer(
        target,
        resume=_arguments.switch(resume, "resume"),
        exist_ok=_arguments.switch(exist_ok, "exist_ok"),
        pad=_arguments.switch(pad, "pad"),
        truncate=_arguments.switch(truncate, "truncate"),
        overflow=overflow,
    )
