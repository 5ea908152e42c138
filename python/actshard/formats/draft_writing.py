"""Writes draft-model examples: a file of ``torch.save`` per example, as :mod:`draft_examples` reads them.

A file has the temporary name ``.NAME.part`` until its example is committed. There is no manifest: while the journal exists, the
dataset is unfinished. A format provides the names of its files, and of the tensors in them (:class:`DraftKind`).
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import name_of
from actshard.base.errors import ArgumentError, FormatError
from actshard.base.work import FOLDER, rename, sync_folders
from actshard.formats.carrying import Carrying
from actshard.formats.draft_examples import FLOATS, IDS, MASKS
from actshard.formats.per_token import LAST, TokenTarget
from actshard.formats.target import AllExamples, Block, Spec, only
from actshard.formats.torch_zip import NewTensor, TorchArchive

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents

AUX = "aux"
"""Content of a tensor: the layers except the last, concatenated."""
_GZIP_LEVEL = 6
_AROUND = 2200
"""Approximate size of a file without its tensors, in bytes."""


@dataclass(frozen=True)
class DraftKind:
    """Files of one kind.

    Attributes:
        tensors: key, content, and whether there is a first axis of 1, in the order of the file. Contents are ``"input_ids"``,
            ``"loss_mask"``, ``"attention_mask"``, :data:`AUX` and :data:`~actshard.formats.per_token.LAST`.
        values: columns of integers, flags or strings that are stored after the tensors if given.
        may_lack_aux: whether layers other than the last may be absent; the tensor is then empty.
    """

    tensors: tuple[tuple[str, str, bool], ...]
    values: tuple[str, ...] = ()
    may_lack_aux: bool = False

    def has(self, content: str) -> bool:
        """Whether files have a tensor of this content."""
        return any(tensor_content == content for _, tensor_content, _ in self.tensors)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that files store."""
        return (*(c for _, c, _ in self.tensors if c in (IDS, *MASKS)), *self.values)


class DraftCarrying(Carrying):
    """Drops metadata, for which the files have no place. A copy to the same format keeps the kind of files."""

    of_files: ClassVar[frozenset[str]] = frozenset(("kind",))

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {"kind": metadata["kind"]} if isinstance(metadata.get("kind"), str) else {}

    def metadata_from(
        self, contents: Contents, origin: dict[str, object]
    ) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {}


class DraftTarget(TokenTarget):
    """Writes a file per example. Layers may have any names; the files do not record them."""

    kinds: ClassVar[Mapping[str, DraftKind]]
    """Kinds of files by name. The default is the first kind; without a last hidden state, the first kind that stores none."""
    file: ClassVar[re.Pattern[str]]
    """Relative paths of files; group 1 is the example's number."""
    copies: float = 1.5
    numbers_layers = False
    holds_metadata = False
    takes_shard_bytes = False

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.metadata:
            name = min(spec.metadata)
            raise ArgumentError(f"metadata: {self.format} files have no place for {name!r}; leave metadata out")
        self.kind_name = self._kind_name(spec.options.get("kind"))
        self.kind = self.kinds[self.kind_name]
        self.only_columns = self.kind.columns
        self.token_types = {name: np.int64 for name in self.kind.columns if name not in self.kind.values}
        self._check_layers()
        self._new: list[Path] = []

    def _kind_name(self, option: object) -> str:
        if option is None:
            fitting = [name for name, kind in self.kinds.items() if kind.has(LAST) == (self.last is not None)]
            return fitting[0] if fitting else next(iter(self.kinds))
        if not isinstance(option, str) or option not in self.kinds:
            raise ArgumentError(f"kind: expected one of {', '.join(self.kinds)}, found {option!r}")
        return option

    def _check_layers(self) -> None:
        """Raises ArgumentError for layers that files of this kind cannot store, or without layers that they require."""
        kind, layers_found = self.kind, f"found {list(self.spec.layers)}"
        what = self.format if len(self.kinds) == 1 else f"{self.format}'s {self.kind_name}"
        if kind.has(LAST):
            kinds_without_last = [name for name, other_kind in self.kinds.items() if not other_kind.has(LAST)]
            self.require_last(
                f"{what} stores",
                f", or pass kind={kinds_without_last[0]!r}, which has none" if kinds_without_last else "",
            )
        if not kind.has(LAST) and self.last is not None:
            raise ArgumentError(f"layers: {what} has no place for the last hidden state; leave it out: {layers_found}")
        if not kind.has(AUX) and self.aux:
            raise ArgumentError(
                f"layers: {what} stores the last hidden state only; pass layers=[{LAST!r}]: {layers_found}"
            )
        if kind.has(AUX) and not self.aux and not kind.may_lack_aux:
            raise ArgumentError(f"layers: {what} stores other layers besides the last hidden state; {layers_found}")

    @property
    def reading_layout(self) -> dict[str, object] | None:
        return {"layers": list(self.reading.values())} if self.aux else None

    # -- files -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def name(self, example: int) -> str:
        """Path of an example's file, relative to the dataset."""

    def archive_name(self, example: int) -> str:
        """The folder within an example's file: the file's name up to the first dot, as torch names it."""
        return self.name(example).rpartition("/")[2].partition(".")[0]

    @property
    def gzipped(self) -> bool:
        """Whether files are gzipped."""
        return False

    def _example_files(self) -> Iterator[tuple[int, bool, Path]]:
        """Files that this writer made: example number, whether the file has its final name, path."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = [subfolder for subfolder in folders if subfolder != FOLDER]
            for name in names:
                path = Path(folder, name)
                final = path
                if name.startswith(".") and name.endswith(".part"):
                    final = path.with_name(name[1 : -len(".part")])
                match = self.file.fullmatch(final.relative_to(self.root).as_posix())
                if match is not None and self.root / self.name(int(match[1])) == final:
                    yield int(match[1]), final == path, path

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, FLOATS, self.format, "")

    def check_columns(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        super().check_columns(pa.schema([f for f in schema if f.name not in self.kind.values]))
        for field in schema:
            plain = (
                pa.types.is_integer,
                pa.types.is_boolean,
                pa.types.is_string,
                pa.types.is_large_string,
                pa.types.is_null,
            )
            if field.name in self.kind.values and not any(is_(field.type) for is_ in plain):
                raise ArgumentError(f"columns: {field.name!r}: expected integers, flags or strings, found {field.type}")

    def config(self) -> dict[str, object]:
        return {**super().config(), "kind": self.kind_name, "last": self.last, "name": self.name(0)}

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        losses = []
        stored = [self.spec.layers[k] for k in self.aux]
        if stored != list(range(len(stored))) or (len(stored) > 1 and not self.kind.has(LAST)):
            names, numbers = ", ".join(map(str, stored)), ", ".join(map(str, range(len(stored))))
            text = f"{self.format} does not record their names: {names} are read as {numbers}"
            if not self.kind.has(LAST):
                text = f"{self.format} does not record their number: {names} are read as one layer"
            losses.append(("layers", f"{text}; open with layout={{'layers': {stored!r}}} to name them"))
        return losses + super().further_losses(columns)

    # -- writing ---------------------------------------------------------------------------------------------------

    def restore(self, states: Sequence[dict[str, object]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        for number, final, path in list(self._example_files()):
            if number < self.n and not final:
                rename(path, path.with_name(path.name[1 : -len(".part")]))

    def forget(self, lengths: NDArray[np.int64]) -> None:
        for number, final, path in list(self._example_files()):
            if number >= len(lengths) or not final:
                path.unlink()

    def _value(self, tokens: int, values: Mapping[str, object]) -> dict[str, object]:
        """The object that a file contains."""
        assert self.dtype is not None
        states, width = name_of(self.dtype), self.spec.d_model
        tensors: dict[str, object] = {}
        for key, content, first in self.kind.tensors:
            if content == AUX and not self.aux:
                tensors[key] = NewTensor("F32", (0,))
                continue
            wide = {AUX: len(self.aux) * width, LAST: width}.get(content)
            shape = (*((1,) if first else ()), tokens, *(() if wide is None else (wide,)))
            tensors[key] = NewTensor("I64" if wide is None else states, shape)
        return {**tensors, **values}

    def write(self, block: Block) -> None:
        tokens, per_token = self.tokens_of(block)
        assert block.columns is not None
        values = {
            name: block.columns[name].to_pylist() for name in self.kind.values if name in block.columns.column_names
        }
        archives = []
        for i, n in enumerate(tokens.tolist()):
            example_values = {name: column[i] for name, column in values.items() if column[i] is not None}
            archives.append(TorchArchive(self._value(n, example_values), self.archive_name(self.n + i)))
        firsts = np.concatenate([[0], np.cumsum([archive.size for archive in archives])]).tolist()
        buffer = np.empty(firsts[-1], np.uint8)
        bounds = np.concatenate([[0], np.cumsum(tokens)]).tolist()
        memory = block.memory.reshape(-1, self.spec.d_model)
        rows, starts = memory.view(np.uint8).reshape(len(memory), self.row_bytes), block.starts
        for i, (n, archive) in enumerate(zip(tokens.tolist(), archives, strict=True)):
            into = buffer[firsts[i] : firsts[i + 1]]
            for (_, content, _), (start, size) in zip(self.kind.tensors, archive.places, strict=True):
                body = into[start : start + size]
                if content == AUX and self.aux:
                    states = body.reshape(n, len(self.aux), self.row_bytes)
                    for k, layer in enumerate(self.aux):
                        states[:, k] = rows[starts[i, layer] : starts[i, layer] + n]
                elif content == LAST:
                    body.reshape(n, self.row_bytes)[:] = rows[starts[i, self.last] : starts[i, self.last] + n]
                elif content in per_token:
                    body[:] = per_token[content][0][bounds[i] : bounds[i + 1]].astype("<i8").view(np.uint8)
                elif content != AUX:
                    body[:] = np.ones(n, "<i8").view(np.uint8)
            archive.seal(into)
        self._put_files(buffer, firsts)
        self.n += len(block)

    def _put_files(self, buffer: NDArray[np.uint8], firsts: Sequence[int]) -> None:
        """Writes files under temporary names."""
        finals = [self.root / self.name(self.n + i) for i in range(len(firsts) - 1)]
        for folder in dict.fromkeys(path.parent for path in finals):
            folder.mkdir(parents=True, exist_ok=True)
        if self.gzipped:
            for path, first, end in zip(finals, firsts, firsts[1:], strict=False):
                _native.write_segments(_working(path), [buffer[first:end]], _GZIP_LEVEL)
        else:
            files = [(_working(path), 0) for path in finals]
            pieces = [(0, first, end - first, i, 0) for i, (first, end) in enumerate(pairwise(firsts))]
            self.put([buffer], files, pieces)
        self._new += finals

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return [_working(path) for path in self._new], {}

    def committed(self) -> None:
        for path in self._new:
            rename(_working(path), path)
        self._sync({path.parent for path in self._new})
        self._new = []

    def _sync(self, folders: set[Path]) -> None:
        """Syncs the folders of written files, up to the dataset's folder."""
        between = {
            parent for folder in folders for parent in (folder, *folder.parents) if parent.is_relative_to(self.root)
        }
        sync_folders(sorted(between, reverse=True))

    def finish(self, examples: AllExamples) -> None:
        self.forget(examples.lengths)
        count = sum(1 for _ in self._example_files())
        if count != len(examples):
            raise FormatError(f"expected {len(examples)} files, found {count}", path=self.root)

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        row = self.spec.d_model * (2 if self.dtype is None else self.itemsize)
        token_bytes = 8 * len(self.kind.columns) + len(self.spec.layers) * row
        return len(tokens), len(tokens), int(tokens.sum()) * token_bytes + _AROUND * len(tokens)


def _working(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
