"""Writes Zarr activation stores as specified by the published text: of version 2, or with the same chunks in shards, of version 3.

Chunks ``(1, 1, T_chunk, H)`` are uncompressed; :mod:`.chunks` defines their files, which are written in parallel. Metadata are
written last: without ``.zgroup`` and ``.zmetadata``, or ``zarr.json``, no reader accepts the folder. Layers are the second axis
of the array. Their names, for which the text has no field, are the attribute ``layers``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import NUMPY_BY_NAME, many
from actshard.base.codes import Remark
from actshard.base.errors import ArgumentError, OverflowWarning, warn
from actshard.base.location import Location
from actshard.base.work import make_folder, record_files, refuse_other, sync_folders, write_json
from actshard.formats.scales import KINDS, WORDS, RowScaling
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
from actshard.formats.zarr.chunks import Chunks, PlainChunks, ShardedChunks, array_meta
from actshard.formats.zarr.member import ACTIVATIONS, Member
from actshard.formats.zarr.packing import PACKS, PackedChunks, pack_of
from actshard.formats.zarr.placing import KEY, Placed, place, place_key
from actshard.formats.zarr.scales import SCALED, SCALES

if TYPE_CHECKING:
    import pyarrow as pa

NODE = ACTIVATIONS
_DTYPES = {chunks.version: chunks.dtypes for chunks in (PlainChunks, ShardedChunks)}
MOST_TOKENS = 1 << 24
"""Limit on ``t_max``. Readers number the chunks that an array may have, up to 2^48."""
MUCH_PADDING = 16 << 20
"""Bytes of padding from which a warning names it."""
_PADDED = 1.5
"""Stored bytes per byte of rows from which it does."""
MANY_FILES = 100_000
"""Number of chunk files from which the writer advises version 3."""
_SMALL_CHUNK = 1 << 20
"""Samples per chunk of a per-sample array, so that most have one chunk."""
OWN_ATTRIBUTES = ("num_layers", "hidden_size", "T_max", "dtype", "activation_chunks", "layers", SCALED)
"""Attributes that describe the arrays."""
_CLIPPED = 1e-3
"""Share of clipped values above which a writer warns: fewer change the error little."""


class ZarrTarget(Target):
    """Writes ``arrays/activations``, then per-sample arrays, texts and metadata."""

    format: ClassVar[str] = "zarr"
    format_options: ClassVar[Mapping[str, str]] = {
        "chunk_tokens": "tokens per chunk, T_chunk (default: chunks of up to 1 MiB; version 3: with little padding)",
        "t_max": "length of the token axis, T_max (default: tokens of the longest sample)",
        "version": "of Zarr: 2 (default), a file per chunk; or 3, shards of many chunks, also of bfloat16",
        "scales": f"with dtype='int8': which values share a scale, {', '.join(KINDS)}",
        "pack": f"lossless compression of chunks, with version 3: {', '.join(PACKS)} (default: none)",
    }
    forms: ClassVar[Mapping[str, Mapping[str, str | int]]] = {
        "zarr 3": {"version": 3},
        **{f"zarr 3 {pack}": {"version": 3, "pack": pack} for pack in PACKS},
        "zarr 3 bfloat16 lossless": {"version": 3, "pack": "lossless", "dtype": "bfloat16"},
        "zarr 3 int8 per channel": {"version": 3, "dtype": "int8", "scales": "channel"},
        "zarr 3 int8 per token": {"version": 3, "dtype": "int8", "scales": "token"},
        "zarr 3 int8 per channel lossless": {"version": 3, "dtype": "int8", "scales": "channel", "pack": "lossless"},
    }
    takes_shard_bytes = False
    text_column: ClassVar[str | None] = "prompt"
    holds_named_layers = True
    splits = "examples"

    def __init__(self, spec: Spec) -> None:
        self.scaling = RowScaling.asked(spec.dtype, spec.options.get("scales"), spec.layers, spec.d_model)
        if self.scaling is not None:
            spec = replace(spec, dtype=NUMPY_BY_NAME["F32"])  # the rows' dtype; they become codes when they are written
        super().__init__(spec)
        self.t_max = positive(spec.options, "t_max", None)
        if spec.shard_bytes is not None and self.version == 2:
            raise ArgumentError(
                "shard_bytes: not supported by Zarr stores of version 2; use chunk_tokens=, or version=3 (--option version=3)"
            )
        if conflicts := sorted(set(OWN_ATTRIBUTES) & spec.metadata.keys()):
            raise ArgumentError(
                f"metadata: {conflicts[0]!r} is reserved in Zarr stores, because it describes the arrays; rename yours"
            )
        if self.t_max is not None and self.t_max > MOST_TOKENS:
            raise ArgumentError(f"t_max: expected at most {MOST_TOKENS:,} tokens, found {self.t_max:,}")
        layers, chunk = len(spec.layers), positive(spec.options, "chunk_tokens", None)
        pack = pack_of(spec.options)
        self.chunks: Chunks
        if pack is not None:
            if self.version == 2:
                raise ArgumentError("pack: requires shards; pass version=3 (--option version=3)")
            self.chunks = PackedChunks(layers, chunk, spec.shard_bytes, pack)
            self.copies = 2.0
        elif self.version == 3:
            self.chunks = ShardedChunks(layers, chunk, spec.shard_bytes)
        else:
            self.chunks = PlainChunks(layers, chunk)
        self.scale_chunks: PlainChunks | ShardedChunks | None = None
        """The chunks of scales, if each row has its own: those of its codes, in the same order."""
        if self.scaling is not None and self.scaling.is_own:
            self.scale_chunks = (
                PlainChunks(layers, chunk) if self.version == 2 else ShardedChunks(layers, chunk, spec.shard_bytes)
            )
        self.longest = 0
        self.created = created(spec, "%Y-%m-%dT%H:%M:%SZ")
        self._dirty: set[Path] = set()

    @property
    def version(self) -> int:
        """The version of Zarr."""
        return version_of(self.spec.options)

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        why = ": Zarr version 2 has no such type, version=3 has" if dtype.name == "bfloat16" else ""
        only(dtype, _DTYPES[self.version], "zarr", why)

    def config(self) -> dict[str, object]:
        scales = {} if self.scaling is None else self.scaling.config()
        return {**super().config(), "t_max": self.t_max, **self.chunks.config(), "created": self.created, **scales}

    @property
    def column_options(self) -> dict[str, object]:
        return {name: value for name, value in self.spec.options.items() if name != "scales"}

    def adopt(self, config: dict[str, Any]) -> None:
        super().adopt(config)
        self.chunks.adopt(config)
        self._share_chunks()
        self.created = config["created"]
        if self.scaling is not None and "scales" in config:
            self.scaling.adopt(config)

    def advice(self, examples: int) -> Remark | None:
        layers = len(self.spec.layers)
        if self.version == 3 or examples * layers <= MANY_FILES:
            return None
        return Remark(
            "many-files",
            f"{examples:,} examples of {many(layers, 'layer')} take {examples * layers:,} files or more. version=3 "
            "(--option version=3) stores the same chunks in few files",
        )

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
        keys = self.chunks.keys_are_arrays and KEY in table.column_names
        is_array = keys and place_key(table[KEY]) is not None
        check_utf8(table.drop_columns([KEY]) if is_array else table, first)

    def settle(self, block: Block) -> None:
        is_all = self.all_lengths is not None and self.chunks.needs_all_lengths
        lengths = self.all_lengths() if self.all_lengths is not None and is_all else block.lengths
        self.all_lengths = None  # chosen once
        self._choose(np.maximum(lengths[:, 0], 0), is_all=is_all)

    def _choose(self, tokens: NDArray[np.int64], *, is_all: bool) -> None:
        self.chunks.choose(tokens, self.stored_row_bytes, self.t_max, is_all=is_all)
        self._share_chunks()

    def _share_chunks(self) -> None:
        """Gives scales the chunks of their codes."""
        if self.scale_chunks is not None:
            self.scale_chunks.adopt(self.chunks.config())

    # -- scales ----------------------------------------------------------------------------------------------------

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a row in its chunk."""
        return self.row_bytes if self.scaling is None else self.spec.d_model

    @property
    def _arrays(self) -> list[tuple[Chunks, Path, int]]:
        """The chunks, the folder and the bytes of a row of each array of rows."""
        arrays: list[tuple[Chunks, Path, int]] = [(self.chunks, self.root / NODE, self.stored_row_bytes)]
        if self.scaling is not None and self.scale_chunks is not None:
            arrays.append((self.scale_chunks, self.root / SCALES, 4 * self.scaling.parts))
        return arrays

    @property
    def surveys(self) -> bool:
        return self.scaling is not None and self.scaling.is_open

    def survey(self, block: Block, first: int) -> None:
        assert self.scaling is not None
        if (refused := self.scaling.survey(block)) is not None:
            raise self.scaling.refusal(refused, first)

    def surveyed(self) -> None:
        assert self.scaling is not None
        self.scaling.surveyed("all rows")

    def encode(self, block: Block) -> Block:
        return block if self.scaling is None else replace(block, encoded=self.scaling.coded(block))

    def as_read(self, block: Block) -> NDArray[np.generic]:
        return block.memory if self.scaling is None else self.scaling.as_read(block)

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        if self.scaling is None:
            return super().further_losses(columns)
        loss: str | None = str(self.scaling.loss) if self.n else "convert() measures the error"
        if not self.n and (self.root / "meta" / "config.json").is_file():  # finished by an earlier call
            stored = Member(Location.at(self.root)).scaling
            loss = None if stored is None else stored.error
        form = f"rows are stored as int8 with a scale per {WORDS[self.scaling.kind]}"
        detail = form if loss is None else f"{form}: {loss}"
        return [*super().further_losses(columns), ("scales", detail)]

    # -- writing ---------------------------------------------------------------------------------------------------

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.longest = max(int(lengths.max(initial=0)), 0)
        for chunks, _, _ in self._arrays:
            chunks.begin(states, np.maximum(lengths[:, 0], 0))
            self._share_chunks()
        if self.scaling is not None:
            self.scaling.restore([state["loss"] for state in states])

    def forget(self, lengths: NDArray[np.int64]) -> None:
        for chunks, folder, row_bytes in self._arrays:
            chunks.forget(folder, lengths[:, 0], row_bytes)

    def write(self, block: Block) -> None:
        tokens = uniform(block.lengths, "zarr", self.spec.layers)
        most = self.most_tokens
        if most is not None and (tokens > most[0]).any():  # of a conversion: writers refuse or cut them before
            bad = int(np.flatnonzero(tokens > most[0])[0])
            raise ArgumentError(f"example {self.n + bad} has {tokens[bad]} tokens, {most[1]}")
        self._choose(tokens, is_all=False)  # tasks of a plan to create choose by their own examples
        rows = [block]
        if self.scaling is not None:
            rows = [replace(block, memory=part) for part in self.scaling.written(block, self.n)]
        for (chunks, folder, _), stored in zip(
            self._arrays, rows, strict=False
        ):  # scales of layers are written at the end
            make_folder(folder)
            memory, files, table = chunks.place(folder, self.n, tokens, stored)
            self.put([memory], files, table)
            self._dirty |= {path for path, _ in files}
        self.n += len(block)
        self.longest = max(self.longest, int(tokens.max(initial=0)))

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        loss = {} if self.scaling is None else {"loss": self.scaling.fresh.as_state()}
        return sorted(self._dirty), {**self.chunks.state(), **loss}

    def committed(self) -> None:
        self.chunks.committed()
        if self.scaling is not None:
            self.scaling.committed()
        self._dirty.clear()

    # -- finishing -------------------------------------------------------------------------------------------------

    def finish(self, examples: AllExamples) -> None:
        tokens = np.maximum(examples.lengths[:, 0], 0)
        t_max = self.t_max or max(self.longest, 1)
        self.forget(examples.lengths)
        self._choose(tokens, is_all=True)  # chosen before, unless no example has tokens
        for chunks, folder, row_bytes in self._arrays:
            chunks.close(folder, tokens, row_bytes, self.put)
        self._warn_of_padding(tokens)
        assert self.dtype is not None
        stored = self.dtype if self.scaling is None else np.dtype(np.int8)
        shape = (len(examples), len(self.spec.layers), t_max, self.spec.d_model)
        arrays: dict[str, dict[str, object]] = {NODE: self.chunks.meta(shape, tokens, stored)}
        if self.scaling is not None:
            self._scales(self.scaling, shape, tokens, arrays)
            clipped = self.scaling.loss.saturated
            if clipped > _CLIPPED * self.scaling.loss.values and self.scaling.source.startswith("the first"):
                warn(
                    f"{self.root}: {clipped:,} of {self.scaling.loss.values:,} values are beyond the scales, which are those of "
                    f"{self.scaling.source}, and were clipped. scales='token' needs none; convert() takes those of all rows",
                    OverflowWarning,
                )
        self._small(
            Placed("seq_len", (len(examples),), np.dtype(np.int32), lambda part: tokens[part].astype(np.int32)), arrays
        )
        if examples.columns is not None:
            small, texts = place(examples.columns, keys_are_arrays=self.chunks.keys_are_arrays)
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
            "dtype": str(stored),
            **({} if self.scaling is None else {SCALED: {"array": SCALES, **self.scaling.as_dict()}}),
            "activation_chunks": [1, 1, self.chunks.tokens, self.spec.d_model],
            "layers": list(self.spec.layers),
            "created_at": self.created,
            "written_by": f"{WRITER} {_native.build_info()['version']}",
            **self.spec.metadata,
        }
        write_store(self.root, self.version, arrays, attributes)

    def _warn_of_padding(self, tokens: NDArray[np.int64]) -> None:
        """Warns of chunks that are mostly padding: they take space, and time to write and copy."""
        chunks, _, row_bytes = self._arrays[0]
        rows = int(tokens.sum()) * len(self.spec.layers) * row_bytes
        _, size = chunks.estimate(tokens, row_bytes)
        if self.version == 2 and size >= _PADDED * rows and size - rows >= MUCH_PADDING:
            warn(
                f"{self.root}: {1 - rows / size:.0%} of the {size:,} stored bytes are padding, because chunks have "
                f"{chunks.tokens} tokens, and most examples have fewer. version=3 stores hardly any",
                code="padding",
            )

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        files, size, chosen = 0, 0, None
        for array, _, row_bytes in self._arrays:
            chunks = copy.copy(array)
            if chosen is None:
                chunks.choose(tokens, row_bytes, self.t_max, is_all=False)
            else:
                chunks.adopt(chosen)  # scales have the chunks of their codes
            chosen = chunks.config()
            of_array = chunks.estimate(tokens, row_bytes)
            files, size = files + of_array[0], size + of_array[1]
        if self.scaling is not None and not self.scaling.is_own:
            size += 4 * len(self.spec.layers) * self.scaling.parts
        small = 1 + max(1, -(-len(tokens) // _SMALL_CHUNK))  # seq_len: metadata and chunks
        of_scales = 0 if self.scaling is None else 1 if self.scaling.is_own else 2
        return files, files + small + (6 if self.version == 2 else 4) + of_scales, size

    # -- in tasks of a plan ----------------------------------------------------------------------------------------

    def borders(self, lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self.chunks.borders(len(lengths))

    def begin_at(self, first: int, state: Mapping[str, object]) -> None:
        super().begin_at(first, state)
        for chunks, _, _ in self._arrays:
            chunks.begin_at(first)

    def together(self, states: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        return list(states)

    def _scales(
        self,
        scaling: RowScaling,
        shape: tuple[int, ...],
        tokens: NDArray[np.int64],
        arrays: dict[str, dict[str, object]],
    ) -> None:
        """Writes the scales of layers, and metadata of the scales of rows."""
        single = np.dtype(np.float32)
        if self.scale_chunks is not None:
            arrays[SCALES] = self.scale_chunks.meta((*shape[:3], scaling.parts), tokens, single)
            return
        if scaling.values is None:  # no example has tokens
            scaling.values = np.full((shape[1], scaling.parts), 1e-12, np.float32)
        values = scaling.values[None, :, None]
        self._small(Placed(SCALES.removeprefix("arrays/"), values.shape, single, lambda part: values[part]), arrays)

    # -- small arrays ----------------------------------------------------------------------------------------------

    def _small(self, array: Placed, arrays: dict[str, dict[str, object]]) -> None:
        """Writes a per-sample array, in one chunk or a few."""
        node, shape = f"arrays/{array.name}", array.shape
        per = max(1, min(shape[0], _SMALL_CHUNK))
        chunks = (per, *(max(1, n) for n in shape[1:]))
        arrays[node] = array_meta(self.version, shape, chunks, array.dtype)
        make_folder(self.root / node)
        wrote: list[str | os.PathLike[str]] = []
        for i, first in enumerate(range(0, shape[0], per)):
            part = np.ascontiguousarray(array.values(slice(first, first + per)), array.dtype)
            name = ".".join([*(["c"] if self.version == 3 else []), str(i), *["0"] * (len(shape) - 1)])
            full = part.nbytes // max(1, len(part)) * per
            path = self.root / node / name
            refuse_other(path)
            record_files([path])
            self.put([part.reshape(-1).view(np.uint8)], [(path, full)], [(0, 0, part.nbytes, 0, 0)])
            wrote.append(path)
        _native.sync_files(wrote)
        sync_folders([self.root / node])


def version_of(options: Mapping[str, object]) -> int:
    """The version of Zarr in a format's options."""
    version = options.get("version", 2)
    if type(version) is not int or version not in _DTYPES:
        raise ArgumentError(f"version: expected 2 or 3, the version of Zarr, found {version!r}")
    return version


def write_store(
    root: Path, version: int, arrays: Mapping[str, Mapping[str, object]], attributes: Mapping[str, object]
) -> None:
    """Writes a store's metadata and consolidated metadata. The files by which a store is recognized are written last."""
    make_folder(root / "meta")
    if version == 3:
        group = {"attributes": {}, "node_type": "group", "zarr_format": 3}
        nodes: dict[str, Mapping[str, object]] = {"arrays": group, **arrays}
        for node, meta in nodes.items():
            make_folder(root / node)
            write_json(root / node / "zarr.json", meta)
        write_json(root / "meta" / "config.json", attributes)
        consolidated = {"kind": "inline", "metadata": nodes, "must_understand": False}
        write_json(root / "zarr.json", {**group, "attributes": attributes, "consolidated_metadata": consolidated})
        return
    group = {"zarr_format": 2}
    entries: dict[str, object] = {".zattrs": dict(attributes), ".zgroup": group, "arrays/.zgroup": group}
    for node, meta in arrays.items():
        make_folder(root / node)
        write_json(root / node / ".zarray", meta)
        entries[f"{node}/.zarray"] = meta
    write_json(root / "meta" / "config.json", attributes)
    write_json(root / "arrays" / ".zgroup", group)
    write_json(root / ".zmetadata", {"metadata": entries, "zarr_consolidated_format": 1})
    write_json(root / ".zattrs", attributes)
    write_json(root / ".zgroup", group)
