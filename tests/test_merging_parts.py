"""Parts of a merge that differ: in metadata, in their columns, or in their paths only."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import refuses


@pytest.mark.parametrize("format", ["zarr", "lmprobe"])
def test_a_dataset_is_merged_once_whatever_its_paths(tmp_path: Path, format: str) -> None:
    for name in "ab":
        with actshard.create(tmp_path / name, format, layers=[0], d_model=4) as writer:
            writer.append(np.ones((2, 1, 1, 4), "f4"))
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").symlink_to(tmp_path)
    again = [tmp_path / "link", tmp_path / "folder" / "a", tmp_path / "b" / ".." / "a"]
    if format == "zarr":
        run = actshard.merge(tmp_path / "run", [tmp_path / "a", tmp_path / "b"])
        with refuses(actshard.ArgumentError, None, "a dataset twice"):
            actshard.merge(tmp_path / "m", [run, run / "shards" / "shard-0001.zarr"])
    for path in again:
        with refuses(actshard.ArgumentError, None, "a dataset twice"):
            actshard.merge(tmp_path / "m", [tmp_path / "a", path])
    assert len(actshard.open(actshard.merge(tmp_path / "m", [tmp_path / "link", tmp_path / "b"]))) == 4


def test_the_field_in_which_parts_differ_is_named(tmp_path: Path) -> None:
    for name, pooling in (("a", "mean"), ("b", "last_token")):
        with actshard.create(
            tmp_path / name, "lmprobe", layers=[0], d_model=4, storage="pooled", pooling=pooling
        ) as writer:
            writer.append(np.ones((2, 1, 1, 4), "f4"))
    expected = r'tensors\.hidden_layers\.pooling "mean" as in a, found "last_token"'
    with refuses(actshard.FormatError, tmp_path / "b", expected):
        actshard.merge(tmp_path / "m", [tmp_path / "a", tmp_path / "b"])


METADATA: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (
        "lmprobe",
        {"revision": "r1"},
        {"revision": "r2"},
        actshard.FormatError,
        'model revision "r1".*"r2".*different_models',
    ),
    (
        "lmprobe",
        {"metadata": {"note": "A"}},
        {"metadata": {"note": "B"}},
        actshard.ActshardWarning,
        'note: "A" is kept, "B" of',
    ),
    ("lmprobe", {}, {"metadata": {"note": "B"}}, actshard.ActshardWarning, 'note: null is kept, "B" of'),
    (
        "saev",
        {"metadata": {"dataset": "A"}},
        {"metadata": {"dataset": "B"}},
        actshard.FormatError,
        'dataset "A".*"B".*concat',
    ),
    ("saev", {"metadata": {"data": "A"}}, {"metadata": {"data": "B"}}, actshard.FormatError, 'data "A".*"B".*concat'),
    ("saev", {}, {"metadata": {"pixel_agg": "prefer-fg"}}, actshard.ActshardWarning, 'pixel_agg: "majority" is kept'),
    (
        "pickle",
        {"metadata": {"x": {"y": 1}}},
        {"metadata": {"x": {"y": 2}}},
        actshard.ActshardWarning,
        r"x\.y: 1 is kept, 2 of",
    ),
    ("zarr", {"metadata": {"x": "A"}}, {"metadata": {"x": "B"}}, actshard.ActshardWarning, 'x: "A" is kept, "B" of'),
]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("format", "first", "second", "kind", "message"), METADATA)
def test_metadata_in_which_parts_differ_are_refused_or_named(
    tmp_path: Path, own: bool, format: str, first: dict[str, Any], second: dict[str, Any], kind: Any, message: str
) -> None:
    for i, options in enumerate((first, second, first)):
        path, part = (tmp_path / "m", {"part": (i, 3)}) if own else (tmp_path / str(i), {})
        columns = {"sample_idx": [i]} if format == "pickle" else None
        with actshard.create(path, format, layers=[0], d_model=4, **part, **options) as writer:
            writer.append(np.ones((1, 1, 2, 4), "f4"), columns=columns)
    parts = None if own else [tmp_path / str(i) for i in range(3)]
    physical = format == "zarr"
    if kind is actshard.FormatError:
        with pytest.raises(kind, match=message):
            actshard.merge(tmp_path / "m", parts)
        return
    with pytest.warns(kind, match=message) as caught:
        path = actshard.merge(tmp_path / "m", parts, physical=physical)
    assert [w.message.code for w in caught] == ["metadata-dropped"]
    assert actshard.verify(path, deep=True).ok
    if not own:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actshard.merge(tmp_path / "n", [parts[0], parts[2]], physical=physical)
            if physical:
                run = actshard.open(actshard.merge(tmp_path / "run", parts)).path
                assert json.loads((run / "shards/shard-0001.zarr/.zattrs").read_text())["x"] == "B"


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("way", ["run", "physical", "own parts", "plan", "concat"])
def test_a_part_without_columns_has_its_rows(tmp_path: Path, order: str, way: str) -> None:
    columns = {"text": ["third", "fourth"], "judge": ["good", "bad"], "score": [3, 4], "when": [{"a": 3}, {"a": 4}]}
    own = way == "own parts"
    for i, name in enumerate(order):
        part = {"part": (i, 2)} if own else {}
        with actshard.create(tmp_path / ("m" if own else name), "zarr", layers=[0], d_model=4, **part) as writer:
            writer.append(np.ones((2, 1, 1, 4), "f4"), columns=columns if name == "b" else None)
    parts, path = [tmp_path / name for name in order], tmp_path / "m"
    if way == "plan":
        actshard.run(actshard.plan.merge(path, parts, physical=True, tasks=1))
    elif way == "concat":
        actshard.convert(actshard.concat(parts), path, "zarr")
    else:
        actshard.merge(path, None if own else parts, physical=way != "run")
    table = actshard.open(path).table.to_pydict()
    for name, values in columns.items():
        assert table["prompt" if name == "text" else name] == (
            [None] * 2 + values if order == "ab" else values + [None] * 2
        )
    assert actshard.verify(path, deep=True).ok
