"""Reads directories that ``datasets.Dataset.save_to_disk`` and SAELens' CacheActivationsRunner write.

.. code-block:: text

    state.json          {"_data_files": [{"filename": "data-00000-of-00002.arrow"}, ...], ...}: the data files, in order
    dataset_info.json   {"features": {"blocks.3.hook_resid_pre": {"shape": [ctx, d], "dtype": "float32", "_type": "Array2D"}}}
    data-*.arrow        Arrow IPC streams; the numbers in their names may be wrong
    cache-*.arrow       indices of a shuffle; not part of the dataset
    .tmp_shards/        shards of a run that has not finished

Sources: datasets 5.2.0, sae-lens 6.54.12, and their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base._arguments import many
from actshard.base._json import Fields, parse_json, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import (
    RAISE,
    ActshardError,
    ArgumentError,
    Faults,
    FormatError,
    MissingFileError,
    NotStoredError,
    TruncatedFileError,
    UnfinishedError,
)
from actshard.base.layers import Layer, stored
from actshard.base.location import Location
from actshard.formats.candidates import choose, left_out, masks_not_applied, named_in, rank_of
from actshard.formats.contents import NOTHING_ABSENT, Absence, Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.hf_arrow.streams import (
    FLOATS,
    Piece,
    StreamFile,
    Vectors,
    is_deeper,
    kind_of,
    pa_type,
    pieces_of,
    vectors_of,
)
from actshard.formats.report import Report

if TYPE_CHECKING:
    import pyarrow as pa


LOOKED_FOR = "a folder with a state.json that lists Arrow files (_data_files) with vectors"
UNFINISHED = ".tmp_shards"
_OF_A_CACHE = (
    "The cache of datasets has none: save its files with "
    "datasets.concatenate_datasets([datasets.Dataset.from_file(FILE), ...]).save_to_disk(FOLDER)"
)
OWN = "actshard"
"""Field of dataset_info.json that lists columns and layers. ``datasets`` ignores it, and drops it when it saves."""
_SHOWN = 10
_WORKERS = 8
"""Threads that read headers of files."""


def detect(path: Location) -> Evidence:
    """Checks for a state.json with ``_data_files``, or the working folder of an unfinished run."""
    if path.kind() != "folder":
        return Evidence(False, LOOKED_FOR, "a file")
    state = path / "state.json"
    if state.kind() != "file":
        if path.lists and (path / UNFINISHED).kind() == "folder":
            return Evidence(True, LOOKED_FOR, f"{UNFINISHED}, of a run that has not finished")
        is_cache = path.lists and (path / "dataset_info.json").kind() == "file"
        return Evidence(False, LOOKED_FOR, f"no state.json. {_OF_A_CACHE}" if is_cache else "no state.json")
    value = read_json(state)
    if not isinstance(value, dict) or "_data_files" not in value:
        return Evidence(False, LOOKED_FOR, "another state.json", near=True)
    info = read_json(path / "dataset_info.json") if (path / "dataset_info.json").kind() == "file" else None
    features = info.get("features") if isinstance(info, dict) else None
    if isinstance(features, dict) and features and not any(_is_vectors(feature) for feature in features.values()):
        columns = ", ".join(list(features)[:_SHOWN])
        return Evidence(False, LOOKED_FOR, f"a dataset without columns of vectors, with {columns}", near=True)
    return Evidence(True, LOOKED_FOR, "a state.json with _data_files")


def _is_vectors(feature: object, depth: int = 0) -> bool:
    """Whether a feature is a list of floats, in any notation of ``datasets``."""
    if isinstance(feature, list):
        return depth < 3 and len(feature) == 1 and _is_vectors(feature[0], depth + 1)
    if not isinstance(feature, dict):
        return False
    if "feature" in feature:
        return depth < 3 and _is_vectors(feature["feature"], depth + 1)
    is_nested = depth > 0 or str(feature.get("_type", "")).startswith("Array")
    dtype = feature.get("dtype")
    return is_nested and isinstance(dtype, str) and dtype in FLOATS


def data_files(path: Location, state: Fields) -> list[Location]:
    """The data files, in order.

    Raises:
        FormatError: a file is outside the folder, or listed twice.
    """
    paths: list[Location] = []
    for entry in state.items("_data_files"):
        name = entry.text("filename")
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise entry.error("filename", "the name of a file in this folder")
        if path / name in paths:
            raise entry.error("filename", "a different file each")
        paths.append(path / name)
    return paths


class Directory:
    """A directory's metadata and the headers of its files."""

    def __init__(
        self, path: Location, faults: Faults = RAISE, layout: object = None, *, skips_incomplete: bool = False
    ) -> None:
        self.path = path
        self.warnings: list[Remark] = []
        if not (path / "state.json").exists():
            if path.lists and not (path / UNFINISHED).exists():
                raise MissingFileError(f"expected the list of Arrow files. {_OF_A_CACHE}", path=path / "state.json")
            raise UnfinishedError(
                f"has {UNFINISHED} and no state.json: the run that writes it is running, or was interrupted. Run it again",
                path=path,
            )
        self.state = Fields(read_json(path / "state.json"), path / "state.json")
        self.info: dict[str, object] = {}
        with faults.noting(path / "dataset_info.json"):
            self.info = self._info()
        for name in ("_indices_data_files", "_indices_files"):
            if self.state.value.get(name):
                raise FormatError(
                    f"field '{name}': expected a dataset in stored order, found an indices mapping of an old version of "
                    "datasets. Write it again with flatten_indices() and save_to_disk()",
                    path=path / "state.json",
                    code="metadata",
                )
        if path.lists and (path / UNFINISHED).exists():
            self.warnings.append(
                Remark(
                    "layout",
                    f"{UNFINISHED} is left over from a run: examples that are not listed in state.json are not read",
                )
            )
        self.absence = NOTHING_ABSENT
        paths = data_files(path, self.state)
        self.files = self._open_first(paths) if skips_incomplete else faults.batch(paths, _open_all)
        self._check_alike(faults, skips_incomplete=skips_incomplete)
        self.features = self._features()
        self.names: dict[str, Layer] = {}
        """Layer names by column, where they differ from the column's name."""
        self.layers: list[Vectors] = []
        self.pieces: list[list[Piece]] = []
        self._choose(layout)

    def _open_first(self, paths: Sequence[Location]) -> list[StreamFile]:
        """Opens the files up to the first that is not whole: numbers of examples after it are not known.

        A file without an end marker may lack examples at its end; those that it has keep their numbers.
        """
        files: list[StreamFile] = []
        for path in paths:
            try:
                files.append(_open_file(path))
            except (MissingFileError, TruncatedFileError, FormatError) as error:
                if not files:
                    raise
                reason, lost = f"from {path.name} on: {error.detail}", paths[len(files) :]
            else:
                reason, lost = f"after {path.name}, which has no end marker", paths[len(files) :]
                if files[-1].ended or not lost:
                    continue
            text = f"{len(lost)} of {len(paths)} files are left out, {reason}"
            self.absence = Absence(files=tuple(path.place for path in lost), after=text)
            break
        return files

    def _info(self) -> dict[str, object]:
        path = self.path / "dataset_info.json"
        if not path.exists():
            self.warnings.append(Remark("layout", "dataset_info.json is missing; types are those of the Arrow files"))
            return {}
        return Fields(read_json(path), path).value

    def _check_alike(self, faults: Faults, *, skips_incomplete: bool) -> None:
        files = self.files
        for file in files[1:]:
            if len(file.columns) != len(files[0].columns) or not all(
                a.same_type(b) for a, b in zip(file.columns, files[0].columns, strict=True)
            ):
                raise FormatError(f"expected the columns of {files[0].path.name}, found others", path=file.path)
        if files and not files[-1].ended:
            self.warnings.append(Remark("end-marker", f"{files[-1].path.name}: the stream has no end marker"))
        lost = [] if skips_incomplete else [file for file in files[:-1] if not file.ended]
        if lost:
            text = (
                "expected an end marker, found the end of the file: examples at its end may be lost, which moves those of later "
                'files. Copy the file again, or open the dataset with incomplete="skip", which leaves later files out'
            )
            faults.add(*(TruncatedFileError(text, path=file.path) for file in lost))

    def _features(self) -> dict[str, object]:
        """The features from dataset_info.json, or from the schemas of the Arrow files, which repeat them."""
        features = self.info.get("features")
        if isinstance(features, dict):
            return features
        text = self.files[0].metadata.get("huggingface") if self.files else None
        if text is not None:
            try:
                value = parse_json(text, self.files[0].path)
                features = value["info"]["features"]
            except (ActshardError, KeyError, TypeError):
                features = None  # a damaged copy is ignored: types are read from the columns
        return features if isinstance(features, dict) else {}

    def _choose(self, layout: Any) -> None:
        """Finds the columns that are layers, and their rows."""
        columns = self.files[0].columns if self.files else ()
        candidates = [vectors for column in columns if (vectors := vectors_of(column, self.features)) is not None]
        names = [column.name for column in columns]
        if len(set(names)) < len(names):
            raise FormatError("expected columns of different names", path=self.files[0].path)
        deeper = [column.name for column in columns if is_deeper(column)]
        if deeper:
            text = (
                f"columns {', '.join(deeper)} have three or more axes: they are columns, not layers; Dataset.to_parquet(FILE) "
                "writes a file whose columns of three axes are read as (layer, token, dim)"
            )
            self.warnings.append(Remark("layout", text))
        if columns and not candidates:
            raise FormatError(
                f"expected a column of vectors, or of sequences of vectors, found {', '.join(names)}"
                + (f"; {text}" if deeper else ""),
                path=self.path,
            )
        requested_names = named_in(layout, [vectors.column.name for vectors in candidates])
        selection = (
            self._listed_columns(candidates)
            if requested_names is None
            else [vectors for name in requested_names for vectors in candidates if vectors.column.name == name]
        )
        candidates = candidates if selection is None else selection
        rank = rank_of if selection is None else lambda name: 1
        best = max((rank(vectors.column.name) for vectors in candidates), default=0)
        most = max((len(vectors.levels) for vectors in candidates if rank(vectors.column.name) == best), default=0)
        widths: dict[str, int] = {}
        column_pieces: dict[str, list[Piece]] = {}
        failed: list[FormatError] = []
        for vectors in [vectors for vectors in candidates if len(vectors.levels) == most]:
            try:
                column_pieces[vectors.column.name], width = self._pieces(vectors)
            except FormatError as error:
                if vectors.width is not None:
                    raise
                failed.append(error)  # lists of variable length: not a layer if other columns are
            else:
                widths[vectors.column.name] = width or 0
        if failed and not column_pieces:
            raise failed[0]
        kinds = {
            vectors.column.name: kind_of(vectors, widths[vectors.column.name])
            for vectors in candidates
            if vectors.column.name in column_pieces
        }
        chosen = choose(kinds, self.path, rank) if kinds else []
        layers = [vectors for vectors in candidates if vectors.column.name in chosen]
        other_vectors = [vectors for vectors in candidates if vectors.column.name not in chosen]
        if selection is not None and other_vectors:
            odd = ", ".join(vectors.column.name for vectors in other_vectors)
            what = f"expected columns of one kind, size and dtype, found {odd} next to {layers[0].column.name}"
            if requested_names is not None:
                raise ArgumentError(f"layout: {what}")
            raise FormatError(f"field '{OWN}.columns': {what}", path=self.path / "dataset_info.json", code="metadata")
        first = column_pieces[layers[0].column.name] if layers else []
        for vectors in layers:
            pieces = column_pieces[vectors.column.name]
            if all(np.array_equal(a.lengths, b.lengths) for a, b in zip(first, pieces, strict=True)):
                self.layers.append(vectors)
                self.pieces.append(pieces)
            else:
                other_vectors.append(vectors)
        if other_vectors:
            text = left_out(
                [vectors.column.name for vectors in other_vectors], [vectors.column.name for vectors in self.layers]
            )
            self.warnings.append(Remark("layout", text))
        has_sequences = bool(self.layers) and len(self.layers[0].levels) > 1
        if has_sequences and self.info.get(OWN) is None and (masks := masks_not_applied(names)) is not None:
            self.warnings.append(Remark("layout", masks))
        self.d_model = widths[self.layers[0].column.name] if self.layers else 0
        self._check_claims()

    def _pieces(self, vectors: Vectors) -> tuple[list[Piece], int | None]:
        """The rows of a column in all batches, and d_model if there are any."""
        width = vectors.width
        all_pieces: list[Piece] = []
        for file in self.files:
            pieces, width = pieces_of(file, vectors, width)
            all_pieces += pieces
        return all_pieces, width

    def _listed_columns(self, candidates: list[Vectors]) -> list[Vectors] | None:
        """The columns that dataset_info.json lists as layers, if actshard wrote it; else None. Also sets the layers' names."""
        if self.info.get(OWN) is None:
            return None
        fields = Fields(self.info[OWN], self.path / "dataset_info.json", OWN)
        columns, names = fields.value.get("columns"), fields.value.get("layers")
        vectors_by_name = {vectors.column.name: vectors for vectors in candidates}
        if (
            not isinstance(columns, list)
            or not columns
            or not all(isinstance(c, str) and c in vectors_by_name for c in columns)
        ):
            raise fields.error(
                "columns", f"a list of columns of vectors ({', '.join(vectors_by_name) or 'there are none'})"
            )
        if not isinstance(names, list) or len(names) != len(columns) or len(set(columns)) < len(columns):
            raise fields.error("layers", "a layer for every column")
        self.names = dict(zip(columns, stored(names, self.path / "dataset_info.json"), strict=True))
        return [vectors_by_name[name] for name in columns]

    def _check_claims(self) -> None:
        for layer in self.layers:
            feature = self.features.get(layer.column.name)
            dtype = feature.get("dtype") if isinstance(feature, dict) else None
            if isinstance(dtype, str) and dtype != layer.leaf.type:
                text = (
                    f"dataset_info.json declares {layer.column.name} as {dtype}, the Arrow files have {layer.leaf.type}"
                )
                self.warnings.append(Remark("dtype-claim", text))
            shape = feature.get("shape") if isinstance(feature, dict) else None
            if isinstance(shape, list) and shape and shape[-1] not in (None, self.d_model) and self.d_model:
                text = f"dataset_info.json declares shape {show(shape)} of {layer.column.name}, vectors have {self.d_model} values"
                self.warnings.append(Remark("claim", text))

    @property
    def num_examples(self) -> int:
        """Number of rows of the table."""
        return sum(file.rows for file in self.files)

    def counts(self) -> NDArray[np.int64]:
        """Tokens of each example as stored, including examples that are void."""
        parts = [piece.lengths for piece in self.pieces[0]] if self.pieces else []
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def void(self) -> NDArray[np.int64]:
        """Examples that are null in a layer."""
        parts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        for vectors, pieces in zip(self.layers, self.pieces, strict=True):
            first = 0
            null_rows: list[int] = []
            for piece in pieces:
                parts.append(piece.void + first)
                null_rows += (piece.void + first).tolist()
                first += len(piece.lengths)
            if null_rows:
                shown = ", ".join(map(str, null_rows[:_SHOWN])) + (", ..." if len(null_rows) > _SHOWN else "")
                text = (
                    f"{vectors.column.name}: {many(len(null_rows), 'row')} with nulls, read as without tokens: {shown}"
                )
                self.warnings.append(Remark("null-row", text))
        return np.unique(np.concatenate(parts))

    def native(self, options: Options, counts: NDArray[np.int64], void: NDArray[np.int64]) -> Rows | None:
        """The rows; None if there are none."""
        if not self.layers or not self.d_model:
            return None
        vectors = self.layers[0]
        paths = [file.path for file in self.files for _ in file.batches]
        files = [
            (path, piece.start, piece.rows, False, piece.even)
            for pieces in self.pieces
            for path, piece in zip(paths, pieces, strict=True)
        ]
        same = len(counts) > 0 and bool((counts == counts[0]).all())
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
        return Rows.joined(
            files,
            (len(counts), int(counts[0])) if same else ends,
            void=void.tolist(),
            num_groups=len(self.layers),
            width=self.d_model,
            dtype=FLOATS[vectors.leaf.type],
            descr=vectors.dtype,
            io=options.io,
        )

    # -- columns ---------------------------------------------------------------------------------

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns that are not layers."""
        layers = {vectors.column.name for vectors in self.layers}
        return tuple(c.name for c in self.files[0].columns if c.name not in layers) if self.files else ()

    def batches(self, names: Sequence[str], most: int | None = None) -> Iterator[pa.Table]:
        """Reads columns batch by batch, until ``most`` examples are read or the dataset ends."""
        import pyarrow as pa

        unknown = [name for name in names if name not in self.column_names]
        if unknown:
            raise NotStoredError(
                f"has no column {unknown[0]!r}; columns are {', '.join(self.column_names) or 'none'}", path=self.path
            )
        read = 0
        for file in self.files:
            columns = {column.name: column for column in file.columns}
            for batch in file.batches:
                if most is not None and read >= most:
                    return
                read += batch.rows
                yield pa.table({name: file.array(batch, columns[name]) for name in names})

    def columns(self, names: Sequence[str], most: int | None = None) -> pa.Table:
        """Reads columns of all examples, or of the first ones."""
        import pyarrow as pa

        parts = list(self.batches(names, most))
        if not parts:
            types = {column.name: pa_type(column) for column in self.files[0].columns} if self.files else {}
            return pa.table({name: pa.array([], types[name]) for name in names})
        table = pa.concat_tables(parts)
        return table if most is None else table.slice(0, most)

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        counts, void = self.counts(), self.void()
        rows = self.native(options, counts, void)
        counts[void] = 0
        same = len(counts) > 0 and bool((counts == counts[0]).all())
        info = {name: self.info[name] for name in ("description", "homepage", "license") if self.info.get(name)}
        n = self.num_examples
        split = self.state.value.get("_split")
        layers = tuple(self.names.get(vectors.column.name, vectors.column.name) for vectors in self.layers)
        return Contents(
            format="hf_arrow",
            path=self.path.place,
            metadata={**self.info, **{k: v for k, v in self.state.value.items() if k != "_data_files"}},
            layers=layers if rows is not None else (),
            d_model=self.d_model,
            dtype=self.layers[0].dtype if self.layers else np.dtype(np.float32),
            num_examples=n,
            token_counts=counts.copy if len(counts) == n else lambda: np.zeros(n, np.int64),
            rows=rows,
            column_names=self.column_names,
            columns=self.columns,
            head_columns=self.columns,
            column_batches=self.batches,
            files=_paths([file.path for file in self.files]),
            absence=self.absence,
            model=model if isinstance(model := self.info.get("model"), str) else None,
            provenance={**info, **({"split": split} if isinstance(split, str) else {})},
            warnings=tuple(self.warnings),
            tokens_each=int(counts[0]) if same else None,
            one_row_each=True if self.layers and len(self.layers[0].levels) == 1 and not len(void) else None,
        )


def _paths(files: list[Location]) -> Callable[[], list[Any]]:
    return lambda: [file.place for file in files]


def _open_all(paths: Sequence[Location]) -> list[StreamFile]:
    with ThreadPoolExecutor(_WORKERS) as pool:
        return list(pool.map(_open_file, paths))


def _open_file(path: Location) -> StreamFile:
    if not path.exists():
        raise MissingFileError("expected a data file that state.json lists, found nothing", path=path)
    return StreamFile.of(path)


def open(path: Location, options: Options) -> Contents:
    """Reads state.json, dataset_info.json, the headers of all batches and the offsets of their rows, but no values."""
    return Directory(path, layout=options.layout, skips_incomplete=options.skip_incomplete).contents(options)


# Checks of Arrow directories


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks all headers, the offsets of every batch, all other columns, and the counts in dataset_info.json."""
    directory = report.faults.parse(root, lambda: Directory(root, report.faults, report.layout))
    if directory is None:
        return
    contents = directory.contents(Options.of(root))
    report.count("files", len(directory.files))
    if root.lists:
        listed = {file.path.name for file in directory.files} | {file.name for file in directory.absence.files}
        for entry in root.entries("data-*.arrow"):
            if entry.name not in listed:
                report.add("unlisted-file", root / entry.name, "an Arrow file that state.json does not list")
    _check_offsets(directory, contents.rows, report, tell)
    for number, name in enumerate(directory.column_names):
        tell("columns", number, len(directory.column_names))
        with report.noting(root):
            for _ in directory.batches([name]):
                pass
    splits = directory.info.get("splits")
    split = directory.state.value.get("_split")
    declared: object = splits.get(split) if isinstance(splits, dict) else None
    n = declared.get("num_examples") if isinstance(declared, dict) else None
    if type(n) is int and n != directory.num_examples:
        field = f"field 'splits.{split}.num_examples'"
        report.add(
            "count-claim", root / "dataset_info.json", n, f"{directory.num_examples}, as in the Arrow files", field
        )


def _check_offsets(directory: Directory, rows: Any, report: Report, tell: Tell) -> None:
    """Reads a row of every batch, which checks all offsets of its lists."""
    counts = directory.counts()
    if rows is None:
        return
    first = 0
    void = set(directory.void().tolist())
    batches = [(file.path, batch.rows) for file in directory.files for batch in file.batches]
    for number, (path, n) in enumerate(batches):
        tell("batches", number, len(batches))
        filled = next((e for e in range(first, first + n) if counts[e] > 0 and e not in void), None)
        for group in range(len(directory.layers)) if filled is not None else ():
            with report.noting(path):
                rows.gather(group, filled, 0, None, None)
        first += n
