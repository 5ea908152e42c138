"""``actshard plan ...``: plans made, told and run by commands alone."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import cli
from actshard.cli import _plan_commands, planning
from actshard.cli import planning as running
from actshard.plan import Status, needs, runners
from actshard.plan.book import Attempt
from test_runners import Done, command

GOLDEN = Path(__file__).parent / "golden"
ZARR = GOLDEN / "zarr/single_consolidated/activations.zarr"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "s"
    rng = np.random.default_rng(0)
    with actshard.create(path, "zarr", layers=[0, 5], d_model=64) as writer:
        writer.append(rng.standard_normal((60, 2, 20, 64)).astype(np.float32), columns={"label": np.arange(60) % 2})
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def fine(*words: Any) -> Done:
    done = command(*words)
    assert done.returncode == 0, done.stderr
    return done


def test_a_conversion_by_commands_alone(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.chdir(tmp_path)
    options = (
        "--to",
        "lmprobe",
        "--layer",
        "5",
        "--shard-bytes",
        "20kB",
        "--dtype",
        "float16",
        "--columns",
        "label=verb",
    )
    said = fine("plan", "convert", source, "d", *options, "--tasks", 4)
    assert "plan.json: convert in " in said.stdout
    for word in (
        "reads",
        "writes",
        "free",
        "memory",
        "time",
        "actshard run",
        "sbatch --wait --array=0-",
        "actshard status",
    ):
        assert word in said.stdout
    plan = actshard.plan.load("plan.json")
    assert len(plan) > 1
    assert not (tmp_path / "d").exists()
    for task in range(len(plan)):
        fine("run", "plan.json", "--task", task)
    assert "next: actshard commit" in fine("status", "plan.json").stdout
    fine("commit", "plan.json")
    fine("convert", source, "e", *options)
    assert files(tmp_path / "d") == files(tmp_path / "e")


@pytest.mark.slow
def test_the_other_commands_make_the_plans_of_the_functions(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"the {i}"}) + "\n" for i in range(200)))
    tokenizer = GOLDEN / "levanter/tokenizers/bpe_gpt2style"
    parts = [tmp_path / "p0", tmp_path / "p1"]
    for part in parts:
        shutil.copytree(source, part)
    calls: list[tuple[tuple[Any, ...], Any]] = [
        (
            ("verify", source, "--work", tmp_path / "v", "--tasks", 3),
            lambda: actshard.plan.verify(source, tasks=3, work=tmp_path / "v"),
        ),
        (
            ("stats", source, "--layer", "5", "--tokens", "all", "--work", tmp_path / "w", "--tasks", 3),
            lambda: actshard.plan.stats(source, [5], tokens="all", tasks=3, work=tmp_path / "w"),
        ),
        (
            ("merge", tmp_path / "m", "--part", parts[0], "--part", parts[1], "--tasks", 2),
            lambda: actshard.plan.merge(tmp_path / "m", parts, tasks=2),
        ),
        (
            ("stage", source, tmp_path / "staged", "--layers", "5", "--tasks", 2),
            lambda: actshard.plan.stage(source, tmp_path / "staged", [5], tasks=2),
        ),
        (
            ("tokenize", text, "--cache", tmp_path / "c/train", "--tokenizer", tokenizer, "--tasks", 3),
            lambda: actshard.plan.tokenize([text], tmp_path / "c/train", tokenizer, {"type": "text"}, tasks=3),
        ),
    ]
    for number, (words, made) in enumerate(calls):
        file = tmp_path / f"{number}.json"
        told = json.loads(fine("plan", *words, "-o", file, "--json", "--no-measure").stdout)
        plan = made()
        assert told["id"] == plan.id
        assert told["rate"] is None
        assert told["predicted"]["bytes"] == plan.predicted.bytes
        assert actshard.plan.load(file).id == plan.id
        done = command("run", file, "--json")
        assert done.returncode in (0, 1), done.stderr  # 1: warnings of verify
        assert plan.status().committed or words[0] in ("verify", "stats")


OWN = {"context", "tasks", "out", "replace", "no_measure", "json", "work", "cache"}
ELSEWHERE = {
    "convert": {"dry_run", "estimate", "resume", "verify", "exist_ok", "storage_option", "target_option", "scratch"},
    "verify": {"deep", "storage_option", "incomplete"},
    "stats": {"rows", "storage_option"},
    "tokenize": {"config", "component", "dry_run", "jobs", "overwrite"},
    "merge": {"path", "resume"},
    "stage": {"no_check", "storage_option"},
}
"""Options that plans do not have: they are always resumable and deep, have no secrets and no samples, and jobs are their tasks."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_option_of_a_command_is_forgotten(name: str) -> None:
    whole = inspect.signature(getattr(cli, f"{name}_command")).parameters
    plan = inspect.signature(getattr(_plan_commands, f"plan_{name}_command")).parameters
    assert set(whole) - set(plan) - OWN - {"quiet"} == ELSEWHERE[name]  # of bars: `actshard run` has it
    assert set(plan) - set(whole) <= OWN | {"target", "layout"}
    for each in set(plan) & set(whole) - {"out", "part", "target", "to", "layout", "option", "folder"}:
        assert plan[each].annotation == whole[each].annotation, each
        assert plan[each].default in (whole[each].default, inspect.Parameter.empty), each


def test_a_file_with_another_plan_is_kept(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = ("plan", "convert", source, tmp_path / "d", "--to", "npy", "-o", file, "--no-measure")
    fine(*made)
    before = file.read_bytes()
    fine(*made)
    assert file.read_bytes() == before
    refused = command(*made[:4], "--to", "zarr", *made[6:])
    assert refused.returncode == 3
    assert "plan.json: exists and is not this plan. Pass --replace" in refused.stderr
    assert file.read_bytes() == before
    fine(*made[:4], "--to", "zarr", *made[6:], "--replace")
    assert file.read_bytes() != before
    file.write_text("{}")
    assert "is not this plan" in command(*made).stderr
    assert json.loads(fine(*made[:6], "-o", "-").stdout)["actshard_plan"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("convert", "nowhere", "d", "--to", "zarr"), "nowhere"),
        (("convert", ZARR, "d", "--to", "zar"), "format must be one of"),
        (("convert", ZARR, "d", "--to", "zarr", "--layer", "99"), "99"),
        (("convert", ZARR, "s3://bucket/d", "--to", "zarr"), "dst: expected a local path"),
        (("stats", ZARR, "--layer", "x"), "x"),
        (("verify", "nowhere"), "nowhere"),
        (("merge", "m", "--part", "nowhere"), "nowhere"),
        (("tokenize", "nowhere.jsonl", "--cache", "c"), "nowhere.jsonl: expected a file"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(
    words: tuple[Any, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("plan", *words)
    assert done.returncode == 3
    assert done.stderr.startswith("actshard: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["zarr", "lmprobe", "saev", "npy", "pickle"])
def test_a_sample_is_measured_and_leaves_nothing(source: Path, tmp_path: Path, format: str) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", format, tasks=3)
    found = needs.measure(plan)
    assert isinstance(found, needs.Rate)
    assert 0 < found.bytes <= sum(int(task["bytes"]) for task in plan.tasks)
    assert found.seconds > 0
    small = needs.measure(plan, 20 * 64 * 4 * 2 * 3)
    assert isinstance(small, str) or small.bytes <= 20 * 64 * 4 * 2 * 3
    assert list(tmp_path.iterdir()) == []


def test_times_are_those_of_the_rate(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=4, shard_bytes="20kB")
    size = sum(int(task["bytes"]) for task in plan.tasks)
    told = planning.PlanSummary(plan, tmp_path / "p.json", needs.Rate(size, 7200.0), (1, None))
    assert told.seconds(1) == pytest.approx(7200)
    largest = max(int(task["bytes"]) for task in plan.tasks)
    assert told.seconds(10**6) == pytest.approx(7200 * largest / size)
    assert "about 2.0 h in one process" in told.time()
    assert (
        planning.PlanSummary(plan, tmp_path / "p.json", "--no-measure", (1, None)).time()
        == "not measured: --no-measure"
    )


def test_a_time_that_is_not_measured_has_a_reason(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "npy", tasks=2)
    assert "larger than a sample of 10 bytes" in str(needs.measure(plan, 10))
    plan.save(tmp_path / "p.json")
    shutil.copytree(source, tmp_path / "s")
    gone = actshard.plan.stats(tmp_path / "s", tasks=2, work=tmp_path / "w")
    shutil.rmtree(tmp_path / "s")
    assert str(needs.measure(gone)).startswith(f"a sample of the work failed: {tmp_path / 's'}")
    made = actshard.plan.create(tmp_path / "e", "zarr", layers=[0], d_model=8, num_examples=9, tasks=2)
    assert "the time depends on the model" in str(planning.rate(made, quiet=True))
    parts = actshard.plan.merge(tmp_path / "m", [source], tasks=2)
    assert planning.rate(parts, quiet=True) == "the tasks read and copy nothing"
    for task in range(len(plan)):
        plan.run(task)
    assert planning.rate(plan, quiet=True) == "all tasks are done"
    file = tmp_path / "q.json"
    words = ("plan", "convert", source, tmp_path / "x", "--to", "npy", "-o", file)
    assert "not measured: --no-measure" in fine(*words, "--no-measure").stdout
    assert json.loads(fine(*words, "--no-measure", "--json").stdout)["not_measured"] == "--no-measure"


def test_watching_ends_when_all_that_is_left_has_failed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks in a row: a driver may run failed tasks again after the others."""
    monkeypatch.setattr(running, "_EVERY", 0)
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=3, shard_bytes="20kB")
    plan.run(0)
    error = actshard.FormatError("broken")
    looks = iter([[], [1], [1, 2], [], [1, 2], [1, 2], [1, 2]])

    def status() -> Any:
        now = plan.status()
        failed = dict.fromkeys(next(looks), error)
        missing = tuple(task for task in now.left if task not in failed)
        return dataclasses.replace(now, failed=failed, missing=missing)

    watched: Any = SimpleNamespace(status=status)
    assert [sorted(now.failed) for now in running.statuses(watched, True)] == [[], [1], [1, 2], [], [1, 2], [1, 2]]


def test_tasks_that_were_run_and_those_that_are_done_are_told_apart(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=4, shard_bytes="20kB")
    plan.save(file)
    assert fine("run", file, "--task", 0).stdout == f"task 0: done; 1 of {len(plan)} tasks of the plan are done\n"
    assert (
        fine("run", file, "--task", "1,3").stdout == f"tasks 1, 3: done; 3 of {len(plan)} tasks of the plan are done\n"
    )


@pytest.fixture
def flawed(tmp_path: Path) -> Path:
    """A dataset with a NaN, a massive row with a text, and two equal examples."""
    rows = np.random.default_rng(1).standard_normal((20, 2, 5, 8)).astype(np.float32)
    rows[3, 0, 2, 4] = np.nan
    rows[7, 1, 0] *= 5000
    rows[9] = rows[8]
    with actshard.create(tmp_path / "flawed", "zarr", layers=[0, 5], d_model=8) as writer:
        texts = [[f"word {max(i - (i == 9), 0)} {j}" for j in range(5)] for i in range(20)]
        writer.append(rows, columns={"text": [" ".join(each) for each in texts], "tokens_text": texts})
    return tmp_path / "flawed"


def test_a_commit_of_statistics_prints_what_stats_prints(flawed: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("plan", "stats", flawed, "--tasks", 3, "--work", tmp_path / "w", "--no-measure", "-o", file)
    fine(*words)
    expected = fine("stats", flawed).stdout
    assert "error layer 0: " in expected
    assert "massive rows:" in expected
    assert "warning examples: 1 example of 20" in expected
    assert fine("run", file).stdout == expected
    assert fine("commit", file).stdout == expected
    assert json.loads(fine("commit", file, "--json").stdout) == json.loads(fine("stats", flawed, "--json").stdout)
    shutil.rmtree(flawed)
    left = fine("commit", file).stdout
    assert left.splitlines()[:3] == expected.splitlines()[:3]  # the table
    assert "error layer 0: " in left
    assert "massive rows:" in left
    assert "note the dataset cannot be read any more: equal examples and texts of tokens are left out: " in left


def test_a_commit_with_tasks_left_names_the_next_command(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "my plan.json"
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=4, shard_bytes="20kB")
    plan.save(file)
    next_one = f". Run them first: actshard run '{file}'\n"
    refused = command("commit", file)
    assert refused.returncode == 3
    assert f"expected {len(plan)} finished tasks, found {len(plan)} missing (0-{len(plan) - 1})" in refused.stderr
    assert refused.stderr.endswith(next_one)
    fine("run", file, "--task", 0)
    refused = command("commit", file)
    assert f"found {len(plan) - 1} missing (1-{len(plan) - 1})" in refused.stderr
    assert refused.stderr.endswith(next_one)
    fine("run", file)
    assert plan.status().committed


@pytest.mark.parametrize(("tasks", "array", "named"), [(4, "0-3", "$SLURM_ARRAY_TASK_ID"), (2800, "0-999", "auto")])
def test_an_array_has_no_more_elements_than_slurm_takes(
    tasks: int, array: str, named: str, source: Path, tmp_path: Path
) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=4, shard_bytes="20kB")
    plan = dataclasses.replace(plan, tasks=plan.tasks * (tasks // len(plan)))
    told = planning.PlanSummary(plan, tmp_path / "p.json", "", (1, None)).commands()["as an array"]
    assert told.startswith(f"sbatch --wait --array={array} --wrap 'actshard run ")
    assert told.endswith(f"p.json --task {named}'")


def test_options_of_engines_have_names(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    actshard.plan.convert(source, tmp_path / "d", "npy", tasks=2).save(file)
    seen: list[tuple[str, dict[str, Any]]] = []

    def run(plan: Any, on: str, *, progress: Any, commit: bool, keep_going: bool, retries: int, **options: Any) -> Any:
        seen.append((on, options))
        return plan.status()

    with monkeypatch.context() as patch:
        patch.setattr(runners, "run", run)
        slurm = (
            "--partition",
            "cpu",
            "--array-size",
            64,
            "--memory",
            "8GiB",
            "--cpus",
            4,
            "--time",
            "30",
            "--qos",
            "low",
        )
        fine(
            "run",
            file,
            "--on",
            "slurm",
            *slurm,
            "--account",
            "a",
            "--logs",
            "here",
            "-o",
            "cluster=local",
            "--no-commit",
        )
        fine("run", file, "--on", "ray", "--address", "auto", "--gpus", 0.5, "--no-commit")
        fine("run", file, "--on", "dask", "--scheduler", "tcp://host:1", "--no-commit")
    own = {"partition": "cpu", "array_size": 64, "memory": "8GiB", "cpus": 4, "time": 30, "qos": "low", "account": "a"}
    assert seen == [
        ("slurm", own | {"logs": "here", "cluster": "local"}),
        ("ray", {"address": "auto", "gpus": 0.5}),
        ("dask", {"scheduler": "tcp://host:1"}),
    ]
    refused = command("run", file, "--partition", "cpu")
    assert refused.returncode == 3
    assert "--partition: expected an option of --on local: workers; it is an option of --on slurm" in refused.stderr
    refused = command("run", file, "--on", "dask", "--cpus", 2)
    assert refused.returncode == 3
    assert refused.stderr.endswith("in_flight; it is an option of --on slurm and --on ray\n")
    unknown = command("run", file, "-o", "partitoin=cpu")
    assert unknown.stderr.endswith("partitoin: expected an option of --on local: workers\n")


def test_status_tells_errors_once_and_what_it_leaves_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=4, shard_bytes="20kB")
    same, other = (actshard.FormatError(f"row {row}", path="/data/a.jsonl") for row in (7, 8))
    failed: dict[int, actshard.ActshardError] = {**dict.fromkeys((1, 2, 3, 9), same), 5: other}
    lost = tuple(Attempt(task, tmp_path, "node", 1, 90.0, 0, 0) for task in range(10, 40))
    now = Status(40, (0,), (), lost, failed, (4, 6, 7, 8, *range(10, 40)), False, True)
    running.show_status(plan, now, "my plan.json")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "convert, 40 tasks: 1 done, 30 stopped, 5 failed, 34 missing"
    assert lines[1] == "  stopped 10: node, process 1"
    assert lines[21:] == [
        "  stopped: 10 more, see --json",
        "  failed 1-3, 9: /data/a.jsonl: row 7",
        "  failed 5: /data/a.jsonl: row 8",
        "  missing 4, 6-8, 10-39",
        "  a commit was started and is not finished; if it was killed, run it again",
        "next: actshard run 'my plan.json', with the same options: it runs the tasks that are not done",
    ]
    changed: dict[int, actshard.ActshardError] = {1: actshard.ChangedInputError("Make the plan again.", path="/a")}
    running.show_status(plan, Status(2, (0,), (), (), changed, (), False, False), "p.json")
    assert "next" not in capsys.readouterr().out
    # Tasks that wait in a queue have no next command: on a login node it would run them there.
    running.show_status(plan, Status(2, (0,), (), (), {}, (1,), False, False), "p.json")
    assert "next" not in capsys.readouterr().out
