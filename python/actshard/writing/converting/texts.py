"""Texts of a conversion's result: repeated and missing ones are losses in formats that find examples by text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base._arguments import many
from actshard.formats.target import TEXTS

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.reading.store import Store

_AT_ONCE = 16_384
"""Number of texts in memory as Python strings."""


class Texts:
    """Counts the distinct and the missing texts of a dataset's examples."""

    def __init__(self) -> None:
        self._examples = 0
        self._stored = False
        """Whether some examples have a column of texts; otherwise the target generates texts."""
        self._hashes: list[NDArray[np.int64]] = []

    @classmethod
    def of(cls, result: Store) -> Texts:
        """The texts of a finished dataset, without those that its writer generated."""
        texts, contents = cls(), result.contents
        generated = formats.get(contents.format).carrying().generated(contents)
        names = [name for name in TEXTS if name in contents.column_names and name not in generated][:1]
        batches = contents.column_batches or (lambda names: iter([contents.columns(names)]))
        for table in batches(names) if names else ():
            texts.add(table, len(table))
        return texts

    def add(self, table: pa.Table | None, n: int) -> None:
        """Counts the texts of n more examples with these columns."""
        self._examples += n
        name = None if table is None else next((name for name in TEXTS if name in table.column_names), None)
        if table is None or name is None:
            return
        self._stored = True
        for first in range(0, n, _AT_ONCE):
            texts = table[name].slice(first, _AT_ONCE).drop_null().to_pylist()
            self._hashes.append(np.fromiter(map(hash, texts), np.int64, len(texts)))

    def losses(self, format: str) -> list[str]:
        """The losses in a format that looks rows up by text."""
        if not self._stored:
            return [f"the source has none; texts are generated because {format} looks rows up by text"]
        hashes = np.concatenate(self._hashes) if self._hashes else np.zeros(0, np.int64)
        shared, absent = len(hashes) - len(np.unique(hashes)), self._examples - len(hashes)
        details = []
        if shared:
            details.append(
                f"{many(shared, 'example', 'has', 'have')} the same text as another one: "
                f"{format} looks rows up by text and returns one example's rows for all"
            )
        if absent:
            details.append(
                f"{many(absent, 'example', 'has', 'have')} no text, while others have one: "
                f"{format}'s own reader cannot find them, and fails if it reads all examples"
            )
        return details
