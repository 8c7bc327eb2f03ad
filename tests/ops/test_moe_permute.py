"""Permuting and unpermuting: see `OpContract`. Order and layout are compared with `_row_map_ref`."""

import logging
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from accel.log import log_once
from accel.ops import moe_permute, moe_row_map, moe_unpermute
from accel.ops.moe_permute import (
    _row_map_ref,
    moe_permute_ref,
    moe_unpermute_ref,
    unsupported_reason,
)
from tests.ops.contract import Inputs, OpContract, laid_out, needs_native, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def routing(num_tokens: int, num_experts: int, topk: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A map with at most topk experts for each token and none for expert 0; probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    indices = logits.topk(topk, dim=1).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, indices, True)
    routing_map[:, 0] = False
    return routing_map, logits.sigmoid()


def permute(x: Tensor, probs: Tensor | None, row_map: Tensor) -> tuple[Tensor, Tensor | None]:
    return moe_permute(x, row_map, probs)


def permute_ref(x: Tensor, probs: Tensor | None, row_map: Tensor) -> tuple[Tensor, Tensor | None]:
    return moe_permute_ref(x, row_map, probs)


def unpermute(y: Tensor, probs: Tensor | None, row_map: Tensor, num_tokens: int) -> Tensor:
    return moe_unpermute(y, row_map, num_tokens, probs)


def unpermute_ref(y: Tensor, probs: Tensor | None, row_map: Tensor, num_tokens: int) -> Tensor:
    return moe_unpermute_ref(y, row_map, num_tokens, probs)


class TestMoePermute(OpContract):
    op = staticmethod(permute)
    ref = staticmethod(permute_ref)

    def permute_inputs(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0, align: int = 1
    ) -> Inputs:
        num_tokens, num_cols, num_experts, topk = shape
        routing_map, probs = routing(num_tokens, num_experts, topk, seed)
        x = torch.randn(num_tokens, num_cols, generator=torch.Generator().manual_seed(seed))
        row_map = moe_row_map(routing_map, align=align)
        return Inputs([x.to(dtype), probs.to(dtype), row_map])

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return self.permute_inputs((13, 43, 5, 2 + seed % 2), dtype, seed, align=1 + 7 * (seed % 2))

    def large_inputs(self) -> Inputs:
        return self.permute_inputs((1025, 264, 8, 2), torch.bfloat16)

    def opchecks(self):
        x, probs, row_map = self.inputs(torch.float32, 1).tensors
        fwd = torch.ops.accel.moe_permute_fwd.default
        yield fwd, (x.requires_grad_(), row_map, probs.requires_grad_())
        yield fwd, (x, row_map, None)
        dy, dw = torch.randn(len(row_map), 43), torch.randn(len(row_map))
        bwd = torch.ops.accel.moe_permute_bwd.default
        yield bwd, (dy, dw, row_map, 13, 5, torch.bfloat16)
        yield torch.ops.accel.moe_row_map.default, (routing(13, 5, 2)[0], 30, -1, 4)


class TestMoeUnpermute(OpContract):
    op = staticmethod(unpermute)
    ref = staticmethod(unpermute_ref)
    # The longest chain: the product with a probability, and a sum over up to 40 rows in a row.
    roundings = {torch.float32: 8}

    def unpermute_inputs(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        seed: int = 0,
        *,
        align: int = 1,
        weights: str = "by expert",
    ) -> Inputs:
        num_tokens, num_cols, num_experts, topk = shape
        routing_map, probs = routing(num_tokens, num_experts, topk, seed)
        row_map = moe_row_map(routing_map, align=align)
        generator = torch.Generator().manual_seed(seed)
        y = torch.randn(len(row_map), num_cols, generator=generator).to(dtype)
        by_row = torch.rand(len(row_map), generator=generator)
        chosen = {"none": None, "by expert": probs.to(dtype), "by row": by_row.to(dtype)}[weights]
        return Inputs([y, chosen, row_map], {"num_tokens": num_tokens})

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        weights = ("by expert", "none", "by row")[seed % 3]
        shape = (13, 43, 5, 2 + seed % 2)
        return self.unpermute_inputs(shape, dtype, seed, align=1 + 7 * (seed % 2), weights=weights)

    def large_inputs(self) -> Inputs:
        return self.unpermute_inputs((1025, 264, 8, 2), torch.bfloat16)

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """The size of the terms that cancel in the sums over rows and over columns."""
        y, probs, row_map = inputs.tensors
        if y.numel() == 0:
            return {}
        num_tokens = inputs.options["num_tokens"]
        weights = None if probs is None else probs.double().abs()
        total = moe_unpermute_ref(y.double().abs(), row_map, num_tokens, weights)
        dout = torch.randn(total.shape, generator=torch.Generator().manual_seed(7)).double()
        dots, _ = moe_permute_ref(dout.abs(), row_map)
        return {
            "output 0": float(total.max()),
            "gradient 1": float((dots * y.double().abs()).sum(1).max()),
        }

    def opchecks(self):
        for weights in ("none", "by expert", "by row"):
            inputs = self.unpermute_inputs((13, 8, 5, 2), torch.float32, weights=weights)
            y, probs, row_map = inputs.tensors
            fwd = torch.ops.accel.moe_unpermute_fwd.default
            yield fwd, (y.requires_grad_(), row_map, 13, probs)
        dout = torch.randn(13, 8)
        yield torch.ops.accel.moe_unpermute_bwd.default, (dout, row_map)
        bwd = torch.ops.accel.moe_unpermute_probs_bwd.default
        yield bwd, (dout, y.detach(), row_map, probs)

    @needs_native
    @pytest.mark.parametrize("weights", ["none", "by expert", "by row"])
    def test_one_graph_serves_any_number_of_tokens(self, weights):
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(self.op, fullgraph=True, dynamic=True, backend=graphs)
        for num_tokens in (13, 31):
            inputs = self.unpermute_inputs((num_tokens, 8, 5, 2), torch.float32, weights=weights)
            want, want_grads = run(self.op, inputs)
            got, got_grads = run(compiled, inputs)
            for a, b in zip(
                (*got, *got_grads.values()), (*want, *want_grads.values()), strict=True
            ):
                assert torch.equal(a, b)
        assert graphs.frame_count == 1


SHAPES = st.tuples(
    st.sampled_from([0, 1, 2, 7, 31]),
    st.sampled_from([0, 1, 2, 15, 33, 64]),
    st.sampled_from([1, 2, 9, 17]),
    st.sampled_from([1, 2, 5, 9, 17]),
).filter(lambda shape: shape[3] <= shape[2])


@needs_native
@settings(deadline=None, max_examples=100)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), align=st.sampled_from([1, 4]))
def test_any_shape(shape, dtype, align):
    """Includes more rows for a token than are unrolled, empty experts, no tokens, no columns."""
    TestMoePermute().check(TestMoePermute().permute_inputs(shape, dtype, align=align))
    for weights in ("none", "by expert", "by row"):
        case = TestMoeUnpermute()
        case.check(case.unpermute_inputs(shape, dtype, align=align, weights=weights))


@needs_native
@settings(deadline=None, max_examples=100)
@given(x=laid_out(), dtype=st.sampled_from(DTYPES))
def test_any_layout_and_plain_indices(x, dtype):
    """Token indices in any order, with repetition, are a map of one expert."""
    x = (x.flatten(0, 1) if x.ndim == 3 else x).to(dtype)
    generator = torch.Generator().manual_seed(0)
    num_rows = 9 if len(x) else 0
    indices = torch.randint(0, max(len(x), 1), (num_rows,), generator=generator)
    TestMoePermute().check(Inputs([x, None, indices]))
    rows = torch.randn(num_rows, x.shape[-1] if x.ndim == 2 else 1, generator=generator).to(dtype)
    case = TestMoeUnpermute()
    case.check(Inputs([rows.T.contiguous().T, None, indices], {"num_tokens": len(x)}))


@needs_native
@settings(deadline=None, max_examples=100)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 20),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    align=st.sampled_from([1, 2, 16]),
    rows=st.sampled_from([None, 0, 7, 500]),
    pad=st.booleans(),
)
def test_row_map_is_that_of_the_reference(num_tokens, num_experts, share, align, rows, pad):
    generator = torch.Generator().manual_seed(num_tokens)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator) < share
    pad = pad and rows is not None
    got = moe_row_map(routing_map, rows, drop_and_pad=pad, align=align)
    capacity = min((rows or 0) // num_experts, num_tokens) if pad else -1
    assert torch.equal(got, _row_map_ref(routing_map, len(got), capacity, align))
    if rows is not None and not pad:
        assert len(got) == rows


def test_the_largest_align_there_is():
    """Of 16 experts' rows all but the first one's are beyond what was asked for."""
    routing_map = torch.ones(2, 16).bool()
    assert moe_row_map(routing_map, 3, align=2**58).tolist() == [0, 1, -1]
    assert _row_map_ref(routing_map, 3, -1, 2**58).tolist() == [0, 1, -1]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streaming_stores_change_no_bit(dtype):
    """Results of 16 MiB go past the caches; those of a part of the columns do not."""
    num_cols = (16 << 20) // dtype.itemsize // 1024
    x = torch.randn(1024, num_cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    routing_map, probs = routing(1024, 4, 2)
    row_map = moe_row_map(routing_map)
    y, _ = moe_permute(x, row_map)
    back = moe_unpermute(y, row_map, 1024, probs)
    dy = torch.ops.accel.moe_unpermute_probs_bwd(x, y, row_map, probs)[0]
    for cols in torch.arange(num_cols).chunk(4):
        part = y[:, cols]
        assert torch.equal(part, moe_permute(x[:, cols], row_map)[0])
        assert torch.equal(back[:, cols], moe_unpermute(part, row_map, 1024, probs))
        dpart = torch.ops.accel.moe_unpermute_probs_bwd(x[:, cols], part, row_map, probs)[0]
        assert torch.equal(dy[:, cols], dpart)


@needs_native
def test_second_derivative_is_an_error():
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.rand(3, 1, requires_grad=True)
    rows = torch.tensor([2, 0, 1])
    out = moe_unpermute(x, rows, 3, weight)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        dx.sum().backward()


X, ROWS = torch.ones(3, 8), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe_permute(torch.ones(3), ROWS), r"x must be floating of shape \[rows, N\], got"),
        (lambda: moe_permute(X.long(), ROWS), "x must be floating"),
        (lambda: moe_permute(X, ROWS.int()), "row_map must be torch.int64 .* got torch.int32"),
        (lambda: moe_permute(X, ROWS.to("meta")), "row_map must be on cpu like x, got meta"),
        (
            lambda: moe_permute(X, ROWS, torch.ones(2, 4)),
            r"probs must be .* \[3, E\], got .*\[2, 4\]",
        ),
        (lambda: moe_permute(X, ROWS, torch.ones(3, 4).int()), "probs must be floating"),
        (lambda: moe_unpermute(X, ROWS, 3), r"y must have 2 rows like row_map, got \[3, 8\]"),
        (
            lambda: moe_unpermute(X[:2], ROWS, 3, torch.ones(4)),
            r"probs must be floating of shape \[3, E\] or \[2\], got torch.float32 \[4\]",
        ),
        (lambda: moe_row_map(torch.ones(3)), r"routing_map must have shape \[T, E\], got \[3\]"),
        (lambda: moe_row_map(X.bool(), -1), "num_out_tokens not negative, got 1 and -1"),
        (lambda: moe_row_map(X.bool(), align=0), "align must be 1 or more"),
        *(
            (
                lambda rows=rows, align=align: moe_row_map(
                    torch.ones(1, 16).bool(), rows, align=align
                ),
                rf"align must be at most {2**58} for 16 experts, got {align}",
            )
            for rows in (4, None)
            for align in (2**58 + 1, 2**60, 2**63 - 1, 2**70)
        ),
        (lambda: moe_row_map(X.bool(), drop_and_pad=True), "drop_and_pad needs num_out_tokens"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@needs_native
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: moe_permute(X, torch.tensor([0, -2])),
            r"row_map\[1\] must be -1 or name one of 3",
        ),
        (lambda: moe_permute(X[:0], ROWS), "must be -1 or name one of 0 tokens, got 0"),
        (
            lambda: moe_permute(X, torch.tensor([7]), torch.ones(3, 2)),
            r"\[3, E\] with E above 2, got \[3, 2\]",
        ),
        (
            lambda: moe_permute(X[:1], torch.tensor([2**63 - 1]), torch.ones(1, 2)),
            rf"\[1, E\] with E above {2**63 - 1}, got \[1, 2\]",
        ),
        *(
            (
                lambda numbers=numbers: torch.ops.accel.moe_row_map(
                    torch.ones(1, 16).bool(), 4, *numbers
                ),
                rf"16 experts with capacity {numbers[0]} and align {numbers[1]}",
            )
            for numbers in ((-1, 2**60), (-1, 2**63 - 1), (2**60, 1))
        ),
        (
            lambda: torch.ops.accel.moe_permute_bwd(X, X, ROWS, 3, 0, torch.float32),
            "dy must have 2 rows",
        ),
        (
            lambda: torch.ops.accel.moe_unpermute_probs_bwd(X, X, ROWS, torch.ones(3, 1)),
            r"y must be Float of shape \[2, 8\]",
        ),
    ],
)
def test_kernels_check_what_they_read(call, message):
    """What only the values tell, and what a caller of the raw ops may pass."""
    with pytest.raises(ValueError, match=message):
        call()


def test_unsupported_dtype_falls_back_and_says_so_once(caplog):
    reason = unsupported_reason(X.double())
    assert "float64" in reason
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            assert torch.equal(moe_permute(X.double(), ROWS)[0], X.double()[ROWS])
    assert [r.message for r in caplog.records] == [f"moe_permute: using plain PyTorch: {reason}"]


def test_missing_library_falls_back(monkeypatch):
    module = sys.modules["accel.ops.moe_permute"]  # the package's name is the function
    monkeypatch.setattr(module, "missing_kernel", lambda op, device: "none here")
    routing_map, probs = routing(9, 4, 2)
    row_map = moe_row_map(routing_map, align=2)
    assert torch.equal(row_map, _row_map_ref(routing_map, len(row_map), -1, 2))
    case = Inputs([torch.randn(9, 6), probs, row_map])
    for a, b in zip(run(permute, case)[0], run(permute_ref, case)[0], strict=True):
        assert torch.equal(a, b)
