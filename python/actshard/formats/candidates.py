"""Which columns of vectors of a table are layers: names decide before kinds and widths, and the caller decides before names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from actshard.base.errors import ArgumentError, FormatError
from actshard.base.layers import several
from actshard.base.location import Location

if TYPE_CHECKING:
    from actshard.base.layers import Layer

_OF_STATES = re.compile(r"hidden|resid|activation|(?<![a-z])acts?(?![a-z])|(?<![a-z])states?(?![a-z])", re.IGNORECASE)
_OF_OUTPUTS = re.compile(
    r"logit|log_?prob|prob(s|abilit)|softmax|(entropy|loss|score|reward|grad)(es|s)?$|router_(weights|scores|mask)"
    r"|(attn|attention)_?(weight|score|prob|pattern|mask)|attentions$|hook_(pattern|attn_scores)",
    re.IGNORECASE,
)


_OF_INDICES = re.compile(r"(^|[^a-z])(ind(ices|exe?s?)|idxs?|locations?|(feature|latent)_?ids?)$", re.IGNORECASE)
_OF_LAYERS = re.compile(r"(^|_)(layer|hook)(_?(name|id|idx|index|number|point))?$", re.IGNORECASE)
_OF_MASKS = re.compile(r"(attention|padding|attn|token)_?mask$|^mask$", re.IGNORECASE)


def is_of_indices(name: str) -> bool:
    """Whether a column of integers has this name because it has the indices of sparse latents, such as ``top_indices``."""
    return _OF_INDICES.search(name) is not None


def several_layers(name: str, least: object, most: object) -> str | None:
    """Text about a column of numbers by its name and range, if its rows are those of several layers; else None."""
    if _OF_LAYERS.search(name) is None or least == most:
        return None
    return (
        f"column {name} has values from {least} to {most}: rows of several layers are examples of one. "
        f"store.filter('{name} == {least}') chooses those of one layer"
    )


def masks_not_applied(columns: Sequence[str]) -> str | None:
    """Text about columns that may mark padding, which readers of tables do not apply; None without any."""
    masks = [name for name in columns if _OF_MASKS.search(name)]
    if not masks:
        return None
    return (
        f"column {masks[0]} is not applied: if it marks padding, its tokens count as content. keep={masks[0]!r} leaves them out "
        "of streams and statistics"
    )


def rank_of(name: str) -> int:
    """2 for the name of hidden states, 0 for one of outputs, scores or attention weights, 1 for any other, or one of both."""
    return 1 + bool(_OF_STATES.search(name)) - bool(_OF_OUTPUTS.search(name))


def choose(kinds: Mapping[str, object], path: Location, rank: Callable[[str], int] = rank_of) -> list[str]:
    """The columns that are layers: those of the kind of the best one, by its name, then by its kind.

    Args:
        kinds: the kind of each column, such as its axes, width and dtype; better ones are larger.
        path: the dataset, for messages.
        rank: 0 for columns that are never layers.

    Raises:
        FormatError: there are only columns that are never layers.
    """
    best = max(kinds, key=lambda name: (rank(name), kinds[name]))
    if rank(best) == 0:
        raise FormatError(
            f"expected a column of activations, found {', '.join(kinds)}, by their names scores or outputs. To read one: "
            f"layout={{'layers': [{best!r}]}}",
            path=path,
        )
    return [name for name in kinds if kinds[name] == kinds[best] and rank(name)]


def named_in(layout: Mapping[str, Sequence[Layer]] | None, columns: Sequence[str]) -> list[str] | None:
    """The columns that ``layout={"layers": [...]}`` names; None without it. Raises ArgumentError for others."""
    if layout is None:
        return None
    names = [str(name) for name in several(layout["layers"])]
    unknown = next((name for name in names if name not in columns), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, columns, 1)
        hint = f"; do you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"layout: no column of vectors {unknown!r}{hint} There are {', '.join(columns) or 'none'}")
    return names


def left_out(columns: Sequence[str], layers: Sequence[str]) -> str:
    """Text about columns of vectors that are not layers."""
    return (
        f"columns {', '.join(columns)} differ from {', '.join(layers)} in kind, size, dtype or lengths, or are named as outputs: "
        f"they are columns, not layers; layout={{'layers': [{columns[0]!r}]}} reads them instead"
    )
