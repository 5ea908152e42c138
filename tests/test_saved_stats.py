"""Statistics that are kept beside a dataset, and streams that use them by name."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import actshard
from actshard.looking import saved
from actshard.looking.stats import Stats
from actshard.streaming.selection import CONTENT, Selection
from conftest import GOLDEN, saev_dump
from served import served


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(7)
    with actshard.create(tmp_path / "run", "zarr", layers=[3, 5], d_model=6) as writer:
        for n in (4, 7, 1, 9):
            writer.append([rng.normal([[[5.0]], [[0.0]]], 2, (2, n, 6)).astype(np.float32)])
    return tmp_path / "run"


def same(a: Stats, b: Stats) -> bool:
    return a.as_plain() == b.as_plain()


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def kept(store: Any, layer: Any) -> Stats | None:
    """The saved statistics of all content."""
    return saved.kept(store, layer, CONTENT.resolve(store, [layer]))


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass over rows from now on."""

    def stats(*_: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(Stats, "of", stats)


def test_kept_statistics_are_read_back_with_the_same_bits(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = actshard.open(data)
    made = {layer: store.stats(layer, save=True) for layer in store.layers}
    assert all(same(made[layer], store.stats(layer)) for layer in store.layers)
    assert len(files(data.with_name("run.stats"))) == 4
    never(monkeypatch)
    other = actshard.open(data)
    for layer, stats in made.items():
        found = other.stats(layer, save=True)
        assert same(found, stats)
        assert found.layer == layer
        assert found.norms.median == stats.norms.median
        assert found.findings() == stats.findings()


def test_files_of_earlier_releases_are_used_and_are_looked_up_without_a_read_of_lengths(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names are digests of the layer, ``tokens``, ``ignore_labels`` and the examples of a filter."""
    store = actshard.open(data)
    part = store.filter([0, 2])
    for each, options, name in (
        (store, {}, "5ad7c70a"),
        (store, {"tokens": "last"}, "1a43e3ae"),
        (part, {}, "6c2e05fc"),
    ):
        stats = each.stats(3, save=True, **options)  # type: ignore[arg-type]  # one of several
        (file,) = data.with_name("run.stats").glob(f"layer-3-{name}.json")
        assert json.loads(file.read_text())["actshard_stats"] == 3
        with monkeypatch.context() as patch:
            never(patch)
            patch.delattr(Selection, "resolve")
            assert same(each.stats(3, save=True, **options), stats)  # type: ignore[arg-type]  # one of several
            found = saved.kept(each, 3, Selection(**options))  # type: ignore[arg-type]  # one of several
            assert found is not None
            assert same(found, stats)


def test_the_arrays_are_a_safetensors_file(data: Path) -> None:
    store = actshard.open(data)
    stats = store.stats(5, save=True)
    (file,) = data.with_name("run.stats").glob("*.safetensors")
    found = load_file(file)
    for name in ("mean", "variance", "std", "min", "max", "nan", "inf", "zeros"):
        np.testing.assert_array_equal(found[name], getattr(stats, name))
    np.testing.assert_array_equal(found["norm_edges"], stats.norms.edges)
    np.testing.assert_array_equal(found["norm_counts"], stats.norms.counts)
    said = json.loads(file.with_suffix(".json").read_text())
    assert said["about"]["findings"] == stats.findings()


def test_a_dataset_that_changed_is_read_again(data: Path) -> None:
    store = actshard.open(data)
    before = store.stats(3, save=True)
    shutil.rmtree(data)
    with actshard.create(data, "zarr", layers=[3, 5], d_model=6) as writer:
        writer.append([np.ones((2, 4, 6), np.float32)])
    after = actshard.open(data).stats(3, save=True)
    assert after.rows == 4
    assert not same(before, after)
    assert same(after, actshard.open(data).stats(3, save=True))


def test_a_file_of_the_same_size_and_another_time_counts_as_changed(data: Path) -> None:
    store = actshard.open(data)
    store.stats(3, save=True)
    chunk = max((file for file in data.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    assert kept(store, 3) is not None
    os.utime(chunk, ns=(0, 10**18))
    assert kept(store, 3) is None


def test_statistics_of_files_that_change_meanwhile_are_not_kept(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = actshard.open(data)
    chunk = max((file for file in data.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)

    def change(*_: object) -> Stats:
        os.utime(chunk, ns=(0, 10**18))
        return store.stats(3)

    with caplog.at_level(logging.WARNING, "actshard"):
        assert saved.kept_or_made(store, 3, CONTENT.resolve(store, [3]), True, change).rows == 21
    assert "changed while they were read" in caplog.text
    assert not data.with_name("run.stats").exists()


@pytest.mark.parametrize("damage", ["cut", "bits", "json", "shape", "version", "missing", "huge", "other"])
def test_damaged_files_are_not_used_and_are_replaced(data: Path, damage: str) -> None:
    store = actshard.open(data)
    made = store.stats(3, save=True)
    folder = data.with_name("run.stats")
    (arrays,), (file,) = folder.glob("*.safetensors"), folder.glob("*.json")
    said = json.loads(file.read_text())
    if damage == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-8])
    elif damage == "bits":
        whole = bytearray(arrays.read_bytes())
        whole[-1] ^= 1
        arrays.write_bytes(whole)
    elif damage == "json":
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "shape":
        said["stats"]["norm_bins"] = [[5, -1]]
    elif damage == "version":
        said["actshard_stats"] = 99
    elif damage == "huge":
        os.truncate(arrays, 1 << 40)
    elif damage == "missing":
        arrays.unlink()
    else:
        said = ["something else"]
    if damage in ("shape", "version", "other"):
        file.write_text(json.dumps(said))
    assert kept(store, 3) is None
    assert same(store.stats(3, save=True), made)
    assert kept(store, 3) is not None


def test_rows_that_were_chosen_have_their_own_statistics(data: Path) -> None:
    store = actshard.open(data)
    part = store.filter([0, 2])
    whole, some = store.stats(3, save=True), part.stats(3, save=True)
    every = store.stats(3, tokens="last", save=True)
    assert (whole.rows, some.rows, every.rows) == (21, 5, 4)
    assert len(files(data.with_name("run.stats"))) == 6
    assert (kept(store, 3).rows, kept(part, 3).rows) == (21, 5)  # type: ignore[union-attr]  # they were kept
    assert kept(store.filter([1]), 3) is None
    assert kept(store, 5) is None


@pytest.mark.parametrize("how", ["dict", "text", "file"])
def test_a_folder_has_statistics_for_each_description_of_it(how: str, tmp_path: Path) -> None:
    """The files are equal; a ``layout=`` decides which values they contain."""
    (tmp_path / "d").mkdir()
    np.random.default_rng(0).normal(size=(30, 8)).astype("<f4").tofile(tmp_path / "d/acts.bin")

    def opened(order: str) -> actshard.Store:
        about = {"files": "acts.bin", "axes": ["row", "dim"], "dtype": "float32", "shape": [-1, 8], "byteorder": order}
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in about.items())
        text = f"version = 1\n[activations]\n{lines}\n"
        (tmp_path / "layout.toml").write_text(text)
        given = {"dict": {"version": 1, "activations": about}, "text": text, "file": tmp_path / "layout.toml"}
        return actshard.open(tmp_path / "d", layout=given[how])

    for order in ("little", "big", "little"):
        store = opened(order)
        layer = store.layers[0]
        if how == "file" and order == "big":  # changed after it was opened: the values are those of the old description
            (tmp_path / "layout.toml").write_text("version = 1")
        assert same(store.stats(layer, save=True), store.stats(layer)), order
        assert same(store.stats(layer, save=True), store.stats(layer)), order


def test_a_folder_has_statistics_for_each_naming_of_its_layers(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN / "draft/specforge_eagle3", tmp_path / "d")
    namings: list[dict[str, Any] | None] = [None, {"layers": [2, 1, 0]}, {"layers": [0, 1, 2]}, None]
    for naming in namings:
        store = actshard.open(path, layout=naming)
        for layer in (0, 2):
            assert same(store.stats(layer, save=True), store.stats(layer)), (naming, layer)
        assert actshard.verify(path, layout=naming, deep=True).ok
        assert actshard.verify(store, deep=True).ok
    with pytest.raises(actshard.ArgumentError, match="layout: saev datasets describe themselves"):
        actshard.verify(saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"), layout={"layers": [0]})


def test_another_folder_and_joined_stores(data: Path, tmp_path: Path) -> None:
    store = actshard.open(data)
    shutil.copytree(data, tmp_path / "more")
    both = actshard.concat([store, actshard.open(tmp_path / "more")])
    with pytest.raises(actshard.ArgumentError, match="pass a folder, save=PATH"):
        both.stats(3, save=True)
    made = both.stats(3, save=tmp_path / "kept")
    assert made.rows == 42
    assert same(both.stats(3, save=tmp_path / "kept"), made)
    assert kept(both, 3) is None
    for bad in (1, None, ["x"]):
        with pytest.raises(actshard.ArgumentError, match="save: expected True or a folder"):
            store.stats(3, save=bad)  # type: ignore[arg-type]  # a wrong value is the test


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_of_others_leads_to_the_cache_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.parent.chmod(0o555)
    try:
        in_the_cache(data, monkeypatch)
    finally:
        data.parent.chmod(0o755)


def in_the_cache(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = data / ".." / "cache"
    monkeypatch.setenv("ACTSHARD_CACHE", str(own))
    store = actshard.open(data)
    made = store.stats(3, save=True)
    found = kept(actshard.open(data), 3)
    assert found is not None
    assert same(found, made)


def test_where_the_folder_beside_cannot_be_made_the_cache_folder_is_used(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.with_name("run.stats").write_text("a file of that name")
    in_the_cache(data, monkeypatch)
    assert data.with_name("run.stats").read_text() == "a file of that name"
    assert (data.parent / "cache-stats").is_dir()


def test_kept_statistics_are_no_dataset_and_no_part_of_one(data: Path) -> None:
    store = actshard.open(data)
    store.stats(3, save=True)
    assert actshard.verify(data, deep=True).ok
    with pytest.raises(actshard.UnknownFormatError):
        actshard.open(data.with_name("run.stats"))
    assert actshard.open(data.parent).path == store.path, "the only dataset in that folder"


def stacked(store: Any, layer: Any, **options: Any) -> Any:
    return np.concatenate([batch.activations for batch in store.stream(layer, 5, dtype=np.float64, **options)])


@pytest.mark.parametrize("layer", [3, [3, 5]])
@pytest.mark.parametrize("keep", [False, True])
def test_streams_take_statistics_by_name(data: Path, layer: Any, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = actshard.open(data)
    each = [store.stats(x, save=keep) for x in np.atleast_1d(layer).tolist()]
    mean, std = np.stack([s.mean for s in each]), np.stack([s.std for s in each])
    plain = [
        stacked(store, layer, center=mean),
        stacked(store, layer, center=mean, divide=std.copy()),
        stacked(store, layer, normalize=each),
    ]
    if keep:
        never(monkeypatch)
    named = [
        stacked(store, layer, center="mean"),
        stacked(store, layer, center="mean", divide="std"),
        stacked(store, layer, normalize="stats"),
    ]
    for a, b in zip(plain, named, strict=True):
        np.testing.assert_array_equal(a, b)
    for center in (None, "mean"):
        rows = stacked(store, layer, center=center, scale="mean-sqrt-d")
        np.testing.assert_allclose((rows**2).sum(-1).mean(0), 6, rtol=1e-12)


def test_names_mean_the_rows_that_the_stream_has(data: Path) -> None:
    store = actshard.open(data)
    store.stats(3, save=True)
    for options in ({"tokens": "last"}, {"keep": [True, False, True, True]}):
        rows = stacked(store, 3, center="mean", **options)
        np.testing.assert_allclose(rows.mean(0), 0, atol=1e-12)
    rows = stacked(store.filter([1, 3]), 3, center="mean")
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-12)


LEAVING_OUT: list[dict[str, Any]] = [
    {"min_token": 1},
    {"max_norm": "1.05x median"},
    {"max_norm": "1.3x median", "min_token": 1},
    {"max_norm": float("inf")},
    {"min_token": 1, "tokens": "all", "keep": [True, False, True, True]},
]


@pytest.mark.parametrize("options", LEAVING_OUT, ids=str)
@pytest.mark.parametrize("layer", [3, [3, 5]])
def test_names_leave_out_what_the_stream_leaves_out(data: Path, layer: Any, options: dict[str, Any]) -> None:
    """The mean of all rows, sinks included, moved the rows that remained away from 0."""
    store = actshard.open(data)
    for each in np.atleast_1d(layer).tolist():
        store.stats(each, save=True)
    rows = stacked(store, layer, **options)
    assert 3 < len(rows) <= 21
    np.testing.assert_allclose(stacked(store, layer, center="mean", **options), rows - rows.mean(0), atol=1e-12)
    both = rows - rows.mean(0)
    for named in ({"normalize": "stats"}, {"center": "mean", "divide": "std"}):
        np.testing.assert_allclose(stacked(store, layer, **named, **options), both / both.std(0), rtol=1e-9)
    scaled = stacked(store, layer, center="mean", scale="mean-sqrt-d", **options)
    np.testing.assert_allclose((scaled**2).sum(-1).mean(0), 6, rtol=1e-12)
    if layer == 3:
        stats = store.stats(3, **options)
        assert stats.rows == len(rows)
        np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-12)
        assert same(store.stats(3, save=True, **options), stats)
        assert same(store.stats(3, save=True, **options), stats)
        if "keep" not in options:
            whole = [b.activations for b in store.sequences_stream(3, 16, center="mean", dtype=np.float64, **options)]
            np.testing.assert_allclose(np.concatenate(whole).sum(0), 0, atol=1e-10)


WRONG: list[dict[str, Any]] = [
    {"center": "meen"},
    {"center": "mean", "divide": np.ones(5)},
    {"center": "mean", "scale": "unitnorm"},
    {"normalize": "stats", "center": 1.0},
    {"divide": "std", "scale": 2.0},
    {"center": "mean", "epoch": -1},
    {"center": "mean", "rank": 2, "world_size": 2},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_arguments_are_refused_before_rows_are_read(
    data: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = actshard.open(data)
    never(monkeypatch)
    monkeypatch.setattr(actshard.streaming.selection, "within", None)
    with pytest.raises(actshard.ArgumentError):
        store.stream(3, 4, max_norm=3.0, **options)
    with pytest.raises(actshard.ArgumentError):
        store.sequences_stream(3, 16, max_norm=3.0, **options)


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("stream", {"batch_size": 4, "buffers": []}),
        ("stream", {"batch_size": 4, "buffers": 5}),
        ("stream", {"batch_size": 4, "memory": 1, "shuffle": "window"}),
        ("stream", {"batch_size": 4, "dtype": "int32"}),
        ("sequences_stream", {"batch_tokens": 16, "dtype": "int32"}),
        ("sequences_stream", {"batch_tokens": 16, "columns": ["nothing"]}),
        ("sequences_stream", {"batch_tokens": 16, "too_long": "cut"}),
    ],
)
def test_wrong_arguments_of_one_verb_are_refused_before_rows_are_read(
    data: Path, verb: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = actshard.open(data)
    never(monkeypatch)
    monkeypatch.setattr(actshard.streaming.selection, "within", None)
    with pytest.raises((actshard.ArgumentError, actshard.DtypeError, actshard.NotStoredError)):
        getattr(store, verb)(3, max_norm=3.0, center="mean", **options)


def test_a_named_stream_resumes_and_pickles(data: Path) -> None:
    store = actshard.open(data)
    stream = store.stream(3, 4, center="mean", shuffle="exact", seed=1)
    loop = iter(stream)
    next(loop)
    state = stream.state_dict()
    rest = [batch.activations for batch in loop]
    again = pickle.loads(pickle.dumps(store.stream(3, 4, center="mean", shuffle="exact", seed=1)))
    again.load_state_dict(state)
    for a, b in zip(rest, [batch.activations for batch in again], strict=True):
        np.testing.assert_array_equal(a, b)


def test_sequences_pairs_and_mixtures_take_names(data: Path, tmp_path: Path) -> None:
    store = actshard.open(data)
    batches = list(store.sequences_stream(3, 16, center="mean", dtype=np.float64))
    assert abs(sum(batch.activations.sum() for batch in batches)) < 1e-9
    shutil.copytree(data, tmp_path / "more")
    pair = actshard.pair(store, tmp_path / "more")
    rows = np.concatenate([b.activations for b in pair.stream(3, 5, center="mean", dtype=np.float64)])
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"center": "median"}, 'center: expected numbers or "mean", found .median.'),
        ({"divide": "unit-norm"}, 'divide: expected numbers or "std"'),
        ({"normalize": "mean"}, 'normalize: expected numbers or "stats"'),
        ({"scale": "std"}, '"mean-sqrt-d", found .std.'),
        ({"center": "mean", "normalize": "stats"}, "not supported with normalize="),
        ({"scale": "mean-sqrt-d", "divide": "std"}, "not supported with scale="),
    ],
)
def test_unknown_names_and_combinations_are_refused(data: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(actshard.ArgumentError, match=said):
        actshard.open(data).stream(3, 4, **options)  # type: ignore[arg-type]  # wrong values are the test


def test_every_golden_format_keeps_statistics(tmp_path: Path) -> None:
    for name in ("lmprobe/fullseq_f32", "zarr/single_consolidated/activations.zarr"):
        target = tmp_path / Path(name).name
        shutil.copytree(GOLDEN / name, target)
        store = actshard.open(target)
        made = store.stats(store.layers[0], save=True)
        found = kept(actshard.open(target), store.layers[0])
        assert found is not None
        assert same(found, made)


def test_a_plan_keeps_them_too(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = actshard.open(data)
    expected = store.stats(3)
    for save in (False, True):
        plan = actshard.plan.stats(data, tasks=2, save=save)
        for task in range(len(plan)):
            plan.run(task)
        plan.commit()
        found = kept(actshard.open(data), 3)
        assert (found is not None) == save
    assert found is not None
    assert same(found, expected)


def test_a_dataset_behind_a_url_has_them_in_the_cache_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTSHARD_CACHE", str(tmp_path / "cache"))
    with served(data.parent) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", actshard.ActshardWarning)  # names cannot be listed
        url = f"http://127.0.0.1:{server.port}"
        store = actshard.open(f"{url}/run")
        made = store.stats(3, save=True)
        found = kept(actshard.open(f"{url}/run"), 3)
    assert found is not None
    assert same(found, made)
    assert [file.suffix for file in sorted((tmp_path / "cache-stats").rglob("*.*"))] == [".json", ".safetensors"]


@pytest.mark.parametrize("form", [list, iter, np.array])
def test_labels_to_ignore_may_be_in_any_iterable(form: Any, tmp_path: Path) -> None:
    """An iterator can be read once, but selections and statistics are made of it several times."""
    path = shutil.copytree(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"), tmp_path / "efe18415")
    store = actshard.open(path)
    layer, labels = store.layers[0], store.labels
    assert labels is not None
    ignored = [int(labels.flat[0]), 255]
    assert store.stats(layer).rows > store.stats(layer, ignore_labels=ignored).rows
    for options in ({}, {"min_token": 2}, {"max_norm": np.inf}):
        want = store.stats(layer, ignore_labels=ignored, **options)
        assert same(store.stats(layer, ignore_labels=form(ignored), **options), want)
        stream = store.stream(layer, 4, center="mean", ignore_labels=form(ignored), dtype=np.float64, **options)
        assert stream.num_rows == want.rows
        np.testing.assert_allclose(np.concatenate([b.activations for b in stream]).mean(0), 0, atol=1e-6)
    mixed = actshard.mix([(store, 1), (store, 1)]).stream(layer, 4, ignore_labels=form(ignored))
    assert all((labels[b.examples, b.tokens - store.special_tokens] != ignored[0]).all() for b in mixed)
    for _ in range(2):
        assert store.stats(layer, ignore_labels=form(ignored), save=True).rows == len(
            np.concatenate([b.examples for b in store.stream(layer, 4, ignore_labels=ignored)])
        )


@pytest.mark.parametrize("ignored", [["a"], [None], "12", [1.7], [True], [256], 5])
def test_a_plan_refuses_the_labels_that_a_stream_refuses(ignored: Any, tmp_path: Path) -> None:
    store = actshard.open(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    with pytest.raises(actshard.ArgumentError) as want:
        store.stream(store.layers[0], 4, ignore_labels=ignored)
    with pytest.raises(type(want.value)) as found:
        actshard.plan.stats(store.path, ignore_labels=ignored, work=tmp_path / "work")
    assert found.value.detail == want.value.detail


@pytest.mark.parametrize("options", [{}, {"max_norm": 1e9}])
def test_a_function_that_chooses_rows_at_random_is_asked_once(data: Path, options: dict[str, Any]) -> None:
    store, rng, asked = actshard.open(data), np.random.default_rng(0), []

    def keep(table: Any) -> Any:
        asked.append(len(table))
        return [rng.random(n) < 0.5 for n in store.token_counts]

    for make in (
        lambda: store.stream(3, 4, center="mean", keep=keep, dtype=np.float64, **options),
        lambda: store.sequences_stream(3, 64, center="mean", keep=keep, dtype=np.float64, **options),
    ):
        asked.clear()
        rows = np.concatenate([b.activations.reshape(-1, store.d_model) for b in make()])
        assert asked == [len(store)]
        np.testing.assert_allclose(rows.sum(0), 0, atol=1e-9)
