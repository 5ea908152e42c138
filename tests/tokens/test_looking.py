"""``look``: lengths, token counts, packing and repeated documents of token caches, compared with loops over documents."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actshard.tokens import CacheWriter, PackedTokenDataset, TokenCache, looking, open_cache
from actshard.tokens.looking import CacheLook, look
from conftest import GOLDEN

LEVANTER = GOLDEN / "levanter"


def written(folder: Path, documents: list[list[int]]) -> TokenCache:
    with CacheWriter(folder, {"input_ids": np.int64}) as writer:
        writer.append([{"input_ids": np.array(x, np.int64)} for x in documents])
    return open_cache(folder)


def checked(found: CacheLook, documents: list[list[int]], cache: TokenCache) -> None:
    """Compares with a loop over documents."""
    full = [tuple(x) for x in documents if x]
    assert found.documents == found.read_documents == len(documents)
    assert found.tokens == found.read_tokens == sum(map(len, documents))
    assert found.lengths.tolist() == [len(x) for x in documents]
    counts = collections.Counter(x for some in full for x in some)
    inside = {x: n for x, n in counts.items() if 0 <= x < 1 << 24}
    assert {i: int(n) for i, n in enumerate(found.counts) if n} == inside
    assert found.outside == sum(counts.values()) - sum(inside.values())
    for name, place in (("first", 0), ("last", -1)):
        commonest = sorted(collections.Counter(x[place] for x in full).items(), key=lambda item: (-item[1], item[0]))
        assert list(getattr(found, name)) == commonest[:10]
    times = collections.Counter(full)
    assert found.repeated == sum(times.values()) - len(times)
    many = [(documents.index(list(x)), n) for x, n in times.items() if n > 1]
    assert list(found.repeats) == sorted(many, key=lambda item: (-item[1], item[0]))[:10]
    for fill in found.fills:
        packed = PackedTokenDataset(cache, fill.length)
        batch = packed.get_batch(range(len(packed)))
        held = int((batch.segment_ids >= 0).sum()) if batch.segment_ids is not None else 0
        assert fill.examples == len(packed)
        assert fill.fill == pytest.approx(held / batch.tokens.size)
        assert fill.cut == found.tokens - held


documents = st.lists(st.lists(st.integers(-2, 6) | st.just(1 << 30), max_size=9), min_size=1, max_size=30)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(documents, st.integers(1, 12))
def test_blocks_of_any_size_give_what_a_loop_over_documents_gives(
    tmp_path_factory: pytest.TempPathFactory, some: list[list[int]], block: int
) -> None:
    some = [*some, [1]]
    cache = written(tmp_path_factory.mktemp("cache") / "train", some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looking, "_BLOCK", block)
        checked(look(cache, lengths=(4, 16)), some, cache)


@pytest.mark.parametrize("name", ["text_gpt2style_single", "text_llama3style_sharded", "prebuilt_serial_varlen"])
def test_golden_caches(name: str) -> None:
    cache = open_cache(next((LEVANTER / name).rglob("shard_ledger.json")).parent)
    checked(look(cache), [row[cache.token_field].tolist() for row in cache], cache)


def test_of_a_large_cache_runs_of_whole_documents_are_read(tmp_path: Path) -> None:
    cache = written(tmp_path / "train", [[i] * (1 + i % 7) for i in range(3000)])
    told: list[tuple[int, int]] = []
    found = look(cache, limit=2000, progress=lambda done, total: told.append((done, total)))
    assert found.is_sample
    assert 1500 <= found.read_tokens <= 2200
    assert all(n == 1 + i % 7 for i, n in enumerate(found.counts) if n), "documents are read whole, and once"
    read = np.flatnonzero(found.counts)
    assert read[0] < 100
    assert read[-1] > 2900
    assert len(read) == found.read_documents
    assert told[-1] == (found.read_tokens, found.read_tokens)
    assert len(found.lengths) == 3000


def test_a_document_longer_than_a_run_is_read(tmp_path: Path) -> None:
    cache = written(tmp_path / "train", [[1] * 5000, [2] * 5000])
    assert look(cache, limit=10).read_documents >= 1


def test_equal_sums_of_other_orders_are_no_repeats(tmp_path: Path) -> None:
    found = look(written(tmp_path / "train", [[1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1, 2]]))
    assert (found.repeated, found.repeats) == (1, ((0, 2),))
