"""Rotary embedding's CUDA kernels: the contract, views, packed sequences, and positions that are not."""

import itertools

import pytest
import torch

from accel.ops import rope, rope_ref
from tests.cuda.harness import OnCuda, cuda_kernels, on_device
from tests.ops import test_rope
from tests.ops.contract import Inputs
from tests.ops.test_rope import LAYOUTS, angles, draw

__all__ = ["cuda_kernels"]


class TestRope(OnCuda, test_rope.TestRope):
    @pytest.mark.parametrize("dtype", test_rope.TestRope.dtypes, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_widths_and_views(self, layout, dtype):
        """Whole packs and elements, narrow and wide heads, slices of a fused qkv, one token and many."""
        for width, kept in ((16, 0), (64, 0), (128, 8), (14, 1), (0, 8), (66, 16), (512, 0)):
            qkv = draw(5, 2, 7, width + kept, dtype=dtype)
            if kept == 1:
                qkv = qkv.transpose(0, 1).contiguous().transpose(0, 1)
            q, k = qkv.split([4, 3], dim=2)
            freqs = angles(7, width, layout, 2 if width == 64 else 1)
            self.check(Inputs([q, freqs, k], {"layout": layout}, [1]))
        strided = torch.stack([q, q], dim=-1)[..., 0]
        self.check(Inputs([strided, freqs, None], {"layout": layout, "mscale": 1.5}, [1]))

    def test_angles_of_their_own_in_each_member_of_a_pair(self):
        for layout, width in itertools.product(LAYOUTS, (16, 14)):
            freqs = angles(5, width, layout)
            freqs[..., : width // 2] += 1
            self.check(Inputs([draw(5, 2, 3, 16), freqs], {"layout": layout}, [1]))

    def test_sizes_of_nothing(self):
        for shape in ((0, 2, 3, 8), (4, 0, 3, 8), (4, 2, 0, 8)):
            got, _ = self.op(draw(*shape), angles(4, 8))
            assert got.shape == shape

    @pytest.mark.parametrize("cp_size", [1, 2, 3])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_packed_sequences(self, dtype, cp_size):
        lengths = [2 * cp_size * n for n in (2, 0, 1, 5)]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
        q, k = draw(sum(lengths) // cp_size, 7, 24).split([4, 3], dim=1)
        for own_rows, layout in itertools.product((True, False), LAYOUTS):
            freqs = angles(sum(lengths) if own_rows else 61, 16, layout)
            for cp_rank in range(cp_size):
                options = {"cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank}
                self.check(Inputs([q, freqs, k], {"layout": layout, **options}, [1]))

    @pytest.mark.parametrize(
        ("cu_seqlens", "num_rows", "cp_size", "lost"),
        [
            ([0, 3], 9, 1, [3]),  # the last token is in no sequence
            ([0], 9, 1, [0, 1, 2, 3]),  # there are none
            ([0, 4], 3, 1, [3]),  # a position beyond the angles
            ([0, 6, 8], 9, 2, [0, 1, 2, 3]),  # neither 6 nor 2 tokens split into 4 chunks
        ],
    )
    def test_positions_that_are_not_come_out_as_nan(self, cu_seqlens, num_rows, cp_size, lost):
        q, freqs = draw(4, 3, 8), angles(num_rows, 8)
        got, _ = self.op(q, freqs, cu_seqlens=torch.tensor(cu_seqlens), cp_size=cp_size)
        assert [t for t in range(4) if got[t].isnan().all()] == lost
        assert [t for t in range(4) if got[t].isfinite().all()] == [
            t for t in range(4) if t not in lost
        ]

    def test_three_tensors_take_two_launches(self):
        xs = [draw(4, 2, 3, 16, seed=seed) for seed in range(3)]
        tables = draw(4, 1, 8, seed=5), draw(4, 1, 8, seed=6)
        op = on_device(torch.ops.accel.rope)
        together = op(xs, *tables, None, 1, 0, 16, False, False, False)
        for x, got in zip(xs, together, strict=True):
            (want,) = op([x], *tables, None, 1, 0, 16, False, False, False)
            assert torch.equal(got, want)

    def test_memory_order_changes_no_bit(self):
        q, freqs = draw(6, 2, 4, 64, dtype=torch.bfloat16), angles(6, 64)
        want, _ = self.op(q, freqs)
        fused = torch.cat([q, q], dim=-1)
        views = [fused[..., 64:], q.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)]
        for view in (*views, torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)):
            assert torch.equal(self.op(view, freqs)[0], want)

    def test_strides_of_more_than_32_bits_change_no_bit(self):
        q, freqs = draw(1, 2, 4, 64, dtype=torch.bfloat16), angles(1, 64)
        wide = q.as_strided(q.shape, (1 << 33, *q.stride()[1:]))
        assert torch.equal(self.op(wide, freqs)[0], self.op(q, freqs)[0])

    def test_rotates_back(self):
        q, freqs = draw(9, 2, 3, 32).requires_grad_(), angles(9, 32)
        y, _ = self.op(q, freqs)
        (back,) = torch.autograd.grad(y, q, y.detach())
        torch.testing.assert_close(back, q.detach())

    def test_second_derivative(self):
        x, freqs = draw(3, 1, 2, 8).requires_grad_(), angles(3, 8)

        def norm_of_gradient(op):
            (dx,) = torch.autograd.grad(op(x, freqs)[0].pow(3).sum(), x, create_graph=True)
            return torch.autograd.grad(dx.pow(2).sum(), x)[0]

        torch.testing.assert_close(norm_of_gradient(on_device(rope)), norm_of_gradient(rope_ref))

    def test_the_kernel_reads_past_no_table(self):
        xs, (cos, sin) = [draw(4, 2, 3, 8)], (draw(4, 1, 4), draw(4, 1, 4))
        op = on_device(torch.ops.accel.rope)
        for tables, rotary_dim in (((cos[:3], sin[:3]), 8), ((cos, sin), 10), ((cos, sin[:3]), 8)):
            with pytest.raises(ValueError, match="rope:"):
                op(xs, *tables, None, 1, 0, rotary_dim, False, False, False)
