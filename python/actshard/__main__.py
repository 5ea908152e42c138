"""``python -m actshard``: the command line."""

from actshard.cli import main

if __name__ == "__main__":
    main()
