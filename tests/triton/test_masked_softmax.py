"""The masked softmax's Triton kernels: the contract, masks and layouts, blocks and what they border."""

import pytest
import torch

from accel._triton import masked_softmax as kernels
from tests.ops import test_masked_softmax
from tests.ops.contract import LAYOUTS, Inputs, change_layout, run
from tests.triton.harness import OnTriton, kernels_launched

SHAPES = [(2, 3, 5, 16), (1, 3, 1, 31), (2, 1, 7, 43), (1, 2, 3, 1), (1, 1, 30, 16)]
EMPTY = [(0, 3, 5, 16), (2, 3, 0, 7), (2, 3, 5, 0)]
# Which dimensions of x the mask has; where it lacks one, it broadcasts.
KEPT = [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 1, 0), (0, 1, 0, 0)]


def draw(shape: tuple[int, ...], dtype: torch.dtype, *, kind: str = "mask", kept=KEPT[0]) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    if kind == "causal":
        num_keys = min(shape[3], 21)  # as many queries, each a program of the interpreter
        shape = (1, shape[1], num_keys, num_keys)
    x = (torch.randn(shape, generator=generator) * 2).to(dtype)
    mask = None
    if kind == "mask":
        mask_shape = [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        mask = torch.rand(mask_shape, generator=generator) > 0.5
    return Inputs([x, mask], {"scale": 0.7, "causal": kind == "causal"})


@pytest.fixture(params=["rows in registers", "rows in blocks"])
def rows(request, monkeypatch) -> None:
    """Whole rows, 64 elements at a time where they are short; or blocks of 16 keys."""
    if request.param == "rows in registers":
        monkeypatch.setattr(kernels, "TILE", 64)
    else:
        monkeypatch.setattr(kernels, "MAX_BLOCK", 8)
        monkeypatch.setattr(kernels, "MAX_BLOCK_BACKWARD", 8)
        monkeypatch.setattr(kernels, "LONG_ROWS_BLOCK", 16)


class TestMaskedSoftmax(OnTriton, test_masked_softmax.TestMaskedSoftmax):
    @pytest.mark.usefixtures("rows")
    @pytest.mark.parametrize("kind", ["mask", "none", "causal"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_blocks(self, shape, kind):
        for dtype in self.dtypes[:2]:
            self.check(draw(shape, dtype, kind=kind))

    @pytest.mark.usefixtures("rows")
    @pytest.mark.parametrize("kept", KEPT, ids=str)
    def test_masks_broadcast(self, kept):
        inputs = draw((2, 3, 3, 19), torch.bfloat16, kept=kept)
        x, mask = inputs.tensors
        self.check(inputs)
        if not kept[0]:  # a mask of fewer dimensions
            self.check(inputs._replace(tensors=[x, mask[0]]))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout):
        inputs = draw((2, 3, 5, 19), torch.float32)
        x, mask = inputs.tensors
        self.check(inputs._replace(tensors=[change_layout(x, layout), mask]))
        self.check(inputs._replace(tensors=[x, change_layout(mask, layout)]))
        self.check(inputs._replace(tensors=[x, mask.mT.contiguous().mT]))

    @pytest.mark.parametrize("shape", EMPTY, ids=str)
    def test_empty(self, shape):
        inputs = draw(shape, torch.bfloat16)
        assert not kernels_launched(lambda: run(self.op, inputs))
        self.check(inputs)

    @pytest.mark.usefixtures("rows")
    def test_a_query_that_sees_nothing_spreads_evenly_and_has_no_gradient(self):
        x = torch.randn(1, 1, 2, 32)
        mask = torch.tensor([[True] * 32, [False] * 32])
        (probs,), grads = run(self.op, Inputs([x, mask]))
        dx = grads[0]
        assert torch.equal(probs[0, 0, 0], torch.full((32,), 1 / 32))
        assert not dx[0, 0, 0].any()
        assert dx[0, 0, 1].any()

    @pytest.mark.usefixtures("rows")
    def test_keys_that_causality_hides_are_exactly_zero(self):
        x = torch.randn(1, 1, 37, 37) * 50
        probs, grads = run(self.op, Inputs([x, None], {"causal": True, "scale": 1e4}))
        hidden = torch.ones(37, 37, dtype=torch.bool).triu(1)
        assert not probs[0][..., hidden].any()
        assert not grads[0][..., hidden].any()

    @pytest.mark.usefixtures("rows")
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_inf_stay_visible(self, bad):
        """Minus infinity hides a key, even a whole first block; a row of nothing else is NaN."""
        for count in (1, 20, 37):
            x = torch.randn(1, 1, 2, 37)
            x[0, 0, 1, :count] = bad
            got, want = self.op(x), self.ref(x)
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.allclose(got, want, equal_nan=True)

    def test_one_launch_each_way(self):
        inputs = draw((2, 3, 5, 16), torch.bfloat16)
        assert kernels_launched(lambda: run(self.op, inputs)) == ["_forward", "_backward"]
