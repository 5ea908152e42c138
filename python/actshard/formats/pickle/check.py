"""Checks of pickle shards; see docs/formats/pickle.md. Nothing is unpickled: the safe interpreter reads the shards."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from actshard._native import Rows
from actshard.base._json import Fields, read_json
from actshard.base.errors import ActshardError
from actshard.base.location import Location
from actshard.formats.contents import Options
from actshard.formats.pickle.read import ListedShard, machines_in, shards_of
from actshard.formats.report import Report

if TYPE_CHECKING:
    from actshard.formats.format import Tell

_REQUIRED = ("version", "created_at", "extraction_config", "shards", "statistics")


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks every metadata.json and every shard, then consistency across shards."""
    folders = [root] if (root / "metadata.json").exists() else machines_in(root) or [root]
    shards_by_sample: dict[int, list[Location]] = defaultdict(list)
    widths: dict[int, Location] = {}
    types: dict[str, Location] = {}
    for folder in folders:
        path = folder / "metadata.json"
        metadata = report.faults.parse(path, partial(_metadata_of, path))
        if metadata is None:
            continue
        for name in _REQUIRED:
            if name not in metadata.value:
                report.add("metadata", path, "nothing", "a required field", f"field '{name}'")
        options = Options("mmap")
        parse = partial(shards_of, folder, metadata, options, [], report.faults)
        shards = report.faults.parse(path, parse) or []
        for i, shard in enumerate(shards):
            tell("shards", i, len(shards))
            _check_shard(shard, shards_by_sample, widths, types, report)
        # The names of entries with faults, too.
        entries = [entry.value.get("filename") for entry in metadata.items("shards")]
        listed_names = {name for name in entries if isinstance(name, str)}
        names = [entry.name for entry in folder.entries()] if folder.lists else []
        present = {name for name in names if re.search(r"\.pkl(\.gz)?$", name) and not name.startswith(".")}
        for stray in sorted(present - listed_names):
            report.add("unlisted-file", folder / stray, "a shard that metadata.json does not list")
    for sample, where in shards_by_sample.items():
        if len(where) > 1:
            shard_names = ", ".join(str(p.name) for p in where[1:4])
            report.add(
                "duplicate-sample",
                where[0],
                f"also in {shard_names}",
                "a different number for every sample",
                f"sample_idx {sample}",
            )
            if sum(f.code == "duplicate-sample" for f in report.findings) >= 20:
                break
    if len(widths) > 1:
        (first, first_path), (second, second_path) = list(widths.items())[:2]
        report.add("format", second_path, f"{second} wide", f"{first} wide, as in {first_path.name}")
    if len(types) > 1:
        (first_type, first_path), (second_type, second_path) = list(types.items())[:2]
        report.add("mixed-dtypes", second_path, second_type, f"{first_type}, as in {first_path.name}")


def _metadata_of(path: Location) -> Fields:
    metadata = Fields(read_json(path), path)
    metadata.items("shards")
    return metadata


def _check_shard(
    spec: ListedShard,
    shards_by_sample: dict[int, list[Location]],
    widths: dict[int, Location],
    types: dict[str, Location],
    report: Report,
) -> None:
    report.count("files")
    shard = spec.path
    size = None
    try:
        size = shard.stat().size
        report.count("bytes", size)
    except ActshardError:
        pass
    if size is not None and spec.size is not None and size not in (0, spec.size):
        report.add("size-bytes", shard, f"{size} bytes", f"{spec.size} bytes", "field 'size_bytes'")
    # The size mismatch is reported. The checksum still shows whether the file or the number is wrong.
    native = (shard, spec.compressed, None, spec.sha256, spec.samples, spec.ids, list(spec.layers), spec.limit)
    try:
        rows = Rows.shards(
            [native], layers=list(spec.layers), decoded_memory=Options("pread").decoded_memory, io="pread"
        )
        if not spec.samples:
            return
        for sample in rows.samples(0):
            shards_by_sample[sample].append(shard)
        widths.setdefault(rows.width, shard)
        for dtype in rows.stored_types(0, None):
            types.setdefault(str(dtype), shard)
        report.count("samples", len(rows.records(0)))
    except ActshardError as error:
        report.error(error, shard)
