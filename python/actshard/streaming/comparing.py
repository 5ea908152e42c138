"""Checks for :func:`actshard.pair`, before it reads rows, that several stores have the same examples and tokens.

Every store must have the same numbers of examples, tokens and content tokens as the first. Columns that identify an example or its
tokens, and texts, are compared among all stores that have them. Null values and texts that a writer generated are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base._arguments import many
from actshard.base.errors import ArgumentError
from actshard.formats.tables import cast_exactly, common_type
from actshard.formats.target import PREVIEW, TEXTS
from actshard.streaming.readable import content_range

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.streaming.readable import Readable

_IDS = frozenset(
    {
        *(
            "id",
            "key",
            "sample_key",
            "sample_id",
            "sample_idx",
            "example_id",
            "example_idx",
            "prompt_id",
            "prompt_hash",
        ),
        *("dataset_idx", "token_ids", "input_ids", "tokens", "prompt_token_ids", "response_token_ids"),
    }
)
"""Columns that identify an example, or its tokens."""
_BLOCK = 4096
"""Number of examples whose values are converted to Python objects at a time."""


def compare(
    stores: Sequence[Readable], names: Sequence[str], columns: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of equal columns, and warnings about values that were not compared. ``columns``: columns to compare.

    Raises:
        ArgumentError: a value differs.
        NotStoredError: a store lacks one of ``columns``.
    """
    _check_counts(stores, names)
    has = [_comparable(store) if columns is None else {name: name for name in columns} for store in stores]
    compared, warnings = ["examples", "tokens"], []
    groups = list(range(len(stores)))  # stores whose examples were found equal have one number
    for what in dict.fromkeys(name for mapping in has for name in mapping):
        first, *rest = [i for i, mapping in enumerate(has) if what in mapping]
        column = stores[first].read_columns([has[first][what]])[has[first][what]] if rest else None
        for index in rest:
            left, right = (names[first], has[first][what]), (names[index], has[index][what])
            other_column = stores[index].read_columns([right[1]])[right[1]]
            unknown = _check_equal(column, other_column, left, right, stores[index])
            if unknown < len(other_column) or not len(other_column):
                compared.append(left[1])
                groups = [groups[first] if g == groups[index] else g for g in groups]
            if 0 < unknown < len(other_column):
                warnings.append(
                    f"{what!r} of {many(unknown, 'example')} is null in {left[0]} or {right[0]}, and was not compared"
                )
    for name, group in zip(names, groups, strict=True):
        if group != groups[0] and columns is None:
            warnings.append(f"{names[0]} and {name} have no text or id in common: only numbers of tokens were compared")
    return tuple(dict.fromkeys(compared)), tuple(warnings)


def _check_counts(stores: Sequence[Readable], names: Sequence[str]) -> None:
    first, counts = stores[0], stores[0].token_counts
    for name, store in zip(names[1:], stores[1:], strict=True):
        if store.num_examples != first.num_examples:
            raise ArgumentError(
                f"pair: expected equal numbers of examples, found {first.num_examples} in {names[0]} and "
                f"{store.num_examples} in {name}",
                path=store.path,
            )
        for what, a, b in (
            ("tokens", counts, store.token_counts),
            ("content tokens", _content(first), _content(store)),
        ):
            differ = np.flatnonzero(a != b)
            if len(differ):
                i = int(differ[0])
                raise ArgumentError(
                    f"pair: example {i}: expected equal numbers of {what}, found {a[i]} in {names[0]} and {b[i]} in {name} "
                    f"({many(len(differ), 'example', 'differs', 'differ')})",
                    path=store.path,
                )


def _content(store: Readable) -> NDArray[np.int64]:
    """Content tokens per example: without special tokens and padding."""
    first, stop = content_range(store, store.token_counts)
    return stop - first


def _comparable(store: Readable) -> dict[str, str]:
    """Columns that identify examples, by content: ids under their own names, and ``"text"``."""
    contents = store.contents
    columns = {name: name for name in contents.column_names if name in _IDS}
    made_up = frozenset() if contents.parts else formats.get(contents.format).carrying().fillers(contents)
    text = next((name for name in TEXTS if name in contents.column_names and name not in made_up), None)
    if text is not None:
        columns["text"] = text
    return columns


def _check_equal(
    a: pa.ChunkedArray, b: pa.ChunkedArray, left: tuple[str, str], right: tuple[str, str], store: Readable
) -> int:
    """The number of examples without a value in one of two columns. Raises ArgumentError for other values that differ."""
    import pyarrow as pa

    previews = [column == PREVIEW for _, column in (left, right)]
    kind, unknown = common_type(a.type, b.type), 0
    if kind is not None:
        try:
            a, b = (cast_exactly(x, kind) for x in (a, b))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            kind = None  # values are compared one by one
    for first in range(0, len(a), _BLOCK):
        x, y = a.slice(first, _BLOCK), b.slice(first, _BLOCK)
        if kind is not None and not x.null_count and not any(previews) and x.equals(y):
            continue
        for i, (p, q) in enumerate(zip(x.to_pylist(), y.to_pylist(), strict=True), first):
            if _is_nothing(p, previews[0]) or _is_nothing(q, previews[1]):
                unknown += 1
            elif p != q and not (previews[0] != previews[1] and _begin_alike(p, q)):
                raise ArgumentError(
                    f"pair: example {i}: expected equal {left[1]!r}, found {p!r:.60} in {left[0]} and {q!r:.60} in "
                    f"{right[0]}. If the examples are the same, pass compare= with the columns to compare, or none: [].",
                    path=store.path,
                )
    return unknown


def _is_nothing(value: object, preview: bool) -> bool:
    """Whether a value is missing: null, NaN, or an empty preview."""
    return value is None or (preview and value == "") or (isinstance(value, float) and math.isnan(value))


def _begin_alike(x: object, y: object) -> bool:
    """Whether one of two texts is a prefix of the other; the prefix may end with an ellipsis."""
    if not isinstance(x, str) or not isinstance(y, str):
        return False
    shorter, longer = sorted((x, y), key=len)
    return longer.startswith(shorter.removesuffix("...").removesuffix("\u2026"))
