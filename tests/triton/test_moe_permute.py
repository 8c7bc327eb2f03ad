"""Permuting in Triton: the contract, row maps, and every way in which rows find their tokens."""

import pytest
import torch
from torch import Tensor

from accel._triton import moe_permute as kernels
from accel.ops import moe_row_map
from accel.ops.moe_permute import _row_map_ref
from tests.ops import test_moe_permute
from tests.ops.contract import Inputs
from tests.triton.harness import HAS_GPU, OnTriton, kernels_launched, on_device

row_map = on_device(moe_row_map)


def small_blocks(monkeypatch: pytest.MonkeyPatch, *, read_once: bool) -> None:
    """Several blocks of everything for a handful of tokens; each token read once, or row by row."""
    monkeypatch.setattr(kernels, "NUM_BLOCKS", 3)
    monkeypatch.setattr(kernels, "NUM_GROUPS", 4)
    monkeypatch.setattr(kernels, "COUNT_TILE", 16)
    monkeypatch.setattr(kernels, "GROUP_BLOCK", 4)
    monkeypatch.setattr(kernels, "PADDING_BLOCK", 8)
    for name in ("SUM_BLOCK", "GATHER_BLOCK", "ROW_BLOCK", "LONG_ROW_BLOCK"):
        monkeypatch.setattr(kernels, name, 16)
    monkeypatch.setattr(kernels, "READ_ONCE_BYTES", -(1 << 20) if read_once else 1 << 40)


class TestMoePermute(OnTriton, test_moe_permute.TestMoePermute):
    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """Few tokens: each is a program or two, interpreted."""
        return self.permute_inputs((5, 43, 5, 2 + seed % 2), dtype, seed, align=1 + 3 * (seed % 2))

    def opchecks(self):
        """Not those without probs: each takes seconds."""
        x, probs, rows = self.inputs(torch.float32, 1).tensors
        ops = torch.ops.accel
        dy, dw = torch.randn(len(rows), 43), torch.randn(len(rows))
        yield ops.moe_permute_fwd.default, (x.requires_grad_(), rows, probs.requires_grad_())
        yield ops.moe_permute_bwd.default, (dy, dw, rows, 5, 5, torch.bfloat16)
        routing_map = test_moe_permute.routing(13, 5, 2)[0]
        yield ops.moe_row_map.default, (routing_map, 30, -1, 4)

    @pytest.mark.parametrize("read_once", [False, True])
    @pytest.mark.parametrize("align", [1, 4])
    def test_many_blocks(self, read_once, align, monkeypatch):
        small_blocks(monkeypatch, read_once=read_once)
        self.check(self.permute_inputs((6, 20, 8, 6), torch.bfloat16, align=align))

    def test_each_way_launches_its_own_kernels(self, monkeypatch):
        x, probs, rows = self.inputs(torch.float32).tensors
        inverse = ["_count_groups", "_place_groups"]
        for read_once, want in ((False, ["_gather_rows"]), (True, [*inverse, "_copy_tokens"])):
            small_blocks(monkeypatch, read_once=read_once)
            assert kernels_launched(lambda: self.op(x, probs, rows)) == want

    @pytest.mark.parametrize("read_once", [False, True])
    @pytest.mark.parametrize("shape", [(0, 8, 2, 1), (3, 0, 2, 1), (3, 8, 1, 1)], ids=str)
    def test_nothing_to_move(self, shape, read_once, monkeypatch):
        """No tokens, no columns, no rows: expert 0, the only one, gets none."""
        small_blocks(monkeypatch, read_once=read_once)
        self.check(self.permute_inputs(shape, torch.float32))

    @pytest.mark.parametrize("read_once", [False, True])
    def test_plain_indices_in_any_order(self, read_once, monkeypatch):
        """The map of one expert: tokens again and again, padding, and layouts with gaps."""
        small_blocks(monkeypatch, read_once=read_once)
        indices = torch.tensor([4, 0, 4, 4, -1, 2, 4, 4, 2, 4, 0, -1, -1, 4])
        x = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
        probs = torch.rand(5, 1, generator=torch.Generator().manual_seed(1))
        self.check(Inputs([x.T.contiguous().T, None, indices]))
        self.check(Inputs([torch.cat([x, x], dim=1)[:, ::2], probs, indices.repeat(2)[::2]]))
        _, w = self.op(x, probs.double(), indices)
        assert torch.equal(w, torch.where(indices < 0, 0.0, probs.double()[indices, 0]))

    @pytest.mark.parametrize("read_once", [False, True])
    def test_an_expert_beyond_the_probabilities_weighs_nothing(self, read_once, monkeypatch):
        """Nor one beyond 32 bits, whose lower ones are those of -1."""
        small_blocks(monkeypatch, read_once=read_once)
        places = torch.tensor([7, 4, (2**32 - 1) * 3 + 1])
        y, w = self.op(torch.ones(3, 8), torch.ones(3, 2), places)
        assert torch.equal(y, torch.ones(3, 8))
        assert w.tolist() == [0, 1, 0]


class TestMoeUnpermute(OnTriton, test_moe_permute.TestMoeUnpermute):
    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        weights = ("by expert", "none", "by row")[seed % 3]
        return self.unpermute_inputs(
            (5, 43, 5, 3), dtype, seed, align=1 + 3 * (seed % 2), weights=weights
        )

    def opchecks(self):
        """One forward, and the gradient of the probabilities: each takes seconds."""
        inputs = self.unpermute_inputs((5, 8, 5, 2), torch.float32)
        y, probs, rows = inputs.tensors
        ops = torch.ops.accel
        yield ops.moe_unpermute_fwd.default, (y.clone().requires_grad_(), rows, 5, probs)
        yield ops.moe_unpermute_probs_bwd.default, (torch.randn(5, 8), y, rows, probs)

    @pytest.mark.parametrize(("weights", "align"), [("none", 1), ("by expert", 4), ("by row", 1)])
    def test_many_blocks(self, weights, align, monkeypatch):
        """More rows for a token than are loaded at once, and more columns than a block."""
        small_blocks(monkeypatch, read_once=align == 1)
        shape = (6, 20, 8, 6)
        self.check(self.unpermute_inputs(shape, torch.bfloat16, align=align, weights=weights))

    @pytest.mark.parametrize("weights", ["none", "by expert", "by row"])
    @pytest.mark.parametrize("shape", [(0, 8, 2, 1), (3, 0, 2, 1), (3, 8, 1, 1)], ids=str)
    def test_nothing_to_move(self, shape, weights):
        self.check(self.unpermute_inputs(shape, torch.float32, weights=weights))

    def test_plain_indices_in_any_order(self, monkeypatch):
        small_blocks(monkeypatch, read_once=True)
        indices = torch.tensor([4, 0, 4, 4, -1, 2, 4, 4, 2, 4, 0, -1, -1, 4])
        y = torch.randn(14, 11, generator=torch.Generator().manual_seed(0)).T.contiguous().T
        for weights in (torch.rand(5, 1), torch.rand(14)):
            self.check(Inputs([y, weights, indices], {"num_tokens": 5}))


@pytest.mark.usefixtures("triton_kernels")
class TestRowMap:
    def check(self, routing_map: Tensor, rows: int | None, *, pad: bool = False, align: int = 1):
        got = row_map(routing_map, rows, drop_and_pad=pad, align=align)
        num_tokens, num_experts = routing_map.shape
        capacity = min((rows or 0) // num_experts, num_tokens) if pad else -1
        assert torch.equal(got, _row_map_ref(routing_map, len(got), capacity, align))

    @pytest.mark.parametrize("blocks", ["small", "default"])
    @pytest.mark.parametrize("share", [0.0, 0.4])
    def test_is_that_of_the_reference(self, share, blocks, monkeypatch):
        if blocks == "small":
            small_blocks(monkeypatch, read_once=False)
        generator = torch.Generator().manual_seed(0)
        for num_tokens, num_experts in ((1, 1), (19, 5), (9, 33)):
            routing_map = torch.rand(num_tokens, num_experts, generator=generator) < share
            self.check(routing_map.T.contiguous().T, None, align=4)
            self.check(routing_map, 7)
            for rows in (50, 500):
                self.check(routing_map, rows, pad=True)

    def test_empty(self):
        for shape in ((0, 4), (4, 0)):
            assert row_map(torch.zeros(shape, dtype=torch.bool), 3).tolist() == [-1] * 3
        assert row_map(torch.ones(4, 4, dtype=torch.bool), 0).numel() == 0

    def test_takes_two_launches(self):
        routing_map = torch.rand(300, 64) < 0.1
        want = ["_count_routed", "_place_routed"]
        assert kernels_launched(lambda: row_map(routing_map, 64)) == want
        with_capacity = kernels_launched(lambda: row_map(routing_map, 640, drop_and_pad=True))
        assert with_capacity == want


@pytest.mark.skipif(HAS_GPU, reason="the raw ops on CPU tensors are the C++ kernels there")
@pytest.mark.usefixtures("triton_kernels")
def test_the_kernels_check_what_they_read():
    x, rows, ops = torch.ones(3, 8), torch.tensor([0, 2]), torch.ops.accel
    for call, message in (
        (lambda: ops.moe_permute_bwd(x, x, rows, 3, 0, torch.float32), "dy must have 2 rows"),
        (
            lambda: ops.moe_permute_bwd(x[:2], x, rows, 3, 4, torch.float32),
            r"must have shape \[2\]",
        ),
        (lambda: ops.moe_permute_fwd(x, rows, torch.ones(2, 4)), r"probs must have shape \[3, E\]"),
        (lambda: ops.moe_permute_fwd(x, rows.int(), None), "row_map must be torch.int64"),
        (lambda: ops.moe_unpermute_fwd(x, rows, 3, None), "y must have 2 rows"),
        (lambda: ops.moe_unpermute_fwd(x[:2], rows, 3, torch.ones(4)), r"probs must have shape"),
        (
            lambda: ops.moe_unpermute_probs_bwd(x, x, rows, torch.ones(3, 1)),
            r"y must be torch.float32 of shape \[2, 8\]",
        ),
        (lambda: ops.moe_row_map(x, 4, -1, 1), "routing_map must be bool"),
        (lambda: ops.moe_row_map(x.bool(), 4, -1, 2**28), "with capacity -1 and align 268435456"),
        (lambda: ops.moe_row_map(x.bool(), 4, 2**28, 1), "with capacity 268435456 and align 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
