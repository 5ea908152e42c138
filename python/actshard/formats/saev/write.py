"""Writes saev shards: protocol 2.1 as saev's loaders read it, or 2.0 as in the published text.

The protocols differ (docs/formats/saev.md) in field names; in HASH (8 digits of the fields in order, or all 64 of the sorted
fields); and in the last shard (padded with zeros to full size, or short). Neither gets the empty shard that saev's own writer
adds if the examples fill the shards exactly.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._json import read_json
from actshard.base.errors import ArgumentError, FormatError, NotStoredError, UnfinishedError
from actshard.base.work import FOLDER, first_difference, rename, sync_folders, write_bytes, write_json
from actshard.formats.saev.read import ITEMSIZE, LENGTHS, hashes
from actshard.formats.target import PATCH_LABELS, AllExamples, Block, Spec, Target, array_of, flag, only, positive

if TYPE_CHECKING:
    import pyarrow as pa

FAMILIES = ("bird-mae", "clip", "dinov2", "dinov3", "fake-clip", "pe-core", "pe-spatial", "siglip")
"""Families that saev's loaders accept; ``fake-clip`` is saev's own name for any other model."""
BUDGET = 2_400_000
"""saev's default number of token vectors per shard, over all layers."""
_PART = ".part"
_SHARD = re.compile(r"acts(\d{6,})\.bin(?:\.part)?")


class SaevTarget(Target):
    """Writes ``<path>/<HASH>/``. The folder is ``.writing-*`` until HASH, which depends on the number of examples, is known."""

    format: ClassVar[str] = "saev"
    format_options: ClassVar[Mapping[str, str]] = {
        "protocol": '"2.1" (default) or "2.0"',
        "cls_token": "whether token 0 of every example is CLS (default: False)",
        "max_tokens_per_shard": f"token vectors per shard, over all layers (default: {BUDGET:,}, or by shard_bytes=)",
    }
    metadata_keys = ("family", "ckpt", "data", "dataset", "pixel_agg")
    decides: ClassVar[tuple[str, ...]] = ("dtype", "_tokens")
    ragged = False
    holds_columns = False
    names_itself = True
    holds_special_tokens = True
    splits = "examples"
    holds_labels = True
    keeps_lengths = True

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.dtype = np.dtype(np.float32)
        self.protocol = spec.options.get("protocol", "2.1")
        if self.protocol not in ("2.1", "2.0"):
            raise ArgumentError(f'protocol: expected "2.1" or "2.0", found {self.protocol!r}')
        self.cls = flag(spec.options, "cls_token", False)
        self._tokens = spec.tokens
        self._budget = positive(spec.options, "max_tokens_per_shard", None)
        for name in ("family", "ckpt", "dataset"):
            if not isinstance(spec.metadata.get(name, ""), str):
                raise ArgumentError(f"metadata: {name} must be a string, not {spec.metadata[name]!r}")
        self.has_labels: bool | None = None
        self._dirty: set[Path] = set()
        self.root = spec.path / f".writing-{self._key()}"

    def _key(self) -> str:
        """Identifies the configuration before HASH is known, by everything but the number of examples."""
        config = {**self.config(), "tokens": None, "dtype": None}
        return hashes({"asked": json.dumps(config, sort_keys=True, default=str)})[0]

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, ("F32",), "saev", "")

    def take_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        if self.spec.dtype is None:
            self.check_dtype(dtype)
        return np.dtype(np.float32)

    def take_tokens(self, tokens: int) -> None:
        if self._tokens is None:
            self._tokens = tokens
        if self._tokens <= int(self.cls):
            raise ArgumentError(f"expected at least one content token per example, found {self._tokens - self.cls}")

    @classmethod
    def conversion_options(
        cls,
        source_options: Mapping[str, object],
        user_options: Mapping[str, object],
        tokens: str,
        pooled: Callable[[], bool],
    ) -> dict[str, object]:
        return {**source_options, **({} if tokens == "all" else {"cls_token": False}), **user_options}

    @property
    def special_tokens(self) -> int:
        return int(self.cls)

    @property
    def tokens(self) -> int | None:
        return self._tokens

    @property
    def per_example(self) -> int:
        """Token vectors per example, over all layers."""
        assert self._tokens is not None
        return self._tokens * len(self.spec.layers)

    @property
    def budget(self) -> int:
        """Token vectors per shard."""
        if self._budget is not None:
            budget = self._budget
        elif self.spec.shard_bytes is not None:
            budget = max(self.spec.shard_bytes // (self.spec.d_model * ITEMSIZE), self.per_example)
        else:
            budget = max(BUDGET, self.per_example)
            if self.spec.whole is not None:  # the limit of budget_of, for all parts together
                budget = min(budget, self.spec.whole * self.per_example)
        if budget < self.per_example:
            raise ArgumentError(
                f"max_tokens_per_shard: expected at least {self.per_example}, the vectors of one example, found {budget}"
            )
        return budget

    def budget_of(self, n: int) -> int:
        """Budget in metadata.json for n examples. Without a requested budget, a single shard is only as large as its examples.

        saev's shards are always full-size, so its default budget would create a file of gigabytes for a few examples.
        """
        has_budget = self._budget is not None or self.spec.shard_bytes is not None or self.spec.part is not None
        return self.budget if has_budget else min(self.budget, n * self.per_example)

    @property
    def eps(self) -> int:
        """Examples per shard."""
        return self.budget // self.per_example

    @property
    def example_bytes(self) -> int:
        return self.per_example * self.spec.d_model * ITEMSIZE

    def config(self) -> dict[str, object]:
        return {
            **super().config(),
            "tokens": self._tokens,
            "protocol": self.protocol,
            "cls_token": self.cls,
            "budget": self._budget,
            "shard_bytes": self.spec.shard_bytes,
        }

    def adopt(self, config: dict[str, object]) -> None:
        tokens = config["tokens"]
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"tokens {tokens!r}")
        self._tokens = tokens

    def metadata(self, n: int) -> dict[str, object]:
        """Contents of metadata.json for n examples. HASH depends on the order of the fields."""
        assert self._tokens is not None
        metadata = self.spec.metadata
        family = {"family": metadata.get("family", "fake-clip"), "ckpt": metadata.get("ckpt", "unknown")}
        content, data = self._tokens - self.cls, metadata.get("data", "")
        common = {"cls_token": self.cls, "d_model": self.spec.d_model}
        end = {"dtype": "float32", "protocol": self.protocol}
        dataset = metadata.get("dataset", "unknown")
        layers = list(self.spec.layers)
        if self.protocol == "2.0":
            sizes = {"n_ex": n, "patches_per_shard": self.budget_of(n)}
            pixel = {"pixel_agg": metadata["pixel_agg"]} if "pixel_agg" in metadata else {}
            head = {**family, "layers": layers, "patches_per_ex": content, **common, **sizes}
            return {**head, "data": data or {}, "dataset": dataset, **pixel, **end}
        sizes = {"n_examples": n, "max_tokens_per_shard": self.budget_of(n)}
        # 2.1 requires a string; an object of an older protocol is stored as JSON text.
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        head = {**family, "layers": layers, "content_tokens_per_example": content, **common, **sizes}
        return {**head, "data": text, "dataset": dataset, "pixel_agg": metadata.get("pixel_agg") or "majority", **end}

    def hash(self, n: int) -> str:
        """The folder's name: a hash of the metadata."""
        return hashes(self.metadata(n))[0 if self.protocol == "2.1" else 2]

    def existing(self, n: int | None) -> Path | None:
        n = n if n is not None else self.spec.num_examples
        if n is None or self._tokens is None:
            return None
        path = self.spec.path / self.hash(n)
        if not path.exists():
            return None
        metadata = read_json(path / "metadata.json")
        if not isinstance(metadata, dict) or path.name not in hashes(metadata):
            digest = hashes(metadata)[0] if isinstance(metadata, dict) else "of a non-object"
            raise FormatError(
                f"expected metadata whose hash is the folder's name, found hash {digest}: the folder was renamed or changed; "
                "move it away",
                path=path,
            )
        shards = read_json(path / "shards.json") if (path / "shards.json").exists() else []
        counts = [s.get("n_examples", s.get("n_ex")) for s in shards if isinstance(s, dict)]
        if sum(c for c in counts if type(c) is int) != n:
            raise UnfinishedError(
                f"expected {n} examples in shards.json, found {counts}: the writer of another program was interrupted; "
                "move the folder away",
                path=path,
            )
        return path

    def alike(self) -> Path | None:
        if not self.spec.path.is_dir() or self.spec.num_examples is not None:
            return None
        name = "n_ex" if self.protocol == "2.0" else "n_examples"
        folders = []
        for path in sorted(self.spec.path.glob("*/metadata.json")):
            metadata = read_json(path)
            n = metadata.get(name) if isinstance(metadata, dict) else None
            content = (
                metadata.get("content_tokens_per_example", metadata.get("patches_per_ex")) if type(n) is int else None
            )
            if type(n) is not int or type(content) is not int:
                continue
            tokens, self._tokens = self._tokens, self._tokens or content + self.cls
            same = self.metadata(n) == metadata
            self._tokens = tokens
            if same and path.parent.name in hashes(metadata):
                folders.append(path.parent)
        return folders[0] if len(folders) == 1 else None

    # -- writing ---------------------------------------------------------------------------------------------------

    def _shard(self, index: int) -> Path:
        """Path of a shard: its final name if it is complete, else its temporary name."""
        path = self.root / f"acts{index:06}.bin"
        return path if path.exists() else path.with_name(path.name + _PART)

    def restore(self, states: Sequence[dict[str, Any]], lengths: NDArray[np.int64]) -> None:
        self.n = len(lengths)
        self.has_labels = states[-1]["labels"]

    def forget(self, lengths: NDArray[np.int64]) -> None:
        n = len(lengths)
        if self._tokens is None:
            return
        sizes = {self._shard(n // self.eps): n % self.eps * self.example_bytes}
        sizes[self.root / "labels.bin"] = n * (self._tokens - self.cls)
        for path, size in sizes.items():
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        for path in self.root.glob("acts*.bin*"):
            # Includes complete shards: they are renamed before the journal counts their examples.
            match = _SHARD.fullmatch(path.name)
            if match is not None and int(match[1]) * self.eps >= n:
                path.unlink()

    def borders(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.arange(0, len(lengths), self.eps)

    def check_columns(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        if extra_columns := [name for name in schema.names if name != PATCH_LABELS]:
            raise NotStoredError(f"saev stores no columns, only labels=; found {extra_columns[0]!r}")
        for field in schema:
            if not pa.types.is_fixed_size_list(field.type) or not pa.types.is_uint8(field.type.value_type):
                raise ArgumentError(f"labels: expected (batch, content tokens) uint8, found {field.type}")

    def check_values(self, table: pa.Table, first: int) -> None:
        if PATCH_LABELS in table.column_names:
            self._checked(table[PATCH_LABELS], len(table))

    def _checked(self, column: pa.ChunkedArray, n: int) -> NDArray[np.uint8]:
        """Returns labels after checking that there is one per content token."""
        assert self._tokens is not None
        content = self._tokens - self.cls
        if column.null_count:
            raise ArgumentError("labels: expected labels for all examples or for none")
        labels = array_of(column)
        if labels.shape != (n, content) or labels.dtype != np.uint8:
            raise ArgumentError(
                f"labels: expected ({n}, {content}) uint8, one per content token, found {labels.shape} {labels.dtype}"
            )
        return np.ascontiguousarray(labels)

    def write(self, block: Block) -> None:
        eps, size = self.eps, self.example_bytes
        first, end = self.n, self.n + len(block)
        sources, pieces = [block.bytes], []
        files: list[tuple[Path, int]] = []
        for shard in range(first // eps, -(-end // eps)):
            a, b = max(first, shard * eps), min(end, (shard + 1) * eps)
            pieces.append((0, (a - first) * size, (b - a) * size, len(files), (a - shard * eps) * size))
            files.append((self._shard(shard), 0))
        labels = self._labels(block)
        if labels is not None:
            pieces.append((1, 0, labels.size, len(files), first * labels.shape[1]))
            sources.append(labels.reshape(-1))
            files.append((self.root / "labels.bin", 0))
        self.put(sources, files, pieces)
        self._dirty |= {path for path, _ in files}
        self.n = end

    def _labels(self, block: Block) -> NDArray[np.uint8] | None:
        names = [] if block.columns is None else block.columns.column_names
        if extra_columns := [name for name in names if name != PATCH_LABELS]:
            raise NotStoredError(f"saev stores no columns, only labels=; found {extra_columns[0]!r}")
        has = bool(names)
        if self.has_labels is None:
            self.has_labels = has
        if has != self.has_labels:
            raise ArgumentError("labels: expected labels for all examples or for none")
        if not has:
            return None
        assert block.columns is not None
        return self._checked(block.columns[PATCH_LABELS], len(block))

    def dirty(self) -> tuple[list[Path], dict[str, object]]:
        return sorted(self._dirty), {"labels": self.has_labels}

    def committed(self) -> None:
        for path in sorted(self._dirty):
            if path.name.endswith(_PART) and int(path.name[4:10]) < self.n // self.eps:
                rename(path, path.with_name(path.name.removesuffix(_PART)))
        sync_folders([self.root])
        self._dirty.clear()

    def finish(self, examples: AllExamples) -> None:
        n, eps = len(examples), self.eps
        counts = [min(eps, n - first) for first in range(0, n, eps)]
        last = self._shard(len(counts) - 1)
        # A crash may have left uncommitted data at the end.
        size = counts[-1] * self.example_bytes
        os.truncate(last, size)
        if self.protocol == "2.1":
            self.put([], [(last, self.budget_of(n) // self.per_example * self.example_bytes)], [])
        if self.has_labels:
            os.truncate(self.root / "labels.bin", n * (self.per_example // len(self.spec.layers) - self.cls))
            _native.sync_files([self.root / "labels.bin"])
        _native.sync_files([last])
        rename(last, last.with_name(last.name.removesuffix(_PART)))
        for stray in self.root.glob(f"acts*{_PART}"):
            stray.unlink()
        self._keep_lengths()
        sync_folders([self.root])
        name = "n_ex" if self.protocol == "2.0" else "n_examples"
        listing = [{"name": f"acts{i:06}.bin", name: count} for i, count in enumerate(counts)]
        write_json(self.root / "shards.json", listing)
        write_json(self.root / "metadata.json", self.metadata(n))

    def _keep_lengths(self) -> None:
        """Writes lengths before padding to a separate file, because saev has no field for them. saev ignores the file."""
        if self.content_lengths is None:
            return
        assert self._tokens is not None
        content = self._tokens - self.cls
        lengths = np.clip(self.content_lengths() - self.cls, 0, content)
        if (lengths < content).any():
            write_bytes(self.root / LENGTHS, lengths.astype("<u4").tobytes())

    def estimate(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        n, eps = len(tokens), self.eps
        shards = -(-n // eps)
        examples = shards * (self.budget_of(n) // self.per_example) if self.protocol == "2.1" else n
        return shards, shards + 2, examples * self.example_bytes

    def place(self) -> Path:
        return self.spec.path / self.hash(self.n)

    def difference(self, path: Path) -> str | None:
        assert self._tokens is not None
        shards = range(-(-self.n // self.eps))
        files = [
            (self._shard(i), f"acts{i:06}.bin", min(self.eps, self.n - i * self.eps) * self.example_bytes)
            for i in shards
        ]
        if self.has_labels:
            files.append((self.root / "labels.bin", "labels.bin", self.n * (self._tokens - self.cls)))
        elif (path / "labels.bin").exists():
            return "labels.bin, which only the finished dump has"
        for file, name, size in files:
            offset = first_difference(file, path / name, size)
            if offset is not None:
                return f"{name} from byte {offset}"
        return None


def writing_folders(path: Path) -> list[Path]:
    """Folders of unfinished dumps below a path."""
    return sorted(p for p in path.glob(".writing-*") if (p / FOLDER).is_dir()) if path.is_dir() else []
