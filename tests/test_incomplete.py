"""``open(..., incomplete="skip")`` reads what is whole of a growing or damaged folder; detection does not depend on one file."""

from __future__ import annotations

import fcntl
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actshard
from actshard.formats.torch_zip import torch_bytes
from conftest import GOLDEN, refuses
from shell import run_command

DRAFTS = GOLDEN / "draft"
FOLDERS = {
    "speculators_bf16": "hidden_states/hs_{}.safetensors",
    "specforge_eagle3": "rows_*/data_{}.ckpt",
    "angelslim_eagle3": "rank_0/rows_*/data_{}.ckpt",
    "eagle_v1_vicuna": "0/data_{}.ckpt",
}
"""Golden folders whose files of states are numbered."""


def opened(path: Path, incomplete: str = "skip", format: str | None = None) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, format, incomplete=incomplete)  # type: ignore[arg-type]  # one of the two


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(DRAFTS / name, folder, copy_function=shutil.copyfile)
    return folder


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """The lock of a writer, as vLLM's connector holds it."""
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("name", FOLDERS)
def test_examples_that_are_not_whole_have_no_tokens_and_others_keep_their_numbers(name: str, tmp_path: Path) -> None:
    """The first file is empty, the second one truncated, the third one does not exist."""
    folder, whole = copied(name, tmp_path / "d"), opened(DRAFTS / name, "error")
    files = [next(folder.glob(FOLDERS[name].format(number))) for number in range(3)]
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-3])
    files[2].unlink()
    for store in (opened(folder), pickle.loads(pickle.dumps(opened(folder)))):
        assert store.token_counts.tolist() == [0, 0, 0, *whole.token_counts.tolist()[3:]]
        assert len(store.table) == len(whole)
        for layer in whole.layers:
            for example in range(3, len(whole)):
                assert np.array_equal(store.sequence(example, layer), whole.sequence(example, layer))
            assert len(store.sequence(0, layer)) == 0
        examples = np.concatenate([batch.examples for batch in store.stream(store.layers[0], 4)])
        assert examples.tolist() == np.repeat(range(len(whole)), store.token_counts).tolist()
    (remark,) = [warning for warning in opened(folder).warnings if warning.code == "examples-left-out"]
    assert remark.startswith(f"3 of {len(whole)} examples are left out")
    assert any(f"{files[1].name}: " in warning for warning in opened(folder).warnings), "names the files"
    with pytest.raises(actshard.ActshardError):
        opened(folder, "error").sequence(0, whole.layers[0])


def test_a_whole_folder_is_the_same_with_skip() -> None:
    for name in FOLDERS:
        store, whole = opened(DRAFTS / name), opened(DRAFTS / name, "error")
        assert store.token_counts.tolist() == whole.token_counts.tolist()
        assert store.warnings == whole.warnings


def test_a_file_whose_lock_is_held_is_being_written(tmp_path: Path) -> None:
    folder = copied("speculators_vllm_requests", tmp_path / "d")
    first, *others = sorted(folder.glob("*.safetensors"))
    first.with_name(f"{first.name}.lock").touch()
    assert not opened(folder, "error").warnings, "a lock that nobody holds is left from a writer that has ended"
    with locked(first):
        store = opened(folder)
        assert store.token_counts[0] == 0
        assert (store.token_counts[1:] > 0).all()
        assert len(store) == 1 + len(others)
        with pytest.raises(actshard.ActshardError, match=rf"{first.name}: is being written"):
            opened(folder, "error").sequence(0, store.layers[0])
    assert (opened(folder).token_counts > 0).all()


def safetensors_bytes(arrays: dict[str, Any]) -> bytes:
    """A file of float32 arrays."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values())


STATES = np.random.default_rng(5).normal(size=(24, 2, 5, 8)).astype(np.float32)


def shards(path: Path, format: str) -> tuple[Path, list[Path]]:
    """A dataset of 24 examples in at least three shards, and the shards in order; lmprobe: those of the first layer."""
    options: dict[str, Any] = {"num_examples": 24} if format == "saev" else {}
    options |= {"compress": False} if format == "pickle" else {}
    with actshard.create(path, format, layers=[3, 5], d_model=8, shard_bytes=2000, **options) as writer:
        for first in range(0, 24, 4):
            columns = {} if format == "saev" else {"label": np.arange(first, first + 4)}
            writer.append(STATES[first : first + 4], columns=columns)
    pattern = {"saev": "acts*.bin", "pickle": "*.pkl", "hf_arrow": "*.arrow", "lmprobe": "tensors/*003_shard*"}[format]
    return writer.path, sorted(writer.path.glob(pattern))


def check_left_out(path: Path, absent: list[int], labels: list[int | None] | None, count: int = 24) -> None:
    """Examples of ``absent`` have no tokens; all others have their numbers, rows and labels."""
    whole = sorted({*range(count)} - {*absent})
    for store in (opened(path), pickle.loads(pickle.dumps(opened(path)))):
        assert store.token_counts.tolist() == [0 if i in absent else 5 for i in range(count)]
        for number, layer in enumerate((3, 5)):
            for example in whole:
                assert np.array_equal(store.sequence(example, layer), STATES[example, number])
            assert np.array_equal(np.asarray(store.layer(layer).rows()), STATES[whole, number].reshape(-1, 8))
        for shuffle in (None, "window", "exact"):
            batches = list(store.stream(3, 7, shuffle=shuffle, drop_last=False))
            examples = np.concatenate([b.examples for b in batches])
            assert sorted(examples.tolist()) == np.repeat(whole, 5).tolist()
            rows = STATES[examples, 0, np.concatenate([b.tokens for b in batches])]
            assert np.array_equal(np.concatenate([b.activations for b in batches]), rows)
        assert store.filter(range(count)).token_counts.tolist() == store.token_counts.tolist()
        if labels is not None:
            assert store.table["label"].to_pylist() == labels
    assert [w.code for w in opened(path).warnings].count("examples-left-out") == bool(absent or count < 24)
    report = actshard.verify(path, incomplete="skip")
    assert report.ok, report.errors
    assert [f for f in report.findings if f.severity == "note" and f.path.suffix != ".json"]
    assert not actshard.verify(path).ok
    deep = actshard.verify(path, incomplete="skip", deep=True)
    assert deep.ok, deep.errors  # not compared with digests of all rows


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
@pytest.mark.parametrize("number", [1, -1])
@pytest.mark.parametrize("format", ["saev", "pickle", "lmprobe"])
def test_shards_that_are_not_whole_leave_out_their_examples(
    format: str, number: int, damage: str, tmp_path: Path
) -> None:
    path, files = shards(tmp_path / "d", format)
    assert len(files) > 2
    store = opened(path, "error")
    shard_ids = store.read_columns("token_shard_ids")[0].to_pylist() if format == "lmprobe" else []
    file = files[number]
    data = file.read_bytes()
    file.write_bytes(b"" if damage == "empty" else data[:-100])
    if damage == "missing":
        file.unlink()
    index = number % len(files)
    if format == "lmprobe":
        absent = [i for i, ids in enumerate(shard_ids) if index in ids]
    else:
        last = (index + 1) * 6
        absent = list(range(last - 1 if format == "saev" and damage == "cut" else last - 6, last))
    assert absent
    labels: list[int | None] = list(range(24))
    if format == "pickle":  # whose columns are in the shards
        labels = [None if i in absent else i for i in range(24)]
    check_left_out(path, absent, None if format == "saev" else labels)


def test_a_growing_dump_without_a_list_of_shards_is_read(tmp_path: Path) -> None:
    path, files = shards(tmp_path / "d", "saev")
    (path / "shards.json").unlink()
    files[-1].unlink()
    with pytest.raises(actshard.MissingFileError, match="expected a list of shards"):
        opened(path, "error")
    check_left_out(path, list(range(18, 24)), None)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_arrow_files_are_read_up_to_the_first_that_is_not_whole(damage: str, tmp_path: Path) -> None:
    """Numbers of examples in a missing file are not known."""
    path, files = shards(tmp_path / "d", "hf_arrow")
    counts = [len(opened(path, "error"))]
    files[2].write_bytes(b"" if damage == "empty" else files[2].read_bytes()[: files[2].stat().st_size // 2])
    if damage == "missing":
        files[2].unlink()
    with pytest.raises(actshard.ActshardError):
        opened(path, "error")
    store = opened(path)
    counts.append(len(store))
    assert 0 < counts[1] < counts[0] == 24
    check_left_out(path, [], list(range(counts[1])), counts[1])
    (remark,) = [w for w in store.warnings if w.code == "examples-left-out"]
    assert remark.startswith(f"{len(files) - 2} of {len(files)} files are left out, from {files[2].name} on: ")


def test_an_arrow_file_cut_between_its_batches_moves_no_later_example(tmp_path: Path) -> None:
    path, files = shards(tmp_path / "d", "hf_arrow")
    file = files[1]
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    ends = []
    with file.open("wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=1):
            writer.write_batch(batch)
            ends.append(out.tell())
    first = len(opened(path)) and sum(
        pa.ipc.open_stream(before.read_bytes()).read_all().num_rows for before in files[:1]
    )
    file.write_bytes(file.read_bytes()[: ends[0]])
    store = opened(path)
    assert len(store) == first + 1
    for example in range(len(store)):
        assert np.array_equal(store.sequence(example, 3), STATES[example, 0])
    assert f"after {file.name}, which has no end marker" in str(store.warnings)


@pytest.mark.parametrize("format", ["saev", "pickle", "lmprobe"])
def test_a_partial_dataset_is_selected_converted_and_not_extended(format: str, tmp_path: Path) -> None:
    path, files = shards(tmp_path / "d", format)
    opened(path, "error").extend_columns({"judge": np.arange(24)})
    files[-1].unlink()
    store = opened(path)
    assert store.table["judge"].to_pylist() == list(range(24))
    with pytest.raises(actshard.UnsupportedError, match="whole dataset"):
        store.extend_columns({"other": np.arange(24)})
    whole = np.flatnonzero(store.token_counts > 0)
    made = actshard.convert(store.filter(whole), tmp_path / "npy", "npy")
    for number, example in enumerate(whole):
        assert np.array_equal(actshard.open(made.path).sequence(number, 5), STATES[example, 1])
    with pytest.raises(actshard.ActshardError, match=r"lacks layer|tokens"):
        actshard.convert(store, tmp_path / "all", "zarr" if format == "pickle" else "saev")


def test_labels_of_examples_that_are_left_out_are_left_out(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "saev", layers=[3], d_model=8, num_examples=24, shard_bytes=2000) as writer:
        writer.append(STATES[:, :1], labels=np.tile(np.arange(5, dtype=np.uint8), (24, 1)))
    sorted(writer.path.glob("acts*.bin"))[0].unlink()
    store = opened(writer.path)
    batches = list(store.stream(3, 7, ignore_labels=[0, 2], drop_last=False))
    examples, tokens = (np.concatenate([getattr(b, name) for b in batches]) for name in ("examples", "tokens"))
    assert set(tokens.tolist()) == {1, 3, 4}
    assert set(examples.tolist()) == set(np.flatnonzero(store.token_counts > 0).tolist())
    assert np.array_equal(np.concatenate([b.activations for b in batches]), STATES[examples, 0, tokens])


def test_examples_that_are_left_out_have_no_content(tmp_path: Path) -> None:
    lengths = np.arange(24) % 5 + 1
    options: dict[str, Any] = {"num_examples": 24, "shard_bytes": 2000, "pad": True, "tokens_per_example": 5}
    with actshard.create(tmp_path / "d", "saev", layers=[3], d_model=8, **options) as writer:
        writer.append([x[:1, :n] for x, n in zip(STATES, lengths.tolist(), strict=True)])
    sorted(writer.path.glob("acts0*.bin"))[0].unlink()
    store = opened(writer.path)
    assert store.content_lengths is not None
    assert store.content_lengths.tolist() == np.where(store.token_counts > 0, lengths, 0).tolist()
    assert 0 in store.content_lengths.tolist()
    assert store.stream(3, 7).num_rows == store.content_lengths.sum()


def test_nothing_whole_is_an_error(tmp_path: Path) -> None:
    for format in ("saev", "pickle", "lmprobe", "hf_arrow"):
        path, files = shards(tmp_path / format, format)
        for file in files:
            file.unlink()
        with pytest.raises((actshard.FormatError, actshard.MissingFileError), match=r"none|nothing"):
            opened(path)


def test_commands_read_what_is_whole(tmp_path: Path) -> None:
    path, files = shards(tmp_path / "d", "pickle")
    files[-1].unlink()
    for verb in ("info", "head", "verify"):
        assert verb == "head" or run_command(verb, path).returncode != 0
        done = run_command(verb, path, "--incomplete", "skip", "--json")
        assert done.returncode == 0, done.stderr
    done = run_command("info", path, "--incomplete", "skip")
    assert "6 of 24 examples are left out" in done.stdout


def test_other_formats_refuse_skip_and_give_the_reason(tmp_path: Path) -> None:
    message = 'incomplete: "skip" is supported for .*speculators.*, not for deepspec: its files do not record'
    with refuses(actshard.ArgumentError, tmp_path, message):
        actshard.open(tmp_path, "deepspec", incomplete="skip")
    for verb in (actshard.open, actshard.verify):
        with pytest.raises(actshard.ArgumentError, match="incomplete: expected 'error' or 'skip', found 'no'"):
            verb(tmp_path, incomplete="no")  # type: ignore[operator]  # wrong on purpose


# -- folders of plain files, and Zarr ------------------------------------------------------------------------------------


def damaged(file: Path, damage: str) -> None:
    """A file that is missing, empty or cut."""
    data = file.read_bytes()
    file.write_bytes(b"" if damage == "empty" else data[: -len(data) // 3])
    if damage == "missing":
        file.unlink()


def check_described(folder: Path, layout: Any, absent: list[int], columns: dict[str, list[Any]]) -> actshard.Store:
    """As :func:`check_left_out`, for 12 examples of 5 tokens of layer 3 of :data:`STATES`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(folder, layout=layout, incomplete="skip")
    assert store.token_counts.tolist() == [0 if i in absent else 5 for i in range(12)]
    whole = sorted({*range(12)} - {*absent})
    for example in whole:
        assert np.array_equal(store.sequence(example, store.layers[0]), STATES[example, 0])
    batches = list(store.stream(store.layers[0], 7, shuffle="window", drop_last=False))
    examples, tokens = (np.concatenate([getattr(b, name) for b in batches]) for name in ("examples", "tokens"))
    assert sorted(examples.tolist()) == np.repeat(whole, 5).tolist()
    assert np.array_equal(np.concatenate([b.activations for b in batches]), STATES[examples, 0, tokens])
    (remark,) = [w for w in store.warnings if w.code == "examples-left-out"]
    assert remark.startswith(f"{len(absent)} of 12 examples ")
    assert {name: store.table[name].to_pylist() for name in columns} == columns
    report = actshard.verify(folder, layout=layout, incomplete="skip")
    assert report.ok, report.errors
    return store


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
@pytest.mark.parametrize("ending", [".npy", ".pt", ".safetensors"])
def test_described_examples_that_are_not_whole_keep_their_numbers(ending: str, damage: str, tmp_path: Path) -> None:
    labels = list(range(12))
    for i in range(12):
        file = tmp_path / f"{i}{ending}"
        if ending == ".npy":
            np.save(file, STATES[i, 0])
        elif ending == ".pt":
            file.write_bytes(torch_bytes({"h": STATES[i, 0], "label": i}))
        else:
            file.write_bytes(safetensors_bytes({"h": STATES[i, 0]}))
    np.save(tmp_path / "shared.npy", np.arange(12))
    columns: list[dict[str, Any]] = [{"file": "shared.npy", "name": "shared"}]
    columns += [{"tensor": "label"}] if ending == ".pt" else []
    activations = {"files": f"{{example:d}}{ending}", "axes": ["token", "dim"], "layers": [3]}
    activations |= {} if ending == ".npy" else {"tensor": "h"}
    layout = {"version": 1, "activations": activations, "columns": columns}
    for number in (2, 7):
        damaged(tmp_path / f"{number}{ending}", damage)
    expected: dict[str, list[Any]] = {"shared": labels, "example": labels}
    expected |= {"label": [None if i in (2, 7) else i for i in labels]} if ending == ".pt" else {}
    store = check_described(tmp_path, layout, [2, 7], expected)
    assert "2" + ending in str(store.warnings)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_described_batches_that_are_not_whole_keep_the_numbers_of_others(damage: str, tmp_path: Path) -> None:
    for batch in range(4):
        value = {"h": STATES[3 * batch : 3 * batch + 3, 0], "labels": list(range(3 * batch, 3 * batch + 3))}
        (tmp_path / f"batch_{batch}.pt").write_bytes(torch_bytes(value))
    layout = {
        "version": 1,
        "activations": {
            "files": "batch_{batch:d}.pt",
            "tensor": "h",
            "axes": ["example", "token", "dim"],
            "layers": [3],
        },
        "columns": [{"tensor": "labels"}],
    }
    damaged(tmp_path / "batch_1.pt", damage)
    labels: list[int | None] = [None if i in (3, 4, 5) else i for i in range(12)]
    check_described(tmp_path, layout, [3, 4, 5], {"labels": labels})


def test_batches_of_unknown_numbers_of_examples_end_the_dataset(tmp_path: Path) -> None:
    for batch, (first, last) in enumerate(((0, 3), (3, 5), (5, 9), (9, 12))):
        (tmp_path / f"batch_{batch}.pt").write_bytes(torch_bytes({"h": STATES[first:last, 0]}))
    np.save(tmp_path / "labels.npy", np.arange(12))
    layout = {
        "version": 1,
        "activations": {
            "files": "batch_{batch:d}.pt",
            "tensor": "h",
            "axes": ["example", "token", "dim"],
            "layers": [3],
        },
        "columns": [{"file": "labels.npy"}],
    }
    (tmp_path / "batch_2.pt").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(tmp_path, layout=layout, incomplete="skip")
    assert len(store) == 5
    assert store.table["labels"].to_pylist() == list(range(5))
    (remark,) = [w for w in store.warnings if w.code == "examples-left-out"]
    assert remark.startswith("2 of 4 groups of files are left out, from batch_2.pt on (batch_2.pt: ")


@pytest.mark.parametrize("format", ["npy", "safetensors"])
def test_examples_beyond_the_end_of_a_plain_file_are_left_out(format: str, tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", format, layers=[3, 5], d_model=8) as writer:
        writer.append(STATES, columns={"label": np.arange(24)})
    files = (
        sorted((writer.path / "activations").iterdir())
        if format == "npy"
        else sorted(writer.path.rglob("*.safetensors"))
    )
    file = files[-1]
    file.write_bytes(file.read_bytes()[: -2 * 5 * 8 * 4 - 4])
    check_left_out(writer.path, [21, 22, 23], list(range(24)))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
@pytest.mark.parametrize("version", [2, 3])
def test_samples_without_a_whole_chunk_are_left_out(version: int, damage: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"version": 3, "shard_bytes": 2000} if version == 3 else {}
    with actshard.create(tmp_path / "d.zarr", "zarr", layers=[3, 5], d_model=8, **options) as writer:
        writer.append(STATES, columns={"label": np.arange(24)})
    array = writer.path / "arrays/activations"
    file = sorted(array.glob("c.1.0.*" if version == 3 else "4.1.*"))[0]
    meta = json.loads((array / "zarr.json").read_text()) if version == 3 else {}
    per_file = meta["chunk_grid"]["configuration"]["chunk_shape"][0] if meta else 1
    damaged(file, damage)
    absent = list(range(per_file, 2 * per_file)) if version == 3 else [4]
    check_left_out(writer.path, absent, list(range(24)))


def test_samples_without_lengths_are_left_out(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d.zarr", "zarr", layers=[3, 5], d_model=8) as writer:
        writer.append(STATES)
    for file in (writer.path / "arrays/seq_len").glob("[0-9]*"):
        file.unlink()
    with pytest.raises(actshard.FormatError, match="expected at least one whole example, found none of 24"):
        opened(writer.path)


def test_errors_name_examples_by_their_numbers(tmp_path: Path) -> None:
    for format in ("saev", "pickle"):
        path, files = shards(tmp_path / format, format)
        files[1].unlink()
        store = opened(path)
        for example in (20, 7):
            with pytest.raises(actshard.OutOfRangeError) as caught:
                store.gather(3, example, 11)
            text = str(caught.value)
            assert "numbered as in" not in text
            shift = int(text.partition("(add ")[2].partition(" ")[0] or 0)
            assert f"example {example - shift} has " in text


def test_numbers_far_apart_are_refused(tmp_path: Path) -> None:
    folder = copied("specforge_eagle3", tmp_path / "d")
    file = next(folder.glob("rows_*/data_0.ckpt"))
    shutil.copyfile(file, file.with_name("data_4000000.ckpt"))
    with refuses(actshard.FormatError, folder, "expected at most 65,536 missing numbers, found 3,999,9"):
        opened(folder)


@pytest.mark.parametrize("name", ["modelopt_hf", "speculators_vllm_requests"])
def test_the_first_names_do_not_decide(name: str, tmp_path: Path) -> None:
    """Four files that are being written, and one of another program, come before the others."""
    folder = copied(name, tmp_path / "d")
    ending = ".pt" if name == "modelopt_hf" else ".safetensors"
    files = sorted(folder.glob(f"*{ending}"))
    for number in range(6):
        (folder / f"0{number}{ending}").write_bytes(b"")
    foreign = DRAFTS.parent / "containers"
    other = foreign / "pt_layer_files_f32" if ending == ".pt" else foreign / "st_layer_files_fp8"
    shutil.copyfile(next(other.rglob(f"*{ending}")), folder / f"06{ending}")
    assert len(files) > 2
    store = opened(folder)
    assert store.format == opened(DRAFTS / name, "error").format
    assert (store.token_counts > 0).sum() == len(files)
