"""Proves which columns a format changes: writes examples to a scratch folder, reads them back, and compares.

The examples have values of the columns' types, not of the dataset, so that the result does not depend on which come first. Columns
in which the format refuses them, such as labels of a limited range, have values of the dataset.
"""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actshard import formats
from actshard.base.errors import ArgumentError
from actshard.base.location import Location
from actshard.base.work import existing_above
from actshard.formats.contents import Contents, Options
from actshard.formats.tables import is_list
from actshard.formats.target import LOGITS, PATCH_LABELS, PREVIEW, ROUTER, TEXTS, AllExamples, Block, Target

if TYPE_CHECKING:
    import pyarrow as pa

_EXAMPLES = 3
_EXACT = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_MOST_KNOWN = 256
_known: dict[tuple[type[Target], str], dict[str, str]] = {}
"""Results by format, settings and schema, if they do not depend on values of the dataset."""


def changed_columns(target: Target, table: pa.Table) -> dict[str, str]:
    """Columns whose values or kinds of type the format changes, each with a description.

    Args:
        target: a target whose settings are known.
        table: some examples with the dataset's schema.

    Raises:
        ArgumentError: the format cannot store a type, or different values of a column would become equal.
    """
    # Formats with a fixed set of columns check their types themselves.
    if target.only_columns is not None or not target.holds_columns or not table.num_columns or not len(table):
        return {}
    examples = table.slice(0, _EXAMPLES)
    examples = examples.take(np.arange(_EXAMPLES) % len(examples))
    is_general = True
    for i, field in enumerate(table.schema):
        for candidate in _candidates(field.type, len(examples)):
            trial = examples.set_column(i, field, candidate)
            with contextlib.suppress(ArgumentError):  # values that the format refuses cannot be changed
                target.check_values(trial, 0)
                examples = trial
                break
        else:
            is_general = False
    types = [(field.name, str(field.type), field.metadata) for field in table.schema]
    key = (type(target), repr((target.spec.layers, target.spec.options, target.tokens, types)))
    if not is_general or key not in _known:
        changes = _changes(target, examples)
        if not is_general:
            return changes
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = changes
    return _known[key]


def _changes(target: Target, table: pa.Table) -> dict[str, str]:
    import tempfile  # not needed to import actshard

    import pyarrow as pa

    try:
        parent = Path(tempfile.gettempdir())
    except OSError:  # no folder of temporary files can be written
        parent = existing_above(target.root)
    with tempfile.TemporaryDirectory(prefix=".actshard-columns-", dir=parent) as scratch:
        try:
            stored_columns = _read_back(target, table, Path(scratch) / "d")
        except pa.ArrowException as error:
            text = " ".join(str(error).split())
            raise ArgumentError(f"columns: {target.format} cannot store the type of a column: {text}") from error
    changes = {}
    for name in table.column_names:
        if is_separate(target, name):
            continue
        stored_column = stored_columns.get(name)
        change = "is not stored" if stored_column is None else _change(name, table[name], stored_column)
        if change is not None:
            changes[name] = f"{name}: {change}"
    return changes


def is_separate(target: Target, name: str) -> bool:
    """Whether the format stores arrays of this name, not a column."""
    return (target.holds_logits and (name in LOGITS or name.startswith(ROUTER))) or (
        target.holds_labels and name == PATCH_LABELS
    )


def _read_back(target: Target, table: pa.Table, folder: Path) -> Mapping[str, object]:
    """Columns of a dataset of these examples with rows of one element, as read from its files."""
    spec = replace(target.spec, path=folder, d_model=1, num_examples=None, part=None, whole=None, shard_bytes=None)
    spec = replace(spec, options=target.column_options)
    small = type(target)(spec)
    small.adopt(target.config())
    small.dtype = small.dtype or np.dtype(np.float32)
    most = target.most_tokens
    tokens = target.tokens or (2 if most is None else min(2, most[0]))
    lengths = np.full((len(table), len(spec.layers)), tokens, np.int64)
    block = Block(np.zeros((int(lengths.sum()), 1), small.dtype), lengths, table)
    folder.mkdir(parents=True)
    small.settle(block)
    small.write(block)
    small.dirty()
    small.committed()
    small.finish(AllExamples(lengths, table))
    location = Location.at(small.place())
    contents = formats.get(target.format).open(location, Options.of(location))
    names = [name for name in TEXTS if name in table.column_names][:1]
    return read_columns(target, contents, list(contents.column_names), names)


def read_columns(
    target: Target, contents: Contents, names: Sequence[str], texts: Sequence[str] = TEXTS
) -> dict[str, pa.ChunkedArray]:
    """Columns of a dataset of the target's format as other formats see them, by name; the text also under ``texts``' names."""
    table = formats.get(target.format).carrying().outgoing(contents.columns(names))
    columns = {name: table[name] for name in table.column_names}
    text = next((columns[name] for name in (target.text_column, PREVIEW) if name in columns), None)
    return columns if text is None else {**dict.fromkeys(texts, text), **columns}


# -- values --------------------------------------------------------------------------------------------------------


def _candidates(kind: pa.DataType, n: int) -> Iterator[pa.ChunkedArray]:
    """Columns of values of a type: first the most unusual, such as bytes with NUL; some formats refuse these."""
    import pyarrow as pa

    for unusual in (2, 1, 0):
        try:
            yield pa.chunked_array([_repeat(_sample_values(kind, unusual), n)], kind)
        except (pa.ArrowException, TypeError, ValueError):
            return


def _repeat(values: pa.Array, n: int) -> pa.Array:
    import pyarrow as pa

    return pa.concat_arrays([values] * -(-n // len(values)))[:n]


def _sample_values(kind: pa.DataType, unusual: int) -> pa.Array:
    """Three different values of a type; of types with fewer, all."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_struct(kind):
        parts = [_repeat(_sample_values(field.type, unusual), 3) for field in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind)) if parts else pa.array([{}], kind)
    if is_.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(
            _repeat(_sample_values(kind.value_type, unusual), 3 * kind.list_size), type=kind
        )
    if is_list(kind):
        return pa.array([[value] for value in _sample_values(kind.value_type, unusual)], kind)
    if is_.is_map(kind):
        keys, items = (_repeat(_sample_values(t, unusual), 3) for t in (kind.key_type, kind.item_type))
        return pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), keys, items, kind)
    if is_.is_fixed_size_binary(kind):
        codes = (0xFF, 0x5C, 0x61) if unusual else (0x61, 0x62, 0x63)
        return pa.array([bytes([code]) * kind.byte_width for code in codes], kind)
    if is_.is_binary(kind) or is_.is_large_binary(kind):
        last = (b"", b"a", b"\x00a")[unusual]
        return pa.array([b"\xff", b"\\xff", last] if unusual else [b"a", b"b", last], kind)
    if is_.is_string(kind) or is_.is_large_string(kind):
        return pa.array(["a", "\u00e9\n", "\\xff"], kind)
    if is_.is_boolean(kind):
        return pa.array([True, False])
    if is_.is_null(kind):
        return pa.nulls(1)
    if is_.is_floating(kind):
        return pa.array([0.5, float("inf"), float("nan")] if unusual else [0.5, 1.0, 2.0]).cast(kind, safe=False)
    if is_.is_temporal(kind):
        numbers = pa.int64() if kind.bit_width == 64 else pa.int32()
        # Whole microseconds, because Python has no nanoseconds. Days of date64 have 86,400,000 ms.
        step = 86_400_000 if is_.is_date64(kind) else 1000
        return pa.array([0, step, 2 * step], numbers).view(kind)
    if is_.is_decimal(kind):
        # Digits after the point, and as many digits as there can be: whole numbers and those of 38 digits may be stored otherwise.
        numbers = (0, 1, 10**kind.precision - 1 if unusual else 2)
        return pa.array([decimal.Decimal(number).scaleb(-kind.scale, _EXACT) for number in numbers], kind)
    bits = kind.bit_width - is_.is_signed_integer(kind)
    low = -(1 << bits) if is_.is_signed_integer(kind) else 0
    return pa.array([low, 1, (1 << bits) - 1] if unusual else [0, 1, 2], kind)


def _change(name: str, original: pa.ChunkedArray, stored: pa.ChunkedArray) -> str | None:
    """How values or the kind of their type differ; None if they do not.

    Raises:
        ArgumentError: different values became equal.
    """
    if original.type.equals(stored.type) and original.equals(stored):
        return None
    before, after = plain_values(original), plain_values(stored)
    if before == after:
        return None
    if len({repr(v) for v in before}) > len({repr(v) for v in after}):
        raise ArgumentError(
            f"columns: {name!r}: expected a type that the format can store, found {original.type}, of which different values would "
            f"be equal as {stored.type}. Convert the values."
        )
    same = original.type.equals(stored.type)
    return f"values of {original.type} change" if same else f"{original.type} becomes {stored.type}"


def plain_values(column: pa.Array | pa.ChunkedArray) -> list[object]:
    """Values as Python's, so that those of types that differ in width only are equal, and True is not 1."""
    import pyarrow as pa

    if pa.types.is_temporal(column.type):
        number = pa.int64() if column.type.bit_width == 64 else pa.int32()
        return [(str(column.type), v) for v in column.cast(number).to_pylist()]
    return [_mark_types(value) for value in column.to_pylist()]


def _mark_types(value: object) -> object:
    if isinstance(value, float):
        return ("float", repr(value))
    if isinstance(value, bool | bytes):
        return (type(value).__name__, value)
    if isinstance(value, list):
        return [_mark_types(v) for v in value]
    if isinstance(value, dict):
        return {k: _mark_types(v) for k, v in value.items()}
    return value
