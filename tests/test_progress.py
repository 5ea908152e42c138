"""All commands show progress alike, whatever the callback signature of their verb."""

from __future__ import annotations

import pytest
from rich.console import Console

from actshard.cli import _progress
from actshard.tokens import BuildProgress

BUILT = BuildProgress(files=3, files_done=1, rows=20, tokens=500, bytes=40, bytes_total=100, skipped=2)


def report(watch: _progress.TaskWatch) -> None:
    watch.counts(5, 10, 1 << 20)
    watch.counts(6, 10)
    watch.stage("shards", 7, 0)
    watch.build(BUILT)


def test_lines_name_stage_counts_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "_EVERY", 0)
    with _progress.progress("task", quiet=False) as watch:
        report(watch)
    counted, bare, stage, built = capsys.readouterr().err.splitlines()
    assert counted.startswith("task: 5 of 10, ")
    assert counted.endswith("s left")
    assert "/s, " in counted
    assert bare.startswith("task: 6 of 10, 0 s left")
    assert stage.startswith("task: shards, 7 of 0")
    assert built.startswith("task: tokenizing, 1 of 3 files, 20 docs, 500 tokens, ")
    assert "2 skipped" in built


def test_a_terminal_gets_a_bar_and_quiet_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _progress.progress("task", quiet=True) as watch:
        report(watch)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_progress, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=200))
    with _progress.progress("task", quiet=False) as watch:
        report(watch)
    assert "docs/s" in capsys.readouterr().err


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.progress("task", quiet=False) as watch:
        report(watch)
    assert capsys.readouterr().err == ""
