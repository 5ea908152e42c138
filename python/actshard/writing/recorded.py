"""Lengths and columns of examples as tables, which journals and tasks of plans keep until the dataset is finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.base._columns import numbers
from actshard.formats.tables import concatenated
from actshard.formats.target import Block

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS, BY_LAYER, OWN = "actshard.tokens", "actshard.tokens_by_layer", "actshard.own_tokens"
"""Names of the columns that contain lengths: of all layers, by layer, and before padding."""


def table_of(blocks: Sequence[Block]) -> pa.Table:
    """The lengths and columns of blocks; their rows are not used."""
    import pyarrow as pa

    tables = []
    for block in blocks:
        same = (block.lengths == block.lengths[:, :1]).all()
        if same:
            name, column = TOKENS, numbers(block.lengths[:, 0])
        else:
            flat = numbers(np.ascontiguousarray(block.lengths).reshape(-1))
            name, column = BY_LAYER, pa.FixedSizeListArray.from_arrays(flat, block.lengths.shape[1])
        table = pa.table(
            {name: column} | ({} if block.unpadded_lengths is None else {OWN: numbers(block.unpadded_lengths)})
        )
        if block.columns is not None:
            for field, values in zip(block.columns.schema, block.columns.columns, strict=True):
                table = table.append_column(field, values)
        tables.append(table)
    return concatenated(tables)[0].combine_chunks()


def lengths_in(tables: Iterable[pa.Table], layers: int) -> NDArray[np.int64]:
    """Tokens ``(n, layers)`` of the examples of tables, in order; equal lengths of all layers are stored once."""
    parts = [_lengths(table, layers) for table in tables]
    if not parts:
        return np.zeros((0, layers), np.int64)
    if all(part.strides[1] == 0 or layers == 1 for part in parts):
        token_counts = np.concatenate([part[:, 0] for part in parts])
        return np.broadcast_to(token_counts[:, None], (len(token_counts), layers))
    return np.concatenate(parts)


def columns_in(tables: Iterable[pa.Table]) -> tuple[pa.Table | None, list[str]]:
    """Columns of the examples of tables, and names of those whose types differ and became text; None if there are no columns."""
    user_tables = [t.drop_columns([c for c in (TOKENS, BY_LAYER, OWN) if c in t.column_names]) for t in tables]
    return concatenated(user_tables) if any(t.num_columns for t in user_tables) else (None, [])


def _lengths(table: pa.Table, layers: int) -> NDArray[np.int64]:
    if BY_LAYER not in table.column_names and TOKENS in table.column_names and not table[TOKENS].null_count:
        return np.broadcast_to(table[TOKENS].to_numpy()[:, None], (table.num_rows, layers))
    lengths = np.zeros((table.num_rows, layers), np.int64)
    if TOKENS in table.column_names:
        column = table[TOKENS]
        is_valid = column.is_valid().to_numpy()
        lengths[is_valid] = column.drop_null().to_numpy()[:, None]
    if BY_LAYER in table.column_names:
        column = table[BY_LAYER]
        is_valid = column.is_valid().to_numpy()
        flat = column.drop_null().combine_chunks()
        flat = flat if not hasattr(flat, "chunks") else flat.chunk(0)
        lengths[is_valid] = flat.flatten().to_numpy().reshape(-1, layers)
    return lengths
