"""Writes DeepSpec target caches: version 2, as DeepSpec's own ``LocalTargetCacheWriter`` does, or version 4 of its fork.

Examples are written back to back to ``shard-*.bin``, and their records to the index. A new shard begins when an example would
exceed ``max_shard_bytes``. manifest.json is written last: without it no reader accepts the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.base.errors import ArgumentError, FormatError
from actshard.base.layers import Layer
from actshard.base.work import sync_folders, write_bytes
from actshard.formats.carrying import Carrying
from actshard.formats.deepspec.read import COLUMNS, DTYPES, INDEX, ITEMSIZE, MANIFEST, OFFSETS, RECORDS, TOKEN_BYTES
from actshard.formats.per_token import LAST, ColumnValues, TokenTarget
from actshard.formats.target import AllExamples, Block, Spec, only, positive

if TYPE_CHECKING:
    from actshard.formats.contents import Contents


MAX_SHARD_BYTES = 64 << 30
"""DeepSpec's default size of a shard."""
_SHARD = re.compile(r"shard-(\d{5,})\.bin")
_RESERVED = (
    *(
        "version",
        "num_samples",
        "num_shards",
        "target_layer_ids",
        *DTYPES,
        "index_record_size",
        "hidden_size",
        "shards",
    ),
    *("cache_context_parallel_size", "context_layout", "index_files", "stores_target_last_hidden_states"),
)
"""Fields of the manifest that describe the files."""


class DeepspecTarget(TokenTarget):
    """Writes a target cache. Layers are integers, ascending, and the last hidden state."""

    format: ClassVar[str] = "deepspec"
    format_options: ClassVar[Mapping[str, str]] = {
        "version": "2 (default), or 4, the fork's version, in which last hidden states are optional",
        "index_record_size": "for version 4: 64 (default) or 60",
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
        "layer_ids": "target_layer_ids of the other layers, ascending (default: their names)",
    }
    copies: float = 2.0
    only_columns: tuple[str, ...] | None = COLUMNS
    token_types: Mapping[str, DTypeLike] = dict(zip(COLUMNS, (np.int32, np.uint8, np.uint8), strict=True))
    reserved: ClassVar[Collection[str]] = _RESERVED

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.version = spec.options.get("version", 2)
        if self.version not in (2, 4) or isinstance(self.version, bool):
            raise ArgumentError(f"version: expected 2 or 4, found {self.version!r}")
        self.record = positive(spec.options, "index_record_size", 56 if self.version == 2 else 64)
        if self.record not in ((56,) if self.version == 2 else (60, 64)):
            raise ArgumentError(f"index_record_size: expected 56, or 60 or 64 with version=4, found {self.record!r}")
        if self.version == 2:
            self.require_last("version 2 stores", ", or pass version=4, which DeepSpec's fork reads")
        pairs = sorted(zip(self.layer_ids(), self.aux, strict=True))
        self.ids, self.aux = [layer for layer, _ in pairs], [k for _, k in pairs]
        self.shard = self.size = 0
        """Number and size of the shard that is being written."""
        self._dirty: set[Path] = set()

    @property
    def aux_names(self) -> Sequence[Layer]:
        return self.ids

    @classmethod
    def conversion_options(
        cls,
        source_options: Mapping[str, object],
        user_options: Mapping[str, object],
        tokens: str,
        pooled: Callable[[], bool],
    ) -> dict[str, object]:
        # The source's record size is valid only for its version.
        implied_options = {} if "version" in user_options else source_options
        return {**implied_options, **user_options}

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, ("BF16",), "deepspec", ", as DeepSpec's reader does")

    def config(self) -> dict[str, object]:
        options = {"version": self.version, "record": self.record, "ids": self.ids, "last": self.last}
        return {**super().config(), **options, "shard_bytes": self.spec.shard_bytes}

    @property
    def most(self) -> int:
        """Bytes of a shard."""
        return self.spec.shard_bytes or MAX_SHARD_BYTES

    def example_bytes(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of examples."""
        sizes: NDArray[np.int64] = tokens * (TOKEN_BYTES + len(self.spec.layers) * self.spec.d_model * ITEMSIZE)
        return sizes

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def index(self) -> Path:
        """The index file."""
        return self.root / (INDEX if self.version == 2 else "samples.cp000.idx")

    def _shard(self, number: int) -> Path:
        return self.root / f"shard-{number:05}.bin"

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.shard, self.size = int(states[-1]["shard"]), int(states[-1]["size"])

    def forget(self, lengths: NDArray[np.int64]) -> None:
        for path, size in ((self.index, len(lengths) * self.record_bytes), (self._shard(self.shard), self.size)):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        for path in self.root.glob("shard-*.bin"):
            match = _SHARD.fullmatch(path.name)
            if match is not None and int(match[1]) > self.shard:
                path.unlink()

    def borders(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.flatnonzero(self._offsets(lengths)[1] == 0)

    def _offsets(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each example's shard, and its offset in the shard."""
        shards, offsets = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
        shard = offset = 0
        for i, size in enumerate(self.example_bytes(lengths[:, 0]).tolist()):
            if offset and offset + size > self.most:
                shard, offset = shard + 1, 0
            shards[i], offsets[i] = shard, offset
            offset += size
        return shards, offsets

    def states_at(
        self, lengths: NDArray[np.int64], firsts: Sequence[int], blocks: Sequence[int]
    ) -> list[dict[str, object]]:
        shards, offsets = self._offsets(lengths)
        return [{"shard": int(shards[first]), "size": int(offsets[first])} for first in firsts]

    def begin_at(self, first: int, state: Mapping[str, Any]) -> None:
        self.n, self.shard, self.size = first, int(state["shard"]), int(state["size"])

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        assert self.record is not None
        return self.record

    def write(self, block: Block) -> None:
        tokens, per_token = self.tokens_of(block)
        sizes = self.example_bytes(tokens)
        buffer, firsts = self._pack_examples(block, tokens, per_token, sizes)
        records, pieces, files = self._place_examples(tokens, sizes, firsts)
        pieces.append((1, 0, records.nbytes, len(files), self.n * self.record_bytes))
        files.append((self.index, 0))
        self.put([buffer, records.view(np.uint8)], files, pieces)
        self._dirty |= {path for path, _ in files}
        self.n += len(block)

    def _pack_examples(
        self,
        block: Block,
        tokens: NDArray[np.int64],
        per_token: ColumnValues,
        sizes: NDArray[np.int64],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The examples as bytes, and the offset of each."""
        width, layers = self.spec.d_model, len(self.aux)
        firsts = np.concatenate([[0], np.cumsum(sizes)])
        buffer = np.empty(int(firsts[-1]), np.uint8)
        memory, starts = block.memory.view(np.uint16), block.starts
        bounds = np.concatenate([[0], np.cumsum(tokens)]).tolist()
        for i, (s, first) in enumerate(zip(tokens.tolist(), firsts.tolist(), strict=False)):
            span = slice(bounds[i], bounds[i + 1])
            for name, size, begin in zip(COLUMNS, (4, 1, 1), (0, 4 * s, 5 * s), strict=True):
                into = buffer[first + begin : first + begin + size * s]
                into[:] = per_token[name][0][span].view(np.uint8) if name in per_token else 1
            body = buffer[first + TOKEN_BYTES * s : first + int(sizes[i])].view(np.uint16)
            states = body[: s * layers * width].reshape(s, layers, width)
            for k, layer in enumerate(self.aux):
                states[:, k] = memory[starts[i, layer] : starts[i, layer] + s]
            if self.last is not None:
                body[s * layers * width :].reshape(s, width)[:] = memory[
                    starts[i, self.last] : starts[i, self.last] + s
                ]
        return buffer, firsts

    def _place_examples(
        self, tokens: NDArray[np.int64], sizes: NDArray[np.int64], firsts: NDArray[np.int64]
    ) -> tuple[NDArray[np.generic], list[tuple[int, int, int, int, int]], list[tuple[Path, int]]]:
        """Records of examples, and the pieces to write: one piece per shard."""
        records = np.zeros(len(tokens), RECORDS[self.record_bytes])
        pieces: list[tuple[int, int, int, int, int]] = []
        files: list[tuple[Path, int]] = []
        for i, size in enumerate(sizes.tolist()):
            if self.size and self.size + size > self.most:
                self.shard, self.size = self.shard + 1, 0
            shard = self._shard(self.shard)
            if files and files[-1][0] == shard:
                source, first, length, file, offset = pieces[-1]
                pieces[-1] = (source, first, length + size, file, offset)
            else:
                pieces.append((0, int(firsts[i]), size, len(files), self.size))
                files.append((shard, 0))
            records["shard_id"][i], records["input_ids_offset"][i] = self.shard, self.size
            self.size += size
        records["sample_id"] = np.arange(self.n, self.n + len(tokens))
        records["seq_len"] = tokens
        if "context_len" in (records.dtype.names or ()):
            records["context_len"] = tokens
        states = tokens * len(self.ids) * self.spec.d_model * ITEMSIZE
        ends = records["input_ids_offset"].astype(np.int64)
        for name, column_bytes in zip(OFFSETS[1:], (4 * tokens, tokens, tokens, states), strict=True):
            ends = ends + column_bytes
            records[name] = ends
        return records, pieces, files

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return sorted(self._dirty), {"shard": self.shard, "size": self.size}

    def committed(self) -> None:
        self._dirty.clear()

    def finish(self, examples: AllExamples) -> None:
        self.forget(examples.lengths)
        _native.sync_files([self.index, self._shard(self.shard)])
        size = self.index.stat().st_size
        if size != len(examples) * self.record_bytes:
            raise FormatError(f"expected {len(examples)} records, found {size} bytes", path=self.index)
        sync_folders([self.root])
        # As DeepSpec writes it: sorted keys, two spaces.
        text = json.dumps(self.manifest(len(examples)), indent=2, sort_keys=True)
        write_bytes(self.root / MANIFEST, text.encode())

    def manifest(self, n: int) -> dict[str, object]:
        """Contents of manifest.json for n examples."""
        manifest: dict[str, object] = {
            **self.spec.metadata,
            **DTYPES,
            "version": self.version,
            "num_samples": n,
            "num_shards": self.shard + 1,
            "target_layer_ids": self.ids,
            "index_record_size": self.record_bytes,
            "hidden_size": self.spec.d_model,
            "shards": [{"shard_id": k, "file_name": self._shard(k).name} for k in range(self.shard + 1)],
        }
        if self.version > 2:
            manifest |= {
                "cache_context_parallel_size": 1,
                "context_layout": "contiguous",
                "index_files": [self.index.name],
                "stores_target_last_hidden_states": self.last is not None,
            }
        return manifest

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        shards, size = 1, 0
        for example_bytes in self.example_bytes(tokens).tolist():
            if size and size + example_bytes > self.most:
                shards, size = shards + 1, 0
            size += example_bytes
        total = int(self.example_bytes(tokens).sum()) + len(tokens) * self.record_bytes
        return shards, shards + 2, total


# DeepSpec's metadata in other formats, and metadata of other formats in DeepSpec's.


_OF_FILES = frozenset(
    (
        *("num_samples", "num_shards", "target_layer_ids", "hidden_dtype", "token_dtype", "mask_dtype", "hidden_size"),
        *("shards", "cache_context_parallel_size", "context_layout", "index_files", "stores_target_last_hidden_states"),
        *("version", "index_record_size"),
    )
)
"""Fields of the manifest that describe the files."""


class DeepspecCarrying(Carrying):
    """Keeps fields of the manifest that do not describe files. Caches of versions 3 and 4 become version 4 with one rank."""

    model_key: ClassVar[str | None] = "target_model_name_or_path"
    of_files: ClassVar[frozenset[str]] = _OF_FILES

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        kept_metadata = {name: value for name, value in metadata.items() if name not in _OF_FILES}
        if metadata.get("version") not in (3, 4):
            return kept_metadata, {}
        record = metadata.get("index_record_size")
        return kept_metadata, {"version": 4, **({"index_record_size": record} if record in (60, 64) else {})}
