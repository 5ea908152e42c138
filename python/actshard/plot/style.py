"""Colours, axes and files of plots.

Plots in a page have its colours, light or dark: they are drawn with placeholder colours, which :func:`inline` replaces by
variables of the page. Files have a white background. The same data give the same bytes: ids are salted, and no date is written.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from actshard.base.errors import ESCAPES, ArgumentError, ArgumentTypeError, MissingExtraError
from actshard.base.layers import Layer, plain
from actshard.base.work.files import write_bytes
from actshard.reading.opening import open
from actshard.reading.store import Store
from actshard.tokens.cache import TokenCache, open_cache
from actshard.tokens.looking import CacheLook, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SERIES = ("#0b5fa5", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490")
"""Blue, orange, green, purple, brown, cyan: distinct for the colour-blind in this order."""
_MARKS = ("#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06")
_TEXT, _LINE = "#0a0a11", "#0a0a12"
_PAGE = {_TEXT: "var(--text)", _LINE: "var(--line)"} | {mark: f"var(--c{i})" for i, mark in enumerate(_MARKS, 1)}
"""Placeholders and what replaces them."""
_SEPARATORS = re.compile(r"([./_:-])")
"""What separates the parts of a layer's name."""
_WIDTH = 64
"""Characters in a line of a legend, with 5 for each line's mark."""
FORMATS = (".svg", ".png")


def library() -> Any:
    """Matplotlib.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError.of("a plot", "report") from error
    return matplotlib


@contextmanager
def style(*, page: bool = False) -> Iterator[None]:
    """The settings of matplotlib under which plots are made and written. ``page``: for :func:`inline`."""
    matplotlib = library()
    text, line = (_TEXT, _LINE) if page else ("#1f2328", "#d0d7de")
    with matplotlib.rc_context(
        {
            "axes.prop_cycle": matplotlib.cycler(color=list(_MARKS if page else SERIES)),
            "axes.edgecolor": line,
            "axes.labelcolor": text,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 9,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.unicode_minus": True,
            "figure.dpi": 160,
            "figure.facecolor": "none" if page else "white",
            "axes.facecolor": "none",
            "font.family": ["DejaVu Sans"],
            "font.size": 8,
            "grid.color": line,
            "grid.linewidth": 0.5,
            "legend.frameon": False,
            "legend.fontsize": 7.5,
            "lines.linewidth": 1.4,
            "path.simplify": True,
            "savefig.facecolor": "none" if page else "white",
            "svg.fonttype": "none",
            "svg.hashsalt": "actshard",
            "text.color": text,
            "text.parse_math": False,  # names of layers may have dollar signs
            "text.usetex": False,
            "xtick.color": text,
            "ytick.color": text,
        }
    ):
        yield


def axes(ax: Axes | None) -> Axes:
    """The given axes, or new ones, on a figure of their own.

    Raises:
        ArgumentTypeError: not axes, such as the array of several that ``subplots`` returns.
    """
    if ax is not None:
        if not hasattr(ax, "set_xlabel"):
            raise ArgumentTypeError(f"ax: expected matplotlib axes, found {type(ax).__name__}")
        return ax
    library()
    from matplotlib.figure import Figure

    return Figure(figsize=(4.2, 2.6), layout="constrained").subplots()


def label(layer: Layer, most: int = 28) -> str:
    """A layer's name on an axis: control characters are escaped, and long names cut at their beginning, which is often the same."""
    text = plain(layer).translate(ESCAPES)
    return text if len(text) <= most else "…" + text[1 - most :]


def labels(names: Sequence[Layer], most: int = 28) -> tuple[list[str], str]:
    """Names of layers for an axis or a legend without the parts that all share, and "layer" with these parts."""
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        return [label(name, most) for name in names], "layer"
    parts = [_SEPARATORS.split(plain(name)) for name in names]  # parts and separators in turn
    least = min(map(len, parts))
    begin = _shared(parts, least - 1)
    end = _shared([x[::-1] for x in parts], least - 1 - begin)
    what = "".join([*parts[0][:begin], "*", *parts[0][len(parts[0]) - end :]])
    shown = [label("".join(x[begin : len(x) - end]), most) for x in parts]
    return shown, f"layer {label(what, 60)}" if begin or end else "layer"


def _shared(parts: Sequence[Sequence[str]], most: int) -> int:
    """How many parts with their separators all begin with; at most ``most``."""
    n = 0
    while n + 2 <= most and len({tuple(x[n : n + 2]) for x in parts}) == 1:
        n += 2
    return n


def below(ax: Axes, ncols: int) -> None:
    """Puts the legend below the axes, in few columns if its texts are long; into the axes if names below them are turned."""
    if any(text.get_rotation() for text in ax.get_xticklabels()):
        ax.legend(loc="best")
        return
    shown = [len(text) for text in ax.get_legend_handles_labels()[1]]
    while ncols > 1 and any(sum(shown[i : i + ncols]) + 5 * ncols > _WIDTH for i in range(0, len(shown), ncols)):
        ncols -= 1
    ax.legend(ncols=ncols, loc="upper center", bbox_to_anchor=(0.5, -0.24), borderaxespad=0, columnspacing=1)


def number(value: float, _: object = None) -> str:
    """A number on an axis: 0.01, 300, 20k, 5M, 1e-12."""
    size = abs(value)
    for unit, text in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if unit <= size < 1e12:
            return f"{value / (1e3 if text == 'k' else unit):g}{text}"
    return f"{value:g}"


def log(ax: Axes, which: str, scale: str = "log", **options: object) -> None:
    """Gives the x or y axis a logarithmic scale with plain numbers: matplotlib writes formulas, which are switched off."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    (ax.set_xscale if which == "x" else ax.set_yscale)(scale, **options)
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_formatter(NullFormatter())


def whole(ax: Axes) -> None:
    """Gives the x axis marks at whole numbers; a single one has space on both sides."""
    from matplotlib.ticker import MaxNLocator

    low, high = ax.dataLim.intervalx
    if low == high:
        ax.set_xlim(low - 0.5, high + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def check_name(file: Path, ends: Sequence[str], argument: str) -> None:
    """Checks the end of a file's name.

    Raises:
        ArgumentError: the name has none of these ends.
    """
    if file.suffix.lower() not in ends:
        expected = " or ".join(ends)
        raise ArgumentError(f"{argument}: expected a name that ends with {expected}, found {file.name!r:.80}")


def save(ax: Axes, file: Path) -> None:
    """Writes the figure of axes as SVG or PNG. The same figure gives the same bytes with the same matplotlib.

    Raises:
        ArgumentError: the file's name ends with neither ``.svg`` nor ``.png``.
    """
    check_name(file, FORMATS, "out")
    kind = file.suffix.lower()
    buffer = io.BytesIO()
    # Without the version and the date.
    none = {"Date": None, "Creator": None} if kind == ".svg" else {"Software": None}
    cast("Figure", ax.figure).savefig(buffer, format=kind[1:], metadata=none)
    write_bytes(file, buffer.getvalue())


_IDS = re.compile(r'\b(id="|href="#|url\(#)')


def inline(ax: Axes, name: str, title: str) -> str:
    """The figure of axes as an ``<svg>`` element of a page, made under ``style(page=True)``.

    Args:
        ax: the axes.
        name: a prefix of ids; each figure of a page has its own.
        title: text for screen readers, as escaped HTML.
    """
    buffer = io.StringIO()
    cast("Figure", ax.figure).savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # after the XML declaration and the document type, which names a URL
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="([\d. ]+)"', head)
    assert box is not None, head
    rest = _IDS.sub(lambda match: f"{match[1]}{name}-", rest.replace("xlink:href=", "href="))
    for mark, colour in _PAGE.items():
        rest = rest.replace(mark, colour)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{title}">{rest.strip()}'


# What plots draw: open stores and token caches, or paths that they open.


Plotted = Store | str | os.PathLike[str]
"""A dataset to plot."""
PlottedCache = CacheLook | TokenCache | str | os.PathLike[str]
"""A token cache to plot."""


def store_of(source: Plotted) -> Store:
    """Returns the store, or opens the dataset at a path or URL.

    Raises:
        ArgumentTypeError: the argument has another type.
        Errors of :func:`actshard.open`.
    """
    if isinstance(source, Store):
        return source
    if isinstance(source, str | os.PathLike):
        return open(source)
    also = ""
    if isinstance(source, TokenCache | CacheLook):
        also = ". Token caches have the plots lengths, frequency and packing"
    elif hasattr(source, "as_store"):
        also = ". Pass its as_store()"
    raise ArgumentTypeError(f"store: expected an open store or a path, found {type(source).__name__}{also}")


def look_of(source: PlottedCache) -> CacheLook:
    """Returns what was counted in a token cache; counts it if the cache or its path or URL is given.

    Raises:
        ArgumentTypeError: the argument has another type.
        Errors of :func:`actshard.tokens.open_cache` and :func:`actshard.tokens.looking.look`.
    """
    if isinstance(source, CacheLook):
        return source
    if isinstance(source, TokenCache):
        return look(source)
    if isinstance(source, str | os.PathLike):
        return look(open_cache(source))
    raise ArgumentTypeError(f"found: expected a token cache, its path or look(cache), found {type(source).__name__}")
