"""``build_cache``: builds a token cache from files of records.

Each file becomes a shard, a complete cache in the working folder (`placing.py`). An interrupted build continues with its finished
shards. At the end the shards are *consolidated* (copied byte for byte to one array per field) or kept (*sharded*), the ledger is
written, and everything is moved into place. Until then nothing opens as a cache.
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
from actshard.tokens.writing import WRITE_HERE, FieldWriters, checked_storage
from actshard.work import locked, make_folder, remove, sync_folders, sync_tree, write_json

LAYOUTS = (CONSOLIDATED, SHARDED)
ID_DTYPES = ("int64", "int32", "uint32", "uint16")
_WORTH_PROCESSES = 8 << 20
"""With fewer bytes of sources, starting worker processes takes longer than it saves."""


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
"""Its first name, which programs use."""
Watch = Callable[[BuildProgress], object]


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
        jobs: number of processes; default: one per processor, at most one per file.
        keep_shards: keep the shards of a consolidated cache next to it, as Levanter does.
        overwrite: replace a cache that was built differently. It stays readable until the new one is complete. Only files listed
            in its ledger are removed; other files and caches in the folder are kept.
        progress: called occasionally with :class:`BuildProgress`.

    Returns:
        The opened cache.

    Raises:
        FormatError: a record is unusable; the message names file and line.
        ExistsError: a cache that was built differently exists (the message gives the difference), or other files are in the way.
        LockedError: another process is building the cache.
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
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ArgumentError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
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


class Build:
    """A build; :func:`build_cache` runs it. Afterwards ``built`` is False if the cache was already finished."""

    def __init__(
        self,
        sources: str | os.PathLike[str] | Iterable[Any],
        out: str | os.PathLike[str],
        tokenizer: Any,
        format: FormatBase | Mapping[str, Any] | str | None,
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
        """Everything that affects rows. The tokenizer is included as a digest, because it is megabytes."""
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
        # Shards to be consolidated are copied as bytes, so compression happens only once, at the end.
        return self.storage if self.layout == SHARDED else "plain"

    @property
    def _copies(self) -> bool:
        """Whether shards are read again for consolidation. A single plain shard is linked instead."""
        return self.layout == CONSOLIDATED and (len(self.sources) > 1 or self.storage != "plain")

    def _whole_identity(self) -> dict[str, Any]:
        """Identifies a finished cache."""
        return {
            "settings": _digest(self._settings),
            "sources": _digest([source.identity() for source in self.sources]),
            "layout": self.layout,
            "storage": self.storage,
        }

    def run(self) -> TokenCache:
        """Builds the cache unless it is finished, and opens it."""
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
            if not self._is_finished():  # another process may have finished it
                self._build(work)
            placing.clear(work)
        finally:
            placing.clear_if_idle(work)
            lock.release()

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
            mine = placing.read_state(work).get("cache") in (None, _digest(self._whole_identity()))
            if mine and self._is_finished():
                placing.clear(work)
        finally:
            lock.release()

    def _is_finished(self) -> bool:
        """Whether the requested cache exists. Changes nothing.

        Raises:
            ExistsError: another cache exists, and ``overwrite`` is False.
        """
        if not os.path.lexists(self.out / ledgers.NAME):
            return False
        try:
            ledger = ledgers.read(self.out)
        except errors.ActshardError as error:
            if self.overwrite:
                return False
            raise ExistsError(
                f"an unreadable cache exists ({error.detail}); pass overwrite=True to replace it", path=self.out
            ) from error
        own = ledger.extra.get(OURS)
        differs = self._difference(ledger, own if isinstance(own, dict) else None)
        if differs is None:
            skipped = own.get("skipped", {}) if isinstance(own, dict) else {}
            self.skipped = {str(k): int(v) for k, v in skipped.items()} if isinstance(skipped, dict) else {}
            return True
        if not self.overwrite:
            raise ExistsError(
                f"a finished cache exists that {differs}; pass overwrite=True to replace it", path=self.out
            )
        return False

    def _difference(self, ledger: Ledger, own: dict[str, Any] | None) -> str | None:
        """How a finished cache differs from the one to build; None if it does not."""
        expected = self.process.metadata()
        found = ledger.preprocessor
        for key in expected:
            if found and found.get(key) != expected[key]:
                return f"was built with {key} {_short(found.get(key))} instead of {_short(expected[key])}"
        if own is None:  # written by Levanter: nothing else to compare
            names = [source.shard for source in self.sources]
            if list(ledger.finished_shards) != names:
                return f"has the shards {_short(list(ledger.finished_shards))} instead of {_short(names)}"
            return None
        for key, said in self._whole_identity().items():
            if own.get(key) != said:
                what = {
                    "settings": "was built with other settings (tokenizer, format, dtype or on_error)",
                    "sources": "was built from other files, or from older versions of these",
                }
                return what.get(key, f"has the {key} {own.get(key)} instead of {said}")
        return None

    def _entries(self, names: list[str]) -> list[str]:
        """Entries of the finished cache's folder, without the ledger."""
        fields = list(dict.fromkeys(name.split("/")[0] for name in names))
        kept = [source.shard for source in self.sources] if self.keep_shards or self.layout == SHARDED else []
        return kept if self.layout == SHARDED else fields + kept

    def _refuse_foreign(self, names: list[str]) -> None:
        """Raises ExistsError for files in the way, before hours are spent on building."""
        try:
            mine = placing.owned(self.out)
        except errors.ActshardError as error:
            raise ExistsError(
                f"cannot replace this cache: its ledger cannot be read ({error.detail}), so its files are unknown; "
                "remove the folder, or choose another",
                path=self.out,
            ) from error
        arrays = [f"{name}/{part}" for name in names for part in ("offsets", "data")]
        shards_kept = [entry for entry in self._entries(names) if entry in {source.shard for source in self.sources}]
        inner = [f"{shard}/{path}" for shard in shards_kept for path in (ledgers.NAME, *arrays)]
        placing.refuse_foreign(self.out, [ledgers.NAME, *(arrays if self.layout == CONSOLIDATED else []), *inner], mine)

    def _begin(self, work: Path) -> tuple[Any, ...] | None:
        """Prepares the working folder. Returns the time for chat templates: when the build was first begun."""
        settings, cache = _digest(self._settings), _digest(self._whole_identity())
        said = placing.read_state(work)
        now = said.get("now") if said.get("settings") == settings else None
        if not _is_time(now):
            # With name and offset of the time zone, which templates may use.
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
            # Unique to this process: a worker of a killed build may still be running.
            staged = work / "staged" / f"{source.shard}.{os.getpid()}"
            task = Task(folder, staged, identity, self._shard_storage, self.skip, self._copies, self._now)
            pending.append((source, task))
        self._pending_bytes = sum(source.size() for source, _ in pending)
        self._files_done = len(self._done)
        self._build_shards(pending)
        for source, task in pending:
            done = shards.finished(task.folder, task.identity, names, made=True)
            if done is None:
                raise InternalError(f"shard {source.shard} is missing after it was built", path=task.folder)
            self._done[source.shard] = done
        self._finish(work, names)

    @property
    def _tells_time(self) -> bool:
        """Whether rows depend on the time of the build."""
        return isinstance(self.process, ChatProcessor) and "strftime_now" in self.process.template

    def _warn_of_no_eos(self) -> None:
        known = self.tokenizer is None or self.tokenizer.eos_id is not None or self.tokenizer.backend is None
        if known or not self.options["enforce_eos"] or not isinstance(self.format, TextFormat | SupervisedFormat):
            return
        warnings.warn(
            errors.ActshardWarning(
                f"{self.out}: the tokenizer has no eos token, so documents are stored without one, and windows cannot separate "
                "them; use a folder with a tokenizer_config.json, or load_tokenizer(..., eos_token=); pass enforce_eos=False if "
                "this is intended",
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
            BuildProgress(
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
        """Creates one array per field from the shards, by copying stored bytes. A single shard's files are linked."""
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
    """Hard-links the files of fields into another folder. Returns False if the file system cannot."""
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
    """Whether a value is a valid argument of ``time.struct_time``."""
    try:
        return isinstance(value, list) and len(value) == 11 and bool(time.strftime("%c", time.struct_time(value)))
    except (TypeError, ValueError, OverflowError):
        return False


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
