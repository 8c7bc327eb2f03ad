"""Transfers of devices whose streams share one queue are hidden as with many, by a model of their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.parallel import overlapped_linear
from accel.parallel.context import Attention, ring
from accel.parallel.experts import exchange, journey
from accel.parallel.experts.exchange import Experts, routed_experts
from accel.parallel.experts.plan import Copy
from accel.parallel.experts.traffic import Traffic
from accel.parallel.overlapped_linear import Form, Plan, gather_matmul

from .device_time import DeviceTime

MODULES = (overlapped_linear, ring, exchange)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


Timed = Callable[..., DeviceTime]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """The time of a call; `posts_for`: the number of queues that transfers are posted for."""

    def run(
        call: Callable[[DeviceTime], object],
        seconds: Callable[[str, Sequence[Any]], float],
        per_byte: float,
        queues: int,
        posts_for: int | None = None,
    ) -> DeviceTime:
        posts_for = queues if posts_for is None else posts_for
        device = DeviceTime(seconds, per_byte, one_queue=queues == 1)
        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "one_queue", lambda _: posts_for == 1)
            patch.setattr(journey, "asks_ahead", lambda _: False)
            patch.setattr(dist, "batch_isend_irecv", device.batch_isend_irecv)
            patch.setattr(dist, "all_gather_into_tensor", device.all_gather_into_tensor)
            with device:
                call(device)
        return device

    return run


def products(name: str, args: Sequence[Any]) -> float:
    """Two operations of each a second."""
    if name != "mm":
        return 0.0
    return args[0].shape[0] * args[0].shape[1] * args[1].shape[1] / 2


@pytest.mark.parametrize("group", [2, 8], indirect=True)
@pytest.mark.parametrize("form", ["ring", "collective"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_gather(group: Any, form: Form, share: float, timed: Timed) -> None:
    """Of a product, whose transfers take a share of its time."""
    rows, width = 64, 8
    x, w = torch.zeros(rows, width), torch.zeros(width, width)
    whole = group.size() * rows * width * width / 2
    per_byte = share * whole / ((group.size() - 1) * x.nbytes)

    def call(device: DeviceTime) -> None:
        gather_matmul(x, w, group, Plan(4, form))

    many, one = (timed(call, products, per_byte, queues) for queues in (2, 1))
    before = timed(call, products, per_byte, 1, posts_for=2)
    assert many.computing == one.computing == whole
    assert one.travelling == pytest.approx(share * whole)
    assert many.end < 1.06 * whole
    assert one.end < 1.001 * many.end
    assert before.end > 1.03 * one.end


class Equal(Attention):
    """Of any queries and keys, in a second; the gradients take two."""

    def __init__(self, device: DeviceTime) -> None:
        super().__init__(1.0)
        self._device = device

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        self._device.compute(_scores(q, k))
        return torch.zeros_like(q), torch.zeros(*q.shape[1:-1], q.shape[0])

    def gradients(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        self._device.compute(2 * _scores(q, k))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _scores(q: Tensor, k: Tensor) -> float:
    return q.shape[0] * k.shape[0] / 64**2


def nothing(name: str, args: Sequence[Any]) -> float:
    return 0.0


@pytest.mark.parametrize("group", [8], indirect=True)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_ring_attention(group: Any, share: float, timed: Timed) -> None:
    """Of the time of a block's forward its keys and values travel a share."""
    operands = [torch.zeros(64, 1, 1, 4) for _ in range(3)]
    per_byte = share / (operands[1].nbytes + operands[2].nbytes)

    def forward(device: DeviceTime) -> Tensor:
        q, k, v = (t.clone().requires_grad_() for t in operands)
        return ring.ring_attention(Equal(device), q, k, v, group, causal=False)

    def both(device: DeviceTime) -> None:
        forward(device).sum().backward()

    many, one = (timed(forward, nothing, per_byte, queues) for queues in (2, 1))
    assert many.computing == one.computing == 8
    assert many.end == one.end == pytest.approx(8)
    many, one = (timed(both, nothing, per_byte, queues) for queues in (2, 1))
    before = timed(both, nothing, per_byte, 1, posts_for=2)
    assert many.end == one.end == pytest.approx(8 + 2 * 8)
    assert before.end > 1.05 * one.end


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("copies", [False, True])
def test_experts(group: Any, copies: bool, timed: Timed) -> None:
    """Of the time of a forward's experts the way out takes a share, as much as the way home."""
    rows, hidden, each = 8, 8, 5
    weights = [[torch.zeros(hidden, hidden) for _ in range(each)] for _ in range(2)]
    copied = frozenset({Copy(0, 1), Copy(each, 0)}) if copies else frozenset()
    experts = Experts(
        lambda x, probs, counts, first, second: second(first(x) * probs[:, None]),
        (weights[0], weights[1]),
    )
    per_row = 0.5 / (2 * each * rows)  # a product of all rows of both layers: a second

    def seconds(name: str, args: Sequence[Any]) -> float:
        return per_row * len(args[0]) if name.startswith("grouped_gemm") else 0.0

    def layer(device: DeviceTime, backward: bool) -> None:
        for of_layer in weights:
            for weight in of_layer:
                weight.requires_grad_(backward)
        x = torch.zeros(2 * each * rows, hidden).requires_grad_(backward)
        probs = torch.zeros(2 * each * rows).requires_grad_(backward)
        traffic = Traffic([[rows] * 2 * each] * 2, 0, copied, slices=each)
        beside = torch.zeros(1, requires_grad=backward)

        def shared(x: Tensor) -> Tensor:
            device.compute(0.3)
            return x * 1

        y, z = routed_experts(x, probs, traffic, group, experts, shared, beside)
        if backward:
            assert z is not None
            (y.sum() + z.sum()).backward()

    per_byte = 0.5 / (each * rows * hidden * 4)
    for backward in (False, True):
        call = partial(layer, backward=backward)
        many, one = (timed(call, seconds, per_byte, queues) for queues in (2, 1))
        before = timed(call, seconds, per_byte, 1, posts_for=2)
        assert many.end < many.computing + 0.11  # the last slice's homecoming
        assert before.end > 1.15 * one.end
        # a copy comes with the second slice, which is waited for sooner
        assert one.end < (1.16 if copies else 1.001) * many.end
