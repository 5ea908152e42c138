"""Uploads a dataset to the Hugging Face hub: one commit, so that the dataset is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import actshard._native as _native
from actshard.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FileAccessError,
    MissingExtraError,
    MissingFileError,
)
from actshard.location import Location
from actshard.pushing.planning import CARD, Shipment
from actshard.storage import Remote

_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(.+?))?/?")


def push_to_hub(
    root: Location,
    ship: Shipment,
    overwrite: bool,
    private: bool,
    options: Mapping[str, Any],
    progress: Callable[[int], object],
) -> tuple[int, int]:
    """Commits a dataset. Returns the numbers of files and bytes that were sent.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ExistsError: the folder contains another dataset.
        FileAccessError: the hub refuses, or cannot be reached.
    """
    try:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    except ImportError as error:
        raise MissingExtraError.of("uploading to the hub", "hub", root) from error
    assert isinstance(root.storage, Remote)
    native = root.storage.native
    start = f"{native.root}/" if native.root else ""
    named = _URL.fullmatch(native.text(""))
    if named is None:
        raise ArgumentError("expected hf://datasets/ORG/NAME[@BRANCH][/PATH]", path=root)
    repository, branch = named[1], named[2] or "main"
    given = {str(name).lower(): value for name, value in options.items()}
    api = HfApi(
        endpoint=given.get("endpoint") or given.get("endpoint_url"),
        token=given.get("token") or given.get("hf_token"),
        library_name="actshard",
    )
    with _explained(root):
        api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        if branch != "main" and not branch.startswith("refs/"):
            api.create_branch(repository, repo_type="dataset", branch=branch, exist_ok=True)
        parent = api.dataset_info(repository, revision=branch).sha
    there = _there(native)
    mine = {start + file.name: file for file in ship.files}
    others = [key for key in there if key.startswith(start) and key.rpartition("/")[2] not in (CARD, ".gitattributes")]
    manifest = {start + name: digest for name, digest in ship.sums.items()}
    if others and not overwrite and not _is_same(root, manifest, there):
        raise ExistsError(
            f"contains other files ({others[0][len(start) :]}). Choose another URL, or pass overwrite=True (--overwrite), which "
            "removes everything below it.",
            path=root,
        )
    operations: list[Any] = [CommitOperationAdd(key, str(file.path)) for key, file in mine.items()]
    if ship.card is not None and start + CARD not in there:
        operations.append(CommitOperationAdd(start + CARD, ship.card))
    if overwrite:
        operations += [CommitOperationDelete(key) for key in others if key not in mine]
    progress(0)
    with _explained(root):
        api.create_commit(
            repository,
            operations,
            commit_message=f"Upload a {ship.format} dataset with actshard",
            repo_type="dataset",
            revision=branch,
            parent_commit=parent,
        )
    new = [file for key, file in mine.items() if there.get(key) != file.size]
    progress(sum(file.size for file in ship.files))
    return len(new), sum(file.size for file in new)


def _there(native: _native.RemoteStore) -> dict[str, int]:
    """Keys and sizes of all files at the branch's commit; none in a new repository."""
    try:
        return dict(native.everything())
    except MissingFileError:
        return {}


def _is_same(root: Location, manifest: Mapping[str, str], there: Mapping[str, int]) -> bool:
    """Whether the repository's files have this dataset's manifest."""
    if not manifest or not manifest.keys() <= there.keys():
        return False
    found = {key: root.storage.read(key, 0, there[key]) for key in manifest}
    return all(hashlib.sha256(data).hexdigest() == manifest[key] for key, data in found.items())


_SECRETS = (
    (re.compile(r"(?<=//)[^/\s@]+@"), ""),  # a user and password in a URL
    (re.compile(r"""(://[^\s?#'"<>]*)[?#][^\s'"<>]*"""), r"\1"),  # signatures are in queries
    (re.compile(r"""(?i)\b(bearer|basic)(\s+|%20)[^\s'"\\]+"""), r"\1 ..."),
    (re.compile(r"hf_\w+"), "hf_..."),
)


def without_secrets(text: str) -> str:
    """A message of another library without queries of URLs, authorization headers and tokens."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


@contextlib.contextmanager
def _explained(root: Location) -> Iterator[None]:
    """Turns errors of huggingface_hub into one line without its request's headers."""
    try:
        yield
    except ActshardError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, MemoryError | RecursionError):
            raise
        said = without_secrets(str(error)).strip().splitlines()
        advice = {
            401: "; log in with `hf auth login`, or set HF_TOKEN or storage_options={'token': ...}",
            403: "; the token needs permission to write to this repository",
            409: "; another commit was made meanwhile: push again",
            412: "; another commit was made meanwhile: push again",
        }.get(status or 0, "")
        line = said[0][:200] if said else type(error).__name__
        raise FileAccessError(f"cannot write: {type(error).__name__}: {line}{advice}", path=root) from None
