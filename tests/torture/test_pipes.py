"""A named pipe in place of a file: opening, reading and verifying end, because a pipe without a writer is never waited for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.torture import agreement, amplification, jobs

import actshard

_FILES = 24
"""Files of a dataset that become pipes: the first and the last ones, in the order of their names."""


def _blocked(root: Path, folder: Path, *, is_cache: bool = False) -> list[str]:
    """The files of a dataset that block a reader as pipes."""
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    if len(files) > _FILES:
        files = [*files[: _FILES // 2], *files[-_FILES // 2 :]]
    blocked = []
    for file in files:
        copy = folder / "copy" / root.name
        shutil.copytree(root, copy, symlinks=True)
        (copy / file).unlink()
        os.mkfifo(copy / file)
        _, failure = amplification.peak_of(lambda copy=copy: amplification.use(copy, is_cache=is_cache))
        if failure:
            blocked.append(f"{root.name}/{file}: {failure}")
        shutil.rmtree(folder / "copy")
    return blocked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", agreement.KINDS)
def test_a_pipe_in_place_of_a_file_of_the_original_systems_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    blocked = [
        fault for root in agreement.roots(kind) for fault in _blocked(root, tmp_path, is_cache=kind == "levanter")
    ]
    assert not blocked, "\n".join(blocked)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("job", [job for job in jobs.JOBS if job.startswith("create-")])
def test_a_pipe_in_place_of_a_file_of_our_own_is_not_waited_for(job: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    jobs.prepare(job, tmp_path / "run")
    store = actshard.open(jobs.run(job, tmp_path / "run", lambda _: None))
    store.extend_columns({"judge": np.arange(len(store))})
    store.stats(store.layers[0], save=True)
    blocked = _blocked(store.path, tmp_path)
    assert not blocked, "\n".join(blocked)
