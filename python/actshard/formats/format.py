"""What a format is: the one object through which opening, writing, verifying, merging and converting know it.

A format is a folder below ``actshard/formats/`` or a package of its own that names a :class:`Format` as an entry point of the group
``actshard.formats``. The methods import their rooms when they are called: detecting a format imports no writer and no pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from actshard.codes import Code
from actshard.errors import UnsupportedError
from actshard.formats.contents import Contents, Evidence, Options

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target

Tell = Callable[[str, int, int], object]
"""Called with (what, done, in all) now and then."""


class Format:
    """A format: subclass it, set ``name``, and override what the format can do.

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

    def __repr__(self) -> str:
        return f"<actshard format {self.name}>"

    # -- reading ---------------------------------------------------------------------------------------------------

    def detect(self, path: Path) -> Evidence:
        """Whether a path is a dataset of this format.

        Cheap: lists a folder and reads small metadata files. Never raises for a path that is something else.
        """
        raise NotImplementedError

    def open(self, path: Path, options: Options) -> Contents:
        """Reads and checks the metadata; returns layouts of rows and functions that read columns. Reads no rows."""
        raise UnsupportedError(f"{self.name} datasets hold no activations", path=path)

    opens_several: ClassVar[bool] = False
    """Whether :meth:`open_several` is supported."""

    def open_several(self, path: Path, folders: Sequence[Path], options: Options) -> Contents:
        """Opens folders as one dataset, in this order; ``path`` is the folder above them all."""
        raise UnsupportedError(f"{self.name} datasets are opened one by one", path=path)

    def begun(self, path: Path) -> list[Path]:
        """Working folders below a path in which a writer has begun a dataset, where the format names its own folder."""
        return []

    # -- writing ---------------------------------------------------------------------------------------------------

    writes: ClassVar[bool] = False
    """Whether :meth:`target` is supported."""

    def target(self) -> type[Target]:
        """The class that writes the format; its attributes say what the format can hold."""
        raise UnsupportedError(f"{self.name} datasets are read, not written")

    # -- verifying -------------------------------------------------------------------------------------------------

    def check(self, path: Path, report: Report, tell: Tell) -> None:
        """Adds what is wrong with a dataset to a report: every finding, not the first.

        Afterwards the verb opens the dataset and reports its reader's warnings; with ``deep`` it reads every value.
        """

    def remains(self, names: frozenset[str]) -> bool:
        """Whether a folder with entries of these names is a broken dataset of this format that :meth:`detect` refuses."""
        return False

    # -- merging and converting ------------------------------------------------------------------------------------

    def merger(self) -> Merger | None:
        """How several datasets become one; None: not supported."""
        return None

    def carrying(self) -> Carrying:
        """How columns and metadata are carried to and from other formats."""
        from actshard.formats.carrying import Carrying

        return Carrying()
