"""NeMo Automodel caches. See ``files`` for the layout.

An example is a padded sequence of ``seq_length`` tokens. Layers are ``aux_layer_ids`` or ``target_layer_ids``; a DSpark cache
also has the layer ``"last"``. Token ids and masks are per-token columns. The attention mask of an EAGLE-3 cache gives the examples'
lengths; a DSpark cache stores none. The target's distribution is the column ``target_probs``, read on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._columns import pick_rows
from actshard.base._json import read_json
from actshard.base.codes import Remark
from actshard.base.errors import ActshardError, FormatError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location
from actshard.formats.automodel.files import (
    COLUMNS,
    MANIFEST,
    DraftManifest,
    StackedTensor,
    header_of,
    kind_of,
    shards_of,
)
from actshard.formats.contents import Absence, Contents, Evidence, Options
from actshard.formats.incomplete import OF_A_FILE
from actshard.formats.per_token import TokenColumns

if TYPE_CHECKING:
    import pyarrow as pa

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
