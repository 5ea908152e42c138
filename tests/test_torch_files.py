"""Files of ``torch.save`` are read without torch, bit for bit, and hostile ones are refused in one line."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actshard.base.containers import RefusedObject, StoredArray, TorchFile, read_torch
from actshard.base.errors import ActshardError, FormatError, UnsafePickleError, UnsupportedError
from actshard.base.location import Location
from conftest import GOLDEN

ZOO = GOLDEN / "containers" / "pt_zoo"
HOSTILE = GOLDEN / "containers" / "hostile"
EXPECTED: dict[str, dict[str, Any]] = json.loads((ZOO / "expected.json").read_text())
CASES: dict[str, dict[str, Any]] = json.loads((HOSTILE / "cases.json").read_text())
TORCH_CASES = {name: case for name, case in CASES.items() if case["file"].endswith((".pt", ".gz"))}


def read(path: Path) -> TorchFile:
    (file,) = read_torch([Location.at(path)])
    return file


def at(file: TorchFile, path: str) -> Any:
    return file.find(path.split(".")) if path else file.value


@pytest.mark.parametrize("name", EXPECTED)
def test_every_entry_of_the_zoo_has_the_values_that_were_saved(name: str) -> None:
    file = read(ZOO / name)
    with np.load(ZOO / "expected.npz") as arrays:
        for path, entry in EXPECTED[name].items():
            found = at(file, path)
            if "array" not in entry:
                want = int(entry["value"]) if entry.get("kind") == "int as text" else entry["value"]
                assert (list(found) if isinstance(found, tuple) else found) == want, path
                continue
            array = file.array(found)
            assert list(array.shape) == entry["shape"], path
            assert str(array.dtype) == entry["dtype"], path
            bits = entry["array"] + "_bits"
            want = arrays[bits if bits in arrays else entry["array"]]
            assert array.tobytes() == np.ascontiguousarray(want).tobytes(), path


@pytest.mark.parametrize("name", TORCH_CASES)
def test_a_hostile_file_is_refused_in_one_line_or_read_right(name: str) -> None:
    case = TORCH_CASES[name]
    values: dict[str, Any] | None = None
    error: ActshardError | None = None
    tracemalloc.start()
    try:
        file = read(HOSTILE / case["file"])
        values = {key: file.array(file.find([key])).tolist() for key in case.get("values", {})}
        if case["expect"] == "refuse":
            assert file.refused.keys() == {"h"}
            file.array(file.find(["h"]))
        _ = file.value
    except ActshardError as raised:
        error = raised
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    if error is None:
        assert case["expect"] != "refuse"
        assert values == case.get("values", {})
    else:
        assert case["expect"] != "ok"
        assert "\n" not in str(error)
        assert case["file"] in str(error)


def test_no_code_in_a_file_runs_or_is_imported() -> None:
    for name in ("reduce_os_getcwd", "stack_global_getcwd", "dotted_under_torch", "newobj_build", "getattr_chain"):
        file = read(HOSTILE / CASES[name]["file"])
        with pytest.raises(UnsafePickleError, match="nothing was imported or run") as caught:
            file.array(file.value["h"])
        offset = file.refused["h"].global_at
        assert caught.value.offset == offset
        assert offset is not None
        assert (HOSTILE / CASES[name]["file"]).read_bytes()[offset : offset + 1] in b"c\x93", "the opcode with the name"
    file = read(HOSTILE / CASES["backward_hooks_code"]["file"])
    with pytest.raises(UnsupportedError, match="a tensor with hooks"):
        file.array(file.value["h"])
    assert read(HOSTILE / CASES["lookup_only"]["file"]).find(["t"]).shape == [2, 3]


def test_places_are_those_of_the_bytes_in_the_file() -> None:
    path = ZOO / "dtypes.pt"
    file = read(path)
    stored = path.read_bytes()
    for key in EXPECTED["dtypes.pt"]:
        place = file.find([key])
        assert isinstance(place, StoredArray)
        assert place.deflated is None
        assert not place.swapped
        array = file.array(place)
        assert stored[place.offset : place.offset + array.nbytes] == array.tobytes()
        assert place.offset % 64 == 0


def test_a_saved_slice_brings_its_whole_storage() -> None:
    whole, tensors = read(ZOO / "slice_of_large_base.pt").sizes
    assert whole > 30 * tensors
    assert read(ZOO / "shared.pt").sizes == (32, 32)


def test_strides_of_zero_do_not_allocate_what_they_claim() -> None:
    file = read(HOSTILE / "huge_expand.pt")
    (place,) = (value for value in file.value.values() if isinstance(value, StoredArray))
    with pytest.raises(UnsupportedError, match="strides of 0"):
        file.array(place)


def test_an_array_of_strings_is_refused_without_its_neighbours() -> None:
    file = read(ZOO / "numpy_inside.pt")
    refused = [key for key, value in file.value.items() if isinstance(value, RefusedObject)]
    for key in refused:
        with pytest.raises(UnsupportedError, match="elements of type"):
            file.array(file.value[key])
    assert file.array(file.find(["c"])).shape == (3, 4)


def test_a_missing_key_lists_those_that_are_there() -> None:
    file = read(ZOO / "nested.pt")
    with pytest.raises(FormatError, match=r"list: expected 'nothing', found 2 items"):
        file.find(["list", "nothing"])
    with pytest.raises(FormatError, match=r"the saved object: expected 'x', found the keys 'list'"):
        file.find(["x"])


def test_many_files_are_read_at_once_in_order() -> None:
    names = [name for name in EXPECTED if "h" in EXPECTED[name]] * 20
    files = read_torch([Location.at(ZOO / name) for name in names])
    assert [file.path.name for file in files] == names


def test_an_archive_that_was_zipped_again_is_read(tmp_path: Path) -> None:
    """Deflated and unaligned, as other tools write it."""
    again = tmp_path / "again.pt"
    with zipfile.ZipFile(ZOO / "dtypes.pt") as source, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    plain, packed = read(ZOO / "dtypes.pt"), read(again)
    for key in EXPECTED["dtypes.pt"]:
        assert packed.find([key]).deflated is not None
        assert packed.array(packed.find([key])).tobytes() == plain.array(plain.find([key])).tobytes()
