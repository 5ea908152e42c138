"""Datasets in Azure containers, against a lookalike."""

from __future__ import annotations

import base64
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import actshard
from azure import Azure, azure
from test_urls import places, quietly, same


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Azure]:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_KEY", "ENDPOINT"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with azure(tmp_path) as found:
        yield found


@pytest.mark.parametrize("folder", places())
def test_a_container_holds_what_the_folder_holds(folder: Path, account: Azure) -> None:
    shutil.copytree(folder, account.root / "box/run" / folder.name)
    for scheme in ("az", "abfs", "azure"):
        same(quietly(f"{scheme}://box/run/{folder.name}", storage_options=account.options), quietly(folder))
        if scheme == "az":
            assert not any(account.signed)


def test_an_account_key_signs_and_is_in_no_text(account: Azure) -> None:
    folder = places()[0].values[0]
    shutil.copytree(folder, account.root / "box/run")
    key = base64.b64encode(b"a key of an account").decode()
    options = {name: value for name, value in account.options.items() if name != "anon"} | {"account_key": key}
    store = quietly("az://box/run", storage_options=options)
    same(store, quietly(folder))
    assert all(account.signed)
    assert key not in f"{store!r} {store.path!r}"


def test_a_shared_access_signature_is_in_no_text(account: Azure) -> None:
    folder = places()[0].values[0]
    shutil.copytree(folder, account.root / "box/run")
    options = {name: value for name, value in account.options.items() if name != "anon"}
    store = quietly("az://box/run", storage_options=options | {"sas_token": "sv=2023-11-03&sig=hushhush"})
    same(store, quietly(folder))
    assert all(account.signed)
    shard = next((account.root / "box/run").glob("acts000000.bin"))
    shard.unlink()
    with pytest.raises(actshard.ActshardError) as caught:
        quietly("az://box/run", storage_options=options | {"sas_token": "sv=2023-11-03&sig=hushhush"})
    assert "hushhush" not in f"{caught.value!r} {caught.value} {store!r}"


def test_an_account_is_asked_for(account: Azure) -> None:
    with pytest.raises(actshard.ActshardError, match=r"[Aa]ccount"):
        quietly("az://box/run", storage_options={"anon": True})


@pytest.mark.parametrize("folder", places())
def test_datasets_are_pushed_into_a_container(folder: Path, account: Azure) -> None:
    (account.root / "box").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actshard.push(folder, "az://box/run", account.keys, verify=False)
        same(quietly("az://box/run", storage_options=account.options), quietly(folder))
        again = actshard.push(folder, "az://box/run", account.keys, verify=False)
        assert again.sent_files == 0
        other = next(p.values[0] for p in places() if p.values[0] != folder)
        with pytest.raises(actshard.ExistsError, match="overwrite=True"):
            actshard.push(other, "az://box/run", account.keys, verify=False)
        actshard.push(other, "az://box/run", account.keys, verify=False, overwrite=True)
    same(quietly("az://box/run", storage_options=account.options), quietly(other))
    assert not (account.root / "box/run/.actshard-pushing.json").exists()


@pytest.mark.slow
def test_large_files_are_pushed_in_blocks_and_faults_are_survived(account: Azure, tmp_path: Path) -> None:
    (account.root / "box").mkdir()
    rng = np.random.default_rng(0)
    local = tmp_path / "local"
    with actshard.create(local, "pickle", layers=[0], d_model=512, shard_bytes="40MB") as writer:
        writer.append(rng.standard_normal((1, 1, 9000, 512), np.float32))
    account.failing, account.lost = [503, 500], 2
    actshard.push(local, "az://box/run", account.keys)
    assert sum("comp=block&" in query or query == "comp=block" for *_, query in account.requests) >= 3
    assert any("comp=blocklist" in query for *_, query in account.requests)
    assert not account.blocks
    same(quietly("az://box/run", storage_options=account.options), quietly(local))
    assert not actshard.verify("az://box/run", storage_options=account.options).errors
    with pytest.raises(actshard.ExistsError):  # large blobs carry no digest: they may be another dataset's
        actshard.push(local, "az://box/run", account.keys)
    account.failing = [403] * 1
    with pytest.raises(actshard.FileAccessError, match=r"az://box/run.*403") as caught:
        actshard.push(local, "az://box/run", account.keys, overwrite=True)
    assert str(account.keys["account_key"]) not in str(caught.value)
    actshard.push(local, "az://box/run", account.keys, overwrite=True)
    same(quietly("az://box/run", storage_options=account.options), quietly(local))


def test_a_conversion_and_a_writer_go_to_a_container(account: Azure, tmp_path: Path) -> None:
    (account.root / "box").mkdir()
    folder = places()[0].values[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actshard.convert(folder, "az://box/zarr", "zarr", target_options=account.keys, scratch=tmp_path / "scratch")
        local = actshard.convert(folder, tmp_path / "zarr", "zarr")
        same(quietly("az://box/zarr", storage_options=account.options), quietly(local.path))
    with actshard.create(
        "az://box/made", "pickle", layers=[3], d_model=4, storage_options=account.keys, scratch=tmp_path / "scratch"
    ) as writer:
        writer.append(np.ones((2, 1, 5, 4), np.float32))
    assert quietly("az://box/made", storage_options=account.options).num_examples == 2
    assert not (tmp_path / "scratch").exists()
