"""NVIDIA Model-Optimizer's hidden states for training EAGLE-3; see docs/formats/modelopt.md.

Names of Model-Optimizer's files and tensors.

Source: NVIDIA/Model-Optimizer a2fbac7, ``examples/speculative_decoding/collect_hidden_states``.

**/{conversation_id}.pt    files of examples, of any name
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.location import Location
from actshard.formats.draft_examples import DraftKeys
from actshard.formats.draft_torch import DraftFolder
from actshard.formats.format import Format, Room


class ModeloptFormat(Format):
    """Model-Optimizer hidden states."""

    name: ClassVar[str] = "modelopt"
    description: ClassVar[str] = "Model-Optimizer hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 72
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".:detect",
        "open": ".:open",
        "target": ".write:ModeloptTarget",
        "check": ".:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = ModeloptFormat()


_SUFFIX = ".pt"


def _files(root: Location, most: int | None) -> list[Location]:
    """Files in a folder and its subfolders, by relative path. With ``most``: some of the files directly in the folder."""
    if most is not None:
        names = [entry.name for entry in root.first(4096) if entry.kind == "file" and entry.name.endswith(_SUFFIX)]
        return [root / name for name in sorted(names)[:most]]
    paths = [path for path, _ in root.files() if path.name.endswith(_SUFFIX)]
    return sorted(paths, key=lambda path: path.relative_to(root))


FOLDER = DraftFolder(
    "modelopt",
    "*.pt of Model-Optimizer, with input_ids, hidden_states and aux_hidden_states",
    kinds=(DraftKeys("eagle3", "aux_hidden_states", "aux_hidden_states", "hidden_states", masks=()),),
    listing=_files,
)
detect, open, check = FOLDER.detect, FOLDER.open, FOLDER.check
