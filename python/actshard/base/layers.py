"""Names of layers: integers, or texts such as ``blocks.5.hook_resid_post``, or both: layers 3, 17 and ``"last"``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, FormatError

Layer = int | str
"""A layer's name, as in ``store.layers``."""

_LONGEST = 1000
"""Characters of a name."""


def is_one(value: object) -> TypeGuard[int | np.integer | str]:
    """Whether a value is one name, rather than several."""
    return isinstance(value, int | np.integer | str) and not isinstance(value, bool)


def one(value: object, what: str = "layer") -> Layer:
    """Returns a name as int or str.

    Raises:
        ArgumentTypeError: another type, such as a bool or a float.
    """
    if not is_one(value):
        raise ArgumentTypeError(f"{what}: expected a layer's name, an integer or a text, found {value!r:.100}")
    return str(value) if isinstance(value, str) else int(value)


def several(values: object, what: str = "layers") -> tuple[Layer, ...]:
    """Returns names as a tuple; one name is a tuple of one.

    Raises:
        ArgumentError, ArgumentTypeError: no names, equal names, or other types.
    """
    sequence = [values] if is_one(values) else _listed(values, what)
    names = tuple(one(value, what) for value in sequence)
    if not names:
        raise ArgumentError(f"{what}: expected at least one, found none")
    if len(set(names)) < len(names):
        raise ArgumentError(f"{what}: expected different names of layers, found {short(names)}")
    return names


def _listed(values: object, what: str) -> list[object]:
    if isinstance(values, bytes | dict | set | bool | float) or not np.iterable(values):
        raise ArgumentTypeError(f"{what}: expected names of layers, found {values!r:.100}")
    return _arguments.listed(values, f"{what}: expected names of layers")


def checked(names: Iterable[object]) -> tuple[Layer, ...]:
    """Returns the names of a dataset's layers.

    Raises:
        ArgumentError: equal names, an integer and a string with the same text, or a string that is empty, too long, or contains a
            null character.
    """
    layers = tuple(names)
    if not layers:
        return ()
    layers = several(layers)
    if len(set(map(str, layers))) < len(layers):
        raise ArgumentError(f"layers: expected names that are written differently, found {short(layers)}")
    for name in layers:
        if isinstance(name, str) and (not 0 < len(name) <= _LONGEST or "\0" in name):
            raise ArgumentError(
                f"layers: expected 1 to {_LONGEST} characters without null characters, found {name!r:.100}"
            )
    return layers


def stored(names: Iterable[object], path: str | os.PathLike[str]) -> tuple[Layer, ...]:
    """:func:`checked` for a dataset at ``path``. Raises FormatError."""
    try:
        return checked(names)
    except ArgumentError as error:
        raise FormatError(error.detail, path=path) from error


def array_of(names: Sequence[Layer]) -> NDArray[np.generic]:
    """Names as a read-only array, which batches share: int64, numpy strings, or objects if there are both."""
    kinds = {type(name) for name in names}
    return _arguments.shared(np.array(names, object if len(kinds) > 1 else np.str_ if str in kinds else np.int64))


def named(text: str, names: Sequence[Layer]) -> Layer | None:
    """Returns the name whose text is ``text``, e.g. from a command line; None if there is none."""
    return next((name for name in names if str(name) == text), None)


def plain(name: Layer) -> str:
    """A name for messages and tables: without quotes, on one line."""
    text = str(name)
    return text if text.isprintable() else repr(text)[1:-1]


def listing(names: Sequence[Layer], between: str = ", ") -> str:
    """All names for messages and tables, on one line."""
    return between.join(map(plain, names))


def short(names: Sequence[Layer], at_most: int = 12) -> str:
    """Names for messages: the first few, quoted if they are texts, and their number."""
    shown = ", ".join(f"{name!r:.80}" for name in names[:at_most])
    return f"[{shown}, ... {len(names)} in all]" if len(names) > at_most else f"[{shown}]"


def not_stored(layer: object, names: Sequence[Layer]) -> str:
    """The message about a layer that is not one of a dataset's."""
    if isinstance(layer, list | tuple | np.ndarray):
        return (
            f"layer: expected one of {short(names, 200)}, found a list of them. Call this for each layer; stream() and "
            "sequences_stream() take several, sequences() one per example"
        )
    near = [name for name in names if str(name) == str(layer)] or get_close_matches(
        str(layer), [name for name in names if isinstance(name, str)], 1
    )
    meant = f". Do you mean {near[0]!r}?" if near else ""
    return f"layer {layer!r:.100} is not stored; the layers are {short(names, 200)}{meant}"
