"""Guarantee: only files listed in a cache's ledger are replaced; an old cache stays until the new one is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tokens.conftest import GOLDEN, LLAMA, write_lines
from tests.tokens.test_building import digests, same_rows
from tests.tokens.test_config import hub

import actshard
from actshard import _native, tokens
from actshard.base.storage import Local
from waiting import PATIENCE

IDS = tokens.PrebuiltFormat()
TOKENIZER = str(GOLDEN / LLAMA)


@pytest.fixture
def records(tmp_path: Path) -> Callable[..., Path]:
    """Writes files of prebuilt records."""

    def write(name: str, *rows: Any) -> Path:
        return write_lines(tmp_path / name, [{"input_ids": row} for row in rows])

    return write


def test_paths_of_one_tokenizer_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tab completion types a slash at the end."""
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "hello"}])
    monkeypatch.chdir(Path(TOKENIZER).parent)
    built = tokens.build_cache(lines, tmp_path / "c", Path(TOKENIZER).name)
    again = tokens.build_cache(lines, tmp_path / "c", f"{Path(TOKENIZER).name}/")
    assert again.num_tokens == tokens.build_cache(lines, tmp_path / "c", TOKENIZER).num_tokens == built.num_tokens


class TestOverwriting:
    """Guarantee: ``overwrite=True`` removes only the replaced cache, and not before the new one is complete."""

    @pytest.fixture
    def web(self, records: Callable[..., Path], tmp_path: Path) -> Path:
        """A cache whose folder also contains another cache and files of a user."""
        web = tmp_path / "web"
        tokens.build_cache(records("a.jsonl", [1, 2, 3]), web, format=IDS)
        tokens.build_cache(records("b.jsonl", [4, 5]), web / "validation", format=IDS)
        for path in ("notes/readme.txt", "input_ids/mine.txt", "00000_mine/data.bin"):
            (web / path).parent.mkdir(exist_ok=True)
            (web / path).write_text("mine")
        return web

    def test_a_failed_build_leaves_the_old_cache_and_all_else(self, web: Path, records: Callable[..., Path]) -> None:
        before = digests(web)
        with pytest.raises(actshard.FormatError, match="line 2"):
            tokens.build_cache(records("bad.jsonl", [1], "x"), web, format=IDS, overwrite=True)
        left = {name: data for name, data in digests(web).items() if not name.startswith(".actshard-build")}
        assert left == before
        assert tokens.open_cache(web)[0]["input_ids"].tolist() == [1, 2, 3]

    @pytest.mark.parametrize("layout", ["consolidated", "sharded"])
    def test_a_build_replaces_what_the_ledger_names(
        self, web: Path, records: Callable[..., Path], layout: str, tmp_path: Path
    ) -> None:
        sources = [records("c.jsonl", [7, 8]), records("d.jsonl", [9])]
        cache = tokens.build_cache(sources, web, format=IDS, overwrite=True, layout=layout, keep_shards=True)
        assert [row["input_ids"].tolist() for row in cache] == [[7, 8], [9]]
        for path in ("notes/readme.txt", "input_ids/mine.txt", "00000_mine/data.bin"):
            assert (web / path).read_text() == "mine"
        assert tokens.open_cache(web / "validation")[0]["input_ids"].tolist() == [4, 5]
        assert not (web / ".actshard-build").exists()
        fresh = tokens.build_cache(sources, tmp_path / "fresh", format=IDS, layout=layout, keep_shards=True)
        for name, data in digests(fresh.path).items():
            assert (web / name).read_bytes() == data
        assert (web / "input_ids" / "data").exists() == (layout == "consolidated")
        again = tokens.build_cache(sources[0], web, format=IDS, overwrite=True)
        assert [row["input_ids"].tolist() for row in again] == [[7, 8]]
        assert not list(web.glob("0000?_[cd]*"))

    def test_files_that_no_ledger_names_are_not_built_over(self, records: Callable[..., Path], tmp_path: Path) -> None:
        (tmp_path / "c" / "input_ids" / "data").mkdir(parents=True)
        (tmp_path / "c" / "input_ids" / "data" / "mine").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(
                actshard.ExistsError, match="in the way of the new cache, and no ledger lists it"
            ) as caught:
                tokens.build_cache(records("a.jsonl", [1]), tmp_path / "c", format=IDS, overwrite=overwrite)
            assert caught.value.path == tmp_path / "c" / "input_ids" / "data"
            assert digests(tmp_path / "c") == {"input_ids/data/mine": b"mine"}

    @pytest.mark.parametrize("layout", ["consolidated", "sharded"])
    @pytest.mark.parametrize(
        "name", ["data/notes.txt", "offsets/notes.txt", "data/c/notes.txt", "data/mine/0", "offsets/.zattrs", "data/0"]
    )
    def test_a_file_in_an_array_that_is_none_of_its_own_refuses_the_build_before_it_begins(
        self, records: Callable[..., Path], tmp_path: Path, layout: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Arrays are removed as folders, so foreign files in them must be detected."""
        out = tmp_path / "c"
        tokens.build_cache(records("a.jsonl", [1, 2]), out, format=IDS, layout=layout)
        (array,) = [p.parent for p in out.rglob(name.split("/", maxsplit=1)[0]) if p.name in ("data", "offsets")]
        mine = array / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        before = digests(out)
        other = records("b.jsonl", [3])
        monkeypatch.setattr("actshard.tokens.building.build_shard", lambda *args: pytest.fail("work was begun"))
        with pytest.raises(actshard.ExistsError, match="does not belong to it; move it away") as caught:
            tokens.build_cache(other, out, format=IDS, overwrite=True)
        assert caught.value.path in (mine, mine.parent)
        with pytest.raises(actshard.ExistsError, match="but does not belong to it"):
            tokens.CacheWriter(out, {"input_ids": np.int32}, overwrite=True)
        monkeypatch.undo()
        assert digests(out) == before
        mine.unlink()
        if mine.parent.name == "mine":
            mine.parent.rmdir()
        assert tokens.build_cache(other, out, format=IDS, overwrite=True)[0]["input_ids"].tolist() == [3]

    def test_a_ledger_that_names_other_folders_removes_none(self, records: Callable[..., Path], tmp_path: Path) -> None:
        """Names in a ledger are untrusted and may point anywhere."""
        out, other = tmp_path / "c", tmp_path / "other"
        tokens.build_cache(records("a.jsonl", [1]), out, format=IDS)
        shutil.copytree(out, other)
        ledger = json.loads((out / "shard_ledger.json").read_text())
        ledger["finished_shards"] = ["../other", str(other), ".."]
        ledger["field_counts"] |= {"../other/input_ids": 1, str(other / "input_ids"): 1}
        (out / "shard_ledger.json").write_text(json.dumps(ledger))
        before = digests(other)
        tokens.build_cache(records("b.jsonl", [2]), out, format=IDS, overwrite=True)
        assert digests(other) == before
        (out / "shard_ledger.json").write_text("{")
        with pytest.raises(actshard.ExistsError, match="remove the folder"):
            tokens.build_cache(records("b.jsonl", [3]), out, format=IDS, overwrite=True)
        assert (out / "input_ids" / "data" / "zarr.json").exists()

    def test_stopped_anywhere_the_old_cache_or_the_new_one_is_there(
        self, web: Path, records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before each rename, removal and ledger: the old cache reads, or the next build ends with the new one."""
        from actshard.tokens.ledger import Ledger

        sources = [records("c.jsonl", [7, 8]), records("d.jsonl", [9])]
        mine = {name: data for name, data in digests(web).items() if "mine" in data.decode("latin-1")[:5]}
        old, kept = web, web.with_name("kept")
        shutil.copytree(old, kept)

        class Stop(BaseException):
            pass

        def run(stop_at: int) -> bool:
            steps = 0

            def counted(original: Any) -> Any:
                def wrapper(*args: Any, **kwargs: Any) -> Any:
                    nonlocal steps
                    steps += 1
                    if steps == stop_at:
                        raise Stop
                    return original(*args, **kwargs)

                return wrapper

            with monkeypatch.context() as patch:
                for name in ("rename", "replace", "unlink", "rmdir"):
                    patch.setattr(Path, name, counted(getattr(Path, name)))
                patch.setattr(Ledger, "write", counted(Ledger.write))
                patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
                try:
                    tokens.build_cache(sources, web, format=IDS, overwrite=True)
                except Stop:
                    return False
            return True

        seen = set()
        for stop_at in range(1, 200):
            if run(stop_at):
                break
            try:
                held = [row["input_ids"].tolist() for row in tokens.open_cache(web)]
                assert held in ([[1, 2, 3]], [[7, 8], [9]])
                seen.add(len(held))
            except actshard.UnfinishedError:
                seen.add(0)
            cache = tokens.build_cache(sources, web, format=IDS, overwrite=True)
            assert [row["input_ids"].tolist() for row in cache] == [[7, 8], [9]]
            assert not (web / ".actshard-build").exists()
            assert {name: (web / name).read_bytes() for name in mine} == mine
            shutil.rmtree(web)
            shutil.copytree(kept, web)
        else:
            pytest.fail("the build has more steps than were tried")
        assert seen == {0, 1, 2}

    def test_a_swap_that_had_not_begun_leaves_the_old_cache_to_its_owner(
        self, records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from actshard.tokens import placing

        old, new = records("a.jsonl", [1]), records("b.jsonl", [2])
        tokens.build_cache(old, tmp_path / "c", format=IDS)

        def stop(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(placing, "_complete", stop)
            with pytest.raises(KeyboardInterrupt):
                tokens.build_cache(new, tmp_path / "c", format=IDS, overwrite=True)
        assert tokens.build_cache(old, tmp_path / "c", format=IDS)[0]["input_ids"].tolist() == [1]
        assert tokens.build_cache(new, tmp_path / "c", format=IDS, overwrite=True)[0]["input_ids"].tolist() == [2]
        assert not (tmp_path / "c" / ".actshard-build").exists()

    def test_the_working_folder_of_a_finished_build_is_removed_later(
        self, records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A kill after the last rename leaves it; the next call finds the finished cache."""
        from actshard.tokens import placing

        with monkeypatch.context() as patch:
            patch.setattr(placing, "clear", lambda work: None)
            tokens.build_cache(records("a.jsonl", [1]), tmp_path / "c", format=IDS)
        assert (tmp_path / "c" / ".actshard-build").exists()
        tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "c", format=IDS)
        assert {p.name for p in (tmp_path / "c").iterdir()} == {"input_ids", "shard_ledger.json"}

    def test_opening_a_finished_cache_keeps_its_shards(self, records: Callable[..., Path], tmp_path: Path) -> None:
        sources = [records("a.jsonl", [1]), records("b.jsonl", [2])]
        tokens.build_cache(sources, tmp_path / "c", format=IDS, keep_shards=True)
        before = digests(tmp_path / "c")
        tokens.build_cache(sources, tmp_path / "c", format=IDS)
        assert digests(tmp_path / "c") == before

    def test_a_writer_replaces_a_cache_and_not_a_folder(self, web: Path, tmp_path: Path) -> None:
        with tokens.CacheWriter(web, {"input_ids": np.int32}, overwrite=True) as writer:
            writer.append([{"input_ids": [6]}])
        assert tokens.open_cache(web)[0]["input_ids"].tolist() == [6]
        assert tokens.open_cache(web / "validation")[0]["input_ids"].tolist() == [4, 5]
        assert (web / "notes" / "readme.txt").read_text() == "mine"
        (tmp_path / "docs" / "input_ids" / "data").mkdir(parents=True)
        with pytest.raises(actshard.ExistsError, match="in the way of the new cache, and no ledger lists it"):
            tokens.CacheWriter(tmp_path / "docs", {"input_ids": np.int32}, overwrite=True)
        (tmp_path / "file").write_text("mine")
        with pytest.raises(actshard.ExistsError, match="found a file"):
            tokens.CacheWriter(tmp_path / "file", {"input_ids": np.int32}, overwrite=True)


class TestWriterThatFailed:
    """Guarantee: a rejected call changes nothing, and a cache with a failed write is never finished."""

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([{"a": [1], "b": [[2]]}], "expected 1 axes, found 2"),
            ([{"a": [1], "b": ["x"]}], "cannot be stored"),
            ([{"a": [1], "b": [1e300]}], "do not fit float32"),
            ([{"a": [1], "b": [[1], [2, 3]]}], "expected an array of numbers"),
            ([{"a": [1]}], "expected the field 'b'"),
            ([[1]], "expected a dict"),
        ],
    )
    def test_a_refused_append_leaves_every_field_as_it_was(self, rows: Any, said: str, tmp_path: Path) -> None:
        with tokens.CacheWriter(tmp_path / "c", {"a": np.int32, "b": np.float32}) as writer:
            writer.append([{"a": [1, 2], "b": [0.5, 1]}])
            with pytest.raises((actshard.ArgumentError, actshard.DtypeError), match=said):
                writer.append(rows)
            for lengths in ({"a": [1], "b": [1, 0]}, {"a": [1]}, ["x"], [2]):
                with pytest.raises(actshard.ArgumentError):
                    writer.append_flat({"a": np.array([1]), "b": np.array([1.0])}, lengths)
            writer.append([{"a": [3], "b": [2]}])
        cache = tokens.open_cache(tmp_path / "c")
        assert [(r["a"].tolist(), r["b"].tolist()) for r in cache] == [([1, 2], [0.5, 1]), ([3], [2])]
        assert actshard.verify(tmp_path / "c", deep=True).findings == []

    def test_a_write_that_failed_is_not_finished(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        writer = tokens.CacheWriter(tmp_path / "c", {"a": np.int32, "b": np.int32})
        writer.append([{"a": [1], "b": [1]}])
        from actshard.tokens import writing

        original = writing.FieldWriters.append

        def full(self: Any, name: str, *rest: Any) -> None:
            if name == "b":
                raise actshard.DiskFullError("cannot write: the disk is full", path=tmp_path)
            original(self, name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(writing.FieldWriters, "append", full)
            with pytest.raises(actshard.DiskFullError):
                writer.append([{"a": [2], "b": [2]}])
        with pytest.raises(actshard.ClosedError, match="an earlier write failed"):
            writer.append([{"a": [3], "b": [3]}])
        with pytest.raises(actshard.ClosedError, match="an earlier write failed"):
            writer.close()
        assert list(tmp_path.iterdir()) == []

    def test_two_writers_of_a_process_do_not_share_files(self, tmp_path: Path) -> None:
        first, second = (tokens.CacheWriter(tmp_path / "c", {"a": np.int32}) for _ in range(2))
        first.append([{"a": [1]}])
        second.append([{"a": [2]}])
        first.append([{"a": [1, 1]}])
        first.close()
        with pytest.raises(actshard.ExistsError):
            second.close()
        assert [row["a"].tolist() for row in tokens.open_cache(tmp_path / "c")] == [[1], [1, 1]]
        shutil.rmtree(tmp_path / "c")
        second.close()
        assert [row["a"].tolist() for row in tokens.open_cache(tmp_path / "c")] == [[2]]
        assert [p.name for p in tmp_path.iterdir()] == ["c"]

    def test_what_a_killed_writer_left_goes(self, tmp_path: Path) -> None:
        script = (
            "import os, sys, numpy; from actshard import tokens\n"
            "w = tokens.CacheWriter(sys.argv[1], {'a': numpy.int32}); w.append([{'a': [1]}]); os.kill(os.getpid(), 9)"
        )
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "c")], check=False, timeout=PATIENCE
        )
        assert [".tmp." in p.name for p in tmp_path.iterdir()] == [True]
        with tokens.CacheWriter(tmp_path / "c", {"a": np.int32}) as writer:
            writer.append([{"a": [2]}])
        assert [p.name for p in tmp_path.iterdir()] == ["c"]

    def test_metadata_that_json_cannot_hold_are_refused_at_once(self, tmp_path: Path) -> None:
        for wrong in ({"a": np.int32(3)}, {"a": float("nan")}, {"a": {1, 2}}):
            with pytest.raises(actshard.ArgumentError, match="metadata"):
                tokens.CacheWriter(tmp_path / "c", {"a": np.int32}, metadata=wrong)


class TestDisk:
    """Guarantee: system errors become ActshardErrors, and finished caches are synced to disk."""

    def test_a_disk_that_is_full_at_the_ledger(
        self, records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = records("a.jsonl", [1])
        original = os.fsync

        def full(descriptor: int) -> None:
            if "shard_ledger" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                raise OSError(errno.ENOSPC, "No space left on device")
            original(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(actshard.DiskFullError):
                tokens.build_cache(path, tmp_path / "c", format=IDS)
            writer = tokens.CacheWriter(tmp_path / "d", {"a": np.int32})
            with pytest.raises(actshard.DiskFullError):
                writer.close()
        assert not (tmp_path / "d").exists()
        assert len(tokens.build_cache(path, tmp_path / "c", format=IDS)) == 1

    def test_folders_are_synced_before_the_ledger_takes_its_place(
        self, records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Counted by inode, because folders are renamed between their sync and the ledger's."""
        synced: set[int] = set()
        original, rename = _native.sync_files, Path.rename
        at_ledger: list[set[int]] = []

        def sync(paths: list[Path]) -> None:
            synced.update(path.stat().st_ino for path in paths)
            original(paths)

        def renamed(self: Path, target: Any) -> Any:
            if self.name == "shard_ledger.json":
                at_ledger.append(set(synced))
            return rename(self, target)

        monkeypatch.setattr(_native, "sync_files", sync)
        monkeypatch.setattr(Path, "rename", renamed)
        sources = [records("a.jsonl", [1]), records("b.jsonl", [2])]
        for layout in ("consolidated", "sharded"):
            out = tmp_path / "deep" / layout
            tokens.build_cache(sources, out, format=IDS, layout=layout)
            folders = {p.stat().st_ino: p for p in [out, *out.rglob("*")] if p.is_dir()}
            assert {str(p) for i, p in folders.items() if i not in at_ledger[-1]} == set()
            assert {p.stat().st_ino for p in (tmp_path, tmp_path / "deep")} <= at_ledger[-1]
        with tokens.CacheWriter(tmp_path / "w", {"a": np.int32}) as writer:
            writer.append([{"a": [1]}])
        assert all(p.stat().st_ino in synced for p in (tmp_path / "w").rglob("*") if p.is_dir())

    def test_a_worker_whose_build_was_killed_ends_without_a_word(self) -> None:
        for given in (b"", b'{"source": {"pa'):
            run = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "actshard.tokens.shards"],
                input=given,
                capture_output=True,
                timeout=PATIENCE,
                check=False,
            )
            assert (run.returncode, run.stdout, run.stderr) == (5, b"", b"")

    def test_verify_says_what_it_may_not_look_into(
        self, records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tokens.build_cache(records("a.jsonl", [1]), tmp_path / "c", format=IDS)
        original = Local.scan

        def refused(self: Local, key: str, sizes: bool) -> Any:
            if key == str(tmp_path / "c"):
                raise PermissionError(errno.EACCES, "Permission denied", key)
            return original(self, key, sizes)

        monkeypatch.setattr(Local, "scan", refused)
        assert actshard.verify(tmp_path / "c").codes() == {"unreadable"}

        def denied(self: Local, key: str) -> Any:
            raise PermissionError(errno.EACCES, "Permission denied", key)

        monkeypatch.setattr(Local, "stat", denied)
        with pytest.raises(actshard.FileAccessError):
            tokens.open_cache(tmp_path / "c")

    @pytest.mark.parametrize("url", ["gs://bucket/cache", "s3://bucket/cache", "hf://datasets/a/b"])
    def test_urls_are_no_folders_to_write_to(
        self, url: str, records: Callable[..., Path], tmp_path: Path, monkeypatch
    ) -> None:
        path = records("a.jsonl", [1])
        monkeypatch.chdir(tmp_path)
        for call in (
            lambda: tokens.build_cache(path, url, format=IDS),
            lambda: tokens.CacheWriter(url, {"a": np.int32}),
            lambda: tokens.LmDataConfig.from_yaml(f"{url}.yaml"),
        ):
            with pytest.raises(actshard.ArgumentError, match="expected a local path here"):
                call()
        assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl"}


def test_a_build_that_is_taken_up_again_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates such as Llama 3.1's print the date: files built after midnight must not differ."""
    template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    form = tokens.ChatFormat(chat_template=template)
    good = [{"messages": [{"role": "assistant", "content": "a"}]}]
    first, second = write_lines(tmp_path / "a.jsonl", good), write_lines(tmp_path / "b.jsonl", [{"wrong": 1}])
    clock = [time.struct_time((2026, 11, 21, 23, 59, 0, 5, 325, 0, "UTC", 0))]
    monkeypatch.setattr(time, "localtime", lambda *_: clock[0])
    with pytest.raises(actshard.FormatError):
        tokens.build_cache([first, second], tmp_path / "c", TOKENIZER, form, jobs=1)
    clock[0] = time.struct_time((2026, 11, 22, 0, 1, 0, 6, 326, 0, "UTC", 0))
    write_lines(second, good)
    cache = tokens.build_cache([first, second], tmp_path / "c", TOKENIZER, form, jobs=1)
    assert np.array_equal(cache[0]["input_ids"], cache[1]["input_ids"])
    assert cache.ledger.extra["actshard"]["now"].startswith("2026-11-21T23:59:00")
    assert "2026-11-21" in tokens.load_tokenizer(TOKENIZER).decode(cache[1]["input_ids"].tolist())
    workers = tokens.build_cache([first, second], tmp_path / "d", TOKENIZER, form, jobs=2)
    assert "2026-11-22" in tokens.load_tokenizer(TOKENIZER).decode(workers[1]["input_ids"].tolist())
    assert tokens.build_cache([first, second], tmp_path / "c", TOKENIZER, form).ledger == cache.ledger


def test_progress_of_parquet_counts_its_bytes(tmp_path: Path) -> None:
    for name, rows in (("a", 3000), ("b", 0)):
        table = pa.table({"input_ids": pa.array([[i, i] for i in range(rows)], pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    told: list[tokens.BuildProgress] = []
    tokens.build_cache(f"{tmp_path}/*.parquet", tmp_path / "c", format=IDS, progress=told.append)
    assert told[-1].bytes == told[-1].bytes_total > 0
    assert [p.bytes for p in told] == sorted(p.bytes for p in told)


def test_progress_asks_no_file_for_what_is_finished(
    records: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from actshard.tokens.building import Build, BuildOptions

    told: list[tokens.BuildProgress] = []
    sources = [records(f"{i}.jsonl", [i]) for i in range(5)]
    build = Build(sources, tmp_path / "c", None, IDS, BuildOptions(), told.append)
    build._left.update(source.shard for source in build.sources[3:])
    asked: list[Path] = []
    monkeypatch.setattr(Path, "exists", lambda self, **_: asked.append(self) or False)
    build._report()
    assert (told[-1].files_done, asked) == (3, [])


class TestDocumentsKeptApart:
    """Guarantee: there is a warning if documents in a window cannot be kept apart."""

    def test_a_tokenizer_that_names_no_eos(self, tmp_path: Path) -> None:
        shutil.copy(GOLDEN / LLAMA / "tokenizer.json", tmp_path / "tokenizer.json")
        path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
        with pytest.warns(actshard.ActshardWarning, match="has no eos token"):
            cache = tokens.build_cache(path, tmp_path / "c", tmp_path / "tokenizer.json")
        windows = tokens.TokenSeqDataset(cache, 2)
        with pytest.warns(actshard.ActshardWarning, match="built without eos"):
            tokens.CausalLmDataset(windows, eos_id=1)
        tokens.CausalLmDataset(windows)
        tokens.build_cache(path, tmp_path / "d", tmp_path / "tokenizer.json", enforce_eos=False)
        named = tokens.load_tokenizer(tmp_path / "tokenizer.json", eos_token="<|end_of_text|>")
        cache = tokens.build_cache(path, tmp_path / "e", named)
        length = cache.num_tokens
        batch = tokens.CausalLmDataset(tokens.TokenSeqDataset(cache, length), eos_id=named.eos_id).get_batch([0])
        assert batch.segment_ids is not None
        assert batch.segment_ids.max() == 1


class TestHub:
    """Guarantee: a hub dataset is built completely, from one commit, or an error gives the reason."""

    @pytest.fixture
    def library(self, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        module = types.ModuleType("datasets")

        class Part(list):
            num_shards = 2

            def shard(self, num_shards: int, index: int) -> list[Any]:
                return list(self)[index::num_shards]

        rows = {
            "a" * 40: [{"input_ids": [i]} for i in range(4)],
            "b" * 40: [{"input_ids": [i + 100]} for i in range(4)],
        }
        module.load_dataset = lambda path, split, revision, **_: Part(rows[revision])
        module.get_dataset_split_names = lambda path, config_name, revision: ["train"]
        monkeypatch.setitem(sys.modules, "datasets", module)
        hub(monkeypatch, "a" * 40)
        return module

    def config(self, tmp_path: Path, **more: Any) -> tokens.LmDataConfig:
        source = tokens.HfDatasetSourceConfig("owner/name", **more)
        components = {"web": tokens.DatasetComponent(source, format=IDS)}
        return tokens.LmDataConfig(tokenizer=TOKENIZER, cache_dir=str(tmp_path / "caches"), components=components)

    def test_what_cannot_be_loaded_is_an_error(self, library: types.ModuleType, tmp_path: Path) -> None:
        def no_such_name(*_: Any, config_name: str, **__: Any) -> None:
            raise ValueError(f"BuilderConfig '{config_name}' not found. Available: ['default']")

        library.get_dataset_split_names = no_such_name
        for call in (
            lambda: self.config(tmp_path, name="typo").plans(),
            lambda: self.config(tmp_path, name="typo").build(),
        ):
            with pytest.raises(actshard.FormatError, match="BuilderConfig 'typo' not found"):
                call()

        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("features do not match")

        library.get_dataset_split_names = lambda *_, **__: ["train"]
        library.load_dataset = broken
        with pytest.raises(actshard.FormatError, match="features do not match"):
            self.config(tmp_path).plans()

    def test_a_train_split_that_is_asked_for_is_not_passed_over(
        self, library: types.ModuleType, tmp_path: Path
    ) -> None:
        library.get_dataset_split_names = lambda *_, **__: ["test"]
        config = self.config(tmp_path)
        assert [(p.split, p.state) for p in config.plans()] == [("train", "missing")]
        assert [(p.split, p.state) for p in config.build()] == [("train", "missing")]
        only = tokens.LmDataConfig(
            cache_dir=str(tmp_path / "x"), components=dict(config.components), train_weights={"web": 0.0}
        )
        assert only.plans() == []
        urls = tokens.DatasetComponent(tokens.UrlDatasetSourceConfig(validation_urls=("a.jsonl",)))
        config = tokens.LmDataConfig(cache_dir=str(tmp_path / "y"), components={"a": urls})
        assert ("train", "missing") in [(p.split, p.state) for p in config.plans()]

    def test_two_commits_are_not_mixed(
        self, library: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        loaded = library.load_dataset

        class Broken(list):
            num_shards = 2

            def shard(self, num_shards: int, index: int) -> list[Any]:
                return [{"input_ids": [0]}] if index == 0 else [{"input_ids": "broken"}]

        library.load_dataset = lambda *_, **__: Broken()
        with pytest.raises(actshard.FormatError):
            self.config(tmp_path).build(jobs=1)
        library.load_dataset = loaded
        hub(monkeypatch, "b" * 40)
        (plan,) = self.config(tmp_path).build()
        assert plan.cache is not None
        assert sorted(int(row["input_ids"][0]) for row in plan.cache) == [100, 101, 102, 103]
        hub(monkeypatch, "a" * 40)
        with pytest.raises(actshard.ExistsError, match="from older versions of these"):
            self.config(tmp_path).build()
        assert [p.state for p in self.config(tmp_path, revision="b" * 40).build()] == ["done"]

    def test_a_commit_that_cannot_be_known_is_told(
        self, library: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        library.load_dataset = lambda *_, **__: [{"input_ids": [1]}]
        with pytest.warns(actshard.ActshardWarning, match="pass a commit as revision="):
            self.config(tmp_path).plans()


def test_levanters_caches_are_replaced_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    shutil.copytree(GOLDEN / "text_gpt2style_single" / "cache" / "train", tmp_path / "c")
    source = "text_gpt2style_single/train.jsonl"
    cache = tokens.build_cache(source, tmp_path / "c", LLAMA, overwrite=True)
    same_rows(cache, tokens.build_cache(source, tmp_path / "fresh", LLAMA))
    assert digests(tmp_path / "c") == digests(tmp_path / "fresh")


def test_a_first_append_that_fails_decides_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tokens.CacheWriter(tmp_path / "c", {"ids": np.int32})

    def locked(_: Path) -> Any:
        raise actshard.LockedError("another process builds here")

    with monkeypatch.context() as patched:
        patched.setattr("actshard.tokens.writing.locked", locked)
        with pytest.raises(actshard.LockedError):
            writer.append([{"ids": [[1, 2], [3, 4]]}])
    assert not any(tmp_path.iterdir())
    writer.append([{"ids": [1, 2]}])
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert tokens.open_cache(tmp_path / "c")[0]["ids"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["sharded", "kept"])
def test_a_cache_with_a_shard_without_rows_can_be_replaced(kind: str, tmp_path: Path) -> None:
    """The ledger of such a shard lists no fields, but it has their arrays."""
    options: dict[str, Any] = {"layout": "sharded"} if kind == "sharded" else {"keep_shards": True}
    sources = [write_lines(tmp_path / f"{i}.jsonl", [{"input_ids": [i]}] * i) for i in range(2)]
    tokens.build_cache(sources, tmp_path / "c", format="prebuilt", **options)
    cache = tokens.build_cache(sources, tmp_path / "c", format="prebuilt", dtype="uint16", overwrite=True, **options)
    assert [row["input_ids"].tolist() for row in cache] == [[1]]
    assert cache.dtype("input_ids") == np.uint16
    assert actshard.verify(tmp_path / "c", deep=True).ok or kind == "kept"
