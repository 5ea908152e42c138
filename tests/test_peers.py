"""Comparison with the original libraries: torch and lmprobe 0.10.3."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits, saev_dump
from served import served
from zarr_files import change, write_store

pytestmark = pytest.mark.peers
SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


class Rows:
    """A dataset as users write it: one row per index."""

    def __init__(self, store: actshard.Store) -> None:
        self.store = store
        self.tokens = int(store.token_counts[0])

    def __len__(self) -> int:
        return len(self.store) * self.tokens

    def __getitem__(self, i: int) -> np.ndarray:
        return self.store.gather(5, i // self.tokens, i % self.tokens)[0]


def test_out_fills_torch_tensors(torch: Any) -> None:
    store = actshard.open(SAEV)
    want = store.gather(5, [1, 2], 3)
    out = torch.zeros((2, store.d_model))
    assert store.gather(5, [1, 2], 3, out=out) is out
    assert np.array_equal(out.numpy(), want)
    half = torch.zeros((2, store.d_model), dtype=torch.bfloat16)
    store.gather(5, [1, 2], 3, out=half, dtype=torch.bfloat16)
    assert torch.equal(half, torch.from_numpy(want).bfloat16())
    with pytest.raises(actshard.ArgumentError, match="contiguous"):
        store.gather(5, [1, 2], 3, out=torch.zeros((store.d_model, 2)).T)
    with pytest.raises(actshard.DtypeError):
        store.gather(5, [1, 2], 3, out=torch.zeros((2, store.d_model), dtype=torch.int32))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_types_are_types(torch: Any, name: str) -> None:
    store = actshard.open(SAEV)
    dtype = getattr(torch, name)
    want = torch.from_numpy(store.gather(5, [1, 2], 3)).to(dtype)
    got = store.gather(5, [1, 2], 3, dtype=dtype)
    assert got.dtype.name == name
    for shape in ((2, store.d_model), (2 * store.d_model,)):
        out = torch.full((4, *shape), 9, dtype=dtype)
        part = out[1]  # a tensor that starts within another's memory
        assert store.gather(5, [1, 2], 3, out=part, dtype=dtype) is part
        assert torch.equal(part.reshape(want.shape), want)
        assert part.view(-1).view(torch.uint8).numpy().tobytes() == got.tobytes()
        assert (out[[0, 2, 3]] == 9).all()
    for wrong in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(actshard.DtypeError):
            store.gather(5, [1, 2], 3, dtype=wrong)


def test_tensors_that_are_no_memory_of_the_cpu_are_refused(torch: Any) -> None:
    store = actshard.open(SAEV)
    for out in (
        torch.zeros((2, store.d_model), device="meta"),
        torch.zeros((2, store.d_model)).to_sparse(),
        torch.zeros(store.d_model).expand(2, -1),
        torch.zeros((3, store.d_model)),
    ):
        with pytest.raises(actshard.ArgumentError):
            store.gather(5, [1, 2], 3, out=out)


def test_bfloat16_rows_equal_torchs_view(torch: Any) -> None:
    store = actshard.open(GOLDEN / "lmprobe/pooled_bf16")
    out = torch.zeros((store.num_examples, store.d_model), dtype=torch.bfloat16)
    store.last_tokens(6, out=out)
    assert np.array_equal(out.view(torch.uint16).numpy(), store.last_tokens(6).view(np.uint16))


def test_arrays_share_memory_with_tensors(torch: Any) -> None:
    rows = actshard.open(SAEV).gather(5, [1, 2], 3)
    assert torch.from_numpy(rows).data_ptr() == rows.ctypes.data


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_workers_read_every_row(torch: Any, method: str, workers: int) -> None:
    store = actshard.open(SAEV)
    want = np.concatenate(store.sequences(range(len(store)), 5))
    loader = torch.utils.data.DataLoader(
        Rows(store), batch_size=7, num_workers=workers, multiprocessing_context=method if workers else None
    )
    assert np.array_equal(torch.cat(list(loader)).numpy(), want)


@pytest.fixture
def lmprobe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], Any]:
    """Lets lmprobe read a folder as if it were downloaded."""
    monkeypatch.setenv("LMPROBE_CACHE_DIR", str(tmp_path))
    pytest.importorskip("lmprobe")
    import huggingface_hub
    import lmprobe.cache
    import lmprobe.sharing

    lmprobe.cache.set_cache_backend(str(tmp_path))

    def on(folder: Path) -> Any:
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo_id, name, **_: str(folder / name))
        return lmprobe.sharing

    return on


@pytest.mark.parametrize("variant", ["pooled_f32", "pooled_f16", "pooled_bf16", "pooled_logits"])
def test_a_whole_layer_equals_lmprobes(lmprobe: Callable[[Path], Any], variant: str) -> None:
    store = actshard.open(GOLDEN / "lmprobe" / variant)
    theirs, _ = lmprobe(store.path).load_activation_dataset(f"golden/{variant}")
    for layer in store.layers:
        assert np.array_equal(
            store.last_tokens(layer, dtype="float32"), theirs[f"hidden.layer_{layer}"].float().numpy()
        )
    if variant == "pooled_logits":
        values, indices = store.logits()
        assert np.array_equal(values, theirs["logits_topk.values"].numpy())
        assert np.array_equal(indices, theirs["logits_topk.indices"].numpy())


def test_last_tokens_equal_lmprobes_load_activations(lmprobe: Callable[[Path], Any]) -> None:
    store = actshard.open(GOLDEN / "lmprobe/pooled_f32")
    theirs = lmprobe(store.path).load_activations("golden/pooled_f32", show_progress=False)
    for layer in store.layers:
        assert np.array_equal(store.last_tokens(layer), theirs[layer])


def _codecs(zarr: Any, version: int) -> list[dict[str, Any]]:
    """Arguments of `create_array` for each kind of codec that actshard reads differently."""
    if version == 2:
        import numcodecs

        return [
            {"compressors": None},
            {"compressors": None, "order": "F"},
            {"compressors": numcodecs.Blosc("zstd", 3, numcodecs.Blosc.BITSHUFFLE)},
            {"compressors": numcodecs.Zstd(1)},
            {"compressors": numcodecs.GZip(1)},
            {"compressors": numcodecs.LZ4()},
            {"compressors": numcodecs.LZMA(preset=1)},
            {"compressors": numcodecs.Blosc("lz4"), "filters": [numcodecs.Shuffle(2)]},
        ]
    codecs = zarr.codecs
    return [
        {"compressors": None},
        {"compressors": None, "serializer": codecs.BytesCodec(endian="big")},
        {"compressors": codecs.ZstdCodec(level=1)},
        {"compressors": [codecs.BloscCodec(cname="lz4", shuffle="bitshuffle"), codecs.Crc32cCodec()]},
        {"compressors": codecs.GzipCodec(level=1), "shards": (2, 3, 32, 24)},
        {"compressors": None, "shards": (1, 3, 16, 24)},
        {"compressors": None, "filters": [codecs.TransposeCodec(order=(0, 1, 3, 2))]},
    ]


def test_a_codec_that_runs_code_is_never_handed_over(tmp_path: Path) -> None:
    """numcodecs has a codec named pickle."""
    store = write_store(tmp_path / "s.zarr", np.ones((2, 1, 4, 3), "f4"), None, (1, 1, 4, 3))
    for field, codecs in (("filters", [{"id": "pickle"}]), ("compressor", {"id": "pickle"})):
        change(store / "arrays/activations/.zarray", lambda meta, f=field, c=codecs: meta | {f: c})
        with pytest.raises(actshard.UnsupportedError, match="pickle"):
            actshard.open(store)


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4"])
def test_stores_written_by_zarr_python_read_equal(tmp_path: Path, version: int, dtype: str) -> None:
    """The layouts and codecs of zarr-python 3, including missing chunks and partial edge chunks."""
    zarr = pytest.importorskip("zarr")
    if version == 3 and dtype == ">f4":
        pytest.skip("zarr-python keeps byte order in the codec of version 3, which is another case here")
    rng = np.random.default_rng(version)
    values = rng.standard_normal((5, 3, 41, 24)).astype(dtype)
    lengths = np.array([41, 1, 17, 40, 0], "i4")
    for i, length in enumerate(lengths):
        values[i, :, length:] = 0
    values[2] = 0
    for number, options in enumerate(_codecs(zarr, version)):
        path = tmp_path / f"{number}.zarr"
        root = zarr.open_group(str(path), mode="w", zarr_format=version)
        chunks = (1, 1, 16, 24) if "shards" in options else [(1, 1, 16, 24), (2, 1, 41, 7)][number % 2]
        made = root.create_array(
            "arrays/activations", shape=values.shape, chunks=chunks, dtype=dtype, config={"write_empty_chunks": False},
            **({"chunk_key_encoding": {"name": "v2", "separator": "/"}} if version == 2 and number % 3 else {}), **options,
        )  # fmt: skip
        made[:] = values
        root.create_array("arrays/seq_len", shape=(5,), chunks=(5,), dtype="i4")[:] = lengths
        for io in ("mmap", "pread"):
            store = actshard.open(path, io=io)
            assert store.token_counts.tolist() == lengths.tolist()
            for layer in range(3):
                for i, rows in enumerate(store.sequences(range(5), layer)):
                    want = values[i, layer, : lengths[i]]
                    assert rows.dtype == np.dtype(dtype).newbyteorder("=")
                    assert np.array_equal(rows, want), (options, io, i, layer)
            assert np.array_equal(store.gather(1, [0, 3, 0], [40, 39, 16]), values[[0, 3, 0], 1, [40, 39, 16]])


@pytest.mark.parametrize("variant", ["pooled_f32", "pooled_f16", "pooled_logits"])
def test_compat_lmprobe_is_lmprobe(lmprobe: Callable[[Path], Any], variant: str) -> None:
    """The same call on a folder, and through lmprobe's own download and cache."""
    from actshard.compat import lmprobe as ours

    folder = GOLDEN / "lmprobe" / variant
    theirs = lmprobe(folder)
    for options in ({}, {"as_dict": False}, {"return_labels": True}):
        a = theirs.load_activations(f"golden/{variant}", show_progress=False, **options)
        b = ours.load_activations(folder, **options)
        if options.get("return_labels"):
            assert (a[1] is None) == (b[1] is None)
            assert a[1] is None or (a[1].dtype == b[1].dtype and np.array_equal(a[1], b[1]))
            a, b = a[0], b[0]
        if isinstance(a, dict):
            assert list(a) == list(b)
            assert all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)
        else:
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)
    raw, _ = theirs.load_activation_dataset(f"golden/{variant}")
    mine, info = ours.load_activation_dataset(folder)
    assert set(raw) == set(mine)
    for key in raw:
        assert raw[key].dtype == mine[key].dtype
        assert np.array_equal(raw[key].float().numpy(), mine[key].float().numpy())
    assert "tensors" in info
    only, _ = ours.load_activation_dataset(folder, tensors=["hidden_layers"], layers=[actshard.open(folder).layers[0]])
    assert len(only) == 1


def test_compat_zarr_is_zarr_python() -> None:
    zarr = pytest.importorskip("zarr")
    from actshard.compat import zarr as ours

    for name in ("single_consolidated", "zstd", "missing_chunks_zero", "big_endian", "hidden_split", "fill_nan"):
        path = GOLDEN / "zarr" / name / "activations.zarr"
        theirs, mine = (
            zarr.open_group(str(path), mode="r")["arrays/activations"],
            ours.open_group(path)["arrays/activations"],
        )
        assert theirs.shape == mine.shape
        assert tuple(theirs.chunks) == tuple(mine.chunks)
        for index in ((0, 0, slice(0, 3), slice(None)), 1, (slice(None), -1), (..., 0), (0, slice(0, 2), -1)):
            assert np.array_equal(np.asarray(theirs[index]), mine[index], equal_nan=True)


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
def test_streams_of_what_python_decodes_end_when_they_are_left(tmp_path: Path) -> None:
    """The reading thread then needs the GIL, which the thread that stops it may hold."""
    zarr = pytest.importorskip("zarr")
    import numcodecs

    values = np.random.default_rng(0).standard_normal((20, 2, 16, 8)).astype("f4")
    root = zarr.open_group(str(tmp_path / "s.zarr"), mode="w", zarr_format=2)
    made = root.create_array(
        "arrays/activations", shape=values.shape, chunks=(1, 1, 16, 8), dtype="f4", compressors=numcodecs.LZ4()
    )
    made[:] = values
    store = actshard.open(tmp_path / "s.zarr")
    for shuffle in (None, "window", "exact"):
        stream = store.stream(1, 8, shuffle=shuffle)
        for batch in stream:
            assert np.array_equal(batch.activations, values[batch.examples, 1, batch.tokens])
        for _ in range(5):
            next(iter(stream))
            native = stream._native.start(0, 0, 1, None)  # type: ignore[attr-defined] -- what no user calls
            native.next()
            del native


# -- the original systems read our files --------------------------------------------------------------------


def made(path: Path, format: str, *, pooled: bool = False, dtype: str = "float32", **own: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    lengths = [1] * 30 if pooled else [4] * 30 if format == "saev" else rng.integers(1, 9, 30).tolist()
    wanted = [rng.standard_normal((2, n, 16)).astype(np.float32) for n in lengths]
    with actshard.create(path, format, layers=[0, 5], d_model=16, dtype=dtype, **own) as writer:
        extra: dict[str, Any] = {"columns": {"text": [f"p{i}" for i in range(30)], "label": [i % 3 for i in range(30)]}}
        writer.append(wanted, **(extra if format != "saev" else {}))
    return wanted


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_lmprobe_reads_pooled_datasets_of_ours(lmprobe: Callable[[Path], Any], tmp_path: Path, dtype: str) -> None:
    wanted = made(tmp_path / "d", "lmprobe", pooled=True, dtype=dtype, shard_bytes=400, model="m/x", revision="abc")
    theirs = lmprobe(tmp_path / "d")
    raw, info = theirs.load_activation_dataset("golden/ours")
    rows = np.stack(wanted)[:, :, 0].astype(actshard.base._arguments.dtype(dtype)[0]).astype(np.float32)
    for k, layer in enumerate((0, 5)):
        assert np.array_equal(raw[f"hidden.layer_{layer}"].float().numpy(), rows[:, k])
    assert info["num_prompts"] == 30
    found, labels = theirs.load_activations("golden/ours", show_progress=False, return_labels=True)
    assert np.array_equal(np.asarray(found[5], np.float32), rows[:, 1])
    assert labels.tolist() == [i % 3 for i in range(30)]


def test_lmprobe_reads_last_tokens_of_full_sequences_of_ours(lmprobe: Callable[[Path], Any], tmp_path: Path) -> None:
    """lmprobe reads all tokens of its own data wrongly (shared notes), so only last tokens are compared."""
    wanted = made(tmp_path / "d", "lmprobe", shard_bytes=1500, storage="full_sequence")
    theirs = lmprobe(tmp_path / "d")
    found = theirs.load_activations("golden/ours", show_progress=False)
    for k, layer in enumerate((0, 5)):
        assert np.array_equal(found[layer], np.stack([w[k, -1] for w in wanted]))
    raw, _ = theirs.load_activation_dataset("golden/ours")
    assert len(raw["hidden.layer_5"]) == sum(w.shape[1] for w in wanted)


def test_safetensors_reads_every_shard_of_ours(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    wanted = made(tmp_path / "d", "lmprobe", shard_bytes=1500, storage="full_sequence")
    total = sum(
        len(load_file(p)[f"hidden.layer_{int(p.name[12:15])}"]) for p in (tmp_path / "d/tensors").glob("*.safetensors")
    )
    assert total == 2 * sum(w.shape[1] for w in wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"version": 3},
        {"version": 3, "shard_bytes": 1500},
        {"version": 3, "pack": "zstd"},
        {"version": 3, "pack": "blosc", "shard_bytes": 1500},
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_zarr_python_reads_stores_of_ours(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    zarr = pytest.importorskip("zarr")
    wanted = made(tmp_path / "d", "zarr", dtype=dtype, chunk_tokens=3, **options)
    for group in (
        zarr.open_group(str(tmp_path / "d"), mode="r"),
        zarr.open_consolidated(str(tmp_path / "d"), mode="r"),
    ):
        array = group["arrays/activations"]
        lengths = group["arrays/seq_len"][:]
        assert array.dtype == np.dtype(dtype)
        for e, example in enumerate(wanted):
            for k in range(2):
                assert np.array_equal(array[e, k, : lengths[e]], example[k].astype(dtype))
                assert not array[e, k, lengths[e] :].any()
        assert group["arrays/label"][:].tolist() == [i % 3 for i in range(30)]
        assert group.attrs["num_layers"] == 2


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("float32", {"version": 3}),
        ("bfloat16", {"version": 3}),
        ("bfloat16", {"version": 3, "shard_bytes": 1500}),
        ("float64", {"version": 3, "shard_bytes": 1500}),
        ("bfloat16", {"version": 3, "pack": "zstd", "shard_bytes": 1500}),
        ("float32", {"version": 3, "pack": "blosc"}),
        ("bfloat16", {"version": 3, "pack": "blosc"}),
    ],
)
def test_tensorstore_reads_stores_of_ours(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    ts = pytest.importorskip("tensorstore")
    wanted = made(tmp_path / "d", "zarr", dtype=dtype, chunk_tokens=3, **options)
    driver = "zarr3" if "version" in options else "zarr"
    array = ts.open({"driver": driver, "kvstore": f"file://{tmp_path}/d/arrays/activations"}).result()
    assert array.dtype.name == dtype
    whole = np.asarray(array.read().result())
    for e, example in enumerate(wanted):
        n = example.shape[1]
        assert np.array_equal(bits(whole[e, :, :n]), bits(example.astype(whole.dtype)))
        assert not whole[e, :, n:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_tensors_are_appended(torch: Any, tmp_path: Path, dtype: str) -> None:
    rows = torch.randn(3, 2, 4, 16, requires_grad=True).to(getattr(torch, dtype))
    with actshard.create(tmp_path / "d", "lmprobe", layers=[0, 5], d_model=16) as writer:
        writer.append(rows, labels=None, columns={"label": torch.arange(3)})
        writer.append(
            [r.transpose(1, 2).contiguous().transpose(1, 2) for r in rows], columns={"label": torch.arange(3)}
        )
    store = actshard.open(tmp_path / "d")
    assert store.dtype.name == dtype
    for e in range(6):
        got = torch.from_numpy(store.sequence(e, 5).astype(np.float32))
        assert torch.equal(got, rows[e % 3, 1].detach().float())
    assert store.table["label"].to_pylist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.filterwarnings(
    "ignore::actshard.ActshardWarning", "ignore:The numcodecs:DeprecationWarning", "ignore:Numcodecs"
)
@pytest.mark.parametrize("kind", ["v2_lzma", "v2_delta_gzip", "shards"])
def test_zarr_codecs_of_the_package_decode_what_a_url_serves(kind: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "bucket/run.zarr"
    if kind == "shards":
        lzma = pytest.importorskip("zarr.codecs.numcodecs").LZMA()
        rows = np.random.default_rng(0).normal(size=(4, 2, 6, 8)).astype("f4")
        root = zarr.open_group(path, mode="w", zarr_format=3)
        shape: Any = {"shape": rows.shape, "chunks": (1, 1, 6, 8), "shards": (2, 2, 6, 8)}
        root.create_array("arrays/activations", dtype="f4", compressors=[lzma], **shape)[:] = rows
        root.create_array("arrays/seq_len", shape=(4,), chunks=(4,), dtype="i4")[:] = [6, 5, 4, 3]
    else:
        shutil.copytree(GOLDEN / f"zarr_codecs/{kind}.zarr", path)
    near = actshard.open(path)
    chunk = next(p for p in sorted((path / "arrays/activations").rglob("*")) if p.is_file() and p.name[-1] == "0")
    with served(tmp_path) as server:
        far = actshard.open("s3://bucket/run.zarr", storage_options=server.options)
        again = pickle.loads(pickle.dumps(far))
        for store in (far, again):
            for layer in near.layers:
                for e in range(len(near)):
                    assert store.sequence(e, layer).tobytes() == near.sequence(e, layer).tobytes()
        server.failing[str(chunk.relative_to(tmp_path))] = [403] * 50
        far = actshard.open("s3://bucket/run.zarr", storage_options=server.options)
        with pytest.raises(actshard.FileAccessError, match="403"):
            far.gather(near.layers[0], 0, 0)
        server.failing.clear()
        chunk.unlink()  # missing, beside its metadata: fill values
        store = actshard.open("s3://bucket/run.zarr", storage_options=server.options)
        assert not store.gather(near.layers[0], 0, 0).any()
        store = actshard.open("s3://bucket/run.zarr", storage_options=server.options)
        shutil.rmtree(path)
        with pytest.raises(actshard.ActshardError, match="arrays/activations"):
            store.gather(near.layers[0], 0, 0)
