"""lmprobe extractions; see docs/formats/lmprobe.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import ERROR, NOTE, WARNING, Code
from actshard.formats.format import Format, Room

_INDEX = "write the index again"

FINDINGS = (
    Code(
        "tensor",
        ERROR,
        "A tensor is missing, or has another shape or dtype than its descriptor.",
        "Rows of this tensor cannot be read.",
        "write the dataset again",
    ),
    Code(
        "row-bytes-claim",
        NOTE,
        "The descriptor gives another row size than the files have.",
        "The row size of the files is used.",
        "trust the files; correct the descriptor",
    ),
    Code(
        "pooling",
        WARNING,
        "The only row of each example is not the row of its last token.",
        "Probes of last-token activations would use other values.",
        "do not use it as last-token activations",
    ),
    Code(
        "last-token-address",
        ERROR,
        "The two addresses of a last token differ.",
        "Last-token reads and full reads return different rows.",
        _INDEX,
    ),
    Code(
        "unaddressed-rows",
        WARNING,
        "No address points to a stored row.",
        "The row is never read; addresses may be off by one.",
        "write the index again with corrected addresses",
    ),
    Code(
        "token-count",
        ERROR,
        "The token lists and the token count of an example differ.",
        "The example has too few or too many tokens.",
        _INDEX,
    ),
    Code(
        "zero-token-example",
        WARNING,
        "An example has no tokens, but an address of a last token.",
        "Its last-token row has no meaning.",
        "leave these examples out",
    ),
    Code(
        "duplicate-text",
        WARNING,
        "Several prompts have the same text.",
        "lmprobe finds rows by text, and reads the same rows for all of them.",
        "read it with actshard or by the index's addresses, or write it again with a text for each prompt",
    ),
    Code(
        "column-type",
        WARNING,
        "A column's type does not fit its values.",
        "Values are read with the wrong type.",
        "cast it when reading",
    ),
)


class LmprobeFormat(Format):
    """lmprobe extractions. Read, written, verified, merged and converted."""

    name: ClassVar[str] = "lmprobe"
    description: ClassVar[str] = "lmprobe extractions"
    manifest: ClassVar[tuple[str, ...]] = ("lmprobe_info.json", "index/*.parquet")
    findings: ClassVar[tuple[Code, ...]] = FINDINGS
    order: ClassVar[int] = 20
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:LmprobeTarget",
        "check": ".check:check",
        "merger": ".merge:LmprobeMerger",
        "carrying": ".merge:LmprobeCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return not names.isdisjoint(("index", "tensors"))


FORMAT = LmprobeFormat()
