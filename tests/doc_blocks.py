"""Runs the Python blocks of documentation pages and compares results with their comments.

A block may begin with ``# needs: torch, ...``: it runs only in tests of peers. A block after a line ``<!-- not run: reason -->``
does not run. The comment behind an expression is checked if it begins with a shape or a value, up to a ``;``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A block of Python: its code, the libraries that it needs, and why it is not run, if it is not."""

    code: str
    needs: tuple[str, ...]
    reason: str | None


def blocks(page: str) -> list[Block]:
    """The blocks of a page."""
    made = []
    for found in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        needs = re.match(r"# needs: (.*)\n", found["code"])
        made.append(Block(found["code"], tuple(needs[1].split(", ")) if needs else (), found["reason"]))
    return made


def pages() -> list[str]:
    """README.md and the pages of docs that have blocks of Python."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found if blocks(str(path.relative_to(ROOT)))]


def described(shape: str) -> Any:
    """The shape or value that a comment begins with; None if it begins with words."""
    try:
        return ast.literal_eval(shape.partition(";")[0].strip())
    except (SyntaxError, ValueError):
        return None


def checked_blocks(
    page: str, given: Mapping[str, Any], heavy: bool = False, instead: Iterable[tuple[str, str]] = ()
) -> int:
    """Runs a page's blocks and compares results with their comments; returns the number of comparisons.

    Args:
        page: its path.
        given: names that the blocks use.
        heavy: run the blocks that begin with ``# needs:`` and a list of libraries, too; else leave them out.
        instead: texts of the blocks, and what stands for them here: a path instead of a repository's name.
    """
    names: dict[str, Any] = {"np": np, "actshard": actshard, **given}
    checked = 0
    for block in blocks(page):
        if block.reason or (block.needs and not heavy):
            continue
        for library in block.needs:
            pytest.importorskip(library)
        code = block.code
        for text, other in instead:
            code = code.replace(text, other)
        checked += run(code, names)
    return checked


def run(code: str, names: dict[str, Any]) -> int:
    """Runs a block; returns the number of comparisons."""
    checked = 0
    for statement in ast.parse(code).body:
        source = ast.get_source_segment(code, statement) or ""
        comment = code.splitlines()[(statement.end_lineno or 0) - 1].partition("# ")[2]
        if not isinstance(statement, ast.Expr):
            exec(compile(source, "<block>", "exec"), names)
            continue
        found, expected = eval(source, names), described(comment)
        if expected is not None or comment == "None":
            checked += 1
            if isinstance(expected, list) and not isinstance(found, list):
                found = found.tolist() if hasattr(found, "tolist") else list(found)
            shape = hasattr(found, "shape") and isinstance(expected, tuple)
            assert (found.shape if shape else found) == expected, source
    return checked
