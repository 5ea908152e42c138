"""What a format is: the one object through which opening, writing, verifying, merging and converting know it.

A format is a folder below ``actshard/formats/`` or a package of its own that names a :class:`Format` as an entry point of the group
``actshard.formats``. ``rooms`` names its modules, which are imported when they are used: detecting imports no writer and no
pyarrow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from actshard.codes import Code
from actshard.errors import UnsupportedError
from actshard.formats.contents import Contents, Evidence, Options
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target

Tell = Callable[[str, int, int], object]
"""Called with (what, done, in all) now and then."""
Room = Literal["detect", "open", "open_several", "begun", "target", "check", "merger", "carrying"]
"""Methods of a :class:`Format` that a room of it may answer."""


class Format:
    """A format: subclass it, set ``name``, and name in ``rooms`` what the format can do, or override the methods.

    Only :meth:`detect` and :meth:`open` are needed to read. Every other method has a default that means "not supported" or
    "nothing to add".
    """

    name: ClassVar[str]
    """What users type: ``actshard.open(path, format=name)``."""
    description: ClassVar[str] = ""
    """One line for lists of formats."""
    holds: ClassVar[Literal["activations", "tokens"]] = "activations"
    """Formats of tokens are verified and listed; :func:`actshard.open` refuses them."""
    order: ClassVar[int] = 100
    """Position in lists of formats that can be written; equal positions are sorted by name."""

    findings: ClassVar[tuple[Code, ...]] = ()
    """Codes that only this format's reader and check use; general ones are in :mod:`actshard.codes`."""
    calls: ClassVar[tuple[Code, ...]] = ()
    """Codes that only this format's writer warns with."""

    rooms: ClassVar[Mapping[Room, str]] = MappingProxyType({})
    """``module:function`` or ``module:Class`` by the method that it answers; ``.module`` is below the package of the declaration.

    Functions are called with the method's arguments, paths as :class:`~actshard.location.Location`. ``target``, ``merger`` and
    ``carrying`` are classes.
    """

    def __repr__(self) -> str:
        return f"<actshard format {self.name}>"

    def _in_room(self, room: Room) -> Any:
        """The function or class that answers a method; None: there is none. Its module is imported now."""
        module, _, name = self.rooms.get(room, "").partition(":")
        package = next(cls.__module__ for cls in type(self).__mro__ if "rooms" in vars(cls))
        return getattr(importlib.import_module(module, package), name) if module else None

    # -- reading ---------------------------------------------------------------------------------------------------

    def detect(self, path: Path | Location) -> Evidence:
        """Whether a path is a dataset of this format.

        Cheap: lists a folder and reads small metadata files. Never raises for a path that is something else.
        """
        detect = self._in_room("detect")
        if detect is None:  # a fault of a plugin, which the registry reports
            raise NotImplementedError(f"{type(self).__name__}: its rooms name no 'detect', and it has no such method")
        found: Evidence = detect(Location.at(path))
        return found

    def open(self, path: Path | Location, options: Options) -> Contents:
        """Reads and checks the metadata; returns layouts of rows and functions that read columns. Reads no rows."""
        open = self._in_room("open")
        if open is None:
            raise UnsupportedError(f"{self.name} datasets hold no activations", path=path)
        made: Contents = open(Location.at(path), options)
        return made

    opens_several: ClassVar[bool] = False
    """Whether :meth:`open_several` is supported."""

    def open_several(self, path: Path | Location, folders: Sequence[Path | Location], options: Options) -> Contents:
        """Opens folders as one dataset, in this order; ``path`` is the folder above them all."""
        open = self._in_room("open_several")
        if open is None:
            raise UnsupportedError(f"{self.name} datasets are opened one by one", path=path)
        made: Contents = open(Location.at(path), [Location.at(folder) for folder in folders], options)
        return made

    def begun(self, path: Path) -> list[Path]:
        """Working folders below a path in which a writer has begun a dataset, where the format names its own folder."""
        begun = self._in_room("begun")
        return [] if begun is None else list(begun(path))

    # -- writing ---------------------------------------------------------------------------------------------------

    writes: ClassVar[bool] = False
    """Whether :meth:`target` is supported."""

    def target(self) -> type[Target]:
        """The class that writes the format; its attributes say what the format can hold."""
        target: type[Target] | None = self._in_room("target")
        if target is None:
            raise UnsupportedError(f"{self.name} datasets are read, not written")
        return target

    # -- verifying -------------------------------------------------------------------------------------------------

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        """Adds what is wrong with a dataset to a report: every finding, not the first.

        Afterwards the verb opens the dataset and reports its reader's warnings; with ``deep`` it reads every value.
        """
        check = self._in_room("check")
        if check is not None:
            check(Location.at(path), report, tell)

    def remains(self, names: frozenset[str]) -> bool:
        """Whether a folder with entries of these names is a broken dataset of this format that :meth:`detect` refuses."""
        return False

    # -- merging and converting ------------------------------------------------------------------------------------

    def merger(self) -> Merger | None:
        """How several datasets become one; None: not supported."""
        merger: type[Merger] | None = self._in_room("merger")
        return None if merger is None else merger()

    def carrying(self) -> Carrying:
        """How columns and metadata are carried to and from other formats."""
        from actshard.formats.carrying import Carrying

        made: Carrying = (self._in_room("carrying") or Carrying)()
        return made
