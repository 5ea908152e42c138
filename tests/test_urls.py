"""Datasets behind URLs: the same rows, tables and streams as local ones, few requests, and errors in one line."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.location import Location
from conftest import GOLDEN
from served import Served, served
from zarr_files import change

DATASETS = {
    "saev": ["saev/v21_cls_labels_multishard/saev/shards/*", "saev/v20_late_names/**/metadata.json"],
    "pickle": ["pickle/numpy2_proto5", "pickle/ragged_layers_machine3"],
    "zarr": [
        "zarr/single_minimal/activations.zarr",
        "zarr/v3_sharded/activations.zarr",
        "zarr/separator_slash/**/.zgroup",
    ],
    "lmprobe": ["lmprobe/fullseq_bf16/**/index"],
}


def places() -> list[Any]:
    found = []
    for name, patterns in DATASETS.items():
        for pattern in patterns:
            path = sorted(GOLDEN.glob(pattern))[0]
            path = path.parent if path.is_file() or path.name == "index" else path
            found.append(pytest.param(path, id=f"{name}-{path.relative_to(GOLDEN).parts[1]}"))
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def quietly(*args: Any, **more: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(*args, **more)


def same(far: actshard.Store, near: actshard.Store) -> None:
    """Asserts that two stores hold the same."""
    assert (len(far), far.layers, far.d_model, far.dtype) == (len(near), near.layers, near.d_model, near.dtype)
    assert np.array_equal(far.token_counts, near.token_counts)
    for layer in near.layers:
        for e in range(len(near)):
            try:
                near.sequence(e, layer)
            except actshard.NotStoredError:
                continue
            a, b = far.sequence(e, layer), near.sequence(e, layer)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
    if near.table.num_columns:
        assert far.table.equals(near.table)


@pytest.mark.parametrize("folder", places())
def test_a_bucket_holds_what_the_folder_holds(folder: Path, server: Served) -> None:
    shutil.copytree(folder, server.root / "bucket/run" / folder.name)
    near = quietly(server.root / "bucket/run" / folder.name)
    far = quietly(f"s3://bucket/run/{folder.name}", storage_options=server.options)
    same(far, near)
    for shuffle in ("window", "exact", None):
        wanted = [b.activations for b in near.stream(near.layers[0], 7, shuffle=shuffle)]
        found = [b.activations for b in far.stream(far.layers[0], 7, shuffle=shuffle)]
        if shuffle == "exact":
            assert [a.tobytes() for a in found] == [a.tobytes() for a in wanted]
        else:
            assert sorted(row.tobytes() for a in found for row in a) == sorted(
                row.tobytes() for a in wanted for row in a
            )
    again = pickle.loads(pickle.dumps(far))
    before = len(server.requests)
    assert again.sequence(0, again.layers[0]).tobytes() == near.sequence(0, near.layers[0]).tobytes()
    assert not any("list-type" in query for _, _, query in server.requests[before:]), "a copy lists nothing"


@pytest.mark.parametrize("folder", [p for p in places() if p.id.startswith("saev")])
def test_a_web_server_without_listing_holds_what_the_folder_holds(folder: Path, server: Served) -> None:
    shutil.copytree(folder, server.root / "run" / folder.name)
    same(quietly(server.web(f"run/{folder.name}")), quietly(server.root / "run" / folder.name))


def test_opening_saev_takes_three_requests(server: Served) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    quietly(f"s3://bucket/{folder.name}", storage_options=server.options)
    assert len(server.requests) <= 3, server.requests


def test_an_object_that_changes_is_an_error_before_a_row(server: Served) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    far = quietly(f"s3://bucket/{folder.name}", storage_options=server.options)
    shard = server.root / "bucket" / folder.name / "acts000000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(actshard.FormatError, match=r"^s3://bucket/.*acts000000\.bin: was replaced after it was opened"):
        far.sequence(0, far.layers[0])


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(server: Served) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    server.failing["acts000000.bin"] = [503, 500]
    far = quietly(f"s3://bucket/{folder.name}", storage_options=server.options)
    far.sequence(0, far.layers[0])
    assert not server.failing["acts000000.bin"]
    server.failing["acts000001.bin"] = [403] * 50
    with pytest.raises(actshard.FileAccessError, match=r"s3://bucket/.*acts000001\.bin.*403"):
        far.sequences(range(len(far)), far.layers[0])


def test_what_is_not_there_and_what_is_not_known_are_told(server: Served) -> None:
    (server.root / "bucket").mkdir()
    with pytest.raises(actshard.MissingFileError, match=r"^s3://bucket/none: expected a dataset, found nothing"):
        actshard.open("s3://bucket/none", storage_options=server.options)
    with pytest.raises(actshard.ArgumentError, match="regoin"):
        actshard.open("s3://bucket/none", storage_options={"regoin": "x"})
    with pytest.raises(actshard.ArgumentError, match="expected a URL"):
        actshard.open(server.root, storage_options={"region": "x"})


def test_secrets_are_in_no_text(server: Served) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    options = {
        "endpoint_url": f"http://127.0.0.1:{server.port}",
        "key": "AKIAPUBLIC",
        "secret": "hushhush",
        "region": "x",
    }
    far = quietly(f"s3://bucket/{folder.name}", storage_options=options)
    said = [repr(far), str(far), str(far.path), repr(far.path)]
    server.failing["acts000000.bin"] = [403] * 50
    with pytest.raises(actshard.ActshardError) as caught:
        far.sequence(0, far.layers[0])
    said += [str(caught.value), repr(caught.value)]
    assert not any("hushhush" in text for text in said), said


def test_a_second_reading_comes_from_the_cache_on_disk(server: Served, tmp_path: Path) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    near = quietly(folder)
    url, options = f"s3://bucket/{folder.name}", {"storage_options": server.options, "cache": tmp_path / "cache"}
    for turn in range(2):
        far = quietly(url, **options)
        before = len(server.requests)
        same(far, near)
        read = [path for _, path, _ in server.requests[before:] if path.endswith(".bin")]
        assert bool(read) == (turn == 0), read
    for file in (tmp_path / "cache").rglob("data"):
        file.write_bytes(bytes(file.stat().st_size))
    same(quietly(url, **options), near)
    again = pickle.loads(pickle.dumps(quietly(url, **options)))
    same(again, near)
    with pytest.raises(actshard.ArgumentError, match="at least"):
        quietly(url, storage_options=server.options, cache="1MiB")


def test_a_remote_dataset_is_converted_to_a_local_one(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    for name, value in {
        "ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "SKIP_SIGNATURE": "true",
        "REGION": "x",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actshard.convert(f"s3://bucket/{folder.name}", tmp_path / "made.zarr", "zarr")
    near, made = quietly(folder), quietly(tmp_path / "made.zarr")
    for layer in near.layers:
        for e in range(len(near)):
            assert made.sequence(e, layer).tobytes() == near.sequence(e, layer).tobytes()


@pytest.mark.slow
def test_children_read_what_the_parent_has_open(server: Served) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    near = quietly(folder)
    far = quietly(f"s3://bucket/{folder.name}", storage_options=server.options)
    layer = near.layers[0]
    wanted = [near.sequence(e, layer).tobytes() for e in range(len(near))]
    assert far.sequence(0, layer).tobytes() == wanted[0]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            jobs = [pool.apply_async(_read, (pickle.dumps(far), layer, e)) for e in range(len(near))]
            assert [job.get(60) for job in jobs] == wanted
    child = os.fork()  # not pickled: the parent's own store
    if child == 0:
        os._exit(0 if far.sequence(1, layer).tobytes() == wanted[1] else 1)
    assert os.waitpid(child, 0)[1] == 0


def _read(pickled: bytes, layer: int, example: int) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.loads(pickled).sequence(example, layer).tobytes()


def test_an_interrupt_ends_the_retries(server: Served) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    far = quietly(f"s3://bucket/{folder.name}", storage_options=server.options)
    server.failing["acts000000.bin"] = [503] * 50
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        far.sequence(0, far.layers[0])
    server.failing.clear()
    assert far.sequence(0, far.layers[0]).shape


def test_options_precede_the_environment(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(folder, server.root / "bucket" / folder.name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    same(quietly(f"s3://bucket/{folder.name}", storage_options=server.options), quietly(folder))


def test_two_servers_share_a_cache_and_no_rows(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("served._tag", lambda data: '"v1"')
    folder = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    with served(tmp_path / "other") as other:
        for root in (server.root, other.root):
            shutil.copytree(folder, root / "bucket" / folder.name)
        shard = other.root / "bucket" / folder.name / "acts000000.bin"
        shard.write_bytes(bytes(shard.stat().st_size))
        for there in (server, other):
            far = quietly(f"s3://bucket/{folder.name}", storage_options=there.options, cache=tmp_path / "cache")
            near = quietly(there.root / "bucket" / folder.name)
            assert far.sequence(0, far.layers[0]).tobytes() == near.sequence(0, near.layers[0]).tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint_url": "localhost:9000"},
        {"endpoint_url": "http://ho st:1"},
        {"secret": "hushhush\n"},
        {"anon": "nonsense"},
        {"region": ""},
    ],
)
def test_options_that_cannot_be_used_are_refused_without_their_values(options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(actshard.ArgumentError, match=name) as caught:
        actshard.open("s3://bucket/x", storage_options=options)
    assert "hushhush" not in str(caught.value)


DENIED = (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
SAEV = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
INDEX = sorted(GOLDEN.glob("lmprobe/fullseq_bf16/**/index/*.parquet"))[0]


@pytest.mark.parametrize("format", [None, "saev"])
@pytest.mark.parametrize("absent", [DENIED, (200, b"<!doctype html><html>hello</html>")])
def test_servers_that_refuse_or_invent_names_hold_what_the_folder_holds(
    format: str | None, absent: tuple[int, bytes], server: Served
) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    server.absent, server.is_listed = absent, False
    same(quietly(server.web(f"bucket/{SAEV.name}"), format), quietly(SAEV))
    if absent is DENIED:
        same(quietly(f"s3://bucket/{SAEV.name}", format, storage_options=server.options), quietly(SAEV))


def test_a_refusal_of_what_must_be_there_names_the_credentials(server: Served) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    server.absent, server.is_listed = DENIED, False
    far = quietly(f"s3://bucket/{SAEV.name}", storage_options=server.options)
    server.failing["acts000000.bin"] = [403] * 50
    with pytest.raises(actshard.FileAccessError, match=r"acts000000\.bin: .*403.*\(used: anonymous access\)"):
        far.sequence(0, far.layers[0])
    for url, options in (("s3://bucket/none", server.options), (server.web("none"), None)):
        for format in (None, "saev"):
            with pytest.raises(actshard.FileAccessError, match=r"403.*\(used: (anonymous access|no token)\)"):
                actshard.open(url, format, storage_options=options)


def test_a_refused_chunk_is_no_fill_value(server: Served) -> None:
    folder = GOLDEN / "zarr/single_minimal/activations.zarr"
    shutil.copytree(folder, server.root / "bucket/run.zarr")
    far = quietly("s3://bucket/run.zarr", storage_options=server.options)
    for chunk in (server.root / "bucket/run.zarr/arrays/activations").iterdir():
        server.failing[chunk.name] = [403] * 50
    with pytest.raises(actshard.FileAccessError, match="403"):
        far.sequence(0, far.layers[0])


CONSOLIDATED = GOLDEN / "zarr/single_consolidated/activations.zarr"


def unlisted(server: Served, path: Path, kind: str) -> tuple[str, dict[str, str] | None]:
    """A dataset on a server that does not list names."""
    shutil.copytree(path, server.root / "bucket/run.zarr")
    if kind == "web":
        return server.web("bucket/run.zarr"), None
    server.is_listed = False
    return "s3://bucket/run.zarr", server.options


@pytest.mark.parametrize("format", [None, "zarr"])
@pytest.mark.parametrize("kind", ["web", "bucket"])
def test_consolidated_zarr_opens_where_names_are_not_listed(kind: str, format: str | None, server: Served) -> None:
    url, options = unlisted(server, CONSOLIDATED, kind)
    far = quietly(url, format, storage_options=options)
    same(far, quietly(CONSOLIDATED))
    assert far.info()["bytes"] == quietly(CONSOLIDATED).info()["bytes"]
    assert "not-listed" in [warning.code for warning in far.warnings]
    # One 404 of a proxy makes no fill value, and a refusal is none at all.
    small = next(p for p in (server.root / "bucket/run.zarr/arrays/seq_len").iterdir() if p.name[0] != ".")
    server.failing[f"seq_len/{small.name}"] = [404]
    same(quietly(url, format, storage_options=options), quietly(CONSOLIDATED))
    server.failing[f"seq_len/{small.name}"] = [403] * 50
    with pytest.raises(actshard.FileAccessError, match=r"seq_len.*403"):
        quietly(url, format, storage_options=options)


@pytest.mark.parametrize("kind", ["web", "bucket"])
def test_zarr_whose_names_are_not_known_is_refused(kind: str, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = unlisted(server, GOLDEN / "zarr/single_minimal/activations.zarr", kind)
    with pytest.raises(actshard.UnsupportedError, match=r"run\.zarr/arrays: .*list.*local folder"):
        quietly(url, "zarr", storage_options=options)
    shutil.rmtree(server.root / "bucket/run.zarr")
    monkeypatch.setattr("actshard.formats.zarr.meta._ASKED_FOR", 0)
    url, options = unlisted(server, CONSOLIDATED, kind)
    with pytest.raises(actshard.UnsupportedError, match=r"run\.zarr/arrays/seq_len: .*list.*local folder"):
        quietly(url, "zarr", storage_options=options)


def test_names_that_cannot_be_listed_are_not_told_as_none(server: Served) -> None:
    url, _ = unlisted(server, CONSOLIDATED, "web")
    root = Location.of_any(url)
    for place in (root, root / "arrays", root / "nothing"):
        for look in (place.entries, lambda place=place: place.count(1), lambda place=place: list(place.files())):
            with pytest.raises(actshard.UnsupportedError, match="web server cannot list"):
                look()
    with pytest.raises(actshard.NotAFileError):
        (root / ".zgroup").entries()


def test_a_list_of_urls_is_one_dataset(server: Served) -> None:
    rng = np.random.default_rng(0)
    local = [server.root / f"bucket/run/machine_{m}" for m in range(2)]
    for m, path in enumerate(local):
        with actshard.create(path, "pickle", layers=[1], d_model=8, machine_id=m, total_machines=2) as writer:
            writer.append(rng.normal(size=(3, 1, 5, 8)).astype("f4"))
    urls = [f"s3://bucket/run/machine_{m}" for m in range(2)]
    far = quietly(urls, storage_options=server.options)
    same(far, quietly(local))
    assert str(far.path) == "s3://bucket/run"
    again = pickle.loads(pickle.dumps(far))
    same(again, far)
    with pytest.raises(actshard.ArgumentError, match="twice"):
        actshard.open([urls[0], urls[0]], storage_options=server.options)
    with pytest.raises(actshard.FileAccessError, match="cannot connect"):
        actshard.open([server.web("bucket/run/machine_1"), "http://127.0.0.1:1/x"])


def test_stores_of_one_url_are_equal(server: Served) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    far, twin = (quietly(f"s3://bucket/{SAEV.name}", storage_options=server.options) for _ in range(2))
    again = pickle.loads(pickle.dumps(far))
    assert far.path == twin.path == again.path
    assert len({far.path, twin.path, again.path}) == 1
    other = Location.of_any(f"s3://bucket/{SAEV.name}", server.options | {"region": "eu-west-1"})
    assert far.path != other


def test_an_index_file_is_its_dataset_in_few_requests(server: Served) -> None:
    dataset = INDEX.parent.parent
    shutil.copytree(dataset, server.root / "bucket/lm")
    near = quietly(dataset)
    url = f"bucket/lm/index/{INDEX.name}"
    same(quietly(server.web(url)), near)
    server.requests.clear()
    far = quietly(f"s3://{url}", storage_options=server.options)
    assert len(server.requests) <= 6, "\n".join(map(str, server.requests))
    same(far, near)


def test_options_of_none_are_not_given_and_names_are_no_sizes(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    monkeypatch.chdir(tmp_path)
    quietly(f"s3://bucket/{SAEV.name}", storage_options=server.options | {"profile": None}, cache="2026cache")
    assert (tmp_path / "2026cache").is_dir()
    with pytest.raises(actshard.ArgumentError, match="cache"):
        quietly(f"s3://bucket/{SAEV.name}", storage_options=server.options, cache="50QiB")


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        pytest.param(SAEV, 3, id="saev"),
        pytest.param(INDEX.parent.parent, 4, id="lmprobe"),
        pytest.param(GOLDEN / "zarr/single_consolidated/activations.zarr", None, id="zarr"),
    ],
)
def test_opening_takes_few_requests_and_copies_take_none(folder: Path, most: int | None, server: Served) -> None:
    name = f"data{folder.suffix}"
    shutil.copytree(folder, server.root / "bucket" / name)
    if most is None:
        most = len(list(folder.glob("arrays/*/.zarray"))) - 1 + 3  # small arrays, and three more
    far = quietly(f"s3://bucket/{name}", storage_options=server.options)
    assert len(server.requests) <= most, "\n".join(map(str, server.requests))
    server.requests.clear()
    again = pickle.loads(pickle.dumps(far))
    assert not server.requests, "\n".join(map(str, server.requests))
    assert len(again) == len(far)


def test_a_table_of_zarr_takes_a_request_a_file(server: Served) -> None:
    shutil.copytree(CONSOLIDATED, server.root / "bucket/run.zarr")
    far = quietly("s3://bucket/run.zarr", storage_options=server.options)
    server.requests.clear()
    assert far.table.equals(quietly(CONSOLIDATED).table)
    files = [path for _, path, query in server.requests if "list-type" not in query]
    assert len(files) == len(set(files))
    assert len(server.requests) - len(files) <= 1, "arrays/ is listed, for arrays that consolidated metadata lack"


def test_zarr_without_consolidated_metadata_opens_in_few_requests(server: Served) -> None:
    for name, most in (("single_minimal", 6), ("v3_sharded", 5)):
        shutil.copytree(GOLDEN / "zarr" / name / "activations.zarr", server.root / "bucket" / name)
        server.requests.clear()
        quietly(f"s3://bucket/{name}", storage_options=server.options)
        assert len(server.requests) <= most, "\n".join(map(str, server.requests))
        assert not any("activations%2F&" in query for _, _, query in server.requests), "chunks are not listed"


def test_consolidated_metadata_that_are_out_of_date_are_not_used(server: Served) -> None:
    copy = server.root / "bucket/run.zarr"
    shutil.copytree(CONSOLIDATED, copy)
    change(copy / ".zmetadata", lambda all: all["metadata"]["arrays/activations/.zarray"].update(dtype="<i2"))
    change(copy / ".zmetadata", lambda all: all["metadata"]["arrays/split/.zarray"].update(fill_value=3))
    change(copy / ".zattrs", lambda attributes: attributes.update(model_id="another"))
    far, near = quietly("s3://bucket/run.zarr", storage_options=server.options), quietly(copy)
    same(far, near)
    assert far.info()["model"] == near.info()["model"] == "another"
    assert [str(warning) for warning in far.warnings] == [str(warning) for warning in near.warnings]


def test_small_chunks_are_absent_only_beside_their_metadata(server: Served) -> None:
    copy = server.root / "bucket/run.zarr"
    shutil.copytree(CONSOLIDATED, copy)
    url, options = "s3://bucket/run.zarr", server.options
    (copy / "arrays/split/0").unlink()
    assert quietly(url, storage_options=options).table.equals(quietly(copy).table)
    for refusal in (403, 500):
        server.failing["arrays/split/0"] = [refusal] * 50
        with pytest.raises(actshard.FileAccessError, match=str(refusal)):
            _ = quietly(url, storage_options=options | {"max_retries": 1}).table
    server.failing.clear()
    far = quietly(url, storage_options=options)
    assert "split" in far.contents.column_names
    shutil.rmtree(copy)
    with pytest.raises(actshard.ActshardError, match=r"run\.zarr"):
        _ = far.table


def test_a_copy_whose_cache_cannot_be_used_says_so(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    cache = tmp_path / "cache"
    far = quietly(f"s3://bucket/{SAEV.name}", storage_options=server.options, cache=cache)
    state = pickle.dumps(far)
    shutil.rmtree(cache)
    cache.write_text("not a folder")
    with pytest.warns(actshard.ActshardWarning, match="cache: ") as caught:
        again = pickle.loads(state)
    assert [warning.message.code for warning in caught] == ["disk-cache"]  # type: ignore[union-attr]
    same(again, quietly(SAEV))


@pytest.mark.parametrize("status", [503, 401])
def test_a_server_that_fails_is_told_in_one_line_and_not_asked_by_each_format(status: int, server: Served) -> None:
    server.absent = (status, b"")
    with pytest.raises(actshard.FileAccessError, match=rf"^http.*{status}") as caught:
        actshard.open(server.web("run"), storage_options={"max_retries": 1})
    assert len(server.requests) <= 2
    assert len(str(caught.value)) < 300
    with pytest.raises(actshard.FileAccessError, match=r"^http://127\.0\.0\.1:1/run.*connect"):
        actshard.open("http://127.0.0.1:1/run", storage_options={"max_retries": 0})


def test_what_needs_a_listing_is_told_so_and_not_as_missing(server: Served) -> None:
    shutil.copytree(INDEX.parent.parent, server.root / "lm")
    with pytest.raises(actshard.UnsupportedError, match=r"lm/index: .*URL of the index file"):
        actshard.open(server.web("lm"), "lmprobe")
    with pytest.raises(actshard.UnknownFormatError, match="URL of the index file"):
        actshard.open(server.web("lm"))
    run = GOLDEN / "zarr/run_20260122_101112"
    shutil.copytree(run, server.root / "run")
    same(quietly(server.web("run"), "zarr"), quietly(run))
    (server.root / "run/shards/shard-0000.zarr/.zmetadata").unlink()
    with pytest.raises(actshard.UnsupportedError, match=r"shard-0000\.zarr/arrays: .*list"):
        actshard.open(server.web("run"), "zarr")
    shutil.copytree(run / "shards", server.root / "above/shards")
    with pytest.raises(actshard.UnsupportedError, match=r"above: .*names cannot be listed.*URL"):
        actshard.open(server.web("above"), "zarr")


def test_a_refused_file_of_rows_is_not_taken_as_left_out(server: Served) -> None:
    shutil.copytree(GOLDEN / "hallulens_v1/full_capture/capture", server.root / "bucket/run")
    server.is_listed, server.absent = False, DENIED
    server.failing["prompt_activations.npy"] = [403] * 50
    with pytest.raises(actshard.FileAccessError, match=r"prompt_activations\.npy: .*403"):
        quietly("s3://bucket/run", storage_options=server.options)


@pytest.mark.parametrize("path", [SAEV, CONSOLIDATED], ids=["saev", "zarr"])
def test_a_server_that_answers_every_name_with_json_is_recognised_by_content(path: Path, server: Served) -> None:
    shutil.copytree(path, server.root / "run")
    server.absent = (200, b'{"error": "not found"}')
    near = quietly(path)
    read: Any = None
    with contextlib.suppress(actshard.ActshardError):  # refused, rather than something else read
        far = quietly(server.web("run"))
        read = [far.sequence(e, layer).tobytes() for layer in far.layers for e in range(len(far))]
    assert read in (
        None if path == CONSOLIDATED else [],
        [near.sequence(e, layer).tobytes() for layer in near.layers for e in range(len(near))],
    )


HALLULENS = GOLDEN / "hallulens_v1/full_capture/capture"


@pytest.mark.parametrize("name", ["prompt_activations.npy", "response_activations.npy"])
def test_a_file_of_rows_that_is_refused_is_not_taken_as_absent(name: str, server: Served) -> None:
    shutil.copytree(HALLULENS, server.root / "bucket/run")
    server.is_listed, near = False, quietly(HALLULENS)
    far = quietly("s3://bucket/run", "hallulens", storage_options=server.options)
    assert [far.sequence(0, far.layers[0]).tobytes()] == [near.sequence(0, near.layers[0]).tobytes()]
    server.failing[name] = [403]
    with pytest.raises(actshard.FileAccessError, match=f"{name}.*403"):
        quietly("s3://bucket/run", "hallulens", storage_options=server.options)
    server.failing.clear()
    server.absent = (404, b"<html>a proxy</html>")
    server.failing[name] = [404]
    far = quietly(server.web("bucket/run"), "hallulens")
    assert list(far.token_counts) == list(near.token_counts)


def test_optional_files_that_are_refused_are_named(server: Served) -> None:
    path = sorted(GOLDEN.glob("saev/v21_cls_labels_multishard/saev/shards/*"))[0]
    shutil.copytree(path, server.root / "bucket/run")
    server.is_listed = False
    server.failing["labels.bin"] = [403] * 9
    far = quietly("s3://bucket/run", "saev", storage_options=server.options)
    assert far.labels is None
    assert [str(warning) for warning in far.warnings if "labels.bin" in warning and warning.code == "not-listed"]


def test_a_chunk_far_longer_than_its_array_is_refused_by_its_size(server: Served) -> None:
    shutil.copytree(CONSOLIDATED, server.root / "bucket/run")
    with (server.root / "bucket/run/arrays/seq_len/0").open("wb") as file:
        file.truncate(64 << 20)
    with pytest.raises(actshard.FormatError, match=r"seq_len/0.*found 67108864"):
        list(quietly("s3://bucket/run", storage_options=server.options).token_counts)
    # Of at most 4 MiB each.
    assert sum("seq_len/0" in path for _, path, _ in server.requests) <= 4


ONE_SHARD = next((GOLDEN / "saev/v21_nocls_oneshard/saev/shards").iterdir())


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        pytest.param(ONE_SHARD, 13, id="saev"),
        pytest.param(SAEV, 15, id="saev-four-shards-and-labels"),
        pytest.param(GOLDEN / "pickle/numpy2_proto5", 7, id="pickle"),
    ],
)
def test_a_web_server_is_asked_once_for_each_name_of_the_formats(folder: Path, most: int, server: Served) -> None:
    shutil.copytree(folder, server.root / "run")
    far = quietly(server.web("run"))
    assert len(server.requests) <= most, "\n".join(map(str, server.requests))
    # A request for one byte of a known file shows that a 404 in between was true.
    asked = [Path(path).name for _, path, range_ in server.requests if range_ != "bytes=0-0"]
    signs = actshard.formats.signs(actshard.formats.names())
    assert sorted(name for name in asked if name in signs) == signs
    same(far, quietly(folder))


def test_formats_with_rare_names_are_recognised_on_a_web_server(server: Served) -> None:
    shutil.copytree(HALLULENS, server.root / "run")
    far, near = quietly(server.web("run")), quietly(HALLULENS)
    assert far.format == near.format
    assert np.array_equal(far.sequence(0, far.layers[0]), near.sequence(0, near.layers[0]))
    asked = [Path(path).name for path in server.since(0)]
    signs, rare = (actshard.formats.signs(actshard.formats.names(), rare=rare) for rare in (False, True))
    assert max(map(asked.index, signs)) < min(map(asked.index, rare)), "asked for only after the others"


def test_a_url_of_nothing_and_of_a_file_is_named(server: Served) -> None:
    np.save(server.root / "rows.npy", np.zeros((2, 3)))
    (server.root / "page.html").write_bytes(b"<html></html>" + b" " * 600)
    for name, text in (
        (
            "none",
            r"found nothing at this URL \(404\), and no files of a dataset below it that need no listing: check the URL",
        ),
        (
            "rows.npy",
            "found a file of a web server, a numpy array: download it, or give the URL of the folder of a dataset",
        ),
        ("page.html", "found a web page at this URL, and no files of a dataset below it .*cannot list the names"),
    ):
        with pytest.raises(actshard.UnknownFormatError, match=text):
            actshard.open(server.web(name))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((410, b"gone"), r"found nothing at this URL: it was removed \(410\), and no files of a dataset below it"),
        ((200, b"<!doctype html><html></html>"), "found a web page at this URL, and no files of a dataset below it"),
        ((200, b""), "found a file of a web server, without any bytes: "),
        ((451, b"no"), "cannot read: 451: no"),
        ((400, b"bad name"), "cannot read: 400: bad name"),
    ],
    ids=["410", "page", "empty", "451", "400"],
)
def test_an_answer_to_a_url_is_named_as_it_is(answer: tuple[int, bytes], text: str, server: Served) -> None:
    server.absent = answer
    with pytest.raises(actshard.ActshardError, match=text) as caught:
        actshard.open(server.web("run"))
    assert "404" not in str(caught.value)
    assert "layout.toml" not in str(caught.value)
