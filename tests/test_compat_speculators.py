"""speculators 0.9.0 beside our data set and backend: equal samples and batches; and speculators reads what we write."""

from __future__ import annotations

import pickle
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

import actshard
from draft_files import DRAFT, copied, opened
from test_compat_drafts import same

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("hs_connectors")
pytest.importorskip("speculators")

from actshard.compat import speculators as ours  # noqa: E402 -- after importorskip

GOLDEN = [DRAFT / "speculators_bf16", DRAFT / "speculators_fp8"]
SOURCES = [
    "deepspec_v2_ranks", "deepspec_v4_64_cp2", "specforge_eagle3", "specforge_dspark", "automodel_dspark", "modelopt_hf",
    "modelopt_vllm", "angelslim_eagle3", "eagle_v1_qwen2",
]  # fmt: skip
MOST = 16


def original(path: Path, transfer: Any = None, **options: Any) -> Any:
    """speculators' own data set."""
    from hs_connectors import FP8Transfer
    from speculators.train.data import ArrowDataset

    options = {"on_missing": "raise"} | options
    transfer = transfer or FP8Transfer(path / "hidden_states")
    return ArrowDataset(max_len=MOST, datapath=str(path), transfer=transfer, **options)


def items(dataset: Any) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


def batches(dataset: Any, workers: int = 0) -> list[Any]:
    """speculators' own collate function and sampler, as its trainer combines them."""
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    first = dataset[0]
    width = first["verifier_last_hidden_states"].shape[1]
    layers = first["hidden_states"].shape[1] // width
    sampler = MultipackDistributedBatchSamplerV2(MOST, dataset.approx_lengths, num_replicas=1, rank=0, seed=3)
    options: dict[str, Any] = {"batch_sampler": sampler, "num_workers": workers}
    return list(torch.utils.data.DataLoader(dataset, collate_fn=CollateFn(MOST, width, layers), **options))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda p: p.name)
@pytest.mark.parametrize("part", [{}, {"train_ratio": 0.7}, {"train_ratio": 0.7, "split": "val"}], ids=str)
def test_samples_and_batches_are_those_of_the_original(golden: Path, part: dict[str, Any]) -> None:
    theirs = original(golden, **part)
    mine = ours.ArrowDataset(MOST, golden, **part)
    by_backend = original(golden, ours.StoreTransfer(golden), **part)
    want, packed = items(theirs), batches(theirs)
    assert len(want) > 1
    for made in (mine, by_backend, pickle.loads(pickle.dumps(mine)), pickle.loads(pickle.dumps(by_backend))):
        assert len(made) == len(theirs)
        assert made.approx_lengths == theirs.approx_lengths
        assert same(items(made), want)
        assert same(batches(made), packed)
    assert same(mine.__getitems__([1, 0, 1]), [want[1], want[0], want[1]])


def test_batches_of_workers_are_those_of_the_original() -> None:
    store = opened(GOLDEN[1])
    assert same(batches(ours.ArrowDataset(MOST, store), workers=2), batches(original(GOLDEN[1])))


@pytest.mark.parametrize("name", SOURCES)
def test_the_original_reads_what_we_write_and_the_drop_in_needs_no_conversion(name: str, tmp_path: Path) -> None:
    store = opened(DRAFT / name)
    made = actshard.convert(store, tmp_path / "made", "speculators").path
    theirs = original(made)
    want = items(theirs)
    assert len(want) == len(store)
    mask = "loss_mask" if "loss_mask" in store.table.column_names else None
    mine = ours.ArrowDataset(MOST, store, loss_mask=mask)
    assert same(items(mine), want)
    assert same(batches(mine), batches(theirs))
    rows = ours.write_rows(store, tmp_path / "rows", loss_mask=mask)
    assert same(items(original(rows, ours.StoreTransfer(store))), want)
    for file in ("data-00000-of-00001.arrow", "state.json"):
        assert (rows / file).read_bytes() == (made / file).read_bytes()
    with pytest.raises(actshard.ArgumentError, match="empty folder"):
        ours.write_rows(store, rows)


@pytest.mark.parametrize("name", ["deepspec_v2_ranks", "modelopt_hf"])
def test_the_original_reads_the_float8_states_that_we_write(name: str, tmp_path: Path) -> None:
    """With its own scales, one per token: the same products in bfloat16."""
    options: dict[str, Any] = {"dtype": "float8_e4m3fn", "scales": "token"}
    made = actshard.convert(opened(DRAFT / name), tmp_path / "made", "speculators", **options).path
    want = items(original(made))
    assert len(want) > 1
    assert same(items(ours.ArrowDataset(MOST, made)), want)


def test_states_of_another_row_are_refused_by_the_original() -> None:
    from speculators.train.recovery import SampleUnavailable

    swapped = original(GOLDEN[0], ours.StoreTransfer(opened(GOLDEN[0]).filter([1, 0, 2, 3, 4, 5])))
    with pytest.warns(UserWarning, match="match input ids"):
        assert isinstance(swapped[0], SampleUnavailable)
    assert same(swapped[2], original(GOLDEN[0])[2])


def test_missing_states_are_what_on_missing_says_and_damaged_ones_raise(tmp_path: Path) -> None:
    from speculators.train.recovery import SampleUnavailable

    data = copied(GOLDEN[0], tmp_path / "data")
    (data / "hidden_states/hs_2.safetensors").unlink()
    (data / "hidden_states/hs_4.safetensors").write_bytes(b"cut")
    store, want = opened(data), items(original(GOLDEN[0]))
    for how in ("skip", "warn", "raise", "generate"):
        mine, theirs = (
            ours.ArrowDataset(MOST, store, on_missing=how),
            original(data, ours.StoreTransfer(store), on_missing=how),
        )
        assert same([mine[i] for i in (0, 1, 3, 5)], [want[i] for i in (0, 1, 3, 5)])
        with pytest.raises(actshard.ActshardError, match="hs_4"):
            mine[4]
        with pytest.raises(actshard.ActshardError, match="hs_4"):
            theirs[4]
        if how in ("raise", "generate"):
            with pytest.raises(actshard.ActshardError, match="hs_2"):
                mine[2]
            continue
        if how == "warn":
            with pytest.warns(UserWarning, match="sample 2"):
                assert isinstance(mine[2], SampleUnavailable)
            continue
        found = mine.__getitems__([0, 2])
        assert isinstance(found[1], SampleUnavailable)
        assert isinstance(theirs[2], SampleUnavailable)
        assert same(found[0], want[0])


def test_the_trainer_takes_the_backend(tmp_path: Path) -> None:
    """Its registry, its parser of arguments, and the transfer that it makes of them."""
    from hs_connectors import HiddenStatesBackend
    from speculators.train.config.resolution import build_parser

    backend = HiddenStatesBackend.registry["actshard"]
    shown = build_parser().format_help()
    assert "--actshard-store" in shown
    assert "actshard" in build_parser().parse_args(["--hidden-states-backend", "actshard"]).hidden_states_backend
    parser = ArgumentParser()
    backend.add_train_args(parser)
    backend.add_launch_args(parser)
    shutil.copytree(GOLDEN[0] / "hidden_states", tmp_path / "hidden_states")
    want = original(GOLDEN[0])[1]
    for arguments in ([], ["--actshard-store", str(GOLDEN[0])]):
        transfer = backend.from_train_args(parser.parse_args(arguments), str(GOLDEN[0]))
        assert same(original(GOLDEN[0], transfer)[1], want)
        assert transfer.get_cached(6) is None
    some = parser.parse_args(["--actshard-layers", "2, 0", "--actshard-last", "1"])
    states = backend.from_train_args(some, str(GOLDEN[0])).get_cached(1)["hidden_states"]
    every = backend.from_train_args(parser.parse_args([]), str(GOLDEN[0])).get_cached(1)["hidden_states"]
    assert same(states, every[:, [2, 0, 1]])
    with pytest.raises(actshard.UnsupportedError, match="vLLM"):
        backend.build_kv_transfer_config(some)
    with pytest.raises(actshard.UnsupportedError, match="cannot generate hidden states"):
        transfer.get_generated({})


def test_arguments_that_would_be_ignored_are_refused() -> None:
    for options in ({"transfer": 1}, {"train_ratio": 0.0}, {"train_ratio": 1.0, "split": "val"}, {"on_missing": "no"}):
        with pytest.raises(ValueError, match=next(iter(options)).replace("split", "train_ratio")):
            ours.ArrowDataset(MOST, GOLDEN[0], **options)
    with pytest.raises(IndexError):
        ours.ArrowDataset(MOST, GOLDEN[0])[6]
    with pytest.raises(AttributeError):
        _ = ours.nothing
