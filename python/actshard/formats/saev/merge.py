"""Merges saev dumps. Shards are moved where possible, otherwise written again."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import actshard._native as _native
from actshard._json import Fields, read_json
from actshard.errors import ExistsError, UnsupportedError
from actshard.formats.contents import Contents, Options
from actshard.formats.merging import Merge, Merger
from actshard.formats.saev.read import BUDGET, CONTENT_TOKENS, D_MODEL, ITEMSIZE, LENGTHS, N_EXAMPLES, hashes
from actshard.formats.saev.read import open as open_dump
from actshard.location import Location
from actshard.work import make_folder, rename, write_bytes, write_json


@dataclass(frozen=True)
class _Dump:
    """Layout of a saev dump, from its metadata."""

    fields: Fields
    layers: int
    tokens: int
    """Tokens per example, CLS included."""
    content: int

    @classmethod
    def of(cls, path: Path) -> _Dump:
        fields = Fields(read_json(path / "metadata.json"), path / "metadata.json")
        # Same rules as saev's reader: older metadata have n_layers, the number of last layers, and imply a CLS token.
        listed = "layers" in fields.value
        layers = len(fields.integers("layers")) if listed else fields.integer("n_layers")
        content = fields.integer(*CONTENT_TOKENS)
        special = fields.boolean("cls_token") if listed or "cls_token" in fields.value else True
        return cls(fields, layers, content + special, content)

    @property
    def eps(self) -> int:
        """Examples per shard."""
        return self.fields.integer(*BUDGET) // (self.tokens * self.layers)

    @property
    def examples(self) -> int:
        return self.fields.integer(*N_EXAMPLES)


def _place(plan: Merge, dumps: Sequence[_Dump]) -> tuple[Path, dict[str, Any]]:
    """Path and metadata of the merged dump. The metadata determine the path."""
    first = dumps[0].fields
    largest = max(dumps, key=lambda d: d.eps)
    # A dump smaller than one shard has a small budget, so the largest is used.
    budget = {first.name(*BUDGET): largest.fields.integer(*BUDGET)}
    metadata = {**first.value, **budget, first.name(*N_EXAMPLES): sum(d.examples for d in dumps)}
    recipe = next((i for i, h in enumerate(hashes(first.value)) if h == plan.parts[0].name), 0)
    return plan.path / hashes(metadata)[recipe], metadata


def _check(plan: Merge) -> None:
    place, _ = _place(plan, [_Dump.of(p) for p in plan.parts])
    if place.exists():
        raise ExistsError("the merged dataset exists already; remove it or the parts", path=place)
    for path in plan.parts:
        files = open_dump(Location.at(path), Options.of(path)).files()
        odd = next((f for i, f in enumerate(files) if f.name != f"acts{i:06}.bin"), None)
        if odd is not None:
            raise UnsupportedError(f"non-standard shard name {odd.name}; convert the dataset first", path=path)


def _run(plan: Merge) -> Path:
    """Merges. Shards have equal numbers of examples: those at a shard boundary are moved, others are assembled by copying."""
    dumps = [_Dump.of(p) for p in plan.parts]
    fields = dumps[0].fields
    name = fields.name(*N_EXAMPLES)
    counts = [d.examples for d in dumps]
    each = [d.eps for d in dumps]
    eps, n = max(each), sum(counts)
    content = dumps[0].content
    size = dumps[0].tokens * dumps[0].layers * fields.integer(*D_MODEL) * ITEMSIZE
    place, metadata = _place(plan, dumps)
    if place.exists():  # created before a crash: the path was free when the merge began
        if read_json(place / "metadata.json") != metadata:
            raise ExistsError("another dataset with this name exists; move it away", path=place)
        return place
    work = plan.path / ".merging"
    make_folder(work)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    full = metadata.get("protocol") != "2.0"
    for shard in range(-(-n // eps)):
        target = work / f"acts{shard:06}.bin"
        if target.exists():
            continue
        a, b = shard * eps, min(n, (shard + 1) * eps)
        pieces = []
        for p, begin in enumerate(starts[:-1]):
            lo, hi = max(a, begin), min(b, starts[p + 1])
            while lo < hi:
                number, row = divmod(lo - begin, each[p])
                rows = min(hi - lo, each[p] - row)
                pieces.append((plan.parts[p] / f"acts{number:06}.bin", row, rows, lo - a))
                lo += rows
        source, row, rows, _ = pieces[0]
        whole = len(pieces) == 1 and row == 0 and rows == b - a
        if whole and (source.exists() and source.stat().st_size == (eps if full else rows) * size):
            plan.take(source, target)
            continue
        temporary = target.with_name(f"{target.name}.part")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        for of_part, begin, count, at in pieces:
            _native.copy_range(of_part, begin * size, count * size, temporary, at * size)
        os.truncate(temporary, (eps if full else b - a) * size)
        _native.sync_files([temporary])
        rename(temporary, target)
    if (plan.parts[0] / "labels.bin").exists():
        temporary = work / "labels.bin.part"
        for part, held, start in zip(plan.parts, counts, starts, strict=False):
            _native.copy_range(part / "labels.bin", 0, held * content, temporary, start * content)
        os.truncate(temporary, n * content)
        _native.sync_files([temporary])
        rename(temporary, work / "labels.bin")
    if any((part / LENGTHS).exists() for part in plan.parts):
        lengths = [
            np.fromfile(part / LENGTHS, "<u4") if (part / LENGTHS).exists() else np.full(held, content, "<u4")
            for part, held in zip(plan.parts, counts, strict=True)
        ]
        write_bytes(work / LENGTHS, np.concatenate(lengths).tobytes())
    word = "n_ex" if name == "n_ex" else "n_imgs" if name == "n_imgs" else "n_examples"
    listing = [{"name": f"acts{i:06}.bin", word: min(eps, n - i * eps)} for i in range(-(-n // eps))]
    write_json(work / "shards.json", listing)
    write_json(work / "metadata.json", metadata)
    _native.sync_files([work])
    rename(work, place)
    return place


class SaevMerger(Merger):
    """Merges dumps into shards with the same number of examples."""

    makes: ClassVar[tuple[str, ...]] = (".merging",)
    names_itself: ClassVar[bool] = True
    files: ClassVar[re.Pattern[str] | None] = re.compile(
        rf"acts\d{{6,}}\.bin(\.part)?|labels\.bin|{re.escape(LENGTHS)}|(shards|metadata)\.json"
    )

    def kind(self, contents: Contents) -> dict[str, Any]:
        return {
            "tokens per example": contents.tokens_each,
            "protocol": contents.metadata.get("protocol"),
            "patch labels": contents.labels() is not None,
        }

    def predicted(self, parts: Sequence[tuple[int, int, int]], whole: tuple[int, int, int]) -> tuple[int, int]:
        return whole[1:]

    def check(self, plan: Merge) -> None:
        _check(plan)

    def run(self, plan: Merge) -> Path:
        return _run(plan)
