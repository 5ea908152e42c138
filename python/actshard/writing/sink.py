"""Writes a dataset: commits its examples periodically to a journal, and finishes it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base._arguments import many
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FormatError,
    MissingFileError,
    TruncatedFileError,
    from_os,
    warn,
)
from actshard.base.request import Request
from actshard.base.work import (
    EMPTY,
    Commit,
    Journal,
    make_folder,
    names_of,
    recorded_files,
    remove_empty_folders,
    remove_files,
    rename,
    sync_folders,
    write_json,
)
from actshard.base.work.journal import state_of
from actshard.formats.target import AllExamples, Block, Target
from actshard.reading.finding import check_opens
from actshard.writing.existing import complete_at
from actshard.writing.segment import OWN, SegmentWriter, columns_in, lengths_in

COMMIT_BYTES = 1 << 30
"""Approximate bytes between two commits: the most that a crash loses."""


class Sink(SegmentWriter):
    """Writes all examples of a dataset, or of a part: a journal records each commit."""

    def __init__(self, target: Target, *, resume: bool) -> None:
        self.target = target
        self.journal = Journal(target.root)
        self._configured = False
        self._tried = False
        """Whether an earlier call began to finish the dataset."""
        self._finished: list[Path] = []
        """Files that completed the dataset."""
        self._since = 0
        """Bytes of rows since the last commit."""
        make_folder(self.journal.folder)
        self.journal.lock.take()  # before a look at the journal, which another process may be writing
        try:
            if self.journal.exists():
                self.journal.read()
                if not resume:
                    raise ExistsError(
                        f"contains {many(self.journal.examples, 'example')} of an unfinished dataset. Pass resume=True "
                        "(--resume) to continue it, or choose another folder.",
                        path=target.root,
                    )
            else:
                self._refuse_finished(resume)
                if resume:
                    self._tell_others()
            if self.journal.config:
                self._continue(self.journal.config)
            super().__init__(target, self.journal.tables())
        except BaseException:
            self.journal.lock.release()
            raise

    def _refuse_finished(self, resume: bool) -> None:
        """Raises ExistsError if another process finished the dataset before this one took the lock."""
        existing_path = complete_at(self.target)
        if existing_path is None and resume:
            existing_path = self.target.alike()
        if existing_path is not None:
            self.journal.remove()
            with contextlib.suppress(OSError):
                self.target.root.rmdir()  # saev's working folder: the finished dataset has another name
            raise ExistsError.finished(existing_path)

    def _tell_others(self) -> None:
        """Warns about unfinished datasets next to this one that were requested with other arguments: they are not continued."""
        target = self.target
        for folder in formats.get(target.format).begun(target.root.parent) if target.names_itself else ():
            journal = Journal(folder)
            with contextlib.suppress(ActshardError):
                if folder != target.root and journal.exists() and state_of(journal.folder) == "was interrupted":
                    journal.read()
                    if journal.request is None:
                        continue  # its writer was killed before its first line was complete
                    difference = journal.request.difference(target.request) or "its source was another"
                    warn(
                        f"{target.root.parent}: another dataset is begun: the unfinished one in {folder.name}, of "
                        f"{many(journal.examples, 'example')}, was requested otherwise ({difference}). Repeat its request to "
                        "continue it",
                        code="other-unfinished",
                    )

    def _continue(self, config: dict[str, object]) -> None:
        """Continues after the committed examples."""
        self._agree(config)
        self._configured = True
        lengths = self._lengths_so_far()
        if len(lengths) != self.journal.examples:
            raise FormatError(
                f"expected {self.journal.examples} examples, found tables of {len(lengths)}",
                path=self.journal.folder,
            )
        if self.journal.commits:
            if not self.journal.closing:
                self._check_files()
            try:
                self.target.restore([c["state"] for c in self.journal.commits], lengths)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, ActshardError):
                    raise
                raise FormatError(
                    f"expected a state of {self.target.format}: {error!r}", path=self.journal.path
                ) from error
        if not self.journal.closing:
            self.target.forget(lengths)

    def _check_files(self) -> None:
        """Raises an error if a file is missing, or shorter than when its examples were committed: a scratch disk was cleaned."""
        for name, size in self.journal.files.items():
            present = self._size_of(name)
            if present is None or present < size:
                raise TruncatedFileError(
                    f"expected {many(size, 'byte')} of committed examples, found {'no file' if present is None else present}: it "
                    "was changed since. Restore it, or write to another folder",
                    path=self.target.root / name,
                )

    def _size_of(self, name: str) -> int | None:
        """Bytes of a file of the dataset, also under its temporary name; None without one."""
        for path in names_of(self.target.root / name):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return None

    def _agree(self, config: dict[str, object]) -> None:
        """Raises ArgumentError if the request or the settings differ from the journal's; the target adopts what was determined."""
        target, spec = self.target, self.target.spec
        assert self.journal.request is not None
        self._refuse_other(self.journal.request, target.request)
        try:
            target.adopt(config)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ActshardError):
                raise
            raise FormatError(
                f"line 1: field 'config': expected the settings of a {target.format} writer: {error!r}",
                path=self.journal.path,
            ) from error
        for name, journal_setting, request_setting in (
            ("dtype", target.dtype, spec.dtype),
            ("tokens_per_example", target.tokens, spec.tokens),
        ):
            if None not in (journal_setting, request_setting) and journal_setting != request_setting:
                raise self._differs(name, journal_setting, request_setting)

    def _refuse_other(self, journal_request: Request, request: Request) -> None:
        """Raises ArgumentError if a request differs from the one that began the dataset."""
        difference = journal_request.difference(request.completed(journal_request))
        if difference is not None:
            raise self._differs(*difference)
        if journal_request.sources != request.sources:
            raise self._differs("source", "the same files", "others")

    def _differs(self, name: str, expected: object, found: object) -> ArgumentError:
        return ArgumentError(
            f"{name}: expected {expected}, as in the unfinished dataset in {self.target.root}, found {found}. Repeat the request "
            "that began it, or write to another folder."
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> Path:
        """Commits everything, completes the dataset and returns its path."""
        self.commit()
        target = self.target
        expected = target.spec.num_examples
        if self.committed == 0 and (target.spec.part is None or expected is not None):
            self._forget()
            raise ArgumentError("nothing was appended: expected at least one example")
        if expected is not None and expected != self.committed:
            self.abort()
            raise ArgumentError(
                f"num_examples: expected {expected}, found {self.committed} appended. They are kept: pass resume=True to append "
                "the others."
            )
        if self.committed == 0:
            return self._finish_empty()
        self._tried = self.journal.closing
        self._stop()
        self._closed = True
        try:
            if not self.journal.finished:
                lengths, columns = self.read_back()
                if not target.ragged and target.content_lengths is None:
                    target.content_lengths = self._own_lengths
                # All checks were made on append: from here on only I/O errors can occur.
                self.journal.close()
                with recorded_files(self._is_other) as self._finished:
                    target.finish(AllExamples(lengths, columns))
                    files = formats.get(target.format).checked_files
                    target.keep_request(self.committed, self.journal.overflows, self.journal.digests, files)
                self.journal.finish()
            dataset_path = target.place()
            if dataset_path != target.root:
                self._move(dataset_path)
            sync_folders([dataset_path.parent])
            check_opens(dataset_path, target.format)  # a part, before a merge that waits for its journal may take it
            self.journal.remove()
            with contextlib.suppress(MissingFileError):  # a part may be merged from here on
                sync_folders([dataset_path])
        except OSError as error:
            if isinstance(error, ExistsError) and error.path is not None and target.root in Path(error.path).parents:
                self.journal.keep_other(Path(error.path).relative_to(target.root).as_posix())
            if isinstance(error, ActshardError):
                raise
            raise from_os(error, error.filename or target.root, "finish") from error
        finally:
            self.journal.lock.release()
        return dataset_path

    def _is_other(self, path: Path) -> bool:
        """Whether a file that exists under a name of the finished dataset is neither a committed one nor of an earlier attempt."""
        if self.target.root not in path.parents:
            return False  # the record next to a folder, of a dataset that was there before
        name = path.relative_to(self.target.root).as_posix()
        return name in self.journal.others or not (self._tried or name in self.journal.files)

    def _finish_empty(self) -> Path:
        """Finishes a part without examples. Its marker file shows merge that the part exists."""
        spec = self.target.spec
        assert spec.part is not None
        fields = {"actshard": 1, "examples": 0, "format": self.target.format, "layers": list(spec.layers)}
        temporary = self.journal.folder / "empty.json"
        write_json(temporary, {**fields, "d_model": spec.d_model, "part": list(spec.part)})
        rename(temporary, spec.path / EMPTY)
        sync_folders([spec.path])
        self._forget()
        return spec.path

    def _forget(self) -> None:
        """Stops and removes all files of a dataset without examples."""
        self._closed = True
        self._stop()
        self._remove_files()

    def _remove_files(self) -> None:
        """Removes what this writer, or the one that it resumed, wrote, and its working folder."""
        root = self.target.root
        written = self.target.dirty()[0] if self.target.n > self.committed else []
        remove_files(root, [*(root / name for name in sorted(self.journal.files)), *written, *self._finished])
        self.journal.remove()
        if self._configured and not self.committed:  # a killed writer may have left folders that it recorded no file in
            remove_empty_folders(root)
        with contextlib.suppress(OSError):
            root.rmdir()

    def _move(self, dataset_path: Path) -> None:
        try:
            rename(self.target.root, dataset_path)
        except ActshardError as error:
            # Only if the name is taken: other errors, e.g. a full disk, are raised unchanged and the same call continues.
            if os.path.lexists(dataset_path):
                raise ExistsError(f"cannot rename the finished dataset: {error.detail}", path=dataset_path) from error
            raise
        self.journal.moved(dataset_path)

    def discard(self) -> None:
        """Removes all files that were written, and no others in the folder."""
        if not self._closed:
            self._closed = True
            self._stop()
        self._remove_files()

    def abort(self) -> None:
        """Stops without finishing. Committed examples stay and can be resumed."""
        if not self._closed:
            super().abort()
            self.journal.lock.release()

    # -- the background thread -------------------------------------------------------------------------------------

    def _write(self, block: Block) -> None:
        self.target.settle(block)
        self._configure()
        super()._write(block)
        self._since += int(np.maximum(block.lengths, 0).sum()) * self.target.row_bytes
        if self._since >= COMMIT_BYTES:
            self._commit()

    def _configure(self) -> None:
        if not self._configured:
            self.journal.begin_with(self.target.config(), self.target.request)
            self._configured = True

    def _record(self, commit: Commit) -> None:
        self.journal.commit(commit, {name: self._size_of(name) or 0 for name in commit.files})
        self._since = 0

    # -- lengths and columns of the examples -----------------------------------------------------------------------

    def _lengths_so_far(self) -> NDArray[np.int64]:
        layers = len(self.target.spec.layers)
        return lengths_in(self.journal.tables(), layers)

    def _own_lengths(self) -> NDArray[np.int64]:
        """Tokens of each example before padding; the stored number if the journal has none."""
        lengths = np.array(self._lengths_so_far()[:, 0])
        position = 0
        for table in self.journal.tables():
            if OWN in table.column_names:
                column = table[OWN]
                is_valid = column.is_valid().to_numpy()
                lengths[position : position + len(table)][is_valid] = column.drop_null().to_numpy()
            position += len(table)
        return lengths

    def read_back(self) -> tuple[NDArray[np.int64], object]:
        """Returns lengths and columns of all committed examples. Columns are memory-mapped."""
        lengths = self._lengths_so_far()
        columns, mixed = columns_in(self.journal.tables())
        if mixed:
            raise FormatError(
                f"column {mixed[0]!r}: expected values of one type, found several", path=self.journal.folder
            )
        return lengths, columns
