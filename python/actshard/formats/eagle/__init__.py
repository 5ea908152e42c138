"""EAGLE's hidden states for training EAGLE 1 and 2; see docs/formats/eagle.md.

Names of EAGLE's files and tensors.

Source: SafeAILab/EAGLE 22325d9 and 9367a94, ``ge_data/ge_data_all_vicuna.py`` and ``ge_data_all_qwen2.py``.

0/data_0.ckpt    a folder per process; a file per example
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.draft_examples import DraftKeys
from actshard.formats.draft_torch import DraftFolder, DraftTree
from actshard.formats.format import Format, Room


class EagleFormat(Format):
    """EAGLE hidden states."""

    name: ClassVar[str] = "eagle"
    description: ClassVar[str] = "EAGLE hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 76
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".:detect",
        "open": ".:open",
        "target": ".write:EagleTarget",
        "check": ".:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = EagleFormat()


_PROCESS, _FILE = re.compile(r"(\d+)"), re.compile(r"data_(\d+)\.ckpt")
FOLDER = DraftFolder(
    "eagle",
    "*/data_*.ckpt of EAGLE, with hidden_state",
    kinds=(DraftKeys("eagle", "hidden_state", None, "hidden_state", without="aux_hidden_state"),),
    trees=(
        DraftTree((_PROCESS, _FILE), order=(0, 1), example=(0, 1), first=0),
        DraftTree((_FILE,), order=(0,), example=(0,), first=0),
    ),
)
detect, open, check = FOLDER.detect, FOLDER.open, FOLDER.check
