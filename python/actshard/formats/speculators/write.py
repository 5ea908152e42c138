"""Writes speculators' training data, as hs-connectors and speculators write them: a file of hidden states per row, and the rows.

hidden_states/hs_{i}.safetensors are written first, then the Arrow rows and dataset_info.json, and state.json last.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base._arguments import NUMPY_BY_NAME, name_of
from actshard.base._json import read_json
from actshard.base.errors import FormatError
from actshard.base.layers import Layer
from actshard.base.location import Location
from actshard.base.work import sync_folders, whole_file, write_bytes
from actshard.formats.carrying import Carrying
from actshard.formats.per_token import LAST, TokenTarget, token_values
from actshard.formats.scales import ScaleLoss, Scaling
from actshard.formats.speculators.read import FLOATS, FOLDER, IDS, INFO, LAYERS, SCALED_BY, SCALES, STATE, STATES
from actshard.formats.target import AllExamples, Block, Spec, only

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


COLUMNS = ("input_ids", "loss_mask")
_TYPES: Mapping[str, DTypeLike] = dict(zip(COLUMNS, (np.int32, np.int64), strict=True))
_ROWS = "data-00000-of-00001.arrow"
_ROWS_AT_ONCE = 1000
"""Number of rows per record batch, as in ``datasets``."""
_FEATURES = {
    "input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
}
_FILE = re.compile(r"hs_(\d+)\.safetensors")
_RESERVED = ("features", "splits", LAYERS, SCALED_BY)
_MEASURED = frozenset(ScaleLoss.__dataclass_fields__)


class SpeculatorsTarget(TokenTarget):
    """Writes training data of speculators. Layers have any names; one is the last hidden state."""

    format: ClassVar[str] = "speculators"
    format_options: ClassVar[Mapping[str, str]] = {
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
        "scales": 'with dtype="float8_e4m3fn", "float8_e5m2" or "int8": a scale per "token", "layer" or "channel" of an '
        'example, or one for the "whole" example',
    }
    forms: ClassVar[Mapping[str, Mapping[str, str | int]]] = {
        "int8 per channel": {"dtype": "int8", "scales": "channel"},
        "int8 per token": {"dtype": "int8", "scales": "token"},
        "float8_e4m3fn per token": {"dtype": "float8_e4m3fn", "scales": "token"},
    }
    copies: float = 1.5
    numbers_layers = False
    takes_shard_bytes = False
    only_columns: tuple[str, ...] | None = COLUMNS
    token_types: Mapping[str, DTypeLike] = _TYPES
    reserved: ClassVar[Collection[str]] = _RESERVED

    def __init__(self, spec: Spec) -> None:
        self.scaling = Scaling.asked(spec.dtype, spec.options.get("scales"), self.format)
        if self.scaling is not None:
            spec = replace(
                spec, dtype=NUMPY_BY_NAME["BF16"]
            )  # the rows' dtype; they become codes when they are written
        super().__init__(spec)
        self.require_last("speculators stores")
        assert self.last is not None
        self.order = [*self.aux, self.last]
        self._dirty: list[Path] = []

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        return super().further_losses(columns) + self._scaled()

    def _scaled(self) -> list[tuple[str, str]]:
        if self.scaling is None:
            return []
        stored = f"bfloat16 rows are stored as {self.scaling.dtype} with scales ({self.scaling.scales})"
        if not self.n and (self.root / STATE).is_file():
            info = read_json(Location.at(self.root / INFO))
            scaled_by = info.get(SCALED_BY) if isinstance(info, dict) else None
            measured = (
                {name: value for name, value in scaled_by.items() if name in _MEASURED}
                if isinstance(scaled_by, dict)
                else {}
            )
            try:
                return [("scales", f"{stored}: {ScaleLoss.of(measured)}")] if measured else [("scales", stored)]
            except TypeError:
                return [("scales", stored)]
        return [("scales", f"{stored}: {self.scaling.loss}" if self.n else f"{stored}; convert() measures the error")]

    def as_read(self, block: Block) -> NDArray[np.generic]:
        if self.scaling is None:
            return block.memory
        decoded_rows, memory = np.empty_like(block.memory), block.memory
        for i, (n, starts) in enumerate(zip(block.lengths[:, 0].tolist(), block.starts, strict=True)):
            decoded_states = self.scaling.again(
                np.stack([memory[start : start + n] for start in starts.tolist()], axis=1), i
            )
            for k, start in enumerate(starts.tolist()):
                decoded_rows[start : start + n] = decoded_states[:, k]
        return decoded_rows

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, FLOATS, "speculators", "")

    def config(self) -> dict[str, object]:
        scaled = {} if self.scaling is None else {"scales": [self.scaling.name, self.scaling.scales]}
        return {**super().config(), "last": self.last, **scaled}

    # -- writing ---------------------------------------------------------------------------------------------------

    def _path(self, row: int) -> Path:
        return self.root / FOLDER / f"hs_{row}.safetensors"

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        if self.scaling is not None and states:
            self.scaling.loss = ScaleLoss.of(states[-1]["scales"])

    def forget(self, lengths: NDArray[np.int64]) -> None:
        folder = self.root / FOLDER
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _FILE.fullmatch(path.name)
            if match is not None and int(match[1]) >= len(lengths):
                path.unlink()

    def _header(self, tokens: int) -> bytes:
        """The header of a file, as the safetensors library writes it: wider types come first."""
        assert self.dtype is not None
        shape = (tokens, len(self.order), self.spec.d_model)
        tensors: dict[str, tuple[str, Sequence[int], int]] = {IDS: ("I64", [tokens], 8)}
        if self.scaling is None:
            tensors[STATES] = (name_of(self.dtype), shape, self.itemsize)
        else:
            tensors[SCALES] = ("F32", self.scaling.shape(*shape), 4)
            tensors[STATES] = (self.scaling.name, shape, 1)
        header, end = {}, 0
        for name, (dtype, sizes, size) in tensors.items():
            begin, end = end, end + math.prod(sizes) * size
            header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _states_bytes(self, tokens: int) -> int:
        """Bytes of an example's states and scales."""
        if self.scaling is None:
            return tokens * len(self.order) * self.row_bytes
        shape = (tokens, len(self.order), self.spec.d_model)
        return math.prod(shape) + 4 * math.prod(self.scaling.shape(*shape))

    def _fill(self, body: NDArray[np.uint8], layers: Sequence[NDArray[np.generic]], example: int) -> None:
        """Fills the bytes after the token ids from the states of each layer, ``(tokens, d_model)``."""
        if self.scaling is None:
            into = body.reshape(-1, len(layers), self.row_bytes)
            for k, rows in enumerate(layers):
                into[:, k] = rows.view(np.uint8)
            return
        states = np.stack(layers, axis=1)
        shape = self.scaling.shape(*states.shape)
        # A separate array: scales in the file may be unaligned.
        scales = np.empty(shape, np.float32)
        self.scaling.loss.add(self.scaling.fill(states, body[scales.nbytes :], scales, example))
        body[: scales.nbytes] = scales.reshape(-1).view(np.uint8)

    def write(self, block: Block) -> None:
        tokens, values = self.tokens_of(block)
        headers = [self._header(n) for n in tokens.tolist()]
        sizes = [
            len(header) + 8 * n + self._states_bytes(n) for header, n in zip(headers, tokens.tolist(), strict=True)
        ]
        firsts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        buffer = np.empty(firsts[-1], np.uint8)
        ids, bounds = values["input_ids"][0], np.concatenate([[0], np.cumsum(tokens)]).tolist()
        memory = block.memory.reshape(-1, self.spec.d_model)
        starts = block.starts
        for i, (n, header) in enumerate(zip(tokens.tolist(), headers, strict=True)):
            into = buffer[firsts[i] : firsts[i + 1]]
            into[: len(header)] = np.frombuffer(header, np.uint8)
            body = into[len(header) :]
            body[: 8 * n] = ids[bounds[i] : bounds[i + 1]].astype("<i8").view(np.uint8)
            self._fill(body[8 * n :], [memory[starts[i, k] : starts[i, k] + n] for k in self.order], self.n + i)
        (self.root / FOLDER).mkdir(exist_ok=True)
        files = [(self._path(self.n + i), 0) for i in range(len(block))]
        self.put([buffer], files, [(0, firsts[i], sizes[i], i, 0) for i in range(len(block))])
        self._dirty += [path for path, _ in files]
        self.n += len(block)

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return self._dirty, {} if self.scaling is None else {"scales": asdict(self.scaling.loss)}

    def committed(self) -> None:
        self._dirty = []

    def together(self, states: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
        if self.scaling is None:
            return list(states[-1:])
        total = ScaleLoss()
        for state in states:
            total.add(ScaleLoss.of(state["scales"]))
        return [{"scales": asdict(total)}]

    def finish(self, examples: AllExamples) -> None:
        self.forget(examples.lengths)
        count = sum(_FILE.fullmatch(path.name) is not None for path in (self.root / FOLDER).iterdir())
        if count != len(examples):
            raise FormatError(f"expected {len(examples)} files, found {count}", path=self.root / FOLDER)
        assert examples.columns is not None
        sync_folders([self.root / FOLDER])
        scaled = {} if self.scaling is None else {SCALED_BY: self.scaling.as_dict()}
        names = [self.spec.layers[k] for k in self.order[:-1]]
        write_rows(self.root, examples.columns, names, {**self.spec.metadata, **scaled})

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        row = self.spec.d_model * (2 if self.dtype is None else self.itemsize)
        if self.scaling is not None:
            row = self._states_bytes(1) // len(self.order)
        token_bytes = 8 + len(self.spec.layers) * row
        return len(tokens), len(tokens) + 3, int(tokens.sum()) * (token_bytes + 12) + 200 * len(tokens)


def write_rows(root: Path, columns: pa.Table, layers: Sequence[Layer] | None, metadata: Mapping[str, object]) -> None:
    """Writes the Arrow rows, dataset_info.json and, last, state.json.

    Args:
        root: the folder.
        columns: ``input_ids``, and ``loss_mask``, which is ones if it is missing: lists with a value per token.
        layers: names of the layers before the last; None: not stored.
        metadata: further fields of dataset_info.json.

    Raises:
        ArgumentError: a value that the rows cannot hold.
    """
    import pyarrow as pa

    table = _rows(columns)
    with whole_file(root / _ROWS) as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=_ROWS_AT_ONCE)
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    names = {} if layers is None else {LAYERS: list(layers)}
    _write_json(root / INFO, {**metadata, **info, **names})
    sync_folders([root])
    state: dict[str, object] = {
        "_data_files": [{"filename": _ROWS}],
        "_fingerprint": _fingerprint(table),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",  # speculators' own reader compares tensors
        "_output_all_columns": False,
        "_split": None,
    }
    _write_json(root / STATE, state)


def _rows(columns: pa.Table) -> pa.Table:
    """The rows, with the types and the schema that ``datasets`` writes. A missing mask is filled with ones."""
    import pyarrow as pa

    values = token_values(columns, _TYPES, 0)
    ids, counts = values["input_ids"]
    mask = values["loss_mask"][0] if "loss_mask" in values else np.ones(len(ids), np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    arrays = {
        "input_ids": _lists(ends, ids.astype(np.int32)),
        "loss_mask": _lists(ends, mask.astype(np.int64)),
        "seq_len": pa.chunked_array([pa.array(counts)]),
    }
    info = json.dumps({"info": {"features": _FEATURES}})
    return pa.table(arrays).replace_schema_metadata({"huggingface": info})


def _lists(ends: NDArray[np.int64], values: NDArray[np.generic]) -> pa.ChunkedArray:
    """Lists, in chunks that are small enough for 32-bit offsets, as ``datasets`` expects."""
    import pyarrow as pa

    chunks, first = [], 0
    while first < len(ends) - 1:
        last = int(np.searchsorted(ends, ends[first] + (1 << 30), side="right")) - 1
        last = max(last, first + 1)
        offsets = (ends[first : last + 1] - ends[first]).astype(np.int32)
        chunks.append(pa.ListArray.from_arrays(offsets, pa.array(values[ends[first] : ends[last]])))
        first = last
    return pa.chunked_array(chunks, pa.list_(pa.from_numpy_dtype(values.dtype)))


def _fingerprint(table: pa.Table) -> str:
    """16 hexadecimal digits that depend on the rows; ``datasets`` names its caches by them."""
    digest = hashlib.sha256()
    for name in table.column_names:
        for chunk in table[name].chunks:
            values = chunk.flatten() if name in COLUMNS else chunk
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()[:16]


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_bytes(path, json.dumps(value, indent=2, sort_keys=True).encode())


# speculators' columns and metadata in other formats, and the reverse.


_OF_FILES = frozenset(("features", "splits", "citation", "description", "homepage", "license", LAYERS, SCALED_BY))
"""Fields of dataset_info.json that describe the files, or that the writer sets."""


class SpeculatorsCarrying(Carrying):
    """Keeps token ids and masks. ``seq_len`` is the number of tokens, and is derived from the rows."""

    derived: ClassVar[frozenset[str]] = frozenset(("seq_len",))
    of_files: ClassVar[frozenset[str]] = _OF_FILES

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        return {name: value for name, value in metadata.items() if name not in _OF_FILES}, {}
