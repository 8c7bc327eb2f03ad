"""Projection and cross entropy in one on Triton's cross entropy: the contract, pieces, the grad buffer."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import linear_cross_entropy, linear_cross_entropy_ref
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops import test_linear_cross_entropy
from tests.ops.contract import LAYOUTS, Inputs, change_layout
from tests.triton.harness import DEVICE, OnTriton, kernels_launched, on_device

FLOATS = test_linear_cross_entropy.FLOATS
problem = test_linear_cross_entropy.problem
op_file = importlib.import_module("accel.ops.linear_cross_entropy")


@pytest.fixture
def small_pieces(monkeypatch):
    """Of 4 rows and 16 tokens, 2 rows at once."""
    monkeypatch.setitem(op_file.PIECES, DEVICE, op_file._Piece(4, 16, 2))


class TestLinearCrossEntropy(OnTriton, test_linear_cross_entropy.TestLinearCrossEntropy):
    large_inputs = None

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        options = {"tokens_per_chunk": 24, "label_smoothing": 0.1 * (seed % 2)}
        return Inputs(problem((2, 2), 20, 43, dtype, seed), options)

    def opchecks(self):
        hidden, weight, target = (t.to(DEVICE) for t in problem((3,), 20, 43, torch.bfloat16))
        stats = torch.ops.accel.linear_cross_entropy_stats.default
        call = (hidden, weight, target, 0, 43, -100, True, 24)
        yield stats, call
        backward = torch.ops.accel.linear_cross_entropy_bwd.default
        dloss = torch.randn(3, device=DEVICE)
        yield backward, (hidden, weight, target, stats(*call), dloss, 0, 43, 0.1, 24)

    @settings(deadline=None, max_examples=15)
    @given(
        shape=st.sampled_from([(0, 7), (1, 1), (5, 31), (2, 5, 7), (13, 16)]),
        layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        num_tokens=st.sampled_from([2, 7, 43, 97]),
        chunk=st.sampled_from([16, 1000]),
        smoothing=st.sampled_from([0.0, 0.3]),
        dtype=st.sampled_from(FLOATS),
    )
    def test_matches_reference_for_any_layout(
        self, shape, layouts, num_tokens, chunk, smoothing, dtype
    ):
        """Few rows and pieces: the interpreter takes some milliseconds for each row of each."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(num_tokens))
        hidden = change_layout(drawn, layouts[0])
        self.check_layout(hidden, num_tokens, layouts[1], chunk, smoothing, dtype)

    @pytest.mark.usefixtures("small_pieces")
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize(
        ("rows", "hidden_size", "num_tokens", "chunk"),
        [
            ((0,), 8, 5, 2),
            ((1,), 1, 1, 1),
            ((2, 1), 7, 31, 31),
            ((5,), 16, 37, None),  # one row more than a block; the device's tokens
            ((3,), 16, 37, 1000),  # a chunk larger than the vocabulary
        ],
    )
    def test_pieces_of_any_size(self, rows, hidden_size, num_tokens, chunk, dtype):
        tensors = problem(rows, hidden_size, num_tokens, dtype)
        self.check(Inputs(tensors, {"tokens_per_chunk": chunk}))


@pytest.mark.usefixtures("triton_kernels", "small_pieces")
class TestPieces:
    op = staticmethod(on_device(linear_cross_entropy))

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_adds_to_the_grad_buffer_and_hands_on_no_gradient(self, dtype):
        tensors = problem((9,), 24, 43, dtype)
        dloss = torch.rand(9, generator=torch.Generator().manual_seed(2))

        def gradients(op, tensors, dloss, **options):
            leaves = [t.clone().requires_grad_() for t in tensors[:2]]
            op(*leaves, tensors[2], **options).backward(dloss)
            return [t.grad for t in leaves]

        start = torch.randn(43, 24, generator=torch.Generator().manual_seed(3))
        buffer = start.to(DEVICE, copy=True)
        on_gpu = [t.to(DEVICE) for t in tensors]
        dhidden, no_dweight = gradients(
            linear_cross_entropy, on_gpu, dloss.to(DEVICE), grad_buffer=buffer
        )
        assert no_dweight is None
        exact_tensors = [*(t.double() for t in tensors[:2]), tensors[2]]
        base = gradients(linear_cross_entropy_ref, tensors, dloss)
        exact = gradients(linear_cross_entropy_ref, exact_tensors, dloss.double())
        assert_close_to_baseline(dhidden.cpu(), base[0], exact[0], roundings=8)
        added = (buffer.cpu().double() - start.double()).float()
        magnitude = float(tensors[0].abs().double().sum(0).max())
        assert_close_to_baseline(added, base[1].float(), exact[1], magnitude=magnitude)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("scale", [1.0, 1000.0])
    def test_the_grad_buffer_is_summed_in_fp32(self, dtype, scale):
        test_linear_cross_entropy.check_sums_in_fp32(dtype, 9, scale, DEVICE)

    def test_targets_that_are_not_checked(self):
        hidden, weight, _ = problem((4,), 8, 19, torch.float32)
        logits = hidden @ weight.t()
        target = torch.tensor([0, 19, -1, 400])  # the last chunk is ragged: 19 would be in it
        loss = self.op(hidden, weight, target, check_target=False)
        torch.testing.assert_close(loss[1:], logits[1:].logsumexp(1) - logits[1:].amax(1))

    def test_every_piece_is_one_launch(self):
        hidden, weight, target = problem((4 * 2,), 8, 16 * 3, torch.float32)

        def forward():
            self.op(hidden, weight, target, check_target=False)

        assert kernels_launched(forward) == ["_stats"] * 2 * 3
