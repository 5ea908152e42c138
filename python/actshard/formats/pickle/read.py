"""Reads pickle shards: numbered pickles of lists of samples by layer, usually gzip-compressed; one folder per machine.

    metadata.json                  extraction settings, and the list of shards: files, samples, layers, sample numbers, checksums
    shard_0001.pkl.gz or .pkl      {"layer_15": [{"sample_idx", "activation", "shape", "text_preview", "metadata"}, ...], ...}

Source: the published text "Activation Shard Format Specification". Where it is ambiguous, existing files decide: ``checksum`` is
the SHA-256 of the stored file, ``sample_id_range`` includes both ends, ``compressed`` and ``layers`` are per shard.

**Nothing is ever unpickled.** The native code interprets only opcodes for plain data and numpy arrays, and rejects everything
else by name and byte offset. Numbers of tokens are stored only inside shards, so a shard is decoded when its first data are
requested. Opening a dataset decodes one shard.

Examples are samples in shard order; within a shard, in the order in which its layers first contain them. Sample numbers are in
``store.table["sample_idx"]``.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from actshard._native import Rows
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import RAISE, ActshardError, Faults, FormatError, NotStoredError
from actshard.base.location import Location
from actshard.formats.contents import Absence, Contents, Evidence, Options, leave_out, size_of_file
from actshard.formats.report import Report
from actshard.formats.tables import plain, table_of

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.format import Tell


LOOKED_FOR = (
    "a folder with a metadata.json that has extraction_config and shards with filenames, or one such folder per machine"
)
OWN_COLUMNS = ("sample_idx", "text_preview", "shape", "layers")
CHEAP_BYTES = 256 << 20
"""Shards with up to this many compressed bytes in total are decompressed to count tokens."""
MOST_COLUMNS = 4096
"""Limit on the number of distinct metadata fields in a table."""
_UNLIMITED = 1 << 62
SAMPLE_NUMBERS = range(1 << 62)
LARGEST_LAYER = 10**9 - 1
"""Keys of shards have numbers of at most nine digits (rust/core, parse/pickle/shard.rs)."""
SLACK_PER_SAMPLE = 64 << 10
"""Bytes allowed per sample in a shard besides its activations: a preview of 200 characters and a few metadata fields."""


def detect(path: Location) -> Evidence:
    """Checks for a metadata.json of pickle shards, in the folder or in its subfolders, one per machine of an extraction."""
    if path.kind() != "folder":
        return Evidence(False, LOOKED_FOR, "a file")
    if (path / "metadata.json").exists():
        if _is_machine_folder(path):
            return Evidence(True, LOOKED_FOR, "a metadata.json of pickle shards")
        return Evidence(False, LOOKED_FOR, "another metadata.json", near=True)
    machines = machines_in(path)
    if len(machines) < 2:
        return Evidence(False, LOOKED_FOR, "no metadata.json")
    configs = [_extraction(read_json(m / "metadata.json").get("extraction_config")) for m in machines]
    for machine, config in zip(machines, configs, strict=True):
        if config != configs[0]:
            text = (
                f"{len(machines)} folders of pickle shards of different extractions ({_difference(configs[0], config)} differs "
                f"between {show(machines[0].name)} and {show(machine.name)})"
            )
            return Evidence(False, LOOKED_FOR, text, near=True)
    return Evidence(True, LOOKED_FOR, f"{len(machines)} folders of pickle shards of one extraction")


def _extraction(config: object) -> object:
    """The settings that must agree between machines. The longest sample and the batch size may differ."""
    if not isinstance(config, dict):
        return config
    return {name: value for name, value in config.items() if name not in ("max_seq_length", "batch_size")}


def _difference(a: object, b: object) -> str:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return "extraction_config"
    return next((f"extraction_config.{show(k)[1:-1]}" for k in [*a, *b] if a.get(k) != b.get(k)), "extraction_config")


def _is_machine_folder(path: Location) -> bool:
    value = read_json(path / "metadata.json")
    shards = value.get("shards") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(shards, list):
        return False
    has_names = any(isinstance(s, dict) and "filename" in s for s in shards)
    return has_names or (not shards and "extraction_config" in value)


_OF_OTHERS = {".zgroup", ".zmetadata", "zarr.json", "index"}
"""Names that occur in folders of datasets of other formats."""


def machines_in(path: Location) -> list[Location]:
    """Subfolders with pickle shards, sorted by number; empty if the folder also contains other datasets."""
    try:
        if not path.is_local and any(entry.name in _OF_OTHERS for entry in path.entries()):
            return []  # each subfolder would cost a request
        folders = [
            folder
            for entry in path.entries()
            if entry.kind == "folder" and ((folder := path / entry.name) / "metadata.json").kind() == "file"
        ]
        if not folders or len(folders) > 100_000 or not all(_is_machine_folder(p) for p in folders):
            return []
    except ActshardError:
        return []
    return sorted(folders, key=_natural)


def _natural(path: Location) -> list[tuple[int, str]]:
    """Sort key that puts machine_2 before machine_10."""
    # Only ASCII digits are numbers; other digits are compared as text.
    parts = re.split(r"([0-9]{1,15})", path.name)
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


@dataclass(frozen=True)
class ListedShard:
    """An entry of the shard list in metadata.json."""

    path: Location
    compressed: bool
    size: int | None
    sha256: bytes | None
    samples: int
    ids: tuple[int, int]
    layers: tuple[int, ...]
    limit: int
    number: int | None = 0
    """Its number among the shards that are read; None if the file is left out."""

    @property
    def dense(self) -> bool:
        """Whether every number in the shard's range is a sample."""
        return self.ids[1] - self.ids[0] + 1 == self.samples


def open(path: Location, options: Options) -> Contents:
    """Reads metadata.json (of every machine if there are several) and decodes one shard."""
    if (path / "metadata.json").exists():
        return open_many(path, [path], options)
    machines = machines_in(path)
    if not machines:
        read_json(path / "metadata.json")  # raises the error for the missing file
    return open_many(path, machines, options)


def open_many(path: Location, machines: Sequence[Location], options: Options) -> Contents:
    """Opens the folders of several machines as one dataset, in this order."""
    warnings: list[Remark] = []
    metadata = [Fields(read_json(m / "metadata.json"), m / "metadata.json") for m in machines]
    shards: list[ListedShard] = []
    order: dict[int, None] = {}
    for folder, fields in zip(machines, metadata, strict=True):
        remarks: list[Remark] = []
        machine_shards = shards_of(folder, fields, options, remarks)
        _check_statistics(fields, machine_shards, remarks)
        warnings += [w.within(folder.name) for w in remarks] if len(machines) > 1 else remarks
        shards += machine_shards
        extracted = _config(fields).get("layers_extracted")
        if isinstance(extracted, list):
            order |= dict.fromkeys(x for x in extracted if type(x) is int)
    present = dict.fromkeys(layer for shard in shards for layer in shard.layers)
    layers = tuple(layer for layer in order if layer in present) + tuple(
        layer for layer in present if layer not in order
    )
    if not shards or not layers:
        raise FormatError("expected at least one shard with a layer, found none", path=metadata[0].path)

    shards = _number_whole(shards, skips_incomplete=options.skip_incomplete)
    whole_shards = [s for s in shards if s.number is not None]
    if not any(s.samples for s in whole_shards):
        raise FormatError(f"expected at least one whole shard of {len(shards)}, found none", path=path)
    rows = Rows.shards(
        [(s.path, s.compressed, s.size, s.sha256, s.samples, s.ids, list(s.layers), s.limit) for s in whole_shards],
        layers=list(layers),
        decoded_memory=options.decoded_memory,
        io=options.io,
    )
    _check_unique(whole_shards, rows)
    absent = np.repeat([s.number is None for s in shards], [s.samples for s in shards])
    every = leave_out(rows, absent, len(layers), path, are_dense=True)
    for folder, fields in zip(machines, metadata, strict=True):
        remarks = []
        _check_extraction(fields, [s for s in shards if s.path.parent == folder], rows.width, remarks)
        warnings += [w.within(folder.name) for w in remarks] if len(machines) > 1 else remarks
    lacking = sum(1 for s in shards if len(s.layers) < len(layers))
    if lacking:
        warnings.append(
            Remark(
                "layout",
                f"{lacking} of {len(shards)} shards lack layers: their examples have only those that their shard lists",
            )
        )
    first = metadata[0].value
    config = _config(metadata[0])
    compressed = [s for s in shards if s.compressed]
    names = [*OWN_COLUMNS, *_fields_of(rows, next(i for i, s in enumerate(whole_shards) if s.samples))]
    return Contents(
        format="pickle",
        path=path.place,
        folders=tuple(m.place for m in machines) if len(machines) > 1 else (),
        metadata=first
        if len(machines) == 1
        else {"machines": {m.name: f.value for m, f in zip(machines, metadata, strict=True)}},
        layers=layers,
        d_model=rows.width,
        dtype=rows.descr,
        num_examples=sum(s.samples for s in shards),
        token_counts=every.token_counts,
        rows=every,
        column_names=tuple(names),
        columns=lambda requested_names: _columns(path, rows, shards, requested_names),
        units=tuple(itertools.accumulate((s.samples for s in shards), initial=0)),
        unit_columns=lambda unit: _columns(path, rows, shards, names, [unit]),
        head_columns=lambda requested_names, n: _columns(path, rows, shards, requested_names, _first_shards(shards, n)),
        files=lambda: [s.path.place for s in shards],
        absence=Absence(absent, tuple(s.path.place for s in shards if s.number is None)),
        model=str(config["model_name"]) if config.get("model_name") else None,
        provenance=_provenance(metadata, len(compressed)),
        warnings=tuple(warnings),
        types_may_differ=True,
        layers_differ=True,
        lacks_layers=bool(lacking),
        counts_are_cheap=sum(s.size or CHEAP_BYTES for s in compressed) <= CHEAP_BYTES,
    )


def _provenance(metadata: Sequence[Fields], compressed: int) -> dict[str, object]:
    """Settings of the extraction, from the metadata of its machines, and the number of compressed shards."""
    first, config = metadata[0].value, _config(metadata[0])
    fields = ("dataset_name", "dataset_config", "dataset_split", "max_seq_length")
    provenance = {key: config[key] for key in fields if config.get(key) is not None}
    if longest := [n for f in metadata if type(n := _config(f).get("max_seq_length")) is int]:
        provenance["max_seq_length"] = max(longest)
    provenance |= {key: first[key] for key in ("version", "created_at") if first.get(key) is not None}
    if len(metadata) > 1:
        provenance["machines"] = len(metadata)
    if compressed:
        provenance["compressed_shards"] = compressed
    return provenance


def _number_whole(shards: Sequence[ListedShard], *, skips_incomplete: bool) -> list[ListedShard]:
    """Numbers the shards that are read: all, or those whose files have the listed size."""
    if not skips_incomplete:
        return [replace(s, number=i) for i, s in enumerate(shards)]
    numbers = itertools.count()
    sizes = [size_of_file(s.path) for s in shards]
    are_whole = [size > 0 and s.size in (None, size) for s, size in zip(shards, sizes, strict=True)]
    return [
        replace(s, number=next(numbers) if is_whole else None) for s, is_whole in zip(shards, are_whole, strict=True)
    ]


def _config(metadata: Fields) -> dict[str, Any]:
    config = metadata.value.get("extraction_config")
    return config if isinstance(config, dict) else {}


def shards_of(
    folder: Location, metadata: Fields, options: Options, warnings: list[Remark], faults: Faults = RAISE
) -> list[ListedShard]:
    """The shards listed in a metadata.json. ``faults`` receives the faults of each entry."""
    version = metadata.value.get("version")
    if not isinstance(version, str) or not re.match(r"\d+(\.\d+)*$", version):
        warnings.append(
            Remark("reader-warning", f"field 'version': expected a version such as \"1.0\", found {show(version)}")
        )
    elif int(version.split(".")[0][:9]) > 1:
        warnings.append(
            Remark("version", f"version {version} is newer than actshard knows (1.0); fields may have other meanings")
        )
    listed_shards: list[ListedShard] = []
    names: set[str] = set()
    unchecked = 0
    for fields in metadata.items("shards"):
        with faults.noting(fields.path):
            shard = _shard_of(folder, metadata, fields, names, options)
            unchecked += options.checksums and shard.sha256 is None
            listed_shards.append(shard)
    if unchecked:
        warnings.append(
            Remark(
                "no-checksum",
                f"{unchecked} of {len(listed_shards)} shards have no SHA-256 checksum, so damage may go unnoticed",
            )
        )
    return listed_shards


def _shard_of(folder: Location, metadata: Fields, fields: Fields, names: set[str], options: Options) -> ListedShard:
    """Checks one entry of the shard list and adds its file name to ``names``."""
    name = fields.text("filename")
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise fields.error("filename", "the name of a file in this folder")
    if name in names:
        raise fields.error("filename", "a different file for each shard")
    names.add(name)
    samples = fields.integer("num_samples", minimum=0)
    layers = fields.integers("layers")
    if any(abs(layer) > LARGEST_LAYER for layer in layers):
        raise fields.error("layers", "numbers of layers")
    compressed = fields.boolean("compressed") if fields.has("compressed") else name.endswith(".gz")
    return ListedShard(
        folder / name,
        compressed,
        fields.integer("size_bytes", minimum=0) if options.checksums and fields.has("size_bytes") else None,
        _checksum(fields) if options.checksums else None,
        samples,
        _ids(fields, samples),
        layers,
        _limit(metadata, samples * len(layers)),
    )


def _checksum(fields: Fields) -> bytes | None:
    if not fields.has("checksum"):
        return None
    text = fields.text("checksum")
    match = re.fullmatch(r"sha256:([0-9a-fA-F]{64})", text)
    if match is not None:
        return bytes.fromhex(match[1])
    if re.match(r"[a-z0-9]+:", text) and not text.startswith("sha256:"):
        return None  # another algorithm
    raise fields.error("checksum", '"sha256:" and 64 hexadecimal digits (checksums=False skips the check)')


def _ids(fields: Fields, samples: int) -> tuple[int, int]:
    """The smallest and largest sample_idx of a shard, inclusive."""
    if not fields.has("sample_id_range"):
        return 0, SAMPLE_NUMBERS[-1]
    value, limit = fields.value["sample_id_range"], SAMPLE_NUMBERS.stop
    if not isinstance(value, list) or len(value) != 2 or any(type(x) is not int or not -1 <= x < limit for x in value):
        raise fields.error("sample_id_range", "the first and the last sample_idx")
    first, last = value
    if last - first + 1 < samples:
        raise fields.error(
            "sample_id_range", f"a range of at least num_samples = {samples} numbers, both ends included"
        )
    return first, last


def _limit(metadata: Fields, items: int) -> int:
    """Largest inflated size of a shard, computed from its metadata.

    The native code also limits it by the file's size and ``decoded_memory``.
    """
    config = _config(metadata)
    parameters = config.get("model_params")
    hidden = parameters.get("hidden_size") if isinstance(parameters, dict) else None
    longest = config.get("max_seq_length")
    if type(hidden) is int and type(longest) is int and 0 < hidden < 1 << 24 and 0 < longest < 1 << 32:
        declared = items * (hidden * longest * 8 + SLACK_PER_SAMPLE) + (1 << 20)
        return min(declared, _UNLIMITED)
    return _UNLIMITED


def _check_statistics(metadata: Fields, shards: Sequence[ListedShard], warnings: list[Remark]) -> None:
    statistics = metadata.value.get("statistics")
    if not isinstance(statistics, dict):
        return
    for name, actual in (("total_shards", len(shards)), ("total_samples", sum(s.samples for s in shards))):
        claimed = statistics.get(name)
        if claimed is not None and claimed != actual:
            warnings.append(
                Remark("claim", f"statistics.{name} is {show(claimed)}, but the listed shards give {actual}")
            )


def _check_extraction(metadata: Fields, shards: Sequence[ListedShard], width: int, warnings: list[Remark]) -> None:
    """Compares the layers and width in ``extraction_config`` with the shards."""
    config = _config(metadata)
    extracted, present = config.get("layers_extracted"), {layer for shard in shards for layer in shard.layers}
    if extracted is not None and present:
        layers = [x for x in extracted if type(x) is int] if isinstance(extracted, list) else None
        if layers is None or len(layers) != len(extracted) or len(set(layers)) < len(layers) or set(layers) != present:
            warnings.append(
                Remark(
                    "claim",
                    f"extraction_config.layers_extracted is {show(extracted)}, but the listed shards contain {sorted(present)}",
                )
            )
    parameters = config.get("model_params")
    hidden = parameters.get("hidden_size") if isinstance(parameters, dict) else None
    if hidden is not None and hidden != width:
        warnings.append(
            Remark(
                "claim", f"extraction_config.model_params.hidden_size is {show(hidden)}, but rows have {width} elements"
            )
        )


def _check_unique(shards: Sequence[ListedShard], rows: Rows) -> None:
    """Raises FormatError if a sample_idx is in two shards.

    Disjoint ranges prove uniqueness, and so do ranges without gaps. Only shards whose range overlaps another and has gaps are
    read, each once.
    """
    placed = sorted((i for i, s in enumerate(shards) if s.samples), key=lambda i: shards[i].ids)
    dense = [i for i in placed if shards[i].dense]
    for i, j in itertools.pairwise(dense):
        if shards[j].ids[0] <= shards[i].ids[1]:
            last = min(shards[i].ids[1], shards[j].ids[1])
            raise _duplicate_error(shards, i, j, shards[j].ids[0], last - shards[j].ids[0] + 1)
    # Shards whose range overlaps the range of another shard.
    open_until, before, doubtful = -2, -1, set[int]()
    for i in placed:
        first, last = shards[i].ids
        if first <= open_until:
            doubtful |= {i, before}
        if last > open_until:
            open_until, before = last, i
    sparse = [i for i in sorted(doubtful) if not shards[i].dense]
    if not sparse:
        return
    ids = [np.sort(np.array(rows.samples(i), np.int64)) for i in sparse]
    firsts = np.array([shards[i].ids[0] for i in dense], np.int64)
    lasts = np.array([shards[i].ids[1] for i in dense], np.int64)
    for i, shard_ids in zip(sparse, ids, strict=True):
        if dense:
            indices = np.searchsorted(firsts, shard_ids, "right") - 1
            in_range = (indices >= 0) & (shard_ids <= lasts[indices])
            if in_range.any():
                number = int(shard_ids[in_range][0])
                j = dense[int(indices[in_range][0])]
                raise _duplicate_error(shards, i, j, number, int((in_range & (indices == indices[in_range][0])).sum()))
    every = np.concatenate(ids)
    owner = np.repeat(np.array(sparse, np.int64), [len(shard_ids) for shard_ids in ids])
    order = np.argsort(every, kind="stable")
    repeats = np.flatnonzero(every[order][1:] == every[order][:-1])
    if repeats.size:
        i, j = int(owner[order[repeats[0]]]), int(owner[order[repeats[0] + 1]])
        common_ids = np.intersect1d(ids[sparse.index(i)], ids[sparse.index(j)])
        raise _duplicate_error(shards, i, j, int(common_ids[0]), len(common_ids))


def _duplicate_error(shards: Sequence[ListedShard], i: int, j: int, number: int, how_many: int) -> FormatError:
    first_path, second_path = sorted((shards[i].path, shards[j].path))
    return FormatError(
        f"sample_idx {number} is also in {second_path} ({how_many} numbers are in both); numbers must be unique across "
        "shards and machines",
        path=first_path,
        code="duplicate-sample",
    )


def _fields_of(rows: Rows, shard: int) -> list[str]:
    """Names of the metadata columns, from the first non-empty shard."""
    return list(dict.fromkeys(name for part in (_metadata(r[4]) for r in rows.records(shard)) for name in part))


def _metadata(value: object) -> dict[str, object]:
    """A sample's metadata as columns. Names that collide with other columns get the prefix ``metadata.``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {"metadata": plain(value)}
    pairs = ((k if isinstance(k, str) else str(k), v) for k, v in value.items())
    return {(f"metadata.{k}" if k in OWN_COLUMNS else k): plain(v) for k, v in pairs}


def _shorten_names(names: set[str]) -> str:
    sorted_names = sorted(names)
    return ", ".join(name[:60] for name in sorted_names[:20]) + (
        f" and {len(sorted_names) - 20} more" if len(sorted_names) > 20 else ""
    )


def _first_shards(shards: Sequence[ListedShard], examples: int) -> list[int]:
    """The shards that contain the first examples."""
    before = itertools.accumulate((s.samples for s in shards), initial=0)
    return [i for i, (s, earlier) in enumerate(zip(shards, before, strict=False)) if s.samples and earlier < examples]


def _columns(
    path: Location, rows: Rows, shards: Sequence[ListedShard], names: Sequence[str], only: Sequence[int] | None = None
) -> pa.Table:
    requested_names = set(names)
    parts: list[tuple[dict[str, list[object]], int]] = []
    column_names = set(OWN_COLUMNS)
    every = requested_names >= column_names
    for i in range(len(shards)) if only is None else only:
        number = shards[i].number
        if number is None:
            parts.append(({}, shards[i].samples))
            continue
        records = rows.records(number) if shards[i].samples else []
        columns: dict[str, list[object]] = {}
        for name, values in zip(OWN_COLUMNS, zip(*(r[:4] for r in records), strict=True), strict=False):
            if name in requested_names:
                columns[name] = list(values)
        for index, metadata in enumerate(_metadata(r[4]) for r in records):
            for name, value in metadata.items():
                column_names.add(name)
                if len(column_names) > MOST_COLUMNS:
                    raise FormatError(
                        f"expected at most {MOST_COLUMNS} different fields in the metadata of samples, found more",
                        path=shards[i].path,
                    )
                if every or name in requested_names:
                    columns.setdefault(name, [None] * len(records))[index] = value
        parts.append((columns, len(records)))
    unknown = [name for name in names if name not in column_names]
    if unknown and only is None:
        raise NotStoredError(f"has no column {unknown[0]!r}; columns are {_shorten_names(column_names)}", path=path)
    return table_of(names, parts)


# Checks of pickle shards. Nothing is unpickled: the safe interpreter reads the shards.


_REQUIRED = ("version", "created_at", "extraction_config", "shards", "statistics")


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks every metadata.json and every shard, then consistency across shards."""
    folders = [root] if (root / "metadata.json").exists() else machines_in(root) or [root]
    shards_by_sample: dict[int, list[Location]] = defaultdict(list)
    widths: dict[int, Location] = {}
    types: dict[str, Location] = {}
    for folder in folders:
        path = folder / "metadata.json"
        metadata = report.faults.parse(path, partial(_metadata_of, path))
        if metadata is None:
            continue
        for name in _REQUIRED:
            if name not in metadata.value:
                report.add("metadata", path, "nothing", "a required field", f"field '{name}'")
        options = Options("mmap")
        parse = partial(shards_of, folder, metadata, options, [], report.faults)
        shards = report.faults.parse(path, parse) or []
        for i, shard in enumerate(shards):
            tell("shards", i, len(shards))
            _check_shard(shard, shards_by_sample, widths, types, report)
        # The names of entries with faults, too.
        entries = [entry.value.get("filename") for entry in metadata.items("shards")]
        listed_names = {name for name in entries if isinstance(name, str)}
        names = [entry.name for entry in folder.entries()] if folder.lists else []
        present = {name for name in names if re.search(r"\.pkl(\.gz)?$", name) and not name.startswith(".")}
        for stray in sorted(present - listed_names):
            report.add("unlisted-file", folder / stray, "a shard that metadata.json does not list")
    for sample, where in shards_by_sample.items():
        if len(where) > 1:
            shard_names = ", ".join(str(p.name) for p in where[1:4])
            report.add(
                "duplicate-sample",
                where[0],
                f"also in {shard_names}",
                "a different number for every sample",
                f"sample_idx {sample}",
            )
            if sum(f.code == "duplicate-sample" for f in report.findings) >= 20:
                break
    if len(widths) > 1:
        (first, first_path), (second, second_path) = list(widths.items())[:2]
        report.add("format", second_path, f"{second} wide", f"{first} wide, as in {first_path.name}")
    if len(types) > 1:
        (first_type, first_path), (second_type, second_path) = list(types.items())[:2]
        report.add("mixed-dtypes", second_path, second_type, f"{first_type}, as in {first_path.name}")


def _metadata_of(path: Location) -> Fields:
    metadata = Fields(read_json(path), path)
    metadata.items("shards")
    return metadata


def _check_shard(
    spec: ListedShard,
    shards_by_sample: dict[int, list[Location]],
    widths: dict[int, Location],
    types: dict[str, Location],
    report: Report,
) -> None:
    report.count("files")
    shard = spec.path
    size = None
    try:
        size = shard.stat().size
        report.count("bytes", size)
    except ActshardError:
        pass
    if size is not None and spec.size is not None and size not in (0, spec.size):
        report.add("size-bytes", shard, f"{size} bytes", f"{spec.size} bytes", "field 'size_bytes'")
    # The size mismatch is reported. The checksum still shows whether the file or the number is wrong.
    native = (shard, spec.compressed, None, spec.sha256, spec.samples, spec.ids, list(spec.layers), spec.limit)
    try:
        rows = Rows.shards(
            [native], layers=list(spec.layers), decoded_memory=Options("pread").decoded_memory, io="pread"
        )
        if not spec.samples:
            return
        for sample in rows.samples(0):
            shards_by_sample[sample].append(shard)
        widths.setdefault(rows.width, shard)
        for dtype in rows.stored_types(0, None):
            types.setdefault(str(dtype), shard)
        report.count("samples", len(rows.records(0)))
    except ActshardError as error:
        report.error(error, shard)
