"""What streams, selections and statistics need of a dataset: :class:`~actshard.Store` has all of it.

It lies below them, so that neither imports the store, which imports both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    import actshard._native as _native
    from actshard.formats.contents import Contents


class Readable(Protocol):
    """A dataset of rows addressed by (layer, example, token); each member is documented at :class:`~actshard.Store`."""

    format: str
    path: Path
    layers: tuple[int, ...]
    d_model: int
    num_examples: int
    special_tokens: int

    @property
    def contents(self) -> Contents: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def identity(self) -> str: ...
    @property
    def table(self) -> pa.Table: ...
    @property
    def labels(self) -> NDArray[np.uint8] | None: ...
    @property
    def content_lengths(self) -> NDArray[np.int64] | None: ...
    def tokens_in(self, layer: int) -> NDArray[np.int64]: ...
    def group_of(self, layer: int) -> int: ...
    def check_open(self) -> None: ...
    def native_stream(self, selection: Any, options: dict[str, Any]) -> _native.Stream: ...
