"""Codes of findings specific to Arrow directories."""

from actshard.base.codes import WARNING, Code

FINDINGS = (
    Code(
        "null-row",
        WARNING,
        "A row of a column of activations is null, or contains a null.",
        "The example has no tokens; its slot in the file has undefined values, which are not read.",
        "write the dataset without these rows, or ignore them",
    ),
    Code(
        "end-marker",
        WARNING,
        "An Arrow stream ends without its end marker.",
        "The writer may have been killed: batches after the last one may be missing.",
        "compare the number of examples with the writer's",
    ),
)
