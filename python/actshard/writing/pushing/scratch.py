"""Private local folders for datasets whose destination is a URL. A dataset is written there, pushed, and removed.

.. code-block:: text

    <scratch>/actshard-<digest>/<name>    the dataset; the digest is that of the user, the URL, its server and the kind of call

The same call of the same user uses the same folder name, so that it continues an interrupted call. Users do not choose that name,
so errors about the folder name the URL instead. Errors about the files of an earlier call also name the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from actshard.base import _arguments
from actshard.base.errors import ActshardError, ArgumentError, DiskFullError, ExistsError, UnsupportedError, boundary
from actshard.base.location import Location
from actshard.base.storage import Remote
from actshard.base.work import PUSHING

_ADVICE = re.compile(
    r"(\. Choose another folder|, or remove (it|this one|the folder)\b|, or choose another folder).*", re.DOTALL
)
"""Advice about the folder in messages for local folders."""


class Scratch:
    """The scratch folder of a URL.

    Args:
        url: the destination.
        options: its ``storage_options``.
        above: the user's ``scratch=``; None: the folder of temporary files.
        what: the kind of call. A call only continues a call of the same kind.

    Attributes:
        root: the destination.
        folder: the folder of the dataset; the last name of the URL.
    """

    def __init__(self, url: str, options: Mapping[str, object] | None, parent: object, what: str) -> None:
        self.root, self.options = Location.of_any(url, options), options
        self.url = url
        if not isinstance(self.root.storage, Remote) or not self.root.lists:
            raise UnsupportedError("cannot be written: expected s3://, gs://, az:// or hf://", path=self.root)
        self.native = self.root.storage.native
        self.above = Path(tempfile.gettempdir()) if parent is None else _arguments.local_path(parent, "scratch")
        identity = f"{os.getuid()}\n{self.root}\n{self.native.origin()}\n{what}"
        self._own = self.above / f"actshard-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
        self.folder = self._own / (self.root.name or "dataset")
        self._made_above = False

    @property
    def has_work(self) -> bool:
        """Whether an interrupted call left files."""
        return os.path.lexists(self.folder)

    def check_free(self, resume: bool, exist_ok: bool) -> None:
        """Raises ExistsError if the destination or the scratch folder is not empty. Called before anything is written."""
        if resume:
            return
        if self.has_work and not exist_ok:
            raise ExistsError(
                f"an earlier call was interrupted, or its upload failed; its result is in {self._own}. Pass resume=True "
                "(--resume) to continue it, or remove that folder to start again",
                path=self.root,
            )
        if exist_ok or str(self.root).startswith("hf://"):
            return  # a repository may not exist yet
        start = f"{self.native.root}/" if self.native.root else ""
        keys = [key for key, *_ in self.native.everything() if key.rpartition("/")[2] != "README.md"]
        if keys and not any(key.endswith(PUSHING) for key in keys):
            remedy = "Choose another URL, or pass exist_ok=True (--exist-ok) if a dataset there is the result of the same call"
            raise ExistsError(f"contains other objects ({keys[0][len(start) :]}). {remedy}", path=self.root)

    def make(self) -> None:
        """Creates the folder, for this user alone.

        Raises:
            ArgumentError: another file or folder has its name.
        """
        self._made_above = not self.above.exists()
        with boundary(self.above, "make a folder in"):
            self.above.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self._own.mkdir(mode=0o700)
            status = self._own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ArgumentError(
                f"scratch: expected a private folder of this user named {self._own.name}, or none, found something else. Remove "
                "it, or choose another scratch folder",
                path=self.above,
            )

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing was written."""
        with contextlib.suppress(OSError):
            self._own.rmdir()
            if self._made_above:
                self.above.rmdir()

    def place_of(self, path: Path) -> Path:
        """The URL of a path in the folder, as users see it."""
        subpath = path.relative_to(self.folder).as_posix()
        return self.root.place if subpath == "." else self.root.joinpath(subpath).place

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Replaces the scratch folder in errors by the URL. Errors about an earlier result in the folder also name the folder."""
        try:
            yield
        except ActshardError as error:
            own_path = os.fspath(self._own)
            # str(): errors of the upload have remote locations, for which os.fspath raises an error
            is_inside = error.path is not None and str(error.path).startswith(own_path)
            if is_inside:
                error.path = self.root.place
            detail = error.detail.replace(os.fspath(self.folder), str(self.root)).replace(own_path, str(self.root))
            if is_inside and isinstance(error, ExistsError):
                # The advice is for a local folder. After a URL it would mean to remove the destination.
                detail = _ADVICE.sub("", detail)
                detail = (
                    f"the unfinished result of an earlier call is in {own_path} and may be removed. There: {detail}"
                )
            if is_inside and isinstance(error, DiskFullError):
                detail += f" (in the scratch folder {self.above}; pass scratch= to use another)"
            error.detail, error.args = detail, (detail,)
            if isinstance(error, OSError) and error.filename is not None and str(error.filename).startswith(own_path):
                error.filename = str(self.root)
            raise

    def push(self) -> None:
        """Uploads the dataset and removes the folder.

        Raises:
            ExistsError: other objects are at the destination. The dataset stays in the folder.
        """
        from actshard.writing.pushing import push

        try:
            with self.named():
                push(self.folder, self.url, self.options)
        except ExistsError as error:  # its advice is for push
            what = error.detail.partition(". Choose another URL")[0]
            detail = f"{what}. The result of this call is in {self._own}: actshard push uploads it to another URL"
            raise ExistsError(detail, path=error.path) from error
        shutil.rmtree(self.folder, ignore_errors=True)
        self.remove_if_empty()
