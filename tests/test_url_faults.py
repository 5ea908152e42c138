"""Datasets behind URLs whose servers fail: an error, or the right rows, and never fill values for what is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import actshard
from conftest import GOLDEN
from served import Served, served

ZARR = ["zarr/single_minimal/activations.zarr", "zarr/v3_sharded/activations.zarr"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def opened(name: str, server: Served, *, web: bool = False) -> actshard.Store:
    shutil.copytree(GOLDEN / name, server.root / "bucket/run")
    if web:
        return actshard.open(server.web("bucket/run"), format="zarr")
    return actshard.open("s3://bucket/run", storage_options=server.options)


@pytest.mark.parametrize("name", ZARR)
@pytest.mark.parametrize("web", [False, True])
def test_an_array_that_vanishes_has_no_fill_values(name: str, server: Served, web: bool) -> None:
    far = opened(name, server, web=web)
    shutil.rmtree(server.root / "bucket/run")
    with pytest.raises(actshard.ActshardError, match="found nothing|is gone"):
        far.sequence(0, far.layers[0])


@pytest.mark.parametrize("name", ZARR)
@pytest.mark.parametrize("web", [False, True])
def test_a_404_of_a_proxy_is_no_fill_value(name: str, server: Served, web: bool) -> None:
    far = opened(name, server, web=web)
    server.failing[""] = [404]
    near = actshard.open(GOLDEN / name)
    found = far.sequence(0, far.layers[0])
    assert not server.failing[""]
    assert found.tobytes() == near.sequence(0, near.layers[0]).tobytes()


@pytest.mark.parametrize("web", [False, True])
def test_a_server_that_denies_everything_is_an_error(server: Served, web: bool) -> None:
    far = opened(ZARR[0], server, web=web)
    server.failing[""] = [404] * 1000
    with pytest.raises(actshard.ActshardError, match=r"404"):
        far.sequence(0, far.layers[0])
    server.failing.clear()
    near = actshard.open(GOLDEN / ZARR[0])
    assert far.sequence(0, far.layers[0]).tobytes() == near.sequence(0, near.layers[0]).tobytes()
