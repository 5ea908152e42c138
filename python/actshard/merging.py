"""``actshard.merge``: parts that many processes wrote, or datasets of one kind, become one dataset.

Files are renamed (parts of ours) or linked (datasets that stay); bytes are copied only where they must be: into saev's equal
shards, and across file systems. Every step can be done again, and sources go last: a merge that was killed is run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actshard import _arguments, _native
from actshard.errors import (
    ArgumentError,
    ExistsError,
    FormatError,
    MissingFileError,
    UnfinishedError,
    boundary,
    from_os,
)
from actshard.formats._contents import Options
from actshard.formats._json import Fields, read_json
from actshard.formats.lmprobe import TOKEN_LISTS, Dataset
from actshard.formats.pickle import machines_in, open_many
from actshard.formats.saev import BUDGET, CONTENT_TOKENS, D_MODEL, ITEMSIZE, N_EXAMPLES, hashes
from actshard.formats.zarr import Member, members_of
from actshard.opening import find, open_quietly
from actshard.writing.pickle import shard_listing
from actshard.writing.target import Examples, Spec, refuse_existing
from actshard.writing.work import FOLDER, PARTS, Lock, make_folder, rename, unfinished, write_json
from actshard.writing.zarr import ZarrTarget

_MARKER = "merging.json"
_PART = re.compile(r"part-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class _Merge:
    """One merge: where to, of what, and whether sources may be moved."""

    path: Path
    format: str
    parts: tuple[Path, ...]
    move: bool
    options: dict[str, Any]

    def take(self, source: Path, target: Path) -> None:
        """Gives a file or a store its place: moved, linked, or copied where neither can be."""
        if target.exists():
            return  # before a crash; copies come under their names when they are whole
        make_folder(target.parent)
        if self.move:
            rename(source, target)
            return
        if source.is_dir():
            temporary = target.with_name(f".{target.name}.part")
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(source, temporary, copy_function=_link)
            rename(temporary, target)
            return
        temporary = target.with_name(f".{target.name}.part")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        _link(source, temporary)
        rename(temporary, target)


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one that has no links.
        size = Path(source).stat().st_size
        _native.copy_range(source, 0, size, target, 0)
        _native.sync_files([target])


def merge(
    path: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] | None = None,
    *,
    physical: bool = False,
) -> Path:
    """Makes one dataset of parts.

    Args:
        path: the dataset: where :func:`actshard.create` was called with ``part=``, or a new folder for ``parts``.
        parts: datasets of one format to put together, in this order; they stay as they are (files are linked where they can be).
            None: the parts that were written below ``path``, in the order of their numbers; they become the dataset.
        physical: Zarr stores become one store, not a run of several with a manifest.

    Returns:
        The dataset's folder (for saev ``path/<HASH>``). Done already, it is told again.

    Raises:
        UnfinishedError: a part is missing, or is not finished; the message lists them.
        FormatError: parts that are not of one kind, or two of which have the same sample numbers.
        ExistsError: another dataset is there. LockedError: another process is merging.
        ArgumentError: ``physical`` for another format, or stores with different chunks.
    """
    root = _arguments.local_path(path)
    with boundary(root, "merge"):
        return _merged(root, parts, physical)


def _merged(root: Path, parts: Sequence[str | os.PathLike[str]] | None, physical: bool) -> Path:
    marker = root / FOLDER / _MARKER
    if not marker.exists():
        if parts is None and not (root / PARTS).is_dir():
            return _there(root)
        make_folder(root / FOLDER)
    lock = Lock(root / FOLDER)
    lock.take()
    try:
        try:
            plan = _begin(root, parts, physical, marker)
        except BaseException:
            if not marker.exists():
                # Nothing was begun: nothing stays.
                shutil.rmtree(root / FOLDER, ignore_errors=True)
                with contextlib.suppress(OSError):
                    root.rmdir()
            raise
        listed = read_json(marker)
        place = Path(listed["place"]) if listed.get("finished") else _DO[plan.format](plan)
        if not listed.get("finished"):
            write_json(marker, {**listed, "finished": True, "place": str(place)})
        if plan.move:
            shutil.rmtree(root / PARTS, ignore_errors=True)
    finally:
        lock.release()
    shutil.rmtree(root / FOLDER, ignore_errors=True)
    _native.sync_files([root])
    return place


def _there(root: Path) -> Path:
    """A dataset that was merged before."""
    if not root.exists():
        raise MissingFileError("expected parts of a dataset, found nothing", path=root)
    if unfinished(root) is not None:
        raise UnfinishedError("expected parts of a dataset, found one whose writer has not finished", path=root)
    return find(root)[0]


def _begin(root: Path, parts: Sequence[str | os.PathLike[str]] | None, physical: bool, marker: Path) -> _Merge:
    """What to merge: as it was begun, or checked now."""
    if marker.exists():
        found = Fields(read_json(marker), marker)
        names = tuple(Path(p) for p in found.value["parts"])
        return _Merge(root, found.text("format"), names, found.boolean("move"), {"physical": found.boolean("physical")})
    if parts is None:
        sources = _own_parts(root)
    else:
        sources = [find(_arguments.local_path(p, "parts"))[0] for p in parts]
        if not sources:
            raise ArgumentError("parts: expected at least one dataset")
        if len(set(sources)) < len(sources):
            raise ArgumentError("parts: a dataset is in the list twice")
        refuse_existing(root)
    format = _check_alike(sources)
    if format == "zarr":
        sources = [store for s in sources for store in members_of(s)]  # a run is its stores
    if format == "pickle":
        sources = [m for s in sources for m in ([s] if (s / "metadata.json").exists() else machines_in(s))]
    if physical and format != "zarr":
        raise ArgumentError(f"physical: is for Zarr stores; {format} datasets are always one")
    if parts is None and format != "saev":
        refuse_existing(root)
    made = {"parts": [str(s) for s in sources], "format": format, "move": parts is None, "physical": physical}
    if format == "zarr" and physical:
        _check_chunks(sources)
    write_json(marker, made)
    _native.sync_files([marker.parent, root])
    return _Merge(root, format, tuple(sources), parts is None, {"physical": physical})


def _own_parts(root: Path) -> list[Path]:
    """Parts of ours in the order of their numbers, all of them there and finished."""
    found: dict[int, Path] = {}
    counts: set[int] = set()
    for folder in sorted((root / PARTS).iterdir()):
        numbered = _PART.fullmatch(folder.name)
        if numbered is not None:
            found[int(numbered[1])] = folder
            counts.add(int(numbered[2]))
    if len(counts) != 1:
        raise UnfinishedError(f"expected parts of one number of parts, found {sorted(counts)}", path=root / PARTS)
    (total,) = counts
    missing = [i for i in range(total) if i not in found]
    made, behind = [], []
    for i, folder in sorted(found.items()):
        below = [folder, *(p for p in folder.glob(".writing-*") if p.is_dir())]
        if any(unfinished(p) is not None for p in below):
            behind.append(i)
            continue
        made.append(find(folder)[0])
    if missing or behind:
        said = [
            f"part {', '.join(map(str, some))} {what}"
            for some, what in ((missing, "missing"), (behind, "unfinished"))
            if some
        ]
        raise UnfinishedError(f"expected {total} finished parts, {' and '.join(said)}", path=root / PARTS)
    return made


def _check_alike(sources: Sequence[Path]) -> str:
    """The format of datasets of one kind."""
    first: Any = None
    for path in sources:
        store = open_quietly(path, None, "auto")
        kind = {
            "format": store.format,
            "layers": list(store.layers),
            "d_model": store.d_model,
            "dtype": str(store.dtype),
            "special tokens": store.special_tokens,
        }
        if store.format == "saev":
            kind["tokens per example"] = int(store.token_counts[0])
            kind["protocol"] = store.metadata.get("protocol")
            kind["patch labels"] = store.labels is not None
        if store.format == "lmprobe":
            kind["columns"] = sorted(store.contents.column_names)
            kind["tensors"] = {k: v.get("storage") for k, v in store.metadata["tensors"].items()}
        if first is None:
            first = kind
        for name, value in kind.items():
            if first.get(name) != value:
                raise FormatError(
                    f"expected {name} {first.get(name)} as in {sources[0].name}, found {value}", path=path
                )
    return str(first["format"])


# -- saev ----------------------------------------------------------------------------------------------------------


def _eps(metadata: dict[str, Any]) -> int:
    fields = Fields(metadata, Path("metadata.json"))
    tokens = fields.integer(*CONTENT_TOKENS) + bool(metadata.get("cls_token", True))
    return fields.integer(*BUDGET) // (tokens * len(metadata["layers"]))


def _saev(plan: _Merge) -> Path:
    """Shards all hold as many examples: those of a part that begins at a multiple are taken, others are put together anew."""
    described = [read_json(p / "metadata.json") for p in plan.parts]
    first = described[0]
    fields = Fields(first, plan.parts[0] / "metadata.json")
    name = fields.name(*N_EXAMPLES)
    counts = [Fields(m, p / "metadata.json").integer(*N_EXAMPLES) for m, p in zip(described, plan.parts, strict=True)]
    # A small dump has a small shard: the largest of them is what all get.
    each = [_eps(m) for m in described]
    eps, n = max(each), sum(counts)
    budget = {fields.name(*BUDGET): described[each.index(eps)][fields.name(*BUDGET)]}
    content = fields.integer(*CONTENT_TOKENS)
    tokens = content + bool(first.get("cls_token", True))
    size = tokens * len(first["layers"]) * fields.integer(*D_MODEL) * ITEMSIZE
    metadata = {**first, **budget, name: n}
    recipe = next((i for i, h in enumerate(hashes(first)) if h == plan.parts[0].name), 0)
    place = plan.path / hashes(metadata)[recipe]
    if place.exists():
        listed = read_json(place / "metadata.json")
        if listed != metadata:
            raise ExistsError("expected nothing, found another dataset of this name", path=place)
        return place
    work = plan.path / ".merging"
    make_folder(work)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    full = metadata.get("protocol") != "2.0"
    for shard in range(-(-n // eps)):
        target = work / f"acts{shard:06}.bin"
        if target.exists():
            continue
        a, b = shard * eps, min(n, (shard + 1) * eps)
        pieces = []
        for p, begin in enumerate(starts[:-1]):
            lo, hi = max(a, begin), min(b, starts[p + 1])
            while lo < hi:
                number, row = divmod(lo - begin, each[p])
                rows = min(hi - lo, each[p] - row)
                pieces.append((plan.parts[p] / f"acts{number:06}.bin", row, rows, lo - a))
                lo += rows
        source, row, rows, _ = pieces[0]
        whole = len(pieces) == 1 and row == 0 and rows == b - a
        if whole and (source.exists() and source.stat().st_size == (eps if full else rows) * size):
            plan.take(source, target)
            continue
        temporary = target.with_name(f"{target.name}.part")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        for of_part, begin, count, at in pieces:
            _native.copy_range(of_part, begin * size, count * size, temporary, at * size)
        os.truncate(temporary, (eps if full else b - a) * size)
        _native.sync_files([temporary])
        rename(temporary, target)
    if (plan.parts[0] / "labels.bin").exists():
        temporary = work / "labels.bin.part"
        for part, held, start in zip(plan.parts, counts, starts, strict=False):
            _native.copy_range(part / "labels.bin", 0, held * content, temporary, start * content)
        os.truncate(temporary, n * content)
        _native.sync_files([temporary])
        rename(temporary, work / "labels.bin")
    word = "n_ex" if name == "n_ex" else "n_imgs" if name == "n_imgs" else "n_examples"
    listing = [{"name": f"acts{i:06}.bin", word: min(eps, n - i * eps)} for i in range(-(-n // eps))]
    write_json(work / "shards.json", listing)
    write_json(work / "metadata.json", metadata)
    _native.sync_files([work])
    rename(work, place)
    return place


# -- lmprobe -------------------------------------------------------------------------------------------------------


def _lmprobe(plan: _Merge) -> Path:
    """Tensor files get new numbers; the index is written again with the addresses they mean."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    datasets = [Dataset(p, "auto") for p in plan.parts]
    hidden = [d.hidden for d in datasets]
    described = [h.value if h is not None else {"shards": [], "layers": []} for h in hidden]
    full = described[0].get("storage") == "full_sequence"
    lasts = [int(h.get("last_token_shards", 0)) if full else len(h["shards"]) for h in described]
    rests = [len(h["shards"]) - k for h, k in zip(described, lasts, strict=True)]
    total = sum(lasts)
    last_at, rest_at = _before(lasts), _before(rests)
    merged_shards = [s for h, k in zip(described, lasts, strict=True) for s in h["shards"][:k]]
    merged_shards += [s for h, k in zip(described, lasts, strict=True) for s in h["shards"][k:]]
    for p, h in enumerate(described):
        for layer in h["layers"]:
            for s in range(len(h["shards"])):
                new = last_at[p] + s if s < lasts[p] else total + rest_at[p] + s - lasts[p]
                name = f"tensors/hidden_layer{layer:03d}_shard{{:03d}}.safetensors"
                if h["shards"][s].get("num_tokens", 1):
                    plan.take(plan.parts[p] / name.format(s), plan.path / name.format(new))
    tensors = dict(datasets[0].metadata["tensors"])
    if hidden[0] is not None:
        key = hidden[0].where.removeprefix("tensors.")
        tensors[key] = {**described[0], "shards": merged_shards} | ({"last_token_shards": total} if full else {})
    beside_at: dict[str, list[int]] = {}
    for kind, stem in (("logits_topk", "logits_topk"), ("router_logits", "router_logits")):
        if kind not in tensors:
            continue
        each = [d.metadata["tensors"][kind]["shards"] for d in datasets]
        beside_at[kind] = _before([len(s) for s in each])
        shards = []
        for p, of_part in enumerate(each):
            for s, shard in enumerate(of_part):
                name = f"tensors/{stem}_{beside_at[kind][p] + s:03d}.safetensors"
                plan.take(plan.parts[p] / f"tensors/{stem}_{s:03d}.safetensors", plan.path / name)
                shards.append({**shard, "file": name})
        tensors[kind] = {**tensors[kind], "shards": shards}
    metadata = {**datasets[0].metadata, "tensors": tensors, "num_prompts": sum(d.num_rows for d in datasets)}
    keys = {f"lmprobe:{k}".encode(): json.dumps(v).encode() for k, v in metadata.items()}
    schema = pa.unify_schemas(
        [d.schema.remove_metadata() for d in datasets], promote_options="permissive"
    ).with_metadata(keys)
    index = plan.path / "index" / "train-00000-of-00001.parquet"
    make_folder(index.parent)
    temporary = index.with_name(f".{index.name}.part")
    try:
        with pq.ParquetWriter(temporary, schema) as writer:
            for p, dataset in enumerate(datasets):
                for _, _, batch in dataset.batches(list(dataset.names)):
                    columns = {n: batch.column(n) for n in batch.schema.names}
                    if hidden[p] is not None:
                        columns["shard_index"] = _plus(columns["shard_index"], last_at[p])
                    elif "logits_topk" in beside_at:
                        columns["shard_index"] = _plus(columns["shard_index"], beside_at["logits_topk"][p])
                    if "shard_index_logits" in columns:
                        columns["shard_index_logits"] = _plus(
                            columns["shard_index_logits"], beside_at["logits_topk"][p]
                        )
                    if full:
                        columns[TOKEN_LISTS[0]] = _renumbered(
                            columns[TOKEN_LISTS[0]], lasts[p], last_at[p], total + rest_at[p]
                        )
                    table = pa.table({n: columns.get(n, pa.nulls(batch.num_rows)) for n in schema.names})
                    writer.write_table(table.cast(schema))
    except OSError as error:
        raise from_os(error, temporary, "write") from error
    _native.sync_files([temporary, plan.path / "tensors"])
    rename(temporary, index)
    _native.sync_files([index.parent])
    return plan.path


def _before(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts)[:-1].tolist()]


def _plus(column: Any, n: int) -> Any:
    import pyarrow.compute as pc

    return pc.add(column, n).cast(column.type)


def _renumbered(column: Any, lasts: int, last_at: int, rest_at: int) -> Any:
    """Lists of shard numbers: last-token shards move by one offset, sequence shards by another."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = column.values
    moved = pc.if_else(pc.less(flat, lasts), pc.add(flat, last_at), pc.add(flat, rest_at - lasts))
    return pa.ListArray.from_arrays(column.offsets, moved.cast(flat.type))


# -- zarr ----------------------------------------------------------------------------------------------------------


def _check_chunks(sources: Sequence[Path]) -> None:
    """Stores can become one if a chunk is a file that another number makes one of the whole."""
    first = None
    for path in sources:
        member = Member(path)
        (array,) = member.arrays if len(member.arrays) == 1 else (None,)
        if (
            array is None
            or array.how
            or array.swapped
            or member.version != 2
            or array.chunks[:2] != (1, 1)
            or array.separator != "."
        ):
            raise ArgumentError(
                f"physical: {path} is not of plain chunks (1, 1, T, H) of version 2; a manifest holds it as it is"
            )
        first = first or array.chunks
        if array.chunks != first:
            raise ArgumentError(
                f"physical: {path} has chunks {list(array.chunks)}, {sources[0]} {list(first)}; write with the same chunk_tokens=, "
                "or merge them by a manifest"
            )


def _zarr(plan: _Merge) -> Path:
    if plan.options["physical"]:
        return _one_store(plan)
    shards: list[dict[str, Any]] = []
    start = 0
    member: Member | None = None
    for i, part in enumerate(plan.parts):
        name = f"shards/shard-{i:04}.zarr"
        plan.take(part, plan.path / name)
        member = Member(plan.path / name)
        shards.append({"path": name, "n_samples": member.n, "start": start})
        start += member.n
    assert member is not None
    first = Member(plan.path / shards[0]["path"])
    known: dict[str, Any] = {
        k: first.metadata[k] for k in ("schema_version", "created_at", "model_id", "layers") if k in first.metadata
    }
    manifest: dict[str, Any] = {
        "format": "activation-zarr-run",
        "manifest_version": "1.0",
        "n_samples": start,
        "num_layers": first.num_layers,
        "hidden_size": first.width,
        "T_max": max(Member(plan.path / s["path"]).arrays[0].shape[2] for s in shards),
        "dtype": str(first.arrays[0].dtype),
        **known,
        "shards": shards,
    }
    write_json(plan.path / "manifest.json", manifest)
    _native.sync_files([plan.path / "shards", plan.path])
    return plan.path


def _one_store(plan: _Merge) -> Path:
    """Chunk files move, their first number by the samples before; everything small is written again."""
    stores = [open_quietly(p, "zarr", "auto") for p in plan.parts]
    members = [Member(p) for p in plan.parts]
    lengths, tables = [], []
    start = 0
    for store, member in zip(stores, members, strict=True):
        folder = member.arrays[0].folder
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            first, _, rest = entry.name.partition(".")
            if first.isdigit() and int(first) < member.n:
                plan.take(Path(entry.path), plan.path / "arrays" / "activations" / f"{int(first) + start}.{rest}")
        counts = store.token_counts
        lengths.append(np.repeat(counts[:, None], member.num_layers, axis=1))
        tables.append(store.read_columns([n for n in store.contents.column_names if n != "seq_len"]))
        start += member.n
    import pyarrow as pa

    first_of = members[0]
    dtype = first_of.arrays[0].dtype
    spec = Spec(
        path=plan.path,
        layers=stores[0].layers,
        d_model=first_of.width,
        dtype=dtype,
        metadata={k: v for k, v in first_of.metadata.items() if k not in _OWN_ATTRIBUTES},
        num_examples=start,
        tokens=None,
        shard_bytes=None,
        part=None,
        options={
            "chunk_tokens": first_of.arrays[0].chunks[2],
            "t_max": max(m.arrays[0].shape[2] for m in members),
        },
    )
    target = ZarrTarget(spec)
    every = np.concatenate(lengths)
    target.restore([], every)
    columns = pa.concat_tables(tables, promote_options="permissive") if tables[0].num_columns else None
    target.finish(Examples(every, columns))
    return plan.path


_OWN_ATTRIBUTES = ("num_layers", "hidden_size", "T_max", "dtype", "activation_chunks", "layers", "written_by")


# -- pickle --------------------------------------------------------------------------------------------------------


def _pickle(plan: _Merge) -> Path:
    """Shards get new numbers; the lists of them become one."""
    described = [read_json(p / "metadata.json") for p in plan.parts]
    if all((p / s["filename"]).exists() for p, m in zip(plan.parts, described, strict=True) for s in m["shards"]):
        open_many(plan.path, list(plan.parts), Options("mmap"))  # refuses sample numbers that are there twice
    shards: list[dict[str, Any]] = []
    for part, metadata in zip(plan.parts, described, strict=True):
        for shard in metadata["shards"]:
            number = len(shards) + 1
            suffix = ".pkl.gz" if shard["filename"].endswith(".gz") else ".pkl"
            name = f"shard_{number:04d}{suffix}"
            plan.take(part / shard["filename"], plan.path / name)
            shards.append({**shard, "shard_id": number, "filename": name})
    first = described[0]
    config = dict(first["extraction_config"])
    layers = list(dict.fromkeys(la for s in shards for la in s["layers"]))
    longest = [m["extraction_config"].get("max_seq_length", 1) for m in described]
    config |= {"layers_extracted": config.get("layers_extracted", layers), "max_seq_length": max(longest)}
    seconds = [m.get("statistics", {}).get("extraction_duration_seconds") for m in described]
    known = [s for s in seconds if isinstance(s, int | float)]
    samples = sum(s["num_samples"] for s in shards)
    listing = shard_listing(shards, samples, config, first.get("created_at", ""), 0, 1, sum(known) if known else None)
    write_json(plan.path / "metadata.json", listing)
    _native.sync_files([plan.path])
    return plan.path


_DO = {"saev": _saev, "lmprobe": _lmprobe, "zarr": _zarr, "pickle": _pickle}
