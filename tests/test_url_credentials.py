"""Credentials that a program prints: it runs once for many requests, and not for ever."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import actshard
from served import Served, served
from test_urls import places, quietly
from waiting import PATIENCE


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "root/bucket").mkdir(parents=True)
    shutil.copytree(places()[0].values[0], tmp_path / "root/bucket/run")
    with served(tmp_path / "root") as found:
        yield found


def printing(tmp_path: Path, *, ends: timedelta, first: str) -> Path:
    """Makes a program for credentials the default profile's; the file that has a line for each of its runs.

    ``first``: what the program does before it prints.
    """
    told = {
        "Version": 1,
        "AccessKeyId": "AKIAPUBLIC",
        "SecretAccessKey": "hushhush",
        "Expiration": (datetime.now(UTC) + ends).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    (tmp_path / "told").write_text(json.dumps(told))
    program = tmp_path / "program.sh"
    program.write_text(f"echo run >> {tmp_path}/runs\n{first}\ncat {tmp_path}/told\n")
    (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\ncredential_process = exec sh {program}\n")
    return tmp_path / "runs"


@pytest.mark.parametrize("ends", [timedelta(hours=1), timedelta(minutes=4)], ids=["an hour", "four minutes"])
def test_many_requests_at_once_run_the_program_once(server: Served, tmp_path: Path, ends: timedelta) -> None:
    runs = printing(tmp_path, ends=ends, first="sleep 0.3")
    options = {"endpoint_url": f"http://127.0.0.1:{server.port}", "region": "us-east-1"}
    store = quietly("s3://bucket/run", storage_options=options)
    work = [threading.Thread(target=store.sequence, args=(e, store.layers[0])) for e in range(len(store))]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    store.sequences(range(len(store)), store.layers[0])
    assert runs.read_text().count("run") == 1


def test_a_program_that_never_ends_is_told(server: Served, tmp_path: Path) -> None:
    # With exec: only the process that was started is killed, not its children.
    printing(tmp_path, ends=timedelta(hours=1), first=f"exec sleep {PATIENCE}")
    options = {"endpoint_url": f"http://127.0.0.1:{server.port}", "region": "us-east-1", "retry_timeout": "2s"}
    with pytest.raises(actshard.ActshardError, match="credential_process") as caught:
        quietly("s3://bucket/run", storage_options=options)
    assert "hushhush" not in str(caught.value)
