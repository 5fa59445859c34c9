"""What every test relies on."""

import signal

# A program started in the background by a shell ignores Ctrl-C, and so would everything it starts;
# tests of Ctrl-C need the usual handler whoever started them.
signal.signal(signal.SIGINT, signal.default_int_handler)
