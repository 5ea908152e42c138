"""Reads parquet files with columns of vectors.

.. code-block:: text

    vectors.parquet                            one file
    train-00000-of-00002.parquet, ...          a folder of files, in the order of their names; or below its folder ``data``
    base.parquet.nla_meta.yaml                 NLA's description of one file: model, layer, d_model, row_count

Sources: kitft/natural_language_autoencoders 047eb8e, datasets 5.2.0's push_to_hub, pyarrow 26.0.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base._json import read_json
from actshard.base.codes import Remark
from actshard.base.errors import RAISE, ActshardError, ArgumentError, Faults, FormatError, NotStoredError
from actshard.base.location import Location
from actshard.formats.candidates import (
    choose,
    left_out,
    masks_not_applied,
    named_in,
    rank_of,
    several_layers,
)
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.parquet_vectors.files import (
    FLOATS,
    ParquetFile,
    VectorColumn,
    check_one_dataset,
    ends_of,
    lengths_of,
    missing_files,
    parquet_files,
    sidecar,
)
from actshard.formats.report import Report

if TYPE_CHECKING:
    import pyarrow as pa


LOOKED_FOR = "parquet files with a column of vectors, or of lists of floats named as activations"
_MOST_SIDECAR = 16 << 20
_SHOWN = 8
_LEAST_WIDTH = 16
"""Elements of a list that may be activations; shorter ones are scores or labels."""
_RUNNER = "cache_activations_runner_cfg.json"


def detect(path: Location) -> Evidence:
    """Checks the schema of the first parquet file, and the descriptions next to it."""
    files = parquet_files(path)
    if not files:
        return Evidence(False, LOOKED_FOR, "no parquet file")
    first = files[0]
    try:
        columns = ParquetFile(first).vectors()
    except ActshardError as error:
        return Evidence(False, LOOKED_FOR, f"{first.name}, whose schema cannot be read ({error.detail})", near=True)
    likely = [column for column in columns if column.likely]
    if likely:
        return Evidence(True, LOOKED_FOR, f"column {likely[0].name} in {first.name}")
    if not columns:
        names = ParquetFile(first).schema.names[:_SHOWN]
        return Evidence(False, LOOKED_FOR, f"{first.name} without such a column, with {', '.join(names)}", near=True)
    if sidecar(first).exists() or (path.kind() == "folder" and (path / _RUNNER).exists()):
        return Evidence(
            True, LOOKED_FOR, f"column {columns[0].name} in {first.name}, with a description of activations"
        )
    name = columns[0].name
    how = "format= reads them" if rank_of(name) else f"format= and layout={{'layers': [{name!r}]}} read them"
    text = f"{first.name} with lists of floats in {name}, which may be scores or weights ({how})"
    return Evidence(False, LOOKED_FOR, text, near=True)


class ParquetDataset:
    """The files of a dataset and its layers."""

    def __init__(self, path: Location, faults: Faults = RAISE, layout: object = None) -> None:
        self.path = path
        self.warnings: list[Remark] = []
        paths = parquet_files(path)
        check_one_dataset(path, paths)
        if path.kind() == "folder":
            self.warnings += missing_files(paths)
        self.described: dict[str, object] = {}
        with faults.noting(path):
            self.described = self._described(paths)
        self.files = faults.batch(paths, lambda batch: [ParquetFile(file) for file in batch])
        if not self.files:
            raise FormatError(f"expected {LOOKED_FOR}, found no parquet file", path=path)
        for file in self.files[1:]:
            if not file.schema.equals(self.files[0].schema):
                raise FormatError(f"expected the columns of {self.files[0].path.name}, found others", path=file.path)
        self.groups = [(file, g) for file in self.files for g in range(file.footer.num_groups) if file.group_rows(g)]
        self.sizes = [file.group_rows(g) for file, g in self.groups]
        self.firsts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._refuse_twice()
        self.columns_found = self._choose(layout)
        self.lengths = self._lengths()
        self._remark_choices()

    def _refuse_twice(self) -> None:
        """Raises FormatError for a file under two names, such as a link."""
        names: dict[object, str] = {}
        for file in self.files:
            if (other := names.setdefault(file.version, file.path.name)) != file.path.name and file.path.is_local:
                raise FormatError(
                    f"expected another file than {other}, found the same: remove one name", path=file.path
                )

    def _remark_choices(self) -> None:
        """Names what else the files and columns could be."""
        names = [file.path.name for file in self.files]
        by_number = sorted(names, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)])
        texts: list[str | None] = []
        if names != by_number:
            other = next(name for name, other in zip(names, by_number, strict=True) if name != other)
            texts.append(
                f"files are read in the order of their names as texts, {other} before smaller numbers: pad numbers with zeros"
            )
        for name in self.column_names:
            values = self._range(name)
            texts.append(None if values is None else several_layers(name, *values))
        if self.columns_found[0].levels > 1:
            texts.append(masks_not_applied(self.column_names))
        self.warnings += [Remark("layout", text) for text in texts if text is not None]

    def _described(self, paths: Sequence[Location]) -> dict[str, object]:
        """NLA's description or SAELens' configuration; empty if there is neither."""
        if len(paths) == 1 and sidecar(paths[0]).exists():
            return self._sidecar(sidecar(paths[0]))
        config = self.path / _RUNNER if self.path.kind() == "folder" else None
        if config is not None and config.exists():
            value = read_json(config)
            return value if isinstance(value, dict) else {}
        return {}

    def _sidecar(self, path: Location) -> dict[str, object]:
        try:
            import yaml
        except ImportError:
            text = f"{path.name} is not read: it needs the package pyyaml (pip install 'actshard[tokens]')"
            self.warnings.append(Remark("layout", text))
            return {}
        try:
            value = yaml.safe_load(path.read(limit=_MOST_SIDECAR))
        except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
            text = " ".join(str(error).split())[:200]
            raise FormatError(f"expected YAML: {text}", path=path, code="metadata") from error
        if not isinstance(value, dict):
            raise FormatError("expected a description, a mapping, found another value", path=path, code="metadata")
        return {str(key): entry for key, entry in value.items()}

    def _choose(self, layout: Any) -> list[VectorColumn]:
        """The columns that are layers, all of one kind, width and dtype, by :func:`actshard.formats.candidates.choose`.

        Columns without a type or name of activations are only read if there are no others. Better are more axes, then
        wider vectors.
        """
        every = self.files[0].vectors()
        requested_names = named_in(layout, [column.name for column in every])
        columns = [column for column in every if column.likely] or every
        if requested_names is not None:
            columns = [column for column in every if column.name in requested_names]
        if not columns:
            raise FormatError(f"expected {LOOKED_FOR}, found none", path=self.files[0].path)
        columns = [self._with_layers(column) for column in columns]
        widths: dict[str, int] = {}
        failed: list[FormatError] = []
        for column in columns:
            try:
                widths[column.name] = self._width(column)
            except FormatError as error:
                if column.levels < 3:
                    raise
                failed.append(error)  # rows with different numbers of layers: not a layer if other columns are
        if not widths or (requested_names is not None and failed):
            raise failed[0]
        rank = rank_of if requested_names is None and not self.described else lambda name: 1
        # Three axes may also be those of images: only a name of states makes them better than others.
        kinds = {
            c.name: (c.levels if c.levels < 3 or rank(c.name) == 2 else 0, c.layers, widths[c.name], c.type)
            for c in columns
            if c.name in widths
        }
        names = choose(kinds, self.path, rank)
        by_name = {column.name: column for column in columns}
        if requested_names is None:
            self._refuse_sparse([by_name[name] for name in names], widths)
        self.d_model = widths[names[0]]
        read = columns if requested_names is not None else every
        if other_names := [c.name for c in read if c.name not in names and (c in columns or self._is_even(c))]:
            if requested_names is not None:
                raise ArgumentError(
                    f"layout: expected columns of one kind, size and dtype, found {', '.join(other_names)} next to {names[0]}"
                )
            self.warnings.append(Remark("layout", left_out(other_names, names)))
        return [by_name[name] for name in (requested_names or names)]

    def _is_even(self, column: VectorColumn) -> bool:
        """Whether all rows have equally many values by the footers, and enough for activations."""
        shares = {divmod(file.values(g, column), file.group_rows(g)) for file, g in self.groups}
        return len(shares) == 1 and all(rest == 0 and each >= _LEAST_WIDTH for each, rest in shares)

    def _refuse_sparse(self, columns: Sequence[VectorColumn], widths: Mapping[str, int]) -> None:
        """Raises FormatError for values of sparse latents, whose indices are another column of equally many values."""
        for column in columns:
            for name, number in self.files[0].indices().items():
                indices = replace(column, name=name, number=number)
                same = all(file.values(g, indices) == file.values(g, column) for file, g in self.groups)
                if column.levels == 1 and same and widths[column.name] > 1:
                    raise FormatError(
                        f"expected activations, found sparse latents: values in column {column.name}, indices in {name}. "
                        f"Multiply them by the decoder, or read the values as they are: layout={{'layers': [{column.name!r}]}}",
                        path=self.path,
                    )

    def _with_layers(self, column: VectorColumn) -> VectorColumn:
        """The column with its number of layers: from the type or the features, else from the first row."""
        if column.layers is not None:
            return column
        for file, group in self.groups:
            for chunk in file.read(group, [column.name]).column(0).chunks:
                if len(sizes := np.diff(ends_of(getattr(chunk, "storage", chunk)))):
                    return replace(column, layers=max(int(sizes[0]), 1))
        return replace(column, layers=1)

    def _width(self, column: VectorColumn) -> int:
        """d_model: from the type or the features, else from the numbers of values and rows, else from the first row."""
        if column.width is not None or not self.groups:
            return column.width or 0
        if column.levels == 1:
            # A null or an empty list counts as one value, so the quotient of such a group has a remainder or differs.
            shares = {divmod(file.values(g, column), file.group_rows(g)) for file, g in self.groups}
            if len(shares) == 1 and (share := shares.pop())[1] == 0:
                return share[0]
        for file, group in self.groups:
            for chunk in file.chunks(group, column):
                sizes = np.diff(ends_of(chunk.flatten() if column.levels > 1 else chunk))
                if (widths := sizes[sizes > 0]).size:
                    return int(widths[0])
        return 0

    def _lengths(self) -> list[NDArray[np.int64]] | int:
        """Tokens of each example, by row group; a single number if all are equal. Sequences of unknown length are decoded once."""
        first = self.columns_found[0]
        fixed = first.tokens
        row_values = self.d_model * (fixed or 0) * (first.layers or 1)
        if fixed is not None and all(
            file.values(g, first) == file.group_rows(g) * row_values for file, g in self.groups
        ):
            return fixed
        if fixed is not None and first.levels == 1:
            return fixed
        return [lengths_of(file, group, first) for file, group in self.groups]

    @property
    def num_examples(self) -> int:
        """Number of rows of all files."""
        return int(self.firsts[-1])

    @cached_property
    def layers(self) -> tuple[int | str, ...]:
        """Names of the layers: the columns' names, or NLA's layer index."""
        extraction = self.described.get("extraction")
        number = extraction.get("layer_index") if isinstance(extraction, dict) else None
        if len(self.columns_found) == 1:
            if self.layers_each > 1:
                return tuple(range(self.layers_each))
            if _is_layer(number):
                return (number,)
            if (constant := self._constant("activation_layer")) is not None:
                return (constant,)
        if self.layers_each > 1:
            return tuple(f"{column.name}.{i}" for column in self.columns_found for i in range(self.layers_each))
        return tuple(column.name for column in self.columns_found)

    @property
    def layers_each(self) -> int:
        """Layers in each column."""
        return self.columns_found[0].layers or 1

    def _range(self, name: str) -> tuple[int, int] | None:
        """The least and the largest value of an integer column by the statistics of the row groups; None without them."""
        import pyarrow as pa

        values: list[int] = []
        for file, group in self.groups:
            numbers = file.leaves.get(name, [])
            if len(numbers) != 1:
                return None
            statistics = file.footer.group(group).column(numbers[0]).range
            # Dates and times are integers in the file, too.
            if statistics is None or statistics[2] or not pa.types.is_integer(file.schema.field(name).type):
                return None
            values += statistics[:2]
        return (min(values), max(values)) if values else None

    def _constant(self, name: str) -> int | None:
        """The value of an integer column that is constant according to the statistics of the row groups; else None."""
        values = self._range(name)
        return values[0] if values is not None and values[0] == values[1] and _is_layer(values[0]) else None

    def native(self, options: Options) -> Rows | None:
        """The rows: a chunk per row group and layer, decoded on first use and cached."""
        if not self.groups or not self.d_model:
            return None
        column = self.columns_found[0]
        arrays: list[Any] = []
        for number, (file, _) in enumerate(self.groups):
            tokens = self.most_tokens(number)
            n = self.sizes[number]
            shape = [n, len(self.layers), tokens, self.d_model]
            decode = _Decode(self, number)
            fill = bytes(column.dtype.itemsize)
            chunk = [n, self.layers_each, *shape[2:]]
            arrays.append((file.path.parent, file.path, "", ".", shape, chunk, fill, False, decode))
        lengths = self.lengths
        return Rows.chunked(
            arrays,
            [(n, [number]) for number, n in enumerate(self.sizes)],
            [lengths if isinstance(lengths, int) else np.concatenate(lengths).astype(np.uint32)],
            num_groups=len(self.layers),
            width=self.d_model,
            dtype=FLOATS[column.type][0],
            decoded_memory=options.decoded_memory,
            descr=column.dtype,
            io=options.io,
        )

    def lengths_in(self, number: int) -> int | NDArray[np.int64]:
        """Tokens of the examples of a row group."""
        return self.lengths if isinstance(self.lengths, int) else self.lengths[number]

    def most_tokens(self, number: int) -> int:
        """Tokens of the longest example of a row group, at least 1."""
        if isinstance(self.lengths, int):
            return self.lengths
        return max(int(self.lengths[number].max(initial=0)), 1)

    # -- columns ---------------------------------------------------------------------------------

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns that are not layers."""
        layers = {column.name for column in self.columns_found}
        return tuple(name for name in self.files[0].schema.names if name not in layers)

    def batches(self, names: Sequence[str], most: int | None = None) -> Iterator[pa.Table]:
        """Reads columns row group by row group, until ``most`` examples are read or the dataset ends."""
        unknown = [name for name in names if name not in self.column_names]
        if unknown:
            raise NotStoredError(
                f"has no column {unknown[0]!r}; columns are {', '.join(self.column_names) or 'none'}", path=self.path
            )
        for (file, group), first in zip(self.groups, self.firsts, strict=False):
            if most is not None and first >= most:
                return
            yield file.read(group, list(names)).replace_schema_metadata(None)

    def columns(self, names: Sequence[str], most: int | None = None) -> pa.Table:
        """Reads columns of all examples, or of the first ones."""
        import pyarrow as pa

        parts = list(self.batches(names, most))
        if not parts:
            schema = self.files[0].schema
            return pa.table({name: pa.array([], schema.field(name).type) for name in names})
        table = pa.concat_tables(parts)
        return table if most is None else table.slice(0, most)

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        n = self.num_examples
        rows = self.native(options)
        lengths = self.lengths
        same = lengths if isinstance(lengths, int) else None
        token_counts = None if isinstance(lengths, int) else np.concatenate([np.zeros(0, np.int64), *lengths])
        extraction = self.described.get("extraction")
        model = extraction.get("base_model") if isinstance(extraction, dict) else self.described.get("model_name")
        shown = ("kind", "stage", "dataset_id", "schema_version")
        places = [file.path.place for file in self.files]
        return Contents(
            format="parquet_vectors",
            path=self.path.place,
            metadata=self.described,
            layers=self.layers if rows is not None else (),
            d_model=self.d_model,
            dtype=self.columns_found[0].dtype,
            num_examples=n,
            token_counts=lambda: np.full(n, same, np.int64) if token_counts is None else token_counts.copy(),
            rows=rows,
            column_names=self.column_names,
            columns=self.columns,
            head_columns=self.columns,
            column_batches=self.batches,
            files=lambda: places,
            model=model if isinstance(model, str) else None,
            provenance={name: self.described[name] for name in shown if name in self.described},
            warnings=tuple(self.warnings),
            tokens_each=same,
            one_row_each=True if same == 1 else None,
            units=tuple(self.firsts.tolist()) if self.groups else None,
        )


def _is_layer(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 31


class _Decode:
    """Decodes a row group for the core: its elements in C order."""

    def __init__(self, dataset: ParquetDataset, number: int) -> None:
        self.file, self.group = dataset.groups[number]
        self.first, self.lengths, self.width = int(dataset.firsts[number]), dataset.lengths_in(number), dataset.d_model
        self.columns = dataset.columns_found

    def __call__(self, indices: list[int]) -> bytes:
        column = self.columns[indices[1]]
        return self.file.decode(self.group, column, self.first, self.lengths, self.width).tobytes()


def open(path: Location, options: Options) -> Contents:
    """Reads footers. Decodes row groups only for lengths of sequences that neither types nor features specify."""
    return ParquetDataset(path, layout=options.layout).contents(options)


# Checks of parquet files with vectors


def check(root: Location, report: Report, tell: Tell) -> None:
    """Decodes every row group, and compares NLA's description with the file."""
    dataset = report.faults.parse(root, lambda: ParquetDataset(root, report.faults, report.layout))
    if dataset is None:
        return
    report.count("files", len(dataset.files))
    if dataset.layers_each > 1:
        names = ", ".join(column.name for column in dataset.columns_found)
        report.add("layout", root, f"columns {names} of three axes are taken as (layer, token, dim)")
    for number, ((file, group), first) in enumerate(zip(dataset.groups, dataset.firsts.tolist(), strict=False)):
        tell("row groups", number, len(dataset.groups))
        lengths = dataset.lengths_in(number)
        for column in dataset.columns_found:
            with report.noting(file.path):
                file.decode(group, column, first, lengths, dataset.d_model)
        with report.noting(file.path):
            file.read(group, list(dataset.column_names))
    _check_description(dataset, report)


def _check_description(dataset: ParquetDataset, report: Report) -> None:
    path = sidecar(dataset.files[0].path)
    extraction = dataset.described.get("extraction")
    if dataset.described.get("kind") != "nla_dataset" or not isinstance(extraction, dict):
        return
    rows = dataset.described.get("row_count")
    if rows is not None and rows != dataset.num_examples:
        report.add("count-claim", path, rows, f"{dataset.num_examples}, as in the file", "field 'row_count'")
    width = extraction.get("d_model")
    if width is not None and width != dataset.d_model:
        report.add("claim", path, width, f"{dataset.d_model}, the size of the vectors", "field 'extraction.d_model'")
    layer = extraction.get("layer_index")
    if "activation_layer" in dataset.column_names and layer is not None:
        with report.noting(path):
            values = set(dataset.columns(["activation_layer"])["activation_layer"].unique().to_pylist())
            if values - {layer}:
                text = f"{layer}, but column activation_layer has {sorted(values, key=str)[:5]}"
                report.add("claim", path, text, "the layer of all rows", "field 'extraction.layer_index'")
