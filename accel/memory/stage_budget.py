"""What the layers of a pipeline stage are to do, by what an iteration took in which all were computed again.

    n          micro-batches in flight
    a[l]       bytes that layer l keeps of one micro-batch, if it keeps everything

Two peaks count. Until the first layer's backward pass begins, the loss is there, and no layer's workspace; in
the backward passes one layer is there as a whole, which was the largest. So if every layer kept everything:

    forward    measured there + n sum(a)
    backward   measured there - max(a) + n sum(a)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from accel.memory.layer_costs import Costs, evened, options_of
from accel.memory.planner import Plan, choose

__all__ = ["Figures", "Stage", "largest_of_stage"]


@dataclass(frozen=True)
class Figures:
    """What an iteration took in which all layers were computed again."""

    peak: int
    """Bytes."""
    forward_peak: int
    """Bytes, until the first layer's backward pass began."""
    seconds_of_a_byte: float
    """Of the link to the host; infinite: nothing is moved."""
    layers: Sequence[tuple[int, Costs]]
    """Of each its micro-batches in flight, and the costs of one."""


def largest_of_stage(
    figures: Figures, parts: Sequence[str], stage: int, device: torch.device
) -> Figures:
    """Each the largest of this stage's ranks, so that they decide alike; all ranks of the world come here.

    Args:
        parts: those that layers can compute again, in the order in which options name them.
        device: of the collectives.
    """
    head = [figures.peak, figures.forward_peak, figures.seconds_of_a_byte]
    rows = [[float(count), *costs.numbers(parts)] for count, costs in figures.layers]
    if dist.is_initialized():
        num_rows = torch.tensor(len(rows), device=device)
        dist.all_reduce(num_rows, dist.ReduceOp.MAX)
        width = 1 + len(Costs().numbers(parts))
        own = torch.zeros(1 + int(num_rows), width, dtype=torch.float64, device=device)
        own[0, :4] = torch.tensor([stage, *head], dtype=torch.float64)
        if rows:
            own[1 : 1 + len(rows)] = torch.tensor(rows, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        same = torch.stack([each for each in everyone if int(each[0, 0]) == stage]).amax(0)
        head, rows = same[0, 1:4].tolist(), same[1 : 1 + len(rows)].tolist()
    peak, forward_peak, seconds_of_a_byte = head
    layers = [(int(count), Costs.of_numbers(numbers, parts)) for count, *numbers in rows]
    return Figures(int(peak), int(forward_peak), seconds_of_a_byte, layers)


class Stage:
    """Layers with their options, and the peaks if all kept everything.

    Args:
        names: of the layers.
        hides: whether the copies of each have something to hide behind.
        not_swapped: parts that are not computed again where a layer is swapped.
    """

    def __init__(
        self,
        figures: Figures,
        names: Sequence[str],
        hides: Sequence[bool],
        not_swapped: frozenset[str] = frozenset(),
    ) -> None:
        costs = evened([costs for _, costs in figures.layers])
        rate = 1 / figures.seconds_of_a_byte
        self.layers = [
            options_of(name, cost, rate if hidden else 0.0, not_swapped)
            for name, cost, hidden in zip(names, costs, hides, strict=True)
        ]
        # a layer that keeps nothing has no backward pass: its micro-batches are never over
        counts = [count for count, cost in figures.layers if cost.num_bytes]
        self.in_flight = max(counts, default=1)
        everything = self.in_flight * sum(cost.num_bytes for cost in costs)
        workspace = max([cost.num_bytes for cost in costs], default=0)
        self.forward = figures.forward_peak + everything
        self.backward = figures.peak - workspace + everything

    def peak(self, plan: Plan) -> int:
        """Bytes, as predicted."""
        return max(self.forward - plan.saved - plan.workspace, self.backward - plan.saved)

    def choose(self, budget: int) -> Plan:
        """The fastest plan of those that meet the budget in the one peak, in the other, or in both as one.

        Raises:
            CannotMeet: none of them meets it in both.
        """
        bare = [
            replace(layer, options=tuple(replace(o, workspace=0) for o in layer.options))
            for layer in self.layers
        ]
        for problem, peak in (
            (self.layers, self.backward),
            (bare, self.forward),
            (self.layers, max(self.forward, self.backward)),
        ):
            plan = self._whole(choose(problem, peak - budget, self.in_flight))
            if self.peak(plan) <= budget:
                break
        return plan

    def _whole(self, plan: Plan) -> Plan:
        """A plan whose options have their workspace again."""
        pairs = zip(self.layers, plan.choices, strict=True)
        chosen = [next(o for o in layer.options if o.name == c.name) for layer, c in pairs]
        workspace = max(option.workspace for option in chosen)
        saved = self.in_flight * sum(option.saved for option in chosen) - workspace
        return Plan(tuple(chosen), saved, plan.seconds, workspace)
