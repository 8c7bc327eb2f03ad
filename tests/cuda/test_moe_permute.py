"""Permuting on CUDA: the contract, row maps, and both ways in which rows find their tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.ops import moe_row_map
from accel.ops.moe_permute import _row_map_ref
from tests.cuda.harness import (
    HAS_GPU,
    OnCuda,
    cuda_kernels,
    kernels_called,
    needs_kernels,
    on_device,
    same_bits,
)
from tests.ops import test_moe_permute
from tests.ops.contract import LAYOUTS, Inputs, change_layout

__all__ = ["cuda_kernels"]

DTYPES = test_moe_permute.DTYPES
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if HAS_GPU else 3
"""The emulator's device has three."""
READ_ONCE_BYTES = PROCESSORS * (512 << 10)
"""So much less to read makes it worth listing the rows of each token."""
INDICES = torch.tensor([4, 0, 4, 4, -1, 2, 4, 4, 2, 4, 0, -1, -1, 4])
"""The map of one expert: tokens again and again, in no order, and padding."""

row_map = on_device(moe_row_map)
edges = st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 260])


def plain_indices(num_tokens: int, row_bytes: int, *, read_once: bool) -> Tensor:
    """A map of one expert in no order, with padding, so long that rows are listed; or not."""
    num_rows = num_tokens + 5
    if read_once:
        num_rows = num_tokens + -(-READ_ONCE_BYTES // row_bytes)
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(-1, num_tokens, (num_rows,), generator=generator)


class TestMoePermute(OnCuda, test_moe_permute.TestMoePermute):
    large_inputs = None

    @pytest.mark.parametrize("num_cols", [8, 264, 1023, 9000])
    @pytest.mark.parametrize("read_once", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_each_token_read_once_or_row_by_row(self, dtype, read_once, num_cols):
        """Several tokens to a block and several turns to a row; with padding and tokens without rows."""
        row_bytes = num_cols * dtype.itemsize
        indices = plain_indices(9, row_bytes, read_once=read_once)
        x = torch.randn(11, num_cols, generator=torch.Generator().manual_seed(0)).to(dtype)
        probs = torch.rand(11, 1, generator=torch.Generator().manual_seed(1))
        y, w = self.op(x, probs, indices)
        want_y, want_w = test_moe_permute.permute_ref(x, probs, indices)
        assert torch.equal(y, want_y)
        assert torch.equal(w, want_w)

    @settings(deadline=None, max_examples=40)
    @given(
        num_tokens=st.sampled_from([0, 1, 3, 8, 33]),
        num_cols=edges,
        experts=st.sampled_from([(1, 1), (2, 1), (9, 5), (17, 17)]),
        dtype=st.sampled_from(DTYPES),
        align=st.sampled_from([1, 4]),
    )
    def test_any_shape(self, num_tokens, num_cols, experts, dtype, align):
        self.check(self.permute_inputs((num_tokens, num_cols, *experts), dtype, align=align))

    @pytest.mark.parametrize("probs_dtype", [*DTYPES, torch.float64], ids=str)
    def test_probabilities_of_any_dtype(self, probs_dtype):
        x = torch.randn(5, 16)
        probs = torch.rand(5, 1, generator=torch.Generator().manual_seed(1)).to(probs_dtype)
        probs.requires_grad_()
        _, w = self.op(x, probs, INDICES)
        assert torch.equal(w, torch.where(INDICES < 0, 0, probs[INDICES, 0]))
        dw = torch.randn(len(INDICES), generator=torch.Generator().manual_seed(2)).to(probs_dtype)
        (dprobs,) = torch.autograd.grad(w, probs, dw)
        want = torch.zeros(6).index_add(0, INDICES % 6, dw.float())[:5, None]
        torch.testing.assert_close(dprobs, want.to(probs_dtype))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("num_cols", [8, 11])
    def test_plain_indices_of_any_layout(self, num_cols, layout):
        x = torch.randn(5, num_cols, generator=torch.Generator().manual_seed(0))
        probs = torch.rand(5, 1, generator=torch.Generator().manual_seed(1))
        self.check(Inputs([change_layout(x, layout), None, INDICES]))
        self.check(Inputs([change_layout(x, layout), probs, INDICES.repeat(2)[::2]]))

    def test_an_expert_beyond_the_probabilities_weighs_nothing(self):
        y, w = self.op(torch.ones(3, 8), torch.ones(3, 2), torch.tensor([7, 4]))
        assert torch.equal(y, torch.ones(2, 8))
        assert w.tolist() == [0, 1]

    def test_many_rows_of_a_token_in_any_order_of_arrival(self):
        """More than a warp lists at once, whose order of arrival is another each time."""
        indices = torch.arange(300).flip(0) % 3
        x, probs = torch.randn(3, 40).bfloat16(), torch.rand(3, 1)
        inputs = Inputs([x, probs, indices])
        self.check(inputs)
        for _ in range(3):
            same_bits(self.op, self.op, inputs)


class TestMoeUnpermute(OnCuda, test_moe_permute.TestMoeUnpermute):
    large_inputs = None

    @settings(deadline=None, max_examples=60)
    @given(
        num_tokens=st.sampled_from([0, 1, 3, 8, 33]),
        num_cols=edges,
        experts=st.sampled_from([(1, 1), (2, 1), (9, 5), (17, 17)]),
        dtype=st.sampled_from(DTYPES),
        weights=st.sampled_from(["none", "by expert", "by row"]),
        align=st.sampled_from([1, 4]),
    )
    def test_any_shape(self, num_tokens, num_cols, experts, dtype, weights, align):
        shape = (num_tokens, num_cols, *experts)
        self.check(self.unpermute_inputs(shape, dtype, align=align, weights=weights))

    @pytest.mark.parametrize("weights", ["none", "by expert", "by row"])
    @pytest.mark.parametrize("num_cols", [1024, 4096, 4107, 17000])
    def test_long_rows(self, num_cols, weights):
        """Teams of several warps, more columns than a sum's block has, and than a token's has."""
        shape = (5, num_cols, 8, 6)
        inputs = self.unpermute_inputs(shape, torch.bfloat16, align=4, weights=weights)
        self.check(inputs)
        same_bits(self.op, self.op, inputs)

    @pytest.mark.parametrize("by_row", [False, True])
    @pytest.mark.parametrize("num_cols", [11, 16, 1030])
    def test_plain_indices_in_any_order(self, num_cols, by_row):
        """Rows that share a probability, more of them than a warp has at once."""
        indices = torch.cat([INDICES, INDICES.flip(0).repeat(8)])
        generator = torch.Generator().manual_seed(0)
        y = torch.randn(num_cols, len(indices), generator=generator).T
        weights = torch.rand((len(indices),) if by_row else (5, 1), generator=generator)
        inputs = Inputs([y, weights, indices], {"num_tokens": 5})
        self.check(inputs)
        for _ in range(3):
            same_bits(self.op, self.op, inputs)

    def test_padding_is_not_computed_with(self):
        """What lies in the rows of padding may be anything; their gradients are zero."""
        indices = torch.tensor([1, -1, 0, -1, 1])
        y = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
        y[indices < 0] = float("nan")
        for weights in (torch.rand(2, 1), torch.rand(5)):
            if weights.ndim == 1:
                weights[indices < 0] = float("nan")
            y.requires_grad_(), weights.requires_grad_()
            out = self.op(y, weights, indices, num_tokens=2)
            dy, dweights = torch.autograd.grad(out.sum(), (y, weights))
            for t in (out, dy, dweights):
                assert t.isfinite().all()
            assert (dy[indices < 0] == 0).all()
            y = y.detach()

    def test_probabilities_in_float64(self):
        y = torch.randn(len(INDICES), 16)
        for shape in ((5, 1), (len(INDICES),)):
            probs = torch.rand(shape, dtype=torch.float64, requires_grad=True)
            got = self.op(y, probs, INDICES, num_tokens=5)
            want = test_moe_permute.unpermute_ref(y, probs.float(), INDICES, 5)
            torch.testing.assert_close(got, want)
            (dprobs,) = torch.autograd.grad(got.sum(), probs)
            want = torch.autograd.grad(want.sum(), probs)[0]
            torch.testing.assert_close(dprobs.float(), want.float())


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestRowMap:
    def check(self, routing_map: Tensor, rows: int | None, *, pad: bool = False, align: int = 1):
        got = row_map(routing_map, rows, drop_and_pad=pad, align=align)
        num_tokens, num_experts = routing_map.shape
        capacity = min((rows or 0) // num_experts, num_tokens) if pad else -1
        assert torch.equal(got, _row_map_ref(routing_map, len(got), capacity, align))

    @pytest.mark.parametrize(
        "shape", [(1, 1), (19, 5), (9, 33), (130, 7), (257, 40), (33, 257), (5, 600), (8300, 3)]
    )
    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_is_that_of_the_reference(self, share, shape):
        """One block and many, one turn of tokens and several, more experts than are taken at a time."""
        routing_map = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
        self.check(routing_map.T.contiguous().T, None, align=4)
        self.check(routing_map, 7)
        self.check(routing_map, None)
        for rows in (50, 3 * shape[1]):
            self.check(routing_map, rows, pad=True)

    def test_empty(self):
        for shape in ((0, 4), (4, 0)):
            assert row_map(torch.zeros(shape, dtype=torch.bool), 3).tolist() == [-1] * 3
        assert row_map(torch.ones(4, 4, dtype=torch.bool), 0).numel() == 0

    def test_is_one_op(self):
        routing_map = torch.rand(300, 64) < 0.1
        assert len(kernels_called(lambda: row_map(routing_map, 64))) == (2 if HAS_GPU else 1)


@pytest.mark.skipif(HAS_GPU, reason="the raw ops on CPU tensors are the C++ kernels there")
@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
def test_the_kernels_check_what_they_read():
    x, rows, ops = torch.ones(3, 8), torch.tensor([0, 2]), torch.ops.accel
    few, experts = x[:2], torch.ones(3, 4)
    wide = torch.ones(1, dtype=torch.bool).expand(1 << 20, 1 << 12)
    for call, message in (
        (lambda: ops.moe_permute_bwd(x, x, rows, 3, 0, x.dtype), "dy must have 2 rows"),
        (lambda: ops.moe_permute_bwd(few, x, rows, 3, 4, x.dtype), r"must have shape \[2\] on"),
        (lambda: ops.moe_permute_fwd(x, rows, few), r"probs must have shape \[3, E\]"),
        (lambda: ops.moe_permute_fwd(x, rows, x[0]), r"probs must have shape \[3, E\]"),
        (lambda: ops.moe_permute_fwd(x, rows, experts.int()), "probs must be floating"),
        (lambda: ops.moe_permute_fwd(x, rows, experts[:, :0]), "probs must have at least one"),
        (lambda: ops.moe_unpermute_fwd(few, rows, 3, experts[:, :0]), "at least one expert"),
        (lambda: ops.moe_permute_fwd(x, rows.int(), None), "row_map must be int64"),
        (lambda: ops.moe_permute_fwd(x[0], rows, None), r"x must have shape \[rows, N\]"),
        (lambda: ops.moe_permute_fwd(x.double(), rows, None), "float32, bfloat16 or float16, got"),
        (lambda: ops.moe_unpermute_fwd(x, rows, 3, None), "y must have 2 rows"),
        (lambda: ops.moe_unpermute_fwd(few, rows, -1, None), "up to [0-9]+ rows and tokens"),
        (lambda: ops.moe_unpermute_fwd(few, rows, 3, experts[0]), "probs must have shape"),
        (
            lambda: ops.moe_unpermute_probs_bwd(x, x, rows, experts),
            r"y must be Float of shape \[2, 8\]",
        ),
        (lambda: ops.moe_row_map(x, 4, -1, 1), "routing_map must be bool"),
        (lambda: ops.moe_row_map(x.bool(), -4, -1, 1), "num_rows must not be negative"),
        (lambda: ops.moe_row_map(wide, 4, -1, 1), "counts rows to 2147482623, got 1048576 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
