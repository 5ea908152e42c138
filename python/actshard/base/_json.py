"""Reads untrusted JSON and JSON lines files with limits, and checks the types of fields."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from actshard.base.errors import RAISE, Faults, FormatError, boundary
from actshard.base.location import Location

_T = TypeVar("_T")

MAX_BYTES = 256 << 20
"""Maximum size of a metadata file."""

MAX_VALUES = 4_000_000
"""Maximum number of values: an empty list takes two bytes in a file and more than 60 in memory."""

MAX_DEPTH = 100
"""Maximum nesting. Python's own limit depends on the depth of the call stack."""

MAX_LINE = 64 << 20
"""Maximum bytes of a line, so that a file without line breaks is not read into memory."""

MAX_INT = 1 << 62
"""Exclusive bound of integers: larger sizes are invalid and would overflow in the Rust core."""


def exists(path: Path | Location) -> bool:
    """Whether a path exists.

    Raises:
        FileAccessError: permissions do not allow the check.
    """
    return Location.at(path).exists()


def read_json(path: Path | Location) -> Any:
    """Reads a JSON file. All failures raise an ActshardError that names the file."""
    file = Location.at(path)
    size = file.regular("read").size
    if size > MAX_BYTES:
        raise FormatError(f"expected a metadata file of at most {MAX_BYTES} bytes, found {size}", path=path)
    try:
        text = file.read(0, size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("expected UTF-8 text", path=path, offset=error.start) from error
    return parse_json(text, path)


def parse_json(text: str, path: str | os.PathLike[str]) -> Any:
    """Parses JSON text; ``path`` is used in errors. Refuses NaN, infinities, duplicate keys and deep nesting."""
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_VALUES:
        raise FormatError(f"expected metadata of at most {MAX_VALUES} JSON values, found about {values}", path=path)

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated_key = next(key for key, count in counts.items() if count > 1)
            raise FormatError(f"field '{repeated_key}': appears twice", path=path, code="metadata")
        return fields

    def no_constant(word: str) -> object:
        raise FormatError(f"expected JSON, found the constant {word}", path=path)

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise FormatError(f"expected JSON: {error.msg}", path=path, offset=len(text[: error.pos].encode())) from error
    except RecursionError as error:
        raise FormatError("expected JSON, found a value nested too deep", path=path) from error
    except FormatError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise FormatError(f"expected JSON: {error}", path=path) from error
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            break
        level = [y for x in level if isinstance(x, dict | list) for y in (x.values() if isinstance(x, dict) else x)]
    if level:
        raise FormatError("expected JSON, found a value nested too deep", path=path)
    return value


def utf8(text: str) -> str:
    """Replaces lone surrogates by escapes: JSON may contain them; UTF-8, Arrow and terminals may not."""
    return text.encode("utf-8", "backslashreplace").decode()


def show(value: object) -> str:
    """Formats a value as JSON for a message, at most 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Typed access to the fields of a JSON object.

    Methods take several names for fields that versions of a format name differently; the first name present is used. An invalid
    field is a fault. If faults are collected, the method returns a stand-in, and :meth:`check` ends the parse before it is used.
    """

    def __init__(self, value: object, path: Path | Location, where: str = "", faults: Faults = RAISE) -> None:
        if not isinstance(value, dict):
            prefix = f"field '{where}': " if where else ""
            code = "metadata" if where else None
            raise FormatError(f"{prefix}expected an object, found {show(value)}", path=path, code=code)
        self.value: dict[str, Any] = value
        self.path = path
        self.where = where
        self.faults = faults
        self._fault: FormatError | None = None

    def check(self) -> None:
        """Raises the first fault of these fields, if faults are collected and there is one."""
        if self._fault is not None:
            raise self._fault

    def refuse(self, error: FormatError, stand_in: _T) -> _T:
        """Adds a fault of these fields. Returns ``stand_in`` if faults are collected."""
        self._fault = self._fault or error
        self.faults.add(error)
        return stand_in

    def error(self, name: str, expected: str, code: str = "metadata") -> FormatError:
        """Builds the error for a missing or invalid field."""
        dotted = f"{self.where}.{name}" if self.where else name
        actual = show(self.value[name]) if name in self.value else "nothing"
        return FormatError(f"field '{dotted}': expected {expected}, found {actual}", path=self.path, code=code)

    def name(self, *names: str) -> str:
        """Returns the first name that is present, else ``names[0]``, for errors."""
        return next((n for n in names if n in self.value), names[0])

    def has(self, *names: str) -> bool:
        """Whether the field is present, under any of the names, and not null."""
        return self.value.get(self.name(*names)) is not None

    def integer(self, *names: str, minimum: int = 1) -> int:
        """An integer of at least ``minimum``."""
        name = self.name(*names)
        value = self.value.get(name)
        if type(value) is not int or not minimum <= value < MAX_INT:
            return self.refuse(self.error(name, f"an integer of at least {minimum}"), minimum)
        return value

    def text(self, *names: str) -> str:
        """A string."""
        name = self.name(*names)
        value = self.value.get(name)
        # JSON allows lone surrogates; file names cannot contain them.
        if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
            return self.refuse(self.error(name, "a string"), "")
        return value

    def boolean(self, *names: str) -> bool:
        """True or false."""
        name = self.name(*names)
        value = self.value.get(name)
        if not isinstance(value, bool):
            return self.refuse(self.error(name, "true or false"), False)
        return value

    def integers(self, *names: str) -> tuple[int, ...]:
        """A non-empty list of distinct integers."""
        name = self.name(*names)
        value = self.value.get(name)
        if not isinstance(value, list) or not value or any(type(x) is not int or abs(x) >= MAX_INT for x in value):
            return self.refuse(self.error(name, "a non-empty list of integers"), (0,))
        if len(set(value)) != len(value):
            return self.refuse(self.error(name, "distinct integers"), (0,))
        return tuple(value)

    def items(self, *names: str) -> list[Fields]:
        """A list of objects."""
        name = self.name(*names)
        value = self.value.get(name)
        if not isinstance(value, list):
            return self.refuse(self.error(name, "a list of objects"), [])
        return [Fields(x, self.path, f"{self.where}.{name}[{i}]".lstrip("."), self.faults) for i, x in enumerate(value)]


def lines(stream: IO[bytes], path: Path | Location, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a stream with their numbers, starting at 1.

    Raises:
        FormatError: a line is longer than ``limit`` bytes.
    """
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise FormatError(f"line {number}: expected at most {limit} bytes", path=path)
        yield number, line


def interrupted(line: bytes) -> str:
    """A hint for messages about an invalid line: without a line break it may be the rest of an interrupted write."""
    return (
        ""
        if line.endswith(b"\n")
        else " (last line of the file, without a line break: its writer may have been interrupted)"
    )


def read_lines(path: Path | Location) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a JSON lines file with their line numbers, starting at 1.

    Skips empty lines. Accepts NaN and Infinity, which Python writes.

    Raises:
        MissingFileError, NotAFileError, FileAccessError: the file cannot be read.
        FormatError: a line is not a JSON object; the message contains its number.
    """
    with boundary(path, "read"), Location.at(path).open("read") as file:
        for number, line in lines(file, path, MAX_LINE):
            if line.strip():
                yield number, _parse_line(line, number, path, file.tell() - len(line))


def _parse_line(line: bytes, number: int, path: Path | Location, offset: int) -> dict[str, object]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        # Python's position may be after the line break; the error is in this line.
        column = min(len(error.doc[: error.pos].encode("utf-8", "surrogatepass")), len(line) - line.endswith(b"\n"))
        raise FormatError(
            f"line {number}: expected a JSON object: {error.msg}{interrupted(line)}", path=path, offset=offset + column
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"line {number}: expected UTF-8 text", path=path, offset=offset + error.start) from error
    except (RecursionError, ValueError) as error:
        raise FormatError(
            f"line {number}: expected a JSON object: {str(error)[:200]}", path=path, offset=offset
        ) from error
    if not isinstance(value, dict):
        raise FormatError(f"line {number}: expected a JSON object, found {str(value)[:60]}", path=path, offset=offset)
    return value
