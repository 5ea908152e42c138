"""Jobs that are interrupted by tests: create, convert and merge in every format, and building a token cache.

Each job uses default options, takes milliseconds, and is written so that a user can restart it: `resume=True` where supported.
`prepare` creates the input; `check` compares the result with the data; `digest` compares results byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from actshard import tokens

FORMATS = ("saev", "lmprobe", "zarr", "pickle")
LAYERS, WIDTH, N = [1, 4], 8, 11
VERBS = ("create", "convert", "merge")
JOBS = (*(f"{verb}-{format}" for verb in VERBS for format in FORMATS), "tokenize-consolidated", "tokenize-sharded")
GOLDEN = Path(__file__).parents[1] / "golden"
Tell = Callable[[int], None]


def data(format: str) -> list[np.ndarray]:
    """Examples of shape `(layers, tokens, d_model)`; saev needs equal lengths."""
    rng = np.random.default_rng(3)
    lengths = [6] * N if format == "saev" else rng.integers(1, 9, N).tolist()
    return [rng.standard_normal((len(LAYERS), n, WIDTH)).astype(np.float32) for n in lengths]


def columns(format: str, part: slice) -> dict[str, Any]:
    """Arguments of `append` besides the rows."""
    if format == "saev":
        return {}
    name = {"lmprobe": "text", "zarr": "prompt", "pickle": "text_preview"}[format]
    return {"columns": {"label": list(range(N))[part], name: [f"text {i}" for i in range(N)][part]}}


def _append(writer: actshard.Writer, format: str, start: int, stop: int, tell: Tell) -> None:
    examples = data(format)
    for at in range(start, stop, 4):
        part = slice(at, min(at + 4, stop))
        writer.append(examples[part], **columns(format, part))
        tell(writer.flush())


def _create(format: str, folder: Path, tell: Tell) -> Path:
    with actshard.create(folder / "d", format, layers=LAYERS, d_model=WIDTH, resume=True) as writer:
        tell(writer.committed)
        if not writer.complete:
            _append(writer, format, len(writer), N, tell)
    tell(N)
    return writer.path


def _convert(format: str, folder: Path, tell: Tell) -> Path:
    made = actshard.convert(folder / "source", folder / "d", format, resume=True)
    tell(made.examples)
    return made.path


def _merge(format: str, folder: Path, tell: Tell) -> Path:
    made = actshard.merge(folder / "d")
    tell(N)
    return made


def _tokenize(layout: str, folder: Path, tell: Tell) -> Path:
    tokens.build_cache(
        str(folder / "texts" / "*.jsonl"), folder / "d", str(folder / "tokenizer"), layout=layout, jobs=1
    )
    return folder / "d"


def run(job: str, folder: Path, tell: Tell = lambda n: None) -> Path:
    """Runs a job. `tell` is called with numbers of examples that are safe from then on. Returns the result's path."""
    verb, what = job.split("-")
    do = {"create": _create, "convert": _convert, "merge": _merge, "tokenize": _tokenize}[verb]
    return do(what, folder, tell)


def prepare(job: str, folder: Path) -> None:
    """Creates the job's input."""
    verb, what = job.split("-")
    if verb == "convert":
        source = "zarr" if what != "zarr" else "pickle"
        examples = data(what)
        with actshard.create(folder / "source", source, layers=LAYERS, d_model=WIDTH) as writer:
            writer.append(examples, **columns(source, slice(0, N)))
    elif verb == "merge":
        bounds = [0, 4, 7, N]
        for i in range(3):
            with actshard.create(folder / "d", what, layers=LAYERS, d_model=WIDTH, part=(i, 3)) as writer:
                _append(writer, what, bounds[i], bounds[i + 1], lambda n: None)
    elif verb == "tokenize":
        (folder / "texts").mkdir()
        rng = np.random.default_rng(5)
        for file in range(2):
            lines = [json.dumps({"text": " ".join(map(str, rng.integers(0, 999, n)))}) for n in rng.integers(1, 40, 9)]
            (folder / "texts" / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
        shutil.copytree(GOLDEN / "levanter" / "tokenizers" / "bpe_gpt2style", folder / "tokenizer")


def result(job: str, folder: Path) -> Path | None:
    """Path of the result if it opens as finished; else None."""
    verb, _ = job.split("-")
    path = folder / "d"
    if verb == "tokenize":
        try:
            tokens.open_cache(path)
        except actshard.ActshardError:
            return None
        return path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return actshard.open(path).path
    except actshard.ActshardError:
        return None


def check(job: str, path: Path, *, left_overs: bool = False) -> None:
    """Checks every value and column, and that `verify(deep=True)` finds nothing.

    A job that was killed in its last step may leave its working folder; the next call removes it.
    """
    verb, what = job.split("-")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if verb == "tokenize":
            assert tokens.open_cache(path) is not None
        else:
            store = actshard.open(path)
            wanted = data(what)
            assert len(store) == N, f"{len(store)} examples in place of {N}"
            for e, example in enumerate(wanted):
                for k, layer in enumerate(store.layers):
                    assert np.array_equal(store.sequence(e, layer), example[k]), (e, layer)
            if what != "saev":
                assert [int(x) for x in store.table["label"].to_pylist()] == list(range(N))
        report = actshard.verify(path, deep=True)
    assert report.ok, report.findings
    left = [p for p in path.rglob("*") if p.name.endswith(".part") or p.name == "journal.jsonl"]
    assert left_overs or not left, left


_TIMES = re.compile(rb"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?")


def digest(folder: Path) -> dict[str, str]:
    """A digest of each file below the result's folder, with timestamps masked."""
    found = {}
    for path in sorted((folder / "d").rglob("*")):
        relative = path.relative_to(folder / "d")
        if path.is_file() and not any(part in (".actshard", ".actshard-build") for part in relative.parts):
            found[str(relative)] = hashlib.sha256(_TIMES.sub(b"<time>", path.read_bytes())).hexdigest()
    return found
