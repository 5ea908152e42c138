"""Plans and results that others wrote: an actshard error in one line, and nothing is written, or removed, outside of the target."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.formats.pickle import read as pickle_read
from actshard.plan import converting_checks, data
from actshard.plan.book import work_folder
from actshard.plan.data import identity
from actshard.reading.inputs import Input
from pickle_files import item, write

WRONG: list[Any] = [None, True, -1, 1.5, 1 << 70, "x", "../x", "/etc/x", "", "\0", [], [0], [[1, 2]], {}, {"a": 1}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "source"
    rows = np.random.default_rng(4).standard_normal((2, 12, 3, 8)).astype(np.float32)
    with actshard.create(path, "zarr", layers=[0, 1], d_model=8) as writer:
        writer.append(list(rows.transpose(1, 0, 2, 3)))
    return path


def _convert(source: Path, at: Path, **more: Any) -> actshard.plan.Plan:
    return actshard.plan.convert(source, at / "d", "zarr", tasks=2, examples=[4, 1, 1, 0, 9], **more)


PLANS: dict[str, Callable[[Path, Path], actshard.plan.Plan]] = {
    "convert": _convert,
    "layers": lambda source, at: actshard.plan.convert(source, at / "d", "npy", tasks=2, layers={0: 3, 1: 5}),
    "verify": lambda source, at: actshard.plan.verify(source, tasks=2, work=at / "w"),
    "stats": lambda source, at: actshard.plan.stats(source, tasks=2, work=at / "w"),
}


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*at, key)
        yield from _places(each, (*at, key))


def _put(made: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        made = made[key]
    made[place[-1]] = value


def _signed(made: dict[str, Any]) -> None:
    """Gives a changed plan the id and the working folder that one of its arguments has."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        made["id"] = identity(made["verb"], made["arguments"], [Input(*x) for x in made["inputs"]], made["tasks"])
        if made["verb"] == "convert" and Path(made["arguments"]["dst"]).is_absolute():
            made["work"] = str(work_folder(Path(made["arguments"]["dst"]), made["id"]))


def _all_of(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def _attempted(made: dict[str, Any], file: Path) -> str | None:
    """Loads and runs a plan; returns the error's text. Other errors than actshard's are raised."""
    file.write_text(json.dumps(made))
    try:
        plan = actshard.plan.load(file)
    except actshard.ActshardError as error:
        return str(error)
    refused = None
    for call in (plan.status, *(lambda task=task: plan.run(task) for task in range(min(len(plan), 3))), plan.commit):
        try:
            call()
        except actshard.ActshardError as error:
            refused = str(error)
    return refused


@pytest.mark.parametrize("kind", PLANS)
def test_any_changed_value_is_refused_in_one_line_or_harmless(kind: str, source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "w.txt").write_text("a file of others")
    good = PLANS[kind](source, tmp_path / "target").as_dict()
    places = [
        p for p in _places(good) if p[0] in ("arguments", "tasks", "inputs", "predicted", "notes", "verb", "work")
    ]
    rng, refused, before, read = random.Random(7), 0, _all_of(home), _all_of(source)
    inner = [p for p in places if p[0] in ("arguments", "tasks")]
    for place in [*inner, *rng.choices(places, k=10)]:
        value = rng.choice(WRONG)
        made = copy.deepcopy(good)
        _put(made, place, value)
        _signed(made)
        said = _attempted(made, tmp_path / "plan.json")
        refused += said is not None
        assert said is None or len(said.splitlines()) == 1, (place, value)
        left = {p.name for p in tmp_path.iterdir()} - {"home", "plan.json", "target"}
        assert not left, (place, value, left)
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
    assert refused > len(inner) // 2, "most changes are noticed"
    assert _all_of(home) == before
    assert _all_of(source) == read


def _changed(good: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    made = copy.deepcopy(good)
    made["arguments"].update(arguments)
    return made


def _tasks(good: dict[str, Any], name: str, *ranges: list[int]) -> dict[str, Any]:
    made = copy.deepcopy(good)
    made["tasks"] = [{**made["tasks"][0], name: each} for each in ranges]
    return made


BROKEN: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    ("convert", lambda p: _changed(p, dst="d"), "field 'arguments.dst': expected an absolute path, found"),
    ("convert", lambda p: _changed(p, src=["/a", 5]), "field 'arguments.src[1]': expected an absolute path"),
    ("convert", lambda p: _changed(p, format="../x"), "field 'arguments.format': expected a format"),
    ("convert", lambda p: _changed(p, overflow="no"), "field 'arguments.overflow': expected one of"),
    ("convert", lambda p: _changed(p, examples="AAAA"), "field 'arguments.examples': expected 5 numbers"),
    (
        "convert",
        lambda p: _changed(p, examples=converting_checks.packed(np.zeros(5_000_000, np.int64))),
        "field 'arguments.examples': expected 5 numbers",
    ),
    ("convert", lambda p: _changed(p, sizes={**p["arguments"]["sizes"], "shard_bytes": -1}), "sizes.shard_bytes"),
    ("convert", lambda p: _tasks(p, "examples", [0, 2], [3, 5]), "expected a range that starts at 2, found"),
    ("convert", lambda p: _tasks(p, "examples", [0, 3], [2, 5]), "expected a range that starts at 3, found"),
    ("convert", lambda p: _tasks(p, "examples", [0, 5], [0, 5]), "expected a range that starts at 5, found"),
    ("convert", lambda p: _tasks(p, "examples", [0, 1 << 80]), "field 'tasks[0].examples[1]': expected an integer"),
    ("layers", lambda p: _tasks(p, "layers", [0, 9]), "field 'tasks': expected ranges of 2 layers, found 9"),
    ("verify", lambda p: _changed(p, path="../x"), "field 'arguments.path': expected an absolute path"),
    ("verify", lambda p: _changed(p, examples=7), "field 'tasks': expected ranges of 7 examples, found 12"),
    ("verify", lambda p: _changed(p, layout=5), "field 'arguments.layout': expected"),
    (
        "convert",
        lambda p: _changed(p, overflw="allow"),
        "field 'arguments.overflw': expected no such field, found \"allow\". Do you mean 'overflow'?",
    ),
    (
        "convert",
        lambda p: {**p, "arguments": {k: v for k, v in p["arguments"].items() if k != "sizes"}},
        "field 'arguments.sizes': expected an object, found nothing",
    ),
    ("layers", lambda p: _tasks(p, "examples", [0, 12]), "field 'tasks[0].examples': expected no such field"),
    ("verify", lambda p: _changed(p, wide=[0, -1]), "field 'arguments.wide[1]': expected an integer of at least 0"),
    ("stats", lambda p: _changed(p, tokens="contents"), "field 'arguments.tokens': expected one of content, all"),
    ("stats", lambda p: _changed(p, layers=[[0, 1 << 70, False]]), "field 'arguments.layers[0][1]': expected"),
    ("stats", lambda p: _changed(p, ignore_labels=[1 << 70]), "field 'arguments.ignore_labels[0]': expected"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_what_is_wrong_is_named(number: int, source: Path, tmp_path: Path) -> None:
    kind, change, said = BROKEN[number]
    made = change(PLANS[kind](source, tmp_path / "t").as_dict())
    _signed(made)
    (tmp_path / "plan.json").write_text(json.dumps(made))
    with pytest.raises(actshard.FormatError) as refused:
        actshard.plan.load(tmp_path / "plan.json")
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"fragments": [["../../../../x", 0, 1]]},
        {"fragments": [["/etc/x", 0, 1]]},
        {"fragments": [["a//b", 0, 1]]},
        {"fragments": [["a", -1, 1]]},
        {"fragments": [["a", 5, 1]]},
        {"fragments": [["a", 0, 1 << 70]]},
        {"fragments": 5},
        {"overflows": "many"},
        {"overflows": -1},
        {"bytes": 1.5},
        {"state": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("begun", [False, True])
def test_results_that_no_task_leaves_are_refused(
    begun: bool, wrong: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    plan = _convert(source, tmp_path)
    for task in range(len(plan)):
        plan.run(task)
    file = plan.book.folder(1) / "result.json"
    good = json.loads(file.read_text())
    file.write_text(json.dumps({**good, "value": {**good["value"], **wrong}}))
    if begun:
        (plan.work / "commit.json").write_text("{}")
    before = _all_of(tmp_path)
    with pytest.raises(actshard.FormatError, match=rf"field 'value\.{next(iter(wrong))}[\[\]0-9]*': expected"):
        plan.commit()
    after = _all_of(tmp_path)
    assert {name: after[name] for name in before} == before
    assert all(".actshard" in name for name in after.keys() - before.keys())
    file.write_text(json.dumps(good))
    plan.commit()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples of 1 to 4 tokens, with values of each kind that a check counts in both tasks."""
    path, rng = tmp_path_factory.mktemp("hostile") / "odd", np.random.default_rng(5)
    rows = [rng.standard_normal((2, 1 + i % 4, 8)).astype(np.float32) for i in range(12)]
    for example in (1, 10):
        rows[example][0, 1, :3], rows[example][1, 0, 5] = np.nan, np.inf
        rows[example + 1][0, 0], rows[example + 1][1, 1] = 0, 2.5
    with actshard.create(path, "zarr", layers=[0, 1], d_model=8) as writer:
        writer.append(rows)
    return path


# Values that a commit cannot compare with anything unless it reads the files, or rows, again.
UNCHECKED: dict[str, list[tuple[str, str]]] = {
    "verify": [
        (
            r"report\.(path|format)",
            "the dataset that the check of the files found: its path may be one below the plan's",
        ),
        (r"report\.checked\.(files|bytes|examples)", "amounts that the check of the files counted"),
        (r"layers\.\d\.(nan|infinite)", "another number of values that is possible in as many rows"),
        (r"layers\.\d\.(nan|infinite|zero|constant)_rows\.1\.\d\.[01]", "another row of the task's examples"),
    ],
    "stats": [],
}


def _near(value: Any) -> list[Any]:
    """Values that are wrong, but not of another type."""
    return [value + 1, value - 1, 10**12] if type(value) is int else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNCHECKED)
def test_any_changed_value_of_a_result_is_refused_in_one_line_or_harmless(kind: str, odd: Path, tmp_path: Path) -> None:
    plan = PLANS[kind](odd, tmp_path)
    for task in range(len(plan)):
        plan.run(task)
    kept, result = tmp_path / "kept", plan.work.with_name(f"{plan.work.name}.json")
    shutil.copytree(plan.work, kept)
    assert len(plan) == 2
    plan.commit()
    expected = json.loads(result.read_text())
    rng, refused, unchecked, tried = random.Random(3), list[str](), set[str](), 0
    for task in range(len(plan)):
        good = json.loads((kept / f"tasks/{task:05}/result.json").read_text())
        for place in _places(good["value"], ("value",)):
            there = good
            for key in place:
                there = there[key]
            for value in [*rng.sample(WRONG, 4), *_near(there)]:
                made = copy.deepcopy(good)
                _put(made, place, value)
                shutil.rmtree(plan.work, ignore_errors=True)
                result.unlink(missing_ok=True)
                shutil.copytree(kept, plan.work)
                (plan.book.folder(task) / "result.json").write_text(json.dumps(made))
                tried += 1
                try:
                    plan.commit()
                except actshard.ActshardError as error:
                    refused.append(str(error))
                    continue
                if json.loads(result.read_text()) == expected:
                    continue
                name = ".".join(map(str, place[1:]))
                known = [pattern for pattern, _ in UNCHECKED[kind] if re.fullmatch(pattern, name)]
                assert known, f"{name} = {value!r} was accepted, and changed the result"
                unchecked.update(known)
    assert unchecked == {pattern for pattern, _ in UNCHECKED[kind]}, "no pattern is obsolete"
    assert len(refused) > 0.8 * tried, f"{len(refused)} of {tried}"
    assert not [text for text in refused if len(text.splitlines()) > 1]


def _scan(task: int, **changed: Any) -> Callable[[Path], None]:
    """Changes the scan of the first layer in a task's result."""

    def change(work: Path) -> None:
        file = work / f"tasks/{task:05}/result.json"
        made = json.loads(file.read_text())
        made["value"]["layers"][0].update(changed)
        file.write_text(json.dumps(made))

    return change


def _value(task: int, **changed: Any) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        file = work / f"tasks/{task:05}/result.json"
        made = json.loads(file.read_text())
        made["value"].update(changed)
        file.write_text(json.dumps(made))

    return change


def _node(at: int, value: Any) -> Callable[[Path], None]:
    """Changes a number of the first node of task 0."""

    def change(work: Path) -> None:
        file = work / "tasks/00000/result.json"
        made = json.loads(file.read_text())
        made["value"]["layers"][0]["nodes"][0][at] = value
        file.write_text(json.dumps(made))

    return change


def _column(name: str, value: float) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        sums = np.load(work / "tasks/00000/sums.npy")
        sums[name][0, 0] = value
        np.save(work / "tasks/00000/sums.npy", sums)

    return change


def _summary(name: str, at: int, value: Any) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        file = work / "tasks/00000/summaries.json"
        size, made = file.stat().st_size, json.loads(file.read_text())
        made["nodes"][0][name][0][at] = value
        file.write_text(json.dumps(made, separators=(",", ":")).ljust(size))  # only sizes of files are compared

    return change


IMPOSSIBLE: list[tuple[str, Callable[[Path], None], str]] = [
    ("verify", _scan(0, nan=10**12), "task 0: layer 0: nan: expected 1 to 8 values in 1 row, found 1,000,000,000,000"),
    ("verify", _scan(0, nan=0), "layer 0: nan: expected 1 to 8 values in 1 row, found 0"),
    ("verify", _scan(1, infinite=1), "layer 0: infinite: expected 0, found 1"),
    ("verify", _scan(0, nan_rows=[1, [[10**9, 10**9]]]), "nan_rows: expected examples from 0 to 5, found"),
    ("verify", _scan(0, nan_rows=[1, [[7, 0]]]), "nan_rows: expected examples from 0 to 5, found"),
    ("verify", _scan(0, nan_rows=[1, [[1, 2]]]), "nan_rows: expected tokens below 2 in example 1, found"),
    ("verify", _scan(0, nan_rows=[1, []]), "nan_rows: expected 1 place, found"),
    ("verify", _scan(0, nan_rows=[2, [[1, 1], [1, 1]]]), "nan_rows: expected ascending places, found"),
    (
        "verify",
        _scan(0, rows=10**12, nan_rows=[10**11, [[1, 1]]]),
        "layer 0: rows: expected 13, found 1,000,000,000,000",
    ),
    ("verify", _scan(0, rows=1), "layer 0: rows: expected 13, found 1; "),
    ("verify", _scan(0, dtype="banana"), 'layer 0: dtype: expected float32, found "banana"'),
    ("verify", _scan(0, extra=1), "task 0: field 'value.layers[0].extra': expected no such field, found 1"),
    (
        "verify",
        _value(0, layers=[{"error": {"error": "FormatError"}}] * 2),
        "task 0: field 'value.layers[0].error.detail': expected a string, found nothing",
    ),
    ("verify", _value(0, values=False), "values: expected true, because the report has no error, found false"),
    ("verify", _value(0, report={}), "report: expected the report of a check, found"),
    ("verify", _value(1, units=7), "task 1: units: expected 2, found 7"),
    ("verify", _value(1, bytes=7), "task 1: bytes: expected"),
    ("stats", _node(2, 29), "task 0: rows of all layers: expected 30, found 29"),
    ("stats", _node(2, 10**12), "task 0: layer 0: rows from leaf 0 on: expected 1 to 65,536, found 1,000,000,000,000"),
    ("stats", _node(1, 3), "task 0: layer 0: nodes: expected first leaves and levels"),
    ("stats", _node(3, (1e9).hex()), "expected the sum of norms by position, found"),
    ("stats", _node(4, 2), "expected as many norms in bins, found"),
    ("stats", _column("nan", 10**12), "expected as many finite, NaN and infinite values as rows, found"),
    ("stats", _column("zeros", 31), "expected at most as many zeros as finite values, found"),
    ("stats", _column("min", 5.0), "expected a smallest value of at most the largest, found"),
    ("stats", _summary("norm_bins", 1, 99), "expected as many norms in bins, found"),
    ("stats", _summary("largest_rows", 1, 99), "layer 0: largest: expected examples below 12, found"),
    ("stats", _summary("largest_rows", 2, 9), "layer 0: largest: expected tokens below "),
    ("stats", _summary("largest_columns", 1, (9.0).hex()), "expected the largest columns, found"),
    ("stats", _value(0, layers=[]), "task 0: layers: expected sums of the layers"),
]


@pytest.mark.parametrize("number", range(len(IMPOSSIBLE)))
def test_impossible_results_are_refused_and_their_task_can_be_repeated(number: int, odd: Path, tmp_path: Path) -> None:
    kind, change, said = IMPOSSIBLE[number]
    plan = PLANS[kind](odd, tmp_path)
    for task in range(len(plan)):
        plan.run(task)
    shutil.copytree(plan.work, tmp_path / "kept")
    change(plan.work)
    with pytest.raises(actshard.FormatError) as refused:
        plan.commit()
    text = str(refused.value)
    assert said in text
    assert text.endswith(", and run it again")
    task = int(text.partition("remove the folder of task ")[2].partition(",")[0])
    assert text.startswith(f"{plan.book.folder(task)}: task {task}: ")
    shutil.rmtree(plan.book.folder(task))
    plan.run(task)
    made = plan.commit()
    if kind == "verify":
        assert made == actshard.verify(odd, deep=True)
    else:
        store = actshard.open(odd)
        assert all(made[layer].as_plain() == store.stats(layer).as_plain() for layer in store.layers)


@pytest.mark.parametrize("cheap", [True, False])
def test_layers_with_other_rows_are_compared_with_their_own(
    cheap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 3 lacks example 1, and has other lengths. Where counting tokens would read all shards, rows are compared together."""
    rng = np.random.default_rng(0)
    shards = [
        {
            "layer_0": [item(s, rng.standard_normal((2, 4)).astype(np.float32)) for s in ids],
            "layer_3": [item(s, rng.standard_normal((3 + s, 4)).astype(np.float32)) for s in ids if s != 1],
        }
        for ids in ([0, 1], [2, 3])
    ]
    path = write(tmp_path / "d", shards)
    expected = actshard.verify(path, deep=True)
    assert expected.checked["rows"] == 8 + 3 + 5 + 6
    if not cheap:
        monkeypatch.setattr(pickle_read, "CHEAP_BYTES", -1)
    plan = actshard.plan.verify(path, tasks=2, work=tmp_path / "w")
    assert actshard.open(path).contents.counts_are_cheap is cheap
    for task in range(2):
        plan.run(task)
    shutil.copytree(plan.work, tmp_path / "kept")
    for rows in (0, 3, 5, 10**12):
        _scan(0, rows=rows)(plan.work)
        where = "layer 0: rows: expected 4" if cheap else "rows of all layers: expected 7"
        with pytest.raises(actshard.FormatError, match=f"task 0: {where}, found"):
            plan.commit()
    _scan(0, rows=4)(plan.work)
    assert plan.commit() == expected


def test_a_working_folder_of_others_is_neither_used_nor_removed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    plan = actshard.plan.stats(source, tasks=1, work=tmp_path / "mine")
    with pytest.raises(
        actshard.ExistsError, match=r"mine: expected a new or empty working folder, .*'thesis.tex'; pass another work="
    ):
        plan.run(0)
    plan = actshard.plan.stats(source, tasks=1, work=tmp_path / "new")
    plan.run(0)
    (tmp_path / "new" / "thesis.tex").write_text("years of work")
    plan.commit()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["thesis.tex"], "what came later stays, too"


def test_two_plans_do_not_share_a_working_folder(source: Path, tmp_path: Path) -> None:
    first = actshard.plan.stats(source, tasks=1, work=tmp_path / "w")
    first.run(0)
    second = actshard.plan.stats(source, 0, tasks=1, work=tmp_path / "w")
    for call in (lambda: second.run(0), second.commit, second.status):
        with pytest.raises(actshard.ExistsError, match=f"working folder of another plan, {first.id[:8]}"):
            call()
    assert set(first.commit()) == {0, 1}


@pytest.mark.parametrize("verb", ["verify", "stats"])
def test_a_result_replaces_no_file_of_others(verb: str, source: Path, tmp_path: Path) -> None:
    make = getattr(actshard.plan, verb)
    plan = make(source, tasks=1, work=tmp_path / "package")
    plan.run(0)
    for text in ('{"name": "of others"}', "[1]"):
        (tmp_path / "package.json").write_text(text)
        with pytest.raises(actshard.ExistsError, match=r"package\.json: expected no file"):
            plan.commit()
        with pytest.raises(actshard.ExistsError, match=r"package\.json: expected no file"):
            make(source, tasks=1, work=tmp_path / "package")
        assert (tmp_path / "package.json").read_text() == text
    (tmp_path / "package.json").unlink()
    plan.commit()


@pytest.mark.parametrize(
    ("verb", "wrong", "match"),
    [
        ("convert", {"bytes": "many"}, r"field 'value.bytes': expected .*; remove the folder of task 1"),
        ("convert", {"units": -1}, "field 'value.units': expected"),
        ("convert", {"tokens": [-1] * 7}, "task 1: expected"),
        (
            "convert",
            {"fragments": [["\ud800", 0, 1]]},
            r"field 'value.fragments\[0\]\[0\]': expected the name of a file",
        ),
        ("verify", {"layers": []}, "task 1: layers: expected the scans of 2 layers, found"),
        ("verify", {"layers": {}}, "task 1: field 'value.layers': expected a list, found {}"),
        (
            "verify",
            {"layers": [{"rows": -1}] * 2},
            r"task 1: field 'value.layers\[0\].dtype': expected a string, found nothing",
        ),
        ("stage", {"fetched": "x"}, "field 'value.fetched'"),
    ],
    ids=str,
)
def test_results_of_any_verb_are_checked(
    verb: str, wrong: dict[str, Any], match: str, source: Path, tmp_path: Path
) -> None:
    plan = {
        "convert": lambda: actshard.plan.convert(source, tmp_path / "d", "saev", tasks=2, shard_bytes=100),
        "verify": lambda: actshard.plan.verify(source, tasks=2, work=tmp_path / "w"),
        "stage": lambda: actshard.plan.stage(source, tmp_path / "d", tasks=2),
    }[verb]()
    for task in range(len(plan)):
        plan.run(task)
    file = plan.book.folder(1) / "result.json"
    good = json.loads(file.read_text())
    if "tokens" in wrong:
        first, end = plan.tasks[1]["examples"]
        wrong = {"tokens": [-1] * (end - first)}
    file.write_text(json.dumps({**good, "value": {**good["value"], **wrong}}))
    before = _all_of(tmp_path)
    with pytest.raises(actshard.FormatError, match=match):
        plan.commit()
    assert {name: value for name, value in _all_of(tmp_path).items() if name in before} == before
    file.write_text(json.dumps(good))
    plan.commit()


@pytest.mark.parametrize("seconds", [None, "x", -1, [], float("nan"), 1 << 70])
def test_times_of_results_are_checked(seconds: Any, source: Path, tmp_path: Path) -> None:
    plan = _convert(source, tmp_path)
    plan.run(0)
    file = plan.book.folder(0) / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": seconds}))
    for call in (plan.status, plan.commit):
        with pytest.raises(
            actshard.FormatError, match=r"field 'seconds': expected a number .*; remove the folder of task 0"
        ):
            call()


@pytest.mark.parametrize("name", ["bytes", "files", "read", "memory", "scratch", "exact"])
def test_predictions_of_a_file_are_checked(name: str, source: Path, tmp_path: Path) -> None:
    made = _convert(source, tmp_path).as_dict()
    file = tmp_path / "plan.json"
    for wrong in ("x", -1, None, 1.5, []):
        file.write_text(json.dumps({**made, "predicted": {**made["predicted"], name: wrong}}))
        with pytest.raises(actshard.FormatError, match=f"field 'predicted.{name}'"):
            actshard.plan.load(file)


def test_processes_may_save_a_plan_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, file, fsync = _convert(source, tmp_path), tmp_path / "plan.json", os.fsync
    others: list[Path] = []

    def meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        if not others:  # before this call renames its file, another writes the same
            others.append(file)
            plan.save(file)
            assert actshard.plan.load(file).id == plan.id

    monkeypatch.setattr(os, "fsync", meanwhile)
    plan.save(file)
    assert others
    assert actshard.plan.load(file).id == plan.id
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_nobody_could_load_is_not_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _convert(source, tmp_path)
    monkeypatch.setattr(data, "MAX_VALUES", 50)
    for call in (lambda: plan.save(tmp_path / "plan.json"), lambda: actshard.run(plan, workers=2)):
        with pytest.raises(
            actshard.ArgumentError,
            match=r"expected a plan of at most .* 50 values, .*: plan fewer files or examples at a time",
        ):
            call()
    assert not list(tmp_path.iterdir())


def test_a_plan_that_cannot_be_saved_names_its_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    plan = _convert(source, tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(actshard.DiskFullError, match=r"/plan\.json: "):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())
