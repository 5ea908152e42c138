"""Statistics of layers in files. They are reused as long as the dataset's files do not change.

Next to a dataset ``/data/run``, or in any other folder:

.. code-block:: text

    /data/run.stats/
      layer-5-1f0c2a9b.json            rows, mean norm, histogram of norms, positions, largest rows and columns; layer and selection
      layer-5-1f0c2a9b.safetensors     float64 mean, variance, min, max, std, norm_edges; int64 nan, inf, zeros, norm_counts

The second part of a name is a digest of the layer, of the examples of a filter, and of ``tokens`` and ``ignore_labels``; or, if the
selection has other arguments or the store is joined, of the rows that it resolves to. The JSON has the SHA-256 of the arrays' file,
is written last, and both are renamed into place, so that unfinished or mixed files are not used. ``dataset`` is
:func:`actshard.reading.inputs.fingerprint`: names, sizes and modification times, and ``layout=``.

If the dataset's parent folder is not writable, or the dataset is a URL, the files are in the user's cache folder:
``$ACTSHARD_CACHE-stats/``, or ``~/.cache/actshard-stats/``, in a folder named by the SHA-256 of the dataset's location.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import local_path
from actshard.base._json import read_json
from actshard.base.errors import ActshardError, ArgumentError, FileAccessError, MissingFileError
from actshard.base.layers import Layer, plain
from actshard.base.location import Location, cache_folder
from actshard.base.logs import LOG
from actshard.base.work import make_folder, write_bytes_at_once
from actshard.looking.stats import COUNTS, FLOATS, Stats
from actshard.reading.inputs import fingerprint
from actshard.streaming.readable import Readable, SelectedRows
from actshard.streaming.selection import Selection

VERSION = 3
"""Version 1 had no quantiles of norms by position; version 2 counted rows of NaN as repeated rows."""
_LONG = 10_000_000_000
"""Reading at least this many bytes for statistics logs a warning."""
_LONGEST = 80
_HEADER, _COLUMN = 1 << 23, 64
"""Maximum bytes of a file of arrays: of its header and histogram, and for each column."""
_TYPES = {"F64": "<f8", "I64": "<i8"}


class StatsFile:
    """The files of a layer's statistics over selected rows.

    Attributes:
        dataset: fingerprint of the dataset's files.
        folders: folders that may contain them, the preferred one first.
    """

    def __init__(
        self,
        store: Readable,
        layer: Layer,
        rows: Selection | SelectedRows,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.dataset, self.width, self.layer = fingerprint(store), store.d_model, layer
        chosen = store.contents.chosen
        # Rows are resolved only if necessary: formats without an index decode all shards for the lengths of examples.
        arguments = (
            None if _has_parts(store) else rows.arguments
        )  # concat(special_tokens=) decides which rows are content
        if arguments is None:
            arguments = {"rows": (rows.resolve(store, [layer]) if isinstance(rows, Selection) else rows).digest}
        self.of = {
            "layer": layer,
            **arguments,
            "examples": None if chosen is None else hashlib.sha256(chosen.digest()).hexdigest(),
        }
        key = hashlib.sha256(json.dumps([type(layer).__name__, self.of], sort_keys=True).encode()).hexdigest()
        self.name = f"layer-{re.sub(r'[^A-Za-z0-9_.-]', '_', plain(layer))[:_LONGEST]}-{key[:8]}"
        self.folders = tuple(_folders(store)) if folder is None else (local_path(folder, "save"),)

    def read(self) -> Stats | None:
        """Reads the statistics. None if there are none, if they are of other rows, or if the dataset changed."""
        for folder in self.folders:
            try:
                stats = self._read(folder)
            except MissingFileError:
                continue
            except (ActshardError, LookupError, TypeError, ValueError) as error:
                LOG.info("%s: not used: %r", folder / f"{self.name}.json", error)
                continue
            if stats is not None:
                return stats
        return None

    def _read(self, folder: Path) -> Stats | None:
        file = folder / f"{self.name}.json"
        fields = read_json(file)
        if fields["actshard_stats"] != VERSION or fields["of"] != self.of:
            raise ValueError(f"expected statistics of {self.of}")
        if fields["dataset"] != self.dataset:
            LOG.info("%s: not used: the dataset's files changed since", file)
            return None
        data = Location.at(file.with_suffix(".safetensors")).read(limit=_HEADER + self.width * _COLUMN)
        if hashlib.sha256(data).hexdigest() != fields["sha256"]:
            raise ValueError("the checksum of the arrays differs from the one in the JSON file")
        stats = Stats.of_plain({**fields["stats"], **_arrays(data)})
        if len(stats.mean) != self.width:
            raise ValueError(f"expected {self.width} columns, found {len(stats.mean)}")
        return stats

    def write(self, stats: Stats) -> Path:
        """Saves statistics in the first writable folder. Returns the JSON file.

        Raises:
            FileAccessError: no folder can be written.
        """
        data = _safetensors(stats, plain(self.layer), self.dataset)
        about = {
            "gamma": _number(stats.gamma),
            "median_norm": _number(stats.norms.median),
            "findings": stats.findings(),
        }
        fields = {
            "actshard_stats": VERSION,
            "of": self.of,
            "dataset": self.dataset,
            "sha256": hashlib.sha256(data).hexdigest(),
            "about": about,
            "stats": stats.as_scalars(),
        }
        for folder in self.folders:
            try:
                make_folder(folder)
                write_bytes_at_once(folder / f"{self.name}.safetensors", data)
                write_bytes_at_once(folder / f"{self.name}.json", json.dumps(fields, allow_nan=False).encode())
            except FileAccessError as error:
                LOG.info("statistics are not saved in %s: %s", folder, error.detail)
                refused = error
                continue
            return folder / f"{self.name}.json"
        raise refused


def kept_or_made(
    store: Readable,
    layer: Layer,
    rows: Selection | SelectedRows,
    save: object,
    make: Callable[[], Stats],
) -> Stats:
    """Returns the saved statistics of a layer if they are still valid; otherwise computes and saves them.

    Args:
        store: the dataset.
        layer: one of its layers.
        rows: the rows of the statistics.
        save: True, or a folder.
        make: computes them.

    Raises:
        ArgumentError: the store is joined or paired and ``save`` is not a folder.
        FileAccessError: the folder cannot be written.
    """
    if not isinstance(save, bool | str | os.PathLike):
        raise ArgumentError(f"save: expected True or a folder, found {save!r:.80}")
    stats_file = StatsFile(store, layer, rows, None if isinstance(save, bool) else save)
    if not stats_file.folders:
        raise ArgumentError("save: a joined or paired store has no folder of its own: pass a folder, save=PATH")
    if (saved_stats := stats_file.read()) is not None:
        return saved_stats
    stats = make()
    if fingerprint(store) == stats_file.dataset:
        LOG.info("statistics of layer %s saved: %s", plain(layer), stats_file.write(stats))
    else:
        LOG.warning("%s: statistics are not saved: the dataset's files changed while they were read", store.path)
    return stats


def kept(store: Readable, layer: Layer, rows: Selection | SelectedRows) -> Stats | None:
    """The statistics of a layer's rows that ``store.stats(layer, save=True)`` saved, if they are still valid; otherwise None."""
    return StatsFile(store, layer, rows).read() if not _has_parts(store) else None


def known(store: Readable, layer: Layer, rows: SelectedRows) -> Stats:
    """The saved statistics of a layer's rows; if there are none that are valid, they are computed and not saved."""
    if (stats := kept(store, layer, rows)) is not None:
        return stats
    size = rows.count * store.d_model * store.dtype.itemsize
    LOG.log(
        logging.WARNING if size >= _LONG else logging.INFO,
        "%s: reading %.2f GB of layer %s for its statistics; store.stats(%r, save=True) saves them",
        *(store.path, size / 1e9, plain(layer), layer),
    )
    return store.stats_of(layer, rows)


def kept_in(store: Readable, layer: Layer, rows: Selection | SelectedRows) -> Path | None:
    """The folder that contains saved statistics of a layer's rows, valid or not; None if there is none."""
    stats_file = StatsFile(store, layer, rows)
    return next(
        (folder for folder in stats_file.folders if Location.at(folder / f"{stats_file.name}.json").exists()), None
    )


def _has_parts(store: Readable) -> bool:
    return bool((store.contents.whole or store.contents).parts)


def _folders(store: Readable) -> Iterator[Path]:
    if _has_parts(store):
        return
    location = Location.at(store.path)
    if location.is_local:
        path = Path(store.path).absolute()
        if path != path.parent:
            yield path.with_name(f"{path.name}.stats")
    key = hashlib.sha256(os.fsencode(str(store.path) if not location.is_local else os.path.realpath(store.path)))
    cache = cache_folder()
    yield cache.with_name(f"{cache.name}-stats") / key.hexdigest()


def _safetensors(stats: Stats, layer: str, dataset: str) -> bytes:
    arrays: dict[str, NDArray[np.generic]] = {name: getattr(stats, name) for name in (*FLOATS, *COUNTS)}
    arrays |= {"std": np.sqrt(stats.variance), "norm_edges": stats.norms.edges, "norm_counts": stats.norms.counts}
    header: dict[str, Any] = {"__metadata__": {"layer": layer, "rows": str(stats.rows), "dataset": dataset}}
    offset = 0
    for name, array in arrays.items():
        kind = "F64" if array.dtype == np.float64 else "I64"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join(array.astype(_TYPES[header[name]["dtype"]]).tobytes() for name, array in arrays.items())
    return struct.pack("<Q", len(head)) + head + data


def _arrays(data: bytes) -> dict[str, NDArray[np.generic]]:
    """The arrays of statistics in a file. Raises LookupError, ValueError or FormatError if the file is invalid."""
    tensors, _, start = _native.parse_safetensors(data)
    arrays = {}
    for name, kind, shape, first, end in tensors:
        if name in FLOATS or name in COUNTS:
            if kind != ("F64" if name in FLOATS else "I64") or len(shape) != 1:
                raise ValueError(f"{name}: expected one row of 64-bit values, found {kind} {shape}")
            arrays[name] = np.frombuffer(data[start + first : start + end], _TYPES[kind])
    return arrays


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None  # JSON has no NaN
