"""Normalises the arguments of ``append``: activations as numpy arrays, everything else as one Arrow table.

Blocks wait in memory until they are written, but the caller may reuse its arrays after the call. So all arrays are copied here,
except activations, which the writer copies itself. Arrow data are immutable and not copied.
"""

from __future__ import annotations

import decimal
import itertools
import sys
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base._arguments import name_of
from actshard.base.errors import ActshardError, ArgumentError, DtypeError
from actshard.formats.target import FLOATS, LOGITS, PATCH_LABELS, ROUTER, list_column
from actshard.writing.columns import RESERVED

if TYPE_CHECKING:
    import pyarrow as pa


class GivenExamples:
    """The activations of one append() call, as one 4-D array or a list of 3-D arrays."""

    def __init__(self, activations: object, lengths: ArrayLike | None, layers: int, d_model: int) -> None:
        self.dense: NDArray[np.generic] | None = None
        self.padded = 0
        """Tokens of each example of a batch with lengths, padding included; 0 for other batches."""
        self.items: list[NDArray[np.generic]] = []
        self.one_row = False
        expected = f"(batch, {layers}, tokens, {d_model}), (batch, {layers}, {d_model}), or a list of ({layers}, tokens, {d_model})"
        if isinstance(activations, list | tuple):
            self.items = [as_numpy(x) for x in activations]
            self.one_row = bool(self.items) and all(x.ndim == 2 for x in self.items)
            self.items = [x[:, None, :] if x.ndim == 2 else x for x in self.items]
            for i, x in enumerate(self.items):
                if x.ndim != 3 or x.shape[0] != layers or x.shape[2] != d_model:
                    raise ArgumentError(f"activations: expected {expected}, found {x.shape} at {i}")
                if x.dtype != self.items[0].dtype:
                    raise DtypeError(
                        f"activations: expected one dtype, found {self.items[0].dtype} and {x.dtype} at {i}"
                    )
            if lengths is not None:
                raise ArgumentError("lengths: expected None for a list, whose arrays have their own lengths")
            self.tokens = np.array([x.shape[1] for x in self.items], np.int64)
            self.dtype = self.items[0].dtype if self.items else np.dtype(np.float32)
            return
        dense = as_numpy(activations)
        self.one_row = dense.ndim == 3
        dense = dense[:, :, None, :] if dense.ndim == 3 else dense
        if dense.ndim != 4 or dense.shape[1] != layers or dense.shape[3] != d_model:
            raise ArgumentError(f"activations: expected {expected}, found {as_numpy(activations).shape}")
        self.dense, self.dtype = dense, dense.dtype
        self.tokens = np.full(len(dense), dense.shape[2], np.int64)
        if lengths is not None:
            self.tokens, shape = _arguments.index(
                as_numpy(lengths) if not isinstance(lengths, list | tuple) else lengths, "lengths"
            )
            if shape != [len(dense)] or (
                len(dense) and not 0 <= self.tokens.min() <= self.tokens.max() <= dense.shape[2]
            ):
                raise ArgumentError(
                    f"lengths: expected {len(dense)} integers of 0 to {dense.shape[2]}, found {lengths!r:.80}"
                )
            self.tokens, self.padded = self.tokens.copy(), dense.shape[2]

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(
        self, part: slice, tokens: NDArray[np.int64], out: NDArray[np.generic], dtype: np.dtype[np.generic]
    ) -> None:
        """Copies examples into ``out`` consecutively, each truncated or zero-padded to its entry of ``tokens``."""
        if self.dense is not None and (tokens == self.dense.shape[2]).all() and (self.tokens[part] == tokens).all():
            convert(self.dense[part], out, dtype)
            return
        position = 0
        for i, want in zip(range(part.start, part.stop), tokens.tolist(), strict=True):
            array = self.items[i] if self.dense is None else self.dense[i]
            has = min(int(self.tokens[i]), want)
            layers = array.shape[0]
            rows = out[position : position + layers * want].reshape(layers, want, out.shape[1])
            if has == want:
                convert(array[:, :has], rows, dtype)
            else:
                rows[:, has:] = 0
                for layer in range(layers):
                    convert(array[layer, :has], rows[layer, :has], dtype)
            position += layers * want


def convert(source: NDArray[np.generic], out: NDArray[np.generic], dtype: np.dtype[np.generic]) -> None:
    """Copies an array into C-contiguous memory, cast to ``dtype``."""
    contiguous = np.ascontiguousarray(source)
    if contiguous.nbytes < 1 << 16 and contiguous.dtype == dtype:
        out.reshape(-1)[:] = contiguous.reshape(-1)
        return
    raw = contiguous.reshape(-1).view(np.uint8)
    _native.cast_into(raw, name_of(contiguous.dtype), out.reshape(-1), name_of(dtype))


def overflows(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> int:
    """Counts finite values that are too large for ``dtype``."""
    count: int = _native.count_overflows(np.ascontiguousarray(array), dtype) if can_overflow(array.dtype, dtype) else 0
    return count


def can_overflow(source: np.dtype[np.generic], dtype: np.dtype[np.generic]) -> bool:
    """Whether ``source`` has finite values that are too large for ``dtype``."""
    narrow, wide = _finite(dtype), _finite(source)
    return narrow is not None and (wide is None or wide > narrow)


def _finite(dtype: np.dtype[np.generic]) -> float | None:
    """The largest finite value of a float dtype; None for other dtypes."""
    import ml_dtypes

    limits: Any = ml_dtypes.finfo
    return float(limits(dtype).max) if name_of(dtype) in FLOATS else None


def as_numpy(value: object) -> NDArray[Any]:
    """Converts an array or tensor (any device, also bfloat16) to numpy in native byte order. Copies only if needed."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().to("cpu")
        if tensor.dtype == torch.bfloat16:
            bits: NDArray[np.generic] = tensor.contiguous().view(torch.int16).numpy()
            return bits.view(_arguments.NUMPY_BY_NAME["BF16"])
        try:
            plain: NDArray[np.generic] = tensor.numpy()
        except (TypeError, RuntimeError) as error:
            raise ArgumentError(f"expected a tensor of numbers, found {tensor.dtype}: {error}") from error
        return plain
    array = _arguments.as_array(value, "expected an array or a tensor")
    if array.dtype.kind not in "biuf" and array.dtype not in _arguments.NUMPY_BY_NAME.values():
        raise ArgumentError(f"expected an array of numbers, found {array.dtype} from {type(value).__name__}")
    return _native_order(array)


def table_of(
    columns: Mapping[str, object] | pa.Table | None,
    labels: ArrayLike | None,
    logits: tuple[ArrayLike, ArrayLike] | None,
    router: Mapping[int, ArrayLike] | None,
    n: int,
    examples: GivenExamples | None = None,
) -> pa.Table | None:
    """Returns columns, labels, logits and router logits as one table with ``n`` rows; None without any.

    Arrays of (batch, tokens) in ``columns`` are cut like the activations of ``examples``, a batch with lengths.
    """
    import pyarrow as pa

    fields: list[pa.Field] = []
    values: list[object] = []
    if columns is not None and not isinstance(columns, Mapping | pa.Table):
        raise ArgumentError(f"columns: expected a mapping from names to values, found {type(columns).__name__}")
    if isinstance(columns, pa.Table):
        entries = list(zip(columns.schema, columns.columns, strict=True))
    else:
        entries = [(pa.field(_name(name), pa.null()), column) for name, column in (columns or {}).items()]
    for field, column in entries:
        if not isinstance(column, pa.Array | pa.ChunkedArray):
            field, column = _column(field.name, column, n, examples)  # noqa: PLW2901 -- the same column
        else:
            field = pa.field(_name(field.name), column.type, metadata=_element_type(field))  # noqa: PLW2901 -- the same column
        if len(column) != n:
            raise ArgumentError(f"columns: {field.name!r}: expected {n} values, one per example, found {len(column)}")
        fields.append(field)
        values.append(column)
    arrays: dict[str, pa.Array] = {}
    if labels is not None:
        arrays[PATCH_LABELS] = as_numpy(labels).copy()
        if arrays[PATCH_LABELS].dtype != np.uint8:
            raise DtypeError(f"labels: expected uint8, found {arrays[PATCH_LABELS].dtype}")
    if logits is not None:
        if not isinstance(logits, tuple | list) or len(logits) != len(LOGITS):
            raise ArgumentError("logits: expected (values, indices)")
        arrays |= dict(zip(LOGITS, (as_numpy(a).copy() for a in logits), strict=True))
    if router is not None and not isinstance(router, Mapping):
        raise ArgumentError(f"router: expected a mapping from layers to arrays, found {type(router).__name__}")
    for layer, of_layer in (router or {}).items():
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
            raise ArgumentError(f"router: expected a layer's number, found {layer!r:.100}")
        arrays[f"{ROUTER}{int(layer)}"] = as_numpy(of_layer).copy()
    for name, array in arrays.items():
        if array.ndim != 2 or len(array) != n or array.shape[1] == 0:
            raise ArgumentError(f"{name}: expected ({n}, k) numbers, found {array.shape}")
        field, column = list_column(name, array)
        fields.append(field)
        values.append(column)
    names = [field.name for field in fields]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ArgumentError(f"columns: {twice[0]!r} is given twice")
    return pa.Table.from_arrays(values, schema=pa.schema(fields)) if fields else None


def _name(name: object) -> str:
    text = str(name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"columns: {text!r}: expected a name that UTF-8 can encode") from error
    if text.startswith(RESERVED):
        raise ArgumentError(f"columns: {text!r}: the prefix {RESERVED!r} is reserved for the journal")
    return text


def _element_type(field: pa.Field) -> dict[bytes, bytes] | None:
    """Keeps only the metadata in which :func:`list_column` records a dtype that Arrow lacks."""
    name = (field.metadata or {}).get(b"dtype")
    return None if name is None else {b"dtype": name}


def _column(name: str, values: object, n: int, examples: GivenExamples | None = None) -> tuple[pa.Field, pa.Array]:
    """Converts a column to Arrow. Rows of a (batch, tokens) array lose their padding."""
    import pyarrow as pa

    if isinstance(values, str | bytes | bytearray | Mapping | Set):
        raise ArgumentError(
            f"columns: {name!r}: expected a list or an array of {n} values, one per example, found {type(values).__name__}"
        )
    try:
        column = _arrow_or_numpy(values)
        if isinstance(column, pa.Array | pa.ChunkedArray):
            return pa.field(name, column.type), column
        if isinstance(column, np.ndarray):
            if column.ndim == 2 and column.dtype.kind in "biuf" and column.shape[1] and not np.ma.is_masked(column):
                if examples is not None and examples.padded and column.shape == (n, examples.padded):
                    if column.dtype.kind == "f":  # a batch may be as long as a vector is wide
                        raise ArgumentError(
                            f"columns: {name!r}: {column.dtype} of {column.shape}, as wide as the padded batch, may be values of "
                            "tokens or a vector for each example. Pass a list: [row[:n] for row, n in zip(values, lengths)] of "
                            "values of tokens, list(values) of vectors"
                        )
                    cut = _without_padding(_native_order(column), examples)
                    return pa.field(name, cut.type), cut
                return list_column(name, _native_order(column))
            column = _values(column)
        if isinstance(column, list | tuple) and any(type(v) is int and not -(1 << 63) <= v < 1 << 63 for v in column):
            if any(v is not None and type(v) is not int for v in column):
                raise ArgumentError(f"columns: {name!r}: expected {n} values of one type, found integers and others")
            column = [v if v is None else decimal.Decimal(v) for v in column]  # beyond 64 bits
        arrow_column = column if isinstance(column, pa.Array) else pa.array(column)
        if not isinstance(column, pa.Array) and (change := _change(column, arrow_column)) is not None:
            raise ArgumentError(
                f"columns: {name!r}: expected {n} values of one type, found {change[0]!r:.80}, which {arrow_column.type} stores as "
                f"{change[1]!r:.80}: convert the values to one type"
            )
    except ActshardError:
        raise
    except (pa.ArrowException, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ArgumentError(f"columns: {name!r}: expected {n} values of one type: {error}") from error
    return pa.field(name, arrow_column.type), arrow_column


def _without_padding(values: NDArray[np.generic], examples: GivenExamples) -> pa.Array:
    """The rows of a (batch, tokens) array as lists of the examples' numbers of tokens."""
    import pyarrow as pa

    is_content = np.arange(examples.padded) < examples.tokens[:, None]
    offsets = np.concatenate([[0], np.cumsum(examples.tokens)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values[is_content])))


def _arrow_or_numpy(values: Any) -> Any:
    """Values of another library as an Arrow column, or a copy as a numpy array; lists and tuples unchanged.

    numpy has no nulls, structs or time zones: an object is asked for Arrow data first, and for an array only without them.
    """
    import pyarrow as pa

    torch, pandas = sys.modules.get("torch"), sys.modules.get("pandas")
    if torch is not None and isinstance(values, torch.Tensor):
        return as_numpy(values).copy()
    if pandas is not None and isinstance(values, pandas.Series | pandas.Index | pandas.api.extensions.ExtensionArray):
        if not isinstance(values.dtype, np.dtype | pandas.SparseDtype):
            return _copied(pa.array(values, from_pandas=True))
        array = np.array(values)
        if array.dtype == object:  # of which NaN, NA and NaT are missing values; NaN of float dtypes stay
            array[pandas.isna(array)] = None
        return array
    is_table = hasattr(values, "columns") or hasattr(values, "column_names")  # a row of numbers per example
    if not is_table and isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if not is_table and getattr(values, "__arrow_c_stream__", None) is not None:
        if str(getattr(values, "dtype", "")) == "Object":  # of polars: addresses of Python objects
            return values.to_list()
        return _copied(pa.chunked_array(values))
    if not is_table and any(
        getattr(values, name, None) is not None for name in ("__arrow_c_array__", "__arrow_array__")
    ):
        return _copied(pa.array(values))
    if isinstance(values, np.ndarray):
        return values.copy()  # keeps the mask of a masked array, which Arrow converts to nulls
    return np.asarray(values).copy() if hasattr(values, "__array__") else values


def _copied(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """A copy in memory of its own: the caller may use its arrays again."""
    import pyarrow as pa

    if isinstance(column.type, pa.BaseExtensionType) and column.type.extension_name.startswith("pandas."):
        raise ArgumentError(
            f"expected values that Arrow has a type for, found {column.type}: convert them to strings or numbers"
        )
    table = pa.table({"": column})
    copy = pa.BufferOutputStream()
    with pa.ipc.new_stream(copy, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(copy.getvalue()).read_all().column(0)


_EXACT = ({str}, {int}, {float}, {bool}, {bytes})
"""Types of Python of which a column, if it has one only, is stored exactly or not at all."""


def _change(
    values: Sequence[Any] | NDArray[np.generic], column: pa.Array | pa.ChunkedArray
) -> tuple[object, object] | None:
    """The first value that Arrow changed, and the stored one; None if all are equal. Arrow infers types from the first values."""
    import pyarrow as pa

    if isinstance(values, np.ndarray) and values.dtype != object:
        return None  # _values() converts other arrays
    values = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if isinstance(column, pa.ChunkedArray):
        chunks = zip(itertools.accumulate(map(len, column.chunks), initial=0), column.chunks, strict=False)
        changes = (_change(values[first : first + len(chunk)], chunk) for first, chunk in chunks)
        return next((change for change in changes if change is not None), None)
    kinds = set(map(type, values)) - {type(None)}
    is_exact = (
        kinds in _EXACT or not kinds or (len(kinds) == 1 and issubclass(next(iter(kinds)), np.integer | np.floating))
    )
    if is_exact and column.null_count == sum(value is None for value in values):
        return None
    if pa.types.is_struct(column.type):
        names = {field.name for field in column.type}
        strange = next((value for value in values if value is not None and not value.keys() <= names), None)
        if strange is not None:
            return strange, sorted(names)
        fields = [[None if value is None else value.get(field.name) for value in values] for field in column.type]
        # flatten() has nulls where the dict is null; field() may have any values there.
        changes = (_change(*pair) for pair in zip(fields, column.flatten(), strict=True))
        return next((change for change in changes if change is not None), None)
    if pa.types.is_list(column.type):
        dtypes = {value.dtype for value in values if value is not None} if kinds == {np.ndarray} else set()
        if len(dtypes) == 1 and next(iter(dtypes)).kind in "biuf":
            return None
        if dtypes and all(dtype.kind in "iu" and dtype != np.uint64 for dtype in dtypes):
            elements, flat = (
                column.flatten(),
                np.concatenate([np.ravel(value) for value in values if value is not None]),
            )
            if (
                pa.types.is_integer(elements.type)
                and not elements.null_count
                and np.array_equal(flat, elements.to_numpy())
            ):
                return None
        # tolist() of a masked array has None where Arrow stores the masked number.
        lists = [value.tolist() if _arguments.is_masked_array(value) else value for value in values]
        return _change([item for items in lists if items is not None for item in items], column.flatten())
    stored: Any = (
        column.to_numpy(zero_copy_only=False) if kinds <= {np.datetime64, np.timedelta64} else column.to_pylist()
    )
    return next((pair for pair in zip(values, stored, strict=True) if not _is_equal(*pair)), None)


def _is_equal(value: object, stored: Any) -> bool:
    """Whether a stored scalar equals that which was passed, and True is not 1, nor a date a time of day."""
    if value is None or stored is None:
        counterpart = stored if value is None else value
        return counterpart is None or (
            isinstance(counterpart, np.datetime64 | np.timedelta64) and bool(np.isnat(counterpart))
        )
    if isinstance(value, np.generic):
        if isinstance(value, np.datetime64 | np.timedelta64):
            return bool(value == stored or (np.isnat(value) and np.isnat(stored)))
        value = value.item()
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if isinstance(value, bool) != isinstance(stored, bool):
        return False
    return bool(value == stored or (value != value and stored != stored))  # noqa: PLR0124 -- NaN


def _values(column: NDArray[np.generic]) -> pa.Array:
    """A numpy column in a form that pyarrow converts without changing a value."""
    import pyarrow as pa

    # pyarrow reads fixed-width strings and bytes up to the first NUL; numpy does not.
    if column.dtype.kind in "SU" or (column.ndim != 1 and column.dtype.kind not in "mM"):
        return column.tolist()
    column = _native_order(column)
    if column.dtype.kind not in "mM":
        return column
    flat = column.reshape(-1)
    if flat.dtype == np.dtype("M8[D]"):
        # pyarrow keeps 32 bits of a day's number without a check.
        days = pa.array(np.asarray(flat).view(np.int64), mask=np.ma.getmaskarray(flat) | np.asarray(np.isnat(flat)))
        arrow_array = days.cast(pa.int32()).cast(pa.date32())
    else:
        arrow_array = pa.array(flat)
    # tolist() returns times in nanoseconds as integers, so lists of times are made from their elements.
    for length in column.shape[:0:-1]:
        count = len(arrow_array) // length if length else len(column)
        arrow_array = pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * length, pa.int32()), arrow_array)
    return arrow_array


def _native_order(array: NDArray[np.generic]) -> NDArray[np.generic]:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
