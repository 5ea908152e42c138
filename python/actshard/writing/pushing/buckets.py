"""Uploads a dataset to a bucket: files first, the manifest last.

During the upload, the dataset's folder contains an object ``.actshard-pushing.json``, the marker. It identifies the dataset: the
same push continues, another push fails, and actshard does not open the folder. Other programs find no manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from actshard import formats
from actshard._native import RemoteStore
from actshard.base.errors import ActshardError, ArgumentError, ExistsError, FileAccessError, FormatError
from actshard.base.location import Location
from actshard.base.storage import Remote
from actshard.base.work import PUSHING
from actshard.writing.pushing.planning import CARD, LICENSE, Shipment

Bytes = Callable[[int], object]
Job = tuple[str | bytes, str, bool, int | None, str | None]
_MOST_REMOVED = 50_000
"""Maximum number of names of objects to remove in the marker."""
_MARKER_BYTES = 32 << 20
_CARD_BYTES = 64 << 10


class Bucket:
    """The destination of a push.

    Args:
        root: the destination.
        ship: the dataset.
        overwrite: whether to replace another dataset.
    """

    def __init__(self, root: Location, ship: Shipment, overwrite: bool) -> None:
        assert isinstance(root.storage, Remote)
        self.root, self.ship, self.overwrite = root, ship, overwrite
        self.native: RemoteStore = root.storage.native
        self.start = f"{self.native.root}/" if self.native.root else ""
        self.marker = self.start + ship.below(PUSHING)
        self.there: dict[str, int] = {}
        self._etags: dict[str, str] = {}
        self._asked: dict[tuple[str, str], str | None] = {}
        """Digests by key and ETag, so that each is requested once."""
        self._list()
        self.mine = {self.start + file.name: (file.size, ship.digests[file.name]) for file in ship.files}
        self.digests: dict[str, str | None] = {}
        self.text = b""
        self.manifest = {self.start + name: digest for name, digest in ship.sums.items()}
        self.sent_files = self.sent_bytes = self._done = 0

    def push(self, progress: Bytes) -> None:
        """Uploads missing and different files.

        Raises:
            ExistsError: the destination contains other objects.
        """
        state = self._state()
        is_resumed = state is not None and state.get("dataset") == self.ship.identity
        replaces = is_resumed and bool(state and state.get("replaces"))
        right = self._right()
        foreign_keys = self._foreign(state if is_resumed else None)
        finished = state is None and not foreign_keys and self._is_this(right)
        if not finished and (foreign_keys or not is_resumed):
            conflicts = [*foreign_keys, *(key for key in self.mine if key in self.there and key != self.start + CARD)]
            replaces = state is not None or bool(conflicts)
            if replaces:
                self._refuse_unless_overwrite(state is not None and not is_resumed, conflicts)
            self._mark(replaces, over=state is not None)
            right = self._right()
        card = self.start + CARD
        if card in self.there and not (self.overwrite or replaces):
            self.mine.pop(card, None)  # written by a user
        elif replaces and self._is_generated(card):
            del self.there[card]
        if not finished:
            self._remove_others(right, replaces)
        with contextlib.suppress(ActshardError):  # listing them may not be allowed
            self.native.sweep(sorted(self.mine))
        for number, stage in enumerate(self.ship.stages):
            if number > 0 and not finished:
                self._check_marker(replaces and number == 1)
            files = [file for file in stage if self.start + file.name in self.mine]
            sent = [file for file in files if self.start + file.name not in right]
            self._done += sum(file.size for file in stage) - sum(file.size for file in sent)
            jobs: list[Job] = []
            for file in sent:
                key = self.start + file.name
                size = self.there.get(key)
                digest = self.ship.digests[file.name]
                is_known = key in self.digests  # its digest was requested before, and differs
                jobs.append((str(file.path), key, number > 0 and size is None, None if is_known else size, digest))
            if number == 0 and self.ship.card is not None and card not in self.there:
                jobs.append((self.ship.card, card, False, None, None))
            sizes = [file.size for file in sent] + [len(self.ship.card or b"")] * (len(jobs) - len(sent))
            self._send(jobs, sizes, progress)
            if number == 0:
                self.ship.check_unchanged()
        self._check()
        if not finished:
            self.native.remove([self.marker])

    def _is_generated(self, card: str) -> bool:
        """Whether an existing ``README.md``, to be replaced by a generated one, is the unedited one of an earlier push."""
        if self.ship.card is None or card not in self.there:
            return False
        data = self.native.read(card, 0, _CARD_BYTES)
        is_unchanged = self._digests([card])[card] == hashlib.sha256(data).hexdigest()
        return is_unchanged and data.startswith(f"---\n{LICENSE}\n".encode())

    def _list(self) -> None:
        try:
            objects = self.native.everything()
        except FileAccessError as error:
            if re.search(r"\b40[13]\b", error.detail):
                error.detail += (
                    ". A push lists the existing objects: the credentials also need the permission to list names"
                )
                error.args = (error.detail,)
            raise
        self.there = {key: size for key, size, _ in objects}
        self._etags = {key: etag for key, _, etag in objects}

    def _right(self) -> set[str]:
        """Keys of the dataset's objects that already have the right bytes. Requests digests of objects of equal size."""
        keys = [key for key, (size, _) in self.mine.items() if self.there.get(key) == size]
        self.digests = self._digests(keys)
        return {key for key in keys if self.digests[key] == self.mine[key][1]}

    def _digests(self, keys: list[str]) -> dict[str, str | None]:
        unknown_keys = [key for key in keys if not self._etags.get(key) or (key, self._etags[key]) not in self._asked]
        digests = dict(zip(unknown_keys, self.native.digests(unknown_keys), strict=True))
        self._asked |= {(key, self._etags[key]): digest for key, digest in digests.items() if self._etags.get(key)}
        return {key: digests[key] if key in digests else self._asked[key, self._etags[key]] for key in keys}

    def _others(self) -> list[str]:
        """Keys of objects that are not part of the dataset."""
        return [key for key in self.there if key not in self.mine and key not in (self.start + CARD, self.marker)]

    def _is_this(self, right: set[str]) -> bool:
        """Whether a push of this dataset was completed here.

        Missing objects, and objects that another program replaced, are accepted if all others belong to this dataset. Equal
        metadata alone are not sufficient.
        """
        card = self.start + CARD
        data = self.mine.keys() - self.manifest.keys() - {card}
        wrong = {key for key in self.mine if key in self.there and key not in right and key != card}
        if not wrong and self.mine.keys() - {card} <= self.there.keys():
            return True
        # Azure's large blobs have no digest although push wrote them: they may belong to another dataset.
        replaced = not any(self._digests(sorted(wrong)).values()) and not str(self.root).startswith("az:")
        return bool(self.manifest) and self.manifest.keys() <= right and bool(data & right) and (replaced or not wrong)

    def _state(self) -> dict[str, object] | None:
        """The marker's fields; None without a marker."""
        if self.marker not in self.there:
            return None
        try:
            self.text = self.native.read(self.marker, 0, _MARKER_BYTES)
            state = json.loads(self.text)
        except ValueError:
            state = None
        return state if isinstance(state, dict) else {}

    def _foreign(self, state: dict[str, object] | None) -> list[str]:
        """Keys of objects that are not part of the dataset, except those that the unfinished push would remove."""
        removes = state.get("removes") if state is not None else None
        removals = removes if isinstance(removes, dict) else {}
        return [key for key in self._others() if removals.get(key[len(self.start) :]) != self.there[key]]

    def _refuse_unless_overwrite(self, unfinished: bool, keys: list[str]) -> None:
        if self.overwrite:
            if not self.start:
                raise ArgumentError(
                    "overwrite: expected the URL of a folder, found the URL of a bucket: all its objects would be removed",
                    path=self.root,
                )
            return
        what = "an unfinished upload of another dataset" if unfinished else "other objects"
        suffix = f" ({keys[0][len(self.start) :]})" if keys else ""
        raise ExistsError(
            f"contains {what}{suffix}. Choose another URL, or, after any other upload to it has ended, pass overwrite=True "
            "(--overwrite), which removes everything below it.",
            path=self.root,
        )

    def _text(self, replaces: bool) -> bytes:
        """The marker. It lists the objects to remove, so that a repeated push removes no objects that were added since."""
        removes = {key[len(self.start) :]: self.there[key] for key in self._others()} if replaces else {}
        if len(removes) > _MOST_REMOVED:
            removes = {}
        fields = {"actshard": 1, "dataset": self.ship.identity, "replaces": replaces, "removes": removes}
        return json.dumps(fields).encode()

    def _mark(self, replaces: bool, over: bool) -> None:
        """Writes the marker, and lists the objects again. ``over``: replaces an existing marker; otherwise there must be none."""
        before = {key: size for key, size in self.there.items() if key != self.marker}
        self.text = self._text(replaces)
        self._send([(self.text, self.marker, not over, None, None)], [0], None)
        self._list()
        after = {key: size for key, size in self.there.items() if key != self.marker}
        if after != before and not self.overwrite:
            self.native.remove([self.marker])
            self._refuse_unless_overwrite(False, sorted(after.keys() - before.keys()))

    def _check_marker(self, is_replacement: bool) -> None:
        """Raises ExistsError if another push has begun here. Called before the manifest is written.

        ``is_replacement``: a dataset was replaced, whose push may still run, so objects are checked too.
        """
        wrong = self.native.digests([self.marker]) != [hashlib.sha256(self.text).hexdigest()] and (
            self.marker not in {key for key, *_ in self.native.everything()}
            or self.native.read(self.marker, 0, _MARKER_BYTES) != self.text
        )
        if is_replacement and not wrong:
            self._list()
            right = self._right()
            data = [key for key in self.mine if key not in self.manifest]
            differs = [key for key in data if key not in right and self.digests.get(key, "") is not None]
            wrong = bool(self._others() or differs)
        if wrong:
            raise ExistsError(
                "another process uploads to this URL. Its objects and those of this upload may be mixed, and the dataset is not "
                "readable. After that process has ended, push with overwrite=True (--overwrite).",
                path=self.root,
            )

    def _remove_others(self, right: set[str], replaces: bool) -> None:
        """Removes manifests first: with them, a mixture of two datasets would be readable.

        If a dataset is replaced, also removes all its other objects: each could be taken for a chunk that this dataset lacks.
        """
        is_complete = self.mine.keys() - self.manifest.keys() <= right
        wrong = {key for key in self.manifest if key in self.there and not (is_complete and key in right)}
        if replaces:
            patterns = [
                f"/{p}" for name in [*formats.names(), *formats.of_tokens()] for p in formats.get(name).manifest
            ]
            other_keys = {key for key in self.there if key not in self.mine and key != self.marker}
            wrong |= {key for key in other_keys if any(fnmatchcase(f"/{key}", f"*{p}") for p in patterns)}
        self.native.remove(sorted(wrong))
        if replaces:
            rest = {key for key in self.there if key not in self.mine and key != self.marker} - wrong
            rest -= set() if self.ship.card is None else {self.start + CARD}
            self.native.remove(sorted(rest))
            wrong |= rest
        self.there = {key: size for key, size in self.there.items() if key not in wrong}
        right -= wrong

    def _send(self, jobs: list[Job], sizes: list[int], progress: Bytes | None) -> None:
        before = self._done
        report = None if progress is None else lambda done: progress(before + done)
        for (_, key, *_), size, outcome in zip(jobs, sizes, self.native.upload(jobs, report), strict=True):
            if outcome == "refused":
                raise ExistsError(
                    "another process wrote a different object during the upload. Choose another URL, or wait for that process.",
                    path=Location(self.root.storage, key),
                )
            self._done += size
            if outcome == "sent" and key in self.mine:
                self.sent_files += 1
                self.sent_bytes += size
        if progress is not None:
            progress(self._done)

    def _check(self) -> None:
        """Compares names and sizes with those of a new listing."""
        self._list()
        for file in self.ship.files:
            size = self.there.get(self.start + file.name)
            if self.start + file.name in self.mine and size != file.size:
                raise FormatError(
                    f"expected {file.size} bytes after the upload, found {'nothing' if size is None else size}: another process "
                    "changes these objects. Push again.",
                    path=Location(self.root.storage, self.start + file.name),
                )
