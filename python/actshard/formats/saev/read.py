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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard._json import Fields, read_json, show
from actshard._native import Rows
from actshard.codes import Remark
from actshard.errors import (
    ActshardError,
    FileAccessError,
    FormatError,
    MissingFileError,
    NotAFileError,
    NotStoredError,
    TruncatedFileError,
    UnsupportedError,
)
from actshard.formats.contents import Contents, Evidence, Options
from actshard.location import Location

if TYPE_CHECKING:
    import pyarrow as pa

# All names of each field, current name first; see the table of eras in docs/formats/saev.md.
N_EXAMPLES = ("n_examples", "n_ex", "n_imgs")
CONTENT_TOKENS = ("content_tokens_per_example", "n_content_tokens_per_example", "patches_per_ex", "n_patches_per_img")
D_MODEL = ("d_model", "d_vit")
BUDGET = ("max_tokens_per_shard", "patches_per_shard", "max_patches_per_shard", "n_patches_per_shard")
FAMILY = ("family", "vit_family", "model_family", "model_org")
CHECKPOINT = ("ckpt", "vit_ckpt", "model_ckpt", "model")

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
    asked = {"layers": ("layers", "n_layers"), "d_model": D_MODEL, "content_tokens_per_example": CONTENT_TOKENS}
    missing = [name for name, names in asked.items() if not any(n in value for n in names)]
    if missing:
        return Evidence(False, looked_for, f"a metadata.json without {' and '.join(missing)}", near=True)
    return Evidence(True, looked_for, "a metadata.json with saev's fields")


def open(path: Location, options: Options) -> Contents:
    """Reads metadata.json and shards.json, and checks the sizes of all shards."""
    fields = Fields(read_json(path / "metadata.json"), path / "metadata.json")
    warnings: list[Remark] = []

    protocol = _protocol(fields, warnings)
    if fields.has("dtype") and fields.text("dtype") != "float32":
        raise UnsupportedError(
            f"field 'dtype': saev defines only \"float32\", found {show(fields.value['dtype'])}", path=fields.path
        )
    layers = _layers(fields, warnings)
    n = fields.integer(*N_EXAMPLES)
    content = fields.integer(*CONTENT_TOKENS)
    # Older metadata, with `n_layers` for `layers`, lack the field; those models all had a CLS token.
    cls = fields.boolean("cls_token") if "cls_token" in fields.value or "layers" in fields.value else True
    tokens = content + cls
    d_model = fields.integer(*D_MODEL)
    budget = fields.integer(*BUDGET)
    per_example = tokens * len(layers)
    eps = budget // per_example
    if eps == 0:
        raise fields.error(fields.name(*BUDGET), f"at least tokens x layers = {tokens} x {len(layers)} = {per_example}")
    example_bytes = per_example * d_model * ITEMSIZE
    if example_bytes * max(eps, n) >= 1 << 62:
        raise FormatError(
            f"{n} examples x {len(layers)} layers x {tokens} tokens x {d_model} exceeds 2^62 bytes",
            path=fields.path,
        )

    shards = _shards(path, n, eps, protocol, warnings)
    _check_shards(shards, eps, example_bytes, warnings)
    _check_hash(path, fields.value, warnings)
    extras = _extras(path, n, content, warnings)
    rows = Rows.strided(
        [(shard, count * per_example) for shard, count in shards if count],
        num_examples=n,
        examples_per_file=eps,
        num_groups=len(layers),
        num_tokens=tokens,
        width=d_model,
        dtype="F32",
        descr=np.dtype(np.float32),
        io=options.io,
    )
    model = "/".join(fields.text(*names) for names in (FAMILY, CHECKPOINT) if fields.has(*names))
    provenance = {
        key: fields.value[key]
        for key in ("protocol", "dataset", "pixel_agg", "data")
        if fields.value.get(key) is not None
    }
    return Contents(
        format="saev",
        path=path.place,
        metadata=fields.value,
        layers=layers,
        d_model=d_model,
        dtype=np.dtype(np.float32),
        num_examples=n,
        token_counts=lambda: np.broadcast_to(np.int64(tokens), (n,)),
        rows=rows,
        column_names=("example_idx",),
        tokens_each=tokens,
        content_lengths=lambda: _content_lengths(path / LENGTHS, n, content),
        columns=lambda names: _columns(path, n, names, [shard for shard, count in shards if count]),
        files=lambda: [shard.place for shard, _ in shards],
        model=model or None,
        provenance=provenance,
        extras=extras,
        special_tokens=int(cls),
        warnings=tuple(warnings),
        labels=lambda: _labels(path / LABELS, n, content),
    )


def _extras(path: Location, n: int, content: int, warnings: list[Remark]) -> tuple[str, ...]:
    """Names of the data stored in addition to the shards."""
    extras = {
        what: found
        for name, what in ((LABELS, "patch labels"), (LENGTHS, "lengths before padding"))
        if (found := (path / name).found()) is not None and found.kind == "file"
    }
    if (found := extras.get("patch labels")) is not None and found.size != n * content:
        warnings.append(
            Remark("truncated", f"labels.bin: expected {n} x {content} = {n * content} bytes, found {found.size}")
        )
    return tuple(extras)


def _protocol(fields: Fields, warnings: list[Remark]) -> str | None:
    if "protocol" not in fields.value:
        return None  # before 2025-06-19
    protocol = fields.text("protocol")
    numbers = re.fullmatch(r"(\d{1,6})\.(\d{1,6})(?:\.\d{1,6})?", protocol)
    if numbers is None:
        raise fields.error("protocol", 'a version such as "2.1"')
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
            raise fields.error("n_layers", "a number of layers")
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


def _shards(
    path: Location, n: int, eps: int, protocol: str | None, warnings: list[Remark]
) -> list[tuple[Location, int]]:
    """The shard files in order, each with its number of examples."""
    listing = path / "shards.json"
    expected = -(-n // eps)
    if not listing.exists():
        if protocol is None:  # shards.json came on 2025-06-18, a day before the protocol field
            present = len(path.entries("acts*.bin")) if path.lists else expected
            if present < expected:
                missing = next(shard for i in range(expected) if not (shard := path / _name(i)).exists())
                raise MissingFileError(f"expected {expected} shards, found {present}", path=missing)
            return [(path / _name(i), min(eps, n - i * eps)) for i in range(expected)]
        found = [entry.name for entry in path.entries("acts*.bin")] if path.lists else []
        raise MissingFileError(
            f"expected a list of shards, found none, only {len(found)} acts files {found[:5]}: "
            "the dump is unfinished or a file was lost; create it again",
            path=listing,
        )
    value = read_json(listing)
    if not isinstance(value, list):
        raise FormatError("expected a list of shards", path=listing)
    shards: list[tuple[Location, int]] = []
    names: set[Location] = set()
    total = 0
    for i, entry in enumerate(value):
        fields = Fields(entry, listing, f"[{i}]")
        count = fields.integer(*N_EXAMPLES, minimum=0)
        wanted = min(eps, n - total)
        if count != wanted:
            raise fields.error(fields.name(*N_EXAMPLES), f"{wanted} ({n} examples, {eps} per shard)")
        shard = path / _listed_name(fields, path, i, warnings)
        if shard in names:
            raise fields.error("name", "a different file for each shard")
        names.add(shard)
        shards.append((shard, count))
        total += count
    if total != n:
        raise FormatError(
            f"expected {n} examples in {expected} shards, found {total} in {len(shards)}: the dump was interrupted; complete it",
            path=listing,
        )
    return shards


def _name(index: int) -> str:
    return f"acts{index:06}.bin"


def _listed_name(fields: Fields, path: Location, index: int, warnings: list[Remark]) -> str:
    name = fields.text("name")
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise fields.error("name", "the name of a file in this folder")
    usual = _name(index)
    if name == usual:
        return name
    # saev's loaders derive the name from the shard's number. They use this one only to check that the file exists.
    chosen = usual if (path / usual).exists() else name
    warnings.append(
        Remark("layout", f"shards.json names shard {index} {name!r}, saev reads {usual!r}; reading {chosen!r}")
    )
    return chosen


def _check_shards(shards: Sequence[tuple[Location, int]], eps: int, example_bytes: int, warnings: list[Remark]) -> None:
    """Checks that every listed file is a regular file of a valid size. Raises the first error, with the number of others."""
    problems: list[ActshardError] = []
    last = max(i for i, (_, count) in enumerate(shards) if count)
    for i, (shard, count) in enumerate(shards):
        if count == 0:
            # saev leaves a shard of zeros if the examples fill the shards exactly. It is never read.
            if not shard.exists():
                warnings.append(Remark("layout", f"{shard.name} is missing; it contains no examples"))
            continue
        need, full = count * example_bytes, eps * example_bytes
        try:
            found = shard.stat()
        except ActshardError as error:
            problems.append(error)
            continue
        if found.kind != "file":
            what = "a folder" if found.kind == "folder" else "a special file"
            problems.append(NotAFileError(f"expected a regular file, found {what}", path=shard))
        elif found.size == 0:
            problems.append(
                TruncatedFileError(
                    f"expected {need} bytes, found an empty file", path=shard, offset=0, code="empty-file"
                )
            )
        elif found.size < need:
            problems.append(
                TruncatedFileError(
                    f"expected {'at least ' if i == last else ''}{need} bytes ({count} examples of {example_bytes}), "
                    f"found {found.size}",
                    path=shard,
                    offset=found.size,
                )
            )
        elif found.size > full:
            problems.append(
                FormatError(
                    f"expected at most {full} bytes ({eps} examples of {example_bytes}), found {found.size}: "
                    "the metadata do not match the shards",
                    path=shard,
                    offset=full,
                )
            )
    if problems:
        first = problems[0]
        if len(problems) > 1:
            others = [p.path.name for p in problems[1:] if p.path is not None]
            shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            first.detail += f" (and {len(others)} more bad shards: {shown})"
        raise first


def _check_hash(path: Location, metadata: dict[str, Any], warnings: list[Remark]) -> None:
    """Warns unless the folder's name is a hash of its metadata, as computed by any version of saev."""
    if path.name not in hashes(metadata):
        warnings.append(
            Remark(
                "hash-mismatch",
                f"the folder's name is not the hash of its metadata ({hashes(metadata)[0]}): it was renamed, or the metadata "
                "changed",
            )
        )


def hashes(metadata: dict[str, Any]) -> tuple[str, ...]:
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


def _content_lengths(path: Location, n: int, content: int) -> NDArray[np.int64] | None:
    read = _whole(path, (n,), np.dtype("<u4"))
    if read is None:
        return None
    if len(bad := np.flatnonzero(read > content)):
        raise FormatError(
            f"expected at most {content} content tokens, found {read[bad[0]]} of example {bad[0]}",
            path=path,
            offset=4 * int(bad[0]),
        )
    return read.astype(np.int64)


def _whole(path: Location, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Reads a file that must have exactly this shape and dtype; None if it does not exist."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if not path.exists():
        return None
    found = path.regular("read").size
    if found != size:
        kind = TruncatedFileError if found < size else FormatError
        product = " x ".join(map(str, (*shape, *([dtype.itemsize] if dtype.itemsize > 1 else []))))
        raise kind(f"expected {product} = {size} bytes, found {found}", path=path, offset=min(found, size))
    _check_sparse(size, [path], path)
    try:
        made = np.empty(size, np.uint8)
    except MemoryError as error:
        raise FileAccessError(f"not enough memory to read {size} bytes", path=path) from error
    path.fill([(0, made.data)])
    return made.view(dtype).reshape(shape)


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
