"""``build_cache``: from files of records to a token cache.

Each file becomes a shard, a cache of its own, in the working folder (`placing.py`). An interrupted build continues
with the shards it has. In the end the shards are put together (*consolidated*: one array per field, by copying bytes) or stay
what they are (*sharded*), the ledger is written, and all of it is put in its place. Nothing is a cache before that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import actshard._native as _native
from actshard import errors
from actshard._arguments import local_path, numpy_type, whole
from actshard.errors import ArgumentError, ArgumentTypeError, DtypeError, ExistsError, InternalError, boundary
from actshard.tokens import formats, placing, shards
from actshard.tokens import ledger as ledgers
from actshard.tokens.cache import TokenCache, open_cache
from actshard.tokens.formats import ChatFormat, FormatBase, PrebuiltFormat, SupervisedFormat, TextFormat
from actshard.tokens.ledger import CONSOLIDATED, OURS, SHARDED, Ledger
from actshard.tokens.processing import ChatProcessor, Processor, processor
from actshard.tokens.shards import Counts, Task, build_shard
from actshard.tokens.sources import AnySource, Source, expand
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer
from actshard.tokens.workers import Workers
from actshard.tokens.writing import FieldWriters, checked_storage
from actshard.work import locked, make_folder, remove, sync_folders, sync_tree, write_json

LAYOUTS = (CONSOLIDATED, SHARDED)
ID_DTYPES = ("int64", "int32", "uint32", "uint16")
_WORTH_PROCESSES = 8 << 20
"""Bytes of sources below which starting interpreters costs more than it gives."""


@dataclass(frozen=True)
class Progress:
    """How far a build is.

    Attributes:
        files, files_done: sources, and those that are finished.
        rows, tokens: made so far, in this run.
        bytes, bytes_total: read of the sources, and their size; of those not finished before.
        skipped: records that could not be used.
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


Watch = Callable[[Progress], object]


def build_cache(
    sources: str | os.PathLike[str] | Iterable[Any],
    out: str | os.PathLike[str],
    tokenizer: Any = None,
    format: FormatBase | Mapping[str, Any] | str | None = None,
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
    """Makes a token cache of files of records; Levanter opens it, and takes it for one of its own.

    A build that was interrupted goes on where it was, file by file, and ends in the same bytes. One that is finished is
    opened. Only one process builds at a time.

    Args:
        sources: paths and globs of ``.jsonl``, ``.json`` and ``.parquet`` files, plain or ``.gz``, ``.bz2``, ``.xz``, ``.zst``; or
            :class:`RowSource`. Their order is that of the rows.
        out: the folder to make: ``<cache_dir>/<component>/train``, for Levanter.
        tokenizer: see :func:`load_tokenizer`; prebuilt needs none.
        format: :class:`TextFormat` if not given; or its name, or Levanter's ``format:`` block.
        layout: ``"consolidated"`` (one array per field) or ``"sharded"`` (one per field and file; nothing is copied).
        storage: ``"plain"``: numbers lie in the files as they are, in frames that c-blosc reads too: this package maps them.
            ``"lz4"``: as Levanter compresses them.
        dtype: of token ids: int64 (text, if not given), int32 (the other formats), uint32 or uint16. Levanter opens all.
        enforce_eos: False leaves eos out of texts.
        enforce_bos: False leaves bos out of texts.
        on_error: ``"raise"``, or ``"skip"``: records that cannot be used are left out, counted in the ledger and warned of.
        jobs: processes; as many as processors and files if not given.
        keep_shards: leave the shards of a consolidated cache beside it, as Levanter does.
        overwrite: replace a cache that was built otherwise. It stays readable until the new one is whole. Only what its ledger
            names is removed: other files and caches in the folder stay.
        progress: called with :class:`Progress` now and then.

    Returns:
        The cache, open.

    Raises:
        FormatError: a record that cannot be used; the message names file and line.
        ExistsError: a cache that was built otherwise is there; the message says how it differs. Or other files stand where
            the cache's would be.
        LockedError: another process is building it.
        MissingFileError, ArgumentError, MissingExtraError: sources, options or libraries that are not there.
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
    """How to build; see :func:`build_cache`."""

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
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ArgumentError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if not isinstance(self.on_error, str) or self.on_error not in ("raise", "skip"):
            raise ArgumentError(f"on_error must be 'raise' or 'skip', not {self.on_error!r}")
        if self.jobs is not None:
            object.__setattr__(self, "jobs", whole(self.jobs, "jobs", 1, wrong_type=ArgumentTypeError))
        for name in ("enforce_eos", "enforce_bos", "keep_shards", "overwrite"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ArgumentTypeError(f"{name}: expected true or false, found {value!r}")
            object.__setattr__(self, name, bool(value))
        checked_storage(self.storage)
        _id_dtype(self.dtype)


class Build:
    """One build; :func:`build_cache` runs it. ``built`` tells afterwards whether anything was to do."""

    def __init__(
        self,
        sources: str | os.PathLike[str] | Iterable[Any],
        out: str | os.PathLike[str],
        tokenizer: Any,
        format: FormatBase | Mapping[str, Any] | str | None,
        options: BuildOptions,
        progress: Watch | None = None,
    ) -> None:
        self.out = local_path(out, "out")
        self.layout, self.storage = options.layout, options.storage
        self.skip, self.jobs = options.on_error == "skip", options.jobs
        self.keep_shards, self.overwrite = options.keep_shards, options.overwrite
        self.format = formats.as_format(format)
        self.tokenizer: Tokenizer | None = None
        if not isinstance(self.format, PrebuiltFormat):
            if tokenizer is None:
                raise ArgumentError(f"format {self.format.type} needs a tokenizer")
            self.tokenizer = load_tokenizer(tokenizer)
        eos, bos = options.enforce_eos, options.enforce_bos
        self.options: dict[str, Any] = {"dtype": _id_dtype(options.dtype), "enforce_eos": eos, "enforce_bos": bos}
        made = None if self.options["dtype"] is None else np.dtype(self.options["dtype"])
        self.process: Processor = processor(self.format, self.tokenizer, made, enforce_eos=eos, enforce_bos=bos)
        self.sources = expand(sources)
        self._tell = progress
        self.built = False
        self.skipped: dict[str, int] = {}
        self.problems: list[str] = []
        self._counts: dict[str, Counts] = {}
        self._done: dict[str, Ledger] = {}
        self._pending_bytes = 0
        self._files_done = 0
        self._now: tuple[Any, ...] | None = None

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """All that decides which rows come out of a record; a tokenizer is some megabytes of it."""
        return {
            "format": formats.as_dict(self.format),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.digest(),
            **self.options,
            "skip": self.skip,
        }

    def _identity(self, source: AnySource) -> str:
        made = {"settings": self._settings, "source": source.identity(), "storage": self._shard_storage}
        return _digest(made | {"now": self._now} if self._tells_time else made)

    @property
    def _shard_storage(self) -> str:
        # Shards that are put together are copied as bytes; what is compressed in the end is compressed once.
        return self.storage if self.layout == SHARDED else "plain"

    @property
    def _copies(self) -> bool:
        """Whether shards are read again when all are there; an only one is linked."""
        return self.layout == CONSOLIDATED and (len(self.sources) > 1 or self.storage != "plain")

    def _whole_identity(self) -> dict[str, Any]:
        """What a finished cache says it is."""
        return {
            "settings": _digest(self._settings),
            "sources": _digest([source.identity() for source in self.sources]),
            "layout": self.layout,
            "storage": self.storage,
        }

    def run(self) -> TokenCache:
        """Builds what is not there."""
        if self._is_finished():
            self._clean()
        else:
            self._make()
        self._warn()
        return open_cache(self.out)

    def _make(self) -> None:
        work = self.out / placing.WORK
        lock = locked(work)
        try:
            placing.recover(self.out, work)
            if not self._is_finished():  # another process may have been faster
                self._build(work)
            placing.clear(work)
        finally:
            placing.clear_if_idle(work)
            lock.release()

    def _clean(self) -> None:
        """Removes what a build of this same cache left that was killed when the cache was there already."""
        work = self.out / placing.WORK
        if not os.path.lexists(work):
            return
        try:
            lock = locked(work)
        except errors.ActshardError:  # somebody is at work, or this is not ours to write
            return
        try:
            mine = placing.read_state(work).get("cache") in (None, _digest(self._whole_identity()))
            if mine and self._is_finished():
                placing.clear(work)
        finally:
            lock.release()

    def _is_finished(self) -> bool:
        """Whether the cache is there. Nothing is changed.

        Raises:
            ExistsError: another one is there, and is not to be replaced.
        """
        if not os.path.lexists(self.out / ledgers.NAME):
            return False
        try:
            ledger = ledgers.read(self.out)
        except errors.ActshardError as error:
            if self.overwrite:
                return False
            raise ExistsError(
                f"a cache is here that cannot be read ({error.detail}); overwrite=True replaces it", path=self.out
            ) from error
        own = ledger.extra.get(OURS)
        differs = self._difference(ledger, own if isinstance(own, dict) else None)
        if differs is None:
            skipped = own.get("skipped", {}) if isinstance(own, dict) else {}
            self.skipped = {str(k): int(v) for k, v in skipped.items()} if isinstance(skipped, dict) else {}
            return True
        if not self.overwrite:
            raise ExistsError(f"a finished cache is here that {differs}; overwrite=True replaces it", path=self.out)
        return False

    def _difference(self, ledger: Ledger, own: dict[str, Any] | None) -> str | None:
        """How a finished cache differs from what is to be built."""
        expected = self.process.metadata()
        found = ledger.preprocessor
        for key in expected:
            if found and found.get(key) != expected[key]:
                return f"was built with {key} {_short(found.get(key))} in place of {_short(expected[key])}"
        if own is None:  # Levanter's own: no more than that is known
            names = [source.shard for source in self.sources]
            if list(ledger.finished_shards) != names:
                return f"has the shards {_short(list(ledger.finished_shards))} in place of {_short(names)}"
            return None
        for key, said in self._whole_identity().items():
            if own.get(key) != said:
                what = {
                    "settings": "was built with other settings (tokenizer, format, dtype or on_error)",
                    "sources": "was built from other files, or from these before they changed",
                }
                return what.get(key, f"has the {key} {own.get(key)} in place of {said}")
        return None

    def _entries(self, names: list[str]) -> list[str]:
        """Entries of the finished cache's folder, but the ledger."""
        fields = list(dict.fromkeys(name.split("/")[0] for name in names))
        kept = [source.shard for source in self.sources] if self.keep_shards or self.layout == SHARDED else []
        return kept if self.layout == SHARDED else fields + kept

    def _refuse_foreign(self, names: list[str]) -> None:
        """Refuses what stands in the way before hours are spent on what could not be put in its place."""
        try:
            mine = placing.owned(self.out)
        except errors.ActshardError as error:
            raise ExistsError(
                f"a cache is here whose ledger cannot be read ({error.detail}), so that it is not known what belongs to it; "
                "remove the folder, or choose another",
                path=self.out,
            ) from error
        arrays = [f"{name}/{part}" for name in names for part in ("offsets", "data")]
        shards_kept = [entry for entry in self._entries(names) if entry in {source.shard for source in self.sources}]
        inner = [f"{shard}/{path}" for shard in shards_kept for path in (ledgers.NAME, *arrays)]
        placing.refuse_foreign(self.out, [ledgers.NAME, *(arrays if self.layout == CONSOLIDATED else []), *inner], mine)

    def _begin(self, work: Path) -> tuple[Any, ...] | None:
        """Makes the working folder ready; the time that chat templates see: that of the build's first beginning."""
        settings, cache = _digest(self._settings), _digest(self._whole_identity())
        said = placing.read_state(work)
        now = said.get("now") if said.get("settings") == settings else None
        if not _is_time(now):
            # The name of the time zone and its offset too, which templates may ask for.
            here = time.localtime()
            now = [*here, here.tm_zone, here.tm_gmtoff]
        state = {"actshard": 1, "settings": settings, "cache": cache, "now": now}
        if state != said:
            write_json(work / placing.STATE, state)
        shards_of_this = {source.shard for source in self.sources}
        for entry in [e for e in work.iterdir() if e.name not in (placing.LOCK, placing.STATE, placing.NEW)]:
            remove(entry)
        make_folder(work / placing.NEW)
        for entry in [e for e in (work / placing.NEW).iterdir() if e.name not in shards_of_this]:
            remove(entry)
        return tuple(now) if isinstance(now, list) and isinstance(self.format, ChatFormat) else None

    def _build(self, work: Path) -> None:
        names = list(self.process.fields)
        with boundary(self.out, "build the cache at"):
            self._refuse_foreign(names)
            self._now = self._begin(work)
        self.built = True
        self._warn_of_no_eos()
        new = work / placing.NEW
        pending: list[tuple[AnySource, Task]] = []
        for source in self.sources:
            folder = new / source.shard
            identity = self._identity(source)
            done = shards.finished(folder, identity, names)
            if done is not None:
                self._done[source.shard] = done
                continue
            remove(folder)
            # Of this process alone: a worker of a killed build may still be ending.
            staged = work / "staged" / f"{source.shard}.{os.getpid()}"
            task = Task(folder, staged, identity, self._shard_storage, self.skip, self._copies, self._now)
            pending.append((source, task))
        self._pending_bytes = sum(source.size() for source, _ in pending)
        self._files_done = len(self._done)
        self._build_shards(pending)
        for source, task in pending:
            done = shards.finished(task.folder, task.identity, names, made=True)
            if done is None:
                raise InternalError(f"shard {source.shard} is not there after it was built", path=task.folder)
            self._done[source.shard] = done
        self._finish(work, names)

    @property
    def _tells_time(self) -> bool:
        """Whether rows depend on when they are made."""
        return isinstance(self.process, ChatProcessor) and "strftime_now" in self.process.template

    def _warn_of_no_eos(self) -> None:
        known = self.tokenizer is None or self.tokenizer.eos_id is not None or self.tokenizer.backend is None
        if known or not self.options["enforce_eos"] or not isinstance(self.format, TextFormat | SupervisedFormat):
            return
        warnings.warn(
            errors.ActshardWarning(
                f"{self.out}: the tokenizer names no eos token, so documents are stored without one and their borders are lost in "
                "windows; use a folder with a tokenizer_config.json, or load_tokenizer(..., eos_token=); enforce_eos=False "
                "if that is meant",
                code="no-eos",
            ),
            stacklevel=6,
        )

    def _build_shards(self, pending: list[tuple[AnySource, Task]]) -> None:
        files = [(source, task) for source, task in pending if isinstance(source, Source)]
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        jobs = min(self.jobs or processors, len(files))
        small = self.jobs is None and self._pending_bytes < _WORTH_PROCESSES
        if jobs <= 1 or small or len(files) < len(pending):
            for source, task in pending:

                def tell(counts: Counts, shard: str = source.shard) -> None:
                    self._counts[shard] = counts
                    self._report()

                build_shard(source, self.process, task, tell)
                self._files_done += 1
            return

        def heard(shard: str, counts: Counts) -> None:
            self._counts[shard] = counts
            self._report()

        def done(shard: str) -> None:
            self._files_done += 1

        setup = shards.setup_as_dict(self.format, self.tokenizer, self.options)
        Workers(self.out, setup, jobs, max(1, processors // jobs), heard, done).run(files)

    def _report(self, stage: str = "tokenizing") -> None:
        if self._tell is None:
            return
        counts = self._counts.values()
        self._tell(
            Progress(
                files=len(self.sources),
                files_done=len(self.sources) if stage != "tokenizing" else self._files_done,
                rows=sum(c.rows for c in counts),
                tokens=sum(c.tokens for c in counts),
                bytes=sum(c.bytes for c in counts),
                bytes_total=self._pending_bytes,
                skipped=sum(c.skipped for c in counts),
                stage=stage,
            )
        )

    def _finish(self, work: Path, names: list[str]) -> None:
        done = {source.shard: self._done[source.shard] for source in self.sources}
        for counts in self._counts.values():
            self.problems += counts.problems
        for shard, ledger in done.items():
            own = ledger.extra.get(OURS, {})
            if own.get("skipped"):
                self.skipped[shard] = int(own["skipped"])
        own = dict(self._whole_identity())
        if self.skipped:
            own["skipped"] = self.skipped
        rows = {shard: ledger.total_num_rows for shard, ledger in done.items()}
        counts_of = {
            shard: {name: ledger.field_counts.get(name, 0) for name in sorted(names)} for shard, ledger in done.items()
        }
        if self._tells_time and self._now is not None:
            own["now"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.struct_time(self._now))
        new = work / placing.NEW
        if self.layout == CONSOLIDATED:
            self._report("consolidating")
            with boundary(work, "put shards together in"):
                self._consolidate(work, names)
        Ledger(
            total_num_rows=sum(rows.values()),
            shard_rows=rows,
            is_finished=True,
            finished_shards=tuple(rows),
            field_counts={name: sum(c[name] for c in counts_of.values()) for name in sorted(names)},
            field_counts_by_shard=counts_of if self.layout == SHARDED else {},
            layout=self.layout,
            metadata={"preprocessor_metadata": self.process.metadata()},
            extra={OURS: own},
        ).write(new)
        placing.swap(self.out, work, placing.NEW, [*self._entries(names), ledgers.NAME])

    def _consolidate(self, work: Path, names: list[str]) -> None:
        """One array per field out of those of all shards: stored numbers are copied, the files of an only shard are linked."""
        merged, new = work / "merged", work / placing.NEW
        filled = [source.shard for source in self.sources if self._done[source.shard].total_num_rows]
        if len(filled) == 1 and self.storage == "plain" and _linked(new / filled[0], merged, names):
            pass
        else:
            writers = FieldWriters(merged, self.process.fields, self.storage)
            cache = _native.BlockCache(0)
            for name in names:
                for shard in filled:
                    writers.extend(name, _native.TokenField([(new / shard / name, None)], "mmap", cache))
            writers.finish()
        sync_tree(merged)
        for entry in sorted(merged.iterdir()):
            entry.rename(new / entry.name)
        sync_folders([new])

    def _warn(self) -> None:
        if not self.skipped:
            return
        total = sum(self.skipped.values())
        first = f"; the first: {self.problems[0]}" if self.problems else ""
        warnings.warn(
            errors.ActshardWarning(
                f"{self.out}: {total:,} records were skipped, in {len(self.skipped)} of {len(self.sources)} files{first}",
                code="records-skipped",
            ),
            stacklevel=4,
        )


def _linked(source: Path, target: Path, names: list[str]) -> bool:
    """Links the files of fields into another folder; False where a file system cannot."""
    try:
        for name in names:
            for file in (source / name).rglob("*"):
                if file.is_file():
                    to = target / name / file.relative_to(source / name)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.hardlink_to(file)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def _id_dtype(dtype: DTypeLike | None) -> str | None:
    if dtype is None:
        return None
    name = numpy_type(dtype, "dtype=").name
    if name not in ID_DTYPES:
        raise DtypeError(f"dtype: token ids are stored as {', '.join(ID_DTYPES)}, not {name}")
    return name


def _is_time(value: Any) -> bool:
    """Whether this is what ``time.struct_time`` is made of."""
    try:
        return isinstance(value, list) and len(value) == 11 and bool(time.strftime("%c", time.struct_time(value)))
    except (TypeError, ValueError, OverflowError):
        return False


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
