"""Codes of findings specific to token caches."""

from actshard.base.codes import NOTE, WARNING, Code

FINDINGS = (
    Code(
        "leftover",
        NOTE,
        "The folder contains temporary files of a build.",
        "None: readers ignore them.",
        "remove it, if no build is running",
    ),
    Code(
        "row-lengths-differ",
        WARNING,
        "Rows have different lengths in different fields.",
        "Tokens, masks and weights of these rows do not correspond.",
        "check how they were made",
    ),
)
