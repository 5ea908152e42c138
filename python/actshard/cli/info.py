"""``actshard info``."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from actshard import formats
from actshard.base.errors import ActshardError, FormatError, MissingFileError
from actshard.base.layers import listing
from actshard.base.location import Location
from actshard.base.storage import Remote
from actshard.cli import latents
from actshard.cli._format import one_line, show_facts, size
from actshard.latents import LatentStore
from actshard.reading.finding import find_any
from actshard.reading.store import Store
from actshard.writing.staging import origin

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


def show(store: Store | list[LatentStore]) -> None:
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
