"""``layout.toml``: which files contain activations, and their axes.

A description is a TOML file, TOML text, or an equivalent dict. Any value may be ``"file.json:/pointer"``, read from a JSON file of
the folder. Errors name the table, the key and, for TOML, the line.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from actshard.base._arguments import name_of, numpy_type
from actshard.base._json import read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import ActshardError, ArgumentError, ArgumentTypeError, FormatError
from actshard.base.location import Location
from actshard.formats.contents import LayoutText
from actshard.formats.layout_toml.known import find
from actshard.formats.plain_folders import NAME

LARGEST = 1 << 20
"""Size limit of a description in bytes."""
AXES = ("example", "layer", "token", "dim", "row")

CAPTURE = re.compile(r"\{([a-z]+|_)(?::([ds]))?\}")
_POINTER = re.compile(r"([^:*?\s][^:*?]*\.json):(/.*|)$")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|1")

Name = int | str
Steps = tuple[Name, ...]


@dataclass(frozen=True)
class Pattern:
    """A pattern of names with captures ``{example}``, ``{layer}``, ``{batch}`` and ``{_}``: ``:d`` digits, ``:s`` anything but "/".

    Files that differ only in ``{_}`` are shards: each array is in one of them.
    """

    text: str
    captures: tuple[str, ...]
    numbers: frozenset[str]
    """Captures that are numbers."""

    @classmethod
    def of(cls, text: str) -> Pattern:
        """The pattern of a text whose braces are captures."""
        matches = list(CAPTURE.finditer(text))
        return cls(text, tuple(m[1] for m in matches), frozenset(m[1] for m in matches if m[2] != "s"))

    def match(self, name: str) -> dict[str, Name] | None:
        """The captured values, or None."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return {key: int(text) if key in self.numbers else text for key, text in match.groupdict().items()}

    def span(self, name: str, capture: str) -> tuple[int, int]:
        """Start and end of a capture in a name that matches."""
        match = self._regex.fullmatch(name)
        assert match is not None
        return match.span(capture)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, position = [], 0
        for match in CAPTURE.finditer(self.text):
            parts.append(re.escape(self.text[position : match.start()]))
            kind = "[0-9]{1,18}" if match[1] in self.numbers else "[^/]+"
            parts.append(f"(?P<{match[1]}>{kind})")
            position = match.end()
        return re.compile("".join(parts) + re.escape(self.text[position:]))


@dataclass(frozen=True)
class Part:
    """One table of the description, which locates an array or a column.

    Attributes:
        files: pattern of file names; None: the files of the activations.
        pointer: a value of a JSON file, instead of an array.
        tensor: keys and positions that lead to the array in its file; empty: the file is the array.
        axes: as stored, outermost first; empty: the axes of the activations without ``dim`` and ``layer``.
    """

    table: str
    files: Pattern | None
    pointer: tuple[str, str] | None
    tensor: Steps
    axes: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...] | None
    offset: int
    order: str
    swapped: bool
    kind: str = "lengths"
    pad: str = "right"
    name: str = ""
    by: str = ""
    commit: bool = False
    metadata: bool = False

    def step_of(self, capture: str) -> int | None:
        """The position in ``tensor`` of a key with a capture; None if no key has it."""
        steps = enumerate(self.tensor)
        return next(
            (n for n, step in steps if isinstance(step, str) and f"{{{capture}" in CAPTURE.sub(_open, step)), None
        )


def _open(match: re.Match[str]) -> str:
    return f"{{{match[1]}"


@dataclass(frozen=True)
class Description:
    """A checked description."""

    source: Path | None
    """The file of the description."""
    text: str
    """The description's text, or its values as text."""
    activations: Part
    select: Mapping[str, int]
    layers: tuple[Name, ...]
    scales: Part | None
    """Scales of float8 or int8 activations."""
    lengths: Part | None
    tokens: Part | None
    columns: tuple[Part, ...]
    program: str = ""
    """The program that wrote the folder, if its manifest is recognized."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The manifest."""
    remarks: tuple[Remark, ...] = ()
    """Warnings about files that the manifest requires."""


class _Table:
    """One table of a description, with errors that name its line."""

    def __init__(self, name: str, values: Any, reader: DescriptionReader, number: int = 0) -> None:
        self.name, self.reader, self.number = name, reader, number
        if not isinstance(values, Mapping):
            raise reader.error(name, "", f"expected a table, found {show(values)}", number)
        self.values = dict(values)

    def error(self, key: str, text: str) -> ActshardError:
        return self.reader.error(self.name, key, text, self.number)

    def check(self, keys: Iterable[str]) -> None:
        for key in self.values:
            if key not in keys:
                raise self.error(key, f"unknown key; known are {', '.join(keys)}")

    def get(self, key: str) -> Any:
        """The value, resolved if it is a pointer."""
        return self.resolved(key, self.values.get(key))

    def resolved(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and (match := _POINTER.match(value)):
            return self.reader.follow(match[1], match[2], lambda text: self.error(key, text))
        if isinstance(value, list | tuple):
            return [self.resolved(key, entry) for entry in value]
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, str) and value):
            raise self.error(key, f"expected a string, found {show(value)}")
        return value

    def one_of(self, key: str, words: tuple[str, ...]) -> str:
        value = self.get(key)
        if value is None:
            return words[0]
        if value not in words:
            raise self.error(key, f"expected {' or '.join(map(repr, words))}, found {show(value)}")
        return str(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, True, False):
            raise self.error(key, f"expected true or false, found {show(value)}")
        return bool(value)

    def natural(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise self.error(key, f"expected an integer from 0 up, found {show(value)}")
        return value

    def pattern(self, key: str, text: str, allowed: tuple[str, ...]) -> Pattern:
        if text.startswith("/") or "\\" in text or any(part in ("..", ".") for part in text.split("/")):
            raise self.error(key, f"expected a name below the folder, found {show(text)}")
        pattern = Pattern.of(text)
        for name in pattern.captures:
            if name not in allowed or pattern.captures.count(name) > 1:
                raise self.error(key, f"expected each of {', '.join(allowed)} once in braces, found {show(name)}")
        if re.search(r"[{}]", CAPTURE.sub("", text)):
            raise self.error(key, f"expected braces such as {{example:d}} or {{layer:s}}, found {show(text)}")
        return pattern

    def steps(self, key: str) -> Steps:
        value = self.values.get(key)  # a key may look like a pointer
        steps = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(steps, list | tuple) or not all(isinstance(s, str) or type(s) is int for s in steps):
            raise self.error(key, f"expected a key, or a list of keys and positions, found {show(value)}")
        return tuple(steps)

    def axes(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(axis, str) for axis in value):
            raise self.error(key, f"expected a list of names, found {show(value)}")
        names = [name for axis in value for name in axis.split("*")]
        for name in names:
            if not _AXIS.fullmatch(name):
                raise self.error(key, f"expected names of axes such as {', '.join(AXES)}, found {name!r}")
        twice = [name for name in names if name != "1" and names.count(name) > 1]
        if twice:
            raise self.error(key, f"the axis {twice[0]!r} appears twice")
        return tuple(value)

    def dtype(self) -> str | None:
        value = self.get("dtype")
        if value is None:
            return None
        text = value.removeprefix("torch.") if isinstance(value, str) else value
        try:
            return name_of(
                numpy_type({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text), "dtype")
            )
        except (ActshardError, TypeError) as error:
            raise self.error("dtype", f"expected a dtype such as 'bfloat16', found {show(value)}") from error

    def shape(self) -> tuple[int, ...] | None:
        value = self.get("shape")
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(n) is int and -1 <= n < 1 << 60 for n in value):
            raise self.error("shape", f"expected integers, one of which may be -1, found {show(value)}")
        if value.count(-1) > 1:
            raise self.error("shape", "expected at most one -1")
        return tuple(value)


_OF_ARRAY = ("tensor", "axes", "dtype", "shape", "offset", "order", "byteorder")


class DescriptionReader:
    """Checks the tables of a description, and follows its pointers."""

    def __init__(self, root: Location, source: Path | None, text: str) -> None:
        self.root, self.source, self.text = root, source, text
        self.json: dict[str, Any] = {}

    def error(self, table: str, key: str, text: str, number: int = 0) -> ActshardError:
        where = ".".join(str(part) for part in (table, key) if part)
        line = self._line(table, key, number)
        message = f"line {line}: {where}: {text}" if line else f"{where}: {text}"
        if self.source is None:
            return ArgumentError(f"layout: {message}", code="metadata")
        return FormatError(message, path=self.source, code="metadata")

    def _line(self, table: str, key: str, number: int) -> int | None:
        """The line of a key, which TOML's parser does not report."""
        section, count = "", 0
        for line_number, line in enumerate(self.text.splitlines(), 1):
            if match := re.match(r"\s*\[\[?\s*([A-Za-z_]+(?:\.[A-Za-z_]+)*)\s*\]\]?", line):
                section = match[1]
                count += section == table
                if not key and section == table and count > number:
                    return line_number
            elif (
                section == table and (count > number or not table) and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line)
            ):
                return line_number
        if (parent := table.rpartition(".")) and parent[0]:  # an inline or missing table
            return self._line(parent[0], parent[2], number)
        return None

    def line(self, table: str) -> int | None:
        """The line of a table."""
        return self._line(table, "", 0)

    def follow(self, file: str, pointer: str, error: Any) -> Any:
        """The value of a JSON pointer (RFC 6901)."""
        if file not in self.json:
            if file.startswith("/") or any(part == ".." for part in file.split("/")):
                raise error(f"expected a file below the folder, found {show(file)}")
            self.json[file] = read_json(self.root.joinpath(*file.split("/")))
        value = self.json[file]
        for step in (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]):
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                raise error(f"{file} has no {pointer}")
        return value

    def part(self, table: _Table, allowed: tuple[str, ...]) -> Part:
        """Checks and returns the fields that all tables share."""
        file, pointer, files = table.values.get("file", table.values.get("files")), None, None
        if file is not None:
            if not isinstance(file, str) or not file:
                raise table.error("file", f"expected a name, found {show(file)}")
            if match := _POINTER.match(file):
                pointer = (match[1], match[2])
            else:
                files = table.pattern("file" if "file" in table.values else "files", file, allowed)
        return Part(
            table=table.name,
            files=files,
            pointer=pointer,
            tensor=table.steps("tensor"),
            axes=table.axes("axes"),
            dtype=table.dtype(),
            shape=table.shape(),
            offset=table.natural("offset"),
            order=table.one_of("order", ("C", "F")),
            swapped=table.one_of("byteorder", ("little", "big")) == "big",
        )

    def description(self, values: Mapping[str, Any]) -> Description:
        top = _Table("", values, self)
        top.check(("version", "activations", "lengths", "tokens", "columns"))
        if values.get("version") != 1:
            raise top.error("version", f"expected 1, found {show(values.get('version'))}")
        if "activations" not in values:
            raise top.error("activations", "expected this table, found nothing")
        table = _Table("activations", values["activations"], self)
        table.check(("files", *_OF_ARRAY, "select", "layers", "scales"))
        activations = self.part(table, ("example", "layer", "batch", "_"))
        if activations.files is None:
            raise table.error("files", "expected a pattern of file names, found none")
        names = [name for axis in activations.axes for name in axis.split("*")]
        if "dim" not in names:
            raise table.error("axes", f"expected 'dim' among the axes, found {show(list(activations.axes))}")
        if "row" in names and {"token", "example"} & set(names):
            raise table.error(
                "axes", "'row' is all tokens of all examples: expected neither 'example' nor 'token' next to it"
            )
        for name in ("example", "layer"):
            if name in activations.files.captures and name in names:
                raise table.error("axes", f"{name!r} is already captured from the file names")
        if activations.step_of("example") is not None:
            if "example" in activations.files.captures:
                raise table.error("tensor", "'example' is already captured from the file names")
            if {"example", "row"} & set(names):
                raise table.error(
                    "axes", "'tensor' has an array for each example: expected neither 'example' nor 'row'"
                )
        if activations.step_of("token") is not None:
            if "token" not in activations.axes:
                raise table.error("axes", "'tensor' has arrays to join along tokens: expected the axis 'token'")
            if "_" in activations.files.captures or "scales" in values["activations"]:
                raise table.error("tensor", "arrays that are joined along tokens have neither shards nor scales")
        if "row" in names and "example" in activations.files.captures:
            raise table.error("axes", "'row' is all tokens of all examples, but files are one per example: use 'token'")
        select = table.get("select") or {}
        if not isinstance(select, dict) or not all(type(n) is int and n >= 0 for n in select.values()):
            raise table.error("select", f"expected a position for each axis, found {show(select)}")
        for name in names:
            if name not in (*AXES, "1") and name not in select:
                raise table.error(
                    "axes", f"unknown axis {name!r}: expected {', '.join(AXES)}, or its position in 'select'"
                )
        for name in select:
            if name not in names or name in AXES:
                raise table.error("select", f"{name!r} is not one of the axes that 'select' can fix")
        layers = table.get("layers")
        layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
        if not all(type(n) is int or isinstance(n, str) for n in layers) or len(set(layers)) < len(layers):
            raise table.error("layers", f"expected different layer names, found {show(layers)}")
        return Description(
            source=self.source,
            text=self.text,
            activations=activations,
            select=select,
            layers=tuple(layers),
            scales=self.scales(table.values.get("scales"), activations),
            lengths=self.lengths(values.get("lengths"), activations),
            tokens=self.tokens(values.get("tokens"), activations),
            columns=self.columns(values.get("columns", []), activations),
        )

    def scales(self, values: Any, activations: Part) -> Part | None:
        if values is None:
            return None
        table = _Table("activations.scales", values, self)
        table.check(("file", "files", *_OF_ARRAY))
        part = self.part(table, self._allowed(activations))
        if part.pointer is not None:
            raise table.error("file", "expected a file with a tensor, found a value of a JSON file")
        if part.files is None and not part.tensor:
            raise table.error("tensor", "expected a tensor or a file, found none")
        for axis in part.axes:
            if axis not in activations.axes or axis == "1":
                raise table.error(
                    "axes", f"expected some of the activations' axes {list(activations.axes)}, found {axis!r}"
                )
        return part

    def lengths(self, values: Any, activations: Part) -> Part | None:
        if values is None:
            return None
        table = _Table("lengths", values, self)
        table.check(("file", *_OF_ARRAY, "kind", "pad"))
        kind = table.one_of("kind", ("lengths", "mask", "offsets", "starts"))
        part = replace(self.part(table, self._allowed(activations)), kind=kind)
        return replace(part, pad=table.one_of("pad", ("right", "left")))

    def tokens(self, values: Any, activations: Part) -> Part | None:
        if values is None:
            return None
        table = _Table("tokens", values, self)
        table.check(("file", *_OF_ARRAY))
        return self.part(table, self._allowed(activations))

    def columns(self, values: Any, activations: Part) -> tuple[Part, ...]:
        if not isinstance(values, list):
            raise self.error("columns", "", "expected [[columns]] tables")
        parts = []
        for number, column in enumerate(values):
            table = _Table("columns", column, self, number)
            table.check(("file", "name", "by", "commit", "metadata", *_OF_ARRAY))
            part = self.part(table, self._allowed(activations))
            by, commit, metadata = table.text("by") or "", table.flag("commit"), table.flag("metadata")
            if not metadata and part.files is None and part.pointer is None and not part.tensor:
                raise table.error("tensor", "expected a tensor, a file or metadata = true, found none")
            if commit and not by:
                raise table.error("commit", "expected 'by', the field that numbers examples, with it")
            name = table.text("name") or (str(part.tensor[-1]) if part.tensor else "")
            parts.append(replace(part, name=name, by=by, commit=commit, metadata=metadata))
        return tuple(parts)

    @staticmethod
    def _allowed(activations: Part) -> tuple[str, ...]:
        return tuple(name for name in activations.files.captures if name != "_") if activations.files else ()


def read_layout(layout: Any) -> Any:
    """Returns a ``layout=`` argument as text or a dict of its own: a file is read, a dict copied.

    Raises:
        ArgumentTypeError, ArgumentError: neither a path, text or a dict; or nested too deep.
        FormatError: the file is too large, or not UTF-8.
    """
    if isinstance(layout, Mapping):
        try:
            return _plain(layout)
        except RecursionError as error:
            raise ArgumentError("layout: nested too deep") from error
    if not isinstance(layout, str | os.PathLike | None):
        raise ArgumentTypeError(f"layout: expected a path, TOML text or a dict, found {type(layout).__name__}")
    if layout is None or isinstance(layout, LayoutText) or (isinstance(layout, str) and "\n" in layout):
        return layout
    try:
        path = Location.of(os.fspath(layout), "layout")
    except TypeError as error:  # the type's __fspath__ is wrong
        raise ArgumentTypeError(f"layout: expected a path, TOML text or a dict: {error}") from error
    if isinstance(layout, str) and "=" in layout and not path.exists():  # not the path of date=2026/layout.toml
        return layout
    return _read_text(path)


def _plain(value: Any) -> Any:
    """Mappings and lists of a description, copied."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _read_text(path: Location) -> LayoutText:
    data = path.read(0, min(path.regular("read").size, LARGEST + 1))
    if len(data) > LARGEST:
        raise FormatError(f"expected a description of at most {LARGEST} bytes, found more", path=path.place)
    try:
        return LayoutText.of(data.decode(), path.place)
    except UnicodeDecodeError as error:
        raise FormatError("expected UTF-8 text", path=path.place, offset=error.start) from error


def read(root: Location, layout: Any = None) -> Description:
    """Reads and checks a description.

    Args:
        root: the dataset's folder.
        layout: a path, text, or a dict; None: ``layout.toml`` in the folder, or the manifest of a known program.

    Raises:
        FormatError: a file is not a valid description; the message contains the line.
        ArgumentError: a text or dict is not a valid description.
    """
    if isinstance(layout, Mapping):
        return DescriptionReader(root, None, "").description(layout)
    known_folder = find(root) if layout is None and not (root / NAME).exists() else None
    if known_folder is not None:
        reader = DescriptionReader(root, known_folder.manifest.place, "")
        description = reader.description({"version": 1, **known_folder.description()})
        return replace(
            description, program=known_folder.program, metadata=known_folder.value, remarks=known_folder.remarks()
        )
    text = _read_text(root / NAME) if layout is None else read_layout(layout)
    source = text.path if isinstance(text, LayoutText) else None
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if source is None:
            raise ArgumentError(f"layout: expected TOML: {error}", code="metadata") from error
        raise FormatError(f"expected TOML: {error}", path=source, code="metadata") from error
    return DescriptionReader(root, source, text).description(values)
