"""Checks a job's system calls against a power failure: anything not synced may be lost, file by file and entry by entry.

A model of the disk follows an strace log. A file is dirty from its last change until `fsync` or `fdatasync`. A directory
entry (of a file created, renamed or linked, or of a folder created) is dirty until an `fsync` of the folder. Three rules:

1. A file is clean when it is named by `rename` or `link`.
2. When the manifest is named (the last rename in the dataset), everything else in the dataset is clean, so that a manifest
   never lists missing files. Likewise a line of the journal for the data it counts.
3. When the job has ended, nothing is dirty, including the entry of the dataset in its parent folder.

Working files (`.actshard`, `.actshard-build`, `lock`) matter only to rule 2's journal.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

WORK = (".actshard", ".actshard-build")
_LINE = re.compile(r"(\d+) +(.*)")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)", re.DOTALL)
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)(.*)", re.DOTALL)
_FD = re.compile(r"(?:\d+|AT_FDCWD)<([^>]*)>")
_WRITES = ("write", "pwrite64", "writev", "pwritev", "ftruncate", "fallocate", "copy_file_range", "sendfile")


class Disk:
    """The model of the disk: what may be lost in a power failure."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.files: dict[str, int] = {}
        """Dirty files, with the line of their last change."""
        self.entries: dict[str, int] = {}
        """Dirty directory entries by path, with the line that created them."""
        self.faults: list[str] = []
        self.known: set[str] = set()

    def under(self, path: str) -> bool:
        return path.startswith(self.root + "/")

    def touch(self, path: str, line: int) -> None:
        if self.under(path):
            self.files[path] = line

    def enter(self, path: str, line: int) -> None:
        if self.under(path) and path not in self.known:
            self.entries[path] = line
            self.known.add(path)

    def sync(self, path: str) -> None:
        self.files.pop(path, None)
        for entry in [e for e in self.entries if posixpath.dirname(e) == path]:
            del self.entries[entry]

    def move(self, source: str, target: str, line: int, *, linked: bool = False) -> None:
        if source in self.files:
            self.faults.append(f"line {line}: {self.short(target)} gets its name before its data are synced")
        for table in (self.files, self.entries):
            for path in [p for p in table if p == source or p.startswith(source + "/")]:
                at = table[path] if linked else table.pop(path)
                if path != source:
                    table[target + path[len(source) :]] = at
                elif table is self.files:
                    table[target] = at
        for path in [p for p in self.known if p.startswith(source + "/")]:
            self.known.add(target + path[len(source) :])
        self.known.discard(target)
        self.enter(target, line)

    def gone(self, path: str) -> None:
        for table in (self.files, self.entries):
            for found in [p for p in table if p == path or p.startswith(path + "/")]:
                del table[found]
        self.known.discard(path)

    def short(self, path: str) -> str:
        return path[len(self.root) + 1 :]

    def dirty(self, *, but: str = "", work: bool = False) -> list[str]:
        """Files and entries that are dirty now."""
        found = []
        for kind, table in (("data of", self.files), ("entry of", self.entries)):
            for path in table:
                inside = any(f"/{name}/" in path or path.endswith(f"/{name}") for name in WORK)
                if path != but and (work or not inside):
                    found.append(f"{kind} {self.short(path)}")
        return found


def faults(log: Path, root: Path) -> list[str]:
    """Violations of the three rules in the log of a job with files in `root`."""
    calls = _calls(log)
    last = max(
        (i for i, (name, _, target) in enumerate(calls) if name == "rename" and not _is_work(target)), default=-1
    )
    disk = Disk(root)
    journal_lines = 0
    for number, (name, path, target) in enumerate(calls):
        if name == "write":
            # A journal line counts data on disk. The first line is its header.
            if path.endswith("/journal.jsonl") and path not in disk.files:
                journal_lines += 1
                if journal_lines > 1:
                    disk.faults += [
                        f"journal line {journal_lines} comes before {what} is synced" for what in disk.dirty()
                    ]
            disk.touch(path, number)
        elif name == "make":
            disk.enter(path, number)
        elif name == "sync":
            disk.sync(path)
        elif name == "syncfs":
            disk.files.clear()
            disk.entries.clear()
        elif name == "gone":
            disk.gone(path)
        else:
            if number == last:
                disk.faults += [
                    f"{disk.short(target)} (the manifest) gets its name before {what} is synced"
                    for what in disk.dirty(but=path)
                ]
            disk.move(path, target, number, linked=name == "link")
    disk.faults += [f"never synced: {what}" for what in disk.dirty()]
    return disk.faults


def _is_work(path: str) -> bool:
    return any(f"/{name}/" in path for name in WORK)


def _calls(log: Path) -> list[tuple[str, str, str]]:
    """Relevant calls in the order of the worst case: changes take effect at their start, syncs at their end."""
    open_calls: dict[str, str] = {}
    found: list[tuple[str, str, str]] = []
    for raw in log.read_text(errors="replace").splitlines():
        line = _LINE.match(raw)
        if not line:
            continue
        thread, text = line[1], line[2]
        if text.endswith("<unfinished ...>"):
            begun = text.removesuffix("<unfinished ...>")
            open_calls[thread] = begun
            if begun.split("(")[0] in _WRITES:
                found += _meaning(begun.rstrip(" ,") + ") = 0")
            continue
        resumed = _RESUMED.match(text)
        if resumed:
            begun = open_calls.pop(thread, "")
            if begun.split("(")[0] in _WRITES:
                continue
            text = begun + resumed[2]
        found += _meaning(text)
    return found


def _meaning(text: str) -> list[tuple[str, str, str]]:
    call = _CALL.match(text)
    if not call or int(call[3]) < 0:
        return []
    name, arguments, after = call[1], call[2], call[4]
    folders = _FD.findall(arguments)
    quoted = re.findall(r'"((?:[^"\\]|\\.)*)"', arguments)
    if name in _WRITES:
        at = 1 if name == "copy_file_range" else 0
        return [("write", folders[at], "")] if len(folders) > at else []
    if name in ("fsync", "fdatasync"):
        return [("sync", folders[0], "")] if folders else []
    if name == "syncfs":
        return [("syncfs", "", "")]
    if name == "openat":
        path = _FD.search(after)
        if path is None or "O_TMPFILE" in arguments:
            return []
        made = [("make", path[1], "")] if "O_CREAT" in arguments else []
        return made + ([("write", path[1], "")] if "O_TRUNC" in arguments else [])
    at_folder = name.endswith(("at", "at2"))
    paths = [posixpath.join(folders[i], q) if at_folder and i < len(folders) else q for i, q in enumerate(quoted)]
    if name.startswith("mkdir") and paths:
        return [("make", paths[0], "")]
    if name.startswith("rename") and len(paths) == 2:
        return [("rename", paths[0], paths[1])]
    if name.startswith("link") and len(paths) == 2:
        return [("link", paths[0], paths[1])]
    if name.startswith("symlink") and quoted:
        return [("make", posixpath.join(folders[0], quoted[-1]) if folders else quoted[-1], "")]
    if name.startswith(("unlink", "rmdir")) and paths:
        return [("gone", paths[0], "")]
    return []
