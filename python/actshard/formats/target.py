"""What a format has to say about being written: the one interface between the writer and the formats."""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._arguments import NUMPY_BY_NAME, name_of
from actshard.errors import ArgumentError, DtypeError, ExistsError, FormatError
from actshard.work import FOLDER, PARTS

if TYPE_CHECKING:
    import pyarrow as pa

PATCH_LABELS = "patch_labels"
LOGITS = ("logits_values", "logits_indices")
ROUTER = "router_layer_"
"""Columns that hold arrays, by the names under which formats without a place of their own for them keep them."""
PREVIEW = "text_preview"
"""A column with the beginning of an example's text."""
TEXTS = ("text", "prompt", PREVIEW)
"""What formats call an example's text: lmprobe, Zarr stores, pickle shards."""
FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Spec:
    """What a dataset to be made is, whatever its format."""

    path: Path
    layers: tuple[int, ...]
    d_model: int
    dtype: np.dtype[Any] | None
    """None: that of what is appended first."""
    metadata: dict[str, Any]
    num_examples: int | None
    tokens: int | None
    """Tokens of every example, for a format that has as many of each."""
    shard_bytes: int | None
    part: tuple[int, int] | None
    options: dict[str, Any] = field(default_factory=dict)
    """The format's own."""


@dataclass(frozen=True)
class Block:
    """Examples in memory: of each, layer after layer, the rows of its tokens."""

    memory: NDArray[Any]
    """``(rows, d_model)``, C-contiguous, of the dataset's type."""
    lengths: NDArray[np.int64]
    """``(n, layers)``: tokens; -1 where an example lacks a layer."""
    columns: pa.Table | None = None
    """What else is known of the examples; arrays of numbers as fixed-size lists."""
    own: NDArray[np.int64] | None = None
    """``(n,)``: tokens of each before it was filled up, for a format that has as many of each; None: as many as are stored."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """``(n, layers)``: the first row of each example and layer."""
        ends = np.cumsum(np.maximum(self.lengths, 0).reshape(-1))
        return np.concatenate([[0], ends[:-1]]).reshape(self.lengths.shape).astype(np.int64)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The memory as bytes."""
        return self.memory.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class AllExamples:
    """What is known of all examples when the last is written."""

    lengths: NDArray[np.int64]
    """``(n, layers)``."""
    columns: pa.Table | None

    def __len__(self) -> int:
        return len(self.lengths)


class Target(ABC):
    """A dataset of one format while it is written.

    Calls come in this order: :meth:`restore` and :meth:`forget` if it was begun before; then :meth:`settle` and :meth:`write` any
    number of times, and now and then :meth:`dirty`, a sync of what that names and of the folders it is in, :meth:`committed`; at
    last :meth:`finish`. All from one thread. What is checked is checked by the thread that appends, before anything is kept.
    """

    format: ClassVar[str]
    own: ClassVar[Mapping[str, str]]
    """The format's own options, each with what it means."""
    metadata_keys: ClassVar[tuple[str, ...] | None] = None
    """Metadata that the format takes; None: any."""
    block_bytes: int = 32 << 20
    """Memory that is handed over at once."""
    ragged = True
    """Whether examples may differ in their tokens."""
    holds_columns = True
    unique: ClassVar[str | None] = None
    """A column of integers of which no two examples may have the same."""
    decides: ClassVar[tuple[str, ...]] = ("dtype",)
    """Attributes that the first examples decide where nothing was asked for."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names that it makes in the folder of the dataset: nothing else there is ours to remove."""
    names_itself = False
    """Whether the finished dataset's folder is named by the format, below the path that is asked for."""
    holds_special_tokens = False
    """Whether the metadata can mark tokens that stand for no content, such as CLS."""
    holds_partial_layers = False
    """Whether an example may lack a layer, or have other tokens in one layer than in another."""
    holds_labels = False
    """Whether patch labels have a place of their own."""
    holds_logits = False
    """Whether top-k logits and router logits have places of their own, rather than columns."""
    keeps_lengths = False
    """Whether lengths of examples before padding are stored beside the rows."""
    finds_by_text = False
    """Whether the format's own reader addresses examples by their text, so that every example needs a text of its own."""
    takes_shard_bytes = True
    """Whether ``shard_bytes`` applies."""
    text_column: ClassVar[str | None] = None
    """The format's name of an example's text."""
    empty_examples: ClassVar[str | None] = None
    """What happens to an example without tokens, if it cannot be stored as such."""
    keeping_all: ClassVar[str | None] = None
    """The option that keeps all tokens, for a format that keeps one row of each example by default or on demand."""

    content_lengths: Callable[[], NDArray[np.int64]] | None = None
    """Tokens of each example before shorter ones were filled up, for a format that has as many of each; None: none was."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        unknown = sorted(set(spec.options) - set(self.own))
        if unknown:
            known = "; ".join(f"{name}: {what}" for name, what in self.own.items()) or "none"
            raise ArgumentError(f"{unknown[0]!r} is no option of {self.format}; its own are {known}")
        if self.metadata_keys is not None:
            other = sorted(set(spec.metadata) - set(self.metadata_keys))
            if other:
                raise ArgumentError(
                    f"metadata: {self.format} has no field {other[0]!r}, and its own system refuses unknown ones; "
                    f"fields are {', '.join(self.metadata_keys)}"
                )
        self.dtype: np.dtype[Any] | None = spec.dtype
        if spec.dtype is not None:
            self.check_dtype(spec.dtype)
        self.root = spec.path
        self.more_config: dict[str, Any] = {}
        """What else a resumed writer has to agree with: a conversion's source."""
        self.n = 0
        """Examples written."""

    @classmethod
    def conversion_options(
        cls, own: Mapping[str, Any], asked: Mapping[str, Any], tokens: str, pooled: Callable[[], bool]
    ) -> dict[str, Any]:
        """Options of a conversion.

        Args:
            own: options of this format that the source's metadata imply.
            asked: the user's, which win.
            tokens: which tokens are converted: ``"all"``, ``"content"`` or ``"last"``.
            pooled: whether every example of the source has one row.
        """
        return {**own, **asked}

    @property
    def special_tokens(self) -> int:
        """Tokens at the front of every example that the dataset marks as no content."""
        return 0

    # -- what is asked before anything is written -------------------------------------------------------------------

    @abstractmethod
    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raises DtypeError for a type that the format cannot hold."""

    def take_dtype(self, found: np.dtype[Any]) -> np.dtype[Any]:
        """The type that rows are written as, if none was asked for and these are the first."""
        if self.dtype is None:
            self.check_dtype(found)
            self.dtype = found
        elif self.dtype != found and self.spec.dtype is None:
            raise DtypeError(
                f"expected {self.dtype}, as everything before, found {found}; dtype={str(self.dtype)!r} to create() converts"
            )
        return self.dtype

    def take_tokens(self, found: int) -> None:  # noqa: B027 -- formats whose examples differ have nothing to decide
        """How many tokens the first example has, for a format that has as many of each."""

    @property
    def tokens(self) -> int | None:
        """Tokens of every example, once it is decided; None where they may differ."""
        return None

    @property
    def most_tokens(self) -> tuple[int, str] | None:
        """The most tokens that an example may have, where they differ, and what says so; None: any number."""
        return None

    def check_columns(self, schema: pa.Schema) -> None:  # noqa: B027 -- a format may hold any
        """Raises for columns that the format cannot hold, by their names and types.

        Called with the columns of the first examples, and again when one is new or its type was open. A conversion calls it
        with the columns of its source, before anything is written.

        Raises:
            ArgumentError: a name that the format uses itself, or a type that it has no place for.
            NotStoredError: the format holds no columns.
        """

    def turned(self, schema: pa.Schema) -> dict[str, str]:
        """Columns that a conversion has to turn into another type, each with what becomes of it; :meth:`turn` does it.

        What is appended is never turned: :meth:`check_columns` refuses it.
        """
        return {}

    def turn(self, table: pa.Table) -> pa.Table:
        """The same columns with those of :meth:`turned` as the format holds them."""
        return table

    def check_values(self, table: pa.Table, first: int) -> None:  # noqa: B027 -- a format may hold any
        """Raises ArgumentError for values that the format cannot hold, of examples that begin with number ``first``."""

    def check_count(self, n: int, columns: Sequence[str]) -> None:  # noqa: B027 -- a format may hold any
        """Raises ArgumentError if the format cannot hold n examples with columns of these names."""

    def settle(self, block: Block) -> None:  # noqa: B027 -- most formats have nothing left to decide
        """Decides what is still open, from the first block: the journal, written next, has to know everything."""

    def config(self) -> dict[str, Any]:
        """What a resumed writer has to agree with; None in it is not decided yet."""
        return {
            "format": self.format,
            "layers": list(self.spec.layers),
            "d_model": self.spec.d_model,
            "dtype": None if self.dtype is None else name_of(self.dtype),
            "metadata": self.spec.metadata,
            "part": None if self.spec.part is None else list(self.spec.part),
            **self.more_config,
        }

    def adopt(self, config: dict[str, Any]) -> None:
        """Takes over what an earlier writer had decided."""
        if config.get("dtype") is not None:
            self.dtype = NUMPY_BY_NAME[config["dtype"]]

    def existing(self, n: int | None) -> Path | None:
        """A finished dataset of this configuration and n examples, where that can be known before it is opened."""
        return None

    def alike(self) -> Path | None:
        """The finished dataset that differs from this configuration at most in how many examples it has; None if there is not one.

        What a writer left that was killed between its last step and the news of it, where the number decides the name.
        """
        return None

    # -- writing ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        """Goes on after commits with these states and examples of these lengths."""

    def forget(self, lengths: NDArray[np.int64]) -> None:  # noqa: B027 -- some formats write whole files only
        """Removes what files hold beyond examples of these lengths, perhaps none: it was written and never counted."""

    @abstractmethod
    def write(self, block: Block) -> None:
        """Brings examples into files."""

    @abstractmethod
    def dirty(self) -> tuple[list[Path], dict[str, Any]]:
        """Files to bring to the disk before what was written may be counted, and what to note in the journal."""

    def committed(self) -> None:  # noqa: B027 -- some formats name files at the end only
        """The files are on the disk: those that are complete get their names."""

    @abstractmethod
    def finish(self, examples: AllExamples) -> None:
        """Completes the files and writes the manifest, last. May be called again after a crash."""

    def place(self) -> Path:
        """Where the finished dataset belongs; the folder is renamed if that is not where it was written."""
        return self.root

    @abstractmethod
    def estimate(self, tokens: NDArray[np.int64], *, has_labels: bool) -> tuple[int, int, int]:
        """Shards, files and bytes of examples of so many tokens each: what will be written, before compression."""

    # -- for formats -----------------------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        assert self.dtype is not None
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.spec.d_model * self.itemsize

    def put(
        self,
        sources: Sequence[NDArray[np.uint8]],
        files: Sequence[tuple[Path, int]],
        pieces: NDArray[np.int64] | Sequence[tuple[int, int, int, int, int]],
    ) -> None:
        """Writes pieces ``(source, first byte, bytes, file, offset)``; files grow to at least the size given."""
        table = np.ascontiguousarray(pieces, np.int64).reshape(-1, 5)
        _native.write_pieces(list(sources), list(files), table, direct=not _native.is_network(self.root))


def positive(options: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """An option that is a positive integer."""
    value = options.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ArgumentError(f"{name}: expected a positive integer, found {value!r}")
    return int(value)


def flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    """An option that is true or false."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}: expected True or False, found {value!r}")
    return value


def only(dtype: np.dtype[Any], names: Sequence[str], format: str, why: str) -> None:
    """Raises DtypeError unless a format holds this type."""
    name = name_of(dtype)
    if name not in names:
        held = " or ".join(str(NUMPY_BY_NAME[n]) for n in names)
        raise DtypeError(f"{format} holds {held}, not {dtype}{why}; dtype='{NUMPY_BY_NAME[names[-1]]}' converts")


def values_of(name: str, column: Any, first: int) -> list[Any]:
    """A column as Python's values.

    Raises:
        ArgumentError: dates and times that Python does not have.
    """
    import pyarrow as pa

    try:
        made: list[Any] = column.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError, ImportError) as error:
        raise ArgumentError(
            f"columns: {name!r}, from example {first}: {column.type} values that Python cannot tell: {error}"
        ) from error
    return made


def check_times(table: pa.Table, first: int) -> None:
    """Raises ArgumentError for times that cannot be written as text or as Python's values: nanoseconds, years beyond 9999."""
    import pyarrow as pa

    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if _has(kind, pa.types.is_temporal):
            values_of(name, table[name], first)


def _has(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    return wanted(kind) or any(_has(kind.field(i).type, wanted) for i in range(kind.num_fields))


def array_of(column: pa.ChunkedArray | pa.Array, dtype: str | None = None) -> NDArray[Any]:
    """A column of fixed-size lists as ``(n, k)``, a column of numbers as ``(n,)``."""
    import pyarrow as pa

    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(flat, pa.ChunkedArray):
        flat = pa.concat_arrays(flat.chunks)
    if pa.types.is_fixed_size_list(flat.type):
        width = flat.type.list_size
        made: NDArray[Any] = flat.flatten().to_numpy(zero_copy_only=False).reshape(len(flat), width)
    else:
        made = flat.to_numpy(zero_copy_only=False)
    return made.view(NUMPY_BY_NAME[dtype]) if dtype is not None else made


def arrays_in(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of :func:`list_column` as ``(n, k)`` of the type it had."""
    said = (table.schema.field(name).metadata or {}).get(b"dtype")
    column = table[name]
    if column.null_count:
        raise ArgumentError(f"{name}: expected for all examples or for none, found {column.null_count} without")
    return array_of(column, None if said is None else said.decode())


def list_column(name: str, values: NDArray[Any]) -> tuple[pa.Field, pa.Array]:
    """``(n, k)`` numbers as a column of fixed-size lists; a type that arrow does not have is named in the field."""
    import pyarrow as pa

    metadata = None
    if values.dtype.kind not in "biuf":
        metadata = {"dtype": name_of(values.dtype)}
        values = values.view(f"u{values.dtype.itemsize}")
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.field(name, column.type, metadata=metadata), column


def uniform(lengths: NDArray[np.int64], format: str, layers: Sequence[int]) -> NDArray[np.int64]:
    """Tokens per example, of a format whose layers have all the same tokens."""
    first = lengths[:, 0]
    if (lengths != first[:, None]).any() or (first < 0).any():
        bad = int(np.flatnonzero((lengths != first[:, None]).any(axis=1) | (first < 0))[0])
        raise FormatError(
            f"example {bad} has {dict(zip(layers, np.maximum(lengths[bad], 0).tolist(), strict=True))} tokens by layer: {format} "
            "keeps all layers alike; leave out layers or examples (layers=, examples=)"
        )
    return first


def refuse_parts(path: Path) -> None:
    """Raises ExistsError for a folder with parts of a dataset, which belongs to the dataset that they will be merged into."""
    if os.path.lexists(path / PARTS):
        raise ExistsError(
            "holds parts of a dataset: merge makes one dataset of them; choose another folder for this one", path=path
        )


def refuse_in_the_way(path: Path, makes: Iterable[str]) -> None:
    """Raises ExistsError if a folder holds what a merge of its parts would make, by the patterns of their names."""
    if not path.is_dir():
        return
    wanted = list(makes)
    found = sorted(p.name for p in path.iterdir() if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in wanted))
    if found:
        shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        raise ExistsError(f"expected parts alone, found {shown}, which merging them makes: move it away", path=path)


def refuse_existing(path: Path) -> None:
    """Raises ExistsError unless a folder is empty or not there."""
    if path.is_dir():
        found = sorted(p.name for p in path.iterdir() if p.name not in (FOLDER, PARTS))
        if found:
            shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
            raise ExistsError(f"expected no folder or an empty one, found {shown}", path=path)
    elif path.exists() or path.is_symlink():
        raise ExistsError("expected a folder or nothing, found a file", path=path)
