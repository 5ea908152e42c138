"""All exceptions that actshard raises.

Each derives from :class:`ActshardError` and from the matching builtin, so that ``except FileNotFoundError`` works. ``kind`` is a
stable code; codes are added, never renamed. ``str(error)`` is one line: file, byte offset, expected and found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Never, TypeVar

# Messages contain names from files, which must not break the line or send terminal escapes.
ESCAPES = {
    code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0xD800, 0xE000))
}


class ActshardWarning(UserWarning):
    """A problem of a dataset or a call that does not make the call fail.

    Attributes:
        code: a stable code such as ``"hash-mismatch"``; docs/verify.md lists all of them. None for a warning of another package.
    """

    code: str | None = None

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


class OverflowWarning(ActshardWarning):
    """Finite values became infinite in a conversion to a narrower dtype, or were clipped by the scales of other rows."""

    code = "overflow"


_PASSED_ON = re.compile(r"(actshard|contextlib|functools|torch\.utils\.data)(\.|$)")
"""Modules that call actshard for the user: context managers, cached properties and batches in the loop's own process."""


def warn(text: str, category: type[ActshardWarning] = ActshardWarning, *, code: str | None = None) -> None:
    """Warns at the line of the user's code that called actshard, from however deep in actshard.

    In a thread or a process of another library, that is this library's line.
    """
    frame, level = sys._getframe(), 1
    # Names of modules: files have other names in a package without sources, and code of dataclasses has none.
    while frame.f_back is not None and _PASSED_ON.match(str(frame.f_globals.get("__name__"))):
        frame, level = frame.f_back, level + 1
    warnings.warn(category(text, code=code), stacklevel=level)  # noqa: TID251  # every other warning comes here


class ActshardError(Exception):
    """Base class of all actshard exceptions.

    Attributes:
        kind: a stable code for the kind of failure.
        code: the code under which :func:`actshard.verify` reports it as a finding (docs/verify.md lists them), or None.
        detail: the message without path and offset.
        path: the file or folder, or None. A :class:`~actshard.base.location.Location` if it is not local.
        offset: byte offset in that file, or None.
        reason: name of the violated rule, for parsers with named rules, or None.
    """

    kind: ClassVar[str] = "error"
    code: str | None = None

    def __init__(
        self,
        detail: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        reason: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.path = None if path is None else place_of(path)
        self.offset = offset
        self.reason = reason
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        where = "" if self.path is None else f"{self.path}: "
        byte = "" if self.offset is None else f"byte {self.offset}: "
        return f"{where}{byte}{self.detail}".translate(ESCAPES)

    def __reduce__(self) -> tuple[object, ...]:
        # DataLoader workers pickle exceptions; the default __reduce__ loses keyword arguments.
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state |= {"errno": self.errno, "filename": self.filename}
        # Pickling a remote location would also pickle its store and options.
        path = str(self.path) if getattr(self.path, "is_local", True) is False else self.path
        return (_rebuild, (type(self), self.detail, path, self.offset, self.reason, state | {"path": path}))


def _rebuild(
    cls: type[ActshardError],
    detail: str,
    path: Path | None,
    offset: int | None,
    reason: str | None,
    state: dict[str, object],
) -> ActshardError:
    error = cls(detail, path=path, offset=offset, reason=reason)
    for name, value in state.items():
        setattr(error, name, value)
    return error


def as_plain(error: ActshardError) -> dict[str, Any]:
    """Returns an error as JSON values, to send it to another process; see :func:`from_plain`."""
    return {
        "error": type(error).__name__,
        "detail": error.detail,
        "path": None if error.path is None else str(error.path),
        "offset": error.offset,
        "reason": error.reason,
        "code": error.code,
        "errno": error.errno if isinstance(error, OSError) else None,
        "filename": error.filename if isinstance(error, OSError) else None,
    }


def from_plain(plain: dict[str, Any]) -> ActshardError:
    """Rebuilds the error from :func:`as_plain`. Returns an InternalError for a class that this module does not define."""
    cls = globals().get(plain["error"])
    if not (isinstance(cls, type) and issubclass(cls, ActshardError)):
        return InternalError(f"{plain['error']}: {plain['detail']}", path=plain["path"])
    error = cls(plain["detail"], path=plain["path"], offset=plain["offset"], reason=plain["reason"])
    if error.code != plain["code"]:
        error.code = plain["code"]
    if isinstance(error, OSError):
        error.errno, error.filename = plain["errno"], plain["filename"]
    return error


class MissingFileError(ActshardError, FileNotFoundError):
    """A required file or folder does not exist."""

    kind = "not_found"
    code = "missing-file"


class FileAccessError(ActshardError, PermissionError):
    """The operating system refused to open, map or read a file."""

    kind = "access"
    code = "unreadable"


class NotAFileError(ActshardError, IsADirectoryError):
    """Expected a regular file, found a folder or a special file."""

    kind = "not_a_file"
    code = "not-a-file"


class FormatError(ActshardError, ValueError):
    """A file violates its format, or two files of a dataset contradict each other."""

    kind = "format"
    code = "format"


class TruncatedFileError(FormatError, EOFError):
    """A file is shorter than its contents require, or was truncated after it was opened."""

    kind = "truncated"
    code = "truncated"


class HeaderError(FormatError):
    """A safetensors header is invalid; ``reason`` names the violated rule."""

    kind = "header"
    code = "header"


class UnsafePickleError(FormatError):
    """A pickle would import, call or build something other than plain data. None of it was executed."""

    kind = "unsafe_pickle"
    code = "unsafe-pickle"


class UnknownFormatError(FormatError):
    """No format, or more than one, recognises a path.

    Attributes:
        candidates: ``(path, format)`` of each dataset found below the path; the format of an unfinished one is ``"unfinished"``.
        searched: whether all folders below were visited; otherwise there may be other datasets.
        ambiguous: whether several formats recognise the path itself.
    """

    kind = "unknown_format"
    code = "unknown-format"
    candidates: tuple[tuple[Path, str], ...] = ()
    searched: bool = True
    ambiguous: bool = False


class UnsupportedError(ActshardError, NotImplementedError):
    """A well-formed file has a version or dtype that this release does not support."""

    kind = "unsupported"
    code = "unsupported"


class OutOfRangeError(ActshardError, IndexError):
    """An example or token index is out of range."""

    kind = "out_of_range"


class LayerError(ActshardError, KeyError):
    """The dataset has no such layer; the message lists its layers."""

    kind = "layer"


class NotStoredError(ActshardError, LookupError):
    """The dataset does not contain the requested data: logits, router tensors, a column."""

    kind = "not_stored"


class DtypeError(ActshardError, TypeError):
    """A dtype or conversion is not supported."""

    kind = "dtype"
    code = "unsupported"


class ArgumentError(ActshardError, ValueError):
    """An argument has an invalid value."""

    kind = "argument"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has an invalid type."""

    kind = "argument_type"


class ClosedError(ActshardError, ValueError):
    """The store was closed, or another loop over the same stream has begun."""

    kind = "closed"


class InterruptedReadError(ActshardError, InterruptedError):
    """A read was cancelled."""

    kind = "interrupted"


class DiskFullError(ActshardError, OSError):
    """The disk or the user's quota is full. Committed data remain, and the write can be resumed."""

    kind = "disk_full"


class NoMemoryError(ActshardError, MemoryError):
    """Not enough memory for a dataset or an argument."""

    kind = "no_memory"
    code = "unreadable"


class ExistsError(ActshardError, FileExistsError):
    """The output path already contains a dataset or other files."""

    kind = "exists"

    @classmethod
    def finished(cls, path: str | os.PathLike[str]) -> ExistsError:
        """The error of writing a dataset that is already there, complete."""
        remedy = "Pass exist_ok=True (--exist-ok) to accept it if it is the same, or choose another path."
        return cls(f"already contains a finished dataset. {remedy}", path=path)


class UnfinishedError(FormatError):
    """A dataset is unfinished: its writer was interrupted, or is still running."""

    kind = "unfinished"
    code = "unfinished"


class LockedError(ActshardError, BlockingIOError):
    """Another writer holds the lock; the message names its process and host."""

    kind = "locked"


class ChangedInputError(ActshardError, ValueError):
    """An input file changed after the plan was made, or while a token cache was built from it."""

    kind = "changed_input"


class TasksFailedError(ActshardError, RuntimeError):
    """Tasks of a plan failed.

    Attributes:
        errors: the error of each failed task, by number.
    """

    kind = "tasks_failed"
    errors: dict[int, ActshardError]

    def __init__(self, detail: str, **where: Any) -> None:
        super().__init__(detail, **where)
        self.errors = {}


class LostWorkerError(ActshardError, RuntimeError):
    """The process that ran a task of a plan or build died, or its machine was taken away: run the plan or build again."""

    kind = "lost_worker"


class InternalError(ActshardError, RuntimeError):
    """A bug in actshard; please report it."""

    kind = "internal"


class MissingExtraError(ActshardError, ImportError):  # type: ignore[misc]  # ImportError declares path as str; here a Path
    """A required library is not installed; the message names the extra to install."""

    kind = "missing_extra"
    code = "unsupported"

    @classmethod
    def of(cls, what: str, extra: str, path: str | os.PathLike[str] | None = None) -> MissingExtraError:
        """Builds the error for ``what`` (a noun phrase), which requires the named extra."""
        return cls(f"{what} needs a library that is not installed: pip install 'actshard[{extra}]'", path=path)


_NATIVE: dict[str, type[ActshardError]] = {
    cls.kind: cls
    for cls in (
        MissingFileError,
        FileAccessError,
        NotAFileError,
        TruncatedFileError,
        FormatError,
        HeaderError,
        UnsupportedError,
        OutOfRangeError,
        DtypeError,
        ArgumentError,
        InterruptedReadError,
        InternalError,
        UnsafePickleError,
        NotStoredError,
        DiskFullError,
        ClosedError,
        NoMemoryError,
    )
}


def from_native(
    kind: str,
    detail: str,
    path: str | None,
    offset: int | None,
    reason: str | None,
    number: int | None,
    code: str | None = None,
) -> ActshardError:
    """Builds the exception for an error of the Rust core. The binding calls it by name."""
    error = _NATIVE[kind](detail, path=path, offset=offset, reason=reason, code=code)
    if isinstance(error, OSError):
        error.errno = number
        error.filename = path
    return error


@contextlib.contextmanager
def boundary(path: object, doing: str) -> Iterator[None]:
    """Converts OSError, MemoryError and RecursionError raised inside the block to an ActshardError with a path.

    Args:
        path: used if the error names no file; ignored if it is not a path.
        doing: a verb for messages.
    """
    try:
        yield
    except (ActshardError, BrokenPipeError):  # a closed pipe is the caller's output, not a file of a dataset
        raise
    except OSError as error:
        filename = error.filename if isinstance(error.filename, str | bytes) and error.filename else path
        raise from_os(error, _as_path(filename), doing) from error
    except MemoryError as error:
        reason = " ".join(str(error).split())[:200] or "out of memory"
        raise NoMemoryError(f"cannot {doing}: {reason}", path=_as_path(path)) from error
    except RecursionError as error:
        raise FormatError(f"cannot {doing}: nested too deep", path=_as_path(path)) from error


def _as_path(value: object) -> Path | None:
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    return place_of(value) if isinstance(value, str | os.PathLike) else None


def place_of(path: str | os.PathLike[str]) -> Path:
    """Converts to Path. Returns remote locations and URLs as they are: pathlib would collapse the slashes of a URL."""
    if getattr(path, "is_local", True) is False or (isinstance(path, str) and "://" in path):
        return path  # type: ignore[return-value]  # a URL remains a str: pathlib would collapse its slashes
    return Path(path)


def from_reader(error: Exception, path: str | os.PathLike[str] | None, doing: str, broken: str) -> ActshardError:
    """Builds the exception for an error that a library raised while it read a file. OS errors do not become FormatErrors.

    Args:
        error: the error; an ActshardError is returned unchanged.
        path: the file.
        doing: a verb for messages.
        broken: the message for a damaged file.
    """
    if isinstance(error, ActshardError):
        return error
    if isinstance(error, MemoryError):
        return NoMemoryError(f"cannot {doing}: {' '.join(str(error).split())[:200] or 'out of memory'}", path=path)
    if isinstance(error, OSError) and error.errno is not None:
        return from_os(error, path, doing)
    return FormatError(broken, path=path)


def from_os(error: OSError, path: str | os.PathLike[str] | None, doing: str) -> ActshardError:
    """Builds the exception for an OSError about ``path``; ``doing`` is a verb for the message."""
    actshard_error: ActshardError
    if isinstance(error, FileNotFoundError):
        actshard_error = MissingFileError("expected a file, found nothing", path=path)
    elif isinstance(error, IsADirectoryError | NotADirectoryError):
        actshard_error = NotAFileError("expected a regular file, found a folder", path=path)
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        actshard_error = DiskFullError(f"cannot {doing}: the disk is full ({error.strerror})", path=path)
    elif error.errno == errno.ENOMEM:
        actshard_error = NoMemoryError(f"cannot {doing}: {error.strerror}", path=path)
    else:
        actshard_error = FileAccessError(f"cannot {doing}: {error.strerror or error}", path=path)
    if isinstance(actshard_error, OSError):
        actshard_error.errno = error.errno
        actshard_error.filename = None if path is None else str(path)
    return actshard_error


# Faults of metadata. A parser adds them, and its caller decides whether the first one ends the parse.
#
# ``open`` raises the first fault, ``verify`` collects all of them. Both run the same parser, so they cannot disagree.


_SHOWN = 5
_P = TypeVar("_P", bound=os.PathLike[str])
_T = TypeVar("_T")


class Faults:
    """Raises the first fault. ``actshard.verify`` uses a subclass that collects faults, so that the parser continues."""

    def add(self, *errors: ActshardError) -> None:
        """Adds faults of one kind. The first one is raised, and names the files of the others, unless faults are collected."""
        first, *rest = errors
        if rest:
            names = [error.path.name for error in rest if error.path is not None]
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            first.detail += f" (and {len(rest)} more bad files: {shown})"
        raise first

    def refuse(self, *errors: ActshardError) -> Never:
        """Adds faults without which the parser cannot continue. Always raises."""
        self.add(*errors)
        raise errors[0]

    @contextmanager
    def noting(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Context manager around a block that raises faults. If faults are collected, the parser continues after the block."""
        yield

    def batch(self, paths: Sequence[_P], parse: Callable[[Sequence[_P]], list[_T]]) -> list[_T]:
        """Parses files at once: returns ``parse(paths)``.

        If faults are collected and a file is damaged, each file is parsed alone, so that the faults of all are added, and the
        first one is raised: what the files have in common is then not known.
        """
        return parse(paths)


RAISE = Faults()
"""For ``open``: the first fault is raised."""
