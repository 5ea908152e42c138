"""``build_cache``: from files of records to a token cache.

Each file becomes a shard, a cache of its own, in a folder below the cache's; a build that is interrupted goes on with the shards it
has. In the end the shards are put together (*consolidated*: one array per field, by copying bytes) or stay what they are
(*sharded*), and the ledger is written. Nothing is a cache before that.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from actshard import _native, errors
from actshard.errors import ArgumentError, DtypeError, ExistsError, InternalError, from_os
from actshard.tokens import formats, shards
from actshard.tokens import ledger as ledgers
from actshard.tokens.cache import WORK, TokenCache, open_cache
from actshard.tokens.formats import Format, PrebuiltFormat
from actshard.tokens.ledger import CONSOLIDATED, OURS, SHARDED, Ledger
from actshard.tokens.processing import Processor, processor
from actshard.tokens.shards import Counts, Task, build_shard
from actshard.tokens.sources import AnySource, Source, expand
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer
from actshard.tokens.writing import FieldWriters, checked_storage
from actshard.writing.work import Lock

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
    format: Format | Mapping[str, Any] | str | None = None,
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
        overwrite: replace a cache that was built otherwise.
        progress: called with :class:`Progress` now and then.

    Returns:
        The cache, open.

    Raises:
        FormatError: a record that cannot be used; the message names file and line.
        ExistsError: a cache that was built otherwise is there; the message says how it differs.
        LockedError: another process is building it.
        MissingFileError, ArgumentError, MissingExtraError: sources, options or libraries that are not there.
    """
    options = Options(
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
class Options:
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
        if self.layout not in LAYOUTS:
            raise ArgumentError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if self.on_error not in ("raise", "skip"):
            raise ArgumentError(f"on_error must be 'raise' or 'skip', not {self.on_error!r}")
        if self.jobs is not None and self.jobs < 1:
            raise ArgumentError(f"jobs must be at least 1, not {self.jobs}")
        checked_storage(self.storage)
        _id_dtype(self.dtype)


class Build:
    """One build; :func:`build_cache` runs it. ``built`` tells afterwards whether anything was to do."""

    def __init__(
        self,
        sources: str | os.PathLike[str] | Iterable[Any],
        out: str | os.PathLike[str],
        tokenizer: Any,
        format: Format | Mapping[str, Any] | str | None,
        options: Options,
        progress: Watch | None = None,
    ) -> None:
        self.out = Path(os.path.abspath(Path(out).expanduser()))  # noqa: PTH100 -- Path.resolve would follow links
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
        return _digest({"settings": self._settings, "source": source.identity(), "storage": self._shard_storage})

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
        if not self._is_finished():
            work = self.out / WORK
            try:
                work.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise from_os(error, self.out, "make") from error
            lock = Lock(work)
            lock.take()
            try:
                if not self._is_finished():  # another process may have been faster
                    self._build(work)
            finally:
                lock.release()
        self._clean()
        self._warn()
        return open_cache(self.out)

    def _is_finished(self) -> bool:
        if not (self.out / ledgers.NAME).exists():
            return False
        try:
            ledger = ledgers.read(self.out)
        except errors.ActshardError as error:
            if self.overwrite:
                self._remove_all()
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
        self._remove_all()
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

    def _remove_all(self) -> None:
        (self.out / ledgers.NAME).unlink(missing_ok=True)
        for entry in self.out.iterdir():
            if entry.name != WORK and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)

    def _build(self, work: Path) -> None:
        self.built = True
        names = list(self.process.fields)
        for leftover in work.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
        pending: list[tuple[AnySource, Task]] = []
        for source in self.sources:
            folder = self.out / source.shard
            identity = self._identity(source)
            done = shards.finished(folder, identity, names)
            if done is not None:
                self._done[source.shard] = done
                continue
            shutil.rmtree(folder, ignore_errors=True)
            # Of this process alone: what a killed one was writing is nobody's.
            staged = work / f"{source.shard}.{os.getpid()}"
            task = Task(folder, staged, identity, self._shard_storage, self.skip, self._copies)
            pending.append((source, task))
        self._pending_bytes = sum(source.size() for source, _ in pending)
        self._build_shards(pending)
        for source, task in pending:
            done = shards.finished(task.folder, task.identity, names)
            if done is None:
                raise InternalError(f"shard {source.shard} is not there after it was built", path=task.folder)
            self._done[source.shard] = done
        self._finish(work, names)

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
            return
        _Workers(self, jobs, max(1, processors // jobs)).run(files)

    def _report(self, stage: str = "tokenizing") -> None:
        if self._tell is None:
            return
        counts = self._counts.values()
        done = sum(1 for s in self.sources if (self.out / s.shard / ledgers.NAME).exists())
        self._tell(
            Progress(
                files=len(self.sources),
                files_done=len(self.sources) if stage != "tokenizing" else done,
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
        if self.layout == CONSOLIDATED:
            self._report("consolidating")
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
        ).write(self.out)

    def _consolidate(self, work: Path, names: list[str]) -> None:
        """One array per field out of those of all shards: stored numbers are copied, the files of an only shard are linked."""
        merged = work / "merged"
        filled = [source.shard for source in self.sources if self._done[source.shard].total_num_rows]
        if len(filled) == 1 and self.storage == "plain" and _linked(self.out / filled[0], merged, names):
            pass
        else:
            writers = FieldWriters(merged, self.process.fields, self.storage)
            cache = _native.BlockCache(0)
            for name in names:
                for shard in filled:
                    writers.extend(name, _native.TokenField([(self.out / shard / name, None)], "mmap", cache))
            writers.finish()
        for name in names:
            target = self.out / name
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            (merged / name).rename(target)
        ledgers.sync_folder(self.out)

    def _clean(self) -> None:
        """Removes what a finished cache does not need."""
        shutil.rmtree(self.out / WORK, ignore_errors=True)
        if self.layout == CONSOLIDATED and not self.keep_shards:
            for source in self.sources:
                folder = self.out / source.shard
                if (folder / ledgers.NAME).is_file() and _is_ours(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _warn(self) -> None:
        if not self.skipped:
            return
        import warnings

        total = sum(self.skipped.values())
        first = f"; the first: {self.problems[0]}" if self.problems else ""
        warnings.warn(
            f"{self.out}: {total:,} records were skipped, in {len(self.skipped)} of {len(self.sources)} files{first}",
            errors.ActshardWarning,
            stacklevel=4,
        )


def _is_ours(folder: Path) -> bool:
    try:
        return OURS in ledgers.read(folder).extra
    except errors.ActshardError:
        return False


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
    try:
        name = np.dtype(dtype).name
    except TypeError as error:
        raise DtypeError(f"dtype={dtype!r} is no numpy type") from error
    if name not in ID_DTYPES:
        raise DtypeError(f"dtype: token ids are stored as {', '.join(ID_DTYPES)}, not {name}")
    return name


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


class _Workers:
    """Sources built by processes of their own, as many at a time as there are jobs."""

    def __init__(self, build: Build, jobs: int, threads: int) -> None:
        self._build = build
        self._jobs = jobs
        self._threads = threads
        self._running: dict[subprocess.Popen[bytes], tuple[str, bytearray]] = {}

    def run(self, files: list[tuple[Source, Task]]) -> None:
        # The largest first: the last to end is then a small one.
        waiting = sorted(files, key=lambda f: -f[0].size())
        selector = selectors.DefaultSelector()
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._jobs:
                    process, shard = self._start(*waiting.pop(0))
                    self._running[process] = (shard, bytearray())
                    assert process.stdout is not None
                    selector.register(process.stdout, selectors.EVENT_READ, process)
                for key, _ in selector.select():
                    self._hear(selector, key.data)
        finally:
            for process in self._running:
                with suppress(OSError):
                    process.kill()
            for process in self._running:
                process.wait()
            selector.close()

    def _start(self, source: Source, task: Task) -> tuple[subprocess.Popen[bytes], str]:
        build = self._build
        said = shards.task_as_dict(source, build.format, build.tokenizer, task, build.options)
        threads = str(self._threads)
        env = {
            **os.environ,
            "RAYON_NUM_THREADS": threads,
            "ACTSHARD_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true" if self._threads > 1 else "false",
            "PYTHONWARNINGS": "ignore",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "actshard.tokens.shards"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C is for this process, which ends them all
        )
        assert process.stdin is not None
        stdin = process.stdin

        def give() -> None:
            # It stays open: when this process is gone, however that came, it closes, and the worker ends.
            with suppress(OSError, ValueError):
                stdin.write(json.dumps(said).encode() + b"\n")
                stdin.flush()

        # A tokenizer is larger than a pipe: who reads slowly must not keep the others from being heard.
        threading.Thread(target=give, daemon=True).start()
        return process, source.shard

    def _hear(self, selector: selectors.BaseSelector, process: subprocess.Popen[bytes]) -> None:
        shard, buffer = self._running[process]
        assert process.stdout is not None
        data = os.read(process.stdout.fileno(), 1 << 16)
        buffer += data
        while (at := buffer.find(b"\n")) >= 0:
            said = json.loads(bytes(buffer[:at]))
            del buffer[: at + 1]
            if "error" in said:
                raise getattr(errors, said["error"], errors.FormatError)(said["detail"], path=said["path"])
            self._build._counts[shard] = Counts(**said)
            self._build._report()
        if not data:
            selector.unregister(process.stdout)
            del self._running[process]
            process.stdout.close()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
            status = process.wait()
            if status:
                raise InternalError(
                    f"the process that built shard {shard} ended with status {status}", path=self._build.out
                )
