"""Guarantee: large files are read by several processes, and the cache has the bytes of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tokens.conftest import GOLDEN, GPT2, write_lines

import actshard
from actshard import tokens
from actshard.tokens import building, shards


def digests(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that are large enough to be divided, with rows that are unusable."""
    monkeypatch.setattr(building, "_WORTH_PROCESSES", 500)
    records = [{"text": f"text {i} of some words"} if i % 40 != 33 else {"no": i} for i in range(400)]
    lines = write_lines(tmp_path / "a.jsonl", records)
    pq.write_table(pa.table({"text": [str(r.get("text")) for r in records]}), tmp_path / "b.parquet", row_group_size=30)
    return [lines, tmp_path / "b.parquet", write_lines(tmp_path / "d.jsonl", [])]


@pytest.mark.parametrize("storage", ["plain", "lz4"])
@pytest.mark.parametrize(("layout", "keep"), [("consolidated", False), ("consolidated", True), ("sharded", False)])
def test_a_large_file_is_read_by_all_processes_and_gives_the_same_bytes(
    large_files: list[Path], layout: str, keep: bool, storage: str, tmp_path: Path
) -> None:
    def build(name: str, jobs: int) -> tuple[dict[str, bytes], list[str]]:
        before = len(seen)
        with pytest.warns(actshard.ActshardWarning, match="10 records were skipped") as caught:
            tokens.build_cache(
                large_files, tmp_path / name, GOLDEN / GPT2, jobs=jobs, layout=layout, storage=storage,
                keep_shards=keep, on_error="skip", progress=seen.append,
            )  # fmt: skip
        assert seen[-1].files_done == 3
        assert seen[-1].bytes <= seen[-1].bytes_total == sum(file.stat().st_size for file in large_files)
        assert (seen[-1].rows, seen[-1].skipped, before < len(seen)) == (790, 10, True)
        return digests(tmp_path / name), [str(w.message) for w in caught]

    seen: list[tokens.BuildProgress] = []
    alone, warned = build("alone", 1)
    for jobs in (2, 3):
        divided, also = build(f"divided{jobs}", jobs)
        assert divided == alone
        assert len(also) == len(warned)


def test_large_files_have_several_parts_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of one part may take longer than those of another: with one part each, a process waits for the other."""
    monkeypatch.setattr(building, "_WORTH_PROCESSES", 400)
    monkeypatch.setattr(building, "_WORTH_PART", 100)
    for name, size in {"a": 0, "b": 10_000, "c": 1_000, "d": 5_000}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"x" * size)

    def parts(jobs: int) -> list[list[int]]:
        options = building.BuildOptions(jobs=jobs)
        return building.Build(f"{tmp_path}/*.jsonl", tmp_path / "c", None, "prebuilt", options)._divide()

    assert parts(1) == [[0], [1], [2], [3]]
    for jobs, count in ((2, 16), (5, 40), (1000, 160)):
        lengths = [part[2] - part[1] for part in parts(jobs) if len(part) > 1]
        assert count - 1 <= len(lengths) <= count + 2, "each cut adds a part; cuts move to borders of files"
        assert max(lengths) <= 1.1 * 16_000 / count


def test_a_bad_line_of_a_divided_file_is_named_by_the_byte_at_which_it_begins(
    large_files: list[Path], tmp_path: Path
) -> None:
    lines = large_files[0].read_bytes().splitlines(keepends=True)
    good = [line for line in lines if b'"no"' not in line]
    large_files[0].write_bytes(b"".join(good) + b"{\n")
    with pytest.raises(
        actshard.FormatError, match=f"line at byte {sum(map(len, good))}: expected a JSON object"
    ) as caught:
        tokens.build_cache(large_files, tmp_path / "c", GOLDEN / GPT2, jobs=2)
    assert caught.value.path == large_files[0]


def test_a_skipped_record_of_a_divided_file_has_the_number_of_its_line_in_the_file(
    large_files: list[Path], tmp_path: Path
) -> None:
    lines = large_files[0].read_bytes().splitlines(keepends=True)
    good = [line for line in lines if b'"no"' not in line]
    large_files[0].write_bytes(b"".join(good) + b"{\n")
    for jobs in (1, 2, 3):
        first = rf"the first: {large_files[0]}: line {len(good) + 1}: expected a JSON object"
        with pytest.warns(actshard.ActshardWarning, match=first):
            tokens.build_cache(large_files, tmp_path / f"{jobs}", GOLDEN / GPT2, jobs=jobs, on_error="skip")


@pytest.mark.parametrize(
    ("first", "jobs", "step", "builds"),
    [(2, 2, "combine", False), (2, 1, "combine", True), (2, 3, "combine", True), (2, 1, "swap", False),
     (1, 2, "swap", False)],
)  # fmt: skip
def test_an_interrupted_build_of_divided_files_continues_with_any_number_of_processes(
    large_files: list[Path],
    first: int,
    jobs: int,
    step: str,
    builds: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StopError(Exception):
        pass

    def stops(*given: Any) -> None:
        raise StopError

    def run(out: Path, jobs: int) -> tokens.TokenCache:
        return tokens.build_cache(large_files, out, GOLDEN / GPT2, jobs=jobs, on_error="skip", layout="sharded")

    built: list[str] = []
    build_parts = building.Build._build_parts

    def counts(self: building.Build, parts: list[Any]) -> None:
        built.extend(part.name for part in parts)
        build_parts(self, parts)

    with pytest.warns(actshard.ActshardWarning, match="skipped"):
        run(tmp_path / "whole", 1)
    with monkeypatch.context() as patch:
        patch.setattr(shards.placing if step == "swap" else building, step, stops)
        with pytest.raises(StopError):
            run(tmp_path / "c", first)
    monkeypatch.setattr(building.Build, "_build_parts", counts)
    with pytest.warns(actshard.ActshardWarning, match="skipped"):
        run(tmp_path / "c", jobs)
    assert digests(tmp_path / "c") == digests(tmp_path / "whole")
    assert bool(built) == builds
    assert not (tmp_path / "c" / ".actshard-build").exists()
