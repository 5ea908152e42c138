"""The scales of int8 activations: an array of float32 with the axes of the activations.

::

    arrays/activations           int8     (N, L, T_max, H), chunks (1, 1, T_chunk, H)
    arrays/activation_scales     float32  (1, L, 1, parts): of each layer, or (N, L, T_max, parts): of each row, in the same chunks
    attribute activation_scales  {"array": "arrays/activation_scales", "kind": "channel", ...}

``parts`` divides H, and a scale belongs to H / parts consecutive elements. Rows are the products, float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import name_of
from actshard.base._json import Fields, show
from actshard.base.errors import FormatError, UnsupportedError
from actshard.formats.scales import WORDS
from actshard.formats.zarr.arrays import ZarrStore, core_decoder, decoded_by, read_array
from actshard.formats.zarr.meta import ArrayMeta

SCALES = "arrays/activation_scales"
SCALED = "activation_scales"
"""The attribute that describes them."""
_MOST_SCALES = 1 << 28
"""Limit on the bytes of the scales of layers."""


@dataclass(frozen=True)
class StoredScales:
    """The scales of an array of codes."""

    codes: ArrayMeta
    meta: ArrayMeta
    about: dict[str, object]
    """The attribute."""
    values: NDArray[np.float32] | None
    """``(layers, parts)``: those of layers; None if each row has its own."""

    @property
    def parts(self) -> int:
        """Scales of a row."""
        return self.meta.shape[3]

    @property
    def form(self) -> str:
        """The kind of scales, and the rows from which they were determined."""
        kind, source = self.about.get("kind"), self.about.get("scales_from")
        text = f"int8, scale per {WORDS[kind]}" if isinstance(kind, str) and kind in WORDS else "int8 with scales"
        return text + (f", from {source}" if isinstance(source, str) and self.values is not None else "")

    @property
    def error(self) -> str | None:
        """The error that was measured when the rows were written."""
        numbers = [self.about.get(name) for name in ("relative_error", "cosine", "saturated")]
        if not all(isinstance(number, int | float) for number in numbers):
            return None
        error, cosine, saturated = numbers
        return f"relative error {error:.2g}, mean cosine {cosine:.6f}, {saturated:,} values saturated"

    def for_core(self) -> tuple[str, int, Any]:
        """Arguments of the native ``Rows.chunked``."""
        assert self.codes.dtype is not None
        decoder = core_decoder(self.meta) if not self.meta.how else decoded_by(self.meta)
        return name_of(self.codes.dtype), self.parts, decoder if self.values is None else self.values.reshape(-1)


def stored_scales(store: ZarrStore, codes: ArrayMeta) -> StoredScales | None:
    """The scales of a store's activations; None if its attributes name none.

    Raises:
        FormatError: attributes, shapes or values contradict each other.
        UnsupportedError: chunks contain several samples or layers.
    """
    about = store.attributes.get(SCALED)
    if about is None:
        return None
    path = codes.metadata
    if not isinstance(about, dict):
        raise FormatError(f"attribute {SCALED!r}: expected an object, found {show(about)}", path=path, code="metadata")
    node = Fields(about, path, f"attribute {SCALED!r}").text("array")
    if not node.startswith("arrays/") or ".." in node.split("/") or not node.isprintable():
        raise FormatError(
            f"attribute {SCALED!r}: expected an array below arrays/, found {show(node)}", path=path, code="metadata"
        )
    if codes.dtype != np.int8:
        raise codes.error(
            f"expected int8, because the attribute {SCALED!r} names scales, found {codes.dtype}", field="dtype"
        )
    meta = store.array(node)
    if meta is None:
        raise FormatError(f"attribute {SCALED!r}: expected the array {node}, found none", path=path, code="metadata")
    if meta.dtype != np.float32:
        raise meta.error(f"expected float32, found {meta.dtype or 'strings'}", field="dtype")
    samples, layers, tokens, width = codes.shape
    of_layers, of_rows = (1, layers, 1), (samples, layers, tokens)
    shape = meta.shape
    if len(shape) != 4 or shape[:3] not in (of_layers, of_rows) or not shape[3] or width % shape[3]:
        expected = f"{[*of_layers, width]} or {[*of_rows, 1]}, with a last axis that divides {width}"
        raise meta.error(f"expected scales of {expected}, found {list(shape)}", field="shape")
    if codes.chunks[:2] != (1, 1) or codes.chunks[3] != width:
        raise UnsupportedError(
            f"scales: expected chunks (1, 1, tokens, {width}) of int8 codes, found {list(codes.chunks)}: read codes and scales "
            "with the zarr package",
            path=path,
        )
    if shape[:3] != of_layers or samples == tokens == 1:
        if meta.chunks == (1, 1, codes.chunks[2], shape[3]):
            return StoredScales(codes, meta, about, None)
        if shape[:3] != of_layers:
            raise UnsupportedError(
                f"scales: expected chunks {[1, 1, codes.chunks[2], shape[3]]}, as those of the codes, found {list(meta.chunks)}",
                path=meta.metadata,
            )
    if 4 * math.prod(shape) > _MOST_SCALES:
        raise meta.error(
            f"expected at most {_MOST_SCALES:,} bytes of scales of layers, found {list(shape)}", field="shape"
        )
    values = np.asarray(read_array(meta), np.float32).reshape(layers, shape[3])
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if bad.size:
        raise FormatError(
            f"expected positive finite scales, found {values.flat[bad[0]]} for layer {bad[0] // shape[3]}",
            path=meta.folder,
        )
    return StoredScales(codes, meta, about, np.ascontiguousarray(values))
