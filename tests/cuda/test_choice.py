"""Which kernels serve CUDA tensors: those in CUDA C++, Triton's, or an error that says why."""

import pytest
import torch

from accel.ops import _cuda, _dispatch, _launchers, _native, _triton


@pytest.fixture
def asked_anew(monkeypatch):
    """A library that is not there, and nothing remembered of the one that is."""
    _cuda._missing.cache_clear()
    yield monkeypatch
    _cuda._missing.cache_clear()
    _dispatch.forget()


def test_triton_when_asked_for(monkeypatch):
    monkeypatch.setenv("ACCEL_CUDA_KERNELS", "triton")
    assert _cuda.reason() == "ACCEL_CUDA_KERNELS=triton"


@pytest.mark.parametrize("choice", ["", "auto"])
def test_auto_does_without(asked_anew, tmp_path, choice):
    asked_anew.setattr(_native, "PACKAGE", tmp_path)
    asked_anew.setenv("ACCEL_CUDA_KERNELS", choice)
    assert "no CUDA C++ kernels in" in (_cuda.reason() or "")


def test_missing_when_asked_for_is_an_error(asked_anew, tmp_path):
    asked_anew.setattr(_native, "PACKAGE", tmp_path)
    asked_anew.setenv("ACCEL_CUDA_KERNELS", "cuda")
    with pytest.raises(RuntimeError, match=r"ACCEL_CUDA_KERNELS=cuda: no CUDA C\+\+ kernels in"):
        _cuda.reason()


def test_what_is_no_library_says_so(asked_anew, tmp_path):
    tmp_path.joinpath("_CUDA.abi3.so").write_bytes(b"\x7fELF and then nothing")
    asked_anew.setattr(_native, "PACKAGE", tmp_path)
    asked_anew.delenv("ACCEL_CUDA_KERNELS", raising=False)
    assert "_CUDA.abi3.so does not load" in (_cuda.reason() or "")


def test_the_cpu_kernels_are_not_taken_for_these(tmp_path, monkeypatch):
    """`_C*.so` would find `_CUDA.abi3.so` too."""
    tmp_path.joinpath("_CUDA.abi3.so").touch()
    tmp_path.joinpath("_C.abi3.so").touch()
    tmp_path.joinpath("_C.cpython-312-x86_64-linux-gnu.so").touch()
    names = [{p.name for p in tmp_path.glob(m.LIBRARY_PATTERN)} for m in (_cuda, _native)]
    assert names[0] == {"_CUDA.abi3.so"}
    assert names[1] == {"_C.abi3.so", "_C.cpython-312-x86_64-linux-gnu.so"}


@pytest.mark.parametrize(
    ("architectures", "runs_on"),
    [
        ("80;90a;100+PTX", {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}),
        ("90a", {(9, 0)}),
        ("86", {(8, 6), (8, 9)}),
        ("80+PTX", {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}),
        ("", set()),
    ],
)
def test_architectures(architectures, runs_on):
    every = {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}
    assert {gpu for gpu in every if _cuda._runs_on(architectures, gpu)} == runs_on


def test_triton_leaves_ops_that_have_a_kernel(monkeypatch):
    """Registered twice, the later kernel would win, with a warning of PyTorch's."""
    taken: list[str] = []

    class Library:
        def impl(self, op, launcher, key, *, allow_override):
            taken.append(op)

    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: "rms_norm" in op
    )
    _launchers.register(_triton.PACKAGE, Library(), "CUDA")
    assert not any("rms_norm" in op for op in taken)
    taken.clear()
    _launchers.register(_triton.PACKAGE, Library(), "CUDA", override=True)
    assert "accel::rms_norm_fwd" in taken


def test_an_op_with_a_kernel_needs_no_triton(monkeypatch):
    monkeypatch.setattr(_triton, "reason", lambda: "Triton cannot be imported")
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: "rms_norm" in op
    )
    _dispatch.forget()
    try:
        assert _dispatch.missing_kernel("accel::rms_norm_fwd", "cuda") is None
        assert _dispatch.missing_kernel("accel::l2_norm", "cuda") == "Triton cannot be imported"
    finally:
        _dispatch.forget()
