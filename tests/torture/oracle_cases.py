"""Datasets and arguments for the machine of ``tests/oracle``: each is written through the public interface and kept in memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
from tests.oracle.examples import Example, Examples, cast
from tests.oracle.selection import Chosen

import actshard
from pickle_files import item
from pickle_files import write as write_pickles

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYERS = [2, 5]
D = 3
COLUMNS = {
    "label": pa.int64(),
    "score": pa.float64(),
    "flag": pa.bool_(),
    "topic": pa.string(),
    "tags": pa.list_(pa.int64()),
    "weights": pa.list_(pa.float64()),
    "answer_mask": pa.list_(pa.int64()),
}
DTYPES = {
    "saev": ["float32"],
    "lmprobe": ["float16", "bfloat16", "float32"],
    "zarr": ["float16", "float32", "float64"],
    "pickle": ["float16", "float32", "float64"],
    "npy": ["float16", "float32", "float64"],
    "hf_arrow": ["float16", "float32", "float64"],
    "safetensors": ["float16", "bfloat16", "float32", "float64"],
    "deepspec": ["bfloat16"],
    "speculators": ["bfloat16", "float32"],
    "automodel": ["bfloat16", "float32"],
    "specforge": ["bfloat16", "float16"],
    "modelopt": ["bfloat16", "float32"],
    "angelslim": ["bfloat16", "float32"],
}
PLAIN = ("lmprobe", "zarr", "pickle", "npy", "hf_arrow", "safetensors")
"""Formats that store columns of all kinds and examples of all lengths."""
DRAFT = ("deepspec", "speculators", "automodel", "specforge", "modelopt", "angelslim")
KINDS = (*PLAIN, *PLAIN, *["saev"] * 8, *["draft"] * 5, *["missing layers"] * 4)


@dataclass
class Case:
    """A store, and what it should return."""

    store: actshard.Store
    data: Examples
    name: str
    has_last_rows: bool = False
    """Whether the files have a last row of each example, which is zeros for one without tokens."""


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, odd: bool) -> np.ndarray:
    """Normal numbers; if ``odd``, with NaN, infinities, zeros of both signs, equal rows and large rows."""
    found = rng.standard_normal(shape)
    if odd:
        special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e5, 1e300], shape)
        found = np.where(rng.random(shape) < 0.08, special, found)
        found[rng.random(shape[:-1]) < 0.1] = 1.5
        found[rng.random(shape[:-1]) < 0.1] *= 100
        found[rng.random(shape[:-1]) < rng.choice([0, 0.8], p=[0.3, 0.7])] *= 1e-200
    return cast(found, dtype)


def lengths_of(draw: random.Random, n: int, kind: str) -> list[int]:
    """Tokens of each example."""
    return {
        "ragged": [draw.randint(1, 6) for _ in range(n)],
        "empty": [draw.choice([0, 0, 1, 2, 5]) for _ in range(n)],
        "equal": [draw.randint(1, 5)] * n,
        "pooled": [1] * n,
    }[kind]


def columns_of(draw: random.Random, lengths: list[int]) -> dict[str, list[Any]]:
    """Some columns; nulls in all that are not lists with a value per token."""
    n = len(lengths)

    def some(choices: list[Any]) -> list[Any]:
        return [draw.choice(choices) for _ in range(n)]

    every = {
        "label": some([0, 1, 2]),
        "score": some([0.5, -1.25, None, float("nan"), 2.0]),
        "flag": some([True, False, None]),
        "topic": some(["a", "ü", "long topic", None]),
        "tags": some([[], [1], [2, 3], None]),
        "weights": [[draw.choice([0.0, 1.0, 0.25]) for _ in range(t)] for t in lengths],
        "answer_mask": [[draw.choice([0, 1]) for _ in range(t)] for t in lengths],
    }
    return {name: every[name] for name in draw.sample(list(every), draw.randint(1, 4))}


def make(draw: random.Random, folder: Path, io: str) -> Case:
    """Writes a dataset and opens it."""
    kind = draw.choice(KINDS)
    n = draw.choice([1, 4, 9, 14])
    if kind == "saev":
        return _saev(draw, folder, n, io)
    if kind == "draft":
        return _draft(draw, folder, draw.choice(DRAFT), n, io)
    if kind == "missing layers":
        return _missing(draw, folder, n, io)
    lengths = lengths_of(draw, n, draw.choice(["ragged", "ragged", "empty", "equal", "pooled"]))
    columns = columns_of(draw, lengths)
    options: dict[str, Any] = {}
    if kind == "lmprobe":
        options |= {"storage": "full_sequence", "shard_bytes": draw.choice([100, 10_000])}
    if kind == "zarr":
        options |= {"chunk_tokens": draw.choice([1, 2, 64])}
    if kind == "pickle":
        options |= {"shard_bytes": draw.choice([400, 10_000]), "compress": draw.random() < 0.5}
    data = _rows(draw, n, lengths, draw.choice(DTYPES[kind]))
    _add(data, columns)
    return written(draw, data, folder, kind, io, columns, **options)


def make_twin(draw: random.Random, case: Case, folder: Path, io: str) -> Case | None:
    """The same examples and tokens with other values, as of another model; None if formats for all datasets cannot store them."""
    data = case.data
    formats = [format for format in PLAIN if data.dtype.name in DTYPES[format]]
    if (
        data.special
        or data.pads
        or data.lacks_layers
        or not formats
        or not all(isinstance(x, int) for x in data.layers)
    ):
        return None
    format = draw.choice(formats)
    twin = _rows(draw, len(data), data.token_counts, data.dtype.name)
    return written(draw, twin, folder, format, io, {}, **({"storage": "full_sequence"} if format == "lmprobe" else {}))


def _rows(draw: random.Random, n: int, lengths: list[int], dtype: str) -> Examples:
    rng, odd = np.random.default_rng(draw.randrange(1 << 30)), draw.random() < 0.5
    dtype_ = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    examples = [Example({layer: values(rng, (t, D), dtype_, odd) for layer in LAYERS}) for t in lengths]
    return Examples(examples, list(LAYERS), D, dtype_)


def _add(data: Examples, columns: dict[str, list[Any]]) -> None:
    data.columns = list(columns)
    for i, example in enumerate(data.examples):
        example.columns = {name: column[i] for name, column in columns.items()}


def written(
    draw: random.Random,
    data: Examples,
    folder: Path,
    format: str,
    io: str,
    columns: dict[str, list[Any]],
    **options: Any,
) -> Case:
    """The examples in a dataset, appended in blocks."""
    n, start = len(data), 0
    labels = options.pop("labels", None)
    with actshard.create(folder, format, layers=data.layers, d_model=D, dtype=data.dtype, **options) as writer:
        while start < n:
            stop = min(n, start + draw.choice([1, 3, 20]))
            arrays = [np.stack([example.rows[layer] for layer in data.layers]) for example in data.examples[start:stop]]
            more: dict[str, Any] = {}
            if columns:
                more["columns"] = pa.table(
                    {
                        name: pa.array(column[start:stop], COLUMNS.get(name, pa.list_(pa.int64())))
                        for name, column in columns.items()
                    }
                )
            if labels is not None:
                more["labels"] = np.array(labels[start:stop], np.uint8)
            writer.append(arrays, **more)
            if draw.random() < 0.3:
                writer.flush()
            start = stop
    return Case(actshard.open(writer.path, io=io), data, f"{format} {data.dtype} {n}", format == "lmprobe")


def _saev(draw: random.Random, folder: Path, n: int, io: str) -> Case:
    """With and without CLS, labels and padding."""
    special, padded = draw.choice([0, 1]), draw.random() < 0.5
    longest = draw.randint(2, 5)
    lengths = [draw.randint(1 + special, longest) if padded else longest for _ in range(n)]
    data = _rows(draw, n, lengths, "float32")
    data.special = special
    options: dict[str, Any] = {"cls_token": bool(special), "max_tokens_per_shard": draw.choice([16, 1000])}
    if padded:
        options |= {"pad": True, "tokens_per_example": longest}
    elif draw.random() < 0.8:
        options["labels"] = [[draw.randrange(4) for _ in range(longest - special)] for _ in range(n)]
    data.patches = longest - special if "labels" in options else None
    data.pads = padded and min(lengths) < longest
    case = written(draw, data, folder, "saev", io, {}, **options)
    for i, example in enumerate(data.examples):
        example.labels = options["labels"][i] if "labels" in options else None
        if data.pads:
            example.content = lengths[i] - special
            rest = np.zeros((longest - lengths[i], D), data.dtype)
            example.rows = {layer: np.concatenate([rows, rest]) for layer, rows in example.rows.items()}
    return case


def _draft(draw: random.Random, folder: Path, format: str, n: int, io: str) -> Case:
    """A draft model's cache, whose last layer is the last hidden state."""
    lengths = lengths_of(draw, n, "equal" if format == "automodel" else "ragged")
    data = _rows(draw, n, lengths, draw.choice(DTYPES[format]))
    columns = {"input_ids": [[draw.randrange(99) for _ in range(t)] for t in lengths]}
    options: dict[str, Any] = {"last": LAYERS[-1]}
    if format == "automodel":
        target = {"target_model": "m", "target_model_type": "t", "target_vocab_size": 100, "num_hidden_layers": 8}
        options |= {"num_examples": n, "metadata": target}
    case = written(draw, data, folder, format, io, columns, **options)
    names = dict(zip(LAYERS, case.store.layers, strict=True))  # some formats name the last layer
    data.layers = [names[layer] for layer in LAYERS]
    for example in data.examples:
        example.rows = {names[layer]: rows for layer, rows in example.rows.items()}
    _add(data, columns)
    return case


def _missing(draw: random.Random, folder: Path, n: int, io: str) -> Case:
    """Pickle shards in which some examples lack a layer, as their own writer leaves them after a failure."""
    lengths = [draw.randint(1, 5) for _ in range(n)]
    data = _rows(draw, n, lengths, "float32")
    for example in data.examples[1:]:  # the first has all layers, which the metadata lists
        if draw.random() < 0.4:
            del example.rows[draw.choice(LAYERS)]
    shards, order, start = [], list[int](), 0
    while start < n:
        stop = min(n, start + draw.choice([2, 5]))
        shards.append(
            {
                f"layer_{layer}": [
                    item(i, data.examples[i].rows[layer]) for i in range(start, stop) if layer in data.examples[i].rows
                ]
                for layer in LAYERS
            }
        )
        order += dict.fromkeys(x["sample_idx"] for items in shards[-1].values() for x in items)
        start = stop
    data.examples = [data.examples[i] for i in order]  # numbered as they appear, layer after layer
    write_pickles(folder, shards, gz=draw.random() < 0.5)
    return Case(actshard.open(folder, io=io), data, f"missing layers {n}")


# -- arguments -------------------------------------------------------------------------------------------------------------


def draw_key(draw: random.Random, n: int) -> Any:
    """What ``filter`` takes: flags, integers of both signs, a slice."""
    kind = draw.choice(["flags", "list of flags", "integers", "permutation", "slice", "backwards"])
    if kind == "flags":
        return np.array([draw.random() < 0.7 for _ in range(n)], bool)
    if kind == "list of flags" and n:
        return [draw.random() < 0.7 for _ in range(n)]
    if kind == "integers" and n:
        return [draw.randrange(-n, n) for _ in range(draw.randint(1, n + 2))]
    if kind == "permutation":
        return np.array(draw.sample(range(n), n), np.int64)
    if kind == "backwards":
        return slice(None, None, draw.choice([-1, -2]))
    return slice(draw.choice([None, 0, 1, -3]), draw.choice([None, n, -1, n + 3]), draw.choice([None, 1, 2, 3]))


def draw_selection(
    draw: random.Random, case: Case, layers: list[Any], most: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Chosen]:
    """Arguments of ``stream``, and the oracle's form of them."""
    data = case.data
    choices = most or ("content", "content", "all", "last", *(("special",) if data.special else ()))
    tokens = draw.choice(choices)
    arguments: dict[str, Any] = {"tokens": tokens}
    ignored: tuple[int, ...] = ()
    if data.labels is not None and tokens != "special" and draw.random() < 0.6:
        ignored = tuple(draw.sample(range(4), draw.randint(1, 2)))
        arguments["ignore_labels"] = list(ignored)
    flags = None
    if draw.random() < 0.5:
        arguments["keep"], flags = draw_keep(draw, case, layers[0])
    min_token = draw.choice([0, 0, 1, 2])
    max_norm = draw.choice([None, None, "1x median", "2.5x median", 2.0, float("inf")])
    if min_token:
        arguments["min_token"] = min_token
    if max_norm is not None:
        arguments["max_norm"] = max_norm
    return arguments, Chosen(tokens, ignored, flags, min_token, max_norm)


def draw_keep(draw: random.Random, case: Case, layer: Any) -> tuple[Any, list[list[bool]]]:
    """A value of ``keep``, and its flags."""
    data, counts = case.data, case.data.tokens_in(layer)
    n, special = len(data), case.data.special
    flags = [[draw.random() < 0.6 for _ in range(t)] for t in counts]
    per_example = [draw.random() < 0.6 for _ in range(n)]
    whole = [[flag] * t for flag, t in zip(per_example, counts, strict=True)]
    kinds = ["array", "list", "per token", "rectangle", "arrow"]
    if data.columns:
        kinds.append("function")
    masks = [name for name in ("answer_mask",) if name in data.columns]
    masks = [name for name in masks if sum(counts) and [len(x or []) for x in data.values(name)] == counts]
    if masks:
        kinds.append("column")
    if special and counts and all(t > special for t in counts):
        kinds += 2 * ["content only", "content only, rectangle", "content only, arrow"]
    match draw.choice(kinds):
        case "array":
            return np.array(per_example, bool), whole
        case "list":
            return per_example, whole
        case "rectangle":
            mask = np.array([[draw.random() < 0.6 for _ in range(max(counts, default=0))] for _ in range(n)], bool)
            mask = mask.reshape(n, max(counts, default=0))
            return mask, [mask[i, :t].tolist() for i, t in enumerate(counts)]
        case "arrow":
            return pa.array(flags, draw.choice([pa.list_, pa.large_list])(pa.bool_())), flags
        case "function":
            return (lambda table: np.array(per_example, bool)), whole
        case "column":
            name = draw.choice(masks)
            return name, [[value != 0 for value in example] for example in data.values(name)]
        case "content only":
            return [np.array(x[special:], bool) for x in flags], [[True] * special + x[special:] for x in flags]
        case "content only, arrow":
            lists = pa.array([x[special:] for x in flags], pa.large_list(pa.bool_()))
            return lists, [[True] * special + x[special:] for x in flags]
        case "content only, rectangle":
            width = max(counts) - special
            mask = np.array([[draw.random() < 0.6 for _ in range(width)] for _ in range(n)], bool)
            return mask, [[True] * special + mask[i, : t - special].tolist() for i, t in enumerate(counts)]
    return [np.array(x, bool) for x in flags], flags


def draw_index(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """A key of an array of this shape: integers, slices, lists, masks and an ellipsis."""

    def part(n: int) -> Any:
        kind = draw.choice(["integer", "slice", "slice", "list", "array", "mask"])
        if kind == "integer":
            return draw.randrange(-n - 1, n + 1) if n else 0
        if kind == "list" and n:
            return [draw.randrange(-n, n) for _ in range(draw.randint(0, 3))]
        if kind == "array" and n:
            lengths = draw.choice([(2,), (1,), (2, 1), (1, 3), (0,)])
            return np.array([draw.randrange(-n, n) for _ in range(int(np.prod(lengths)))], np.int64).reshape(lengths)
        if kind == "mask":
            return np.array([draw.random() < 0.5 for _ in range(n)], bool)
        bounds = [draw.choice([None, draw.randrange(-n - 2, n + 3)]) for _ in range(2)]
        return slice(*bounds, draw.choice([None, None, 1, 2, -1, -2]))

    count = draw.randint(1, len(shape))
    parts = [part(n) for n in shape[:count]]
    if draw.random() < 0.2:
        tail = draw.randint(0, len(shape) - 1)
        head = draw.randint(0, len(shape) - tail)
        parts = [*(part(n) for n in shape[:head]), ..., *(part(n) for n in shape[len(shape) - tail :] if tail)]
    return parts[0] if len(parts) == 1 and draw.random() < 0.7 else tuple(parts)
