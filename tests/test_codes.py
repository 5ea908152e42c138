"""Codes of findings and warnings: declared codes are raised, raised codes are declared, and no code is ever removed."""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from datetime import date
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

import actshard
from actshard import _native, tokens
from actshard.base import codes
from actshard.base.codes import Remark
from actshard.base.location import Location
from actshard.formats import registry
from actshard.reading.verifying import CODES
from arrow_files import unended, with_null
from conftest import GOLDEN, rewrite_index, saev_dump
from pickle_files import mixed
from served import served
from sources import PACKAGE, forget_sources, nodes, nodes_of
from test_speculators import write
from test_verifying import CASES, put

__all__ = ["forget_sources"]

RECORD = Path(__file__).with_name("codes.json")
DIGESTS = json.loads(Path(__file__).with_name("digests.json").read_text(encoding="utf-8"))
VERIFIED = [finding for each in DIGESTS["complaints"]["verified"].values() for finding in each]
GOLDEN_CODES = {finding.split()[1] for finding in VERIFIED if not finding.startswith("status")}
"""Codes tested by test_digests.py."""
CASE_CODES = {code for _, _, code in CASES}
"""Codes tested by test_verifying.py."""
SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


def copied(source: Path, folder: Path, name: str | None = None) -> Path:
    return Path(shutil.copytree(source, folder / (name or source.name)))


def written(folder: Path, format: str, rows: np.ndarray, **options: Any) -> Path:
    with actshard.create(folder / "d", format, layers=[0], d_model=rows.shape[-1]) as writer:
        writer.append(rows, **options)
    return writer.path


def values(change: Callable[[np.ndarray], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        rows = np.random.default_rng(0).standard_normal((6, 1, 3, 8)).astype(np.float32)
        change(rows)
        return written(folder, "zarr", rows)

    return make


def padded_ids(folder: Path) -> Path:
    ids = pa.array([[7, 8, 9, 0]] * 3, pa.list_(pa.int64()))
    with actshard.create(folder / "d", "lmprobe", layers=[0], d_model=8, storage="full_sequence") as writer:
        rows = np.random.default_rng(0).standard_normal((3, 1, 4, 8)).astype(np.float32)
        writer.append(rows, lengths=[2, 3, 4], columns={"ids": ids, "text": ["a", "b", "c"]})
    return folder / "d"


def cache(fields: dict[str, Any], row: dict[str, Any], **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with tokens.CacheWriter(folder / "c", fields, **options) as writer:
            writer.append([row])
        return folder / "c"

    return make


def unknown(folder: Path) -> Path:
    (folder / "file").touch()
    return folder


def unfinished(folder: Path) -> Path:
    writer = actshard.create(folder / "d", "zarr", layers=[0], d_model=8)
    writer.append(np.zeros((1, 1, 2, 8), np.float32))
    writer.abort()
    return folder / "d"


def unreadable(folder: Path) -> Path:
    path = copied(SAEV, folder)
    (path / "acts000000.bin").unlink()
    (path / "acts000000.bin").symlink_to(path / "acts000000.bin")  # a loop
    return path


def of_index(change: Callable[[Any, dict[str, Any]], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = copied(GOLDEN / "lmprobe/fullseq_f32", folder)
        rewrite_index(path, change)
        return path

    return make


def lists_of_text(table: Any, meta: dict[str, Any]) -> Any:
    column = pa.array([["1"]] * len(table))
    at = table.column_names.index("token_ids") if "token_ids" in table.column_names else None
    return table.append_column("token_ids", column) if at is None else table.set_column(at, "token_ids", column)


def same_text(table: Any, meta: dict[str, Any]) -> Any:
    return put(table, "text", lambda texts: texts.__setitem__(1, texts[0]))


def odd_version(folder: Path) -> Path:
    path = copied(GOLDEN / "pickle/numpy2_proto4", folder)
    metadata = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps({**metadata, "version": 1}))
    return path


def on_the_web(folder: Path) -> Any:
    copied(SAEV, folder)
    return served(folder).__enter__().web(SAEV.name)  # until the process ends


def torch_folder(name: str, tensor: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copy(GOLDEN / "containers" / name, folder / "a.pt")
        text = f"version = 1\n[activations]\nfiles = 'a.pt'\ntensor = '{tensor}'\naxes = ['token', 'dim']\n"
        (folder / "layout.toml").write_text(text)
        return folder

    return make


IDS = {"input_ids": np.int32}


def scaled(scale: float, code: int) -> Callable[[Path], Path]:
    """A file of vLLM's connector with one scale and one code."""

    def make(folder: Path) -> Path:
        tensors = {
            "token_ids": np.arange(64),
            "hidden_states_scales": np.array([1.0] * 63 + [scale], np.float32).reshape(64, 1, 1),
            "hidden_states": np.full((64, 2, 16), code, np.uint8),
        }
        write(folder / "request.safetensors", tensors)
        return folder

    return make


def other_rows(folder: Path) -> Path:
    path = written(folder, "npy", np.ones((1, 1, 1, 4), np.float32))
    np.save(next(path.rglob("*.npy")), np.full((1, 4), 2, np.float32))
    return path


def other_file(folder: Path) -> Path:
    path = written(folder, "npy", np.ones((1, 1, 1, 4), np.float32))
    (path / "layout.toml").write_text((path / "layout.toml").read_text() + "\n")
    return path


def bits_as_integers(folder: Path) -> Path:
    np.save(folder / "a.npy", np.arange(24, dtype=np.uint16).reshape(3, 8))
    (folder / "layout.toml").write_text("version = 1\n[activations]\nfiles = 'a.npy'\naxes = ['row', 'dim']\n")
    return folder


def skipping(folder: Path) -> Path:
    path = copied(GOLDEN / "draft/specforge_eagle3", folder)
    (path / "rows_5-10/data_7.ckpt").unlink()
    return path


def latent_splits(locations: list[list[int]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        arrays = {"locations": np.array(locations, np.uint16), "activations": np.ones(len(locations), np.float16)}
        save_file(arrays, folder / "0_3.safetensors")
        return folder

    return make


FINDINGS: dict[str, Callable[[Path], Path]] = {
    "other-rows": other_rows,
    "other-file": other_file,
    "skipped-numbers": skipping,
    "unknown-format": unknown,
    "not-listed": on_the_web,
    "unfinished": unfinished,
    "unreadable": unreadable,
    "column-type": of_index(lists_of_text),
    "duplicate-text": of_index(same_text),
    "reader-warning": odd_version,
    "mixed-dtypes": lambda folder: mixed(folder / "d", ["<f4", "<f2"], gz=True, protocol=4, per=1)[0],
    "nan": values(lambda rows: rows.__setitem__((1, 0, 2, 4), np.nan)),
    "infinite": values(lambda rows: rows.__setitem__((1, 0, 2, 4), np.inf)),
    "zero-row": values(lambda rows: rows.__setitem__((1, 0, 2), 0)),
    "dead-dimension": values(lambda rows: rows.__setitem__((..., 4), 0)),
    "constant-dimension": values(lambda rows: rows.__setitem__((..., 4), 0.5)),
    "constant-layer": values(lambda rows: rows.__setitem__(..., rows[0, 0, 0].copy())),
    "duplicate-example": values(lambda rows: rows.__setitem__(5, rows[4])),
    "padded-column": padded_ids,
    "oversized-file": torch_folder("pt_zoo/slice_of_large_base.pt", "a"),
    "integer-rows": bits_as_integers,
    "unread-object": torch_folder("hostile/lookup_only.pt", "t"),
    "record-checksum": torch_folder("hostile/crc_wrong.pt", "h"),
    "latent-location": latent_splits([[0, 0, 1], [0, 0, 4]]),
    "duplicate-latent": latent_splits([[0, 0, 1], [0, 0, 1]]),
    "token-range": cache(IDS, {"input_ids": [1, 9]}, metadata={"vocab_size": 9}),
    "mask-value": cache(IDS | {"assistant_masks": np.int32}, {"input_ids": [1, 2], "assistant_masks": [0, 2]}),
    "null-row": with_null,
    "end-marker": unended,
    "scale-value": scaled(np.nan, 3),
    "saturated-codes": scaled(0.5, 0x7E),
    "row-lengths-differ": cache(IDS | {"loss_weights": np.float32}, {"input_ids": [1, 2], "loss_weights": [1.0]}),
}
"""Datasets that raise the findings tested neither by golden datasets nor by test_verifying.py."""


@pytest.mark.parametrize("code", FINDINGS)
def test_these_findings_are_raised(code: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert code in actshard.verify(FINDINGS[code](tmp_path), deep=True).codes()


def overflow(folder: Path, patch: pytest.MonkeyPatch) -> None:
    store = actshard.open(written(folder, "zarr", np.full((1, 1, 1, 4), 1e6, np.float32)))
    store.sequence(0, 0, dtype="float16")


def no_example(folder: Path, patch: pytest.MonkeyPatch) -> None:
    store = actshard.open(SAEV)
    _ = store.table
    store.last_tokens(store.layers[0], np.zeros(0, np.int64))


def old_state(folder: Path, patch: pytest.MonkeyPatch) -> None:
    stream = actshard.open(SAEV).stream(5, 8, shuffle="window", memory=20_000)
    new = {"dataset", "format", "d_model", "stored", "units"}
    mine = stream.state_dict()["settings"]
    stream.load_state_dict(
        {"version": 1, "epoch": 0, "batch": 0, "settings": {k: v for k, v in mine.items() if k not in new}}
    )


def missing_lines(folder: Path, patch: pytest.MonkeyPatch) -> None:
    path = copied(GOLDEN / "zarr/single_consolidated/activations.zarr", folder)
    prompts = path / "text/prompts.jsonl"
    prompts.write_text(prompts.read_text().splitlines()[0] + "\n")
    _ = actshard.open(path).table


def changed_column(folder: Path, patch: pytest.MonkeyPatch) -> None:
    written(folder, "zarr", np.ones((1, 1, 1, 4), np.float32), columns={"x": [date(2026, 1, 1)]})


def numbers_and_texts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    actshard.create(folder / "named", "npy", layers=["last", 10], d_model=4).abort()


def many_files(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("actshard.formats.zarr.write.MANY_FILES", 3)
    written(folder, "zarr", np.ones((4, 1, 1, 4), np.float32))


def padded(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("actshard.formats.zarr.write.MUCH_PADDING", 100)
    with actshard.create(folder / "d", "zarr", layers=[0], d_model=4, t_max=16) as writer:
        writer.append(np.ones((4, 1, 16, 4), np.float32), lengths=[1, 2, 3, 16])


def parts_with_other_notes(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for note in "ab":
        with actshard.create(folder / note, "lmprobe", layers=[0], d_model=4, metadata={"note": note}) as writer:
            writer.append(np.ones((1, 1, 1, 4), np.float32))
    actshard.merge(folder / "m", [folder / "a", folder / "b"])


def plugin(folder: Path, patch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("nowhere", "no_such_module:FORMAT", registry.GROUP)]
    patch.setattr(importlib.metadata, "entry_points", lambda group: points)
    registry.installed.__wrapped__()


def truncating(folder: Path, patch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.enable_truncation(2)
    made.save(str(folder / "tokenizer.json"))
    tokens.load_tokenizer(folder / "tokenizer.json")


def no_eos(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    tokens.build_cache(folder / "a.jsonl", folder / "c", _tokenizer(folder))


def other_tokenizer(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "a.jsonl").write_text('{"text": "a a a"}\n')
    tokens.build_cache(folder / "a.jsonl", folder / "c/train", _tokenizer(folder), enforce_eos=False)
    component = tokens.DatasetComponent(cache_dir=str(folder / "c"))
    tokenizer = str(Path(__file__).parent / "golden/levanter/tokenizers/bpe_gpt2style")
    tokens.LmDataConfig(tokenizer=tokenizer, components={"a": component}).train_sets(2)


def _tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def unknown_revision(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(__import__("sys").modules, "huggingface_hub", None)
    tokens.HfDatasetSourceConfig(id="no/such")._version()


def skipped(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    tokens.build_cache(folder / "a.jsonl", folder / "c", _tokenizer(folder), on_error="skip", enforce_eos=False)


def no_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    Location.of_any("s3://bucket/run", {"anon": True}, folder / "file")


def exact_from_far(folder: Path, patch: pytest.MonkeyPatch) -> None:
    with actshard.create(
        folder / "made", "saev", layers=[0], d_model=4, num_examples=10, tokens_per_example=100
    ) as writer:
        writer.append(np.ones((10, 1, 100, 4), np.float32))
    with served(folder) as server:
        store = actshard.open(f"s3://made/{writer.path.name}", storage_options=server.options)
        assert sum(map(len, store.stream(0, 512, shuffle="exact", tokens="all"))) == 1000


def too_long(folder: Path, patch: pytest.MonkeyPatch) -> None:
    with actshard.create(folder / "d", "lmprobe", layers=[0], d_model=4) as writer:
        writer.append([np.ones((1, 3, 4), np.float32)])
    actshard.open(folder / "d").sequences_stream(0, 2, too_long="truncate")


def other_unfinished(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for metadata in ({}, {"dataset": "A"}):
        writer = actshard.create(folder, "saev", layers=[0], d_model=4, resume=True, metadata=metadata)
        writer.append(np.ones((1, 1, 1, 4), np.float32))
        writer.flush()
        writer.abort()


def captured(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Two examples and an empty one: NaN, and memory for one of them at a time."""

    def states(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, np.ndarray]:
        if len(ids) > 1:
            raise MemoryError
        return {0: np.full((*ids.shape, 4), np.nan, np.float32)}

    actshard.capture(states, [[1, 2], [], [3]], folder / "d", on_nonfinite="count")


def truncated_request(folder: Path, patch: pytest.MonkeyPatch) -> None:
    from actshard.compat import vllm

    shutil.copytree(GOLDEN / "draft/speculators_vllm_requests", folder / "requests")
    (folder / "requests/cmpl-zz-0.safetensors").write_bytes(b"\0" * 9)
    vllm.fold(folder / "requests", folder / "d", incomplete="skip")


def growing_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN / "draft/speculators_vllm_requests", folder / "requests")
    (folder / "requests/cmpl-zz-0.safetensors").write_bytes(b"\0" * 9)
    actshard.open(folder / "requests", incomplete="skip")


CALLS: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "overflow": overflow,
    "no-example-chosen": no_example,
    "state-without-dataset": old_state,
    "missing-lines": missing_lines,
    "column-type-changed": changed_column,
    "layer-names-changed": numbers_and_texts,
    "many-files": many_files,
    "padding": padded,
    "metadata-dropped": parts_with_other_notes,
    "plugin-not-used": plugin,
    "tokenizer-truncates": truncating,
    "no-eos": no_eos,
    "cache-settings": other_tokenizer,
    "unknown-revision": unknown_revision,
    "unused-setting": lambda folder, patch: tokens.LmDataConfig(chat_template="x"),
    "records-skipped": skipped,
    "disk-cache": no_cache,
    "remote-exact": exact_from_far,
    "sequences-too-long": too_long,
    "other-unfinished": other_unfinished,
    "examples-left-empty": captured,
    "non-finite-captured": captured,
    "batch-halved": captured,
    "requests-left-out": truncated_request,
    "examples-left-out": growing_folder,
}
"""Calls that warn."""


@pytest.mark.parametrize("code", CALLS)
def test_these_calls_warn(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[code](tmp_path, monkeypatch)
    assert code in {w.message.code for w in caught if isinstance(w.message, actshard.ActshardWarning)}


def test_every_code_is_raised_by_a_test() -> None:
    assert GOLDEN_CODES | CASE_CODES | FINDINGS.keys() == CODES.keys()
    assert CALLS.keys() == codes.calls().keys()


def _constants(tree: ast.AST | None) -> set[str]:
    """String values of an expression: both branches of a condition, but not the condition itself."""
    if isinstance(tree, ast.IfExp):
        return _constants(tree.body) | _constants(tree.orelse)
    return {tree.value} if isinstance(tree, ast.Constant) and isinstance(tree.value, str) else set()


def _raised(below: str = "") -> set[str]:
    """Codes that appear in the sources where they are raised."""
    found: set[str] = set()
    for path in (PACKAGE / below).rglob("*.py"):
        for call in nodes(path):
            if isinstance(call, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "code" for t in call.targets):
                found |= _constants(call.value)
            if not isinstance(call, ast.Call):
                continue
            found |= {text for key in call.keywords if key.arg == "code" for text in _constants(key.value)}
            if not call.args:
                continue
            to = call.func
            name = to.id if isinstance(to, ast.Name) else to.attr if isinstance(to, ast.Attribute) else None
            of = to.value.id if isinstance(to, ast.Attribute) and isinstance(to.value, ast.Name) else None
            if name in ("Remark", "_tell") or (name == "add" and of == "report"):
                found |= _constants(call.args[0])
            if name in ("error", "noting") and of == "report":
                found |= {text for arg in call.args[1:] for text in _constants(arg)}
    return found


def test_every_code_that_is_raised_is_declared() -> None:
    declared = CODES.keys() | codes.calls().keys()
    raised = _raised()
    assert len(raised) > 50
    assert raised <= declared
    assert set(_native.finding_codes()) <= CODES.keys()
    assert {code for cls in vars(actshard.base.errors).values() if (code := getattr(cls, "code", None))} <= declared
    with pytest.raises(actshard.InternalError, match="no-such-code"):
        actshard.Report(SAEV, None, False).add("no-such-code", SAEV, "x")


def test_a_format_raises_codes_of_its_own_and_general_ones_only() -> None:
    general = {code.name for group in codes.FINDINGS.values() for code in group} | {code.name for code in codes.CALLS}
    every = registry.installed().values()
    for format in every:
        own = {code.name for code in (*format.findings, *format.calls)}
        assert _raised(f"formats/{format.name}") <= general | own, format.name
    for below in ("verifying", "tokens", "writing", "converting", "cli", "compat"):
        assert _raised(below) <= general, below


def test_every_warning_has_a_code() -> None:
    made = 0
    for path in PACKAGE.rglob("*.py"):
        for call in nodes_of(path, ast.Call):
            # Not warnings.warn, which actshard.base.errors.warn calls.
            if ast.unparse(call.func) in ("warn", "errors.warn"):
                raised = ast.unparse(call)
                assert any(x.arg == "code" for x in call.keywords) or "OverflowWarning" in raised, f"{path}: {raised}"
                made += 1
    assert made > 20


def test_codes_are_declared_once_and_never_removed() -> None:
    every = [code for group in codes.FINDINGS.values() for code in group] + list(codes.CALLS)
    every += [code for format in registry.installed().values() for code in (*format.findings, *format.calls)]
    names = [code.name for code in every]
    assert len(set(names)) == len(names)
    found = {code.name: code.severity for code in every}
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {name: found.get(name) for name in recorded} == recorded, "codes are public: none is removed or changed"
    assert found == recorded, f"append new codes to {RECORD.name}"
    for code in every:
        for text in (code.meaning, code.consequence, code.remedy):
            assert text
            assert len(text.splitlines()) == 1


def test_a_remark_is_a_text_with_a_code() -> None:
    remark = Remark("claim", "num_prompts is 3")
    for same in (remark, copy.copy(remark), copy.deepcopy(remark), pickle.loads(pickle.dumps(remark))):
        assert (same, same.code, repr(same), f"{same}") == (
            "num_prompts is 3",
            "claim",
            "'num_prompts is 3'",
            "num_prompts is 3",
        )
    assert json.dumps([remark]) == '["num_prompts is 3"]'
    assert (remark.within("a"), remark.within("a").code) == ("a: num_prompts is 3", "claim")
    assert Remark.of("text").code == "reader-warning"
    assert Remark.of(remark) is remark


def test_warnings_and_errors_keep_their_codes_when_they_are_pickled() -> None:
    for made in (
        actshard.ActshardWarning("text", code="claim"),
        actshard.OverflowWarning("text"),
        actshard.FormatError("text", path="/a", code="metadata"),
        actshard.FormatError("text"),
        actshard.MissingFileError("text"),
        actshard.ArgumentError("text"),
    ):
        again = pickle.loads(pickle.dumps(made))
        assert (type(again), str(again), again.code) == (type(made), str(made), made.code)
    assert actshard.ActshardWarning("text").code is None


def test_opening_warns_with_the_codes_that_verify_reports(tmp_path: Path) -> None:
    path = copied(SAEV, tmp_path, "renamed")
    with pytest.warns(actshard.ActshardWarning, match="not the hash") as caught:
        store = actshard.open(path)
    assert [w.message.code for w in caught] == ["hash-mismatch"]  # type: ignore[union-attr]
    assert [w.code for w in store.warnings] == ["hash-mismatch"]
    assert pickle.loads(pickle.dumps(store)).warnings[0].code == "hash-mismatch"
    assert actshard.verify(path).codes() == {"hash-mismatch"}
