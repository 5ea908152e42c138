"""Every workload of the bench runs, on tiny data and with any build: a change that breaks one is seen before `make bench`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard

ROOT = Path(__file__).parents[1]
MACHINE = r"this file system|left pages in the cache|could not be dropped|no CUDA device"
"""Reasons of rows without a measurement that do not depend on installed packages."""
PEERS = r"is not installed|no Levanter at|No module named"


def tiny(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and seconds by workload of a tiny run. Its data lie in `folder`."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benches",
        "--tiny",
        "--record",
        str(folder / "record"),
        *arguments,
    ]
    env = {**os.environ, "ACTSHARD_BENCH_DATA": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (folder / "record").glob("*.json")
    made = json.loads(record.read_text())
    return made["rows"], made["seconds"]


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why rows have no figures."""
    return [row["note"] for row in rows if row["ours_value"] is None]


@pytest.mark.slow
def test_every_workload_runs(tmp_path: Path) -> None:
    """Those whose peers are not installed say so."""
    rows, seconds = tiny(tmp_path)
    assert len(seconds) >= 46
    assert [why for why in reasons(rows) if not re.search(f"{MACHINE}|{PEERS}", why)] == []
    measured = {row["workload"].split(":")[0] for row in rows if row["ours_value"] is not None}
    assert {"stream", "write", "convert", "tokens", "one row a call", "verify --deep, 3.6 GB"} <= measured


@pytest.mark.peers
def test_workloads_run_beside_their_peers(tmp_path: Path) -> None:
    """Those that need zarr, tensorstore, torch or lmprobe."""
    names = "last_tokens,all_tokens,zarr_slices,zarr_sixteen,zarr_training,zarr_sharded,zarr_coded,zarr_threads"
    rows, _ = tiny(
        tmp_path, "--only", f"{names},stream_others,compat_lmprobe,capture,write_zarr,stores_torch,stores_arrow"
    )
    assert [why for why in reasons(rows) if not re.search(MACHINE, why)] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_study_of_packing_prints_a_table(tmp_path: Path, dtype: str) -> None:
    with actshard.create(tmp_path / "d", "npy", layers=[0, 4], d_model=64) as writer:
        writer.append(np.random.default_rng(0).standard_normal((3, 2, 50, 64)).astype(np.float32))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benches.packing",
        str(tmp_path / "d"),
        "--layer",
        "4",
        "--dtype",
        dtype,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = dict(re.findall(r"^\| ([^|]+) \| ([0-9.]+) \|", done.stdout, re.MULTILINE))
    assert {"zstd 1", "byte shuffle, zstd 1", "exponents, zstd 1"} <= sizes.keys()
    assert 0.5 < float(sizes["exponents, zstd 1"]) < 1


@pytest.mark.slow
def test_the_study_of_int8_prints_the_table_of_the_documentation() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benches.int8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs/formats/zarr.md").read_text()
    rows = re.findall(r"^\| (int8|float8_e4m3fn), (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", done.stdout, re.MULTILINE)
    assert len(rows) == 6
    for code, kind, *numbers in rows:
        name = f'int8, `"{kind}"`' if code == "int8" else "float8_e4m3fn, a scale per token"
        assert f"| {name} | {' | '.join(numbers)} |" in page
