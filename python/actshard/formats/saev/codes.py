"""Codes of findings specific to saev shards."""

from actshard.base.codes import WARNING, Code

FINDINGS = (
    Code(
        "hash-mismatch",
        WARNING,
        "The folder's name is not the hash of its metadata.",
        "The folder was renamed, or its metadata changed.",
        "rename it to the hash, or restore the metadata",
    ),
    Code(
        "layer-order",
        WARNING,
        "Layers are not in ascending order.",
        "The names of layers may be swapped: saev's recorder stores layers in the order in which the model runs.",
        "check one layer against the model",
    ),
)
