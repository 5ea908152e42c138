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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._columns import map_arrow
from actshard.base.errors import ArgumentError, FormatError
from actshard.base.work import rename, sync_folders, whole_file, write_bytes
from actshard.formats.hf_arrow.features import check_features
from actshard.formats.hf_arrow.messages import END, MOST_VALUES, ArrowColumns, arrays_of, info_of, same_types, usual
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
