"""The properties of a store that ``actshard info`` prints, its columns by name, and its digest."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.errors import ActshardError, ClosedError, NotStoredError, UnsupportedError
from actshard.formats.tables import picked, rows_only
from actshard.formats.target import OTHER_TEXT
from actshard.location import Location

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents
    from actshard.layers import Layer
    from actshard.stream.readable import Readable

_SAMPLES = 8
"""Number of rows of a layer that a digest includes."""
_FILES = 4096
"""Maximum number of files whose sizes a digest includes."""


def identity_of(store: Readable) -> str:
    """A digest of the dataset's shape and of a few rows; see :attr:`Store.identity`."""
    shape = [store.format, list(store.layers), store.d_model, store.dtype.name, store.num_examples]
    digest = hashlib.sha256(json.dumps(shape).encode())
    whole, chosen = store.contents.whole or store.contents, store.contents.chosen
    if chosen is not None and chosen.numbers != range(whole.num_examples):
        digest.update(chosen.digest())
    digest.update("".join(part.identity for part in whole.parts).encode())
    _add_rows(digest, store, [0])
    return digest.hexdigest()[:16]


def sample_of(store: Readable, layers: Sequence[Layer]) -> str:
    """A digest of a few rows of each of these layers; see :meth:`Store.sample_of`."""
    digest, contents = hashlib.sha256(), store.contents
    whole = contents.whole or contents
    if whole.units is not None:  # of which few rows are read: their files' sizes are known without decoding them
        Location.at(store.path).list_below()
        for file in whole.files()[:_FILES]:
            found = Location.at(file).found()
            digest.update(f"{None if found is None else found.size} ".encode())
    _add_rows(digest, store, list(map(store.group_of, layers)))
    return digest.hexdigest()[:16]


def _add_rows(digest: hashlib._Hash, store: Readable, groups: Sequence[int]) -> None:
    """Adds the last tokens of a few examples in these layers."""
    n, whole = store.num_examples, store.contents.whole or store.contents
    # For shards that are decoded as a whole, only the first example: opening has decoded its shard. Last tokens, because
    # the first tokens of texts may be equal in all datasets of a model.
    few = range(min(n, 1)) if whole.units is not None else range(0, n, -(-n // _SAMPLES) or 1)
    every, examples = np.repeat(np.array(groups, np.int64), len(few)), np.tile(np.array(few, np.int64), len(groups))
    try:
        # One call for all rows, so that a remote store needs one round trip.
        digest.update(store.rows.gather(every, examples, None, None, None).tobytes())
    except ClosedError:
        raise
    except ActshardError:
        for group, example in zip(every.tolist(), examples.tolist(), strict=True):
            try:
                digest.update(store.rows.gather(group, example, None, None, None).tobytes())
            except ClosedError:
                raise
            except ActshardError:
                digest.update(b"unreadable")


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


def columns_of(contents: Contents, asked: list[Any], examples: NDArray[np.int64] | None = None) -> pa.Table:
    """Columns by the format's names. ``"text"`` and ``"prompt"`` both name the texts, whichever name the format uses."""

    def read(names: list[Any]) -> pa.Table:
        if not names:  # formats without columns return no rows
            return rows_only(contents.num_examples if examples is None else len(examples))
        if examples is None:
            return contents.columns(names)
        some = contents.example_columns
        return picked(contents.columns(names), examples) if some is None else some(names, examples)

    try:
        return read(asked)
    except NotStoredError:
        stored = contents.column_names
        own = [OTHER_TEXT[x] if x in OTHER_TEXT and x not in stored else x for x in map(str, asked)]
        if own == asked or not set(own) <= set(stored):
            raise
        return read(list(dict.fromkeys(own))).select(own).rename_columns(asked)
