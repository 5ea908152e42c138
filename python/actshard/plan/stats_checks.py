"""Checks of the sums of a plan's tasks, compared with the dataset's own counts and with each other, before a commit joins them.

Rows are not read again, so that other possible means, norms, places or hashes are not found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard.base._json import show
from actshard.base._schema import OMITTED, Amount
from actshard.base.errors import ActshardError
from actshard.base.layers import Layer, plain
from actshard.formats.report import NOT_OF_DATA
from actshard.looking.stats.summary import HASHES, LARGEST
from actshard.plan.checking import LayoutValue, PlaceText, Span
from actshard.plan.verb import Result
from actshard.reading.store import Store
from actshard.streaming.selection import Selection, Tokens
from actshard.streaming.supervised import ColumnTokens

_ROUNDING = 1e-6
"""Relative difference of two sums of the same norms in different orders; a leaf adds at most 65,536 norms one by one."""


class SummedLayer(NamedTuple):
    """A layer of a plan of statistics: its index, its number of leaves, and whether its rows are read as float64."""

    group: Amount
    leaves: Amount
    wide: bool


class KeptColumn(NamedTuple):
    """A list column that selects tokens; see :class:`actshard.streaming.supervised.ColumnTokens`."""

    column: str
    context: bool
    at_least: int


class LeafSpan(NamedTuple):
    """A task's leaves of one layer."""

    group: int
    wide: bool
    first: int
    end: int


@dataclass(frozen=True)
class StatsArguments:
    """The arguments of :func:`actshard.plan.stats`."""

    path: PlaceText
    format: str | None
    layout: LayoutValue
    tokens: Tokens
    ignore_labels: tuple[int, ...]
    layers: tuple[SummedLayer, ...]
    save: bool
    keep: KeptColumn | None = field(default=None, metadata=OMITTED)
    min_token: Amount = field(default=0, metadata=OMITTED)

    @property
    def selection(self) -> Selection:
        """The rows."""
        keep = None if self.keep is None else ColumnTokens(*self.keep)
        return Selection(self.tokens, self.ignore_labels, keep, None, self.min_token)


@dataclass(frozen=True)
class StatsTask:
    """The leaves that a task sums, counted over all layers."""

    leaves: Span
    bytes: Amount


class NodeRecord(NamedTuple):
    """A node of a layer's tree, without its columns: number of rows, sum of their norms in hexadecimal, number of norms."""

    first: Amount
    level: Amount
    rows: Amount
    total: str
    norms: int


@dataclass(frozen=True)
class LayerNodes:
    """The nodes of a task's leaves of one layer."""

    layer: Amount
    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True)
class StatsResult:
    """The result of a task."""

    leaves: Span
    layers: tuple[LayerNodes, ...]
    bytes: Amount
    units: Amount


class NodeChecks:
    """Checks the nodes of tasks' results; keeps the token counts of one layer."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._counted: tuple[Layer, NDArray[np.int64] | None] | None = None

    def task(self, result: Result, task: StatsTask, spans: Sequence[LeafSpan]) -> StatsResult:
        """Returns a result. Raises FormatError if its layers, nodes or rows are not those of its task's spans of leaves."""
        value = result.read(StatsResult)
        units = sum(span.end - span.first for span in spans)
        for name, expected in (("leaves", task.leaves), ("bytes", task.bytes), ("units", units)):
            if (actual := getattr(value, name)) != expected:
                raise result.wrong(name, show(expected), actual)
        if [part.layer for part in value.layers] != (groups := [span.group for span in spans]):
            raise result.wrong("layers", f"sums of the layers {show(groups)}", result.value["layers"])
        return value

    def rows(self, result: Result, task: StatsTask, spans: Sequence[LeafSpan], layers: Sequence[SummedLayer]) -> None:
        """Raises FormatError for nodes of other leaves, or rows, than the task's."""
        value = self.task(result, task, spans)
        leaves = {layer.group: layer.leaves for layer in layers}
        total = 0
        for span, part in zip(spans, value.layers, strict=True):
            where = f"layer {plain(self.store.layers[span.group])}"
            expected, size = list(_nodes(span.first, span.end)), self.store.rows.leaf_rows(span.wide)
            actual = [(node.first, node.level) for node in part.nodes]
            if actual != expected:
                raise result.wrong(f"{where}: nodes", f"first leaves and levels {show(expected)}", actual)
            for node in part.nodes:
                most = size << node.level
                # Only the last leaf of a layer may be shorter.
                least = most - size + 1 if node.first + (1 << node.level) == leaves[span.group] else most
                if not least <= node.rows <= most:
                    limits = f"{least:,} to {most:,}" if least < most else f"{most:,}"
                    raise result.wrong(f"{where}: rows from leaf {node.first:,} on", limits, node.rows)
                total += node.rows
        row = self.store.d_model * self.store.dtype.itemsize
        if row and total != task.bytes // row:
            raise result.wrong("rows of all layers", f"{task.bytes // row:,}", total)

    def sums(self, result: Result, group: int, node: Mapping[str, object]) -> None:
        """Raises FormatError if the sums of a node contradict each other, or name places that the layer does not have."""
        layer = self.store.layers[group]
        for what, fine in _agreeing(node):
            if not fine:
                where = f"layer {plain(layer)}: leaf {node['first']:,}"
                raise result.error(f"{where}: expected {what}, found sums of {node['rows']:,} rows that differ")
        self._check_places(result, layer, node)

    def _check_places(self, result: Result, layer: Layer, node: Mapping[str, Any]) -> None:
        counts = self._counts(layer)
        places = [entry[-2:] for name in ("largest_rows", "largest_columns") for entry in node[name]]
        for example, token in places:
            if example >= self.store.num_examples:
                limit = f"examples below {self.store.num_examples:,}"
                raise result.wrong(f"layer {plain(layer)}: largest", limit, [example, token])
            if counts is not None and token >= counts[example]:
                limit = f"tokens below {counts[example]:,} in example {example:,}"
                raise result.wrong(f"layer {plain(layer)}: largest", limit, [example, token])

    def _counts(self, layer: Layer) -> NDArray[np.int64] | None:
        """The layer's token counts; None if counting them would read the dataset, or fails."""
        if not self.store.contents.counts_are_cheap:
            return None
        if self._counted is None or self._counted[0] != layer:
            try:
                self._counted = (layer, self.store.tokens_in(layer))
            except NOT_OF_DATA:
                raise
            except ActshardError:  # a file was damaged after the tasks were done
                self._counted = (layer, None)
        return self._counted[1]


def _nodes(first: int, end: int) -> Iterator[tuple[int, int]]:
    """The largest nodes in a range of leaves: (first leaf, level); see the core's ``stream/stats/tree.rs``."""
    while first < end:
        level = (end - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        yield first, level
        first += 1 << level


def _agreeing(node: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """What is true of the sums of any rows, and whether it is true of these."""
    rows, (total, norms) = node["rows"], node["norms"]
    finite, zeros = node["finite"], node["zeros"]
    counts = np.stack([finite, node["nan"], node["infinite"], zeros])
    yield "counts of at least 0", bool((counts >= 0).all())
    yield "as many finite, NaN and infinite values as rows", bool((counts[:3].sum(axis=0) == rows).all())
    yield "at most as many zeros as finite values", bool((zeros <= finite).all())
    yield "a smallest value of at most the largest", bool((node["min"] <= node["max"])[finite > 0].all())
    yield "at most as many norms as rows", norms <= rows
    positions, hashed = node["positions"], sum(n for _, n in node["hashes"])
    yield "as many norms in bins", sum(n for _, n in node["norm_bins"]) == norms
    yield "as many norms by position", sum(n for *_, n in positions) == norms
    yield "as many norms by position and bin", sum(n for *_, n in node["bands"]) == norms
    yield (
        "the sum of norms by position",
        total >= 0 and math.isclose(sum(x for _, x, _ in positions), total, rel_tol=_ROUNDING),
    )
    yield "the largest norms", len(node["largest_rows"]) == min(norms, LARGEST)
    yield "as many hashes as norms", hashed <= norms and (hashed == norms or len(node["hashes"]) == HASHES)
    largest = np.where(finite > 0, np.maximum(-node["min"], node["max"]), 0.0)
    yield (
        "the largest columns",
        len(node["largest_columns"]) == min(np.count_nonzero(largest), LARGEST)
        and all(column < len(largest) and largest[column] == x for column, x, *_ in node["largest_columns"]),
    )
