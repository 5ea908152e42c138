"""Datasets in Azure containers, against a lookalike."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

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
