"""Writes EAGLE's hidden states, as ``ge_data_all_vicuna.py`` writes them; see the docstring of the folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.draft_writing import DraftCarrying, DraftKind, DraftTarget
from actshard.formats.per_token import LAST

__all__ = ["DraftCarrying", "EagleTarget"]


class EagleTarget(DraftTarget):
    """Writes ``0/data_0.ckpt``, ``0/data_1.ckpt``, ...: one folder, as a single process does."""

    format: ClassVar[str] = "eagle"
    reads_all_files: ClassVar[bool] = True
    format_options: ClassVar[Mapping[str, str]] = {
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
    }
    kinds: ClassVar[Mapping[str, DraftKind]] = {
        "eagle": DraftKind(
            (
                ("input_ids", "input_ids", False),
                ("hidden_state", LAST, False),
                ("loss_mask", "loss_mask", False),
            )
        )
    }
    file: ClassVar[re.Pattern[str]] = re.compile(r"0/data_(\d+)\.ckpt")

    def name(self, example: int) -> str:
        return f"0/data_{example}.ckpt"
