"""``python -m actshard``, and the command ``actshard``."""

import sys

import actshard


def main() -> None:
    """Runs the command line, which is imported only if more than the version is wanted."""
    if sys.argv[1:] == ["--version"]:
        print(f"actshard {actshard.__version__}")
        return
    from actshard.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
