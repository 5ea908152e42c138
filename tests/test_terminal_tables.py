"""Tables of the command line in narrow terminals: no number is cut, and no line is longer than the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import actshard
from actshard.cli._format import TableColumn, show_table
from conftest import GOLDEN
from shell import run_command

WIDTHS = (60, 80, 100, 120)
CACHE = GOLDEN / "levanter/supervised_llama3style/cache"


def shown(width: int, *words: str | Path) -> str:
    """Output of a command in a terminal of this width."""
    done = run_command(*words, COLUMNS=str(width), TTY_COMPATIBLE="1", TERM="xterm", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with long names, numbers with signs and exponents, NaN values, massive rows."""
    path = tmp_path_factory.mktemp("wide") / "d"
    layers = ["blocks.11.hook_resid_post", "blocks.2.hook_mlp_out"]
    rows = np.random.default_rng(0).normal(size=(40, 2, 30, 16)) * -1.2345e-6
    rows[3, 0, 5] *= -98765
    rows[4, 1, 7, 2] = np.nan
    with actshard.create(path, "npy", layers=layers, d_model=16) as writer:
        writer.append(rows.astype(np.float32))
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_is_cut(width: int, wide: Path) -> None:
    for words in (("stats", wide, "-q"), ("convert", wide, "--dry-run"), ("head", CACHE, "-n", "3")):
        table = shown(width, *words).split("lost")[0]
        numbers = re.findall(r"(?<!\S)[-+]?\d[\d,.e+-]*(?!\S)", shown(1000, *words).split("lost")[0])
        assert len(numbers) > 15
        assert set(numbers) <= set(table.split())
        if words[0] != "head":  # that of a cache prints the first ids of a row
            assert "…" not in table


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_are_not_wider_than_the_terminal(width: int, wide: Path) -> None:
    table = shown(width, "stats", wide, "-q").split("\nerror")[0]
    assert max(map(len, table.splitlines())) <= width
    assert table.count("layer") == table.count("\n\n") + 1


CELLS = st.text("0123456789.,-e", min_size=1, max_size=12)


@settings(max_examples=200)
@given(st.data(), st.integers(30, 130), st.integers(1, 3), st.integers(0, 9), st.integers(0, 3))
def test_every_cell_is_printed_whole(data: st.DataObject, width: int, keys: int, others: int, count: int) -> None:
    columns = [TableColumn("layer", least=8), *(TableColumn(f"k{i}") for i in range(1, keys))]
    columns += [TableColumn(f"c{i}") for i in range(others)] + [TableColumn("text", least=10, left=True)]
    firsts = st.text("abc.", min_size=1, max_size=40)
    rows = [
        [data.draw(firsts), *(data.draw(CELLS) for _ in columns[1:-1]), data.draw(st.text("xyz[] ", max_size=40))]
        for _ in range(count)
    ]
    if keys > 1:  # a name, two keys that are numbers, and a number need at most 8 + 4 * 2 + 3 * 12 characters
        width = max(width, 60)
    out = io.StringIO()
    show_table(Console(file=out, width=width, highlight=False), columns, rows, keys=keys)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert {cell for row in rows for cell in row[1:-1]} <= words
    assert {column.name for column in columns} <= words
