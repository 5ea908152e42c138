"""Writes Arrow directories as ``datasets.Dataset.save_to_disk`` and SAELens' CacheActivationsRunner do.

Record batches are appended to data-00000.arrow, data-00001.arrow, ...; a new file begins when a batch would exceed the size limit.
At the end, schemas are completed in place (:mod:`.messages`), files get their final names, and state.json is written: without it no
reader accepts the folder.

Column types may change while examples are appended: nulls get a type, numbers widen. A new file then begins, with the new types.
At the end, files with older types are rewritten.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._columns import map_arrow
from actshard.base.errors import ArgumentError, ArgumentTypeError, FormatError
from actshard.base.location import Location
from actshard.base.work import rename, sync_folders, whole_file, write_bytes
from actshard.formats.carrying import Carrying, without_files
from actshard.formats.hf_arrow.read import OWN
from actshard.formats.target import (
    AllExamples,
    Block,
    Spec,
    Target,
    as_float32,
    only,
    positive,
    uniform,
    without_arrow_type,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


# Arrow types as features of ``datasets``, the JSON that dataset_info.json and the Arrow schema contain.
#
# Lists are written in the notation of datasets 1 to 3 (``"Sequence"``; a JSON list around a dict), which datasets 4 and 5 read
# as ``List``. A ``Sequence`` of a dict would be a dict of lists.
#
# Source: ``datasets/features/features.py`` of datasets 5.2.0, ``generate_from_arrow_type`` and ``Features.from_dict``.


_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_SAME = frozenset(("null", "bool", "string", "large_string", "binary", "large_binary", *_NUMBERS))
"""Types whose names in Arrow and in ``datasets`` are equal."""
_NAMES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "date32[day]": "date32",
    "date64[ms]": "date64",
}
_WITH_PARAMETERS = ("timestamp[", "time32[", "time64[", "duration[", "decimal128(", "decimal256(")


def feature_of(name: str, kind: pa.DataType) -> object:
    """The feature of a column.

    Raises:
        ArgumentError: ``datasets`` has no feature for a type in it.
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if not names or len(set(names)) < len(names) or "_type" in names:
            raise ArgumentError(
                f"columns: {name!r}: expected a dict with different keys, none of them '_type', found {names}; rename them"
            )
        return {field.name: feature_of(name, field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        length = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
        if pa.types.is_struct(kind.value_type):
            if length >= 0:
                raise ArgumentError(
                    f"columns: {name!r}: datasets has no list of {length} dicts; use a list of any length"
                )
            return [feature_of(name, kind.value_type)]
        return {"feature": feature_of(name, kind.value_type), "length": length, "_type": "Sequence"}
    if pa.types.is_large_list(kind):
        return {"feature": feature_of(name, kind.value_type), "_type": "LargeList"}
    text = str(kind)
    if text in _SAME or text in _NAMES or text.startswith(_WITH_PARAMETERS):
        return {"dtype": _NAMES.get(text, text), "_type": "Value"}
    raise ArgumentError(
        f"columns: {name!r}: datasets has no type for {text}; convert the values, or leave the column out"
    )


def check_features(schema: pa.Schema, layers: Sequence[str]) -> None:
    """Raises ArgumentError for columns that an Arrow directory cannot store next to columns of these layers."""
    if conflicts := sorted(set(layers) & set(schema.names)):
        raise ArgumentError(f"columns: {conflicts[0]!r} is the name of a layer's column; rename one of them")
    for name, dtype in without_arrow_type(schema).items():
        raise ArgumentError(f"columns: {name!r}: Arrow has no {dtype}; convert the values to float32")
    for field in schema:
        feature_of(field.name, field.type)


def array_feature(dtype: str, tokens: int | None, width: int) -> dict[str, object]:
    """The feature of sequences of ``tokens`` vectors; None: of any number of vectors."""
    return {"shape": [tokens, width], "dtype": dtype, "_type": "Array2D"}


def vector_feature(dtype: str, width: int) -> dict[str, object]:
    """The feature of single vectors."""
    return {"feature": {"dtype": dtype, "_type": "Value"}, "length": width, "_type": "Sequence"}


# Messages of the written Arrow streams: schemas that can be rewritten in place with another shape, and record batches.
#
#     schema   ff ff ff ff | u32 n | flatbuffer, zeros up to n bytes     n does not depend on the number of tokens
#     batch    ff ff ff ff | u32 n | flatbuffer | body                   as pyarrow serializes it
#     end      ff ff ff ff | 00 00 00 00
#
# The schema contains the number of tokens if it is the same in all examples (the first dimension of ``Array2D``). That is known
# only at the end, so the schema is then rewritten in place.


END = b"\xff\xff\xff\xff\0\0\0\0"
MOST_VALUES = (1 << 31) - 1
"""Limit on the values of a column in one batch: the offsets of Array2D have 32 bits."""
_EXTENSION = "datasets.features.features.Array2DExtensionType"
_MARGIN = 64
"""Bytes reserved for alignment within a flatbuffer."""
_LONGEST = 10**10
"""A first dimension with the largest number of digits, to reserve room for any other."""


@dataclass(frozen=True)
class ArrowColumns:
    """The columns of activations: names, dtype, width, and whether rows are vectors or sequences."""

    names: tuple[str, ...]
    dtype: np.dtype[np.generic]
    width: int
    vectors: bool

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type of a column."""
        import pyarrow as pa

        value = pa.from_numpy_dtype(self.dtype)
        return pa.list_(value, self.width) if self.vectors else pa.list_(pa.list_(value))

    def features(self, columns: pa.Schema, tokens: int | None) -> dict[str, object]:
        """The features of all columns. ``tokens``: tokens per example; None: examples differ."""
        feature = vector_feature(self.dtype.name, self.width)
        if not self.vectors:
            feature = array_feature(self.dtype.name, tokens, self.width)
        return dict.fromkeys(self.names, feature) | {
            field.name: feature_of(field.name, field.type) for field in columns
        }

    def schema(self, columns: pa.Schema, tokens: int | None) -> pa.Schema:
        """The schema as ``datasets`` writes it."""
        import pyarrow as pa

        field_metadata: dict[str, str] | None = None
        if not self.vectors:
            shape = json.dumps([[tokens, self.width], self.dtype.name])
            field_metadata = {"ARROW:extension:name": _EXTENSION, "ARROW:extension:metadata": shape}
        fields = [pa.field(name, self.kind, metadata=field_metadata) for name in self.names]
        info = json.dumps({"info": {"features": self.features(columns, tokens)}})
        plain = [pa.field(field.name, usual(field.type)) for field in columns]
        return pa.schema([*fields, *plain], metadata={"huggingface": info})

    def header(self, columns: pa.Schema, tokens: int | None) -> bytes:
        """The schema's message. Its length depends only on the columns."""
        message = self.schema(columns, tokens).serialize().to_pybytes()
        room = -(-len(self.schema(columns, _LONGEST).serialize()) // 8) * 8 + _MARGIN
        return b"".join([message[:4], (room - 8).to_bytes(4, "little"), message[8:], bytes(room - len(message))])

    def batch(
        self, values: Sequence[NDArray[np.generic]], tokens: NDArray[np.int64], columns: pa.Table | None
    ) -> memoryview:
        """A record batch's message: rows ``(sum of tokens, width)`` of each layer, and columns of the examples.

        At most :data:`MOST_VALUES` values in a layer, and columns of less than 2 GiB.
        """
        import pyarrow as pa

        arrays = [self._array(of_layer, tokens) for of_layer in values]
        column_schema = pa.schema([]) if columns is None else columns.schema
        if columns is not None:
            arrays += arrays_of(columns)
        record_batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema(column_schema, None))
        return memoryview(record_batch.serialize())

    def _array(self, values: NDArray[np.generic], tokens: NDArray[np.int64]) -> pa.Array:
        import pyarrow as pa

        value = pa.from_numpy_dtype(self.dtype)
        flat = np.ascontiguousarray(values).reshape(-1)
        buffer = pa.Array.from_buffers(value, flat.size, [None, pa.py_buffer(flat.view(np.uint8))])
        if self.vectors:
            return pa.FixedSizeListArray.from_arrays(buffer, self.width)
        vectors = pa.ListArray.from_arrays(_ends(len(values), self.width), buffer)
        return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32), vectors)


def _ends(count: int, width: int) -> NDArray[np.int32]:
    return (np.arange(count + 1, dtype=np.int64) * width).astype(np.int32)


def usual(kind: pa.DataType) -> pa.DataType:
    """The type with list elements named as ``datasets`` names them. Parquet files use other names."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, usual(field.type)) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(usual(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(usual(kind.value_type))
    return pa.large_list(usual(kind.value_type)) if pa.types.is_large_list(kind) else kind


def arrays_of(table: pa.Table) -> list[pa.Array]:
    """One array per column, with types from :func:`usual`."""
    import pyarrow as pa

    arrays = []
    for column in table.columns:
        combined, kind = column.combine_chunks(), usual(column.type)
        array = pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
        arrays.append(array if str(array.type) == str(kind) else array.cast(kind))
    return arrays


def same_types(a: pa.Schema, b: pa.Schema) -> bool:
    """Whether two schemas have equal names and types, in the same order."""
    return a.names == b.names and all(x.equals(y) for x, y in zip(a.types, b.types, strict=True))


def info_of(features: Mapping[str, object], metadata: Mapping[str, object]) -> dict[str, object]:
    """The fields of dataset_info.json that ``datasets`` writes, and metadata."""
    texts = {"citation": "", "description": "", "homepage": "", "license": ""}
    return {**texts, **metadata, "features": dict(features)}


INFO, STATE = "dataset_info.json", "state.json"
SHARD_BYTES = 500 << 20
"""The default size of a file, as in ``datasets``."""
_COLUMN_BYTES = 1 << 30
"""The largest size of the examples' columns in one batch: their offsets have 32 bits, too."""
_AT_ONCE = 1000
"""Rows of the columns that a fingerprint reads at once."""
_FILE = re.compile(r"data-(\d{5,})(?:-of-\d+)?\.arrow")
TEXT_FIELDS = ("builder_name", "citation", "config_name", "dataset_name", "description", "homepage", "license")
"""String fields of ``datasets.DatasetInfo``."""
FILE_FIELDS = (
    *("dataset_size", "download_checksums", "download_size", "features", "post_processed", "post_processing_size"),
    *("size_in_bytes", "splits", "supervised_keys", "task_templates", "version", OWN),
)
"""Its other fields, which describe files."""


def column_of(layer: int | str) -> str:
    """The name of a layer's column."""
    return layer if isinstance(layer, str) else f"layer_{layer}"


class HfArrowTarget(Target):
    """Writes an Arrow directory, a row per example and a column per layer."""

    format: ClassVar[str] = "hf_arrow"
    format_options: ClassVar[Mapping[str, str]] = {
        "rows": '"sequences" (Array2D, as SAELens) or "vectors" (one per example); default: vectors if the first examples have '
        "one row each"
    }
    decides: ClassVar[tuple[str, ...]] = ("dtype", "rows")
    copies: float = 2.5
    holds_named_layers = True
    text_column: ClassVar[str | None] = "text"
    keeping_all: ClassVar[str | None] = "rows='sequences' keeps all tokens"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.part is not None:
            raise ArgumentError("part: not supported by hf_arrow; write one dataset")
        self._check_metadata()
        self.columns = tuple(map(column_of, spec.layers))
        if len(set(self.columns)) < len(self.columns):
            raise ArgumentError(
                f"layers: expected names of different columns, found {list(self.columns)}; rename a layer"
            )
        self.rows = spec.options.get("rows")
        if self.rows not in (None, "sequences", "vectors"):
            raise ArgumentError(f'rows: expected "sequences" or "vectors", found {self.rows!r}')
        self.limit = positive({"shard_bytes": spec.shard_bytes}, "shard_bytes", SHARD_BYTES) or SHARD_BYTES
        self._shard = self._size = self._crc = 0
        self._types: list[tuple[int, pa.Schema]] = []
        """Column types over time: the first file with these types, and the types."""
        self._dirty: set[Path] = set()

    def _check_metadata(self) -> None:
        for name, value in self.spec.metadata.items():
            if name in FILE_FIELDS:
                raise ArgumentError(
                    f"metadata: {name!r} is written by actshard, or describes other files; leave it out"
                )
            if name in TEXT_FIELDS and not isinstance(value, str):
                raise ArgumentError(
                    f"metadata: {name!r}: expected a string, which datasets requires, found {value!r:.100}"
                )

    # -- settings --------------------------------------------------------------------------------------------------

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        why = ", because Arrow has no such type" if dtype.name == "bfloat16" else ""
        only(dtype, ("F16", "F32", "F64"), "hf_arrow", why)

    @classmethod
    def conversion_options(
        cls,
        source_options: Mapping[str, object],
        user_options: Mapping[str, object],
        tokens: str,
        pooled: Callable[[], bool],
    ) -> dict[str, object]:
        options = {**source_options, **user_options}
        if "rows" not in options:
            options["rows"] = "vectors" if tokens == "last" or pooled() else "sequences"
        return options

    def take_tokens(self, tokens: int) -> None:
        if self.rows is None:
            self.rows = "vectors" if tokens == 1 else "sequences"

    @property
    def tokens(self) -> int | None:
        return 1 if self.rows == "vectors" else None

    @property
    def most_tokens(self) -> tuple[int, str] | None:
        most = MOST_VALUES // self.spec.d_model
        return (most, f"the 32-bit offsets of Array2D allow {most:,} of {self.spec.d_model} values")

    def check_columns(self, schema: pa.Schema) -> None:
        check_features(schema, self.columns)

    def turned(self, schema: pa.Schema) -> dict[str, str]:
        return {
            name: f"{name} is converted to float32, because Arrow has no {dtype}"
            for name, dtype in without_arrow_type(schema).items()
        }

    def turn(self, table: pa.Table) -> pa.Table:
        return as_float32(table)

    def config(self) -> dict[str, object]:
        return {**super().config(), "rows": self.rows, "limit": self.limit}

    def adopt(self, config: dict[str, object]) -> None:
        super().adopt(config)
        if config["rows"] not in (None, "sequences", "vectors"):
            raise ValueError(f"rows {config['rows']!r}")
        self.rows = config["rows"]

    @property
    def shape(self) -> ArrowColumns:
        """The columns of activations."""
        assert self.dtype is not None
        return ArrowColumns(self.columns, self.dtype, self.spec.d_model, self.rows == "vectors")

    # -- writing ---------------------------------------------------------------------------------------------------

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        import pyarrow as pa

        self.n = len(lengths)
        state = states[-1]
        self._shard, self._size, self._crc = (int(state[name]) for name in ("shard", "size", "crc"))
        self._types = []
        for first, text in state["types"]:
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
            except pa.ArrowException as error:
                raise ValueError(f"types: {error}") from error
            self._types.append((int(first), schema))

    def forget(self, lengths: NDArray[np.int64]) -> None:
        for number, path in self._arrow_files().items():
            if number > self._shard or self._size == 0:
                path.unlink()
            elif number == self._shard and path.stat().st_size > self._size:
                os.truncate(path, self._size)

    def _arrow_files(self) -> dict[int, Path]:
        """The files in the folder, by number. After an interrupted finish, some have their final names already."""
        matches = ((_FILE.fullmatch(path.name), path) for path in self.root.glob("data-*.arrow"))
        return {int(match[1]): path for match, path in matches if match is not None}

    def _path(self, number: int) -> Path:
        return self.root / f"data-{number:05}.arrow"

    def write(self, block: Block) -> None:
        tokens = uniform(block.lengths, "hf_arrow", self.spec.layers)
        self._crc = zlib.crc32(block.bytes.data, self._crc)
        starts = block.starts
        for first, last in self._cuts(tokens, block.columns):
            layer_values = [
                self._values(block, starts[first:last, k], tokens[first:last]) for k in range(len(self.columns))
            ]
            columns = None if block.columns is None else block.columns.slice(first, last - first)
            self._append(self.shape.batch(layer_values, tokens[first:last], columns), columns)
        self.n += len(block)

    def _values(self, block: Block, starts: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.generic]:
        """Rows of one layer, example by example; a view if they are contiguous."""
        ends = np.cumsum(tokens)
        total = int(ends[-1])
        if total and int(starts[-1]) + int(tokens[-1]) - int(starts[0]) == total:
            return block.memory[int(starts[0]) : int(starts[0]) + total]
        return block.memory[np.repeat(starts - (ends - tokens), tokens) + np.arange(total)]

    def _cuts(self, tokens: NDArray[np.int64], columns: pa.Table | None) -> Iterator[tuple[int, int]]:
        """Divides a block's examples into batches that fit 32-bit offsets and the size of a file: (first, end) of each."""
        most = max(1, min(MOST_VALUES, self.limit // (self.itemsize * len(self.columns))) // self.spec.d_model)
        ends = np.cumsum(tokens)
        first = 0
        while first < len(tokens):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
            while (
                columns is not None and last - first > 1 and columns.slice(first, last - first).nbytes > _COLUMN_BYTES
            ):
                last = first + (last - first) // 2
            yield first, last
            first = last

    def _append(self, message: memoryview, columns: pa.Table | None) -> None:
        """Adds a batch to the file, or begins the next one."""
        import pyarrow as pa

        types = pa.schema([]) if columns is None else columns.schema
        last_types = self._types[-1][1] if self._types else None
        changed = last_types is None or not same_types(last_types, types)
        if self._size and (changed or self._size + len(message) + len(END) > self.limit):
            self._put(END)
            self._shard, self._size = self._shard + 1, 0
        if changed:
            self._types.append((self._shard, types.remove_metadata()))
        if self._size == 0:
            self._put(self.shape.header(types, None))
        self._put(message)

    def _put(self, data: bytes | memoryview) -> None:
        path, size = self._path(self._shard), len(data)
        self.put([np.frombuffer(data, np.uint8)], [(path, 0)], [(0, 0, size, 0, self._size)])
        self._dirty.add(path)
        self._size += size

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        types = [(first, base64.b64encode(schema.serialize()).decode()) for first, schema in self._types]
        return sorted(self._dirty), {"shard": self._shard, "size": self._size, "crc": self._crc, "types": types}

    def committed(self) -> None:
        self._dirty.clear()

    # -- finishing -------------------------------------------------------------------------------------------------

    def finish(self, examples: AllExamples) -> None:
        import pyarrow as pa

        tokens = examples.lengths[:, 0]
        same = len(tokens) > 0 and bool((tokens == tokens[0]).all()) and int(tokens[0]) > 0
        tokens_each = int(tokens[0]) if same else None
        types = pa.schema([]) if examples.columns is None else examples.columns.schema
        count = self._shard + 1
        files = self._arrow_files()
        if sorted(files) != list(range(count)):
            raise FormatError(f"expected data files 0 to {count - 1}, found {sorted(files)}", path=self.root)
        self._end(files[self._shard])
        if any(not same_types(schema, types) for _, schema in self._types):
            self._retype(files, types, tokens_each, examples.columns)
        self._complete(files, types, tokens_each)
        names = [f"data-{number:05}-of-{count:05}.arrow" for number in range(count)]
        for number, name in enumerate(names):
            rename(files[number], self.root / name)
        sync_folders([self.root])
        layer_columns = {"columns": list(self.columns), "layers": list(self.spec.layers)}
        info = info_of(self.shape.features(types, tokens_each), {**self.spec.metadata, OWN: layer_columns})
        _write_json(self.root / INFO, info)
        state: dict[str, object] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self._fingerprint(examples),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        _write_json(self.root / STATE, state)

    def _end(self, path: Path) -> None:
        """Writes the end marker of the last file, unless an earlier attempt has rewritten the file with another size."""
        if path.stat().st_size != self._size and _tail(path) == END:
            return
        os.truncate(path, self._size)
        self.put([np.frombuffer(END, np.uint8)], [(path, 0)], [(0, 0, len(END), 0, self._size)])

    def _retype(
        self, files: Mapping[int, Path], types: pa.Schema, tokens_each: int | None, columns: pa.Table | None
    ) -> None:
        """Rewrites files whose columns have older types, with all columns of their examples."""
        import pyarrow as pa

        assert columns is not None
        usual_types = pa.schema([pa.field(field.name, usual(field.type)) for field in types])
        row = 0
        for number in range(len(files)):
            path = files[number]
            with map_arrow(path) as source, pa.ipc.open_stream(source) as stream:
                old = [field for field in stream.schema if field.name not in self.columns]
                if same_types(pa.schema(old), usual_types):
                    row += sum(batch.num_rows for batch in stream)
                    continue
                with whole_file(path) as file:
                    file.write(self.shape.header(types, tokens_each))
                    for batch in stream:
                        batch_columns = columns.slice(row, batch.num_rows)
                        file.write(self._rewrite_batch(batch, batch_columns))
                        row += batch.num_rows
                    file.write(END)
        if row != len(columns):
            raise FormatError(f"expected {len(columns)} rows, found {row}", path=self.root)

    def _rewrite_batch(self, batch: pa.RecordBatch, columns: pa.Table) -> memoryview:
        """The batch with its columns replaced."""
        import pyarrow as pa

        arrays = [batch.column(name) for name in self.columns]
        storages = [array.storage if isinstance(array, pa.ExtensionArray) else array for array in arrays]
        schema = self.shape.schema(columns.schema, None)
        return memoryview(pa.RecordBatch.from_arrays([*storages, *arrays_of(columns)], schema=schema).serialize())

    def _complete(self, files: Mapping[int, Path], types: pa.Schema, tokens_each: int | None) -> None:
        """Rewrites the schema of every file, now that the number of tokens is known."""
        header = self.shape.header(types, tokens_each)
        for path in files.values():
            with path.open("rb") as file:
                prefix = file.read(8)
            if prefix != header[:8]:
                raise FormatError(
                    f"expected a schema of {len(header) - 8} bytes, found {prefix.hex()}", path=path, offset=0
                )
        self.put(
            [np.frombuffer(header, np.uint8)],
            [(path, 0) for path in files.values()],
            [(0, 0, len(header), k, 0) for k in range(len(files))],
        )
        _native.sync_files(list(files.values()))

    def _fingerprint(self, examples: AllExamples) -> str:
        """16 hexadecimal digits that depend on rows, columns and names; ``datasets`` names its caches by them."""
        about = [self.columns, self.shape.dtype.name, self.spec.d_model, self.rows, self._crc]
        digest = hashlib.sha256(json.dumps(about).encode())
        digest.update(np.ascontiguousarray(examples.lengths[:, 0]).tobytes())
        table = examples.columns
        for first in range(0, 0 if table is None else len(table), _AT_ONCE):
            assert table is not None
            for batch in table.slice(first, _AT_ONCE).combine_chunks().to_batches():
                digest.update(memoryview(batch.serialize()))
        return digest.hexdigest()[:16]

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        row = self.spec.d_model * (4 if self.dtype is None else self.itemsize)
        size = int(tokens.sum()) * len(self.columns) * (row + (0 if self.rows == "vectors" else 4)) + 4 * len(tokens)
        shards = max(1, -(-size // self.limit))
        return shards, shards + 2, size


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-len(END), os.SEEK_END)
        return file.read()


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_bytes(path, json.dumps(value, indent=2).encode())


# Metadata of Arrow directories in other formats, and the reverse.


_OF_STATE = (
    *("_data_files", "_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_indices_data_files"),
    *("_indices_files", "_output_all_columns", "_split"),
)


class HfArrowCarrying(Carrying):
    """Drops fields that describe files, and empty strings, which ``datasets`` writes for absent fields."""

    model_key: ClassVar[str | None] = "model"

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        return _about(without_files(contents.metadata))

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        fields = _about(metadata)
        return {k: v for k, v in fields.items() if k not in TEXT_FIELDS or isinstance(v, str)}, {}


def _about(metadata: Mapping[str, object]) -> dict[str, object]:
    omitted_fields = (*_OF_STATE, *FILE_FIELDS)
    return {k: v for k, v in metadata.items() if k not in omitted_fields and (v or k not in TEXT_FIELDS)}


# Saves ``datasets.Dataset`` objects to folders.
#
# The files behind an object can differ from its contents: ``select``, ``shuffle`` and ``filter`` add an indices mapping, and
# columns may be renamed or removed. ``save_to_disk`` writes the contents.


def save(dataset: object, folder: Location) -> None:
    """Writes a ``datasets.Dataset`` to a new folder.

    Raises:
        ArgumentTypeError: the object is a ``DatasetDict`` or an ``IterableDataset``.
    """
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        kind, remedy = type(dataset).__name__, "collect its rows in one first"
        if isinstance(dataset, dict):
            remedy = f"pass one of its splits: {', '.join(map(repr, dataset))}"
        raise ArgumentTypeError(f"src: expected a datasets.Dataset, found {kind}; {remedy}")
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()
