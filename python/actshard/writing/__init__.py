"""Writing datasets: ``create``.

- ``writer``: collects appended examples into blocks; ``sink``: writes and commits blocks on a background thread
- ``formats.target``: the interface that each format implements; ``work``: lock and journal
"""

from actshard.writing.writer import Writer, create

__all__ = ["Writer", "create"]
