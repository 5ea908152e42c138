"""Any dataset to any format: by the verb, by plans of one and three tasks, interrupted, in small blocks.

All ways write the same files. What the result lacks is what the losses announce, and nothing else. The oracle reads both stores by
their public interface and compares in numpy and plain Python.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.torture import budget
from tests.torture.budget import runs

import actshard
from actshard import formats
from actshard.writing.converting import preview
from actshard.writing.converting.running import Conversion
from conftest import GOLDEN

TEXTS = ("text", "prompt", "text_preview")
REMEDIES: tuple[dict[str, Any], ...] = ({}, {"pad": True}, {"dtype": "float32"}, {"pad": True, "dtype": "float32"})
"""Options with which a format may store what it refuses by default."""

SHARDED: dict[str, Any] = {"version": 3, "shard_bytes": 4000}
"""Options of Zarr stores of version 3."""


def golden() -> list[Path]:
    folders = ("saev", "lmprobe", "zarr", "pickle", "hf_arrow", "draft", "zarr_codecs")
    return [path for folder in folders for path in sorted((GOLDEN / folder).iterdir()) if path.is_dir()]


def generated(folder: Path, choices: random.Random) -> Path:
    """A dataset with columns of some Arrow types, ragged or not, of one shard or several."""
    kinds: dict[str, pa.Array] = {
        "flag": pa.array([True, None, False]),
        "wide": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "half": pa.array(np.array([0.1, np.nan, np.inf], np.float16)),
        "small": pa.array([0.1, None, -0.0], pa.float32()),
        "bytes": pa.array([b"\xff\x00a", b"\\xff", None]),
        "fixed": pa.array([b"abcd", b"\x00\x00\x00\x00", None], pa.binary(4)),
        "money": pa.array([None, 150, 200]).cast(pa.decimal128(21, 2)),
        "day": pa.array([0, 1, None], pa.int32()).cast(pa.date32()),
        "moment": pa.array([1, None, 3], pa.timestamp("us", "Europe/Paris")),
        "span": pa.array([1, 2, None], pa.duration("ms")),
        "clock": pa.array([1, 2, None], pa.time64("us")),
        "words": pa.array(["a", "", None], pa.large_string()),
        "lists": pa.array([[["a"], []], [None], None]),
        "pair": pa.array([[1.5, 2.5], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "record": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": ""}]),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "code": pa.array(["x", None, "x"]).dictionary_encode(),
        "none": pa.nulls(3),
    }
    format = choices.choice(["npy", "hf_arrow", "lmprobe", "safetensors"])
    if format == "hf_arrow":  # datasets has no such types
        del kinds["map"], kinds["fixed"]
    names = choices.sample(sorted(kinds), 4)
    options: dict[str, Any] = {"storage": "full_sequence"} if format == "lmprobe" else {}
    lengths = [4, 4, 4] if choices.random() < 0.5 else [4, 1, 3]
    rng = np.random.default_rng(choices.randrange(1 << 30))
    with actshard.create(folder, format, layers=[0, 3], d_model=4, dtype="float32", **options) as writer:
        for part in range(choices.choice([1, 3])):
            rows = [rng.standard_normal((2, n, 4)).astype(np.float32) for n in lengths]
            texts = pa.array([f"{part} {i}" for i in range(3)])
            writer.append(rows, columns=pa.table({"text": texts, **{name: kinds[name] for name in names}}))
            writer.flush()
    return folder


@dataclass
class Content:
    """Everything of a store that a reader may want, as plain values."""

    layers: list[Any]
    lengths: list[np.ndarray]
    rows: list[np.ndarray]
    columns: dict[str, list[Any]]
    types: dict[str, pa.DataType]
    labels: np.ndarray | None
    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, store: actshard.Store) -> Content:
        layers, lengths, rows = list(store.layers), [], []
        own = content_tokens(store)
        for layer in layers:
            examples = [sequence(store, e, layer)[: own[e]] for e in range(len(store))]
            lengths.append(np.array([len(x) for x in examples]))
            rows.append(np.concatenate(examples) if examples else np.zeros((0, store.d_model), store.dtype))
        table = store.table
        arrays = {}
        if store.contents.has_logits:
            arrays |= dict(zip(("logits_values", "logits_indices"), store.logits(), strict=True))
        arrays |= {f"router_layer_{layer}": store.router(layer) for layer in store.contents.router_layers}
        # Without columns that describe the format's own files, such as the shape of a pickled array.
        names = formats.get(store.contents.format).carrying().names(store.contents)
        stored = store.token_counts
        columns = {
            name: [without_padding(plain(v), stored[i], own[i]) for i, v in enumerate(table[name].to_pylist())]
            for name in names
            if name in table.column_names
        }
        types = {field.name: field.type for field in table.schema}
        return cls(layers, lengths, rows, columns, types, store.labels, arrays)


def content_tokens(store: actshard.Store) -> np.ndarray:
    """Tokens of each example without padding."""
    if store.content_lengths is None:
        return np.full(len(store), 1 << 30)
    return np.minimum(store.token_counts, store.special_tokens + store.content_lengths)


def without_padding(value: Any, stored: int, own: int) -> Any:
    """A value, or the list of an example's tokens without those of its padding."""
    return value[:own] if isinstance(value, list) and len(value) == stored else value


def sequence(store: actshard.Store, example: int, layer: Any) -> np.ndarray:
    try:
        return np.asarray(store.sequence(example, layer))
    except actshard.NotStoredError:  # this example lacks the layer
        return np.zeros((0, store.d_model), store.dtype)


def plain(value: Any) -> Any:
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else repr(value))
    if isinstance(value, bool | bytes):
        return (type(value).__name__, value)
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    return value


def differences(source: actshard.Store, done: Conversion, options: dict[str, Any]) -> list[str]:
    """What the result lacks and no loss announces."""
    result = actshard.open(done.path, done.format)
    if len(result.layers) < len(source.layers):  # as the loss advises
        result = actshard.open(done.path, done.format, layout={"layers": list(source.layers)})
    a, b = Content.of(source), Content.of(result)
    kinds = {loss.what for loss in done.losses}
    found = []
    if len(a.layers) != len(b.layers) or (a.layers != b.layers and "layers" not in kinds):
        found.append(f"layers {a.layers} are {b.layers}")
    for old, new, name in zip(range(len(a.layers)), order(a.layers, b.layers), a.layers, strict=True):
        found += [f"layer {name}: {what}" for what in rows_differ(a, old, b, new, kinds)]
    details = " ".join(loss.detail for loss in done.losses)
    for name, values in a.columns.items():
        if all(value in (None, "") for value in values):
            continue
        if name == formats.get(source.contents.format).carrying().number_column and values == list(range(len(values))):
            continue
        new = name if name in b.columns else next((t for t in TEXTS if name in TEXTS and t in b.columns), None)
        told = name in details or f"{name}:" in details
        same = new is not None and b.columns[new] == values
        if not same and not told and not (name in TEXTS and "texts" in kinds):
            found.append(f"column {name}: {'missing' if new is None else 'changed'}")
        if same and f"{name}: {a.types[name]} becomes" in details and a.types[name] == b.types[new or name]:
            found.append(f"column {name}: a change is announced that is none")
    if a.labels is not None and not (b.labels is not None and np.array_equal(a.labels, b.labels)):
        kept = "patch_labels" in b.columns and b.columns["patch_labels"] == [plain(x) for x in a.labels.tolist()]
        if not kept and "labels" not in kinds:
            found.append("labels")
    for name, array in a.arrays.items():
        again = b.arrays.get(name)
        kept = again is not None and again.tobytes() == array.tobytes()
        if not kept and not kinds & {"layout", "logits", "router"}:
            found.append(name)
    if "dtype" in kinds and source.dtype == result.dtype:
        found.append("a dtype is announced that is none")
    return found


def order(old: list[Any], new: list[Any]) -> list[int]:
    """Where each layer is: draft models' formats name the last hidden state, and put it last."""
    names = {str(name): i for i, name in enumerate(new)}
    found = [names.pop(str(name), None) for name in old]
    rest = iter(sorted(set(range(len(new))) - {i for i in found if i is not None}))
    return [next(rest) if i is None else i for i in found]


def rows_differ(a: Content, i: int, b: Content, j: int, kinds: set[str]) -> Iterator[str]:
    before, after, x, y = a.lengths[i], b.lengths[j], a.rows[i], b.rows[j]
    if not np.array_equal(before, after):
        if not kinds & {"padding", "tokens", "empty_examples", "layers"}:
            yield f"lengths {before[:5]} are {after[:5]}"
            return
        both = np.minimum(before, after)
        x, y = (
            np.concatenate([rows[at : at + n] for at, n in zip(np.cumsum(k) - k, both, strict=True)] or [rows[:0]])
            for rows, k in ((x, before), (y, after))
        )
    if x.dtype != y.dtype:
        if "dtype" not in kinds:
            yield f"{x.dtype} is {y.dtype}"
        with np.errstate(all="ignore"):
            x = x.astype(y.dtype)
    # NaNs of narrower types may come back with another payload.
    same = (x.view(np.uint8) == y.view(np.uint8)) if x.shape == y.shape else np.zeros(1, bool)
    if not same.all() and not np.array_equal(x.astype(np.float64), y.astype(np.float64), equal_nan=True):
        yield "rows"


def convert(source: Path, target: Path, format: str, options: dict[str, Any]) -> Conversion | None:
    """The result with the fewest remedies; adds them to ``options``. None if the format refuses all."""
    for remedy in REMEDIES:
        try:
            done = actshard.convert(source, target, format, verify=True, **options, **remedy)
        except (actshard.ArgumentError, actshard.NotStoredError, actshard.DtypeError):
            assert not target.exists() or not any(target.iterdir()), "a refused conversion leaves nothing"
            continue
        options |= remedy
        return done
    return None


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Stopped(Exception):
    pass


def interrupted(source: Path, target: Path, format: str, options: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """The same conversion, stopped after every block."""
    patch.setattr("actshard.writing.sink.COMMIT_BYTES", 1)

    def stop(done: int, *_: int) -> None:
        raise Stopped

    for _ in range(100):
        try:
            actshard.convert(source, target, format, resume=True, progress=stop, **options)
        except Stopped:
            continue
        return
    pytest.fail("no progress in 100 calls")


def check_pair(source: Path, format: str, folder: Path, patch: pytest.MonkeyPatch, **own: Any) -> bool:
    """Converts in all ways and compares; False if the format refuses the dataset. ``own``: options of the format."""
    patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    options: dict[str, Any] = {"shard_bytes": 4000} if formats.get(format).target().takes_shard_bytes else own
    done = convert(source, folder / "one", format, options)
    if done is None:
        return False
    store = actshard.open(source)
    assert differences(store, done, options) == []
    assert "other-rows" not in actshard.verify(done.path, deep=True).codes(), (
        "the digests are those of the rows that are read"
    )
    (foretold,) = preview(source, folder / "none", format, **options)
    assert foretold.losses == done.losses
    assert (foretold.files, foretold.bytes) == (
        len(files(folder / "one")),
        sum(map(len, files(folder / "one").values())),
    )
    for tasks in (1, 3):
        plan = actshard.plan.convert(source, folder / f"plan{tasks}", format, tasks=tasks, **options)
        for task in range(len(plan)):
            plan.run(task)
        assert plan.commit().losses == done.losses
        assert files(folder / f"plan{tasks}") == files(folder / "one"), f"{tasks} tasks"
    interrupted(source, folder / "again", format, options, patch)
    if format != "pickle":  # whose shards end where a call ends
        assert files(folder / "again") == files(folder / "one"), "interrupted"
    patch.setattr(formats.get(format).target(), "block_bytes", 256)
    small = actshard.convert(source, folder / "small", format, verify=True, **options)
    assert small.losses == done.losses
    assert differences(store, small, options) == []
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", range(runs(24, 400)))
def test_every_way_to_every_format_gives_the_same_and_says_what_it_lacks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = random.Random(budget.first_number() + number)
    source = generated(tmp_path / "source", choices) if choices.random() < 0.5 else choices.choice(golden())
    format = choices.choice(formats.written())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            readable = bool(actshard.open(source).layers)
        except actshard.ActshardError:
            readable = False
        if readable:
            sharded = format == "zarr" and choices.random() < 0.5
            packed = {"pack": choices.choice((None, "lossless", "zstd", "blosc"))}
            check_pair(source, format, tmp_path, monkeypatch, **(SHARDED | packed if sharded else {}))
