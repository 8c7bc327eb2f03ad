"""AdamW's Triton kernel: the contract, remainders bit by bit, chunks, tensors not aligned, graphs."""

import pytest
import torch

from accel._triton import adamw as kernels
from accel._triton import chunk_table
from accel.ops import adamw, adamw_ref
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops import test_adamw, test_remainder
from tests.ops.contract import Inputs
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton, kernels_launched
from tests.triton.in_place import STEPS, AdamwOnDevice

HYPER = test_adamw.HYPER


class TestAdamw(OnTriton, test_adamw.TestAdamw):
    def test_any_subset_of_gradients(self):
        """There are none: the base has nothing to compare."""
        assert not self.inputs(torch.float32).differentiable()

    @pytest.mark.parametrize("dtype", test_adamw.TestAdamw.dtypes, ids=str)
    @pytest.mark.parametrize(
        ("betas", "weight_decay", "decoupled", "bias_correction", "copied", "scale"),
        [
            ((0.9, 0.999), 0.1, True, True, True, None),
            ((0.3, 0.5), 0.1, False, False, True, 0.25),
            ((0.0, 0.95), 0.0, True, True, False, 3.0),
            ((0.7, 0.0), 0.1, False, True, False, None),
        ],
    )
    def test_options(
        self, betas, weight_decay, decoupled, bias_correction, copied, scale, dtype, monkeypatch
    ):
        """Tensors that are empty, shorter than a block, as long, a little longer, and of several chunks."""
        monkeypatch.setattr(kernels, "BLOCK", 16)
        monkeypatch.setattr(kernels, "CHUNK", 64)
        shapes = [(0,), (), (15,), (2, 8), (64,), (65,), (3, 0), (11, 19)]
        options = {
            **{"lr": 1e-2, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay},
            **{"decoupled": decoupled, "bias_correction": bias_correction, "copied": copied},
            "grad_scale": None if scale is None else torch.tensor(scale),
        }
        tensors = test_adamw.tensors_for(shapes, dtype, step=0)
        self.check(Inputs(tensors, options, constants=range(len(tensors))))


@pytest.mark.usefixtures("triton_kernels")
class TestSteps(AdamwOnDevice, test_adamw.StepContract):
    pass


@pytest.mark.usefixtures("triton_kernels")
class TestPairs(AdamwOnDevice, test_remainder.PairContract):
    def test_a_step_splits_what_it_has_joined(self, monkeypatch):
        if not HAS_GPU:  # a million numbers: the interpreter is quicker with few large blocks
            monkeypatch.setattr(kernels, "BLOCK", 1 << 17)
            monkeypatch.setattr(kernels, "CHUNK", 1 << 17)
        super().test_a_step_splits_what_it_has_joined()

    @pytest.mark.parametrize(
        ("dtype", "decoupled"), [(torch.float32, True), (torch.bfloat16, False)]
    )
    def test_a_step_on_pairs_is_a_step_on_the_masters(self, dtype, decoupled, monkeypatch):
        monkeypatch.setattr(kernels, "BLOCK", 16)
        monkeypatch.setattr(kernels, "CHUNK", 64)
        super().test_a_step_on_pairs_is_a_step_on_the_masters(dtype, decoupled)


def some_step(lengths: list[int], offset: int = 0) -> list[list[torch.Tensor]]:
    """Params, gradients, moments, steps; they begin `offset` elements after an allocation does."""
    draw = torch.Generator().manual_seed(0)

    def row() -> list[torch.Tensor]:
        return [torch.rand(n + offset, generator=draw).to(DEVICE)[offset:] for n in lengths]

    return [row(), row(), row(), row(), [torch.tensor(2.0, device=DEVICE) for _ in lengths]]


@pytest.mark.usefixtures("triton_kernels")
class TestChunks:
    def test_tensors_that_are_not_aligned_take_a_launch_of_their_own(self):
        rows = some_step([40, 2000])
        for row, other in zip(rows, some_step([33, 5, 1100], offset=1), strict=True):
            row += other
        reference = [[t.double().clone() for t in row] for row in rows]
        plain = [[t.clone() for t in row] for row in rows]
        assert kernels_launched(lambda: adamw(*rows, **HYPER)) == ["_adamw"] * 2
        rows[STEPS] = [t.clone() for t in plain[STEPS]]
        adamw(*rows, **HYPER)
        adamw_ref(*plain, **HYPER)
        adamw_ref(*reference, **HYPER)
        for position in (0, 2, 3):
            for t, p, r in zip(rows[position], plain[position], reference[position], strict=True):
                assert_close_to_baseline(t, p, r, roundings=test_adamw.ROUNDINGS)

    def test_hundreds_of_tensors_are_one_launch(self):
        rows = some_step([5] * 300)
        assert kernels_launched(lambda: adamw(*rows, **HYPER)) == ["_adamw"]

    def test_nothing_is_launched_for_nothing(self):
        rows = some_step([0, 0])
        assert kernels_launched(lambda: adamw(*rows, **HYPER)) == []
        assert [float(t) for t in rows[STEPS]] == [3.0, 3.0]

    def test_tables_are_found_again_by_what_they_say(self, monkeypatch):
        monkeypatch.setattr(chunk_table, "_cached", chunk_table._Cache())
        lists = some_step([40, 70])[:2]
        (first,) = chunk_table.chunk_tables(lists, 32)
        assert first.num_chunks == 5
        assert chunk_table.chunk_tables(lists, 32)[0].words is first.words
        others = [lists[0], [t.clone() for t in lists[1]]]
        (other,) = chunk_table.chunk_tables(others, 32)
        assert other.words is not first.words
        assert other.words[-1] == others[1][1].data_ptr()
        shorter = [[t[:33] for t in row] for row in lists]
        assert chunk_table.chunk_tables(shorter, 32)[0].num_chunks == 4
        assert chunk_table.chunk_tables(lists, 64)[0].num_chunks == 3
        assert chunk_table._cached.nbytes == 4 * chunk_table.LEAST_CACHED
        monkeypatch.setattr(chunk_table, "MAX_CACHED", chunk_table._cached.nbytes)
        assert chunk_table.chunk_tables(lists, 32)[0].words is first.words
        chunk_table.chunk_tables(lists, 16)  # takes the place of the one that rested longest
        assert chunk_table.chunk_tables(lists, 32)[0].words is first.words
        assert chunk_table.chunk_tables(others, 32)[0].words is not other.words
        assert chunk_table._cached.nbytes == 4 * chunk_table.LEAST_CACHED

    def test_numbers_are_found_again_by_their_values(self):
        counts = torch.tensor([3, 0, 5])
        on_device = chunk_table.numbers_on(torch.device(DEVICE), counts)
        assert chunk_table.numbers_on(torch.device(DEVICE), counts.clone()) is on_device
        assert on_device.tolist() == [3, 0, 5]
        assert chunk_table.numbers_on(torch.device(DEVICE), torch.tensor([3, 5, 0])).tolist() == [
            3,
            5,
            0,
        ]

    def test_what_a_table_says(self):
        a, b = torch.zeros(70, device=DEVICE), torch.zeros(33, device=DEVICE)
        empty = torch.zeros(0, device=DEVICE)
        (table,) = chunk_table.chunk_tables([[a, empty, b]], 32)
        words = table.words.tolist()
        row = 1 << 32
        assert words[:5] == [0, 1, 2, row, row + 1]
        assert words[5:] == [70, 0, a.data_ptr(), 33, 2, b.data_ptr()]
        assert chunk_table.chunk_tables([[empty]], 32) == []
        assert chunk_table.chunk_tables([[]], 32) == []


@pytest.mark.usefixtures("triton_kernels")
def test_autograd_sees_the_change():
    w = torch.ones(8, requires_grad=True, device=DEVICE)
    y = (w * w).sum()
    rest = [[torch.zeros(8, device=DEVICE)] for _ in range(3)]
    with torch.no_grad():
        adamw([w], *rest, [torch.tensor(0.0)], **HYPER)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_no_step_waits_for_the_device(where):
    rows = some_step([40, 2000])
    rows[STEPS] = [t.to(where) for t in rows[STEPS]]
    adamw(*rows, **HYPER)
    torch.cuda.set_sync_debug_mode("error")
    try:
        adamw(*rows, **HYPER)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_cuda_graph_counts_and_steps():
    ours, captured = some_step([40, 2000]), some_step([40, 2000])
    for _ in range(4):
        adamw(*ours, **HYPER)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        adamw(*captured, **HYPER)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw(*captured, **HYPER)
    for _ in range(3):
        graph.replay()
    for row, other in zip(ours, captured, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


@needs_gpu
def test_a_cuda_graph_refuses_steps_on_the_host():
    rows = some_step([40])
    rows[STEPS] = [t.cpu() for t in rows[STEPS]]
    with (
        pytest.raises(ValueError, match="not counted by the replays"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        adamw(*rows, **HYPER)
