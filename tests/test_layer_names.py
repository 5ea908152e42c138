"""Layers whose names are texts: every call that takes a layer takes them, and a dataset keeps its own kind of name."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base import layers
from actshard.cli._options import of_store, renamed, several
from conftest import install, refuses

NAMES = ("blocks.0.hook_resid_post", "blocks.5.hook_resid_post", "ln_final, [bold]")

HOOKS = """
import json
from pathlib import Path

import numpy as np

from actshard._native import Rows
from actshard.formats import Contents, Evidence, Format


class Hooks(Format):
    name = "hooks"
    description = "a file of float32 rows (example, layer, token), and names.json"

    def detect(self, path):
        found = (path / "names.json").exists()
        return Evidence(found, "a folder with names.json", "names.json" if found else "none")

    def open(self, path, options):
        names = json.loads((path / "names.json").read_text())
        each = 2 * 4 * 4 * len(names)
        n = (path / "rows.f32").stat().st_size // each
        rows = Rows.strided(
            [(path / "rows.f32", n * 2 * len(names))], num_examples=n, examples_per_file=n, num_groups=len(names),
            num_tokens=2, width=4, dtype="F32", descr=np.dtype(np.float32), io=options.io,
        )

        def columns(wanted):
            import pyarrow as pa

            return pa.table({name: np.arange(n) for name in wanted})

        return Contents(
            format=self.name, path=path, metadata={}, layers=tuple(names), d_model=4, dtype=np.dtype(np.float32),
            num_examples=n, token_counts=lambda: np.full(n, 2), rows=rows, column_names=("number",), tokens_each=2,
            columns=columns, files=lambda: [path / "rows.f32"],
        )
"""

ROWS = np.arange(5 * 3 * 2 * 4, dtype=np.float32).reshape(5, 3, 2, 4)


@pytest.fixture
def hooks(plugins: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a dataset of the plugin's format with these names of its three layers."""
    install(plugins, "hooks_plugin", HOOKS, "hooks = hooks_plugin:Hooks")

    def make(names: Any = NAMES, folder: str = "data") -> Path:
        path = tmp_path / folder
        path.mkdir()
        (path / "names.json").write_text(json.dumps(names))
        (path / "rows.f32").write_bytes(ROWS[:, : len(names)].tobytes())
        return path

    return make


def test_every_read_takes_a_named_layer(hooks: Callable[..., Path]) -> None:
    store = actshard.open(hooks())
    assert store.layers == NAMES
    for at, name in enumerate(NAMES):
        assert np.array_equal(store.gather(name, [0, 4], [0, -1]), ROWS[[0, 4], at, [0, 1]])
        assert np.array_equal(store.gather(np.str_(name), 3, 1), ROWS[3:4, at, 1])
        assert np.array_equal(store.last_tokens(name), ROWS[:, at, 1])
        assert np.array_equal(store.sequence(2, name), ROWS[2, at])
        assert np.array_equal(np.stack(store.sequences([1, 3], name)), ROWS[[1, 3], at])
        assert np.array_equal(store.layer(name), ROWS[:, at])
        assert store.layer(name).layer == name
        assert np.array_equal(store.layer(name).rows()[3], ROWS[1, at, 1])
        assert np.array_equal(store.stats(name).mean, ROWS[:, at].reshape(-1, 4).mean(0))
        assert store.tokens_in(name).tolist() == [2] * 5
    assert np.array_equal(store.sequences([1, 3], list(NAMES[:2]))[1], ROWS[3, 1])
    assert NAMES[0] in repr(store)
    assert "ln_final" in repr(store.layer(NAMES[2]))
    again = pickle.loads(pickle.dumps(store.filter([2])))
    assert np.array_equal(again.sequence(0, NAMES[1]), ROWS[2, 1])


def test_streams_name_their_layers_by_text(hooks: Callable[..., Path]) -> None:
    store = actshard.open(hooks())
    for asked, expected in (
        (NAMES[1], NAMES[1:2]),
        (list(NAMES[:2]), NAMES[:2]),
        ("all", NAMES),
        (np.array(NAMES), NAMES),
    ):
        stream = store.stream(asked, 4)
        assert stream.layers == expected
        batch = next(iter(stream))
        assert batch.layers.dtype.kind == "U"
        assert batch.layers.tolist() == list(expected)
        assert expected[0][:6] in repr(batch)
    one = next(iter(store.stream(NAMES[1], 4)))
    assert np.array_equal(one.activations, ROWS[:2, 1].reshape(4, 4))
    for batch in store.stream("all", 7, interleave=True, shuffle="exact", seed=1):
        at = [NAMES.index(name) for name in batch.layers.tolist()]
        assert np.array_equal(batch.activations, ROWS[batch.examples, at, batch.tokens])


def test_a_state_of_named_layers_resumes_and_refuses_other_layers(hooks: Callable[..., Path]) -> None:
    store = actshard.open(hooks())
    stream = store.stream(list(NAMES[:2]), 3, shuffle="window", seed=3)
    every = [b.activations for b in stream]
    loop = iter(stream := store.stream(list(NAMES[:2]), 3, shuffle="window", seed=3))
    next(loop)
    state = json.loads(json.dumps(stream.state_dict()))
    other = store.stream(list(NAMES[:2]), 3, shuffle="window", seed=3)
    other.load_state_dict(state)
    assert np.array_equal(np.concatenate([b.activations for b in other]), np.concatenate(every[1:]))
    with pytest.raises(actshard.ArgumentError, match="layers"):
        store.stream(list(NAMES[1:]), 3, shuffle="window", seed=3).load_state_dict(state)


@pytest.mark.parametrize("layer", ["blocks.1", 0, -1, True, 1.0, None, b"ln_final", ["blocks.0.hook_resid_post"]])
def test_a_layer_that_is_not_stored_is_an_error_that_lists_the_names(hooks: Callable[..., Path], layer: Any) -> None:
    store = actshard.open(hooks())
    with pytest.raises(actshard.LayerError, match=r"blocks\.5\.hook_resid_post"):
        store.gather(layer, 0, 0)
    with pytest.raises(actshard.LayerError, match=r"blocks\.5\.hook_resid_post"):
        store.layer(layer)


def test_digits_are_another_name_than_the_number(hooks: Callable[..., Path]) -> None:
    store = actshard.open(hooks(["5", "-1", "all"]))
    assert np.array_equal(store.last_tokens("5"), ROWS[:, 0, 1])
    with pytest.raises(actshard.LayerError, match="layer 5 is not stored"):
        store.last_tokens(5)


def test_all_is_refused_where_a_layer_is_named_all(hooks: Callable[..., Path]) -> None:
    store = actshard.open(hooks(["embed", "all"]))
    with pytest.raises(actshard.ArgumentError, match=r'Use \["all"\] for it, store.layers for all'):
        store.stream("all", 2)
    assert store.stream(["all"], 2).layers == ("all",)
    assert store.stream(store.layers, 2).layers == ("embed", "all")


@pytest.mark.parametrize(
    "names", [["a", "a", "b"], ["1", 1, "b"], ["", "a", "b"], ["a\0", "b", "c"], [True, 2, 3], [1.0, 2, 3]]
)
def test_a_dataset_with_unusable_names_is_refused(hooks: Callable[..., Path], names: list[Any]) -> None:
    with pytest.raises(actshard.FormatError, match=r"layers?: expected"):
        actshard.open(hooks(names))


def test_names_survive_a_conversion_to_a_format_that_stores_them(hooks: Callable[..., Path], tmp_path: Path) -> None:
    store = actshard.open(hooks())
    done = actshard.convert(store, tmp_path / "zarr", "zarr", layers=NAMES[1:], verify=True)
    made = actshard.open(done.path)
    assert made.layers == NAMES[1:]
    assert not [loss for loss in done.losses if loss.what == "layers"]
    assert np.array_equal(made.layer(NAMES[2]), ROWS[:, 2])
    again = actshard.open(actshard.convert(made, tmp_path / "again", "zarr", layers=NAMES[1]).path)
    assert again.layers == NAMES[1:2]


@pytest.mark.parametrize("format", ["saev", "lmprobe", "pickle"])
def test_a_format_of_integers_asks_for_numbers_and_tells_the_loss(
    hooks: Callable[..., Path], tmp_path: Path, format: str
) -> None:
    store = actshard.open(hooks())
    with pytest.raises(actshard.ArgumentError, match=r"layers: expected integers.*blocks.0.hook_resid_post"):
        actshard.convert(store, tmp_path / "refused", format)
    assert not (tmp_path / "refused").exists()
    done = actshard.convert(store, tmp_path / format, format, layers={NAMES[0]: 0, NAMES[1]: 5}, verify=True)
    assert actshard.open(done.path).layers == (0, 5)
    (told,) = [loss.detail for loss in done.losses if loss.what == "layers"]
    assert "blocks.5.hook_resid_post becomes 5" in told


def test_create_and_stage_take_named_layers(plugins: Path, tmp_path: Path) -> None:
    with actshard.create(tmp_path / "new", "zarr", layers=NAMES, d_model=4) as writer:
        writer.append(ROWS)
    assert actshard.open(tmp_path / "new").layers == NAMES
    staged = actshard.stage(tmp_path / "new", tmp_path / "staged", layers=NAMES[1])
    assert staged.layers == NAMES[1:2]
    assert np.array_equal(actshard.open(staged.path).layer(NAMES[1]), ROWS[:, 1])
    assert actshard.stage(tmp_path / "new", tmp_path / "staged", layers=[NAMES[1]]).fetched == 0
    with pytest.raises(actshard.ArgumentError, match="layers: expected integers, which saev"):
        actshard.create(tmp_path / "no", "saev", layers=["a"], d_model=4)
    for wrong in ("blocks", 5, [], ["a", "a"], ["1", 1], [True, 2], [1.0], {"a"}, None):
        with pytest.raises(actshard.ArgumentError, match="layers: expected"):
            actshard.create(tmp_path / "no", "zarr", layers=wrong, d_model=4)  # type: ignore[arg-type]


def test_verify_names_the_layer_of_a_finding(hooks: Callable[..., Path]) -> None:
    path = hooks()
    rows = ROWS.copy()
    rows[1, 1, 0, 2] = np.nan
    (path / "rows.f32").write_bytes(rows.tobytes())
    report = actshard.verify(path, deep=True)
    assert any("blocks.5.hook_resid_post" in str(finding) for finding in report.findings)


def test_commands_take_and_print_names(
    hooks: Callable[..., Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actshard.cli import main

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["actshard", *words])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert left.value.code in (0, None), said.err
        return str(said.out)

    path = str(hooks())
    assert "ln_final, [bold]" in run("info", path)
    assert json.loads(run("info", path, "--json"))["layers"] == list(NAMES)
    assert "ln_final, [bold]" in run("head", path)
    assert list(json.loads(run("stats", path, "--layer", NAMES[1], "--json"))) == [NAMES[1]]
    assert list(json.loads(run("stats", path, "--layer", NAMES[2], "--json"))) == [NAMES[2]]
    run("convert", path, str(tmp_path / "made"), "--to", "saev", "--layer", "blocks.5.hook_resid_post=5")
    run("convert", path, str(tmp_path / "zarr"), "--to", "zarr", "--layer", json.dumps(NAMES[1:]))
    assert actshard.open(tmp_path / "zarr").layers == NAMES[1:]


def test_names_on_a_command_line() -> None:
    assert several("3,-7, a.b", "--layer") == [3, -7, "a.b"]
    assert several('["5", "a,b"]', "--layer") == ["5", "a,b"]
    assert renamed("-1=23,a=0", "--layer") == {-1: 23, "a": 0}
    assert renamed('{"a=b": 4}', "--layer") == {"a=b": 4}
    assert renamed("", "--layer") is None
    assert of_store("5,-1", ("5", "-1", "a"), "--layer") == ["5", "-1"]
    assert of_store("a,b", ("a,b", "a"), "--layer") == ["a,b"]
    for wrong in ("3,,4", ",", "[3", "a=b=c"):
        with pytest.raises(actshard.ArgumentError, match="--layer: expected names"):
            renamed(wrong, "--layer")


def test_names_are_shown_on_one_line() -> None:
    assert layers.plain("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    assert layers.short(["a", "b"] * 20) == "['a', 'b'" + ", 'a', 'b'" * 5 + ", ... 40 in all]"
    assert layers.short([3, -1]) == "[3, -1]"
    assert layers.array_of([3, -1]).dtype == np.int64
    assert layers.array_of([]).dtype == np.int64


@pytest.mark.parametrize("format", ["zarr", "pickle", "lmprobe", "saev"])
def test_numbers_of_layers_that_are_written_are_read(tmp_path: Path, format: str) -> None:
    """One bound for the writer and the reader."""
    rows = np.ones((2, 2, 1, 4), np.float32)
    with actshard.create(tmp_path / "npy", "npy", layers=["a", "b"], d_model=4) as source:
        source.append(rows)
    refused = 0
    for number in [
        1 << 29,
        -(1 << 29),
        10**9 - 1,
        10**9,
        1 << 30,
        1 << 40,
        (1 << 62) - 1,
        1 << 62,
        -(1 << 62),
        1 << 63,
    ]:
        path = tmp_path / str(number)
        try:
            writer = actshard.create(path, format, layers=[5, number], d_model=4)
        except actshard.ArgumentError:
            refused += 1
            with refuses(actshard.ArgumentError, None, f"found {number}"):
                actshard.convert(source.path, path, format, layers={"a": 5, "b": number})
            assert not path.exists()
            continue
        with writer:
            writer.append(rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert actshard.open(writer.path).layers == (5, number)
    assert 0 < refused < 9


@pytest.mark.parametrize(
    ("names", "text"),
    [(["a"], r"\{'a': 0\}\), create\(layers=\[0\]\)"), (["a", "b"], r"\{'a': 0, ...\}\), create\(layers=\[0, 1\]\)")],
)
def test_layers_without_numbers_are_refused_with_numbers_to_use(names: list[str], text: str, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match=f"Number them: convert\\(layers={text}"):
        actshard.create(tmp_path / "d", "lmprobe", layers=names, d_model=4)
