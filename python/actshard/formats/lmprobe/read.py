"""Reads lmprobe datasets, format 2.x: a parquet index of prompts and safetensors shards of activations.

.. code-block:: text

    index/train-00000-of-00001.parquet     one row per prompt: text, label, addresses; the schema metadata describe the tensors
    tensors/hidden_layer007_shard002.safetensors          a 2-D tensor "hidden.layer_7" (rows, dim)
    tensors/logits_topk_000.safetensors                   "logits_topk.values", "logits_topk.indices" (rows, k)
    tensors/router_logits_000.safetensors                 "router.layer_7" (rows, experts) for each router layer

``shard_index``/``row_offset`` are the address of the last token; ``token_shard_ids``/``token_shard_offsets`` those of all tokens.
File and tensor names follow the descriptors' patterns. Sources: the published format text, and files of lmprobe 0.10.3, which
differ from it: the dtype is that of the safetensors header, not of the descriptor; logits keys have a prefix; ``num_tokens`` may be
null; a shard without rows has no file; router tensors are not in the text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Addresses, Rows
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._json import Fields, show
from actshard.base.codes import Remark
from actshard.base.errors import (
    FormatError,
    MissingFileError,
    TruncatedFileError,
    UnsupportedError,
)
from actshard.base.location import Location
from actshard.formats.contents import NOTHING_ABSENT, Absence, Contents, Evidence, Logits, Options, Router, leave_out
from actshard.formats.lmprobe.index import PREFIX, TOKEN_LISTS, UNLISTED, Index, find_parts

# Names in lmprobe's code, then names in the format text.
LOGITS_KEYS = (("logits_topk.values", "logits_topk.indices"), ("topk_values", "topk_indices"))
ROUTER_KEY = "router.layer_{layer}"
_FILES_AT_MOST = 1 << 20


def detect(path: Location) -> Evidence:
    """Checks for a folder with index/*.parquet whose schema has lmprobe's keys, or for such a file."""
    looked_for = 'a folder with index/*.parquet that has "lmprobe:" schema metadata'
    if path.kind() == "file" and not path.name.endswith(".parquet"):
        return Evidence(False, looked_for, "a file")
    parts = find_parts(path)[1] if path.lists or path.kind() == "file" else []
    if not parts:
        return Evidence(
            False, looked_for, "no index/*.parquet" if path.lists else f"that {UNLISTED}", near=not path.lists
        )
    import pyarrow.parquet as pq

    try:
        with parts[0].arrow() as file:
            keys = pq.read_schema(file).metadata or {}
    except Exception:  # pyarrow raises many types; open() reports the error
        return Evidence(True, looked_for, f"{parts[0].name}, which is not readable as parquet")
    if not any(key.startswith(PREFIX) for key in keys):
        older = (path / "lmprobe_info.json").exists()
        text = f"{parts[0].name} without lmprobe keys" + (" next to lmprobe_info.json" if older else "")
        return Evidence(older, looked_for, text, near=True)
    return Evidence(True, looked_for, f"{parts[0].name} with lmprobe keys")


def open(path: Location, options: Options) -> Contents:
    """Reads the index's schema metadata and address columns, and one safetensors header."""
    return Extraction(path, options.io, skips_incomplete=options.skip_incomplete).contents()


class Extraction(Index):
    """An lmprobe dataset: opens it, then reads columns and tensors on demand."""

    def __init__(self, path: Location, io: str, *, skips_incomplete: bool = False) -> None:
        super().__init__(path)
        self.io = io
        self.skips_incomplete = skips_incomplete
        self.absence = NOTHING_ABSENT

    def _descriptors(self, kind: str, usual: str) -> Fields | None:
        where = self.parts[0]
        tensors = Fields(self.metadata.get("tensors"), where, "tensors").value
        names = [
            name
            for name, value in tensors.items()
            if isinstance(value, dict) and (value.get("type") == kind or ("type" not in value and name == usual))
        ]
        if len(names) > 1:
            raise UnsupportedError(f"field 'tensors': more than one of type '{kind}': {names}", path=where)
        return Fields(tensors[names[0]], where, f"tensors.{names[0]}") if names else None

    def contents(self) -> Contents:
        """The dataset's contents, for a store."""
        tensors = Fields(self.metadata.get("tensors"), self.parts[0], "tensors").value
        known_columns = [
            d.where.removeprefix("tensors.")
            for d in (self.hidden, self.logits_fields, self.router_fields)
            if d is not None
        ]
        for name in tensors:
            if name not in known_columns:
                kind = tensors[name].get("type") if isinstance(tensors[name], dict) else None
                self.warnings.append(
                    Remark(
                        "layout",
                        f"tensor type {show(name)} ({show(kind)}) is not supported; its descriptor is kept in metadata",
                    )
                )
        if self.hidden is not None:
            rows, layers, d_model, dtype = self._open_hidden(self.hidden)
            token_counts = rows.token_counts
        else:
            rows, layers, d_model = None, (), 0
            token_counts = self._no_tokens
            logits = self.logits()
            dtype = self._logits_dtype if logits is not None else np.dtype(np.float32)
        model = self.metadata.get("model")
        provenance = dict(self.metadata["provenance"]) if isinstance(self.metadata.get("provenance"), dict) else {}
        if isinstance(model, dict):
            provenance["revision"] = model.get("revision")
            model = model.get("name")
        return Contents(
            format="lmprobe",
            path=self.path.place,
            metadata=self.metadata,
            layers=layers,
            d_model=d_model,
            dtype=dtype,
            num_examples=self.num_rows,
            token_counts=token_counts,
            rows=rows,
            column_names=tuple(name for name in self.names if name not in TOKEN_LISTS),
            columns=self.columns,
            head_columns=self.head,
            column_batches=self.column_batches,
            files=lambda: [file.place for file in self.files()],
            absence=self.absence,
            columns_in=lambda: [part.place for part in self.parts],
            model=model if isinstance(model, str) else None,
            provenance=provenance,
            extras=self._extras(),
            warnings=tuple(self.warnings),
            has_logits=self.logits_fields is not None,
            router_layers=self._router_layers(),
            logits=self.logits,
            router=self.router,
            one_row_each=None if self.hidden is None else self.hidden.value.get("storage", "pooled") == "pooled",
        )

    def _no_tokens(self) -> NDArray[np.int64]:
        return np.zeros(self.num_rows, np.int64)

    def _router_layers(self) -> tuple[int, ...]:
        """Router layers as written. Errors are raised when the router is read."""
        layers = None if self.router_fields is None else self.router_fields.value.get("layers")
        return tuple(x for x in layers if type(x) is int) if isinstance(layers, list) else ()

    def _extras(self) -> tuple[str, ...]:
        extras = []
        if self.logits_fields is not None:
            extras.append(f"top-{self.logits_fields.value.get('k', 'k')} logits")
        if self.router_fields is not None:
            # As written; errors are raised when the router is read, and do not affect other data.
            extras.append(f"router logits of layers {show(self.router_fields.value.get('layers'))}")
        return tuple(extras)

    @cached_property
    def hidden(self) -> Fields | None:
        """The descriptor of hidden states; None if there is none."""
        return self._descriptors("hidden", "hidden_layers")

    @cached_property
    def logits_fields(self) -> Fields | None:
        """The descriptor of logits; None if there is none."""
        return self._descriptors("logits_topk", "logits_topk")

    @cached_property
    def router_fields(self) -> Fields | None:
        """The descriptor of router tensors; None if there is none."""
        return self._descriptors("router", "router_logits")

    def _open_hidden(self, fields: Fields) -> tuple[Rows, tuple[int, ...], int, np.dtype[np.generic]]:
        layers = fields.integers("layers")
        storage = fields.text("storage") if fields.has("storage") else "pooled"
        if storage not in ("pooled", "full_sequence"):
            raise UnsupportedError(
                f"field '{fields.where}.storage': {show(storage)} is not supported", path=fields.path
            )
        full = storage == "full_sequence"
        if full and any(name not in self.names for name in TOKEN_LISTS):
            raise UnsupportedError(
                "full_sequence without token_shard_ids is format 1.x upgraded in place, where shard_index is not the last token's; "
                "convert it with lmprobe.migrate_dataset",
                path=fields.path,
            )
        pooling = fields.value.get("pooling")
        if not full and pooling not in (None, "last_token"):
            self.warnings.append(Remark("pooling", f"pooling is {show(pooling)}: rows are not those of last tokens"))
        if fields.value.get("layout", "per_layer") != "per_layer":
            self.warnings.append(
                Remark("layout", f"unknown layout {show(fields.value['layout'])}; files are found by their patterns")
            )

        shards = self._shard_count(fields)
        if len(layers) * shards > _FILES_AT_MOST:
            raise FormatError(
                f"field '{fields.where}': {len(layers)} layers x {shards} shards exceed {_FILES_AT_MOST} files",
                path=fields.path,
                code="metadata",
            )
        name_file = self.pattern(fields, "file_pattern", layers, shards)
        name_key = self.pattern(fields, "key_pattern", layers, 1)
        if len({(name_file(la, 0), name_key(la, 0)) for la in layers}) != len(layers):
            raise FormatError(
                f"field '{fields.where}': expected a pattern that distinguishes layers {list(layers)}",
                path=fields.path,
                code="metadata",
            )
        files = [(self.inside(fields, name_file(la, s)), name_key(la, s)) for la in layers for s in range(shards)]
        are_whole = [is_whole(path) for path, _ in files] if self.skips_incomplete else []
        known = [file for file, whole in zip(files, are_whole, strict=True) if whole] if any(are_whole) else files
        name, d_model = self._first_header(known, fields, "dim")
        dtype = self._numpy(name, fields)
        addresses = self.addresses(shards, "shard_index", "row_offset", lists=full)
        rows = Rows.table(
            list(files), addresses, num_groups=len(layers), width=d_model, dtype=name, descr=dtype, io=self.io
        )
        if not all(are_whole):
            lacking = np.array(~np.array(are_whole).reshape(len(layers), shards).all(axis=0), np.bool_)
            absent = self._examples_in(lacking, "token_shard_ids" if full else "shard_index")
            broken = tuple(path.place for (path, _), whole in zip(files, are_whole, strict=True) if not whole)
            self.absence = Absence(absent, broken)
            rows = leave_out(rows, absent, len(layers), self.path)
        return rows, layers, d_model, dtype

    def _examples_in(self, shards: NDArray[np.bool_], column: str) -> NDArray[np.bool_]:
        """Flags of examples with a token in one of these shards. ``column`` has the shard, or those of all tokens."""
        flags = []
        for chunk in self.columns([column])[column].chunks:
            is_list = chunk.type.num_fields > 0
            values = chunk.flatten() if is_list else chunk
            numbers = values.to_numpy(zero_copy_only=False).astype(np.int64)
            in_shards = shards[np.clip(numbers, 0, len(shards) - 1)]
            if is_list:
                before = np.concatenate([[0], np.cumsum(in_shards)])
                ends = np.cumsum(chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
                in_shards = np.diff(before[np.concatenate([[0], ends])]) > 0
            flags.append(in_shards)
        return np.concatenate([np.zeros(0, np.bool_), *flags])

    def logits(self) -> Logits | None:
        """Top-k values and indices; None if not stored."""
        fields = self.logits_fields
        if fields is None:
            return None
        shards = self._shard_count(fields)
        paths = self.files_of(fields, shards)
        first_path, keys = self.logits_keys(paths)
        columns = self.logits_columns
        logit_rows, widths = [], []
        for key in keys:
            files = [(path, key) for path in paths]
            name, k = self._first_header(files, fields, "k")
            widths.append(k)
            dtype = self._numpy(name, fields)
            addresses = self.addresses(shards, *columns, lists=False)
            logit_rows.append(
                Rows.table(list(files), addresses, num_groups=1, width=k, dtype=name, descr=dtype, io=self.io)
            )
            if key == keys[0]:
                self._logits_dtype = dtype
        if widths[0] != widths[1]:
            raise FormatError(
                f"expected as many indices as values per row, found {widths[1]} indices and {widths[0]} values",
                path=first_path,
            )
        return Logits(*logit_rows)

    @property
    def logits_columns(self) -> tuple[str, str]:
        """The address columns of logits. Without hidden states, the general columns may have this role."""
        columns = ("shard_index_logits", "row_offset_logits")
        return columns if columns[0] in self.names or self.hidden is not None else ("shard_index", "row_offset")

    def logits_keys(self, paths: list[Location]) -> tuple[Location, tuple[str, str]]:
        """The first existing file, and the names of its tensors."""
        path, present = _first_existing(paths)
        for pair in LOGITS_KEYS:
            if present.keys() >= set(pair):
                return path, pair
        raise FormatError(
            f"expected tensors {LOGITS_KEYS[0]} or {LOGITS_KEYS[1]}, found {sorted(present)[:8]}", path=path
        )

    def router(self) -> Router | None:
        """Router logits; None if not stored. Rows are in index order over their own shards, without address columns."""
        fields = self.router_fields
        if fields is None:
            return None
        layers = fields.integers("layers")
        counts = [shard.integer("num_prompts", minimum=0) for shard in fields.items("shards")]
        if sum(counts) != self.num_rows:
            raise FormatError(
                f"field '{fields.where}.shards': expected {self.num_rows} prompts in total, found {sum(counts)}",
                path=fields.path,
                code="metadata",
            )
        paths = self.files_of(fields, len(counts))
        key = self.pattern(fields, "key_pattern", layers, 1, default=ROUTER_KEY)
        files = [(path, key(layer, s)) for layer in layers for s, path in enumerate(paths)]
        name, experts = self._first_header(files, fields, "num_experts")
        addresses = Addresses(len(counts))
        shard = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        addresses.push(
            shard, np.arange(self.num_rows, dtype=np.int64) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        )
        dtype = self._numpy(name, fields)
        rows = Rows.table(
            list(files), addresses, num_groups=len(layers), width=experts, dtype=name, descr=dtype, io=self.io
        )
        return Router(layers, rows)

    def files(self) -> list[Location]:
        """All tensor files listed by descriptors. Shards without rows have none."""
        paths: dict[Location, None] = {}
        if (hidden := self.hidden) is not None:
            shards = hidden.items("shards")
            used = [i for i, shard in enumerate(shards) if shard.value.get("num_tokens", 1) != 0]
            layers = hidden.integers("layers")
            name = self.pattern(hidden, "file_pattern", layers, len(shards))
            paths.update({self.inside(hidden, name(layer, s)): None for layer in layers for s in used})
        for fields in (self.logits_fields, self.router_fields):
            if fields is not None:
                paths.update(dict.fromkeys(self.files_of(fields, self._shard_count(fields))))
        return list(paths)

    # -- patterns and headers --------------------------------------------------------------------------------------

    def _shard_count(self, fields: Fields) -> int:
        shards = fields.items("shards")
        if not 0 < len(shards) <= _FILES_AT_MOST:
            raise fields.error("shards", f"1 to {_FILES_AT_MOST} shards")
        return len(shards)

    def files_of(self, fields: Fields, shards: int) -> list[Location]:
        """Files of a tensor type that stores all layers in one file per shard."""
        if fields.has("file_pattern"):
            name = self.pattern(fields, "file_pattern", (0,), shards)
            return [self.inside(fields, name(0, s)) for s in range(shards)]
        return [self.inside(fields, shard.text("file")) for shard in fields.items("shards")]

    def pattern(
        self, fields: Fields, name: str, layers: Sequence[int], shards: int, default: str | None = None
    ) -> Callable[[int, int], str]:
        """Returns a ``file_pattern`` or ``key_pattern`` as a function of layer and shard.

        Patterns are Python format strings from an untrusted file. Only ``{layer}`` and ``{shard}`` with padding are accepted,
        because ``str.format`` would also access attributes and allow a width of a billion.
        """
        pattern = default if default is not None and not fields.has(name) else fields.text(name)
        expected = f"a pattern of {{layer}} and {{shard}} such as {{shard:03d}}, found {show(pattern)}"
        try:
            parsed = list(string.Formatter().parse(pattern))
        except ValueError as error:
            raise FormatError(
                f"field '{fields.where}.{name}': expected {expected}", path=fields.path, code="metadata"
            ) from error
        for _, key, spec, conversion in parsed:
            if key is not None and (
                key not in ("layer", "shard") or conversion or not re.fullmatch(r"(0?\d{1,2})?d?", spec or "")
            ):
                raise FormatError(
                    f"field '{fields.where}.{name}': expected {expected}", path=fields.path, code="metadata"
                )
        if shards > 1 and not any(key == "shard" for _, key, _, _ in parsed):
            raise FormatError(
                f"field '{fields.where}.{name}': names one file for {shards} shards",
                path=fields.path,
                code="metadata",
            )

        def apply(layer: int, shard: int) -> str:
            values = {"layer": layer, "shard": shard}
            return "".join(text + (format(values[key], spec or "") if key else "") for text, key, spec, _ in parsed)

        return apply

    def inside(self, fields: Fields, name: str) -> Location:
        """Path of a file named in the metadata. Raises FormatError if it is outside the dataset."""
        if not name or min(name) < " " or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            raise FormatError(
                f"field '{fields.where}': expected a file inside the dataset, found {show(name)}",
                path=fields.path,
                code="metadata",
            )
        return self.root / name

    def _first_header(self, files: Sequence[tuple[Location, str]], fields: Fields, width_field: str) -> tuple[str, int]:
        """Dtype and row width from the first existing file. Files may be missing in partial downloads."""
        path, tensors = _first_existing([path for path, _ in files])
        key = next(key for file, key in files if file == path)
        dtype, shape = tensor_of(path, tensors, key, width_field)
        # With positions="all", a logits row is longer than k; the header is correct.
        if width_field == "dim" and fields.has("dim") and shape[1] != fields.integer("dim"):
            text = f"tensor '{key}' has shape {shape}, expected (rows, {fields.integer('dim')})"
            raise FormatError(text, path=path, code="tensor")
        return dtype, shape[1]

    def _numpy(self, name: str, fields: Fields) -> np.dtype[np.generic]:
        dtype = NUMPY_BY_NAME.get(name)
        if dtype is None:
            raise UnsupportedError(f"field '{fields.where}': dtype {name} has no numpy equivalent", path=fields.path)
        return dtype


def tensor_of(
    path: Location, tensors: Mapping[str, tuple[str, list[int]]], key: str, width: str
) -> tuple[str, list[int]]:
    """Dtype and shape of a 2-D tensor.

    Raises:
        FormatError: the file has no such tensor, or it has no rows and columns.
    """
    if key not in tensors:
        raise FormatError(f"expected a tensor named '{key}', found {sorted(tensors)[:8]}", path=path, code="tensor")
    dtype, shape = tensors[key]
    if len(shape) != 2 or shape[1] == 0:
        raise FormatError(f"tensor '{key}' has shape {shape}, expected (rows, {width})", path=path, code="tensor")
    return dtype, shape


def tensors_in(path: Location) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor of a file."""
    return {name: (dtype, shape) for name, dtype, shape, _, _ in _native.safetensors_header(path)[0]}


def is_whole(path: Location) -> bool:
    """Whether a file exists and has the length that its header declares."""
    try:
        tensors_in(path)
    except (FormatError, TruncatedFileError, FileNotFoundError):
        return False
    return True


def _first_existing(paths: Sequence[Location]) -> tuple[Location, dict[str, tuple[str, list[int]]]]:
    """The first existing file, with dtype and shape of each of its tensors."""
    for path in paths:
        try:
            return path, tensors_in(path)
        except MissingFileError:
            continue
    rest = f" (nor any other of {len(paths)} tensor files)" if len(paths) > 1 else ""
    raise MissingFileError(f"expected a file, found nothing{rest}", path=paths[0])
