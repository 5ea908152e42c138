"""Guarantee: a damaged file of a token cache is found when the cache is copied, and by ``verify --deep``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tokens.conftest import write_lines

import actshard
from actshard import tokens
from actshard.formats.levanter import check
from conftest import GOLDEN


def cache_of(folder: Path, options: dict[str, Any]) -> Path:
    """A cache of two files of rows with weights."""
    records = [{"input_ids": [5, 6, 7, 8], "loss_weights": [0, 1, 1, 0]}] * 9
    sources = [write_lines(folder / f"{i}.jsonl", records) for i in range(2)]
    form = tokens.PrebuiltFormat(loss_weights_key="loss_weights")
    tokens.build_cache(sources, folder / "c", format=form, **options)
    return folder / "c"


def flip(file: Path) -> None:
    """Flips a bit in the middle of a file, whose time stays the same, as that of a failing disk. Flipping twice changes nothing."""
    data, time = bytearray(file.read_bytes()), file.stat().st_mtime_ns
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(time, time))


def in_tasks(source: Path, folder: Path) -> None:
    plan = actshard.plan.stage(source, folder, tasks=100)
    run_tasks(plan)
    plan.commit()


def run_tasks(plan: actshard.plan.Plan) -> None:
    for task in reversed(range(len(plan))):
        plan.run(task)


@pytest.mark.parametrize("stage", [actshard.stage, in_tasks])
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "sharded"}, {"storage": "lz4"}, {"keep_shards": True}],
    ids=["plain", "sharded", "lz4", "shards kept"],
)
def test_a_flipped_bit_is_found_by_stage_and_by_verify(options: dict[str, Any], stage: Any, tmp_path: Path) -> None:
    path = cache_of(tmp_path, options)
    stage(path, tmp_path / "sound")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name.isdigit()]
    assert len(files) == 4 * (1 + len(list(path.glob("0*")))) - (4 if options.get("layout") == "sharded" else 0)
    for number, file in enumerate(files):
        copy = tmp_path / f"copy{number}"
        flip(file)
        report = actshard.verify(path, deep=True)
        if "keep_shards" in options and file.relative_to(path).parts[0].startswith("0"):  # a leftover, also for verify
            assert report.ok
        else:
            assert str(file) in {str(finding.path) for finding in report.errors if finding.code == "checksum"}
            with pytest.raises(actshard.FormatError, match="CRC-32") as raised:
                stage(path, copy)
            assert (raised.value.code, str(raised.value.path)) == ("checksum", str(file))
            assert not copy.exists()
        flip(file)
        stage(path, copy)
        assert actshard.verify(copy, deep=True).ok == actshard.verify(path, deep=True).ok


def test_all_damaged_files_are_copied_again(tmp_path: Path) -> None:
    path = cache_of(tmp_path, {})
    files = [path / "input_ids/data/c/0", path / "loss_weights/data/c/0"]
    for file in files:
        flip(file)
    with pytest.raises(actshard.FormatError, match="and 1 more file differs"):
        actshard.stage(path, tmp_path / "copy")
    for file in files:
        flip(file)
    assert actshard.stage(path, tmp_path / "copy").fetched == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("options", [{}, {"layout": "sharded"}])
@pytest.mark.parametrize("stage", [actshard.stage, in_tasks])
def test_files_that_a_killed_call_copied_are_compared(
    stage: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache_of(tmp_path, options)
    file = next(file for file in sorted(path.rglob("data/c/0")))
    flip(file)
    with monkeypatch.context() as patch:
        patch.setattr(check, "check_copy", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            stage(path, tmp_path / "copy")
    flip(file)  # the copy stays damaged
    if stage is actshard.stage:
        with pytest.raises(actshard.FormatError, match="CRC-32"):
            stage(path, tmp_path / "copy")
    stage(path, tmp_path / "copy")
    assert (tmp_path / "copy" / file.relative_to(path)).read_bytes() == file.read_bytes()


def test_files_of_an_older_copy_are_compared_with_the_new_ledger(tmp_path: Path) -> None:
    """Unchanged files are linked from the older copy."""
    path = cache_of(tmp_path, {})
    actshard.stage(path, tmp_path / "copy")
    ledger = path / "shard_ledger.json"
    crc = tokens.open_cache(path).ledger.checksums["input_ids/data/c/0"]
    ledger.write_text(ledger.read_text().replace(crc, crc[1:] + crc[:1]))
    with pytest.raises(actshard.FormatError, match="CRC-32"):
        actshard.stage(path, tmp_path / "copy")


@pytest.mark.parametrize("stage", [actshard.stage, in_tasks])
def test_leftover_ledgers_of_shards_are_not_read(stage: Any, tmp_path: Path) -> None:
    path = cache_of(tmp_path, {"keep_shards": True})
    for ledger in path.glob("0*/shard_ledger.json"):
        ledger.write_text("{")
    stage(path, tmp_path / "copy")
    assert len(tokens.open_cache(tmp_path / "copy")) == 18


def test_a_ledger_that_changed_since_the_plan_was_made_is_named(tmp_path: Path) -> None:
    path = cache_of(tmp_path, {})
    plan = actshard.plan.stage(path, tmp_path / "copy", tasks=100)
    ledger = path / "shard_ledger.json"
    crc = tokens.open_cache(path).ledger.checksums["input_ids/data/c/0"]
    ledger.write_text(ledger.read_text().replace(crc, crc[1:] + crc[:1]))
    with pytest.raises(actshard.ChangedInputError, match="Make the plan again"):
        run_tasks(plan)


@pytest.mark.parametrize("stage", [actshard.stage, in_tasks])
def test_a_ledger_of_another_shard_is_found_by_stage_and_by_verify(stage: Any, tmp_path: Path) -> None:
    path = cache_of(tmp_path, {"layout": "sharded"})
    ledger = max(path.glob("0*/shard_ledger.json"))
    text = ledger.read_text()
    crc = tokens.open_cache(ledger.parent).ledger.checksums["input_ids/data/c/0"]
    ledger.write_text(text.replace(crc, crc[1:] + crc[:1]))
    with pytest.raises(actshard.FormatError, match="CRC-32") as raised:
        stage(path, tmp_path / "copy")
    assert raised.value.code == "checksum"
    assert "checksum" in actshard.verify(path, deep=True).codes()


def test_a_cache_without_checksums_is_staged(tmp_path: Path) -> None:
    cache = GOLDEN / "levanter/text_llama3style_sharded"
    done = actshard.stage(cache, tmp_path / "copy")
    assert len(tokens.open_cache(done.path)) == len(tokens.open_cache(cache))
