"""Chunks of Llamascopium: golden data read bit for bit, both containers, hostile and broken folders."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits

FOLDER = GOLDEN / "llamascopium"
PLAIN = FOLDER / "chunks_safetensors_bf16/cache"
TORCH = FOLDER / "chunks_pt_stacked_f32/cache"
HOOK = "blocks.4.hook_resid_post"


def quietly(path: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


@pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda p: p.name)
def test_golden_chunks_come_back(folder: Path, io: str) -> None:
    said = json.loads((folder / "expected.json").read_text())
    z = np.load(folder / "expected.npz")
    store = actshard.open(folder / "cache", io=io)
    assert (store.format, store.warnings, len(store)) == ("llamascopium", (), said["examples"])
    assert store.layers == tuple(sorted(said["hooks"], key=said["hooks"].__getitem__))
    assert store.token_counts.tolist() == z["lengths"].tolist()
    ends = np.cumsum(z["lengths"])
    for layer in store.layers:
        want = z[f"{layer}_bits"] if f"{layer}_bits" in z else bits(z[layer])
        for i, rows in enumerate(np.split(want, ends[:-1])):
            assert np.array_equal(bits(store.sequence(i, layer)), rows)
        for shuffle in (None, "exact"):
            batches = list(store.stream(layer, 7, shuffle=shuffle))
            at = np.concatenate([(ends - z["lengths"])[b.examples] + b.tokens for b in batches])
            assert np.array_equal(bits(np.concatenate([b.activations for b in batches])), want[at])
            assert sorted(at.tolist()) == list(range(len(want)))
        alone = actshard.open(folder / "cache" / str(layer), io=io)
        assert np.array_equal(bits(alone.last_tokens(layer)), want[ends - 1])
    for name in ("tokens", "mask", "attention_mask"):
        assert np.concatenate(store.table[name].to_pylist()).tolist() == z[name].tolist()
    for i, meta in enumerate(said.get("meta", [])):
        assert store.table.slice(i, 1).select(list(meta)).to_pylist() == [meta]
        assert store.read_columns(list(meta), [i]).to_pylist() == [meta]
    assert actshard.verify(folder / "cache", deep=True).findings == []


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PLAIN, tmp_path / "cache"))


def header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    value = json.loads(data[8 : 8 + n])
    change(value)
    text = json.dumps(value).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])


def of(folder: Path, number: int, hook: str = HOOK) -> Path:
    return folder / hook / f"chunk-{number:08d}.safetensors"


def test_shards_of_several_processes_follow_their_numbers(plain: Path) -> None:
    """Shard numbers are not padded: 10 follows 9."""
    for hook in plain.iterdir():
        for number, name in (
            (0, "shard-10-chunk-00000000"),
            (1, "shard-9-chunk-00000001"),
            (2, "shard-9-chunk-00000000"),
        ):
            for suffix in (".safetensors", ".meta.json"):
                (hook / f"chunk-{number:08d}{suffix}").rename(hook / f"{name}{suffix}")
    before, after = actshard.open(PLAIN), actshard.open(plain)
    assert before.token_counts.tolist()[-1:] + before.token_counts.tolist()[3:5] == after.token_counts.tolist()[:3]
    assert np.array_equal(bits(after.sequence(0, HOOK)), bits(before.sequence(5, HOOK)))
    assert after.table["text"].to_pylist()[0] == before.table["text"].to_pylist()[5]


def test_tokens_that_were_cast_to_floats_are_no_column(plain: Path) -> None:
    """override_dtype rounds ids above 256."""
    for hook in plain.iterdir():
        for number in range(3):
            path = of(plain, number, hook.name)
            data = path.read_bytes()
            (n,) = struct.unpack("<Q", data[:8])
            value = json.loads(data[8 : 8 + n])
            arrays, at, body = {}, 0, b""
            for name, each in value.items():
                raw = data[8 + n + each["data_offsets"][0] : 8 + n + each["data_offsets"][1]]
                if name == "tokens":
                    raw, each["dtype"] = np.frombuffer(raw, "<i8").astype("<f4").tobytes(), "F32"
                arrays[name] = each | {"data_offsets": [at, at + len(raw)]}
                at, body = at + len(raw), body + raw
            text = json.dumps(arrays).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    store = quietly(plain)
    assert "tokens were cast to float32 by override_dtype" in str(store.warnings[0])
    assert "tokens" not in store.table.column_names
    assert np.array_equal(bits(store.sequence(1, HOOK)), bits(actshard.open(PLAIN).sequence(1, HOOK)))


BROKEN: dict[str, tuple[Callable[[Path], object], type[actshard.ActshardError], str]] = {
    "hook points of unequal counts": (
        lambda d: of(d, 2).unlink(),
        actshard.MissingFileError,
        "expected chunk 2, which other hook points have",
    ),
    "two files of one chunk": (
        lambda d: (d / HOOK / "chunk-00000001.pt").write_bytes(b""),
        actshard.FormatError,
        "have the same chunk number",
    ),
    "a killed writer": (
        lambda d: of(d, 2).write_bytes(of(d, 2).read_bytes()[:-9]),
        actshard.ActshardError,
        "chunk-00000002.safetensors",
    ),
    "no tokens": (
        lambda d: header(of(d, 0), lambda h: h.update(other=h.pop("tokens"))),
        actshard.FormatError,
        "expected a tensor 'tokens'",
    ),
    "tokens of another shape": (
        lambda d: header(of(d, 0), lambda h: h["tokens"].update(shape=[1, *h["tokens"]["shape"]])),
        actshard.FormatError,
        "activation: expected the shape of tokens",
    ),
    "a mask of another shape": (
        lambda d: header(of(d, 0), lambda h: h["mask"].update(shape=h["mask"]["shape"][::-1])),
        actshard.FormatError,
        "mask: expected",
    ),
    "another dtype": (
        lambda d: header(of(d, 0), lambda h: h["activation"].update(dtype="F16")),
        actshard.FormatError,
        "activation: expected",
    ),
    "another shape than other hooks": (
        lambda d: [
            header(
                of(d, 0),
                lambda h, name=name: h[name].update(shape=[*h[name]["shape"][:2][::-1], *h[name]["shape"][2:]]),
            )
            for name in ("tokens",)
        ],
        actshard.FormatError,
        "expected the shape",
    ),
    "torch that runs code": (
        lambda d: (of(d, 0).unlink(), (d / HOOK / "chunk-00000000.pt").write_bytes(b"cos\nsystem\n(S'x'\ntR.")),
        actshard.ActshardError,
        "chunk-00000000.pt",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(case: str, plain: Path) -> None:
    spoil, kind, message = BROKEN[case]
    spoil(plain)
    with pytest.raises(kind) as caught:
        quietly(plain)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not actshard.verify(plain).ok


def test_metadata_must_have_an_object_per_sequence(plain: Path) -> None:
    hook = actshard.open(plain).layers[0]
    path = plain / str(hook) / "chunk-00000001.meta.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value[1:]))
    with pytest.raises(actshard.FormatError, match="expected 2 objects, one per sequence, found 1"):
        actshard.open(plain).table  # noqa: B018 -- reads the metadata
    assert not actshard.verify(plain).ok
    path.write_text(json.dumps([each | {"more": 1} for each in value]))
    with pytest.raises(actshard.FormatError, match="expected the fields of the first chunk, found 'more'"):
        actshard.open(plain).table  # noqa: B018 -- reads the metadata


def test_verify_compares_tokens_of_hook_points(plain: Path) -> None:
    path = of(plain, 1, str(actshard.open(plain).layers[1]))
    data = bytearray(path.read_bytes())
    (n,) = struct.unpack("<Q", data[:8])
    value = json.loads(data[8 : 8 + n])
    data[8 + n + value["tokens"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    findings = actshard.verify(plain).findings
    assert [(finding.code, finding.path) for finding in findings] == [("claim", path)]


def test_conversion_keeps_sequences(tmp_path: Path) -> None:
    actshard.convert(TORCH, tmp_path / "z", "zarr")
    before, after = actshard.open(TORCH), actshard.open(tmp_path / "z")
    for i in range(len(before)):
        for mine, theirs in zip(before.layers, after.layers, strict=True):
            assert np.array_equal(bits(after.sequence(i, theirs)), bits(before.sequence(i, mine)))
    assert after.read_columns(["text"]).column(0).to_pylist() == before.table["text"].to_pylist()


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (0, "1 of 3 chunks is missing: chunk-00000000.safetensors"),
        (1, "1 of 3 chunks is missing: chunk-00000001.safetensors"),
    ],
)
def test_a_chunk_that_all_hook_points_lack_is_told(lost: int, named: str, plain: Path) -> None:
    """Later sequences took the numbers of the lost ones, without a word."""
    for hook in plain.iterdir():
        of(plain, lost, hook.name).unlink()
    assert named in str(quietly(plain).warnings[0])
    assert "missing-file" in actshard.verify(plain).codes()
