"""Folders of plain .npy and .safetensors files: numpy and safetensors read them without actshard, and they open again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from conftest import bits

FORMATS = ("npy", "safetensors")
WIDTH = 8
LAYERS = ([12, 3], ["ln_final", "blocks.5.hook_resid_post"])


def rows(lengths: list[int], dtype: Any = "float32", layers: int = 2) -> list[np.ndarray]:
    random = np.random.default_rng(len(lengths))
    return [random.standard_normal((layers, n, WIDTH)).astype(dtype) for n in lengths]


def columns(n: int) -> pa.Table:
    return pa.table(
        {
            "text": [None if i % 5 == 1 else f"text {i} é" for i in range(n)],
            "label": np.arange(n, dtype=np.int16),
            "token_ids": pa.array([[i, 2, 3] for i in range(n)], pa.list_(pa.int32(), 3)),
            "when": pa.array([i * 1_000_003 for i in range(n)], pa.timestamp("us")),
            "score": pa.array([i / 2 for i in range(n)], pa.float32()),
        }
    )


def write(path: Path, format: str, layers: list[Any], examples: list[np.ndarray], table: Any, **own: Any) -> Path:
    with actshard.create(path, format, layers=layers, d_model=WIDTH, **own) as writer:
        for first in range(0, len(examples), 3):
            part = slice(first, first + 3)
            writer.append(examples[part], columns=None if table is None else table[part])
            writer.flush()
    return writer.path


def read(path: Path) -> np.ndarray:
    """A file of rows or lengths, as people read it."""
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r", allow_pickle=False)
    from safetensors import numpy, safe_open

    with safe_open(path, "np") as file:  # bfloat16 too: the header is checked here, and the bits are read below
        assert list(file.keys()) == ["lengths" if path.stem == "lengths" else "activations"]
        if file.get_slice(next(iter(file.keys()))).get_dtype() != "BF16":
            made: np.ndarray = next(iter(numpy.load_file(path).values()))
            return made
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    (entry,) = json.loads(data[8 : 8 + size]).values()
    return np.frombuffer(data[8 + size :], ml_dtypes.bfloat16).reshape(entry["shape"])


CASES = [(format, dtype) for format in FORMATS for dtype in ("float16", "float32", "float64")]
CASES += [("safetensors", ml_dtypes.bfloat16)]


@pytest.mark.parametrize("layers", LAYERS, ids=["numbers", "texts"])
@pytest.mark.parametrize("lengths", [[5] * 7, [1] * 4, [3, 0, 7, 1], [0, 0], [2]], ids=str)
@pytest.mark.parametrize(("format", "dtype"), CASES)
def test_people_and_actshard_read_the_same(
    tmp_path: Path, format: str, dtype: Any, lengths: list[int], layers: list[Any], io: str
) -> None:
    examples, table = rows(lengths, dtype), columns(len(lengths))
    path = write(tmp_path / "d", format, layers, examples, table, metadata={"model": "gpt2"})
    store = actshard.open(path, io=io)
    assert (store.format, store.layers, store.d_model, store.warnings) == (format, tuple(layers), WIDTH, ())
    assert store.dtype == np.dtype(dtype)
    assert store.token_counts.tolist() == lengths
    assert store.metadata == {"model": "gpt2"}
    assert store.table.equals(table)
    for k, layer in enumerate(layers):
        found = read(path / "activations" / f"{layer}.{format}")
        whole = np.concatenate([example[k] for example in examples])
        same = len(set(lengths)) == 1 and lengths[0] > 0
        assert found.shape == ((len(lengths), lengths[0], WIDTH) if same and lengths[0] > 1 else (sum(lengths), WIDTH))
        assert np.array_equal(bits(found.reshape(-1, WIDTH)), bits(whole))
        for e, example in enumerate(examples):
            assert np.array_equal(bits(store.sequence(e, layer)), bits(example[k]))
    if not same:
        assert read(path / f"lengths.{format}").tolist() == lengths
    assert pq.read_table(path / "columns.parquet").equals(table)
    assert actshard.verify(path, deep=True).ok
    by_description = actshard.open(path, format="layout_toml")
    assert by_description.layers == store.layers
    assert by_description.table.equals(table)


@pytest.mark.parametrize("format", FORMATS)
def test_conversions_there_and_back_are_equal(tmp_path: Path, format: str) -> None:
    lengths = [3, 0, 7, 1, 5]
    examples, table = rows(lengths), columns(5)
    about = {"author": {"name": "x"}}
    path = write(tmp_path / "a", format, [3, 12], examples, table, metadata=about)
    for other in ("zarr", "npy", "safetensors", "hf_arrow"):
        actshard.convert(path, tmp_path / other, other, verify=True)
        back = actshard.open(actshard.convert(tmp_path / other, tmp_path / f"{other}-back", format, verify=True).path)
        assert (back.layers, back.metadata) == ((3, 12), about)
        for e, example in enumerate(examples):
            assert np.array_equal(back.sequence(e, 12), example[1])
        assert back.read_columns(["text", "label"]).to_pydict() == table.select(["text", "label"]).to_pydict()
        if other != "zarr":
            assert back.table.equals(table)


@pytest.mark.parametrize("format", FORMATS)
def test_a_finished_folder_is_recognized_and_another_is_refused(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "d", format, [3, 12], rows([2, 3]), None)
    with actshard.create(path, format, layers=[3, 12], d_model=WIDTH, exist_ok=True) as writer:
        assert writer.complete
    with pytest.raises(actshard.ExistsError):
        actshard.create(path, format, layers=[3, 12], d_model=WIDTH)
    with pytest.raises(actshard.ExistsError):
        actshard.create(path, next(f for f in FORMATS if f != format), layers=[3, 12], d_model=WIDTH)
    assert not (path / "columns.parquet").exists()
    assert not (path / "metadata.json").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_cut_is_named(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "d", format, [3, 12], rows([2, 3]), None)
    file = path / "activations" / f"12.{format}"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(actshard.ActshardError, match=f"12.{format}"):
        actshard.open(path).sequence(1, 12)
    assert not actshard.verify(path).ok


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_that_is_interrupted_while_it_finishes_continues(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call of the last steps: the result is the same, byte for byte."""
    from actshard.formats import plain_writing as module

    examples, table = rows([2, 3, 1, 4]), columns(4)

    def begin(path: Path) -> actshard.Writer:
        writer = actshard.create(path, format, layers=[3, 12], d_model=WIDTH, metadata={"a": 1}, resume=True)
        writer.append(examples, columns=table)
        writer.flush()
        return writer

    begin(tmp_path / "whole").close()
    want = {p: p.read_bytes() for p in sorted((tmp_path / "whole").rglob("*")) if p.is_file()}
    calls = 0

    def stopping(real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(5, "stopped here")
            return real(*args, **named)

        return call

    at = 1
    while True:
        path = tmp_path / f"stop{at}"
        writer = begin(path)
        calls = 0
        with monkeypatch.context() as patched:
            for name in ("whole_file", "write_bytes", "write_json", "sync_folders"):
                patched.setattr(module, name, stopping(getattr(module, name), at))
            patched.setattr(module.PlainTarget, "put", stopping(module.PlainTarget.put, at))
            try:
                writer.close()
            except OSError:
                stopped = True
            else:
                stopped = False
        if not stopped:
            break
        with pytest.raises(actshard.UnfinishedError):
            actshard.open(path)
        actshard.create(path, format, layers=[3, 12], d_model=WIDTH, metadata={"a": 1}, resume=True).close()
        found = {
            tmp_path / "whole" / p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
        }
        assert found == want
        shutil.rmtree(path)
        at += 1
    assert at >= 6


@pytest.mark.parametrize("values", [1 << 31, 1 << 32])
def test_rows_past_31_and_32_bits_of_values_are_theirs(tmp_path: Path, values: int, io: str) -> None:
    """A file with the header of a larger array, made sparse: up to 8 GiB."""
    from actshard.formats.npy.write import NpyTarget
    from actshard.formats.target import Spec

    width = 4096
    boundary = values // width
    own = NpyTarget(Spec(tmp_path, (5,), width, np.dtype("f2"), {}, None, None, None, None))
    with actshard.create(tmp_path / "d", "npy", layers=[5], d_model=width) as writer:
        writer.append(np.zeros((2, 1, width), np.float16))
    want = np.arange(10 * width, dtype=np.uint16).view(np.float16).reshape(10, width)
    with (tmp_path / "d/activations/5.npy").open("r+b") as file:
        file.write(own.header("activations", np.dtype("f2"), (boundary + 5, width)))
        file.seek(own.room + (boundary - 5) * width * 2)
        file.write(want.tobytes())
    store = actshard.open(tmp_path / "d", io=io)
    assert np.array_equal(bits(store.gather(5, np.arange(boundary - 5, boundary + 5), 0)), bits(want))
    assert np.array_equal(bits(np.load(tmp_path / "d/activations/5.npy", mmap_mode="r")[-10:]), bits(want))


def test_numbers_next_to_named_layers_become_strings_and_are_reported(tmp_path: Path) -> None:
    """Draft-model caches have numbered layers and "last"."""
    with actshard.create(tmp_path / "s", "zarr", layers=[1, 9, "last"], d_model=4) as writer:
        writer.append(np.arange(5 * 3 * 2 * 4, dtype=np.float32).reshape(5, 3, 2, 4))
    source = actshard.open(tmp_path / "s")
    done = actshard.convert(source, tmp_path / "d", "npy", verify=True)
    (loss,) = [loss for loss in done.losses if loss.what == "layers"]
    assert loss.detail.startswith("1, 9 become strings")
    store = actshard.open(tmp_path / "d")
    assert store.layers == ("1", "9", "last")
    for layer in source.layers:
        assert np.array_equal(store.sequence(3, str(layer)), source.sequence(3, layer))
    assert [loss.what for loss in actshard.convert(source, tmp_path / "n", "npy", layers=[1, 9]).losses] == []


def test_verify_counts_each_example_and_row_once(tmp_path: Path) -> None:
    path = write(tmp_path / "d", "npy", [2, 7], rows([3, 1, 5]), None)
    for deep in (False, True):
        checked = actshard.verify(path, deep=deep).checked
        assert checked["examples"] == 3
        assert checked.get("rows") == (9 * 2 if deep else None)


def test_unsupported_data_are_refused(tmp_path: Path) -> None:
    for format, own, said in (
        ("npy", {"dtype": "bfloat16"}, "because .npy files have no such type; safetensors files have"),
        (
            "npy",
            {"layers": [-1]},
            r"found -1; rename it, and list the layers that stay: convert\(layers=\{-1: 'name', \.\.\.\}\)",
        ),
        ("npy", {"layers": [3, "3"]}, "written differently"),
        ("safetensors", {"layers": ["a/b"]}, "names files by layer"),
        ("safetensors", {"layers": [".."]}, "names files by layer"),
        ("npy", {"part": (0, 2)}, "part: not supported"),
        ("npy", {"shard_bytes": 100}, "one file per layer"),
    ):
        with pytest.raises((actshard.ArgumentError, actshard.DtypeError), match=said):
            actshard.create(tmp_path / "d", format, **{"layers": [1], "d_model": 4} | own)
    writer = actshard.create(tmp_path / "d", "npy", layers=[1], d_model=4)
    with pytest.raises(actshard.ArgumentError, match="'logits_values': parquet has no BF16"):
        writer.append(np.zeros((2, 1, 3, 4)), logits=(np.zeros((2, 3), ml_dtypes.bfloat16), np.zeros((2, 3), np.int32)))
    writer.append(np.zeros((2, 1, 3, 4)))
    writer.close()
    assert np.load(tmp_path / "d/activations/1.npy").shape == (2, 3, 4)
