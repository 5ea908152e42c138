"""Merges lmprobe datasets: renumbers the tensor files and writes a new index."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import actshard._native as _native
from actshard.base._json import Fields
from actshard.base.errors import FormatError, MissingFileError, UnsupportedError
from actshard.base.location import Location
from actshard.base.work import make_folder, whole_file
from actshard.formats.carrying import Carrying, without_files
from actshard.formats.contents import Contents
from actshard.formats.lmprobe.index import TOKEN_LISTS
from actshard.formats.lmprobe.read import Extraction
from actshard.formats.lmprobe.write import INDEX, MADE_UP
from actshard.formats.merging import Merge, Merger
from actshard.formats.tables import IncompatibleTypesError, as_schema, common_schema

if TYPE_CHECKING:
    import pyarrow as pa


_DESCRIBED = ("type", "layers", "dim", "storage", "pooling", "key_pattern", "k", "num_experts")
"""Descriptor fields that must agree between parts."""
_HIDDEN_FILE = "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors"
_COUNTED = 64 << 20
"""If the parts' indexes are at most this large in bytes, the merged index is written to memory to determine its size."""
_LOGITS = ("logits_topk", "router_logits")


def _schema(datasets: Sequence[Extraction]) -> pa.Schema:
    """The schema with the columns of all indexes."""
    try:
        return functools.reduce(common_schema, (d.schema.remove_metadata() for d in datasets))
    except IncompatibleTypesError as error:
        raise FormatError(f"columns of the parts have incompatible types: {error}") from error


def _check(plan: Merge) -> None:
    datasets = [Extraction(Location.at(p), "auto") for p in plan.parts]
    for path, dataset in zip(plan.parts, datasets, strict=True):
        twice = sorted({n for n in dataset.names if dataset.names.count(n) > 1})
        if twice:
            raise FormatError(f"duplicate column '{twice[0]}'", path=dataset.parts[0])
        known_tensors = {
            *_LOGITS,
            *([dataset.hidden.where.removeprefix("tensors.")] if dataset.hidden is not None else []),
        }
        unknown = sorted(set(dataset.metadata["tensors"]) - known_tensors)
        if unknown:
            raise UnsupportedError(f"merging is not supported for tensors {unknown}", path=path)
        if dataset.hidden is not None:
            layers = dataset.hidden.integers("layers")
            shards = dataset.hidden.items("shards")
            name = dataset.pattern(dataset.hidden, "file_pattern", layers, len(shards))
            if len({name(layer, 0) for layer in layers}) < len(layers):
                raise UnsupportedError(
                    "merging is not supported for files with several layers; convert the dataset first", path=path
                )
            if dataset.hidden.has("last_token_shards"):
                dataset.hidden.integer("last_token_shards", minimum=0)
        missing = next((f for f in dataset.files() if f.kind() != "file"), None)
        if missing is not None:
            raise MissingFileError("expected a file, found nothing; only complete datasets can be merged", path=missing)
    _schema(datasets)


class _Extractions:
    """The parts of a merge, and the numbers that their tensor files get."""

    def __init__(self, plan: Merge) -> None:
        self.plan = plan
        self.datasets = [Extraction(Location.at(p), "auto") for p in plan.parts]
        self.hidden = [d.hidden for d in self.datasets]
        self.described = [h.value if h is not None else {"shards": [], "layers": []} for h in self.hidden]
        self.full = self.described[0].get("storage") == "full_sequence"
        self.lasts = [
            int(h.get("last_token_shards", len(h["shards"]))) if self.full else len(h["shards"]) for h in self.described
        ]
        self.total = sum(self.lasts)
        self.last_at = _starts_of(self.lasts)
        rests = [len(h["shards"]) - k for h, k in zip(self.described, self.lasts, strict=True)]
        self.rest_at = _starts_of(rests)
        self.first_shards: dict[str, list[int]] = {}
        """Number of the first shard of each part, for logits and router logits."""
        self.taken: list[tuple[Path, Path]] = []
        for p, h in enumerate(self.hidden):
            if h is not None:
                self._take_hidden(p, h)
        self.tensors = self._tensors()

    def _take_hidden(self, p: int, hidden: Fields) -> None:
        """Gives the hidden-state shards of a part their new numbers."""
        dataset, shards, layers = self.datasets[p], hidden.items("shards"), hidden.integers("layers")
        name = dataset.pattern(hidden, "file_pattern", layers, len(shards))
        lasts, rests = self.lasts[p], self.total + self.rest_at[p] - self.lasts[p]
        for layer in layers:
            for s, shard in enumerate(shards):
                if shard.value.get("num_tokens", 1):
                    new_number = s + (self.last_at[p] if s < lasts else rests)
                    target = self.plan.path / _HIDDEN_FILE.format(layer=layer, shard=new_number)
                    self.taken.append((dataset.inside(hidden, name(layer, s)).local, target))

    def _tensors(self) -> dict[str, object]:
        """The merged descriptors. Also fills :attr:`first_shards` and :attr:`taken` for tensors other than hidden states."""
        tensors = dict(self.datasets[0].metadata["tensors"])
        merged = [s for h, k in zip(self.described, self.lasts, strict=True) for s in h["shards"][:k]]
        merged += [s for h, k in zip(self.described, self.lasts, strict=True) for s in h["shards"][k:]]
        if self.hidden[0] is not None:
            key = self.hidden[0].where.removeprefix("tensors.")
            tensors[key] = {**self.described[0], "file_pattern": _HIDDEN_FILE, "shards": merged}
            tensors[key] |= {"last_token_shards": self.total} if self.full else {}
        for kind in _LOGITS:
            if kind not in tensors:
                continue
            every = [Fields(d.metadata["tensors"][kind], d.parts[0], f"tensors.{kind}") for d in self.datasets]
            part_shards = [fields.items("shards") for fields in every]
            self.first_shards[kind] = _starts_of([len(s) for s in part_shards])
            descriptions = []
            for p, of_part in enumerate(part_shards):
                files = self.datasets[p].files_of(every[p], len(of_part))
                for s, (shard, source) in enumerate(zip(of_part, files, strict=True)):
                    file = f"tensors/{kind}_{self.first_shards[kind][p] + s:03d}.safetensors"
                    self.taken.append((source.local, self.plan.path / file))
                    descriptions.append({**shard.value, "file": file})
            pattern = f"tensors/{kind}_{{shard:03d}}.safetensors"
            tensors[kind] = {**tensors[kind], "file_pattern": pattern, "shards": descriptions}
        return tensors

    def write_index(self, to: Path | pa.NativeFile) -> None:
        """Writes an index with the new addresses to a path or a stream of pyarrow."""
        import pyarrow as pa

        datasets = self.datasets
        metadata = {
            **datasets[0].metadata,
            "tensors": self.tensors,
            "num_prompts": sum(d.num_rows for d in datasets),
        }
        # Generated texts, which make examples distinct, must stay unique in the merged dataset.
        made_up = [isinstance(d.metadata.get(MADE_UP), list) and "text" in d.metadata[MADE_UP] for d in datasets]
        if not all(made_up):
            metadata.pop(MADE_UP, None)
        keys = {f"lmprobe:{k}".encode(): json.dumps(v).encode() for k, v in metadata.items()}
        schema = _schema(datasets).with_metadata(keys)

        def renumbered(p: int, columns: dict[str, pa.Array | pa.ChunkedArray], row: int, n: int) -> None:
            """Replaces the addresses in a batch of a part's index."""
            if self.hidden[p] is not None:
                columns["shard_index"] = _plus(columns["shard_index"], self.last_at[p])
            elif "logits_topk" in self.first_shards:
                columns["shard_index"] = _plus(columns["shard_index"], self.first_shards["logits_topk"][p])
            if "shard_index_logits" in columns:
                columns["shard_index_logits"] = _plus(
                    columns["shard_index_logits"], self.first_shards["logits_topk"][p]
                )
            if self.full:
                ids = columns[TOKEN_LISTS[0]]
                columns[TOKEN_LISTS[0]] = _renumbered(ids, self.lasts[p], self.last_at[p], self.total + self.rest_at[p])
            if made_up[p]:
                columns["text"] = pa.array([f"example {i}" for i in range(row, row + n)])

        _write_index(to, datasets, schema, renumbered)


def _write_index(
    to: Path | pa.NativeFile,
    datasets: Sequence[Extraction],
    schema: pa.Schema,
    renumbered: Callable[[int, dict[str, pa.ChunkedArray], int, int], None],
) -> None:
    """Writes the merged index to a path or a stream of pyarrow.

    ``renumbered`` is called with (part, columns, rows before, rows) for each batch of the parts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(to, schema) as writer:
        row = 0
        for p, dataset in enumerate(datasets):
            for _, _, batch in dataset.batches(list(dataset.names)):
                columns = {n: batch.column(n) for n in batch.schema.names}
                renumbered(p, columns, row, batch.num_rows)
                row += batch.num_rows
                writer.write_table(as_schema(pa.table(columns), schema))


def _starts_of(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts)[:-1].tolist()]


def _plus(column: pa.ChunkedArray, n: int) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    return pc.add(column, n).cast(column.type)


def _renumbered(column: pa.ChunkedArray, lasts: int, last_at: int, rest_at: int) -> pa.ChunkedArray:
    """Adds an offset to shard numbers in lists: one for last-token shards, another for sequence shards."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = column.values
    moved = pc.if_else(pc.less(flat, lasts), pc.add(flat, last_at), pc.add(flat, rest_at - lasts))
    return pa.ListArray.from_arrays(column.offsets, moved.cast(flat.type))


class LmprobeMerger(Merger):
    """Merges extractions: moves the parts' tensor files and writes a new index."""

    makes: ClassVar[tuple[str, ...]] = ("tensors", "index")

    def kind(self, contents: Contents) -> Mapping[str, object]:
        return {
            "columns": sorted(contents.column_names),
            "tensors": {
                k: {name: v.get(name) for name in _DESCRIBED} if isinstance(v, dict) else v
                for k, v in contents.metadata["tensors"].items()
            },
        }

    def check(self, plan: Merge) -> None:
        _check(plan)

    def taken(self, plan: Merge) -> list[tuple[Path, Path]]:
        return _Extractions(plan).taken

    def finish(self, plan: Merge) -> Path:
        index = plan.path / INDEX
        make_folder(index.parent)
        _native.sync_files([plan.path / "tensors"])
        with whole_file(index) as file:
            _Extractions(plan).write_index(file)
        return plan.path

    def beside(self, plan: Merge) -> tuple[Sequence[str], int, bool]:
        import pyarrow as pa

        parts = _Extractions(plan)
        total = sum(file.local.stat().st_size for dataset in parts.datasets for file in dataset.parts)
        if total > _COUNTED:
            return [INDEX], total, False
        to = pa.BufferOutputStream()
        parts.write_index(to)
        return [INDEX], to.tell(), True


# Columns and metadata of lmprobe extractions in other formats, and the reverse.


_OF_FILES = frozenset(("format_version", "num_prompts", "prompt_ordering", "tensors", "model", MADE_UP))
"""Metadata fields that the writer computes."""


class LmprobeCarrying(Carrying):
    """Drops the index's addresses, and columns that lmprobe requires but that are empty."""

    derived: ClassVar[frozenset[str]] = frozenset(
        ("shard_index", "row_offset", "shard_index_logits", "row_offset_logits", "token_offset", *TOKEN_LISTS)
    )
    model_key: ClassVar[str | None] = "name"

    def names(self, contents: Contents) -> list[str]:
        full = _hidden(contents.metadata).get("storage") == "full_sequence"
        return [name for name in super().names(contents) if not (full and name == "num_tokens")]

    def generated(self, contents: Contents) -> frozenset[str]:
        names = contents.metadata.get(MADE_UP)
        return frozenset({"text"}.intersection(contents.column_names, names if isinstance(names, list) else ()))

    def fillers(self, contents: Contents) -> frozenset[str]:
        import pyarrow as pa
        import pyarrow.compute as pc

        filler_names = self.generated(contents)
        empty = {name for name in ("text", "label", "num_tokens") if name in contents.column_names} - filler_names
        read = contents.column_batches or (lambda names: iter([contents.columns(names)]))  # some examples only
        for table in read(sorted(empty)) if empty else ():
            for name in sorted(empty):
                column = table[name]
                nothing = column.null_count == len(column)
                if name == "text" and not nothing and not column.null_count and pa.types.is_string(column.type):
                    nothing = not pc.max(pc.binary_length(column)).as_py()
                if not nothing:
                    empty.discard(name)
            if not empty:
                break
        return filler_names | empty

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        kept_metadata = without_files(contents.metadata)
        if not isinstance(_tensors(contents.metadata).get("hidden_layers"), dict):
            return kept_metadata
        hidden = {name: value for name, value in _hidden(contents.metadata).items() if name in ("storage", "pooling")}
        return {**kept_metadata, "tensors": {"hidden_layers": hidden}}

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, Any]]:
        declared = metadata.get("model")
        model: dict[str, object] = declared if isinstance(declared, dict) else {}
        rest = {name: value for name, value in metadata.items() if name not in _OF_FILES}
        pooling = _hidden(metadata).get("pooling")
        options = {"pooling": pooling} if isinstance(pooling, str) else {}
        return {"name": model.get("name"), "revision": model.get("revision"), **rest}, options


def _tensors(metadata: Mapping[str, object]) -> dict[str, object]:
    tensors = metadata.get("tensors")
    return tensors if isinstance(tensors, dict) else {}


def _hidden(metadata: Mapping[str, object]) -> dict[str, object]:
    """The descriptor of hidden states; empty if there is none."""
    hidden = _tensors(metadata).get("hidden_layers")
    return hidden if isinstance(hidden, dict) else {}
