"""Routing maps without Triton: against loops over tokens, and Megatron's unfused padding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import accel

T, TOPK, E = 12, 3, 5


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    accel.enable(preset="off", device="cpu")
    yield
    accel.disable()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_to_multihot(dtype: torch.dtype) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    torch.manual_seed(0)
    indices = torch.stack([torch.randperm(E)[:TOPK] for _ in range(T)]).to(dtype)
    indices[torch.rand(T, TOPK) < 0.4] = -1
    indices[0] = -1
    probs = torch.rand(T, TOPK, requires_grad=True)
    got_map, got_probs = token_dispatcher.fused_indices_to_multihot(indices, probs, E)

    expected_map, expected_probs = torch.zeros(T, E, dtype=torch.bool), torch.zeros(T, E)
    weights, expected_grad = torch.rand(T, E), torch.zeros(T, TOPK)
    for t, k in (indices != -1).nonzero().tolist():
        expert = int(indices[t, k])
        expected_map[t, expert] = True
        expected_probs[t, expert] = probs[t, k].detach()
        expected_grad[t, k] = weights[t, expert]
    assert torch.equal(got_map, expected_map)
    assert torch.equal(got_probs, expected_probs)
    assert got_map.is_contiguous()
    (got_probs * weights).sum().backward()
    assert torch.equal(probs.grad, expected_grad)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_padding_adds_the_first_free_tokens(dtype: torch.dtype, multiple: int) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    torch.manual_seed(0)
    routing_map = (torch.rand(T, E) < 0.3).to(dtype)
    before = routing_map.clone()
    padded = token_dispatcher.fused_pad_routing_map(routing_map, multiple)
    assert torch.equal(routing_map, before), "the input was written to"
    for expert in range(E):
        column = before[:, expert].int().tolist()
        while sum(column) % multiple and 0 in column:
            column[column.index(0)] = 1
        assert padded[:, expert].tolist() == column


def test_no_token() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    empty = torch.empty(0, TOPK, dtype=torch.int64)
    multihot, probs = token_dispatcher.fused_indices_to_multihot(empty, torch.empty(0, TOPK), E)
    assert multihot.shape == probs.shape == (0, E)
    padded = token_dispatcher.fused_pad_routing_map(torch.empty(0, E, dtype=torch.bool), 4)
    assert padded.shape == (0, E)
