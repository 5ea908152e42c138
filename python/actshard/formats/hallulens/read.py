"""HalluLens inference captures: hidden states of prompts and responses, of every layer, in two large arrays.

Sources: HalluLens at b6bd3d8, ``inference_capture_writer.py``, ``scripts/merge_icr_captures.py`` and its readers. See ``files``
    for
the byte layout.

Examples are the lines of ``meta.jsonl``, in order. Tokens of an example are its stored prompt rows, then its stored response rows.
Response row q is the state that produced token q, so row 0 repeats the last prompt row. Layer 0 is the embeddings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base._arguments import many
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import RAISE, ActshardError, Faults, FormatError, MissingFileError, NotStoredError
from actshard.base.location import Location
from actshard.formats.carrying import Carrying
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.hallulens.files import (
    ATTENTION,
    ICR,
    PROMPT,
    RESPONSE,
    STORAGE,
    Config,
    SampleArray,
    lines,
    read_scores,
)
from actshard.formats.report import Report
from actshard.formats.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa


_LOOKED_FOR = f'a folder with a config.json whose storage_format is "{STORAGE}"'
_BATCH = 4096
"""Number of examples whose columns are read at once."""
_OF_LINE = ("sample_index", "key", "prompt_hash", "prompt_len", "response_len", "hallucinated", "wrote_at")


def detect(path: Location) -> Evidence:
    """Checks for a config.json with this storage format."""
    config = path / "config.json"
    if path.kind() != "folder":
        return Evidence(False, _LOOKED_FOR, "a file")
    if config.kind() != "file":
        return Evidence(False, _LOOKED_FOR, "no config.json")
    value = read_json(config)
    if not isinstance(value, dict) or value.get("storage_format") != STORAGE:
        return Evidence(False, _LOOKED_FOR, "another config.json", near=True)
    return Evidence(True, _LOOKED_FOR, "a config.json of a capture")


@dataclass(frozen=True)
class Sample:
    """A committed sample: a line of meta.jsonl."""

    number: int
    """Line number."""
    row: int
    prompt_len: int
    response_len: int
    line: dict[str, object]


def sample_of(number: int, line: dict[str, object], path: Location) -> Sample:
    """Parses and checks the fields of a line."""
    fields = Fields(line, path, f"line {number}")
    return Sample(
        number,
        fields.integer("sample_index", minimum=0),
        fields.integer("prompt_len", minimum=0),
        fields.integer("response_len", minimum=0),
        line,
    )


class Capture:
    """A capture's committed samples and arrays.

    Args:
        path: the capture's folder.
        faults: receives the faults of config.json, of each line of meta.jsonl, and of the sizes of hidden states.
    """

    def __init__(self, path: Location, faults: Faults = RAISE) -> None:
        self.path = path
        self.warnings: list[Remark] = []
        self.config = Config.of(path, faults)
        self.arrays = self._find_arrays()
        self.samples = self._committed(faults)
        self.numbers = np.array([sample.row for sample in self.samples], np.int64)
        for name in (PROMPT, RESPONSE):
            if name in self.arrays:
                with faults.noting(self.arrays[name].path):
                    self._check_rows(self.arrays[name])
        self._check_committed()
        declared = self.config.fields.value.get("dtype")
        if declared not in (None, "float16"):
            self.warnings.append(
                Remark("dtype-claim", f"config.json declares dtype {show(declared)}, but arrays are float16")
            )
        self._find_scores()

    def _find_arrays(self) -> dict[str, SampleArray]:
        """The arrays that exist. Warns of those that are not declared as omitted."""
        arrays = self.config.arrays(self.path)
        for array in arrays.values():
            name = array.path.name
            if not array.exists() and name not in self.config.skipped:
                text = f"{name}: expected the array, or its name in config.json's _skipped_arrays, found neither"
                self.warnings.append(Remark("missing-file", text))
        return {name: array for name, array in arrays.items() if array.exists()}

    def _committed(self, faults: Faults) -> list[Sample]:
        path = self.path / "meta.jsonl"
        torn: list[int] = []
        samples: dict[int, Sample] = {}
        with faults.noting(path):
            for number, line in lines(path, torn):
                with faults.noting(path):
                    sample = sample_of(number, line, path)
                    if sample.row in samples:
                        text = f"lines {samples[sample.row].number} and {number}: both have sample_index {sample.row}"
                        raise FormatError(text, path=path, code="duplicate-sample")
                    samples[sample.row] = sample
        if torn:
            self._warn_of_torn(path, torn[0])
        return list(samples.values())

    def _check_committed(self) -> None:
        """Warns of an empty meta.jsonl if arrays have values: without its lines, no row is a sample.

        A capture that has not committed any sample has an empty one, too: its arrays were allocated, and are zeros.
        """
        path = self.path / "meta.jsonl"
        if self.samples or not path.exists() or path.stat().size:
            return
        first = np.zeros(1, np.int64)
        filled = [
            array.path.name
            for array in self.arrays.values()
            if array.size() >= array.row_bytes and array.read(first).any()
        ]
        if filled:
            text = f"{path.name}: expected a line per sample, found an empty file, but {filled[0]} has values: no sample is read"
            self.warnings.append(Remark("empty-file", text))

    def _warn_of_torn(self, path: Location, offset: int) -> None:
        self.warnings.append(
            Remark(
                "reader-warning",
                f"{path.name}: ignoring the last line, incomplete near byte {offset}: its writer was interrupted or is running",
            )
        )

    def _check_rows(self, array: SampleArray) -> int:
        """Number of rows of an array. Raises FormatError if it lacks rows of some samples."""
        rows = array.rows(self.config.allocated)
        if len(self.numbers) and self.numbers.max() >= rows:
            sample = self.samples[int(self.numbers.argmax())]
            raise FormatError(
                f"line {sample.number}: field 'sample_index': expected a row of {array.path.name}, 0 to {rows - 1}, "
                f"found {sample.row}",
                path=self.path / "meta.jsonl",
                code="address-out-of-range",
            )
        return rows

    @cached_property
    def prompt_tokens(self) -> NDArray[np.uint32]:
        """Number of prompt rows stored per example."""
        tokens = [min(sample.prompt_len, self.config.prompt) for sample in self.samples]
        return np.array(tokens, np.uint32)

    @cached_property
    def response_tokens(self) -> NDArray[np.uint32]:
        """Number of response rows stored per example."""
        tokens = [min(sample.response_len, self.config.response) for sample in self.samples]
        return np.array(tokens, np.uint32)

    def native(self, options: Options) -> Rows | None:
        """Rows of examples: prompt rows, then response rows, from the arrays that exist; None if neither does."""
        files: list[tuple[str | os.PathLike[str], int, int, bool]] = []
        parts: list[tuple[int | NDArray[np.uint32], NDArray[np.uint64], int | NDArray[np.uint32], int]] = []
        for name, room, tokens in (
            (PROMPT, self.config.prompt, self.prompt_tokens),
            (RESPONSE, self.config.response, self.response_tokens),
        ):
            if name in self.arrays:
                array = self.arrays[name]
                rows_per_sample = self.config.layers * room
                parts.append((len(files), self.numbers.astype(np.uint64) * np.uint64(rows_per_sample), tokens, room))
                files.append((array.path, 0, self._check_rows(array) * rows_per_sample, False))
        if not files:
            return None
        return Rows.spans(
            files,
            parts,
            num_groups=self.config.layers,
            width=self.config.width,
            dtype="F16",
            descr=np.dtype(np.float16),
            io=options.io,
        )

    def counts(self) -> NDArray[np.int64]:
        """Tokens stored per example, (n,) int64."""
        counts = np.zeros(len(self.samples), np.int64)
        for name, tokens in ((PROMPT, self.prompt_tokens), (RESPONSE, self.response_tokens)):
            if name in self.arrays:
                counts += tokens
        return counts

    # -- columns ---------------------------------------------------------------------------------

    def _find_scores(self) -> None:
        """Reads the scores if they can be assigned to samples: a resumed writer saves only scores of its own samples."""
        self.scores: NDArray[np.float32] | None = None
        self._no_scores: ActshardError | None = None
        path = self.path / f"{ICR}.npy"
        if not path.exists():
            return
        try:
            scores = read_scores(path, self.config.blocks)
            if len(scores) != len(self.samples) or not np.array_equal(np.sort(self.numbers), np.arange(len(scores))):
                raise FormatError(
                    f"cannot assign {len(scores)} rows of scores to {len(self.samples)} samples: the capture was "
                    "resumed or merged; scores are not loaded",
                    path=path,
                    code="claim",
                )
            self.scores = scores[self.numbers]
        except ActshardError as error:
            self._no_scores = error
            code = "claim" if error.code == "claim" else "format"
            self.warnings.append(Remark(code, f"{path.name}: {error.detail}"))

    @cached_property
    def generated(self) -> dict[object, dict[str, object]]:
        """Lines of generation.jsonl by prompt_hash. Of several lines with one hash, the last."""
        path = self.path / "generation.jsonl"
        if not path.exists():
            return {}
        return {hashed: line for _, line in lines(path, []) if (hashed := _hash_of(line)) is not None}

    @cached_property
    def text_names(self) -> list[str]:
        """Columns found only in generation.jsonl."""
        path = self.path / "generation.jsonl"
        names: dict[str, None] = {}
        torn: list[int] = []
        hashes = {_hash_of(sample.line) for sample in self.samples} - {None}
        matched: set[str | None] = set()
        if path.exists():
            for _, line in lines(path, torn):
                hashed = _hash_of(line)
                if hashed in hashes:
                    matched.add(hashed)
                    names |= dict.fromkeys(line)
        if torn:
            self._warn_of_torn(path, torn[0])
        if lacking := len(hashes - matched):
            texts = "its text is" if lacking == 1 else "their texts are"
            text = f"generation.jsonl lacks lines for {many(lacking, 'committed prompt')}: {texts} null"
            self.warnings.append(Remark("claim", text))
        line_columns = {name for sample in self.samples for name in sample.line} | set(_OF_LINE)
        return [name for name in names if name not in line_columns]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Columns that are cheap to read: all but attention."""
        lined = dict.fromkeys(name for sample in self.samples for name in sample.line) or dict.fromkeys(_OF_LINE)
        small = [name for name in self.arrays if len(self.arrays[name].shape) in (1, 2)]
        scores = [ICR] if self.scores is not None else []
        return (*lined, *self.text_names, *(name for name in (*small, *scores) if name not in lined))

    def columns(self, names: Sequence[str], span: slice = slice(None)) -> pa.Table:
        """Reads columns of some examples."""
        import pyarrow as pa

        for name in names:
            if name == ICR and self._no_scores is not None:
                raise FormatError(self._no_scores.detail, path=self._no_scores.path)
            if name not in self.names and not (name == ATTENTION and ATTENTION in self.arrays):
                raise NotStoredError(f"has no column {name!r}; columns are {', '.join(self.names)}", path=self.path)
        parts = [self._part(names, batch) for batch in self._batches(span)]
        if not parts:
            return pa.table({name: pa.nulls(0) for name in names})
        return table_of(list(names), parts)

    def batches(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Reads columns of all examples in order, in batches."""
        for batch in self._batches(slice(None)):
            yield self.columns(names, batch)

    def _batches(self, span: slice) -> Iterator[slice]:
        first, last, _ = span.indices(len(self.samples))
        return (slice(start, min(start + _BATCH, last)) for start in range(first, last, _BATCH))

    def _part(self, names: Sequence[str], span: slice) -> tuple[dict[str, object], int]:
        samples = self.samples[span]
        columns: dict[str, object] = {}
        for name in names:
            if name == ICR and self.scores is not None:
                columns[name] = _lists(self.scores[span])
            elif name in self.text_names:
                lined = (self.generated.get(_hash_of(sample.line) or "", {}) for sample in samples)
                columns[name] = [line.get(name) for line in lined]
            elif name in self.arrays and not any(name in sample.line for sample in samples):
                columns[name] = self._array_column(self.arrays[name], span)
            else:
                columns[name] = [sample.line.get(name) for sample in samples]
        return columns, len(samples)

    def _array_column(self, array: SampleArray, span: slice) -> pa.Array:
        """Rows of an array without padding."""
        self._check_rows(array)
        values = array.read(self.numbers[span])
        if array.name == ATTENTION:
            ends = np.minimum([s.response_len for s in self.samples[span]], self.config.attended)
            return [row[:, :r, :r].astype(np.float32).tolist() for row, r in zip(values, ends.tolist(), strict=True)]
        tokens = self.prompt_tokens if array.name.startswith("prompt") else self.response_tokens
        return _ragged(values, tokens[span].astype(np.int64))

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        rows = self.native(options)
        value = self.config.fields.value
        provenance_fields = ("storage_format", "r_max", "max_prompt_len", "max_response_len")
        provenance = {name: value[name] for name in provenance_fields} | {"allocated": self.config.allocated}
        if isinstance(value.get("_merged_from"), list):
            provenance["merged_from"] = len(value["_merged_from"])
        if PROMPT not in self.arrays:
            provenance["prompts"] = "not stored: rows are those of responses"
        counts = self.counts()
        names = self.names
        return Contents(
            format="hallulens",
            path=self.path.place,
            metadata=value,
            layers=tuple(range(self.config.layers)) if rows is not None else (),
            d_model=self.config.width if rows is not None else 0,
            dtype=np.dtype(np.float16),
            num_examples=len(self.samples),
            token_counts=counts.copy,
            rows=rows,
            column_names=names,
            columns=self.columns,
            head_columns=lambda requested_names, n: self.columns(requested_names, slice(0, n)),
            column_batches=self.batches,
            files=lambda: [self.arrays[name].path.place for name in (PROMPT, RESPONSE) if name in self.arrays],
            model=value["model_name"] if isinstance(value.get("model_name"), str) else None,
            provenance=provenance,
            extras=("response attention",) if ATTENTION in self.arrays else (),
            warnings=tuple(self.warnings),
        )


def open(path: Location, options: Options) -> Contents:
    """Reads config.json, meta.jsonl, column names and array sizes, but no rows."""
    if not (path / "meta.jsonl").exists():
        raise MissingFileError("expected the list of committed samples, found no file", path=path / "meta.jsonl")
    return Capture(path).contents(options)


def _hash_of(line: dict[str, object]) -> str | None:
    """The key that joins lines of both journals."""
    digest = line.get("prompt_hash")
    return digest if isinstance(digest, str) and digest else None


def _lists(values: NDArray[np.generic]) -> pa.Array:
    """Converts ``(n, k)`` to fixed-size lists."""
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _ragged(values: NDArray[np.generic], lengths: NDArray[np.int64]) -> pa.Array:
    """Converts padded ``(n, tokens)`` or ``(n, tokens, k)`` to lists of each example's own tokens."""
    import pyarrow as pa

    used = np.arange(values.shape[1]) < lengths[:, None]
    flat = values[used]
    items = pa.array(flat) if flat.ndim == 1 else _lists(flat) if flat.shape[1] else pa.nulls(len(flat))
    return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), items)


# Checks of inference captures


_SHOWN = 20


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks sizes of arrays, lines of meta.jsonl, and that both contain the same lengths."""
    capture = report.faults.parse(root, lambda: Capture(root, report.faults))
    if capture is None:
        return
    arrays, samples = capture.arrays, capture.samples
    report.count("samples", len(samples))
    rows: dict[str, int] = {}
    for number, (name, array) in enumerate(arrays.items()):
        tell("arrays", number, len(arrays))
        report.count("files")
        with report.noting(array.path):
            report.count("bytes", array.size())
            rows[name] = array.rows(capture.config.allocated)
    fewest = min(rows.values(), default=None)
    beyond = [] if fewest is None else [sample for sample in samples if sample.row >= fewest]
    for sample in beyond[:_SHOWN]:
        short = next(name for name, n in rows.items() if sample.row >= n)
        report.add(
            "address-out-of-range",
            root / "meta.jsonl",
            sample.row,
            f"a row of {short}.npy, 0 to {rows[short] - 1}",
            f"line {sample.number}, field 'sample_index'",
        )
    stored_samples = [sample for sample in samples if fewest is None or sample.row < fewest]
    for name in ("prompt_len", "response_len"):
        if name in rows:
            _check_lengths(root, arrays[name], stored_samples, report)
    _check_results(root, len(samples), report)


def _check_lengths(root: Location, array: SampleArray, samples: list[Sample], report: Report) -> None:
    """Checks that an array of lengths equals the lengths in meta.jsonl."""
    with report.noting(array.path):
        stored_lengths = array.read(np.array([sample.row for sample in samples], np.int64)).tolist()
        listed_lengths = [getattr(sample, array.name) for sample in samples]
        differ = [i for i, (a, b) in enumerate(zip(stored_lengths, listed_lengths, strict=True)) if a != b]
        for i in differ[:_SHOWN]:
            report.add(
                "count-claim",
                root / "meta.jsonl",
                listed_lengths[i],
                f"{stored_lengths[i]} as in {array.path.name}",
                f"line {samples[i].number}, field '{array.name}'",
            )


def _check_results(root: Location, n: int, report: Report) -> None:
    """Checks that lists in eval_results.json have one entry per sample."""
    path = root / "eval_results.json"
    if not path.exists():
        return
    with report.noting(path, "metadata"):
        value: object = read_json(path)
        for name, entries in value.items() if isinstance(value, dict) else ():
            if isinstance(entries, list) and len(entries) != n:
                report.add("claim", path, f"{len(entries)} entries", f"{n}, one per sample", f"field '{name}'")


# Columns of inference captures in other formats.


class HallulensCarrying(Carrying):
    """Keeps texts, labels, tokens and scores. Drops row numbers and attention."""

    derived: ClassVar[frozenset[str]] = frozenset(("sample_index",))
    number_column: ClassVar[str | None] = None

    def left_behind(self, contents: Contents) -> list[str]:
        return [ATTENTION] if (Location.at(contents.path) / f"{ATTENTION}.npy").exists() else []
