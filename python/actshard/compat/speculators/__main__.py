"""``python -m actshard.compat.speculators``: ``speculators.train`` with the backend ``"actshard"``."""

from __future__ import annotations

import actshard.compat.speculators  # noqa: F401 -- registers the backend, before speculators reads the registry

if __name__ == "__main__":
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve())
