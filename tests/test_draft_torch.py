"""Draft-model examples in files of torch.save (SpecForge, AngelSlim, EAGLE, Model-Optimizer): golden data read bit for bit;
damaged and hostile files are refused by name, and never read as another example."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import refuses
from draft_files import DRAFT, Expected, broken, caches, check_reads, copied

FORMATS = {"specforge": "specforge", "angelslim": "angelslim", "eagle": "eagle_v1", "modelopt": "modelopt"}
CACHES = [pytest.param(name, path, id=path.name) for name, prefix in FORMATS.items() for path in caches(prefix)]
ERRORS = DRAFT / "errors"


def told(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "expected.json").read_text()))


def read(path: Path, io: str = "mmap", **more: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, io=io, **more)


def named(path: Path, io: str = "mmap") -> actshard.Store:
    """A golden folder, opened with names of layers if its files do not record the width of one."""
    n = told(path).get("n_aux", 0)
    has_last = "last" in np.load(path / "expected.npz")
    return read(path, io) if has_last else read(path, io, layout={"layers": list(range(n))})


@pytest.mark.parametrize(("format", "golden"), CACHES)
def test_golden_folders_read_bit_for_bit(format: str, golden: Path, io: str) -> None:
    store = named(golden, io)
    n = told(golden).get("n_aux", 0)
    assert (store.format, store.d_model, store.warnings) == (format, told(golden)["d_model"], ())
    assert store.layers == (*range(n), *(["last"] if "last" in np.load(golden / "expected.npz") else []))
    check_reads(store, Expected(golden))
    report = actshard.verify(golden, deep=True)
    assert report.ok, report.findings


@pytest.mark.parametrize(("format", "golden"), CACHES)
def test_examples_are_in_the_order_of_their_numbers(format: str, golden: Path) -> None:
    files = named(golden).table["file"].to_pylist()
    if "files" in told(golden):
        assert files == told(golden)["files"]
    else:
        assert [int(re.findall(r"data_(\d+)", name)[0]) for name in files] == list(range(len(files)))
        assert sorted(files) == told(golden)["files_as_original_sorts"]


def test_ids_of_conversations_are_columns() -> None:
    for name in ("modelopt_hf", "modelopt_vllm"):
        assert named(DRAFT / name).table["conversation_id"].to_pylist() == told(DRAFT / name)["conversation_ids"]


def test_layers_of_unknown_width_are_one_layer_until_they_are_named() -> None:
    path = DRAFT / "specforge_dflash_gz"
    with pytest.warns(actshard.ActshardWarning, match="do not record how many layers"):
        store = actshard.open(path)
    assert (store.layers, store.d_model) == ((0,), 120)
    split = read(path, layout={"layers": [1, 9, 17, 25, 33]})
    assert (split.layers, split.d_model) == ((1, 9, 17, 25, 33), 24)
    whole = store.sequence(3, 0).reshape(-1, 5, 24)
    for k, layer in enumerate(split.layers):
        assert np.array_equal(split.sequence(3, layer).view(np.uint16), whole[:, k].view(np.uint16))
    with pytest.raises(actshard.ArgumentError, match="divide 120 columns evenly, found 7"):
        read(path, layout={"layers": list(range(7))})
    with pytest.raises(actshard.ArgumentError, match="expected 3 layers, found"):
        read(DRAFT / "specforge_eagle3", layout={"layers": [1, 2]})
    assert read(DRAFT / "specforge_eagle3", layout={"layers": [2, 18, 33, "last"]}).layers == (2, 18, 33, "last")


def test_layouts_that_are_none_are_refused() -> None:
    with pytest.raises(actshard.ArgumentError, match="describe themselves"):
        read(DRAFT / "automodel_dspark", layout={"layers": [1]})
    with pytest.raises(actshard.ArgumentError, match="describe themselves"):
        read(DRAFT / "specforge_eagle3", format="specforge", layout={"layers": [1], "files": "x"})


REFUSED: dict[str, tuple[type[actshard.ActshardError], str]] = {
    "specforge_hostile_tensor": (actshard.UnsafePickleError, r"names the global __builtin__\.eval"),
    "specforge_missing_key": (
        actshard.FormatError,
        "hidden_state: expected a tensor, found none; the file has input_ids",
    ),
    "specforge_lengths_differ": (actshard.FormatError, "hidden_state: expected 3 tokens, as in input_ids, found 2"),
    "specforge_batch_of_two": (
        actshard.FormatError,
        r"hidden_state: expected a first axis of 1, found the shape \[2, 3",
    ),
    "specforge_truncated_gz": (actshard.FormatError, "the gzip data end too early"),
    "specforge_not_a_zip": (actshard.FormatError, r"expected a file of torch\.save"),
    "specforge_storage_short": (actshard.FormatError, "expected 72 elements of 2 bytes, found 128 bytes"),
    "specforge_storage_missing": (actshard.FormatError, "which the archive lacks"),
    "specforge_deflate_bomb": (actshard.FormatError, "expected 24 elements of 2 bytes, found 67108864 bytes"),
    "modelopt_lengths_differ": (actshard.FormatError, "loss_mask: expected 3 tokens, as in input_ids, found 7"),
}
"""Folders whose only file is damaged."""


@pytest.mark.parametrize("case", REFUSED)
def test_folders_without_a_readable_file_are_refused_by_its_fault(case: str) -> None:
    kind, said = REFUSED[case]
    path = ERRORS / case
    (file,) = [found for found in path.rglob("*") if found.is_file()]
    with refuses(kind, file, said):
        read(path, format=case.partition("_")[0])
    assert not actshard.verify(path).ok


FOREIGN = {
    "specforge_hostile_call": "note (posix.getcwd)",
    "specforge_hostile_gz": "note (posix.getcwd)",
    "specforge_class_only": "note (pathlib.PurePosixPath)",
    "modelopt_hostile": "conversation_id (posix.getcwd)",
}
"""Folders with an object next to the tensors that an unpickler would import, and what is said of it."""


@pytest.mark.parametrize("case", FOREIGN)
def test_an_object_next_to_the_tensors_is_named_and_not_built(case: str) -> None:
    store = read(ERRORS / case, format=case.partition("_")[0])
    assert np.isfinite(store.sequence(0, store.layers[0]).astype(np.float32)).all()
    report = actshard.verify(ERRORS / case, deep=True)
    assert report.ok
    (finding,) = (finding for finding in report.findings if finding.code == "unread-object")
    assert FOREIGN[case] in str(finding)


NAMED: dict[str, tuple[int, int, str, str]] = {
    "specforge_truncated": (2, 0, "expected the end record of a zip file", "data_0.ckpt"),
    "modelopt_no_hidden": (2, 0, "hidden_states: expected a tensor, found none", "conv-0.pt"),
    "angelslim_truncated": (3, 1, "expected the end record of a zip file", "data_1.ckpt"),
    "angelslim_no_target": (2, 0, "target_hiddens: expected a tensor, found none", "data_0.ckpt"),
}
"""Folders of which one file is damaged: examples, the damaged one, what is said, its file."""


@pytest.mark.parametrize("case", NAMED)
def test_a_damaged_example_is_named_and_its_place_is_never_that_of_another(case: str, io: str) -> None:
    n, bad, said, name = NAMED[case]
    with pytest.warns(actshard.ActshardWarning, match=f"{name}: {said}"):
        store = actshard.open(ERRORS / case, io=io)
    assert len(store) == n
    for i in set(range(n)) - {bad}:
        for layer in store.layers:
            assert store.sequence(i, layer).shape == (store.token_counts[i], 8)
    for attempt in (
        lambda: store.sequence(bad, "last"),
        lambda: store.sequences(range(n), 0),
        lambda: store.gather(0, bad, 0),
        lambda: store.last_tokens("last"),
        lambda: list(store.stream(0, 4)),
        lambda: list(store.stream("all", 4, shuffle="exact")),
    ):
        with pytest.raises(actshard.ActshardError, match=said) as caught:
            attempt()
        assert caught.value.path is not None
        assert Path(caught.value.path).name == name
    assert store.table["input_ids"].to_pylist()[bad] == []
    rest = store.filter([i for i in range(n) if i != bad])
    assert sum(len(batch.examples) for batch in rest.stream(0, 4)) == rest.token_counts.sum()
    report = actshard.verify(ERRORS / case)
    assert not report.ok
    assert name in " ".join(f.found for f in report.errors)


def test_an_example_in_two_files_is_told_and_read_once() -> None:
    with pytest.warns(
        actshard.ActshardWarning, match=r"data_0\.ckpt\.gz: contains example 0, as does data_0\.ckpt; not read"
    ):
        store = actshard.open(ERRORS / "specforge_twice")
    assert len(store) == 1
    assert "duplicate-sample" in actshard.verify(ERRORS / "specforge_twice").codes()


@pytest.mark.parametrize("case", ["specforge_deflated", "specforge_big_endian", "eagle_legacy_torch"])
def test_odd_but_sound_archives_are_read_as_torch_would(case: str, io: str) -> None:
    """The values are those of the formula of the golden data (seed 900). The record "byteorder" of the big-endian one was changed
    after writing: its elements are byte-swapped."""
    store = read(ERRORS / case, io)
    slots = {0: 2, 1: 5, 2: 2, "last": 60000} if len(store.layers) > 1 else {"last": 60000}
    assert store.layers == tuple(slots)
    for layer, slot in slots.items():
        found = store.sequence(0, layer)
        if case == "specforge_big_endian":
            found = found.view(np.uint16).byteswap().view(found.dtype)
        want = formula(900, 2 if case == "eagle_legacy_torch" else 0, slot, int(store.token_counts[0]), store.d_model)
        assert np.array_equal(found.astype(np.float64), want)


def formula(seed: int, p: int, slot: int, tokens: int, width: int) -> np.ndarray:
    t, d = np.meshgrid(np.arange(tokens, dtype=np.uint64), np.arange(width, dtype=np.uint64), indexing="ij")
    with np.errstate(over="ignore"):
        at = np.uint64((p << 48) | (slot << 32)) | (t << np.uint64(16)) | d
        h = mix(at ^ mix(np.uint64(seed)))
    return ((h >> np.uint64(56)).astype(np.float64) - 128) / 16


def mix(z: Any) -> Any:
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def test_parts_of_a_folder_open_by_themselves() -> None:
    assert read(DRAFT / "specforge_eagle3/rows_5-10").format == "specforge"
    assert read(DRAFT / "angelslim_eagle3/rank_1").format == "angelslim"
    assert read(DRAFT / "eagle_v1_vicuna/1").format == "eagle"
    assert len(read(DRAFT / "angelslim_dflash/shard_00001")) == 4


def test_other_torch_files_are_no_draft_examples(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    shutil.copy(DRAFT / "specforge_eagle3/vocab_mapping/vocab_mapping.pt", tmp_path / "0/data_0.ckpt")
    shutil.copy(DRAFT / "specforge_eagle3/vocab_mapping/vocab_mapping.pt", tmp_path / "model.pt")
    with pytest.raises(actshard.UnknownFormatError, match=r"other keys in model\.pt"):
        read(tmp_path)


def test_files_of_another_shape_are_named(tmp_path: Path) -> None:
    path = copied(DRAFT / "specforge_dspark", tmp_path / "cache")
    shutil.copy(DRAFT / "specforge_eagle3/rows_0-5/data_3.ckpt", path / "rows_4-8/data_9.ckpt")
    with pytest.warns(
        actshard.ActshardWarning, match=r"data_9.*expected hidden_states of 200 columns.*as in most files"
    ):
        store = actshard.open(path)
    assert len(store) == 7
    with pytest.raises(actshard.FormatError, match="as in most files"):
        store.sequence(6, 0)


def test_conversions_keep_every_bit_and_tell_what_has_no_place(tmp_path: Path) -> None:
    source = DRAFT / "modelopt_vllm"
    done = actshard.convert(named(source), tmp_path / "cache", "deepspec", verify=True)
    assert "conversation_id" in " ".join(loss.detail for loss in done.losses)
    store, want = read(done.path), Expected(source)
    assert store.layers == (0, 1, 2, 3, 4, "last")
    for layer in store.layers:
        assert np.array_equal(np.concatenate(store.sequences(range(4), layer)).view(np.uint16), want.bits(layer))
    for name in ("input_ids", "loss_mask"):
        assert np.array_equal(store.table[name].combine_chunks().flatten().to_numpy(), want.arrays[name])


def test_a_store_that_is_sent_to_another_process_keeps_its_names_of_layers() -> None:
    import pickle

    store = read(DRAFT / "angelslim_dflash", layout={"layers": [1, 9, 17, 25, 33]})
    back = pickle.loads(pickle.dumps(store))
    assert back.layers == store.layers
    assert np.array_equal(back.sequence(5, 17).view(np.uint16), store.sequence(5, 17).view(np.uint16))


def outcome(path: Path, format: str) -> str:
    """Reads everything: "read" or "refused", or what is wrong with the error."""
    try:
        store = read(path, format=format)
        for layer in store.layers:
            store.sequences(range(len(store)), layer)
        return "read" if len(store.table) == len(store) else "another table"
    except actshard.ActshardError as error:
        known = not isinstance(error, actshard.InternalError | actshard.FileAccessError)
        return "refused" if known and "\n" not in str(error) else repr(error)


@pytest.mark.parametrize(
    "golden", ["specforge_eagle3", "modelopt_vllm", "angelslim_dflash", "eagle_v1_vicuna", "speculators_fp8"]
)
def test_changed_bytes_are_read_or_refused_in_one_line(tmp_path: Path, golden: str) -> None:
    """A fixed seed; every change is undone before the next."""
    path = copied(DRAFT / golden, tmp_path / "cache")
    suffixes = (".ckpt", ".pt", ".safetensors", ".arrow", ".json")
    files = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
    random = np.random.default_rng(17)
    outcomes = set()
    for _ in range(80):
        file = files[random.integers(len(files))]
        sound = file.read_bytes()
        data = bytearray(sound)
        for _ in range(random.choice([1, 2, 8])):
            data[random.integers(len(data))] = random.choice([0, 255, random.integers(256)])
        if random.random() < 0.2:
            data = data[: random.integers(len(data))]
        file.write_bytes(data)
        outcomes.add(outcome(path, golden.partition("_")[0]))
        file.write_bytes(sound)
    assert outcomes == {"read", "refused"}


def test_every_golden_case_of_these_formats_is_tested() -> None:
    ours = {path.name for prefix in FORMATS for path in broken(prefix)}
    odd = {"specforge_twice", "specforge_deflated", "specforge_big_endian", "eagle_legacy_torch"}
    assert ours == set(REFUSED) | set(FOREIGN) | set(NAMED) | odd
