"""Writes pickle shards: what the published text describes, in protocol 4, opened by its own example code.

Shards are put together by hand, because an unpickled copy of the arrays would have to exist otherwise: opcodes of protocol 4 around
the rows where they lie in memory. Globals are those under ``numpy.core``, which numpy 1 and 2 both know. In plain shards every
array begins at a multiple of 64 bytes, so that readers that map the file get aligned views; what fills the gaps does nothing.
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
from actshard.errors import ArgumentError
from actshard.formats.target import PREVIEW, TEXTS, AllExamples, Block, Spec, Target, check_times, flag, only, positive
from actshard.work import make_folder, rename, sync_folders, write_json

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_BYTES = 100_000_000
"""Before compression; the text recommends 50 to 500 MB."""
LONGEST_PREVIEW = 200
"""Characters of text_preview, as the text says."""
SAMPLES_PER_MACHINE = 1_000_000_000
"""Sample numbers of part or machine i begin at i times this: no part knows how many examples the others have."""
_ALIGN = 64
_MADE = ("shape", "layers")
"""What a reader tells of every sample, whatever its metadata call so."""
_SHARD = re.compile(r"\.?(shard_\d{4,}\.pkl(?:\.gz)?)(?:\.part)?")
"""A shard's name, in the group, and its working name."""
_NAMED = ("model_name", "model_architecture", "model_params", "dataset_name", "dataset_config", "dataset_split")


class PickleTarget(Target):
    """``shard_0001.pkl.gz`` ... and ``metadata.json``, last. A block is a shard."""

    format: ClassVar[str] = "pickle"
    makes: ClassVar[tuple[str, ...]] = ("shard_*.pkl", "shard_*.pkl.gz", "metadata.json")
    own: ClassVar[Mapping[str, str]] = {
        "compress": "whether shards are gzip'ed, level 1 (default: True)",
        "level": "gzip's level, 1 to 9 (default: 1)",
        "machine_id": "of a distributed extraction (default: the part's number)",
        "total_machines": "of a distributed extraction",
        "samples_per_machine": f"sample numbers of machine or part i begin at i times this (default: {SAMPLES_PER_MACHINE:,})",
    }
    unique: ClassVar[str | None] = "sample_idx"
    holds_partial_layers = True
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
        # The text's machine_id * samples_per_machine + local_sample_idx; parts of a machine are machines of their own.
        self.base = (
            part if machine is None else machine if spec.part is None else machine * parts + part
        ) * self.per_machine
        if self.base + self.per_machine > 1 << 63:
            raise ArgumentError(f"samples_per_machine: {self.per_machine} makes sample numbers beyond 64 bits")
        self.created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.began = time.monotonic()
        self.shards: list[dict[str, Any]] = []
        self._new: list[Path] = []
        self._added: list[dict[str, Any]] = []

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        only(dtype, ("F16", "F64", "F32"), "pickle", "")

    def config(self) -> dict[str, Any]:
        own = {"compress": self.compress, "level": self.level, "shard_bytes": self.block_bytes}
        machine = {"machine": [self.machine, self.machines], "base": self.base, "per_machine": self.per_machine}
        return {**super().config(), **own, **machine, "created": self.created}

    def adopt(self, config: dict[str, Any]) -> None:
        super().adopt(config)
        self.created = config["created"]
        if "base" not in config:
            # Begun by release 0.1, which counted from the number of this part's own examples.
            self.base = (self.spec.part or (0, 1))[0] * (self.spec.num_examples or SAMPLES_PER_MACHINE)

    def check_columns(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        name = "sample_idx"
        if name in schema.names and not pa.types.is_integer(schema.field(name).type):
            raise ArgumentError(f"{name}: expected another integer for every example, found {schema.field(name).type}")
        if taken := [name for name in _MADE if name in schema.names]:
            raise ArgumentError(f"columns: pickle shards hold {taken[0]!r} themselves; give yours another name")
        text = next((name for name in TEXTS if name in schema.names), None)
        if text is None:
            return
        if text != PREVIEW and PREVIEW in schema.names:
            raise ArgumentError(
                f"columns: pickle shards keep {text!r} as {PREVIEW!r}: give one of them, or give the other another name"
            )
        kind = schema.field(text).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            raise ArgumentError(
                f"{text}: expected texts, which pickle shards keep as {PREVIEW!r}, found {kind}; give yours another name"
            )

    def check_values(self, table: pa.Table, first: int) -> None:
        check_times(table, first)

    def check_count(self, n: int, columns: Sequence[str]) -> None:
        # More would have the numbers of the next machine.
        if n > self.per_machine and "sample_idx" not in columns:
            raise ArgumentError(f"samples_per_machine: expected at least {n}, found {self.per_machine}")

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.shards = [shard for state in states for shard in state["shards"]]
        # Shards that were complete when their writer died are whatever they are: those listed have their names.
        for shard in self.shards:
            path = self.root / shard["filename"]
            if not path.exists():
                rename(_working(path), path)
        sync_folders([self.root])

    def forget(self, lengths: NDArray[np.int64]) -> None:
        counted = {shard["filename"] for shard in self.shards}
        for path in self.root.glob("*shard_*"):
            named = _SHARD.fullmatch(path.name)
            if named is not None and named[1] not in counted:
                path.unlink()

    def write(self, block: Block) -> None:
        number = len(self.shards) + len(self._new) + 1
        path = self.root / f"shard_{number:04d}.pkl{'.gz' if self.compress else ''}"
        ids, segments = self._pickled(block)
        make_folder(self.root)
        size, sha256 = _native.write_segments(_working(path), segments, self.level if self.compress else None)
        held = [la for la, lengths in zip(self.spec.layers, block.lengths.T, strict=True) if (lengths >= 0).any()]
        entry = {
            "shard_id": number,
            "filename": path.name,
            "size_bytes": size,
            "num_samples": len(block),
            "layers": held,
        }
        ids_of_it = {"sample_id_range": [min(ids), max(ids)]}
        self._added.append({**entry, **ids_of_it, "compressed": self.compress, "checksum": f"sha256:{sha256}"})
        self._new.append(path)
        self.n += len(block)

    def dirty(self) -> tuple[list[Path], dict[str, Any]]:
        return [_working(path) for path in self._new], {"shards": self._added}

    def committed(self) -> None:
        for path in self._new:
            rename(_working(path), path)
        if self._new:
            sync_folders([self.root])
        self.shards += self._added
        self._new, self._added = [], []

    def estimate(self, tokens: NDArray[np.int64], *, has_labels: bool) -> tuple[int, int, int]:
        rows = tokens * len(self.spec.layers)
        most = max(1, self.block_bytes // self.row_bytes)
        shards, held = 1, 0
        for n in rows.tolist():
            if held and held + n > most:
                shards, held = shards + 1, 0
            held += n
        return shards, shards + 1, int(rows.sum()) * self.row_bytes

    def _pickled(self, block: Block) -> tuple[list[int], list[NDArray[np.uint8]]]:
        """Numbers of the samples, and the shard's bytes in segments; arrays are where they are."""
        columns = {} if block.columns is None else {n: block.columns[n].to_pylist() for n in block.columns.column_names}
        n = len(block)
        numbered = columns.pop("sample_idx", None)
        ids = list(range(self.base + self.n, self.base + self.n + n)) if numbered is None else numbered
        if any(type(i) is not int for i in ids) or len(set(ids)) < n:
            raise ArgumentError("sample_idx: expected another integer for every example")
        text = next((columns.pop(name) for name in TEXTS if name in columns), None)
        previews = [None if t is None else str(t)[:LONGEST_PREVIEW] for t in text] if text is not None else [""] * n
        metadata = [{name: _safe(values[i]) for name, values in columns.items()} for i in range(n)]
        for t, of_sample in zip(text or (), metadata, strict=False):
            if t is not None and len(str(t)) > LONGEST_PREVIEW:
                of_sample["text"] = str(t)  # nothing is cut without being kept
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
        given = dict(self.spec.metadata)
        hidden = {"hidden_size": self.spec.d_model}
        params = given.get("model_params")
        config = {
            "model_name": "unknown",
            "model_architecture": "unknown",
            **{k: given.pop(k) for k in _NAMED if k in given},
            "model_params": {**(params if isinstance(params, dict) else {}), **hidden},
            "layers_extracted": list(self.spec.layers),
            "max_seq_length": max(longest, 1),
            **given,
        }
        write_json(
            self.root / "metadata.json",
            shard_listing(
                self.shards, n, config, self.created, self.machine, self.machines, time.monotonic() - self.began
            ),
        )


def shard_listing(
    shards: Sequence[Mapping[str, Any]],
    n: int,
    config: Mapping[str, Any],
    created: str,
    machine: int,
    machines: int,
    seconds: float | None,
) -> dict[str, Any]:
    """A metadata.json."""
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
    """A shard as opcodes of pickle protocol 4: a dict of lists of dicts, with arrays that are not copied.

    Opcodes as the Python documentation of ``pickletools`` describes them; arrays as ``numpy.ndarray.__reduce__`` pickles them.
    """

    def __init__(self, dtype: np.dtype[Any], align: int) -> None:
        self._segments: list[NDArray[np.uint8]] = []
        self._text = bytearray(b"\x80\x04}(")  # PROTO 4, EMPTY_DICT, MARK
        self._before = 0
        self._align = align
        self._dtype = dtype
        # Memo: 0 _reconstruct, 1 ndarray, 2 the dtype, 3... names of fields.
        self._known: dict[str, int] = {}
        self._begun = False

    def key(self, name: str) -> None:
        """A layer begins."""
        self._text += _plain(name) + b"]("  # EMPTY_LIST, MARK

    def end_list(self) -> None:
        """A layer ends."""
        self._text += b"e"  # APPENDS

    def item(
        self,
        sample: int,
        shape: tuple[int, int],
        rows: NDArray[np.uint8],
        preview: str | None,
        metadata: dict[str, Any],
    ) -> None:
        """A sample of a layer."""
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
        """A field's name: once, and from the memo ever after."""
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
        """All segments in order."""
        self._text += b"u."  # SETITEMS, STOP
        self._flush()
        return self._segments


def _safe(value: Any) -> Any:
    """What no reader has to import anything for; dates and decimals as their text."""
    if isinstance(value, np.generic):
        value = value.item()  # arrow's half floats are numpy's
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, decimal.Decimal) and value == int(value):
        return int(value)  # an integer beyond 64 bits, on its way through arrow
    if isinstance(value, list | tuple):
        return [_safe(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _safe(v) for k, v in value.items()}
    return str(value)


def _plain(value: Any) -> bytes:
    """Opcodes of a plain value. Protocol 3 has no frames, and a pickler that is told to be fast no memo: they stand anywhere."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 3)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]  # without PROTO and STOP


def _nothing(size: int, align: int) -> bytes:
    """Opcodes of this length, or of that much more, that do nothing: NONE POP, and BININT1 POP for odd ones."""
    if size == 1:
        size += align
    return b"N0" * (size // 2) if size % 2 == 0 else b"K\x000" + b"N0" * ((size - 3) // 2)
