"""lmprobe datasets, format 2.x: a parquet index of prompts and safetensors shards of activations.

.. code-block:: text

    index/train-00000-of-00001.parquet     one row per prompt: text, label, addresses; the schema metadata describe the rest
    tensors/hidden_layer007_shard002.safetensors          a 2-D tensor "hidden.layer_7" (rows, dim)
    tensors/logits_topk_000.safetensors                   "logits_topk.values", "logits_topk.indices" (rows, k)
    tensors/router_logits_000.safetensors                 "router.layer_7" (rows, experts) for each router layer

``shard_index``/``row_offset`` are the last token's row; ``token_shard_ids``/``token_shard_offsets`` every token's. File and
tensor names come from the descriptors' patterns. Sources: the published format text, and what lmprobe 0.10.3 writes, which
differs: the element type is the safetensors header's whatever the descriptor says, logits keys have a prefix, ``num_tokens`` may be
null, a shard without rows has no file, and router tensors are not in the text at all.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._arguments import NUMPY_BY_NAME
from actshard._json import Fields, parse_json, show
from actshard._native import Addresses, Rows
from actshard.codes import Remark
from actshard.errors import (
    ActshardError,
    FormatError,
    MissingFileError,
    NotStoredError,
    UnsupportedError,
    from_reader,
)
from actshard.formats.contents import Contents, Evidence, Logits, Options, Router
from actshard.location import Location

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = b"lmprobe:"
LAST_KNOWN = (2, 0)
TOKEN_LISTS = ("token_shard_ids", "token_shard_offsets")
# The code's names first, the text's second.
LOGITS_KEYS = (("logits_topk.values", "logits_topk.indices"), ("topk_values", "topk_indices"))
ROUTER_KEY = "router.layer_{layer}"
_PART = re.compile(r"(?P<split>.+)-(?P<index>\d{5})-of-(?P<total>\d{5})\.parquet")
_BATCH_ROWS = 16_384
_FILES_AT_MOST = 1 << 20
_EXPANDED, _EXPANSION = 256 << 20, 64
"""A column's texts are plain up to so many bytes, and so many for each byte of the index; beyond, they stay a dictionary."""


def detect(path: Location) -> Evidence:
    """A folder with index/*.parquet whose schema has lmprobe's keys, or such a file."""
    looked_for = 'a folder with index/*.parquet that has "lmprobe:" schema metadata'
    if path.kind() == "file" and not path.name.endswith(".parquet"):
        return Evidence(False, looked_for, "a file")
    _, parts = _find_parts(path)
    if not parts:
        return Evidence(False, looked_for, "no index/*.parquet")
    import pyarrow.parquet as pq

    try:
        with parts[0].arrow() as file:
            keys = pq.read_schema(file).metadata or {}
    except Exception:  # pyarrow raises many kinds; open() says what is wrong with it
        return Evidence(True, looked_for, f"{parts[0].name}, which cannot be read as parquet")
    if not any(key.startswith(PREFIX) for key in keys):
        older = (path / "lmprobe_info.json").exists()
        return Evidence(
            older, looked_for, f"{parts[0].name} without lmprobe keys" + (" beside lmprobe_info.json" if older else "")
        )
    return Evidence(True, looked_for, f"{parts[0].name} with lmprobe keys")


def open(path: Location, options: Options) -> Contents:
    """Reads the index's schema metadata and addressing columns, and one safetensors header."""
    return Extraction(path, options.io).contents()


def _find_parts(path: Location) -> tuple[Location, list[Location]]:
    """The folder that patterns are relative to, and the index files in name order."""
    if path.kind() == "file":
        root = path.parent.parent if path.parent.name == "index" else path.parent
        numbered = _PART.fullmatch(path.name)
        if numbered is None:
            return root, [path]
        # One part stands for all of them.
        return root, [
            path.parent / entry.name
            for entry in path.parent.entries()
            if entry.name.startswith(f"{numbered['split']}-")
            if entry.name[len(numbered["split"]) + 1 :].endswith(f"-of-{numbered['total']}.parquet")
        ]
    index = path / "index"
    if index.kind() != "folder":
        return path, []
    return path, [index / entry.name for entry in index.entries("*.parquet")]


class Extraction:
    """One dataset while it is opened; afterwards it serves the columns and tensors that are asked for later."""

    def __init__(self, path: Location, io: str) -> None:
        self.path = path
        self.io = io
        self.root, found = _find_parts(path)
        self.parts = _ordered_parts(found, self.root)
        self.warnings: list[Remark] = []
        self.metadata = self._read_metadata()
        self._check_version()
        self.names: tuple[str, ...] = tuple(self.schema.names)
        self.num_rows = sum(self._file(part).metadata.num_rows for part in self.parts)
        if self.num_rows == 0:
            raise FormatError("the index has no rows", path=self.parts[0])
        claimed = self.metadata.get("num_prompts")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            self.warnings.append(
                Remark("format", f"column '{twice[0]}' is there twice: the table cannot be read, activations can")
            )
        if claimed is not None and claimed != self.num_rows:
            self.warnings.append(
                Remark("claim", f"num_prompts is {show(claimed)}, but the index has {self.num_rows} rows")
            )

    # -- the index -------------------------------------------------------------------------------------------------

    def _file(self, part: Location, coded: Sequence[str] = ()) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = part.arrow()
        try:
            return pq.ParquetFile(file, read_dictionary=list(coded))
        except (pa.ArrowException, OSError, ValueError) as error:
            file.close()
            if isinstance(error, ActshardError):
                raise
            raise from_reader(error, part, "read", f"expected a parquet file: {_one_line(error)}") from error

    @cached_property
    def schema(self) -> pa.Schema:
        """The index's, with its metadata."""
        return self._file(self.parts[0]).schema_arrow

    def _read_metadata(self) -> dict[str, Any]:
        first: dict[str, Any] | None = None
        for part in self.parts:
            schema = self._file(part).schema_arrow
            found = {}
            for key, value in (schema.metadata or {}).items():
                if key.startswith(PREFIX):
                    found[key[len(PREFIX) :].decode("utf-8", "replace")] = _json_or_text(value, part)
            if not found:
                raise UnsupportedError(
                    'expected "lmprobe:" schema metadata, found none: format 1.x is not read; '
                    "lmprobe.upgrade_dataset_format converts it",
                    path=part,
                )
            if first is None:
                first = found
            elif found.get("tensors") != first.get("tensors") or schema.names != self.schema.names:
                raise FormatError(f"describes other tensors or columns than {self.parts[0].name}", path=part)
        assert first is not None
        return first

    def _check_version(self) -> None:
        part = self.parts[0]
        stated = self.metadata.get("format_version", "1.0")
        numbers = re.fullmatch(r"(\d{1,6})(?:\.(\d{1,6}))?", str(stated))
        if numbers is None:
            raise FormatError(
                f"field 'format_version': expected a version such as \"2.0\", found {show(stated)}",
                path=part,
                code="metadata",
            )
        version = (int(numbers[1]), int(numbers[2] or 0))
        if version[0] > LAST_KNOWN[0]:
            raise UnsupportedError(
                f"format version {stated} is newer than actshard reads (2.x); upgrade actshard", path=part
            )
        if version[0] < LAST_KNOWN[0]:
            raise UnsupportedError(
                f"format version {stated} is not read, 2.x is; lmprobe.upgrade_dataset_format converts it", path=part
            )
        if version > LAST_KNOWN:
            self.warnings.append(
                Remark(
                    "version", f"format version {stated} is newer than actshard knows (2.0); it should only add fields"
                )
            )

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Reads columns by name, all parts one after another."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise NotStoredError(
                f"holds no column {unknown[0]!r}; the columns are {', '.join(self.names)}", path=self.path
            )
        self._refuse_twice(names)
        tables = []
        for part in self.parts:
            try:
                # A value that repeats is stored once: 12 kB of parquet can hold 5 GB of texts. It is read once, too.
                texts = [n for n in names if _is_text(self.schema.field(n).type)]
                with part.arrow() as file:
                    table = pq.read_table(file, columns=list(names), partitioning=None, read_dictionary=texts)
                for column in table.columns:
                    if _holds_codes(column.type):  # also one that the file declares to be, such as pandas' categories
                        column.validate(full=True)
                tables.append(_plain_texts(table, texts, _EXPANDED + _EXPANSION * part.stat().size))
            except (pa.ArrowException, OSError, ValueError) as error:
                if isinstance(error, ActshardError):
                    raise
                said = f"cannot read columns {list(names)}: {_one_line(error)}"
                raise from_reader(error, part, "read", said) from error
        kinds = [{n: t.schema.field(n).type for n in names} for t in tables]
        mixed = [
            n for n in names if any(k[n] != kinds[0][n] for k in kinds) and any(map(_is_coded, (k[n] for k in kinds)))
        ]
        if mixed:  # one part's texts were left as a dictionary
            tables = [_coded(t, mixed) for t in tables]
        try:
            whole = pa.concat_tables(tables, promote_options="default")
        except pa.ArrowException as error:
            raise FormatError(f"the index's parts do not fit together: {_one_line(error)}", path=self.path) from error
        return whole.select(list(names)).replace_schema_metadata(None)

    def _refuse_twice(self, names: Sequence[str]) -> None:
        twice = [name for name in names if self.names.count(name) > 1]
        if twice:
            raise FormatError(f"column '{twice[0]}' is there twice", path=self.parts[0])

    def head(self, names: Sequence[str], n: int) -> pa.Table:
        """Columns of the first n rows; no more of the index is decoded than the batches that hold them."""
        import pyarrow as pa

        tables, left = [], n
        for table in self.column_batches(names, min(max(n, 1), _BATCH_ROWS)):
            tables.append(table.slice(0, left))
            left -= len(tables[-1])
            if left <= 0:
                break
        return pa.concat_tables(tables, promote_options="default")

    def column_batches(self, names: Sequence[str], rows: int = _BATCH_ROWS) -> Iterator[pa.Table]:
        """Columns of all rows in order, some rows at a time. Texts that would expand too far stay dictionaries."""
        import pyarrow as pa

        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise NotStoredError(
                f"holds no column {unknown[0]!r}; the columns are {', '.join(self.names)}", path=self.path
            )
        self._refuse_twice(names)
        texts = [n for n in names if _is_text(self.schema.field(n).type)]
        for part, _, batch in self.batches(names, rows, texts):
            table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
            if table.num_columns:
                yield _plain_texts(table.select(list(names)), texts, _EXPANDED + _EXPANSION * part.stat().size)

    def batches(
        self, names: Sequence[str], rows: int = _BATCH_ROWS, coded: Sequence[str] = ()
    ) -> Iterator[tuple[Location, int, pa.RecordBatch]]:
        """Columns batch by batch, with the part and the first row's number in it; texts named in ``coded`` as dictionaries."""
        import pyarrow as pa

        for part in self.parts:
            row = 0
            try:
                for batch in self._file(part, coded).iter_batches(batch_size=rows, columns=list(names)):
                    for column in batch.columns:
                        if _holds_codes(
                            column.type
                        ):  # pyarrow does not hold the codes of a file against its dictionary
                            column.validate(full=True)
                    yield part, row, batch
                    row += batch.num_rows
            except (pa.ArrowException, OSError, ValueError) as error:
                if isinstance(error, ActshardError):
                    raise
                said = f"cannot read columns {list(names)}: {_one_line(error)}"
                raise from_reader(error, part, "read", said) from error

    def _addresses(self, shards: int, shard_column: str, row_column: str, *, lists: bool) -> Addresses:
        """Folds the addressing columns into the core's table, batch by batch: nothing per token is kept."""
        import pyarrow as pa

        names = [shard_column, row_column, *(TOKEN_LISTS if lists else ())]
        missing = [name for name in names if name not in self.names]
        if missing:
            raise FormatError(f"expected a column '{missing[0]}', found {list(self.names)}", path=self.parts[0])
        self._refuse_twice(names)
        addresses = Addresses(shards)
        done = 0
        for part, row, batch in self.batches(names):
            flat = [int64_of(batch.column(name), name, part, row) for name in names[:2]]
            try:
                addresses.push_last(*flat)
                if lists:
                    addresses.push_tokens(
                        *(a for name in TOKEN_LISTS for a in lists_of(batch.column(name), name, part, row))
                    )
            except FormatError as error:
                if error.path is None:
                    columns = f"{shard_column}/{row_column}" + ("/" + "/".join(TOKEN_LISTS) if lists else "")
                    raise FormatError(f"columns {columns}: {error.detail}", path=part) from error
                raise
            done += batch.num_rows
        if done != self.num_rows:
            raise FormatError(f"expected {self.num_rows} rows, read {done}", path=self.parts[0])
        if lists:
            # The lists went through arrow's allocator, which would keep what it may need again.
            pa.default_memory_pool().release_unused()
        return addresses

    # -- the tensors -----------------------------------------------------------------------------------------------

    def _descriptors(self, kind: str, usual: str) -> Fields | None:
        where = self.parts[0]
        tensors = Fields(self.metadata.get("tensors"), where, "tensors").value
        found = [
            name
            for name, value in tensors.items()
            if isinstance(value, dict) and (value.get("type") == kind or ("type" not in value and name == usual))
        ]
        if len(found) > 1:
            raise UnsupportedError(f"field 'tensors': more than one of type '{kind}': {found}", path=where)
        return Fields(tensors[found[0]], where, f"tensors.{found[0]}") if found else None

    def contents(self) -> Contents:
        """Everything a store needs."""
        tensors = Fields(self.metadata.get("tensors"), self.parts[0], "tensors").value
        known = [
            d.where.removeprefix("tensors.")
            for d in (self.hidden, self.logits_fields, self.router_fields)
            if d is not None
        ]
        for name in tensors:
            if name not in known:
                kind = tensors[name].get("type") if isinstance(tensors[name], dict) else None
                self.warnings.append(
                    Remark(
                        "layout",
                        f"tensor type {show(name)} ({show(kind)}) is not one actshard reads; it is kept in metadata",
                    )
                )
        if self.hidden is not None:
            rows, layers, d_model, dtype, counts = self._open_hidden(self.hidden)
        else:
            rows, layers, d_model = None, (), 0
            counts = np.zeros(self.num_rows, np.int64)
            logits = self.logits()
            dtype = self._logits_dtype if logits is not None else np.dtype(np.float32)
        counts.flags.writeable = False
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
            num_examples=len(counts),
            token_counts=lambda: counts,
            rows=rows,
            column_names=tuple(name for name in self.names if name not in TOKEN_LISTS),
            columns=self.columns,
            head_columns=self.head,
            column_batches=self.column_batches,
            files=lambda: [file.place for file in self.files()],
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

    def _router_layers(self) -> tuple[int, ...]:
        """As written; what is wrong with them is told when they are asked for."""
        layers = None if self.router_fields is None else self.router_fields.value.get("layers")
        return tuple(x for x in layers if type(x) is int) if isinstance(layers, list) else ()

    def _extras(self) -> tuple[str, ...]:
        found = []
        if self.logits_fields is not None:
            found.append(f"top-{self.logits_fields.value.get('k', 'k')} logits")
        if self.router_fields is not None:
            # As written: what is wrong with them is told when they are asked for, and keeps nothing else from being read.
            found.append(f"router logits of layers {show(self.router_fields.value.get('layers'))}")
        return tuple(found)

    @cached_property
    def hidden(self) -> Fields | None:
        """The descriptor of hidden states."""
        return self._descriptors("hidden", "hidden_layers")

    @cached_property
    def logits_fields(self) -> Fields | None:
        """The descriptor of logits."""
        return self._descriptors("logits_topk", "logits_topk")

    @cached_property
    def router_fields(self) -> Fields | None:
        """The descriptor of router tensors."""
        return self._descriptors("router", "router_logits")

    def _open_hidden(self, fields: Fields) -> tuple[Rows, tuple[int, ...], int, np.dtype[Any], NDArray[np.int64]]:
        layers = fields.integers("layers")
        storage = fields.text("storage") if fields.has("storage") else "pooled"
        if storage not in ("pooled", "full_sequence"):
            raise UnsupportedError(f"field '{fields.where}.storage': {show(storage)} is not read", path=fields.path)
        full = storage == "full_sequence"
        if full and any(name not in self.names for name in TOKEN_LISTS):
            raise UnsupportedError(
                "full_sequence without token_shard_ids is format 1.x upgraded in place: its shard_index is not the last token's; "
                "lmprobe.migrate_dataset converts it",
                path=fields.path,
            )
        pooling = fields.value.get("pooling")
        if not full and pooling not in (None, "last_token"):
            self.warnings.append(
                Remark("pooling", f"pooling is {show(pooling)}: the one vector per prompt is not the last token's")
            )
        if fields.value.get("layout", "per_layer") != "per_layer":
            self.warnings.append(
                Remark("layout", f"layout {show(fields.value['layout'])} is unknown; files are found by their patterns")
            )

        shards = self._shard_count(fields)
        if len(layers) * shards > _FILES_AT_MOST:
            raise FormatError(
                f"field '{fields.where}': {len(layers)} layers x {shards} shards are more than {_FILES_AT_MOST} files",
                path=fields.path,
                code="metadata",
            )
        name_file = self.pattern(fields, "file_pattern", layers, shards)
        name_key = self.pattern(fields, "key_pattern", layers, 1)
        if len({(name_file(la, 0), name_key(la, 0)) for la in layers}) != len(layers):
            raise FormatError(
                f"field '{fields.where}': no pattern tells layers {list(layers)} apart",
                path=fields.path,
                code="metadata",
            )
        files = [(self.inside(fields, name_file(la, s)), name_key(la, s)) for la in layers for s in range(shards)]
        name, d_model = self._first_header(files, fields, "dim")
        dtype = self._numpy(name, fields)
        addresses = self._addresses(shards, "shard_index", "row_offset", lists=full)
        rows = Rows.table(
            list(files), addresses, num_groups=len(layers), width=d_model, dtype=name, descr=dtype, io=self.io
        )
        return rows, layers, d_model, dtype, rows.token_counts()

    def logits(self) -> Logits | None:
        """Top-k values and indices, opened when first asked for."""
        fields = self.logits_fields
        if fields is None:
            return None
        shards = self._shard_count(fields)
        paths = self.files_of(fields, shards)
        there, keys = self.logits_keys(paths)
        # A dataset without hidden states may address its logits by the universal pair.
        columns = ("shard_index_logits", "row_offset_logits")
        if columns[0] not in self.names and self.hidden is None:
            columns = ("shard_index", "row_offset")
        made, widths = [], []
        for key in keys:
            files = [(path, key) for path in paths]
            name, k = self._first_header(files, fields, "k")
            widths.append(k)
            dtype = self._numpy(name, fields)
            addresses = self._addresses(shards, *columns, lists=False)
            made.append(Rows.table(list(files), addresses, num_groups=1, width=k, dtype=name, descr=dtype, io=self.io))
            if key == keys[0]:
                self._logits_dtype = dtype
        if widths[0] != widths[1]:
            raise FormatError(f"has {widths[0]} values but {widths[1]} indices in a row", path=there)
        return Logits(*made)

    def logits_keys(self, paths: list[Location]) -> tuple[Location, tuple[str, str]]:
        """The first file that is there, and what its tensors are called."""
        path, present = _first_there(paths)
        for pair in LOGITS_KEYS:
            if present.keys() >= set(pair):
                return path, pair
        raise FormatError(
            f"expected tensors {LOGITS_KEYS[0]} or {LOGITS_KEYS[1]}, found {sorted(present)[:8]}", path=path
        )

    def router(self) -> Router | None:
        """Router logits: rows follow the index's order through shards of their own; no column addresses them."""
        fields = self.router_fields
        if fields is None:
            return None
        layers = fields.integers("layers")
        counts = [shard.integer("num_prompts", minimum=0) for shard in fields.items("shards")]
        if sum(counts) != self.num_rows:
            raise FormatError(
                f"field '{fields.where}.shards': expected {self.num_rows} prompts in all, found {sum(counts)}",
                path=fields.path,
                code="metadata",
            )
        paths = self.files_of(fields, len(counts))
        key = self.pattern(fields, "key_pattern", layers, 1, default=ROUTER_KEY)
        files = [(path, key(layer, s)) for layer in layers for s, path in enumerate(paths)]
        name, experts = self._first_header(files, fields, "num_experts")
        addresses = Addresses(len(counts))
        shard = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        addresses.push_last(
            shard, np.arange(self.num_rows, dtype=np.int64) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        )
        dtype = self._numpy(name, fields)
        rows = Rows.table(
            list(files), addresses, num_groups=len(layers), width=experts, dtype=name, descr=dtype, io=self.io
        )
        return Router(layers, rows)

    def files(self) -> list[Location]:
        """Every tensor file that the descriptors name; shards without rows have none."""
        found: dict[Location, None] = {}
        if (hidden := self.hidden) is not None:
            shards = hidden.items("shards")
            used = [i for i, shard in enumerate(shards) if shard.value.get("num_tokens", 1) != 0]
            layers = hidden.integers("layers")
            name = self.pattern(hidden, "file_pattern", layers, len(shards))
            found.update({self.inside(hidden, name(layer, s)): None for layer in layers for s in used})
        for fields in (self.logits_fields, self.router_fields):
            if fields is not None:
                found.update(dict.fromkeys(self.files_of(fields, self._shard_count(fields))))
        return list(found)

    # -- patterns and headers --------------------------------------------------------------------------------------

    def _shard_count(self, fields: Fields) -> int:
        shards = fields.items("shards")
        if not 0 < len(shards) <= _FILES_AT_MOST:
            raise fields.error("shards", f"1 to {_FILES_AT_MOST} shards")
        return len(shards)

    def files_of(self, fields: Fields, shards: int) -> list[Location]:
        """The files of a tensor type that keeps all its layers in one file per shard."""
        if fields.has("file_pattern"):
            name = self.pattern(fields, "file_pattern", (0,), shards)
            return [self.inside(fields, name(0, s)) for s in range(shards)]
        return [self.inside(fields, shard.text("file")) for shard in fields.items("shards")]

    def pattern(
        self, fields: Fields, name: str, layers: Sequence[int], shards: int, default: str | None = None
    ) -> Callable[[int, int], str]:
        """A ``file_pattern`` or ``key_pattern`` as a function of layer and shard.

        Patterns are Python format strings, and these come from a file: only plain ``{layer}`` and ``{shard}``, padded at most,
        are followed. ``str.format`` itself would also follow attributes and honour a width of a billion.
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
        """A file name from the metadata, which must stay inside the dataset."""
        if not name or min(name) < " " or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            raise FormatError(
                f"field '{fields.where}': expected a file inside the dataset, found {show(name)}",
                path=fields.path,
                code="metadata",
            )
        return self.root / name

    def _first_header(self, files: Sequence[tuple[Location, str]], fields: Fields, width_field: str) -> tuple[str, int]:
        """Element type and row width, from the first file that is there: datasets are downloaded in part."""
        path, tensors = _first_there([path for path, _ in files])
        key = next(key for file, key in files if file == path)
        if key not in tensors:
            raise FormatError(f"expected a tensor named '{key}', found {sorted(tensors)[:8]}", path=path)
        dtype, shape = tensors[key]
        if len(shape) != 2 or shape[1] == 0:
            raise FormatError(f"tensor '{key}' has shape {shape}, expected (rows, {width_field})", path=path)
        # A logits row of a dataset with positions="all" is longer than k; the header is right.
        if width_field == "dim" and fields.has("dim") and shape[1] != fields.integer("dim"):
            raise FormatError(f"tensor '{key}' has shape {shape}, expected (rows, {fields.integer('dim')})", path=path)
        return dtype, shape[1]

    def _numpy(self, name: str, fields: Fields) -> np.dtype[Any]:
        dtype = NUMPY_BY_NAME.get(name)
        if dtype is None:
            raise UnsupportedError(f"field '{fields.where}': elements of {name} have no numpy type", path=fields.path)
        return dtype


def _ordered_parts(found: list[Location], root: Location) -> list[Location]:
    """The index files in order; none of a numbered set may be missing."""
    if not found:
        raise MissingFileError("expected an index, found no parquet file", path=root / "index")
    if len(found) == 1 and _PART.fullmatch(found[0].name) is None:
        return found
    numbered = [_PART.fullmatch(part.name) for part in found]
    if any(m is None for m in numbered):
        if len(found) == 1:
            return found
        raise FormatError(
            f"expected one index or parts named like train-00000-of-00002.parquet, found {[p.name for p in found][:8]}",
            path=root / "index",
        )
    sets = {(m["split"], m["total"]) for m in numbered if m is not None}
    if len(sets) > 1:
        raise FormatError(
            f"expected one index, found several: {sorted(sets)}; open one of the files", path=root / "index"
        )
    ((split, total),) = sets
    if len(found) > int(total):
        raise FormatError(
            f"expected {int(total)} parts, found {len(found)}: {[p.name for p in found][:8]}", path=root / "index"
        )
    for i in range(int(total)):
        part = found[0].parent / f"{split}-{i:05}-of-{total}.parquet"
        if part not in found:
            raise MissingFileError(f"expected part {i} of {int(total)} of the index, found nothing", path=part)
    return found


def _first_there(paths: Sequence[Location]) -> tuple[Location, dict[str, tuple[str, list[int]]]]:
    """The first of these files that is there, and the type and shape of each tensor in it."""
    for path in paths:
        try:
            tensors = _native.safetensors_header(path)[0]
        except MissingFileError:
            continue
        return path, {name: (dtype, shape) for name, dtype, shape, _, _ in tensors}
    others = f" (nor any other of {len(paths)} tensor files)" if len(paths) > 1 else ""
    raise MissingFileError(f"expected a file, found nothing{others}", path=paths[0])


def _json_or_text(value: bytes, part: Location) -> Any:
    """A metadata value: JSON, or as lmprobe's reader does, the text itself where it is none."""
    text = value.decode("utf-8", "replace")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parse_json(text, part)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _is_coded(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_dictionary(kind))


def _holds_codes(kind: Any) -> bool:
    """Whether a column holds codes of a dictionary, itself or in its lists and structs, whose types' texts name theirs."""
    return _is_coded(kind) or "dictionary<" in str(kind)


def _plain_texts(table: pa.Table, texts: Sequence[str], most: int) -> pa.Table:
    """The table with dictionaries of texts as plain texts, but for those whose values would take more than ``most`` bytes.

    Codes have to be in their dictionaries.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for at, name in enumerate(table.column_names):
        column = table[name]
        if name not in texts or not _is_coded(column.type):
            continue
        size = 0
        for chunk in column.chunks:
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            size += int(pc.sum(lengths.cast(pa.int64())).as_py() or 0)
        if size <= most:
            table = table.set_column(at, name, column.cast(column.type.value_type))
    return table


def _coded(table: pa.Table, names: Sequence[str]) -> pa.Table:
    for name in names:
        if not _is_coded(table.schema.field(name).type):
            table = table.set_column(table.column_names.index(name), name, table[name].dictionary_encode())
    return table


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def int64_of(
    column: pa.Array, name: str, part: Location, row: int, ends: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """An integer column without nulls, as int64; ``ends`` are the rows' ends if it is what the rows' lists hold."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        raise FormatError(f"column '{name}': expected integers, found {column.type}", path=part)
    if column.null_count:
        first = int(np.flatnonzero(~column.is_valid().to_numpy(zero_copy_only=False))[0])
        if ends is not None:
            first = int(np.searchsorted(ends, first, "right")) - 1
        raise FormatError(f"column '{name}': row {row + first} {'is' if ends is None else 'holds a'} null", path=part)
    numbers = column.to_numpy(zero_copy_only=False)
    if numbers.dtype == np.uint64 and numbers.size and numbers.max() > np.iinfo(np.int64).max:
        raise FormatError(f"column '{name}': {numbers.max()} is out of range", path=part)
    return np.ascontiguousarray(numbers, dtype=np.int64)


def lists_of(column: pa.Array, name: str, part: Location, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A column of integer lists: where each list begins and ends, and all values. A null list has no tokens."""
    import pyarrow as pa

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise FormatError(f"column '{name}': expected lists of integers, found {column.type}", path=part)
    ends = column.offsets.to_numpy().astype(np.int64)
    first, last = int(ends[0]), int(ends[-1])
    ends -= first
    values = int64_of(column.values.slice(first, last - first), name, part, row, ends)
    if column.null_count:
        # Arrow does not promise that a null list's offsets are equal.
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.diff(ends)
        if (lengths[~valid] != 0).any():
            values = values[np.repeat(valid, lengths)]
            ends = np.concatenate([[0], np.cumsum(np.where(valid, lengths, 0))])
    return ends, values
