"""Folders of probelab, icalens and activault open by their manifests: golden data bit for bit, hostile and unfinished ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits

FOLDERS = sorted(
    [*GOLDEN.glob("probelab/*/store"), *GOLDEN.glob("icalens/*/store"), *GOLDEN.glob("activault/*/bucket/*")]
)
PROBELAB = GOLDEN / "probelab/memmap_v1_ragged/store"
ICALENS = GOLDEN / "icalens/v1_bf16/store"
ACTIVAULT = GOLDEN / "activault/run_bf16_two_hooks/bucket/tiny.web"


def expected(folder: Path) -> dict[str, Any]:
    path = next(p / "expected.npz" for p in folder.parents if (p / "expected.npz").exists())
    return dict(np.load(path))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(GOLDEN)))
def test_golden_folders_come_back(folder: Path, io: str) -> None:
    want = expected(folder)
    store = actshard.open(folder, io=io)
    assert store.contents.provenance["program"] == folder.relative_to(GOLDEN).parts[0]
    assert store.metadata
    lengths = want["lengths"].tolist() if "lengths" in want else [1] * len(store)
    assert store.token_counts.tolist() == lengths
    names = {key for key in want if key.startswith(("layer_", "models."))}
    assert {str(layer) for layer in store.layers} == {key.removeprefix("layer_").removesuffix("_bits") for key in names}
    for layer in store.layers:
        key = f"layer_{layer}" if type(layer) is int else str(layer)
        rows = want[f"{key}_bits"] if f"{key}_bits" in want else bits(want[key])
        read = [store.sequence(i, layer) for i in range(len(store)) if lengths[i]]
        assert np.array_equal(bits(np.concatenate(read)), rows)
        streamed = np.concatenate([batch.activations for batch in store.stream(layer, 4)])
        assert np.array_equal(bits(streamed), rows)
    for name, column in (("input_ids", "token_ids"), ("detection_mask", "detection_mask")):
        if name in want:
            assert [x for row in store.table[column].to_pylist() for x in row] == want[name].tolist()
    for name in ("document_index", "position", "token_id"):
        if name in want:
            assert store.table[name].to_pylist() == want[name].tolist()
    report = actshard.verify(folder, deep=True)
    assert report.ok
    assert report.codes() <= {"duplicate-example"}


def test_layers_and_labels_are_those_of_probelab() -> None:
    store = actshard.open(PROBELAB)
    assert store.layers == (4, 16, 2)
    assert store.table["labels"].to_pylist() == [0, 1, 0, 1]


def test_a_hook_opens_by_itself() -> None:
    store = actshard.open(ACTIVAULT / "models.layers.6.mlp.post")
    whole = actshard.open(ACTIVAULT)
    assert store.layers == ("models.layers.6.mlp.post",)
    assert np.array_equal(store.sequence(5, store.layers[0]), whole.sequence(5, store.layers[0]))


def test_a_layout_in_the_folder_precedes_the_manifest(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PROBELAB, tmp_path / "copy"))
    (copy / "layout.toml").write_text(
        'version = 1\n[activations]\nfiles = "layer_{layer:d}.bin"\naxes = ["row", "dim"]\ndtype = "bfloat16"\nshape = [-1, 16]\n'
    )
    assert len(actshard.open(copy)) == 13


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def meta(change: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "meta.json", change)


def manifest(change: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "activations.json", change)


WRONG: dict[str, tuple[Path, Callable[[Path], object], str]] = {
    "fewer tokens": (PROBELAB, meta(lambda v: v.update(total_tokens=12)), "expected 384 bytes, found 416"),
    "tokens by text": (PROBELAB, meta(lambda v: v.update(total_tokens="13")), "field 'total_tokens'"),
    "negative tokens": (PROBELAB, meta(lambda v: v.update(total_tokens=-1)), "field 'total_tokens'"),
    "huge width": (PROBELAB, meta(lambda v: v.update(hidden_dim=1 << 62)), "field 'hidden_dim'"),
    "a layer that is missing": (PROBELAB, meta(lambda v: v.update(layers=[4, 5])), "layers: expected some of"),
    "more samples": (PROBELAB, meta(lambda v: v.update(n_samples=9)), "offsets.bin"),
    "offsets descend": (
        PROBELAB,
        lambda d: (d / "offsets.bin").write_bytes(np.array([0, 9, 3, 12, 13], "<i8").tobytes()),
        "in ascending order",
    ),
    "offsets beyond": (
        PROBELAB,
        lambda d: (d / "offsets.bin").write_bytes(np.array([0, 1, 2, 3, 99], "<i8").tobytes()),
        "expected 13 rows, found 99",
    ),
    "a short layer": (PROBELAB, lambda d: (d / "layer_2.bin").write_bytes(bytes(5)), "layer_2.bin"),
    "no offsets": (PROBELAB, lambda d: (d / "offsets.bin").unlink(), "offsets.bin"),
    "a path above": (
        ICALENS,
        manifest(lambda v: v["layers"]["5"].update(file="../layer_05.bfloat16.bin")),
        "field 'layers'",
    ),
    "a dtype above": (ICALENS, manifest(lambda v: v.update(dtype="../x")), "field 'layers'"),
    "layers that are none": (ICALENS, manifest(lambda v: v.update(layers=[])), "field 'layers'"),
    "a layer without a number": (ICALENS, manifest(lambda v: v["layers"].update(x=v["layers"]["5"])), "field 'layers'"),
    "another samples file": (ICALENS, manifest(lambda v: v.update(samples_file="/etc/passwd")), "field 'samples_file'"),
    "fewer samples": (ICALENS, manifest(lambda v: v.update(sample_count=8)), "expected 256 bytes, found 288"),
    "a file without its partner": (
        ACTIVAULT,
        lambda d: next((d / "models.layers.6.mlp.post").glob("35*")).unlink(),
        "has no file of layer 'models.layers.6.mlp.post'",
    ),
    "no hooks": (
        ACTIVAULT,
        lambda d: [shutil.rmtree(d / f"models.layers.{name}") for name in ("6.mlp.post", "12.mlp.pre")],
        "expected folders of hooks",
    ),
    "a damaged file": (
        ACTIVAULT,
        lambda d: next((d / "models.layers.6.mlp.post").glob("35*")).write_bytes(b"PK"),
        "35f87c13",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    source, spoil, message = WRONG[case]
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    spoil(copy)
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.open(copy)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not actshard.verify(copy).ok


def test_a_capture_that_runs_is_unfinished(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ICALENS, tmp_path / "copy"))
    edit(copy / "activations.json", lambda v: v.update(status="capturing"))
    with pytest.raises(actshard.UnfinishedError, match="found 'capturing'"):
        actshard.open(copy)


def test_conversion_keeps_rows_and_columns(tmp_path: Path) -> None:
    actshard.convert(PROBELAB, tmp_path / "z", "lmprobe")
    before, after = actshard.open(PROBELAB), actshard.open(tmp_path / "z")
    for i in range(4):
        assert np.array_equal(bits(after.sequence(i, 16)), bits(before.sequence(i, 16)))
    assert after.table["labels"].to_pylist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [("format_version", 2, actshard.UnsupportedError), ("layers", "capturing", actshard.UnfinishedError)],
)
def test_icalens_of_another_version_or_with_an_unfinished_layer_is_refused(
    field: str, value: Any, kind: type[actshard.ActshardError], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ICALENS, tmp_path / "store"))
    said = json.loads((folder / "activations.json").read_text())
    if field == "layers":
        next(iter(said["layers"].values()))["status"] = value
    else:
        said[field] = value
    (folder / "activations.json").write_text(json.dumps(said))
    with pytest.raises(kind, match=r"activations\.json"):
        actshard.open(folder)
