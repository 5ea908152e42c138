"""Every exception that actshard raises.

All of them are :class:`ActshardError`, and each is also the builtin that a caller would have expected, so that
``except FileNotFoundError`` keeps working. ``kind`` is a stable code; codes are added, never renamed. ``str(error)`` is
one line: the file, the byte, what was expected and what was found.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

# Names in messages come from files: none may break the line or talk to the terminal.
_ESCAPES = {
    code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0xD800, 0xE000))
}


class ActshardWarning(UserWarning):
    """Something about a dataset or a call that its user should know. The call succeeds.

    Attributes:
        code: stable, such as ``"hash-mismatch"``; docs/verify.md lists all of them. None for a warning of another package.
    """

    code: str | None = None

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


class OverflowWarning(ActshardWarning):
    """Finite values became infinite while they were converted to a narrower type."""

    code = "overflow"


class ActshardError(Exception):
    """The root of all of actshard's exceptions.

    Attributes:
        kind: a stable code for the kind of failure.
        code: the code of the finding under which :func:`actshard.verify` reports it, or None where no finding is meant:
            docs/verify.md lists them.
        detail: what was expected and what was found, without the path.
        path: the file or folder it is about, or None. A :class:`~actshard.location.Location` where it is not local.
        offset: the byte offset in that file, or None.
        reason: the named rule that was broken, where a parser has named rules, or None.
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
        return f"{where}{byte}{self.detail}".translate(_ESCAPES)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders in DataLoader workers; the default recipe loses keyword arguments.
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state |= {"errno": self.errno, "filename": self.filename}
        return (_rebuild, (type(self), self.detail, self.path, self.offset, self.reason, state))


def _rebuild(
    cls: type[ActshardError],
    detail: str,
    path: Path | None,
    offset: int | None,
    reason: str | None,
    state: dict[str, Any],
) -> ActshardError:
    error = cls(detail, path=path, offset=offset, reason=reason)
    for name, value in state.items():
        setattr(error, name, value)
    return error


def as_plain(error: ActshardError) -> dict[str, Any]:
    """An error as what JSON can hold, for another process; see :func:`from_plain`."""
    return {
        "error": type(error).__name__,
        "detail": error.detail,
        "path": None if error.path is None else os.fspath(error.path),
        "offset": error.offset,
        "reason": error.reason,
        "code": error.code,
        "errno": error.errno if isinstance(error, OSError) else None,
        "filename": error.filename if isinstance(error, OSError) else None,
    }


def from_plain(made: dict[str, Any]) -> ActshardError:
    """The error that :func:`as_plain` was given; an InternalError for a class that this module does not have."""
    cls = globals().get(made["error"])
    if not (isinstance(cls, type) and issubclass(cls, ActshardError)):
        return InternalError(f"{made['error']}: {made['detail']}", path=made["path"])
    error = cls(made["detail"], path=made["path"], offset=made["offset"], reason=made["reason"])
    if error.code != made["code"]:
        error.code = made["code"]
    if isinstance(error, OSError):
        error.errno, error.filename = made["errno"], made["filename"]
    return error


class MissingFileError(ActshardError, FileNotFoundError):
    """A file or folder that should be there is not."""

    kind = "not_found"
    code = "missing-file"


class FileAccessError(ActshardError, PermissionError):
    """The system refused to open, map or read a file."""

    kind = "access"
    code = "unreadable"


class NotAFileError(ActshardError, IsADirectoryError):
    """A folder or a special file stands where a regular file should."""

    kind = "not_a_file"
    code = "not-a-file"


class FormatError(ActshardError, ValueError):
    """A file contradicts its format, or two files of a dataset contradict each other."""

    kind = "format"
    code = "format"


class TruncatedFileError(FormatError, EOFError):
    """A file is shorter than what it must hold, or became shorter after it was opened."""

    kind = "truncated"
    code = "truncated"


class HeaderError(FormatError):
    """A safetensors header was refused; ``reason`` names the rule it breaks."""

    kind = "header"
    code = "header"


class UnsafePickleError(FormatError):
    """A pickle that would import, call or build something other than plain data. Nothing of it was done."""

    kind = "unsafe_pickle"
    code = "unsafe-pickle"


class UnknownFormatError(FormatError):
    """No format, or more than one, recognises a path.

    Attributes:
        candidates: ``(path, format)`` of datasets found below the path.
        ambiguous: whether several formats recognise the path itself.
    """

    kind = "unknown_format"
    code = "unknown-format"
    candidates: tuple[tuple[Path, str], ...] = ()
    ambiguous: bool = False


class UnsupportedError(ActshardError, NotImplementedError):
    """Well formed, but of a version or element type that this release does not read."""

    kind = "unsupported"
    code = "unsupported"


class OutOfRangeError(ActshardError, IndexError):
    """An example or token outside the dataset."""

    kind = "out_of_range"


class LayerError(ActshardError, KeyError):
    """A layer that is not among the dataset's; the message lists those that are."""

    kind = "layer"


class NotStoredError(ActshardError, LookupError):
    """The dataset holds no such thing: no logits, no router tensors, no such column."""

    kind = "not_stored"


class DtypeError(ActshardError, TypeError):
    """An element type or conversion that cannot be given."""

    kind = "dtype"
    code = "unsupported"


class ArgumentError(ActshardError, ValueError):
    """An argument that makes no sense."""

    kind = "argument"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a type that is not accepted."""

    kind = "argument_type"


class ClosedError(ActshardError, ValueError):
    """The store was closed, or another loop over the same stream has begun."""

    kind = "closed"


class InterruptedReadError(ActshardError, InterruptedError):
    """A read was called off."""

    kind = "interrupted"


class DiskFullError(ActshardError, OSError):
    """The disk is full, or this user's share of it. What was committed before stays, and can be continued."""

    kind = "disk_full"


class NoMemoryError(ActshardError, MemoryError):
    """The system has not enough memory for what a dataset or an argument asks for."""

    kind = "no_memory"
    code = "unreadable"


class ExistsError(ActshardError, FileExistsError):
    """Something is there already where a dataset was to be made."""

    kind = "exists"


class UnfinishedError(FormatError):
    """A dataset whose writer has not finished: it was interrupted, or is still at work."""

    kind = "unfinished"
    code = "unfinished"


class LockedError(ActshardError, BlockingIOError):
    """Another writer is at work there; the message tells which process, on which host."""

    kind = "locked"


class InternalError(ActshardError, RuntimeError):
    """A fault of actshard itself; please report it."""

    kind = "internal"


# ImportError declares `path` as text; that of every error here is a Path.
class MissingExtraError(ActshardError, ImportError):  # type: ignore[misc]
    """Something needs a library that is not installed; the message names the extra that brings it."""

    kind = "missing_extra"
    code = "unsupported"

    @classmethod
    def of(cls, what: str, extra: str, path: str | os.PathLike[str] | None = None) -> MissingExtraError:
        """The error for ``what`` (a phrase), which the named extra makes possible."""
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
    """The exception for an error of the native half, which calls this."""
    error = _NATIVE[kind](detail, path=path, offset=offset, reason=reason, code=code)
    if isinstance(error, OSError):
        error.errno = number
        error.filename = path
    return error


@contextmanager
def boundary(path: Any, doing: str) -> Iterator[None]:
    """Turns what the system, or Python itself, raises inside the block into an ActshardError with a path.

    Args:
        path: what the block works on; named where the error names no file. Anything that is no path is not named.
        doing: a verb, for messages.
    """
    try:
        yield
    except (ActshardError, BrokenPipeError):  # a closed pipe is an output of the caller, never a file of a dataset
        raise
    except OSError as error:
        named = error.filename if isinstance(error.filename, str | bytes) and error.filename else path
        raise from_os(error, _as_path(named), doing) from error
    except MemoryError as error:
        said = " ".join(str(error).split())[:200] or "out of memory"
        raise NoMemoryError(f"cannot {doing}: {said}", path=_as_path(path)) from error
    except RecursionError as error:
        raise FormatError(f"cannot {doing}: it is nested too deep", path=_as_path(path)) from error


def _as_path(value: Any) -> Path | None:
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    return place_of(value) if isinstance(value, str | os.PathLike) else None


def place_of(path: str | os.PathLike[str]) -> Path:
    """The path. A remote location stays what it is: pathlib would fold the slashes of its URL."""
    return path if getattr(path, "is_local", True) is False else Path(path)  # type: ignore[return-value]


def from_reader(error: Exception, path: str | os.PathLike[str] | None, doing: str, broken: str) -> ActshardError:
    """The exception for what a library raised while it read a file: the system's refusals are none of the file's faults.

    Args:
        error: what was raised; one of ours is returned as it is.
        path: the file.
        doing: a verb, for messages.
        broken: what to say if it is the file that is broken.
    """
    if isinstance(error, ActshardError):
        return error
    if isinstance(error, MemoryError):
        return NoMemoryError(f"cannot {doing}: {' '.join(str(error).split())[:200] or 'out of memory'}", path=path)
    if isinstance(error, OSError) and error.errno is not None:
        return from_os(error, path, doing)
    return FormatError(broken, path=path)


def from_os(error: OSError, path: str | os.PathLike[str] | None, doing: str) -> ActshardError:
    """The exception for what the system said about ``path``; ``doing`` is a verb."""
    made: ActshardError
    if isinstance(error, FileNotFoundError):
        made = MissingFileError("expected a file, found nothing", path=path)
    elif isinstance(error, IsADirectoryError | NotADirectoryError):
        made = NotAFileError("expected a regular file, found a folder", path=path)
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        made = DiskFullError(f"cannot {doing}: the disk is full ({error.strerror})", path=path)
    elif error.errno == errno.ENOMEM:
        made = NoMemoryError(f"cannot {doing}: {error.strerror}", path=path)
    else:
        made = FileAccessError(f"cannot {doing}: {error.strerror or error}", path=path)
    if isinstance(made, OSError):
        made.errno = error.errno
        made.filename = None if path is None else str(path)
    return made
