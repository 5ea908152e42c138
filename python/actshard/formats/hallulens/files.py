"""The files of an inference capture: its configuration, arrays without headers, and journals of JSON lines.

config.json      sizes: L blocks, width H, P prompt and S response tokens, R attended tokens, K top logits, N allocated rows
<array>.npy      C-order, little-endian, no header: the shape follows from config.json, the number of rows from the file's size
meta.jsonl       a line per committed sample, with its row ``sample_index``; nothing else exists
generation.jsonl a line per attempt, written before the sample's line in meta.jsonl
icr_scores.npy   a real .npy file of the scores that one process appended
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._json import Fields, read_json, read_lines
from actshard.errors import FormatError, MissingFileError, TruncatedFileError, boundary
from actshard.location import Location
from actshard.storage import Stat

STORAGE = "inference_capture_v1"
PROMPT, RESPONSE = "prompt_activations", "response_activations"
ATTENTION = "response_attention"
ICR = "icr_scores"
_ANY = 1 << 62
"""Rows that a file without bytes has."""
_MODEST = 1 << 30
"""Bytes that are read without comparing them with what the disk holds: a sparse file claims any size."""


@dataclass(frozen=True)
class SampleArray:
    """An array of one row per allocated sample."""

    path: Location
    shape: tuple[int, ...]
    """Of a row."""
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The name without ``.npy``."""
        return self.path.name.removesuffix(".npy")

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def exists(self) -> bool:
        """Whether there is such a file: merges leave some out."""
        return self.path.is_named()

    def size(self) -> int:
        """Bytes of the file."""
        return self._stat().size

    def _stat(self) -> Stat:
        try:
            return self.path.regular()
        except MissingFileError as error:
            raise MissingFileError("expected an array, found nothing", path=self.path) from error

    def rows(self, allocated: int) -> int:
        """Rows of the file: whole ones, at least as many as were allocated.

        Raises:
            TruncatedFileError, FormatError: the size is not that of so many rows.
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

    def read(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Rows by their numbers, ``(n, *shape)``; one read for each run of rows that follow each other."""
        made = np.empty((len(numbers), *self.shape), self.dtype)
        if not made.nbytes:
            return made
        flat = made.reshape(len(numbers), -1).view(np.uint8)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        _check_sparse(self.path, self._stat(), made.nbytes)
        runs = zip(starts, [*starts[1:], len(numbers)], strict=True)
        self.path.fill(
            (int(numbers[first]) * self.row_bytes, flat[first:last].reshape(-1).data) for first, last in runs
        )
        return made


@dataclass(frozen=True)
class Config:
    """The configuration, checked."""

    fields: Fields
    blocks: int
    width: int
    prompt: int
    """Room for prompt tokens, P."""
    response: int
    """Room for response tokens, S."""
    attended: int
    top: int
    allocated: int

    @classmethod
    def of(cls, path: Location) -> Config:
        """Reads ``config.json``."""
        fields = Fields(read_json(path / "config.json"), path / "config.json")
        if fields.text("storage_format") != STORAGE:
            raise fields.error("storage_format", f'"{STORAGE}"')
        made = cls(
            fields,
            blocks=fields.integer("num_layers"),
            width=fields.integer("hidden_dim"),
            prompt=fields.integer("max_prompt_len"),
            response=fields.integer("max_response_len"),
            attended=fields.integer("r_max", minimum=0),
            top=fields.integer("response_logprobs_top_k", minimum=0),
            allocated=fields.integer("n_samples", minimum=0),
        )
        if any(
            size >= 1 << 31 for size in (made.blocks, made.width, made.prompt, made.response, made.attended, made.top)
        ):
            raise FormatError("expected sizes below 2^31", path=fields.path)
        if any(array.row_bytes * max(made.allocated, 1) >= 1 << 62 for array in made.arrays(path).values()):
            raise FormatError("its sizes are none that a disk can have", path=fields.path)
        return made

    @property
    def layers(self) -> int:
        """Stored layers: the embeddings and every block."""
        return self.blocks + 1

    def arrays(self, path: Location) -> dict[str, SampleArray]:
        """All arrays by their names, whether they are there or not."""
        half, ids, floats = np.dtype("<f2"), np.dtype("<i4"), np.dtype("<f4")
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
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
        """File names that a merge declares to have left out."""
        named = self.fields.value.get("_skipped_arrays")
        return frozenset(x for x in named if isinstance(x, str)) if isinstance(named, list) else frozenset()


def lines(path: Location, torn: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of a journal with their numbers.

    A last line without a newline that is no JSON was being appended when its writer died: its offset goes to ``torn``.

    Raises:
        FormatError: any other line is no JSON object.
    """
    found = read_lines(path)
    while True:
        try:
            line = next(found, None)
        except FormatError as error:
            if error.offset is None or not _is_last(path, error.offset):
                raise
            torn.append(error.offset)
            return
        if line is None:
            return
        yield line


def _is_last(path: Location, offset: int) -> bool:
    """Whether no line ends at or after an offset."""
    with boundary(path, "read"), path.open("read") as file:
        file.seek(offset)
        while data := file.read(1 << 20):
            if b"\n" in data:
                return False
    return True


def read_scores(path: Location, blocks: int) -> NDArray[np.float32]:
    """``(rows, blocks)``: the scores of ``icr_scores.npy``.

    Raises:
        FormatError: not such an array, or a file longer than its header says: an early merge put two files into one.
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
    found, size = path.regular("read"), start + math.prod(shape) * 4
    if found.size != size:
        raise FormatError(
            f"expected {size} bytes as its header says, found {found.size}: several files in one are not read",
            path=path,
            offset=start,
        )
    _check_sparse(path, found, size)
    made = np.empty(size - start, np.uint8)
    path.fill([(start, made.data)])
    return made.view("<f4").reshape(shape)


def _check_sparse(path: Location, found: Stat, wanted: int) -> None:
    if wanted > max(_MODEST, 64 * found.stored):
        raise FormatError(
            f"expected data, found a sparse file: {found.stored} bytes on the disk claim {wanted}", path=path
        )
