"""One file of records made into one shard of a cache: what ``build_cache`` does in parallel, in this process or another.

Run as a program it reads tasks as JSON from its standard input, ends when that ends, and tells what it does as JSON lines on the
descriptor that its argument names (standard output if there is none), as libraries may print to standard output:
``build_cache`` starts it for sources that are built at the same time. The tokenizers library has threads of its own, but rendering
chats and reading records has only this interpreter's.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import actshard._native as _native
from actshard.errors import ActshardError, as_plain, boundary
from actshard.tokens import formats
from actshard.tokens import ledger as ledgers
from actshard.tokens.ledger import OURS, Ledger
from actshard.tokens.placing import SUCCESS
from actshard.tokens.processing import Prepared, Processor, processor
from actshard.tokens.sources import AnySource, Record, RowProblem, Source
from actshard.tokens.tokenizer import Tokenizer
from actshard.tokens.writing import FieldWriters
from actshard.work import remove, sync_folders, sync_tree

_CHARS = 1 << 19
"""Characters that are encoded at once: enough for all processors, little enough for their memory."""
_RECORDS = 2048
_TELL_EVERY = 0.25


@dataclass
class Counts:
    """How far a source is.

    Attributes:
        rows, tokens: made of it.
        bytes: read of it.
        skipped: records that could not be used.
        problems: the first few of those, in words.
    """

    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """What becomes of a source.

    Attributes:
        folder: the shard, when it is finished.
        staged: where it is made.
        identity: what tells this shard from one of other records or another format.
        storage: how its numbers are stored.
        skip: whether bad records are skipped.
        read_soon: whether the shard is read again when all are there, to be put together.
        now: the time that chat templates see, as ``time.struct_time`` holds it; a build that is taken up again keeps it.
    """

    folder: Path
    staged: Path
    identity: str
    storage: str
    skip: bool
    read_soon: bool
    now: tuple[Any, ...] | None = None


TellCounts = Callable[[Counts], object]


def build_shard(source: AnySource, process: Processor, task: Task, tell: TellCounts) -> Counts:
    """Makes the shard of a source; it is there when it is whole.

    Raises:
        FormatError: a record that cannot be used, by file and line, unless bad ones are skipped.
    """
    with boundary(task.staged, "make"):
        remove(task.staged)
        task.staged.mkdir(parents=True)
    process.now = None if task.now is None else time.struct_time(task.now)
    counts = Counts()
    writers = FieldWriters(task.staged, process.fields, task.storage, read_soon=task.read_soon)
    last = time.monotonic()

    def read(n: int) -> None:
        counts.bytes += n

    records = source.records(process.columns, read)
    first_field = next(iter(process.fields))
    for prepared, encoded in _encoded_ahead(process, _batches(records, process, source.what)):
        rows = process.finish(prepared, encoded, source.what)
        for problem in rows.problems:
            if not task.skip:
                raise problem.error(source.path)
            counts.skipped += 1
            if len(counts.problems) < 5:
                counts.problems.append(str(problem.error(source.path)))
        for name, elements in rows.elements.items():
            writers.append(name, elements, rows.lengths[name])
        counts.rows += len(rows)
        counts.tokens += int(rows.elements[first_field].size)
        if time.monotonic() - last >= _TELL_EVERY:
            tell(counts)
            last = time.monotonic()
    rows_made, elements_made = writers.finish()
    own: dict[str, Any] = {"identity": task.identity}
    if counts.skipped:
        own["skipped"] = counts.skipped
    name = task.folder.name
    Ledger(
        total_num_rows=rows_made,
        shard_rows={name: rows_made},
        is_finished=True,
        finished_shards=(name,),
        field_counts=dict(sorted(elements_made.items())) if rows_made else {},
        metadata={"preprocessor_metadata": process.metadata()},
        extra={OURS: own},
    ).write(task.staged)
    with boundary(task.folder, "write"):
        if rows_made:
            (task.staged / SUCCESS).touch()
            _native.sync_files([task.staged / SUCCESS])
        sync_tree(task.staged)
        remove(task.folder)
        task.staged.rename(task.folder)
        sync_folders([task.folder.parent])
    tell(counts)
    return counts


def finished(folder: Path, identity: str, fields: list[str], *, made: bool = False) -> Ledger | None:
    """The ledger of a shard that is finished and of this identity; None if it has to be made.

    Where it was just ``made``, an error of reading its ledger is raised.
    """
    try:
        ledger = ledgers.read(folder)
    except ActshardError:
        if made:
            raise
        return None
    own = ledger.extra.get(OURS)
    whole = all((folder / name / "offsets" / "zarr.json").is_file() for name in fields)
    return ledger if whole and isinstance(own, dict) and own.get("identity") == identity else None


def _batches(records: Iterator[Record], process: Processor, what: str) -> Iterator[Prepared]:
    batch: list[Record] = []
    chars = 0
    for item in records:
        batch.append(item)
        record = item[1]
        if not isinstance(record, RowProblem):
            for value in record.values():
                if isinstance(value, str):
                    chars += len(value)
                elif isinstance(value, list):
                    # A message or a number: what it is does not matter for when to stop.
                    chars += len(value) * 100
        if chars >= _CHARS or len(batch) >= _RECORDS:
            yield process.prepare(batch, what)
            batch, chars = [], 0
    if batch:
        yield process.prepare(batch, what)


def _encoded_ahead(process: Processor, batches: Iterator[Prepared]) -> Iterator[tuple[Prepared, list[list[int]]]]:
    """Batches with their ids: the next one is read and prepared while the library encodes this one."""
    waiting: list[tuple[Prepared, Future[list[list[int]]]]] = []
    # Two, so that the library's threads have work while ids of the last batch become Python's.
    with ThreadPoolExecutor(2, thread_name_prefix="actshard-encode") as encoder:
        for prepared in batches:
            waiting.append((prepared, encoder.submit(process.encode, prepared.texts)))
            if len(waiting) > 3:
                ready, future = waiting.pop(0)
                yield ready, future.result()
        for ready, future in waiting:
            yield ready, future.result()


def setup_as_dict(format: formats.RowFormat, tokenizer: Tokenizer | None, options: dict[str, Any]) -> dict[str, Any]:
    """What all tasks of a worker have in common, as JSON: a tokenizer is megabytes, and is sent once."""
    return {
        "format": formats.as_dict(format),
        "tokenizer": None if tokenizer is None else tokenizer.as_dict(),
        "options": options,
    }


def task_as_dict(source: Source, task: Task) -> dict[str, Any]:
    """A task as JSON, for another process."""
    return {
        "source": {"path": os.fspath(source.path), "shard": source.shard},
        "task": {name: os.fspath(v) if isinstance(v, Path) else v for name, v in vars(task).items()},
    }


class _Orders:
    """Lines from the build on stdin. When the build is gone, however that came, this process ends at once."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._idle = False
        threading.Thread(target=self._follow, daemon=True, name="actshard-follow").start()

    def _follow(self) -> None:
        # Not through sys.stdin: its lock would be waited for when this process ends.
        held, looked = bytearray(), 0
        while data := os.read(0, 1 << 16):
            held += data
            while (at := held.find(b"\n", looked)) >= 0:
                self._idle = False
                self._lines.put(bytes(held[:at]))
                del held[: at + 1]
                looked = 0
            looked = len(held)
        if held or not self._idle:
            os._exit(5)
        self._lines.put(None)

    def next(self) -> dict[str, Any] | None:
        """The next line; None when there are no more."""
        line = self._lines.get()
        return None if line is None else dict(json.loads(line))

    def done(self) -> None:
        """Everything that was asked for is done: the build may close stdin."""
        self._idle = True


def main() -> None:
    """A worker: a line with what its tasks have in common, then a line per task. It answers line by line."""
    orders, out = _Orders(), int(sys.argv[1]) if len(sys.argv) > 1 else 1
    os.set_inheritable(out, False)

    def say(said: dict[str, Any]) -> None:
        line = memoryview(json.dumps(said).encode() + b"\n")
        while line:
            line = line[os.write(out, line) :]

    try:
        with boundary(None, "begin"):
            process = _process(orders.next() or {})
        while (given := orders.next()) is not None:
            source = Source(Path(given["source"]["path"]), given["source"]["shard"])
            task = _task(given["task"])
            with boundary(task.folder, "build"):
                build_shard(source, process, task, lambda counts: say(vars(counts)))
            orders.done()
            say({"done": source.shard})
    except ActshardError as error:
        say(as_plain(error))
        sys.exit(3)
    except BrokenPipeError:
        sys.exit(4)


def _process(setup: dict[str, Any]) -> Processor:
    options = setup["options"]
    return processor(
        formats.as_format(setup["format"]),
        None if setup["tokenizer"] is None else Tokenizer.from_dict(setup["tokenizer"]),
        None if options["dtype"] is None else np.dtype(options["dtype"]),
        enforce_eos=options["enforce_eos"],
        enforce_bos=options["enforce_bos"],
    )


def _task(made: dict[str, Any]) -> Task:
    return Task(
        Path(made["folder"]),
        Path(made["staged"]),
        made["identity"],
        made["storage"],
        made["skip"],
        made["read_soon"],
        None if made["now"] is None else tuple(made["now"]),
    )


if __name__ == "__main__":
    main()
