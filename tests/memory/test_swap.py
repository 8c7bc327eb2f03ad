"""Swapped activations: gradients of a graph that keeps everything, in any order of the copies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.device.cpu import memory
from accel.memory.lanes import COMPUTE, HostLanes, Lanes
from accel.memory.recompute import Recomputed
from accel.memory.swap import IN, OUT, Chain, Swap, _with_room

from .shuffled_lanes import ShuffledLanes

CPU = torch.device("cpu")
WIDTH, TOKENS, LAYERS = 16, 8, 4
BYTES = TOKENS * WIDTH * 4
"""Of one activation."""


class Streams(ShuffledLanes):
    """Kernels run at once, as torch's do here, copies when a kernel waits for them."""

    def open(self) -> None: ...

    def run(self, lane: str, work: Callable[[], None], after: Iterable[Any] = ()) -> int:
        event = super().run(lane, work, after)
        if lane == COMPUTE:
            self.wait(event)
        return event


class Layer(torch.nn.Module):
    """Three branches, of which two are views of one product, as attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(WIDTH, dim=-1)
        return self.out(torch.softmax(q * table * k.sigmoid(), -1) * v.exp())


def model() -> list[Layer]:
    torch.manual_seed(1)
    return [Layer() for _ in range(LAYERS)]


def forward(
    layers: list[Layer],
    swap: Swap | None,
    seed: int = 2,
    wanted: Callable[[int], bool] = lambda number: True,
    depth: int = 1,
) -> tuple[Tensor, Tensor]:
    """The input and what the layers make of it."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
    table = torch.randn(TOKENS, WIDTH, generator=draw)
    y: Tensor = x
    chain = swap.chain(wanted, depth) if swap else None
    for layer in layers:
        if chain is None:
            y = y + layer(y, table)
        else:
            with chain.group(layer.parameters()):
                new = layer(y, table)
            y = y + new
    if chain is not None:
        chain.close()
    return x, y


def gradients(layers: list[Layer], x: Tensor, y: Tensor, passes: int = 1) -> list[Tensor]:
    for number in range(passes):
        y.square().sum().backward(retain_graph=number + 1 < passes)
    found = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    assert x.grad is not None
    assert all(grad is not None for grad in found)
    return [x.grad, *(grad for grad in found if grad is not None)]


def swap_of(lanes: Lanes | None = None) -> Swap:
    return Swap(CPU, lanes or HostLanes(), min_bytes=BYTES)


LANES: dict[str, Callable[[], Lanes]] = {
    "host": HostLanes,
    **{f"shuffled {seed}": (lambda seed=seed: Streams(seed)) for seed in range(8)},
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("lanes", LANES)
def test_gradients_are_those_of_a_graph_that_keeps_everything(
    lanes: str, passes: int, depth: int
) -> None:
    layers = model()
    expected = gradients(layers, *forward(layers, None), passes)
    swap = swap_of(LANES[lanes]())
    for wanted in (lambda n: True, lambda n: n < LAYERS - 1, lambda n: n % 2 == 0):
        found = gradients(layers, *forward(layers, swap, 2, wanted, depth), passes)
        assert all(map(torch.equal, found, expected))


def test_micro_batches_interleave_in_any_order() -> None:
    layers = model()
    expected = [gradients(layers, *forward(layers, None, seed)) for seed in range(4)]
    swap = swap_of(Streams(3))
    first, second = forward(layers, swap, 0), forward(layers, swap, 1)
    assert all(map(torch.equal, gradients(layers, *first), expected[0]))
    third, fourth = forward(layers, swap, 2), forward(layers, swap, 3)
    for seed, one in ((3, fourth), (1, second), (2, third)):
        assert all(map(torch.equal, gradients(layers, *one), expected[seed]))


@pytest.mark.usefixtures("counted")
def test_only_the_last_group_is_held_and_one_comes_back_ahead() -> None:
    layers = model()
    forward(layers, swap := swap_of())  # the pool is there
    gc.collect()
    pool, before = swap.pool.num_bytes, memory.memory_allocated()
    x, y = forward(layers, None)
    whole = memory.memory_allocated() - before
    del x, y
    seen = []
    x, y = forward(layers, swap, 2, lambda number: number < LAYERS - 1)
    held = memory.memory_allocated() - before
    del x

    def look(grad: Tensor) -> None:
        seen.append(memory.memory_allocated() - before)

    # of each layer but the last five products; and its input, which of the first is a leaf
    assert whole - held >= ((LAYERS - 1) * 6 - 1) * BYTES
    y.register_hook(look)
    y.sum().backward()
    del y
    assert seen[0] - held <= 3 * BYTES
    assert swap.pool.num_bytes == pool


@pytest.mark.usefixtures("counted")
def test_a_backward_pass_lets_go_of_what_it_fetched_though_the_chain_is_open() -> None:
    """Megatron's own offloading closes a chain when the next forward pass begins, after the backward pass."""
    layers, swap = model(), swap_of()

    def left(close_first: bool) -> int:
        gc.collect()
        before = memory.memory_allocated()
        chain = swap.chain()
        y = torch.ones(TOKENS, WIDTH).requires_grad_()
        for layer in layers:
            with chain.group(layer.parameters()):
                y = y + layer(y, torch.ones(TOKENS, WIDTH))
        if close_first:
            chain.close()
        y.sum().backward()
        del y
        for layer in layers:
            layer.zero_grad()
        found = memory.memory_allocated() - before
        chain.close()
        return found

    left(True)  # the pool is there
    assert left(False) < left(True) + BYTES


@pytest.mark.usefixtures("counted")
def test_a_group_is_released_though_a_part_of_it_was_run_backward_before() -> None:
    layer, swap = model()[0], swap_of()

    def held(partial: bool) -> int:
        gc.collect()
        before = memory.memory_allocated()
        chain = swap.chain()
        with chain.group(layer.parameters()):
            y = layer(torch.ones(TOKENS, WIDTH).requires_grad_(), torch.ones(TOKENS, WIDTH))
        if partial:  # an auxiliary loss, say
            torch.autograd.grad(y.sum(), layer.out.weight, retain_graph=True)
        chain.close()
        return memory.memory_allocated() - before

    held(False)  # the pool is there
    # malloc's blocks are 16 or 32 bytes larger now and then
    assert held(True) < held(False) + BYTES


def test_the_pool_does_not_grow() -> None:
    layers, swap = model(), swap_of(Streams(5))
    sizes = []
    for step in range(4):
        gradients(layers, *forward(layers, swap, step))
        gc.collect()
        sizes.append(swap.pool.num_bytes)
    assert len(set(sizes)) == 1
    assert sizes[0] > 0


def test_the_pool_does_not_grow_with_the_sizes_there_are() -> None:
    """Experts' rows: a number of its own in each micro-batch."""
    pool, draw = swap_of().pool, torch.Generator().manual_seed(0)
    sizes = torch.randint(1 << 16, 1 << 18, (400,), generator=draw).tolist()
    for num_bytes in sizes:
        (buffer, _), (other, _) = pool.take(num_bytes), pool.take(num_bytes)
        assert buffer.data_ptr() != other.data_ptr()
        assert num_bytes <= buffer.numel() <= num_bytes * 9 / 8
        pool.give_back(buffer, None)
        pool.give_back(other, None)
    # of two powers of two, two buffers of each eighth
    assert pool.num_bytes <= 2 * sum((8 + i) << (13 + power) for i in range(9) for power in (0, 1))
    assert [_with_room(n) for n in (0, 1, 15, 16, 17, 1000, 7 << 20)] == [
        *(0, 1, 15, 16, 18, 1024, 7 << 20)
    ]


def test_a_buffer_that_comes_back_amid_another_is_no_deadlock() -> None:
    """Python may collect a graph, whose buffers come back, wherever it allocates."""
    pool = swap_of().pool
    buffers = [pool.take(BYTES) for _ in range(2)]

    class Collecting(dict):
        def setdefault(self, *given: Any) -> Any:
            if len(buffers) == 2:
                pool.give_back(*buffers.pop())
            return super().setdefault(*given)

    pool._free = Collecting()
    thread = threading.Thread(target=pool.give_back, args=buffers[0], daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(pool._free[BYTES]) == 2


def test_a_storage_is_copied_once() -> None:
    lanes = Streams(1)
    swap = swap_of(lanes)
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    with torch.no_grad():
        table = torch.randn(TOKENS, WIDTH)
    chain = swap.chain()
    y = x * 1
    for _ in range(3):
        with chain.group():
            y = y * table  # saves the table in each group, and nothing else that is new
    chain.close()
    assert lanes.log.count(OUT) == 1
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, table * table * table)
    assert lanes.log.count(IN) == 1


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    swap = swap_of()
    leaf = torch.randn(TOKENS, WIDTH).requires_grad_()
    chain = swap.chain()
    outputs, tables = [], []
    for seed in range(8):
        table = torch.full(
            (TOKENS, WIDTH), float(seed)
        )  # freed on release, its address taken again
        tables.append(float(seed))
        with chain.group():
            outputs.append((leaf * 1) * table)
        del table
    chain.close()
    for output, value in zip(outputs, tables, strict=True):
        leaf.grad = None
        output.sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full_like(leaf, value))


def stays(make: Callable[[Swap, Tensor], Tensor]) -> bool:
    """Whether nothing is copied of what `make` saves, and gradients are right."""
    torch.manual_seed(0)
    results = []
    for lanes in (Streams(1), None):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(4)).requires_grad_()
        if lanes is None:
            y = make(swap_of(), x)
        else:
            swap = swap_of(lanes)
            chain = swap.chain()
            with chain.group():
                y = make(swap, x)
            chain.close()
            copied = lanes.count
        y.sum().backward()
        results.append(x.grad)
    assert results[0] is not None
    assert results[1] is not None
    assert torch.equal(results[0], results[1])
    return copied == 0


def test_what_stays() -> None:
    weight = torch.nn.Parameter(
        torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
    )
    large = torch.randn(100, TOKENS, WIDTH, generator=torch.Generator().manual_seed(6))
    assert stays(lambda swap, x: x @ weight)  # x is a leaf, too
    assert stays(lambda swap, x: x @ weight.t())
    assert stays(lambda swap, x: x.sum(-1).exp())  # small
    assert stays(lambda swap, x: x * large[3])  # a small part
    assert stays(lambda swap, x: (x.to_sparse() * 2).to_dense())
    assert not stays(lambda swap, x: (x * 2).exp())


def test_frozen_parameters_stay() -> None:
    draw = torch.Generator().manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw), requires_grad=False)
    experts = torch.nn.Parameter(torch.randn(4, WIDTH, WIDTH, generator=draw), requires_grad=False)
    assert stays(lambda swap, x: torch.nn.functional.linear(x * 1, weight))  # saves its transpose
    assert stays(lambda swap, x: (x * 1) @ experts.view(-1, WIDTH)[:WIDTH])
    table = weight.detach().clone()  # nobody's parameter
    assert not stays(lambda swap, x: torch.nn.functional.linear(x * 1, table))


def test_parameters_by_another_name_stay() -> None:
    """A module's parameter, detached: it is no leaf's view, but its memory is a parameter's."""
    weight = torch.nn.Parameter(torch.randn(TOKENS, WIDTH))
    lanes = Streams(2)
    chain = swap_of(lanes).chain()
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    with chain.group([weight]):
        y = x * weight.detach()
    chain.close()
    assert lanes.count == 0
    y.sum().backward()


@pytest.mark.parametrize("when", ["in flight", "kept"])
def test_a_change_in_place_is_an_error(when: str) -> None:
    chain = swap_of().chain(wanted=lambda number: when == "in flight")
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    table = torch.randn(TOKENS, WIDTH)
    with chain.group():
        y = (x * 2) * table
    table.add_(1)
    chain.close()
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_a_change_after_the_release_is_harmless() -> None:
    chain = swap_of().chain()
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    table = torch.randn(TOKENS, WIDTH)
    expected = 2 * table
    with chain.group():
        y = (x * 2) * table
    chain.close()
    table.zero_()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_changed_version_is_another_copy() -> None:
    chain = swap_of(Streams(7)).chain()
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    table = torch.ones(TOKENS, WIDTH)
    with chain.group():
        y = (x * 2) * table
    with chain.group():
        z = x * 3
    with chain.group():  # the first is released now
        z = z * 1
    table.mul_(5)
    with chain.group():
        z = z * table
    chain.close()
    (y.sum() + z.sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0 + 15.0))


def fails(chain: Chain) -> None:
    with chain.group():
        (torch.randn(TOKENS, WIDTH).requires_grad_() * 2).exp()
        raise ZeroDivisionError


@pytest.mark.usefixtures("counted")
def test_what_nobody_runs_backward_is_given_back() -> None:
    layers, swap = model(), swap_of(Streams(9))
    gradients(layers, *forward(layers, swap))
    gc.collect()
    before, pools = memory.memory_allocated(), []
    for _ in range(4):
        x, y = forward(layers, swap)
        del x, y
        with pytest.raises(ZeroDivisionError):
            fails(swap.chain())
        gc.collect()
        assert memory.memory_allocated() == before
        pools.append(swap.pool.num_bytes)
    assert pools[1:] == pools[:1] * 3
    with torch.no_grad():
        forward(layers, swap)
    assert swap.pool.num_bytes == pools[0]


def test_two_lanes_one_for_each_direction() -> None:
    lanes = Streams(11)
    layers = model()
    gradients(layers, *forward(layers, swap_of(lanes)))
    assert lanes.log.count(OUT) >= lanes.log.count(IN) > LAYERS


def test_each_tensor_has_an_event_of_its_own() -> None:
    """The first to be unpacked is waited for alone: the others may still be on their way."""
    lanes = Streams(1)
    swap = swap_of(lanes)
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    chain = swap.chain()
    with chain.group():
        left, right = (x * 2).exp(), (x * 3).exp()
    chain.close()
    lanes.log.clear()
    right.sum().backward(retain_graph=True)  # the last to be saved is the first to be fetched
    assert lanes.log.count(IN) == 1
    left.sum().backward()
    assert lanes.log.count(IN) == 2
    assert x.grad is not None
    assert torch.equal(x.grad, (2 * left + 3 * right).detach())


def test_with_recomputation_inside_and_around() -> None:
    """What a recomputation will free is not copied, and the inside of one is its own."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    results = []
    for ours in (False, True):
        lanes = Streams(3)
        chain = swap_of(lanes).chain(wanted=lambda number: ours)
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(8)).requires_grad_()
        call, inner = Recomputed(), Recomputed()

        def normed(x: Tensor, chain: Any = chain) -> Tensor:
            with chain.group():
                return torch.nn.functional.rms_norm(x, (WIDTH,)) * 2

        y = call(normed, x * 1)
        with chain.group([weight]):
            z = inner(torch.exp, y @ weight)
            out = z @ weight
            inner.free(out)
        call.free(out)
        chain.close()
        assert lanes.count == 0  # y and z are freed, and the product is held by `inner`
        assert [bool(size) for size in chain.sizes] == [False, False]  # but both are counted
        out.sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        results.append((x.grad, weight.grad))
        weight.grad = None
    assert all(map(torch.equal, *results))


def test_inside_a_checkpoint_nothing_is_copied_twice() -> None:
    layers = model()
    table = torch.randn(TOKENS, WIDTH)

    def run(swap: Swap | None) -> list[Tensor]:
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        chain = swap.chain() if swap else None

        def whole(y: Tensor) -> Tensor:
            if chain is None:
                return layers[0](y, table)
            with chain.group(layers[0].parameters()):
                return layers[0](y, table)

        y = torch.utils.checkpoint.checkpoint(whole, x * 1, use_reentrant=True)
        if chain is not None:
            chain.close()
        return gradients(layers[:1], x, y)

    assert all(map(torch.equal, run(swap_of(Streams(2))), run(None)))


def test_double_backward() -> None:
    swap = swap_of(Streams(4))
    found = []
    for ours in (True, False):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        chain = swap.chain(wanted=lambda number: ours)
        with chain.group():
            y = (x * 2).exp() * x.sin()
        chain.close()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append(second)
    assert torch.equal(*found)


class OnAnotherStream(HostLanes):
    """Kernels are not launched where the chain was opened."""

    def computes_here(self) -> bool:
        return False


def test_what_another_stream_saves_stays() -> None:
    layers = model()
    expected = gradients(layers, *forward(layers, None))
    swap = swap_of(OnAnotherStream())
    assert all(map(torch.equal, gradients(layers, *forward(layers, swap)), expected))
    assert swap.pool.num_bytes == 0
