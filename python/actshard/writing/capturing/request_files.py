"""Request files of vLLM's ``ExampleHiddenStatesConnector``: :func:`fold` makes one dataset of them, also while they are written.

The connector writes ``{request}.safetensors`` with the states and token ids of a request, and holds a lock on
``{request}.safetensors.lock`` until the file is whole. Its folders are those of one format, whose parser reads the files here.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ChangedInputError,
    FormatError,
    MissingFileError,
    UnfinishedError,
    boundary,
    from_os,
    warn,
)
from actshard.base.layers import Layer, one
from actshard.base.location import Location
from actshard.base.work import write_bytes_at_once
from actshard.formats import registry
from actshard.formats.contents import Options
from actshard.formats.speculators.read import StatesFile, contents_of_requests, is_being_written, states_of
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.writing import Writer
from actshard.writing.creating import Creation, open_writer
from actshard.writing.existing import Fitting

REQUEST, IDS = "request", "input_ids"
"""Columns: the file's name without its ending, and a token id per stored row."""
_NOTES = "request-files.jsonl"
"""File in the working folder: the files whose examples were appended, in their order. A line per file."""
_BLOCK = 256 << 20
"""Bytes of states that are read and committed together, unless a single file has more."""
_PAUSE = 0.5
"""Seconds between two looks at the folder."""
_ENDING = ".safetensors"
_SHOWN = 3


class Leftover(NamedTuple):
    """A request file that is not in the dataset.

    Attributes:
        request: the request: the file's name without its ending.
        reason: why it is not.
    """

    request: str
    reason: str

    def __str__(self) -> str:
        return f"{self.request}: {self.reason}"


@dataclass(frozen=True)
class Fold:
    """The result of :func:`fold`, and its progress.

    Attributes:
        path: path of the dataset.
        examples: number of its examples, including those of earlier calls.
        resumed_at: number of examples that earlier calls had committed.
        finished: whether the dataset is finished; if not, ``resume=True`` continues.
        leftovers: request files that are not in the dataset: being written, truncated, or of another shape.
    """

    path: Path
    examples: int
    resumed_at: int
    finished: bool
    leftovers: tuple[Leftover, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        return {
            "path": str(self.path),
            "examples": self.examples,
            "resumed_at": self.resumed_at,
            "finished": self.finished,
            "leftovers": [item._asdict() for item in self.leftovers],
        }


def fold(
    requests: str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: str = registry.DEFAULT_FORMAT,
    *,
    layers: Sequence[Layer] | None = None,
    dtype: DTypeLike | None = None,
    follow: bool = False,
    idle: float | None = None,
    incomplete: Literal["wait", "skip"] = "wait",
    resume: bool = False,
    delete: bool = False,
    metadata: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    progress: Callable[[Fold], object] | None = None,
) -> Fold:
    """Makes a dataset of vLLM's request files. Committed examples survive a kill.

    Each request is an example: its states ``(layers, tokens, d_model)`` in the stored dtype, and the columns ``request``, the
    file's name without its ending, and ``input_ids``. Whole files are folded in the order of their names, in which numbers count as
    numbers; with ``follow``, those that became whole since the last look. The column has the request of each example.

    A file is whole if no writer holds its lock, and its size is that of its header. Files that are not are looked at again:
    they are never skipped unless ``incomplete="skip"`` finishes the dataset without them.

    Args:
        requests: a local folder of ``{request}.safetensors`` files.
        path: folder of the dataset.
        format: a format that :func:`actshard.create` writes, with columns.
        layers: names of the layers, in the order of the files; the last one is the state before the final norm. Default: 0, 1, ...,
            ``"last"``.
        dtype: dtype to store; values that are too large for it are an error. Default: that of the files.
        follow: wait for further files, until Ctrl-C, which leaves an unfinished dataset that ``resume=True`` continues; or until no
            file became whole for ``idle`` seconds.
        idle: seconds after which ``follow`` ends; None: never.
        incomplete: what to do at the end about files that are not whole, or do not fit: ``"wait"`` leaves the dataset unfinished,
            and ``"skip"`` finishes it without them, and warns of them.
        resume: continue after the committed examples; accept a finished dataset.
        delete: delete request files once their examples are committed; the last of them when the dataset is finished.
        metadata: values that the format stores.
        options: options of the format.
        progress: called after each look at the folder.

    Returns:
        A :class:`Fold`.

    Raises:
        ArgumentError: invalid arguments, a format without columns, or ``layers`` of another number than the files have.
        UnfinishedError: there is no whole file, or ``path`` contains an unfinished dataset and ``resume`` is False.
        ExistsError: ``path`` contains another dataset.
        ChangedInputError: a file changed after its example was committed.
        MissingFileError: there is no folder ``requests``.
    """
    _arguments.check_progress(progress)
    if not _arguments.is_one_of(incomplete, ("wait", "skip")):
        raise ArgumentError(f'incomplete: expected "wait" or "skip", found {incomplete!r:.80}')
    if idle is not None and not (isinstance(idle, int | float) and not isinstance(idle, bool) and idle >= 0):
        raise ArgumentError(f"idle: expected seconds of at least 0, found {idle!r:.80}")
    folder = Location.at(_arguments.local_path(requests, "requests"))
    if folder.kind() != "folder":
        raise MissingFileError("expected a folder of request files, found none", path=folder)
    names = None if layers is None else tuple(one(layer) for layer in layers)
    work = _Folding(_RequestFolder(folder), names, incomplete == "skip", _arguments.switch(delete, "delete"), progress)
    metadata = None if metadata is None else dict(metadata)
    return work.run(
        # Layers and width are those of the first file.
        Creation(_arguments.local_path(path), format, (), 0, dtype, metadata, options=dict(options or {})),
        _arguments.switch(resume, "resume"),
        _arguments.switch(follow, "follow"),
        float("inf") if idle is None else idle,
    )


# -- request files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RequestFile:
    """A file of a request as it lies in the folder.

    Attributes:
        name: its name.
        size, modified: its bytes, and its modification time in nanoseconds.
    """

    name: str
    size: int
    modified: int

    @property
    def request(self) -> str:
        return self.name.removesuffix(_ENDING)


class _RequestFolder:
    """A folder of request files, some of which are being written."""

    def __init__(self, place: Location) -> None:
        self.place, self.path = place, Path(str(place))

    def files(self) -> list[_RequestFile]:
        """All request files, in the order of their names."""
        names = [entry.name for entry in self.place.entries(f"*{_ENDING}") if not entry.name.startswith(".")]
        stats = [(name, (self.place / name).found()) for name in sorted(names, key=_by_number)]
        # A file without state was renamed or removed since it was listed.
        return [_RequestFile(name, stat.size, stat.modified) for name, stat in stats if stat is not None]

    def states(self, file: _RequestFile) -> StatesFile | str:
        """The states of a whole file, or the reason why it is not."""
        if is_being_written(self.place / f"{file.name}.lock"):
            return "it is being written"
        try:
            return states_of(self.place / file.name, None)
        except ActshardError as error:
            return error.detail

    def remove(self, file: _RequestFile) -> None:
        """Removes a file, and its lock."""
        for name in (f"{file.name}.lock", file.name):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                raise from_os(error, self.path / name, "remove") from error


def _by_number(name: str) -> tuple[object, ...]:
    """The key of a name, in which digits are compared as numbers."""
    return (*((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)), (-2, name))


# -- folding ---------------------------------------------------------------------------------------------------------


class _Folding:
    """Folds the files of a folder into a dataset."""

    def __init__(
        self,
        folder: _RequestFolder,
        layers: tuple[Layer, ...] | None,
        skips: bool,
        deletes: bool,
        progress: Callable[[Fold], object] | None,
    ) -> None:
        self._folder, self._layers, self._skips, self._deletes = folder, layers, skips, deletes
        self._progress = progress
        self._shape: tuple[int, int, str] | None = None
        self._done: dict[str, _RequestFile] = {}
        self._deleted: set[str] = set()
        self._leftovers: tuple[Leftover, ...] = ()

    def run(self, creation: Creation, resume: bool, follow: bool, idle: float) -> Fold:
        path = Path(creation.path)
        last = time.monotonic()
        writer: Writer | None = None
        resumed_at = 0
        try:
            while True:
                whole = self._look()
                if writer is None and (whole or self._shape):
                    writer = self._open(creation, resume)
                    resumed_at = writer.committed
                    if writer.complete:
                        return Fold(Path(writer.path), len(writer), resumed_at, True)
                    self._read_notes(writer)
                    whole = self._look()
                if writer is not None and whole:
                    self._append(writer, whole)
                    last = time.monotonic()
                state = Fold(path, 0 if writer is None else len(writer), resumed_at, False, self._leftovers)
                if self._progress is not None:
                    self._progress(state)
                if not follow or time.monotonic() - last >= idle:
                    break
                time.sleep(_PAUSE)
            return self._finish(writer, state)
        except KeyboardInterrupt:
            if not follow or writer is None:
                raise
            examples = writer.committed
            writer.abort()
            return Fold(path, examples, resumed_at, False, self._leftovers)
        finally:
            if writer is not None:
                writer.abort()  # nothing after a finished dataset

    def _finish(self, writer: Writer | None, state: Fold) -> Fold:
        if writer is None:
            named = "; ".join(map(str, state.leftovers[:_SHOWN])) or "none"
            raise UnfinishedError(f"expected request files that are whole, found {named}", path=self._folder.path)
        if state.leftovers and not self._skips:
            return state
        writer.close()
        self._delete(all=True)
        if state.leftovers:
            count = len(state.leftovers)
            warn(
                f"{writer.path}: {many(count, 'request file')} {'is' if count == 1 else 'are'} not in the dataset: "
                f"{'; '.join(map(str, state.leftovers[:_SHOWN]))}{'; ...' if count > _SHOWN else ''}",
                code="requests-left-out",
            )
        return replace(state, path=Path(writer.path), finished=True)

    def _look(self) -> list[tuple[_RequestFile, StatesFile]]:
        """Whole files that are not in the dataset; the others become leftovers."""
        whole, leftovers = [], []
        for file in self._folder.files():
            earlier = self._done.get(file.name)
            if earlier is not None:
                if earlier != file:
                    raise ChangedInputError(
                        f"expected {earlier.size} bytes, as when its example was committed, found another file of {file.size} "
                        "bytes: name requests differently, or fold this folder to another dataset",
                        path=self._folder.path / file.name,
                    )
                continue
            states = self._folder.states(file)
            if isinstance(states, str):
                leftovers.append(Leftover(file.request, states))
                continue
            shape = (states.layers, states.width, states.dtype)
            self._shape = self._shape or shape
            if shape != self._shape:
                layers, width, dtype = self._shape
                leftovers.append(
                    Leftover(
                        file.request,
                        f"expected {layers} layers of width {width}, {dtype}, as in the first file, found {states.layers} of "
                        f"{states.width}, {states.dtype}",
                    )
                )
                continue
            whole.append((file, states))
        self._leftovers = tuple(leftovers)
        return whole

    def _open(self, creation: Creation, resume: bool) -> Writer:
        assert self._shape is not None
        count, width, dtype = self._shape
        layers = self._layers or (*range(count - 1), "last")
        if len(layers) != count:
            raise ArgumentError(f"layers: expected {count} names, one of each layer of the files, found {len(layers)}")
        names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        creation = replace(creation, layers=layers, d_model=width, dtype=creation.dtype or names[dtype])
        writer = open_writer(creation, Fitting(), resume=resume, capture={"requests": str(self._folder.place)})
        if not writer.complete and not (writer.stores_column(REQUEST) or writer.stores_column(IDS)):
            writer.abort()
            raise ArgumentError(
                f"format: {creation.format} stores no columns, by which rows are those of a request; choose another format"
            )
        return writer

    def _read_notes(self, writer: Writer) -> None:
        """The files whose examples are committed."""
        assert writer.working_folder is not None
        notes = writer.working_folder / _NOTES
        lines = Location.at(notes).read_utf8().split("\n")[: writer.committed] if notes.exists() else []
        self._done = {(file := _RequestFile(*json.loads(line))).name: file for line in lines}
        if len(self._done) != writer.committed:
            raise FormatError(
                f"expected the names of {writer.committed} request files, found {len(self._done)}; write to another folder",
                path=notes,
            )
        write_bytes_at_once(notes, "".join(f"{line}\n" for line in lines).encode())
        self._delete()

    def _delete(self, *, all: bool = False) -> None:
        """Deletes committed files, if asked: all but the last one, by which a resumed call knows the shape."""
        if not self._deletes:
            return
        for file in list(self._done.values())[: None if all else -1]:
            if file.name not in self._deleted:
                self._folder.remove(file)
                self._deleted.add(file.name)

    def _append(self, writer: Writer, files: Sequence[tuple[_RequestFile, StatesFile]]) -> None:
        """Appends the examples of files, and commits them block by block."""
        assert writer.working_folder is not None
        for block in _blocks(files):
            root = self._folder.place
            paths = [root / file.name for file, _ in block]
            store = Store(
                contents_of_requests(root, paths, replace(Options.of(root), io="pread")),
                io="pread",
                reopen=(open_quietly, (root.place,)),
            )
            states = [
                np.stack(layers)
                for layers in zip(*(store.sequences(range(len(block)), layer) for layer in store.layers), strict=True)
            ]
            ids = store.read_columns([IDS])[IDS]
            columns = {REQUEST: pa.array([file.request for file, _ in block]), IDS: ids}
            notes_path = writer.working_folder / _NOTES
            with boundary(notes_path, "write"), notes_path.open("a", encoding="utf-8") as notes:
                for file, _ in block:
                    notes.write(json.dumps([file.name, file.size, file.modified]) + "\n")
                notes.flush()
                os.fsync(notes.fileno())
            writer.append(
                states, columns={name: value for name, value in columns.items() if writer.stores_column(name)}
            )
            writer.flush()
            self._done |= {file.name: file for file, _ in block}
            self._delete()


def _blocks(files: Sequence[tuple[_RequestFile, StatesFile]]) -> Iterator[list[tuple[_RequestFile, StatesFile]]]:
    block: list[tuple[_RequestFile, StatesFile]] = []
    size = 0
    for file, states in files:
        if block and size + file.size > _BLOCK:
            yield block
            block, size = [], 0
        block.append((file, states))
        size += file.size
    if block:
        yield block
