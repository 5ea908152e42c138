"""Making datasets: ``create``.

- ``writer``: what a user appends becomes blocks of examples; ``sink``: blocks go to the disk on a thread, and are committed
- ``formats.target``: the interface to the formats, each of which has a target of its own; ``work``: lock, journal, what is safe
"""

from actshard.writing.writer import Writer, create

__all__ = ["Writer", "create"]
