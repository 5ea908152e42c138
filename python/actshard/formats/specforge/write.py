"""Writes SpecForge's hidden states, as ``scripts/prepare_hidden_states.py`` writes them; see the docstring of the folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.draft_writing import AUX, DraftCarrying, DraftKind, DraftTarget
from actshard.formats.per_token import LAST
from actshard.formats.target import Spec, flag, positive

__all__ = ["DraftCarrying", "SpecForgeTarget"]

_GROUP = 2000
"""SpecForge's default number of files in a folder."""


def _kind(aux: str, last: str | None) -> DraftKind:
    ids = (("input_ids", "input_ids", False), ("loss_mask", "loss_mask", False))
    return DraftKind((*ids, (aux, AUX, True), *(() if last is None else ((last, LAST, True),))))


class SpecForgeTarget(DraftTarget):
    """Writes ``rows_0-2000/data_0.ckpt``, ``rows_0-2000/data_1.ckpt``, ..."""

    format: ClassVar[str] = "specforge"
    format_options: ClassVar[Mapping[str, str]] = {
        "kind": '"eagle3" (default), "dspark", or "dflash" (default without a last hidden state)',
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
        "file_group_size": f"files per folder (default: {_GROUP})",
        "gz": "whether to write .ckpt.gz (default: False)",
    }
    kinds: ClassVar[Mapping[str, DraftKind]] = {
        "eagle3": _kind("aux_hidden_state", "hidden_state"),
        "dspark": _kind("hidden_states", "target_last_hidden_states"),
        "dflash": _kind("hidden_states", None),
    }
    file: ClassVar[re.Pattern[str]] = re.compile(r"rows_\d+-\d+/data_(\d+)\.ckpt(?:\.gz)?")

    def __init__(self, spec: Spec) -> None:
        self._group = positive(spec.options, "file_group_size", _GROUP) or _GROUP
        self._gz = flag(spec.options, "gz", False)
        super().__init__(spec)

    @property
    def gzipped(self) -> bool:
        return self._gz

    def name(self, example: int) -> str:
        first = example // self._group * self._group
        return f"rows_{first}-{first + self._group}/data_{example}.ckpt{'.gz' if self._gz else ''}"

    def archive_name(self, example: int) -> str:
        return "archive" if self._gz else super().archive_name(example)  # SpecForge saves to an open gzip file
