"""Writes Zarr activation stores as specified by the published text: version 2, uncompressed, a chunk per sample, layer and stretch.

Chunks ``(1, 1, T_chunk, H)`` of 0.5 to 2 MB are separate full-size files, written in parallel. Metadata are written last:
without ``.zgroup`` and ``.zmetadata`` no reader accepts the folder. Layers are the array's second axis. Their names, for which the
text has no field, are the attribute ``layers``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.errors import ArgumentError
from actshard.formats.target import (
    AllExamples,
    Block,
    Spec,
    Target,
    check_times,
    check_utf8,
    created,
    only,
    positive,
    uniform,
)
from actshard.formats.zarr.arrays import WRITER
from actshard.formats.zarr.member import ACTIVATIONS
from actshard.formats.zarr.placing import KEY, Placed, place, place_key
from actshard.work import make_folder, record_files, refuse_other, sync_folders, write_json

if TYPE_CHECKING:
    import pyarrow as pa

NODE = ACTIVATIONS
CHUNK_BYTES = 1 << 20
"""Within the 0.5 to 2 MB of the specification."""
_SMALL_CHUNK = 1 << 20
"""Samples per chunk of a per-sample array, so that most have one chunk."""
OWN_ATTRIBUTES = ("num_layers", "hidden_size", "T_max", "dtype", "activation_chunks", "layers")
"""Attributes that describe the arrays."""


class ZarrTarget(Target):
    """Writes ``arrays/activations/<sample>.<layer>.<stretch>.0``, then per-sample arrays, texts and metadata."""

    format: ClassVar[str] = "zarr"
    own: ClassVar[Mapping[str, str]] = {
        "chunk_tokens": "tokens per chunk, T_chunk (default: for chunks of up to 1 MiB, at most T_max)",
        "t_max": "length of the token axis, T_max (default: tokens of the longest sample)",
    }
    takes_shard_bytes = False
    text_column: ClassVar[str | None] = "prompt"
    holds_named_layers = True
    splits = "examples"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.t_max = positive(spec.options, "t_max", None)
        self._chunk = positive(spec.options, "chunk_tokens", None)
        if spec.shard_bytes is not None:
            raise ArgumentError("shard_bytes: not supported by Zarr stores; use chunk_tokens=")
        if taken := sorted(set(OWN_ATTRIBUTES) & spec.metadata.keys()):
            raise ArgumentError(
                f"metadata: {taken[0]!r} is reserved in Zarr stores, because it describes the arrays; rename yours"
            )
        self.longest = 0
        self.created = created(spec, "%Y-%m-%dT%H:%M:%SZ")
        self._dirty: set[Path] = set()

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        why = ": Zarr version 2 has no such type" if dtype.name == "bfloat16" else ""
        only(dtype, ("F64", "F32", "F16"), "zarr", why)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "t_max": self.t_max, "chunk": self._chunk, "created": self.created}

    def adopt(self, config: dict[str, Any]) -> None:
        super().adopt(config)
        self._chunk, self.created = _chunk_in(config), config["created"]

    def _choose_chunk(self, longest: int) -> int:
        """T_chunk: a power of two for chunks of 0.5 to 1 MiB, so that it divides usual values of T_max.

        Shorter arrays have one chunk.
        """
        if self._chunk is None:
            fits = max(1, CHUNK_BYTES // self.row_bytes)
            self._chunk = min(1 << (fits.bit_length() - 1), self.t_max or max(longest, 1))
        return self._chunk

    @property
    def chunk(self) -> int:
        """T_chunk, once it is determined."""
        assert self._chunk is not None
        return self._chunk

    @property
    def most_tokens(self) -> tuple[int, str] | None:
        return None if self.t_max is None else (self.t_max, f"t_max is {self.t_max}: omit or increase it")

    def check_columns(self, schema: pa.Schema) -> None:
        if "i" in schema.names:
            raise ArgumentError("columns: 'i' is reserved for sample numbers in Zarr stores; rename the column")
        if "seq_len" in schema.names:
            raise ArgumentError("columns: 'seq_len' is reserved for lengths in Zarr stores; rename the column")

    def check_values(self, table: pa.Table, first: int) -> None:
        check_times(table, first)
        is_array = KEY in table.column_names and place_key(table[KEY]) is not None
        check_utf8(table.drop_columns([KEY]) if is_array else table, first)

    def settle(self, block: Block) -> None:
        self._choose_chunk(max(int(block.lengths.max(initial=0)), 0))

    # -- writing ---------------------------------------------------------------------------------------------------

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.longest = max(int(lengths.max(initial=0)), 0)
        if self._chunk is None and states:
            self._chunk = _chunk_in(states[-1])

    def forget(self, lengths: NDArray[np.int64]) -> None:
        self._drop_uncounted(len(lengths))

    def write(self, block: Block) -> None:
        tokens = uniform(block.lengths, "zarr", self.spec.layers)
        if self.t_max is not None and (tokens > self.t_max).any():
            bad = int(np.flatnonzero(tokens > self.t_max)[0])
            raise ArgumentError(
                f"example {self.n + bad} has {tokens[bad]} tokens, t_max is {self.t_max}; pass truncate=True, or omit t_max"
            )
        folder = self.root / NODE
        make_folder(folder)
        chunk, size = self._choose_chunk(int(tokens.max(initial=0))), self.row_bytes
        stretches = -(-tokens // chunk)
        layers = len(self.spec.layers)
        # One entry per (sample, layer, stretch), in memory order.
        per = np.repeat(stretches, layers)
        pair = np.repeat(np.arange(len(per)), per)
        k = np.arange(len(pair)) - np.repeat(np.cumsum(per) - per, per)
        rows = np.minimum(chunk, np.repeat(tokens, layers)[pair] - k * chunk)
        start = block.starts.reshape(-1)[pair] + k * chunk
        zeros = np.zeros_like(k)
        table = np.stack([zeros, start * size, rows * size, np.arange(len(k)), zeros], axis=1)
        sample, layer = np.divmod(pair, layers)
        names = zip((sample + self.n).tolist(), layer.tolist(), k.tolist(), strict=True)
        files = [(folder / f"{i}.{la}.{t}.0", chunk * size) for i, la, t in names]
        self.put([block.bytes], files, table)
        self._dirty |= {path for path, _ in files}
        self.n += len(block)
        self.longest = max(self.longest, int(tokens.max(initial=0)))

    def dirty(self) -> tuple[list[Path], dict[str, Any]]:
        return sorted(self._dirty), {"chunk": self._chunk}

    def committed(self) -> None:
        self._dirty.clear()

    # -- finishing -------------------------------------------------------------------------------------------------

    def finish(self, examples: AllExamples) -> None:
        tokens = examples.lengths[:, 0]
        self._drop_uncounted(len(examples))
        t_max = self.t_max or max(self.longest, 1)
        self._choose_chunk(t_max)  # determined before, unless no example has tokens
        assert self.dtype is not None
        shape = (len(examples), len(self.spec.layers), t_max, self.spec.d_model)
        arrays: dict[str, dict[str, Any]] = {
            NODE: array_meta(shape, (1, 1, self.chunk, self.spec.d_model), self.dtype),
        }
        self._small(
            Placed("seq_len", (len(examples),), np.dtype(np.int32), lambda part: tokens[part].astype(np.int32)), arrays
        )
        if examples.columns is not None:
            small, texts = place(examples.columns)
            for array in small:
                self._small(array, arrays)
            for lines in texts:
                make_folder(self.root / lines.file.parent)
                lines.write(self.root)
        attributes = {
            "schema_version": "1.0",
            "num_layers": len(self.spec.layers),
            "hidden_size": self.spec.d_model,
            "T_max": t_max,
            "dtype": str(self.dtype),
            "activation_chunks": [1, 1, self.chunk, self.spec.d_model],
            "layers": list(self.spec.layers),
            "created_at": self.created,
            "written_by": f"{WRITER} {_native.build_info()['version']}",
            **self.spec.metadata,
        }
        write_store(self.root, arrays, attributes)

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        chunk = self._chunk
        size = self._choose_chunk(int(tokens.max(initial=0)))
        self._chunk = chunk
        chunks = int((-(-tokens // size)).sum()) * len(self.spec.layers)
        small = 1 + max(1, -(-len(tokens) // _SMALL_CHUNK))  # seq_len: metadata and chunks
        return chunks, chunks + small + 6, chunks * size * self.row_bytes

    def _drop_uncounted(self, n: int) -> None:
        """Removes chunks of uncommitted samples."""
        folder = self.root / NODE
        if folder.is_dir():
            with os.scandir(folder) as entries:
                late = [e.path for e in entries if (first := e.name.split(".", 1)[0]).isdecimal() and int(first) >= n]
            for path in late:
                Path(path).unlink()

    def _small(self, array: Placed, arrays: dict[str, dict[str, Any]]) -> None:
        """Writes a per-sample array, in one chunk or a few."""
        node, shape = f"arrays/{array.name}", array.shape
        per = max(1, min(shape[0], _SMALL_CHUNK))
        chunks = (per, *(max(1, n) for n in shape[1:]))
        arrays[node] = array_meta(shape, chunks, array.dtype)
        make_folder(self.root / node)
        wrote: list[str | os.PathLike[str]] = []
        for i, first in enumerate(range(0, shape[0], per)):
            part = np.ascontiguousarray(array.values(slice(first, first + per)), array.dtype)
            name = ".".join([str(i)] + ["0"] * (len(shape) - 1))
            full = part.nbytes // max(1, len(part)) * per
            path = self.root / node / name
            refuse_other(path)
            record_files([path])
            self.put([part.reshape(-1).view(np.uint8)], [(path, full)], [(0, 0, part.nbytes, 0, 0)])
            wrote.append(path)
        _native.sync_files(wrote)
        sync_folders([self.root / node])


def _chunk_in(values: Mapping[str, Any]) -> int | None:
    """T_chunk in a journal; None before it is chosen."""
    chunk = values["chunk"]
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"chunk {chunk!r}")
    return chunk


def array_meta(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Contents of a ``.zarray`` for plain chunks in C order and native byte order."""
    return {
        "chunks": [int(n) for n in chunks],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype.str,
        "fill_value": {"b": False, "f": 0.0, "S": ""}.get(dtype.kind, 0),
        "filters": None,
        "order": "C",
        "shape": [int(n) for n in shape],
        "zarr_format": 2,
    }


def write_store(root: Path, arrays: Mapping[str, Mapping[str, Any]], attributes: Mapping[str, Any]) -> None:
    """Writes a store's metadata and consolidated metadata. The files by which a store is recognized are written last."""
    group = {"zarr_format": 2}
    listed: dict[str, Any] = {".zattrs": dict(attributes), ".zgroup": group, "arrays/.zgroup": group}
    for node, meta in arrays.items():
        make_folder(root / node)
        write_json(root / node / ".zarray", meta)
        listed[f"{node}/.zarray"] = meta
    make_folder(root / "meta")
    write_json(root / "meta" / "config.json", attributes)
    write_json(root / "arrays" / ".zgroup", group)
    write_json(root / ".zmetadata", {"metadata": listed, "zarr_consolidated_format": 1})
    write_json(root / ".zattrs", attributes)
    write_json(root / ".zgroup", group)
