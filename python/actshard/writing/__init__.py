"""Making datasets: ``create``.

- ``writer``: what a user appends becomes blocks of examples; ``sink``: blocks go to the disk on a thread, and are committed
- ``target``: what a format has to say about being written; ``saev``, ``lmprobe``, ``zarr``, ``pickle`` say it
- ``work``: the working folder: lock, journal, what is safe
"""

from actshard.writing.writer import Writer, create

__all__ = ["Writer", "create"]
