"""`out += a^T b` in Triton, and through cuBLAS where there is a GPU: the tests of the CPU's kernel."""

import pytest
import torch

from accel._triton import gemm_accumulate as kernels
from tests.ops import test_gemm_accumulate as on_cpu
from tests.ops.contract import LAYOUTS, change_layout
from tests.triton.harness import DEVICE, HAS_GPU, kernels_launched
from tests.triton.in_place import in_place_on_device


@pytest.fixture(params=["triton", "cublas"][: 1 + HAS_GPU])
def product(request, triton_kernels, monkeypatch):
    """The op: the public function takes no CPU tensors where oneDNN has no kernel for this CPU."""
    if request.param == "triton":
        monkeypatch.setattr(kernels, "_cublas_sums_in_fp32", lambda device: False)
    product = in_place_on_device(torch.ops.accel.gemm_accumulate.default)
    monkeypatch.setattr(on_cpu, "gemm_accumulate", product)
    return product


@pytest.mark.usefixtures("product")
class TestAsOnTheCpu:
    @pytest.mark.parametrize(
        "shape", [(64, 64, 512), (130, 70, 203), (65, 63, 129), (1, 1, 1)], ids=str
    )
    def test_matches_fp64(self, shape):
        on_cpu.check(*on_cpu.matrices(*shape))

    @pytest.mark.parametrize("layouts", zip(LAYOUTS, LAYOUTS[::-1], strict=True), ids=str)
    @pytest.mark.parametrize("shape", [(70, 33, 65), (0, 5, 3), (4, 0, 3), (3, 4, 0)], ids=str)
    def test_any_layout(self, shape, layouts):
        out, a, b = on_cpu.matrices(*shape)
        a, b = change_layout(a, layouts[0]), change_layout(b, layouts[1])
        on_cpu.check(out, a, b, on_cpu.WORST)

    @pytest.mark.parametrize("k", [40, 41, 513])
    def test_reads_slices_and_transposes_in_place(self, k):
        on_cpu.test_reads_slices_of_wider_matrices_and_transposes_in_place(k)

    def test_writes_into_a_slice_and_nowhere_else(self):
        on_cpu.test_writes_into_a_slice_and_nowhere_else()

    def test_micro_batches_sum_up_to_the_same_bits(self, product):
        out, a, b = on_cpu.matrices(50, 40, 90)
        results = []
        for _ in range(2):
            total = out.clone()
            for part in range(4):
                product(total, a.roll(part, 0), b)
            results.append(total)
        assert torch.equal(*results)
        parts = sum(a.roll(part, 0).double().t() @ b.double() for part in range(4))
        torch.testing.assert_close(results[0].double(), out.double() + parts, rtol=1e-5, atol=1e-3)

    def test_nan_stays_visible(self):
        on_cpu.test_nan_stays_visible()


@pytest.mark.usefixtures("triton_kernels")
class TestTriton:
    @pytest.fixture(autouse=True)
    def without_cublas(self, monkeypatch):
        monkeypatch.setattr(kernels, "_cublas_sums_in_fp32", lambda device: False)

    @pytest.mark.parametrize("tile", [kernels.LARGE_TILE, kernels.SMALL_TILE], ids=str)
    def test_every_tile_and_group(self, tile, monkeypatch):
        """Groups of tiles that are whole, and a last one that is not."""
        tiny = {**tile, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}
        for name in ("LARGE_TILE", "SMALL_TILE"):
            monkeypatch.setattr(kernels, name, tiny)
        product = in_place_on_device(torch.ops.accel.gemm_accumulate.default)
        monkeypatch.setattr(on_cpu, "gemm_accumulate", product)
        on_cpu.check(*on_cpu.matrices(16 * 9 + 3, 70, 33))

    def test_offsets_beyond_32_bits(self, monkeypatch):
        """Pretended: such strides want such memory. The kernel for them must be right anyway."""
        monkeypatch.setattr(kernels, "wide", lambda *strides: True)
        product = in_place_on_device(torch.ops.accel.gemm_accumulate.default)
        monkeypatch.setattr(on_cpu, "gemm_accumulate", product)
        on_cpu.check(*on_cpu.matrices(70, 33, 65))

    def test_what_is_launched(self):
        out, a, b = (t.to(DEVICE) for t in on_cpu.matrices(9, 10, 11))
        work = torch.ops.accel.gemm_accumulate
        assert kernels_launched(lambda: work(out, a, b)) == ["_gemm_accumulate"]
        assert kernels_launched(lambda: work(out, a[:0], b[:0])) == []

    def test_opcheck(self):
        out, a, b = (t.to(DEVICE) for t in on_cpu.matrices(9, 10, 11))
        torch.library.opcheck(torch.ops.accel.gemm_accumulate.default, (out, a, b))

    def test_autograd_sees_the_change(self):
        out, a, b = (t.to(DEVICE) for t in on_cpu.matrices(9, 10, 11))
        before = out._version
        torch.ops.accel.gemm_accumulate(out, a, b)
        assert out._version > before

    def test_checks_again(self):
        out, a, b = (t.to(DEVICE) for t in on_cpu.matrices(4, 5, 6))
        bad = [(out, a, b[:5]), (out, a.float(), b), (out.t().contiguous().t(), a, b)]
        for arguments in bad:
            with pytest.raises(ValueError, match="gemm_accumulate"):
                torch.ops.accel.gemm_accumulate(*arguments)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_cublas_is_found():
    """From torch 2.11 on, to be told if it goes."""
    assert kernels._cublas_sums_in_fp32(torch.device("cuda", 0))
