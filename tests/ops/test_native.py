"""A native library that is not ours."""

from __future__ import annotations

import pytest
import torch

from tests.versions import installed, output_with


def test_a_library_of_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_NATIVE_LIBRARY", str(torch._C.__file__))
    code = "from accel.ops import _native; print(_native.reason())"
    assert "has none of accel's kernels; build them with" in output_with(installed(), code)
