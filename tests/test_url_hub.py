"""Datasets of the Hugging Face hub: pinned, few requests, tokens that stay with the hub, and errors in one line."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actshard
from actshard import tokens
from conftest import GOLDEN
from hub import Hub, hub
from test_urls import places, quietly, same


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no token of whoever runs the tests
    with hub() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def lmprobe() -> Path:
    return sorted(GOLDEN.glob("lmprobe/fullseq_bf16/**/index"))[0].parent


def read_all(store: actshard.Store) -> list[Any]:
    """Every row of a store."""
    return [store.sequence(e, layer) for layer in store.layers for e in range(len(store))]


@pytest.mark.parametrize("folder", places())
def test_the_hub_holds_what_the_folder_holds(folder: Path, lab: Hub) -> None:
    lab.add("lab/acts", folder)
    same(quietly("hf://datasets/lab/acts"), quietly(folder))


@pytest.mark.parametrize("folder", places())
def test_a_folder_below_is_found(folder: Path, lab: Hub, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "deep/runs" / folder.name)
    lab.add("lab/acts", tmp_path)
    same(quietly(f"hf://datasets/lab/acts/deep/runs/{folder.name}"), quietly(folder))


def test_opening_asks_for_a_commit_and_its_files_once(lab: Hub) -> None:
    lab.add("lab/acts", lmprobe())
    store = quietly("hf://datasets/lab/acts")
    assert (lab.count("info"), lab.count("tree")) == (1, 1)
    read_all(store)
    assert (lab.count("info"), lab.count("tree")) == (1, 1)
    resolved = [path for kind, path, _ in lab.requests if kind == "resolve"]
    assert len(resolved) == len(set(resolved)), "a file is resolved once"


def test_one_layer_reads_no_byte_of_another(lab: Hub) -> None:
    lab.add("lab/acts", lmprobe())
    store = quietly("hf://datasets/lab/acts")
    lab.requests.clear()
    layer = store.layers[1]
    store.gather(layer, [0, 1], [0, 0])
    store.last_tokens(layer)
    files = {path for kind, path, _ in lab.requests if kind == "resolve"}
    assert files, "something was read"
    assert all(f"layer{layer:03d}" in path for path in files), files


def test_a_store_stays_at_its_commit(lab: Hub) -> None:
    near = quietly(lmprobe())
    first = lab.add("lab/acts", lmprobe())
    store = quietly("hf://datasets/lab/acts")
    packed = pickle.dumps(store)
    lab.repositories["lab/acts"].commit({"README.md": b"empty"})
    same(store, near)
    before = lab.count("info"), lab.count("tree")
    same(pickle.loads(packed), near)
    assert (lab.count("info"), lab.count("tree")) == before, "a copy asks for no commit"
    same(quietly(f"hf://datasets/lab/acts@{first}"), near)
    with pytest.raises(actshard.ActshardError, match="hf://datasets/lab/acts"):
        quietly("hf://datasets/lab/acts")


def test_names_of_revisions_are_taken(lab: Hub) -> None:
    lab.add("lab/acts", lmprobe(), revision="v1")
    same(quietly("hf://datasets/lab/acts@v1"), quietly(lmprobe()))
    with pytest.raises(actshard.ActshardError, match=r"hf://datasets/lab/acts@v2.*v2"):
        quietly("hf://datasets/lab/acts@v2")


def test_a_token_stays_with_the_hub_and_out_of_texts(lab: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add("lab/hidden", lmprobe(), token="hf_good")
    with pytest.raises(actshard.ActshardError, match=r"hf://datasets/lab/hidden.*HF_TOKEN"):
        quietly("hf://datasets/lab/hidden")
    with pytest.raises(actshard.ActshardError, match=r"hf://datasets/lab/hidden") as caught:
        quietly("hf://datasets/lab/hidden", storage_options={"token": "hf_wrong"})
    assert "hf_wrong" not in f"{caught.value!r} {caught.value} {pickle.dumps(caught.value)!r}"
    store = quietly("hf://datasets/lab/hidden", storage_options={"token": "hf_good"})
    same(store, quietly(lmprobe()))
    assert "hf_good" not in f"{store!r} {store.path!r}"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    same(quietly("hf://datasets/lab/hidden"), quietly(lmprobe()))
    assert lab.count("data")
    assert lab.leaked == 0


def test_signed_urls_that_ended_are_made_anew(lab: Hub) -> None:
    lab.add("lab/acts", lmprobe())
    store = quietly("hf://datasets/lab/acts")
    lab.lifetime = -5  # every signed URL has ended when it arrives
    with pytest.raises(actshard.ActshardError, match=r"hf://datasets/lab/acts.*403") as caught:
        read_all(store)
    assert "Signature" not in str(caught.value)
    lab.lifetime = 3600
    same(store, quietly(lmprobe()))


def test_a_busy_hub_is_waited_for(lab: Hub) -> None:
    lab.add("lab/acts", lmprobe())
    lab.busy += [{"RateLimit": '"api";r=0;t=0'}, {"Retry-After": "0"}]
    same(quietly("hf://datasets/lab/acts"), quietly(lmprobe()))
    assert not lab.busy


def test_offline_nothing_is_asked(lab: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add("lab/acts", lmprobe())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(actshard.ActshardError, match="HF_HUB_OFFLINE"):
        quietly("hf://datasets/lab/acts")
    assert not lab.requests


def test_offline_a_warm_cache_is_enough(lab: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lab.add("lab/acts", lmprobe())
    store = quietly("hf://datasets/lab/acts", cache=tmp_path / "cache")
    wanted = [row.tobytes() for row in read_all(store)]
    packed = pickle.dumps(store)
    lab.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [row.tobytes() for row in read_all(pickle.loads(packed))] == wanted
    assert not lab.requests


def test_offline_a_dataset_that_was_opened_with_a_cache_opens_again(
    lab: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab.add("lab/acts", lmprobe())
    store = quietly("hf://datasets/lab/acts", cache=tmp_path / "cache")
    wanted = [row.tobytes() for row in read_all(store)]
    assert store.table.num_rows
    lab.repositories["lab/acts"].commit({"README.md": b"empty"})
    lab.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = quietly("hf://datasets/lab/acts", cache=tmp_path / "cache")
    assert [row.tobytes() for row in read_all(again)] == wanted
    assert not lab.requests
    with pytest.raises(actshard.ActshardError, match="HF_HUB_OFFLINE"):
        quietly("hf://datasets/lab/acts@v1", cache=tmp_path / "cache")
    (tmp_path / "cache/listings").rename(tmp_path / "away")
    with pytest.raises(actshard.ActshardError, match="HF_HUB_OFFLINE"):
        quietly("hf://datasets/lab/acts", cache=tmp_path / "cache")
    assert not lab.requests


def test_offline_a_token_cache_that_was_opened_with_a_cache_opens_again(
    lab: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if nothing but its ledger was read."""
    lab.add("lab/tokens", sorted(GOLDEN.glob("levanter/**/shard_ledger.json"))[0].parent)
    length = len(tokens.open_cache("hf://datasets/lab/tokens", cache=tmp_path / "cache"))
    lab.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(tokens.open_cache("hf://datasets/lab/tokens", cache=tmp_path / "cache")) == length > 0
    assert not lab.requests


def test_offline_an_earlier_commit_opens_by_its_name(lab: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also when a later commit was opened, of which nothing was read."""
    first = lab.add("lab/acts", lmprobe())
    wanted = [row.tobytes() for row in read_all(quietly("hf://datasets/lab/acts", cache=tmp_path / "cache"))]
    files = dict(lab.repositories["lab/acts"].commits[first])
    shard = next(name for name in sorted(files) if name.endswith(".safetensors"))
    lab.repositories["lab/acts"].commit({**files, shard: files[shard][:-1] + bytes([files[shard][-1] ^ 1])})
    quietly("hf://datasets/lab/acts", cache=tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = quietly(f"hf://datasets/lab/acts@{first}", cache=tmp_path / "cache")
    assert [row.tobytes() for row in read_all(again)] == wanted


def test_what_is_not_a_dataset_is_told(lab: Hub) -> None:
    for url in ("hf://lab/acts", "hf://datasets/acts", "hf://models/lab/acts", "hf://datasets/"):
        with pytest.raises(actshard.ActshardError, match="hf://") as caught:
            quietly(url)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(actshard.ActshardError, match="hf://datasets/lab/none"):
        quietly("hf://datasets/lab/none")
