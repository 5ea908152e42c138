"""``actshard report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actshard.cli._layers import of_store, several
from actshard.cli._places import options_named
from actshard.cli._progress import progress
from actshard.opening import open_quietly
from actshard.reporting import report


def run(path: str, out: str, layer: str, *, quiet: bool, storage_option: Sequence[str] | None, **options: Any) -> Path:
    """Writes a report and shows progress."""
    options["storage_options"] = options_named(storage_option) or None
    layers = None
    if layer:
        layers = several(layer, "--layer")
        if any(isinstance(name, int) for name in layers):  # digits name a text if the dataset's names are texts
            given = {name: options[name] for name in ("storage_options", "cache", "layout")}
            layers = of_store(layer, open_quietly(path, options["format"], "auto", **given).layers, "--layer")
    with progress("report", quiet=quiet) as watch:
        return report(path, out, layers=layers, progress=watch.stage, **options)
