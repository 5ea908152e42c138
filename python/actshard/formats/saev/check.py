"""Checks of saev shards; see docs/formats/saev.md."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from actshard._json import Fields, read_json
from actshard.errors import ActshardError, MissingFileError
from actshard.formats.report import Report
from actshard.formats.saev.read import (
    BUDGET,
    CHECKPOINT,
    CONTENT_TOKENS,
    D_MODEL,
    FAMILY,
    ITEMSIZE,
    LENGTHS,
    N_EXAMPLES,
)
from actshard.location import Location

_MISSING = 16
"""Number of missing shards listed one by one."""
_ASKED_FOR = 10_000
"""Number of shards to ask a web server for, which cannot list them, if shards.json does not."""


def check(root: Location, report: Report, tell: Any) -> None:
    """Checks metadata field by field, then every shard."""
    path = root / "metadata.json"
    try:
        fields = Fields(read_json(path), path)
    except ActshardError as error:
        report.error(error, path)
        return
    read = report.field
    read(path, lambda: fields.text("protocol") if "protocol" in fields.value else None)
    if fields.has("dtype") and fields.value["dtype"] != "float32":
        report.add("unsupported", path, fields.value["dtype"], '"float32"', "field 'dtype'")
    for names in (FAMILY, CHECKPOINT):
        if fields.has(*names):
            read(path, partial(fields.text, *names))
    has_list = "layers" in fields.value
    layers = read(path, lambda: fields.integers("layers") if has_list else range(fields.integer("n_layers")))
    cls = True
    if "cls_token" in fields.value or has_list:
        cls = read(path, lambda: fields.boolean("cls_token"))
    n = read(path, lambda: fields.integer(*N_EXAMPLES))
    content = read(path, lambda: fields.integer(*CONTENT_TOKENS))
    d_model = read(path, lambda: fields.integer(*D_MODEL))
    budget = read(path, lambda: fields.integer(*BUDGET))
    if None in (layers, cls, n, content, d_model, budget):
        return
    per_example = (content + cls) * len(layers)
    eps = budget // per_example
    if eps == 0:
        name = fields.name(*BUDGET)
        report.add("metadata", path, budget, f"at least {per_example}, the vectors of one example", f"field '{name}'")
        return
    size = per_example * d_model * ITEMSIZE
    listing = _listing(root, report, n, eps, fields)
    file_names = [entry.name for entry in root.entries()] if root.lists else []
    present = [root / name for name in file_names if re.fullmatch(r"acts\d+\.bin.*", name)]
    last = max((i for i, (_, count) in enumerate(listing) if count), default=0)
    for i, (shard, count) in enumerate(listing):
        tell("shards", i, len(listing))
        report.count("files")
        if count:
            _check_shard(shard, count * size, eps * size, report, exact=i < last)
    listed = {shard for shard, _ in listing}
    for shard in present:
        if shard not in listed:
            report.add("unlisted-file", shard, f"a shard that shards.json does not list (it lists {len(listing)})")
    for path, need, sizes in (
        (root / "labels.bin", n * content, f"{n} x {content}"),
        (root / LENGTHS, n * 4, f"{n} x 4"),
    ):
        try:
            state = path.found()
            found = state.size if state is not None and state.kind == "file" else need
        except ActshardError as error:
            report.error(error, path)
            continue
        if found != need:
            report.add("truncated" if found < need else "too-long", path, f"{found} bytes", f"{sizes} = {need} bytes")


def _listing(root: Location, report: Report, n: int, eps: int, metadata: Fields) -> list[tuple[Location, int]]:
    """Returns shards with their expected numbers of examples: from shards.json, or from the metadata if it is invalid."""
    path = root / "shards.json"
    # Limited by the files present plus a few missing ones, because the metadata can claim any number.
    count = -(-n // eps)
    present = len(root.entries("acts*.bin")) if root.lists else _ASKED_FOR
    expected = [(root / f"acts{i:06}.bin", min(eps, n - i * eps)) for i in range(min(count, present + _MISSING))]
    if count > len(expected) and root.lists:
        report.add("missing-file", root, f"{present} shards", f"{count} shards ({n} examples, {eps} per shard)")
    if not path.exists() and "protocol" not in metadata.value:
        return expected
    try:
        value = read_json(path)
    except ActshardError as error:
        report.error(error, path)
        return expected
    if not isinstance(value, list):
        report.add("format", path, value, "a list of shards")
        return expected
    made, total = [], 0
    for i, entry in enumerate(value):
        try:
            fields = Fields(entry, path, f"[{i}]")
            name = fields.text("name")
            count = fields.integer(*N_EXAMPLES, minimum=0)
        except ActshardError as error:
            report.error(error, path, "metadata")
            continue
        wanted = min(eps, n - total) if total < n else 0
        if count != wanted:
            report.add("count-claim", path, count, f"{wanted} ({n} examples, {eps} per shard)", f"shard {i}")
        if name != f"acts{i:06}.bin":
            report.add("layout", path, name, f"acts{i:06}.bin, which saev reads", f"shard {i}")
        if "/" in name or name in ("", ".", ".."):
            report.add("metadata", path, name, "the name of a file in this folder", f"field '[{i}].name'")
            continue
        usual = root / f"acts{i:06}.bin"
        made.append((usual if usual.exists() else root / name, count))
        total += count
    if total != n:
        report.add("format", path, f"{total} examples in {len(made)} shards", f"{n}: the dump was interrupted")
    return made


def _check_shard(shard: Location, need: int, full: int, report: Report, *, exact: bool) -> None:
    try:
        found = shard.stat()
    except ActshardError as error:
        missing = isinstance(error, MissingFileError)
        reason = "No such file or directory" if missing else getattr(error.__cause__, "strerror", None) or error.detail
        report.add("missing-file" if missing else "unreadable", shard, reason, f"{need} bytes")
        return
    report.count("bytes", found.size)
    if found.kind != "file":
        report.add("not-a-file", shard, "a folder or a special file", "a regular file")
    elif found.size == 0:
        report.add("empty-file", shard, "an empty file", f"{need} bytes", "byte 0")
    elif found.size < need:
        report.add("truncated", shard, f"{found.size} bytes", f"{need} bytes", f"byte {found.size}")
    elif found.size > full:
        report.add("too-long", shard, f"{found.size} bytes", f"at most {full} bytes", f"byte {full}")
    elif exact and found.size != full:
        report.add("truncated", shard, f"{found.size} bytes", f"{full} bytes", f"byte {found.size}")
