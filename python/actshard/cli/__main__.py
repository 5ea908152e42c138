"""``python -m actshard.cli``."""

from actshard.cli import main

main()
