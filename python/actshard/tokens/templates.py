"""Chat templates: renders messages to text, with the assistant's parts marked."""

from __future__ import annotations

import functools
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actshard.base.errors import FormatError, MissingExtraError

if TYPE_CHECKING:
    import jinja2

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Detects whether a template marks assistant text. A plain search, as in Levanter."""
_MARK = f"\ue000{secrets.randbits(128):039d}"
"""Random, so that no text of a conversation contains it. Digits, because filters change letters."""
_BEGIN, _END = f"{_MARK}+\ue001", f"{_MARK}-\ue001"
_MARKS = re.compile(f"({re.escape(_BEGIN)}|{re.escape(_END)})")
_PIECE_OF_MARK = re.compile("\ue000[0-9]{6}|[0-9]{6}[+-]\ue001")
"""Part of a mark that a filter or a slice of the template left. Texts contain private characters, but not so."""
_NONE_IF_ABSENT = ("reasoning_content", "tool_calls")


class TemplateProblemError(Exception):
    """A template cannot render a conversation: an error in the row or in the template."""


class Message(dict[str, Any]):
    """A message: ``m.content`` equals ``m['content']``. Absent ``reasoning_content`` and ``tool_calls`` read as None."""

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        if name in _NONE_IF_ABSENT:
            return None
        raise AttributeError(name)


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    try:
        import jinja2
        from jinja2 import nodes, sandbox
        from jinja2.ext import Extension
    except ImportError as error:
        raise MissingExtraError.of("a chat template", "tokens") from error

    # jinja2's types are not installed where mypy runs, so the base class is Any.
    class Generation(Extension):  # type: ignore[misc]  # jinja2 may be missing, so that mypy sees Any
        """``{% generation %}...{% endgeneration %}``: marks the text between them."""

        tags = {"generation"}  # noqa: RUF012 -- declared this way by jinja2

        def parse(self, parser: jinja2.parser.Parser) -> object:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, extensions=[Generation]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=time.strftime)
    return environment


@functools.lru_cache(maxsize=256)
def _compiled(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise FormatError(f"chat template: line {error.lineno}: {error.message}") from error


def compile_template(template: str) -> None:
    """Checks that a template compiles.

    Raises:
        FormatError: a syntax error; the message contains the line number.
        MissingExtraError: jinja2 is not installed.
    """
    _environment()
    _compiled(template)


def render(
    template: str,
    messages: Sequence[Any],
    bos_token: str,
    eos_token: str,
    variables: Mapping[str, object],
    now: time.struct_time | None = None,
) -> list[tuple[str, bool]]:
    """Renders a conversation. Returns non-empty pieces of text in order, each with whether it is the assistant's.

    ``strftime_now`` formats ``now``; default: the time of the call.

    Raises:
        TemplateProblemError: the template raised an error, or uses an undefined variable.
    """
    import jinja2

    try:
        compiled = _compiled(template)
        typed_messages = [Message(m) for m in messages]
        time_variables = {} if now is None else {"strftime_now": lambda format: time.strftime(format, now)}
        text = compiled.render(
            messages=typed_messages,
            add_generation_prompt=False,
            bos_token=bos_token,
            eos_token=eos_token,
            **{**time_variables, **variables},
        )
    except FormatError as error:
        raise TemplateProblemError(error.detail) from error
    except jinja2.UndefinedError as error:
        why = re.sub(r"'[\w.]*\.Message object'", "a message", str(error))
        raise TemplateProblemError(f"the chat template uses an undefined value: {why}") from error
    except jinja2.TemplateError as error:
        raise TemplateProblemError(f"the chat template raised: {error}") from error
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise TemplateProblemError(f"the chat template failed on this conversation: {error}") from error
    pieces, depth = [], 0
    is_intact = not _PIECE_OF_MARK.search(_MARKS.sub("", text))
    for part in _MARKS.split(text):
        if part in (_BEGIN, _END):
            depth += 1 if part == _BEGIN else -1
            is_intact &= depth >= 0
        elif part:
            pieces.append((part, depth > 0))
    if not is_intact or depth:
        raise TemplateProblemError(
            "the chat template cuts or changes the text of a {% generation %} block, with a slice or a filter; do that inside of "
            "the block"
        )
    return pieces
