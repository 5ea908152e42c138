"""Plans of extractions: each task writes its range of examples as a part of the dataset, and the commit merges the parts.

.. code-block:: text

    DST/.parts/part-00017-of-00256/                  the part of task 17, as written by create(part=(17, 256)); locked by its writer
    DST/.actshard/plan-XXXXXXXX/tasks/00017/         exists when task 17 is done and its part is finished

Unlike other tasks, those of an extraction have state: examples that a task has committed are kept when its process is killed, and
the next run continues after them. So only one process can run a task at a time: the part's lock refuses a second one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._schema import Amount, Count, json_values
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    DtypeError,
    ExistsError,
    FormatError,
    InternalError,
    OutOfRangeError,
    boundary,
)
from actshard.base.layers import Layer
from actshard.base.request import Request
from actshard.base.work import PARTS, look, remove
from actshard.formats.options import FormatOptions
from actshard.formats.target import Target
from actshard.plan import process
from actshard.plan.book import BEAT_SECONDS, remove_work_folders, work_folder
from actshard.plan.data import Planned, Predicted, fewer, identity
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, ExamplesTask, Opened, Result, Span, Verb, check_spans
from actshard.reading.finding import is_finished
from actshard.writing import Writer
from actshard.writing.converting.previewing import refuse_full
from actshard.writing.creating import Creation, make_target
from actshard.writing.existing import Fitting, check_written, complete_at, creation_record
from actshard.writing.merging import MergeRequest, run_merge
from actshard.writing.sink import write_memory

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Computes = Callable[[Writer, range], object]
"""A function that computes activations. It is called with a writer and the numbers of the examples to append."""
MOST_TASKS = 99_999
_EVEN = 1.05
"""Tasks start at shard borders only if the largest task has at most this multiple of the mean number of examples."""
_MOST_LISTED = 1 << 28
"""Shard borders are computed for at most this number of examples."""
_ESTIMATED = 1 << 20
"""Files of more examples than this are estimated in proportion."""


def create(
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[Layer],
    d_model: int,
    num_examples: int,
    tasks: int,
    dtype: DTypeLike | None = None,
    metadata: Mapping[str, object] | None = None,
    tokens_per_example: int | None = None,
    pad: bool = False,
    truncate: bool = False,
    overflow: _arguments.Overflow = "refuse",
    shard_bytes: int | str | None = None,
    capture: str | Computes | None = None,
    exist_ok: bool = False,
    work: str | os.PathLike[str] | None = None,
    **options: Unpack[FormatOptions],
) -> CreatePlan:
    """Plans an extraction by many processes: each task writes a range of examples, as a part of the dataset.

    Every process may create the plan with the same arguments, or load it from a file. It then runs its tasks::

        plan = actshard.plan.create(path, "zarr", layers=[4, 8], d_model=4096, num_examples=100_000, tasks=64)
        for task in plan.mine():
            with plan.writer(task) as writer:
                for batch in batches_of(writer.left):
                    writer.append(model(batch))

    When all tasks are done, one process calls :meth:`~actshard.plan.Plan.commit`. Nothing is written before the first task.

    Args:
        path: the dataset's folder, which all machines must share; for saev the folder of dumps.
        format: a format whose parts can be merged: ``"saev"``, ``"lmprobe"``, ``"zarr"`` or ``"pickle"``.
        layers: names of the layers, as for :func:`actshard.create`.
        d_model: elements per row.
        num_examples: number of examples of the whole dataset.
        tasks: number of tasks. Their sizes differ by at most one example; or the largest is up to 5 % above the mean, if all tasks
            can then start at shard borders.
        dtype: dtype to store.
        metadata: values that the format stores.
        tokens_per_example: number of tokens. Formats without a constant number use it for the predicted size only.
        pad: fill short examples.
        truncate: cut long examples.
        overflow: what to do with values too large for ``dtype``.
        shard_bytes: approximate size of a shard.
        capture: ``"module:function"``, or a function that can be imported by such a name, with which engines run the tasks. It is
            called as ``function(writer, examples)`` and appends the examples of the range. Running a plan runs this function:
            load plans only from files that you would also run as scripts. None: your script uses ``plan.writer``.
        exist_ok: accept a finished dataset with these arguments as the result of this plan.
        work: working folder, which all machines must share; None: a hidden folder in ``path``.
        options: options of the format.

    Returns:
        A plan. Its prediction does not include columns, which are unknown until they are appended.

    Raises:
        ArgumentError, DtypeError: as for :func:`actshard.create`; a format whose parts cannot be merged.
        ExistsError: ``path`` contains a dataset, or parts of another one.
        UnfinishedError: another plan or writer is creating a dataset in ``path``.
        DiskFullError: the file system has less free space than predicted.
    """
    if not _arguments.is_one_of(overflow, ("refuse", "allow")):
        raise ArgumentError(f'overflow: expected "refuse" or "allow", found {overflow!r}')
    root = _arguments.local_path(path)
    check_format(format)
    tasks = _arguments.whole(tasks, "tasks", 1, MOST_TASKS)
    n = _arguments.whole(num_examples, "num_examples", 1, (1 << 62) - 1)
    parts = min(tasks, n)
    target = make_target(
        Creation(
            root,
            format,
            layers,
            d_model,
            dtype,
            metadata,
            n,
            tokens_per_example,
            shard_bytes,
            (0, parts),
            dict(options),
            whole=n,
        )
    )
    fitting = Fitting(_arguments.switch(pad, "pad"), _arguments.switch(truncate, "truncate"), overflow)
    function = None if capture is None else function_name(capture, "capture")
    arguments = CreateArguments.of(root, target, fitting, n, function)
    borders = borders_of(n, target)
    bounds = _bounds(n, parts, borders)
    predicted, notes, task_bytes = _predict(arguments, bounds, borders)
    notes = [*fewer(parts, tasks, f"there {'is' if n == 1 else 'are'} {many(n, 'example')}"), *notes]
    plan_tasks = [
        ExamplesTask(Span(a, b), size) for a, b, size in zip(bounds[:-1], bounds[1:], task_bytes, strict=True)
    ]
    work_path = (
        work_folder(root, identity("create", arguments, (), plan_tasks), dumps=target.names_itself)
        if work is None
        else _arguments.local_path(work, "work")
    )
    plan = CreatePlan(
        "create", json_values(arguments), (), tuple(json_values(plan_tasks)), predicted, work_path, tuple(notes)
    )
    refuse_others(plan, target, _arguments.switch(exist_ok, "exist_ok"))
    return plan


@dataclass(frozen=True)
class CreateArguments:
    """The arguments of :func:`create`."""

    path: Path
    format: str
    layers: tuple[Layer, ...]
    d_model: Count
    num_examples: Count
    dtype: str | None
    metadata: Mapping[str, object] | None
    tokens_per_example: Amount | None
    shard_bytes: int | str | None
    options: Mapping[str, Any]
    pad: bool
    truncate: bool
    overflow: _arguments.Overflow
    capture: str | None

    @classmethod
    def of(
        cls,
        root: Path,
        target: Target,
        fitting: Fitting,
        num_examples: int,
        capture: str | None = None,
    ) -> Self:
        """The arguments of the dataset at ``root``, of which ``target`` is a part."""
        spec = target.spec
        return cls(
            root,
            target.format,
            spec.layers,
            spec.d_model,
            num_examples,
            None if spec.dtype is None else str(spec.dtype),
            spec.metadata,
            spec.tokens,
            spec.shard_bytes,
            spec.options,
            fitting.pad,
            fitting.truncate,
            fitting.overflow,
            capture,
        )

    @property
    def fitting(self) -> Fitting:
        """How examples and values that do not fit are stored."""
        return Fitting(self.pad, self.truncate, self.overflow)


def check_format(format: str) -> None:
    """Raises ArgumentError for a format whose parts cannot be merged."""
    written = formats.written()
    mergeable = [name for name in written if formats.get(name).merger() is not None]
    if _arguments.is_one_of(format, written) and format not in mergeable:
        raise ArgumentError(
            f"format: {format} datasets cannot be written in parts; write {', '.join(mergeable)}, and convert it with "
            "actshard.convert or actshard.plan.convert"
        )


def borders_of(n: int, target: Target) -> NDArray[np.int64] | None:
    """First examples of the shards; None if the number of examples per shard is unknown."""
    if target.ragged or target.tokens is None or n > _MOST_LISTED:
        return None
    return target.borders(np.broadcast_to(np.int64(target.tokens), (n, len(target.spec.layers))))


def _bounds(n: int, tasks: int, borders: NDArray[np.int64] | None) -> list[int]:
    """First examples of the tasks, and the end of the last.

    Tasks start at shard borders if their sizes stay nearly equal: then the commit copies nothing.
    """
    equal = [k * n // tasks for k in range(tasks + 1)]
    if borders is None or len(borders) < tasks:
        return equal
    border_bounds = [int(borders[k * len(borders) // tasks]) for k in range(tasks)] + [n]
    return border_bounds if max(np.diff(border_bounds)) <= _EVEN * n / tasks else equal


def refuse_others(plan: CreatePlan, target: Target, exist_ok: bool) -> None:
    """Raises ExistsError, UnfinishedError or DiskFullError if the dataset cannot be written, before a model computes anything."""
    with boundary(plan.path, "plan an extraction to"):
        if plan.book.exists():
            return
        target.plan = plan.work
        try:
            _refuse_others(plan, target, exist_ok)
        except ActshardError:
            if not plan.book.exists():  # otherwise another process has just started this plan
                raise


def _refuse_others(plan: CreatePlan, target: Target, exist_ok: bool) -> None:
    """Raises ExistsError, UnfinishedError or DiskFullError if the dataset cannot be written, before a model computes anything."""
    root = plan.path
    if (dataset_path := plan.implementation.committed(plan)) is not None:
        if exist_ok:
            return
        raise ExistsError.finished(dataset_path)
    complete_at(target, resumes=False)
    refuse_full(root, plan.predicted.bytes + plan.predicted.scratch, plan.predicted.files + 4 * len(plan))
    if (root / PARTS).exists():
        raise ExistsError(
            f"contains parts of another dataset: merge them with actshard.merge, or remove {PARTS}, or choose another folder",
            path=root,
        )


def _predict(
    arguments: CreateArguments, bounds: Sequence[int], borders: NDArray[np.int64] | None
) -> tuple[Predicted, list[str], list[int]]:
    """Returns the predicted size and memory, notes, and the bytes of each task's rows."""
    notes = []
    tokens = arguments.tokens_per_example
    if tokens is None:
        notes.append(
            "bytes and files are predicted for one token per example: pass tokens_per_example= for a better prediction"
        )
    if arguments.dtype is None:
        notes.append("bytes are predicted for float32: pass dtype= for a better prediction")
    sizes = []
    counts = np.diff(bounds).tolist()
    for count in [*dict.fromkeys(counts), bounds[-1]]:
        target = target_of(arguments, None, count, (0, len(counts)))
        if target.dtype is None:
            target.dtype = np.dtype(np.float32)
        target.take_tokens(tokens or 2)
        sizes.append(_estimate(target, count, target.tokens or tokens or 1))
    estimates = dict(zip(dict.fromkeys(counts), sizes[:-1], strict=True))
    process_memory = process.writing(arguments.format, __name__)
    rows = max(counts) * (tokens or 1 << 62) * len(target.spec.layers) * target.row_bytes
    memory = process_memory + write_memory(target, rows)
    parts = [estimates[count] for count in counts]
    return predicted_of(arguments, bounds, borders, parts, sizes[-1], 0, memory), notes, [size for *_, size in parts]


def predicted_of(
    arguments: CreateArguments,
    bounds: Sequence[int],
    borders: NDArray[np.int64] | None,
    parts: Sequence[tuple[int, int, int]],
    total: tuple[int, int, int],
    read: int,
    memory: int,
) -> Predicted:
    """The prediction of a plan from those of its parts, as (shards, files, bytes).

    Args:
        arguments: the dataset.
        bounds: first examples of the parts, and the end of the last.
        borders: first examples of the dataset's shards; None if they are unknown.
        parts: of each part.
        total: of a dataset that has all examples and is written at once.
        read: bytes that the tasks read.
        memory: bytes of memory of a task.
    """
    merger = formats.get(arguments.format).merger()
    assert merger is not None
    files, size = merger.predicted(parts, total)
    shards = set() if borders is None else {*borders.tolist()}
    copied = sum(
        part[2] for first, part in zip(bounds[:-1], parts, strict=True) if borders is not None and first not in shards
    )
    # The record of the request is a file, too; bytes are those of rows. At most the size of the result is copied: saev's shards
    # have their full (sparse) size in each part, but no row is copied twice.
    return Predicted(size, files + 1, read, memory, min(copied, size))


def _estimate(target: Target, count: int, tokens: int) -> tuple[int, int, int]:
    """Shards, files and bytes of examples with ``tokens`` tokens; above :data:`_ESTIMATED` examples in proportion."""
    shards, files, size = target.estimate(np.full(min(count, _ESTIMATED), tokens, np.int64))
    if count <= _ESTIMATED:
        return shards, files, size
    all_shards = -(-shards * count // _ESTIMATED)
    return all_shards, all_shards + files - shards, -(-size * count // _ESTIMATED)


def target_of(arguments: CreateArguments, work: Path | None, count: int, part: tuple[int, int] | None) -> Target:
    """The target of ``count`` examples: of a part of a plan with the folder ``work``, or of the whole dataset."""
    target = make_target(
        Creation(
            arguments.path,
            arguments.format,
            arguments.layers,
            arguments.d_model,
            arguments.dtype,
            arguments.metadata,
            count,
            arguments.tokens_per_example,
            arguments.shard_bytes,
            part,
            arguments.options,
            whole=arguments.num_examples,
        )
    )
    target.plan = work
    return target


def function_name(function: object, what: str) -> str:
    """Returns the name ``module:function`` of the argument ``what``, which other processes can import."""
    if isinstance(function, str):
        module, _, path = function.partition(":")
        if not all(word.isidentifier() for word in [*module.split("."), *path.split(".")]):
            raise ArgumentError(f'{what}: expected "module:function", found {function!r:.100}')
        return function
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not isinstance(module_name, str) or not isinstance(name, str):
        raise ArgumentError(f'{what}: expected a function, or "module:function", found {function!r:.100}')
    if module_name == "__main__" or "<" in name:
        raise ArgumentError(
            f"{what}: expected a function that other processes can import, found {name} of {module_name}: define it with def in "
            "an importable module"
        )
    return f"{module_name}:{name}"


def import_function(name: str, what: str) -> Callable[..., object]:
    """Imports the function with a name ``module:function``, the argument ``what``."""
    module, _, path = name.partition(":")
    try:
        attribute: object = importlib.import_module(module)
        for part in path.split("."):
            attribute = getattr(attribute, part)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            f"{what}: cannot import {name!r}: {error}. Engines look in PYTHONPATH and in the installed packages."
        ) from error
    if not callable(attribute):
        raise ArgumentError(f"{what}: expected a function, found {type(attribute).__name__} {name!r}")
    function: Callable[..., object] = attribute
    return function


class CreatePlan(Plan):
    """A plan of :func:`create`: tasks are ranges of examples, which your script or ``capture`` computes and writes."""

    @property
    def computes(self) -> Mapping[str, object] | None:
        """What determines the computed values, for the record of the request; None: unknown. Internal."""
        return None

    @property
    def path(self) -> Path:
        """The dataset's folder."""
        return self.creation().path

    def creation(self, path: Path | None = None) -> CreateArguments:
        """The dataset to create. Raises FormatError for other values; ``path`` is the plan's file, for messages. Internal."""
        return self.arguments_as(CreateArguments, path)

    def examples(self, task: int) -> range:
        """Returns a task's examples, as numbers in the whole dataset.

        Raises:
            OutOfRangeError: there is no such task.
        """
        task = _arguments.whole(task, "task", 0)
        if task >= len(self):
            raise OutOfRangeError(f"task: expected 0 to {len(self) - 1}, found {task}")
        return range(*self.tasks_as(ExamplesTask)[task].examples)

    def writer(self, task: int) -> TaskWriter:
        """Returns the writer of a task. It continues after examples that were committed before: append those of ``writer.left``.

        Closing the writer with all examples finishes the task. For a finished task, and after the commit, ``writer.complete`` is
        True and ``writer.left`` is empty.

        Raises:
            OutOfRangeError: there is no such task.
            LockedError: another process is writing the examples of this task.
        """
        return TaskWriter(self, _arguments.whole(task, "task", 0))

    def run(self, task: int) -> dict[str, Any]:
        """Runs one task: calls ``capture`` with the task's writer and its remaining examples, and closes the writer.

        Raises:
            ArgumentError: the plan has no ``capture``.
            Others: as :meth:`actshard.plan.Plan.run`, and LockedError if another process is running this task.
        """
        if self.creation().capture is None:
            raise ArgumentError(
                f"this plan has no capture=, which computes activations: use plan.writer({task}) in your script, or make the "
                'plan with capture="module:function"'
            )
        return super().run(task)


class TaskWriter(Writer):
    """The writer of one task of an extraction. Created by :meth:`CreatePlan.writer`.

    Attributes:
        task: the task's number.
        examples: the task's examples, as numbers in the whole dataset.
    """

    def __init__(self, plan: CreatePlan, task: int, tell: Beat | None = None) -> None:
        self.task = task
        self.examples = plan.examples(task)
        self._plan = plan
        self._tell = tell
        self._began = self._told_at = time.monotonic()
        self._attempt: Path | None = None
        arguments = plan.creation()
        target = target_of(arguments, plan.work, len(self.examples), (task, len(plan)))
        target.request = creation_record(target, arguments.fitting, plan.computes)
        super().__init__(target, arguments.fitting, resume=True, exist_ok=True)

    @property
    def left(self) -> range:
        """The task's examples that were not appended yet, as numbers in the whole dataset."""
        return self.examples[len(self) :]

    def _begin(self, resume: bool) -> None:
        plan, book = self._plan, self._plan.book
        over = None if plan.begin() else plan.implementation.committed(plan)
        if over is not None or book.result(self.task) is not None:  # its part may have been merged
            self.path, self.complete, self._appended = over or plan.path, True, len(self.examples)
            return
        super()._begin(resume)
        if self._tell is None:  # otherwise Plan.run records the attempt and its result
            self._attempt = book.begin_attempt(self.task)
            if self.complete:  # killed after the part was finished and before the task was recorded as done
                self._publish()

    def append(self, activations: ArrayLike | Sequence[ArrayLike], **arguments: Any) -> None:
        """As :meth:`actshard.Writer.append`."""
        super().append(activations, **arguments)
        now = time.monotonic()
        if now - self._told_at < BEAT_SECONDS:
            return
        self._told_at = now
        if self._tell is not None:
            self._tell(len(self), len(self.examples))
        elif self._attempt is not None:
            self._plan.book.tell(self._attempt, len(self), len(self.examples))

    def close(self) -> None:
        """Finishes the task. May be called again.

        Raises:
            ArgumentError: examples of the task are missing. Those that were appended are kept, and the task can be run again.
        """
        if self.complete or self._sink is None:
            return
        if self.left:
            first, last = self.examples[0], self.examples[-1]
            count = f"expected examples {first} to {last} ({len(self.examples)}), found {len(self)} appended"
            self.abort()
            raise ArgumentError(
                f"task {self.task}: {count}; they are kept: run the task again for examples from {self.left[0]}"
            )
        super().close()
        self._publish()

    def _publish(self) -> None:
        """Records that the task is done."""
        if self._attempt is not None:
            seconds = round(time.monotonic() - self._began, 3)
            self._plan.book.publish(self.task, self._attempt, {"value": self.result(), "seconds": seconds})
            self._attempt = None

    def result(self) -> dict[str, object]:
        """Returns the finished task's result for the working folder."""
        size = sum(Path(folder, name).stat().st_size for folder, _, names in os.walk(self.path) for name in names)
        return {"examples": [self.examples[0], self.examples[-1] + 1], "bytes": size, "units": len(self.examples)}

    def abort(self) -> None:
        """As :meth:`actshard.Writer.abort`: the task can be run again, and continues after the committed examples."""
        super().abort()
        if self._attempt is not None:
            remove(self._attempt)
            self._attempt = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        except Exception as failed:
            self._record(failed)
            raise
        if isinstance(error, Exception):
            self._record(error)

    def _record(self, error: Exception) -> None:
        if self._tell is None:
            if not isinstance(error, ActshardError):
                error = InternalError(f"task {self.task}: {type(error).__name__}: {error}", path=self.path)
            self._plan.book.failed(self.task, error)


class Creating(Verb[Opened]):
    """Runs the tasks of an extraction with a ``capture``, and merges their parts."""

    name = "create"
    undivided = "the time depends on the model, which is not run for a measurement"

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that the planner does not make."""
        assert isinstance(plan, CreatePlan)
        arguments = plan.creation(path)
        try:
            check_format(arguments.format)
            target_of(arguments, None, 1, (0, len(plan)))
            if arguments.capture is not None:
                function_name(arguments.capture, "capture")
        except (ArgumentError, DtypeError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = error.detail if isinstance(error, ActshardError) else repr(error)
            raise FormatError(f"field 'arguments': expected those of an extraction: {why}", path=path) from error
        spans = [task.examples for task in plan.tasks_as(ExamplesTask, path)]
        check_spans(spans, "examples", arguments.num_examples, path)
        if any(first == end for first, end in spans):
            raise FormatError("field 'tasks': expected ranges of examples, none of them empty", path=path)

    def part(self, plan: Planned, limit: int) -> Mapping[str, object] | None:
        """None: the time depends on the model, which is not run here."""
        return None

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> Mapping[str, object]:
        """Runs the task's capture."""
        assert isinstance(plan, CreatePlan)
        function: Computes = import_function(str(plan.creation().capture), "capture")
        writer = TaskWriter(plan, task, tell)
        with writer:
            if not writer.complete and writer.left:  # empty if a run was killed after the last example
                function(writer, writer.left)
        return writer.result()

    def commit(self, plan: Planned, results: Sequence[Result]) -> Path:
        """Merges the parts; returns the dataset's path."""
        if (dataset := self.committed(plan)) is not None:
            return dataset
        assert isinstance(plan, CreatePlan)
        counts = tuple(task.examples.end - task.examples.first for task in plan.tasks_as(ExamplesTask))
        return run_merge(
            plan.path, MergeRequest(None, physical=False, different_models=False, plan=plan.work, counts=counts)
        )

    def committed(self, plan: Planned) -> Path | None:
        """The finished dataset with the plan's examples, layers, types and metadata."""
        assert isinstance(plan, CreatePlan)
        root, format = plan.path, plan.creation().format
        if not root.is_dir() or {"parts", "merging"} & set(look(root).kinds()):
            return None
        request = _request(plan)
        if not formats.get(format).target().names_itself:
            if not is_finished(root, format):
                return None
            check_written(request, root)
            return root
        places = sorted(p for p in root.iterdir() if p.name[0] != "." and is_finished(p, format))
        for path in places:
            with contextlib.suppress(FormatError):  # a damaged record of another dump
                if Request.read(path) == request:
                    return path
        return None

    def after(self, plan: Planned) -> None:
        """Removes the folder of working folders if it is empty."""
        assert isinstance(plan, CreatePlan)
        remove_work_folders(plan.path)


def _request(plan: CreatePlan) -> Request:
    """The request for the whole dataset: as if one writer had created it."""
    arguments = plan.creation()
    target = target_of(arguments, None, arguments.num_examples, None)
    return creation_record(target, arguments.fitting, plan.computes).without_part(arguments.num_examples)
