"""Conversions of objects of other libraries, such as a ``datasets.Dataset``: saved next to the result, converted, and removed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from actshard import formats
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, boundary

F = TypeVar("F", bound=Callable[..., Any])


class SavesToDisk(Protocol):
    """A ``datasets.Dataset``."""

    def save_to_disk(self, dataset_path: object) -> None:
        """Writes the dataset to a new folder."""


def saves(convert: F) -> F:
    """Extends a conversion to sources that are objects of formats' libraries (:meth:`Format.is_given`)."""

    @functools.wraps(convert)
    def wrapped(src: object, dst: object, format: str, **arguments: object) -> object:
        kind = formats.of_object(src)
        if kind is None:
            return convert(src, dst, format, **arguments)
        for name in ("src_format", "storage_options", "cache"):
            if arguments.get(name):
                raise ArgumentError(f"{name}: expected a path as src to use it for, found {type(src).__name__}")
        if arguments.get("resume"):
            raise ArgumentError(
                "resume: expected a path as src, which can be compared with that of the interrupted call, found "
                f"{type(src).__name__}; save it first"
            )
        import tempfile  # imported on use: it imports many modules

        parent = _arguments.local_path(dst, "dst").absolute().parent
        with boundary(parent, "write"):
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".actshard-", dir=parent) as scratch:
                folder = Path(scratch) / type(src).__name__
                kind.save(src, folder)
                return convert(str(folder), dst, format, src_format=kind.name, **arguments)

    return cast(F, wrapped)
