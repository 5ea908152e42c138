"""Messages in the words of the shell: ``dtype='bfloat16'`` is ``--dtype bfloat16``, ``tokens: expected`` is ``--tokens: expected``.

The package's messages name Python arguments. They are replaced by the options of the command that was called; other arguments are
marked as Python. Messages of the parser of command lines are shortened.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from actshard.base.errors import ESCAPES, ActshardError, ArgumentError, DtypeError, OutOfRangeError

_ALIASES = {
    "layers": "layer",
    "parts": "part",
    "src_format": "format",
    "storage_options": "storage_option",
    "target_options": "target_option",
}
"""Options whose names differ from those of the Python arguments."""
OF_CACHES = "Commands for token caches: info, head, top, report; plot lengths, frequency or packing"
_CALLS = {"Use actshard.tokens.open_cache": OF_CACHES}
"""Python calls in messages, and the commands."""
_PLAIN = (
    (r"Value error, ", ""),
    (r"Input should be greater than or equal to (\S+)", r"expected at least \1"),
    (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
    (r"Input should be a valid integer(?:, .*)?", "expected an integer"),
    (r"Input should be a valid number(?:, .*)?", "expected a number"),
    (r"Input should be a valid boolean(?:, .*)?", "expected true or false"),
    (r"('[^']*') is not one of (.*)\.$", r"expected one of \2, found \1"),
    (r"\. Choose from:\s+", ": expected one of "),
    (r",\s+", ", "),
)
"""Phrases of the parsers of command lines and values, and plainer ones."""
_PLACEHOLDERS = ("name", "old", "key")

_CALLED: ContextVar[Spelling | None] = ContextVar("called", default=None)

_ASSIGNED = re.compile(
    r"(?P<verb>\b(?:[Pp]ass|[Uu]se|[Ss]et) )?"
    r"(?<![\w./'\"=-])\b(?P<name>[a-z][a-z0-9_]*)=(?!=)"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[\[{]|[\w%+-]+(?:\.\w+)*(?:\(\w*\))?|)"
)
_SAME = re.compile(r"(?:,| \() ?(?P<option>--?[a-z][\w-]*(?: [\w=]+)?)\)?|(?: to|, to) create\(\)")
_CALL = re.compile(r"\b[a-z]\w*(?:\.\w+)*\((?=[a-z_]+=)")


@dataclass(frozen=True)
class Spelling:
    """How a command spells Python arguments.

    Attributes:
        options: its options and arguments, by the name of the Python argument.
        flags: names of options without a value.
        pair_option: the option for NAME=VALUE (``-o``), or empty.
        names: returns the names that ``pair_option`` takes.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    pair_option: str = ""
    names: Callable[[], frozenset[str]] = frozenset

    @classmethod
    def of(cls, command: Any) -> Spelling:
        """The spelling of a typer command."""
        options: dict[str, str] = {}
        flags, pair_option = set(), ""
        for param in command.params:
            longest = max(param.opts, key=len)
            if param.param_type_name == "argument":
                options[param.name] = param.name.upper()
                continue
            if longest == "--option":
                pair_option = min(param.opts, key=len)
                continue
            for name in {param.name, longest.lstrip("-").replace("-", "_")}:
                options[name] = longest
                if param.is_flag:
                    flags.add(name)
        for name, option in _ALIASES.items():
            if option in options:
                options.setdefault(name, options[option])
        return cls(options, frozenset(flags), pair_option, lambda: _own_names(command.name))

    def spelled(self, text: str) -> str:
        """Replaces Python arguments in a message."""
        for call, instead in _CALLS.items():
            text = text.replace(call, instead)
        pieces, position = [], 0
        while (match := _first(text, position)) is not None:
            begin, end, instead = self._replaced(text, match)
            pieces += [text[position:begin], instead]
            position = end
        return "".join([*pieces, text[position:]])

    def named(self, text: str) -> str:
        """Replaces the argument's name at the start of a message: ``tokens: expected`` is ``--tokens: expected``."""
        match = re.match(r"([a-z]\w*)(?=: | must be )", text)
        if match is None:
            return text
        option = self.options.get(match[1])
        if option is None and self.pair_option and match[1] in self.names():
            option = f"{self.pair_option} {match[1]}"
        return text if option is None else option + text[match.end() :]

    def _replaced(self, text: str, match: re.Match[str]) -> tuple[int, int, str]:
        """Returns the part of the text to replace, and its replacement."""
        end = match.end()
        if match.re is _CALL:
            end = _closed(text, end - 1)
            argument = _ASSIGNED.match(text, match.end())
            if argument is not None and _ended(text, argument) == end - 1 and (option := self._option(text, argument)):
                return match.start(), end, option
            return match.start(), end, f"{text[match.start() : end]} (in Python)"
        verb = match["verb"] or ""
        end = _ended(text, match)
        option = self._option(text, match)
        same = _SAME.match(text, end)
        if option is None:
            assignment = text[match.start("name") : end]
            if not verb:
                return match.start(), end, f"{assignment} (in Python)"
            begin = "In Python, " if verb[0].isupper() else "in Python, "
            return (
                match.start(),
                end if same is None or same["option"] is None else same.end(),
                begin + verb.lower() + assignment,
            )
        if same is not None:
            option = same["option"] or option
            end = same.end()
        return match.start(), end, f"{verb}{option}"

    def _option(self, text: str, match: re.Match[str]) -> str | None:
        """Returns the option with its value; None if the command has none, or if its value cannot be written in the shell."""
        name, value = match["name"], text[match.start("value") : _ended(text, match)]
        if name in self.flags:
            return self.options[name] if value in ("True", "") else f"no {self.options[name]}"
        if name in self.options:
            shown = _in_shell(value)
            return None if shown is None else f"{self.options[name]} {shown}".rstrip()
        if not self.pair_option or name not in self.names():
            return None
        shown = {"True": "true", "False": "false", "": "..."}.get(value, _in_shell(value))
        return None if shown is None else f"{self.pair_option} {name}={shown}"


def _first(text: str, position: int) -> re.Match[str] | None:
    """The first assignment, or call with one, that is not an option already."""
    while True:
        matches = [match for pattern in (_ASSIGNED, _CALL) if (match := pattern.search(text, position)) is not None]
        match = min(matches, key=lambda match: match.start(), default=None)
        if match is None or match.re is _CALL:
            return match
        if match["name"] not in _PLACEHOLDERS and not re.search(r"(?:-o|--option) $", text[: match.start("name")]):
            return match
        position = match.end()


def _ended(text: str, match: re.Match[str]) -> int:
    """The end of an assignment whose value may be a list or a dict."""
    return _closed(text, match.end() - 1) if match["value"] in ("[", "{") else match.end()


def _closed(text: str, position: int) -> int:
    """The position after the bracket that closes the one at ``position``."""
    depth = 0
    for i in range(position, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if not depth:
            return i + 1
    return len(text)


def _in_shell(value: str) -> str | None:
    """Writes a Python value as the value of an option; None if that is not possible."""
    if value[:1] not in ("'", '"', "[", "{"):
        return value if "." not in value or value.replace(".", "").isdecimal() else None
    try:
        plain = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return None
    if isinstance(plain, dict):
        parts = [f"{old}={new}" for old, new in plain.items() if isinstance(new, str | int)]
    else:
        parts = [str(part) for part in (plain if isinstance(plain, list) else [plain]) if isinstance(part, str | int)]
    if isinstance(plain, dict | list) and (len(parts) < len(plain) or any("," in part for part in parts)):
        return None
    return shlex.quote(",".join(parts))


def _own_names(command: str) -> frozenset[str]:
    """Names that ``--option`` of a command takes. The options of engines have the same names in Python."""
    if command == "convert":
        from actshard import convert, formats

        names = {name for format in formats.written() for name in formats.get(format).target().format_options}
        return frozenset(names | set(inspect.signature(convert).parameters)) - {
            "options",
            "src",
            "dst",
            "format",
            "progress",
        }
    if command == "tokenize":
        from actshard.tokens.formats import FormatBase

        return frozenset(option.name for kind in FormatBase.__subclasses__() for option in fields(kind))  # type: ignore[arg-type]  # subclasses are dataclasses
    return frozenset()


def calling(command: object) -> None:
    """Remembers the command that is called, for its messages."""
    _CALLED.set(Spelling.of(command))


def spelled(text: object) -> str:
    """Replaces Python arguments in a message by options of the called command."""
    called = _CALLED.get()
    return str(text) if called is None else called.spelled(str(text))


def message(error: ActshardError) -> str:
    """An error's message in the words of the shell. Paths are not changed."""
    called = _CALLED.get()
    if called is None:
        return str(error)
    detail = error.detail.translate(ESCAPES)
    where = str(error).removesuffix(detail)
    if isinstance(error, ArgumentError | DtypeError | OutOfRangeError):
        detail = called.named(detail)
    return where + called.spelled(detail)


def of_usage(error: Any) -> str:
    """The message of an error of the command line's parser."""
    text = plain = str(error.format_message())
    for phrase, instead in _PLAIN:
        plain = re.sub(phrase, instead, plain)
    causes: list[Any] = getattr(error.__cause__, "errors", list)()
    if plain != text and causes and ", found" not in plain:
        plain += f", found {causes[0].get('input')!r:.80}"
    return plain
