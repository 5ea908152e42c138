"""The words of the project: prose of the docs, docstrings, comments and messages, with the line where each stands."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(path.relative_to(HOME)) for path in sorted((HOME / "docs").rglob("*.md")) if path.name != "benchmarks.md"),
)
"""Pages that people write: docs/benchmarks.md has the names of dated records."""
PYTHON = tuple(sorted((HOME / "python").rglob("*.py"))) + tuple(sorted((HOME / "python").rglob("*.pyi")))
RUST = tuple(sorted(p for crate in ("core", "remote", "py") for p in (HOME / "rust" / crate / "src").rglob("*.rs")))

_RUST = re.compile(
    r"""(?P<comment>//[^\n]*)|(?P<block>/\*.*?\*/)|r(?P<hashes>\#*)"(?P<raw>.*?)"(?P=hashes)|b?"(?P<text>(?:[^"\\]|\\.)*)"|'(?:[^'\\]|\\.[^']*)'""",
    re.DOTALL,
)


_ARGUMENT = re.compile(r"^ {8,}\w+(, \w+)*: ")
"""The names of arguments and attributes in a docstring, which are code."""


@dataclass(frozen=True)
class Prose:
    """A piece of text. ``kind``: ``doc``, ``docstring``, ``comment`` or ``message`` (any other text with a space in it)."""

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(HOME)}:{self.line}: {self.text.strip()}"


def everywhere() -> Iterator[Prose]:
    """All prose of the docs, the package and the crates."""
    for name in DOCS:
        yield from markdown(HOME / name)
    for path in PYTHON:
        yield from python(path)
    for path in RUST:
        yield from rust(path)


def markdown(path: Path) -> Iterator[Prose]:
    """Lines of a page without code: neither fenced blocks nor spans, nor addresses of links."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip():
            yield Prose(path, number, "doc", _without_code(re.sub(r"\]\([^)]*\)", "]", line)))


def python(path: Path) -> Iterator[Prose]:
    """Docstrings, comments and texts of a module, line by line."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(path, token.start[0], "comment", _without_code(token.string))
    tree = ast.parse(source)
    docstrings = {
        id(statement.value)
        for node in ast.walk(tree)
        for body in [getattr(node, "body", None)]
        if isinstance(body, list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            kind = "docstring" if id(node) in docstrings else "message"
            for k, line in enumerate(node.value.splitlines()):
                yield Prose(path, node.lineno + k, kind, _without_code(_ARGUMENT.sub("", line)))


def rust(path: Path) -> Iterator[Prose]:
    """Comments and texts of a module."""
    source = path.read_text()
    for found in _RUST.finditer(source):
        line = source.count("\n", 0, found.start()) + 1
        if comment := found["comment"] or found["block"]:
            yield Prose(path, line, "docstring" if comment[:3] in ("///", "//!") else "comment", _without_code(comment))
        elif " " in (text := found["raw"] or found["text"] or ""):
            for k, part in enumerate(text.splitlines()):
                yield Prose(path, line + k, "message", _without_code(part))


def _without_code(text: str) -> str:
    """The text with names in backticks left out, which may be any word."""
    return re.sub(r"`+[^`]*`+", "`", text)
