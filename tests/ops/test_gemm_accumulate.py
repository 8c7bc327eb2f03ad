"""`out += a^T b`: against fp64 within twice the error of torch in fp32, in place, the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import gemm_accumulate, gemm_accumulate_ref
from accel.ops.gemm_accumulate import device_reason, unsupported_reason
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import LAYOUTS, change_layout

needs_kernel = pytest.mark.skipif(
    device_reason("cpu") is not None, reason=f"no kernel: {device_reason('cpu')}"
)
# oneDNN adds up the pairs of a piece of 512 one after the other, torch's fp32 product in blocks. With
# random signs 256 roundings add up to some 16; where all terms are equal ("expanded"), to all 256.
RANDOM, WORST = 16, 256


def matrices(m: int, n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(k, size, generator=generator).to(dtype) for size in (m, n))
    return torch.randn(m, n, generator=generator), a, b


def check(out, a, b, roundings: int = RANDOM) -> None:
    ours, plain = out.clone(), out.clone()
    gemm_accumulate(ours, a, b)
    gemm_accumulate_ref(plain, a, b)
    exact = out.double() + a.double().t() @ b.double()
    terms = out.abs().double() + a.abs().double().t() @ b.abs().double()
    magnitude = terms.max().item() if terms.numel() else 0.0
    assert_close_to_baseline(ours, plain, exact, magnitude=magnitude, roundings=roundings)


@needs_kernel
@pytest.mark.parametrize(
    "shape", [(64, 64, 512), (192, 130, 1027), (65, 63, 511), (1, 1, 1)], ids=str
)
def test_matches_fp64(shape):
    out, a, b = matrices(*shape)
    assert unsupported_reason(out, a, b) is None
    check(out, a, b)


def test_whoever_saved_the_sum_hears_of_it():
    for out, a, b in (matrices(5, 3, 7), matrices(5, 3, 7, dtype=torch.float32)):
        z = torch.ones_like(out, requires_grad=True)
        y = (out * z).sum()
        gemm_accumulate(out, a, b)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(0, 70),
    n=st.integers(0, 70),
    k=st.sampled_from([0, 1, 2, 3, 8, 31, 64, 513]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
)
def test_any_shape_and_layout(m, n, k, layouts):
    out, a, b = matrices(m, n, k)
    check(out, change_layout(a, layouts[0]), change_layout(b, layouts[1]), WORST)


@needs_kernel
@pytest.mark.parametrize("k", [40, 41, 513])
def test_reads_slices_of_wider_matrices_and_transposes_in_place(k):
    """Gradients of several layers lie side by side, and a^T of `out += a @ b` is a transpose."""
    wide_a, wide_b = matrices(200, 180, k)[1:]
    a, b = wide_a[:, 11:80], wide_b[:, 7:60]
    out = torch.zeros(69, 53)
    check(out, a, b)
    check(out, a.t().contiguous().t(), b)
    wide_rows = torch.nn.functional.pad(a.t(), (3, 2), value=torch.nan)
    check(out, wide_rows[:, 3:-2].t(), b)


@needs_kernel
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 513, 1025), (257, 255, 513), (1, 600, 1024), (600, 31, 1100)]
)
def test_sums_of_whole_numbers_are_exact_across_tiles(m, n, k):
    """Tiles are up to 256 x 256 x 512; a wrong row, column or depth anywhere changes a whole number."""
    torch.manual_seed(0)
    a, b = torch.randint(-3, 4, (k, m)).bfloat16(), torch.randint(-3, 4, (k, n)).bfloat16()
    start = torch.randint(-5, 6, (m, n)).float()
    want = start + (a.double().t() @ b.double()).float()
    for layout in (a, a.t().contiguous().t()):
        out = start.clone()
        gemm_accumulate(out, layout, b)
        assert torch.equal(out, want)


@needs_kernel
def test_needs_no_copy_of_a_transpose():
    from accel.testing.bench import _peak_bytes

    out, a, b = matrices(4096, 8, 512)
    rows = a.t().contiguous()
    assert _peak_bytes(lambda: gemm_accumulate(out, rows.t(), b)) < rows.nbytes / 4


@needs_kernel
def test_writes_into_a_slice_and_nowhere_else():
    """`main_grad` is a view into Megatron's gradient buffer."""
    buffer = torch.full((70, 80), 7.0)
    out = buffer[3:40, 5:60]
    _, a, b = matrices(37, 55, 40)
    want = out.clone()
    gemm_accumulate_ref(want, a, b)
    gemm_accumulate(out, a, b)
    torch.testing.assert_close(out, want)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside[3:40, 5:60] = False
    assert (buffer[outside] == 7.0).all()


@needs_kernel
def test_micro_batches_sum_up_and_bits_do_not_depend_on_threads():
    out, a, b = matrices(150, 200, 900)
    results = []
    threads = torch.get_num_threads()
    try:
        for num_threads in (threads, threads, 1, 3):
            torch.set_num_threads(num_threads)
            total = out.clone()
            for part in range(4):
                gemm_accumulate(total, a.roll(part, 0), b)
            results.append(total)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, results[0]) for r in results)
    parts = sum(a.roll(part, 0).double().t() @ b.double() for part in range(4))
    torch.testing.assert_close(results[0].double(), out.double() + parts, rtol=1e-5, atol=1e-3)


@needs_kernel
def test_nan_stays_visible():
    out, a, b = matrices(20, 30, 40)
    a[5, 7] = torch.nan
    gemm_accumulate(out, a, b)
    assert out.isnan().any(1).tolist() == [row == 7 for row in range(20)]


@needs_kernel
def test_opcheck_and_compile():
    out, a, b = matrices(9, 10, 11)
    torch.library.opcheck(torch.ops.accel.gemm_accumulate.default, (out, a, b))
    compiled = torch.compile(gemm_accumulate, fullgraph=True, backend="aot_eager")
    ours, theirs = out.clone(), out.clone()
    gemm_accumulate(ours, a, b)
    compiled(theirs, a, b)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_take_the_reference(dtype):
    out, a, b = matrices(9, 10, 11, dtype=dtype)
    assert "the kernel takes float32, bfloat16" in unsupported_reason(out, a, b)
    want = out.clone()
    gemm_accumulate_ref(want, a, b)
    gemm_accumulate(out, a, b)
    assert torch.equal(out, want)


def test_rejects_shapes_that_do_not_fit():
    out, a, b = matrices(4, 5, 6)
    for bad in ((out, a, b[:5]), (out[:3], a, b), (out, a, b[:, :2]), (out[0], a, b)):
        with pytest.raises(ValueError, match=r"needs out \[M, N\], a \[K, M\] and b \[K, N\], got"):
            gemm_accumulate(*bad)


@needs_kernel
def test_kernel_checks_again():
    out, a, b = matrices(4, 5, 6)
    for bad in ((out, a, b[:5]), (out, a.float(), b), (out.t().contiguous().t(), a, b)):
        with pytest.raises(ValueError, match="gemm_accumulate"):
            torch.ops.accel.gemm_accumulate(*bad)
