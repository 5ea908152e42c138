"""A capture from its checked arguments: predicts, or computes and writes, with the model, tokenizer and texts that they name."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from actshard import formats
from actshard.base._arguments import many
from actshard.base.errors import ArgumentError, ArgumentTypeError, ExistsError, warn
from actshard.base.layers import Layer
from actshard.formats.target import Target
from actshard.reading.opening import open_quietly
from actshard.writing import Writer
from actshard.writing.capturing import transformers_models
from actshard.writing.capturing.appending import Appender, Filled
from actshard.writing.capturing.backend import Backend
from actshard.writing.capturing.callables import FunctionStates
from actshard.writing.capturing.choosing import TokenChoice
from actshard.writing.capturing.encoding import Encoder, Encodings, Example
from actshard.writing.capturing.records import CHAT, IDS, MASK, TEXT, Row, TextRecords
from actshard.writing.capturing.result import Captured, Problem
from actshard.writing.capturing.running import (
    PROBLEM,
    CaptureProgress,
    OnNonfinite,
    Run,
    WindowStates,
    check_columns,
    check_text_column,
    columns_of,
)
from actshard.writing.capturing.unfinished import CaptureSample, Notes
from actshard.writing.capturing.windows import (
    BATCHES_OF_A_WINDOW,
    CELL,
    ChosenExample,
    Limits,
    batches,
    choose,
    windows,
)
from actshard.writing.creating import Creation, make_target, open_writer
from actshard.writing.existing import Fitting, complete_at

if TYPE_CHECKING:
    import os

    import torch

    from actshard.writing.capturing.hooks import TorchModel

_WINDOWS_IN_MEMORY = 4
"""Being computed, queued, being appended, and the writer's own blocks."""
_NAMED = 20
"""Examples with NaN or infinite values that a result names."""
_SAMPLED, _SAMPLED_SECONDS = 256, 5.0
"""Examples that an estimate computes, and about how long at most."""


@dataclass(frozen=True)
class ModelSettings:
    """The model and how it is loaded."""

    model: Any
    revision: str | None
    device: torch.device | str | int | None
    options: Mapping[str, object] | None
    layers: tuple[Layer, ...] | None
    dtype: DTypeLike | None


@dataclass(frozen=True)
class InputSettings:
    """The texts and how they are encoded."""

    records: TextRecords
    tokenizer: object
    text: str | None
    columns: Sequence[str] | None
    special_tokens: bool
    most_tokens: int | None
    truncate: bool
    choice: TokenChoice


@dataclass(frozen=True)
class OutputSettings:
    """The dataset: arguments of :func:`actshard.create`."""

    path: str | os.PathLike[str]
    format: str
    metadata: Mapping[str, object]
    options: Mapping[str, object]
    pad: bool
    shard_bytes: int | str | None
    part: tuple[int, int] | None
    resume: bool


@dataclass(frozen=True)
class RunSettings:
    """How the model is run; nothing that changes what is stored, except for rounding."""

    batch_tokens: int | None
    memory: int
    on_nonfinite: OnNonfinite
    progress: Callable[[CaptureProgress], object] | None


class CaptureJob:
    """A capture. Creating it loads the model and reads the texts once; :meth:`run` and :meth:`estimate` compute.

    Attributes:
        examples: numbers of the examples to compute. A plan's task sets its own.
        format: the format of the dataset.
        pad: whether short examples are filled, for formats with a constant number of tokens.
    """

    def __init__(
        self, model: ModelSettings, inputs: InputSettings, output: OutputSettings, running: RunSettings
    ) -> None:
        self._inputs, self._output, self._running = inputs, output, running
        self.format, self.pad = output.format, output.pad
        self._target_class = formats.get(output.format).target()
        self._refuse_finished(model.layers)
        self._summary = inputs.records.summary()
        if self._summary.count is None and (output.resume or output.part is not None):
            raise ArgumentError(
                f"{'resume' if output.resume else 'part'}: expected a list or files as texts, found an iterator, which can be "
                "read once"
            )
        self.examples = self._part_range(output.part)
        source = source_of(model)
        self._encodings = self._configure_encodings(source)
        self._rows: Iterator[Row] = iter(inputs.records)
        self._held: list[Row] = []
        self._first = choose(self._first_example(), inputs.choice)
        first = self._first.example
        self._backend: Backend = (
            FunctionStates(model.model, model.layers, model.dtype, first=first, mean=inputs.choice.has_mean)
            if source is None
            else source.open(model.layers, model.dtype, first=first, mean=inputs.choice.has_mean)
        )
        encoder = self._encodings.encoder
        pad_id = self._backend.pad_id
        self._pad_id = pad_id if pad_id is not None else encoder.pad_id if encoder is not None else 0
        self._batch_tokens = running.batch_tokens or self._backend.batch_tokens

    def _refuse_finished(self, layers: tuple[Layer, ...] | None) -> None:
        """Raises ExistsError if the path is taken, before a model is loaded. The writer looks again."""
        output = self._output
        if output.resume or self._target_class.names_itself:
            return
        try:
            target = make_target(
                Creation(output.path, output.format, layers or [0], 1, part=output.part, options=output.options)
            )
        except ArgumentError:
            return  # of options that depend on layers or a width which are not known yet; or the writer raises it again
        if (dataset_path := complete_at(target)) is not None:
            raise ExistsError(
                "already contains a finished dataset. Pass resume=True (--resume) to accept it if it is the same, or choose "
                "another path.",
                path=dataset_path,
            )

    def _part_range(self, part: tuple[int, int] | None) -> range:
        """Examples of a part. Parts begin with a cell if there are enough examples."""
        count = self._summary.count
        if part is None or count is None:
            return range(count if count is not None else sys.maxsize)
        index, parts = part
        unit = CELL if count >= 2 * CELL * parts else 1
        units = -(-count // unit)
        return range(min(units * index // parts * unit, count), min(units * (index + 1) // parts * unit, count))

    def _configure_encodings(self, source: TorchModel | None) -> Encodings:
        inputs, names = self._inputs, self._summary.names
        key = inputs.records.text_key(inputs.text)
        has_texts = key in self._summary.texts
        unused = {key} if has_texts else {key, MASK}  # ids are stored without padding, so that their mask does not fit
        columns = (
            tuple(name for name in names if name not in unused) if inputs.columns is None else tuple(inputs.columns)
        )
        missing = next((name for name in columns if names and name not in names), None)
        if missing is not None:
            raise ArgumentError(
                f"columns: expected columns of {inputs.records.what}, {', '.join(names[:20])}, found {missing!r:.80}"
            )
        check_columns(columns)
        self._column_types = self._summary.types.of(columns)
        tokenizer = inputs.tokenizer
        if tokenizer is None and has_texts and source is not None and source.name is not None:
            tokenizer = transformers_models.load_tokenizer(source.name, source.revision)
        if tokenizer is None and has_texts:
            raise ArgumentError(
                "tokenizer: expected one for texts, found none. Pass tokenizer=, or lists of token ids as texts"
            )
        positions = None if source is None else source.positions
        if positions is not None and inputs.most_tokens is not None and inputs.most_tokens > positions:
            raise ArgumentError(
                f"max_tokens: expected at most {positions}, the positions that the model has, found {inputs.most_tokens}"
            )
        most = inputs.most_tokens if inputs.most_tokens is not None or source is None else source.most_tokens
        encoder = None if tokenizer is None else Encoder.of(tokenizer)
        encodings = Encodings(encoder, key, columns, inputs.special_tokens, most, inputs.truncate)
        check_text_column(self._text_column(encodings), key, columns)
        return encodings

    def _text_column(self, encodings: Encodings) -> str | None:
        """Name of the stored column of texts; None: the inputs are token ids."""
        if encodings.key == IDS or encodings.encoder is None:
            return None
        target = self._target_class
        name = TEXT if encodings.key == CHAT and TEXT not in encodings.columns else encodings.key
        return (target.text_column or name) if target.finds_by_text else name

    def _first_example(self) -> Example:
        """The first example with chosen tokens. Its rows stay in ``_held``."""
        example: Example | None = None
        problem = "there are no examples"
        for row in self._rows:
            self._held.append(row)
            (example,) = self._encodings.examples([row], len(self._held) - 1)
            chosen = choose(example, self._inputs.choice)
            if len(chosen.positions):
                return example
            problem = f"example {example.number}: {chosen.problem}"
        raise ArgumentError(
            f"texts: expected at least one example with tokens in {self._inputs.records.what}, found none: {problem}"
        )

    # -- the request -----------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, object]:
        """What determines the stored values: it is compared on resume, and kept in the dataset's metadata."""
        inputs, encodings = self._inputs, self._encodings
        encoder = encodings.encoder
        digest = self._summary.digest
        provenance = dict(self._backend.provenance)
        return {
            "model": provenance.pop("model"),
            "layers": list(self._backend.layers),
            **provenance,
            "tokens": inputs.choice.description,
            "tokenizer": None if encoder is None else encoder.name,
            "tokenizer_digest": None if encoder is None else encoder.digest,
            "special_tokens": inputs.special_tokens,
            "max_tokens": encodings.most,
            "truncate": inputs.truncate,
            "text": encodings.key,
            "columns": list(encodings.columns),
            "texts": None if digest is None else f"sha256:{digest}",
        }

    def creation(self) -> Creation:
        """The dataset with all examples; its number of tokens is unknown."""
        output, target = self._output, self._target_class
        arguments = self.identity()
        holds_any = target.holds_metadata and target.metadata_keys is None
        model_field = {} if "model" in target.format_options else {"model": arguments["model"]}
        options = dict(output.options)
        for name in ("model", "revision"):
            if name in target.format_options and arguments.get(name) is not None:
                options.setdefault(name, arguments[name])
        return Creation(
            output.path,
            output.format,
            self._backend.layers,
            self._backend.width,
            str(self._backend.dtype),
            output.metadata if not holds_any else {**model_field, **output.metadata, "capture": arguments},
            shard_bytes=output.shard_bytes,
            options=options,
        )

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Captured:
        """Computes and writes the dataset."""
        began = time.monotonic()
        output = self._output
        total = None if self._summary.count is None else len(self.examples)
        with closing(self):
            creation = self.creation()
            self.refuse_empty(creation)
            creation = replace(
                creation, part=output.part, num_examples=total or None, tokens_per_example=self.rows_per_example()
            )
            writer = open_writer(creation, Fitting(output.pad), resume=output.resume, capture=self.identity())
            result = self.fill(writer)
        warn_of_problems(
            result.path,
            result.examples,
            len(result.problems),
            result.problems,
            result.nonfinite,
            result.nonfinite_examples,
        )
        return replace(result, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Restores the model."""
        self._backend.close()

    def fill(self, writer: Writer) -> Captured:
        """Computes those of :attr:`examples` that a writer lacks, and closes it."""
        began = time.monotonic()
        run = self._prepare_run(None if self._summary.count is None else len(self.examples))
        resumed_at = writer.committed
        notes = Notes(writer.working_folder, self.examples.start + resumed_at)
        try:
            if not writer.complete:
                self._check_model(writer)
                with run, Appender(writer) as appender:
                    self._append_all(run, writer, appender, notes)
                writer.close()
        except BaseException:
            writer.abort()
            raise
        return self._result(writer, run, notes, resumed_at, time.monotonic() - began)

    def refuse_empty(self, creation: Creation) -> None:
        """Raises ArgumentError for an empty example that the format cannot store, before anything is computed.

        Padding alone would make zeros of it: the format needs the column with the reason, too.
        """
        target, inputs = _sized_target(creation, self._summary.count and len(self.examples)), self._inputs
        if target.ragged:
            target.take_tokens(1 if inputs.choice.has_one_row else 2)  # the writer decides by the first window
        is_padded = self._output.pad and target.holds_columns and target.only_columns is None
        if (
            self._summary.count is None
            or is_padded
            or (target.ragged and target.tokens is None and not target.needs_tokens)
        ):
            return
        records = itertools.islice(iter(inputs.records), self.examples.start, self.examples.stop)
        every = windows(records, self._encodings, inputs.choice, Limits(CELL, CELL), self.examples.start)
        empty = next((chosen for window in every for chosen in window if not len(chosen.positions)), None)
        if empty is not None:
            option = "" if target.keeping_all is None else f"options= ({target.keeping_all}), "
            pad = "pad=True, " if target.holds_columns and target.only_columns is None else ""
            rows = "at least one row" if target.needs_tokens else "a constant number of rows"
            raise ArgumentError(
                f"example {empty.example.number} is empty: {empty.problem or 'no token is chosen'}; {self._output.format} stores "
                f"{rows} per example. Leave it out of the texts, or pass {pad}{option}truncate=True (for long examples) or "
                "another format"
            )

    def rows_per_example(self) -> int | None:
        """Rows of every example in a format with a constant number: with ``pad=True`` those of the longest, of all parts.

        Raises ArgumentError without ``pad=True`` if numbers differ, before anything is computed.
        """
        inputs = self._inputs
        if self._target_class.ragged or inputs.choice.has_one_row or self._summary.count is None:
            return None
        every = windows(iter(inputs.records), self._encodings, inputs.choice, Limits(CELL, CELL))
        counts = ((chosen.example.number, len(chosen.positions)) for window in every for chosen in window)
        if self._output.pad:
            return max(count for _, count in counts)
        first, expected = next(counts)
        for number, count in counts:
            if count != expected:
                raise ArgumentError(
                    f"tokens: expected {many(expected, 'row')} for every example, as for example {first}, found {count} for "
                    f"example {number}: {self._output.format} stores a constant number. Pass pad=True, tokens= with one row per "
                    "example, or another format"
                )
        return expected

    def _check_model(self, writer: Writer) -> None:
        """Computes an example again. Raises ArgumentError if its rows are not those with which the dataset began."""
        folder, choice = writer.working_folder, self._inputs.choice
        if folder is None or self._summary.count is None:  # an iterator cannot be resumed
            return
        run = Run(
            self._backend, choice, batch_tokens=self._batch_tokens, pad_id=self._pad_id, on_nonfinite="count", total=None,
            progress=None,
        )  # fmt: skip
        with run:
            states = np.asarray(run.states([self._first]).wait()[0])
        states = states.reshape(len(self._backend.layers), -1, self._backend.width)
        dtypes = {str(self._backend.dtype), str(self._backend.provenance.get("model_dtype") or self._backend.dtype)}
        sample = CaptureSample.of(self._first, self._backend.layers, states, dtypes)
        if writer.committed:
            sample.check(folder)
        else:
            sample.write(folder)

    def _prepare_run(self, total: int | None) -> Run:
        running = self._running
        return Run(
            self._backend,
            self._inputs.choice,
            batch_tokens=self._batch_tokens,
            pad_id=self._pad_id,
            on_nonfinite=running.on_nonfinite,
            first=self.examples.start,
            total=total,
            progress=running.progress,
        )

    def _append_all(self, run: Run, writer: Writer, appender: Appender, notes: Notes) -> None:
        next_example = self.examples.start + writer.committed
        columns = self._columns_function(writer.stores_column)
        for window in self.windows(next_example):
            states = run.states(window)
            skipped = max(next_example - window[0].example.number, 0)
            appender.append(partial(self._filled, run, notes, states, window[skipped:], skipped, columns))

    @staticmethod
    def _filled(
        run: Run,
        notes: Notes,
        states: WindowStates,
        window: Sequence[ChosenExample],
        skipped: int,
        columns: Callable[[Sequence[ChosenExample]], dict[str, object]],
    ) -> Filled:
        """Waits for the states of a window, whose first ``skipped`` examples are committed, and notes its problems."""
        rows = states.wait()
        numbers = [chosen.example.number for chosen in window]
        notes.add(
            {chosen.example.number: chosen.problem for chosen in window if chosen.problem is not None},
            {number: run.counts.nonfinite[number] for number in numbers if number in run.counts.nonfinite},
        )
        return Filled(rows[skipped:], columns(window) or None, states.release)

    def _columns_function(
        self, allowed: Callable[[str], bool]
    ) -> Callable[[Sequence[ChosenExample]], dict[str, object]]:
        return partial(
            columns_of,
            choice=self._inputs.choice,
            names=self._encodings.columns,
            types=self._column_types,
            text=self._text_column(self._encodings),
            allowed=allowed,
        )

    def windows(self, next_example: int) -> Iterator[list[ChosenExample]]:
        """Windows with examples from ``next_example`` on; the first window may contain earlier ones."""
        row_bytes = len(self._backend.layers) * self._backend.width * self._backend.dtype.itemsize
        limits = Limits(
            self._batch_tokens * BATCHES_OF_A_WINDOW, max(self._running.memory // _WINDOWS_IN_MEMORY // row_bytes, 1)
        )
        first = max(next_example // CELL * CELL, self.examples.start)
        if self._summary.count is None:  # an iterator, which is read once
            rows: Iterator[Row] = itertools.chain(self._held, self._rows)
            self._held = []
        else:
            rows = itertools.islice(iter(self._inputs.records), first, self.examples.stop)
        for window in windows(rows, self._encodings, self._inputs.choice, limits, first):
            if window[-1].example.number >= next_example:
                yield window

    def counts(self) -> Iterator[list[ExampleCounts]]:
        """Yields the counts of :attr:`examples`, window by window."""
        row_count = self._inputs.choice.row_count
        for window in self.windows(self.examples.start):
            yield [ExampleCounts(c.example.number, len(c.example), row_count(c.positions), c.problem) for c in window]

    def _result(self, writer: Writer, run: Run, notes: Notes, resumed_at: int, seconds: float) -> Captured:
        backend, counts = self._backend, run.counts
        layers, problems = self._look(writer, notes)
        nonfinite, nonfinite_examples = sum(notes.nonfinite.values()), sorted(notes.nonfinite)[:_NAMED]
        return Captured(
            path=Path(writer.path),
            format=self._output.format,
            layers=layers,
            d_model=backend.width,
            dtype=str(backend.dtype),
            examples=len(writer),
            resumed_at=resumed_at,
            tokens=counts.tokens,
            padding=counts.computed - counts.tokens,
            rows=counts.rows,
            bytes=counts.rows * len(backend.layers) * backend.width * backend.dtype.itemsize,
            files=None,
            seconds=seconds,
            batch_tokens=run.batch_tokens,
            problems=problems,
            nonfinite=nonfinite,
            nonfinite_examples=tuple(nonfinite_examples),
            provenance=self.identity(),
            estimated=False,
        )

    def _look(self, writer: Writer, notes: Notes) -> tuple[tuple[Layer, ...], tuple[Problem, ...]]:
        """Names of layers and problems of the finished dataset, or part, including those of earlier calls."""
        if not len(self.examples):  # a part without examples is no dataset
            return self._backend.layers, ()
        store = open_quietly(writer.path, self._output.format, "auto")
        if PROBLEM not in store.contents.column_names:
            return store.layers, tuple(Problem(number, notes.problems[number]) for number in sorted(notes.problems))
        texts = store.read_columns([PROBLEM])[PROBLEM]
        places = np.flatnonzero(texts.is_valid().to_numpy()).tolist()
        return store.layers, tuple(Problem(self.examples.start + i, str(texts[i].as_py())) for i in places)

    # -- estimating ------------------------------------------------------------------------------------------------

    def estimate(self) -> Captured:
        """Predicts size and duration from all token counts, and the speed of some examples. Writes nothing."""
        with closing(self):
            chosen = list(itertools.chain.from_iterable(self.counts()))
            lengths = np.array([c.tokens for c in chosen], np.int64)
            rows = np.array([c.rows for c in chosen], np.int64)
            creation = self.creation()
            target = _sized_target(creation, len(chosen))
            if not target.ragged:
                target.take_tokens(int(rows.max()))
            _, files, size = target.estimate(np.maximum(rows, 1) if not target.ragged else rows)
            tokens = int(lengths[rows > 0].sum())
            speed = self._measure(len(chosen))
        backend = self._backend
        return Captured(
            path=Path(target.root),
            format=self._output.format,
            layers=tuple(target.reading.values()),
            d_model=backend.width,
            dtype=str(backend.dtype),
            examples=len(chosen),
            resumed_at=0,
            tokens=tokens,
            padding=0,
            rows=int(rows.sum()),
            bytes=int(size),
            files=int(files),
            seconds=tokens / speed if speed else 0.0,
            batch_tokens=self._batch_tokens,
            problems=tuple(Problem(c.number, c.problem) for c in chosen if c.problem is not None),
            nonfinite=0,
            nonfinite_examples=(),
            provenance=self.identity(),
            estimated=True,
        )

    def _measure(self, count: int) -> float:
        """Tokens per second of evenly spaced examples, after a first batch that is not counted; 0 if there are no more."""
        step = max(1, count // _SAMPLED)
        rows = itertools.islice(iter(self._inputs.records), self.examples.start, self.examples.stop, step)
        if self._summary.count is None:
            return 0.0
        numbers = itertools.count(self.examples.start, step)
        examples = [self._encodings.examples([row], number)[0] for row, number in zip(rows, numbers, strict=False)]
        window = [choose(example, self._inputs.choice) for example in examples]
        plans = list(batches(window, self._batch_tokens, pads=self._backend.pads))
        seconds, tokens = 0.0, 0
        with self._prepare_run(None) as run:
            for number, indices in enumerate([plans[len(plans) // 2], *plans] if plans else []):
                before, began = run.counts.tokens, time.monotonic()
                run.states([window[i] for i in indices]).wait()
                if number:
                    seconds += time.monotonic() - began
                    tokens += run.counts.tokens - before
                if seconds > _SAMPLED_SECONDS:
                    break
        return tokens / seconds if seconds else 0.0


def warn_of_problems(
    path: Path,
    total: int,
    empty: int,
    problems: Sequence[Problem],
    nonfinite: int,
    nonfinite_examples: Sequence[int],
) -> None:
    """Warns of ``empty`` examples of a dataset without states, and of rows with NaN or infinite values; names the first ones."""
    if empty:
        warn(
            f"{path}: {many(empty, 'example')} of {total} {'is' if empty == 1 else 'are'} empty: "
            f"{'; '.join(map(str, problems[:3]))}{'; ...' if empty > 3 else ''}",
            code="examples-left-empty",
        )
    if nonfinite:
        warn(
            f"{path}: {many(nonfinite, 'row')} with NaN or infinite values, in the examples "
            f"{', '.join(map(str, nonfinite_examples[:5]))}{', ...' if len(nonfinite_examples) > 5 else ''}",
            code="non-finite-captured",
        )


@dataclass(frozen=True)
class ExampleCounts:
    """Numbers of an example, without its tokens."""

    number: int
    tokens: int
    rows: int
    problem: str | None


def _sized_target(creation: Creation, count: int | None) -> Target:
    return make_target(replace(creation, num_examples=count or None))


def source_of(settings: ModelSettings) -> TorchModel | None:
    """The torch model of a ``model=`` argument; None for a function."""
    model = settings.model
    is_module = hasattr(model, "named_modules") and hasattr(
        model, "forward"
    )  # a TorchModule, without an import of torch
    if isinstance(model, str) or hasattr(model, "__fspath__") or is_module:
        return transformers_models.torch_model(
            model, revision=settings.revision, device=settings.device, options=settings.options
        )
    if not callable(model):
        raise ArgumentTypeError(
            f"model: expected the name of a model, a torch module or a function of (ids, mask), found {type(model).__name__}"
        )
    for name, value in (
        ("revision", settings.revision),
        ("device", settings.device),
        ("model_options", settings.options),
    ):
        if value is not None:
            raise ArgumentError(f"{name}: expected the name of a model with it, found a function")
    return None
