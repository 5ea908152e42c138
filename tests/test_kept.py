"""Kept indexes of folders of many files: used only if nothing has changed, never trusted, never needed."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.location import Location
from actshard.formats import kept
from actshard.formats.layout_toml import keeping
from conftest import bits

N = 40
LAYOUT = """version = 1
[activations]
files = "acts_{example:d}.npy"
axes = ["token", "dim"]
layers = [3]
[[columns]]
file = "texts.jsonl"
by = "id"
"""


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own; files count as settled at once, and few files as many."""
    monkeypatch.setattr(keeping, "LEAST_FILES", 20)
    monkeypatch.setenv("ACTSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SETTLED_NS", -(1 << 62))
    return tmp_path / "cache-index"


def values_of(number: int, scale: int = 1) -> Any:
    return scale * np.arange(number % 5 * 4, dtype=np.float32).reshape(-1, 4) + number


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "layout.toml").write_text(LAYOUT)
    (folder / "texts.jsonl").write_text("".join(f'{{"id": {i}, "text": "t{i}"}}\n' for i in range(N)))
    for i in range(N):
        np.save(folder / f"acts_{i}.npy", values_of(i))
    return folder


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Counts how often files are parsed."""
    counted: list[Any] = []
    original = keeping.build

    def build(*arguments: Any) -> Any:
        counted.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(keeping, "build", build)
    return counted


def check(store: actshard.Store) -> None:
    assert (store.layers, store.d_model, len(store)) == ((3,), 4, N)
    assert store.token_counts.tolist() == [i % 5 for i in range(N)]
    for i in (1, 2, 31, N - 1):
        assert np.array_equal(bits(store.sequence(i, 3)), bits(values_of(i)))
    assert store.table["text"].to_pylist() == [f"t{i}" for i in range(N)]
    assert store.table["example"].to_pylist() == list(range(N))


def test_a_folder_is_parsed_once(many: Path, parsed: list[Any], settled: Path) -> None:
    check(actshard.open(many))
    assert len(parsed) == 1
    for io in ("mmap", "pread"):
        check(actshard.open(many, io=io))
    streamed = np.concatenate([batch.activations for batch in actshard.open(many).stream(3, 64, shuffle="exact")])
    assert len(streamed) == sum(i % 5 for i in range(N))
    assert len(parsed) == 1
    assert len(list(settled.iterdir())) == 1
    assert settled.stat().st_mode & 0o077 == 0


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def rewrite(path: Path) -> None:
    """Other values, with size and modification time as before: the change time tells."""
    before = path.stat()
    np.save(path, values_of(4, 7))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by(path: Path) -> None:
    """Another file of the same size and modification time."""
    other = path.with_name("other.npy")
    shutil.copy2(path, other)
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": lambda d: np.save(d / f"acts_{N}.npy", values_of(1)),
    "removed": lambda d: (d / f"acts_{N - 1}.npy").unlink(),
    "renamed": lambda d: (d / "acts_7.npy").rename(d / "acts_9999.npy"),
    "longer": lambda d: np.save(d / "acts_4.npy", values_of(9)),
    "touched": lambda d: touch(d / "acts_4.npy"),
    "rewritten in place": lambda d: rewrite(d / "acts_4.npy"),
    "replaced": lambda d: replace_by(d / "acts_4.npy"),
    "lines": lambda d: touch(d / "texts.jsonl"),
    "description": lambda d: (d / "layout.toml").write_text(LAYOUT.replace("[3]", "[5]")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_parsed_again(change: str, many: Path, parsed: list[Any]) -> None:
    actshard.open(many)
    CHANGES[change](many)
    again = actshard.open(many)
    assert len(parsed) == 2
    alone = actshard.open(many, cache=False)
    assert (again.layers, again.token_counts.tolist()) == (alone.layers, alone.token_counts.tolist())
    layer = again.layers[0]
    assert np.array_equal(again.sequence(4, layer), alone.sequence(4, layer))


def test_files_beside_do_not_matter(many: Path, parsed: list[Any]) -> None:
    actshard.open(many)
    (many / "notes.txt").write_text("more")
    actshard.open(many)
    assert len(parsed) == 1


def test_options_turn_it_off(many: Path, parsed: list[Any], settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(actshard.open(many, cache=False))
    monkeypatch.setenv("ACTSHARD_INDEX", "0")
    check(actshard.open(many))
    assert len(parsed) == 2
    assert not settled.exists()


def test_verify_parses_every_file(many: Path) -> None:
    actshard.open(many)
    path = many / "acts_4.npy"
    before = path.stat()
    report = actshard.verify(many)
    assert report.ok
    path.write_bytes(b"\x93NUMPX" + path.read_bytes()[6:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not actshard.verify(many).ok


def test_files_that_just_changed_are_not_kept(many: Path, settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change within the resolution of the file system's clock would not be noticed."""
    monkeypatch.setattr(kept, "SETTLED_NS", 3600 * 10**9)
    check(actshard.open(many))
    assert not settled.exists()


def test_few_files_are_not_kept(many: Path, settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LEAST_FILES", kept.LEAST_FILES)
    check(actshard.open(many))
    assert not settled.exists()


def test_a_folder_without_write_permission_is_no_error(many: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ACTSHARD_CACHE", str(tmp_path / "file/cache"))
    check(actshard.open(many))


def test_a_damaged_index_is_not_used(many: Path, parsed: list[Any], settled: Path) -> None:
    actshard.open(many)
    (path,) = settled.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-1], whole[:100] + b"\0" + whole[101:], whole[:-9] + b"!" + whole[-8:]):
        path.write_bytes(damaged)
        parsed.clear()
        check(actshard.open(many))
        assert len(parsed) == 1


HOSTILE: dict[str, Callable[[dict[str, Any], list[Any]], object]] = {
    "layers": lambda h, a: h.update(layers=[[3]]),
    "equal layers": lambda h, a: h.update(layers=[3, 3]),
    "no layers": lambda h, a: h.update(layers=[]),
    "d_model": lambda h, a: h.update(d_model=-4),
    "d_model type": lambda h, a: h.update(d_model="4"),
    "dtype": lambda h, a: h.update(dtype="object"),
    "fewer counts": lambda h, a: a.__setitem__(0, a[0][:-1]),
    "negative counts": lambda h, a: a[0].__setitem__(0, -1),
    "huge counts": lambda h, a: a[0].__setitem__(0, 1 << 62),
    "no such path": lambda h, a: a[1].__setitem__(0, N),
    "fewer steps": lambda h, a: a.__setitem__(2, a[2][1:]),
    "fewer numbers": lambda h, a: a.__setitem__(4, a[4][1:]),
    "fewer tokens": lambda h, a: a.__setitem__(6, a[6][1:]),
    "negative padding": lambda h, a: a[7].__setitem__(0, -1),
    "examples left out": lambda h, a: a[9].__setitem__(0, 1),
    "types": lambda h, a: a.__setitem__(0, a[0].astype(np.uint64)),
    "fewer arrays": lambda h, a: a.pop(),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_index_with_impossible_numbers_is_not_used(
    case: str, many: Path, parsed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = keeping.stored_of

    def spoiled(index: Any) -> Any:
        header, arrays = original(index)
        arrays = [array.copy() for array in arrays]
        HOSTILE[case](header, arrays)
        return header, arrays

    monkeypatch.setattr(keeping, "stored_of", spoiled)
    actshard.open(many)
    check(actshard.open(many))
    assert len(parsed) == 2


@pytest.mark.parametrize(("array", "value"), [(4, 5000), (5, 1 << 61), (5, 1 << 40), (2, 1 << 59)])
def test_rows_outside_of_files_are_errors(array: int, value: int, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = keeping.stored_of

    def spoiled(index: Any) -> Any:
        header, arrays = original(index)
        arrays[array] = arrays[array].copy()
        arrays[array][2] = value
        return header, arrays

    monkeypatch.setattr(keeping, "stored_of", spoiled)
    actshard.open(many)
    with pytest.raises(actshard.ActshardError):
        actshard.open(many).gather(3, 2, 1)


def test_an_index_of_another_state_is_not_parsed() -> None:
    arrays = [np.arange(5, dtype=np.uint32), np.zeros(0, np.int64), np.ones(3, np.uint8)]
    data = kept.packed("a", {"x": 1}, arrays)
    header, found = kept.parsed(data, "a") or ({}, [])
    assert header == {"x": 1}
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, arrays, strict=True))
    assert kept.parsed(data, "b") is None
    for claimed in (["<u4", 1 << 40], ["<u4", -1], ["|O", 1], ["<u4", True], "x"):
        text = kept.packed("a", {}, []).replace(b'"arrays": []', b'"arrays": ' + repr([claimed]).encode())
        body = text[40:]
        body = (len(body) - 8).to_bytes(8, "little") + body[8:]
        assert kept.parsed(text[:8] + hashlib.sha256(body).digest() + body, "a") is None


def test_the_least_recently_used_indexes_are_removed(
    many: Path, settled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled.mkdir()
    for i in range(4):
        (settled / f"{i}.idx").write_bytes(bytes(1 << 16))
        os.utime(settled / f"{i}.idx", ns=(i, i))
    (settled / ".x.part").write_bytes(bytes(1 << 16))
    os.utime(settled / ".x.part", ns=(0, 0))
    monkeypatch.setattr(kept, "MOST_BYTES", 3 << 16)
    actshard.open(many)
    names = {path.name for path in settled.iterdir()}
    assert names & {"0.idx", "1.idx", "2.idx", "3.idx", ".x.part"} == {"2.idx", "3.idx"}
    assert len(names) == 3
    actshard.clear_cache()
    assert list(settled.iterdir()) == []


def _open(folder: Path) -> list[int]:
    return [int(n) for n in actshard.open(folder).token_counts]


def test_processes_keep_the_same_index(many: Path, settled: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_open, [many] * 8) == [[i % 5 for i in range(N)]] * 8
    assert [path.suffix for path in settled.iterdir()] == [".idx"]


def test_examples_without_a_line_stay_left_out(many: Path, parsed: list[Any]) -> None:
    (many / "layout.toml").write_text(LAYOUT + "commit = true\n")
    (many / "texts.jsonl").write_text("".join(f'{{"id": {i}, "text": "t{i}"}}\n' for i in range(3, N, 3)))
    first, second = actshard.open(many), actshard.open(many)
    assert len(parsed) == 1
    assert first.table.to_pydict() == second.table.to_pydict()
    assert second.table["example"].to_pylist() == list(range(3, N, 3))
    assert np.array_equal(second.gather(3, 5, 1), first.gather(3, 5, 1))
    assert np.array_equal(second.sequence(5, 3), values_of(18))


def test_a_read_only_file_system_is_no_error(many: Path, parsed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """There, removing a file that does not exist fails too, and so does setting a time: the first made opening fail."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as readonly:
        readonly.setattr(Path, "replace", refused)
        readonly.setattr(Path, "unlink", refused)
        assert len(actshard.open(many))
    assert len(actshard.open(many))
    before = len(parsed)
    monkeypatch.setattr(os, "utime", refused)
    assert len(actshard.open(many))
    assert len(parsed) == before  # the index is used


def test_a_listing_of_no_folder_is_empty(tmp_path: Path) -> None:
    listing = kept.Listing(Location.at(tmp_path))
    state = listing.state
    assert listing.entries(Location.at(tmp_path / "hidden_states"), "hs_") == []
    assert listing.state != state
