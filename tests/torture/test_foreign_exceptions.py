"""Public functions raise only ActshardError or TypeError, whatever their arguments."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.torture import calls
from tests.torture.budget import runs

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("calls")
    calls.prepare(made)
    return made


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Limits memory, so that a huge size in an argument raises MemoryError instead of exhausting the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("call", calls.CALLS, ids=lambda c: c.name)
def test_only_our_exceptions_come_out(root: Path, call: calls.Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)

    @settings(max_examples=runs(25, 5_000), suppress_health_check=list(HealthCheck))
    @given(st.data())
    def generated(data: st.DataObject) -> None:
        function = call.make(root)
        drawn = data.draw(calls.arguments(call, function))
        calls.attempt(call, function, drawn, root)

    generated()
