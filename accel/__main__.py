"""``python -m accel doctor | features | patches | bench | schedule``; see :mod:`accel.cli`."""

from __future__ import annotations

import os
import sys

from accel.cli import main

if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
