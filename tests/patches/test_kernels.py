"""Whether native kernels can run here, as features say it."""

from __future__ import annotations

import pytest

from accel.feature import Context
from accel.ops import _native
from accel.patches._kernels import kernel_missing


@pytest.mark.parametrize(
    ("device", "library", "expected"),
    [
        ("cpu", None, None),
        ("cpu", "not built", "not built"),
        ("cuda", None, "no kernel for cuda yet"),
        ("npu", "not built", "no kernel for npu yet"),
    ],
)
def test_says_what_is_missing(
    device: str, library: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "reason", lambda: library)
    monkeypatch.setattr(_native, "isa", lambda: "baseline")
    assert kernel_missing(Context(device=device, megatron="0")) == expected


def test_a_wrong_instruction_set_is_an_error_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise ValueError("ACCEL_CPU_ISA")

    monkeypatch.setattr(_native, "reason", lambda: None)
    monkeypatch.setattr(_native, "isa", unknown)
    with pytest.raises(ValueError, match="ACCEL_CPU_ISA"):
        kernel_missing(Context(device="cpu", megatron="0"))
