"""``actshard stats``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from actshard.base.errors import ActshardError
from actshard.base.layers import Layer, plain
from actshard.cli._format import TableColumn, console, one_line, show_table
from actshard.cli._progress import TaskWatch, progress
from actshard.looking.examining import MassiveRow, massive_rows, repeated_examples
from actshard.looking.saved import kept, kept_in
from actshard.looking.stats import Stats, advice_of
from actshard.looking.stats.summary import POSITION_QUANTILES, Advice
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.streaming.selection import Selection

_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
_MASSIVE, _ROWS = 3, 20
"""Maximum number of massive rows to print: per layer, and in total."""
_QUANTILES = [0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0]


def run(
    store: Store, layers: Sequence[Layer], tokens: Any, *, rows: int | None, save: bool, quiet: bool
) -> dict[Layer, Stats]:
    """Computes the statistics of layers, or reads saved ones, and shows progress."""
    stats_by_layer: dict[Layer, Stats] = {}
    for layer in layers:
        name = store.layers[store.group_of(layer)]
        if rows is None and (saved_stats := kept(store, name, Selection(tokens))) is not None:
            stats_by_layer[layer] = saved_stats
            continue
        with progress(f"layer {plain(layer)}", quiet=quiet, unit="rows") as watch:
            tell = partial(_tell, watch, store.d_model * store.dtype.itemsize)
            stats_by_layer[layer] = store.stats(layer, tokens=tokens, rows=rows, save=save, progress=tell)
    return stats_by_layer


def _tell(watch: TaskWatch, row: int, done: int, total: int) -> None:
    watch.counts(done, total, done * row)


def as_dict(stats_by_layer: dict[Layer, Stats]) -> dict[str, Any]:
    """Returns plain values: numbers, and a list of ``d_model`` values per statistic. NaN is null."""
    return {str(layer): _plain(stats) for layer, stats in stats_by_layer.items()}


def _plain(stats: Stats) -> dict[str, object]:
    quantiles = zip(_QUANTILES, stats.norms.quantile(_QUANTILES).tolist(), strict=True)
    positions = stats.norms_by_position
    values: dict[str, object] = {
        "rows": stats.rows,
        "mean_norm": _number(stats.mean_norm),
        "norm_quantiles": {str(q): _number(norm) for q, norm in quantiles},
        "norms_by_position": {
            "first": positions.first.tolist(),
            "rows": positions.rows.tolist(),
            "mean": positions.mean.tolist(),
            **{name: positions.quantile(q).tolist() for name, q in POSITION_QUANTILES.items()},
        },
        "gamma": _number(stats.gamma),
        "largest_rows": [asdict(entry) for entry in stats.largest_rows],
        "largest_columns": [asdict(entry) for entry in stats.largest_columns],
        "repeated_rows": {
            **asdict(stats.repeats),
            "fraction": stats.repeats.fraction,
            "error": stats.repeats.error,
        },
        "findings": [
            {"severity": entry.severity, "kind": entry.kind, "text": entry.text, "do": entry.do, "code": entry.code}
            for entry in stats.advice()
        ],
    }
    for name in ("mean", "std", "min", "max"):
        values[name] = [_number(value) for value in getattr(stats, name).tolist()]
    return values | {"zeros": stats.zeros.tolist(), "nan": stats.nan.tolist(), "infinite": stats.inf.tolist()}


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None  # JSON has no NaN


def show(store: Store, stats_by_layer: dict[Layer, Stats], rows: int | None = None) -> None:
    """Prints a row per layer: statistics over its columns. ``rows``: the size of the sample, if it was one."""
    _print(stats_by_layer, _examples(store, stats_by_layer), massive_rows(store, stats_by_layer, most=_MASSIVE), rows)


def show_folders(store: Store, stats_by_layer: dict[Layer, Stats], tokens: Any) -> None:
    """Prints where statistics are saved."""
    selection = Selection(tokens)
    folders = {folder for layer in stats_by_layer if (folder := kept_in(store, layer, selection)) is not None}
    for folder in sorted(folders):
        console().print(f"saved in {escape(str(folder))}; reused while the dataset is unchanged", soft_wrap=True)
    if not folders:
        console().print("[yellow]not saved:[/] the dataset's files changed while they were read")


def show_committed(arguments: Mapping[str, Any], stats_by_layer: dict[Layer, Stats]) -> None:
    """Prints the statistics of a plan with these arguments like :func:`show`.

    If the dataset cannot be read any more, equal examples and the text of tokens are left out.
    """
    try:
        with open_quietly(arguments["path"], arguments["format"], "auto", layout=arguments["layout"]) as store:
            examples, massive = _examples(store, stats_by_layer), massive_rows(store, stats_by_layer, most=_MASSIVE)
    except ActshardError as error:
        _print(stats_by_layer, [], _without_text(stats_by_layer))
        text = "the dataset cannot be read any more: equal examples and texts of tokens are left out"
        console().print(f"[yellow]note[/] {text}: {escape(str(error))}", soft_wrap=True)
        return
    _print(stats_by_layer, examples, massive)


def _examples(store: Store, stats_by_layer: dict[Layer, Stats]) -> list[Advice]:
    repeated = repeated_examples(store, stats_by_layer)
    return repeated.advice() if repeated is not None else []


def _in_words(advice: Advice) -> str:
    """An advice as text. Its code is an argument of ``store.stream``, or a command."""
    if not re.match(r"[a-z_]+=", advice.code):
        return str(advice)
    return str(replace(advice, code=f"in Python, store.stream(..., {advice.code})"))


def _without_text(stats_by_layer: dict[Layer, Stats]) -> list[MassiveRow]:
    return [
        MassiveRow(layer, row.example, row.token, row.norm, row.norm / stats.norms.median, None, None, None)
        for layer, stats in stats_by_layer.items()
        for row in stats.massive_rows[:_MASSIVE]
    ]


def _print(
    stats_by_layer: dict[Layer, Stats],
    examples: Sequence[Advice],
    massive: Sequence[MassiveRow],
    rows: int | None = None,
) -> None:
    out = console()
    _table(out, stats_by_layer)
    if rows is not None:
        out.print(f"a sample of at most {rows:,} rows of each layer: rare NaN values and massive rows may be missing")
    for advice in sorted(
        [*advice_of(stats_by_layer), *examples], key=lambda advice: list(_COLOURS).index(advice.severity)
    ):
        line = f"[{_COLOURS[advice.severity]}]{advice.severity}[/] [bold]{escape(advice.where)}:[/] {escape(_in_words(advice))}"
        out.print(line, soft_wrap=True)
    if massive:
        out.print("massive rows:", style="bold")
        _massive(out, massive)
    columns = max((len(stats.mean) for stats in stats_by_layer.values()), default=0)
    out.print(
        f"[dim]mean, min, max: over all {columns:,} columns. std: square root of the columns' mean variance. median, 99.9 %: "
        "quantiles of row norms, within 1/256. gamma: |mean row| / |std of columns|. --json prints all.[/]"
    )


def _table(out: Console, stats_by_layer: dict[Layer, Stats]) -> None:
    names = ("rows", "mean norm", "median", "99.9 %", "gamma", "mean", "std", "min", "max", "NaN", "infinite")
    rows = []
    for layer, stats in stats_by_layer.items():
        with np.errstate(invalid="ignore"):
            rms = float(np.sqrt(stats.variance.mean())) if len(stats.variance) else float("nan")
        norms = (stats.mean_norm, stats.norms.median, float(stats.norms.quantile(0.999)))
        values = (
            float(stats.mean.mean()),
            rms,
            float(stats.min.min(initial=np.inf)),
            float(stats.max.max(initial=-np.inf)),
        )
        rows.append(
            [
                one_line(plain(layer), 200),
                f"{stats.rows:,}",
                *(f"{value:.4g}" for value in norms),
                _gamma(stats, rms),
                *(f"{value:.4g}" for value in values),
                f"{int(stats.nan.sum()):,}",
                f"{int(stats.inf.sum()):,}",
            ]
        )
    show_table(out, [TableColumn("layer", least=8), *map(TableColumn, names)], rows)


def _gamma(stats: Stats, std: float) -> str:
    """Formats gamma. It is not a number if all rows are equal; then the mean is infinitely long in units of the deviation."""
    if std == 0 and np.isfinite(stats.mean).all() and stats.mean.any():
        return "infinite"
    return f"{stats.gamma:.4g}"


def _massive(out: Console, rows: Sequence[MassiveRow]) -> None:
    """Prints a table of massive rows, with the text of their tokens if it is known."""
    columns = [TableColumn("layer", least=8), *map(TableColumn, ("example", "token", "norm", "x median"))]
    cells = []
    for row in rows[:_ROWS]:
        text = repr(row.text) if row.text is not None else f"id {row.id}" if row.id is not None else "-"
        numbers = (f"{row.example:,}", f"{row.token:,}", f"{row.norm:.4g}", f"{row.times:,.0f}")
        cells.append([one_line(plain(row.layer), 200), *numbers, one_line(text, 40)])
    show_table(out, [*columns, TableColumn("text", least=16, left=True)], cells, keys=3)
