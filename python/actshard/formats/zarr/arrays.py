"""Zarr arrays: their metadata, of both versions, and reading the small ones whole.

Sources: the Zarr storage specification 2.0 and the Zarr core specification 3.0 with its regular grid, its default and v2 chunk
keys, and the ``bytes`` and ``sharding_indexed`` codecs. Values are checked as those of any file not to be trusted.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._arguments import NUMPY_BY_NAME
from actshard._json import Fields, exists, show
from actshard.codes import Remark
from actshard.errors import (
    FormatError,
    MissingFileError,
    TruncatedFileError,
    UnsupportedError,
)
from actshard.formats.zarr.meta import ArrayMeta, json_mapping, json_object
from actshard.formats.zarr.package import PackageArray
from actshard.location import Location

MOST_UNSTORED = 256 << 20
"""Bytes of memory that small arrays may take without bytes on the disk: chunks that are not there, fill values."""

MOST_RATIO = 256
"""Bytes of memory that a byte on the disk may become in small arrays."""

_V3_TYPES = {
    "bool": "BOOL",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    **{f"{sign}int{bits}": f"{'U' if sign else 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def native(meta: ArrayMeta) -> tuple[Any, ...]:
    """As the native half's ``Rows.chunked`` takes an array of four dimensions."""
    return (
        meta.folder,
        meta.metadata,
        meta.prefix,
        meta.separator,
        list(meta.shape),
        list(meta.chunks),
        meta.fill_bytes(),
        meta.swapped,
        _decoded_by(meta),
    )


def _decoded_by(meta: ArrayMeta) -> tuple[Location, bytes, bool] | Callable[[list[int]], bytes | None] | None:
    """The decoder of an array's chunks: none, the core, or a function that asks the zarr package.

    Raises:
        MissingExtraError: it has to be the package, which is not installed.
    """
    if not meta.how:
        return None
    why = _native.zarr_problem(meta.folder, meta.json)
    return (meta.folder, meta.json, meta.inner) if why is None else PackageArray(meta, why).chunk


class ZarrStore:
    """A Zarr store in a folder: its attributes, and the arrays in it."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.version = 3 if exists(path / "zarr.json") else 2
        self.attributes: dict[str, Any] = {}
        self.warnings: list[Remark] = []
        self._consolidated: dict[str, Any] = {}
        self._consolidated_in = path / (".zmetadata" if self.version == 2 else "zarr.json")
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
                listed = self._consolidated.get(".zattrs", self.attributes)
                if listed != self.attributes:
                    self.warnings.append(
                        Remark(
                            "consolidated-differs",
                            ".zattrs: consolidated metadata differ from the group's own attributes, which are used",
                        )
                    )
            elif isinstance(self._consolidated.get(".zattrs"), dict):
                self.attributes = self._consolidated[".zattrs"]

    def array(self, node: str) -> ArrayMeta | None:
        """An array's metadata; None if there is no such array."""
        name = ".zarray" if self.version == 2 else "zarr.json"
        own = self.path / node / name
        key = f"{node}/{name}" if self.version == 2 else node
        listed = self._consolidated.get(key)
        if exists(own):
            value = json_object(own)
            if listed is not None and not _same(listed, value):
                self.warnings.append(
                    Remark(
                        "consolidated-differs",
                        f"{node}: consolidated metadata differ from the array's own, which are used",
                    )
                )
        elif listed is not None:
            own, value = self._consolidated_in, listed
        else:
            return None
        if self.version == 3 and isinstance(value, dict) and value.get("node_type") == "group":
            return None
        fields = Fields(value, own, "" if own.name != ".zmetadata" else key)
        return _v2(self.path, node, fields) if self.version == 2 else _v3(self.path, node, fields)

    def names(self, group: str) -> list[str]:
        """Names of the arrays in a group, from its folder: arrays, not chunks, so that the list is short."""
        found = {
            key.removeprefix(f"{group}/").split("/")[0] for key in self._consolidated if key.startswith(f"{group}/")
        }
        with contextlib.suppress(MissingFileError):
            found |= {entry.name for entry in (self.path / group).entries() if entry.kind == "folder"}
        return sorted(name for name in found if name.isprintable() and not name.startswith("."))


def _same(a: Any, b: Any) -> bool:
    """Alike but for attributes, which zarr keeps inside the metadata of version 3."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = ({k: v for k, v in x.items() if k not in ("attributes", "consolidated_metadata")} for x in (a, b))
    return bool(a == b)


def _lengths(fields: Fields, name: str, minimum: int, dims: int | None = None) -> tuple[int, ...]:
    value = fields.value.get(name)
    limit = 1 << 48
    if not isinstance(value, list) or any(type(x) is not int or not minimum <= x < limit for x in value):
        raise fields.error(name, f"a list of integers of at least {minimum}")
    if dims is not None and len(value) != dims:
        raise fields.error(name, f"{dims} integers, one per dimension of the shape")
    if len(value) > 8:
        raise fields.error(name, "at most 8 dimensions")
    return tuple(value)


def _v2(store: Location, node: str, fields: Fields) -> ArrayMeta:
    if fields.value.get("zarr_format", 2) != 2:
        raise fields.error("zarr_format", "2")
    shape = _lengths(fields, "shape", 0)
    chunks = _lengths(fields, "chunks", 1, len(shape))
    dtype, swapped = _v2_type(fields)
    order = fields.value.get("order", "C")
    if order not in ("C", "F"):
        raise fields.error("order", '"C" or "F"')
    separator = fields.value.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise fields.error("dimension_separator", '"." or "/"')
    ids: list[str] = []
    compressor, filters = fields.value.get("compressor"), fields.value.get("filters") or []
    for name, codecs in (("compressor", [compressor] if compressor is not None else []), ("filters", filters)):
        if not isinstance(codecs, list) or any(
            not isinstance(c, dict) or not isinstance(c.get("id"), str) for c in codecs
        ):
            raise fields.error(name, "codecs with an id")
        ids += [c["id"] for c in codecs]
    how = [name[:40] for name in ids] + (["F order"] if order == "F" else [])
    return ArrayMeta(
        store,
        node,
        Location.at(fields.path),
        shape,
        chunks,
        dtype,
        swapped,
        _fill(fields, dtype),
        "",
        separator,
        ", ".join(how),
        False,
        tuple(ids),
        chunks,
        _dumped(fields),
    )


def _dumped(fields: Fields) -> bytes:
    """Metadata for the native half; attributes are the user's, and decide nothing."""
    value = {k: v for k, v in fields.value.items() if k not in ("attributes", "consolidated_metadata")}
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError as error:
        raise FormatError("expected finite numbers", path=fields.path) from error


def _v2_type(fields: Fields) -> tuple[np.dtype[Any] | None, bool]:
    code = fields.value.get("dtype")
    if code == "|O":
        return None, False
    if code == "bfloat16":
        return NUMPY_BY_NAME["BF16"], False
    if isinstance(code, list):
        raise UnsupportedError(f"field 'dtype': structured elements are not read, found {show(code)}", path=fields.path)
    if not isinstance(code, str) or not re.fullmatch(r"[<>|=][biufcSU]\d{1,6}", code):
        raise fields.error("dtype", 'an element type such as "<f2"')
    try:
        found = np.dtype(code)
    except TypeError as error:
        raise fields.error("dtype", 'an element type such as "<f2"') from error
    return found.newbyteorder("="), not found.isnative


def _v3(store: Location, node: str, fields: Fields) -> ArrayMeta:
    if fields.value.get("zarr_format") != 3:
        raise fields.error("zarr_format", "3")
    shape = _lengths(fields, "shape", 0)
    grid = Fields(fields.value.get("chunk_grid"), fields.path, "chunk_grid")
    if grid.value.get("name") != "regular":
        raise UnsupportedError(
            f"field 'chunk_grid.name': only regular grids are read, found {show(grid.value.get('name'))}",
            path=fields.path,
        )
    regular = Fields(grid.value.get("configuration"), fields.path, "chunk_grid.configuration")
    chunks = _lengths(regular, "chunk_shape", 1, len(shape))

    keys = Fields(fields.value.get("chunk_key_encoding", {"name": "default"}), fields.path, "chunk_key_encoding")
    encoding = keys.value.get("name", "default")
    configuration = keys.value.get("configuration") or {}
    separator = (
        configuration.get("separator", "/" if encoding == "default" else ".")
        if isinstance(configuration, dict)
        else None
    )
    if encoding not in ("default", "v2") or separator not in (".", "/"):
        raise fields.error("chunk_key_encoding", 'the encoding "default" or "v2"')

    data_type = fields.value.get("data_type")
    if data_type in ("string", "bytes", "variable_length_bytes", "variable_length_utf8"):
        dtype: np.dtype[Any] | None = None
    elif isinstance(data_type, str) and data_type in _V3_TYPES:
        dtype = NUMPY_BY_NAME[_V3_TYPES[data_type]]
    else:
        raise UnsupportedError(f"field 'data_type': not read: {show(data_type)}", path=fields.path)

    codecs = [Fields(c, fields.path, f"codecs[{i}]") for i, c in enumerate(_list(fields, "codecs"))]
    names = [str(c.value.get("name"))[:40] for c in codecs]
    swapped = inner = False
    outer = chunks
    if names == ["bytes"]:
        configuration = codecs[0].value.get("configuration") or {}
        endian = configuration.get("endian", "little") if isinstance(configuration, dict) else None
        if endian not in ("little", "big"):
            raise codecs[0].error("configuration", 'the endian "little" or "big"')
        how, swapped = "", endian == "big"
    elif names == ["sharding_indexed"]:
        shard = Fields(codecs[0].value.get("configuration"), fields.path, "codecs[0].configuration")
        chunks = _lengths(shard, "chunk_shape", 1, len(shape))
        if any(a % b for a, b in zip(outer, chunks, strict=True)):
            raise shard.error("chunk_shape", f"a divisor of the shard's shape {list(outer)}")
        how, inner = "sharding", True
    else:
        how = ", ".join(name for name in names if name != "bytes")
    prefix = f"c{separator}" if encoding == "default" else ""
    return ArrayMeta(
        store,
        node,
        Location.at(fields.path),
        shape,
        chunks,
        dtype,
        swapped,
        _fill(fields, dtype),
        prefix,
        separator,
        how,
        inner,
        tuple(_names(fields.value["codecs"])),
        outer,
        _dumped(fields),
    )


def _names(codecs: Any, depth: int = 0) -> Iterator[str]:
    """Names of codecs, and of those inside sharding."""
    for codec in codecs if isinstance(codecs, list) and depth < 8 else ():
        if isinstance(codec, str):
            yield codec
        elif isinstance(codec, dict):
            yield str(codec.get("name"))
            configuration = codec.get("configuration")
            if isinstance(configuration, dict):
                yield from _names(configuration.get("codecs"), depth + 1)
                yield from _names(configuration.get("index_codecs"), depth + 1)


def _list(fields: Fields, name: str) -> list[Any]:
    value = fields.value.get(name)
    if not isinstance(value, list) or not value:
        raise fields.error(name, "a non-empty list")
    return value


def _fill(fields: Fields, dtype: np.dtype[Any] | None) -> Any:
    """The fill value as numpy takes it. No value at all is read as zero, as zarr-python does."""
    value = fields.value.get("fill_value")
    if dtype is None or dtype.kind in "SU":
        return ""
    if value is None:
        return 0
    if isinstance(value, str):
        words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
        if value in words and dtype.kind not in "biu":
            return words[value]
        digits = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", value)  # version 3: the bits themselves
        if digits is not None and len(digits[1]) == 2 * dtype.itemsize:
            return np.frombuffer(bytes.fromhex(digits[1])[::-1], dtype)[0]
        raise fields.error("fill_value", f"a value of {dtype}")
    if dtype.kind == "b" and isinstance(value, bool):
        return value
    if dtype.kind in "iu" and (type(value) is int or (type(value) is float and value.is_integer())):
        info = np.iinfo(dtype)
        if info.min <= value <= info.max:
            return int(value)
    if dtype.kind not in "biu" and type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    raise fields.error("fill_value", f"a value of {dtype}")


class Spare:
    """Memory that the small arrays of a store may take beyond what their bytes on the disk account for."""

    def __init__(self) -> None:
        self.left = MOST_UNSTORED

    def take(self, meta: ArrayMeta, files: Mapping[tuple[int, ...], int]) -> int:
        """Bytes that an array takes in memory.

        Raises:
            FormatError: it claims more than the chunks that are there, and what is left, account for.
        """
        item = 64 if meta.dtype is None else max(meta.dtype.itemsize, 64 if meta.dtype.kind in "SU" else 1)
        # A chunk is decoded whole, and an array has at least one.
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


def read_constant(meta: ArrayMeta) -> int | None:
    """The fill value of an array of integers of which no chunk is there."""
    if meta.dtype is None or meta.dtype.kind not in "iu" or meta.chunk_files():
        return None
    _check_is_there(meta)
    return int(meta.fill)


def read_whole(meta: ArrayMeta, spare: Spare | None = None) -> NDArray[Any] | list[str]:
    """A small array as :func:`read_array` reads it, strings of a fixed length as a list too."""
    found = read_array(meta, spare)
    if isinstance(found, np.ndarray) and found.dtype.kind in "SU":
        return [_text(item) for item in found.ravel().tolist()]
    return found


def read_array(meta: ArrayMeta, spare: Spare | None = None) -> NDArray[Any] | list[str]:
    """A small array: as numpy, strings of any length as a list. Only chunks that are there are looked for.

    Args:
        meta: the array.
        spare: what it shares with the other arrays of its store.

    Raises:
        FormatError: it claims more than the chunks that are there account for, or one of them is damaged.
    """
    files = meta.chunk_files()
    size = (spare or Spare()).take(meta, files)
    if not files:
        _check_is_there(meta)
    if not meta.how and meta.dtype is not None:
        found = _read_plain(meta, meta.dtype, files)
    elif meta.dtype is not None and (why := _native.zarr_problem(meta.folder, meta.json)) is not None:
        package = PackageArray(meta, why)
        found = _joined(meta, meta.dtype, files, lambda at: package.file(list(at)))
    else:
        raw = _native.read_zarr(meta.folder, meta.json, [list(at) for at in files], max(size, 1))
        if isinstance(raw, list):
            return [_text(item) for item in raw]
        if meta.dtype is None or len(raw) != math.prod(meta.shape) * meta.dtype.itemsize:
            raise meta.error(f"expected {math.prod(meta.shape)} elements, decoded {len(raw)} bytes")
        found = np.frombuffer(raw, meta.dtype).reshape(meta.shape)
    return found


def _check_is_there(meta: ArrayMeta) -> None:
    """Chunks that are not there are the fill value; an array that is not there is an error."""
    if not exists(meta.metadata):
        raise MissingFileError("expected an array, found nothing", path=meta.metadata)


def _text(item: str | bytes) -> str:
    return item if isinstance(item, str) else item.rstrip(b"\0").decode("utf-8", "backslashreplace")


def _joined(
    meta: ArrayMeta,
    dtype: np.dtype[Any],
    files: Mapping[tuple[int, ...], int],
    chunk: Callable[[tuple[int, ...]], bytes | None],
) -> NDArray[Any]:
    """An array of its chunks; the others hold the fill value."""
    made = np.full(meta.shape, meta.fill, dtype)
    for at in files:
        inside = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, meta.outer, meta.shape, strict=True))
        if all(s.start < s.stop for s in inside) and (raw := chunk(at)) is not None:
            part = np.frombuffer(raw, dtype).reshape(meta.outer)
            made[inside] = part[tuple(slice(0, s.stop - s.start) for s in inside)]
    return made


def _read_plain(meta: ArrayMeta, dtype: np.dtype[Any], files: Mapping[tuple[int, ...], int]) -> NDArray[Any]:
    stored = dtype.newbyteorder("S") if meta.swapped else dtype
    size = math.prod(meta.chunks) * dtype.itemsize

    def chunk(at: tuple[int, ...]) -> bytes:
        path = meta.path_of(at)
        if files[at] != size:
            kind = TruncatedFileError if files[at] < size else FormatError
            raise kind(
                f"expected {size} bytes, a whole chunk, found {files[at]}", path=path, offset=min(files[at], size)
            )
        raw = path.read(0, size)
        return np.frombuffer(raw, stored).astype(dtype).tobytes() if meta.swapped else raw

    return _joined(meta, dtype, files, chunk)
