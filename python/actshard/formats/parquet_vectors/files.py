"""Parquet files: which ones are a dataset, their columns of vectors, and decoding a row group.

A column of vectors is ``list``, ``large_list`` or ``fixed_size_list`` of float16, float32 or float64, or such a list of lists.
pyarrow decodes a row group as a whole, in chunks, whose values are copied to one array with 64-bit arithmetic. ``take`` and
``combine_chunks`` of pyarrow are not used: they have 32-bit offsets, and returned values of wrong rows above 2^31 elements
(apache/arrow#44164).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.codes import Remark
from actshard.base.containers import read_footer
from actshard.base.errors import ActshardError, FormatError, UnknownFormatError, UnsupportedError, boundary
from actshard.base.location import Location
from actshard.formats.candidates import is_of_indices
from actshard.formats.numbered import FileKey, Gap, Numbered, renumbered

if TYPE_CHECKING:
    import pyarrow as pa

FLOATS = {"halffloat": ("F16", "<f2"), "float": ("F32", "<f4"), "double": ("F64", "<f8")}
MOST_GROUP = 1 << 36
"""Maximum size of a decoded row group, in bytes."""
_NAMED = re.compile(r"activation|vector|hidden|embedding|hook", re.IGNORECASE)
_SPLIT = re.compile(r"(.*?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.parquet")
_NUMBER = re.compile(r"(.*?)(\d{4,9})\.parquet")
_WORD = re.compile(
    r"(?<![a-z0-9])(train|valid|dev|test|eval)(?:ing|ation|uation|idation)?(?![a-z])|(?<![a-z0-9])(val)(?![a-z])"
)
_LAYER = re.compile(r"(?<![a-z])(?:layers?|blocks?)[_.\-]?(\d+)", re.IGNORECASE)
_SAME = {"val": "valid", "dev": "valid", "eval": "test"}
_LARGEST = 1 << 31
"""Sizes in features must be below this limit."""


def parquet_files(path: Location) -> list[Location]:
    """The parquet files of a path, sorted by name: the file itself, or those in the folder or else in its folder ``data``."""
    if path.kind() == "file":
        return [path] if path.name.endswith(".parquet") else []
    for folder in (path, path / "data"):
        if folder.kind() != "folder":
            continue
        paths = [
            folder / entry.name
            for entry in folder.entries("*.parquet")
            if entry.kind == "file" and not entry.name.startswith((".", "_"))  # hidden, as for Spark and pyarrow
        ]
        if paths:
            return paths
    return []


def check_one_dataset(path: Location, files: list[Location]) -> None:
    """Raises UnknownFormatError for files of several splits or uploads, or several files with a description each."""
    matches = [_SPLIT.fullmatch(file.name) for file in files]
    splits = {None if match is None else match[1] for match in matches}
    words = {_word(file.name) for file, match in zip(files, matches, strict=True) if match is None} - {None}
    if len(splits) > 1 or len(words) > 1:
        names = ", ".join(sorted(str(split) for split in splits | words if split is not None))
        raise UnknownFormatError(
            f"contains files of several splits ({names}). Open one of its files, or a folder with one split", path=path
        )
    parts = [(match[2], match[3]) for match in matches if match is not None]
    if len({count for _, count in parts}) > 1 or len(set(parts)) < len(parts):
        shown = ", ".join(file.name for file in files[:4])
        raise UnknownFormatError(
            f"contains the files of several uploads ({shown}), so rows may repeat. Keep the files of one upload",
            path=path,
        )
    layers = {match[1] for file in files if (match := _LAYER.search(file.name)) is not None}
    if len(layers) > 1:
        shown = ", ".join(file.name for file in files[:4])
        raise UnknownFormatError(
            f"contains files of several layers ({shown}), by their names. Open one of them, or make one store of all: "
            "actshard.pair(actshard.open(FILE), actshard.open(FILE), ...).as_store()",
            path=path,
        )
    described = [file.name for file in files if sidecar(file).exists()]
    if len(files) > 1 and described:
        raise UnknownFormatError(
            f"contains {len(files)} parquet files with separate descriptions. Open one: {', '.join(described[:10])}",
            path=path,
        )


def _word(name: str) -> str | None:
    """The split in a file name without numbers, such as ``train.parquet`` or ``acts_test.parquet``."""
    match = _WORD.search(name.lower())
    word = None if match is None else match[1] or match[2]
    return None if word is None else _SAME.get(word, word)


def missing_files(files: list[Location]) -> list[Remark]:
    """A warning about missing files, according to names such as ``train-00000-of-00003.parquet`` or ``0000.parquet``.

    The first kind contains the number of files. In the second, numbers begin at 0, and gaps between them are missing files.
    """
    for pattern in (_SPLIT, _NUMBER):
        matches: dict[FileKey, re.Match[str]] = {
            (int(match[2]),): match for file in files if (match := pattern.fullmatch(file.name))
        }
        if not matches or len(matches) < len(files):
            continue
        stop = int(next(iter(matches.values()))[3]) if pattern is _SPLIT else None
        if stop is None and ((0,) not in matches or len({match[1] for match in matches.values()}) > 1):
            return []  # years, or files of several names

        def name(number: int, gap: Gap, matches: Mapping[FileKey, re.Match[str]] = matches) -> str:
            match = matches[gap.neighbor]
            prefix = match.string[: match.end(match.re.groups)]  # without the checksum that some writers append
            return f"{renumbered(prefix, match.span(2), number)}.parquet"

        return Numbered.of(matches, first=0, stop=stop).remarks(name, "files")
    return []


def sidecar(file: Location) -> Location:
    """NLA's description of a file."""
    return file.parent / f"{file.name}.nla_meta.yaml"


@dataclass(frozen=True)
class VectorColumn:
    """A column of vectors."""

    name: str
    leaf: str
    """Its path in the parquet schema."""
    number: int
    """The number of its leaf among the columns of the file."""
    levels: int
    """1: a vector per row. 2: a sequence. 3: a sequence for each layer."""
    type: str
    width: int | None
    """d_model, if types or features specify it."""
    tokens: int | None
    """Tokens per row, if types or features specify them."""
    typed: bool = False
    """Whether it is an extension type, or a list of fixed size."""
    layers: int | None = 1
    """Sequences per row; None if neither types nor features specify it."""

    @property
    def likely(self) -> bool:
        """Whether the type or name suggests activations. Lists of floats may also be scores or loss weights."""
        return self.typed or self.levels > 1 or _NAMED.search(self.name) is not None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The stored dtype."""
        return np.dtype(FLOATS[self.type][1])


class ParquetFile:
    """A file's footer. Each read opens the file again, so the object can be used after a fork and by many threads."""

    def __init__(self, path: Location) -> None:
        self.path = path
        stat = path.regular("open")
        self.version = (stat.size, stat.version)
        with self._open() as file:
            self.schema: pa.Schema = file.schema_arrow
        self.footer = read_footer(path)
        self.paths = tuple(leaf.path for leaf in self.footer.leaves)
        """Paths of the leaf columns in the parquet schema."""
        self.leaves = self._leaves()

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        return _Opened(self.path, pq)

    def _leaves(self) -> dict[str, list[int]]:
        """Numbers of the leaf columns of each field."""
        leaves: dict[str, list[int]] = {}
        first = 0
        for field in self.schema:
            n = _count_leaves(field.type)
            if field.name in leaves:
                raise FormatError(f"expected columns of different names, found {field.name!r} twice", path=self.path)
            leaves[field.name] = list(range(first, first + n))
            first += n
        if first != len(self.paths):
            raise FormatError(f"expected {first} columns by its schema, found {len(self.paths)}", path=self.path)
        return leaves

    def features(self) -> dict[str, object]:
        """Features that ``datasets`` stored in the schema."""
        text = (self.schema.metadata or {}).get(b"huggingface")
        try:
            features = json.loads(text)["info"]["features"] if text else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}  # a hint only; lengths are checked when values are read
        return features if isinstance(features, dict) else {}

    def vectors(self) -> list[VectorColumn]:
        """The columns of vectors."""
        features = self.features()
        return [column for field in self.schema if (column := self._vectors(field, features)) is not None]

    def _vectors(self, field: pa.Field, features: dict[str, object]) -> VectorColumn | None:
        import pyarrow as pa

        sizes: list[int | None] = []
        tensor = isinstance(field.type, pa.FixedShapeTensorType)
        axes = list(field.type.permutation or range(len(field.type.shape))) if tensor else []
        if len(axes) > 3 or axes != sorted(axes):
            return None
        kind = getattr(field.type, "storage_type", field.type)
        while _is_list(kind):
            sizes.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
            kind = kind.value_type
        if tensor and len(sizes) == 1:
            sizes = list(field.type.shape)
        if str(kind) not in FLOATS or not 1 <= len(sizes) <= 3:
            return None
        feature = features.get(field.name)
        shape = feature.get("shape") if isinstance(feature, dict) else None
        if isinstance(shape, list) and len(shape) == len(sizes):
            sizes = [
                size or (n if type(n) is int and 0 < n < _LARGEST else None)
                for size, n in zip(sizes, shape, strict=True)
            ]
        (number,) = self.leaves[field.name]
        leaf = self.paths[number]
        tokens, layers = sizes[-2] if len(sizes) > 1 else 1, sizes[0] if len(sizes) == 3 else 1
        typed = hasattr(field.type, "storage_type") or pa.types.is_fixed_size_list(field.type)
        return VectorColumn(field.name, leaf, number, len(sizes), str(kind), sizes[-1], tokens, typed, layers)

    def indices(self) -> dict[str, int]:
        """Columns of integers that are named as indices of sparse latents, and the numbers of their leaves."""
        import pyarrow as pa

        named = [field for field in self.schema if is_of_indices(field.name) and _is_list(field.type)]
        return {field.name: self.leaves[field.name][0] for field in named if pa.types.is_integer(field.type.value_type)}

    def group_rows(self, group: int) -> int:
        """Number of rows of a row group."""
        return self.footer.group(group).num_rows

    def values(self, group: int, column: VectorColumn) -> int:
        """Number of values of a column in a row group, according to the footer."""
        return self.footer.group(group).column(column.number).num_values

    def check_unchanged(self) -> None:
        """Raises FormatError if the file was replaced since it was opened."""
        stat = self.path.regular("read")
        if (stat.size, stat.version) != self.version:
            raise FormatError(
                "expected the file that was opened, found another: it was replaced. Open it again", path=self.path
            )

    def read(self, group: int, names: list[str]) -> pa.Table:
        """Decodes columns of a row group."""
        self.check_unchanged()
        paths = [self.paths[number] for name in names for number in self.leaves[name]]
        with self._open() as file:
            return file.read_row_group(group, columns=paths).select(names)

    def chunks(self, group: int, column: VectorColumn) -> Iterator[pa.Array]:
        """Decodes a column of a row group, in chunks of fewer than 2^31 values: a vector or sequence per row and layer."""
        table = self.read(group, [column.name])
        row = 0
        for chunk in table.column(0).chunks:
            yield self._sequences(_nested(getattr(chunk, "storage", chunk), column), column, row)
            row += len(chunk)

    def _sequences(self, lists: pa.Array, column: VectorColumn, row: int) -> pa.Array:
        """The sequences of all layers of the rows, one after the other."""
        if column.levels < 3 or len(lists) == 0 or not _is_list(lists.type.value_type.value_type):
            return lists  # those of tensors are divided already
        _refuse_nulls(lists, lambda i: self._refuse(column, row + i, f"{column.layers} layers", "null"))
        ends = ends_of(lists)
        if len(bad := np.flatnonzero(np.diff(ends) != column.layers)):
            raise self._refuse(column, row + int(bad[0]), f"{column.layers} layers", int(np.diff(ends)[bad[0]]))
        return lists.values.slice(int(ends[0]), int(ends[-1] - ends[0]))

    def _refuse(self, column: VectorColumn, row: int, expected: str, actual: object) -> FormatError:
        return FormatError(
            f"row {row} of a row group: column {column.name!r}: expected {expected}, found {actual}", path=self.path
        )

    def decode(
        self, group: int, column: VectorColumn, first: int, lengths: int | NDArray[np.int64], width: int
    ) -> NDArray[np.generic]:
        """Decodes a row group: ``(rows, layers, tokens, width)``, shorter sequences padded with zeros.

        Raises:
            FormatError: a row is null, or its length differs from ``lengths``, the lengths in the first layer. The message
                contains the row's number, counted from ``first``.
        """
        assert column.layers is not None
        n = self.group_rows(group) * column.layers
        expected = np.repeat(np.broadcast_to(np.asarray(lengths, np.int64), n // column.layers), column.layers)
        tokens = max(int(expected.max(initial=0)), 1)
        size = n * tokens * width * column.dtype.itemsize
        if size > MOST_GROUP:
            raise UnsupportedError(
                f"expected row groups of at most 64 GiB, found {size} bytes in group {group}", path=self.path
            )
        values = (
            np.zeros((n, tokens, width), column.dtype) if column.levels > 1 else np.empty((n, 1, width), column.dtype)
        )
        start = 0
        for chunk in self.chunks(group, column):
            end = start + len(chunk)
            if end > n:
                break
            fill(values[start:end], expected[start:end], chunk, column, first * column.layers + start, self.path)
            start = end
        if start != n:
            rows = self.group_rows(group)
            raise FormatError(
                f"expected {rows} rows in row group {group}, found {start // column.layers}", path=self.path
            )
        return values.reshape(-1, column.layers, *values.shape[1:])


class _Opened:
    """An open parquet file, whose errors name it."""

    def __init__(self, path: Location, pq: Any) -> None:
        self.path = path
        self.pq = pq

    def __enter__(self) -> object:
        import pyarrow as pa

        self.raw = self.path.arrow()
        try:
            # Memory limits of thrift structures: a footer is at most as large as the file.
            self.file = self.pq.ParquetFile(self.raw)
        except (pa.ArrowException, OSError, ValueError) as error:
            self.raw.close()
            raise FormatError(f"expected a parquet file: {_one_line(error)}", path=self.path) from error
        return self.file

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        import pyarrow as pa

        self.raw.close()
        if isinstance(error, ActshardError):
            return
        if isinstance(error, pa.ArrowException | OSError | ValueError | IndexError):
            raise FormatError(f"cannot decode: {_one_line(error)}", path=self.path) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _count_leaves(kind: pa.DataType) -> int:
    kind = getattr(kind, "storage_type", kind)
    if kind.num_fields == 0:
        return 1
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _nested(lists: pa.Array, column: VectorColumn) -> pa.Array:
    """Converts 2-D tensors that are stored as flat lists of elements to lists of vectors."""
    import pyarrow as pa

    inner = getattr(lists.type, "value_type", None)
    if column.levels == 1 or inner is None or str(inner) not in FLOATS:
        return lists
    _refuse_nulls(lists, lambda i: FormatError(f"column {column.name!r}: expected tensors, found null in row {i}"))
    vectors = pa.FixedSizeListArray.from_arrays(lists.flatten(), column.width)
    return pa.FixedSizeListArray.from_arrays(vectors, column.tokens)


def ends_of(lists: pa.Array) -> NDArray[np.int64]:
    """Positions in ``lists.values``: of the first value of each list, then of the end of the last list."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(lists.type):
        size = lists.type.list_size
        even: NDArray[np.int64] = (np.arange(len(lists) + 1, dtype=np.int64) + lists.offset) * size
        return even
    ends: NDArray[np.int64] = np.asarray(lists.offsets).astype(np.int64)
    return ends


def fill(
    out: NDArray[np.generic],
    expected: NDArray[np.int64],
    chunk: pa.Array,
    column: VectorColumn,
    first: int,
    path: Location,
) -> None:
    """Copies the vectors of a chunk of sequences to ``out``, ``(sequences, tokens, width)``. ``expected`` is the number of each.

    Raises FormatError with the row's number for nulls and other numbers of vectors or values; ``first`` counts sequences, too.
    """
    _, tokens, width = out.shape

    def refuse(row: int, expected: str, actual: object) -> FormatError:
        row = (first + row) // (column.layers or 1)
        return FormatError(f"row {row}: column {column.name!r}: expected {expected}, found {actual}", path=path)

    _refuse_nulls(chunk, lambda i: refuse(i, "vectors", "null"))
    if column.levels == 1:
        counts, lists = np.ones(len(chunk), np.int64), chunk
    else:
        ends = ends_of(chunk)
        counts = np.diff(ends)
        if len(bad := np.flatnonzero(counts != expected)):
            raise refuse(int(bad[0]), f"{expected[bad[0]]} vectors", int(counts[bad[0]]))
        lists = chunk.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
    rows = np.repeat(np.arange(len(chunk)), counts)
    _refuse_nulls(lists, lambda i: refuse(int(rows[i]), "vectors", "null"))
    inner = ends_of(lists)
    if len(bad := np.flatnonzero(np.diff(inner) != width)):
        raise refuse(int(rows[bad[0]]), f"vectors of {width} values", int(np.diff(inner)[bad[0]]))
    values = lists.values.slice(int(inner[0]), int(inner[-1] - inner[0]))
    _refuse_nulls(values, lambda i: refuse(int(rows[i // width]), "numbers", "null"))
    flat = values.to_numpy(zero_copy_only=True).reshape(-1, width)
    if (counts == tokens).all():
        out.reshape(-1, width)[...] = flat
    else:
        out[np.arange(tokens) < counts[:, None]] = flat


def _refuse_nulls(values: pa.Array, error: Callable[[int], FormatError]) -> None:
    if values.null_count:
        raise error(int(np.flatnonzero(np.asarray(values.is_null()))[0]))


def lengths_of(file: ParquetFile, group: int, column: VectorColumn) -> NDArray[np.int64]:
    """Tokens of each row of a row group, those of its first layer. Decodes the group."""
    with boundary(file.path, "read"):
        parts = [np.diff(ends_of(chunk)) for chunk in file.chunks(group, column)]
    return np.concatenate([np.zeros(0, np.int64), *parts])[:: column.layers]
