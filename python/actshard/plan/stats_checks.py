"""Checks of the sums of a plan's tasks, compared with the dataset's own counts and with each other, before a commit joins them.

Rows are not read again, so that other possible means, norms, places or hashes are not found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._json import show
from actshard.errors import ActshardError, FormatError
from actshard.formats.report import NOT_OF_DATA
from actshard.layers import Layer, plain
from actshard.plan.verb import Result
from actshard.stats.summary import HASHES, LARGEST
from actshard.store import Store

_ROUNDING = 1e-6
"""Relative difference of two sums of the same norms in different orders; a leaf adds at most 65,536 norms one by one."""


class NodeChecks:
    """Checks the nodes of tasks' results; keeps the token counts of one layer."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._counted: tuple[Layer, NDArray[np.int64] | None] | None = None

    def task(self, result: Result, task: Mapping[str, Any], spans: Sequence[tuple[int, bool, int, int]]) -> None:
        """Raises FormatError for a result without the layers, nodes and rows of its task's spans of leaves."""
        value = result.value
        units = sum(end - first for _, _, first, end in spans)
        for name, expected in (("leaves", task["leaves"]), ("bytes", task["bytes"]), ("units", units)):
            if value.get(name) != expected or isinstance(value[name], bool):
                raise _wrong(result, name, show(expected), value.get(name))
        layers = value.get("layers")
        groups = [group for group, *_ in spans]
        if not isinstance(layers, list) or [isinstance(x, dict) and x.get("layer") for x in layers] != groups:
            raise _wrong(result, "layers", f"sums of the layers {show(groups)}", layers)
        for each in layers:
            nodes = each.get("nodes")
            if type(each["layer"]) is not int or not isinstance(nodes, list) or each.keys() != {"layer", "nodes"}:
                raise _wrong(result, "layers", "a layer's number and its nodes", each)
            for node in nodes:
                if not isinstance(node, list) or [type(x) for x in node] != [int, int, int, str, int] or node[2] < 0:
                    raise _wrong(result, "layers", "nodes [first leaf, level, rows, sum of norms, norms]", node)

    def rows(
        self,
        result: Result,
        task: Mapping[str, Any],
        spans: Sequence[tuple[int, bool, int, int]],
        leaves: Mapping[int, int],
    ) -> None:
        """Raises FormatError for nodes of other leaves, or rows, than the task's; ``leaves``: those of each whole layer."""
        total = 0
        for (group, wide, first, end), each in zip(spans, result.value["layers"], strict=True):
            where = f"layer {plain(self.store.layers[group])}"
            expected, size = list(_nodes(first, end)), self.store.rows.leaf_rows(wide)
            found = [(node[0], node[1]) for node in each["nodes"]]
            if found != expected:
                raise _wrong(result, f"{where}: nodes", f"first leaves and levels {show(expected)}", found)
            for at, level, rows, *_ in each["nodes"]:
                most = size << level
                # Only the last leaf of a layer may be shorter.
                least = most - size + 1 if at + (1 << level) == leaves[group] else most
                if not least <= rows <= most:
                    limits = f"{least:,} to {most:,}" if least < most else f"{most:,}"
                    raise _wrong(result, f"{where}: rows from leaf {at:,} on", limits, rows)
                total += rows
        row = self.store.d_model * self.store.dtype.itemsize
        if row and total != task["bytes"] // row:
            raise _wrong(result, "rows of all layers", f"{task['bytes'] // row:,}", total)

    def sums(self, result: Result, group: int, node: Mapping[str, Any]) -> None:
        """Raises FormatError if the sums of a node contradict each other, or name places that the layer does not have."""
        layer = self.store.layers[group]
        for what, fine in _agreeing(node):
            if not fine:
                where = f"layer {plain(layer)}: leaf {node['first']:,}"
                raise _wrong(result, where, what, f"sums of {node['rows']:,} rows that differ")
        self._check_places(result, layer, node)

    def _check_places(self, result: Result, layer: Layer, node: Mapping[str, Any]) -> None:
        counts = self._counts(layer)
        places = [each[-2:] for name in ("largest_rows", "largest_columns") for each in node[name]]
        for example, token in places:
            if example >= self.store.num_examples:
                limit = f"examples below {self.store.num_examples:,}"
                raise _wrong(result, f"layer {plain(layer)}: largest", limit, [example, token])
            if counts is not None and token >= counts[example]:
                limit = f"tokens below {counts[example]:,} in example {example:,}"
                raise _wrong(result, f"layer {plain(layer)}: largest", limit, [example, token])

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


def _wrong(result: Result, where: str, expected: str, found: Any) -> FormatError:
    said = f"{found:,}" if type(found) is int else found if isinstance(found, str) else show(found)
    return FormatError(
        f"task {result.task}: {where}: expected {expected}, found {said}; remove the folder of task {result.task}, and run it "
        "again",
        path=result.folder,
    )


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
