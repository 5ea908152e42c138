"""Guarantee: Levanter's orders, exactly; and valid permutations where Levanter's are not."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tokens.conftest import GOLDEN, expected

import actshard
from actshard import tokens

SHUFFLES = expected("shuffles")
CONFIGS = json.loads((GOLDEN / "mixtures" / "config.json").read_text())
MIXTURES = expected("mixtures")


def test_the_random_numbers_are_jaxs() -> None:
    for seed in (0, 1, 42):
        assert tokens.randint30(seed) == SHUFFLES[f"seed{seed}_randint"]
        assert np.array_equal(tokens.split(seed, 3), SHUFFLES[f"seed{seed}_split3"])
        assert np.array_equal(tokens.fold_in(seed, 7), SHUFFLES[f"seed{seed}_fold7"])
        assert tokens.prng_key(tokens.prng_key(seed)) == tokens.prng_key(seed)


@pytest.mark.parametrize("name", [n for n in SHUFFLES if re.fullmatch(r"(feistel|linear)_s\d+_n\d+", n)])
def test_permutations_are_levanters(name: str) -> None:
    kind, seed, n = re.fullmatch(r"(\w+)_s(\d+)_n(\d+)", name).groups()
    order = tokens.permutation(kind, int(n), int(seed), arithmetic="float64")
    at = SHUFFLES.get(f"{name}_at")
    at = np.arange(int(n)) if at is None else at
    assert np.array_equal(order(at), SHUFFLES[name])
    made_of = SHUFFLES.get(f"{name}_{'roundkeys' if kind == 'feistel' else 'ab'}")
    assert made_of is not None or int(n) > 1000
    if made_of is not None and int(n) > 1:
        assert np.array_equal(order.parameters, made_of)


@pytest.mark.parametrize("name", [n for n in SHUFFLES if n.startswith(("block", "era"))])
def test_block_and_era_shuffles_are_levanters(name: str) -> None:
    if m := re.fullmatch(r"block_(\w+)_s(\d+)_n(\d+)_io(\d+)_w(\d+)", name):
        order = tokens.permutation(
            "block", int(m[3]), int(m[2]), perm_type=m[1], io_block_size=int(m[4]), window_blocks=int(m[5])
        )
    else:
        m = re.fullmatch(r"era_(\w+)_s(\d+)_n(\d+)_e(\d+)", name)
        order = tokens.permutation("era", int(m[3]), int(m[2]), perm_type=m[1], era_length=int(m[4]))
    assert np.array_equal(order(np.arange(len(order))), SHUFFLES[name])
    assert [order[i] for i in range(len(order))] == list(order) == SHUFFLES[name].tolist()


def test_linear_is_a_permutation_where_levanters_is_none() -> None:
    """Levanter 5.7: float64 loses the low bits of products above 2**53."""
    n = 8_589_934_597
    at = SHUFFLES[f"linear_s0_n{n}_at"]
    order = tokens.permutation("linear", n, 0)
    a, b = order.parameters
    exact = order(at)
    assert exact.tolist() == [(a * int(x) + b) % n for x in at]
    assert not np.array_equal(exact, SHUFFLES[f"linear_s0_n{n}"])


@given(
    st.integers(0, 3000),
    st.integers(0, 2**32),
    st.integers(1, 64),
    st.integers(1, 9),
    st.sampled_from(["feistel", "linear"]),
)
def test_every_order_has_every_index_once(n: int, seed: int, io: int, window: int, perm: str) -> None:
    for order in (
        tokens.permutation(perm, n, seed),
        tokens.permutation("block", n, seed, io_block_size=io, window_blocks=window, perm_type=perm),
    ):
        assert np.array_equal(np.sort(order(np.arange(n))), np.arange(n))


@pytest.mark.parametrize("name", [n for n in MIXTURES if not n.endswith("_len")])
def test_mixtures_are_levanters(name: str) -> None:
    which, seed = re.fullmatch(r"(\w+)_s(\d+)", name).groups()
    config = CONFIGS[which]
    mixture = tokens.Mixture(
        config["dataset_lengths"],
        config["weights"],
        block_size=config["block_size"],
        key=int(seed),
        stop_strategy=config["stop_strategy"],
    )
    wanted = MIXTURES[name]
    datasets, places = mixture.locate(np.arange(len(wanted)))
    numbers = np.array([list(config["dataset_lengths"]).index(n) for n in mixture.names])
    assert np.array_equal(np.stack([numbers[datasets], places], 1), wanted)
    if f"{name}_len" in MIXTURES:
        assert len(mixture) == MIXTURES[f"{name}_len"]
    shuffled = np.random.default_rng(0).permutation(len(wanted))
    assert np.array_equal(mixture.locate(shuffled)[1], wanted[shuffled][:, 1])


@pytest.mark.filterwarnings("ignore:dataset .* gets no example")  # of blocks of one example
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 60), st.floats(0.05, 5)), min_size=1),
    st.integers(1, 40),
    st.integers(0, 1000),
)
def test_a_mixture_that_ends_hands_out_samples_that_are_there(sets: dict, block: int, seed: int) -> None:
    """Levanter 5.5 raises IndexError near the end; here every index is in range and none is repeated."""
    lengths = {name: n for name, (n, _) in sets.items()}
    weights = {name: w for name, (_, w) in sets.items()}
    mixture = tokens.Mixture(lengths, weights, block_size=block, key=seed, stop_strategy="first_exhausted")
    if not mixture.is_finite:
        return
    datasets, places = mixture.locate(np.arange(len(mixture)))
    assert (places < np.array(mixture.lengths)[datasets]).all()
    assert len(set(zip(datasets.tolist(), places.tolist(), strict=True))) == len(mixture)
    used = [len(places[datasets == i]) for i in range(len(mixture.names))]
    assert any(u == n for u, n in zip(used, mixture.lengths, strict=True))


def test_a_mixture_of_datasets_gives_their_examples() -> None:
    text = tokens.CausalLmDataset(
        tokens.TokenSeqDataset(tokens.open_cache(GOLDEN / "text_gpt2style_single" / "cache"), 64), eos_id=0
    )
    more = tokens.CausalLmDataset(
        tokens.TokenSeqDataset(tokens.open_cache(GOLDEN / "text_llama3style_sharded" / "cache"), 64), eos_id=1
    )
    mixture = tokens.Mixture({"text": text, "more": more}, {"text": 1, "more": 3}, block_size=16, key=3)
    batch = mixture.get_batch(np.arange(40))
    datasets, places = mixture.locate(np.arange(40))
    for i in range(40):
        one = (text, more)[datasets[i]].get_batch([places[i]])
        assert np.array_equal(batch.tokens[i], one.tokens[0])
        assert np.array_equal(batch.loss_weight[i], one.loss_weight[0])
        assert np.array_equal(batch.segment_ids[i], one.segment_ids[0])
    only = tokens.Mixture({"text": text}, {"text": 1}, block_size=16)
    assert np.array_equal(only.get_batch([5, 2, 2]).tokens, text.get_batch(only.locate([5, 2, 2])[1]).tokens)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tokens.permutation("feistl", 4), "kind must be .* not 'feistl'"),
        (lambda: tokens.permutation("block", 4, perm_type="x"), "perm_type"),
        (lambda: tokens.permutation("era", 4), "era_length"),
        (lambda: tokens.permutation("feistel", -1), "length"),
        (lambda: tokens.permutation("feistel", 4, "x"), "key"),
        (lambda: tokens.permutation("feistel", 4)([4]), "index 4"),
        (lambda: tokens.permutation("feistel", 4)(np.array([1.5])), "indices"),
        (lambda: tokens.Mixture({"a": 3}, {"b": 1}), "'b'"),
        (lambda: tokens.Mixture({"a": 3}, {"a": 0}), "sum to 0"),
        (lambda: tokens.Mixture({"a": 3}, {"a": -1}), "at least 0"),
        (lambda: tokens.Mixture({"a": 3}, {"a": float("nan")}), "at least 0"),
        (lambda: tokens.Mixture({"a": 0}, {"a": 1}), "empty"),
        (lambda: tokens.Mixture({"a": 3}, {"a": 1}, block_size=1 << 16), "block_size"),
        (lambda: tokens.Mixture({"a": 3}, [(0, {"a": 1}), (5, {"a": 1})], block_size=4), "multiples"),
        (lambda: len(tokens.Mixture({"a": 3}, {"a": 1})), "is endless"),
        (lambda: tokens.Mixture({"a": 3}, {"a": 1}).get_batch([0]), "lengths"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said: str) -> None:
    with pytest.raises(actshard.ActshardError, match=said):
        make()
