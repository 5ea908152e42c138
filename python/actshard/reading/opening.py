"""``actshard.open``: opens a dataset of any format as a store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from numpy.typing import DTypeLike

from actshard import formats
from actshard.base import _arguments
from actshard.base.codes import Remark
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    UnknownFormatError,
    boundary,
    warn,
)
from actshard.base.layers import Layer, several, short
from actshard.base.location import Location, network_io
from actshard.base.logs import LOG
from actshard.base.storage import Remote
from actshard.formats.contents import Options
from actshard.formats.foreign import tell
from actshard.formats.format import Format, names_layers
from actshard.reading.extending import with_added_columns
from actshard.reading.finding import Place, all_existing, detect, existing_anywhere, find_any, find_in, of_tokens
from actshard.reading.store import Store

if TYPE_CHECKING:
    import numpy as np

    from actshard.tokens.cache import TokenCache


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Opening:
    """How a dataset is opened: the arguments of :func:`open`, in their order."""

    format: str | None
    io: str
    decoded_memory: int | str
    checksums: bool
    storage_options: Mapping[str, object] | None
    cache: int | str | os.PathLike[str] | Literal[False] | None
    layout: str | os.PathLike[str] | Mapping[str, object] | None
    incomplete: str

    def __post_init__(self) -> None:
        if not _arguments.is_one_of(self.io, ("auto", "mmap", "pread")):
            raise ArgumentError(f"io: expected 'auto', 'mmap' or 'pread', found {self.io!r}")
        if not _arguments.is_one_of(self.incomplete, ("error", "skip")):
            raise ArgumentError(f"incomplete: expected 'error' or 'skip', found {self.incomplete!r:.80}")

    def arguments(self) -> tuple[object, ...]:
        """The values, for a call of :func:`open_quietly` in another process."""
        return tuple(getattr(self, field.name) for field in fields(self))


@_arguments.check_names
def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str | None = None,
    io: _arguments.Io = "auto",
    *,
    decoded_memory: int | str = "1GiB",
    checksums: bool = True,
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
    incomplete: Literal["error", "skip"] = "error",
) -> Store:
    """Opens a dataset and returns a store.

    Args:
        path: the dataset's folder, a file that represents it (an lmprobe index), or a folder that contains a single dataset;
            ``~`` is expanded. Or the URL of any of these: ``s3://``, ``gs://``, ``az://``, ``https://``,
            ``hf://datasets/ORG/NAME[@REVISION][/PATH]``. A list opens several as one, in that order, like :func:`concat`. A list
            of folders of pickle shards, one per machine, opens as one pickle dataset; so does the folder that contains them, in
            the order of their names.
        format: ``"saev"``, ``"lmprobe"``, ...; None detects it.
        io: ``"mmap"`` memory-maps files: fastest, and supports views. ``"pread"`` never maps: for file systems with slow page
            faults, and for files that may be truncated while they are read. ``"auto"`` is ``"pread"`` on network file systems
            and ``"mmap"`` elsewhere.
        decoded_memory: size of the cache of decoded data (compressed Zarr chunks, ``.pkl.gz`` shards), in bytes or as
            ``"4GiB"``. A larger shard is still decoded as a whole.
        checksums: whether to check files against the checksums that the dataset lists (pickle shards), on first read.
        storage_options: options of a remote store (``{"region": "eu-west-1"}``): names of the object_store crate in any case, or
            fsspec's ``anon``, ``key``, ``secret``, ``token``, ``endpoint_url``, ``profile``, ``client_kwargs``. They override the
            environment.
        cache: size of a disk cache for a remote store (``"50GiB"``), in ``$ACTSHARD_CACHE`` or ``~/.cache/actshard``; or its
            folder, with a limit of 20 GiB. Processes share it; it never exceeds its limit. None or False: no cache. The index of
            a local folder of many files is stored next to the cache (``~/.cache/actshard-index``), except with False.
        layout: a description of the files of a folder (docs/formats/layout.md): the path of a TOML file, its text, or a dict. The
            folder's own ``layout.toml`` needs no argument. ``{"layers": [1, 17, 33]}`` names the layers of formats whose files do
            not record them (specforge, modelopt, angelslim).
        incomplete: what to do about examples whose files are missing, being written or damaged. ``"error"``: opening the dataset or
            reading them raises an error. ``"skip"``: they have no tokens, so that streams leave them out; a warning counts them.
            All others keep their numbers. docs/reading.md has the formats that support it.

    Returns:
        An open :class:`~actshard.Store`. ``store.warnings`` lists problems of the dataset; each is also issued as an
        :class:`~actshard.ActshardWarning`.

    Raises:
        MissingFileError: the path, or a file that the dataset requires, does not exist.
        UnknownFormatError: no format recognises the path, or several do. The message lists what the path contains, the
            datasets below it, and what the nearest formats expect.
        FormatError, UnsupportedError, FileAccessError, NotAFileError: the dataset is damaged, too new, or cannot be read.
    """
    opening = Opening(format, io, decoded_memory, checksums, storage_options, cache, layout, incomplete)
    store = _open_within(path, opening)
    for warning in store.warnings:
        warn(f"{store.path}: {warning}", code=warning.code)
    return store


@_arguments.check_names
def concat(
    parts: Iterable[Store | str | os.PathLike[str]] | Mapping[str, Store | str | os.PathLike[str]],
    *,
    layers: Sequence[Layer] | None = None,
    dtype: DTypeLike | None = None,
    special_tokens: int | None = None,
) -> Store:
    """Returns one store with the examples of several, in order: ``actshard.concat([a, b])``.

    Formats, shards and token counts may differ. Reads no rows. Filtering, splitting, streaming and conversion work as for any
    store. :attr:`Store.table` has the columns of all parts, null where a part lacks one, and a column ``source``
    (``actshard:source`` if a part has such a column). :meth:`Store.origins` returns each example's part and number there.
    ``labels``, ``logits`` and ``router`` are available if every part stores them, in the same shape. Keep stores that you pass
    open while the result is in use.

    Args:
        parts: stores, paths or URLs. A mapping gives each a name for the column ``source``; otherwise names are folder names, or
            paths if these are equal.
        layers: layers of the result, which all parts must have. None: the parts must have equal layers.
        dtype: dtype of the result, if the parts' differ: rows are converted while they are read. Finite values that are too large
            become infinite, with an :class:`~actshard.OverflowWarning`.
        special_tokens: number of special tokens at the start of each example, if the parts' numbers differ; 0 reads all stored
            tokens as content. ``labels`` is None if a part has another number, because labels count from the first content
            token.

    Raises:
        ArgumentError: no parts; d_model, layers or special tokens differ.
        DtypeError: dtypes differ and ``dtype`` is not given.
        Errors of :func:`open`.
    """
    if isinstance(parts, str | bytes | os.PathLike | Store) or not isinstance(parts, Iterable):
        raise ArgumentTypeError(f"concat: expected several stores or paths, found {type(parts).__name__}")
    names = [str(name) for name in parts] if isinstance(parts, Mapping) else None
    if names is not None and len({*names}) < len(names):
        raise ArgumentError(f"concat: expected different names of parts, found {names!r:.200}")
    members = list(parts.values() if isinstance(parts, Mapping) else parts)
    if not members:
        raise ArgumentError("concat: expected at least one store, found none")
    stores = [part if isinstance(part, Store) else open(part) for part in members]
    return _concat(stores, names, None if layers is None else several(layers), dtype, special_tokens)


def _concat(
    stores: Sequence[Store],
    names: Sequence[str] | None,
    layers: tuple[Layer, ...] | None,
    dtype: DTypeLike | None,
    special_tokens: int | None,
) -> Store:
    from actshard.reading.joining import io_of, join

    if names is None:
        stores, names = _flat(stores, layers)
    contents = join(stores, names, layers, dtype, special_tokens)
    return Store(contents, io=io_of(stores), reopen=(_concat, (stores, names, layers, dtype, special_tokens)))


def _flat(stores: Sequence[Store], layers: tuple[Layer, ...] | None) -> tuple[list[Store], list[str]]:
    """Returns stores and their names. Replaces joined stores by their parts, and keeps names that the user gave."""
    from actshard.reading.joining import names_of

    flat: list[Store] = []
    part_names: list[str | None] = []
    for store in stores:
        store.check_open()
        inner = _inner(store, layers)
        flat += inner
        sources = [part["source"] for part in store.metadata["parts"]] if inner != (store,) else [None]
        part_names += sources if sources != names_of(inner) else [None] * len(inner)
    names = [label or fallback for label, fallback in zip(part_names, names_of(flat), strict=True)]
    return flat, names if len({*names}) == len(names) else [f"{name}#{i}" for i, name in enumerate(names)]


def _inner(store: Store, layers: tuple[Layer, ...] | None) -> tuple[Store, ...]:
    """The parts of a joined store, if it was not filtered and its options change nothing; else the store itself."""
    contents, parts = store.contents, store.parts
    plain = contents.chosen is None and not contents.converts
    same = all(part.special_tokens == store.special_tokens for part in parts)
    if layers is None:
        same = same and all(part.layers == store.layers for part in parts)
    else:
        same = same and {*layers} <= {*store.layers}
    return parts if parts and plain and same else (store,)


def open_quietly(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str | None,
    io: str,
    decoded_memory: int | str = "1GiB",
    checksums: bool = True,
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
    incomplete: str = "error",
) -> Store:
    """:func:`open` without warnings, e.g. for workers that reopen their parent's store: pickled stores contain its arguments."""
    return _open_within(
        path, Opening(format, io, decoded_memory, checksums, storage_options, cache, layout, incomplete)
    )


def _open_within(path: Paths, opening: Opening) -> Store:
    with boundary(path, "open"):
        return _opened(path, opening)


def token_cache_at(location: Location, format: str | None) -> TokenCache | None:
    """Opens the token cache at or below a location; None for activations and unknown datasets."""
    if format not in (None, of_tokens()):
        return None
    if format is None:
        try:
            location, format_name = find_any(location)
        except ActshardError:
            return None  # open then raises the error
        if format_name != of_tokens():
            return None
    from actshard.tokens.cache import open_cache

    return open_cache(location.place)


def _opened(path: Paths, opening: Opening) -> Store:
    format, layout, cache = opening.format, opening.layout, opening.cache
    together = all_existing(path, opening.storage_options, cache) if isinstance(path, list | tuple) else None
    if together is not None and not _is_one_dataset(together, format):
        return _concat([_opened(folder, opening) for folder in together], None, None, None, None)
    if together is not None:
        root = _common(together)
        name = format if format is not None else detect(together[0])
    else:
        root = existing_anywhere(path, opening.storage_options, cache)  # type: ignore[arg-type]  # lists were handled above; it raises for other sequences
        described = layout is not None and not names_layers(layout)
        place = Place.of(root, formats.described() if described and format is None else format)
        place.check_finished(format, described=described)
        if format is not None:
            name = format
        elif described:
            name = formats.described()
        else:
            root, name = find_in(place)
    _arguments.one_of(name, formats.names(), "format")
    mode = opening.io if opening.io != "auto" else network_io(root)
    chosen = formats.get(name)
    check_supported(chosen, layout, opening.incomplete, root)
    layout = None if layout is None else chosen.read_layout(layout)
    options = Options(
        mode,
        _arguments.size(opening.decoded_memory, "decoded_memory"),
        _arguments.switch(opening.checksums, "checksums"),
        layout,
        keep=cache is not False,
        skip_incomplete=opening.incomplete == "skip",
    )
    before = _refused(root)
    try:
        if together is None:
            contents = chosen.open(root.place, options)
        else:
            contents = chosen.open_several(root.place, [folder.place for folder in together], options)
        contents = replace(contents, warnings=(*contents.warnings, *contents.absence.remarks()))
        contents = with_added_columns(contents, root)
    except ActshardError as error:
        error.path = error.path or root.place  # some errors of the core name no file
        tell(error)
        raise
    again = replace(opening, format=name, storage_options=None, cache=False if cache is False else None, layout=layout)
    store = Store(
        replace(contents, layout=layout), io=mode, reopen=(open_quietly, (together or root, *again.arguments()))
    )
    LOG.info(
        "%s: opened as %s (%s), io=%s (%s): %d examples, layers %s, %s",
        store.path,
        name,
        "given" if format is not None else "detected",
        mode,
        "given" if opening.io != "auto" else "chosen by file system",
        store.num_examples,
        short(store.layers),
        store.dtype,
    )
    store.warnings = (*store.warnings, *_remarks(store.dtype, sorted(_refused(root) - before)))
    return store


def check_supported(chosen: Format, layout: object, incomplete: str, root: Location) -> None:
    """Raises ArgumentError for an argument that a format does not support."""
    if layout is not None and not chosen.takes(layout):
        raise ArgumentError(f"layout: {chosen.name} datasets describe themselves; leave it out")
    if incomplete == "skip" and not chosen.skips_incomplete:
        supported = ", ".join(name for name in formats.names() if formats.get(name).skips_incomplete)
        reason = f"{chosen.needs_whole}. Copy the missing files, or write the dataset again"
        raise ArgumentError(
            f'incomplete: "skip" is supported for {supported}, not for {chosen.name}: {reason}', path=root
        )


def _remarks(dtype: np.dtype[np.generic], refused: Sequence[str]) -> list[Remark]:
    """Warnings about any dataset: rows that may be bits, and names that a server refused."""
    remarks = []
    if dtype.kind in "iu" and dtype.itemsize == 2:
        text = f"rows are {dtype}, perhaps the bits of bfloat16 numbers, which rows.view(ml_dtypes.bfloat16) reads"
        remarks.append(Remark("integer-rows", text))
    if refused:
        text = f"the server refuses these names, and does not list any; taken as absent: {', '.join(refused)}"
        remarks.append(Remark("not-listed", text))
    return remarks


def _is_one_dataset(folders: Sequence[Location], format: str | None) -> bool:
    """Whether a format opens the folders as one dataset. Otherwise each is opened separately, and the stores are joined."""
    if not folders or len(set(folders)) < len(folders):
        return True  # refused
    try:
        names = {detect(folder) for folder in folders} if format is None else {format}
    except UnknownFormatError:
        return False
    return len(names) == 1 and all(formats.get(name).opens_several for name in names if name in formats.names())


def _refused(root: Location) -> set[str]:
    """Names that a remote store refused to access; they may not exist."""
    return set(root.storage.denied) if isinstance(root.storage, Remote) else set()


def _common(paths: Sequence[Location]) -> Location:
    if not paths:
        raise ArgumentError("path: expected at least one folder, found an empty list")
    if len(set(paths)) < len(paths):
        raise ArgumentError("path: the list contains a folder twice")
    first = paths[0].storage
    if any(path.storage != first for path in paths):
        raise ArgumentError("path: expected folders in one store, found several stores", path=paths[0])
    if first.local:
        return Location.at(os.path.commonpath(paths))
    names = zip(*(path.key.split("/") for path in paths), strict=False)
    same = itertools.takewhile(lambda level: len(set(level)) == 1, names)
    return Location(first, "/".join(level[0] for level in same))
