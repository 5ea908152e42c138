"""What reading from a URL costs, in requests and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import actshard
from served import Meeting, Served, served

EXAMPLES, LAYERS, TOKENS, D_MODEL = 12, (3, 7), 128, 256
RUN = TOKENS * D_MODEL * 4
"""Bytes of an example's layer, 128 KiB; those of the other layer lie beside it."""


def _made(folder: Path) -> str:
    rows = np.random.default_rng(0).standard_normal((EXAMPLES, len(LAYERS), TOKENS, D_MODEL), np.float32)
    with actshard.create(
        folder / "bucket", "saev", layers=LAYERS, d_model=D_MODEL, num_examples=EXAMPLES, tokens_per_example=TOKENS
    ) as writer:
        writer.append(rows)
    return f"bucket/{writer.path.name}"


def _read(server: Served) -> int:
    """Bytes of shards that were asked for since the last call. A slow answer is asked for twice."""
    total = 0
    for _, path, wanted in set(server.requests):
        if path.endswith(".bin") and wanted.startswith("bytes="):
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            total += last - first + 1
    server.requests.clear()
    return total


def _epoch(store: actshard.Store, **options: Any) -> dict[tuple[int, int], bytes]:
    found = {}
    for batch in store.stream(LAYERS[0], 100, tokens="all", **options):
        for example, token, row in zip(batch.examples, batch.tokens, batch.activations, strict=True):
            found[int(example), int(token)] = row.tobytes()
    return found


def test_a_stream_of_a_layer_reads_no_bytes_of_the_layer_beside_it(tmp_path: Path) -> None:
    key = _made(tmp_path)
    with served(tmp_path) as server:
        store = actshard.open(f"s3://{key}", storage_options=server.options)
        server.requests.clear()
        want = _epoch(actshard.open(tmp_path / key))
        for options in ({"shuffle": "window"}, {"shuffle": "window", "memory": "256KiB"}, {}):
            assert _epoch(store, **options) == want
            assert EXAMPLES * RUN <= _read(server) <= 1.1 * EXAMPLES * RUN


def test_the_rows_of_the_identity_are_asked_for_together(tmp_path: Path) -> None:
    key = _made(tmp_path)
    with served(tmp_path) as server:
        store = actshard.open(f"s3://{key}", storage_options=server.options)
        server.together = Meeting(EXAMPLES // 2)
        assert store.identity == actshard.open(tmp_path / key).identity
        assert server.together.complete.is_set()


def test_the_second_epoch_comes_from_the_cache_without_a_request(tmp_path: Path) -> None:
    key = _made(tmp_path)
    with served(tmp_path) as server:
        store = actshard.open(f"s3://{key}", storage_options=server.options, cache=tmp_path / "cache")
        want = _epoch(store, shuffle="window")
        assert _read(server) >= EXAMPLES * RUN
        assert _epoch(store, shuffle="window", epoch=1) == want
        examples, tokens = np.divmod(np.random.default_rng(1).permutation(EXAMPLES * TOKENS), TOKENS)
        rows = store.gather(LAYERS[0], examples, tokens)
        for example, token, row in zip(examples, tokens, rows, strict=True):
            assert row.tobytes() == want[example, token]
        assert server.requests == []


def test_damage_in_the_cache_is_downloaded_again(tmp_path: Path) -> None:
    key = _made(tmp_path)
    with served(tmp_path) as server:
        store = actshard.open(f"s3://{key}", storage_options=server.options, cache=tmp_path / "cache")
        want = _epoch(store, shuffle="window")
        for file in (tmp_path / "cache").rglob("data"):
            data = bytearray(file.read_bytes())
            if len(data) < EXAMPLES * RUN:
                continue  # of the metadata
            data[RUN // 2] ^= 1
            data[-RUN - RUN // 2] ^= 1
            file.write_bytes(data)
        server.requests.clear()
        assert _epoch(store, shuffle="window", epoch=1) == want
        assert 0 < _read(server) < EXAMPLES * RUN


def test_rows_that_lie_near_each_other_share_requests(tmp_path: Path) -> None:
    key = _made(tmp_path)
    with served(tmp_path) as server:
        store = actshard.open(f"s3://{key}", storage_options=server.options)
        server.requests.clear()
        tokens = np.arange(TOKENS)
        rows = store.gather(LAYERS[1], np.full(TOKENS, 5), tokens)
        assert np.array_equal(rows, actshard.open(tmp_path / key).gather(LAYERS[1], np.full(TOKENS, 5), tokens))
        assert len(server.requests) == 1
