"""What plots draw: open stores and token caches, or paths that they open."""

from __future__ import annotations

import os

from actshard.base.errors import ArgumentTypeError
from actshard.reading.opening import open
from actshard.reading.store import Store
from actshard.tokens.cache import TokenCache, open_cache
from actshard.tokens.looking import CacheLook, look

Plotted = Store | str | os.PathLike[str]
"""A dataset to plot."""
PlottedCache = CacheLook | TokenCache | str | os.PathLike[str]
"""A token cache to plot."""


def store_of(source: Plotted) -> Store:
    """Returns the store, or opens the dataset at a path or URL.

    Raises:
        ArgumentTypeError: the argument has another type.
        Errors of :func:`actshard.open`.
    """
    if isinstance(source, Store):
        return source
    if isinstance(source, str | os.PathLike):
        return open(source)
    also = ""
    if isinstance(source, TokenCache | CacheLook):
        also = ". Token caches have the plots lengths, frequency and packing"
    elif hasattr(source, "as_store"):
        also = ". Pass its as_store()"
    raise ArgumentTypeError(f"store: expected an open store or a path, found {type(source).__name__}{also}")


def look_of(source: PlottedCache) -> CacheLook:
    """Returns what was counted in a token cache; counts it if the cache or its path or URL is given.

    Raises:
        ArgumentTypeError: the argument has another type.
        Errors of :func:`actshard.tokens.open_cache` and :func:`actshard.tokens.looking.look`.
    """
    if isinstance(source, CacheLook):
        return source
    if isinstance(source, TokenCache):
        return look(source)
    if isinstance(source, str | os.PathLike):
        return look(open_cache(source))
    raise ArgumentTypeError(f"found: expected a token cache, its path or look(cache), found {type(source).__name__}")
