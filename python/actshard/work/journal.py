"""The journal of a dataset being written.

A line is written after everything it speaks of is on the disk, so that everything the journal counts is there, whenever its
writer dies. A last line that was torn is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import actshard._native as _native
from actshard.errors import FormatError, from_os, from_reader
from actshard.work.lock import Lock
from actshard.work.names import FOLDER, JOURNAL

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
_TABLE = re.compile(r"examples-\d{6,12}\.arrow")


class Journal:
    """The journal of a dataset being written."""

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL
        self.lock = Lock(self.folder)
        self.config: dict[str, Any] = {}
        self.commits: list[dict[str, Any]] = []
        self.closing = False
        """Whether the dataset was being finished: nothing can be appended any more."""
        self.finished = False
        self._valid = 0
        """Bytes of the journal up to the last line that is whole."""

    def exists(self) -> bool:
        """Whether somebody has begun."""
        return self.path.is_file()

    def begin_with(self, config: dict[str, Any]) -> None:
        """Begins a journal. The lock has been taken."""
        self._valid = 0
        self.config = config
        self._append({"actshard": VERSION, "config": config})

    def read(self) -> None:
        """Reads it. A last line that is torn is as if it were not there."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise from_os(error, self.path, "read") from error
        self.config, self.commits, self.closing, self.finished, self._valid = {}, [], False, False, 0
        lines = [line + b"\n" for line in data.split(b"\n")]
        lines[-1] = lines[-1][:-1]
        for number, line in enumerate(filter(None, lines), 1):
            try:
                record = json.loads(line)
                whole = line.endswith(b"\n") and isinstance(record, dict)
            except (ValueError, RecursionError):
                whole = False
            if not whole:
                if self._valid + len(line) < len(data):
                    raise FormatError(
                        f"line {number}: expected a record, found {line[:40]!r}", path=self.path, offset=self._valid
                    )
                break
            if number == 1:
                if record.get("actshard") != VERSION:
                    raise FormatError("line 1: expected the journal of an actshard writer", path=self.path)
                if not isinstance(record.get("config"), dict):
                    raise FormatError(
                        "line 1: field 'config': expected what was asked for, found none",
                        path=self.path,
                        code="metadata",
                    )
                self.config = record["config"]
            elif record.get("closing") or record.get("finished"):
                self.closing = True
                self.finished = bool(record.get("finished"))
            else:
                self._check(number, record)
                self.commits.append(record)
            self._valid += len(line)

    def _check(self, number: int, record: dict[str, Any]) -> None:
        """Raises FormatError unless a line is a commit that can follow those before."""
        examples, table = record.get("examples"), record.get("table")
        for name, right, expected in (
            (
                "examples",
                type(examples) is int and self.examples <= examples < 1 << 62,
                f"a number from {self.examples}",
            ),
            ("state", isinstance(record.get("state"), dict), "an object"),
            ("table", table is None or (isinstance(table, str) and _TABLE.fullmatch(table)), "examples-NNNNNN.arrow"),
        ):
            if not right:
                raise FormatError(
                    f"line {number}: field '{name}': expected {expected}, found {record.get(name)!r:.60}",
                    path=self.path,
                    code="metadata",
                    offset=self._valid,
                )

    @property
    def examples(self) -> int:
        """Examples that are safe on the disk."""
        return int(self.commits[-1]["examples"]) if self.commits else 0

    def commit(self, examples: int, table: pa.Table | None, state: dict[str, Any]) -> None:
        """Counts examples as safe, with what is known about those added since the last commit."""
        record: dict[str, Any] = {"examples": examples, "state": state}
        if table is not None:
            name = f"examples-{len(self.commits):06}.arrow"
            _write_table(self.folder / name, table)
            record["table"] = name
        self._append(record)
        self.commits.append(record)

    def close(self) -> None:
        """The dataset is being finished: its last shards are completed, and nothing can be added to them."""
        if not self.closing:
            self._append({"closing": True})
            self.closing = True

    def finish(self) -> None:
        """The dataset is whole; what is in this folder is not needed any more."""
        if not self.finished:
            self._append({"finished": True})
            self.closing = self.finished = True

    def tables(self) -> Iterator[pa.Table]:
        """What commits added, in order."""
        import pyarrow as pa

        for record in self.commits:
            if "table" in record:
                path = self.folder / record["table"]
                try:
                    # Mapped, so that columns stay on the disk until they are looked at.
                    with path.open("rb") as file, pa.memory_map(_name_for_arrow(path, file.fileno())) as source:
                        table = pa.ipc.open_file(source).read_all()
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise from_reader(error, path, "read", f"expected what an earlier commit wrote: {error}") from error
                yield table

    def remove(self) -> None:
        """Removes the working folder, which is locked: the lock goes last, so that nobody takes it before that."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path != self.lock.path:
                    with contextlib.suppress(OSError):
                        path.unlink()
        with contextlib.suppress(OSError):
            self.lock.path.unlink()
            self.folder.rmdir()
        self.lock.release()

    def moved(self, root: Path) -> None:
        """The dataset's folder has another name now."""
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL
        self.lock.path = self.folder / self.lock.path.name

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        new = not self.path.exists()
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(file, self._valid)  # a torn line goes
                os.pwrite(file, line, self._valid)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise from_os(error, self.path, "write") from error
        if new:
            _native.sync_files([self.folder, self.folder.parent])
        self._valid += len(line)


def _write_table(path: Path, table: pa.Table) -> None:
    import pyarrow as pa

    try:
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise from_os(error, path, "write") from error
    _native.sync_files([path])
    _native.sync_files([path.parent])


def _name_for_arrow(path: Path, file: int) -> str:
    """A name of an open file that pyarrow takes: it knows no path that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"/dev/fd/{file}"
    return str(path)
