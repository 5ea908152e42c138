"""The installed formats: the folders of this package, and entry points of other packages."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from actshard.base import codes
from actshard.base.codes import Code
from actshard.base.errors import ActshardError, warn
from actshard.base.logs import LOG
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "actshard.formats"
"""The entry point group. Each entry point is a :class:`Format` class or instance."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
"""Excludes ``/``, which separates several format names in messages."""
T = TypeVar("T")


@functools.cache
def installed() -> dict[str, Format]:
    """All formats by name, sorted. Computed once per process.

    Plugins that fail to load, or whose name is taken, are skipped with a warning.
    """
    from importlib.metadata import entry_points  # slow to import, compared with all formats here

    package_formats = {
        module.name: importlib.import_module(f"actshard.formats.{module.name}").FORMAT
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if module.ispkg
    }
    formats: dict[str, Format] = {format.name: format for format in package_formats.values()}
    for point in entry_points(group=GROUP):
        format = _plugin(point)
        if format is None:
            continue
        if format.name in formats:
            _warn(point, f"a format named {format.name!r} is already installed")
            continue
        formats[format.name] = format
    return dict(sorted(formats.items()))


def _plugin(point: EntryPoint) -> Format | None:
    try:
        loaded = point.load()
        format = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # a broken plugin must not affect other formats
        _warn(point, f"{type(error).__name__}: {error}")
        return None
    if not isinstance(format, Format) or not isinstance(getattr(format, "name", None), str):
        _warn(point, f"expected an actshard.formats.Format with a name, found {type(format).__name__}")
        return None
    wrong = _wrong_in(format)
    if wrong is not None:
        _warn(point, wrong)
        return None
    return format


def _wrong_in(format: Format) -> str | None:
    """Returns a message if a plugin's declarations are invalid and would break the list of formats; else None."""
    if not _NAME.fullmatch(format.name):
        return f"name: expected letters, digits, '.', '_', '+' and '-', found {format.name!r:.80}"
    if format.holds != "activations":
        return f"holds: expected 'activations', found {format.holds!r:.80}"
    if type(format.order) is not int:
        return f"order: expected an integer, found {format.order!r:.80}"
    for kind in ("findings", "calls"):
        codes_of = getattr(format, kind)
        if not isinstance(codes_of, tuple) or not all(isinstance(code, Code) for code in codes_of):
            return f"{kind}: expected a tuple of actshard.formats.Code"
    return None


def _warn(point: EntryPoint, why: str) -> None:
    text = f"format plugin {point.name!r} ({point.value}) is not used: {why}"
    LOG.info("skipped: %s", text)
    warn(text, code="plugin-not-used")


def names() -> tuple[str, ...]:
    """Names of the formats that :func:`actshard.open` reads."""
    return tuple(name for name, format in installed().items() if format.holds == "activations")


def signs(formats: Iterable[str], *, rare: bool = False) -> list[str]:
    """Names of the files by which formats recognize a dataset whose folder cannot be listed, each once."""
    declared = (get(name).rare_signs if rare else get(name).signs for name in formats)
    return sorted({sign for names in declared for sign in names})


def of_tokens() -> tuple[str, ...]:
    """Names of the token formats."""
    return tuple(name for name, format in installed().items() if format.holds == "tokens")


DEFAULT_FORMAT = "safetensors"
"""The format of a capture, unless the caller names one: it stores every dtype and every name of a layer, and needs no actshard."""
DEFAULT_OF_PARTS = "zarr"
"""The format of a capture in parts, unless the caller names one: the parts of plain files cannot be merged."""


def written() -> tuple[str, ...]:
    """Names of the formats that :func:`actshard.create` writes."""
    formats = [format for format in installed().values() if format.writes]
    return tuple(format.name for format in sorted(formats, key=lambda format: (format.order, format.name)))


def described() -> str:
    """The name of the format that reads files by a description."""
    return next(name for name, format in installed().items() if format.takes_layout and _is_own(format))


def _own(kind: codes.Concern) -> list[Code]:
    # Formats of this package first, so that plugins cannot redefine their codes.
    formats = sorted(installed().values(), key=lambda format: not _is_own(format))
    return [code for format in formats for code in getattr(format, kind)]


codes.declare(_own)


def get(name: str) -> Format:
    """Returns a format by its name, which must be installed."""
    return installed()[name]


def _is_own(format: Format) -> bool:
    return type(format).__module__.startswith("actshard.")


def of_object(given: object) -> Format | None:
    """The format whose dataset an object of another library is; None for a path and for anything else."""
    if isinstance(given, str | os.PathLike | list | tuple):
        return None
    for format in installed().values():
        if asked(format, functools.partial(format.is_given, given), False):
            return format
    return None


def detect(name: str, path: Path) -> Evidence:
    """Checks whether a path is a dataset of a format. If a plugin fails, its format does not match.

    Raises:
        ActshardError, OSError: the path cannot be read.
    """
    format = get(name)
    try:
        evidence = format.detect(path)
    except (ActshardError, OSError):
        raise
    except Exception as error:
        if _is_own(format):
            raise
        return Evidence(False, f"a {name} dataset", f"its plugin failed ({type(error).__name__}: {error})", near=True)
    if not isinstance(evidence, Evidence):
        return Evidence(
            False, f"a {name} dataset", f"its plugin returned {type(evidence).__name__}, not Evidence", near=True
        )
    return evidence


def asked(format: Format, question: Callable[[], T], otherwise: T) -> T:
    """Returns ``question()``, or ``otherwise`` if it fails for a plugin. Used for calls to every format."""
    try:
        return question()
    except Exception:
        if _is_own(format):
            raise
        return otherwise


def contents_of(name: str, path: Path, options: Options | None = None) -> Contents:
    """Opens a dataset. Adds its path to errors of the core, which have none.

    ``options=None`` chooses between memory mapping and positioned reads by file system.
    """
    try:
        return get(name).open(path, options or Options.of(path))
    except ActshardError as error:
        if error.path is None:
            error.path = path
        raise
