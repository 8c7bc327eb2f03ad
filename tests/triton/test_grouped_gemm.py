"""The grouped products' Triton kernels: the contract, ragged layouts, gradients added to main gradients.

On a GPU the contract is also put to torch's own grouped product, where ours calls it.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton import grouped_gemm as kernels
from accel._triton.grouped_gemm import _counts
from accel.ops import grouped_gemm, grouped_gemm_ref
from accel.ops.grouped_gemm import accumulate_wgrad
from tests.ops import test_grouped_gemm as on_cpu
from tests.ops.contract import LAYOUTS, change_layout, run
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton, kernels_launched
from tests.triton.in_place import in_place_on_device

DTYPES = on_cpu.DTYPES
TINY = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 3}


class TestGroupedGemm(OnTriton, on_cpu.TestGroupedGemm):
    def opchecks(self):
        """One tensor of weights, and the weight gradient: the rest is the same code."""
        stacked, _, wgrad = list(super().opchecks())[:3]
        return [stacked, wgrad]

    @pytest.mark.parametrize("transpose_b", [False, True])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_layout(self, layout, transpose_b):
        inputs = on_cpu.product_inputs(
            [2, 0, 13, 1], 17, 33, torch.bfloat16, transpose_b=transpose_b
        )
        x, weight, counts = inputs.tensors
        x = x if layout == "expanded" else change_layout(x, layout)
        self.check(inputs._replace(tensors=[x, change_layout(weight, layout), counts]))

    @pytest.mark.parametrize(
        ("counts", "inner", "num_cols"),
        [([0, 0], 16, 8), ([0, 3], 1, 1), ([1] * 5, 64, 7), ([4, 4], 2, 0), ([40, 0, 17], 31, 9)],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_any_shape(self, counts, inner, num_cols, dtype):
        self.check(on_cpu.product_inputs(counts, inner, num_cols, dtype, transpose_b=True))

    @pytest.mark.parametrize("transpose_b", [False, True])
    def test_more_tiles_than_a_group_has(self, transpose_b, monkeypatch):
        """Experts of whole groups of tiles, of parts of one, and with rows of a tile that is not full."""
        for name in ("TILE", "FEW_ROWS_TILE", "FP32_TILE"):
            monkeypatch.setattr(kernels, name, TINY)
        counts = [16 * 9 + 5, 0, 16 * 8, 1]
        self.check(on_cpu.product_inputs(counts, 20, 24, torch.bfloat16, transpose_b=transpose_b))

    def test_offsets_beyond_32_bits(self, monkeypatch):
        """Pretended: such strides want such memory. The kernel for them must be right anyway."""
        monkeypatch.setattr(kernels, "wide", lambda *strides: True)
        self.check(self.inputs(torch.bfloat16))

    def test_more_experts_than_a_warp_has_threads(self, monkeypatch):
        monkeypatch.setattr(kernels, "FEW_ROWS_TILE", TINY)
        counts = [(i * 7) % 3 for i in range(35)]
        self.check(on_cpu.product_inputs(counts, 16, 16, torch.bfloat16, transpose_b=True))

    def test_torchs_grouped_product(self, monkeypatch):
        """What is handed to it, on the CPU too, where it is a loop; and that odd shapes are not."""
        monkeypatch.setattr(kernels, "_has_library_kernel", lambda device: True)
        for transpose_b in (False, True):
            counts = [5, 0, 11, 0]
            inputs = on_cpu.product_inputs(counts, 16, 24, torch.bfloat16, transpose_b=transpose_b)
            self.check(inputs)
            assert kernels_launched(lambda inputs=inputs: run(self.op, inputs)) == []
        odd = on_cpu.product_inputs([5, 3], 17, 24, torch.bfloat16, transpose_b=True)
        assert len(kernels_launched(lambda: run(self.op, odd))) == 3

    def test_rows_that_torchs_product_pads_are_not_seen(self, monkeypatch):
        """On a GPU its rows begin at multiples of 16 bytes; what is traced has none between them."""
        monkeypatch.setattr(kernels, "_has_library_kernel", lambda device: True)
        product = torch._grouped_mm

        def padded(x, weight, offsets):
            y = product(x, weight, offsets)
            return y.new_empty(len(y), -(-y.shape[1] // 8) * 8)[:, : y.shape[1]].copy_(y)

        monkeypatch.setattr(torch, "_grouped_mm", padded)
        inputs = on_cpu.product_inputs([5, 0, 11, 0], 16, 20, torch.bfloat16, transpose_b=True)
        self.check(inputs)
        x, weight, counts = inputs.tensors
        assert kernels.grouped_gemm(x, [weight], counts, True).is_contiguous()

    def test_experts_without_tokens_have_no_weight_gradient(self, monkeypatch):
        """Whatever torch's product says, on sm_100."""
        for name in ("_has_library_kernel", "_writes_garbage_without_tokens"):
            monkeypatch.setattr(kernels, name, lambda device: True)
        garbage = lambda left, right, offsets: torch.full((4, 24, 16), 7.0, dtype=left.dtype)  # noqa: E731
        monkeypatch.setattr(torch, "_grouped_mm", garbage)
        counts = torch.tensor([5, 0, 11, 0])
        dy, x = torch.ones(16, 24).bfloat16(), torch.ones(16, 16).bfloat16()
        dw = kernels.grouped_gemm_wgrad(dy, x, counts, True)
        assert dw.amax((1, 2)).tolist() == [7.0, 0.0, 7.0, 0.0]

    @pytest.mark.parametrize(
        ("counts", "ends"),
        [
            ([3, 6, 2], [3, 4, 4]),
            ([-1, 3, 1], [0, 3, 4]),
            ([5, -1, 0], [4, 4, 4]),
            ([2**40, 2**33, 2**62], [4, 4, 4]),
            ([1, 2**32 + 1, 2], [1, 4, 4]),
            ([1, 0, 1], [1, 1, 2]),
        ],
    )
    def test_torchs_product_is_told_of_rows_that_are_there(self, counts, ends, monkeypatch):
        """Counts on a device may lie: negative ones are 0, and the last expert's rows end with x."""
        for name in ("_has_library_kernel", "_writes_garbage_without_tokens"):
            monkeypatch.setattr(kernels, name, lambda device: True)
        told, product = [], torch._grouped_mm

        def listened(left, right, offsets):
            assert offsets.dtype == torch.int32
            told.append(offsets.tolist())
            assert told[-1] == ends
            return product(left, right, offsets)

        monkeypatch.setattr(torch, "_grouped_mm", listened)
        x, weight = torch.ones(4, 16).bfloat16(), torch.ones(3, 16, 8).bfloat16()
        y = kernels.grouped_gemm(x, [weight], torch.tensor(counts), False)
        assert (y[: ends[-1]] == 16).all()
        dw = kernels.grouped_gemm_wgrad(torch.ones(4, 8).bfloat16(), x, torch.tensor(counts), False)
        assert dw[:, 0, 0].tolist() == torch.tensor([0, *ends]).diff().tolist()
        assert told == [ends, ends]

    def test_nothing_is_launched_for_no_columns(self):
        x, weight, counts = on_cpu.product_inputs([0, 0], 4, 4, torch.bfloat16, transpose_b=True)[0]
        assert kernels_launched(lambda: self.op(x, weight, counts, transpose_b=True)) == []


@pytest.fixture
def on_triton(triton_kernels, monkeypatch):
    """The main gradients travel to the GPU and back, where there is one."""
    monkeypatch.setattr(on_cpu, "accumulate_wgrad", in_place_on_device(accumulate_wgrad))


@pytest.mark.usefixtures("on_triton")
class TestMainGradients:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("transpose_b", [False, True])
    def test_are_summed_in_fp32(self, transpose_b, dtype):
        on_cpu.test_main_gradients_are_summed_in_fp32(transpose_b, dtype)

    @pytest.mark.parametrize("transpose_b", [False, True])
    def test_a_list_of_them_and_of_weights(self, transpose_b):
        """Each somewhere else in memory, one of them not aligned; experts without rows keep theirs."""
        inputs = on_cpu.product_inputs([3, 0, 4], 16, 24, torch.bfloat16, transpose_b=transpose_b)
        x, weight, counts = (t.to(DEVICE) for t in inputs.tensors)
        dy = torch.randn(7, 24, device=DEVICE).bfloat16()
        stacked = torch.randn(weight.shape, device=DEVICE)
        each = [change_layout(g.clone(), "offset") for g in stacked]
        each[1].fill_(torch.nan)
        names = kernels_launched(
            lambda: accumulate_wgrad(dy, x, counts, each, transpose_b=transpose_b)
        )
        assert names == ["_weight_gradient"]
        accumulate_wgrad(dy, x, counts, each, transpose_b=transpose_b)
        accumulate_wgrad(dy, x, counts, stacked, transpose_b=transpose_b)
        assert torch.equal(each[0], stacked[0])
        assert torch.equal(each[2], stacked[2])
        assert each[1].isnan().all()

        weights = [change_layout(w.clone(), "offset") for w in weight]
        y = grouped_gemm(x, weight, counts, transpose_b=transpose_b)
        assert torch.equal(y, grouped_gemm(x, weights, counts, transpose_b=transpose_b))
        weights[1] = weights[1].t().contiguous().t()  # laid out in another way than the others
        assert torch.equal(y, grouped_gemm(x, weights, counts, transpose_b=transpose_b))

    def test_in_another_layout_each(self):
        """No kernel takes these; the library's products do, one by one."""
        inputs = on_cpu.product_inputs([3, 4], 16, 24, torch.bfloat16, transpose_b=False)
        x, _, counts = (t.to(DEVICE) for t in inputs.tensors)
        dy = torch.randn(7, 24, device=DEVICE).bfloat16()
        grads = [torch.zeros(16, 24, device=DEVICE), torch.zeros(24, 16, device=DEVICE).t()]
        want = torch.zeros(2, 16, 24, device=DEVICE)
        accumulate_wgrad(dy, x, counts, grads)
        accumulate_wgrad(dy, x, counts, want)
        torch.testing.assert_close(torch.stack(grads), want, rtol=1e-5, atol=1e-5)

    def test_autograd_sees_the_change(self):
        x, dy = torch.ones(7, 16, device=DEVICE), torch.ones(7, 24, device=DEVICE)
        grads = torch.zeros(2, 16, 24, device=DEVICE)
        accumulate_wgrad(dy, x, torch.tensor([3, 4]), grads)
        assert grads._version > 0
        assert (grads[0] == 3).all()
        assert (grads[1] == 4).all()

    def test_opcheck(self):
        x, dy = torch.ones(7, 16, device=DEVICE), torch.ones(7, 24, device=DEVICE)
        grads = [torch.zeros(16, 24, device=DEVICE) for _ in range(2)]
        counts = torch.tensor([3, 4], device=DEVICE)
        op = torch.ops.accel.grouped_gemm_add_wgrad_.default
        torch.library.opcheck(op, (dy, x, counts, grads, False))


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, c: torch.ops.accel.grouped_gemm(x, [w], c[:1], False), r"of shape \[2\]"),
        (lambda x, w, c: torch.ops.accel.grouped_gemm(x, [w], c.int(), False), "torch.int32"),
        (lambda x, w, c: torch.ops.accel.grouped_gemm(x, [w], c, True), "with 3 for K"),
        (lambda x, w, c: torch.ops.accel.grouped_gemm(x, [w.half()], c, False), "like each other"),
        (lambda x, w, c: torch.ops.accel.grouped_gemm_wgrad(x[:2], x, c, True), "needs 2 rows"),
        (
            lambda x, w, c: torch.ops.accel.grouped_gemm_add_wgrad_(x, x, c, [w], False),
            "main_grads must be like each other",
        ),
    ],
)
def test_the_kernels_check_again(call, message):
    x, weight = torch.ones(4, 3, device=DEVICE), torch.ones(2, 3, 5, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        call(x, weight, torch.tensor([2, 2], device=DEVICE))


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("counts", [[3, 6], [3, 2**31 - 1], [3, 2**32], [3, 2**40]])
def test_counts_that_lie_stay_within_the_rows(counts):
    """On a device nobody looks at them: what they say of rows that are not there is left alone."""
    memory = torch.full((10, 16), 7.0, device=DEVICE)
    x, weight = memory[:4], torch.ones(2, 16, 8, device=DEVICE)
    counts = torch.tensor(counts, device=DEVICE)
    y = torch.ops.accel.grouped_gemm(x, [weight], counts, False)
    assert torch.equal(y, torch.full((4, 8), 7.0 * 16, device=DEVICE))
    dw = torch.ops.accel.grouped_gemm_wgrad(y, x, counts, False)
    assert torch.equal(dw[1], torch.full((16, 8), 7.0 * 7 * 16, device=DEVICE))


@triton.jit
def _store_counts(out, counts_E, num_rows, num_experts, BLOCK_E: tl.constexpr):
    counts = _counts(counts_E, num_rows, num_experts, BLOCK_E)
    tl.store(out + tl.arange(0, BLOCK_E), counts)


@pytest.mark.parametrize(
    ("counts", "num_rows", "clamped"),
    [
        ([2**30] * 4, 2**30 + 5, [2**30, 5, 0, 0]),
        ([2**40] * 4, 2**31 - 1, [2**31 - 1, 0, 0, 0]),
        ([-1, 2**31 - 3, -(2**40), 2**31 - 1], 2**31 - 1, [0, 2**31 - 3, 0, 2]),
        ([2**63 - 1] * 4, 7, [7, 0, 0, 0]),
    ],
)
def test_sums_of_counts_that_lie_do_not_wrap(counts, num_rows, clamped):
    """Where experts times rows are 2^31 and more."""
    out = torch.full((32,), -1, dtype=torch.int32, device=DEVICE)
    _store_counts[(1,)](out, torch.tensor(counts, device=DEVICE), num_rows, 4, BLOCK_E=32)
    assert out.tolist() == [*clamped, *[0] * 28]


@pytest.mark.usefixtures("triton_kernels")
def test_experts_behind_the_last_row_have_none():
    """Whatever the counts before them sum up to."""
    x, weight = torch.ones(4, 16, device=DEVICE), torch.ones(4, 16, 8, device=DEVICE)
    counts = torch.tensor([2**31 - 1, 2, 2**31 - 1, 3], device=DEVICE)
    y = torch.ops.accel.grouped_gemm(x, [weight], counts, False)
    assert torch.equal(y, torch.full((4, 8), 16.0, device=DEVICE))
    dw = torch.ops.accel.grouped_gemm_wgrad(y, x, counts, False)
    assert dw[:, 0, 0].tolist() == [64.0, 0.0, 0.0, 0.0]


def _some(counts: Tensor) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    x = torch.randn(7, 16, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(24, 16, device="cuda", dtype=torch.bfloat16) for _ in counts]
    main_grads = [torch.zeros(24, 16, device="cuda") for _ in counts]
    return x.requires_grad_(), weights, counts, main_grads


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_nothing_waits_for_the_device(where):
    x, weights, counts, main_grads = _some(torch.tensor([3, 0, 4], device=where))

    def train() -> None:
        for weight in (weights, torch.stack(weights).requires_grad_()):
            y = grouped_gemm(x, weight, counts, transpose_b=True)
            y.backward(torch.ones_like(y))
        accumulate_wgrad(y.detach(), x.detach(), counts, main_grads, transpose_b=True)

    train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_cuda_graph_takes_new_counts():
    x, weights, counts, _ = _some(torch.tensor([3, 0, 4], device="cuda"))
    x = x.detach()
    grouped_gemm(x, weights, counts, transpose_b=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_gemm(x, weights, counts, transpose_b=True)
    counts.copy_(torch.tensor([0, 5, 2]))
    graph.replay()
    want = grouped_gemm_ref(x, weights, counts.cpu(), transpose_b=True)
    torch.testing.assert_close(y, want)
