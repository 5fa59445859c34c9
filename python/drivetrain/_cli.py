"""The `drivetrain` program, as installed with the wheel."""

import signal
import sys

from drivetrain import _native


def main() -> int:
    """Runs the command line with this process's arguments and returns its exit code."""
    # Python would note Ctrl-C and act on it when the native call returns, which may be minutes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.cli_main(["drivetrain", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
