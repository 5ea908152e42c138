"""The record of a request: which verb made a dataset, with which arguments, of which sources.

It is the first line of a writer's journal, stands in plans and in the marker of a merge, and stays in the folder of the finished
dataset, in a hidden file that the readers of all formats ignore. Two requests are the same if their records are equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from actshard.base._json import Fields, read_json, show
from actshard.base._schema import MismatchError, Rule, read_value
from actshard.base.errors import MissingFileError, NotAFileError, boundary
from actshard.base.location import Location

RECORD = ".actshard-record.json"
"""File in a finished dataset that records the request it was made by. Beside the dataset, its name begins with the folder's."""
VERSION = 1
_NOTHING = "nothing"
_WORD = 1 << 64
_BLOCK = 1 << 20
"""Bytes of a file in memory."""
_DECIDED = ("dtype", "tokens_per_example")
"""Arguments of :func:`actshard.create` whose values the first rows decide if they are not given."""


@dataclass(frozen=True)
class Digest:
    """The digest of a layer's rows: sums over its examples, modulo 2**64, so that those of parts can be joined.

    Attributes:
        total: the sum of the hashes of the examples' rows.
        ordered: the sum of each hash times the number of its example, counted from 1.
    """

    total: int
    ordered: int

    @classmethod
    def of(cls, hashes: NDArray[np.uint64], first: int = 0) -> Self:
        """The digest of consecutive examples from number ``first`` on."""
        numbers = np.arange(first + 1, first + 1 + len(hashes), dtype=np.uint64)
        return cls(int(hashes.sum(dtype=np.uint64)), int((hashes * numbers).sum(dtype=np.uint64)))

    def __str__(self) -> str:
        return f"{self.total:016x}{self.ordered:016x}"

    def __add__(self, other: Digest) -> Digest:
        """The digest of these examples and of others, all numbered in one dataset."""
        return Digest((self.total + other.total) % _WORD, (self.ordered + other.ordered) % _WORD)

    def after(self, examples: int) -> Digest:
        """The digest of the same examples behind ``examples`` others."""
        return Digest(self.total, (self.ordered + examples * self.total) % _WORD)


Digests = tuple[Digest, ...]
"""The digest of each layer, in the dataset's order."""


DigestTexts = tuple[
    Annotated[str, Rule("32 hexadecimal digits", lambda text: re.fullmatch("[0-9a-f]{32}", text) is not None)], ...
]
"""The digests of layers in JSON."""


def digests_of(texts: Sequence[str]) -> Digests:
    """Digests from their texts."""
    return tuple(Digest(int(text[:16], 16), int(text[16:], 16)) for text in texts)


def digests_in(fields: Fields) -> Digests | None:
    """The field ``digests``; None without one. Raises FormatError for other values."""
    texts = fields.value.get("digests")
    if texts is None:
        return None
    try:
        return digests_of(read_value(DigestTexts, texts))
    except MismatchError as error:
        raise fields.error("digests", "32 hexadecimal digits for each layer") from error


def joined_digests(parts: Iterable[Digests | None]) -> Digests | None:
    """The digests of all examples from those of parts, which are numbered in one dataset; None if those of a part are not known."""
    digests = list(parts)
    if not digests or None in digests or len({len(part) for part in digests if part is not None}) != 1:
        return None
    layers = zip(*(part for part in digests if part is not None), strict=True)
    return tuple(reduce(add, layer) for layer in layers)


_Checksums = dict[
    str, Annotated[str, Rule("8 hexadecimal digits", lambda text: re.fullmatch("[0-9a-f]{8}", text) is not None)]
]


def checksum(file: Path | Location) -> str:
    """The CRC-32 (of zlib) of a file, 8 hexadecimal digits."""
    crc = 0
    with boundary(file, "read"), file.open("rb") if isinstance(file, Path) else file.open("read") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _checksums_in(fields: Fields) -> Mapping[str, str] | None:
    """The field ``checksums``; None without one. Raises FormatError for other values."""
    if fields.value.get("checksums") is None:
        return None
    try:
        return read_value(_Checksums, fields.value["checksums"])
    except MismatchError as error:
        raise fields.error("checksums", "8 hexadecimal digits for each file") from error


class Difference(NamedTuple):
    """An argument in which two requests differ, with its values as text."""

    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, eq=False)
class Request:
    """A request, as JSON values: :meth:`as_dict` is its record.

    Attributes:
        verb: ``"create"``, ``"convert"`` or ``"merge"``.
        arguments: the normalised arguments, including those that were not given (None). No paths: datasets are moved.
        sources: digests of the sources' files (:func:`actshard.reading.inputs.fingerprint`).
        examples: number of examples of the finished dataset; None before it is finished.
        overflows: number of finite values that a conversion stored as infinity; None if it is not known.
        digests: digests of the rows as they were written; None if they are not known.
        checksums: CRC-32 of each file of columns, lengths and metadata, by its name relative to the dataset's folder; None before
            it is finished. Columns that a format keeps among its rows have none.
    """

    verb: str
    arguments: Mapping[str, object]
    sources: tuple[str, ...] = ()
    examples: int | None = None
    overflows: int | None = None
    digests: Digests | None = None
    checksums: Mapping[str, str] | None = None

    @classmethod
    def of(
        cls, verb: str, arguments: Mapping[str, object], sources: Sequence[str] = (), examples: int | None = None
    ) -> Self:
        """Returns a request with the arguments as they are read back from JSON: tuples are lists."""
        return cls(verb, json.loads(json.dumps(arguments)), tuple(sources), examples)

    @classmethod
    def from_dict(cls, value: object, path: Path | Location) -> Self:
        """Returns the request of :meth:`as_dict`. Raises FormatError for other values; ``path`` is used in the message."""
        fields = Fields(value, path)
        if fields.integer("actshard_record") > VERSION:
            raise fields.error("actshard_record", f"at most {VERSION}, because a later release wrote it")
        arguments, sources = fields.value.get("arguments"), fields.value.get("sources")
        if not isinstance(arguments, dict):
            raise fields.error("arguments", "those of a call")
        if not isinstance(sources, list) or not all(isinstance(digest, str) for digest in sources):
            raise fields.error("sources", "digests of files")
        examples = None if fields.value.get("examples") is None else fields.integer("examples", minimum=0)
        overflows = None if fields.value.get("overflows") is None else fields.integer("overflows", minimum=0)
        digests, checksums = digests_in(fields), _checksums_in(fields)
        return cls(fields.text("verb"), arguments, tuple(sources), examples, overflows, digests, checksums)

    @classmethod
    def read(cls, path: Path | Location) -> Self | None:
        """The request that made a dataset, by its record; None without one: another program wrote it.

        A record next to a folder is ignored if it was written for other files.
        """
        folder = Location.at(path)
        with contextlib.suppress(MissingFileError, NotAFileError):
            return cls.from_dict(read_json(folder / RECORD), folder / RECORD)
        sibling = folder.parent / f".{folder.name}{RECORD}"
        with contextlib.suppress(MissingFileError, NotAFileError):
            value = read_json(sibling)
            request = cls.from_dict(value, sibling)
            mark = value.get("files")
            return request if mark is None or (folder.is_local and mark == files_mark(folder)) else None
        return None

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "actshard_record": VERSION,
            "verb": self.verb,
            "arguments": dict(self.arguments),
            "sources": list(self.sources),
            "examples": self.examples,
            "overflows": self.overflows,
            "digests": None if self.digests is None else list(map(str, self.digests)),
            "checksums": None if self.checksums is None else dict(self.checksums),
        }

    def completed(self, other: Request) -> Self:
        """Returns the request with another's values of what the first rows decide, where one of the calls left it open."""
        undecided = (
            []
            if self.verb != "create"
            else [n for n in _DECIDED if None in (self.arguments[n], other.arguments.get(n))]
        )
        return replace(self, arguments={**self.arguments, **{name: other.arguments.get(name) for name in undecided}})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> str:
        """What makes two requests the same; overflows, digests and checksums are facts of the result only."""
        return _text([self.verb, self.arguments, self.sources, self.examples])

    def finished(self, examples: int, overflows: int | None, digests: Digests | None) -> Self:
        """Returns the request of a finished dataset, with its number of examples, and overflows and digests."""
        return replace(self, examples=examples, overflows=overflows, digests=digests)

    def difference(self, other: Request) -> Difference | None:
        """The first argument in which another request differs; None if they are equal. Sources are not compared."""
        if self.verb != other.verb:
            return Difference("verb", self.verb, other.verb)
        for name in [*self.arguments, *other.arguments]:
            ours, theirs = self.arguments.get(name), other.arguments.get(name)
            if _text(ours) == _text(theirs):
                continue
            if isinstance(ours, dict) and isinstance(theirs, dict):
                texts = [{key: _text(value) for key, value in values.items()} for values in (ours, theirs)]
                inner = next(key for key in [*ours, *theirs] if texts[0].get(key) != texts[1].get(key))
                return Difference(inner, *(show(v[inner]) if inner in v else _NOTHING for v in (ours, theirs)))
            return Difference(name, *(_NOTHING if value is None else show(value) for value in (ours, theirs)))
        if None not in (self.examples, other.examples) and self.examples != other.examples:
            return Difference("examples", str(self.examples), str(other.examples))
        return None

    def without_part(self, examples: int | None) -> Self:
        """Returns the request for the whole dataset, of ``examples`` examples, to which a part belongs."""
        arguments = {**self.arguments, "part": None}
        return replace(self, arguments=arguments, examples=examples, overflows=None, digests=None, checksums=None)


def files_mark(folder: Location) -> str | None:
    """32 hexadecimal digits that differ for other files in a local folder; None without files.

    They depend on the number of entries, and on the name, size and time of change of the first and the last one.
    """
    names = sorted(entry.name for entry in folder.entries() if not entry.name.startswith("."))
    if not names:
        return None
    ends = [(name, (folder / name).found("look into")) for name in (names[0], names[-1])]
    sizes = [(name, stat and (stat.size, stat.modified)) for name, stat in ends]
    return hashlib.sha256(repr((len(names), sizes)).encode()).hexdigest()[:32]


def _text(value: object) -> str:
    """Canonical JSON: in Python, True equals 1."""
    return json.dumps(value, sort_keys=True)
