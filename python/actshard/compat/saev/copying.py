"""``use_tmpdir``: copies a dump to this machine's local disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator

from actshard.base.errors import (
    from_os,
)


def copy_to_tmpdir(source: pathlib.Path, logger: logging.Logger) -> pathlib.Path:
    """Copies a dump to ``$TMPDIR`` once per job and node, and returns the copy's path. Other processes wait for the first.

    The copy is renamed when complete. The file ``.copy_complete`` marks it as a copy.
    """
    root = os.environ.get("TMPDIR")
    if not root:
        logger.warning("use_tmpdir=True but $TMPDIR not set; using original path")
        return source
    target = pathlib.Path(root) / os.environ.get("SLURM_JOB_ID", "nojob") / "saev" / "shards" / source.name
    marker = target / ".copy_complete"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if marker.exists():
                logger.info("Reusing existing TMPDIR copy: %s", target)
                return target
            # Left by a killed process, or by an old release that copied directly into the target.
            copy = target.with_name(f".{target.name}.copying")
            for folder in (copy, target):
                if folder.exists():
                    shutil.rmtree(folder)
            copy.mkdir()
            files = [f for f in source.iterdir() if f.is_file()]
            with concurrent.futures.ThreadPoolExecutor(min(8, len(files)) or 1) as pool:
                list(pool.map(lambda f: shutil.copy2(f, copy / f.name), files))
            (copy / marker.name).touch()
            copy.rename(target)
    except OSError as error:
        raise from_os(error, error.filename or target, "copy to $TMPDIR") from error
    return target


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds an exclusive lock, waiting for other processes. The system releases locks of dead processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
