"""Pairs: the same examples of several stores, whose activations are read together.

The rows of all stores form one dataset whose groups are (store, layer), store after store (``Rows.paired`` of the binding). So a
stream of several stores is a stream of several layers, with one order and one read-ahead. Rows are written directly into
``(b, stores * layers, d_model)``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base import layers as naming
from actshard.base.errors import ArgumentError, ArgumentTypeError, NotStoredError
from actshard.base.late import Late
from actshard.base.layers import Layer
from actshard.formats.contents import Contents
from actshard.looking.stats import Stats
from actshard.reading.choosing import resolve, split
from actshard.reading.joining import common_layers, common_path, dtype_of, io_of, names_of, special_of
from actshard.reading.opening import open
from actshard.reading.store import Store
from actshard.streaming import Batch, RowLoop, Stream
from actshard.streaming.comparing import compare as compared_of
from actshard.streaming.normalizer import Normalizer
from actshard.streaming.readable import tokens_anywhere
from actshard.streaming.rescaling import Normalize, Rescaling, RowOrder
from actshard.streaming.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.reading.chosen import Chosen
else:
    pa = Late("pyarrow")

FORMAT = "pair"
"""The ``format`` of the rows of a pair. It is not a file format."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PairedBatch(Batch):
    """One batch of a pair.

    Attributes:
        activations: ``(b, n, d_model)``: n rows per token, one for each store and layer; ``(b, d_model)`` if interleaved.
        stores: int64 indices into :attr:`PairedStores.stores`: ``(n,)`` for the second axis; ``(b,)`` if interleaved.
        layers: the layers' names, with the same shape as ``stores``.
    """

    stores: NDArray[np.int64]


class PairedStores:
    """The same examples of several stores. :func:`pair` creates it.

    Pickled as its stores, and usable in workers and after ``fork``. Keep the stores open while it is in use.

    Attributes:
        stores: the stores, in the order given.
        names: their names: the keys of the mapping given, or folder names.
        layers: layers that can be read, which all stores have.
        d_model: elements per row.
        dtype: numpy dtype of rows.
        num_examples: number of examples; also ``len(pair)``.
        compared: what is equal in all stores that have it: ``"examples"``, ``"tokens"``, and names of columns.
        warnings: messages about contents that could not be compared.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        names: Sequence[str],
        layers: tuple[Layer, ...],
        dtype: DTypeLike | None,
        compared: tuple[str, ...],
        warnings: tuple[str, ...],
    ) -> None:
        self.stores, self.names, self.layers = tuple(stores), tuple(names), layers
        self.compared, self.warnings = compared, warnings
        self._asked = dtype
        self._together = _together(self.stores, self.names, layers, dtype)
        self.dtype = self._together.dtype
        self.d_model, self.num_examples = self._together.d_model, len(self._together)

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return (
            f"<actshard.PairedStores of {', '.join(self.names[:4])}{', ...' if len(self.names) > 4 else ''}: "
            f"{_arguments.many(self.num_examples, 'example')}, layers {naming.short(self.layers)}, d_model {self.d_model}, "
            f"{self.dtype}>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return PairedStores, (self.stores, self.names, self.layers, self._asked, self.compared, self.warnings)

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """``(num_examples,)`` int64, read-only: number of stored tokens per example."""
        return self.stores[0].token_counts

    @property
    def table(self) -> pa.Table:
        """:attr:`Store.table` of the first store."""
        return self.stores[0].table

    def filter(self, examples: object) -> PairedStores:
        """Returns a pair of some of the examples, as :meth:`Store.filter`; expressions and functions see the first store's table.

        Raises:
            As :meth:`Store.filter`.
        """
        return self._choose(resolve(self.stores[0], examples))

    def split(
        self, test: float = 0.2, *, by: str | ArrayLike | None = None, seed: int = 0
    ) -> tuple[PairedStores, PairedStores]:
        """Returns two pairs, for training and for testing, as :meth:`Store.split` of the first store.

        Raises:
            As :meth:`Store.split`.
        """
        train, held_out = split(self.stores[0], test, by, seed)
        return self._choose(train), self._choose(held_out)

    def _choose(self, positions: Chosen) -> PairedStores:
        stores = [store._choose(positions) for store in self.stores]
        return PairedStores(stores, self.names, self.layers, self._asked, self.compared, self.warnings)

    def gather(
        self,
        layer: Layer | Sequence[Layer],
        examples: ArrayLike,
        tokens: ArrayLike,
        *,
        out: object | None = None,
        dtype: DTypeLike | None = None,
    ) -> NDArray[Any]:
        """Reads arbitrary tokens from all stores, in one pass, directly into the result.

        Args:
            layer: a name from :attr:`layers`, or several.
            examples: as in :meth:`Store.gather`.
            tokens: as in :meth:`Store.gather`.
            out: as in :meth:`Store.gather`.
            dtype: as in :meth:`Store.gather`.

        Returns:
            ``(..., n, d_model)`` for n stores and layers, store after store, a copy.

        Raises:
            As :meth:`Store.gather`.
        """
        groups = np.array(self._groups(layer), np.int64)
        return self._together.gather_of(groups, examples, tokens, out, dtype, layer)

    def stream(self, layer: Layer | Sequence[Layer] | Literal["all"], batch_size: int, **options: Any) -> PairedStream:
        """Returns a stream of aligned batches: each row has one token's activations from all stores.

        Args:
            layer: a name from :attr:`layers`, several, or ``"all"``. Every store is read in each of them.
            batch_size: tokens per batch.
            options: as in :meth:`Store.stream`; ``center`` and ``scale`` may be ``(n, d_model)``.

        Returns:
            A :class:`PairedStream` of :class:`PairedBatch`.

        Raises:
            As :meth:`Store.stream`.
        """
        groups = self._groups(layer)
        self._check_tokens(groups)
        return PairedStream(self, groups, batch_size, options)

    def as_store(self) -> Store:
        """Returns one store with all activations, whose layers are ``"NAME:LAYER"``: ``"base:5"``, ``"chat:5"``.

        For functions that take a store, and its methods: ``actshard.convert(pair.as_store(), ...)``, ``verify``, ``stats``,
        ``sequences_stream``, ``layer``. Its table is that of the first store. If stores have the same name, they are called
        0, 1, ...
        """
        return _named(self.stores, self.names, self.layers, self._asked)

    def _check_tokens(self, groups: Sequence[int]) -> None:
        """Raises NotStoredError if stores or layers have different numbers of tokens of an example."""
        if not self._together.contents.layers_differ:
            return
        first = self._together.tokens_in(groups[0])
        for group in groups[1:]:
            counts = self._together.tokens_in(group)
            if len(differ := np.flatnonzero(first != counts)):
                i, pairs = int(differ[0]), [divmod(g, len(self.layers)) for g in (groups[0], group)]
                first_layer, other_layer = (f"layer {self.layers[k]!r} of {self.names[s]}" for s, k in pairs)
                raise NotStoredError(
                    f"pair: example {i}: expected equal numbers of tokens, found {first[i]} in {first_layer} and "
                    f"{counts[i]} in {other_layer} ({_arguments.many(len(differ), 'example', 'differs', 'differ')}). "
                    "Leave these examples out with filter().",
                    path=self.stores[pairs[1][0]].path,
                )

    def _groups(self, layer: Layer | Sequence[Layer] | Literal["all"]) -> list[int]:
        names = self.layers if isinstance(layer, str) and layer == "all" else naming.several(layer, "layer")
        for name in names:
            if name not in self.layers:
                self.stores[0].group_of(name)  # raises for unknown names
                raise ArgumentError(f"layer: expected layers of the pair, {naming.short(self.layers)}, found {name!r}")
        positions = [self.layers.index(name) for name in names]
        return [store * len(self.layers) + k for store in range(len(self.stores)) for k in positions]


def _unnamed(pair: PairedStores, groups: Sequence[int], normalize: Normalize) -> object:
    """Checks the layers of statistics, and removes their names: the joined rows have other layer names."""
    if not isinstance(normalize, list | tuple) or len(normalize) != len(groups):
        return normalize  # refused by the stream
    for group, stats in zip(groups, normalize, strict=True):
        store, position = divmod(group, len(pair.layers))
        if isinstance(stats, Stats) and stats.layer not in (None, pair.layers[position]):
            raise ArgumentError(
                f"normalize: expected statistics of layer {pair.layers[position]!r} of {pair.names[store]}, found those of layer "
                f"{stats.layer!r}"
            )
        if isinstance(stats, Normalizer):
            stats.check(pair.layers[position], stats.d_model)
    return [replace(stats, layer=None) if isinstance(stats, Stats | Normalizer) else stats for stats in normalize]


class PairedStream(Stream):
    """Aligned batches of a pair. :meth:`PairedStores.stream` creates it; it resumes, pickles and feeds loaders like a Stream.

    Attributes:
        pair: the pair.
    """

    def __init__(self, pair: PairedStores, groups: list[int], batch_size: int, options: dict[str, Any]) -> None:
        self.pair = pair
        if options.get("normalize") is not None:
            options = {**options, "normalize": _unnamed(pair, groups, options["normalize"])}
        options = dict(options)
        selection, rescaling = Selection.pop(options), _arguments.popped(Rescaling, options)
        order = _arguments.popped(RowOrder, options)
        super().__init__(pair._together, groups, batch_size, selection, rescaling, order, **options)

    def _loop(self, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> RowLoop:
        return _PairLoop(self, first, every, buffers)


class _PairLoop(RowLoop):
    """The iterator of one loop over a pair."""

    def _made(self, raw_batch: object) -> Batch:
        batch = super()._made(raw_batch)
        pair = self._source.pair  # type: ignore[attr-defined]  # only a PairedStream makes this loop
        stores, layers = np.divmod(batch.layers, len(pair.layers))
        names = naming.array_of(pair.layers)[layers]
        return PairedBatch(batch.activations, batch.examples, batch.tokens, names, batch.labels, stores)


def pair(
    *stores: Store | str | os.PathLike[str] | Mapping[str, object],
    layers: Sequence[Layer] | None = None,
    dtype: DTypeLike | None = None,
    compare: Sequence[str] | None = None,
) -> PairedStores:
    """Pairs stores of the same examples and tokens, such as the activations of a base and of a chat model.

    ``actshard.pair(base, chat).stream(5, 4096)`` gives batches ``(b, 2, d_model)`` for crosscoders and model diffing. Formats may
    differ. Before rows are read, it compares the number of examples, their numbers of tokens and content tokens, and the texts, ids
    and token ids that several stores have. A difference raises ArgumentError. ``warnings`` lists what could not be compared.

    Args:
        stores: at least two stores, paths or URLs; or one mapping of names to them.
        layers: layers to read, which all stores must have. None: the stores must have equal layers.
        dtype: dtype of rows, if the stores' differ.
        compare: columns to compare, which all stores must have; ``[]``: only the numbers of examples and tokens. None: columns
            with the usual names of texts, ids and token ids.

    Raises:
        ArgumentError: fewer than two stores; their examples, tokens, texts, ids, d_model, layers or special tokens differ.
        NotStoredError: a store lacks a column of ``compare``.
        DtypeError: dtypes differ and ``dtype`` is not given.
        Errors of :func:`open`.
    """
    members: list[Any] = list(stores)
    names = None
    if len(members) == 1 and isinstance(members[0], Mapping):
        names, members = [str(name) for name in members[0]], list(members[0].values())
    if len(members) == 1 and isinstance(members[0], Iterable) and not isinstance(members[0], str | bytes | Store):
        raise ArgumentTypeError("pair: expected stores as arguments: pair(*stores)")
    if len(members) < 2:
        raise ArgumentError(f"pair: expected at least two stores, found {len(members)}")
    opened = [store if isinstance(store, Store) else open(store) for store in members]
    if names is not None and len({*names}) < len(names):
        raise ArgumentError(f"pair: expected different names of stores, found {names!r:.200}")
    names = names or names_of(opened)
    for name, store in zip(names, opened, strict=True):
        store.check_open()
        if store.d_model != opened[0].d_model:
            raise ArgumentError(
                f"pair: expected one d_model, found {opened[0].d_model} in {names[0]} and {store.d_model} in {name}. Stream each "
                'store separately: with equal arguments, shuffle="exact" gives the same tokens in the same order.',
                path=store.path,
            )
    chosen = common_layers(opened, names, layers, "pair")
    dtype_of(opened, names, dtype)
    special_of(opened, names, None, "pair")
    if isinstance(compare, str):
        raise ArgumentTypeError(f"compare: expected a list of columns, found {compare!r:.80}")
    columns = None if compare is None else _arguments.listed(compare, "compare: expected a list of columns")
    compared, warnings = compared_of(opened, names, columns)
    return PairedStores(opened, names, chosen, dtype, compared, warnings)


def _together(
    stores: tuple[Store, ...], names: Sequence[str], layers: tuple[Layer, ...], dtype: DTypeLike | None
) -> Store:
    """A store whose layers 0, 1, ... are the layers of the first store, then those of the second, and so on."""
    first = stores[0].contents
    every = [store.contents for store in stores]
    groups = [(s, store.group_of(layer)) for s, store in enumerate(stores) for layer in layers]
    common_dtype = dtype_of(stores, names, dtype)
    name = None if dtype is None else _arguments.dtype(dtype)[1]
    rows = _native.Rows.paired([store.rows for store in stores], groups, name, common_dtype, io_of(stores))
    lengths = {contents.tokens_each for contents in every}
    differ = any(contents.layers_differ for contents in every)
    contents: Contents = replace(
        first,
        format=FORMAT,
        path=common_path(stores),
        metadata={},
        layers=tuple(range(len(groups))),
        dtype=common_dtype,
        token_counts=lambda: (
            tokens_anywhere(rows, len(groups), np.arange(len(stores[0]))) if differ else stores[0].token_counts
        ),
        rows=rows,
        files=lambda: list(dict.fromkeys(itertools.chain.from_iterable(c.files() for c in every))),
        warnings=(),
        tokens_each=lengths.pop() if len(lengths) == 1 else None,
        units=None,
        unit_columns=None,
        layers_differ=differ,
        lacks_layers=any(contents.lacks_layers for contents in every),
        types_may_differ=any(c.types_may_differ for c in every) or {store.dtype for store in stores} != {common_dtype},
        converts=dtype is not None,
        has_logits=False,
        router_layers=(),
        logits=lambda: None,
        router=lambda: None,
        labels=lambda: stores[0].labels,
        whole=None,
        chosen=None,
        parts=stores,
        paired=True,
    )
    return Store(contents, io=io_of(stores), reopen=(_together, (stores, names, layers, dtype)))


def _named(
    stores: tuple[Store, ...], names: Sequence[str], layers: tuple[Layer, ...], dtype: DTypeLike | None
) -> Store:
    """The same store with layer names that contain the store's name."""
    # Stores in folders of the same name are named by their paths: numbers make shorter names of layers.
    shown = [str(number) for number in range(len(names))] if any("/" in name for name in names) else list(names)
    together = _together(stores, names, layers, dtype)
    layer_names = tuple(f"{name}:{layer}" for name in shown for layer in layers)
    parts = [
        {"source": name, "format": store.format, "path": str(store.path), "metadata": store.contents.metadata}
        for name, store in zip(shown, stores, strict=True)
    ]
    contents: Contents = replace(together.contents, layers=layer_names, metadata={"parts": parts})
    return Store(contents, io=io_of(stores), reopen=(_named, (stores, names, layers, dtype)))
