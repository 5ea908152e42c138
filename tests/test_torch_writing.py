"""Archives of torch.save written without torch: byte for byte those of torch, and read back as they were written."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard.base.containers import RefusedObject, StoredArray, TorchFile, read_torch
from actshard.base.location import Location
from actshard.formats import torch_zip
from actshard.formats.torch_zip import NewTensor, TorchArchive, torch_bytes
from conftest import GOLDEN

DTYPES = [
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_),
]
SAVED_BY_TORCH = [
    *("specforge_eagle3", "specforge_dspark", "specforge_dflash_gz", "modelopt_hf", "angelslim_eagle3"),
    *("eagle_v1_vicuna", "eagle_v1_qwen2"),
]
"""Golden folders whose tensors are contiguous, one per storage."""


def opened(path: Path) -> TorchFile:
    (file,) = read_torch([Location.at(path)])
    return file


def plain(file: TorchFile, value: Any) -> Any:
    """A file's value, with arrays for tensors."""
    assert not isinstance(value, RefusedObject)
    if isinstance(value, StoredArray):
        return file.array(value)
    if isinstance(value, dict):
        return {key: plain(file, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(file, each) for each in value)
    return value


def written(path: Path, value: Any, root: str = "archive") -> Any:
    """What is read of a file with this value."""
    path.write_bytes(torch_bytes(value, root))
    file = opened(path)
    assert file.damaged() == []
    return plain(file, file.value)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        alike = isinstance(found, np.ndarray) and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return alike and found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same, found, wanted))
    return type(found) is type(wanted) and (found == wanted or found != found)


@pytest.mark.parametrize("golden", SAVED_BY_TORCH)
def test_files_are_those_of_torch_byte_for_byte(golden: str) -> None:
    """Names and checksums of records, paddings, the directory and the serialization id too."""
    files = [path for pattern in ("*.ckpt", "*.pt", "*.ckpt.gz") for path in (GOLDEN / "draft" / golden).rglob(pattern)]
    assert files
    for path in files:
        file, raw = opened(path), path.read_bytes()
        if path.suffix == ".gz":
            import gzip

            raw = gzip.decompress(raw)
        root = zipfile.ZipFile(io.BytesIO(raw)).namelist()[0].partition("/")[0]
        assert torch_bytes(plain(file, file.value), root) == raw, path


def test_empty_tensors_and_scalars_are_those_of_torch_too() -> None:
    path = GOLDEN / "containers/pt_zoo/shapes.pt"
    file = opened(path)
    assert torch_bytes(plain(file, file.value), "shapes") == path.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_is_read_as_it_was_written(tmp_path: Path, dtype: Any) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 240, np.uint8)
    array = (raw % 2).astype(np.bool_) if dtype is np.bool_ else raw.view(dtype)
    for shape in [(-1,), (3, -1), (2, 1, -1), (2, 3, 1, 5, -1)]:
        value = {"x": array.reshape(shape)[..., ::1] if array.size % np.prod(shape[:-1] or 1) == 0 else array}
        assert same(written(tmp_path / "x.pt", value), value)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.sampled_from(
        [255, 256, 65535, 65536, -1, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1, -128, -(1 << 63)]
    )
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from([np.arange(6, dtype=np.int64).reshape(2, 3), np.zeros((0, 4), np.float32), np.array(2.5)]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.integers(0, 300), inner, max_size=5
        )
    ),
    max_leaves=20,
)


@settings(max_examples=200)
@given(VALUES)
def test_nested_values_are_read_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert same(written(tmp_path_factory.mktemp("x") / "x.pt", value, "näme"), value)


def test_many_items_shared_objects_and_ordered_dicts(tmp_path: Path) -> None:
    shared = np.arange(5, dtype=np.float32)
    value = {
        "long": list(range(2500)),
        "wide": {f"key {i}": i for i in range(1001)},
        "twice": [shared, shared],
        "ordered": OrderedDict(a=1, b=np.zeros(2, np.int64)),
        "tensors": [np.full(3, i, np.int16) for i in range(300)],
    }
    found = written(tmp_path / "x.pt", value)
    assert same(found, {**value, "ordered": dict(value["ordered"])})  # type: ignore[call-overload]  # a dict of mixed values
    names = zipfile.ZipFile(tmp_path / "x.pt").namelist()
    assert sum("/data/" in name for name in names) == 1 + 1 + 300  # a shared tensor has one record


def test_records_lie_at_multiples_of_64_and_pass_a_zip_reader(tmp_path: Path) -> None:
    value = {f"{i}": np.arange(i, dtype=np.uint8) for i in range(70)}
    written(tmp_path / "x.pt", value)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
    file = opened(tmp_path / "x.pt")
    assert {array.offset % 64 for key, array in file.value.items() if key != "0"} == {0}


@pytest.mark.parametrize("limit", [1, 500, 3000])
def test_records_beyond_32_bits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A low limit makes small files use the fields of large ones: 64-bit sizes, offsets, or both."""
    monkeypatch.setattr(torch_zip, "_LARGE", limit)
    value = {"a": np.arange(400, dtype=np.int64), "b": np.arange(3, dtype=np.int8), "c": np.zeros(0)}
    assert same(written(tmp_path / "x.pt", value), value)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize(
    "value",
    [
        {"x": object()},
        {"x": {1, 2}},
        [np.zeros(2, np.complex64)],
        [np.zeros(2, ">f4")],
        [np.array(["a"])],
        [1 << 3000],
    ],
)
def test_values_that_torch_files_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(actshard.ActshardError, match=r"expected|not supported"):
        torch_bytes(value)


def test_values_that_contain_themselves_or_are_nested_too_deep_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for each in (value, deep):
        with pytest.raises(actshard.ArgumentError, match="nested at most"):
            torch_bytes(each)


def test_the_elements_are_the_callers() -> None:
    """The archive's places are those of its tensors, and everything else is written around them."""
    archive = TorchArchive({"a": NewTensor("BF16", (2, 3)), "b": NewTensor("I64", (4,))})
    into = np.full(archive.size, 255, np.uint8)
    a, b = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3), np.arange(4)
    for (start, size), array in zip(archive.places, (a, b), strict=True):
        into[start : start + size] = array.reshape(-1).view(np.uint8)
    archive.seal(into)
    assert into.tobytes() == torch_bytes({"a": a, "b": b})


@pytest.mark.peers
@pytest.mark.parametrize("limit", [None, 500])
def test_torch_loads_what_is_written_and_saves_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        str(kind): torch.arange(24).reshape(2, 3, 4).to(kind)
        for kind in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
            torch.bool,
        )
    }
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5), "none": torch.zeros(3, 0, 2)}
    saved = {**tensors, "list": [tensors["empty"], 1, 1 << 40, -3, 2.5, None, "text", (1, 2, 3, 4), True]}
    saved["many"] = [torch.full((2,), i) for i in range(200)]
    saved["ordered"] = OrderedDict(a=1, b=[])
    torch.save(saved, tmp_path / "theirs.pt")
    file = opened(tmp_path / "theirs.pt")
    value = plain(file, file.value)
    value["list"][0] = value["empty"]  # the same tensor twice
    value["ordered"] = OrderedDict(value["ordered"])
    if limit is None:
        made = torch_bytes(value, "theirs")
        assert made == (tmp_path / "theirs.pt").read_bytes()
    else:
        monkeypatch.setattr(torch_zip, "_LARGE", limit)
        made = torch_bytes(value, "theirs")
    (tmp_path / "ours.pt").write_bytes(made)
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=mmap)
        assert list(loaded) == list(saved)
        for key, tensor in tensors.items():
            assert loaded[key].dtype == tensor.dtype
            assert loaded[key].is_contiguous()
            assert loaded[key].stride() == tensor.stride()
            assert torch.equal(loaded[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert loaded["list"][1:] == saved["list"][1:]
        assert all(torch.equal(a, b) for a, b in zip(loaded["many"], saved["many"], strict=True))
