"""Random joins, filters, examples, layers and tokens, converted to a random format: the oracle are the rows that were written."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.torture import budget
from tests.torture.budget import runs

import actshard

FORMATS = ("npy", "safetensors", "zarr", "lmprobe", "pickle", "hf_arrow", "saev")
D_MODEL = 4
LONGEST = 5


@dataclass
class Written:
    """A dataset, and what was given to write it."""

    path: Path
    rows: list[NDArray[np.float32]]
    """``(layers, tokens, d_model)`` of each example."""
    columns: list[dict[str, Any]]
    """Values of each example, by name; none in a format without columns."""


def write(folder: Path, number: int, layers: list[int], choices: random.Random, *, is_ragged: bool) -> Written:
    """Writes a dataset of a random format in random batches and shards."""
    format = choices.choice(FORMATS)
    width = choices.randint(1, 4)
    lengths = [choices.randint(0, LONGEST) if is_ragged else width for _ in range(choices.randint(1, 9))]
    rng = np.random.default_rng(choices.randrange(1 << 30))
    rows = [rng.standard_normal((len(layers), n, D_MODEL)).astype(np.float32) for n in lengths]
    columns = [
        {
            "id": 1000 * number + i,
            "text": f"text {number} {i}",
            "weight": i / 3,
            "input_ids": [100 * i + token for token in range(n)],
            "position": [i, i + 1, i + 2],
        }
        for i, n in enumerate(lengths)
    ]
    options: dict[str, Any] = {}
    if format == "saev":
        columns = [{} for _ in lengths]
        options = {"metadata": {"dataset": str(number)}}
        options |= {"pad": True, "tokens_per_example": LONGEST} if is_ragged else {}
    if format in ("pickle", "lmprobe", "hf_arrow"):
        options["shard_bytes"] = choices.choice([500, 2000, None])
    with actshard.create(folder, format, layers=layers, d_model=D_MODEL, **options) as writer:
        first = 0
        while first < len(rows):
            last = min(len(rows), first + choices.randint(1, 4))
            batch = columns[first:last]
            writer.append(rows[first:last], columns={name: [values[name] for values in batch] for name in batch[0]})
            first = last
    return Written(Path(writer.path), rows, columns)


def select(store: actshard.Store, choices: random.Random) -> tuple[actshard.Store, NDArray[np.int64]]:
    """The store, or some of its examples, and their numbers in it."""
    mask = np.array([choices.random() < 0.6 for _ in range(len(store))])
    if choices.random() < 0.6 or not mask.any():
        return store, np.arange(len(store))
    return store.filter(mask), np.flatnonzero(mask)


def differences(
    store: actshard.Store,
    written: list[Written],
    ids: NDArray[np.int64],
    options: dict[str, Any],
    names: dict[int, int],
) -> list[str]:
    """Rows and columns of the result that are not those of the examples ``ids``."""
    rows = [example for dataset in written for example in dataset.rows]
    columns = [values for dataset in written for values in dataset.columns]
    layers = options.pop("of")
    is_last = options.get("tokens") == "last"
    faults = []
    for number, example in enumerate(ids.tolist()):
        for old, new_name in names.items():
            expected = rows[example][layers.index(old)][-1 if is_last else 0 :]
            stored = store.sequence(number, new_name)
            if store.content_lengths is not None:
                stored = stored[: store.content_lengths[number]]
            if options.get("truncate"):
                expected = expected[: len(stored)]
            if not len(expected) and store.format == "lmprobe":
                continue  # an announced loss
            if not np.array_equal(stored, expected):
                faults.append(f"rows of example {number}, layer {new_name}")
    table = store.table
    for name in ("id", "weight", "input_ids", "position"):
        stored_values = table[name].to_pylist() if name in table.column_names else [None] * len(ids)
        expected_values = [columns[example].get(name) for example in ids.tolist()]
        if store.format == "saev":
            continue
        if is_last and name == "input_ids":
            expected_values = [None if value is None else value[-1:] for value in expected_values]
        if [value if value == value else None for value in stored_values] != expected_values:
            faults.append(f"column {name}: expected {expected_values}, found {stored_values}")
    return faults


@pytest.mark.machine
@pytest.mark.parametrize("number", range(runs(60, 4000)))
def test_selected_rows_and_columns_are_those_that_were_written(number: int, tmp_path: Path) -> None:
    choices = random.Random(budget.first_number() + number)
    layers = choices.choice([[0], [3, 7], [7, 3], [1, 2, 5]])
    is_ragged = choices.random() < 0.7
    count = choices.choice([1, 1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = [write(tmp_path / str(i), i, layers, choices, is_ragged=is_ragged) for i in range(count)]
        selected = [select(actshard.open(dataset.path), choices) for dataset in written]
        before = np.cumsum([0] + [len(dataset.rows) for dataset in written])
        ids = np.concatenate([numbers + first for (_, numbers), first in zip(selected, before, strict=False)])
        store = selected[0][0] if count == 1 else actshard.concat([part for part, _ in selected])
        store, numbers = select(store, choices)
        ids = ids[numbers]
        options: dict[str, Any] = {"tokens": choices.choice(["all", "all", "last", "content"])}
        if choices.random() < 0.5:
            examples = [choices.randrange(len(ids)) for _ in range(choices.randint(1, 6))]
            options["examples"] = examples if choices.random() < 0.5 else sorted(examples)
            ids = ids[options["examples"]]
        names = {layer: layer for layer in layers}
        if choices.random() < 0.4:
            names = {layer: layer + 10 for layer in choices.sample(layers, choices.randint(1, len(layers)))}
            options["layers"] = names
        format = choices.choice(FORMATS)
        if format == "saev":
            options["pad" if choices.random() < 0.5 else "truncate"] = True
        try:
            conversion = actshard.convert(store, tmp_path / "out", format, **options)
        except actshard.ActshardError:
            return  # refused, in words that other tests check
        announced_losses = [loss for loss in conversion.losses if "not cut to the tokens" in loss.detail]
        result = actshard.open(conversion.path)
        faults = differences(result, written, ids, {**options, "of": layers}, names)
        faults = [
            fault
            for fault in faults
            if not any(fault.split(":")[0].split()[-1] in loss.detail for loss in announced_losses)
        ]
        assert not faults, (faults, [str(loss) for loss in conversion.losses])
        assert actshard.verify(conversion.path, deep=True).ok
