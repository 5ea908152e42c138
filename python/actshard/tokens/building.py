"""``build_cache``: builds a token cache from files of records.

Each file becomes a shard, a complete cache in the working folder (`placing.py`). With several processes, large files are divided
(`pieces.py`): each part becomes a folder like a shard, and a file's parts are joined by copying their bytes. An interrupted build
continues with its finished shards and parts. At the end the shards are *consolidated* (copied byte for byte to one array per
field) or kept (*sharded*), the ledger is written, and everything is moved into place. Until then nothing opens as a cache.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from actshard.base import _arguments, errors
from actshard.base._arguments import local_path, many, numpy_type, whole
from actshard.base._schema import json_values, read_value
from actshard.base.errors import ArgumentError, ArgumentTypeError, DtypeError, InternalError, LostWorkerError, boundary
from actshard.base.walking import refuse_taken
from actshard.base.work import locked, look, remove, write_json
from actshard.base.work.pool import WorkerPool, processors, threads_of_each
from actshard.tokens import formats, pieces, placing, shards
from actshard.tokens.cache import TokenCache, open_cache
from actshard.tokens.formats import FormatBase, PrebuiltFormat, SupervisedFormat, TextFormat
from actshard.tokens.ledger import CONSOLIDATED, SHARDED, Ledger
from actshard.tokens.processing import Processor, processor_of
from actshard.tokens.recipe import Recipe, digest, local_now, takes_time
from actshard.tokens.shards import (
    Counts,
    Order,
    PartRows,
    RowSetup,
    Task,
    build_shard,
    combine,
    problems_in,
    skipped_by_shard,
)
from actshard.tokens.sources import AnySource, RowProblem, Source, expand
from actshard.tokens.tokenizer import Tokenizer, shared_tokenizer
from actshard.tokens.writing import WRITE_HERE, checked_storage

LAYOUTS = (CONSOLIDATED, SHARDED)
ID_DTYPES = ("int64", "int32", "uint32", "uint16")
_WORTH_PROCESSES = 8 << 20
"""With fewer bytes of sources, starting worker processes takes longer than it saves."""
_PARTS_OF_PROCESS, _WORTH_PART = 8, 2 << 20
"""Number of parts of large files for each process, and bytes of the smallest. Few bytes may take long, and processors differ, so
that with one part each a process would wait for another; and a build that is interrupted loses the parts that it had begun."""


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build.

    Attributes:
        files, files_done: number of sources, and of finished ones.
        rows, tokens: number produced in this run.
        bytes, bytes_total: bytes read and total size of the sources, without those finished in earlier runs.
        skipped: number of unusable records.
        stage: ``"tokenizing"`` or ``"consolidating"``.
    """

    files: int
    files_done: int
    rows: int
    tokens: int
    bytes: int
    bytes_total: int
    skipped: int
    stage: str = "tokenizing"


Progress = BuildProgress
"""The old name of :class:`BuildProgress`, which existing programs use."""
Watch = Callable[[BuildProgress], object]


def build_cache(
    sources: str | os.PathLike[str] | Iterable[object],
    out: str | os.PathLike[str],
    tokenizer: object | None = None,
    format: FormatBase | Mapping[str, object] | str | None = None,
    *,
    layout: str = CONSOLIDATED,
    storage: str = "plain",
    dtype: DTypeLike | None = None,
    enforce_eos: bool = True,
    enforce_bos: bool = True,
    on_error: str = "raise",
    jobs: int | None = None,
    keep_shards: bool = False,
    overwrite: bool = False,
    progress: Watch | None = None,
) -> TokenCache:
    """Builds a token cache from files of records. Levanter opens it like its own.

    An interrupted build resumes file by file and produces the same bytes. A finished cache is opened. Only one process builds at a
    time.

    Args:
        sources: paths and globs of ``.jsonl``, ``.json`` and ``.parquet`` files, plain or ``.gz``, ``.bz2``, ``.xz``, ``.zst``; or
            :class:`RowSource`. Rows are stored in this order.
        out: the folder to create; for Levanter, ``<cache_dir>/<component>/train``.
        tokenizer: see :func:`load_tokenizer`; not needed for the prebuilt format.
        format: a format, its name, or Levanter's ``format:`` block; default: :class:`TextFormat`.
        layout: ``"consolidated"`` (one array per field) or ``"sharded"`` (one per field and file; nothing is copied).
        storage: ``"plain"``: uncompressed values in blosc frames, which this package memory-maps. ``"lz4"``: compressed, as
            Levanter writes them.
        dtype: of token ids: int64 (default for text), int32 (default for other formats), uint32 or uint16. Levanter opens all.
        enforce_eos: append eos to texts.
        enforce_bos: prepend bos to texts.
        on_error: ``"raise"``, or ``"skip"``: unusable records are left out, counted in the ledger and reported by a warning.
        jobs: number of processes; default: one per processor. Uncompressed ``.jsonl`` and ``.parquet`` files of many megabytes are
            divided among them; the bytes of the cache do not depend on it.
        keep_shards: keep the shards of a consolidated cache next to it, as Levanter does.
        overwrite: replace a cache that was built differently. It stays readable until the new one is complete. Only files listed
            in its ledger are removed; other files and caches in the folder are kept.
        progress: called occasionally with :class:`BuildProgress`.

    Returns:
        The opened cache.

    Raises:
        FormatError: a record is unusable; the message names file and line; in a part of a file, the byte at which the
            line begins.
        ExistsError: a cache that was built differently exists (the message gives the difference), or other files are in the way,
            or the path refers to a dataset of activations.
        LockedError: another process is building the cache.
        ChangedInputError: a source changed while it was read.
        LostWorkerError: a process of the build was killed, for example for lack of memory; the next call continues.
        UnfinishedError: tasks of a plan are building a cache there (:func:`actshard.plan.tokenize`).
        MissingFileError, ArgumentError, MissingExtraError: missing sources, invalid options, missing libraries.
    """
    options = BuildOptions(
        layout=layout,
        storage=storage,
        dtype=dtype,
        enforce_eos=enforce_eos,
        enforce_bos=enforce_bos,
        on_error=on_error,
        jobs=jobs,
        keep_shards=keep_shards,
        overwrite=overwrite,
    )
    return Build(sources, out, tokenizer, format, options, progress).run()


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build; see :func:`build_cache`."""

    layout: str = CONSOLIDATED
    storage: str = "plain"
    dtype: DTypeLike | None = None
    enforce_eos: bool = True
    enforce_bos: bool = True
    on_error: str = "raise"
    jobs: int | None = None
    keep_shards: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        _arguments.one_of(self.layout, LAYOUTS, "layout")
        if not isinstance(self.on_error, str) or self.on_error not in ("raise", "skip"):
            raise ArgumentError(f"on_error must be 'raise' or 'skip', not {self.on_error!r}")
        if self.jobs is not None:
            object.__setattr__(self, "jobs", whole(self.jobs, "jobs", 1, wrong_type=ArgumentTypeError))
        for name in ("enforce_eos", "enforce_bos", "keep_shards", "overwrite"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ArgumentTypeError(f"{name}: expected True or False, found {value!r}")
            object.__setattr__(self, name, bool(value))
        checked_storage(self.storage)
        _id_dtype(self.dtype)

    def of_rows(self) -> dict[str, Any]:
        """The options that affect rows, as JSON values."""
        return {"dtype": _id_dtype(self.dtype), "enforce_eos": self.enforce_eos, "enforce_bos": self.enforce_bos}


@dataclass(frozen=True)
class _BuildPart:
    """A source, or a part of a large file, that one process reads.

    Attributes:
        source: the source.
        piece: the part, as of :func:`actshard.tokens.pieces.as_list`.
        task: how to build its rows: the shard of the source; or a folder like it, to be joined.
    """

    source: AnySource
    piece: list[int]
    task: Task

    @property
    def name(self) -> str:
        return self.task.folder.name

    @cached_property
    def records(self) -> AnySource:
        """The part's records."""
        return self.source if len(self.piece) == 1 else pieces.source_of([0, *self.piece[1:]], [self.source])

    def rows(self, ledger: Ledger, unusable: Sequence[RowProblem]) -> PartRows:
        """The rows, according to the ledger of their folder."""
        is_shard, skipped = len(self.piece) == 1, sum(ledger.skipped.values())
        rows, elements = ledger.total_num_rows, ledger.field_counts
        return PartRows(self.task.folder, is_shard, rows, elements, skipped, self.piece, unusable, ledger)

    def order(self) -> str:
        """The order for a worker."""
        assert isinstance(self.source, Source)
        path, numbers = os.fspath(self.source.path), tuple(self.piece[1:])
        return json.dumps(json_values(Order(path, self.source.shard, self.source.version, numbers, self.task)))


def _part_name(source: AnySource, piece: Sequence[int]) -> str:
    """The name of a part's folder. Names of shards have no dots."""
    return source.shard if len(piece) == 1 else f"{source.shard}.{piece[1]}-{piece[2]}"


class Build:
    """A build; :func:`build_cache` runs it. Afterwards ``built`` is False if the cache was already finished."""

    def __init__(
        self,
        sources: str | os.PathLike[str] | Iterable[object],
        out: str | os.PathLike[str],
        tokenizer: object,
        format: FormatBase | Mapping[str, object] | str | None,
        options: BuildOptions,
        progress: Watch | None = None,
    ) -> None:
        self.out = local_path(out, "out", WRITE_HERE)
        self.layout, self.storage = options.layout, options.storage
        self.skip, self.jobs = options.on_error == "skip", options.jobs
        self.keep_shards, self.overwrite = options.keep_shards, options.overwrite
        self.format = formats.as_format(format)
        self.tokenizer: Tokenizer | None = None
        if not isinstance(self.format, PrebuiltFormat):
            if tokenizer is None:
                raise ArgumentError(f"format {self.format.type} needs a tokenizer")
            self.tokenizer = shared_tokenizer(tokenizer)
        self.options = options.of_rows()
        self.process: Processor = processor_of(self.format, self.tokenizer, self.options)
        # One version of each file for the whole build: it is in the ledger, and compared when the file was read.
        self.sources: list[AnySource] = [
            source.at_version() if isinstance(source, Source) else source for source in expand(sources)
        ]
        self._tell = progress
        self.built = False
        self.skipped: dict[str, int] = {}
        self.problems: list[str] = []
        self._counts: dict[str, Counts] = {}
        self._pending_bytes = 0
        self._left: Counter[str] = Counter()
        """Number of parts to build by shard."""
        self._now: tuple[object, ...] | None = None

    @cached_property
    def recipe(self) -> Recipe:
        """What the bytes of the cache depend on."""
        return Recipe(
            self.sources,
            self.format,
            None if self.tokenizer is None else self.tokenizer.digest(),
            self.options,
            self.skip,
            self.layout,
            self.storage,
            self.keep_shards,
            self.process.fields,
            self.process.metadata(),
            self.process.tells_time,
        )

    def _divide(self) -> list[list[int]]:
        """Parts of sources, in order, as of :func:`actshard.tokens.pieces.as_list`. Large files are divided among processes."""
        files = [source for source in self.sources if isinstance(source, Source)]
        sizes = [source.size() for source in files]
        total = sum(sizes)
        count = min(self.jobs or processors(), total // _WORTH_PROCESSES)
        if count <= 1 or len(files) < len(self.sources):
            return [[number] for number in range(len(self.sources))]
        parts = count * min(_PARTS_OF_PROCESS, max(total // count // _WORTH_PART, 1))
        tasks = pieces.divide_files(files, sizes, parts, total // count)
        return sorted(piece for _, task in tasks for piece in task)

    def run(self) -> TokenCache:
        """Builds the cache unless it is finished, and opens it."""
        if self._is_finished():
            self._clean()
        else:
            refuse_taken(self.out)
            self._make()
        self._warn()
        return open_cache(self.out)

    def _make(self) -> None:
        with placing.turn(self.out) as work:
            if not self._is_finished():  # another process may have finished it
                look(self.out).refuse("planned", "staging")
                self._build(work)

    def _clean(self) -> None:
        """Removes the working folder of a build that was killed after its cache was in place."""
        work = self.out / placing.WORK
        if not os.path.lexists(work):
            return
        try:
            lock = locked(work)
        except errors.ActshardError:  # another process is building, or the folder is read-only
            return
        try:
            is_same = placing.read_state(work).get("cache") in (None, digest(self.recipe.whole()))
            if is_same and self._is_finished():
                placing.clear(work)
        finally:
            lock.release()

    def _is_finished(self) -> bool:
        """Whether the requested cache exists. Changes nothing.

        Raises:
            ExistsError: another cache exists, and ``overwrite`` is False.
        """
        ledger = self.recipe.found(self.out, overwrite=self.overwrite)
        if ledger is None:
            return False
        self.skipped = ledger.skipped
        return True

    def _begin(self, work: Path, parts: set[str]) -> tuple[object, ...] | None:
        """Prepares the working folder, which keeps shards and these parts.

        Returns the time for chat templates: when the build was first begun.
        """
        settings, cache = digest(self.recipe.settings), digest(self.recipe.whole())
        previous = placing.read_state(work)
        now = previous.get("now") if previous.get("settings") == settings else None
        if not is_time(now):
            now = local_now()
        state = {"actshard": 1, "settings": settings, "cache": cache, "now": now}
        if state != previous:
            write_json(work / placing.STATE, state)
        placing.keep_only(work, parts | {source.shard for source in self.sources}, placing.STATE)
        return tuple(now) if isinstance(now, list) and takes_time(self.format) else None

    def _parts(self, work: Path, piece_lists: list[list[int]]) -> list[tuple[_BuildPart, Ledger | None]]:
        """The parts to build, and ledgers of finished ones. A file that an earlier run finished as a whole stays whole."""
        parts: list[tuple[_BuildPart, Ledger | None]] = []
        for number, file_pieces in itertools.groupby(piece_lists, key=lambda piece: piece[0]):
            file_parts = [self._part(piece, work) for piece in file_pieces]
            whole_file = self._part([number], work)
            ledger = self._ledger_of(whole_file)
            is_whole = ledger is not None or len(file_parts) == 1
            parts += [(whole_file, ledger)] if is_whole else [(part, self._ledger_of(part)) for part in file_parts]
        return parts

    def _ledger_of(self, part: _BuildPart, *, is_built: bool = False) -> Ledger | None:
        return shards.finished(part.task.folder, part.task.identity, list(self.process.fields), is_built=is_built)

    def _part(self, piece: list[int], work: Path) -> _BuildPart:
        source, numbers = self.sources[piece[0]], piece[1:]
        name = _part_name(source, piece)
        # Unique to this process: a worker of a killed build may still be running.
        staged = work / "staged" / f"{name}.{os.getpid()}"
        task = Task.of_shard(self.recipe, source, work / placing.NEW, staged, self._now)
        if numbers:
            identity, folder = digest([task.identity, *numbers]), work / placing.NEW / name
            task = replace(task, folder=folder, identity=identity, storage="plain", read_soon=True)
        return _BuildPart(source, piece, task)

    def _build(self, work: Path) -> None:
        piece_lists = self._divide()
        with boundary(self.out, "build the cache at"):
            self.recipe.refuse_foreign(self.out)
            self._now = self._begin(work, {_part_name(self.sources[piece[0]], piece) for piece in piece_lists})
        self.built = True
        warn_of_no_eos(self.out, self.format, self.tokenizer, self.options["enforce_eos"])
        parts = self._parts(work, piece_lists)
        pending = [part for part, ledger in parts if ledger is None]
        for part in pending:
            remove(part.task.folder)
        self._pending_bytes = sum(part.records.size() for part in pending)
        self._left = Counter(part.source.shard for part in pending)
        self._build_parts(pending)
        rows: dict[str, list[PartRows]] = {source.shard: [] for source in self.sources}
        for part, finished_ledger in parts:
            ledger = finished_ledger or self._ledger_of(part, is_built=True)
            if ledger is None:
                raise InternalError(f"shard {part.name} is missing after it was built", path=part.task.folder)
            unusable = self._counts[part.name].unusable if part.name in self._counts else ()
            rows[part.source.shard].append(part.rows(ledger, unusable))
        self.problems = problems_in(self.sources, rows)
        self.skipped = skipped_by_shard(rows)
        combine(self.recipe, rows, self.out, work, self._now, lambda: self._report("consolidating"))

    def _build_parts(self, pending: list[_BuildPart]) -> None:
        files = [part for part in pending if isinstance(part.source, Source)]
        jobs = min(self.jobs or processors(), len(files))
        small = self.jobs is None and self._pending_bytes < _WORTH_PROCESSES

        def tell(counts: Counts, name: str) -> None:
            self._counts[name] = counts
            self._report()

        def done(part: _BuildPart) -> None:
            self._left[part.source.shard] -= 1
            self._report()

        if jobs <= 1 or small or len(files) < len(pending):
            for part in pending:
                build_shard(part.records, self.process, part.task, partial(tell, name=part.name))
                done(part)
            return

        def heard(part: _BuildPart, message: Mapping[str, object]) -> bool:
            if "error" in message:
                raise errors.from_plain(dict(message))
            if "done" in message:
                done(part)
                return True
            tell(read_value(Counts, message), part.name)
            return False

        def lost(part: _BuildPart, how: str) -> None:
            raise LostWorkerError(
                f"the process that built shard {part.name} {how}; build the cache again", path=self.out
            )

        setup = self.out / placing.WORK / placing.SETUP  # with a tokenizer it is larger than a pipe's buffer
        write_json(setup, json_values(RowSetup.of(self.format, self.tokenizer, self.options)))
        # Largest first (popped from the end), so that no long task is left for the end.
        waiting = sorted(files, key=lambda part: part.records.size())
        env = {"TOKENIZERS_PARALLELISM": "true" if threads_of_each(jobs) > 1 else "false", "PYTHONWARNINGS": "ignore"}
        WorkerPool(
            "actshard.tokens.shards", str(setup), jobs, waiting, line=_BuildPart.order, heard=heard, lost=lost, env=env
        ).run()

    def _report(self, stage: str = "tokenizing") -> None:
        if self._tell is None:
            return
        counts = self._counts.values()
        self._tell(
            BuildProgress(
                files=len(self.sources),
                files_done=len(self.sources) - sum(left > 0 for left in self._left.values()),
                rows=sum(c.rows for c in counts),
                tokens=sum(c.tokens for c in counts),
                bytes=min(sum(c.bytes for c in counts), self._pending_bytes),  # lines may end after their range
                bytes_total=self._pending_bytes,
                skipped=sum(c.skipped for c in counts),
                stage=stage,
            )
        )

    def _warn(self) -> None:
        warn_of_skipped(self.out, self.skipped, len(self.sources), self.problems)


def warn_of_skipped(out: Path, skipped: Mapping[str, int], files: int, problems: Sequence[str]) -> None:
    """Warns of skipped records, if there are any."""
    if not skipped:
        return
    first = f"; the first: {problems[0]}" if problems else ""
    errors.warn(
        f"{out}: {many(sum(skipped.values()), 'record', 'was', 'were')} skipped, in {len(skipped):,} of "
        f"{many(files, 'file')}{first}",
        code="records-skipped",
    )


def warn_of_no_eos(out: Path, format: formats.RowFormat, tokenizer: Tokenizer | None, enforce_eos: bool) -> None:
    """Warns if rows should contain special tokens and the tokenizer has none, or does not produce them."""
    if tokenizer is None or tokenizer.backend is None:
        return
    if isinstance(format, formats.ChatFormat):
        template = format.chat_template or tokenizer.chat_template or ""
        names = [name for name in ("bos", "eos") if f"{name}_token" in template]
        broken = [
            name for name in names if getattr(tokenizer, f"{name}_id") is not None and not tokenizer.has_special(name)
        ]
        if broken:
            errors.warn(
                f"{out}: the tokenizer encodes its {' and '.join(broken)} token as ordinary text, so conversations are stored "
                "without it; add it to added_tokens of tokenizer.json",
                code="no-eos",
            )
        return
    if not enforce_eos or not isinstance(format, TextFormat | SupervisedFormat) or tokenizer.has_special("eos"):
        return
    why = (
        "has no eos token"
        if tokenizer.eos_id is None
        else f"encodes its eos token {tokenizer.eos_token!r} as ordinary text"
    )
    errors.warn(
        f"{out}: the tokenizer {why}, so documents are stored without one, and windows cannot separate "
        "them; use a folder with a tokenizer_config.json, or load_tokenizer(..., eos_token=); pass enforce_eos=False if "
        "this is intended",
        code="no-eos",
    )


def _id_dtype(dtype: DTypeLike | None) -> str | None:
    if dtype is None:
        return None
    name = numpy_type(dtype, "dtype=").name
    if name not in ID_DTYPES:
        raise DtypeError(f"dtype: token ids are stored as {', '.join(ID_DTYPES)}, not {name}")
    return name


def is_time(value: object) -> bool:
    """Whether a value is a valid argument of ``time.struct_time``."""
    try:
        return isinstance(value, list) and len(value) == 11 and bool(time.strftime("%c", time.struct_time(value)))
    except (TypeError, ValueError, OverflowError):
        return False
