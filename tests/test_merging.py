"""What merge() promises: parts in their order, every row and column, files renamed where they can be; again and again."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, refuses

LAYERS, WIDTH = [3, 7], 8
OPTIONS: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 4 * 2 * 3},
    "lmprobe": {"shard_bytes": 300, "storage": "full_sequence"},
    "zarr": {"chunk_tokens": 3},
    "pickle": {"shard_bytes": 1500},
}
SIZES = [5, 3, 7]
TEXT = {"lmprobe": "text", "zarr": "prompt", "pickle": "text_preview"}


def write_parts(path: Path, format: str, only: tuple[int, ...] = (2, 0, 1)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    parts = []
    for n in SIZES:
        lengths = [3] * n if format == "saev" else rng.integers(1, 8, n).tolist()
        parts.append([rng.standard_normal((2, t, WIDTH)).astype(np.float32) for t in lengths])
    for i in only:
        with actshard.create(path, format, layers=LAYERS, d_model=WIDTH, part=(i, 3), **OPTIONS[format]) as writer:
            extra: dict[str, Any] = (
                {"columns": {TEXT[format]: [f"{i}:{k}" for k in range(SIZES[i])]}} if format != "saev" else {}
            )
            if format == "saev":
                extra = {"labels": np.full((SIZES[i], 3), i, np.uint8)}
            if format == "lmprobe":
                values = np.full((SIZES[i], 2), i, np.float32)
                extra["logits"] = (values, np.arange(2 * SIZES[i]).reshape(-1, 2).astype(np.int32))
                extra["router"] = {3: values + 0.5}
            writer.append(parts[i], **extra)
    return [e for part in parts for e in part]


def check(path: Path, wanted: list[np.ndarray]) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actshard.ActshardWarning)
        store = actshard.open(path)
    assert len(store) == len(wanted)
    for e, example in enumerate(wanted):
        for k, layer in enumerate(store.layers):
            assert np.array_equal(store.sequence(e, layer), example[k])
            assert np.array_equal(store.last_tokens(layer, [e])[0], example[k, -1])
    return store


@pytest.mark.parametrize("format", OPTIONS)
def test_parts_become_one_dataset(tmp_path: Path, format: str) -> None:
    path = tmp_path / "d"
    wanted = write_parts(path, format)
    with refuses(actshard.UnfinishedError, path, "parts"):
        actshard.open(path)
    made = actshard.merge(path)
    store = check(made, wanted)
    of = [i for i, n in enumerate(SIZES) for _ in range(n)]
    if format == "saev":
        assert store.labels is not None
        assert store.labels[:, 0].tolist() == of
        assert made.parent == path
        assert store.warnings == ()
    else:
        assert store.table[TEXT[format]].to_pylist() == [f"{i}:{k}" for i, n in enumerate(SIZES) for k in range(n)]
    if format == "lmprobe":
        assert store.logits()[0][:, 0].tolist() == of
        assert store.router(3)[:, 0].tolist() == [i + 0.5 for i in of]
    report = actshard.verify(made, deep=True)
    assert report.findings == []
    assert not list(path.rglob(".parts"))
    assert not list(path.rglob(".actshard"))
    before = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
    assert actshard.merge(path) == made
    assert before == {p: p.stat().st_mtime_ns for p in made.rglob("*")}


@pytest.mark.parametrize("format", OPTIONS)
def test_a_part_that_is_missing_or_unfinished_is_told(tmp_path: Path, format: str) -> None:
    write_parts(tmp_path / "d", format, only=(0, 2))
    with refuses(actshard.UnfinishedError, tmp_path / "d/.parts", "part 1 missing"):
        actshard.merge(tmp_path / "d")
    writer = actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, part=(1, 3), **OPTIONS[format])
    writer.append(np.ones((1, 2, 3, WIDTH), np.float32))
    writer.abort()
    with refuses(actshard.UnfinishedError, tmp_path / "d/.parts", "part 1 unfinished"):
        actshard.merge(tmp_path / "d")
    assert len(list((tmp_path / "d/.parts").iterdir())) == 3


def test_files_are_renamed_and_only_saevs_are_copied(tmp_path: Path) -> None:
    for format, own in OPTIONS.items():
        wanted = write_parts(tmp_path / format, format)
        inodes = {p.stat().st_ino for p in (tmp_path / format).rglob("*") if p.is_file()}
        made = actshard.merge(tmp_path / format)
        check(made, wanted)
        rows = [
            p for p in made.rglob("*") if p.suffix in (".bin", ".safetensors", ".gz") or p.parent.name == "activations"
        ]
        moved = [p for p in rows if p.stat().st_ino in inodes]
        if format == "saev":
            assert own["max_tokens_per_shard"] == 24  # four examples: 5 and 3 and 7 have to be cut anew
            assert moved
            assert len(moved) < len(rows)
        else:
            assert len(moved) == len([p for p in rows if p.name != ".zarray"]) or format == "zarr"


def test_one_zarr_store_of_many(tmp_path: Path) -> None:
    wanted = write_parts(tmp_path / "d", "zarr")
    made = actshard.merge(tmp_path / "d", physical=True)
    assert (made / ".zmetadata").exists()
    assert not (made / "manifest.json").exists()
    store = check(made, wanted)
    assert store.table["prompt"].to_pylist()[5] == "1:0"
    assert actshard.verify(made, deep=True).findings == []
    for i, chunk in enumerate((3, 4)):
        with actshard.create(
            tmp_path / "e", "zarr", layers=LAYERS, d_model=WIDTH, part=(i, 2), chunk_tokens=chunk
        ) as writer:
            writer.append(np.ones((1, 2, 5, WIDTH), np.float32))
    with pytest.raises(actshard.ArgumentError, match="same chunk_tokens"):
        actshard.merge(tmp_path / "e", physical=True)
    assert len(actshard.open(actshard.merge(tmp_path / "e"))) == 2


@pytest.mark.parametrize("format", OPTIONS)
def test_datasets_are_put_together_and_stay(tmp_path: Path, format: str) -> None:
    wanted = write_parts(tmp_path / "a", format)
    first = actshard.merge(tmp_path / "a")
    second = tmp_path / "b"
    own = {"storage": "full_sequence"} if format == "lmprobe" else {}
    shift = {"metadata": None}
    if format == "pickle":  # other sample numbers
        with actshard.create(second, "pickle", layers=LAYERS, d_model=WIDTH) as writer:
            writer.append(wanted[2:4], columns={"sample_idx": [7, 9], "text_preview": ["x", "y"]})
    else:
        actshard.convert(first, second, format, examples=[2, 3], **own, **shift)
    whole = actshard.merge(tmp_path / "c", [first, second])
    check(whole, [*wanted, *wanted[2:4]])
    check(first, wanted)
    assert actshard.verify(whole).ok
    with refuses(actshard.ArgumentError, None, "twice"):
        actshard.merge(tmp_path / "e", [first, first])


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    for i, layers in enumerate(([1, 2], [1, 3])):
        with actshard.create(tmp_path / str(i), "zarr", layers=layers, d_model=WIDTH) as writer:
            writer.append(np.ones((1, 2, 5, WIDTH), np.float32))
    with refuses(actshard.FormatError, tmp_path / "1", "layers"):
        actshard.merge(tmp_path / "c", [tmp_path / "0", tmp_path / "1"])
    assert not (tmp_path / "c").exists()
    machine = GOLDEN / "pickle/numpy2_proto4"
    copy = tmp_path / "copy"
    shutil.copytree(machine, copy)
    with pytest.raises(actshard.FormatError, match="sample_idx"):
        actshard.merge(tmp_path / "d", [machine, copy])
    with refuses(actshard.MissingFileError, tmp_path / "nowhere"):
        actshard.merge(tmp_path / "nowhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with refuses(actshard.ExistsError, tmp_path / "full"):
        actshard.merge(tmp_path / "full", [tmp_path / "0"])


def test_machines_of_others_are_merged(tmp_path: Path) -> None:
    """Pickle shards of several machines, as the text has them: one folder and one list, numbers unique."""
    source = GOLDEN / "pickle/numpy2_proto4"
    ids = json.loads((source / "metadata.json").read_text())["shards"]
    made = actshard.merge(tmp_path / "d", [source])
    store = actshard.open(made)
    assert store.table.equals(actshard.open(source).table)
    listed = json.loads((made / "metadata.json").read_text())
    assert [s["checksum"] for s in listed["shards"]] == [s["checksum"] for s in ids]
