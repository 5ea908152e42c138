"""Arrow directories of the Hugging Face ``datasets`` library, such as SAELens' caches; see docs/formats/hf_arrow.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import WARNING, Code
from actshard.formats.format import Format, Room

FINDINGS = (
    Code(
        "null-row",
        WARNING,
        "A row of a column of activations is null, or contains a null.",
        "The example has no tokens; its slot in the file has undefined values, which are not read.",
        "write the dataset without these rows, or ignore them",
    ),
    Code(
        "end-marker",
        WARNING,
        "An Arrow stream ends without its end marker.",
        "The writer may have been killed: batches after the last one may be missing.",
        "compare the number of examples with the writer's",
    ),
)


class HfArrowFormat(Format):
    """Arrow directories."""

    name: ClassVar[str] = "hf_arrow"
    description: ClassVar[str] = "Hugging Face Arrow directories (SAELens caches)"
    signs: ClassVar[tuple[str, ...]] = ("state.json",)
    manifest: ClassVar[tuple[str, ...]] = ("dataset_info.json", "state.json")
    order: ClassVar[int] = 45
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    findings: ClassVar[tuple[Code, ...]] = FINDINGS
    names_layers: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "check": ".read:check",
        "save": ".write:save",
        "target": ".write:HfArrowTarget",
        "carrying": ".write:HfArrowCarrying",
    }

    def is_given(self, given: object) -> bool:
        """Whether an object belongs to the ``datasets`` library."""
        kind = type(given)
        return kind.__module__.partition(".")[0] == "datasets" and "Dataset" in kind.__name__

    def remains(self, names: frozenset[str]) -> bool:
        return "dataset_info.json" in names and any(name.endswith(".arrow") for name in names)


FORMAT = HfArrowFormat()
