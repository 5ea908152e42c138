"""Uploads a dataset to the Hugging Face hub in one commit, so that it is never incomplete there."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import actshard._native as _native
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FileAccessError,
    FormatError,
    MissingExtraError,
    MissingFileError,
)
from actshard.base.location import Location
from actshard.base.storage import Remote
from actshard.writing.pushing.planning import CARD, LocalFile, Shipment

_PER_FOLDER, _PER_COMMIT = 10_000, 25_000
"""Maximum number of files (https://huggingface.co/docs/hub/storage-limits)."""
_MOST_OF_GIT = 64 << 20
"""Upper bound for files that can be in git itself: the hub stores files of 10 MB and more elsewhere."""
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
    match = _URL.fullmatch(native.text(""))
    if match is None:
        raise ArgumentError("expected hf://datasets/ORG/NAME[@BRANCH][/PATH]", path=root)
    repository, branch = match[1], match[2] or "main"
    lowercase_options = {str(name).lower(): value for name, value in options.items()}
    api = HfApi(
        endpoint=lowercase_options.get("endpoint") or lowercase_options.get("endpoint_url"),
        token=lowercase_options.get("token") or lowercase_options.get("hf_token"),
        library_name="actshard",
    )
    _check_numbers(root, ship)
    parent = _parent(api, root, repository, branch, private)
    remote_files = _there(native)
    mine = {start + file.name: file for file in ship.files}
    protected_keys = {start + CARD, ".gitattributes"}
    other_keys = [
        key for key in remote_files if key.startswith(start) and key not in mine and key not in protected_keys
    ]
    right = {
        key
        for key, file in mine.items()
        if key in remote_files and _is_right(file, ship.digests[file.name], *remote_files[key])
    }
    wrong = [key for key in mine if key in remote_files and key not in right and key not in protected_keys]
    if not overwrite and (other_keys or wrong):
        raise ExistsError(
            f"contains other files ({[*other_keys, *wrong][0][len(start) :]}). Choose another URL, or pass overwrite=True "
            "(--overwrite), which removes everything below it.",
            path=root,
        )
    uploads = {
        key: f
        for key, f in mine.items()
        if key not in right and (overwrite or key not in protected_keys or key not in remote_files)
    }
    operations: list[Any] = [CommitOperationAdd(key, str(file.path)) for key, file in uploads.items()]
    for (key, file), operation in zip(uploads.items(), operations, strict=True):
        _check_digest(operation, ship.digests[file.name], root.joinpath(key[len(start) :]))
    if ship.card is not None and start + CARD not in remote_files:
        operations.append(CommitOperationAdd(start + CARD, ship.card))
    operations += [CommitOperationDelete(key) for key in other_keys]
    progress(0)
    ship.check_unchanged()
    if operations:
        with _explained(root):
            api.create_commit(
                repository,
                operations,
                commit_message=f"Upload a {ship.format} dataset with actshard",
                repo_type="dataset",
                revision=branch,
                parent_commit=parent,
            )
    progress(sum(file.size for file in ship.files))
    return len(uploads), sum(file.size for file in uploads.values())


def _check_numbers(root: Location, ship: Shipment) -> None:
    """Raises ArgumentError for more files than the hub accepts."""
    folders = Counter(file.name.rpartition("/")[0] for file in ship.files)
    most, count = max(folders.items(), key=lambda item: item[1], default=("", 0))
    if count > _PER_FOLDER or len(ship.files) > _PER_COMMIT:
        what = f"{count:,} files in {most or 'its folder'}" if count > _PER_FOLDER else f"{len(ship.files):,} files"
        raise ArgumentError(
            f"the dataset has {what}; the hub accepts {_PER_FOLDER:,} in a folder and about {_PER_COMMIT:,} in a commit. Convert "
            "it to fewer, larger files (another format, or larger chunks)",
            path=root,
        )


def _parent(api: Any, root: Location, repository: str, branch: str, private: bool) -> str:
    """The parent commit. Creates a missing repository, but no missing branch: its name may be mistyped."""
    passed = ("RepositoryNotFoundError", "RevisionNotFoundError")
    try:
        with _explained(root, passed):
            commit: str = api.dataset_info(repository, revision=branch).sha
            return commit
    except Exception as error:
        missing = type(error).__name__
        if missing not in passed:
            raise
    if missing == "RevisionNotFoundError" or branch != "main":
        raise MissingFileError(
            f"expected a branch named {branch!r}, found none. Create it first "
            f"(huggingface_hub.HfApi().create_branch({repository!r}, repo_type='dataset', branch={branch!r})), or push to main",
            path=root,
        )
    with _explained(root):
        api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        new_commit: str = api.dataset_info(repository, revision=branch).sha
        return new_commit


def _there(native: _native.RemoteStore) -> dict[str, tuple[int, str]]:
    """Sizes and digests of all files at the branch's commit; none in a new repository."""
    try:
        return {key: (size, oid) for key, size, oid in native.everything()}
    except MissingFileError:
        return {}


def _is_right(file: LocalFile, digest: str, size: int, oid: str) -> bool:
    """Whether the hub has a file's bytes. It lists the SHA-256 of large files, and the git digest of others."""
    if size != file.size:
        return False
    if len(oid) == 64:
        return oid == digest
    if file.size > _MOST_OF_GIT:
        return False
    git = hashlib.sha1(b"blob %d\0" % size + file.path.read_bytes(), usedforsecurity=False)
    return oid == git.hexdigest()


def _check_digest(operation: object, digest: str, location: Location) -> None:
    """Raises FormatError if a file changed after it was verified."""
    uploaded_digest = getattr(getattr(operation, "upload_info", None), "sha256", None)
    if uploaded_digest is not None and uploaded_digest.hex() != digest:
        raise FormatError("changed while it was uploaded: push again", path=location)


_SECRETS = (
    (re.compile(r"(?<=//)[^/\s@]+@"), ""),  # a user and password in a URL
    (re.compile(r"""(://[^\s?#'"<>]*)[?#][^\s'"<>]*"""), r"\1"),  # signatures are in queries
    (re.compile(r"""(?i)\b(bearer|basic)(\s+|%20)[^\s'"\\]+"""), r"\1 ..."),
    (re.compile(r"hf_\w+"), "hf_..."),
)


def without_secrets(text: str) -> str:
    """Removes queries of URLs, authorization headers and tokens from a message of another library."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


@contextlib.contextmanager
def _explained(root: Location, passed: Collection[str] = ()) -> Iterator[None]:
    """Converts errors of huggingface_hub to one line without request headers. Errors of ``passed`` classes are unchanged."""
    try:
        yield
    except ActshardError:
        raise
    except Exception as error:
        if type(error).__name__ in passed:
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, MemoryError | RecursionError):
            raise
        lines = without_secrets(str(error)).strip().splitlines()
        advice = {
            401: "; log in with `hf auth login`, or set HF_TOKEN or storage_options={'token': ...}",
            403: "; the token needs permission to write to this repository",
            409: "; another commit was made during the upload: push again",
            412: "; another commit was made during the upload: push again",
        }.get(status or 0, "")
        line = lines[0][:200] if lines else type(error).__name__
        raise FileAccessError(f"cannot write: {type(error).__name__}: {line}{advice}", path=root) from None
