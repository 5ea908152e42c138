"""Draws docs/pictures/concepts.svg: example, layer, token, row, shard and window.

python docs/pictures/concepts.py
"""

from __future__ import annotations

from pathlib import Path

STYLE = """<style>
:root { --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #8c959f; --a: #b6d7ff; --b: #ffd8a8; --c: #c3e6cb;
--mark: #cf222e }
@media (prefers-color-scheme: dark) {
:root { --paper: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #656c76; --a: #1f4f8b; --b: #7d4e14; --c: #1f5f36;
--mark: #ff7b72 } }
svg { background: var(--paper) } text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.head { font-weight: 600 } .dim { fill: var(--dim); font-size: 12px } .mark { fill: var(--mark) }
rect { stroke: var(--line) } .a { fill: var(--a) } .b { fill: var(--b) } .c { fill: var(--c) } .none { fill: none }
.row { stroke: var(--mark); stroke-width: 2.5 } .arrow { stroke: var(--mark); stroke-width: 1.5; fill: none }
.pool { fill: none; stroke: var(--ink); stroke-dasharray: 4 3 }
</style>"""
CELL = 26
LENGTHS = (4, 2, 5)
PICKED = (2, 3)  # an example and a token
COLOURS = "abc"
BATCHES = ((2, 0, 1, 2, 0, 2), (0, 2, 1, 0, 2))
"""Examples of the rows of two batches, in the order of a shuffle."""


def text(x: float, y: float, said: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{said}</text>'


def cell(x: float, y: float, kind: str) -> str:
    """A row of the dataset."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}"/>'


def dataset(x: float, y: float) -> list[str]:
    """Examples of several tokens, on two sheets, one for each layer."""
    made = [text(x, y, "dataset", "head"), text(x, y + 18, "all layers of all tokens of all examples", "dim")]
    for sheet, layer in ((1, 8), (0, 5)):
        left, top = x + 78 + 22 * sheet, y + 64 - 22 * sheet
        made.append(text(left + 5 * CELL + 8, top + 16, f"layer {layer}", "dim"))
        for example, tokens in enumerate(LENGTHS):
            made += [cell(left + CELL * t, top + 40 * example, COLOURS[example]) for t in range(tokens)]
    for example in range(len(LENGTHS)):
        made.append(text(x, y + 82 + 40 * example, f"example {example}"))
    made += [text(x + 84 + CELL * t, y + 186, str(t), "dim") for t in range(5)]
    made.append(text(x, y + 186, "token", "dim"))
    example, token = PICKED
    made.append(cell(x + 78 + CELL * token, y + 64 + 40 * example, f"{COLOURS[example]} row"))
    return made


def shards(x: float, y: float) -> list[str]:
    """Rows of a layer in two files."""
    made = [text(x, y, "shards", "head"), text(x, y + 18, "files that contain the rows of layer 5", "dim")]
    rows = [(e, t) for e, tokens in enumerate(LENGTHS) for t in range(tokens)]
    for file, (first, stop) in enumerate(((0, 6), (6, 11))):
        top = y + 44 + 58 * file
        made.append(text(x, top - 4, f"shard {file}", "dim"))
        for place, (example, token) in enumerate(rows[first:stop]):
            kind = COLOURS[example] + (" row" if (example, token) == PICKED else "")
            made.append(cell(x + CELL * place, top + 2, kind))
    made.append(text(x, y + 158, "row: d_model contiguous numbers in a file;", "mark"))
    made.append(text(x, y + 176, "here example 2, layer 5, token 3", "mark"))
    return made


def stream(x: float, y: float) -> list[str]:
    """A window, and the batches that come from it."""
    made = [text(x, y, "stream", "head"), text(x, y + 18, "the rows of layer 5 in a shuffled order", "dim")]
    made.append(
        f'<rect class="pool" x="{x - 6:g}" y="{y + 32:g}" width="{6 * CELL + 12}" height="{2 * CELL + 14}" rx="4"/>'
    )
    order = [e for batch in BATCHES for e in batch]
    for place, example in enumerate(order):
        made.append(cell(x + CELL * (place % 6), y + 38 + CELL * (place // 6), COLOURS[example]))
    made.append(text(x, y + 120, "window: rows in memory (memory=)", "dim"))
    for number, batch in enumerate(BATCHES):
        left = x + 100 * number
        made += [
            f'<rect class="{COLOURS[e]}" x="{left + 15 * i:g}" y="{y + 142:g}" width="15" height="15"/>'
            for i, e in enumerate(batch)
        ]
        made.append(text(left, y + 176, f"batch {number}", "dim"))
    return made


def picture() -> str:
    """The picture."""
    parts = [*dataset(16, 28), *shards(318, 28), *stream(618, 28)]
    parts.append('<path class="arrow" d="M199 180C250 112 384 92 408 128" marker-end="url(#tip)"/>')
    tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path class="mark" d="M0 0L8 4L0 8z"/></marker></defs>'
    title = "<title>A dataset of examples, layers and tokens; its rows in shards; a stream that shuffles them in a window</title>"
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 872 232" role="img">'
    return "\n".join([head, title, STYLE, tip, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
