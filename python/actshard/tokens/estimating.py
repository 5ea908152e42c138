"""Estimates the size of a token cache before it is built, by tokenizing a sample of the records.

The sample is a few megabytes: evenly spaced ranges of JSON lines, the first bytes of compressed files, some rows of row groups.
A separate process tokenizes it like a task, to measure a task's memory. Small sources are read whole, which gives exact numbers.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import actshard._native as _native
from actshard.base._schema import json_values, read_value
from actshard.base.errors import ActshardError, FormatError, InternalError, as_plain, boundary, from_plain
from actshard.base.location import Location
from actshard.base.work.pool import peak_memory
from actshard.tokens.ledger import CONSOLIDATED, Ledger
from actshard.tokens.pieces import LineRange, rows_of_groups
from actshard.tokens.processing import Processor
from actshard.tokens.recipe import Recipe, shard_ledger
from actshard.tokens.shards import RowSetup, write_rows
from actshard.tokens.sources import (
    RecordOrBlock,
    RowProblem,
    Source,
    compression,
    inflated,
    kind_of,
    parquet_rows,
    parsed,
)
from actshard.tokens.tokenizer import Tokenizer
from actshard.tokens.writing import FieldWriters

_SAMPLE, _RANGES = 2 << 20, 64
"""Bytes of JSON lines to read, and number of ranges."""
_FILES, _BEGINNING, _GROUPS, _ROWS = 4, 256 << 10, 4, 256
"""For other kinds: number of files to read, bytes of each compressed file, and row groups and rows of each Parquet file."""

HELD = 16 << 20
"""Maximum bytes of a field's elements that a writer buffers."""


# -- the sample ----------------------------------------------------------------------------------------------------

SamplePart = Callable[["_SampleOfKind", Sequence[str]], Iterator[RecordOrBlock]]


class _SampleOfKind:
    """A source that yields the records of parts of the sources of one kind."""

    what = "record"

    def __init__(self, parts: list[SamplePart]) -> None:
        self.parts = parts
        self.read = 0.0
        """Bytes of the sources that the parts come from; known after the records were read."""

    def error(self, problem: RowProblem) -> FormatError:
        """Never raised: the sample skips unusable records; the task that reads them reports them."""
        return problem.error(None)

    def records(
        self, columns: Sequence[str], tell: Callable[[int], object] | None = None, *, blocks: bool = False
    ) -> Iterator[RecordOrBlock]:
        """Yields the records of all parts."""
        for part in self.parts:
            yield from part(self, columns)


def kind_named(path: Path) -> str:
    """The kind of a source: its format and compression. Each kind gets one sample."""
    return f"{kind_of(path)} {compression(path) or 'plain'}"


def _kinds(sources: Sequence[Source]) -> list[list[Source]]:
    """Sources that are not empty, by kind."""
    kinds: dict[str, list[Source]] = {}
    for source in sources:
        if source.size():
            kinds.setdefault(kind_named(source.path), []).append(source)
    return [kind_sources for _, kind_sources in sorted(kinds.items())]


def _reads_all(sources: list[Source]) -> bool:
    """Whether sources of one kind are small enough to be read whole."""
    limit = _SAMPLE if compression(sources[0].path) is None else _BEGINNING
    return sum(source.size() for source in sources) <= limit


def _parts(sources: list[Source], total: int) -> list[SamplePart]:
    """Parts of sources of one kind; ``total`` is the size of all sources."""
    path, kind_bytes = sources[0].path, sum(source.size() for source in sources)
    kind, plain = kind_of(path), compression(path) is None
    if kind == ".jsonl" and plain:
        return _ranges(sources, kind_bytes, max(_SAMPLE * kind_bytes // total, _SAMPLE // 8))
    sampled = sources[:: max(1, -(-len(sources) // _FILES))]
    if kind == ".jsonl":
        return [_beginning(source) for source in sampled]
    if kind == ".parquet" and plain:
        return [_rows(source, k) for source in sampled for k in range(_GROUPS)]
    return [_all(source) for source in sampled[:1]]


def _all(source: Source) -> SamplePart:
    def part(sample: _SampleOfKind, columns: Sequence[str]) -> Iterator[RecordOrBlock]:
        yield from source.records(columns)
        sample.read += source.size()

    return part


def _ranges(sources: list[Source], kind_bytes: int, size: int) -> list[SamplePart]:
    """Evenly spaced ranges of all files."""
    range_size = max(size // _RANGES, 1)
    ends = np.cumsum([source.size() for source in sources])
    ranges: list[SamplePart] = []
    for k in range(_RANGES):
        position = (2 * k + 1) * kind_bytes // (2 * _RANGES) - range_size // 2
        i = int(np.searchsorted(ends, position, "right"))
        first = position - int(ends[i]) + sources[i].size()
        ranges.append(_range(sources[i], first, min(first + range_size, sources[i].size())))
    return ranges


def _range(source: Source, first: int, stop: int) -> SamplePart:
    def part(sample: _SampleOfKind, columns: Sequence[str]) -> Iterator[RecordOrBlock]:
        for number, _, line in LineRange(source.path, source.shard, source.version, first, stop).lines():
            yield parsed(number, line)
            sample.read += len(line)  # not the range's bytes: lines may end after it

    return part


def _beginning(source: Source) -> SamplePart:
    """The lines in the first bytes of a compressed file."""

    def part(sample: _SampleOfKind, columns: Sequence[str]) -> Iterator[RecordOrBlock]:
        cut, lines = 0, list[bytes]()
        while cut < source.size() and not lines:
            cut = min(max(4 * cut, _BEGINNING), source.size())
            lines = _lines_in(Location.at(source.path).read(0, cut), source.path)
        for number, line in enumerate(lines, 1):
            yield parsed(number, line)
        sample.read += cut

    return part


def _lines_in(data: bytes, path: Path) -> list[bytes]:
    """The whole lines in the beginning of a compressed file."""
    lines = []
    # Truncated data raise an error after their last bytes.
    with contextlib.suppress(EOFError, OSError, zlib.error, lzma.LZMAError):
        for line in inflated(io.BytesIO(data), path):
            lines.append(line)
    return lines


def _rows(source: Source, k: int) -> SamplePart:
    """The first rows of a row group; counted as their share of the file's bytes."""

    def part(sample: _SampleOfKind, columns: Sequence[str]) -> Iterator[RecordOrBlock]:
        rows = rows_of_groups(source.path)
        filled = [group for group, n in enumerate(rows) if n]
        if k >= len(filled):
            return
        group = filled[k * len(filled) // min(_GROUPS, len(filled))]
        count = min(_ROWS, rows[group])
        with Location.at(source.path).open("read") as raw:
            yield from itertools.islice(parquet_rows(raw, columns, source.path, groups=[group]), count)
        sample.read += source.size() * count / sum(rows)

    return part


# -- its tokens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredArray:
    """How an array of the sample is stored.

    Attributes:
        item: bytes of an element.
        text: bytes of its ``zarr.json``.
        rate, unused_rate: compressed bytes per element, and per element that the last frame has room for.
    """

    item: int
    text: int
    rate: float
    unused_rate: float

    def size(self, elements: int, storage: str, *, offsets: bool) -> tuple[int, int]:
        """Bytes of an array of other length, and number of its data files."""
        frames, indexes, files, unused = _native.token_array_size(elements, self.item, offsets)
        if storage != "plain":
            frames = round(elements * self.rate + unused * self.unused_rate)
        return self.text + frames + indexes, files


@dataclass(frozen=True)
class Tokenized:
    """Counts and measurements of a sample.

    Attributes:
        exact_counts: rows and elements by field of the sources that were read whole, by shard.
        rates: for each kind of other sources, rows and elements by field, per byte of the source.
        arrays: how each field's arrays are stored, by name: ``data`` and ``offsets``.
        memory: peak memory of the process in bytes.
        element_bytes: for each field, bytes of its elements in the sample.
    """

    exact_counts: Mapping[str, tuple[int, Mapping[str, int]]]
    rates: Mapping[str, tuple[float, Mapping[str, float]]]
    arrays: Mapping[str, Mapping[str, MeasuredArray]]
    memory: int
    element_bytes: Sequence[int]

    def counts(self, source: Source) -> tuple[int, dict[str, int]]:
        """Number of rows of a source, and of elements by field."""
        if source.shard in self.exact_counts:
            row_count, counts = self.exact_counts[source.shard]
            return row_count, dict(counts)
        rows, elements = self.rates.get(kind_named(source.path), (0.0, {}))
        size = source.size()
        return round(rows * size), {name: round(rate * size) for name, rate in elements.items()}

    def cache_size(
        self, recipe: Recipe, rows: Mapping[str, int], elements: Mapping[str, Mapping[str, int]]
    ) -> tuple[int, int]:
        """(bytes, files) of a finished cache, folders not counted.

        Args:
            recipe: the cache's recipe.
            rows: number of rows by shard.
            elements: number of elements by shard and field.
        """
        cache_ledger = recipe.ledger(rows, elements, {}, None)
        folders = [(cache_ledger, recipe.storage)] if recipe.layout == CONSOLIDATED else []
        size, files = (0, 0) if folders else (_ledger_size(cache_ledger, rows), 1)
        for shard in recipe.kept:
            ledger = shard_ledger(shard, rows[shard], elements[shard], "0" * 32, 0, recipe.metadata)
            folders.append((ledger, recipe.shard_storage))
            files += bool(rows[shard])  # .success
        for ledger, storage in folders:
            row_count, paths = ledger.total_num_rows, list[str]()
            for name, arrays in self.arrays.items():
                lengths = {"offsets": row_count + 1 if row_count else 0, "data": ledger.field_counts.get(name, 0)}
                for array, length in lengths.items():
                    array_size, array_files = arrays[array].size(length, storage, offsets=array == "offsets")
                    size, files = size + array_size, files + 1 + array_files
                    paths += [f"{name}/{array}/c/{number}" for number in range(array_files)]
            size, files = size + _ledger_size(ledger, paths), files + 1
        return size, files


def _ledger_size(ledger: Ledger, paths: Iterable[str]) -> int:
    return len(json.dumps(ledger.with_checksums(dict.fromkeys(paths, "0" * 8)).as_dict()))


def tokenized(recipe: Recipe, tokenizer: Tokenizer | None, now: Sequence[object] | None) -> Tokenized:
    """Tokenizes a sample of a recipe's sources in a separate process. Unusable records are skipped.

    Raises:
        Errors of reading the sources.
    """
    setup = {
        "sources": [[os.fspath(s.path), s.shard, s.version] for s in recipe.sources if isinstance(s, Source)],
        "rows": json_values(RowSetup.of(recipe.format, tokenizer, recipe.options)),
        "storage": recipe.storage,
        "now": now,
    }
    process = subprocess.run(
        [sys.executable, "-m", "actshard.tokens.estimating"],
        input=json.dumps(setup).encode(),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        answer = json.loads(process.stdout.rpartition(b"\n")[2])
    except ValueError:
        last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InternalError(
            f"the process that tokenizes a sample ended with status {process.returncode}: {last}"
        ) from None
    if "error" in answer:
        raise from_plain(answer)
    arrays = {
        name: {array: MeasuredArray(**values) for array, values in pair.items()}
        for name, pair in answer.pop("arrays").items()
    }
    return Tokenized(**answer, arrays=arrays)


def main() -> None:
    """Tokenizes the sample that stdin describes; writes a :class:`Tokenized`, or an error, as the last line of stdout."""
    setup = json.load(sys.stdin)
    try:
        with boundary(None, "tokenize a sample"), tempfile.TemporaryDirectory() as folder:
            process = read_value(RowSetup, setup["rows"]).processor()
            process.now = None if setup["now"] is None else time.struct_time(tuple(setup["now"]))
            sources = [Source(Path(path), shard, tuple(version)) for path, shard, version in setup["sources"]]
            answer = json_values(_tokenize(sources, process, Path(folder), setup["storage"]))
    except ActshardError as error:
        answer = as_plain(error)
    sys.stdout.write("\n" + json.dumps(answer))


def _tokenize(sources: Sequence[Source], process: Processor, folder: Path, storage: str) -> Tokenized:
    writers = FieldWriters(folder / "sample", process.fields, storage)
    exact_counts: dict[str, tuple[int, Mapping[str, int]]] = {}
    rates: dict[str, tuple[float, Mapping[str, float]]] = {}
    for kind_sources in _kinds(sources):
        if _reads_all(kind_sources):
            for source in kind_sources:
                counts = write_rows(source, process, writers, skip=True)
                exact_counts[source.shard] = counts.rows, counts.elements
            continue
        sample = _SampleOfKind(_parts(kind_sources, sum(source.size() for source in sources)))
        counts = write_rows(sample, process, writers, skip=True)
        if sample.read:
            rates[kind_named(kind_sources[0].path)] = (
                counts.rows / sample.read,
                {name: n / sample.read for name, n in counts.elements.items()},
            )
    written = writers.finish()
    zeros = FieldWriters(folder / "zeros", process.fields, storage)
    for name, kind in process.fields.items():
        zeros.append(name, np.zeros(1, kind), np.ones(1, np.int64))
    zeros.finish()
    arrays = {
        name: {
            "data": _measured(folder, f"{name}/data", kind.itemsize, written.elements[name], 1),
            "offsets": _measured(folder, f"{name}/offsets", 8, written.rows + 1, 2),
        }
        for name, kind in process.fields.items()
    }
    element_bytes = [written.elements[name] * kind.itemsize for name, kind in process.fields.items()]
    return Tokenized(exact_counts, rates, arrays, peak_memory(), element_bytes)


def _measured(folder: Path, array: str, item: int, elements: int, zeros: int) -> MeasuredArray:
    """Measures an array of the sample, and one of zeros, which fill up the last frame of any array."""
    unused_rate = _chunks(folder / "zeros" / array) / _native.token_array_size(zeros, item, False)[-1]
    unused = unused_rate * _native.token_array_size(elements, item, False)[-1]
    rate = max(_chunks(folder / "sample" / array) - unused, 0) / max(elements, 1)
    return MeasuredArray(item, _size(folder / "sample" / array / "zarr.json"), rate, unused_rate)


def _size(file: Path) -> int:
    return Location.at(file).stat().size


def _chunks(array: Path) -> int:
    """Bytes of an array's frames."""
    chunks = Location.at(array) / "c"
    index = _native.token_array_size(1, 1, False)[1]
    return sum(_size(file.local) - index for file, _ in chunks.files()) if chunks.exists() else 0


if __name__ == "__main__":
    main()
