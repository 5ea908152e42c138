"""All commands show progress alike: a bar on a terminal, a line a minute in a log file, nothing with ``--quiet``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import actshard
from actshard.cli import _progress, app
from actshard.tokens import BuildProgress


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(clock: Clock, steps: list[tuple[float, int, int, int]], unit: str = "") -> None:
    """Reports (seconds, done, total, bytes)."""
    with _progress.progress("task", quiet=False, unit=unit, clock=clock) as watch:
        for seconds, done, total, nbytes in steps:
            clock.now = 1000 + seconds
            watch.counts(done, total, nbytes)


def test_a_log_file_gets_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    lines(Clock(), [(second, second, 1200, 0) for second in range(181)], "rows")
    assert capsys.readouterr().err.splitlines() == [
        "task: 60 of 1,200 rows, 1 rows/s, 19 min left",
        "task: 120 of 1,200 rows, 1 rows/s, 18 min left",
        "task: 180 of 1,200 rows, 1 rows/s, 17 min left",
    ]


def test_speed_and_time_left_of_a_resumed_task_count_its_own_work_only(capsys: pytest.CaptureFixture[str]) -> None:
    lines(Clock(), [(1, 900, 1000, 9_000_000), (61, 950, 1000, 9_600_000)], "examples")
    assert capsys.readouterr().err == "task: 950 of 1,000 examples, 10.0 kB/s, 60 s left\n"


def test_each_stage_has_its_own_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with _progress.progress("task", quiet=False, clock=clock) as watch:
        for second, (what, done, total) in enumerate(
            [("bytes", 0, 4000), ("bytes", 2000, 4000), ("files", 0, 30), ("files", 6, 30), ("stores", 7, 0)]
        ):
            clock.now = 1000 + 60 * second
            watch.stage(what, done, total)
    assert capsys.readouterr().err.splitlines() == [
        "task: 2.0 kB of 4.0 kB, 33 B/s, 60 s left",
        "task: 0 of 30 files",
        "task: 6 of 30 files, 0.1 files/s, 4 min left",
        "task: 7 stores",
    ]


def test_a_build_counts_documents_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with _progress.progress("task", quiet=False, clock=clock) as watch:
        for second in (10, 60):
            clock.now = 1000 + second
            watch.build(BuildProgress(3, 1, 20 * second, 500 * second, second, 110, skipped=2))
    assert capsys.readouterr().err == (
        "task: tokenizing, 1 of 3 files, 1,200 docs, 30,000 tokens, 20 docs/s, 500 tokens/s, 2 skipped, 50 s left\n"
    )


def test_a_terminal_gets_a_bar_with_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=200))
    clock = Clock()
    with _progress.progress("[bold]task", quiet=False, unit="rows", clock=clock) as watch:
        watch.counts(0, 100)
        clock.now += 20
        watch.counts(40, 100)
    drawn = capsys.readouterr().err
    assert "[bold]task" in drawn, "names are no markup"
    assert "━" in drawn
    assert "40 of 100 rows 2 rows/s 30 s left" in drawn


def test_quiet_shows_nothing_on_a_terminal_and_in_a_log_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (True, False):
        monkeypatch.setattr(_progress, "Console", lambda stderr, t=terminal: Console(stderr=stderr, force_terminal=t))
        clock = Clock()
        with _progress.progress("task", quiet=True, clock=clock) as watch:
            clock.now += 100
            watch.counts(1, 10)
            watch.stage("files", 1, 10)
            watch.build(BuildProgress(3, 1, 20, 500, 40, 100, 2))
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_long_commands_show_progress_unless_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr: stdout has results only."""
    monkeypatch.setattr(_progress, "_EVERY", 0)
    with actshard.create(tmp_path / "data", "zarr", layers=[2], d_model=8) as writer:
        writer.append(np.ones((4, 1, 3, 8), np.float32), columns={"prompt": ["a"] * 4})
    plan = str(tmp_path / "plan.json")
    actshard.plan.stats(tmp_path / "data", work=tmp_path / "work").save(plan)
    data, runner = str(tmp_path / "data"), CliRunner()
    for number, words in enumerate(
        (
            ["convert", data, str(tmp_path / "a{}"), "--to", "pickle"],
            ["verify", data, "--deep"],
            ["stats", data],
            ["stage", data, str(tmp_path / "b{}")],
            ["report", data, "-o", str(tmp_path / "c{}.html")],
            ["run", plan],
        )
    ):
        for quiet in (["--quiet"], []):
            if words[0] == "run" and not quiet:
                continue  # its tasks are done
            told = runner.invoke(app, [word.format(len(quiet)) for word in words] + quiet)
            assert told.exit_code in (0, 1), (words, told.output)
            assert bool(told.stderr) != bool(quiet), (number, words, told.stderr)
            assert told.stdout
