"""Errors keep their kind: a system error is not a damaged file, and an unreadable dataset is not a finished one."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard import tokens
from actshard.base import work
from actshard.tokens import sources
from conftest import GOLDEN

TOKENIZER = GOLDEN / "levanter/tokenizers/bpe_gpt2style"
RAISED = [
    (OSError(errno.EIO, "Input/output error"), actshard.FileAccessError),
    (pa.ArrowMemoryError("malloc of size 64 failed"), actshard.NoMemoryError),
    (OSError("Corrupt snappy compressed data."), actshard.FormatError),
    (pa.ArrowInvalid("Parquet magic bytes not found"), actshard.FormatError),
]


def written(path: Path) -> Path:
    with actshard.create(path, "lmprobe", layers=[4], d_model=2) as writer:
        writer.append(np.ones((3, 1, 2, 2), np.float32), columns={"text": ["a", "b", "c"]})
    return path


def fails(error: Exception) -> Any:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


@pytest.mark.parametrize(("raised", "kind"), RAISED)
def test_what_the_system_refuses_is_no_broken_index(
    tmp_path: Path, raised: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "d")
    store = actshard.open(path)
    monkeypatch.setattr(pq, "read_table", fails(raised))
    with pytest.raises(kind) as caught:
        _ = store.table
    assert type(caught.value) is kind
    monkeypatch.setattr(pq, "ParquetFile", fails(raised))
    with pytest.raises(kind) as caught:
        actshard.open(path, format="lmprobe")
    assert type(caught.value) is kind


@pytest.mark.parametrize(("raised", "kind"), RAISED)
def test_what_the_system_refuses_is_no_broken_journal(
    tmp_path: Path, raised: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = actshard.create(tmp_path / "d", "zarr", layers=[4], d_model=2)
    writer.append(np.ones((3, 1, 2, 2), np.float32))
    writer.flush()
    writer.abort()
    with monkeypatch.context() as patched:
        patched.setattr(pa, "memory_map", fails(raised))
        with pytest.raises(kind) as caught:
            actshard.create(tmp_path / "d", "zarr", layers=[4], d_model=2, resume=True)
        assert type(caught.value) is kind
    with actshard.create(tmp_path / "d", "zarr", layers=[4], d_model=2, resume=True) as writer:
        assert writer.committed == 3
    assert len(actshard.open(tmp_path / "d")) == 3


def test_a_disk_that_fails_under_zstd_is_no_broken_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl.zst"
    with pa.output_stream(str(file), compression="zstd") as out:
        out.write(json.dumps({"text": "a"}).encode() + b"\n")

    class Fails(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sources, "Watched", lambda *_: Fails())
    with pytest.raises(actshard.FileAccessError, match="Input/output") as caught:
        tokens.build_cache([file], tmp_path / "c", TOKENIZER, jobs=1)
    assert caught.value.path == file


def test_data_broken_under_zstd_is_broken_data(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(zlib.compress(b"no zstd"))
    with pytest.raises(actshard.FormatError):
        tokens.build_cache([file], tmp_path / "c", TOKENIZER, jobs=1)


def test_a_journal_that_cannot_be_looked_at_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2)
    writer.append(np.ones((2, 1, 3, 2), np.float32))
    writer.flush()
    writer.abort()
    assert work.look(tmp_path / "d").kinds() == ["writing"]
    is_file = Path.is_file

    def refused(self: Path, *given: Any) -> bool:
        if self.name == "journal.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return is_file(self, *given)

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(actshard.FileAccessError, match="cannot access"):
        work.look(tmp_path / "d")


def test_a_warning_names_the_callers_line_however_the_package_was_found(tmp_path: Path) -> None:
    """Frames have the text of the import path, which may not be normalized."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import actshard\n\nactshard.open({str(GOLDEN / 'lmprobe/fullseq_f32')!r}).filter([False] * 26)\n"
    )
    package = Path(actshard.__file__).parents[1]
    path = f"{package}/actshard/.././"
    told = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert told.startswith(f"{script}:3: ActshardWarning: "), told
