"""A pipeline of small layers, for tests that run schedules: `runtime.Stages` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.parallel.schedule import Action, Kind, Schedule

WIDTH = 8


def weights_of(num_stages: int) -> list[Tensor]:
    """One for each stage of the model."""
    draw = torch.Generator().manual_seed(num_stages)
    return [
        torch.randn(WIDTH, WIDTH, generator=draw).div_(WIDTH**0.5).requires_grad_()
        for _ in range(num_stages)
    ]


def data_of(micro_batch: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + micro_batch))


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def gradients_by_hand(
    num_stages: int, num_micro_batches: int, rows: int = 4
) -> tuple[list[float], list[Tensor]]:
    """The losses, and the gradients of the weights, of one rank that does everything in turn."""
    weights, losses = weights_of(num_stages), []
    for i in range(num_micro_batches):
        x = data_of(i, rows + i if rows < 0 else rows)
        for weight in weights:
            x = layer(x, weight)
        loss = x.square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, [weight.grad for weight in weights if weight.grad is not None]


class TanhStages:
    """One layer for each stage; the gradient of a weight is put off where the schedule says so."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        weights = weights_of(schedule.num_stages)
        self.stages = [schedule.stage(rank, c) for c in range(schedule.num_chunks)]
        self.weights = {stage: weights[stage] for stage in self.stages}
        self.losses: dict[int, float] = {}
        self.later: dict[Action, tuple[Tensor, Tensor | None]] = {}
        self.sent_ones = 0

    def forward(self, action: Action, taken: Tensor | None) -> Tensor:
        stage = self.schedule.stage(self.rank, action.chunk)
        assert (taken is None) == (stage == 0)
        made = layer(data_of(action.micro_batch) if taken is None else taken, self.weights[stage])
        if stage < self.schedule.num_stages - 1:
            return made
        loss = made.square().sum()
        self.losses[action.micro_batch] = loss.item()
        return loss

    def backward(
        self, action: Action, taken: Tensor | None, made: Tensor, grad: Tensor | None
    ) -> Tensor | None:
        if action.kind is Kind.BACKWARD:
            torch.autograd.backward(made, grad)
            return None if taken is None else taken.grad
        self.later[action] = made, grad
        if taken is None:
            return None
        (of_input,) = torch.autograd.grad(made, taken, grad, retain_graph=True)
        return of_input

    def backward_weight(self, action: Action) -> None:
        made, grad = self.later.pop(Action(Kind.BACKWARD_INPUT, action.micro_batch, action.chunk))
        weight = self.weights[self.schedule.stage(self.rank, action.chunk)]
        (of_weight,) = torch.autograd.grad(made, weight, grad)
        weight.grad = of_weight if weight.grad is None else weight.grad + of_weight

    def sent(self, made: Tensor) -> None:
        self.sent_ones += 1
