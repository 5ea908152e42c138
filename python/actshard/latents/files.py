"""Files of sparse latents: which ones are at a path, and how entries (example, token, feature, value) lie in them.

::

    delphi    MODULE/{a}_{b}.safetensors   features a to b: locations (n, 3) uint16 or uint32 = example, token, feature - a;
                                           activations (n,) float16; tokens (examples, context), the same in each file, or absent
              MODULE/config.json           model, dataset, context length
    torch     activations.pt (n,), indices.pt (n, 3) = example, token, position in latent_ids.pt; ranges.pt (examples + 1,): the
              first entry of each example; sequences.pt (examples, longest), lengths.pt; dataset_ids.pt, dataset_names.pt
    parquet   a row per entry, with four columns; tokens/*.parquet: the token ids of each example, if actshard wrote it

Sources: EleutherAI/delphi, delphi/latents/cache.py (save_splits) and loader.py (TensorBuffer.load); science-of-finetuning's
diffing-toolkit, utils/dictionary/latent_activations.py and utils/cache.py (LatentActivationCache).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows, StoredArray
from actshard.base._arguments import many, one_of, shown_bytes, stored
from actshard.base._json import read_json
from actshard.base.codes import Remark
from actshard.base.containers import TorchFile, read_torch
from actshard.base.errors import (
    RAISE,
    ActshardError,
    ArgumentError,
    Faults,
    FormatError,
    NoMemoryError,
    UnsupportedError,
)
from actshard.base.location import Location
from actshard.formats.parquet_vectors.files import ParquetFile, check_one_dataset, parquet_files

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ("delphi", "torch", "parquet")
ROLES = ("example", "token", "feature", "value")
_NAMES = {
    "example": "example example_id example_idx sample sample_id sample_idx seq_idx sequence sequence_id sequence_idx "
    "prompt_id prompt_idx doc_id doc_idx row_id row_idx conversation_id text_id",
    "token": "token token_pos token_idx token_index token_position position pos seq_pos token_id",
    "feature": "feature feature_id feature_idx feature_index latent latent_id latent_idx latent_index",
    "value": "value activation activation_value act act_val act_value strength",
}
"""Columns of parquet files that are recognised, by role. A column also needs the type of its role."""
_SPLIT = re.compile(r"([0-9]{1,10})_([0-9]{1,10})\.safetensors")
TORCH = ("activations.pt", "indices.pt", "ranges.pt")
TORCH_MORE = ("sequences.pt", "lengths.pt", "latent_ids.pt", "dataset_ids.pt", "dataset_names.pt")
CONFIG, KEY = "config.json", "actshard"
"""In config.json and in the metadata of parquet, ``KEY`` holds the sizes that entries do not imply."""
_DEEPEST, _MOST_FOLDERS = 3, 1000
_UNIT = 1 << 30
"""Entries that the core addresses as one sequence."""
IntArray = NDArray[np.int64]


class LatentPart(ABC):
    """Entries of a store that are read on their own: a split, all tensors, or a row group."""

    path: Location
    count: int
    features: range | None = None
    """The only features that it may have; None if unknown."""
    starts: IntArray | None = None
    """The first entry of each example, and the number of entries, if a file contains them."""
    is_decoded = False
    """Whether each read decodes the whole part, unless it is still in memory."""

    @abstractmethod
    def locations(self, rows: IntArray) -> IntArray:
        """Examples, tokens and features of entries, (n, 3).

        Raises:
            FormatError: a feature that the part may not have.
        """

    @abstractmethod
    def values(self, rows: IntArray) -> NDArray[np.generic]:
        """Values of entries, (n,), in the stored dtype."""


@dataclass(frozen=True)
class LatentFiles:
    """The parsed files of one module; no entry has been read yet."""

    kind: str
    path: Location
    module: str
    parts: Sequence[LatentPart]
    dtype: np.dtype[np.generic]
    num_examples: int | None
    num_features: int | None
    context: int | None
    """Token positions of the longest example."""
    lengths: IntArray | None = None
    """Tokens of each example; None: ``context`` each."""
    tokens: Rows | IntArray | None = None
    """Token ids, (examples, context)."""
    metadata: dict[str, object] = field(default_factory=dict)
    warnings: tuple[Remark, ...] = ()
    token_copies: tuple[tuple[Location, Rows], ...] = ()
    """The token ids of each split of delphi, with its file; ``tokens`` are the first."""


def stores_at(root: Location, columns: Mapping[str, str] | None = None) -> tuple[str, dict[str, Location]] | None:
    """The kind of sparse latents at a path, and the folder of each module; None for other paths."""
    if root.kind() == "file":
        return ("parquet", {root.name.removesuffix(".parquet"): root}) if _is_table(root, columns) else None
    if root.kind() != "folder" or not root.lists:
        return None
    names = {entry.name for entry in root.entries()}
    if set(TORCH) <= names:
        return "torch", {root.name: root}
    if _is_module(root):
        return "delphi", {root.name: root}
    if _is_table(root, columns):
        return "parquet", {root.name: root}
    modules = {folder.relative_to(root): folder for folder in _modules_below(root)}
    return ("delphi", modules) if modules else None


def _is_module(folder: Location) -> bool:
    """Whether a folder has splits. A damaged one counts, so that its error explains it."""
    first = next((folder / e.name for e in folder.entries("*.safetensors") if _SPLIT.fullmatch(e.name)), None)
    if first is None:
        return False
    try:
        return {"locations", "activations"} <= {name for name, *_ in _native.read_arrays([first], "safetensors")[0][0]}
    except ActshardError:
        return True


def _modules_below(root: Location) -> Iterator[Location]:
    """Folders with splits: names of modules may contain slashes."""
    level, seen = [root], 0
    for _ in range(_DEEPEST):
        folders = [folder / e.name for folder in level for e in folder.entries() if e.kind == "folder"]
        seen += len(folders)
        if seen > _MOST_FOLDERS:
            return
        modules = [folder for folder in folders if _is_module(folder)]
        yield from modules
        level = [folder for folder in folders if folder not in modules]


def _is_table(path: Location, columns: Mapping[str, str] | None) -> bool:
    files = parquet_files(path)
    try:
        return bool(files) and quadruple(ParquetFile(files[0]), columns) is not None
    except ActshardError:
        return False


def parse_latents(
    kind: str,
    module: str,
    path: Location,
    *,
    io: str,
    memory: int,
    columns: Mapping[str, str] | None = None,
    faults: Faults = RAISE,
) -> LatentFiles:
    """Parses the files of a module.

    Raises:
        FormatError, HeaderError, TruncatedFileError, UnsafePickleError, UnsupportedError: a file is damaged or unsupported.
    """
    if kind == "delphi":
        return _delphi(module, path, io, faults)
    if kind == "torch":
        return _torch(module, path, io)
    return _parquet(module, path, memory, columns)


# -- tensors -------------------------------------------------------------------------------------------------------


class _Tensor:
    """A tensor of a file, whose rows are read at their offsets."""

    def __init__(self, path: Location, name: str, array: object, axes: int, kinds: str) -> None:
        if not isinstance(array, StoredArray):
            raise FormatError(f"{name}: expected a tensor, found {type(array).__name__}", path=path)
        self.path, self.shape, self.dtype = path, list(array.shape), stored(array.dtype)
        # ml_dtypes has kind "V" or "f": bfloat16 counts as a float.
        kind = self.dtype.kind if self.dtype.kind in "iufb" else "f"
        if len(self.shape) != axes or kind not in kinds:
            words = "integers" if "i" in kinds else "floats"
            raise FormatError(
                f"{name}: expected {words} of {many(axes, 'axis', plural='axes')}, found {array.dtype} of shape {self.shape}",
                path=path,
            )
        step = 1
        for size, stride in zip(self.shape[::-1], array.strides[::-1], strict=True):
            if size > 1 and stride != step:
                raise UnsupportedError(f"{name}: expected elements in order, found strides {array.strides}", path=path)
            step *= max(size, 1)
        self.array = array

    def rows(self, io: str) -> Rows:
        """Its rows along the first axis; row r is token r % _UNIT of example r // _UNIT."""
        count, width = self.shape[0], int(np.prod(self.shape[1:], dtype=np.int64))
        size = width * self.dtype.itemsize
        decoded = self.array if self.array.deflated is not None else None
        firsts = np.arange(0, count, _UNIT, dtype=np.uint64)
        return _native.placed_rows(
            [(self.path, size, self.array.swapped and decoded is None, False, decoded)],
            np.zeros(len(firsts), np.uint32),
            firsts * np.uint64(size) + np.uint64(0 if decoded is not None else self.array.offset),
            np.minimum(np.uint64(count) - firsts, _UNIT).astype(np.uint32),
            num_groups=1,
            width=width,
            dtype=self.array.dtype,
            decoded_memory=1 << 30,
            descr=self.dtype,
            io=io,
        )


def gather(rows: Rows, numbers: IntArray) -> NDArray[np.generic]:
    """Rows by number, (n, width). Consecutive ones are a view of a mapped file."""
    unit, first, last = int(numbers[0]) // _UNIT, int(numbers[0]) % _UNIT, int(numbers[-1]) % _UNIT
    if last - first + 1 == len(numbers) and (len(numbers) == 1 or (np.diff(numbers) == 1).all()):
        view = rows.view(0, unit)
        if view is not None:
            return view[first : last + 1]
    return rows.gather(0, numbers // _UNIT, numbers % _UNIT, None, None)


class _TensorPart(LatentPart):
    """Two tensors: locations and values."""

    def __init__(self, locations: _Tensor, values: _Tensor, io: str) -> None:
        self.path, self.count = locations.path, locations.shape[0]
        if locations.shape[1] != 3 or values.shape[0] != self.count:
            raise FormatError(
                f"expected locations of shape (n, 3) and n values, found {locations.shape} and {values.shape}",
                path=self.path,
            )
        self.numbers: IntArray | None = None
        """Features by the third number of a location; None: ``features[number]``."""
        self._tensors, self._io = (locations, values), io
        self._rows = (locations.rows(io), values.rows(io)) if self.count else None

    def locations(self, rows: IntArray) -> IntArray:
        if self._rows is None or not len(rows):
            return np.zeros((0, 3), np.int64)
        raw = gather(self._rows[0], rows)
        if raw.dtype == np.uint64 and (raw.astype(np.int64) < 0).any():
            raise FormatError("expected numbers below 2**63", path=self.path)
        places = raw.astype(np.int64)
        assert self.features is not None
        limit = len(self.features if self.numbers is None else self.numbers)
        if len(wrong := np.flatnonzero((places[:, 2] < 0) | (places[:, 2] >= limit))):
            row, number = int(rows[wrong[0]]), int(places[wrong[0], 2])
            raise FormatError(
                f"entry {row}: expected a feature from 0 to {limit - 1} of this file, found {number}",
                path=self.path,
                code="latent-location",
            )
        places[:, 2] = places[:, 2] + self.features.start if self.numbers is None else self.numbers[places[:, 2]]
        return places

    def values(self, rows: IntArray) -> NDArray[np.generic]:
        if self._rows is None or not len(rows):
            return np.zeros(0, self._tensors[1].dtype)
        return gather(self._rows[1], rows)[:, 0]


def _delphi(module: str, folder: Location, io: str, faults: Faults) -> LatentFiles:
    names = [m for entry in folder.entries("*.safetensors") if (m := _SPLIT.fullmatch(entry.name))]
    names.sort(key=lambda match: (int(match[1]), int(match[2])))
    paths = [folder / match.string for match in names]
    headers = faults.batch(paths, lambda batch: _native.read_arrays(batch, "safetensors"))
    parts: list[LatentPart] = []
    token_ids: list[_Tensor] = []
    remarks: list[Remark] = []
    stop, dtypes = 0, set()
    for match, path, (arrays, _) in zip(names, paths, headers, strict=True):
        tensors = {name: array for name, array, kind in arrays if kind == "numbers"}
        first, last = int(match[1]), int(match[2])
        if first > last or (parts and first < stop):
            faults.refuse(
                FormatError(
                    f"expected features from {stop} on, found {first} to {last}: splits must not overlap",
                    path=path,
                    code="duplicate-latent",
                )
            )
        if first > stop:
            remarks.append(Remark("missing-file", f"no file has the features {stop} to {first - 1}"))
        values = _Tensor(path, "activations", tensors.get("activations"), 1, "f")
        part = _TensorPart(_Tensor(path, "locations", tensors.get("locations"), 2, "iu"), values, io)
        part.features, stop = range(first, last + 1), last + 1
        parts.append(part)
        dtypes.add(values.dtype)
        if "tokens" in tensors:
            stored_tokens = _Tensor(path, "tokens", tensors["tokens"], 2, "iu")
            token_ids.append(stored_tokens)
            if stored_tokens.shape != token_ids[0].shape:
                raise FormatError(
                    f"tokens: expected the shape {token_ids[0].shape} of {token_ids[0].path.name}, found {stored_tokens.shape}",
                    path=path,
                )
    metadata = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    if not isinstance(metadata, dict):
        raise FormatError("expected an object", path=folder / CONFIG)
    sizes = _sizes(metadata.pop(KEY, None), folder / CONFIG)
    splits = metadata.get("n_splits")
    if stop < sizes.get("num_features", 0):
        remarks.append(Remark("missing-file", f"no file has the features {stop} to {sizes['num_features'] - 1}"))
    elif not sizes and not remarks and isinstance(splits, int) and len(names) < splits:
        remarks.append(Remark("missing-file", f"{CONFIG} names {splits} splits, and {len(names)} have a file"))
    if token_ids:
        sizes |= {"num_examples": token_ids[0].shape[0], "context": token_ids[0].shape[1]}
    tokens = [(tensor.path, tensor.rows(io)) for tensor in token_ids if all(tensor.shape)]
    return LatentFiles(
        "delphi",
        folder,
        module,
        parts,
        _one_dtype(dtypes, folder),
        sizes.get("num_examples"),
        stop,
        sizes.get("context"),
        tokens=tokens[0][1] if tokens else None,
        token_copies=tuple(tokens),
        metadata=metadata,
        warnings=tuple(remarks),
    )


def _one_dtype(dtypes: set[np.dtype[np.generic]], path: Location) -> np.dtype[np.generic]:
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise FormatError(f"expected values of one dtype, found {names}", path=path)
    return next(iter(dtypes), np.dtype(np.float16))


def _sizes(value: object, path: Location) -> dict[str, int]:
    """Sizes that a writer of actshard recorded."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(type(n) is int and 0 <= n <= 1 << 62 for n in value.values()):
        raise FormatError(f"{KEY}: expected an object of sizes, found {value!r:.80}", path=path)
    return {name: value[name] for name in ("num_examples", "num_features", "context") if name in value}


def _torch(module: str, folder: Location, io: str) -> LatentFiles:
    names = [name for name in (*TORCH, *TORCH_MORE) if name in TORCH or (folder / name).exists()]
    files = dict(zip(names, read_torch([folder / name for name in names]), strict=True))
    for file in files.values():
        if file.is_gzipped:
            raise UnsupportedError("expected a file of torch.save, found one in gzip: gunzip it", path=file.path)

    def tensor(name: str, axes: int = 1, kinds: str = "iu") -> _Tensor:
        return _Tensor(folder / name, name, files[name].value, axes, kinds)

    def numbers(name: str) -> IntArray:
        array = files[name].array(tensor(name).array)
        return _as_numbers(array, folder / name)

    values = tensor("activations.pt", 1, "f")
    part = _TensorPart(tensor("indices.pt", 2), values, io)
    starts = numbers("ranges.pt")
    if not len(starts) or starts[0] != 0 or starts[-1] != part.count or (np.diff(starts) < 0).any():
        raise FormatError(
            f"expected numbers that rise from 0 to the {part.count} entries of indices.pt", path=folder / "ranges.pt"
        )
    part.starts, count = starts, len(starts) - 1
    if "latent_ids.pt" in files:
        part.numbers = numbers("latent_ids.pt")
        if len(np.unique(part.numbers)) < len(part.numbers):
            raise FormatError("expected each latent once", path=folder / "latent_ids.pt")
    num_features = None if part.numbers is None else int(part.numbers.max(initial=-1)) + 1
    part.features = range(1 << 62 if num_features is None else num_features)
    ids = tensor("sequences.pt", 2) if "sequences.pt" in files else None
    lengths = numbers("lengths.pt") if "lengths.pt" in files else None
    for name, size in (("sequences.pt", ids and ids.shape[0]), ("lengths.pt", lengths is not None and len(lengths))):
        if name in files and size != count:
            raise FormatError(f"expected {count} examples as in ranges.pt, found {size}", path=folder / name)
    context = None if ids is None else ids.shape[1]
    if lengths is not None:
        longest = int(lengths.max(initial=0))
        if context is not None and longest > context:
            raise FormatError(f"expected at most {context} tokens, found {longest}", path=folder / "lengths.pt")
        context = longest
    return LatentFiles(
        "torch",
        folder,
        module,
        [part],
        values.dtype,
        count,
        num_features,
        context,
        lengths,
        ids.rows(io) if ids is not None and all(ids.shape) else None,
        _datasets(files, folder, count),
    )


def _as_numbers(array: NDArray[np.generic], path: Location) -> IntArray:
    numbers = array.astype(np.int64)
    if (numbers < 0).any():
        raise FormatError("expected numbers of at least 0", path=path)
    return numbers


def _datasets(files: Mapping[str, TorchFile], folder: Location, count: int) -> dict[str, object]:
    """The names of the datasets that the examples are from, and the number of each example's name."""
    if "dataset_names.pt" not in files or "dataset_ids.pt" not in files:
        return {}
    names = files["dataset_names.pt"].value
    ids = _Tensor(folder / "dataset_ids.pt", "dataset_ids", files["dataset_ids.pt"].value, 1, "iu")
    numbers = _as_numbers(files["dataset_ids.pt"].array(ids.array), ids.path)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FormatError("expected a list of names", path=folder / "dataset_names.pt")
    if len(numbers) != count or int(numbers.max(initial=-1)) >= len(names):
        raise FormatError(f"expected {count} numbers below {len(names)}", path=ids.path)
    return {"dataset_names": list(names), "dataset_ids": numbers.tolist()}


# -- parquet -------------------------------------------------------------------------------------------------------


def quadruple(file: ParquetFile, columns: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The columns of a file by role; None if one is missing or ambiguous.

    Raises:
        ArgumentError: ``columns`` names a role or a column that does not exist.
    """
    import pyarrow as pa

    roles: dict[str, str] = {}
    for role, name in (columns or {}).items():
        one_of(role, ROLES, "columns: a role")
        roles[role] = one_of(name, file.schema.names, f"columns: {role}")
    for role in ROLES:
        fits = pa.types.is_floating if role == "value" else pa.types.is_integer
        matches = [f.name for f in file.schema if f.name.lower() in _NAMES[role].split() and fits(f.type)]
        if role not in roles and len(matches) == 1:
            roles[role] = matches[0]
        if role not in roles or not fits(file.schema.field(roles[role]).type):
            return None
    return roles


class Decoded:
    """Row groups that were decoded last, up to a number of bytes. Replaced as a whole, so that threads need no lock."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._recent: tuple[tuple[object, NDArray[np.generic]], ...] = ()

    def get(self, key: object) -> NDArray[np.generic] | None:
        """The array of a key."""
        return next((array for k, array in self._recent if k == key), None)

    def put(self, key: object, array: NDArray[np.generic]) -> None:
        """Adds an array, and drops the oldest ones that do not fit."""
        recent = [(key, array)]
        free = self.memory - array.nbytes
        for k, other in self._recent:
            free -= other.nbytes
            if k != key and free >= 0:
                recent.append((k, other))
        self._recent = tuple(recent)


class _TablePart(LatentPart):
    """A row group."""

    is_decoded = True

    def __init__(self, file: ParquetFile, group: int, roles: Mapping[str, str], decoded: Decoded) -> None:
        self.path, self.count = file.path, file.group_rows(group)
        self._file, self._group, self._roles, self._decoded = file, group, roles, decoded
        self.ranges = [self._range(roles[role]) for role in ROLES[:3]]
        """The least and the largest number of each column, by the footer."""
        if (feature := self.ranges[2]) is not None:
            self.features = range(feature[0], feature[1] + 1)

    def _range(self, name: str) -> tuple[int, int] | None:
        (leaf,) = self._file.leaves[name]
        values = self._file.footer.group(self._group).column(leaf).range
        return None if values is None else values[:2]

    def _decode(self, names: Sequence[str]) -> NDArray[np.generic]:
        key = (self.path, self._group, tuple(names))
        array = self._decoded.get(key)
        if array is None:
            needed = self.count * 8 * len(names)
            if needed > self._decoded.memory:
                raise NoMemoryError(
                    f"row group {self._group}: expected at most {shown_bytes(self._decoded.memory)}, found {self.count} entries, "
                    f"{shown_bytes(needed)}. Open it with a larger memory=",
                    path=self.path,
                )
            array = self._columns(self._file.read(self._group, list(names)))
            self._decoded.put(key, array)
        return array

    def _columns(self, table: pa.Table) -> NDArray[np.generic]:
        import pyarrow as pa

        if table.num_rows != self.count:
            raise FormatError(f"expected {self.count} rows in row group {self._group}", path=self.path)
        arrays = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count:
                raise FormatError(
                    f"row group {self._group}: column {name!r}: expected values, found null", path=self.path
                )
            try:
                numbers = column.cast(pa.int64()) if pa.types.is_integer(column.type) else column
            except pa.ArrowInvalid as error:
                raise FormatError(f"column {name!r}: expected numbers below 2**63", path=self.path) from error
            arrays.append(numbers.to_numpy())
        return np.stack(arrays, axis=1)

    def locations(self, rows: IntArray) -> IntArray:
        places = self._decode([self._roles[role] for role in ROLES[:3]])
        for axis, bounds in enumerate(self.ranges):
            column = places[:, axis]
            if bounds is not None and len(column) and (column.min() < bounds[0] or column.max() > bounds[1]):
                raise FormatError(
                    f"row group {self._group}: column {self._roles[ROLES[axis]]!r}: expected numbers from {bounds[0]} to "
                    f"{bounds[1]} by the footer, found {column.min()} to {column.max()}",
                    path=self.path,
                )
        return places[rows].astype(np.int64, copy=False)

    def values(self, rows: IntArray) -> NDArray[np.generic]:
        values: NDArray[np.generic] = self._decode([self._roles["value"]])[rows, 0]
        return values


def _parquet(module: str, path: Location, memory: int, columns: Mapping[str, str] | None) -> LatentFiles:
    paths = parquet_files(path)
    check_one_dataset(path, paths)
    decoded = Decoded(memory)
    parts: list[_TablePart] = []
    dtypes: set[np.dtype[np.generic]] = set()
    record: dict[str, object] = {}
    for file_path in paths:
        file = ParquetFile(file_path)
        roles = quadruple(file, columns)
        if roles is None:
            shown = ", ".join(f"{field.name}: {field.type}" for field in list(file.schema)[:12])
            raise FormatError(
                f"expected integer columns of examples, tokens and features, and a column of float values, found {shown}. "
                f"Name them: columns={{'example': ..., 'token': ..., 'feature': ..., 'value': ...}}",
                path=file_path,
            )
        dtypes.add(np.dtype(file.schema.field(roles["value"]).type.to_pandas_dtype()))
        groups = range(file.footer.num_groups)
        parts += [part for g in groups if (part := _TablePart(file, g, roles, decoded)).count]
        record = record or _record(file)
    largest: list[int | None] = []
    for axis in range(3):
        bounds = [part.ranges[axis] for part in parts]
        largest.append(None if None in bounds else max((pair[1] + 1 for pair in bounds if pair), default=0))
    sizes = _sizes(record.get("sizes"), paths[0])
    tokens, lengths = _token_lists(path, memory) if path.kind() == "folder" else (None, None)
    if lengths is not None and sizes.setdefault("num_examples", len(lengths)) != len(lengths):
        raise FormatError(
            f"expected the tokens of {sizes['num_examples']} examples, found {len(lengths)}", path=path / "tokens"
        )
    metadata = record.get("metadata", {})
    return LatentFiles(
        "parquet",
        path,
        str(record.get("module", module)),
        parts,
        _one_dtype(dtypes, path),
        sizes.get("num_examples", largest[0]),
        sizes.get("num_features", largest[2]),
        sizes.get("context", largest[1]),
        lengths,
        tokens,
        metadata if isinstance(metadata, dict) else {},
    )


def _record(file: ParquetFile) -> dict[str, object]:
    """What a writer of actshard recorded in the schema."""
    text = (file.schema.metadata or {}).get(KEY.encode())
    try:
        record = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{KEY}: expected JSON in the schema's metadata", path=file.path) from error
    if not isinstance(record, dict):
        raise FormatError(f"{KEY}: expected an object in the schema's metadata", path=file.path)
    return record


def _token_lists(path: Location, memory: int) -> tuple[IntArray | None, IntArray | None]:
    """Token ids, (examples, longest), padded with zeros, and their lengths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    folder = path / "tokens"
    files = parquet_files(folder) if folder.kind() == "folder" else []
    if not files:
        return None, None
    file = ParquetFile(files[0])
    if "tokens" not in file.leaves or not file.schema.field("tokens").type.equals(pa.list_(pa.int64())):
        raise FormatError("expected a column 'tokens' of lists of int64", path=file.path)
    column = pa.chunked_array(
        [chunk for g in range(file.footer.num_groups) for chunk in file.read(g, ["tokens"])["tokens"].chunks],
        pa.list_(pa.int64()),
    )
    values = pc.list_flatten(column)
    if column.null_count or values.null_count:
        raise FormatError("tokens: expected numbers, found null", path=file.path)
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    longest = int(lengths.max(initial=0))
    if len(lengths) * longest * 8 > memory:
        raise NoMemoryError(
            f"tokens: expected at most {shown_bytes(memory)}, found {len(lengths)} examples of up to {longest} tokens. Open it "
            "with a larger memory=",
            path=file.path,
        )
    ids = np.zeros((len(lengths), longest), np.int64)
    ids[np.arange(longest) < lengths[:, None]] = values.to_numpy()
    return ids, lengths


def check_columns(kind: str, columns: Mapping[str, str] | None) -> None:
    """Raises ArgumentError for ``columns=`` of files that have no columns."""
    if columns is not None and kind != "parquet":
        raise ArgumentError(f"columns: expected parquet files, found {kind}. Leave it out")
