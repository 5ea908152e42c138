"""Guarantees of verify(): every violation is found, with its code and position, whatever else is wrong."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actshard
from actshard.base._arguments import many
from actshard.formats.lmprobe.read import Extraction
from actshard.formats.report import Report
from actshard.reading.verifying import CODES
from conftest import GOLDEN, refuses, rewrite_index, saev_dump
from shell import run_command
from zarr_files import write_store

SOUND = [saev_dump(p.parent) for p in sorted((GOLDEN / "saev").glob("*/expected.npz"))]
SOUND += [p.parent for kind in ("lmprobe", "pickle", "zarr") for p in sorted((GOLDEN / kind).glob("*/expected.npz"))]


@pytest.mark.parametrize("path", SOUND, ids=lambda p: p.relative_to(GOLDEN).as_posix().split("/saev/")[0])
def test_sound_datasets_have_no_errors(path: Path) -> None:
    report = actshard.verify(path, deep=True)
    assert report.ok, report.findings
    # Known errors of lmprobe's own writer, and constant golden values.
    assert report.codes() <= {"dtype-claim", "row-bytes-claim", "layout", "constant-row"}
    if path.name in ("pooled_f16", "pooled_bf16"):
        assert "dtype-claim" in report.codes()


SAEV_ERRORS = {
    "missing_shard": ("missing-file", "acts000001.bin"),
    "empty_shard": ("empty-file", "acts000001.bin"),
    "short_shard": ("truncated", "acts000001.bin"),
    "no_shards_json": ("missing-file", "shards.json"),
    "float16_dtype": ("unsupported", "metadata.json"),
    "future_protocol": ("version", ""),
    "shard_is_directory": ("not-a-file", "acts000001.bin"),
}


@pytest.mark.parametrize("case", SAEV_ERRORS)
def test_broken_saev_dumps(case: str) -> None:
    dump = json.loads((GOLDEN / "saev/errors/cases.json").read_text())[case]["dump"]
    report = actshard.verify(GOLDEN / "saev/errors" / dump)
    code, name = SAEV_ERRORS[case]
    assert [f.code for f in report.findings] == [code]
    assert str(report.findings[0].path).endswith(name)
    assert report.status == (1 if case == "future_protocol" else 2)


HOSTILE = {
    **dict.fromkeys(
        (
            *(
                "global_os_getcwd",
                "stack_global_pathlib",
                "builtins_eval",
                "class_lookup_only",
                "dotted_name_under_numpy",
            ),
            *("reconstruct_other_class", "ndarray_called_directly", "persistent_id", "inst_opcode"),
        ),
        "unsafe-pickle",
    ),
    **dict.fromkeys(("truncated_gzip", "gzip_bad_crc", "not_gzip"), "gzip"),
    **dict.fromkeys(("truncated_pickle", "length_prefix_2_62", "no_stop", "frame_lies"), "truncated"),
    **dict.fromkeys(("object_dtype", "structured_dtype", "future_protocol"), "unsupported"),
    "empty_file": "empty-file",
    "wrong_checksum": "checksum",
    "wrong_size_bytes": "size-bytes",
    "filename_parent": "metadata",
    "count_differs": "count-claim",
    "memo_index_4g": "count-claim",
}


@pytest.mark.parametrize("case", sorted(p.name for p in (GOLDEN / "pickle/hostile").iterdir() if p.is_dir()))
def test_hostile_pickles(case: str) -> None:
    report = actshard.verify(GOLDEN / "pickle/hostile" / case)
    code = HOSTILE.get(case, "format")
    assert code in report.codes(), report.findings
    assert report.status == 2


def saev(tmp: Path) -> Path:
    copy = tmp / "efe18415"
    shutil.copytree(saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"), copy)
    return copy


def of(kind: str, variant: str) -> Callable[[Path], Path]:
    def make(tmp: Path) -> Path:
        shutil.copytree(GOLDEN / kind / variant, tmp / variant)
        return tmp / variant / "activations.zarr" if (tmp / variant / "activations.zarr").exists() else tmp / variant

    return make


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        value = json.loads((path / name).read_text())
        changed = change(value)
        (path / name).write_text(json.dumps(value if changed is None else changed))

    return do


def index(change: Callable[[Any, dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: rewrite_index(path, change)


def put(table: Any, column: str, change: Callable[[list[Any]], Any]) -> Any:
    values = table[column].to_pylist()
    change(values)
    at = table.column_names.index(column)
    return table.set_column(at, column, pa.array(values, table[column].type))


def last_token_elsewhere(ids: list[list[int]]) -> None:
    ids[2][-1] = ids[2][0] if len(ids[2]) > 1 else 1


full, pooled = of("lmprobe", "fullseq_f32"), of("lmprobe", "pooled_f32")
store, run = of("zarr", "single_consolidated"), of("zarr", "run_20260122_101112")
shards = of("pickle", "numpy2_proto4")
Break = Callable[[Path], Any]
CASES: list[tuple[Callable[[Path], Path], Break, str]] = [
    (saev, lambda p: (p / "acts000007.bin").write_bytes(b"x"), "unlisted-file"),
    (saev, lambda p: (p / "labels.bin").write_bytes(b"x"), "truncated"),
    (saev, lambda p: (p / "acts000000.bin").write_bytes(bytes(10**6)), "too-long"),
    (saev, edit("metadata.json", lambda m: m.update(ckpt="other")), "hash-mismatch"),
    (saev, edit("metadata.json", lambda m: m.update(d_model="16")), "metadata"),
    (saev, edit("metadata.json", lambda m: m.update(layers=[5, 0, 11])), "layer-order"),
    (saev, edit("metadata.json", lambda m: m.update(max_tokens_per_shard=3)), "metadata"),
    (saev, edit("shards.json", lambda s: s[1].update(n_examples=2)), "count-claim"),
    (saev, edit("shards.json", lambda s: s[:-1]), "format"),
    (full, lambda p: (p / "tensors/hidden_layer003_shard001.safetensors").unlink(), "missing-file"),
    (full, lambda p: (p / "tensors/hidden_layer003_shard001.safetensors").write_bytes(b"x" * 100), "header"),
    (
        full,
        lambda p: shutil.copy(p / "tensors/hidden_layer003_shard001.safetensors", p / "tensors/extra.safetensors"),
        "unlisted-file",
    ),
    (full, index(lambda t, m: put(t, "shard_index", lambda v: v.__setitem__(3, 9))), "address-out-of-range"),
    (
        full,
        index(lambda t, m: put(t, "token_shard_offsets", lambda v: v[1].__setitem__(0, 10**6))),
        "address-out-of-range",
    ),
    (
        full,
        index(lambda t, m: put(t, "token_shard_offsets", lambda v: v[1].__setitem__(0, v[0][0]))),
        "address-overlap",
    ),
    (
        full,
        index(lambda t, m: put(t, "token_shard_offsets", lambda v: v[1].__setitem__(0, v[0][0]))),
        "unaddressed-rows",
    ),
    (full, index(lambda t, m: put(t, "token_shard_ids", last_token_elsewhere)), "last-token-address"),
    (full, index(lambda t, m: put(t, "num_tokens", lambda v: v.__setitem__(2, 99))), "token-count"),
    (
        full,
        index(
            lambda t, m: put(
                put(t, "token_shard_ids", lambda v: v.__setitem__(0, [])),
                "token_shard_offsets",
                lambda v: v.__setitem__(0, []),
            )
        ),
        "zero-token-example",
    ),
    (full, index(lambda t, m: m["tensors"]["hidden_layers"]["shards"][0].update(num_prompts=3) or t), "count-claim"),
    (full, index(lambda t, m: m["tensors"]["hidden_layers"]["shards"][3].update(num_tokens=1) or t), "tensor"),
    (full, index(lambda t, m: m["tensors"]["hidden_layers"].update(dim=64) or t), "tensor"),
    (full, index(lambda t, m: m.update(format_version="2.4") or t), "version"),
    (full, index(lambda t, m: m.update(format_version="3.0") or t), "unsupported"),
    (full, index(lambda t, m: m.update(num_prompts=3) or t), "claim"),
    (pooled, index(lambda t, m: m["tensors"]["hidden_layers"].update(dtype="float16") or t), "dtype-claim"),
    (pooled, index(lambda t, m: m["tensors"]["hidden_layers"].update(pooling="mean") or t), "pooling"),
    (pooled, index(lambda t, m: t.drop_columns(["row_offset"])), "format"),
    (of("lmprobe", "pooled_logits"), lambda p: (p / "tensors/logits_topk_001.safetensors").unlink(), "missing-file"),
    (
        of("lmprobe", "pooled_logits"),
        index(lambda t, m: put(t, "row_offset_logits", lambda v: v.__setitem__(0, 10**6))),
        "address-out-of-range",
    ),
    (
        of("lmprobe", "fullseq_logits_router"),
        index(lambda t, m: m["tensors"]["router_logits"]["shards"][0].update(num_prompts=3) or t),
        "count-claim",
    ),
    (store, lambda p: next((p / "arrays/activations").glob("3.*")).write_bytes(b"short"), "chunk-size"),
    (store, lambda p: next((p / "arrays/activations").glob("3.*")).write_bytes(b""), "empty-file"),
    (store, lambda p: (p / "arrays/activations/4.0.0.0").unlink(), "chunk-missing"),
    (store, lambda p: (p / "arrays/activations/9.0.0.0").write_bytes(b""), "unlisted-file"),
    (store, lambda p: shutil.rmtree(p / "arrays/seq_len") or _forget(p, "seq_len"), "no-lengths"),
    (store, lambda p: (p / "arrays/seq_len/0").write_bytes(np.full(5, 99, np.int32).tobytes()), "length-too-long"),
    (store, lambda p: (p / "arrays/prompt_len/0").write_bytes(b"x"), "truncated"),
    (store, edit("arrays/split/.zarray", lambda z: z.update(fill_value=1)), "consolidated-differs"),
    (store, edit(".zattrs", lambda z: z.update(num_layers=99)), "claim"),
    (store, lambda p: (p / "text/prompts.jsonl").write_text('{"i": 0}\n{"i": 0}\n'), "duplicate-sample"),
    (store, lambda p: (p / "text/prompts.jsonl").write_text('{"i": 0}\n'), "count-claim"),
    (store, lambda p: (p / "text/prompts.jsonl").write_text('{"i": 0'), "format"),
    (run, lambda p: shutil.rmtree(p / "shards/shard-0001.zarr"), "missing-file"),
    (run, edit("manifest.json", lambda m: {**m, "n_samples": 5, "shards": m["shards"][:-1]}), "unlisted-file"),
    (run, edit("manifest.json", lambda m: m["shards"][1].update(start=4)), "metadata"),
    (shards, lambda p: (p / "shard_0002.pkl.gz").unlink(), "missing-file"),
    (shards, lambda p: shutil.copy(p / "shard_0001.pkl.gz", p / "shard_0009.pkl.gz"), "unlisted-file"),
    (
        shards,
        lambda p: (p / "shard_0001.pkl.gz").write_bytes((p / "shard_0001.pkl.gz").read_bytes()[:-1] + b"x"),
        "checksum",
    ),
    (shards, edit("metadata.json", lambda m: m["statistics"].update(total_samples=1)), "claim"),
    (shards, edit("metadata.json", lambda m: m["shards"][0].update(checksum=None)), "no-checksum"),
    (shards, edit("metadata.json", lambda m: {k: v for k, v in m.items() if k != "statistics"}), "metadata"),
    (
        shards,
        edit("metadata.json", lambda m: m["shards"].append({**m["shards"][0], "filename": "shard_0002.pkl.gz"})),
        "metadata",
    ),
]


def _forget(path: Path, array: str) -> None:
    edit(".zmetadata", lambda z: [z["metadata"].pop(k) for k in list(z["metadata"]) if f"/{array}/" in k] and None)(
        path
    )


@pytest.mark.parametrize(("make", "damage", "code"), CASES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CASES)])
def test_every_rule_has_a_code(tmp_path: Path, make: Callable[[Path], Path], damage: Break, code: str) -> None:
    path = make(tmp_path)
    assert code not in actshard.verify(path).codes()
    damage(path)
    report = actshard.verify(path)
    (found, *_) = [f for f in report.findings if f.code == code] or pytest.fail(f"{report.findings}")
    assert found.severity == CODES[code][0]
    assert found.remedy
    assert found.found
    assert len(str(found).splitlines()) == 1
    assert (
        report.status
        == {"error": 2, "warning": 1, "note": 0}[
            min((f.severity for f in report.findings), key=["error", "warning", "note"].index)
        ]
    )


def test_all_findings_and_not_the_first(tmp_path: Path) -> None:
    path = saev(tmp_path)
    (path / "acts000000.bin").unlink()
    (path / "acts000002.bin").write_bytes(b"x")
    (path / "acts000009.bin").write_bytes(b"x")
    edit("metadata.json", lambda m: m.update(dtype="float16"))(path)
    report = actshard.verify(path)
    assert report.codes() == {"missing-file", "truncated", "unlisted-file", "unsupported"}
    data = report.as_dict()
    assert json.loads(json.dumps(data))["status"] == 2
    assert {f["path"].rsplit("/", 1)[1] for f in data["findings"]} == {
        "acts000000.bin",
        "acts000002.bin",
        "acts000009.bin",
        "metadata.json",
    }


@pytest.mark.parametrize(
    ("dataset", "files"),
    [
        ("lmprobe/pooled_f32", "tensors/*.safetensors"),
        ("llamascopium/chunks_pt_stacked_f32/cache", "*/*.pt"),
        ("llamascopium/chunks_safetensors_bf16/cache", "*/*.safetensors"),
        ("hf_arrow/hub_array2d_ragged_f32/dataset", "*.arrow"),
        ("hf_arrow/hub_array2d_ragged_f32/dataset", "*-of-00002.*|dataset_info.json"),
        ("hf_arrow/hub_parquet_array2d_f32", "data/*1-of*.parquet|cache_*.json"),
        ("jkminder/single_f32_sequence_ranges/tiny/web/validation_col_text2", "*/shard_*.meta"),
        ("jkminder/single_f32_sequence_ranges/tiny/web/validation_col_text2", "*/shard_*.memmap|tokens.pt"),
        ("draft/angelslim_dflash", "*/*.ckpt"),
        ("draft/deepspec_v2_ranks", "*.bin"),
        ("draft/automodel_eagle3_dense", "*.safetensors"),
        ("draft/eagle_v1_qwen2", "3/*[1-9].ckpt"),
        ("hallulens_v1/full_capture/capture", "*_activations.npy"),
    ],
)
def test_every_damaged_file_is_named(tmp_path: Path, dataset: str, files: str) -> None:
    """Opening names the first one; the others would be found one repair at a time."""
    copy = tmp_path / "dataset"
    shutil.copytree(GOLDEN / dataset, copy)
    damaged = [path for pattern in files.split("|") for path in copy.glob(pattern)]
    assert len(damaged) > 1
    for path in damaged:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report = actshard.verify(copy)
    unnamed = [path.name for path in damaged if not any(path.name in str(finding) for finding in report.findings)]
    assert unnamed == []


def test_the_error_of_opening_is_reported_next_to_other_errors(tmp_path: Path) -> None:
    path = saev(tmp_path)
    edit("shards.json", lambda s: s[1].update(name="acts\\000001.bin"))(path)
    (path / "acts000002.bin").write_bytes(b"")
    with refuses(actshard.FormatError, path / "shards.json", r"field '\[1\].name'"):
        actshard.open(path)
    report = actshard.verify(path)
    assert {(f.code, f.path.name) for f in report.errors} == {
        ("metadata", "shards.json"),
        ("empty-file", "acts000002.bin"),
    }


def test_every_wrong_field_is_reported(tmp_path: Path) -> None:
    path = saev(tmp_path)
    edit("metadata.json", lambda m: m.update(d_model="16", layers=[], cls_token=3))(path)
    found = [finding.found.split("'")[1] for finding in actshard.verify(path).errors]
    assert found == ["layers", "cls_token", "d_model"]


def test_every_wrong_entry_of_a_manifest_is_reported(tmp_path: Path) -> None:
    path = run(tmp_path)
    edit("manifest.json", lambda m: [shard.update(n_samples=-1) for shard in m["shards"]] and None)(path)
    report = actshard.verify(path)
    assert [f.code for f in report.errors] == ["metadata"] * len(
        json.loads((path / "manifest.json").read_text())["shards"]
    )


@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
def test_deep_looks_at_every_value(tmp_path: Path, format: str) -> None:
    rows = np.random.default_rng(0).standard_normal((6, 2, 3, 8)).astype(np.float32)
    rows[1, 0, 2, 4] = np.nan
    rows[2, 1, 0, :2] = -np.inf
    rows[:, 1, :, 7] = 0
    rows[3, 0, 1] = 0
    rows[5] = rows[4]
    with actshard.create(tmp_path / "d", format, layers=[0, 4], d_model=8) as writer:
        writer.append(rows)
    report = actshard.verify(writer.path, deep=True)
    told = {f.code: f for f in report.findings}
    assert "(1, 2)" in told["nan"].found
    assert told["nan"].place == "layer 0"
    assert "2 infinite values" in told["infinite"].found
    assert "(2, 0)" in told["infinite"].found
    assert told["infinite"].place == "layer 4"
    assert "(3, 1)" in told["zero-row"].found
    assert "dead-dimension" in told
    assert told["dead-dimension"].found == "1 of 8 columns: 7"
    assert told["duplicate-example"].found.endswith("5 = 4")
    assert report.status == 2
    assert report.checked["rows"] == 36
    assert actshard.verify(writer.path).findings == []


def test_a_narrower_dtype_is_advised_with_its_exceptions(tmp_path: Path) -> None:
    """float64 values with the precision of float32 may be outside its range."""
    with actshard.create(tmp_path / "wide", "npy", layers=[0], d_model=2, dtype="float64") as writer:
        writer.append(np.array([[[[2.0**900, 1.5]]], [[[0.5, 0.25]]]]))
    found = {finding.code: finding.found for finding in actshard.verify(tmp_path / "wide", deep=True).findings}
    assert "except those outside the range of float32" in found["wide-dtype"]
    with pytest.raises(actshard.ActshardError, match="float32"):
        actshard.convert(tmp_path / "wide", tmp_path / "narrow", "npy", dtype="float32")


def test_deep_sees_constant_columns_and_types_wider_than_values(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 1, 3, 8)).astype(np.float32)
    rows = (rows.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exactly bfloat16
    rows[..., 2] = 0.5
    rows[0, 0, 0] = 2.5
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=8) as writer:
        writer.append(rows)
    told = {f.code: f for f in actshard.verify(tmp_path / "d", deep=True).findings}
    assert "bfloat16" in told["wide-dtype"].found
    assert set(told) == {"wide-dtype", "constant-row"}
    rows[0, 0, 0, 2] = 0.5
    with actshard.create(tmp_path / "e", "zarr", layers=[0], d_model=8) as writer:
        writer.append(rows)
    told = {f.code: f for f in actshard.verify(tmp_path / "e", deep=True).findings}
    assert told["constant-dimension"].found == "1 of 8 columns: 2"
    rows[:] = rows[0, 0, 0]
    with actshard.create(tmp_path / "f", "zarr", layers=[0], d_model=8) as writer:
        writer.append(rows)
    told = {f.code: f for f in actshard.verify(tmp_path / "f", deep=True).findings}
    assert (told["constant-layer"].found, told["constant-layer"].place) == ("all 12 rows are equal", "layer 0")
    assert not {"constant-dimension", "dead-dimension"} & set(told)
    rows[..., :4] = np.inf
    for columns, codes in (
        (slice(0), {"infinite", "constant-dimension"}),
        (slice(4, 7), {"nan", "infinite", "constant-dimension"}),
        (slice(None), {"nan"}),
    ):
        rows[..., columns] = np.nan
        with actshard.create(tmp_path / f"g{columns.stop}", "zarr", layers=[0], d_model=8) as writer:
            writer.append(rows)
        told = {f.code: f for f in actshard.verify(tmp_path / f"g{columns.stop}", deep=True).findings}
        assert set(told) - {"wide-dtype", "duplicate-example", "constant-row"} == codes
    assert str(told["nan"]).count("96 NaN values")


def test_an_example_that_is_like_another_in_one_layer_only_is_no_duplicate(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 2, 3, 8)).astype(np.float32)
    rows[1, 0] = rows[0, 0]
    with actshard.create(tmp_path / "d", "zarr", layers=[0, 1], d_model=8) as writer:
        writer.append(rows)
    assert actshard.verify(tmp_path / "d", deep=True).findings == []


def test_what_is_no_dataset(tmp_path: Path) -> None:
    with refuses(actshard.MissingFileError, tmp_path / "none"):
        actshard.verify(tmp_path / "none")
    (tmp_path / "file").touch()
    assert actshard.verify(tmp_path).codes() == {"unknown-format"}
    with pytest.raises(actshard.ArgumentError, match="format"):
        actshard.verify(tmp_path, format="npz")


def test_the_command_shows_all_and_its_status_tells(tmp_path: Path) -> None:
    path = saev(tmp_path)
    (path / "acts000000.bin").unlink()
    (path / "acts000009.bin").write_bytes(b"x")
    told = run_command("verify", path)
    assert told.returncode == 2
    assert re.search(r"^error \[missing-file\] .*acts000000\.bin: expected", told.stdout, re.M)
    assert re.search(r"^warning \[unlisted-file\] .*acts000009", told.stdout, re.M)
    assert "1 error, 1 warning" in told.stdout


def test_every_code_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/verify.md").read_text()
    for code, (severity, _, _) in CODES.items():
        assert f"| `{code}` | {severity} |" in page, code


def test_a_deep_look_knows_integers_from_zeros(tmp_path: Path) -> None:
    """128 is the usual zero point of quantized uint8, and the minimum of a signed type is not zero either."""
    for dtype, least in (("u1", 128), ("i1", -128), ("i2", -(2**15)), ("i4", -(2**31))):
        values = np.full((3, 1, 4, 8), least, dtype)
        values[1, 0, 2] = 0
        path = write_store(tmp_path / dtype, values, np.full(3, 4, "i4"), (1, 1, 4, 8))
        found = {f.code: f for f in actshard.verify(path, deep=True).findings}
        assert "dead-dimension" not in found
        assert "(1, 2)" in str(found["zero-row"])
        assert "1 of 12" in str(found["zero-row"])


@pytest.mark.parametrize("command", ["info", "head", "stats", "convert"])
def test_commands_name_a_truncated_file(tmp_path: Path, command: str) -> None:
    """TruncatedFileError is an EOFError, which click takes for the end of its input: it printed "Aborted." and nothing else."""
    path = tmp_path / "cache"
    shutil.copytree(GOLDEN / "draft/deepspec_v2_single", path)
    shard = path / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:50])
    words = {"convert": [str(tmp_path / "out"), "--to", "specforge"], "stats": ["--layer", "1"]}.get(command, [])
    done = run_command(command, path, *words)
    assert done.returncode == 3, done.stdout
    assert "samples.idx: byte" in done.stderr
    assert "ends at byte" in done.stderr
    assert "Aborted" not in done.stderr


def test_one_of_a_thing_is_told_in_the_singular(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 1, 3, 8)).astype(np.float32)
    rows[0, 0, 1, 2], rows[1, 0, 0, 3] = np.nan, np.inf
    rows[3] = rows[2]
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=8) as writer:
        writer.append(rows)
    found = {finding.code: str(finding.found) for finding in actshard.verify(tmp_path / "d", deep=True).findings}
    assert found["nan"] == "1 of 12 rows with 1 NaN value; (example, token): (0, 1)"
    assert found["infinite"] == "1 of 12 rows with 1 infinite value; (example, token): (1, 0)"
    assert found["duplicate-example"] == "1 example equals another one in every layer: 3 = 2"
    assert many(1, "file", "is", "are") == "1 file is"
    assert many(2_000, "file", "is", "are") == "2,000 files are"


def test_the_time_of_verify_is_linear_in_the_number_of_faults(tmp_path: Path) -> None:
    """With a comparison of all pairs, these take minutes."""
    report = Report(tmp_path, None, deep=False)
    errors = [actshard.FormatError(f"fault {i}", path=tmp_path) for i in range(60_000)]
    began = time.process_time()
    report.faults.add(*errors)
    report.faults.add(*errors)
    assert time.process_time() - began < 30
    assert report.faults.errors == errors
    assert len(report.findings) == len(errors)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("damage", ["missing", "empty", "text"])
@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("containers/npy_big_fortran_f32", "labels.npy"),
        ("containers/npy_layer_files_big_endian_f32", "tokens.npy"),
        ("icalens/v1_f32_unsorted", "store/samples.safetensors"),
    ],
)
def test_a_file_of_columns_that_cannot_be_read_is_an_error(
    dataset: str, name: str, damage: str, deep: bool, tmp_path: Path
) -> None:
    path = tmp_path / "d"
    shutil.copytree(GOLDEN / dataset, path)
    assert actshard.verify(path, deep=deep).ok
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_text("" if damage == "empty" else "x" * 200)
    with pytest.raises(actshard.ActshardError) as raised:
        actshard.open(path).table  # noqa: B018 -- reads
    report = actshard.verify(path, deep=deep)
    assert [(Path(f.path), f.found) for f in report.errors] == [(path / name, raised.value.detail)]


@pytest.mark.parametrize("deep", [False, True])
def test_columns_of_all_examples_are_read_only_by_a_deep_check(
    deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d"
    with actshard.create(path, "lmprobe", layers=[0], d_model=4) as writer:
        writer.append(np.ones((100, 1, 1, 4), np.float32), columns={"note": [f"n{i}" for i in range(100)]})
    read = Extraction.column_batches

    def damaged(self: Extraction, names: Sequence[str], *rows: int) -> Iterator[pa.Table]:
        yield next(read(self, names, 10))
        if "note" in names:
            raise actshard.FormatError("expected another page", path=path)

    monkeypatch.setattr(Extraction, "column_batches", damaged)
    assert any("another page" in f.found for f in actshard.verify(path, deep=deep).errors) == deep
