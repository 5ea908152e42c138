"""NeMo Automodel caches.

An example is a padded sequence of ``seq_length`` tokens. Layers are ``aux_layer_ids`` or ``target_layer_ids``; a DSpark cache
also has the layer ``"last"``. Token ids and masks are per-token columns. The attention mask of an EAGLE-3 cache gives the examples'
lengths; a DSpark cache stores none. The target's distribution is the column ``target_probs``, read on demand.

Files of a NeMo Automodel cache: manifest.json and shards of stacked tensors.

Source: nemo-automodel 0.7.0, ``components/datasets/llm/eagle3_cache.py`` and ``dspark_cache.py``.

manifest.json                sizes; ``num_samples`` and ``shard_size`` determine where each sample is stored
shard-00000i.safetensors     n samples, from i * shard_size: every tensor is (n, seq_length, ...)
target_embeddings.safetensors, target_weights.safetensors     weights of the target model
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._columns import pick_rows
from actshard.base._json import Fields, read_json
from actshard.base.codes import Remark
from actshard.base.errors import (
    RAISE,
    ActshardError,
    Faults,
    FormatError,
    MissingFileError,
    UnfinishedError,
    UnsupportedError,
)
from actshard.base.location import Location
from actshard.formats.contents import OF_A_FILE, Absence, Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.per_token import LAST, TokenColumns, check_token_values, layer_names
from actshard.formats.report import Report

if TYPE_CHECKING:
    import pyarrow as pa


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


_LOOKED_FOR = "a folder with a manifest.json that has format_version, shard_size, and aux_layer_ids or target_layer_ids"
PROBS = "target_probs"
_MASKS = 4096
"""Number of examples whose masks are read at once."""


def detect(path: Location) -> Evidence:
    """Checks for the manifest."""
    if path.kind() != "folder":
        return Evidence(False, _LOOKED_FOR, "a file")
    manifest = path / MANIFEST
    if manifest.kind() != "file":
        return Evidence(False, _LOOKED_FOR, f"no {MANIFEST}")
    kind = kind_of(read_json(manifest))
    if kind is None:
        return Evidence(False, _LOOKED_FOR, f"another {MANIFEST}", near=True)
    return Evidence(True, _LOOKED_FOR, f"the {MANIFEST} of {kind}")


class StackedCache:
    """An opened cache: manifest and headers of shards.

    Args:
        path: the cache's folder.
        options: options of reading.
        faults: receives the faults of the manifest and of each shard's header.
    """

    def __init__(self, path: Location, options: Options, faults: Faults = RAISE) -> None:
        self.path = path
        self.io = options.io
        self.manifest = DraftManifest.of(path, faults)
        self.shards = shards_of(path, self.manifest, skips_incomplete=options.skip_incomplete)
        self.broken: dict[int, ActshardError] = {}
        """Shards that are left out, by number, with their faults."""
        self.headers: list[dict[str, StackedTensor]] = []
        """Tensors of each shard; none of a shard with a fault."""
        for number, shard in enumerate(self.shards):
            header: dict[str, StackedTensor] = {}
            with faults.noting(shard):
                try:
                    header = header_of(shard, self.manifest, number)
                except OF_A_FILE as error:
                    if not options.skip_incomplete:
                        raise
                    self.broken[number] = error
            self.headers.append(header)
        n = self.manifest.num_examples
        self._shard = (np.arange(n) // self.manifest.shard_size).astype(np.uint32)
        self._row = (np.arange(n) % self.manifest.shard_size).astype(np.uint64)
        self._is_absent = np.isin(self._shard, list(self.broken))
        if n and self._is_absent.all():
            raise next(iter(self.broken.values()))
        self._tokens = np.where(self._is_absent, 0, self.manifest.tokens).astype(np.uint32)

    def _starts(self, name: str, step: int) -> NDArray[np.uint64]:
        """Offset of each example's first byte in its shard."""
        begin = np.array([header[name].start if header else 0 for header in self.headers] or [0], np.uint64)
        offsets: NDArray[np.uint64] = begin[self._shard] + self._row * np.uint64(step * self.manifest.tokens)
        return offsets

    def states(self) -> Rows:
        """Rows of hidden states: a group per layer, then the last."""
        manifest, size = self.manifest, NUMPY_BY_NAME[self.manifest.dtype].itemsize
        names, layers = manifest.states(), len(manifest.layer_ids)
        steps = [layers * manifest.width * size, manifest.width * size][: len(names)]
        files = [(shard, step) for step in steps for shard in self.shards]
        tensors = [
            (self._shard + np.uint32(t * len(self.shards)), self._starts(name, step))
            for t, (name, step) in enumerate(zip(names, steps, strict=True))
        ]
        groups = [(0, k * manifest.width * size) for k in range(layers)] + [(1, 0)] * (len(names) - 1)
        return Rows.tensors(
            files,
            self._tokens,
            tensors,
            groups,
            width=manifest.width,
            dtype=manifest.dtype,
            descr=NUMPY_BY_NAME[manifest.dtype],
            io=self.io,
        )

    def column(self, name: str, dtype: str, width: int = 1) -> Rows:
        """Rows of a per-token tensor."""
        step = width * NUMPY_BY_NAME[dtype].itemsize
        files = [(shard, step) for shard in self.shards]
        return Rows.tensors(
            files,
            self._tokens,
            [(self._shard, self._starts(name, step))],
            [(0, 0)],
            width=width,
            dtype=dtype,
            descr=NUMPY_BY_NAME[dtype],
            io=self.io,
        )

    @cached_property
    def columns(self) -> TokenColumns:
        """Per-token columns."""
        kinds = {name: "BOOL" if name == "position_mask" else "I64" for name in COLUMNS[self.manifest.kind]}
        rows = {name: self.column(name, dtype) for name, dtype in kinds.items()}
        return TokenColumns(rows, self.manifest.num_examples, self.path.place)

    def read(self, names: Sequence[str]) -> pa.Table:
        """Reads columns of all examples, including ``target_probs``, which the store's table omits because of its size."""
        table = self.columns.columns([name for name in names if name != PROBS or self.manifest.kind != "eagle3"])
        if PROBS in names and self.manifest.kind == "eagle3":
            import pyarrow as pa

            # A table without columns has no rows, so no column can be appended to it.
            probs = self._probs()
            table = table.append_column(PROBS, probs) if table.num_columns else pa.table({PROBS: probs})
        return table.select(list(names))

    def _probs(self) -> pa.Array:
        """The target's distribution over the draft vocabulary: per example a list of ``draft_vocab_size`` float32 per token."""
        import pyarrow as pa

        manifest = self.manifest
        examples, k = np.flatnonzero(~self._is_absent), self.manifest.top_k
        probs = np.zeros((len(examples) * manifest.tokens, manifest.draft), np.float32)
        if k:
            indices = self.column("target_probs_indices", "I32", k).gather_whole(0, examples, None, None)
            if indices.size and (indices.min() < 0 or indices.max() >= manifest.draft):
                bad = int(np.flatnonzero(((indices < 0) | (indices >= manifest.draft)).any(axis=1))[0])
                index = int(indices[bad][(indices[bad] < 0) | (indices[bad] >= manifest.draft)][0])
                example = int(examples[bad // manifest.tokens])
                raise FormatError(
                    f"tensor 'target_probs_indices': example {example}, token {bad % manifest.tokens}: expected "
                    f"an index of the draft vocabulary, 0 to {manifest.draft - 1}, found {index}",
                    path=self.shards[int(self._shard[example])],
                )
            values = self.column("target_probs_values", manifest.dtype, k).gather_whole(0, examples, None, None)
            np.put_along_axis(probs, indices, values.astype(np.float32), axis=1)
        else:
            probs[:] = self.column(PROBS, manifest.dtype, manifest.draft).gather_whole(0, examples, None, None)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(probs.reshape(-1)), manifest.draft)
        ends = np.concatenate([[0], np.cumsum(self._tokens, dtype=np.int64)])
        return pa.LargeListArray.from_arrays(ends, rows)

    def lengths(self) -> NDArray[np.int64] | None:
        """Tokens of each example before its padding; None if no mask is stored, or if masks are not ones followed by zeros."""
        if self.manifest.kind != "eagle3":
            return None
        n, tokens = self.manifest.num_examples, self.manifest.tokens
        masks = self.column("attention_mask", "I64")
        lengths = np.zeros(n, np.int64)
        for first in range(0, n, _MASKS):
            numbers = first + np.flatnonzero(~self._is_absent[first : first + _MASKS])
            mask = masks.gather_whole(0, numbers, None, None).reshape(len(numbers), tokens) != 0
            lengths[numbers] = mask.sum(axis=1)
            if not np.array_equal(mask, np.arange(tokens) < lengths[numbers][:, None]):
                return None  # padded on the left, or with gaps: a length would select the wrong tokens
        return lengths

    def contents(self) -> Contents:
        """The dataset's contents, for a store."""
        manifest, rows, columns = self.manifest, self.states(), self.columns
        provenance_fields = (
            "format_version",
            "seq_length",
            "shard_size",
            "split",
            "train_split",
            "input_data",
            "train_data_path",
        )
        value = manifest.fields.value
        model = value.get("target_model")
        n, absent = manifest.num_examples, self._is_absent
        return Contents(
            format="automodel",
            path=self.path.place,
            metadata=value,
            layers=manifest.layers,
            d_model=manifest.width,
            dtype=NUMPY_BY_NAME[manifest.dtype],
            num_examples=n,
            token_counts=lambda: self._tokens.astype(np.int64),
            rows=rows,
            column_names=columns.names,
            token_columns=columns.names,
            columns=self.read,
            head_columns=columns.head,
            column_batches=columns.batches,
            example_columns=lambda names, numbers: (
                pick_rows(self.read(names), numbers) if PROBS in names else columns.some(names, numbers)
            ),
            files=lambda: [shard.place for shard in self.shards],
            model=model if isinstance(model, str) else None,
            provenance={"kind": manifest.kind}
            | {name: value[name] for name in provenance_fields if value.get(name) is not None},
            extras=("target distribution",) if manifest.kind == "eagle3" else (),
            tokens_each=None if self.broken else manifest.tokens,
            content_lengths=self.lengths,
            absence=Absence(
                absent,
                tuple(self.shards[number].place for number in self.broken),
                reasons=tuple(f"{self.shards[number].name}: {error.detail}" for number, error in self.broken.items()),
            ),
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> list[Remark]:
        if self.manifest.kind == "eagle3":
            return []
        return [
            Remark(
                "layout",
                f"examples are padded to {self.manifest.tokens} tokens and their lengths are not stored: "
                "padding counts as content. "
                "loss_mask is 0 there",
            )
        ]


def open(path: Location, options: Options) -> Contents:
    """Reads the manifest and the header of every shard."""
    return StackedCache(path, options).contents()


# Checks of NeMo Automodel caches


_AT_ONCE = 1 << 22
"""Number of indices read at once."""


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the manifest, the list of shards, every header, token ids, masks, and the indices of a top-k distribution."""
    cache = report.faults.parse(root, lambda: StackedCache(root, Options.of(root), report.faults))
    shards, headers = ([], []) if cache is None else (cache.shards, cache.headers)
    for number, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        tell("shards", number, len(shards))
        report.count("files")
        if header and cache is not None:
            report.count("bytes", shard.regular().size)
            if cache.manifest.top_k:
                with report.noting(shard):
                    _check_indices(shard, header["target_probs_indices"], cache.manifest, report)
    if report.ok and cache is not None:
        with report.noting(root):
            vocabulary = cache.manifest.fields.value.get("target_vocab_size")
            most = vocabulary if type(vocabulary) is int and 0 < vocabulary < 1 << 31 else 1 << 31
            size = cache.manifest.shard_size
            check_token_values(cache.columns, report, lambda example: shards[example // size], most)
    for name in WEIGHTS:
        if (root / name).exists():
            with report.noting(root / name):
                _native.safetensors_header(root / name)
    if root.lists:
        for entry in root.entries("*.tmp"):
            report.add("unlisted-file", root / entry.name, "a temporary file of an interrupted writer")


def _check_indices(shard: Location, tensor: StackedTensor, manifest: DraftManifest, report: Report) -> None:
    """Checks that indices are within the draft vocabulary."""
    total = int(np.prod(tensor.shape, dtype=np.int64))
    for first in range(0, total, _AT_ONCE):
        n = min(_AT_ONCE, total - first)
        indices: NDArray[np.int32] = np.frombuffer(shard.read(tensor.start + 4 * first, 4 * n), "<i4")
        wrong = np.flatnonzero((indices < 0) | (indices >= manifest.draft))
        if wrong.size:
            position = first + int(wrong[0])
            report.add(
                "address-out-of-range",
                shard,
                int(indices[wrong[0]]),
                f"an index of the draft vocabulary, 0 to {manifest.draft - 1}",
                f"byte {tensor.start + 4 * position}, tensor 'target_probs_indices'",
            )
            return
