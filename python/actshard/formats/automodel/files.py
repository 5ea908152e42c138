"""Files of a NeMo Automodel cache: manifest.json and shards of stacked tensors.

Source: nemo-automodel 0.7.0, ``components/datasets/llm/eagle3_cache.py`` and ``dspark_cache.py``.

manifest.json                sizes; ``num_samples`` and ``shard_size`` determine where each sample is stored
shard-00000i.safetensors     n samples, from i * shard_size: every tensor is (n, seq_length, ...)
target_embeddings.safetensors, target_weights.safetensors     weights of the target model
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import actshard._native as _native
from actshard.base._json import Fields, read_json
from actshard.base.errors import ActshardError, FormatError, MissingFileError, UnfinishedError, UnsupportedError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location
from actshard.formats.per_token import LAST, layer_names

MANIFEST = "manifest.json"
WEIGHTS = ("target_embeddings.safetensors", "target_weights.safetensors")
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_SHARD = re.compile(r"shard-(\d{6,})\.safetensors")
_VERSIONS = {"eagle3": 2, "dspark": 1}
_AUX = {"eagle3": "aux_hidden_states", "dspark": "target_hidden_states"}
_LAST_TENSOR = "target_last_hidden_states"
_IDS = {"eagle3": "aux_layer_ids", "dspark": "target_layer_ids"}
_WIDTH = {"eagle3": "aux_hidden_dim", "dspark": "target_hidden_dim"}
COLUMNS = {
    "eagle3": ("input_ids", "attention_mask", "loss_mask", "position_mask"),
    "dspark": ("input_ids", "loss_mask"),
}
"""Per-token tensors by kind. ``position_mask`` has a last axis of 1."""

OF_FILES = (
    *("format_version", "complete", "num_samples", "shard_size", "seq_length", "dtype", "hidden_size"),
    *(*_IDS.values(), *_WIDTH.values(), "target_last_hidden_dim"),
)
"""Fields of the manifest that describe the files."""


def kind_of(value: object) -> str | None:
    """The kind of cache that a manifest describes: ``"eagle3"`` or ``"dspark"``; None for any other file."""
    if not isinstance(value, dict) or "format_version" not in value or "shard_size" not in value:
        return None
    return next((kind for kind, name in _IDS.items() if name in value and _WIDTH[kind] in value), None)


@dataclass(frozen=True)
class StackedTensor:
    """A tensor in a shard: its shape, dtype and the offset of its first byte in the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int


@dataclass(frozen=True)
class DraftManifest:
    """A checked manifest."""

    fields: Fields
    kind: str
    num_examples: int
    shard_size: int
    tokens: int
    """``seq_length``: tokens of every example, with padding."""
    dtype: str
    layer_ids: tuple[int, ...]
    width: int
    top: int
    """Entries of a token's distribution: ``target_probs_topk``; 0: all of ``draft``."""
    draft: int
    """``draft_vocab_size`` of an EAGLE-3 cache, else 0."""

    @classmethod
    def of(cls, root: Location, faults: Faults = RAISE) -> DraftManifest:
        """Reads and checks the manifest.

        Raises:
            MissingFileError, FormatError: the manifest is missing or invalid.
            UnsupportedError: the version or dtype is not supported.
            UnfinishedError: the writer has not finished.
        """
        path = root / MANIFEST
        return cls.parsed(Fields(read_json(path), path, faults=faults))

    @classmethod
    def parsed(cls, fields: Fields) -> DraftManifest:
        """Checks a manifest's fields; raises as :meth:`of`."""
        path = fields.path
        kind = kind_of(fields.value)
        if kind is None:
            raise FormatError("expected the manifest of an EAGLE-3 or DSpark cache", path=path, code="metadata")
        version = fields.integer("format_version")
        fields.check()
        if version != _VERSIONS[kind]:
            raise UnsupportedError(
                f"field 'format_version': expected {_VERSIONS[kind]}, as of {kind}, found {version}", path=path
            )
        if "complete" in fields.value and not fields.boolean("complete"):
            raise UnfinishedError(
                "field 'complete': expected true, found false: the writer is running or was interrupted. Run it again with the "
                "same settings to finish the cache",
                path=path,
            )
        dtype = fields.text("dtype")
        fields.check()
        if dtype not in DTYPES:
            raise UnsupportedError(fields.error("dtype", " or ".join(DTYPES)).detail, path=path)
        manifest = cls(
            fields,
            kind,
            num_examples=fields.integer("num_samples", minimum=0),
            shard_size=fields.integer("shard_size"),
            tokens=fields.integer("seq_length"),
            dtype=DTYPES[dtype],
            layer_ids=_layers(fields, _IDS[kind]),
            width=0,
            top=fields.integer("target_probs_topk", minimum=0) if kind == "eagle3" else 0,
            draft=fields.integer("draft_vocab_size") if kind == "eagle3" else 0,
        )
        fields.check()
        return manifest._with_width()

    def _with_width(self) -> DraftManifest:
        """The width of a layer: the total width by the number of layers."""
        fields, name = self.fields, _WIDTH[self.kind]
        total = fields.integer(name)
        fields.check()
        width, rest = divmod(total, len(self.layer_ids))
        if rest:
            raise fields.error(name, f"a multiple of {len(self.layer_ids)}, the number of layers")
        if self.kind == "dspark":
            for key in ("hidden_size", "target_last_hidden_dim"):
                if fields.integer(key) != width:
                    raise fields.error(key, f"{width}, as {name} / {len(self.layer_ids)} layers")
        if width >= 1 << 28 or self.tokens >= 1 << 31 or len(self.layer_ids) * width * self.tokens >= 1 << 40:
            raise fields.error(name, "states of less than 2^40 elements per sample")
        return DraftManifest(**{**vars(self), "width": width})

    @property
    def layers(self) -> tuple[int | str, ...]:
        """Names of layers: ids, then ``"last"`` of a DSpark cache."""
        return layer_names(self.layer_ids, LAST if self.kind == "dspark" else None)

    @property
    def top_k(self) -> int:
        """Number of entries stored per distribution; 0 if all are stored."""
        return self.top if 0 < self.top < self.draft else 0

    def shard_rows(self, number: int) -> int:
        """Samples in a shard."""
        return min(self.shard_size, self.num_examples - number * self.shard_size)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.num_examples // self.shard_size)

    def tensors(self, n: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the tensors of a shard of n samples."""
        s, states = (n, self.tokens), (n, self.tokens, len(self.layer_ids) * self.width)
        tensors: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(COLUMNS[self.kind], (s, "I64"))
        tensors[_AUX[self.kind]] = (states, self.dtype)
        if self.kind == "dspark":
            tensors[_LAST_TENSOR] = ((*s, self.width), self.dtype)
            return tensors
        tensors["position_mask"] = ((*s, 1), "BOOL")
        if self.top_k:
            tensors["target_probs_values"] = ((*s, self.top_k), self.dtype)
            tensors["target_probs_indices"] = ((*s, self.top_k), "I32")
        else:
            tensors["target_probs"] = ((*s, self.draft), self.dtype)
        return tensors

    def states(self) -> list[str]:
        """Names of the tensors of hidden states."""
        return [_AUX[self.kind], *([_LAST_TENSOR] if self.kind == "dspark" else [])]


def _layers(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.value.get(name)
    if not isinstance(value, list) or not value or any(type(x) is not int or not -1 <= x < 1 << 31 for x in value):
        raise fields.error(name, "a non-empty list of integers of at least -1")
    return tuple(value)


def shards_of(root: Location, manifest: DraftManifest, *, skips_incomplete: bool = False) -> list[Location]:
    """The shards in order, with ``skips_incomplete`` also those that are missing.

    Raises:
        MissingFileError, FormatError: a shard is missing, or there are more shards than the samples need.
    """
    if not root.lists:
        return [root / f"shard-{number:06}.safetensors" for number in range(manifest.num_shards)]
    names: dict[int, str] = {}
    for entry in root.entries("shard-*.safetensors"):
        match = _SHARD.fullmatch(entry.name)
        if match is not None:
            names[int(match[1])] = entry.name
    for number in range(manifest.num_shards):
        if number in names:
            continue
        names[number] = f"shard-{number:06}.safetensors"
        if not skips_incomplete:
            raise MissingFileError(
                f"expected shard {number} of 0 to {manifest.num_shards - 1}, found nothing", path=root / names[number]
            )
    if surplus := sorted(set(names) - set(range(manifest.num_shards))):
        raise FormatError(
            f"expected {manifest.num_shards} shards for {manifest.num_examples} samples of {manifest.shard_size}, "
            f"found shard {surplus[0]}",
            path=root / names[surplus[0]],
            code="count-claim",
        )
    return [root / names[number] for number in range(manifest.num_shards)]


def header_of(shard: Location, manifest: DraftManifest, number: int) -> dict[str, StackedTensor]:
    """Tensors of a shard, checked against the manifest.

    Raises:
        FormatError: a tensor is missing, or has another shape or dtype.
    """
    try:
        tensors, _, start = _native.safetensors_header(shard)
    except ActshardError as error:
        error.path = error.path or shard.place
        raise
    tensors_by_name = {
        name: StackedTensor(tuple(shape), dtype, start + begin) for name, dtype, shape, begin, _ in tensors
    }
    for name, (shape, dtype) in manifest.tensors(manifest.shard_rows(number)).items():
        if name not in tensors_by_name:
            raise FormatError(f"tensor '{name}': expected {dtype} {list(shape)}, found nothing", path=shard)
        tensor = tensors_by_name[name]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise FormatError(
                f"tensor '{name}': expected {dtype} {list(shape)}, as {MANIFEST} states, found {tensor.dtype} "
                f"{list(tensor.shape)}",
                path=shard,
            )
    return tensors_by_name
