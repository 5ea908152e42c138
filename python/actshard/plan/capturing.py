"""Plans of captures: each task computes a range of examples with the model, and writes it as a part; the commit merges the parts.

Tasks are those of an extraction (:mod:`actshard.plan.creating`): examples that a task has committed survive a kill, and the next
run of the task continues after them. A task loads the model, unless its process has run another task of the plan. It compares
model, tokenizer and texts with those of the plan.

Tasks begin with windows of a capture, whose batches depend only on the examples and the plan: the same batches are computed for any
number of tasks.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import show
from actshard.base._schema import Amount, AnyText, Count, json_values
from actshard.base.errors import ArgumentError, ChangedInputError
from actshard.base.location import Location
from actshard.base.work.pool import peak_memory
from actshard.formats import registry
from actshard.formats.target import Target
from actshard.plan.book import work_folder
from actshard.plan.creating import (
    MOST_TASKS,
    CreateArguments,
    CreatePlan,
    Creating,
    TaskWriter,
    borders_of,
    check_format,
    function_name,
    import_function,
    predicted_of,
    refuse_others,
    target_of,
)
from actshard.plan.data import Planned, Predicted, fewer, identity
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, ExamplesTask, Result, Span
from actshard.reading.inputs import Input
from actshard.writing.capturing.arguments import input_settings, model_settings, output_settings, run_settings
from actshard.writing.capturing.choosing import Chooser, choice_of
from actshard.writing.capturing.job import CaptureJob, ExampleCounts, OutputSettings, warn_of_problems
from actshard.writing.capturing.records import records_of
from actshard.writing.capturing.result import Problem
from actshard.writing.capturing.running import OnNonfinite
from actshard.writing.capturing.transformers_models import named_tokenizer
from actshard.writing.converting.blocks import balanced
from actshard.writing.creating import make_target
from actshard.writing.existing import Fitting

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAMED = 3
"""Examples without states, and with values that are not finite, that the result of a task names."""


def capture(
    model: object,
    texts: str | os.PathLike[str] | Sequence[os.PathLike[str]],
    path: str | os.PathLike[str],
    format: str = registry.DEFAULT_OF_PARTS,
    *,
    tasks: int = 64,
    layers: object = "all",
    tokens: str | int | Sequence[int] | Chooser = "all",
    tokenizer: object = None,
    text: str | None = None,
    columns: Sequence[str] | None = None,
    dtype: DTypeLike | None = None,
    special_tokens: bool = True,
    max_tokens: int | None = None,
    truncate: bool = False,
    batch_tokens: int = 16_384,
    memory: int | str = "2GiB",
    on_nonfinite: OnNonfinite = "refuse",
    revision: str | None = None,
    device: str | None = None,
    model_options: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    pad: bool = False,
    shard_bytes: int | str | None = None,
    options: Mapping[str, object] | None = None,
    exist_ok: bool = False,
    work: str | os.PathLike[str] | None = None,
) -> CapturePlan:
    """Plans a capture. The rows and columns are those of :func:`actshard.capture` with the same ``batch_tokens`` and ``memory``.

    Tasks are balanced by tokens, and compute the same batches for any number of tasks. So rows are equal bit for bit if the model
    is deterministic, all tasks run on the same kind of device, and no batch was halved because a device ran out of memory.
    Otherwise they differ in the last bits.

    Planning loads the model and encodes all texts, but computes only one example. Each process that runs tasks loads the model
    once. Writes nothing.

    Args:
        model: the name of a model of transformers, its folder, which all machines must share, or a function that can be imported,
            also by its name ``"module:function"``. Running a plan runs this function: load plans only from files that you would
            also run as scripts.
        texts: a file, glob or folder, or a list of ``pathlib.Path``, which all machines must share.
        path: folder of the dataset, which all machines must share.
        format: a format whose parts can be merged: ``"saev"``, ``"lmprobe"``, ``"zarr"`` or ``"pickle"``.
        tasks: maximum number of tasks. A task has at least the examples of 32 batches, so that there are fewer tasks if there are
            few texts; see ``plan.notes``.
        layers: as for :func:`actshard.capture`, like all arguments without another description.
        tokens: a word, positions, or a function that can be imported, also by its name.
        tokenizer: a name on the hub, a folder, or a function that can be imported.
        text: column with the text, the chat or the token ids.
        columns: columns of the inputs to store.
        dtype: dtype to store.
        special_tokens: whether the tokenizer adds its special tokens.
        max_tokens: longer examples are left empty, or cut with ``truncate``.
        truncate: cut longer examples at their end.
        batch_tokens: token positions per batch.
        memory: approximate memory of states on the host.
        on_nonfinite: ``"refuse"`` or ``"count"``.
        revision: commit, branch or tag of a named model.
        device: device of each task. Default: a GPU, if there is one.
        model_options: arguments of ``AutoModel.from_pretrained``, as JSON values.
        metadata: further values that the format stores.
        pad: fill short examples, for formats with a constant number of tokens.
        shard_bytes: as for :func:`actshard.create`.
        options: options of the format.
        exist_ok: accept a finished dataset of the same capture as the result of this plan.
        work: working folder, which all machines must share; None: a hidden folder in ``path``.

    Returns:
        A plan. Its ``commit`` returns the dataset's path, and warns of examples without states. The predicted memory is the largest
        amount that this process has used, with the model, and ``memory``.

    Raises:
        Errors of :func:`actshard.capture`, before anything is computed.
        ArgumentError: texts, a model or a tokenizer that other processes cannot load; a format whose parts cannot be merged.
        ExistsError: ``path`` contains a dataset, or parts of another one.
        UnfinishedError: another plan or writer is creating a dataset in ``path``.
        DiskFullError: the file system has less free space than predicted.
    """
    tasks = _arguments.whole(tasks, "tasks", 1, MOST_TASKS)
    root = _arguments.local_path(path)
    check_format(format)
    files = records_of(texts).files
    if not files:
        raise ArgumentError(
            "texts: expected files, because tasks in other processes read them, found values in memory; write them to files first"
        )
    settings = CaptureSettings(
        _model_name(model),
        tuple(_arguments.local_path(file, "texts") for file in files),
        _tokenizer_name(tokenizer),
        _tokens_name(tokens),
        text,
        None if columns is None else tuple(columns),
        _arguments.switch(special_tokens, "special_tokens"),
        max_tokens,
        _arguments.switch(truncate, "truncate"),
        _arguments.whole(batch_tokens, "batch_tokens", 1),
        _arguments.size(memory, "memory"),
        on_nonfinite,
        revision,
        device,
        model_options,
    )
    output = output_settings(root, format, metadata, options, pad=pad, shard_bytes=shard_bytes, resume=True)
    # This machine may have another device.
    job = settings.job(output, layers, dtype, device if _is_function(settings.model) else None)
    plan, target = _make_plan(root, settings, job, tasks, None if work is None else _arguments.local_path(work, "work"))
    refuse_others(plan, target, _arguments.switch(exist_ok, "exist_ok"))
    return plan


def _make_plan(
    root: Path, settings: CaptureSettings, job: CaptureJob, tasks: int, work: Path | None
) -> tuple[CapturePlan, Target]:
    """Returns the plan, and the target of one of its parts."""
    inputs = tuple(Input.at(Location.at(file)) for file in settings.texts)
    with closing(job):
        creation = job.creation()
        job.refuse_empty(creation)
        tokens = job.rows_per_example()
        windows = list(job.counts())
    examples = [example for window in windows for example in window]
    rows = np.array([example.rows for example in examples], np.int64)
    firsts = balanced(
        np.array([example.tokens + 1 for example in examples], np.int64),
        np.array([window[0].number for window in windows], np.int64),
        tasks,
    )
    bounds = [*firsts, len(examples)]
    count, parts = len(examples), (0, len(firsts))
    target = make_target(
        replace(creation, path=root, num_examples=count, tokens_per_example=tokens, part=parts, whole=count)
    )
    arguments = CaptureArguments(CreateArguments.of(root, target, Fitting(job.pad), count), settings, job.identity())
    read = sum(file.size or 0 for file in inputs) * len(firsts)
    predicted, sizes = _predict(arguments, bounds, borders_of(len(examples), target), rows, read)
    plan_tasks = [
        ExamplesTask(Span(a, b), size) for (a, b), size in zip(itertools.pairwise(bounds), sizes, strict=True)
    ]
    if work is None:
        work = work_folder(root, identity("capture", arguments, inputs, plan_tasks), dumps=target.names_itself)
    plan = CapturePlan(
        "capture",
        json_values(arguments),
        inputs,
        tuple(json_values(plan_tasks)),
        predicted,
        work,
        tuple(_notes(examples, len(windows), len(firsts), tasks)),
    )
    return plan, target


@dataclass(frozen=True)
class CaptureSettings:
    """The arguments of a capture that each task needs, except those of the dataset."""

    model: str
    texts: tuple[Path, ...]
    tokenizer: str | None
    tokens: str | tuple[int, ...]
    text: str | None
    columns: tuple[str, ...] | None
    special_tokens: bool
    max_tokens: Count | None
    truncate: bool
    batch_tokens: Count
    memory: Amount
    on_nonfinite: OnNonfinite
    revision: str | None
    device: str | None
    model_options: Mapping[str, object] | None

    def job(self, output: OutputSettings, layers: object, dtype: DTypeLike | None, device: str | None) -> CaptureJob:
        """The job of a capture: loads model, tokenizer and texts."""
        model = import_function(self.model, "model") if _is_function(self.model) else self.model
        return CaptureJob(
            model_settings(model, layers, dtype, self.revision, device, self.model_options),
            input_settings(
                self.texts,
                _choice_named(self.tokens),
                _tokenizer_named(self.tokenizer),
                self.text,
                self.columns,
                special_tokens=self.special_tokens,
                max_tokens=self.max_tokens,
                truncate=self.truncate,
            ),
            output,
            run_settings(self.batch_tokens, self.memory, self.on_nonfinite),
        )


@dataclass(frozen=True)
class CaptureArguments:
    """The arguments of :func:`capture`.

    Attributes:
        creation: the dataset.
        settings: how its rows are computed.
        computes: model, tokenizer, texts and options, as a capture records them.
    """

    creation: CreateArguments
    settings: CaptureSettings
    computes: Mapping[str, Any]


@dataclass(frozen=True)
class CaptureResult:
    """The result of a task.

    Attributes:
        examples: its examples.
        bytes: bytes of its files.
        units: number of examples.
        empty: number of examples without states.
        problems: the first of them, with reasons.
        nonfinite: rows with NaN or infinite values, counted in each layer.
        nonfinite_examples: the first examples with such rows.
    """

    examples: Span
    bytes: Amount
    units: Amount
    empty: Amount
    problems: tuple[tuple[Amount, AnyText], ...]
    nonfinite: Amount
    nonfinite_examples: tuple[Amount, ...]


# -- names -----------------------------------------------------------------------------------------------------------


def _is_function(name: str) -> bool:
    """Whether a name of a model, a tokenizer or chosen tokens is that of a function; paths are absolute."""
    return _FUNCTION.fullmatch(name) is not None


def _model_name(model: object) -> str:
    if hasattr(model, "named_modules"):
        raise ArgumentError(
            f"model: expected the name of a model, its folder or a function, which other processes can load, found a loaded "
            f"{type(model).__name__}; save it with save_pretrained"
        )
    return _name(model, "model")


def _tokenizer_name(tokenizer: object) -> str | None:
    if hasattr(tokenizer, "all_special_ids") or hasattr(tokenizer, "encode_batch"):
        raise ArgumentError(
            "tokenizer: expected a name, a folder or a function, which other processes can load, found a loaded "
            f"{type(tokenizer).__name__}; save it to a folder"
        )
    return None if tokenizer is None else _name(tokenizer, "tokenizer")


def _name(value: object, what: str) -> str:
    """An absolute path, a name on the hub, or the name of a function."""
    if not isinstance(value, str | os.PathLike):
        return function_name(value, what)
    text = os.fspath(value)
    if not isinstance(value, str) or Path(text).expanduser().exists() or text.startswith(("/", "~", "./", "../")):
        return str(_arguments.local_path(text, what))
    return text


def _tokens_name(tokens: str | int | Sequence[int] | Chooser) -> str | tuple[int, ...]:
    """A word, the name of a function, or positions."""
    if isinstance(tokens, str):
        return tokens
    if callable(tokens):
        return function_name(tokens, "tokens")
    description = choice_of(tokens).description
    return description if isinstance(description, str) else tuple(description)


def _choice_named(tokens: str | tuple[int, ...]) -> object:
    return import_function(tokens, "tokens") if isinstance(tokens, str) and _is_function(tokens) else tokens


def _tokenizer_named(name: str | None) -> object:
    if name is None:
        return None
    return import_function(name, "tokenizer") if _is_function(name) else named_tokenizer(name)


# -- predictions -----------------------------------------------------------------------------------------------------


def _predict(
    arguments: CaptureArguments,
    bounds: Sequence[int],
    borders: NDArray[np.int64] | None,
    rows: NDArray[np.int64],
    read: int,
) -> tuple[Predicted, list[int]]:
    """Returns the predicted size and memory, and the bytes of each task's rows. ``rows``: of each example."""
    creation, count = arguments.creation, len(bounds) - 1
    most = int(rows.max())
    estimates = []
    for first, end in [*itertools.pairwise(bounds), (0, len(rows))]:
        target = target_of(creation, None, end - first, (0, count))
        target.take_tokens(target.tokens or most)
        estimates.append(target.estimate(rows[first:end] if target.ragged else np.full(end - first, target.tokens)))
    *parts, total = estimates
    memory = peak_memory() + arguments.settings.memory
    return predicted_of(creation, bounds, borders, parts, total, read, memory), [size for *_, size in parts]


def _notes(examples: Sequence[ExampleCounts], windows: int, count: int, tasks: int) -> list[str]:
    notes = fewer(
        count, tasks, f"the texts fill {many(windows, 'window')} of 32 batches; smaller batch_tokens= allow more"
    )
    empty = [example for example in examples if example.problem is not None]
    if empty:
        notes.append(
            f"{many(len(empty), 'example')} will be empty: "
            + "; ".join(f"example {example.number}: {example.problem}" for example in empty[:_NAMED])
            + ("; ..." if len(empty) > _NAMED else "")
        )
    return notes


# -- tasks -----------------------------------------------------------------------------------------------------------


class CapturePlan(CreatePlan):
    """A plan of :func:`capture`: tasks are ranges of examples, of about equally many tokens."""

    @property
    def computes(self) -> Mapping[str, object]:
        """Model, tokenizer, texts and options, as a capture records them. Internal."""
        return self.arguments_as(CaptureArguments).computes

    def creation(self, path: Path | None = None) -> CreateArguments:
        """The dataset to create; see :meth:`CreatePlan.creation`."""
        return self.arguments_as(CaptureArguments, path).creation

    def run(self, task: int) -> dict[str, Any]:
        """Runs one task: computes its examples and writes them as a part. Continues after those that a killed run has committed.

        Raises:
            ChangedInputError: the model, the tokenizer or the texts are not those of the plan.
            Others: as :meth:`actshard.plan.Plan.run` and :func:`actshard.capture`, and LockedError if another process is running
                this task.
        """
        return Plan.run(self, task)


class Capturing(Creating[CaptureJob]):
    """Runs the tasks of a capture, and merges their parts."""

    name = "capture"

    def open(self, plan: Planned) -> CaptureJob:
        """The job, with the loaded model. Raises ChangedInputError if model, tokenizer or texts are not those of the plan."""
        arguments = plan.arguments_as(CaptureArguments)
        creation, settings = arguments.creation, arguments.settings
        output = output_settings(
            creation.path, creation.format, pad=creation.pad, shard_bytes=creation.shard_bytes, resume=True
        )
        job = settings.job(output, creation.layers, creation.dtype, settings.device)
        actual = json_values(job.identity())
        for name, expected in arguments.computes.items():
            if actual.get(name) != expected:
                job.close()
                raise ChangedInputError(
                    f"{name}: expected {show(expected)}, as when the plan was made, found {show(actual.get(name))}. Make the plan "
                    "again, or restore the model, the tokenizer and the texts",
                    path=plan.work,
                )
        return job

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> dict[str, object]:
        """Computes the task's examples; returns a :class:`CaptureResult` as JSON values."""
        assert isinstance(plan, CapturePlan)
        job = self.opened(plan)
        job.examples = plan.examples(task)
        writer = TaskWriter(plan, task, tell)
        done = job.fill(writer)
        return writer.result() | {
            "empty": len(done.problems),
            "problems": [[problem.example, problem.reason] for problem in done.problems[:_NAMED]],
            "nonfinite": done.nonfinite,
            "nonfinite_examples": list(done.nonfinite_examples[:_NAMED]),
        }

    def commit(self, plan: Planned, results: Sequence[Result]) -> Path:
        """Merges the parts; returns the dataset's path. Warns of examples without states."""
        path = super().commit(plan, results)
        values = [result.read(CaptureResult) for result in results]
        warn_of_problems(
            path,
            sum(value.units for value in values),
            sum(value.empty for value in values),
            [Problem(number, reason) for value in values for number, reason in value.problems],
            sum(value.nonfinite for value in values),
            [number for value in values for number in value.nonfinite_examples],
        )
        return path
