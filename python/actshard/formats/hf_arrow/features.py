"""Arrow types as features of ``datasets``, the JSON that dataset_info.json and the Arrow schema contain.

Lists are written in the notation of datasets 1 to 3 (``"Sequence"``; a JSON list around a dict), which datasets 4 and 5 read as
``List``. A ``Sequence`` of a dict would be a dict of lists.

Source: ``datasets/features/features.py`` of datasets 5.2.0, ``generate_from_arrow_type`` and ``Features.from_dict``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actshard.base.errors import ArgumentError
from actshard.formats.target import without_arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

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
