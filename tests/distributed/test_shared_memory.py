"""`host_shared_memory_collectives`: gloo's results without gloo, whatever the order, and no rank that
waits for ever."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel
from accel.device.cpu import shared_memory
from accel.log import log_once

pytestmark = [
    pytest.mark.usefixtures("gloo_group"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the runtime for machines without CUDA"),
    pytest.mark.skipif(shared_memory.unavailable() is not None, reason="no memory to share"),
]

SLOTS_BYTES = 2 << 20
"""More than that does not go in one piece, on any number of ranks."""
SIZES = (0, 1, 37, 4096, SLOTS_BYTES // 4 + 13)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
WORLDS = (2, 3, 4)


def enable() -> None:
    accel.enable(preset="off", host_shared_memory_collectives=True)


@pytest.fixture
def without_gloo(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make every collective of gloo's an error; groups that are used must be set up."""

    def call() -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("this went to gloo")

        for name in (
            *("allreduce", "allgather", "_allgather_base", "reduce_scatter"),
            *("_reduce_scatter_base", "broadcast", "barrier"),
        ):
            monkeypatch.setattr(dist.ProcessGroup, name, refuse)

    return call


@lru_cache(maxsize=4)
def operands(count: int, dtype: torch.dtype) -> torch.Tensor:
    """What each rank brings, one row each: the same on all ranks. Kept: do not write to it."""
    generator = torch.Generator().manual_seed(count)
    shape = (dist.get_world_size(), count)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def in_rank_order(rows: torch.Tensor, op: str) -> torch.Tensor:
    """16-bit floats in fp32, rounded once; what the kernels must give bit for bit."""
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    total = wide[0].clone()
    for row in wide[1:]:
        match op:
            case "sum" | "avg":
                total += row
            case "product":
                total *= row
            case "min":
                total = torch.minimum(total, row)
            case "max":
                total = torch.maximum(total, row)
    return (total / len(rows) if op == "avg" else total).to(rows.dtype)


def reductions() -> Iterator[tuple[str, torch.dtype, int]]:
    for dtype, count, op in product(FLOATS + INTEGERS, SIZES, OPS):
        if op != "avg" or dtype.is_floating_point:
            yield op, dtype, count


def check_reductions(without_gloo: Callable[[], None]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    by_gloo = {}
    for op, dtype, count in reductions():
        by_gloo[op, dtype, count] = operands(count, dtype)[rank].clone()
        dist.all_reduce(by_gloo[op, dtype, count], OPS[op])
    enable()
    assert shared_memory.channel() is not None
    without_gloo()
    for op, dtype, count in reductions():
        rows = operands(count, dtype)
        expected, case = in_rank_order(rows, op), f"{op} {dtype} {count}"
        ours = rows[rank].clone()
        dist.all_reduce(ours, OPS[op])
        assert torch.equal(ours, expected), case
        if size == 2 or not dtype.is_floating_point or op in ("min", "max"):
            assert torch.equal(ours, by_gloo[op, dtype, count]), case
        elif count and op != "product":  # gloo rounds 16 bits after each rank
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(ours, by_gloo[op, dtype, count], rtol=8 * eps, atol=8 * eps)
        whole = operands(count * size, dtype)
        shard = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(shard, whole[rank], OPS[op])
        assert torch.equal(shard, in_rank_order(whole, op).view(size, count)[rank]), case


def check_gathers(without_gloo: Callable[[], None]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    enable()
    assert shared_memory.channel() is not None
    without_gloo()
    for dtype, count in product((*FLOATS, *INTEGERS, torch.int16, torch.bool), SIZES):
        rows = operands(count, dtype)
        out = torch.empty(size * count, dtype=dtype)
        dist.all_gather_into_tensor(out, rows[rank])
        assert torch.equal(out, rows.flatten()), (dtype, count)
        in_place = torch.zeros_like(rows)
        in_place[rank] = rows[rank]
        dist.all_gather_into_tensor(in_place, in_place[rank])
        assert torch.equal(in_place, rows), (dtype, count)
        outs = [torch.empty(count + 3 * r, dtype=dtype) for r in range(size)]
        dist.all_gather(outs, operands(count + 3 * rank, dtype)[rank])
        for r, found in enumerate(outs):
            assert torch.equal(found, operands(count + 3 * r, dtype)[r]), (dtype, count, r)
        for root in range(size):
            sent = rows[rank].clone()
            dist.broadcast(sent, root)
            assert torch.equal(sent, rows[root]), (dtype, count, root)


def check_lists(without_gloo: Callable[[], None]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    enable()
    dist.barrier()
    without_gloo()
    for dtype, count in product((torch.float32, torch.bfloat16), SIZES):
        sizes = [count + 5 * r for r in range(size)]
        out = torch.empty(sizes[rank], dtype=dtype)
        dist.reduce_scatter(out, [operands(n, dtype)[rank] for n in sizes])
        assert torch.equal(out, in_rank_order(operands(sizes[rank], dtype), "sum"))


CHECKS = {f.__name__: f for f in (check_reductions, check_gathers, check_lists)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.distributed(world_size=2)
def test_two_ranks(check: str, without_gloo: Callable[[], None]) -> None:
    CHECKS[check](without_gloo)


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.distributed(world_size=3)
def test_three_ranks(check: str, without_gloo: Callable[[], None]) -> None:
    CHECKS[check](without_gloo)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.distributed(world_size=4)
def test_four_ranks(check: str, without_gloo: Callable[[], None]) -> None:
    CHECKS[check](without_gloo)


@pytest.mark.distributed(world_size=2)
def test_a_broadcast_leaves_the_roots_tensor_as_it_is(without_gloo: Callable[[], None]) -> None:
    enable()
    dist.barrier()
    without_gloo()
    x = torch.full((3,), float(dist.get_rank()), requires_grad=True)
    y = x.exp()
    sent = y.detach()
    dist.broadcast(sent, 0)
    assert sent.tolist() == [1.0] * 3
    if dist.get_rank() == 0:
        y.sum().backward()  # its result was not written
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.distributed(world_size=2)
def test_outputs_whose_elements_share_memory_are_an_error(without_gloo: Callable[[], None]) -> None:
    enable()
    dist.barrier()
    without_gloo()
    with pytest.raises(ValueError, match=r"share memory, its strides are \[0\]"):
        dist.all_reduce(torch.zeros(1).expand(4))
    x = torch.ones(2)
    dist.all_reduce(x)  # nothing was posted
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.distributed(world_size=2)
def test_with_preset_fast_half_sums_are_those_of_gloo(without_gloo: Callable[[], None]) -> None:
    """`host_half_collectives` is on as well and gives the same bits where ranks share no memory."""
    rows = operands(5001, torch.bfloat16)
    accel.enable(preset="fast", host_shared_memory_collectives=False)
    exchanged = rows[dist.get_rank()].clone()
    dist.all_reduce(exchanged)
    accel.enable(preset="fast")
    assert shared_memory.channel() is not None
    without_gloo()
    ours = rows[dist.get_rank()].clone()
    dist.all_reduce(ours)
    assert torch.equal(ours, exchanged)


@pytest.mark.distributed(world_size=4)
def test_the_same_bits_every_time_and_on_every_rank() -> None:
    enable()
    rows = operands(300_001, torch.float32)
    first = rows[dist.get_rank()].clone()
    dist.all_reduce(first)
    for _ in range(20):
        again = rows[dist.get_rank()].clone()
        dist.all_reduce(again)
        assert torch.equal(again, first)
    everywhere = torch.empty(4, first.numel())
    dist.all_gather_into_tensor(everywhere, first)
    assert all(torch.equal(each, first) for each in everywhere)


@pytest.mark.distributed(world_size=2)
def test_nan_stays() -> None:
    enable()
    for op, dtype, rank in product(OPS.values(), FLOATS, range(2)):
        x = torch.ones(40, dtype=dtype)
        if dist.get_rank() == rank:
            x[7] = torch.nan
        dist.all_reduce(x, op)
        assert x.isnan().nonzero().flatten().tolist() == [7], (op, dtype, rank)


@pytest.mark.distributed(world_size=2)
def test_strided_tensors_views_and_autograd(without_gloo: Callable[[], None]) -> None:
    enable()
    dist.barrier()
    without_gloo()
    rank = dist.get_rank()
    base = torch.arange(48.0).view(6, 8)
    strided = base.clone().t()
    dist.all_reduce(strided)
    assert torch.equal(strided, 2 * base.t())
    sent = (base + rank).clone()[:, ::2]
    dist.broadcast(sent, 1)
    assert torch.equal(sent, (base + 1)[:, ::2])
    out = torch.empty(8, 12).t()
    dist.all_gather_into_tensor(out, base.t())
    assert torch.equal(out.reshape(2, -1), base.t().reshape(1, -1).expand(2, -1))

    saved = torch.ones(4, requires_grad=True)
    y = saved * 2
    loss = (y * y).sum()  # saves y
    dist.all_reduce(y)
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    leaf = torch.ones(4, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.is_leaf
    assert leaf.tolist() == [2.0] * 4


@pytest.mark.distributed(world_size=2)
def test_a_compiled_program_takes_part_as_another(without_gloo: Callable[[], None]) -> None:
    """Rank 0 compiles: what is traced must neither be called with tensors that have no memory nor twice."""
    enable()
    dist.barrier()
    without_gloo()

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        dist.barrier()
        rows = y.new_empty(2, 8)
        dist.all_gather_into_tensor(rows, y)
        shard = torch.empty_like(y)
        dist.reduce_scatter_tensor(shard, rows, async_op=True).wait()
        listed = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(listed, shard + 1)
        dist.all_reduce(y)
        started = dist.broadcast(rows, 1, async_op=True)
        while not started.is_completed():
            pass
        torch.cuda.synchronize()
        return y + 1, rows * 3, *listed

    rank = dist.get_rank()
    x = torch.arange(8.0) + rank
    found = (torch.compile(program, backend="aot_eager") if rank == 0 else program)(x)
    for ours, theirs in zip(found, program(x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.distributed(world_size=2)
def test_what_is_not_served_goes_to_gloo() -> None:
    enable()
    rank = dist.get_rank()
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == 3
    z = torch.tensor([1.0 + 2.0j]).conj()
    dist.all_reduce(z := z.resolve_conj())
    assert z.item() == 2 - 4j
    mean = torch.tensor([4 * rank])
    with pytest.raises(RuntimeError):
        dist.all_reduce(mean, dist.ReduceOp.AVG)  # gloo has no mean of integers either
    out = torch.empty(2)
    dist.all_to_all_single(out, torch.tensor([0.0, 1.0]) + 10 * rank)
    assert out.tolist() == [rank, rank + 10]


@pytest.mark.distributed(world_size=2)
def test_wrong_shapes_and_dtypes_are_refused_with_their_values() -> None:
    enable()
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"a multiple of 2 elements.*7"):
        dist.all_gather_into_tensor(torch.empty(7), x)
    with pytest.raises(ValueError, match="a tensor of 4 elements where its shard has 5"):
        dist.all_gather_into_tensor(torch.empty(10), x)
    with pytest.raises(ValueError, match="one dtype"):
        dist.reduce_scatter_tensor(torch.empty(2, dtype=torch.bfloat16), x)
    dist.all_reduce(x)  # nothing is left behind


@pytest.mark.distributed(world_size=2)
def test_different_collectives_are_an_error_on_every_rank() -> None:
    enable()
    rank, x = dist.get_rank(), torch.zeros(4)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for each in groups:
        dist.barrier(group=each)
    expected = r"all_(reduce|gather) of 16 bytes.*but rank . .* at all_(reduce|gather) of 16 bytes: all ranks"
    one = partial(dist.all_reduce, x, group=groups[0])
    other = partial(dist.all_gather_into_tensor, torch.zeros(8), x, group=groups[0])
    with pytest.raises(RuntimeError, match=expected):
        (one if rank == 0 else other)()
    with pytest.raises(RuntimeError, match=r"all_reduce of \d+ bytes.*at all_reduce of \d+ bytes"):
        dist.all_reduce(torch.zeros(4 + rank), group=groups[1])
    dist.all_reduce(x)  # another group goes on


SMALL, LARGE = 1000, SLOTS_BYTES  # elements; large takes several rounds of all slots


def started(count: int, group: Any, value: float) -> tuple[torch.Tensor, Any]:
    x = torch.full((count,), value)
    return x, dist.all_reduce(x, group=group, async_op=True)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.distributed(world_size=2)
def test_groups_in_opposite_orders(count: int) -> None:
    """Legal where operations are asynchronous: each rank starts and waits in its own order."""
    enable()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for each in groups:
        dist.barrier(group=each)
    order = groups if dist.get_rank() == 0 else groups[::-1]
    for _ in range(5):
        work = {g: [started(count, g, float(n)) for n in range(6)] for g in order}
        for g in order[1:] + order[:1]:
            for n, (x, handle) in reversed(list(enumerate(work[g]))):
                handle.wait()
                assert handle.is_completed()
                assert (x == 2 * n).all()


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.distributed(world_size=2)
def test_a_call_that_need_not_block_does_not(count: int) -> None:
    """Rank 0 starts far more than fits before rank 1 starts anything, and rank 1 begins with another
    group and with a message."""
    enable()
    a, b = (dist.new_group([0, 1]) for _ in range(2))
    for each in (a, b):
        dist.barrier(group=each)
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        work = [started(count, a, float(n)) for n in range(20)]
        dist.send(token, 1)
        dist.barrier(group=b)
    else:
        dist.recv(token, 0)
        dist.barrier(group=b)
        work = [started(count, a, float(n)) for n in range(20)]
    last = torch.ones(3)
    dist.all_reduce(last, group=a)  # behind all of them
    for n, (x, handle) in enumerate(work):
        assert handle.is_completed()
        handle.wait()
        assert (x == 2 * n).all()
    assert last.tolist() == [2.0] * 3


@pytest.mark.distributed(world_size=2)
def test_a_wait_is_over_with_its_own_collective() -> None:
    """Rank 1 starts a second one, and rank 0 does not before it hears from rank 1 that the first is over."""
    enable()
    dist.barrier()
    token = torch.zeros(1)
    for _ in range(3):
        if dist.get_rank() == 1:
            (x, first), (_, second) = started(4 * LARGE, None, 3.0), started(SMALL, None, 1.0)
            time.sleep(0.3)  # somebody else gets on with the first
            first.wait()
            dist.send(token, 0)
            second.wait()
        else:
            time.sleep(0.6)
            x, first = started(4 * LARGE, None, 3.0)
            first.wait()
            dist.recv(token, 1)
            dist.all_reduce(torch.full((SMALL,), 1.0))
        assert (x == 6).all()


@pytest.mark.distributed(world_size=2)
def test_a_time_out_may_change() -> None:
    enable()
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    group._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=5)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)
    if dist.get_rank() == 1:
        time.sleep(8)
    x, handle = started(SMALL, group, 2.0)
    handle.wait()
    assert (x == 4).all()


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.distributed(world_size=2)
def test_what_nobody_waits_for_is_there_once_the_device_is_synchronized(count: int) -> None:
    enable()
    for wait in (torch.cuda.synchronize, torch.cuda.Event().synchronize):
        sums = [started(count, None, float(n))[0] for n in range(3)]
        own = torch.full((count,), float(dist.get_rank()))
        parts = [torch.empty(count) for _ in range(2)]
        dist.all_gather(parts, own, async_op=True)
        wait()
        assert all((x == 2 * n).all() for n, x in enumerate(sums))
        assert all((part == rank).all() for rank, part in enumerate(parts))


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.distributed(world_size=2)
def test_who_asks_whether_it_is_completed_will_hear_so(count: int) -> None:
    enable()
    x, handle = started(count, None, 3.0)
    until = time.monotonic() + 60
    while not handle.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert (x == 6).all()


@pytest.mark.distributed(world_size=2)
def test_a_coalescing_manager_is_its_threads_own() -> None:
    enable()
    mine, theirs = torch.ones(4), torch.ones(4)
    group = dist.new_group([0, 1])
    seen: list[list[float]] = []

    def beside() -> None:
        dist.all_reduce(theirs, group=group)
        seen.append(theirs.tolist())

    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(mine)
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    manager.wait()
    assert seen == [[2.0] * 4]
    assert mine.tolist() == [2.0] * 4


@pytest.mark.distributed(world_size=2)
def test_a_tensor_may_be_released_before_the_wait() -> None:
    enable()
    out = torch.empty(2 * LARGE)
    for value in range(4):
        x = torch.full((LARGE,), float(value + dist.get_rank()))
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        x.data = torch.empty(1)
        del x
        scribble = torch.full((LARGE,), -1.0)
        del scribble
        work.wait()
        assert (out.view(2, -1)[0] == value).all()
        assert (out.view(2, -1)[1] == value + 1).all()


@pytest.mark.distributed(world_size=2)
def test_coalesced(without_gloo: Callable[[], None]) -> None:
    enable()
    dist.barrier()
    without_gloo()
    rank = dist.get_rank()
    outs = [torch.empty(8) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for n, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((4,), float(10 * n + rank)))
    manager.wait()
    for n, out in enumerate(outs):
        assert out.tolist() == [10.0 * n] * 4 + [10.0 * n + 1] * 4


@pytest.mark.distributed(world_size=2)
def test_handles_are_torchs_kind() -> None:
    """FSDP2 waits for no other."""
    enable()
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    assert isinstance(work, dist.distributed_c10d.Work)
    work.wait()


@pytest.mark.distributed(world_size=2)
def test_a_forked_child_is_no_rank() -> None:
    """Megatron's handler of signals, which loaders' workers inherit, asks for a barrier."""
    enable()
    dist.barrier()
    if (child := os.fork()) == 0:
        try:
            torch.cuda.synchronize()
            dist.barrier()
        except RuntimeError as error:
            os._exit(7 if "forked from a rank" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()


@pytest.mark.distributed(world_size=3)
def test_groups_of_some_ranks_and_a_new_world() -> None:
    enable()
    pair = dist.new_group([0, 2])
    for _ in range(2):
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=pair)
        if dist.get_rank() != 1:
            assert x.item() == 2
            dist.broadcast(x.fill_(dist.get_rank()), 2, group=pair)
            assert x.item() == 2
        dist.all_reduce(y := torch.ones(1))
        assert y.item() == 3


@pytest.mark.parametrize("why", ["another host", "no access", "no memory", "no kernels"])
@pytest.mark.distributed(world_size=3)
def test_where_memory_cannot_be_shared_all_ranks_stay_with_gloo(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = dist.get_rank()
    if why == "no kernels" and rank == 1:  # found out before the feature is on
        monkeypatch.setattr(shared_memory, "unavailable", lambda: "there are no kernels")
    enable()
    log_once.cache_clear()

    def fail(*args: Any) -> Any:
        raise OSError(f"there is {why}")

    if why == "another host":
        monkeypatch.setattr(shared_memory, "_place", lambda: bytes([rank == 2] * 32))
    elif why == "no access" and rank == 1:
        monkeypatch.setattr(shared_memory.os, "open", fail)
    elif why == "no memory":
        monkeypatch.setattr(shared_memory.os, "posix_fallocate", fail)
    with caplog.at_level(logging.WARNING, "accel"):
        for group in (dist.group.WORLD, dist.new_group([0, 1, 2])):
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [3.0] * 3
            assert shared_memory.channel(group) is None
    told = [r.getMessage() for r in caplog.records if "stay with gloo" in r.getMessage()]
    assert len(told) == (rank == 0), told
    expected = {
        "another host": "different hosts",
        "no access": "rank 1: there is no access",
        "no memory": "rank 0: there is no memory",
        "no kernels": "rank 1: there are no kernels",
    }
    assert all(expected[why] in line for line in told)


@pytest.mark.distributed(world_size=2)
def test_nothing_is_left_open() -> None:
    enable()
    dist.all_reduce(torch.ones(1))
    assert shared_memory.channel() is not None
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if "accel-collectives" in link]
    assert "accel-collectives" in Path("/proc/self/maps").read_text()
    if Path("/dev/shm").is_dir():
        assert not [name for name in os.listdir("/dev/shm") if "accel" in name]


_PEER = """
import os, signal, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from accel.device.cpu import shared_memory
rank, file, fate, count, how = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3,
                        timeout=timedelta(seconds=100))
if fate == "sleeps":  # after the ranks have met: a busy machine may take longer for that
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    options._timeout = timedelta(seconds=4)
channel = shared_memory.channel()
channel.barrier(False)
if rank == 1:
    if fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "sleeps":
        time.sleep(12)
    os._exit(0)
for attempt in range(2):
    start, work = time.monotonic(), None
    try:
        work = channel.all_reduce(torch.ones(count), dist.ReduceOp.SUM, how == "async")
        work and work.wait()
        print("no error", flush=True)
    except RuntimeError as error:
        assert work is None or work.is_completed()  # it has failed
        print(f"{time.monotonic() - start:.1f} s: {error}".splitlines()[0], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("fate", "how"),
    [("killed", "sync"), ("exits", "async"), ("sleeps", "sync"), ("sleeps", "async")],
)
def test_a_rank_that_does_not_come_is_named(fate: str, how: str, tmp_path: Path) -> None:
    count = LARGE if how == "async" else SMALL
    command = [sys.executable, "-c", _PEER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), fate, str(count), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    printed = [rank.communicate(timeout=600) for rank in ranks]
    for rank in (0, 2):
        lines = printed[rank][0].splitlines()
        assert len(lines) == 2, printed[rank]
        for line in lines:  # the second call fails at once, with the first one's reason
            assert f"rank {rank} of group [0, 1, 2] waited" in line
            assert f"for rank 1 (process {ranks[1].pid}) to bring its part of all_reduce" in line
            reason = (
                "the group's time-out is over" if fate == "sleeps" else "that process has ended"
            )
            assert reason in line
        seconds = [float(line.partition(" s")[0]) for line in lines]
        assert seconds[0] < 50, "half the group's time-out"
        assert seconds[1] < 4, "the group's time-out once more"
