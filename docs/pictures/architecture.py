"""Draws docs/pictures/architecture.svg: rooms, floors and the data flow.

python docs/pictures/architecture.py
"""

from __future__ import annotations

from pathlib import Path

STYLE = """<style>
:root { --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #8c959f; --py: #ddf4ff; --rs: #fff1e5; --mark: #cf222e }
@media (prefers-color-scheme: dark) {
:root { --paper: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #656c76; --py: #12304f; --rs: #4a2c10; --mark: #ff7b72 } }
svg { background: var(--paper) } text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.head { font-weight: 600 } .dim { fill: var(--dim); font-size: 12px } .mark { fill: var(--mark); font-weight: 600 }
rect { stroke: var(--line) } .py { fill: var(--py) } .rs { fill: var(--rs) } .none { fill: none; stroke-dasharray: 4 3 }
.arrow { stroke: var(--mark); stroke-width: 1.5; fill: none }
</style>"""

BOXES = (  # x, y, width, kind, title, what it does
    (130, 20, 200, "py", "cli, compat", "commands, drop-ins"),
    (340, 20, 200, "py", "torch, jax, hf", "tensors and datasets"),
    (550, 20, 250, "py", "plan, runners", "verbs in tasks; Slurm, Ray, Dask"),
    (130, 82, 430, "py", "converting, verifying, merging, writing, stats", "verbs: one each for all formats"),
    (570, 82, 230, "py", "store, stream", "the public objects"),
    (130, 144, 250, "py", "formats/NAME", "files, metadata, columns"),
    (390, 144, 410, "py", "location, errors, arguments", "base of the Python package"),
    (130, 222, 670, "rs", "rust/py", "the binding: converts arguments and results, releases the GIL"),
    (130, 284, 200, "rs", "layout, parse", "address of a row; safe parsers"),
    (340, 284, 220, "rs", "rows, gather", "sort, merge, distribute, cast"),
    (570, 284, 230, "rs", "stream, scan, write", "order, read ahead, statistics"),
    (130, 346, 200, "rs", "codec", "decodes units once"),
    (340, 346, 460, "rs", "source", "mapped, pread, memory, remote (rust/remote) with its disk cache"),
)
STEPS = (
    ("1", 366, 160), ("2", 316, 300), ("3", 546, 300), ("4", 786, 362), ("5", 546, 322), ("6", 786, 300), ("7", 786, 238),
)  # fmt: skip
FLOORS = ((20, "entry points"), (82, "verbs"), (144, "formats"), (222, "binding"), (284, "core"), (346, "bytes"))


def picture() -> str:
    """The picture."""
    parts = []
    for x, y, width, kind, title, said in BOXES:
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="52" rx="4"/>')
        parts.append(f'<text class="head" x="{x + 10}" y="{y + 22}">{title}</text>')
        parts.append(f'<text class="dim" x="{x + 10}" y="{y + 41}">{said}</text>')
    parts += [f'<text class="dim" x="16" y="{y + 31}">{said}</text>' for y, said in FLOORS]
    parts += [f'<text class="mark" x="{x}" y="{y}" text-anchor="end">{number}</text>' for number, x, y in STEPS]
    parts.append('<path class="arrow" d="M130 208.5H800" stroke-dasharray="6 4"/>')
    parts.append('<text class="mark" x="16" y="213">Python / Rust</text>')
    parts.append(
        '<text class="dim" x="130" y="430">Each room uses only rooms below it. Numbers: steps of the data flow.</text>'
    )
    title = "<title>Rooms and floors of actshard: Python above, Rust below; each room uses only rooms below it</title>"
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 816 446" role="img">'
    return "\n".join([head, title, STYLE, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
