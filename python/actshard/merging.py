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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actshard import _arguments, _native
from actshard._json import Fields, read_json, show
from actshard.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    DiskFullError,
    ExistsError,
    FileAccessError,
    FormatError,
    InterruptedReadError,
    LockedError,
    MissingFileError,
    NoMemoryError,
    UnfinishedError,
    UnsupportedError,
    boundary,
    from_os,
)
from actshard.finding import existing, find
from actshard.formats.contents import Options
from actshard.formats.lmprobe.read import TOKEN_LISTS, Dataset
from actshard.formats.lmprobe.write import MADE_UP, LmprobeTarget
from actshard.formats.pickle.read import machines_in, open_many
from actshard.formats.pickle.write import PickleTarget, shard_listing
from actshard.formats.saev.read import BUDGET, CONTENT_TOKENS, D_MODEL, ITEMSIZE, LENGTHS, N_EXAMPLES, hashes
from actshard.formats.tables import common_type
from actshard.formats.target import Examples, Spec, refuse_existing
from actshard.formats.zarr.read import ACTIVATIONS, Member, is_group, members_of
from actshard.formats.zarr.write import ZarrTarget
from actshard.opening import open_quietly
from actshard.work import (
    EMPTY,
    FOLDER,
    MERGING,
    PARTS,
    Lock,
    make_folder,
    remove_made,
    rename,
    tidy,
    unfinished,
    write_bytes,
    write_json,
)

_MARKER = MERGING
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
    different_models: bool = False,
) -> Path:
    """Makes one dataset of parts.

    Everything that can be refused is refused before a file is moved, linked or written; what is refused leaves nothing behind. A
    merge that was killed, or stopped by a full disk, is finished by the same call; another call is refused until then.

    Args:
        path: the dataset: where :func:`actshard.create` was called with ``part=``, or a new folder for ``parts``.
        parts: datasets of one format to put together, in this order; they stay as they are (files are linked where they can be).
            None: the parts that were written below ``path``, in the order of their numbers; they become the dataset.
        physical: Zarr stores become one store, not a run of several with a manifest.
        different_models: join datasets of different models too; the result keeps the first one's name.

    Returns:
        Path of the merged dataset (for saev ``path/<HASH>``). If parts that were written below ``path`` are merged
        already, returns the same path; with ``parts`` a second call is refused once the first is done, as nothing tells whether
        the dataset that is there was made of them.

    Raises:
        UnfinishedError: a part is missing, or is not finished; the message lists them.
        FormatError: parts that are not of one kind, or two of which have the same sample numbers.
        ExistsError: a dataset is there already. LockedError: another process is merging.
        ArgumentError: ``physical`` for another format, or stores with different chunks; another merge was begun here.
    """
    root = _arguments.local_path(path)
    asked = _asked(parts, physical)
    different_models = _arguments.switch(different_models, "different_models")
    with boundary(root, "merge"):
        return _merged(root, asked, different_models)


@dataclass(frozen=True)
class _Asked:
    """What a call asks for."""

    parts: tuple[Path, ...] | None
    physical: bool

    def as_dict(self) -> dict[str, Any]:
        return {"parts": None if self.parts is None else [str(p) for p in self.parts], "physical": self.physical}


def _asked(parts: Any, physical: bool) -> _Asked:
    if parts is None:
        return _Asked(None, _arguments.switch(physical, "physical"))
    if isinstance(parts, str | bytes | os.PathLike) or not isinstance(parts, Iterable):
        raise ArgumentTypeError(f"parts: expected a list of paths, found {type(parts).__name__}")
    return _Asked(tuple(_arguments.local_path(p, "parts") for p in parts), _arguments.switch(physical, "physical"))


def _merged(root: Path, asked: _Asked, different_models: bool) -> Path:
    marker = root / FOLDER / _MARKER
    if not marker.exists() and asked.parts is None and not (root / PARTS).is_dir():
        return _there(root, asked.physical)
    lock = _locked(root)
    try:
        if not marker.exists():
            if asked.parts is None and not (root / PARTS).is_dir():  # another process has merged them meanwhile
                _leave(root)
                return _there(root, asked.physical)
            try:
                _begin(root, asked, marker, different_models)
            except BaseException:
                if not marker.exists():
                    _leave(root)
                raise
        plan, listed = _begun(root, asked, marker)
        try:
            place = root / listed["place"] if listed.get("finished") else _DO[plan.format](plan)
        except ActshardError as error:
            # A disk can get room again; what contradicts itself will do so again.
            if not plan.move and not isinstance(
                error, DiskFullError | FileAccessError | InterruptedReadError | NoMemoryError
            ):
                _undo(plan)
            raise
        if not listed.get("finished"):
            write_json(marker, {**listed, "finished": True, "place": os.path.relpath(place, root)})
        if plan.move:
            _remove_parts(root)
        _leave(root)
    finally:
        lock.release()
    _native.sync_files([root])
    return place


def _locked(root: Path) -> Lock:
    """The lock of a merge; a folder that another process removes meanwhile, as it has finished, is made again."""
    for _ in range(3):
        make_folder(root / FOLDER)
        lock = Lock(root / FOLDER)
        with contextlib.suppress(MissingFileError):
            lock.take()
            return lock
    raise LockedError("another merge is at work here; wait for it", path=root)


def _remove_parts(root: Path) -> None:
    """Removes the parts' folder. It goes in one step: a dataset beside what is left of its parts would be taken for unfinished."""
    if not (root / PARTS).is_dir():
        return
    gone = root / FOLDER / f"merged{PARTS}"
    if os.path.lexists(gone):  # a merge that was stopped here before
        shutil.rmtree(gone, ignore_errors=True)
    rename(root / PARTS, gone)
    _native.sync_files([root])
    shutil.rmtree(gone, ignore_errors=True)


def _leave(root: Path) -> None:
    """Removes the working folder, the marker last: without it, nobody would know how to go on; and the dataset's if it is empty."""
    folder = root / FOLDER
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _MARKER:
                entry.unlink()
        # With anything left the marker stays: the next call goes on from it.
        (folder / _MARKER).unlink(missing_ok=True)
        folder.rmdir()
        root.rmdir()


_MAKES = {
    "saev": (".merging",),
    "lmprobe": LmprobeTarget.makes,
    "zarr": (*ZarrTarget.makes, "shards", "manifest.json"),
    "pickle": PickleTarget.makes,
}
"""Patterns of the names that a merge makes."""


def _undo(plan: _Merge) -> None:
    """Removes what a merge has made of datasets that stay, and nothing else that is in its folder."""
    remove_made(plan.path, _MAKES[plan.format])
    _leave(plan.path)


def _there(root: Path, physical: bool) -> Path:
    """A dataset that was merged before."""
    if not root.exists():
        raise MissingFileError("expected parts of a dataset, found nothing", path=root)
    if unfinished(root) is not None:
        raise UnfinishedError("expected parts of a dataset, found one whose writer has not finished", path=root)
    found, format = find(root)
    if physical and (format != "zarr" or not is_group(found)):
        raise ArgumentError(
            "physical: is merged already, and is a run of several stores: merge it into a new folder "
            "(parts=[this one], physical=True)"
            if format == "zarr"
            else _ONLY_ZARR.format(format),
            path=found,
        )
    tidy(found)
    return found


_ONLY_ZARR = "physical: is for Zarr stores; {} datasets are always one"


def _begun(root: Path, asked: _Asked, marker: Path) -> tuple[_Merge, dict[str, Any]]:
    """The merge that was begun here, which has to be the one that is asked for."""
    found = Fields(read_json(marker), marker)
    format = found.text("format")
    names = found.value.get("parts")
    move, physical = found.boolean("move"), found.boolean("physical")
    if format not in _DO:
        raise found.error("format", f"one of {', '.join(_DO)}")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n and "\0" not in n for n in names):
        raise found.error("parts", "a list of paths")
    if found.value.get("finished"):
        place = Path(os.path.normpath(root / found.text("place")))
        if place not in (root, root / place.name):
            raise found.error("place", "the dataset's folder")
        found.value["place"] = str(place)
    before = found.value.get("asked")
    if before is None:  # begun by an earlier release
        same = move == (asked.parts is None) and physical == asked.physical
    else:
        same = before == asked.as_dict()
    if not same:
        of = "the parts that were written here" if move else ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        remedy = "the same call finishes it" + ("" if move else f"; or remove {root} to begin another")
        raise ArgumentError(
            f"a merge of {of}{' with physical=True' if physical else ''} was begun here and is not finished, another is asked for: "
            f"{remedy}",
            path=root,
        )
    return _Merge(root, format, tuple(root / n for n in names), move, {"physical": physical}), found.value


def _begin(root: Path, asked: _Asked, marker: Path, different_models: bool) -> None:
    """Checks everything that can be wrong with a merge, and notes it: from there on it is to be finished."""
    if asked.parts is None:
        sources = _own_parts(root)
    else:
        if not asked.parts:
            raise ArgumentError("parts: expected at least one dataset")
        sources = [find(existing(p))[0] for p in asked.parts]
        if len(set(sources)) < len(sources):
            raise ArgumentError("parts: a dataset is in the list twice")
        if (root / PARTS).exists():
            raise ExistsError(
                "holds parts of a dataset of its own: merge without parts=, or into another folder", path=root
            )
        refuse_existing(root)
    format = _check_alike(sources, different_models)
    if asked.physical and format != "zarr":
        raise ArgumentError(_ONLY_ZARR.format(format))
    if format == "zarr":
        sources = [store for s in sources for store in members_of(s)]  # a run is its stores
    if format == "pickle":
        sources = [m for s in sources for m in ([s] if (s / "metadata.json").exists() else machines_in(s))]
    if asked.parts is None and format != "saev":
        refuse_existing(root)
    move = asked.parts is None
    plan = _Merge(root, format, tuple(sources), move, {"physical": asked.physical})
    _CHECK[format](plan)
    # A dataset that is moved while it is merged takes its parts along.
    names = [os.path.relpath(s, root) if move else str(s) for s in sources]
    made = {"parts": names, "format": format, "move": move, "physical": asked.physical, "asked": asked.as_dict()}
    write_json(marker, made)
    _native.sync_files([marker.parent, root])


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
    made, behind, empty = [], [], []
    for i, folder in sorted(found.items()):
        if (folder / EMPTY).is_file():
            empty.append(i)
            continue
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
    if not made:
        raise UnfinishedError(f"expected examples in one of {total} parts, found none in any", path=root / PARTS)
    return made


_DESCRIBED = ("type", "layers", "dim", "storage", "pooling", "key_pattern", "k", "num_experts")
"""What the descriptors of lmprobe's tensors have to agree on."""


def _check_alike(sources: Sequence[Path], different_models: bool) -> str:
    """The format of datasets of one kind."""
    first: Any = None
    for path in sources:
        store = open_quietly(path, None, "auto")
        kind: dict[str, Any] = {
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
            kind["tensors"] = {
                k: {name: v.get(name) for name in _DESCRIBED} if isinstance(v, dict) else v
                for k, v in store.metadata["tensors"].items()
            }
        if not different_models:
            kind["model"] = store.contents.model
        if first is None:
            first = kind
        for name, value in kind.items():
            if first.get(name) != value:
                asked = "; different_models=True (--different-models) joins them" if name == "model" else ""
                expected, differs = show(first.get(name)), show(value)
                if name == "tensors":
                    expected, differs = _difference(first[name], dict(value))
                raise FormatError(
                    f"expected {name} {expected} as in {sources[0].name}, found {differs}{asked}", path=path
                )
    return str(first["format"])


def _difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str]:
    """The first descriptors that differ."""
    name = next(k for k in [*a, *b] if a.get(k) != b.get(k))
    return show({name: a.get(name)}), show({name: b.get(name)})


# -- saev ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dump:
    """What a saev dump's metadata say of its files."""

    fields: Fields
    layers: int
    tokens: int
    """Of an example, CLS included."""
    content: int

    @classmethod
    def of(cls, path: Path) -> _Dump:
        fields = Fields(read_json(path / "metadata.json"), path / "metadata.json")
        # As saev's reader has it: before layers was a list, the last n_layers were recorded, and every model had a CLS token.
        listed = "layers" in fields.value
        layers = len(fields.integers("layers")) if listed else fields.integer("n_layers")
        content = fields.integer(*CONTENT_TOKENS)
        special = fields.boolean("cls_token") if listed or "cls_token" in fields.value else True
        return cls(fields, layers, content + special, content)

    @property
    def eps(self) -> int:
        """Examples per shard."""
        return self.fields.integer(*BUDGET) // (self.tokens * self.layers)

    @property
    def examples(self) -> int:
        return self.fields.integer(*N_EXAMPLES)


def _saev_place(plan: _Merge, dumps: Sequence[_Dump]) -> tuple[Path, dict[str, Any]]:
    """Where the merged dump belongs, which its metadata decide, and these."""
    first = dumps[0].fields
    largest = max(dumps, key=lambda d: d.eps)
    # A small dump has a small shard: the largest of them is what all get.
    budget = {first.name(*BUDGET): largest.fields.integer(*BUDGET)}
    metadata = {**first.value, **budget, first.name(*N_EXAMPLES): sum(d.examples for d in dumps)}
    recipe = next((i for i, h in enumerate(hashes(first.value)) if h == plan.parts[0].name), 0)
    return plan.path / hashes(metadata)[recipe], metadata


def _check_saev(plan: _Merge) -> None:
    place, _ = _saev_place(plan, [_Dump.of(p) for p in plan.parts])
    if place.exists():
        raise ExistsError(
            "expected nothing, found the dataset that these parts would make: remove one of the two", path=place
        )
    for path in plan.parts:
        files = open_quietly(path, "saev", "auto").contents.files()
        odd = next((f for i, f in enumerate(files) if f.name != f"acts{i:06}.bin"), None)
        if odd is not None:
            raise UnsupportedError(f"shards have other names than saev's ({odd.name}): convert it first", path=path)


def _saev(plan: _Merge) -> Path:
    """Shards all hold as many examples: those of a part that begins at a multiple are taken, others are put together anew."""
    dumps = [_Dump.of(p) for p in plan.parts]
    fields = dumps[0].fields
    name = fields.name(*N_EXAMPLES)
    counts = [d.examples for d in dumps]
    each = [d.eps for d in dumps]
    eps, n = max(each), sum(counts)
    content = dumps[0].content
    size = dumps[0].tokens * dumps[0].layers * fields.integer(*D_MODEL) * ITEMSIZE
    place, metadata = _saev_place(plan, dumps)
    if place.exists():  # named before a crash: there was nothing when the merge began
        if read_json(place / "metadata.json") != metadata:
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
    if any((part / LENGTHS).exists() for part in plan.parts):
        lengths = [
            np.fromfile(part / LENGTHS, "<u4") if (part / LENGTHS).exists() else np.full(held, content, "<u4")
            for part, held in zip(plan.parts, counts, strict=True)
        ]
        write_bytes(work / LENGTHS, np.concatenate(lengths).tobytes())
    word = "n_ex" if name == "n_ex" else "n_imgs" if name == "n_imgs" else "n_examples"
    listing = [{"name": f"acts{i:06}.bin", word: min(eps, n - i * eps)} for i in range(-(-n // eps))]
    write_json(work / "shards.json", listing)
    write_json(work / "metadata.json", metadata)
    _native.sync_files([work])
    rename(work, place)
    return place


# -- lmprobe -------------------------------------------------------------------------------------------------------


_HIDDEN_FILE = "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors"
_BESIDE = ("logits_topk", "router_logits")


def _lmprobe_schema(datasets: Sequence[Dataset]) -> Any:
    """The columns of all indexes."""
    import pyarrow as pa

    try:
        return pa.unify_schemas([d.schema.remove_metadata() for d in datasets], promote_options="permissive")
    except pa.ArrowException as error:
        raise FormatError(f"columns of the parts do not fit together: {' '.join(str(error).split())[:300]}") from error


def _check_lmprobe(plan: _Merge) -> None:
    datasets = [Dataset(p, "auto") for p in plan.parts]
    for path, dataset in zip(plan.parts, datasets, strict=True):
        twice = sorted({n for n in dataset.names if dataset.names.count(n) > 1})
        if twice:
            raise FormatError(f"column '{twice[0]}' is there twice", path=dataset.parts[0])
        known = {*_BESIDE, *([dataset.hidden.where.removeprefix("tensors.")] if dataset.hidden is not None else [])}
        unknown = sorted(set(dataset.metadata["tensors"]) - known)
        if unknown:
            raise UnsupportedError(f"tensors {unknown} are not of a type that can be merged", path=path)
        if dataset.hidden is not None:
            layers = dataset.hidden.integers("layers")
            shards = dataset.hidden.items("shards")
            name = dataset.pattern(dataset.hidden, "file_pattern", layers, len(shards))
            if len({name(layer, 0) for layer in layers}) < len(layers):
                raise UnsupportedError("several layers are in one file: convert it first", path=path)
            if dataset.hidden.has("last_token_shards"):
                dataset.hidden.integer("last_token_shards", minimum=0)
        missing = next((f for f in dataset.files() if not f.is_file()), None)
        if missing is not None:
            raise MissingFileError("expected a file, found nothing: a dataset is merged whole", path=missing)
    _lmprobe_schema(datasets)


def _lmprobe(plan: _Merge) -> Path:
    """Tensor files get new numbers; the index is written again with the addresses they mean."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    datasets = [Dataset(p, "auto") for p in plan.parts]
    hidden = [d.hidden for d in datasets]
    described = [h.value if h is not None else {"shards": [], "layers": []} for h in hidden]
    full = described[0].get("storage") == "full_sequence"
    lasts = [int(h.get("last_token_shards", len(h["shards"]))) if full else len(h["shards"]) for h in described]
    rests = [len(h["shards"]) - k for h, k in zip(described, lasts, strict=True)]
    total = sum(lasts)
    last_at, rest_at = _before(lasts), _before(rests)
    merged_shards = [s for h, k in zip(described, lasts, strict=True) for s in h["shards"][:k]]
    merged_shards += [s for h, k in zip(described, lasts, strict=True) for s in h["shards"][k:]]
    for p, h in enumerate(hidden):
        if h is None:
            continue
        shards = h.items("shards")
        layers = h.integers("layers")
        name = datasets[p].pattern(h, "file_pattern", layers, len(shards))
        for layer in layers:
            for s, shard in enumerate(shards):
                new = last_at[p] + s if s < lasts[p] else total + rest_at[p] + s - lasts[p]
                if shard.value.get("num_tokens", 1):
                    target = plan.path / _HIDDEN_FILE.format(layer=layer, shard=new)
                    plan.take(datasets[p].inside(h, name(layer, s)), target)
    tensors = dict(datasets[0].metadata["tensors"])
    if hidden[0] is not None:
        key = hidden[0].where.removeprefix("tensors.")
        tensors[key] = {**described[0], "file_pattern": _HIDDEN_FILE, "shards": merged_shards}
        tensors[key] |= {"last_token_shards": total} if full else {}
    beside_at: dict[str, list[int]] = {}
    for kind in _BESIDE:
        if kind not in tensors:
            continue
        every = [Fields(d.metadata["tensors"][kind], d.parts[0], f"tensors.{kind}") for d in datasets]
        each = [fields.items("shards") for fields in every]
        beside_at[kind] = _before([len(s) for s in each])
        listed = []
        for p, of_part in enumerate(each):
            files = datasets[p].files_of(every[p], len(of_part))
            for s, (shard, source) in enumerate(zip(of_part, files, strict=True)):
                file = f"tensors/{kind}_{beside_at[kind][p] + s:03d}.safetensors"
                plan.take(source, plan.path / file)
                listed.append({**shard.value, "file": file})
        tensors[kind] = {**tensors[kind], "file_pattern": f"tensors/{kind}_{{shard:03d}}.safetensors", "shards": listed}
    metadata = {**datasets[0].metadata, "tensors": tensors, "num_prompts": sum(d.num_rows for d in datasets)}
    # Texts that the writer made up, to tell examples apart, have to do so in the whole.
    made_up = [isinstance(d.metadata.get(MADE_UP), list) and "text" in d.metadata[MADE_UP] for d in datasets]
    if not all(made_up):
        metadata.pop(MADE_UP, None)
    keys = {f"lmprobe:{k}".encode(): json.dumps(v).encode() for k, v in metadata.items()}
    schema = _lmprobe_schema(datasets).with_metadata(keys)
    index = plan.path / "index" / "train-00000-of-00001.parquet"
    make_folder(index.parent)
    temporary = index.with_name(f".{index.name}.part")
    try:
        with pq.ParquetWriter(temporary, schema) as writer:
            done = 0
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
                    if made_up[p]:
                        columns["text"] = pa.array([f"example {i}" for i in range(done, done + batch.num_rows)])
                    done += batch.num_rows
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
            or array.node != ACTIVATIONS
            or array.fill not in (0, None)
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


def _check_zarr(plan: _Merge) -> None:
    if plan.options["physical"]:
        _check_chunks(plan.parts)
    stores = [open_quietly(p, "zarr", "auto") for p in plan.parts]
    _check_column_types(plan, [s.read_columns([n for n in s.contents.column_names if n != "seq_len"]) for s in stores])


def _check_column_types(plan: _Merge, tables: Sequence[Any]) -> None:
    """Raises FormatError if no type holds a column's values of all parts as they are: it would be read as texts."""
    import pyarrow as pa

    known: dict[str, tuple[Any, Path]] = {}
    for path, table in zip(plan.parts, tables, strict=True):
        for field in table.schema:
            if field.type == pa.null():
                continue
            kind, first = known.setdefault(field.name, (field.type, path))
            both = common_type(kind, field.type)
            if both is None:
                raise FormatError(
                    f"column {field.name!r}: expected {kind} as in {first}, found {field.type}: no type holds both; write one of "
                    "the parts again with values of the other's type",
                    path=path,
                )
            known[field.name] = (both, first)


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
    _native.sync_files([plan.path / "shards", plan.path])  # no manifest of stores that a power cut may take away
    write_json(plan.path / "manifest.json", manifest)
    _native.sync_files([plan.path])
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


def _check_pickle(plan: _Merge) -> None:
    open_many(plan.path, list(plan.parts), Options("pread"))  # refuses sample numbers that are there twice
    missing = next((source for source, _ in _pickle_plan(plan)[0] if not source.is_file()), None)
    if missing is not None:
        raise MissingFileError("expected a shard, found nothing", path=missing)
    # Columns of a whole part would have to be decoded with its rows: its first shard tells its types.
    contents = [open_quietly(p, "pickle", "auto", "160MiB").contents for p in plan.parts]
    _check_column_types(plan, [c.unit_columns(0) for c in contents if c.unit_columns is not None])


def _pickle_plan(plan: _Merge) -> tuple[list[tuple[Path, str]], dict[str, Any]]:
    """Each shard with its new name, and the list of them all."""
    described = [Fields(read_json(p / "metadata.json"), p / "metadata.json") for p in plan.parts]
    moves: list[tuple[Path, str]] = []
    shards: list[dict[str, Any]] = []
    for part, metadata in zip(plan.parts, described, strict=True):
        for shard in metadata.items("shards"):
            number = len(shards) + 1
            file = shard.text("filename")
            name = f"shard_{number:04d}{'.pkl.gz' if file.endswith('.gz') else '.pkl'}"
            moves.append((part / file, name))
            shards.append({**shard.value, "shard_id": number, "filename": name})
    configs = [Fields(m.value.get("extraction_config"), m.path, "extraction_config").value for m in described]
    config = dict(configs[0])
    layers = list(dict.fromkeys(la for s in shards for la in s.get("layers", [])))
    longest = [c["max_seq_length"] for c in configs if isinstance(c.get("max_seq_length"), int)]
    config |= {"layers_extracted": config.get("layers_extracted", layers), "max_seq_length": max(longest, default=1)}
    statistics = [m.value.get("statistics") for m in described]
    seconds = [s.get("extraction_duration_seconds") if isinstance(s, dict) else None for s in statistics]
    known = [s for s in seconds if isinstance(s, int | float)]
    samples = sum(
        Fields(s, plan.parts[0] / "metadata.json", "shards").integer("num_samples", minimum=0) for s in shards
    )
    created = described[0].value.get("created_at", "")
    return moves, shard_listing(shards, samples, config, created, 0, 1, sum(known) if known else None)


def _pickle(plan: _Merge) -> Path:
    """Shards get new numbers; the lists of them become one."""
    moves, listing = _pickle_plan(plan)
    for source, name in moves:
        plan.take(source, plan.path / name)
    _native.sync_files([plan.path])  # no list of shards that a power cut may take away
    write_json(plan.path / "metadata.json", listing)
    _native.sync_files([plan.path])
    return plan.path


_CHECK: dict[str, Callable[[_Merge], None]] = {
    "saev": _check_saev,
    "lmprobe": _check_lmprobe,
    "zarr": _check_zarr,
    "pickle": _check_pickle,
}
_DO = {"saev": _saev, "lmprobe": _lmprobe, "zarr": _zarr, "pickle": _pickle}
