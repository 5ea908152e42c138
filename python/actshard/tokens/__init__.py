"""Token caches: build them, read them, train on them, interchangeably with Levanter."""

from __future__ import annotations

from actshard.tokens.building import BuildProgress, Progress, build_cache
from actshard.tokens.cache import JaggedView, TokenCache, open_cache
from actshard.tokens.components import (
    DatasetComponent,
    HfDatasetSourceConfig,
    UrlDatasetSourceConfig,
    dataset_for_component,
)
from actshard.tokens.config import BlockShuffleConfig, LmDataConfig
from actshard.tokens.examples import (
    Batch,
    CausalLmDataset,
    ChatDataset,
    PackedTokenDataset,
    PrebuiltLmDataset,
    TokenBatch,
    TokenSeqDataset,
)
from actshard.tokens.formats import ChatFormat, PrebuiltFormat, SupervisedFormat, TextFormat
from actshard.tokens.ledger import Ledger
from actshard.tokens.looking import CacheSummary, DecodedRow, DocumentLengths, Fill, TextSpan, decode_rows, summarize
from actshard.tokens.mixing import Mixture, Permuted
from actshard.tokens.orders import Permutation, fold_in, permutation, prng_key, randint30, split
from actshard.tokens.sources import RowSource
from actshard.tokens.stream import TokenStream
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer
from actshard.tokens.writing import CacheWriter

__all__ = [
    "Batch",
    "BlockShuffleConfig",
    "BuildProgress",
    "CacheSummary",
    "CacheWriter",
    "CausalLmDataset",
    "ChatDataset",
    "ChatFormat",
    "DatasetComponent",
    "DecodedRow",
    "DocumentLengths",
    "Fill",
    "HfDatasetSourceConfig",
    "JaggedView",
    "Ledger",
    "LmDataConfig",
    "Mixture",
    "PackedTokenDataset",
    "Permutation",
    "Permuted",
    "PrebuiltFormat",
    "PrebuiltLmDataset",
    "Progress",
    "RowSource",
    "SupervisedFormat",
    "TextFormat",
    "TextSpan",
    "TokenBatch",
    "TokenCache",
    "TokenSeqDataset",
    "TokenStream",
    "Tokenizer",
    "UrlDatasetSourceConfig",
    "build_cache",
    "dataset_for_component",
    "decode_rows",
    "fold_in",
    "load_tokenizer",
    "open_cache",
    "permutation",
    "prng_key",
    "randint30",
    "split",
    "summarize",
]
