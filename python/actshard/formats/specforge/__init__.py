"""SpecForge's hidden states for training EAGLE-3, DFlash and DSpark; see docs/formats/specforge.md.

Names of SpecForge's files and tensors.

Source: sgl-project/SpecForge a6b6b02, ``scripts/prepare_hidden_states.py``.

rows_0-2000/data_0.ckpt[.gz]    files of examples, in groups
vocab_mapping/vocab_mapping.pt  draft vocabulary; not part of the store
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.draft_examples import DraftKeys
from actshard.formats.draft_torch import DraftFolder, DraftTree
from actshard.formats.format import Format, Room


class SpecForgeFormat(Format):
    """SpecForge hidden states."""

    name: ClassVar[str] = "specforge"
    description: ClassVar[str] = "SpecForge hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 70
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".:detect",
        "open": ".:open",
        "target": ".write:SpecForgeTarget",
        "check": ".:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = SpecForgeFormat()


_GROUP, _FILE = re.compile(r"rows_(\d+)-(\d+)"), re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")
FOLDER = DraftFolder(
    "specforge",
    "rows_*/data_*.ckpt[.gz] of SpecForge",
    kinds=(
        DraftKeys("eagle3", "aux_hidden_state", "aux_hidden_state", "hidden_state"),
        DraftKeys("dspark", "target_last_hidden_states", "hidden_states", "target_last_hidden_states"),
        DraftKeys("dflash", "hidden_states", "hidden_states", None),
    ),
    trees=(
        DraftTree((_GROUP, _FILE), order=(2,), example=(2,), sure=True, span=(0, 1)),
        DraftTree((_FILE,), order=(0,), example=(0,)),
    ),
    extra_files=("vocab_mapping/vocab_mapping.pt",),
    skips="SpecForge does not write examples with NaN values",
)
detect, open, check = FOLDER.detect, FOLDER.open, FOLDER.check
