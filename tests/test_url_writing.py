"""Conversions and writers whose target is a URL: by way of a private scratch folder, continued, and named by the URL."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats
from conftest import GOLDEN
from served import Served, served
from test_pushing import SAEV
from test_urls import quietly, same
from waiting import PATIENCE

PLAIN = [name for name in formats.written() if not formats.get(name).target().needs_columns]
"""Formats that store rows without columns."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "web/bucket").mkdir(parents=True)
    with served(tmp_path / "web") as found:
        yield found


@pytest.mark.parametrize("format", PLAIN)
def test_a_conversion_goes_to_a_url(server: Served, tmp_path: Path, format: str) -> None:
    near = GOLDEN / "pickle/numpy2_proto5"
    options = {"target_options": server.keys, "scratch": tmp_path / "scratch"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = actshard.convert(SAEV, tmp_path / "local", format)
        server.written.refuse = (lambda method, query: method == "PUT", 403)
        with pytest.raises(actshard.FileAccessError, match="403"):
            actshard.convert(SAEV, "s3://bucket/run", format, **options)
        assert list((tmp_path / "scratch").iterdir())
        server.written.refuse = None
        done = actshard.convert(SAEV, "s3://bucket/run", format, resume=True, **options)
    assert str(done.path).startswith("s3://bucket/run")
    assert done.examples == local.examples
    assert not list((tmp_path / "scratch").iterdir())
    same(quietly(str(done.path), storage_options=server.keys), quietly(local.path))
    with pytest.raises(actshard.ExistsError, match="contains other objects"):
        actshard.convert(near, "s3://bucket/run", format, **options)
    with pytest.raises(actshard.ArgumentError, match="scratch: expected a URL"):
        actshard.convert(near, tmp_path / "x", format, scratch=tmp_path)


@pytest.mark.parametrize("format", PLAIN)
def test_a_conversion_that_is_interrupted_is_told_by_its_url(server: Served, tmp_path: Path, format: str) -> None:
    options = {"target_options": server.keys, "scratch": tmp_path / "scratch"}
    server.written.refuse = (lambda method, query: method == "PUT", 403)
    with pytest.raises(actshard.FileAccessError):
        actshard.convert(SAEV, "s3://bucket/run", format, **options)
    server.written.refuse = None
    with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: .*Pass resume=True") as caught:
        actshard.convert(SAEV, "s3://bucket/run", format, **options)
    (own,) = (tmp_path / "scratch").iterdir()
    assert f"is in {own}. " in str(caught.value)
    if format != "saev":  # whose folder holds several dumps
        with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: ") as caught:
            actshard.convert(SAEV, "s3://bucket/run", format, resume=True, layers=[0], **options)
        assert f"earlier call is in {own} and may be removed. There: contains" in str(caught.value)
        assert "remove this" not in str(caught.value)
    assert own.stat().st_mode & 0o777 == 0o700
    actshard.convert(SAEV, "s3://bucket/run", format, resume=True, **options)
    assert not list((tmp_path / "scratch").iterdir())
    actshard.convert(SAEV, "s3://bucket/two", format, **options | {"scratch": tmp_path / "made"})
    assert not (tmp_path / "made").exists()
    for there in ("link", "open"):
        if there == "link":
            (tmp_path / "elsewhere").mkdir()
            own.symlink_to(tmp_path / "elsewhere")
        else:
            own.unlink()
            own.mkdir(mode=0o777)
            own.chmod(0o777)
        with pytest.raises(actshard.ArgumentError, match="scratch: expected a private folder"):
            actshard.convert(SAEV, "s3://bucket/run", format, resume=True, **options)
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(actshard.UnsupportedError, match="cannot be written"):
        actshard.convert(SAEV, server.web("bucket/run"), format)


def test_an_upload_that_is_refused_raises_its_own_error(server: Served, tmp_path: Path) -> None:
    options = {"target_options": server.keys, "scratch": tmp_path / "scratch"}
    with write(server, tmp_path / "scratch", "zarr") as whole:
        pass
    with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: contains other objects"):
        actshard.convert(SAEV, "s3://bucket/run", "zarr", exist_ok=True, **options)
    again = write(server, tmp_path / "scratch", "zarr", range(0), exist_ok=True)
    assert again.complete
    with pytest.raises(actshard.ClosedError, match=r"^s3://bucket/run: ") as caught:
        again.append(np.zeros((1, 2, 5, 8), np.float32))
    assert "scratch/" not in str(caught.value)
    late = actshard.create(
        "s3://bucket/late", "zarr", layers=[0], d_model=8, storage_options=server.keys, scratch=tmp_path / "scratch"
    )
    late.append(np.zeros((1, 1, 5, 8), np.float32))
    actshard.convert(SAEV, "s3://bucket/late", "lmprobe", **options)
    with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/late: contains other objects"):
        late.close()
    server.written.refuse = (lambda method, query: method == "PUT", 403)
    with pytest.raises(actshard.FileAccessError, match=r"^s3://bucket/new.*403"):
        actshard.convert(SAEV, "s3://bucket/new", "zarr", **options)
    assert whole.complete


def test_a_left_result_that_is_another_dataset_is_told_by_its_folder(server: Served, tmp_path: Path) -> None:
    options = {"target_options": server.keys, "scratch": tmp_path / "scratch"}
    near = GOLDEN / "pickle/numpy2_proto5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actshard.convert(near, "s3://bucket/run", "lmprobe", **options)
        with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: contains other objects"):
            actshard.convert(near, "s3://bucket/run", "lmprobe", examples=[0], exist_ok=True, **options)
        (left,) = (tmp_path / "scratch").iterdir()
        for more in ({"exist_ok": True}, {"resume": True}):
            with pytest.raises(actshard.ExistsError) as caught:
                actshard.convert(near, "s3://bucket/run", "lmprobe", **more, **options)
            assert str(caught.value).startswith(
                f"s3://bucket/run: the unfinished result of an earlier call is in {left} and may be removed. There: contains"
            )
            assert "this one" not in str(caught.value)
        with pytest.raises(actshard.ExistsError, match="remove that folder to start again"):
            actshard.convert(near, "s3://bucket/run", "lmprobe", **options)
        shutil.rmtree(left)
        with pytest.raises(actshard.ExistsError, match="format: expected zarr, found lmprobe"):
            actshard.convert(near, "s3://bucket/run", "zarr", exist_ok=True, **options)
    assert not list((tmp_path / "scratch").iterdir())


def write(server: Served, scratch: Path, format: str, examples: range = range(6), **more: Any) -> actshard.Writer:
    """Writes examples to a URL, without closing."""
    writer = actshard.create(
        "s3://bucket/run", format, layers=[0, 3], d_model=8, storage_options=server.keys, scratch=scratch, **more
    )
    for i in examples:
        writer.append(np.full((1, 2, 5, 8), i, np.float32))
    return writer


OWN = {"saev": {"metadata": {"family": "clip", "ckpt": "c", "data": {}, "dataset": "d", "pixel_agg": None}}}


@pytest.mark.parametrize("format", PLAIN)
def test_a_writer_writes_to_a_url(server: Served, tmp_path: Path, format: str) -> None:
    own, scratch = OWN.get(format, {}), tmp_path / "scratch"
    with write(server, scratch, format, **own) as writer:
        assert str(writer.path) == "s3://bucket/run"
        assert "scratch" not in repr(writer)
    assert writer.complete
    assert str(writer.path).startswith("s3://bucket/run")
    assert not scratch.exists()
    store = quietly(str(writer.path), storage_options=server.keys)
    assert store.num_examples == 6
    assert (store.sequence(5, 3) == 5).all()
    with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: contains other objects"):
        write(server, scratch, format, range(0), **own)
    puts = len(server.written.puts)
    again = write(server, scratch, format, range(0), exist_ok=True, **own)
    assert again.complete
    assert len(again) == again.committed == 6
    again.close()
    assert len(server.written.puts) == puts
    with pytest.raises(actshard.ArgumentError, match="parts are written to local folders"):
        write(server, scratch, format, range(0), part=(0, 2), **own)
    with pytest.raises(actshard.ArgumentError, match="scratch: expected a URL"):
        actshard.create(tmp_path / "x", format, layers=[0], d_model=2, scratch=scratch)


@pytest.mark.parametrize("format", PLAIN)
def test_a_writer_to_a_url_is_resumed(server: Served, tmp_path: Path, format: str) -> None:
    own, scratch = OWN.get(format, {}), tmp_path / "scratch"
    writer = write(server, scratch, format, range(3), **own)
    writer.abort()
    with pytest.raises(actshard.ExistsError, match=r"^s3://bucket/run: .*resume=True") as caught:
        write(server, scratch, format, range(0), **own)
    (left,) = scratch.iterdir()
    assert f"is in {left}. " in str(caught.value)
    with pytest.raises(
        actshard.ExistsError, match=r"There: contains 3 examples.*resume=True \(--resume\) to continue it$"
    ):
        write(server, scratch, format, range(0), exist_ok=True, **own)
    writer = write(server, scratch, format, range(0), resume=True, **own)
    assert writer.committed == 3
    for i in range(3, 6):
        writer.append(np.full((1, 2, 5, 8), i, np.float32))
    server.written.refuse = (lambda method, query: method == "PUT", 403)
    with pytest.raises(actshard.FileAccessError, match="403"):
        writer.close()
    server.written.refuse = None
    done = write(server, scratch, format, range(0), resume=True, **own)
    assert done.complete
    assert not list(scratch.iterdir())
    store = quietly(str(done.path), storage_options=server.keys)
    assert [int(store.sequence(i, 0)[0, 0]) for i in range(6)] == list(range(6))
    if format != "saev":  # whose folder holds several dumps
        with pytest.raises(actshard.ExistsError, match="contains another dataset: num_examples: expected 7"):
            write(server, scratch, format, range(0), resume=True, num_examples=7, **own)


KILLED = """
import os, signal, sys
import numpy as np
import actshard
options = {"endpoint_url": sys.argv[1], "key": "k", "secret": "s", "region": "x"}
writer = actshard.create(
    "s3://bucket/run", "pickle", layers=[0], d_model=8, resume=True, scratch=sys.argv[2], storage_options=options
)
for i in range(writer.committed, 6):
    writer.append(np.full((1, 1, 5, 8), i, np.float32))
    if writer.flush() == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
writer.close()
"""


@pytest.mark.slow
def test_a_killed_writer_to_a_url_is_continued_by_the_same_call(server: Served, tmp_path: Path) -> None:
    def run(until: int) -> int:
        words = [sys.executable, "-W", "ignore", "-c", KILLED, f"http://127.0.0.1:{server.port}", str(tmp_path / "s")]
        return subprocess.run([*words, str(until)], check=False, timeout=PATIENCE).returncode

    assert run(2) == -signal.SIGKILL
    assert run(4) == -signal.SIGKILL
    assert not server.requests or not server.written.puts
    server.written.refuse = (lambda method, query: method == "PUT" and len(server.written.puts) >= 2, 403)
    assert run(-1) == 1
    with pytest.raises(actshard.UnfinishedError):
        quietly("s3://bucket/run", storage_options=server.keys)
    server.written.refuse = None
    assert run(-1) == 0
    store = quietly("s3://bucket/run", storage_options=server.keys)
    assert [int(store.sequence(i, 0)[0, 0]) for i in range(6)] == list(range(6))
    assert not any((tmp_path / "s").iterdir())
