"""The properties of a store that ``actshard info`` prints, its columns by name, and its digest."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.base._columns import pick_rows
from actshard.base.errors import ActshardError, ClosedError, NotStoredError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.tables import rows_only
from actshard.formats.target import OTHER_TEXT

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows
    from actshard.base.layers import Layer
    from actshard.formats.contents import Contents
    from actshard.streaming.readable import Readable

_SAMPLES = 8
"""Number of rows of a layer that a digest includes."""
_FILES = 4096
"""Maximum number of files whose sizes a digest includes."""


def identity_of(store: Readable) -> str:
    """A digest of the dataset's shape and of a few rows; see :attr:`Store.identity`."""
    shape = [store.format, list(store.layers), store.d_model, store.dtype.name, store.num_examples]
    digest = hashlib.sha256(json.dumps(shape).encode())
    dataset, chosen = store.contents.whole or store.contents, store.contents.chosen
    if chosen is not None and chosen.numbers != range(dataset.num_examples):
        digest.update(chosen.digest())
    digest.update("".join(part.identity for part in dataset.parts).encode())
    _add_rows(digest, dataset, _rows_of(store), store.num_examples, [0])
    return digest.hexdigest()[:16]


def sample_of(store: Readable, layers: Sequence[Layer]) -> str:
    """A digest of a few rows of each of these layers; see :meth:`Store.sample_of`."""
    digest, contents = hashlib.sha256(), store.contents
    dataset = contents.whole or contents
    if dataset.units is not None:  # of which few rows are read: their files' sizes are known without decoding them
        Location.at(store.path).list_below()
        for file in dataset.files()[:_FILES]:
            stat = Location.at(file).found()
            digest.update(f"{None if stat is None else stat.size} ".encode())
    _add_rows(digest, dataset, _rows_of(store), store.num_examples, list(map(store.group_of, layers)))
    return digest.hexdigest()[:16]


def _rows_of(store: Readable) -> Rows | None:
    with contextlib.suppress(NotStoredError):
        return store.rows
    return None


def _add_rows(digest: hashlib._Hash, dataset: Contents, rows: Rows | None, n: int, groups: Sequence[int]) -> None:
    """Adds the last tokens of a few of the ``n`` examples of ``rows`` in these layers."""
    # For shards that are decoded as a whole, only the first example: opening has decoded its shard. Last tokens, because
    # the first tokens of texts may be equal in all datasets of a model.
    few = range(min(n, 1)) if dataset.units is not None else range(0, n, -(-n // _SAMPLES) or 1)
    every, examples = np.repeat(np.array(groups, np.int64), len(few)), np.tile(np.array(few, np.int64), len(groups))
    if rows is None:
        digest.update(b"unreadable" * len(examples))
        return
    try:
        # One call for all rows, so that a remote store needs one round trip.
        digest.update(rows.gather(every, examples, None, None, None).tobytes())
    except ClosedError:
        raise
    except ActshardError:
        for group, example in zip(every.tolist(), examples.tolist(), strict=True):
            try:
                digest.update(rows.gather(group, example, None, None, None).tobytes())
            except ClosedError:
                raise
            except ActshardError:
                digest.update(b"unreadable")


def info_of(store: Readable, *, counted: bool) -> dict[str, object]:
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
        stat = None
        with contextlib.suppress(ActshardError):
            stat = Location.at(file).found()
        if stat is None:
            missing += 1
        else:
            present += 1
            total += stat.size
    tokens_each = contents.tokens_each
    has_counts = contents.counts_are_cheap or counted
    counts = store.token_counts if tokens_each is None and has_counts else None
    tokens = (
        tokens_each * store.num_examples if tokens_each is not None else None if counts is None else int(counts.sum())
    )
    row_bytes = (tokens or 0) * len(store.layers) * store.d_model * store.dtype.itemsize
    return {
        "format": store.format,
        "path": str(store.path),
        "model": contents.model,
        "examples": store.num_examples,
        "tokens": tokens,
        "tokens_per_example": (
            None if tokens_each is None else [tokens_each, tokens_each] if store.num_examples else [0, 0]
        )
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
        "ratio": round(total / row_bytes, 4) if are_known and row_bytes and not missing else None,
        "io": store.io,
        "columns": list(contents.column_names),
        "also": list(contents.extras),
        "provenance": contents.provenance,
        "warnings": [str(w) for w in store.warnings],
        "warning_codes": [w.code for w in store.warnings],
    }


def columns_of(
    contents: Contents, requested_names: Sequence[str], examples: NDArray[np.int64] | None = None
) -> pa.Table:
    """Columns by the format's names. ``"text"`` and ``"prompt"`` both name the texts, whichever name the format uses."""

    def read(names: Sequence[str]) -> pa.Table:
        if not names:  # formats without columns return no rows
            return rows_only(contents.num_examples if examples is None else len(examples))
        if examples is None:
            return contents.columns(names)
        read_rows = contents.example_columns
        return pick_rows(contents.columns(names), examples) if read_rows is None else read_rows(names, examples)

    try:
        return read(requested_names)
    except NotStoredError:
        stored = contents.column_names
        stored_names = [OTHER_TEXT[x] if x in OTHER_TEXT and x not in stored else x for x in map(str, requested_names)]
        if stored_names == requested_names or not set(stored_names) <= set(stored):
            raise
        return read(list(dict.fromkeys(stored_names))).select(stored_names).rename_columns(requested_names)
