"""Conversions whose result is a URL: into a local scratch folder, then :func:`actshard.push`."""

from __future__ import annotations

import functools
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from actshard import _arguments
from actshard.errors import ArgumentError, ExistsError, boundary
from actshard.location import Location
from actshard.storage import Remote
from actshard.work import PUSHING

F = TypeVar("F", bound=Callable[..., Any])


def uploads(convert: F) -> F:
    """Extends a conversion to targets that are URLs. Handles its arguments ``scratch`` and ``target_options``."""

    @functools.wraps(convert)
    def wrapped(src: Any, dst: Any, format: str, **given: Any) -> Any:
        scratch, options = given.pop("scratch", None), given.pop("target_options", None)
        if isinstance(dst, str) and "://" in dst:
            root = Location.of_any(dst, options)
            if isinstance(root.storage, Remote):
                return _to_url(convert, src, root, (dst, options, scratch), format, given)
        for name, value in (("scratch", scratch), ("target_options", options)):
            if value is not None:
                raise ArgumentError(f"{name}: expected a URL as dst to use it for, found a local path")
        return convert(src, dst, format, **given)

    return cast(F, wrapped)


def _to_url(
    convert: F, src: Any, root: Location, target: tuple[str, Any, Any], format: str, given: dict[str, Any]
) -> Any:
    import tempfile

    from actshard.pushing import push

    began = time.perf_counter()
    url, options, scratch = target
    resume = _arguments.switch(given.get("resume", False), "resume")
    exist_ok = _arguments.switch(given.get("exist_ok", False), "exist_ok")
    if not (resume or exist_ok):
        _check_free(root)
    above = Path(tempfile.gettempdir()) if scratch is None else _arguments.local_path(scratch, "scratch")
    name = hashlib.sha256(f"{root}\n{format}".encode()).hexdigest()[:16]
    own = above / f"actshard-convert-{name}"
    folder = own / (root.name or "dataset")
    with boundary(own, "make"):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        made = convert(src, folder, format, **given)
    finally:
        if not any(own.iterdir()):
            own.rmdir()
    push(folder, url, options)
    shutil.rmtree(own, ignore_errors=True)
    below = made.path.relative_to(folder).as_posix()
    place = root if below == "." else root.joinpath(below)
    return replace(made, path=place.place, seconds=time.perf_counter() - began)


def _check_free(root: Location) -> None:
    """Raises ExistsError, before anything is converted, if the target contains objects."""
    if str(root).startswith("hf://"):
        return  # the repository may not exist yet
    native = cast(Remote, root.storage).native
    start = f"{native.root}/" if native.root else ""
    found = [key for key, _ in native.everything() if not key.endswith("README.md")]
    if found and not any(key.endswith(PUSHING) for key in found):
        raise ExistsError(
            f"contains other objects ({found[0][len(start) :]}). Choose another URL, or pass resume=True to complete an "
            "interrupted conversion.",
            path=root,
        )
