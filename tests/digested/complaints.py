"""Kinds of errors, codes of findings, and texts of warnings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import actshard
from actshard import tokens
from actshard.base import errors
from actshard.reading.verifying import CODES
from digested import GOLDEN

_MARKS = ("metadata.json", "shards.json", ".zgroup", "zarr.json", "shard_ledger.json", "manifest.json", "index")
_OTHERS = ("v2_delta_gzip.zarr", "v2_lzma.zarr")
"""Readable only with the zarr package."""


def classes() -> dict[str, str]:
    """Every exception and warning of the package by name: its kind and base classes."""
    made: dict[str, str] = {}
    for name, value in vars(errors).items():
        if (
            isinstance(value, type)
            and issubclass(value, Exception | Warning)
            and value.__module__.startswith("actshard")
        ):
            bases = [b.__name__ for b in value.__mro__[1:] if b not in (object, BaseException)]
            made[name] = f"{getattr(value, 'kind', None)}: {', '.join(bases)}"
    return made


def datasets() -> list[Path]:
    """Every golden dataset, valid or hostile, found by file names."""
    hostile = GOLDEN / "pickle/hostile"
    found = {p.parent for mark in _MARKS for p in GOLDEN.rglob(mark) if hostile not in p.parents}
    # Only datasets, not their arrays and subfolders.
    found = {p for p in found if not (found & set(p.parents)) and p.name not in _OTHERS}
    return sorted(found | {p for p in hostile.iterdir() if p.is_dir()})


def _named(text: str) -> str:
    return text.replace(str(GOLDEN), "golden")


def _opened(path: Path) -> list[str]:
    """Texts of the warnings of opening, and the error of opening or of reading everything."""
    made = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if "levanter" in path.relative_to(GOLDEN).parts:
                cache = tokens.open_cache(path)
                cache.rows(range(len(cache)))
            else:
                store = actshard.open(path)
                for layer in store.layers:
                    store.sequences(range(len(store)), layer)
        except actshard.ActshardError as error:
            where = None if error.path is None else _named(str(error.path))
            made = [f"{type(error).__name__}, {error.kind}, reason {error.reason}, byte {error.offset}, {where}"]
    return [f"{type(w.message).__name__}: {_named(str(w.message))}" for w in caught] + made


def _findings(path: Path) -> list[str]:
    """Findings as severity, code and file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = actshard.verify(path, deep=True)
    made = [
        f"{f.severity} {f.code} {f.path.relative_to(path) if f.path.is_relative_to(path) else f.path.name}"
        for f in report.findings
    ]
    return [f"status {report.status}", *sorted(made)]


def found(folder: Path) -> dict[str, Any]:
    """Classes, codes, and warnings, errors and findings of each golden dataset."""
    each = {p.relative_to(GOLDEN).as_posix(): p for p in datasets()}
    return {
        "classes": classes(),
        "codes": {code: severity for code, (severity, _, _) in CODES.items()},
        "opened": {name: _opened(path) for name, path in each.items()},
        "verified": {name: _findings(path) for name, path in each.items()},
    }
