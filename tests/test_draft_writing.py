"""Draft-model caches written by conversions and by create(): every pair of formats, bit for bit, or refused with the reason."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
from draft_files import DRAFT, opened

BF16 = ml_dtypes.bfloat16
FILES = ("specforge", "modelopt", "angelslim", "eagle")
"""Formats with a file of torch.save per example."""
MODEL = {"target_model": "m", "target_model_type": "qwen3", "target_vocab_size": 1 << 20, "num_hidden_layers": 40}
"""What Automodel's manifest tells of the target model."""
TARGETS: dict[str, dict[str, Any]] = {
    "deepspec": {},
    "speculators": {},
    "automodel": {"metadata": MODEL, "pad": True},
    **{name: {} for name in FILES},
}
"""Formats, and what a conversion to each needs."""
SOURCES = {path.parent.name: path.parent for path in sorted(DRAFT.glob("*/expected.npz"))}
AGAIN: dict[str, dict[str, Any]] = {
    "specforge_eagle3": {"file_group_size": 5},
    "specforge_dspark": {"file_group_size": 4},
    "specforge_dflash_gz": {"gz": True},
    "modelopt_hf": {},
    "modelopt_vllm": {},
    "angelslim_eagle3": {"file_group_size": 5},
    "angelslim_dflash": {"file_group_size": 3},
    "eagle_v1_vicuna": {},
    "eagle_v1_qwen2": {},
}
"""Options that the original wrote with."""
REASONS = {
    "DSpark caches store the last hidden state: name a layer 'last'": lambda source, target: (
        "last" not in source.layers
    ),
    "stores the last hidden state: name a layer 'last'": lambda source, target: "last" not in source.layers,
    "version 2 stores the last hidden state": lambda source, target: (
        "last" not in source.layers and target == "deepspec"
    ),
    "eagle stores the last hidden state only": lambda source, target: len(source.layers) > 1 and target == "eagle",
    "stores other layers besides the last": lambda source, target: (
        source.layers == ("last",) and target not in FILES[1::2]
    ),
    "deepspec supports bfloat16, not float16": lambda source, target: (
        source.dtype == np.float16 and target == "deepspec"
    ),
}
"""Refusals of whole datasets, and when each is right."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty folder, in memory where that can be: each of thousands of files is synced to the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def tensors(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Files of examples in order of their numbers, each with its value."""
    from actshard.base.containers import StoredArray, read_torch
    from actshard.base.location import Location

    store = opened(path)
    names = store.table["file"].to_pylist()
    made = []
    for name, file in zip(names, read_torch([Location.at(path / name) for name in names]), strict=True):
        value = {key: file.array(each) if isinstance(each, StoredArray) else each for key, each in file.value.items()}
        made.append((name, value))
    return made


def equal_rows(a: actshard.Store, b: actshard.Store) -> None:
    """Layers by position have equal rows, bit for bit, without the padding."""
    lengths = [min(n, m) for n, m in zip(a.token_counts, b.token_counts, strict=True)]
    for first, second in zip(a.layers, b.layers, strict=True):
        for i, n in enumerate(lengths):
            assert np.array_equal(a.sequence(i, first)[:n].view(np.uint16), b.sequence(i, second)[:n].view(np.uint16))


@pytest.mark.parametrize("name", AGAIN)
def test_a_golden_folder_written_again_has_equal_tensors(tmp_path: Path, name: str) -> None:
    format, source = name.partition("_")[0], SOURCES[name]
    done = actshard.convert(opened(source), tmp_path / "again", format, verify=True, **AGAIN[name])  # type: ignore[arg-type]  # options by name
    assert [loss.what for loss in done.losses] == ["columns"]
    assert done.losses[0].detail == f"{format} has no place for them: file"
    found, wanted = tensors(done.path), tensors(source)
    for (_, mine), (_, theirs) in zip(found, wanted, strict=True):
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            if isinstance(value, np.ndarray):
                assert (mine[key].dtype, mine[key].shape) == (value.dtype, value.shape)
                assert mine[key].tobytes() == value.tobytes()
            else:
                assert mine[key] == value
    assert actshard.verify(done.path, deep=True).ok


@pytest.mark.parametrize("name", ["specforge_eagle3", "specforge_dspark", "specforge_dflash_gz", "modelopt_hf"])
def test_files_are_those_of_the_original_byte_for_byte(tmp_path: Path, name: str) -> None:
    source = SOURCES[name]
    done = actshard.convert(opened(source), tmp_path / "again", name.partition("_")[0], **AGAIN[name])  # type: ignore[arg-type]  # options by name
    originals = [source / file for file in opened(source).table["file"].to_pylist()]
    for file, original in zip(opened(done.path).table["file"].to_pylist(), originals, strict=True):
        inflated = [
            gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()
            for p in (done.path / file, original)
        ]
        assert inflated[0] == inflated[1]
        if name.startswith("specforge"):
            assert file == original.relative_to(source).as_posix()


def test_ranks_and_repeated_runs_become_one_folder_in_order(tmp_path: Path) -> None:
    done = actshard.convert(SOURCES["angelslim_eagle3"], tmp_path / "one", "angelslim", file_group_size=5)
    files = [name for name, _ in tensors(done.path)]
    assert files == [f"rank_0/rows_{i // 5 * 5}-{i // 5 * 5 + 5}/data_{i}.ckpt" for i in range(13)]
    equal_rows(opened(done.path), opened(SOURCES["angelslim_eagle3"]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SOURCES)
def test_any_two_formats(tmp_path: Path, name: str, target: str) -> None:
    """Equal rows, ids and masks, and every change told; or a refusal whose reason holds."""
    source = opened(SOURCES[name])
    try:
        done = actshard.convert(source, tmp_path / "made", target, verify=True, **TARGETS[target])  # type: ignore[arg-type]  # options by name
    except actshard.ActshardError as error:
        said = str(error)
        assert "\n" not in said
        (right,) = {reason(source, target) for text, reason in REASONS.items() if text in said} or {None}
        assert right, said
        assert not (tmp_path / "made").exists()
        return
    losses = " ".join(map(str, done.losses))
    store = opened(done.path)
    assert len(store) == len(source)
    if store.layers != source.layers:
        assert target in FILES
        assert "does not record their n" in losses
        store = actshard.open(done.path, layout={"layers": list(source.layers)})
        assert store.layers == source.layers
    assert store.d_model == source.d_model
    equal_rows(store, source)
    ids, wanted = store.table["input_ids"].to_pylist(), source.table["input_ids"].to_pylist()
    lengths = [min(map(len, both)) for both in zip(ids, wanted, strict=True)]
    assert [each[:n] for each, n in zip(ids, lengths, strict=True)] == [
        each[:n] for each, n in zip(wanted, lengths, strict=True)
    ]
    padding = [value for each, n in zip(ids, lengths, strict=True) for value in each[n:]]
    assert set(padding) <= {0}
    assert bool(padding) == ("padding" in losses)
    for mask in ("loss_mask", "attention_mask"):
        mine, theirs = mask in store.table.column_names, mask in source.table.column_names
        if mine and theirs:
            for a, b, n in zip(store.table[mask].to_pylist(), source.table[mask].to_pylist(), lengths, strict=True):
                assert a == b[:n] + [0] * (len(a) - n)
        elif mine:
            assert f"the source has no {mask}: it is written as ones" in losses
            for each, n in zip(store.table[mask].to_pylist(), lengths, strict=True):
                assert each == [1] * n + [0] * (len(each) - n)
        elif theirs:
            assert mask in losses
    assert actshard.verify(done.path, deep=True).ok


@pytest.mark.parametrize("name", ["specforge_dspark", "modelopt_hf", "angelslim_eagle3", "eagle_v1_qwen2"])
def test_a_zarr_store_goes_back_to_what_it_was(tmp_path: Path, name: str) -> None:
    """Also the kind of file, which the store keeps."""
    format, source = name.partition("_")[0], opened(SOURCES[name])
    store = actshard.convert(source, tmp_path / "store", "zarr", dtype="float32", verify=True)
    back = actshard.convert(store.path, tmp_path / "back", format, dtype=str(source.dtype), verify=True)  # type: ignore[arg-type]  # options by name
    for (_, mine), (_, theirs) in zip(tensors(back.path), tensors(SOURCES[name]), strict=True):
        assert list(mine) == list(theirs)
        assert all(
            mine[key].tobytes() == theirs[key].tobytes() for key in theirs if isinstance(theirs[key], np.ndarray)
        )


def test_formats_without_token_ids_do_not_become_examples(tmp_path: Path) -> None:
    dump = actshard.convert(
        SOURCES["eagle_v1_vicuna"], tmp_path / "dumps", "saev", dtype="float32", pad=True, layers={"last": 31}
    )
    with pytest.raises(actshard.ArgumentError, match="eagle stores token ids: pass columns="):
        actshard.convert(dump.path, tmp_path / "back", "eagle", last=31)


# -- create ------------------------------------------------------------------------------------------------------------

LAYERS: list[actshard.Layer] = ["last", 3, "mid"]


def examples_of(lengths: list[int], layers: int = 3) -> tuple[list[np.ndarray], dict[str, list[list[int]]]]:
    """States ``(layers, S, 4)`` and columns of examples."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((layers, n, 4)).astype(BF16) for n in lengths]
    ids = [rng.integers(0, 1 << 31, n).tolist() for n in lengths]
    return rows, {"input_ids": ids, "loss_mask": [[k % 2 for k in range(n)] for n in lengths]}


def begun(path: Path, format: str, **options: Any) -> actshard.Writer:
    layers = ["last"] if format == "eagle" else LAYERS
    given: dict[str, Any] = {"layers": layers, "d_model": 4, "dtype": BF16}
    return actshard.create(path, format, **(given | options))


def part_of(columns: dict[str, list[Any]], part: slice) -> dict[str, list[Any]]:
    return {name: values[part] for name, values in columns.items()}


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("[!.]*")) if file.is_file()}


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FILES),
    ("specforge", {"gz": True, "file_group_size": 3}),
    ("specforge", {"kind": "dspark"}),
    ("specforge", {"kind": "dflash", "layers": [4, 1, "x"]}),
    ("angelslim", {"kind": "dflash", "layers": [4, 1, "x"], "file_group_size": 2}),
    ("angelslim", {"kind": "dflash", "layers": [4, 1, "x"]}),
]


@pytest.mark.parametrize(
    ("format", "options"),
    VARIANTS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_what_is_appended_comes_back_and_an_interrupted_writer_goes_on(
    tmp_path: Path, format: str, options: dict[str, Any]
) -> None:
    layers = options.get("layers", ["last"] if format == "eagle" else LAYERS)
    rows, columns = examples_of([3, 1, 7, 2, 5], len(layers))
    writer = begun(tmp_path / "a", format, **options)
    writer.append(rows[:3], columns=part_of(columns, slice(3)))
    writer.flush()
    writer.append(rows[3:4], columns=part_of(columns, slice(3, 4)))
    writer.abort()
    with pytest.raises(actshard.UnfinishedError):
        opened(tmp_path / "a")
    with begun(tmp_path / "a", format, resume=True, **options) as writer:
        assert writer.committed == 4
        writer.append(rows[4:], columns=part_of(columns, slice(4, None)))
    with begun(tmp_path / "b", format, **options) as writer:
        writer.append(rows, columns=columns)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    order = [layer for layer in layers if layer != "last"] + (["last"] if "last" in layers else [])
    store = actshard.open(tmp_path / "a", layout={"layers": order} if len(order) > 1 else None)
    assert store.layers == tuple(order)
    for i, states in enumerate(rows):
        for k, layer in enumerate(layers):
            assert np.array_equal(store.sequence(i, layer).view(np.uint16), states[k].view(np.uint16))
    assert {name: store.table[name].to_pylist() for name in columns} == columns
    assert actshard.verify(tmp_path / "a", deep=True).ok
    with begun(tmp_path / "a", format, resume=True, **options) as writer:  # a finished dataset is kept
        assert (writer.complete, len(writer)) == (True, 5)


def test_a_copy_keeps_its_kind_and_another_kind_can_be_asked_for(tmp_path: Path) -> None:
    source = opened(SOURCES["specforge_dspark"])
    kinds = {"dspark": {}, "eagle3": {"kind": "eagle3"}, "dflash": {"kind": "dflash", "layers": [0, 1, 2, 3, 4]}}
    for kind, options in kinds.items():
        done = actshard.convert(source, tmp_path / kind, "specforge", verify=True, **options)  # type: ignore[arg-type]  # options by name
        assert opened(done.path).metadata["kind"] == kind


def test_conversation_ids_are_kept_as_numbers_or_texts(tmp_path: Path) -> None:
    rows, columns = examples_of([3, 1])
    for ids in ([17, -4], ["a", "b/c"], ["a", None]):
        with begun(tmp_path / str(ids[0]) / str(ids[1])[0], "modelopt") as writer:
            writer.append(rows, columns={**columns, "conversation_id": ids, "hidden_states_prenorm": [True, False]})
        assert opened(writer.path).table["hidden_states_prenorm"].to_pylist() == [True, False]
        assert opened(writer.path).table["conversation_id"].to_pylist() == ids
        assert sorted(bytes_of(writer.path)) == ["00000000.pt", "00000001.pt"]


def test_the_last_hidden_state_alone_is_a_file_without_layers(tmp_path: Path) -> None:
    rows, columns = examples_of([3, 1], 1)
    with actshard.create(tmp_path / "a", "modelopt", layers=[31], d_model=4, last=31) as writer:
        writer.append(rows, columns=columns)
    ((_, first), _) = tensors(tmp_path / "a")
    assert (first["aux_hidden_states"].shape, first["aux_hidden_states"].dtype) == ((0,), np.float32)
    assert opened(tmp_path / "a").layers == ("last",)


@pytest.mark.parametrize(
    ("format", "options", "said"),
    [
        ("specforge", {"layers": [3, 8], "kind": "eagle3"}, "or pass kind='dflash', which has none"),
        ("specforge", {"kind": "dflash"}, "dflash has no place for the last hidden state; leave it out"),
        ("specforge", {"layers": ["last"]}, "eagle3 stores other layers besides the last"),
        ("specforge", {"kind": "eagle"}, "kind: expected one of eagle3, dspark, dflash, found 'eagle'"),
        ("specforge", {"gz": 1}, "gz: expected True or False"),
        ("specforge", {"file_group_size": 0}, "file_group_size: expected a positive integer"),
        ("specforge", {"last": 9}, r"last: expected one of the layers \['last', 3, 'mid'\], found 9"),
        ("specforge", {"metadata": {"a": 1}}, "specforge files have no place for 'a'"),
        ("modelopt", {"part": (0, 2)}, "part: not supported by modelopt"),
        ("modelopt", {"layers": [1, 2]}, "modelopt stores the last hidden state: name a layer 'last'"),
        ("angelslim", {"gz": True}, "'gz' is not an option of angelslim"),
        ("eagle", {"layers": [1, "last"]}, r"pass layers=\['last'\]"),
        ("eagle", {"dtype": "int8"}, "dtype"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, format: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(actshard.ActshardError, match=said):
        begun(tmp_path / "a", format, **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"input_ids": [[1, 2]]},
        {"input_ids": [[1, 2, None]]},
        {"input_ids": [[1, 2, 3]], "loss_mask": [[1]]},
        {"input_ids": [[1, 2, 3]], "other": [[1, 1, 1]]},
        {"input_ids": [[1, 2, 3]], "conversation_id": [2.5]},
    ],
)
def test_columns_that_are_not_one_value_per_token_are_refused(tmp_path: Path, columns: dict[str, Any]) -> None:
    rows, _ = examples_of([3])
    writer = begun(tmp_path / "a", "modelopt")

    def everything() -> None:
        writer.append(rows, columns=columns)
        writer.flush()  # lists are compared with rows when they are written

    with pytest.raises(actshard.ActshardError, match="columns"):
        everything()
    writer.abort()


def test_readers_see_no_file_before_it_is_complete(tmp_path: Path) -> None:
    """A writer that is killed leaves whole files under their names, and others only under temporary ones."""
    script = textwrap.dedent(
        f"""
        import os, signal, sys, warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_draft_writing as test
        from actshard.formats.specforge.write import SpecForgeTarget
        rows, columns = test.examples_of([3, 1, 7, 2])
        writer = test.begun({str(tmp_path / "a")!r}, "specforge")
        writer.append(rows[:2], columns=test.part_of(columns, slice(2)))
        writer.flush()
        SpecForgeTarget.committed = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        writer.append(rows[2:], columns=test.part_of(columns, slice(2, None)))
        writer.flush()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == -signal.SIGKILL
    group = tmp_path / "a" / "rows_0-2000"
    assert sorted(path.name for path in group.iterdir()) == [
        ".data_2.ckpt.part",
        ".data_3.ckpt.part",
        "data_0.ckpt",
        "data_1.ckpt",
    ]
    rows, columns = examples_of([3, 1, 7, 2])
    with begun(tmp_path / "a", "specforge", resume=True) as writer:
        assert writer.committed == 2
        writer.append(rows[2:], columns=part_of(columns, slice(2, None)))
    assert sorted(path.name for path in group.iterdir()) == [f"data_{i}.ckpt" for i in range(4)]
    assert len(opened(tmp_path / "a")) == 4


@pytest.mark.peers
@pytest.mark.parametrize(("format", "options"), VARIANTS[:5])
def test_torch_loads_every_file(tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    rows, columns = examples_of([3, 1, 7], 1 if format == "eagle" else 3)
    with begun(tmp_path / "a", format, **options) as writer:
        writer.append(rows, columns=columns)
    for i, (name, value) in enumerate(tensors(tmp_path / "a")):
        path = tmp_path / "a" / name
        if name.endswith(".gz"):
            plain = tmp_path / f"{i}.ckpt"
            plain.write_bytes(gzip.decompress(path.read_bytes()))
            path = plain
        loaded = torch.load(path, weights_only=True, mmap=True)
        assert list(loaded) == list(value)
        assert loaded["input_ids"].reshape(-1).tolist() == columns["input_ids"][i]
        for key, tensor in loaded.items():
            assert tensor.is_contiguous()
            raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(raw.numpy().view(value[key].dtype).view(np.uint8), value[key].view(np.uint8))


@pytest.mark.parametrize("format", [name for name in TARGETS if name != "eagle"])
def test_the_name_of_the_last_hidden_state_is_a_loss(tmp_path: Path, format: str) -> None:
    rows, ids = np.ones((3, 2, 4, 8), BF16), {"input_ids": [[1, 2, 3, 4]] * 3}
    with actshard.create(tmp_path / "s", "npy", layers=[3, 12], d_model=8) as writer:
        writer.append(rows.astype(np.float32), columns=ids)
    for name, layers, expected in (("named", {3: 3, 12: "last"}, []), ("plain", None, [f"{format} does not record"])):
        own = {**TARGETS[format], "dtype": "bfloat16", **({} if layers else {"last": 12})}
        done = actshard.convert(tmp_path / "s", tmp_path / name, format, layers=layers, **own)
        renamed = [x.detail for x in done.losses if x.what == "layers" and "12 is read as 'last'" in x.detail]
        assert [detail[: len(f"{format} does not record")] for detail in renamed] == expected
