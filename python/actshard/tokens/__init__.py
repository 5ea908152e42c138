"""Token caches: build them, read them, train on them, interchangeably with Levanter."""

from __future__ import annotations

from actshard.tokens.cache import JaggedView, TokenCache, open_cache
from actshard.tokens.examples import (
    Batch,
    CausalLmDataset,
    ChatDataset,
    PackedTokenDataset,
    PrebuiltLmDataset,
    TokenSeqDataset,
)
from actshard.tokens.ledger import Ledger
from actshard.tokens.orders import Mixture, Permutation, Permuted, fold_in, permutation, prng_key, randint30, split

__all__ = [
    "Batch",
    "CausalLmDataset",
    "ChatDataset",
    "JaggedView",
    "Ledger",
    "Mixture",
    "PackedTokenDataset",
    "Permutation",
    "Permuted",
    "PrebuiltLmDataset",
    "TokenCache",
    "TokenSeqDataset",
    "fold_in",
    "open_cache",
    "permutation",
    "prng_key",
    "randint30",
    "split",
]
