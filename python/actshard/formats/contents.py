"""``Contents``: an opened dataset, as a format passes it to the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.layers import Layer
from actshard.location import Location, network_io

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows
    from actshard.chosen import Chosen


@dataclass(frozen=True)
class Options:
    """Options of reading, with defaults resolved."""

    io: str
    """``"mmap"`` or ``"pread"``."""
    decoded_memory: int = 1 << 30
    """Size of the cache of decoded data, in bytes."""
    checksums: bool = True
    """Whether to verify files against the checksums listed in the dataset."""
    layout: Any = None
    """A description of the folder's files, for formats that need one: a path, TOML text or a dict."""

    keep: bool = False
    """Whether an index of many files may be kept in the user's cache folder, and read from there."""

    @classmethod
    def of(cls, path: Path | Location) -> Options:
        """Defaults. The path's file system determines ``io``."""
        return cls(network_io(path))


@dataclass(frozen=True)
class Evidence:
    """Whether a path looks like a format, and why. Shown to the user if no format recognizes the path."""

    matches: bool
    looked_for: str
    found: str


@dataclass(frozen=True)
class Logits:
    """Top-k logits: values and indices, both addressed by (0, example)."""

    values: Rows
    indices: Rows


@dataclass(frozen=True)
class Router:
    """Router logits of mixture-of-experts layers, addressed by (position in ``layers``, example)."""

    layers: tuple[Layer, ...]
    rows: Rows


@dataclass(frozen=True)
class Contents:
    """A dataset's checked metadata, and its rows, not read yet."""

    format: str
    path: Path
    metadata: dict[str, Any]
    layers: tuple[Layer, ...]
    """Names in stored order: all integers, or all texts."""
    d_model: int
    dtype: np.dtype[Any]
    num_examples: int
    token_counts: Callable[[], NDArray[np.int64]]
    """Returns tokens stored per example, (n,) int64. Called once, when first needed."""
    rows: Rows | None
    """Addressed by (position in ``layers``, example, token). None for a dataset without hidden states."""
    column_names: Sequence[str]
    """Columns of the table; expensive ones are left out."""
    columns: Callable[[Sequence[str]], pa.Table]
    """Reads columns by name, including those not in ``column_names``."""
    files: Callable[[], list[Path]]
    """Lists all files that contain rows. The list may be long, and files may be missing."""
    model: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    """Other stored data, as text: patch labels, logits, router tensors."""
    warnings: tuple[str, ...] = ()
    """Warnings of the reader. :func:`actshard.verify` reports warnings that are not a :class:`Remark` as ``reader-warning``."""
    tokens_each: int | None = None
    """Number of tokens per example where it is constant, which avoids a list; else None."""
    content_lengths: Callable[[], NDArray[np.int64] | None] = lambda: None
    """Returns content tokens per example, where examples are padded; None: no padding."""
    special_tokens: int = 0
    """Number of special tokens at the start of every example, such as saev's CLS."""
    counts_are_cheap: bool = True
    """Whether ``token_counts`` is available without reading the whole dataset."""
    units: tuple[int, ...] | None = None
    """Boundaries of units of examples decoded together, from 0 to ``num_examples``; None: examples can be read one by one."""
    unit_columns: Callable[[int], pa.Table] | None = None
    """Reads columns of one unit while it is cached; with ``layers_differ``, column ``layers`` lists each example's layers."""
    head_columns: Callable[[Sequence[str], int], pa.Table] | None = None
    """Reads columns of the first n examples, from the fewest files; None: ``columns`` is as cheap.

    Types are those of the part read: a column may have type null there and contain strings later."""
    column_batches: Callable[[Sequence[str]], Iterator[pa.Table]] | None = None
    """Reads columns of all examples in order, in batches; None if the format can only read whole columns."""
    example_columns: Callable[[Sequence[str], NDArray[np.int64]], pa.Table] | None = None
    """Reads columns of these examples, in this order, and nothing of the others; None if the format can only read whole columns."""
    token_columns: tuple[str, ...] = ()
    """Columns of lists with one value per stored token, such as token ids and masks."""
    layers_differ: bool = False
    """Whether an example may have different tokens in different layers, or lack a layer."""
    lacks_layers: bool = False
    """Whether some examples are known to lack a layer."""
    one_row_each: bool | None = None
    """Whether every example has exactly one row, if the metadata declare it; None: see ``token_counts``."""
    folders: tuple[Path, ...] = ()
    """The dataset's folders, if it has several; ``path`` is then above them, and may have files of others. Empty: ``path`` is."""
    columns_in: Callable[[], Sequence[Path]] = lambda: ()
    """Files with columns and metadata, and folders of such files, besides the dataset's own: plans compare them, too."""
    types_may_differ: bool = False
    """Whether rows may be stored in several float dtypes, of which ``dtype`` is the first. Reading them requires ``dtype=``."""
    has_logits: bool = False
    router_layers: tuple[Layer, ...] = ()
    labels: Callable[[], NDArray[np.uint8] | None] = lambda: None
    logits: Callable[[], Logits | None] = lambda: None
    router: Callable[[], Router | None] = lambda: None
    whole: Contents | None = None
    """The dataset, if these are some of its examples."""
    layout: Any = None
    """The description of the files that was given, for formats that use one."""
    chosen: Chosen | None = None
    """Their numbers in ``whole``."""
    parts: tuple[Any, ...] = ()
    """The stores that this one joins, in order. (Stores are above this floor: a ``Readable`` each.)"""
    converts: bool = False
    """Whether reads convert rows to ``dtype``, which may be narrower than the stored one."""
