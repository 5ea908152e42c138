"""Files of an inference capture: configuration, arrays without headers, and journals of JSON lines.

config.json      sizes: L blocks, width H, P prompt and S response tokens, R attended tokens, K top logits, N allocated rows
<array>.npy      C-order, little-endian, no header; config.json gives the shape, the file size the number of rows
meta.jsonl       a line per committed sample, with its row ``sample_index``; other rows are unused
generation.jsonl a line per attempt, written before the sample's line in meta.jsonl
icr_scores.npy   an .npy file with a header: scores of the samples that one process appended
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from actshard.base._json import Fields, read_json, read_lines
from actshard.base.errors import RAISE, Faults, FormatError, MissingFileError, TruncatedFileError, boundary
from actshard.base.location import Location
from actshard.base.storage import Stat

STORAGE = "inference_capture_v1"
PROMPT, RESPONSE = "prompt_activations", "response_activations"
ATTENTION = "response_attention"
ICR = "icr_scores"
_ANY = 1 << 62
"""Number of rows reported for a file whose rows are 0 bytes long."""
_MODEST = 1 << 30
"""Reads up to this many bytes skip the check against allocated disk blocks. A sparse file can have any size."""


@dataclass(frozen=True)
class SampleArray:
    """An array with one row per allocated sample."""

    path: Location
    shape: tuple[int, ...]
    """Shape of a row."""
    dtype: np.dtype[np.generic]

    @property
    def name(self) -> str:
        """The file name without ``.npy``."""
        return self.path.name.removesuffix(".npy")

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def exists(self) -> bool:
        """Whether the file exists. Merged captures omit some files.

        Raises:
            FileAccessError: a server refuses access, so the file may exist. Treating it as absent would return wrong rows.
        """
        if not self.path.is_remote:
            return self.path.is_named()
        try:
            return self.path.stat().kind == "file"
        except MissingFileError:
            return False

    def size(self) -> int:
        """Size of the file in bytes."""
        return self._stat().size

    def _stat(self) -> Stat:
        try:
            return self.path.regular()
        except MissingFileError as error:
            raise MissingFileError("expected an array, found nothing", path=self.path) from error

    def rows(self, allocated: int) -> int:
        """Number of rows in the file, at least ``allocated``.

        Raises:
            TruncatedFileError, FormatError: the file is too short, or its size is not a multiple of the row size.
        """
        size, row = self.size(), self.row_bytes
        if size < allocated * row:
            raise TruncatedFileError(
                f"expected at least {allocated} rows of {row} = {allocated * row} bytes, found {size}",
                path=self.path,
                offset=size,
            )
        if row and size % row:
            raise FormatError(f"expected whole rows of {row} bytes, found {size} bytes", path=self.path)
        return size // row if row else _ANY

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.generic]:
        """Reads rows by number: ``(n, *shape)``, a new array. One read per run of consecutive rows."""
        values = np.empty((len(numbers), *self.shape), self.dtype)
        if not values.nbytes:
            return values
        flat = values.reshape(len(numbers), -1).view(np.uint8)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        _check_sparse(self.path, self._stat(), values.nbytes)
        runs = zip(starts, [*starts[1:], len(numbers)], strict=True)
        self.path.fill(
            (int(numbers[first]) * self.row_bytes, flat[first:last].reshape(-1).data) for first, last in runs
        )
        return values


@dataclass(frozen=True)
class Config:
    """The configuration, checked."""

    fields: Fields
    blocks: int
    width: int
    prompt: int
    """Allocated prompt tokens, P."""
    response: int
    """Allocated response tokens, S."""
    attended: int
    top: int
    allocated: int

    @classmethod
    def of(cls, path: Location, faults: Faults = RAISE) -> Config:
        """Reads and checks ``config.json``."""
        fields = Fields(read_json(path / "config.json"), path / "config.json", faults=faults)
        if fields.text("storage_format") != STORAGE:
            raise fields.error("storage_format", f'"{STORAGE}"')
        config = cls(
            fields,
            blocks=fields.integer("num_layers"),
            width=fields.integer("hidden_dim"),
            prompt=fields.integer("max_prompt_len"),
            response=fields.integer("max_response_len"),
            attended=fields.integer("r_max", minimum=0),
            top=fields.integer("response_logprobs_top_k", minimum=0),
            allocated=fields.integer("n_samples", minimum=0),
        )
        fields.check()
        if any(
            size >= 1 << 31
            for size in (config.blocks, config.width, config.prompt, config.response, config.attended, config.top)
        ):
            raise FormatError("expected sizes below 2^31", path=fields.path)
        if any(array.row_bytes * max(config.allocated, 1) >= 1 << 62 for array in config.arrays(path).values()):
            raise FormatError("expected array sizes below 2^62 bytes", path=fields.path)
        return config

    @property
    def layers(self) -> int:
        """Number of stored layers: the embeddings and every block."""
        return self.blocks + 1

    def arrays(self, path: Location) -> dict[str, SampleArray]:
        """All arrays by name, whether or not their files exist."""
        half, ids, floats = np.dtype("<f2"), np.dtype("<i4"), np.dtype("<f4")
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
            PROMPT: ((self.layers, self.prompt, self.width), half),
            RESPONSE: ((self.layers, self.response, self.width), half),
            ATTENTION: ((self.blocks, self.attended, self.attended), half),
            "prompt_token_ids": ((self.prompt,), ids),
            "response_token_ids": ((self.response,), ids),
            "response_token_logprobs": ((self.response,), floats),
            "response_topk_token_ids": ((self.response, self.top), ids),
            "response_topk_logprobs": ((self.response, self.top), floats),
            "prompt_len": ((), ids),
            "response_len": ((), ids),
        }
        return {name: SampleArray(path / f"{name}.npy", shape, dtype) for name, (shape, dtype) in shapes.items()}

    @property
    def skipped(self) -> frozenset[str]:
        """File names that a merge declares as omitted."""
        names = self.fields.value.get("_skipped_arrays")
        return frozenset(x for x in names if isinstance(x, str)) if isinstance(names, list) else frozenset()


def lines(path: Location, torn: list[int]) -> Iterator[tuple[int, dict[str, object]]]:
    """Yields lines of a journal with their numbers.

    An incomplete last line without a newline was cut by a crash of its writer; its offset is appended to ``torn``.

    Raises:
        FormatError: any other line is not a JSON object.
    """
    iterator = read_lines(path)
    while True:
        try:
            line = next(iterator, None)
        except FormatError as error:
            if error.offset is None or not _is_last(path, error.offset):
                raise
            torn.append(error.offset)
            return
        if line is None:
            return
        yield line


def _is_last(path: Location, offset: int) -> bool:
    """Whether there is no newline at or after an offset."""
    with boundary(path, "read"), path.open("read") as file:
        file.seek(offset)
        while data := file.read(1 << 20):
            if b"\n" in data:
                return False
    return True


def read_scores(path: Location, blocks: int) -> NDArray[np.float32]:
    """Reads ``icr_scores.npy``: ``(rows, blocks)`` float32.

    Raises:
        FormatError: another shape or dtype, or a file longer than its header states: an early merge concatenated two files.
    """
    with boundary(path, "read"):
        try:
            return _scores(path, blocks)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, TokenError) as error:
            raise FormatError(f"expected an .npy header: {str(error)[:200]}", path=path) from error


def _scores(path: Location, blocks: int) -> NDArray[np.float32]:
    with path.open("read") as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise FormatError(f"expected an .npy file of version 1 or 2, found {version}", path=path)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        start = file.tell()
    if len(shape) != 2 or shape[1] != blocks or dtype != np.float32 or fortran:
        raise FormatError(f"expected (rows, {blocks}) float32 in C order, found {shape} {dtype}", path=path)
    stat, size = path.regular("read"), start + math.prod(shape) * 4
    if stat.size != size:
        raise FormatError(
            f"expected {size} bytes by its header, found {stat.size}; concatenated .npy files are unsupported",
            path=path,
            offset=start,
        )
    _check_sparse(path, stat, size)
    buffer = np.empty(size - start, np.uint8)
    path.fill([(start, buffer.data)])
    return buffer.view("<f4").reshape(shape)


def _check_sparse(path: Location, stat: Stat, size: int) -> None:
    if size > max(_MODEST, 64 * stat.stored):
        raise FormatError(
            f"expected data, found a sparse file: {size} bytes with {stat.stored} stored on disk", path=path
        )
