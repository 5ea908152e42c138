"""The arguments, tasks and results of plans of token caches: their names and numbers determine which files are accessed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from actshard.base._arguments import many
from actshard.base._schema import Amount, AnyText, MismatchError, Rule, is_file_name, one_of
from actshard.base.errors import FormatError
from actshard.plan.data import Planned
from actshard.tokens import formats
from actshard.tokens.building import ID_DTYPES, LAYOUTS, is_time
from actshard.tokens.sources import RowProblem
from actshard.tokens.writing import STORAGES

_SHARD = re.compile(r"\d{5,}_[\w-]+")
_ShardName = Annotated[str, Rule("a shard's name", lambda name: _SHARD.fullmatch(name) is not None)]
_Dtypes = Annotated[
    Mapping[str, Annotated[str, one_of((*ID_DTYPES, "float32"))]],
    Rule("names of fields", lambda names: bool(names) and all(map(is_file_name, names))),
]
_Time = Annotated[tuple[object, ...], Rule("a time of 11 values", lambda now: is_time(list(now)))]


class SourceFile(NamedTuple):
    """A file of records, and the name of its shard."""

    path: Path
    shard: _ShardName


@dataclass(frozen=True)
class RowSettings:
    """The options that affect rows; see :meth:`actshard.tokens.building.BuildOptions.of_rows`."""

    dtype: Annotated[str, one_of(ID_DTYPES)] | None
    enforce_eos: bool
    enforce_bos: bool


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer: the path of its files; or its contents, packed, if it was given as an object."""

    name: AnyText
    digest: str
    path: Path | None
    packed: str | None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.packed is None):
            raise MismatchError("a path, or a packed tokenizer", self.packed, "packed")


@dataclass(frozen=True)
class TokenizeArguments:
    """The arguments of :func:`actshard.plan.tokenize`, and what they mean for the sources.

    Attributes:
        sources: the files, which are the first inputs of the plan.
        skip: whether unusable records are skipped.
        fields: the stored fields and their dtypes.
        metadata: the ledger's ``preprocessor_metadata``.
        tells_time: whether rows depend on the time of the build.
        now: the time for chat templates.
    """

    out: Path
    sources: tuple[SourceFile, ...]
    tokenizer: TokenizerRecord | None
    format: Mapping[str, object]
    options: RowSettings
    skip: bool
    layout: Annotated[str, one_of(LAYOUTS)]
    storage: Annotated[str, one_of(STORAGES)]
    keep_shards: bool
    fields: _Dtypes
    metadata: Mapping[str, object]
    tells_time: bool
    now: _Time | None


def _is_piece(piece: tuple[int, ...]) -> bool:
    return len(piece) == 1 or (
        len(piece) in (3, 6) and piece[1] < piece[2] and (len(piece) == 3 or piece[3] < piece[4])
    )


PieceNumbers = Annotated[tuple[Amount, ...], Rule("a piece of a source", _is_piece)]
"""See :func:`actshard.tokens.pieces.as_list`."""


@dataclass(frozen=True)
class TokenizeTask:
    """The pieces of sources that a task reads."""

    bytes: Amount
    pieces: tuple[PieceNumbers, ...]


class PieceCounts(NamedTuple):
    """Numbers of rows of a piece, of elements by field, and of unusable records; and the first of these records."""

    rows: Amount
    elements: tuple[Amount, ...]
    skipped: Amount
    unusable: tuple[RowProblem, ...]


@dataclass(frozen=True)
class TokenizeResult:
    """The result of a task."""

    bytes: Amount
    units: Amount
    tokens: Amount
    pieces: tuple[PieceCounts, ...]


def check_plan(plan: Planned, path: Path) -> None:
    """Raises FormatError if the arguments or tasks are invalid for a token cache; ``path`` is the plan's file."""
    arguments = plan.arguments_as(TokenizeArguments, path)
    formats.as_format(arguments.format)
    sources = arguments.sources
    if not 0 < len(sources) <= len(plan.inputs) or len({source.shard for source in sources}) < len(sources):
        raise FormatError("field 'arguments.sources': expected different files, which are among the inputs", path=path)
    for i, (source, file) in enumerate(zip(sources, plan.inputs, strict=False)):
        if str(source.path) != file.path or type(file.version) is not int or file.size is None:
            raise FormatError(
                f"field 'arguments.sources[{i}]': expected the path of input {i}, a local file", path=path
            )
    by_source: list[list[PieceNumbers]] = [[] for _ in sources]
    for i, task in enumerate(plan.tasks_as(TokenizeTask, path)):
        for piece in task.pieces:
            if piece[0] >= len(sources):
                raise FormatError(
                    f"field 'tasks[{i}].pieces': expected pieces of {many(len(sources), 'source')}, found {list(piece)}",
                    path=path,
                )
            by_source[piece[0]].append(piece)
    for number, pieces in enumerate(by_source):
        if not _is_whole(pieces, plan.inputs[number].size):
            raise FormatError(
                f"field 'tasks': expected pieces of source {number} without holes and overlaps", path=path
            )


def _is_whole(pieces: list[PieceNumbers], size: int | None) -> bool:
    """Whether the pieces cover their source once."""
    pieces.sort(key=lambda piece: piece[1:])
    if [piece[1:] for piece in pieces] == [()]:
        return True
    kinds = {len(piece) for piece in pieces}
    tiles = kinds in ({3}, {6}) and pieces[0][1] == 0 and pieces[-1][2] == size
    joins = tiles and all(a[2] == b[1] and a[4:5] == b[3:4] for a, b in itertools.pairwise(pieces))
    return joins and pieces[0][3:4] in ((), (0,)) and pieces[0][5:] in ((), (0,))
