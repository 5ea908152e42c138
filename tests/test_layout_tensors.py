"""Described tensors in other orders and pieces: ``dim`` anywhere, decode steps joined along tokens, shards of an index, columns."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import ActshardError, ArgumentError, FormatError, MissingFileError
from actshard.formats import registry
from actshard.formats.torch_zip import torch_bytes
from test_layout_examples import described, put_safetensors

RANDOM = np.random.default_rng(7)


def values(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def put_torch(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_bytes(torch_bytes(value))


# -- dim anywhere ------------------------------------------------------------------------------------------------------

SIZES = {"example": 3, "layer": 2, "token": 5, "dim": 4}


def put_array(folder: Path, array: np.ndarray, container: str) -> dict[str, Any]:
    if container == "npy":
        np.save(folder / "a.npy", array)
        return {"files": "a.npy"}
    if container == "big-endian":
        np.save(folder / "a.npy", array.astype(">f4"))
        return {"files": "a.npy"}
    if container == "fortran":
        np.save(folder / "a.npy", np.asfortranarray(array))
        return {"files": "a.npy"}
    if container == "deflated":
        np.savez_compressed(folder / "a.npz", x=array)
        return {"files": "a.npz", "tensor": "x"}
    if container == "torch":
        put_torch(folder, "a.pt", {"x": array})
        return {"files": "a.pt", "tensor": "x"}
    put_safetensors(folder / "a.safetensors", {"x": array})
    return {"files": "a.safetensors", "tensor": "x"}


@pytest.mark.parametrize("container", ["npy", "big-endian", "fortran", "deflated", "torch", "safetensors"])
def test_axes_of_any_order_are_read(container: str, tmp_path: Path, io: str) -> None:
    for number, axes in enumerate(itertools.permutations(SIZES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        array = values(*(SIZES[axis] for axis in axes))
        table = put_array(folder, array, container) | {"axes": list(axes)}
        ordered = array.transpose([axes.index(axis) for axis in SIZES])
        with actshard.open(folder, layout={"version": 1, "activations": table}, io=io) as store:
            for example, layer in itertools.product(range(3), range(2)):
                assert np.array_equal(store.sequence(example, layer), ordered[example, layer]), axes


def test_arrays_that_are_decoded_are_counted(tmp_path: Path) -> None:
    table = put_array(tmp_path, values(4, 9), "npy")
    with actshard.open(tmp_path, layout={"version": 1, "activations": table | {"axes": ["dim", "row"]}}) as store:
        assert (store.d_model, len(store)) == (4, 9)
        assert store.info()["provenance"]["decoded_arrays"] == 1


def test_a_composite_axis_with_dim_may_be_first(tmp_path: Path) -> None:
    array = values(2 * 4, 5)
    table = put_array(tmp_path, array, "npy") | {"axes": ["layer*dim", "token"], "layers": [3, 8]}
    with actshard.open(tmp_path, layout={"version": 1, "activations": table}) as store:
        assert np.array_equal(store.sequence(0, 8), array[4:].T)


# -- decode steps ------------------------------------------------------------------------------------------------------

LENGTHS = (4, 1, 1, 1)


def put_steps(folder: Path, *, count: int = 3, batch: int = 1) -> list[np.ndarray]:
    """Writes the hidden states of generations, and returns those of each file, ``(batch, layers, tokens, d_model)``."""
    expected = []
    for i in range(count):
        states = [tuple(values(batch, n, 8) for _ in range(2)) for n in LENGTHS]
        put_torch(folder, f"{i}.pt", {"hidden_states": tuple(states), "label": i, "text": f"t{i}"})
        expected.append(np.stack([np.concatenate([step[layer] for step in states], 1) for layer in range(2)], 1))
    return expected


def test_decode_steps_are_joined_along_tokens(tmp_path: Path, io: str) -> None:
    expected = put_steps(tmp_path)
    columns = [{"tensor": "label"}, {"tensor": "text"}]
    layout = described(
        "{example:d}.pt", ["hidden_states", "{token}", "{layer}"], ["1", "token", "dim"], columns=columns
    )
    with actshard.open(tmp_path, layout=layout, io=io) as store:
        assert (store.layers, store.token_counts.tolist()) == ((0, 1), [sum(LENGTHS)] * 3)
        for example, layer in itertools.product(range(3), range(2)):
            assert np.array_equal(store.sequence(example, layer), expected[example][0, layer])
        rows = np.concatenate([batch.activations for batch in store.stream(1, 5, tokens="all")])
        assert np.array_equal(rows, np.concatenate([states[0, 1] for states in expected]))
        assert store.table.to_pydict() == {"example": [0, 1, 2], "label": [0, 1, 2], "text": ["t0", "t1", "t2"]}
    assert actshard.verify(tmp_path, layout=layout, deep=True).ok
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert 'tensor = ["hidden_states", "{token}", "{layer}"]' in proposal.text
    assert any("steps of a generation" in reason for reason in proposal.unsure)
    with actshard.open(tmp_path, layout=proposal.text) as store:
        assert np.array_equal(store.sequence(2, 1), expected[2][0, 1])


def test_decode_steps_of_batches_are_joined(tmp_path: Path) -> None:
    expected = np.concatenate(put_steps(tmp_path, batch=2))
    layout = described("{batch:d}.pt", ["hidden_states", "{token}", "{layer}"], ["example", "token", "dim"])
    with actshard.open(tmp_path, layout=layout) as store:
        for example, layer in itertools.product(range(6), range(2)):
            assert np.array_equal(store.sequence(example, layer), expected[example, layer])


def test_more_than_ten_steps_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    steps = {f"step_{n}": values(1, 8) for n in (11, 2, 0, 10)}
    put_torch(tmp_path, "0.pt", steps)
    with actshard.open(tmp_path, layout=described("{example:d}.pt", "step_{token}")) as store:
        expected = np.concatenate([steps[f"step_{n}"] for n in (0, 2, 10, 11)])
        assert np.array_equal(store.sequence(0, 0), expected)


def test_steps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    put_torch(tmp_path, "0.pt", {"h": [values(3, 8), values(1, 7)], "few": [values(3, 8), values(8)], "none": []})
    for tensor, text in (
        ("h", r"0.pt: h\.{token}: arrays to join along axis 0: expected \[3, 8\] of F32, found \[1, 7\] of F32"),
        ("few", r"expected 2 axes, found the shape \[8\]"),
        ("none", "expected keys such as '{token}', found nothing"),
    ):
        with pytest.raises(FormatError, match=text):
            actshard.open(tmp_path, layout=described("{example:d}.pt", [tensor, "{token}"]))
    for layout, text in (
        (described("{example:d}.pt", ["h", "{token}"], ["row", "dim"]), "expected the axis 'token'"),
        (described("{_:d}.pt", ["h", "{token}"]), "neither shards nor scales"),
    ):
        with pytest.raises(ArgumentError, match=text):
            actshard.open(tmp_path, layout=layout)


# -- shards of an index ------------------------------------------------------------------------------------------------


def put_index(folder: Path, weight_map: Any) -> dict[int, np.ndarray]:
    layers = {layer: values(3, 4, 8) for layer in range(3)}
    put_safetensors(folder / "a.safetensors", {"layers.0": layers[0], "layers.2": layers[2]})
    put_safetensors(folder / "b.safetensors", {"layers.1": layers[1]})
    (folder / "acts.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return layers


NAMES = {"layers.0": "a.safetensors", "layers.1": "b.safetensors", "layers.2": "a.safetensors"}
INDEXED = described("acts.safetensors.index.json", "layers.{layer}", ["example", "token", "dim"])


def test_files_that_an_index_names_are_read(tmp_path: Path, io: str) -> None:
    layers = put_index(tmp_path, NAMES)
    with actshard.open(tmp_path, layout=INDEXED, io=io) as store:
        assert store.layers == (0, 1, 2)
        for layer, example in itertools.product(layers, range(3)):
            assert np.array_equal(store.sequence(example, layer), layers[layer][example])
    assert actshard.verify(tmp_path, layout=INDEXED, deep=True).ok
    np.save(tmp_path / "labels.npy", np.arange(3))
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert 'files = "acts.safetensors.index.json"' in proposal.text
    assert not any("left out" in reason for reason in proposal.unsure)
    with actshard.open(tmp_path, layout=proposal.text) as store:
        assert (store.layers, store.table["labels"].to_pylist()) == ((0, 1, 2), [0, 1, 2])


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({}, "weight_map"),
        (["a.safetensors"], "weight_map"),
        ({"layers.0": 5}, "weight_map"),
        ({"layers.0": "../a.safetensors"}, "weight_map"),
        ({"layers.0": "/etc/passwd"}, "weight_map"),
        ({"layers.0": "lost.safetensors"}, r"lost.safetensors: .*acts.safetensors.index.json names"),
    ],
)
def test_a_wrong_index_is_refused(names: Any, text: str, tmp_path: Path) -> None:
    put_index(tmp_path, names)
    with pytest.raises((FormatError, MissingFileError), match=text):
        actshard.open(tmp_path, layout=INDEXED)
    assert not actshard.verify(tmp_path, layout=INDEXED).ok


def test_a_tensor_that_is_not_in_its_file_is_a_finding(tmp_path: Path) -> None:
    put_index(tmp_path, NAMES | {"layers.9": "b.safetensors"})
    findings = actshard.verify(tmp_path, layout=INDEXED).errors
    assert [("layers.9" in str(finding)) for finding in findings] == [True]


# -- columns -----------------------------------------------------------------------------------------------------------


def put_files(folder: Path, pattern: str, examples: int) -> None:
    for i in range(3):
        shape = (examples, 2, 4) if examples > 1 else (2, 4)
        np.save(folder / pattern.format(i), values(*shape))


@pytest.mark.parametrize("column", ["json", "npy", "tokens"])
@pytest.mark.parametrize("examples", [1, 2])
def test_values_of_all_files_are_those_of_their_examples(column: str, examples: int, tmp_path: Path) -> None:
    """Values in one file for the examples of several: the position in a file was taken for the position among all."""
    put_files(tmp_path, "{}.npy", examples)
    n = 3 * examples
    labels = [10 + i for i in range(n)]
    ids = np.arange(2 * n).reshape(n, 2)
    (tmp_path / "meta.json").write_text(json.dumps({"labels": labels}))
    np.save(tmp_path / "labels.npy", np.array(labels))
    np.save(tmp_path / "ids.npy", ids)
    table: dict[str, Any] = {"columns": [{"file": {"json": "meta.json:/labels"}.get(column, "labels.npy")}]}
    table = {"tokens": {"file": "ids.npy"}} if column == "tokens" else table
    files, axes = (
        ("{example:d}.npy", ["token", "dim"]) if examples == 1 else ("{batch:d}.npy", ["example", "token", "dim"])
    )
    layout = {"version": 1, "activations": {"files": files, "axes": axes}} | table
    with actshard.open(tmp_path, layout=layout) as store:
        name = "token_ids" if column == "tokens" else "labels"
        assert store.table[name].to_pylist() == (ids.tolist() if column == "tokens" else labels)


def test_values_of_all_files_follow_committed_examples(tmp_path: Path) -> None:
    put_files(tmp_path, "{}.npy", 1)
    (tmp_path / "meta.json").write_text(json.dumps({"labels": [10, 11, 12]}))
    (tmp_path / "done.jsonl").write_text('{"id": 0}\n{"id": 2}\n')
    columns = [{"file": "done.jsonl", "by": "id", "commit": True}, {"file": "meta.json:/labels"}]
    layout = {"version": 1, "activations": {"files": "{example:d}.npy", "axes": ["token", "dim"]}, "columns": columns}
    with actshard.open(tmp_path, layout=layout) as store:
        assert store.table["labels"].to_pylist() == [10, 12]


def test_scalars_and_texts_of_each_file_are_columns(tmp_path: Path) -> None:
    for i in range(3):
        extra = {
            "label": i,
            "score": i / 2,
            "text": f"t{i}",
            "is_true": i > 1,
            "array": np.array(i),
            "meta": {"id": f"q{i}"},
        }
        put_torch(tmp_path, f"{i}.pt", {"h": values(4, 8)} | extra)
    columns = [{"tensor": name} for name in ("label", "score", "text", "is_true", "array")]
    layout = described("{example:d}.pt", "h", columns=[*columns, {"tensor": ["meta", "id"]}])
    with actshard.open(tmp_path, layout=layout) as store:
        assert store.table.drop(["example"]).to_pydict() == {
            "label": [0, 1, 2],
            "score": [0.0, 0.5, 1.0],
            "text": ["t0", "t1", "t2"],
            "is_true": [False, False, True],
            "array": [0, 1, 2],
            "id": ["q0", "q1", "q2"],
        }


WRONG_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"columns": [{"tensor": "label"}]}, "expected 'label', found the keys"),
    "tokens": ({"tokens": {"tensor": "ids"}}, "expected 'ids', found the keys"),
    "short tokens": (
        {"tokens": {"tensor": "short"}},
        "expected at least 4 token ids of example 0, one per row, found 3",
    ),
    "short list": ({"tokens": {"tensor": "list"}}, "expected at least 4 token ids of example 0, one per row, found 2"),
    "pointer": ({"columns": [{"file": "meta.json:/label"}]}, "meta.json has no /label"),
    "count": ({"columns": [{"file": "meta.json:/labels"}]}, "expected 3 values"),
    "array": ({"columns": [{"file": "labels.npy"}]}, "expected 3 values"),
    "lines": ({"columns": [{"file": "lines.jsonl"}]}, "expected 3 values"),
    "field": ({"columns": [{"file": "lines.jsonl", "tensor": "y"}]}, "expected a field 'y'"),
    "file": ({"columns": [{"file": "lost.npy"}]}, "lost.npy"),
    "files": ({"columns": [{"file": "labels/{example:d}.npy"}]}, "labels"),
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_a_wrong_column_is_refused_when_opened(name: str, tmp_path: Path) -> None:
    tables, text = WRONG_COLUMNS[name]
    for i in range(3):
        put_torch(tmp_path, f"{i}.pt", {"h": values(4, 8), "short": np.arange(3), "list": [1, 2]})
    (tmp_path / "meta.json").write_text('{"labels": [0, 1]}')
    (tmp_path / "lines.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    np.save(tmp_path / "labels.npy", np.arange(2))
    (tmp_path / "labels").mkdir()
    np.save(tmp_path / "labels/7.npy", np.arange(2))
    layout = described("{example:d}.pt", "h", **tables)
    with pytest.raises(ActshardError, match=text):
        actshard.open(tmp_path, layout=layout)
    assert not actshard.verify(tmp_path, layout=layout).ok


def test_a_column_that_a_later_file_lacks_is_a_finding(tmp_path: Path) -> None:
    for i in range(3):
        put_torch(
            tmp_path, f"{i}.pt", {"h": values(4, 8), "ids": np.arange(4 - (i == 2))} | ({"label": 1} if i < 2 else {})
        )
    for tables, text in (
        ({"columns": [{"tensor": "label"}]}, "expected 'label', found the keys"),
        ({"tokens": {"tensor": "ids"}}, "expected at least 4 token ids of example 2"),
    ):
        layout = described("{example:d}.pt", "h", **tables)
        actshard.open(tmp_path, layout=layout).close()
        assert [text in str(finding) for finding in actshard.verify(tmp_path, layout=layout, deep=True).errors] == [
            True
        ]


# -- proposals ---------------------------------------------------------------------------------------------------------


def test_a_guess_proposes_scalars_of_files_and_lists_other_values(tmp_path: Path) -> None:
    for i in range(3):
        put_torch(tmp_path, f"{i}.pt", {"h": values(4, 8), "label": i, "text": f"t{i}", "config": {"a": 1}})
    proposal = registry.get("layout_toml").guess(tmp_path)
    table = actshard.open(tmp_path, layout=proposal.text).table
    assert table.to_pydict() == {"example": [0, 1, 2], "label": [0, 1, 2], "text": ["t0", "t1", "t2"]}
    assert "other values of the file are left out: config" in proposal.unsure


def test_a_guess_proposes_files_with_a_value_for_each_example(tmp_path: Path) -> None:
    np.save(tmp_path / "acts.npy", values(4, 5, 8))
    np.save(tmp_path / "labels.npy", np.arange(4))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(4)))
    (tmp_path / "more.csv").write_text("a,b\n" + "1,x\n" * 4)
    (tmp_path / "objects.json").write_text(json.dumps([{"c": i} for i in range(4)]))
    (tmp_path / "notes.json").write_text("{}")
    proposal = registry.get("layout_toml").guess(tmp_path)
    table = actshard.open(tmp_path, layout=proposal.text).table.to_pydict()
    assert {name: column[3] for name, column in table.items()} == {"labels": 3, "text": "t3", "a": 1, "b": "x", "c": 3}
    assert "other files are left out: notes.json" in proposal.unsure


def test_a_guess_proposes_lists_for_one_file_per_example(tmp_path: Path) -> None:
    put_files(tmp_path, "{}.npy", 1)
    (tmp_path / "meta.json").write_text(json.dumps({"labels": [5, 6, 7]}))
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert actshard.open(tmp_path, layout=proposal.text).table["labels"].to_pylist() == [5, 6, 7]


def test_a_guess_marks_an_axis_of_dim_that_may_be_another(tmp_path: Path) -> None:
    np.save(tmp_path / "acts.npy", values(768, 20))
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert any("the last axis, of 20, is taken as 'dim'" in reason for reason in proposal.unsure)


@pytest.mark.parametrize("container", ["files", "keys", "list"])
def test_a_guess_sees_a_vector_for_each_example(container: str, tmp_path: Path) -> None:
    vectors = [values(64) for _ in range(4)]
    if container == "files":
        for i, vector in enumerate(vectors):
            np.save(tmp_path / f"{i}.npy", vector)
    elif container == "keys":
        put_torch(tmp_path, "all.pt", {f"prompt {i}": vector for i, vector in enumerate(vectors)})
    else:
        put_torch(tmp_path, "all.pt", {"acts": vectors, "labels": [0, 1, 1, 0]})
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert any("one axis" in reason for reason in proposal.unsure)
    with actshard.open(tmp_path, layout=proposal.text) as store:
        assert store.token_counts.tolist() == [1] * 4
        assert np.array_equal(store.gather(store.layers[0], range(4), 0), np.stack(vectors))
        if container == "list":
            assert store.table["labels"].to_pylist() == [0, 1, 1, 0]


# -- values of the right example ---------------------------------------------------------------------------------------


def opened(folder: Path, activations: dict[str, Any], **tables: Any) -> actshard.Store:
    return actshard.open(folder, layout={"version": 1, "activations": activations} | tables)


def put_any(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """As put_safetensors, for integers too."""
    np.savez(path.with_suffix(".npz"), **arrays)


def test_decoded_arrays_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """Joined and reinterpreted arrays exist only while they are read: another one may get their identity in memory."""
    rows = values(6, 4, 5, 3)  # examples, layers, tokens, dim
    for example, layers in enumerate(rows):
        steps = {f"l{i}": {f"t{n}": layer.T[:, n : n + 1].copy() for n in range(5)} for i, layer in enumerate(layers)}
        put_torch(tmp_path, f"{example}.pt", steps)
    store = opened(
        tmp_path, {"files": "{example:d}.pt", "tensor": ["l{layer:d}", "t{token:d}"], "axes": ["dim", "token"]}
    )
    for example, layer in itertools.product(range(6), range(4)):
        assert np.array_equal(store.sequence(example, layer), rows[example, layer])


@pytest.mark.parametrize("tensor", ["l{layer:d}.t{token:d}", "t{token:d}.l{layer:d}"])
def test_steps_and_layers_may_be_in_one_key(tensor: str, tmp_path: Path) -> None:
    rows = values(2, 12, 3)
    arrays = {
        tensor.replace("{layer:d}", str(layer)).replace("{token:d}", str(n)): rows[layer, n : n + 1]
        for layer in range(2)
        for n in range(12)
    }
    np.savez(tmp_path / "0.npz", **arrays)
    store = opened(tmp_path, {"files": "{example:d}.npz", "tensor": tensor, "axes": ["token", "dim"]})
    assert [np.array_equal(store.sequence(0, layer), rows[layer]) for layer in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("keys", "tensor"),
    [(("t1", "t01"), "t{token:d}"), (("t1_a", "t1_b"), "t{token:d}_{_:s}"), (("l1", "l01"), "l{layer:d}")],
)
def test_two_keys_for_one_place_are_an_error(keys: tuple[str, str], tensor: str, tmp_path: Path) -> None:
    put_any(tmp_path / "0.npz", {key: values(1, 3) for key in keys})
    with pytest.raises(
        FormatError, match=f"keys '{keys[0]}' and '{keys[1]}' are both of|keys '{keys[1]}' and '{keys[0]}'"
    ):
        opened(tmp_path, {"files": "{example:d}.npz", "tensor": tensor, "axes": ["token", "dim"]})


@pytest.mark.parametrize("numbers", [[0, 1, 2], [1, 2, 3], [10, 20, 30]])
def test_columns_of_committed_examples_are_theirs(numbers: list[int], tmp_path: Path) -> None:
    for number in numbers:
        arrays = {"acts": np.full((2, 3), number, np.float32), "label": np.int64(number)}
        put_any(tmp_path / f"{number}.npz", arrays)
    committed = [numbers[0], numbers[2]]
    (tmp_path / "done.jsonl").write_text("".join(json.dumps({"id": n, "text": f"t{n}"}) + "\n" for n in committed))
    store = opened(
        tmp_path,
        {"files": "{example:d}.npz", "tensor": "acts", "axes": ["token", "dim"]},
        columns=[{"tensor": "label"}, {"file": "done.jsonl", "by": "id", "commit": True}],
    )
    assert [store.sequence(i, 0)[0, 0] for i in range(2)] == committed == store.table["label"].to_pylist()
    assert store.table["text"].to_pylist() == [f"t{n}" for n in committed]


@pytest.mark.parametrize("lengths", [[[3, 2, 4]], [[3, 2], [4, 1]], [[0, 3], [2, 0]], [[3, 2], [5]]])
def test_values_of_rows_are_those_of_each_example_of_a_batch(lengths: list[list[int]], tmp_path: Path) -> None:
    expected, row = [], 0
    for batch, counts in enumerate(lengths):
        numbers = np.arange(row, row + sum(counts))
        arrays = {"acts": np.repeat(numbers[:, None], 3, 1).astype(np.float32), "ids": numbers, "n": np.array(counts)}
        put_any(tmp_path / f"{batch}.npz", arrays)
        for count in counts:
            expected.append(list(range(row, row + count)))
            row += count
    store = opened(
        tmp_path,
        {"files": "{batch:d}.npz", "tensor": "acts", "axes": ["row", "dim"]},
        lengths={"tensor": "n"},
        columns=[{"tensor": "ids", "axes": ["row"]}],
    )
    assert store.table["ids"].to_pylist() == expected
    assert [store.sequence(i, 0)[:, 0].tolist() if rows else [] for i, rows in enumerate(expected)] == expected


def test_a_shared_column_of_one_example_is_one_value(tmp_path: Path) -> None:
    put_any(tmp_path / "5.npz", {"acts": values(2, 3)})
    np.save(tmp_path / "labels.npy", np.array([938]))
    store = opened(
        tmp_path,
        {"files": "{example:d}.npz", "tensor": "acts", "axes": ["token", "dim"]},
        columns=[{"file": "labels.npy", "name": "label"}],
    )
    assert store.table["label"].to_pylist() == [938]
