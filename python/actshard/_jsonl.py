"""JSON lines not to be trusted: one object per line, named by file and line where it is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from actshard.errors import FormatError, boundary
from actshard.location import Location

MAX_LINE = 64 << 20
"""No prompt is this long; a file without line breaks is not read into memory to find out."""


def lines(stream: IO[bytes], path: Path | Location, limit: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a stream with their numbers, from 1.

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
    """For messages about a line that is not JSON: whether it may be the rest of an interrupted write."""
    return "" if line.endswith(b"\n") else " (the file ends in this line: was its writer interrupted?)"


def read_lines(path: Path | Location) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers, from 1.

    Empty lines are skipped; NaN and Infinity are numbers, as Python writes them.

    Raises:
        MissingFileError, NotAFileError, FileAccessError: it cannot be read.
        FormatError: a line is no JSON object; the message names it.
    """
    with boundary(path, "read"), Location.at(path).open("read") as file:
        for number, line in lines(file, path, MAX_LINE):
            if line.strip():
                yield number, _parse(line, number, path, file.tell() - len(line))


def _parse(line: bytes, number: int, path: Path | Location, offset: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        # Python skips the line break too before it misses something; the fault is in this line.
        within = min(len(error.doc[: error.pos].encode("utf-8", "surrogatepass")), len(line) - line.endswith(b"\n"))
        raise FormatError(
            f"line {number}: expected a JSON object: {error.msg}{interrupted(line)}", path=path, offset=offset + within
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
