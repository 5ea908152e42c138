"""Tables of what formats hold as lists of values, of types that nobody promised."""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def table_of(names: Sequence[str], parts: Sequence[tuple[Mapping[str, Any], int]]) -> pa.Table:
    """One table of the parts' columns one below the other: those named first, then all others.

    Args:
        names: columns in order, whether a part has them or not.
        parts: columns by name (pyarrow arrays or lists of values), and how many rows they have. A part without a column has
            nulls there; a column whose parts have different types is given as JSON text.
    """
    import pyarrow as pa

    order = dict.fromkeys([*names, *(name for columns, _ in parts for name in columns)])
    made = {}
    for name in order:
        chunks = [_arrow(columns.get(name), n) for columns, n in parts]
        types = {str(c.type) for c in chunks if c.type != pa.null()}
        if len(types) > 1:
            chunks = [_arrow([_as_json(v) for v in c.to_pylist()], len(c)) for c in chunks]
        kind = next((c.type for c in chunks if c.type != pa.null()), pa.null())
        made[name] = pa.chunked_array([c.cast(kind) if c.type != kind else c for c in chunks], kind)
    return pa.table(made)


def _arrow(values: Any, n: int) -> pa.Array:
    """A column as pyarrow: integers beyond 64 bits as decimals, values that no one type holds as JSON text."""
    import pyarrow as pa

    if values is None:
        return pa.nulls(n)
    if isinstance(values, pa.Array):
        return values
    if any(type(v) is int and not -(1 << 63) <= v < 1 << 63 for v in values):
        try:
            return pa.array([None if v is None else decimal.Decimal(v) for v in values], pa.decimal128(38, 0))
        except (pa.ArrowInvalid, TypeError, ValueError, decimal.InvalidOperation):
            return pa.array([_as_json(v) for v in values], pa.string())
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeError):
        # Values that no one arrow type holds (mixed types, odd objects, lone surrogates): nothing of them is lost as text.
        return pa.array([_as_json(v) for v in values], pa.string())


def _as_json(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """numpy's scalars and arrays and tuples as Python's own numbers and lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, bytearray):
        return bytes(value)
    return value
