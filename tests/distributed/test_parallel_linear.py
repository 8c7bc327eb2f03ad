"""The split linear layer on several ranks. What overlaps gives the bits of what does not on two ranks,
wherever a product of some rows has the bits that these rows have in the whole; else it is as near as sums in
another order are."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from accel.parallel import linear, overlapped_linear, symmetric_memory
from accel.parallel import linear_overlap as overlap
from accel.parallel.collectives import gather_rows, reduce_scatter_rows
from accel.parallel.linear import DelayedGradients, Layout, parallel_linear
from accel.parallel.linear_overlap import Beside, Overlap, Times
from accel.parallel.overlapped_linear import (
    FORMS,
    SYMMETRIC,
    Form,
    Plan,
    gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    pieces_of,
)
from accel.parallel.split_backward import input_part
from accel.testing.distributed import launch, under_torchrun

pytestmark = pytest.mark.usefixtures("gloo_group")

IN, OUT = 24, 12
DTYPES = [torch.float32, torch.bfloat16]
CHUNKS = (2, 3, 100)
SHAPES = [(5,), (3, 2), (1,), (0, 2), (4, 1), (2, 3, 2)]
"""Leading dimensions of a rank's rows under sequence parallelism."""


@contextmanager
def overlapping(chosen: Overlap) -> Iterator[None]:
    off = overlap.switch_on(chosen)
    try:
        yield
    finally:
        off()


def draw(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_are_independent(x: Tensor, w: Tensor, chunks: int, group: Any = None) -> bool:
    """Whether on each rank all pieces' products have the bits of the whole product."""
    ranks = dist.get_world_size(group)
    x = x.reshape(-1, x.shape[-1])
    whole = x @ w
    pieces = pieces_of(len(x), "all_reduce", Plan(chunks))
    each = len(x) // ranks
    for kind, form in itertools.product(("gather", "reduce_scatter"), FORMS):
        of_part = [slice(0, each), *pieces_of(each, kind, Plan(chunks, form))]
        pieces += [
            slice(rank * each + piece.start, rank * each + piece.stop)
            for rank in range(ranks)
            for piece in of_part
        ]
    here = all(torch.equal(x[piece] @ w, whole[piece]) for piece in pieces)
    everywhere = torch.tensor(int(here))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group)
    return bool(everywhere)


def assert_same(found: Tensor | None, expected: Tensor | None, exact: bool, terms: int) -> None:
    """Otherwise within what sums of `terms` products in any order, and one rounding on each of the hops, may
    differ: operands are of unit variance."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    if exact:
        assert torch.equal(found, expected)
    else:
        unit = torch.finfo(expected.dtype).eps / 2
        largest = 6 * terms**0.5  # of a sum, or of a part of one
        sums = terms * torch.finfo(torch.float32).eps / 2
        limit = 2 * largest * (dist.get_world_size() * unit + sums)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=limit)


def check_products(dtype: torch.dtype, forms: tuple[Form, ...] = FORMS) -> None:
    ranks, me = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    exact_ones = 0
    for form, rows, chunks in itertools.product(forms, (0, 1, 7, 64), (1, *CHUNKS)):
        plan = Plan(chunks, form)
        every = draw(ranks, rows, IN, dtype=dtype)
        w = draw(ranks, IN, OUT, dtype=dtype, seed=1)[me]
        whole = every.flatten(0, 1)
        y, gathered = gather_matmul(every[me], w, group, plan, keep=True)
        assert gathered is not None
        assert torch.equal(gathered, whole)
        assert_same(y, whole @ w, rows_are_independent(whole, w, chunks), IN)
        assert gather_matmul(every[me], w, group, plan)[1] is None

        part = draw(ranks, ranks * rows, IN, dtype=dtype, seed=2)[me]
        expected = part @ w
        dist.all_reduce(expected)
        exact = ranks == 2 and rows_are_independent(part, w, chunks)
        exact_ones += exact
        mine = matmul_reduce_scatter(part, w, group, plan)
        assert_same(mine, expected.unflatten(0, (ranks, rows))[me], exact, ranks * IN)
        assert_same(matmul_all_reduce(part, w, group, plan), expected, exact, ranks * IN)
    assert exact_ones or ranks > 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.distributed(world_size=2)
def test_products_of_two_ranks(dtype: torch.dtype) -> None:
    check_products(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.distributed(world_size=4)
def test_products_of_four_ranks(dtype: torch.dtype) -> None:
    check_products(dtype)


@pytest.fixture
def symmetric_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """PyTorch's products over symmetric memory, by its own fallbacks on CPU tensors; those that ran."""
    from torch.distributed import _symmetric_memory as torchs

    ran: list[str] = []
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        fallback = getattr(torchs, f"_{name}_fallback")

        def noted(*args: Any, name: str = name, fallback: Any = fallback, **kwargs: Any) -> Any:
            ran.append(name)
            return fallback(*args, **kwargs)

        library.impl(name, noted, "CPU")
    monkeypatch.setattr(symmetric_memory, "reason", lambda device, group: None)
    yield ran
    library._destroy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.distributed(world_size=2)
def test_products_over_symmetric_memory(dtype: torch.dtype, symmetric_products: list[str]) -> None:
    check_products(dtype, (SYMMETRIC,))
    assert set(symmetric_products) == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}


@pytest.mark.distributed(world_size=4)
def test_layers_over_symmetric_memory(symmetric_products: list[str]) -> None:
    check_layers(SYMMETRIC)
    assert set(symmetric_products) == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.distributed(world_size=2)
def test_products_of_two_gpus_over_symmetric_memory() -> None:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    if (reason := symmetric_memory.reason(device, group)) is not None:
        pytest.skip(reason)
    x, w = (
        draw(*size, dtype=torch.bfloat16, seed=seed + dist.get_rank()).to(device)
        for size, seed in (((256, IN), 0), ((IN, OUT), 2))
    )
    for keep in (True, False):
        expected = gather_matmul(x, w, group, Plan(2, "collective"), keep=keep)
        found = gather_matmul(x, w, group, Plan(2, SYMMETRIC), keep=keep)
        torch.testing.assert_close(found, expected)
    summed = matmul_reduce_scatter(x, w, group, Plan(2, SYMMETRIC))
    torch.testing.assert_close(summed, matmul_reduce_scatter(x, w, group, Plan(2, "collective")))


@pytest.mark.parametrize("seconds", [[3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [1.0, 2.0, 3.0]], ids=str)
@pytest.mark.distributed(world_size=2)
def test_auto_tries_symmetric_memory_where_it_was_asked_for(
    seconds: list[float], symmetric_products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the plain way and one ring; where it has other bits, it is not tried."""
    times = Times(64, {1: 1.0, 64: 64.0}, {"ring": (2.0, 128.0), "collective": (200.0, 400.0)})
    monkeypatch.setattr(overlap, "measure", lambda *args: times)
    monkeypatch.setattr(overlap, "CHUNKS", (2,))
    monkeypatch.setattr(
        overlap,
        "_alternately",
        lambda x, group, rounds, *calls: [[s] for s in seconds[: len(calls)]],
    )
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    expected = [None, Plan(2), Plan(2, SYMMETRIC)]
    quickest = expected[seconds.index(1.0)]
    assert Overlap(form=SYMMETRIC).plan("gather", x, w, dist.group.WORLD) == quickest
    assert symmetric_products
    symmetric_products.clear()
    assert (
        Overlap().plan("gather", x, w, dist.group.WORLD)
        == expected[seconds[:2].index(min(seconds[:2]))]
    )
    assert not symmetric_products

    def other_bits(x: Tensor, w: Tensor, group: Any, *, keep: bool) -> Any:
        y, whole = gather_matmul(x, w, group, Plan(2), keep=keep)
        return y + float(dist.get_rank() == 1), whole

    monkeypatch.setattr(symmetric_memory, "gather_matmul", other_bits)
    found = Overlap(form=SYMMETRIC).plan("gather", x, w, dist.group.WORLD)
    assert found == expected[seconds[:2].index(min(seconds[:2]))]


@pytest.mark.distributed(world_size=2)
def test_symmetric_memory_that_is_not_there_is_an_error_before_a_product() -> None:
    x, w = torch.ones(4, IN), torch.ones(IN, OUT)
    for chosen, kind in itertools.product(
        (Overlap(2, SYMMETRIC), Overlap(form=SYMMETRIC)), ("gather", "reduce_scatter")
    ):
        with pytest.raises(
            ValueError, match=r"form symmetric: .* on cpu, .*; use ring or collective"
        ):
            chosen.plan(kind, x, w, dist.group.WORLD)
    assert Overlap(1, SYMMETRIC).plan("gather", x, w, dist.group.WORLD) is None
    assert Overlap(2, SYMMETRIC).plan("all_reduce", x, w, dist.group.WORLD) == Plan(2, SYMMETRIC)


@pytest.mark.distributed(world_size=2)
def test_products_of_a_group_of_one_are_products() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    group = groups[dist.get_rank()]
    x, w = draw(5, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32, seed=1)
    for form in FORMS:
        y, gathered = gather_matmul(x, w, group, Plan(1, form), keep=True)
        assert gathered is not None
        assert torch.equal(gathered, x)
        for found in (y, matmul_reduce_scatter(x, w, group, Plan(1, form))):
            torch.testing.assert_close(found, x @ w)


@pytest.mark.distributed(world_size=2)
def test_rows_that_the_ranks_do_not_divide_are_named() -> None:
    x, w = torch.ones(5, IN), torch.ones(OUT, IN)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match="first dimension, 5, is to be scattered and is no"):
        matmul_reduce_scatter(x, w.t(), group, Plan(2))
    layout = Layout("row", group, sequence_parallel=True)
    with (
        overlapping(Overlap(2)),
        pytest.raises(ValueError, match=r"first dimension, 5, is no multiple of the 2"),
    ):
        parallel_linear(x[:, None].expand(5, 2, IN), w, None, layout)


class Layer:
    """A layer's operands on this rank, and all that a step gives."""

    def __init__(
        self,
        mode: Any,
        sequence_parallel: bool,
        shape: tuple[int, ...],
        dtype: Any,
        group: Any = None,
    ):
        self.group = group or dist.group.WORLD
        ranks, me = self.group.size(), self.group.rank()
        rows = ranks * shape[0]
        self.layout = Layout(mode, self.group, sequence_parallel)
        shared = mode == "column" and not sequence_parallel
        every = draw(ranks, rows, *shape[1:], IN, dtype=dtype)
        x = every[0] if shared else every[me]
        self.x = x[: shape[0]] if mode == "column" and sequence_parallel else x
        self.w = draw(ranks, OUT, IN, dtype=dtype, seed=1)[me]
        self.bias = draw(OUT, dtype=dtype, seed=2)
        gradients = draw(ranks, rows, *shape[1:], OUT, dtype=dtype, seed=3)
        own = mode == "column" or sequence_parallel  # else all ranks have the same
        dy = gradients[me if own else 0]
        self.dy = dy[: shape[0]] if mode == "row" and sequence_parallel else dy

    def step(
        self, layout: Layout | None = None, trained: tuple[bool, ...] = (True, True, True)
    ) -> tuple[Tensor, list[Tensor | None]]:
        """What the layer gives, and the gradients of x, w and the bias."""
        operands = [
            t.clone().requires_grad_(t_)
            for t, t_ in zip((self.x, self.w, self.bias), trained, strict=True)
        ]
        self.weight: Any = operands[1]
        y = parallel_linear(*operands, layout or self.layout)
        y *= 2  # in place, as Megatron's cross entropy writes into the logits
        if y.requires_grad:
            y.backward(self.dy)
        return y.detach(), [t.grad for t in operands]

    def whole(self) -> tuple[Tensor, Tensor]:
        """What the weight gradient is made of under sequence parallelism: x, and the product's gradient."""
        dy = self.dy * 2  # `step` doubles the result
        if self.layout.mode == "column":
            return gather_rows(self.x, self.group)[0], dy
        return self.x, gather_rows(dy, self.group)[0]

    def exact(self, chunks: int) -> bool:
        """Whether both directions' products have independent rows."""
        ranks = self.group.size()
        forward = torch.cat([self.x] * ranks) if self.layout.mode == "column" else self.x
        back = torch.cat([self.dy] * ranks) if self.layout.mode == "row" else self.dy
        found = [
            rows_are_independent(forward, self.w.t(), chunks, self.group),
            rows_are_independent(back, self.w, chunks, self.group),
        ]
        return ranks == 2 and all(found)


def check_layers(form: Form) -> None:
    cases = itertools.product(("column", "row"), (True, False), SHAPES, DTYPES, CHUNKS)
    exact_ones = 0
    for mode, sequence_parallel, shape, dtype, chunks in cases:
        layer = Layer(mode, sequence_parallel, shape, dtype)
        y, gradients = layer.step()
        with overlapping(Overlap(chunks, form)):
            found, found_gradients = layer.step()
        exact = layer.exact(chunks)
        exact_ones += exact and min(shape) > 0
        terms = dist.get_world_size() * max(IN, OUT)
        assert_same(found, y, exact, terms)
        terms = max(terms, 4 * dist.get_world_size() * shape[0] * 6)
        for g, e in zip(found_gradients, gradients, strict=True):
            assert_same(g, e, exact, terms)
    assert exact_ones or dist.get_world_size() > 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.distributed(world_size=2)
def test_layers_of_two_ranks(form: Form) -> None:
    check_layers(form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.distributed(world_size=4)
def test_layers_of_four_ranks(form: Form) -> None:
    check_layers(form)


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.distributed(world_size=2)
def test_every_way_of_the_weights_gradient(mode: Any) -> None:
    layer = Layer(mode, True, (6, 2), torch.float32)
    y, (dx, dw, db) = layer.step()
    exact = layer.exact(3)

    def check(found: tuple[Tensor, list[Tensor | None]], *expected: Tensor | None) -> None:
        assert_same(found[0], y, exact, 2 * IN)
        for g, e in zip(found[1], expected, strict=True):
            assert_same(g, e, exact, 64)

    with overlapping(Overlap(3)):
        check(layer.step(trained=(True, False, True)), dx, None, db)
        check(layer.step(trained=(False, True, True)), None, dw, db)
        check(layer.step(trained=(False, False, True)), None, None, db)

        delayed = DelayedGradients()
        late = Layout(mode, dist.group.WORLD, True, delayed=delayed)
        check(layer.step(late), dx, None, db)
        assert len(delayed) == 1
        delayed.compute_next()
        assert torch.equal(layer.weight.grad, dw)

        taken: list[Tensor] = []
        theirs = Layout(mode, dist.group.WORLD, True, taken=lambda dy: taken.append(dy) or True)
        check(layer.step(theirs), dx, None, db)
        whole_x, whole_dy = layer.whole()
        (theirs_dy,) = taken
        assert torch.equal(theirs_dy, whole_dy)
        assert torch.equal(theirs_dy.flatten(0, -2).t() @ whole_x.flatten(0, -2), dw)

        with input_part() as part:
            check(layer.step(), dx, None, db)
        assert len(part) == 1
        part.compute()
        assert torch.equal(layer.weight.grad, dw)

        off = Layout(mode, dist.group.WORLD, True, overlap_gather=False, overlap_reduce=False)
        found, gradients = layer.step(off)
        assert torch.equal(found, y)
        assert all(map(torch.equal, gradients, (dx, dw, db)))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("given", [{}, {"delayed": DelayedGradients()}], ids=["now", "delayed"])
@pytest.mark.distributed(world_size=2)
def test_the_inputs_gradient_travels_in_pieces_while_the_weights_is_formed(
    given: dict[str, Any], sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    begin, form = linear._begin_matmul_reduce, linear._weight_gradient

    def begun(x: Tensor, w: Tensor, layout: Layout, plan: Plan) -> Any:
        finish = begin(x, w, layout, plan)
        events.append(f"{plan.chunks} pieces begun")
        return lambda: (events.append("finished"), finish())[1]

    def formed(*args: Any) -> Any:
        events.append("formed")
        return form(*args)

    monkeypatch.setattr(linear, "_begin_matmul_reduce", begun)
    monkeypatch.setattr(linear, "_weight_gradient", formed)
    layer = Layer("column", sequence_parallel, (6, 2), torch.float32)
    with overlapping(Overlap(3)):
        layer.step(Layout("column", dist.group.WORLD, sequence_parallel, **given))
    assert events == ["3 pieces begun", "formed", "finished"]


@pytest.mark.parametrize(
    ("dtype", "of_main_grad"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.distributed(world_size=2)
def test_the_weights_gradient_is_added_once_to_main_grad(
    dtype: torch.dtype, of_main_grad: torch.dtype
) -> None:
    """Whether a plan was given, or is measured in the backward."""
    cases = itertools.product(("column", "row"), (True, False))
    for mode, sequence_parallel in cases:
        layer = Layer(mode, sequence_parallel, (6, 2), dtype)
        layout = Layout(layer.layout.mode, dist.group.WORLD, sequence_parallel, into_main_grad=True)

        def main_grad(layer: Layer = layer, layout: Layout = layout) -> Tensor:
            weight: Any = layer.w.clone().requires_grad_()
            weight.main_grad = torch.ones(OUT, IN, dtype=of_main_grad)
            weight.grad_added_to_main_grad = False
            x = layer.x.clone().requires_grad_()
            (parallel_linear(x, weight, None, layout) * 2).backward(layer.dy)
            assert weight.grad_added_to_main_grad
            assert x.grad is not None
            return weight.main_grad

        expected = main_grad()
        for chosen in (Overlap(3), Overlap(3, "collective"), Overlap()):
            with overlapping(chosen):
                assert torch.equal(main_grad(), expected)


@pytest.mark.distributed(world_size=4)
def test_a_group_that_is_not_the_world() -> None:
    """Of ranks that are not neighbours, beside another one with other values."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    number = dist.get_rank() % 2
    for mode, sequence_parallel in itertools.product(("column", "row"), (True, False)):
        layer = Layer(mode, sequence_parallel, (5, 2), torch.float32, groups[number])
        layer.x, layer.dy = (t * (1 + number) for t in (layer.x, layer.dy))
        y, gradients = layer.step()
        for chosen in (Overlap(3), Overlap(3, "collective"), Overlap()):
            with overlapping(chosen):
                found, found_gradients = layer.step()
            exact = chosen.fixed is not None and layer.exact(3)
            for g, e in zip((found, *found_gradients), (y, *gradients), strict=True):
                assert_same(g, e, exact, 256)


@pytest.mark.distributed(world_size=4)
def test_a_ring_lets_go_of_what_it_has_added_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    class Counted(overlapped_linear.Transfer):
        def __init__(self, outgoing: Tensor, into: Tensor, group: Any) -> None:
            alive.extend(map(weakref.ref, (outgoing, into)))
            most.append(sum(tensor() is not None for tensor in alive))
            super().__init__(outgoing, into, group)

    monkeypatch.setattr(overlapped_linear, "Transfer", Counted)
    group, pieces = dist.group.WORLD, 3
    assert group is not None
    x, w = draw(4 * 6, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    matmul_reduce_scatter(x, w, group, Plan(pieces))
    assert max(most) <= 3 * pieces + 1
    assert not any(tensor() is not None for tensor in alive)


@pytest.mark.distributed(world_size=2)
def test_collectives_gather_where_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece in the result; more, or what nobody keeps, in buffers that are multiplied."""
    into: list[Tensor] = []

    def noted(out: Tensor, *args: Any, **kwargs: Any) -> Any:
        into.append(out)
        return gather(out, *args, **kwargs)

    gather = dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_into_tensor", noted)
    group = dist.group.WORLD
    assert group is not None
    x, w = draw(6, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    _, whole = gather_matmul(x, w, group, Plan(1, "collective"), keep=True)
    assert whole is not None
    assert [t.data_ptr() for t in into] == [whole.data_ptr()]
    into.clear()
    gather_matmul(x, w, group, Plan(2, "collective"))
    assert [t.shape for t in into] == [(2 * 4, IN), (2 * 2, IN)]


@pytest.mark.distributed(world_size=2)
def test_a_frozen_weight_gives_what_upstreams_own_layer_does() -> None:
    from megatron.core.tensor_parallel import layers as megatrons

    from accel.patches import _linear

    ours = _linear.frozen_through_ours(megatrons.linear_with_frozen_weight)
    for sequence_parallel, dtype in itertools.product((True, False), DTYPES):
        layer = Layer("column", sequence_parallel, (6, 2), dtype)
        group = dist.group.WORLD

        def step(
            linear: Any, layer: Layer = layer, sequence_parallel: bool = sequence_parallel
        ) -> Any:
            x, bias = (t.clone().requires_grad_() for t in (layer.x, layer.bias))
            saved: list[Tensor] = []
            with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                y = linear(x, layer.w, bias, False, not sequence_parallel, sequence_parallel, group)
            y.backward(layer.dy)
            return y.detach(), x.grad, bias.grad, [t.shape for t in saved]

        *expected, saved = step(megatrons.linear_with_frozen_weight)
        with overlapping(Overlap(3)):
            *found, saved_too = step(ours)
        assert saved_too == saved
        for g, e in zip(found, expected, strict=True):
            assert_same(g, e, layer.exact(3), 64)


@pytest.mark.distributed(world_size=2)
def test_what_was_computed_without_overlap_is_differentiated_without() -> None:
    for trained in ((True, True, True), (True, False, False)):
        layer = Layer("row", True, (6, 2), torch.float32)
        _, expected = layer.step(trained=trained)
        leaves = [
            t.clone().requires_grad_(t_) for t, t_ in zip((layer.x, layer.w), trained, strict=False)
        ]
        y = parallel_linear(*leaves, None, layer.layout) * 2
        with overlapping(Overlap(3)):
            y.backward(layer.dy)
        for leaf, gradient in zip(leaves, expected, strict=False):
            assert_same(leaf.grad, gradient, True, 0)


@pytest.mark.distributed(world_size=2)
def test_a_late_gradient_is_the_weights() -> None:
    for mode in ("column", "row"):
        layer = Layer(mode, True, (6, 2), torch.float32)
        weight = layer.w.clone().requires_grad_()
        weight.main_grad = torch.zeros(OUT, IN)
        layout = Layout(layer.layout.mode, dist.group.WORLD, True, into_main_grad=True)
        x = layer.x.clone().requires_grad_()
        with overlapping(Overlap(3)), input_part() as part:
            (parallel_linear(x, weight, None, layout) * 2).backward(layer.dy)
        assert not weight.main_grad.any()
        part.compute()
        _, (_, dw, _) = layer.step()
        torch.testing.assert_close(weight.main_grad, dw)


@pytest.mark.distributed(world_size=2)
def test_auto_measures_once_and_all_ranks_choose_alike() -> None:
    chosen = Overlap()
    expected = []
    layers = [Layer(m, s, (8, 2), torch.float32) for m in ("column", "row") for s in (True, False)]
    expected = [layer.step() for layer in layers]
    with overlapping(chosen):
        for layer, (y, gradients) in zip(layers, expected, strict=True):
            found, found_gradients = layer.step()
            assert_same(found, y, False, 2 * IN)
            for g, e in zip(found_gradients, gradients, strict=True):
                assert_same(g, e, False, 64)
            known = dict(chosen.chosen)
            layer.step()
            assert chosen.chosen == known
    kinds = {key[:2] for key in chosen.chosen}
    reductions = itertools.product(("reduce_scatter", "all_reduce"), (True, False))
    assert kinds == {("gather", True), *reductions}, (
        "of products alone, and beside weight gradients"
    )
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, list(map(str, chosen.chosen.items())))
    assert everybodys[0] == everybodys[1]


@pytest.mark.distributed(world_size=2)
def test_auto_measures_in_a_compiled_program() -> None:
    chosen, group = Overlap(), dist.group.WORLD
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)

    def program(x: Tensor) -> Plan | None:
        return chosen.plan("gather", x * 2, w, group)

    found = torch.compile(program, backend="aot_eager")(x)
    assert list(chosen.chosen.values()) == [found]
    assert program(x) == found


@pytest.mark.parametrize(("with_bits", "chunks"), [(16, 16), (4, 4), (1, 1), (0, 16)])
@pytest.mark.distributed(world_size=2)
def test_auto_prefers_the_bits_of_the_plain_way(
    with_bits: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pieces should be quicker here; from more than `with_bits` one rank gets other bits. Where none has
    those of the plain way, a line says what runs."""

    def times(*args: Any) -> Times:
        each = {1: 1.0, 64: 64.0}
        return Times(64, each, dict.fromkeys(FORMS, (2.0, 128.0)))

    def overlapped(kind: Any, x: Tensor, w: Tensor, group: Any, plan: Plan) -> Tensor:
        off = dist.get_rank() == 1 and plan.chunks > with_bits
        return overlap.plain(kind, x, w, group) + float(off)

    monkeypatch.setattr(overlap, "measure", times)
    monkeypatch.setattr(overlap, "overlapped", overlapped)
    monkeypatch.setattr(
        overlap,
        "_alternately",
        lambda x, group, rounds, *calls: [[2.0], *[[1.0]] * (len(calls) - 1)],
    )
    said: list[str] = []
    monkeypatch.setattr(overlap, "log_once", lambda feature, line: said.append(line))
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    chosen = Overlap()
    for _ in range(2):
        assert chosen.plan("gather", x, w, dist.group.WORLD) == Plan(chunks, "ring")
    assert ["by measured times: ring of 16." in line for line in said] == [True] * (not with_bits)
    assert torch.equal(
        x, draw(64, IN, dtype=torch.float32)
    )  # and not what was drawn for the comparison
    assert torch.equal(w, draw(IN, OUT, dtype=torch.float32))


@pytest.mark.parametrize(
    ("kind", "form", "tried"),
    [
        ("gather", None, {"ring", "collective"}),
        ("gather", "ring", {"ring"}),
        ("gather", "collective", {"collective"}),
        ("all_reduce", "ring", {"collective"}),
    ],
)
@pytest.mark.distributed(world_size=2)
def test_auto_tries_the_form_that_was_asked_for(
    kind: Any, form: Form | None, tried: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: set[str] = set()

    def times(kind: Any, *args: Any) -> Times:
        each = {1: 1.0, 64: 64.0}
        has = ("collective",) if kind == "all_reduce" else FORMS
        return Times(64, each, dict.fromkeys(has, (2.0, 128.0)))

    def overlapped(kind: Any, x: Tensor, w: Tensor, group: Any, plan: Plan) -> Tensor:
        forms.add(plan.form)
        return overlap.plain(kind, x, w, group)

    monkeypatch.setattr(overlap, "measure", times)
    monkeypatch.setattr(overlap, "overlapped", overlapped)
    monkeypatch.setattr(overlap, "_FINALISTS", 99)
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    Overlap(form=form).plan(kind, x, w, dist.group.WORLD)
    assert forms == tried


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({None: [4.0], 16: [2.0], 8: [3.0], 4: [3.0], 2: [3.0]}, Plan(16)),
        ({None: [4.0], 16: [3.0], 8: [2.0], 4: [3.0], 2: [3.0]}, Plan(8)),
        ({None: [4.0], 16: [3.0], 8: [3.0], 4: [3.0], 2: [2.0]}, Plan(2)),
        ({None: [1.0], 16: [3.0], 8: [3.0], 4: [2.0], 2: [2.0]}, None),
        ({None: [1.0], 16: [0.98], 8: [0.98], 4: [0.98], 2: [0.98]}, None),
        ({None: [1.0], 16: [1.0], 8: [0.9] * 6 + [1.0] * 6, 4: [1.0], 2: [1.0]}, None),
        ({None: [1, 1, 1, 1, 5, 5], 16: [1.0], 8: [1.0], 4: [1.0], 2: [1.0]}, None),
        ({None: [1, 3, 1, 3], 16: [0.9, 2.7], 8: [1, 3], 4: [1, 3], 2: [1, 3]}, Plan(16)),
    ],
    ids=[
        *("the first", "the second", "the last", "none"),
        *(
            "too little",
            "lucky once",
            "stock unlucky twice",
            "a machine that is slow in some rounds",
        ),
    ],
)
@pytest.mark.distributed(world_size=2)
def test_auto_takes_the_quickest_of_those_that_it_tries(
    seconds: dict[int | None, list[float]], expected: Plan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that calls alone advance, if 3 % quicker in most rounds, twice. By prediction 16, 8, 4 and 2
    pieces come first; rank 1, to which all take the same, waits for the other."""
    now = [0.0]
    of_calls = {chunks: itertools.cycle(found) for chunks, found in seconds.items()}

    def times(*args: Any) -> Times:
        each = {1: 1.0, 64: 64.0}
        return Times(64, each, {"ring": (2.0, 128.0), "collective": (200.0, 400.0)})

    def run(kind: Any, x: Tensor, w: Tensor, group: Any, plan: Plan | None) -> None:
        took = next(of_calls[None if plan is None else plan.chunks])
        now[0] += took if dist.get_rank() == 0 else 0.5

    monkeypatch.setattr(overlap, "measure", times)
    monkeypatch.setattr(overlap, "_run", run)
    monkeypatch.setattr(overlap, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        overlap, "overlapped", lambda kind, x, w, group, plan: overlap.plain(kind, x, w, group)
    )
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    found = Overlap().plan("gather", x, w, dist.group.WORLD)
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, found)
    assert everybodys == [expected, expected]


def check_sums_in_pieces(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row layer's weight gradient in pieces; all else has the same bits."""
    added: list[int] = []
    add = linear._InPieces.add

    def noted(self: Any, dy: Tensor, owner: int, piece: slice) -> None:
        added.append(len(dy))
        add(self, dy, owner, piece)

    monkeypatch.setattr(linear._InPieces, "add", noted)
    ranks = dist.get_world_size()
    for shape, dtype, into_main_grad in itertools.product(SHAPES, DTYPES, (False, True)):
        layer = Layer("row", True, shape, dtype)
        layout = Layout("row", dist.group.WORLD, True, into_main_grad=into_main_grad)
        found = []
        for in_pieces in (False, True):
            added.clear()
            x, weight = (t.clone().requires_grad_() for t in (layer.x, layer.w))
            weight.main_grad = torch.ones(OUT, IN)  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            with overlapping(Overlap(3, form, sums_in_pieces=in_pieces)):
                y = parallel_linear(x, weight, None, layout)
                (y * 2).backward(layer.dy)
            rows = ranks * torch.Size(shape).numel()
            assert sum(added) == (rows if in_pieces else 0)
            assert weight.grad_added_to_main_grad == into_main_grad  # type: ignore[attr-defined]
            dw = weight.main_grad - 1 if into_main_grad else weight.grad  # type: ignore[attr-defined]
            assert dw is not None
            assert dw.dtype == (torch.float32 if into_main_grad else dtype)
            found.append((y.detach(), x.grad, dw))
        (y, dx, dw), (other_y, other_dx, other_dw) = found
        assert torch.equal(y, other_y)
        assert_same(other_dx, dx, True, 0)
        assert_same(other_dw, dw, False, 4 * max(rows, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.distributed(world_size=2)
def test_a_weight_gradient_is_summed_in_pieces(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sums_in_pieces(form, monkeypatch)


@pytest.mark.distributed(world_size=2)
def test_symmetric_memory_sums_a_weight_gradient_rank_by_rank(
    symmetric_products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_sums_in_pieces(SYMMETRIC, monkeypatch)
    assert symmetric_products


@pytest.mark.distributed(world_size=4)
def test_four_ranks_sum_a_weight_gradient_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sums_in_pieces("ring", monkeypatch)


@pytest.mark.distributed(world_size=2)
def test_pieces_of_a_weight_gradient_are_summed_while_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    add, received = linear._InPieces.add, overlapped_linear.Transfer.wait_received

    def noted(self: Any, *args: Any) -> None:
        events.append("added")
        add(self, *args)

    def waited(self: Any) -> None:
        events.append("received")
        received(self)

    monkeypatch.setattr(linear._InPieces, "add", noted)
    monkeypatch.setattr(overlapped_linear.Transfer, "wait_received", waited)
    layer = Layer("row", True, (6, 2), torch.float32)
    with overlapping(Overlap(2, sums_in_pieces=True)):
        x, weight = (t.clone().requires_grad_() for t in (layer.x, layer.w))
        y = parallel_linear(x, weight, None, layer.layout)
        events.clear()
        y.backward(layer.dy)
    assert events == ["added", "received", "added", "received", "added"]


@pytest.mark.distributed(world_size=2)
def test_a_weight_gradient_that_is_formed_later_or_not_in_fp32_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Layer("row", True, (6, 2), torch.bfloat16)
    with overlapping(Overlap(3)):
        _, (dx, dw, _) = layer.step()
    assert dw is not None
    monkeypatch.setattr(linear._InPieces, "add", pytest.fail)
    with overlapping(Overlap(3, sums_in_pieces=True)):
        delayed = DelayedGradients()
        _, gradients = layer.step(Layout("row", dist.group.WORLD, True, delayed=delayed))
        assert_same(gradients[0], dx, True, 0)
        delayed.compute_next()
        assert torch.equal(layer.weight.grad, dw)
        with input_part() as part:
            layer.step()
        part.compute()
        assert torch.equal(layer.weight.grad, dw)
        layer.step(Layout("row", dist.group.WORLD, True, taken=lambda dy: True))
        layer.step(trained=(True, False, True))
        layer.step(trained=(False, True, True))
        assert torch.equal(layer.weight.grad, dw)
        weight: Any = layer.w.clone().requires_grad_()
        weight.main_grad = torch.zeros(OUT, IN, dtype=torch.bfloat16)
        layout = Layout("row", dist.group.WORLD, True, into_main_grad=True)
        x = layer.x.clone().requires_grad_()
        parallel_linear(x, weight, None, layout).backward(layer.dy)
        assert weight.main_grad.count_nonzero() > 0


@pytest.mark.distributed(world_size=2)
def test_auto_measures_a_gather_with_the_weight_gradient_that_is_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trials are nobody's gradient."""
    found: list[Times] = []
    original = overlap.predict

    def noted(kind: Any, ranks: int, plan: Plan, times: Times) -> float:
        found.append(times)
        return original(kind, ranks, plan, times)

    layer = Layer("row", True, (64, 2), torch.float32)
    layout = Layout("row", dist.group.WORLD, True, into_main_grad=True)
    weight: Any = layer.w.clone().requires_grad_()
    weight.main_grad = torch.zeros(OUT, IN)
    x = layer.x.clone().requires_grad_()
    chosen = Overlap(sums_in_pieces=True)
    with overlapping(chosen):
        y = parallel_linear(x, weight, None, layout)
        monkeypatch.setattr(overlap, "predict", noted)
        y.backward(layer.dy)
    assert found
    assert all(times.beside > 0 for times in found)
    whole_dy = gather_rows(layer.dy, layer.group)[0].flatten(0, -2)
    assert_same(weight.main_grad, whole_dy.t() @ layer.x.flatten(0, -2), False, 256)
    assert [(kind, alone) for kind, alone, *_ in chosen.chosen] == [
        ("reduce_scatter", True),
        ("gather", False),
    ]


@pytest.mark.distributed(world_size=2)
def test_a_backward_pass_is_chosen_for_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs beside the plain way is the pass; what is predicted knows the weight gradient."""
    found: list[Times] = []
    now = [0.0]

    def noted(kind: Any, ranks: int, plan: Plan, times: Times) -> float:
        found.append(times)
        return 0.0

    def takes(seconds: float) -> None:
        now[0] += seconds

    ran: list[Plan | None] = []

    def run(plan: Plan | None) -> None:
        ran.append(plan)
        takes(4.0 if plan is None else 3.0)

    monkeypatch.setattr(overlap, "perf_counter", lambda: now[0])
    monkeypatch.setattr(overlap, "predict", noted)
    monkeypatch.setattr(overlap, "CHUNKS", (2,))
    beside = Beside(lambda: takes(5.0), lambda: takes(7.0), run)
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    chosen = Overlap(form="ring")
    group = dist.group.WORLD
    assert group is not None
    assert chosen.plan("reduce_scatter", x, w, group, lambda: beside) == Plan(2)
    assert {(times.gather, times.beside) for times in found} == {(5.0, 7.0)}
    assert set(ran) == {None, Plan(2)}
    chosen.plan("reduce_scatter", x, w, group)
    assert found[-1].beside == 0.0, "measured by itself where no weight gradient is formed"


@pytest.mark.distributed(world_size=2)
def test_a_backward_pass_without_room_to_time_it_is_the_plain_one() -> None:
    """Also where only one rank has none."""
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    group = dist.group.WORLD
    assert group is not None
    held = 1 << 62 if group.rank() else 0
    chosen = Overlap(form="ring")
    for _ in range(2):
        assert chosen.plan("reduce_scatter", x, w, group, pytest.fail, lambda: held) is None


@pytest.mark.distributed(world_size=2)
def test_what_a_reduction_sums_is_made_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Tensor] = []

    def noted(x: Tensor, group: Any) -> Any:
        sums.append(x)
        return reduce_scatter_rows(x, group)

    monkeypatch.setattr(overlap, "reduce_scatter_rows", noted)
    x, w = draw(64, IN, dtype=torch.float32), draw(IN, OUT, dtype=torch.float32)
    group = dist.group.WORLD
    assert group is not None
    overlap.measure("reduce_scatter", x, w, group)
    assert {(t.data_ptr(), *t.shape) for t in sums} == {
        (sums[0].data_ptr(), 2, OUT),
        (sums[-1].data_ptr(), 64, OUT),
    }


@pytest.mark.parametrize("chosen", [None, Overlap(2)], ids=["plain", "overlapped"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.distributed(world_size=2)
def test_a_split_layer_has_no_second_derivative(mode: Any, chosen: Overlap | None) -> None:
    """On all ranks, before a collective."""
    x = draw(4, IN, dtype=torch.float32).requires_grad_()
    weight = draw(OUT, IN, dtype=torch.float32).requires_grad_()
    layout = Layout(mode, dist.group.WORLD, sequence_parallel=True)
    with overlapping(chosen) if chosen else contextlib.nullcontext():
        y = parallel_linear(x, weight, None, layout)
        with pytest.raises(RuntimeError, match="create_graph=True needs a layer that is not split"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


DIES = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from accel.parallel.overlapped_linear import Plan, gather_matmul, matmul_reduce_scatter

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
form, what = sys.argv[1:]
x, w, group = torch.ones(64, 8), torch.ones(8, 8), dist.group.WORLD
product = {"gather": gather_matmul, "reduce": matmul_reduce_scatter}[what]
product(x, w, group, Plan(4, form))
if dist.get_rank() == 1:
    os._exit(0)
began = time.monotonic()
try:
    product(x, w, group, Plan(4, form))
except RuntimeError:
    print("raised after", time.monotonic() - began, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
@pytest.mark.parametrize("what", ["gather", "reduce"])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_dies_is_an_error_on_the_others(form: str, what: str, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    output = launch(2, [str(script), form, what])
    assert float(output.split("raised after")[1].split()[0]) < 40


STOPS = """
import datetime, os, signal, time
import torch, torch.distributed as dist
from accel.parallel import linear_overlap as overlap
from accel.parallel.linear import Layout, parallel_linear
from accel.parallel.overlapped_linear import (
    Plan, gather_matmul, matmul_all_reduce, matmul_reduce_scatter
)

LAST, SECONDS = 3, 8
dist.init_process_group("gloo")
me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
store.set(f"process {me}", str(os.getpid()))
calls = dict.fromkeys(
    ("batch_isend_irecv", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"), 0
)

def stopping(name, original):
    def second_stops(*args, **kwargs):
        calls[name] += 1
        if calls[name] == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            raise RuntimeError("was stopped")
        return original(*args, **kwargs)
    return second_stops

def backward(group):
    layout = Layout("row", group, sequence_parallel=True)
    x, w = torch.ones(64, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    overlap.switch_on(overlap.Overlap(1))
    y = parallel_linear(x, w, None, layout)
    overlap.switch_on(overlap.Overlap(4))
    arm()
    y.backward(torch.ones_like(y))

def of(product, *form):
    def call(group):
        arm()
        product(torch.ones(64, 8), torch.ones(8, 8), group, Plan(4, *form))
    return call

def arm():
    store.add(f"{name} begins", 1)
    while store.add(f"{name} begins", 0) < 4:
        time.sleep(0.05)
    calls["since"] = time.monotonic()
    for call in originals:
        calls[call] = 0
    if me == LAST:
        for call, original in originals.items():
            setattr(dist, call, stopping(call, original))

originals = {call: getattr(dist, call) for call in calls}
for name, case in {
    **{f"gather, {form}": of(gather_matmul, form) for form in ("ring", "collective")},
    **{f"reduce, {form}": of(matmul_reduce_scatter, form) for form in ("ring", "collective")},
    "all_reduce": of(matmul_all_reduce),
    "backward": backward,
}.items():
    group = dist.new_group(timeout=datetime.timedelta(seconds=SECONDS))
    try:
        case(group)
    except RuntimeError as error:
        if me != LAST and time.monotonic() - calls["since"] < SECONDS / 2:
            print("raised at once:", name, me, error, flush=True)
    else:
        print("did not raise:", name, me, flush=True)
    for call, original in originals.items():
        setattr(dist, call, original)
    if me == LAST:
        store.set(f"{name} over", "")
    else:
        print("raised:", name, me, flush=True)
        store.add(f"{name} raised", 1)
    if me == 0:
        while store.add(f"{name} raised", 0) < LAST:
            time.sleep(0.05)
        while not store.check([f"{name} over"]):
            os.kill(int(store.get(f"process {LAST}")), signal.SIGCONT)
            time.sleep(0.05)
    store.wait([f"{name} over"])
store.add("done", 1)
while me == 0 and store.add("done", 0) < 4:
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
def test_a_rank_that_stops_on_the_way_is_an_error_on_all_others(tmp_path: Path) -> None:
    """Its connections stay open, so that what ends the others' waits is the group's time-out."""
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    output = launch(4, [str(script)])
    assert "did not raise" not in output
    assert "raised at once" not in output, "that is no stopped rank"
    assert output.count("raised: ") == 6 * 3
