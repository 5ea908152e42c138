"""Stand-ins for rows that a store cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from actshard.base.errors import ClosedError, NotStoredError
from actshard.formats.contents import Contents


class Without:
    """Replaces the rows of a dataset without hidden states: every read raises NotStoredError."""

    def __init__(self, contents: Contents) -> None:
        self._path = contents.path

    def gather(self, *_: object) -> NoReturn:
        """Raises NotStoredError."""
        raise NotStoredError("the dataset contains no hidden states", path=self._path)

    view = gather_whole = tokens_of = stored_types = gather


class Closed(Without):
    """Replaces the rows of a closed store: every read raises ClosedError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def gather(self, *_: object) -> NoReturn:
        """Raises ClosedError."""
        raise ClosedError("the store was closed", path=self._path)

    view = gather_whole = tokens_of = stored_types = gather
