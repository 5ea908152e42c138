"""Zarr arrays: finds their metadata, which the core parses, and reads small arrays whole."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._json import Fields, exists, utf8
from actshard.base.codes import Remark
from actshard.base.errors import (
    ActshardError,
    FileAccessError,
    FormatError,
    MissingFileError,
    TruncatedFileError,
    UnsupportedError,
)
from actshard.base.location import Location, read_ahead, read_together
from actshard.base.request import Request
from actshard.formats.zarr.meta import ArrayMeta, json_mapping, json_object
from actshard.formats.zarr.package import PackageArray

WRITER = "actshard"
"""First word of the attribute "written_by" of stores that this package wrote."""

MOST_UNSTORED = 256 << 20
"""Memory limit in bytes for fill values of missing chunks in a store's small arrays."""

MOST_RATIO = 256
"""Memory limit of small arrays, in bytes per stored byte."""


_encoded = json.JSONEncoder(allow_nan=False).encode
_HUGE = re.compile(rb"(?<![0-9])[0-9]{309}")
"""An integer with so many digits that float64 may be unable to represent it."""


def native(meta: ArrayMeta, *, scaled: bool = False) -> tuple[Any, ...]:
    """Arguments of the native ``Rows.chunked`` for a 4-D array. ``scaled``: its rows are products of its elements and scales."""
    fill = meta.fill_bytes()
    if scaled and fill is not None:
        if any(fill):
            raise UnsupportedError(
                f"codes with scales: expected the fill value 0, found {meta.fill!r}", path=meta.metadata
            )
        fill = bytes(4)  # zero, as the float32 of the rows
    return (
        meta.folder,
        meta.metadata,
        meta.prefix,
        meta.separator,
        list(meta.shape),
        list(meta.chunks),
        fill,
        meta.swapped,
        decoded_by(meta),
    )


def decoded_by(meta: ArrayMeta) -> tuple[Location, bytes, bool] | Callable[[list[int]], bytes | None] | None:
    """The decoder of an array's chunks: None for plain chunks, the core, or a function that calls the zarr package.

    Raises:
        MissingExtraError: the package is needed but not installed.
    """
    if not meta.how:
        return None
    why = _native.zarr_problem(meta.folder, meta.json)
    return core_decoder(meta) if why is None else PackageArray(meta, why).chunk


def core_decoder(meta: ArrayMeta) -> tuple[Location, bytes, bool]:
    """The decoder of the core, which also reads plain chunks."""
    return meta.folder, meta.json, meta.inner


class ZarrStore:
    """A Zarr store in a folder: its attributes and arrays."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.version = 3 if exists(path / "zarr.json") else 2
        self.attributes: dict[str, object] = {}
        self.warnings: list[Remark] = []
        self._consolidated: dict[str, Any] = {}
        self._consolidated_in = path / (".zmetadata" if self.version == 2 else "zarr.json")
        if self.version == 2 and path.lists:
            read_ahead([file for file in (path / ".zmetadata", path / ".zattrs") if path.is_remote and exists(file)])
        if self.version == 3:
            root = json_object(path / "zarr.json")
            self.attributes = json_mapping(root, "attributes", path / "zarr.json")
            consolidated = root.get("consolidated_metadata")
            if isinstance(consolidated, dict):
                self._consolidated = json_mapping(consolidated, "metadata", path / "zarr.json")
        else:
            if exists(path / ".zmetadata"):
                self._consolidated = json_mapping(json_object(path / ".zmetadata"), "metadata", path / ".zmetadata")
            if exists(path / ".zattrs"):
                self.attributes = json_object(path / ".zattrs")
                listed_attributes = self._consolidated.get(".zattrs", self.attributes)
                if listed_attributes != self.attributes:
                    self.warnings.append(
                        Remark(
                            "consolidated-differs",
                            ".zattrs: consolidated metadata differ from the group's own attributes, which are used",
                        )
                    )
            elif isinstance(self._consolidated.get(".zattrs"), dict):
                self.attributes = self._consolidated[".zattrs"]

    def read_ahead(self, *choices: Sequence[str]) -> None:
        """Reads the metadata of arrays in a remote store, all at once: the arrays of the first choice that has an existing one."""
        if not self.path.is_remote:
            return
        name = "/.zarray" if self.version == 2 else ""
        stored_nodes = {key.removesuffix(name) for key in self._consolidated if key.endswith(name)}
        if not stored_nodes and self.path.lists:
            stored_nodes = {f"arrays/{array_name}" for array_name in self.names("arrays")}
        nodes = next((existing for choice in choices if (existing := [n for n in choice if n in stored_nodes])), [])
        read_ahead([self.path / node / (name[1:] or "zarr.json") for node in nodes])

    def array(self, node: str) -> ArrayMeta | None:
        """An array's metadata; None if there is no such array."""
        name = ".zarray" if self.version == 2 else "zarr.json"
        metadata_path = self.path / node / name
        key = f"{node}/{name}" if self.version == 2 else node
        consolidated = self._consolidated.get(key)
        if exists(metadata_path):
            value = json_object(metadata_path)
            if consolidated is not None and not _same(consolidated, value):
                self.warnings.append(
                    Remark(
                        "consolidated-differs",
                        f"{node}: consolidated metadata differ from the array's own, which are used",
                    )
                )
        elif consolidated is not None:
            metadata_path, value = self._consolidated_in, consolidated
        else:
            return None
        if self.version == 3 and isinstance(value, dict) and value.get("node_type") == "group":
            return None
        fields = Fields(value, metadata_path, "" if metadata_path.name != ".zmetadata" else key)
        return _parse_array(self.path, node, self.version, fields, complete=self.is_complete)

    @property
    def is_ours(self) -> bool:
        """Whether the attributes name this package as the store's writer."""
        writer = self.attributes.get("written_by")
        return isinstance(writer, str) and writer.startswith(f"{WRITER} ")

    @functools.cached_property
    def is_complete(self) -> bool:
        """Whether the store's writer stores every chunk. For other writers, a missing chunk has the fill value.

        The attribute alone does not prove it: merged stores of other writers have it, too, without their missing chunks.
        """
        if not self.is_ours:
            return False
        run = [self.path.parent.parent] if self.path.parent.name == "shards" else []
        for folder in (self.path, *run):
            with contextlib.suppress(FormatError, FileAccessError):
                if (request := Request.read(folder)) is not None:
                    return request.verb in ("create", "convert")
        return False

    def names(self, group: str) -> list[str]:
        """Names of the arrays in a group. Lists the group's folder, but no chunks.

        Raises:
            UnsupportedError: the store can neither list names nor has consolidated metadata.
        """
        names = {
            key.removeprefix(f"{group}/").split("/")[0] for key in self._consolidated if key.startswith(f"{group}/")
        }
        try:
            names |= {entry.name for entry in (self.path / group).entries() if entry.kind == "folder"}
        except MissingFileError:
            pass
        except UnsupportedError:
            if not self._consolidated:
                raise
        return sorted(name for name in names if name.isprintable() and not name.startswith("."))


def _same(a: object, b: object) -> bool:
    """Compares metadata without attributes, which version 3 stores in the same object."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = ({k: v for k, v in x.items() if k not in ("attributes", "consolidated_metadata")} for x in (a, b))
    return bool(a == b)


def _parse_array(store: Location, node: str, version: int, fields: Fields, *, complete: bool) -> ArrayMeta:
    """Parses an array's metadata with the core.

    Raises:
        FormatError: the metadata violate the specification.
        UnsupportedError: structured dtypes, irregular grids, or another unsupported dtype.
    """
    value = {k: v for k, v in fields.value.items() if k not in ("attributes", "consolidated_metadata")}
    try:
        data = _encoded(value).encode()
    except ValueError:  # infinite numbers
        data = b""
    odd = not data or b"\\ud" in data or _HUGE.search(data)
    text = json.dumps(_plain(value), ensure_ascii=False).encode("utf-8", "replace") if odd else data
    try:
        meta = _native.ZarrMeta(version, text, utf8(fields.where))
        dtype = _dtype(meta.dtype, fields)
    except ActshardError as error:
        error.path = Location.at(fields.path).place  # the core receives only the text
        raise
    fill: Any = meta.fill
    if dtype is not None and isinstance(fill, bytes):
        fill = np.frombuffer(fill, dtype)[0]
    elif dtype is not None and dtype.kind in "iu":
        fill = int(fill)
    if not data:
        raise FormatError("expected finite numbers", path=fields.path)
    return ArrayMeta(
        store,
        node,
        Location.at(fields.path),
        tuple(meta.shape),
        tuple(meta.chunks),
        dtype,
        meta.swapped,
        fill,
        meta.prefix,
        meta.separator,
        meta.how,
        meta.inner,
        tuple(meta.codecs),
        tuple(meta.outer),
        data,
        complete,
    )


def _plain(value: object) -> object:
    """Replaces numbers that float64 cannot represent by strings. Any JSON parser accepts the result, and the field is rejected."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, int | float) and not -sys.float_info.max <= value <= sys.float_info.max:
        return str(value)
    return value


def _dtype(name: str | None, fields: Fields) -> np.dtype[np.generic] | None:
    """The numpy dtype of a name, in native byte order."""
    if name == "bfloat16":
        return NUMPY_BY_NAME["BF16"]
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:  # some platforms lack float128
        raise fields.error("dtype", "an element type that numpy supports on this platform") from error


ChunkSizes = Mapping[tuple[int, ...], int]
"""Sizes of existing chunk files by grid position."""


class Spare:
    """Memory budget of a store's small arrays, in addition to the memory that their stored bytes justify."""

    def __init__(self) -> None:
        self.left = MOST_UNSTORED

    def take(self, meta: ArrayMeta, files: Mapping[tuple[int, ...], int]) -> int:
        """Returns the size of an array in memory, and charges the budget.

        Raises:
            FormatError: the array needs more than its stored chunks and the remaining budget allow.
        """
        if meta.dtype is None:  # strings: those that are not stored are copies of the fill value
            item = 64 + len(str(meta.fill).encode(errors="surrogatepass"))
        else:
            item = max(meta.dtype.itemsize, 64 if meta.dtype.kind in "SU" else 1)
        # Chunks are decoded whole, and an array with chunks has at least one.
        size = max(math.prod(meta.shape), math.prod(meta.outer) if files else 0) * item
        stored = sum(files.values())
        beyond = max(0, size - MOST_RATIO * stored)
        if beyond > self.left:
            raise meta.error(
                f"{list(meta.shape)} in chunks of {list(meta.outer)} takes {size} bytes, "
                f"but its {len(files)} chunks have {stored}",
                field="shape",
            )
        self.left -= beyond
        return size


def read_constant(meta: ArrayMeta, files: ChunkSizes) -> int | None:
    """The fill value of an integer array without any chunks; None for other arrays."""
    if meta.dtype is None or meta.dtype.kind not in "iu" or files:
        return None
    _check_is_there(meta)
    return int(meta.fill)


def read_whole(
    meta: ArrayMeta, spare: Spare | None = None, files: ChunkSizes | None = None
) -> NDArray[np.generic] | list[str] | list[bytes]:
    """Reads a small array like :func:`read_array`, but fixed-length strings as a list: of bytes if one of them is no UTF-8 text."""
    array = read_array(meta, spare, files)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "SU":
        return array
    items: list[Any] = array.ravel().tolist()
    try:
        return [_text(item, "strict") for item in items]
    except UnicodeDecodeError:
        return items


def read_array(
    meta: ArrayMeta, spare: Spare | None = None, files: ChunkSizes | None = None
) -> NDArray[np.generic] | list[str]:
    """Reads a small array: a numpy array, or a list for variable-length strings. Only existing chunks are opened.

    Args:
        meta: the array.
        spare: the memory budget shared by the store's arrays.
        files: sizes of the existing chunk files by grid position; None: they are looked up.

    Raises:
        FormatError: the array needs more memory than its chunks account for, or a chunk is damaged.
    """
    if files is None:
        files = meta.stored()
    size = (spare or Spare()).take(meta, files)
    if not files:
        _check_is_there(meta)
    if not meta.how and meta.dtype is not None:
        array = _read_plain(meta, meta.dtype, files)
    elif meta.dtype is not None and (why := _native.zarr_problem(meta.folder, meta.json)) is not None:
        package = PackageArray(meta, why)
        array = _join_chunks(
            meta, meta.dtype, ((coords, package.file(list(coords))) for coords in _inside(meta, files))
        )
    else:
        raw = _native.read_zarr(meta.folder, meta.json, [list(coords) for coords in files], max(size, 1))
        if isinstance(raw, list):
            return [_text(item) for item in raw]
        if meta.dtype is None or len(raw) != math.prod(meta.shape) * meta.dtype.itemsize:
            raise meta.error(f"expected {math.prod(meta.shape)} elements, decoded {len(raw)} bytes")
        array = np.frombuffer(raw, meta.dtype).reshape(meta.shape)
    return array


def _check_is_there(meta: ArrayMeta) -> None:
    """Raises MissingFileError if the array does not exist. Missing chunks alone are fill values."""
    if not exists(meta.metadata):
        raise MissingFileError("expected an array, found none", path=meta.metadata)


def _text(item: str | bytes, errors: str = "backslashreplace") -> str:
    return item if isinstance(item, str) else item.rstrip(b"\0").decode("utf-8", errors)


def _join_chunks(
    meta: ArrayMeta, dtype: np.dtype[np.generic], chunks: Iterable[tuple[tuple[int, ...], bytes | None]]
) -> NDArray[np.generic]:
    """Assembles an array from its chunks inside the grid; missing ones are filled."""
    array = np.full(meta.shape, meta.fill, dtype)
    for coords, raw in chunks:
        region = tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(coords, meta.outer, meta.shape, strict=True)
        )
        if raw is not None:
            part = np.frombuffer(raw, dtype).reshape(meta.outer)
            array[region] = part[tuple(slice(0, s.stop - s.start) for s in region)]
    return array


def _read_plain(meta: ArrayMeta, dtype: np.dtype[np.generic], files: ChunkSizes) -> NDArray[np.generic]:
    stored = dtype.newbyteorder("S") if meta.swapped else dtype
    size = math.prod(meta.chunks) * dtype.itemsize
    places = _inside(meta, files)

    for coords in places:  # all are checked before one is read, because they may be large
        _check_size(meta, coords, files[coords], size)

    def chunks() -> Iterator[tuple[tuple[int, ...], bytes]]:
        for coords, raw in zip(places, read_together([meta.path_of(coords) for coords in places]), strict=True):
            if raw is None:
                raise MissingFileError("expected a chunk, found nothing", path=meta.path_of(coords))
            _check_size(meta, coords, len(raw), size)
            yield coords, np.frombuffer(raw, stored).astype(dtype).tobytes() if meta.swapped else raw

    return _join_chunks(meta, dtype, chunks())


def _check_size(meta: ArrayMeta, coords: tuple[int, ...], stored_size: int, size: int) -> None:
    if stored_size != size:
        kind = TruncatedFileError if stored_size < size else FormatError
        raise kind(
            f"expected {size} bytes, a whole chunk, found {stored_size}",
            path=meta.path_of(coords),
            offset=min(stored_size, size),
        )


def _inside(meta: ArrayMeta, files: ChunkSizes) -> list[tuple[int, ...]]:
    """Positions inside the grid. Files of an older, larger array may lie outside."""
    return [coords for coords in files if all(i < n for i, n in zip(coords, meta.grid, strict=True))]
