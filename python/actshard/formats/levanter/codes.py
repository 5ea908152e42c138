"""Codes of findings specific to token caches."""

from actshard.codes import ERROR, NOTE, WARNING, Code

FINDINGS = (
    Code(
        "leftover",
        NOTE,
        "The folder contains files that a build left behind.",
        "None: readers ignore them.",
        "remove it, if no build is running",
    ),
    Code(
        "token-range",
        ERROR,
        "Token ids exceed the tokenizer's vocabulary.",
        "Embedding lookups fail, or use wrong rows.",
        "build the cache again with that tokenizer",
    ),
    Code(
        "mask-value",
        ERROR,
        "An assistant mask has values other than 0 and 1.",
        "Losses are weighted wrongly.",
        "build the cache again",
    ),
    Code(
        "row-lengths-differ",
        WARNING,
        "Rows have different lengths in different fields.",
        "Tokens, masks and weights of these rows do not correspond.",
        "check how they were made",
    ),
)
