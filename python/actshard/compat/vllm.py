"""Request files of vLLM's ``ExampleHiddenStatesConnector``: :func:`fold` makes one dataset of them, also while they are written.

Needs neither vLLM nor torch.
"""

from actshard.writing.capturing.request_files import Fold, Leftover, fold

__all__ = ["Fold", "Leftover", "fold"]
