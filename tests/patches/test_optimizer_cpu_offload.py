"""Megatron's hybrid optimizer on a CPU, made by whoever: it trains all parameters, where they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import accel


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    accel.enable(preset="off", device="cpu")
    yield
    accel.disable()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_trains_like_the_optimizer_it_is_made_of(
    kind: type[torch.optim.Optimizer],
    overlap: bool,
    fraction: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(7, 5)), torch.nn.Parameter(torch.randn(11))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    with caplog.at_level(logging.INFO, logger="accel"):
        hybrid = HybridDeviceOptimizer(
            ours,
            offload_fraction=fraction,
            cpu_optimizer_cls=kind,
            gpu_optimizer_cls=kind,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            lr=0.1,
        )
    alone = kind(theirs, lr=0.1)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        hybrid.step()
        alone.step()
    assert all(mine.equal(other) for mine, other in zip(ours, theirs, strict=True))
    assert ("nothing is moved" in caplog.text) is bool(fraction)
