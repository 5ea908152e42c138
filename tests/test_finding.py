"""Errors about a path that is no finished dataset: what is there, which format is near, and the one remedy of each cause."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats
from actshard.base import storage
from actshard.base.location import Location
from actshard.base.work import marks
from actshard.reading import finding
from conftest import GOLDEN, refuses, saev_dump

LMPROBE = GOLDEN / "lmprobe/fullseq_f32"
SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
GUESS = "actshard info FOLDER --guess"


def why(path: Path) -> str:
    with pytest.raises(actshard.UnknownFormatError) as caught:
        actshard.open(path)
    return caught.value.detail


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    assert why(tmp_path) == "expected a dataset, found an empty folder"
    (found,) = actshard.verify(tmp_path).findings
    assert str(found).endswith("found an empty folder; check the path, or name the format (format=, --format)")


def test_a_file_is_called_a_file_and_no_format_is_listed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    (tmp_path / "run.onnx").write_bytes(b"\x08\x07\xff")
    np.save(tmp_path / "rows.npy", np.zeros((2, 3)))
    usual = "expected a dataset, found a file; a dataset is usually a folder: pass the folder that contains the file. "
    assert why(tmp_path / "notes.txt").startswith("expected a dataset, found a file; notes.txt: text, not activations")
    assert why(tmp_path / "run.onnx").startswith(usual + "If it contains activations, read them with the program")
    assert why(tmp_path / "rows.npy").startswith(usual)
    assert "actshard info FILE --guess" in why(tmp_path / "rows.npy")


def test_a_folder_is_described_by_its_names_or_their_numbers(tmp_path: Path) -> None:
    filled(tmp_path, "a.txt", "b.md", "c/x.txt")
    assert why(tmp_path).startswith(
        "expected a dataset, found a folder with a.txt, b.md, c/, which no format recognises; a.txt: text, not activations"
    )
    filled(tmp_path, *(f"{n}.log" for n in range(1200)), "LICENSE", "README", "x.json", "y.yaml")
    found = why(tmp_path)
    assert found.startswith("expected a dataset, found a folder with 1,200 .log files, 2 other files, ")
    assert " and 3 more, which no format recognises; " in found
    assert len(found) < 350


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.PT", "a.safetensors", "a.bin", "a.h5", "layers/3/a.pth"])
def test_a_layout_is_proposed_for_files_that_it_can_describe_only(tmp_path: Path, name: str) -> None:
    filled(tmp_path, "notes.txt", "more/notes.md")
    assert "layout.toml" not in why(tmp_path)
    filled(tmp_path, name)
    assert GUESS in why(tmp_path)


def test_only_formats_that_are_near_are_explained(tmp_path: Path) -> None:
    found = why(filled(tmp_path, "config.json"))
    assert re.search("hallulens: looked for .*, found another config.json", found)
    assert not re.search("saev|lmprobe|zarr|specforge|layout", found)


def test_no_format_is_near_files_that_no_format_has(tmp_path: Path) -> None:
    filled(tmp_path, "some/notes.txt", "some/config.yaml")
    for path in (tmp_path / "some", tmp_path / "some/notes.txt", tmp_path):
        near = [name for name in formats.names() if formats.detect(name, path).near]
        assert near == [], path


@pytest.mark.parametrize(
    ("source", "lost", "name", "missing"),
    [(LMPROBE, "index", "lmprobe", "no index/*.parquet"), (SAEV, "metadata.json", "saev", "no metadata.json")],
)
def test_a_dataset_that_lost_its_metadata_is_recognised_by_the_rest(
    tmp_path: Path, source: Path, lost: str, name: str, missing: str
) -> None:
    shutil.copytree(source, tmp_path / "d")
    gone = tmp_path / "d" / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    found = why(tmp_path / "d")
    assert re.search(f"perhaps a damaged {name} dataset: looked for .*, found {re.escape(missing)}", found)


def test_an_error_that_all_formats_have_is_one_reason(tmp_path: Path) -> None:
    filled(tmp_path, "metadata.json")
    (tmp_path / "metadata.json").write_text("{")
    assert why(tmp_path).count(str(tmp_path / "metadata.json")) <= 1


def parts(folder: Path) -> None:
    with actshard.create(folder, "zarr", layers=[0], d_model=2, part=(0, 2)) as writer:
        writer.append(np.ones((1, 1, 2, 2), np.float32))


def killed(folder: Path) -> None:
    writer = actshard.create(folder, "zarr", layers=[0], d_model=2)
    writer.append(np.ones((1, 1, 2, 2), np.float32))
    writer.abort()


def planned(folder: Path, format: str = "zarr") -> None:
    more = {"layers": [0], "d_model": 2, "num_examples": 4, "dtype": "float32", "tokens_per_example": 2}
    with actshard.plan.create(folder, format, tasks=2, **more).writer(0) as writer:
        for _ in writer.left:
            writer.append(np.ones((1, 1, 2, 2), np.float32))


@pytest.mark.parametrize(
    ("make", "remedy", "others"),
    [
        (parts, "merge them with actshard.merge", "resume|commit"),
        (killed, "create or convert with resume", "merge|commit"),
        (planned, "actshard commit finishes it", "resume|merge"),
    ],
)
def test_an_unfinished_dataset_has_the_remedy_of_its_cause_once(
    tmp_path: Path, make: Callable[[Path], None], remedy: str, others: str
) -> None:
    make(tmp_path / "d")
    (found,) = actshard.verify(tmp_path / "d").findings
    assert found.code == "unfinished"
    said = str(found).replace(str(tmp_path), "")
    assert said.count(remedy) == 1
    assert not re.search(others, said)


@pytest.mark.parametrize("format", ["zarr", "saev"])
def test_parts_that_a_plan_writes_are_the_plans(tmp_path: Path, format: str) -> None:
    """Not parts to merge: ``merge`` refuses them, with the same message."""
    planned(tmp_path / "d", format)
    said = "contains tasks of a plan that is not committed: see actshard status .*plan.json"
    for verb in (actshard.open, actshard.merge):
        with refuses(actshard.UnfinishedError, tmp_path / "d", said):
            verb(tmp_path / "d")
    with refuses(actshard.UnfinishedError, tmp_path / "d", said):
        actshard.open(tmp_path / "d/.parts")
    (found,) = actshard.verify(tmp_path / "d").findings
    assert re.search(said, found.found)


def test_folders_that_refuse_to_be_read_do_not_end_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(LMPROBE, tmp_path / "b")
    (tmp_path / "a").mkdir()
    evidence = finding._evidence_of

    def refuse(name: str, folder: Location) -> formats.Evidence:
        if folder.name == "a":
            raise actshard.FileAccessError("cannot access: Permission denied", path=folder)
        return evidence(name, folder)

    monkeypatch.setattr(finding, "_evidence_of", refuse)
    with actshard.open(tmp_path) as store:
        assert store.format == "lmprobe"


def test_a_folder_that_may_not_be_listed_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(LMPROBE, tmp_path / "b")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path) == str(tmp_path / "b/index"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with refuses(actshard.FileAccessError, tmp_path / "b/index", "cannot detect the format of b: .*Permission denied"):
        actshard.open(tmp_path / "b")


def only_dump(folder: Path) -> None:
    """A folder of saev, which stands for its only dump."""
    shutil.copytree(GOLDEN / "saev/v21_cls_labels_multishard", folder)


def converting(folder: Path) -> None:
    actshard.plan.convert(LMPROBE, folder, "zarr", tasks=2).begin()


def creating(folder: Path) -> None:
    planned(folder, "saev")


def writing(folder: Path) -> None:
    """A writer that was killed before its first commit."""
    actshard.create(folder, "npy", layers=[0], d_model=2).__enter__()


def finished(folder: Path) -> None:
    shutil.copytree(LMPROBE, folder)


MADE = (only_dump, converting, planned, creating, writing, finished, parts, killed)


@pytest.mark.parametrize("make", MADE)
def test_no_token_cache_is_built_where_a_path_refers_to_a_dataset(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Its path would open as the cache: by Python, by a configuration before any cache is built, and by a plan."""
    out = tmp_path / "caches/b/train"
    out.parent.mkdir(parents=True)
    make(out)
    before = sorted(path for path in out.rglob("*"))
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    component = {"source": {"train_urls": [str(tmp_path / "a.jsonl")]}, "format": {"type": "prebuilt"}}
    config = actshard.tokens.LmDataConfig.from_dict(
        {
            "tokenizer": "passthrough",
            "vocab_size": 10,
            "cache_dir": str(tmp_path / "caches"),
            "components": {"a": component, "b": component},
        }
    )
    refused = "choose another folder for the token cache"
    with pytest.raises(actshard.ActshardError, match=refused):
        actshard.tokens.build_cache(tmp_path / "a.jsonl", out, format="prebuilt")
    with pytest.raises(actshard.ExistsError, match=refused):
        actshard.plan.tokenize(tmp_path / "a.jsonl", out, format="prebuilt")
    with pytest.raises(actshard.ExistsError, match=refused):
        config.build()
    assert not (tmp_path / "caches/a").exists()
    assert sorted(path for path in out.rglob("*")) == before


def test_a_token_cache_is_built_beside_files_and_datasets_that_its_path_does_not_open(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    filled(tmp_path / "out", "notes.txt")
    for name in ("one", "two"):
        shutil.copytree(LMPROBE, tmp_path / "out" / name)
    for _ in range(2):
        plan = actshard.plan.tokenize(tmp_path / "a.jsonl", tmp_path / "out", format="prebuilt")
        plan.begin()
    actshard.run(plan)
    assert len(actshard.tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "out", format="prebuilt")) == 1
    assert len(actshard.open(tmp_path / "out/one")) == len(actshard.open(LMPROBE))


def test_a_described_dataset_may_share_its_folder_with_a_token_cache(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    actshard.tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "out", format="prebuilt")
    np.save(tmp_path / "out/acts.npy", np.ones((4, 3, 8), np.float32))
    files = {"files": "acts.npy", "axes": ["example", "token", "dim"], "layers": [0]}
    layout = {"version": 1, "activations": files}
    for format in (None, "layout_toml"):
        assert len(actshard.open(tmp_path / "out", format, layout=layout)) == 4
        assert actshard.verify(tmp_path / "out", format=format, layout=layout, deep=True).ok


def test_an_unfinished_build_of_a_token_cache_is_told_as_unfinished(tmp_path: Path) -> None:
    filled(tmp_path / "c", ".actshard-build/recipe.json")
    for opens in (actshard.open, actshard.tokens.open_cache):
        with refuses(actshard.UnfinishedError, tmp_path / "c", "its build is running, or was interrupted"):
            opens(tmp_path / "c")
    assert actshard.verify(tmp_path / "c").codes() == {"unfinished"}


def test_a_path_with_an_equals_sign_is_no_description(tmp_path: Path) -> None:
    folder = tmp_path / "date=2026"
    folder.mkdir()
    np.save(folder / "acts.npy", np.ones((4, 3, 8), np.float32))
    text = 'version = 1\n[activations]\nfiles = "acts.npy"\naxes = ["example", "token", "dim"]\nlayers = [0]\n'
    (folder / "lab.toml").write_text(text)
    for layout in (str(folder / "lab.toml"), folder / "lab.toml", text):
        assert len(actshard.open(folder, layout=layout)) == 4


def written(path: Path, *, count: int = 3, part: tuple[int, int] | None = None, finish: bool = True) -> actshard.Writer:
    writer = actshard.create(path, "zarr", layers=[2], d_model=4, dtype="float32", part=part)
    writer.append(np.full((count, 1, 2, 4), count, np.float32))
    if finish:
        writer.close()
    else:
        writer.flush()
        writer.abort()
    return writer


def test_a_search_that_ended_at_its_bound_found_no_only_dataset(tmp_path: Path) -> None:
    written(tmp_path / "a")
    for k in range(1998):
        (tmp_path / f"m{k:04}").mkdir()
    written(tmp_path / "z", count=5)
    assert "2 datasets" in why(tmp_path)
    (tmp_path / "m9999").mkdir()
    with pytest.raises(
        actshard.UnknownFormatError, match=r"a dataset\. Open one: a.*ended after 2,000 folders"
    ) as caught:
        actshard.open(tmp_path)
    assert not caught.value.searched
    assert [(path.name, name) for path, name in caught.value.candidates] == [("a", "zarr")]


@pytest.mark.parametrize("part", [None, (0, 2)])
def test_a_dataset_next_to_an_unfinished_one_is_not_the_only_one(tmp_path: Path, part: tuple[int, int] | None) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b", part=part, finish=part is not None)
    with pytest.raises(actshard.UnknownFormatError, match=r"2 datasets. Open one: a \(zarr\), b \(unfinished\)"):
        actshard.open(tmp_path)
    shutil.rmtree(tmp_path / "a")
    with refuses(
        actshard.UnfinishedError, tmp_path / "b", "1 unmerged part of" if part else "3 examples of an unfinished"
    ):
        actshard.open(tmp_path)


def test_an_unfinished_dataset_names_the_process_that_writes_it_and_keeps_its_lock(tmp_path: Path) -> None:
    """Whoever opens and closes the file of a record lock loses the lock: a look at an unfinished dataset must not."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "d")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "own: its writer is a writer of this process\n"
        with refuses(actshard.UnfinishedError, tmp_path / "d", f"its writer is running: process {child.pid} on "):
            actshard.open(tmp_path / "d")
        with pytest.raises(actshard.LockedError):
            actshard.create(tmp_path / "d", "npy", layers=[0], d_model=2, resume=True)
        child.communicate("")
    with refuses(actshard.UnfinishedError, tmp_path / "d", r"its writer was interrupted \(create or convert"):
        actshard.open(tmp_path / "d")


HOLDS = """
import sys, numpy as np, actshard
writer = actshard.create(sys.argv[1], "npy", layers=[0], d_model=2)
writer.append(np.ones((2, 1, 3, 2), np.float32))
writer.flush()
try:
    actshard.open(sys.argv[1])
except actshard.UnfinishedError as error:
    print("own:", error.detail.partition(": ")[2].partition(" (")[0], flush=True)
sys.stdin.read()
writer.abort()
"""


@pytest.mark.parametrize("format", ["npy", "zarr", "saev"])
def test_one_look_lists_a_folder_once_and_reads_its_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """All formats see one state of a folder, however many look for files in it."""
    with actshard.create(tmp_path / "d", format, layers=[0], d_model=2, dtype="float32") as writer:
        writer.append(np.ones((2, 1, 3, 2), np.float32))
    path, _ = finding.find(Location.of(tmp_path / "d"))
    calls: Counter[tuple[str, str]] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(path: Any, *args: Any, **options: Any) -> Any:
            calls[name, str(path)] += 1
            return function(path, *args, **options)

        return count

    monkeypatch.setattr(storage.os, "stat", counted("stat", os.stat))
    monkeypatch.setattr(storage.os, "scandir", counted("scandir", os.scandir))
    assert finding.Place.of(path).matches == [format]
    below = {call: count for call, count in calls.items() if call[1].startswith(str(tmp_path))}
    assert below
    assert max(below.values()) == 1


def test_a_change_after_the_listing_is_not_seen_by_the_same_look(tmp_path: Path) -> None:
    filled(tmp_path, "a.json")
    with storage.one_look(str(tmp_path)):
        assert (Location.at(tmp_path) / "a.json").exists()
        filled(tmp_path, "b.json")
        assert not (Location.at(tmp_path) / "b.json").exists()
        assert not (Location.at(tmp_path) / "c" / "d.json").exists()
        assert [entry.name for entry in Location.at(tmp_path).entries()] == ["a.json"]
    assert (Location.at(tmp_path) / "b.json").exists()


@pytest.mark.parametrize("dataset", [SAEV, LMPROBE])
def test_a_dataset_that_nobody_refers_to_is_closed_at_once(dataset: Path) -> None:
    """No error of the search for its format keeps the frames that opened it."""
    gc.collect()
    gc.disable()
    try:
        store = weakref.ref(actshard.open(dataset))
        assert store() is None
    finally:
        gc.enable()


def test_no_message_about_parts_advises_to_remove_them(tmp_path: Path) -> None:
    written(tmp_path / "d", part=(0, 2))
    written(tmp_path / "d/run")
    for path in (tmp_path / "d", tmp_path / "d/.parts"):
        with pytest.raises(actshard.UnfinishedError, match=r"next to them is a finished dataset \(run\)") as caught:
            actshard.open(path)
        assert "part-0" not in caught.value.detail
        assert "remove" not in caught.value.detail


@pytest.mark.parametrize("name", ["_names", "_unfinished"])
def test_a_dataset_that_is_finished_during_a_look_is_unfinished_or_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The marks are read before the folder is listed: otherwise a listing without the last files would meet marks that are gone."""
    writer = actshard.create(tmp_path / "p" / "d", "npy", layers=[0], d_model=2, dtype="float32")
    writer.append(np.ones((4, 1, 3, 2), np.float32))
    writer.flush()
    function = getattr(marks, name)

    def finish_first(*args: Any) -> Any:
        monkeypatch.setattr(marks, name, function)
        writer.close()
        return function(*args)

    monkeypatch.setattr(marks, name, finish_first)
    assert len(actshard.open(tmp_path / "p" / "d")) == 4


def test_the_only_dataset_may_be_finished_while_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = actshard.create(tmp_path / "p" / "d", "npy", layers=[0], d_model=2, dtype="float32")
    writer.append(np.ones((4, 1, 3, 2), np.float32))
    writer.flush()
    looks = 0

    def look(root: Any) -> marks.Marks:
        nonlocal looks
        looks += str(root).endswith("p/d")
        if looks == 2:
            writer.close()
        return marks.look(root)

    monkeypatch.setattr(finding, "look", look)
    assert len(actshard.open(tmp_path / "p")) == 4


def test_a_lock_that_a_kill_left_makes_no_finished_dataset_unfinished(tmp_path: Path) -> None:
    written(tmp_path / "p" / "d")
    filled(tmp_path / "p" / "d", ".actshard/lock")
    assert len(actshard.open(tmp_path / "p" / "d")) == len(actshard.open(tmp_path / "p")) == 3
    (tmp_path / "q").mkdir()
    shutil.move(tmp_path / "p", tmp_path / "q")
    filled(tmp_path / "q" / "p", ".actshard/lock")
    with pytest.raises(actshard.UnknownFormatError, match=r"Open one: p/d \(zarr\)"):
        finding.detect(Location.of(tmp_path / "q"))


def test_a_search_is_bounded_below_folders_that_killed_writers_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        filled(tmp_path / str(number), ".actshard/lock")
        for log in range(100):
            (tmp_path / str(number) / f"log{log}" / "more").mkdir(parents=True)
    looks: list[Location] = []
    of = finding.Place.of
    monkeypatch.setattr(finding.Place, "of", lambda root, *more: looks.append(root) or of(root, *more))
    with pytest.raises(actshard.UnknownFormatError, match="unfinished"):
        actshard.open(tmp_path)
    assert 4 * 32 < len(looks) < 4 * 32 + 16


def test_a_copy_of_a_half_uploaded_folder_tells_how_to_open_it(tmp_path: Path) -> None:
    written(tmp_path / "d")
    filled(tmp_path / "d", ".actshard-pushing.json")
    for verb in (actshard.open, lambda path: actshard.convert(path, tmp_path / "n", "npy")):
        with refuses(
            actshard.UnfinishedError, tmp_path / "d", "if you know that all files are there, remove that file"
        ):
            verb(tmp_path / "d")


def test_one_process_writes_a_renamed_folder_once(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    writer = actshard.create(tmp_path / "x" / "d", "lmprobe", layers=[0], d_model=2)
    writer.append(np.ones((1, 1, 3, 2), np.float32))
    writer.flush()
    (tmp_path / "x").rename(tmp_path / "y")
    (tmp_path / "x").symlink_to(tmp_path / "y")
    with pytest.raises(actshard.LockedError, match="another writer of this process"):
        actshard.create(tmp_path / "y" / "d", "lmprobe", layers=[0], d_model=2, resume=True)
    writer.close()
    assert len(actshard.open(tmp_path / "y" / "d")) == 1


def test_a_folder_of_dumps_with_a_plan_has_the_dumps_that_are_finished(tmp_path: Path) -> None:
    for name, count in (("s", 3), ("more", 4)):
        with actshard.create(tmp_path / name, "npy", layers=[0], d_model=2, dtype="float32") as source:
            source.append(np.ones((count, 1, 3, 2), np.float32))
    actshard.convert(tmp_path / "s", tmp_path / "p" / "saev", "saev")
    actshard.plan.convert(tmp_path / "more", tmp_path / "p" / "saev", "saev", tasks=2).run(0)
    assert len(actshard.open(tmp_path / "p")) == 3


def test_a_long_name_hides_no_dataset(tmp_path: Path) -> None:
    written(tmp_path / "short")
    written(tmp_path / ("l" * 245))
    assert "2 datasets" in why(tmp_path)
    assert len(actshard.open(tmp_path / ("l" * 245))) == 3


def test_a_pipe_in_the_place_of_a_lock_stops_nobody(tmp_path: Path) -> None:
    written(tmp_path / "d", finish=False)
    (tmp_path / "d/.actshard/lock").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "d/.actshard/lock")
    with refuses(actshard.UnfinishedError, tmp_path / "d", "is running, or was interrupted"):
        actshard.open(tmp_path / "d")


def test_a_look_at_a_renamed_folder_keeps_the_lock_of_this_process(tmp_path: Path) -> None:
    writer = actshard.create(tmp_path / "a" / "d", "npy", layers=[0], d_model=2)
    writer.append(np.ones((2, 1, 3, 2), np.float32))
    writer.flush()
    (tmp_path / "a").rename(tmp_path / "b")
    with refuses(actshard.UnfinishedError, tmp_path / "b/d", "its writer is a writer of this process"):
        actshard.open(tmp_path / "b/d")
    code = f"import actshard; actshard.create({str(tmp_path / 'b/d')!r}, 'npy', layers=[0], d_model=2, resume=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "LockedError" in done.stderr
    (tmp_path / "b").rename(tmp_path / "a")
    writer.abort()
