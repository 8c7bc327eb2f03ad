"""torch.distributed on gloo keeps what Megatron expects of NCCL; on CUDA, NCCL itself passes the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed_functions

from accel.testing.distributed import under_torchrun

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """The default group of two ranks, asked for as Megatron asks."""
    if not under_torchrun():
        yield
        return
    from accel.session import SESSION

    SESSION.attach()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    yield
    dist.destroy_process_group()
    SESSION.disable()


def mine(count: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, ... plus ten times the rank."""
    return (torch.arange(count, device="cuda") + 10 * dist.get_rank()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.distributed(world_size=2)
def test_gather_and_scatter_count_elements_not_shapes(dtype: torch.dtype) -> None:
    everything = torch.cat([torch.arange(4), torch.arange(4) + 10]).to(dtype)
    for shape in ((8,), (4, 2), (2, 2, 2)):
        out = torch.empty(shape, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out, mine(4, dtype))
        assert torch.equal(out.flatten().cpu(), everything)
        part = torch.empty(2, 2, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(part, mine(8, dtype).view(shape))
        expected = (2 * torch.arange(8) + 10).to(dtype).chunk(2)[dist.get_rank()]
        assert torch.equal(part.flatten().cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.distributed(world_size=2)
def test_per_rank_sizes(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    outs = [torch.empty(1 + r, dtype=dtype, device="cuda") for r in range(2)]
    work = dist.all_gather(outs, mine(1 + rank, dtype), async_op=True)
    work.wait()
    assert [o.tolist() for o in outs] == [[0.0], [10.0, 11.0]]
    out = torch.empty(1 + rank, dtype=dtype, device="cuda")
    dist.reduce_scatter(out, [mine(1, dtype), mine(2, dtype)])
    assert out.tolist() == [[10.0], [10.0, 12.0]][rank]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.distributed(world_size=2)
def test_all_to_all_single_with_uneven_splits(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    out = torch.empty(2 * (rank + 1), dtype=dtype, device="cuda")
    dist.all_to_all_single(out, mine(3, dtype), [rank + 1, rank + 1], [1, 2])
    assert out.tolist() == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]][rank]


@pytest.mark.distributed(world_size=2)
def test_sums_of_what_each_rank_has_scaled() -> None:
    """As Megatron's FSDP averages gradients."""
    rank = dist.get_rank()
    op = dist._make_nccl_premul_sum(0.5 + rank)
    x, expected = mine(4, torch.float32), torch.tensor([15.0, 17.0, 19.0, 21.0])
    whole, part = x.clone(), torch.empty(2, device="cuda")
    dist.all_reduce(whole, op)
    assert torch.equal(whole.cpu(), expected)
    dist.reduce_scatter_tensor(part, x, op)
    assert torch.equal(part.cpu(), expected.chunk(2)[rank])
    dist.reduce_scatter(part, list(x.chunk(2)), op)
    assert torch.equal(part.cpu(), expected.chunk(2)[rank])
    assert torch.equal(x, mine(4, torch.float32)), "the input was written to"


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.distributed(world_size=2)
def test_coalescing_manager(async_op: bool) -> None:
    total, out, part = mine(3, torch.float32), torch.empty(4).cuda(), torch.empty(1).cuda()
    with dist.distributed_c10d._coalescing_manager(
        group=dist.group.WORLD, device=total.device, async_ops=async_op
    ) as manager:
        dist.all_gather_into_tensor(out, mine(2, torch.float32), async_op=async_op)
    if async_op:
        manager.wait()
    with dist.distributed_c10d._coalescing_manager(async_ops=async_op) as manager:
        dist.reduce_scatter_tensor(part, mine(2, torch.float32), async_op=async_op)
    if async_op:
        manager.wait()
    dist.all_reduce(total)
    assert out.tolist() == [0, 1, 10, 11]
    assert part.item() == [10, 12][dist.get_rank()]
    assert total.tolist() == [10, 12, 14]


@pytest.mark.distributed(world_size=2)
def test_torchs_new_names_of_gather_and_scatter() -> None:
    """Since torch 2.13, whose FSDP2 asks by them, and waits for what is a `Work`."""
    if not hasattr(dist, "all_gather_single"):
        pytest.skip("torch has no all_gather_single before 2.13")
    rank = dist.get_rank()
    out, part = torch.empty(2, 2).cuda(), torch.empty(2).cuda()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_single(out, mine(2, torch.float32), async_op=True)
    manager.wait()
    assert out.tolist() == [[0, 1], [10, 11]]
    op = dist._make_nccl_premul_sum(0.5)
    dist.reduce_scatter_single(part, mine(4, torch.float32), op)
    assert part.tolist() == [[5, 6], [7, 8]][rank]
    work = dist.all_gather_single(out, mine(2, torch.float32), async_op=True)
    assert isinstance(work, dist.distributed_c10d.Work)
    work.wait()


@pytest.mark.distributed(world_size=2)
def test_uneven_parts_within_a_coalescing_manager() -> None:
    rank = dist.get_rank()
    part = torch.empty(1 + rank, device="cuda")
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter(part, [mine(1, torch.float32), mine(2, torch.float32)])
    manager.wait()
    assert part.tolist() == [[10.0], [10.0, 12.0]][rank]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.distributed(world_size=3)
def test_half_sums_are_rounded_once_under_preset_fast(dtype: torch.dtype) -> None:
    """`host_half_collectives`: the fp32 sum of the ranks in order, rounded; the same on every rank."""
    import accel

    generator = torch.Generator().manual_seed(3)
    operands = torch.randn(3, 6, 50, generator=generator).to(dtype)
    exact = operands.float().sum(0).to(dtype)
    rank = dist.get_rank()
    accel.enable(preset="fast")
    try:
        x = operands[rank].clone().cuda()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert torch.equal(x.cpu(), exact)
        part = torch.empty(2, 50, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(part, operands[rank].cuda())
        assert torch.equal(part.cpu(), exact.chunk(3)[rank])
        with dist.distributed_c10d._coalescing_manager() as _:
            dist.reduce_scatter_tensor(part.zero_(), operands[rank].cuda())
        assert torch.equal(part.cpu(), exact.chunk(3)[rank])
        largest = operands[rank].clone().cuda()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # no sum: gloo's
        assert torch.equal(largest.cpu(), operands.amax(0))
    finally:
        accel.disable()


@pytest.mark.distributed(world_size=2)
def test_average_and_empty() -> None:
    x = mine(2, torch.float32)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [5, 6]
    dist.all_reduce(torch.empty(0, device="cuda"))
    dist.all_to_all_single(torch.empty(0).cuda(), torch.empty(0).cuda(), [0, 0], [0, 0])


@pytest.mark.distributed(world_size=2)
def test_a_send_survives_the_release_of_its_tensor() -> None:
    """What ``deallocate_output_tensor`` does while the message is under way."""
    count = 4_000_000  # larger than any socket buffer, so the send cannot be over at once
    if dist.get_rank() == 0:
        works = []
        for value in range(4):
            x = torch.full((count,), float(value), device="cuda")
            works += dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
            x.data = torch.empty(1, device="cuda")
            del x
            scribble = torch.full((count,), -1.0, device="cuda")
            del scribble
        for work in works:
            work.wait()
    else:
        for value in range(4):
            out = torch.empty(count, device="cuda")
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, 0)]):
                work.wait()
            assert (out == value).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL has a unique id for each group")
@pytest.mark.distributed(world_size=4)
def test_groups_that_only_their_members_make_meet_their_own_ranks() -> None:
    """As Megatron's tests of MIMO make them; the ranks have made different numbers of groups before."""
    rank = dist.get_rank()
    if rank == 3:
        dist.new_group([3], backend="nccl")
    pair = [0, 1] if rank < 2 else [2, 3]
    for _ in range(3):
        total = torch.tensor([rank], device="cuda")
        dist.all_reduce(total, group=dist.new_group(pair, backend="nccl"))
        assert total.item() == sum(pair)


@pytest.mark.distributed(world_size=3)
def test_collectives_with_gradients_in_a_group_that_rank_0_is_not_in() -> None:
    """As Megatron's multimodal context parallelism gathers images."""
    group = dist.new_group([1, 2], backend="nccl")
    me = dist.get_rank() - 1
    if me < 0:
        return
    shapes = {(0, 0): (1, 2), (0, 1): (3, 2), (1, 0): (0, 2), (1, 1): (2, 2)}  # sender, receiver
    parts = [torch.full(shapes[me, to], 10.0 * me + to, device="cuda") for to in range(2)]
    for part in parts:
        part.requires_grad_()
    outs = [torch.empty(shapes[sender, me], device="cuda") for sender in range(2)]
    outs = distributed_functions.all_to_all(outs, parts, group=group)
    for sender, out in enumerate(outs):
        assert torch.equal(out, torch.full_like(out, 10.0 * sender + me))
    torch.cat(list(outs)).mul(me + 2).sum().backward()
    for to, part in enumerate(parts):
        assert part.grad is not None
        assert torch.equal(part.grad, torch.full_like(part, to + 2.0))

    x = mine(6, torch.float32).view(3, 2).requires_grad_()
    whole = distributed_functions._all_gather_base(torch.empty(6, 2, device="cuda"), x, group=group)
    factors = torch.arange(12.0, device="cuda").view(6, 2) * (me + 1)
    (whole * factors).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), 3 * torch.arange(12.0).view(6, 2)[3 * me : 3 * me + 3])


@pytest.mark.distributed(world_size=2)
def test_new_group_takes_nccl_and_its_options() -> None:
    options = dist.ProcessGroupNCCL.Options() if hasattr(dist, "ProcessGroupNCCL") else None
    group = dist.new_group([0, 1], backend="nccl", pg_options=options)
    x = mine(1, torch.float32)
    dist.all_reduce(x, group=group)
    assert x.item() == 10


@pytest.mark.distributed(world_size=2)
def test_reading_data_on_one_rank_leaves_the_device_streams_equal() -> None:
    """Only the first tensor-parallel rank has a data loader; dropout masks must stay the same."""
    torch.manual_seed(5)
    if dist.get_rank() == 0:
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        for workers in (0, 1):
            list(torch.utils.data.DataLoader(data, shuffle=True, num_workers=workers))
    draws = torch.empty(2, 16, device="cuda")
    dist.all_gather_into_tensor(draws, torch.rand(16, device="cuda"))
    assert torch.equal(draws[0], draws[1])


@pytest.mark.distributed(world_size=2)
def test_rng_tracker_keeps_its_promises(caplog: pytest.LogCaptureFixture) -> None:
    """Different in TP regions, equal outside; forks restore; dropout follows the tracker."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(123)

    def draws() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outside = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
        return outside, inside, torch.rand(8, device="cuda")

    first = draws()
    for tensor, equal in zip(first, (True, False, True), strict=True):
        both = torch.empty(2, tensor.numel(), device="cuda")
        dist.all_gather_into_tensor(both, tensor)
        assert torch.equal(both[0], both[1]) is equal
    assert not torch.equal(draws()[1], first[1]), "a fork goes on where the last one ended"
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    assert all(torch.equal(a, b) for a, b in zip(draws(), first, strict=True))
    assert "CPU RNG state changed" not in caplog.text
    parallel_state.destroy_model_parallel()
