"""Arrow directories that are written: rows, columns and features come back, here, in ``datasets`` and in SAELens' reading steps."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

import actshard
from actshard.base.request import RECORD
from actshard.formats.hf_arrow.write import ArrowColumns
from conftest import GOLDEN, bits

SAELENS = sorted(p.parent for p in (GOLDEN / "hf_arrow").glob("saelens_*/*/state.json"))
WIDTH = 8
HOOKS = ["blocks.3.hook_resid_pre", 7, "last"]


def rows(lengths: list[int], dtype: str = "float32") -> list[np.ndarray]:
    random = np.random.default_rng(len(lengths))
    return [random.standard_normal((len(HOOKS), n, WIDTH)).astype(dtype) for n in lengths]


def columns(n: int) -> pa.Table:
    """Texts, labels and lists, of all types that ``datasets`` has."""
    lists = [list(range(i % 3)) for i in range(n)]
    return pa.table(
        {
            "token_ids": pa.array([[i, 2, 3] for i in range(n)], pa.list_(pa.int32(), 3)),
            "text": [None if i % 5 == 1 else f"text {i} é" for i in range(n)],
            "label": np.arange(n, dtype=np.int16),
            "scores": pa.array([[x / 2 for x in values] for values in lists], pa.list_(pa.float32())),
            "vector": pa.array([[float(i)] * WIDTH for i in range(n)], pa.list_(pa.float32(), WIDTH)),
            "matrix": pa.array([[[1.0] * 40, [float(i)] * 40] for i in range(n)], pa.list_(pa.list_(pa.float32()))),
            "turns": [[{"role": "user", "content": str(i)}] * (i % 2) for i in range(n)],
            "about": [{"split": "a", "n": i} for i in range(n)],
            "wide": pa.array(lists, pa.large_list(pa.field("element", pa.int64()))),
            "when": pa.array([i * 1_000_003 for i in range(n)], pa.timestamp("us", tz="UTC")),
            "day": pa.array(list(range(n)), pa.date32()),
            "price": pa.array([None] * n, pa.decimal128(7, 2)),
            "raw": [bytes([i]) for i in range(n)],
            "yes": [bool(i % 2) for i in range(n)],
            "nothing": pa.nulls(n),
        }
    )


def write(path: Path, examples: list[np.ndarray], table: pa.Table | None, each: int = 4, **own: Any) -> Path:
    with actshard.create(path, "hf_arrow", layers=HOOKS, d_model=WIDTH, **own) as writer:
        for first in range(0, len(examples), each):
            part = slice(first, first + each)
            writer.append(examples[part], columns=None if table is None else table[part])
            writer.flush()
    return writer.path


def check(path: Path, examples: list[np.ndarray], table: pa.Table | None, io: str = "mmap") -> actshard.Store:
    store = actshard.open(path, io=io)
    assert (store.layers, store.d_model, store.warnings) == (tuple(HOOKS), WIDTH, ())
    for e, example in enumerate(examples):
        for k, layer in enumerate(HOOKS):
            assert np.array_equal(bits(store.sequence(e, layer)), bits(example[k]))
    if table is not None:
        assert store.table.equals(table.cast(store.table.schema))
        assert [str(t).replace("element", "item") for t in table.schema.types] == [
            str(t) for t in store.table.schema.types
        ]
    assert actshard.verify(path, deep=True).ok
    return store


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("lengths", [[5] * 9, [3, 0, 7, 1, 1, 12, 0], [0, 2]], ids=["equal", "ragged", "empty first"])
def test_rows_and_columns_come_back(tmp_path: Path, lengths: list[int], dtype: str, io: str) -> None:
    examples, table = rows(lengths, dtype), columns(len(lengths))
    store = check(write(tmp_path / "d", examples, table), examples, table, io)
    assert store.token_counts.tolist() == lengths
    features = json.loads((tmp_path / "d/dataset_info.json").read_text())["features"]
    each = lengths[0] if len(set(lengths)) == 1 else None
    assert features["layer_7"] == {"shape": [each, WIDTH], "dtype": dtype, "_type": "Array2D"}
    for path in (tmp_path / "d").glob("data-*.arrow"):  # the schema, written again in place, says the same
        schema = pa.ipc.open_stream(path.read_bytes()).schema
        assert json.loads(schema.metadata[b"huggingface"])["info"]["features"] == features


def test_one_row_per_example_is_a_column_of_vectors_unless_asked(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    acts = random.standard_normal((10, 3, WIDTH)).astype(np.float32)
    for rows_, levels in ((None, 1), ("vectors", 1), ("sequences", 2)):
        own = {} if rows_ is None else {"rows": rows_}
        with actshard.create(tmp_path / str(rows_), "hf_arrow", layers=HOOKS, d_model=WIDTH, **own) as writer:
            writer.append(acts)
        check(writer.path, list(acts[:, :, None]), None)
        schema = pa.ipc.open_stream(next(writer.path.glob("*.arrow")).read_bytes()).schema
        kind = schema.field("last").type
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        assert pa.types.is_list(kind) == (levels == 2)
    done = actshard.convert(tmp_path / "sequences", tmp_path / "again", "hf_arrow")
    assert actshard.open(done.path).table.num_columns == 0
    with pytest.raises(actshard.ArgumentError, match="rows='sequences' keeps all tokens"):
        actshard.convert(write(tmp_path / "long", rows([2, 3]), None), tmp_path / "x", "hf_arrow", rows="vectors")
    done = actshard.convert(tmp_path / "long", tmp_path / "short", "hf_arrow", tokens="last")
    assert [loss.what for loss in done.losses] == ["tokens"]


@pytest.mark.parametrize("most", [1, 2000, 10**9])
def test_files_are_of_the_size_asked_for_and_named_by_their_number(tmp_path: Path, most: int) -> None:
    examples = rows([3] * 20)
    path = write(tmp_path / "d", examples, None, each=7, shard_bytes=most)
    state = json.loads((path / "state.json").read_text())
    names = [entry["filename"] for entry in state["_data_files"]]
    assert names == [f"data-{i:05}-of-{len(names):05}.arrow" for i in range(len(names))]
    assert sorted(p.name for p in path.iterdir()) == [RECORD, *names, "dataset_info.json", "state.json"]
    assert (len(names) == 1) == (most == 10**9)
    rows_bytes = 3 * 3 * WIDTH * 4
    assert len(names) == 20 or max((path / name).stat().st_size for name in names) < most + 2000 + rows_bytes
    check(path, examples, None)


def test_types_that_are_known_late_are_those_of_all_rows(tmp_path: Path) -> None:
    """Nulls get a type, and dicts get fields: files of earlier types are written again."""
    examples = rows([2, 3, 1, 4, 2, 2])
    parts: list[dict[str, list[Any]]] = [
        {"label": [None, None], "about": [{"a": 1}, None], "text": ["x", "y"]},
        {"label": ["one", None], "about": [{"a": 2, "b": "new"}, None], "text": ["z", None]},
        {"label": ["two", "three"], "about": [{"b": "more"}, {"a": 5}], "text": ["", "v"]},
    ]
    with actshard.create(tmp_path / "d", "hf_arrow", layers=HOOKS, d_model=WIDTH) as writer:
        for i, part in enumerate(parts):
            writer.append(examples[2 * i : 2 * i + 2], columns=part)
            writer.flush()
    store = check(tmp_path / "d", examples, None)
    assert len(list((tmp_path / "d").glob("*.arrow"))) == 2
    for name in ("label", "text"):
        assert store.table[name].to_pylist() == [value for part in parts for value in part[name]]
    about = [None if x is None else {"a": x.get("a"), "b": x.get("b")} for part in parts for x in part["about"]]
    assert store.table["about"].to_pylist() == about


def test_a_writer_that_is_interrupted_while_it_finishes_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call of the last steps: the result is the same, byte for byte."""
    from actshard.formats.hf_arrow import write as module

    examples = rows([2, 3, 1, 4, 2, 2])

    def labels(i: int) -> dict[str, Any]:
        return {"label": [None, None] if i == 0 else ["one", "two"]}

    def begin(path: Path) -> actshard.Writer:
        writer = actshard.create(path, "hf_arrow", layers=HOOKS, d_model=WIDTH, resume=True)
        for i in range(len(writer) // 2, 3):
            writer.append(examples[2 * i : 2 * i + 2], columns=labels(i))
            writer.flush()
        return writer

    begin(tmp_path / "whole").close()
    want = {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}
    calls = 0

    def stopping(real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(5, "stopped here")
            return real(*args, **named)

        return call

    stops, at = 0, 1
    while True:
        path = tmp_path / f"stop{at}"
        writer = begin(path)
        calls = 0
        with monkeypatch.context() as patched:
            for name in ("rename", "whole_file", "write_bytes", "sync_folders"):
                patched.setattr(module, name, stopping(getattr(module, name), at))
            patched.setattr(module.HfArrowTarget, "put", stopping(module.HfArrowTarget.put, at))
            try:
                writer.close()
            except OSError:
                stops += 1
        if calls < at:
            break
        with pytest.raises(actshard.UnfinishedError):
            actshard.open(path)
        actshard.create(path, "hf_arrow", layers=HOOKS, d_model=WIDTH, resume=True).close()
        assert {p.name: p.read_bytes() for p in path.iterdir()} == want
        shutil.rmtree(path)
        at += 1
    assert stops >= 8


def test_the_fingerprint_depends_on_rows_columns_and_names_alone(tmp_path: Path) -> None:
    def mark(name: str, examples: list[np.ndarray], table: pa.Table, each: int) -> str:
        path = write(tmp_path / name, examples, table, each)
        found: str = json.loads((path / "state.json").read_text())["_fingerprint"]
        return found

    examples, table = rows([3] * 6), columns(6)
    first = mark("a", examples, table, 2)
    assert len(first) == 16
    assert first == mark("b", examples, table, 6)
    other = [e.copy() for e in examples]
    other[4][1, 2, 3] += 1
    assert first != mark("c", other, table, 2)
    assert first != mark("d", examples, table.set_column(1, "text", pa.array(list("abcdef"))), 2)


def test_unsupported_data_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    def create(**own: Any) -> actshard.Writer:
        return actshard.create(tmp_path / "d", "hf_arrow", **{"layers": HOOKS, "d_model": WIDTH} | own)

    for own, said in (
        (
            {"dtype": "bfloat16"},
            "float16 or float32 or float64, not bfloat16, because Arrow has no such type.*dtype='float32'",
        ),
        ({"layers": [7, "layer_7"]}, "different columns"),
        ({"rows": "both"}, 'rows: expected "sequences" or "vectors"'),
        ({"part": (0, 2)}, "part: not supported"),
        ({"metadata": {"features": {}}}, "'features' is written by actshard"),
        ({"metadata": {"description": 1}}, "'description': expected a string"),
        ({"d_model": 1 << 31}, None),
    ):
        if said is not None:
            with pytest.raises((actshard.ArgumentError, actshard.DtypeError), match=said):
                create(**own)
    examples = rows([2, 2])
    writer = create()
    for name, values, said in (
        ("layer_7", [1, 2], "'layer_7' is the name of a layer's column"),
        ("m", pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())), "datasets has no type for map"),
        ("s", [{}, {}], "expected a dict with different keys"),
        ("s", [{"_type": 1}] * 2, "none of them '_type'"),
    ):
        with pytest.raises(actshard.ArgumentError, match=said):
            writer.append(examples, columns={name: values})
    with pytest.raises(actshard.ArgumentError, match="'logits_values': Arrow has no BF16"):
        writer.append(examples, logits=(np.zeros((2, 3), ml_dtypes.bfloat16), np.zeros((2, 3), np.int32)))
    assert not list((tmp_path / "d").glob("data*"))
    writer.append(examples)
    writer.close()
    check(tmp_path / "d", examples, None)


def target(width: int, layers: int = 1, shard_bytes: int | None = None) -> Any:
    from actshard.formats.hf_arrow.write import HfArrowTarget
    from actshard.formats.target import Spec

    return HfArrowTarget(
        Spec(Path("x"), tuple(range(layers)), width, np.dtype("f4"), {}, None, None, shard_bytes, None)
    )


def test_an_example_of_more_values_than_offsets_reach_is_refused() -> None:
    most, why = target(4096).most_tokens
    assert most * 4096 < 2**31 <= (most + 1) * 4096
    assert "32-bit offsets" in why


def test_a_batch_has_fewer_than_2_31_values_of_each_layer() -> None:
    """Numbers of tokens alone: the rows would take 200 GB."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 500_000, 200)
    cuts = list(target(1024, 3, 1 << 45)._cuts(tokens, None))
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == len(tokens)
    values = [int(tokens[first:last].sum()) * 1024 for first, last in cuts]
    assert max(values) < 2**31
    assert all(a + int(tokens[last]) * 1024 >= 2**31 for a, (_, last) in zip(values, cuts[:-1], strict=False))


def test_conversions_there_and_back_are_equal(tmp_path: Path) -> None:
    examples, table = rows([3, 0, 7, 1, 5]), columns(5).drop_columns(["price", "nothing", "raw", "wide", "matrix"])
    about = {"description": "of layers", "author": {"name": "x"}}
    path = write(tmp_path / "a", examples, table, metadata=about)
    for format in ("zarr", "hf_arrow"):
        actshard.convert(path, tmp_path / format, format, verify=True)
        done = actshard.convert(tmp_path / format, tmp_path / f"{format}-back", "hf_arrow", verify=True)
        assert done.losses == ()
        back = check(done.path, examples, None)
        assert back.read_columns(["text", "label"]).to_pydict() == table.select(["text", "label"]).to_pydict()
        for name in ("token_ids", "scores", "vector", "turns", "about", "yes"):
            assert back.table[name].to_pylist() == table[name].to_pylist(), name
        assert {name: back.metadata[name] for name in about} == about


def test_bfloat16_is_converted_only_if_asked(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "a", "lmprobe", layers=[1], d_model=4) as writer:
        values = np.array([[1.5, -2.25]] * 3, ml_dtypes.bfloat16)
        writer.append(
            np.full((3, 1, 2, 4), 1.5, ml_dtypes.bfloat16),
            columns={"text": list("abc")},
            logits=(values, np.zeros((3, 2), np.int32)),
        )
    with pytest.raises(actshard.DtypeError, match="dtype='float32'"):
        actshard.convert(tmp_path / "a", tmp_path / "b", "hf_arrow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = actshard.convert(tmp_path / "a", tmp_path / "b", "hf_arrow", dtype="float32")
    assert "dtype" in [loss.what for loss in done.losses]
    assert any("logits_values is converted to float32" in str(loss) for loss in done.losses)
    assert actshard.open(done.path).table["logits_values"].to_pylist() == [[1.5, -2.25]] * 3
    assert (actshard.open(done.path).last_tokens(1) == 1.5).all()


def listed(path: Path, **change: Any) -> Path:
    info = json.loads((path / "dataset_info.json").read_text())
    info["actshard"] |= change
    (path / "dataset_info.json").write_text(json.dumps(info))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"columns": []}, "field 'actshard.columns': expected a list of columns of vectors"),
        ({"columns": ["layer_7", "text", "last"]}, "field 'actshard.columns'"),
        ({"columns": ["last"] * 3}, "field 'actshard.layers': expected a layer for every column"),
        (
            {"columns": ["layer_7", "vector", "last"]},
            "expected columns of one kind, size and dtype, found vector next to",
        ),
        ({"layers": [1, 2]}, "field 'actshard.layers'"),
        ({"layers": [1, 1, 2]}, "layers: expected different names"),
        ({"layers": 5}, "field 'actshard.layers'"),
    ],
)
def test_a_list_of_layers_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = listed(write(tmp_path / "d", rows([2, 3]), columns(2)), **change)
    with pytest.raises(actshard.FormatError, match=said):
        actshard.open(path)


def test_schemas_of_any_number_of_tokens_have_one_length() -> None:
    of = ArrowColumns(("a", "b"), np.dtype("f4"), 16, vectors=False)
    types = pa.schema([("text", pa.string())])
    headers = [of.header(types, n) for n in (None, 1, 99, 12_345, 10**9)]
    assert len({len(h) for h in headers}) == 1
    for header in headers:
        assert pa.ipc.read_schema(pa.py_buffer(header)).names == ["a", "b", "text"]


# -- peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("lengths", [[5] * 9, [3, 1, 7, 1, 1, 12, 2]], ids=["equal", "ragged"])
def test_datasets_opens_it_with_its_own_types(tmp_path: Path, lengths: list[int]) -> None:
    datasets = pytest.importorskip("datasets")
    examples, table = rows(lengths), columns(len(lengths))
    theirs = datasets.load_from_disk(str(write(tmp_path / "d", examples, table)))
    own = datasets.Features.from_arrow_schema(table.schema)
    assert {name: theirs.features[name] for name in own} == own
    each = lengths[0] if len(set(lengths)) == 1 else None
    assert theirs.features["last"] == datasets.Array2D(shape=(each, WIDTH), dtype="float32")
    assert theirs.select_columns(table.column_names)[:] == table.to_pydict()
    found = theirs.with_format("numpy")
    for e, example in enumerate(examples):
        for k, name in enumerate((HOOKS[0], "layer_7", "last")):
            assert np.array_equal(found[e][name], example[k])
    assert theirs.shuffle(seed=0).filter(lambda row: row["yes"])["label"] is not None
    theirs.save_to_disk(str(tmp_path / "again"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = actshard.open(tmp_path / "again")
    assert again.table.equals(actshard.open(tmp_path / "d").table)


def saelens_reads(
    path: Path, hook: str, context: int, d_in: int, prompts: int
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """The reading steps of SAELens, ``sae_lens/training/activations_store.py`` of 6.54.12: ``load_cached_activation_dataset``
    and ``_load_raw_llm_batch_from_cached``. Numpy's formatter takes the place of torch's."""
    import datasets

    dataset = datasets.load_from_disk(str(path))
    names = [hook, *(["token_ids"] if "token_ids" in dataset.column_names else [])]
    dataset.set_format(type="numpy", columns=names)
    if dataset.features[hook].shape != (context, d_in):
        raise ValueError(f"Given dataset of shape {dataset.features[hook].shape}")
    made = []
    for first in range(0, len(dataset) - prompts + 1, prompts):
        part = dataset[first : first + prompts]
        if part[hook].shape != (prompts, context, d_in):
            raise ValueError(f"acts_buffer has shape {part[hook].shape}")
        ids = part["token_ids"].reshape(prompts * context) if "token_ids" in part else None
        made.append((part[hook].reshape(prompts * context, d_in), ids))
    return made


@pytest.mark.peers
@pytest.mark.parametrize("folder", SAELENS, ids=lambda p: p.parent.name)
def test_saelens_reads_a_written_cache_as_its_own(tmp_path: Path, folder: Path) -> None:
    """Golden caches of SAELens, by way of a Zarr store and back."""
    datasets = pytest.importorskip("datasets")
    theirs = datasets.load_from_disk(str(folder))
    source = actshard.open(folder)
    (hook,) = source.layers
    assert isinstance(hook, str)
    actshard.convert(folder, tmp_path / "zarr", "zarr")
    for way in (folder, tmp_path / "zarr"):
        path = actshard.convert(way, tmp_path / f"from-{way.name}", "hf_arrow").path
        ours = datasets.load_from_disk(str(path))
        if way == folder:
            assert ours.features == theirs.features
        assert ours.features[hook] == theirs.features[hook]
        context, d_in = theirs.features[hook].shape
        want, found = (saelens_reads(p, hook, context, d_in, 2) for p in (folder, path))
        assert len(want) == len(found) > 0
        for (a, ids), (b, again) in zip(want, found, strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(bits(a), bits(b))
            assert (ids is None and again is None) or np.array_equal(ids, again)
