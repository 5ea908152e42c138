"""Codes of findings specific to speculators' training data."""

from actshard.base.codes import ERROR, WARNING, Code

FINDINGS = (
    Code(
        "scale-value",
        ERROR,
        "A scale of float8 or int8 states is NaN, infinite, zero or negative.",
        "The states of its tokens are NaN, infinite, zero, or have the wrong sign.",
        "generate the example again",
    ),
    Code(
        "saturated-codes",
        WARNING,
        "Many float8 or int8 codes have the largest magnitude.",
        "Scales are too small: larger values were clipped when the file was written.",
        "write the states again with scales of their largest magnitude",
    ),
)
