"""What changes between two steps of a verb is told: committed files, parts of a merge, the source of a conversion or of a copy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.request import RECORD, Request
from actshard.formats import merging as format_merging

FORMATS = ("saev", "lmprobe", "zarr", "pickle", "npy", "safetensors", "hf_arrow")
MERGED = ("saev", "lmprobe", "zarr", "pickle")


def arguments(format: str, n: int = 6, value: float = 1.0, first: int = 0) -> tuple[np.ndarray, dict[str, Any]]:
    rows = np.full((n, 2, 3, 256), value, np.float32)
    columns: dict[str, Any] = {} if format == "saev" else {"label": [int(value)] * n}
    return rows, columns | ({"sample_idx": list(range(first, first + n))} if format == "pickle" else {})


def written(path: Path, format: str, value: float = 1.0, first: int = 0, **options: Any) -> Path:
    with actshard.create(path, format, layers=[0, 1], d_model=256, **options) as writer:
        rows, columns = arguments(format, value=value, first=first)
        writer.append(rows, columns=columns)
    return Path(writer.path)


def largest(folder: Path) -> Path:
    files = [p for p in folder.rglob("*") if p.is_file() and ".actshard" not in p.parts and p.name != RECORD]
    return max(files, key=lambda p: p.stat().st_size)


def half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE: list[Callable[[Path], None]] = [Path.unlink, half]


# -- a committed file is removed, or cut, before the writer continues ---------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("part", [None, (0, 1)])
@pytest.mark.parametrize("format", FORMATS)
def test_lost_rows_of_an_unfinished_dataset_are_not_zeros(
    format: str, part: tuple[int, int] | None, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    if part is not None and format not in MERGED:
        pytest.skip(f"{format} has no parts")

    def begin(**options: Any) -> Any:
        return actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=256, part=part, **options)

    rows, columns = arguments(format)
    writer = begin()
    writer.append(rows, columns=columns)
    writer.flush()
    writer.abort()
    damage(largest(tmp_path / "d"))
    with pytest.raises(actshard.TruncatedFileError, match=r"expected .* of committed examples, found"):
        begin(resume=True)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("format", FORMATS)
def test_lost_rows_of_an_unfinished_conversion_are_not_zeros(
    format: str, damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "source", "pickle", shard_bytes=200)
    monkeypatch.setattr("actshard.writing.sink.COMMIT_BYTES", 1)

    def stop(at: int, total: int, size: int) -> None:
        if at >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        actshard.convert(source, tmp_path / "d", format, progress=stop)
    damage(largest(tmp_path / "d"))
    with pytest.raises(actshard.TruncatedFileError, match="of committed examples, found"):
        actshard.convert(source, tmp_path / "d", format, resume=True)


# -- a part is written again after its merge was killed ------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, None])
@pytest.mark.parametrize("format", MERGED)
def test_a_killed_merge_of_parts_that_changed_is_not_finished(
    format: str, steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [written(tmp_path / name, format, k + 1.0, 100 * k) for k, name in enumerate("ab")]
    take, finish = format_merging.Merge.take, type(actshard.writing.merging.merger_of(format)).finish
    taken: list[Path] = []

    class KilledError(BaseException):
        pass

    def take_some(self: Any, source: Path, target: Path) -> None:
        if len(taken) == steps:
            raise KilledError
        taken.append(target)
        take(self, source, target)

    def finish_none(self: Any, plan: Any) -> Path:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(format_merging.Merge, "take", take_some)
        patch.setattr(type(actshard.writing.merging.merger_of(format)), "finish", finish_none)
        with pytest.raises(KilledError):
            actshard.merge(tmp_path / "m", parts)
    assert type(actshard.writing.merging.merger_of(format)).finish is finish
    (parts[0] / "README.md").write_text("new")
    for resume in (False, True):  # the same parts finish it, also with other files in their folders
        shutil.copytree(tmp_path / "m", tmp_path / f"copy{resume}")
        merged = actshard.merge(tmp_path / f"copy{resume}", parts, resume=resume)
        assert len(actshard.open(merged)) == 12
    shutil.rmtree(parts[0].parent if format == "saev" else parts[0])
    again = written(tmp_path / "a", format, 9.0)
    assert again == parts[0]
    for resume in (False, True):
        with pytest.raises(actshard.ArgumentError, match="since this merge was begun"):
            actshard.merge(tmp_path / "m", parts, resume=resume)


# -- a source changes while it is read -----------------------------------------------------------------------------------


def test_a_source_that_changes_while_it_is_converted_is_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = (written(tmp_path / name, "zarr", value) for name, value in (("a", 1.0), ("b", 2.0)))

    def change(at: int, total: int, size: int) -> None:
        for file in [p for p in other.rglob("*") if p.is_file() and p.name != RECORD]:
            (source / file.relative_to(other)).write_bytes(file.read_bytes())

    with pytest.raises(actshard.FormatError, match="was changed while it was converted"):
        actshard.convert(source, tmp_path / "c", "npy", progress=change)
    assert not (tmp_path / "c").exists()
    done = actshard.convert(source, tmp_path / "c", "npy")
    assert actshard.open(done.path).gather(0, [5], [2])[0].tolist() == [2.0] * 256


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_are_not_read_may_change_while_a_source_is_converted(format: str, tmp_path: Path) -> None:
    source = written(tmp_path / "s", format)
    (source / "run.log").write_text("begun")

    def log(at: int, total: int, size: int) -> None:
        (source / "run.log").write_text("more")
        (source / "README.md").write_text("new")

    done = actshard.convert(source, tmp_path / "to", "npy", progress=log)
    assert len(actshard.open(done.path)) == 6


def test_an_update_is_staged_although_both_copies_have_the_same_finding(tmp_path: Path) -> None:
    source = written(tmp_path / "s", "npy")
    file = source / "activations/1.npy"
    half(file)
    copy = actshard.stage(source, tmp_path / "copy").path
    (source / "metadata.json").write_text("{}")
    assert actshard.stage(source, tmp_path / "copy").path == copy
    assert (copy / "metadata.json").read_text() == "{}"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("format", FORMATS)
def test_a_good_copy_is_not_replaced_by_a_damaged_one(
    format: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    source = written(tmp_path / "s", format, **({"compress": False} if format == "pickle" else {}))
    copy = actshard.stage(source, tmp_path / "copy").path
    files = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    file = largest(source)
    data = file.read_bytes()
    damage(file)
    with pytest.raises(actshard.FormatError, match="the source is damaged now, so the older copy is kept") as caught:
        actshard.stage(source, tmp_path / "copy")
    assert "actshard-stage" not in str(caught.value), "the working folder is no place for the user"
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == files
    file.write_bytes(data)
    assert len(actshard.open(actshard.stage(source, tmp_path / "copy").path)) == 6


# -- files of others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "saev"])
def test_a_file_that_appears_under_a_final_name_is_not_overwritten(format: str, tmp_path: Path) -> None:
    record = Request.read(written(tmp_path / "whole", format))
    assert record is not None
    assert record.checksums
    rows_of = {"lmprobe": ["tensors/hidden_layer000_shard000.safetensors"]}  # named when they are complete
    for name in [*record.checksums, *rows_of.get(format, [])]:
        writer = actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=256)
        rows, columns = arguments(format)
        writer.append(rows, columns=columns)
        file = tmp_path / "d" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        with pytest.raises(actshard.ExistsError, match=f"{name}: was written by another program"):
            writer.close()
        assert file.read_text() == "mine"
        file.unlink()
        actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=256, resume=True).close()
        assert len(actshard.open(tmp_path / "d")) == 6
        shutil.rmtree(tmp_path / "d")


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_others_under_other_names_do_not_matter(format: str, tmp_path: Path) -> None:
    writer = actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=256)
    rows, columns = arguments(format)
    writer.append(rows, columns=columns)
    for name in (
        "context/notes.md",
        "my_meta/x.txt",
        "lengths.md",
        "logs/metadata.json",
        "logs/x.arrow",
        "old/a.parquet",
    ):
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "d" / name).write_text("mine")
    writer.close()
    assert len(actshard.open(writer.path)) == 6


@pytest.mark.parametrize("others", [1, "x", {"a": 1}, [1], None])
def test_a_damaged_list_of_other_files_is_an_error_of_the_journal(others: object, tmp_path: Path) -> None:
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 256}
    writer = actshard.create(tmp_path / "d", "zarr", **about)
    rows, columns = arguments("zarr")
    writer.append(rows, columns=columns)
    writer.flush()
    writer.abort()
    with (tmp_path / "d/.actshard/journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"closing": True, "others": others}) + "\n")
    with pytest.raises(actshard.FormatError, match="field 'others': expected names of files"):
        actshard.create(tmp_path / "d", "zarr", resume=True, **about)


def test_a_record_next_to_a_folder_that_was_removed_is_replaced(tmp_path: Path) -> None:
    ids = {"input_ids": [[1, 2, 3]] * 2, "loss_mask": [[1, 1, 1]] * 2}
    for value in (1.0, 2.0):
        with actshard.create(tmp_path / "to", "eagle", layers=["last"], d_model=8) as writer:
            writer.append(np.full((2, 1, 3, 8), value, np.float32), columns=ids)
        assert (tmp_path / f".to{RECORD}").is_file()
        assert actshard.open(tmp_path / "to").gather("last", [1], [0])[0].tolist() == [value] * 8
        shutil.rmtree(tmp_path / "to")


@pytest.mark.parametrize("journal", ["", '{"actshard":1,"conf'])
def test_a_dump_next_to_one_without_a_journal_is_begun(journal: str, tmp_path: Path) -> None:
    other = tmp_path / "d/.writing-00000000/.actshard"
    other.mkdir(parents=True)
    (other / "journal.jsonl").write_text(journal)
    assert len(actshard.open(written(tmp_path / "d", "saev", resume=True))) == 6


@pytest.mark.parametrize(
    ("format", "name"),
    [("pickle", "metadata.json"), ("lmprobe", "train-00000-of-00001.parquet"), ("saev", "metadata.json")],
)
def test_files_of_others_in_parts_are_kept_whatever_their_names(format: str, name: str, tmp_path: Path) -> None:
    for part in range(2):
        written(tmp_path / "d", format, part + 1.0, 100 * part, part=(part, 2))
    mine = tmp_path / "d/.parts/part-00000-of-00002/my-results" / name
    mine.parent.mkdir()
    mine.write_text("mine")
    merged = actshard.merge(tmp_path / "d")
    assert len(actshard.open(merged)) == 12
    kept = [p for p in (tmp_path / "d").rglob("*") if p.is_file() and p.read_bytes() == b"mine"]
    assert kept == [tmp_path / "d/left-in-parts/part-00000-of-00002/my-results" / name]
    assert [p.name for p in (tmp_path / "d/left-in-parts").rglob("*") if p.is_file()] == [name]
