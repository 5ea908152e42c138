"""The tiers of tests: their budgets, the limit of a test's processor time, and which tests ``make quick`` chooses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from tests.torture import budget

import durations

ROOT = Path(__file__).parents[1]
pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quick", ROOT / "scripts/quick.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tier_has_a_third_all_or_the_large_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [budget.runs(small, 1000) for small in (1, 12, 13)] == [1, 4, 5]
    monkeypatch.setattr(budget, "TIER", "slow")
    assert [budget.runs(small, 1000) for small in (1, 12, 13)] == [1, 12, 13]
    monkeypatch.setattr(budget, "TORTURE", True)
    monkeypatch.setenv("ACTSHARD_TORTURE_SCALE", "0.1")
    assert budget.runs(12, 1000) == 100


def test_the_seed_is_the_day_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTSHARD_SEED")
    day = budget.seed()
    assert 20260000 < day < 22000000
    monkeypatch.setenv("ACTSHARD_SEED", "7")
    assert budget.seed() == 7


SPINNING = """
import time
import pytest

def spin():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass

def test_unmarked():
    spin()

@pytest.mark.slow
def test_marked():
    spin()

def test_cheap():
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("workers", "failure", "status"),
    [("0", 1, pytest.ExitCode.TESTS_FAILED), ("1", 1, pytest.ExitCode.TESTS_FAILED), ("0", 100, pytest.ExitCode.OK)],
)
def test_an_expensive_test_without_a_mark_is_named_and_far_above_the_limit_fails_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str, failure: int, status: pytest.ExitCode
) -> None:
    """Time that a test waits does not count."""
    conftest = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        import durations
        durations.LIMIT = 0.1
        durations.FAILURE = {failure}
        def pytest_configure(config):
            config.addinivalue_line("markers", "slow: slow")
            config.pluginmanager.register(durations.Durations(config))
    """
    pytester.makeconftest(conftest)
    pytester.makepyfile(SPINNING)
    for name in ("LIMIT", "FAILURE"):  # restored after this test
        monkeypatch.setattr(durations, name, getattr(durations, name))
    outcome = pytester.runpytest_inprocess(f"-n{workers}")
    assert outcome.ret == status
    outcome.assert_outcomes(passed=3)
    text = outcome.stdout.str()
    assert "::test_unmarked: expected at most 0.1 s of processor time, found 0.2" in text
    assert "::test_marked:" not in text
    assert "::test_cheap:" not in text
    recorded = json.loads((pytester.path / ".pytest_cache/v" / durations.RECORD).read_text())
    assert {name.partition("::")[2] for name in recorded} == {"test_unmarked", "test_marked", "test_cheap"}
    assert recorded[next(name for name in recorded if "test_cheap" in name)] < 0.2


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("python/actshard/formats/saev/read.py", "tests/test_saev_errors.py"),
        ("python/actshard/writing/merging.py", "tests/test_merging.py"),
        ("python/actshard/tokens/building.py", "tests/tokens/test_building.py"),
        ("rust/core/src/parse/pickle/machine.rs", "tests/test_pickle.py"),
        ("docs/tokens.md", "tests/test_docs_blocks.py"),
        ("tests/test_top.py", "tests/test_top.py"),
    ],
)
def test_quick_chooses_the_tests_of_what_changed(
    quick: ModuleType, path: str, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where time is short: the best come first."""
    monkeypatch.setattr(quick, "recorded_seconds", lambda texts: {})
    chosen, left_out = quick.choose_tests({path: {1}}, 80)
    assert test in chosen
    assert set(quick.ALWAYS) <= set(chosen)
    assert len(chosen) == len(set(chosen))
    assert all((ROOT / name).exists() for name in chosen)
    fewer, more_left_out = quick.choose_tests({path: {1}}, 1e9)
    assert len(fewer) == len(chosen) + left_out
    assert more_left_out == 0


def test_quick_sees_changed_new_and_deleted_files(
    quick: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(quick, "ROOT", tmp_path)
    git("init", "-q", "-b", "main")
    source = "def first():\n    return 1\n\n\ndef second():\n    return 2\n"
    (tmp_path / "stream.py").write_text(source)
    (tmp_path / "gone.py").write_text(source)
    git("add", ".")
    git("commit", "-q", "-m", "a")
    assert quick.changed_lines(quick.base_commit()) == {}
    (tmp_path / "stream.py").write_text(source.replace("return 2", "return 3"))
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new é.py").write_text("x = (\n")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    changes = quick.changed_lines(quick.base_commit())
    assert changes.keys() == {"stream.py", "gone.py", "new é.py", "data.bin"}
    assert quick.changed_names("new é.py", {1}) == {"new"}
    assert changes["stream.py"] == {6}
    assert quick.changed_names("stream.py", changes["stream.py"]) == {"stream", "second"}
    assert quick.changed_names("gone.py", changes["gone.py"]) == {"gone"}


def test_quick_knows_which_tests_are_slow(quick: ModuleType) -> None:
    text = "@pytest.mark.slow\n@pytest.mark.parametrize(\n    'a', [1]\n)\ndef test_a(a):\n    pass\n\ndef test_b():\n    pass\n"
    assert quick.SLOW.findall(text) == ["test_a"]


def test_a_machine_has_the_seed_of_the_day_also_in_ci() -> None:
    """Hypothesis has a profile of its own for CI, which would derandomize."""
    assert not budget.machine_settings(3, 3).derandomize
    assert not settings().derandomize


def test_quick_runs_as_a_command() -> None:
    command = [sys.executable, str(ROOT / "scripts/quick.py"), "--base", "HEAD", "--list"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text.startswith("quick: ")
