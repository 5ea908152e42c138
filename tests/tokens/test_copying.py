"""Guarantee: a damaged file of a token cache is found when the cache is copied, and by ``verify --deep``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.tokens.conftest import write_lines

import actshard
from actshard import tokens
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
    for task in reversed(range(len(plan))):
        plan.run(task)
    plan.commit()


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
        flip(file)
        with pytest.raises(actshard.FormatError, match="CRC-32") as raised:
            stage(path, tmp_path / f"copy{number}")
        assert raised.value.code == "checksum"
        assert str(raised.value.path).endswith(f"/{file.relative_to(path)}")
        assert not (tmp_path / f"copy{number}").exists()
        report = actshard.verify(path, deep=True)
        is_kept = "keep_shards" in options and file.relative_to(path).parts[0].startswith("0")
        if not is_kept:  # verify reports shards that a consolidated cache kept as leftovers
            assert str(file) in {str(finding.path) for finding in report.errors if finding.code == "checksum"}
        flip(file)
        stage(path, tmp_path / f"copy{number}")
        assert actshard.verify(tmp_path / f"copy{number}", deep=True).ok == actshard.verify(path, deep=True).ok


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
