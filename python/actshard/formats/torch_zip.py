"""Files of ``torch.save``, written without torch: byte-identical to files of torch 2.15 on Linux.

::

    NAME/data.pkl             the object, in pickle protocol 2; tensors are calls of torch._utils._rebuild_tensor_v2 or _v3
    NAME/.format_version      "1"
    NAME/.storage_alignment   "64"
    NAME/byteorder            "little"
    NAME/data/0, 1, ...       a record per tensor: its elements, in C order
    NAME/version              3, newline
    NAME/.data/serialization_id   digests of the records' names and checksums, 20 decimal digits each
                              directory of the zip file, its 64-bit end record and locator, its end record

Records are stored, not deflated, and their data begin at multiples of 64: an extra field "FB" of each local header is the padding.
Sizes and CRC-32 follow the data, and the directory repeats them.

Sources: ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc`` and the miniz of torch 2.15; Python's ``pickletools``.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import NUMPY_BY_NAME, name_of
from actshard.base.errors import ArgumentError, UnsupportedError

_ALIGN = 64
_LARGE = 0xFFFFFFFF
"""Sizes and offsets of at least this value are stored with 64 bits."""
_DEEPEST = 60
"""Levels of nesting; readers accept 64."""
_AT_ONCE = 1000
"""Number of items after one MARK."""
_STORAGES = {
    **{"F64": "Double", "F32": "Float", "F16": "Half", "BF16": "BFloat16"},
    **{"I64": "Long", "I32": "Int", "I16": "Short", "I8": "Char", "U8": "Byte", "BOOL": "Bool"},
}
"""Names of storages by dtype."""
_UNTYPED = {
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
"""Dtypes without a typed storage."""


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor to be written. An object that occurs twice in a value is stored once.

    Attributes:
        dtype: safetensors name.
        shape: may be empty, or contain 0.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * NUMPY_BY_NAME[self.dtype].itemsize


@dataclass(frozen=True)
class _ZipRecord:
    """A record: name within the archive, offsets of header and data, size, and content (None: written by the caller)."""

    name: str
    header: int
    start: int
    size: int
    content: bytes | None

    @property
    def is_64(self) -> bool:
        return self.size >= _LARGE or self.header >= _LARGE

    @property
    def flags(self) -> int:
        """Names are UTF-8, and checksum and sizes follow the data; nothing follows an empty record."""
        return 0x0808 if self.size else 0x0800

    @property
    def end(self) -> int:
        return self.start + self.size + len(_descriptor(self, 0))


class TorchArchive:
    """The layout of an archive for a value. The caller writes elements at :attr:`places`, then :meth:`seal` writes the rest.

    Args:
        value: dicts, OrderedDicts, lists, tuples, strings, numbers, None and :class:`NewTensor`.
        root: the archive's folder; ``torch.save(value, "data_0.ckpt")`` names it ``data_0``.

    Attributes:
        size: bytes of the file.
        tensors: the value's tensors, in order.
        places: offset and bytes of each tensor's elements.

    Raises:
        ArgumentError: a value of another type, or nested too deep.
    """

    def __init__(self, value: object, root: str = "archive") -> None:
        self._root = root
        pickled = _Pickled(value)
        self.tensors = pickled.tensors
        self._records: list[_ZipRecord] = []
        for name, content in [
            ("data.pkl", pickled.bytes),
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
        ]:
            self._add(name, len(content), content)
        for number, tensor in enumerate(pickled.tensors):
            self._add(f"data/{number}", tensor.nbytes, None)
        self._add("version", 2, b"3\n")
        self._add(".data/serialization_id", 40, None)
        self._end = self._records[-1].end
        self.places = [(record.start, record.size) for record in self._records if record.name.startswith("data/")]
        central = sum(len(_central(root, record, 0)) for record in self._records)
        self.size = self._end + central + len(_tail(0, 0, 0))

    def _add(self, name: str, size: int, content: bytes | None) -> None:
        header = self._records[-1].end if self._records else 0
        record = _ZipRecord(name, header, 0, size, content)
        start = header + len(_local(self._root, record))
        self._records.append(_ZipRecord(name, header, -(-start // _ALIGN) * _ALIGN, size, content))

    def seal(self, into: NDArray[np.uint8]) -> None:
        """Writes headers, checksums and the directory around the elements in ``into``, ``(size,)`` bytes."""
        central: list[bytes] = []
        crcs: list[int] = []
        for record in self._records:
            header = _local(self._root, record)
            _put(into, record.header, header)
            if record.content is not None:
                _put(into, record.start, record.content)
            if record is self._records[-1]:
                _put(into, record.start, _serialization_id([r.name for r in self._records[:-1]], crcs))
            crc = zlib.crc32(into[record.start : record.start + record.size].data)
            _put(into, record.start + record.size, _descriptor(record, crc))
            if record.size:
                crcs.append(crc)
            central.append(_central(self._root, record, crc))
        directory = b"".join(central)
        _put(into, self._end, directory + _tail(len(central), len(directory), self._end))


def torch_bytes(value: object, root: str = "archive") -> bytes:
    """Returns the bytes that ``torch.save`` writes for a value, with numpy arrays as tensors.

    Raises:
        ArgumentError: a value of another type, or values nested too deep.
        UnsupportedError: an array of a dtype that torch lacks.
    """
    arrays: dict[int, tuple[NewTensor, NDArray[np.generic]]] = {}
    archive = TorchArchive(_with_tensors(value, arrays, 0), root)
    buffer = np.zeros(archive.size, np.uint8)
    array_of = {id(tensor): array for tensor, array in arrays.values()}
    for tensor, (start, size) in zip(archive.tensors, archive.places, strict=True):
        buffer[start : start + size] = np.ascontiguousarray(array_of[id(tensor)]).reshape(-1).view(np.uint8)
    archive.seal(buffer)
    return buffer.tobytes()


def _with_tensors(value: object, arrays: dict[int, tuple[NewTensor, NDArray[np.generic]]], depth: int) -> object:
    """The value with a :class:`NewTensor` for each array."""
    if depth > _DEEPEST:
        raise ArgumentError(f"expected values nested at most {_DEEPEST} deep")
    if isinstance(value, np.ndarray):
        if id(value) not in arrays:
            if name_of(value.dtype) not in (*_STORAGES, *_UNTYPED):
                raise UnsupportedError(f"expected an array of a dtype that torch has, found {value.dtype}")
            arrays[id(value)] = (NewTensor(name_of(value.dtype), value.shape), value)
        return arrays[id(value)][0]
    if isinstance(value, dict):
        return type(value)((key, _with_tensors(entry, arrays, depth + 1)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(entry, arrays, depth + 1) for entry in value)
    return value


class _Pickled:
    """Opcodes of a value, as Python's pickler emits them, and its tensors in order. Equal strings are stored once."""

    def __init__(self, value: object) -> None:
        self._out = bytearray(b"\x80\x02")  # PROTO 2
        self._memo: dict[object, int] = {}
        self.tensors: list[NewTensor] = []
        self._save(value, 0)
        self._out += b"."  # STOP
        self.bytes = bytes(self._out)

    def _remember(self, key: object) -> None:
        """BINPUT or LONG_BINPUT: the next number of the memo."""
        number = len(self._memo)
        self._memo[key] = number
        self._out += b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def _recall(self, key: object) -> bool:
        """BINGET or LONG_BINGET, if the value was stored before."""
        number = self._memo.get(key)
        if number is None:
            return False
        self._out += b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def _save(self, value: object, depth: int) -> None:
        if depth > _DEEPEST:
            raise ArgumentError(f"expected values nested at most {_DEEPEST} deep")
        kind = type(value)
        save = _SAVERS.get(kind)
        if save is None:
            raise ArgumentError(f"expected plain values and tensors, found {kind.__name__}")
        save(self, value, depth)

    def _constant(self, value: Any, depth: int) -> None:
        self._out += {None: b"N", True: b"\x88", False: b"\x89"}[value]

    def _float(self, value: float, depth: int) -> None:
        self._out += b"G" + struct.pack(">d", value)

    def _int(self, value: int, depth: int) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self._out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if value < 0 and raw[-1] == 0xFF and raw[-2] & 0x80:
                raw = raw[:-1]
            if len(raw) > 255:
                raise ArgumentError(f"expected integers of at most 2040 bits, found one of {value.bit_length()}")
            self._out += b"\x8a" + bytes([len(raw)]) + raw  # LONG1

    def _text(self, value: str, depth: int) -> None:
        if self._recall(value):
            return
        raw = value.encode("utf-8", "surrogatepass")
        self._out += b"X" + struct.pack("<I", len(raw)) + raw
        self._remember(value)

    def _global(self, name: str) -> None:
        if not self._recall(("global", name)):
            self._out += b"c" + name.replace(" ", "\n").encode() + b"\n"
            self._remember(("global", name))

    def _dict(self, value: dict[object, object], depth: int) -> None:
        if self._recall(id(value)):
            return
        if type(value) is OrderedDict:
            self._ordered()
        else:
            self._out += b"}"
        self._remember(id(value))
        pairs = list(value.items())
        for first in range(0, len(pairs), _AT_ONCE):
            batch = pairs[first : first + _AT_ONCE]
            self._out += b"(" if len(batch) > 1 else b""
            for key, entry in batch:
                self._save(key, depth + 1)
                self._save(entry, depth + 1)
            self._out += b"u" if len(batch) > 1 else b"s"  # SETITEMS, SETITEM

    def _ordered(self) -> None:
        """An empty OrderedDict, which is not added to the memo."""
        self._global("collections OrderedDict")
        self._out += b")R"  # EMPTY_TUPLE, REDUCE

    def _list(self, value: list[object], depth: int) -> None:
        if self._recall(id(value)):
            return
        self._out += b"]"
        self._remember(id(value))
        for first in range(0, len(value), _AT_ONCE):
            batch = value[first : first + _AT_ONCE]
            self._out += b"(" if len(batch) > 1 else b""
            for entry in batch:
                self._save(entry, depth + 1)
            self._out += b"e" if len(batch) > 1 else b"a"  # APPENDS, APPEND

    def _tuple(self, value: tuple[object, ...], depth: int) -> None:
        if value and self._recall(id(value)):
            return
        self._out += b"(" if len(value) > 3 else b""
        for entry in value:
            self._save(entry, depth + 1)
        self._close(len(value), id(value))

    def _close(self, n: int, key: object) -> None:
        """The opcode of a tuple of the last n values."""
        self._out += (b")", b"\x85", b"\x86", b"\x87")[n] if n <= 3 else b"t"
        if n:
            self._remember(key)

    def _numbers(self, values: tuple[int, ...]) -> None:
        self._out += b"(" if len(values) > 3 else b""
        for number in values:
            self._int(number, 0)
        self._close(len(values), object())

    def _tensor(self, value: NewTensor, depth: int) -> None:
        """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)``; v3 has an untyped storage, and a dtype."""
        if self._recall(id(value)):
            return
        untyped = _UNTYPED.get(value.dtype)
        count = value.nbytes if untyped else value.nbytes // NUMPY_BY_NAME[value.dtype].itemsize
        self._global(f"torch._utils _rebuild_tensor_v{3 if untyped else 2}")
        self._out += b"(("
        self._text("storage", 0)
        self._global("torch.storage UntypedStorage" if untyped else f"torch {_STORAGES[value.dtype]}Storage")
        key = str(len(self.tensors))
        self.tensors.append(value)
        self._out += b"X" + struct.pack("<I", len(key)) + key.encode()
        self._remember(object())
        self._text("cpu", 0)
        self._int(count, 0)
        self._out += b"t"
        self._remember(object())
        self._out += b"QK\x00"  # BINPERSID; offset 0
        self._numbers(value.shape)
        self._numbers(_strides(value.shape))
        self._out += b"\x89"
        self._ordered()
        self._remember(object())
        if untyped:
            self._global(f"torch {untyped}")
        self._out += b"t"
        self._remember(object())
        self._out += b"R"
        self._remember(id(value))


_SAVERS: dict[type, Callable[[_Pickled, Any, int], None]] = {
    type(None): _Pickled._constant,
    bool: _Pickled._constant,
    int: _Pickled._int,
    float: _Pickled._float,
    str: _Pickled._text,
    dict: _Pickled._dict,
    OrderedDict: _Pickled._dict,
    list: _Pickled._list,
    tuple: _Pickled._tuple,
    NewTensor: _Pickled._tensor,
}


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them: an axis of length 0 counts as one."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


# -- the zip file ------------------------------------------------------------------------------------------------------


def _put(into: NDArray[np.uint8], offset: int, data: bytes) -> None:
    into[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


def _short(number: int) -> int:
    """A number for a field of 32 bits: all ones if the extra field stores it with 64 bits."""
    return 0xFFFFFFFF if number >= _LARGE else number


def _zip64_extra(record: _ZipRecord, size: int, packed: int) -> bytes:
    """The extra field with 64-bit sizes and offsets; empty if 32 bits are enough."""
    fields = [size, packed] if record.size >= _LARGE else []
    fields += [record.header] if record.header >= _LARGE else []
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _local(root: str, record: _ZipRecord) -> bytes:
    """The local header, with padding up to the record's start; without padding bytes if the start is not known yet."""
    name = f"{root}/{record.name}".encode()
    zip64 = _zip64_extra(record, record.size, 0)
    least = record.header + 30 + len(name) + len(zip64) + 4
    padding = max(record.start - least, 0)
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return struct.pack("<4s5H3I2H", b"PK\3\4", 0, record.flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _descriptor(record: _ZipRecord, crc: int) -> bytes:
    """The descriptor after the data: checksum and sizes."""
    if not record.size:
        return b""
    return struct.pack("<4sI2Q" if record.is_64 else "<4s3I", b"PK\7\x08", crc, record.size, record.size)


def _central(root: str, record: _ZipRecord, crc: int) -> bytes:
    """The record's entry in the directory."""
    name, more = f"{root}/{record.name}".encode(), _zip64_extra(record, record.size, record.size)
    size, at = _short(record.size), _short(record.header)
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", 0, 0, record.flags, 0, 0, 0, crc, size, size, len(name), len(more), 0, 0, 0, 0, at
    )
    return head + name + more


def _tail(records: int, size: int, start: int) -> bytes:
    """The 64-bit end record, its locator, and the end record."""
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, records, records, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    count = min(records, 0xFFFF)
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, _short(size), _short(start), 0)
    return end + locator + last


# -- the record serialization_id ---------------------------------------------------------------------------------------

_64 = (1 << 64) - 1
_BUCKETS = (13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697)
"""Sizes of libstdc++'s hash tables as they grow from empty."""


def _serialization_id(names: list[str], crcs: list[int]) -> bytes:
    """Digests of names and of checksums. torch uses the id only to identify files in its logs."""
    digest = 0
    for crc in crcs:
        digest = _combined(digest, crc)
    return f"{_digest_of_names(tuple(names)):020}{digest:020}".encode()


@lru_cache(64)
def _digest_of_names(names: tuple[str, ...]) -> int:
    """The names' hashes, combined in the iteration order of libstdc++'s ``unordered_set``."""
    table: list[int] = []
    buckets = iter(_BUCKETS)
    size = 1
    for number, name in enumerate(names):
        if number == 0 or number >= size:
            size = next(buckets)
            before, table = table, []
            for name_hash in before:
                _insert(table, name_hash, size)
        _insert(table, _hash(name.encode()), size)
    digest = 0
    for name_hash in table:
        digest = _combined(digest, name_hash)
    return digest


def _insert(table: list[int], value: int, size: int) -> None:
    """Inserts a value at the beginning of its bucket; at the beginning of the table if the bucket is empty."""
    table.insert(next((i for i, entry in enumerate(table) if entry % size == value % size), 0), value)


def _combined(seed: int, value: int) -> int:
    """``c10::hash_combine``."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _64)


def _hash(data: bytes) -> int:
    """libstdc++'s ``std::hash`` of a string: MurmurHash64A."""
    times = 0xC6A4A7935BD1E995
    digest = (0xC70F6907 ^ (len(data) * times)) & _64
    aligned_size = len(data) & ~7
    for offset in range(0, aligned_size, 8):
        part = int.from_bytes(data[offset : offset + 8], "little") * times & _64
        digest = ((digest ^ ((part ^ (part >> 47)) * times & _64)) * times) & _64
    if len(data) > aligned_size:
        digest = ((digest ^ int.from_bytes(data[aligned_size:], "little")) * times) & _64
    digest = ((digest ^ (digest >> 47)) * times) & _64
    return digest ^ (digest >> 47)
