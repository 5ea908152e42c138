"""``actshard info``, ``head`` and ``verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.markup import escape

from actshard import formats
from actshard.base._arguments import counted, many
from actshard.base.errors import ActshardError, ArgumentError, FormatError, MissingFileError
from actshard.base.layers import listing, plain
from actshard.base.location import Location
from actshard.base.storage import Remote
from actshard.cli import latents
from actshard.cli._format import TableColumn, console, one_line, show_facts, show_table, size
from actshard.cli._progress import progress
from actshard.latents import LatentStore
from actshard.reading.finding import find_any
from actshard.reading.store import Store
from actshard.reading.verifying import Report, verify
from actshard.writing.staging import origin

if TYPE_CHECKING:
    import pyarrow as pa


_PACKED = 0.95
"""Ratio of stored bytes to bytes of rows, below which it is shown."""
_PADDED = 1.5
"""Ratio from which padding is shown."""


def whence(path: Any) -> dict[str, Any]:
    """Returns ``revision``, the commit of a dataset on the hub, or ``staged_from``, the source of a staged copy."""
    location = Location.at(path)
    if isinstance(location.storage, Remote):
        return {"revision": location.storage.native.revision} if location.storage.native.revision else {}
    source = origin(location.local)
    return {} if source is None else {"staged_from": source}


def about(store: Store | list[LatentStore]) -> dict[str, Any]:
    """Returns a dataset's properties as plain values."""
    if isinstance(store, list):
        return latents.about(store)
    return store.info() | whence(store.path)


def guessed(path: Any) -> Any:
    """Returns a proposed description of a folder of plain files, or of one file for the folder that contains it.

    Raises:
        FormatError: there is nothing to describe; the message contains what lies at the path.
    """
    location = Location.at(path)
    if not location.lists:
        raise MissingFileError("--guess: expected a local folder or a bucket, found a web server", path=location)
    try:
        return formats.get(formats.described()).guess(location)
    except FormatError as error:
        raise FormatError(f"--guess: {error.detail}: {_what_lies(location)}", path=location) from error


def _what_lies(location: Location) -> str:
    try:
        _, format = find_any(location)
    except ActshardError as error:
        return error.detail
    return f"it is a {format} dataset, which needs no description: actshard.open reads it"


def show_info(store: Store | list[LatentStore]) -> None:
    """Prints a dataset's properties."""
    if isinstance(store, list):
        latents.show_info(store)
        return
    about = store.info()
    provenance = whence(store.path)
    staged = provenance.get("staged_from")
    if about["tokens"] is None:
        tokens = "[dim]not counted: requires decoding every shard[/]"
    else:
        low, high = about["tokens_per_example"]
        tokens = f"{about['tokens']:,} ({low} each)" if low == high else f"{about['tokens']:,} ({low} to {high} each)"
    dtype = f"{about['dtype']} ({size(store.d_model * store.dtype.itemsize)} per row)"
    not_counted = "[dim]not counted: names cannot be listed[/]"
    shards = not_counted if about["shards"] is None else f"{about['shards']:,}"
    if about["missing_shards"]:
        shards += (
            f" [yellow]({about['missing_shards']:,} more {'is' if about['missing_shards'] == 1 else 'are'} missing)[/]"
        )
    ratio = about["ratio"]
    packed = f" ({ratio:.2f} of the rows)" if ratio is not None and ratio < _PACKED else ""
    if ratio is not None and ratio >= _PADDED:
        advice = f"; {store.contents.without_padding}" if store.contents.without_padding else ""
        packed = (
            f" [yellow]({ratio:.1f} times the rows: {1 - 1 / ratio:.0%} of the stored bytes are padding{advice})[/]"
        )
    lines: list[tuple[str, object]] = [
        ("format", about["format"]),
        ("path", escape(about["path"])),
        *([("commit", provenance["revision"])] if "revision" in provenance else []),
        *([("staged from", escape(_text(staged)))] if staged else []),
        ("model", escape(str(about["model"])) if about["model"] else "[dim]not recorded[/]"),
        ("examples", f"{about['examples']:,}"),
        ("tokens", tokens),
        ("layers", escape(listing(store.layers)) or "[dim]none: no hidden states[/]"),
        ("d_model", f"{store.d_model:,}"),
        ("dtype", dtype),
        ("shards", shards),
        ("bytes", not_counted if about["bytes"] is None else size(about["bytes"]) + packed),
        ("read by", f"{about['io']}, and decoded" if store.layers and store.rows.decodes else about["io"]),
        *([("also", ", ".join(about["also"]))] if about["also"] else []),
        ("columns", escape(", ".join(about["columns"]))),
    ]
    lines += [(key, escape(one_line(value, 100))) for key, value in about["provenance"].items() if value is not None]
    show_facts(lines, store.warnings)


def _text(staged: dict[str, Any]) -> str:
    commit = f" at commit {staged['revision']}" if staged["revision"] else ""
    layers = "" if staged["layers"] is None else f", layers {listing(staged['layers'])}"
    return f"{staged['source']}{commit}{layers}"


_LAYERS_AT_MOST = 8
_TEXT_WIDTH = 24
"""The least width of a column of texts."""
_TEXTS = ("text", "text_preview", "prompt", "response")
"""Names of text columns in the formats."""
_SHOWN = (*_TEXTS, "label", "hallu_label", "split", "sample_key")


def rows(store: Store | list[LatentStore], n: int) -> list[dict[str, Any]]:
    """Returns the first examples: text, label, number of tokens, and each layer's norm at the last token."""
    if isinstance(store, list):
        return latents.rows(store, n)
    n = min(n, store.num_examples)
    columns = [name for name in _SHOWN if name in store.contents.column_names]
    table = first_rows(store, columns, n).to_pydict() if columns else {}
    counts = store.tokens_of(range(min(n, len(store))))
    records: list[dict[str, Any]] = [
        {"example": i, **{name: table[name][i] for name in columns}, "tokens": int(counts[i])} for i in range(n)
    ]
    stored = np.flatnonzero(counts)
    for layer in store.layers:
        last = store.last_tokens(layer, stored).astype(np.float64)
        norms = dict(zip(stored.tolist(), np.linalg.norm(last, axis=1).tolist(), strict=True))
        for i, row in enumerate(records):
            row.setdefault("norms", {})[str(layer)] = norms.get(i)
    if store.labels is not None:
        for i, row in enumerate(records):
            values, times = np.unique(store.labels[i], return_counts=True)
            row["labels"] = {int(v): int(t) for v, t in zip(values, times, strict=True)}
    return records


def refuse_options_of_caches(store: Store | list[LatentStore], *options: str) -> None:
    """Checks that no option of token caches is used: only their rows are decoded.

    Args:
        store: a dataset of activations.
        options: names of the options that were used.

    Raises:
        ArgumentError: there are some.
    """
    if options:
        raise ArgumentError(
            f"{', '.join(options)}: expected a token cache, found a dataset of activations. Leave it out; `actshard top` decodes "
            "tokens.",
            path=store[0].path if isinstance(store, list) else store.path,
        )


def first_rows(store: Store, columns: list[str], n: int) -> pa.Table:
    """Reads columns of the first examples. Reads only these examples if the format supports it."""
    head = store.contents.head_columns
    return head(columns, n) if head is not None else store.read_columns(columns).slice(0, n)


def show_rows(store: Store | list[LatentStore], n: int) -> None:
    """Prints the first examples."""
    if isinstance(store, list):
        latents.show_rows(store, n)
        return
    records = rows(store, n)
    out = console()
    column_names = [name for name in _SHOWN if records and name in records[0]]
    columns = [TableColumn("example")]
    columns += [TableColumn(name, least=_TEXT_WIDTH if name in _TEXTS else None, left=True) for name in column_names]
    labelled = bool(records) and "labels" in records[0]
    columns += [TableColumn("patch labels", left=True)] * labelled
    layers = list(store.layers)
    shown = (
        layers if len(layers) <= _LAYERS_AT_MOST else layers[: _LAYERS_AT_MOST // 2] + layers[-_LAYERS_AT_MOST // 2 :]
    )
    columns += [TableColumn("tokens"), *(TableColumn(f"|h| {plain(layer)}") for layer in shown)]
    lines = []
    for row in records:
        cells = [str(row["example"])]
        cells += [
            one_line(row[name], 60 if name in _TEXTS else 16) if row[name] is not None else "-" for name in column_names
        ]
        if labelled:
            cells.append(one_line(", ".join(f"{v} x{t}" for v, t in row["labels"].items()), 30))
        norms = [row["norms"][str(layer)] for layer in shown]
        lines.append([*cells, str(row["tokens"]), *("-" if norm is None else f"{norm:.4g}" for norm in norms)])
    show_table(out, columns, lines)
    if len(shown) < len(layers):
        out.print(f"[dim]{len(layers) - len(shown)} more layers; --json prints all[/]")
    out.print(
        f"[dim]{len(records):,} of {many(store.num_examples, 'example')}; |h| is the norm of a layer's last token[/]"
    )


_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def run_verify(
    path: Location,
    format: str | None,
    deep: bool,
    layout: str | None = None,
    incomplete: Literal["error", "skip"] = "error",
    *,
    quiet: bool,
) -> Report:
    """Verifies a dataset and shows progress."""
    with progress("verifying", quiet=quiet) as watch:
        return verify(path, format=format, deep=deep, progress=watch.stage, layout=layout, incomplete=incomplete)


def show_report(report: Report) -> None:
    """Prints all findings and a summary."""
    out = console()
    for finding in sorted(report.findings, key=lambda f: list(_COLOURS).index(f.severity)):
        colour = _COLOURS[finding.severity]
        head, _, rest = str(finding).partition("] ")
        out.print(f"[{colour}]{escape(head + ']')}[/] {escape(rest)}", soft_wrap=True)
    looked = ", ".join(size(n) if what == "bytes" else counted(n, what) for what, n in report.checked.items())
    verdict = (
        "no problems"
        if report.status == 0
        else f"{many(len(report.errors), 'error')}, {many(len(report.warnings), 'warning')}"
    )
    depth = "" if report.deep else "; --deep also checks every value"
    checked = f" in {looked}" if looked else ""
    out.print(f"{escape(str(report.path))} ({report.format or 'unknown'}): {verdict}{checked}{depth}", soft_wrap=True)
