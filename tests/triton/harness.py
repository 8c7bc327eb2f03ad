"""The contract of an op once more, with Triton's kernels: on a GPU where there is one, else interpreted.

    class TestRmsNorm(OnTriton, test_rms_norm.TestRmsNorm):
        ...

Without a GPU the kernels take the place of the CPU's own in the dispatcher, for as long as the class
is under test, and run in Triton's interpreter (tests/conftest.py sees to it). With one, the op's
inputs travel there and its outputs back, gradients too; the contract sees CPU tensors either way.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel._triton.launch import instead_of_running
from tests.ops.contract import run

__all__ = ["DEVICE", "HAS_GPU", "OnTriton", "kernels_launched", "on_device"]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
VECTOR = 16
"""Elements: no vector that a kernel reads has more."""


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        if torch.compiler.is_compiling():  # an offset cannot be traced
            return value.to(device)
        if value.is_meta:
            return value
        there, offset = value.to(device), value.storage_offset() % VECTOR
        if not offset or not value.is_contiguous():
            return there
        # Where a tensor begins within 16 bytes decides which kernel it gets.
        return torch.cat([there.new_zeros(offset), there.flatten()])[offset:].view(value.shape)
    if isinstance(value, list | tuple):
        return type(value)(_moved(v, device) for v in value)
    return value


def on_device(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op on the GPU, taking and giving CPU tensors; the op as it is where there is no GPU."""
    if not HAS_GPU:
        return op

    @functools.wraps(op)
    def moved(*args: Any, **options: Any) -> Any:
        options = {name: _moved(value, "cuda") for name, value in options.items()}
        return _moved(op(*_moved(args, "cuda"), **options), "cpu")

    return moved


def kernels_launched(work: Callable[[], Any]) -> list[str]:
    """The names of the kernels that `work` launches, in order. They are not run.

    A backward on the GPU has a thread of its own, which does not see the hook: here it has none.
    """
    names: list[str] = []
    token = instead_of_running.set(lambda kernel, *_: names.append(kernel.fn.__name__))
    try:
        with torch.autograd.set_multithreading_enabled(False):
            work()
    finally:
        instead_of_running.reset(token)
    return names


@pytest.mark.usefixtures("triton_kernels")
class OnTriton:
    """Mixin before an op's contract; in it, `op` is the function under test as a staticmethod."""

    device = DEVICE
    dtypes_of_calls = None if HAS_GPU else (torch.float32,)  # the interpreter is slow

    # What only the C++ kernels owe.
    test_every_instruction_set = None
    test_same_bits_each_run_and_for_any_number_of_threads = None
    test_streaming_stores_change_no_bit = None
    test_missing_library_falls_back = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.op = staticmethod(on_device(cls.op))

    def test_launches_triton_kernels(self) -> None:
        """Guards all else here: a kernel of C++ or plain PyTorch would pass it too."""
        launched = kernels_launched(lambda: run(self.op, self.inputs(torch.bfloat16)))
        assert launched, "no Triton kernel was launched"

    def test_same_bits_each_run(self) -> None:
        inputs = self.inputs(torch.bfloat16)
        first, first_grads = run(self.op, inputs)
        for _ in range(2):
            outputs, grads = run(self.op, inputs)
            for a, b in zip(
                (*outputs, *grads.values()), (*first, *first_grads.values()), strict=True
            ):
                assert torch.equal(a, b)
