"""Formats read through locations: a dataset in memory is detected, checked and opened (except rows) like one on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import actshard
from actshard import tokens
from actshard.base.location import Location
from actshard.formats import Options, registry
from actshard.formats.report import Report
from actshard.reading import finding
from actshard.tokens import ledger
from conftest import GOLDEN, refuses

DATASETS = {
    "saev": ["saev/v21_cls_labels_multishard/saev/shards/*", "saev/v20_late_names/**/metadata.json"],
    "pickle": ["pickle/numpy2_proto5", "pickle/ragged_layers_machine3"],
    "zarr": [
        "zarr/single_minimal/activations.zarr",
        "zarr/v3_sharded/activations.zarr",
        "zarr/run_20260122_101112/**/manifest.json",
        "zarr/separator_slash/**/.zgroup",
    ],
    "lmprobe": ["lmprobe/logits_only/**/index", "lmprobe/fullseq_bf16/**/index"],
    "hallulens": ["hallulens_v1/full_capture/capture", "hallulens_v1/resumed_capture/capture"],
}


ROWS_ARE_CHECKED = ("pickle", "lmprobe")
"""Formats whose check reads rows, which only the core can do."""


def places() -> list[Any]:
    found = []
    for name, patterns in DATASETS.items():
        for pattern in patterns:
            path = sorted(GOLDEN.glob(pattern))[0]
            path = path.parent if path.is_file() or path.name == "index" else path
            found.append(pytest.param(name, path, id=f"{name}-{path.relative_to(GOLDEN).parts[1]}"))
    return found


def in_memory(folder: Path) -> Location:
    files = {str(f.relative_to(folder.parent)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    return Location.in_memory(files, "store") / folder.name


def checked(name: str, root: Any) -> tuple[list[Any], dict[str, int]]:
    report = Report(root, name, False)
    registry.get(name).check(root, report, lambda *_: None)
    above = str(root)
    return [
        (f.code, f.place, f.expected, f.found, str(f.path).removeprefix(above)) for f in report.findings
    ], report.checked


@pytest.mark.parametrize(("name", "folder"), places())
def test_a_dataset_in_memory_is_detected_and_checked(name: str, folder: Path) -> None:
    format: Any = registry.get(name)
    root = in_memory(folder)
    assert format.detect(root) == format.detect(folder)
    assert format.detect(root).matches
    assert not format.detect(root.parent).matches
    if name in ROWS_ARE_CHECKED:
        assert {code for code, *_ in checked(name, root)[0]} == {"unsupported"}
        return
    assert checked(name, root) == checked(name, folder)
    # Damage is found as on disk, and reported with the location.
    files = {k: v[: len(v) // 2] for k, v in root.storage.files.items()}  # type: ignore[attr-defined] -- the one in memory
    findings, _ = checked(name, Location.in_memory(files, "store") / folder.name)
    assert any(path.startswith("/") for *_, path in findings)


@pytest.mark.parametrize(("name", "folder"), places())
def test_rows_that_are_not_local_are_refused_by_name(name: str, folder: Path) -> None:
    format: Any = registry.get(name)
    with pytest.raises(actshard.UnsupportedError, match="expected a local path") as caught:
        format.open(in_memory(folder), Options("pread"))
    assert str(caught.value).startswith("memory://store/")


@pytest.mark.parametrize(("name", "folder"), places())
def test_a_dataset_in_memory_is_found_and_verified_like_one_on_the_disk(name: str, folder: Path) -> None:
    root = in_memory(folder)
    assert finding.find(finding.existing(root.parent)) == (root, name)
    for path in (root / "nothing", root.parent / "nothing/below"):
        with refuses(actshard.MissingFileError, path, "expected a dataset, found nothing"):  # type: ignore[arg-type]
            actshard.open(path)
    with pytest.raises(actshard.UnsupportedError, match="expected a local path"):
        actshard.open(root, io="pread")
    report = actshard.verify(root)
    assert (str(report.path), report.format) == (str(root), name)
    assert "unsupported" in report.codes()


def test_a_token_cache_in_memory_is_found_and_its_ledger_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "web/train", format={"type": "prebuilt"})
    root = in_memory(tmp_path / "web")
    assert finding.find_any(root) == (root / "train", "levanter")
    assert ledger.read(root / "train") == ledger.read(tmp_path / "web/train")
    with pytest.raises(actshard.UnsupportedError, match="expected a local path"):
        tokens.open_cache(root)


def test_columns_of_a_dataset_in_memory_are_those_on_the_disk() -> None:
    format: Any = registry.get("hallulens")
    folder = GOLDEN / "hallulens_v1/full_capture/capture"
    held = {
        f"capture/{f.name}": f.read_bytes()
        for f in folder.iterdir()
        if f.name not in ("prompt_activations.npy", "response_activations.npy")
    }
    root = Location.in_memory(held, "store") / "capture"
    mine, theirs = format.open(root, Options.of(root)), format.open(folder, Options.of(folder))
    assert mine.rows is None
    assert str(mine.path) == "memory://store/capture"
    assert mine.metadata == theirs.metadata
    assert mine.column_names == theirs.column_names
    assert len(mine.column_names) > 8
    assert mine.columns([*mine.column_names, "response_attention"]) == theirs.columns(
        [*mine.column_names, "response_attention"]
    )
    with refuses(actshard.NotStoredError, root, "no column 'x'"):  # type: ignore[arg-type]
        mine.columns(["x"])
