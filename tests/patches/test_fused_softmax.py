"""The softmax kernel at Megatron's seam: upstream's masks, upstream's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accel
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import needs_native

pytestmark = needs_native


@pytest.fixture
def stock() -> Iterator[None]:
    accel.enable(preset="exact")
    yield
    accel.disable()


def build(mask_type: str, **options: Any) -> torch.nn.Module:
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    options = {"input_in_bf16": True, "softmax_in_fp32": True, "scale": None, **options}
    return FusedScaleMaskSoftmax(
        input_in_fp16=False,
        attn_mask_type=AttnMaskType[mask_type],
        scaled_masked_softmax_fusion=True,
        **{"mask_func": attention_mask_func, **options},
    )


def results(module: torch.nn.Module, x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    probs = module(leaf * 1, *args)  # upstream masks in place
    dprobs = torch.randn(x.shape, generator=torch.Generator().manual_seed(6)).to(probs.dtype)
    return [probs.detach(), *torch.autograd.grad(probs, leaf, dprobs)]


CASES: dict[str, tuple[str, tuple[int, int], Any, dict[str, Any]]] = {
    "padding mask": ("padding", (24, 24), torch.rand(2, 1, 24, 24) > 0.5, {}),
    "mask of keys": ("padding", (24, 32), torch.rand(2, 1, 1, 32) > 0.5, {}),
    "no mask": ("no_mask", (24, 32), None, {}),
    "causal": ("causal", (24, 24), None, {}),
    "causal, one query": ("causal", (1, 24), None, {}),
    "causal type with a mask": ("causal", (24, 24), torch.rand(2, 1, 24, 24) > 0.5, {}),
    "window": ("causal", (24, 24), None, {"window_size": (5, 0)}),
    "scale": ("causal", (24, 24), None, {"scale": 3}),
    "softmax in bf16": ("causal", (24, 24), None, {"softmax_in_fp32": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_upstreams_numbers(case: str, stock: None) -> None:
    mask_type, shape, mask, options = CASES[case]
    module = build(mask_type, **options)
    fp64 = build(mask_type, **{**options, "input_in_bf16": False, "softmax_in_fp32": True})
    x = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    theirs, exact = results(module, x, mask), results(fp64, x.double(), mask)
    accel.enable(preset="exact", fused_softmax=True)
    ours = results(module, x, mask)
    for i, values in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_close_to_baseline(*values, name=f"{case}: {i}", magnitude=3.0 if i else None)


def test_causal_still_needs_as_many_keys_as_queries(stock: None) -> None:
    accel.enable(preset="exact", fused_softmax=True)
    with pytest.raises(AssertionError, match="only for self attention"):  # upstream's words
        build("causal")(torch.randn(1, 1, 3, 5).bfloat16(), None)


def test_a_mask_that_hides_otherwise_is_upstreams(stock: None) -> None:
    module = build("padding", mask_func=lambda scores, mask: scores.masked_fill(mask, -5.0))
    x, mask = torch.randn(2, 4, 24, 24).bfloat16(), torch.rand(2, 1, 24, 24) > 0.5
    theirs = results(module, x, mask)
    accel.enable(preset="exact", fused_softmax=True)
    for a, b in zip(results(module, x, mask), theirs, strict=True):
        assert torch.equal(a, b)


def test_offset_is_upstreams(stock: None) -> None:
    module, offset = build("causal"), torch.randn(4)
    x = torch.randn(2, 4, 24, 24).bfloat16()
    theirs = results(module, x, None, offset)
    accel.enable(preset="exact", fused_softmax=True)
    for a, b in zip(results(module, x, None, offset), theirs, strict=True):
        assert torch.equal(a, b)
