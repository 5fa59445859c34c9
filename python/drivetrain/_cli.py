"""The `drivetrain` program, as installed with the wheel."""

import sys

from drivetrain import _native


def main() -> int:
    """Runs the command line with this process's arguments and returns its exit code."""
    return _native.cli_main(["drivetrain", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
