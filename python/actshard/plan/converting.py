"""Plans of conversions: tasks write ranges of examples, or groups of layers, and the commit renames their files.

.. code-block:: text

    DST/.actshard/plan-XXXXXXXX/tasks/00017/files/...         files of the task's writer, with their names in the dataset
    DST/.actshard/plan-XXXXXXXX/tasks/00017/examples.arrow    lengths and columns of its examples, if not stored in its result

Ranges of tasks start at the format's file borders (shards, chunks, files of examples), so most files belong to one task. If several
tasks write parts of one file, such as an index, the commit copies the parts into one file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

import actshard._native as _native
from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._columns import numbers
from actshard.base._schema import json_values
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FormatError,
    boundary,
    from_os,
)
from actshard.base.layers import Layer
from actshard.base.request import Request, digests_of, joined_digests
from actshard.base.work import FOLDER, LOCK, locked, look, make_folder, read_table, rename, sync_folders, write_table
from actshard.formats.options import FormatOptions
from actshard.formats.target import AllExamples, Apart, Target, environment_time
from actshard.plan import converting_checks, process
from actshard.plan.book import RESULT, remove_work_folders, work_folder
from actshard.plan.converting_checks import (
    ConvertArguments,
    PlannedSettings,
    check_config,
    check_result,
    packed,
    unpacked,
)
from actshard.plan.data import Planned, Predicted, fewer, identity
from actshard.plan.needs import conversion_reads, converting
from actshard.plan.plan import Plan
from actshard.plan.reading import described
from actshard.plan.verb import Beat, OpenArguments, Result, Verb, shortened
from actshard.reading.finding import check_opens, is_finished
from actshard.reading.inputs import Input, inputs_of, newest
from actshard.reading.store import Store
from actshard.writing.converting.blocks import Layout, balanced, copy_blocks, survey
from actshard.writing.converting.columns import Columns, NumbersMatterError
from actshard.writing.converting.planning import (
    OVERFLOW,
    ConversionRequest,
    Loss,
    SourceSelection,
    check_request,
    columns_for,
    configure_target,
    conversion_record,
    list_losses,
    overflowed,
    prepare_columns,
    refuse_target_within,
    source,
)
from actshard.writing.converting.previewing import predict, refuse_full
from actshard.writing.converting.running import Conversion
from actshard.writing.existing import check_written, complete_at
from actshard.writing.sink import TOKENS, SegmentWriter, columns_in, lengths_in, write_memory

if TYPE_CHECKING:
    import pyarrow as pa


# Lengths and columns of the examples that tasks of a conversion wrote, for the commit.
#
# Up to 256 lengths are stored in the task's result, so that the commit of 10,000 tasks opens only one file per task. Longer
# tables, and columns, are stored next to the result in an Arrow file.


EXAMPLES, LENGTHS = "examples.arrow", "tokens"
_INLINE = 256
"""Most examples of a task whose lengths are stored in its result."""


def write_examples(folder: Path, table: pa.Table) -> dict[str, object]:
    """Stores the examples of a task: returns the values for its result, or writes a file in its folder and returns none."""
    if table.column_names == [TOKENS] and table.num_rows <= _INLINE and not table[TOKENS].null_count:
        return {LENGTHS: table[TOKENS].to_pylist()}
    write_table(folder / EXAMPLES, table)
    return {}


def check_lengths(results: Sequence[Result], lacking: bool) -> None:
    """Raises FormatError for invalid lengths in results. ``lacking``: examples may lack layers, which is length -1."""
    for result in results:
        if (lengths := result.value.get(LENGTHS)) is not None and min(_checked(lengths, result), default=0) < -lacking:
            raise FormatError(f"task {result.task}: expected lengths of at least 0, found -1", path=result.folder)


def read_examples(results: Sequence[Result]) -> list[pa.Table]:
    """The examples of tasks, in order. Consecutive tasks whose lengths are in their results share one table.

    Raises:
        FormatError: a file or a result is damaged.
    """
    import pyarrow as pa

    tables: list[pa.Table] = []
    lengths: list[int] = []
    for result in results:
        task_lengths = result.value.get(LENGTHS)
        if task_lengths is not None:
            lengths += _checked(task_lengths, result)
            continue
        if lengths:
            tables.append(pa.table({TOKENS: numbers(np.array(lengths, np.int64))}))
            lengths = []
        tables.append(read_table(result.folder / EXAMPLES))
    if lengths:
        tables.append(pa.table({TOKENS: numbers(np.array(lengths, np.int64))}))
    return tables


def _checked(lengths: object, result: Result) -> list[int]:
    """Returns the lengths; raises FormatError if they are not those of the task's examples."""
    first, end = result.value["examples"]
    if (
        not isinstance(lengths, list)
        or len(lengths) != end - first
        or not all(type(n) is int and -1 <= n < 1 << 62 for n in lengths)
    ):
        raise FormatError(
            f"task {result.task}: expected the lengths of {end - first:,} examples, found {str(lengths)[:80]}",
            path=result.folder,
        )
    return lengths


FILES = "files"
_EXAMPLE_WEIGHT = 64
"""Bytes added to the size of each example, so that ranges of empty examples are divided, too."""


def convert(
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    format: str,
    *,
    tasks: int = 64,
    layers: Layer | Sequence[Layer] | Mapping[Layer, Layer] | None = None,
    examples: ArrayLike | slice | None = None,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    tokens: _arguments.Kept = "all",
    dtype: DTypeLike | None = None,
    pad: bool = False,
    truncate: bool = False,
    tokens_per_example: int | None = None,
    shard_bytes: int | str | None = None,
    metadata: Mapping[str, object] | None = None,
    src_format: str | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
    overflow: _arguments.Overflow = "refuse",
    **options: Unpack[FormatOptions],
) -> Plan:
    """Plans a conversion. For any number of tasks, the result is byte-identical to that of :func:`actshard.convert`.

    Reads metadata, columns and lengths of the source, and writes nothing. If the format records a time of creation, it is the time
    of the source's newest file, so that the plan does not depend on the clock.

    Args:
        src: a path, a URL, or a list of them, which all machines must share. Credentials come from each machine's environment.
        dst: the folder to create, which all machines must share. Tasks write to a hidden folder in it.
        format: as for :func:`actshard.convert`.
        tasks: maximum number of tasks. There are fewer if the result has fewer shards; see ``plan.notes``.
        layers: as for :func:`actshard.convert`, like all following arguments.
        examples: examples to convert.
        columns: columns to convert.
        tokens: tokens to convert.
        dtype: dtype to store.
        pad: fill short examples with zeros.
        truncate: cut long examples.
        tokens_per_example: number of tokens for ``pad`` and ``truncate``.
        shard_bytes: approximate size of a shard; smaller shards allow more tasks.
        metadata: added to the source's metadata.
        src_format: format of the source.
        layout: as for :func:`actshard.open`, for the source. The plan keeps the text of a file.
        overflow: what to do with values too large for ``dtype``.
        options: options of the target format.

    Raises:
        Errors of :func:`actshard.convert`, before anything is written.
        DiskFullError: the file system of ``dst`` has too little free space for the result.
    """
    if not _arguments.is_one_of(overflow, OVERFLOW):
        raise ArgumentError(f"overflow: expected {' or '.join(map(repr, OVERFLOW))}, found {overflow!r}")
    tasks = _arguments.whole(tasks, "tasks", 1)
    if isinstance(src, Store):
        raise ArgumentError(
            "src: expected a path, because tasks in other processes open it, found an open store; pass store.path"
        )
    root = _arguments.local_path(dst, "dst")
    with boundary(root, "plan a conversion to"):
        about = described(layout, src_format)
        store = source(src, src_format, "pread", layout=about)
        selection = SourceSelection(layers, examples, columns, tokens, pad, truncate)
        request = check_request(store, format, selection, cast=dtype is not None)
        settings = PlannedSettings(
            None if dtype is None else str(_arguments.dtype(dtype)[0]),
            tokens_per_example,
            shard_bytes,
            None if metadata is None else dict(metadata),
            dict(options),
            newest(store) if (now := environment_time()) is None else now,
        )
        target = configure_target(request, root, settings)
        refuse_target_within(request, target)
        target.request = conversion_record(request, overflow, settings)
        plan = _make_plan((_places(src), src_format, about), request, target, settings, overflow, tasks, root)
        if not plan.book.exists() and (dataset_path := complete_at(target, resumes=False)) is not None:
            raise ExistsError(
                "already contains this dataset, finished. Remove it, or choose another folder.", path=dataset_path
            )
        return plan


def _places(src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...] | str:
    """The source's absolute paths, because tasks may run in other folders."""
    if isinstance(src, str | os.PathLike):
        text = os.fspath(src)
        return text if _arguments.is_url_elsewhere(text) else str(_arguments.local_path(src, "src"))
    return tuple(str(_places(part)) for part in src)


def _make_plan(
    open_arguments: OpenArguments,
    request: ConversionRequest,
    target: Target,
    settings: PlannedSettings,
    overflow: str,
    tasks: int,
    root: Path,
) -> Plan:
    record = target.request
    columns = prepare_columns(request, target, every=True)  # before the layout, which then finds the lengths cached
    layout = Layout.of(request, target)
    layout.settle(request, target)
    survey(request, target)
    if not request.kind.ragged:
        settings = replace(settings, tokens_per_example=target.tokens)
    pairs = tuple(zip(request.layers, request.names, strict=True))
    arguments = ConvertArguments(
        src=open_arguments[0],
        src_format=open_arguments[1],
        layout=open_arguments[2],
        dst=root,
        format=request.format,
        layers=None if request.layers == request.store.layers == request.names else pairs,
        examples=None if request.examples is None else packed(request.examples),
        columns=None if request.columns is None else tuple(request.columns.items()),
        tokens=request.tokens,
        pad=request.pad,
        truncate=request.truncate,
        cast=request.cast,
        overflow=overflow,
        numbers=columns.numbers,
        fillers=tuple(sorted(columns.fillers)),
        sizes=settings,
        config=target.config(),
        request=record.as_dict(),
        losses=tuple((loss.what, loss.detail) for loss in list_losses(request, target, columns)),
    )
    plan_tasks, notes = _split_tasks(request, target, layout, tasks)
    inputs = inputs_of(request.store)
    if inputs is None:
        raise ArgumentError(
            "src: a web server cannot list its files, so a plan cannot detect changes; copy them with actshard.stage, or use a "
            "bucket"
        )
    notes += [f"lost: {loss}" for loss in _losses(arguments, target)]

    size = predict(request, target, layout, settings, overflow)
    read = conversion_reads(request, plan_tasks, inputs)
    needed = _memory(request, target, columns, plan_tasks, open_arguments, inputs)
    refuse_full(root, size.bytes, size.files + 4 * len(plan_tasks))
    work = work_folder(root, identity("convert", arguments, inputs, plan_tasks), dumps=target.names_itself)
    predicted = Predicted(size.bytes, size.files, read, needed, exact=size.exact)
    return Plan("convert", json_values(arguments), inputs, tuple(plan_tasks), predicted, work, tuple(notes))


def _memory(
    request: ConversionRequest,
    target: Target,
    columns: Columns,
    tasks: Sequence[Mapping[str, Any]],
    open_arguments: OpenArguments,
    inputs: Sequence[Input],
) -> int:
    """Bytes of memory of a task's process."""
    sizes = [int(task["bytes"]) for task in tasks]
    # pyarrow imports pandas, if it is installed, to create columns of values that are not numbers.
    arrow = ["pyarrow.compute", *(["pandas"] if find_spec("pandas") else [])] if columns.names else ["pyarrow"]
    if target.writes_parquet:
        arrow.append("pyarrow.parquet")
    process_memory = process.opening(request.store, open_arguments, inputs, __name__, *arrow, write=request.format)
    largest = max(sizes)
    written = write_memory(target, largest) + int(target.copies * min(target.block_bytes, largest))
    return process_memory + converting(request.store, largest / max(sum(sizes), 1), written, inputs)


def _split_tasks(
    request: ConversionRequest, target: Target, layout: Layout, tasks: int
) -> tuple[list[dict[str, object]], list[str]]:
    """Returns the tasks, and notes about them."""
    layers, n = len(request.layers), len(layout.lengths)
    rows = layout.rows(layers) * target.row_bytes
    # If an example lacks a layer, the layer gets the length of the example's longest one, which a task with some of the layers
    # does not know.
    if target.splits == "layers" and not request.store.contents.lacks_layers:
        parts = min(tasks, layers)
        bounds = [k * layers // parts for k in range(parts + 1)]
        layer_bytes = int(rows.sum()) // layers
        plan_tasks = [{"layers": [a, b], "bytes": (b - a) * layer_bytes} for a, b in itertools.pairwise(bounds)]
        return plan_tasks, fewer(parts, tasks, f"{request.format} has one file per layer")
    divides = target.splits == "examples"
    borders = target.borders(layout.by_layer(layers)) if divides else np.zeros(1, np.int64)
    if target.blocks_are_files:
        borders = layout.firsts
    if borders is None:
        borders = np.arange(n)
    borders = np.unique(np.concatenate([[0], borders]))
    firsts = balanced(rows + _EXAMPLE_WEIGHT, borders, tasks)
    blocks = np.searchsorted(layout.firsts, firsts, "left").tolist()
    states = target.states_at(layout.by_layer(layers), firsts, blocks)
    ends = np.concatenate([[0], np.cumsum(rows)])
    plan_tasks = [
        {
            "examples": [a, b],
            "origin": int(layout.origins[k]) if target.blocks_are_files else a,
            "state": state,
            "bytes": int(ends[b] - ends[a]),
        }
        for a, b, k, state in zip(firsts, [*firsts[1:], n], blocks, states, strict=True)
    ]
    why = f"the result has {many(len(borders), 'shard')}" if divides else f"one task must write {request.format} here"
    return plan_tasks, fewer(len(plan_tasks), tasks, why)


@dataclass
class _OpenedPlan:
    """The opened source and arguments of a plan; kept for the next task of the same plan."""

    request: ConversionRequest
    columns: Columns
    overflow: str

    @classmethod
    def of(cls, plan: Planned) -> _OpenedPlan:
        with _trusting_no_plan(plan):
            return cls._of(plan)

    @classmethod
    def _of(cls, plan: Planned) -> _OpenedPlan:
        arguments = plan.arguments_as(ConvertArguments)
        src = list(arguments.src) if isinstance(arguments.src, tuple) else arguments.src
        request = check_request(
            source(src, arguments.src_format, "pread", layout=arguments.layout),
            arguments.format,
            SourceSelection(
                None if arguments.layers is None else dict(arguments.layers),
                None if arguments.examples is None else unpacked(arguments.examples),
                None if arguments.columns is None else dict(arguments.columns),
                arguments.tokens,
                arguments.pad,
                arguments.truncate,
            ),
            cast=arguments.cast,
        )
        columns = columns_for(request, _target(plan, request), arguments.numbers, arguments.fillers)
        return cls(request, columns, arguments.overflow)


@contextlib.contextmanager
def _trusting_no_plan(plan: Planned) -> Iterator[None]:
    """Raises FormatError for invalid values that only the conversion itself detects, such as an option's type."""
    try:
        yield
    except ActshardError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FormatError(
            f"field 'arguments': expected those of a conversion: {error!r:.200}", path=plan.work, code="metadata"
        ) from error


def _losses(arguments: ConvertArguments, target: Target, overflows: int = 0) -> tuple[Loss, ...]:
    """The losses that the plan recorded, and overflows. Computing them again could require reading all shards of the source."""
    recorded = [Loss(what, detail) for what, detail in arguments.losses]
    position = next((i + 1 for i, loss in enumerate(recorded) if loss.what == "dtype"), 0)
    return (*recorded[:position], *overflowed(target.dtype, overflows), *recorded[position:])


def _target(plan: Planned, request: ConversionRequest) -> Target:
    """Returns a target with the plan's settings."""
    with _trusting_no_plan(plan):
        arguments = plan.arguments_as(ConvertArguments)
        target = configure_target(request, arguments.dst, arguments.sizes)
        config = arguments.config
        check_config(config, target.config(), plan.work)
        target.adopt(config)
        target.request = Request.from_dict(plan.arguments["request"], plan.work)
    return target


class Converting(Verb[_OpenedPlan]):
    """Runs the tasks of a conversion."""

    name = "convert"
    _cached_plan: tuple[str, _OpenedPlan] | None = None

    def _open(self, plan: Planned) -> _OpenedPlan:
        if self._cached_plan is None or self._cached_plan[0] != plan.id:
            self._cached_plan = (plan.id, _OpenedPlan.of(plan))
        return self._cached_plan[1]

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that :func:`convert` does not make."""
        converting_checks.check_plan(plan, path)
        converting_checks.check_work(plan, path)

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> Mapping[str, object]:
        opened_plan, part = self._open(plan), plan.tasks[task]
        request = opened_plan.request
        if "layers" in part:
            a, b = part["layers"]
            request = replace(request, layers=request.layers[a:b], names=request.names[a:b])
            span = (0, request.count, 0)
        else:
            span = (*part["examples"], part["origin"])
        target = _target(plan, request)
        target.root = folder / FILES
        if "layers" not in part:
            target.apart = Apart(target.room)
            target.begin_at(span[0], part["state"])
        first, end, _ = span
        writer = SegmentWriter(target)
        try:
            size = copy_blocks(
                request,
                writer,
                opened_plan.columns,
                span,
                opened_plan.overflow,
                lambda position, size: tell(position - first, end - first),
            )
            writer.commit()
        except NumbersMatterError as error:
            raise FormatError(
                f"{error}; pass columns= with the column of sample numbers, and make the plan again",
                path=request.store.path,
            ) from error
        finally:
            writer.abort()
        commit = writer.last
        assert commit is not None
        lengths = write_examples(folder, commit.table)
        return {
            "examples": list(span[:2]),
            "layers": part.get("layers"),
            "state": commit.state,
            "fragments": [] if target.apart is None else target.apart.fragments(target.root),
            "overflows": commit.overflows,
            "digests": list(map(str, commit.digests)),
            "changes": writer.columns.changes,
            "bytes": size,
            **lengths,
        }

    def part(self, plan: Planned, limit: int) -> Mapping[str, object] | None:
        """The first examples of the first task; for a plan by layers, a small task."""
        first = plan.tasks[0]
        return super().part(plan, limit) if "layers" in first else shortened(first, "examples", limit)

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        position = 0
        for result in results:
            task, value = plan.tasks[result.task], result.value
            check_result(value, result.folder / RESULT)
            if value.get("examples") != task.get("examples", [0, self._open(plan).request.count]):
                raise FormatError(
                    f"task {result.task}: expected examples {task.get('examples')}, found {value.get('examples')}",
                    path=result.folder,
                )
            if "layers" not in task:
                a, b = task["examples"]
                check_lengths([result], self._open(plan).request.store.contents.lacks_layers)
                if a != position:
                    what = "a hole" if a > position else "an overlap"
                    raise FormatError(
                        f"task {result.task}: expected examples from {position:,} on, found from {a:,}: {what}",
                        path=plan.work,
                    )
                position = b
        for name, pieces in _shared_pieces(results).items():
            _check_tiling(name, pieces, plan.work)

    def commit(self, plan: Planned, results: Sequence[Result]) -> Conversion:
        began = time.perf_counter()
        opened_plan = self._open(plan)
        request = opened_plan.request
        target = _target(plan, request)
        dataset_path = target.existing(request.count) if target.names_itself else None
        if dataset_path is not None:  # renamed by a commit that was killed
            check_written(target.request, dataset_path)
        else:
            lock = locked(target.root / FOLDER)  # a writer may have begun here since the plan was made
            try:
                look(target.root).refuse("writing", "merging", is_locked=True)
                dataset_path = self._put(plan, target, results)
            finally:
                lock.path.unlink(missing_ok=True)
                remove_work_folders(target.root)
                lock.release()
        size = sum(int(result.value["bytes"]) for result in results)
        over = sum(int(result.value["overflows"]) for result in results)
        lost = _losses(plan.arguments_as(ConvertArguments), target, over)
        # The plan knows the columns of the first examples only, if the others must be decoded.
        changes = [text for result in results for text in result.value["changes"].values()]
        details = {loss.detail for loss in lost}
        lost += tuple(Loss("columns", text) for text in dict.fromkeys(changes) if text not in details)
        return Conversion(
            dataset_path,
            request.format,
            request.count,
            0,
            size,
            time.perf_counter() - began,
            lost,
            False,
            str(target.dtype),
        )

    def _put(self, plan: Planned, target: Target, results: Sequence[Result]) -> Path:
        for result in results:  # a repeated commit does not call check()
            check_result(result.value, result.folder / RESULT)
        if is_finished(target.root, target.format):
            check_written(target.request, target.root)
        range_results = results[:1] if "layers" in plan.tasks[0] else results
        tables = read_examples(range_results)
        columns, mixed = columns_in(tables)
        if mixed:
            raise ArgumentError(
                f"columns: {mixed[0]!r}: expected values of one type, found several that no type can represent exactly. Plan "
                "again, with columns= (--columns) to leave the column out.",
                path=plan.work,
            )
        make_folder(target.root)
        # First, so that a repeated commit knows the dataset as its own.
        lengths = lengths_in(tables, len(target.spec.layers))
        overflows = sum(int(result.value["overflows"]) for result in results)
        parts = [digests_of(result.value["digests"]) for result in results]
        by_layers = tuple(digest for part in parts for digest in part)
        digests = by_layers if "layers" in plan.tasks[0] else joined_digests(parts)
        target.keep_request(len(lengths), overflows, digests, ())
        shared = _shared_pieces(results)
        # Files that a killed commit has renamed are missing here.
        files = [f"{result.folder}/{FILES}" for result in results]
        sync_folders(_native.move_files(list(files), target.root, list(shared)))
        for name, pieces in shared.items():
            _join(pieces, target.root / name)
        target.restore(target.together([result.value["state"] for result in results]), lengths)
        target.n = len(lengths)
        target.finish(AllExamples(lengths, columns))
        target.keep_request(len(lengths), overflows, digests, formats.get(target.format).checked_files)
        dataset_path = target.place()
        if dataset_path != target.root:
            (target.root / FOLDER / LOCK).unlink(missing_ok=True)
            remove_work_folders(target.root)  # of saev, whose folder gets another name
            rename(target.root, dataset_path)
        sync_folders([dataset_path.parent, dataset_path])
        check_opens(dataset_path, target.format)
        return dataset_path

    def committed(self, plan: Planned) -> Conversion | None:
        request = self._open(plan).request
        target = _target(plan, request)
        dataset_path = complete_at(target, resumes=False)
        if dataset_path is None:
            return None
        record = check_written(target.request, dataset_path)
        lost = _losses(plan.arguments_as(ConvertArguments), target, record.overflows or 0)
        return Conversion(
            dataset_path, request.format, request.count, request.count, 0, 0.0, lost, False, str(target.dtype)
        )

    def after(self, plan: Planned) -> None:
        with contextlib.suppress(OSError):  # another plan or a saev writer is using it
            plan.work.parent.rmdir()


Pieces = list[tuple[int, int, Path]]
"""The pieces of one file: (first byte, end, file of the piece)."""


def _shared_pieces(results: Sequence[Result]) -> dict[str, Pieces]:
    """The pieces of each file that several tasks wrote, by the file's name."""
    pieces_by_name: dict[str, Pieces] = {}
    for result in results:
        for name, begin, end in result.value.get("fragments", ()):
            pieces_by_name.setdefault(name, []).append((begin, end, result.folder / FILES / name))
    for name, pieces in pieces_by_name.items():
        # The task that wrote the first piece did not know that other tasks continue the file, so it recorded no fragment.
        piece_files = {file for _, _, file in pieces}
        for result in results:
            file = result.folder / FILES / name
            if file not in piece_files:
                try:
                    size = file.stat().st_size
                except OSError:
                    continue
                pieces.append((0, size, file))
        pieces.sort()
    return pieces_by_name


def _check_tiling(name: str, pieces: Pieces, work: Path) -> None:
    """Raises FormatError if a file's pieces leave a hole or overlap."""
    position = 0
    for begin, end, file in pieces:
        if begin != position:
            what = "a hole" if begin > position else "an overlap"
            raise FormatError(
                f"{name}: expected bytes from {position:,} on, found a piece from {begin:,} in {file}: {what}",
                path=work,
            )
        size = file.stat().st_size if file.exists() else None
        if size != end - begin:
            raise FormatError(
                f"expected a piece of {end - begin:,} bytes, found {'no file' if size is None else f'{size:,}'}. Remove the "
                "task's folder, and run the task again.",
                path=file,
            )
        position = end


def _join(pieces: Pieces, into: Path) -> None:
    """Copies pieces into one file, which gets its name when it is complete."""
    size = pieces[-1][1]
    if into.exists() and into.stat().st_size >= size:
        return
    make_folder(into.parent)
    temporary = into.with_name(f".{into.name}.joining")
    try:
        temporary.unlink(missing_ok=True)
    except OSError as error:
        raise from_os(error, temporary, "remove") from error
    for begin, end, file in pieces:
        _native.copy_range(file, 0, end - begin, temporary, begin)
    _native.sync_files([temporary])
    rename(temporary, into)
    sync_folders([into.parent])
