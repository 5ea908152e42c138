"""Writes Zarr activation stores as the published text has them: version 2, uncompressed, a chunk per sample, layer and stretch.

``(1, 1, T_chunk, H)`` chunks of 0.5 to 2 MB are files of their own, always full-size, that many writes fill at once. What a store
is comes last: until ``.zgroup`` and ``.zmetadata`` are there, no reader takes the folder for one. Layers are the array's second
axis; their names, which the text has no place for, are the attribute ``layers``.
"""

from __future__ import annotations

import decimal
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard import _native
from actshard.errors import ArgumentError
from actshard.writing.target import TEXTS, Block, Examples, Spec, Target, array_of, only, positive, uniform
from actshard.writing.work import make_folder, write_bytes, write_json

if TYPE_CHECKING:
    import pyarrow as pa

NODE = "arrays/activations"
CHUNK_BYTES = 1 << 20
"""The middle of the text's 0.5 to 2 MB."""
_SMALL_CHUNK = 1 << 20
"""Samples per chunk of a per-sample array: one chunk for most."""
_LINES = {"prompt": "prompts", "response": "responses"}
"""Text files that the text names; all other texts are in extra_metadata.jsonl."""


class ZarrTarget(Target):
    """``arrays/activations/<sample>.<layer>.<stretch>.0``, then per-sample arrays, texts and metadata."""

    format: ClassVar[str] = "zarr"
    own: ClassVar[Mapping[str, str]] = {
        "chunk_tokens": "tokens per chunk, T_chunk (default: as many as make 1 MiB, at most T_max)",
        "t_max": "the array's length, T_max (default: the longest sample's)",
    }

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.t_max = positive(spec.options, "t_max", None)
        self._chunk = positive(spec.options, "chunk_tokens", None)
        if spec.shard_bytes is not None:
            raise ArgumentError("shard_bytes: a Zarr store has chunks; chunk_tokens= decides their size")
        self.longest = 0
        self.created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._dirty: set[Path] = set()

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        why = ": Zarr version 2 has no such type" if dtype.name == "bfloat16" else ""
        only(dtype, ("F64", "F32", "F16"), "zarr", why)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "t_max": self.t_max, "chunk": self._chunk, "created": self.created}

    def adopt(self, config: dict[str, Any]) -> None:
        super().adopt(config)
        self._chunk, self.created = config["chunk"], config["created"]

    def _choose_chunk(self, longest: int) -> int:
        """T_chunk: a power of two, which divides the usual T_max, of 0.5 to 1 MiB; what is shorter is one chunk."""
        if self._chunk is None:
            fits = max(1, CHUNK_BYTES // self.row_bytes)
            self._chunk = min(1 << (fits.bit_length() - 1), self.t_max or max(longest, 1))
        return self._chunk

    @property
    def chunk(self) -> int:
        """T_chunk, once something was written."""
        assert self._chunk is not None
        return self._chunk

    # -- writing ---------------------------------------------------------------------------------------------------

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.longest = max(int(lengths.max(initial=0)), 0)

    def write(self, block: Block) -> None:
        tokens = uniform(block.lengths, "zarr", self.spec.layers)
        if self.t_max is not None and (tokens > self.t_max).any():
            bad = int(np.flatnonzero(tokens > self.t_max)[0])
            raise ArgumentError(
                f"example {self.n + bad} has {tokens[bad]} tokens, t_max is {self.t_max}; truncate=True cuts, or leave t_max out"
            )
        folder = self.root / NODE
        make_folder(folder)
        chunk, size = self._choose_chunk(int(tokens.max(initial=0))), self.row_bytes
        stretches = -(-tokens // chunk)
        layers = len(self.spec.layers)
        # One entry per (sample, layer, stretch), in the order of the block's memory.
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
        return [*sorted(self._dirty), *([self.root / NODE] if self._dirty else [])], {}

    def committed(self) -> None:
        self._dirty.clear()

    # -- finishing -------------------------------------------------------------------------------------------------

    def finish(self, examples: Examples) -> None:
        tokens = examples.lengths[:, 0]
        self._drop_uncounted(len(examples))
        t_max = self.t_max or max(self.longest, 1)
        assert self.dtype is not None
        shape = (len(examples), len(self.spec.layers), t_max, self.spec.d_model)
        arrays: dict[str, dict[str, Any]] = {
            NODE: array_meta(shape, (1, 1, self.chunk, self.spec.d_model), self.dtype),
        }
        small = {"seq_len": tokens.astype(np.int32)}
        texts: dict[str, dict[str, list[Any]]] = {}
        if examples.columns is not None:
            place_columns(examples.columns, small, texts)
        for name, values in small.items():
            self._small(name, values, arrays)
        self._texts(texts, len(examples))
        attributes = {
            "schema_version": "1.0",
            "num_layers": len(self.spec.layers),
            "hidden_size": self.spec.d_model,
            "T_max": t_max,
            "dtype": str(self.dtype),
            "activation_chunks": [1, 1, self.chunk, self.spec.d_model],
            "layers": list(self.spec.layers),
            "created_at": self.created,
            "written_by": f"actshard {actshard.__version__}",
            **self.spec.metadata,
        }
        write_store(self.root, arrays, attributes)

    def estimate(self, tokens: NDArray[np.int64], *, has_labels: bool) -> tuple[int, int, int]:
        chunk = self._chunk
        size = self._choose_chunk(int(tokens.max(initial=0)))
        self._chunk = chunk
        chunks = int((-(-tokens // size)).sum()) * len(self.spec.layers)
        small = 2  # seq_len: its one chunk and its metadata
        return chunks, chunks + small + 6, chunks * size * self.row_bytes

    def _drop_uncounted(self, n: int) -> None:
        """Chunks of samples that a crash kept from being counted."""
        folder = self.root / NODE
        if folder.is_dir():
            for path in folder.iterdir():
                first = path.name.split(".", 1)[0]
                if first.isdigit() and int(first) >= n:
                    path.unlink()

    def _small(self, name: str, values: NDArray[Any], arrays: dict[str, dict[str, Any]]) -> None:
        """A per-sample array, as one chunk or a few."""
        node = f"arrays/{name}"
        per = max(1, min(len(values), _SMALL_CHUNK))
        chunks = (per, *(max(1, n) for n in values.shape[1:]))
        arrays[node] = array_meta(values.shape, chunks, values.dtype)
        make_folder(self.root / node)
        wrote = []
        for i, first in enumerate(range(0, len(values), per)):
            part = np.ascontiguousarray(values[first : first + per])
            name = ".".join([str(i)] + ["0"] * (values.ndim - 1))
            full = part.nbytes // max(1, len(part)) * per
            path = self.root / node / name
            self.put([part.reshape(-1).view(np.uint8)], [(path, full)], [(0, 0, part.nbytes, 0, 0)])
            wrote.append(path)
        _native.sync_files([*wrote, self.root / node])

    def _texts(self, texts: dict[str, dict[str, list[Any]]], n: int) -> None:
        for file, columns in texts.items():
            make_folder(self.root / "text")
            lines = (
                json.dumps(
                    {"i": i, **{name: values[i] for name, values in columns.items()}},
                    ensure_ascii=False,
                    default=_as_json,
                )
                for i in range(n)
            )
            data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
            write_bytes(self.root / "text" / f"{file}.jsonl", data)


def _as_json(value: Any) -> Any:
    """Integers beyond 64 bits come through arrow as decimals; bytes and dates are their text."""
    return int(value) if isinstance(value, decimal.Decimal) and value == int(value) else str(value)


def place_columns(columns: pa.Table, small: dict[str, NDArray[Any]], texts: dict[str, dict[str, list[Any]]]) -> None:
    """Columns of numbers without a gap are arrays; texts, lists and what has gaps are lines of JSON."""
    import pyarrow as pa

    own_text = next((name for name in ("prompt", *TEXTS) if name in columns.column_names), None)
    for name in columns.column_names:
        column = columns[name]
        kind = column.type
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        array = pa.types.is_fixed_size_list(kind) and not pa.types.is_nested(kind.value_type)
        half = columns.schema.field(name).metadata is not None  # a type that arrow does not have, nor Zarr
        if (
            (number or (array and not half))
            and not column.null_count
            and name not in small
            and name.isprintable()
            and "/" not in name
        ):
            small[name] = array_of(column)
            continue
        told = "prompt" if name == own_text else name
        texts.setdefault(_LINES.get(told, "extra_metadata"), {})[told] = column.to_pylist()


def array_meta(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Any]:
    """A ``.zarray``: plain chunks of native elements in C order."""
    return {
        "chunks": [int(n) for n in chunks],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype.str,
        "fill_value": False if dtype.kind == "b" else 0.0 if dtype.kind == "f" else 0,
        "filters": None,
        "order": "C",
        "shape": [int(n) for n in shape],
        "zarr_format": 2,
    }


def write_store(root: Path, arrays: Mapping[str, Mapping[str, Any]], attributes: Mapping[str, Any]) -> None:
    """Metadata of a store, consolidated ones too; what makes it a store comes last."""
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
    _native.sync_files([root / "arrays", root])
