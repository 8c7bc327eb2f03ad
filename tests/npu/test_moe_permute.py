"""Tokens to their experts and back on Ascend: maps with equally many rows for each token, and others."""

import pytest
import torch

from accel.ops import moe_row_map, moe_unpermute
from accel.ops.moe_permute import _row_map_ref, moe_unpermute_ref
from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_moe_permute
from tests.ops.contract import Inputs

__all__ = ["npu_kernels"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def regular_map(num_tokens: int = 11, num_experts: int = 5, topk: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(topk).indices
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)


def permuting(dtype: torch.dtype, probs_dtype: torch.dtype | None) -> Inputs:
    routing_map = regular_map()
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs = torch.rand(routing_map.shape, generator=torch.Generator().manual_seed(1))
    probs = None if probs_dtype is None else probs.to(probs_dtype)
    return Inputs([x, probs, moe_row_map(routing_map)])


def unpermuting(dtype: torch.dtype, probs_dtype: torch.dtype | None, by_row: bool) -> Inputs:
    x, probs, row_map = permuting(dtype, probs_dtype).tensors
    y = torch.randn(len(row_map), 6, generator=torch.Generator().manual_seed(4)).to(dtype)
    if by_row and probs is not None:
        probs = probs.T.reshape(-1)[row_map]
    return Inputs([y, probs, row_map], {"num_tokens": len(x)})


@pytest.mark.usefixtures("npu_kernels")
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("rows", [None, 0, 7, 300])
def test_row_map_is_that_of_the_reference(rows, align, share):
    routing_map = torch.rand(13, 5, generator=torch.Generator().manual_seed(0)) < share
    for pad in (False, True) if rows is not None else (False,):
        got = moe_row_map(routing_map, rows, drop_and_pad=pad, align=align)
        capacity = min((rows or 0) // 5, 13) if pad else -1
        assert torch.equal(got, _row_map_ref(routing_map, len(got), capacity, align))


@pytest.mark.usefixtures("npu_kernels")
@pytest.mark.parametrize("align", [2**28, 2**31, 2**58])
def test_rows_that_32_bits_do_not_count(align):
    routing_map = torch.ones(2, 16, dtype=torch.bool)
    assert torch.equal(
        moe_row_map(routing_map, 5, align=align), _row_map_ref(routing_map, 5, -1, align)
    )


class TestMoePermute(OnNpu, test_moe_permute.TestMoePermute):
    uses = ("npu_moe_token_permute_grad_v2",)

    def uses_inputs(self):
        return permuting(torch.bfloat16, torch.float32)

    @pytest.mark.parametrize("probs_dtype", [None, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_equally_many_rows_for_each_token(self, dtype, probs_dtype):
        self.check(permuting(dtype, probs_dtype))

    def test_other_maps_are_plain_pytorch(self):
        assert not calls_of(self.op, self.inputs(torch.bfloat16))

    def test_plain_token_indices(self):
        x = torch.randn(4, 3)
        self.check(Inputs([x, None, torch.tensor([2, 0, 0, 3])]))


class TestMoeUnpermute(OnNpu, test_moe_permute.TestMoeUnpermute):
    uses = ("npu_moe_token_unpermute", "npu_moe_token_unpermute_grad")

    def uses_inputs(self):
        return unpermuting(torch.bfloat16, torch.float32, by_row=False)

    @pytest.mark.parametrize("by_row", [False, True])
    @pytest.mark.parametrize("probs_dtype", [None, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_equally_many_rows_for_each_token(self, dtype, probs_dtype, by_row):
        self.check(unpermuting(dtype, probs_dtype, by_row))

    def test_without_probabilities(self):
        inputs = unpermuting(torch.bfloat16, None, by_row=False)
        assert calls_of(self.op, inputs) == {"npu_moe_token_permute_grad_v2"}

    def test_other_maps_are_plain_pytorch(self):
        assert not calls_of(self.op, self.inputs(torch.bfloat16))


@pytest.mark.usefixtures("npu_kernels")
def test_probabilities_in_fp64_are_not_handed_to_torch_npu():
    """Of rows in fp32, which the kernels take."""
    inputs = unpermuting(torch.float32, torch.float64, by_row=True)
    y, probs, row_map = inputs.tensors
    got = moe_unpermute(y, row_map, **inputs.options, probs=probs)
    want = moe_unpermute_ref(y, row_map, **inputs.options, probs=probs)
    assert torch.allclose(got, want, atol=1e-6)
