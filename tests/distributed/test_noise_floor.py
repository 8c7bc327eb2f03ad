"""100 steps in bf16 with everything on stay as close to stock as a run that starts one ulp away.

Training amplifies rounding, so no fixed tolerance holds for 100 steps. The yardstick is what the
smallest possible change does: the same stock run with every initial weight moved by one bf16 unit in
the last place, up or down at random, several times. The largest distance of such runs from stock is
the noise floor; it is printed, and shown at the session's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.testing.distributed import MEASURED

from .training import losses, train

STEPS = 100
FLAGS = ["--bf16", "--train-iters", str(STEPS), "--seed", "7", "--global-batch-size", "4"]
STOCK = ["--accel-preset", "off", "--no-gradient-accumulation-fusion"]
NUM_PERTURBED = 3


def one_ulp_away(setup: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """``setup_model_and_optimizer`` whose model starts one ulp away in every weight."""

    def call(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        generator = torch.Generator().manual_seed(seed)
        for parameter in (p for chunk in model for p in chunk.parameters()):
            assert parameter.dtype == torch.bfloat16
            signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int16)
            bits = parameter.data.view(torch.int16)
            moved = (bits + 2 * signs - 1).view(torch.bfloat16)
            parameter.data.copy_(torch.where(parameter.data == 0, parameter.data, moved))
        optimizer.reload_model_params()
        return model, optimizer, scheduler

    return call


def distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.distributed(world_size=1)
def test_everything_on_stays_within_the_noise_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = losses(train([*FLAGS, *STOCK]))
    assert len(stock) == STEPS
    assert stock[-1] < 0.8 * stock[0], "the model does not learn"
    ours = losses(train([*FLAGS, "--accel-preset", "max"]))

    from megatron.training import training

    perturbed = []
    for seed in range(NUM_PERTURBED):
        with monkeypatch.context() as patch:
            setup = training.setup_model_and_optimizer
            patch.setattr(training, "setup_model_and_optimizer", one_ulp_away(setup, seed))
            perturbed.append(losses(train([*FLAGS, *STOCK])))
    floors = [distance(run, stock) for run in perturbed]
    print(f"{MEASURED}noise floors {floors}, everything on {distance(ours, stock)}")
    assert min(floors) > 0, "the perturbation did not reach the model"
    assert 0 < distance(ours, stock) <= max(floors)
