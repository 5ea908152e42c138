"""Reads dataclasses from untrusted JSON values: their annotations are the only description of a file's fields.

An object becomes a dataclass, or a ``Mapping``; a list becomes a tuple, or a named tuple; a string becomes a ``str``, a ``Path``,
which must be absolute, or one of the values of a ``Literal``. ``Annotated[T, Rule(...)]`` accepts only some values of T. What
several fields must have in common is checked in ``__post_init__``, which raises :class:`MismatchError`.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from actshard.base._json import MAX_INT, show
from actshard.base.errors import FormatError
from actshard.base.location import Location

Kind = TypeVar("Kind")
_Parser = Callable[[Any], Any]
_NOTHING = object()
OMITTED: Mapping[str, bool] = {"omitted": True}
"""Metadata of a field that :func:`json_values` leaves out while it has its default."""


@dataclass(frozen=True)
class Rule:
    """Values that an ``Annotated`` type accepts. It replaces the rule that strings and integers have without one.

    Attributes:
        expected: the accepted values, for messages.
        accepts: whether a value of the annotated type is accepted.
    """

    expected: str
    accepts: Callable[[Any], bool]


def at_least(low: int) -> Rule:
    """The rule of integers from ``low`` up to the largest size."""
    return Rule(f"an integer of at least {low}", range(low, MAX_INT).__contains__)


def one_of(accepted: Collection[str]) -> Rule:
    """The rule of some strings."""
    return Rule(f"one of {', '.join(accepted)}", accepted.__contains__)


def is_file_text(text: str) -> bool:
    """Whether a string can be a file's path. Python keeps bytes that are not UTF-8 as low surrogates; JSON allows any."""
    return "\0" not in text and not any("\ud800" <= c <= "\udbff" for c in text)


def is_file_name(text: str) -> bool:
    """Whether a string is a relative path below a folder, with ``/`` between names."""
    return is_file_text(text) and all(part not in ("", ".", "..") for part in text.split("/"))


Amount = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
AnyText = Annotated[str, Rule("a string", lambda text: True)]
"""Any string, also one that no file name or UTF-8 text can contain."""
FileName = Annotated[str, Rule("the name of a file below a folder", is_file_name)]
_RULES = {
    bool: Rule("true or false", lambda value: True),
    int: Rule("an integer", range(1 - MAX_INT, MAX_INT).__contains__),
    float: Rule("a finite number with a point or an exponent", math.isfinite),
    str: Rule("a string", lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
    type(None): Rule("null", lambda value: True),
}


class MismatchError(Exception):
    """A value that its type does not accept; ``steps`` lead to it."""

    def __init__(self, expected: str, value: object, *steps: str | int, remedy: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.steps = list(steps)
        self.remedy = remedy

    def described(self, where: str = "") -> str:
        """The message: the field below ``where``, the expected and the found value."""
        name = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps)
        actual = "nothing" if self.value is _NOTHING else show(self.value)
        return f"field '{name.lstrip('.')}': expected {self.expected}, found {actual}{self.remedy}"


def read(kind: type[Kind], value: object, path: Path | Location, where: str = "") -> Kind:
    """Returns JSON values as a dataclass.

    Args:
        kind: the dataclass.
        value: parsed JSON.
        path: the file, for messages.
        where: the field that contains the value, for messages.

    Raises:
        FormatError: a field is missing, unknown, or not accepted. The message names it.
    """
    try:
        return read_value(kind, value)
    except MismatchError as error:
        raise FormatError(error.described(where), path=path, code="metadata") from error


def read_value(kind: type[Kind], value: object) -> Kind:
    """As :func:`read`. Raises MismatchError."""
    hint: object = kind
    result: Kind = _reader(hint)(value)
    return result


def json_values(value: object) -> Any:
    """Returns a dataclass as the JSON values that :func:`read` reads."""
    if is_dataclass(value):
        items = [(f, getattr(value, f.name)) for f in fields(value)]
        return {f.name: json_values(item) for f, item in items if "omitted" not in f.metadata or item != f.default}
    if isinstance(value, Mapping):
        return {name: json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@functools.cache
def _reader(hint: Any) -> _Parser:
    """The function that returns a JSON value as the type, or raises MismatchError."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return _any
    if origin is Annotated:
        return _ruled(*args)
    if origin is Literal:
        return _literal(args)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is tuple:
        return _list(args[0]) if args[1:] == (...,) else _tuple(tuple, args, "")
    if origin in (Mapping, dict):
        return _object(args[1])
    if hint in _RULES:
        return _scalar(hint, _RULES[hint])
    if hint is Path:
        return _path
    if is_dataclass(hint):
        return _dataclass(hint)
    hints = get_type_hints(hint, include_extras=True)
    return _tuple(hint._make, tuple(hints.values()), f" [{', '.join(hints)}]")


def _any(value: object) -> object:
    if value is _NOTHING:
        raise MismatchError("a value", value)
    return value


def _scalar(kind: type, rule: Rule) -> _Parser:
    def read_scalar(value: object) -> object:
        if type(value) is not kind or not rule.accepts(value):
            raise MismatchError(rule.expected, value)
        return value

    return read_scalar


def _ruled(hint: object, rule: Rule) -> _Parser:
    if hint in _RULES:
        return _scalar(hint, rule)
    inner = _reader(hint)

    def read_ruled(value: object) -> object:
        result = inner(value)
        if not rule.accepts(result):
            raise MismatchError(rule.expected, value)
        return result

    return read_ruled


def _path(value: object) -> Path:
    if type(value) is not str or not is_file_text(value) or not Path(value).is_absolute():
        raise MismatchError("an absolute path", value)
    return Path(value)


def _literal(accepted: tuple[object, ...]) -> _Parser:
    def read_literal(value: object) -> object:
        if not any(type(value) is type(choice) and value == choice for choice in accepted):
            raise MismatchError(f"one of {', '.join(map(str, accepted))}", value)
        return value

    return read_literal


def _union(kinds: tuple[object, ...]) -> _Parser:
    objects: list[Any] = [kind for kind in kinds if is_dataclass(kind)]

    def read_union(value: object) -> object:
        if isinstance(value, dict) and objects:  # the one whose fields the value has
            return _reader(max(objects, key=lambda kind: len(kind.__dataclass_fields__.keys() & value.keys())))(value)
        errors = []
        for kind in kinds:
            try:
                return _reader(kind)(value)
            except MismatchError as error:
                errors.append(error)
        inner = next((error for error in errors if error.steps), None)
        raise inner or MismatchError(" or ".join(dict.fromkeys(error.expected for error in errors)), value)

    return read_union


def _inner(reader: _Parser, value: object, step: str | int) -> object:
    try:
        return reader(value)
    except MismatchError as error:
        error.steps.insert(0, step)
        raise


def _list(hint: object) -> _Parser:
    inner = _reader(hint)

    def read_list(value: object) -> object:
        if not isinstance(value, list | tuple):
            raise MismatchError("a list", value)
        return tuple([_inner(inner, item, i) for i, item in enumerate(value)])

    return read_list


def _tuple(make: Callable[[Any], object], hints: tuple[object, ...], names: str) -> _Parser:
    readers = [_reader(hint) for hint in hints]

    def read_tuple(value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) != len(readers):
            raise MismatchError(f"a list of {len(readers)} values{names}", value)
        return make([_inner(reader, item, i) for i, (reader, item) in enumerate(zip(readers, value, strict=True))])

    return read_tuple


def _object(hint: object) -> _Parser:
    inner = _reader(hint)

    def read_object(value: object) -> object:
        if not isinstance(value, dict):
            raise MismatchError("an object", value)
        return {name: _inner(inner, item, name) for name, item in value.items()}

    return read_object


def _dataclass(kind: Any) -> _Parser:
    hints = get_type_hints(kind, include_extras=True)
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}
    optional = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}

    def read_dataclass(value: object) -> object:
        if not isinstance(value, dict):
            raise MismatchError("an object", value)
        if unknown := [name for name in value if name not in readers]:
            near = get_close_matches(unknown[0], readers, 1)
            remedy = f". Do you mean {near[0]!r}?" if near else ""
            raise MismatchError("no such field", value[unknown[0]], unknown[0], remedy=remedy)
        return kind(
            **{
                name: _inner(reader, value.get(name, _NOTHING), name)
                for name, reader in readers.items()
                if name in value or name not in optional
            }
        )

    return read_dataclass
