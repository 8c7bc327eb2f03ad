"""The emulator finds the faults that it is there for; else what passes on it would prove little."""

import ctypes

import pytest
import torch

from tests.cuda import emulator
from tests.cuda.harness import HAS_GPU

pytestmark = pytest.mark.skipif(
    HAS_GPU or not emulator.COMPILER, reason="a GPU needs no emulator, and it needs g++"
)

FAULTS = {
    "none": 0,
    "barrier missing": 1,
    "barrier": 2,
    "shuffle": 3,
    "shared memory": 4,
    "misaligned": 5,
    "assertion": 6,
}
FAULTS_OF_COPIES = {
    "none": 7,
    "no wait": 8,
    "refilled early": 9,
    "bytes missing": 10,
    "never begun": 11,
    "left early": 12,
}


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    library = ctypes.CDLL(str(emulator.faulty_kernels()))
    library.run_faulty.restype = ctypes.c_char_p
    library.run_faulty.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.run_copied.restype = ctypes.c_char_p
    library.run_copied.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.widened.restype = ctypes.c_float
    library.widened.argtypes = [ctypes.c_int, ctypes.c_int]
    library.narrowed.argtypes = [ctypes.c_float, ctypes.c_int]
    return library


def run(kernels: ctypes.CDLL, fault: str) -> tuple[str, torch.Tensor]:
    out = torch.zeros(2, 64)
    return kernels.run_faulty(out.data_ptr(), FAULTS[fault]).decode(), out


def test_a_kernel_without_faults(kernels):
    for _ in range(2):
        error, out = run(kernels, "none")
        assert not error
        assert torch.equal(out, torch.full((2, 64), 63.0))


def test_a_missing_barrier_shows_as_nan(kernels):
    error, out = run(kernels, "barrier missing")
    assert not error
    assert out.isnan().any()


def test_shared_memory_that_nobody_wrote_is_nan(kernels):
    error, out = run(kernels, "shared memory")
    assert not error
    assert out.isnan().all()


def test_what_some_threads_never_reach_is_an_error_and_the_next_kernel_runs(kernels):
    error, _ = run(kernels, "barrier")
    assert "block 0: 63 threads wait at a barrier and 0 at a shuffle" in error
    error, _ = run(kernels, "shuffle")
    assert "0 threads wait at a barrier and 31 at a shuffle" in error
    test_a_kernel_without_faults(kernels)


def test_16_bytes_that_begin_between_multiples_of_16_are_an_error(kernels):
    error, _ = run(kernels, "misaligned")
    assert "16 bytes that do not begin at a multiple of 16" in error
    test_a_kernel_without_faults(kernels)


def test_an_assertion_that_fails_is_an_error(kernels):
    error, _ = run(kernels, "assertion")
    assert "assertion failed: thread_is_not_the_last" in error
    test_a_kernel_without_faults(kernels)


def run_copied(kernels: ctypes.CDLL, fault: str) -> tuple[str, torch.Tensor]:
    """Its error, and what it makes of [turn, block, thread] = 128 turn + 64 block + thread."""
    out = torch.arange(256.0).view(2, 2, 64)
    error = kernels.run_copied(out.data_ptr(), FAULTS_OF_COPIES[fault]).decode()
    return error, out[0]


def right(block: int) -> torch.Tensor:
    first = torch.arange(64.0) + 64 * block
    return first + (first + 128) + 64 * (1 - block)


def test_bulk_copies_and_clusters(kernels):
    for _ in range(4):
        error, out = run_copied(kernels, "none")
        assert not error
        assert torch.equal(out, torch.stack([right(0), right(1)]))


@pytest.mark.parametrize("fault", ["no wait", "refilled early"])
def test_a_missing_wait_of_a_bulk_copy_shows(kernels, fault):
    """In some launches copies are made at once, in others not before somebody waits."""
    shown = 0
    for _ in range(4):
        error, out = run_copied(kernels, fault)
        shown += bool(error) or not torch.equal(out, torch.stack([right(0), right(1)]))
    assert shown


def test_bytes_that_never_come_are_an_error(kernels):
    error, _ = run_copied(kernels, "bytes missing")
    assert "128 threads wait for bytes that never come" in error
    error, _ = run_copied(kernels, "never begun")
    assert "Arrivals that are used before they begin" in error
    error, _ = run_copied(kernels, "left early")
    assert "64 threads wait at a barrier" in error
    test_bulk_copies_and_clusters(kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_pytorchs(kernels, dtype):
    is_half = dtype == torch.float16
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    wide = every.view(dtype).float()
    got = torch.tensor([kernels.widened(int(bits) & 0xFFFF, is_half) for bits in every])
    assert torch.equal(got.nan_to_num(7), wide.nan_to_num(7))
    values = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.randint(
        -30, 20, (20000,), generator=torch.Generator().manual_seed(1)
    )
    halfway = (wide[wide.isfinite()][:-1] + wide[wide.isfinite()][1:]) / 2
    values = torch.cat([values, halfway, torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    got = torch.tensor([kernels.narrowed(float(v), is_half) for v in values], dtype=torch.int32)
    assert torch.equal(got.to(torch.int16), values.to(dtype).view(torch.int16))


def test_writes_beside_a_tensor_are_counted():
    torch.ops.load_library(str(emulator.library()))
    guard = torch.ops.accel_emulated
    guard._damaged_blocks()
    guard._watch_memory(True)
    try:
        x = torch.empty(5)
        assert x.isnan().all(), "new memory is NaN"
        ctypes.memset(x.data_ptr() + 4 * 5, 0, 1)
        del x
        y = torch.empty(5)
        ctypes.memset(y.data_ptr() - 1, 0, 1)
        del y
        fine = torch.zeros(5)
        del fine
    finally:
        guard._watch_memory(False)
    assert guard._damaged_blocks() == 2
