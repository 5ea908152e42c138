"""``actshard.create``: a dataset made by appending examples."""

from __future__ import annotations

import contextlib
import decimal
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard import _arguments, _native
from actshard._arguments import name_of
from actshard.errors import ArgumentError, ClosedError, DtypeError, ExistsError
from actshard.writing.sink import Sink
from actshard.writing.target import LOGITS, PATCH_LABELS, ROUTER, Block, Spec, Target, list_column, refuse_existing
from actshard.writing.work import FOLDER, PARTS, Journal

if TYPE_CHECKING:
    import pyarrow as pa


class Writer:
    """A dataset while it is made; see :func:`actshard.create`.

    Not for several threads at once, nor for a forked child: each process makes a part of its own.

    Attributes:
        format: as asked for.
        path: of the dataset. saev's own name, a hash, is known when the dataset is finished; until then the folder it is
            written in.
        complete: whether the dataset is finished; True at once if it was there already (``exist_ok``).
    """

    def __init__(self, target: Target, *, resume: bool, exist_ok: bool, pad: bool, truncate: bool) -> None:
        self.format = target.format
        self._target = target
        self._pad, self._truncate = pad, truncate
        self._exist_ok = exist_ok or resume
        self.complete = False
        self._stage: NDArray[Any] | None = None
        self._filled = 0
        self._lengths: list[NDArray[np.int64]] = []
        self._columns: list[pa.Table] = []
        self._names: tuple[str, ...] | None = None
        self._appended = 0
        self._sink: Sink | None = None
        found = complete_at(target)
        if found is None and resume and not Journal(target.root).exists():
            found = target.alike()
        if found is not None:
            if not self._exist_ok:
                raise ExistsError("holds this dataset already, finished; exist_ok=True takes it as it is", path=found)
            self.path = found
            self.complete = True
            self._appended = check_same(target, found)
            return
        self.path = target.root
        self._sink = Sink(target, resume=resume)
        self._appended = self._sink.committed
        if self._sink.journal.closing:
            # Killed while it was finished: shards have their last form, and there is nothing to append to.
            self.path = self._sink.finish()
            self.complete = True
            self._sink = None

    def __repr__(self) -> str:
        state = "complete" if self.complete else f"{self._appended} examples appended, {self.committed} committed"
        return f"<actshard.Writer {self.format} {str(self.path)!r}: {state}>"

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __len__(self) -> int:
        return self._appended

    @property
    def committed(self) -> int:
        """Examples that are safe: they survive a kill and a power cut, and a resumed writer goes on after them.

        Counted when a commit is done: after about a GiB of rows, at :meth:`flush` and at the end.
        """
        return self._sink.committed if self._sink is not None else self._appended

    def append(
        self,
        activations: Any,
        *,
        lengths: ArrayLike | None = None,
        columns: Mapping[str, Any] | pa.Table | None = None,
        labels: ArrayLike | None = None,
        logits: tuple[ArrayLike, ArrayLike] | None = None,
        router: Mapping[int, ArrayLike] | None = None,
    ) -> None:
        """Adds examples.

        Args:
            activations: ``(batch, n_layers, tokens, d_model)``; ``(batch, n_layers, d_model)`` for one row per example; or a list
                of ``(n_layers, tokens_i, d_model)``. numpy arrays or torch tensors, on any device (copied from it once).
            lengths: ``(batch,)``: tokens that count, from the first, where a batch is padded on the right.
            columns: per example, ``batch`` values each: texts, labels, ids. Names are the format's; the same for every call.
            labels: saev's patch labels, ``(batch, content tokens)`` uint8. Other formats keep them as a column.
            logits: top-k values and token indices, ``(batch, k)`` each (lmprobe). Other formats keep them as columns.
            router: router logits by layer, ``(batch, experts)`` each (lmprobe). Other formats keep them as columns.

        Raises:
            ArgumentError: shapes that do not fit each other, the layers or ``d_model``; examples that the format cannot hold as
                they are, with what to do (``pad=True``, ``truncate=True``, another ``storage=``).
            DtypeError: another type than before, and none was asked for; a type that the format cannot hold.
            DiskFullError, FileAccessError: of this call or, as files are written in the background, of one before.
            ClosedError: the writer was closed.
        """
        sink = self._open()
        examples = _Examples(activations, lengths, len(self._target.spec.layers), self._target.spec.d_model)
        if len(examples) == 0:
            return
        table = _table_of(columns, labels, logits, router, len(examples))
        names = () if table is None else tuple(sorted(table.column_names))
        if self._names is None:
            self._names = names
        if names != self._names:
            raise ArgumentError(f"columns: expected {list(self._names)}, as before, found {list(names)}")
        target = self._target
        tokens = examples.tokens
        # Checked before anything is kept, so that a refused call leaves the writer as it was.
        if not target.ragged or target.tokens is not None:
            target.take_tokens(
                int(tokens.max()) if self._pad else int(tokens.min()) if self._truncate else int(tokens[0])
            )
            tokens = self._fitted(tokens)
        else:
            target.take_tokens(int(tokens[0]) if examples.one_row else max(int(tokens.max()), 2))
            if target.tokens is not None:
                tokens = self._fitted(tokens)
        dtype = target.take_dtype(examples.dtype)
        layers = len(target.spec.layers)
        done = 0
        while done < len(examples):
            if self._stage is None:
                rows = max(target.block_bytes // target.row_bytes, int(tokens[done]) * layers)
                self._stage = sink.memory(rows)
                self._filled = 0
            room = len(self._stage) - self._filled
            count = int(np.searchsorted(np.cumsum(tokens[done:] * layers), room, "right"))
            if count == 0:
                if self._filled or self._lengths:
                    self._hand_over()
                else:
                    self._stage = sink.memory(int(tokens[done]) * layers)
                continue
            part = slice(done, done + count)
            rows = int(tokens[part].sum()) * layers
            examples.copy(part, tokens[part], self._stage[self._filled : self._filled + rows], dtype)
            self._filled += rows
            self._lengths.append(np.broadcast_to(tokens[part, None], (count, layers)))
            if table is not None:
                self._columns.append(table.slice(done, count))
            done += count
            self._appended += count

    def _fitted(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens as the format will have them: all alike."""
        wanted = self._target.tokens
        assert wanted is not None
        for bad, allowed, what in (
            (tokens < wanted, self._pad, "pad=True to create() fills shorter ones up with zeros"),
            (
                tokens > wanted,
                self._truncate,
                "truncate=True to create() cuts longer ones, tokens_per_example= with pad=True makes room for them",
            ),
        ):
            if bad.any() and not allowed:
                i = int(np.flatnonzero(bad)[0])
                pooled = "" if self.format != "lmprobe" else "storage='full_sequence' keeps all, or "
                raise ArgumentError(
                    f"example {self._appended + i} has {tokens[i]} tokens where {self.format} has {wanted} of every example here: "
                    f"{pooled}{what}"
                )
        return np.full_like(tokens, wanted)

    def _hand_over(self) -> None:
        """What was filled goes to the writing thread."""
        if self._stage is None or not self._lengths:
            return
        import pyarrow as pa

        assert self._sink is not None
        columns = pa.concat_tables(self._columns, promote_options="permissive") if self._columns else None
        block = Block(self._stage[: self._filled], np.concatenate(self._lengths).astype(np.int64), columns)
        self._stage, self._lengths, self._columns, self._filled = None, [], [], 0
        self._sink.put(block)

    def flush(self) -> int:
        """Waits until everything appended is committed: the number of examples that are safe.

        Pickle shards end at a flush; other formats go on where they were.
        """
        sink = self._open()
        self._hand_over()
        return sink.commit()

    def close(self) -> None:
        """Commits and finishes: the files get their names, and the manifest is written. Twice does no harm.

        Raises:
            ArgumentError: nothing was appended, or other than ``num_examples``.
            ExistsError: the same dataset was finished by somebody else meanwhile; ours is kept, unfinished.
        """
        if self.complete or self._sink is None:
            return
        sink = self._open()
        self._hand_over()
        sink.commit()
        found = self._target.existing(sink.committed) if sink.committed else None
        if found is not None:
            if not self._exist_ok:
                sink.abort()
                raise ExistsError("holds this dataset already, finished; exist_ok=True takes it as it is", path=found)
            sink.discard()
            self.path = found
        else:
            self.path = sink.finish()
        self.complete = True
        self._sink = None

    def abort(self) -> None:
        """Stops without finishing. What was appended is committed if it can be; ``create(..., resume=True)`` goes on after it."""
        if self._sink is None:
            return
        sink = self._sink
        # The error that brought us here is the one to be seen; what the journal counts is safe.
        with contextlib.suppress(Exception):
            self._hand_over()
            sink.commit()
        self._appended = sink.committed
        self._sink = None
        sink.abort()

    def _open(self) -> Sink:
        if self._sink is None:
            why = "the dataset is complete" if self.complete else "the writer was closed"
            raise ClosedError(why, path=self.path)
        return self._sink

    def __del__(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None and not sys.is_finalizing():
            sink.abort()


def complete_at(target: Target) -> Path | None:
    """The finished dataset, if that is what is there. What else is there is refused."""
    found = target.existing(None)
    if found is not None or target.names_itself:
        return found
    journal = Journal(target.root)
    if journal.exists():
        return None  # begun, or finished but for its name: the sink knows
    if _looks_finished(target):
        return target.root
    refuse_existing(target.root)
    return None


def check_same(target: Target, path: Path) -> int:
    """How many examples a finished dataset has; ExistsError if it is none such as the target would make."""
    from actshard.opening import open_quietly

    store = open_quietly(path, target.format, "auto")
    wanted = {
        "layers": list(target.spec.layers),
        "d_model": target.spec.d_model,
        "dtype": None if target.dtype is None else str(target.dtype),
        "num_examples": target.spec.num_examples,
    }
    found = {
        "layers": list(store.layers),
        "d_model": store.d_model,
        "dtype": str(store.dtype),
        "num_examples": store.num_examples,
    }
    for name, value in wanted.items():
        if value is not None and value != found[name]:
            raise ExistsError(f"holds another dataset: its {name} {found[name]}, asked for was {value}", path=path)
    return store.num_examples


class _Examples:
    """What append() was given, whatever it was."""

    def __init__(self, given: Any, lengths: ArrayLike | None, layers: int, d_model: int) -> None:
        self.dense: NDArray[Any] | None = None
        self.items: list[NDArray[Any]] = []
        self.one_row = False
        expected = f"(batch, {layers}, tokens, {d_model}), (batch, {layers}, {d_model}), or a list of ({layers}, tokens, {d_model})"
        if isinstance(given, list | tuple):
            self.items = [as_numpy(x) for x in given]
            self.one_row = bool(self.items) and all(x.ndim == 2 for x in self.items)
            self.items = [x[:, None, :] if x.ndim == 2 else x for x in self.items]
            for i, x in enumerate(self.items):
                if x.ndim != 3 or x.shape[0] != layers or x.shape[2] != d_model:
                    raise ArgumentError(f"activations: expected {expected}, found {x.shape} at {i}")
                if x.dtype != self.items[0].dtype:
                    raise DtypeError(
                        f"activations: expected one type, found {self.items[0].dtype} and {x.dtype} at {i}"
                    )
            if lengths is not None:
                raise ArgumentError("lengths: of a list the arrays tell; lengths= is for padded batches")
            self.tokens = np.array([x.shape[1] for x in self.items], np.int64)
            self.dtype = self.items[0].dtype if self.items else np.dtype(np.float32)
            return
        dense = as_numpy(given)
        self.one_row = dense.ndim == 3
        dense = dense[:, :, None, :] if dense.ndim == 3 else dense
        if dense.ndim != 4 or dense.shape[1] != layers or dense.shape[3] != d_model:
            raise ArgumentError(f"activations: expected {expected}, found {as_numpy(given).shape}")
        self.dense, self.dtype = dense, dense.dtype
        self.tokens = np.full(len(dense), dense.shape[2], np.int64)
        if lengths is not None:
            self.tokens, shape = _arguments.index(
                as_numpy(lengths) if not isinstance(lengths, list | tuple) else lengths, "lengths"
            )
            if shape != [len(dense)] or (
                len(dense) and not 0 <= self.tokens.min() <= self.tokens.max() <= dense.shape[2]
            ):
                raise ArgumentError(
                    f"lengths: expected {len(dense)} integers of 0 to {dense.shape[2]}, found {lengths!r:.80}"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self, part: slice, tokens: NDArray[np.int64], out: NDArray[Any], dtype: np.dtype[Any]) -> None:
        """Copies examples, cut or filled up with zeros to so many tokens, one after the other."""
        if self.dense is not None and (tokens == self.dense.shape[2]).all() and (self.tokens[part] == tokens).all():
            convert(self.dense[part], out, dtype)
            return
        at = 0
        for i, want in zip(range(part.start, part.stop), tokens.tolist(), strict=True):
            array = self.items[i] if self.dense is None else self.dense[i]
            has = min(int(self.tokens[i]), want)
            layers = array.shape[0]
            place = out[at : at + layers * want].reshape(layers, want, out.shape[1])
            if has == want:
                convert(array[:, :has], place, dtype)
            else:
                place[:, has:] = 0
                place[:, :has] = array[:, :has]
            at += layers * want


def convert(source: NDArray[Any], out: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Copies an array into C-contiguous memory of another type."""
    contiguous = np.ascontiguousarray(source)
    if contiguous.nbytes < 1 << 16 and contiguous.dtype == dtype:
        out.reshape(-1)[:] = contiguous.reshape(-1)
        return
    raw = contiguous.reshape(-1).view(np.uint8)
    _native.cast_into(raw, name_of(contiguous.dtype), out.reshape(-1), name_of(dtype))


def as_numpy(value: Any) -> NDArray[Any]:
    """An array's or a tensor's numbers as numpy: bfloat16 too, from any device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().to("cpu")
        if tensor.dtype == torch.bfloat16:
            bits: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
            return bits.view(_arguments.NUMPY_BY_NAME["BF16"])
        plain: NDArray[Any] = tensor.numpy()
        return plain
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"expected an array or a tensor, found {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "biuf" and array.dtype not in _arguments.NUMPY_BY_NAME.values():
        raise ArgumentError(f"expected an array of numbers, found {array.dtype} from {type(value).__name__}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _table_of(
    columns: Mapping[str, Any] | pa.Table | None,
    labels: ArrayLike | None,
    logits: tuple[ArrayLike, ArrayLike] | None,
    router: Mapping[int, ArrayLike] | None,
    n: int,
) -> pa.Table | None:
    """Everything per example as one table."""
    import pyarrow as pa

    fields: list[pa.Field] = []
    values: list[Any] = []
    given = {} if columns is None else columns
    names = given.column_names if isinstance(given, pa.Table) else list(given)
    for name in names:
        column = given[name]
        if not isinstance(column, pa.Array | pa.ChunkedArray):
            column = as_numpy(column) if hasattr(column, "__array__") and not isinstance(column, np.ndarray) else column
            if isinstance(column, np.ndarray) and column.ndim == 2 and column.dtype.kind in "biuf":
                field, column = list_column(str(name), column)
                fields.append(field)
                values.append(_of(name, column, n))
                continue
            if isinstance(column, list | tuple) and any(
                type(v) is int and not -(1 << 63) <= v < 1 << 63 for v in column
            ):
                column = [v if v is None else decimal.Decimal(v) for v in column]  # beyond 64 bits
            try:
                column = pa.array(column.tolist() if isinstance(column, np.ndarray) and column.ndim > 2 else column)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise ArgumentError(f"columns: {name!r}: expected {n} values of one type: {error}") from error
        fields.append(pa.field(str(name), column.type))
        values.append(_of(name, column, n))
    arrays: dict[str, Any] = {}
    if labels is not None:
        arrays[PATCH_LABELS] = as_numpy(labels)
        if arrays[PATCH_LABELS].dtype != np.uint8:
            raise DtypeError(f"labels: expected uint8, found {arrays[PATCH_LABELS].dtype}")
    if logits is not None:
        arrays |= dict(zip(LOGITS, (as_numpy(a) for a in logits), strict=True))
    for layer, of_layer in (router or {}).items():
        arrays[f"{ROUTER}{int(layer)}"] = as_numpy(of_layer)
    for name, array in arrays.items():
        if array.ndim != 2 or len(array) != n or array.shape[1] == 0:
            raise ArgumentError(f"{name}: expected ({n}, k) numbers, found {array.shape}")
        if name in names:
            raise ArgumentError(f"columns: {name!r} is given twice")
        field, column = list_column(name, array)
        fields.append(field)
        values.append(column)
    return pa.Table.from_arrays(values, schema=pa.schema(fields)) if fields else None


def _of(name: Any, column: Any, n: int) -> Any:
    if len(column) != n:
        raise ArgumentError(f"columns: {name!r}: expected {n} values, one per example, found {len(column)}")
    return column


def _looks_finished(target: Target) -> bool:
    """Whether a dataset of this format is in the folder."""
    from actshard import formats

    root = target.root
    if not root.is_dir() or not any(p.name != FOLDER for p in root.iterdir()):
        return False
    return bool(formats.load(target.format).detect(root).matches)


def targets() -> dict[str, Callable[[Spec], Target]]:
    """What can be written."""
    from actshard.writing.lmprobe import LmprobeTarget
    from actshard.writing.pickle import PickleTarget
    from actshard.writing.saev import SaevTarget
    from actshard.writing.zarr import ZarrTarget

    return {t.format: t for t in (SaevTarget, LmprobeTarget, ZarrTarget, PickleTarget)}


def part_folder(path: Path, part: int, parts: int) -> Path:
    """Where a part is written before it is merged."""
    return path / PARTS / f"part-{part:05}-of-{parts:05}"


def make_target(
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[int],
    d_model: int,
    dtype: DTypeLike | None,
    metadata: Mapping[str, Any] | None,
    num_examples: int | None,
    tokens_per_example: int | None,
    shard_bytes: int | str | None,
    part: tuple[int, int] | None,
    options: Mapping[str, Any],
) -> Target:
    """A target from what a user says, checked."""
    known = targets()
    if format not in known:
        raise ArgumentError(f"format must be one of {', '.join(known)}, not {format!r}")
    root = _arguments.local_path(path)
    for name, given in (("metadata", metadata or {}), ("options", options)):
        try:
            json.dumps(dict(given))
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{name}: expected what JSON can hold: {error}") from error
    names, shape = _arguments.index(layers, "layers")
    if not names.size or len(shape) != 1 or len(set(names.tolist())) < names.size:
        raise ArgumentError(f"layers: expected a list of distinct integers, found {layers!r}")
    for name, value in (
        ("d_model", d_model),
        ("num_examples", num_examples),
        ("tokens_per_example", tokens_per_example),
    ):
        if value is None and name != "d_model":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(f"{name}: expected a positive integer, found {value!r}")
    if part is not None:
        try:
            index, count = (int(x) for x in part)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"part: expected (i, n), found {part!r}") from error
        if not 0 <= index < count <= 99_999:
            raise ArgumentError(f"part: expected (i, n) with 0 <= i < n, found {part!r}")
        part = (index, count)
        root = part_folder(root, index, count)
    spec = Spec(
        path=root,
        layers=tuple(names.tolist()),
        d_model=int(d_model),
        dtype=None if dtype is None else _arguments.dtype(dtype)[0],
        metadata=dict(metadata or {}),
        num_examples=None if num_examples is None else int(num_examples),
        tokens=None if tokens_per_example is None else int(tokens_per_example),
        shard_bytes=None if shard_bytes is None else max(1, _arguments.size(shard_bytes, "shard_bytes")),
        part=part,
        options=dict(options),
    )
    return known[format](spec)


def create(
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Sequence[int],
    d_model: int,
    dtype: DTypeLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    num_examples: int | None = None,
    tokens_per_example: int | None = None,
    pad: bool = False,
    truncate: bool = False,
    shard_bytes: int | str | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    exist_ok: bool = False,
    **options: Any,
) -> Writer:
    """Makes a dataset that the format's own system reads.

    Nothing half-written is ever taken for a dataset: files are written under other names, the manifest comes last. Rows go to disk
    on threads of ours while the caller makes the next.

    Args:
        path: the dataset's folder. For saev the folder of dumps (``.../saev/shards``, if saev itself is to read it): the dataset is
            ``path/<HASH>``, and :attr:`Writer.path` tells it when it is closed.
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"`` or ``"pickle"``.
        layers: names of the layers, in the order of the arrays' layer axis.
        d_model: elements per row.
        dtype: the stored type; what is appended is converted to it while it is copied. None: that of what is appended first, and
            nothing is ever converted.
        metadata: what the format has a place for: saev's ``family``, ``ckpt``, ``data``, ``dataset``, ``pixel_agg``; a Zarr store's
            attributes; the pickle shards' ``extraction_config``; lmprobe's ``lmprobe:`` keys.
        num_examples: how many there will be, if it is known: another number at the end is an error; saev's name is known before.
        tokens_per_example: for formats that have as many of each (saev); None: as many as the first example.
        pad: fill shorter examples up with zeros, where a format cannot hold them as they are.
        truncate: cut longer ones.
        shard_bytes: about how large shards are; each format has its own default.
        part: ``(i, n)``: this process writes part i of n; :func:`actshard.merge` makes one dataset of them.
        resume: continue an unfinished dataset after the examples that are safe: ``writer.committed``. Begins where nothing was
            begun, and takes what is finished: ``writer.complete``.
        exist_ok: if the dataset is there already, finished, take it: ``writer.complete`` is True and nothing can be appended.
        options: the format's own; an unknown one raises an error that lists them. saev: ``protocol``, ``cls_token``,
            ``max_tokens_per_shard``. lmprobe: ``storage``, ``pooling``, ``model``, ``revision``. zarr: ``chunk_tokens``, ``t_max``.
            pickle: ``compress``, ``level``, ``machine_id``, ``total_machines``.

    Returns:
        A :class:`~actshard.Writer`; a context manager that finishes the dataset, or leaves it to be resumed after an exception.

    Raises:
        ArgumentError, DtypeError: arguments that make no sense, or that the format cannot hold.
        ExistsError: something is there already: another dataset, or this one, finished (``exist_ok``) or not (``resume``).
        LockedError: another writer is at work there.
        FormatError: a saev folder whose metadata do not match its hash.
    """
    target = make_target(
        path,
        format,
        layers=layers,
        d_model=d_model,
        dtype=dtype,
        metadata=metadata,
        num_examples=num_examples,
        tokens_per_example=tokens_per_example,
        shard_bytes=shard_bytes,
        part=part,
        options=options,
    )
    return Writer(target, resume=resume, exist_ok=exist_ok, pad=bool(pad), truncate=bool(truncate))
