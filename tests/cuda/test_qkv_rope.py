"""Queries, keys and values out of one product: the contract, by the CUDA kernels alone."""

import itertools

import pytest
import torch
from torch import Tensor

from accel.ops import qkv_rope, qkv_rope_ref, rope
from accel.ops.qkv_rope import unsupported_reason
from tests.cuda.harness import (
    DEVICE,
    OnCuda,
    cuda_kernels,
    kernels_called,
    needs_kernels,
    on_device,
    same_bits,
)
from tests.ops.contract import Inputs, OpContract
from tests.ops.test_rope import angles, draw

__all__ = ["cuda_kernels"]

LAYOUTS = ("half", "interleaved")


class TestQkvRope(OnCuda, OpContract):
    op = staticmethod(qkv_rope)
    ref = staticmethod(qkv_rope_ref)
    roundings = {torch.float32: 4}
    large_inputs = None
    test_missing_library_falls_back = None

    def inputs(self, dtype, seed=0):
        layout = LAYOUTS[seed % 2]
        qkv = draw(5, 2, 3, 4 * 32, dtype=dtype, seed=seed)
        return Inputs([qkv, angles(7, 32, layout)], {"head_dim": 32, "layout": layout}, [1])

    def opchecks(self):
        qkv, table = draw(4, 2, 3, 48).to(DEVICE).requires_grad_(), draw(4, 1, 8).to(DEVICE)
        op = torch.ops.accel.qkv_rope_fwd.default
        yield op, (qkv, table, table, 16, False)
        yield op, (qkv.detach(), table, table, 16, True)


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestKernel:
    @pytest.mark.parametrize("dtype", OpContract.dtypes, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_bits_of_rope_for_any_shape(self, layout, dtype):
        for (s, b), groups, queries, width in itertools.product(
            [(1, 1), (5, 2), (0, 3)], [1, 3, 8], [1, 4], [16, 128]
        ):
            qkv = draw(s, b, groups, (queries + 2) * width, dtype=dtype)
            for batch in {1, b}:
                freqs = angles(s + 2, width, layout, batch)
                inputs = Inputs([qkv, freqs], {"head_dim": width, "layout": layout}, [1])
                same_bits(on_device(qkv_rope), on_device(by_rope), inputs)

    def test_runs_in_one_kernel_each_way(self):
        qkv = draw(4, 1, 2, 4 * 32).to(DEVICE).requires_grad_()
        freqs = angles(4, 32).to(DEVICE)
        qkv_rope(qkv, freqs, 32)  # asks whether pairs have one angle
        torch.cuda.synchronize() if DEVICE == "cuda" else None
        names = kernels_called(lambda: sum(t.sum() for t in qkv_rope(qkv, freqs, 32)).backward())
        assert len([name for name in names if "qkv_rope" in name]) == 2

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: (draw(4, 2, 3, 4 * 24), angles(4, 16), 24), "16 of 24 elements"),
            (lambda: (draw(4, 2, 3, 4 * 12), angles(4, 12), 12), "no whole 16 bytes"),
            (lambda: (draw(4, 1, 512, 3 * 8), angles(4, 8), 8), "more than 1023 heads"),
            (lambda: (draw(4, 2, 3, 4 * 16).double(), angles(4, 16), 16), "dtype torch.float64"),
            (lambda: (draw(2, 4, 3, 64).transpose(0, 1), angles(4, 16), 16), "not contiguous"),
            (lambda: (draw(385)[1:].view(2, 1, 3, 64), angles(4, 16), 16), "no multiple of 16"),
        ],
    )
    def test_what_it_leaves_to_rope(self, make, reason):
        qkv, freqs, head_dim = make()
        assert reason in str(on_device(unsupported_reason)(qkv, freqs, head_dim))
        got = on_device(qkv_rope)(qkv, freqs, head_dim)
        for a, b in zip(got, on_device(by_rope)(qkv, freqs, head_dim), strict=True):
            assert torch.equal(a, b)

    def test_gradients_that_begin_anywhere(self):
        table = torch.rand(4, 1, 8, device=DEVICE)
        gradients = [torch.randn(4, 2, n, 16, device=DEVICE) for n in (6, 3, 3)]
        shifted = [torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g) for g in gradients]
        assert all(g.data_ptr() % 16 for g in shifted)
        bwd = torch.ops.accel.qkv_rope_bwd
        assert torch.equal(bwd(*shifted, table, table, False), bwd(*gradients, table, table, False))

    def test_members_of_a_pair_with_angles_of_their_own(self):
        freqs = angles(5, 16)
        freqs[..., :8] += 1
        inputs = Inputs([draw(5, 2, 3, 64), freqs], {"head_dim": 16}, [1])
        same_bits(on_device(qkv_rope), on_device(by_rope), inputs)

    def test_the_kernels_check_again(self):
        ops, table = torch.ops.accel, torch.ones(4, 1, 8, device=DEVICE)
        qkv, dk = torch.ones(4, 2, 3, 64, device=DEVICE), torch.ones(4, 2, 3, 16, device=DEVICE)
        dq = torch.ones(4, 2, 6, 16, device=DEVICE)
        for call in (
            lambda: ops.qkv_rope_fwd(qkv[0], table, table, 16, False),
            lambda: ops.qkv_rope_fwd(qkv, table[:3], table[:3], 16, False),
            lambda: ops.qkv_rope_fwd(qkv, table, table, 8, False),
            lambda: ops.qkv_rope_fwd(qkv[..., ::2], table, table, 16, False),
            lambda: ops.qkv_rope_fwd(qkv.double(), table, table, 16, False),
            lambda: ops.qkv_rope_bwd(dq, dk[:3], dk, table, table, False),
            lambda: ops.qkv_rope_bwd(dq[:, :, :5], dk, dk, table, table, False),
        ):
            with pytest.raises(ValueError):
                call()


def by_rope(qkv: Tensor, freqs: Tensor, head_dim: int, layout: str = "half") -> tuple:
    s, b, groups, width = qkv.shape
    q, k, v = qkv.split([width - 2 * head_dim, head_dim, head_dim], dim=-1)
    q = rope(q.reshape(s, b, groups * (width // head_dim - 2), head_dim), freqs, layout=layout)[0]
    return q, rope(k, freqs, layout=layout)[0], v.clone()


def test_bad_shapes_are_named():
    with pytest.raises(
        ValueError, match=r"qkv must have shape \[S, B, G, \(n \+ 2\) 16\], got \[4, 2, 24\]"
    ):
        qkv_rope(draw(4, 2, 24), angles(4, 16), 16)
    with pytest.raises(ValueError, match="got \\[4, 2, 3, 32\\]"):
        qkv_rope(draw(4, 2, 3, 32), angles(4, 16), 16)
