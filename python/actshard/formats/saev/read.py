"""Reads saev shards, all known protocol versions.

.. code-block:: text

    metadata.json      the extraction's configuration: sizes, layers, model
    shards.json        [{"name": "acts000000.bin", "n_examples": 3}, ...]; absent in the first months
    acts000000.bin     C-ordered (examples_per_shard, layers, tokens, d_model) native float32, no header
    labels.bin         optional: (n_examples, content tokens) uint8
    actshard_lengths.bin  optional, written by actshard: (n_examples,) little-endian uint32, content tokens before zero padding;
                       saev's loaders ignore it

Sources: the protocol text (2.0), and files that OSU-NLP-Group/saev wrote from October 2024 to March 2026. The text's field names
were used for five days, so each field is found by any of its names, regardless of the protocol version. The text allows a short
last shard; saev's code pads it with zeros, and adds a shard of zeros if the examples fill the shards exactly. All variants are
read. Padding is never read, because only the rows listed in shards.json are addressed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import (
    RAISE,
    ActshardError,
    Faults,
    FileAccessError,
    FormatError,
    MissingFileError,
    NotAFileError,
    NotStoredError,
    TruncatedFileError,
    UnsupportedError,
)
from actshard.base.location import Location, found_together
from actshard.formats.contents import Absence, Contents, Evidence, Options, leave_out, none_whole, size_of_file
from actshard.formats.format import Tell
from actshard.formats.report import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa


Scalar = TypeVar("Scalar", bound=np.generic)

# All names of each field, current name first; see the table of eras in docs/formats/saev.md.
N_EXAMPLES = ("n_examples", "n_ex", "n_imgs")
CONTENT_TOKENS = ("content_tokens_per_example", "n_content_tokens_per_example", "patches_per_ex", "n_patches_per_img")
D_MODEL = ("d_model", "d_vit")
BUDGET = ("max_tokens_per_shard", "patches_per_shard", "max_patches_per_shard", "n_patches_per_shard")
FAMILY = ("family", "vit_family", "model_family", "model_org")
CHECKPOINT = ("ckpt", "vit_ckpt", "model_ckpt", "model")

_MOST_SHARDS = 1 << 20
"""Maximum number of shards of a dump without a list of them."""
LAST_KNOWN = (2, 1)
ITEMSIZE = 4
LABELS = "labels.bin"
LENGTHS = "actshard_lengths.bin"
"""The number of tokens of each example before padding."""


def detect(path: Location) -> Evidence:
    """Checks for a folder with a metadata.json that contains saev's fields for d_model, layers and tokens."""
    looked_for = (
        "a folder with a metadata.json that has layers, d_model and content_tokens_per_example (or their older names)"
    )
    metadata = path / "metadata.json"
    if path.kind() != "folder":
        return Evidence(False, looked_for, "a file")
    if not metadata.exists():
        return Evidence(False, looked_for, "no metadata.json")
    value = read_json(metadata)
    if not isinstance(value, dict):
        return Evidence(False, looked_for, "a metadata.json that is not an object", near=True)
    required_fields = {
        "layers": ("layers", "n_layers"),
        "d_model": D_MODEL,
        "content_tokens_per_example": CONTENT_TOKENS,
    }
    missing = [name for name, names in required_fields.items() if not any(n in value for n in names)]
    if missing:
        return Evidence(False, looked_for, f"a metadata.json without {' and '.join(missing)}", near=True)
    return Evidence(True, looked_for, "a metadata.json with saev's fields")


class DumpMetadata:
    """Checked metadata of a dump, and its shards.

    Args:
        path: the dump's folder.
        faults: receives the faults of metadata.json, of shards.json, and of the sizes of shards.
        tell: called while the sizes of shards are checked.
        skips_incomplete: whether examples beyond the end of a shard, and of missing shards, are left out (:attr:`absent`).
    """

    def __init__(
        self,
        path: Location,
        faults: Faults = RAISE,
        tell: Tell = lambda what, count, total: None,
        *,
        skips_incomplete: bool = False,
    ) -> None:
        self.path = path
        self.faults = faults
        self.skips_incomplete = skips_incomplete
        self.fields = fields = Fields(read_json(path / "metadata.json"), path / "metadata.json", faults=faults)
        self.warnings: list[Remark] = []
        self.protocol = _protocol(fields, self.warnings)
        if fields.has("dtype") and fields.text("dtype") != "float32":
            faults.add(
                UnsupportedError(
                    f"field 'dtype': saev defines only \"float32\", found {show(fields.value['dtype'])}",
                    path=fields.path,
                )
            )
        self.layers = _layers(fields, self.warnings)
        self.n = fields.integer(*N_EXAMPLES)
        self.content = fields.integer(*CONTENT_TOKENS)
        # Older metadata, with `n_layers` for `layers`, lack the field; those models all had a CLS token.
        self.cls = fields.boolean("cls_token") if "cls_token" in fields.value or "layers" in fields.value else True
        self.tokens = self.content + self.cls
        self.d_model = fields.integer(*D_MODEL)
        budget = fields.integer(*BUDGET)
        self.model = "/".join(fields.text(*names) for names in (FAMILY, CHECKPOINT) if fields.has(*names))
        fields.check()
        self.per_example = self.tokens * len(self.layers)
        self.eps = budget // self.per_example
        """Examples per shard."""
        if self.eps == 0:
            expected = f"at least tokens x layers = {self.tokens} x {len(self.layers)} = {self.per_example}"
            faults.refuse(fields.error(fields.name(*BUDGET), expected))
        self.example_bytes = self.per_example * self.d_model * ITEMSIZE
        if self.example_bytes * max(self.eps, self.n) >= 1 << 62:
            sizes = f"{self.n} examples x {len(self.layers)} layers x {self.tokens} tokens x {self.d_model}"
            faults.refuse(FormatError(f"{sizes} exceeds 2^62 bytes", path=fields.path))
        self.shards = self._list_shards()
        """The shard files in order, each with its number of examples."""
        self.files_left_out: list[Location] = []
        self.absent = self._leave_out() if skips_incomplete else np.zeros(0, np.bool_)
        """A flag per example that is left out; empty if none can be."""
        self.bytes = self._check_sizes(tell)
        _check_hash(path, fields.value, self.warnings)

    def _list_shards(self) -> list[tuple[Location, int]]:
        listing = self.path / "shards.json"
        if not listing.exists():
            if (
                self.protocol is not None and not self.skips_incomplete
            ):  # shards.json came on 2025-06-18, a day before the protocol field
                names = [entry.name for entry in self.path.entries("acts*.bin")] if self.path.lists else []
                self.faults.add(
                    MissingFileError(
                        f"expected a list of shards, found none, only {len(names)} acts files {names[:5]}: "
                        "the dump is unfinished or a file was lost; create it again",
                        path=listing,
                    )
                )
            return self._usual_shards()
        with self.faults.noting(listing):
            value = read_json(listing)
            if isinstance(value, list):
                return self._listed_shards(value, listing)
            raise FormatError("expected a list of shards", path=listing)
        return self._usual_shards()

    def _usual_shards(self) -> list[tuple[Location, int]]:
        """The shards of a dump without a list of them: they are numbered."""
        expected = -(-self.n // self.eps)
        present = len(self.path.entries("acts*.bin")) if self.path.lists else expected
        if self.skips_incomplete:
            present = expected
        if present < expected:
            missing = next(shard for i in range(expected) if not (shard := self.path / _name(i)).exists())
            self.faults.add(MissingFileError(f"expected {expected} shards, found {present}", path=missing))
        elif expected > _MOST_SHARDS:
            self.faults.refuse(self.fields.error(self.fields.name(*N_EXAMPLES), f"at most {_MOST_SHARDS} shards"))
        shards = [(self.path / _name(i), min(self.eps, self.n - i * self.eps)) for i in range(min(present, expected))]
        return shards if present >= expected else [(shard, count) for shard, count in shards if shard.exists()]

    def _listed_shards(self, value: list[object], listing: Location) -> list[tuple[Location, int]]:
        shards: list[tuple[Location, int]] = []
        names: set[Location] = set()
        for i, entry in enumerate(value):
            with self.faults.noting(listing):
                fields = Fields(entry, listing, f"[{i}]", self.faults)
                count = fields.integer(*N_EXAMPLES, minimum=0)
                shard = self.path / _listed_name(fields, self.path, i, self.warnings)
                fields.check()
                expected = max(0, min(self.eps, self.n - i * self.eps))
                if count != expected:
                    text = f"{expected} ({self.n} examples, {self.eps} per shard)"
                    self.faults.add(fields.error(fields.name(*N_EXAMPLES), text, "count-claim"))
                if shard in names:
                    raise fields.error("name", "a different file for each shard")
                names.add(shard)
                shards.append((shard, count))
        total = sum(count for _, count in shards)
        if total != self.n and len(shards) == len(value) and not self.skips_incomplete:
            text = (
                f"expected {self.n} examples in {-(-self.n // self.eps)} shards, found {total} in {len(shards)}: "
                "the dump was interrupted; complete it"
            )
            self.faults.add(FormatError(text, path=listing))
        return shards

    def _leave_out(self) -> NDArray[np.bool_]:
        """Flags of examples that the files do not contain. :attr:`shards` then lists the others."""
        absent = none_whole(self.n, self.path)
        if not (listing := self.path / "shards.json").exists():
            self.files_left_out.append(listing)
        if not self.path.lists:
            found_together([shard for shard, _ in self.shards])
        for i, (shard, count) in enumerate(self.shards):
            stored_count = min(count, max(0, size_of_file(shard)) // self.example_bytes)
            absent[i * self.eps : i * self.eps + stored_count] = False
            if stored_count < count:
                self.files_left_out.append(shard)
            self.shards[i] = shard, stored_count
        return absent

    def _check_sizes(self, tell: Tell) -> int:
        """Checks that every listed file is a regular file of a valid size. Returns the bytes of all."""
        problems: list[ActshardError] = []
        last = max((i for i, (_, count) in enumerate(self.shards) if count), default=0)
        size = 0
        if not self.path.lists:
            found_together([shard for shard, count in self.shards if count])  # all at once; then they are known
        for i, (shard, count) in enumerate(self.shards):
            tell("shards", i, len(self.shards))
            if count:
                try:
                    size += _size_of_shard(shard, count, self.eps, self.example_bytes, is_last=i == last)
                except ActshardError as error:
                    problems.append(error)
            elif not self.skips_incomplete and not shard.exists():
                # saev leaves a shard of zeros if the examples fill the shards exactly. It is never read.
                self.warnings.append(Remark("layout", f"{shard.name} is missing; it contains no examples"))
        if problems:
            self.faults.add(*problems)
        return size


def open(path: Location, options: Options) -> Contents:
    """Reads metadata.json and shards.json, and checks the sizes of all shards."""
    dump = DumpMetadata(path, skips_incomplete=options.skip_incomplete)
    n, content, metadata = dump.n, dump.content, dump.fields.value
    extras = _extras(path, n, content, dump.warnings)
    absent = dump.absent
    shards = [(shard, count) for shard, count in dump.shards if count or absent.any()]
    rows = Rows.strided(
        [(shard, count * dump.per_example) for shard, count in shards],
        num_examples=n,
        examples_per_file=dump.eps,
        num_groups=len(dump.layers),
        num_tokens=dump.tokens,
        width=dump.d_model,
        dtype="F32",
        descr=np.dtype(np.float32),
        io=options.io,
    )
    rows = leave_out(rows, absent, len(dump.layers), path)
    provenance_fields = ("protocol", "dataset", "pixel_agg", "data")
    return Contents(
        format="saev",
        path=path.place,
        metadata=metadata,
        layers=dump.layers,
        d_model=dump.d_model,
        dtype=np.dtype(np.float32),
        num_examples=n,
        token_counts=rows.token_counts if absent.any() else lambda: np.broadcast_to(np.int64(dump.tokens), (n,)),
        rows=rows,
        column_names=("example_idx",),
        tokens_each=None if absent.any() else dump.tokens,
        content_lengths=lambda: _content_lengths(path / LENGTHS, n, content, absent),
        columns=lambda names: _columns(path, n, names, [shard for shard, _ in shards]),
        files=lambda: [shard.place for shard, _ in dump.shards],
        absence=Absence(absent, tuple(file.place for file in dump.files_left_out)),
        model=dump.model or None,
        provenance={key: metadata[key] for key in provenance_fields if metadata.get(key) is not None},
        extras=extras,
        special_tokens=int(dump.cls),
        warnings=tuple(dump.warnings),
        labels=lambda: _labels(path / LABELS, n, content),
    )


def _extras(path: Location, n: int, content: int, warnings: list[Remark]) -> tuple[str, ...]:
    """Names of the data stored in addition to the shards."""
    extras = []
    kinds = (
        (LABELS, "patch labels", f"{n} x {content}", n * content),
        (LENGTHS, "lengths before padding", f"{n} x 4", n * 4),
    )
    stats = found_together([path / name for name, *_ in kinds])
    for state, (name, what, sizes, need) in zip(stats, kinds, strict=True):
        if state is not None and state.kind == "file":
            extras.append(what)
            if state.size != need:
                code = "truncated" if state.size < need else "too-long"
                warnings.append(Remark(code, f"{name}: expected {sizes} = {need} bytes, found {state.size}"))
    return tuple(extras)


def _protocol(fields: Fields, warnings: list[Remark]) -> str | None:
    if "protocol" not in fields.value:
        return None  # before 2025-06-19
    protocol = fields.text("protocol")
    numbers = re.fullmatch(r"(\d{1,6})\.(\d{1,6})(?:\.\d{1,6})?", protocol)
    if numbers is None:
        return fields.refuse(fields.error("protocol", 'a version such as "2.1"'), protocol)
    version = (int(numbers[1]), int(numbers[2]))
    if version[0] > LAST_KNOWN[0]:
        warnings.append(
            Remark(
                "version",
                f"protocol {protocol} is a MAJOR version newer than actshard knows (2.1): shapes or types may mean something else, "
                "check values before you trust them",
            )
        )
    elif version > LAST_KNOWN:
        warnings.append(
            Remark("version", f"protocol {protocol} is newer than actshard knows (2.1); it should only add fields")
        )
    return protocol


def _layers(fields: Fields, warnings: list[Remark]) -> tuple[int, ...]:
    if "layers" not in fields.value and "n_layers" in fields.value:
        # October to November 2024: only the number of last layers was recorded; readers counted from the end.
        count = fields.integer("n_layers")
        if count > 100_000:
            return fields.refuse(fields.error("n_layers", "a number of layers"), (0,))
        return tuple(range(-count, 0))
    layers = fields.integers("layers")
    if list(layers) != sorted(layers):
        warnings.append(
            Remark(
                "layer-order",
                f"layers {list(layers)} are not in ascending order; saev's recorder stores layers in the order the model runs, "
                "so the names of these layers may be swapped",
            )
        )
    return layers


def _name(index: int) -> str:
    return f"acts{index:06}.bin"


def _listed_name(fields: Fields, path: Location, index: int, warnings: list[Remark]) -> str:
    name = fields.text("name")
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return fields.refuse(fields.error("name", "the name of a file in this folder"), _name(index))
    usual = _name(index)
    if name == usual:
        return name
    # saev's loaders derive the name from the shard's number. They use this one only to check that the file exists.
    chosen = usual if (path / usual).exists() else name
    warnings.append(
        Remark("layout", f"shards.json names shard {index} {name!r}, saev reads {usual!r}; reading {chosen!r}")
    )
    return chosen


def _size_of_shard(shard: Location, count: int, eps: int, example_bytes: int, *, is_last: bool) -> int:
    need, full = count * example_bytes, eps * example_bytes
    stat = shard.stat()
    if stat.kind != "file":
        what = "a folder" if stat.kind == "folder" else "a special file"
        raise NotAFileError(f"expected a regular file, found {what}", path=shard)
    if stat.size == 0:
        raise TruncatedFileError(f"expected {need} bytes, found an empty file", path=shard, offset=0, code="empty-file")
    if stat.size < need:
        text = f"expected {'at least ' if is_last else ''}{need} bytes ({count} examples of {example_bytes})"
        raise TruncatedFileError(f"{text}, found {stat.size}", path=shard, offset=stat.size)
    if stat.size > full:
        raise FormatError(
            f"expected at most {full} bytes ({eps} examples of {example_bytes}), found {stat.size}: "
            "the metadata do not match the shards",
            path=shard,
            offset=full,
            code="too-long",
        )
    return stat.size


def _check_hash(path: Location, metadata: dict[str, object], warnings: list[Remark]) -> None:
    """Warns unless the folder's name is a hash of its metadata, as computed by any version of saev."""
    if path.name not in hashes(metadata):
        warnings.append(
            Remark(
                "hash-mismatch",
                f"the folder's name is not the hash of its metadata ({hashes(metadata)[0]}): it was renamed, or the metadata "
                "changed",
            )
        )


def hashes(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """The names that the versions of saev would give this dataset's folder, current version first."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    declared = digest(json.dumps(metadata, separators=(",", ":"), ensure_ascii=False))
    return (
        declared[:8],  # since 2025-10-14
        declared,  # 2025-10-10 to 14: orjson, in declaration order
        digest(
            json.dumps(metadata, sort_keys=True, separators=(",", ":"))
        ),  # since 2025-06-18: as in the protocol text
        digest(json.dumps(metadata, sort_keys=True)),  # before 2025-06-18
    )


def _labels(path: Location, n: int, content: int) -> NDArray[np.uint8] | None:
    """Reads the patch labels, (n, content) uint8. Not mapped, because truncating a mapped file kills the process."""
    read = _whole(path, (n, content), np.dtype(np.uint8))
    if read is not None:
        read.flags.writeable = False
    return read


def _content_lengths(path: Location, n: int, content: int, absent: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    read = _whole(path, (n,), np.dtype("<u4"))
    if read is None:
        return None
    if len(bad := np.flatnonzero(read > content)):
        raise FormatError(
            f"expected at most {content} content tokens, found {read[bad[0]]} of example {bad[0]}",
            path=path,
            offset=4 * int(bad[0]),
        )
    lengths = read.astype(np.int64)
    if absent.any():
        lengths[absent] = 0
    return lengths


def _whole(path: Location, shape: tuple[int, ...], dtype: np.dtype[Scalar]) -> NDArray[Scalar] | None:
    """Reads a file that must have exactly this shape and dtype; None if it does not exist."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if not path.exists():
        return None
    stored_size = path.regular("read").size
    if stored_size != size:
        kind = TruncatedFileError if stored_size < size else FormatError
        product = " x ".join(map(str, (*shape, *([dtype.itemsize] if dtype.itemsize > 1 else []))))
        raise kind(f"expected {product} = {size} bytes, found {stored_size}", path=path, offset=min(stored_size, size))
    _check_sparse(size, [path], path)
    try:
        buffer = np.empty(size, np.uint8)
    except MemoryError as error:
        raise FileAccessError(f"not enough memory to read {size} bytes", path=path) from error
    path.fill([(0, buffer.data)])
    return buffer.view(dtype).reshape(shape)


def _check_sparse(claimed: int, files: Sequence[Location], path: Location) -> None:
    """Rejects sparse files, which can claim any size, before memory is allocated for them."""
    if claimed <= _MODEST:
        return
    on_disk = sum(file.stat().stored for file in files)
    if claimed > 64 * on_disk:
        raise UnsupportedError(
            f"expected data, found a sparse file: {claimed} bytes with {on_disk} stored on disk", path=path
        )


_MODEST = 1 << 30
"""Up to this many bytes are allocated without checking for sparse files."""


def _columns(path: Location, n: int, names: Sequence[str], shards: Sequence[Location]) -> pa.Table:
    import pyarrow as pa

    unknown = [name for name in names if name != "example_idx"]
    if unknown:
        raise NotStoredError(
            f"has no column {unknown[0]!r}; the only column of a saev dataset is example_idx", path=path
        )
    _check_sparse(8 * n * len(names), shards, path)
    try:
        return pa.table({name: np.arange(n, dtype=np.int64) for name in names})
    except MemoryError as error:
        raise FileAccessError(f"not enough memory for a table of {n} rows", path=path) from error


# Checks of saev shards


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks metadata and every shard, as opening does, and looks for shards that are not listed."""
    dump = report.faults.parse(root, lambda: DumpMetadata(root, report.faults, tell))
    if dump is None:
        return
    report.count("files", len(dump.shards))
    report.count("bytes", dump.bytes)
    listed_paths = {shard for shard, _ in dump.shards}
    for entry in root.entries() if root.lists else ():
        if re.fullmatch(r"acts\d+\.bin.*", entry.name) and root / entry.name not in listed_paths:
            text = f"a shard that shards.json does not list (it lists {len(dump.shards)})"
            report.add("unlisted-file", root / entry.name, text)
