"""What lies at a place is seen as it is: links, datasets inside of each other, marks of writers, datasets being written."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.writing.staging import MARKER
from conftest import refuses
from shell import run_script

FORMATS = ("saev", "lmprobe", "zarr", "pickle")


def written(path: Path, format: str, value: float, n: int = 3) -> Path:
    """A dataset of ``n`` examples of 4 tokens, all of whose rows are ``value``."""
    own: dict[str, Any] = {"machine_id": int(value)} if format == "pickle" else {}  # numbers of samples are unique
    with actshard.create(path, format, layers=[0, 1], d_model=8, **own) as writer:
        writer.append(np.full((n, 2, 4, 8), value, np.float32))
    return Path(writer.path)


def linked(source: Path, copy: Path, relative: bool) -> Path:
    """A copy of a dataset whose files are links, as git-annex and the hub's cache have them; metadata are files."""
    store = copy.with_name(f"{copy.name}.files")
    shutil.move(source, store)
    for path in sorted(store.rglob("*")):
        there = copy / path.relative_to(store)
        if path.is_dir():
            there.mkdir(parents=True)
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith(".z") or path.suffix in (".json", ".parquet"):
            shutil.copy(path, there)
        else:
            there.symlink_to(os.path.relpath(path, there.parent) if relative else path)
    return copy


def values(path: Path) -> list[float]:
    """The first element of each example, quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(path)
        return [float(store.sequence(i, 1)[0, 0]) for i in range(len(store))]


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_merging_links_of_files_takes_the_files(format: str, relative: bool, tmp_path: Path) -> None:
    parts = []
    for k, name in enumerate("ab"):
        whole = written(tmp_path / "source" / name, format, k + 1.0)
        parts.append(linked(whole, tmp_path / "linked" / name / whole.name, relative))
    merged = actshard.merge(tmp_path / "deep" / "deeper" / "merged", parts)
    assert values(merged) == [1.0] * 3 + [2.0] * 3
    shutil.rmtree(tmp_path / "linked")
    assert values(merged) == [1.0] * 3 + [2.0] * 3, "without its sources"
    assert not [path for path in merged.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("own", [False, True])
def test_dead_links_beside_the_data_do_not_stop_a_merge(own: bool, tmp_path: Path) -> None:
    """An editor's lock, for one, is a link that leads nowhere."""
    if own:
        for k in range(2):
            with actshard.create(tmp_path / "run", "zarr", layers=[0, 1], d_model=8, part=(k, 2)) as writer:
                writer.append(np.full((3, 2, 4, 8), k + 1.0, np.float32))
        parts = sorted((tmp_path / "run" / ".parts").iterdir())
    else:
        parts = [written(tmp_path / name, "zarr", k + 1.0) for k, name in enumerate("ab")]
    for part in parts:
        (part / "arrays" / ".#notes.txt").symlink_to("me@here.1234")
    merged = actshard.merge(tmp_path / "run") if own else actshard.merge(tmp_path / "merged", parts)
    assert values(merged) == [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("format", FORMATS)
def test_parts_with_links_are_merged_where_they_are(format: str, tmp_path: Path) -> None:
    for k in range(2):
        with actshard.create(tmp_path / "run", format, layers=[0, 1], d_model=8, part=(k, 2)) as writer:
            writer.append(np.full((3, 2, 4, 8), k + 1.0, np.float32))
    moved = 0
    for path in sorted((tmp_path / "run" / ".parts").rglob("*")):
        if path.is_file() and path.stat().st_size >= 3 * 4 * 8 * 4 and "tensors" not in path.suffix:
            there = tmp_path / f"far{moved}"
            path.rename(there)
            path.symlink_to(os.path.relpath(there, path.parent))
            moved += 1
    assert moved
    assert values(actshard.merge(tmp_path / "run")) == [1.0] * 3 + [2.0] * 3


def chunks(path: Path) -> list[Path]:
    """The chunk files of activations of a Zarr store."""
    return sorted(p for p in path.rglob("activations/*") if p.is_file() and not p.name.startswith("."))


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_a_chunk_that_is_a_broken_link_is_an_error_and_no_fill_value(io: str, separator: str, tmp_path: Path) -> None:
    path = written(tmp_path / "run", "zarr", 1.0)
    array = path / "arrays" / "activations"
    chunk = broken = array / "0.0.0.0"
    if separator == "/":
        for metadata in (array / ".zarray", path / ".zmetadata"):
            found = json.loads(metadata.read_text())
            found.get("metadata", {"arrays/activations/.zarray": found})["arrays/activations/.zarray"][
                "dimension_separator"
            ] = "/"
            metadata.write_text(json.dumps(found))
        for file in chunks(path):
            there = array / file.name.replace(".", "/")
            there.parent.mkdir(parents=True, exist_ok=True)
            file.rename(there)
        chunk, broken = array / "0/0/0/0", array / "0"
    (shutil.rmtree if broken.is_dir() else os.unlink)(broken)
    broken.symlink_to("nowhere")
    with refuses(actshard.MissingFileError, chunk):
        actshard.open(path, io=io).sequence(0, 0)
    report = actshard.verify(path)
    assert not report.ok
    with pytest.raises(actshard.MissingFileError):
        actshard.convert(path, tmp_path / "other", "npy")


@pytest.mark.parametrize("name", ["seq_len", "score"])
def test_broken_links_of_small_arrays_are_errors(name: str, tmp_path: Path) -> None:
    """Without its lengths, a dataset would have no rows, and nothing to convert."""
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=4) as writer:
        writer.append([np.ones((1, n, 4), np.float32) for n in (1, 3, 2)], columns={"score": np.arange(3)})
    (chunk,) = (p for p in (tmp_path / "run" / "arrays" / name).iterdir() if not p.name.startswith("."))
    chunk.unlink()
    chunk.symlink_to("nowhere")
    with refuses(actshard.MissingFileError, chunk, "a link that leads nowhere"):
        assert actshard.open(tmp_path / "run").table is not None
    assert not actshard.verify(tmp_path / "run").ok


@pytest.mark.parametrize("format", ["npy", "safetensors"])
def test_a_folder_that_its_writer_marked_is_of_no_other_format(format: str, tmp_path: Path) -> None:
    """Its columns lie in a parquet file, which may have vectors of its own."""
    embedding = np.arange(9, dtype=np.float32).reshape(3, 3)
    with actshard.create(tmp_path / "run", format, layers=[0], d_model=4) as writer:
        writer.append(np.ones((3, 1, 2, 4), np.float32), columns={"embedding": embedding})
    store = actshard.open(tmp_path / "run")
    assert store.format == format
    assert np.array_equal(np.stack(store.table["embedding"].to_pylist()), embedding)
    assert actshard.verify(tmp_path / "run").ok
    done = actshard.convert(tmp_path / "run", tmp_path / "copy", "zarr")
    assert done.examples == 3


def test_targets_inside_of_their_sources_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "a", "zarr", 1.0)
    other = written(tmp_path / "b", "zarr", 2.0)
    before = sorted(tmp_path.rglob("*"))
    inside = source / "new"
    link = tmp_path / "link"
    link.symlink_to(source)
    verbs: list[tuple[Path, Callable[[Path], Any]]] = [
        (inside, lambda to: actshard.merge(to, [source, other])),
        (inside, lambda to: actshard.stage(source, to)),
        (inside, lambda to: actshard.convert(source, to, "npy")),
        (link / "deep" / "new", lambda to: actshard.convert(source, to, "npy")),
        (inside, lambda to: actshard.convert(actshard.concat([source, other]), to, "npy")),
        (inside, lambda to: actshard.convert(actshard.concat([other, actshard.open(source).filter([0])]), to, "npy")),
        (inside, lambda to: actshard.plan.convert(source, to, "npy", tasks=2)),
        (inside, lambda to: actshard.plan.stage(source, to)),
        (inside, lambda to: actshard.plan.merge(to, [source, other])),
    ]
    for to, verb in verbs:
        with pytest.raises(actshard.ArgumentError, match="inside of"):
            verb(to)
    with pytest.raises(actshard.ArgumentError, match="inside of"):
        actshard.merge(tmp_path, [source, other])
    link.unlink()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("format", ["saev", "npy", "zarr"])
def test_a_link_that_leads_nowhere_is_no_place_to_write_to(tmp_path: Path, format: str) -> None:
    source = written(tmp_path / "a", "npy", 1.0)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "absent")
    for verb in (
        lambda: actshard.convert(source, link, format),
        lambda: actshard.create(link, format, layers=[0], d_model=4),
        lambda: actshard.plan.convert(source, link, format),
    ):
        with pytest.raises(
            actshard.ExistsError, match="link: expected a folder or nothing, found a link that leads nowhere"
        ):
            verb()
    assert not (tmp_path / "absent").exists()


STAGES = """
import os, sys, actshard
from actshard.writing.staging import folder
remove, left = folder.remove, [int(sys.argv[3])]
def dying(path):
    if left[0] == 0:
        os._exit(9)
    left[0] -= 1
    remove(path)
folder.remove = dying
actshard.stage(*sys.argv[1:3])
"""


def test_a_replaced_copy_is_removed_whole_after_a_kill_at_any_step(tmp_path: Path) -> None:
    source, target = written(tmp_path / "source", "zarr", 1.0), tmp_path / "copy"
    actshard.stage(source, target)
    for step in range(100):
        shutil.rmtree(source)
        written(source, "zarr", 2.0 + step)
        killed = run_script(STAGES, source, target, step).returncode == 9
        actshard.stage(source, target)
        assert values(target) == [2.0 + step] * 3
        assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "source"], step
        assert (target / MARKER).exists()
        if not killed:
            break
    assert 3 <= step < 99


WRITES = """
import sys, numpy as np, actshard
for exist_ok, resume in ((False, False), (True, False), (False, True), (True, True)):
    try: actshard.create(sys.argv[1], "zarr", layers=[0], d_model=4, exist_ok=exist_ok, resume=resume)
    except actshard.ActshardError as error: print(type(error).__name__, "remove" in str(error))
"""


def test_a_dataset_that_is_being_written_is_locked_and_nobody_is_told_to_remove_it(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=4) as writer:
        writer.append(np.ones((2, 1, 3, 4), np.float32))
        writer.flush()
        said = run_script(WRITES, tmp_path / "run").stdout.split("\n")
        assert said == ["LockedError False"] * 4 + [""]


def test_rows_are_not_discarded_for_a_dump_with_equal_metadata(tmp_path: Path) -> None:
    """saev names a dump by its metadata: two splits of equal size have the same name."""

    def write(value: float, labels: int | None = None) -> None:
        with actshard.create(tmp_path / "runs", "saev", layers=[0, 1], d_model=4, exist_ok=True) as writer:
            more = {} if labels is None else {"labels": np.full((8, 3), labels, np.uint8)}
            writer.append(np.full((8, 2, 3, 4), value, np.float32), **more)

    write(1.0, labels=7)
    (dump,) = (tmp_path / "runs").iterdir()
    write(1.0, labels=7)  # the same again
    for value, labels, where in (
        (2.0, 7, "acts000000.bin from byte"),
        (1.0, 8, "labels.bin"),
        (1.0, None, "labels.bin"),
    ):
        with refuses(actshard.ExistsError, dump, where):
            write(value, labels)
        write(1.0, labels=7)
        assert list((tmp_path / "runs").iterdir()) == [dump]
    store = actshard.open(dump)
    assert store.sequence(7, 1).tolist() == [[1.0] * 4] * 3
    assert (store.labels == 7).all()


@pytest.mark.parametrize("format", ["saev", "zarr", "lmprobe", "pickle", "hf_arrow", "npy"])
def test_a_finished_dataset_is_accepted_before_rows_are_computed(tmp_path: Path, format: str) -> None:
    """saev needs the numbers of examples and tokens: names of its dumps depend on them, and a folder has several."""
    rows = np.ones((3, 2, 3, 4), np.float32)
    options = {"num_examples": 3, "tokens_per_example": 3} if format == "saev" else {}
    with actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=4) as writer:
        writer.append(rows)
    again = actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=4, exist_ok=True, **options)
    assert again.complete
    assert (again.path, again.committed) == (writer.path, 3)
    with pytest.raises(
        actshard.ClosedError, match=r"finished before this call.*Append only if writer.complete is False"
    ):
        again.append(rows)
    with (
        pytest.raises(actshard.ExistsError),
        actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=4) as other,
    ):
        other.append(rows)  # saev knows only at the end that the dump exists


def test_a_second_dump_with_equal_metadata_is_written_beside_the_first(tmp_path: Path) -> None:
    for n in (6, 4):
        with actshard.create(tmp_path / "d", "saev", layers=[0], d_model=4, exist_ok=True) as writer:
            writer.append(np.full((n, 1, 3, 4), n, np.float32))
        assert len(actshard.open(writer.path)) == n


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ("zarr", ["text/mine.txt", "meta/notes.txt", "arrays/activations/mine"]),
        ("npy", ["metadata.json", "lengths.txt", "activations/x.txt"]),
        ("safetensors", ["metadata.json", "activations/x.txt"]),
        ("lmprobe", ["index/mine.txt", "tensors/mine.safetensors"]),
        ("pickle", ["shard_mine.pkl", "metadata.json"]),
        ("hf_arrow", ["data-mine.arrow", "state.json"]),
    ],
)
def test_a_refused_conversion_removes_no_file_that_it_did_not_write(
    format: str, names: list[str], tmp_path: Path
) -> None:
    """Also where their names look like those of the format."""
    source = tmp_path / "source"
    with actshard.create(source, "npy", layers=[0, 1], d_model=8) as writer:
        writer.append(np.ones((40, 2, 4, 8), np.float32))
        writer.append(np.full((1, 2, 4, 8), 1e9, np.float32))  # too large for float16
    target = tmp_path / "to"
    options: dict[str, Any] = {"shard_bytes": 1000} if format == "pickle" else {}
    calls = []

    def meddle(done: int, total: int, size: int) -> None:
        calls.append(done)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text("mine")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("actshard.formats.target.Target.block_bytes", 1 << 10)
            with pytest.raises(actshard.DtypeError):
                actshard.convert(source, target, format, dtype="float16", progress=meddle, **options)
    assert calls
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()) == sorted(names)


@pytest.mark.parametrize("name", ["../mine", "/mine", "a/../../mine", "", "a//b", "link/mine"])
def test_a_journal_cannot_name_files_elsewhere_for_removal(name: str, tmp_path: Path) -> None:
    """Removing what a journal lists must not leave the dataset's folder."""
    mine = tmp_path / "outside" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    (tmp_path / "mine").write_text("mine")
    writer = actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2)
    writer.append(np.ones((2, 1, 3, 2), np.float32))
    writer.flush()
    writer.abort()
    (tmp_path / "d" / "link").symlink_to(mine.parent)
    journal = tmp_path / "d/.actshard/journal.jsonl"
    *lines, commit = journal.read_text().splitlines()
    changed = {**json.loads(commit), "files": {name: 0}}
    journal.write_text("\n".join([*lines, json.dumps(changed)]) + "\n")
    if name != "link/mine":
        with pytest.raises(actshard.FormatError, match="'files': expected sizes of files below"):
            actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2, resume=True)
    else:
        writer = actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2, resume=True)
        assert writer._sink is not None
        writer._sink.discard()
    assert mine.read_text() == (tmp_path / "mine").read_text() == "mine"


def test_a_merge_that_was_killed_before_it_began_is_begun_again(tmp_path: Path) -> None:
    """Killed with its lock, and before its marker was written."""
    parts = [written(tmp_path / name, "zarr", k + 1.0) for k, name in enumerate("ab")]
    for resume in (False, True):
        target = tmp_path / f"to{resume}"
        (target / ".actshard").mkdir(parents=True)
        (target / ".actshard/lock").touch()
        assert values(actshard.merge(target, parts, resume=resume)) == [1.0] * 3 + [2.0] * 3


def test_a_refused_merge_leaves_the_journal_of_a_writer(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, "zarr", k + 1.0) for k, name in enumerate("ab")]
    writer = actshard.create(tmp_path / "to", "zarr", layers=[0, 1], d_model=8)
    writer.append(np.full((1, 2, 4, 8), 3.0, np.float32))
    writer.flush()
    with pytest.raises(actshard.LockedError):
        actshard.merge(tmp_path / "to", parts, resume=True)
    writer.abort()
    for merge in (actshard.merge, actshard.plan.merge):
        with pytest.raises(actshard.UnfinishedError):
            merge(tmp_path / "to", parts)
    with pytest.raises(actshard.UnfinishedError):
        actshard.merge(tmp_path / "to", parts, resume=True)
    with actshard.create(tmp_path / "to", "zarr", layers=[0, 1], d_model=8, resume=True) as writer:
        assert writer.committed == 1
    assert values(tmp_path / "to") == [3.0]


def test_a_part_whose_writer_was_killed_at_once_is_missing(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "run", "zarr", layers=[0, 1], d_model=8, part=(0, 2)) as writer:
        writer.append(np.ones((3, 2, 4, 8), np.float32))
    (tmp_path / "run/.parts/part-00001-of-00002/.actshard").mkdir(parents=True)
    with pytest.raises(actshard.UnfinishedError, match="expected 2 finished parts, part 1 missing"):
        actshard.merge(tmp_path / "run")
    (tmp_path / "run/.parts/part-00000-of-00002").rename(tmp_path / "away")
    with pytest.raises(actshard.UnfinishedError):
        actshard.merge(tmp_path / "run")


@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe", "pickle"])
@pytest.mark.parametrize("alive", [False, True])
def test_a_plan_does_not_replace_the_rows_of_an_unfinished_dataset(tmp_path: Path, format: str, alive: bool) -> None:
    with actshard.create(tmp_path / "s", format, layers=[0, 1], d_model=4) as source:
        source.append(np.full((5, 2, 3, 4), 9, np.float32))
    plan = actshard.plan.convert(tmp_path / "s", tmp_path / "d", format, tasks=1)
    begun = actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=4)
    begun.append(np.ones((3, 2, 3, 4), np.float32))
    begun.flush()
    if not alive:
        begun.abort()
    for call in (
        lambda: actshard.plan.convert(tmp_path / "s", tmp_path / "d", format, tasks=1),
        lambda: (plan.run(0), plan.commit()),
    ):
        with pytest.raises(actshard.ActshardError) as caught:
            call()
        assert isinstance(caught.value, actshard.UnfinishedError | actshard.LockedError)
    if not alive:
        begun = actshard.create(tmp_path / "d", format, layers=[0, 1], d_model=4, resume=True)
    begun.append(np.ones((3, 2, 3, 4), np.float32))
    begun.close()
    store = actshard.open(tmp_path / "d")
    assert len(store) == 6
    assert (store.layer(0).rows()[:] == 1).all()


@pytest.mark.parametrize("format", ["zarr", "pickle", "lmprobe"])
def test_parts_are_not_merged_over_a_dataset_that_is_being_written(tmp_path: Path, format: str) -> None:
    whole = actshard.create(tmp_path / "d", format, layers=[0], d_model=2, dtype="float32")
    for part in range(2):
        with actshard.create(tmp_path / "d", format, layers=[0], d_model=2, dtype="float32", part=(part, 2)) as writer:
            writer.append(np.full((3, 1, 5, 2), part, np.float32))
    with pytest.raises(actshard.LockedError):
        actshard.merge(tmp_path / "d")
    whole.append(np.full((3, 1, 5, 2), 9, np.float32))
    whole.flush()
    whole.abort()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(
        actshard.UnfinishedError, match="3 examples of an unfinished dataset: its writer was interrupted"
    ):
        actshard.merge(tmp_path / "d")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
