"""Findings in words."""

from __future__ import annotations

from dataclasses import dataclass

from actshard.base.errors import ESCAPES

_TEXT = 300


@dataclass(frozen=True)
class Advice:
    """A finding in words: what was found, its consequence, and what to do.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        where: such as ``layer 20``; empty: the layer of the statistics.
        text: what was found, and its consequence: one or more sentences.
        do: what to do, as a sentence; empty: nothing.
        code: an argument or command; empty: none.
        kind: advice of one kind about many layers is joined.
        size: how bad it is, compared with advice of its kind.
    """

    severity: str
    where: str
    text: str
    do: str = ""
    code: str = ""
    kind: str = ""
    size: float = 0.0

    def __str__(self) -> str:
        do = f"{self.do.removesuffix('.')}: {self.code}" if self.do and self.code else self.do or self.code
        return f"{self.text} {do}".strip()


def cut(text: object, most: int = _TEXT) -> str:
    """A text with escaped control characters, cut."""
    shown = str(text).translate(ESCAPES)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
