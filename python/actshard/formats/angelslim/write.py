"""Writes AngelSlim's hidden states, as its tools write them with one rank; see the docstring of the folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from actshard.base.errors import ArgumentError
from actshard.formats.draft_writing import AUX, DraftCarrying, DraftKind, DraftTarget
from actshard.formats.per_token import LAST
from actshard.formats.target import Spec, positive

__all__ = ["AngelSlimTarget", "DraftCarrying"]

_GROUP = 5000
"""AngelSlim's default number of EAGLE-3 files per folder. By default, DFlash files are not grouped in folders."""
_DIGITS = 8


class AngelSlimTarget(DraftTarget):
    """Writes ``rank_0/rows_0-5000/data_0.ckpt``, ... or ``sample_00000000_rank0.ckpt``, ..."""

    format: ClassVar[str] = "angelslim"
    format_options: ClassVar[Mapping[str, str]] = {
        "kind": '"eagle3" (default), or "dflash" (default without a last hidden state)',
        "last": f'the layer that is stored as the last hidden state (default: "{LAST}")',
        "file_group_size": f"files per folder (default: {_GROUP}; dflash: no folders)",
    }
    kinds: ClassVar[Mapping[str, DraftKind]] = {
        "eagle3": DraftKind(
            (
                ("input_ids", "input_ids", True),
                ("loss_mask", "loss_mask", True),
                ("hidden_states", AUX, True),
                ("target_hiddens", LAST, True),
            )
        ),
        "dflash": DraftKind(
            (
                ("input_ids", "input_ids", True),
                ("hidden_states", AUX, True),
                ("loss_mask", "loss_mask", True),
                ("attention_mask", "attention_mask", True),
            )
        ),
    }
    file: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:rank_0/rows_\d+-\d+/data_|(?:shard_\d+/)?sample_)(\d+)(?:_rank0)?\.ckpt"
    )

    def __init__(self, spec: Spec) -> None:
        self._group = positive(spec.options, "file_group_size", None)
        super().__init__(spec)

    def name(self, example: int) -> str:
        if self.kind_name == "dflash":
            folder = "" if self._group is None else f"shard_{example // self._group:05}/"
            return f"{folder}sample_{example:0{_DIGITS}}_rank0.ckpt"
        group = self._group or _GROUP
        first = example // group * group
        return f"rank_0/rows_{first}-{first + group}/data_{example}.ckpt"

    def check_count(self, n: int, columns: Sequence[str]) -> None:
        if self.kind_name == "dflash" and n > 10**_DIGITS:
            raise ArgumentError(
                f"expected at most {10**_DIGITS:,} examples, found {n:,}: names of files have {_DIGITS} digits"
            )
        super().check_count(n, columns)
