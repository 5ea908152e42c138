"""Folders of plain files are read by their description, bit for bit; wrong descriptions name the line."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    FormatError,
    MissingFileError,
    TruncatedFileError,
    UnsupportedError,
)
from actshard.base.location import Location
from actshard.formats import registry
from actshard.formats.layout_toml import description
from conftest import GOLDEN
from shell import run_command
from test_runners import command

CONTAINERS = GOLDEN / "containers"
FOLDERS = sorted(path.parent for path in CONTAINERS.glob("*/layout.toml"))
HOSTILE = CONTAINERS / "hostile"
OTHERS = {
    name: case
    for name, case in json.loads((HOSTILE / "cases.json").read_text()).items()
    if not case["file"].endswith((".pt", ".gz"))
}


def rows_of(store: actshard.Store, layer: int) -> np.ndarray:
    """All rows of a layer, by gather."""
    counts = store.token_counts
    examples = np.repeat(np.arange(len(store)), counts)
    tokens = np.concatenate([np.arange(n) for n in counts]) if len(counts) else np.zeros(0, np.int64)
    return store.gather(layer, examples, tokens)


def same(found: np.ndarray, want: Mapping[str, np.ndarray], layer: int) -> None:
    bits = want.get(f"layer_{layer}_bits")
    if bits is not None:
        assert np.array_equal(np.ascontiguousarray(found).view(bits.dtype), bits)
    else:
        assert found.dtype == want[f"layer_{layer}"].dtype
        assert np.array_equal(found.view("u4"), want[f"layer_{layer}"].view("u4"))


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_rows_are_those_that_were_written(folder: Path, io: str) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    want = dict(np.load(folder / "expected.npz"))
    with actshard.open(folder, io=io) as store:
        assert store.format == "layout_toml"
        assert list(store.layers) == expected["layers"]
        assert store.token_counts.tolist() == want["lengths"].tolist()
        for layer in store.layers:
            same(rows_of(store, layer), want, layer)
            each = [store.sequence(example, layer) for example in range(len(store))]
            same(np.concatenate(each), want, layer)
        stream = store.stream(store.layers[0], 4, shuffle="exact", seed=3, tokens="all")
        got = {
            (int(e), int(t)): row.tobytes()
            for b in stream
            for e, t, row in zip(b.examples, b.tokens, b.activations, strict=True)
        }
        assert len(got) == int(store.token_counts.sum())
        for (example, token), row in got.items():
            assert store.sequence(example, store.layers[0])[token].tobytes() == row


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_columns_are_those_that_were_written(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    want = dict(np.load(folder / "expected.npz"))
    with actshard.open(folder) as store:
        for name, values in expected.get("columns", {}).items():
            assert store.table[name].to_pylist() == values, name
        if "metadata" in expected:
            keys = list(expected["metadata"][0])
            assert store.table.select(keys).to_pylist() == expected["metadata"]
        if "tokens" in want:
            tokens = store.table["token_ids"].to_pylist()
            assert [len(each) for each in tokens] == want["lengths"].tolist()
            assert [token for each in tokens for token in each] == want["tokens"].tolist()
        if "ids" in want:
            assert store.table["example"].to_pylist() == want["ids"].tolist()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_sound_folder_verifies_and_converts(folder: Path, tmp_path: Path) -> None:
    report = actshard.verify(folder, deep=True)
    assert report.ok, report.findings
    if "fp8" in folder.name:
        return  # no other format stores float8
    actshard.convert(folder, tmp_path / "made", "lmprobe" if "bf16" in folder.name else "zarr")
    want = dict(np.load(folder / "expected.npz"))
    with actshard.open(tmp_path / "made") as store:
        for layer in store.layers:
            same(rows_of(store, layer), want, layer)


def test_a_layout_is_a_file_or_text_or_a_dict() -> None:
    folder = CONTAINERS / "npy_layer_files_big_endian_f32"
    values = {
        "version": 1,
        "activations": {"files": "resid_L{layer:d}.npy", "axes": ["example", "token", "dim"]},
        "lengths": {"file": "lengths.npy"},
    }
    text = (folder / "layout.toml").read_text()
    for layout in (values, text, folder / "layout.toml", str(folder / "layout.toml")):
        with actshard.open(folder, layout=layout) as store:
            assert store.layers == (4, 20)
            back = pickle.loads(pickle.dumps(store))
            assert np.array_equal(rows_of(back, 4), rows_of(store, 4))


WRONG = {
    "version": ("version = 2\n[activations]\nfiles = 'a.npy'\naxes = ['dim']", "line 1: version: expected 1, found 2"),
    "no dim": (
        "version = 1\n[activations]\nfiles = 'a.npy'\naxes = ['token']",
        "line 4: activations.axes: expected 'dim'",
    ),
    "axis": (
        "version = 1\n[activations]\nfiles = 'a.npy'\naxes = ['site', 'dim']",
        "line 4: activations.axes: unknown axis 'site'",
    ),
    "key": (
        "version = 1\n[activations]\nfiles = 'a.npy'\naxes = ['dim']\nlayer = 3",
        "line 5: activations.layer: unknown key",
    ),
    "capture": (
        "version = 1\n[activations]\nfiles = '{x}.npy'\naxes = ['dim']",
        "line 3: activations.files: expected each of",
    ),
    "above": (
        "version = 1\n[activations]\nfiles = '../a.npy'\naxes = ['dim']",
        "line 3: activations.files: expected a name below",
    ),
    "twice": (
        "version = 1\n[activations]\nfiles = '{layer:d}.npy'\naxes = ['layer', 'dim']",
        "line 4: activations.axes: 'layer' is already captured",
    ),
    "dtype": (
        "version = 1\n[activations]\nfiles = 'a.bin'\naxes = ['dim']\ndtype = 'x9'",
        "line 5: activations.dtype: expected a dtype",
    ),
    "kind": (
        "version = 1\n[activations]\nfiles = 'a.npy'\naxes = ['dim']\n[lengths]\nkind = 'x'",
        "line 6: lengths.kind: expected 'lengths'",
    ),
    "toml": ("version = 1\n[activations\n", "line 2"),
    "no table": ("version = 1", "activations: expected this table"),
    "pointer": ("version = 1\n[activations]\nfiles = 'a.npy'\naxes = ['dim']\nlayers = 'm.json:/x'", "m.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_description_names_the_line(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.float32))
    (tmp_path / "layout.toml").write_text(text)
    with pytest.raises(ActshardError) as caught:
        actshard.open(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ActshardError):
        actshard.open(tmp_path, layout=text + "\n")


@pytest.mark.parametrize("name", OTHERS)
def test_a_hostile_array_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    case = OTHERS[name]
    shutil.copy(HOSTILE / case["file"], tmp_path)
    activations: dict[str, Any] = {"files": case["file"], "axes": ["row", "dim"]}
    if not case["file"].endswith(".npy"):
        activations["tensor"] = "h"
    with pytest.raises(ActshardError) as caught:
        actshard.open(tmp_path, layout={"version": 1, "activations": activations})
    assert "\n" not in str(caught.value)
    assert case["file"] in str(caught.value)


def save(folder: Path, name: str, array: np.ndarray) -> None:
    np.save(folder / name, array)


def values(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def opened(folder: Path, **tables: Any) -> actshard.Store:
    return actshard.open(folder, layout={"version": 1, **tables})


def test_an_axis_is_pinned_by_its_position(tmp_path: Path) -> None:
    array = values(3, 2, 4, 5)
    save(tmp_path, "a.npy", array)
    tables = {"files": "a.npy", "axes": ["example", "site", "token", "dim"]}
    for site in (0, 1):
        with opened(tmp_path, activations=tables | {"select": {"site": site}}) as store:
            assert np.array_equal(np.stack([store.sequence(e, 0) for e in range(3)]), array[:, site])
    with pytest.raises(FormatError, match="expected a position below 2, found 2"):
        opened(tmp_path, activations=tables | {"select": {"site": 2}})


def test_layers_along_the_axis_of_dim_are_split(tmp_path: Path) -> None:
    array = values(4, 3 * 5)
    save(tmp_path, "a.npy", array)
    with opened(
        tmp_path, activations={"files": "a.npy", "axes": ["token", "layer*dim"], "layers": [1, 17, 32]}
    ) as store:
        assert store.layers == (1, 17, 32)
        assert store.d_model == 5
        for n, layer in enumerate(store.layers):
            assert np.array_equal(store.sequence(0, layer), array[:, 5 * n : 5 * n + 5])


def test_left_padding_is_skipped_by_lengths(tmp_path: Path) -> None:
    array = values(2, 4, 3)
    save(tmp_path, "a.npy", array)
    save(tmp_path, "n.npy", np.array([1, 4]))
    lengths = {"file": "n.npy", "pad": "left"}
    with opened(
        tmp_path, activations={"files": "a.npy", "axes": ["example", "token", "dim"]}, lengths=lengths
    ) as store:
        assert np.array_equal(store.sequence(0, 0), array[0, 3:])
        assert np.array_equal(store.sequence(1, 0), array[1])


def test_a_mask_with_holes_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "a.npy", values(2, 4, 3))
    save(tmp_path, "m.npy", np.array([[1, 1, 0, 0], [1, 0, 1, 0]]))
    with pytest.raises(UnsupportedError, match="the mask of example 1 has zeros between its tokens"):
        opened(
            tmp_path,
            activations={"files": "a.npy", "axes": ["example", "token", "dim"]},
            lengths={"file": "m.npy", "kind": "mask"},
        )


def test_lengths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "a.npy", values(2, 4, 3))
    save(tmp_path, "rows.npy", values(5, 3))
    tables = {"files": "a.npy", "axes": ["example", "token", "dim"]}
    for stored, message in (
        ([1, 5], "at most 4 tokens, found 5"),
        ([1], "expected 2, found 1"),
        ([-1, 2], "from 0 up"),
    ):
        save(tmp_path, "n.npy", np.array(stored))
        with pytest.raises(FormatError, match=message):
            opened(tmp_path, activations=tables, lengths={"file": "n.npy"})
    save(tmp_path, "n.npy", np.array([0, 3, 6]))
    with pytest.raises(FormatError, match="expected 5 rows, found 6"):
        opened(
            tmp_path,
            activations={"files": "rows.npy", "axes": ["row", "dim"]},
            lengths={"file": "n.npy", "kind": "offsets"},
        )


def test_numbers_in_names_are_sorted_as_numbers(tmp_path: Path) -> None:
    for n in (10, 9, 100, 1):
        save(tmp_path, f"x{n}.npy", np.full((2, 3), n, np.float32))
    with opened(tmp_path, activations={"files": "x{example:d}.npy", "axes": ["token", "dim"]}) as store:
        assert store.table["example"].to_pylist() == [1, 9, 10, 100]
        assert [float(store.sequence(e, 0)[0, 0]) for e in range(4)] == [1, 9, 10, 100]
    save(tmp_path, "x09.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(FormatError, match=r"two files are example 9: x0?9.npy and x0?9.npy"):
        opened(tmp_path, activations={"files": "x{example:d}.npy", "axes": ["token", "dim"]})


def test_files_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "0.npy", values(2, 3))
    save(tmp_path, "1.npy", values(2, 4))
    with pytest.raises(FormatError, match=r"1\.npy: expected rows of 3 F32 as in 0\.npy, found 4 F32"):
        opened(tmp_path, activations={"files": "{example:d}.npy", "axes": ["token", "dim"]})
    with pytest.raises(MissingFileError, match="expected files named"):
        opened(tmp_path, activations={"files": "{example:d}.npz", "tensor": "h", "axes": ["token", "dim"]})


def test_a_raw_file_has_exactly_the_bytes_of_its_shape(tmp_path: Path) -> None:
    array = values(6, 5)
    (tmp_path / "a.bin").write_bytes(b"1234" + array.tobytes())
    tables = {"files": "a.bin", "axes": ["row", "dim"], "dtype": "float32", "offset": 4}
    with opened(tmp_path, activations=tables | {"shape": [-1, 5]}) as store:
        assert np.array_equal(rows_of(store, 0), array)
    for shape, message in (([-1, 7], "a multiple of 28 bytes, found 120"), ([5, 5], "expected 100 bytes, found 120")):
        with pytest.raises(FormatError, match=message):
            opened(tmp_path, activations=tables | {"shape": shape})


def test_a_file_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, "0.npy", values(50, 300))
    with opened(tmp_path, activations={"files": "{example:d}.npy", "axes": ["token", "dim"]}) as store:
        (tmp_path / "0.npy").write_bytes((tmp_path / "0.npy").read_bytes()[:20_000])
        with pytest.raises(ActshardError) as caught:
            store.gather(0, 0, np.arange(50))
        assert isinstance(caught.value, TruncatedFileError | FormatError)


def test_rows_apart_are_copied_and_rows_in_place_are_views(tmp_path: Path) -> None:
    array = values(40, 64)
    save(tmp_path, "0.npy", array)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    with opened(tmp_path, activations={"files": "{example:d}.npy", "axes": ["token", "dim"]}) as store:
        assert not store.sequence(0, 0).flags.writeable
    with opened(tmp_path, activations={"files": "f.npy", "axes": ["token", "dim"]}) as store:
        assert np.array_equal(store.sequence(0, 0), array)
        assert store.gather(0, 0, [5, -1]).tolist() == array[[5, -1]].tolist()


PAGE = (Path(__file__).parents[1] / "docs/formats/layout.md").read_text()
SCHEMA = json.loads((Path(__file__).parents[1] / "docs/formats/layout.schema.json").read_text())


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_the_descriptions_of_the_page_are_descriptions(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n": 3}')
    (tmp_path / "meta.json").write_text('{"hidden_dim": 8}')
    if "site" in text:
        text = text.replace('["example", "token", "dim"]', '["token", "site", "dim"]')
    assert description.read(Location.at(tmp_path), text).activations.axes[-1] == "dim"


def test_the_schema_has_the_keys_that_are_read(tmp_path: Path) -> None:
    """A key that the schema lacks is refused, and one that it has is not unknown."""
    top = SCHEMA["properties"]
    for table in ("activations", "lengths", "tokens", "columns"):
        keys = (top[table].get("items") or top[table])["properties"]
        for key in [*keys, "unknown_key"]:
            base: dict[str, Any] = {"version": 1, "activations": {"files": "a.npy", "axes": ["dim"]}}
            if table == "activations":
                base[table][key] = base[table].get(key, 0)
            else:
                base[table] = [{"tensor": "x", key: 0}] if table == "columns" else {key: 0}
            try:
                description.read(Location.at(tmp_path), base)
                known = True
            except ArgumentError as error:
                known = "unknown key" not in str(error)
            assert known == (key != "unknown_key"), (table, key)


GUESSED = {folder for folder in FOLDERS if not folder.name.startswith(("raw_", "npy_big_fortran"))}


def test_a_guess_tells_what_its_pattern_leaves_out(tmp_path: Path) -> None:
    for split, name in (("train", "emb"), ("train", "mid"), ("val", "emb"), ("val", "mid")):
        (tmp_path / split / name).mkdir(parents=True)
        for i in range(3):
            np.save(tmp_path / split / name / f"{i:05}.npy", np.zeros((40, 8), np.float32))
    np.save(tmp_path / "seqlens.npy", np.zeros(3, np.int64))
    proposed = registry.get("layout_toml").guess(tmp_path)
    assert "# unsure: 9 other .npy files are left out, such as 'train/mid/00000.npy'" in proposed.text


@pytest.mark.parametrize(
    ("name", "shape", "layer", "remark"),
    [
        ("acts.npy", (9, 4, 8), 0, "three axes: taken as example, token, dim; one of the first two may be the layer"),
        ("layer_3_part_0.npy", (9, 8), 3, "the layer's number is taken from 'layer_3_part_0.npy'"),
        ("expected_acts.npy", (9, 8), 0, "the files do not contain the layer's number: put it in 'layers'"),
    ],
)
def test_a_guess_says_what_its_axes_and_layers_are_taken_from(
    name: str, shape: tuple[int, ...], layer: int, remark: str, tmp_path: Path
) -> None:
    np.save(tmp_path / name, np.ones(shape, np.float32))
    proposed = registry.get("layout_toml").guess(tmp_path)
    assert remark in proposed.unsure
    with actshard.open(tmp_path, layout=proposed.text) as store:
        assert store.layers == (layer,)


def test_a_guess_takes_scales_beside_float8_elements(tmp_path: Path) -> None:
    header = {
        "acts": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]},
        "acts_scale": {"dtype": "F32", "shape": [4, 1], "data_offsets": [32, 48]},
    }
    text = json.dumps(header).encode()
    for i in range(3):
        data = bytes([0x38] * 32) + np.full(4, i + 2, "<f4").tobytes()  # 1.0 each
        (tmp_path / f"doc{i}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    proposed = registry.get("layout_toml").guess(tmp_path)
    assert "elements are F8_E4M3, and 'acts_scale' is taken as their scales" in proposed.text
    described = proposed.text.replace('["row", "dim"]', '["token", "dim"]')
    store = actshard.open(tmp_path, layout=described)
    assert store.sequence(1, 0).astype(np.float32).tolist() == [[3.0] * 8] * 4


@pytest.mark.parametrize("folder", sorted(GUESSED), ids=lambda path: path.name)
def test_a_guess_of_a_folder_opens_and_says_what_is_unsure(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("layout.toml", "expected.*"))
    proposal = registry.get("layout_toml").guess(copy)
    with actshard.open(copy, layout=proposal.text) as store, actshard.open(folder) as told:
        assert store.d_model == told.d_model
        assert len(store.layers) == len(told.layers)
        if store.token_counts.tolist() == told.token_counts.tolist() and store.layers == told.layers:
            same(rows_of(store, store.layers[0]), dict(np.load(folder / "expected.npz")), store.layers[0])
        else:
            assert proposal.unsure


@pytest.fixture
def undescribed(tmp_path: Path) -> Path:
    """A folder without its description, which lies elsewhere."""
    source = CONTAINERS / "npy_layer_files_big_endian_f32"
    copy = Path(shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("layout.toml", "expected.*")))
    shutil.copy(source / "layout.toml", tmp_path / "other.toml")
    return copy


def test_a_folder_is_verified_by_a_given_layout(undescribed: Path) -> None:
    layout = undescribed.parent / "other.toml"
    assert actshard.verify(undescribed, layout=layout, deep=True).findings == []
    with actshard.open(undescribed, layout=layout) as store:
        assert actshard.verify(store, deep=True).findings == []
        assert actshard.verify(store.filter([1]), deep=True).findings == []
    path = undescribed / "resid_L4.npy"
    path.write_bytes(path.read_bytes()[:-8])
    report = actshard.verify(undescribed, layout=layout)
    assert [finding.path for finding in report.errors] == [path]
    assert not actshard.verify(undescribed).ok
    assert actshard.verify(undescribed, layout="version = 2\n").codes() == {"metadata"}
    with pytest.raises(ArgumentError, match="describe themselves"):
        actshard.verify(undescribed, layout=layout, format="zarr")


def test_commands_take_and_propose_a_layout(undescribed: Path) -> None:
    def run(*words: str | Path) -> tuple[int, str]:
        done = run_command(*words)
        return done.returncode, done.stdout

    code, text = run("info", "--guess", undescribed)
    assert (code, "resid_L{layer:d}.npy" in text) == (0, True)
    guessed = undescribed.parent / "guessed.toml"
    guessed.write_text(text)
    code, text = run("info", "--guess", "--json", undescribed)
    assert json.loads(text)["unsure"] == registry.get("layout_toml").guess(undescribed).unsure
    for layout in (guessed, undescribed.parent / "other.toml"):
        code, text = run("head", "--json", "--layout", layout, undescribed)
        assert (code, set(json.loads(text)[0]["norms"])) == (0, {"4", "20"})
        code, text = run("verify", "--json", "--layout", layout, undescribed)
        assert (code, json.loads(text)["findings"]) == (0, [])
    assert run("head", undescribed)[0] != 0


def test_commands_that_read_rows_take_a_layout(undescribed: Path, tmp_path: Path) -> None:
    layout = undescribed.parent / "other.toml"
    assert command("stats", undescribed, "--json").returncode == 3
    described = command("stats", CONTAINERS / "npy_layer_files_big_endian_f32", "--json").stdout
    assert command("stats", undescribed, "--json", "--layout", layout).stdout == described
    streamed = command("bench-stream", undescribed, "--json", "--seconds", 5, "--layout", layout)
    assert json.loads(streamed.stdout)["format"] == "layout_toml"
    preview = command("convert", undescribed, "--to", "zarr", "--dry-run", "--json", "--layout", layout)
    assert json.loads(preview.stdout)[0]["refused"] is None
    planned = ("plan", "convert", undescribed, tmp_path / "p", "--to", "npy", "--layout", layout)
    assert json.loads(command(*planned, "-o", tmp_path / "p.json", "--no-measure", "--json").stdout)["tasks"] >= 1
    words = ("convert", undescribed, tmp_path / "z", "--to", "zarr", "--layout", layout)
    assert json.loads(command(*words, "--verify", "--json").stdout)["verified"] is True
    assert command(*words, "--resume", "--exist-ok").returncode == 0
    with actshard.open(tmp_path / "z") as found, actshard.open(undescribed, layout=layout) as want:
        assert found.layers == want.layers
        for layer in want.layers:
            assert rows_of(found, layer).tobytes() == rows_of(want, layer).tobytes()


@pytest.mark.parametrize("given", ["file", "dict"])
def test_a_description_is_read_once(undescribed: Path, given: str) -> None:
    """A store, its copies in other processes, and a plan keep the description that was passed."""
    file = undescribed.parent / "other.toml"
    layout: Any = file if given == "file" else tomllib.loads(file.read_text())
    stored = CONTAINERS / "npy_layer_files_big_endian_f32"
    with actshard.open(stored) as store:
        want = {layer: rows_of(store, layer).tobytes() for layer in store.layers}
    store = actshard.open(undescribed, layout=layout)
    plans = {
        "convert": actshard.plan.convert(undescribed, undescribed.parent / "npy", "npy", tasks=3, layout=layout),
        "verify": actshard.plan.verify(undescribed, tasks=3, layout=layout, work=undescribed.parent / "verified"),
        "stats": actshard.plan.stats(undescribed, tasks=3, layout=layout, work=undescribed.parent / "summed"),
    }
    sent = pickle.dumps(store)
    if given == "file":
        file.write_text("version = 1")
    else:
        layout["activations"]["files"] = "none.npy"
    for copy in (store, pickle.loads(sent)):
        assert {layer: rows_of(copy, layer).tobytes() for layer in copy.layers} == want
    for name, plan in plans.items():
        plan.save(undescribed.parent / f"{name}.json")
        actshard.run(actshard.plan.load(undescribed.parent / f"{name}.json"))
    assert plans["verify"].commit().findings == []
    assert plans["stats"].commit()[4].mean.tobytes() == store.stats(4).mean.tobytes()
    with actshard.open(undescribed.parent / "npy") as made:
        assert {layer: rows_of(made, layer).tobytes() for layer in made.layers} == want


@pytest.mark.parametrize("layout", [5, ["x"], b"x"])
def test_a_layout_of_another_type_is_an_argument_error(undescribed: Path, layout: Any) -> None:
    calls: list[Any] = [actshard.open, actshard.verify, actshard.plan.stats, actshard.plan.verify]
    for call in calls:
        with pytest.raises(actshard.ArgumentTypeError, match=r"layout: expected a path"):
            call(undescribed, layout=layout)


def nested(deep: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(deep):
        made = {"activations": made}
    return made


class Wrong(os.PathLike[str]):
    def __fspath__(self) -> str:
        return 5


@pytest.mark.parametrize("layout", [nested(30_000), Wrong()], ids=["nested", "path"])
def test_a_layout_that_cannot_be_read_is_an_argument_error(undescribed: Path, layout: Any, tmp_path: Path) -> None:
    for call in (actshard.open, actshard.verify):
        with pytest.raises(actshard.ArgumentError, match="layout: "):
            call(undescribed, layout=layout)
    for plan in (actshard.plan.stats, actshard.plan.verify):
        with pytest.raises(actshard.ArgumentError, match="layout: "):
            plan(undescribed, layout=layout, work=tmp_path / "work")


@pytest.mark.parametrize("deep", [False, True])
def test_a_plan_refuses_the_layout_that_verify_refuses(deep: bool, tmp_path: Path) -> None:
    path, layout = GOLDEN / "lmprobe/fullseq_f32", {"layers": [1, 5, 9]}
    with pytest.raises(actshard.ArgumentError, match="describe themselves"):
        actshard.verify(path, layout=layout, deep=deep)
    with pytest.raises(actshard.ArgumentError, match="describe themselves"):
        actshard.plan.verify(path, layout=layout, deep=deep, work=tmp_path / "work")


def test_a_layout_may_be_any_mapping(undescribed: Path) -> None:
    values = tomllib.loads((undescribed.parent / "other.toml").read_text())
    frozen = MappingProxyType({key: MappingProxyType(v) if isinstance(v, dict) else v for key, v in values.items()})
    store = actshard.open(undescribed, layout=frozen)
    assert len(pickle.loads(pickle.dumps(store))) == len(store)
    named = MappingProxyType({"layers": [2, 1, 0]})
    assert actshard.open(GOLDEN / "draft/specforge_eagle3", layout=named).layers[:2] == (2, 1)


def test_a_layout_of_layers_is_refused_for_a_token_cache() -> None:
    cache = GOLDEN / "levanter/text_gpt2style_single/cache/train"
    with pytest.raises(ArgumentError, match="found a token cache"):
        actshard.open(cache, layout={"layers": [1]})
    assert not actshard.verify(cache, layout={"layers": [1]}).ok


def test_layout_of_another_format_is_refused() -> None:
    with pytest.raises(ArgumentError, match="describe themselves"):
        actshard.open(GOLDEN / "zarr", format="zarr", layout={"version": 1})


def test_layers_may_have_names(tmp_path: Path) -> None:
    for name in ("blocks.5.mlp.pre", "blocks.12.attn.post"):
        (tmp_path / name).mkdir()
        for batch in ("b--2", "a--1"):
            save(
                tmp_path / name,
                f"{batch}.npy",
                np.full((2, 3, 4), len(name) + len(batch) * (batch[0] == "a"), np.float32),
            )
    with opened(
        tmp_path, activations={"files": "{layer:s}/{batch:s}.npy", "axes": ["example", "token", "dim"]}
    ) as store:
        assert store.layers == ("blocks.12.attn.post", "blocks.5.mlp.pre")
        assert len(store) == 4
        assert float(store.sequence(0, "blocks.5.mlp.pre")[0, 0]) == 16 + 4
        assert float(store.sequence(3, "blocks.5.mlp.pre")[0, 0]) == 16
