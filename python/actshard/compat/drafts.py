"""Examples for trainers of draft models: token ids, loss mask, concatenated states of layers, and last hidden states.

Shared by :mod:`actshard.compat.deepspec`, :mod:`~actshard.compat.specforge` and :mod:`~actshard.compat.speculators`, whose
datasets differ only in names, axes and dtypes. A batch is one parallel read of states and one of last states. Token ids and masks
are read per batch if the format supports it; otherwise whole columns are kept in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard
from actshard import Layer, Store
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, DtypeError, FormatError, NotStoredError
from actshard.streaming.readable import content_range

if TYPE_CHECKING:
    import pyarrow as pa

Layers = Sequence[Layer] | Mapping[Layer, int]
"""Names of layers, in the order in which they are concatenated; or a mapping from these names to the layers' numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftSample:
    """One example.

    Attributes:
        ids: ``(T,)`` token ids.
        mask: ``(T,)`` loss mask.
        states: ``(T, L * d_model)``, the L layers of a token, concatenated; L may be 0.
        last: ``(T, d_model)``, the last hidden states; None without such a layer.
    """

    ids: NDArray[np.generic]
    mask: NDArray[np.generic]
    states: NDArray[np.generic]
    last: NDArray[np.generic] | None


class DraftExamples:
    """Reads the content tokens of examples of a store. Pickled as the store's path; usable in workers, forked or spawned.

    Args:
        source: a store, or the path or URL of one.
        ids, mask: dtypes of token ids and masks. Values that do not fit are an error.
        layers: see :data:`Layers`; None: all but ``last``.
        last: the layer of last hidden states; None: no last hidden states.
        input_ids: the column of token ids.
        loss_mask: the column of masks; None: every token counts.
        dtype: dtype of the states; None: as stored.

    Raises:
        LayerError, NotStoredError: the store has no such layer or column.
    """

    def __init__(
        self,
        source: Store | str | PathLike[str],
        ids: DTypeLike,
        mask: DTypeLike,
        *,
        layers: Layers | None = None,
        last: Layer | None = "last",
        input_ids: str = "input_ids",
        loss_mask: str | None = "loss_mask",
        dtype: DTypeLike | None = None,
    ) -> None:
        self.store = source if isinstance(source, Store) else actshard.open(source)
        self._kinds = {input_ids: np.dtype(ids)} | ({} if loss_mask is None else {loss_mask: np.dtype(mask)})
        self._input_ids, self._loss_mask, self._mask = input_ids, loss_mask, np.dtype(mask)
        self.dtype = None if dtype is None else _arguments.dtype(dtype)[0]
        self.last = last
        self.layers = tuple(layer for layer in self.store.layers if layer != last) if layers is None else tuple(layers)
        if not self.layers and last is None:
            raise ArgumentError("layers: expected a layer of hidden states, found none", path=self.store.path)
        self.numbers = self._numbers(layers)
        self._groups = np.array([self.store.group_of(layer) for layer in self.layers], np.int64)
        self._last = None if last is None else np.array([self.store.group_of(last)], np.int64)
        self._table: pa.Table | None = None
        self._columns(np.zeros(0, np.int64))

    def _numbers(self, layers: Layers | None) -> tuple[int, ...] | None:
        """The layers' numbers in the model, if they are known."""
        if isinstance(layers, Mapping):
            numbers: tuple[int, ...] = tuple(layers.values())
            if not all(type(number) is int for number in numbers):
                raise ArgumentError(f"layers: expected integers as the layers' numbers, found {numbers!r:.200}")
            return numbers
        # Formats whose layer names are positions have provenance "layers".
        if "layers" in self.store.contents.provenance or not all(isinstance(layer, int) for layer in self.layers):
            return None
        return tuple(int(layer) for layer in self.layers)

    def __len__(self) -> int:
        return self.store.num_examples

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_table": None}

    @property
    def width(self) -> int:
        """Elements of a state: ``d_model``."""
        return self.store.d_model

    @property
    def state_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the states."""
        return self.store.dtype if self.dtype is None else self.dtype

    def require(self, dtype: DTypeLike, why: str) -> None:
        """Raises DtypeError, with a message that begins with ``why``, unless states have this dtype."""
        required_dtype = _arguments.dtype(dtype)[0]
        if self.state_dtype != required_dtype:
            raise DtypeError(
                f'{why}, found {self.state_dtype}. dtype="{required_dtype}" converts while reading',
                path=self.store.path,
            )

    def lengths(self) -> NDArray[np.int64]:
        """``(n,)`` int64: content tokens of all examples."""
        return self._contents_of(None, self.store.token_counts)

    def read(self, examples: Sequence[int], most: int | None = None, *, last: bool = True) -> list[DraftSample]:
        """Reads examples, at most the first ``most`` tokens of each; with ``last=False``, without their last states.

        Raises:
            As :meth:`Store.gather`; FormatError: ids or masks are not one integer per token, or do not fit their dtype.
        """
        numbers, first = np.asarray(examples, np.int64), self.store.special_tokens
        stored = self.store.tokens_of(numbers)
        content = self._contents_of(numbers, stored)
        lengths = content if most is None else np.minimum(content, most)
        ends = np.cumsum(lengths)
        row_examples = np.repeat(numbers, lengths)
        tokens = np.arange(len(row_examples)) - np.repeat(ends - lengths, lengths) + first
        states = self._rows(self._groups, row_examples, tokens)
        final = None if self._last is None or not last else self._rows(self._last, row_examples, tokens)
        samples = []
        for (ids, mask), end, length in zip(self._tokens(numbers, stored, content), ends, lengths, strict=True):
            part = slice(end - length, end)
            samples.append(
                DraftSample(ids[:length], mask[:length], states[part], None if final is None else final[part])
            )
        return samples

    def tokens(self, examples: Sequence[int]) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        """Reads token ids and masks of examples, without their states.

        Raises:
            As :meth:`read`.
        """
        numbers = np.asarray(examples, np.int64)
        stored = self.store.tokens_of(numbers)
        return self._tokens(numbers, stored, self._contents_of(numbers, stored))

    def _tokens(
        self, numbers: NDArray[np.int64], stored: NDArray[np.int64], content: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        values = self._columns(numbers)
        pairs = []
        for i, (example, *counts) in enumerate(np.stack([numbers, stored, content], axis=1).tolist()):
            columns = {name: self._values(values[name][i], name, example, *counts) for name in self._kinds}
            mask = np.ones(counts[1], self._mask) if self._loss_mask is None else columns[self._loss_mask]
            pairs.append((columns[self._input_ids], mask))
        return pairs

    def _contents_of(self, numbers: NDArray[np.int64] | None, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        """Content tokens of examples; None: of all."""
        first, stop = content_range(self.store, stored, numbers)
        return stop - first

    def _rows(
        self, groups: NDArray[np.int64], examples: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.generic]:
        if not len(groups):
            return np.empty((len(examples), 0), self.state_dtype)
        layers = self.layers if groups is self._groups else (self.last,)
        # Allocated by numpy, which reuses the memory of freed samples: faulting in new pages would cost as much as the copy.
        out = np.empty((len(examples), len(groups) * self.width), self.state_dtype)
        rows: NDArray[np.generic] = self.store.gather_of(groups, examples, tokens, out, self.dtype, layers)
        return rows

    def _columns(self, numbers: NDArray[np.int64]) -> pa.Table:
        """Token ids and masks of examples, as lists."""
        names = list(self._kinds)
        try:
            if self.store.contents.example_columns is not None:
                return self.store.read_columns(names, numbers.tolist())
            if self._table is None:
                self._table = self.store.read_columns(names)
        except NotStoredError as error:
            remedy = "input_ids= and loss_mask= name the columns of token ids and masks; loss_mask=None trains on every token"
            raise NotStoredError(f"{error.detail}. {remedy}", path=self.store.path) from error
        from actshard.base._columns import pick_rows

        return pick_rows(self._table, numbers)

    def _values(self, value: object, name: str, example: int, tokens: int, content: int) -> NDArray[np.generic]:
        """Copies the values of the content tokens to the column's dtype. The list has one value per stored or content token."""
        kind = self._kinds[name]
        where = f"column {name!r}, example {example}"
        elements = getattr(value, "values", None)
        if elements is None or len(elements) not in (tokens, content) or elements.null_count:
            actual = "no list" if elements is None else f"{len(elements)} values, {elements.null_count} of them null"
            raise FormatError(
                f"{where}: expected {content} integers, one per token, found {actual}", path=self.store.path
            )
        if len(elements) == tokens:
            elements = elements.slice(self.store.special_tokens, content)
        array = elements.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "iub" and array.size:
            raise FormatError(f"{where}: expected integers, found {elements.type}", path=self.store.path)
        limits = np.iinfo(kind)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            bad = array[(array < limits.min) | (array > limits.max)][0]
            raise FormatError(f"{where}: expected values that {kind} holds, found {bad}", path=self.store.path)
        return np.array(array, kind)
