"""Small datasets of every format, with their expected values."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.waiting import PATIENCE

import actshard

FORMATS = ("saev", "lmprobe", "zarr", "pickle", "pickle.gz")
LAYERS = (0, 7)
D = 6
EXAMPLES = 11


class Dataset:
    """Ragged examples where the format allows them. `values[example][layer position]` is (T, d_model)."""

    def __init__(self, format: str, version: int) -> None:
        self.format = format
        rng = np.random.default_rng([FORMATS.index(format), version])
        counts = np.random.default_rng(FORMATS.index(format)).integers(1, 8, EXAMPLES)
        if format == "saev":
            counts[:] = 5
        self.values = [rng.standard_normal((len(LAYERS), t, D)).astype("f4") for t in counts]
        self.counts = counts
        self.special = int(format == "saev")
        name, _, compress = format.partition(".")
        options: dict[str, Any] = {
            "saev": {"cls_token": True, "max_tokens_per_shard": 40},
            "lmprobe": {"storage": "full_sequence"},
            "zarr": {},
            "pickle": {"compress": bool(compress)},
        }[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with actshard.create(self._root(version), name, layers=LAYERS, d_model=D, **options) as writer:
                for k in range(0, EXAMPLES, 3):
                    writer.append(self.values[k : k + 3])
                    writer.flush()
        self.path = writer.path

    def _root(self, version: int) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"actshard-{self.format}-")) / f"v{version}"

    def open(self, path: Path | None = None, **options: Any) -> actshard.Store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return actshard.open(path or self.path, **options)

    def keys(self, tokens: str) -> list[tuple[int, int]]:
        """(example, token) of every row that a stream reads."""
        made = []
        for e, n in enumerate(self.counts.tolist()):
            first, end = {"content": (self.special, n), "all": (0, n), "last": (n - 1, n)}[tokens]
            made += [(e, t) for t in range(first, end)]
        return made


@functools.cache
def dataset(format: str, version: int = 0) -> Dataset:
    """Created once per process."""
    return Dataset(format, version)


def in_a_child(work: Callable[[], Any]) -> Any:
    """Result of `work` in a forked child. AssertionError if the child dies, hangs, or raises anything but ActshardError.

    An ActshardError is returned.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            signal.alarm(PATIENCE)
            try:
                found = (True, work())
            except actshard.ActshardError as error:
                found = (True, error)
            except BaseException:
                found = (False, traceback.format_exc())
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(found, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), f"a reader died of signal {os.WTERMSIG(status)}"
    assert said, "a reader said nothing"
    fine, found = pickle.loads(said)
    assert fine, found
    return found
