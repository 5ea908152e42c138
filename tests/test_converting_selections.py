"""Guarantees of convert() with examples=, tokens=, layers= and joins: columns, labels and router tensors stay with their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.writing.converting.columns import _EXAMINED

LENGTHS = (2, 5, 1, 3)


def rows_of(lengths: tuple[int, ...], sign: int = 1) -> list[np.ndarray[Any, Any]]:
    """Rows whose value is the token's number, from 1."""
    return [sign * np.arange(1, n + 1, dtype=np.float32)[None, :, None].repeat(4, axis=2) for n in lengths]


def dataset(path: Path, format: str, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> Path:
    """A dataset of one layer; a padded one if the format is saev."""
    appended = {name: more.pop(name) for name in ("columns", "labels") if name in more}
    pad = {"pad": True, "tokens_per_example": 5, "metadata": {"dataset": path.name}} if format == "saev" else {}
    with actshard.create(path, format, layers=[0], d_model=4, **pad, **more) as writer:
        writer.append(rows_of(lengths), **appended)
    return Path(writer.path)


def values(store: actshard.Store, layer: int = 0) -> list[list[float]]:
    """The values of each example's content."""
    lengths = store.content_lengths
    every = [store.sequence(i, layer)[:, 0].tolist() for i in range(len(store))]
    return every if lengths is None else [row[:n] for row, n in zip(every, lengths, strict=True)]


def ways(source: Any, folder: Path, format: str, **options: Any) -> list[tuple[actshard.Store, list[str]]]:
    """The result and the losses of the verb, and of a plan of two tasks."""
    conversion = actshard.convert(source, folder / "verb", format, **options)
    plan = actshard.plan.convert(source, folder / "plan", format, tasks=2, **options)
    for task in range(len(plan)):
        plan.run(task)
    planned = plan.commit()
    pairs = ((conversion.path, conversion.losses), (planned.path, planned.losses))
    return [(actshard.open(path), [str(loss) for loss in losses]) for path, losses in pairs]


@pytest.mark.parametrize("format", ["lmprobe", "hf_arrow", "npy", "zarr", "pickle"])
@pytest.mark.parametrize("examples", [[0, 0, 2], [1, 3, 3, 3], [2, 2], [0, 1, 3]])
def test_examples_that_repeat_have_their_own_columns(tmp_path: Path, format: str, examples: list[int]) -> None:
    source = dataset(tmp_path / "source", format, columns={"text": list("abcd"), "id": [10, 11, 12, 13]})
    for store, _ in ways(source, tmp_path, "npy", examples=examples):
        assert store.table["id"].to_pylist() == [10 + i for i in examples]
        assert store.token_counts.tolist() == [LENGTHS[i] for i in examples]


@pytest.mark.parametrize("other", ["pickle", "npy", "saev"])
@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe", "saev"])
@pytest.mark.parametrize("tokens", ["all", "last", "content"])
def test_padding_of_a_part_of_a_join_is_no_token(tmp_path: Path, other: str, format: str, tokens: str) -> None:
    parts = [dataset(tmp_path / "padded", "saev"), dataset(tmp_path / "other", other, (1, 4))]
    expected = [list(range(1, n + 1)) for n in (*LENGTHS, 1, 4)]
    if tokens == "last":
        expected = [row[-1:] for row in expected]
    options = {"pad": True} if format == "saev" else {}
    for store, _ in ways(parts, tmp_path, format, tokens=tokens, **options):
        assert values(store) == expected
    chosen = actshard.convert(parts, tmp_path / "chosen", format, tokens=tokens, examples=[0, 3], **options)
    assert values(actshard.open(chosen.path)) == [expected[0], expected[3]]


@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe", "pickle", "saev"])
@pytest.mark.parametrize("special", [0, 1])
def test_the_label_of_a_last_token_is_its_own(tmp_path: Path, format: str, special: int) -> None:
    lengths = (2, 5, 2, 3) if special else (1, 5, 1, 2)
    content = np.array(lengths)[:, None] - special
    numbers = np.arange(1, 6 - special)
    labels = np.where(numbers <= content, numbers, 99).astype(np.uint8)
    source = dataset(tmp_path / "source", "saev", lengths, labels=labels, cls_token=bool(special))
    for store, _ in ways(source, tmp_path, format, tokens="last"):
        stored_labels = store.table["patch_labels"].to_pylist() if store.labels is None else store.labels.tolist()
        assert stored_labels == [[n - special] for n in lengths]
        assert values(store) == [[n] for n in lengths]


@pytest.mark.parametrize("format", ["lmprobe", "hf_arrow"])
def test_an_example_without_a_last_token_is_named_with_a_remedy(tmp_path: Path, format: str) -> None:
    source = dataset(tmp_path / "source", "npy", (2, 0, 1))
    with pytest.raises(
        actshard.ArgumentError, match=r"example 1: .* found 0: an example without tokens .* examples= leaves"
    ):
        actshard.convert(source, tmp_path / "out", format, tokens="last")
    conversion = actshard.convert(source, tmp_path / "out", format, tokens="last", examples=[0, 2])
    assert values(actshard.open(conversion.path)) == [[2], [1]]


def test_last_tokens_of_a_padded_dump_come_first_in_a_longer_one(tmp_path: Path) -> None:
    source = dataset(tmp_path / "source", "saev", labels=np.arange(1, 6, dtype=np.uint8)[None].repeat(4, axis=0))
    for store, losses in ways(source, tmp_path, "saev", tokens="last", pad=True, tokens_per_example=3):
        assert values(store) == [[n] for n in LENGTHS]
        assert store.labels is not None
        assert store.labels.tolist() == [[n, 0, 0] for n in LENGTHS]
        assert "tokens: 7 tokens are left out: tokens='last'" in losses


def test_what_only_some_parts_of_a_join_have_is_a_loss(tmp_path: Path) -> None:
    rows = np.ones((2, 1, 2, 4), np.float32)
    tensors = {
        "logits": (np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6).reshape(2, 3)),
        "router": {0: np.ones((2, 2), np.float32)},
    }
    for name, part_tensors in (("a", tensors), ("b", {})):
        with actshard.create(tmp_path / name, "lmprobe", layers=[0], d_model=4) as writer:
            writer.append(rows, columns={"text": [f"{name}0", f"{name}1"]}, **part_tensors)
    for _, losses in ways([tmp_path / "a", tmp_path / "b"], tmp_path, "npy"):
        assert [loss.partition(":")[0] for loss in losses] == ["logits", "router"]
    parts = [tmp_path / "a", tmp_path / "b"]
    assert not actshard.convert(parts, tmp_path / "of_b", "npy", examples=[2, 3]).losses
    labelled = dataset(tmp_path / "l", "saev", labels=np.ones((4, 5), np.uint8))
    conversion = actshard.convert([labelled, dataset(tmp_path / "u", "saev")], tmp_path / "labels", "npy")
    assert [loss.what for loss in conversion.losses] == ["labels"]


@pytest.mark.parametrize("parts", [("pickle", "npy"), ("npy", "npy"), ("npy",)])
def test_token_ids_that_come_late_are_cut_with_their_rows(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Neither a part without them nor examples without a value decide for the others; lists of another meaning are whole."""
    ids = [list(range(1, n + 1)) for n in LENGTHS]
    sources = []
    for number, format in enumerate(parts):
        with actshard.create(tmp_path / str(number), format, layers=[0], d_model=4) as writer:
            if len(parts) == 1:
                absent: list[Any] = [None] * _EXAMINED
                writer.append(rows_of((2,) * _EXAMINED), columns={"input_ids": absent, "rgb": absent})
            if number == len(parts) - 1:
                rgb = [[7, 8, 9]] * 4
                writer.append(rows_of(LENGTHS), columns={"input_ids": ids, "rgb": rgb})
            else:
                writer.append(rows_of((2,) * _EXAMINED))
        sources.append(tmp_path / str(number))
    for store, losses in ways(sources if len(sources) > 1 else sources[0], tmp_path, "npy", tokens="last"):
        assert store.table["input_ids"].to_pylist()[-4:] == [[n] for n in LENGTHS]
        assert store.table["rgb"].to_pylist()[-4:] == [[7, 8, 9]] * 4
        is_announced = any(loss.endswith("as long as the examples: rgb") for loss in losses)
        assert is_announced == (len(parts) == 1), "a list of which the examined examples have no value may be of tokens"


def test_a_vector_of_one_part_is_not_cut_because_another_part_is_shorter(tmp_path: Path) -> None:
    short = dataset(tmp_path / "short", "npy", (2, 2))
    long = dataset(tmp_path / "long", "npy", (3, 3), columns={"rgb": [[1, 2, 3], [4, 5, 6]]})
    for store, losses in ways([short, long], tmp_path, "npy", tokens="last"):
        assert store.table["rgb"].to_pylist() == [None, None, [1, 2, 3], [4, 5, 6]]
        assert any(loss.endswith("as long as the examples: rgb") for loss in losses)


@pytest.mark.parametrize("format", ["lmprobe", "npy"])
@pytest.mark.parametrize("layers", [{2: 3, 3: 2}, {2: 3}, {3: 7}, [3], None])
def test_router_tensors_follow_their_layers(tmp_path: Path, format: str, layers: Any) -> None:
    rows = np.stack([np.full((2, 4), n, np.float32) for n in (2, 3)])[None].repeat(2, axis=0)
    router = {n: np.full((2, 2), n, np.float32) for n in (2, 3)}
    with actshard.create(tmp_path / "a", "lmprobe", layers=[2, 3], d_model=4) as writer:
        writer.append(rows, columns={"text": ["p", "q"]}, router=router)
    sources = [tmp_path / "a", actshard.convert(tmp_path / "a", tmp_path / "columns", "npy").path]
    names = layers if isinstance(layers, dict) else {layer: layer for layer in layers or (2, 3)}
    for number, source in enumerate(sources):
        (tmp_path / f"to{number}").mkdir()
        for store, losses in ways(source, tmp_path / f"to{number}", format, layers=layers):
            for old, new_name in names.items():
                assert values(store, new_name) == [[old, old]] * 2
                if format == "lmprobe":
                    assert store.router(new_name)[0].tolist() == [old, old]
                else:
                    assert store.table[f"router_layer_{new_name}"].to_pylist() == [[old, old]] * 2
            assert any("another layer gets that name" in loss for loss in losses) == (layers == {2: 3})


def test_a_join_of_labels_with_other_widths_says_so(tmp_path: Path) -> None:
    sources = []
    for name, width in (("a", 2), ("b", 3)):
        metadata = {"dataset": name}
        with actshard.create(tmp_path / name, "saev", layers=[0], d_model=4, metadata=metadata) as writer:
            writer.append(np.ones((2, 1, width, 4), np.float32), labels=np.ones((2, width), np.uint8))
        sources.append(writer.path)
    assert [loss.what for loss in actshard.convert(sources, tmp_path / "out", "npy").losses] == ["labels"]
