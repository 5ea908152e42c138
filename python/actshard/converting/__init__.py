"""``actshard.convert``: any format into any format, with nothing lost that is not said before.

- ``planning``: what was asked for, decided for the target, and what that cannot hold; ``previewing``: the same as a report
- ``columns``: what is known of examples, on its way
- ``running``: rows, block by block: read by all threads while the block before is written
"""

from actshard.converting.planning import Loss
from actshard.converting.previewing import Plan, plan
from actshard.converting.running import Conversion, convert

__all__ = ["Conversion", "Loss", "Plan", "convert", "plan"]
