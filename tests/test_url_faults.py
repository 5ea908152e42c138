"""Datasets behind URLs whose servers fail: an error, or the right rows, and never fill values for what is there."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actshard
from conftest import GOLDEN
from served import Served, served

ZARR = ["zarr/single_minimal/activations.zarr", "zarr/v3_sharded/activations.zarr"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def opened(name: str, server: Served) -> actshard.Store:
    shutil.copytree(GOLDEN / name, server.root / "bucket/run")
    return quietly("s3://bucket/run", storage_options=server.options)


def quietly(*args: Any, **more: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(*args, **more)


def is_right_or_refused(far: actshard.Store, name: str) -> bool:
    """Reads rows; true if they are right, false if they are refused."""
    near = quietly(GOLDEN / name)
    try:
        found = far.sequence(0, far.layers[0])
    except actshard.ActshardError as error:
        assert "found nothing" in str(error) or "is gone" in str(error) or "404" in str(error)  # noqa: PT017 -- or none
        return False
    assert found.tobytes() == near.sequence(0, near.layers[0]).tobytes()
    return True


@pytest.mark.parametrize("name", ZARR)
def test_an_array_that_vanishes_has_no_fill_values(name: str, server: Served) -> None:
    far = opened(name, server)
    shutil.rmtree(server.root / "bucket/run")
    assert not is_right_or_refused(far, name)


@pytest.mark.parametrize("name", ZARR)
def test_a_404_of_a_proxy_is_no_fill_value(name: str, server: Served) -> None:
    far = opened(name, server)
    server.failing[""] = [404]
    assert is_right_or_refused(far, name)


def test_a_server_that_denies_everything_is_an_error(server: Served) -> None:
    far = opened(ZARR[0], server)
    server.failing[""] = [404] * 1000
    assert not is_right_or_refused(far, ZARR[0])
    server.failing.clear()
    assert is_right_or_refused(far, ZARR[0])
