"""``Format``: the interface that opening, writing, verifying, merging and converting use for every format.

A format is a folder below ``actshard/formats/``, or another package with an entry point of the group ``actshard.formats`` for a
:class:`Format`. ``rooms`` lists its modules, which are imported on first use, so that detection imports neither writers nor
pyarrow.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from actshard.base.codes import Code
from actshard.base.errors import UnsupportedError
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target

Tell = Callable[[str, int, int], object]
"""Progress callback, called at intervals with (unit, done, total)."""
Room = Literal[
    "detect",
    "open",
    "open_several",
    "begun",
    "target",
    "check",
    "check_listing",
    "check_copy",
    "merger",
    "carrying",
    "guess",
    "save",
    "read_layout",
]
"""Methods of :class:`Format` that ``rooms`` can implement."""


def names_layers(layout: object) -> bool:
    """Whether a ``layout=`` argument only names layers, for formats whose files do not record them."""
    return isinstance(layout, Mapping) and set(layout) == {"layers"}


class Format:
    """Base class of formats. Set ``name`` and list implementations in ``rooms``, or override methods.

    Reading requires only :meth:`detect` and :meth:`open`. The other methods default to "not supported" or "nothing to add".
    """

    name: ClassVar[str]
    """The name that users pass: ``actshard.open(path, format=name)``."""
    description: ClassVar[str] = ""
    """One line, for lists of formats."""
    holds: ClassVar[Literal["activations", "tokens"]] = "activations"
    """Token formats can be verified and listed; :func:`actshard.open` rejects them."""
    order: ClassVar[int] = 100
    """Position in lists of writable formats; ties are sorted by name."""
    records_summed: ClassVar[tuple[str, ...]] = ()
    """Suffixes of files that a deep check reads completely, to compare checksums of the files or of their records."""

    findings: ClassVar[tuple[Code, ...]] = ()
    """Codes that only this format's reader and check use. General codes are in :mod:`actshard.base.codes`."""
    calls: ClassVar[tuple[Code, ...]] = ()
    """Codes of warnings that only this format's writer uses."""

    signs: ClassVar[tuple[str, ...]] = ()
    """Names of files by which :meth:`detect` recognizes a dataset whose folder cannot be listed. Those of all formats are requested
    together before. A format that recognizes no dataset there has none."""
    rare_signs: ClassVar[tuple[str, ...]] = ()
    """Further such names, which are requested if no format recognizes the dataset by the others."""

    rooms: ClassVar[Mapping[Room, str]] = MappingProxyType({})
    """``module:function`` or ``module:Class`` by method name. ``.module`` is relative to the package that declares the format, and
    ``.`` is this package.

    Functions take the method's arguments, with paths as :class:`~actshard.base.location.Location`. ``target``, ``merger`` and
    ``carrying`` are classes.
    """

    def __repr__(self) -> str:
        return f"<actshard format {self.name}>"

    def _in_room(self, room: Room) -> Any:
        """Imports and returns the implementation of a method; None if there is none."""
        module, _, name = self.rooms.get(room, "").partition(":")
        package = next(cls.__module__ for cls in type(self).__mro__ if "rooms" in vars(cls))
        return getattr(importlib.import_module(module, package), name) if module else None

    # -- reading ---------------------------------------------------------------------------------------------------

    def detect(self, path: Path | Location) -> Evidence:
        """Checks whether a path is a dataset of this format.

        Cheap: lists a folder and reads small metadata files. Never raises for a path that is not a dataset of this format.
        """
        detect = self._in_room("detect")
        if detect is None:  # a bug in a plugin; the registry reports it
            raise NotImplementedError(
                f"{type(self).__name__}: expected 'detect' in its rooms or a method detect, found neither"
            )
        evidence: Evidence = detect(Location.at(path))
        return evidence

    def open(self, path: Path | Location, options: Options) -> Contents:
        """Reads and checks the metadata. Returns row layouts and functions that read columns; reads no rows."""
        open = self._in_room("open")
        if open is None:
            raise UnsupportedError(f"{self.name} datasets contain no activations", path=path)
        contents: Contents = open(Location.at(path), options)
        return contents

    def is_given(self, given: object) -> bool:
        """Whether an object of another library is a dataset of this format. Imports nothing."""
        return False

    def save(self, given: object, folder: Path | Location) -> None:
        """Writes an object for which :meth:`is_given` is true to a new folder, which :meth:`open` can open."""
        save = self._in_room("save")
        if save is None:
            raise UnsupportedError(f"{self.name} does not accept objects of other libraries", path=folder)
        save(given, Location.at(folder))

    takes_layout: ClassVar[bool] = False
    """Whether :meth:`open` uses a description of files, ``Options.layout``."""
    describes: ClassVar[tuple[str, ...]] = ()
    """Endings of the files that such a description can describe, in lower case."""
    names_layers: ClassVar[bool] = False
    """Whether :meth:`open` uses names of layers, ``Options.layout`` of ``{"layers": [...]}``, because files do not record them."""

    def takes(self, layout: object) -> bool:
        """Whether :meth:`open` uses a ``layout=`` argument: names of layers, or a description of files."""
        return self.names_layers if names_layers(layout) else self.takes_layout

    def read_layout(self, layout: Any) -> Any:
        """Returns a ``layout=`` argument that does not change when its file or object does. Called before :meth:`open`.

        Plans keep the result as text or as JSON values, and their tasks call this with it.
        """
        read = self._in_room("read_layout")
        if read is not None:
            return read(layout)
        return {"layers": copy.copy(layout["layers"])} if names_layers(layout) else layout

    skips_incomplete: ClassVar[bool] = False
    """Whether :meth:`open` can leave out examples that are not whole (``Options.skip_incomplete``)."""
    needs_whole: ClassVar[str] = "its files do not record which examples they contain"
    """Why it cannot."""
    opens_several: ClassVar[bool] = False
    """Whether :meth:`open_several` is supported."""

    def open_several(self, path: Path | Location, folders: Sequence[Path | Location], options: Options) -> Contents:
        """Opens folders as one dataset, in this order. ``path`` is their common parent."""
        open = self._in_room("open_several")
        if open is None:
            raise UnsupportedError(f"{self.name} does not support opening several datasets as one", path=path)
        contents: Contents = open(Location.at(path), [Location.at(folder) for folder in folders], options)
        return contents

    def begun(self, path: Path) -> list[Path]:
        """Working folders of unfinished datasets below a path. Only for formats that name their own folder."""
        function = self._in_room("begun")
        return [] if function is None else list(function(path))

    def guess(self, path: Path | Location) -> object:
        """Proposes a description of a folder's files, for formats with :attr:`takes_layout`.

        The result has the attributes ``text`` and ``unsure``.
        """
        guess = self._in_room("guess")
        if guess is None:
            raise UnsupportedError(f"{self.name} datasets need no description", path=path)
        return guess(Location.at(path))

    # -- writing ---------------------------------------------------------------------------------------------------

    manifest: ClassVar[tuple[str, ...]] = ()
    """Names of the files by which a dataset is recognized and opened, relative to its folder, as :mod:`fnmatch` patterns; ``*``
    matches ``/`` too. Uploads write them after all other files, in this order: an incomplete dataset does not open."""

    column_files: ClassVar[tuple[str, ...]] = ()
    """Names of the other files of columns and lengths that contain no rows, as patterns of the same kind."""

    @property
    def checked_files(self) -> tuple[str, ...]:
        """The files whose checksums the record of a dataset has."""
        return (*self.manifest, *self.column_files)

    writes: ClassVar[bool] = False
    """Whether :meth:`target` is supported."""

    def target(self) -> type[Target]:
        """The class that writes the format. Its attributes declare what the format supports."""
        target: type[Target] | None = self._in_room("target")
        if target is None:
            raise UnsupportedError(f"{self.name} is a read-only format")
        return target

    # -- verifying -------------------------------------------------------------------------------------------------

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        """Adds all problems of a dataset to a report.

        The caller then opens the dataset and reports its reader's warnings; with ``deep`` it reads every value.
        """
        check = self._in_room("check")
        if check is not None:
            check(Location.at(path), report, tell)

    def check_listing(self, source: Path | Location, names: Collection[str]) -> None:
        """Raises MissingFileError if files that a dataset lists are not among the names that were listed in its folder.

        Args:
            source: the dataset.
            names: names of its files, relative to it.
        """
        check = self._in_room("check_listing")
        if check is not None:
            check(Location.at(source), names)

    def check_copy(self, folder: Path | Location, source: Path | Location, names: Collection[str]) -> None:
        """Compares copied files with the checksums in a dataset; removes all that differ, and raises FormatError for the first.

        Args:
            folder: the copy, or a folder with some of its files.
            source: the dataset that is copied.
            names: names of the files in ``folder``, relative to both.
        """
        check = self._in_room("check_copy")
        if check is not None:
            check(Location.at(folder), Location.at(source), names)

    checks_columns: ClassVar[bool] = True
    """Whether :meth:`check` finds files of columns that cannot be read; if not, those of the first examples are read after it."""

    def remains(self, names: frozenset[str]) -> bool:
        """Whether a folder with entries of these names is a damaged dataset of this format, not recognized by :meth:`detect`."""
        return False

    # -- merging and converting ------------------------------------------------------------------------------------

    def merger(self) -> Merger | None:
        """Merges several datasets into one; None if unsupported."""
        merger: type[Merger] | None = self._in_room("merger")
        return None if merger is None else merger()

    def carrying(self) -> Carrying:
        """Converts columns and metadata to and from other formats."""
        from actshard.formats.carrying import Carrying

        carrying: Carrying = (self._in_room("carrying") or Carrying)()
        return carrying
