"""Writes Model-Optimizer's hidden states, as ``compute_hidden_states_hf.py`` writes them; see the docstring of the folder.

A file's name is the example's number with 8 digits, so that names sort in the order of the examples. The conversation's id, if
there is one, is stored in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from actshard.base.errors import ArgumentError
from actshard.formats.draft_writing import AUX, DraftCarrying, DraftKind, DraftTarget
from actshard.formats.per_token import LAST

__all__ = ["DraftCarrying", "ModeloptTarget"]

_DIGITS = 8


class ModeloptTarget(DraftTarget):
    """Writes ``00000000.pt``, ``00000001.pt``, ..."""

    format: ClassVar[str] = "modelopt"
    format_options: ClassVar[Mapping[str, str]] = {
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
    }
    kinds: ClassVar[Mapping[str, DraftKind]] = {
        "eagle3": DraftKind(
            (
                ("input_ids", "input_ids", False),
                ("hidden_states", LAST, False),
                ("aux_hidden_states", AUX, False),
                ("loss_mask", "loss_mask", False),
            ),
            values=("conversation_id", "hidden_states_prenorm"),
            may_lack_aux=True,
        )
    }
    file: ClassVar[re.Pattern[str]] = re.compile(rf"(\d{{{_DIGITS}}})\.pt")

    def name(self, example: int) -> str:
        return f"{example:0{_DIGITS}}.pt"

    def archive_name(self, example: int) -> str:
        return "archive"  # Model-Optimizer saves to an open file

    def check_count(self, n: int, columns: Sequence[str]) -> None:
        if n > 10**_DIGITS:
            raise ArgumentError(
                f"expected at most {10**_DIGITS:,} examples, found {n:,}: names of files have {_DIGITS} digits"
            )
        super().check_count(n, columns)
