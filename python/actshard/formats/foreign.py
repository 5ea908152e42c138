"""Files of other programs that no format reads: what they are, and how to get at what they contain."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from actshard.base.errors import ActshardError, FormatError, TruncatedFileError
from actshard.base.location import Location
from actshard.base.storage import Entry


class FileKind(NamedTuple):
    """A kind of files: its name, and what to do to read them."""

    name: str
    remedy: str


class FolderKind(NamedTuple):
    """A kind of folders.

    Attributes:
        patterns: names that a folder must all have; the last one names it.
        kind: what it is.
        is_common: whether such files also lie next to datasets, such as logs.
    """

    patterns: tuple[str, ...]
    kind: FileKind
    is_common: bool = False


def _written_again(loop: str) -> str:
    return f"{loop}, and write what it yields with actshard.create"


PAGE = "a web page"
_CAPTURED = "actshard.capture runs a model, and writes its activations"
_LANCE = FileKind("a dataset of Lance", _written_again("iterate over lance.dataset(FOLDER).to_batches()"))

_ZARR_ARRAY = FileKind(
    "of Zarr, but not a dataset with arrays/activations",
    "numpy.save(FILE, zarr.open(FOLDER)[:]) writes the values of one array to a .npy file, which a layout.toml describes",
)
_FOLDERS: tuple[FolderKind, ...] = (
    FolderKind(
        (".metadata", "*.distcp"),
        FileKind(
            "a distributed checkpoint of torch",
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, FILE) writes a .pt file",
        ),
    ),
    FolderKind(
        ("index.json", "*.mds*"),
        FileKind(
            "a dataset of MosaicML Streaming (MDS)",
            _written_again("iterate over streaming.StreamingDataset(local=FOLDER)"),
        ),
    ),
    FolderKind(
        ("index.json", "chunk-*.bin*"),
        FileKind("a dataset of LitData", _written_again("iterate over litdata.StreamingDataset(FOLDER)")),
    ),
    FolderKind(("*.lance",), _LANCE),
    FolderKind(("_versions",), _LANCE),
    FolderKind(
        ("refs", "snapshots", "manifests"),
        FileKind(
            "a repository of Icechunk", "zarr.copy_all(zarr.open_group(SESSION.store), GROUP) writes a Zarr group"
        ),
    ),
    FolderKind(
        ("*.tar",),
        FileKind(
            "an archive, perhaps of WebDataset",
            f"tar -xf FILE, or {_written_again('iterate over webdataset.WebDataset(PATHS)')}",
        ),
        is_common=True,
    ),
    FolderKind(
        ("*.b2nd",),
        FileKind(
            "an array of Blosc2",
            "numpy.save(FILE, blosc2.open(PATH)[:]) writes a .npy file, which a layout.toml describes",
        ),
    ),
    FolderKind((".zarray",), _ZARR_ARRAY),
    FolderKind(("zarr.json",), _ZARR_ARRAY),
    FolderKind(
        ("*.tfrecord*",),
        FileKind("records of TensorFlow", _written_again("iterate over tf.data.TFRecordDataset(PATHS)")),
    ),
    FolderKind(
        ("*.array_record*",),
        FileKind("an ArrayRecord", _written_again("iterate over grain.sources.ArrayRecordDataSource(PATHS)")),
    ),
    FolderKind(("adapter_config.json",), FileKind("weights of an adapter (PEFT), not activations", _CAPTURED)),
    FolderKind(
        ("cfg.json", "sae*.safetensors"), FileKind("weights of a sparse autoencoder, not activations", _CAPTURED)
    ),
    FolderKind(("config.json", "model*.safetensors"), FileKind("weights of a model, not activations", _CAPTURED)),
    FolderKind(("config.json", "pytorch_model*.bin"), FileKind("weights of a model, not activations", _CAPTURED)),
    FolderKind(("zero_pp_rank_*",), FileKind("a checkpoint of DeepSpeed, not activations", _CAPTURED)),
    FolderKind(("_CHECKPOINT_METADATA",), FileKind("a checkpoint of Orbax, not activations", _CAPTURED)),
    FolderKind(("checkpoint", "*.index"), FileKind("a checkpoint of TensorFlow, not activations", _CAPTURED)),
    FolderKind(("events.out.tfevents*",), FileKind("logs of TensorBoard", "they contain no activations"), True),
    FolderKind(("*.jsonl*",), FileKind("lines of JSON", _written_again("read each line with json.loads")), True),
    FolderKind(("*.csv",), FileKind("a table as text", _written_again("read it with pandas.read_csv")), True),
    FolderKind(("*.txt",), FileKind("text, not activations", _CAPTURED), True),
    FolderKind(
        ("*.json",), FileKind("JSON", f"lists of numbers: {_written_again('read them with json.load')}"), is_common=True
    ),
    FolderKind((".git",), FileKind("a git repository", "name the folder of the dataset in it"), is_common=True),
    FolderKind(("*.py",), FileKind("a program", "name the folder that it writes"), is_common=True),
)
"""What a folder is by the names in it; the first that fits."""


def _starts(*beginnings: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(beginnings)


def _is_zip_of(pattern: bytes) -> Callable[[bytes], bool]:
    """A zip archive whose first entry has such a name, which begins at byte 30."""
    return lambda data: data.startswith(b"PK\x03\x04") and re.match(pattern, data[30:]) is not None


def _is_safetensors(data: bytes) -> bool:
    return data[8:10] in (b'{"', b"{}") and int.from_bytes(data[:8], "little") <= 100_000_000


def _is_text(data: bytes) -> bool:
    """Whether bytes are printable UTF-8; a character may be cut at their end."""
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode() if len(data) < FIRST else data.decode(errors="ignore")
        is_whole = len(text.encode()) >= len(data) - 3
        return bool(data) and is_whole and all(c.isprintable() or c.isspace() for c in text)
    return False


_TEXT = FileKind("text", _written_again("read numbers with numpy.loadtxt"))
_BYTES: tuple[tuple[Callable[[bytes], bool], tuple[str, ...], FileKind], ...] = (
    (
        _starts(b"version https://git-lfs"),
        (),
        FileKind("a pointer of Git LFS", "git lfs pull downloads the file"),
    ),
    (
        lambda data: data.lstrip().lower().startswith((b"<!doctype html", b"<html")),
        (),
        FileKind(
            PAGE,
            "download the file again: a page is what a hub answers without permission, or for another name",
        ),
    ),
    (
        _is_zip_of(rb"[^/]{1,200}/(data\.pkl|\.format_version|version|byteorder)"),
        (".pt", ".pth", ".ckpt", ".bin"),
        FileKind("a zip archive, as torch.save writes", "give it the extension .pt"),
    ),
    (
        _is_zip_of(rb"[^/]{1,200}\.npy"),
        (".npz",),
        FileKind("a zip archive, as numpy.savez writes", "give it the extension .npz"),
    ),
    (
        _is_zip_of(rb"(\[Content_Types\]|xl/|word/|docProps/|_rels/)"),
        (),
        FileKind("a document of Office in a zip archive", _written_again("read it with pandas.read_excel")),
    ),
    (_starts(b"PK\x03\x04"), (), FileKind("a zip archive", "unzip PATH, and open the folder")),
    (_starts(b"7z\xbc\xaf\x27\x1c"), (), FileKind("a 7z archive", "7z x PATH, and open the folder")),
    (_starts(b"Rar!"), (), FileKind("a RAR archive", "unrar x PATH, and open the folder")),
    (_starts(b"\x89HDF\r\n\x1a\n"), (".h5", ".hdf5"), FileKind("HDF5", "give it the extension .h5")),
    (
        _starts(b"MATLAB 7.3"),
        (".h5", ".hdf5"),
        FileKind("a MATLAB file of version 7.3, which is HDF5", "give it the extension .h5"),
    ),
    (
        _starts(b"MATLAB 5.0"),
        (),
        FileKind("a MATLAB file", 'numpy.savez("acts.npz", **scipy.io.loadmat(FILE)) writes a .npz file'),
    ),
    (_starts(b"\x93NUMPY"), (".npy",), FileKind("a numpy array", "give it the extension .npy")),
    (_starts(b"PAR1"), (".parquet",), FileKind("parquet", "give it the extension .parquet")),
    (
        lambda data: _is_safetensors(data) and b'"locations":' in data and b'"activations":' in data,
        (),
        FileKind("sparse latents of delphi", "actshard.latents.open reads a folder of the files of save_splits"),
    ),
    (_is_safetensors, (".safetensors",), FileKind("a safetensors file", "give it the extension .safetensors")),
    (
        _starts(b"ARROW1", b"FEA1"),
        (),
        FileKind(
            "a Feather file",
            'pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), "data.parquet") writes a parquet file',
        ),
    ),
    (
        _starts(b"ORC"),
        (),
        FileKind(
            "an ORC table",
            'pyarrow.parquet.write_table(pyarrow.orc.read_table(FILE), "data.parquet") writes a parquet file',
        ),
    ),
    (
        _starts(b"Obj\x01"),
        (),
        FileKind("an Avro file", _written_again("iterate over fastavro.reader(open(FILE, 'rb'))")),
    ),
    (
        lambda data: data[257:262] == b"ustar",
        (),
        FileKind(
            "a tar archive (WebDataset?)",
            f"tar -xf PATH, or {_written_again('iterate over webdataset.WebDataset(PATH)')}",
        ),
    ),
    (_starts(b"\x28\xb5\x2f\xfd"), (), FileKind("compressed by zstd", "zstd -d PATH")),
    (
        _starts(b"\x1f\x8b"),
        (".pt.gz", ".pth.gz", ".ckpt.gz", ".bin.gz", ".pkl.gz", ".ckpt"),
        FileKind("compressed by gzip", "gzip -dk PATH"),
    ),
    (_starts(b"\xfd7zXZ\x00"), (), FileKind("compressed by xz", "xz -dk PATH")),
    (_starts(b"BZh"), (), FileKind("compressed by bzip2", "bzip2 -dk PATH")),
    (_starts(b"\x04\x22\x4d\x18"), (), FileKind("compressed by lz4", "lz4 -dk PATH")),
    (
        _starts(b"SQLite format 3\x00"),
        (),
        FileKind("a database of SQLite", _written_again("iterate over the rows with sqlite3")),
    ),
    (
        _starts(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*"),
        (),
        FileKind("an image, not activations", _CAPTURED),
    ),
    (
        lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP",
        (),
        FileKind("an image, not activations", _CAPTURED),
    ),
    (
        lambda data: data[4:8] == b"ftyp" or (data[:4] == b"RIFF" and data[8:12] in (b"WAVE", b"AVI ")),
        (),
        FileKind("a recording, not activations", _CAPTURED),
    ),
    (_starts(b"%PDF-"), (), FileKind("a PDF document, not activations", _CAPTURED)),
    (_starts(b"GGUF"), (), FileKind("weights of a model (GGUF), not activations", _CAPTURED)),
    (
        lambda data: data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"),
        (".pkl", ".pt", ".pth", ".ckpt", ".bin"),
        FileKind(
            "a pickle, which runs code when it is loaded",
            "pickle.load it only if you trust its source, and write the arrays with actshard.create",
        ),
    ),
    (_is_text, (".json", ".jsonl", ".toml", ".csv", ".tsv", ".yaml", ".yml"), _TEXT),
)
"""A test of a file's first bytes, the extensions under which it is read or is no surprise, and what it is."""

_EMPTY = FileKind("an empty file", "its program was stopped, or wrote nothing: write it again")
_NAMED = (".npy", ".npz", ".safetensors", ".parquet", ".arrow", ".h5", ".hdf5", ".pt", ".pth", ".pkl", ".json", ".toml")
"""Extensions that name a kind of files. Others, such as chunks, may have any bytes."""
_TARS = re.compile(r"\.(tar\.[a-z0-9]+|t[gbx]z|tbz2)$", re.IGNORECASE)
_HEAD = 8
"""An error of a file of another kind is at one of its first bytes."""
FIRST = 512
"""Bytes that the tests look at."""
_LOOKED_AT = 4
"""Files whose first bytes are read, and folders whose names are listed."""


def kind_of_bytes(name: str, data: bytes) -> FileKind | None:
    """What a file is by its first bytes; None if it is unknown, or if this is its extension."""
    for is_kind, endings, kind in _BYTES:
        if is_kind(data):
            if name.lower().endswith(endings):
                return None
            if kind.name.startswith("compressed") and _TARS.search(name):
                return kind._replace(name=f"a tar archive {kind.name}", remedy="tar -xf PATH, and open the folder")
            return kind
    return None


def tell(error: ActshardError) -> None:
    """Adds the kind of a file to an error about it, if its first bytes are those of another kind."""
    if not isinstance(error, FormatError | TruncatedFileError) or error.path is None or (error.offset or 0) > _HEAD:
        return
    file = Location.at(error.path)
    kind = _kind_of_file(file) if file.name.lower().endswith(_NAMED) else None
    if kind is None or kind is _EMPTY:  # which the error names
        return
    text = _text_of(kind, file)
    if text not in error.detail:
        error.detail += f". It is {text}"


def explained(root: Location, entries: Sequence[Entry] | None, *, sure: bool) -> list[str]:
    """What lies at a path by the names and first bytes of its files, one text each; empty if they are not known.

    Looks into the first folders of a folder without known files, too.

    Args:
        root: a file, or a folder.
        entries: the entries of a folder; None for a file.
        sure: leave out what also lies next to datasets.
    """
    names = [root.name] if entries is None else [entry.name for entry in entries]
    if text := _named(names, is_common=False):
        return [text]
    files = [root] if entries is None else [root / entry.name for entry in entries if entry.kind == "file"]
    described: dict[str, str] = {}
    for file in files[:_LOOKED_AT]:
        kind = _kind_of_file(file)
        if kind is not None and kind not in (_TEXT, _EMPTY):
            described.setdefault(kind.name, f"{file.name}: {_text_of(kind, file)}")
    if described:
        return list(described.values())
    text = None if sure else _named(names, is_common=True)
    if text is None and entries is None:  # next to others, a text or an empty file does not name a folder
        text = _describe_file(root)
        return [f"{root.name}: {text}"] if text else []
    return [text] if text else list(_below(root, entries or ()))


def _named(names: Sequence[str], *, is_common: bool) -> str | None:
    """What a folder is by its names."""
    for folder_kind in _FOLDERS:
        matches = [fnmatch.filter(names, pattern) for pattern in folder_kind.patterns]
        if folder_kind.is_common == is_common and all(matches):
            kind = folder_kind.kind
            return f"{matches[-1][0]}: {kind.name}, which actshard does not read: {kind.remedy}"
    return None


def _below(root: Location, entries: Sequence[Entry]) -> Iterator[str]:
    """What the first folders are."""
    for folder in [root / entry.name for entry in entries if entry.kind == "folder"][:_LOOKED_AT]:
        with contextlib.suppress(ActshardError):
            inner = folder.entries()
            if not all(entry.kind == "folder" for entry in inner):
                yield from (f"{folder.name}/{text}" for text in explained(folder, inner, sure=True))


def _text_of(kind: FileKind, file: Location) -> str:
    return f"{kind.name}: {kind.remedy.replace('PATH', file.name)}"


def _describe_file(file: Location) -> str | None:
    """What a file is, and what to do; None if it is unknown, or if this is its extension."""
    kind = _kind_of_file(file)
    return None if kind is None else _text_of(kind, file)


def _kind_of_file(file: Location) -> FileKind | None:
    with contextlib.suppress(ActshardError):
        size = file.regular().size
        return _EMPTY if size == 0 else kind_of_bytes(file.name, file.read(0, min(FIRST, size)))
    return None
