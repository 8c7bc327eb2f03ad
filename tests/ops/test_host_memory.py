"""The counting CPU allocator: right numbers, and blocks that outlive it on either side."""

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
    torch.ops.accel._host_memory_install()
    yield torch.ops.accel
    torch.ops.accel._host_memory_uninstall()


def test_counts_bytes_peak_and_blocks(host_memory):
    current, _, allocations, frees = host_memory._host_memory_stats()
    host_memory._host_memory_reset_peak()
    small, large = torch.empty(MIB, dtype=torch.uint8), torch.empty(4 * MIB, dtype=torch.uint8)
    del large
    now, peak, allocations_now, frees_now = host_memory._host_memory_stats()
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
    current, _, allocations, frees = host_memory._host_memory_stats()

    def churn() -> None:
        for _ in range(500):
            torch.empty(1000)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now, _, allocations_now, frees_now = host_memory._host_memory_stats()
    assert now == current
    assert allocations_now - allocations == frees_now - frees == 2000


def test_process_ends_well_with_blocks_alive():
    script = (
        "import torch; from accel.ops import _native; assert _native.reason() is None\n"
        "torch.ops.accel._host_memory_install(); kept = torch.ones(1 << 20)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
