"""Files: paths and digests of all files that writers create from fixed inputs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import actshard
from actshard import tokens
from digested import GOLDEN, short
from digested.datasets import FORMATS, N, columns, equal, opened, patch_labels, ragged, write

LEVANTER = GOLDEN / "levanter"
_SOURCES = re.compile(rb'"(sources|identity)": ("[0-9a-f]{32}"|\[[^]]*\])|(?<=[.]parquet": )"[0-9a-f]{8}"')
_WITH_SOURCES = ("shard_ledger.json", ".actshard-record.json")
Job = Callable[[Path], object]


def tree(folder: Path) -> dict[str, Any]:
    """A digest of each file below a folder, by path. Parquet files have one of their contents and one of their bytes.

    Bytes of Parquet files depend on pyarrow's version, and are compared only with the recorded version.
    """
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.relative_to(folder).as_posix())
    made: dict[str, Any] = {}
    for path in files:
        data = path.read_bytes()
        # Leave out digests of the sources' paths and modification times, and the checksums of Parquet files.
        digest = short(_SOURCES.sub(b"", data) if path.name in _WITH_SOURCES else data)
        is_table = path.suffix == ".parquet"
        made[path.relative_to(folder).as_posix()] = {"contents": _table(path), "bytes": digest} if is_table else digest
    return made


def _table(path: Path) -> str:
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    columns = [[(g.num_rows, g.column(k).compression) for k in range(g.num_columns)] for g in groups]
    schema = file.schema_arrow
    own = sorted((schema.metadata or {}).items())
    return short(repr((own, str(schema.remove_metadata()), columns, file.read().to_pylist())).encode())


def _logits(rows: int) -> dict[str, Any]:
    rng = np.random.RandomState(18)
    return {
        "logits": (rng.standard_normal((rows, 3)).astype("f4"), rng.randint(0, 99, (rows, 3)).astype("i4")),
        "router": {2: rng.standard_normal((rows, 4)).astype("f4")},
    }


def _creations() -> dict[str, Job]:
    """``create`` with default options, then with each option that changes a file."""
    plain: dict[str, tuple[Any, dict[str, Any]]] = {
        "saev": (equal(), {}),
        "lmprobe": (ragged(), {"columns": columns("lmprobe")}),
        "zarr": (ragged(), {"columns": columns("zarr")}),
        "pickle": (ragged(), {"columns": columns("pickle")}),
    }
    options: dict[str, dict[str, dict[str, Any]]] = {
        "saev": {
            "default": {},
            "protocol 2.0": {"protocol": "2.0"},
            "cls": {"cls_token": True},
            "small shards": {"max_tokens_per_shard": 80},
            "shard_bytes": {"shard_bytes": 2000},
            "metadata": {"metadata": {"family": "clip", "ckpt": "a", "data": {"n": 1}, "pixel_agg": "majority"}},
            "tokens_per_example": {"tokens_per_example": 12, "pad": True},
            "num_examples": {"num_examples": N},
        },
        "lmprobe": {
            "default": {},
            "float16": {"dtype": "float16"},
            "bfloat16": {"dtype": "bfloat16"},
            "small shards": {"shard_bytes": 2048},
            "named": {"model": "org/model", "revision": "0123abc", "metadata": {"mine": {"n": 1}}},
        },
        "zarr": {
            "default": {},
            "float16": {"dtype": "float16"},
            "chunks of 4": {"chunk_tokens": 4},
            "t_max": {"t_max": 30},
            "t_max, truncated": {"t_max": 5, "truncate": True},
            "num_examples": {"num_examples": N},
            "metadata": {"metadata": {"model_id": "a", "mine": [1]}},
            "version 3": {"version": 3},
            "version 3, small shards": {"version": 3, "shard_bytes": 2048},
            "version 3, chunks of 4": {"version": 3, "chunk_tokens": 4, "t_max": 30},
            "version 3, bfloat16": {"version": 3, "dtype": "bfloat16"},
        },
        "pickle": {
            "default": {},
            "plain": {"compress": False},
            "level 6": {"level": 6},
            "small shards": {"shard_bytes": 2048},
            "plain, small shards": {"shard_bytes": 2048, "compress": False},
            "machine": {"machine_id": 2, "total_machines": 4, "samples_per_machine": 1000},
            "float16": {"dtype": "float16"},
            "metadata": {"metadata": {"model": "a", "mine": [1]}},
        },
    }
    made: dict[str, Job] = {}
    for format, named in options.items():
        examples, more = plain[format]
        for name, given in named.items():
            made[f"create {format}, {name}"] = lambda f, a=(format, examples, more, given): write(
                f, a[0], a[1], a[2], **a[3]
            )
    made["create saev, labels"] = lambda f: write(f, "saev", equal(), {"labels": patch_labels(True)}, cls_token=True)
    made["create saev, padded"] = lambda f: write(f, "saev", _longest_first(), pad=True)
    made["create saev, truncated"] = lambda f: write(
        f, "saev", _longest_first()[::-1], truncate=True, tokens_per_example=1
    )
    pooled = {"columns": columns("lmprobe"), **_logits(N)}
    made["create lmprobe, pooled, logits, router"] = lambda f: write(f, "lmprobe", equal()[:, :, 0], pooled)
    made["create lmprobe, logits, router"] = lambda f: write(f, "lmprobe", ragged(), pooled)
    made["create lmprobe, mean"] = lambda f: write(f, "lmprobe", equal()[:, :, 0], {}, storage="pooled", pooling="mean")
    for format in ("zarr", "pickle"):
        held = {"columns": columns(format), **_logits(N)}
        made[f"create {format}, logits, router"] = lambda f, a=(format, held): write(f, a[0], ragged(), a[1])
        made[f"create {format}, no columns"] = lambda f, a=format: write(f, a, ragged())
        made[f"create {format}, one row each"] = lambda f, a=format: write(f, a, equal()[:, :, 0])
    return made


def _longest_first() -> list[np.ndarray]:
    return sorted(ragged(), key=lambda e: -e.shape[1])


def _conversions() -> dict[str, Job]:
    """``convert`` between every pair of formats, and with each option."""

    def source(f: Path, format: str) -> Path:
        if format == "saev":
            return write(f.with_name("s"), format, equal(), {"labels": patch_labels()})
        return write(f.with_name("s"), format, ragged(), {"columns": columns(format)})

    made: dict[str, Job] = {}
    for a in FORMATS:
        for b in FORMATS:
            made[f"convert {a} to {b}"] = lambda f, p=(a, b): actshard.convert(source(f, p[0]), f, p[1], pad=True)
    some: dict[str, dict[str, Any]] = {
        "layers renamed": {"layers": {5: 23}},
        "examples": {"examples": [20, 3, 3, 7]},
        "last tokens": {"tokens": "last"},
        "float16": {"dtype": "float16"},
        "metadata": {"metadata": {"mine": 1}},
    }
    for name, options in some.items():
        for b in ("lmprobe", "zarr", "pickle"):
            if name != "examples" or b != "pickle":
                made[f"convert zarr to {b}, {name}"] = lambda f, p=(b, options): actshard.convert(
                    source(f, "zarr"), f, p[0], **p[1]
                )
    golden = ("saev/v21_cls_labels_multishard", "lmprobe/fullseq_logits_router", "lmprobe/pooled_bf16", "zarr/zstd")
    for name in (*golden, "zarr/run_20260122_101112", "pickle/ragged_layers_machine3", "pickle/mixed_compression"):
        for b in FORMATS:
            made[f"convert {name} to {b}"] = lambda f, p=(name, b): _of_golden(f, *p)
    for b in ("deepspec", "speculators", "specforge", "modelopt", "angelslim"):
        made[f"convert draft/specforge_dspark to {b}"] = lambda f, b=b: actshard.convert(
            opened(GOLDEN / "draft/specforge_dspark"), f, b
        )
    made["convert draft/automodel_dspark to automodel"] = lambda f: actshard.convert(
        opened(GOLDEN / "draft/automodel_dspark"), f, "automodel"
    )
    dflash = GOLDEN / "draft/specforge_dflash_gz"
    for b, options in (("specforge", {"gz": True}), ("angelslim", {"file_group_size": 3})):
        made[f"convert {dflash.name} to {b}"] = lambda f, b=b, o=options: actshard.convert(opened(dflash), f, b, **o)
    made["convert draft/specforge_dspark to eagle"] = lambda f: actshard.convert(
        opened(GOLDEN / "draft/specforge_dspark"), f, "eagle", layers=["last"]
    )
    return made


def _of_golden(folder: Path, name: str, format: str) -> None:
    shutil.copytree(GOLDEN / name, folder.with_name("s"))
    where = folder.with_name("s")
    if name.startswith("saev"):
        where = next(where.rglob("metadata.json")).parent
    dtype = "float32" if format == "saev" or (name.endswith("bf16") and format != "lmprobe") else None
    actshard.convert(opened(where), folder, format, pad=format == "saev", dtype=dtype)


def _merges() -> dict[str, Job]:
    """``merge`` of parts, of datasets that are kept, and of Zarr stores into one."""
    made: dict[str, Job] = {}
    bounds = [0, 7, 7, 15, N]

    def parts(f: Path, format: str, **options: Any) -> None:
        examples = equal() if format == "saev" else ragged()
        more = {} if format == "saev" else {"columns": columns(format)}
        for i in range(4):
            part = slice(bounds[i], bounds[i + 1])
            cut = {k: {n: v[part] for n, v in c.items()} for k, c in more.items()}
            write(f, format, examples[part], cut, part=(i, 4), **options)

    def own(f: Path, format: str, **options: Any) -> None:
        parts(f, format, **options)
        actshard.merge(f)

    def others(f: Path, format: str, physical: bool = False, **options: Any) -> None:
        examples = equal() if format == "saev" else ragged()
        made = []
        for i, part in enumerate((slice(0, 9), slice(9, N))):
            more = {} if format == "saev" else {"columns": {n: v[part] for n, v in columns(format).items()}}
            if format == "pickle":
                more["columns"]["sample_idx"] = list(range(N))[part]
            made.append(write(f.with_name(f"s{i}"), format, examples[part], more, **options))
        actshard.merge(f, made, physical=physical)

    small: dict[str, dict[str, Any]] = {
        "saev": {"max_tokens_per_shard": 80},
        "lmprobe": {"shard_bytes": 2048},
        "zarr": {"chunk_tokens": 4, "t_max": 14},
        "pickle": {"shard_bytes": 2048, "compress": False},
    }
    for format in FORMATS:
        made[f"parts of {format}"] = lambda f, a=format: parts(f, a)
        made[f"merge parts of {format}"] = lambda f, a=format: own(f, a)
        made[f"merge parts of {format}, {small[format]}"] = lambda f, a=format: own(f, a, **small[a])
        made[f"merge {format}"] = lambda f, a=format: others(f, a, **({"t_max": 14} if a == "zarr" else {}))
    made["merge zarr, physical"] = lambda f: others(f, "zarr", physical=True, t_max=14)
    return made


BUILDS: dict[str, tuple[list[str], str | None, dict[str, Any]]] = {
    "text_gpt2style_single": (["train.jsonl"], "bpe_gpt2style", {"type": "text"}),
    "text_llama3style_multishard": (
        ["part0.jsonl", "part1.jsonl.gz", "part2.parquet", "part3.jsonl", "part4.jsonl.zst"],
        "bpe_llama3style",
        {"type": "text", "text_key": "body"},
    ),
    "chat_llama3style": (["train.jsonl"], "bpe_llama3style", {"type": "chat"}),
    "prebuilt_weights": (
        ["part0.jsonl", "part1.parquet"],
        None,
        {"type": "prebuilt", "loss_weights_key": "loss_weights"},
    ),
    "supervised_llama3style": (["train.jsonl"], "bpe_llama3style", {"type": "supervised"}),
}


def _caches() -> dict[str, Job]:
    """``tokens.build_cache`` in both layouts, and ``tokens.CacheWriter``."""

    def build(f: Path, variant: str, **options: Any) -> None:
        files, tokenizer, form = BUILDS[variant]
        for file in (*(f"{variant}/{file}" for file in files), *([f"tokenizers/{tokenizer}"] if tokenizer else [])):
            Path(file).parent.mkdir(exist_ok=True)
            (shutil.copytree if (LEVANTER / file).is_dir() else shutil.copy)(LEVANTER / file, file)
        sources = [f"{variant}/{file}" for file in files]
        tokens.build_cache(sources, f, f"tokenizers/{tokenizer}" if tokenizer else None, form, jobs=1, **options)

    made: dict[str, Job] = {}
    for variant in BUILDS:
        for layout in ("consolidated", "sharded"):
            for storage in ("plain", "lz4"):
                given = {"layout": layout, "storage": storage}
                made[f"build {variant}, {layout}, {storage}"] = lambda f, a=(variant, given): build(f, a[0], **a[1])
    some: dict[str, dict[str, Any]] = {
        "default": {},
        "uint16": {"dtype": "uint16"},
        "no eos, no bos": {"enforce_eos": False, "enforce_bos": False},
        "shards kept": {"keep_shards": True},
    }
    for name, given in some.items():
        made[f"build text, {name}"] = lambda f, a=given: build(f, "text_llama3style_multishard", **a)

    def writer(f: Path, storage: str | None) -> None:
        rng = np.random.RandomState(19)
        fields = {"input_ids": np.int32, "weights/loss": np.float32, "square": np.uint16}
        more = {} if storage is None else {"storage": storage, "metadata": {"mine": [1]}}
        with tokens.CacheWriter(f, fields, **more) as made:
            for _ in range(3):
                lengths = rng.randint(0, 40, 50)
                made.append(
                    {
                        "input_ids": rng.randint(0, 50_000, n),
                        "weights/loss": rng.random_sample(n).astype(np.float32),
                        "square": rng.randint(0, 9, (n % 3, 4)),
                    }
                    for n in lengths
                )

    for storage in (None, "plain", "lz4"):
        made[f"CacheWriter, {storage or 'default'}"] = lambda f, a=storage: writer(f, a)

    def long(f: Path, storage: str) -> None:
        rng = np.random.RandomState(20)
        with tokens.CacheWriter(f, {"input_ids": np.int64}, storage=storage) as made:
            made.append([{"input_ids": rng.randint(0, 50_000, n)} for n in (20_000, 0, 1, 100_000)])

    for storage in ("plain", "lz4"):
        made[f"CacheWriter, long rows, {storage}"] = lambda f, a=storage: long(f, a)
    return made


VERBS = {"create": _creations, "convert": _conversions, "merge": _merges, "caches": _caches}


def found(folder: Path, verbs: Iterable[str] = VERBS) -> dict[str, Any]:
    """For every job of some verbs a digest of each file, or the kind of its error."""
    made: dict[str, Any] = {}
    jobs = [job for verb in verbs for job in VERBS[verb]().items()]
    for number, (name, job) in enumerate(jobs):
        here = folder / str(number)
        here.mkdir()
        os.chdir(here)
        try:
            job(Path("d"))
        except actshard.ActshardError as error:
            made[name] = f"refused: {error.kind}"
            continue
        made[name] = tree(here / "d")
    return made
