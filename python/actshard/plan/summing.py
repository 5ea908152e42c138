"""Plans of statistics: tasks sum ranges of rows, and the commit combines the sums.

A layer's rows are divided into leaves of a fixed size, which are summed in a binary tree (the core's ``stream/stats/tree.rs``). A
task sums a range of the leaves of all layers, and stores the sums of each layer as a few nodes of the tree:

.. code-block:: text

    WORK/tasks/00017/sums.npy         (nodes, d_model), see `Sums`; positions and counts are in result.json
    WORK/tasks/00017/summaries.json   a summary of each node; not in result.json, which every status reads
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import read_json, show
from actshard.base._schema import OMITTED, Amount, json_values
from actshard.base.errors import ActshardError, ArgumentError, FormatError
from actshard.base.layers import Layer, plain, several
from actshard.base.work import write_json
from actshard.formats.report import NOT_OF_DATA
from actshard.looking.saved import StatsFile
from actshard.looking.stats import SUMMED, Stats, Sums
from actshard.looking.stats.summary import HASHES, LARGEST
from actshard.plan import process
from actshard.plan.data import Planned, Predicted, identity
from actshard.plan.needs import needs
from actshard.plan.plan import Plan
from actshard.plan.reading import (
    NO_LISTING,
    broken,
    described,
    keep,
    kept,
    notes,
    place,
    save,
    saved,
    wide_groups,
    work_folder,
)
from actshard.plan.verb import Beat, LayoutValue, PlaceText, Result, Span, Verb, check_spans, shortened
from actshard.reading.inputs import Input, inputs_of
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.streaming.selection import ColumnTokens, Limit, Mask, Selection, Tokens
from actshard.writing.converting.blocks import balanced

# Checks of the sums of a plan's tasks, compared with the dataset's own counts and with each other, before a commit joins them.
#
# Rows are not read again, so that other possible means, norms, places or hashes are not found.


_ROUNDING = 1e-6
"""Relative difference of two sums of the same norms in different orders; a leaf adds at most 65,536 norms one by one."""


class SummedLayer(NamedTuple):
    """A layer of a plan of statistics: its index, its number of leaves, and whether its rows are read as float64."""

    group: Amount
    leaves: Amount
    wide: bool


class KeptColumn(NamedTuple):
    """A list column that selects tokens; see :class:`actshard.streaming.selection.ColumnTokens`."""

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


SUMS, SUMMARIES = "sums.npy", "summaries.json"


def stats(
    path: str | os.PathLike[str],
    layers: Layer | Sequence[Layer] | None = None,
    *,
    tasks: int = 64,
    tokens: Tokens = "content",
    ignore_labels: Sequence[int] = (),
    keep: Mask = None,
    max_norm: Limit = None,
    min_token: int = 0,
    format: str | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
    save: bool = False,
    work: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans the statistics of layers. For any number of tasks, they equal :meth:`actshard.Store.stats` bit for bit.

    Reads metadata and token counts, and writes nothing. ``plan.commit()`` returns ``{layer: Stats}`` and also writes them next to
    the working folder, as ``WORK.json``: a second ``commit()`` returns them again.

    Args:
        path: a path or a URL that all machines can read. Credentials come from each machine's environment.
        layers: names from ``store.layers``; None: all.
        tasks: maximum number of tasks. There are fewer if there are fewer leaves (65,536 rows, or 64 MiB); see ``plan.notes``.
        tokens: as for :meth:`actshard.Store.stream`.
        ignore_labels: as for :meth:`actshard.Store.stream`.
        keep: as for :meth:`actshard.Store.stream`, but only by a column: its name, or :func:`actshard.up_to_last`.
        max_norm: must be None: which rows it leaves out is known only after all have been read.
        min_token: as for :meth:`actshard.Store.stream`.
        format: as for :func:`actshard.open`.
        layout: as for :func:`actshard.open`.
        save: whether the commit also saves them, like :meth:`actshard.Store.stats` with ``save=True``.
        work: working folder, outside of the dataset, which all machines must share; None: ``.actshard-stats-XXXXXXXX`` in the
            current folder.

    Raises:
        ArgumentError: ``keep`` or ``max_norm`` cannot be planned.
        Errors of :func:`actshard.open` and :meth:`actshard.Store.stats`.
    """
    tasks = _arguments.whole(tasks, "tasks", 1)
    where, files = place(path), described(layout, format)
    store = open_quietly(where, format, "pread", layout=files)
    groups = [store.group_of(layer) for layer in (store.layers if layers is None else several(layers))]
    selection = _check_selection(Selection(tokens, ignore_labels, keep, max_norm, min_token))
    column = selection.keep
    wide = wide_groups(store, groups)
    summed_layers, weights = [], []
    for group in groups:
        selected = selection.resolve(store, [store.layers[group]])
        store.rows.sums(group, selected.native, (0, 0), group in wide)  # raises if rows are not numbers
        rows = selected.count
        leaf_rows = store.rows.leaf_rows(group in wide)
        sizes = np.full(-(-rows // leaf_rows), leaf_rows, np.int64)
        if rows % leaf_rows:
            sizes[-1] = rows % leaf_rows
        summed_layers.append(SummedLayer(group, len(sizes), group in wide))
        weights.append(sizes * (store.d_model * store.dtype.itemsize))
    arguments = StatsArguments(
        where,
        format,
        files,
        selection.tokens,
        tuple(selection.ignore_labels),
        tuple(summed_layers),
        bool(_arguments.switch(save, "save")),
        KeptColumn(column.column, column.context, column.at_least) if isinstance(column, ColumnTokens) else None,
        selection.min_token,
    )
    plan_tasks = _split_tasks(np.concatenate(weights) if weights else np.zeros(0, np.int64), tasks)
    inputs = inputs_of(store)
    if inputs is None:
        raise ArgumentError(NO_LISTING)
    folder = work_folder("stats", identity("stats", arguments, inputs, plan_tasks), where, work)
    predicted = _predict(store, arguments, plan_tasks, inputs)
    noted = notes(
        len(plan_tasks),
        tasks,
        f"the rows have {many(sum(layer.leaves for layer in summed_layers), 'part')} to sum",
        folder,
    )
    return Plan("stats", json_values(arguments), inputs, tuple(json_values(plan_tasks)), predicted, folder, noted)


def _check_selection(selection: Selection) -> Selection:
    """The selection, if a plan's file can name its rows."""
    if selection.keep is not None and not isinstance(selection.keep, ColumnTokens):
        raise ArgumentError(
            "keep: a plan's file holds no masks or functions. Pass the name of a list column, such as "
            '"loss_mask", or actshard.up_to_last("loss_mask")'
        )
    if selection.max_norm is not None:
        raise ArgumentError(
            "max_norm: not supported by plans: which rows it leaves out is known only after all have been read. Use store.stats"
        )
    return selection


def _split_tasks(weights: NDArray[np.int64], tasks: int) -> list[StatsTask]:
    if not len(weights):
        return [StatsTask(Span(0, 0), 0)]
    firsts = balanced(weights, np.arange(len(weights)), tasks)
    bounds = [*firsts, len(weights)]
    return [StatsTask(Span(a, b), int(weights[a:b].sum())) for a, b in itertools.pairwise(bounds)]


def _predict(store: Store, arguments: StatsArguments, tasks: Sequence[StatsTask], inputs: Sequence[Input]) -> Predicted:
    """Predicts bytes to read, memory and disk space."""
    row = store.d_model * store.dtype.itemsize
    leaves = {layer.group: layer.leaves for layer in arguments.layers}
    wide = {layer.group for layer in arguments.layers if layer.wide}
    selected = {g: arguments.selection.resolve(store, [store.layers[g]]) for g in leaves}
    rows = {g: layer_selection.count for g, layer_selection in selected.items()}
    size = {g: store.rows.leaf_rows(g in wide) for g in leaves}

    def bytes_of(group: int, first: int, end: int) -> int:
        return (min(end * size[group], rows[group]) - first * size[group]) * row

    ranges = [[(g, a, b, bytes_of(g, a, b)) for g, _, a, b in _spans(arguments.layers, t.leaves)] for t in tasks]
    predicted_needs = needs(
        store,
        ranges,
        lambda g, a, b, range_bytes: store.rows.sum_needs(
            g, selected[g].native, (a, b), g in wide, range_bytes // max(row, 1)
        ),
        inputs,
        lambda g, a, b: (store.num_examples * a // leaves[g], -(-store.num_examples * b // leaves[g])),
    )
    node = store.d_model * SUMMED.itemsize
    # A range has at most two nodes of each size.
    scratch = sum(2 * (task.leaves.end - task.leaves.first + 1).bit_length() * node for task in tasks)
    memory = (
        process.opening(store, (arguments.path, arguments.format, arguments.layout), inputs, __name__)
        + predicted_needs.memory
    )
    return Predicted(0, 0, predicted_needs.read, memory, scratch=scratch)


def _spans(layers: Iterable[SummedLayer], leaves: Span) -> Iterator[LeafSpan]:
    """Yields a task's leaves by layer."""
    before = 0
    for layer in layers:
        first, end = max(leaves.first - before, 0), min(leaves.end - before, layer.leaves)
        if first < end:
            yield LeafSpan(layer.group, layer.wide, first, end)
        before += layer.leaves


class Summing(Verb[Store]):
    """Runs the tasks of a plan of statistics."""

    name = "stats"

    def open(self, plan: Planned) -> Store:
        """The dataset."""
        arguments = plan.arguments_as(StatsArguments)
        store = open_quietly(arguments.path, arguments.format, "pread", layout=arguments.layout)
        if any(layer.group >= len(store.layers) for layer in arguments.layers):
            raise FormatError(f"expected {len(store.layers)} layers, found {arguments.layers!r:.200}", path=plan.work)
        return store

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that :func:`stats` does not make."""
        layers = plan.arguments_as(StatsArguments, path).layers
        spans = [task.leaves for task in plan.tasks_as(StatsTask, path)]
        check_spans(spans, "leaves", sum(layer.leaves for layer in layers), path)

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> StatsResult:
        """Sums the task's leaves."""
        store, arguments, part = self.opened(plan), plan.arguments_as(StatsArguments), plan.tasks_as(StatsTask)[task]
        spans = list(_spans(arguments.layers, part.leaves))
        total, done = sum(b - a for _, _, a, b in spans), 0
        layers, arrays, summaries = [], [], []
        for group, wide, a, b in spans:
            layer = store.layers[group]
            leaf = store.rows.leaf_rows(wide)
            try:
                nodes = store.rows.sums(
                    group,
                    arguments.selection.resolve(store, [layer]).native,
                    (a, b),
                    wide,
                    lambda rows, done=done, leaf=leaf: tell(done + rows // leaf, total),  # type: ignore[misc]  # mypy infers no lambda whose defaults keep the loop's values
                )
            except ActshardError as error:
                error.detail = f"layer {plain(layer)}, rows {a * leaf:,} to {b * leaf:,}: {error.detail}"
                raise
            done += b - a
            records, columns, texts = Sums(store.d_model, nodes).as_plain()
            summaries += texts
            layers.append(LayerNodes(group, tuple(NodeRecord(*record) for record in records)))
            arrays.append(columns)
        write_json(folder / SUMMARIES, {"nodes": summaries}, None)
        save(folder / SUMS, np.concatenate(arrays) if arrays else np.empty((0, store.d_model), SUMMED))
        return StatsResult(part.leaves, tuple(layers), part.bytes, total)

    def part(self, plan: Planned, limit: int) -> Mapping[str, object] | None:
        """The first leaves of the first task."""
        return shortened(plan.tasks[0], "leaves", limit) if plan.tasks else None

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Raises FormatError if a result has other leaves, layers or rows than its task."""
        checks, layers = NodeChecks(self.opened(plan)), plan.arguments_as(StatsArguments).layers
        for result in results:
            task = plan.tasks_as(StatsTask)[result.task]
            checks.rows(result, task, list(_spans(layers, task.leaves)), layers)

    def commit(self, plan: Planned, results: Sequence[Result]) -> dict[Layer, Stats]:
        """Combines the sums to the statistics of each layer."""
        if (over := self.committed(plan)) is not None:
            return over
        store, arguments = self.opened(plan), plan.arguments_as(StatsArguments)
        sums = {layer.group: Sums(store.d_model) for layer in arguments.layers}
        checks = NodeChecks(store)
        for result in results:
            columns = saved(result.folder / SUMS, SUMMED, 2)
            summaries = read_json(result.folder / SUMMARIES)
            try:
                first = 0
                for layer in result.read(StatsResult).layers:
                    end = first + len(layer.nodes)
                    part = Sums.of_plain(layer.nodes, columns[first:end], summaries["nodes"][first:end], store.d_model)
                    for node in part.nodes:
                        checks.sums(result, layer.layer, node)
                    sums[layer.layer] = sums[layer.layer].join(part)
                    first = end
            except FormatError:
                raise
            except (LookupError, TypeError, ValueError, OverflowError, ArgumentError) as error:
                raise FormatError(f"expected sums of layers: {error!r:.200}", path=result.folder) from error
        for group, leaves, _ in arguments.layers:
            if sums[group].leaves != (0, leaves):
                raise FormatError(
                    f"layer {plain(store.layers[group])}: expected leaves {(0, leaves)}, found {sums[group].leaves}",
                    path=plan.work,
                )
        stats_by_layer = {
            store.layers[group]: sums[group].stats(store.layers[group]) for group, _, _ in arguments.layers
        }
        if arguments.save:
            for name, stats in stats_by_layer.items():
                StatsFile(store, name, arguments.selection).write(stats)
        keep(plan, [stats.as_plain() for stats in stats_by_layer.values()])
        return stats_by_layer

    def committed(self, plan: Planned) -> dict[Layer, Stats] | None:
        """The statistics of an earlier commit, from the file next to the working folder."""
        records = kept(plan)
        if records is None:
            return None
        try:
            layer_stats = [Stats.of_plain(record) for record in records]
            return {stats.layer: stats for stats in layer_stats if stats.layer is not None}
        except (LookupError, TypeError, ValueError) as error:
            raise broken(plan, error) from error
