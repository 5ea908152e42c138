"""Merges Zarr stores: to a run of several stores with a manifest, or to one store with all chunks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import actshard._native as _native
from actshard.errors import ArgumentError
from actshard.formats.contents import Contents, Options
from actshard.formats.merging import Merge, Merger, check_column_types
from actshard.formats.target import AllExamples, Spec
from actshard.formats.zarr.member import ACTIVATIONS, Member
from actshard.formats.zarr.read import is_group, members_of
from actshard.formats.zarr.read import open as open_store
from actshard.formats.zarr.write import OWN_ATTRIBUTES, ZarrTarget
from actshard.location import Location
from actshard.work import write_json


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
            or array.chunks[:2] != (1, 1)
            or array.separator != "."
        ):
            raise ArgumentError(
                f"physical: expected plain version 2 chunks (1, 1, T, H) in {path}; merge without physical=True"
            )
        first = first or array.chunks
        if array.chunks != first:
            raise ArgumentError(
                f"physical: expected chunks {list(first)} as in {sources[0]}, found {list(array.chunks)} in {path}; "
                "write with the same chunk_tokens=, or merge without physical=True",
            )


def _check(plan: Merge) -> None:
    if plan.options["physical"]:
        _check_chunks(plan.parts)
    check_column_types(plan, [_columns(_opened(p)) for p in plan.parts])


def _run(plan: Merge) -> Path:
    if plan.options["physical"]:
        return _one_store(plan)
    shards: list[dict[str, Any]] = []
    start = 0
    member: Member | None = None
    for i, part in enumerate(plan.parts):
        name = f"shards/shard-{i:04}.zarr"
        plan.take(part, plan.path / name)
        member = Member(Location.at(plan.path / name))
        shards.append({"path": name, "n_samples": member.n, "start": start})
        start += member.n
    assert member is not None
    first = Member(Location.at(plan.path / shards[0]["path"]))
    known: dict[str, Any] = {
        k: first.metadata[k] for k in ("schema_version", "created_at", "model_id", "layers") if k in first.metadata
    }
    manifest: dict[str, Any] = {
        "format": "activation-zarr-run",
        "manifest_version": "1.0",
        "n_samples": start,
        "num_layers": first.num_layers,
        "hidden_size": first.width,
        "T_max": max(Member(Location.at(plan.path / s["path"])).arrays[0].shape[2] for s in shards),
        "dtype": str(first.arrays[0].dtype),
        **known,
        "shards": shards,
    }
    _native.sync_files([plan.path / "shards", plan.path])  # stores must be on disk before the manifest that lists them
    write_json(plan.path / "manifest.json", manifest)
    _native.sync_files([plan.path])
    return plan.path


def _one_store(plan: Merge) -> Path:
    """Moves chunk files, renumbered by the samples before them, and writes all small files again."""
    stores = [_opened(p) for p in plan.parts]
    members = [Member(Location.at(p)) for p in plan.parts]
    lengths, tables = [], []
    start = 0
    for store, member in zip(stores, members, strict=True):
        folder = member.arrays[0].folder
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            first, _, rest = entry.name.partition(".")
            if first.isdigit() and int(first) < member.n:
                plan.take(Path(entry.path), plan.path / "arrays" / "activations" / f"{int(first) + start}.{rest}")
        counts = store.token_counts()
        lengths.append(np.repeat(counts[:, None], member.num_layers, axis=1))
        tables.append(_columns(store))
        start += member.n
    import pyarrow as pa

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
    columns = pa.concat_tables(tables, promote_options="permissive") if tables[0].num_columns else None
    target.finish(AllExamples(every, columns))
    return plan.path


def _opened(path: Path) -> Contents:
    return open_store(Location.at(path), Options.of(path))


def _columns(contents: Contents) -> Any:
    return contents.columns([name for name in contents.column_names if name != "seq_len"])


class ZarrMerger(Merger):
    """Merges parts to the stores of a run or, with ``physical``, to one store."""

    makes: ClassVar[tuple[str, ...]] = (*ZarrTarget.makes, "shards", "manifest.json")
    files: ClassVar[re.Pattern[str] | None] = re.compile(
        r"\.z(attrs|group|metadata|array)|config\.json|(prompts|responses|sample_index|extra_metadata)\.jsonl|\d+(\.\d+)*"
    )
    physical: ClassVar[str | None] = "Zarr stores"

    def datasets(self, path: Path) -> list[Path]:
        return [member.local for member in members_of(Location.at(path))]

    def several(self, path: Path) -> bool:
        return not is_group(Location.at(path))

    def predicted(self, parts: Sequence[tuple[int, int, int]], whole: tuple[int, int, int]) -> tuple[int, int]:
        return sum(files for _, files, _ in parts) + 1, sum(size for _, _, size in parts)  # stores stay, and a manifest

    def check(self, plan: Merge) -> None:
        _check(plan)

    def run(self, plan: Merge) -> Path:
        return _run(plan)
