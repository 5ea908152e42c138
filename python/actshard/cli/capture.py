"""``actshard capture``."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from typing import Any

import typer

import actshard
from actshard.base._arguments import many
from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer, listing
from actshard.cli._app import FINE, WARNINGS
from actshard.cli._format import duration, size
from actshard.cli._options import several
from actshard.cli._progress import progress
from actshard.writing.capturing import request_files
from actshard.writing.capturing.request_files import Fold
from actshard.writing.capturing.running import OnNonfinite

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RANGE = re.compile(r"(\d{1,6})(?:-|\.\.)(\d{1,6})")
_TOLD_SECONDS = 60.0
_SHOWN = 5
"""Examples with problems that are printed."""


def model_named(words: str) -> object:
    """The model's name or folder, or the function that MODULE:FUNCTION names."""
    if not _FUNCTION.fullmatch(words):
        return words
    module, _, name = words.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 -- the folder of the shell, as with python -m
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"model: expected MODULE:FUNCTION, found {words!r:.200}: {error}") from error
    finally:
        sys.path.pop(0)


def layers_named(words: str) -> list[Layer] | str:
    """Parses ``--layers``: names, and ranges of integers."""
    if not words or words == "all":
        return "all"
    names: list[Layer] = []
    for name in several(words, "--layers"):
        ends = _RANGE.fullmatch(str(name))
        names += [name] if ends is None else range(int(ends[1]), int(ends[2]) + 1)
    return names


def tokens_named(words: str) -> str | list[int]:
    """Parses ``--tokens``: a word, or positions."""
    positions = [word.strip() for word in words.split(",")]
    return [int(word) for word in positions] if all(re.fullmatch(r"-?\d{1,9}", word) for word in positions) else words


def columns_chosen(words: str) -> list[str] | None:
    """Parses ``--columns``: names."""
    from actshard.cli.convert import columns_named

    columns = columns_named(words)
    if isinstance(columns, dict):
        if renamed := next((old for old, new in columns.items() if old != new), None):
            raise ArgumentError(f"columns: expected names, found {renamed}={columns[renamed]}: columns are not renamed")
        return list(columns)
    return columns


def nonfinite_named(words: str) -> OnNonfinite:
    """Parses ``--on-nonfinite``."""
    choices: dict[str, OnNonfinite] = {"refuse": "refuse", "count": "count"}
    if words not in choices:
        raise ArgumentError(f"on_nonfinite: expected refuse or count, found {words!r:.80}")
    return choices[words]


def part_named(words: str) -> tuple[int, int] | None:
    """Parses ``--part``: I/N, or auto."""
    if not words:
        return None
    if words == "auto":
        rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not re.fullmatch(r"\d{1,5}", rank) or not re.fullmatch(r"\d{1,5}", ranks):
            raise ArgumentError(f"part: expected integers in RANK and WORLD_SIZE, found {rank!r:.80} and {ranks!r:.80}")
        return int(rank), int(ranks)
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", words)
    if match is None:
        raise ArgumentError(f"part: expected I/N, such as 0/4, or auto, found {words!r:.80}")
    return int(match[1]), int(match[2])


def check_places(texts: str, out: str) -> None:
    """Raises ArgumentError without texts and a folder: they are optional with ``--from-vllm`` only."""
    if not out:
        raise ArgumentError(f"expected MODEL TEXTS OUT, found no {'OUT' if texts else 'TEXTS and OUT'}")


def fold(requests: str, places: list[str], to: str, *, quiet: bool, layers: list[Layer] | str, **options: Any) -> Fold:
    """Folds vLLM's request files, and prints a line a minute. ``places``: the arguments, one of which is the folder to create."""
    out, *others = places
    if any(others):
        raise ArgumentError(
            f"--from-vllm DIR: expected one argument, the folder to create, found also {others[0]!r:.200}"
        )
    report_time = time.monotonic()

    def tell(state: Fold) -> None:
        nonlocal report_time
        if not quiet and time.monotonic() - report_time >= _TOLD_SECONDS:
            report_time = time.monotonic()
            typer.echo(f"{many(state.examples, 'request')}, {len(state.leftovers)} not whole", err=True)

    names = None if isinstance(layers, str) else layers
    return request_files.fold(requests, out, to, layers=names, progress=tell, **options)


def fold_status(fold: Fold) -> int:
    """1 if files are not in the dataset, or it is unfinished."""
    return WARNINGS if fold.leftovers or not fold.finished else FINE


def show_fold(fold: Fold) -> None:
    """Prints what was folded, and which files were not."""
    earlier = f", {many(fold.resumed_at, 'example')} by earlier runs" if fold.resumed_at else ""
    state = (
        ""
        if fold.finished
        else "; unfinished: --resume continues, and --incomplete skip finishes it without other files"
    )
    typer.echo(f"{fold.path}: {many(fold.examples, 'request')}{earlier}{state}")
    if fold.leftovers:
        typer.echo(f"  {many(len(fold.leftovers), 'file')} not in the dataset:")
        for leftover in fold.leftovers[:_SHOWN]:
            typer.echo(f"    {leftover}")
        if len(fold.leftovers) > _SHOWN:
            typer.echo(f"    and {len(fold.leftovers) - _SHOWN} more")


def run(model: Any, texts: str, out: str, to: str, *, quiet: bool, **options: Any) -> actshard.Captured:
    """Runs the capture with progress."""
    with progress(os.path.basename(out.rstrip("/")) or out, quiet=quiet, unit="examples") as watch:  # noqa: PTH119 -- may be a URL
        return actshard.capture(model, texts, out, to, progress=watch.capture, **options)


def exit_status(result: actshard.Captured) -> int:
    """1 if examples are empty or values are not finite."""
    return WARNINGS if (result.problems or result.nonfinite) and not result.estimated else FINE


def show(result: actshard.Captured) -> None:
    """Prints what was written, or would be."""
    shape = f"{many(len(result.layers), 'layer')} ({listing(result.layers[:12])}{', ...' if len(result.layers) > 12 else ''})"
    what = f"{many(result.examples, 'example')}, {shape}, d_model {result.d_model}, {result.dtype}"
    rows = f"{many(result.tokens, 'token')}, {many(result.rows, 'row')} per layer, {size(result.bytes)}"
    if result.estimated:
        files = "" if result.files is None else f" in {many(result.files, 'file')}"
        time = "" if not result.seconds else f", {'about ' if result.seconds >= 1 else ''}{duration(result.seconds)}"
        typer.echo(f"would write {result.path}: {result.format}, {what}")
        typer.echo(f"  {rows}{files}{time}")
    else:
        typer.echo(f"{result.path}: {result.format}, {what}")
        earlier = f"{many(result.resumed_at, 'example')} by earlier runs; " if result.resumed_at else ""
        speed = f", {result.tokens / result.seconds:,.0f} tokens/s" if result.tokens and result.seconds else ""
        typer.echo(f"  {earlier}{rows}, {duration(result.seconds)}{speed}")
    if result.problems:
        verb = "would be" if result.estimated else "are" if len(result.problems) > 1 else "is"
        typer.echo(f"  {many(len(result.problems), 'example')} {verb} empty:")
        for problem in result.problems[:_SHOWN]:
            typer.echo(f"    {problem}")
        if len(result.problems) > _SHOWN:
            typer.echo(f"    and {len(result.problems) - _SHOWN} more: column problem")
    if result.nonfinite:
        numbers = ", ".join(map(str, result.nonfinite_examples[:_SHOWN]))
        typer.echo(f"  {many(result.nonfinite, 'row')} with NaN or infinite values, in the examples {numbers}")
