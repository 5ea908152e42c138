"""Local and in-memory locations list, stat and read alike, and raise only actshard's errors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.base.errors import MissingFileError
from actshard.base.location import Location
from actshard.base.storage import Entry, one_look
from actshard.reading import finding
from conftest import refuses

FILES = {"a.bin": b"0123456789", "b.jsonl": b'{"x": 1}\n{"x": 2}\n', "web/train/0.bin": b"", "web/notes.txt": b"hello"}


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "memory":
        return Location.in_memory(FILES, "store")
    for name, data in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return Location.of(tmp_path)


def test_files_are_listed_by_name_and_read_by_range(root: Location) -> None:
    assert root.entries() == [Entry("a.bin", "file"), Entry("b.jsonl", "file"), Entry("web", "folder")]
    assert [(e.name, e.kind, e.size) for e in root.entries("*.b*", sizes=True)] == [("a.bin", "file", 10)]
    assert [e.name for e in (root / "web").entries()] == ["notes.txt", "train"]
    file = root / "a.bin"
    assert (file.stat().kind, file.stat().size) == ("file", 10)
    assert (root / "web").kind() == "folder"
    assert (root / "nothing").kind() is None
    assert file.exists()
    assert not (file / "below").exists()
    assert file.read() == FILES["a.bin"]
    assert file.read(3, 4) == b"3456"
    assert file.read(8) == b"89"
    assert file.read(10, 0) == b""
    assert (root / "web/train/0.bin").read() == b""
    assert [(root / name).count(2) for name in (".", "web", "a.bin", "nothing")] == [2, 2, 0, 0]
    with (root / "b.jsonl").open() as lines:
        assert list(lines) == [b'{"x": 1}\n', b'{"x": 2}\n']


def test_buffers_are_filled_from_several_places(root: Location) -> None:
    made = bytearray(7)
    view = memoryview(made)
    (root / "a.bin").fill([(2, view[:3]), (9, view[3:4]), (0, view[4:]), (10, view[:0])])
    assert bytes(made) == b"2349012"
    with refuses(actshard.TruncatedFileError, where(root / "a.bin"), "expected 4 bytes at 8, the file ends") as caught:
        (root / "a.bin").fill([(8, view[:4])])
    assert caught.value.offset == 10
    with refuses(actshard.MissingFileError, where(root / "x"), "found nothing"):
        (root / "x").fill([])


def test_names_lead_down_and_never_elsewhere(root: Location) -> None:
    below = root.joinpath("web", "./train//0.bin")
    assert below == root / "web" / "train" / "0.bin"
    assert hash(below) == hash(root / "web/train/0.bin")
    assert below.name == "0.bin"
    assert below.parent.parent == root / "web"
    assert below.relative_to(root) == "web/train/0.bin"
    assert root.relative_to(root) == "."
    assert sorted([below, root]) == [root, below]
    top = root
    while top.parent != top:
        top = top.parent
    assert root.relative_to(top) == ("." if not root.is_local else str(root)[1:])
    for name in ("", "/etc", "../x", "a/../../x", "a\0b"):
        with refuses(actshard.ArgumentError, where(root), "below the folder"):
            root / name
    with refuses(actshard.ArgumentError, where(root / "webx"), "below"):
        (root / "webx").relative_to(root / "web")


def where(location: Location) -> Path:
    """How error messages show a location."""
    return location.local if location.is_local else location  # type: ignore[return-value]


BAD: dict[str, tuple[type[actshard.ActshardError], str, Callable[[Location], object]]] = {
    "a.bin": (actshard.TruncatedFileError, "expected 12 bytes, found 10", lambda x: x.read(8, 4)),
    "b.jsonl": (actshard.FormatError, "at most 5 bytes", lambda x: x.read(limit=5)),
    "web": (actshard.NotAFileError, "found a folder", lambda x: x.read()),
    "web/train": (actshard.NotAFileError, "found a folder", lambda x: x.open()),
    "web/notes.txt": (actshard.NotAFileError, "expected a folder", lambda x: x.entries()),
    "nothing": (actshard.MissingFileError, "found nothing", lambda x: x.stat()),
    "nowhere": (actshard.MissingFileError, "found nothing", lambda x: x.read()),
    "no-folder": (actshard.MissingFileError, "found nothing", lambda x: x.entries()),
    "no-arrow": (actshard.MissingFileError, "found nothing", lambda x: x.arrow()),
    "web/": (actshard.FormatError, "at most 1 files", lambda x: x.entries(limit=1)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_clear_error(root: Location, name: str) -> None:
    kind, words, act = BAD[name]
    with refuses(kind, where(root / name), words):
        act(root / name)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    root = Location.of(tmp_path)
    assert root.entries() == [Entry("broken", "other"), Entry("pipe", "other")]
    for act in (Location.read, Location.open, Location.arrow):
        with refuses(actshard.NotAFileError, tmp_path / "pipe", "special file"):
            act(root / "pipe")


def test_links_and_holes_are_told(tmp_path: Path) -> None:
    for name, target in (("itself", "itself"), ("broken", "nowhere")):
        (tmp_path / name).symlink_to(target)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    root = Location.of(tmp_path)
    assert root.entries() == [Entry("broken", "other"), Entry("itself", "other"), Entry("sparse", "file")]
    assert (root / "broken").is_named()
    assert not (root / "broken").exists()
    assert not (root / "x").is_named()
    assert (root / "sparse").stat().stored < (root / "sparse").stat().size
    memory = Location.in_memory({"x": b"123"})
    assert (memory / "x").is_named()
    assert (memory / "x").stat().stored == 3
    assert Location.at(tmp_path) == root
    assert Location.at(memory) is memory
    assert root.place == tmp_path
    assert memory.place is memory  # type: ignore[comparison-overlap] -- typed as a Path; in memory it is the location


def test_a_version_changes_with_the_file(tmp_path: Path) -> None:
    file = Location.of(tmp_path / "x")
    file.local.write_bytes(b"one")
    first = file.stat()
    assert first == file.stat()
    (tmp_path / "y").write_bytes(b"two")
    (tmp_path / "y").replace(tmp_path / "x")
    assert file.stat().version != first.version
    assert Location.in_memory({"x": b"1"}).joinpath("x").stat() != Location.in_memory({"x": b"2"}).joinpath("x").stat()


def test_pyarrow_reads_a_location(root: Location, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    places = [Location.in_memory({"x.parquet": data}) / "x.parquet"]
    for name in ("x.parquet", os.fsdecode(b"\xff.parquet")):
        (tmp_path / name).write_bytes(data)
        places.append(Location.of(tmp_path / name))
    for place in places:
        with place.arrow() as file:
            assert pq.ParquetFile(file).read() == table


def test_a_location_can_be_pickled(root: Location) -> None:
    back = pickle.loads(pickle.dumps(root))
    assert back == root
    assert str(back) == str(root)
    assert (back / "web" / "notes.txt").read() == b"hello"


def test_only_a_local_location_is_a_path(root: Location) -> None:
    if root.is_local:
        assert Path(root) == root.local
        assert Location.of(root.local) == root
        assert Location.of(str(root.local) + "/web/..") == root
    else:
        assert str(root / "a.bin") == "memory://store/a.bin"
        for use in (os.fspath, Path, lambda x: x.local):
            with refuses(actshard.UnsupportedError, where(root), "expected a local path"):
                use(root)
    assert Location.of(root) is root


def test_urls_and_what_is_no_path_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/x", "hf://datasets/a/b", Path("gs://bucket")):
        words = (
            "expected a local path here"
            if isinstance(url, str)
            else "expected gs://..., found gs:/bucket with one slash"
        )
        with refuses(actshard.ArgumentError, None, f"cache_dir: {words}"):
            Location.of(url, "cache_dir")
    with refuses(actshard.ArgumentTypeError, None, "expected a path, found int"):
        Location.of(3)
    assert Location.of("x").local == tmp_path / "x"


def test_files_below_are_listed_by_their_names_and_not_through_links(root: Location, tmp_path: Path) -> None:
    assert [(file.relative_to(root), entry.size) for file, entry in root.files(sizes=True)] == [
        ("a.bin", 10), ("b.jsonl", 18), ("web/notes.txt", 5), ("web/train/0.bin", 0)
    ]  # fmt: skip
    assert len(root.first(2)) == 2
    if root.is_local:
        (tmp_path / "itself").symlink_to(tmp_path)
        assert len(list(root.files())) == 4
        assert (root / "a.bin").stat().modified == (tmp_path / "a.bin").stat().st_mtime_ns


def test_text_is_utf8_with_unix_line_breaks() -> None:
    root = Location.in_memory({"a": "ä\r\nb\rc\n".encode(), "b": b"ab\xff"}, "store")
    assert (root / "a").read_utf8() == "ä\nb\nc\n"
    with refuses(actshard.FormatError, where(root / "b"), "expected UTF-8 text") as caught:
        (root / "b").read_utf8()
    assert caught.value.offset == 2


def test_one_look_lists_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks, and however far: all see the state of the first look. A folder that cannot be listed fails for everybody."""
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(os.fspath(path)), scandir(path))[1])
    folder = Location.at(tmp_path)
    with one_look(str(tmp_path)):
        first, every = folder.first(1), iter(folder.storage.scan(folder.key, False))
        next(every)
        assert [entry.name for entry in folder.entries()] == ["a", "b", "c"]
        assert first[0].name in "abc"
        assert len(list(every)) == 2
        (tmp_path / "d").touch()
        assert len(folder.entries()) == 3
        assert len(folder.entries(sizes=True)) == 4  # sizes are asked of the files, each time
        for _ in range(2):
            with pytest.raises(MissingFileError):
                (folder / "nothing").entries()
    assert listed.count(os.fspath(tmp_path)) == 2
    assert len(folder.entries()) == 4


def test_a_dataset_is_detected_from_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        np.save(tmp_path / f"acts_{i}.npy", np.zeros((2, 4), np.float32))
    (tmp_path / "layout.toml").write_text(
        'version = 1\n[activations]\nfiles = "acts_{example:d}.npy"\naxes = ["token", "dim"]\n'
    )
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(os.fspath(path)), scandir(path))[1])
    assert finding.detect(Location.at(tmp_path)) == "layout_toml"
    assert listed.count(os.fspath(tmp_path)) == 1
