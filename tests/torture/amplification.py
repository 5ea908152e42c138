"""Measures the memory that opening, verifying and reading the first rows of a dataset takes, relative to the size of its files.

Each dataset is used in a forked child of a process that has imported everything and read a dataset of the same kind. The child's
peak of resident memory, less that of the same child over nothing, is what the files cost. Resident memory is what a file can make
the package touch; the libFuzzer targets count allocations.

    python -m tests.torture.amplification --each 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.compute
import pyarrow.parquet  # noqa: F401 -- imported once, before children are measured
from tests.torture import agreement, mutations

import actshard
from actshard import tokens

TIMES = 32
"""Bytes of memory per byte of files."""
FIXED = (64 + 2 * (os.cpu_count() or 1)) << 20
"""Bytes of memory besides: threads and their buffers. Undamaged datasets of some kilobytes take up to 42 MiB on two processors."""
SECONDS = 20
"""Processor time of a child."""
ROWS = 64


def bound(size: int) -> int:
    """The most memory that files of ``size`` bytes may take."""
    return TIMES * size + FIXED


def size_of(folder: Path) -> int:
    """Bytes of the regular files of a dataset."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def read_first_rows(path: Path) -> None:
    """Opens a dataset, and reads its first row, first example, columns and first batch."""
    store = actshard.open(path)
    _ = store.table
    for layer in store.layers[:3]:
        for read in (
            lambda layer=layer: store.gather(layer, 0, 0),
            lambda layer=layer: store.sequence(0, layer)[:ROWS].copy(),
            lambda layer=layer: next(iter(store.stream(layer, ROWS, memory="1MiB")), None),
        ):
            with contextlib.suppress(actshard.ActshardError):
                read()
    store.info()


def read_first_tokens(path: Path) -> None:
    """Likewise for a token cache."""
    cache = tokens.open_cache(path)
    cache.rows(range(min(len(cache), ROWS)))
    windows = tokens.TokenSeqDataset(cache, 8)
    windows.get_batch(range(min(len(windows), ROWS)))


def use(path: Path, *, is_cache: bool) -> None:
    """Opens, reads and verifies a dataset. Errors of the package are expected of damaged ones."""
    with contextlib.suppress(actshard.ActshardError):
        (read_first_tokens if is_cache else read_first_rows)(path)
    with contextlib.suppress(actshard.ActshardError):
        actshard.verify(path, deep=True)


def peak_of(work: Callable[[], None]) -> tuple[int, str]:
    """The largest resident size of a forked child that does the work, and how it failed; empty if it did not."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            work()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    until = time.monotonic() + mutations.PATIENCE
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, 9)
        time.sleep(0.002)
    status = os.waitstatus_to_exitcode(ended[1])
    return ended[2].ru_maxrss * 1024, "" if status == 0 else f"ended with status {status}"


def refused(kind: str) -> list[Path]:
    """Golden datasets that are refused, such as hostile pickles."""
    folders = [path for name in ("errors", "hostile") for path in sorted((agreement.GOLDEN / kind / name).glob("*"))]
    return [path for path in folders if path.is_dir()]


def measure(kind: str, each: int, seed: int, folder: Path) -> Iterator[tuple[str, int, int, str]]:
    """Every golden dataset of a kind, and ``each`` damaged copies: name, bytes of files, bytes of memory, failure."""
    is_cache = kind == "levanter"
    for root in [*agreement.roots(kind), *refused(kind)]:
        use(root, is_cache=is_cache)  # imports and builds what the first use needs
        idle, _ = peak_of(lambda: None)
        choices = random.Random(f"{kind} {root.name} {seed}")
        for number in range(each + 1):
            copy = folder / root.name
            shutil.copytree(root, copy, symlinks=True)
            once, damages = random.Random(choices.random()), []
            for _ in range(once.choice([1, 1, 2]) if number else 0):
                if any(path.is_file() for path in copy.rglob("*")):
                    damages.append(mutations.damage(copy, once))
            size = size_of(copy)
            peak, failure = peak_of(lambda copy=copy: use(copy, is_cache=is_cache))
            yield f"{root.relative_to(agreement.GOLDEN)} #{number} ({', '.join(damages)})", size, peak - idle, failure
            shutil.rmtree(copy)


def main() -> None:
    """Prints a JSON list of each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=200, help="damaged copies of each golden dataset")
    parser.add_argument("--kinds", nargs="*", default=list(agreement.KINDS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory(prefix="actshard-amplification-") as folder:
            for measurement in measure(kind, asked.each, asked.seed, Path(folder)):
                print(json.dumps(measurement), flush=True)


if __name__ == "__main__":
    main()
