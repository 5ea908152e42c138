"""What plans of checks and statistics read, and the memory of tasks, is predicted: planned by the core, and measured.

Bytes read are those that the system counted for this process (``rchar`` of /proc/self/io) while a task ran on an open dataset.
Memory is the peak of a process that loads the plan and runs one task (``VmHWM``): nothing is subtracted.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.torture.budget import TORTURE

import actshard
from actshard.writing.converting import blocks
from actshard.writing.converting.blocks import read
from conftest import GOLDEN
from waiting import PATIENCE

pytestmark = [
    pytest.mark.measures_memory,
    pytest.mark.usefixtures("without_pandas"),
    pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what is read"),
    pytest.mark.filterwarnings("ignore::actshard.ActshardWarning"),
]
KINDS = sorted({path.name for path in GOLDEN.iterdir() if path.is_dir()})
WHOLE = ("npy_big_fortran_f32", "npz_example_files_f16", "pt_views_f16", "specforge_dflash_gz")
"""Datasets with arrays that are decoded when they are opened."""
NOT_AS_THEY_ARE = (*WHOLE, "speculators_fp8")
"""Datasets with arrays that are decoded, or types that are wider when they are read."""
ALL = TORTURE
"""Whether all golden datasets are looked at, which takes minutes."""


def counted() -> int:
    """Bytes that this process has read before."""
    return int(Path("/proc/self/io").read_text().split()[1])


def reads(plan: Any, folder: Path, *, fresh: bool) -> int:
    """Bytes that the tasks of a plan read, without what opening the dataset reads.

    ``fresh``: each task opens the dataset itself, as a process of its own does: it finds no decoded files. Otherwise all run twice,
    and the second time the headers of files are known.
    """
    total = 0
    for turn in range(2):  # the first imports modules
        total = 0
        for task in range(len(plan)):
            made = folder / f"{turn}-{task}"
            made.mkdir(parents=True)
            if fresh:
                vars(plan).pop("implementation", None)
                verb = plan.implementation
                verb._open(plan) if hasattr(verb, "_open") else verb.opened(plan)
            here = counted()
            mine = counted() - here
            before = counted()
            plan.implementation.run(plan, task, made, lambda *_: None)
            total += counted() - before - mine
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_golden_rows_are_read_as_predicted(kind: str, tmp_path: Path) -> None:
    """To some bytes, in any number of tasks; of chunks in shards that are decoded, the indexes are read besides."""
    done = 0
    for number, path in enumerate(sorted(path for path in (GOLDEN / kind).iterdir() if path.is_dir())):
        try:
            store = actshard.open(path, io="pread")
            plan = actshard.plan.stats(path, tasks=3, work=tmp_path / f"{number}")
        except actshard.ActshardError:
            continue
        if not store.layers or store.contents.units is not None or path.name in WHOLE:
            continue
        found = reads(plan, tmp_path / f"f{number}", fresh=store.rows.decodes)
        if path.name.startswith("v3_shards") and store.rows.decodes:
            assert plan.predicted.read <= found, path
        else:
            # Other threads of this process may read a few bytes, and the counts themselves become longer.
            assert abs(found - plan.predicted.read) <= 16 * len(plan), path
        done += 1
    assert done or kind in ("levanter", "pickle")


def sampled(kind: str, most: int) -> list[Path]:
    """Golden datasets of a kind, or some of them: ``make torture`` looks at all."""
    found = sorted(path for path in (GOLDEN / kind).iterdir() if path.is_dir())
    return found if ALL else found[:: max(1, -(-len(found) // most))]


def counting(seen: list[int], *given: Any) -> None:
    """Reads a block of a conversion, and appends the bytes that it read."""
    before = counted()
    read(*given)
    seen.append(counted() - before)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_rows_that_are_converted_are_read_as_predicted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows in files as they are; columns and lengths are not counted."""
    seen: list[int] = []
    monkeypatch.setattr(blocks, "read", partial(counting, seen))
    for number, path in enumerate(sampled(kind, 1)):
        try:
            store = actshard.open(path, io="pread")
            plan = actshard.plan.convert(path, tmp_path / f"{number}", "safetensors", tasks=3, columns=[])
        except actshard.ActshardError:
            continue
        if store.contents.units is not None or store.rows.decodes or path.name in NOT_AS_THEY_ARE:
            continue
        for turn in range(2):  # the first reads headers of files
            seen.clear()
            for task in range(len(plan)):
                made = tmp_path / f"f{number}-{turn}-{task}"
                made.mkdir()
                plan.implementation.run(plan, task, made, lambda *_: None)
        mine = counted()
        mine = counted() - mine
        # Other threads of this process may read a few bytes.
        assert abs(sum(seen) - len(seen) * mine - plan.predicted.read) <= 16 * len(plan), path


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["stats", "verify", "convert"])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_golden_datasets_is_predicted(kind: str, verb: str, tmp_path: Path) -> None:
    number = 3 * KINDS.index(kind) + ["stats", "verify", "convert"].index(verb)
    if not ALL and number % 8:
        pytest.skip("make torture looks at all")
    for number, path in enumerate(sampled(kind, 1)):
        try:
            if verb == "convert":
                plan = actshard.plan.convert(path, tmp_path / f"d{number}", "safetensors", tasks=2)
            else:
                plan = getattr(actshard.plan, verb)(path, tasks=2, work=tmp_path / f"w{number}")
            found = measured(plan, tmp_path)
        except (actshard.ActshardError, subprocess.CalledProcessError):  # a damaged one
            continue
        assert found == pytest.approx(plan.predicted.memory, rel=0.2), path


# -- made datasets, large enough for all reading threads -----------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> Any:
    """Two layers of 96 examples of 128 rows of 1 KiB: 25 MB, which compress."""
    return np.round(np.random.default_rng(3).standard_normal((96, 2, 128, 256)), 1).astype(np.float32)


WAYS: dict[str, dict[str, Any]] = {
    "saev": {},
    "lmprobe": {"storage": "full_sequence"},
    "pickle": {"shard_bytes": "5MB"},
    "speculators": {"dtype": "bfloat16", "layers": {0: 0, 1: "last"}},
    "specforge": {"layers": {0: 0, 1: "last"}},
}


@pytest.fixture(scope="module", params=WAYS)
def made(request: pytest.FixtureRequest, rows: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a format."""
    folder, name = tmp_path_factory.mktemp("made"), request.param
    first = name if name in ("saev", "lmprobe", "pickle") else "lmprobe"
    options: dict[str, Any] = WAYS[first]
    columns: dict[str, Any] = {"input_ids": [list(range(128))] * 96} if first != name else {}
    with actshard.create(folder / first, first, layers=[0, 1], d_model=256, **options) as writer:
        writer.append(rows, columns=columns)
    if name != first:
        actshard.convert(folder / first, folder / name, name, **WAYS[name])
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["stats", "verify"])
def test_reads_of_large_data_are_predicted(made: Path, verb: str, tmp_path: Path) -> None:
    plan = getattr(actshard.plan, verb)(made, tasks=4, work=tmp_path / "w")
    store = actshard.open(made)
    found = reads(plan, tmp_path / "f", fresh=store.contents.units is not None)
    if store.contents.units is not None:  # the first shard is read when the dataset is opened
        first = [said for said in plan.tasks if verb == "stats" or said["examples"][0] == 0]
        found += len(first) * next(each.size or 0 for each in plan.inputs if "0001" in each.path)
    besides = 0
    if verb == "verify":  # task 0 checks the files, which reads their metadata
        before = counted()
        actshard.verify(made)
        besides = counted() - before
    assert 0.99 * plan.predicted.read <= found <= 1.01 * plan.predicted.read + besides


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["all", "last"])
def test_reads_of_large_conversions_are_predicted(
    made: Path, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of rows: within 1 %. A pickle shard is read once by each task, with its columns."""
    seen: list[int] = []
    plan = actshard.plan.convert(made, tmp_path / "d", "safetensors", tasks=2, tokens=tokens)
    monkeypatch.setattr(blocks, "read", partial(counting, seen))  # not of the predictions, which write the result once
    store = actshard.open(made)
    found = reads(plan, tmp_path / "f", fresh=store.contents.units is not None)
    if store.contents.units is None:
        found = sum(seen[len(seen) // 2 :])  # the second turn: writing threads import modules in the first
    else:  # the first shard is read when the dataset is opened
        found += len(plan) * next(each.size or 0 for each in plan.inputs if "0001" in each.path)
    assert 0.99 * plan.predicted.read <= found <= 1.01 * plan.predicted.read


MEASURED = """
import sys, actshard
plan = actshard.plan.load(sys.argv[1])
plan.run(0)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def measured(plan: Any, folder: Path, code: str = MEASURED) -> int:
    """Peak memory of a process that runs the first task."""
    child = [sys.executable, "-W", "ignore", "-c", code, str(plan.save(folder / "plan.json"))]
    done = subprocess.run(child, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return int(done.stdout) << 10


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["stats", "verify"])
def test_memory_of_a_task_is_predicted(made: Path, verb: str, tmp_path: Path) -> None:
    plan = getattr(actshard.plan, verb)(made, tasks=1, work=tmp_path / "w")
    assert measured(plan, tmp_path) == pytest.approx(plan.predicted.memory, rel=0.2)


@pytest.mark.slow
def test_memory_of_a_conversion_is_predicted(made: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(made, tmp_path / "d", "safetensors", tasks=1)
    assert measured(plan, tmp_path) == pytest.approx(plan.predicted.memory, rel=0.2)


WRITES = """
import sys, numpy as np
from actshard.plan import load
with load(sys.argv[1]).writer(0) as writer:
    for _ in writer.left:
        writer.append(np.ones((1, 2, 64, 1024), np.float32))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
def test_memory_of_an_extraction_is_predicted(format: str, tmp_path: Path) -> None:
    """Without the model, and the batches that are appended: here of half a MiB."""
    given: dict[str, Any] = {"layers": [0, 1], "d_model": 1024, "num_examples": 160, "tasks": 2, "dtype": "float32"}
    plan = actshard.plan.create(tmp_path / "d", format, **given, tokens_per_example=64)
    assert measured(plan, tmp_path, WRITES) == pytest.approx(plan.predicted.memory, rel=0.2)
    if format != "saev":  # a task may fill all blocks
        more = actshard.plan.create(tmp_path / "e", format, **given).predicted.memory
        assert more >= plan.predicted.memory


@pytest.mark.slow
def test_memory_does_not_depend_on_what_the_planning_process_did(tmp_path: Path) -> None:
    """A process that has imported and planned other things predicts the same, to a page of the libraries."""
    with actshard.create(tmp_path / "s", "lmprobe", layers=[0], d_model=8, storage="full_sequence") as writer:
        writer.append(np.ones((6, 1, 4, 8), np.float32), columns={"label": list(range(6))})
    code = """
import sys, actshard
if sys.argv[2] == "busy":
    import matplotlib.pyplot, pyarrow.parquet, pyarrow.dataset, unittest.mock
    ballast = bytearray(200 << 20)
    actshard.plan.stats(sys.argv[1] + "/s", tasks=1, work=sys.argv[1] + "/w")
where = sys.argv[1] + "/d"
made = [
    actshard.plan.convert(sys.argv[1] + "/s", where, "zarr", tasks=1),
    actshard.plan.stats(sys.argv[1] + "/s", tasks=1, work=where),
    actshard.plan.create(where, "zarr", layers=[0], d_model=8, num_examples=9, tasks=1),
]
print(*[plan.predicted.memory for plan in made])
"""
    told = []
    for kind in ("fresh", "busy"):
        child = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), kind]
        done = subprocess.run(child, capture_output=True, text=True, timeout=PATIENCE, check=True)
        told.append([int(word) for word in done.stdout.split()])
    assert told[0] == pytest.approx(told[1], rel=0.04)
