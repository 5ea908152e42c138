"""Two requests are the same if their records are equal: what a verb accepts as its own result, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.request import RECORD, Request
from actshard.plan import Plan
from shell import run_script
from test_places import values, written

FORMATS = ("saev", "lmprobe", "zarr", "pickle")


def numbered(path: Path, format: str = "npy", n: int = 16) -> Path:
    """A dataset in which the rows of example i are i."""
    rows = np.arange(n, dtype=np.float32)[:, None, None, None] * np.ones((1, 2, 4, 8), np.float32)
    with actshard.create(path, format, layers=[0, 1], d_model=8) as writer:
        writer.append(rows, columns={} if format == "saev" else {"number": list(range(n))})
    return Path(writer.path)


def committed(plan: Plan) -> Path:
    for task in range(len(plan)):
        plan.run(task)
    result = plan.commit()
    return Path(getattr(result, "path", result))


@pytest.mark.parametrize("format", [*FORMATS, "npy", "hf_arrow", "safetensors"])
def test_a_plan_takes_no_conversion_of_other_examples_for_its_own(format: str, tmp_path: Path) -> None:
    source = numbered(tmp_path / "source")
    first = actshard.plan.convert(source, tmp_path / "to", format, examples=slice(0, 8), tasks=2)
    other = actshard.plan.convert(source, tmp_path / "to", format, examples=slice(8, 16), tasks=2)
    place = committed(first)
    assert first.commit().path == place  # repeated
    for call in (other.commit, other.status, other.left, lambda: other.run(0)):
        with pytest.raises(actshard.ExistsError, match=r"did not write: examples: expected .8 numbers"):
            call()
    assert values(place) == list(range(8))


@pytest.mark.parametrize("format", FORMATS)
def test_a_plan_takes_no_conversion_of_another_source_for_its_own(format: str, tmp_path: Path) -> None:
    sources = [written(tmp_path / name, "npy", value) for name, value in (("a", 1.0), ("b", 2.0))]
    plan = actshard.plan.convert(sources[0], tmp_path / "to", format, tasks=2)
    plan.save(tmp_path / "plan.json")
    place = actshard.convert(sources[1], tmp_path / "to", format).path
    with pytest.raises(actshard.ExistsError, match="the files of its source were others"):
        actshard.plan.load(tmp_path / "plan.json").commit()
    assert values(place) == [2.0] * 3


def test_a_dataset_that_no_record_explains_is_not_the_result_of_a_plan(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "npy", 1.0)
    plan = actshard.plan.convert(source, tmp_path / "to", "zarr", tasks=1)
    actshard.convert(source, tmp_path / "to", "zarr")
    (tmp_path / "to" / RECORD).unlink()
    with pytest.raises(actshard.ExistsError, match="no record of its request"):
        plan.run(0)


def test_a_plan_and_the_verb_record_the_same_request(tmp_path: Path) -> None:
    source = numbered(tmp_path / "source")
    options: dict[str, Any] = {"layers": [1], "columns": ["number"], "dtype": "float16"}
    plan = actshard.plan.convert(source, tmp_path / "planned", "npy", tasks=3, **options)
    actshard.convert(source, tmp_path / "converted", "npy", **options)
    records = [Request.read(path) for path in (committed(plan), tmp_path / "converted")]
    assert records[0] == records[1] is not None
    # So that a plan accepts what the verb has finished.
    again = actshard.plan.convert(source, tmp_path / "again", "npy", tasks=3, **options)
    actshard.convert(source, tmp_path / "again", "npy", **options)
    assert again.commit().examples == 16


def test_a_plan_of_a_merge_takes_no_merge_in_another_order_for_its_own(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, "zarr", value) for name, value in (("a", 1.0), ("b", 2.0))]
    plan = actshard.plan.merge(tmp_path / "to", parts)
    actshard.merge(tmp_path / "to", parts[::-1])
    with pytest.raises(actshard.ExistsError, match="did not write: the files of its source were others"):
        committed(plan)
    assert values(tmp_path / "to") == [2.0] * 3 + [1.0] * 3


@pytest.mark.parametrize("format", FORMATS)
def test_a_plan_of_an_extraction_takes_no_other_extraction_for_its_own(format: str, tmp_path: Path) -> None:
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 8, "num_examples": 6, "tasks": 2}
    plans = [
        actshard.plan.create(tmp_path / "to", format, metadata=metadata, **about)
        for metadata in ({_FIELD[format]: "a"}, {_FIELD[format]: "b"})
    ]
    for task in range(2):
        with plans[0].writer(task) as writer:
            writer.append(np.full((len(writer.left), 2, 4, 8), 1.0, np.float32))
    place = Path(plans[0].commit())
    assert plans[0].writer(0).complete
    assert Request.read(place) is not None
    if format == "saev":  # another dump, beside the first
        assert len(plans[1].writer(0).left) == 3
        return
    with pytest.raises(actshard.ExistsError, match=f'{_FIELD[format]}: expected "b", found "a"'):
        plans[1].writer(0)


_FIELD = {"saev": "ckpt", "lmprobe": "note", "zarr": "note", "pickle": "note"}


def test_a_dump_that_arrived_meanwhile_does_not_replace_the_rows_of_a_plan(tmp_path: Path) -> None:
    sources = [written(tmp_path / name, "npy", value) for name, value in (("a", 1.0), ("b", 2.0))]
    plan = actshard.plan.convert(sources[0], tmp_path / "to", "saev", tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    other = actshard.convert(sources[1], tmp_path / "other", "saev").path
    shutil.copytree(other, tmp_path / "to" / other.name)
    with pytest.raises(actshard.ExistsError, match="did not write"):
        plan.commit()
    shutil.rmtree(tmp_path / "to" / other.name)
    assert values(plan.commit().path) == [1.0] * 3


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("accept", ["resume", "exist_ok"])
def test_a_finished_dataset_of_other_metadata_is_not_accepted(accept: str, format: str, tmp_path: Path) -> None:
    about: dict[str, Any] = {"layers": [0], "d_model": 4, "num_examples": 2, "tokens_per_example": 3}
    with actshard.create(tmp_path / "d", format, metadata={_FIELD[format]: "a"}, **about) as writer:
        writer.append(np.ones((2, 1, 3, 4), np.float32))
    again = actshard.create(tmp_path / "d", format, metadata={_FIELD[format]: "a"}, **about, **{accept: True})
    assert again.complete
    if format == "saev":  # the metadata are its name
        return
    with pytest.raises(actshard.ExistsError, match=f'{_FIELD[format]}: expected "b", found "a"'):
        actshard.create(tmp_path / "d", format, metadata={_FIELD[format]: "b"}, **about, **{accept: True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_tokens": 2}, "chunk_tokens: expected 2, found nothing"),
        ({"tokens": "last"}, 'tokens: expected "last", found "all"'),
        ({"layers": {0: 3, 1: 4}}, "layers: expected"),
        ({"columns": []}, "columns: expected"),
        ({"metadata": {"note": "b"}}, "metadata: expected|note: expected"),
        ({"t_max": 16}, "t_max: expected 16, found nothing"),
        ({"overflow": "allow"}, 'overflow: expected "allow", found "refuse"'),
    ],
)
def test_a_finished_conversion_of_another_request_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = numbered(tmp_path / "source")
    actshard.convert(source, tmp_path / "to", "zarr")
    assert actshard.convert(source, tmp_path / "to", "zarr", exist_ok=True).bytes == 0
    for accept in ("exist_ok", "resume"):
        with pytest.raises(actshard.ExistsError, match=message):
            actshard.convert(source, tmp_path / "to", "zarr", **{accept: True}, **changes)


def test_a_finished_merge_is_accepted_by_the_call_that_merged_it(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, "zarr", value) for name, value in (("a", 1.0), ("b", 2.0))]
    merged = actshard.merge(tmp_path / "to", parts, resume=True)
    assert actshard.merge(tmp_path / "to", parts, resume=True) == merged
    with pytest.raises(actshard.ExistsError, match="expected no folder or an empty one"):
        actshard.merge(tmp_path / "to", parts)
    with pytest.raises(actshard.ExistsError, match="its parts were others"):
        actshard.merge(tmp_path / "to", parts[::-1], resume=True)
    with pytest.raises(actshard.ExistsError, match="physical: expected true, found false"):
        actshard.merge(tmp_path / "to", parts, physical=True, resume=True)
    assert values(merged) == [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("format", FORMATS)
def test_merged_parts_record_the_request_of_their_writers(format: str, tmp_path: Path) -> None:
    """The dataset is then what one writer would have created."""
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 8, "dtype": "float32"}
    for part in range(2):
        with actshard.create(tmp_path / "to", format, part=(part, 2), **about) as writer:
            writer.append(np.ones((3, 2, 4, 8), np.float32))
    merged = actshard.merge(tmp_path / "to")
    with actshard.create(tmp_path / "one", format, **about) as writer:
        writer.append(np.ones((6, 2, 4, 8), np.float32))
    assert Request.read(merged) == Request.read(writer.path) is not None
    assert not list(merged.rglob(f"*/{RECORD}"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"verb": 1, "arguments": {}, "sources": []}',
        '{"verb": "create", "arguments": {}, "sources": [1]}',
        '{"actshard_record": 1, "verb": "create", "arguments": {}, "sources": [], "digests": ["12"]}',
    ],
)
def test_a_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    written(tmp_path / "d", "zarr", 1.0)
    (tmp_path / "d" / RECORD).write_text(text)
    with pytest.raises(actshard.FormatError, match=RECORD):
        actshard.create(tmp_path / "d", "zarr", layers=[0, 1], d_model=8, exist_ok=True)
    assert values(tmp_path / "d") == [1.0] * 3  # readers ignore it


def test_records_have_no_paths(tmp_path: Path) -> None:
    """Datasets are moved, and published."""
    source = written(tmp_path / "source", "npy", 1.0)
    verbs: list[Callable[[], object]] = [
        lambda: actshard.convert(source, tmp_path / "converted", "zarr"),
        lambda: actshard.merge(tmp_path / "merged", [source.parent / "converted"]),
    ]
    for verb in verbs:
        verb()
    for path in (source, tmp_path / "converted", tmp_path / "merged"):
        text = (path / RECORD).read_text()
        assert json.loads(text)["examples"] == 3
        assert str(tmp_path) not in text


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle", "npy", "hf_arrow", "safetensors"])
@pytest.mark.parametrize("recorded", [True, False])
def test_columns_that_were_corrected_in_the_source_are_noticed(recorded: bool, format: str, tmp_path: Path) -> None:
    """Rows, types and names are the same."""

    def source(label: int) -> Path:
        shutil.rmtree(tmp_path / "source", ignore_errors=True)
        rows = np.ones((100, 1, 3, 4), np.float32)
        with actshard.create(tmp_path / "source", "npy", layers=[0], d_model=4) as writer:
            writer.append(rows, columns={"text": [f"t{i}" for i in range(100)], "score": [*range(98), label, 99]})
        return tmp_path / "source"

    place = actshard.convert(source(5), tmp_path / "to", format, verify=True).path
    if not recorded:
        (place / RECORD).unlink()
    assert actshard.convert(source(5), tmp_path / "to", format, exist_ok=True, verify=True).examples == 100
    changed = "example 98, column 'score': expected 6, found 5"
    with pytest.raises(actshard.FormatError, match=changed):
        actshard.convert(source(6), tmp_path / "to", format, exist_ok=True, verify=True)
    if recorded:  # the files of the source are others: everything is compared
        with pytest.raises(actshard.ExistsError, match=changed):
            actshard.convert(source(6), tmp_path / "to", format, exist_ok=True)


@pytest.mark.parametrize("name", ["logits_values", "router_layer_0", "patch_labels"])
def test_verifying_compares_arrays_that_are_no_columns(name: str, tmp_path: Path) -> None:
    """Logits, router logits and patch labels, in the formats that store them separately."""
    format = "saev" if name == "patch_labels" else "lmprobe"
    rng = np.random.default_rng(3)
    more: dict[str, Any] = {"labels": rng.integers(0, 9, (6, 3)).astype(np.uint8)}
    if format == "lmprobe":
        logits = rng.standard_normal((6, 2)).astype(np.float32), rng.integers(0, 9, (6, 2)).astype(np.int32)
        more = {"logits": logits, "router": {0: rng.standard_normal((6, 3)).astype(np.float32)}}
    with actshard.create(tmp_path / "source", format, layers=[0], d_model=4) as writer:
        writer.append(np.ones((6, 1, 3, 4), np.float32), **more)
    done = actshard.convert(writer.path, tmp_path / "to", format, verify=True)
    prefix = {"logits_values": "logits", "router_layer_0": "router", "patch_labels": "labels"}[name]
    file = next(path for path in sorted(done.path.rglob("*")) if path.name.startswith(prefix))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(actshard.FormatError, match=f"{prefix}.* of examples 0 to 5 differ"):
        actshard.convert(writer.path, tmp_path / "to", format, exist_ok=True, verify=True)


@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe"])
def test_a_record_that_another_dataset_lies_beside_is_not_believed(format: str, tmp_path: Path) -> None:
    """The files were removed by hand, and others copied there: the hidden file stayed."""
    source, other = (written(tmp_path / name, "npy", value) for name, value in (("a", 1.0), ("b", 2.0)))
    place = actshard.convert(source, tmp_path / "to", format).path
    foreign = actshard.convert(other, tmp_path / "foreign", format).path
    for path in place.iterdir():
        if path.name != RECORD:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(foreign, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(RECORD))
    for accept in ("exist_ok", "resume"):
        with pytest.raises(actshard.ExistsError, match="differs from its source"):
            actshard.convert(source, tmp_path / "to", format, **{accept: True})


def test_a_merge_is_not_recognized_by_its_record_alone(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, "zarr", value) for name, value in (("a", 1.0), ("b", 2.0))]
    merged = actshard.merge(tmp_path / "to", parts)
    record = (merged / RECORD).read_bytes()
    shutil.rmtree(merged)
    written(tmp_path / "to", "lmprobe", 3.0, n=2)
    (tmp_path / "to" / RECORD).write_bytes(record)
    with pytest.raises(actshard.ExistsError, match="expected 6 examples of zarr, found 2 of lmprobe"):
        actshard.merge(tmp_path / "to", parts, resume=True)


def test_the_record_of_an_older_dataset_does_not_stay(tmp_path: Path) -> None:
    """Of parts without records, the merged dataset has none."""
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 8}
    for part in range(2):
        with actshard.create(tmp_path / "to", "zarr", part=(part, 2), metadata={"note": "new"}, **about) as writer:
            writer.append(np.ones((3, 2, 4, 8), np.float32))
        (writer.path / RECORD).unlink()
    (tmp_path / "to" / RECORD).write_bytes((written(tmp_path / "old", "zarr", 1.0) / RECORD).read_bytes())
    merged = actshard.merge(tmp_path / "to")
    assert Request.read(merged) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [({"x": 1}, {"x": True}), ({"x": 1}, {"x": 1.0}), ({"x": None}, {}), ({"x": {"a": 1}}, {"x": {"a": None}})],
)
def test_values_that_python_takes_for_equal_are_told_apart(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 8}
    with actshard.create(tmp_path / "d", "zarr", metadata=first, **about) as writer:
        writer.append(np.ones((3, 2, 4, 8), np.float32))
    assert actshard.create(tmp_path / "d", "zarr", metadata=first, exist_ok=True, **about).complete
    with pytest.raises(actshard.ExistsError, match="x: expected "):
        actshard.create(tmp_path / "d", "zarr", metadata=second, exist_ok=True, **about)


def test_an_option_that_is_none_was_not_given(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "npy", 1.0)
    actshard.convert(source, tmp_path / "to", "lmprobe", revision=None)
    assert actshard.convert(source, tmp_path / "to", "lmprobe", exist_ok=True).bytes == 0


def test_a_journal_without_a_request_is_not_continued(tmp_path: Path) -> None:
    about: dict[str, Any] = {"layers": [0], "d_model": 2}
    writer = actshard.create(tmp_path / "d", "zarr", **about)
    writer.append(np.ones((2, 1, 3, 2), np.float32))
    writer.flush()
    writer.abort()
    journal = tmp_path / "d/.actshard/journal.jsonl"
    head, *lines = journal.read_text().splitlines()
    begun = json.loads(head)
    del begun["record"]
    journal.write_text("\n".join([json.dumps(begun), *lines]) + "\n")
    with pytest.raises(actshard.FormatError, match=r"field .record.: expected the request of the writer, found none"):
        actshard.create(tmp_path / "d", "zarr", resume=True, **about)


def test_every_file_of_an_eagle_dataset_is_an_example(tmp_path: Path) -> None:
    """EAGLE's training loads every file below the folder, as ``list_files`` of its main.py finds them."""
    ids = {"input_ids": [[1, 2, 3, 4]] * 3, "loss_mask": [[1, 1, 1, 1]] * 3}
    with actshard.create(tmp_path / "to", "eagle", layers=["last"], d_model=8) as writer:
        writer.append(np.ones((3, 1, 4, 8), np.float32), columns=ids)
    place = Path(writer.path)
    assert {path.suffix for path in place.rglob("*") if path.is_file()} == {".ckpt"}
    assert Request.read(place) is not None


def test_a_record_beside_a_folder_is_not_that_of_other_files(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        with actshard.create(tmp_path / name, "eagle", layers=["last"], d_model=8) as writer:
            ids = {"input_ids": [[1, 2, 3, 4]] * 3, "loss_mask": [[1, 1, 1, 1]] * 3}
            writer.append(np.full((3, 1, 4, 8), value, np.float32), columns=ids)
    assert Request.read(tmp_path / "a") is not None
    assert actshard.verify(tmp_path / "a", deep=True).ok
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    assert Request.read(tmp_path / "a") is None
    assert actshard.verify(tmp_path / "a", deep=True).ok


def test_a_journal_with_digests_of_other_layers_is_an_error(tmp_path: Path) -> None:
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 8}
    writer = actshard.create(tmp_path / "d", "npy", **about)
    writer.append(np.ones((2, 2, 2, 8), np.float32))
    writer.flush()
    writer.abort()
    journal = tmp_path / "d/.actshard/journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if "state" in line:
            line["digests"] = line["digests"][:1]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(actshard.FormatError, match="expected 2, one per layer, found 1"):
        actshard.create(tmp_path / "d", "npy", resume=True, **about).close()


def test_an_old_record_in_an_empty_folder_stops_no_plan(tmp_path: Path) -> None:
    sources = [written(tmp_path / name, "npy", value) for name, value in (("a", 1.0), ("b", 2.0))]
    old = actshard.convert(sources[0], tmp_path / "old", "zarr").path
    (tmp_path / "to").mkdir()
    shutil.copy(old / RECORD, tmp_path / "to" / RECORD)
    assert values(committed(actshard.plan.convert(sources[1], tmp_path / "to", "zarr", tasks=2))) == [2.0] * 3


def test_a_removed_record_of_a_source_changes_no_source(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, "zarr", value) for name, value in (("a", 1.0), ("b", 2.0))]
    plan = actshard.plan.convert(parts[0], tmp_path / "plan", "npy", tasks=1)
    merged = actshard.merge(tmp_path / "to", parts)
    (parts[0] / RECORD).unlink()
    assert actshard.merge(tmp_path / "to", parts, resume=True) == merged
    assert values(committed(plan)) == [1.0] * 3


def test_a_damaged_record_of_one_dump_stops_no_plan_of_another(tmp_path: Path) -> None:
    other = written(tmp_path / "dumps", "saev", 1.0)
    (other / RECORD).write_text("")
    plan = actshard.plan.create(tmp_path / "dumps", "saev", layers=[0], d_model=8, num_examples=2, tasks=1)
    with plan.writer(0) as writer:
        writer.append(np.ones((2, 1, 4, 8), np.float32))
    assert values_of_layer(Path(plan.commit())) == [1.0] * 2


def values_of_layer(path: Path) -> list[float]:
    store = actshard.open(path)
    return [float(store.sequence(i, 0)[0, 0]) for i in range(len(store))]


def test_a_plan_accepts_what_the_first_rows_decided(tmp_path: Path) -> None:
    about: dict[str, Any] = {"layers": [0, 1], "d_model": 8, "num_examples": 3, "tasks": 1}
    plan = actshard.plan.create(tmp_path / "to", "zarr", **about)
    with plan.writer(0) as writer:
        writer.append(np.ones((3, 2, 4, 8), np.float32))
    plan.commit()
    again = actshard.plan.create(tmp_path / "to", "zarr", dtype="float32", exist_ok=True, **about)
    assert again.writer(0).complete


@pytest.mark.parametrize("format", ["zarr", "lmprobe", "pickle"])
def test_a_merge_that_is_killed_and_then_fails_leaves_no_files(format: str, tmp_path: Path) -> None:
    parts = [written(tmp_path / name, format, value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    script = """
import os, sys
import actshard
from actshard.formats.merging import Merge
take, calls = Merge.take, []
def third(self, source, target):
    calls.append(target)
    if len(calls) == 3:
        os._exit(9)
    take(self, source, target)
Merge.take = third
actshard.merge(sys.argv[1], sys.argv[2:])
"""
    run_script(script, tmp_path / "to", *parts)
    assert (tmp_path / "to/.actshard/merging.json").exists()
    with pytest.raises(actshard.UnfinishedError, match="merge that is not finished"):
        actshard.open(tmp_path / "to")
    whole = parts[2].rename(tmp_path / "away")
    with pytest.raises(actshard.ActshardError):
        actshard.merge(tmp_path / "to", parts)
    whole.rename(parts[2])
    assert len(values(actshard.merge(tmp_path / "to", parts))) == 9


_ODD, _WORD = 0x9E3779B97F4A7C15, 1 << 64


def _rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) % _WORD


def _hash(rows: Any) -> int:
    """The hash of an example's rows, from its definition: four lanes of multiply and rotate, with the length of each row."""
    lanes = [_ODD * k % _WORD for k in (1, 2, 3, 4)]

    def mix(lane: int, word: int) -> None:
        lanes[lane] = _rotated((lanes[lane] ^ word) * _ODD % _WORD, 29)

    for row in rows:
        data = row.tobytes()
        for at in range(0, len(data), 8):
            mix(at // 8 % 4, int.from_bytes(data[at : at + 8], "little"))
        mix(3, len(data))
    total = 0
    for lane in lanes:
        total = (_rotated(total, 23) ^ lane) * _ODD % _WORD
    return total


def _digests(rows: Any) -> list[str]:
    """The digests of ``(n, layers, tokens, d_model)``."""
    hashes = [[_hash(example[layer]) for example in rows] for layer in range(rows.shape[1])]
    return [
        f"{sum(layer) % _WORD:016x}{sum(i * hash for i, hash in enumerate(layer, 1)) % _WORD:016x}" for layer in hashes
    ]


def _recorded(path: Path) -> list[str]:
    record = Request.read(path)
    assert record is not None
    assert record.digests is not None
    return list(map(str, record.digests))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("format", [*FORMATS, "npy", "hf_arrow", "safetensors"])
def test_every_way_to_write_rows_records_their_digests(format: str, dtype: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(8).normal(size=(7, 2, 3, 21)).astype(dtype)
    about: dict[str, Any] = {"layers": [4, 1], "d_model": 21}
    own: dict[str, Any] = {"machine_id": 1} if format == "pickle" else {}
    try:
        with actshard.create(tmp_path / "one", format, **about, **own) as writer:
            writer.append(rows)
    except actshard.DtypeError:
        pytest.skip(f"{format} has no {dtype}")
    expected = _digests(rows)
    assert _recorded(writer.path) == expected
    with actshard.create(tmp_path / "again", format, **about, **own) as writer:
        writer.append(rows[:2])
        writer.flush()
        writer.abort()
    with actshard.create(tmp_path / "again", format, resume=True, **about, **own) as writer:
        writer.append(rows[writer.committed :])
    assert _recorded(writer.path) == expected
    with actshard.create(tmp_path / "npy", "npy", **about) as writer:
        writer.append(rows)
    assert _recorded(actshard.convert(tmp_path / "npy", tmp_path / "converted", format).path) == expected
    for tasks in (1, 3):
        plan = actshard.plan.convert(tmp_path / "npy", tmp_path / f"plan{tasks}", format, tasks=tasks)
        assert _recorded(committed(plan)) == expected
    if format not in FORMATS:
        return
    for part in range(3):
        with actshard.create(tmp_path / "parts", format, part=(part, 3), **about) as writer:
            writer.append(rows[part * 3 : part * 3 + 3])
    assert _recorded(actshard.merge(tmp_path / "parts")) == expected
    pieces = []
    for number, some in enumerate((rows[:5], rows[5:])):
        with actshard.create(
            tmp_path / f"piece{number}", format, **about, **({"machine_id": number} if own else {})
        ) as writer:
            writer.append(some)
        pieces.append(writer.path)
    assert _recorded(actshard.merge(tmp_path / "merged", pieces)) == expected
    for path in (writer.path, *pieces, actshard.merge(tmp_path / "merged", pieces, resume=True)):
        assert actshard.verify(path, deep=True).ok


def test_verifying_finds_rows_that_were_changed_or_moved(tmp_path: Path) -> None:
    path = numbered(tmp_path / "d")
    assert actshard.verify(path, deep=True).ok
    file = path / "activations" / "layer_0001.npy"
    rows = np.load(next(path.rglob("*1.npy")) if not file.exists() else file)
    file = file if file.exists() else next(path.rglob("*1.npy"))

    def found() -> list[tuple[str | None, str]]:
        report = actshard.verify(path, deep=True)
        plan = actshard.plan.verify(path, tasks=3, work=tmp_path / f"work{len(list(tmp_path.iterdir()))}")
        for task in range(len(plan)):
            plan.run(task)
        assert plan.commit().as_dict() == report.as_dict()
        assert actshard.verify(path).ok
        return [(finding.place, finding.found) for finding in report.errors if finding.code == "other-rows"]

    moved = np.concatenate([rows[4:8], rows[:4], rows[8:]])
    np.save(file, moved)
    assert found() == [("layer 1", "the rows of the examples, in another order")]
    rows.view(np.uint8)[5, 3] ^= 1
    np.save(file, rows)
    assert found() == [("layer 1", "other rows")]
    (path / RECORD).unlink()
    assert found() == []


def _by_create(path: Path, format: str, part: tuple[int, int] | None = None) -> Path:
    rows = np.random.default_rng(part).standard_normal((6, 2, 1, 8)).astype(np.float32)
    with actshard.create(path, format, layers=[0, 1], d_model=8, part=part) as writer:
        writer.append(rows, columns={} if format == "saev" else {"number": list(range(6))})
    return Path(writer.path)


def _by_a_plan(path: Path, format: str) -> Path:
    return committed(actshard.plan.convert(_by_create(path.with_name("source"), "npy"), path, format, tasks=3))


def _by_a_merge(path: Path, format: str) -> Path:
    for part in range(2):
        _by_create(path, format, (part, 2))
    return Path(actshard.merge(path))


@pytest.mark.parametrize("write", [_by_create, _by_a_plan, _by_a_merge])
@pytest.mark.parametrize("format", [*FORMATS, "npy", "safetensors"])
def test_a_changed_byte_of_any_file_is_found(format: str, write: Callable[[Path, str], Path], tmp_path: Path) -> None:
    if write is _by_a_merge and actshard.formats.get(format).merger() is None:
        pytest.skip(f"{format} datasets are not merged")
    path = write(tmp_path / "d", format)
    assert actshard.verify(path, deep=True).status == 0
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != RECORD)
    assert len(files) > 1
    for file in files:
        data = file.read_bytes()
        size = len(data.rstrip(b"\0"))  # nothing reads the unused end of a shard of saev
        for at in {size // 2, size - 1}:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert actshard.verify(path, deep=True).status > 0, (file, at)
        file.write_bytes(data)
    assert actshard.verify(path, deep=True).status == 0


@pytest.mark.parametrize("name", ["../away", "/etc/passwd", "a/../../away", "", ".", "a//b", "a\0b"])
def test_a_checksum_of_a_file_elsewhere_is_a_finding_and_the_rest_is_checked(tmp_path: Path, name: str) -> None:
    path = _by_create(tmp_path / "d", "zarr")
    (tmp_path / "away").write_text("not of the dataset")
    record = json.loads((path / RECORD).read_text())
    record["checksums"] = {name: "00000000", **record["checksums"]}
    (path / RECORD).write_text(json.dumps(record))
    (path / "meta/config.json").unlink()
    findings = actshard.verify(path, deep=True).findings
    assert [(f.code, f.place) for f in findings] == [
        ("metadata", f"field 'checksums' in {RECORD}"),
        ("other-file", None),
    ]
    assert "away" not in str(findings[1])


def test_a_changed_file_of_columns_is_named(tmp_path: Path) -> None:
    path = _by_create(tmp_path / "d", "zarr")
    file = path / "arrays/number/0"
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    (finding,) = actshard.verify(path, deep=True).findings
    assert (finding.code, finding.severity, finding.path) == ("other-file", "warning", file)
    file.write_bytes(data)
    (path / "meta/config.json").unlink()
    assert "found no file" in "\n".join(map(str, actshard.verify(path, deep=True).warnings))
    (path / "notes.txt").write_text("a file of the user, which the record does not name")
    (path / RECORD).unlink()
    assert actshard.verify(path, deep=True).status == 0
