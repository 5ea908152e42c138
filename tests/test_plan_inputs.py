"""Guarantees of the files that a plan watches: those of its datasets, and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.location import Location
from actshard.reading import inputs
from conftest import GOLDEN


def _made(path: Path, format: str, n: int = 5, **more: Any) -> Path:
    rng = np.random.default_rng(n)
    with actshard.create(path, format, layers=[0, 1], d_model=8, **more) as writer:
        for i in range(n):
            writer.append([rng.standard_normal((2, 1 + i % 3, 8)).astype(np.float32)])
    return path


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def _same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def test_files_beside_the_parts_of_a_list_are_nobodys_input(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("began")
    parts = [_made(tmp_path / "a", "zarr"), _made(tmp_path / "b", "lmprobe", 7)]
    (tmp_path / "plan.json").write_text("an older plan")
    plan = actshard.plan.convert(parts, tmp_path / "d", "npy", tasks=3)
    plan.save(tmp_path / "plan.json")
    plan = actshard.plan.load(tmp_path / "plan.json")
    for task in range(len(plan)):
        plan.run(task)
    (tmp_path / "log.txt").write_text("began, and ended")
    plan.commit()
    actshard.convert(parts, tmp_path / "one", "npy")
    assert _bytes(tmp_path / "d") == _bytes(tmp_path / "one")


@pytest.mark.parametrize("name", ["a/.zattrs", "b/metadata.json"])
def test_metadata_of_each_part_of_a_list_are_watched(name: str, tmp_path: Path) -> None:
    parts = [_made(tmp_path / "a", "zarr"), _made(tmp_path / "b", "pickle", shard_bytes=400)]
    plan = actshard.plan.convert(parts, tmp_path / "d", "npy", tasks=2, columns=[])
    for task in range(len(plan)):
        plan.run(task)
    os.utime(tmp_path / name, ns=(1, 1))
    with pytest.raises(actshard.ChangedInputError, match=f"{name}: was written again"):
        plan.commit()


def test_folders_of_several_machines_are_watched_and_what_is_above_them_is_not(tmp_path: Path) -> None:
    parts = [_made(tmp_path / f"m{i}", "pickle", machine_id=i, shard_bytes=400) for i in range(2)]
    (tmp_path / "log.txt").write_text("began")
    plan = actshard.plan.convert(parts, tmp_path / "d", "npy", tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    watched = {Path(each.path).relative_to(tmp_path).as_posix() for each in plan.inputs}
    assert {"m0/metadata.json", "m1/metadata.json"} <= watched
    assert "log.txt" not in watched
    before = (tmp_path / "m1/metadata.json").stat()
    os.utime(tmp_path / "m1/metadata.json", ns=(1, 1))
    with pytest.raises(actshard.ChangedInputError, match=r"m1/metadata\.json: was written again"):
        plan.commit()
    os.utime(tmp_path / "m1/metadata.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    plan.commit()


def test_of_a_folder_with_many_files_every_machine_watches_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _made(tmp_path / "s", "pickle", 60, shard_bytes=400)
    store = actshard.open(path)
    first = Location.first
    found = []
    for step in (1, -1):  # machines list a folder in different orders
        monkeypatch.setattr(Location, "first", lambda self, most, step=step: first(self, 10_000)[::step][:most])
        found.append(inputs._files(store, 8))
    names = [Location.at(file).name for file in found[0] or ()]
    assert found[0] == found[1]
    assert "metadata.json" in names
    assert len(names) <= 16
    assert len(store.contents.files()) > 16


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("lmprobe", "index/train-00000-of-00001.parquet"),
        ("zarr", "arrays/seq_len/0"),
        ("zarr", "arrays/seq_len/.zarray"),
        ("zarr", "arrays/activations/.zarray"),
        ("zarr", "arrays/label/0"),
    ],
)
def test_columns_and_lengths_outside_of_the_dataset_s_folder_are_watched(
    format: str, name: str, tmp_path: Path
) -> None:
    """A commit would otherwise take rows with the labels of two versions."""
    options = {"storage": "full_sequence"} if format == "lmprobe" else {}
    with actshard.create(tmp_path / "s", format, layers=[0], d_model=8, **options) as writer:
        writer.append(np.ones((6, 1, 4, 8), np.float32), columns={"label": list(range(6))})
    plan = actshard.plan.convert(tmp_path / "s", tmp_path / "d", "npy", tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    os.utime(tmp_path / "s" / name, ns=(1, 1))
    with pytest.raises(actshard.ChangedInputError, match=f"{name}: was written again"):
        plan.commit()


NOT_READ = {"specforge_eagle3": ("vocab_mapping",), "nla_base_merged_f32": ("parts",)}
"""Folders in golden datasets that are not read."""


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
def test_all_files_of_golden_datasets_are_watched() -> None:
    looked = 0
    for path in sorted(p for p in GOLDEN.glob("*/*") if p.is_dir()):
        try:
            store = actshard.open(path)
        except actshard.ActshardError:
            continue
        listed = inputs.inputs_of(store) or ()
        watched = {each.path for each in listed}
        assert len(watched) == len(listed), path
        for folder in map(Path, store.contents.folders or (store.path,)):
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                apart = file.relative_to(folder).parts[0] in NOT_READ.get(path.name, ())
                assert apart or str(Location.at(file)) in watched, file
                looked += 1
    assert looked > 1000
