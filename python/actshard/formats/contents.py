"""What a format hands to the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.location import Location, network_io

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows


@dataclass(frozen=True)
class Options:
    """How a dataset is read: what its user asked for, resolved."""

    io: str
    """``"mmap"`` or ``"pread"``."""
    decoded_memory: int = 1 << 30
    """Bytes that may be kept of what had to be decoded."""
    checksums: bool = True
    """Whether files are held against the checksums that the dataset lists."""

    @classmethod
    def of(cls, path: Path | Location) -> Options:
        """Defaults, with ``io`` chosen by where a path is."""
        return cls(network_io(path))


@dataclass(frozen=True)
class Evidence:
    """Whether a path looks like a format, and why: both sides are shown to a user whose path nobody recognises."""

    matches: bool
    looked_for: str
    found: str


@dataclass(frozen=True)
class Logits:
    """Top-k logits: two sets of rows, addressed alike by (0, example)."""

    values: Rows
    indices: Rows


@dataclass(frozen=True)
class Router:
    """Router logits of mixture-of-experts layers: rows addressed by (position in ``layers``, example)."""

    layers: tuple[int, ...]
    rows: Rows


@dataclass(frozen=True)
class Contents:
    """A dataset's metadata, read and checked, and its rows, not read yet."""

    format: str
    path: Path
    metadata: dict[str, Any]
    layers: tuple[int, ...]
    d_model: int
    dtype: np.dtype[Any]
    num_examples: int
    token_counts: Callable[[], NDArray[np.int64]]
    """Tokens stored per example; asked once, when first needed."""
    rows: Rows | None
    """Addressed by (position in ``layers``, example, token); None for a dataset without hidden states."""
    column_names: tuple[str, ...]
    """Columns of the table that cost nothing out of proportion to read."""
    columns: Callable[[Sequence[str]], pa.Table]
    """Reads columns by name; also those that ``column_names`` leaves out."""
    files: Callable[[], list[Path]]
    """Every file that should hold rows, for listing; may be long and may name files that are not there."""
    model: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    """What is stored beside hidden states, in words: patch labels, logits, router tensors."""
    warnings: tuple[str, ...] = ()
    """Warnings for the reader; :func:`actshard.verify` reports one that is no :class:`Remark` as ``reader-warning``."""
    tokens_each: int | None = None
    """How many tokens each example has, where all have as many: so that no list of them is needed."""
    content_lengths: Callable[[], NDArray[np.int64] | None] = lambda: None
    """Content tokens of each example, where rows after them only fill the example up; None: there are no such rows."""
    special_tokens: int = 0
    """Tokens at the front of every example that stand for none of its content, such as saev's CLS."""
    counts_are_cheap: bool = True
    """Whether ``token_counts`` can be had without reading the whole dataset."""
    units: tuple[int, ...] | None = None
    """Bounds of examples that are decoded together, from 0 to ``num_examples``; None: each can be read by itself."""
    unit_columns: Callable[[int], pa.Table] | None = None
    """The table's columns of one unit, while that is at hand; with ``layers_differ``, ``layers`` lists those of each example."""
    head_columns: Callable[[Sequence[str], int], pa.Table] | None = None
    """Reads columns by name of the first n examples, and no file that holds none of them; None: ``columns`` is as cheap. Types are
    those of the part that is read: a column may be null there and hold text further on."""
    column_batches: Callable[[Sequence[str]], Iterator[pa.Table]] | None = None
    """Reads columns of all examples in order, some at a time; None where a format has them only as a whole."""
    layers_differ: bool = False
    """Whether an example may hold other tokens in one layer than in another, or lack a layer."""
    lacks_layers: bool = False
    """Whether some examples are known to lack a layer."""
    one_row_each: bool | None = None
    """Whether every example has exactly one row, where the metadata declare it; None: ``token_counts`` knows."""
    types_may_differ: bool = False
    """Whether rows may be stored as several floating types, of which ``dtype`` is the first; such rows are read with ``dtype=``."""
    has_logits: bool = False
    router_layers: tuple[int, ...] = ()
    labels: Callable[[], NDArray[np.uint8] | None] = lambda: None
    logits: Callable[[], Logits | None] = lambda: None
    router: Callable[[], Router | None] = lambda: None
