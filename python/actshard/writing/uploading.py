"""Writers whose dataset is a URL: into a private local folder, pushed when the dataset is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actshard.base.errors import ExistsError, MissingFileError, UnknownFormatError
from actshard.base.location import Location
from actshard.formats.target import Target
from actshard.reading.finding import check_finished, find
from actshard.writing.existing import Fitting, check_same
from actshard.writing.pushing import Scratch
from actshard.writing.writer import Writer


class UploadingWriter(Writer):
    """As :class:`Writer`; :meth:`close` finishes the dataset in the scratch folder, uploads it, and removes it from there.

    If the upload of a finished dataset failed, resuming uploads it.
    """

    def __init__(self, target: Target, fitting: Fitting, scratch: Scratch, *, resume: bool, exist_ok: bool) -> None:
        self._scratch = scratch
        self._uploaded = False
        self._local = target.root
        super().__init__(target, fitting, resume=resume, exist_ok=exist_ok)
        self._upload()

    def _begin(self, resume: bool) -> None:
        scratch = self._scratch
        existing = _find_finished(self._target, scratch, resume, self._exist_ok)
        if existing is not None:
            self._appended = check_same(self._target, existing.place)
            self._local = scratch.folder.joinpath(existing.relative_to(scratch.root))
            self.complete = self._existed = self._uploaded = True
            return
        scratch.make()
        try:
            with scratch.named():
                super()._begin(resume)
        finally:
            scratch.remove_if_empty()

    @property
    def path(self) -> Path:
        """The URL of the dataset; for saev that of its folder once it is finished."""
        return self._scratch.place_of(self._local) if self.complete else self._scratch.root.place

    @path.setter
    def path(self, path: Path) -> None:
        self._local = path

    def append(self, *arguments: Any, **keywords: Any) -> None:
        """As :meth:`Writer.append`."""
        with self._scratch.named():
            super().append(*arguments, **keywords)

    def flush(self) -> int:
        """As :meth:`Writer.flush`."""
        with self._scratch.named():
            return super().flush()

    def close(self) -> None:
        """Finishes the dataset and uploads it. After an error, the same call continues.

        Raises:
            FormatError, ExistsError, FileAccessError: the upload failed, as :func:`actshard.push` does. The dataset stays in the
                scratch folder: ``create`` with ``resume=True`` uploads it.
        """
        with self._scratch.named():
            super().close()
        self._upload()

    def _upload(self) -> None:
        if self.complete and not self._uploaded:
            self._scratch.push()
            self._uploaded = True


def _find_finished(target: Target, scratch: Scratch, resume: bool, exist_ok: bool) -> Location | None:
    """The finished dataset at the destination, if this call accepts it and has no scratch folder to continue; else None.

    Raises:
        ExistsError: the destination contains other objects, and neither ``resume`` nor ``exist_ok`` is given.
        UnfinishedError: the destination contains an unfinished upload, whose scratch folder is not on this machine.
    """
    scratch.check_free(resume, exist_ok)
    if scratch.has_work or not exist_ok:
        return None
    try:
        if not scratch.root.exists():
            return None
        check_finished(scratch.root)
        location, name = find(scratch.root)
    except (MissingFileError, UnknownFormatError):  # the destination is checked again before the upload
        return None
    if name != target.format:
        raise ExistsError(f"contains another dataset: format: expected {target.format}, found {name}", path=location)
    return location
