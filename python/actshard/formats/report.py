"""What ``actshard.verify`` finds: each with a code that never changes its meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actshard._json import show
from actshard.errors import ActshardError, boundary

ERROR, WARNING, NOTE = "error", "warning", "note"

CODES: dict[str, tuple[str, str, str]] = {
    # What files there are.
    "unknown-format": (ERROR, "no format recognises the path", "say which format it should be (format=, --format)"),
    "unfinished": (ERROR, "a writer was interrupted, or is at work", "finish it: create or convert with resume"),
    "missing-file": (ERROR, "a file that the metadata name is not there", "restore it, or write the dataset again"),
    "not-a-file": (ERROR, "a folder or special file stands where a file should", "move it away and restore the file"),
    "unreadable": (ERROR, "the system refuses to read a file", "check permissions and the disk"),
    "empty-file": (ERROR, "a file holds nothing", "restore it, or write the dataset again"),
    "truncated": (ERROR, "a file is shorter than what it must hold", "copy it again, or write the dataset again"),
    "too-long": (
        ERROR,
        "a file is longer than what the metadata give it",
        "check that metadata and files are of one dataset",
    ),
    "unlisted-file": (
        WARNING,
        "a file looks like part of the dataset, and nothing names it",
        "remove it, or find what lost it",
    ),
    # What metadata say.
    "metadata": (ERROR, "a field of the metadata is missing or wrong", "correct the field"),
    "format": (ERROR, "a file contradicts its format, or another file", "restore it, or write the dataset again"),
    "unsupported": (
        ERROR,
        "of a version or type that is not read",
        "upgrade actshard, or convert with the original system",
    ),
    "version": (WARNING, "of a newer version than actshard knows", "upgrade actshard"),
    "hash-mismatch": (
        WARNING,
        "the folder's name is not the hash of its metadata",
        "give it its name, or find who changed it",
    ),
    "layer-order": (
        WARNING,
        "layers are not in ascending order: their names may be swapped",
        "check one layer against the model",
    ),
    "dtype-claim": (
        WARNING,
        "the metadata claim another element type than files have",
        "trust the files; correct the descriptor",
    ),
    "row-bytes-claim": (
        NOTE,
        "the metadata claim another row size than files have",
        "trust the files; correct the descriptor",
    ),
    "count-claim": (
        ERROR,
        "a count in the metadata is not what is there",
        "correct the count, or find what is missing",
    ),
    "claim": (WARNING, "the metadata say a number that is not what is there", "trust the files; correct the metadata"),
    "pooling": (
        WARNING,
        "the one row of each example is not its last token's",
        "do not use it as last-token activations",
    ),
    "no-lengths": (WARNING, "nothing says how many tokens examples have", "add the array of lengths"),
    "consolidated-differs": (WARNING, "consolidated metadata differ from the arrays' own", "consolidate again"),
    "no-checksum": (NOTE, "a shard cannot be held against a checksum", "add checksums to metadata.json"),
    "reader-warning": (WARNING, "something that a reader should know", "see the message"),
    "layout": (NOTE, "an unusual layout, which is read", "nothing needs to be done"),
    # Where rows lie.
    "header": (ERROR, "a safetensors header breaks a rule", "copy the file again, or write the dataset again"),
    "tensor": (ERROR, "a tensor is missing or has another shape", "write the dataset again"),
    "address-out-of-range": (ERROR, "an address points outside its shard", "write the index again"),
    "address-overlap": (ERROR, "two examples or tokens share a row", "write the index again"),
    "last-token-address": (ERROR, "the last token's two addresses differ", "write the index again"),
    "unaddressed-rows": (
        WARNING,
        "rows that nothing points to",
        "write the index again; an off-by-one may have moved it",
    ),
    "token-count": (ERROR, "token lists and token count differ", "write the index again"),
    "zero-token-example": (
        WARNING,
        "an example has no tokens, but a last token's address",
        "expect a row that means nothing",
    ),
    "duplicate-text": (
        WARNING,
        "prompts share a text: lmprobe, which finds rows by text, reads the same rows for all of them",
        "read it with actshard or by the index's addresses, or write it again with a text for each prompt",
    ),
    "column-type": (WARNING, "a column has a type that its values do not", "cast it when reading"),
    "chunk-size": (ERROR, "a chunk file has another size than its chunk", "write the sample again"),
    "chunk-missing": (
        WARNING,
        "a chunk of stored tokens is missing: it reads as the fill value",
        "find out whether it was written",
    ),
    "length-too-long": (WARNING, "a length exceeds the array: the sample was cut", "expect cut samples"),
    "duplicate-sample": (ERROR, "a sample number or line is there twice", "merge again, or give samples other numbers"),
    # Pickles.
    "checksum": (ERROR, "a file is not what its checksum says", "copy it again"),
    "size-bytes": (ERROR, "a file has another size than metadata.json says", "copy it again"),
    "gzip": (ERROR, "a compressed file is broken", "copy it again"),
    "unsafe-pickle": (
        ERROR,
        "a pickle would import or call something; nothing of it was done",
        "do not load it with pickle",
    ),
    # Token caches.
    "leftover": (NOTE, "something that a build left behind, which readers ignore", "remove it, if nobody builds"),
    "token-range": (ERROR, "token ids that the tokenizer does not have", "build the cache again with that tokenizer"),
    "mask-value": (ERROR, "an assistant mask that is neither 0 nor 1", "build the cache again"),
    "row-lengths-differ": (WARNING, "rows that are longer in one field than in another", "check how they were made"),
    # Values.
    "nan": (ERROR, "values that are no number", "leave these examples out, or extract them again"),
    "infinite": (ERROR, "infinite values", "leave these examples out; float16 overflows at 65,504"),
    "zero-row": (WARNING, "rows of zeros", "check that they were written, and are not padding"),
    "constant-row": (WARNING, "rows of one value", "check how they were made"),
    "dead-dimension": (WARNING, "columns that are zero in every row", "check the hook they were taken from"),
    "constant-dimension": (WARNING, "columns that never change", "check the hook they were taken from"),
    "duplicate-example": (WARNING, "examples whose rows are the same", "check for repeated inputs"),
    "mixed-dtypes": (NOTE, "examples are stored as several types", "read or convert it with dtype="),
    "wide-dtype": (NOTE, "every value is exactly of a narrower type", "convert with dtype= and save the space"),
}
"""Code: severity, what it means, what to do. Codes are added, never renamed."""

_BY_KIND = {
    "not_found": "missing-file",
    "access": "unreadable",
    "not_a_file": "not-a-file",
    "truncated": "truncated",
    "header": "header",
    "unsafe_pickle": "unsafe-pickle",
    "unsupported": "unsupported",
    "dtype": "unsupported",
    "unfinished": "unfinished",
    "unknown_format": "unknown-format",
    "missing_extra": "unsupported",
    "no_memory": "unreadable",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, odd or worth knowing.

    Attributes:
        code: stable; :data:`CODES` tells its severity and what to do.
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        path: the file.
        place: where in it: a field, a line, a byte, an example; or None.
        expected: what should be there.
        found: what is.
        remedy: what to do.
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
        said = f"expected {self.expected}, found {self.found}" if self.expected else self.found
        return f"{self.severity} [{self.code}] {where}{said}; {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"path": str(self.path)}


@dataclass
class Report:
    """What was found in a dataset: everything, not the first thing only."""

    path: Path
    format: str | None
    deep: bool
    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    """How much was looked at: files, examples, rows, bytes."""
    _seen: set[Finding] = field(default_factory=set, init=False, repr=False, compare=False)
    _wrong: set[tuple[Path, str]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Codes and messages of errors by file: what :meth:`error` does not note twice."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong: there may be warnings and notes."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """What is wrong."""
        return [f for f in self.findings if f.severity == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """What is odd."""
        return [f for f in self.findings if f.severity == WARNING]

    @property
    def status(self) -> int:
        """The command's exit status: 0 nothing wrong, 1 warnings, 2 errors."""
        return 2 if self.errors else 1 if self.warnings else 0

    def codes(self) -> set[str]:
        """Codes of all findings."""
        return {f.code for f in self.findings}

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "path": str(self.path),
            "format": self.format,
            "deep": self.deep,
            "ok": self.ok,
            "status": self.status,
            "checked": self.checked,
            "findings": [f.as_dict() for f in self.findings],
        }

    def add(self, code: str, path: Path, found: Any, expected: str = "", place: str | None = None) -> None:
        """Notes a finding."""
        severity, _, remedy = CODES[code]
        text = found if isinstance(found, str) else show(found)
        made = Finding(code, severity, path, place, expected, text, remedy)
        if made not in self._seen:
            self._seen.add(made)
            self.findings.append(made)
            if severity == ERROR:
                self._wrong |= {(path, code), (path, text)}

    def count(self, what: str, n: int = 1) -> None:
        """Notes how much was looked at."""
        self.checked[what] = self.checked.get(what, 0) + n

    def error(self, error: ActshardError, path: Path, code: str | None = None) -> None:
        """Notes an exception as a finding, unless its file has been found wrong in the same way."""
        code = code or _code_of(error)
        where = error.path or path
        place = None if error.offset is None else f"byte {error.offset}"
        if (where, code) in self._wrong or (where, error.detail) in self._wrong:
            return
        self.add(code, where, error.detail, place=place)

    @contextmanager
    def noting(self, path: Path, code: str | None = None) -> Iterator[None]:
        """Notes what goes wrong inside, and goes on after it."""
        try:
            with boundary(path, "check"):
                yield
        except ActshardError as error:
            self.error(error, path, code)

    def field(self, path: Path, read: Callable[[], Any]) -> Any:
        """A field's value; None, and a finding, if it is not what it should be."""
        try:
            with boundary(path, "check"):
                return read()
        except ActshardError as error:
            self.error(error, path, "metadata")
            return None


def _code_of(error: ActshardError) -> str:
    if error.kind in _BY_KIND:
        if error.kind == "truncated" and "empty file" in error.detail:
            return "empty-file"
        return _BY_KIND[error.kind]
    detail = error.detail
    if "field '" in detail:
        return "metadata"
    if detail.startswith("column"):  # a column that is there twice is no duplicate sample
        return "format"
    if "sha256" in detail:
        return "checksum"
    if "size_bytes" in detail:
        return "size-bytes"
    if "gzip" in detail or "inflate" in detail:
        return "gzip"
    if "samples, metadata.json says" in detail:
        return "count-claim"
    if "unique" in detail or " twice" in detail or "both are of sample" in detail or "both say" in detail:
        return "duplicate-sample"
    return "format"
