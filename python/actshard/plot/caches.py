"""Plots of token caches, of what :func:`actshard.tokens.looking.look` found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from actshard.plot.activations import style_unless, table_of
from actshard.plot.opened import PlottedCache, look_of
from actshard.plot.style import axes, below, log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RANKS = 400
"""Most points of the curve of frequencies."""


def lengths(found: PlottedCache, *, ax: Axes | None = None, table: bool = False) -> Any:
    """Histogram of the lengths of documents, in tokens.

    Args:
        found: an open token cache, or its path or URL; or what :func:`actshard.tokens.looking.look` returned.
        ax: axes to draw into.
        table: return a table with columns ``low``, ``high`` (lengths from low to below high) and ``documents``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    found = look_of(found)
    token_counts = found.lengths
    most = int(token_counts.max(initial=1))
    # Whole numbers; wide bins for long documents.
    edges = np.unique(np.round(np.geomspace(1, most + 1, 41)).astype(np.int64))
    edges = np.append([0], edges)
    counts, _ = np.histogram(token_counts, edges)
    if table:
        return table_of(low=edges[:-1], high=edges[1:], documents=counts)
    with style_unless(ax):
        ax = axes(ax)
        ax.stairs(counts[1:], edges[1:], fill=True, color="C0", alpha=0.85)
        log(ax, "x")
        if token_counts.size:
            middle = float(np.median(token_counts))
            ax.axvline(max(middle, 1), color="C1", linewidth=1, linestyle="--", label=f"median {middle:,.0f}")
            ax.legend()
        empty = f" ({int(counts[0]):,} empty)" if counts[0] else ""
        ax.set_xlabel("tokens in a document")
        ax.set_ylabel("documents")
        ax.set_title(f"Lengths of documents{empty}")
        return ax


def frequency(found: PlottedCache, *, ax: Axes | None = None, table: bool = False) -> Any:
    """Occurrences of token ids, by rank.

    Args:
        found: an open token cache, or its path or URL; or what :func:`actshard.tokens.looking.look` returned.
        ax: axes to draw into.
        table: return a table with columns ``rank`` (1 is the commonest), ``id`` and ``occurrences``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    found = look_of(found)
    order = np.argsort(-found.counts, kind="stable")[: found.distinct]
    if table:
        return table_of(rank=np.arange(1, len(order) + 1), id=order, occurrences=found.counts[order])
    with style_unless(ax):
        ax = axes(ax)
        if len(order):
            ranks = np.unique(np.round(np.geomspace(1, len(order), _RANKS)).astype(np.int64))
            ax.plot(ranks, found.counts[order][ranks - 1], color="C0")
        log(ax, "x")
        log(ax, "y")
        ax.set_xlabel("rank of the token id")
        ax.set_ylabel("occurrences")
        ax.set_title(f"Token frequency ({found.distinct:,} ids)")
        return ax


def packing(found: PlottedCache, *, ax: Axes | None = None, table: bool = False) -> Any:
    """Share of positions that hold tokens when documents are packed into examples of common lengths.

    Args:
        found: an open token cache, or its path or URL; or what :func:`actshard.tokens.looking.look` returned.
        ax: axes to draw into.
        table: return a table with columns ``length``, ``examples``, ``fill`` and ``cut`` (tokens of too long documents).

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    found = look_of(found)
    fills = found.fills
    if table:
        return table_of(
            length=[x.length for x in fills],
            examples=[x.examples for x in fills],
            fill=[x.fill for x in fills],
            cut=[x.cut for x in fills],
        )
    with style_unless(ax):
        ax = axes(ax)
        ticks = np.arange(len(fills))
        shares = np.array([100 * x.fill for x in fills]), np.array([100 * x.cut / max(found.tokens, 1) for x in fills])
        for i, (what, values) in enumerate(zip(("positions with tokens", "tokens cut off"), shares, strict=True)):
            bars = ax.bar(ticks + 0.4 * i - 0.2, np.nan_to_num(values), width=0.38, color=f"C{i}", label=what)
            ax.bar_label(bars, [f"{x:.0f}" if np.isfinite(x) else "" for x in values], fontsize=7)
        ax.set_xticks(ticks, [f"{x.length:,}" for x in fills])
        ax.set_ylim(0, 112)
        ax.set_xlabel("tokens per example")
        ax.set_ylabel("percent")
        ax.set_title("Packing of whole documents")
        below(ax, ncols=2)
        return ax
