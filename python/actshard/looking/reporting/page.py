"""The parts of a report, as the template prints them. All texts are plain; the template escapes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from actshard.base._arguments import counted, many
from actshard.base.errors import ActshardError, FormatError, MissingFileError, NotAFileError, UnsupportedError
from actshard.base.layers import Layer
from actshard.formats.report import Finding, Report
from actshard.looking.stats.summary import Advice, cut
from actshard.plot.style import inline, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_FINDINGS = 40
MOST_ROWS = 150
MOST_MASSIVE = 40
MOST_TOKENS = 160
"""Tokens that are shown of an example."""
FEW_COLUMNS = 4
"""Columns that most phones show without scrolling."""
_SHORT = 14
_SEVERITIES = ("error", "warning", "note")
_STEPS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 100.0)
"""Norms divided by the median at which the colour of a token changes."""


OF_DATA = (FormatError, MissingFileError, NotAFileError, UnsupportedError)
"""Errors of damaged datasets, which have a report nevertheless. ``UnknownFormatError`` means that there is no dataset."""


@dataclass(frozen=True)
class Word:
    """A token of a text: what is printed, the number of its colour, and its title."""

    text: str
    colour: int
    title: str


@dataclass(frozen=True)
class ShownExample:
    """An example, token by token."""

    name: str
    text: str
    words: list[Word]
    more: int


@dataclass(frozen=True)
class Grid:
    """A table: names of columns, rows of cells, rows left out, and the columns that are texts."""

    columns: list[str]
    rows: list[list[str]]
    more: int = 0
    texts: tuple[int, ...] = (0,)

    @property
    def has_short_names(self) -> bool:
        """Whether the first column is narrow enough to stay in place while the others are scrolled."""
        return len(self.columns) > FEW_COLUMNS and all(len(row[0]) <= _SHORT for row in self.rows)

    def full(self) -> Grid:
        """The table without columns whose cells are all empty."""
        columns = [i for i in range(len(self.columns)) if not self.rows or any(row[i] for row in self.rows)]
        rows = [[row[i] for i in columns] for row in self.rows]
        texts = tuple(position for position, i in enumerate(columns) if i in self.texts)
        return Grid([self.columns[i] for i in columns], rows, self.more, texts)


@dataclass
class Page:
    """A report."""

    title: str
    kind: str
    facts: list[tuple[str, str]]
    layers: list[Layer] = field(default_factory=list)
    """Names of the layers that the report covers."""
    advice: list[Advice] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)
    """SVG elements and captions."""
    grids: list[tuple[str, str, Grid]] = field(default_factory=list)
    """Headings, explanations and tables."""
    samples: list[ShownExample] = field(default_factory=list)
    samples_of: str = ""
    how: list[tuple[str, str]] = field(default_factory=list)
    how_sampled: list[tuple[str, str]] = field(default_factory=list)
    took: list[tuple[str, float]] = field(default_factory=list)
    """Parts of the work, and the seconds that they took."""
    checks: Grid | None = None
    checked: str = ""

    def plot(self, name: str, title: str, draw: Callable[[], Axes], caption: str = "") -> None:
        """Adds a plot."""
        with style(page=True):
            self.plots.append((inline(draw(), f"p{len(self.plots)}", escape(title)), caption))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time of a part of the work."""
        began = time.monotonic()
        yield
        self.took.append((what, time.monotonic() - began))

    def damaged(self, what: str, error: ActshardError, where: str = "dataset") -> None:
        """Adds an error of the dataset, or of some layers."""
        text = f"{what}: {cut(error).removesuffix('.')}."
        do = "Fix what the check of the files names."
        self.advice.append(Advice("error", where, text, do, kind="damage"))

    def sorted_advice(self) -> list[Advice]:
        """The advice, worst first, in the order in which it was found."""
        return sorted(self.advice, key=lambda advice: _SEVERITIES.index(advice.severity))[:MOST_FINDINGS]

    def verified(self, report: Report) -> None:
        """Adds verify's findings."""
        findings = sorted(report.findings, key=lambda finding: _SEVERITIES.index(finding.severity))
        rows = [[x.severity, x.code, _where(x, report), cut(_said(x)), cut(x.remedy)] for x in findings[:MOST_ROWS]]
        if rows:
            rest = max(len(findings) - MOST_ROWS, 0)
            self.checks = Grid(["severity", "code", "where", "found", "what to do"], rows, rest, (0, 1, 2, 3, 4)).full()
        counts = {what: sum(x.severity == what for x in findings) for what in _SEVERITIES}
        amounts = ", ".join(counted(n, what) for what, n in report.checked.items())
        depth = "every value" if report.deep else "files and metadata"
        verdict = ", ".join(many(n, what) for what, n in counts.items() if n) or "No problems"
        self.checked = f"{verdict}. Checked {depth}" + (f": {amounts}." if amounts else ".")
        if report.errors:
            self.advice.append(
                Advice(
                    "error",
                    "files",
                    f"verify found {many(len(report.errors), 'error')}. Reads may fail or return other data.",
                    "See the remedy of each, in the check of the files.",
                    "actshard verify --deep",
                    kind="verify",
                )
            )


def _where(finding: Finding, report: Report) -> str:
    """A finding's file, below the dataset's path, and the place in it."""
    file = str(finding.path).removeprefix(str(report.path)).lstrip("/")
    return cut(", ".join(x for x in (file, finding.place) if x), 120)


def _said(finding: Finding) -> str:
    return f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found


def colour_of(norm: float, median: float) -> int:
    """The number of a norm's colour, 0 (small) to 9 (more than 100 medians); 10 for a norm that is not finite."""
    if not math.isfinite(norm):
        return 10
    if not median > 0:
        return 3
    return sum(norm / median >= step for step in _STEPS)


def steps() -> Sequence[tuple[int, str]]:
    """Colours and their meaning, for the legend."""
    low = [f"< {_STEPS[0]:g}", *(f"{a:g}" for a in _STEPS)]
    return [*enumerate(low), (10, "not finite")]


def quoted(text: str, most: int = 40) -> str:
    """A text in quotes, cut; of several spaces one and their number."""
    if len(text) > 1 and not text.strip(" "):
        return f"{' '!r} x {len(text):,}"
    return cut(repr(text), most)


def figure(value: float) -> str:
    """A number in a table."""
    return f"{value:.4g}" if math.isfinite(value) else "-"


def share(part: float) -> str:
    """A part of the whole in a table."""
    return f"{part:.2%}" if part >= 0.0001 else "0" if part <= 0 else "< 0.01%"
