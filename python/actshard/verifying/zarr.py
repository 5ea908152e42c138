"""The rules of Zarr activation stores; see docs/formats/zarr.md."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actshard.errors import ActshardError
from actshard.formats._json import Fields, read_json
from actshard.formats._zarr_arrays import ArrayMeta, read_whole
from actshard.formats.zarr import Member, by_i, is_group, stores_in
from actshard.verifying.report import Report


def check(root: Path, report: Report, tell: Any) -> None:
    """Every store of a run: metadata, lengths, chunk files, lines of text."""
    for number, store in enumerate(_stores(root, report)):
        tell("stores", number, 0)
        try:
            member = Member(store)
        except ActshardError as error:
            report.error(error, store)
            continue
        for array in member.arrays:
            with report.noting(array.metadata):
                _check_chunks(array, member, report)
        for name in member.store.names("arrays"):
            with report.noting(store / "arrays" / name):
                meta = member.store.array(f"arrays/{name}")
                if meta is not None and meta.node not in {a.node for a in member.arrays}:
                    _check_small(meta, member, report)
        for differs in dict.fromkeys(w for w in member.store.warnings if "consolidated" in w):
            report.add("consolidated-differs", root, differs if store == root else f"{store.name}: {differs}")
        for path in member.texts:
            with report.noting(path):
                lines = by_i(path, member.rows)
                if len(lines) < member.n:
                    report.add("count-claim", path, f"{len(lines)} lines", f"{member.n}, one per sample")


def _stores(root: Path, report: Report) -> list[Path]:
    """The stores of a run as its manifest lists them, or a store alone."""
    if is_group(root):
        return [root]
    listing = root / "manifest.json"
    present = stores_in(root / "shards")
    if not listing.exists():
        return present or [root]
    made: list[Path] = []
    start = 0
    try:
        manifest = Fields(read_json(listing), listing)
        entries = manifest.items("shards")
    except ActshardError as error:
        report.error(error, listing, "metadata")
        return present
    for fields in entries:
        name = report.field(listing, partial(fields.text, "path"))
        if name is None:
            continue
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            report.add("metadata", listing, name, "a path inside the run's folder", f"field '{fields.where}.path'")
            continue
        store = root / relative
        if store in made:
            report.add(
                "duplicate-sample", listing, name, "another store for each shard", f"field '{fields.where}.path'"
            )
            continue
        made.append(store)
        if not store.is_dir():
            report.add("missing-file", store, "nothing", "a Zarr store, which manifest.json lists")
            made.pop()
        n = report.field(listing, partial(fields.integer, "n_samples", minimum=0)) if fields.has("n_samples") else None
        if fields.has("start") and fields.value["start"] != start:
            report.add(
                "metadata",
                listing,
                fields.value["start"],
                f"{start}, the samples before",
                f"field '{fields.where}.start'",
            )
        start += n or 0
    if manifest.has("n_samples") and manifest.value["n_samples"] != start:
        report.add(
            "metadata", listing, manifest.value["n_samples"], f"{start}, the sum over the shards", "field 'n_samples'"
        )
    for stray in present:
        if stray not in made:
            report.add("unlisted-file", stray, "a store that manifest.json does not name")
    return made


def _chunk_files(array: ArrayMeta) -> dict[tuple[int, ...], int]:
    """Sizes of an array's chunk files, by their places in the grid."""
    found: dict[tuple[int, ...], int] = {}
    dims = len(array.shape)
    if array.separator == "/":
        depth: list[tuple[Path, tuple[int, ...]]] = [
            (array.folder / array.prefix.rstrip("/") if array.prefix else array.folder, ())
        ]
        while depth:
            folder, place = depth.pop()
            try:
                entries = list(os.scandir(folder))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                if entry.name.isdigit():
                    at = (*place, int(entry.name))
                    if len(at) < dims:
                        depth.append((Path(entry.path), at))
                    else:
                        found[at] = entry.stat().st_size
        return found
    try:
        entries = list(os.scandir(array.folder))
    except FileNotFoundError:
        return found
    for entry in entries:
        parts = entry.name.removeprefix(array.prefix).split(".")
        if len(parts) == dims and all(p.isdigit() for p in parts):
            found[tuple(map(int, parts))] = entry.stat().st_size
    return found


def _check_chunks(array: ArrayMeta, member: Member, report: Report) -> None:
    """Every chunk file is inside the grid and of its size; every stored token has one."""
    if array.inner:
        return  # chunks inside shards: reading them all, deep, is the only way to know
    files = _chunk_files(array)
    report.count("files", len(files))
    report.count("bytes", sum(files.values()))
    grid = [math.ceil(n / c) for n, c in zip(array.shape, array.chunks, strict=True)]
    assert array.dtype is not None
    full = math.prod(array.chunks) * array.dtype.itemsize
    wrong = 0
    for place, size in files.items():
        name = _name(array, place)
        if any(p >= n for p, n in zip(place, grid, strict=True)):
            report.add("unlisted-file", array.folder / name, f"chunk {list(place)}", f"chunks of a grid {grid}")
        elif not array.how and size != full:
            wrong += 1
            if wrong <= 20:
                code = "empty-file" if size == 0 else "chunk-size"
                report.add(code, array.folder / name, f"{size} bytes", f"{full} bytes, a whole chunk")
    lengths = member.lengths[member.arrays.index(array)]
    tokens = np.full(member.n, lengths) if isinstance(lengths, int) else lengths.astype(np.int64)
    missing: list[tuple[int, ...]] = []
    held = set(files)
    samples, layers, stretch, width = array.chunks
    longest: dict[int, int] = {}
    for i, n in enumerate(tokens.tolist()):
        longest[i // samples] = max(longest.get(i // samples, 0), n)
    for block, n in longest.items():
        for layer in range(math.ceil(member.num_layers / layers)):
            for t in range(math.ceil(n / stretch)):
                missing += [
                    (block, layer, t, h)
                    for h in range(math.ceil(member.width / width))
                    if (block, layer, t, h) not in held
                ]
    if missing:
        report.add(
            "chunk-missing",
            array.folder,
            f"{len(missing)} chunks of stored tokens have no file, such as {_name(array, missing[0])}",
            "a file for every chunk with stored tokens",
            f"sample {missing[0][0] * samples}",
        )


def _name(array: ArrayMeta, place: tuple[int, ...]) -> str:
    return array.prefix + array.separator.join(map(str, place))


def _check_small(meta: ArrayMeta, member: Member, report: Report) -> None:
    """A per-sample array can be read, and has an entry for every sample."""
    if not meta.shape or meta.shape[0] != member.rows:
        report.add("count-claim", meta.metadata, f"shape {list(meta.shape)}", f"{member.rows} entries, one per sample")
        return
    read_whole(meta)
