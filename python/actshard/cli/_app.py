"""The group of all commands: order and panels in ``actshard --help``, examples, and exit statuses."""

from __future__ import annotations

import json as json_module
import math
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import typer
import typer.core

from actshard.base.errors import ActshardError
from actshard.cli._messages import calling, of_usage

FINE, WARNINGS, ERRORS, COULD_NOT_RUN = 0, 1, 2, 3
CLOSED_PIPE = 141
"""Exit statuses of all commands."""

PANELS: dict[str, tuple[str, ...]] = {
    "Look": ("info", "head", "top", "stats", "report", "plot", "verify"),
    "Stream": ("bench-stream",),
    "Capture": ("capture",),
    "Convert and merge": ("convert", "merge"),
    "Token caches": ("tokenize",),
    "Plans: divide work into tasks for several machines": ("plan", "run", "status", "commit"),
    "Remote data": ("stage", "push", "cache"),
    "Setup": ("demo", "completion"),
}
"""Commands by panel, in the order of ``actshard --help``."""


_GROUPS = ("plan", "cache")


def _examples() -> dict[str, tuple[str, ...]]:
    text = (pkgutil.get_data("actshard.cli", "examples.txt") or b"").decode("utf-8")
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return {name.strip("[]"): tuple(lines) for name, *lines in parts}


EXAMPLES = _examples()
"""Examples in the help of each command, from ``examples.txt``. A test parses all of them and runs those that only read."""


_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError: typer exports only its subclass."""


class TruncatedData(Exception):  # noqa: N818 -- carries an error through click
    """Wraps an ActshardError that is an EOFError, which click would treat as the end of its input and report as "Aborted."."""

    def __init__(self, error: ActshardError) -> None:
        super().__init__(str(error))
        self.error = error


class Command(typer.core.TyperCommand):
    """A command whose help and usage show ``PATH`` and ``N`` instead of ``{path}`` and ``<int range>``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params: list[Any] = self.params
        for param in params:
            chosen = bool(getattr(param.type_descriptor, "is_choice", False))
            if param.param_type_name == "argument":
                param.metavar = param.metavar or param.name.upper()
                if not chosen:
                    param.__dict__["display_type_rich"] = lambda ctx: None  # otherwise <str> follows the name
            elif param.metavar is None and not getattr(param, "is_flag", False) and not chosen:
                param.metavar = {int: "N", float: "NUMBER"}.get(param.type_descriptor.annotation, "TEXT")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage line. typer writes required arguments in braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Commands(typer.core.TyperGroup):
    """A group of commands whose usage errors exit with ``COULD_NOT_RUN``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands, in the order of their panels."""
        order = [name for names in PANELS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else 0)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the arguments up to a subcommand's name."""
        return _usage(lambda: super(Commands, self).make_context(*args, **kwargs))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command with a name, and remembers it for its messages."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, Commands):
            calling(command)
        return name, command, rest

    def invoke(self, ctx: Any) -> object:
        """Parses the arguments of a subcommand and runs it."""
        try:
            return _usage(lambda: super(Commands, self).invoke(ctx))
        except EOFError as error:
            if isinstance(error, ActshardError):
                raise TruncatedData(error) from error
            raise


def _usage(step: Callable[[], object]) -> object:
    """Runs ``step``. click exits with 2 after a usage error, but here 2 means errors found in a dataset."""
    try:
        return step()
    except _USAGE_ERROR as error:
        error.__dict__["exit_code"] = COULD_NOT_RUN
        text = of_usage(error)
        error.__dict__["format_message"] = lambda: text
        raise


def about(name: str) -> dict[str, Any]:
    """Returns the panel and the examples of a command, as arguments of typer."""
    panel = next((panel for panel, names in PANELS.items() if name in names), None)
    examples = EXAMPLES[name]
    title = "Example:" if len(examples) == 1 else "Examples:"
    kind = Commands if name in _GROUPS else Command
    return {"cls": kind, "rich_help_panel": panel, "epilog": "\n\n".join([title, *examples])}


# Prints the result of a command, as text or as JSON.


def output(json: bool, data: Callable[[], object], pretty: Callable[[], None]) -> None:
    """Calls ``pretty``, or prints the value of ``data()`` as JSON."""
    if not json:
        pretty()
        return
    content = _finite(data())
    text = json_module.dumps(content, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a lone surrogate in a name or text, or a terminal without Unicode
        text = json_module.dumps(content, indent=2, allow_nan=False, default=str)
    typer.echo(text)


def _finite(value: object) -> object:
    """A value with null for numbers that are not finite, which JSON does not have (RFC 8259, section 6)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(element) for key, element in value.items()}
    return [_finite(element) for element in value] if isinstance(value, list | tuple) else value
