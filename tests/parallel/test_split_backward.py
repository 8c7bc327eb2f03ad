"""Backward passes in two parts give the gradients of whole ones, to the bit; what is put off, when it is
delivered, and that nothing is left on. Megatron's layers: `tests/patches/test_split_backward.py`."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.layers.grouped_linear import grouped_linear
from accel.parallel.linear import DelayedGradients, Layout, parallel_linear
from accel.parallel.split_backward import WeightPart, current, input_part

DTYPES = (torch.float32, torch.bfloat16)
MICRO_BATCHES, LAG = 5, 2
ROWS, HIDDEN, EXPERTS = 12, 16, 4


class Model(torch.nn.Module):
    """Two linear layers, one of them used twice, then experts, of which one gets no rows."""

    def __init__(self, dtype: torch.dtype, into_main_grad: bool) -> None:
        super().__init__()
        self.layout = Layout(into_main_grad=into_main_grad)
        draw = torch.Generator().manual_seed(0)

        def parameter(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(size, generator=draw) / 4).to(dtype))

        self.norm, self.bias = parameter(HIDDEN), parameter(HIDDEN)
        self.once, self.twice = parameter(HIDDEN, HIDDEN), parameter(HIDDEN, HIDDEN)
        self.experts = torch.nn.ParameterList(parameter(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.linear = [self.once, self.twice, *self.experts]
        for weight in self.linear if into_main_grad else ():
            weight.main_grad = torch.zeros(weight.shape)
            weight.grad_added_to_main_grad = False

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.norm
        for weight in (self.twice, self.once, self.twice):
            h = torch.tanh(parallel_linear(h, weight, self.bias, self.layout))
        return grouped_linear(h, list(self.experts), torch.tensor([5, 0, 4, 3]), self.layout)

    def gradients(self) -> list[Tensor]:
        if not self.layout.into_main_grad:
            return [p.grad for p in self.parameters()]
        return [self.norm.grad, self.bias.grad, *(w.main_grad for w in self.linear)]


def micro_batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    sizes = ((ROWS, HIDDEN), (ROWS, HIDDEN))
    return [
        tuple(torch.randn(size, generator=draw).to(dtype) for size in sizes)
        for _ in range(MICRO_BATCHES)
    ]


def whole(model: Model, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the inputs; those of the parameters are left in the model."""
    found = []
    for x, dy in micro_batches(dtype):
        model(x.requires_grad_()).backward(dy)
        found.append(x.grad)
    return found


def split(model: Model, dtype: torch.dtype) -> list[Tensor]:
    """As `whole`; the weights' part of a micro-batch comes some input parts after its own."""
    found, waiting = [], deque()
    for x, dy in micro_batches(dtype):
        y = model(x.requires_grad_())
        with input_part() as part:
            y.backward(dy)
        assert len(part) == 3 + EXPERTS
        assert all(part.holds(w) for w in model.linear)
        found.append(x.grad)
        waiting.append(part)
        if len(waiting) > LAG:
            waiting.popleft().compute()
    for part in waiting:
        part.compute()
        assert not len(part)
        assert not any(part.holds(w) for w in model.linear)
    return found


@pytest.mark.parametrize("into_main_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_whole_backward_passes(dtype: torch.dtype, into_main_grad: bool) -> None:
    models = [Model(dtype, into_main_grad) for _ in range(2)]
    inputs = [run(model, dtype) for run, model in zip((whole, split), models, strict=True)]
    assert all(map(torch.equal, *inputs))
    assert all(map(torch.equal, *(m.gradients() for m in models)))


def test_weights_have_nothing_before_their_part_and_the_rest_has_everything() -> None:
    model, expected = (Model(torch.float32, False) for _ in range(2))
    (x, dy), *_ = micro_batches(torch.float32)
    expected(x).backward(dy)
    y = model(x)
    with input_part() as part:
        y.backward(dy)
    assert all(w.grad is None for w in model.linear)
    assert torch.equal(model.norm.grad, expected.norm.grad)
    assert torch.equal(model.bias.grad, expected.bias.grad)
    part.compute()
    assert all(map(torch.equal, model.gradients(), expected.gradients()))


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_the_hooks_of_a_weight_run_once_for_each_part_after_its_last_use(
    into_main_grad: bool,
) -> None:
    model = Model(torch.float32, into_main_grad)
    seen: list[str] = []
    nodes = []

    def note(text: str, weight: Tensor) -> None:
        part = current()
        if part is None or not part.holds(weight):
            seen.append(text)

    for name in ("once", "twice"):
        weight = model.get_parameter(name)
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *unused, n=name, w=weight: note(f"node {n}", w))
        weight.register_hook(lambda grad, n=name, w=weight: note(f"tensor {n}", w))
        weight.register_post_accumulate_grad_hook(lambda w, n=name: note(f"grad {n}", w))
        nodes.append(node)

    for (x, dy), _ in zip(micro_batches(torch.float32), range(2), strict=False):
        y = model(x)
        with input_part() as part:
            y.backward(dy)
        assert seen == []
        part.compute()
        assert seen == [f"{kind} {n}" for n in ("once", "twice") for kind in KINDS]
        seen.clear()


KINDS = ("tensor", "grad", "node")


def test_work_is_done_in_the_order_of_put_and_its_results_added_in_that_order() -> None:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    values, done = [1e8, 3.0, -1e8, 7.0], []
    part = WeightPart()

    def work(number: int) -> Tensor:
        done.append(number)
        return torch.tensor([values[number]])

    for number, weight in enumerate((0, 1, 0, 0)):
        part.put(weights[weight], lambda n=number: work(n))
    part.put(weights[2], lambda: done.append(4))
    part.compute()
    assert done == [0, 1, 2, 3, 4]
    assert [w.grad if w.grad is None else w.grad.item() for w in weights] == [7.0, 3.0, None]


def test_what_the_input_part_gave_a_weight_can_be_put_off_too() -> None:
    weight = torch.zeros(1, requires_grad=True)
    part = WeightPart()
    part.put(weight, lambda: torch.ones(1))
    weight.grad = torch.full((1,), 2.0)
    part.take(weight)
    assert weight.grad is None
    part.take(weight)
    assert len(part) == 2
    part.compute()
    assert weight.grad.item() == 3


def test_the_gradient_is_taken_and_not_copied() -> None:
    weight, gradient = torch.zeros(4, requires_grad=True), torch.ones(4)
    where = gradient.data_ptr()
    part = WeightPart()
    part.put(weight, [gradient].pop)
    del gradient
    part.compute()
    assert weight.grad.data_ptr() == where


def test_nothing_is_held_longer_than_its_work() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    gone = weakref.ref(x)
    y = parallel_linear(x, w, None, Layout())
    with input_part() as part:
        y.sum().backward()
    del x, y
    assert gone() is not None
    alive = []
    w.register_post_accumulate_grad_hook(lambda w: alive.append(gone() is not None))
    part.compute()
    assert alive == [False]


def test_first_layers_are_put_off_too_and_frozen_weights_are_not() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    frozen = torch.randn(2, 4)
    y = parallel_linear(parallel_linear(x, w, None, Layout()), frozen, None, Layout())
    with input_part() as part:
        y.sum().backward()
    assert len(part) == 1
    assert part.holds(w)
    part.compute()
    assert torch.equal(w.grad, (torch.ones(3, 2) @ frozen).t() @ x)


def test_a_weight_that_is_made_of_others_is_not_put_off() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    with input_part() as part:
        parallel_linear(x, 2 * w, None, Layout()).sum().backward()
        counts = torch.tensor([3])
        grouped_linear(x, [2 * w], counts, Layout()).sum().backward()
        with pytest.raises(ValueError, match=r"\[4, 5\] tensor.*no leaf"):
            part.put(2 * w, lambda: None)
    assert not len(part)
    torch.testing.assert_close(w.grad, 4 * torch.ones(3, 4).t() @ x)


def test_layers_that_delay_their_gradients_themselves_keep_them() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    delayed = DelayedGradients()
    with input_part() as part:
        parallel_linear(x, w, None, Layout(delayed=delayed)).sum().backward()
        counts = torch.tensor([3])
        grouped_linear(x, [w], counts, Layout(delayed=delayed)).sum().backward()
    assert (len(part), len(delayed)) == (0, 2)


def test_a_backward_pass_inside_a_backward_pass_puts_off_as_well() -> None:
    """Recomputation of activations."""
    models: list[Any] = [Model(torch.float32, False) for _ in range(2)]
    (x, dy), *_ = micro_batches(torch.float32)
    x.requires_grad_()
    torch.utils.checkpoint.checkpoint(models[0], x, use_reentrant=True).backward(dy)
    y = torch.utils.checkpoint.checkpoint(models[1], x, use_reentrant=True)
    with input_part() as part:
        y.backward(dy)
    assert len(part) == 3 + EXPERTS
    part.compute()
    assert all(map(torch.equal, *(m.gradients() for m in models)))


def test_parts_do_not_nest_and_a_failure_leaves_none_on() -> None:
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("half-way")

    h = x * 1
    h.register_hook(fail)
    y = parallel_linear(h, w, None, Layout())
    with pytest.raises(ArithmeticError, match="half-way"), input_part():
        y.sum().backward()
    assert current() is None
    with input_part() as part:
        assert current() is part
        with pytest.raises(RuntimeError, match="inside another"), input_part():
            pass
        assert current() is part
        with pytest.raises(RuntimeError, match="in an input part"):
            part.compute()
    assert current() is None


def test_a_failure_in_the_weights_part_leaves_the_rest_of_it() -> None:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    part = WeightPart()
    part.put(weights[0], lambda: 1 / 0)
    part.put(weights[1], lambda: torch.ones(1))
    with pytest.raises(ZeroDivisionError):
        part.compute()
    part.compute()
    assert [w.grad for w in weights] == [None, torch.ones(1)]
