"""Merges saev dumps. Shards are moved where possible, otherwise written again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import actshard._native as _native
from actshard.base._json import Fields, read_json
from actshard.base.errors import ExistsError, UnsupportedError
from actshard.base.location import Location
from actshard.base.work import as_json, rename, write_bytes, write_json
from actshard.formats.carrying import ORIGIN, Carrying, checked_origin
from actshard.formats.contents import Contents, Options
from actshard.formats.merging import Assembled, Merge, Merger
from actshard.formats.saev.read import (
    BUDGET,
    CHECKPOINT,
    CONTENT_TOKENS,
    D_MODEL,
    FAMILY,
    ITEMSIZE,
    LENGTHS,
    N_EXAMPLES,
    hashes,
)
from actshard.formats.saev.read import open as open_dump

if TYPE_CHECKING:
    import pyarrow as pa


# saev's metadata in other formats, and metadata of other formats in saev's.


class SaevCarrying(Carrying):
    """saev's metadata fields are fixed, so another format's metadata are stored as JSON text in ``data``."""

    model_key: ClassVar[str | None] = "ckpt"
    number_column: ClassVar[str | None] = "example_idx"

    def origin(self, metadata: Mapping[str, object]) -> dict[str, object] | None:
        data = metadata.get("data")
        if isinstance(data, str) and data.startswith(f'{{"{ORIGIN}"'):
            try:
                data = json.loads(data)
            except ValueError:
                return None
        return checked_origin(data.get(ORIGIN)) if isinstance(data, dict) else None

    def content_only(self, metadata: Mapping[str, object]) -> dict[str, object]:
        return {**metadata, "cls_token": False}

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        def first(names: Sequence[str]) -> pa.Table:
            return next((metadata[n] for n in names if n in metadata), None)

        kept_metadata = {
            "family": first(FAMILY),
            "ckpt": first(CHECKPOINT),
            "data": metadata.get("data"),
            "dataset": metadata.get("dataset"),
            "pixel_agg": metadata.get("pixel_agg"),
        }
        options: dict[str, object] = {"cls_token": bool(metadata.get("cls_token", "layers" not in metadata))}
        budget = first(BUDGET)
        if isinstance(budget, int) and first(D_MODEL):
            options["max_tokens_per_shard"] = budget
        return {k: v for k, v in kept_metadata.items() if v is not None}, options

    def metadata_from(
        self, contents: Contents, origin: dict[str, object]
    ) -> tuple[dict[str, object], dict[str, object]]:
        text = json.dumps({ORIGIN: origin}, separators=(",", ":"), ensure_ascii=False, default=str)
        return {"ckpt": contents.model or "unknown", "data": text}, {"cls_token": bool(contents.special_tokens)}


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
        has_layers = "layers" in fields.value
        layers = len(fields.integers("layers")) if has_layers else fields.integer("n_layers")
        content = fields.integer(*CONTENT_TOKENS)
        special = fields.boolean("cls_token") if has_layers or "cls_token" in fields.value else True
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
    target, _ = _place(plan, [_Dump.of(p) for p in plan.parts])
    if target.exists():
        raise ExistsError("the merged dataset exists already; remove it or the parts", path=target)
    for path in plan.parts:
        files = open_dump(Location.at(path), Options.of(path)).files()
        odd = next((f for i, f in enumerate(files) if f.name != f"acts{i:06}.bin"), None)
        if odd is not None:
            raise UnsupportedError(f"non-standard shard name {odd.name}; convert the dataset first", path=path)


_WORK = ".merging"
"""Folder in which the dump is assembled before it gets its name."""


class _Shards:
    """The shards of the merged dump.

    All shards have equal numbers of examples. Source shards that equal a merged shard are used unchanged; others are copied in
    pieces.
    """

    def __init__(self, plan: Merge) -> None:
        self.plan = plan
        self.dumps = [_Dump.of(p) for p in plan.parts]
        fields = self.dumps[0].fields
        self.counts = [d.examples for d in self.dumps]
        self.each = [d.eps for d in self.dumps]
        self.eps, self.n = max(self.each), sum(self.counts)
        self.content = self.dumps[0].content
        self.bytes = self.dumps[0].tokens * self.dumps[0].layers * fields.integer(*D_MODEL) * ITEMSIZE
        """Bytes of an example."""
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).tolist()
        self.place, self.metadata = _place(plan, self.dumps)
        self.full = self.metadata.get("protocol") != "2.0"

    def pieces(self, shard: int) -> list[tuple[Path, int, int, int]]:
        """The pieces of source shards that form a shard: (file, first example, examples, first example in the shard)."""
        a, b = shard * self.eps, min(self.n, (shard + 1) * self.eps)
        pieces = []
        for p, begin in enumerate(self.starts[:-1]):
            lo, hi = max(a, begin), min(b, self.starts[p + 1])
            while lo < hi:
                number, row = divmod(lo - begin, self.each[p])
                rows = min(hi - lo, self.each[p] - row)
                pieces.append((self.plan.parts[p] / f"acts{number:06}.bin", row, rows, lo - a))
                lo += rows
        return pieces

    def divided(self) -> tuple[list[Assembled], list[tuple[Path, Path]]]:
        """Shards that are copied from pieces, and source shards that are used unchanged."""
        copied, moves = [], []
        for shard in range(-(-self.n // self.eps)):
            name = f"{_WORK}/acts{shard:06}.bin"
            count = min(self.n - shard * self.eps, self.eps)
            pieces = self.pieces(shard)
            source, row, rows, _ = pieces[0]
            size = (self.eps if self.full else count) * self.bytes
            if row == 0 and rows == count and _size(source) == size:
                moves.append((source, self.plan.path / name))
                continue
            stretches = tuple(
                (file, a * self.bytes, k * self.bytes, target_row * self.bytes) for file, a, k, target_row in pieces
            )
            copied.append(Assembled(name, stretches, size))
        return copied, moves

    def listing(self) -> list[dict[str, object]]:
        """Contents of shards.json."""
        name = self.dumps[0].fields.name(*N_EXAMPLES)
        word = name if name in ("n_ex", "n_imgs") else "n_examples"
        counts = [min(self.eps, self.n - first) for first in range(0, self.n, self.eps)]
        return [{"name": f"acts{i:06}.bin", word: count} for i, count in enumerate(counts)]

    def labels(self) -> list[Assembled]:
        """The file of patch labels, if the parts have one."""
        files = [part / "labels.bin" for part in self.plan.parts]
        if not files[0].exists():
            return []
        content = self.content
        pieces = tuple(
            (f, 0, k * content, a * content) for f, k, a in zip(files, self.counts, self.starts, strict=False)
        )
        return [Assembled(f"{_WORK}/labels.bin", pieces, self.n * content)]


def _size(path: Path) -> int | None:
    """Size of a file in bytes; None if it does not exist, because it was already moved."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _finish(shards: _Shards) -> Path:
    """Writes the small files and gives the dump its name."""
    plan = shards.plan
    work = plan.path / _WORK
    if any((part / LENGTHS).exists() for part in plan.parts):
        lengths = [
            np.fromfile(part / LENGTHS, "<u4") if (part / LENGTHS).exists() else np.full(count, shards.content, "<u4")
            for part, count in zip(plan.parts, shards.counts, strict=True)
        ]
        write_bytes(work / LENGTHS, np.concatenate(lengths).tobytes())
    write_json(work / "shards.json", shards.listing())
    write_json(work / "metadata.json", shards.metadata)
    _native.sync_files([work])
    rename(work, shards.place)
    return shards.place


class SaevMerger(Merger):
    """Merges dumps into shards with the same number of examples."""

    makes: ClassVar[tuple[str, ...]] = (_WORK,)
    names_itself: ClassVar[bool] = True

    def kind(self, contents: Contents) -> Mapping[str, object]:
        return {
            "tokens per example": contents.tokens_each,
            "protocol": contents.metadata.get("protocol"),
            "patch labels": contents.labels() is not None,
            "dataset": contents.metadata.get("dataset"),
            # Metadata of another format, which are stored there, may differ in notes and times.
            "data": contents.metadata.get("data") if SaevCarrying().origin(contents.metadata) is None else None,
        }

    def predicted(self, parts: Sequence[tuple[int, int, int]], total: tuple[int, int, int]) -> tuple[int, int]:
        return total[1:]

    def check(self, plan: Merge) -> None:
        _check(plan)

    def assembled(self, plan: Merge) -> list[Assembled]:
        shards = _Shards(plan)
        return shards.divided()[0] + shards.labels()

    def taken(self, plan: Merge) -> list[tuple[Path, Path]]:
        return _Shards(plan).divided()[1]

    def place(self, plan: Merge) -> Path:
        return _Shards(plan).place

    def beside(self, plan: Merge) -> tuple[Sequence[str], int, bool]:
        shards = _Shards(plan)
        lengths = any((part / LENGTHS).exists() for part in plan.parts)
        metadata_bytes = len(as_json(shards.listing())) + len(as_json(shards.metadata))
        names = ["shards.json", "metadata.json", *[LENGTHS] * lengths]
        return names, metadata_bytes + lengths * 4 * shards.n, True

    def run(self, plan: Merge) -> Path:
        shards = _Shards(plan)
        if shards.place.exists():  # created before a crash: the path was free when the merge began
            if read_json(shards.place / "metadata.json") != shards.metadata:
                raise ExistsError("another dataset with this name exists; move it away", path=shards.place)
            return shards.place
        return super().run(plan)

    def finish(self, plan: Merge) -> Path:
        return _finish(_Shards(plan))
