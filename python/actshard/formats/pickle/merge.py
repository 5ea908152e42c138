"""Merges pickle shards: renumbers the shards and joins their lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import actshard._native as _native
from actshard.base._json import Fields, read_json
from actshard.base.errors import MissingFileError
from actshard.base.location import Location, network_io
from actshard.base.work import as_json, write_json
from actshard.formats.contents import Options
from actshard.formats.merging import Merge, Merger, check_column_types
from actshard.formats.pickle.read import machines_in, open_many
from actshard.formats.pickle.write import shard_listing

_DECODED = 160 << 20
"""Memory for one decoded shard of each part, whose columns are checked."""


def _check(plan: Merge) -> None:
    parts = [Location.at(part) for part in plan.parts]
    open_many(Location.at(plan.path), parts, Options("pread"))  # rejects duplicate sample numbers
    missing = next((source for source, _ in _plan_moves(plan)[0] if not source.is_file()), None)
    if missing is not None:
        raise MissingFileError("expected a shard, found no file", path=missing)
    # Only the first shard of each part is checked: reading all columns would decode all rows.
    contents = [open_many(p, [p], Options(network_io(p), _DECODED)) for p in parts]
    check_column_types(plan, [c.unit_columns(0) for c in contents if c.unit_columns is not None])


def _plan_moves(plan: Merge) -> tuple[list[tuple[Path, str]], dict[str, object]]:
    """Returns each shard with its new name, and the merged metadata."""
    described = [Fields(read_json(p / "metadata.json"), p / "metadata.json") for p in plan.parts]
    moves: list[tuple[Path, str]] = []
    shards: list[dict[str, Any]] = []
    for part, metadata in zip(plan.parts, described, strict=True):
        for shard in metadata.items("shards"):
            number = len(shards) + 1
            file = shard.text("filename")
            name = f"shard_{number:04d}{'.pkl.gz' if file.endswith('.gz') else '.pkl'}"
            moves.append((part / file, name))
            shards.append({**shard.value, "shard_id": number, "filename": name})
    configs = [Fields(m.value.get("extraction_config"), m.path, "extraction_config").value for m in described]
    config = dict(configs[0])
    layers = list(dict.fromkeys(la for s in shards for la in s.get("layers", [])))
    longest = [c["max_seq_length"] for c in configs if isinstance(c.get("max_seq_length"), int)]
    config |= {"layers_extracted": config.get("layers_extracted", layers), "max_seq_length": max(longest, default=1)}
    statistics = [m.value.get("statistics") for m in described]
    seconds = [s.get("extraction_duration_seconds") if isinstance(s, dict) else None for s in statistics]
    durations = [s for s in seconds if isinstance(s, int | float)]
    samples = sum(
        Fields(s, plan.parts[0] / "metadata.json", "shards").integer("num_samples", minimum=0) for s in shards
    )
    created = described[0].value.get("created_at", "")
    return moves, shard_listing(shards, samples, config, created, 0, 1, sum(durations) if durations else None)


class PickleMerger(Merger):
    """Merges pickle shards: they get new names. Each folder of a multi-machine extraction is a part."""

    makes: ClassVar[tuple[str, ...]] = ("shard_*.pkl", "shard_*.pkl.gz", "metadata.json")

    def datasets(self, path: Path) -> list[Path]:
        return (
            [path] if (path / "metadata.json").exists() else [folder.local for folder in machines_in(Location.at(path))]
        )

    def check(self, plan: Merge) -> None:
        _check(plan)

    def taken(self, plan: Merge) -> list[tuple[Path, Path]]:
        return [(source, plan.path / name) for source, name in _plan_moves(plan)[0]]

    def finish(self, plan: Merge) -> Path:
        _native.sync_files([plan.path])  # shards must be on disk before the list that names them
        write_json(plan.path / "metadata.json", _plan_moves(plan)[1])
        _native.sync_files([plan.path])
        return plan.path

    def beside(self, plan: Merge) -> tuple[Sequence[str], int, bool]:
        return ["metadata.json"], len(as_json(_plan_moves(plan)[1])), True
