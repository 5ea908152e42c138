"""Guarantees of merge(): parts in order, every row and column, files renamed where possible; calls can be repeated."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats
from actshard.base.work import Lock
from actshard.writing import merging
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


def merger_of(format: str) -> Any:
    """The class that merges a format."""
    return type(formats.get(format).merger())


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
        ends = (".bin", ".safetensors", ".gz")
        rows = [p for p in made.rglob("*") if p.suffix in ends or (p.parent.name == "activations" and p.name[0] != ".")]
        moved = [p for p in rows if p.stat().st_ino in inodes]
        if format == "saev":
            assert own["max_tokens_per_shard"] == 24  # four examples: parts of 5, 3 and 7 are split again
            assert moved
            assert len(moved) < len(rows)
        else:
            assert len(rows) >= 3
            assert len(moved) == len(rows)


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
    run = actshard.merge(tmp_path / "e")
    assert len(actshard.open(run)) == 2
    with pytest.raises(actshard.ArgumentError, match="write it as one store with actshard convert"):
        actshard.merge(run, physical=True)
    whole = actshard.convert(run, tmp_path / "whole", "zarr", verify=True).path
    assert not (whole / "manifest.json").exists()


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
    """Pickle shards of several machines, as in the text: merged to one folder and one list, with unique numbers."""
    source = GOLDEN / "pickle/numpy2_proto4"
    ids = json.loads((source / "metadata.json").read_text())["shards"]
    made = actshard.merge(tmp_path / "d", [source])
    store = actshard.open(made)
    assert store.table.equals(actshard.open(source).table)
    listed = json.loads((made / "metadata.json").read_text())
    assert [s["checksum"] for s in listed["shards"]] == [s["checksum"] for s in ids]


def one(path: Path, format: str, value: float = 1, n: int = 3, **options: Any) -> Path:
    """A small dataset. Samples are numbered from `value` if numbers must be unique."""
    columns = {"columns": {"sample_idx": [int(value) * 100 + i for i in range(n)]}} if format == "pickle" else {}
    with actshard.create(path, format, layers=LAYERS, d_model=WIDTH, **options) as writer:
        writer.append(np.full((n, 2, 3, WIDTH), value, np.float32), **columns)
    return writer.path


def tree(path: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


@pytest.mark.parametrize("format", OPTIONS)
def test_what_is_refused_leaves_nothing_behind_and_blocks_nothing(tmp_path: Path, format: str) -> None:
    a = one(tmp_path / "a", format, 1)
    b = one(tmp_path / "b", format, 2)
    other = one(tmp_path / "other", format, 3, **({"metadata": {}} if format == "saev" else {}))
    with actshard.create(tmp_path / "narrow", format, layers=LAYERS, d_model=2) as writer:
        writer.append(np.ones((1, 2, 3, 2), np.float32))
    narrow = writer.path
    target = tmp_path / "made"
    with refuses(actshard.FormatError, narrow, "d_model"):
        actshard.merge(target, [a, narrow])
    if format == "pickle":
        copy = tmp_path / "copy"
        shutil.copytree(a, copy)
        with pytest.raises(actshard.FormatError, match="sample_idx 100 is also in"):
            actshard.merge(target, [a, copy])
    if format != "zarr":
        with refuses(actshard.ArgumentError, None, "physical"):
            actshard.merge(target, [a, b], physical=True)
    for parts in ([], [a, a]):
        with pytest.raises(actshard.ArgumentError):
            actshard.merge(target, parts)
    with refuses(actshard.ArgumentTypeError, None, "list of paths"):
        actshard.merge(target, str(a))
    assert not target.exists()
    made = actshard.open(actshard.merge(target, [a, b, other]))
    assert [made.last_tokens(3, [i])[0, 0] for i in range(9)] == [1] * 3 + [2] * 3 + [3] * 3


@pytest.mark.parametrize("format", OPTIONS)
def test_a_merge_that_was_interrupted_is_finished_by_the_same_call_and_no_other(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = (one(tmp_path / name, format, i) for i, name in enumerate("abc", 1))
    target = tmp_path / "made"
    before = tree(tmp_path / "a"), tree(tmp_path / "b"), tree(tmp_path / "c")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(target / "x"))

    with monkeypatch.context() as patched:
        patched.setattr(merger_of(format), "run", lambda _, plan: full(plan))
        with pytest.raises(actshard.DiskFullError):
            actshard.merge(target, [a, b])
    others: list[dict[str, Any]] = [
        {"parts": [a, c]},
        {"parts": [b, a]},
        {"parts": [a]},
        {},
        {"parts": [a, b], "physical": True},
    ]
    for other in others:
        with refuses(actshard.ArgumentError, target, "was begun here and is not finished"):
            actshard.merge(target, **other)
    made = actshard.open(actshard.merge(target, [a, b]))
    assert [made.last_tokens(3, [i])[0, 0] for i in range(6)] == [1] * 3 + [2] * 3
    assert (tree(tmp_path / "a"), tree(tmp_path / "b"), tree(tmp_path / "c")) == before
    with refuses(actshard.ExistsError, target):
        actshard.merge(target, [a, c])


@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
def test_a_part_may_be_merged_as_soon_as_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """A rank that polls ``merge`` may take the last part before its writer returns."""
    release = Lock.release

    def merge_after(lock: Lock) -> None:
        release(lock)
        monkeypatch.setattr(Lock, "release", release)
        actshard.merge(tmp_path / "d")

    for rank in range(2):
        writer = actshard.create(tmp_path / "d", format, layers=[0], d_model=2, part=(rank, 2))
        writer.append(np.full((1, 1, 3, 2), rank, np.float32))
        if rank:
            monkeypatch.setattr(Lock, "release", merge_after)
        writer.close()
    assert len(actshard.open(tmp_path / "d")) == 2


def test_parts_that_are_merged_move_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = write_parts(tmp_path / "d", "lmprobe")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(merger_of("lmprobe"), "run", lambda _, plan: full(plan))
        with pytest.raises(actshard.DiskFullError):
            actshard.merge(tmp_path / "d")
    with refuses(actshard.ArgumentError, tmp_path / "d", "the parts that were written here was begun"):
        actshard.merge(tmp_path / "d", [tmp_path / "x"])
    (tmp_path / "d").rename(tmp_path / "e")
    check(actshard.merge(tmp_path / "e"), wanted)


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {},
        {"parts": ["a"]},
        {"parts": [], "format": "zarr", "move": True, "physical": False},
        {"parts": [3], "format": "zarr", "move": True, "physical": False},
        {"parts": ["a\0"], "format": "zarr", "move": True, "physical": False},
        {"parts": ["a"], "format": "csv", "move": True, "physical": False},
        {"parts": ["a"], "format": "zarr", "move": 1, "physical": False},
        {"parts": ["a"], "format": "zarr", "move": True, "physical": False, "finished": True},
        {"parts": ["a"], "format": "zarr", "move": True, "physical": False, "finished": True, "place": "../../x"},
    ],
)
def test_a_marker_with_odd_fields_is_refused(tmp_path: Path, broken: Any) -> None:
    (tmp_path / "d/.actshard").mkdir(parents=True)
    marker = tmp_path / "d/.actshard/merging.json"
    marker.write_text(json.dumps(broken))
    with refuses(actshard.FormatError, marker, "expected"):
        actshard.merge(tmp_path / "d")


@pytest.mark.parametrize("format", OPTIONS)
def test_datasets_of_different_models_are_joined_only_if_asked(tmp_path: Path, format: str) -> None:
    named = {"saev": "ckpt", "lmprobe": "name", "zarr": "model_id", "pickle": "model_name"}[format]
    a, b = (one(tmp_path / f"{i}", format, i, metadata={named: f"model-{i}"}) for i in (1, 2))
    with refuses(actshard.FormatError, b, "model-1.*model-2.*different_models=True"):
        actshard.merge(tmp_path / "made", [a, b])
    assert not (tmp_path / "made").exists()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = actshard.open(actshard.merge(tmp_path / "made", [a, b], different_models=True))
    texts = [f'{named}: "model-1" is kept, "model-2" of' in str(w.message) for w in caught]
    assert texts == ([] if format == "zarr" else [True])  # a run keeps its stores' metadata
    assert "model-1" in (made.contents.model or "")
    assert len(made) == 6


def test_physical_is_never_ignored(tmp_path: Path) -> None:
    write_parts(tmp_path / "d", "zarr")
    run = actshard.merge(tmp_path / "d")
    with refuses(actshard.ArgumentError, run, "merged already.*new folder"):
        actshard.merge(run, physical=True)
    one_store = actshard.merge(tmp_path / "one", [run], physical=True)
    assert actshard.merge(one_store, physical=True) == one_store
    write_parts(tmp_path / "p", "pickle")
    made = actshard.merge(tmp_path / "p")
    with refuses(actshard.ArgumentError, made, "for Zarr stores"):
        actshard.merge(made, physical=True)


def test_dumps_of_the_first_era_are_merged(tmp_path: Path) -> None:
    """October to November 2024: n_layers in place of a list, CLS for every model, no shards.json."""
    paths = []
    for k in range(2):
        rows = np.full((2, 2, 4, WIDTH), k, np.float32)
        path = tmp_path / f"{k}"
        path.mkdir()
        metadata = {"n_layers": 2, "n_patches_per_img": 3, "d_vit": WIDTH, "n_imgs": 2, "seed": 0}
        metadata |= {"model_org": "clip", "model_ckpt": "x", "n_patches_per_shard": 2 * 2 * 4, "data": "d"}
        (path / "metadata.json").write_text(json.dumps(metadata))
        rows.tofile(path / "acts000000.bin")
        paths.append(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actshard.ActshardWarning)
        made = actshard.open(actshard.merge(tmp_path / "made", paths))
    assert made.layers == (-2, -1)
    assert [float(made.last_tokens(-1, [i])[0, 0]) for i in range(4)] == [0, 0, 1, 1]


def test_parts_that_would_replace_a_finished_dump_are_kept(tmp_path: Path) -> None:
    """The name is a hash of the configuration, so a second extraction has the same name."""
    first = None
    for value in (1, 2):
        for i in range(2):
            with actshard.create(tmp_path / "d", "saev", layers=LAYERS, d_model=WIDTH, part=(i, 2)) as writer:
                writer.append(np.full((3, 2, 3, WIDTH), value, np.float32))
        if first is None:
            first = actshard.merge(tmp_path / "d")
    with refuses(actshard.ExistsError, first, "the merged dataset exists already"):
        actshard.merge(tmp_path / "d")
    assert len(list((tmp_path / "d/.parts").iterdir())) == 2


def test_parts_without_texts_are_told_apart_in_the_whole(tmp_path: Path) -> None:
    a, b = (one(tmp_path / name, "lmprobe", i) for i, name in enumerate("ab"))
    made = actshard.merge(tmp_path / "made", [a, b])
    texts = actshard.open(made).table["text"].to_pylist()
    assert len(set(texts)) == 6
    assert actshard.verify(made, deep=False).findings == []


def test_files_of_other_names_and_missing_ones_are_refused_or_found(tmp_path: Path) -> None:
    a = one(tmp_path / "a", "lmprobe", 1)
    b = one(tmp_path / "b", "lmprobe", 2)
    from conftest import rewrite_index

    def renamed(table: Any, meta: dict[str, Any]) -> Any:
        meta["tensors"]["hidden_layers"]["file_pattern"] = "tensors/h{layer}-{shard}.safetensors"
        return table

    rewrite_index(b, renamed)
    for file in list((b / "tensors").iterdir()):
        layer, shard = file.stem.removeprefix("hidden_layer").split("_shard")
        file.rename(b / f"tensors/h{int(layer)}-{int(shard)}.safetensors")
    made = actshard.open(actshard.merge(tmp_path / "made", [b, a]))
    assert [made.last_tokens(7, [i])[0, 0] for i in range(6)] == [2] * 3 + [1] * 3
    gone = next((b / "tensors").iterdir())
    gone.unlink()
    with refuses(actshard.MissingFileError, gone, "only complete datasets can be merged"):
        actshard.merge(tmp_path / "other", [a, b])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("format", OPTIONS)
def test_a_merge_that_fails_removes_only_what_it_made(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (one(tmp_path / name, format, i) for i, name in enumerate("ab", 1))
    target = tmp_path / "made"
    merge = formats.get(format).merger().run  # type: ignore[union-attr]

    def fails(plan: Any) -> Path:
        if format != "saev":  # saev's folder has its final name only when complete
            merge(plan)
        (target / "notes.txt").write_text("mine")
        raise actshard.FormatError("a source was changed")

    monkeypatch.setattr(merger_of(format), "run", lambda _, plan: fails(plan))
    with pytest.raises(actshard.FormatError, match="was changed"):
        actshard.merge(target, [a, b])
    assert [p.name for p in target.rglob("*")] == ["notes.txt"]


@pytest.mark.parametrize("own_parts", [True, False])
@pytest.mark.parametrize("format", ["zarr", "pickle", "lmprobe"])
def test_parts_whose_columns_have_other_types_are_refused(tmp_path: Path, format: str, own_parts: bool) -> None:
    """Numbers must not become strings because another part has another type. A column without values fits any type."""
    paths = []
    labels: list[list[Any]] = [[0, 1], ["x", "y"]]
    for i, values in enumerate(labels):
        where = tmp_path / "m" if own_parts else tmp_path / f"p{i}"
        part = {"part": (i, 2)} if own_parts else {"machine_id": i, "total_machines": 2} if format == "pickle" else {}
        with actshard.create(where, format, layers=[0], d_model=2, **part) as writer:
            columns = {TEXT[format]: [f"{i}a", f"{i}b"], "label": values}
            writer.append(np.ones((2, 1, 3, 2), np.float32), columns=columns)
        paths.append(writer.path)
    with pytest.raises(actshard.FormatError, match="label"):
        actshard.merge(tmp_path / "m", None if own_parts else paths)
    assert [actshard.open(p).table["label"].to_pylist() for p in paths] == labels


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"exist_ok": True}])
def test_a_part_of_a_dataset_that_is_finished_is_refused_and_leaves_it_as_it_is(
    tmp_path: Path, format: str, options: dict[str, bool]
) -> None:
    """A job that runs again after the merge: its part would block the merged dataset."""
    wanted = write_parts(tmp_path / "d", format)
    actshard.merge(tmp_path / "d")
    before = tree(tmp_path / "d")
    with refuses(actshard.ExistsError, tmp_path / "d", "contains a finished dataset.*Remove it"):
        actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, part=(0, 3), **options, **OPTIONS[format])
    assert tree(tmp_path / "d") == before
    check(tmp_path / "d", wanted)
    assert actshard.merge(tmp_path / "d") == tmp_path / "d"


@pytest.mark.parametrize("format", OPTIONS)
def test_a_merge_that_was_killed_at_once_is_told_by_open(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2):
        one(tmp_path / f"p{i}", format, i + 1.0, **({"machine_id": i} if format == "pickle" else {}))

    def killed(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(merger_of(format), "run", lambda _, plan: killed(plan))
        with pytest.raises(KeyboardInterrupt):
            actshard.merge(tmp_path / "d", [tmp_path / "p0", tmp_path / "p1"])
    for use in (actshard.open, lambda path: actshard.merge(tmp_path / "e", [path])):
        with refuses(actshard.UnfinishedError, tmp_path / "d", "merge that is not finished.*same call"):
            use(tmp_path / "d")
    assert [f.code for f in actshard.verify(tmp_path / "d").findings] == ["unfinished"]
    made = actshard.merge(tmp_path / "d", [tmp_path / "p0", tmp_path / "p1"])
    assert len(actshard.open(made)) == 6


@pytest.mark.parametrize("together", ["shards", "parts", "physical"])
@pytest.mark.parametrize("format", ["zarr", "pickle"])
@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([[], []], [[1], [2, 3]], [[], [], [1], [2, 3]]),
        ([[None], None], [[1.5], []], [[None], None, [1.5], []]),
        (
            [{"a": None}, {}],
            [{"a": {"x": []}}, {"a": {"x": [7]}}],
            [{"a": v} for v in (None, None, {"x": []}, {"x": [7]})],
        ),
        ([{"a": 1}, {"a": 2}], [{"b": 3}, None], [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": None, "b": 3}, None]),
        ([1, 2], np.array([3, 4], np.int32), [1, 2, 3, 4]),
        (np.array([1, 2], np.int8), [3, None], [1, 2, 3, None]),
        (np.array([0.5, 1], np.float32), [0.1, None], [0.5, 1.0, 0.1, None]),
        (np.array([[1, 2], [3, 4]]), [[], [5]], [[1, 2], [3, 4], [], [5]]),
        ([1, 2], [2**70, -1], [1, 2, 2**70, -1]),
    ],
)
def test_values_of_shards_and_parts_are_no_texts_where_one_type_holds_all(
    tmp_path: Path, format: str, together: str, first: Any, second: Any, wanted: Any
) -> None:
    """Empty lists, nulls and narrower numbers in one shard or part do not change the values of the others."""
    if together == "physical" and format != "zarr":
        pytest.skip("physical is for Zarr")
    acts = np.ones((2, 1, 3, 2), np.float32)
    texts = ["a", "b"]
    if together == "shards":
        path = tmp_path / "d"
        options = {"shard_bytes": 48} if format == "pickle" else {}
        try:
            with actshard.create(path, format, layers=[0], d_model=2, **options) as writer:
                for values in (first, second):
                    writer.append(acts, columns={TEXT[format]: texts, "label": values})
                    writer.flush()
        except actshard.ArgumentError:
            pytest.skip("a dataset's first examples decide its types")
    else:
        for i, values in enumerate((first, second)):
            with actshard.create(tmp_path / "d", format, layers=[0], d_model=2, part=(i, 2)) as writer:
                writer.append(acts, columns={TEXT[format]: texts, "label": values})
        path = actshard.merge(tmp_path / "d", physical=together == "physical")
    assert actshard.open(path).table["label"].to_pylist() == wanted


@pytest.mark.parametrize("format", OPTIONS)
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"exist_ok": True}])
def test_a_part_is_refused_while_a_merge_is_unfinished(
    tmp_path: Path, format: str, stop: int, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the merge has moved is in the dataset's folder and nowhere else."""
    from actshard.writing import merging

    wanted = write_parts(tmp_path / "d", format)
    moved, rename = itertools.count(), merging.rename

    def killed(*args: Any) -> None:
        if next(moved) == stop:
            raise KeyboardInterrupt
        rename(*args)

    with monkeypatch.context() as patched:
        patched.setattr(merging, "rename", killed)
        try:
            actshard.merge(tmp_path / "d")
        except KeyboardInterrupt:
            before = tree(tmp_path / "d")
            with refuses(actshard.UnfinishedError, tmp_path / "d", "merge.*not finished.*same call") as caught:
                actshard.create(
                    tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, part=(0, 3), **options, **OPTIONS[format]
                )
            assert "remove" not in str(caught.value)
            assert tree(tmp_path / "d") == before
    check(actshard.merge(tmp_path / "d"), wanted)


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
def test_a_part_beside_a_dataset_that_was_begun_whole_is_refused_and_leaves_it_resumable(
    tmp_path: Path, format: str
) -> None:
    acts = np.ones((2, 1, 3, 2), np.float32)
    writer = actshard.create(tmp_path / "d", format, layers=[0], d_model=2)
    writer.append(acts)
    writer.flush()
    writer.abort()
    with refuses(
        actshard.UnfinishedError,
        tmp_path / "d",
        "contains 2 examples of an unfinished dataset: its writer was interrupted",
    ):
        actshard.create(tmp_path / "d", format, layers=[0], d_model=2, part=(0, 2))
    actshard.create(tmp_path / "d", format, layers=[0], d_model=2, resume=True).close()
    assert len(actshard.open(tmp_path / "d")) == 2


def _user_files(folder: Path, *names: str) -> dict[Path, str]:
    """Files of a user in a folder."""
    made = {folder / name: f"mine: {name}" for name in names}
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return made


@pytest.mark.parametrize("format", OPTIONS)
def test_files_of_others_beside_and_among_parts_stop_no_merge_and_are_kept(tmp_path: Path, format: str) -> None:
    path = tmp_path / "d"
    wanted = write_parts(path, format)
    part = path / ".parts/part-00001-of-00003"
    dataset = next(p for p in part.iterdir() if p.is_dir()) if format == "saev" else part
    beside = _user_files(path, "README.md", "slurm-17_0.out", ".DS_Store", "train.log", "logs/0.txt")
    among = _user_files(path / ".parts", "slurm-17_1.out", ".DS_Store")
    among |= _user_files(part, "notes.txt", "logs/1.txt", "model.txt") | _user_files(dataset, "run.log")
    # Names that a writer creates, in folders that are not parts.
    among |= _user_files(
        path / ".parts/runs", "config.json", "metadata.json", "20241103", "shard_0001.pkl", "labels.bin"
    )
    made = actshard.merge(path)
    check(made, wanted)
    check(path, wanted)
    assert actshard.verify(made, deep=True).ok
    assert {file: file.read_text() for file in beside} == beside
    found = [p.read_bytes() for p in path.rglob("*") if p.is_file() and p not in beside]
    assert sorted(f.decode() for f in found if f.startswith(b"mine: ")) == sorted(among.values()), (
        "a user's file is gone"
    )
    assert (path / "left-in-parts/slurm-17_1.out").is_file()
    ours = re.compile(r".*\.(bin|json|pkl|gz|safetensors|parquet)")
    left = [p for p in (path / "left-in-parts").rglob("*") if p.is_file() and p.parent.name != "runs"]
    assert not [p for p in left if ours.fullmatch(p.name)]
    assert not (path / ".parts").exists()
    assert not (path / ".actshard").exists()
    assert actshard.merge(path) == made


@pytest.mark.parametrize("linked", [".parts", ".parts/part-00001-of-00003"])
@pytest.mark.parametrize("format", OPTIONS)
def test_files_behind_a_link_are_copied_and_kept(tmp_path: Path, format: str, linked: str) -> None:
    """A merge of its own parts moves files. Those of a folder elsewhere, to which a link leads, are not the dataset's to move."""
    path, away = tmp_path / "d", tmp_path / "away"
    wanted = write_parts(path, format)
    (path / linked).rename(away)
    (path / linked).symlink_to(away)
    files = {file: file.read_bytes() for file in away.rglob("*") if file.is_file()}
    made = actshard.merge(path)
    check(made, wanted)
    assert actshard.verify(made, deep=True).ok
    assert {file: file.read_bytes() for file in away.rglob("*") if file.is_file()} == files
    assert not (path / ".parts").exists()
    assert actshard.merge(path) == made


def test_files_among_parts_are_kept_when_a_merge_is_killed_before_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = write_parts(tmp_path / "d", "pickle")
    _user_files(tmp_path / "d/.parts/part-00001-of-00003", "notes.txt")
    rename = merging.rename
    with monkeypatch.context() as patched:

        def killed(source: Path, target: Path) -> None:
            rename(source, target)
            if source.name == ".parts":
                raise KeyboardInterrupt

        patched.setattr(merging, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            actshard.merge(tmp_path / "d")
    actshard.merge(tmp_path / "d")
    check(tmp_path / "d", wanted)
    assert (tmp_path / "d/left-in-parts/part-00001-of-00003/notes.txt").read_text() == "mine: notes.txt"


@pytest.mark.parametrize(
    ("format", "name"), [("pickle", "metadata.json"), ("zarr", "manifest.json"), ("lmprobe", "index")]
)
def test_what_a_merge_would_write_over_is_refused_before_the_first_part(tmp_path: Path, format: str, name: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text("{}")
    with refuses(actshard.ExistsError, tmp_path / "d", f"{name}.*move it away"):
        actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, part=(0, 3), **OPTIONS[format])
    assert [p.name for p in (tmp_path / "d").iterdir()] == [name]
    (tmp_path / "d" / name).unlink()
    write_parts(tmp_path / "d", format)
    (tmp_path / "d" / name).write_text("{}")
    before = tree(tmp_path / "d")
    with refuses(actshard.ExistsError, tmp_path / "d", f"{name}.*move it away"):
        actshard.merge(tmp_path / "d")
    assert tree(tmp_path / "d") == before


def test_a_part_of_a_saev_dump_that_is_written_again_names_the_finished_one(tmp_path: Path) -> None:
    """saev's folder may contain several dumps, so new parts belong to another dump. A repeated job is told about the first."""
    wanted = write_parts(tmp_path / "d", "saev")
    made = actshard.merge(tmp_path / "d")
    before = tree(made)
    write_parts(tmp_path / "d", "saev", only=(1,))
    said = rf"next to them is a finished dataset \({made.name}\)"
    (finding,) = actshard.verify(tmp_path / "d").findings
    assert finding.code == "unfinished"
    assert re.search(said, finding.found)
    for verb in (actshard.open, actshard.merge):
        with pytest.raises(actshard.UnfinishedError, match=said):
            verb(tmp_path / "d")
    assert tree(made) == before
    check(made, wanted)
    shutil.rmtree(tmp_path / "d/.parts")
    check(tmp_path / "d", wanted)
    assert actshard.merge(tmp_path / "d") == made


def test_parts_of_another_saev_dump_are_merged_beside_the_first(tmp_path: Path) -> None:
    first = write_parts(tmp_path / "d", "saev")
    made = [actshard.merge(tmp_path / "d")]
    for i in range(2):
        with actshard.create(tmp_path / "d", "saev", layers=LAYERS, d_model=WIDTH, part=(i, 2)) as writer:
            writer.append(np.full((2, 2, 3, WIDTH), i, np.float32))
    made.append(actshard.merge(tmp_path / "d"))
    check(made[0], first)
    assert len(actshard.open(made[1])) == 4
    assert not (tmp_path / "d/.parts").exists()


def test_parts_of_which_only_folders_exist_are_told(tmp_path: Path) -> None:
    write_parts(tmp_path / "d", "zarr", only=(0,))
    part = next((tmp_path / "d/.parts").iterdir())
    shutil.rmtree(part)
    part.mkdir()
    with refuses(actshard.UnfinishedError, tmp_path / "d/.parts", "only empty folders"):
        actshard.merge(tmp_path / "d")


def test_a_set_of_parts_is_refused(tmp_path: Path) -> None:
    """A set has no order, and the order of parts is that of the examples."""
    with pytest.raises(actshard.ArgumentTypeError, match="parts: expected a list of paths in order, found set"):
        actshard.merge(tmp_path / "d", {tmp_path / "a", tmp_path / "b"})
