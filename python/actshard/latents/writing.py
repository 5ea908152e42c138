"""Writes sparse latents: delphi's splits, the diffing toolkit's tensors, or a parquet table.

A store is written to a folder next to its target, which is renamed when all files are complete and on the disk: after a crash the
target is absent, and the same call begins again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base._arguments import NUMPY_BY_NAME, local_path, name_of
from actshard.base.errors import ArgumentError, ExistsError, OutOfRangeError, boundary
from actshard.base.work import (
    Lock,
    locked,
    make_folder,
    refuse_within,
    remove,
    sync_folders,
    sync_tree,
    write_bytes,
    write_json,
)
from actshard.formats.torch_zip import NewTensor, TorchArchive, torch_bytes
from actshard.latents import store as store_module
from actshard.latents.files import CONFIG, KEY, KINDS, ROLES
from actshard.latents.store import LatentRows, LatentStore

if TYPE_CHECKING:
    import pyarrow as pa

_EXAMPLES = 256
"""Examples that are read and written together."""
_GROUP = 1 << 20
"""Entries of a row group."""
_SPLITS = 5
"""As CacheConfig.n_splits of delphi."""
_ALIGN = 8


def convert(
    src: str | os.PathLike[str] | LatentStore,
    dst: str | os.PathLike[str],
    to: Literal["delphi", "parquet", "torch"],
    *,
    module: str | None = None,
    n_splits: int | None = None,
    dtype: DTypeLike | None = None,
) -> Path:
    """Writes sparse latents in another form. Entries are written in order of example, token and feature.

    Args:
        src: a path, as for :func:`actshard.latents.open`, or a store.
        dst: a folder that does not exist. delphi: the folder of modules, to which a folder with the module's name is added.
        to: the form.
        module: as for :func:`actshard.latents.open`.
        n_splits: delphi: files, each with an equal share of the features. Default: those of the source, or else 5.
        dtype: dtype of the values. Default: the source's. delphi writes float16.

    Returns:
        The folder that was written.

    Raises:
        ExistsError: the target exists.
        LockedError: another process writes to it.
        OutOfRangeError: a value is finite, and infinite in ``dtype``.
        ArgumentError: a dtype that the form does not have, or an unknown form.
    """
    _arguments.one_of(to, KINDS, "to")
    store = src if isinstance(src, LatentStore) else store_module.open(src, module)
    if n_splits is not None and to != "delphi":
        raise ArgumentError(f"n_splits: expected to='delphi', found {to!r}. Leave it out")
    target = local_path(dst, "dst") / store.module if to == "delphi" else local_path(dst, "dst")
    kind = store.dtype if dtype is None else _arguments.dtype(dtype)[0]
    if name_of(kind) not in ("F16", "F32", "F64", *["BF16"] * (to == "torch")):
        raise ArgumentError(f"dtype: {to} has no {kind}. Choose dtype='float16' or 'float32'", path=store.path)
    if target.exists():
        raise ExistsError("expected nothing at the target, found a file or folder. Choose another one", path=target)
    if (source := store.files.path).is_local:
        refuse_within(target, source.local)
    if to == "delphi" and not store.n_features:
        raise ArgumentError("delphi: expected at least one feature: its files are named by features", path=store.path)
    is_new = not target.parent.exists()
    make_folder(target.parent)
    work = target.with_name(f".{target.name}.actshard-latents")
    lock: Lock = locked(work)
    try:
        data = work / "data"
        remove(data)  # of a call that was interrupted, which had this lock
        make_folder(data)

        def batches() -> Iterator[LatentRows]:
            return (_cast(rows, kind, store) for rows in store.stream(_EXAMPLES))

        if to == "delphi":
            _write_delphi(store, data, kind, _bounds(store, n_splits), batches)
        else:
            (_write_torch if to == "torch" else _write_parquet)(store, data, kind, batches)
        sync_tree(data)
        if target.exists():
            raise ExistsError("expected nothing at the target, found a file or folder that came meanwhile", path=target)
        with boundary(target, "rename"):
            data.rename(target)
        sync_folders([target.parent])
    finally:
        lock.release()
        remove(work)
        if is_new:
            with contextlib.suppress(OSError):  # not empty: the target is there
                target.parent.rmdir()
    return target


def _cast(rows: LatentRows, dtype: np.dtype[np.generic], store: LatentStore) -> LatentRows:
    with np.errstate(over="ignore"):
        values = rows.values.astype(dtype)
    if len(bad := np.flatnonzero(np.isinf(values) & ~np.isinf(rows.values))):
        k = int(bad[0])
        raise OutOfRangeError(
            f"example {rows.examples[k]}, token {rows.tokens[k]}, feature {rows.features[k]}: {rows.values[k]} is infinite in "
            f"{dtype}. Choose dtype='float32'",
            path=store.path,
        )
    return LatentRows(rows.examples, rows.tokens, rows.features, values)


def _all_tokens(store: LatentStore) -> NDArray[np.int64]:
    """Token ids, (examples, n_tokens), padded with zeros."""
    ids = np.zeros((store.n_examples, store.n_tokens), np.int64)
    for example, row in enumerate(ids):
        tokens = store.tokens(example)
        row[: len(tokens)] = tokens
    return ids


def _sizes(store: LatentStore) -> dict[str, int]:
    return {"num_examples": store.n_examples, "num_features": store.n_features, "context": store.n_tokens}


def _map(path: Path, size: int) -> NDArray[np.uint8]:
    """A new file of a size, for writing."""
    return np.memmap(path, np.uint8, "w+", shape=(size,)) if size else np.zeros(0, np.uint8)


def _sync(path: Path, mapped: NDArray[np.uint8]) -> None:
    if isinstance(mapped, np.memmap):
        mapped.flush()
    _native.sync_files([path])


# -- delphi --------------------------------------------------------------------------------------------------------


def _bounds(store: LatentStore, n_splits: int | None) -> list[tuple[int, int]]:
    """First and last feature of each split, as delphi's _generate_split_indices: torch.linspace in float32, cut to integers."""
    width = store.n_features
    features = [part for _, _, part in store.parts]
    if n_splits is None and store.kind == "delphi" and all(features):
        return [(part.start, part.stop - 1) for part in features if part is not None]
    count = min(_arguments.whole(_SPLITS if n_splits is None else n_splits, "n_splits", 1), max(width, 1))
    steps, step = (
        np.arange(count + 1),
        np.float64(np.float32(width) / np.float32(count)),
    )  # torch rounds once, after a product and a sum
    edges = (
        np.where(steps < (count + 1) // 2, step * steps, width - step * (count - steps))
        .astype(np.float32)
        .astype(np.int64)
    )
    edges[-1] = width
    return [(int(a), int(b) - 1) for a, b in itertools.pairwise(edges) if a < b]


def _write_delphi(
    store: LatentStore,
    folder: Path,
    dtype: np.dtype[np.generic],
    bounds: list[tuple[int, int]],
    batches: Callable[[], Iterator[LatentRows]],
) -> None:
    firsts = np.array([first for first, _ in bounds], np.int64)
    sizes, largest = np.zeros(len(bounds), np.int64), np.full((len(bounds), 3), -1)
    for rows in batches():
        split = np.searchsorted(firsts, rows.features, "right") - 1
        sizes += np.bincount(split, minlength=len(bounds))
        for axis, column in enumerate((rows.examples, rows.tokens, rows.features - firsts[split])):
            np.maximum.at(largest[:, axis], split, column)
    tokens = _all_tokens(store) if store.has_tokens else None
    files = []
    for (first, last), size, (example, token, feature) in zip(bounds, sizes.tolist(), largest.tolist(), strict=True):
        is_small = max(example, feature) < 1 << 16
        if is_small and token >= 1 << 16:  # delphi would wrap it
            is_small = False
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {
            "locations": ("U16" if is_small else "U32", (size, 3)),
            "activations": (name_of(dtype), (size,)),
        }
        if max(example, token, feature) >= 1 << 32:
            raise ArgumentError(f"delphi: expected examples below 2**32, found {max(example, token, feature)}")
        if tokens is not None:
            arrays["tokens"] = ("I64", tokens.shape)
        path = folder / f"{first}_{last}.safetensors"
        header, places, total = safetensors_layout(arrays)
        file = _map(path, total)
        file[: len(header)] = np.frombuffer(header, np.uint8)
        parts = {
            name: file[start:end].view(NUMPY_BY_NAME[arrays[name][0]]).reshape(arrays[name][1])
            for name, (start, end) in places.items()
        }
        if tokens is not None:
            parts["tokens"][...] = tokens
        files.append((path, file, parts))
    ends = np.zeros(len(bounds), np.int64)
    for rows in batches():
        split = np.searchsorted(firsts, rows.features, "right") - 1
        for number in np.unique(split).tolist():
            chosen = np.flatnonzero(split == number)
            to = slice(int(ends[number]), int(ends[number]) + len(chosen))
            parts = files[number][2]
            for axis, column in enumerate((rows.examples, rows.tokens, rows.features - firsts[number])):
                parts["locations"][to, axis] = column[chosen]
            parts["activations"][to] = rows.values[chosen]
            ends[number] = to.stop
    for path, file, _ in files:
        _sync(path, file)
    metadata = store.metadata if store.kind == "delphi" else {"converted_from": {store.kind: store.metadata}}
    write_json(folder / CONFIG, {**metadata, KEY: _sizes(store)}, 4)


def safetensors_layout(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Header, begin and end of each array, and size of a file, as safetensors writes them: wide dtypes first, then by name.

    Source: safetensors, safetensors/src/tensor.rs (prepare).
    """
    order = [name for name, *_ in _native.dtypes()]
    names = sorted(arrays, key=lambda name: (-order.index(arrays[name][0]), name))
    fields, position, ends = {}, 0, {}
    for name in names:
        dtype, shape = arrays[name]
        end = position + math.prod(shape) * NUMPY_BY_NAME[dtype].itemsize
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        ends[name] = (position, end)
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGN) * _ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: (len(header) + a, len(header) + b) for name, (a, b) in ends.items()}, len(header) + position


# -- torch ---------------------------------------------------------------------------------------------------------


def _write_torch(
    store: LatentStore, folder: Path, dtype: np.dtype[np.generic], batches: Callable[[], Iterator[LatentRows]]
) -> None:
    count, features = store.n_activations, store.n_features
    store.check_memory(16 * (store.n_examples + features), "sizes of all examples and features")
    files = {}
    for name, tensor in (
        ("activations", NewTensor(name_of(dtype), (count,))),
        ("indices", NewTensor("I64", (count, 3))),
    ):
        archive = TorchArchive(tensor, name)
        file = _map(folder / f"{name}.pt", archive.size)
        ((start, size),) = archive.places
        files[name] = (
            archive,
            file,
            file[start : start + size].view(NUMPY_BY_NAME[tensor.dtype]).reshape(tensor.shape),
        )
    ends = np.zeros(store.n_examples + 1, np.int64)
    most = np.zeros(features, np.float32)
    first = 0
    for rows in batches():
        to = slice(first, first + len(rows))
        files["activations"][2][to] = rows.values
        files["indices"][2][to] = np.stack([rows.examples, rows.tokens, rows.features], axis=1)
        np.add.at(ends, rows.examples + 1, 1)
        np.maximum.at(most, rows.features, rows.values.astype(np.float32))
        first = to.stop
    for name, (archive, file, _) in files.items():
        archive.seal(file)
        _sync(folder / f"{name}.pt", file)
    lengths = np.array([store.length(example) for example in range(store.n_examples)], np.int64)
    names = store.metadata.get("dataset_names") if store.kind == "torch" else None
    ids = store.metadata.get("dataset_ids") if names else [0] * store.n_examples
    values: dict[str, object] = {
        "latent_ids": np.arange(features),
        "ranges": np.cumsum(ends),
        "lengths": lengths,
        "max_activations": most,
        "dataset_ids": np.asarray(ids, np.int64),
        "dataset_names": names or [store.module],
    }
    if store.has_tokens:
        values["sequences"] = _all_tokens(store)
    for name, value in values.items():
        write_bytes(folder / f"{name}.pt", torch_bytes(value, name))


# -- parquet -------------------------------------------------------------------------------------------------------


def _write_parquet(
    store: LatentStore, folder: Path, dtype: np.dtype[np.generic], batches: Callable[[], Iterator[LatentRows]]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    record = {"module": store.module, "sizes": _sizes(store), "metadata": store.metadata}
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.from_numpy_dtype(dtype))
    schema = pa.schema(list(zip(ROLES, kinds, strict=True)), metadata={KEY: json.dumps(record)})
    path = folder / "latents.parquet"
    with boundary(path, "write"), pq.ParquetWriter(path, schema, compression="zstd") as writer:
        waiting: list[LatentRows] = []
        for rows in batches():
            waiting.append(rows)
            if sum(map(len, waiting)) >= _GROUP:
                writer.write_table(_table(waiting, schema))
                waiting = []
        writer.write_table(_table(waiting, schema))
    _native.sync_files([path])
    if store.has_tokens:
        make_folder(folder / "tokens")
        lists = pa.array(
            [store.tokens(example).astype(np.int64) for example in range(store.n_examples)], pa.list_(pa.int64())
        )
        pq.write_table(pa.table({"tokens": lists}), folder / "tokens" / "tokens.parquet")
        _native.sync_files([folder / "tokens" / "tokens.parquet"])


def _table(batches: list[LatentRows], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = [
        np.concatenate(
            [
                np.zeros(0, cast(np.dtype[np.generic], kind.to_pandas_dtype())),
                *(getattr(rows, f"{role}s") for rows in batches),
            ]
        )
        for role, kind in zip(ROLES, schema.types, strict=True)
    ]
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)], schema=schema)
