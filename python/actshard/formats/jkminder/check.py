"""Checks of ActivationCaches; see docs/formats/jkminder.md."""

from __future__ import annotations

import re

from actshard.base._arguments import stored
from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.jkminder.files import CONFIG
from actshard.formats.jkminder.read import ActivationCache
from actshard.formats.report import Report

_SHARD = re.compile(r"shard_([0-9]+)\.memmap")


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks sizes of shards, totals, equal shards in all layers, tokens, and bounds of sequences."""
    cache = report.faults.parse(root, lambda: ActivationCache(root, report.faults))
    if cache is None:
        return
    for number, layer in enumerate(cache.layers):
        tell("layers", number, len(cache.layers))
        row = layer.d_model * stored(layer.dtype).itemsize
        for shard in layer.shards:
            report.count("files")
            with report.noting(shard.path):
                size, need = shard.path.regular("read").size, shard.rows * row
                report.count("bytes", size)
                if size != need:
                    code = "truncated" if size < need else "too-long"
                    report.add(code, shard.path, f"{size} bytes", f"{need}, as its .meta states")
        total = layer.config.value.get("total_size")
        if total != cache.total:
            report.add(
                "count-claim",
                layer.path / CONFIG,
                total,
                f"{cache.total}, the rows of its shards",
                "field 'total_size'",
            )
        with report.noting(layer.path):
            for entry in layer.path.entries("shard_*.memmap"):
                match = _SHARD.fullmatch(entry.name)
                if match is not None and int(match[1]) >= len(layer.shards):
                    report.add(
                        "unlisted-file",
                        layer.path / entry.name,
                        entry.name,
                        f"{len(layer.shards)} shards, as in {CONFIG}",
                    )
