"""Examples of draft-model training in files of ``torch.save``: one dict of tensors per file.

::

    input_ids, loss_mask, attention_mask    (S,) or (1, S) integers
    states of layers, concatenated          (S, L * H) or (1, S, L * H)
    last hidden state                       (S, H) or (1, S, H)

SpecForge, Model-Optimizer, AngelSlim and EAGLE name the tensors differently (:class:`DraftKeys`). Tensors may be views of a shared
storage, so strides and offsets are read from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actshard.base.containers import RefusedObject, StoredArray, TorchFile, read_torch, refusal
from actshard.base.errors import ActshardError, FileAccessError, FormatError, MissingFileError
from actshard.base.location import Location

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
