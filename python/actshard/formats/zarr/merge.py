"""Merges Zarr stores into a run of several stores with a manifest, or into one store with all chunks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import actshard._native as _native
from actshard.base.errors import ArgumentError
from actshard.base.location import Location
from actshard.base.request import RECORD
from actshard.base.work import as_json, write_json
from actshard.formats.contents import Contents, Options
from actshard.formats.merging import Merge, Merger, check_column_types
from actshard.formats.tables import concatenated
from actshard.formats.target import AllExamples, Spec
from actshard.formats.zarr.member import ACTIVATIONS, Member
from actshard.formats.zarr.read import is_group, members_of
from actshard.formats.zarr.read import open as open_store
from actshard.formats.zarr.write import OWN_ATTRIBUTES, ZarrTarget

if TYPE_CHECKING:
    import pyarrow as pa


def _check_chunks(sources: Sequence[Path]) -> None:
    """Raises ArgumentError unless chunk files can be merged by renumbering: one file per sample, equal chunks."""
    first = None
    for path in sources:
        member = Member(Location.at(path))
        (array,) = member.arrays if len(member.arrays) == 1 else (None,)
        if (
            array is None
            or array.node != ACTIVATIONS
            or array.fill not in (0, None)
            or array.how
            or array.swapped
            or member.version != 2
            or member.scaling is not None
            or array.chunks[:2] != (1, 1)
            or array.separator != "."
        ):
            raise ArgumentError(
                f"physical: expected plain version 2 chunks (1, 1, T, H) in {path}; merge without physical=True (--physical)"
            )
        first = first or array.chunks
        if array.chunks != first:
            raise ArgumentError(
                f"physical: expected chunks {list(first)} as in {sources[0]}, found {list(array.chunks)} in {path}; "
                "write with the same chunk_tokens=, or merge without physical=True (--physical): actshard convert then writes "
                "the run as one Zarr store",
            )


def _check(plan: Merge) -> None:
    if plan.options["physical"]:
        _check_chunks(plan.parts)
    check_column_types(plan, [_columns(_open_contents(p)) for p in plan.parts])


def _manifest(stores: Sequence[Path]) -> dict[str, object]:
    """The manifest of a run of several stores."""
    members = [Member(Location.at(path)) for path in stores]
    shards: list[dict[str, object]] = []
    start = 0
    for i, member in enumerate(members):
        shards.append({"path": _shard(i), "n_samples": member.n, "start": start})
        start += member.n
    first = members[0]
    fields: dict[str, object] = {
        k: first.metadata[k] for k in ("schema_version", "created_at", "model_id", "layers") if k in first.metadata
    }
    return {
        "format": "activation-zarr-run",
        "manifest_version": "1.0",
        "n_samples": start,
        "num_layers": first.num_layers,
        "hidden_size": first.width,
        "T_max": max(member.arrays[0].shape[2] for member in members),
        "dtype": str(first.arrays[0].dtype),
        **fields,
        "shards": shards,
    }


def _finish_run(plan: Merge) -> Path:
    """Writes the manifest of a run of several stores."""
    manifest = _manifest([plan.path / _shard(i) for i in range(len(plan.parts))])
    _native.sync_files([plan.path / "shards", plan.path])  # stores must be on disk before the manifest that lists them
    write_json(plan.path / "manifest.json", manifest)
    _native.sync_files([plan.path])
    return plan.path


def _shard(i: int) -> str:
    return f"shards/shard-{i:04}.zarr"


def _chunks(plan: Merge) -> list[tuple[Path, Path]]:
    """Chunk files, each with its target path: samples are renumbered by the number of samples in earlier stores."""
    moves = []
    start = 0
    for path in plan.parts:
        member = Member(Location.at(path))
        for entry in sorted(os.scandir(member.arrays[0].folder), key=lambda e: e.name):
            first, _, rest = entry.name.partition(".")
            if first.isdigit() and int(first) < member.n:
                target = plan.path / "arrays" / "activations" / f"{int(first) + start}.{rest}"
                moves.append((Path(entry.path), target))
        start += member.n
    return moves


def _one_store(plan: Merge) -> Path:
    """Writes all small files again, for the chunks of all stores."""
    stores = [_open_contents(p) for p in plan.parts]
    members = [Member(Location.at(p)) for p in plan.parts]
    lengths, tables = [], []
    start = 0
    for store, member in zip(stores, members, strict=True):
        counts = store.token_counts()
        lengths.append(np.repeat(counts[:, None], member.num_layers, axis=1))
        tables.append(_columns(store))
        start += member.n
    first_of = members[0]
    dtype = first_of.arrays[0].dtype
    spec = Spec(
        path=plan.path,
        layers=stores[0].layers,
        d_model=first_of.width,
        dtype=dtype,
        metadata={k: v for k, v in first_of.metadata.items() if k not in (*OWN_ATTRIBUTES, "written_by")},
        num_examples=start,
        tokens=None,
        shard_bytes=None,
        part=None,
        options={
            "chunk_tokens": first_of.arrays[0].chunks[2],
            "t_max": max(m.arrays[0].shape[2] for m in members),
        },
    )
    target = ZarrTarget(spec)
    every = np.concatenate(lengths)
    target.restore([], every)
    columns = concatenated(tables)[0] if any(table.num_columns for table in tables) else None
    target.finish(AllExamples(every, columns))
    return plan.path


def _small_files(store: Path) -> tuple[list[str], int, int]:
    """Names and bytes of a store's small files, and the bytes of the files with values per example."""
    chunks = Path(Member(Location.at(store)).arrays[0].folder)
    files = [
        (path := Path(folder, name), path.stat().st_size)
        for folder, _, names in os.walk(store)
        for name in names
        if name != RECORD and (Path(folder) != chunks or not name[0].isdigit())
    ]
    columns = sum(size for path, size in files if path.name[0].isdigit() or path.suffix == ".jsonl")
    return [path.relative_to(store).as_posix() for path, _ in files], sum(size for _, size in files), columns


def _open_contents(path: Path) -> Contents:
    return open_store(Location.at(path), Options.of(path))


def _columns(contents: Contents) -> pa.Table:
    return contents.columns([name for name in contents.column_names if name != "seq_len"])


class ZarrMerger(Merger):
    """Merges parts into the stores of a run or, with ``physical``, into one store."""

    makes: ClassVar[tuple[str, ...]] = (
        ".zattrs",
        ".zgroup",
        ".zmetadata",
        "arrays",
        "meta",
        "text",
        "shards",
        "manifest.json",
    )
    physical: ClassVar[str | None] = "Zarr stores"

    def datasets(self, path: Path) -> list[Path]:
        return [member.local for member in members_of(Location.at(path))]

    def several(self, path: Path) -> bool:
        return not is_group(Location.at(path))

    def predicted(self, parts: Sequence[tuple[int, int, int]], total: tuple[int, int, int]) -> tuple[int, int]:
        return sum(files for _, files, _ in parts) + 1, sum(
            size for _, _, size in parts
        )  # the stores unchanged, and a manifest

    def check(self, plan: Merge) -> None:
        _check(plan)

    def taken(self, plan: Merge) -> list[tuple[Path, Path]]:
        if plan.options["physical"]:
            return _chunks(plan)
        return [(part, plan.path / _shard(i)) for i, part in enumerate(plan.parts)]

    def finish(self, plan: Merge) -> Path:
        return _one_store(plan) if plan.options["physical"] else _finish_run(plan)

    def beside(self, plan: Merge) -> tuple[Sequence[str], int, bool]:
        if not plan.options["physical"]:
            return ["manifest.json"], len(as_json(_manifest(plan.parts))), True
        counts = [_small_files(part) for part in plan.parts]
        return counts[0][0], counts[0][1] + sum(columns for _, _, columns in counts[1:]), False
