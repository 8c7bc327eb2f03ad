"""Whether the kernels of a feature's ops can run here, as features say it."""

from __future__ import annotations

import pytest

from accel.feature import Context
from accel.ops import _dispatch, _native
from accel.patches._kernels import kernels


@pytest.fixture(autouse=True)
def asked_anew():
    _dispatch.forget()
    yield
    _dispatch.forget()


def context(device: str) -> Context:
    return Context(device=device, megatron="0")


def test_the_native_library_serves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "reason", lambda: "not built")
    assert kernels("rms_norm_fwd")(context("cpu")) == "not built"


def test_triton_serves_cuda() -> None:
    assert kernels("rms_norm_fwd", "rms_norm_bwd")(context("cuda")) is None


def test_one_op_without_a_kernel_is_enough() -> None:
    reason = kernels("rms_norm_fwd", "_stream_copy")(context("cuda"))
    assert reason == "no kernel for device 'cuda'"


def test_a_wrong_instruction_set_is_an_error_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise ValueError("ACCEL_CPU_ISA")

    monkeypatch.setattr(_native, "isa", unknown)
    with pytest.raises(ValueError, match="ACCEL_CPU_ISA"):
        kernels("rms_norm_fwd")(context("cpu"))


def test_ascend_needs_torch_npu() -> None:
    reason = kernels("rms_norm_fwd")(context("npu"))
    assert reason is not None
    assert reason.startswith("torch_npu cannot be imported")


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_what_serves_every_device_is_there(device: str) -> None:
    """No op asked for: what the native library holds besides."""
    assert kernels()(context(device)) is None
