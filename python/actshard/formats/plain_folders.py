"""Folders of plain files that actshard writes (formats ``npy`` and ``safetensors``): their description begins with a mark.

.. code-block:: text

    layout.toml                 # actshard: npy
    activations/LAYER.npy       (examples, tokens, d_model); or (rows, d_model), and
    lengths.npy                 int64 (examples,): rows of each example
    columns.parquet             a row per example, if there are columns
    metadata.json               if there are metadata
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from actshard.base._json import Fields, read_json
from actshard.base.errors import boundary
from actshard.base.location import Location
from actshard.formats import registry
from actshard.formats.carrying import Carrying
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.report import Report

NAME, COLUMNS, METADATA = "layout.toml", "columns.parquet", "metadata.json"
MARK = "# actshard: "
"""The beginning of a description written by actshard. The format's name follows."""


def plain_evidence(path: Location, format: str) -> Evidence:
    """Checks for a description with the mark of a format."""
    looked_for = f'a folder whose {NAME} begins with "{MARK}{format}", as convert(..., "{format}") writes it'
    if path.kind() != "folder" or (path / NAME).kind() != "file":
        return Evidence(False, looked_for, f"no {NAME}")
    mark = marked(path / NAME)
    text = f"the mark {mark!r}" if mark else f"a {NAME} without a mark"
    return Evidence(mark == format, looked_for, text, near=True, marked=mark == format)


def plain_contents(path: Location, options: Options, format: str) -> Contents:
    """The contents of the described folder, with its metadata."""
    contents = registry.get(registry.described()).open(path, options)
    fields: dict[str, object] = {}
    if (path / METADATA).kind() == "file":
        fields = Fields(read_json(path / METADATA), path / METADATA).value
    model = fields.get("model")
    return replace(contents, format=format, metadata=fields, model=model if isinstance(model, str) else None)


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the files against the description."""
    registry.get(registry.described()).check(root, report, tell)


def beginning(path: Location) -> bytes:
    """The first bytes of a description."""
    with boundary(path, "read"), path.open("read") as file:
        return bytes(file.read(512))


def marked(path: Location) -> str | None:
    """The format named in the first line of a description that actshard wrote; None for other descriptions."""
    first = beginning(path).partition(b"\n")[0].decode(errors="replace").rstrip()
    return first.removeprefix(MARK) if first.startswith(MARK) else None


class PlainCarrying(Carrying):
    """Keeps all columns and metadata: the format adds none."""

    model_key: ClassVar[str | None] = "model"

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        return dict(metadata), {}
