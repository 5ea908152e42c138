"""DeepSpec target caches: hidden states of a target model, one sequence per example. See ``manifest`` for the files.

An example is a sequence. Layers are the ids of ``target_layer_ids``, then ``"last"``, if last hidden states are stored. Token ids
and masks are per-token columns. Opening reads manifest.json and the sizes of files, no record of the index.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actshard._native import IndexRecords, Rows
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._json import read_json
from actshard.base.codes import Remark
from actshard.base.errors import FormatError, MissingFileError, UnfinishedError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.deepspec.manifest import COLUMNS, MANIFEST, TEMPORARY, Manifest
from actshard.formats.per_token import TokenColumns

_LOOKED_FOR = "a folder with a manifest.json that has target_layer_ids and index_record_size"
LOST = 1 << 61
_FEW = 4096
"""At most this many rank folders of an unfinished cache are examined."""


def detect(path: Location) -> Evidence:
    """Checks for the manifest, or for the temporary folders of a writer that has not finished."""
    if path.kind() != "folder":
        return Evidence(False, _LOOKED_FOR, "a file")
    manifest = path / MANIFEST
    if manifest.kind() != "file":
        if path.lists and _writing(path):
            return Evidence(True, _LOOKED_FOR, f"the {TEMPORARY} folder of an unfinished cache")
        return Evidence(False, _LOOKED_FOR, f"no {MANIFEST}")
    value = read_json(manifest)
    if not isinstance(value, dict) or not {"target_layer_ids", "index_record_size"} <= value.keys():
        return Evidence(False, _LOOKED_FOR, f"another {MANIFEST}", near=True)
    return Evidence(True, _LOOKED_FOR, f"the {MANIFEST} of a target cache")


def _writing(path: Location) -> list[str]:
    """Names of the folders of ranks in an unfinished cache."""
    folder = path / TEMPORARY
    if folder.kind() != "folder":
        return []
    names = [entry.name for entry in folder.entries("rank_*", limit=_FEW)]
    return [name for name in names if (folder / name / "samples.local.idx").kind() == "file"]


def check_whole(path: Location) -> None:
    """Raises UnfinishedError for a cache whose writer did not finish, MissingFileError without a manifest."""
    if (path / MANIFEST).kind() is not None:
        return
    ranks = _writing(path) if path.lists else []
    if ranks:
        open_ranks = [name for name in ranks if (path / TEMPORARY / name / "summary.json").kind() is None]
        state = (
            f"{len(open_ranks)} of {len(ranks)} ranks have not finished" if open_ranks else "all ranks have finished"
        )
        raise UnfinishedError(
            f"expected {MANIFEST}, found {TEMPORARY} of a writer that is running or was interrupted: {state}. DeepSpec cannot "
            "resume it: generate the cache again",
            path=path,
        )
    raise MissingFileError(f"expected {MANIFEST}, found nothing", path=path / MANIFEST)


class TargetCache:
    """An opened cache: manifest, sizes, rows.

    Args:
        path: the cache's folder.
        faults: receives the faults of the manifest, and of the sizes of shards and index files.
    """

    def __init__(self, path: Location, faults: Faults = RAISE) -> None:
        check_whole(path)
        self.path = path
        self.manifest = Manifest.of(path, faults)
        path.look_into()
        self.shards = [path / name for name in self.manifest.shard_names]
        self.indexes = [path / name for name in self.manifest.index_names]
        self.sizes: list[int] = []
        """Sizes of shards; :data:`LOST` of a shard with a fault, so that it is one finding, not one per example."""
        for shard in self.shards:
            size = LOST
            with faults.noting(shard):
                size = shard.regular().size
            self.sizes.append(size)
        self.ranks: list[tuple[int, Location]] = []
        """Index files without faults, each with its number."""
        for rank, index in enumerate(self.indexes):
            with faults.noting(index):
                self._check_index(index)
                self.ranks.append((rank, index))

    def _check_index(self, index: Location) -> None:
        size, manifest = index.regular().size, self.manifest
        if size != manifest.index_size():
            raise FormatError(
                f"expected {manifest.index_size()} bytes ({manifest.num_examples} records of {manifest.record_bytes}), "
                f"found {size}",
                path=index,
                code="count-claim",
            )

    def native(self, options: Options) -> tuple[Rows, dict[str, Rows]]:
        """Rows of states, and of each per-token column. All share the index."""
        manifest = self.manifest
        index = IndexRecords(
            self.indexes,
            self.sizes,
            num_examples=manifest.num_examples,
            record_bytes=manifest.record_bytes,
            layers=len(manifest.layer_ids),
            row_bytes=manifest.row_bytes,
            last=manifest.last,
            split=manifest.split,
            io=options.io,
        )
        make = functools.partial(Rows.indexed, self.shards, index, io=options.io)
        states = make(column=None, width=manifest.width, dtype="BF16", descr=NUMPY_BY_NAME["BF16"])
        kinds = (("I32", np.int32), ("U8", np.uint8), ("U8", np.uint8))
        columns = {
            name: make(column=number, width=1, dtype=kind, descr=np.dtype(numpy))
            for number, (name, (kind, numpy)) in enumerate(zip(COLUMNS, kinds, strict=True))
        }
        return states, columns

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        manifest = self.manifest
        rows, columns = self.native(options)
        token_columns = TokenColumns(columns, manifest.num_examples, self.path.place)
        provenance_fields = (
            "version",
            "chat_template",
            "max_length",
            "min_loss_tokens",
            "git_sha",
            "source_jsonl_paths",
        )
        model = manifest.value.get("target_model_name_or_path")
        return Contents(
            format="deepspec",
            path=self.path.place,
            metadata=manifest.value,
            layers=manifest.layers,
            d_model=manifest.width,
            dtype=NUMPY_BY_NAME["BF16"],
            num_examples=manifest.num_examples,
            token_counts=lambda: self._counts(rows),
            rows=rows,
            column_names=token_columns.names,
            token_columns=token_columns.names,
            columns=token_columns.columns,
            head_columns=token_columns.head,
            column_batches=token_columns.batches,
            example_columns=token_columns.some,
            files=lambda: [shard.place for shard in self.shards],
            model=model if isinstance(model, str) else None,
            provenance={name: manifest.value[name] for name in provenance_fields if name in manifest.value},
            warnings=tuple(_repeated(manifest.layer_ids)),
        )

    def _counts(self, rows: Rows) -> NDArray[np.int64]:
        return rows.token_counts()


def _repeated(layers: Sequence[int]) -> list[Remark]:
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if not twice:
        return []
    return [Remark("layout", f"{MANIFEST} lists layers {twice} several times; repeats are named '{twice[0]} (2)'")]


def open(path: Location, options: Options) -> Contents:
    """Reads the manifest and the sizes of files."""
    return TargetCache(path).contents(options)
