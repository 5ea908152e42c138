"""The package's own source files as syntax trees: each file is parsed once, however many rules look at it."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import actshard

PACKAGE = Path(actshard.__file__).parent
Node = TypeVar("Node", bound=ast.AST)


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a source file. Callers must not change it."""
    # Trees hold no garbage, but half a million new objects start many collections: half of the time of parsing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a source file, as ``ast.walk`` yields them."""
    return tuple(ast.walk(parse(path)))


def nodes_of(path: Path, kind: type[Node]) -> Iterator[Node]:
    """The nodes of one class."""
    return (node for node in nodes(path) if isinstance(node, kind))


@pytest.fixture(scope="module", autouse=True)
def forget_sources() -> Iterator[None]:
    """Frees the trees after a test file: they would slow every later garbage collection of the process."""
    yield
    parse.cache_clear()
    nodes.cache_clear()
