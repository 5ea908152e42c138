"""The record of a request: which verb made a dataset, with which arguments, of which sources.

It is the first line of a writer's journal, stands in plans and in the marker of a merge, and stays in the folder of the finished
dataset, in a hidden file that the readers of all formats ignore. Two requests are the same if their records are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from actshard._json import Fields, read_json, show
from actshard.errors import MissingFileError, NotAFileError
from actshard.location import Location

RECORD = ".actshard-record.json"
"""File in a finished dataset that records the request it was made by."""
VERSION = 1
_DECIDED = ("dtype", "tokens_per_example")
"""Arguments of :func:`actshard.create` whose values the first rows decide if they are not given."""


class Difference(NamedTuple):
    """An argument in which two requests differ, with its values as text."""

    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Request:
    """A request, as JSON values: :meth:`as_dict` is its record.

    Attributes:
        verb: ``"create"``, ``"convert"`` or ``"merge"``.
        arguments: the normalised arguments, including those that were not given (None). No paths: datasets are moved.
        sources: digests of the sources' files (:func:`actshard.inputs.fingerprint`).
        examples: number of examples of the finished dataset; None before it is finished.
        overflows: number of finite values that a conversion stored as infinity; None if it is not known.
    """

    verb: str
    arguments: Mapping[str, Any]
    sources: tuple[str, ...] = ()
    examples: int | None = None
    overflows: int | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, verb: str, arguments: Mapping[str, Any], sources: Sequence[str] = (), examples: int | None = None
    ) -> Self:
        """Returns a request with the arguments as they are read back from JSON: tuples are lists."""
        return cls(verb, json.loads(json.dumps(arguments)), tuple(sources), examples)

    @classmethod
    def from_dict(cls, value: Any, path: Path | Location) -> Self:
        """Returns the request of :meth:`as_dict`. Raises FormatError for other values; ``path`` is used in the message."""
        fields = Fields(value, path)
        arguments, sources = fields.value.get("arguments"), fields.value.get("sources")
        if not isinstance(arguments, dict):
            raise fields.error("arguments", "those of a call")
        if not isinstance(sources, list) or not all(isinstance(digest, str) for digest in sources):
            raise fields.error("sources", "digests of files")
        examples = None if fields.value.get("examples") is None else fields.integer("examples", minimum=0)
        overflows = None if fields.value.get("overflows") is None else fields.integer("overflows", minimum=0)
        return cls(fields.text("verb"), arguments, tuple(sources), examples, overflows)

    @classmethod
    def read(cls, place: Path | Location) -> Self | None:
        """The request that a dataset's folder records; None without a record: another program, or an earlier release, wrote it."""
        file = Location.at(place) / RECORD
        try:
            return cls.from_dict(read_json(file), file)
        except (MissingFileError, NotAFileError):
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
        }

    def completed(self, other: Request) -> Self:
        """Returns the request with another's values of what the first rows decide, where one of the calls left it open."""
        undecided = (
            []
            if self.verb != "create"
            else [n for n in _DECIDED if None in (self.arguments[n], other.arguments.get(n))]
        )
        return replace(self, arguments={**self.arguments, **{name: other.arguments.get(name) for name in undecided}})

    def finished(self, examples: int, overflows: int | None = None) -> Self:
        """Returns the request of a finished dataset, with its numbers of examples and of overflows."""
        return replace(self, examples=examples, overflows=overflows)

    def difference(self, other: Request) -> Difference | None:
        """The first argument in which another request differs; None if they are equal. Sources are not compared."""
        if self.verb != other.verb:
            return Difference("verb", self.verb, other.verb)
        for name in [*self.arguments, *other.arguments]:
            ours, theirs = self.arguments.get(name), other.arguments.get(name)
            if ours == theirs:
                continue
            if isinstance(ours, dict) and isinstance(theirs, dict):
                inner = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
                return Difference(inner, _shown(ours.get(inner)), _shown(theirs.get(inner)))
            return Difference(name, _shown(ours), _shown(theirs))
        if None not in (self.examples, other.examples) and self.examples != other.examples:
            return Difference("examples", str(self.examples), str(other.examples))
        return None

    def without_part(self, examples: int | None) -> Self:
        """Returns the request for the whole dataset, of ``examples`` examples, to which a part belongs."""
        return replace(self, arguments={**self.arguments, "part": None}, examples=examples)


def _shown(value: Any) -> str:
    return "nothing" if value is None else show(value)
