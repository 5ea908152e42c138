"""Writes DSpark caches of NeMo Automodel, as ``precompute_dspark`` writes them; see ``read`` for the layout.

A shard has the temporary name ``.NAME.part`` until all of its examples are committed. manifest.json is written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base._arguments import NUMPY_BY_NAME, name_of
from actshard.base._json import Fields
from actshard.base.errors import ArgumentError, FormatError
from actshard.base.layers import Layer
from actshard.base.location import Location
from actshard.base.work import rename, sync_folders, write_bytes
from actshard.formats.automodel.read import COLUMNS, DTYPES, MANIFEST, OF_FILES, WEIGHTS, DraftManifest
from actshard.formats.carrying import Carrying
from actshard.formats.per_token import LAST, TokenTarget, check_counts, token_values
from actshard.formats.target import AllExamples, Block, Spec, only, positive

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


_SHARD_SIZE = 256
_NEEDED = {"target_model": str, "target_model_type": str, "target_vocab_size": int, "num_hidden_layers": int}
"""Fields of the manifest that Automodel's trainer compares with its model."""
_IDS, _MASK = COLUMNS["dspark"]
_AUX, _LAST_STATES = "target_hidden_states", "target_last_hidden_states"
_SHARD = re.compile(r"\.?shard-(\d{6,})\.safetensors(\.part)?")
_ORDER = ("I64", "F32", "F16", "BF16")
"""Dtypes in the order in which the safetensors library sorts tensors. Tensors of one dtype are sorted by name."""


class AutomodelTarget(TokenTarget):
    """Writes a DSpark cache. Layers are integers, and the last hidden state."""

    format: ClassVar[str] = "automodel"
    format_options: ClassVar[Mapping[str, str]] = {
        "shard_size": f"samples per shard (default: {_SHARD_SIZE})",
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
        "layer_ids": "target_layer_ids of the other layers (default: their names)",
        "pad_token_id": "token id of padding (default: 0)",
    }
    decides: ClassVar[tuple[str, ...]] = ("dtype", "_tokens")
    ragged = False
    copies: float = 2.0
    takes_shard_bytes = False
    only_columns: tuple[str, ...] | None = COLUMNS["dspark"]
    token_types: Mapping[str, DTypeLike] = dict.fromkeys(COLUMNS["dspark"], np.int64)
    reserved: ClassVar[Collection[str]] = OF_FILES
    padding_note: ClassVar[str] = "and their lengths are not stored: loss_mask is 0 there"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.num_examples is None:
            raise ArgumentError(
                "num_examples: expected the number of examples, which the first bytes of automodel's shards depend on; pass it"
            )
        lacking = [name for name, kind in _NEEDED.items() if type(spec.metadata.get(name)) is not kind]
        if lacking:
            raise ArgumentError(
                f"metadata: automodel's trainer compares {', '.join(_NEEDED)} with its model: pass metadata= with them; "
                f"{lacking[0]}: expected {_NEEDED[lacking[0]].__name__}, found {spec.metadata.get(lacking[0])!r}"
            )
        self.shard_size = positive(spec.options, "shard_size", _SHARD_SIZE) or _SHARD_SIZE
        self.pad = spec.options.get("pad_token_id", 0)
        if type(self.pad) is not int or not 0 <= self.pad < 1 << 31:
            raise ArgumentError(f"pad_token_id: expected a token id, found {self.pad!r}")
        self._tokens = spec.tokens
        remedy = "; EAGLE-3 caches, which store the target's distribution, are not written"
        self.require_last("automodel's DSpark caches store", remedy)
        self.ids = self.layer_ids()
        self._dirty: set[int] = set()

    @property
    def aux_names(self) -> Sequence[Layer]:
        return self.ids

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, tuple(DTYPES.values()), "automodel", "")

    def take_tokens(self, tokens: int) -> None:
        if self._tokens is None:
            self._tokens = tokens
        if not self._tokens:
            raise ArgumentError("expected at least one token per example, found none")

    @property
    def tokens(self) -> int | None:
        return self._tokens

    def check_values(self, table: pa.Table, first: int) -> None:
        ids, counts = token_values(table, self.token_types, first)[_IDS]
        most = self.spec.metadata["target_vocab_size"]
        if (wrong := np.flatnonzero((ids < 0) | (ids >= most))).size:
            bad = first + int(np.searchsorted(np.cumsum(counts), wrong[0], side="right"))
            raise ArgumentError(
                f"columns: {_IDS!r}: expected token ids below {most}, metadata's target_vocab_size, found {ids[wrong[0]]} in "
                f"example {bad}"
            )

    def config(self) -> dict[str, object]:
        options = {"shard_size": self.shard_size, "last": self.last, "ids": self.ids, "pad": self.pad}
        return {**super().config(), **options, "tokens": self._tokens, "examples": self.spec.num_examples}

    def adopt(self, config: dict[str, object]) -> None:
        super().adopt(config)
        tokens = config["tokens"]
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"tokens {tokens!r}")
        self._tokens = tokens

    # -- writing ---------------------------------------------------------------------------------------------------

    def _path(self, shard: int, *, is_complete: bool) -> Path:
        name = f"shard-{shard:06}.safetensors"
        return self.root / (name if is_complete else f".{name}.part")

    def _shards(self) -> list[tuple[int, bool, Path]]:
        """Complete and incomplete shards: number, whether the shard has its final name, path."""
        shards = []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            match = _SHARD.fullmatch(path.name)
            if match is not None and path in (self._path(int(match[1]), is_complete=x) for x in (True, False)):
                shards.append((int(match[1]), match[2] is None, path))
        return shards

    def _end(self, shard: int) -> int:
        """The number of the first example after a shard."""
        assert self.spec.num_examples is not None
        return min((shard + 1) * self.shard_size, self.spec.num_examples)

    def restore(self, states: Sequence[dict[str, object]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)

    def forget(self, lengths: NDArray[np.int64]) -> None:
        for shard, is_complete, path in self._shards():
            if shard * self.shard_size >= len(lengths):
                path.unlink()
            elif is_complete and self._end(shard) > len(lengths):
                rename(path, self._path(shard, is_complete=False))  # its last examples were not committed
            elif not is_complete and self._end(shard) <= len(lengths):
                rename(path, self._path(shard, is_complete=True))

    def borders(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.arange(0, len(lengths), self.shard_size)

    def _manifest(self) -> DraftManifest:
        assert self.dtype is not None
        stored = next(name for name, dtype in DTYPES.items() if dtype == name_of(self.dtype))
        value = {
            "mask_generation_prompt": False,
            "mask_reasoning_content": False,
            **self.spec.metadata,
            "format_version": 1,
            "complete": True,
            "hidden_size": self.spec.d_model,
            "seq_length": self._tokens,
            "dtype": stored,
            "num_samples": self.spec.num_examples,
            "shard_size": self.shard_size,
            "target_hidden_dim": len(self.ids) * self.spec.d_model,
            "target_last_hidden_dim": self.spec.d_model,
            "target_layer_ids": self.ids,
        }
        return DraftManifest.parsed(Fields(value, Location.at(self.root / MANIFEST)))

    def _header(self, n: int) -> tuple[bytes, dict[str, int], int]:
        """The header of a shard of n samples, the offset of each tensor in the file, and the file's size."""
        tensors, offset = self._manifest().tensors(n), 0
        entries: dict[str, dict[str, Any]] = {}
        for name in sorted(tensors, key=lambda name: (_ORDER.index(tensors[name][1]), name)):
            shape, dtype = tensors[name]
            end = offset + int(np.prod(shape, dtype=np.int64)) * NUMPY_BY_NAME[dtype].itemsize
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return (
            header,
            {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()},
            len(header) + offset,
        )

    def write(self, block: Block) -> None:
        assert block.columns is not None  # as check_count requires
        assert self._tokens is not None
        n, s, width = len(block), self._tokens, self.spec.d_model
        values = token_values(block.columns, self.token_types, self.n)
        counts = values[_IDS][1]
        if block.unpadded_lengths is not None:
            check_counts(np.minimum(counts, s), block.unpadded_lengths, _IDS, self.n)
        for name, (_, column_counts) in values.items():
            check_counts(column_counts, counts, name, self.n)
        ones = (np.ones(int(counts.sum()), np.int64), counts)
        states = block.memory.reshape(n, len(self.spec.layers), s, width).view(f"u{self.itemsize}")
        tensors = {
            _IDS: _padded(*values[_IDS], s, self.pad),
            _MASK: _padded(*values.get(_MASK, ones), s, 0),
            _AUX: states[:, self.aux].transpose(0, 2, 1, 3),
            _LAST_STATES: states[:, self.last],
        }
        self._put_tensors(n, {name: np.ascontiguousarray(array) for name, array in tensors.items()})
        self.n += n

    def _put_tensors(self, n: int, tensors: Mapping[str, NDArray[np.generic]]) -> None:
        """Writes stacked tensors of the next n samples to the shards that hold them."""
        sources = [array.reshape(-1).view(np.uint8) for array in tensors.values()]
        steps = [array.nbytes // n for array in tensors.values()]
        files: list[tuple[Path, int]] = []
        pieces: list[tuple[int, int, int, int, int]] = []
        first = self.n
        while first < self.n + n:
            shard = first // self.shard_size
            last = min(self._end(shard), self.n + n)
            header, starts, size = self._header(self._end(shard) - shard * self.shard_size)
            pieces.append((len(sources), 0, len(header), len(files), 0))
            sources.append(np.frombuffer(header, np.uint8))
            row = first - shard * self.shard_size
            for k, (name, step) in enumerate(zip(tensors, steps, strict=True)):
                pieces.append(
                    (k, (first - self.n) * step, (last - first) * step, len(files), starts[name] + row * step)
                )
            files.append((self._path(shard, is_complete=False), size))
            self._dirty.add(shard)
            first = last
        self.put(sources, files, pieces)

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return [self._path(shard, is_complete=False) for shard in sorted(self._dirty)], {}

    def committed(self) -> None:
        for shard in sorted(self._dirty):
            if self._end(shard) <= self.n:
                rename(self._path(shard, is_complete=False), self._path(shard, is_complete=True))
        sync_folders([self.root])
        self._dirty.clear()

    def finish(self, examples: AllExamples) -> None:
        self.forget(examples.lengths)
        manifest = self._manifest()
        numbers = [number for number, is_complete, _ in self._shards() if is_complete]
        if numbers != list(range(manifest.num_shards)):
            raise FormatError(f"expected shards 0 to {manifest.num_shards - 1}, found {numbers[:12]}", path=self.root)
        sync_folders([self.root])
        # As Automodel writes it: sorted keys, two spaces.
        write_bytes(self.root / MANIFEST, json.dumps(manifest.fields.value, indent=2, sort_keys=True).encode())

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        row = self.spec.d_model * (2 if self.dtype is None else self.itemsize)
        token_bytes = 16 + len(self.spec.layers) * row
        shards = -(-len(tokens) // self.shard_size)
        return (
            shards,
            shards + 1,
            len(tokens) * (self._tokens or int(tokens.max(initial=0))) * token_bytes + 400 * shards,
        )


def _padded(values: NDArray[np.int64], counts: NDArray[np.int64], tokens: int, pad: int) -> NDArray[np.int64]:
    """Values of examples as ``(n, tokens)``, padded on the right, or cut."""
    padded = np.full((len(counts), tokens), pad, np.int64)
    positions = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_kept = positions < tokens
    padded[np.repeat(np.arange(len(counts)), counts)[is_kept], positions[is_kept]] = values[is_kept]
    return padded


# Automodel's metadata and columns in other formats.


class AutomodelCarrying(Carrying):
    """Keeps token ids, masks and settings. Drops the target's distribution and weights."""

    model_key: ClassVar[str | None] = "target_model"
    of_files: ClassVar[frozenset[str]] = frozenset(OF_FILES)

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        kept_metadata = {name: value for name, value in metadata.items() if name not in OF_FILES}
        size = metadata.get("shard_size")
        return kept_metadata, {"shard_size": size} if type(size) is int and size > 0 else {}

    def left_behind(self, contents: Contents) -> list[str]:
        root = Location.at(contents.path)
        probs = ["target_probs"] if "target distribution" in contents.extras else []
        return [*probs, *(name for name in WEIGHTS if (root / name).exists())]
