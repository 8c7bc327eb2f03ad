"""Megatron's permute, unpermute and sort_chunks_by_idxs with the kernel: same rows, same order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import accel
from tests.ops.contract import needs_native

from .moe_layer import CONFIGS, assert_same, build, one_rank, step

pytestmark = needs_native


def routed(num_tokens: int, num_experts: int, topk: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits[:, 1] -= 100  # nobody goes there
    indices = logits.topk(topk, dim=1).indices
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    probs = logits.softmax(-1) * routing_map
    return torch.randn(num_tokens, 33, generator=generator).to(dtype), probs, routing_map


def there_and_back(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, rows: int, pad: bool, merge: bool
) -> list[Tensor]:
    """All that `permute` and `unpermute` give, and the gradients of tokens and probs."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    x, p = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
    permuted, permuted_probs, indices, *_ = permute(
        x, routing_map, probs=p, num_out_tokens=rows, drop_and_pad=pad
    )
    y = (permuted * permuted_probs[:, None].to(permuted.dtype)).tanh()
    back = unpermute(y, indices, x.shape, p if merge else None, routing_map, drop_and_pad=pad)
    generator = torch.Generator().manual_seed(1)
    dback = torch.randn(back.shape, generator=generator).to(back.dtype)
    return [permuted, permuted_probs, indices, back, *torch.autograd.grad(back, [x, p], dback)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 2), (1, 3, 1), (37, 8, 2), (64, 40, 6)], ids=str)
def test_is_megatrons_permutation(shape, pad, merge, dtype) -> None:
    num_tokens, num_experts, topk = shape
    rows = num_experts * (num_tokens // 2) if pad else num_tokens * topk
    case = (*routed(num_tokens, num_experts, topk, dtype), rows, pad, merge)
    accel.enable(preset="off")
    try:
        stock = there_and_back(*case)
        accel.enable(preset="fast")
        ours = there_and_back(*case)
    finally:
        accel.disable()
    for name, a, b in zip(("rows", "probs", "indices"), ours, stock, strict=False):
        assert torch.equal(a, b), name
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours[3:], stock[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * topk)


@pytest.mark.parametrize("with_probs", [False, True])
def test_chunks_are_sorted_bit_for_bit(with_probs: bool) -> None:
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    generator = torch.Generator().manual_seed(0)
    tokens, probs = torch.randn(10, 6, generator=generator), torch.rand(10, generator=generator)
    results = []
    for preset in ("off", "fast"):
        accel.enable(preset=preset)
        try:
            from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

            x, p = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
            y, w = sort_chunks_by_idxs(x, sizes, order, p if with_probs else None)
            weighted = y * torch.arange(60.0).view(10, 6) + (w[:, None] if with_probs else 0)
            wanted = [x, p] if with_probs else [x]
            results.append([y, w, *torch.autograd.grad(weighted.sin().sum(), wanted)])
        finally:
            accel.disable()
    for a, b in zip(*results, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_computes_what_stock_does(name: str) -> None:
    with one_rank("off"):
        stock = step(build(**CONFIGS[name]))
    with one_rank("off", fused_moe_permute=True):
        assert_same(step(build(**CONFIGS[name])), stock)


def test_two_experts_for_each_token_are_bit_identical_in_bf16() -> None:
    with one_rank("off"):
        stock = step(build(torch.bfloat16))
    with one_rank("off", fused_moe_permute=True):
        ours = step(build(torch.bfloat16))
    assert all(torch.equal(ours[name], stock[name]) for name in stock)
