"""What a layer costs, read while it runs, and the options that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.memory.layer_costs import KEEP, WHOLE, Costs, Span, evened, measure, options_of, parts_of
from tests.ops.contract import needs_native

BYTES = 256 * 256 * 4


class Toy(torch.nn.Module):
    """A part `exp` that saves its result, and a part around it that saves two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Identity(), torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp()).sigmoid().tanh() * 1.0


def before(module: torch.nn.Module) -> Callable[[Callable[[int], None]], Any]:
    return lambda call: module.register_forward_pre_hook(lambda *_: call(0))


def behind(module: torch.nn.Module, kept: int = 0) -> Callable[[Callable[[int], None]], Any]:
    return lambda call: module.register_forward_hook(lambda *_: call(kept))


@needs_native
@pytest.mark.usefixtures("counted")
def test_bytes_of_spans_and_of_all() -> None:
    toy = Toy()
    x = torch.randn(256, 256).requires_grad_()
    spans = [
        Span("exp", behind(toy.first), before(toy.second)),
        Span("twice", behind(toy.first), before(toy.second)),
        Span("twice", before(toy.second), behind(toy.second, kept=7)),
    ]
    with measure(torch.device("cpu"), spans) as costs:
        y = toy(x)
    assert costs.parts["exp"][0] == pytest.approx(BYTES, abs=512)
    assert costs.parts["exp"][0] - costs.parts["twice"][0] == pytest.approx(7, abs=512)
    assert costs.num_bytes == pytest.approx(4 * BYTES, abs=512)
    assert costs.seconds >= costs.parts["exp"][1] > 0
    assert not toy.first._forward_hooks
    assert not toy.second._forward_pre_hooks
    y.sum().backward()


def test_an_error_inside_leaves_no_hook() -> None:
    toy = Toy()
    with (
        pytest.raises(ZeroDivisionError),
        measure(torch.device("cpu"), [Span("exp", behind(toy.first), before(toy.second))]),
    ):
        raise ZeroDivisionError
    assert not toy.first._forward_hooks


def test_options_are_all_parts_together_and_the_whole() -> None:
    costs = Costs(100, 5.0, {"norms": (10, 0.5), "activation": (20, 0.25), "nothing": (0, 0.0)})
    layer = options_of("3", costs)
    found = {o.name: (o.saved, o.seconds, o.workspace) for o in layer.options}
    assert found == {
        KEEP: (0, 0.0, 0),
        "recompute norms": (10, 0.5, 10),
        "recompute activation": (20, 0.25, 20),
        "recompute norms + activation": (30, 0.75, 30),
        WHOLE: (100, 5.0, 100),
    }
    assert (layer.name, layer.seconds, layer.options[0].name) == ("3", 5.0, KEEP)
    assert parts_of("recompute norms + activation") == {"norms", "activation"}
    assert parts_of(WHOLE) == parts_of(KEEP) == frozenset()


def test_layers_alike_cost_the_same() -> None:
    found = evened(
        [
            Costs(100_000, 1.0, {"norms": (5000, 0.5)}),
            Costs(300_000, 9.0, {"norms": (5000, 0.5)}),
            Costs(100_032, 3.0, {"norms": (5064, 0.25)}),
        ]
    )
    assert found[0] == found[2] == Costs(100_032, 2.0, {"norms": (5064, 0.375)})
    assert found[1] == Costs(300_000, 9.0, {"norms": (5000, 0.5)})
