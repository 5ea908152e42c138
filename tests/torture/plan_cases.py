"""Small plans of every verb, for tests that kill their processes: the inputs, the plan, and the result of one process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from actshard import tokens

EPOCH = "SOURCE_DATE_EPOCH"
N, TASKS = 16, 4
_GOLDEN = Path(__file__).parents[1] / "golden"
_SMALL = {"shard_bytes": 1500}
_CONVERTED: dict[str, dict[str, Any]] = {
    "zarr": {"chunk_tokens": 8},
    "saev": {"pad": True, **_SMALL},
    "lmprobe": _SMALL,
    "pickle": {"compress": False, "columns": ["input_ids"], **_SMALL},
    "deepspec": {"dtype": "bfloat16", "layers": {0: 0, 1: 4, 2: "last"}, **_SMALL},
    "specforge": {"layers": {0: 0, 1: 1, 2: "last"}},
    "npy": {},
    "hf_arrow": _SMALL,
}
_MERGED = {
    "saev": {"max_tokens_per_shard": 5 * 2 * 6, "tokens_per_example": 6},
    "lmprobe": {"shard_bytes": 600, "storage": "full_sequence"},
    "zarr": {"chunk_tokens": 4},
    "pickle": {"shard_bytes": 2000},
}
_CREATED: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 4 * 2 * 6},
    "lmprobe": {"shard_bytes": 300, "storage": "full_sequence"},
    "zarr": {"chunk_tokens": 3},
    "pickle": {"shard_bytes": 1500},
}


@dataclass
class Case:
    """A plan: what it reads, how it is made, what one process makes of it, and what a user reads then.

    Attributes:
        name: ``verb-variant``.
        prepare: makes the inputs below a folder.
        make: makes the plan; its result is ``folder / "d"``, if it writes a dataset.
        one: makes the same result in one process, at a path; its value is that of the commit, if there is no dataset.
        opened: opens the result; None if the plan writes none.
    """

    name: str
    prepare: Callable[[Path], object]
    make: Callable[[Path], Any]
    one: Callable[[Path, Path, Any], Any]
    opened: Callable[[Path], object] | None = None


def _rows(path: Path, format: str, n: int, first: int = 0, **options: Any) -> None:
    """A dataset of ragged examples (saev: equal ones) with columns."""
    rng = np.random.default_rng([n, first])
    lengths = [6] * n if format == "saev" else rng.integers(1, 12, n).tolist()
    with actshard.create(path, format, layers=range(3), d_model=8, **options) as writer:
        rows = [rng.standard_normal((3, k, 8)).astype(np.float32) for k in lengths]
        columns: dict[str, Any] = {}
        if format == "lmprobe":
            columns = {"input_ids": [rng.integers(0, 1000, k).tolist() for k in lengths]}
        if format != "saev":
            columns["label"] = list(range(first, first + n))
        writer.append(rows, columns=columns or None)


def _source(folder: Path) -> None:
    _rows(folder / "source", "lmprobe", N, storage="full_sequence")


def _convert(format: str) -> Case:
    options = _CONVERTED[format]

    def make(folder: Path) -> Any:
        return actshard.plan.convert(folder / "source", folder / "d", format, tasks=TASKS, **options)

    def one(folder: Path, path: Path, plan: Any) -> None:
        os.environ[EPOCH] = str(plan.arguments["sizes"]["created"])  # in a child
        actshard.convert(folder / "source", path, format, **options)

    return Case(f"convert-{format}", _source, make, one, actshard.open)


def _texts(folder: Path) -> None:
    (folder / "texts").mkdir()
    rng = np.random.default_rng(5)
    for file in range(3):
        lines = [json.dumps({"text": " ".join(map(str, rng.integers(0, 999, n)))}) for n in rng.integers(1, 40, 30)]
        (folder / "texts" / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(_GOLDEN / "levanter" / "tokenizers" / "bpe_gpt2style", folder / "tokenizer")


def _tokenize(variant: str) -> Case:
    options: dict[str, Any] = {"layout": "sharded"} if variant == "sharded" else {"storage": variant}

    def make(folder: Path) -> Any:
        return actshard.plan.tokenize(
            str(folder / "texts" / "*.jsonl"), folder / "d", str(folder / "tokenizer"), tasks=TASKS, **options
        )

    def one(folder: Path, path: Path, plan: Any) -> None:
        tokens.build_cache(str(folder / "texts" / "*.jsonl"), path, str(folder / "tokenizer"), jobs=1, **options)

    return Case(f"tokenize-{variant}", _texts, make, one, tokens.open_cache)


def _merge(format: str) -> Case:
    sizes = [7, 4, 5]

    def prepare(folder: Path) -> None:
        first = 0
        for i, n in enumerate(sizes):
            machine = {"machine_id": i} if format == "pickle" else {}
            _rows(folder / f"part{i}", format, n, first, **_MERGED[format], **machine)
            first += n

    def parts(folder: Path) -> list[Path]:
        return [folder / f"part{i}" for i in range(len(sizes))]

    def make(folder: Path) -> Any:
        return actshard.plan.merge(folder / "d", parts(folder), tasks=TASKS)

    def one(folder: Path, path: Path, plan: Any) -> None:
        actshard.merge(path, parts(folder))

    return Case(f"merge-{format}", prepare, make, one, actshard.open)


def capture(writer: Any, examples: range) -> None:
    """Appends examples whose values depend on their numbers, and keeps some before it ends."""
    for n in examples:
        writer.append(_computed(n), columns={"label": [n]})
        if n % 3 == 0:
            writer.flush()


def capture_rows(writer: Any, examples: range) -> None:
    """As :func:`capture`, without columns."""
    for n in examples:
        writer.append(_computed(n))
        if n % 3 == 0:
            writer.flush()


def _computed(n: int) -> Any:
    return np.random.default_rng(n).standard_normal((1, 2, 6, 8)).astype(np.float32)


def _create(format: str) -> Case:
    """The bytes are those of a plan that nobody killed, because each task begins a shard; the rows are those of one process."""
    function = capture_rows if format == "saev" else capture
    asked: dict[str, Any] = {"layers": [0, 1], "d_model": 8, "dtype": "float32", "tokens_per_example": 6}
    asked |= _CREATED[format]

    def planned(path: Path) -> Any:
        name = f"tests.torture.plan_cases:{function.__name__}"
        return actshard.plan.create(path, format, num_examples=N, tasks=TASKS, capture=name, **asked)

    def one(folder: Path, path: Path, plan: Any) -> None:
        alone = planned(path)
        for task in range(len(alone)):
            alone.run(task)
        alone.commit()

    def opened(path: Path) -> None:
        dumps = (
            [found for found in path.glob("*") if found.is_dir() and found.name[0] != "."] if format == "saev" else []
        )
        store = actshard.open(dumps[0] if dumps else path)
        rows = [[store.sequence(n, layer) for layer in (0, 1)] for n in range(len(store))]
        assert np.array_equal(rows, np.concatenate([_computed(n) for n in range(N)]))

    return Case(f"create-{format}", lambda folder: None, lambda folder: planned(folder / "d"), one, opened)


def _verify(variant: str) -> Case:
    def prepare(folder: Path) -> None:
        _source(folder)
        if variant == "broken":
            shard = sorted((folder / "source").glob("tensors/*.safetensors"))[1]
            data = bytearray(shard.read_bytes())
            data[-64:-60] = b"\0\0\xc0\x7f"  # a NaN
            shard.write_bytes(data)

    return Case(
        f"verify-{variant}",
        prepare,
        lambda folder: actshard.plan.verify(folder / "source", tasks=TASKS, work=folder / "work"),
        lambda folder, path, plan: actshard.verify(folder / "source", deep=True).as_dict(),
    )


def _stats() -> Case:
    def prepare(folder: Path) -> None:
        rows = np.random.default_rng(5).standard_normal((2, 5 * 65_536 + 100, 2)).astype(np.float32)
        with actshard.create(folder / "source", "npy", layers=[0, 1], d_model=2) as writer:
            writer.append([rows[:, i : i + 5000] for i in range(0, rows.shape[1], 5000)])

    def one(folder: Path, path: Path, plan: Any) -> Any:
        store = actshard.open(folder / "source")
        return plain({layer: store.stats(layer) for layer in store.layers})

    return Case(
        "stats-npy",
        prepare,
        lambda folder: actshard.plan.stats(folder / "source", tasks=TASKS, work=folder / "work"),
        one,
    )


def plain(made: Any) -> Any:
    """What a commit returned, as JSON values; None for datasets, whose files are compared."""
    from actshard.cli import planning

    return planning.plain(made) if isinstance(made, dict) else made.as_dict() if hasattr(made, "findings") else None


def cases() -> list[Case]:
    """All cases of the verbs that there are."""
    made = [
        *(_convert(format) for format in _CONVERTED),
        *(_tokenize(variant) for variant in ("plain", "lz4", "sharded")),
        *(_merge(format) for format in _MERGED),
        *(_create(format) for format in _CREATED),
        _stats(),
    ]
    if hasattr(actshard.plan, "verify"):
        made += [_verify("whole"), _verify("broken")]
    return made
