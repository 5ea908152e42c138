"""Decides where columns are stored in a Zarr store, as specified by the published text.

Numbers without nulls are arrays with one entry per sample; strings, lists and columns with nulls are lines of JSON.
``sample_key`` is an array of ``S64``. It is ``meta/sample_index.jsonl`` if it does not fit, and in version 3, which has no such
dtype. Every line of prompts and responses repeats it.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.work import whole_file
from actshard.formats.target import TEXTS, array_of
from actshard.formats.zarr.member import ACTIVATIONS, PROMPT, RESPONSE
from actshard.formats.zarr.scales import SCALED

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "sample_key"
KEY_BYTES = 64
_LINES = {"prompt": "text/prompts.jsonl", "response": "text/responses.jsonl", KEY: "meta/sample_index.jsonl"}
"""Files that the published text assigns to columns; other columns go to extra_metadata.jsonl."""
_OTHERS = "text/extra_metadata.jsonl"
_WITH_KEY = (_LINES["prompt"], _LINES["response"])
_NARROW: dict[str, Any] = {"prompt_len": np.int32, "response_len": np.int32, "hallu_label": np.int8, "split": np.int8}
"""Dtypes from the published text, used where values fit."""
_TAKEN = frozenset(node.removeprefix("arrays/") for node in (ACTIVATIONS, PROMPT, RESPONSE)) | {
    "seq_len",
    "zarr.json",
    SCALED,
}
"""Names of arrays that readers interpret as rows or lengths, and of a file in their folder."""
_LONGEST_NAME = 200
"""Longest folder name in bytes; file systems allow 255."""
_AT_ONCE = 16_384


@dataclass(frozen=True)
class Placed:
    """A per-sample array to write, in batches of samples."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    values: Callable[[slice], NDArray[np.generic]]


@dataclass(frozen=True)
class Lines:
    """A file with one line of JSON per sample."""

    file: Path
    columns: Mapping[str, Any]
    n: int

    def write(self, root: Path) -> None:
        """Writes the file in batches of samples."""
        with whole_file(root / self.file) as out:
            for first in range(0, self.n, _AT_ONCE):
                count = min(_AT_ONCE, self.n - first)
                part = [column.slice(first, count).to_pylist() for column in self.columns.values()]
                lines = (
                    json.dumps(
                        {"i": i, **dict(zip(self.columns, values, strict=True))}, ensure_ascii=False, default=_as_json
                    )
                    for i, values in enumerate(zip(*part, strict=True), first)
                )
                out.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def place(columns: pa.Table, *, keys_are_arrays: bool) -> tuple[list[Placed], list[Lines]]:
    """Assigns columns to arrays and files of lines. ``keys_are_arrays``: keys may be an array of fixed-length bytes."""
    own_text = next((name for name in ("prompt", *TEXTS) if name in columns.column_names), None)
    arrays: list[Placed] = []
    texts: dict[str, dict[str, object]] = {}
    for field, column in zip(columns.schema, columns.columns, strict=True):
        if field.name == KEY:
            array = place_key(column) if keys_are_arrays else None
        else:
            array = _number(field, column)
        if array is not None:
            arrays.append(array)
            continue
        column_name = "prompt" if field.name == own_text else field.name
        texts.setdefault(_LINES.get(column_name, _OTHERS), {})[column_name] = column
    if KEY in columns.column_names:
        for file in _WITH_KEY:
            if file in texts:
                texts[file] = {KEY: columns[KEY], **texts[file]}
    return arrays, [Lines(Path(file), of_file, len(columns)) for file, of_file in texts.items()]


def place_key(column: pa.ChunkedArray) -> Placed | None:
    """Keys as fixed-length bytes; None if a key would not read back unchanged."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if column.null_count or not (texts or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return None
    keys = column.cast(pa.large_binary())
    if not len(keys) or pc.max(pc.binary_length(keys)).as_py() > KEY_BYTES:
        return None
    if texts and not pc.all(pc.string_is_ascii(column)).as_py():
        return None
    for chunk in keys.chunks:
        data = chunk.buffers()[2]
        # numpy drops trailing zero bytes of fixed-length bytes.
        if data is not None and b"\0" in data.to_pybytes():
            return None

    def values(part: slice) -> NDArray[np.generic]:
        return np.array(keys[part].to_pylist(), f"S{KEY_BYTES}")

    return Placed(KEY, (len(keys),), np.dtype(f"S{KEY_BYTES}"), values)


def _number(field: pa.Field, column: pa.ChunkedArray) -> Placed | None:
    """A numeric column as an array; None if it has another type, nulls or an unsuitable name."""
    import pyarrow as pa
    import pyarrow.compute as pc

    name, kind = field.name, field.type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    array = pa.types.is_fixed_size_list(kind) and (
        pa.types.is_integer(kind.value_type)
        or pa.types.is_floating(kind.value_type)
        or pa.types.is_boolean(kind.value_type)
    )
    half = field.metadata is not None  # a dtype unknown to arrow and Zarr
    if not (number or (array and not half)) or column.null_count or name in _TAKEN or not _names_a_folder(name):
        return None
    if array and any(chunk.flatten().null_count for chunk in column.chunks):
        return None
    first = array_of(column[:1])
    shape, dtype = (len(column), *first.shape[1:]), first.dtype
    narrow = _NARROW.get(name)
    if narrow is not None and pa.types.is_integer(kind) and len(column):
        ends, limits = pc.min_max(column).as_py(), np.iinfo(np.dtype(narrow))
        if limits.min <= ends["min"] <= ends["max"] <= limits.max:
            dtype = np.dtype(narrow)
    return Placed(name, shape, dtype, lambda part: array_of(column[part]).astype(dtype, copy=False))


def _names_a_folder(name: str) -> bool:
    return (
        bool(name)
        and name.isprintable()
        and "/" not in name
        and not name.startswith(".")
        and len(name.encode()) <= _LONGEST_NAME
    )


def _as_json(value: object) -> object:
    """Converts values for JSON: large integers arrive as decimals, half floats as numpy scalars; others become strings."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return int(value) if isinstance(value, decimal.Decimal) and value == int(value) else str(value)
