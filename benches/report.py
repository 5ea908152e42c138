"""Writes docs/benchmarks.md and its pictures from records, and short tables of README.md and docs/replace.

python -m benches.report [RECORD ...]

A record is a name in benches/record, such as 2026-11-21-1220. Of several, later ones replace rows of earlier ones. Without
names: the newest record that has rows of every group, or else those that the page names now. Tables of other pages are
written between their markers, if they have them; docs/pictures/ten.svg shows the same rows. tests/test_docs.py fails while the
page, a picture or such a table differ from the records that they name. Standard library only.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).parent / "record"
PAGE, PICTURE, README = ROOT / "docs/benchmarks.md", ROOT / "docs/pictures/benchmarks.svg", ROOT / "README.md"
BARS = ROOT / "docs/pictures/ten.svg"
BEGIN, END = "<!-- Written by python -m benches.report. -->\n", "<!-- End of the written part. -->\n"
HEADERS = ["workload", "state", "peer", "peer's median", "actshard's median", "ratio", "target", "met", "note"]

GROUPS = (
    ("Remote", r"remote:"),
    ("The stores people have", r"stores:"),
    ("Larger than memory", r"larger|dataset of \d"),
    ("Token caches", r"tokens:"),
    ("Streams", r"stream:|saev items|compat"),
    ("Zarr", r"zarr"),
    ("Pickle shards", r"pickle:"),
    ("Writing, converting, verifying", r"write:|convert:|verify"),
    ("Memory", r"memory beside|lasting memory"),
    ("Rows and tables", ""),
)
"""Groups of workloads, by the beginnings of their names; the first that fits."""
ORDER = ("Rows and tables", "Streams", "Larger than memory", "The stores people have", "Zarr", "Pickle shards",
         "Writing, converting, verifying", "Token caches", "Remote", "Memory")  # fmt: skip
FULL = set(ORDER) - {"Larger than memory", "The stores people have", "Remote"}

LIMITS = (
    r"copy|copyto|\bfio\b|\bdd\b|\bdisk\b|files alone|encode_batch|decoding alone|plain reads|the link|all of the time"
)
"""Peers that are limits of the machine, or parts of the work, rather than other ways to do it."""
OURS = r"\bours?\b|actshard|^pread$|^one\b|^1$|^bfloat16 to|^ideal|^one process"
"""Peers that are actshard itself."""

TEN = (
    ("16,384 random rows (3 KiB)", "cold", "numpy", ""),
    ("  against a memory copy", "hot, reused output", "np.copyto", "the same rows, against a memory copy"),
    ("a whole pooled layer (98 MB)", "hot", "lmprobe.load_activations", ""),
    ("stream: shuffled (window)", "hot", "saev ShuffledDataLoader", ""),
    ("stream: shuffled (window)", "cold", "fio, sequential", ""),
    ("zarr: 16 slices at once", "hot, fresh output", "tensorstore", ""),
    ("pickle: one .pkl.gz shard of 105 MB", "hot", "gzip + pickle", ""),
    ("write: saev, 3.6 GB", "durable", "np.memmap", ""),
    ("tokens: build text, 100 MB", "1 file", "Levanter", ""),
    ("tokens: windows L=1024 B=32", "plain int64", "Levanter warm", ""),
)
"""Rows of README.md: workload, state, peer, and a name if the workload's own does not stand alone."""

REPLACED = {
    "saev": (r"stream|saev", r"saev"),
    "lmprobe": ("", r"lmprobe"),
    "zarr": (r"zarr|stream: a layer of a zarr", r"zarr-python|tensorstore|the text's"),
    "pickle": (r"pickle|stream: a layer of .*pkl", r"gzip|isal|the text's"),
    "levanter": (r"tokens:", r"Levanter"),
}
"""Pages of docs/replace: workloads, and peers."""

WHY = """## What limits these numbers

- *Random rows, hot.* Memory bandwidth is the limit. With AVX-512, large outputs are written past the caches, which is faster than
  np.copyto.
- *Random rows, cold.* The disk is the limit.
- *Several layers.* Three aligned layers move the same bytes as three passes.
- *Zarr training loop.* It moves 26 GB at memory speed, with one thread or eight.
- *gzip.* Inflating one shard of random numbers and computing its SHA-256 takes 0.3 s of CPU time, so two cores need 0.6 s for four
  shards. Compressible values cannot be inflated by several threads; there isal is faster than actshard.
- *GPU.* On a machine with 16 cores and an H200, the stream fills pinned memory with 42 GB/s of shuffled rows and the link copies
  55 GB/s. A copy of shuffled rows cannot be faster than the first. Training an SAE is limited by the device.
- *Fresh memory.* The first write to new memory costs more than the copy. actshard reuses up to 256 MiB of freed buffers; `out=`
  guarantees reuse.""".splitlines()
"""Causes, which records do not contain."""

Result = dict[str, Any]


def number(value: float | None) -> str:
    """Three digits, or all digits of large numbers."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cells(row: Result) -> list[str]:
    """A result as a table row."""
    met = {True: "yes", False: "no", None: "-"}[row["met"]]
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    peer, ours = (
        "-" if row[side] is None else f"{number(row[side])} {row['unit']}".rstrip()
        for side in ("peer_value", "ours_value")
    )
    return [row["workload"], row["state"], row["peer"], peer, ours, ratio, row["target"], met, row["note"]]


def group_of(row: Result) -> str:
    """The group of a workload."""
    return next(name for name, begins in GROUPS if re.match(begins, row["workload"].strip()))


def load(names: Iterable[str]) -> tuple[list[Result], list[Result]]:
    """Rows, and records without rows."""
    rows: dict[tuple[str, ...], Result] = {}
    records = []
    for name in names:
        record = json.loads((RECORD / f"{name}.json").read_text(encoding="utf-8"))
        above, seen = "", Counter[tuple[str, ...]]()
        for row in record.pop("rows"):
            # A name that begins with spaces continues the one above it. Some rows differ by their notes only.
            above = above if row["workload"].startswith(" ") else row["workload"]
            key = (above, row["workload"], row["state"], row["peer"])
            seen[key] += 1
            rows[(*key, str(seen[key]))] = row
        records.append({**record, "name": name})
    return list(rows.values()), records


def newest_full() -> str | None:
    """The newest record with rows of every group."""
    for path in sorted(RECORD.glob("*.json"), reverse=True):
        if {group_of(row) for row in load([path.stem])[0]} >= FULL:
            return path.stem
    return None


def named(page: str) -> list[str]:
    """Records that a page names."""
    return re.findall(r"\(\.\./benches/record/([\w-]+)\.json\)", page)


def machine(record: Result) -> str:
    """One line: the record, its date, the machine and the versions."""
    about = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    return (
        f"- [{record['name']}](../benches/record/{record['name']}.json), {record['when'][:10]}: {about['cpu']}, {about['cores']} "
        f"cores, {about['memory_gb']} GB, {about['system']}, Python {about['python']}, actshard {about['actshard']['version']}, "
        f"{versions}"
    )


def page(names: list[str]) -> str:
    """docs/benchmarks.md."""
    rows, records = load(names)
    with_target = [row for row in rows if row["met"] is not None]
    met = sum(row["met"] for row in with_target)
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m benches.report`; do not edit. `make bench` runs all workloads, peers and actshard in one session",
        "on the same files: outputs are compared before anything is timed, engines take turns, and values are medians. Ratios are",
        'above 1 if actshard is faster. "Hot" is data in the page cache; "cold" is after it was emptied. Times of virtual machines',
        "vary by up to 1.7 between runs: compare ratios, which are taken within one run.",
        "",
        "`make bench BENCH_ARGS='--only random_hot,casts --no-record'` runs some workloads; `--help` lists them. Their data (about",
        "14 GB) are made once in `benches/data`, or `$ACTSHARD_BENCH_DATA`. Peers that are not installed are left out.",
        "",
        f"{met} of {len(with_target)} targets are met. Rows without one only inform, or meet a limit of the machine that",
        "another row measures.",
        "",
        "![Ratios of all workloads](pictures/benchmarks.svg)",
        "",
        *WHY,
        "",
        "## Machine",
        "",
        *(machine(record) for record in records),
        *_durations(records),
    ]
    for group in ORDER:
        mine = [row for row in rows if group_of(row) == group]
        if mine:
            lines += ["", f"## {group}", "", *_table(mine)]
    return "\n".join(lines) + "\n"


def _durations(records: list[Result]) -> Iterable[str]:
    """How long each workload took, where records contain it; data that had to be made are included."""
    seconds: dict[str, float] = {}
    for record in records:
        seconds.update(record.get("seconds", {}))
    if seconds:
        longest = sorted(seconds.items(), key=lambda item: -item[1])
        yield from (
            "",
            "## How long it takes",
            "",
            "Seconds of a workload, with all peers, in the newest record that contains it (earlier",
        )
        yield from (
            "records have no such times):",
            "",
            ", ".join(f"{name} {number(took)}" for name, took in longest) + ".",
        )


def _table(rows: Iterable[Result]) -> Iterable[str]:
    yield "| " + " | ".join(HEADERS) + " |"
    yield "|" + "---|" * len(HEADERS)
    for row in rows:
        first, *rest = (cell.replace("|", "\\|") for cell in cells(row))
        first = f"... {first.strip()}" if first.startswith(" ") else first
        yield "| " + " | ".join([first, *(cell.strip() for cell in rest)]) + " |"


def ten(names: list[str]) -> Iterable[tuple[str, Result]]:
    """README.md's rows, with their names."""
    rows, _ = load(names)
    for workload, state, peer, name in TEN:
        found = [r for r in rows if (r["workload"], r["state"], r["peer"]) == (workload, state, peer) and r["ratio"]]
        for row in found[:1]:
            yield name or workload, row


def short(names: list[str]) -> str:
    """The table of README.md."""
    lines = ["| workload | state | peer | peer | actshard | ratio |", "|---|---|---|---|---|---|"]
    for name, row in ten(names):
        _, state, peer, theirs, ours, ratio, *_ = cells(row)
        bold = f"**{ratio}**" if row["met"] is not False else f"{ratio} (target {row['target']})"
        lines.append(f"| {name} | {state} | {peer} | {theirs} | {ours} | {bold} |")
    return "\n".join(lines) + "\n"


def replaced(page: str, names: list[str]) -> str:
    """The table of a page of docs/replace."""
    workloads, peers = REPLACED[page]
    lines = ["| workload | state | peer | peer | actshard | ratio |", "|---|---|---|---|---|---|"]
    above = ""
    for row in load(names)[0]:
        above = above if row["workload"].startswith(" ") else row["workload"]
        if row["ratio"] and re.match(workloads, above) and re.search(peers, row["peer"]):
            lines.append(f"| {above} | " + " | ".join(cells(row)[1:6]) + " |")
    return (
        "\n".join(lines)
        + "\n\nOn 2 cores; [Benchmarks](../benchmarks.md) has the machine, the versions and the notes.\n"
    )


def bars(names: list[str]) -> str:
    """docs/pictures/ten.svg: README.md's rows as bars from 1, on a logarithmic axis."""
    parts, y, one = [], 74, _place(1)
    for name, row in ten(names):
        x = _place(row["ratio"])
        left, wide = min(x, one), max(abs(x - one), 1)
        parts.append(f'<text x="{LEFT - 26}" y="{y}" text-anchor="end">{escape(name)}</text>')
        about = escape(f"{row['state']}; {row['peer']}")
        parts.append(f'<text class="dim" x="{LEFT - 26}" y="{y + 14}" text-anchor="end">{about}</text>')
        parts.append(f'<rect class="peer" x="{left:g}" y="{y - 9}" width="{wide:g}" height="18" rx="2"/>')
        parts.append(f'<text class="head" x="{max(x, one) + 8:g}" y="{y + 5}">{row["ratio"]:.3g}x</text>')
        y += 2 * LINE
    axis = []
    for power in range(LEAST, MOST + 1):
        x = _place(10.0**power)
        kind = "one" if power == 0 else "grid"
        axis.append(f'<path class="{kind}" d="M{x:g} 48V{y - 12}"/>')
        axis.append(f'<text class="dim" x="{x:g}" y="42" text-anchor="middle">{10.0**power:g}x</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {y}" role="img">'
    title = "<title>Speed of actshard relative to other tools and to limits of the machine</title>"
    above = f'<text class="head" x="{one:g}" y="18">speed relative to the tool or limit in grey (1x: equal)</text>'
    return "\n".join([head, title, STYLE, above, *axis, *parts, "</svg>"]) + "\n"


def renewed(text: str, table: str) -> str:
    """A page with its table written anew, if it has markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + BEGIN + table + END + after if begin and end else text


def tables(names: list[str]) -> dict[Path, str]:
    """Tables of other pages, by page."""
    return {README: short(names), **{ROOT / f"docs/replace/{page}.md": replaced(page, names) for page in REPLACED}}


STYLE = """<style>
:root { --paper: #fff; --ink: #1f2328; --dim: #59636e; --grid: #d1d9e0; --peer: #0969da; --limit: #bc4c00; --one: #59636e }
@media (prefers-color-scheme: dark) {
:root { --paper: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --grid: #3d444d; --peer: #4493f8; --limit: #f0883e; --one: #9198a1 } }
svg { background: var(--paper) }
text { font: 12px system-ui, sans-serif; fill: var(--ink) } .dim { fill: var(--dim) } .head { font-weight: 600 }
.grid { stroke: var(--grid) } .one { stroke: var(--one); stroke-width: 1.5 }
.peer { fill: var(--peer) } .limit { fill: none; stroke: var(--limit); stroke-width: 2 }
</style>"""
LEFT, WIDTH, LINE = 300, 520, 18
LEAST, MOST = -1, 3  # powers of ten


def picture(names: list[str]) -> str:
    """docs/pictures/benchmarks.svg: the ratio of each workload to each of its peers, on a logarithmic axis."""
    rows, _ = load(names)
    lines: dict[str, dict[str, list[Result]]] = {}
    above = ""
    for row in rows:
        above = above if row["workload"].startswith(" ") else row["workload"]
        if row["ratio"] and row["peer"] and not re.search(OURS, row["peer"]):
            lines.setdefault(group_of(row), {}).setdefault(above, []).append(row)
    parts, y = [], 64
    for group in (name for name in ORDER if name in lines):
        parts.append(f'<text class="head" x="8" y="{y + 4}">{escape(group)}</text>')
        y += LINE
        for workload, found in lines[group].items():
            name = workload if len(workload) < 46 else workload[:44] + "..."
            parts.append(f'<text x="20" y="{y + 4}">{escape(name)}</text>')
            parts += [_dot(row, y) for row in found]
            y += LINE
        y += 6
    axis = []
    for power in range(LEAST, MOST + 1):
        x = _place(10.0**power)
        kind = "one" if power == 0 else "grid"
        axis.append(f'<path class="{kind}" d="M{x:g} 48V{y - 12}"/>')
        axis.append(f'<text class="dim" x="{x:g}" y="42" text-anchor="middle">{10.0**power:g}x</text>')
    legend = (
        '<circle class="peer" cx="14" cy="12" r="4"/><text x="24" y="16">against other tools</text>'
        '<circle class="limit" cx="164" cy="12" r="4"/>'
        '<text x="174" y="16">against a limit of the machine, or a part of the work</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {y}" role="img">'
    title = f"<title>actshard relative to its peers; records {', '.join(names)}</title>"
    return "\n".join([head, title, STYLE, legend, *axis, *parts, "</svg>"]) + "\n"


def _place(ratio: float) -> float:
    inside = min(max(math.log10(ratio), LEAST), MOST)
    return round(LEFT + (inside - LEAST) / (MOST - LEAST) * WIDTH, 1)


def _dot(row: Result, y: int) -> str:
    kind = "limit" if re.search(LIMITS, row["peer"]) else "peer"
    said = escape(f"{row['state']}, {row['peer']}: {row['ratio']:.2f}x")
    return f'<circle class="{kind}" cx="{_place(row["ratio"]):g}" cy="{y}" r="4"><title>{said}</title></circle>'


def main() -> None:
    """Writes the page, the pictures and the tables of other pages."""
    full = newest_full()
    names = sys.argv[1:] or ([full] if full else named(PAGE.read_text(encoding="utf-8")))
    PAGE.write_text(page(names), encoding="utf-8")
    PICTURE.write_text(picture(names), encoding="utf-8")
    BARS.write_text(bars(names), encoding="utf-8")
    for path, table in tables(names).items():
        path.write_text(renewed(path.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(f"written from {', '.join(names)}")


if __name__ == "__main__":
    main()
