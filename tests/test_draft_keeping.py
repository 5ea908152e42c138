"""Kept indexes of folders of draft-model examples: what is read with one is what is read without, and none is trusted."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import Faults
from actshard.formats import draft_examples, draft_torch, kept
from conftest import bits
from draft_files import DRAFT, Expected, check_reads, copied

GOLDEN = ["specforge_eagle3", "specforge_dspark", "modelopt_hf", "modelopt_vllm", "angelslim_eagle3", "eagle_v1_vicuna"]


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own; files count as settled at once, and few files as many."""
    monkeypatch.setattr(draft_examples, "LEAST_FILES", 2)
    monkeypatch.setenv("ACTSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SETTLED_NS", -(1 << 62))
    return tmp_path / "cache-index"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of files of the openings that parsed them."""
    counted: list[int] = []
    original = draft_torch.DraftDataset.read

    def read(self: draft_torch.DraftDataset, limit: int, faults: Faults) -> None:
        counted.append(len(self.paths))
        original(self, limit, faults)

    monkeypatch.setattr(draft_torch.DraftDataset, "read", read)
    return counted


def read(path: Path, **more: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **more)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_folder_is_parsed_once_and_read_bit_for_bit_again(
    tmp_path: Path, parsed: list[int], name: str, io: str
) -> None:
    """Also strided views, ranks, values of files; and with other names of layers, which are no part of the index."""
    path = copied(DRAFT / name, tmp_path / name)
    first = read(path, io=io)
    assert len(parsed) == 1
    again = read(path, io=io)
    assert len(parsed) == 1
    assert (again.layers, again.d_model, again.dtype, again.metadata) == (
        first.layers,
        first.d_model,
        first.dtype,
        first.metadata,
    )
    assert again.table.equals(first.table)
    check_reads(again, Expected(DRAFT / name))
    if len(first.layers) > 1:
        renamed = read(path, layout={"layers": [f"x{i}" for i in range(len(first.layers) - 1)]})
        assert renamed.layers[0] == "x0"
        assert np.array_equal(bits(renamed.sequence(1, "x0")), bits(first.sequence(1, 0)))
    assert len(parsed) == 1


@pytest.mark.parametrize("change", ["replaced", "added", "removed", "renamed", "touched"])
def test_a_changed_folder_is_parsed_again(tmp_path: Path, parsed: list[int], change: str) -> None:
    path = copied(DRAFT / "specforge_eagle3", tmp_path / "cache")
    read(path)
    one, other = path / "rows_0-5/data_1.ckpt", path / "rows_5-10/data_6.ckpt"
    if change == "replaced":
        shutil.copy(other, one)
    elif change == "added":
        shutil.copy(other, path / "rows_10-15/data_12.ckpt")
    elif change == "removed":
        one.unlink()
    elif change == "renamed":
        one.rename(path / "rows_0-5/data_13.ckpt")
    else:
        one.write_bytes(one.read_bytes())
    found = read(path)
    assert len(parsed) == 2
    with_none = read(path, cache=False)
    assert len(parsed) == 3
    for i in range(len(with_none)):
        assert np.array_equal(bits(found.sequence(i, "last")), bits(with_none.sequence(i, "last")))
    assert found.table.equals(with_none.table)


@pytest.mark.parametrize("case", ["specforge_dflash_gz", "angelslim_truncated", "specforge_deflated"])
def test_folders_with_damaged_gzipped_or_deflated_files_are_parsed_each_time(
    tmp_path: Path, parsed: list[int], case: str, monkeypatch: pytest.MonkeyPatch, settled: Path
) -> None:
    monkeypatch.setattr(draft_examples, "LEAST_FILES", 0)
    source = DRAFT / case if (DRAFT / case).exists() else DRAFT / "errors" / case
    path = copied(source, tmp_path / "cache")
    for count in (1, 2):
        read(path)
        assert len(parsed) == count
    assert not settled.exists()


def test_few_files_options_and_verify(tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(DRAFT / "specforge_eagle3", tmp_path / "cache")
    read(path)
    assert actshard.verify(path).ok
    assert len(parsed) == 3  # the check, and its opening
    read(path)
    assert len(parsed) == 3
    monkeypatch.setenv("ACTSHARD_INDEX", "0")
    read(path)
    monkeypatch.delenv("ACTSHARD_INDEX")
    read(path, cache=False)
    monkeypatch.setattr(draft_examples, "LEAST_FILES", 256)
    read(path)
    assert len(parsed) == 6


def indexed(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """What is kept of a folder of three parts and twelve files."""
    from actshard.base.location import Location
    from actshard.formats.contents import Options
    from actshard.formats.specforge import FOLDER

    dataset = FOLDER.dataset(Location.at(path), Options("pread"))
    assert dataset.keys is not None
    found = draft_examples.stored_of(dataset.keys, dataset.examples)
    assert found is not None
    return found


def test_an_index_with_impossible_numbers_is_not_used() -> None:
    """Every header field and array, one at a time."""
    from actshard.formats.specforge import FOLDER

    header, arrays = indexed(DRAFT / "specforge_eagle3")
    n = len(arrays[0])

    def back(header: dict[str, Any], arrays: list[Any]) -> Any:
        return draft_examples.restored(FOLDER.kinds, n, json.loads(json.dumps(header)), arrays)

    assert back(header, arrays) is not None
    for name, values in {
        "kind": ["dflash", "other", 3, None],
        "values": [None, [], {"a": [1]}, {"a": [[]] * n}],
        "parts": [
            *(
                [],
                None,
                {},
                header["parts"][:-1],
                header["parts"][1:],
                [*header["parts"], header["parts"][0]],
                [["aux"]],
            ),
            *(
                [[*part[:2], width] if k == 0 else part for k, part in enumerate(header["parts"])]
                for width in (0, -1, 1.5, 1 << 40)
            ),
            [[part[0], "I64", part[2]] if k == 0 else part for k, part in enumerate(header["parts"])],
        ],
    }.items():
        for value in values:
            assert back({**header, name: value}, arrays) is None, (name, value)
    for k, array in enumerate(arrays):
        for bad in (array[:-1], array.astype(np.int64), np.full_like(array, np.iinfo(array.dtype).max)):
            if k == 0 and bad.dtype == array.dtype and len(bad) == n:
                continue  # any number of tokens: rows are checked against the file
            assert back(header, [*arrays[:k], bad, *arrays[k + 1 :]]) is None, (k, bad)
    assert back(header, [np.zeros_like(arrays[0]), *arrays[1:]]) is None
    assert back(header, arrays[:-1]) is None


def test_rows_outside_of_files_are_errors(tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(DRAFT / "specforge_eagle3", tmp_path / "cache")
    header, arrays = indexed(path)
    far = [arrays[0], np.full_like(arrays[1], 1 << 30), *arrays[2:]]
    monkeypatch.setattr(kept.KeptIndex, "load", lambda self: (header, far))
    for io in ("mmap", "pread"):
        with pytest.raises(actshard.ActshardError):
            read(path, io=io).sequence(3, 0)
    many = [np.full_like(arrays[0], 1 << 31), *arrays[1:]]
    monkeypatch.setattr(kept.KeptIndex, "load", lambda self: (header, many))
    with pytest.raises(actshard.ActshardError):
        read(path).sequence(3, "last")
    assert parsed == [len(arrays[0])]


# -- speculators -------------------------------------------------------------------------------------------------------


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of files of the openings of speculators' data that read their headers."""
    from actshard.formats.speculators import read
    from actshard.formats.speculators import read as keeping

    counted: list[int] = []
    original = read.all_states

    def all_states(paths: Any, *more: Any, **options: Any) -> Any:
        counted.append(len(paths))
        return original(paths, *more, **options)

    monkeypatch.setattr(keeping, "LEAST_FILES", 2)
    monkeypatch.setattr(read, "all_states", all_states)
    return counted


def test_training_data_of_speculators_are_parsed_once(tmp_path: Path, headers: list[int], io: str) -> None:
    path = copied(DRAFT / "speculators_bf16", tmp_path / "rows")
    first, again = read(path, io=io), read(path, io=io)
    assert headers == [6]
    assert (again.layers, again.d_model, again.dtype) == (first.layers, first.d_model, first.dtype)
    check_reads(again, Expected(DRAFT / "speculators_bf16"))
    assert actshard.verify(path, deep=True).ok
    assert headers == [6, 6]


@pytest.mark.parametrize("change", ["states", "rows"])
def test_changed_training_data_of_speculators_are_parsed_again(tmp_path: Path, headers: list[int], change: str) -> None:
    """The token ids of rows and files are compared again, also if only the rows changed."""
    import pyarrow as pa

    path = copied(DRAFT / "speculators_bf16", tmp_path / "rows")
    read(path)
    if change == "states":
        shutil.copy(path / "hidden_states/hs_1.safetensors", path / "hidden_states/hs_2.safetensors")
    else:
        file = path / "data-00000-of-00001.arrow"
        table = pa.ipc.open_stream(file.read_bytes()).read_all()
        ids = table["input_ids"].to_pylist()
        ids[2][0] += 1
        table = table.set_column(
            table.schema.get_field_index("input_ids"), "input_ids", pa.array(ids, table["input_ids"].type)
        )
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    for count in (2, 3):  # unusable states are not kept
        with pytest.raises(actshard.FormatError, match="of another row"):
            read(path).sequence(2, 0)
        assert len(headers) == count


def test_scaled_states_and_impossible_numbers_are_not_used(
    tmp_path: Path, headers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(DRAFT / "speculators_fp8", tmp_path / "scaled")
    read(path), read(path)
    assert len(headers) == 2
    path = copied(DRAFT / "speculators_bf16", tmp_path / "rows")
    tokens = read(path).token_counts.astype(np.uint64)
    good = {"layers": 4, "width": 24, "dtype": "BF16"}
    for header, arrays in [
        ({**good, "layers": 0}, [tokens] * 3),
        ({**good, "width": 1 << 40}, [tokens] * 3),
        ({**good, "dtype": "I64"}, [tokens] * 3),
        (good, [tokens] * 2),
        (good, [tokens + np.uint64(1), tokens, tokens]),
        (good, [tokens, tokens[:-1], tokens]),
        (good, [tokens, tokens + np.uint64(1 << 40), tokens]),
        (good, [tokens.astype(np.int64), tokens, tokens]),
    ]:
        monkeypatch.setattr(kept.KeptIndex, "load", lambda self, found=(header, arrays): found)
        before = len(headers)
        check_reads(read(path), Expected(DRAFT / "speculators_bf16"))
        assert len(headers) == before + 1
    far = (good, [tokens, tokens + np.uint64(1 << 30), tokens])
    monkeypatch.setattr(kept.KeptIndex, "load", lambda self: far)
    with pytest.raises(actshard.FormatError):
        read(path).sequence(2, 0)
