"""The contract of an op once more, with kernels in CUDA C++: on a GPU where there is one, else emulated.

    class TestRmsNorm(OnCuda, test_rms_norm.TestRmsNorm):
        ...

Without a GPU, csrc/cuda is compiled by g++ against its emulator (tests/cuda/emulator.py), bindings
included, and takes the place of the CPU's own kernels in the dispatcher for as long as the class is under
test. All memory that PyTorch allocates meanwhile is guarded (csrc/cuda/emulator/guarded_memory.cpp): a read
beside a tensor is NaN, a write beside one an error. With a GPU, inputs travel there and outputs back.
"""

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accel.ops import _cuda, _dispatch
from tests.cuda import emulator
from tests.ops.contract import run
from tests.triton.harness import DEVICE, HAS_GPU, on_device

__all__ = [
    "OnCuda",
    "cuda_kernels",
    "kernels_called",
    "needs_kernels",
    "on_device",
    "same_bits",
    "without_bulk_copies",
]


def _why_no_kernels() -> str | None:
    if HAS_GPU:
        return _cuda.reason()
    return None if emulator.COMPILER else "no g++ to compile the kernels for the CPU with"


needs_kernels = pytest.mark.skipif(_why_no_kernels() is not None, reason=str(_why_no_kernels()))

_called: list[str] = []


def kernels_called(work: Callable[[], Any]) -> list[str]:
    """What `work` runs of csrc/cuda: names of kernels on a GPU, of ops where they are emulated."""
    if HAS_GPU:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        return [e.key for e in profile.key_averages() if "accel::cuda::" in e.key]
    _called.clear()
    work()
    return list(_called)


@functools.cache
def _emulated() -> dict[str, Callable[..., Any]]:
    """The emulated kernel of each op, say "rms_norm_fwd"."""
    torch.ops.load_library(str(emulator.library()))
    torch.ops.accel_emulated._register_kernels()
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = [name.partition("::")[2] for name in registered if name.startswith("accel_emulated::")]
    for name in names:
        schema = str(getattr(torch.ops.accel, name).default._schema)
        torch.library.define(f"accel_emulated::{name}", schema.removeprefix(f"accel::{name}"))

    def kernel(name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.accel_emulated, name).default

        def call(*args: Any) -> Any:
            _called.append(name)
            return op(*args)

        return call

    return {name: kernel(name) for name in names}


@pytest.fixture(scope="class")
def cuda_kernels() -> Iterator[None]:
    """The emulated kernels serve CPU tensors, whose memory is guarded; a GPU needs no help."""
    if HAS_GPU:
        yield
        return
    library = torch.library.Library("accel", "IMPL")
    _dispatch.missing_kernel("accel::rms_norm_fwd", "cpu")  # what is registered last would win
    kernels = _emulated()
    guard = torch.ops.accel_emulated
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
        _dispatch.forget()
        guard._damaged_blocks()
        guard._watch_memory(True)
        yield
    finally:
        guard._watch_memory(False)
        library._destroy()
        _dispatch.forget()
    gc.collect()
    assert guard._damaged_blocks() == 0, "a kernel wrote beside a tensor"


@contextmanager
def without_bulk_copies() -> Iterator[None]:
    """Kernels as for a GPU before sm_90; on a GPU, those that it has."""
    if HAS_GPU:
        yield
        return
    emulated = torch.ops.accel_emulated
    emulated._have_bulk_copies(False)
    try:
        yield
    finally:
        emulated._have_bulk_copies(True)


def same_bits(op: Callable[..., Any], other: Callable[..., Any], inputs: Any) -> None:
    """Outputs and gradients of `other` are those of `op`, bit for bit."""
    (got, got_grads), (want, want_grads) = run(op, inputs), run(other, inputs)
    for a, b in zip((*got, *got_grads.values()), (*want, *want_grads.values()), strict=True):
        assert torch.equal(a, b)


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class OnCuda:
    """Mixin before an op's contract; in it, `op` is the function under test as a staticmethod."""

    device = DEVICE

    # What only the CPU's kernels owe.
    test_every_instruction_set = None
    test_same_bits_each_run_and_for_any_number_of_threads = None
    test_streaming_stores_change_no_bit = None
    test_missing_library_falls_back = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        op = inspect.getattr_static(cls, "op", None)
        if op is not None:  # a function, or a method that looks at the class
            moved = on_device(cls.op)
            cls.op = staticmethod(moved) if isinstance(op, staticmethod) else moved

    def test_runs_cuda_kernels(self) -> None:
        """Guards all else here: the CPU's own kernels or plain PyTorch would pass it too."""
        assert kernels_called(lambda: run(self.op, self.inputs(torch.bfloat16)))

    def test_same_bits_each_run(self) -> None:
        inputs = self.inputs(torch.bfloat16)
        for _ in range(2):
            same_bits(self.op, self.op, inputs)
