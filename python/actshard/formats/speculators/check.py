"""Checks of speculators' training data; opening reports files of hidden states that are not usable."""

from __future__ import annotations

import re

import numpy as np

from actshard.formats.format import Tell
from actshard.formats.per_token import wrong_values
from actshard.formats.report import Report
from actshard.formats.speculators.files import FOLDER
from actshard.formats.speculators.read import lists_of, table_of_rows
from actshard.location import Location

_STATES = re.compile(r"hs_(\d+)\.safetensors")
_SHOWN = 20


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks per-token columns (equal lengths, token ids, masks), and lists files of hidden states that belong to no row."""
    if (root / "state.json").kind() is None:
        report.count("files", len(root.entries("*.safetensors")))
        return
    with report.noting(root):
        table = table_of_rows(root)
        report.count("rows", len(table))
        lengths = np.diff(lists_of(table, "input_ids", root)[0])
        said = (
            {"loss_mask": np.diff(lists_of(table, "loss_mask", root)[0])} if "loss_mask" in table.column_names else {}
        )
        if "seq_len" in table.column_names:
            said["seq_len"] = table["seq_len"].to_numpy()
        for name, counts in said.items():
            for row in np.flatnonzero(counts != lengths)[:_SHOWN].tolist():
                place = f"row {row}, column '{name}'"
                report.add("count-claim", root, int(counts[row]), f"{lengths[row]}, the number of token ids", place)
        for name in ("input_ids", *(["loss_mask"] if "loss_mask" in table.column_names else [])):
            ends, values = lists_of(table, name, root)
            wrong, expected, code = wrong_values(name, values)
            rows = np.searchsorted(ends, wrong, side="right") - 1
            for row, at in list(dict(zip(rows[::-1].tolist(), wrong[::-1].tolist(), strict=True)).items())[:_SHOWN]:
                report.add(code, root, int(values[at]), expected, f"row {row}, {name}, token {at - ends[row]}")
        for number, entry in enumerate(root.joinpath(FOLDER).entries("hs_*.safetensors")):
            tell("files", number, len(table))
            report.count("files")
            named = _STATES.fullmatch(entry.name)
            if named is None or int(named[1]) >= len(table):
                report.add("unlisted-file", root / FOLDER / entry.name, f"a file for none of the {len(table)} rows")
