"""speculators' training data, and folders of vLLM's request files.

An example is a row of the Arrow data, or a request file by name. Layers are numbered by position, because their numbers are not
stored; the last is named ``"last"``: the verifier's last hidden state, before its norm.

Files of hidden states of speculators and vLLM's connectors, and the rows they belong to.

Sources: speculators 0.9.0, hs-connectors 0.9.0, and vLLM's ``ExampleHiddenStatesConnector`` at 015a95c.

state.json, dataset_info.json, data-*.arrow   rows: input_ids, loss_mask, seq_len (Hugging Face ``save_to_disk``)
hidden_states/hs_{i}.safetensors              of row i: hidden_states (S, layers, H), the last layer being the last hidden state;
                                              token_ids int64 (S,); with float8 also hidden_states_scales float32 (S, 1, 1)
{request}.safetensors                         the same tensors, as vLLM leaves them: no rows, no masks
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows, StoredArray
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._columns import array_of, pick_rows
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import (
    ActshardError,
    FormatError,
    MissingFileError,
    NotStoredError,
    UnfinishedError,
    UnsupportedError,
    boundary,
    from_os,
)
from actshard.base.layers import Layer, is_one, stored
from actshard.base.location import Location
from actshard.formats.contents import NOTHING_ABSENT, Absence, Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.kept import LEAST_FILES, KeptIndex, Listing
from actshard.formats.per_token import LAST, TokenColumns, wrong_values
from actshard.formats.report import Report

if TYPE_CHECKING:
    import pyarrow as pa


STATES, IDS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"
SCALED = ("F8_E4M3", "F8_E5M2", "I8")
"""Dtypes of states that are stored with scales; speculators writes the first."""
FLOATS = ("BF16", "F16", "F32")
FOLDER, INFO, STATE = "hidden_states", "dataset_info.json", "state.json"
LAYERS = "actshard_layers"
"""Field of dataset_info.json with the names of the layers before the last; ``datasets`` ignores it."""
SCALED_BY = "actshard_scales"
"""Field of dataset_info.json with the dtype, the kind of scales and the measured error of states that actshard scaled."""
_CODES_BY_KIND = {"not_found": "missing-file", "unfinished": "unfinished"}
"""Codes of findings by error kind."""


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
        code = fault.code or _CODES_BY_KIND.get(fault.kind, "format")
        name = paths[number].name
        remarks.append(Remark(code, f"{what} {number}: {name}: {fault.detail}; {effect}"))
    if len(faults) > _SHOWN:
        remarks.append(Remark("format", f"{len(faults)} of {len(paths)} {what}s have no usable states"))
    return AllStates(files, *common, faults={} if skips else dict(faults), warnings=remarks)


# The cached index of speculators' training data: numbers of tokens and offsets of states, if all files are usable and unscaled.
#
# The shape and dtype are the same in all files. Offsets are checked against files when rows are read.


_VERSION = 1
_FURTHEST = 1 << 40


def states_of_rows(
    root: Location, paths: Sequence[Location], tokens: NDArray[np.int64], keep: bool, read: Callable[[], AllStates]
) -> AllStates:
    """The states of all rows: from the cached index, or from ``read``, whose result is then cached."""
    if not keep or not root.is_local or len(paths) < LEAST_FILES:
        return read()
    listing = Listing(root)
    listing.entries(root / FOLDER, "hs_")
    for file in (root / "state.json", *data_files(root)):  # the token ids of files were compared with these rows
        listing.exists(file)
    kept_index = KeptIndex(listing, "speculators", _VERSION)
    index = kept_index.load()
    kept_states = None if index is None else _restore_states(tokens, *index)
    if kept_states is not None:
        return kept_states
    states = read()
    files = [file for file in states.files if file is not None and file.scaled is None]
    if len(files) == len(paths):
        header = {"layers": states.layers, "width": states.width, "dtype": states.dtype}
        columns = ([file.tokens for file in files], [file.start for file in files], [file.ids_start for file in files])
        kept_index.save(header, [np.array(column, np.uint64) for column in columns])
    return states


def _restore_states(
    tokens: NDArray[np.int64], header: Mapping[str, object], arrays: list[NDArray[Any]]
) -> AllStates | None:
    """The states; None if the index is invalid."""
    layers, width, dtype = header.get("layers"), header.get("width"), header.get("dtype")
    if type(layers) is not int or type(width) is not int or dtype not in FLOATS:
        return None
    if not 0 < layers < 1 << 20 or not 0 < width < 1 << 31 or len(arrays) != 3:
        return None
    for array in arrays:
        if array.dtype != np.uint64 or len(array) != len(tokens) or (array >= _FURTHEST).any():
            return None
    if not np.array_equal(arrays[0], tokens.astype(np.uint64)):
        return None
    counts, starts, ids = (array.tolist() for array in arrays)
    files: list[StatesFile | None] = [
        StatesFile(count, layers, width, dtype, start, id_offset)
        for count, start, id_offset in zip(counts, starts, ids, strict=True)
    ]
    return AllStates(files, layers, width, dtype, faults={}, warnings=[])


_LOOKED_FOR = "a folder of save_to_disk with input_ids and a folder hidden_states, or vLLM's request files"
_LISTED = 4096
"""Entries of a folder among which request files are looked for."""
_READ = 4
"""Files with other tensors after which the folder is taken for another."""
_TRIED = 64
"""Request files that may be unfinished before the folder is taken for another."""
_PER_TOKEN = ("input_ids", "loss_mask")


def detect(path: Location) -> Evidence:
    """Checks for the rows and the folder of hidden states, or for request files."""
    if path.kind() != "folder" or not path.lists:
        return Evidence(False, _LOOKED_FOR, "no folder that can be listed")
    if (path / "state.json").kind() == "file":
        if (path / FOLDER).kind() != "folder":
            return Evidence(False, _LOOKED_FOR, f"a state.json, but no folder {FOLDER}", near=True)
        info = read_json(path / INFO) if (path / INFO).kind() == "file" else None
        features = info.get("features") if isinstance(info, dict) else None
        if not isinstance(features, dict) or "input_ids" not in features:
            return Evidence(False, _LOOKED_FOR, "a state.json, but no input_ids in dataset_info.json", near=True)
        return Evidence(True, _LOOKED_FOR, "rows of speculators")
    if _has_requests(path):
        return Evidence(True, _LOOKED_FOR, "vLLM's request files")
    return Evidence(False, _LOOKED_FOR, "no state.json")


def _has_requests(path: Location) -> bool:
    """Whether most of the first safetensors files that can be read have the two tensors of a request file.

    Files that a server is writing just now are empty or short, and files of other programs may lie between them.
    """
    names = sorted(entry.name for entry in path.first(_LISTED) if entry.name.endswith(".safetensors"))
    counts = {True: 0, False: 0}
    for name in names[:_TRIED]:
        with contextlib.suppress(ActshardError):
            axes = {name: len(shape) for name, _, shape, _, _ in _native.safetensors_header(path / name)[0]}
            counts[axes.get(STATES) == 3 and axes.get(IDS) == 1] += 1
            if counts[True] > counts[False] or counts[False] == _READ:
                break
    return counts[True] > 0 and counts[True] >= counts[False]


def _rows_of(states: AllStates, paths: Sequence[Location], tokens: NDArray[np.uint32], options: Options) -> Rows:
    """Rows of hidden states: a group per layer. Scaled states are multiplied by their scales when they are read."""
    dtype = NUMPY_BY_NAME[states.dtype]
    row = states.width * dtype.itemsize
    first = np.array([0 if file is None else file.start for file in states.files], np.uint64)
    starts = first + np.arange(states.layers, dtype=np.uint64)[:, None] * np.uint64(row)
    return _native.placed_rows(
        [(path, states.layers * row, False, False, None) for path in paths],
        np.tile(np.arange(len(paths), dtype=np.uint32), states.layers),
        np.ascontiguousarray(starts.reshape(-1)),
        tokens,
        num_groups=states.layers,
        width=states.width,
        dtype=states.dtype,
        decoded_memory=options.decoded_memory,
        descr=dtype,
        io=options.io,
        faults=[
            (number, error.kind, error.detail, error.path or paths[number].place)
            for number, error in sorted(states.faults.items())
        ],
        scaled=[
            (number, *file.scaled, None)
            for number, file in enumerate(states.files)
            if file is not None and file.scaled is not None
        ],
    )


def _stored_as(states: AllStates) -> dict[str, object]:
    """The stored dtypes, if they differ from the rows' dtype."""
    stored = sorted({file.stored for file in states.files if file is not None})
    return {} if stored == [states.dtype] else {"stored_dtype": " and ".join(stored)}


def _names(path: Location, states: AllStates, info: dict[str, object]) -> tuple[Layer, ...] | None:
    """Names of the layers before the last, if actshard wrote them."""
    names = info.get(LAYERS)
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != states.layers - 1 or not all(map(is_one, names)):
        raise FormatError(
            f"field {LAYERS!r}: expected {states.layers - 1} names of layers, found {show(names)}",
            path=path / INFO,
            code="metadata",
        )
    return stored((*names, LAST), path.place)


def _contents(path: Location, states: AllStates, rows: Rows, tokens: NDArray[np.uint32], **fields: Any) -> Contents:
    names = _names(path, states, fields["metadata"])
    return Contents(
        format="speculators",
        path=path.place,
        layers=names or (*range(states.layers - 1), LAST),
        d_model=states.width,
        dtype=NUMPY_BY_NAME[states.dtype],
        num_examples=len(tokens),
        token_counts=lambda: tokens.astype(np.int64),
        rows=rows,
        provenance=({} if names else {"layers": "by position: their numbers are not stored"}) | _stored_as(states),
        warnings=tuple(states.warnings),
        **fields,
    )


def open(path: Location, options: Options) -> Contents:
    """Reads the Arrow rows, and the header and token ids of every file of hidden states."""
    if (path / "state.json").kind() is None:
        return _open_requests(path, options)
    table = table_of_rows(path)
    for name in _PER_TOKEN:
        if name not in table.column_names:
            raise FormatError(f"expected a column {name!r}, found {', '.join(table.column_names)}", path=path)
    offsets, values = lists_of(table, "input_ids", path)
    paths = [path / FOLDER / f"hs_{row}.safetensors" for row in range(len(table))]
    counts = np.diff(offsets)
    states = states_of_rows(
        path,
        paths,
        counts,
        options.keep,
        lambda: all_states(
            paths, lambda row: values[offsets[row] : offsets[row + 1]], "row", skips=options.skip_incomplete
        ),
    )
    tokens = counts.astype(np.uint32)
    if options.skip_incomplete:
        tokens[[file is None for file in states.files]] = 0

    def columns(names: Sequence[str]) -> pa.Table:
        for name in names:
            if name not in table.column_names:
                raise NotStoredError(
                    f"has no column {name!r}; columns are {', '.join(table.column_names)}", path=path.place
                )
        return table.select(list(names))

    def batches(names: Sequence[str]) -> Iterator[pa.Table]:
        yield columns(names)

    info = read_json(path / INFO)
    return _contents(
        path,
        states,
        _rows_of(states, paths, tokens, options),
        tokens,
        metadata=info if isinstance(info, dict) else {},
        column_names=table.column_names,
        columns=columns,
        head_columns=lambda names, n: columns(names).slice(0, n),
        column_batches=batches,
        example_columns=lambda names, numbers: pick_rows(columns(names), numbers),
        token_columns=_PER_TOKEN,
        files=lambda: [file.place for file in paths],
        absence=_absence(states, paths, options),
    )


def table_of_rows(path: Location) -> pa.Table:
    """The Arrow rows; memory-mapped if they are local."""
    import pyarrow as pa

    parts = []
    for file in data_files(path):
        with boundary(file, "read"):
            try:
                parts.append(pa.ipc.open_stream(file.arrow()).read_all())
            except (pa.ArrowException, OSError) as error:
                if getattr(error, "errno", None) is not None or isinstance(error, ActshardError):
                    raise  # a file system error; pyarrow's errors about the content are OSError, too, but without errno
                raise FormatError(f"expected an Arrow stream: {str(error).splitlines()[0]:.200}", path=file) from error
    if not parts:
        raise FormatError("field '_data_files': expected at least one file, found none", path=path / "state.json")
    try:
        return pa.concat_tables(parts)
    except pa.ArrowException as error:
        raise FormatError(f"expected files of one schema: {str(error).splitlines()[0]:.200}", path=path) from error


def lists_of(table: pa.Table, name: str, path: Location) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets and values of a column of lists of integers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table[name]
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or not pa.types.is_integer(column.type.value_type) or column.null_count:
        raise FormatError(f"column {name!r}: expected lists of integers without nulls, found {column.type}", path=path)
    lengths = array_of(pc.list_value_length(column)).astype(np.int64)
    values = pc.list_flatten(column)
    if values.null_count:
        raise FormatError(f"column {name!r}: expected integers, found nulls", path=path)
    return np.concatenate([[0], np.cumsum(lengths)]), array_of(values).astype(np.int64)


def _missing_rows(path: Location) -> list[Remark]:
    """A warning about a folder of hidden states whose rows in the folder above cannot be found."""
    if path.name != FOLDER or not path.is_local:
        return []  # a folder of request files may have any name, and its server may refuse the folder above
    parent = path.parent
    if all((parent / name).kind() is None for name in (INFO, STATE)):
        return []
    with contextlib.suppress(ActshardError):  # a damaged file
        if detect(parent).matches:
            return []
    text = f"{INFO} or {STATE} of the folder above is missing or empty: rows, with loss_mask and seq_len, are not read"
    return [Remark("missing-file", text)]


def _open_requests(path: Location, options: Options) -> Contents:
    """Opens vLLM's request files, in the order of their names. Their token ids are the column ``input_ids``."""
    names = [entry.name for entry in path.entries()]
    locks = frozenset(name for name in names if name.endswith(".lock")) if path.is_local else frozenset()
    return contents_of_requests(path, [path / name for name in names if name.endswith(".safetensors")], options, locks)


def _absence(states: AllStates, paths: Sequence[Location], options: Options) -> Absence:
    absent = np.array([file is None for file in states.files], np.bool_)
    if not options.skip_incomplete:
        return NOTHING_ABSENT
    return Absence(absent, tuple(paths[n].place for n in np.flatnonzero(absent).tolist()))


def contents_of_requests(
    path: Location, paths: Sequence[Location], options: Options, locks: Set[str] = frozenset()
) -> Contents:
    """The contents of some request files of a folder, in this order. ``locks``: names of lock files next to them."""
    states = all_states(paths, lambda number: None, "file", locks=locks, skips=options.skip_incomplete)
    states.warnings.extend(_missing_rows(path))
    unread = 0 if options.skip_incomplete else 1
    tokens = np.array([unread if file is None else file.tokens for file in states.files], np.uint32)
    counts = np.array([0 if file is None else file.tokens for file in states.files], np.uint32)
    ids = Rows.tensors(
        [(file, 8) for file in paths],
        counts,
        [
            (
                np.arange(len(paths), dtype=np.uint32),
                np.array([0 if file is None else file.ids_start for file in states.files], np.uint64),
            )
        ],
        [(0, 0)],
        width=1,
        dtype="I64",
        descr=NUMPY_BY_NAME["I64"],
        io=options.io,
    )
    columns = TokenColumns({"input_ids": ids}, len(paths), path.place)
    return _contents(
        path,
        states,
        _rows_of(states, paths, tokens, options),
        tokens,
        metadata={},
        column_names=columns.names,
        columns=columns.columns,
        head_columns=columns.head,
        column_batches=columns.batches,
        example_columns=columns.some,
        token_columns=columns.names,
        files=lambda: [file.place for file in paths],
        absence=_absence(states, paths, options),
    )


# Checks of speculators' training data; opening reports files of hidden states that are not usable.


_STATES = re.compile(r"hs_(\d+)\.safetensors")
_SHOWN = 20
_CODES = 1 << 16
"""Number of codes that are examined per file."""
_MANY = 0.01
"""A larger share of codes with the largest magnitude is reported."""


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks per-token columns (equal lengths, token ids, masks), and lists files of hidden states that belong to no row."""
    if (root / "state.json").kind() is None:
        entries = root.entries("*.safetensors")
        report.count("files", len(entries))
        for entry in entries[:1]:
            _other_tensors(root / entry.name, report)
        for entry in entries:
            _scales(root / entry.name, report)
        return
    with report.noting(root):
        table = table_of_rows(root)
        lengths = np.diff(lists_of(table, "input_ids", root)[0])
        counted = (
            {"loss_mask": np.diff(lists_of(table, "loss_mask", root)[0])} if "loss_mask" in table.column_names else {}
        )
        if "seq_len" in table.column_names:
            counted["seq_len"] = table["seq_len"].to_numpy()
        for name, counts in counted.items():
            for row in np.flatnonzero(counts != lengths)[:_SHOWN].tolist():
                position = f"row {row}, column '{name}'"
                report.add("count-claim", root, int(counts[row]), f"{lengths[row]}, the number of token ids", position)
        for name in ("input_ids", *(["loss_mask"] if "loss_mask" in table.column_names else [])):
            ends, values = lists_of(table, name, root)
            wrong, expected, code = wrong_values(name, values)
            rows = np.searchsorted(ends, wrong, side="right") - 1
            for row, index in list(dict(zip(rows[::-1].tolist(), wrong[::-1].tolist(), strict=True)).items())[:_SHOWN]:
                report.add(code, root, int(values[index]), expected, f"row {row}, {name}, token {index - ends[row]}")
        for number, entry in enumerate(root.joinpath(FOLDER).entries("hs_*.safetensors")):
            tell("files", number, len(table))
            report.count("files")
            match = _STATES.fullmatch(entry.name)
            if match is None or int(match[1]) >= len(table):
                report.add("unlisted-file", root / FOLDER / entry.name, f"a file for none of the {len(table)} rows")
            _scales(root / FOLDER / entry.name, report)


def _other_tensors(path: Location, report: Report) -> None:
    """Names what else the first file has: no column and no layer has it."""
    with contextlib.suppress(ActshardError):
        names = [tensor[0] for tensor in _native.safetensors_header(path)[0]]
        if others := sorted(set(names) - {STATES, IDS, SCALES}):
            report.add("layout", path, f"tensors {', '.join(others[:_SHOWN])} are not read")


def _scales(path: Location, report: Report) -> None:
    """Checks the scales of a file, if it has any, and its first codes. Opening reports files that are not usable."""
    with contextlib.suppress(ActshardError):
        tensors, _, data = _native.safetensors_header(path)
        tensors_by_name = {name: (dtype, tuple(shape), data + begin) for name, dtype, shape, begin, _ in tensors}
        if (
            SCALES not in tensors_by_name
            or tensors_by_name[SCALES][0] != "F32"
            or tensors_by_name.get(STATES, ("", (), 0))[0] not in SCALED
        ):
            return
        (_, ones, scales_offset), (dtype, shape, first) = tensors_by_name[SCALES], tensors_by_name[STATES]
        scales = np.frombuffer(path.read(scales_offset, 4 * math.prod(ones)), "<f4")
        bad = np.flatnonzero(~(np.isfinite(scales) & (scales > 0)))
        if bad.size:
            message = f"{bad.size:,} of {scales.size:,} scales are not positive finite numbers"
            report.add("scale-value", path, f"{message}; the first is {scales[bad[0]]}", place=f"scale {bad[0]}")
        size = math.prod(shape)
        codes = np.frombuffer(path.read(first, min(size, _CODES)), np.uint8)
        # A scale is computed from its largest value, so each scale has at least one code of the largest magnitude.
        expected = 1 + scales.size * codes.size // max(size, 1)
        largest = int(_largest(dtype, codes).sum())
        if largest > max(_MANY * codes.size, 4 * expected):
            report.add(
                "saturated-codes", path, f"{largest:,} of the first {codes.size:,} codes have the largest magnitude"
            )


def _largest(dtype: str, codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether each code has the largest finite magnitude."""
    if dtype == "I8":
        return np.isin(codes, (0x7F, 0x80, 0x81))
    return np.isin(codes & 0x7F, 0x7E if dtype == "F8_E4M3" else 0x7B)
