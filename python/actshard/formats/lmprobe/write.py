"""Writes lmprobe datasets, format 2.0, readable by lmprobe 0.10.3.

Where lmprobe's writer differs from the format text (docs/formats/lmprobe.md), files follow its reader, such as in tensor names.
Descriptors contain the true dtypes and row sizes, which its reader ignores. Shards without rows, which it cannot open, are never
written. Full-sequence datasets store last tokens in separate shards, which are numbered first. The number of these shards is known
only at the end, so shards have temporary names until then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import name_of
from actshard.base._columns import numbers
from actshard.base.errors import ArgumentError, FormatError, from_os
from actshard.base.layers import Layer
from actshard.base.work import make_folder, rename, sync_folders, whole_file
from actshard.formats.lmprobe.index import TOKEN_LISTS
from actshard.formats.tables import as_schema, as_text
from actshard.formats.target import (
    FLOATS,
    LOGITS,
    ROUTER,
    TEXTS,
    AllExamples,
    Block,
    Spec,
    Target,
    arrays_in,
    created,
    only,
    positive,
    uniform,
)

if TYPE_CHECKING:
    import pyarrow as pa


# Writes logits and router tensors of lmprobe datasets, in separate files.


def is_router(name: str) -> bool:
    """Whether a column contains the router logits of a layer."""
    return name.startswith(ROUTER) and name.removeprefix(ROUTER).lstrip("-").isdigit()


def write_logits(
    root: Path, limit: int, examples: AllExamples, columns: dict[str, pa.Array | pa.ChunkedArray]
) -> dict[str, Any]:
    """Writes logits and router tensors to files and removes them from the columns. Returns their descriptors.

    Args:
        root: the dataset's folder.
        limit: largest size of a file in bytes.
        examples: all examples.
        columns: the index's columns by name. Address columns are added.
    """
    import pyarrow as pa

    n = len(examples)
    descriptors: dict[str, object] = {}
    if any(name in columns for name in LOGITS):
        if not all(name in columns for name in LOGITS):
            raise ArgumentError(f"columns: expected {LOGITS[0]} and {LOGITS[1]}, found only one of them")
        assert examples.columns is not None
        values, indices = (arrays_in(examples.columns, name) for name in LOGITS)
        per = max(1, limit // (12 * values.shape[1]))
        shards = []
        for i, first in enumerate(range(0, n, per)):
            file = f"tensors/logits_topk_{i:03d}.safetensors"
            part = slice(first, first + per)
            tensors = {"logits_topk.values": values[part], "logits_topk.indices": indices[part].astype(np.int32)}
            _write_tensors(root / file, tensors)
            shards.append({"file": file, "num_prompts": len(values[part])})
        descriptors["logits_topk"] = {
            "type": "logits_topk",
            "k": values.shape[1],
            "dtype": str(values.dtype),
            "pooling": "last_token",
            "file_pattern": "tensors/logits_topk_{shard:03d}.safetensors",
            "row_bytes": values.shape[1] * (values.dtype.itemsize + 4),
            "shards": shards,
        }
        shard, row = np.divmod(np.arange(n), per)
        columns["shard_index_logits"] = pa.array(shard.astype(np.int32))
        columns["row_offset_logits"] = pa.array(row.astype(np.int32))
    routers = sorted(int(name.removeprefix(ROUTER)) for name in columns if is_router(name))
    if routers:
        assert examples.columns is not None
        router_arrays = {layer: arrays_in(examples.columns, f"{ROUTER}{layer}") for layer in routers}
        first_of = router_arrays[routers[0]]
        if any(a.shape != first_of.shape or a.dtype != first_of.dtype for a in router_arrays.values()):
            raise ArgumentError("router: expected the same number of experts and dtype in every layer")
        per = max(1, limit // (first_of.shape[1] * first_of.dtype.itemsize * len(routers)))
        shards = []
        for i, first in enumerate(range(0, n, per)):
            file = f"tensors/router_logits_{i:03d}.safetensors"
            _write_tensors(
                root / file, {f"router.layer_{la}": a[first : first + per] for la, a in router_arrays.items()}
            )
            shards.append({"file": file, "num_prompts": len(first_of[first : first + per])})
        descriptors["router_logits"] = {
            "type": "router",
            "layers": routers,
            "num_experts": first_of.shape[1],
            "dtype": str(first_of.dtype),
            "pooling": "last_token",
            "file_pattern": "tensors/router_logits_{shard:03d}.safetensors",
            "row_bytes": first_of.shape[1] * first_of.dtype.itemsize * len(routers),
            "shards": shards,
        }
    for name in [name for name in columns if name in LOGITS or is_router(name)]:
        del columns[name]
    return descriptors


def _write_tensors(path: Path, tensors: dict[str, NDArray[np.generic]]) -> None:
    """Writes a safetensors file: a JSON header padded to a multiple of 8 bytes, then the tensors."""
    offset, header = 0, {}
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": name_of(array.dtype), "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    working = path.with_name(f".{path.name}.part")
    body = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in tensors.values()]
    _native.write_segments(working, [head, *body])
    _native.sync_files([working])
    rename(working, path)


HEADER = 128
"""Bytes before the rows of a hidden shard: room for a header written when the shard is complete."""
SHARD_BYTES = 1 << 30
"""lmprobe's default shard size."""
OWN_COLUMNS = frozenset(
    ("shard_index", "row_offset", "shard_index_logits", "row_offset_logits", "token_offset", *TOKEN_LISTS)
)
MADE_UP = "made_up"
"""Metadata field that lists generated columns: lmprobe needs a unique text per example."""
OWN_METADATA = ("format_version", "model", "num_prompts", "prompt_ordering", "tensors")
"""Metadata fields that describe the files."""
_INT32 = (1 << 31) - 1
_ROWS_AT_ONCE = 65_536
_TOKENS_AT_ONCE = 1 << 23
"""Number of tokens whose addresses are in memory at once."""
_WORKING = re.compile(r"\.(last|rest)-(-?\d+)-(\d+)\.part")
INDEX = "index/train-00000-of-00001.parquet"


class LmprobeTarget(Target):
    """Writes ``tensors/*.safetensors`` by layer and shard, then a parquet index."""

    writes_parquet = True
    format: ClassVar[str] = "lmprobe"
    format_options: ClassVar[Mapping[str, str]] = {
        "storage": '"pooled" (one row per example) or "full_sequence"; default: determined by the first examples',
        "pooling": 'how rows were pooled (default: "last_token")',
        "model": "name of the source model",
        "revision": "revision of the source model",
    }

    decides: ClassVar[tuple[str, ...]] = ("dtype", "storage")
    holds_logits = True
    splits = "examples"
    finds_by_text = True
    text_column: ClassVar[str | None] = "text"
    empty_examples: ClassVar[str | None] = "lmprobe reads zeros as its last token"
    keeping_all: ClassVar[str | None] = "storage='full_sequence' keeps all tokens"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if conflicts := sorted(set(OWN_METADATA) & spec.metadata.keys()):
            raise ArgumentError(
                f"metadata: {conflicts[0]!r} is reserved in lmprobe, because it describes the files; rename yours"
            )
        # The header must have room for the largest possible shard.
        longest = {"dtype": "BF16", "shape": [10**15, spec.d_model], "data_offsets": [0, 10**18]}
        texts = (json.dumps({f"hidden.layer_{la}": longest}, separators=(",", ":")) for la in spec.layers)
        self.header = max(HEADER, -(-(max(map(len, texts)) + 8) // 64) * 64)
        self.storage = spec.options.get("storage")
        if self.storage not in (None, "pooled", "full_sequence"):
            raise ArgumentError(f'storage: expected "pooled" or "full_sequence", found {self.storage!r}')
        self.pooling = str(spec.options.get("pooling", "last_token"))
        self.limit = positive({"shard_bytes": spec.shard_bytes}, "shard_bytes", SHARD_BYTES) or SHARD_BYTES
        self.created = created(spec, "%Y-%m-%dT%H:%M:%S+00:00")
        self._dirty: set[Path] = set()
        self._rest: list[int] = []
        """Number of rows in each sequence shard."""
        self._weight = 0

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, FLOATS, "lmprobe", "")

    def config(self) -> dict[str, object]:
        options = {name: self.spec.options.get(name) for name in ("pooling", "model", "revision")}
        return {**super().config(), "storage": self.storage, "limit": self.limit, "created": self.created, **options}

    def adopt(self, config: dict[str, Any]) -> None:
        super().adopt(config)
        if config["storage"] not in (None, "pooled", "full_sequence"):
            raise ValueError(f"storage {config['storage']!r}")
        self.storage, self.created = config["storage"], config["created"]

    @classmethod
    def conversion_options(
        cls,
        source_options: Mapping[str, object],
        user_options: Mapping[str, object],
        tokens: str,
        pooled: Callable[[], bool],
    ) -> dict[str, object]:
        options = {**source_options, **user_options}
        if "storage" not in options:
            options["storage"] = "pooled" if tokens == "last" or pooled() else "full_sequence"
        return options

    def take_tokens(self, tokens: int) -> None:
        if self.storage is None:
            self.storage = "pooled" if tokens == 1 else "full_sequence"

    @property
    def tokens(self) -> int | None:
        return 1 if self.storage == "pooled" else None

    @property
    def full(self) -> bool:
        return self.storage == "full_sequence"

    @property
    def rows_per_shard(self) -> int:
        """Rows per shard, for shards with one row per example."""
        return min(max(1, self.limit // self.row_bytes), _INT32)

    @property
    def most_tokens(self) -> tuple[int, str] | None:
        return (_INT32, "lmprobe stores 32-bit token counts")

    # -- columns ---------------------------------------------------------------------------------------------------

    def check_columns(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        is_ = pa.types
        types = {field.name: field.type for field in schema}
        reserved_names = OWN_COLUMNS | ({"num_tokens"} if self.full else set())
        if conflicts := sorted(reserved_names & types.keys()):
            raise ArgumentError(f"columns: {conflicts[0]!r} is reserved in lmprobe; rename the column")
        if (label := types.get("label")) is not None and not _is_label(label):
            raise ArgumentError(
                f"label: expected 32-bit integers, or text, as in lmprobe, found {label}; rename or convert the column"
            )
        counts = types.get("num_tokens")
        if counts is not None and not (is_.is_integer(counts) or is_.is_null(counts)):
            raise ArgumentError(f"num_tokens: expected 32-bit integers, found {counts}")
        text = next((name for name in TEXTS if name in types), None)
        if text is not None and not _is_text(types[text]):
            raise ArgumentError(f"{text}: expected strings, by which lmprobe finds examples, found {types[text]}")
        self._check_arrays(schema)

    def _check_arrays(self, schema: pa.Schema) -> None:
        """Checks logits and router logits, which are stored in separate files: numeric arrays of equal widths."""
        import pyarrow as pa

        routers = [name for name in schema.names if is_router(name)]
        logits = [name for name in LOGITS if name in schema.names]
        for name in (*logits, *routers):
            kind = schema.field(name).type
            value = kind.value_type if pa.types.is_fixed_size_list(kind) else None
            if value is None or not (pa.types.is_integer(value) or pa.types.is_floating(value)):
                raise ArgumentError(f"{name}: expected (batch, k) numbers, found {kind}")
        if logits:
            if len(logits) < len(LOGITS):
                raise ArgumentError(f"columns: expected {LOGITS[0]} and {LOGITS[1]}, found only one of them")
            values, indices = (schema.field(name).type for name in LOGITS)
            if values.list_size != indices.list_size or not pa.types.is_integer(indices.value_type):
                raise ArgumentError(f"logits: expected as many integer indices as values, found {values} and {indices}")
        first = [(schema.field(name).type, schema.field(name).metadata) for name in routers[:1]]
        if any((schema.field(name).type, schema.field(name).metadata) != first[0] for name in routers):
            raise ArgumentError("router: expected the same number of experts and dtype in every layer")

    def check_values(self, table: pa.Table, first: int) -> None:
        import pyarrow as pa

        for name in ("label", "num_tokens"):
            if name in table.column_names and not _is_text(table.schema.field(name).type):
                _int32(name, table[name], first)
        for name in table.column_names:
            if name in LOGITS or is_router(name):
                arrays = arrays_in(table, name)
                if name == LOGITS[1] and arrays.size and not 0 <= arrays.min() <= arrays.max() <= _INT32:
                    raise ArgumentError(f"{name}, from example {first}: expected 32-bit token indices")
                if any(chunk.flatten().null_count for chunk in pa.chunked_array(table[name]).chunks):
                    raise ArgumentError(f"{name}, from example {first}: expected numbers, found nulls")

    def turned(self, schema: pa.Schema) -> dict[str, str]:
        conversions = {}
        text = next((name for name in TEXTS if name in schema.names), None)
        for name in ("label", text):
            if name is not None and name in schema.names:
                kind = schema.field(name).type
                if not (_is_label(kind) if name == "label" else _is_text(kind)):
                    conversions[name] = f"{name} is converted to text, because lmprobe cannot store {kind}"
        return conversions

    def turn(self, table: pa.Table) -> pa.Table:
        import pyarrow as pa

        for name in self.turned(table.schema):
            index = table.schema.get_field_index(name)
            table = table.set_column(index, pa.field(name, pa.string()), as_text(table[name]))
        return table

    # -- writing ---------------------------------------------------------------------------------------------------

    def _working(self, layer: Layer, kind: str, shard: int) -> Path:
        return self.root / "tensors" / f".{kind}-{layer}-{shard}.part"

    def restore(self, states: Sequence[dict[str, object]], lengths: NDArray[np.int64]) -> None:
        self.n = 0
        self._rest, self._weight = [], 0
        if self.full and len(lengths):
            self._assign(lengths[:, 0])
        self.n = len(lengths)

    def forget(self, lengths: NDArray[np.int64]) -> None:
        if self.dtype is None:
            return
        shard, row = divmod(len(lengths), self.rows_per_shard)
        rows_of = {"last": [self.rows_per_shard] * shard + [row] * (row > 0), "rest": self._rest}
        for path in (self.root / "tensors").glob(".*.part"):
            match = _WORKING.fullmatch(path.name)
            kind, layer, number = match.groups() if match is not None else ("", "", "")
            if not kind or int(layer) not in self.spec.layers or int(number) >= len(rows_of[kind]):
                path.unlink()
            elif path.stat().st_size > (size := self.header + rows_of[kind][int(number)] * self.row_bytes):
                os.truncate(path, size)

    def _assign(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequence shard and first row of each example, assigned greedily like lmprobe's writer.

        An example without rows never begins a shard, because lmprobe cannot open an empty shard.
        """
        shards, firsts = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.int64)
        for i, rows in enumerate(np.maximum(tokens - 1, 0).tolist()):
            if rows and (not self._rest or (self._rest[-1] and self._weight + rows * self.row_bytes > self.limit)):
                self._rest.append(0)
                self._weight = 0
            if rows:
                shards[i], firsts[i] = len(self._rest) - 1, self._rest[-1]
                self._rest[-1] += rows
                self._weight += rows * self.row_bytes
        return shards, firsts

    def borders(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.full:
            return np.arange(0, len(lengths), self.rows_per_shard)
        # The borders of last-token shards are ignored, because these shards are small.
        self._rest, self._weight = [], 0
        _, firsts = self._assign(lengths[:, 0])
        self._rest, self._weight = [], 0
        begins: NDArray[np.int64] = np.flatnonzero((firsts == 0) & (lengths[:, 0] > 1))
        return begins

    def states_at(
        self, lengths: NDArray[np.int64], firsts: Sequence[int], blocks: Sequence[int]
    ) -> list[dict[str, Any]]:
        states, previous = [], 0
        self._rest, self._weight = [], 0
        for first in firsts:
            if self.full:
                self._assign(lengths[previous:first, 0])
            states.append(
                {"shards": len(self._rest), "rows": self._rest[-1] if self._rest else 0, "weight": self._weight}
            )
            previous = first
        self._rest, self._weight = [], 0
        return states

    def begin_at(self, first: int, state: Mapping[str, Any]) -> None:
        shards, rows = int(state["shards"]), int(state["rows"])
        self.n, self._weight = first, int(state["weight"])
        self._rest = [0] * (shards - 1) + [rows] if shards else []

    @property
    def room(self) -> int:
        return self.header

    def write(self, block: Block) -> None:
        make_folder(self.root / "tensors")
        tokens = uniform(block.lengths, "lmprobe", self.spec.layers)
        if not self.full and (tokens != 1).any():
            bad = int(np.flatnonzero(tokens != 1)[0])
            raise ArgumentError(
                f"example {self.n + bad} has {tokens[bad]} tokens: storage='pooled' stores one row per example; "
                "use storage='full_sequence' to store all"
            )
        size, per = self.row_bytes, self.rows_per_shard
        last, row = np.divmod(np.arange(self.n, self.n + len(block)), per)
        shards, firsts = self._assign(tokens) if self.full else (last, row)
        files: dict[Path, int] = {}
        pieces = []

        def add(
            start: NDArray[np.int64], rows: NDArray[np.int64], path: list[Path], file_rows: NDArray[np.int64]
        ) -> None:
            number = np.array([files.setdefault(p, len(files)) for p in path], np.int64)
            table = np.stack(
                [np.zeros_like(start), start * size, rows * size, number, self.header + file_rows * size], axis=1
            )
            pieces.append(table[rows > 0])

        # An example without tokens gets a row of zeros, because its address must be valid.
        none = (tokens == 0).astype(np.int64)
        for group, layer in enumerate(self.spec.layers):
            starts = block.starts[:, group]
            at_last = [self._working(layer, "last", int(s)) for s in last]
            add(starts + np.maximum(tokens - 1, 0), 1 - none, at_last, row)
            if self.full:
                has_rest = tokens > 1
                at_rest = [self._working(layer, "rest", int(s)) for s in shards[has_rest]]
                add(starts[has_rest], tokens[has_rest] - 1, at_rest, firsts[has_rest])
        empty = []
        for layer in self.spec.layers:
            for s, r in zip(last[none > 0].tolist(), row[none > 0].tolist(), strict=True):
                number = files.setdefault(self._working(layer, "last", s), len(files))
                empty.append((1, 0, size, number, self.header + r * size))
        pieces.append(np.array(empty, np.int64).reshape(-1, 5))
        zeros = np.zeros(size, np.uint8)
        self.put([block.bytes, zeros], [(path, 0) for path in files], np.concatenate(pieces))
        self._dirty |= set(files)
        self.n += len(block)

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return sorted(self._dirty), {}

    def committed(self) -> None:
        self._dirty.clear()

    # -- finishing -------------------------------------------------------------------------------------------------

    def finish(self, examples: AllExamples) -> None:
        tokens = examples.lengths[:, 0]
        self.restore([], examples.lengths)
        n, per = len(examples), self.rows_per_shard
        lasts = [min(per, n - first) for first in range(0, n, per)]
        shards: list[dict[str, int]]
        if self.full:
            counts = self._counts(tokens)
            shards = [{"num_prompts": c, "num_tokens": c} for c in lasts]
            shards += [{"num_prompts": p, "num_tokens": r} for p, r in zip(counts, self._rest, strict=True)]
        else:
            shards = [{"num_prompts": c} for c in lasts]
        wrote: list[str | os.PathLike[str]] = []
        for layer in self.spec.layers:
            for kind, rows, offset in (("last", lasts, 0), ("rest", self._rest, len(lasts))):
                for i, count in enumerate(rows):
                    name = f"hidden_layer{layer:03d}_shard{offset + i:03d}.safetensors"
                    wrote.append(self._complete(self._working(layer, kind, i), name, layer, count))
        tensors = {"hidden_layers": self._descriptor(shards, len(lasts))}
        columns = self._columns(examples, tokens)
        tensors |= write_logits(self.root, self.limit, examples, columns)
        _native.sync_files(wrote)
        sync_folders([self.root / "tensors"])
        for stray in (self.root / "tensors").glob(".*.part"):
            stray.unlink()
        sync_folders([self.root / "tensors"])
        self._write_index(examples, columns, tensors)

    def _counts(self, tokens: NDArray[np.int64]) -> list[int]:
        """Number of prompts per sequence shard. A prompt without rows counts for the current shard."""
        self._rest, self._weight = [], 0
        shards, _ = self._assign(tokens)
        shard_numbers = np.maximum.accumulate(np.where(tokens > 1, shards, 0)) if len(tokens) else shards
        counts: list[int] = np.bincount(shard_numbers, minlength=len(self._rest))[: len(self._rest)].tolist()
        return counts

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        self._rest, self._weight = [], 0
        if self.full:
            self._assign(tokens)
        per_layer = -(-len(tokens) // self.rows_per_shard) + len(self._rest)
        shards = per_layer * len(self.spec.layers)
        rows = int(np.maximum(tokens, 1).sum()) * len(self.spec.layers)
        self._rest, self._weight = [], 0
        return shards, shards + 1, rows * self.row_bytes + shards * self.header

    def _complete(self, working: Path, name: str, layer: Layer, rows: int) -> Path:
        """Writes the header of a complete shard and renames the shard."""
        path = working.with_name(name)
        if not working.exists():
            return path  # completed before a crash; opening reports errors
        shape, end = [rows, self.spec.d_model], rows * self.row_bytes
        assert self.dtype is not None
        tensor = {"dtype": name_of(self.dtype), "shape": shape, "data_offsets": [0, end]}
        text = json.dumps({f"hidden.layer_{layer}": tensor}, separators=(",", ":")).encode()
        if len(text) > self.header - 8:
            raise FormatError(f"layer {layer}, {shape}: the safetensors header exceeds {self.header - 8} bytes")
        try:
            with working.open("r+b") as file:
                file.write((self.header - 8).to_bytes(8, "little") + text.ljust(self.header - 8))
                file.truncate(self.header + end)
        except OSError as error:
            raise from_os(error, working, "write") from error
        _native.sync_files([working])
        rename(working, path)
        return path

    def _descriptor(self, shards: list[dict[str, int]], lasts: int) -> dict[str, object]:
        assert self.dtype is not None
        descriptor: dict[str, object] = {
            "type": "hidden",
            "layers": list(self.spec.layers),
            "dim": self.spec.d_model,
            "dtype": str(self.dtype),
            "layout": "per_layer",
            "file_pattern": "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors",
            "key_pattern": "hidden.layer_{layer}",
            "storage": self.storage,
        }
        if self.full:
            return {**descriptor, "last_token_shards": lasts, "shards": shards}
        return {**descriptor, "pooling": self.pooling, "row_bytes": self.row_bytes, "shards": shards}

    def _columns(self, examples: AllExamples, tokens: NDArray[np.int64]) -> dict[str, pa.Array | pa.ChunkedArray]:
        """The index's columns by name, except the per-token lists."""
        import pyarrow as pa

        n = len(examples)
        columns = (
            {}
            if examples.columns is None
            else dict(zip(examples.columns.column_names, examples.columns.columns, strict=True))
        )
        text = next((columns.pop(name) for name in TEXTS if name in columns), None)  # "text" precedes its other names
        last, row = np.divmod(np.arange(n), self.rows_per_shard)
        index_columns: dict[str, object] = {
            "label": _label(columns.pop("label", None), n),
            "num_tokens": self._num_tokens(columns.pop("num_tokens", None), tokens),
            "shard_index": numbers(last.astype(np.int32)),
            "row_offset": numbers(row.astype(np.int32)),
        }
        if text is not None:
            index_columns["text"] = text.cast(pa.string()) if _is_text(text.type) else as_text(text)
        if self.full:
            index_columns["token_offset"] = numbers(row)
        index_columns |= {name: columns[name] for name in sorted(columns)}
        return index_columns

    def _num_tokens(self, column: pa.ChunkedArray | None, tokens: NDArray[np.int64]) -> pa.Array:
        """Token counts. For pooled data, the caller's counts or nulls, as lmprobe writes them."""
        import pyarrow as pa

        if self.full:
            return numbers(tokens.astype(np.int32))
        if column is None:
            return pa.nulls(len(tokens), pa.int32())
        try:
            return column.cast(pa.int32())
        except pa.ArrowException as error:
            raise ArgumentError(f"num_tokens: expected 32-bit integers: {error}") from error

    def _write_index(
        self, examples: AllExamples, columns: dict[str, pa.Array | pa.ChunkedArray], tensors: Mapping[str, object]
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        index = self.root / INDEX
        make_folder(index.parent)
        meta = self.spec.metadata
        model = {
            "name": self.spec.options.get("model") or meta.get("name"),
            "revision": self.spec.options.get("revision") or meta.get("revision"),
        }
        provenance = {
            "lmprobe_version": None,
            "extraction_backend": "local",
            "nnsight_version": None,
            "torch_version": None,
            "transformers_version": None,
            "python_version": None,
            "created_at": self.created,
            "written_by": f"actshard {_native.build_info()['version']}",
        }
        info = {
            "format_version": "2.0",
            "model": model,
            "num_prompts": len(examples),
            "prompt_ordering": "given",
            "tensors": tensors,
            "provenance": provenance,
            **{k: v for k, v in meta.items() if k not in ("name", "revision", MADE_UP)},
        }
        no_text = "text" not in columns
        if no_text:
            info[MADE_UP] = ["text"]
        keys = {f"lmprobe:{k}".encode(): json.dumps(v).encode() for k, v in info.items()}
        lists = [(name, pa.list_(pa.int64())) for name in TOKEN_LISTS] if self.full else []
        fields = [pa.field(name, column.type) for name, column in columns.items()] + [pa.field(*f) for f in lists]
        if no_text:
            fields.append(pa.field("text", pa.string()))
        # lmprobe's order: its own columns, then others by name.
        core = ["text", "label", "num_tokens", "shard_index", "row_offset"]
        core += [c for c in ("shard_index_logits", "row_offset_logits", "token_offset") if c in columns]
        rest = sorted(f.name for f in fields if f.name not in core)
        by_name = {f.name: f for f in fields}
        schema = pa.schema([by_name[name] for name in (*core, *rest)], metadata=keys)
        table = pa.table(columns)
        self._rest, self._weight = [], 0
        lasts = -(-len(examples) // self.rows_per_shard)
        with whole_file(index) as file, pq.ParquetWriter(file, schema) as writer:
            for first, last in _slices(examples.lengths[:, 0], self.full):
                part = table.slice(first, last - first)
                if no_text:
                    part = part.append_column("text", pa.array([self._text_of(i) for i in range(first, last)]))
                if self.full:
                    tokens = examples.lengths[first:last, 0]
                    for (name, _), values in zip(lists, self._token_lists(tokens, first, lasts), strict=True):
                        part = part.append_column(name, values)
                writer.write_table(as_schema(part, schema))

    def _text_of(self, example: int) -> str:
        """Generated text of an example, unique because lmprobe finds examples by text."""
        part = "" if self.spec.part is None else f" of part {self.spec.part[0]}"
        return f"example {example}{part}"

    def _token_lists(self, tokens: NDArray[np.int64], first: int, lasts: int) -> tuple[pa.Array, pa.Array]:
        """Shard and row of every token of some examples: last tokens in last-token shards, others in sequence shards."""
        import pyarrow as pa

        shards, firsts = self._assign(tokens)
        ends = np.cumsum(tokens)
        total = int(ends[-1]) if len(ends) else 0
        offsets = numbers(np.concatenate([[0], ends]).astype(np.int32))
        ids = np.repeat(shards + lasts, tokens)
        rows = np.arange(total) - np.repeat(ends - tokens, tokens) + np.repeat(firsts, tokens)
        has_tokens = tokens > 0
        last, row = np.divmod(np.arange(first, first + len(tokens)), self.rows_per_shard)
        ids[ends[has_tokens] - 1], rows[ends[has_tokens] - 1] = last[has_tokens], row[has_tokens]
        return pa.ListArray.from_arrays(offsets, numbers(ids)), pa.ListArray.from_arrays(offsets, numbers(rows))


def _slices(tokens: NDArray[np.int64], full: bool) -> list[tuple[int, int]]:
    """Ranges of examples to write at once, limited by rows and tokens, with at least one example."""
    slices, first = [], 0
    while first < len(tokens):
        last = min(first + _ROWS_AT_ONCE, len(tokens))
        if full:
            ends = np.cumsum(tokens[first:last])
            last = first + max(1, int(np.searchsorted(ends, _TOKENS_AT_ONCE, "right")))
        slices.append((first, last))
        first = last
    return slices


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _is_label(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind)) or _is_text(kind)


def _int32(name: str, column: pa.ChunkedArray, first: int) -> None:
    """Raises ArgumentError for integers beyond 32 bits."""
    import pyarrow as pa

    try:
        column.cast(pa.int32())
    except pa.ArrowException as error:
        raise ArgumentError(f"{name}, from example {first}: expected 32-bit integers: {error}") from error


def _label(column: pa.ChunkedArray | None, n: int) -> pa.Array:
    """Labels as lmprobe stores them: int32 if all are integers or null, else text."""
    import pyarrow as pa

    if column is None or pa.types.is_null(column.type):
        return pa.nulls(n, pa.int32())
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return column.cast(pa.int32())
    return as_text(column)
