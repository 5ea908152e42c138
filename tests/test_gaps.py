"""Missing files of a series: ``open`` warns of them and ``verify`` reports them. Identifiers with gaps are no series."""

from __future__ import annotations

import random
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.formats import kept
from actshard.formats.layout_toml import keeping
from actshard.formats.numbered import Gap, Numbered, bounds_of, renumbered
from conftest import GOLDEN

CHUNKS = "llamascopium/chunks_safetensors_bf16/cache"
LOST: dict[tuple[str, str], tuple[str, str]] = {
    ("draft/eagle_v1_qwen2", "3/data_4.ckpt"): ("missing-file", r"1 of 12 .*: 3/data_4\.ckpt;"),
    ("draft/eagle_v1_qwen2", "3/data_0.ckpt"): ("missing-file", r"1 of 12 .*: 3/data_0\.ckpt;"),
    ("draft/eagle_v1_vicuna", "1/data_1.ckpt"): ("missing-file", r"1 of 7 .*: 1/data_1\.ckpt;"),
    ("draft/specforge_eagle3", "rows_5-10"): ("missing-file", r"1 of 3 numbered folders is missing: rows_5-10;"),
    ("draft/angelslim_eagle3", "rank_1/rows_0-5"): ("missing-file", r"1 of 4 numbered folders .*: rows_0-5;"),
    ("draft/speculators_bf16", "state.json"): ("missing-file", "state.json of the folder above is missing or empty"),
    ("containers/npz_example_files_f16", "ex_1.npz"): ("missing-file", r"1 of 4 .*: ex_1\.npz;"),
    ("containers/pt_example_dict_bf16", "example_0002.pt"): ("missing-file", r"1 of 4 .*: example_0002\.pt;"),
    ("containers/pt_example_dict_legacy_f32", "example_0001.pt"): ("missing-file", r"1 of 3 .*: example_0001\.pt;"),
    ("containers/pt_hf_batches_left_padded_f16", "batch_1.pt"): ("missing-file", r"1 of 3 .*: batch_1\.pt;"),
    ("containers/pt_saebench_bf16", "activations_1_of_11.pt"): ("missing-file", r": activations_1_of_11\.pt;"),
    ("containers/pt_saebench_bf16", "activations_6_of_11.pt"): ("missing-file", r": activations_6_of_11\.pt;"),
    ("containers/pt_saebench_bf16", "activations_11_of_11.pt"): ("missing-file", r": activations_11_of_11\.pt;"),
    ("containers/pt_torch113_hooks_bf16", "1.pth"): ("missing-file", r"1 of 3 .*: 1\.pth;"),
    ("containers/pt_views_f16", "003.pt"): ("missing-file", r"1 of 6 .*: 003\.pt;"),
    ("containers/st_batch_resid_post_f16", "000001.safetensors"): ("missing-file", r": 000001\.safetensors;"),
    ("containers/st_example_layer_keys_bf16", "sample_000001.safetensors"): ("missing-file", r": sample_000001\."),
    (CHUNKS, "blocks.4.hook_resid_post/chunk-00000001.meta.json"): (
        "missing-file",
        "1 of 3 .meta.json files is missing",
    ),
    ("activault/run_bf16_two_hooks", "bucket/tiny.web/models.layers.6.mlp.post/metadata.json"): (
        "missing-file",
        r"models\.layers\.6\.mlp\.post: metadata\.json is missing, but",
    ),
    ("zarr/separator_slash/activations.zarr", "arrays/hallu_label/0"): ("chunk-missing", "hallu_label: chunk 0 has no"),
    ("zarr/separator_slash/activations.zarr", "arrays/split/0"): ("chunk-missing", "split: chunk 0 has no file"),
    ("zarr/grouped_chunks/activations.zarr", "arrays/sample_key/1"): ("chunk-missing", "sample_key: chunk 1 has no"),
    ("zarr/big_endian/activations.zarr", "arrays/prompt_len/0"): ("chunk-missing", "prompt_len: chunk 0 has no file"),
    ("zarr/run_20260122_101112", "shards/shard-0002.zarr/arrays/response_len/0"): (
        "chunk-missing",
        r"shard-0002\.zarr: arrays/response_len: chunk 0 has no file",
    ),
    ("zarr/hallulens_logger_v2/activations.zarr", "arrays/sample_key/.zarray"): (
        "missing-file",
        r"arrays/sample_key: \.zarray is missing, but chunks exist: the array is not read",
    ),
    ("zarr/hallulens_logger_v2/activations.zarr", "arrays/prompt_activations/.zarray"): (
        "missing-file",
        r"arrays/prompt_activations: \.zarray is missing, but chunks",
    ),
}
"""For each dataset and file: the code and the text of the warning without this file."""
SKIPPED = {
    ("draft/specforge_eagle3", "rows_5-10/data_7.ckpt"): r"1 of 12 .*: data_7\.ckpt\. SpecForge does not write",
    ("draft/specforge_dflash_gz", "rows_0-2000/data_5.ckpt.gz"): r"1 of 8 .*: data_5\.ckpt\.gz\.",
    ("draft/specforge_dspark", "rows_0-4/data_2.ckpt"): r"1 of 6 .*: data_2\.ckpt\.",
    ("draft/specforge_eagle3", "rows_0-5/data_0.ckpt"): r"1 of 12 .*: data_0\.ckpt\.",
    ("draft/angelslim_eagle3", "rank_0/rows_5-10/data_5.ckpt"): r"1 of 13 .*: data_5\.ckpt\. AngelSlim does not write",
    (
        "draft/angelslim_dflash",
        "shard_00001/sample_00000003_rank1.ckpt",
    ): r": shard_0000./sample_00000003_rank1\.ckpt\.",
}
"""Datasets of programs that skip numbers, a file, and the note about it."""
IDENTIFIERS = [("containers/npy_example_files_f16", "acts/7.npy"), ("draft/modelopt_hf", "conv-006.pt")]
"""Datasets whose file names contain identifiers, and a file."""


def codes_of(path: Path) -> list[str]:
    """Codes of the warnings of ``open``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [remark.code for remark in actshard.open(path).warnings]


def without(dataset: str, name: str, folder: Path) -> Path:
    path = Path(shutil.copytree(GOLDEN / dataset, folder / Path(dataset).name))
    if (path / name).is_dir():
        shutil.rmtree(path / name)
    else:
        (path / name).unlink()
    return path


@pytest.mark.parametrize(("dataset", "name"), LOST, ids=lambda value: value)
def test_a_lost_file_is_a_warning_and_a_finding(dataset: str, name: str, tmp_path: Path) -> None:
    code, text = LOST[dataset, name]
    assert code not in codes_of(GOLDEN / dataset)
    assert code not in actshard.verify(GOLDEN / dataset).codes()
    path = without(dataset, name, tmp_path)
    with pytest.warns(actshard.ActshardWarning, match=text):
        actshard.open(path)
    assert codes_of(path).count(code) == 1
    assert code in actshard.verify(path).codes()


@pytest.mark.parametrize(("dataset", "name"), SKIPPED, ids=lambda value: value)
def test_numbers_that_a_program_skips_are_a_note_of_verify(dataset: str, name: str, tmp_path: Path) -> None:
    before = actshard.verify(GOLDEN / dataset)
    assert "skipped-numbers" not in before.codes()
    path = without(dataset, name, tmp_path)
    assert codes_of(path) == codes_of(GOLDEN / dataset)
    report = actshard.verify(path)
    (note,) = (finding for finding in report.findings if finding.code == "skipped-numbers")
    assert note.severity == "note"
    assert report.errors == before.errors
    assert re.search(SKIPPED[dataset, name], note.found)


@pytest.mark.parametrize(("dataset", "name"), IDENTIFIERS)
def test_identifiers_with_gaps_are_no_fault(dataset: str, name: str, tmp_path: Path) -> None:
    path = without(dataset, name, tmp_path)
    assert codes_of(path) == codes_of(GOLDEN / dataset)
    assert "missing-file" not in actshard.verify(path).codes()


@pytest.mark.parametrize("name", ["0.npy", "7.npy", "11.npy"])
def test_tokens_of_an_example_without_activations_are_a_finding(name: str, tmp_path: Path) -> None:
    """Its file of activations was lost, whether or not the numbers are a series."""
    dataset = "containers/npy_example_files_f16"
    assert "unlisted-file" not in actshard.verify(GOLDEN / dataset).codes()
    path = without(dataset, f"acts/{name}", tmp_path)
    report = actshard.verify(path)
    (finding,) = (finding for finding in report.findings if finding.code == "unlisted-file")
    assert finding.found == f"tokens: 1 file has no file of activations: tokens/{name}"
    (path / "tokens" / name).unlink()
    assert "unlisted-file" not in actshard.verify(path).codes()


def test_an_empty_file_of_lines_of_a_column_is_an_error(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / "containers/npy_example_files_f16", tmp_path / "a"))
    (path / "prompts.jsonl").write_bytes(b"")
    with pytest.raises(actshard.FormatError, match=r"prompts\.jsonl.*columns.*expected lines with values of examples"):
        actshard.open(path)
    assert not actshard.verify(path).ok


def test_an_empty_journal_of_arrays_with_rows_is_a_warning_and_a_finding(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / "hallulens_v1/merged_captures/capture", tmp_path / "capture"))
    assert codes_of(path) == []
    (path / "meta.jsonl").write_bytes(b"")
    assert codes_of(path) == ["empty-file"]
    assert "empty-file" in actshard.verify(path).codes()


def layout(folder: Path, numbers: list[int], text: str = "acts_{example:d}.npy", **more: str) -> Path:
    folder.mkdir()
    lines = "".join(f"{key} = {value}\n" for key, value in more.items())
    (folder / "layout.toml").write_text(
        f'version = 1\n[activations]\nfiles = "{text}"\naxes = ["token", "dim"]\nlayers = [3]\n{lines}'
    )
    for number in numbers:
        np.save(folder / f"acts_{number}.npy", np.full((2, 4), number, np.float32))
    return folder


def test_numbers_are_a_series_if_most_of_them_have_a_file(tmp_path: Path) -> None:
    numbers = {"series": [3, 4, 6, 7], "half": [0, 2, 3, 5], "identifiers": [0, 3, 9], "far": [0, 1, 10**17]}
    codes = {name: codes_of(layout(tmp_path / name, files)) for name, files in numbers.items()}
    assert codes == {"series": ["missing-file"], "half": ["missing-file"], "identifiers": [], "far": []}
    assert codes_of(layout(tmp_path / "texts", [0, 1, 3], "acts_{example:s}.npy")) == []


def test_lines_that_commit_examples_replace_the_series(tmp_path: Path) -> None:
    """A column with ``commit`` lists the examples, so that other numbers need no file."""
    path = layout(tmp_path / "a", [0, 1, 3])
    with (path / "layout.toml").open("a") as file:
        file.write('[[columns]]\nfile = "lines.jsonl"\nby = "id"\ncommit = true\n')
    (path / "lines.jsonl").write_text("".join(f'{{"id": {number}, "text": "x"}}\n' for number in (0, 1, 3)))
    assert codes_of(path) == []
    assert len(actshard.open(path)) == 3


def test_a_dataset_from_a_kept_index_warns_like_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LEAST_FILES", 5)
    monkeypatch.setenv("ACTSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SETTLED_NS", -(1 << 62))
    path = layout(tmp_path / "a", [0, 1, 2, 4, 5, 6, 7])
    first = codes_of(path)
    monkeypatch.setattr(keeping, "build", None)  # the index is restored, so that nothing is built
    assert codes_of(path) == first == ["missing-file"]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["0000.parquet", "0001.parquet", "0003.parquet"], ["0002.parquet"]),
        (["part-00000.parquet", "part-00002.parquet"], ["part-00001.parquet"]),
        (["train-00001-of-00003.parquet"], ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"]),
        (["train-00000-of-00002-0a1b.parquet"], ["train-00001-of-00002.parquet"]),
        (["2019.parquet", "2021.parquet"], []),
        (["0000.parquet", "0001.parquet"], []),
    ],
)
def test_parquet_files_are_numbered_from_0(names: list[str], missing: list[str], tmp_path: Path) -> None:
    for name in names:
        pq.write_table(pa.table({"activation": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))}), tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = [str(remark) for remark in actshard.open(tmp_path).warnings]
    assert len(texts) == bool(missing)
    assert all(name in texts[0] for name in missing)


def test_gaps_equal_those_of_a_naive_search() -> None:
    source = random.Random(7)
    for _ in range(500):
        pairs = [(source.randrange(3), source.randrange(20)) for _ in range(source.randrange(1, 25))]
        first, stop = source.choice([(None, None), (0, None), (0, 22), (None, 20)])
        expected = []
        for series in sorted({series for series, _ in pairs}):
            numbers = {number for other, number in pairs if other == series}
            low = min(numbers) if first is None else first
            high = max(numbers) + 1 if stop is None else stop
            expected += [(series, number) for number in range(low, high) if number not in numbers]
        numbered = Numbered.of(pairs, first=first, stop=stop)
        assert [(gap.neighbor[0], number) for number, gap in numbered.numbers()] == expected
        assert (numbered.missing, numbered.count) == (len(expected), len(set(pairs)))


def test_a_wide_gap_is_not_visited_number_by_number() -> None:
    numbered = Numbered.of([(0,), (1 << 80,)])
    assert numbered.gaps == [Gap(1, 1 << 80, (0,))]
    (remark,) = numbered.remarks(lambda number, gap: f"{number}.npy")
    assert str(remark).startswith(f"{(1 << 80) - 1} of {(1 << 80) + 1} numbered files are missing: 1.npy, 2.npy, ")


@pytest.mark.parametrize(
    ("total", "numbers", "bounds"),
    [(3, [0, 2], (0, 3)), (3, [1, 3], (1, 4)), (3, [2], (1, 4)), (3, [0, 3], (0, 4)), (2, [5], (1, 6))],
)
def test_a_series_of_known_length_begins_at_0_or_1(total: int, numbers: list[int], bounds: tuple[int, int]) -> None:
    assert bounds_of(total, numbers) == bounds


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [("a_9.pt", 10, "a_10.pt"), ("a_10.pt", 9, "a_9.pt"), ("a_009.pt", 10, "a_010.pt"), ("a_010.pt", 9, "a_009.pt")],
)
def test_numbers_keep_their_padding(name: str, number: int, expected: str) -> None:
    assert renumbered(name, (2, name.index(".")), number) == expected
