"""Guarantees of convert(): losses are complete, and the same for a dry run, a plan, and a finished or resumed conversion."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import actshard
from actshard.base.request import RECORD
from test_converting import stopped


@pytest.mark.parametrize("texts", [["a", "b", "c"] * 4, ["a"] * 12, [None] * 12, [None] * 4 + ["a", None] * 4])
def test_texts_of_all_shards_are_counted_in_the_losses(
    tmp_path: Path, texts: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run, a conversion, a finished one, a resumed one, and a plan."""
    with actshard.create(tmp_path / "s", "pickle", layers=[0], d_model=4, shard_bytes=200) as writer:
        for i in range(0, 12, 4):
            rows = np.ones((4, 1, 3, 4), np.float32)
            some = texts[i : i + 4]
            writer.append(rows, columns={"text_preview": some} if any(texts) else None)
            writer.flush()
    assert len(list((tmp_path / "s").glob("shard_*"))) == 3
    given = [text for text in texts if text is not None]
    expected = [
        f"{len(given) - len(set(given))} examples have the same text as another one"
        if given
        else "the source has none",
        *([f"{len(texts) - len(given)} examples have no text"] if 0 < len(given) < len(texts) else []),
    ]
    (foretold,) = actshard.writing.converting.preview(tmp_path / "s", tmp_path / "d", "lmprobe")
    done = [actshard.convert(tmp_path / "s", tmp_path / "d", "lmprobe", exist_ok=again) for again in (False, True)]
    monkeypatch.setattr("actshard.writing.sink.COMMIT_BYTES", 1)
    stopped(tmp_path / "s", tmp_path / "r", "lmprobe")
    done.append(actshard.convert(tmp_path / "s", tmp_path / "r", "lmprobe", resume=True))
    plan = actshard.plan.convert(tmp_path / "s", tmp_path / "p", "lmprobe", tasks=3, shard_bytes=200)
    for task in range(len(plan)):
        plan.run(task)
    for each in (foretold, *done, plan.commit()):
        counted = [re.split("[,:;]", x.detail)[0] for x in each.losses if x.what == "texts"]
        assert counted == expected


def test_overflows_of_an_earlier_call_are_refused_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interrupted conversion, and of a finished one."""
    source, target = tmp_path / "s", tmp_path / "d"
    with actshard.create(source, "pickle", layers=[0], d_model=4, shard_bytes=200) as writer:
        for value in (1e6, 1e6, 1):
            writer.append(np.full((4, 1, 3, 4), value, np.float32))
            writer.flush()
    monkeypatch.setattr("actshard.writing.sink.COMMIT_BYTES", 1)
    for is_tried in (True, False):
        stopped(source, target, "npy", dtype="float16", overflow="allow")
        journal = target / ".actshard/journal.jsonl"
        assert ',"overflows":48' in journal.read_text()
        if is_tried:
            with pytest.raises(actshard.ArgumentError, match=r'overflow: expected "allow", as in .*, found "refuse"'):
                actshard.convert(source, target, "npy", dtype="float16", resume=True)
            assert len(journal.read_text().splitlines()) == 2
        done = actshard.convert(source, target, "npy", dtype="float16", resume=True, overflow="allow")
        again = actshard.convert(source, target, "npy", dtype="float16", exist_ok=True, overflow="allow")
        for each in (done, again):
            assert [x.detail for x in each.losses if x.what == "overflow"] == [
                "96 finite values are too large for float16 and are infinite"
            ]
        with pytest.raises(actshard.ExistsError, match='overflow: expected "refuse", found "allow"'):
            actshard.convert(source, target, "npy", dtype="float16", exist_ok=True)
        (target / RECORD).unlink()  # as if another program had written the dataset
        for options in ({"resume": True}, {"exist_ok": True}, {"exist_ok": True, "verify": True}):
            with pytest.raises(actshard.DtypeError, match=r"96 finite float32 values are infinite.*overflow='allow'"):
                actshard.convert(source, target, "npy", dtype="float16", **options)
        shutil.rmtree(target)


@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe", "pickle", "hf_arrow"])
@pytest.mark.parametrize("lengths", [[3, 1, 2, 4], [3, 3, 3, 3]])
def test_columns_with_a_value_per_token_follow_the_tokens_or_are_a_loss(
    tmp_path: Path, format: str, lengths: list[int]
) -> None:
    """In formats that do not declare such columns. A list of this length may also be a vector, if all examples are equally long."""
    lists = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)]
    columns = {"input_ids": lists, "labels": lists, "scores": lists, "vector": [[1, 2]] * 4, "plain": [*range(4)]}
    with actshard.create(tmp_path / "s", "npy", layers=[0], d_model=4) as writer:
        writer.append([np.ones((1, n, 4), np.float32) for n in lengths], columns=columns)
    (foretold,) = actshard.writing.converting.preview(tmp_path / "s", tmp_path / "t", format, tokens="last")
    done = actshard.convert(tmp_path / "s", tmp_path / "t", format, tokens="last")
    assert foretold.losses == done.losses
    table = actshard.open(done.path).table
    last, same = [each[-1:] for each in lists], len(set(lengths)) == 1
    expected = {**columns, "input_ids": last, "labels": last, "scores": lists if same else last}
    assert {name: table[name].to_pylist() for name in expected} == expected
    uncut = [x.detail.rpartition(": ")[2] for x in done.losses if "not cut" in x.detail]
    assert uncut == (["scores"] if same else [])
    whole = actshard.open(actshard.convert(tmp_path / "s", tmp_path / "w", format).path).table
    assert whole["input_ids"].to_pylist() == lists


@pytest.mark.parametrize("format", ["saev", "npy", "lmprobe", "pickle", "hf_arrow"])
def test_sizes_of_large_conversions_follow_from_samples(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a copy of a saev dump, whose parts have smaller shards than the whole."""
    with actshard.create(tmp_path, "saev", layers=[0], d_model=64, num_examples=9000, tokens_per_example=2) as writer:
        labels = np.zeros((9000, 2), np.uint8)
        writer.append(np.random.default_rng(0).standard_normal((9000, 1, 2, 64), dtype=np.float32), labels=labels)
    monkeypatch.setattr("actshard.writing.converting.previewing.WHOLE_BYTES", 1_000_000)
    monkeypatch.setattr("actshard.writing.converting.previewing.SAMPLE_BYTES", 1_000_000)
    (foretold,) = actshard.writing.converting.preview(writer.path, tmp_path / "t", format)
    predicted = actshard.plan.convert(writer.path, tmp_path / "t", format, tasks=2).predicted
    done = actshard.convert(writer.path, tmp_path / "t", format)
    files = [path for path in done.path.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert not predicted.exact
    for each in (foretold, predicted):
        assert each.files == len(files)
        assert abs(each.bytes - size) <= 0.02 * size


@pytest.mark.parametrize("format", ["zarr", "hf_arrow", "pickle"])
def test_attributes_of_later_stores_of_a_run_are_a_loss(tmp_path: Path, format: str) -> None:
    """A conversion keeps those of the first store. Nothing said that the others' are not kept."""

    def write_run(path: Path, names: list[str]) -> Path:
        for i, name in enumerate(names):
            about = {"dataset_name": name, "tags": {"n": i // 9}}
            store = path / f"shards/shard-{i:04}.zarr"
            with actshard.create(store, "zarr", layers=[0], d_model=4, metadata=about) as writer:
                writer.append(np.ones((2, 1, 3, 4), np.float32))
        return path

    run = write_run(tmp_path / "run", ["a", "a", "b", "c"])
    expected = 'dataset_name: "a" is kept, "b" of shard-0002.zarr is not'
    (preview,) = actshard.writing.converting.preview(run, tmp_path / "to", format)
    done = actshard.convert(run, tmp_path / "to", format)
    for losses in (preview.losses, done.losses):
        assert [loss.detail for loss in losses if loss.what == "metadata"] == [expected]
    same = actshard.convert(write_run(tmp_path / "same", ["a", "a"]), tmp_path / "as before", format)
    assert not [loss for loss in same.losses if loss.what == "metadata"]
