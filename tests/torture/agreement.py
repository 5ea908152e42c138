"""Compares ``open`` and ``verify`` on damaged copies of every golden dataset.

Both run the same parser: ``open`` refuses a dataset if and only if the parser reports a fault to ``verify``. The first fault is the
error that ``open`` raises, and the report has an error for its file. Checks of values, and of files that opening does not read, may
add further errors.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

from tests.torture import mutations

import actshard
from actshard import tokens
from conftest import GOLDEN

SECONDS = 10
"""Processor time of a child."""
_LARGEST = 600_000
_NO_DATASETS = ("errors", "hostile", "tokenizers", "mixtures", "shuffles")
KINDS = tuple(sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir()))


def roots(kind: str) -> list[Path]:
    """The small golden datasets of a kind."""
    folders = [path for path in sorted((GOLDEN / kind).iterdir()) if path.is_dir() and path.name not in _NO_DATASETS]
    sizes = {folder: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) for folder in folders}
    found = [mutations.root_of(folder, kind) for folder in folders if sizes[folder] < _LARGEST]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [root for root in found if refusal(root, "levanter" if kind == "levanter" else None) is None]


@dataclass(frozen=True)
class Fault:
    """An error, as far as two calls must agree on it."""

    kind: str
    path: str
    code: str

    @classmethod
    def of(cls, error: actshard.ActshardError) -> Fault:
        return cls(type(error).__name__, str(error.path), error.code or "format")


def refusal(path: Path, format: str | None) -> Fault | None:
    """The error of opening a dataset."""
    try:
        if format == "levanter":
            tokens.open_cache(path)
        else:
            actshard.open(path, format)
    except actshard.ActshardError as error:
        return Fault.of(error)
    return None


def disagreement(path: Path, format: str | None) -> str:
    """How ``open`` and ``verify`` disagree about a dataset; empty if they agree. ``format``: of a token cache."""
    refused = refusal(path, format)
    try:
        report = actshard.verify(path, format=format)
    except actshard.ActshardError as error:
        return "" if refused == Fault.of(error) else f"verify raises {error!r}, open {refused}"
    if refused is not None and report.ok:
        return f"open raises {refused}, verify reports no error"
    faults = [Fault.of(error) for error in report.faults.errors]
    # The report names the dataset and its format, which detection may refuse.
    refused = refusal(report.path, report.format)
    if (faults[0] if faults else None) != refused:
        return f"open raises {refused}, the parser reports {faults[:3]}"
    if refused is not None and all(str(finding.path) != refused.path for finding in report.errors):
        return f"open raises {refused}, verify reports {[str(f) for f in report.errors][:3]}"
    return ""


def in_a_child(path: Path, format: str | None) -> str:
    """:func:`disagreement` in a forked child with limited processor time, because files may be hostile."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            signal.alarm(mutations.PATIENCE)
            warnings.simplefilter("ignore")
            try:
                text = disagreement(path, format)
            except BaseException as error:
                text = repr(error)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(text, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return str(pickle.loads(data)) if data else f"ended with status {status:#x}"


def hunt(kind: str, count: int, seed: int, folder: Path) -> list[str]:
    """Damages ``count`` copies of each dataset of a kind. Returns the disagreements."""
    wrong = []
    format = "levanter" if kind == "levanter" else None
    for root in roots(kind):
        choices = random.Random(f"{kind} {root.name} {seed}")
        for number in range(count):
            copy = folder / root.name
            shutil.copytree(root, copy, symlinks=True)
            once = random.Random(choices.random())
            damages = [mutations.damage(copy, once) for _ in range(once.choice([1, 1, 2]))]
            text = in_a_child(copy, format)
            if text:
                wrong.append(f"{root.relative_to(GOLDEN)} #{number} ({', '.join(damages)}): {text}")
            shutil.rmtree(copy)
    return wrong
