"""Conversions whose result is a URL: into a local scratch folder, then :func:`actshard.push`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from actshard.base import _arguments
from actshard.base.errors import ActshardError, ArgumentError, ExistsError
from actshard.base.location import Location
from actshard.reading.finding import find

F = TypeVar("F", bound=Callable[..., Any])


def uploads(convert: F) -> F:
    """Extends a conversion to targets that are URLs. Handles its arguments ``scratch`` and ``target_options``."""

    @functools.wraps(convert)
    def wrapped(src: object, dst: object, format: str, **arguments: object) -> object:
        scratch, options = arguments.pop("scratch", None), arguments.pop("target_options", None)
        if _arguments.is_url_elsewhere(dst):
            return _to_url(convert, src, (dst, options, scratch), format, arguments)
        for name, value in (("scratch", scratch), ("target_options", options)):
            if value is not None:
                raise ArgumentError(f"{name}: expected a URL as dst to use it for, found a local path")
        return convert(src, dst, format, **arguments)

    return cast(F, wrapped)


def _to_url(
    convert: F, src: object, target: tuple[str, Any, object], format: str, arguments: dict[str, object]
) -> object:
    from actshard.writing.pushing.scratch import Scratch  # only if it is used

    began = time.perf_counter()
    url, options, scratch_folder = target
    resume = _arguments.switch(arguments.get("resume", False), "resume")
    exist_ok = _arguments.switch(arguments.get("exist_ok", False), "exist_ok")
    scratch = Scratch(url, options, scratch_folder, f"convert {format}")
    scratch.check_free(resume, exist_ok)
    if (resume or exist_ok) and not scratch.has_work:
        _refuse_another_format(scratch.root, format)
    scratch.make()
    try:
        with scratch.named():
            conversion = convert(src, scratch.folder, format, **arguments)
    finally:
        scratch.remove_if_empty()
    scratch.push()
    return replace(conversion, path=scratch.place_of(conversion.path), seconds=time.perf_counter() - began)


def _refuse_another_format(root: Location, format: str) -> None:
    """Raises ExistsError, before anything is converted, for a dataset at the destination that cannot be the result."""
    try:
        path, name = find(root)
    except ActshardError:  # the destination is checked again before the upload
        return
    if name != format:
        raise ExistsError(
            f"contains other objects: a dataset, format: expected {format}, found {name}. Choose another URL", path=path
        )
