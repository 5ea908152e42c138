"""``Contents``: an opened dataset, as a format passes it to the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base import _arguments
from actshard.base.codes import Remark
from actshard.base.errors import ActshardError, FileAccessError, FormatError, MissingFileError, UnsupportedError
from actshard.base.layers import Layer
from actshard.base.location import Location, network_io

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import pyarrow as pa

    from actshard.reading.chosen import Chosen


@dataclass(frozen=True)
class Options:
    """Options of reading, with defaults resolved."""

    io: str
    """``"mmap"`` or ``"pread"``."""
    decoded_memory: int = 1 << 30
    """Size of the cache of decoded data, in bytes."""
    checksums: bool = True
    """Whether to verify files against the checksums listed in the dataset."""
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None
    """A description of the folder's files, for formats that need one: a path, TOML text or a dict."""

    keep: bool = False
    """Whether the index of a folder with many files may be stored in the user's cache folder, and read from it."""

    skip_incomplete: bool = False
    """Whether examples whose files are missing, unfinished or damaged have no tokens, instead of an error when they are read."""

    @classmethod
    def of(cls, path: Path | Location) -> Options:
        """Defaults. The path's file system determines ``io``."""
        return cls(network_io(path))


class LayoutText(str):
    """The text of a ``layout=`` file. Opening reads the file once: workers and plans use this text, also if the file has changed.

    Attributes:
        path: the file, for messages.
    """

    path: Path

    @classmethod
    def of(cls, text: str, path: Path) -> LayoutText:
        """The text of a file."""
        layout_text = cls(text)
        layout_text.path = path
        return layout_text


@dataclass(frozen=True)
class Evidence:
    """Whether a path looks like a dataset of a format, and why.

    If no format recognizes the path, the error contains the evidence of the formats that are near.

    Attributes:
        matches: whether the path is a dataset of the format.
        looked_for: what the format recognizes its datasets by.
        found: what is there instead, or that it is there.
        near: for a path that does not match: whether some of the format's files are there.
        marked: for a path that matches: whether the writer's mark is in a file, which outranks what other formats find in
            the contents.
        denied: the error of a file or folder that may not be read.
    """

    matches: bool
    looked_for: str
    found: str
    near: bool = False
    marked: bool = False
    denied: FileAccessError | None = None


@dataclass(frozen=True, eq=False)
class Absence:
    """What ``Options.skip_incomplete`` leaves out: examples that are missing, unfinished or damaged.

    They keep their numbers and have no tokens, and so have the others.

    Attributes:
        examples: a flag per example; empty if none is left out.
        files: the files that are missing or not whole.
        after: what is left out after the last example, whose number is unknown; empty: nothing.
        reasons: what is wrong with the files.
    """

    examples: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    files: tuple[Path, ...] = ()
    after: str = ""
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.files or self.after or self.examples.any())

    def remarks(self) -> list[Remark]:
        """A warning that counts the examples; none without any."""
        texts = [self.after] if self.after else []
        if count := int(self.examples.sum()):
            verb = "is" if count == 1 else "are"
            text = f"{count:,} of {len(self.examples):,} examples {verb} left out: missing, unfinished or damaged; they have a "
            texts.append(f"{text}number, and no tokens")
        if texts and self.reasons:
            more = "; ..." if len(self.reasons) > _SHOWN else ""
            texts[-1] += f" ({'; '.join(self.reasons[:_SHOWN])}{more})"
        return [Remark("examples-left-out", text) for text in texts]


NOTHING_ABSENT = Absence()
_SHOWN = 5
"""Reasons that a warning names."""


@dataclass(frozen=True)
class Logits:
    """Top-k logits: values and indices, both addressed by (0, example)."""

    values: Rows
    indices: Rows


@dataclass(frozen=True)
class Router:
    """Router logits of mixture-of-experts layers, addressed by (position in ``layers``, example)."""

    layers: tuple[Layer, ...]
    rows: Rows


@dataclass(frozen=True)
class Contents:
    """A dataset's checked metadata, and readers of its rows. No row has been read yet."""

    format: str
    path: Path
    metadata: dict[str, Any]
    layers: tuple[Layer, ...]
    """Names in stored order: all integers or all strings."""
    d_model: int
    dtype: np.dtype[np.generic]
    num_examples: int
    token_counts: Callable[[], NDArray[np.int64]]
    """Returns tokens stored per example, (n,) int64. Called once, when first needed."""
    rows: Rows | None
    """Addressed by (position in ``layers``, example, token). None for a dataset without hidden states."""
    column_names: Sequence[str]
    """Columns of the table; expensive ones are left out."""
    columns: Callable[[Sequence[str]], pa.Table]
    """Reads columns by name, including columns that ``column_names`` omits."""
    files: Callable[[], list[Path]]
    """Lists all files that contain rows. The list may be long, and files may be missing."""
    absence: Absence = NOTHING_ABSENT
    """What ``Options.skip_incomplete`` leaves out."""
    model: str | None = None
    provenance: dict[str, object] = field(default_factory=dict)
    store_metadata: Callable[[], Sequence[tuple[str, dict[str, object]]]] = lambda: ()
    """Name and metadata of each store of which the dataset consists; the first one's are the dataset's. Empty: of one store."""
    extras: tuple[str, ...] = ()
    """Names of other stored data: patch labels, logits, router tensors."""
    warnings: tuple[str, ...] = ()
    """Warnings of the reader. :func:`actshard.verify` reports warnings that are not a :class:`Remark` as ``reader-warning``."""
    tokens_each: int | None = None
    """Number of tokens per example if it is constant, so that no list of counts is needed; else None."""
    content_lengths: Callable[[], NDArray[np.int64] | None] = lambda: None
    """Returns content tokens per example, where examples are padded; None: no padding."""
    special_tokens: int = 0
    """Number of special tokens at the start of every example, such as saev's CLS."""
    counts_are_cheap: bool = True
    """Whether ``token_counts`` is available without reading the whole dataset."""
    units: tuple[int, ...] | None = None
    """Boundaries of the units of examples that are decoded together, from 0 to ``num_examples``. None: each example can be
    read by itself."""
    unit_columns: Callable[[int], pa.Table] | None = None
    """Reads columns of one unit while it is cached; with ``layers_differ``, column ``layers`` lists each example's layers."""
    head_columns: Callable[[Sequence[str], int], pa.Table] | None = None
    """Reads columns of the first n examples, from as few files as possible; None: ``columns`` is as cheap.

    Types are inferred from these examples: a column can have type null here and contain strings later."""
    column_batches: Callable[[Sequence[str]], Iterator[pa.Table]] | None = None
    """Reads columns of all examples in order, in batches; None if the format can only read whole columns."""
    example_columns: Callable[[Sequence[str], NDArray[np.int64]], pa.Table] | None = None
    """Reads columns of only these examples, in this order; None if the format can only read whole columns."""
    token_columns: tuple[str, ...] = ()
    """Columns of lists with one value per stored token, such as token ids and masks."""
    layers_differ: bool = False
    """Whether an example may have different tokens in different layers, or lack a layer."""
    lacks_layers: bool = False
    """Whether some examples are known to lack a layer."""
    one_row_each: bool | None = None
    """Whether every example has exactly one row, if the metadata declare it; None: see ``token_counts``."""
    folders: tuple[Path, ...] = ()
    """The dataset's folders, if there are several; ``path`` then contains them, and may contain other files. Empty: ``path``."""
    columns_in: Callable[[], Sequence[Path]] = lambda: ()
    """Files with columns or metadata, and folders of such files, other than ``folders``. Plans check that they are unchanged."""
    types_may_differ: bool = False
    """Whether rows may be stored in several float dtypes, of which ``dtype`` is the first. Reading these requires ``dtype=``, or
    ``converts``."""
    without_padding: str = ""
    """How the format stores the rows without padding, for messages; empty: it has none, or cannot."""
    has_logits: bool = False
    router_layers: tuple[Layer, ...] = ()
    labels: Callable[[], NDArray[np.uint8] | None] = lambda: None
    logits: Callable[[], Logits | None] = lambda: None
    router: Callable[[], Router | None] = lambda: None
    whole: Contents | None = None
    """The whole dataset, if these contents are a selection of its examples."""
    unextended: Contents | None = None
    """The contents without the columns that were added to the dataset later; None: none were."""
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None
    """The ``layout=`` argument. It decides which values the files contain. Set when the dataset is opened."""
    chosen: Chosen | None = None
    """The selected examples, as numbers in ``whole``."""
    parts: tuple[Any, ...] = ()
    """The stores that this one concatenates, in order, or pairs. Each is a ``Readable``, a type that this module cannot import."""
    paired: bool = False
    """Whether all parts have the same examples, in separate layers, and the columns are those of the first part."""
    converts: bool = False
    """Whether reads convert rows to ``dtype``, which may be narrower than the stored one."""

    @property
    def reads_convert(self) -> bool:
        """Whether reads of this dataset, or of some of its parts, convert rows to their ``dtype``."""
        return self.converts or any(part.contents.reads_convert for part in self.parts)

    @property
    def joined(self) -> tuple[Any, ...]:
        """The parts, if their examples follow one another."""
        return () if self.paired else self.parts


# Examples that ``incomplete="skip"`` leaves out: they keep their numbers, and have no tokens in any layer.
#
# A format finds the examples whose files are missing or too short, as flags, and builds the rows of its files as usual.
# :func:`leave_out` then places examples without tokens between runs of whole ones.


OF_A_FILE = (FormatError, MissingFileError, UnsupportedError)
"""Errors of a file that is not whole, or not of the dataset. Others, such as a refusal, may have another answer next time."""
_MOST_RUNS = 65_536
"""Maximum number of runs of whole examples: each is a part of the joined rows."""


_MOST_EXAMPLES = 1 << 32
"""Maximum number of examples: each takes a byte while a dataset is opened."""


def none_whole(count: int, path: Location) -> NDArray[np.bool_]:
    """A flag per example, all set.

    Raises:
        FormatError: too many examples.
    """
    if count > _MOST_EXAMPLES:
        raise FormatError(f"incomplete: expected at most {_MOST_EXAMPLES:,} examples, found {count:,}", path=path)
    return np.ones(count, np.bool_)


def size_of_file(path: Location) -> int:
    """The size of a regular file; -1 if it is missing or cannot be read."""
    try:
        stat = path.found()
    except ActshardError:
        return -1
    return stat.size if stat is not None and stat.kind == "file" else -1


def leave_out(
    rows: Rows, absent: NDArray[np.bool_], num_layers: int, path: Location, *, are_dense: bool = False
) -> Rows:
    """Returns the rows of all examples, of which those with a flag have no tokens.

    Args:
        rows: the rows of the files.
        absent: a flag per example.
        num_layers: layers of ``rows``.
        path: the dataset, for messages.
        are_dense: whether ``rows`` contain only the other examples.

    Raises:
        FormatError: no example is whole, or there are too many runs of whole examples.
    """
    if not absent.any():
        return rows
    if absent.all():
        raise FormatError(f"expected at least one whole example, found none of {len(absent):,}", path=path)
    edges = [0, *(np.flatnonzero(np.diff(absent)) + 1).tolist(), len(absent)]
    if len(edges) > _MOST_RUNS:
        raise FormatError(f"expected at most {_MOST_RUNS:,} runs of whole examples, found {len(edges):,}", path=path)
    name, parts, shifts, before = _arguments.name_of(rows.descr), list[Rows](), list[int](), 0
    for first, last in itertools.pairwise(edges):
        count = last - first
        shifts.append(first if absent[first] else first - before if are_dense else 0)
        if absent[first]:
            parts.append(
                Rows.joined(
                    [],
                    (count, 0),
                    void=[],
                    num_groups=num_layers,
                    width=rows.width,
                    dtype=name,
                    descr=rows.descr,
                    io=rows.io,
                )
            )
        else:
            parts.append(rows.choose((before if are_dense else first, 1, count)))
            before += count
    return Rows.several(parts, [list(range(num_layers))] * len(parts), None, rows.descr, rows.io, shifts)
