"""The counting CPU allocator: right numbers, blocks that outlive it on either side, and a limit."""

import gc
import os
import re
import subprocess
import sys
import threading

import pytest
import torch

from tests.ops.contract import needs_native

pytestmark = needs_native

MIB = 1 << 20
SLACK = 64 * 1024  # malloc rounds up, to pages at most


@pytest.fixture
def host_memory():
    gc.collect()  # earlier tests' cycles, so that their tensors do not go in the middle of a count
    torch.ops.accel._host_memory_install()
    yield torch.ops.accel
    torch.ops.accel._host_memory_uninstall()


def test_counts_bytes_peak_and_blocks(host_memory):
    current, _, allocations, frees, *_ = host_memory._host_memory_stats()
    host_memory._host_memory_reset_peak()
    small, large = torch.empty(MIB, dtype=torch.uint8), torch.empty(4 * MIB, dtype=torch.uint8)
    del large
    now, peak, allocations_now, frees_now, *_ = host_memory._host_memory_stats()
    assert MIB <= now - current <= MIB + SLACK
    assert 5 * MIB <= peak - current <= 5 * MIB + SLACK
    assert (allocations_now - allocations, frees_now - frees) == (2, 1)
    del small
    assert host_memory._host_memory_stats()[0] == current


def test_reset_peak_starts_from_what_is_allocated(host_memory):
    kept = torch.empty(MIB)
    torch.empty(8 * MIB)
    host_memory._host_memory_reset_peak()
    current, peak, *_ = host_memory._host_memory_stats()
    assert peak == current >= kept.nbytes


def test_blocks_outlive_uninstall_and_install():
    ops = torch.ops.accel
    before = torch.full((MIB,), 1.0)
    ops._host_memory_install()
    current = ops._host_memory_stats()[0]
    during = torch.full((MIB,), 2.0)
    del before  # PyTorch's own block: not counted, freed right
    assert ops._host_memory_stats()[0] >= current + during.nbytes
    ops._host_memory_uninstall()
    after = torch.full((MIB,), 3.0)
    assert (during + after).sum() == 5 * MIB
    del during
    assert ops._host_memory_stats()[0] == current
    allocations = ops._host_memory_stats()[2]
    torch.empty(MIB)
    assert ops._host_memory_stats()[2] == allocations


def test_install_and_uninstall_twice_are_once(host_memory):
    host_memory._host_memory_install()
    host_memory._host_memory_uninstall()
    host_memory._host_memory_uninstall()
    allocations = host_memory._host_memory_stats()[2]
    torch.empty(MIB)
    assert host_memory._host_memory_stats()[2] == allocations


def test_empty_tensor_and_resize(host_memory):
    current = host_memory._host_memory_stats()[0]
    x = torch.empty(0)
    assert host_memory._host_memory_stats()[0] == current
    x.resize_(MIB)
    assert host_memory._host_memory_stats()[0] >= current + 4 * MIB
    x.untyped_storage().resize_(0)
    assert host_memory._host_memory_stats()[0] == current


def test_counts_from_many_threads(host_memory):
    current, _, allocations, frees, *_ = host_memory._host_memory_stats()

    def churn() -> None:
        for _ in range(500):
            torch.empty(1000)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now, _, allocations_now, frees_now, *_ = host_memory._host_memory_stats()
    assert now == current
    assert allocations_now - allocations == frees_now - frees == 2000


def test_process_ends_well_with_blocks_alive():
    script = (
        "import torch; from accel.ops import _native; assert _native.reason() is None\n"
        "torch.ops.accel._host_memory_install(); kept = torch.ones(1 << 20)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def _block() -> torch.Tensor:
    return torch.empty(4 * MIB, dtype=torch.uint8)


def _block_bytes(ops) -> int:
    """What a block counts: malloc's rounding is part of it."""
    current = ops._host_memory_stats()[0]
    block = _block()
    num_bytes = ops._host_memory_stats()[0] - current
    del block
    return num_bytes


def test_limit_is_exact(host_memory):
    num_bytes = _block_bytes(host_memory)
    current = host_memory._host_memory_stats()[0]
    host_memory._host_memory_limit(current + num_bytes)
    block = _block()
    assert host_memory._host_memory_stats()[0] == current + num_bytes
    del block
    for too_little in (
        num_bytes - 1,
        4 * MIB - 1,
        1,
    ):  # malloc's rounding alone, and less than was asked for
        host_memory._host_memory_limit(current + too_little)
        with pytest.raises(torch.OutOfMemoryError):
            _block()


def test_refusal_says_why_and_counts_nothing(host_memory):
    kept = _block()
    current, _, allocations, frees, refusals, _ = host_memory._host_memory_stats()
    host_memory._host_memory_reset_peak()
    limit = current + MIB
    host_memory._host_memory_limit(limit)
    text = f"no room for {kept.nbytes} bytes: {current} are in use, and the limit is {limit}"
    with pytest.raises(torch.OutOfMemoryError, match=f"^host memory: {re.escape(text)}$"):
        _block()
    assert host_memory._host_memory_stats() == [
        current,
        current,
        allocations,
        frees,
        refusals + 1,
        limit,
    ]


def test_what_no_machine_has_is_refused_by_the_limit(host_memory):
    host_memory._host_memory_limit(host_memory._host_memory_stats()[0] + MIB)
    with pytest.raises(torch.OutOfMemoryError, match="no room for"):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_freed_memory_is_usable_again(host_memory):
    num_bytes = _block_bytes(host_memory)
    host_memory._host_memory_limit(host_memory._host_memory_stats()[0] + num_bytes)
    for _ in range(3):
        block = _block()
        with pytest.raises(torch.OutOfMemoryError):
            _block()
        del block


def test_limit_below_what_is_in_use_stops_new_blocks_only(host_memory):
    kept = torch.ones(MIB)
    host_memory._host_memory_limit(1)
    torch.empty(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1)
    host_memory._host_memory_limit(0)
    assert kept.sum() == MIB


def test_limit_holds_for_all_threads_together(host_memory):
    num_bytes = _block_bytes(host_memory)
    current = host_memory._host_memory_stats()[0]
    limit = current + 4 * num_bytes + num_bytes // 2  # malloc rounds in a thread as it likes
    host_memory._host_memory_limit(limit)
    kept, refused = [], []

    def fill() -> None:
        for _ in range(4):
            try:
                kept.append(_block())
            except torch.OutOfMemoryError as error:
                refused.append(error)

    _in_threads(fill, 4)
    assert len(kept) == 4
    assert len(refused) == 12
    assert current + sum(b.nbytes for b in kept) <= host_memory._host_memory_stats()[0] <= limit


def _in_threads(call, num_threads=1) -> None:
    threads = [threading.Thread(target=call) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_limit_goes_with_the_allocator(host_memory):
    host_memory._host_memory_limit(1)
    host_memory._host_memory_uninstall()
    torch.empty(MIB)
    host_memory._host_memory_limit(0)
    with pytest.raises(RuntimeError, match="not installed"):
        host_memory._host_memory_limit(1)
    host_memory._host_memory_install()
    assert host_memory._host_memory_stats()[5] == 0
    torch.empty(MIB)


def test_limit_is_not_negative(host_memory):
    with pytest.raises(ValueError, match="0 \\(none\\) or more, got -1"):
        host_memory._host_memory_limit(-1)


@pytest.fixture
def uncounted(host_memory):
    assert host_memory._host_memory_uncounted(True) is False
    yield host_memory
    host_memory._host_memory_uncounted(False)


def test_uncounted_blocks_are_passed_by(uncounted):
    before = uncounted._host_memory_stats()
    uncounted._host_memory_limit(1)
    block = torch.ones(MIB)
    uncounted._host_memory_limit(0)
    assert uncounted._host_memory_stats() == before
    assert uncounted._host_memory_is_pinned(block)
    assert uncounted._host_memory_is_pinned(block.view(2, -1)[1])
    assert not uncounted._host_memory_is_pinned(torch.empty(0))
    assert not uncounted._host_memory_is_pinned(torch.empty(1, device="meta"))
    assert uncounted._host_memory_uncounted(False) is True
    counted = torch.ones(MIB)
    assert not uncounted._host_memory_is_pinned(counted)
    del block  # freed as what it was allocated as
    assert uncounted._host_memory_stats()[0] >= before[0] + counted.nbytes
    assert uncounted._host_memory_uncounted(True) is False
    del counted
    assert uncounted._host_memory_stats()[0] == before[0]


def test_uncounted_blocks_outlive_uninstall(uncounted):
    before = uncounted._host_memory_stats()
    block = torch.ones(MIB)
    uncounted._host_memory_uninstall()
    assert uncounted._host_memory_is_pinned(block)
    assert not uncounted._host_memory_is_pinned(torch.ones(MIB))
    assert block.sum() == MIB
    del block
    assert uncounted._host_memory_stats() == before


def test_uncounted_is_the_threads_own(uncounted):
    allocations = uncounted._host_memory_stats()[2]
    blocks = []
    _in_threads(lambda: blocks.append((uncounted._host_memory_uncounted(False), _block())))
    assert uncounted._host_memory_stats()[2] == allocations + 1
    was_uncounted, block = blocks.pop()
    assert not was_uncounted
    assert not uncounted._host_memory_is_pinned(block)


def test_a_forked_process_has_no_limit(host_memory):
    """It uses memory of the host: a worker of a data loader."""
    host_memory._host_memory_limit(host_memory._host_memory_stats()[0] + MIB)
    child = os.fork()
    if child == 0:
        try:
            torch.empty(64 * MIB, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 * MIB, dtype=torch.uint8)
