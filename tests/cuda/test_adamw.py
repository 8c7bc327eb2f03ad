"""AdamW's CUDA kernel: the contract, remainders bit by bit, chunks, tensors not aligned, many tensors."""

import pytest
import torch

from accel.ops import adamw, adamw_ref
from accel.testing.tolerance import assert_close_to_baseline
from tests.cuda.harness import DEVICE, OnCuda, cuda_kernels, kernels_called, needs_kernels
from tests.ops import test_adamw, test_remainder
from tests.ops.contract import Inputs
from tests.triton.in_place import STEPS, AdamwOnDevice

__all__ = ["cuda_kernels"]

HYPER = test_adamw.HYPER
CHUNK = 8192
"""Elements of a block, which takes 1024 at a time."""
TENSORS = 59
"""Of one launch, at most."""


class TestAdamw(OnCuda, test_adamw.TestAdamw):
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
    def test_options(self, betas, weight_decay, decoupled, bias_correction, copied, scale, dtype):
        """Tensors that are empty, shorter than a turn of a block, as long, longer, and of several chunks."""
        shapes = [(0,), (), (15,), (4, 256), (1025,), (3, 0), (CHUNK,), (2, CHUNK + 11)]
        options = {
            **{"lr": 1e-2, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay},
            **{"decoupled": decoupled, "bias_correction": bias_correction, "copied": copied},
            "grad_scale": None if scale is None else torch.tensor(scale),
        }
        tensors = test_adamw.tensors_for(shapes, dtype, step=0)
        self.check(Inputs(tensors, options, constants=range(len(tensors))))


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestSteps(AdamwOnDevice, test_adamw.StepContract):
    pass


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestPairs(AdamwOnDevice, test_remainder.PairContract):
    shapes = ((), (0,), (13, 9), (CHUNK + 2,))


def some_step(lengths: list[int], offset: int = 0) -> list[list[torch.Tensor]]:
    """Rows of a step: tensors that begin `offset` elements into their memory."""
    draw = torch.Generator().manual_seed(0)

    def row() -> list[torch.Tensor]:
        return [torch.rand(n + offset, generator=draw).to(DEVICE)[offset:] for n in lengths]

    return [row(), row(), row(), row(), [torch.tensor(2.0, device=DEVICE) for _ in lengths]]


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestLaunches:
    @pytest.mark.parametrize("count", [TENSORS, TENSORS + 1, 2 * TENSORS + 1, 300])
    def test_many_tensors(self, count):
        """Some of them empty; launches of the steps take 256 each."""
        self.compare(some_step([7 + i % 3 if i % 11 else 0 for i in range(count)]))

    @pytest.mark.parametrize("position", range(4))
    def test_one_list_that_is_not_aligned(self, position):
        """Its block then takes elements one by one, with the same bits."""
        aligned, other = some_step([1300, 40]), some_step([1300, 40], offset=1)
        for row, unaligned in zip(aligned[:STEPS], other[:STEPS], strict=True):
            for t, u in zip(row, unaligned, strict=True):
                u.copy_(t)
        mixed = [list(row) for row in aligned]
        mixed[position] = other[position]
        mixed = [row if i == position else [t.clone() for t in row] for i, row in enumerate(mixed)]
        adamw(*aligned, **HYPER)
        adamw(*mixed, **HYPER)
        for row, same in zip(aligned, mixed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, same, strict=True))

    def test_steps_that_parameters_share_across_launches(self):
        rows = some_step([3] * 300)
        rows[STEPS] = [rows[STEPS][0]] * 300
        self.compare(rows)
        assert float(rows[STEPS][0]) == 302.0

    def test_nothing_to_do_still_counts(self):
        rows = some_step([0, 0])
        adamw(*rows, **HYPER)
        assert [float(t) for t in rows[STEPS]] == [3.0, 3.0]
        assert kernels_called(lambda: adamw([], [], [], [], [], **HYPER)) in ([], ["adamw_"])

    def compare(self, rows: list[list[torch.Tensor]]) -> None:
        """Weights and averages of the kernel, of plain torch and in fp64."""

        def copy(dtype: torch.dtype) -> list[list[torch.Tensor]]:
            made: dict[int, torch.Tensor] = {}  # steps may be shared
            return [[made.setdefault(id(t), t.to(dtype).clone()) for t in row] for row in rows]

        reference, plain = copy(torch.float64), copy(torch.float32)
        adamw(*rows, **HYPER)
        adamw_ref(*plain, **HYPER)
        adamw_ref(*reference, **HYPER)
        for position in (0, 2, 3):
            for t, p, r in zip(rows[position], plain[position], reference[position], strict=True):
                assert_close_to_baseline(t, p, r, roundings=test_adamw.ROUNDINGS)
        assert [float(t) for t in rows[STEPS]] == [float(t) for t in plain[STEPS]]

    def test_autograd_sees_the_change(self):
        w = torch.ones(8, requires_grad=True, device=DEVICE)
        y = (w * w).sum()
        rest = [[torch.zeros(8, device=DEVICE)] for _ in range(3)]
        with torch.no_grad():
            adamw([w], *rest, [torch.tensor(0.0)], **HYPER)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
