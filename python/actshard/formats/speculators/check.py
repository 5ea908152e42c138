"""Checks of speculators' training data; opening reports files of hidden states that are not usable."""

from __future__ import annotations

import contextlib
import math
import re

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.errors import ActshardError
from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.per_token import wrong_values
from actshard.formats.report import Report
from actshard.formats.speculators.files import FOLDER, IDS, SCALED, SCALES, STATES
from actshard.formats.speculators.read import lists_of, table_of_rows

_STATES = re.compile(r"hs_(\d+)\.safetensors")
_SHOWN = 20
_CODES = 1 << 16
"""Number of codes that are examined per file."""
_MANY = 0.01
"""A larger share of codes with the largest magnitude is reported."""


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks per-token columns (equal lengths, token ids, masks), and lists files of hidden states that belong to no row."""
    if (root / "state.json").kind() is None:
        entries = root.entries("*.safetensors")
        report.count("files", len(entries))
        for entry in entries[:1]:
            _other_tensors(root / entry.name, report)
        for entry in entries:
            _scales(root / entry.name, report)
        return
    with report.noting(root):
        table = table_of_rows(root)
        lengths = np.diff(lists_of(table, "input_ids", root)[0])
        counted = (
            {"loss_mask": np.diff(lists_of(table, "loss_mask", root)[0])} if "loss_mask" in table.column_names else {}
        )
        if "seq_len" in table.column_names:
            counted["seq_len"] = table["seq_len"].to_numpy()
        for name, counts in counted.items():
            for row in np.flatnonzero(counts != lengths)[:_SHOWN].tolist():
                position = f"row {row}, column '{name}'"
                report.add("count-claim", root, int(counts[row]), f"{lengths[row]}, the number of token ids", position)
        for name in ("input_ids", *(["loss_mask"] if "loss_mask" in table.column_names else [])):
            ends, values = lists_of(table, name, root)
            wrong, expected, code = wrong_values(name, values)
            rows = np.searchsorted(ends, wrong, side="right") - 1
            for row, index in list(dict(zip(rows[::-1].tolist(), wrong[::-1].tolist(), strict=True)).items())[:_SHOWN]:
                report.add(code, root, int(values[index]), expected, f"row {row}, {name}, token {index - ends[row]}")
        for number, entry in enumerate(root.joinpath(FOLDER).entries("hs_*.safetensors")):
            tell("files", number, len(table))
            report.count("files")
            match = _STATES.fullmatch(entry.name)
            if match is None or int(match[1]) >= len(table):
                report.add("unlisted-file", root / FOLDER / entry.name, f"a file for none of the {len(table)} rows")
            _scales(root / FOLDER / entry.name, report)


def _other_tensors(path: Location, report: Report) -> None:
    """Names what else the first file has: no column and no layer has it."""
    with contextlib.suppress(ActshardError):
        names = [tensor[0] for tensor in _native.safetensors_header(path)[0]]
        if others := sorted(set(names) - {STATES, IDS, SCALES}):
            report.add("layout", path, f"tensors {', '.join(others[:_SHOWN])} are not read")


def _scales(path: Location, report: Report) -> None:
    """Checks the scales of a file, if it has any, and its first codes. Opening reports files that are not usable."""
    with contextlib.suppress(ActshardError):
        tensors, _, data = _native.safetensors_header(path)
        tensors_by_name = {name: (dtype, tuple(shape), data + begin) for name, dtype, shape, begin, _ in tensors}
        if (
            SCALES not in tensors_by_name
            or tensors_by_name[SCALES][0] != "F32"
            or tensors_by_name.get(STATES, ("", (), 0))[0] not in SCALED
        ):
            return
        (_, ones, scales_offset), (dtype, shape, first) = tensors_by_name[SCALES], tensors_by_name[STATES]
        scales = np.frombuffer(path.read(scales_offset, 4 * math.prod(ones)), "<f4")
        bad = np.flatnonzero(~(np.isfinite(scales) & (scales > 0)))
        if bad.size:
            message = f"{bad.size:,} of {scales.size:,} scales are not positive finite numbers"
            report.add("scale-value", path, f"{message}; the first is {scales[bad[0]]}", place=f"scale {bad[0]}")
        size = math.prod(shape)
        codes = np.frombuffer(path.read(first, min(size, _CODES)), np.uint8)
        # A scale is computed from its largest value, so each scale has at least one code of the largest magnitude.
        expected = 1 + scales.size * codes.size // max(size, 1)
        largest = int(_largest(dtype, codes).sum())
        if largest > max(_MANY * codes.size, 4 * expected):
            report.add(
                "saturated-codes", path, f"{largest:,} of the first {codes.size:,} codes have the largest magnitude"
            )


def _largest(dtype: str, codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether each code has the largest finite magnitude."""
    if dtype == "I8":
        return np.isin(codes, (0x7F, 0x80, 0x81))
    return np.isin(codes & 0x7F, 0x7E if dtype == "F8_E4M3" else 0x7B)
