"""Pushed datasets: equal to the local ones, complete or not readable, continued after kills and faults, never over another."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats
from actshard.base.location import Location
from actshard.reading.finding import find_any
from actshard.writing.pushing.buckets import Bucket
from conftest import GOLDEN, refuses
from hub import hub as hub_server
from served import Served, served
from shell import run_command
from test_urls import places, quietly, same
from waiting import PATIENCE

SAEV = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]


def golden() -> list[Any]:
    """Golden datasets and token caches."""
    found: dict[Path, Any] = {}
    for path in sorted(GOLDEN.rglob("*")):
        # Damaged, or of codecs of an extra.
        special = {"errors", "hostile", "zarr_codecs"} & set(path.relative_to(GOLDEN).parts)
        if special or not path.is_dir() or any(above in found for above in path.parents):
            continue
        try:
            at, name = find_any(Location.of(path))
        except actshard.ActshardError:
            continue
        if at == Location.of(path):
            found[path] = pytest.param(path, id=f"{name}-{'-'.join(path.relative_to(GOLDEN).parts[:2])}")
    return list(found.values())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "web/bucket").mkdir(parents=True)
    with served(tmp_path / "web") as found:
        yield found


def push(server: Served, folder: Path, url: str = "s3://bucket/run", **more: Any) -> actshard.Pushed:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.push(folder, url, server.keys, **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("folder", golden())
def test_what_is_pushed_opens_with_equal_values(folder: Path, server: Served) -> None:
    done = push(server, folder, verify=False)
    there, here = contents(server.root / "bucket/run"), contents(folder)
    card = there.pop("README.md", b"")
    here.pop("README.md", None)
    assert there == here
    assert card
    assert not server.written.uploads
    assert (done.sent_files, done.sent_bytes) == (done.files, done.bytes)
    before = len(server.requests)
    again = push(server, folder, verify=False)
    assert (again.sent_files, again.sent_bytes) == (0, 0)
    assert not [r for r in server.requests[before:] if r[0] in ("PUT", "POST", "DELETE")]
    near = quietly(folder) if formats.get(done.format).holds == "activations" else None
    if near is not None and near.table.equals(near.table):  # not with NaN values
        same(quietly("s3://bucket/run", storage_options=server.keys), near)


def test_the_manifest_is_written_last_and_only_if_none_is_there(server: Served) -> None:
    push(server, SAEV)
    puts = [path for method, path, _ in server.requests if method == "PUT"]
    assert puts[0] == "bucket/run/.actshard-pushing.json"
    assert puts[-2:] == ["bucket/run/shards.json", "bucket/run/metadata.json"]
    assert server.requests[-1][:2] == ("DELETE", "bucket/run/.actshard-pushing.json")
    text = (server.root / "bucket/run/README.md").read_text()
    assert text.startswith("---\n# license:")
    assert "actshard.open('s3://bucket/run')" in text
    (server.root / "bucket/run/README.md").write_text("mine")
    push(server, SAEV)
    assert (server.root / "bucket/run/README.md").read_text() == "mine"


def test_a_second_push_sends_what_is_missing_or_differs(server: Served) -> None:
    push(server, SAEV)
    (server.root / "bucket/run/acts000000.bin").unlink()
    damaged = server.root / "bucket/run/acts000001.bin"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    server.written.meta.pop("bucket/run/acts000001.bin")
    server.written.puts.clear()
    done = push(server, SAEV)
    assert sorted(server.written.puts) == ["bucket/run/acts000000.bin", "bucket/run/acts000001.bin"]
    assert done.sent_files == 2
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(SAEV))


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", [SAEV, GOLDEN / "zarr/run_20260122_101112", GOLDEN / "zarr/v3_sharded/activations.zarr"]
)
def test_a_push_that_ends_anywhere_is_not_readable_and_is_continued(server: Served, folder: Path) -> None:
    near = quietly(folder)
    push(server, folder)
    puts = len(server.written.puts)
    for at in sorted({0, 1, 2, puts // 2, puts - 3, puts - 2, puts - 1}):
        shutil.rmtree(server.root / "bucket/run")
        server.written.meta.clear()
        server.written.puts.clear()
        seen = iter(range(10**6))
        server.written.refuse = (lambda method, query, seen=seen, at=at: method == "PUT" and next(seen) >= at, 403)
        with pytest.raises(actshard.FileAccessError, match="403"):
            push(server, folder)
        with pytest.raises(actshard.ActshardError):
            quietly("s3://bucket/run", storage_options=server.keys)
        if at > 0:
            with pytest.raises(actshard.UnfinishedError, match="is being uploaded"):
                quietly("s3://bucket/run", storage_options=server.keys)
        server.written.refuse = None
        there = {f"bucket/run/{name}" for name in contents(server.root / "bucket/run")} if at else set()
        assert len(there) <= at
        server.written.puts.clear()
        push(server, folder)
        assert not there & set(server.written.puts), "what is there is not sent again"
        same(quietly("s3://bucket/run", storage_options=server.keys), near)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("fault", ["503", "before", "after", "cut"])
def test_a_fault_at_any_request_is_survived(server: Served, fault: str, scheme: str) -> None:
    near, at = quietly(SAEV), 0
    options = server.keys if scheme == "s3" else server.google
    while True:
        shutil.rmtree(server.root / "bucket/run", ignore_errors=True)
        server.written.meta.clear()
        server.written.count, server.written.faults = 0, {at: fault}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actshard.push(SAEV, f"{scheme}://bucket/run", options)
        if server.written.faults:
            break
        assert not (server.root / "bucket/run/.actshard-pushing.json").exists()
        at += 1
    assert at > 8
    same(quietly("s3://bucket/run", storage_options=server.keys), near)


@pytest.mark.slow
@pytest.mark.parametrize("folder", places()[::3])
def test_what_is_pushed_to_google_opens_with_equal_values(server: Served, folder: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        url, options, large = "gs://bucket/run", server.google, big(tmp_path)
        actshard.push(folder, url, options, verify=False)
        same(quietly(url, storage_options=options), quietly(folder))
        assert not actshard.verify(url, storage_options=options).errors or actshard.verify(folder).errors
        assert actshard.push(folder, url, options, verify=False).sent_files == 0
        with pytest.raises(actshard.ExistsError, match="overwrite=True"):
            actshard.push(large, url, options)
        server.written.refuse = (lambda method, query: "partNumber=2" in query, 403)
        with pytest.raises(actshard.FileAccessError, match="403") as caught:
            actshard.push(large, url, options, overwrite=True)
        assert "hushhush" not in str(caught.value)
        assert not server.written.uploads
        server.written.refuse = None
        actshard.push(large, url, options)
    same(quietly(url, storage_options=options), quietly(large))
    with actshard.create(
        "gs://bucket/made", "zarr", layers=[3], d_model=4, storage_options=options, scratch=tmp_path / "scratch"
    ) as writer:
        writer.append(np.ones((2, 1, 5, 4), np.float32))
    assert quietly("gs://bucket/made", storage_options=options).num_examples == 2


def big(tmp_path: Path) -> Path:
    """A dataset with a shard that is sent in parts."""
    with actshard.create(tmp_path / "big", "pickle", layers=[0], d_model=512, shard_bytes="40MB") as writer:
        writer.append(np.random.default_rng(0).standard_normal((1, 1, 9000, 512), np.float32))
    return tmp_path / "big"


def test_another_dataset_is_not_replaced(server: Served, tmp_path: Path) -> None:
    other = sorted(GOLDEN.glob("saev/v21_nocls_oneshard/saev/shards/*"))[0]
    push(server, SAEV)
    kept = contents(server.root / "bucket")
    with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: contains other objects .*overwrite=True"):
        push(server, other)
    assert contents(server.root / "bucket") == kept
    (server.root / "bucket/run/more").mkdir()
    (server.root / "bucket/run/more/old.json").write_text("{}")
    before = len(server.requests)
    push(server, other, overwrite=True)
    writes = [r[:2] for r in server.requests[before:] if r[0] in ("PUT", "DELETE")]
    assert writes[0] == ("PUT", "bucket/run/.actshard-pushing.json")
    removed = [path.rpartition("/")[2] for method, path in writes if method == "DELETE"]
    assert {"metadata.json", "shards.json"} <= set(removed[:3])
    assert contents(server.root / "bucket/run").keys() - {"README.md"} == contents(other).keys()
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(other))
    with pytest.raises(actshard.ArgumentError, match="expected the URL of a folder"):
        push(server, SAEV, "s3://bucket", overwrite=True)
    (server.root / "bucket/run/.actshard-pushing.json").write_text("{}")
    with pytest.raises(actshard.ExistsError, match="an unfinished upload of another dataset"):
        push(server, SAEV)


def with_equal_metadata(folder: Path, to: Path) -> Path:
    """A copy with other values in one file of data."""
    shutil.copytree(folder, to)
    for file in to.glob("acts*.bin"):
        file.write_bytes((-np.frombuffer(file.read_bytes(), "<f4")).tobytes())
    return to


def test_another_dataset_with_equal_metadata_is_not_replaced(server: Served, tmp_path: Path) -> None:
    other = with_equal_metadata(SAEV, tmp_path / "other")
    push(server, SAEV)
    kept, puts = contents(server.root / "bucket"), list(server.written.puts)
    with pytest.raises(actshard.ExistsError, match="contains other objects"):
        push(server, other)
    assert contents(server.root / "bucket") == kept
    assert server.written.puts == puts
    for allowed in (1, 1, 1):
        seen = iter(range(10**6))
        server.written.refuse = (lambda m, q, seen=seen, n=allowed: m == "PUT" and next(seen) >= n, 403)
        with pytest.raises(actshard.FileAccessError):
            push(server, other, overwrite=True)
        assert not (server.root / "bucket/run/metadata.json").exists()
        with pytest.raises(actshard.UnfinishedError):
            quietly("s3://bucket/run", storage_options=server.keys)
    server.written.refuse = None
    push(server, other)
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(other))


def test_chunks_of_a_replaced_dataset_are_removed(server: Served, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "zarr/single_minimal/activations.zarr", tmp_path / "other")
    (tmp_path / "other/arrays/activations/1.0.0.0").unlink()  # zeros
    push(server, GOLDEN / "zarr/single_minimal/activations.zarr")
    with pytest.raises(actshard.ExistsError, match=r"contains other objects \(arrays/activations/1\.0\.0\.0\)"):
        push(server, tmp_path / "other")
    push(server, tmp_path / "other", overwrite=True)
    assert contents(server.root / "bucket/run").keys() - {"README.md"} == contents(tmp_path / "other").keys()
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(tmp_path / "other"))


@pytest.mark.parametrize("at", ["_mark", "_remove_others"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_pushes_at_once_are_not_mixed(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, overwrite: bool
) -> None:
    other, work, begun = with_equal_metadata(SAEV, tmp_path / "other"), getattr(Bucket, at), []

    def meanwhile(self: Bucket, *given: Any, **more: Any) -> None:
        if at == "_remove_others":
            work(self, *given, **more)
        if not begun:
            begun.append(1)
            with contextlib.suppress(actshard.ExistsError):
                push(server, SAEV, overwrite=overwrite)
        if at == "_mark":
            work(self, *given, **more)

    monkeypatch.setattr(Bucket, at, meanwhile)
    if at == "_mark" and overwrite:  # one after the other
        push(server, other, overwrite=True)
        same(quietly("s3://bucket/run", storage_options=server.keys), quietly(other))
    elif at == "_mark":
        with pytest.raises(actshard.ExistsError):
            push(server, other)
        same(quietly("s3://bucket/run", storage_options=server.keys), quietly(SAEV))
    elif overwrite:
        with pytest.raises(actshard.ExistsError, match="another process uploads"):
            push(server, other, overwrite=True)
    else:
        push(server, other)
        same(quietly("s3://bucket/run", storage_options=server.keys), quietly(other))


def test_no_digest_is_asked_for_twice(server: Served, tmp_path: Path) -> None:
    other = with_equal_metadata(SAEV, tmp_path / "other")
    push(server, SAEV)

    def heads(folder: Path, **more: Any) -> int:
        before = len(server.requests)
        push(server, folder, **more)
        return sum(method == "HEAD" for method, *_ in server.requests[before:])

    files = len(contents(SAEV))
    assert heads(SAEV) == files
    # Once before, and once after the data were written; and the marker before each of two metadata files.
    assert heads(other, overwrite=True) <= 2 * files + 2


def test_a_generated_card_is_replaced_with_its_dataset(server: Served) -> None:
    zarr, card = GOLDEN / "zarr/single_minimal/activations.zarr", server.root / "bucket/run/README.md"
    push(server, zarr)
    push(server, SAEV, overwrite=True)
    assert "| format | saev" in card.read_text()
    card.write_text(card.read_text() + "by hand")
    server.written.meta.pop("bucket/run/README.md")
    push(server, zarr, overwrite=True)
    assert card.read_text().endswith("by hand")


def test_names_that_objects_cannot_have_are_refused_first(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, tmp_path / "mine")
    (tmp_path / "mine/a\nb").write_text("x")
    with pytest.raises(actshard.ArgumentError, match="without control characters"):
        push(server, tmp_path / "mine")
    assert not server.requests


def test_a_push_says_that_it_must_list(server: Served) -> None:
    server.is_listed = False
    with pytest.raises(actshard.FileAccessError, match="permission to list names"):
        push(server, SAEV)


def test_a_readme_that_is_there_is_kept(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, tmp_path / "mine")
    (tmp_path / "mine/README.md").write_text("new")
    (server.root / "bucket/run").mkdir()
    there = server.root / "bucket/run/README.md"
    there.write_text("theirs")
    push(server, tmp_path / "mine")
    push(server, tmp_path / "mine")
    assert there.read_text() == "theirs"
    push(server, tmp_path / "mine", overwrite=True)
    assert there.read_text() == "new"


def test_an_interrupted_replacement_is_continued(server: Served) -> None:
    other = sorted(GOLDEN.glob("saev/v21_nocls_oneshard/saev/shards/*"))[0]
    push(server, SAEV)
    for refused in (1, 2, 3):
        seen = iter(range(10**6))
        server.written.refuse = (lambda m, q, seen=seen, n=refused: m in ("PUT", "DELETE") and next(seen) >= n, 403)
        with pytest.raises(actshard.FileAccessError):
            push(server, other, overwrite=refused == 1)
        with pytest.raises(actshard.UnfinishedError):
            quietly("s3://bucket/run", storage_options=server.keys)
    server.written.refuse = None
    push(server, other)
    assert contents(server.root / "bucket/run").keys() - {"README.md"} == contents(other).keys()


def test_a_broken_or_unfinished_dataset_is_not_pushed(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, tmp_path / "broken")
    (tmp_path / "broken/acts000001.bin").unlink()
    with pytest.raises(actshard.FormatError, match=r"is not uploaded: .*acts000001\.bin"):
        push(server, tmp_path / "broken")
    with pytest.raises(actshard.FormatError, match=r"is not uploaded: 1 error, the first: "):
        push(server, tmp_path / "broken")
    writer = actshard.create(tmp_path / "begun", "pickle", layers=[0], d_model=2)
    writer.append(np.ones((1, 1, 3, 2), np.float32))
    with pytest.raises(actshard.FormatError):
        push(server, tmp_path / "begun")
    writer.close()
    with pytest.raises(actshard.MissingFileError):
        push(server, tmp_path / "none")
    assert not server.requests


def test_hidden_files_are_left_out_and_told(server: Served, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(SAEV, folder)
    for name in (
        ".env",
        ".git/config",
        ".actshard-staged.json",
        ".DS_Store",
        "notes~",
        "#notes#",
        "sub/.secret/key",
        ".gitattributes",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
    (folder / ".broken").symlink_to("/nowhere")
    done = push(server, folder)
    there = contents(server.root / "bucket/run").keys() - {"README.md", ".gitattributes"}
    assert there == contents(SAEV).keys()
    assert done.left_out == (
        "#notes#",
        ".DS_Store",
        ".actshard-staged.json",
        ".broken",
        ".env",
        ".git/",
        "notes~",
        "sub/.secret/",
    )
    assert done.as_dict()["left_out"] == done.left_out
    assert push(server, folder).sent_files == 0


def test_hidden_files_of_the_dataset_are_pushed(server: Served, tmp_path: Path) -> None:
    cache = next(p.parent for p in sorted(GOLDEN.rglob("shard_ledger.json")))
    shutil.copytree(cache, tmp_path / "tokens")
    ledger = json.loads((tmp_path / "tokens/shard_ledger.json").read_text())
    ledger["note"] = {"kept": "extra/.hidden/file"}
    (tmp_path / "tokens/shard_ledger.json").write_text(json.dumps(ledger))
    (tmp_path / "tokens/extra/.hidden").mkdir(parents=True)
    (tmp_path / "tokens/extra/.hidden/file").write_text("x")
    (tmp_path / "tokens/extra/.hidden/other").write_text("x")
    (tmp_path / "tokens/extra/.env").write_text("x")
    (tmp_path / "tokens/.success").write_text("")
    done = push(server, tmp_path / "tokens", verify=False)
    there = contents(server.root / "bucket/run")
    assert {"extra/.hidden/file", "extra/.hidden/other", ".success"} <= there.keys()
    assert done.left_out == ("extra/.env",)


def described(folder: Path, files: str, more: str = "", axes: str = '["example", "token", "dim"]') -> Path:
    """A folder with a layout.toml, whose data files the caller adds."""
    folder.mkdir()
    (folder / "layout.toml").write_text(f'version = 1\n[activations]\nfiles = "{files}"\naxes = {axes}\n{more}\n')
    return folder


@pytest.mark.parametrize("below", ["", "inner"])
@pytest.mark.parametrize("files", [".cache/{layer:d}.npy", ".layer{layer:d}.npy", "{layer:d}.npy~", "{layer:d}.npy"])
def test_hidden_files_that_a_dataset_reads_are_pushed(server: Served, tmp_path: Path, files: str, below: str) -> None:
    """Rows, lengths and columns. Other hidden files are left out."""
    (tmp_path / "a").mkdir()
    raw = files.endswith("~")
    more = '[lengths]\nfile = ".lengths.npy"\nkind = "lengths"\n[[columns]]\nfile = ".labels.csv"'
    shape = 'dtype = "float32"\nshape = [6, 3, 4]\n' if raw else ""
    folder = described(tmp_path / "a" / (below or "run"), files, shape + more)
    values = np.arange(72, dtype=np.float32).reshape(6, 3, 4)
    for layer in range(2):
        path = folder / files.format(layer=layer)
        path.parent.mkdir(exist_ok=True)
        if raw:
            path.write_bytes(values.tobytes())
        else:
            np.save(path, values)
    np.save(folder / ".lengths.npy", np.array([3, 3, 2, 3, 3, 3]))
    (folder / ".labels.csv").write_text("y\n" + "\n".join("123456") + "\n")
    (folder / ".env").write_text("secret")
    local = quietly(folder)
    done = push(server, tmp_path / "a" if below else folder)
    assert done.left_out == (f"{below}/.env" if below else ".env",)
    there = quietly(f"s3://bucket/run/{below}" if below else "s3://bucket/run", storage_options=server.keys)
    same(there, local)
    assert there.table.equals(local.table)


def test_a_dataset_that_needs_a_file_that_is_left_out_is_not_pushed(server: Served, tmp_path: Path) -> None:
    """Files of a column by example are not listed before they are read."""
    more = '[[columns]]\nname = "note"\nfile = "rows/.{example:d}.npy"'
    folder = described(tmp_path / "run", "rows/{example:d}.npy", more, '["token", "dim"]')
    (folder / "rows").mkdir()
    for i in range(3):
        np.save(folder / f"rows/{i}.npy", np.ones((2, 4), np.float32))
        np.save(folder / f"rows/.{i}.npy", np.array(i))
    assert quietly(folder).table["note"].to_pylist() == [0, 1, 2]
    with refuses(actshard.ArgumentError, folder, "reads one of rows/.0.npy"):
        push(server, folder)
    assert not contents(server.root / "bucket")


def test_links_that_lead_outside_are_refused(server: Served, tmp_path: Path) -> None:
    folder, far = tmp_path / "mine", tmp_path / "far"
    shutil.copytree(SAEV, folder)
    far.mkdir()
    (folder / "acts000001.bin").rename(far / "shard")
    (folder / "acts000001.bin").symlink_to(far / "shard")
    (folder / "copy.bin").symlink_to("acts000000.bin")
    with pytest.raises(actshard.ArgumentError, match=r"acts000001\.bin: leads to .*/far/shard, outside .*links=True"):
        push(server, folder)
    assert not server.requests
    push(server, folder, links=True)
    (tmp_path / "alias").symlink_to(folder)
    assert push(server, tmp_path / "alias", links=True).sent_files == 0
    (folder / "acts000001.bin").unlink()
    (far / "shard").rename(folder / "acts000001.bin")
    (folder / "home").symlink_to(far)
    with pytest.raises(actshard.ArgumentError, match="home: leads to"):
        push(server, folder)


@pytest.mark.parametrize("name", ["metadata.json", "acts000001.bin", "labels.bin", "new.bin"])
def test_a_dataset_that_changes_while_it_is_pushed_is_not_finished(server: Served, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(SAEV, folder)

    def change(method: str, query: str) -> bool:
        if method == "PUT" and not server.written.puts:
            file = folder / name
            data = file.read_bytes() if file.exists() else b"x"
            file.write_bytes(data + b" " if name.endswith("json") else data[:-1] + bytes([data[-1] ^ 1]))
        return False

    server.written.refuse = (change, 500)
    with pytest.raises(actshard.FormatError, match=f"{name}: changed while"):
        push(server, folder, verify=False)
    assert not (server.root / "bucket/run/metadata.json").exists()
    with pytest.raises(actshard.UnfinishedError):
        quietly("s3://bucket/run", storage_options=server.keys)
    server.written.refuse = None
    push(server, folder, verify=False, overwrite=True)
    assert (server.root / "bucket/run" / name).read_bytes() == (folder / name).read_bytes()


def test_a_continued_replacement_keeps_what_others_put_there(server: Served) -> None:
    other = sorted(GOLDEN.glob("saev/v21_nocls_oneshard/saev/shards/*"))[0]
    push(server, SAEV)
    seen = iter(range(10**6))
    server.written.refuse = (lambda m, q: m in ("PUT", "DELETE") and next(seen) >= 1, 403)
    with pytest.raises(actshard.FileAccessError):
        push(server, other, overwrite=True)
    server.written.refuse = None
    theirs = server.root / "bucket/run/colleague/results.csv"
    theirs.parent.mkdir()
    theirs.write_text("1,2")
    with pytest.raises(actshard.ExistsError, match=r"contains other objects \(colleague/results\.csv\)"):
        push(server, other)
    assert theirs.read_text() == "1,2"
    theirs.unlink()
    theirs.parent.rmdir()
    push(server, other)
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(other))


KILLED = """
import sys, actshard
actshard.push(sys.argv[1], "s3://bucket/run", {"endpoint_url": sys.argv[2], "key": "k", "secret": "s", "region": "x"})
"""


@pytest.mark.slow
def test_a_killed_push_is_completed_by_the_next(server: Served, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with actshard.create(tmp_path / "big", "pickle", layers=[0], d_model=512, shard_bytes="40MB") as writer:
        for _ in range(6):
            writer.append(rng.standard_normal((1, 1, 4096, 512), np.float32))
    folder = tmp_path / "big"
    reached, going = threading.Event(), threading.Event()

    def hold(method: str, query: str) -> bool:
        if method == "PUT" and "partNumber=2" in query:
            reached.set()
            going.wait(PATIENCE)
        return False

    server.written.refuse = (hold, 500)
    command = [sys.executable, "-W", "ignore", "-c", KILLED, folder, f"http://127.0.0.1:{server.port}"]
    child = subprocess.Popen([os.fspath(word) for word in command])
    assert reached.wait(PATIENCE)
    child.send_signal(signal.SIGKILL)
    child.wait()
    server.written.refuse = None
    going.set()
    assert server.written.uploads
    with pytest.raises(actshard.UnfinishedError):
        quietly("s3://bucket/run", storage_options=server.keys)
    push(server, folder)
    assert not server.written.uploads
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(folder))


def test_a_folder_above_the_dataset_is_pushed_whole(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, tmp_path / "run/saev/shards" / SAEV.name)
    (tmp_path / "run/notes.txt").write_text("notes")
    push(server, tmp_path / "run/saev/shards")
    assert server.requests[-1][1] == f"bucket/run/{SAEV.name}/.actshard-pushing.json"
    same(quietly("s3://bucket/run", storage_options=server.keys), quietly(SAEV))


def test_the_command_pushes(server: Served, tmp_path: Path) -> None:
    options = [word for name, value in server.keys.items() for word in ("--storage-option", f"{name}={value}")]
    command = ["push", SAEV, "s3://bucket/run", *options]
    done = run_command(*command, "--json")
    assert json.loads(done.stdout)["sent_files"] == len(contents(SAEV)), done.stderr
    assert "hushhush" not in done.stdout + done.stderr
    server.written.refuse = (lambda method, query: True, 403)
    done = run_command(*command)
    assert done.returncode == 3
    assert "hushhush" not in done.stdout + done.stderr


def test_secrets_are_in_no_text(server: Served) -> None:
    done = push(server, SAEV)
    for file in contents(server.root).values():
        assert b"hushhush" not in file
    assert "hushhush" not in repr(done)


class Hub:
    """huggingface_hub, as far as it is used."""

    def __init__(self) -> None:
        self.commits: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.exists = True
        hub = self

        class HfApi:
            def __init__(self, **given: Any) -> None:
                hub.given = given

            def create_repo(self, *_: Any, **given: Any) -> None:
                hub.repository, hub.exists = given, True

            def dataset_info(self, *_: Any, **__: Any) -> Any:
                if not hub.exists:
                    raise type("RepositoryNotFoundError", (Exception,), {})
                return types.SimpleNamespace(sha="0" * 40)

            def create_commit(self, *words: Any, **given: Any) -> None:
                if hub.error is not None:
                    raise hub.error
                hub.commits.append({"repository": words[0], "operations": words[1], **given})

        self.module = types.ModuleType("huggingface_hub")
        vars(self.module).update(
            HfApi=HfApi,
            CommitOperationAdd=lambda name, source: ("add", name, source),
            CommitOperationDelete=lambda name: ("delete", name),
        )


def test_the_hub_gets_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub.module)
    monkeypatch.setattr("actshard.writing.pushing.hub._there", lambda native: {".gitattributes": (10, "")})
    hub.exists = False
    done = actshard.push(SAEV, "hf://datasets/lab/acts/run", {"token": "hf_secret"})
    (commit,) = hub.commits
    assert commit["repository"] == "lab/acts"
    assert (commit["revision"], commit["parent_commit"]) == ("main", "0" * 40)
    assert hub.repository["private"] is True
    names = {f"run/{name}" for name in contents(SAEV)}
    assert {name for _, name, _ in commit["operations"]} == names | {"run/README.md"}
    assert done.sent_files == len(names)
    monkeypatch.setattr("actshard.writing.pushing.hub._there", lambda native: {"run/other": (3, "")})
    with pytest.raises(actshard.ExistsError, match="contains other files"):
        actshard.push(SAEV, "hf://datasets/lab/acts/run", {"token": "hf_secret"})
    actshard.push(SAEV, "hf://datasets/lab/acts/run", overwrite=True)
    assert ("delete", "run/other") in hub.commits[-1]["operations"]
    hub.error = RuntimeError("403 Forbidden")
    with pytest.raises(actshard.FileAccessError, match=r"^hf://datasets/lab/acts/run: cannot write: RuntimeError: 403"):
        actshard.push(SAEV, "hf://datasets/lab/acts/run", overwrite=True)


def test_a_push_to_the_hub_replaces_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    near = GOLDEN / "zarr/single_minimal/activations.zarr"
    other = tmp_path / "other"
    shutil.copytree(near, other)
    chunks = sorted((other / "arrays/activations").glob("[0-9]*"))
    chunks[0].unlink()
    chunks[1].write_bytes(bytes(chunks[1].stat().st_size))
    with hub_server() as lab:
        options = {"endpoint": lab.url, "token": "hf_good"}

        def to(folder: Path, url: str = "hf://datasets/lab/acts", **more: Any) -> actshard.Pushed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return actshard.push(folder, url, options, **more)

        with pytest.raises(actshard.MissingFileError, match="expected a branch named 'TYPO'"):
            to(near, "hf://datasets/lab/acts@TYPO")
        assert not lab.repositories
        done = to(near)
        assert done.sent_files == done.files == len(contents(near))
        repository = lab.repositories["lab/acts"]
        with pytest.raises(actshard.MissingFileError, match="expected a branch named 'TYPO'"):
            to(near, "hf://datasets/lab/acts@TYPO")
        repository.commit({**repository.commits[repository.names["main"]], "README.md": b"the lab wrote this"})
        (other / "README.md").write_text("local")
        before = dict(repository.names)
        assert to(near).sent_files == 0
        with pytest.raises(actshard.ExistsError, match="contains other files"):
            to(other)
        assert repository.names == before
        done = to(other, overwrite=True)
        assert done.sent_files == 2  # a chunk and README.md
        there = repository.commits[repository.names["main"]]
        assert there == contents(other)
        same(quietly("hf://datasets/lab/acts", storage_options=options), quietly(other))
        repository.commit({name: data for name, data in there.items() if name != ".zgroup"})
        assert to(other).sent_files == 1
        monkeypatch.setattr("actshard.writing.pushing.hub._PER_FOLDER", 1)
        with pytest.raises(actshard.ArgumentError, match="the hub accepts 1 in a folder"):
            to(other)


@pytest.mark.parametrize(
    "said",
    [
        "403 Forbidden for url: https://x.s3.amazonaws.com/repos/aa?X-Amz-Signature=SECRET&X-Amz-Credential=SECRET",
        "Invalid header value b'Bearer hf_SECRET\\n'",
        "authorization: bearer SECRET",
        "cannot connect to https://me:SECRET@host/x",
        "token hf_SECRET is not valid",
    ],
)
def test_messages_of_the_hub_contain_no_secrets(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub.module)
    monkeypatch.setattr("actshard.writing.pushing.hub._there", lambda native: {})
    hub.error = RuntimeError(said)
    with pytest.raises(actshard.FileAccessError, match="cannot write: RuntimeError: ") as caught:
        actshard.push(SAEV, "hf://datasets/lab/acts", {"token": "hf_SECRET"})
    assert "SECRET" not in str(caught.value)


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(actshard.MissingExtraError, match=r"actshard\[hub\]"):
        actshard.push(SAEV, "hf://datasets/lab/acts")
    with pytest.raises(actshard.UnsupportedError, match="cannot be written"):
        actshard.push(SAEV, "https://host/run")
    for url, found in (("/somewhere", "a local path"), ("foo://x", "foo://x"), ("ftp://u:SECRET@h/x", "ftp://h/x")):
        with pytest.raises(actshard.ArgumentError, match=f"url: expected s3://, gs://, az:// or hf://, found {found}$"):
            actshard.push(SAEV, url)
