"""``actshard report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, UnknownFormatError
from actshard.cli._layers import has_range, of_store, several
from actshard.cli._places import options_named
from actshard.cli._progress import progress
from actshard.looking.reporting import ENDS, WrittenReport, written
from actshard.looking.reporting.page import OF_DATA
from actshard.plot.style import check_name
from actshard.reading.finding import existing_anywhere
from actshard.reading.opening import open_quietly, token_cache_at
from actshard.streaming.selection import Selection


def run(
    path: str, out: str, layer: str, *, quiet: bool, storage_option: Sequence[str] | None, **options: Any
) -> WrittenReport:
    """Writes a report and shows progress."""
    check_name(Path(_arguments.local_path(out, "--out")), ENDS, "--out")
    options["storage_options"] = options_named(storage_option) or None
    if layer or options["rows"] is not None or options["tokens"] != "content":
        _refuse_caches(path, layer, options)
    layers = None
    if layer:
        layers = several(layer, "--layer")
        if has_range(layer) or any(
            isinstance(name, int) for name in layers
        ):  # digits name a text if the dataset's names are texts
            arguments = {name: options[name] for name in ("storage_options", "cache", "layout")}
            try:
                layers = of_store(layer, open_quietly(path, options["format"], "auto", **arguments).layers, "--layer")
            except UnknownFormatError:
                raise
            except OF_DATA:  # the report of a dataset that cannot be opened has no layers, and lists the damage
                layers = None
    selection = Selection(options.pop("tokens"))
    with progress("report", quiet=quiet) as watch:
        return written(path, out, layers=layers, selection=selection, progress=watch.stage, **options)


def _refuse_caches(path: str, layer: str, options: dict[str, Any]) -> None:
    """Checks that the options have a use.

    Raises:
        ArgumentError: they are those of datasets, and there is a token cache.
    """
    location = existing_anywhere(path, options["storage_options"], options["cache"])
    if options["layout"] is not None or token_cache_at(location, options["format"]) is None:
        return
    if layer:
        raise ArgumentError("--layer: token caches have no layers. Leave it out.", path=location)
    if options["rows"] is not None:
        raise ArgumentError("--rows: token caches have no rows of layers to sample. Leave it out.", path=location)
    raise ArgumentError("--tokens: the report of a token cache covers all tokens. Leave it out.", path=location)
