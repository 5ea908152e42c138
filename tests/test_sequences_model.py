"""``sequences_stream`` beside a naive oracle, over arguments of a fixed seed; and errors of files in the middle of an epoch."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import Store

WIDTH = 3
LENGTHS = [0, 7, 1, 12, 12, 0, 3, 31, 5, 5, 5, 18, 2, 9, 12, 1, 26, 4, 8, 12, 0, 3]


def rows_of(example: int, tokens: int) -> np.ndarray:
    """Rows that name their layer, example and token; some are large, some have NaN."""
    rows = np.zeros((2, tokens, WIDTH), np.float32)
    rows[0, :, 0], rows[1, :, 0], rows[..., 1], rows[..., 2] = 2, 5, example + 1, np.arange(tokens)
    rows[:, 3::7] *= 50
    rows[0, 5::11, 0] = np.nan
    return rows


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    folder, made = tmp_path_factory.mktemp("model"), []
    for format, options in (("lmprobe", {}), ("zarr", {}), ("pickle", {"compress": True, "shard_bytes": 900})):
        with actshard.create(folder / format, format, layers=[2, 5], d_model=WIDTH, **options) as writer:
            for i, n in enumerate(LENGTHS):
                writer.append([rows_of(i, n)], columns={"label": [i % 3]})
        made.append(actshard.open(folder / format))
    return made


def oracle(options: dict[str, Any], layers: list[int], budget: int) -> list[tuple[int, tuple[int, ...]]]:
    """Examples and the tokens of their sequences, one by one."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for i, n in enumerate(LENGTHS):
        rows = rows_of(i, n)
        if options.get("keep") is not None and not options["keep"][i]:
            continue
        tokens = []
        for t in range(options.get("min_token", 0), n):
            norms = [math.hypot(*map(float, rows[(2, 5).index(layer), t])) for layer in layers]
            if options.get("max_norm") is None or all(x <= options["max_norm"] for x in norms):
                tokens.append(t)
        pieces = [tuple(tokens[at : at + budget]) for at in range(0, len(tokens), budget)]
        if len(pieces) > 1:
            pieces = {"split": pieces, "truncate": pieces[:1], "drop": []}[options["too_long"]]
        found += [(i, piece) for piece in pieces]
    return found


def told(batch: actshard.SequenceBatch, layers: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """The sequences of a batch, after a check of their rows and of the padding."""
    found = []
    assert not batch.activations[batch.segment_ids < 0].any()
    for k, example in enumerate(batch.examples.tolist()):
        mine = batch.segment_ids == k
        tokens = batch.tokens[mine]
        assert (np.diff(batch.position_ids[mine]) == 1).all()
        whole = rows_of(example, LENGTHS[example])
        for at, layer in enumerate(layers):
            assert np.array_equal(batch.activations[mine][:, at], whole[(2, 5).index(layer), tokens], equal_nan=True)
        assert len(tokens) == batch.lengths[k]
        assert batch.columns["label"][k] == example % 3
        found.append((example, tuple(tokens.tolist())))
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
def test_all_ranks_and_epochs_and_states_have_the_sequences_of_a_naive_loop(stores: list[Store], seed: int) -> None:
    draw = random.Random(seed)
    store, layers = draw.choice(stores), draw.choice([[2], [5], [5, 2]])
    budget, ranks = draw.choice([6, 13, 31, 64, 500]), draw.choice([1, 1, 2, 3])
    options: dict[str, Any] = {
        "pack": draw.random() < 0.6,
        "too_long": draw.choice(["split", "truncate", "drop"]),
        "shuffle": draw.choice([None, "exact", "window"]),
        "seed": draw.randrange(3),
        "keep": draw.choice([None, np.array([draw.random() < 0.7 for _ in LENGTHS])]),
        "max_norm": draw.choice([None, None, 40.0]),
        "min_token": draw.choice([0, 0, 1, 4]),
        "memory": draw.choice([400, 3_000, "1GiB"]),
        "columns": ["label"],
    }
    options["fixed_shape"] = options["pack"] and draw.random() < 0.3
    wanted = sorted(oracle(options, layers, budget))

    def made(rank: int) -> actshard.SequenceStream:
        return store.sequences_stream(layers, budget, rank=rank, world_size=ranks, **options)

    if 0 < len(wanted) < ranks * math.ceil(len(wanted) / ranks):
        try:
            made(0)
        except actshard.ArgumentError:  # too few sequences for ranks of equally many batches
            return
    streams = [made(rank) for rank in range(ranks)]
    assert len({len(stream) for stream in streams}) == 1
    assert streams[0].num_tokens == sum(len(tokens) for _, tokens in wanted)
    for _ in range(2):
        seen = []
        for stream in streams:
            stop, batches = draw.randint(0, len(stream)), []
            for batch in stream:
                assert batch.tokens.size <= budget
                batches.append(told(batch, layers))
                if len(batches) == stop:
                    resumed = made(stream.rank)
                    resumed.load_state_dict(stream.state_dict())
                    rest = [told(batch, layers) for batch in resumed] if stop < len(stream) else []
            assert len(batches) == len(stream)
            assert not stop or batches[stop:] == rest
            seen += [sequence for batch in batches for sequence in batch]
        assert sorted(seen) == wanted


@pytest.mark.parametrize("shuffle", [None, "exact", "window"])
def test_after_an_error_of_a_file_a_state_reads_the_rest(tmp_path: Path, shuffle: Any) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[2, 5], d_model=WIDTH) as writer:
        for i in range(60):
            writer.append([rows_of(i, 1 + i % 20)], columns={"label": [i % 3]})
    store = actshard.open(tmp_path / "d")

    def fresh() -> actshard.SequenceStream:
        return store.sequences_stream(2, 40, shuffle=shuffle, memory=600)

    whole = [batch.examples.tolist() for batch in fresh()]
    files = sorted(f for f in tmp_path.rglob("*.0.0.0") if f.is_file())
    victim = files[len(files) * 2 // 3]
    bytes_of, seen = victim.read_bytes(), []
    victim.write_bytes(bytes_of[: len(bytes_of) // 2])
    store.close()
    store = actshard.open(tmp_path / "d")
    stream = fresh()

    def read() -> None:
        seen.extend(batch.examples.tolist() for batch in stream)

    with pytest.raises(actshard.ActshardError, match=re.escape(victim.name)):
        read()
    state = stream.state_dict()
    assert seen == whole[: len(seen)]
    assert state["batch"] == len(seen) < len(whole)
    victim.write_bytes(bytes_of)
    store = actshard.open(tmp_path / "d")
    again = fresh()
    again.load_state_dict(state)
    assert seen + [batch.examples.tolist() for batch in again] == whole
