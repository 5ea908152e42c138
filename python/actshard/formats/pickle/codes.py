"""Codes of findings specific to pickle shards."""

from actshard.base.codes import NOTE, Code

FINDINGS = (
    Code(
        "no-checksum",
        NOTE,
        "The metadata give no checksum for a shard.",
        "Damage to the shard may go unnoticed.",
        "add checksums to metadata.json",
    ),
)
