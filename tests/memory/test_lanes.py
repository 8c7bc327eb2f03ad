"""What a backward pass asks for under another stream than the forward pass's, as shared experts' may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.memory import recompute
from accel.memory.lanes import StreamHome, StreamLanes, home_of
from accel.memory.recompute import Recomputed
from accel.memory.swap import IN

from .streams import Device, Stream
from .test_swap import CPU, forward, gradients, model, swap_of


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(recompute, "home_of", lambda tensors: StreamHome(CPU))
    return Device(monkeypatch)


def test_work_goes_home_and_both_streams_wait(device: Device) -> None:
    layer, shared, third = device.current, Stream(), Stream()
    home, made = StreamHome(CPU), torch.ones(2)
    with device.stream(shared):
        before = shared.launch()
        with home.at():
            assert device.current is layer
            assert layer.follows(before)
            done = layer.launch()
        assert device.current is shared
        assert shared.follows(done)
    with device.stream(third):
        home.lend([made])
        assert third.follows(done)
    home.lend([made])  # at home nobody waits
    assert device.recorded == [(made.data_ptr(), third)]


def test_the_host_has_no_streams() -> None:
    assert not isinstance(home_of([torch.ones(2)]), StreamHome)
    assert not isinstance(home_of([torch.ones(2, device="meta")]), StreamHome)


def test_recomputation_runs_under_the_stream_of_the_first_call(device: Device) -> None:
    layer, shared = device.current, Stream()
    launched = []

    def function(x: Tensor) -> Tensor:
        launched.append((device.current, device.current.launch()))
        return x.sin()  # which saves its input

    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    kept = (x * 1).sin()
    (expected,) = torch.autograd.grad((kept * kept).sum(), x)
    call = Recomputed()
    y = call(function, x * 1)
    z = y * y
    assert call.free(z) > 0
    with device.stream(shared):
        before = shared.launch()
        z.sum().backward()
    (first, _), (second, done) = launched
    assert first is second is layer
    assert layer.follows(before)
    assert shared.follows(done)
    assert (y.data_ptr(), shared) in device.recorded
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_later_consumer_waits_for_the_recomputation_too(device: Device) -> None:
    layer, shared = device.current, Stream()
    x, w = torch.ones(4, 4).requires_grad_(), torch.ones(4, 4).requires_grad_()
    call = Recomputed()
    y = call(torch.exp, x * 1)
    left, right = y * 2, y * w
    assert call.free(left, right) > 0
    left.sum().backward(retain_graph=True)
    assert layer not in shared.after
    with device.stream(shared):
        torch.autograd.grad(right.sum(), w)
    assert layer in shared.after


def test_what_operations_saved_is_waited_for(device: Device) -> None:
    """In a second backward pass, say: what was computed again is there."""
    layer, shared = device.current, Stream()
    x = torch.ones(4, 4).requires_grad_()
    y = Recomputed()(torch.exp, x * 1)
    y.sum().backward(retain_graph=True)
    assert layer not in shared.after
    with device.stream(shared):
        y.sum().backward()
    assert layer in shared.after


def test_what_was_swapped_comes_back_in_the_stream_of_its_chain(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = model()
    expected = gradients(layers, *forward(layers, None))
    layer, shared = device.current, Stream()
    lanes = StreamLanes(CPU)
    empty_like, fetched_under = torch.empty_like, []

    def noting(tensor: Tensor, **how: Any) -> Tensor:
        fetched_under.append(device.current)
        return empty_like(tensor, **how)

    x, y = forward(layers, swap_of(lanes))
    monkeypatch.setattr(torch, "empty_like", noting)
    with device.stream(shared):
        found = gradients(layers, x, y)
    assert all(map(torch.equal, found, expected))
    assert fetched_under
    assert set(fetched_under) == {layer}
    copies = lanes._streams[IN]
    assert shared.after[copies] == copies.after[copies], "a consumer does not wait for its copy"
    assert len({address for address, stream in device.recorded if stream is shared}) > 1
