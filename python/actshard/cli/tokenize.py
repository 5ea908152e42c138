"""``actshard tokenize``."""

from __future__ import annotations

import time
from typing import Any

import typer
from rich.text import Text

from actshard.base._arguments import local_path, many
from actshard.base.errors import ActshardError, ArgumentError
from actshard.base.location import Location
from actshard.cli._format import TableColumn, console, one_line, show_table
from actshard.cli._options import shown_warnings
from actshard.cli._progress import progress
from actshard.cli.convert import options_named
from actshard.tokens.building import Build, BuildOptions
from actshard.tokens.cache import TokenCache
from actshard.tokens.config import CachePlan, LmDataConfig
from actshard.tokens.writing import WRITE_HERE


def format_named(name: str, words: list[str], template: str | None, *, short: bool = True) -> dict[str, object]:
    """Builds the mapping of Levanter's ``format:`` block from command-line options."""
    row_format = {"type": name, **options_named(words, "the row format", short=short)}
    if template is not None:
        try:
            row_format["chat_template"] = Location.of(template).read_utf8()
        except ActshardError as error:
            raise ArgumentError(f"--chat-template: cannot read the file: {error.detail}", path=template) from error
    return row_format


def run(
    sources: list[str], out: str, tokenizer: str, form: dict[str, object], *, quiet: bool, **options: Any
) -> dict[str, Any]:
    """Builds one cache."""
    folder = local_path(out, "--out", WRITE_HERE)
    with progress(folder.name, quiet=quiet) as watch:
        with shown_warnings():
            build = Build(sources, folder, tokenizer or None, form, BuildOptions(**options), watch.build)
        began = time.monotonic()
        with shown_warnings("records-skipped"):
            cache = build.run()
    seconds = round(time.monotonic() - began, 2)
    return {
        **_about(cache),
        "state": "built" if build.built else "done",
        "seconds": seconds,
        "problems": build.problems,
    }


def run_config(file: str, components: list[str] | None, *, quiet: bool, **options: object) -> list[dict[str, object]]:
    """Builds all caches of a configuration."""
    config = LmDataConfig.from_yaml(file)
    summaries = []
    chosen = config.plans(components or None)
    for plan in chosen:
        plan.check_free()
    for plan in chosen:
        with progress(f"{plan.component}/{plan.split}", quiet=quiet) as watch, shown_warnings():
            summaries.append(_summary(config.build_plan(plan, watch.build, **options)))
    return summaries


def plans(file: str, components: list[str] | None) -> list[dict[str, object]]:
    """Lists the caches of a configuration without building them."""
    chosen = LmDataConfig.from_yaml(file).plans(components or None)
    for plan in chosen:
        plan.check_free()
    return [_summary(plan) for plan in chosen]


def _summary(plan: CachePlan) -> dict[str, object]:
    about = {} if plan.cache is None else _about(plan.cache)
    return {"component": plan.component, "split": plan.split, "state": plan.state, "path": str(plan.path), **about}


def _about(cache: TokenCache) -> dict[str, object]:
    skipped = sum(cache.ledger.skipped.values())
    return {"path": str(cache.path), "rows": len(cache), "tokens": cache.num_tokens, "skipped": skipped}


def show(summary: dict[str, Any]) -> None:
    """Prints the result of a build."""
    rate = (
        f", {summary['tokens'] / summary['seconds']:,.0f} tokens/s"
        if summary["state"] == "built" and summary["seconds"]
        else ""
    )
    skipped = f", {many(summary['skipped'], 'record')} skipped" if summary["skipped"] else ""
    typer.echo(
        f"{summary['path']}: {summary['state']}, {many(summary['rows'], 'document')}, {many(summary['tokens'], 'token')}"
        f"{skipped}{rate}"
    )
    for problem in summary["problems"]:
        typer.echo(f"  skipped: {problem}")


def show_plans(documents: list[dict[str, Any]]) -> None:
    """Prints the caches of a configuration as a table."""
    colours = {"built": "green", "done": "dim", "to build": "yellow", "missing": "red"}
    names = ("component", "split", "state", "documents", "tokens", "path")
    columns = [
        TableColumn(name, least={"component": 8, "path": 20}.get(name), left=name not in ("documents", "tokens"))
        for name in names
    ]
    rows = [
        (
            one_line(plan["component"], 200),
            plan["split"],
            Text(plan["state"], colours[plan["state"]]),
            *(f"{plan[name]:,}" if name in plan else "-" for name in ("rows", "tokens")),
            one_line(plan["path"], 4096),
        )
        for plan in documents
    ]
    show_table(console(), columns, rows)
