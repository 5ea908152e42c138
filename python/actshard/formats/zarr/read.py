"""Reads Zarr datasets: one store, or a run of several. A store (``member``) has one or two 4-D arrays of padded samples.

    activations.zarr/
      .zattrs .zmetadata                 attributes; consolidated metadata, optional; Zarr version 3 has zarr.json.
                                         actshard adds the attribute "layers", the layers' names; the text only numbers them
      arrays/activations/                (N, L, T_max, H), chunks (1, 1, T_chunk, H) or any other
      arrays/seq_len/                    (N,): tokens per sample, without padding
      arrays/prompt_len/ ...             any other per-sample arrays
      text/prompts.jsonl ...             texts, one JSON object per line, joined by "i"
      meta/config.json                   the attributes, possibly with more fields

    activations.zarr/                    as written by HalluLens' logger
      arrays/prompt_activations/         (N, L, P_max, H)      arrays/prompt_len/    (N,)
      arrays/response_activations/       (N, L, R_max, H)      arrays/response_len/  (N,)
      meta/index.jsonl                   determines which rows are samples

    run_20260122_101112/
      manifest.json                      optional: the shards in order, with their numbers of samples
      shards/shard-0000.zarr/ ...        stores of the first or second kind

Sources: the published text "Zarr Activation Logger Spec (No LMDB)" and HalluLens' zarr_activations_logger.py. The text does not
define the manifest; ``{"n_samples", "shards": [{"path", "n_samples", "start"}]}`` is actshard's proposal.

Plain chunks are read directly: only the chunks needed, and only the rows needed. Compressed chunks, F order and sharding are
decoded by the zarrs crate or, for codecs that it lacks, by the zarr package. That is slower, so opening warns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base._arguments import name_of
from actshard.base._json import MAX_INT, Fields, exists, read_json, show, utf8
from actshard.base.codes import Remark
from actshard.base.errors import (
    RAISE,
    ArgumentError,
    Faults,
    FormatError,
    MissingFileError,
    NotStoredError,
    UnsupportedError,
)
from actshard.base.layers import Layer, checked
from actshard.base.location import Location
from actshard.formats.contents import Absence, Contents, Evidence, Options
from actshard.formats.tables import table_of
from actshard.formats.zarr.arrays import native
from actshard.formats.zarr.member import ACTIVATIONS, PROMPT, RESPONSE, TEXTS, Member
from actshard.formats.zarr.meta import PLANES, ArrayMeta

if TYPE_CHECKING:
    import pyarrow as pa


def detect(path: Location) -> Evidence:
    """Checks for a Zarr group with activations, or a folder whose manifest or ``shards/`` list such groups."""
    looked_for = (
        "a Zarr group with arrays/activations (or HalluLens' arrays/prompt_activations), "
        "or a run: manifest.json and shards/*.zarr"
    )
    if path.kind() != "folder":
        return Evidence(False, looked_for, "a file")
    if is_group(path):
        if _is_consolidated(path):
            return Evidence(True, looked_for, "a Zarr group with consolidated metadata")
        newer = (path / "zarr.json").kind() == "file"
        node_name = next((node for node in (ACTIVATIONS, PROMPT, RESPONSE) if _is_array(path / node, newer)), None)
        if node_name is not None:
            return Evidence(True, looked_for, f"a Zarr group with {node_name}")
        return Evidence(False, looked_for, "a Zarr group without these arrays", near=True)
    if _is_array(path):
        return Evidence(False, looked_for, "a single Zarr array; open the store that contains it", near=True)
    if (path / "manifest.json").kind() == "file":
        value = read_json(path / "manifest.json")
        shards = value.get("shards") if isinstance(value, dict) else None
        if isinstance(shards, list) and all(isinstance(s, dict) and "path" in s for s in shards):
            return Evidence(True, looked_for, "a manifest.json with shards")
        return Evidence(False, looked_for, "a manifest.json without a list of shards with paths", near=True)
    stores = stores_in(path / "shards") if path.lists else []
    if stores:
        return Evidence(True, looked_for, f"{len(stores)} Zarr groups in shards/")
    return Evidence(False, looked_for, "neither" if path.lists else "neither, where names cannot be listed")


def is_group(path: Location) -> bool:
    """Whether a folder is a Zarr group, version 2 or 3."""
    if _is_metadata(path / "zarr.json", "node_type"):
        return not _is_array(path)
    return (
        _is_metadata(path / ".zgroup", "zarr_format")
        or _is_metadata(path / ".zmetadata", "metadata")
        or ((path / ".zattrs").kind() == "file" and (path / "arrays").kind() == "folder")
    )


def _is_metadata(file: Location, field: str) -> bool:
    """Whether a file of metadata exists. Some servers that cannot list names answer each with JSON, so its content is checked.

    A damaged file is one: opening raises an error that explains it.
    """
    if file.kind() != "file":
        return False
    if file.lists:
        return True
    try:
        value = read_json(file)
    except FormatError:
        return True
    return isinstance(value, dict) and field in value


def _is_consolidated(path: Location) -> bool:
    """Whether consolidated metadata list the contents, so that no other file has to be looked up."""
    if _is_metadata(path / ".zmetadata", "metadata"):
        return True
    if not path.is_remote or not _is_metadata(path / "zarr.json", "node_type"):
        return False
    root = read_json(path / "zarr.json")
    consolidated = root.get("consolidated_metadata") if isinstance(root, dict) else None
    entries = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    return isinstance(entries, dict) and any(node in entries for node in (ACTIVATIONS, PROMPT, RESPONSE))


def _is_array(path: Location, newer: bool = False) -> bool:
    """Whether a folder is an array. With ``newer``, metadata of version 3 are looked up first."""
    if newer and _is_newer_array(path):
        return True
    return _is_metadata(path / ".zarray", "shape") or (not newer and _is_newer_array(path))


def _is_newer_array(path: Location) -> bool:
    if (path / "zarr.json").kind() != "file":
        return False
    value = read_json(path / "zarr.json")
    return isinstance(value, dict) and value.get("node_type") == "array"


_UNLISTED = (
    "expected a Zarr group, or a run with a manifest.json, found neither; names cannot be listed there to find other "
    "stores: give the URL of a store"
)


def stores_in(folder: Location) -> list[Location]:
    """Zarr stores directly below a folder, sorted by name."""
    if folder.kind() != "folder":
        return []
    return [folder / entry.name for entry in folder.entries("*.zarr") if entry.kind == "folder"]


def open(path: Location, options: Options) -> Contents:
    """Reads metadata and lengths. Never lists chunk files."""
    members, metadata, manifest = stores_of(path, skips_incomplete=options.skip_incomplete)
    first = members[0]
    arrays = [a for m in members for a in m.arrays]
    dtype = first.row_dtype
    numbers = iter(range(len(arrays)))
    lengths = [
        m0 if all(isinstance(part, int) and part == m0 for part in parts) else _join_lengths(parts, members)
        for parts in zip(*(m.lengths for m in members), strict=True)
        for m0 in (parts[0],)
    ]
    rows = Rows.chunked(
        [native(a, scaled=m.scaling is not None) for m in members for a in m.arrays],
        [(m.n, [next(numbers) for _ in m.arrays]) for m in members],
        lengths,
        num_groups=first.num_layers,
        width=first.width,
        dtype=name_of(dtype),
        decoded_memory=options.decoded_memory,
        descr=dtype,
        io=options.io,
        scales=[None if m.scaling is None else m.scaling.for_core() for m in members for _ in m.arrays],
    )
    warnings = _warnings(members, rows.decodes)
    n = sum(m.n for m in members)

    def counts() -> NDArray[np.int64]:
        if all(isinstance(part, int) for part in lengths):
            return np.broadcast_to(np.int64(sum(part for part in lengths if isinstance(part, int))), (n,))
        return rows.token_counts()

    model = _model(metadata) or (_model(first.metadata) if manifest else None)
    texts = sorted({utf8(p.name) for m in members for p in m.texts})
    layers = _layer_names(metadata, first, warnings)
    return Contents(
        format="zarr",
        path=path.place,
        metadata=metadata,
        layers=layers,
        d_model=first.width,
        dtype=dtype,
        num_examples=n,
        token_counts=counts,
        rows=rows,
        column_names=_LaterNames(members) if path.is_remote else _column_names(members),
        columns=lambda names: _columns(path, members, names),
        files=lambda: [a.path_of(coords).place for m in members for a in m.row_arrays for coords in a.chunk_files()],
        columns_in=lambda: [location.place for member in members for location in member.columns_in()],
        model=None if model is None else utf8(model),
        provenance=_provenance(metadata, members, manifest),
        store_metadata=lambda: [(utf8(member.path.name), member.metadata) for member in members],
        extras=tuple(texts),
        absence=_absence(path, members),
        without_padding="version=3 stores hardly any" if first.version == 2 else "",
        warnings=tuple(warnings),
    )


def _absence(path: Location, members: Sequence[Member]) -> Absence:
    """The samples that are left out.

    Raises:
        FormatError: no sample is whole.
    """
    absent = np.concatenate([member.absent for member in members])
    if absent.size and absent.all():
        raise FormatError(f"expected at least one whole example, found none of {len(absent):,}", path=path)
    broken = [file for member in members for file in member.broken]
    reasons = (f"{file.relative_to(path)} is missing or not whole" for file in broken[:_NAMED])
    return Absence(absent, tuple(file.place for file in broken), reasons=tuple(reasons))


_NAMED = 6
"""Files that are not whole of which a warning may name some."""


_PLAIN_SHARDS = frozenset(("sharding_indexed", "bytes", "crc32c"))
"""Codecs of shards whose inner chunks are not compressed."""


def _warnings(members: Sequence[Member], decodes: bool) -> list[Remark]:
    """Warnings of the members. Coded arrays without ``decodes`` are shards of plain chunks, which are read in place."""
    remarks = [(member, remark) for member in members for remark in (*member.warnings, *member.missing_values())]
    warnings = [remark.within(member.path.name) if len(members) > 1 else remark for member, remark in remarks]
    if not members[0].path.lists:
        warnings.append(Remark("not-listed", f"text/: names cannot be listed; only {', '.join(TEXTS)} are read"))
    coded_arrays = [(m, a) for m in members for a in m.arrays if a.how] if decodes else []
    plain_sizes = [math.prod(a.chunks) * a.dtype.itemsize for _, a in coded_arrays if a.dtype and _is_remote_plain(a)]
    if plain_sizes:
        size = max(plain_sizes)
        warnings.append(
            Remark(
                "layout",
                f"inner chunks of remote shards are read whole (up to {size:,} bytes each): single rows transfer more bytes than "
                "they have; streams and whole examples do not",
            )
        )
    coded = sorted({a.how for m, a in coded_arrays if not (_is_remote_plain(a) or _is_packed(a, m))})
    if coded:
        warnings.append(
            Remark(
                "layout",
                f"chunks have to be decoded whole ({'; '.join(coded)}): right, but many times slower than plain chunks; "
                "conversion to an uncompressed store makes reading fast",
            )
        )
    return warnings


def _is_remote_plain(array: ArrayMeta) -> bool:
    """Whether an array has remote shards whose inner chunks are not compressed."""
    return array.inner and array.folder.is_remote and _PLAIN_SHARDS.issuperset(array.codecs)


def _is_packed(array: ArrayMeta, member: Member) -> bool:
    """Whether the writer chose small encoded chunks (``pack=``), which are decoded faster than most disks read."""
    return PLANES in array.codecs or (array.inner and member.store.is_ours)


def _model(metadata: dict[str, object]) -> str | None:
    return next((str(metadata[k]) for k in ("model_id", "model_name", "model") if metadata.get(k)), None)


def _provenance(metadata: dict[str, object], members: Sequence[Member], manifest: bool) -> dict[str, object]:
    provenance_fields = ("schema_version", "dataset_name", "created_at", "git_commit")
    provenance = {
        k: utf8(v) if isinstance(v, str) else v for k in provenance_fields if (v := metadata.get(k)) is not None
    }
    if (scaling := members[0].scaling) is not None:
        provenance["stored_dtype"] = scaling.form
        provenance |= {} if scaling.error is None else {"stored_error": scaling.error}
    provenance |= {"zarr_format": members[0].version, "chunks": list(members[0].arrays[0].chunks)}
    return provenance | ({"stores": len(members)} if len(members) > 1 or manifest else {})


def _layer_names(metadata: dict[str, object], member: Member, warnings: list[Remark]) -> tuple[Layer, ...]:
    """Layer names from the attribute ``layers``, which actshard writes; otherwise numbers from 0."""
    candidates = [
        candidate for candidate in (metadata.get("layers"), member.metadata.get("layers")) if candidate is not None
    ]
    for candidate in candidates:
        if isinstance(candidate, list) and len(candidate) == member.num_layers:
            with contextlib.suppress(ArgumentError):
                names = checked(candidate)
                if all(abs(x) < MAX_INT for x in names if isinstance(x, int)):
                    return names
    if candidates:
        warnings.append(
            Remark(
                "claim",
                f"attribute 'layers': expected {member.num_layers} different integers or strings, found {show(candidates[0])}; "
                "layers are numbered from 0",
            )
        )
    return tuple(range(member.num_layers))


def members_of(path: Location) -> list[Location]:
    """The stores of a run in order, or the store itself."""
    return [path] if is_group(path) else [m.path for m in stores_of(path)[0]]


def _join_lengths(parts: Sequence[int | NDArray[np.uint32]], members: Sequence[Member]) -> NDArray[np.uint32]:
    """Concatenates lengths per sample over all members."""
    return np.concatenate(
        [
            np.full(m.n, part, np.uint32) if isinstance(part, int) else part
            for part, m in zip(parts, members, strict=True)
        ]
    )


def stores_of(
    path: Location, faults: Faults = RAISE, *, skips_incomplete: bool = False
) -> tuple[list[Member], dict[str, Any], bool]:
    """The stores of a dataset in order, its metadata, and whether it has a manifest.

    Args:
        path: a store, or a run.
        faults: receives faults of the manifest and of each store.
        skips_incomplete: whether samples with a missing chunk have no tokens.
    """
    listing = path / "manifest.json"
    if is_group(path):
        member = Member(path, skips_incomplete=skips_incomplete)
        return [member], member.metadata, False
    if exists(listing):
        manifest = Fields(read_json(listing), listing, faults=faults)
        members = _listed_stores(path, manifest, faults, skips_incomplete)
        metadata = manifest.value
    else:
        stores = stores_in(path / "shards")
        if not stores and not path.lists:
            raise UnsupportedError(_UNLISTED, path=path)
        if not stores:
            raise MissingFileError("expected a Zarr group, or a run with shards/*.zarr, found neither", path=path)
        members = []
        for store in stores:
            with faults.noting(store):
                members.append(Member(store, skips_incomplete=skips_incomplete))
        metadata = {"shards": [s.relative_to(path) for s in stores], **(members[0].metadata if members else {})}
    for member in members[1:]:
        with faults.noting(member.path):
            members[0].check_alike(member)
    return members, metadata, exists(listing)


def _listed_stores(path: Location, manifest: Fields, faults: Faults, skips_incomplete: bool) -> list[Member]:
    members = []
    names: set[Location] = set()
    start = 0
    entries = manifest.items("shards")
    manifest.check()
    for fields in entries:
        with faults.noting(fields.path):
            name = fields.text("path")
            fields.check()
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts or not name.isprintable() or not relative.parts:
                raise fields.error("path", "a path inside the run's folder")
            store = path / name
            if store in names:
                raise fields.error("path", "a different store for each shard", "duplicate-sample")
            names.add(store)
            if store.lists and store.kind() != "folder":
                text = f"expected a Zarr store, which {manifest.path.name} lists, found none"
                raise MissingFileError(text, path=store)
            member = Member(store, skips_incomplete=skips_incomplete)
            if fields.has("n_samples"):
                n = fields.integer("n_samples", minimum=0)
                fields.check()
                if n > member.n:
                    raise fields.error("n_samples", f"at most {member.n}, which {name} has")
                member.keep(n)
            members.append(member)
            # After a store without a sample count, later starts are unknown.
            if len(members) == len(names) and fields.has("start") and fields.integer("start", minimum=0) != start:
                faults.add(fields.error("start", f"{start}, the number of samples before"))
            start += member.n
    if not entries:
        raise manifest.error("shards", "at least one shard")
    if len(members) == len(entries) and manifest.has("n_samples") and manifest.integer("n_samples", minimum=0) != start:
        faults.add(manifest.error("n_samples", f"{start}, the sum over the shards"))
    return members


class _LaterNames(Sequence[str]):
    """Names of columns, looked up on first use, because each column may be in a separate file."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return _column_names(self._members)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._names[index]


def _column_names(members: Sequence[Member]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for member in members:
        names |= dict.fromkeys(member.small) | dict.fromkeys(member.text_names())
    return tuple(names)


def _columns(path: Location, members: Sequence[Member], names: Sequence[str]) -> pa.Table:
    requested_names = set(names)
    # Fields that occur only in later lines are not known in advance. A request for all known columns returns them, too.
    every = requested_names >= set(_column_names(members))
    parts = [m.columns(lambda name: every or name in requested_names) for m in members]
    unknown = [name for name in names if not any(name in part for part in parts)]
    known_names = {name for m in members for name in (*m.small, *m.text_names())}
    if unknown and unknown[0] not in known_names:
        raise NotStoredError(f"has no column {unknown[0]!r}; columns are {', '.join(sorted(known_names))}", path=path)
    return table_of(names, [(part, m.n) for part, m in zip(parts, members, strict=True)])
