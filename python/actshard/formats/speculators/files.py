"""Files of hidden states of speculators and vLLM's connectors, and the rows they belong to.

Sources: speculators 0.9.0, hs-connectors 0.9.0, and vLLM's ``ExampleHiddenStatesConnector`` at 015a95c.

state.json, dataset_info.json, data-*.arrow   rows: input_ids, loss_mask, seq_len (Hugging Face ``save_to_disk``)
hidden_states/hs_{i}.safetensors              of row i: hidden_states (S, layers, H), the last layer being the last hidden state;
                                              token_ids int64 (S,); with float8 also hidden_states_scales float32 (S, 1, 1)
{request}.safetensors                         the same tensors, as vLLM leaves them: no rows, no masks
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import StoredArray
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import (
    ActshardError,
    FormatError,
    MissingFileError,
    UnfinishedError,
    UnsupportedError,
    from_os,
)
from actshard.base.location import Location

STATES, IDS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"
SCALED = ("F8_E4M3", "F8_E5M2", "I8")
"""Dtypes of states that are stored with scales; speculators writes the first."""
FLOATS = ("BF16", "F16", "F32")
FOLDER, INFO, STATE = "hidden_states", "dataset_info.json", "state.json"
LAYERS = "actshard_layers"
"""Field of dataset_info.json with the names of the layers before the last; ``datasets`` ignores it."""
SCALED_BY = "actshard_scales"
"""Field of dataset_info.json with the dtype, the kind of scales and the measured error of states that actshard scaled."""
_CODES = {"not_found": "missing-file", "unfinished": "unfinished"}
"""Codes of findings by error kind."""
_SHOWN = 20
"""Number of faulty examples that are named in warnings."""


def data_files(root: Location) -> list[Location]:
    """Arrow files of a folder of ``save_to_disk``, in order.

    Raises:
        FormatError: a file name contains a folder.
        UnsupportedError: the dataset has an indices mapping.
    """
    path = root / "state.json"
    fields = Fields(read_json(path), path)
    if fields.value.get("_indices_files"):
        raise UnsupportedError(
            "field '_indices_files': expected none; save the dataset again with save_to_disk", path=path
        )
    paths = []
    for item in fields.items("_data_files"):
        name = item.text("filename")
        if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
            raise FormatError(
                f"field '_data_files': expected the name of a file in the folder, found {show(name)}",
                path=path,
                code="metadata",
            )
        paths.append(root / name)
    return paths


@dataclass(frozen=True)
class StatesFile:
    """The states of one example: offset, shape and dtype.

    Scaled states are read as products in bfloat16, which is then ``dtype``; ``scaled`` has the stored elements and their scales.
    """

    tokens: int
    layers: int
    width: int
    dtype: str
    start: int
    ids_start: int
    scaled: tuple[StoredArray, StoredArray] | None = None

    @property
    def stored(self) -> str:
        """The dtype in the file."""
        return self.dtype if self.scaled is None else self.scaled[0].dtype


def states_of(path: Location, ids: NDArray[np.int64] | None) -> StatesFile:
    """Reads the header of a file of hidden states, and compares its token ids with the row's token ids.

    Raises:
        MissingFileError, HeaderError, FormatError, UnsupportedError: the file has no usable states of this row.
    """
    tensors, _, data = _native.safetensors_header(path)
    tensors_by_name = {name: (dtype, tuple(shape), data + begin) for name, dtype, shape, begin, _ in tensors}
    for name, axes in ((STATES, 3), (IDS, 1)):
        if name not in tensors_by_name or len(tensors_by_name[name][1]) != axes:
            shape = f"{list(tensors_by_name[name][1])}" if name in tensors_by_name else "nothing"
            raise FormatError(f"tensor '{name}': expected {axes} axes, found {shape}", path=path)
    dtype, (tokens, layers, width), start = tensors_by_name[STATES]
    scaled = None
    if dtype in SCALED:
        scaled = _scaled(path, dtype, tensors_by_name)
        dtype, start = "BF16", 0
    if dtype not in FLOATS or not layers or not width:
        raise FormatError(f"tensor '{STATES}': expected floats, found {dtype} {[tokens, layers, width]}", path=path)
    kind, (count,), ids_start = tensors_by_name[IDS]
    if kind not in ("I64", "I32"):
        raise FormatError(f"tensor '{IDS}': expected I64, found {kind}", path=path)
    if count != tokens:
        raise FormatError(
            f"tensor '{STATES}': expected {count} rows of states, one per token id, found {tokens}", path=path
        )
    if ids is not None:
        stored_ids = np.frombuffer(
            path.read(ids_start, count * (8 if kind == "I64" else 4)), "<i8" if kind == "I64" else "<i4"
        )
        if len(ids) != count or (stored_ids != ids).any():
            n = min(len(ids), count)
            position = next(iter(np.flatnonzero(stored_ids[:n] != ids[:n])), n)
            raise FormatError(
                f"tensor '{IDS}': expected the {len(ids)} token ids of the row, found {count} that differ at position {position}: "
                "these are the states of another row",
                path=path,
            )
    elif kind != "I64":
        raise FormatError(f"tensor '{IDS}': expected I64, found {kind}", path=path)
    return StatesFile(tokens, layers, width, dtype, start, ids_start, scaled)


def _scaled(
    path: Location, dtype: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
) -> tuple[StoredArray, StoredArray]:
    """Elements and scales. Scales can vary along any of the axes token, layer and channel, or be a single number."""
    _, shape, start = tensors[STATES]
    if SCALES not in tensors:
        raise FormatError(
            f"tensor '{SCALES}': expected F32 [{shape[0]}, 1, 1] of {dtype} states, found nothing", path=path
        )
    kind, ones, offset = tensors[SCALES]
    aligned = (*(1,) * (3 - len(ones)), *ones)
    if kind != "F32" or len(aligned) != 3 or any(n not in (1, m) for n, m in zip(aligned, shape, strict=True)):
        expected = f"F32 [{shape[0]}, 1, 1], or axes of {list(shape)} or 1"
        raise FormatError(f"tensor '{SCALES}': expected {expected}, found {kind} {list(ones)}", path=path)
    dense = [int(np.prod(shape[n + 1 :])) for n in range(3)]
    strides = [int(np.prod(aligned[n + 1 :])) for n in range(3)]
    return StoredArray(dtype, list(shape), dense, start, False), StoredArray(
        "F32", list(aligned), strides, offset, False
    )


@dataclass(frozen=True)
class AllStates:
    """The states of all examples. Entries of ``files`` are None for examples without usable states."""

    files: list[StatesFile | None]
    layers: int
    width: int
    dtype: str
    faults: dict[int, ActshardError]
    warnings: list[Remark]


def is_being_written(lock: Location) -> bool:
    """Whether a writer holds a lock. A lock file without a holder is left from a writer that has ended."""
    import fcntl

    try:
        descriptor = os.open(lock.local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is opened without waiting
    except (FileNotFoundError, PermissionError):  # of another user: the file's header shows whether it is whole
        return False
    except OSError as error:
        raise from_os(error, lock, "open") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False


def all_states(
    paths: Sequence[Location],
    ids: Callable[[int], NDArray[np.int64] | None],
    what: str,
    *,
    locks: Set[str] = frozenset(),
    skips: bool = False,
) -> AllStates:
    """Reads the headers of all files. Examples without usable states are named in the warnings.

    Args:
        paths: the files.
        ids: the token ids of a row, which those of its file must equal; None: there are no rows.
        what: the name of an example, for messages.
        locks: names of lock files next to them. A file whose lock is held has no usable states.
        skips: leave out examples without usable states: no faults, and no error if there are no others.

    Raises:
        ActshardError: no file has usable states; the error of the first file.
    """
    files: list[StatesFile | None] = []
    faults: list[tuple[int, ActshardError]] = []
    for number, path in enumerate(paths):
        try:
            lock = f"{path.name}.lock"
            if lock in locks and is_being_written(path.parent / lock):
                raise UnfinishedError(f"is being written: a writer holds {lock}", path=path)
            files.append(states_of(path, ids(number)))
        except (FormatError, MissingFileError, UnfinishedError, UnsupportedError) as error:
            error.path = error.path or path.place
            files.append(None)
            faults.append((number, error))
    shapes = [(file.layers, file.width, file.dtype) for file in files if file is not None]
    if not shapes:
        raise faults[0][1] if faults else FormatError("expected at least one file of hidden states, found none")
    common = max(dict.fromkeys(shapes), key=shapes.count)
    for number, file in enumerate(files):
        if file is not None and (file.layers, file.width, file.dtype) != common:
            layers, width, dtype = common
            message = f"expected {dtype} [{file.tokens}, {layers}, {width}] as in most files, found {file.dtype} "
            message += f"[{file.tokens}, {file.layers}, {file.width}]"
            faults.append((number, FormatError(f"tensor '{STATES}': {message}", path=paths[number])))
            files[number] = None
    remarks = list[Remark]()
    effect = "it is left out" if skips else "reading its states is an error"
    for number, fault in sorted(faults, key=lambda entry: entry[0])[:_SHOWN]:
        code = fault.code or _CODES.get(fault.kind, "format")
        name = paths[number].name
        remarks.append(Remark(code, f"{what} {number}: {name}: {fault.detail}; {effect}"))
    if len(faults) > _SHOWN:
        remarks.append(Remark("format", f"{len(faults)} of {len(paths)} {what}s have no usable states"))
    return AllStates(files, *common, faults={} if skips else dict(faults), warnings=remarks)
