"""``LatentStore``: entries of sparse latents by example, by feature, and streamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import many, members, one_of, shown_bytes, size, whole
from actshard.base.errors import ArgumentError, FormatError, NoMemoryError, NotStoredError, UnknownFormatError, warn
from actshard.base.location import Location, network_io
from actshard.latents.files import IntArray, LatentFiles, LatentPart, check_columns, gather, parse_latents, stores_at

_AT_ONCE = 1 << 20
"""Entries that are examined together."""


@dataclass(frozen=True, eq=False)
class LatentRows:
    """Entries of a store, as four arrays of one length.

    Attributes:
        examples: example numbers, (n,) int64.
        tokens: token positions in the example, (n,) int64.
        features: feature numbers, (n,) int64.
        values: (n,), in the stored dtype.
    """

    examples: IntArray
    tokens: IntArray
    features: IntArray
    values: NDArray[np.generic]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"<actshard.latents.LatentRows: {many(len(self), 'entry', plural='entries')}, {self.values.dtype}>"


class _Runs(NamedTuple):
    """Where the entries of each example lie in a part: runs of entries, sorted by example."""

    examples: IntArray
    starts: IntArray
    ends: IntArray

    def rows(self, examples: IntArray) -> tuple[IntArray, IntArray]:
        """The entries of examples, and the example of each."""
        runs = _ranges(np.searchsorted(self.examples, examples), np.searchsorted(self.examples, examples, "right"))
        starts, ends = self.starts[runs], self.ends[runs]
        return _ranges(starts, ends), np.repeat(self.examples[runs], ends - starts)


class _Survey(NamedTuple):
    """What one pass over all locations finds."""

    runs: list[_Runs]
    counts: IntArray
    """Entries of each feature."""
    num_examples: int
    context: int


class LatentStore:
    """Sparse latents of one module. Create one with :func:`actshard.latents.open`.

    Attributes:
        kind: ``"delphi"``, ``"torch"`` or ``"parquet"``.
        module: the name of the module.
        path: the folder or file.
        dtype: dtype of the values, as stored.
        metadata: config.json, names of datasets, or the metadata of a parquet file.
        warnings: texts, each with a code.
    """

    def __init__(self, files: LatentFiles, memory: int, io: str, columns: Mapping[str, str] | None) -> None:
        self.files, self._memory, self._io, self._columns = files, memory, io, columns
        self.kind, self.module, self.dtype = files.kind, files.module, files.dtype
        self.path: Path = files.path.place
        self.metadata: dict[str, object] = files.metadata
        self.warnings: tuple[str, ...] = files.warnings
        self._by_feature: tuple[int, IntArray, IntArray] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        files = self.files
        return _opened, (files.kind, files.module, files.path, self._memory, self._io, self._columns)

    def __repr__(self) -> str:
        return (
            f"<actshard.latents.LatentStore {str(self.path)!r} ({self.kind}): module {self.module!r}, "
            f"{many(self.n_activations, 'activation')}, {self.dtype}>"
        )

    def __len__(self) -> int:
        return self.n_examples

    @property
    def n_activations(self) -> int:
        """Number of entries."""
        return sum(part.count for part in self.files.parts)

    @property
    def n_examples(self) -> int:
        """Number of examples. Without token ids: the largest example + 1, which reads all locations once."""
        return self._survey.num_examples if self.files.num_examples is None else self.files.num_examples

    @property
    def n_features(self) -> int:
        """Number of features: the end of the last split, or the largest feature + 1."""
        return len(self._survey.counts) if self.files.num_features is None else self.files.num_features

    @property
    def n_tokens(self) -> int:
        """Token positions of the longest example. Without token ids: the largest position + 1."""
        return self._survey.context if self.files.context is None else self.files.context

    @property
    def parts(self) -> list[tuple[Path, int, range | None]]:
        """File, number of entries and features of each split or row group; None: any feature."""
        return [(part.path.place, part.count, part.features) for part in self.files.parts]

    def length(self, example: int) -> int:
        """Tokens of an example; :attr:`n_tokens` if the files do not contain lengths."""
        number = self._number(example)
        return self.n_tokens if self.files.lengths is None else int(self.files.lengths[number])

    def tokens(self, example: int) -> NDArray[np.generic]:
        """Token ids of an example, (T,).

        Raises:
            NotStoredError: the store has no token ids.
        """
        number = np.array([self._number(example)])
        ids = self.files.tokens
        if ids is None:
            raise NotStoredError("the latents contain no token ids", path=self.path)
        row: NDArray[np.generic] = ids[number[0]] if isinstance(ids, np.ndarray) else gather(ids, number)[0]
        return row[: self.length(example)]

    @property
    def has_tokens(self) -> bool:
        """Whether token ids are stored."""
        return self.files.tokens is not None

    # -- reading ---------------------------------------------------------------------------------------------------

    def example(self, example: int) -> LatentRows:
        """All entries of an example, sorted by token and feature. Negative numbers count from the end."""
        return self.examples([example])

    def examples(self, examples: Iterable[int] | IntArray) -> LatentRows:
        """All entries of examples, in the given order, then by token and feature. Reads from all parts.

        Raises:
            OutOfRangeError: there is no such example.
            FormatError: an entry lies where a file places another example, such as one that was changed since the index was built.
        """
        numbers = members(
            examples if isinstance(examples, np.ndarray) else list(examples), self.n_examples, "example", self.path
        )
        order = np.argsort(numbers, kind="stable")
        chosen = numbers[order]
        pieces = []
        for part, runs in zip(self.files.parts, self._runs, strict=True):
            entries, expected = runs.rows(np.unique(chosen))
            pieces.append(self._read(part, entries))
            if len(wrong := np.flatnonzero(pieces[-1].examples != expected)):
                at = int(wrong[0])
                raise FormatError(
                    f"entry {entries[at]}: expected example {expected[at]}, found {pieces[-1].examples[at]}",
                    path=part.path,
                )
        rows = self._joined(pieces)
        first, last = np.searchsorted(chosen, rows.examples), np.searchsorted(chosen, rows.examples, "right")
        repeats = np.repeat(np.arange(len(rows)), last - first)  # an example may occur twice among the numbers
        return _sorted(_taken(rows, repeats), order[_ranges(first, last)])

    def feature(self, feature: int) -> LatentRows:
        """All entries of a feature, sorted by example and token. Reads only parts that may have it."""
        number = int(members([feature], self.n_features, "feature", self.path)[0])
        parts = [i for i, part in enumerate(self.files.parts) if part.features is None or number in part.features]
        rows = self._joined([self._read(self.files.parts[i], self._rows_of(i, number, len(parts))) for i in parts])
        return _sorted(rows, np.zeros(len(rows), np.int64))

    def stream(
        self, batch: int = 64, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, first: int = 0
    ) -> Iterator[LatentRows]:
        """Yields the entries of ``batch`` examples at a time, as :meth:`examples` returns them, without examples that have none.

        Args:
            batch: examples per batch.
            shuffle: permute the examples. The order depends only on the number of examples with entries, ``seed`` and ``epoch``.
            seed: of the permutation.
            epoch: another permutation for each.
            first: the first batch, to continue a stream that was interrupted.
        """
        batch, first = whole(batch, "batch", 1), whole(first, "first")
        present = np.unique(
            np.concatenate([np.zeros(0, np.int64), *(r.examples[r.ends > r.starts] for r in self._runs)])
        )
        if shuffle and len(present) > 1:
            from actshard.tokens.orders import permutation

            order = permutation("feistel", len(present), whole(seed, "seed")).of_epoch(whole(epoch, "epoch"))
            present = present[order(np.arange(len(present)))]
        for start in range(first * batch, len(present), batch):
            yield self.examples(present[start : start + batch])

    def dense(self, example: int) -> NDArray[np.generic]:
        """The values of an example as an array (T, n_features), with zeros for features without an entry.

        Raises:
            NoMemoryError: the array is larger than the store's ``memory``.
            FormatError: a token has two values of one feature, or lies behind the end of the example.
        """
        shape = (self.length(example), self.n_features)
        needed = shape[0] * shape[1] * self.dtype.itemsize
        if needed > self._memory:
            raise NoMemoryError(
                f"expected at most {shown_bytes(self._memory)}, found {shape[0]} tokens x {shape[1]} features of {self.dtype}, "
                f"{shown_bytes(needed)}. Read example({example}), or open the store with a larger memory=",
                path=self.path,
            )
        rows = self.example(example)
        if len(rows) and int(rows.tokens[-1]) >= shape[0]:
            raise FormatError(
                f"example {example}: expected {shape[0]} tokens, found token {rows.tokens[-1]}", path=self.path
            )
        if (repeated := repeats_at(rows)).size:
            k = int(repeated[0])
            raise FormatError(
                f"example {example}: expected one value of feature {rows.features[k]} at token {rows.tokens[k]}, found several",
                path=self.path,
                code="duplicate-latent",
            )
        out = np.zeros(shape, self.dtype)
        out[rows.tokens, rows.features] = rows.values
        return out

    def counts(self) -> IntArray:
        """Entries of each feature, (n_features,) int64. Reads all locations once."""
        counts = self._survey.counts
        self.check_memory(self.n_features * 8, "counts of all features")
        return np.concatenate([counts, np.zeros(self.n_features - len(counts), np.int64)])

    def density(self) -> NDArray[np.float64]:
        """Fraction of all tokens at which each feature has an entry, (n_features,)."""
        lengths = self.files.lengths
        tokens = self.n_examples * self.n_tokens if lengths is None else int(lengths.sum())
        return self.counts() / max(tokens, 1)

    def top_features(self, k: int = 20) -> list[tuple[int, int]]:
        """The features with the most entries, and their numbers of entries; the lower feature first if they are equal."""
        counts = self._survey.counts
        order = np.argsort(-counts, kind="stable")[: whole(k, "k")]
        return [(int(feature), int(counts[feature])) for feature in order if counts[feature]]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _number(self, example: int) -> int:
        return int(members([example], self.n_examples, "example", self.path)[0])

    def check_memory(self, needed: int, what: str) -> None:
        """Raises NoMemoryError for an array of more bytes than the store may take. Internal."""
        if needed > self._memory:
            raise NoMemoryError(
                f"{what}: expected at most {shown_bytes(self._memory)}, found {shown_bytes(needed)}. Open the store with a "
                "larger memory=",
                path=self.path,
            )

    @staticmethod
    def _read(part: LatentPart, rows: IntArray) -> LatentRows:
        places = part.locations(rows)
        return LatentRows(places[:, 0], places[:, 1], places[:, 2], part.values(rows))

    def _joined(self, pieces: list[LatentRows]) -> LatentRows:
        none = np.zeros(0, np.int64)
        pieces = pieces or [LatentRows(none, none, none, np.zeros(0, self.dtype))]
        return LatentRows(*(np.concatenate([getattr(p, n) for p in pieces]) for n in LatentRows.__dataclass_fields__))

    def chunks(self, part: LatentPart) -> Iterator[tuple[int, IntArray]]:
        """The locations of a part in order, checked, with the number of the first entry. Internal."""
        for first in range(0, part.count, _AT_ONCE):
            places = part.locations(np.arange(first, min(first + _AT_ONCE, part.count)))
            limits = (self.files.num_examples, self.files.context, self.files.num_features)
            for axis, (what, limit) in enumerate(zip(("example", "token", "feature"), limits, strict=True)):
                column = places[:, axis]
                if len(wrong := np.flatnonzero((column < 0) | (column >= (1 << 62 if limit is None else limit)))):
                    at = int(wrong[0])
                    expected = "of at least 0" if limit is None else f"from 0 to {limit - 1}"
                    raise FormatError(
                        f"entry {first + at}: expected {what} {expected}, found {column[at]}",
                        path=part.path,
                        code="latent-location",
                    )
            yield first, places

    @cached_property
    def _survey(self) -> _Survey:
        """Reads all locations once: the runs of each example in each part, and how often each feature occurs."""
        counts, used = np.zeros(0, np.int64), 0
        largest = np.array([-1, -1])
        all_runs = []
        for part in self.files.parts:
            pieces: list[tuple[IntArray, IntArray]] = []
            previous = None
            for first, places in self.chunks(part):
                largest = np.maximum(largest, places[:, :2].max(axis=0))
                self.check_memory(8 * (int(places[:, 2].max()) + 1), "counts of all features")
                counts = _added(counts, np.bincount(places[:, 2]))
                examples = np.ascontiguousarray(places[:, 0])
                is_start = np.append(examples[0] != previous, np.diff(examples) != 0)
                heads, previous = np.flatnonzero(is_start), examples[-1]
                pieces.append((examples[heads], first + heads))
                used += 24 * len(heads)
                self.check_memory(used, "index of examples")
            examples, starts = (np.concatenate([np.zeros(0, np.int64), *(p[k] for p in pieces)]) for k in (0, 1))
            ends = np.append(starts[1:], part.count)[: len(starts)]
            order = np.argsort(examples, kind="stable")
            all_runs.append(_Runs(examples[order], starts[order], ends[order]))
        return _Survey(all_runs, counts, int(largest[0]) + 1, int(largest[1]) + 1)

    @cached_property
    def _runs(self) -> list[_Runs]:
        """Runs of each part, from a file that contains them, or else from a pass over all locations."""
        starts = [part.starts for part in self.files.parts]
        if any(s is None for s in starts):
            return self._survey.runs
        return [_Runs(np.arange(len(s) - 1), s[:-1], s[1:]) for s in starts if s is not None]

    def _rows_of(self, number: int, feature: int, parts: int) -> IntArray:
        """Entries of a feature in a part. The order by feature of the last part stays in memory, if it fits."""
        part = self.files.parts[number]
        cached = self._by_feature
        if parts > 1 or part.is_decoded or part.count * 16 > self._memory:
            entries = [first + np.flatnonzero(places[:, 2] == feature) for first, places in self.chunks(part)]
            return np.concatenate([np.zeros(0, np.int64), *entries])
        if cached is None or cached[0] != number:
            features = np.concatenate([np.zeros(0, np.int64), *(places[:, 2] for _, places in self.chunks(part))])
            keys = features - features.min(initial=feature)
            keys = keys.astype(np.min_scalar_type(int(keys.max(initial=0))))  # numpy sorts 16 bits in linear time
            order = np.argsort(keys, kind="stable")
            cached = self._by_feature = (number, features[order], order)
        first, last = np.searchsorted(cached[1], [feature, feature + 1])
        return cached[2][first:last]


def modules(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Returns the names of the modules at a path, such as ``("layers.0", "layers.5")``.

    Raises:
        MissingFileError: the path does not exist.
        UnknownFormatError: there are no sparse latents.
    """
    return tuple(_find(Location.of_any(path, storage_options), columns)[1])


def open(
    path: str | os.PathLike[str],
    module: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    memory: int | str = "1GiB",
    io: Literal["auto", "mmap", "pread"] = "auto",
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
) -> LatentStore:
    """Opens sparse latents. Reads headers and metadata, but no entry.

    Args:
        path: the folder of a module, or one with the folders of modules; a parquet file. Or their URL.
        module: which one, if there are several.
        columns: for parquet files, columns by role (``"example"``, ``"token"``, ``"feature"``, ``"value"``), if they are not
            recognised.
        memory: the most that an index, a decoded row group or a dense array may take.
        io: as for :func:`actshard.open`.
        storage_options: as for :func:`actshard.open`.
        cache: as for :func:`actshard.open`.

    Raises:
        MissingFileError: the path does not exist.
        UnknownFormatError: there are no sparse latents.
        ArgumentError: there are several modules, or none of this name.
        FormatError, HeaderError, TruncatedFileError, UnsafePickleError, UnsupportedError: a file is damaged or unsupported.
    """
    root = Location.of_any(path, storage_options, cache)
    kind, folders = _find(root, columns)
    if module is None and len(folders) > 1:
        shown = ", ".join(map(repr, list(folders)[:10])) + (", ..." if len(folders) > 10 else "")
        raise ArgumentError(f"expected module=, because there are {len(folders)}: {shown}", path=root)
    name = next(iter(folders)) if module is None else one_of(module, folders, "module")
    one_of(io, ("auto", "mmap", "pread"), "io")
    mode = network_io(root) if io == "auto" else io
    limit = size(memory, "memory")
    files = parse_latents(kind, name, folders[name], io=mode, memory=limit, columns=columns)
    for remark in files.warnings:
        warn(f"{folders[name]}: {remark}", code=remark.code)
    return LatentStore(files, limit, mode, columns)


def _find(root: Location, columns: Mapping[str, str] | None) -> tuple[str, dict[str, Location]]:
    latents = stores_at(root, columns)
    if latents is None:
        root.stat()  # a missing path has its own error
        raise UnknownFormatError(
            "expected sparse latents: splits of delphi (0_8191.safetensors), activations.pt with indices.pt and ranges.pt, or "
            "parquet files with columns of examples, tokens, features and values (columns= names them), found none",
            path=root,
        )
    check_columns(latents[0], columns)
    return latents


def _opened(
    kind: str, module: str, path: Location, memory: int, io: str, columns: Mapping[str, str] | None
) -> LatentStore:
    files = parse_latents(kind, module, path, io=io, memory=memory, columns=columns)
    return LatentStore(files, memory, io, columns)


def repeats_at(rows: LatentRows) -> IntArray:
    """Positions of entries, sorted by example, token and feature, that the next one repeats."""
    same = [column[1:] == column[:-1] for column in (rows.examples, rows.tokens, rows.features)]
    return np.flatnonzero(same[0] & same[1] & same[2])


def _ranges(starts: IntArray, ends: IntArray) -> IntArray:
    """The numbers from each start to its end, joined."""
    sizes = ends - starts
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


def _taken(rows: LatentRows, numbers: IntArray) -> LatentRows:
    return LatentRows(rows.examples[numbers], rows.tokens[numbers], rows.features[numbers], rows.values[numbers])


def _sorted(rows: LatentRows, ranks: IntArray) -> LatentRows:
    """By rank, then by example, token and feature. Stable."""
    return _taken(rows, np.lexsort((rows.features, rows.tokens, rows.examples, ranks)))


def _added(a: IntArray, b: IntArray) -> IntArray:
    """The sum of counts, of which one may have more features."""
    total, other = (a.copy(), b) if len(a) > len(b) else (b.copy(), a)
    total[: len(other)] += other
    return total
