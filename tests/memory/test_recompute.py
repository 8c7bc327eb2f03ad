"""`Recomputed`: gradients of a graph that keeps everything, bytes that are freed, and those left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel.device.cpu import memory
from accel.memory.recompute import Recomputed
from accel.ops import _native, rms_norm, swiglu
from tests.ops.contract import needs_native

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu of half": lambda x: F.gelu(x[..., :16]) * x[..., 16:],
    "saves its output": lambda x: torch.tanh(x).exp(),
    "swiglu": swiglu,
    "dropout": lambda x: F.dropout(F.silu(x), 0.5),
    "rms_norm": lambda x: rms_norm(x, torch.full((32,), 1.5)),
}


def leaf(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).requires_grad_()


def consumer(y: Tensor, w: Tensor) -> Tensor:
    return y @ w


def run(
    function: Callable[..., Tensor], x: Tensor, w: Tensor, freed: bool, passes: int = 1
) -> tuple[list[Tensor], int]:
    """Output and gradients of two layers with a consumer each, and the bytes that were freed."""
    torch.manual_seed(3)
    num_bytes = 0
    for _ in range(2):
        call = Recomputed()
        y = call(function, x * 1.0) if freed else function(x * 1.0)
        out = consumer(y, w[: y.shape[-1]])
        if freed:
            num_bytes += call.free(out)
            assert y.untyped_storage().nbytes() == 0
        del y
        x = torch.cat([out, out], -1)
    loss = out.square().sum()
    for number in range(passes):
        loss.backward(retain_graph=number < passes - 1)
    return [loss.detach(), torch.rand(1)], num_bytes


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_a_graph_that_keeps_everything(name: str, passes: int) -> None:
    results = []
    for freed in (False, True):
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        found, num_bytes = run(FUNCTIONS[name], x, w, freed, passes)
        state = torch.get_rng_state()
        results.append((*found, x.grad, w.grad, state))
        assert (num_bytes > 0) == freed
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backward_too", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_program_frees_and_recomputes_the_same(name: str, backward_too: bool) -> None:
    freed = []

    def forward(x: Tensor, w: Tensor) -> Tensor:
        call = Recomputed()
        y = call(FUNCTIONS[name], x * 2.0)
        out = consumer(y, w[: y.shape[-1]]).square()
        freed.append(call.free(out))
        return out.sum()

    def step(x: Tensor, w: Tensor) -> None:
        forward(x, w).backward()

    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        torch._dynamo.reset()
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        if compiled and backward_too:
            torch.compile(step, backend="aot_eager")(x, w)
        elif compiled:
            torch.compile(forward, backend="aot_eager")(x, w).backward()
        else:
            step(x, w)
        results.append((x.grad, w.grad, torch.get_rng_state()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert freed[0] == freed[1] > 0


def test_one_graph_of_all_is_an_error_that_names_it() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: Recomputed()(F.silu, x), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Recomputed\.__call__"):
        compiled(leaf(2, 3))


def test_without_the_native_library_values_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for built in (True, False):
        if not built:
            monkeypatch.setattr(_native, "reason", lambda: "not built")
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        found, num_bytes = run(FUNCTIONS["saves its output"], x, w, freed=True)
        assert num_bytes > 0
        results.append((*found, x.grad, w.grad))
    assert all(map(torch.equal, *results))


@needs_native
def test_a_gradient_may_be_written_over_the_input() -> None:
    grads = []
    for freed in (False, True):
        x, w = leaf(8, 32), leaf(16, 16, seed=1)
        call, fc1 = Recomputed(), x * 1.0
        y = call(swiglu_over_its_input, fc1) if freed else swiglu(fc1)
        out = consumer(y, w)
        if freed:
            assert call.free(out) == y.numel() * 4
        out.square().sum().backward()
        grads.append((x.grad, w.grad))
        assert torch.equal(fc1.detach(), x.grad) == freed
    assert all(map(torch.equal, *grads))


def swiglu_over_its_input(x: Tensor) -> Tensor:
    return swiglu(x, inplace_grad=True)


def test_double_backward() -> None:
    results = []
    for freed in (False, True):
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        call = Recomputed()
        y = call(torch.tanh, x) if freed else torch.tanh(x)
        out = consumer(y, w)
        if freed:
            assert call.free(out) == y.numel() * 4
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append((grad.detach(), x.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_parameters_of_a_closure_get_their_gradients() -> None:
    """With an input that needs none: the first layer, a frozen embedding, LoRA."""
    grads = []
    for freed in (False, True):
        x, scale, w = leaf(8, 32).detach(), leaf(32, seed=2), leaf(32, 16, seed=1)
        call = Recomputed()

        def function(x: Tensor, scale: Tensor = scale) -> Tensor:
            return F.silu(x * scale)

        y = call(function, x) if freed else function(x)
        out = consumer(y, w)
        if freed:
            assert call.free(out) > 0
        out.square().sum().backward()
        grads.append((scale.grad, w.grad))
    assert all(map(torch.equal, *grads))


def test_a_consumer_alone_may_need_the_output() -> None:
    x, w = leaf(8, 32).detach(), leaf(32, 16, seed=1)
    call = Recomputed()
    y = call(F.silu, x)
    out = consumer(y, w)
    assert call.free(out) == y.numel() * 4
    out.sum().backward()
    assert torch.equal(w.grad, F.silu(x).T @ torch.ones(8, 16))


LEFT_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "its input": lambda x: x,
    "a view of its input": lambda x: x.view(4, -1),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, training=False),
    "a part of more": lambda x: torch.cat([x, x])[: len(x)],
    "no elements": lambda x: x[:0] * 2,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_not_ours_alone_is_left_alone(name: str) -> None:
    x = leaf(8, 32)
    before = x.detach().clone()
    call = Recomputed()
    y = call(LEFT_ALONE[name], x)
    out = y * 2
    assert call.free(out) == 0
    out.sum().backward()
    assert torch.equal(x.detach(), before)
    assert x.grad is not None


def test_a_consumer_that_returns_the_output_keeps_it() -> None:
    x = leaf(8, 32)
    call = Recomputed()
    y = call(F.silu, x)
    out = y.view(4, 64)
    assert call.free(out) == 0
    assert torch.equal(out.view(8, 32), F.silu(x))


def test_without_gradients_nothing_is_freed() -> None:
    x = leaf(8, 32)
    with torch.no_grad():
        call = Recomputed()
        y = call(F.silu, x)
        assert call.free(y * 2) == 0
        assert torch.equal(y, F.silu(x))
    call = Recomputed()
    y = call(F.silu, x)
    assert call.free((y * 2).detach()) == 0  # nobody would fill it again
    assert torch.equal(y, F.silu(x))


def test_several_outputs_and_consumers() -> None:
    grads = []
    for freed in (False, True):
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        call = Recomputed()

        def function(x: Tensor) -> tuple[Tensor, Tensor, int]:
            return F.silu(x), torch.tanh(x), 7

        first, second, number = call(function, x) if freed else function(x)
        assert number == 7
        outs = consumer(first, w), consumer(second, w)
        if freed:
            assert call.free(*outs) == 2 * x.numel() * 4
        (outs[0].sum() + outs[1].square().sum()).backward()
        grads.append((x.grad, w.grad))
    assert all(map(torch.equal, *grads))


def test_only_one_of_the_consumers_is_needed() -> None:
    x, w = leaf(8, 32), leaf(32, 16, seed=1)
    call = Recomputed()
    y = call(F.silu, x)
    used, unused = consumer(y, w), consumer(y, w)
    call.free(unused, used)
    used.sum().backward()
    assert torch.equal(w.grad, F.silu(x.detach()).T @ torch.ones(8, 16))


@needs_native
def test_reading_a_freed_output_is_an_error() -> None:
    x, w = leaf(8, 32), leaf(32, 16, seed=1)
    call = Recomputed()
    y = call(F.silu, x)
    call.free(consumer(y, w))
    with pytest.raises(RuntimeError, match="this output was freed until the backward pass"):
        y + 1
    with pytest.raises(RuntimeError, match="this output was freed until the backward pass"):
        y.view(-1).tolist()


def test_autocast_is_as_it_was() -> None:
    grads = []
    for freed in (False, True):
        x, w = leaf(8, 32), leaf(32, 32, seed=1)
        call = Recomputed()

        def function(x: Tensor, w: Tensor) -> Tensor:
            return F.silu(x @ w)

        with torch.autocast("cpu", torch.bfloat16):
            y = call(function, x, w) if freed else function(x, w)
            assert y.dtype == torch.bfloat16
            out = consumer(y, w)
        if freed:
            assert call.free(out) == y.numel() * 2
        out.float().square().sum().backward()
        grads.append((x.grad, w.grad))
    assert all(map(torch.equal, *grads))


def test_inside_torchs_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    def layer(x: Tensor, w: Tensor) -> Tensor:
        call = Recomputed()
        out = consumer(call(F.silu, x * 1.0), w)
        call.free(out)
        return out

    for reentrant in (False, True):
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        checkpoint(layer, x, w, use_reentrant=reentrant).square().sum().backward()
        a, b = leaf(8, 32), leaf(32, 16, seed=1)
        consumer(F.silu(a * 1.0), b).square().sum().backward()
        assert torch.equal(x.grad, a.grad)
        assert torch.equal(w.grad, b.grad)


@pytest.mark.parametrize("outer", [False, True])
def test_inside_another_one(outer: bool) -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        call = Recomputed()
        y = call(F.dropout, call_input(x))
        out = consumer(y, w)
        assert call.free(out) == (0 if outer else 8 * 32 * 4)
        return out

    def call_input(x: Tensor) -> Tensor:
        return F.silu(x * 1.0)

    grads = []
    for freed in (False, True):
        torch.manual_seed(3)
        x, w = leaf(8, 32), leaf(32, 16, seed=1)
        if not freed:
            out = consumer(F.dropout(call_input(x)), w)
        else:
            out = Recomputed()(layer, x, w) if outer else layer(x, w)
        out.square().sum().backward()
        grads.append((x.grad, w.grad))
    assert all(map(torch.equal, *grads))


def test_a_function_that_changes_is_an_error() -> None:
    x, w, seen = leaf(8, 32), leaf(32, 16, seed=1), []

    def function(x: Tensor) -> Tensor:
        seen.append(0)
        return F.silu(x) if len(seen) == 1 else F.silu(x).double().exp()

    call = Recomputed()
    out = consumer(call(function, x), w)
    call.free(out)
    with pytest.raises(RuntimeError, match="not the same the second time"):
        out.sum().backward()


def test_an_error_in_the_recomputation_is_told() -> None:
    x, w, seen = leaf(8, 32), leaf(32, 16, seed=1), []

    def function(x: Tensor) -> Tensor:
        seen.append(0)
        if len(seen) == 2:
            raise ValueError("second call")
        return F.silu(x)

    call = Recomputed()
    out = consumer(call(function, x), w)
    call.free(out)
    with pytest.raises(ValueError, match="second call"):
        out.sum().backward(retain_graph=True)
    out.sum().backward()  # and may be tried again
    assert x.grad is not None


def test_nothing_is_left_when_the_graph_is() -> None:
    x, w = leaf(8, 32), leaf(32, 16, seed=1)
    gc.disable()
    try:
        for backward in (True, False):
            call = Recomputed()
            inner = x * 1.0
            alive = weakref.ref(inner.untyped_storage())
            y = call(F.silu, inner)
            out = consumer(y, w)
            call.free(out)
            if backward:
                out.sum().backward()
            del inner, y, out, call
            assert alive() is None, "the inputs are held by a cycle"
    finally:
        gc.enable()


@needs_native
@pytest.mark.usefixtures("counted")
def test_what_is_freed_is_what_was_allocated() -> None:
    """An unfused activation: its intermediates are not kept either."""

    def function(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    x, w = leaf(512, 1024), leaf(512, 64, seed=1)
    held = {}
    for freed in (False, True):
        before = memory.memory_allocated()
        call = Recomputed()
        y = call(function, x) if freed else function(x)
        out = consumer(y, w)
        num_bytes = call.free(out) if freed else 0
        del y
        held[freed] = memory.memory_allocated() - before - out.nbytes
        assert num_bytes == freed * 512 * 512 * 4
        out.sum().backward()
        del out, call
        x.grad = w.grad = None
    assert held[False] >= 2 * 512 * 512 * 4
    assert held[True] < 8192  # the state of the host's generator


@pytest.mark.usefixtures("counted")
def test_operations_that_save_their_results_leave_nothing_behind() -> None:
    """The second run's graph would hold what it saved, and be held by it."""
    x = leaf(64, 64)
    sizes = []
    for _ in range(3):
        call = Recomputed()
        y = call(lambda x: torch.softmax(x.exp().sigmoid(), -1), x)
        z = y * 2
        call.free(z)
        z.sum().backward()
        del call, y, z
        sizes.append(memory.memory_allocated())
    assert sizes[1:] == sizes[:1] * 2


@pytest.mark.usefixtures("counted")
def test_what_was_computed_again_is_let_go_while_the_result_is_held() -> None:
    """The graph, and its hooks, live as long as anybody holds what it made."""
    x = leaf(64, 64)
    held = []
    for freed in (False, True):
        before = memory.memory_allocated()
        calls, outputs = [], [x * 1]
        for _ in range(4):
            call = Recomputed()
            y = call(lambda x: x.exp().sigmoid(), outputs[-1]) if freed else outputs[-1].exp()
            z = y * y
            if freed:
                call.free(z)
            calls.append(call)
            outputs = [z]
        z.sum().backward()
        del y, outputs, call
        held.append(memory.memory_allocated() - before)
    assert held[1] <= held[0] + 1024


def test_an_input_that_was_changed_in_place_is_an_error() -> None:
    x = leaf(4, 4)
    given = x * 1
    call = Recomputed()
    y = call(torch.exp, given)
    z = y * y
    call.free(z)
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after it was used"):
        z.sum().backward()
