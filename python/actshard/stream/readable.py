"""The interface that streams, selections and arrays use instead of :class:`~actshard.Store`, which implements it.

The store imports streams and selections, so they cannot import the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    import actshard._native as _native
    from actshard.codes import Remark
    from actshard.formats.contents import Contents
    from actshard.layers import Layer
    from actshard.stats import Stats


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
    def dtype(self) -> np.dtype[Any]: ...
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
    def gather(
        self, layer: Layer, examples: ArrayLike, tokens: ArrayLike, *, dtype: DTypeLike | None = None
    ) -> NDArray[Any]: ...
    def sequence(self, example: int, layer: Layer, *, dtype: DTypeLike | None = None) -> NDArray[Any]: ...
    def read_columns(self, names: Sequence[str], examples: ArrayLike | None = None) -> pa.Table: ...
    def known_stats(self, layer: Layer, tokens: Any, ignore_labels: Sequence[int], keep: Any, chosen: Any) -> Stats: ...
    def check_open(self) -> None: ...
    def native_stream(self, selection: Any, options: dict[str, Any]) -> _native.Stream: ...
