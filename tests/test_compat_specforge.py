"""specforge 0.2.0 beside our data set and feature store: equal samples, batches and order; and it reads what we write."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actshard
from draft_files import DRAFT, copied, opened
from test_compat_drafts import same

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("specforge")

from actshard.compat import specforge as ours  # noqa: E402 -- after importorskip

EAGLE3 = DRAFT / "specforge_eagle3"
KINDS = {"eagle3": EAGLE3, "dspark": DRAFT / "specforge_dspark", "dflash": DRAFT / "specforge_dflash_gz"}
OPTIONS = {"run_id": "x", "ttt_length": 7, "max_len": 6}


def original_eagle3(path: Path, **options: Any) -> Any:
    from specforge.data.preprocessing import build_offline_eagle3_dataset

    return build_offline_eagle3_dataset(str(path), **options)


def reader(strategy: str, path: Path) -> Any:
    """SpecForge's own references of a folder."""
    if strategy == "eagle3":
        from specforge.algorithms.eagle3.data import build_offline_reader

        return build_offline_reader(str(path), **OPTIONS)
    from specforge.algorithms.common import dflash_family_data as family

    make = family.build_dspark_offline_reader if strategy == "dspark" else family.build_offline_reader
    return make(strategy, str(path), **OPTIONS)


def loader(strategy: str, store: Any, refs: Any, skip: int = 0, **options: Any) -> list[Any]:
    """Batches of SpecForge's own loader, with its normalization and collation."""
    from specforge.algorithms.common import dflash_family_data as family
    from specforge.algorithms.eagle3 import data as eagle3
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader

    name = "dspark_" if strategy == "dspark" else ""
    module: Any = eagle3 if strategy == "eagle3" else family
    collate = module.build_offline_collator() if strategy == "eagle3" else getattr(module, f"build_{name}collator")()
    normalize = getattr(module, f"build_{name}offline_normalizer")(OPTIONS["max_len"])
    made = FeatureDataLoader(
        store, refs=refs, batch_size=2, collate_fn=collate, per_sample_transform=normalize, strategy=strategy, **options
    )
    made.seek(skip)
    return [(batch.sample_ids, batch.tensors, batch.metadata) for batch in made]


def items(dataset: Any) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize("max_len", [2048, 4])
def test_samples_are_those_of_the_original_in_its_order(max_len: int) -> None:
    theirs, mine = original_eagle3(EAGLE3, max_len=max_len), ours.build_offline_eagle3_dataset(EAGLE3, max_len)
    want = items(theirs)
    assert len(mine) == len(want) == 12
    assert same(items(mine), want)
    assert same(mine.__getitems__([3, -1]), [want[3], want[-1]])
    assert same(items(pickle.loads(pickle.dumps(mine))), want)
    shapes = [sample["input_ids"].shape for sample in want]
    in_numbers = [
        sample["input_ids"].shape
        for sample in items(ours.OfflineEagle3Dataset(opened(EAGLE3).filter(range(12)), max_len=max_len))
    ]
    assert max_len == 4 or shapes != in_numbers, "the golden folder tells the two orders apart"
    with pytest.raises(IndexError):
        mine[12]


def test_transforms_and_epochs_are_taken_as_by_the_original() -> None:
    def doubled(sample: Any) -> Any:
        return {name: value * 2 for name, value in sample.items()}

    from specforge.data.preprocessing import OfflineEagle3Dataset, list_local_files

    theirs = OfflineEagle3Dataset(list_local_files(EAGLE3), doubled, 5)
    mine = ours.OfflineEagle3Dataset(EAGLE3, doubled, 5)
    mine.set_epoch(1)
    assert same(items(mine), items(theirs))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_order_of_the_same_sampler(workers: int) -> None:
    """Two ranks, two epochs, SpecForge's own collate function."""
    from specforge.data.utils import DataCollatorWithPadding

    def batches(dataset: Any, workers: int) -> list[Any]:
        made = []
        for rank in range(2):
            sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=5)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                options: dict[str, Any] = {"sampler": sampler, "num_workers": workers, "drop_last": True}
                made += list(torch.utils.data.DataLoader(dataset, 2, collate_fn=DataCollatorWithPadding(), **options))
        return made

    want = batches(original_eagle3(EAGLE3), 0)
    assert len(want) == 12
    assert same(batches(ours.build_offline_eagle3_dataset(EAGLE3), workers), want)


def test_sequence_parallel_parts_are_those_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of four ranks, in two rings."""
    from specforge import distributed
    from specforge.data import preprocessing

    for module in (distributed, preprocessing):
        monkeypatch.setattr(module, "get_draft_sp_group", lambda: "sp")
        monkeypatch.setattr(module, "get_sp_ring_group", lambda: "ring")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {"sp": 4, "ring": 2}[group])
    for place in range(4):
        ranks = {"sp": place, "ring": place // 2}
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, ranks=ranks: ranks[group])
        options: dict[str, Any] = {"max_len": 5, "ttt_length": 2, "use_usp_preprocess": True}
        assert same(
            items(ours.build_offline_eagle3_dataset(EAGLE3, **options)), items(original_eagle3(EAGLE3, **options))
        )


@pytest.mark.parametrize("strategy", KINDS)
def test_features_and_references_are_those_of_the_original(strategy: str) -> None:
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    features, theirs = ours.StoreFeatures(opened(KINDS[strategy])), LocalFeatureStore()
    refs, want = features.refs(strategy, **OPTIONS), reader(strategy, KINDS[strategy]).read()
    assert len(refs) == len(want) > 5
    for ref, other in zip(refs, want, strict=True):
        differing = vars(ref) | {"feature_store_uri": other.feature_store_uri}
        assert differing == vars(other)
        made, handle = features.get(ref)
        assert same(made, theirs.get(other)[0])
        features.release(handle)
        few = ["loss_mask", "input_ids"]
        assert same(features.get(ref, names=few)[0], theirs.get(other, names=few)[0])
    assert same(pickle.loads(pickle.dumps(features)).get(refs[1])[0], theirs.get(want[1])[0])


@pytest.mark.parametrize("strategy", ["eagle3", "dspark"])
@pytest.mark.parametrize("workers", [0, 3])
def test_the_trainers_loader_gives_the_same_batches_and_resumes(strategy: str, workers: int) -> None:
    """Shuffled as its trainer does, for two ranks; and from the second batch on."""
    from specforge.launch import _shard_offline_refs
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    features = ours.StoreFeatures(opened(KINDS[strategy]))
    trained = [ref for ref in reader(strategy, KINDS[strategy]).read() if _trains(strategy, ref)]
    mine = [
        ref for ref in features.refs(strategy, **OPTIONS) if ref.sample_id in {other.sample_id for other in trained}
    ]
    for rank in range(2):
        order: dict[str, Any] = {"use_usp_preprocess": False, "seed": 3, "epoch": 1, "dp_rank": rank, "dp_size": 2}
        want = loader(strategy, LocalFeatureStore(), _shard_offline_refs(trained, **order))
        refs = _shard_offline_refs(mine, **order)
        assert same(loader(strategy, features, refs, num_workers=workers), want)
        assert same(loader(strategy, features, refs, skip=1, num_workers=workers), want[1:])
        assert len(want) > 0


def _trains(strategy: str, ref: Any) -> bool:
    """Whether SpecForge's normalization takes an example: dflash and dspark refuse those without two supervised neighbours."""
    from specforge.data.loss_mask import has_consecutive_supervised_tokens
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    mask = LocalFeatureStore().get(ref)[0]["loss_mask"][: OPTIONS["max_len"]]
    return strategy == "eagle3" or has_consecutive_supervised_tokens(mask)


@pytest.mark.parametrize(
    "name", ["deepspec_v2_ranks", "speculators_fp8", "modelopt_vllm", "angelslim_eagle3", "automodel_dspark"]
)
def test_the_original_reads_what_we_write_and_the_drop_in_needs_no_conversion(name: str, tmp_path: Path) -> None:
    store = opened(DRAFT / name)
    layers = store.layers[:3]
    mask = "loss_mask" if "loss_mask" in store.table.column_names else None
    made = actshard.convert(store, tmp_path / "made", "specforge", kind="eagle3", layers=[*layers, "last"]).path
    want = items(original_eagle3(made))
    mine = ours.OfflineEagle3Dataset(store, layers=layers, loss_mask=mask)
    order = sorted(range(len(store)), key=str)
    assert same([mine[i] for i in order], want)
    assert same(items(ours.OfflineEagle3Dataset(made)), want)


def test_a_damaged_file_is_an_error_where_the_original_returns_another_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copied(EAGLE3, tmp_path / "data")
    first, bad, *_ = sorted(data.rglob("data_*.ckpt*"))
    bad.write_bytes(bad.read_bytes()[:100])
    theirs, mine = original_eagle3(data), ours.OfflineEagle3Dataset(opened(data))
    assert same(theirs[1], theirs[0])
    assert "ERROR" in capsys.readouterr().out
    with pytest.raises(actshard.ActshardError, match=bad.name):
        mine[1]
    assert same(mine[0], theirs[0])
    assert first.exists()


def test_references_are_checked(tmp_path: Path) -> None:
    features = ours.StoreFeatures(DRAFT / "deepspec_v2_single")
    ref = features.refs()[0]
    with pytest.raises(actshard.ArgumentError, match="eagle3, dflash, domino, dspark"):
        features.refs("eagle9")
    for change in (
        {"feature_store_uri": "file:///etc/passwd"},
        {"feature_store_uri": "actshard://-1"},
        {"feature_keys": {"x": "x"}},
    ):
        with pytest.raises(actshard.ArgumentError, match="sample_ref"):
            features.get(SimpleNamespace(**(vars(ref) | change)))
    with pytest.raises(actshard.OutOfRangeError):
        features.get(SimpleNamespace(**(vars(ref) | {"feature_store_uri": "actshard://99"})))
    with pytest.raises(actshard.UnsupportedError):
        features.put({}, sample_id="x", metadata={})
    assert features.health()["samples"] == 8
    shutil.copytree(KINDS["dflash"], tmp_path / "flash")
    with pytest.raises(actshard.LayerError, match="last"):
        ours.StoreFeatures(opened(tmp_path / "flash")).refs("eagle3")
    with pytest.raises(AttributeError):
        _ = ours.nothing


@pytest.mark.parametrize(("kind", "strategies"), [("dspark", ["dspark"]), ("dflash", ["dflash", "domino"])])
def test_features_of_a_store_are_those_of_the_files_that_we_write(
    kind: str, strategies: list[str], tmp_path: Path
) -> None:
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    store = opened(DRAFT / "deepspec_v2_ranks")
    last = ["last"] if kind == "dspark" else []
    layers = store.layers[:-1]
    made = actshard.convert(store, tmp_path / kind, "specforge", kind=kind, layers=[*layers, *last]).path
    features = ours.StoreFeatures(store)
    for strategy in strategies:
        want = [LocalFeatureStore().get(ref)[0] for ref in reader(strategy, made).read()]
        got = [features.get(ref)[0] for ref in features.refs(strategy, **OPTIONS)]
        assert same([got[i] for i in sorted(range(len(store)), key=str)], want)
