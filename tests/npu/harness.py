"""The contract of an op once more, with the Ascend kernels, on CPU tensors.

    class TestRmsNorm(OnNpu, test_rms_norm.TestRmsNorm):
        uses = ("npu_rms_norm", "npu_rms_norm_backward")

The kernels take the place of the CPU's own in the dispatcher for as long as the class is under test,
and `tests.npu.conformance` answers where they call torch-npu. Two tests more: the ops that the class
names are what is called, and every op of ATen that a kernel calls has one on an NPU too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.ops import _dispatch, _launchers, _npu
from tests.npu import conformance, schemas
from tests.ops.contract import Inputs, run

__all__ = ["OnNpu", "calls_of", "npu_kernels"]

_aten_ops: set[torch._ops.OpOverload] = set()
"""Of ATen, what the kernels called since it was cleared."""


class _Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if op.namespace == "aten":
            _aten_ops.add(op)
        with torch.utils._python_dispatch._disable_current_modes():
            return op(*args, **(options or {}))


class _RecordingLibrary:
    """Passes kernels on so that what they call is recorded."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library = library

    def impl(self, op: str, kernel: Callable[..., Any], key: str, *, allow_override: bool) -> None:
        def recorded(*args: Any) -> Any:
            with _Recorder():
                return kernel(*args)

        self.library.impl(op, recorded, key, allow_override=allow_override)


@pytest.fixture(scope="class")
def npu_kernels() -> Iterator[None]:
    """The Ascend kernels serve CPU tensors."""
    if reason := schemas.missing():
        pytest.skip(reason)
    conformance.define()
    library = torch.library.Library("accel", "IMPL")
    _dispatch.forget()
    try:
        _launchers.register(_npu.PACKAGE, _RecordingLibrary(library), "CPU", override=True)
        yield
    finally:
        library._destroy()
        _dispatch.forget()


def calls_of(op: Callable[..., Any], inputs: Inputs) -> set[str]:
    """The ops of torch-npu that `op` and its gradients call."""
    conformance.called.clear()
    run(op, inputs)
    return set(conformance.called)


@pytest.mark.usefixtures("npu_kernels")
class OnNpu:
    """Mixin before an op's contract."""

    uses: tuple[str, ...]
    """The ops of torch-npu that `uses_inputs()` calls, there and back; () for a composition."""

    # What only the C++ kernels owe.
    test_every_instruction_set = None
    test_same_bits_each_run_and_for_any_number_of_threads = None
    test_streaming_stores_change_no_bit = None
    test_missing_library_falls_back = None
    large_inputs = None
    # Sizes and examples for kernels with blocks and threads; torch-npu's ops have theirs, unseen here.
    test_rows_of_many_blocks = None
    test_matches_reference_for_any_layout = None

    def uses_inputs(self) -> Inputs:
        return self.inputs(torch.bfloat16)

    def test_calls_these_ops_of_torch_npu(self) -> None:
        """Guards all else here: a kernel of C++ or plain PyTorch would pass it too."""
        assert calls_of(self.op, self.uses_inputs()) == set(self.uses)

    def test_every_aten_op_has_a_kernel_in_torch_npu(self) -> None:
        _aten_ops.clear()
        for dtype in self.dtypes:
            for seed in range(3):
                run(self.op, self.inputs(dtype, seed))
        assert _aten_ops
        without = [str(op) for op in sorted(_aten_ops, key=str) if not schemas.has_kernel(op)]
        assert not without, f"no kernel in torch-npu {schemas.version()} for {without}"
