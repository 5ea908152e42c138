"""Files of other programs that no format reads: what they are, and how to get at what they contain."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Sequence
from typing import NamedTuple

from actshard.base.errors import ActshardError, FormatError, TruncatedFileError
from actshard.base.location import Location
from actshard.base.storage import Entry


class FileKind(NamedTuple):
    """A kind of files: its name, and what to do to read them."""

    name: str
    remedy: str


def _written_again(loop: str) -> str:
    return f"{loop}, and write what it yields with actshard.create"


_FOLDERS: tuple[tuple[tuple[str, ...], FileKind], ...] = (
    (
        (".metadata", "*.distcp"),
        FileKind(
            "a distributed checkpoint of torch",
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, FILE) writes a .pt file",
        ),
    ),
    (
        ("index.json", "*.mds*"),
        FileKind(
            "a dataset of MosaicML Streaming (MDS)",
            _written_again("iterate over streaming.StreamingDataset(local=FOLDER)"),
        ),
    ),
    (
        ("index.json", "chunk-*.bin*"),
        FileKind("a dataset of LitData", _written_again("iterate over litdata.StreamingDataset(FOLDER)")),
    ),
    (("*.lance",), FileKind("a dataset of Lance", _written_again("iterate over lance.dataset(FOLDER).to_batches()"))),
    (
        ("*.tar",),
        FileKind(
            "an archive, perhaps of WebDataset",
            f"tar -xf FILE, or {_written_again('iterate over webdataset.WebDataset(PATHS)')}",
        ),
    ),
    (("_versions",), FileKind("a dataset of Lance", _written_again("iterate over lance.dataset(FOLDER).to_batches()"))),
    (
        ("*.b2nd",),
        FileKind(
            "an array of Blosc2",
            "numpy.save(FILE, blosc2.open(PATH)[:]) writes a .npy file, which a layout.toml describes",
        ),
    ),
    (
        ("*.tfrecord*",),
        FileKind("records of TensorFlow", _written_again("iterate over tf.data.TFRecordDataset(PATHS)")),
    ),
    (
        ("*.array_record*",),
        FileKind("an ArrayRecord", _written_again("iterate over grain.sources.ArrayRecordDataSource(PATHS)")),
    ),
    (
        ("*.jsonl*",),
        FileKind("lines of JSON", _written_again("read each line with json.loads")),
    ),
    (("*.csv",), FileKind("a table as text", _written_again("read it with pandas.read_csv"))),
)
"""Patterns of names that a folder must all have, and what it is."""
_OF_ANY_FOLDER = ("*.tar", "*.jsonl*", "*.csv")
"""Patterns of files that also lie next to datasets, such as logs."""

_BYTES: tuple[tuple[Callable[[bytes], bool], tuple[str, ...], FileKind], ...] = (
    (
        lambda data: data.startswith(b"version https://git-lfs"),
        (),
        FileKind("a pointer of Git LFS", "git lfs pull downloads the file"),
    ),
    (
        lambda data: data.lstrip().lower().startswith((b"<!doctype html", b"<html")),
        (".html", ".htm"),
        FileKind(
            "a web page",
            "download the file again: a page is what a hub answers without permission, or for another name",
        ),
    ),
    (
        lambda data: data.startswith(b"PK\x03\x04"),
        (".pt", ".pth", ".ckpt", ".npz", ".bin", ".zip"),
        FileKind(
            "a zip archive, as torch.save and numpy.savez write", "give it the extension .pt or .npz, or unzip it"
        ),
    ),
    (
        lambda data: data.startswith(b"\x89HDF\r\n\x1a\n"),
        (".h5", ".hdf5"),
        FileKind("HDF5", "give it the extension .h5"),
    ),
    (lambda data: data.startswith(b"\x93NUMPY"), (".npy",), FileKind("a numpy array", "give it the extension .npy")),
    (lambda data: data.startswith(b"PAR1"), (".parquet",), FileKind("parquet", "give it the extension .parquet")),
    (
        lambda data: data.startswith((b"ARROW1", b"FEA1")),
        (".arrow",),
        FileKind(
            "a Feather file",
            'pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), "data.parquet") writes a parquet file',
        ),
    ),
    (
        lambda data: data[257:262] == b"ustar",
        (),
        FileKind(
            "a tar archive (WebDataset?)",
            f"tar -xf PATH, or {_written_again('iterate over webdataset.WebDataset(PATH)')}",
        ),
    ),
    (lambda data: data.startswith(b"\x28\xb5\x2f\xfd"), (), FileKind("compressed by zstd", "zstd -d PATH")),
    (lambda data: data.startswith(b"\x1f\x8b"), (".gz", ".ckpt"), FileKind("compressed by gzip", "gzip -dk PATH")),
    (lambda data: data.startswith(b"\xfd7zXZ\x00"), (), FileKind("compressed by xz", "xz -dk PATH")),
    (lambda data: data.startswith(b"BZh"), (), FileKind("compressed by bzip2", "bzip2 -dk PATH")),
    (
        lambda data: data.startswith(b"SQLite format 3\x00"),
        (),
        FileKind("a database of SQLite", _written_again("iterate over the rows with sqlite3")),
    ),
)
"""A test of a file's first bytes, the extensions under which it is read, and what it is."""

_NAMED = (".npy", ".npz", ".safetensors", ".parquet", ".arrow", ".h5", ".hdf5", ".pt", ".pth", ".pkl", ".json", ".toml")
"""Extensions that name a kind of files. Others, such as chunks, may have any bytes."""
_HEAD = 8
"""An error of a file of another kind is at one of its first bytes."""
_FIRST = 512
"""Bytes that the tests look at."""
_LOOKED_AT = 4
"""Files whose first bytes are read."""


def kind_of_bytes(name: str, data: bytes) -> FileKind | None:
    """What a file is by its first bytes; None if it is unknown, or if this is its extension."""
    kinds = (None if name.lower().endswith(endings) else kind for is_kind, endings, kind in _BYTES if is_kind(data))
    return next(kinds, None)


def tell(error: ActshardError) -> None:
    """Adds the kind of a file to an error about it, if its first bytes are those of another kind."""
    if not isinstance(error, FormatError | TruncatedFileError) or error.path is None or (error.offset or 0) > _HEAD:
        return
    file = Location.at(error.path)
    text = _describe_file(file) if file.name.lower().endswith(_NAMED) else None
    if text is not None and text not in error.detail:
        error.detail += f". It is {text}"


def explained(root: Location, entries: Sequence[Entry] | None, *, sure: bool) -> list[str]:
    """What lies at a path by the names and first bytes of its files, one text each; empty if they are not known.

    Args:
        root: a file, or a folder.
        entries: the entries of a folder; None for a file.
        sure: leave out what also lies next to datasets.
    """
    names = [root.name] if entries is None else [entry.name for entry in entries]
    for patterns, kind in _FOLDERS:
        matches = [fnmatch.filter(names, pattern) for pattern in patterns]
        if all(matches) and not (sure and patterns[-1] in _OF_ANY_FOLDER):
            return [f"{matches[-1][0]}: {kind.name}, which actshard does not read: {kind.remedy}"]
    files = [root] if entries is None else [root / entry.name for entry in entries if entry.kind == "file"]
    texts = {file.name: _describe_file(file) for file in files[:_LOOKED_AT]}
    return [f"{name}: {text}" for name, text in texts.items() if text is not None]


def _describe_file(file: Location) -> str | None:
    """What a file is, and what to do; None if it is unknown, or if this is its extension."""
    with contextlib.suppress(ActshardError):
        kind = kind_of_bytes(file.name, file.read(0, min(_FIRST, file.regular().size)))
        return None if kind is None else f"{kind.name}: {kind.remedy.replace('PATH', file.name)}"
    return None
