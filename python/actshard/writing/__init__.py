"""Writing datasets: ``create``.

- ``creating``: checks the arguments of ``create`` and makes the format's target
- ``writer``: collects appended examples into blocks; ``sink``: writes and commits blocks on a background thread
- ``formats.target``: the interface that each format implements; ``work``: lock and journal
"""

from actshard.writing.creating import create
from actshard.writing.writer import Writer

__all__ = ["Writer", "create"]
