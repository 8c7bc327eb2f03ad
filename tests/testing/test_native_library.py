"""That the CPU library is there. Where it is not, its other tests are skipped, which nobody would notice."""

import os

import pytest

from accel.ops import _native

LEFT_OUT = "ACCEL_TESTS_WITHOUT_NATIVE"


@pytest.mark.skipif(os.environ.get(LEFT_OUT) == "1", reason=f"{LEFT_OUT}=1: left out on purpose")
def test_the_cpu_library_loads():
    reason = _native.reason()
    assert reason is None, f"{reason}; {LEFT_OUT}=1 tests without it"
