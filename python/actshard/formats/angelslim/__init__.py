"""AngelSlim's hidden states for training EAGLE-3 and DFlash; see docs/formats/angelslim.md.

Names of AngelSlim's files and tensors.

Source: Tencent/AngelSlim 67394ce, ``tools/generate_hidden_for_draft_model.py`` and ``tools/generate_dflash_data.py``.

rank_0/rows_0-5000/data_0.ckpt              EAGLE-3; numbered per rank
[shard_00000/]sample_00000000_rank0.ckpt    DFlash
vocab_mapping.pt                            draft vocabulary; not part of the store
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.draft_examples import DraftKeys
from actshard.formats.draft_torch import DraftFolder, DraftTree
from actshard.formats.format import Format, Room


class AngelSlimFormat(Format):
    """AngelSlim hidden states."""

    name: ClassVar[str] = "angelslim"
    description: ClassVar[str] = "AngelSlim hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 74
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".:detect",
        "open": ".:open",
        "target": ".write:AngelSlimTarget",
        "check": ".:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = AngelSlimFormat()


_EAGLE3 = DraftKeys("eagle3", "hidden_states", "hidden_states", "target_hiddens", id_axes=2)
_DFLASH = DraftKeys("dflash", "attention_mask", "hidden_states", None, ("loss_mask", "attention_mask"), 2)
_RANK, _GROUP, _FILE = re.compile(r"rank_(\d+)"), re.compile(r"rows_(\d+)-(\d+)"), re.compile(r"data_(\d+)\.ckpt")
_SHARD, _SAMPLE = re.compile(r"shard_(\d+)"), re.compile(r"sample_(\d+)_rank(\d+)\.ckpt")
FOLDER = DraftFolder(
    "angelslim",
    "rank_*/rows_*/data_*.ckpt or sample_*_rank*.ckpt of AngelSlim",
    kinds=(_DFLASH, _EAGLE3),
    trees=(
        DraftTree((_RANK, _GROUP, _FILE), order=(0, 3), example=(0, 3), sure=True, first=0, span=(1, 2)),
        DraftTree((_GROUP, _FILE), order=(2,), example=(2,), first=0, span=(0, 1)),
        DraftTree((_SHARD, _SAMPLE), order=(0, 1, 2), example=(0, 1, 2), sure=True, series=(2, 1)),
        DraftTree((_SAMPLE,), order=(0, 1), example=(0, 1), sure=True, series=(1, 0)),
    ),
    extra_files=("vocab_mapping.pt",),
    skips="AngelSlim does not write examples that failed",
)
detect, open, check = FOLDER.detect, FOLDER.open, FOLDER.check
