"""Plots: axes, tables of the same data, and files that are the same for the same data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import actshard
from actshard import plot
from actshard.cli import app
from actshard.cli._options import PLOTS, PLOTS_OF_CACHES
from actshard.looking.stats.summary import Norms
from actshard.plot.activations import thinned
from actshard.plot.norms import QUANTILES, bars, density, least_shift
from actshard.plot.sampled import compared
from actshard.plot.style import labels, number
from actshard.tokens import open_cache
from actshard.tokens.looking import look
from conftest import GOLDEN, refuses

pytest.importorskip("matplotlib")

CACHE = GOLDEN / "levanter/text_llama3style_multishard"


@pytest.fixture
def store(tmp_path: Path) -> actshard.Store:
    """30 examples of 5 tokens; names of layers that are formulas for matplotlib."""
    rng = np.random.default_rng(0)
    with actshard.create(tmp_path / "run", "zarr", layers=["a$_{", "b$\\frac$"], d_model=16) as writer:
        writer.append(rng.normal(2, 3, size=(30, 2, 5, 16)).astype(np.float32), columns={"label": [0, 1, 1] * 10})
    return actshard.open(tmp_path / "run")


def drawn(what: str, store: actshard.Store, **options: Any) -> Any:
    if what in PLOTS_OF_CACHES:
        cache = open_cache(next(CACHE.rglob("shard_ledger.json")).parent)
        return getattr(plot, what)(look(cache), **options)
    return getattr(plot, what)(store, **options)


@pytest.mark.parametrize("what", PLOTS)
def test_every_plot_names_its_axes_and_has_a_table(what: str, store: actshard.Store) -> None:
    ax = drawn(what, store)
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.get_title(loc="left")
    table = drawn(what, store, table=True)
    assert table.num_rows > 0
    assert not {"", None} & set(table.column_names)


@pytest.mark.parametrize("what", PLOTS)
def test_every_plot_opens_paths_and_refuses_other_types(what: str, store: actshard.Store) -> None:
    draw = getattr(plot, what)
    place = next(CACHE.rglob("shard_ledger.json")).parent if what in PLOTS_OF_CACHES else store.path
    want = drawn(what, store, table=True)
    for path in (Path(place), str(place)):
        assert draw(path, table=True).equals(want)
    for wrong in (7, None, [place], b"data"):
        with pytest.raises(actshard.ArgumentTypeError, match=f"expected .* path.*, found {type(wrong).__name__}$"):
            draw(wrong, table=True)
    with pytest.raises(actshard.MissingFileError, match="expected a "):
        draw("nowhere", table=True)
    if what not in PLOTS_OF_CACHES:
        cache = open_cache(next(CACHE.rglob("shard_ledger.json")).parent)
        with refuses(actshard.ArgumentTypeError, None, "Token caches have the plots lengths, frequency and packing$"):
            draw(cache)
        with refuses(actshard.ArgumentTypeError, None, r"found PairedStores. Pass its as_store\(\)$"):
            draw(actshard.pair(store, store))


@pytest.mark.slow
@pytest.mark.parametrize("what", PLOTS)
@pytest.mark.parametrize("kind", [".svg", ".png"])
def test_the_same_data_give_the_same_file(what: str, kind: str, store: actshard.Store, tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        with plot.style():
            plot.save(drawn(what, store), tmp_path / f"{name}{kind}")
        files.append((tmp_path / f"{name}{kind}").read_bytes())
    assert files[0] == files[1]
    assert files[0].startswith(b"<?xml" if kind == ".svg" else b"\x89PNG")
    assert b"<dc:date>" not in files[0]


def test_tables_have_the_numbers_of_the_statistics(store: actshard.Store) -> None:
    stats = {layer: store.stats(layer) for layer in store.layers}
    norms = plot.norms(store, table=True).to_pydict()
    assert norms["layer"] == list(store.layers)
    assert norms["mean_norm"] == [x.mean_norm for x in stats.values()]
    rows = store.layer(store.layers[0]).rows()[:].astype(np.float64)
    expected = np.linalg.norm(rows.mean(0)) / np.sqrt(rows.var(0).sum())
    assert plot.gamma(store, store.layers[0], table=True)["gamma"][0].as_py() == pytest.approx(expected, rel=1e-9)
    sizes = np.linalg.norm(rows, axis=1)
    for name, q in QUANTILES.items():
        assert norms[name][0] == pytest.approx(np.quantile(sizes, q, method="inverted_cdf"), rel=1 / 256)
    bins = plot.histogram(store, store.layers[0], table=True).to_pydict()
    for low, high, n in zip(bins["low"], bins["high"], bins["rows"], strict=True):
        assert n == np.count_nonzero((low <= sizes) & (sizes < high))
    widths = np.subtract(bins["high"], bins["low"])
    assert bins["density"] == pytest.approx((bins["rows"] / widths).tolist(), rel=1e-15)
    by_position = plot.positions(store, store.layers[0], table=True).to_pydict()
    assert (by_position["first"], by_position["end"]) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert by_position["mean_norm"] == pytest.approx(sizes.reshape(30, 5).mean(0).tolist(), rel=1e-12)
    dimensions = plot.dimensions(store, store.layers[0], table=True)
    assert dimensions["std"].to_pylist() == pytest.approx(rows.std(0).tolist(), rel=1e-6)
    ranges = plot.ranges(store, table=True).to_pydict()
    assert ranges["min"][0] == rows.min()
    assert ranges["max"][0] == rows.max()
    distance = plot.shuffle(store, batch_size=10, order=None, table=True)["distance"].to_pylist()
    assert distance == [1] * (30 * 4)


def test_pooled_rows_have_the_examples_around_them_as_neighbours(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((64, 1, 1, 4)).astype(np.float32)
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4) as writer:
        writer.append(rows)
    store = actshard.open(tmp_path / "d")
    assert plot.shuffle(store, batch_size=10, order=None, table=True)["distance"].to_pylist() == [1] * 63
    shuffled = plot.shuffle(store, batch_size=10, order="exact", table=True)["distance"].to_numpy()
    assert len(shuffled) == 63
    assert shuffled.mean() > 5


def test_bars_are_whole_bins_and_have_all_rows() -> None:
    """Also of norms that differ by many powers of ten, without those of norm 0."""
    rng = np.random.default_rng(0)
    for sizes in (
        np.exp(rng.normal(size=500) * 40),
        rng.normal(50, 0.1, 500),
        np.array([3.0]),
        np.array([0.0, 0, 1e-300]),
    ):
        numbers, counts = np.unique(sizes.view(np.int64) >> 45, return_counts=True)
        norms = Norms.of(list(zip(numbers.tolist(), counts.tolist(), strict=True)))
        shift = least_shift([norms])
        edges, rows = bars(norms, shift)
        assert len(rows) <= 60
        assert rows.sum() == np.count_nonzero(sizes)
        expected, _ = np.histogram(sizes[sizes > 0], edges)
        assert rows.tolist() == expected.tolist()
    assert bars(Norms.of([]), 0)[1].sum() == 0


@pytest.mark.slow
def test_histograms_have_no_step_where_bins_double_in_width(tmp_path: Path) -> None:
    """Norms that are uniform from 4 to 16: bars from 8 on are twice as wide and have twice the rows."""
    rows = np.linspace(4, 16, 24_000, endpoint=False, dtype=np.float32)[:, None, None, None]
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=1) as writer:
        writer.append(rows)
    ax = plot.histogram(tmp_path / "run")
    heights, edges, _ = ax.patches[0].get_data()
    assert len({round(x, 6) for x in np.diff(edges)}) == 2
    assert heights == pytest.approx(np.full(len(heights), 2_000), rel=0.01)
    assert ax.get_ylabel() == "rows per unit of norm"
    assert 0 < ax.get_ylim()[0] < 2_000


def test_densities_are_finite_and_low_bars_are_seen() -> None:
    edges = np.array([0, 5e-324, 1.0, 1e300])
    high = density(edges, np.array([3, 0, 2]))
    assert high.tolist() == [1e300, 0, 2 / 1e300]


@pytest.mark.parametrize(("tokens", "ticks"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (12, [0, 2, 4, 6, 8, 10])])
def test_positions_are_marked_at_whole_numbers(tokens: int, ticks: list[int], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(9, 1, tokens, 4)).astype(np.float32)
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=4) as writer:
        writer.append(rows)
    for ax in (plot.positions(tmp_path / "run"), plot.dimensions(tmp_path / "run")):
        low, high = ax.get_xlim()
        seen = [x for x in ax.get_xticks().tolist() if low <= x <= high]
        assert seen == ([0, 1, 2, 3] if ax.get_xlabel() == "dimension" else ticks)


def test_errors_of_separability_are_drawn_within_0_and_1(tmp_path: Path) -> None:
    """Also of a layer where all examples are right: its error is not 0."""
    labels = np.arange(40) % 2
    rows = np.stack([labels, np.zeros(40), labels], 1)[:, :, None, None].astype(np.float32) * np.ones(3, np.float32)
    with actshard.create(tmp_path / "run", "zarr", layers=[0, 1, 2], d_model=3) as writer:
        writer.append(rows, columns={"label": labels.tolist()})
    found = actshard.open(tmp_path / "run").separability("label")
    assert (found.accuracy + found.error).max() > 1
    ax = plot.separability(tmp_path / "run", found=found)
    bars = np.array([x[:, 1] for x in ax.containers[0].lines[2][0].get_segments()])
    assert bars.min() >= 0
    assert bars.max() <= 1
    assert bars[:, 0].tolist() == pytest.approx((found.accuracy - found.error).tolist())
    assert "standard error" in ax.get_legend_handles_labels()[1][1]


def test_given_axes_are_drawn_into(store: actshard.Store) -> None:
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plot.norms(store, ax=ax) is ax
    assert ax.lines


def test_lines_keep_their_extremes() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[77_777], values[5] = 99, np.nan
    at, shown = thinned(values)
    assert len(at) <= 1500
    assert (shown == values[at])[~np.isnan(shown)].all()
    assert shown.max() == 99


def test_numbers_of_axes_are_short() -> None:
    assert [number(x) for x in (0, 0.01, 300, 20_000, 5e6, 1e-12, -3e9)] == [
        "0",
        "0.01",
        "300",
        "20k",
        "5M",
        "1e-12",
        "-3G",
    ]


def test_the_command_writes_files(store: actshard.Store, tmp_path: Path) -> None:
    for what in ("gamma", "dimensions", "packing"):
        source = CACHE if what in PLOTS_OF_CACHES else tmp_path / "run"
        told = CliRunner().invoke(app, ["plot", str(source), what, "-o", str(tmp_path / f"{what}.svg")])
        assert told.exit_code == 0, told.output
        assert (tmp_path / f"{what}.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["norms", "-o", "x.pdf"], "svg or .png"),
        (["other", "-o", "x.svg"], "one of the plots norms"),
        (["packing", "-o", "x.svg"], "expected a plot of a dataset of activations (norms"),
        (["dimensions", "-o", "x.svg", "--layer", "0,1"], "--layer: expected one layer for dimensions, found '0,1'"),
    ],
)
def test_wrong_requests_name_what_there_is(words: list[str], match: str, store: actshard.Store, tmp_path: Path) -> None:
    words = [str(tmp_path / "x.svg") if word == "x.svg" else word for word in words]
    told = CliRunner().invoke(app, ["plot", str(tmp_path / "run"), *words])
    assert isinstance(told.exception, actshard.ArgumentError)
    assert match in str(told.exception)
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("option", "text"),
    [("--layer", "--layer: token caches have no layers"), ("--tokens", "--tokens: plots of a token cache cover all")],
)
def test_plots_of_token_caches_refuse_options_of_layers(option: str, text: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["plot", str(CACHE), "packing", "-o", str(tmp_path / "x.svg"), option, "last"])
    assert isinstance(told.exception, actshard.ArgumentError)
    assert text in str(told.exception)


def test_the_help_names_the_layers_that_each_plot_draws(store: actshard.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(app, ["plot", "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
    assert (
        "for histogram, positions and spectrum the first, the middle and the last; for dimensions the last"
        in told.output
    )
    assert "Default: all." not in told.output


def test_without_matplotlib_tables_work_and_plots_name_the_extra(
    store: actshard.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.norms(store, table=True).num_rows == 2
    with refuses(actshard.MissingExtraError, None, r"pip install 'actshard\[report\]'"):
        plot.norms(store)


@pytest.mark.parametrize(
    ("names", "shown", "what"),
    [
        (["model.layers.0", "model.layers.12"], ["0", "12"], "layer model.layers.*"),
        (["blocks.0.hook_mlp_out", "blocks.5.hook_mlp_out"], ["0", "5"], "layer blocks.*.hook_mlp_out"),
        ([3, 10], ["3", "10"], "layer"),
        (["mlp"], ["mlp"], "layer"),
        (["attn", "mlp"], ["attn", "mlp"], "layer"),
        (["a.", "a.b"], ["", "b"], "layer a.*"),
        (["a.a", "a.a.a"], ["a", "a.a"], "layer a.*"),
    ],
)
def test_parts_that_all_names_share_are_named_once(names: list[Any], shown: list[str], what: str) -> None:
    assert labels(names) == (shown, what)


def test_plots_of_samples_have_the_numbers_of_the_store(store: actshard.Store, tmp_path: Path) -> None:
    spectrum = plot.spectrum(store, table=True).to_pydict()
    found = {layer: store.spectrum(layer) for layer in store.layers}
    assert spectrum["eigenvalue"] == [x for one in found.values() for x in one.eigenvalues.tolist()]
    assert spectrum["direction"] == [*range(1, 17)] * 2
    assert spectrum["cumulative"][15] == pytest.approx(1)
    similar = plot.similarity(store, table=True).to_pydict()
    assert similar["cka"] == store.similarity().cka.reshape(-1).tolist()
    assert similar["cosine"] == store.similarity().cosine.reshape(-1).tolist()
    assert list(zip(similar["layer"], similar["other_layer"], strict=True)) == [
        (a, b) for a in store.layers for b in store.layers
    ]
    probe = plot.separability(store, table=True).to_pydict()
    assert probe["accuracy"] == store.separability("label").accuracy.tolist()
    assert probe["chance"] == [0.5, 0.5]
    with actshard.create(tmp_path / "wide", "zarr", layers=[3, 4], d_model=4) as writer:
        writer.append(np.zeros((30, 2, 5, 4), np.float32))
    other = actshard.open(tmp_path / "wide")
    across = plot.similarity(store, found=store.similarity(other=other), table=True)
    assert across.column_names == ["layer", "other_layer", "cka"]
    assert across["other_layer"].to_pylist() == ["3", "4"] * 2
    for ax in (
        plot.similarity(other),
        plot.spectrum(other),
        plot.similarity(store, found=store.similarity(other=other)),
    ):
        assert ax.get_title(loc="left")  # without variance there is nothing to draw, but axes
    with refuses(
        actshard.NotStoredError,
        other.path,
        "label: expected labels of tokens, one of the columns label, labels, class, target",
    ):
        plot.separability(other)
    with refuses(actshard.ArgumentError, store.path, "at least two classes"):
        plot.separability(store, of=[1] * 30)


def test_pca_draws_coordinates_along_the_principal_directions(store: actshard.Store) -> None:
    """Against numpy: the eigenvectors of the covariance of the last tokens, whose signs are free."""
    layer = store.layers[1]
    rows = store.last_tokens(layer).astype(np.float64)
    vectors = np.linalg.eigh(np.cov(rows.T))[1][:, ::-1][:, :2]
    wanted = (rows - rows.mean(axis=0)) @ vectors
    points = plot.pca(store, layer, table=True).to_pydict()
    assert points["example"] == list(range(30))
    assert points["token"] == [4] * 30
    assert points["color"] == store.table["label"].to_pylist()
    for name, column in zip("xy", wanted.T, strict=True):
        assert np.allclose(np.abs(points[name]), np.abs(column), atol=1e-6)
    spectrum = store.spectrum(layer, tokens="last", directions=2)
    again = spectrum.project(store.layer(layer)[:, -1])
    assert np.array_equal(again, np.stack([points["x"], points["y"]], axis=1))
    assert spectrum.project(np.zeros((2, 3, 16))).shape == (2, 3, 2)
    assert np.isnan(spectrum.project([[float("inf")] + [0] * 15])).all()
    with pytest.raises(actshard.ArgumentError, match=r"expected \(\.\.\., 16\) numbers, found \(2, 15\)"):
        spectrum.project(np.zeros((2, 15)))


def test_pca_colours_classes_scales_and_missing_values(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 1, 1, 4)).astype(np.float32)
    columns = {
        "few": [None if i == 7 else i % 3 for i in range(40)],
        "many": [None if i == 7 else i / 7 for i in range(40)],
        "texts": [f"text {i}" for i in range(40)],
        "none": [None] * 40,
    }
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=4) as writer:
        writer.append(rows, columns=columns)
    legends = {}
    for name in columns:
        ax = plot.pca(tmp_path / "run", color=name)
        legends[name] = None if ax.get_legend() is None else [text.get_text() for text in ax.get_legend().get_texts()]
        assert sum(len(points.get_offsets()) for points in ax.collections) == 40
    assert legends["few"] == ["no value", "0", "1", "2"]
    assert legends["many"] is None
    assert legends["texts"] is not None
    assert legends["texts"][0] == "other values"
    assert len(legends["texts"]) == 6
    assert legends["none"] == ["no value"]
    with pytest.raises(actshard.NotStoredError, match="labl"):
        plot.pca(tmp_path / "run", color="labl")


def test_pca_of_rows_that_do_not_vary_is_refused(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "run", "zarr", layers=[0], d_model=4) as writer:
        writer.append(np.ones((5, 1, 1, 4), np.float32))
    with refuses(actshard.ArgumentError, tmp_path / "run", "expected rows that vary in two directions"):
        plot.pca(tmp_path / "run")


def test_the_command_colours_pca_by_a_column(store: actshard.Store, tmp_path: Path) -> None:
    out = str(tmp_path / "pca.svg")
    done = CliRunner().invoke(app, ["plot", str(store.path), "pca", "-o", out, "--color", "label", "--quiet"])
    assert done.exit_code == 0, done.output
    assert Path(out).exists()
    done = CliRunner().invoke(app, ["plot", str(store.path), "norms", "-o", out, "--color", "label"])
    assert done.exit_code != 0
    assert "--color: expected the plot pca" in str(done.exception)


def test_the_command_draws_separability_of_a_named_column(store: actshard.Store, tmp_path: Path) -> None:
    run = CliRunner().invoke
    out = str(tmp_path / "x.svg")
    done = run(app, ["plot", str(store.path), "separability", "-o", out, "--label", "label", "--quiet"])
    assert done.exit_code == 0, done.output
    assert "Linear probe of label" in Path(out).read_text()
    for options, text in (
        (["separability", "--label", "none"], "has no column 'none'"),
        (["norms", "--label", "label"], "--label: expected the plot separability"),
        (["separability", "--tokens", "all"], "--tokens: expected content for separability"),
    ):
        done = run(app, ["plot", str(store.path), *options, "-o", out])
        assert done.exit_code
        assert text in str(done.exception)


def test_of_many_layers_evenly_spaced_ones_are_compared() -> None:
    assert compared(list(range(5))) == [0, 1, 2, 3, 4]
    assert compared([]) == []
    some = compared(list(range(200)))
    assert (len(some), some[0], some[-1], sorted(set(some))) == (32, 0, 199, some)
