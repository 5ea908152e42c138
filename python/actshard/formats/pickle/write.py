"""Writes pickle shards as specified by the published text, in protocol 4; its example code can read them.

Shards are assembled from opcodes around the rows in memory, because ``pickle.dump`` would copy the arrays. Globals are from
``numpy.core``, which both numpy 1 and 2 can import. In uncompressed shards every array is aligned to 64 bytes by no-op opcodes, so
that readers that map the file get aligned views.
"""

from __future__ import annotations

import decimal
import io
import pickle
import re
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._json import Fields, read_json
from actshard.base.errors import ArgumentError, MissingFileError
from actshard.base.location import Location, network_io
from actshard.base.work import as_json, make_folder, rename, sync_folders, write_json
from actshard.formats.carrying import ORIGIN, Carrying, checked_origin
from actshard.formats.contents import Options
from actshard.formats.merging import Merge, Merger, check_column_types
from actshard.formats.pickle.read import LARGEST_LAYER, SAMPLE_NUMBERS, machines_in, open_many
from actshard.formats.target import (
    LONGEST_PREVIEW,
    PREVIEW,
    TEXTS,
    AllExamples,
    Block,
    Spec,
    Target,
    check_times,
    created,
    flag,
    given_time,
    only,
    positive,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


SHARD_BYTES = 100_000_000
"""Shard size before compression; the text recommends 50 to 500 MB."""
SAMPLES_PER_MACHINE = 1_000_000_000
"""Sample numbers of part or machine i start at i times this number, because a part does not know the sizes of other parts."""
_ALIGN = 64
_MADE = ("shape", "layers")
"""Columns that the reader computes for every sample, independently of its metadata."""
_SHARD = re.compile(r"\.?(shard_\d{4,}\.pkl(?:\.gz)?)(?:\.part)?")
"""File name of a shard (group 1), or its temporary name."""
_NAMED = ("model_name", "model_architecture", "model_params", "dataset_name", "dataset_config", "dataset_split")


class PickleTarget(Target):
    """Writes ``shard_0001.pkl.gz`` ..., then ``metadata.json``. One block is one shard."""

    format: ClassVar[str] = "pickle"
    format_options: ClassVar[Mapping[str, str]] = {
        "compress": "whether to compress shards with gzip (default: True)",
        "level": "gzip level, 1 to 9 (default: 1)",
        "machine_id": "number of this machine in a distributed extraction (default: the part's number)",
        "total_machines": "number of machines in a distributed extraction",
        "samples_per_machine": "sample numbers of machine or part i start at i times this number "
        f"(default: {SAMPLES_PER_MACHINE:,})",
    }
    unique: ClassVar[str | None] = "sample_idx"
    largest_layer: ClassVar[int] = LARGEST_LAYER
    holds_partial_layers = True
    splits = "examples"
    blocks_are_files = True
    text_column: ClassVar[str | None] = PREVIEW

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.compress = flag(spec.options, "compress", True)
        self.level = positive(spec.options, "level", 1) or 1
        if self.level > 9:
            raise ArgumentError(f"level: expected 1 to 9, found {self.level}")
        part, parts = spec.part or (0, 1)
        machine = spec.options.get("machine_id")
        if machine is not None and (type(machine) is not int or not 0 <= machine < 1 << 31):
            raise ArgumentError(f"machine_id: expected a number from 0, found {machine!r}")
        self.machine = part if machine is None else machine
        self.machines = positive(spec.options, "total_machines", parts) or parts
        if "total_machines" in spec.options and self.machine >= self.machines:
            raise ArgumentError(f"machine_id: expected 0 to {self.machines - 1}, found {self.machine}")
        self.block_bytes = spec.shard_bytes or SHARD_BYTES
        self.per_machine = positive(spec.options, "samples_per_machine", SAMPLES_PER_MACHINE) or SAMPLES_PER_MACHINE
        # As specified: machine_id * samples_per_machine + local_sample_idx. Parts of a machine count as separate machines.
        self.base = (
            part if machine is None else machine if spec.part is None else machine * parts + part
        ) * self.per_machine
        if self.base + self.per_machine > 1 << 63:
            raise ArgumentError(f"samples_per_machine: {self.per_machine} makes sample numbers beyond 64 bits")
        self.created = created(spec, "%Y-%m-%dT%H:%M:%SZ")
        # With a given creation time, the duration of writing is not recorded either, so that files are reproducible.
        self.began = time.monotonic() if given_time(spec) is None else None
        self._before = 0
        """Number of earlier shards, which other tasks of a plan write."""
        self.shards: list[dict[str, Any]] = []
        self._new: list[Path] = []
        self._added: list[dict[str, object]] = []

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, ("F16", "F64", "F32"), "pickle", "")

    def config(self) -> dict[str, object]:
        options = {"compress": self.compress, "level": self.level, "shard_bytes": self.block_bytes}
        machine = {"machine": [self.machine, self.machines], "base": self.base, "per_machine": self.per_machine}
        return {**super().config(), **options, **machine, "created": self.created}

    def adopt(self, config: dict[str, Any]) -> None:
        super().adopt(config)
        self.created = config["created"]
        if "base" not in config:
            # Begun by release 0.1, which offset sample numbers by the part's own number of examples.
            self.base = (self.spec.part or (0, 1))[0] * (self.spec.num_examples or SAMPLES_PER_MACHINE)

    def check_columns(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        name = "sample_idx"
        if name in schema.names and not pa.types.is_integer(schema.field(name).type):
            raise ArgumentError(f"{name}: expected a unique integer for every example, found {schema.field(name).type}")
        if conflicts := [name for name in _MADE if name in schema.names]:
            raise ArgumentError(f"columns: {conflicts[0]!r} is reserved in pickle shards; rename the column")
        text = next((name for name in TEXTS if name in schema.names), None)
        if text is None:
            return
        if text != PREVIEW and PREVIEW in schema.names:
            raise ArgumentError(
                f"columns: pickle shards store {text!r} as {PREVIEW!r}; pass only one of them, or rename the other"
            )
        kind = schema.field(text).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            raise ArgumentError(
                f"{text}: expected strings, which pickle shards store as {PREVIEW!r}, found {kind}; rename the column"
            )

    def check_values(self, table: pa.Table, first: int) -> None:
        check_times(table, first)
        numbers = table["sample_idx"].to_pylist() if "sample_idx" in table.column_names else []
        for i, number in enumerate(numbers):
            if number is not None and number not in SAMPLE_NUMBERS:  # nulls are refused with duplicates
                raise ArgumentError(
                    f"sample_idx: example {first + i}: expected {SAMPLE_NUMBERS[0]} to {SAMPLE_NUMBERS[-1]}, found {number}"
                )

    def check_count(self, n: int, columns: Sequence[str]) -> None:
        # More examples would use sample numbers of the next machine.
        if n > self.per_machine and "sample_idx" not in columns:
            raise ArgumentError(f"samples_per_machine: expected at least {n}, found {self.per_machine}")

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.shards = [shard for state in states for shard in state["shards"]]
        # Committed shards may still have their temporary names after a crash.
        for shard in self.shards:
            path = self.root / shard["filename"]
            if not path.exists():
                rename(_working(path), path)
        sync_folders([self.root])

    def forget(self, lengths: NDArray[np.int64]) -> None:
        counted = {shard["filename"] for shard in self.shards}
        for path in self.root.glob("*shard_*"):
            match = _SHARD.fullmatch(path.name)
            if match is not None and match[1] not in counted:
                path.unlink()

    def states_at(
        self, lengths: NDArray[np.int64], firsts: Sequence[int], blocks: Sequence[int]
    ) -> list[dict[str, object]]:
        return [{"shards": before} for before in blocks]

    def begin_at(self, first: int, state: Mapping[str, Any]) -> None:
        self.n, self._before = first, int(state["shards"])

    def together(self, states: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        return list(states)

    def write(self, block: Block) -> None:
        number = self._before + len(self.shards) + len(self._new) + 1
        path = self.root / f"shard_{number:04d}.pkl{'.gz' if self.compress else ''}"
        ids, segments = self._pickled(block)
        make_folder(self.root)
        size, sha256 = _native.write_segments(_working(path), segments, self.level if self.compress else None)
        layers = [la for la, lengths in zip(self.spec.layers, block.lengths.T, strict=True) if (lengths >= 0).any()]
        entry = {
            "shard_id": number,
            "filename": path.name,
            "size_bytes": size,
            "num_samples": len(block),
            "layers": layers,
        }
        ids_of_it = {"sample_id_range": [min(ids), max(ids)]}
        self._added.append({**entry, **ids_of_it, "compressed": self.compress, "checksum": f"sha256:{sha256}"})
        self._new.append(path)
        self.n += len(block)

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return [_working(path) for path in self._new], {"shards": self._added}

    def committed(self) -> None:
        for path in self._new:
            rename(_working(path), path)
        if self._new:
            sync_folders([self.root])
        self.shards += self._added
        self._new, self._added = [], []

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        rows = tokens * len(self.spec.layers)
        most = max(1, self.block_bytes // self.row_bytes)
        shards, used = 1, 0
        for n in rows.tolist():
            if used and used + n > most:
                shards, used = shards + 1, 0
            used += n
        return shards, shards + 1, int(rows.sum()) * self.row_bytes

    def _pickled(self, block: Block) -> tuple[list[int], list[NDArray[np.uint8]]]:
        """Returns sample numbers, and the shard's bytes in segments. Arrays are not copied."""
        columns = {} if block.columns is None else {n: block.columns[n].to_pylist() for n in block.columns.column_names}
        n = len(block)
        numbered = columns.pop("sample_idx", None)
        ids = list(range(self.base + self.n, self.base + self.n + n)) if numbered is None else numbered
        if any(type(i) is not int for i in ids) or len(set(ids)) < n:
            raise ArgumentError("sample_idx: expected a unique integer for every example")
        text = next((columns.pop(name) for name in TEXTS if name in columns), None)
        previews = [None if t is None else str(t)[:LONGEST_PREVIEW] for t in text] if text is not None else [""] * n
        metadata = [{name: _safe(values[i]) for name, values in columns.items()} for i in range(n)]
        for t, of_sample in zip(text or (), metadata, strict=False):
            if t is not None and len(str(t)) > LONGEST_PREVIEW:
                of_sample["text"] = str(t)  # the preview is cut, so the whole text is stored here
        out = Opcodes(self.dtype or block.memory.dtype, 0 if self.compress else _ALIGN)
        starts, data, row = block.starts, block.bytes, self.row_bytes
        for group, layer in enumerate(self.spec.layers):
            lengths = block.lengths[:, group]
            if (lengths < 0).all():
                continue
            out.key(f"layer_{layer}")
            for i in np.flatnonzero(lengths >= 0).tolist():
                shape = (int(lengths[i]), self.spec.d_model)
                start = int(starts[i, group]) * row
                out.item(ids[i], shape, data[start : start + shape[0] * row], previews[i], metadata[i])
            out.end_list()
        return ids, out.done()

    def finish(self, examples: AllExamples) -> None:
        n = len(examples)
        longest = int(examples.lengths.max(initial=0))
        metadata = dict(self.spec.metadata)
        hidden = {"hidden_size": self.spec.d_model}
        params = metadata.get("model_params")
        config = {
            "model_name": "unknown",
            "model_architecture": "unknown",
            **{k: metadata.pop(k) for k in _NAMED if k in metadata},
            "model_params": {**(params if isinstance(params, dict) else {}), **hidden},
            "layers_extracted": list(self.spec.layers),
            "max_seq_length": max(longest, 1),
            **metadata,
        }
        seconds = None if self.began is None else time.monotonic() - self.began
        listing = shard_listing(self.shards, n, config, self.created, self.machine, self.machines, seconds)
        write_json(self.root / "metadata.json", listing)


def shard_listing(
    shards: Sequence[Mapping[str, Any]],
    n: int,
    config: Mapping[str, object],
    created: str,
    machine: int,
    machines: int,
    seconds: float | None,
) -> dict[str, object]:
    """Contents of metadata.json."""
    statistics = {
        "total_shards": len(shards),
        "total_samples": n,
        "total_size_bytes": sum(s["size_bytes"] for s in shards),
        "layers_extracted": config.get("layers_extracted"),
    }
    if seconds is not None:
        statistics["extraction_duration_seconds"] = round(seconds, 3)
    return {
        "version": "1.0",
        "created_at": created,
        "written_by": f"actshard {_native.build_info()['version']}",
        "extraction_config": dict(config),
        "distributed_config": {"machine_id": machine, "total_machines": machines},
        "shards": [dict(s) for s in shards],
        "statistics": statistics,
    }


def _working(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


class Opcodes:
    """Builds a shard from opcodes of pickle protocol 4: a dict of lists of dicts. Arrays are not copied.

    Opcodes are documented in Python's ``pickletools``. Arrays are pickled like ``numpy.ndarray.__reduce__``.
    """

    def __init__(self, dtype: np.dtype[np.generic], align: int) -> None:
        self._segments: list[NDArray[np.uint8]] = []
        self._text = bytearray(b"\x80\x04}(")  # PROTO 4, EMPTY_DICT, MARK
        self._before = 0
        self._align = align
        self._dtype = dtype
        # Memo slots: 0 _reconstruct, 1 ndarray, 2 the dtype, from 3 field names.
        self._known: dict[str, int] = {}
        self._begun = False

    def key(self, name: str) -> None:
        """Begins a layer."""
        self._text += _plain(name) + b"]("  # EMPTY_LIST, MARK

    def end_list(self) -> None:
        """Ends a layer."""
        self._text += b"e"  # APPENDS

    def item(
        self,
        sample: int,
        shape: tuple[int, int],
        rows: NDArray[np.uint8],
        preview: str | None,
        metadata: dict[str, object],
    ) -> None:
        """Adds a sample to the current layer."""
        text = self._text
        text += b"}("
        text += self._name("sample_idx") + _plain(sample)
        text += self._name("activation")
        self._array(shape, rows)
        text = self._text
        text += self._name("shape") + _plain(shape)
        text += self._name("text_preview") + _plain(preview)
        text += self._name("metadata") + _plain(metadata)
        text += b"u"  # SETITEMS

    def _name(self, name: str) -> bytes:
        """Opcodes of a field's name. Later uses refer to the memo."""
        if name in self._known:
            return b"h" + bytes([self._known[name]])  # BINGET
        self._known[name] = 3 + len(self._known)
        return _plain(name) + b"q" + bytes([self._known[name]])  # BINPUT

    def _array(self, shape: tuple[int, int], rows: NDArray[np.uint8]) -> None:
        text = self._text
        if not self._begun:
            self._begun = True
            text += b"cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01"
        else:
            text += b"h\x00h\x01"
        text += _plain((0,)) + _plain(b"b") + b"\x87R"  # TUPLE3, REDUCE
        text += b"(" + _plain(1) + _plain(shape)
        if "dtype" not in self._known:
            self._known["dtype"] = 2
            state = (3, "<", None, None, None, -1, -1, 0)
            text += b"cnumpy\ndtype\n" + _plain((self._dtype.str[1:], False, True)) + b"R" + _plain(state) + b"bq\x02"
        else:
            text += b"h\x02"
        text += b"\x89"  # NEWFALSE: C order
        head = b"B" + struct.pack("<I", rows.size) if rows.size < 1 << 32 else b"\x8e" + struct.pack("<Q", rows.size)
        if self._align:
            text += _nothing(-(self._before + len(text) + len(head)) % self._align, self._align)
        text += head
        self._flush()
        self._segments.append(rows)
        self._before += rows.size
        self._text += b"tb"  # TUPLE, BUILD

    def _flush(self) -> None:
        self._segments.append(np.frombuffer(bytes(self._text), np.uint8))
        self._before += len(self._text)
        self._text = bytearray()

    def done(self) -> list[NDArray[np.uint8]]:
        """Returns all segments in order."""
        self._text += b"u."  # SETITEMS, STOP
        self._flush()
        return self._segments


def _safe(value: object) -> object:
    """Converts a value to types that unpickle without imports; dates and decimals become strings."""
    if isinstance(value, np.generic):
        value = value.item()  # pyarrow returns half floats as numpy scalars
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, decimal.Decimal) and value == int(value):
        return int(value)  # pyarrow returns integers beyond 64 bits as decimals
    if isinstance(value, list | tuple):
        return [_safe(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _safe(v) for k, v in value.items()}
    return str(value)


def _plain(value: object) -> bytes:
    """Opcodes of a plain value, usable anywhere: protocol 3 has no frames, and ``fast`` disables the memo."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 3)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]  # without PROTO and STOP


def _nothing(size: int, align: int) -> bytes:
    """No-op opcodes of ``size`` bytes (``size + align`` if 1): NONE POP pairs, preceded by BININT1 POP if odd."""
    if size == 1:
        size += align
    return b"N0" * (size // 2) if size % 2 == 0 else b"K\x000" + b"N0" * ((size - 3) // 2)


# Merges pickle shards: renumbers the shards and joins their lists.


_DECODED = 160 << 20
"""Memory for one decoded shard of each part, whose columns are checked."""


def _check(plan: Merge) -> None:
    parts = [Location.at(part) for part in plan.parts]
    open_many(Location.at(plan.path), parts, Options("pread"))  # rejects duplicate sample numbers
    missing = next((source for source, _ in _plan_moves(plan)[0] if not source.is_file()), None)
    if missing is not None:
        raise MissingFileError("expected a shard, found no file", path=missing)
    # Only the first shard of each part is checked: reading all columns would decode all rows.
    contents = [open_many(p, [p], Options(network_io(p), _DECODED)) for p in parts]
    check_column_types(plan, [c.unit_columns(0) for c in contents if c.unit_columns is not None])


def _plan_moves(plan: Merge) -> tuple[list[tuple[Path, str]], dict[str, object]]:
    """Returns each shard with its new name, and the merged metadata."""
    described = [Fields(read_json(p / "metadata.json"), p / "metadata.json") for p in plan.parts]
    moves: list[tuple[Path, str]] = []
    shards: list[dict[str, Any]] = []
    for part, metadata in zip(plan.parts, described, strict=True):
        for shard in metadata.items("shards"):
            number = len(shards) + 1
            file = shard.text("filename")
            name = f"shard_{number:04d}{'.pkl.gz' if file.endswith('.gz') else '.pkl'}"
            moves.append((part / file, name))
            shards.append({**shard.value, "shard_id": number, "filename": name})
    configs = [Fields(m.value.get("extraction_config"), m.path, "extraction_config").value for m in described]
    config = dict(configs[0])
    layers = list(dict.fromkeys(la for s in shards for la in s.get("layers", [])))
    longest = [c["max_seq_length"] for c in configs if isinstance(c.get("max_seq_length"), int)]
    config |= {"layers_extracted": config.get("layers_extracted", layers), "max_seq_length": max(longest, default=1)}
    statistics = [m.value.get("statistics") for m in described]
    seconds = [s.get("extraction_duration_seconds") if isinstance(s, dict) else None for s in statistics]
    durations = [s for s in seconds if isinstance(s, int | float)]
    samples = sum(
        Fields(s, plan.parts[0] / "metadata.json", "shards").integer("num_samples", minimum=0) for s in shards
    )
    created = described[0].value.get("created_at", "")
    return moves, shard_listing(shards, samples, config, created, 0, 1, sum(durations) if durations else None)


class PickleMerger(Merger):
    """Merges pickle shards: they get new names. Each folder of a multi-machine extraction is a part."""

    makes: ClassVar[tuple[str, ...]] = ("shard_*.pkl", "shard_*.pkl.gz", "metadata.json")

    def datasets(self, path: Path) -> list[Path]:
        return (
            [path] if (path / "metadata.json").exists() else [folder.local for folder in machines_in(Location.at(path))]
        )

    def check(self, plan: Merge) -> None:
        _check(plan)

    def taken(self, plan: Merge) -> list[tuple[Path, Path]]:
        return [(source, plan.path / name) for source, name in _plan_moves(plan)[0]]

    def finish(self, plan: Merge) -> Path:
        _native.sync_files([plan.path])  # shards must be on disk before the list that names them
        write_json(plan.path / "metadata.json", _plan_moves(plan)[1])
        _native.sync_files([plan.path])
        return plan.path

    def beside(self, plan: Merge) -> tuple[Sequence[str], int, bool]:
        return ["metadata.json"], len(as_json(_plan_moves(plan)[1])), True


# Columns and metadata of pickle shards in other formats, and the reverse.


_OF_FILES = frozenset(("layers_extracted", "max_seq_length"))
"""Fields of ``extraction_config`` that the writer computes."""


class PickleCarrying(Carrying):
    """Metadata are the fields of ``extraction_config``; samples are numbered."""

    derived: ClassVar[frozenset[str]] = frozenset(("shape", "layers"))
    number_column: ClassVar[str | None] = "sample_idx"
    model_key: ClassVar[str | None] = "model_name"

    def numbered_by_order(self, contents: Contents) -> bool:
        """Whether samples are numbered by order, according to the shards' ``sample_id_range``."""
        shards: object = contents.metadata.get("shards")
        if not isinstance(shards, list):
            return False
        first = 0
        for shard in shards:
            if not isinstance(shard, dict):
                return False
            ids, count = shard.get("sample_id_range"), shard.get("num_samples")
            if count == 0:
                continue
            if not isinstance(count, int) or ids != [first, first + count - 1]:
                return False
            first += count
        return True

    def fillers(self, contents: Contents) -> frozenset[str]:
        """The preview, if no example has a text. Shards are decoded up to the first text."""
        if PREVIEW not in contents.column_names:
            return frozenset()
        unit_columns = contents.unit_columns
        if unit_columns is None or contents.units is None:
            tables = iter([contents.columns([PREVIEW])])  # some examples only
        else:
            tables = map(unit_columns, range(len(contents.units) - 1))
        is_empty = is_null = True
        for table in tables:
            previews = table[PREVIEW].to_pylist()  # of any type
            is_null &= all(preview is None for preview in previews)
            is_empty &= all(preview == "" for preview in previews)
            if not (is_null or is_empty):
                return frozenset()
        return frozenset((PREVIEW,))

    def outgoing(self, table: pa.Table) -> pa.Table:
        """Replaces the preview by the whole text if that is stored, so that other formats get one text column."""
        import pyarrow.compute as pc

        if PREVIEW not in table.column_names or "text" not in table.column_names:
            return table
        texts = pc.coalesce(table["text"].cast("string"), table[PREVIEW].cast("string"))
        table = table.drop_columns(["text"])
        return table.set_column(table.column_names.index(PREVIEW), PREVIEW, texts)

    def origin(self, metadata: Mapping[str, object]) -> dict[str, object] | None:
        config = metadata.get("extraction_config") or {}
        return checked_origin(config.get(ORIGIN)) if isinstance(config, dict) else None

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        config: Any = metadata.get("extraction_config")
        if not isinstance(config, dict) and isinstance(machines := metadata.get("machines"), dict):
            config = next((m.get("extraction_config") for m in machines.values()), None)
        return {k: v for k, v in (config or {}).items() if k not in _OF_FILES}, {}
