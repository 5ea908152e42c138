"""Described files with an array for each example, and files that are shards: read bit for bit, proposed, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import ActshardError, ArgumentError, FormatError
from actshard.formats import registry
from actshard.formats.torch_zip import torch_bytes

STATES = [np.random.default_rng(i).standard_normal((3 + i, 8)).astype(np.float32) for i in range(12)]
"""The states of twelve examples of different lengths."""


def described(files: str, tensor: Any, axes: list[str] | None = None, **tables: Any) -> dict[str, Any]:
    return {"version": 1, "activations": {"files": files, "tensor": tensor, "axes": axes or ["token", "dim"]}} | tables


def put_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def put(folder: Path, container: str) -> dict[str, Any]:
    """Writes the states to one file, and returns its description."""
    if container == "torch-list":
        value = {"acts": STATES, "labels": np.arange(12), "names": [f"n{i}" for i in range(12)]}
        (folder / "all.pt").write_bytes(torch_bytes(value))
        columns = [{"tensor": "labels", "name": "label"}, {"tensor": "names", "name": "name"}]
        return described("all.pt", ["acts", "{example}"], columns=columns)
    if container == "torch-dict":
        (folder / "all.pt").write_bytes(torch_bytes({f"prompt {i:03}": states for i, states in enumerate(STATES)}))
        return described("all.pt", "prompt {example}")
    if container == "torch-dicts":
        value = {"pairs": [{"h": states, "answer": f"n{i}"} for i, states in enumerate(STATES)]}
        (folder / "all.pt").write_bytes(torch_bytes(value))
        return described(
            "all.pt",
            ["pairs", "{example}", "h"],
            columns=[{"tensor": ["pairs", "{example}", "answer"], "name": "name"}],
        )
    if container == "npz":
        np.savez(folder / "all.npz", **{f"acts_{i}": states for i, states in enumerate(STATES)})
        return described("all.npz", "acts_{example}")
    put_safetensors(folder / "all.safetensors", {f"acts.{i}.resid": states for i, states in enumerate(STATES)})
    return described("all.safetensors", "acts.{example}.resid")


CONTAINERS = ("torch-list", "torch-dict", "torch-dicts", "npz", "safetensors")


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_with_an_array_for_each_example_is_read_in_the_order_of_numbers(
    container: str, tmp_path: Path, io: str
) -> None:
    store = actshard.open(tmp_path, layout=put(tmp_path, container), io=io)
    assert (store.layers, store.token_counts.tolist()) == ((0,), [len(states) for states in STATES])
    for i, states in enumerate(STATES):
        assert np.array_equal(store.sequence(i, 0), states)
    table = store.table
    assert table["example"].to_pylist() == list(range(12))
    if "label" in table.column_names:
        assert table["label"].to_pylist() == list(range(12))
    if "name" in table.column_names:
        assert table["name"].to_pylist() == [f"n{i}" for i in range(12)]
    assert actshard.verify(store).ok


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_guess_sees_examples_in_arrays_of_different_lengths(container: str, tmp_path: Path) -> None:
    put(tmp_path, container)
    proposal = registry.get("layout_toml").guess(tmp_path)
    with actshard.open(tmp_path, layout=proposal.text) as store:
        assert store.token_counts.tolist() == [len(states) for states in STATES]
        if container == "torch-list":
            assert store.table["labels"].to_pylist() == list(range(12))
            assert store.table["names"].to_pylist() == [f"n{i}" for i in range(12)]
        if container == "torch-dicts":
            assert store.table["answer"].to_pylist() == [f"n{i}" for i in range(12)]


def test_examples_of_several_files_and_layers_of_each_are_read(tmp_path: Path) -> None:
    for batch in range(2):
        value = {
            "acts": {
                f"layer_{layer}": [states + layer for states in STATES[6 * batch : 6 * batch + 6]] for layer in (3, 9)
            },
            "labels": np.arange(6 * batch, 6 * batch + 6),
        }
        (tmp_path / f"batch_{batch}.pt").write_bytes(torch_bytes(value))
    layout = described("batch_{batch}.pt", ["acts", "layer_{layer}", "{example}"], columns=[{"tensor": "labels"}])
    store = actshard.open(tmp_path, layout=layout)
    assert (store.layers, store.table["labels"].to_pylist()) == ((3, 9), list(range(12)))
    for i, states in enumerate(STATES):
        for layer in (3, 9):
            assert np.array_equal(store.sequence(i, layer), states + layer)


def test_a_layer_that_an_example_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "all.pt").write_bytes(torch_bytes([{"l0": STATES[0], "l1": STATES[0]}, {"l0": STATES[1]}]))
    with pytest.raises(FormatError, match="expected layer 1"):
        actshard.open(tmp_path, layout=described("all.pt", ["{example}", "l{layer}"]))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (described("{example}.pt", "{example}"), "already captured"),
        (described("all.pt", "{example}", ["row", "dim"]), "neither 'example' nor 'row'"),
        (described("all.pt", "{example}", ["example", "token", "dim"]), "neither 'example' nor 'row'"),
        (described("{_}.{_}.pt", "h"), "once in braces"),
    ],
)
def test_descriptions_with_examples_twice_are_refused(layout: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=text):
        actshard.open(tmp_path, layout=layout)


def test_keys_that_no_example_has_are_named(tmp_path: Path) -> None:
    (tmp_path / "all.pt").write_bytes(torch_bytes({"acts": STATES[0]}))
    with pytest.raises(FormatError, match=r"expected keys such as 'prompt {example}', found acts"):
        actshard.open(tmp_path, layout=described("all.pt", "prompt {example}"))


def put_shards(folder: Path, count: int = 3) -> dict[int, np.ndarray]:
    layers = {layer: np.random.default_rng(layer).standard_normal((4, 5, 8)).astype(np.float32) for layer in range(5)}
    for shard in range(count):
        held = {f"layers.{layer}": layers[layer] for layer in layers if layer % count == shard}
        put_safetensors(folder / f"acts-{shard + 1:05}-of-{count:05}.safetensors", held)
    names = {f"layers.{layer}": f"acts-{layer % count + 1:05}-of-{count:05}.safetensors" for layer in layers}
    (folder / "acts.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return layers


def test_layers_spread_over_shards_are_one_dataset(tmp_path: Path, io: str) -> None:
    layers = put_shards(tmp_path)
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert 'files = "acts-{_:d}-of-00003.safetensors"' in proposal.text
    store = actshard.open(tmp_path, layout=proposal.text, io=io)
    assert (store.layers, len(store)) == (tuple(layers), 4)
    for layer, states in layers.items():
        for i in range(4):
            assert np.array_equal(store.sequence(i, layer), states[i])
    assert actshard.verify(tmp_path, layout=proposal.text).ok


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    put_shards(tmp_path)
    (tmp_path / "acts-00002-of-00003.safetensors").unlink()
    layout = described("acts-{_:d}-of-00003.safetensors", "layers.{layer}", ["example", "token", "dim"])
    with pytest.warns(actshard.ActshardWarning, match="acts-00002-of-00003"):
        actshard.open(tmp_path, layout=layout)
    assert "missing-file" in actshard.verify(tmp_path, layout=layout).codes()


def test_an_array_in_two_shards_is_refused(tmp_path: Path) -> None:
    for shard in (1, 2):
        put_safetensors(tmp_path / f"{shard}.safetensors", {"layers.0": STATES[0]})
    with pytest.raises(
        FormatError, match=r"expected it in one of the files, found it in 1.safetensors and 2.safetensors"
    ):
        actshard.open(tmp_path, layout=described("{_}.safetensors", "layers.{layer}", ["row", "dim"]))


def test_a_draft_that_does_not_open_says_so(tmp_path: Path) -> None:
    """Layers of different lengths under names of layers."""
    (tmp_path / "all.pt").write_bytes(torch_bytes({"layer_0": STATES[0], "layer_1": STATES[1]}))
    proposal = registry.get("layout_toml").guess(tmp_path)
    with pytest.raises(ActshardError) as caught:
        actshard.open(tmp_path, layout=proposal.text)
    assert f"this draft does not open yet: {caught.value}" in proposal.unsure


def test_examples_of_equal_length_with_an_axis_of_layers_are_not_taken_for_layers(tmp_path: Path) -> None:
    pairs = [{"states": np.full((3, 4, 8), i, np.float32)} for i in range(5)]
    (tmp_path / "cache.pt").write_bytes(torch_bytes({"num_layers": 3, "pairs": pairs}))
    proposal = registry.get("layout_toml").guess(tmp_path)
    store = actshard.open(tmp_path, layout=proposal.text)
    assert (len(store), len(store.layers)) == (5, 3)
    assert [store.sequence(i, 0)[0, 0] for i in range(5)] == list(range(5))
    assert any("they may be layers" in reason for reason in proposal.unsure)


def test_a_guess_names_the_arrays_that_it_leaves_out_and_prefers_names_of_states(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", logits=np.zeros((4, 5, 99), np.float32), hidden=np.ones((4, 5, 8), np.float32))
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert 'other arrays with two or more axes are left out: "logits"' in proposal.text
    assert actshard.open(tmp_path, layout=proposal.text).d_model == 8


def test_a_guess_takes_lists_of_json_files_of_the_right_length_as_columns(tmp_path: Path) -> None:
    np.save(tmp_path / "acts.npy", np.ones((4, 5, 8), np.float32))
    (tmp_path / "meta.json").write_text(json.dumps({"label": [0, 1, 1, 0], "model": "m", "seeds": [1, 2]}))
    proposal = registry.get("layout_toml").guess(tmp_path)
    table = actshard.open(tmp_path, layout=proposal.text).table
    assert table.to_pydict() == {"label": [0, 1, 1, 0]}


def test_a_guess_takes_the_file_that_is_named_after_states(tmp_path: Path) -> None:
    """Not the one with the most bytes, which are outputs."""
    np.save(tmp_path / "hidden.npy", np.ones((6, 5, 32), np.float32))
    np.save(tmp_path / "logits.npy", np.zeros((6, 5, 100), np.float32))
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert actshard.open(tmp_path, layout=proposal.text).d_model == 32
    assert any("logits.npy" in reason for reason in proposal.unsure)


@pytest.mark.parametrize("place", ["list of the file", "JSON"])
def test_a_guess_finds_lists_of_lengths(place: str, tmp_path: Path) -> None:
    """Padding would count as content otherwise."""
    arrays = {"hidden": np.ones((4, 5, 32), np.float32)}
    if place == "JSON":
        (tmp_path / "meta.json").write_text(json.dumps({"lengths": [5, 1, 3, 2], "model": "m"}))
    else:
        arrays["lengths"] = np.array([5, 1, 3, 2])
    np.savez(tmp_path / "all.npz", **arrays)
    proposal = registry.get("layout_toml").guess(tmp_path)
    with actshard.open(tmp_path, layout=proposal.text) as store:
        assert (store.token_counts.tolist(), store.table.column_names) == ([5, 1, 3, 2], [])


def test_a_guess_takes_the_recorded_shape_and_dtype_of_a_raw_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 5, 32)).astype(np.float16)
    values.tofile(tmp_path / "acts.dat")
    for dtype, shape, opens in (
        ("torch.float16", [6, 5, 32], True),
        ("float16", [6, 5, 33], False),
        ("f", None, False),
    ):
        (tmp_path / "meta.json").write_text(json.dumps({"shape": shape, "dtype": dtype}))
        proposal = registry.get("layout_toml").guess(tmp_path)
        assert ("fill in both" in proposal.text) == (not opens)
        if opens:
            store = actshard.open(tmp_path, layout=proposal.text)
            assert np.array_equal(store.layer(0).rows(), values.reshape(-1, 32))


def test_a_guess_names_files_that_are_no_activations(tmp_path: Path) -> None:
    put_safetensors(tmp_path / "sae_weights.safetensors", {"W_enc": STATES[0], "W_dec": STATES[0]})
    (tmp_path / "cfg.json").write_text("{}")
    assert "weights of a sparse autoencoder" in registry.get("layout_toml").guess(tmp_path).unsure[0]
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    (chunks / "index.json").write_text(json.dumps({"chunks": [{"filename": "chunk-0-0.bin"}], "config": {}}))
    (chunks / "chunk-0-0.bin").write_bytes(bytes(100))
    with pytest.raises(FormatError, match="LitData"):
        registry.get("layout_toml").guess(chunks)


def test_a_guess_of_a_short_last_axis_is_unsure_of_it(tmp_path: Path) -> None:
    np.save(tmp_path / "acts.npy", np.ones((32, 6), np.float32))
    assert any("a longer one may be" in reason for reason in registry.get("layout_toml").guess(tmp_path).unsure)


# -- proposals: which values belong to which example -----------------------------------------------------------------------


def guessed(folder: Path) -> tuple[dict[str, list[Any]], list[str]]:
    """The columns of a folder as its draft describes it, and what is unsure about it."""
    proposal = registry.get("layout_toml").guess(folder)
    assert not [reason for reason in proposal.unsure if "does not open" in reason], proposal.text
    with actshard.open(folder, layout=proposal.text) as store:
        return store.table.to_pydict(), proposal.unsure


def put_files(folder: Path, numbers: list[int]) -> None:
    for n in numbers:
        np.save(folder / f"prompt_{n}.npy", np.full((3, 32), n, np.float32))


def put_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in (list(columns), *rows)) + "\n")


@pytest.mark.parametrize("name", ["id", "Unnamed: 0"])
def test_a_guess_joins_lines_by_the_field_that_numbers_the_examples(name: str, tmp_path: Path) -> None:
    put_files(tmp_path, [0, 1, 2, 3])
    put_csv(tmp_path / "labels.csv", {name: [3, 1, 0, 2], "label": ["d", "b", "a", "c"]})
    columns, _ = guessed(tmp_path)
    assert columns == {"example": [0, 1, 2, 3], "label": ["a", "b", "c", "d"]}


def test_a_guess_joins_columns_of_json_by_their_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "acts.npy", np.ones((4, 5, 32), np.float32))
    (tmp_path / "meta.json").write_text(json.dumps({"index": [3, 1, 0, 2], "label": ["d", "b", "a", "c"]}))
    columns, _ = guessed(tmp_path)
    assert columns["label"] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("numbers", "labels", "reason"),
    [
        ([0, 2, 5], {"label": [7, 8, 9]}, "the numbers of the examples have gaps (0, 2, 5)"),
        ([0, 1, 2], {"file": ["prompt_2.npy", "prompt_0.npy", "prompt_1.npy"], "label": [7, 8, 9]}, "its 'file' names"),
        ([0, 1, 2], {"id": [12, 10, 11], "label": [7, 8, 9]}, "its 'id' is not in ascending order"),
        ([0, 1, 2], {"": [2, 0, 1], "label": [7, 8, 9]}, "its column without a name has the examples in another order"),
    ],
    ids=["gaps", "names", "ids", "index of pandas"],
)
def test_a_guess_attaches_no_values_whose_order_is_not_that_of_the_examples(
    numbers: list[int], labels: dict[str, list[Any]], reason: str, tmp_path: Path
) -> None:
    put_files(tmp_path, numbers)
    put_csv(tmp_path / "labels.csv", labels)
    columns, unsure = guessed(tmp_path)
    assert columns == {"example": numbers}
    (remark,) = [text for text in unsure if "labels.csv" in text]
    assert remark.startswith('file = "labels.csv" is left out, as a comment: ')
    assert reason in remark


def test_a_guess_attaches_values_whose_names_are_in_the_order_of_the_examples(tmp_path: Path) -> None:
    put_files(tmp_path, [0, 2, 5])
    put_csv(tmp_path / "labels.csv", {"file": ["prompt_0", "prompt_2", "prompt_5"], "label": [7, 8, 9]})
    columns, _ = guessed(tmp_path)
    assert columns["label"] == [7, 8, 9]


def test_a_guess_attaches_no_list_to_keys_that_a_file_has_in_another_order(tmp_path: Path) -> None:
    value = {f"prompt_{n}": STATES[n] for n in (2, 0, 1)} | {"labels": ["c", "a", "b"]}
    (tmp_path / "all.pt").write_bytes(torch_bytes(value))
    columns, unsure = guessed(tmp_path)
    assert "labels" not in columns
    assert any("the file has the examples in another order (2, 0, 1)" in reason for reason in unsure)
    (tmp_path / "all.pt").write_bytes(torch_bytes(dict(sorted(value.items())) | {"labels": ["a", "b", "c"]}))
    assert guessed(tmp_path)[0]["labels"] == ["a", "b", "c"]


def test_a_guess_leaves_out_no_file_that_it_describes(tmp_path: Path) -> None:
    np.save(tmp_path / "acts.npy", np.ones((8, 2, 16), np.float16))
    np.save(tmp_path / "labels.npy", np.arange(8))
    np.save(tmp_path / "more.npy", np.ones((8, 2, 15), np.float16))
    columns, unsure = guessed(tmp_path)
    assert "labels" in columns
    assert [reason for reason in unsure if "labels.npy" in reason] == []
    assert any("1 other .npy files are left out, such as 'more.npy'" in reason for reason in unsure)


def test_a_guess_finds_labels_in_any_shard(tmp_path: Path) -> None:
    for shard in range(1, 4):
        arrays = {f"layers.{shard}": np.full((4, 5, 32), shard, np.float32)}
        arrays |= {"labels": np.arange(4, dtype=np.float32)} if shard == 2 else {}
        put_safetensors(tmp_path / f"acts-{shard:05}-of-00003.safetensors", arrays)
    columns, _ = guessed(tmp_path)
    assert columns["labels"] == [0, 1, 2, 3]


def test_a_guess_finds_lists_of_each_batch(tmp_path: Path) -> None:
    for batch in range(2):
        value = {"acts": np.full((3, 4, 32), batch, np.float32), "labels": [3 * batch, 3 * batch + 1, 3 * batch + 2]}
        (tmp_path / f"batch_{batch}.pt").write_bytes(torch_bytes(value))
    assert guessed(tmp_path)[0]["labels"] == list(range(6))
