"""``actshard tokenize``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from actshard.cli._format import console
from actshard.cli.convert import options_named
from actshard.errors import ArgumentError
from actshard.tokens.building import Build, Options, Progress, Watch
from actshard.tokens.cache import TokenCache
from actshard.tokens.config import CachePlan, LmDataConfig

_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


def format_named(name: str, words: list[str], template: Path | None) -> dict[str, Any]:
    """A format and its options as Levanter's block."""
    made = {"type": name, **options_named(words)}
    if template is not None:
        try:
            made["chat_template"] = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"--chat-template: cannot read it: {error}", path=template) from error
    return made


@contextmanager
def watching(what: str, *, quiet: bool) -> Iterator[Watch | None]:
    """Shows documents and tokens per second and the time that is left, on stderr."""
    if quiet:
        yield None
        return
    began = time.monotonic()
    out = Console(stderr=True)

    def rates(now: Progress) -> str:
        seconds = max(time.monotonic() - began, 1e-3)
        skipped = f", {now.skipped:,} skipped" if now.skipped else ""
        return f"{now.rows / seconds:,.0f} docs/s, {now.tokens / seconds:,.0f} tokens/s{skipped}"

    if not out.is_terminal:
        told = began

        def line(now: Progress) -> None:
            nonlocal told
            seconds = time.monotonic() - began
            if time.monotonic() - told < _EVERY:
                return
            told = time.monotonic()
            left = f", {seconds / now.bytes * (now.bytes_total - now.bytes):.0f} s left" if now.bytes else ""
            print(
                f"{what}: {now.stage}, {now.files_done} of {now.files} files, {now.rows:,} docs, {now.tokens:,} tokens, "
                f"{rates(now)}{left}",
                file=sys.stderr,
                flush=True,
            )

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Bar(*columns, console=out, transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def draw(now: Progress) -> None:
            described = f"{what} [dim]{now.stage}, {now.files_done}/{now.files} files[/]"
            bar.update(task, completed=now.bytes, total=now.bytes_total or None, rate=rates(now), description=described)

        yield draw


def run(
    sources: list[str], out: Path, tokenizer: str, form: dict[str, Any], *, quiet: bool, **options: Any
) -> dict[str, Any]:
    """Builds one cache."""
    with watching(out.name, quiet=quiet) as watch:
        build = Build(sources, out, tokenizer or None, form, Options(**options), watch)
        began = time.monotonic()
        cache = build.run()
    seconds = round(time.monotonic() - began, 2)
    return {
        **_about(cache),
        "state": "built" if build.built else "done",
        "seconds": seconds,
        "problems": build.problems,
    }


def run_config(file: Path, components: list[str] | None, *, quiet: bool, **options: Any) -> list[dict[str, Any]]:
    """Builds every cache of a configuration."""
    config = LmDataConfig.from_yaml(file)
    made = []
    for plan in config.plans(components or None):
        with watching(f"{plan.component}/{plan.split}", quiet=quiet) as watch:
            made.append(_told(config.build_plan(plan, watch, **options)))
    return made


def plans(file: Path, components: list[str] | None) -> list[dict[str, Any]]:
    """What a configuration asks for, without building anything."""
    return [_told(plan) for plan in LmDataConfig.from_yaml(file).plans(components or None)]


def _told(plan: CachePlan) -> dict[str, Any]:
    about = {} if plan.cache is None else _about(plan.cache)
    return {"component": plan.component, "split": plan.split, "state": plan.state, "path": str(plan.path), **about}


def _about(cache: TokenCache) -> dict[str, Any]:
    own = cache.ledger.extra.get("actshard", {})
    skipped = sum(own.get("skipped", {}).values()) if isinstance(own.get("skipped"), dict) else 0
    return {"path": str(cache.path), "rows": len(cache), "tokens": cache.num_tokens, "skipped": skipped}


def show(done: dict[str, Any]) -> None:
    """Prints what became of a build."""
    rate = f", {done['tokens'] / done['seconds']:,.0f} tokens/s" if done["state"] == "built" and done["seconds"] else ""
    skipped = f", {done['skipped']:,} records skipped" if done["skipped"] else ""
    typer.echo(f"{done['path']}: {done['state']}, {done['rows']:,} documents, {done['tokens']:,} tokens{skipped}{rate}")
    for problem in done["problems"]:
        typer.echo(f"  skipped: {problem}")


def show_plans(made: list[dict[str, Any]]) -> None:
    """Prints every cache of a configuration."""
    colours = {"built": "green", "done": "dim", "to build": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False)
    for name in ("component", "split", "state", "documents", "tokens", "path"):
        table.add_column(name, justify="right" if name in ("documents", "tokens") else "left")
    for plan in made:
        counts = [f"{plan[name]:,}" if name in plan else "-" for name in ("rows", "tokens")]
        state = f"[{colours[plan['state']]}]{plan['state']}[/]"
        table.add_row(escape(plan["component"]), plan["split"], state, *counts, escape(plan["path"]))
    console().print(table)
