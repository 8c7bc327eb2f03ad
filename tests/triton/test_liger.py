"""Liger's kernels in the place of ours, in Triton's interpreter or on a GPU: the contract of each op.

What they do not take goes to our Triton kernels, under the same contract, and is told.
"""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from accel._peers import LIBRARIES, trials
from accel.log import log_once
from accel.ops import _dispatch, _peers, rms_norm, rms_norm_ref, swiglu
from accel.ops._kernel_choice import Choice
from accel.ops.activation import activation_ref
from tests.ops import test_activation, test_add_rms_norm, test_layer_norm, test_rms_norm
from tests.ops.contract import Inputs, run
from tests.ops.norm_contract import DTYPES
from tests.triton.conftest import to_bf16
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton

pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed")
liger = importlib.import_module("accel._peers.liger")

SHAPES = [
    (4, 64),
    (3, 5, 127),
    *(pytest.param(s, marks=pytest.mark.thorough) for s in ((1, 33), (37, 1), (129, 24))),
]


class Calls(list):
    """The parts of ops that Liger served, in order."""


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """What Triton's interpreter lacks of what Liger's kernels use.

    That is floats that are tensors, a function of libdevice, and arithmetic in bfloat16, which a GPU does in
    fp32, rounded.
    """
    if HAS_GPU:
        yield
        return
    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    binary_op = interpreter.InterpreterBuilder.binary_op

    def with_bf16(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        sides = ((side.data.astype(np.uint32) << 16).view(np.float32) for side in (lhs, rhs))
        return interpreter.TensorHandle(to_bf16(op(*sides)), tl.bfloat16)

    def rsqrt(x: Any) -> Any:
        return tl.rsqrt(x)  # as the interpreter has it by then

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", with_floats)
        patch.setattr(interpreter.InterpreterBuilder, "binary_op", with_bf16)
        for module in ("fused_add_rms_norm", "layer_norm", "rms_norm"):
            patch.setattr(f"liger_kernel.ops.{module}.rsqrt", rsqrt)
        yield


@pytest.fixture(scope="class")
def served(triton_kernels) -> Iterator[Calls]:
    """Liger serves what it can, ours behind it."""
    calls = Calls()
    choice = Choice("auto", dict.fromkeys(liger.OPS, "liger"))
    library = torch.library.Library("accel", "IMPL")
    key = "CUDA" if HAS_GPU else "CPU"

    def counted(part: str, kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            result = kernel(*args)
            calls.append(part)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(trials, "MANY", 50)  # a trial takes long enough
        for op, parts in liger.OPS.items():
            patch.setitem(liger.OPS, op, {p: counted(p, kernel) for p, kernel in parts.items()})
        _peers.register(choice, library, key)
        yield calls
    library._destroy()
    _dispatch.forget()


@pytest.mark.usefixtures("served")
class OnLiger:
    """Mixin before `OnTriton` and an op's contract."""

    parts: set[str]
    """All that Liger serves in `plain_inputs`."""

    test_launches_triton_kernels = None  # ours: Liger launches its own
    test_same_bits_each_run = None  # not promised for others' kernels

    def plain_inputs(self) -> Inputs:
        """Inputs that Liger takes."""
        return self.inputs(torch.bfloat16)

    def test_liger_serves(self, served: Calls) -> None:
        """Guards all else here: no trial failed, so that Liger serves what it takes."""
        served.clear()
        run(self.op, self.plain_inputs())
        assert set(served) == self.parts


class TestRmsNorm(OnLiger, OnTriton, test_rms_norm.TestRmsNorm):
    parts = {"accel::rms_norm_fwd", "accel::rms_norm_bwd"}

    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes, zero_centered):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=zero_centered))

    @pytest.mark.parametrize(
        "dtypes", [pytest.param(DTYPES[0], marks=pytest.mark.thorough), DTYPES[1]], ids=str
    )
    def test_many_heads_have_another_kernel(self, dtypes):
        """The interpreter takes half a minute for so many rows."""
        self.check(self.norm_inputs((32771, 64), dtypes))


class TestAddRmsNorm(OnLiger, OnTriton, test_add_rms_norm.TestAddRmsNorm):
    parts = {"accel::add_rms_norm_fwd", "accel::add_rms_norm_bwd"}

    def plain_inputs(self) -> Inputs:
        return test_add_rms_norm.draw((6, 3, 43), DTYPES[1], with_bias=False)

    def check(self, inputs: Inputs) -> None:
        """Within the tolerance alone: the bits of the two steps are ours."""
        test_add_rms_norm.OpContract.check(self, inputs)

    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes, zero_centered):
        options = {"with_bias": False, "zero_centered": zero_centered}
        self.check(test_add_rms_norm.draw(shape, dtypes, **options))

    def test_the_norm_alone_is_used(self):
        """Then nothing comes for the sum, and its backward is RMSNorm's."""
        inputs = self.plain_inputs()
        found, wanted = (
            run(lambda *a, op=op, **o: op(*a, **o)[0], inputs)[1] for op in (self.op, self.ref)
        )
        for got, want in zip(found.values(), wanted.values(), strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


class TestLayerNorm(OnLiger, OnTriton, test_layer_norm.TestLayerNorm):
    parts = {"accel::layer_norm_fwd", "accel::layer_norm_bwd"}

    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes, zero_centered):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=zero_centered))


class TestSwiglu(OnLiger, OnTriton, test_activation.TestSwiglu):
    op = staticmethod(swiglu)
    test_opcheck = None  # ours, of each op once, are in test_activation
    test_gradient_at_the_clamp_value_is_torchs = None
    parts = {"accel::activation_fwd", "accel::activation_bwd"}

    def plain_inputs(self) -> Inputs:
        x = torch.randn(6, 3, 44, generator=torch.Generator().manual_seed(3))
        return self.activation_inputs(x.to(torch.bfloat16), False, False, limited=False)

    @pytest.mark.parametrize("dtype", test_activation.DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(3, 5, 254), (1, 66), (37, 2)], ids=str)
    def test_matches_reference(self, shape, dtype):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
        self.check(self.activation_inputs(x.to(dtype), False, False, limited=False))

    def test_the_gradient_in_place(self, served):
        x = self.plain_inputs().tensors[0]
        gradient = run(self.op, self.plain_inputs())[1]
        before = x.to(DEVICE).requires_grad_()
        hidden = before * 1
        y = swiglu(hidden, inplace_grad=True)
        served.clear()
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
        y.backward(dy)
        assert list(served) == ["accel::activation_bwd_inplace"]
        assert torch.equal(before.grad.cpu(), next(iter(gradient.values())))
        assert torch.equal(hidden.detach().cpu(), before.grad.cpu())


def test_it_serves_what_the_table_of_contents_says():
    assert tuple(sorted(liger.OPS)) == LIBRARIES["liger"]


def test_what_is_not_taken_is_told_and_served_by_ours(served, caplog):
    x = torch.randn(4, 16, device=DEVICE)
    bias = torch.randn(16, device=DEVICE)
    swiglu(x)
    log_once.cache_clear()
    served.clear()
    with caplog.at_level(logging.WARNING, "accel"):
        for _ in range(2):
            y = swiglu(x, bias)
    assert torch.allclose(y.cpu(), activation_ref("swiglu", x, bias).cpu(), atol=1e-5)
    assert not served
    assert [r.message for r in caplog.records] == ["activation_fwd: by accel, not by liger: a bias"]


def test_rows_beyond_its_blocks(served):
    rms_norm(torch.randn(2, 8, device=DEVICE), torch.randn(8, device=DEVICE))
    served.clear()
    x, weight = torch.randn(2, 65537, device=DEVICE), torch.randn(65537, device=DEVICE)
    assert torch.allclose(rms_norm(x, weight).cpu(), rms_norm_ref(x, weight).cpu(), atol=1e-5)
    assert not served
