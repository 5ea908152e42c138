"""Which columns of vectors are layers: names decide before kinds and widths, the caller before names; the others are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.base.location import Location
from actshard.formats.candidates import choose, rank_of

N, TOKENS = 6, 5
RNG = np.random.default_rng(0)


def vectors(width: int, layers: int | None = None, tokens: int | None = TOKENS) -> np.ndarray:
    """``(n[, layers][, tokens], width)`` float32."""
    shape = [N, *([] if layers is None else [layers]), *([] if tokens is None else [tokens]), width]
    return RNG.standard_normal(shape).astype(np.float32)


def parquet(path: Path, columns: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    pq.write_table(pa.table({k: pa.array(v.tolist()) for k, v in columns.items()}), path / "data.parquet")
    return path


def arrow(path: Path, columns: dict[str, np.ndarray]) -> Path:
    table = pa.table(
        {k: pa.array((v.astype(np.float32) if v.dtype.kind == "f" else v).tolist()) for k, v in columns.items()}
    )
    path.mkdir()
    with (path / "data-00000-of-00001.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (path / "dataset_info.json").write_text("{}")
    return path


WRITERS = [parquet, arrow]
Writer = Callable[[Path, dict[str, np.ndarray]], Path]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("blocks.0.hook_resid_pre", "blocks.0.mlp.hook_post"),
        ("hidden_states", "embedding"),
        ("acts", "vectors"),
        ("layer_4", "logits"),
        ("hidden", "router_probs"),
        ("residual", "attentions"),
        ("activations", "blocks.3.attn.hook_pattern"),
        ("last_hidden_state", "log_probs"),
        ("vector", "token_scores"),
    ],
)
def test_a_name_of_states_outranks_a_wider_column(write: Writer, name: str, other: str, tmp_path: Path) -> None:
    columns = {other: vectors(32), name: vectors(8), "label": np.arange(N)}
    path = write(tmp_path / "d", columns)
    with pytest.warns(actshard.ActshardWarning, match=f"columns {other} differ from {name}.* reads them instead"):
        store = actshard.open(path)
    assert (store.layers, store.d_model) == ((name,), 8)
    chosen = actshard.open(path, layout={"layers": [other]})
    assert (chosen.layers, chosen.d_model) == ((other,), 32)
    for opened, column in ((store, name), (chosen, other)):
        for example in range(N):
            np.testing.assert_array_equal(opened.sequence(example, column), columns[column][example])
        assert set(opened.table.column_names) == set(columns) - {column}
        assert opened.table["label"].to_pylist() == list(range(N))


@pytest.mark.parametrize("write", WRITERS)
def test_sequences_do_not_outrank_a_name(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "d", {"log_probs": vectors(4), "hidden": vectors(8, tokens=None)})
    with pytest.warns(actshard.ActshardWarning):
        assert actshard.open(path).layers == ("hidden",)


@pytest.mark.parametrize("write", WRITERS)
def test_outputs_alone_are_read_only_if_they_are_named(write: Writer, tmp_path: Path) -> None:
    columns = {"logits": vectors(32), "router_logits": vectors(8)}
    path = write(tmp_path / "d", columns)
    with pytest.raises(
        actshard.FormatError, match=r"found logits, router_logits, by their names .*'layers': \['logits'\]"
    ):
        actshard.open(path)
    assert {f.severity for f in actshard.verify(path).findings} == {"error"}
    assert actshard.open(path, layout={"layers": ["router_logits"]}).d_model == 8


@pytest.mark.parametrize("write", WRITERS)
def test_columns_of_one_kind_are_layers_in_the_order_that_is_named(write: Writer, tmp_path: Path) -> None:
    columns = {name: vectors(8) for name in ("a", "hidden_2", "b")} | {"logits": vectors(8), "x": vectors(4)}
    path = write(tmp_path / "d", columns)
    with pytest.warns(actshard.ActshardWarning, match="columns logits, x differ from a, hidden_2, b"):
        assert actshard.open(path).layers == ("a", "hidden_2", "b")
    store = actshard.open(path, layout={"layers": ["b", "a"]})
    assert store.layers == ("b", "a")
    np.testing.assert_array_equal(store.gather("b", [2], [1]), columns["b"][2, 1][None])
    with pytest.raises(actshard.ArgumentError, match=r"found (x next to a|a next to x)"):
        actshard.open(path, layout={"layers": ["a", "x"]})
    with pytest.raises(actshard.ArgumentError, match=r"no column of vectors 'hiden_2'; do you mean 'hidden_2'\?"):
        actshard.open(path, layout={"layers": ["hiden_2"]})
    done = actshard.convert(store, tmp_path / "to", "npy")
    np.testing.assert_array_equal(actshard.open(done.path).gather("a", [3], [0]), columns["a"][3, 0][None])
    assert actshard.verify(path, deep=True, layout={"layers": ["b", "a"]}).ok


def test_the_best_kind_is_chosen_among_the_best_names(tmp_path: Path) -> None:
    place = Location.at(tmp_path)
    assert choose({"a": 1, "hidden": 0, "b": 0, "logits": 0}, place) == ["hidden", "b"]
    assert choose({"a": 1, "b": 0}, place) == ["a"]
    ranks = {
        2: ("acts-mlp", "state", "resid_pre_router", "hidden"),
        1: (
            "pact",
            "facts",
            "estate",
            "attn_out",
            "attention",
            "reward_model.layers.3",
            "router.0",
            "logit_lens_hidden",
        ),
        0: ("logits", "router_logits", "attentions", "hook_pattern", "reward", "log_probs", "token_scores"),
    }
    assert {rank: tuple(name for name in names if rank_of(name) == rank) for rank, names in ranks.items()} == ranks


# -- three axes of parquet: (layer, token, dim) -------------------------------------------------------------------------


def test_three_axes_that_are_not_named_as_states_are_no_better(tmp_path: Path) -> None:
    """Those of images, for example, whose rows may also have other numbers of sequences."""
    ragged = [np.ones((n, 2, 8)).tolist() for n in (1, 2, 3, 1, 1, 1)]
    for values in (vectors(8, layers=3, tokens=8).tolist(), ragged):
        columns = {"pixel_values": nested(values), "embedding": pa.array(vectors(4, tokens=None).tolist())}
        pq.write_table(pa.table(columns), tmp_path / "d.parquet")
        with pytest.warns(actshard.ActshardWarning, match="columns pixel_values differ from embedding"):
            assert actshard.open(tmp_path / "d.parquet").layers == ("embedding",)


def nested(rows: list[Any]) -> pa.Array:
    return pa.array(rows, pa.list_(pa.list_(pa.list_(pa.float32()))))


def tensors(values: np.ndarray) -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def fixed(values: np.ndarray) -> pa.Array:
    _, layers, tokens, width = values.shape
    kind = pa.list_(pa.list_(pa.list_(pa.float32(), width), tokens), layers)
    return pa.array(values.tolist(), kind)


@pytest.mark.parametrize("as_column", [lambda v: nested(v.tolist()), tensors, fixed], ids=["lists", "tensors", "fixed"])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_axes_of_layers_are_layers(as_column: Callable[[np.ndarray], pa.Array], tokens: int, tmp_path: Path) -> None:
    values = vectors(8, layers=3, tokens=tokens)
    table = pa.table({"hidden_states": as_column(values), "logits": pa.array(vectors(50).tolist())})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=4)
    with pytest.warns(actshard.ActshardWarning, match="columns logits differ from hidden_states"):
        store = actshard.open(tmp_path / "d.parquet")
    assert (store.layers, store.d_model, len(store)) == ((0, 1, 2), 8, N)
    for example in range(N):
        for layer in range(3):
            np.testing.assert_array_equal(store.sequence(example, layer), values[example, layer])
    np.testing.assert_array_equal(
        store.gather(1, [5, 0, 3], [0, tokens - 1, 0]), values[[5, 0, 3], 1, [0, tokens - 1, 0]]
    )
    assert actshard.verify(tmp_path / "d.parquet", deep=True).ok
    done = actshard.convert(tmp_path / "d.parquet", tmp_path / "to", "npy", verify=True)
    assert actshard.open(done.path).layers == (0, 1, 2)


def test_sequences_of_layers_may_be_ragged(tmp_path: Path) -> None:
    values = [RNG.standard_normal((2, n, 4)).astype(np.float32) for n in (3, 1, 5, 2)]
    pq.write_table(pa.table({"acts": nested([v.tolist() for v in values])}), tmp_path / "d.parquet", row_group_size=3)
    store = actshard.open(tmp_path / "d.parquet")
    assert store.token_counts.tolist() == [3, 1, 5, 2]
    for example, value in enumerate(values):
        for layer in range(2):
            np.testing.assert_array_equal(store.sequence(example, layer), value[layer])


def test_several_columns_of_layers_name_them_by_the_column(tmp_path: Path) -> None:
    columns = {name: vectors(8, layers=2) for name in ("acts-mlp", "acts-attn")}
    pq.write_table(pa.table({k: nested(v.tolist()) for k, v in columns.items()}), tmp_path / "d.parquet")
    store = actshard.open(tmp_path / "d.parquet")
    assert store.layers == ("acts-mlp.0", "acts-mlp.1", "acts-attn.0", "acts-attn.1")
    np.testing.assert_array_equal(store.sequence(4, "acts-attn.1"), columns["acts-attn"][4, 1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[[1.0, 2.0]]], "expected 2 layers, found 1"),
        (None, "expected 2 layers, found null"),
        ([[[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]], "expected 1 vectors, found 2"),
        ([[[1.0, 2.0]], [[1.0]]], "expected vectors of 2 values, found 1"),
        ([[[1.0, 2.0]], None], "found null"),
        ([[[1.0, 2.0]], [[1.0, None]]], "found null"),
    ],
)
def test_rows_of_other_layers_are_refused_by_their_number(row: Any, message: str, tmp_path: Path) -> None:
    good = [[[1.0, 2.0]], [[3.0, 4.0]]]
    pq.write_table(pa.table({"acts": nested([good, good, row])}), tmp_path / "d.parquet")
    with pytest.raises(actshard.FormatError, match=rf"row 2.*column 'acts'.*{message}"):
        actshard.open(tmp_path / "d.parquet").sequence(2, 1)
    assert not actshard.verify(tmp_path / "d.parquet").ok


def test_columns_of_more_axes_of_arrow_are_named_and_the_way_to_read_them(tmp_path: Path) -> None:
    columns = {"hidden_states": vectors(8, layers=3), "acts": vectors(4, tokens=None)}
    with pytest.warns(actshard.ActshardWarning, match=r"columns hidden_states have three or more axes.*to_parquet"):
        assert actshard.open(arrow(tmp_path / "a", columns)).layers == ("acts",)
    alone = arrow(tmp_path / "b", {"hidden_states": vectors(8, layers=3), "label": np.arange(N)})
    with pytest.raises(actshard.FormatError, match=r"found hidden_states, label; columns hidden_states have three"):
        actshard.open(alone)
    assert not actshard.verify(alone).ok
    assert actshard.open(parquet(tmp_path / "c", {"hidden_states": vectors(8, layers=3)})).layers == (0, 1, 2)


@pytest.mark.parametrize("write", WRITERS)
def test_what_has_no_layers_is_an_error_that_names_the_columns(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "d", {"label": np.arange(N), "score": np.arange(N)})
    with pytest.raises(actshard.ActshardError, match="label, score"):
        actshard.open(path)


# -- what else files and columns could be -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 32])
def test_lists_of_equally_many_numbers_are_told_if_they_are_left_out(width: int, tmp_path: Path) -> None:
    """Outputs next to states of three axes, whose type has no size."""
    path = parquet(tmp_path / "d", {"logits": vectors(width, tokens=None), "hidden_states": vectors(8, layers=3)})
    with pytest.warns(actshard.ActshardWarning, match="columns logits differ from hidden_states"):
        assert actshard.open(path).layers == (0, 1, 2)


def test_three_axes_are_told(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d", {"hidden_states": vectors(8, layers=3)})
    assert actshard.open(path).warnings == ()
    assert "columns hidden_states of three axes are taken as (layer, token, dim)" in str(actshard.verify(path).findings)


@pytest.mark.parametrize(
    "names", [("layer_0", "layer_1"), ("model.layers.4", "model.layers.12"), ("acts-block3", "acts-block5")]
)
def test_files_of_several_layers_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    states = [vectors(8, tokens=None) for _ in names]
    for name, values in zip(names, states, strict=True):
        parquet(tmp_path / name, {"act": values})
        (tmp_path / name / "data.parquet").rename(tmp_path / f"{name}.parquet")
        (tmp_path / name).rmdir()
    with pytest.raises(actshard.UnknownFormatError, match=r"files of several layers \(.*\.parquet.*actshard\.pair"):
        actshard.open(tmp_path, format="parquet_vectors")
    assert not actshard.verify(tmp_path, format="parquet_vectors").ok
    pair = actshard.pair(*(actshard.open(tmp_path / f"{name}.parquet", format="parquet_vectors") for name in names))
    for layer, values in zip(pair.as_store().layers, states, strict=True):
        np.testing.assert_array_equal(pair.as_store().last_tokens(layer), values.astype(np.float64))


def test_rows_of_several_layers_in_one_column_are_told(tmp_path: Path) -> None:
    table = {"activation": vectors(8, tokens=None), "layer": np.arange(N) % 3}
    path = parquet(tmp_path / "d", table)
    with pytest.warns(
        actshard.ActshardWarning, match=r"column layer has values from 0 to 2.*store\.filter\('layer == 0'\)"
    ):
        store = actshard.open(path)
    assert len(store.filter("layer == 0")) == 2
    one = parquet(tmp_path / "one", table | {"layer": np.full(N, 3)})
    assert not actshard.open(one).warnings


@pytest.mark.parametrize("write", WRITERS)
def test_a_mask_that_is_not_applied_is_told(write: Writer, tmp_path: Path) -> None:
    mask = np.array([[1] * (TOKENS - i % 3) + [0] * (i % 3) for i in range(N)])
    path = write(tmp_path / "d", {"hidden_states": vectors(8), "attention_mask": mask})
    with pytest.warns(actshard.ActshardWarning, match="column attention_mask is not applied.*keep='attention_mask'"):
        store = actshard.open(path)
    assert store.stream("hidden_states", 4, keep="attention_mask").num_rows == mask.sum()
    pooled = write(tmp_path / "pooled", {"hidden_states": vectors(8, tokens=None), "attention_mask": mask})
    assert "not applied" not in str(
        actshard.open(pooled, format="parquet_vectors" if write is parquet else None).warnings
    )


def test_values_of_sparse_latents_are_no_activations(tmp_path: Path) -> None:
    columns = {"top_acts": vectors(8, tokens=None), "top_indices": np.arange(N * 8).reshape(N, 8)}
    path = parquet(tmp_path / "d", columns)
    with pytest.raises(actshard.FormatError, match="sparse latents: values in column top_acts, indices in top_indices"):
        actshard.open(path, format="parquet_vectors")
    assert actshard.open(path, "parquet_vectors", layout={"layers": ["top_acts"]}).d_model == 8


def test_hidden_files_links_and_numbers_as_texts(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d", {"activation": vectors(8, tokens=None)})
    data = (path / "data.parquet").read_bytes()
    for name in ("_tmp.parquet", ".x.parquet"):
        (path / name).write_bytes(data)
    assert len(actshard.open(path)) == N
    (path / "link.parquet").symlink_to("data.parquet")
    with pytest.raises(actshard.FormatError, match=r"link\.parquet: expected another file than data\.parquet"):
        actshard.open(path)
    (path / "link.parquet").unlink()
    (path / "data.parquet").unlink()
    for number in (2, 10):
        (path / f"{number}.parquet").write_bytes(data)
    with pytest.warns(actshard.ActshardWarning, match=r"names as texts, 10\.parquet before smaller numbers"):
        assert len(actshard.open(path)) == 2 * N


def test_files_that_could_be_activations_are_findings_if_they_are_left_out(tmp_path: Path) -> None:
    path = arrow(tmp_path / "a", {"hidden": vectors(8)})
    assert actshard.verify(path).ok
    (path / "data-00001-of-00002.arrow").write_bytes(b"x")
    assert "unlisted-file" in actshard.verify(path).codes()
