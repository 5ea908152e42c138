"""Results of ``actshard.verify``: findings, each with a stable code."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from actshard.base._json import show
from actshard.base.codes import ERROR, NOTE, WARNING, findings
from actshard.base.containers import TorchFile
from actshard.base.errors import (
    ActshardError,
    ClosedError,
    Faults,
    InternalError,
    InterruptedReadError,
    NoMemoryError,
    boundary,
    place_of,
)
from actshard.base.location import Location
from actshard.formats.foreign import tell

_P = TypeVar("_P", bound=os.PathLike[str])
_T = TypeVar("_T")

NOT_OF_DATA = (ClosedError, InterruptedReadError, NoMemoryError)
"""Errors that are not caused by the files: the store was closed, the read was interrupted, or memory is short. They are raised
instead of reported, because a finding would declare valid data damaged."""


@dataclass(frozen=True)
class Finding:
    """One problem or remark about a dataset.

    Attributes:
        code: stable identifier; ``actshard.reading.verifying.CODES`` lists severities and remedies.
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        path: the file.
        place: position in the file: a field, a line, a byte or an example; or None.
        expected: the expected value; empty if there is none.
        found: the value found.
        remedy: the action to take.
    """

    code: str
    severity: str
    path: Path
    place: str | None
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.path}: {self.place}: " if self.place else f"{self.path}: "
        message = f"expected {self.expected}, found {self.found}" if self.expected else self.found
        return f"{self.severity} [{self.code}] {where}{message.removesuffix('.')}; {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON-compatible values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"path": str(self.path)}


@dataclass
class Report:
    """All findings about a dataset."""

    path: Path
    format: str | None
    deep: bool
    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    """Numbers of files, examples, rows and bytes that were checked."""
    layout: object = field(default=None, repr=False, compare=False)
    """The ``layout=`` argument, for formats that use one."""
    incomplete: str = field(default="error", repr=False, compare=False)
    """The ``incomplete=`` argument: with ``"skip"``, files that are not whole are notes."""
    faults: Collected = field(init=False, repr=False, compare=False)
    """Faults that the format's parser finds. Opening the dataset raises the first of them."""
    _seen: set[Finding] = field(default_factory=set, init=False, repr=False, compare=False)
    _wrong: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Codes and messages of errors by file, so that :meth:`error` does not report them twice. Files are texts, because errors
    of reading name a URL and checks its location."""

    def __post_init__(self) -> None:
        self.faults = Collected(self)

    def __repr__(self) -> str:
        counts = collections.Counter(f"{f.severity} {f.code}" for f in self.findings)
        shown = ", ".join(f"{n} x {what}" for what, n in counts.most_common(8)) or "no findings"
        rest = f", and {len(counts) - 8} more codes" if len(counts) > 8 else ""
        deep = ", deep" if self.deep else ""
        return f"<actshard.Report of {self.path} ({self.format}{deep}): {'ok' if self.ok else 'not ok'}: {shown}{rest}>"

    @property
    def ok(self) -> bool:
        """Whether there are no errors. There may be warnings and notes."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity ``"error"``."""
        return [f for f in self.findings if f.severity == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """Findings of severity ``"warning"``."""
        return [f for f in self.findings if f.severity == WARNING]

    @property
    def status(self) -> int:
        """Exit status of the command: 0 without errors and warnings, 1 with warnings, 2 with errors."""
        return 2 if self.errors else 1 if self.warnings else 0

    def codes(self) -> set[str]:
        """Codes of all findings."""
        return {f.code for f in self.findings}

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {
            "path": str(self.path),
            "format": self.format,
            "deep": self.deep,
            "ok": self.ok,
            "status": self.status,
            "checked": self.checked,
            "findings": [f.as_dict() for f in self.findings],
        }

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> Report:
        """The report of :meth:`as_dict`.

        Raises:
            LookupError, TypeError, ValueError: the values are not those of a report.
        """
        if not isinstance(values["checked"], dict) or not isinstance(values["format"], str | None):
            raise TypeError(
                f"expected a format's name and amounts, found {values['format']!r:.40}, {values['checked']!r:.40}"
            )
        report = cls(place_of(values["path"]), values["format"], bool(values["deep"]))
        report.checked = {str(what): int(n) for what, n in values["checked"].items()}
        for finding in values["findings"]:
            report.add(
                finding["code"], place_of(finding["path"]), finding["found"], finding["expected"], finding["place"]
            )
        return report

    def add(
        self, code: str, path: Path | Location, found: object, expected: str = "", place: str | None = None
    ) -> None:
        """Adds a finding, unless it is already present."""
        path = place_of(path)
        definition = findings().get(code)
        if definition is None:
            raise InternalError(f"finding {code!r}: expected a declared code (Format.findings)", path=path)
        severity = definition.severity
        text = str(found) if isinstance(found, str) else show(found)
        finding = Finding(code, severity, path, place, expected, text, definition.remedy)
        if finding not in self._seen:
            self._seen.add(finding)
            self.findings.append(finding)
            if severity == ERROR:
                self._wrong |= {(str(path), code), (str(path), text)}

    def excuse(self, paths: Collection[Path]) -> None:
        """Makes notes of all findings about these files."""
        self.findings = [replace(f, severity=NOTE) if f.path in paths else f for f in self.findings]

    def count(self, what: str, n: int = 1) -> None:
        """Adds to a number in :attr:`checked`."""
        self.checked[what] = self.checked.get(what, 0) + n

    def error(self, error: ActshardError, path: Path | Location, code: str | None = None) -> None:
        """Adds an exception as a finding, unless its code or message was already reported for the same file.

        Raises:
            The error itself, if it is one of :data:`NOT_OF_DATA`.
        """
        if isinstance(error, NOT_OF_DATA):
            raise error
        if (str(error.path or path), code or error.code or "format") not in self._wrong:
            self.fault(error, path, code)

    def fault(self, error: ActshardError, path: Path | Location, code: str | None = None) -> None:
        """Adds an exception as a finding, unless its message was already reported for the same file."""
        tell(error)
        where = error.path or place_of(path)
        position = None if error.offset is None else f"byte {error.offset}"
        if (str(where), error.detail) not in self._wrong:
            self.add(code or error.code or "format", where, error.detail, place=position)

    @contextmanager
    def noting(self, path: Path | Location, code: str | None = None) -> Iterator[None]:
        """Context manager that turns exceptions into findings, so that the check continues."""
        try:
            with boundary(path, "check"):
                yield
        except ActshardError as error:
            self.error(error, path, code)


class Collected(Faults):
    """Adds faults to a report as findings, so that a parser continues after them."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.errors: list[ActshardError] = []
        """All faults, in the order in which the parser found them."""
        self._ids: set[int] = set()

    def add(self, *errors: ActshardError) -> None:
        """Adds each fault as a finding.

        Raises:
            The error itself, if it is one of :data:`NOT_OF_DATA`.
        """
        for error in errors:
            if isinstance(error, NOT_OF_DATA):
                raise error
            if id(error) not in self._ids:
                self._ids.add(id(error))  # of no other object, because the list keeps the error
                self.errors.append(error)
                self._report.fault(error, self._report.path)

    def refused(self, error: ActshardError) -> None:
        """Adds the error of opening the dataset. It is the first fault, unless the check has already found this one."""
        self._report.error(error, self._report.path)
        self.errors = self.errors or [error]

    def parse(self, path: str | os.PathLike[str], read: Callable[[], _T]) -> _T | None:
        """Returns what a parser returns. If it raises a fault, adds the fault and returns None."""
        with self.noting(path):
            return read()
        return None

    def batch(self, paths: Sequence[_P], parse: Callable[[Sequence[_P]], list[_T]]) -> list[_T]:
        """Adds the faults of each file."""
        try:
            return parse(paths)
        except ActshardError as error:
            num_errors = len(self.errors)
            for path in paths:
                with self.noting(path):
                    parse([path])
            raise next(iter(self.errors[num_errors:]), error) from error

    @contextmanager
    def noting(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Adds the fault that the block raises."""
        try:
            with boundary(path, "check"):
                yield
        except ActshardError as error:
            error.path = error.path or place_of(path)
            self.add(error)


# Checks of files of ``torch.save``, for all formats that have them.


_TIMES = 2
"""A file may be this many times as large as its tensors before it is reported."""
_LEAST = 1024
"""Files up to this size in bytes are not reported as too large."""
_SHOWN = 4


def check_torch(file: TorchFile, report: Report) -> None:
    """Checks the size of a file against its tensors, and names objects that are not built; if deep, also checks the checksums."""
    refused = file.refused
    file_bytes, tensors = file.sizes
    # Tensors that are not read, such as sparse ones, have storages, too.
    if file_bytes > max(_TIMES * tensors, _LEAST) and not refused:
        times = f", {file_bytes // tensors} times as many" if tensors else ""
        report.add("oversized-file", file.path, f"{file_bytes} bytes for tensors of {tensors} bytes{times}")
    if refused:
        names = [f"{steps} ({entry.name})" for steps, entry in list(refused.items())[:_SHOWN]]
        rest = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        report.add("unread-object", file.path, f"entries that are not read: {', '.join(names)}{rest}")
    if report.deep:
        for offset in file.damaged():
            report.add("record-checksum", file.path, "other bytes", "the content of the CRC-32", f"byte {offset}")
