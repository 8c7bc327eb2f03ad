"""Not part of `make test`: it needs more memory than most machines have to spare."""

import os

collect_ignore_glob = [] if os.environ.get("ACCEL_TEST_HUGE") else ["test_*.py"]
