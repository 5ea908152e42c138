"""Drop-ins for trainers of draft models: samples and batches equal those of the original data sets, for every store."""

from __future__ import annotations

import pickle
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import actshard
from draft_files import DRAFT, Expected, edit_json, opened
from served import served

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

from actshard.compat import deepspec  # noqa: E402 -- after importorskip

CACHES = [DRAFT / name for name in ("deepspec_v2_single", "deepspec_v2_ranks")]
SPECULATORS = DRAFT / "speculators_bf16"


def same(ours: Any, theirs: Any) -> bool:
    """Bit for bit, dtype for dtype, keys in order."""
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, torch.Tensor):
        equal_bits = ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*equal_bits)
    return bool(ours == theirs)


class StatedCache(torch.utils.data.Dataset):  # type: ignore[misc]  # torch's class has no types here
    """The reading steps of DeepSpec's ``CacheDataset``: deepspec/data/target_cache_dataset.py at afdfa7c, lines 615 to 836."""

    def __init__(self, cache_dir: Path) -> None:
        import json

        self.folder = cache_dir
        self.manifest = json.loads((cache_dir / "manifest.json").read_text())
        self.index = (cache_dir / "samples.idx").read_bytes()

    def __len__(self) -> int:
        return int(self.manifest["num_samples"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = struct.Struct("<QIIQQQQQ")
        sample, shard_id, tokens, ids, _, mask, states, last = record.unpack_from(self.index, index * record.size)
        assert sample == index
        shard = (self.folder / self.manifest["shards"][shard_id]["file_name"]).read_bytes()
        width, layers = self.manifest["hidden_size"], len(self.manifest["target_layer_ids"])

        def read(kind: Any, offset: int, *shape: int) -> torch.Tensor:
            array = np.frombuffer(shard, kind, int(np.prod(shape)), offset).copy()
            return torch.from_numpy(array).view(*shape)

        return {
            "input_ids": read(np.int32, ids, tokens),
            "loss_mask": read(np.uint8, mask, tokens),
            "target_hidden_states": read(np.uint16, states, tokens, layers * width).view(torch.bfloat16),
            "target_last_hidden_states": read(np.uint16, last, tokens, width).view(torch.bfloat16),
        }


def stated_collator(features: list[dict[str, Any]]) -> dict[str, Any]:
    """The steps of DeepSpec's ``CacheCollator``: the same file, lines 789 to 871."""

    def pad(key: str) -> torch.Tensor:
        longest = max(item[key].shape[0] for item in features)
        out = torch.zeros((len(features), longest, *features[0][key].shape[1:]), dtype=features[0][key].dtype)
        for i, item in enumerate(features):
            out[i, : item[key].shape[0]] = item[key]
        return out

    batch = {key: pad(key) for key in ("input_ids", "loss_mask")}
    attention = torch.zeros_like(batch["input_ids"], dtype=torch.long)
    for i, item in enumerate(features):
        attention[i, : item["input_ids"].shape[0]] = 1
    batch["attention_mask"] = attention
    return batch | {key: pad(key) for key in ("target_hidden_states", "target_last_hidden_states")}


def stated_order(size: int, start: int, rank: int = 0, world: int = 1, seed: int = 42) -> list[int]:
    """DeepSpec's ``StatelessResumableDistributedSampler`` for the rest of an epoch: deepspec/utils/distributed.py, line 62."""
    each = size // world
    generator = torch.Generator()
    generator.manual_seed(seed + start // each)
    order = torch.randperm(size, generator=generator).tolist()[: each * world]
    return list(order[rank : each * world : world][start % each :])


@pytest.mark.parametrize("golden", CACHES, ids=lambda p: p.name)
def test_deepspec_samples_and_batches_are_those_of_its_own_data_set(golden: Path) -> None:
    ours, theirs = deepspec.CacheDataset(golden), StatedCache(golden)
    assert len(ours) == len(theirs) > 3
    assert all(same(ours[i], theirs[i]) for i in range(len(theirs)))
    assert all(ours.manifest[key] == value for key, value in theirs.manifest.items())
    numbers = [2, 0, 3]
    read = ours.__getitems__(numbers)
    assert same(read, [theirs[i] for i in numbers])
    assert same(deepspec.CacheCollator()(read), stated_collator([theirs[i] for i in numbers]))
    for bad in (-1, len(theirs)):
        with pytest.raises(IndexError):
            ours[bad]


def test_deepspec_values_are_those_of_the_golden_data() -> None:
    golden = CACHES[1]
    expected, store = Expected(golden), opened(golden)
    before = np.concatenate([[0], np.cumsum(expected.lengths)])
    for i, sample in enumerate(deepspec.CacheDataset(store)):
        rows = slice(before[i], before[i + 1])
        states = np.concatenate([expected.bits(layer)[rows] for layer in store.layers[:-1]], axis=1)
        assert np.array_equal(sample["target_hidden_states"].view(torch.int16).numpy().view(np.uint16), states)
        last = sample["target_last_hidden_states"].view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(last, expected.bits("last")[rows])


WRITTEN: dict[str, dict[str, Any]] = {
    "deepspec_v2_ranks": {}, "deepspec_v4_64_cp2": {"version": 2}, "speculators_fp8": {"layer_ids": [2, 18, 33]},
    "specforge_dspark": {"layer_ids": [1, 9, 17, 25, 33]}, "modelopt_vllm": {"layer_ids": [1, 2, 3, 4, 5]}, "automodel_dspark": {},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_deepspec_reads_what_we_write_and_the_drop_in_needs_no_conversion(name: str, tmp_path: Path) -> None:
    store = opened(DRAFT / name)
    theirs = StatedCache(actshard.convert(store, tmp_path / "made", "deepspec", **WRITTEN[name]).path)
    ids = theirs.manifest["target_layer_ids"]
    mine = deepspec.CacheDataset(
        store,
        layers=dict(zip(store.layers, ids, strict=False)),
        loss_mask="loss_mask" if "loss_mask" in store.table.column_names else None,
    )
    want = [theirs[i] for i in range(len(theirs))]
    assert same([mine[i] for i in range(len(store))], want)
    assert mine.target_layer_ids == ids


@pytest.mark.parametrize("workers", [0, 2])
def test_deepspec_loaders_resume_in_the_order_of_its_sampler(workers: int) -> None:
    """The original's loader, with its sampler's order, beside ours: whole epochs, a rank's part, and the rest after a stop."""
    golden = CACHES[0]
    ours, theirs = deepspec.CacheDataset(golden), StatedCache(golden)
    for start, rank, world in ((0, 0, 1), (2, 0, 1), (1, 1, 2)):
        order = stated_order(len(theirs), start, rank, world)
        options: dict[str, Any] = {"batch_size": 2, "sampler": order, "num_workers": workers}
        mine = torch.utils.data.DataLoader(ours, collate_fn=deepspec.CacheCollator(), **options)
        want = torch.utils.data.DataLoader(theirs, collate_fn=stated_collator, batch_size=2, sampler=order)
        assert same(list(mine), list(want))


def test_deepspec_data_sets_are_read_by_spawned_workers() -> None:
    """Also after this process has read from it, and from an open store."""
    ours = deepspec.CacheDataset(opened(CACHES[0]))
    first = ours[1]
    loader = torch.utils.data.DataLoader(
        ours, batch_size=2, num_workers=1, multiprocessing_context="spawn", collate_fn=deepspec.CacheCollator()
    )
    plain = torch.utils.data.DataLoader(ours, batch_size=2, collate_fn=deepspec.CacheCollator())
    assert same(list(loader), list(plain))
    assert same(pickle.loads(pickle.dumps(ours))[1], first)


def test_deepspec_trains_from_other_formats(tmp_path: Path) -> None:
    """Copies of the cache give the same samples; the padding of a Zarr store is no token."""
    theirs = StatedCache(CACHES[0])
    want, ids = [theirs[i] for i in range(len(theirs))], theirs.manifest["target_layer_ids"]
    made = actshard.convert(CACHES[0], tmp_path / "speculators", "speculators").path
    ours = deepspec.CacheDataset(made)
    assert same([ours[i] for i in range(len(ours))], want)
    assert ours.target_layer_ids == ids
    renamed: dict[Any, Any] = {layer: layer for layer in ids} | {"last": 99}
    made = actshard.convert(CACHES[0], tmp_path / "zarr", "zarr", layers=renamed, dtype="float32").path
    ours = deepspec.CacheDataset(made, last=99, dtype="bfloat16")
    assert len({len(sample["input_ids"]) for sample in want}) > 1
    assert same([ours[i] for i in range(len(ours))], want)
    assert ours.target_layer_ids == ids


def test_deepspec_needs_the_numbers_of_layers() -> None:
    with pytest.raises(actshard.ArgumentError, match=r"layers=\{0: \.\.\., 1: \.\.\., 2: \.\.\.\}"):
        deepspec.CacheDataset(SPECULATORS)
    ours = deepspec.CacheDataset(SPECULATORS, layers={0: 2, 1: 18, 2: 33}, target_model_name_or_path="m")
    assert ours.target_layer_ids == [2, 18, 33]


def test_deepspec_checks_the_draft_model() -> None:
    ours = deepspec.CacheDataset(SPECULATORS, layers={0: 2, 1: 18, 2: 33}, target_model_name_or_path="m")
    draft = SimpleNamespace(target_layer_ids=[2, 18, 33], config=SimpleNamespace(hidden_size=40))
    deepspec.validate_train_cache(train_dataset=ours, draft_model=draft, target_model_name_or_path="m")
    draft.target_layer_ids = [2, 18, 34]
    with pytest.raises(AssertionError, match="target_layer_ids"):
        deepspec.validate_train_cache(train_dataset=ours, draft_model=draft, target_model_name_or_path="m")


def test_deepspec_refuses_what_would_be_cast_or_made_up(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "wide", "zarr", layers=[1, 2], d_model=8) as writer:
        ids = [[1, 2, 3], [1 << 40, 5, 6]]
        writer.append(np.ones((2, 2, 3, 8), np.float32), columns={"input_ids": ids, "prompt": ["a", "b"]})
    with pytest.raises(actshard.NotStoredError, match="loss_mask=None"):
        deepspec.CacheDataset(tmp_path / "wide", last=2)
    with pytest.raises(actshard.DtypeError, match='dtype="bfloat16"'):
        deepspec.CacheDataset(tmp_path / "wide", last=2, loss_mask=None)
    ours = deepspec.CacheDataset(tmp_path / "wide", last=2, loss_mask=None, dtype="bfloat16")
    assert ours[0]["loss_mask"].tolist() == [1, 1, 1]
    with pytest.raises(actshard.FormatError, match="column 'input_ids', example 1: expected values that int32 holds"):
        ours[1]
    with pytest.raises(actshard.LayerError):
        deepspec.CacheDataset(tmp_path / "wide")


def test_deepspec_damage_is_an_error_and_other_samples_are_read(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(CACHES[0], cache)
    index = bytearray((cache / "samples.idx").read_bytes())
    index[56:64] = struct.pack("<Q", 7)
    (cache / "samples.idx").write_bytes(index)
    ours = deepspec.CacheDataset(cache)
    with pytest.raises(actshard.FormatError, match="sample_id"):
        ours[1]
    assert same(ours[0], StatedCache(CACHES[0])[0])
    edit_json(cache / "manifest.json", version=9)
    with pytest.raises(actshard.ActshardError):
        deepspec.CacheDataset(cache)


def test_deepspec_trains_from_a_url() -> None:
    theirs = StatedCache(CACHES[1])
    with served(DRAFT) as server:
        ours = deepspec.CacheDataset(server.web(CACHES[1].name))
        assert same(ours.__getitems__([8, 0]), [theirs[8], theirs[0]])
        assert ours.cache_dir.endswith(CACHES[1].name)


def test_deepspec_closes_its_store() -> None:
    ours = deepspec.CacheDataset(CACHES[0])
    ours.close()
    with pytest.raises(actshard.ClosedError):
        ours[0]
