"""Converting: blocks of examples read by all threads, while the block before is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import actshard._native as _native
from actshard import _arguments, formats
from actshard.converting.columns import Columns, NumbersMatterError
from actshard.converting.planning import (
    OVERFLOW,
    Asked,
    Loss,
    ask,
    checked,
    columns_for,
    fitted,
    losses,
    settle,
    source,
)
from actshard.errors import ArgumentError, DtypeError, ExistsError, FormatError, boundary
from actshard.formats.target import LOGITS, PATCH_LABELS, ROUTER, TEXTS, Block, Target
from actshard.opening import open_quietly
from actshard.store import Store
from actshard.writing.existing import check_same, complete_at
from actshard.writing.given import convert as to_type
from actshard.writing.sink import Sink

_AT_ONCE = 8192
"""Examples asked for their lengths at once."""
_COMPARED = 66
"""Examples of a finished dataset that are compared with the source, first and last among them, before it is taken for its copy."""
BlockProgress = Callable[[int, int, int], object]
"""Told examples done, examples in all, and bytes of rows done."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        path: the dataset that was made.
        format: its format.
        examples: how many it has.
        resumed_at: examples that were there already.
        bytes: of rows written now.
        seconds: it took.
        losses: what the result does not have.
        verified: whether every row was compared with the source afterwards.
        dtype: that of the result's rows; None where the result holds no rows.
    """

    path: Path
    format: str
    examples: int
    resumed_at: int
    bytes: int
    seconds: float
    losses: tuple[Loss, ...]
    verified: bool
    dtype: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        made = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return made | {"path": str(self.path), "losses": [x.as_dict() for x in self.losses]}


def convert(
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Store,
    dst: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[int] | Mapping[int, int] | None = None,
    examples: ArrayLike | slice | None = None,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    tokens: str = "all",
    dtype: DTypeLike | None = None,
    pad: bool = False,
    truncate: bool = False,
    tokens_per_example: int | None = None,
    shard_bytes: int | str | None = None,
    metadata: Mapping[str, Any] | None = None,
    src_format: str | None = None,
    resume: bool = False,
    exist_ok: bool = False,
    verify: bool = False,
    overflow: str = "refuse",
    progress: BlockProgress | None = None,
    **options: Any,
) -> Conversion:
    """Writes a dataset again in another format, or in the same with other contents.

    Rows, texts, labels and whatever else the target has a place for go along; what it has none for is in ``losses``, which
    ``actshard convert --dry-run`` shows before. Memory stays bounded whatever the size: a few blocks of rows, and one shard where
    the source has to be decoded. Interrupted or killed, the same call with ``resume=True`` goes on after what was safe.

    Args:
        src: a dataset as :func:`actshard.open` takes it, or a store.
        dst: the folder to make; for saev the folder of dumps, in which the dataset is ``<HASH>``.
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"`` or ``"pickle"``.
        layers: names to take, in this order; a mapping renames them: ``{-1: 23}``. None: all.
        examples: integers, a slice or a bool per example: those to take, in this order. None: all.
        columns: names of columns to take, in this order; a mapping renames them: ``{"label": "verb"}``. None: all. Logits, router
            tensors and patch labels that are no columns always go along.
        tokens: ``"all"``, ``"content"`` (without CLS) or ``"last"``.
        dtype: the type to store. None keeps it, and a format that cannot hold it refuses.
        pad: fill shorter examples up with zeros for a format that has as many tokens of each.
        truncate: cut longer ones.
        tokens_per_example: to how many; None: as many as the longest has if ``pad``, else as the shortest has.
        shard_bytes: about how large shards are.
        metadata: added to what the source says of itself; see :func:`actshard.create`.
        src_format: as ``format`` of :func:`actshard.open`.
        resume: continue a conversion that was interrupted; also where none was begun.
        exist_ok: if the result is there already, finished, leave it. It is compared with the source, as with ``resume``: the
            layers, the type, the number of examples, and the rows of up to 66 examples, first and last among them; what differs
            raises ExistsError. ``verify`` compares all.
        verify: compare every row of the result with the source afterwards.
        overflow: ``"refuse"`` raises where a finite value is too large for ``dtype``; ``"allow"`` stores it as infinity and counts
            it in ``losses``.
        progress: called with (examples done, examples in all, bytes done) after every block.
        options: the target format's own; see :func:`actshard.create`.

    Returns:
        A :class:`Conversion`.

    Raises:
        What :func:`actshard.open` and :func:`actshard.create` raise; ArgumentError for what the target cannot hold, with what to
        do about it.
        FormatError: ``verify`` found a row that differs.
    """
    began = time.perf_counter()
    if not _arguments.is_one_of(overflow, OVERFLOW):
        raise ArgumentError(f"overflow: expected {' or '.join(map(repr, OVERFLOW))}, found {overflow!r}")
    resume, exist_ok = _arguments.switch(resume, "resume"), _arguments.switch(exist_ok, "exist_ok")
    verify = _arguments.switch(verify, "verify")
    root = _arguments.local_path(dst, "dst")
    with boundary(root, "convert"):
        store = source(src, src_format, "pread")
        asked = replace(
            ask(
                store,
                format,
                layers=layers,
                examples=examples,
                columns=columns,
                tokens=tokens,
                pad=pad,
                truncate=truncate,
            ),
            cast=dtype is not None,
        )

        given = {"dtype": dtype, "tokens_per_example": tokens_per_example, "shard_bytes": shard_bytes}
        settled = partial(_settled, asked, root, metadata=metadata, options=options, **given)
        target = settled()
        if store.contents.counts_are_cheap and target.tokens is not None:
            # Before the first row is written, not at the one that does not fit.
            fitted(asked, target, asked.chosen(asked.stored), 0)
        lost = 0
        there = complete_at(target)
        if there is not None:
            if not (exist_ok or resume):
                raise ExistsError("holds this dataset already, finished; exist_ok=True takes it as it is", path=there)
            path, size = there, 0
            known, begun = _as_it_is(asked, target, there, verify)
        else:
            known = checked(asked, target)
            try:
                path, begun, size, lost = _write(asked, target, known, resume, progress, overflow)
            except NumbersMatterError:
                # The list of shards says that samples are numbered by their order, and they are not.
                target = settled()
                known = checked(asked, target, numbers=True)
                path, begun, size, lost = _write(asked, target, known, False, progress, overflow)
        if verify:
            lost = compare(asked, target, path)
        # Now that every shard was looked into, lengths cost nothing.
        told = tuple(losses(asked, target, known, lost))
    dtype = None if target.dtype is None else str(target.dtype)
    return Conversion(path, format, asked.count, begun, size, time.perf_counter() - began, told, verify, dtype)


def _settled(asked: Asked, root: Path, **given: Any) -> Target:
    target = settle(asked, root, **given)
    if target.tokens is not None:
        target.content_lengths = partial(_content_lengths, asked)
    return target


def _as_it_is(asked: Asked, target: Target, there: Path, verify: bool) -> tuple[Columns, int]:
    """The columns and examples of a finished dataset, which has to be what is asked for; ``verify`` compares its rows later."""
    known = columns_for(asked, target)
    count = check_same(target, there)
    if not verify:
        _refuse_other(asked, target, there)
    _refuse_other_columns(asked, target, there, known)
    return known, count


def _content_lengths(asked: Asked) -> NDArray[np.int64]:
    """Tokens of each example that are the source's own, not rows that fill it up, here or there."""
    taken = asked.chosen(asked.stored)
    lengths = asked.store.content_lengths
    if lengths is None or asked.tokens == "last":
        return taken
    special = asked.store.special_tokens if asked.tokens == "all" else 0
    return np.minimum(taken, special + lengths[asked.ids(0, asked.count)])


def _write(
    asked: Asked, target: Target, columns: Columns, resume: bool, progress: BlockProgress | None, overflow: str
) -> tuple[Path, int, int, int]:
    """Writes what is missing: the dataset, examples that were there, bytes, and values that overflowed."""
    sink = Sink(target, resume=resume)
    begun = sink.committed
    lost = 0
    try:
        if begun and overflow == "allow":
            lost = overflows(asked, target, begun)
        done = begun
        size = 0
        for ids, counts, unit in blocks(asked, target, begun):
            lengths = lengths_of(target, counts)
            rows = int(np.maximum(lengths, 0).sum())
            table = columns.of(ids, unit, target)
            memory = sink.memory(rows)
            over: list[int] = []
            read(asked, ids, counts, lengths, memory, over)
            if sum(over) and overflow == "refuse":
                raise overflowed(asked, target, sum(over), f" of examples {done} to {done + len(ids) - 1}")
            lost += sum(over)
            sink.put(Block(memory, lengths, table))
            done += len(ids)
            size += rows * target.row_bytes
            del memory
            if progress is not None:
                progress(done, asked.count, size)
        return sink.finish(), begun, size, lost
    except (ArgumentError, DtypeError, NumbersMatterError) as error:
        if begun:
            sink.abort()
            if isinstance(error, NumbersMatterError):
                raise FormatError(str(error), path=asked.store.path) from error
        else:
            sink.discard()  # what is refused leaves nothing behind that another call would stumble over
        raise
    except BaseException:
        sink.abort()
        raise


def overflowed(asked: Asked, target: Target, count: int, where: str = "") -> DtypeError:
    """The error for values that the result's type cannot hold."""
    wider = "bfloat16 (where the format holds it) or float32" if str(target.dtype) == "float16" else "a wider one"
    return DtypeError(
        f"dtype: {count:,} finite {asked.store.dtype} values{where} are too large for {target.dtype} and would become infinite: "
        f"store {wider}, or overflow='allow' (-o overflow=allow) lets them",
        path=asked.store.path,
    )


def overflows(asked: Asked, target: Target, stop: int) -> int:
    """How many values of the first examples become infinite as the result's type."""
    if target.dtype is None or target.dtype == asked.store.dtype:
        return 0
    lost: list[int] = []
    at = 0
    for ids, counts, _ in blocks(asked, target, 0, 16 << 20):
        if at >= stop:
            break
        part = slice(0, stop - at)
        lengths = lengths_of(target, counts[part])
        memory = np.empty((int(np.maximum(lengths, 0).sum()), target.spec.d_model), target.dtype)
        read(asked, ids[part], counts[part], lengths, memory, lost)
        at += len(ids)
    return sum(lost)


def blocks(
    asked: Asked, target: Target, begin: int, block_bytes: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int | None]]:
    """Examples of the source, a block of memory at a time: their numbers, tokens taken by layer, and the unit they are of."""
    store, rows = asked.store, asked.store.rows
    groups = asked.groups
    most = max(1, (block_bytes or target.block_bytes) // target.row_bytes)
    units = store.contents.units
    alike = not store.contents.layers_differ
    at = begin
    while at < asked.count:
        ids = asked.ids(at, min(at + _AT_ONCE, asked.count))
        unit = None
        if units is not None:
            unit = int(np.searchsorted(units, ids[0], "right")) - 1
            inside = (ids >= units[unit]) & (ids < units[unit + 1])
            ids = ids[: int(np.argmin(inside)) if not inside.all() else len(ids)]
        if alike:
            raw = asked.own(rows.tokens_of(int(groups[0]), np.ascontiguousarray(ids)), ids)
            counts = np.repeat(asked.chosen(raw)[:, None], len(groups), axis=1)
        else:
            each = rows.tokens_of(np.tile(groups, len(ids)), np.repeat(ids, len(groups)))
            counts = asked.chosen(each.reshape(len(ids), len(groups)))
            counts = _lacking(asked, ids, counts)
            if not target.holds_partial_layers and (counts < 0).any() and not asked.pad:
                example, layer = (int(x[0]) for x in np.nonzero(counts < 0))
                raise ArgumentError(
                    f"example {at + example} has no layer {asked.layers[layer]}, {target.format} keeps all layers of each: "
                    "choose layers= or examples= that are there, or pad=True (--pad) fills it with zeros"
                )
        if target.tokens is not None:
            fitted(asked, target, counts[:, 0], at)
        ends = np.cumsum(np.maximum(lengths_of(target, counts), 0).sum(axis=1))
        first, before = 0, 0
        while first < len(ids):
            last = max(first + 1, int(np.searchsorted(ends, before + most, "right")))
            yield ids[first:last], counts[first:last], unit
            first, before = last, int(ends[last - 1])
        at += len(ids)


def _lacking(asked: Asked, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """-1 for layers that a sample does not have, which is not the same as no tokens."""
    if (counts > 0).all():
        return counts
    contents = asked.store.contents
    assert contents.units is not None
    assert contents.unit_columns is not None
    unit = int(np.searchsorted(contents.units, ids[0], "right")) - 1
    held = contents.unit_columns(unit)["layers"].to_pylist()
    counts = counts.copy()
    for row, example in zip(counts, ids.tolist(), strict=True):
        of_it = held[example - contents.units[unit]]
        row[[layer not in of_it for layer in asked.layers]] = -1
    return counts


def read(
    asked: Asked,
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    memory: NDArray[Any],
    lost: list[int] | None = None,
) -> None:
    """Fills memory: of each example and layer the tokens taken, cut or filled up with zeros to ``lengths``.

    ``lost`` gets counts of finite values that became infinite.
    """
    store, rows = asked.store, asked.store.rows
    layers = len(asked.layers)
    held = counts.reshape(-1) >= 0
    groups, examples = np.tile(asked.groups, len(ids))[held], np.repeat(ids, layers)[held]
    taken, want = counts.reshape(-1)[held], np.maximum(lengths.reshape(-1), 0)
    dtype = memory.dtype if asked.cast or memory.dtype != store.dtype else None
    if asked.tokens == "last" and held.all() and (taken == 1).all() and (want == 1).all():
        out = memory.reshape(len(ids), layers, store.d_model)
        own = store.content_lengths
        token = None if own is None else store.special_tokens + own[ids] - 1
        for k, group in enumerate(asked.groups.tolist()):
            out[:, k] = rows.gather(group, np.ascontiguousarray(ids), token, None, dtype, lost)
        return
    whole = rows.tokens_of(groups, examples)
    into = (np.cumsum(want) - want)[held]
    if (whole == taken).all() and int(taken.sum()) == len(memory) and (taken == want[held]).all():
        rows.gather_whole(groups, examples, memory, dtype, lost)
        return
    # Overflows are counted of the tokens that are taken, so the others may not be cast with them.
    exact = np.float64 if asked.cast and store.contents.types_may_differ else None
    every = rows.gather_whole(groups, examples, None, exact if lost is not None else dtype)
    keep = np.minimum(taken, want[held])
    start = np.cumsum(whole) - whole + asked.skipped(asked.own(whole, examples))
    within = np.arange(int(keep.sum())) - np.repeat(np.cumsum(keep) - keep, keep)
    memory[:] = 0
    taken_rows = every[np.repeat(start, keep) + within]
    if lost is not None and taken_rows.dtype != memory.dtype:
        lost.append(_native.count_overflows(taken_rows, memory.dtype))
        cast = np.empty(taken_rows.shape, memory.dtype)
        to_type(taken_rows, cast, memory.dtype)
        taken_rows = cast
    memory[np.repeat(into, keep) + within] = taken_rows


def lengths_of(target: Target, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens that the result has, of examples that have so many; a layer that an example lacks is as long as its others."""
    if target.tokens is not None:
        return np.full_like(counts, target.tokens)
    if not target.holds_partial_layers and (counts < 0).any():
        return np.where(counts < 0, counts.max(axis=1, keepdims=True), counts)
    return counts


def _refuse_other(asked: Asked, target: Target, path: Path) -> None:
    """Raises ExistsError if a finished dataset is not what this conversion would make, as far as some of its examples tell."""
    last = asked.count - 1
    some = np.unique(np.linspace(0, last, min(asked.count, _COMPARED)).astype(np.int64))
    said, _ = _difference(asked, target, path, some)
    if said is not None:
        raise ExistsError(
            f"holds another dataset than this conversion makes: {said}; choose another folder, or remove this one",
            path=path,
        )


def _refuse_other_columns(asked: Asked, target: Target, path: Path, columns: Columns) -> None:
    """Raises ExistsError if a finished dataset has other columns than those that are asked for by name."""
    if asked.columns is None or not target.holds_columns:
        return
    result = open_quietly(path, target.format, "pread", "160MiB").contents
    own = formats.get(target.format).carrying()
    found = {name for name in own.names(result) if not name.startswith(ROUTER)}
    # Formats call texts by names of their own, and have columns that hold nothing.
    alike = {*TEXTS, PATCH_LABELS, *LOGITS, own.number_column, *own.fillers(result)}
    alike |= {asked.columns[name] for name in columns.carrying.fillers(asked.store.contents) if name in asked.columns}
    wanted = {asked.columns[name] for name in columns.names}
    lacking, surplus = sorted(wanted - found - alike), sorted(found - wanted - alike)
    if lacking or surplus:
        said = f"it has no column {lacking[0]!r}" if lacking else f"it has a column {surplus[0]!r}"
        raise ExistsError(
            f"holds another dataset than this conversion makes: {said}; choose another folder, or remove this one",
            path=path,
        )


def compare(asked: Asked, target: Target, path: Path) -> int:
    """Compares every row of a result with its source, as the result's type: how many finite values are infinite there.

    Raises:
        FormatError: a row differs; the message names it.
    """
    said, lost = _difference(asked, target, path, np.arange(asked.count))
    if said is not None:
        raise FormatError(said, path=path)
    return lost


def _difference(asked: Asked, target: Target, path: Path, some: NDArray[np.int64]) -> tuple[str | None, int]:
    """How a result differs from its source in some examples, None if it does not; and values that are infinite there."""
    result = open_quietly(path, target.format, "pread", "160MiB")
    if result.num_examples != asked.count:
        return f"expected {asked.count} examples, found {result.num_examples}", 0
    if result.dtype != target.dtype:
        return f"expected {target.dtype}, found {result.dtype}", 0
    if len(some) < asked.count:
        ids = some if asked.examples is None else asked.examples[some]
        asked = replace(asked, examples=ids)
    again = ask(result, target.format, layers=asked.names, examples=None, tokens="all", pad=False, truncate=False)
    at = 0
    lost: list[int] = []
    for ids, counts, _ in blocks(asked, target, 0, 16 << 20):
        lengths = lengths_of(target, counts)
        rows = int(np.maximum(lengths, 0).sum())
        wanted = np.empty((rows, target.spec.d_model), target.dtype)
        read(asked, ids, counts, lengths, wanted, lost)
        places = some[at : at + len(ids)]
        held = lengths.reshape(-1) >= 0
        groups, examples = np.tile(again.groups, len(ids))[held], np.repeat(places, len(asked.layers))[held]
        lengths = lengths.reshape(-1)[held]
        has = result.rows.tokens_of(groups, examples)
        if (has != np.maximum(lengths, 0).reshape(-1)).any():
            bad = int(np.flatnonzero(has != np.maximum(lengths, 0).reshape(-1))[0])
            wanted_tokens = int(lengths.reshape(-1)[bad])
            return f"example {int(examples[bad])}: expected {wanted_tokens} tokens, found {int(has[bad])}", 0
        found = result.rows.gather_whole(groups, examples, None, target.dtype)
        size = target.spec.d_model * wanted.dtype.itemsize
        same = wanted.view(np.uint8).reshape(rows, size) == found.view(np.uint8).reshape(rows, size)
        if not same.all():
            row = int(np.flatnonzero(~same.all(axis=1))[0])
            pair = int(np.searchsorted(np.cumsum(has), row, "right"))
            said = (
                f"example {int(examples[pair])}, layer {asked.names[int(np.flatnonzero(held)[pair]) % len(asked.layers)]}, token "
                f"{row - int(np.cumsum(has)[pair] - has[pair])}: differs from its source in {store_name(asked.store)}"
            )
            return said, 0
        at += len(ids)
    return None, sum(lost)


def store_name(store: Store) -> str:
    """A store in a message."""
    return f"{store.path} ({store.format})"
