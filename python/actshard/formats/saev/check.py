"""Checks of saev shards; see docs/formats/saev.md."""

from __future__ import annotations

import re

from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.report import Report
from actshard.formats.saev.read import DumpMetadata


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks metadata and every shard, as opening does, and looks for shards that are not listed."""
    dump = report.faults.parse(root, lambda: DumpMetadata(root, report.faults, tell))
    if dump is None:
        return
    report.count("files", len(dump.shards))
    report.count("bytes", dump.bytes)
    listed_paths = {shard for shard, _ in dump.shards}
    for entry in root.entries() if root.lists else ():
        if re.fullmatch(r"acts\d+\.bin.*", entry.name) and root / entry.name not in listed_paths:
            text = f"a shard that shards.json does not list (it lists {len(dump.shards)})"
            report.add("unlisted-file", root / entry.name, text)
