"""The properties of a store that ``actshard info`` prints."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from actshard.errors import ActshardError, UnsupportedError
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.stream.readable import Readable


def info_of(store: Readable, *, counted: bool) -> dict[str, Any]:
    """The properties as plain Python values. ``counted``: whether the store's ``token_counts`` are in memory."""
    contents = store.contents
    present = missing = total = 0
    root = Location.at(store.path)
    root.list_below()
    try:
        files, are_known = contents.files(), True
    except UnsupportedError:
        if root.lists:
            raise
        files, are_known = [], False
    for file in files:
        found = None
        with contextlib.suppress(ActshardError):
            found = Location.at(file).found()
        if found is None:
            missing += 1
        else:
            present += 1
            total += found.size
    each = contents.tokens_each
    known = contents.counts_are_cheap or counted
    counts = store.token_counts if each is None and known else None
    return {
        "format": store.format,
        "path": str(store.path),
        "model": contents.model,
        "examples": store.num_examples,
        "tokens": (None if each is None else each * store.num_examples) if counts is None else int(counts.sum()),
        "tokens_per_example": (None if each is None else [each, each] if store.num_examples else [0, 0])
        if counts is None
        else [int(counts.min()), int(counts.max())]
        if len(counts)
        else [0, 0],
        "layers": list(store.layers),
        "d_model": store.d_model,
        "dtype": str(store.dtype),
        "shards": present if are_known else None,
        "missing_shards": missing if are_known else None,
        "bytes": total if are_known else None,
        "io": store.io,
        "columns": list(contents.column_names),
        "also": list(contents.extras),
        "provenance": contents.provenance,
        "warnings": [str(w) for w in store.warnings],
        "warning_codes": [w.code for w in store.warnings],
    }
