"""One Zarr activation store: its arrays, which rows are samples, their lengths, and its columns."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import many, name_of
from actshard.base._json import Fields, read_json, read_lines, show, utf8
from actshard.base.codes import Remark
from actshard.base.errors import ActshardError, FormatError, UnsupportedError, warn
from actshard.base.location import Location, read_ahead
from actshard.formats.zarr.absent import WholeChunks
from actshard.formats.zarr.arrays import Spare, ZarrStore, read_constant, read_whole
from actshard.formats.zarr.meta import ArrayMeta, stored
from actshard.formats.zarr.scales import SCALES, stored_scales

ACTIVATIONS = "arrays/activations"
PROMPT, RESPONSE = "arrays/prompt_activations", "arrays/response_activations"
LENGTHS = {ACTIVATIONS: "seq_len", PROMPT: "prompt_len", RESPONSE: "response_len"}
"""The array with the lengths of each array of activations."""
_LEAST_WIDTH = 16
"""Elements of a row that may be activations; shorter ones are scores or scales."""
_LISTED = 1 << 10
"""Arrays with more chunks are not listed when a store is opened; ``verify`` lists all."""
MAX_SAMPLES = 1 << 31
"""Limit on samples: more would need too much memory for the lengths."""
MAX_LAYERS = 1 << 16
UNSTORED_SAMPLES = 1 << 24
"""Number of samples that a store may have without chunk files. Their token counts take 128 MiB."""
SAMPLES_PER_FILE = 1 << 10
"""Samples allowed per chunk file."""


_SMALL_TEXT = 1 << 20
"""Text files up to this size are read from a remote store in parallel, before they are parsed."""

TEXTS = ("extra_metadata.jsonl", "prompts.jsonl", "responses.jsonl")
"""Usual files in ``text/``. They are requested by name if names cannot be listed."""


@dataclass
class Member:
    """A store, alone or in a run."""

    path: Location
    warnings: list[Remark] = field(default_factory=list)
    skips_incomplete: bool = False
    """Whether samples with a missing chunk have no tokens."""

    def __post_init__(self) -> None:
        self.store = ZarrStore(self.path)
        self.version = self.store.version
        self.store.read_ahead(
            [ACTIVATIONS, "arrays/seq_len"], [PROMPT, RESPONSE, "arrays/prompt_len", "arrays/response_len"]
        )
        if not self.path.lists:
            self.store.names(
                "arrays"
            )  # raises without consolidated metadata: a single wrong 404 must not hide the lengths
        activations = self.store.array(ACTIVATIONS)
        # Prompt and response arrays are looked up only without ACTIVATIONS, because each lookup costs a request.
        prompt, response = (self.store.array(node) if activations is None else None for node in (PROMPT, RESPONSE))
        if activations is not None:
            self.arrays = [activations]
        elif prompt is not None or response is not None:
            self.arrays = [a for a in (prompt, response) if a is not None]
        else:
            existing = f"{self.store.names('arrays')[:8]} in arrays/" if self.path.lists else "neither"
            raise FormatError(
                f"expected an array {ACTIVATIONS} (or {PROMPT}), found {existing}",
                path=self.path,
            )
        for array in self.arrays:
            if len(array.shape) != 4:
                raise array.error(
                    f"expected (samples, layers, tokens, hidden), found {list(array.shape)}", field="shape"
                )
            if array.dtype is None or array.dtype.kind in "SU":
                raise UnsupportedError("expected numeric activations, found strings", path=array.metadata)
            name_of(array.dtype, path=array.metadata)
            if (
                not 1 <= array.shape[1] <= MAX_LAYERS
                or array.shape[3] == 0
                or array.shape[0] >= MAX_SAMPLES
                or array.shape[2] >= 1 << 32
            ):
                raise array.error(
                    f"expected supported sizes (samples, layers, tokens, hidden), found {list(array.shape)}",
                    field="shape",
                )
            _check_samples(array)
        shapes = {(a.shape[0], a.shape[1], a.shape[3], a.dtype) for a in self.arrays}
        if len(shapes) > 1:
            raise self.arrays[1].error(
                f"expected samples, layers, hidden size and dtype of {self.arrays[0].node}, {list(self.arrays[0].shape)} "
                f"{self.arrays[0].dtype}, found {list(self.arrays[1].shape)} {self.arrays[1].dtype}",
                field="shape",
            )
        self.rows, self.num_layers, _, self.width = self.arrays[0].shape
        self.n = self.rows
        self.hallulens = activations is None
        self._read_attributes()
        self.scaling = stored_scales(self.store, activations) if activations is not None else None
        self._index()
        self.absent = np.zeros(self.n if self.skips_incomplete else 0, np.bool_)
        """A flag per sample that is left out; empty if none can be."""
        self.broken: list[Location] = []
        """Files that are missing or not whole."""
        self.lengths = [self._lengths(a) for a in self.arrays]
        if self.skips_incomplete:
            self._leave_out()
        self.warnings += self.store.warnings

    def _read_attributes(self) -> None:
        config = self.path / "meta" / "config.json"
        config.parent.look_into()
        self.metadata: dict[str, object] = {}
        if config.kind() == "file":
            self.metadata |= Fields(read_json(config), config).value
        self.metadata |= self.store.attributes
        claims = {"num_layers": self.num_layers, "hidden_size": self.width}
        if not self.hallulens:
            claims["T_max"] = self.arrays[0].shape[2]
        for name, actual in claims.items():
            claimed = self.metadata.get(name)
            if claimed is not None and claimed != actual:
                self.warnings.append(
                    Remark("claim", f"attribute '{name}' is {show(claimed)}, but the array has {actual}")
                )

    def _index(self) -> None:
        """Determines which rows of a HalluLens store are samples.

        A row can be unused: it was preallocated, or its key was logged again.
        """
        self.lines: list[tuple[int, dict[str, Any]]] | None = None
        path = self.path / "meta" / "index.jsonl"
        if not self.hallulens or path.kind() != "file":
            return
        by_key: dict[object, tuple[int, dict[str, object]]] = {}
        for number, line in read_lines(path):
            fields = Fields(line, path, f"line {number}")
            key = line.get("key", number)
            by_key[key if isinstance(key, str | int) else number] = (number, line)
            if line.get("sample_index") is not None and fields.integer("sample_index", minimum=0) >= self.rows:
                raise fields.error("sample_index", f"a row of the arrays, 0 to {self.rows - 1}")
        self.lines = list(by_key.values())
        of_row: dict[int, int] = {}
        for number, line in self.lines:
            row = line.get("sample_index")
            if row is not None:
                if row in of_row:
                    raise FormatError(
                        f"lines {of_row[row]} and {number}: both have sample_index {row}",
                        path=path,
                        code="duplicate-sample",
                    )
                of_row[row] = number
        text_only = len(self.lines) - len(of_row)
        self.n = max(of_row, default=-1) + 1
        self.is_sample = np.zeros(self.n, bool)
        self.is_sample[list(of_row)] = True
        if count := self.n - len(of_row):
            self.warnings.append(
                Remark(
                    "layout",
                    f"{many(count, 'row', 'has', 'have')} no line in meta/index.jsonl (logged again, or never): read as 0 tokens",
                )
            )
        if text_only:
            self.metadata = {**self.metadata, "text_only_lines": text_only}

    @property
    def row_arrays(self) -> list[ArrayMeta]:
        """The arrays of which rows are made: activations, and the scales of their rows."""
        return [*self.arrays, *([] if self.scaling is None else [self.scaling.meta])]

    @property
    def row_dtype(self) -> np.dtype[np.generic]:
        """The dtype of rows."""
        assert self.arrays[0].dtype is not None
        return self.arrays[0].dtype if self.scaling is None else np.dtype(np.float32)

    @cached_property
    def spare(self) -> Spare:
        """Memory budget for small arrays without chunk files."""
        return Spare()

    def keep(self, n: int) -> None:
        """Keeps only the first n samples, as in the manifest."""
        if n < self.n:
            self.warnings.append(
                Remark("layout", f"contains {self.n} samples, but the manifest counts {n}; the rest are ignored")
            )
        self.n, self.absent = n, self.absent[:n]
        self.lengths = [part if isinstance(part, int) else part[:n] for part in self.lengths]

    def _lengths(self, array: ArrayMeta) -> int | NDArray[np.uint32]:
        name = LENGTHS[array.node]
        longest = array.shape[2]
        meta = self.store.array(f"arrays/{name}")
        if meta is None:
            self.warnings.append(
                Remark(
                    "no-lengths",
                    f"has no arrays/{name}: every sample is read with all {longest} tokens of {array.node}",
                )
            )
            return longest
        if meta.shape != (self.rows,):
            raise meta.error(f"expected [{self.rows}], one length per sample, found {list(meta.shape)}", field="shape")
        if meta.dtype is None or meta.dtype.kind not in "iu":
            raise meta.error(f"expected integers, found {meta.dtype or 'strings'}", field="dtype")
        files = self._whole_lengths(meta) if self.skips_incomplete else meta.stored()
        if meta.fill == 0:
            self.warnings += _missing_chunk(meta, files, "its samples are read as 0 tokens")
        if (same := read_constant(meta, files)) is not None and self.lines is None:
            if not 0 <= same <= longest:
                raise meta.error(f"expected lengths of 0 to {longest}, found {same}, and no chunks", field="fill_value")
            return same
        values = np.asarray(read_whole(meta, self.spare, files))[: self.n]
        if values.size and values.min() < 0:
            sample = int(np.flatnonzero(values < 0)[0])
            raise FormatError(
                f"expected lengths of 0 to {longest}, found {values[sample]} for sample {sample}", path=meta.folder
            )
        if (long := values > longest).any():
            self.warnings.append(
                Remark(
                    "length-too-long",
                    f"{name} contains {values[long].max()} tokens, but {array.node} has room for {longest}: "
                    f"{int(long.sum())} samples were truncated when they were written",
                )
            )
            values = np.minimum(values, longest)
        values = values.astype(np.uint32)
        if self.lines is not None:
            values[~self.is_sample] = 0
        return values

    def _whole_lengths(self, meta: ArrayMeta) -> dict[tuple[int, ...], int]:
        """Sizes of the chunks of lengths that are whole. Samples of the others are left out."""
        chunks = WholeChunks.of(meta)
        grid = np.ones(meta.grid, np.bool_)
        if meta.inner:
            grid[tuple((chunks.places * np.array(meta.chunks) // np.array(meta.outer)).T)] = False
        else:
            grid[tuple(chunks.places.T)] = False
        self.absent |= np.repeat(grid, meta.outer[0])[: self.n]
        missing = [meta.path_of(tuple(coords)) for coords in np.argwhere(grid).tolist()]
        self.broken += [*chunks.broken, *missing, *([meta.folder] if missing else [])]
        whole = {tuple(coords) for coords in np.argwhere(~grid).tolist()}
        return {coords: size for coords, size in meta.chunk_files().items() if coords in whole}

    def _leave_out(self) -> None:
        """Sets the tokens of samples with a missing chunk to 0."""
        lengths = [np.broadcast_to(np.asarray(part, np.int64), (self.n,)) for part in self.lengths]
        checked = list(zip(self.arrays, lengths, strict=True))
        if self.scaling is not None and self.scaling.values is None:  # scales of rows have the chunks of their codes
            checked.append((self.scaling.meta, lengths[0]))
        for array, tokens in checked:
            chunks = WholeChunks.of(array)
            absent, missing = chunks.absent(array, np.where(self.absent, 0, tokens))
            self.absent |= absent
            self.broken += [*chunks.broken, *missing, *([array.folder] if missing else [])]
        if self.absent.any():
            self.lengths = [np.where(self.absent, 0, part).astype(np.uint32) for part in lengths]

    def check_alike(self, other: Member) -> None:
        """Raises FormatError unless stores of a run have the same layers, width, dtype and arrays."""
        array, other_array = self.arrays[0], other.arrays[0]
        for what, a, b in (
            ("layers", self.num_layers, other.num_layers),
            ("hidden size", self.width, other.width),
            ("element type", array.dtype, other_array.dtype),
            ("arrays", [a.node for a in self.arrays], [a.node for a in other.arrays]),
            ("scales of int8", self.scaling is not None, other.scaling is not None),
        ):
            if a != b:
                raise other_array.error(f"{what}: expected {a}, as in {self.path.name}, found {b}")

    @cached_property
    def texts(self) -> list[Location]:
        """JSONL files with columns; the file of sample keys comes first."""
        folder = self.path / "text"
        if not folder.lists:
            paths = [folder / name for name in TEXTS if (folder / name).kind() == "file"]
        else:
            entries = folder.entries("*.jsonl") if folder.kind() == "folder" else []
            paths = [folder / entry.name for entry in entries]
        index = self.path / "meta" / "sample_index.jsonl"
        return [index, *paths] if index.kind() == "file" else paths

    @cached_property
    def small(self) -> dict[str, ArrayMeta]:
        """Arrays with one entry per sample, by name."""
        arrays = {}
        names = self.store.names("arrays")
        self.store.read_ahead([f"arrays/{name}" for name in names])
        for name in names:
            if f"arrays/{name}" in (ACTIVATIONS, PROMPT, RESPONSE):
                continue
            meta = self.store.array(f"arrays/{name}")
            if meta is not None and meta.shape[:1] == (self.rows,) and len(meta.shape) <= 3:
                arrays[name] = meta
        return arrays

    def missing_values(self) -> list[Remark]:
        """Warnings about arrays per sample without metadata or with missing chunks. Lists folders, but none of a remote store.

        Writers may omit chunks that contain only the fill value. zarr-python 3 does so by default for version 3, so that a missing
        chunk of labels is normal there. Whole chunks of samples without tokens are not, so that chunks of lengths always count.
        """
        if self.path.is_remote:
            return []
        remarks: list[Remark] = []
        checked = {name for array in self.arrays for name in (array.node, f"arrays/{LENGTHS[array.node]}")}
        for name in self.store.names("arrays"):
            if f"arrays/{name}" in (*checked, SCALES):
                continue
            if (meta := self.small.get(name)) is None:
                remarks += self._missing_metadata(name) or self._left_out(name)
                continue
            is_length = name in LENGTHS.values() and meta.fill == 0
            if meta.complete or not (is_length or self.version == 2) or math.prod(meta.grid) > _LISTED:
                continue
            with contextlib.suppress(ActshardError):  # reading the column raises it
                remarks += _missing_chunk(
                    meta, meta.chunk_files(), f"its values are read as {meta.fill!r}, the fill value"
                )
        return remarks

    def _missing_metadata(self, name: str) -> list[Remark]:
        folder = self.path / "arrays" / name
        entries = [entry.name for entry in folder.first(_LISTED)]
        metadata, chunk = ("zarr.json", "c") if self.version == 3 else (".zarray", r"\d+([./]\d+)*")
        if metadata in entries or not any(re.fullmatch(chunk, entry) for entry in entries):
            return []  # a group, or another folder
        return [
            Remark("missing-file", f"arrays/{name}: {metadata} is missing, but chunks exist: the array is not read")
        ]

    def _left_out(self, name: str) -> list[Remark]:
        """A remark about an array that may be activations."""
        meta = self.store.array(f"arrays/{name}")
        if meta is None or len(meta.shape) < 3 or meta.shape[-1] < _LEAST_WIDTH or meta.dtype is None:
            return []
        return [
            Remark(
                "layout",
                f"arrays/{name}, {meta.dtype} of shape {list(meta.shape)}, is not read: a dataset has one array of activations; "
                f"to read it, give it a folder of its own, in which it is {ACTIVATIONS}",
            )
        ]

    def text_names(self) -> dict[str, Location]:
        """Fields in the first line of each JSONL file, by name. Later lines may have other fields."""
        paths: dict[str, Location] = {}
        if self.lines is not None:
            for _, line in self.lines:
                paths |= dict.fromkeys(line, self.path / "meta" / "index.jsonl")
        for path in self.texts:
            first = next(read_lines(path), None)
            if first is not None and isinstance(first[1], dict):
                paths = dict.fromkeys(first[1], path) | paths
        return {utf8(name): path for name, path in paths.items() if name != "i"}

    def columns_in(self) -> list[Location]:
        """Folders of metadata, lengths, labels and texts, and the metadata files of activations, which are next to chunks."""
        activation_folders = {array.folder for array in self.row_arrays}
        groups = [self.path, self.path / "arrays", self.path / "text", self.path / "meta"]
        small = [self.path / "arrays" / name for name in self.store.names("arrays")]
        chunks = [path for folder in small if folder not in activation_folders for path in (folder, folder / "c")]
        return [
            *groups,
            *chunks,
            *(file for array in self.row_arrays for file in (array.metadata, array.folder / ".zattrs")),
        ]

    def columns(self, is_selected: Callable[[str], bool]) -> dict[str, object]:
        """Columns by name, each a pyarrow array or a list of ``n`` values."""
        columns: dict[str, object] = {}
        spare = Spare()
        arrays = {name: meta for name, meta in self.small.items() if is_selected(name)}
        read_ahead(path for path in self.texts if path.is_remote and path.stat().size <= _SMALL_TEXT)
        for (name, meta), files in zip(arrays.items(), stored(list(arrays.values())), strict=True):
            columns[name] = _column(read_whole(meta, spare, files), self.n)
        if self.lines is not None:
            rows = [(row, number, line) for number, line in self.lines if (row := line.get("sample_index")) is not None]
            _join(columns, rows, self.n, is_selected, self.path / "meta" / "index.jsonl", complete=False)
        for path in self.texts:
            _join(columns, by_i(path, self.rows), self.n, is_selected, path, complete=True)
        return columns


def _missing_chunk(meta: ArrayMeta, files: Container[tuple[int, ...]], consequence: str) -> list[Remark]:
    """A warning about the first missing chunk of an array; none if there is none."""
    missing = meta.first_missing(files)
    if missing is None:
        return []
    chunk = meta.path_of(missing).relative_to(meta.folder)
    return [Remark("chunk-missing", f"{meta.node}: chunk {chunk} has no file: {consequence}")]


def _check_samples(array: ArrayMeta) -> None:
    """Raises FormatError for more samples than the chunk files justify, so that stored data bound the memory per sample."""
    n, per = array.shape[0], array.outer[0]
    if n <= UNSTORED_SAMPLES or array.folder.is_remote:
        return  # millions of names are not listed in a remote store; there, the chunks of lengths bound the memory
    expected = -(-n // (per * SAMPLES_PER_FILE))
    count = array.chunks_in.count(expected)
    if count >= expected:
        return
    raise array.error(f"{n} samples, but {array.node} has only {count} chunk files", field="shape")


def by_i(path: Location, n: int) -> list[tuple[int, int, dict[str, object]]]:
    """Lines of a text file as (sample, line number, line)."""
    rows: list[tuple[int, int, dict[str, object]]] = []
    line_numbers: dict[int, int] = {}
    for number, line in read_lines(path):
        fields = Fields(line, path, f"line {number}")
        i = fields.integer("i", minimum=0) if "i" in line else number - 1
        if i >= n:
            raise FormatError(
                f"line {number}: field 'i': expected a sample, 0 to {n - 1}, found {i}", path=path, code="metadata"
            )
        if i in line_numbers:
            raise FormatError(
                f"lines {line_numbers[i]} and {number}: both have sample {i}", path=path, code="duplicate-sample"
            )
        line_numbers[i] = number
        rows.append((i, number, line))
    return rows


def _join(
    columns: dict[str, Any],
    rows: Sequence[tuple[int, int, dict[str, Any]]],
    n: int,
    is_selected: Callable[[str], bool],
    path: Location,
    *,
    complete: bool,
) -> None:
    """Adds the fields of lines as columns. Columns of arrays and of earlier files take precedence."""
    arrays = set(columns)
    for i, _, line in rows:
        if i >= n:
            continue
        for key, value in line.items():
            name = utf8(key)
            if name != "i" and name not in arrays and is_selected(name):
                column = columns.setdefault(name, [None] * n)
                if value is not None:
                    column[i] = value
    if complete and len(rows) < n:
        present = {i for i, _, _ in rows}
        lacking = [i for i in range(n) if i not in present]
        shown = ", ".join(map(str, lacking[:8])) + (", ..." if len(lacking) > 8 else "")
        message = f"{path.parent.name}/{path.name}: {many(len(lacking), 'sample', 'has', 'have')} no line (of {len(rows)}): {shown}"
        warn(message, code="missing-lines")


def _column(values: NDArray[np.generic] | list[str] | list[bytes], n: int) -> object:
    """Converts per-sample values to pyarrow; multidimensional ones become lists."""
    import pyarrow as pa

    if isinstance(values, list):
        return pa.array(values[:n], pa.binary() if any(isinstance(value, bytes) for value in values) else pa.string())
    values = values[:n]
    if values.dtype.kind == "c" or values.dtype.name == "bfloat16":
        values = values.astype(np.complex64).view(np.float32) if values.dtype.kind == "c" else values.astype(np.float32)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for length in values.shape[:0:-1]:
        if length == 0:
            return pa.nulls(n)
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return flat
