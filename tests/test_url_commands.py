"""Verifying and converting datasets behind URLs, and the commands: as for local files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import tokens
from conftest import GOLDEN, saev_dump
from served import Served, served
from shell import run_command
from test_urls import quietly, same

SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "served") as found:
        yield found


def golden() -> list[Any]:
    """Every golden dataset, and those that are broken on purpose."""
    found = [saev_dump(f.parent) for f in sorted((GOLDEN / "saev").glob("*/expected.npz"))]
    for kinds in ("saev/errors", "lmprobe", "pickle", "pickle/hostile", "zarr", "zarr_codecs", "hallulens_v1"):
        found += [f for f in sorted((GOLDEN / kinds).iterdir()) if f.is_dir() and f.name != "hostile"]
    return [pytest.param(path, id=str(path.relative_to(GOLDEN))[:50]) for path in found]


def outcome(path: str | Path, **options: Any) -> Any:
    """What verify() says, without the path of the dataset."""
    try:
        report = actshard.verify(path, deep=True, **options)
    except actshard.ActshardError as error:
        return type(error), str(error)
    above = str(report.path)
    said = [
        (f.code, str(f.path).removeprefix(above), f.place, f.expected, f.found.replace(above, ""))
        for f in report.findings
    ]
    return report.format, report.status, report.checked, said


DECODED_FROM_AFAR = ("v3_sharded", "v3_shards.zarr")
"""Shards of plain chunks: local ones are read in place, and those of a network chunk by chunk, which is noted."""
NOTED_OTHERWISE = ("v3_shards_crc32c.zarr",)
"""Plain chunks with checksums: local ones are decoded, too, which takes longer than to read them."""


@pytest.mark.parametrize("path", golden())
def test_verify_finds_the_same_in_a_bucket_as_in_a_folder(path: Path, server: Served) -> None:
    near = server.root / "bucket" / path.name
    shutil.copytree(path, near)
    far = outcome(f"s3://bucket/{path.name}", storage_options=server.options)
    local = outcome(near)
    if path.name in (*DECODED_FROM_AFAR, *NOTED_OTHERWISE):
        assert far[-1].pop(0)[0] == "layout"
    if path.name in NOTED_OTHERWISE:
        assert local[-1].pop(0)[0] == "layout"
    assert far == local


@pytest.mark.parametrize("path", [SAEV, GOLDEN / "pickle/numpy2_proto5", GOLDEN / "pickle/hostile/builtins_eval"])
def test_verify_of_a_web_server_says_that_it_cannot_list(path: Path, server: Served) -> None:
    near = server.root / path.name
    shutil.copytree(path, near)
    format, status, checked, said = outcome(server.web(path.name))
    assert said.pop(0)[0] == "not-listed"
    assert (format, status, checked, said) == outcome(near)


def test_verify_of_a_url_tells_progress_and_can_be_interrupted(server: Served) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    told: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append(what)
        if what == "layers":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        actshard.verify(f"s3://bucket/{SAEV.name}", deep=True, progress=progress, storage_options=server.options)
    assert "shards" in told


@pytest.mark.parametrize(("kind", "path"), [("web", SAEV), ("bucket", GOLDEN / "lmprobe/fullseq_f32")])
def test_convert_reads_urls_with_their_options(kind: str, path: Path, server: Served, tmp_path: Path) -> None:
    shutil.copytree(path, server.root / "bucket" / path.name)
    url = server.web(f"bucket/{path.name}") if kind == "web" else f"s3://bucket/{path.name}"
    options: Any = {} if kind == "web" else {"storage_options": server.options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far = actshard.convert(url, tmp_path / "far", "zarr", verify=True, **options)
        near = actshard.convert(path, tmp_path / "near", "zarr")
        one, two = actshard.open(far.path), actshard.open(near.path)
    assert [loss.what for loss in far.losses] == [loss.what for loss in near.losses]
    for layer in two.layers:
        for example in range(len(two)):
            assert one.sequence(example, layer).tobytes() == two.sequence(example, layer).tobytes()
    with pytest.raises(actshard.ArgumentError, match="expected a URL"):
        actshard.convert(one, tmp_path / "again", "zarr", storage_options={"region": "x"})


def test_a_conversion_does_not_resume_from_a_source_that_changed(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    url, options = f"s3://bucket/{SAEV.name}", {"storage_options": server.options}

    def stop(done: int, *_: int) -> None:
        raise KeyboardInterrupt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyboardInterrupt):
            actshard.convert(url, tmp_path / "made", "pickle", progress=stop, **options)
        shard = server.root / "bucket" / SAEV.name / "acts000001.bin"
        shard.write_bytes(bytes(shard.stat().st_size))  # as long as before
        with pytest.raises(actshard.ArgumentError, match="source"):
            actshard.convert(url, tmp_path / "made", "pickle", resume=True, **options)


def command(*words: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = run_command(*words, **environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def words_of(server: Served, option: str = "--storage-option") -> list[str]:
    return [word for name, value in server.options.items() for word in (option, f"{name}={str(value).lower()}")]


def test_commands_take_urls(server: Served, tmp_path: Path) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    url, options = f"s3://bucket/{SAEV.name}", words_of(server)
    near = actshard.open(SAEV)
    info = json.loads(command("info", url, *options, "--json").stdout)
    expected = near.info()
    assert info["path"] == url
    assert {k: v for k, v in info.items() if k not in ("path", "io")} == json.loads(
        json.dumps({k: v for k, v in expected.items() if k not in ("path", "io")})
    )
    assert url in command("info", url, *options).stdout.replace("\n", "")
    assert json.loads(command("head", url, *options, "--json").stdout) == json.loads(
        command("head", str(SAEV), "--json").stdout
    )
    assert json.loads(command("stats", url, *options, "--json").stdout) == json.loads(
        command("stats", str(SAEV), "--json").stdout
    )
    cache = tmp_path / "cache"
    report = json.loads(command("verify", url, *options, "--deep", "--cache", str(cache), "--json").stdout)
    assert report["ok"]
    assert report["path"] == url
    assert any((cache / "objects").iterdir())
    done = json.loads(
        command(
            "convert", url, str(tmp_path / "made"), "--to", "zarr", *words_of(server, "--storage-option"), "--json"
        ).stdout
    )
    assert np.array_equal(actshard.open(done["path"]).last_tokens(near.layers[0]), near.last_tokens(near.layers[0]))


def test_commands_take_urls_of_token_caches(server: Served, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    near = server.root / "bucket/web/train"
    tokens.build_cache(tmp_path / "a.jsonl", near, format={"type": "prebuilt"})
    options = words_of(server)
    for verb in ("info", "head", "verify"):
        wanted = json.loads(command(verb, str(near), "--json").stdout)
        places = [
            ("s3://bucket/web", options),
            ("s3://bucket/web/train", options),
            (server.web("bucket/web/train"), []),
        ]
        for url, words in places if verb == "head" else places[:2]:
            found = json.loads(command(verb, url, *words, "--json").stdout)
            if verb == "head":
                assert found == wanted
            else:
                differ = {name for name in wanted if found[name] != wanted[name]}
                assert differ <= {"path", "io"}, (verb, found, wanted)


def test_info_and_verify_do_not_ask_for_each_chunk(server: Served) -> None:
    path = GOLDEN / "zarr/single_minimal/activations.zarr"
    shutil.copytree(path, server.root / "bucket" / path.name)
    url, options = f"s3://bucket/{path.name}", {"storage_options": server.options}

    def chunks(since: int) -> list[str]:
        return [
            p for _, p, _ in server.requests[since:] if "/activations/" in p and not p.endswith((".zarray", ".zattrs"))
        ]

    far = actshard.open(url, **options)
    assert far.info()["bytes"] == actshard.open(path).info()["bytes"]
    assert chunks(0) == []
    before = len(server.requests)
    assert actshard.verify(url, **options).ok
    assert chunks(before) == []


def test_stats_prints_a_row_per_layer_or_json(tmp_path: Path) -> None:
    near = actshard.open(SAEV)
    found = json.loads(command("stats", str(SAEV), "--json").stdout)
    assert list(found) == [str(layer) for layer in near.layers]
    stats = near.stats(near.layers[1])
    one = found[str(near.layers[1])]
    assert (one["rows"], one["mean_norm"], one["mean"]) == (stats.rows, stats.mean_norm, stats.mean.tolist())
    assert list(json.loads(command("stats", str(SAEV), "--layer", str(near.layers[1]), "--json").stdout)) == [
        str(near.layers[1])
    ]
    lines = command("stats", str(SAEV)).stdout.splitlines()
    assert sum(line.split()[0] in found for line in lines if line.strip()) == len(near.layers)
    assert "layer" in command("stats", str(SAEV), "--layer", "99", status=3).stderr


def test_options_that_are_wrong_are_told_without_their_values(server: Served) -> None:
    (server.root / "bucket").mkdir(parents=True)
    for words in (
        ["--storage-option", "hushhush"],
        ["--storage-option", "=hushhush"],
        ["--storage-option", "secret=hushhush", "--storage-option", "secret=hushhush"],
    ):
        said = command("info", "s3://bucket/x", *words, status=3).stderr
        assert "--storage-option: expected" in said
        assert "hushhush" not in said
    said = command("info", "s3://bucket/x", "--storage-option", "regoin=x", status=3).stderr
    assert "regoin" in said
    said = command("verify", "s3://bucket/x", *words_of(server), status=3).stderr
    assert said == "actshard: s3://bucket/x: expected a dataset, found nothing\n"
    said = command("info", str(SAEV), "--storage-option", "region=x", status=3).stderr
    assert "expected a URL" in said


def test_the_help_says_where_secrets_belong() -> None:
    said = " ".join(command("info", "--help", COLUMNS="200").stdout.replace("│", "").split())
    assert "pass secrets in environment variables" in said


def test_the_cache_on_disk_is_looked_at_and_cleared(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAEV, server.root / "bucket" / SAEV.name)
    folder = tmp_path / "cache"
    monkeypatch.setenv("ACTSHARD_CACHE", str(folder))
    assert actshard.cache_info() == actshard.CacheInfo(folder, 0, None, 0)
    assert actshard.clear_cache() == actshard.CacheInfo(folder, 0, None, 0)
    assert not folder.exists()
    store = actshard.open(f"s3://bucket/{SAEV.name}", storage_options=server.options, cache="50MiB")
    rows = store.last_tokens(store.layers[0])
    found = actshard.cache_info()
    assert (found.folder, found.limit) == (folder, 50 << 20)
    assert found.objects > 0
    assert found.bytes > 0
    assert json.loads(command("cache", "info", "--json").stdout) == found.as_dict()
    assert "52.4 MB" in command("cache", "info", str(folder)).stdout
    said = json.loads(command("cache", "clear", "--json").stdout)
    assert (said["freed"], said["bytes"], said["objects"]) == (found.bytes, 0, 0)
    # A store that is open goes on.
    assert np.array_equal(store.last_tokens(store.layers[0]), rows)
    assert np.array_equal(store.last_tokens(store.layers[0]), rows)
    assert actshard.clear_cache(folder).bytes == 0
    assert "0 B removed" in command("cache", "clear", str(folder)).stdout


def test_a_folder_that_is_no_cache_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects/mine").write_text("mine")
    for verb in ("info", "clear"):
        said = command("cache", verb, str(tmp_path), status=3).stderr
        assert said == f"actshard: {tmp_path}: expected a cache on disk, found none\n"
    with pytest.raises(actshard.NotAFileError, match="expected the folder of a cache"):
        actshard.cache_info(tmp_path / "objects/mine")
    assert (tmp_path / "objects/mine").read_text() == "mine"


@pytest.mark.slow
def test_zarr_of_many_chunks_on_a_web_server(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks are neither listed nor asked for one by one: what needs their number is not told."""
    rng = np.random.default_rng(0)
    local = server.root / "many.zarr"
    with actshard.create(local, "zarr", layers=[3, 5], d_model=4) as writer:
        for _ in range(50):
            writer.append(rng.normal(size=(1, 2, 3, 4)).astype("f4"))
    (local / "meta").mkdir(exist_ok=True)
    assert len(list((local / "arrays/activations").iterdir())) > 65
    near = quietly(local)
    monkeypatch.setattr("actshard.formats.zarr.member.UNSTORED_SAMPLES", 10)
    url = server.web("many.zarr")
    far = quietly(url)
    same(far, near)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    server.requests.clear()
    told = far.info()
    assert (told["shards"], told["missing_shards"], told["bytes"]) == (None, None, None)
    assert len(server.requests) < 10
    assert told["examples"] == 50
    ran = subprocess.run(
        [sys.executable, "-m", "actshard.cli", "info", url], capture_output=True, text=True, check=True
    )
    assert "not counted" in ran.stdout
    report = actshard.verify(url)
    assert "not-listed" in [finding.code for finding in report.findings]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyboardInterrupt):
            actshard.convert(url, tmp_path / "made", "pickle", progress=stop)
        made = actshard.convert(url, tmp_path / "made", "pickle", resume=True)
        for layer, e in ((3, 0), (5, 49)):
            assert quietly(made.path).sequence(e, layer).tobytes() == near.sequence(e, layer).tobytes()
        with pytest.raises(KeyboardInterrupt):
            actshard.convert(url, tmp_path / "other", "pickle", progress=stop)
        for chunk in (local / "arrays/activations").iterdir():
            if chunk.name[0] != ".":
                chunk.write_bytes(bytes(chunk.stat().st_size))
        with pytest.raises(actshard.ArgumentError, match="source"):
            actshard.convert(url, tmp_path / "other", "pickle", resume=True)
