"""Every golden dataset of every format, behind every kind of URL, with default options: the same values as in the folder."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from azure import Azure, azure
from conftest import GOLDEN, SAEV, saev_dump
from hub import Hub, hub
from served import Served, served
from test_urls import quietly

DATASETS = [saev_dump(variant) for variant in SAEV]
for kinds in ("lmprobe", "pickle", "zarr", "zarr_codecs", "hallulens_v1"):
    DATASETS += [path for path in sorted((GOLDEN / kinds).iterdir()) if path.is_dir() and path.name != "hostile"]
DATASETS = [
    next((path / name for name in ("activations.zarr", "capture") if (path / name).exists()), path) for path in DATASETS
]
DATASETS += [GOLDEN / "hf_arrow/hub_array2d_ragged_f32/dataset", GOLDEN / "hf_arrow/saelens_f16_shuffled/cache"]
SCHEMES = ("s3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gs", "az", "https", "hf")))
NUMBERS = itertools.count()


def opened(path: str | Path, **options: Any) -> actshard.Store | type[Exception]:
    """The store, or the error that local folders give as well."""
    try:
        return quietly(path, **options)
    except (actshard.ActshardError, actshard.MissingExtraError) as error:
        return type(error)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the servers: one for all tests, each of which has its own bucket."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with served(root) as running:
        yield running


@pytest.fixture(scope="module")
def account(root: Path) -> Iterator[Azure]:
    with azure(root) as running:
        yield running


@pytest.fixture(scope="module")
def lab() -> Iterator[Hub]:
    with hub() as running:
        yield running


@pytest.fixture
def place(request: pytest.FixtureRequest, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts a folder behind a URL: a function that returns the URL and storage_options."""
    scheme, bucket = request.param, f"bucket-{next(NUMBERS)}"

    def copy(folder: Path) -> str:
        shutil.copytree(folder, root / bucket / "run" / folder.name)
        return f"{bucket}/run/{folder.name}"

    def put_on_the_hub(folder: Path) -> tuple[str, Any]:
        lab: Hub = request.getfixturevalue("lab")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no token of whoever runs the tests
        monkeypatch.setenv("HF_ENDPOINT", lab.url)
        copy(folder)
        lab.repositories.clear()
        lab.add(f"lab/{bucket}", root / bucket)
        return f"hf://datasets/lab/{bucket}/run/{folder.name}", None

    def put(folder: Path) -> tuple[str, Any]:
        if scheme == "hf":
            return put_on_the_hub(folder)
        if scheme == "az":
            return f"az://{copy(folder)}", request.getfixturevalue("account").options
        server: Served = request.getfixturevalue("server")
        if scheme == "https":
            return server.web(copy(folder)), None
        google = {"google_base_url": server.web("").rstrip("/"), "google_skip_signature": True}
        return f"{scheme}://{copy(folder)}", server.options if scheme == "s3" else google

    yield put
    shutil.rmtree(root / bucket)


def either(read: Any) -> Any:
    """What a call returns, or the kind of its error."""
    try:
        return read()
    except actshard.ActshardError as error:
        return type(error)


def same_bytes(far: Any, near: Any) -> None:
    if isinstance(near, type) or near is None:
        assert far is near
    elif isinstance(near, tuple | list):
        assert len(far) == len(near)
        for one, other in zip(far, near, strict=True):
            same_bytes(one, other)
    else:
        assert (far.dtype, far.shape) == (near.dtype, near.shape)
        assert far.tobytes() == near.tobytes()


def same_values(far: actshard.Store, near: actshard.Store) -> None:
    assert (far.format, len(far), far.layers, far.d_model, far.dtype) == (
        near.format,
        len(near),
        near.layers,
        near.d_model,
        near.dtype,
    )
    assert far.table.schema == near.table.schema
    assert repr(far.table.to_pydict()) == repr(near.table.to_pydict())  # NaN differs from itself
    same_bytes(far.labels, near.labels)
    same_bytes(either(far.logits), either(near.logits))
    same_bytes(either(lambda: far.token_counts), either(lambda: near.token_counts))
    rng = np.random.default_rng(0)
    examples = rng.integers(0, max(len(near), 1), 20)
    for layer in near.layers:
        same_bytes(either(lambda la=layer: far.router(la)), either(lambda la=layer: near.router(la)))
        for e in range(len(near)):
            same_bytes(
                either(lambda e=e, la=layer: far.sequence(e, la)), either(lambda e=e, la=layer: near.sequence(e, la))
            )
        for tokens in (0, -1):
            read = [either(lambda s=s, la=layer, t=tokens: s.gather(la, examples, t)) for s in (far, near)]
            same_bytes(*read)
    if not near.layers:
        return
    for shuffle in (None, "exact", "window"):
        streams = [either(lambda s=s, k=shuffle: batches(s, k)) for s in (far, near)]
        if isinstance(streams[1], type) or shuffle != "window":
            same_bytes(*streams)
        else:  # windows are cut otherwise for remote stores
            rows = [sorted(row.tobytes() for batch in made for row in batch) for made in streams]
            assert rows[0] == rows[1]


def batches(store: actshard.Store, shuffle: Any) -> list[Any]:
    return [batch.activations for batch in store.stream(store.layers[-1], 7, shuffle=shuffle)]


def needs_listing(folder: Path) -> bool:
    """Whether a web server, which cannot list names, is refused: names of the dataset's files follow from no other file."""
    kind, newer = folder.relative_to(GOLDEN).parts[0], folder / "zarr.json"
    consolidated = newer.exists() and "consolidated_metadata" in newer.read_text()
    consolidated |= (folder / ".zmetadata").exists() or (folder / "manifest.json").exists()
    return kind.startswith("zarr") and not consolidated


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", SCHEMES, indirect=True)
@pytest.mark.parametrize("folder", DATASETS, ids=[str(path.relative_to(GOLDEN))[:45] for path in DATASETS])
def test_values_are_those_of_the_folder(folder: Path, place: Any, request: pytest.FixtureRequest) -> None:
    near = opened(folder)
    url, options = place(folder)
    index = sorted(folder.glob("index/*.parquet"))
    if url.startswith("http") and index:
        url += f"/index/{index[0].name}"
    far = opened(url, storage_options=options)
    if url.startswith("http") and needs_listing(folder):
        assert far in (actshard.UnsupportedError, actshard.UnknownFormatError, near)
    elif isinstance(near, type):
        assert far is near
    else:
        assert isinstance(far, actshard.Store), far
        same_values(far, near)
