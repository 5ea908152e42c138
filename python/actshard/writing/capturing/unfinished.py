"""What an unfinished capture keeps next to its journal: states of an example, by which a resumed one recognises the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ArgumentError, from_os
from actshard.base.layers import Layer, plain
from actshard.base.location import Location
from actshard.base.work import read_table, write_bytes_at_once, write_table
from actshard.writing.capturing.windows import ChosenExample

SAMPLE = "capture-sample.arrow"
"""File in the working folder."""
NOTES = "capture-notes.jsonl"
"""File in the working folder: what the files of some formats do not store of the examples. A line per window."""
_ROWS = 4
"""Rows of each layer in a sample, at most."""
_TOLERANCES = {"float64": 1e-3, "float32": 1e-3}
_TOLERANCE = 3e-2
"""Norm of the difference relative to that of a row: other devices and libraries round differently, most in 16 bits."""


@dataclass(frozen=True)
class CaptureSample:
    """States of an example as this call computes them.

    Attributes:
        chosen: the example.
        layers: names of the layers.
        rows: ``(layers, n, d_model)`` float64.
        tolerance: the largest relative difference of a row to that of the same model.
    """

    chosen: ChosenExample
    layers: tuple[Layer, ...]
    rows: NDArray[np.float64]
    tolerance: float

    @classmethod
    def of(
        cls, chosen: ChosenExample, layers: tuple[Layer, ...], states: NDArray[np.generic], dtypes: set[str]
    ) -> CaptureSample:
        """Returns the sample of an example's ``states``, ``(layers, tokens, d_model)``; ``dtypes``: of the model and of rows."""
        places = np.unique(np.linspace(0, states.shape[1] - 1, _ROWS).astype(int))
        tolerance = max(_TOLERANCES.get(dtype, _TOLERANCE) for dtype in dtypes)
        return cls(chosen, layers, states[:, places].astype(np.float64), tolerance)

    def write(self, folder: Path) -> None:
        """Writes the sample to the working folder."""
        import pyarrow as pa

        columns = {"ids": self.chosen.example.ids, "positions": self.chosen.positions, "rows": self.rows.reshape(-1)}
        write_table(folder / SAMPLE, pa.table({name: pa.array([values.tolist()]) for name, values in columns.items()}))

    def check(self, folder: Path) -> None:
        """Raises ArgumentError if the committed examples have ids, positions or rows of another tokenizer, function or model."""
        table = read_table(folder / SAMPLE)
        ids, positions = (np.array(table[name][0].as_py(), np.int64) for name in ("ids", "positions"))
        number = self.chosen.example.number
        for name, committed, computed in (
            ("tokenizer", ids, self.chosen.example.ids),
            ("tokens", positions, self.chosen.positions),
        ):
            if not np.array_equal(committed, computed):
                what = "token ids" if name == "tokenizer" else "positions"
                raise self._differs(
                    folder, name, f"the {what} {_short(committed)} for example {number}", _short(computed)
                )
        rows = np.array(table["rows"][0].as_py(), np.float64).reshape(self.rows.shape)
        for layer, committed, computed in zip(self.layers, rows, self.rows, strict=True):
            difference = _difference(committed, computed)
            if difference > self.tolerance:
                raise self._differs(
                    folder,
                    "model",
                    f"the rows of example {number}, layer {plain(layer)}",
                    f"others, with a relative difference of {difference:.2g}",
                )

    def _differs(self, folder: Path, name: str, expected: str, actual: str) -> ArgumentError:
        return ArgumentError(
            f"{name}: expected {expected}, as in the unfinished dataset in {folder.parent}, found {actual}. Repeat the call that "
            "began it, or write to another folder."
        )


class Notes:
    """Examples without states, and those with NaN or infinite values, of all calls that wrote an unfinished dataset.

    Lines are written before their examples are committed: those of later examples count for nothing.

    Attributes:
        problems: why examples have no states.
        nonfinite: number of rows with NaN or infinite values by example, of all layers.
    """

    def __init__(self, folder: Path | None, next_example: int) -> None:
        """Reads the notes of the examples before ``next_example``. ``folder``: the working folder; None: a finished dataset."""
        self._path = None if folder is None else folder / NOTES
        self.problems: dict[int, str] = {}
        self.nonfinite: dict[int, int] = {}
        for line in self._lines():
            self.problems |= {int(n): str(text) for n, text in line["problems"].items() if int(n) < next_example}
            self.nonfinite |= {int(n): int(count) for n, count in line["nonfinite"].items() if int(n) < next_example}
        if self._path is not None and self._path.exists():
            write_bytes_at_once(self._path, _line(self.problems, self.nonfinite))

    def _lines(self) -> list[dict[str, dict[str, Any]]]:
        if self._path is None or not self._path.exists():
            return []
        *lines, _ = (
            Location.at(self._path).read_utf8().split("\n")
        )  # an incomplete last line is of examples without a commit
        return [json.loads(line) for line in lines]

    def add(self, problems: Mapping[int, str], nonfinite: Mapping[int, int]) -> None:
        """Notes the examples of a window, before they are committed."""
        self.problems.update(problems)
        self.nonfinite.update(nonfinite)
        if problems or nonfinite:
            self._append(problems, nonfinite)

    def _append(self, problems: Mapping[int, str], nonfinite: Mapping[int, int]) -> None:
        assert self._path is not None
        try:
            with self._path.open("ab") as file:
                file.write(_line(problems, nonfinite))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise from_os(error, self._path, "write") from error


def _line(problems: Mapping[int, str], nonfinite: Mapping[int, int]) -> bytes:
    return json.dumps({"problems": dict(problems), "nonfinite": dict(nonfinite)}).encode() + b"\n"


def _difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The largest norm of a row's difference, relative to the row's; infinite if other values are finite."""
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    norms = np.linalg.norm(a, axis=1)
    differences = np.linalg.norm(a - b, axis=1)
    return float(np.max(differences / np.maximum(norms, np.finfo(float).tiny), initial=0.0))


def _short(values: NDArray[np.int64]) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"
