"""Datasets of which files are missing, empty or cut, opened with ``incomplete="skip"``. Whole examples are found naively."""

from __future__ import annotations

import gzip
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.oracle.examples import Example
from tests.torture import oracle_cases
from tests.torture.oracle_cases import Case, D

import actshard

FORMATS = ("saev", "pickle", "lmprobe", "hf_arrow", "speculators", "specforge", "angelslim", "modelopt")
EXAMPLES = 9


def make(draw: random.Random, folder: Path, io: str) -> Case:
    """Writes a dataset, damages some files of its states, and opens what is whole."""
    format = draw.choice(FORMATS)
    case = _written(draw, folder, format, io)
    case.store.close()
    path = Path(case.store.path)
    files = _files(path, format)
    least = 1 if format == "hf_arrow" else 0  # numbers of examples after the first damaged file are not known
    damaged = (
        draw.sample(files[least:], draw.randint(1, max(1, min(3, len(files) - 1 - least)))) if files[least:] else []
    )
    owners = _owners(path, files, format, case)
    whole = {file: file.read_bytes() for file in damaged}
    for file, data in whole.items():
        how = draw.choice(["missing", "empty", "cut", "cut"])
        file.write_bytes(b"" if how == "empty" else data[: -draw.randint(9, len(data) - 1)])
        if how == "missing":
            file.unlink()
    absent, count = _absent(files, damaged, owners, format, case)
    if len(absent) == count:
        with pytest.raises(actshard.FormatError, match="at least one whole"):
            actshard.open(path, io=io, incomplete="skip")  # type: ignore[arg-type]  # one of the three
        for file, data in whole.items():
            file.write_bytes(data)
        absent, count = set(), len(case.data)
    if format == "modelopt":  # in the order of names: the others move
        gone = {owners[file][0] for file in damaged if not file.exists()}
        kept = [i for i in range(len(case.data)) if i not in gone]
        case.data.examples = [case.data.examples[i] for i in kept]
        absent = {kept.index(i) for i in absent - gone}
        count = len(kept)
    elif format == "hf_arrow" or count < len(case.data):
        case.data.examples = case.data.examples[:count]
    for i in absent:
        case.data.examples[i] = _emptied(case.data.examples[i], case, format)
    store = actshard.open(path, io=io, incomplete="skip")  # type: ignore[arg-type]  # one of the three
    return replace(case, store=store, name=f"{case.name} without {sorted(absent)}", has_last_rows=False)


def _written(draw: random.Random, folder: Path, format: str, io: str) -> Case:
    if format == "saev":
        return oracle_cases._saev(draw, folder, EXAMPLES, io)
    if format in oracle_cases.DRAFT:
        return oracle_cases._draft(draw, folder, format, EXAMPLES, io)
    lengths = oracle_cases.lengths_of(draw, EXAMPLES, draw.choice(["ragged", "equal"]))
    columns = {"label": [draw.randrange(3) for _ in range(EXAMPLES)]}
    data = oracle_cases._rows(draw, EXAMPLES, lengths, draw.choice(oracle_cases.DTYPES[format]))
    oracle_cases._add(data, columns)
    options = {"lmprobe": {"storage": "full_sequence"}, "pickle": {"compress": draw.random() < 0.5}}.get(format, {})
    return oracle_cases.written(draw, data, folder, format, io, columns, shard_bytes=draw.choice([120, 300]), **options)


def _files(path: Path, format: str) -> list[Path]:
    """The files of states, in the order of examples; lmprobe: of all layers."""
    pattern = {
        "saev": "acts[0-9]*.bin", "pickle": "*.pkl*", "lmprobe": "tensors/hidden_layer*", "hf_arrow": "data-*.arrow",
        "speculators": "hidden_states/*", "modelopt": "*.pt",
    }.get(format, "**/data_*.ckpt")  # fmt: skip
    return sorted(path.glob(pattern), key=lambda file: [int(x) for x in re.findall(r"\d+", file.name)])


def _owners(path: Path, files: list[Path], format: str, case: Case) -> dict[Path, list[int]]:
    """The examples that have states in a file."""
    if format == "pickle":
        owners = {}
        for file in files:
            data = file.read_bytes()
            items = pickle.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
            owners[file] = sorted({item["sample_idx"] for layer in items.values() for item in layer})
        return owners
    if format == "lmprobe":
        table = pq.read_table(next(path.glob("index/*.parquet")))
        shards = [set(ids or [shard]) for ids, shard in zip(
            table["token_shard_ids"].to_pylist(), table["shard_index"].to_pylist(), strict=True
        )]  # fmt: skip
        number = {file: int(re.findall(r"shard(\d+)", file.name)[0]) for file in files}
        return {file: [i for i, ids in enumerate(shards) if number[file] in ids] for file in files}
    if format in ("saev", "hf_arrow"):
        first, owners = 0, {}
        for file in files:
            count = file.stat().st_size // _example_bytes(case) if format == "saev" else _whole_rows(file)
            owners[file] = list(range(first, first + count))
            first += count
        return owners
    return {file: [i] for i, file in enumerate(files)}


def _example_bytes(case: Case) -> int:
    return len(case.data.layers) * case.data.examples[0].tokens * D * 4


def _whole_rows(file: Path) -> int:
    """Rows of an Arrow file that ends after a batch; 0 for any other."""
    try:
        return pa.ipc.open_stream(file.read_bytes()).read_all().num_rows
    except (pa.ArrowException, OSError):
        return 0


def _absent(
    files: list[Path],
    damaged: list[Path],
    owners: dict[Path, list[int]],
    format: str,
    case: Case,
) -> tuple[set[int], int]:
    """The examples that are not whole, and the number of examples."""
    if format == "hf_arrow":
        first = min((files.index(file) for file in damaged), default=len(files))
        count = sum(len(owners[file]) for file in files[:first])
        if first < len(files) and files[first].exists():
            count += _whole_rows(files[first])
        return set(), count
    absent: set[int] = set()
    for file in damaged:
        whole = 0
        if format == "saev" and file.exists():
            whole = file.stat().st_size // _example_bytes(case)
        absent |= set(owners[file][whole:])
    count = len(case.data)
    if format in ("specforge", "angelslim"):  # numbers after the last file are not known
        count = 1 + max(owners[file][0] for file in files if file.exists())
    return {i for i in absent if i < count}, count


def _emptied(example: Example, case: Case, format: str) -> Example:
    """An example that is left out: it has no tokens, and the columns that are not in its file."""
    rows = {layer: np.zeros((0, D), case.data.dtype) for layer in case.data.layers}
    columns = example.columns
    if format == "pickle":
        columns = dict.fromkeys(columns)
    if format in ("specforge", "angelslim", "modelopt"):
        columns = {name: [] for name in columns}
    return replace(example, rows=rows, columns=columns)
