"""Token caches behind URLs: the same rows, examples and streams as local ones, few requests, and errors in one line."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import tokens
from actshard.compat import levanter
from conftest import GOLDEN
from hub import Hub, hub
from served import Served, served
from waiting import PATIENCE, wait_until

LEVANTER = GOLDEN / "levanter"
CACHES = sorted(p.parent for p in LEVANTER.rglob("shard_ledger.json"))
"""Also those of single shards, which a build leaves behind."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "served") as found:
        yield found


def put(server: Served, cache: Path, name: str = "run") -> None:
    """Copies a cache to where all the URLs of :func:`urls` find it."""
    shutil.copytree(cache, server.root / "lab/acts" / name)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no token of whoever runs the tests
    with hub() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def open_at(kind: str, server: Served, lab: Hub | None = None, name: str = "run") -> tokens.TokenCache:
    """Opens what :func:`put` copied, by one kind of URL."""
    if kind == "s3":
        return tokens.open_cache(f"s3://lab/acts/{name}", storage_options=server.options)
    if kind == "web":
        return tokens.open_cache(server.web(f"lab/acts/{name}"))
    assert lab is not None
    lab.add("lab/acts", server.root / "lab/acts")
    return tokens.open_cache(f"hf://datasets/lab/acts/{name}")


def equal(far: tokens.TokenCache, near: tokens.TokenCache) -> None:
    """Asserts that two caches hold the same, by every way of reading."""
    assert (len(far), far.fields, far.num_tokens, far.token_field) == (
        len(near),
        near.fields,
        near.num_tokens,
        near.token_field,
    )
    assert far.ledger == near.ledger
    some = np.random.default_rng(0).integers(-len(near), len(near), 40) if len(near) else []
    for a, b in zip(far.rows(some), near.rows(some), strict=True):
        same_rows(a, b)
    for i in range(len(near)):
        same_rows(far[i], near[i])
    for name in near.fields:
        a, b = far.view(name), near.view(name)
        assert (a.dtype, a.num_elements) == (b.dtype, b.num_elements)
        assert np.array_equal(a.offsets, b.offsets)
        assert a.elements().tobytes() == b.elements().tobytes()
        assert a.elements(3, 11).tobytes() == b.elements(3, 11).tobytes()


def same_rows(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert sorted(a) == sorted(b)
    for name, row in b.items():
        assert (a[name].dtype, a[name].shape) == (row.dtype, row.shape)
        assert a[name].tobytes() == row.tobytes()


def datasets(cache: tokens.TokenCache) -> list[Any]:
    """Each kind of examples that a cache has."""
    weights = "loss_weights" if "loss_weights" in cache.fields else None
    windows = tokens.TokenSeqDataset(cache, 16, weights)
    made: list[Any] = [windows, tokens.CausalLmDataset(windows, eos_id=1)]
    made.append(tokens.PackedTokenDataset(cache, 64, loss_weights_key=weights))
    made.append(tokens.PackedTokenDataset(cache, 64, slice_strategy="right", pack=3))
    if "assistant_masks" in cache.fields:
        made.append(tokens.ChatDataset(cache, 64))
    return made


def same_batches(far: Any, near: Any) -> None:
    a, b = far.get_batch(range(len(near))), near.get_batch(range(len(near)))
    for name in ("tokens", "loss_weight", "segment_ids"):
        x, y = getattr(a, name, a), getattr(b, name, b)
        assert (x is None) == (y is None)
        assert x is None or (x.dtype == y.dtype and x.tobytes() == y.tobytes())


@pytest.mark.filterwarnings("ignore:.*without eos tokens")
@pytest.mark.parametrize("cache", CACHES, ids=[str(c.relative_to(LEVANTER)).replace("/cache", "") for c in CACHES])
@pytest.mark.parametrize("kind", ["s3", "hf", "web"])
def test_a_remote_cache_holds_what_the_folder_holds(cache: Path, kind: str, server: Served, lab: Hub) -> None:
    put(server, cache)
    near = tokens.open_cache(cache)
    far = open_at(kind, server, lab)
    if kind == "web" and not near.ledger.field_counts:
        assert (len(far), far.fields) == (0, ()), "the folders of an empty cache cannot be listed"
        return
    equal(far, near)
    if "feats" not in near.fields and len(near):
        for a, b in zip(datasets(far), datasets(near), strict=True):
            assert len(a) == len(b)
            same_batches(a, b)
    if "prebuilt_weights" in str(cache):
        same_batches(tokens.PrebuiltLmDataset(far, 128), tokens.PrebuiltLmDataset(near, 128))


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_opening_reads_the_ledger_only(kind: str, server: Served) -> None:
    put(server, LEVANTER / "chat_llama3style/cache/train")
    cache = open_at(kind, server)
    assert (len(cache), cache.num_tokens) == (20, 1986)
    marker = ["lab/acts/run/.actshard-pushing.json"] if kind == "s3" else []
    assert server.since(0) == ["lab/acts/run/shard_ledger.json", *marker]
    assert str(cache.path) == (server.web("lab/acts/run") if kind == "web" else "s3://lab/acts/run")


def test_a_cache_that_is_being_replaced_does_not_open(server: Served) -> None:
    put(server, LEVANTER / "chat_llama3style/cache/train")
    cache = open_at("s3", server)
    marker = server.root / "lab/acts/run/.actshard-pushing.json"
    marker.write_text("{}")
    with pytest.raises(actshard.UnfinishedError, match="is being uploaded"):
        open_at("s3", server)
    with pytest.raises(actshard.UnfinishedError, match="is being uploaded"):
        tokens.open_cache("s3://lab/acts", storage_options=server.options)
    before = len(server.requests)
    pickle.loads(pickle.dumps(cache))
    assert server.since(before) == []
    marker.unlink()
    server.is_listed, server.absent = False, (403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
    assert len(open_at("s3", server)) == 20


def test_opening_on_the_hub_asks_for_the_commit_and_the_ledger(server: Served, lab: Hub) -> None:
    put(server, LEVANTER / "serial_rank2/cache")
    cache = open_at("hf", server, lab)
    assert len(cache) == 9
    asked = list(dict.fromkeys(lab.requests))
    assert [path.rpartition("/")[2] for _, path, _ in asked[:2]] == ["main", "shard_ledger.json"]
    assert all(path.endswith("shard_ledger.json") for _, path, _ in asked[1:])
    assert len(asked) <= 3, asked


def many_shards(server: Served) -> tuple[Path, list[str]]:
    """A cache of 1,113 shards, of which three are there."""
    shards = [f"train-{n:05d}-of-01113" for n in range(1113)]
    with tokens.CacheWriter(server.root / "lab/one", {"input_ids": np.int32}) as writer:
        writer.append([{"input_ids": np.arange(40, dtype=np.int32)} for _ in range(5)])
    ledger = {
        "total_num_rows": 5 * len(shards),
        "shard_rows": dict.fromkeys(shards, 5),
        "is_finished": True,
        "finished_shards": shards,
        "field_counts": {"input_ids": 200 * len(shards)},
        "field_counts_by_shard": {shard: {"input_ids": 200} for shard in shards},
        "layout": "sharded",
        "metadata": {},
    }
    root = server.root / "lab/many"
    for n in (0, 7, 1112):
        shutil.copytree(server.root / "lab/one", root / shards[n])
    (root / "shard_ledger.json").write_text(json.dumps(ledger))
    return root, shards


def test_a_cache_of_a_thousand_shards_opens_on_the_hub_without_their_listing(server: Served, lab: Hub) -> None:
    root, shards = many_shards(server)
    lab.add("lab/acts", root)
    commit = lab.repositories["lab/acts"].names["main"]
    files = lab.repositories["lab/acts"].commits[commit]
    one = {name.partition("/")[2]: data for name, data in files.items() if name.startswith(shards[0])}
    for shard in shards:
        files.update({f"{shard}/{name}": data for name, data in one.items()})
    cache = tokens.open_cache("hf://datasets/lab/acts")
    assert len(cache) == 5 * len(shards)
    assert len(set(lab.requests)) <= 3, lab.requests
    assert not lab.count("tree")
    before = len(lab.requests)
    again = pickle.loads(pickle.dumps(cache))
    assert len(lab.requests) == before, "a copy asks for nothing"
    for found in (cache, again):
        assert np.array_equal(found[5 * 700]["input_ids"], np.arange(40, dtype=np.int32))
    lab.repositories["lab/acts"].commit({"README.md": b"empty"})
    assert np.array_equal(cache[1]["input_ids"], np.arange(40, dtype=np.int32)), "it stays at its commit"


def test_a_cache_of_a_thousand_shards_opens_without_a_request_for_a_shard(server: Served) -> None:
    """Nor for their listing. A window opens its own shard."""
    _, shards = many_shards(server)
    cache = tokens.open_cache("s3://lab/many", storage_options=server.options)
    opened = len(server.requests)
    # A slow answer is asked for again: the same path twice.
    assert list(dict.fromkeys(server.since(0))) == ["lab/many/shard_ledger.json", "lab/many/.actshard-pushing.json"]
    windows = tokens.TokenSeqDataset(cache, 100)
    assert len(windows) == 2226
    # The first shard has the field's dtype, and shapes if rows have several axes.
    assert [path.split("/")[2:] for path in dict.fromkeys(server.since(opened))] == [
        [shards[0], "input_ids", name, "zarr.json"] for name in ("data", "shapes")
    ]
    # Windows 14 and 15 are shard 7.
    assert windows.get_batch([14]).tobytes() == np.tile(np.arange(40, dtype=np.int32), 3)[:100].tobytes()
    touched = {path.split("/")[2] for path in server.since(opened)}
    assert touched == {shards[0], shards[7]}
    assert not any("list-type" in query for _, _, query in server.requests)
    before = len(server.requests)
    again = pickle.loads(pickle.dumps(windows))
    assert server.since(before) == []
    assert np.array_equal(again.get_batch([15]), windows.get_batch([15]))
    with pytest.raises(
        actshard.MissingFileError, match=r"^s3://lab/many/train-00001-of-01113/input_ids/data/zarr\.json"
    ):
        windows.get_batch([2])


def test_the_only_cache_below_a_url_is_opened(server: Served, lab: Hub) -> None:
    put(server, LEVANTER / "text_gpt2style_single/cache", "fine/web")
    near = tokens.open_cache(LEVANTER / "text_gpt2style_single/cache")
    for kind in ("s3", "hf"):
        far = open_at(kind, server, lab, "fine")
        assert far[3]["input_ids"].tobytes() == near[3]["input_ids"].tobytes()
        with pytest.raises(actshard.MissingFileError, match=r"run: expected a token cache with a shard_ledger\.json"):
            open_at(kind, server, lab, "run")
    put(server, LEVANTER / "prebuilt_serial_varlen/cache", "fine/other")
    with pytest.raises(actshard.ArgumentError, match=r"contains 2 token caches\. Open one of them: other, web/train"):
        open_at("s3", server, name="fine")


def test_a_ledger_without_fields_is_completed_by_listings_of_folders(server: Served, lab: Hub) -> None:
    put(server, LEVANTER / "serial_rank2/cache")
    path = server.root / "lab/acts/run/shard_ledger.json"
    ledger = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in ledger.items() if k != "field_counts"}))
    near = tokens.open_cache(server.root / "lab/acts/run")
    for kind in ("s3", "hf"):
        equal(open_at(kind, server, lab), near)
    listed = [query for _, _, query in server.requests if "list-type" in query]
    assert not any("data" in query or "offsets" in query for query in listed), listed
    with pytest.raises(actshard.UnsupportedError, match="cannot be listed: copy the cache to a local folder"):
        open_at("web", server)


def test_a_ledger_that_is_wrong_is_an_error_before_a_row(server: Served) -> None:
    put(server, LEVANTER / "text_gpt2style_single/cache/train")
    path = server.root / "lab/acts/run/shard_ledger.json"
    for name, count in (("total_num_rows", 49), ("field_counts", {"input_ids": 27809})):
        path.write_text(
            json.dumps(
                json.loads((LEVANTER / "text_gpt2style_single/cache/train" / path.name).read_text()) | {name: count}
            )
        )
        cache = tokens.open_cache("s3://lab/acts/run", storage_options=server.options)
        for read in (lambda c: c[0], lambda c: c.rows([1, 2]), lambda c: tokens.TokenSeqDataset(c, 32).get_batch([0])):
            with pytest.raises(actshard.FormatError, match="the ledger counts"):
                read(cache)


def test_streams_mixtures_ranges_and_states_are_those_of_local_caches(server: Served) -> None:
    name = "text_llama3style_sharded/cache/train"
    put(server, LEVANTER / name)

    def mixture(cache: tokens.TokenCache) -> tokens.Mixture:
        causal = tokens.CausalLmDataset(tokens.TokenSeqDataset(cache, 64), eos_id=1)
        return tokens.Mixture({"a": causal, "b": tokens.Permuted(causal, tokens.permutation("feistel", len(causal), 1))},
                              {"a": 0.7, "b": 0.3}, block_size=16, stop_strategy="first_exhausted")  # fmt: skip

    near = mixture(tokens.open_cache(LEVANTER / name))
    far = mixture(tokens.open_cache("s3://lab/acts/run", storage_options=server.options))
    for rank in range(2):
        a, b = (m.stream(8, rank=rank, world_size=2) for m in (far, near))
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            assert x.tokens.tobytes() == y.tokens.tobytes()
            if step == 3:
                state = a.state_dict()
        assert json.dumps(state)
        resumed = pickle.loads(pickle.dumps(far)).stream(8, rank=rank, world_size=2)
        resumed.load_state_dict(state)
        wanted = near.stream(8, rank=rank, world_size=2)
        wanted.load_state_dict(state)
        assert [x.tokens.tobytes() for x in resumed] == [y.tokens.tobytes() for y in wanted]


def test_objects_that_change_or_are_refused_are_errors_in_one_line(server: Served) -> None:
    name = "text_llama3style_sharded/cache/train"
    put(server, LEVANTER / name)
    near = tokens.open_cache(LEVANTER / name)

    def opened() -> tokens.TokenCache:
        return tokens.open_cache("s3://lab/acts/run", storage_options=server.options)

    def refused(cache: tokens.TokenCache, kind: type[actshard.ActshardError], match: str, row: int = 20) -> None:
        for read in (lambda: cache[row], lambda: cache.rows([row]), lambda: cache.view("input_ids").elements()):
            with pytest.raises(kind, match=match) as caught:
                read()
            assert len(str(caught.value).splitlines()) == 1

    data = "00001_1_jsonl_gz/input_ids/data/c/0"
    cache = opened()
    assert cache[20]["input_ids"].tobytes() == near[20]["input_ids"].tobytes()
    file = server.root / "lab/acts/run" / data
    held = file.read_bytes()
    file.write_bytes(held + b"x")
    refused(opened(), actshard.FormatError, rf"s3://lab/acts/run/{data}")
    fresh = pickle.loads(pickle.dumps(cache))  # knows the object of before
    refused(fresh, actshard.FormatError, rf"^s3://lab/acts/run/{data}: was replaced after it was opened")
    file.write_bytes(held)
    for status, kind in ((403, actshard.FileAccessError), (401, actshard.FileAccessError)):
        for end in (data, "00001_1_jsonl_gz/input_ids/data/zarr.json", "00001_1_jsonl_gz/input_ids/offsets/c/0"):
            server.failing = {end: [status] * 99}
            refused(opened(), kind, rf"s3://lab/acts/run/.*{end}.*{status}")
    server.failing = {"shapes/zarr.json": [403] * 99}
    refused(opened(), actshard.FileAccessError, "shapes/zarr.json.*403")
    server.failing = {data: [503, 500, 429], "shard_ledger.json": [503]}
    server.cutting = {data: [1, 2, 3], "shard_ledger.json": [10]}
    equal(opened(), near)
    assert not server.failing[data]
    assert not server.cutting[data]
    shutil.rmtree(file.parents[1])
    refused(opened(), actshard.MissingFileError, r"00001_1_jsonl_gz/input_ids/data/zarr\.json")


def test_a_second_reading_comes_from_the_cache_on_disk(server: Served, tmp_path: Path) -> None:
    name = "chat_llama3style/cache/train"
    put(server, LEVANTER / name)
    near = tokens.open_cache(LEVANTER / name)
    for turn in range(2):
        far = tokens.open_cache("s3://lab/acts/run", storage_options=server.options, cache=tmp_path / "disk")
        before = len(server.requests)
        equal(far, near)
        # A process asks once for the tag of each object; its bytes are on the disk.
        assert turn == 0 or len(server.since(before)) <= 12, server.since(before)
        equal(pickle.loads(pickle.dumps(far)), near)


@pytest.mark.slow
def test_children_and_workers_read_what_the_parent_has_open(server: Served) -> None:
    name = "text_llama3style_sharded/cache/train"
    put(server, LEVANTER / name)
    near = tokens.TokenSeqDataset(tokens.open_cache(LEVANTER / name), 32)
    cache = tokens.open_cache("s3://lab/acts/run", storage_options=server.options)
    far = tokens.TokenSeqDataset(cache, 32)
    wanted = [near.get_batch([i, -i - 1]).tobytes() for i in range(8)]
    assert far.get_batch([0, -1]).tobytes() == wanted[0]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.starmap(_window, [(pickle.dumps(far), i) for i in range(8)]) == wanted
    child = os.fork()  # not pickled: the parent's own cache
    if child == 0:
        os._exit(0 if far.get_batch([1, -2]).tobytes() == wanted[1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert "secret" not in repr(cache) + str(cache.path)


def _window(pickled: bytes, i: int) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bytes(pickle.loads(pickled).get_batch([i, -i - 1]).tobytes())


def test_many_threads_read_one_cache(server: Served) -> None:
    name = "text_llama3style_sharded/cache/train"
    put(server, LEVANTER / name)
    near = tokens.open_cache(LEVANTER / name)
    far = tokens.open_cache("s3://lab/acts/run", storage_options=server.options)
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, len(near), 30)
        for a, b in zip(far.rows(rows), near.rows(rows), strict=True):
            if a["input_ids"].tobytes() != b["input_ids"].tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_cannot_work_says_what_to_do(server: Served) -> None:
    put(server, LEVANTER / "text_gpt2style_single/cache/train")
    with pytest.raises(actshard.ArgumentError, match="open_cache"):
        actshard.open("s3://lab/acts/run", storage_options=server.options)
    for write in (
        lambda: tokens.CacheWriter("s3://lab/acts/new", {"input_ids": np.int32}),
        lambda: tokens.build_cache("none.jsonl", "s3://lab/acts/new", None, tokens.PrebuiltFormat()),
    ):
        with pytest.raises(actshard.ArgumentError, match="Write the cache to a local folder, then copy it") as caught:
            write()
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(actshard.ArgumentError, match="expected a URL"):
        tokens.open_cache(LEVANTER / "text_gpt2style_single/cache", storage_options={"region": "x"})


WAITS = {
    "shard_ledger.json": "opened()",
    "input_ids/data/zarr.json": "opened()[0]",
    "input_ids/shapes/zarr.json": "opened()[0]",
    "input_ids/offsets/zarr.json": "opened()[0]",
    "input_ids/offsets/c/0": "opened().rows([1])",
    "input_ids/data/c/0": "tokens.TokenSeqDataset(opened(), 16).get_batch([0, 5])",
    "data/c/0": "opened().view('input_ids').elements()",
}
"""Objects for which a call waits."""


@pytest.mark.parametrize("silent", WAITS)
def test_an_interrupt_ends_a_wait_for_a_silent_server(silent: str, server: Served) -> None:
    put(server, LEVANTER / "text_gpt2style_single/cache/train")
    server.silent.add(silent)
    program = f"""
import warnings
warnings.simplefilter("ignore")
from actshard import tokens
opened = lambda: tokens.open_cache("s3://lab/acts/run", storage_options={server.options!r})
print("ready", flush=True)
try:
    {WAITS[silent]}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        wait_until(lambda: any(path.endswith(silent) for path in server.since(0)), "the request")
        child.send_signal(signal.SIGINT)
        try:
            # The server never answers, so without an interrupt this waits for the retries, and then raises another error.
            assert child.communicate(timeout=PATIENCE)[0] == "interrupted\n"
        finally:
            child.kill()


@pytest.mark.parametrize("kind", ["s3", "web"])
@pytest.mark.parametrize("storage", ["plain", "lz4"])
def test_a_cache_that_is_replaced_by_one_with_an_equal_ledger_is_an_error(
    kind: str, storage: Any, server: Served, tmp_path: Path
) -> None:
    """The ledger of another writer counts rows and elements: it says nothing of another order of the same documents."""
    lengths = [3, 50, 7, 40, 100, 200]
    for name, order, first in (("a", lengths, 0), ("b", lengths[::-1], 1_000_000)):
        with tokens.CacheWriter(tmp_path / name, {"input_ids": np.int32, "mask": np.int32}, storage=storage) as writer:
            writer.append(
                [{key: np.arange(first, first + n, dtype=np.int32) for key in ("input_ids", "mask")} for n in order]
            )
        ledger = json.loads((tmp_path / name / "shard_ledger.json").read_text())
        del ledger["actshard"]  # the checksums
        (tmp_path / name / "shard_ledger.json").write_text(json.dumps(ledger))
    assert (tmp_path / "a/shard_ledger.json").read_bytes() == (tmp_path / "b/shard_ledger.json").read_bytes()
    put(server, tmp_path / "a")
    far, near = open_at(kind, server), tokens.open_cache(tmp_path / "a")
    partly = open_at(kind, server)
    assert np.array_equal(partly.view("input_ids").offsets, near.view("input_ids").offsets)
    shutil.rmtree(server.root / "lab/acts/run")
    put(server, tmp_path / "b")
    now = time.time()
    for file in (server.root / "lab/acts/run").rglob("*"):
        server.times[str(file.relative_to(server.root))] = now
    for cache in (far, partly, pickle.loads(pickle.dumps(far))):
        with pytest.raises(actshard.FormatError, match="was replaced after it was opened"):
            cache[1]
    with pytest.raises(actshard.FormatError, match="was replaced after it was opened"):
        partly.view("input_ids").elements()  # at offsets of before
    equal(open_at(kind, server), tokens.open_cache(tmp_path / "b"))


def test_a_configuration_reads_caches_behind_urls(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ENDPOINT_URL": server.web(""), "SKIP_SIGNATURE": "true", "REGION": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value.rstrip("/"))
    shutil.copytree(LEVANTER / "chat_llama3style/cache", server.root / "lab/caches/chat")
    component = tokens.DatasetComponent(format=tokens.ChatFormat())
    options: Any = {"tokenizer": "passthrough", "vocab_size": 100_000, "components": {"chat": component}}
    for kind in (tokens.LmDataConfig, levanter.LmDataConfig):
        far = kind(cache_dir="s3://lab/caches", **options)
        near = kind(cache_dir=str(server.root / "lab/caches"), **options)
        assert [plan.state for plan in far.plans()] == [plan.state for plan in near.plans()]
        assert [plan.state for plan in far.build()] == ["done"]
        assert str(far.cache_path("chat", "train")) == "s3://lab/caches/chat/train"
    far = tokens.LmDataConfig(cache_dir="s3://lab/caches", **options)
    near = tokens.LmDataConfig(cache_dir=str(server.root / "lab/caches"), **options)
    a, b = (config.train_set(64, 4, key=1).get_batch(range(16)) for config in (far, near))
    assert a.tokens.tobytes() == b.tokens.tobytes()
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}')
    source = tokens.UrlDatasetSourceConfig((str(tmp_path / "a.jsonl"),))
    options["components"] = {"new": tokens.DatasetComponent(source, format=tokens.PrebuiltFormat())}
    with pytest.raises(
        actshard.ArgumentError, match=r"s3://lab/caches/new/train: caches are built in local folders.*push"
    ):
        tokens.LmDataConfig(cache_dir="s3://lab/caches", **options).build()
