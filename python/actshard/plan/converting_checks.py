"""Checks of plans of conversions that were read from a file, and of their tasks' results."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base._schema import Amount, AnyText, Count, FileName, MismatchError, Rule, one_of, read
from actshard.base.errors import FormatError
from actshard.base.layers import Layer
from actshard.base.request import DigestTexts, Request
from actshard.plan.book import work_folder
from actshard.plan.data import Planned
from actshard.plan.verb import LayoutValue, PlaceText, Span, check_spans
from actshard.writing.converting.planning import OVERFLOW, TOKENS, TargetSettings

_PIECE = 1 << 20
_MOST_EXAMPLES = 1 << 32


def packed(numbers: NDArray[np.int64]) -> str:
    """Encodes integers as text: base64 of zlib of little-endian int64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(numbers, "<i8").tobytes())).decode()


def unpacked(text: str) -> NDArray[np.int64]:
    """Decodes the text of :func:`packed`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").astype(np.int64)


def _count(text: str, most: int) -> int | None:
    """Counts the integers in a packed text in little memory. Returns None if it is invalid or contains more than ``most``."""
    stream = zlib.decompressobj()
    size = 0
    try:
        data = base64.b64decode(text, validate=True)
        while not stream.eof:
            piece = stream.decompress(data, _PIECE)
            data = stream.unconsumed_tail
            size += len(piece)
            if size > 8 * most or (not piece and not data and not stream.eof):
                return None
    except (binascii.Error, zlib.error, ValueError):
        return None
    return None if stream.unused_data or size % 8 else size // 8


_WrittenFormat = Annotated[str, Rule("a format that can be written", lambda name: name in formats.written())]


@dataclass(frozen=True)
class PlannedSettings(TargetSettings):
    """The settings of the target, with the rules for their JSON values."""

    dtype: str | None
    tokens_per_example: Amount | None
    shard_bytes: Count | str | None
    metadata: Mapping[str, object] | None
    options: Mapping[str, object]
    created: Amount | None


@dataclass(frozen=True)
class ConvertArguments:
    """The arguments of :func:`actshard.plan.convert`, and what they mean for the source.

    Attributes:
        layers, columns: their names in the source, and in the result; None: all.
        examples: examples to convert, see :func:`packed`; None: all.
        cast: whether ``dtype`` was passed.
        numbers, fillers: as for :func:`actshard.writing.converting.planning.columns_for`.
        config: the target's settings.
        request: the record of the result.
    """

    src: PlaceText | Annotated[tuple[PlaceText, ...], Rule("at least one source", bool)]
    src_format: str | None
    dst: Path
    format: _WrittenFormat
    layers: tuple[tuple[Layer, Layer], ...] | None
    examples: str | None
    columns: tuple[tuple[AnyText, AnyText], ...] | None
    tokens: Annotated[str, one_of(TOKENS)]
    pad: bool
    truncate: bool
    cast: bool
    overflow: Annotated[str, one_of(OVERFLOW)]
    sizes: PlannedSettings
    config: dict[str, object]
    request: Mapping[str, object]
    losses: tuple[tuple[AnyText, AnyText], ...]
    fillers: tuple[AnyText, ...]
    layout: LayoutValue = None
    numbers: bool | None = None


@dataclass(frozen=True)
class ConvertTask:
    """The examples that a task converts; ``origin``: the first example of the block that contains the first one."""

    examples: Span
    origin: Amount
    state: Mapping[str, object]
    bytes: Amount

    def __post_init__(self) -> None:
        if self.origin > self.examples.first:
            raise MismatchError(f"at most {self.examples.first:,}", self.origin, "origin")


@dataclass(frozen=True)
class LayersTask:
    """The layers that a task converts."""

    layers: Span
    bytes: Amount


class Fragment(NamedTuple):
    """A file below the task's folder that is a part of a file of the result: its first byte there, and its end."""

    name: FileName
    begin: Amount
    end: Amount


@dataclass(frozen=True)
class ConvertResult:
    """The result of a task. ``tokens``: see :mod:`actshard.plan.converting`."""

    examples: Span
    layers: Span | None
    state: Mapping[str, object]
    fragments: tuple[Annotated[Fragment, Rule("a range of bytes", lambda piece: piece.begin <= piece.end)], ...]
    overflows: Amount
    bytes: Amount
    changes: Mapping[str, AnyText]
    digests: DigestTexts
    tokens: object = None


def check_plan(plan: Planned, path: Path) -> None:
    """Raises FormatError if the arguments or tasks are invalid for a conversion; ``path`` is the plan's file."""
    arguments = plan.arguments_as(ConvertArguments, path)
    Request.from_dict(arguments.request, path)
    by_layers = bool(plan.tasks) and "layers" in plan.tasks[0]
    spans = (
        [task.layers for task in plan.tasks_as(LayersTask, path)]
        if by_layers
        else [task.examples for task in plan.tasks_as(ConvertTask, path)]
    )
    end = spans[-1].end if spans else 0
    check_spans(spans, "layers" if by_layers else "examples", end, path)
    if not end:
        raise FormatError("field 'tasks': expected ranges of examples, or of layers", path=path, code="metadata")
    if by_layers and arguments.layers is not None:
        check_spans(spans, "layers", len(arguments.layers), path)
    if arguments.examples is not None:
        count = _count(arguments.examples, _MOST_EXAMPLES if by_layers else end)
        if count is None or (not by_layers and count != end):
            expected = f"{'numbers' if by_layers else f'{end:,} numbers'} of examples, packed"
            raise FormatError(
                MismatchError(expected, arguments.examples, "examples").described("arguments"),
                path=path,
                code="metadata",
            )


def check_work(plan: Planned, path: Path) -> None:
    """Raises FormatError unless the working folder is the one that the arguments determine. Call :func:`check_plan` first."""
    arguments = plan.arguments_as(ConvertArguments)
    hidden = work_folder(arguments.dst, plan.id, dumps=formats.get(arguments.format).target().names_itself)
    if plan.work != hidden:
        raise FormatError(f"field 'work': expected {hidden}, found {plan.work}", path=path, code="metadata")


def check_config(config: Mapping[str, object], settings: Mapping[str, object], work: Path) -> None:
    """Raises FormatError if a plan's target settings lack names, have unknown ones, or values of other types than ``settings``."""
    for name in sorted({*config, *settings}):
        wrong = name not in settings or name not in config
        if not wrong and settings[name] is not None:
            wrong = type(config[name]) is not type(settings[name])
        if wrong:
            raise FormatError(
                f"field 'arguments.config.{name}': expected {settings.get(name, 'nothing')!r:.60}, found "
                f"{config.get(name, 'nothing')!r:.60}; make the plan again",
                path=work,
                code="metadata",
            )


def check_result(value: Mapping[str, object], file: Path) -> None:
    """Raises FormatError for an invalid result of a task; ``file`` contains it."""
    read(ConvertResult, value, file, "value")
