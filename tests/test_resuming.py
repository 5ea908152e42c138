"""Guarantees of create() when resumed: after a kill, a failure or a power failure, or while another writer runs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base import work
from actshard.base.request import RECORD
from actshard.writing.sink import Sink
from conftest import refuses
from waiting import PATIENCE

MERGED = ("saev", "lmprobe", "zarr", "pickle")
FORMATS = (*MERGED, "hf_arrow", "npy", "safetensors")
LAYERS, WIDTH = [3, 7], 8


def create(path: Path, format: str, **own: Any) -> actshard.Writer:
    return actshard.create(path, format, layers=LAYERS, d_model=WIDTH, **own)


def examples(lengths: list[int], first: int = 0) -> list[np.ndarray]:
    return [np.full((2, n, WIDTH), first + i, np.float32) for i, n in enumerate(lengths)]


def check(path: Path, wanted: list[np.ndarray]) -> None:
    store = actshard.open(path)
    assert len(store) == len(wanted)
    for e, example in enumerate(wanted):
        for k, layer in enumerate(LAYERS):
            assert np.array_equal(store.sequence(e, layer), example[k])
    report = actshard.verify(path)
    assert report.ok, report.findings


def lengths(format: str, *wanted: int) -> list[int]:
    return [4] * len(wanted) if format == "saev" else list(wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_longer_and_shorter_examples_follow_after_a_resume(tmp_path: Path, format: str) -> None:
    """With default options: settings determined by the first examples are kept."""
    first, second, third = (examples(lengths(format, *n), 10 * i) for i, n in enumerate([(10, 9), (30, 2), (1, 50)]))
    writer = create(tmp_path / "d", format)
    for some in (first, second, third):
        writer.append(some)
        writer.flush()
        writer.abort()
        writer = create(tmp_path / "d", format, resume=True)
    writer.close()
    check(writer.path, [*first, *second, *third])


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_written_and_not_counted_leaves_no_trace(tmp_path: Path, format: str) -> None:
    """The next writer may append other examples than those that were lost."""
    writer = create(tmp_path / "d", format)
    writer.append(examples(lengths(format, 3, 2)))
    writer.flush()
    writer.append(examples(lengths(format, 6, 40, 5), 50))
    journal = writer.path / ".actshard/journal.jsonl"
    before = journal.read_bytes()
    writer.flush()
    writer.abort()
    journal.write_bytes(before)
    writer = create(tmp_path / "d", format, resume=True)
    assert writer.committed == 2
    writer.append(examples(lengths(format, 4, 0, 1), 20))
    writer.close()
    check(writer.path, [*examples(lengths(format, 3, 2)), *examples(lengths(format, 4, 0, 1), 20)])
    assert actshard.verify(writer.path, deep=True).codes() <= {
        "zero-token-example", "constant-row", "zero-row", "constant-column", "zero-column", "zero-example", "same-examples",
    } | {f.code for f in actshard.verify(writer.path, deep=True).findings if f.severity != "error"}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_call_resumes(tmp_path: Path, format: str) -> None:
    """With tuples and numeric keys: the journal is JSON."""
    own: dict[str, Any] = {
        "saev": {"metadata": {"data": (1, {2: 3})}},
        "zarr": {"metadata": {"a": (1, (2,)), "b": {1: 2.5}, "c": "\ud800"}},
    }.get(format, {"metadata": {"a": (1, (2,)), "b": {1: 2.5}}})
    writer = create(tmp_path / "d", format, **own)
    writer.append(examples([4]))
    writer.abort()
    writer = create(tmp_path / "d", format, resume=True, **own)
    assert writer.committed == 1
    writer.close()
    check(writer.path, examples([4]))


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_that_finds_the_dataset_finished_under_the_lock_takes_it(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes resume at once: the second checks while the first finishes, and acquires the lock afterwards."""
    own = {"num_examples": 2, "tokens_per_example": 4}
    writer = create(tmp_path / "d", format, **own)
    writer.append(examples([4, 4]))
    writer.abort()
    take = work.Lock.take

    def late(self: work.Lock) -> None:
        monkeypatch.setattr(work.Lock, "take", take)
        with create(tmp_path / "d", format, resume=True, **own):
            pass
        take(self)

    monkeypatch.setattr(work.Lock, "take", late)
    second = create(tmp_path / "d", format, resume=True, **own)
    assert second.complete
    check(second.path, examples([4, 4]))
    assert not list((tmp_path / "d").rglob(".actshard"))
    assert not list((tmp_path / "d").rglob(".writing-*"))


def test_a_lock_whose_file_is_removed_meanwhile_is_not_held(tmp_path: Path) -> None:
    """A finished writer deletes the lock file: a lock on a deleted file would let a second writer in."""
    path = tmp_path / "d"
    code = (
        "import actshard, fcntl, os, sys\n"
        "lockf = fcntl.lockf\n"
        "def slow(file, how):\n"
        "    fcntl.lockf = lockf; os.unlink(sys.argv[1] + '/.actshard/lock'); lockf(file, how)\n"
        "fcntl.lockf = slow\n"
        "w = actshard.create(sys.argv[1], 'zarr', layers=[3, 7], d_model=8)\n"
        "print(os.path.exists(sys.argv[1] + '/.actshard/lock')); sys.stdout.flush(); sys.stdin.read(1)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline().strip() == "True"
    with pytest.raises(actshard.LockedError):
        create(path, "zarr", resume=True)
    running.communicate("x", timeout=PATIENCE)


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_that_failed_lets_the_next_in(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is still referenced, as in a notebook."""
    held = create(tmp_path / "a", format, num_examples=3)

    def use() -> None:
        with held:
            held.append(examples([4]))

    with pytest.raises(actshard.ArgumentError, match="num_examples"):
        use()
    again = create(tmp_path / "a", format, resume=True, num_examples=3)
    assert again.committed == 1
    again.abort()

    def fails(self: Sink) -> None:
        raise ZeroDivisionError

    writer = create(tmp_path / "b", format)
    writer.append(examples([4]))
    monkeypatch.setattr(Sink, "finish", fails)
    with pytest.raises(ZeroDivisionError):
        writer.close()
    monkeypatch.undo()
    with pytest.raises(actshard.ClosedError):
        writer.append(examples([4]))
    assert create(tmp_path / "b", format, resume=True).committed == 1


def test_an_interrupted_append_loses_nothing_that_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a block is passed to the background: whether it will be written is unknown, so the writer stops."""
    writer = create(tmp_path / "d", "zarr")
    writer.append(examples([4, 4]))

    def interrupted(self: Sink, what: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sink, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    monkeypatch.undo()
    with pytest.raises(actshard.ClosedError):
        writer.append(examples([4], 2))
    assert create(tmp_path / "d", "zarr", resume=True).committed == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"examples": 5}',
        '{"examples": 5, "state": []}',
        '{"examples": "5", "state": {}}',
        '{"examples": -5, "state": {}}',
        '{"examples": 1, "state": {}}',
        '{"examples": 1e400, "state": {}}',
        '{"examples": true, "state": {}}',
        '{"examples": 5, "state": {}, "table": "../../x.arrow"}',
        '{"examples": 5, "state": {}, "table": 3}',
        '{"examples": 5, "state": {}, "digests": ["12"]}',
        '{"examples": 5, "state": {}, "table": "examples-000009.arrow"}',
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_journal_that_makes_no_sense_is_one_clear_error(tmp_path: Path, format: str, line: str) -> None:
    writer = create(tmp_path / "d", format)
    writer.append(examples([4, 4]))
    writer.abort()
    journal = writer.path / ".actshard/journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + line.encode() + b"\n{}\n")
    with pytest.raises(actshard.FormatError) as caught:
        create(tmp_path / "d", format, resume=True)
    assert len(str(caught.value)) < 1000
    with pytest.raises(actshard.UnfinishedError):
        actshard.open(writer.path)
    assert actshard.verify(writer.path).codes() == {"unfinished"}
    journal.write_bytes(whole)
    assert create(tmp_path / "d", format, resume=True).committed == 2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", [None, [], {}, {"format": 5}, "odd"])
def test_a_journal_with_another_beginning_is_one_clear_error(tmp_path: Path, format: str, config: Any) -> None:
    writer = create(tmp_path / "d", format)
    writer.append(examples([4, 4]))
    writer.abort()
    journal = writer.path / ".actshard/journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    names = [n for n in lines[0]["config"] if n not in ("source",)]
    odd = [config] if config != "odd" else [{**lines[0]["config"], name: {"odd": [1]}} for name in names]
    for made in odd:
        first = {"actshard": 1} if made is None else {"actshard": 1, "config": made}
        journal.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines[1:])))
        with pytest.raises(actshard.ActshardError) as caught, create(tmp_path / "d", format, resume=True) as writer:
            raise actshard.ArgumentError("taken as it is")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("call", ["open", "ftruncate", "pwrite"])
def test_a_lock_that_cannot_be_written_is_an_error_of_ours(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def fails(*given: Any) -> Any:
        if call != "open" or str(given[0]).endswith("lock"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(*given)

    monkeypatch.setattr(os, call, fails)
    with refuses(actshard.DiskFullError, tmp_path / "d/.actshard/lock", "quota"):
        create(tmp_path / "d", "zarr")
    monkeypatch.undo()
    with create(tmp_path / "d", "zarr") as writer:
        writer.append(examples([4]))


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_can_be_made_under_any_name(tmp_path: Path, format: str) -> None:
    """Also a path that is not UTF-8."""
    path = tmp_path / os.fsdecode(b"caf\xe9 \xff")
    writer = create(path, format)
    columns = None if format == "saev" else {"label": [1, 2]}
    writer.append(examples([4, 4]), columns=columns)
    writer.flush()
    writer.abort()
    writer = create(path, format, resume=True)
    writer.append(examples([4, 4], 2), columns=columns)
    writer.close()
    if format != "lmprobe":
        check(writer.path, examples([4] * 4))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("left", [("lock",), ("lock", "journal.jsonl"), ("examples-000000.arrow",), ()])
def test_what_a_kill_left_in_a_finished_dataset_is_removed_by_the_next_call(
    tmp_path: Path, format: str, left: tuple[str, ...]
) -> None:
    own = {"num_examples": 1, "tokens_per_example": 4}
    with create(tmp_path / "d", format, **own) as writer:
        writer.append(examples([4]))
    folder = writer.path / ".actshard"
    folder.mkdir()
    begun = {"actshard": 1, "config": {}, "record": json.loads((writer.path / RECORD).read_text())}
    for name in left:
        (folder / name).write_text(f'{json.dumps(begun)}\n{{"finished":true}}\n' if "journal" in name else "")
    check(writer.path, examples([4]))  # readers ignore it and remove nothing
    assert folder.exists()
    with refuses(actshard.ExistsError, writer.path, "exist_ok"):
        create(tmp_path / "d", format, **own)
    again = create(tmp_path / "d", format, exist_ok=True, **own)
    assert again.complete
    assert len(again) == 1
    assert not folder.exists()
    check(writer.path, examples([4]))
    folder.mkdir()
    again = create(tmp_path / "d", format, resume=True)  # such a call cannot compute saev's name
    assert again.complete
    assert not folder.exists()


@pytest.mark.parametrize("format", MERGED)
def test_a_part_may_have_no_examples(tmp_path: Path, format: str) -> None:
    """A rank without examples finishes its part, and the parts can be merged."""
    path = tmp_path / "d"
    for i, n in enumerate((0, 2, 0, 1)):
        with create(path, format, part=(i, 4)) as writer:
            writer.append(examples([4] * n, i))
        assert writer.complete
        again = create(path, format, part=(i, 4), resume=True)
        assert again.complete
        assert len(again) == n
    with refuses(actshard.ExistsError, path / ".parts/part-00000-of-00004", "d_model"):
        actshard.create(path, format, layers=LAYERS, d_model=9, part=(0, 4), resume=True)
    check(actshard.merge(path), [*examples([4, 4], 1), *examples([4], 3)])
    for i in range(2):
        create(tmp_path / "e", format, part=(i, 2)).close()
    with refuses(actshard.UnfinishedError, tmp_path / "e/.parts", "found none"):
        actshard.merge(tmp_path / "e")


def test_samples_of_unequal_parts_and_machines_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Parts do not know each other's number of examples."""
    for i, n in enumerate((4, 3, 3)):
        with create(tmp_path / "parts", "pickle", part=(i, 3), num_examples=n) as writer:
            writer.append(examples([4] * n))
        with create(
            tmp_path / f"machines/machine_{i}", "pickle", machine_id=i, total_machines=3, num_examples=n
        ) as writer:
            writer.append(examples([4] * n))
    assert len(set(actshard.open(actshard.merge(tmp_path / "parts")).table["sample_idx"].to_pylist())) == 10
    store = actshard.open(sorted((tmp_path / "machines").iterdir()))
    ids = store.table["sample_idx"].to_pylist()
    assert ids == [m * 1_000_000_000 + i for m, n in enumerate((4, 3, 3)) for i in range(n)]
    # The text's formula, with a number chosen by the user.
    with create(tmp_path / "own", "pickle", machine_id=2, samples_per_machine=5) as writer:
        writer.append(examples([4] * 5))
        with pytest.raises(actshard.ArgumentError, match="samples_per_machine"):
            writer.append(examples([4]))
    assert actshard.open(tmp_path / "own").table["sample_idx"].to_pylist() == [10, 11, 12, 13, 14]
    for odd in ({"machine_id": -1}, {"machine_id": "0"}, {"machine_id": 3, "total_machines": 3}, {"total_machines": 0}):
        with pytest.raises(actshard.ArgumentError):
            create(tmp_path / "odd", "pickle", **odd)


def test_a_part_begun_by_an_older_release_keeps_its_numbers(tmp_path: Path) -> None:
    writer = create(tmp_path / "d", "pickle", part=(1, 2), num_examples=2)
    writer.append(examples([4]), columns=None)
    writer.abort()
    journal = writer.path / ".actshard/journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    del lines[0]["config"]["base"], lines[0]["config"]["per_machine"]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with create(tmp_path / "d", "pickle", part=(1, 2), num_examples=2, resume=True) as writer:
        writer.append(examples([4]))
    assert actshard.open(writer.path).table["sample_idx"].to_pylist() == [1_000_000_000, 3]


@pytest.mark.parametrize("format", FORMATS)
def test_names_are_on_the_disk_before_the_journal_counts_on_them(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure loses names if their folder was not synced, and contents if the file was not."""
    synced: set[Path] = set()
    real_sync, real_append = actshard._native.sync_files, work.Journal._append

    def sync(paths: list[Any]) -> None:
        real_sync(paths)
        for path in map(Path, paths):
            synced.update(path.iterdir() if path.is_dir() else ())
            synced.add(path)

    def append(self: work.Journal, record: dict[str, Any]) -> None:
        if "examples" in record or "finished" in record:
            root = self.folder.parent
            files = {p for p in root.rglob("*") if p.name not in ("lock", "journal.jsonl")}
            named = {p for p in [*files, root, *root.parents] if p.is_relative_to(tmp_path / "a")}
            lacking = named - synced
            assert not lacking, (record, sorted(map(str, lacking)))
        real_append(self, record)

    monkeypatch.setattr(actshard._native, "sync_files", sync)
    monkeypatch.setattr(work.Journal, "_append", append)
    writer = create(tmp_path / "a/b/c", format)
    columns = None if format == "saev" else {"note": ["a", "b"], "label": [1, 2]}
    for i in range(3):
        writer.append(examples([4, 4], i), columns=columns)
        writer.flush()
    writer.close()


def test_lengths_take_a_number_per_example_however_many_layers(tmp_path: Path) -> None:
    """10 million examples of 32 layers would be 2.5 GB."""
    layers = list(range(50))
    writer = actshard.create(tmp_path / "d", "zarr", layers=layers, d_model=1)
    for n in (3, 5):
        writer.append([np.ones((50, n, 1), np.float32)] * 4)
        writer.flush()
    writer.abort()
    writer = actshard.create(tmp_path / "d", "zarr", layers=layers, d_model=1, resume=True)
    sink = writer._sink
    assert sink is not None
    try:
        found, _ = sink.read_back()
        assert found.shape == (8, 50)
        assert found.strides == (8, 0)
        assert found[:, 49].tolist() == [3] * 4 + [5] * 4
    finally:
        writer.abort()


def test_texts_are_written_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as one string, which would be as large as all texts."""
    monkeypatch.setattr(actshard.formats.zarr.placing, "_AT_ONCE", 3)
    most = 0
    real = actshard.formats.zarr.placing.whole_file

    class Counting:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> None:
            nonlocal most
            most = max(most, len(data))
            self.file.write(data)

    import contextlib

    @contextlib.contextmanager
    def counting(path: Path) -> Any:
        with real(path) as file:
            yield Counting(file)

    monkeypatch.setattr(actshard.formats.zarr.placing, "whole_file", counting)
    with create(tmp_path / "d", "zarr") as writer:
        writer.append(examples([1] * 20), columns={"prompt": ["x" * 100] * 20, "other": ["y" * 50] * 20})
    assert 300 < most < 500
    assert actshard.open(tmp_path / "d").table["prompt"].to_pylist() == ["x" * 100] * 20


@pytest.mark.parametrize("how", ["kill", "exception", "closing"])
def test_lengths_of_padded_examples_survive_an_interruption(tmp_path: Path, how: str) -> None:
    """Zero rows that pad committed examples stay as they are, whatever happened in between."""
    code = f"""
import os
import numpy as np, actshard
from actshard.formats.saev.write import SaevTarget
items = [np.full((1, n, 4), n + 1, np.float32) for n in (3, 1, 5, 2, 7, 4)]
how = {how!r}
try:
    with actshard.create("dump", "saev", layers=[0], d_model=4, pad=True, tokens_per_example=7) as writer:
        writer.append(items[:2])
        writer.append(items[2:4])
        writer.flush()
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "exception":
            raise KeyError
        writer.append(items[4:])
        SaevTarget._keep_lengths = lambda self: os.kill(os.getpid(), 9)
except KeyError:
    pass
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=PATIENCE)
    counts = [3, 1, 5, 2, 7, 4]
    items = [np.full((1, n, 4), n + 1, np.float32) for n in counts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer = actshard.create(
            tmp_path / "dump", "saev", layers=[0], d_model=4, pad=True, tokens_per_example=7, resume=True
        )
        if not writer.complete:
            assert writer.committed == 4
            writer.append(items[4:])
            writer.close()
    store = actshard.open(writer.path)
    assert store.content_lengths is not None
    assert store.content_lengths.tolist() == counts
    assert np.array_equal(store.last_tokens(0), [x[0, -1] for x in items])
    assert len(next(iter(store.stream(0, 1000))).activations) == sum(counts)


def test_a_dump_that_is_not_finished_is_told_by_the_folder_it_was_asked_for(tmp_path: Path) -> None:
    """saev's name is known only at the end; until then the dump is in a folder with a temporary name."""
    writer = create(tmp_path / "d", "saev")
    writer.append(examples([4, 4]))
    writer.flush()
    for stop in (lambda: None, writer.abort):
        stop()
        with refuses(actshard.UnfinishedError, tmp_path / "d", "contains 2 examples.*resume continues it"):
            actshard.open(tmp_path / "d")
        assert [f.code for f in actshard.verify(tmp_path / "d").findings] == ["unfinished"]
    writer = create(tmp_path / "d", "saev", resume=True)
    writer.close()
    assert len(actshard.open(tmp_path / "d")) == 2
    create(tmp_path / "d", "saev", dtype="float32", tokens_per_example=9).abort()
    assert len(actshard.open(tmp_path / "d")) == 2  # a finished dataset next to it opens


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_without_committed_examples_is_told_as_unfinished(tmp_path: Path, format: str) -> None:
    """People look while their extraction runs. The lock stays if the process is killed."""
    writer = create(tmp_path / "d", format)
    writer.append(examples([4, 4]))
    for given in (None, format):
        with refuses(actshard.UnfinishedError, tmp_path / "d", "has not committed any yet"):
            actshard.open(tmp_path / "d", given)
        assert [f.code for f in actshard.verify(tmp_path / "d", format=given).findings] == ["unfinished"]
    writer.close()
    assert len(actshard.open(writer.path)) == 2


def test_a_full_disk_at_the_last_name_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error claimed that another dataset was in the way, with no way to remove it."""
    writer = create(tmp_path / "d", "saev")
    writer.append(examples([4, 4]))
    real = Path.replace

    def full(source: Path, target: Path) -> Path:
        if source.name.startswith(".writing-"):
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        return real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(actshard.DiskFullError, match="rename"):
            writer.close()
    with create(tmp_path / "d", "saev", resume=True):
        pass
    check(tmp_path / "d", examples([4, 4]))


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("zarr", {"t_max": 16}),
        ("lmprobe", {"pooling": "mean", "storage": "pooled"}),
        ("lmprobe", {"model": "m/x"}),
        ("lmprobe", {"revision": "r1"}),
    ],
)
def test_what_was_given_before_must_be_given_again(tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    """The names of rows are metadata about what they are: no second call may change them without a word."""
    rows = np.ones((2, 1, 1, 4), np.float32)
    base = {"layers": [0], "d_model": 4, **{k: v for k, v in options.items() if k == "storage"}}
    writer = actshard.create(tmp_path / "run", format, **{**base, **options})
    writer.append(rows)
    writer.flush()
    writer.abort()
    (given,) = set(options) - set(base)
    with pytest.raises(actshard.ArgumentError, match=f"{given}: expected .*{options[given]}.*, as in the unfinished"):
        actshard.create(tmp_path / "run", format, resume=True, **base)
    with actshard.create(tmp_path / "run", format, resume=True, **{**base, **options}) as again:
        assert again.committed == 2
        again.append(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of poolings
        assert len(actshard.open(tmp_path / "run")) == 4
