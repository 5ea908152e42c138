"""Tests of the drop-in replacement of saev's loaders, numbered like the 66 statements about upstream's behavior."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from conftest import GOLDEN, saev_dump
from waiting import PATIENCE, wait_for_the_end_of

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

from actshard.compat import saev  # noqa: E402 -- after importorskip

VARIANTS = ["v21_cls_labels_multishard", "v21_exact_multiple", "v21_negative_layers", "v21_nocls_oneshard"]


class Dump:
    """A golden dump and its contents."""

    def __init__(self, variant: str) -> None:
        self.path = saev_dump(GOLDEN / "saev" / variant)
        self.md = saev.Metadata.load(self.path)
        expected = np.load(GOLDEN / "saev" / variant / "expected.npz")
        self.acts = expected["acts"] if "acts" in expected else expected[expected.files[0]]
        self.labels = actshard.open(self.path).labels
        self.layer = self.md.layers[-1]
        self.c = int(self.md.cls_token)
        self.n, self.p = self.md.n_examples, self.md.content_tokens_per_example

    def want(self, layer: int, example: Any, token: Any) -> np.ndarray:
        """Rows by content token."""
        return self.acts[example, self.md.layers.index(layer), np.asarray(token) + self.c]


@pytest.fixture(params=VARIANTS)
def dump(request: pytest.FixtureRequest) -> Dump:
    return Dump(request.param)


@pytest.fixture
def labelled() -> Dump:
    return Dump("v21_cls_labels_multishard")


@pytest.fixture
def copy(tmp_path: Path, labelled: Dump) -> Path:
    path = tmp_path / "saev/shards" / labelled.path.name
    shutil.copytree(labelled.path, path)
    return path


def metadata(**changed: Any) -> saev.Metadata:
    base: dict[str, Any] = {
        "family": "clip", "ckpt": "x", "layers": (0, 1), "content_tokens_per_example": 16, "cls_token": True, "d_model": 4,
        "n_examples": 8, "max_tokens_per_shard": 128, "data": "", "dataset": Path("/x"),
    }  # fmt: skip
    return saev.Metadata(**{**base, **changed})


# A. Metadata, sizes, files


def test_a_dump_without_examples_has_metadata_and_no_shards(tmp_path: Path) -> None:
    empty = metadata(n_examples=0)
    assert empty.n_shards == 0
    empty.dump(tmp_path)
    assert saev.Metadata.load(tmp_path / empty.hash) == empty
    saev.ShardInfo().validate(tmp_path / empty.hash)
    with pytest.raises(actshard.ActshardError, match="n_examples"):
        metadata(n_examples=-1)
    for folder, expected in (
        (tmp_path / empty.hash, "No shard binaries were found"),
        (tmp_path / "x", "may have been"),
    ):
        with pytest.raises(
            FileNotFoundError, match=rf"{expected}.* Re-run inference to regenerate shards on /fs/scratch\."
        ):
            saev.ShardInfo.load(folder)


def test_01_tokens_per_example() -> None:
    for p, cls, t in ((49, False, 49), (49, True, 50), (16, True, 17), (1, True, 2)):
        md = metadata(content_tokens_per_example=p, cls_token=cls, max_tokens_per_shard=1000)
        assert md.tokens_per_example == t


@settings(max_examples=200)
@given(
    p=st.integers(1, 1000),
    layers=st.integers(1, 50),
    budget=st.integers(1, 10_000_000),
    n=st.integers(1, 10_000),
    cls=st.booleans(),
)
def test_02_03_04_shards(p: int, layers: int, budget: int, n: int, cls: bool) -> None:
    t = p + cls
    options = {
        "content_tokens_per_example": p, "layers": tuple(range(layers)), "max_tokens_per_shard": budget, "n_examples": n,
        "cls_token": cls,
    }  # fmt: skip
    eps = budget // (t * layers)
    if eps == 0:
        with pytest.raises(AssertionError):
            metadata(**options)
        return
    md = metadata(**options)
    assert (md.examples_per_shard, md.n_shards) == (eps, -(-n // eps))
    assert md.shard_shape == (eps, layers, t, 4)
    assert len(md.hash) == 8


def test_05_06_the_file_and_its_hash(dump: Dump, tmp_path: Path) -> None:
    value = json.loads((dump.path / "metadata.json").read_text())
    assert list(value) == [f.name for f in dataclasses.fields(saev.Metadata)]
    assert dump.md.hash == dump.path.name
    dump.md.dump(tmp_path)
    assert json.loads((tmp_path / dump.md.hash / "metadata.json").read_text()) == value
    assert saev.Metadata.load(tmp_path / dump.md.hash) == dump.md
    with pytest.raises(actshard.UnsafePickleError):
        dump.md.make_data_cfg()


def test_07_08_shards_json(dump: Dump) -> None:
    info = saev.ShardInfo.load(dump.path)
    assert [s.name for s in info] == [f"acts{i:06}.bin" for i in range(len(info))]
    counts = [s.n_examples for s in info if s.n_examples]
    assert all(c == dump.md.examples_per_shard for c in counts[:-1])
    assert sum(counts) == dump.n
    loader = saev.OrderedDataLoader(saev.OrderedConfig(shards=dump.path, layer=dump.layer, batch_size=64))
    assert sum(len(b["act"]) for b in loader) == dump.n * dump.p


def test_10_12_labels_and_names(labelled: Dump) -> None:
    assert labelled.labels is not None
    assert labelled.labels.shape == (labelled.n, labelled.p)
    negative = Dump("v21_negative_layers")
    for layer in negative.md.layers:
        data = saev.IndexedDataset(saev.IndexedConfig(shards=negative.path, layer=layer))
        assert np.array_equal(data[3]["act"].numpy(), negative.want(layer, 3 // negative.p, 3 % negative.p))


# B. Checks when opening


LOADERS = [
    (saev.IndexedDataset, saev.IndexedConfig),
    (saev.OrderedDataLoader, saev.OrderedConfig),
    (saev.ShuffledDataLoader, saev.ShuffledConfig),
]


def test_13_18_files_that_are_there(copy: Path) -> None:
    info = saev.ShardInfo.load(copy)
    info.validate(copy)
    info.validate(str(copy))
    saev.ShardInfo([]).validate(copy)


def test_14_15_16_17_files_that_are_not(copy: Path) -> None:
    info = saev.ShardInfo.load(copy)
    first, second = sorted(copy.glob("acts*.bin"))[:2]
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"Missing files \(1\):") as caught:
        info.validate(copy)
    assert str(second.resolve()) in str(caught.value)
    first.write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"Missing files \(1\):.*Empty files \(1\):"):
        info.validate(copy)
    first.unlink()
    first.mkdir()
    with pytest.raises(FileNotFoundError, match=r"Not regular files \(1\):"):
        info.validate(copy)


def test_19_20_no_shards_json(copy: Path, tmp_path: Path) -> None:
    (copy / "shards.json").unlink()
    n = len(list(copy.glob("acts*.bin")))
    with pytest.raises(FileNotFoundError, match=rf"files found: {n}.*acts000000\.bin.*incomplete or older"):
        saev.ShardInfo.load(copy)
    for path in copy.glob("acts*.bin"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="No shard binaries were found"):
        saev.ShardInfo.load(copy)
    gone = tmp_path / "saev/shards/gone"
    with pytest.raises(FileNotFoundError, match="Shard directory is missing") as caught:
        saev.ShardInfo.load(gone)
    assert str(gone.resolve()) in str(caught.value)


@pytest.mark.parametrize(("loader", "config"), LOADERS)
def test_21_22_at_construction(loader: Any, config: Any, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Activations are not saved"):
        loader(config(shards=tmp_path / "none", layer=5))
    (copy / "acts000001.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"acts000001\.bin"):
        loader(config(shards=copy, layer=5))


def test_23_any_folder_will_do(labelled: Dump, tmp_path: Path) -> None:
    elsewhere = tmp_path / "dump"
    shutil.copytree(labelled.path, elsewhere)
    assert len(saev.IndexedDataset(saev.IndexedConfig(shards=elsewhere, layer=5))) == labelled.n * labelled.p


# C. Indexed dataset


def indexed(dump: Dump, **options: Any) -> saev.IndexedDataset:
    return saev.IndexedDataset(saev.IndexedConfig(**{"shards": dump.path, "layer": dump.layer, **options}))


def test_24_25_26_27_items(dump: Dump) -> None:
    data = indexed(dump)
    assert type(len(data)) is int
    assert len(data) == dump.n * dump.p
    edge = dump.md.examples_per_shard * dump.p
    every = sorted(
        {0, 1, len(data) - 1, *(i for k in (edge - 1, edge, 2 * edge - 1, 2 * edge) if (i := k) < len(data))}
    )
    for i in (*every, *range(0, len(data), 7)):
        item = data[i]
        assert (item["example_idx"], item["token_idx"]) == (i // dump.p, i % dump.p)
        assert type(item["example_idx"]) is int
        assert type(item["token_idx"]) is int
        assert item["act"].dtype == torch.float32
        assert item["act"].shape == (dump.md.d_model,)
        assert np.array_equal(item["act"].numpy(), dump.want(dump.layer, i // dump.p, i % dump.p))
        item["act"].fill_(0)
        assert np.array_equal(data[i]["act"].numpy(), dump.want(dump.layer, i // dump.p, i % dump.p))
    both = data.__getitems__(list(range(len(data))))
    for i, item in enumerate(both):
        one = data[i]
        assert torch.equal(one.pop("act"), item.pop("act"))
        assert one == item


def test_28_29_indices(labelled: Dump) -> None:
    data = indexed(labelled)
    for bad in (len(data), -1, -len(data), 10**9):
        with pytest.raises(IndexError):
            data[bad]
        with pytest.raises(IndexError):
            data.__getitems__([0, bad])
    for i in (np.int64(3), np.int32(3), np.uint8(3)):
        assert torch.equal(data[i]["act"], data[3]["act"])


def test_30_memory(labelled: Dump) -> None:
    data = indexed(labelled)
    data[0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = np.random.default_rng(0)
    for i in rng.integers(0, len(data), 1000).tolist():
        assert torch.equal(data[i]["act"], data[i]["act"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_31_layers(labelled: Dump) -> None:
    a, b = (indexed(labelled, layer=x) for x in labelled.md.layers[:2])
    assert a[7]["example_idx"] == b[7]["example_idx"]
    assert not torch.equal(a[7]["act"], b[7]["act"])


def test_32_special(labelled: Dump) -> None:
    data = indexed(labelled, tokens="special")
    assert len(data) == labelled.n
    for i in range(labelled.n):
        item = data[i]
        assert (item["example_idx"], item["token_idx"]) == (i, -1)
        assert np.array_equal(item["act"].numpy(), labelled.acts[i, labelled.md.layers.index(labelled.layer), 0])
        assert "token_label" not in item
    with pytest.raises(AssertionError):
        indexed(Dump("v21_nocls_oneshard"), tokens="special")


def test_33_34_unknown_and_all_layers(labelled: Dump) -> None:
    for loader, config in LOADERS:
        with pytest.raises(AssertionError):
            loader(config(shards=labelled.path, layer=99999))
    layers, t = labelled.md.layers, labelled.p + labelled.c
    data = indexed(labelled, tokens="all", layer="all")
    assert len(data) == labelled.n * t * len(layers)
    together = data.__getitems__(range(len(data)))
    for i in range(0, len(data), 11):
        rest, k = divmod(i, len(layers))
        e, token = divmod(rest, t)
        for item in (data[i], together[i]):
            assert (item["example_idx"], item["token_idx"], item["layer"]) == (e, token - labelled.c, layers[k])
            assert np.array_equal(item["act"].numpy(), labelled.acts[e, k, token])


def test_35_labels(labelled: Dump) -> None:
    data = indexed(labelled)
    assert labelled.labels is not None
    for i in range(0, len(data), 5):
        item = data[i]
        assert type(item["token_label"]) is int
        assert item["token_label"] == labelled.labels[item["example_idx"], item["token_idx"]]
    bare = indexed(Dump("v21_nocls_oneshard"))
    assert "token_label" not in bare[0]
    assert "token_label" not in bare.__getitems__([0])[0]


def test_36_transform(labelled: Dump) -> None:
    class Doubled(saev.IndexedDataset):
        def transform(self, act: Any) -> Any:
            return torch.from_numpy(act * 2)

    data = Doubled(saev.IndexedConfig(shards=labelled.path, layer=labelled.layer))
    plain = indexed(labelled)
    assert data.d_model == labelled.md.d_model
    assert torch.equal(data[9]["act"], plain[9]["act"] * 2)
    assert torch.equal(data.__getitems__([9])[0]["act"], plain[9]["act"] * 2)
    made = plain.transform(np.ones(data.d_model, np.float32))
    assert (made.dtype, made.shape) == (torch.float32, (data.d_model,))


def test_37_the_same_rows_from_all(labelled: Dump) -> None:
    data = indexed(labelled)
    for batch in shuffled(labelled, batch_size=16):
        for act, e, t in zip(batch["act"], batch["example_idx"].tolist(), batch["token_idx"].tolist(), strict=True):
            assert torch.equal(act, data[e * labelled.p + t]["act"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_items_in_loader_workers(labelled: Dump, method: str) -> None:
    loader = torch.utils.data.DataLoader(indexed(labelled), batch_size=8, num_workers=2, multiprocessing_context=method)
    acts = torch.cat([b["act"] for b in loader]).numpy()
    assert np.array_equal(acts, labelled.want(labelled.layer, slice(None), np.arange(labelled.p)).reshape(acts.shape))


# D. Index map


def test_38_39_index_map() -> None:
    md = metadata()
    assert md.examples_per_shard == 3
    m = saev.IndexMap(md, "content", 0)
    for i, want in {
        0: (0, 0, 0, 0, 1),
        15: (0, 15, 0, 0, 16),
        16: (1, 0, 0, 1, 1),
        31: (1, 15, 0, 1, 16),
        48: (3, 0, 1, 0, 1),
    }.items():
        x = m.from_global(i)
        assert (x.example_idx, x.content_token_idx, x.shard_idx, x.example_idx_in_shard, x.token_idx_in_shard) == want
        assert x.layer_idx_in_shard == 0
    x = saev.IndexMap(md, "special", 0).from_global(0)
    assert (x.example_idx, x.content_token_idx, x.shard_idx, x.example_idx_in_shard, x.token_idx_in_shard) == (
        0,
        -1,
        0,
        0,
        0,
    )


# E. Ordered loader


def ordered(dump: Dump, **options: Any) -> saev.OrderedDataLoader:
    return saev.OrderedDataLoader(saev.OrderedConfig(**{"shards": dump.path, "layer": dump.layer, **options}))


@pytest.mark.parametrize("batch_size", [1, 7, 8, 32, 128, 512, 2048])
def test_40_41_42_43_45_ordered(dump: Dump, batch_size: int) -> None:
    loader = ordered(dump, batch_size=batch_size)
    total = dump.n * dump.p
    batches = list(loader)
    assert len(loader) == loader.n_batches == len(batches) == -(-total // batch_size)
    assert (loader.n_samples, loader.batch_size, loader.drop_last) == (total, batch_size, False)
    assert [len(b["act"]) for b in batches] == [min(batch_size, total - k) for k in range(0, total, batch_size)]
    e, t = (torch.cat([b[k] for b in batches]).numpy() for k in ("example_idx", "token_idx"))
    assert np.array_equal(e * dump.p + t, np.arange(total))
    for b in batches:
        assert (b["act"].dtype, b["example_idx"].dtype, b["token_idx"].dtype) == (
            torch.float32,
            torch.int64,
            torch.int64,
        )
        assert np.array_equal(b["act"].numpy(), dump.want(dump.layer, b["example_idx"].numpy(), b["token_idx"].numpy()))
        assert ("token_labels" in b) == (dump.labels is not None)
        if dump.labels is not None:
            assert b["token_labels"].dtype == torch.int64
            assert np.array_equal(
                b["token_labels"].numpy(), dump.labels[b["example_idx"].numpy(), b["token_idx"].numpy()]
            )
    short = ordered(dump, batch_size=batch_size, drop_last=True)
    assert len(short) == total // batch_size == len(list(short))
    assert short.drop_last


def test_44_46_48_again(labelled: Dump) -> None:
    loader = ordered(labelled, batch_size=16, batch_timeout_s=0.001)
    first = next(iter(loader))
    for _ in range(2):
        batches = list(loader)
        assert torch.equal(batches[0]["act"], first["act"])
        assert torch.equal(batches[0]["token_labels"], first["token_labels"])
    loader.shutdown()
    loader.shutdown()
    half = iter(loader)
    next(half)
    loader.shutdown()
    assert len(list(loader)) == len(loader)


def test_47_memory(labelled: Dump) -> None:
    loader = ordered(labelled, batch_size=100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader, 20)), 50):
        del batch
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_49_50_what_it_does_not_do(labelled: Dump, copy: Path) -> None:
    for tokens in ("special", "all"):
        with pytest.raises(Exception, match="content"):
            ordered(labelled, tokens=tokens)
    with pytest.raises(RuntimeError):
        next(iter(ordered(labelled, layer="all")))
    info = json.loads((copy / "shards.json").read_text())
    info[0]["n_examples"] -= 1
    info[1]["n_examples"] += 1
    (copy / "shards.json").write_text(json.dumps(info))
    with pytest.raises(actshard.ActshardError):
        list(saev.OrderedDataLoader(saev.OrderedConfig(shards=copy, layer=labelled.layer)))


# F. Shuffled loader


def shuffled(dump: Dump, **options: Any) -> saev.ShuffledDataLoader:
    return saev.ShuffledDataLoader(
        saev.ShuffledConfig(**{"shards": dump.path, "layer": dump.layer, "batch_size": 16, **options})
    )


@pytest.mark.parametrize("batch_size", [4, 8, 16, 24])
def test_51_52_53_54_shuffled(dump: Dump, batch_size: int) -> None:
    loader = shuffled(dump, batch_size=batch_size)
    total = dump.n * dump.p
    batches = list(loader)
    assert len(loader) == len(batches) == -(-total // batch_size)
    assert loader.n_samples == total
    assert [len(b["act"]) for b in batches] == [min(batch_size, total - k) for k in range(0, total, batch_size)]
    seen = set()
    for b in batches:
        assert set(b) == {"act", "example_idx", "token_idx"}
        assert (b["act"].dtype, b["example_idx"].dtype, b["token_idx"].dtype) == (
            torch.float32,
            torch.int32,
            torch.int32,
        )
        assert np.array_equal(b["act"].numpy(), dump.want(dump.layer, b["example_idx"].numpy(), b["token_idx"].numpy()))
        seen |= set(zip(b["example_idx"].tolist(), b["token_idx"].tolist(), strict=True))
    assert len(seen) == total
    short = shuffled(dump, batch_size=batch_size, drop_last=True)  # upstream accepts and ignores it
    assert [len(b["act"]) for b in short] == [batch_size] * (total // batch_size) == [batch_size] * len(short)


def test_55_56_57_labels(labelled: Dump) -> None:
    assert labelled.labels is not None
    assert shuffled(labelled, ignore_labels=[]).n_samples == labelled.n * labelled.p
    ignore = np.unique(labelled.labels)[:2].tolist()
    loader = shuffled(labelled, ignore_labels=ignore)
    kept = {tuple(x) for x in np.argwhere(~np.isin(labelled.labels, ignore)).tolist()}
    seen = [k for b in loader for k in zip(b["example_idx"].tolist(), b["token_idx"].tolist(), strict=True)]
    assert len(seen) == loader.n_samples == len(kept)
    assert set(seen) == kept
    assert len(loader) == -(-len(kept) // 16)
    with pytest.warns(actshard.ActshardWarning, match="ignore_labels leaves out all") as told:
        empty = saev.ShuffledDataLoader(
            saev.ShuffledConfig(shards=labelled.path, layer=labelled.layer, ignore_labels=list(range(256)))
        )
    assert [x.filename for x in told] == [__file__]
    with pytest.raises(StopIteration):
        next(iter(empty))
    with pytest.raises(FileNotFoundError, match=r"labels\.bin not found"):
        shuffled(Dump("v21_nocls_oneshard"), ignore_labels=[1])


def test_58_59_seeds(labelled: Dump) -> None:
    def order(**options: Any) -> list[int]:
        return [
            x for b in shuffled(labelled, **options) for x in (b["example_idx"] * labelled.p + b["token_idx"]).tolist()
        ]

    assert order(seed=1) != order(seed=2)
    assert order(seed=1) == order(seed=1) == order(seed=1, n_threads=1) == order(seed=1, n_threads=9)
    loader = shuffled(labelled, seed=1)
    first, second = ([b["act"] for b in loader] for _ in range(2))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_60_61_62_63_64_fill(labelled: Dump) -> None:
    for fill in (0.0, 0.2, 1.0):
        loader = shuffled(labelled, min_buffer_fill=fill, buffer_size=64)
        assert sum(len(b["act"]) for b in loader) == loader.n_samples
        batches = iter(loader)
        first = next(batches)
        assert (loader._last_reservoir_fill is None) == (fill == 0.0)
        if len(first["act"]) >= labelled.p * 4:
            assert len(set(first["token_idx"].tolist())) >= 0.8 * labelled.p
        limit, seen = loader.n_samples * 2 + 5, 0
        while seen < limit:
            for batch in loader:
                seen += len(batch["act"])
                if seen >= limit:
                    break
        assert limit <= seen < 3 * limit


def test_65_a_shard_that_disappears(copy: Path, labelled: Dump) -> None:
    for make in (
        saev.OrderedDataLoader(saev.OrderedConfig(shards=copy, layer=labelled.layer, batch_size=4)),
        saev.ShuffledDataLoader(saev.ShuffledConfig(shards=copy, layer=labelled.layer, batch_size=4, buffer_size=4)),
    ):
        shard = sorted(copy.glob("acts*.bin"))[-1]
        kept = shard.read_bytes()
        shard.unlink()
        with pytest.raises(RuntimeError, match=shard.name) as caught:
            list(make)
        assert isinstance(caught.value, actshard.ActshardError)
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        shard.write_bytes(kept)


def test_66_what_upstream_leaves_out(labelled: Dump) -> None:
    with pytest.raises(NotImplementedError):
        shuffled(labelled, scale_norm=True)
    layers, c = labelled.md.layers, labelled.c
    for tokens, first, count in (("special", 0, 1), ("all", 0, labelled.p + c), ("content", c, labelled.p)):
        for layer in (labelled.layer, "all"):
            loader = shuffled(labelled, tokens=tokens, layer=layer)
            seen = set()
            for b in loader:
                names = b["layer"].tolist() if layer == "all" else [layer] * len(b["act"])
                for act, e, t, x in zip(
                    b["act"].numpy(), b["example_idx"].tolist(), b["token_idx"].tolist(), names, strict=True
                ):
                    assert np.array_equal(act, labelled.acts[e, layers.index(x), t + c])
                    assert first <= t + c < first + count
                    seen.add((e, t, x))
            want = labelled.n * count * (len(layers) if layer == "all" else 1)
            assert len(seen) == loader.n_samples == want


def test_67_a_copy_in_tmpdir(
    labelled: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for _ in range(2):
        loader = shuffled(labelled, use_tmpdir=True)
        target = tmp_path / "77/saev/shards" / labelled.path.name
        assert (target / ".copy_complete").exists()
        assert loader._shards_path == target
        assert sum(len(b["act"]) for b in loader) == loader.n_samples
    monkeypatch.delenv("TMPDIR")
    with caplog.at_level("WARNING"):
        assert shuffled(labelled, use_tmpdir=True)._shards_path == labelled.path
    assert "TMPDIR" in caplog.text


def test_68_from_shuffled_to_ordered(labelled: Dump) -> None:
    config = saev.ShuffledConfig(shards=labelled.path, layer=labelled.layer, batch_size=9, buffer_size=3)
    made = saev.make_ordered_config(config, batch_size=11)
    assert made == saev.OrderedConfig(shards=labelled.path, layer=labelled.layer, batch_size=11, buffer_size=3)
    with pytest.raises(TypeError):
        saev.make_ordered_config(config, colour="red")


def test_fields_are_upstreams() -> None:
    assert [f.name for f in dataclasses.fields(saev.ShuffledConfig)] == [
        "shards", "tokens", "layer", "batch_size", "drop_last", "scale_norm", "ignore_labels", "n_threads", "buffer_size",
        "min_buffer_fill", "batch_timeout_s", "seed", "debug", "log_every_s", "use_tmpdir",
    ]  # fmt: skip
    assert saev.ShuffledConfig().seed == 17
    assert saev.OrderedConfig().batch_size == 16384
    assert saev.IndexedConfig().layer == -2


def test_nothing_is_left_over(labelled: Dump) -> None:
    data = pickle.loads(pickle.dumps(indexed(labelled)))
    assert torch.equal(data[3]["act"], indexed(labelled)[3]["act"])
    for loader in (ordered(labelled, batch_size=4), shuffled(labelled, batch_size=4)):
        batches = iter(loader)
        next(batches)
        del batches, loader
    gc.collect()
    wait_for_the_end_of("actshard-ahead")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", None), ("layers", []), ("layers", [True]), ("content_tokens_per_example", None), ("cls_token", "yes"),
        ("max_tokens_per_shard", "x"), ("max_tokens_per_shard", 0), ("pixel_agg", None), ("pixel_agg", "other"),
        ("pixel_agg", []), ("data", {}), ("dataset", 3), ("family", None), ("dtype", 1), ("d_model", -1), ("protocol", "3.0"),
        ("protocol", 2), ("n_examples", 1e3),
    ],
)  # fmt: skip
def test_damaged_metadata_are_our_errors(field: str, value: Any, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    shutil.copytree(saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"), dump)
    metadata = json.loads((dump / "metadata.json").read_text())
    (dump / "metadata.json").write_text(json.dumps({**metadata, field: value}))
    for read in (saev.Metadata.load, lambda p: saev.IndexedDataset(saev.IndexedConfig(shards=p, layer=5))):
        with pytest.raises(actshard.ActshardError) as caught:
            read(dump)
        assert caught.value.path == dump / "metadata.json"
        assert field in str(caught.value)


def test_an_older_dump_is_refused_with_the_way_to_read_it() -> None:
    path = saev_dump(GOLDEN / "saev/v20_seed_nocls_full_tail")
    assert len(actshard.open(path)) > 0
    with pytest.raises(actshard.FormatError) as caught:
        saev.Metadata.load(path)
    told = "missing: expected a dump of protocol 2.1, as saev's own loaders. actshard.open also reads dumps of older protocols."
    assert caught.value.detail == f"field 'content_tokens_per_example': {told}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 2.5), ("batch_size", 0), ("batch_size", True), ("batch_size", "8"), ("shards", 5), ("shards", None),
        ("layer", 1.0), ("layer", None), ("layer", True), ("tokens", "some"), ("ignore_labels", 1), ("ignore_labels", ["a"]),
        ("ignore_labels", {1}), ("drop_last", 1), ("seed", -1), ("seed", 1.5), ("buffer_size", "64"), ("min_buffer_fill", "x"),
        ("use_tmpdir", "no"),
    ],
)  # fmt: skip
def test_settings_are_checked_when_they_are_made(field: str, value: Any) -> None:
    for config in (saev.IndexedConfig, saev.OrderedConfig, saev.ShuffledConfig):
        if field in {f.name for f in dataclasses.fields(config)}:
            with pytest.raises(actshard.ActshardError, match=field):
                config(**{field: value})
    for config, loader in (
        (saev.IndexedConfig, saev.IndexedDataset),
        (saev.OrderedConfig, saev.OrderedDataLoader),
        (saev.ShuffledConfig, saev.ShuffledDataLoader),
    ):
        assert config(shards="some/dump").shards == Path("some/dump")  # type: ignore[arg-type]
        with pytest.raises(actshard.ArgumentError, match="cfg"):
            loader(1)  # type: ignore[arg-type]


def test_what_a_monitor_asks_a_loader() -> None:
    dump = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
    for loader in (
        saev.ShuffledDataLoader(saev.ShuffledConfig(shards=dump, layer=5, batch_size=4)),
        saev.OrderedDataLoader(saev.OrderedConfig(shards=dump, layer=5, batch_size=4)),
    ):
        assert loader.reservoir.fill() == 0
        for batch in loader:
            assert loader.reservoir.fill() == 1
            assert batch.keys() <= set(loader.ExampleBatch.__annotations__)
        assert loader.reservoir.fill() == 0
        with pytest.raises(actshard.ActshardError, match="another loop"):
            list(zip(loader, loader, strict=False))
    dataset = saev.IndexedDataset(saev.IndexedConfig(shards=dump, layer=5))
    assert dataset[0].keys() <= set(dataset.Example.__annotations__)


def test_ranks_of_a_node_share_one_copy(tmp_path: Path) -> None:
    """Processes start at once: each reads a complete copy, and none writes to a file that another has mapped."""
    dump = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
    code = (
        "import logging, os, pathlib, shutil, sys, time\n"
        "from actshard.compat import saev\n"
        "real, copied = shutil.copy2, []\n"
        "def slow(a, b): time.sleep(0.02); copied.append(real(a, b)); return b\n"
        "shutil.copy2 = slow\n"
        "loader = saev.ShuffledDataLoader(saev.ShuffledConfig(shards=pathlib.Path(sys.argv[1]), layer=5, use_tmpdir=True))\n"
        "print(len(copied), sum(float(b['act'].sum()) for b in loader))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore", "SLURM_JOB_ID": "7"}
    # Left by an older release whose copy was killed.
    left = tmp_path / "7/saev/shards" / dump.name
    left.mkdir(parents=True)
    (left / "acts000000.bin").write_bytes(b"half")
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(dump)], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [p.communicate(timeout=PATIENCE)[0].split() for p in started]
    assert all(p.returncode == 0 for p in started)
    files = sum(f.is_file() for f in dump.iterdir())
    assert sorted(int(n) for n, _ in said) == [0, 0, files]
    assert len({total for _, total in said}) == 1
    assert (left / ".copy_complete").exists()
