"""Plans of statistics: tasks sum ranges of rows, and the commit combines the sums.

A layer's rows are divided into leaves of a fixed size, which are summed in a binary tree (the core's ``stream/stats/tree.rs``). A
task sums a range of the leaves of all layers, and stores the sums of each layer as a few nodes of the tree:

.. code-block:: text

    WORK/tasks/00017/sums.npy         (nodes, d_model), see actshard.stats.sums.Sums; positions and counts are in result.json
    WORK/tasks/00017/summaries.json   a summary of each node; not in result.json, which every status reads
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actshard import _arguments
from actshard._arguments import many
from actshard._json import MAX_INT, read_json
from actshard.converting.segments import balanced
from actshard.errors import ActshardError, ArgumentError, FormatError
from actshard.inputs import Input, inputs_of
from actshard.layers import Layer, plain, several
from actshard.opening import open_quietly
from actshard.plan import process
from actshard.plan.checking import arguments_of, divided, read_only
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
from actshard.plan.stats_checks import NodeChecks
from actshard.plan.verb import Beat, Result, Verb, shortened
from actshard.saved import StatsFile
from actshard.stats import Stats
from actshard.stats.sums import SUMMED, Sums
from actshard.store import Store
from actshard.stream.norms import Limit
from actshard.stream.selection import Mask, Selection, Tokens
from actshard.stream.supervised import ColumnTokens
from actshard.work import write_json

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
    layout: str | os.PathLike[str] | Mapping[str, Any] | None = None,
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
    where, layout = place(path), described(layout, format)
    store = open_quietly(where, format, "pread", layout=layout)
    groups = [store.group_of(layer) for layer in (store.layers if layers is None else several(layers))]
    selection = _planned(Selection(tokens, ignore_labels, keep, max_norm, min_token))
    wide = wide_groups(store, groups)
    listed, weights = [], []
    for group in groups:
        selected = selection.resolve(store, [store.layers[group]])
        store.rows.sums(group, selected.native, (0, 0), group in wide)  # raises if rows are not numbers
        rows = selected.count
        each = store.rows.leaf_rows(group in wide)
        sizes = np.full(-(-rows // each), each, np.int64)
        if rows % each:
            sizes[-1] = rows % each
        listed.append([group, len(sizes), group in wide])
        weights.append(sizes * (store.d_model * store.dtype.itemsize))
    arguments: dict[str, Any] = {
        "path": where,
        "format": format,
        "layout": layout,
        **_plain(selection),
        "layers": listed,
        "save": bool(_arguments.switch(save, "save")),
    }
    made = _divided(np.concatenate(weights) if weights else np.zeros(0, np.int64), tasks)
    inputs = inputs_of(store)
    if inputs is None:
        raise ArgumentError(NO_LISTING)
    folder = work_folder("stats", identity("stats", arguments, inputs, made), where, work)
    predicted = _predicted(_Sought(store, arguments, folder), made, inputs)
    noted = notes(len(made), tasks, f"the rows have {many(sum(n for _, n, _ in listed), 'part')} to sum", folder)
    return Plan("stats", arguments, inputs, tuple(made), predicted, folder, noted)


def _planned(selection: Selection) -> Selection:
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


def _plain(selection: Selection) -> dict[str, Any]:
    """The JSON values of a planned selection."""
    keep = selection.keep
    return {
        "tokens": selection.tokens,
        "ignore_labels": list(selection.ignore_labels),
        "keep": [keep.column, keep.context, keep.at_least] if isinstance(keep, ColumnTokens) else None,
        "min_token": selection.min_token,
    }


def _divided(weights: Any, tasks: int) -> list[dict[str, Any]]:
    if not len(weights):
        return [{"leaves": [0, 0], "bytes": 0}]
    firsts = balanced(weights, np.arange(len(weights)), tasks)
    bounds = [*firsts, len(weights)]
    return [{"leaves": [a, b], "bytes": int(weights[a:b].sum())} for a, b in itertools.pairwise(bounds)]


def _predicted(sought: _Sought, made: Sequence[Mapping[str, Any]], inputs: Sequence[Input]) -> Predicted:
    """Predicts bytes to read, memory and disk space."""
    store, given = sought.store, sought.given
    row = store.d_model * store.dtype.itemsize
    leaves = {group: count for group, count, _ in sought.layers}
    wide = {group for group, _, wide in sought.layers if wide}
    selected = {g: sought.selection.resolve(store, [store.layers[g]]) for g in leaves}
    rows = {g: each.count for g, each in selected.items()}
    size = {g: store.rows.leaf_rows(g in wide) for g in leaves}

    def bytes_of(group: int, first: int, end: int) -> int:
        return (min(end * size[group], rows[group]) - first * size[group]) * row

    ranges = [[(g, a, b, bytes_of(g, a, b)) for g, _, a, b in sought.spans(*task["leaves"])] for task in made]
    found = needs(
        store,
        ranges,
        lambda g, a, b, held: store.rows.sum_needs(g, selected[g].native, (a, b), g in wide, held // max(row, 1)),
        inputs,
        lambda g, a, b: (store.num_examples * a // leaves[g], -(-store.num_examples * b // leaves[g])),
    )
    node = store.d_model * SUMMED.itemsize
    # A range has at most two nodes of each size.
    scratch = sum(2 * (task["leaves"][1] - task["leaves"][0] + 1).bit_length() * node for task in made)
    place = (given["path"], given["format"], given["layout"])
    memory = process.opening(store, place, inputs, __name__) + found.memory
    return Predicted(0, 0, found.read, memory, scratch=scratch)


class _Sought:
    """The opened dataset and arguments of a plan."""

    def __init__(self, store: Store, given: Mapping[str, Any], work: Path) -> None:
        self.store, self.given = store, given
        self.layers: list[list[Any]] = given["layers"]
        column = given["keep"]
        keep = None if column is None else ColumnTokens(*column)
        self.selection = Selection(given["tokens"], given["ignore_labels"], keep, None, given["min_token"])
        if any(not 0 <= group < len(store.layers) for group, _, _ in self.layers):
            raise FormatError(f"expected {len(store.layers)} layers, found {self.layers!r:.200}", path=work)

    @classmethod
    def of(cls, plan: Planned) -> _Sought:
        given = plan.arguments
        return cls(open_quietly(given["path"], given["format"], "pread", layout=given["layout"]), given, plan.work)

    def spans(self, first: int, end: int) -> Iterator[tuple[int, bool, int, int]]:
        """Yields a task's leaves by group: group, whether its rows are read as float64, first and end in the group."""
        at = 0
        for group, leaves, wide in self.layers:
            a, b = max(first - at, 0), min(end - at, leaves)
            if a < b:
                yield group, wide, a, b
            at += leaves


class Summing(Verb):
    """Runs the tasks of a plan of statistics."""

    name = "stats"
    _known: tuple[str, _Sought] | None = None

    def _request(self, plan: Planned) -> _Sought:
        if self._known is None or self._known[0] != plan.id:
            self._known = (plan.id, _Sought.of(plan))
        return self._known[1]

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that :func:`stats` does not make."""
        fields = arguments_of(plan, path)
        read_only(fields)
        fields.text("tokens")
        ignored = fields.value.get("ignore_labels")
        if not isinstance(ignored, list) or any(type(x) is not int or abs(x) >= MAX_INT for x in ignored):
            raise fields.error("ignore_labels", "a list of integers")
        keep = fields.value.get("keep", ())
        if keep is not None and (not isinstance(keep, list) or [type(x) for x in keep] != [str, bool, int]):
            raise fields.error("keep", "null, or a column, whether tokens before its last one are kept, and a number")
        floor = fields.value.get("min_token")
        if type(floor) is not int or not 0 <= floor < MAX_INT:
            raise fields.error("min_token", "an integer of 0 or more")
        leaves = 0
        listed = fields.value.get("layers")
        if not isinstance(listed, list):
            raise fields.error("layers", "a list")
        for each in listed:
            if (
                not isinstance(each, list)
                or [type(x) for x in each] != [int, int, bool]
                or not 0 <= min(each[:2]) <= max(each[:2]) < MAX_INT
            ):
                raise fields.error("layers", "a list of [group, leaves, whether read as float64]")
            leaves += each[1]
        if type(fields.value.get("save")) is not bool:
            raise fields.error("save", "true or false")
        if divided(plan, "leaves", path) != leaves:
            raise fields.error("layers", "as many leaves as the tasks have")

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> dict[str, Any]:
        """Sums the task's leaves."""
        request, part = self._request(plan), plan.tasks[task]
        store, first_and_end = request.store, part["leaves"]
        spans = list(request.spans(*first_and_end))
        total, done = sum(b - a for _, _, a, b in spans), 0
        made, arrays, summaries = [], [], []
        for group, wide, a, b in spans:
            layer = store.layers[group]
            leaf = store.rows.leaf_rows(wide)
            try:
                nodes = store.rows.sums(
                    group,
                    request.selection.resolve(store, [layer]).native,
                    (a, b),
                    wide,
                    lambda rows, done=done, leaf=leaf: tell(done + rows // leaf, total),  # type: ignore[misc]  # mypy infers no lambda whose defaults keep the loop's values
                )
            except ActshardError as error:
                error.detail = f"layer {plain(layer)}, rows {a * leaf:,} to {b * leaf:,}: {error.detail}"
                raise
            done += b - a
            plain_nodes, columns, own = Sums(store.d_model, nodes).as_plain()
            summaries += own
            made.append({"layer": group, "nodes": plain_nodes})
            arrays.append(columns)
        write_json(folder / SUMMARIES, {"nodes": summaries}, None)
        save(folder / SUMS, np.concatenate(arrays) if arrays else np.empty((0, store.d_model), SUMMED))
        return {"leaves": list(first_and_end), "layers": made, "bytes": part["bytes"], "units": total}

    def part(self, plan: Planned, limit: int) -> Mapping[str, Any] | None:
        """The first leaves of the first task."""
        return shortened(plan.tasks[0], "leaves", limit) if plan.tasks else None

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Raises FormatError if a result has other leaves, layers or rows than its task."""
        request = self._request(plan)
        leaves = {group: count for group, count, _ in request.layers}
        checks = NodeChecks(request.store)
        for result in results:
            task = plan.tasks[result.task]
            spans = list(request.spans(*task["leaves"]))
            checks.task(result, task, spans)
            checks.rows(result, task, spans, leaves)

    def commit(self, plan: Planned, results: Sequence[Result]) -> dict[Layer, Stats]:
        """Combines the sums to the statistics of each layer."""
        if (over := self.committed(plan)) is not None:
            return over
        request = self._request(plan)
        store = request.store
        sums = {group: Sums(store.d_model) for group, _, _ in request.layers}
        checks = NodeChecks(store)
        for result in results:
            columns = saved(result.folder / SUMS, SUMMED, 2)
            summaries = read_json(result.folder / SUMMARIES)
            try:
                at = 0
                for each in result.value["layers"]:
                    end = at + len(each["nodes"])
                    part = Sums.of_plain(each["nodes"], columns[at:end], summaries["nodes"][at:end], store.d_model)
                    for node in part.nodes:
                        checks.sums(result, each["layer"], node)
                    sums[each["layer"]] = sums[each["layer"]].join(part)
                    at = end
            except FormatError:
                raise
            except (LookupError, TypeError, ValueError, OverflowError, ArgumentError) as error:
                raise FormatError(f"expected sums of layers: {error!r:.200}", path=result.folder) from error
        for group, leaves, _ in request.layers:
            if sums[group].leaves != (0, leaves):
                raise FormatError(
                    f"layer {plain(store.layers[group])}: expected leaves {(0, leaves)}, found {sums[group].leaves}",
                    path=plan.work,
                )
        made = {store.layers[group]: sums[group].stats(store.layers[group]) for group, _, _ in request.layers}
        if request.given["save"]:
            for layer, stats in made.items():
                StatsFile(store, layer, request.selection.resolve(store, [layer])).write(stats)
        keep(plan, [stats.as_plain() for stats in made.values()])
        return made

    def committed(self, plan: Planned) -> dict[Layer, Stats] | None:
        """The statistics of an earlier commit, from the file next to the working folder."""
        found = kept(plan)
        if found is None:
            return None
        try:
            each = [Stats.of_plain(record) for record in found]
            return {stats.layer: stats for stats in each if stats.layer is not None}
        except (LookupError, TypeError, ValueError) as error:
            raise broken(plan, error) from error
