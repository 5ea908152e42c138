"""``make bench``: runs the workloads, prints a table and writes a dated record.

python -m benches [--only random_hot,cast] [--repeats 11] [--no-record] [--tiny]

``--tiny`` runs everything on tiny data with any build, to find out whether it still runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import actshard
from benches import sizes

if "--tiny" in sys.argv[1:] and not sizes.TINY:
    # Before the workloads are imported: their sizes are constants, also in the processes that they start.
    os.environ[sizes.VARIABLE] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "benches", *sys.argv[1:]])

from benches import workloads
from benches.measure import NotPermitted, Row
from benches.report import HEADERS, cells
from benches.sizes import TINY, turns

RECORD = Path(__file__).parent / "record"


def machine() -> dict[str, Any]:
    """Hardware and versions, stored with the results."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")),
        "?",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {}
    for name in ("numpy", "pyarrow", "safetensors", "lmprobe", "torch", "zarr", "zarrs", "tensorstore", "isal", "polars",
                 "h5py", "datasets", "s3fs", "obstore", "huggingface_hub",
                 "scikit-learn", "speculators", "specforge", "sae-lens"):  # fmt: skip
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "actshard": actshard.build_info(),
        "versions": versions,
    }


COLD = ("random_cold", "half_cached", "stores_cold")
"""Workloads that drop pages of files which later workloads map."""


def run(name: str, repeats: int) -> Iterator[Row]:
    """The rows of a workload; a row with a reason for what is not installed or not permitted."""
    try:
        yield from workloads.ALL[name](repeats)
        return
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] in ("", "actshard", "benches"):
            raise
        why = f"{missing.name} is not installed"
    except NotPermitted as error:
        why = str(error)
    yield Row(name, "", "", None, None, "", None, "", None, f"skipped: {why}")


def main() -> None:
    """Runs the requested workloads."""
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument("--only", default=",".join(workloads.ALL), help=f"of {', '.join(workloads.ALL)}")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--record", type=Path, default=None if TINY else RECORD, help="folder of records")
    parser.add_argument("--tiny", action="store_true", help="tiny data, any build; a record only in a given folder")
    asked = parser.parse_args()
    if actshard.build_info()["profile"] != "release" and not TINY:
        sys.exit("benches: this is a debug build of actshard; `make bench` builds a release")
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    # Cold runs first: the page cache of files mapped by this process cannot be dropped.
    names = sorted(asked.only.split(","), key=lambda name: name not in COLD)
    console = Console(width=None if sys.stdout.isatty() else 220)
    for name in names:
        console.print(f"[dim]{name} ...[/]")
        began = time.perf_counter()
        rows += run(name, turns(asked.repeats))
        seconds[name] = round(time.perf_counter() - began, 1)
        gc.collect()
    table = Table(*HEADERS)
    for row in rows:
        table.add_row(*cells(dataclasses.asdict(row)))
    console.print(table)
    if asked.no_record or asked.record is None:
        return
    asked.record.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    base = asked.record / f"{now:%Y-%m-%d-%H%M%S}"
    about = machine()
    record = {
        "when": now.isoformat(timespec="seconds"),
        "machine": about,
        "seconds": seconds,
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    base.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['system']}, Python {about['python']}, "
    ]
    lines[0] += ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    lines += ["", "| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    lines += ["| " + " | ".join(x.strip() for x in cells(dataclasses.asdict(row))) + " |" for row in rows]
    base.with_suffix(".md").write_text("\n".join(lines) + "\n")
    console.print(f"written to {base.with_suffix('.md')} and .json")


if __name__ == "__main__":
    main()
