#!/usr/bin/env python
"""Writes the tables of docs/verify.md from the codes that actshard and its formats declare.

``python scripts/verify_page.py`` rewrites the page. tests/test_docs.py fails while the page differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from actshard.base import codes
from actshard.base.codes import Code
from actshard.formats import registry

PAGE = Path(__file__).parents[1] / "docs/verify.md"
BEGIN = "<!-- Written by scripts/verify_page.py. -->\n"
END = "<!-- End of the written part. -->\n"


def render(page: str) -> str:
    """The page with its tables written anew; the text before and after them stays."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_parts()) + "\n" + END + after


def _parts() -> Iterable[str]:
    yield "\n## Findings\n"
    for title, group in codes.FINDINGS.items():
        yield from _table(title, group)
    own = [format for format in registry.installed().values() if type(format).__module__.startswith("actshard.")]
    for format in sorted(own, key=lambda format: (format.order, format.name)):
        if format.findings:
            yield from _table(f"Only {format.description}", format.findings)
    yield "## Warnings of calls\n"
    yield (
        "These warnings concern a call rather than a dataset. `actshard verify` does not report them. Their classes are\n"
        "`actshard.OverflowWarning` for `overflow`, and `actshard.ActshardWarning` for all others.\n"
    )
    yield from _rows(codes.CALLS)
    for format in own:
        if format.calls:
            yield f"\n### Writing {format.description}\n"
            yield from _rows(format.calls)


def _table(title: str, group: Iterable[Code]) -> Iterable[str]:
    yield f"### {title}\n"
    yield from _rows(group)
    yield ""


def _rows(group: Iterable[Code]) -> Iterable[str]:
    yield "| code | severity | meaning | consequence | remedy |"
    yield "|---|---|---|---|---|"
    for code in group:
        texts = (code.meaning, code.consequence, code.remedy[0].upper() + code.remedy[1:] + ".")
        yield f"| `{code.name}` | {code.severity} | " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
