"""Plans of statistics: tasks sum ranges of rows, and the commit combines the sums.

A layer's rows are divided into leaves of a fixed size, which are summed in a binary tree (the core's ``stream/stats/tree.rs``). A
task sums a range of the leaves of all layers, and stores the sums of each layer as a few nodes of the tree:

.. code-block:: text

    WORK/tasks/00017/sums.npy         (nodes, d_model), see `Sums`; positions and counts are in result.json
    WORK/tasks/00017/summaries.json   a summary of each node; not in result.json, which every status reads
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import read_json
from actshard.base._schema import json_values
from actshard.base.errors import ActshardError, ArgumentError, FormatError
from actshard.base.layers import Layer, plain, several
from actshard.base.work import write_json
from actshard.looking.saved import StatsFile
from actshard.looking.stats import Stats
from actshard.looking.stats.sums import SUMMED, Sums
from actshard.plan import process
from actshard.plan.checking import Span, check_spans
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
from actshard.plan.stats_checks import (
    KeptColumn,
    LayerNodes,
    LeafSpan,
    NodeChecks,
    NodeRecord,
    StatsArguments,
    StatsResult,
    StatsTask,
    SummedLayer,
)
from actshard.plan.verb import Beat, Result, Verb, shortened
from actshard.reading.inputs import Input, inputs_of
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.streaming.norms import Limit
from actshard.streaming.selection import Mask, Selection, Tokens
from actshard.streaming.supervised import ColumnTokens
from actshard.writing.converting.segments import balanced

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
