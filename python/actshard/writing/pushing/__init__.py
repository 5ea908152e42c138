"""Uploads finished datasets to buckets and to the Hugging Face hub."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, UnsupportedError, boundary
from actshard.base.location import Location, is_url
from actshard.base.storage import Remote

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
