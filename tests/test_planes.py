"""The codec actshard.planes: its page is enough for a decoder, damaged blocks are refused, stores and zarr-python read it."""

from __future__ import annotations

import json
import struct
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import actshard
import actshard._native as _native
from conftest import bits
from test_zarr_shards import LAYERS, WIDTH, check_rows, crc32c, examples, written

DTYPES = ["bfloat16", "float16", "float32", "float64", "uint8"]


def decode_symbols(data: bytes, lengths: NDArray[np.int64], smallest: int, count: int) -> list[int]:
    """One stream, by docs/formats/planes.md."""
    order = sorted((int(length), number) for number, length in enumerate(lengths) if length)
    symbols, code, before = {}, 0, 0
    for length, number in order:
        code <<= length - before
        before = length
        symbols[length, code] = smallest + number
        code += 1
    stream = np.unpackbits(np.frombuffer(data, np.uint8)).tolist()
    plane, at = [], 0
    for _ in range(count):
        code, length = 0, 0
        while (length, code) not in symbols:
            code, length, at = code << 1 | stream[at], length + 1, at + 1
        plane.append(symbols[length, code])
    assert stream[at:] == [0] * (-at % 8)
    return plane


def decode_plainly(block: bytes) -> bytes:
    """A block, by docs/formats/planes.md."""
    magic, length, decoded, row, stored, size, way, kind_of_others, sign = struct.unpack("<4s4I4B", block[:24])
    assert (magic, length) == (b"APL1", len(block))
    index, at = [*range(stored)], 24
    if kind_of_others == 3:
        numbers = np.frombuffer(block, np.uint8 if stored <= 256 else "<u2", decoded // row, at)
        index, at = numbers.tolist(), at + numbers.nbytes
        assert list(dict.fromkeys(index)) == list(range(stored)), "first occurrences are in order"
    n, planes, body = stored * row // size, [], at
    for _ in range(size if way and n else 0):
        kind, at = block[at], at + 1
        if kind < 2:
            taken = n if kind == 0 else 1
            planes.append(np.resize(np.frombuffer(block, np.uint8, taken, at), n))
            at += taken
            continue
        smallest, m = block[at], block[at + 1] + 1
        halves = np.frombuffer(block, np.uint8, -(-m // 2), at + 2)
        lengths = np.stack([halves & 15, halves >> 4], axis=1).reshape(-1)[:m].astype(int)
        at += 2 + len(halves)
        sizes, at, quarter, plane = struct.unpack_from("<4I", block, at), at + 16, -(-n // 4), []
        for k, bytes_of_stream in enumerate(sizes):
            symbols = min((k + 1) * quarter, n) - min(k * quarter, n)
            plane += decode_symbols(block[at : at + bytes_of_stream], lengths, smallest, symbols)
            at += bytes_of_stream
        planes.append(np.array(plane, np.uint8))
    rows = block[body : body + stored * row]
    if planes:
        word = np.dtype(f"<u{size}").type
        values = np.stack(planes, axis=1).reshape(-1).view(word)
        low = values >> word(sign) & word(1)
        values = values & ~(word(1) << word(sign)) | low
        rows = (values >> word(1) | values << word(8 * size - 1)).tobytes()
    rows = b"".join(rows[number * row : (number + 1) * row] for number in index)
    missing = decoded // row - len(index)
    return rows + {0: b"", 1: bytes(row), 2: rows[-row:], 3: b""}[kind_of_others] * missing


def block_of(rows: NDArray[Any]) -> bytes:
    return _native.encode_planes(rows.tobytes(), rows.dtype.itemsize, rows.shape[1])


def rows_of(dtype: str, count: int = 20, width: int = 48) -> NDArray[Any]:
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((count, width)) * np.exp2(rng.integers(-3, 9, width))
    return (abs(rows) if dtype == "uint8" else rows).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def with_zeros(rows: NDArray[Any]) -> NDArray[Any]:
    rows[11:] = 0
    return rows


def with_copies(rows: NDArray[Any]) -> NDArray[Any]:
    rows[11:] = rows[10]
    return rows


def repeated(order: Sequence[int], zeros: Sequence[int] = ()) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def repeat(rows: NDArray[Any]) -> NDArray[Any]:
        rows = rows[list(order)]
        rows[list(zeros)] = 0
        return rows

    return repeat


def alike(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows that differ in the middle only, some of them equal."""
    middle = np.arange(len(rows)) % 7
    rows[:] = 1
    rows[:, 20] = middle
    return rows


KINDS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "as they are": lambda rows: rows,
    "zeros after them": with_zeros,
    "copies after them": with_copies,
    "copies anywhere": repeated([0, 1, 2, 1, 0, 3, 3, 1, 4, 0, 5, 6, 2, 7]),
    "a copy": repeated([*range(17), 4]),
    "zeros between": repeated([*range(12)], zeros=[0, 5, 6]),
    "copies, then zeros": repeated([0, 1, 0, 1, 2, 0, 0, 0], zeros=[6, 7]),
    "zeros between and after": repeated([0, 1, 0, 1, 2, 0, 0, 0], zeros=[2, 6, 7]),
    "copies, then copies of the last": repeated([0, 1, 0, 2, 1, 1, 1, 1]),
    "alike": alike,
    "one row": lambda rows: rows[:1],
    "no row": lambda rows: rows[:0],
    "few values": lambda rows: rows[:3, :1],
    "zeros": np.zeros_like,
    "one value": lambda rows: np.full_like(rows, 3),
    "rounded": lambda rows: rows.astype(np.int8).astype(rows.dtype),
    "negative zeros": lambda rows: -np.zeros_like(rows),
    "any bits": lambda rows: (
        np.random.default_rng(1).integers(0, 256, rows.nbytes, "u1").view(rows.dtype).reshape(rows.shape)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_page_is_enough_for_a_decoder_and_all_bits_return(dtype: str, kind: str) -> None:
    rows = KINDS[kind](rows_of(dtype))
    block = block_of(rows)
    assert len(block) <= rows.nbytes + 24
    assert _native.decode_planes(block, rows.nbytes) == rows.tobytes()
    assert decode_plainly(block) == rows.tobytes()


@pytest.mark.parametrize(
    ("dtype", "kind", "most"),
    [
        ("bfloat16", "as they are", 0.77),
        ("float32", "as they are", 0.88),
        ("bfloat16", "zeros after them", 0.45),
        ("bfloat16", "copies after them", 0.45),
        ("bfloat16", "copies anywhere", 0.45),
        ("float32", "copies anywhere", 0.51),
        ("bfloat16", "zeros between", 0.66),
        ("bfloat16", "copies, then zeros", 0.4),
        ("float32", "zeros", 0.004),
        ("float32", "one value", 0.004),
    ],
)
def test_rows_take_less_than_their_bytes(dtype: str, kind: str, most: float) -> None:
    rows = KINDS[kind](rows_of(dtype, 20, 768))
    assert len(block_of(rows)) <= most * rows.nbytes


def test_float32_rows_that_were_bfloat16_take_as_many_bytes_as_bfloat16() -> None:
    rows = rows_of("bfloat16", 32, 768)
    assert len(block_of(rows.astype(np.float32))) <= len(block_of(rows)) + 8


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "byte 0: expected 'APL1'"),
        (4, b"\x00", "byte 4: expected a block of [0-9]+ bytes, found"),
        (8, b"\xff\xff\xff\xff", "byte 8: expected a decoded length below 2\\^31"),
        (12, bytes(4), "byte 12: expected bytes of a row"),
        (12, b"\x07\x00\x00\x00", "byte 12: expected bytes of a row"),
        (16, b"\xff", "byte 16: expected at most 20 stored rows, found 255"),
        (20, b"\x03", "byte 20: expected values of 1, 2, 4 or 8 bytes, found 3"),
        (21, b"\x02", "byte 21: expected way 0 or 1, found 2"),
        (22, b"\x01", "byte 22: expected a kind of the 0 rows beyond 20 stored ones, found 1"),
        (22, b"\x03", "byte 22: expected a kind of the 0 rows beyond 20 stored ones, found 3"),
        (22, b"\x04", "byte 22: expected a kind of the 0 rows beyond 20 stored ones, found 4"),
        (23, b"\x10", "byte 23: expected a bit up to 15, found 16"),
        (24, b"\x03", "byte 24: expected a plane of kind 0, 1 or 2, found 3"),
    ],
)
def test_each_damaged_field_is_named_with_its_byte(at: int, value: bytes, message: str) -> None:
    block = block_of(rows_of("bfloat16"))
    damaged = block[:at] + value + block[at + len(value) :]
    with pytest.raises(actshard.FormatError, match=rf"actshard\.planes: {message}"):
        _native.decode_planes(damaged, 1 << 20)


def test_an_index_has_one_form() -> None:
    block = block_of(repeated([0, 1, 2, 1, 0, 3])(rows_of("bfloat16")))
    assert block[16:20] + block[22:23] == b"\x04\x00\x00\x00\x03"
    assert block[24:30] == b"\x00\x01\x02\x01\x00\x03"
    for index, message in [
        (b"\x01\x00\x02\x01\x00\x03", "byte 24: expected a stored row up to 0, found 1"),
        (b"\x00\x02\x01\x01\x00\x03", "byte 25: expected a stored row up to 1, found 2"),
        (b"\x00\x01\x02\x01\x00\xff", "byte 29: expected a stored row up to 3, found 255"),
        (b"\x00\x01\x02\x03\x00\x04", "byte 29: expected a stored row up to 3, found 4"),
        (b"\x00\x01\x02\x01\x00\x02", "byte 24: expected an index of 4 stored rows, found 3"),
    ]:
        with pytest.raises(actshard.FormatError, match=rf"actshard\.planes: {message}"):
            _native.decode_planes(block[:24] + index + block[30:], 1 << 20)
    # Other copies are valid; as many rows as stored ones, or an index without its rows, are not.
    assert decode_plainly(block[:24] + b"\x00\x01\x02\x03\x00\x03" + block[30:])
    with pytest.raises(actshard.FormatError, match="byte 22: expected a kind of the 0 rows beyond 4 stored ones"):
        _native.decode_planes(block[:8] + struct.pack("<I", 4 * 96) + block[12:], 1 << 20)
    with pytest.raises(actshard.FormatError, match="byte 24: the block ends in the index of its rows"):
        _native.decode_planes(block[:4] + struct.pack("<II", 29, 576) + block[12:29], 1 << 20)


@pytest.mark.parametrize("distinct", [256, 257])
def test_an_index_of_many_rows_has_numbers_of_two_bytes(distinct: int) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (distinct, 64), "u1").repeat(2, axis=0)
    block = block_of(rows)
    assert len(block) == 24 + 2 * distinct * (1 if distinct == 256 else 2) + 64 * distinct
    assert _native.decode_planes(block, rows.nbytes) == rows.tobytes() == decode_plainly(block)
    if distinct == 257:  # a number of one byte would be too small for the last row
        cut = block[:4] + struct.pack("<I", len(block) - 514) + block[8:24] + block[24:538:2] + block[1052:]
        with pytest.raises(actshard.FormatError, match=r"actshard\.planes: byte"):
            _native.decode_planes(cut, rows.nbytes)


def test_rows_whose_copies_take_less_than_an_index_have_none() -> None:
    rows = np.ones((4096, 4))
    rows[[0, -1]] = 1.5
    block = block_of(rows)
    assert block[22] == 0
    assert _native.decode_planes(block, rows.nbytes) == rows.tobytes()


def test_a_block_is_cut_nowhere_and_decodes_within_the_limit() -> None:
    size = rows_of("bfloat16").nbytes
    for kind in ("as they are", "copies anywhere"):
        block = block_of(KINDS[kind](rows_of("bfloat16")))
        for length in range(len(block)):
            with pytest.raises(actshard.FormatError, match=r"actshard\.planes"):
                _native.decode_planes(block[:length], size)
    block = block_of(rows_of("bfloat16"))
    with pytest.raises(actshard.FormatError, match=f"expected at most {size - 1} decoded bytes, found {size}"):
        _native.decode_planes(block, size - 1)


@pytest.mark.parametrize(("typesize", "width"), [(3, 2), (0, 2), (2, 0), (2, 5), (2, 1 << 63)])
def test_rows_that_are_no_rows_are_refused(typesize: int, width: int) -> None:
    with pytest.raises(ValueError, match=r"actshard\.planes: (typesize|width): expected"):
        _native.encode_planes(bytes(12), typesize, width)


def pack_store(path: Path) -> None:
    """Packs the inner chunks of a Zarr 3 store, with a checksum after each. Removes its record, which has other checksums."""
    (path / ".actshard-record.json").unlink()
    folder = path / "arrays/activations"
    meta = json.loads((folder / "zarr.json").read_text())
    sharding = meta["codecs"][0]["configuration"]
    size = np.dtype(getattr(ml_dtypes, meta["data_type"], meta["data_type"])).itemsize
    planes = {"name": "actshard.planes", "configuration": {"typesize": size, "width": WIDTH}}
    sharding["codecs"] += [planes, {"name": "crc32c"}]
    shard, inner = meta["chunk_grid"]["configuration"]["chunk_shape"], sharding["chunk_shape"]
    entries = int(np.prod([a // b for a, b in zip(shard, inner, strict=True)]))
    for file in folder.glob("c.*"):
        data, body = file.read_bytes(), b""
        index = np.frombuffer(data[-16 * entries - 4 : -4], "<u8").reshape(entries, 2).copy()
        for number, (offset, length) in enumerate(index.tolist()):
            if length == 2**64 - 1:
                continue
            block = _native.encode_planes(data[offset : offset + length], size, WIDTH)
            block += struct.pack("<I", crc32c(block))
            index[number] = len(body), len(block)
            body += block
        file.write_bytes(body + index.tobytes() + struct.pack("<I", crc32c(index.tobytes())))
    (folder / "zarr.json").write_text(json.dumps(meta))
    root = json.loads((path / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"]["arrays/activations"] = meta
    (path / "zarr.json").write_text(json.dumps(root))


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_packed_store_has_the_rows_of_the_plain_one(tmp_path: Path, dtype: str) -> None:
    rows = examples(np.random.default_rng(5).integers(0, 40, 12).tolist(), dtype)
    path = written(tmp_path / "d", rows, version=3, shard_bytes=4000, chunk_tokens=16)
    plain = [bits(batch.activations.copy()) for batch in actshard.open(path).stream(5, 8, shuffle="exact", seed=3)]
    pack_store(path)
    check_rows(path, rows)
    store = actshard.open(path)
    packed = [bits(batch.activations.copy()) for batch in store.stream(5, 8, shuffle="exact", seed=3)]
    assert all(np.array_equal(a, b) for a, b in zip(plain, packed, strict=True))
    number = max(range(len(rows)), key=lambda i: rows[i].shape[1])
    tokens = np.array([3, 0, rows[number].shape[1] - 1])
    assert np.array_equal(bits(store.gather(2, number, tokens)), bits(rows[number][0][tokens]))


@pytest.mark.parametrize("memory", ["1GiB", 0])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_some_rows_of_many_packed_chunks_are_those_written(tmp_path: Path, dtype: str, memory: int | str) -> None:
    """Each time: rows are decoded apart, then chunks as a whole, then cached ones are read."""
    rows = examples([40] * 12, dtype)
    path = written(tmp_path / "d", rows, version=3, shard_bytes=4000, chunk_tokens=16)
    pack_store(path)
    store = actshard.open(path, decoded_memory=memory)
    rng = np.random.default_rng(3)
    picks, tokens = rng.integers(0, len(rows), 90), rng.integers(0, 40, 90)
    expected = np.stack([rows[i][0][t] for i, t in zip(picks, tokens, strict=True)])
    for _ in range(3):
        assert np.array_equal(bits(store.gather(LAYERS[0], picks, tokens)), bits(expected))
    wide = store.gather(LAYERS[0], picks, tokens, dtype="float64")
    assert np.array_equal(wide, expected.astype(np.float64))
    for epoch in range(3):
        for batch in store.stream(LAYERS[1], 50, shuffle="window", seed=3, epoch=epoch, memory="64KiB"):
            found = zip(batch.activations, batch.examples, batch.tokens, strict=True)
            assert all(np.array_equal(bits(row), bits(rows[i][1][t])) for row, i, t in found)


def test_a_damaged_packed_chunk_is_an_error_and_a_finding(tmp_path: Path) -> None:
    path = written(tmp_path / "d", examples([20, 20]), version=3)
    pack_store(path)
    file = next((path / "arrays/activations").glob("c.*"))
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    with pytest.raises(actshard.FormatError, match=r"byte 0: cannot decode this chunk: .*checksum"):
        actshard.open(path).sequence(0, LAYERS[0])
    assert not actshard.verify(path, deep=True).ok


def test_a_damaged_chunk_is_an_error_of_rows_that_are_decoded_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "d", examples([20] * 40), version=3)
    pack_store(path)
    file = next((path / "arrays/activations").glob("c.*"))
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    with pytest.raises(actshard.FormatError, match=r"byte 0: cannot decode this chunk: .*checksum"):
        actshard.open(path).gather(LAYERS[0], np.arange(40), np.full(40, 3))


def test_a_configuration_needs_both_fields(tmp_path: Path) -> None:
    path = written(tmp_path / "d", examples([3]), version=3)
    pack_store(path)
    for file in (path / "zarr.json", path / "arrays/activations/zarr.json"):
        file.write_text(file.read_text().replace(f', "width": {WIDTH}', ""))
    with pytest.raises(actshard.ActshardError, match=r"width|actshard\.planes"):
        actshard.open(path).sequence(0, LAYERS[0])


def test_the_entry_point_names_the_class() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["zarr.codecs"] == {"actshard.planes": "actshard.formats.zarr.codec:PlanesCodec"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_zarr_python_reads_and_writes_it(tmp_path: Path, dtype: str) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    from actshard.formats.zarr.codec import PlanesCodec

    zarr.registry.register_codec("actshard.planes", PlanesCodec)
    rows = examples([20, 7, 33], dtype)
    path = written(tmp_path / "d", rows, version=3, chunk_tokens=16)
    pack_store(path)
    array = zarr.open_group(path, mode="r")["arrays/activations"]
    for number, example in enumerate(rows):
        assert np.array_equal(bits(array[number, :, : example.shape[1]]), bits(example))
    # zarr-python's own writing, with typesize and width from the array.
    values = array[:]
    attributes: dict[str, Any] = {"chunks": (1, 1, 16, WIDTH), "shards": (3, 1, 48, WIDTH), "dtype": dtype}
    folder = path / "arrays/activations"
    for file in folder.iterdir():
        file.unlink()
    names = {"name": "default", "separator": "."}
    codecs = [PlanesCodec(), zarr.codecs.Crc32cCodec()]
    copy = zarr.create_array(
        folder, shape=values.shape, compressors=codecs, chunk_key_encoding=names, overwrite=True, **attributes
    )
    copy[:] = values
    assert np.array_equal(bits(zarr.open_array(folder, mode="r")[:]), bits(values))
    meta = json.loads((folder / "zarr.json").read_text())
    planes = meta["codecs"][0]["configuration"]["codecs"][1]
    assert planes == PlanesCodec(np.dtype(dtype).itemsize, WIDTH).to_dict()
    root = json.loads((path / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"]["arrays/activations"] = meta
    (path / "zarr.json").write_text(json.dumps(root))
    check_rows(path, rows)


@pytest.mark.parametrize(
    "fields", [{}, {"typesize": 2}, {"typesize": 2, "width": 0}, {"typesize": True, "width": 3}, None]
)
def test_the_class_for_zarr_python_refuses_other_configurations(fields: dict[str, Any] | None) -> None:
    pytest.importorskip("zarr", minversion="3")
    from actshard.formats.zarr.codec import PlanesCodec

    with pytest.raises(ValueError, match=r"actshard\.planes"):
        PlanesCodec.from_dict({"name": "actshard.planes", "configuration": fields})
