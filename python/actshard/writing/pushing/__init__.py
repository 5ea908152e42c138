"""Uploads finished datasets to buckets and to the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actshard.base import _arguments
from actshard.base.errors import ActshardError, ArgumentError, DiskFullError, ExistsError, UnsupportedError, boundary
from actshard.base.location import Location, is_url
from actshard.base.storage import Remote
from actshard.base.work import PUSHING

__all__ = ["Pushed", "push"]


_TARGETS = "s3://, gs://, az:// or hf://"


@dataclass(frozen=True)
class Pushed:
    """The result of :func:`actshard.push`.

    Attributes:
        url: the URL, without credentials.
        format: the dataset's format.
        files, bytes: files of the dataset and their sizes.
        sent_files, sent_bytes: number and size of uploaded files; the destination already had the others.
        seconds: duration.
        notes: properties of the dataset that make remote reads slow.
        left_out: hidden files and folders (``.env``, ``.git/``) that were not uploaded.
    """

    url: str
    format: str
    files: int
    bytes: int
    sent_files: int
    sent_bytes: int
    seconds: float
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        return asdict(self)


def push(
    folder: str | os.PathLike[str],
    url: str,
    storage_options: Mapping[str, object] | None = None,
    *,
    verify: bool = True,
    overwrite: bool = False,
    private: bool = True,
    links: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Pushed:
    """Uploads a finished dataset or token cache to ``s3://``, ``gs://``, ``az://`` or ``hf://``.

    In a bucket, the files that make the dataset readable are written last, and only if no other object has their name. On the hub
    all files are in one commit. After an interruption or a kill, the same call uploads only missing or different files: objects
    store the SHA-256 of their bytes. Errors and interrupts leave no unfinished multipart upload; the next call aborts those of a
    killed call. A folder without ``README.md`` gets a dataset card; add the license yourself.

    Args:
        folder: the dataset's folder, or a folder that contains one dataset. All files below it are uploaded, except hidden ones
            (``.env``, ``.git``, ``notes~``) that the format does not need; the result names them.
        url: the folder to write: ``s3://BUCKET/RUN``, ``hf://datasets/ORG/NAME[@BRANCH][/PATH]``.
        storage_options: as for :func:`actshard.open`.
        verify: refuse a dataset in which :func:`actshard.verify` finds an error.
        overwrite: replace another dataset, or an unfinished push whose process has ended. Removes everything below the URL that
            is not part of this dataset, metadata first. Keeps an existing ``README.md`` if the folder has none. With False, an
            existing ``README.md`` is always kept.
        private: whether a new repository of the hub is private.
        links: follow links that lead outside of the folder; with False such a link is an error.
        progress: called with (bytes done, total bytes) from time to time.

    Returns:
        A :class:`~actshard.writing.pushing.Pushed`.

    Raises:
        ArgumentError: a link leads outside of the folder.
        FormatError: the dataset has errors, or a file changed during the upload. Then the metadata are not written.
        UnfinishedError: the dataset is not finished.
        ExistsError: the URL contains other objects, or another dataset, even with equal metadata, and ``overwrite`` is False; or
            another process uploads to the URL.
        FileAccessError: the store refuses or fails; the message contains the remedy.
        MissingExtraError: ``hf://`` needs ``pip install 'actshard[hub]'``.
        UnsupportedError: the store cannot be written.
    """
    from actshard.writing.pushing.buckets import Bucket
    from actshard.writing.pushing.hub import push_to_hub
    from actshard.writing.pushing.planning import shipment

    _arguments.check_progress(progress)
    check = _arguments.switch(verify, "verify")
    overwrite, private = _arguments.switch(overwrite, "overwrite"), _arguments.switch(private, "private")
    links = _arguments.switch(links, "links")
    source = _arguments.local_path(folder, "folder")
    if _arguments.is_url_elsewhere(url) and not is_url(url):
        raise ArgumentError(f"url: expected {_TARGETS}, found {_arguments.shown_path(url)}")
    root = Location.of_any(url, storage_options)
    if not isinstance(root.storage, Remote):
        raise ArgumentError(f"url: expected {_TARGETS}, found a local path", path=root)
    if not root.lists:
        raise UnsupportedError(f"cannot be written: expected {_TARGETS}", path=root)
    began = time.monotonic()
    with boundary(source, "upload"):
        ship = shipment(source, str(root), check, links)
        total = sum(file.size for file in ship.files)

        def report(done: int) -> None:
            if progress is not None:
                progress(min(done, total), total)

        if str(root).startswith("hf://"):
            sent = push_to_hub(root, ship, overwrite, private, storage_options or {}, report)
        else:
            bucket = Bucket(root, ship, overwrite)
            bucket.push(report)
            sent = (bucket.sent_files, bucket.sent_bytes)
    return Pushed(
        str(root), ship.format, len(ship.files), total, *sent, time.monotonic() - began, ship.notes, ship.left_out
    )


# Private local folders for datasets whose destination is a URL. A dataset is written there, pushed, and removed.
#
#     <scratch>/actshard-<digest>/<name>    the dataset; the digest is that of the user, the URL, its server and the kind of call
#
# The same call of the same user uses the same folder name, so that it continues an interrupted call. Users do not choose that
# name, so errors about the folder name the URL instead. Errors about the files of an earlier call also name the folder.


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
        try:
            with self.named():
                push(self.folder, self.url, self.options)
        except ExistsError as error:  # its advice is for push
            what = error.detail.partition(". Choose another URL")[0]
            detail = f"{what}. The result of this call is in {self._own}: actshard push uploads it to another URL"
            raise ExistsError(detail, path=error.path) from error
        shutil.rmtree(self.folder, ignore_errors=True)
        self.remove_if_empty()
