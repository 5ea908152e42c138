"""Examples of draft-model training in files of ``torch.save``: one dict of tensors per file.

::

    input_ids, loss_mask, attention_mask    (S,) or (1, S) integers
    states of layers, concatenated          (S, L * H) or (1, S, L * H)
    last hidden state                       (S, H) or (1, S, H)

SpecForge, Model-Optimizer, AngelSlim and EAGLE name the tensors differently (:class:`DraftKeys`). Tensors may be views of a shared
storage, so strides and offsets are read from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows, StoredArray
from actshard.base._arguments import stored
from actshard.base.containers import RefusedObject, TorchFile, read_torch, refusal
from actshard.base.errors import ActshardError, FileAccessError, FormatError, MissingFileError, NotStoredError
from actshard.base.location import Location
from actshard.formats.contents import Options
from actshard.formats.kept import LEAST_FILES, KeptIndex, Listing
from actshard.formats.per_token import TokenColumns
from actshard.formats.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa


IDS = "input_ids"
MASKS = ("loss_mask", "attention_mask")
FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
_AT_ONCE = 512
_GZIPPED_AT_ONCE = 16
"""Number of gzipped files read together. Each is kept decompressed in memory until its tensors are found."""
_SHOWN_KEYS = 8


@dataclass(frozen=True)
class DraftKeys:
    """Names of the tensors of one kind of file.

    Attributes:
        kind: the kind's name.
        mark: the key by which a file is recognised.
        aux: key of the layers' concatenated states; None: only the last hidden state is stored.
        last: key of the last hidden state; None if it is not stored, so that the width of a layer is unknown.
        masks: keys of masks that every file has.
        id_axes: number of axes of ``input_ids``.
        without: a key that files of this kind do not have.
    """

    kind: str
    mark: str
    aux: str | None
    last: str | None
    masks: tuple[str, ...] = ("loss_mask",)
    id_axes: int = 1
    without: str | None = None

    @property
    def states(self) -> tuple[str, ...]:
        """Keys of the hidden states."""
        return tuple(key for key in (self.aux, self.last) if key is not None)

    @property
    def required(self) -> tuple[str, ...]:
        """Keys that every file has."""
        return (IDS, *self.masks, *self.states)


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor in a file, with axes (token, element) or (token,). Strides are in elements."""

    array: StoredArray
    tokens: int
    width: int
    token_stride: int
    stride: int


@dataclass(frozen=True, eq=False)
class PlacedTensors:
    """A tensor that all files of a folder have, with contiguous rows: arrays with one entry per file.

    Attributes:
        dtype: safetensors name.
        width: elements per row.
        offsets: offset of the first byte, uint64.
        steps: row strides in elements, uint64.
        swapped: whether elements are byte-swapped, uint8.
    """

    dtype: str
    width: int
    offsets: NDArray[np.uint64]
    steps: NDArray[np.uint64]
    swapped: NDArray[np.uint8]


@dataclass(frozen=True)
class DraftExample:
    """The tensors of one file."""

    tokens: int
    gzipped: bool
    aux: PlacedTensor | None
    last: PlacedTensor | None
    columns: dict[str, PlacedTensor]
    """Token ids and masks."""
    values: dict[str, object] = field(default_factory=dict)
    """Numbers and strings of the file, such as ``conversation_id``."""
    sizes: tuple[int, int] = (0, 0)


def values_of_files(examples: Sequence[DraftExample | None]) -> dict[str, list[object]]:
    """Numbers and strings of files, by name; None for a file without the value."""
    names = dict.fromkeys(name for example in examples if example is not None for name in example.values)
    return {name: [None if example is None else example.values.get(name) for example in examples] for name in names}


def kind_of(value: object, kinds: Sequence[DraftKeys]) -> DraftKeys | None:
    """The kind of a file's saved object; None if no kind matches."""
    if not isinstance(value, dict):
        return None
    for keys in kinds:
        if keys.mark in value and keys.without not in value and _axes(value.get(IDS)) in (0, keys.id_axes):
            return keys
    return None


def _axes(value: object) -> int:
    """Number of axes of a tensor; 0 if the value is not a tensor."""
    return len(value.shape) if isinstance(value, StoredArray) else 0


def read_each(
    paths: Sequence[Location],
    limit: int,
    use: Callable[[int, TorchFile | ActshardError], None],
    *,
    may_lack: bool = False,
) -> None:
    """Calls ``use`` with each file's number and its parsed form, or the error of a damaged one. Files are read in parallel.

    ``may_lack``: files may be missing; ``use`` then gets a MissingFileError.

    Raises:
        FileAccessError, MissingFileError: a file cannot be accessed. Damaged files raise nothing.
    """
    first = 0
    while first < len(paths):
        batch = paths[first : first + (_GZIPPED_AT_ONCE if paths[first].name.endswith(".gz") else _AT_ONCE)]
        try:
            for number, file in enumerate(read_torch(batch, limit), first):
                use(number, file)
        except ActshardError:
            for number, path in enumerate(batch, first):
                use(number, _read_one(path, limit, may_lack))
        first += len(batch)


def _read_one(path: Location, limit: int, may_lack: bool) -> TorchFile | ActshardError:
    try:
        return read_torch([path], limit)[0]
    except FileAccessError:
        raise
    except MissingFileError as error:
        if not may_lack:
            raise
        return error
    except ActshardError as error:
        error.path = error.path or path.place
        return error


def example_of(file: TorchFile, keys: DraftKeys) -> DraftExample:
    """Finds the tensors of a file, and checks that their shapes agree.

    Raises:
        FormatError, UnsupportedError: a tensor is missing, or has an unexpected dtype, shape or number of tokens.
    """
    value = file.value
    if not isinstance(value, dict):
        raise FormatError(f"expected a dict of tensors, found {type(value).__name__}", path=file.path)
    tensors = {key: _tensor(file, value, key) for key in keys.required}
    tensors |= {key: _tensor(file, value, key) for key in MASKS if key in value and key not in tensors}
    columns = {key: _flat(file, key, tensors[key]) for key in (IDS, *MASKS) if key in tensors}
    tokens = columns[IDS].tokens
    if not tokens:
        raise FormatError(f"{IDS}: expected at least one token, found none", path=file.path)
    states = {key: _rows(file, key, tensors[key]) for key in keys.states}
    aux = states.get(keys.aux) if keys.aux is not None else None
    if aux is not None and aux.tokens * aux.width == 0 and keys.last is not None:
        aux = None  # Model-Optimizer stores an empty tensor if there is no auxiliary layer
    last = states[keys.last] if keys.last is not None else None
    for key, part in [*columns.items(), (keys.aux, aux), (keys.last, last)]:
        if part is not None and part.tokens != tokens:
            raise FormatError(f"{key}: expected {tokens} tokens, as in {IDS}, found {part.tokens}", path=file.path)
    plain = {
        key: value[key]
        for key in value
        if isinstance(key, str) and type(value[key]) in (str, int, float, bool) and key not in tensors
    }
    return DraftExample(tokens, file.is_gzipped, aux, last, columns, plain, file.sizes)


def _tensor(file: TorchFile, value: dict[object, object], key: str) -> StoredArray:
    tensor = value.get(key)
    if isinstance(tensor, RefusedObject):
        raise refusal(tensor, key, file.path)
    if not isinstance(tensor, StoredArray):
        keys_found = ", ".join(str(stored_key)[:40] for stored_key in list(value)[:_SHOWN_KEYS])
        what = f"a {type(tensor).__name__}" if key in value else f"none; the file has {keys_found or 'no keys'}"
        raise FormatError(f"{key}: expected a tensor, found {what}", path=file.path)
    return tensor


def _squeezed(file: TorchFile, key: str, array: StoredArray, axes: int) -> tuple[list[int], list[int]]:
    """Shape and strides without a first axis of 1."""
    shape, strides = list(array.shape), list(array.strides)
    if len(shape) == axes + 1:
        if shape[0] != 1:
            raise FormatError(f"{key}: expected a first axis of 1, found the shape {shape}", path=file.path)
        shape, strides = shape[1:], strides[1:]
    if len(shape) != axes:
        expected = "(S,) or (1, S)" if axes == 1 else "(S, width) or (1, S, width)"
        raise FormatError(f"{key}: expected the shape {expected}, found {shape}", path=file.path)
    return shape, strides


def _flat(file: TorchFile, key: str, array: StoredArray) -> PlacedTensor:
    if array.dtype not in INTEGERS:
        raise FormatError(f"{key}: expected integers, found {array.dtype}", path=file.path)
    (tokens,), (stride,) = _squeezed(file, key, array, 1)
    return PlacedTensor(array, tokens, 1, stride, 1)


def _rows(file: TorchFile, key: str, array: StoredArray) -> PlacedTensor:
    if len(array.shape) == 1 and array.shape[0] == 0:
        return PlacedTensor(array, 0, 0, 0, 1)
    if array.dtype not in FLOATS:
        raise FormatError(f"{key}: expected floats, found {array.dtype}", path=file.path)
    (tokens, width), (token_stride, stride) = _squeezed(file, key, array, 2)
    return PlacedTensor(array, tokens, width, token_stride, stride)


# Addresses of tensors in ``torch.save`` files, and the columns of draft-model examples: token ids, masks, values, file names.


_FILE = "file"
"""Column of the examples' files, relative to the folder."""
_Fault = tuple[int, str, str, Any]
"""An example that cannot be read: its number, the error's kind and message, the file."""


class PlaceTable:
    """Collects files of tensors for the core, which opens each with one row stride.

    The core decodes a whole tensor if its rows are not contiguous or if it is compressed.
    """

    def __init__(self, paths: Sequence[Location]) -> None:
        self._paths = paths
        self._files: list[tuple[Location, int, bool, bool, StoredArray | None]] = []
        self._numbers: dict[object, int] = {}

    def place(self, example: int, part: PlacedTensor, gzipped: bool, offset: int) -> tuple[int, int]:
        """Returns a tensor's file number, and the offset of its rows plus ``offset``, a position within a row in bytes."""
        item = stored(part.array.dtype).itemsize
        row = part.width * item
        step = part.token_stride * item if part.tokens > 1 else row
        is_decoded = (part.stride != 1 and part.width > 1) or step < row or part.array.deflated is not None
        swapped = part.array.swapped and not is_decoded
        key = (example, id(part.array), True) if is_decoded else (example, step, swapped, False)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._files)
            decoded = part.array if is_decoded else None
            self._files.append((self._paths[example], row if is_decoded else step, swapped, gzipped, decoded))
        return number, offset + (0 if is_decoded else part.array.offset)

    def add(self, steps: NDArray[np.uint64], swapped: NDArray[np.uint8]) -> int:
        """Adds every path once, with its row stride in bytes. Returns the number of the first."""
        first = len(self._files)
        files = zip(self._paths, steps.tolist(), (swapped != 0).tolist(), strict=True)
        self._files += [(path, step, swap, False, None) for path, step, swap in files]
        return first

    def unread(self, example: int) -> int:
        """Adds a file of which no rows are read, and returns its number."""
        self._files.append((self._paths[example], 1 << 20, False, False, None))
        return len(self._files) - 1

    def open(
        self,
        numbers: NDArray[np.uint32],
        starts: NDArray[np.uint64],
        tokens: NDArray[np.uint32],
        width: int,
        dtype: str,
        options: Options,
        faults: Sequence[_Fault] = (),
    ) -> Rows:
        """Opens rows by file number and offset of their first byte, both (groups, examples)."""
        return _native.placed_rows(
            self._files,
            np.ascontiguousarray(numbers.reshape(-1)),
            np.ascontiguousarray(starts.reshape(-1)),
            tokens,
            num_groups=len(numbers),
            width=width,
            dtype=dtype,
            decoded_memory=options.decoded_memory,
            descr=stored(dtype),
            io=options.io,
            faults=list(faults),
        )


def rows_of_columns(
    paths: Sequence[Location], examples: Sequence[DraftExample | None], options: Options
) -> dict[str, Rows]:
    """Rows of token ids and masks, by name."""
    n = len(paths)
    first = next(example for example in examples if example is not None)
    rows = {}
    for key, part in first.columns.items():
        table = PlaceTable(paths)
        numbers, starts, tokens = np.zeros((1, n), np.uint32), np.zeros((1, n), np.uint64), np.zeros(n, np.uint32)
        for e, example in enumerate(examples):
            if example is None:
                numbers[0, e] = table.unread(e)
                continue
            numbers[0, e], starts[0, e] = table.place(e, example.columns[key], example.gzipped, 0)
            tokens[e] = example.tokens
        rows[key] = table.open(numbers, starts, tokens, 1, part.array.dtype, options)
    return rows


def rows_of_parts(
    paths: Sequence[Location],
    groups: Sequence[tuple[PlacedTensors, int]],
    tokens: NDArray[np.uint32],
    width: int,
    options: Options,
) -> Rows:
    """Rows of tensors that all files have: one group for each pair of a tensor and an offset within its rows."""
    dtype = groups[0][0].dtype
    item, table = stored(dtype).itemsize, PlaceTable(paths)
    firsts: dict[int, int] = {}
    for part, _ in groups:
        if id(part) not in firsts:
            firsts[id(part)] = table.add(
                np.where(tokens > 1, part.steps, np.uint64(part.width)) * np.uint64(item), part.swapped
            )
    file_indices = np.arange(len(paths), dtype=np.uint32)
    numbers = np.stack([file_indices + np.uint32(firsts[id(part)]) for part, _ in groups])
    starts = np.stack([part.offsets + np.uint64(offset) for part, offset in groups])
    return table.open(numbers, starts, tokens, width, dtype, options)


class DraftColumns:
    """Columns of a folder of examples. Examples that cannot be read have empty lists.

    Args:
        root: the folder.
        paths: the examples' files.
        rows: rows of token ids and masks.
        values: numbers and strings of the files; None for a file without the value.
    """

    def __init__(
        self,
        root: Location,
        paths: Sequence[Location],
        rows: Mapping[str, Rows],
        values: Mapping[str, Sequence[object]],
    ) -> None:
        self._root, self._paths = root, paths
        self._tokens = TokenColumns(rows, len(paths), root.place)
        self._values = {name: column for name, column in values.items() if name not in (*self._tokens.names, _FILE)}
        self.names = (*self._tokens.names, *self._values, _FILE)
        self.per_token = self._tokens.names

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Reads columns of all examples."""
        return self.head(names, len(self._paths))

    def head(self, names: Sequence[str], n: int) -> pa.Table:
        """Reads columns of the first n examples."""
        return self.some(names, np.arange(min(n, len(self._paths))))

    def some(self, names: Sequence[str], numbers: NDArray[np.int64]) -> pa.Table:
        """Reads columns of these examples.

        Raises:
            NotStoredError: there is no such column.
        """
        for name in names:
            if name not in self.names:
                raise NotStoredError(
                    f"has no column {name!r}; columns are {', '.join(self.names)}", path=self._root.place
                )
        parts: dict[str, object] = {}
        if token_names := [name for name in names if name in self.per_token]:
            read = self._tokens.some(token_names, numbers)
            parts = {name: read[name].combine_chunks() for name in token_names}
        parts |= {name: self._plain(name, numbers.tolist()) for name in names if name not in parts}
        return table_of(list(names), [(parts, len(numbers))])

    def _plain(self, name: str, numbers: Sequence[int]) -> list[object]:
        if name == _FILE:
            return [self._paths[i].relative_to(self._root) for i in numbers]
        values = self._values[name]
        return [values[i] for i in numbers]


# The cached index of a folder of draft-model examples, stored by :mod:`actshard.formats.kept`.
#
# Names and order of files follow from the folder's listing. The index contains only the number of tokens of each example and,
# for each of its tensors, offset, row stride and byte order. Shapes and dtypes are the same in all files. No index is stored
# for a folder with damaged or gzipped files, or with tensors that are decoded as a whole.


_VERSION = 1
_STATES = ("aux", "last")
_WIDEST = 1 << 32
"""Row strides and widths, in elements, are below this limit."""
_FURTHEST = 1 << 40
"""Offsets are below this limit."""


def place_of(root: Location, format: str, paths: Sequence[Location], keep: bool) -> KeptIndex | None:
    """The cached index of a folder; None if the folder has no index. Lists the folders of all files."""
    if not keep or not root.is_local or len(paths) < LEAST_FILES:
        return None
    listing = Listing(root)
    for folder in dict.fromkeys((root.key, *(path.parent.key for path in paths))):
        listing.entries(Location.at(folder), "")
    return KeptIndex(listing, format, _VERSION)


def stored_of(
    keys: DraftKeys, examples: Sequence[DraftExample | None]
) -> tuple[dict[str, Any], list[NDArray[Any]]] | None:
    """The index's header and arrays; None if an example is damaged, compressed or has to be decoded."""
    valid_examples = [example for example in examples if example is not None]
    if len(valid_examples) < len(examples):
        return None
    parts = {name: [_parts(example)[name] for example in valid_examples] for name in _parts(valid_examples[0])}
    every = [part for column_parts in parts.values() for part in column_parts]
    if any(example.gzipped for example in valid_examples) or any(map(_is_decoded, every)):
        return None
    header = {
        "kind": keys.kind,
        "parts": [[name, column_parts[0].array.dtype, column_parts[0].width] for name, column_parts in parts.items()],
        "values": values_of_files(valid_examples),
    }
    arrays = [np.array([example.tokens for example in valid_examples], np.uint32)]
    for column_parts in parts.values():
        arrays.append(np.array([part.array.offset for part in column_parts], np.uint64))
        arrays.append(np.array([part.token_stride for part in column_parts], np.uint64))
        arrays.append(np.array([part.array.swapped for part in column_parts], np.uint8))
    return header, arrays


def _parts(example: DraftExample) -> dict[str, PlacedTensor]:
    states = {name: part for name, part in zip(_STATES, (example.aux, example.last), strict=True) if part is not None}
    return {**states, **example.columns}


def _is_decoded(part: PlacedTensor) -> bool:
    """Whether the core decodes the tensor as a whole, for which its stored shape is needed."""
    is_strided = (part.stride != 1 and part.width > 1) or (part.tokens > 1 and part.token_stride < part.width)
    return is_strided or part.array.deflated is not None


@dataclass(frozen=True)
class KeptExamples:
    """The examples of an index. ``parts`` are tensors: ``"aux"``, ``"last"`` and columns; ``values`` are numbers and strings."""

    keys: DraftKeys
    tokens: NDArray[np.uint32]
    parts: dict[str, PlacedTensors]
    values: dict[str, list[object]]


def restored(
    kinds: Sequence[DraftKeys], n: int, header: Mapping[str, object], arrays: Sequence[NDArray[Any]]
) -> KeptExamples | None:
    """The examples of n files; None if the index is invalid. Offsets are checked against files when rows are read."""
    keys = next((keys for keys in kinds if keys.kind == header.get("kind")), None)
    parts = _checked_parts(keys, header.get("parts"))
    values = _checked_values(header.get("values"), n)
    if keys is None or parts is None or values is None or len(arrays) != 1 + 3 * len(parts):
        return None
    types = ("<u4", *("<u8", "<u8", "|u1") * len(parts))
    if any(a.dtype.newbyteorder("<").str != kind or len(a) != n for a, kind in zip(arrays, types, strict=True)):
        return None
    tokens = arrays[0]
    if not tokens.all() or any((a >= (_FURTHEST, _WIDEST, 2)[k % 3]).any() for k, a in enumerate(arrays[1:])):
        return None
    tensors = {}
    for k, (name, dtype, width) in enumerate(parts):
        tensors[name] = PlacedTensors(dtype, width, *arrays[1 + 3 * k : 4 + 3 * k])
        if ((tokens > 1) & (tensors[name].steps < width)).any():
            return None
    return KeptExamples(keys, tokens, tensors, values)


def _checked_parts(keys: DraftKeys | None, parts: object) -> list[tuple[str, str, int]] | None:
    """Names, dtypes and widths of the kind's tensors, in the order in which files are read."""
    if keys is None or not isinstance(parts, list):
        return None
    descriptors: list[tuple[str, str, int]] = []
    for part in parts:
        if not isinstance(part, list) or len(part) != 3 or type(part[2]) is not int or not isinstance(part[0], str):
            return None
        name, dtype, width = part
        sound = dtype in (FLOATS if name in _STATES else INTEGERS) and 0 < width < 1 << 31
        if not sound or (name not in _STATES and (name not in (IDS, *MASKS) or width != 1)):
            return None
        descriptors.append((name, dtype, width))
    names = [name for name, _, _ in descriptors]
    states = [name for name in names if name in _STATES]
    expected_states = [name for name, key in zip(_STATES, (keys.aux, keys.last), strict=True) if key is not None]
    if (
        len(set(names)) < len(names)
        or not {IDS, *keys.masks} <= set(names)
        or states not in (expected_states, ["last"])
    ):
        return None
    return None if "last" in expected_states and "last" not in states else descriptors


def _checked_values(values: Any, n: int) -> dict[str, list[object]] | None:
    """For each name, a number, a string or None per example."""
    sound = isinstance(values, dict) and all(
        isinstance(column, list)
        and len(column) == n
        and all(x is None or type(x) in (str, int, float, bool) for x in column)
        for column in values.values()
    )
    return values if sound else None
