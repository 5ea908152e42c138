"""Staged copies: complete under their name, fetched once, by one of many processes, and by layer no byte of another."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import tokens
from actshard.writing import staging
from conftest import GOLDEN, refuses, saev_dump
from hub import hub
from served import Served, served
from test_url_commands import command, outcome, words_of
from waiting import PATIENCE

SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
LMPROBE = GOLDEN / "lmprobe/fullseq_f32"
ZARR = GOLDEN / "zarr/single_minimal/activations.zarr"
DATASETS = [
    SAEV,
    LMPROBE,
    GOLDEN / "lmprobe/fullseq_logits_router",
    GOLDEN / "pickle/numpy2_proto5",
    GOLDEN / "zarr/v3_sharded/activations.zarr",
    GOLDEN / "zarr/run_20260122_101112",
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "served") as found:
        yield found


def put(server: Served, path: Path) -> str:
    shutil.copytree(path, server.root / "bucket/run" / path.name)
    return f"s3://bucket/run/{path.name}"


def fetched(server: Served, since: int = 0) -> list[str]:
    """Names of the objects of all answers, without listings."""
    return [Path(path).name for _, path, query in server.requests[since:] if "list-type" not in query]


def files(folder: Path) -> dict[str, bytes]:
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    return {name: data for name, data in found.items() if name != staging.MARKER}


def quietly(path: Path) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path)


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.parent.name + "-" + path.name)
def test_a_copy_has_the_files_of_the_source_and_is_fetched_once(path: Path, server: Served, tmp_path: Path) -> None:
    url = put(server, path)
    done = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert files(done.path) == files(path)
    assert (done.files, done.bytes) == (len(files(path)), sum(map(len, files(path).values())))
    assert done.fetched == done.bytes
    assert sorted(set(fetched(server))) == sorted({Path(name).name for name in files(path)})
    assert outcome(done.path) == outcome(path)
    assert quietly(tmp_path / "copy").path == done.path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]
    before = len(server.requests)
    again = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert (again.path, again.bytes, again.fetched) == (done.path, done.bytes, 0)
    assert fetched(server, before) == []
    assert len(server.requests) - before == 1, "one listing"


def test_what_changed_is_fetched_and_nothing_else(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    done = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    reader = quietly(done.path)
    layer = reader.layers[0]
    wanted = reader.last_tokens(layer)
    far = server.root / "bucket/run" / SAEV.name
    shard = far / "acts000001.bin"
    shard.write_bytes(bytes(len(shard.read_bytes())))  # as long as before
    (far / "labels.bin").unlink()
    before = len(server.requests)
    again = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert set(fetched(server, before)) - {"metadata.json", "shards.json"} == {"acts000001.bin"}
    assert again.fetched == shard.stat().st_size
    assert files(again.path) == files(far)
    assert np.array_equal(quietly(again.path).last_tokens(layer)[:2], wanted[:2])
    with pytest.raises(actshard.FormatError, match=r"acts000001\.bin: was replaced after it was opened"):
        reader.last_tokens(layer)  # never a mixture of both
    # What was lost here is fetched too.
    (again.path / "acts000000.bin").unlink()
    assert actshard.stage(url, tmp_path / "copy", storage_options=server.options).fetched > 0
    assert files(again.path) == files(far)


CHILD = """
    import json, os, signal, sys
    from actshard.writing import staging
    staging.folder._FILES = 2
    url, folder, options, layers, after = json.loads(sys.argv[1])
    def progress(what, done, total):
        if done >= after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
    staging.stage(url, folder, layers, storage_options=options, progress=progress)
"""


def killed(*arguments: Any) -> None:
    words = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILD), json.dumps(arguments)]
    assert subprocess.run(words, check=False, timeout=PATIENCE).returncode == -signal.SIGKILL


def test_a_killed_copy_goes_on_with_the_files_that_are_missing(server: Served, tmp_path: Path) -> None:
    url = put(server, LMPROBE)
    tensors = {name: len(data) for name, data in files(LMPROBE).items() if name.startswith("tensors/")}
    half = sum(map(len, files(LMPROBE).values())) - sum(tensors.values()) // 2  # tensors come last
    killed(url, str(tmp_path / "copy"), server.options, None, half)
    assert not (tmp_path / "copy").exists()
    first = set(fetched(server))
    # One of the files that are there already changes meanwhile.
    kept = sorted(f.name for f in (tmp_path / ".copy.actshard-stage/new").rglob("*.safetensors"))
    assert len(kept) > 4
    changed = server.root / "bucket/run" / LMPROBE.name / "tensors" / kept[0]
    changed.write_bytes(changed.read_bytes()[::-1])
    before = len(server.requests)
    done = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert files(done.path) == files(server.root / "bucket/run" / LMPROBE.name)
    assert set(fetched(server, before)) & set(kept) == {kept[0]}
    assert first >= set(kept)
    assert 0 < done.fetched < done.bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


def test_a_kill_between_the_two_renames_loses_nothing(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    done = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    work = tmp_path / ".copy.actshard-stage"
    work.mkdir()
    (tmp_path / "copy").rename(work / "old")
    again = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert (again.path, again.fetched) == (done.path, 0)
    work.mkdir()
    shutil.copytree(tmp_path / "copy", work / "new")
    (tmp_path / "copy").rename(work / "old")
    assert actshard.stage(url, tmp_path / "copy", storage_options=server.options).fetched == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


def _stage(url: str, folder: str, options: dict[str, Any], layers: Any) -> tuple[str, int]:
    done = actshard.stage(url, folder, layers, storage_options=options)
    return str(done.path), done.fetched


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, [3]])
def test_one_of_many_processes_fetches(server: Served, tmp_path: Path, layers: Any) -> None:
    url = put(server, LMPROBE)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        jobs = [pool.apply_async(_stage, (url, str(tmp_path / "copy"), server.options, layers)) for _ in range(4)]
        found = [job.get(120) for job in jobs]
    assert len({path for path, _ in found}) == 1
    assert sum(number > 0 for _, number in found) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.parent.name + "-" + path.name)
def test_a_copy_of_some_layers_is_a_dataset_of_them(path: Path, server: Served, tmp_path: Path) -> None:
    url = put(server, path)
    near = quietly(path)
    layers = near.layers[-1:]
    done = actshard.stage(url, tmp_path / "copy", layers, storage_options=server.options)
    made = quietly(done.path)
    assert (made.format, made.layers, made.dtype, len(made)) == (near.format, layers, near.dtype, len(near))
    for example in range(len(near)):
        assert made.sequence(example, layers[0]).tobytes() == near.sequence(example, layers[0]).tobytes()
    if near.labels is not None:
        assert np.array_equal(made.labels, near.labels)
    assert actshard.verify(done.path, deep=True).ok
    before = len(server.requests)
    assert actshard.stage(url, tmp_path / "copy", layers, storage_options=server.options).fetched == 0
    assert len(server.requests) - before == 1
    others = {name for name in fetched(server) if any(f"layer{layer:03}_" in name for layer in near.layers[:-1])}
    assert others <= {f"hidden_layer{near.layers[0]:03}_shard000.safetensors"}, "one header tells the dtype"


def test_interleaved_layers_are_read_by_their_rows(server: Served, tmp_path: Path) -> None:
    # Other layers lie between: 3 MiB, more than is ever read to save a request.
    rows = np.random.default_rng(1).standard_normal((4, 4, 33, 8192)).astype(np.float32)
    with actshard.create(server.root / "bucket", "saev", layers=[3, 7, 9, 11], d_model=8192) as writer:
        writer.append(rows)
    url = f"s3://bucket/{writer.path.name}"
    done = actshard.stage(url, tmp_path / "copy", [9], storage_options=server.options)
    assert np.array_equal(np.stack(quietly(done.path).sequences(range(4), 9)), rows[:, 2])
    # Each range once: a slow request is sent twice.
    ranges = {
        (path, query) for _, path, query in server.requests if path.endswith(".bin") and query.startswith("bytes=")
    }
    read = 0
    for _, query in ranges:
        first, last = query.removeprefix("bytes=").split("-")
        read += int(last) - int(first) + 1
    assert rows[:, 2].nbytes <= read <= 1.2 * rows[:, 2].nbytes


def test_a_killed_copy_of_some_layers_goes_on(server: Served, tmp_path: Path) -> None:
    url = put(server, LMPROBE)
    layer = quietly(LMPROBE).layers[0]
    killed(url, str(tmp_path / "copy"), server.options, [layer], 1)
    assert not (tmp_path / "copy").exists()
    done = actshard.stage(url, tmp_path / "copy", layer, storage_options=server.options)
    assert actshard.verify(done.path, deep=True).ok
    assert done.layers == (layer,)


def test_token_caches_are_staged(server: Served, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    tokens.build_cache(tmp_path / "a.jsonl", server.root / "bucket/web/train", format={"type": "prebuilt"})
    done = actshard.stage("s3://bucket/web", tmp_path / "copy", storage_options=server.options)
    cache = tokens.open_cache(done.path)
    assert [row["input_ids"].tolist() for row in cache.rows(range(2))] == [[1, 2, 3], [4]]
    assert actshard.stage("s3://bucket/web", tmp_path / "copy", storage_options=server.options).fetched == 0
    with pytest.raises(actshard.ArgumentError, match="has no layers"):
        actshard.stage("s3://bucket/web", tmp_path / "other", [1], storage_options=server.options)


def test_a_folder_with_something_else_is_refused_and_stays(server: Served, tmp_path: Path) -> None:
    url, options = put(server, SAEV), {"storage_options": server.options}
    other = put(server, LMPROBE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with refuses(actshard.ExistsError, tmp_path / "mine", "were not staged"):
        actshard.stage(url, tmp_path / "mine", **options)
    assert (tmp_path / "mine/notes.txt").read_text() == "mine"
    with refuses(actshard.ExistsError, tmp_path / "mine/notes.txt", "expected a folder"):
        actshard.stage(url, tmp_path / "mine/notes.txt", **options)
    actshard.stage(url, tmp_path / "copy", **options)
    with refuses(actshard.ExistsError, tmp_path / "copy", f"contains all layers of {url}"):
        actshard.stage(other, tmp_path / "copy", **options)
    with refuses(actshard.ExistsError, tmp_path / "copy", "contains all layers"):
        actshard.stage(url, tmp_path / "copy", [0], **options)
    (tmp_path / "empty").mkdir()
    assert actshard.stage(url, tmp_path / "empty", **options).fetched > 0


def test_arguments_that_are_wrong_are_told(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = put(server, SAEV), {"storage_options": server.options}
    for layers in ([], [1, 1], [1.5]):
        with pytest.raises(actshard.ArgumentError, match="layers: expected"):
            actshard.stage(url, tmp_path / "copy", layers, **options)  # type: ignore[arg-type]
    with pytest.raises(actshard.LayerError):
        actshard.stage(url, tmp_path / "copy", [99], **options)
    with pytest.raises(actshard.ArgumentError, match=r"found none named \$NO_SUCH_NAME"):
        actshard.stage(url, "$NO_SUCH_NAME/copy", **options)
    with pytest.raises(actshard.ArgumentError, match="expected a local path here"):
        actshard.stage(url, "s3://bucket/copy", **options)
    with pytest.raises(actshard.UnsupportedError, match="cannot list files"):
        actshard.stage(server.web("bucket/run"), tmp_path / "copy")
    put(server, LMPROBE)
    with pytest.raises(actshard.UnknownFormatError, match="contains 2 datasets"):
        actshard.stage("s3://bucket/run", tmp_path / "copy", **options)
    with pytest.raises(actshard.MissingFileError, match="found nothing"):
        actshard.stage("s3://bucket/none", tmp_path / "copy", **options)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 0, 100))  # type: ignore[attr-defined]
    before = len(server.requests)
    with refuses(actshard.DiskFullError, tmp_path / "copy", "100 are free"):
        actshard.stage(url, tmp_path / "copy", **options)
    assert not [name for name in fetched(server, before) if name.endswith(".bin")]
    assert not (tmp_path / "copy").exists()


def test_variables_and_the_home_folder_are_expanded(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(server, LMPROBE)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder, path in (("$SCRATCH/run", "scratch/run"), ("~/run", "home/run")):
        assert actshard.stage(url, folder, storage_options=server.options).path == tmp_path / path


def test_a_local_dataset_is_staged_with_what_links_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("index", "tensors"):
        (tmp_path / "run" / name).symlink_to(LMPROBE / name)
    done = actshard.stage(tmp_path / "run", tmp_path / "copy")
    assert files(done.path) == {k: v for k, v in files(LMPROBE).items() if k.split("/")[0] in ("index", "tensors")}
    assert not (done.path / "index").is_symlink()
    assert actshard.stage(tmp_path / "run", tmp_path / "copy").fetched == 0


def test_a_staged_copy_needs_no_server(tmp_path: Path) -> None:
    with served(tmp_path / "served") as server:
        url, options = put(server, SAEV), server.options
        done = actshard.stage(url, tmp_path / "copy", storage_options=options)
    assert actshard.stage(url, tmp_path / "copy", storage_options=options, check=False) == replace(done, fetched=0)
    assert len(quietly(done.path)) == len(quietly(SAEV))


def test_a_copy_of_the_hub_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub() as lab:
        monkeypatch.setenv("HF_ENDPOINT", lab.url)
        commit = lab.add("lab/acts", LMPROBE)
        done = actshard.stage("hf://datasets/lab/acts", tmp_path / "copy")
        assert done.revision == commit
        assert files(done.path) == files(LMPROBE)
        assert len({path for kind, path, _ in lab.requests if kind == "resolve"}) == done.files
        before = lab.count("resolve")
        assert actshard.stage("hf://datasets/lab/acts", tmp_path / "copy").fetched == 0
        assert lab.count("resolve") == before
        with monkeypatch.context() as patch:
            patch.setattr(actshard.writing.staging, "check_digests", lambda *_: sys.exit("killed"))
            with pytest.raises(SystemExit):
                actshard.stage("hf://datasets/lab/acts", tmp_path / "other")
        with monkeypatch.context() as patch:  # the files of the killed call are compared, too
            patch.setattr(actshard._native, "digest_file", lambda path: (0, "0" * 64))
            with pytest.raises(actshard.FormatError, match="expected SHA-256"):
                actshard.stage("hf://datasets/lab/acts", tmp_path / "other")
        assert not (tmp_path / "other").exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert actshard.stage("hf://datasets/lab/acts", tmp_path / "copy").revision == commit
    said = json.loads(command("info", str(tmp_path / "copy"), "--json").stdout)
    assert said["staged_from"] == {"source": done.source, "revision": commit, "layers": None}
    assert commit in command("info", str(tmp_path / "copy"), COLUMNS="300").stdout


def test_the_command_stages(server: Served, tmp_path: Path) -> None:
    url = put(server, LMPROBE)
    layer = quietly(LMPROBE).layers[0]
    done = json.loads(
        command("stage", url, str(tmp_path / "copy"), "--layers", str(layer), *words_of(server), "--json").stdout
    )
    assert (done["path"], done["layers"]) == (str(tmp_path / "copy"), [layer])
    said = command("stage", url, str(tmp_path / "copy"), "--layers", str(layer), *words_of(server)).stdout
    assert "the copy was complete" in said
    assert f"layers {layer}" in command("info", str(tmp_path / "copy"), COLUMNS="300").stdout


def test_secrets_are_in_no_marker(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    options = {**server.options, "key": "AKIAPUBLIC", "secret": "hushhush"}
    options.pop("anon")
    actshard.stage(url, tmp_path / "copy", storage_options=options)
    assert "hushhush" not in (tmp_path / "copy" / staging.MARKER).read_text()


def test_files_of_the_user_in_a_copy_stay_when_it_is_replaced(server: Served, tmp_path: Path) -> None:
    url = put(server, ZARR)
    copy, far = tmp_path / "copy", server.root / "bucket/run" / ZARR.name
    actshard.stage(url, copy, storage_options=server.options)
    mine = {"probes/layer3/probe.pkl": "a week of work", "README.md": "notes", "arrays/activations/mine.txt": "x"}
    for name, text in mine.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text)
    (copy / "link").symlink_to(tmp_path, target_is_directory=True)
    (far / ".zattrs").write_text((far / ".zattrs").read_text() + " ")
    (far / "arrays/lost").mkdir()
    (far / "arrays/lost/.zgroup").write_text("{}")
    for _ in range(2):
        actshard.stage(url, copy, storage_options=server.options)
        assert {name: (copy / name).read_text() for name in mine} == mine
        assert (copy / "link").is_symlink()
        assert (copy / "arrays/lost/.zgroup").exists() == (far / "arrays/lost").exists()
        shutil.rmtree(far / "arrays/lost", ignore_errors=True)
    assert set(files(copy)) - set(mine) == set(files(far)), "what was staged, and is gone, does not stay"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


def test_a_copy_is_not_replaced_where_the_new_one_needs_a_name_of_the_user(server: Served, tmp_path: Path) -> None:
    url = put(server, ZARR)
    copy, far = tmp_path / "copy", server.root / "bucket/run" / ZARR.name
    actshard.stage(url, copy, storage_options=server.options)
    (copy / "README.md").write_text("mine")
    (copy / "notes").write_text("mine")
    (far / "README.md").write_text("theirs")
    (far / "notes").mkdir()
    (far / "notes/a").write_text("theirs")
    with pytest.raises(actshard.ExistsError, match=r"README\.md, notes\. Move them"):
        actshard.stage(url, copy, storage_options=server.options)
    assert (copy / "README.md").read_text() == (copy / "notes").read_text() == "mine"
    (copy / "README.md").unlink()
    (copy / "notes").unlink()
    actshard.stage(url, copy, storage_options=server.options)
    assert files(copy) == files(far)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


def test_a_file_that_comes_into_an_empty_folder_while_it_is_staged_stays(server: Served, tmp_path: Path) -> None:
    url = put(server, ZARR)
    copy = tmp_path / "copy"
    copy.mkdir()

    def progress(what: str, done: int, total: int) -> None:
        (copy / "mine").write_text("mine")

    with pytest.raises(actshard.ExistsError, match="were not staged"):
        actshard.stage(url, copy, storage_options=server.options, progress=progress)
    assert [p.name for p in copy.iterdir()] == ["mine"]


def test_a_kill_between_the_renames_keeps_files_of_the_user(server: Served, tmp_path: Path) -> None:
    url = put(server, ZARR)
    copy, far = tmp_path / "copy", server.root / "bucket/run" / ZARR.name
    actshard.stage(url, copy, storage_options=server.options)
    (copy / "mine").write_text("mine")
    (far / ".zattrs").write_text((far / ".zattrs").read_text() + " ")
    end = "pathlib.Path.rename = lambda *a: os.kill(os.getpid(), signal.SIGKILL)"
    code = f"import os, pathlib, signal, sys, json; from actshard.writing import staging; {end}; u, f, o = json.loads(sys.argv[1]);"
    words = [sys.executable, "-W", "ignore", "-c", f"{code} staging.stage(u, f, storage_options=o)"]
    words.append(json.dumps([url, str(copy), server.options]))
    assert subprocess.run(words, check=False, timeout=PATIENCE).returncode == -signal.SIGKILL
    actshard.stage(url, copy, storage_options=server.options)
    assert (copy / "mine").read_text() == "mine"
    assert set(files(copy)) - {"mine"} == set(files(far))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


def test_a_copy_of_layers_is_replaced_with_files_of_the_user(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    layer = quietly(SAEV).layers[0]
    actshard.stage(url, tmp_path / "copy", layer, storage_options=server.options)
    (tmp_path / "copy/mine").write_text("mine")
    (server.root / "bucket/run" / SAEV.name / "labels.bin").unlink()
    actshard.stage(url, tmp_path / "copy", layer, storage_options=server.options)
    assert (tmp_path / "copy/mine").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "served"]


def test_a_token_cache_that_is_being_uploaded_is_not_staged(server: Served, tmp_path: Path) -> None:
    cache = next(p.parent for p in sorted(GOLDEN.parent.rglob("shard_ledger.json")))
    url = put(server, cache)
    (server.root / "bucket/run" / cache.name / ".actshard-pushing.json").write_text("{}")
    with pytest.raises(actshard.UnfinishedError, match="is being uploaded"):
        actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["served"]


def test_a_refusal_leaves_nothing(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put(server, ZARR)
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: True)
    with pytest.raises(actshard.ExistsError, match="mount point"):
        actshard.stage(url, tmp_path / "mine", storage_options=server.options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "served"]


@pytest.mark.parametrize("field", ["files", "losses", "inside", "below", "listed"])
def test_a_damaged_marker_is_none(field: str, server: Served, tmp_path: Path) -> None:
    url = put(server, ZARR)
    actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    marker = tmp_path / "copy" / staging.MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {field: None}))
    with pytest.raises(actshard.ExistsError, match="were not staged"):
        actshard.stage(url, tmp_path / "copy", storage_options=server.options)


def test_a_file_that_was_changed_after_it_was_staged_is_noticed_and_kept(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    made = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    shard = made.path / "acts000001.bin"
    for edit in (bytes(shard.stat().st_size), b"edited by me"):
        shard.write_bytes(edit)
        with pytest.raises(actshard.ExistsError, match=r"changed after they were staged: acts000001\.bin"):
            actshard.stage(url, tmp_path / "copy", storage_options=server.options)
        assert shard.read_bytes() == edit
    before = len(server.requests)
    shard.rename(tmp_path / "mine.bin")
    actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert {name for name in fetched(server, before) if name.startswith("acts")} <= {"acts000001.bin"}
    assert files(made.path) == files(SAEV)
    shard.touch()  # equal bytes: nothing of the user's is lost
    actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert files(made.path) == files(SAEV)


def test_a_damaged_file_is_not_carried_into_the_next_copy(server: Served, tmp_path: Path) -> None:
    url = put(server, ZARR)
    made = actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    chunk = next(f for f in sorted(made.path.rglob("1.0.0.0")))
    wrong = bytes(chunk.stat().st_size)
    chunk.write_bytes(wrong)
    source = server.root / "bucket/run" / ZARR.name / ".zattrs"
    source.write_bytes(source.read_bytes() + b" ")
    with pytest.raises(actshard.ExistsError, match="changed after they were staged"):
        actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert chunk.read_bytes() == wrong
    chunk.unlink()
    actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    assert files(made.path) == files(server.root / "bucket/run" / ZARR.name)


def test_the_same_url_of_another_server_is_another_source(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    actshard.stage(url, tmp_path / "copy", storage_options=server.options)
    shutil.copytree(server.root, tmp_path / "second")
    with served(tmp_path / "second") as second:
        for check in (True, False):
            with pytest.raises(actshard.ExistsError, match="from another server"):
                actshard.stage(url, tmp_path / "copy", storage_options=second.options, check=check)
    assert "127.0.0.1" not in (tmp_path / "copy" / staging.MARKER).read_text()


@pytest.mark.parametrize("near", [True, False])
def test_files_that_are_replaced_while_they_are_staged_are_noticed(
    near: bool, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(server, SAEV)
    folder = server.root / "bucket/run" / SAEV.name
    (folder / "empty.txt").write_bytes(b"")
    name = "acts000001.bin" if near else "empty.txt"
    copy = actshard._native.copy_ranges

    def replaced(ranges: Any) -> None:
        copy(ranges)
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            (folder / name).write_bytes(bytes((folder / name).stat().st_size) or b"full")

    monkeypatch.setattr(actshard._native, "copy_ranges", replaced)
    where, options = (folder, None) if near else (url, server.options)
    with pytest.raises(actshard.FormatError, match=f"{name}: was replaced while it was staged"):
        actshard.stage(where, tmp_path / "copy", storage_options=options)
    actshard.stage(where, tmp_path / "copy", storage_options=options)
    made = actshard.stage(where, tmp_path / "copy", storage_options=options)
    assert files(made.path) == files(folder)


def test_the_working_folder_is_not_replaced(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put(server, SAEV)
    (tmp_path / "run/below").mkdir(parents=True)
    for where in ("run", "run/below"):
        monkeypatch.chdir(tmp_path / where)
        with pytest.raises(actshard.ExistsError, match="is the working folder of this process"):
            actshard.stage(url, "." if where == "run" else "..", storage_options=server.options)
        assert Path.cwd() == tmp_path / where
    with pytest.raises(actshard.ArgumentError, match="expected a folder below /"):
        actshard.stage(url, "/", storage_options=server.options)
    monkeypatch.chdir(tmp_path)
    made = actshard.stage(url, "run/new", storage_options=server.options)
    assert files(made.path) == files(SAEV)


def test_bytes_of_pickle_shards_are_counted(server: Served, tmp_path: Path) -> None:
    url = put(server, GOLDEN / "pickle/numpy2_proto5")
    layer = quietly(GOLDEN / "pickle/numpy2_proto5").layers[0]
    assert actshard.stage(url, tmp_path / "copy", layer, storage_options=server.options).fetched > 0
