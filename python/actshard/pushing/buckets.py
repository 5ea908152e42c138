"""Uploads a dataset to a bucket: files first, the manifest last.

An object ``.actshard-pushing.json`` lies in the dataset's folder meanwhile. It names the dataset, so that the same push continues
and another is refused, and actshard does not open a dataset beside it. Other programs find no manifest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from fnmatch import fnmatchcase

from actshard import formats
from actshard._native import RemoteStore
from actshard.errors import ActshardError, ArgumentError, ExistsError, FormatError
from actshard.location import Location
from actshard.pushing.planning import CARD, Shipment
from actshard.storage import Remote
from actshard.work import PUSHING

Bytes = Callable[[int], object]
Job = tuple[str | bytes, str, bool, int | None]


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
        self.there = dict(self.native.everything())
        self.mine = {self.start + file.name for file in ship.files}
        self.manifest = {self.start + name: digest for name, digest in ship.sums.items()}
        self.sent_files = self.sent_bytes = self._done = 0

    def push(self, progress: Bytes) -> None:
        """Uploads what is missing or differs.

        Raises:
            ExistsError: other objects are there.
        """
        found = [key for key in self.manifest if key in self.there]
        digests = dict(zip(found, self.native.digests(found), strict=True))
        right = {key for key in found if digests[key] == self.manifest[key]}
        state = self._state()
        same = all(self.there.get(self.start + file.name) == file.size for file in self.ship.files)
        finished = state is None and (right == self.manifest.keys() if self.manifest else same)
        begun = state is not None and state.get("dataset") == self.ship.identity
        others = [key for key in self.there if key not in (self.start + CARD, self.marker)]
        replaces = begun and bool(state and state.get("replaces"))
        if (others or state is not None) and not (finished or begun):
            self._refuse_unless_overwrite(state, others)
            replaces = True
        if not finished:
            if not begun:
                self._mark(replaces)
            self._remove_others(right, replaces)
        with contextlib.suppress(ActshardError):  # listing them may not be allowed
            self.native.sweep(sorted(self.mine))
        for number, stage in enumerate(self.ship.stages):
            jobs: list[Job] = []
            for file in stage:
                key = self.start + file.name
                size = self.there.get(key)
                jobs.append((str(file.path), key, number > 0 and size is None, size))
            if number == 0 and self.ship.card is not None and self.start + CARD not in self.there:
                jobs.append((self.ship.card, self.start + CARD, False, None))
            sizes = [file.size for file in stage] + [len(self.ship.card or b"")] * (len(jobs) - len(stage))
            self._send(jobs, sizes, progress)
        self._check()
        if self.marker in self.there or not finished:
            self.native.remove([self.marker])

    def _state(self) -> dict[str, object] | None:
        """What the marker says; None without one."""
        if self.marker not in self.there:
            return None
        try:
            found = json.loads(self.native.read(self.marker, 0, 1 << 16))
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def _refuse_unless_overwrite(self, state: dict[str, object] | None, others: list[str]) -> None:
        if self.overwrite:
            if not self.start:
                raise ArgumentError(
                    "overwrite: expected the URL of a folder, found that of a bucket, of which everything would be removed",
                    path=self.root,
                )
            return
        what = "an unfinished upload of another dataset" if state is not None else "other objects"
        named = f" ({others[0][len(self.start) :]})" if others else ""
        raise ExistsError(
            f"contains {what}{named}. Choose another URL, or pass overwrite=True (--overwrite), which removes everything below it.",
            path=self.root,
        )

    def _mark(self, replaces: bool) -> None:
        text = json.dumps({"actshard": 1, "dataset": self.ship.identity, "replaces": replaces}).encode()
        self._send([(text, self.marker, not self.overwrite and self.marker not in self.there, None)], [0], None)

    def _remove_others(self, right: set[str], replaces: bool) -> None:
        """Removes manifests that are not this dataset's, first; if it replaces another, also all other objects."""
        wrong = {key for key in self.manifest if key in self.there and key not in right}
        if replaces:
            patterns = [
                f"/{p}" for name in [*formats.names(), *formats.of_tokens()] for p in formats.get(name).manifest
            ]
            other = {key for key in self.there if key not in self.mine and key != self.marker}
            wrong |= {key for key in other if any(fnmatchcase(f"/{key}", f"*{p}") for p in patterns)}
        self.native.remove(sorted(wrong))
        self.there = {key: size for key, size in self.there.items() if key not in wrong}
        if replaces:
            rest = {key for key in self.there if key not in self.mine and key != self.marker}
            rest -= set() if self.ship.card is None else {self.start + CARD}
            self.native.remove(sorted(rest))
            self.there = {key: size for key, size in self.there.items() if key not in rest}

    def _send(self, jobs: list[Job], sizes: list[int], progress: Bytes | None) -> None:
        before = self._done
        told = None if progress is None else lambda done: progress(before + done)
        for (_, key, _, _), size, made in zip(jobs, sizes, self.native.upload(jobs, told), strict=True):
            if made == "refused":
                raise ExistsError(
                    "another process wrote another object meanwhile. Choose another URL, or wait for that process.",
                    path=Location(self.root.storage, key),
                )
            self._done += size
            if made == "sent" and key in self.mine:
                self.sent_files += 1
                self.sent_bytes += size
        if progress is not None:
            progress(self._done)

    def _check(self) -> None:
        """Compares names and sizes with those of a new listing."""
        self.there = dict(self.native.everything())
        for file in self.ship.files:
            size = self.there.get(self.start + file.name)
            if size != file.size:
                raise FormatError(
                    f"expected {file.size} bytes after the upload, found {'nothing' if size is None else size}: another process "
                    "changes these objects. Push again.",
                    path=Location(self.root.storage, self.start + file.name),
                )
