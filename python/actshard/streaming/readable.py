"""The interface that streams, selections and arrays use instead of :class:`~actshard.Store`, which implements it.

The store imports streams and selections, so they cannot import the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    import actshard._native as _native
    from actshard.base.codes import Remark
    from actshard.base.layers import Layer
    from actshard.formats.contents import Contents
    from actshard.looking.stats import Stats
    from actshard.streaming.normalizer import Normalizer, RowKind
    from actshard.streaming.rows import NativeSelection, SelectedRows


class Readable(Protocol):
    """A dataset of rows addressed by (layer, example, token). :class:`~actshard.Store` documents the members."""

    format: str
    path: Path
    layers: tuple[Layer, ...]
    d_model: int
    num_examples: int
    special_tokens: int
    io: str
    warnings: tuple[Remark, ...]

    @property
    def contents(self) -> Contents: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def token_counts(self) -> NDArray[np.int64]: ...
    @property
    def identity(self) -> str: ...
    @property
    def table(self) -> pa.Table: ...
    @property
    def labels(self) -> NDArray[np.uint8] | None: ...
    @property
    def content_lengths(self) -> NDArray[np.int64] | None: ...
    @property
    def rows(self) -> _native.Rows: ...
    def tokens_in(self, layer: Layer) -> NDArray[np.int64]: ...
    def group_of(self, layer: Layer) -> int: ...
    def row_kind(self, layer: Layer) -> RowKind: ...
    def gather(
        self,
        layer: Layer,
        examples: ArrayLike,
        tokens: ArrayLike,
        *,
        dtype: DTypeLike | None = None,
        normalize: Normalizer | None = None,
    ) -> NDArray[np.generic]: ...
    def sequence(
        self, example: int, layer: Layer, *, dtype: DTypeLike | None = None, normalize: Normalizer | None = None
    ) -> NDArray[np.generic]: ...
    def sample_of(self, layers: Sequence[Layer]) -> str: ...
    def read_columns(self, names: Sequence[str], examples: ArrayLike | None = None) -> pa.Table: ...
    def stats_of(
        self,
        layer: Layer,
        rows: SelectedRows,
        progress: Callable[[int, int], object] | None = None,
    ) -> Stats: ...
    def known_stats(self, layer: Layer, rows: SelectedRows) -> Stats: ...
    def check_open(self) -> None: ...
    def native_stream(self, selection: NativeSelection, options: dict[str, object]) -> _native.Stream: ...


def covered_by(store: Readable, layers: Sequence[Layer]) -> dict[str, object]:
    """What a stream of these layers covers, as plain values: its states and pickles continue only over the same."""
    return {
        "dataset": store.identity,
        "sample": store.sample_of(layers),
        "format": store.format,
        "d_model": store.d_model,
        "stored": store.dtype.name,
        "examples": store.num_examples,
    }


def native_options(
    groups: Sequence[int], dtype: np.dtype[np.generic], name: str, converts: bool, **options: object
) -> dict[str, object]:
    """The options of a native stream of rows in stored order, and those that a call changes.

    Args:
        groups: indices of the layers.
        dtype: dtype of the batches.
        name: its name.
        converts: whether it was requested, so that rows of other dtypes are converted.
        options: options with other values.
    """
    plain = {
        "groups": list(groups), "stacked": False, "interleaved": False, "batch_size": 1, "shuffle": None, "seed": 0,
        "drop_last": False, "rank": 0, "world_size": 1, "memory": 1 << 30, "dtype": name, "descr": dtype,
        "given": converts, "center": None, "scale": None, "divide": None, "norm": None, "wide": False,
    }  # fmt: skip
    return plain | options
