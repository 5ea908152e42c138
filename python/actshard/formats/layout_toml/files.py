"""The files of a described folder: arrays and values by keys and positions, for all containers.

Torch files, ``.npy``, ``.npz`` and safetensors are parsed by the core; HDF5 needs the ``h5py`` package.
Files with other names are raw; the description contains their dtype and shape.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import StoredArray
from actshard.base._arguments import stored
from actshard.base._json import Fields, read_json, read_lines
from actshard.base.codes import Remark
from actshard.base.containers import RefusedObject, TorchFile, read_torch, refusal
from actshard.base.errors import ActshardError, FormatError, MissingExtraError, MissingFileError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.kept import Listing
from actshard.formats.layout_toml.description import Name, Part, Pattern
from actshard.formats.numbered import MOST_MISSING, TOTAL, FileKey, Gap, Numbered, bounds_of, renumbered

if TYPE_CHECKING:
    import pyarrow as pa

_TORCH = (".pt", ".pth", ".ckpt", ".pt.gz", ".pth.gz", ".ckpt.gz", ".bin.gz")
_MOST_TEXT = 1 << 30


def kind_of(name: str, part: Part) -> str:
    """The container of a file, by its name: "torch", "npy", "npz", "safetensors", "h5" or "raw"."""
    lower = name.lower()
    if lower.endswith(_TORCH) or (lower.endswith(".bin") and part.dtype is None and part.shape is None):
        return "torch"
    for suffix, kind in (
        (".npy", "npy"),
        (".npz", "npz"),
        (".safetensors", "safetensors"),
        (".h5", "h5"),
        (".hdf5", "h5"),
    ):
        if lower.endswith(suffix):
            return kind
    return "raw"


class OpenedFile(ABC):
    """A parsed file. :meth:`find` returns a :class:`StoredArray` or a plain value."""

    gzipped = False
    metadata: Mapping[str, str] = {}

    def __init__(self, path: Location) -> None:
        self.path = path

    @abstractmethod
    def find(self, steps: Sequence[Name]) -> Any:
        """The value at keys and positions. Raises FormatError if there is none."""

    @abstractmethod
    def names(self, steps: Sequence[Name]) -> list[str]:
        """The keys or positions that can follow these steps, as strings."""

    def holding(self, steps: Sequence[Name]) -> OpenedFile:
        """The file with the value at keys and positions: this one, or one of its shards."""
        return self

    def is_of_bits(self, steps: Sequence[Name]) -> bool:
        """Whether elements are bytes of a type that the file does not name."""
        return False

    def array(self, value: Any) -> NDArray[Any]:
        """The elements of a value that :meth:`find` returned. A copy."""
        if isinstance(value, StoredArray):
            array = np.frombuffer(_native.read_array(self.path, value), stored(value.dtype))
            return array.reshape(value.shape)
        array = np.asarray(value)
        if array.dtype == object:
            raise UnsupportedError(f"expected an array, found {type(value).__name__}", path=self.path)
        return array


class _TorchOpened(OpenedFile):
    def __init__(self, file: TorchFile) -> None:
        super().__init__(file.path)
        self.file = file
        self.gzipped = file.is_gzipped

    def find(self, steps: Sequence[Name]) -> Any:
        value = self.file.find(steps)
        if isinstance(value, RefusedObject):
            raise refusal(value, ".".join(map(str, steps)) or "the saved object", self.path)
        return value

    def names(self, steps: Sequence[Name]) -> list[str]:
        value = self.file.find(steps)
        if isinstance(value, dict):
            return [str(key) for key in value if type(key) in (int, str, tuple)]
        return [str(n) for n in range(len(value))] if isinstance(value, list | tuple) else []

    def array(self, value: Any) -> NDArray[Any]:
        return self.file.array(value)


class _ArraysOpened(OpenedFile):
    """Named arrays: npz, safetensors, or one array without a name: npy, raw."""

    def __init__(self, path: Location, arrays: dict[str, tuple[StoredArray, str]], metadata: dict[str, str]) -> None:
        super().__init__(path)
        self.arrays = arrays
        self.metadata = metadata

    def find(self, steps: Sequence[Name]) -> Any:
        name = ".".join(map(str, steps))
        if name not in self.arrays:
            existing = ", ".join(repr(key) for key in list(self.arrays)[:12]) or "nothing"
            raise FormatError(f"expected an array named {name!r}, found {existing}", path=self.path)
        array, kind = self.arrays[name]
        if kind == "small":
            raise UnsupportedError(
                f"{name}: elements of {array.dtype} are smaller than a byte, and are not read", path=self.path
            )
        return self._text(array) if kind == "text" else array

    def is_of_bits(self, steps: Sequence[Name]) -> bool:
        _, kind = self.arrays.get(".".join(map(str, steps)), (None, ""))
        return kind == "void"

    def _text(self, array: StoredArray) -> Any:
        """Decodes numpy strings: code points (U) or bytes (S), padded with zeros."""
        values = self.array(array)
        codec = "U" if array.dtype == "U32" else "S"
        width = values.shape[-1] * values.itemsize
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        try:
            texts = np.frombuffer(flat.tobytes(), f"{codec}{values.shape[-1]}") if width else np.zeros(0, codec)
            strings = texts.reshape(values.shape[:-1])
            return (strings if codec == "U" else np.char.decode(strings, "utf-8")).tolist()
        except (ValueError, UnicodeError) as error:
            raise FormatError(f"expected strings, found other bytes: {error}", path=self.path) from error

    def names(self, steps: Sequence[Name]) -> list[str]:
        front = "".join(f"{step}." for step in steps)
        return [name[len(front) :] for name in self.arrays if name.startswith(front)]


def _raw(path: Location, part: Part, *, is_partial: bool = False) -> OpenedFile:
    """Opens a file without a header. Its size must fit the shape, in which one axis may be -1."""
    if part.dtype is None:
        raise FormatError(f"{part.table}: expected 'dtype': {path.name} is a raw file", path=path)
    size = path.regular("read").size - part.offset
    item = stored(part.dtype).itemsize
    shape = list(part.shape if part.shape is not None else (-1,))
    known_bytes = math.prod(n for n in shape if n >= 0) * item
    if -1 in shape and known_bytes and size >= 0 and (is_partial or size % known_bytes == 0):
        shape[shape.index(-1)] = size // known_bytes
    elif -1 in shape and size == 0 and not known_bytes:
        shape[shape.index(-1)] = 0
    lacking = math.prod(shape) * item - size
    if -1 in shape or lacking < 0 or (lacking and not is_partial):
        need = f"a multiple of {known_bytes}" if -1 in shape else str(math.prod(shape) * item)
        raise FormatError(
            f"{part.table}: shape {shape} of {part.dtype}: expected {need} bytes, found {size}", path=path
        )
    ordered = shape if part.order == "C" else shape[::-1]
    strides = list(itertools.accumulate([max(n, 1) for n in ordered[:0:-1]], operator.mul, initial=1))[::-1]
    strides = strides if part.order == "C" else strides[::-1]
    array = StoredArray(part.dtype, shape, strides if shape else [], part.offset, part.swapped)
    return _ArraysOpened(path, {"": (array, "numbers")}, {})


_FILTERS = {1: "deflate", 2: "shuffle", 3: "checksum"}
"""Filters of HDF5 that are undone, by their numbers."""


class _Hdf5Opened(OpenedFile):
    """Datasets of an HDF5 file, found by h5py: contiguous ones are read in place, chunks are decoded."""

    def __init__(self, path: Location) -> None:
        super().__init__(path)
        try:
            import h5py
        except ImportError as error:
            raise MissingExtraError.of("an HDF5 file", "hdf5", path) from error
        self.sets: dict[str, Any] = {}
        try:
            with h5py.File(path.local, "r") as file:
                self._base = int(file.userblock_size)
                file.visititems(self._note)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise FormatError(f"expected an HDF5 file: {error}", path=path) from error
        _check_hdf5_end(path, self._base)

    def _note(self, name: str, value: Any) -> None:
        import h5py

        if not isinstance(value, h5py.Dataset):
            return
        try:
            swapped = value.dtype.byteorder == ">"
            dtype_name = _native_name(value.dtype.newbyteorder("="))
        except ActshardError:
            self.sets[name] = f"{name}: unsupported dtype {value.dtype}"
            return
        if value.chunks is not None and value.size:
            self.sets[name] = self._chunked(name, value, dtype_name, swapped)
            return
        offset = value.id.get_offset()
        if offset is None or value.external:
            self.sets[name] = f"{name}: an empty or external dataset; write it again with its data"
            return
        shape = list(value.shape)
        strides = list(itertools.accumulate([max(n, 1) for n in shape[:0:-1]], operator.mul, initial=1))[::-1]
        self.sets[name] = StoredArray(dtype_name, shape, strides if shape else [], offset, swapped)

    def _chunked(self, name: str, value: Any, dtype_name: str, swapped: bool) -> StoredArray | str:
        """A dataset in chunks, or why it is not read."""
        properties = value.id.get_create_plist()
        codes = [properties.get_filter(n)[0] for n in range(properties.get_nfilters())]
        if unread := [code for code in codes if code not in _FILTERS]:
            return f"{name}: chunks with the filter {unread[0]}; h5repack -f GZIP=1 FILE NEW_FILE writes chunks that are read"
        chunks: list[tuple[Sequence[int], int, int, int]] = []

        def add(info: Any) -> None:
            chunks.append((tuple(info.chunk_offset), info.byte_offset, info.size, info.filter_mask))

        value.id.chunk_iter(add)
        if self._base and chunks:
            # Versions of HDF5 differ in whether offsets of chunks count from the end of the user block.
            first, at, size, _ = chunks[0]
            _, content = value.id.read_direct_chunk(first)
            shifts = (shift for shift in (0, self._base) if self.path.read(at + shift, size) == content)
            shift = next(shifts, None)
            if shift is None:
                return f"{name}: chunks after a user block whose offsets HDF5 does not return; h5repack FILE NEW_FILE removes it"
            chunks = [(first, at + shift, size, mask) for first, at, size, mask in chunks]
        expected = math.prod(-(-n // size) for n, size in zip(value.shape, value.chunks, strict=True))
        if len(chunks) < expected and np.asarray(value.fillvalue).tobytes().strip(b"\0"):
            return f"{name}: {expected - len(chunks)} of {expected} chunks were never written, and stand for {value.fillvalue}"
        inside = [chunk for chunk in chunks if all(first < n for first, n in zip(chunk[0], value.shape, strict=True))]
        names = [_FILTERS[code] for code in codes]
        return StoredArray.chunked(dtype_name, list(value.shape), swapped, list(value.chunks), names, inside)

    def find(self, steps: Sequence[Name]) -> Any:
        name = "/".join(map(str, steps))
        entry = self.sets.get(name)
        if isinstance(entry, str):
            raise UnsupportedError(entry, path=self.path)
        if entry is None:
            raise FormatError(f"expected a dataset {name!r}, found {', '.join(list(self.sets)[:12])}", path=self.path)
        return entry

    def names(self, steps: Sequence[Name]) -> list[str]:
        front = "".join(f"{step}/" for step in steps)
        return list(dict.fromkeys(name[len(front) :].split("/")[0] for name in self.sets if name.startswith(front)))


def _check_hdf5_end(path: Location, base: int) -> None:
    """Raises FormatError if bytes follow the end that the superblock records."""
    size = path.regular("read").size
    head = path.read(base, min(96, size - base))
    width = {0: 13, 1: 13, 2: 9, 3: 9}.get(head[8])
    if width is None or head[width] != 8:
        return
    fields = {0: 24, 1: 28, 2: 12, 3: 12}[head[8]]
    end = int.from_bytes(head[fields + 16 : fields + 24], "little")
    if size > end and size != end + base:  # a user block that was put in front later does not change the recorded end
        raise FormatError(f"expected the end of the file, found {size - end} more bytes", path=path, offset=end)


def _native_name(dtype: np.dtype[Any]) -> str:
    from actshard.base._arguments import name_of

    return name_of(dtype)


class ShardedFile(OpenedFile):
    """Files that together have the arrays of one, each array in one of them. Its path and metadata are those of the first."""

    def __init__(self, files: Sequence[OpenedFile]) -> None:
        super().__init__(files[0].path)
        self.files = files
        self.metadata = files[0].metadata

    def holding(self, steps: Sequence[Name]) -> OpenedFile:
        holders = list(self.files) if not steps else [file for file in self.files if _has(file, steps)]
        if len(holders) > 1:
            raise FormatError(
                f"{'.'.join(map(str, steps)) or 'an array without a name'}: expected it in one of the files, found it in "
                f"{holders[0].path.name} and {holders[1].path.name}",
                path=self.path,
            )
        return holders[0] if holders else self.files[0]

    def find(self, steps: Sequence[Name]) -> Any:
        return self.holding(steps).find(steps)

    def names(self, steps: Sequence[Name]) -> list[str]:
        every: dict[str, None] = {}
        for file in self.files:
            with contextlib.suppress(FormatError):  # the keys of another file
                every |= dict.fromkeys(file.names(steps))
        return list(every)


def _has(file: OpenedFile, steps: Sequence[Name]) -> bool:
    try:
        return str(steps[-1]) in file.names(steps[:-1])
    except FormatError:
        return False


def open_files(
    paths: Sequence[Location], part: Part, limit: int = 1 << 30, *, is_partial: bool = False
) -> list[OpenedFile]:
    """Parses files in parallel. Reads no elements. With ``is_partial``, ``.npy``, safetensors and raw files may be truncated."""
    kinds = {kind_of(path.name, part) for path in paths}
    files_by_path: dict[Location, OpenedFile] = {}
    for kind in sorted(kinds):
        these = [path for path in paths if kind_of(path.name, part) == kind]
        if kind == "torch":
            files_by_path |= {file.path: _TorchOpened(file) for file in read_torch(these, limit)}
        elif kind == "raw":
            files_by_path |= {path: _raw(path, part, is_partial=is_partial) for path in these}
        elif kind == "h5":
            files_by_path |= {path: _Hdf5Opened(path) for path in these}
        else:
            headers = _native.read_arrays(these, kind, is_partial)
            for path, (arrays, metadata) in zip(these, headers, strict=True):
                files_by_path[path] = _ArraysOpened(path, {name: (a, k) for name, a, k in arrays}, dict(metadata))
    return [files_by_path[path] for path in paths]


def viewed(file: OpenedFile, value: Any, part: Part) -> NDArray[Any]:
    """The elements of a value, reinterpreted as the part's dtype if that is given."""
    if isinstance(value, StoredArray) and part.dtype is not None and value.dtype != part.dtype:
        value = value.viewed(part.dtype)
    return file.array(value)


def matches(root: Location, pattern: Pattern, listing: Listing | None = None) -> list[tuple[dict[str, Name], Location]]:
    """Files whose names match a pattern, sorted by the captures batch, example and layer."""
    entries = _entries if listing is None else listing.entries
    exists = Location.exists if listing is None else listing.exists
    candidates = [("", root)]
    parts = pattern.text.split("/")
    for depth, text in enumerate(parts):
        last = depth == len(parts) - 1
        inner: list[tuple[str, Location]] = []
        for name, folder in candidates:
            if "{" not in text:
                inner.append((f"{name}{text}", folder / text))
                continue
            names = entries(folder, text.partition("{")[0])
            inner += [(f"{name}{entry}", folder / entry) for entry in names]
        candidates = (
            inner if last else [(f"{name}/", location) for name, location in inner if location.kind() == "folder"]
        )
    captured_files: list[tuple[dict[str, Name], Location]] = []
    for name, location in candidates:
        values = pattern.match(name)
        if values is not None and ("{" in parts[-1] or exists(location)):
            captured_files.append((values, location))
    captured_files.sort(key=lambda captured_file: order_of(captured_file[0]))
    for (before, a), (after, b) in itertools.pairwise(captured_files):
        if before == after:
            raise FormatError(f"two files are {_captures(after)}: {a.name} and {b.name}", path=root)
    return captured_files


def array_files(
    root: Location, pattern: Pattern, listing: Listing | None = None
) -> list[tuple[dict[str, Name], Location]]:
    """As :func:`matches`, with the files that an index names in place of the index.

    Raises:
        MissingFileError: a file that an index names does not exist.
    """
    files = matches(root, pattern, listing)
    if not is_shard_index(pattern.text):
        return files
    exists = Location.exists if listing is None else listing.exists
    expanded = []
    for captured, path in files:
        for shard in dict.fromkeys(shard_index(path).values()):
            if not exists(shard):
                raise missing(shard, f"the file that {path.name} names")
            expanded.append((dict(captured), shard))
    return expanded


def is_shard_index(name: str) -> bool:
    """Whether a file names the file of each tensor, as ``*.safetensors.index.json`` of transformers."""
    return name.endswith(".safetensors.index.json")


def shard_index(path: Location) -> dict[str, Location]:
    """The file of each tensor, by the ``weight_map`` of an index.

    Raises:
        FormatError: it is not an index, or names a file outside of its folder.
    """
    fields = Fields(read_json(path), path)
    names = fields.value.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise fields.error("weight_map", "the file of each tensor")
    for name in names.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or {"/", "\\"} & set(name):
            raise fields.error("weight_map", "names of .safetensors files in its folder")
    return {tensor: path.parent / name for tensor, name in names.items()}


def missing_files(
    root: Location, pattern: Pattern, files: Iterable[tuple[Mapping[str, Name], Location]]
) -> list[Remark]:
    """A warning about gaps in the numbers of files, by batch and example, or of shards. Layers are no series."""
    numbered, name = _series(root, pattern, files)
    return numbered.remarks(name)


def absent_files(
    root: Location, pattern: Pattern, files: Iterable[tuple[Mapping[str, Name], Location]]
) -> list[tuple[dict[str, Name], Location]]:
    """The captures of files that are missing between others, and one of the paths where each would be.

    Raises:
        FormatError: many more numbers have no file than have one.
    """
    numbered, name = _series(root, pattern, files)
    if numbered.missing > numbered.count + MOST_MISSING:
        raise FormatError(
            f"expected at most {MOST_MISSING:,} missing numbers, found {numbered.missing:,} between {numbered.count:,} files",
            path=root,
        )
    paths = [root.joinpath(*name(number, gap).split("/")) for number, gap in numbered.numbers()]
    captures = [(pattern.match(path.relative_to(root)), path) for path in paths]
    return [(dict(captured), path) for captured, path in captures if captured is not None]


def _series(
    root: Location, pattern: Pattern, files: Iterable[tuple[Mapping[str, Name], Location]]
) -> tuple[Numbered, Callable[[int, Gap], str]]:
    """The gaps in the numbers of files, and a function that returns the name of a missing file."""
    capture = next((name for name in ("example", "batch", "_") if name in pattern.captures), None)
    if capture is None or capture not in pattern.numbers:
        return Numbered(0), lambda number, gap: ""
    paths: dict[FileKey, Location] = {}
    for captured, path in files:
        batch = (captured["batch"],) if capture == "example" and "batch" in captured else ()
        paths[*batch, captured[capture]] = path

    def name(number: int, gap: Gap) -> str:
        neighbor = paths[gap.neighbor].relative_to(root)
        return renumbered(neighbor, pattern.span(neighbor, capture), number)

    total = TOTAL.match(pattern.text.partition(f"{{{capture}")[2].partition("}")[2])
    if total is None or len(pattern.captures) > 1:
        return Numbered.of(paths).sequential(), name
    first, stop = bounds_of(int(total[1]), (key[-1] for key in paths if isinstance(key[-1], int)))
    return Numbered.of(paths, first=first, stop=stop), name


def _entries(folder: Location, front: str) -> list[str]:
    return [entry.name for entry in folder.entries() if entry.name.startswith(front)]


def _captures(values: Mapping[str, Name]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "the same"


def order_of(values: Mapping[str, Name]) -> tuple[Any, ...]:
    """Sort key: numbers come before strings and are compared as numbers."""
    batch, example, layer = values.get("batch"), values.get("example"), values.get("layer")
    return (
        *(batch is not None, isinstance(batch, str), batch or 0),
        *(example is not None, isinstance(example, str), example or 0),
        *(layer is not None, isinstance(layer, str), layer or 0),
    )


def parquet_of(path: Location) -> pa.Table:
    """Reads a parquet file."""
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path.arrow())
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise FormatError(f"expected a parquet file: {error}", path=path) from error


def array_in(table: pa.Table, name: str) -> pa.Array:
    """A column as one array."""
    import pyarrow as pa

    column = table[name].combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def lines_of(path: Location) -> list[dict[str, Any]]:
    """The lines of a ``.jsonl`` or ``.csv`` file, or the objects of a list in a ``.json`` file."""
    lower = path.name.lower()
    if lower.endswith((".jsonl", ".ndjson")):
        return [line for _, line in read_lines(path)]
    if lower.endswith((".csv", ".tsv")):
        return _csv(path, "\t" if lower.endswith(".tsv") else ",")
    if lower.endswith(".json"):
        value = read_json(path)
        if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
            lengths = {len(column) for column in value.values()}
            if len(lengths) == 1:
                return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
        if isinstance(value, list) and all(isinstance(line, dict) for line in value):
            return value
        raise FormatError("expected a list of objects", path=path)
    if lower.endswith(".parquet"):
        return list(parquet_of(path).to_pylist())
    raise UnsupportedError("expected a .jsonl, .csv, .tsv, .json or .parquet file of lines", path=path)


def is_lines(name: str) -> bool:
    """Whether a file has lines with fields, by its name."""
    return name.lower().endswith((".jsonl", ".ndjson", ".csv", ".tsv", ".json", ".parquet"))


def _csv(path: Location, delimiter: str) -> list[dict[str, Any]]:
    size = path.regular("read").size
    if size > _MOST_TEXT:
        raise FormatError(f"expected at most {_MOST_TEXT} bytes of lines, found {size}", path=path)
    try:
        text = path.read(0, size).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except UnicodeDecodeError as error:
        raise FormatError("expected UTF-8 text", path=path, offset=error.start) from error
    except csv.Error as error:
        raise FormatError(f"expected comma-separated values: {error}", path=path) from error
    if not rows:
        raise FormatError("expected a header line, found an empty file", path=path)
    header, lines = rows[0], [row for row in rows[1:] if row]
    for number, row in enumerate(lines, 2):
        if len(row) != len(header):
            raise FormatError(f"line {number}: expected {len(header)} values, found {len(row)}", path=path)
    columns = [_convert_texts([row[i] for row in lines]) for i in range(len(header))]
    return [dict(zip(header, values, strict=True)) for values in zip(*columns, strict=True)]


def _convert_texts(texts: list[str]) -> list[Any]:
    """A column's values as integers or floats if all of them can be converted; else as strings."""
    converters: tuple[Callable[[str], Any], ...] = (int, float)
    for convert in converters:
        try:
            values = [convert(text) for text in texts]
        except ValueError:
            continue
        if convert is float or all(str(value) == text for value, text in zip(values, texts, strict=True)):
            return values
    return list(texts)


def missing(path: Location, what: str) -> ActshardError:
    """The error for a file that the description names."""
    return MissingFileError(f"expected {what}, found no file", path=path)
