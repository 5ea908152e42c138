"""Hostile pickles are rejected with an ActshardError or read correctly, with bounded memory and time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import actshard
from conftest import GOLDEN
from torture import hostile_pickles
from torture.budget import TORTURE
from waiting import PATIENCE

MEMORY = 64 << 20
CPU = 5.0 if actshard.build_info()["profile"] == "release" else 12 * 5.0
"""CPU seconds of a child. The largest was 0.5 s in an optimized build and 9 s in one that is not; an exponential traversal would
not end."""


@pytest.mark.slow
def test_hostile_pickles_are_refused_or_read_in_little_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = hostile_pickles.cases()
    assert len(made) >= 20
    for name, make in made.items():
        make(tmp_path / name)
    shutil.copytree(GOLDEN / "pickle/hostile", tmp_path / "golden")
    done = subprocess.run(
        [sys.executable, str(Path(hostile_pickles.__file__)), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert found.keys() >= made.keys()
    assert found["good"][0] == "read"
    with capsys.disabled():
        for name, (said, cpu, memory) in found.items() if TORTURE else ():
            print(f"{name:48} {said:40} {cpu:6.2f} s {memory / (1 << 20):7.1f} MiB")
        slowest, largest = (max(found, key=lambda name: found[name][k]) for k in (1, 2))
        print(
            f"{len(found)} hostile pickles: at most {found[slowest][1]:.2f} s of CPU time ({slowest}), "
            f"{found[largest][2] / (1 << 20):.1f} MiB ({largest})"
        )
    for name, (said, cpu, memory) in found.items():
        assert not said.startswith("!"), (name, said)
        assert memory < MEMORY, (name, said, memory)
        assert cpu < CPU, (name, said, cpu)
