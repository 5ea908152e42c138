"""Examples in memory, and the verbs that choose, join and read them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Layer = int | str
Rows = np.ndarray
"""``(tokens, d_model)``."""


@dataclass
class Example:
    """One example.

    Attributes:
        rows: stored rows by layer, in the dtype in which they are stored. A layer that the example lacks is absent.
        labels: patch labels of the tokens after the special ones.
        content: number of content tokens, if the dataset stores it because it pads; else None.
        columns: values by column.
    """

    rows: dict[Layer, Rows]
    labels: list[int] | None = None
    content: int | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Stored tokens, padding included, in the first layer that the example has."""
        return len(next(iter(self.rows.values()))) if self.rows else 0

    def tokens_in(self, layer: Layer) -> int:
        return len(self.rows[layer]) if layer in self.rows else 0


@dataclass
class Examples:
    """A dataset in memory.

    Attributes:
        examples: the examples, in order.
        layers: names of layers, in order.
        d_model: elements per row.
        dtype: of the rows that are read. Rows that are read as another dtype, and statistics, are computed from the stored ones.
        special: number of special tokens at the start of each example.
        columns: names of columns.
        patches: labels per example; None without labels.
        numbers: each example's number in the opened dataset; None for the dataset itself.
        whole: the opened dataset; None for the dataset itself.
        origins: the part, and the number there, of each example.
        parts: the joined datasets.
        converts: whether a join has another dtype than its parts.
        pads: whether the dataset, or one of the joined ones, stores numbers of content tokens.
    """

    examples: list[Example]
    layers: list[Layer]
    d_model: int
    dtype: np.dtype[Any]
    special: int = 0
    columns: list[str] = field(default_factory=list)
    patches: int | None = None
    numbers: list[int] | None = None
    whole: Examples | None = None
    parts: list[Examples] = field(default_factory=list)
    converts: bool = False
    pads: bool = False

    def __len__(self) -> int:
        return len(self.examples)

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def token_counts(self) -> list[int]:
        return [example.tokens for example in self.examples]

    def tokens_in(self, layer: Layer) -> list[int]:
        return [example.tokens_in(layer) for example in self.examples]

    @property
    def lacks_layers(self) -> bool:
        """Whether an example lacks a layer."""
        return any(layer not in example.rows for example in (self.whole or self).examples for layer in self.layers)

    @property
    def content_lengths(self) -> list[int] | None:
        if not self.pads:
            return None
        return [self.content_of(example)[1] - self.content_of(example)[0] for example in self.examples]

    def content_of(self, example: Example) -> tuple[int, int]:
        """The first content token and the end of the content."""
        first = min(self.special, example.tokens)
        stop = example.tokens if example.content is None else min(example.tokens, self.special + example.content)
        return first, stop

    @property
    def labels(self) -> list[list[int]] | None:
        """One list per example; None if the dataset has no labels."""
        return None if self.patches is None else [list(example.labels or []) for example in self.examples]

    def values(self, column: str) -> list[Any]:
        """A column; None for examples of a part that lacks it."""
        return [example.columns.get(column) for example in self.examples]

    def origins(self) -> tuple[list[int], list[int]]:
        """Each example's part, and its number there."""
        places = [(k, i) for k, part in enumerate((self.whole or self).parts) for i in range(len(part))]
        chosen = [places[i] for i in (range(len(self)) if self.numbers is None else self.numbers)]
        return [place[0] for place in chosen], [place[1] for place in chosen]

    # -- choosing and joining ------------------------------------------------------------------------------------------

    def choose(self, positions: list[int]) -> Examples:
        """The examples at these positions, from 0."""
        numbers = list(range(len(self))) if self.numbers is None else self.numbers
        return replace(
            self,
            examples=[self.examples[i] for i in positions],
            numbers=[numbers[i] for i in positions],
            whole=self.whole or self,
            parts=[],
        )

    def filter(self, key: Any) -> Examples:
        """As numpy indexes a list: flags, integers in any order, or a slice."""
        return self.choose([int(i) for i in np.arange(len(self))[key]])

    def split_positions(self, numbers: list[int]) -> list[int]:
        """Positions of the examples with these numbers in the opened dataset, each used once, ascending."""
        own = list(range(len(self))) if self.numbers is None else self.numbers
        positions, start = [], 0
        for number in numbers:
            start = own.index(number, start) + 1
            positions.append(start - 1)
        return positions

    @classmethod
    def concat(cls, stores: list[Examples], layers: list[Layer] | None, dtype: Any, special: int) -> Examples:
        """The examples of several datasets, in order; ``layers`` and ``dtype`` are None if they are those of all."""
        names = stores[0].layers if layers is None else layers
        examples = []
        for store in stores:
            for example in store.examples:
                rows = {layer: example.rows[layer] for layer in names if layer in example.rows}
                content = example.content
                if content is not None:  # the end of the content stays where it is
                    content = max(0, store.special + content - special)
                examples.append(replace(example, rows=rows, content=content))
        return cls(
            examples,
            list(names),
            stores[0].d_model,
            stores[0].dtype if dtype is None else np.dtype(dtype),
            special,
            list(dict.fromkeys(column for store in stores for column in store.columns)),
            # Labels count from the first content token.
            stores[0].patches
            if all((store.patches, store.special) == (stores[0].patches, special) for store in stores)
            else None,
            parts=[part for store in stores for part in store._flat(layers)],
            converts=dtype is not None,
            pads=any(store.pads for store in stores),
        )

    def _flat(self, layers: list[Layer] | None) -> list[Examples]:
        """The parts of a join, if it was not filtered and changed nothing in them; else the dataset itself."""
        equal = all(part.special == self.special and (layers or part.layers == self.layers) for part in self.parts)
        return self.parts if self.parts and equal and not self.converts else [self]

    def labels_as_column(self) -> Examples:
        """Labels as the column ``patch_labels``, as formats without labels store them."""
        if self.patches is None:
            return self
        examples = [replace(x, labels=None, columns={**x.columns, "patch_labels": x.labels}) for x in self.examples]
        return replace(self, examples=examples, columns=[*self.columns, "patch_labels"], patches=None)

    def column_as_labels(self) -> Examples:
        """The column ``patch_labels`` as labels; no columns, as saev stores none."""
        own, found = self.patches is not None, "patch_labels" in self.columns
        labels = [x.labels if own else x.columns["patch_labels"] if found else None for x in self.examples]
        examples = [replace(x, labels=each, columns={}) for x, each in zip(self.examples, labels, strict=True)]
        return replace(self, examples=examples, columns=[], patches=self.token_counts[0] if own or found else None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def row(self, layer: Layer, example: int, token: int, dtype: Any = None) -> Rows:
        """One row; a negative token counts from the example's end."""
        if not 0 <= example < len(self):
            raise IndexError(f"example {example}")
        return cast(self.examples[example].rows[layer][token], dtype or self.dtype)

    def gather(self, layer: Layer, examples: Any, tokens: Any, dtype: Any = None) -> Rows:
        """Rows of the broadcast indices, in their shape; ``(1, d_model)`` for two integers."""
        examples = np.asarray(examples)
        if examples.dtype == bool:
            examples = np.flatnonzero(examples)
        e, t = np.broadcast_arrays(examples, np.asarray(tokens))
        if e.ndim == 0:
            e, t = e.reshape(1), t.reshape(1)
        rows = [self.row(layer, int(i), int(j), dtype) for i, j in zip(e.ravel(), t.ravel(), strict=True)]
        return self._stack(rows, dtype).reshape(*e.shape, self.d_model)

    def last_tokens(self, layer: Layer, examples: list[int]) -> Rows:
        """The last token's row of each example; of a padded one the last content token's."""
        return self._stack([self.row(layer, i, self._last(i)) for i in examples])

    def _last(self, i: int) -> int:
        stop = self.content_of(self.examples[i])[1]
        if not stop:
            raise IndexError(f"example {i} has no tokens")
        return stop - 1

    def sequence(self, layer: Layer, example: int, dtype: Any = None) -> Rows:
        """All stored tokens of an example."""
        return cast(self.examples[example].rows[layer], dtype or self.dtype)

    def ragged(self, layer: Layer, examples: list[int]) -> tuple[Rows, list[int]]:
        """All rows, example after example, and offsets. An example without the layer has no rows."""
        each = [self.sequence(layer, i) for i in examples if layer in self.examples[i].rows]
        offsets = [0]
        for i in examples:
            offsets.append(offsets[-1] + self.examples[i].tokens_in(layer))
        return np.concatenate([self._stack([]), *each]), offsets

    def array(self, layer: Layer) -> np.ndarray | None:
        """``(examples, tokens, d_model)``; None if the numbers of tokens differ."""
        if len(set(self.tokens_in(layer))) != 1:
            return None
        return np.stack([self.ragged(layer, [i])[0] for i in range(len(self))])

    def flat(self, layer: Layer) -> Rows:
        """All rows of a layer, ``(rows, d_model)``."""
        return self.ragged(layer, list(range(len(self))))[0]

    def _stack(self, rows: list[Rows], dtype: Any = None) -> Rows:
        return np.stack(rows) if rows else np.zeros((0, self.d_model), dtype or self.dtype)


def cast(rows: Rows, dtype: Any) -> Rows:
    """Rows as another dtype: nearest values, large ones infinite."""
    with np.errstate(all="ignore"):
        return rows.astype(dtype)


def overflows(rows: Rows, dtype: Any) -> int:
    """Number of finite values that become infinite as another dtype."""
    wide = rows.astype(np.float64)
    return int((np.isfinite(wide) & np.isinf(cast(rows, dtype).astype(np.float64))).sum())


def same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same shape, dtype and bits, except for the payload of NaN values."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = a.astype(np.float64), b.astype(np.float64)
    return bool(np.array_equal(x, y, equal_nan=True) and np.array_equal(np.signbit(x[x == x]), np.signbit(y[y == y])))
