"""Files of other programs: those of ``torch.save``, read without torch, and footers of Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import ParquetFooter, RefusedObject, StoredArray
from actshard.base._arguments import stored
from actshard.base.errors import ActshardError, FormatError, UnsafePickleError, UnsupportedError
from actshard.base.location import Location

__all__ = ["SUFFIXES", "ParquetFooter", "RefusedObject", "StoredArray", "TorchFile", "read_torch", "refusal"]


SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pt.gz", ".pth.gz", ".ckpt.gz")
"""Usual names of files of ``torch.save``."""


@dataclass(frozen=True)
class TorchFile:
    """A file of ``torch.save``.

    Attributes:
        path: the file.
    """

    path: Location
    _native: _native.TorchContents = field(repr=False)

    @cached_property
    def value(self) -> object:
        """The saved object: dicts, lists, tuples, sets, numbers, strings, bytes.

        Tensors are :class:`~actshard._native.StoredArray`: ``dtype`` (safetensors name), ``shape``, ``strides`` (in elements),
        ``offset`` (bytes), ``swapped``, ``deflated``. Arrays of numpy too, unless their pickle stores escaped bytes; these are read
        as numpy arrays. Any other object is a :class:`~actshard._native.RefusedObject` with its ``name``, and with ``global_at``,
        the offset of its class or function, if an unpickler would import one that tensors do not need. A defaultdict is a dict.

        Raises:
            FormatError, UnsupportedError: values nested more than 64 deep, or that contain themselves.
        """
        return self._native.value()

    @property
    def is_legacy(self) -> bool:
        """Whether the file has the form before torch 1.6."""
        return self._native.is_legacy

    @property
    def is_gzipped(self) -> bool:
        """Whether the file is gzipped. Offsets are then those in the inflated file, which this object keeps in memory."""
        return self._native.is_gzipped

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Bytes of all storages, and bytes of the distinct tensors in them: saving a slice saves all of its storage."""
        return self._native.sizes()

    @cached_property
    def refused(self) -> dict[str, RefusedObject]:
        """Objects that are not built, by their keys and positions. Each is there once, even if it occurs several times."""
        objects: dict[str, RefusedObject] = {}
        seen: set[int] = set()
        stack: list[tuple[tuple[object, ...], object]] = [((), self.value)]
        while stack:
            steps, value = stack.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, RefusedObject):
                objects[".".join(map(str, steps)) or "the saved object"] = value
            elif isinstance(value, dict):
                stack += [((*steps, _key(key)), inner) for key, inner in reversed(value.items())]
                stack += [((*steps, "key"), key) for key in value if isinstance(key, RefusedObject)]
            elif isinstance(value, list | tuple | set):
                stack += [((*steps, number), inner) for number, inner in enumerate(value)][::-1]
        return objects

    def damaged(self) -> list[int]:
        """Offsets of storages whose content differs from their CRC-32. Reads all of the file."""
        return self._native.damaged()

    def find(self, steps: Sequence[str | int]) -> object:
        """Returns the value at keys and positions: ``find(["hidden_states", 3])``.

        A step is a key of a dict (a text of digits also finds an integer key, and ``"('resid', 3)"`` a tuple) or a position in a
        list or tuple.

        Raises:
            FormatError: there is no such value; the message lists what there is.
        """
        value = self.value
        for number, step in enumerate(steps):
            inner = _step(value, step)
            if inner is _NOTHING:
                key_path = ".".join(map(str, steps[:number])) or "the saved object"
                raise FormatError(f"{key_path}: expected {step!r}, found {_keys(value)}", path=self.path)
            value = inner
        return value

    def array(self, value: object) -> NDArray[np.generic]:
        """Returns a tensor's elements in C order and native byte order. A copy.

        Args:
            value: a value of this file: a tensor, a numpy array or scalar, a number, or a list of these.

        Raises:
            UnsupportedError: an object that only torch can make, or an object that is not an array.
        """
        if isinstance(value, StoredArray):
            array = np.frombuffer(self._native.read(value), stored(value.dtype))
            return array.reshape(value.shape)
        if isinstance(value, RefusedObject):
            raise refusal(value, "", self.path)
        if isinstance(value, list | tuple) and all(isinstance(member, StoredArray) for member in value) and value:
            return np.stack([self.array(member) for member in value])
        if isinstance(value, np.ndarray | np.generic | int | float | bool | list | tuple):
            array = np.asarray(value)
            if array.dtype != object:
                return array
        raise UnsupportedError(f"expected a tensor, found {type(value).__name__}", path=self.path)


def refusal(value: RefusedObject, where: str, path: Location) -> ActshardError:
    """The error of reading an object that is not built; ``where`` are its keys and positions."""
    where = f"{where}: " if where else ""
    if value.global_at is None:
        return UnsupportedError(f"{where}expected a plain tensor, found {value.name}", path=path)
    return UnsafePickleError(
        f"{where}names the global {value.name}, which tensors and numpy arrays do not need; nothing was imported or run",
        path=path,
        offset=value.global_at,
    )


_NOTHING = object()


def _step(value: object, step: str | int) -> object:
    if isinstance(value, dict):
        if step in value:
            return value[step]
        number = int(step) if isinstance(step, str) and step.isdecimal() else step
        if number in value:
            return value[number]
        return next((inner for key, inner in value.items() if isinstance(key, tuple) and str(key) == step), _NOTHING)
    if isinstance(value, list | tuple) and str(step).isdecimal() and int(step) < len(value):
        return value[int(step)]
    return _NOTHING


def _key(key: object) -> object:
    return key.name if isinstance(key, RefusedObject) else key


def _keys(value: object) -> str:
    if isinstance(value, dict):
        shown = ", ".join(repr(_key(key))[:40] for key in list(value)[:12])
        return f"the keys {shown}" + (", ..." if len(value) > 12 else "")
    if isinstance(value, list | tuple):
        return f"{len(value)} items"
    if isinstance(value, StoredArray):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def read_torch(paths: Iterable[Location], limit: int = 1 << 30) -> list[TorchFile]:
    """Reads files of ``torch.save``, in parallel: their objects, but not the bytes of tensors.

    Args:
        paths: files, local or remote.
        limit: maximum size of an inflated gzip file in bytes, if larger than the default for its compressed size.

    Raises:
        FormatError, UnsupportedError, UnsafePickleError, TruncatedFileError: a file is damaged, contains code, or has an
            unsupported form.
    """
    places = list(paths)
    return [TorchFile(path, native) for path, native in zip(places, _native.read_torch(places, limit), strict=True)]


# Footers of Parquet files: row groups, and the offsets, sizes and ranges of their columns.
#
# The core parses them, because pyarrow's accessors of a column chunk (``metadata.row_group(i).column(j)``) end the process for
# some damaged footers. pyarrow reads schemas and values: its errors for the same files are Python exceptions.


_END = 8
"""Bytes after the footer: its length, and a mark."""
_FIRST = 64 << 10
"""Bytes of the first read, which contain most footers."""


def read_footer(path: Location) -> ParquetFooter:
    """Reads and checks the footer of a Parquet file, in one read or two. Values and the headers of pages are not read.

    Raises:
        MissingFileError, NotAFileError, FileAccessError: the file cannot be read.
        FormatError, TruncatedFileError: the footer is damaged; the error names the byte.
        UnsupportedError: the file is encrypted.
    """
    size = path.regular("open").size
    start = max(size - _FIRST, 0)
    tail = path.read(start, size - start)
    try:
        begin = _native.parquet_footer_begin(tail[-_END:], size)
        if begin < start:
            start = begin
            tail = path.read(start, size - start)
        return _native.parquet_footer(tail[begin - start : -_END], begin)
    except ActshardError as error:
        error.path = error.path or path.place
        raise
