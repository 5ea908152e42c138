"""Codes of findings specific to Zarr activation stores."""

from actshard.base.codes import ERROR, WARNING, Code

FINDINGS = (
    Code(
        "no-lengths",
        WARNING,
        "The store has no array of lengths.",
        "Every sample is read with all tokens, padding included.",
        "add the array of lengths",
    ),
    Code(
        "length-too-long",
        WARNING,
        "A length exceeds the array: the sample was truncated when it was written.",
        "Tokens at the end of the sample are missing.",
        "accept truncated samples, or write them again",
    ),
    Code(
        "consolidated-differs",
        WARNING,
        "Consolidated metadata differ from the metadata of the arrays.",
        "Libraries that read only consolidated metadata return other data than actshard.",
        "consolidate again",
    ),
    Code(
        "chunk-size",
        ERROR,
        "A chunk file's size is not the size of its chunk.",
        "Rows of this chunk cannot be read.",
        "write the sample again",
    ),
)
