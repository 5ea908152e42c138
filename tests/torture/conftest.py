"""Fixtures of the machines that look for faults."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Machines make folders themselves: here they are among pytest's own, which it removes."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("machines"))
    yield
    tempfile.tempdir = before
