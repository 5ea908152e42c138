"""Plans of token caches: tasks tokenize files, groups of files and ranges of large files; the commit combines their rows.

.. code-block:: text

    OUT/.actshard/plan-XXXXXXXX/tasks/00017/rows/00000/...         rows of consecutive pieces, one array per field
    OUT/.actshard/plan-XXXXXXXX/tasks/00017/shards/00003_a_jsonl/  a finished shard (sharded layout, and keep_shards)
    OUT/.actshard-build/                                           the commit's working folder, as for ``build_cache``

If one task read a whole file, its shard is renamed. Rows of a file that several tasks read, and all rows of a consolidated cache,
are copied as stored bytes. The result is byte-identical to that of ``build_cache``.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import MAX_BYTES
from actshard.base._schema import Amount, AnyText, MismatchError, Rule, is_file_name, json_values, one_of
from actshard.base.errors import (
    ArgumentError,
    ChangedInputError,
    ExistsError,
    FormatError,
    MissingExtraError,
    boundary,
)
from actshard.base.location import Location
from actshard.base.work import FOLDER, make_folder, remove
from actshard.plan.book import work_folder
from actshard.plan.data import Planned, Predicted, fewer, identity
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, Result, Verb
from actshard.reading.finding import refuse_dataset
from actshard.reading.inputs import Input, changed
from actshard.tokens import estimating, formats, pieces, placing
from actshard.tokens.building import ID_DTYPES, LAYOUTS, BuildOptions, is_time, warn_of_no_eos, warn_of_skipped
from actshard.tokens.cache import TokenCache, open_cache
from actshard.tokens.formats import FormatBase, PrebuiltFormat
from actshard.tokens.ledger import CONSOLIDATED
from actshard.tokens.processing import Processor, processor_of
from actshard.tokens.recipe import Recipe, local_now, takes_time
from actshard.tokens.shards import (
    Counts,
    PartRows,
    Task,
    build_shard,
    combine,
    problems_in,
    skipped_by_shard,
    write_rows,
)
from actshard.tokens.sources import RowProblem, Source, expand
from actshard.tokens.tokenizer import FILES, PASSTHROUGH, Tokenizer, shared_tokenizer
from actshard.tokens.writing import STORAGES, WRITE_HERE, FieldWriters

# The arguments, tasks and results of plans of token caches: their names and numbers determine which files are accessed.


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
    for number, source_pieces in enumerate(by_source):
        if not _is_whole(source_pieces, plan.inputs[number].size):
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


ROWS, SHARDS, STAGED = "rows", "shards", "staged"
_REMEDY = "remove it, or choose another folder"
_PIECE = 1 << 20
"""Parquet files up to this number of bytes are not divided."""


def tokenize(
    sources: str | os.PathLike[str] | Iterable[object],
    out: str | os.PathLike[str],
    tokenizer: object = None,
    format: FormatBase | Mapping[str, object] | str | None = None,
    *,
    tasks: int = 64,
    layout: str = CONSOLIDATED,
    storage: str = "plain",
    dtype: DTypeLike | None = None,
    enforce_eos: bool = True,
    enforce_bos: bool = True,
    on_error: str = "raise",
    keep_shards: bool = False,
    work: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans a token cache. The result is byte-identical to that of :func:`actshard.tokens.build_cache`.

    A task reads whole files, or a part of a large file: a range of bytes of an uncompressed ``.jsonl`` file, or row groups of a
    Parquet file. Other files are not divided. Writes nothing.

    Arguments are as for ``build_cache``, except as described here.

    Args:
        sources: paths and globs, which all machines must share.
        out: the folder to create, which all machines must share.
        tokenizer: a path, which all machines must share; or an object, which is stored in the plan.
        format: the format of the records.
        tasks: maximum number of tasks. There are fewer if the files cannot be divided further; see ``plan.notes``.
        layout: ``"sharded"`` makes the commit fastest: shards of files that one task read are renamed, not copied.
        storage: ``"plain"`` or ``"lz4"``.
        dtype: of token ids.
        enforce_eos: append eos to texts.
        enforce_bos: prepend bos to texts.
        on_error: ``"raise"`` or ``"skip"``.
        keep_shards: keep the shards of a consolidated cache.
        work: the working folder, on the file system of ``out``; default: a hidden folder in it.

    Raises:
        Errors of ``build_cache``, before anything is written.
        ArgumentError: a :class:`~actshard.tokens.RowSource`, which tasks in other processes cannot read.
        ExistsError: the cache exists, or the folder is a dataset of activations.
    """
    tasks = _arguments.whole(tasks, "tasks", 1)
    options = BuildOptions(
        layout=layout,
        storage=storage,
        dtype=dtype,
        enforce_eos=enforce_eos,
        enforce_bos=enforce_bos,
        on_error=on_error,
        keep_shards=keep_shards,
    )
    root = _arguments.local_path(out, "out", WRITE_HERE)
    refuse_dataset(root)
    work_path = None if work is None else _arguments.local_path(work, "work", WRITE_HERE)
    with boundary(root, "plan a token cache at"):
        files = [source for source in expand(sources) if isinstance(source, Source)]
        if not files:
            raise ArgumentError(
                "sources: expected files, because tasks in other processes read them, found RowSources; write their records to "
                "files first, or use tokens.build_cache"
            )
        form = formats.as_format(format)
        travels = None if isinstance(form, PrebuiltFormat) else _Travelling.of(tokenizer, form.type)
        return _make_plan(files, root, travels, form, options, tasks, work_path)


def _make_plan(
    sources: list[Source],
    root: Path,
    travels: _Travelling | None,
    form: formats.RowFormat,
    options: BuildOptions,
    tasks: int,
    work: Path | None,
) -> Plan:
    tokenizer = None if travels is None else travels.tokenizer
    rows = options.of_rows()
    process = processor_of(form, tokenizer, rows)
    warn_of_no_eos(root, form, tokenizer, options.enforce_eos)
    files = tuple(SourceFile(_arguments.local_path(source.path, "sources"), source.shard) for source in sources)
    for file in files:
        Location.at(file.path).regular("plan to read")  # not a pipe, which can be read only once
    inputs = tuple(Input.at(Location.at(file.path)) for file in files)
    now = _now(process, form, inputs)
    arguments = TokenizeArguments(
        root,
        files,
        None if travels is None else travels.record(),
        formats.as_dict(form),
        RowSettings(**rows),
        options.on_error == "skip",
        options.layout,
        options.storage,
        options.keep_shards,
        {name: kind.name for name, kind in process.fields.items()},
        process.metadata(),
        process.tells_time,
        None if now is None else tuple(now),
    )
    recipe = _recipe(arguments, inputs)
    if recipe.found(root, remedy=_REMEDY) is not None:
        raise ExistsError(f"already contains this cache, finished; {_REMEDY}", path=root)
    recipe.refuse_foreign(root)
    warn_of_no_eos(root, form, tokenizer, options.enforce_eos)
    total = sum(input_file.size or 0 for input_file in inputs)
    parts = pieces.divide_files(
        sources, [input_file.size or 0 for input_file in inputs], min(tasks, max(total, 1)), max(_PIECE, total // tasks)
    )
    plan_tasks = [TokenizeTask(size, tuple(map(tuple, task))) for size, task in parts]
    notes = fewer(len(plan_tasks), tasks, "compressed files and row groups cannot be divided")
    if travels is not None:
        inputs += travels.inputs()
    name = identity("tokenize", arguments, inputs, plan_tasks)
    work_path = work or work_folder(root, name)
    predicted = _predict(recipe, tokenizer, now, plan_tasks)
    return Plan(
        "tokenize", json_values(arguments), inputs, tuple(json_values(plan_tasks)), predicted, work_path, tuple(notes)
    )


def _predict(
    recipe: Recipe, tokenizer: Tokenizer | None, now: list[object] | None, tasks: Sequence[TokenizeTask]
) -> Predicted:
    """Predicts size, memory and disk space. Numbers of rows and tokens are estimated from a sample of the records."""
    largest = max(task.bytes for task in tasks)
    copies = any(not _is_shard(recipe, piece) for task in tasks for piece in task.pieces)
    sample = estimating.tokenized(recipe, tokenizer, now)
    files = [source for source in recipe.sources if isinstance(source, Source)]
    counts = {source.shard: sample.counts(source) for source in files}
    rows = {shard: n for shard, (n, _) in counts.items()}
    elements = {shard: n for shard, (_, n) in counts.items()}
    size, inodes = sample.cache_size(recipe, rows, elements)
    read = sum(source.size() for source in files)
    field_bytes = {
        name: sum(n.get(name, 0) for n in elements.values()) * kind.itemsize for name, kind in recipe.fields.items()
    }
    # A task buffers more rows than the sample did, up to the writers' limit.
    task_bytes = [n * largest // max(read, 1) for n in field_bytes.values()]
    extra_memory = sum(
        min(n, estimating.HELD) - min(n, m, estimating.HELD)
        for n, m in zip(task_bytes, sample.element_bytes, strict=True)
    )
    copied = sum(field_bytes.values()) + 8 * len(field_bytes) * sum(rows.values())
    return Predicted(
        size,
        inodes,
        read,
        sample.memory + extra_memory,
        copied if copies else 0,
        not sample.rates and recipe.storage == "plain",
    )


def _now(process: Processor, form: formats.RowFormat, inputs: Sequence[Input]) -> list[object] | None:
    """The time for chat templates. If only records' own templates may use it, it is the time of the newest source."""
    if process.tells_time:
        return local_now()
    if not takes_time(form):
        return None
    newest = max(int(input_file.version or 0) for input_file in inputs) // 1_000_000_000
    return [*time.gmtime(newest), "UTC", 0]


def _recipe(arguments: TokenizeArguments, inputs: Sequence[Input]) -> Recipe:
    return Recipe(
        [
            Source(file.path, file.shard, (input_file.size or 0, int(input_file.version or 0)))
            for file, input_file in zip(arguments.sources, inputs, strict=False)
        ],
        formats.as_format(arguments.format),
        None if arguments.tokenizer is None else arguments.tokenizer.digest,
        vars(arguments.options),
        arguments.skip,
        arguments.layout,
        arguments.storage,
        arguments.keep_shards,
        {name: np.dtype(kind) for name, kind in arguments.fields.items()},
        arguments.metadata,
        arguments.tells_time,
    )


# -- the tokenizer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Travelling:
    """A tokenizer as it is stored in a plan: the path of its files; or its contents, if it was given as an object.

    Attributes:
        tokenizer: the tokenizer.
        path: its folder or file; None if it was given as an object.
    """

    tokenizer: Tokenizer
    path: Path | None

    @classmethod
    def of(cls, tokenizer: object, type: str) -> _Travelling:
        if tokenizer is None:
            raise ArgumentError(f"format {type} needs a tokenizer")
        by_path = isinstance(tokenizer, str | os.PathLike) and tokenizer != PASSTHROUGH
        return cls(shared_tokenizer(tokenizer), _arguments.local_path(tokenizer, "tokenizer") if by_path else None)

    def record(self) -> TokenizerRecord:
        text = None if self.path is not None else json.dumps(self.tokenizer.as_dict(), sort_keys=True)
        packed = None if text is None else base64.b64encode(zlib.compress(text.encode())).decode()
        return TokenizerRecord(self.tokenizer.name, self.tokenizer.digest(), self.path, packed)

    def inputs(self) -> tuple[Input, ...]:
        if self.path is None:
            return ()
        folder = Location.at(self.path)
        if folder.kind() != "folder":
            return tuple(Input.at(file) for file in (folder, *(folder.parent / name for name in FILES[1:])))
        return tuple(Input.at(folder / name) for name in FILES)


def _tokenizer(record: TokenizerRecord | None) -> Tokenizer | None:
    """Loads the tokenizer of a plan's arguments.

    Raises:
        ChangedInputError: its files changed.
    """
    if record is None:
        return None
    tokenizer = _unpacked(record.packed or "") if record.path is None else shared_tokenizer(record.path)
    if (digest := tokenizer.digest()) != record.digest:
        raise ChangedInputError(
            f"expected the tokenizer with digest {record.digest[:12]}, as when the plan was made, found {digest[:12]}: "
            "it was changed, or this machine has another version of the tokenizers library. Make the plan again.",
            path=record.path,
        )
    return replace(tokenizer, name=record.name)


@lru_cache(maxsize=1)
def _unpacked(text: str) -> Tokenizer:
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        return Tokenizer.from_dict(json.loads(data))
    except MissingExtraError:
        raise
    except Exception as error:  # the tokenizers library raises Exception
        raise FormatError(f"field 'arguments.tokenizer.packed': expected a tokenizer: {str(error)[:200]}") from error


# -- tasks ---------------------------------------------------------------------------------------------------------


class Tokenizing(Verb[Recipe]):
    """Runs the tasks of a token cache."""

    name = "tokenize"

    def open(self, plan: Planned) -> Recipe:
        """The recipe of the cache."""
        return _recipe(plan.arguments_as(TokenizeArguments), plan.inputs)

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> TokenizeResult:
        """Tokenizes the pieces of a task; see :meth:`Verb.run`."""
        recipe, part, arguments = (
            self.opened(plan),
            plan.tasks_as(TokenizeTask)[task],
            plan.arguments_as(TokenizeArguments),
        )
        task_inputs = [plan.inputs[i] for i in sorted({piece[0] for piece in part.pieces})]
        _check(task_inputs)
        process = processor_of(recipe.format, _tokenizer(arguments.tokenizer), vars(arguments.options))
        process.now = None if arguments.now is None else time.struct_time(arguments.now)
        counts_by_piece: dict[int, Counts] = {}
        before = 0
        for number, run in enumerate(_runs(plan, recipe, task)):
            sources = [pieces.source_of(part.pieces[i], recipe.sources) for i in run]

            def report(counts: Counts, before: int = before) -> None:
                tell(min(before + counts.bytes, part.bytes), part.bytes)

            if _is_shard(recipe, part.pieces[run[0]]):
                make_folder(folder / SHARDS)
                staged = folder / STAGED / sources[0].shard
                shard_task = Task.of_shard(recipe, sources[0], folder / SHARDS, staged, arguments.now)
                counts_by_piece[run[0]] = build_shard(sources[0], process, shard_task, report)
                before += sources[0].size()
                continue
            writers = FieldWriters(folder / ROWS / f"{number:05}", recipe.fields, "plain", read_soon=True)
            for i, source in zip(run, sources, strict=True):
                counts_by_piece[i] = write_rows(source, process, writers, skip=recipe.skip, tell=report)
                before += source.size()
            writers.finish()
        remove(folder / STAGED)
        counts = [counts_by_piece[i] for i in range(len(counts_by_piece))]
        return TokenizeResult(
            part.bytes,
            sum(piece_counts.rows for piece_counts in counts),
            sum(piece_counts.tokens for piece_counts in counts),
            tuple(_piece_counts(piece_counts, recipe) for piece_counts in counts),
        )

    def part(self, plan: Planned, limit: int) -> Mapping[str, object] | None:
        """The beginning of a range of lines, or a small task. Tokenizing is slow, so a quarter of the limit is enough."""
        limit //= 4
        for task in plan.tasks:
            piece = task["pieces"][0]
            if len(piece) == 3:
                end = min(piece[2], piece[1] + limit)
                return {**task, "pieces": [[piece[0], piece[1], end]], "bytes": end - piece[1]}
        return super().part(plan, limit)

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Checks arguments and tasks of a plan from a file; see :meth:`Verb.check_plan`."""
        check_plan(plan, path)

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Checks that each task counted the rows of all its pieces; see :meth:`Verb.check`."""
        fields = len(plan.arguments_as(TokenizeArguments).fields)
        for result in results:
            counts, task_pieces = result.read(TokenizeResult).pieces, plan.tasks_as(TokenizeTask)[result.task].pieces
            if len(counts) != len(task_pieces) or any(len(piece.elements) != fields for piece in counts):
                raise result.wrong("pieces", f"{many(len(task_pieces), 'piece')} with {many(fields, 'field')}", counts)

    # -- the commit ------------------------------------------------------------------------------------------------

    def commit(self, plan: Planned, results: Sequence[Result]) -> TokenCache:
        """Combines the rows of all tasks; see :meth:`Verb.commit`."""
        recipe, arguments = self.opened(plan), plan.arguments_as(TokenizeArguments)
        out, parts = arguments.out, _rows_by_shard(plan, recipe, results)
        with placing.turn(out) as work:
            if recipe.found(out, remedy=_REMEDY) is None:
                recipe.refuse_foreign(out)
                placing.keep_only(work, set(recipe.kept))
                combine(recipe, parts, out, work, arguments.now)
        warn_of_skipped(out, skipped_by_shard(parts), len(parts), problems_in(recipe.sources, parts))
        return open_cache(out)

    def committed(self, plan: Planned) -> TokenCache | None:
        """The cache, if it is finished."""
        out = plan.arguments_as(TokenizeArguments).out
        try:
            ledger = self.opened(plan).found(out)
        except ExistsError:  # the folder contains another cache
            return None
        return None if ledger is None else open_cache(out)

    def after(self, plan: Planned) -> None:
        """Removes the folder of working folders if it is empty."""
        try:
            (plan.arguments_as(TokenizeArguments).out / FOLDER).rmdir()
        except OSError:
            return


def _check(inputs: Sequence[Input]) -> None:
    if (wrong := changed(inputs)) is not None:
        raise ChangedInputError(f"{wrong[1]} Make the plan again.", path=wrong[0])


def _is_shard(recipe: Recipe, piece: Sequence[int]) -> bool:
    """Whether a piece is a whole file whose shard the finished cache contains."""
    return len(piece) == 1 and bool(recipe.kept)


def _runs(plan: Planned, recipe: Recipe, task: int) -> list[list[int]]:
    """Groups of the task's pieces, by number, whose rows are written together: adjoining pieces, or single ones for shards."""
    task_pieces = plan.tasks_as(TokenizeTask)[task].pieces
    if recipe.kept:
        return [[i] for i in range(len(task_pieces))]
    return pieces.adjoining(task_pieces, [input_file.size or 0 for input_file in plan.inputs])


def _piece_counts(counts: Counts, recipe: Recipe) -> PieceCounts:
    elements = tuple(counts.elements.get(name, 0) for name in recipe.fields)
    return PieceCounts(counts.rows, elements, counts.skipped, counts.unusable)


def _rows_by_shard(plan: Planned, recipe: Recipe, results: Sequence[Result]) -> dict[str, list[PartRows]]:
    """The rows that tasks made from the pieces of each source, in order."""
    parts: dict[str, list[PartRows]] = {source.shard: [] for source in recipe.sources}
    for result in results:
        folders = {
            i: result.folder / ROWS / f"{number:05}"
            for number, run in enumerate(_runs(plan, recipe, result.task))
            for i in run
        }
        task_pieces = plan.tasks_as(TokenizeTask)[result.task].pieces
        for i, (piece, counts) in enumerate(zip(task_pieces, result.read(TokenizeResult).pieces, strict=True)):
            shard = recipe.sources[piece[0]].shard
            is_shard = _is_shard(recipe, piece)
            folder = result.folder / SHARDS / shard if is_shard else folders[i]
            elements = dict(zip(recipe.fields, counts.elements, strict=True))
            parts[shard].append(
                PartRows(folder, is_shard, counts.rows, elements, counts.skipped, piece, counts.unusable)
            )
    for shard_parts in parts.values():
        shard_parts.sort(key=lambda part: tuple(part.piece[1:2]))
    return parts
