"""``actshard.convert``: converts a dataset to another format and reports all losses before writing.

- ``planning``: checks the request, configures the target, and lists what the target cannot store
- ``previewing``: returns what would be written, without writing (``--dry-run``)
- ``columns``: columns of examples, from source to target
- ``running``: rows, block by block: all threads read a block while the block before is written
"""

from actshard.writing.converting.planning import Loss
from actshard.writing.converting.previewing import Preview, preview
from actshard.writing.converting.running import Conversion, convert

__all__ = ["Conversion", "Loss", "Preview", "convert", "preview"]
