"""What a layer costs, read while it runs, and the options that follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel.memory.layer_costs import (
    KEEP,
    OTHER,
    WHOLE,
    Costs,
    Hook,
    Movable,
    Span,
    evened,
    measure,
    options_of,
)
from accel.memory.recompute import Recomputed
from accel.memory.swap import Swap
from tests.ops.contract import needs_native

BYTES = 256 * 256 * 4


class Toy(torch.nn.Module):
    """A part `exp` that saves its result, and a part around it that saves two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Identity(), torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp()).sigmoid().tanh() * 1.0


def before(module: torch.nn.Module) -> Hook:
    return lambda call: module.register_forward_pre_hook(lambda _, args: call(args))


def behind(module: torch.nn.Module) -> Hook:
    return lambda call: module.register_forward_hook(lambda _, args, output: call(output))


@needs_native
@pytest.mark.usefixtures("counted")
def test_bytes_of_spans_and_of_all() -> None:
    toy = Toy()
    x = torch.randn(256, 256).requires_grad_()
    spans = [
        Span("exp", behind(toy.first), before(toy.second)),
        Span("twice", behind(toy.first), before(toy.second)),
        Span("twice", before(toy.second), behind(toy.second)),
        Span("kept", behind(toy.first), before(toy.second), keeps_output=True),
    ]
    with measure(torch.device("cpu"), spans) as costs:
        y = toy(x)
    assert costs.parts["exp"][0] == pytest.approx(BYTES, abs=512)
    assert costs.parts["twice"][0] == pytest.approx(BYTES, abs=512)
    assert costs.parts["kept"][0] == pytest.approx(0, abs=512)
    assert costs.twice == {"exp": 0, "twice": 0, "kept": BYTES}
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


class Chain(torch.nn.Module):
    """A norm whose input and output are saved, and what comes behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.behind = torch.nn.LayerNorm(256), torch.nn.Linear(256, 512)
        self.outside = torch.nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.behind(self.norm(x)).exp())


@needs_native
@pytest.mark.parametrize("outside", [False, True])
def test_what_moves_belongs_to_the_part_that_would_keep_or_free_it(outside: bool) -> None:
    model = Chain()
    spans = [Span("norm", before(model.norm), behind(model.norm))]
    modules = [model.norm, model.behind, *([model.outside] if outside else [])]
    movable = Movable(Swap(torch.device("cpu"), min_bytes=4096), modules)
    found: list[Costs] = []

    def measured(x: Tensor) -> Tensor:
        with measure(torch.device("cpu"), spans, movable) as costs:
            y = model(x)
        found.append(costs)
        return y

    Recomputed()(measured, torch.randn(256, 256).requires_grad_()).sum().backward()
    # the norm's input and output, each once; weights stay, and statistics, which are small
    moved = {"norm": 2 * BYTES} | ({OTHER: 2 * BYTES} if outside else {})
    assert [costs.moved for costs in found] == [{}, moved]
    assert not model.norm._forward_hooks
    assert not model.behind._forward_pre_hooks


def test_options_are_all_parts_together_the_whole_and_swaps() -> None:
    costs = Costs(
        100,
        5.0,
        {"norms": (10, 0.5), "activation": (20, 0.25), "nothing": (0, 0.0)},
        {"activation": 3},
        {OTHER: 7, "norms": 15},
    )
    layer = options_of("3", costs)
    numbers = {o.name: (o.saved, o.seconds, o.workspace, o.link) for o in layer.options}
    recomputed = {
        KEEP: (0, 0.0, 0, 0.0),
        "recompute norms": (10, 0.5, 10, 0.0),
        "recompute activation": (20, 0.25, 23, 0.0),
        "recompute norms + activation": (30, 0.75, 33, 0.0),
        WHOLE: (100, 5.0, 100, 0.0),
    }
    assert numbers == recomputed
    assert (layer.name, layer.seconds, layer.options[0].name) == ("3", 5.0, KEEP)
    done = {o.name: (o.parts, o.whole, o.swapped) for o in layer.options}
    assert done["recompute norms + activation"] == ({"norms", "activation"}, False, False)
    assert done[WHOLE] == (frozenset(), True, False)

    layer = options_of("3", costs, copy_rate=2.0, not_swapped=frozenset({"activation"}))
    numbers = {o.name: (o.saved, o.seconds, o.workspace, o.link) for o in layer.options}
    assert numbers == recomputed | {
        "swap": (22, 0.0, 22, 11.0),
        "swap, recompute norms": (17, 0.5, 17, 3.5),
    }
    done = {o.name: (o.parts, o.whole, o.swapped) for o in layer.options}
    assert done["swap, recompute norms"] == ({"norms"}, False, True)


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


def test_numbers_and_back() -> None:
    """In the order of the parts that are asked for; a part that was not measured costs nothing."""
    costs = Costs(100, 5.0, {"b": (20, 0.25), "a": (10, 0.5)}, {"b": 3}, {OTHER: 7, "a": 15})
    again = Costs.of_numbers(costs.numbers("abc"), "abc")
    parts = {"a": (10, 0.5), "b": (20, 0.25), "c": (0, 0.0)}
    assert list(again.parts.items()) == list(parts.items())
    moved = {OTHER: 7, "a": 15, "b": 0, "c": 0}
    assert again == Costs(100, 5.0, parts, {"a": 0, "b": 3, "c": 0}, moved)
    assert len(Costs().numbers("abc")) == len(costs.numbers("abc"))
