"""Megatron's router with the kernel: the same experts, ties included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accel
from accel.feature import Context
from accel.patches.fused_topk_router import FEATURE
from tests.ops.contract import needs_native

from .moe_layer import CONFIGS, assert_same, build, one_rank, step

pytestmark = needs_native


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_computes_what_stock_does(name: str) -> None:
    with one_rank("off"):
        stock = step(build(**CONFIGS[name]))
    with one_rank("off", fused_topk_router=True):
        assert_same(step(build(**CONFIGS[name])), stock)


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("ties", ["none", "some", "all"])
def test_experts_are_those_of_stock_ties_included(ties: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(tokens, 24, generator=generator)
    logits = {"none": logits, "some": logits.round(), "all": logits * 0}[ties]
    found = []
    for preset in ("off", "fast"):
        accel.enable(preset=preset)
        try:
            from megatron.core.transformer.moe import moe_utils

            found.append(
                [
                    moe_utils.topk_routing_with_score_function(logits, 5)[1],
                    moe_utils.topk_routing_with_score_function(
                        logits, 4, num_groups=6, group_topk=2, score_function="sigmoid"
                    )[1],
                    moe_utils.compute_routing_scores_for_aux_loss(
                        logits, 3, "softmax", padding_mask=torch.arange(tokens) % 3 == 0
                    )[0],
                ]
            )
        finally:
            accel.disable()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_the_kernel_does_not_take_over_stays_stocks() -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for preset in ("off", "fast"):
        accel.enable(preset=preset)
        try:
            from megatron.core.transformer.moe import moe_utils

            route = moe_utils.topk_routing_with_score_function
            results.append([*route(logits, 2, dense_output=True), *route(logits.bfloat16(), 2)])
        finally:
            accel.disable()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"num_experts": None}, "there are no experts"),
        ({"bf16": True, "moe_router_dtype": None}, "--moe-router-dtype fp32"),
        ({"bf16": True, "moe_router_dtype": "fp32"}, None),
        ({"moe_router_dtype": None}, None),
    ],
)
def test_idle(args: dict[str, Any], says: str | None) -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(**{"num_experts": 8, **args}))
    found = FEATURE.idle(context)
    assert found is None if says is None else says in found
