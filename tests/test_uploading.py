"""Writing objects: in one request or in parts, with a fault at every request. No error leaves an unfinished upload."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import actshard
from actshard.base.location import Location
from served import Served, served

LARGE = 17 << 20
"""Three parts."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "web/bucket").mkdir(parents=True)
    with served(tmp_path / "web") as found:
        yield found


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(LARGE))
    (folder / "small").write_bytes(b"small" * 100)
    (folder / "empty").write_bytes(b"")
    return folder


def native(server: Served, **more: object) -> actshard._native.RemoteStore:
    return Location.of_any("s3://bucket/run", {**server.keys, **more}).storage.native  # type: ignore[attr-defined]


def jobs(local: Path, only_new: bool = False) -> list[tuple[str | bytes, str, bool, int | None, str | None]]:
    return [(os.fspath(file), f"run/{file.name}", only_new, None, None) for file in sorted(local.iterdir())]


def same(server: Served, local: Path) -> bool:
    there = server.root / "bucket/run"
    return all((there / f.name).exists() and (there / f.name).read_bytes() == f.read_bytes() for f in local.iterdir())


def test_objects_arrive_with_their_digests(server: Served, local: Path) -> None:
    store = native(server)
    assert store.upload(jobs(local), None) == ["sent"] * 3
    assert same(server, local)
    assert sorted(size for _, size, _ in store.everything()) == [0, 500, LARGE]
    digests = store.digests(["run/small", "run/large", "run/none"])
    assert digests == [hashlib.sha256((local / n).read_bytes()).hexdigest() for n in ("small", "large")] + [None]
    assert sum("partNumber" in query for _, _, query in server.requests) == 3
    assert not server.written.uploads
    again = [
        (file, key, new, (server.root / "bucket" / key).stat().st_size, None) for file, key, new, _, _ in jobs(local)
    ]
    before = len(server.requests)
    assert store.upload(again, None) == ["there"] * 3
    assert [method for method, _, _ in server.requests[before:]] == ["HEAD"] * 3
    (local / "small").write_bytes(b"other" * 100)
    assert store.upload(again, None) == ["there", "there", "sent"]
    store.remove(["run/small", "run/none"])
    assert not (server.root / "bucket/run/small").exists()


def test_bytes_and_progress(server: Served, local: Path) -> None:
    told: list[int] = []
    assert (
        native(server).upload([(b"card", "run/README.md", False, None, None), *jobs(local)], told.append)
        == ["sent"] * 4
    )
    assert (server.root / "bucket/run/README.md").read_bytes() == b"card"
    assert told == sorted(told)


@pytest.mark.parametrize("conditional", [True, False])
def test_an_object_of_other_bytes_is_not_replaced(server: Served, local: Path, conditional: bool) -> None:
    store = native(server)
    server.written.conditional = conditional
    assert store.upload(jobs(local, True), None) == ["sent"] * 3
    assert store.upload(jobs(local, True), None) == ["sent"] * 3  # the same bytes
    for file in local.iterdir():
        (server.root / "bucket/run" / file.name).write_bytes(b"other")
        server.written.meta[f"bucket/run/{file.name}"] = {}
    assert store.upload(jobs(local, True), None) == ["refused"] * 3
    assert (server.root / "bucket/run/small").read_bytes() == b"other"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "before", "after", "cut"])
@pytest.mark.parametrize("name", ["small", "large", "new"])
def test_a_fault_at_any_request_changes_nothing(server: Served, local: Path, fault: str, name: str) -> None:
    store = native(server)
    job: list[tuple[str | bytes, str, bool, int | None, str | None]] = [
        (os.fspath(local / ("small" if name == "new" else name)), "run/x", name == "new", None, None)
    ]
    at = 0
    while True:
        server.written.count, server.written.faults = 0, {at: fault}
        assert store.upload(job, None) == ["sent"], (at, fault)
        assert (server.root / "bucket/run/x").read_bytes() == Path(os.fsdecode(job[0][0])).read_bytes()
        assert not server.written.uploads, (at, fault, server.requests)
        if server.written.faults:
            break
        at += 1
        (server.root / "bucket/run/x").unlink()
        server.written.meta.clear()
    assert at >= (5 if name == "large" else 1)


def test_an_object_whose_answer_was_lost_is_not_written_twice(server: Served, local: Path) -> None:
    for only_new in (False, True):
        server.written.puts.clear()
        server.written.count, server.written.faults = 0, {0: "after"}
        assert native(server).upload([(os.fspath(local / "small"), f"run/{only_new}", only_new, None, None)], None) == [
            "sent"
        ]
        assert len(server.written.puts) == 1
        assert [method for method, _, _ in server.requests[-2:]] == ["PUT", "HEAD"]


def always(server: Served, wanted: Callable[[str, str], bool], status: int) -> None:
    """Answers all requests of a kind with a status."""
    server.written.refuse = (wanted, status)


def test_a_failure_that_stays_leaves_no_upload(server: Served, local: Path) -> None:
    kinds: list[tuple[Callable[[str, str], bool], int]] = [
        (lambda method, query: "partNumber=2" in query, 500),
        (lambda method, query: "partNumber=2" in query, 403),
        (lambda method, query: method == "POST" and "uploadId" in query, 500),
        (lambda method, query: method == "POST" and "uploads" in query, 403),
    ]
    for wanted, status in kinds:
        always(server, wanted, status)
        with pytest.raises(
            actshard.FileAccessError, match=rf"^s3://bucket/run/large: cannot write: {status}"
        ) as caught:
            native(server, max_retries=1).upload(jobs(local), None)
        assert "hushhush" not in str(caught.value)
        assert not server.written.uploads, (status, server.requests)
        assert not (server.root / "bucket/run/large").exists()


def test_a_file_that_changes_meanwhile_is_an_error(server: Served, local: Path) -> None:
    def change(method: str, query: str) -> bool:
        if method == "POST" and "uploads" in query:
            (local / "large").write_bytes(bytes(LARGE))
        return False

    always(server, change, 500)
    with pytest.raises(actshard.FormatError, match="changed while it was uploaded"):
        native(server).upload(jobs(local), None)
    assert not server.written.uploads
    assert not (server.root / "bucket/run/large").exists()


def test_an_interrupt_leaves_no_upload(server: Served, local: Path) -> None:
    always(server, lambda method, query: "partNumber=3" in query, 503)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        native(server, max_retries=50).upload(jobs(local), None)
    assert not server.written.uploads
    with pytest.raises(ZeroDivisionError):
        native(server, max_retries=50).upload(jobs(local), lambda done: 1 // 0)
    assert not server.written.uploads


def test_uploads_of_a_killed_run_are_found(server: Served, local: Path) -> None:
    server.written.uploads = {f"u{i}": (f"bucket/run/{name}", {}, {}) for i, name in enumerate(["large", "large", "x"])}
    assert native(server).sweep(["run/large", "run/small"]) == 2
    assert list(server.written.uploads) == ["u2"]


def test_what_cannot_be_written_is_told(server: Served, local: Path) -> None:
    with pytest.raises(actshard.UnsupportedError, match="cannot be written"):
        Location.of_any(server.web("run")).storage.native.upload([(b"", "x", False, None, None)], None)  # type: ignore[attr-defined]
    store = Location.of_any("s3://nobucket/run", server.keys).storage.native  # type: ignore[attr-defined]
    with pytest.raises(actshard.FileAccessError, match="create the bucket first"):
        store.upload([(b"", "x", False, None, None)], None)
    with pytest.raises(actshard.MissingFileError):
        native(server).upload([(os.fspath(local / "none"), "run/none", False, None, None)], None)


def test_an_object_that_was_overwritten_is_read_anew(server: Served) -> None:
    """Also its beginning, which is kept so that copies need no request for it."""
    store = native(server)
    for text in (b'{"v": 1, "old": true}', b'{"v": 22}'):
        assert store.upload([(text, "run/meta.json", False, None, None)], None) == ["sent"]
        assert store.stat("run/meta.json") is not None
        assert [bytes(store.read("run/meta.json", 0, 100)) for _ in range(2)] == [text] * 2
