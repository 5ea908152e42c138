"""Files of a DeepSpec target cache: manifest.json, index files, shards.

Sources: deepseek-ai/DeepSpec at afdfa7c, ``deepspec/data/target_cache_dataset.py`` (version 2); xlm-research/DeepSpec at 0d63d17
and 022717a (versions 3 and 4). Both forks write version 4, with records of different sizes: ``index_record_size`` decides.

manifest.json    sizes, layers, names of shards; written last
samples.idx      a record per example (actshard_core::layout::records), or samples.cp000.idx ..., one per context-parallel rank
shard-00000.bin  examples back to back: input_ids int32, attention_mask uint8, loss_mask uint8, states bfloat16, last bfloat16
_tmp/rank_0/     an unfinished cache: no manifest yet
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from actshard.base._json import Fields, read_json, show
from actshard.base.errors import FormatError, UnsupportedError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location
from actshard.formats.per_token import LAST, layer_names

MANIFEST = "manifest.json"
INDEX = "samples.idx"
TEMPORARY = "_tmp"
DTYPES = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}
COLUMNS = ("input_ids", "attention_mask", "loss_mask")
"""Per-token columns, in the order in which a shard stores them."""
TOKEN_BYTES = 6
"""Bytes per token of all columns."""
ITEMSIZE = 2
OFFSETS = (*(f"{name}_offset" for name in COLUMNS), "target_hidden_states_offset", "target_last_hidden_states_offset")
_HEAD = (("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"))
_MIDDLE: dict[int, tuple[str, ...]] = {56: (), 60: ("context_len",), 64: ("context_start", "context_len")}
RECORDS = {
    size: np.dtype([*_HEAD, *((name, "<u4") for name in middle), *((name, "<u8") for name in OFFSETS)])
    for size, middle in _MIDDLE.items()
}
"""Records by their size."""
_RECORDS = {2: (56,), 3: (60, 64), 4: (60, 64)}
"""Sizes of records by version."""
_LAYOUTS = {"contiguous": "contiguous", "native_head_tail": "head-tail"}
"""Values of ``context_layout``, each with the core's name for it."""
MOST_RANKS = 1024


@dataclass(frozen=True)
class Manifest:
    """A checked manifest."""

    fields: Fields
    version: int
    num_examples: int
    width: int
    layer_ids: tuple[int, ...]
    last: bool
    """Whether last hidden states are stored."""
    record_bytes: int
    index_names: tuple[str, ...]
    split: str
    """The core's name for how an example's states are divided among index files."""
    shard_names: tuple[str, ...]

    @classmethod
    def of(cls, root: Location, faults: Faults = RAISE) -> Manifest:
        """Reads and checks the manifest.

        Raises:
            FormatError, UnsupportedError: a field is missing or invalid, or the version is not supported.
        """
        path = root / MANIFEST
        fields = Fields(read_json(path), path, faults=faults)
        version = fields.integer("version")
        fields.check()
        if version not in _RECORDS:
            raise UnsupportedError(f"field 'version': expected 2, 3 or 4, found {version}", path=path)
        record = fields.integer("index_record_size")
        fields.check()
        if record not in _RECORDS[version]:
            sizes = " or ".join(map(str, _RECORDS[version]))
            raise fields.error("index_record_size", f"{sizes}, as of version {version}")
        for name, dtype in DTYPES.items():
            if fields.text(name) != dtype:
                fields.check()
                faults.add(UnsupportedError(fields.error(name, f'"{dtype}"').detail, path=path))
        width, layers = fields.integer("hidden_size"), _layers(fields)
        if width * ITEMSIZE * (len(layers) + 1) >= 1 << 32:
            raise fields.error("hidden_size", "less than 4 GiB of states per token")
        indexes, split = _ranks(fields) if version > 2 else ((INDEX,), "contiguous")
        manifest = cls(
            fields,
            version,
            num_examples=fields.integer("num_samples", minimum=0),
            width=width,
            layer_ids=layers,
            last=version < 4 or "stores_target_last_hidden_states" not in fields.value or _stores_last(fields),
            record_bytes=record,
            index_names=indexes,
            split=split,
            shard_names=_shards(fields),
        )
        fields.check()
        return manifest

    @property
    def value(self) -> dict[str, object]:
        """The manifest as stored."""
        return self.fields.value

    @property
    def layers(self) -> tuple[int | str, ...]:
        """Names of layers: ids, -1 for embeddings, then :data:`LAST`."""
        return layer_names(self.layer_ids, LAST if self.last else None)

    @property
    def row_bytes(self) -> int:
        """Bytes of one layer's row."""
        return self.width * ITEMSIZE

    def index_size(self) -> int:
        """Bytes of each index file."""
        return self.num_examples * self.record_bytes


def _stores_last(fields: Fields) -> bool:
    return fields.boolean("stores_target_last_hidden_states")


def _layers(fields: Fields) -> tuple[int, ...]:
    name = "target_layer_ids"
    value = fields.value.get(name)
    if not isinstance(value, list) or not value or any(type(x) is not int or not -1 <= x < 1 << 31 for x in value):
        raise fields.error(name, "a non-empty list of integers of at least -1")
    if any(a > b for a, b in itertools.pairwise(value)):
        raise fields.error(name, "ascending layers, which determine the layer of each part of the states")
    return tuple(value)


def _ranks(fields: Fields) -> tuple[tuple[str, ...], str]:
    """Index files of versions 3 and 4, one per context-parallel rank, and the split of states."""
    ranks = fields.integer("cache_context_parallel_size")
    if ranks > MOST_RANKS:
        raise fields.error("cache_context_parallel_size", f"at most {MOST_RANKS}")
    layout = fields.text("context_layout")
    if layout not in _LAYOUTS:
        raise fields.error("context_layout", " or ".join(f'"{name}"' for name in _LAYOUTS))
    names = fields.value.get("index_files")
    if not isinstance(names, list) or len(names) != ranks:
        raise fields.error("index_files", f"a list of {ranks} names, one per context-parallel rank")
    return tuple(_plain(fields, "index_files", name) for name in names), _LAYOUTS[layout]


def _shards(fields: Fields) -> tuple[str, ...]:
    names = []
    for number, shard in enumerate(fields.items("shards")):
        if shard.integer("shard_id", minimum=0) != number:
            raise shard.error("shard_id", f"{number}: shards in order")
        names.append(_plain(shard, "file_name", shard.text("file_name")))
    if len(names) != fields.integer("num_shards", minimum=0):
        raise fields.error("num_shards", f"{len(names)}, the number of shards listed")
    if len(set(names)) < len(names):
        raise fields.error("shards", "a different file_name for every shard")
    return tuple(names)


def _plain(fields: Fields, field: str, name: object) -> str:
    """A file name in the folder: the manifest must not name files outside."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name or "\\" in name:
        dotted = f"{fields.where}.{field}" if fields.where else field
        raise FormatError(
            f"field '{dotted}': expected the name of a file in the folder, found {show(name)}",
            path=fields.path,
            code="metadata",
        )
    return name
