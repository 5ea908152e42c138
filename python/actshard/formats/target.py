"""``Target``: the interface between the writer and the formats."""

from __future__ import annotations

import fnmatch
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import NUMPY_BY_NAME, name_of
from actshard.base._json import MAX_INT
from actshard.base.codes import Remark
from actshard.base.errors import ArgumentError, DtypeError, ExistsError, FormatError, InternalError
from actshard.base.layers import Layer
from actshard.base.request import RECORD, Digests, Request
from actshard.base.work import FOLDER, PARTS, keep_request

if TYPE_CHECKING:
    import pyarrow as pa

PATCH_LABELS = "patch_labels"
LOGITS = ("logits_values", "logits_indices")
ROUTER = "router_layer_"
"""Column names of arrays, for formats that have no separate place for them."""
PREVIEW = "text_preview"
"""Column with the beginning of an example's text."""
LONGEST_PREVIEW = 200
"""Maximum number of characters of a preview, as specified."""
TEXTS = ("text", "prompt", PREVIEW)
"""Column names of an example's text: lmprobe, Zarr stores, pickle shards."""
OTHER_TEXT = {"text": "prompt", "prompt": "text"}
"""The names of a column of complete texts. The preview in pickle shards is not one of them."""
COMMON_OPTIONS = (
    "dtype",
    "metadata",
    "model",
    "num_examples",
    "tokens_per_example",
    "truncate",
    "overflow",
    "shard_bytes",
    "resume",
)
"""Arguments of every format, which a misspelt option may mean."""
FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Spec:
    """A dataset to write, independent of its format."""

    path: Path
    layers: tuple[Layer, ...]
    d_model: int
    dtype: np.dtype[np.generic] | None
    """None: the dtype of the first appended rows."""
    metadata: dict[str, object]
    num_examples: int | None
    tokens: int | None
    """Tokens per example, for formats where it is constant."""
    shard_bytes: int | None
    part: tuple[int, int] | None
    whole: int | None = None
    """For a part: number of examples of all parts, if known. ``num_examples`` is the number of this part."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options specific to the format."""
    created: int | None = None
    """Creation time to record, in seconds since 1970, for formats that record it; None: SOURCE_DATE_EPOCH, or now."""


@dataclass(frozen=True)
class Block:
    """Examples in memory. For each example and layer, the rows of its tokens are contiguous, in this order."""

    memory: NDArray[np.generic]
    """``(rows, d_model)``, C-contiguous, in the dataset's dtype."""
    lengths: NDArray[np.int64]
    """``(n, layers)``: number of tokens; -1 where an example lacks a layer."""
    columns: pa.Table | None = None
    """Columns of the examples; numeric arrays as fixed-size lists."""
    unpadded_lengths: NDArray[np.int64] | None = None
    """``(n,)``: number of tokens of each example before padding, for formats with a constant number; None: no padding."""
    overflows: int = 0
    """Number of values that are infinite here and finite in the source of a conversion."""
    digests: Digests | None = None
    """Digests of the rows, numbered in the dataset."""
    encoded: object = None
    """The rows as the target's :meth:`Target.encode` encoded them; None if it stores them as they are."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """``(n, layers)``: index of the first row of each example and layer."""
        ends = np.cumsum(np.maximum(self.lengths, 0).reshape(-1))
        return np.concatenate([[0], ends[:-1]]).reshape(self.lengths.shape).astype(np.int64)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return int(self.memory.shape[1]) * self.memory.itemsize

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The memory as bytes, a view."""
        return self.memory.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class AllExamples:
    """Lengths and columns of all examples, passed to :meth:`Target.finish`."""

    lengths: NDArray[np.int64]
    """``(n, layers)``."""
    columns: pa.Table | None

    def __len__(self) -> int:
        return len(self.lengths)


class Target(ABC):
    """Writes a dataset of one format.

    Call order: :meth:`restore` and :meth:`forget` to resume a dataset; then :meth:`settle` and :meth:`write`, any number of
    times. At intervals: :meth:`dirty`, a sync of the returned files and of their folders, :meth:`committed`. Finally
    :meth:`finish`. One thread makes all these calls. Checks run in the appending thread, before any data are buffered.
    """

    format: ClassVar[str]
    format_options: ClassVar[Mapping[str, str]]
    """The format's own options, each with a description."""
    forms: ClassVar[Mapping[str, Mapping[str, str | int]]] = {}
    """Ways to store rows that ``estimate`` compares with the default: a name, and the arguments of ``convert``."""
    metadata_keys: ClassVar[tuple[str, ...] | None] = None
    """Supported metadata fields; None: any."""
    block_bytes: int = 32 << 20
    """Size of a block passed to :meth:`write`."""
    ragged = True
    """Whether examples may have different numbers of tokens."""
    holds_columns = True
    only_columns: tuple[str, ...] | None = None
    """The columns that the format can store: a conversion drops others and reports them. None: any column."""
    needs_columns: ClassVar[tuple[str, ...]] = ()
    """Columns without which the format cannot be written."""
    unique: ClassVar[str | None] = None
    """An integer column whose values must be unique."""
    decides: ClassVar[tuple[str, ...]] = ("dtype",)
    """Attributes that the first examples determine unless they are given."""
    names_itself = False
    """Whether the format chooses the name of the dataset's folder, below the given path."""
    holds_special_tokens = False
    """Whether metadata can mark special tokens, such as CLS."""
    holds_partial_layers = False
    """Whether an example may lack a layer, or have different tokens in different layers."""
    holds_named_layers = False
    """Whether layer names may be strings; otherwise they are integers."""
    largest_layer: ClassVar[int] = MAX_INT - 1
    """The largest absolute value of a layer's integer name, which the format's reader shares."""
    numbers_layers = True
    """Whether readers of the format interpret integer layer names as the layers' numbers in the model."""
    holds_labels = False
    """Whether the format stores patch labels separately."""
    holds_metadata = True
    """Whether the format stores metadata: the user's, and those of a conversion's source."""
    holds_logits = False
    """Whether the format stores top-k logits and router logits separately, not as columns."""
    keeps_lengths = False
    """Whether the format stores lengths of examples before padding."""
    finds_by_text = False
    """Whether the format's own reader finds examples by text, so that texts must be unique."""
    reads_all_files: ClassVar[bool] = False
    """Whether the original reader reads every file in the folder, so that it may contain no others."""
    takes_shard_bytes = True
    """Whether ``shard_bytes`` applies."""
    text_column: ClassVar[str | None] = None
    """The format's column of an example's text."""
    empty_examples: ClassVar[str | None] = None
    """How the format treats examples without tokens, for messages; None: they are stored unchanged."""
    needs_tokens: ClassVar[bool] = False
    """Whether every example must have a token."""
    padding_note: ClassVar[str] = (
        "which {format} treats as content; actshard also stores their lengths and skips the zeros"
    )
    """How padding is treated, for the losses of a conversion to a format with a constant number of tokens."""
    keeping_all: ClassVar[str | None] = None
    """The option that keeps all tokens, for formats that can store a single row per example."""
    splits: ClassVar[Literal["examples", "layers"] | None] = None
    """How tasks of a plan divide the work: by ranges of examples, or by layers (formats with one file per layer). None: one task
    writes everything."""
    blocks_are_files: ClassVar[bool] = False
    """Whether the files depend on which examples share a block. Tasks then begin where the writer's blocks begin."""

    writes_parquet: ClassVar[bool] = False
    """Whether columns are written as Parquet, for predictions of memory."""

    content_lengths: Callable[[], NDArray[np.int64]] | None = None
    """Number of tokens of each example before padding, for formats with a constant number; None: no padding."""

    all_lengths: Callable[[], NDArray[np.int64]] | None = None
    """Returns the lengths ``(n, layers)`` of all examples, if they are known before the first block; else None."""

    copies: float = 0.0
    """Memory of :meth:`write` in addition to the block, in units of a block, for predictions."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        unknown = sorted(set(spec.options) - set(self.format_options))
        if unknown:
            options = "; ".join(f"{name}: {what}" for name, what in self.format_options.items()) or "none"
            near = get_close_matches(unknown[0], (*self.format_options, *COMMON_OPTIONS), 1)
            meant = f"; do you mean {near[0]!r}?" if near else ""
            raise ArgumentError(f"{unknown[0]!r} is not an option of {self.format}{meant}; options are {options}")
        large = next((x for x in spec.layers if isinstance(x, int) and abs(x) > self.largest_layer), None)
        if large is not None:
            raise ArgumentError(
                f"layers: expected integers from {-self.largest_layer} to {self.largest_layer} for {self.format}, found {large}; "
                f"choose another number: convert(layers={{{large}: 0, ...}})"
            )
        if self.metadata_keys is not None:
            unknown_fields = sorted(set(spec.metadata) - set(self.metadata_keys))
            if unknown_fields:
                raise ArgumentError(
                    f"metadata: {self.format} has no field {unknown_fields[0]!r}, and its original reader rejects unknown fields; "
                    f"expected one of {', '.join(self.metadata_keys)}"
                )
        self.dtype: np.dtype[np.generic] | None = spec.dtype
        if spec.dtype is not None:
            self.check_dtype(spec.dtype)
        self.root = spec.path
        self.request = Request("", {})
        """The request, which must be the same when a writer resumes or accepts a finished dataset."""
        self.n = 0
        """Number of examples written."""
        self.plan: Path | None = None
        """Working folder of the plan that writes this dataset. Writers refuse folders in which another plan writes a dataset."""
        self.apart: Apart | None = None
        """Set in a task of a plan, which writes some of the examples to separate files."""

    @classmethod
    def conversion_options(
        cls,
        source_options: Mapping[str, object],
        user_options: Mapping[str, object],
        tokens: str,
        pooled: Callable[[], bool],
    ) -> dict[str, object]:
        """Options of a conversion to this format.

        Args:
            source_options: options of this format implied by the source's metadata.
            user_options: the user's options, which take precedence.
            tokens: the tokens to convert: ``"all"``, ``"content"`` or ``"last"``.
            pooled: returns whether every example of the source has one row.
        """
        return {**source_options, **user_options}

    @property
    def special_tokens(self) -> int:
        """Number of special tokens at the start of every example."""
        return 0

    @property
    def reading(self) -> dict[Layer, Layer]:
        """The name under which each layer is read, in the finished dataset's order."""
        return {name: name for name in self.spec.layers}

    @property
    def reading_layout(self) -> dict[str, object] | None:
        """The ``layout=`` that opens the dataset with the names of :attr:`reading`, if its files do not record layer names."""
        return None

    # -- checks, before anything is written -------------------------------------------------------------------

    @abstractmethod
    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        """Raises DtypeError for an unsupported dtype."""

    def take_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """Returns the dtype to store. Without a given dtype, the first rows determine it."""
        if self.dtype is None:
            self.check_dtype(dtype)
            self.dtype = dtype
        elif self.dtype != dtype and self.spec.dtype is None:
            raise DtypeError(
                f"expected {self.dtype}, the dtype of earlier rows, found {dtype}; "
                f"pass dtype={str(self.dtype)!r} to create() to convert"
            )
        return self.dtype

    def take_tokens(self, tokens: int) -> None:  # noqa: B027 -- nothing to decide for ragged formats
        """Sets the number of tokens per example from the first example, for formats where it is constant."""

    @property
    def tokens(self) -> int | None:
        """Number of tokens per example once determined; None if examples may differ."""
        return None

    @property
    def most_tokens(self) -> tuple[int, str] | None:
        """The largest number of tokens per example and the reason for the limit, for ragged formats; None: no limit."""
        return None

    def check_columns(self, schema: pa.Schema) -> None:  # noqa: B027 -- a format may hold any
        """Raises for columns that the format cannot store, by name and type.

        Called with the columns of the first examples, and again when a column is new or gets a type. A conversion calls it with
        the source's columns before it writes anything.

        Raises:
            ArgumentError: a reserved name or an unsupported type.
            NotStoredError: the format stores no columns.
        """

    def turned(self, schema: pa.Schema) -> dict[str, str]:
        """Columns that a conversion must cast, each with the resulting type; :meth:`turn` casts them.

        Appended columns are never cast: :meth:`check_columns` rejects them.
        """
        return {}

    def turn(self, table: pa.Table) -> pa.Table:
        """Casts the columns listed by :meth:`turned`."""
        return table

    def check_values(self, table: pa.Table, first: int) -> None:  # noqa: B027 -- a format may hold any
        """Raises ArgumentError for unsupported values. ``first`` is the number of the table's first example."""

    def check_count(self, n: int, columns: Sequence[str]) -> None:  # noqa: B027 -- a format may hold any
        """Raises ArgumentError if the format cannot store n examples with these columns."""

    def settle(self, block: Block) -> None:  # noqa: B027 -- most formats have nothing left to decide
        """Determines all remaining settings from the first block, because the journal, written next, records them."""

    def advice(self, examples: int) -> Remark | None:
        """A warning about a dataset of so many examples, such as a large number of files; None without one."""
        return None

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        """Format-specific losses of a conversion, as (what, detail), such as layer names that the format does not record.

        ``columns`` are the written columns.
        """
        return []

    @property
    def surveys(self) -> bool:
        """Whether a setting depends on all rows, so that a conversion reads them once before it writes: see :meth:`survey`."""
        return False

    def survey(self, block: Block, first: int) -> None:  # noqa: B027 -- most formats have no such setting
        """Takes rows into account. ``first``: number of the block's first example. Raises DtypeError for rows that are refused."""

    def surveyed(self) -> None:  # noqa: B027 -- as above
        """Determines the setting, after the last block."""

    def encode(self, block: Block) -> Block:
        """The block with its encoded rows, if the format stores approximations. Called before it is read or written."""
        return block

    def as_read(self, block: Block) -> NDArray[np.generic]:
        """The rows of a block as the finished dataset returns them. They differ if the format stores approximations."""
        return block.memory

    def config(self) -> dict[str, object]:
        """Settings that must match when a writer resumes. None: not determined yet."""
        return {
            "format": self.format,
            "layers": list(self.spec.layers),
            "d_model": self.spec.d_model,
            "dtype": None if self.dtype is None else name_of(self.dtype),
            "metadata": self.spec.metadata,
            "part": None if self.spec.part is None else list(self.spec.part),
        }

    @property
    def column_options(self) -> dict[str, object]:
        """Options with which rows of one element can be written, to find out what becomes of columns."""
        return self.spec.options

    def adopt(self, config: dict[str, Any]) -> None:
        """Adopts the settings that an earlier writer determined."""
        if config.get("dtype") is not None:
            self.dtype = NUMPY_BY_NAME[config["dtype"]]

    def existing(self, n: int | None) -> Path | None:
        """Path of a finished dataset with this configuration and n examples, where the configuration determines it; else None."""
        return None

    def difference(self, path: Path) -> str | None:
        """Where the rows and labels written so far differ from those of a finished dataset, for a message; None: nowhere.

        For formats in which :meth:`existing` finds a dataset by its metadata, not by its path.
        """
        return None

    def alike(self) -> Path | None:
        """Path of the only finished dataset with this configuration and any number of examples; None if not exactly one.

        A writer leaves it if killed between its last step and the journal's record of it, in formats whose path depends on the
        number.
        """
        return None

    # -- writing ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def restore(self, states: Sequence[dict[str, object]], lengths: NDArray[np.int64]) -> None:
        """Resumes after commits with these states. ``lengths`` are those of the committed examples."""

    def forget(self, lengths: NDArray[np.int64]) -> None:  # noqa: B027 -- some formats write whole files only
        """Removes uncommitted data, written after the committed examples. ``lengths`` are those of the committed examples."""

    @abstractmethod
    def write(self, block: Block) -> None:
        """Writes a block of examples to files."""

    @abstractmethod
    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        """Returns files to sync before written examples count as committed, and the state to record in the journal."""

    def committed(self) -> None:  # noqa: B027 -- some formats rename files only at the end
        """Called after the sync: renames complete files to their final names."""

    @abstractmethod
    def finish(self, examples: AllExamples) -> None:
        """Completes the files and writes the manifest last. May be called again after a crash."""

    def place(self) -> Path:
        """Final path of the dataset. If it differs from where the dataset was written, the folder is renamed."""
        return self.root

    @abstractmethod
    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        """Shards, files and bytes that examples with these numbers of tokens will take, before compression."""

    def keep_request(self, examples: int, overflows: int | None, digests: Digests | None, files: Sequence[str]) -> None:
        """Records the request, in the dataset's folder or next to it, with the checksums of files (:attr:`Format.checked_files`).

        ``overflows``, ``digests``: see :class:`Request`.
        """
        counted = overflows if self.request.verb == "convert" else None
        if digests is not None and len(digests) != len(self.spec.layers):
            raise FormatError(
                f"digests of rows: expected {len(self.spec.layers)}, one per layer, found {len(digests)}",
                path=self.root,
            )
        if self.reading_layout is not None:
            digests = None  # without layout=, the layers are read as a single wide one
        elif digests is not None:  # in the order of the request's layers
            digests = tuple(digests[self.spec.layers.index(name)] for name in self.reading)
        request = self.request.finished(examples, counted, digests)
        keep_request(self.root, request, files, is_beside=self.reads_all_files)

    # -- in tasks of a plan ----------------------------------------------------------------------------------------

    def borders(self, lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Examples that begin a file, ascending from 0; None: every example may begin a task.

        A task that begins with such an example shares no large file with other tasks. ``lengths``: tokens ``(n, layers)`` of all
        examples.
        """
        return None

    @property
    def room(self) -> int:
        """Bytes reserved at the beginning of files, which are written when the dataset is finished."""
        return 0

    def states_at(
        self, lengths: NDArray[np.int64], firsts: Sequence[int], blocks: Sequence[int]
    ) -> list[dict[str, object]]:
        """States with which :meth:`begin_at` begins at each of ``firsts``, as JSON values.

        Args:
            lengths: tokens ``(n, layers)`` of all examples.
            firsts: numbers of examples, ascending.
            blocks: number of blocks before each of them.
        """
        return [{} for _ in firsts]

    def begin_at(self, first: int, state: Mapping[str, object]) -> None:
        """Prepares to write examples from ``first``; other tasks write earlier ones. ``state`` is from :meth:`states_at`."""
        self.n = first

    def together(self, states: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """States for :meth:`restore`, from the last :meth:`dirty` of each task, in order."""
        return list(states[-1:])

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
        """Writes pieces ``(source, first byte, bytes, file, offset)``. Files are extended to at least the size given."""
        table = np.ascontiguousarray(pieces, np.int64).reshape(-1, 5)
        if self.apart is not None:
            files, table = self.apart.placed(files, table)
        _native.write_pieces(list(sources), list(files), table, direct=not _native.is_network(self.root))


class Apart:
    """Files of a task. Each begins with the first byte that the task writes; the offsets in the whole file are recorded.

    A shard shared by two tasks thus becomes two files without holes. They are joined when the plan is committed.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self.extents: dict[Path, list[int]] = {}
        """For each file, the first offset and the end of the written bytes in the whole file."""

    def placed(
        self, files: Sequence[tuple[Path, int]], pieces: NDArray[np.int64]
    ) -> tuple[list[tuple[Path, int]], NDArray[np.int64]]:
        """Shifts the offsets of :meth:`Target.put` to the beginning of the task's files."""
        count = len(files)
        first, end = np.full(count, np.iinfo(np.int64).max), np.array([size for _, size in files], np.int64)
        np.minimum.at(first, pieces[:, 3], pieces[:, 4])
        np.maximum.at(end, pieces[:, 3], pieces[:, 4] + pieces[:, 2])
        bases = np.empty(count, np.int64)
        moved = []
        for k, (path, size) in enumerate(files):
            extent = self.extents.get(path)
            if extent is None:
                base = int(first[k]) if first[k] < end[k] else 0
                extent = self.extents[path] = [base if base > self._room else 0, int(end[k])]
            extent[1] = max(extent[1], int(end[k]))
            bases[k] = extent[0]
            moved.append((path, max(size - extent[0], 0)))
        pieces = pieces.copy()
        pieces[:, 4] -= bases[pieces[:, 3]]
        if (pieces[:, 4] < 0).any():
            raise InternalError(f"a task writes before the first byte of {files[int(pieces[:, 4].argmin())][0].name}")
        return moved, pieces

    def fragments(self, root: Path) -> list[list[str | int]]:
        """The files that begin within a file of the dataset: (name, first byte, end) of each."""
        fragments: list[list[str | int]] = []
        for path, (begin, end) in self.extents.items():
            # Complete files were renamed by then.
            file = path if path.exists() else path.with_name(path.name.removeprefix(".").removesuffix(".part"))
            if begin:
                fragments.append([file.relative_to(root).as_posix(), begin, end])
        return sorted(fragments)


def positive(options: Mapping[str, object], name: str, default: int | None) -> int | None:
    """Returns an option that must be a positive integer; None if absent without a default."""
    value = options.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ArgumentError(f"{name}: expected a positive integer, found {value!r}")
    return int(value)


def created(spec: Spec, form: str) -> str:
    """The creation time that a dataset records, formatted by ``time.strftime``."""
    return time.strftime(form, time.gmtime(given_time(spec)))


def given_time(spec: Spec) -> int | None:
    """The given creation time: from the spec, else from the environment variable SOURCE_DATE_EPOCH; None: use the clock.

    Source of the variable: https://reproducible-builds.org/specs/source-date-epoch.
    """
    return spec.created if spec.created is not None else environment_time()


def environment_time() -> int | None:
    """The environment variable SOURCE_DATE_EPOCH."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    return int(text) if text.isdecimal() else None


def flag(options: Mapping[str, object], name: str, default: bool) -> bool:
    """Returns a boolean option."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}: expected True or False, found {value!r}")
    return value


def only(dtype: np.dtype[np.generic], names: Sequence[str], format: str, why: str) -> None:
    """Raises DtypeError unless the format supports this dtype."""
    name = name_of(dtype)
    if name not in names:
        supported = " or ".join(str(NUMPY_BY_NAME[n]) for n in names)
        if name.startswith("F8"):
            raise DtypeError(
                f"{format} supports {supported}, not {dtype}{why}. dtype= does not convert 8-bit floats: read the rows, convert "
                "them with ml_dtypes and write them with create()"
            )
        if dtype.kind in "iub":
            raise DtypeError(
                f"{format} supports {supported}, not {dtype}{why}. dtype= does not convert integers, which may be the bits of "
                "other numbers: write rows.view(ml_dtypes.bfloat16) or rows.astype('float32'), whichever they are, with create()"
            )
        # bfloat16 has the exponents of float32: float16 would lose values.
        wide = "F32" if name == "BF16" and "F32" in names else names[-1]
        raise DtypeError(
            f"{format} supports {supported}, not {dtype}{why}; pass dtype='{NUMPY_BY_NAME[wide]}' to convert"
        )


def values_of(name: str, column: pa.Array | pa.ChunkedArray, first: int) -> list[object]:
    """Returns a column as a list of Python values.

    Raises:
        ArgumentError: dates and times outside Python's range.
    """
    import pyarrow as pa

    try:
        values: list[object] = column.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError, ImportError) as error:
        raise ArgumentError(
            f"columns: {name!r}, from example {first}: {column.type} values out of Python's range: {error}"
        ) from error
    return values


def check_times(table: pa.Table, first: int) -> None:
    """Raises ArgumentError for times that Python cannot represent: nanoseconds, years after 9999."""
    import pyarrow as pa

    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if _has(kind, pa.types.is_temporal) and any(map(_is_finer, values_of(name, table[name], first))):
            raise ArgumentError(
                f"columns: {name!r}, from example {first}: {kind} values are finer than microseconds. Round them."
            )


def _is_finer(value: object) -> bool:
    """Whether a value has nanoseconds. pyarrow returns such values as pandas objects, if pandas is installed."""
    if isinstance(value, list | dict):
        return any(map(_is_finer, value.values() if isinstance(value, dict) else value))
    return bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))


def check_utf8(table: pa.Table, first: int) -> None:
    """Raises ArgumentError for bytes that are no UTF-8 text: as escaped texts, different ones could be equal."""
    import pyarrow as pa

    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if _has(
            kind,
            lambda t: bool(pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t)),
        ):
            for number, value in enumerate(values_of(name, table[name], first), first):
                if _has_other_bytes(value):
                    raise ArgumentError(
                        f"columns: {name!r}, example {number}: expected bytes of UTF-8 text, found {value!r:.60}. Encode them, for "
                        "example with bytes.hex()."
                    )


def _has_other_bytes(value: object) -> bool:
    if isinstance(value, bytes):
        return value.decode("utf-8", "ignore").encode() != value
    if isinstance(value, list | tuple | dict):
        return any(map(_has_other_bytes, value.values() if isinstance(value, dict) else value))
    return False


def _has(kind: pa.DataType, is_kind: Callable[[pa.DataType], bool]) -> bool:
    return is_kind(kind) or any(_has(kind.field(i).type, is_kind) for i in range(kind.num_fields))


def array_of(column: pa.ChunkedArray | pa.Array, dtype: str | None = None) -> NDArray[np.generic]:
    """Returns a column of fixed-size lists as ``(n, k)``, a column of numbers as ``(n,)``."""
    import pyarrow as pa

    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(flat, pa.ChunkedArray):
        flat = pa.concat_arrays(flat.chunks)
    if pa.types.is_fixed_size_list(flat.type):
        width = flat.type.list_size
        array: NDArray[np.generic] = flat.flatten().to_numpy(zero_copy_only=False).reshape(len(flat), width)
    else:
        array = flat.to_numpy(zero_copy_only=False)
    return array.view(NUMPY_BY_NAME[dtype]) if dtype is not None else array


def arrays_in(table: pa.Table, name: str) -> NDArray[np.generic]:
    """Returns a column from :func:`list_column` as ``(n, k)`` in its original dtype."""
    dtype = (table.schema.field(name).metadata or {}).get(b"dtype")
    column = table[name]
    if column.null_count:
        raise ArgumentError(
            f"{name}: expected values for all examples or for none, found {column.null_count} examples without"
        )
    return array_of(column, None if dtype is None else dtype.decode())


def list_column(name: str, values: NDArray[np.generic]) -> tuple[pa.Field, pa.Array]:
    """Returns ``(n, k)`` numbers as a column of fixed-size lists. The field's metadata contain a dtype that Arrow lacks."""
    import pyarrow as pa

    metadata = None
    if values.dtype.kind not in "biuf":
        metadata = {"dtype": name_of(values.dtype)}
        values = values.view(f"u{values.dtype.itemsize}")
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.field(name, column.type, metadata=metadata), column


def without_arrow_type(schema: pa.Schema) -> dict[str, str]:
    """Columns from :func:`list_column` whose dtype Arrow lacks, each with its dtype."""
    dtypes = {field.name: (field.metadata or {}).get(b"dtype") for field in schema}
    return {name: dtype.decode(errors="replace") for name, dtype in dtypes.items() if dtype is not None}


def as_float32(table: pa.Table) -> pa.Table:
    """Casts the columns of :func:`without_arrow_type`."""
    for name in without_arrow_type(table.schema):
        field, column = list_column(name, arrays_in(table, name).astype(np.float32))
        table = table.set_column(table.schema.get_field_index(name), field, column)
    return table


def uniform(lengths: NDArray[np.int64], format: str, layers: Sequence[Layer]) -> NDArray[np.int64]:
    """Returns tokens per example, for formats in which all layers have the same tokens."""
    first = lengths[:, 0]
    if (lengths != first[:, None]).any() or (first < 0).any():
        bad = int(np.flatnonzero((lengths != first[:, None]).any(axis=1) | (first < 0))[0])
        raise FormatError(
            f"example {bad} has {dict(zip(layers, np.maximum(lengths[bad], 0).tolist(), strict=True))} tokens by layer; {format} "
            "requires the same number in all layers; leave out layers or examples (layers=, examples=)"
        )
    return first


def refuse_parts(path: Path) -> None:
    """Raises ExistsError for a folder with parts of a dataset: it is reserved for the merged dataset."""
    if os.path.lexists(path / PARTS):
        raise ExistsError("contains parts of a dataset to be merged; choose another folder", path=path)


def refuse_in_the_way(path: Path, makes: Iterable[str]) -> None:
    """Raises ExistsError if a folder contains names that merging its parts would create. ``makes`` are their patterns."""
    if not path.is_dir():
        return
    patterns = list(makes)
    names = sorted(p.name for p in path.iterdir() if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in patterns))
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ExistsError(f"expected only parts, found {shown}, which the merge would create; move it away", path=path)


def refuse_existing(path: Path) -> None:
    """Raises ExistsError unless a folder is empty or absent."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.name not in (FOLDER, PARTS, RECORD))
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ExistsError(f"expected no folder or an empty one, found {shown}", path=path)
    refuse_file(path)


def refuse_file(path: Path) -> None:
    """Raises ExistsError for a file, and for a link that leads nowhere."""
    if os.path.lexists(path) and not path.is_dir():
        kind = "a file" if path.exists() else "a link that leads nowhere"
        raise ExistsError(f"expected a folder or nothing, found {kind}", path=path)
