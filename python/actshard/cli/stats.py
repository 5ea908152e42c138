"""``actshard stats``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from actshard.cli._format import console
from actshard.cli._progress import progress
from actshard.layers import Layer, plain
from actshard.stats import Stats
from actshard.store import Store


def run(store: Store, layers: Sequence[Layer], tokens: Any, *, quiet: bool) -> dict[Layer, Stats]:
    """Computes the statistics of layers and shows progress."""
    made: dict[Layer, Stats] = {}
    for layer in layers:
        with progress(f"layer {plain(layer)}", quiet=quiet) as watch:
            made[layer] = store.stats(layer, tokens=tokens, progress=watch.counts)
    return made


def as_dict(found: dict[Layer, Stats]) -> dict[str, Any]:
    """Returns plain values: numbers, and a list of ``d_model`` values per statistic. NaN is null."""
    return {str(layer): _plain(stats) for layer, stats in found.items()}


def _plain(stats: Stats) -> dict[str, Any]:
    made: dict[str, Any] = {"rows": stats.rows, "mean_norm": _number(stats.mean_norm)}
    for name in ("mean", "std", "min", "max"):
        made[name] = [_number(value) for value in getattr(stats, name).tolist()]
    return made | {"nan": stats.nan.tolist(), "infinite": stats.inf.tolist()}


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None  # JSON has no NaN


def show(store: Store, found: dict[Layer, Stats]) -> None:
    """Prints a row per layer: statistics over its columns."""
    grid = Table(box=None, pad_edge=False)
    for name in ("layer", "rows", "mean norm", "mean", "std", "min", "max", "NaN", "infinite"):
        grid.add_column(name, justify="right")
    for layer, stats in found.items():
        with np.errstate(invalid="ignore"):
            rms = float(np.sqrt(stats.variance.mean())) if len(stats.variance) else float("nan")
        values = (
            stats.mean_norm,
            float(stats.mean.mean()),
            rms,
            float(stats.min.min(initial=np.inf)),
            float(stats.max.max(initial=-np.inf)),
        )
        grid.add_row(
            escape(plain(layer)),
            f"{stats.rows:,}",
            *(f"{value:.4g}" for value in values),
            f"{int(stats.nan.sum()):,}",
            f"{int(stats.inf.sum()):,}",
        )
    out = console()
    out.print(grid)
    out.print(
        f"[dim]over all {store.d_model:,} columns: std is the root of the mean variance of a column; --json prints columns[/]"
    )
