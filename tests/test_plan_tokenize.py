"""Guarantee: tasks build a token cache with the bytes of ``build_cache``, for any number of tasks, in any order, after any kill."""

from __future__ import annotations

import base64
import gzip
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.conftest import BUILDS, GOLDEN, GPT2, LLAMA, write_lines

import actshard
from actshard import tokens
from actshard.plan import Plan, load, tokenize
from actshard.plan.data import identity
from actshard.reading.inputs import Input
from actshard.tokens import estimating, pieces
from actshard.tokens.processing import processor_of

IDS = {"type": "prebuilt"}
WAYS: list[dict[str, Any]] = [
    {},
    {"storage": "lz4"},
    {"layout": "sharded"},
    {"layout": "sharded", "storage": "lz4"},
    {"keep_shards": True},
]


def digests(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(autouse=True)
def _sampled_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts no process for each plan, except in tests of predictions."""
    if "predict" in request.node.name:
        return

    def sampled(recipe: Any, tokenizer: Any, now: Any) -> estimating.Tokenized:
        process = processor_of(recipe.format, tokenizer, recipe.options)
        with tempfile.TemporaryDirectory() as folder:
            return estimating._tokenize(recipe.sources, process, Path(folder), recipe.storage)

    monkeypatch.setattr(estimating, "tokenized", sampled)


def same_bytes(found: Path, wanted: Path) -> None:
    ours, theirs = digests(found), digests(wanted)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []


def run(plan: Plan, order: Sequence[int] | None = None) -> tokens.TokenCache:
    for task in range(len(plan)) if order is None else order:
        plan.run(task)
    cache: tokens.TokenCache = plan.commit()
    return cache


def shuffled(plan: Plan) -> list[int]:
    order = list(range(len(plan)))
    random.Random(0).shuffle(order)
    return order


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no eos token")
@pytest.mark.parametrize("variant", BUILDS)
def test_tasks_write_what_one_process_writes(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    files, tokenizer, form = BUILDS[variant]
    sources = [f"{variant}/{file}" for file in files]
    counts = iter([1, 2, 3, 7, 5])
    for number, how in enumerate(WAYS):
        wanted, found = tmp_path / f"one{number}", tmp_path / f"tasks{number}"
        tokens.build_cache(sources, wanted, tokenizer, form, jobs=1, **how)
        plan = tokenize(sources, found, tokenizer, form, tasks=next(counts), **how)
        cache = run(plan, shuffled(plan))
        same_bytes(found, wanted)
        assert cache.ledger == tokens.open_cache(wanted).ledger


LINE = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), max_size=9).map(lambda ids: json.dumps({"input_ids": ids}).encode()),
    st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=40).map(
        lambda text: json.dumps({"input_ids": [1], "é": text}, ensure_ascii=False).encode()
    ),
    st.sampled_from(
        [b"", b" ", b"{", b"[1]", b'{"input_ids": [-1]}', b'\xff{"input_ids": []}', "é☃𝄞".encode(), b"a\rb"]
    ),
    st.integers(200, 3000).map(lambda n: json.dumps({"input_ids": [7] * n}).encode()),
)
FILE = st.builds(
    lambda lines, breaks, bom, last: (
        (b"\xef\xbb\xbf" if bom else b"") + b"".join(a + b for a, b in zip(lines, breaks, strict=False)) + last
    ),
    st.lists(LINE, max_size=12),
    st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=12, max_size=12),
    st.booleans(),
    st.one_of(st.just(b""), LINE),
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(FILE, min_size=1, max_size=3), st.sampled_from(WAYS), st.sampled_from([1, 2, 3, 7, 100]))
def test_lines_of_any_shape_give_the_bytes_of_one_process(
    tmp_path_factory: pytest.TempPathFactory, files: list[bytes], how: dict[str, Any], tasks: int
) -> None:
    """CRLF, empty lines, byte order marks, lines longer than a range, characters that a range cuts, no last line break."""
    folder = tmp_path_factory.mktemp("lines")
    for i, data in enumerate(files):
        (folder / f"{i}.jsonl").write_bytes(data)
    with warnings.catch_warnings(record=True) as one:
        warnings.simplefilter("always")
        tokens.build_cache(f"{folder}/*.jsonl", folder / "one", None, IDS, on_error="skip", jobs=1, **how)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        run(tokenize(f"{folder}/*.jsonl", folder / "tasks", None, IDS, on_error="skip", tasks=tasks, **how))
    same_bytes(folder / "tasks", folder / "one")
    told = [
        [str(w.message).replace(str(folder / name), "") for w in heard]
        for name, heard in (("one", one), ("tasks", ours))
    ]
    assert told[0] == told[1]
    shutil.rmtree(folder)


@settings(max_examples=200)
@given(FILE, st.lists(st.integers(0, 400), max_size=6))
def test_every_line_belongs_to_one_range(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ranges.jsonl"
    path.write_bytes(data)
    bounds = sorted({0, len(data), *(cut * len(data) // 400 for cut in cuts)})
    found = []
    for first, stop in itertools.pairwise(bounds):
        source = pieces.LineRange(path, "s", None, first, stop)
        own = list(source.lines())
        assert all(first <= begin < stop and data[begin : begin + len(line)] == line for _, begin, line in own)
        assert [number for number, _, _ in own] == list(range(1, len(own) + 1))
        found += [line for _, _, line in own]
    assert found == data.splitlines(keepends=True) if b"\r" not in data else b"".join(found) == data
    assert all(line.endswith(b"\n") for line in found[:-1])


def stored(root: Path) -> tuple[int, int]:
    sizes = [p.stat().st_size for p in root.rglob("*") if p.is_file()]
    return sum(sizes), len(sizes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no eos token")
@pytest.mark.parametrize("variant", BUILDS)
def test_bytes_and_files_of_small_sources_are_predicted_exactly(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(GOLDEN)
    files, tokenizer, form = BUILDS[variant]
    sources = [f"{variant}/{file}" for file in files]
    # Ways whose predictions have nothing in common; the second is for several shards.
    ways: list[dict[str, Any]] = [{"keep_shards": True}, {"layout": "sharded", "storage": "lz4"}]
    for number, how in enumerate(ways[: len(files)]):
        plan = tokenize(sources, tmp_path / f"{number}", tokenizer, form, tasks=2, **how)
        tokens.build_cache(sources, tmp_path / f"{number}", tokenizer, form, jobs=1, **how)
        size, files_found = stored(tmp_path / f"{number}")
        assert (plan.predicted.files, plan.predicted.exact) == (files_found, number == 0)
        assert abs(plan.predicted.bytes - size) <= (0 if number == 0 else 0.01 * size)
        assert plan.predicted.read == sum(Path(source).stat().st_size for source in sources)


def _texts(path: Path, size: int, seed: int) -> Path:
    """Texts of very different lengths: a sample of ranges meets few of the long ones."""
    chosen = random.Random(seed)
    words = [f"{chosen.randrange(10**9):x}"[: chosen.randrange(1, 9)] for _ in range(999)]
    with path.open("w") as file:
        while file.tell() < size:
            count = int(chosen.lognormvariate(4, 1.2)) + 1
            file.write(json.dumps({"text": " ".join(chosen.choices(words, k=count))}) + "\n")
    return path


@pytest.mark.slow
def test_a_sample_predicts_large_sources(tmp_path: Path) -> None:
    source = _texts(tmp_path / "a.jsonl", 4 << 20, 0)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(_texts(tmp_path / "b", 2 << 20, 1).read_bytes()))
    _parquet(tmp_path / "c.parquet", 3000)
    plan = tokenize([source, tmp_path / "b.jsonl.gz", tmp_path / "c.parquet"], tmp_path / "c", GOLDEN / GPT2, tasks=2)
    plan.save(tmp_path / "plan.json")
    code = """
        import sys
        from actshard.plan import load
        load(sys.argv[1]).run(1)  # the task that reads Parquet: it needs most
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
    """
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not plan.predicted.exact
    assert plan.predicted.memory == pytest.approx(int(found.stdout) << 10, rel=0.2)
    run(plan)
    size, files = stored(tmp_path / "c")
    assert plan.predicted.files == files
    assert plan.predicted.bytes == pytest.approx(size, rel=0.01)


def _parquet(path: Path, rows: int) -> None:
    text = [f"row {i} " * (i % 40) for i in range(rows)]
    pq.write_table(pa.table({"text": text}), path, row_group_size=700, compression="none", use_dictionary=False)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", [{"input_ids": list(range(i % 50))} for i in range(2000)])


def test_tasks_are_balanced(tmp_path: Path) -> None:
    random_sizes = random.Random(1)
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_bytes(b"x" * random_sizes.randrange(1, 10**6 if i % 9 else 10**7))
    for tasks in (2, 7, 64, 500):
        made = [task["bytes"] for task in tokenize(f"{tmp_path}/*.jsonl", tmp_path / "c", None, IDS, tasks=tasks).tasks]
        assert len(made) == tasks
        assert max(made) <= 1.05 * sum(made) / tasks
        assert min(made) >= 0.95 * sum(made) / tasks


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(["any", "groups", None])), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_pieces_cover_every_byte_once(files: list[tuple[int, str | None]], tasks: int) -> None:
    how = [
        pieces.Divisible(
            n, tuple(sorted({0, n // 3, n})) if kind == "groups" and n > 3 else "any" if kind == "any" else None
        )
        for n, kind in files
    ]
    made = pieces.divide(how, tasks)
    assert 1 <= len(made) <= tasks
    by_source: list[list[pieces.SourcePart]] = [[] for _ in how]
    for piece in sorted((p for task in made for p in task), key=lambda p: (p.source, p.first)):
        by_source[piece.source].append(piece)
    for source, found in zip(how, by_source, strict=True):
        assert [p.first for p in found] == [0, *(p.stop for p in found[:-1])]
        assert found[-1].stop == source.bytes
        assert source.borders == "any" or {p.first for p in found} <= set(source.borders or (0,))


def test_files_that_cannot_be_cut_are_dealt_out_and_others_fill_up() -> None:
    how = [pieces.Divisible(n) for n in (90, 10, 80, 20, 70, 30)] + [pieces.Divisible(300, "any")]
    made = pieces.divide(how, 6)
    assert [sum(p.stop - p.first for p in task) for task in made] == [100] * 6


def test_parquet_is_cut_by_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actshard.plan.tokenizing._PIECE", 1)
    rows = [{"input_ids": [i] * (i % 7), "other": "x"} for i in range(500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=60)
    rows[333]["input_ids"] = [-1]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=60)
    tokens.build_cache(tmp_path / "a.parquet", tmp_path / "one", None, IDS)
    plan = tokenize(tmp_path / "a.parquet", tmp_path / "tasks", None, IDS, tasks=5)
    assert len(plan) == 5
    run(plan)
    same_bytes(tmp_path / "tasks", tmp_path / "one")
    plan = tokenize(tmp_path / "b.parquet", tmp_path / "bad", None, IDS, tasks=5)
    with pytest.raises(actshard.TasksFailedError, match=r"b\.parquet: row 334: "):
        actshard.run(plan, keep_going=True)


def test_a_bad_record_names_the_file_and_its_place(lines: Path, tmp_path: Path) -> None:
    data = lines.read_bytes()
    at = data.index(b"\n", len(data) // 2) + 1
    lines.write_bytes(data[:at] + b"x" + data[at + 1 :])
    plan = tokenize(lines, tmp_path / "c", None, IDS, tasks=4)
    with pytest.raises(actshard.TasksFailedError) as failed:
        actshard.run(plan, keep_going=True)
    (error,) = failed.value.errors.values()
    assert str(error).startswith(f"{lines}: line at byte {at}: expected a JSON object")
    lines.write_bytes(b"x" + data[1:])
    plan = tokenize(lines, tmp_path / "d", None, IDS, tasks=4)
    with pytest.raises(actshard.FormatError, match=r"a\.jsonl: line 1: expected a JSON object"):
        plan.run(0)


def test_a_changed_source_is_refused(lines: Path, tmp_path: Path) -> None:
    plan = tokenize(lines, tmp_path / "c", None, IDS, tasks=3)
    plan.run(0)
    os.utime(lines, ns=(1, 1))
    for call in (lambda: plan.run(1), plan.commit):
        with pytest.raises(actshard.ActshardError) as refused:
            call()
        assert isinstance(refused.value, actshard.ChangedInputError | actshard.UnfinishedError)
    with pytest.raises(actshard.ChangedInputError, match=r"a\.jsonl: was written again since the plan was made"):
        plan.run(2)


def test_a_changed_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / GPT2, tmp_path / "tokenizer")
    source = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    plan = tokenize(source, tmp_path / "c", folder, tasks=2)
    plan.run(0)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(actshard.ChangedInputError, match=r"chat_template\.jinja: expected no file"):
        plan.run(1)
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer.json"
    before, text = file.stat(), file.read_text()
    file.write_text(text.replace('"the"', '"eht"', 1) if '"the"' in text else text.replace("a", "b", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(actshard.ActshardError) as refused:
        plan.run(1)
    assert isinstance(refused.value, actshard.ChangedInputError | actshard.FormatError)


def test_tokenizers_travel_by_path_or_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(50)])
    monkeypatch.chdir(GOLDEN)
    given: list[Any] = [GPT2, Path(GPT2) / "tokenizer.json", tokens.load_tokenizer(LLAMA, bos_token="a"), "passthrough"]
    given[3] = tokens.load_tokenizer("passthrough", vocab_size=100)
    numbers = write_lines(tmp_path / "b.jsonl", [{"text": "1 2 3"}] * 9)
    for i, tokenizer in enumerate(given):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = numbers if i == 3 else source
            tokens.build_cache(path, tmp_path / f"one{i}", tokenizer)
            plan = tokenize(path, tmp_path / f"tasks{i}", tokenizer, tasks=3)
        plan.save(tmp_path / "plan.json")
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir(tmp_path)
            run(load(tmp_path / "plan.json"))
        same_bytes(tmp_path / f"tasks{i}", tmp_path / f"one{i}")


def test_row_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match="expected files"):
        tokenize([tokens.RowSource("a", list)], tmp_path / "c", None, IDS)
    with pytest.raises(actshard.ArgumentError, match="needs a tokenizer"):
        tokenize(write_lines(tmp_path / "a.jsonl", []), tmp_path / "c")


def test_templates_that_tell_the_time_have_that_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    form = {"type": "chat", "chat_template": template}
    source = write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(9)])
    plan = tokenize(source, tmp_path / "c", GOLDEN / LLAMA, form, tasks=3)
    at = time.struct_time(tuple(plan.arguments["now"]))
    monkeypatch.setattr("actshard.tokens.building.local_now", lambda: plan.arguments["now"])
    cache = run(plan)
    tokens.build_cache(source, tmp_path / "one", GOLDEN / LLAMA, form)
    same_bytes(tmp_path / "c", tmp_path / "one")
    text = tokens.load_tokenizer(GOLDEN / LLAMA).decode(cache[0]["input_ids"])
    assert time.strftime("%Y-%m-%d %H:%M:%S", at) in text


def test_an_unfinished_plan_is_told_and_not_mixed(lines: Path, tmp_path: Path) -> None:
    plan = tokenize(lines, tmp_path / "c", None, IDS, tasks=3)
    plan.run(1)
    for call in (
        lambda: tokens.open_cache(tmp_path / "c"),
        lambda: tokens.build_cache(lines, tmp_path / "c", None, IDS),
    ):
        with pytest.raises(
            actshard.UnfinishedError, match=r"plan that is not committed: see actshard status .*plan\.json"
        ):
            call()
    other = tokenize(lines, tmp_path / "c", None, IDS, tasks=2)
    assert other.work != plan.work
    run(other)
    with pytest.raises(actshard.ExistsError, match="already contains this cache"):
        tokenize(lines, tmp_path / "c", None, IDS)
    with pytest.raises(actshard.ExistsError, match="with other settings"):
        tokenize(lines, tmp_path / "c", None, IDS, on_error="skip")
    assert len(run(plan)) == 2000  # the same cache


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets a number of renames pass, then raises."""
    left = [10**9]
    rename = Path.rename

    def renamed(self: Path, to: Any) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", renamed)

    def set_left(n: int) -> None:
        left[0] = n

    return set_left


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_commit_that_is_killed_goes_on(how: dict[str, Any], tmp_path: Path, killing: Callable[[int], None]) -> None:
    for i in range(3):
        write_lines(tmp_path / f"{i}.jsonl", [{"input_ids": [i] * 9}] * (40 * i))
    tokens.build_cache(f"{tmp_path}/*.jsonl", tmp_path / "one", None, IDS, jobs=1, **how)
    for kill in range(12):
        out = tmp_path / f"tasks{kill}"
        plan = tokenize(f"{tmp_path}/*.jsonl", out, None, IDS, tasks=4, **how)
        for task in range(len(plan)):
            plan.run(task)
        killing(kill)
        try:
            plan.commit()
        except Killed:
            with pytest.raises(actshard.UnfinishedError):
                tokens.open_cache(out)
        killing(10**9)
        plan.commit()
        assert len(plan.commit()) == 120  # again
        same_bytes(out, tmp_path / "one")


def test_results_of_a_killed_task_are_written_again(
    lines: Path, tmp_path: Path, killing: Callable[[int], None]
) -> None:
    tokens.build_cache(lines, tmp_path / "one", None, IDS, layout="sharded")
    plan = tokenize(lines, tmp_path / "c", None, IDS, tasks=3, layout="sharded")
    for task in range(3):
        killing(0)
        with pytest.raises(Killed):
            plan.run(task)
        killing(10**9)
        plan.run(task)
        before = digests(plan.book.folder(task))
        plan.run(task)  # again: nothing is done
        assert digests(plan.book.folder(task)) == before
    plan.commit()
    same_bytes(tmp_path / "c", tmp_path / "one")


def test_two_processes_may_run_a_task_at_once(lines: Path, tmp_path: Path) -> None:
    import threading

    tokens.build_cache(lines, tmp_path / "one", None, IDS)
    plan = tokenize(lines, tmp_path / "c", None, IDS, tasks=3)
    both = [threading.Thread(target=lambda: [plan.run(task) for task in range(3)]) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    plan.commit()
    same_bytes(tmp_path / "c", tmp_path / "one")
    assert np.array_equal(tokens.open_cache(tmp_path / "c")[49]["input_ids"], np.arange(49))


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a shard outside": (lambda p: p["arguments"]["sources"][0].__setitem__(1, "../../x"), "expected a shard's name"),
    "another file": (
        lambda p: p["arguments"]["sources"][0].__setitem__(0, "/etc/passwd"),
        "expected the path of input 0",
    ),
    "a relative path": (lambda p: p["arguments"].update(out="c"), "field 'arguments.out': expected an absolute path"),
    "a field outside": (lambda p: p["arguments"].update(fields={"../x": "int32"}), "expected names of fields"),
    "no dtype": (
        lambda p: p["arguments"].update(fields={"x": "object"}),
        "field 'arguments.fields.x': expected one of int64",
    ),
    "a hole": (lambda p: p["tasks"].pop(1), "without holes and overlaps"),
    "an overlap": (lambda p: p["tasks"].append(p["tasks"][0]), "without holes and overlaps"),
    "a range of nothing": (
        lambda p: p["tasks"][0].update(pieces=[[0, 5, 2]]),
        "pieces[0]': expected a piece of a source",
    ),
    "an unknown source": (lambda p: p["tasks"][0].update(pieces=[[9]]), "expected pieces of 1 source, found [9]"),
    "a large number": (lambda p: p["tasks"][0].update(pieces=[[0, 0, 1 << 70]]), "pieces[0][2]': expected an integer"),
    "an unknown layout": (lambda p: p["arguments"].update(layout="x"), "expected one of consolidated, sharded"),
    "no time": (lambda p: p["arguments"].update(now=[1]), "expected a time of 11 values"),
    "a switch": (lambda p: p["arguments"].update(skip=1), "field 'arguments.skip': expected"),
    "an option": (
        lambda p: p["arguments"]["options"].update(dtype="int8"),
        "field 'arguments.options.dtype': expected one of",
    ),
    "two tokenizers": (
        lambda p: p["arguments"].update(tokenizer={"name": "", "digest": "", "path": "/a", "packed": ""}),
        "packed tokenizer",
    ),
    "an unknown format": (lambda p: p["arguments"].update(format={"type": "x"}), "unknown format 'x'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_that_a_program_changed_is_refused(what: str, lines: Path, tmp_path: Path) -> None:
    made = tokenize(lines, tmp_path / "c", None, IDS, tasks=3).as_dict()
    change, said = WRONG[what]
    change(made)
    inputs = [Input(*each) for each in made["inputs"]]
    made["id"] = identity(made["verb"], made["arguments"], inputs, made["tasks"])
    (tmp_path / "plan.json").write_text(json.dumps(made))
    with pytest.raises(actshard.ActshardError) as refused:
        load(tmp_path / "plan.json")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "found", [[], [[1, [1], 0]], [[1, [-1], 0, []]], [[1, [1], 0, [[1, "x"]]]], [[1, [1, 2], 0, []]]], ids=str
)
def test_results_that_count_nothing_are_refused(found: Any, lines: Path, tmp_path: Path) -> None:
    plan = tokenize(lines, tmp_path / "c", None, IDS, tasks=2)
    for task in range(2):
        plan.run(task)
    file = plan.book.folder(1) / "result.json"
    record = json.loads(file.read_text())
    record["value"]["pieces"] = found
    file.write_text(json.dumps(record))
    with pytest.raises(actshard.FormatError, match=r"pieces.*: expected .*remove the folder of task 1"):
        plan.commit()


def test_a_packed_tokenizer_is_not_trusted(tmp_path: Path) -> None:
    tokenizing = importlib.import_module("actshard.plan.tokenizing")
    bomb = zlib.compress(b"[" * 10**6)
    for packed in ("x", base64.b64encode(b"x").decode(), base64.b64encode(bomb).decode()):
        with pytest.raises(actshard.FormatError, match=r"tokenizer\.packed': expected a tokenizer"):
            tokenizing._unpacked(packed)
