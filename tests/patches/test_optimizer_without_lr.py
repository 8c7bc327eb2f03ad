"""An optimizer without a learning rate: built as with one, and the same steps once it is set."""

from __future__ import annotations

import pytest
import torch

from .test_fused_adamw import HYPER, build, gradients, one_rank


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_the_rate_may_come_later(
    decoupled: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    with one_rank(fused_adamw=fused):
        for lr in (0.1, None):
            monkeypatch.setitem(HYPER, "lr", lr)
            model, optimizer = build(decoupled_weight_decay=decoupled)
            assert optimizer.config.lr == lr
            for group in optimizer.param_groups:
                group["lr"] = 0.01  # as Megatron's scheduler does before every step
            for p, grad in zip(model.parameters(), gradients(model, 0), strict=True):
                p.main_grad.copy_(grad)
            optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
