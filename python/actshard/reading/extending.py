"""Columns that come later: ``store.extend_columns``, and reading them with the dataset's own.

They are in one Arrow file in the dataset's folder (:data:`actshard.base.work.COLUMNS`), which is hidden from the readers of the
format. Its metadata contain a digest of the dataset, so that values are never read with the examples of another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._columns import pick_rows
from actshard.base.errors import (
    ArgumentError,
    ExistsError,
    FormatError,
    UnsupportedError,
    from_reader,
)
from actshard.base.late import Late
from actshard.base.location import Location
from actshard.base.request import Request
from actshard.base.work import COLUMNS, COLUMNS_LOCK, LOCK, locked, whole_file
from actshard.formats.contents import Contents
from actshard.formats.tables import rows_only
from actshard.formats.target import OTHER_TEXT

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
else:
    pa = Late("pyarrow")

_DIGEST = b"actshard:dataset-1"
"""Key of the digest in the metadata of the file's schema, with the version of :func:`_digest_of`."""
_SAMPLES = 8
"""Number of examples whose rows a digest includes."""


def with_added_columns(contents: Contents, root: Location) -> Contents:
    """The contents with the columns that were added to the dataset at ``root``, if there are any. Reads their names only."""
    file = root / COLUMNS
    if contents.parts or not root.lists or root.kind() != "folder" or file.kind() != "file":
        return contents
    with _opened(file) as reader:
        names = tuple(name for name in reader.schema.names if name not in contents.column_names)
    table = _ExtendedTable(contents, file, names)
    return replace(
        contents,
        column_names=(*contents.column_names, *names),
        unextended=contents,
        columns=table.columns,
        unit_columns=None if contents.unit_columns is None else table.of_unit,
        head_columns=None if contents.head_columns is None else table.head,
        column_batches=None if contents.column_batches is None else table.batches,
        example_columns=None if contents.example_columns is None else table.of_examples,
        columns_in=lambda: (*contents.columns_in(), file.place),
    )


@dataclass(frozen=True)
class _ExtendedTable:
    """The columns of a dataset and those that were added to it.

    Attributes:
        contents: the dataset without them.
        file: the file of the added columns.
        names: their names.
    """

    contents: Contents
    file: Location
    names: tuple[str, ...]

    @cached_property
    def added(self) -> pa.Table:
        """The added columns of all examples.

        Raises:
            FormatError: they were added to another dataset.
        """
        table, count = _read(self.file), self.contents.num_examples
        if table.num_rows != count:
            raise FormatError(
                f"expected columns of the {many(count, 'example')} of this dataset, found {table.num_rows:,} values: examples were "
                "added or removed after the columns, or the dataset was replaced. Move this file away to read the dataset without "
                "the columns",
                path=self.file,
            )
        # A dataset whose lost files are skipped has fewer rows.
        if not self.contents.absence and _digest_in(table) != _digest_of(self.contents):
            raise FormatError(
                f"expected columns of the {many(count, 'example')} of this dataset, found those of another one: the dataset was "
                "replaced after the columns were added. Move this file away to read the dataset without them",
                path=self.file,
            )
        return table.replace_schema_metadata(None)

    def columns(self, names: Sequence[str]) -> pa.Table:
        """:attr:`Contents.columns` of both."""
        format_names = self._of_format(names)
        return self._merge(names, self.contents.columns(format_names) if format_names else None, lambda _: self.added)

    def of_unit(self, unit: int) -> pa.Table:
        """:attr:`Contents.unit_columns` of both."""
        assert self.contents.unit_columns is not None, "used only if the format has it"
        assert self.contents.units is not None, "likewise"
        format_table, first = self.contents.unit_columns(unit), self.contents.units[unit]
        return self._merge(
            (*format_table.column_names, *self.names), format_table, lambda n: self.added.slice(first, n)
        )

    def head(self, names: Sequence[str], n: int) -> pa.Table:
        """:attr:`Contents.head_columns` of both."""
        assert self.contents.head_columns is not None, "used only if the format has it"
        format_names = self._of_format(names)
        format_table = self.contents.head_columns(format_names, n) if format_names else None
        return self._merge(names, format_table, lambda count: self.added.slice(0, n if count is None else count))

    def batches(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """:attr:`Contents.column_batches` of both."""
        assert self.contents.column_batches is not None, "used only if the format has it"
        format_names, first = self._of_format(names), 0
        if not format_names:
            yield self.columns(names)
            return
        for format_table in self.contents.column_batches(format_names):
            yield self._merge(
                names, format_table, partial(self.added.slice, first) if len(format_names) < len(names) else None
            )
            first += format_table.num_rows

    def of_examples(self, names: Sequence[str], numbers: NDArray[np.int64]) -> pa.Table:
        """:attr:`Contents.example_columns` of both."""
        assert self.contents.example_columns is not None, "used only if the format has it"
        format_names = self._of_format(names)
        format_table = self.contents.example_columns(format_names, numbers) if format_names else None
        return self._merge(names, format_table, lambda _: pick_rows(self.added, numbers))

    def _of_format(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.names]

    def _merge(
        self, names: Sequence[str], format_table: pa.Table | None, added: Callable[[int | None], pa.Table] | None
    ) -> pa.Table:
        """Columns in the requested order. ``added`` returns the added ones, of as many rows as the own ones have."""
        import pyarrow as pa

        if format_table is not None and all(name not in self.names for name in names):
            return format_table
        if format_table is not None:  # which may have columns that were not known when the dataset was opened
            names = [*names, *(name for name in format_table.column_names if name not in names)]
        assert added is not None, "left out only if none is requested"
        added_table = added(None if format_table is None else format_table.num_rows)
        tables = [added_table if name in self.names or format_table is None else format_table for name in names]
        fields = [table.schema.field(name) for name, table in zip(names, tables, strict=True)]
        values = [table[name] for name, table in zip(names, tables, strict=True)]
        return pa.Table.from_arrays(values, schema=pa.schema(fields)) if fields else rows_only(added_table.num_rows)


def extend(contents: Contents, columns: Mapping[str, object] | pa.Table, *, replaces: bool) -> None:
    """Adds columns to the dataset of these contents; see :meth:`actshard.Store.extend_columns`."""
    from actshard.writing.columns import plain
    from actshard.writing.given import table_of

    root = Location.at(contents.path)
    if contents.whole is not None or contents.parts:
        kind = "joined" if contents.parts else "filtered"
        raise UnsupportedError(
            f"extend_columns: expected the store of a dataset, found a {kind} one. Open the dataset itself, and pass a value for "
            "each of its examples (None where there is none)",
            path=root,
        )
    if contents.absence:
        raise UnsupportedError(
            "extend_columns: expected a whole dataset, found one whose lost files are skipped", path=root
        )
    if not root.is_local:
        raise UnsupportedError(
            "extend_columns: expected a dataset on this machine. Stage it (actshard.stage), add the columns, and push it",
            path=root,
        )
    if root.kind() != "folder":
        raise UnsupportedError(
            "extend_columns: expected a folder, in which the columns can be stored, found a file. Convert the dataset to another "
            "format with columns=, or move the file to a folder of its own and open the folder",
            path=root,
        )
    table = table_of(columns, None, None, None, contents.num_examples)
    if table is None:
        raise ArgumentError("extend_columns: expected at least one column, found none")
    table = plain(table)
    unextended = contents.unextended or contents
    format_names = {*unextended.column_names, *unextended.columns(unextended.column_names).column_names}
    for name in table.column_names:
        if name in format_names or OTHER_TEXT.get(name) in format_names:
            raise ExistsError(f"extend_columns: the dataset has a column {name!r}. Choose another name", path=root)
    file = root.local / COLUMNS
    lock = locked(root.local / COLUMNS_LOCK)
    try:
        digest = _digest_of(unextended)
        earlier = _read(Location.at(file)) if file.exists() else None
        if earlier is not None:
            if _digest_in(earlier) != digest:
                raise ExistsError(
                    "contains columns of another dataset, which was replaced after they were added. Move this file away",
                    path=file,
                )
            twice = [name for name in table.column_names if name in earlier.column_names]
            if twice and not replaces:
                raise ExistsError(
                    f"extend_columns: the dataset has a column {twice[0]!r}, which was added before. replace=True replaces it",
                    path=root,
                )
            table = _together(earlier, table)
        _write(file, table.replace_schema_metadata({_DIGEST: digest}))
    finally:
        (lock.path.parent / LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # another call waits for the lock
            lock.path.parent.rmdir()


def _together(earlier: pa.Table, later: pa.Table) -> pa.Table:
    """The columns of both, in order; the later ones replace those with equal names."""
    import pyarrow as pa

    columns = {
        field.name: (field, column)
        for table in (earlier, later)
        for field, column in zip(table.schema, table.columns, strict=True)
    }
    fields, values = zip(*columns.values(), strict=True)
    return pa.Table.from_arrays(list(values), schema=pa.schema(list(fields)))


def _digest_of(contents: Contents) -> str:
    """A digest of the dataset that columns belong to: its shape, lengths, and a few rows of each layer.

    With the digests of all rows, if actshard wrote it. Copies have equal digests; columns of the format are not included.

    Raises:
        Errors of reads: a row cannot be read now.
    """
    n = contents.num_examples
    request = Request.read(contents.path)
    shape = [contents.format, list(contents.layers), contents.d_model, contents.dtype.name, n, contents.tokens_each]
    shape.append(None if request is None or request.digests is None else list(map(str, request.digests)))
    digest = hashlib.sha256(json.dumps(shape).encode())
    if contents.tokens_each is None and contents.counts_are_cheap:
        digest.update(np.ascontiguousarray(contents.token_counts(), "<i8").tobytes())
    if contents.rows is None:
        return digest.hexdigest()
    # Of shards that are decoded as a whole, only the first example: opening has decoded its shard.
    few = np.arange(0, min(n, 1) if contents.units is not None else n, -(-n // _SAMPLES) or 1)
    places: list[tuple[int, int, int]] = []
    for group in range(len(contents.layers)):
        counts = contents.rows.tokens_of(group, few)
        digest.update(np.ascontiguousarray(counts, "<i8").tobytes())
        # The middle token, too: the last ones of texts may be equal in all datasets of a model.
        stored = [(example, count) for example, count in zip(few.tolist(), counts.tolist(), strict=True) if count]
        places += [(group, example, token) for example, count in stored for token in (count // 2, count - 1)]
    if places:  # one call, so that a remote dataset needs one round trip
        groups, examples, tokens = np.ascontiguousarray(np.array(places, np.int64).T)
        digest.update(contents.rows.gather(groups, examples, tokens, None, None).tobytes())
    return digest.hexdigest()


def _digest_in(table: pa.Table) -> str:
    """The digest of the dataset for which a file was written."""
    return str((table.schema.metadata or {}).get(_DIGEST, b"").decode(errors="replace"))


def _write(file: Path, table: pa.Table) -> None:
    import pyarrow as pa

    with whole_file(file) as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _read(file: Location) -> pa.Table:
    with _opened(file) as reader:
        table = reader.read_all()
        table.validate(full=True)  # lengths and offsets of values; pyarrow reads them unchecked
        return table


@contextlib.contextmanager
def _opened(file: Location) -> Iterator[pa.RecordBatchFileReader]:
    """Opens the file of added columns; errors of pyarrow become those of a damaged file."""
    import pyarrow as pa

    try:
        with file.arrow() as source:
            yield pa.ipc.open_file(source)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise from_reader(error, file, "read", f"expected columns that were added to the dataset: {error}") from error


class ColumnVerbs:
    """The part of a store that adds columns to its dataset."""

    _contents: Contents
    _table: pa.Table | None

    def extend_columns(self, columns: Mapping[str, object] | pa.Table, *, replace: bool = False) -> None:
        """Adds columns to the dataset, such as labels that come later: ``store.extend_columns({"judge": labels})``.

        They are read with the dataset's own columns, by this store and by all that open the dataset later; other programs that read
        the format do not see them. They are copied by :func:`actshard.stage` and :func:`actshard.push`, and become columns of the
        result in :func:`actshard.convert`. Rows and the format's files are not changed. All columns of a call are added, or none.

        Args:
            columns: names, and a value per example of the whole dataset: lists, numpy arrays, Arrow, pandas or polars columns, as
                in :meth:`Writer.append`. None where an example has no value.
            replace: whether columns that were added before may be replaced. Columns of the format cannot.

        Raises:
            ArgumentError: no columns, another number of values, or values without a common type.
            ExistsError: the dataset has a column of that name.
            UnsupportedError: the store is filtered, joined or remote, or the dataset is a single file.
            LockedError: another process is adding columns.
        """
        extend(self._contents, columns, replaces=_arguments.switch(replace, "replace"))
        contents = self._contents.unextended or self._contents
        self._contents = with_added_columns(contents, Location.at(contents.path))
        self._table = None
