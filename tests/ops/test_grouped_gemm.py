"""Grouped products: see `OpContract`. The products are ATen's, so no instruction set is ours to test; who
computes which is."""

import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.log import log_once
from accel.ops import grouped_gemm, grouped_gemm_ref
from accel.ops.grouped_gemm import accumulate_wgrad
from tests.ops.contract import LAYOUTS, Inputs, OpContract, change_layout, needs_native, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product_inputs(
    counts: list[int], inner: int, num_cols: int, dtype: torch.dtype, *, transpose_b: bool
) -> Inputs:
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(sum(counts), inner, generator=generator).to(dtype)
    shape = (num_cols, inner) if transpose_b else (inner, num_cols)
    weight = torch.randn(len(counts), *shape, generator=generator).to(dtype)
    return Inputs([x, weight, torch.tensor(counts)], {"transpose_b": transpose_b})


class TestGroupedGemm(OpContract):
    op = staticmethod(grouped_gemm)
    ref = staticmethod(grouped_gemm_ref)
    dtypes = DTYPES

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        counts = [[3, 0, 5, 1], [0, 0, 7], [4]][seed]
        return product_inputs(counts, 17, 11, dtype, transpose_b=seed % 2 == 1)

    def large_inputs(self) -> Inputs:
        return product_inputs([100, 0, 31, 260], 128, 96, torch.bfloat16, transpose_b=True)

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """The terms of each sum of products, all of one sign."""
        wide = inputs._replace(
            tensors=[t.double().abs() if t.is_floating_point() else t for t in inputs.tensors]
        )
        x, weight, counts = wide.tensors
        y = grouped_gemm_ref(x, weight, counts, **inputs.options)
        if y.numel() == 0 or x.numel() == 0:
            return {}
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).double().abs()
        wide_leaves = [t.requires_grad_() for t in (x, weight)]
        grads = torch.autograd.grad(
            grouped_gemm_ref(*wide_leaves, counts, **inputs.options), wide_leaves, dy
        )
        sizes = {f"gradient {i}": float(g.max()) for i, g in enumerate(grads)}
        return {"output 0": float(y.max()), **sizes}

    def opchecks(self):
        for seed in range(2):
            x, weight, counts = self.inputs(torch.float32, seed).tensors
            op = torch.ops.accel.grouped_gemm.default
            transposed = seed % 2 == 1
            x.requires_grad_()
            yield op, (x, [weight.requires_grad_()], counts, transposed)
            each = [w.detach().clone().requires_grad_() for w in weight]
            yield op, (x, each, counts, transposed)
            dy = torch.randn(len(x), 11)
            yield (
                torch.ops.accel.grouped_gemm_wgrad.default,
                (dy, x.detach(), counts, transposed),
            )


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 13]), min_size=1, max_size=5),
    inner=st.sampled_from([1, 2, 17, 64]),
    num_cols=st.sampled_from([0, 1, 7, 33]),
    dtype=st.sampled_from(DTYPES),
    transpose_b=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_shape_and_layout(counts, inner, num_cols, dtype, transpose_b, layout):
    x, weight, count = product_inputs(
        counts, inner, num_cols, dtype, transpose_b=transpose_b
    ).tensors
    if layout != "expanded":
        x = change_layout(x, layout)
    inputs = Inputs([x, change_layout(weight, layout), count], {"transpose_b": transpose_b})
    TestGroupedGemm().check(inputs)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_a_list_of_matrices_is_the_same(transpose_b):
    inputs = product_inputs([3, 0, 4], 16, 24, torch.bfloat16, transpose_b=transpose_b)
    x, weight, counts = inputs.tensors

    def with_list(x: Tensor, *weights: Tensor) -> Tensor:
        return grouped_gemm(x, weights, counts, transpose_b=transpose_b)

    (y,), grads = run(grouped_gemm, inputs)
    (y_list,), grads_list = run(with_list, Inputs([x, *weight.unbind(0)]))
    assert torch.equal(y, y_list)
    assert torch.equal(grads[0], grads_list[0])
    assert torch.equal(grads[1], torch.stack([grads_list[i] for i in (1, 2, 3)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_main_gradients_are_summed_in_fp32(transpose_b, dtype):
    """Four micro-batches: as far from fp64 as fp32 products are, not as 16-bit ones."""
    inputs = product_inputs([30, 0, 50], 16, 24, dtype, transpose_b=transpose_b)
    x, weight, counts = inputs.tensors
    main_grad = torch.zeros(weight.shape)
    exact = torch.zeros(weight.shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        dy = torch.randn(80, 24, generator=generator).to(dtype)
        accumulate_wgrad(dy, x, counts, main_grad, transpose_b=transpose_b)
        exact += torch.ops.accel.grouped_gemm_wgrad(dy.double(), x.double(), counts, transpose_b)
    assert not main_grad[1].any()
    torch.testing.assert_close(main_grad.double(), exact, rtol=1e-5, atol=1e-5 * 80)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [[64] * 7, [900, 3, 0, 40, 1], [500], [0, 0]], ids=str)
def test_products_of_a_thread_each(rows: list[int], threads: int, set_threads) -> None:
    """Whoever computes which: even ones, one that has most of the rows, one, none."""
    set_threads(threads)
    for dtype in DTYPES:
        x, weight, counts = product_inputs(rows, 160, 96, dtype, transpose_b=True).tensors
        dy = torch.randn(len(x), 96, generator=torch.Generator().manual_seed(1)).to(dtype)
        main_grads = [torch.ones_like(w) for w in weight]
        before = [grad._version for grad in main_grads]
        accumulate_wgrad(dy, x, counts, main_grads, transpose_b=True)
        found = {
            "y": grouped_gemm(x, weight, counts, transpose_b=True),
            "dw": torch.ops.accel.grouped_gemm_wgrad(dy, x, counts, True),
            "added": torch.stack(main_grads),
        }
        exact, terms = (
            products_of(x, weight, dy, rows),
            products_of(x.abs(), weight.abs(), dy.abs(), rows),
        )
        for name, got in found.items():
            bound = 2 * torch.finfo(dtype).eps * max(terms[name].flatten().tolist(), default=0.0)
            torch.testing.assert_close(got.double(), exact[name], rtol=0, atol=bound)
        told = [grad._version > old for grad, old in zip(main_grads, before, strict=True)]
        assert told == [count > 0 for count in rows], "autograd hears of what was written"


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_in_inference(threads: int, set_threads) -> None:
    """Threads do not know of the mode, whose tensors count no versions."""
    set_threads(threads)
    x, weight, counts = product_inputs([64] * 7, 160, 96, torch.float32, transpose_b=True).tensors
    expected = grouped_gemm(x, weight, counts, transpose_b=True)
    with torch.inference_mode():
        found = grouped_gemm(x, weight.clone().requires_grad_(), counts, transpose_b=True)
        assert found.is_inference()
    assert torch.equal(found, expected)


def products_of(x: Tensor, weight: Tensor, dy: Tensor, rows: list[int]) -> dict[str, Tensor]:
    """Exact; of magnitudes, the terms of each sum."""
    groups = list(zip(x.double().split(rows), dy.double().split(rows), strict=True))
    dw = torch.stack([of_dy.T @ of_x for of_x, of_dy in groups])
    y = grouped_gemm_ref(x.double(), weight.double(), torch.tensor(rows), transpose_b=True)
    return {"y": y, "dw": dw, "added": 1 + dw}


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_native
def test_products_of_matrices_that_do_not_fit_are_an_error() -> None:
    out, a, b = torch.ones(2, 5), torch.ones(2, 3), torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"got \[2, 5\], \[2, 3\] and \[5, 3\]"):
        torch.ops.accel._products([out, out], [a, a], [b, b.T], False)
    with pytest.raises(ValueError, match="got 2, 1 and 1 matrices"):
        torch.ops.accel._products([out, out], [a], [b], False)
    assert torch.equal(out, torch.ones(2, 5))


def test_cpus_without_bf16_ask_whoever_replaced_mm(monkeypatch):
    """There ATen's own `mm.out` is a plain loop, and `host_bf16_gemm` replaces `mm`."""
    module = sys.modules["accel.ops.grouped_gemm"]  # the package's name is the function
    monkeypatch.setattr(module, "has_native_bf16", lambda: False)
    monkeypatch.setattr(torch, "mm", lambda *a, **k: pytest.fail("torch.mm with out="))
    x, weight, counts = TestGroupedGemm().inputs(torch.bfloat16).tensors
    assert "oneDNN has no bf16 products" in module.unsupported_reason(x)
    assert torch.equal(grouped_gemm(x, weight, counts), grouped_gemm_ref(x, weight, counts))


def test_missing_kernels_fall_back_and_say_so_once(caplog, monkeypatch):
    module = sys.modules["accel.ops.grouped_gemm"]
    missing = "no native kernels here"
    monkeypatch.setattr(module, "missing_kernel", lambda op, device_type: missing)
    x, weight, counts = TestGroupedGemm().inputs(torch.float32).tensors
    assert module.unsupported_reason(x) == missing
    meta = torch.empty(4, 3, dtype=torch.float64, device="meta")
    assert "float64 (the kernels take" in module.unsupported_reason(meta)
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            y, expected = (f(x, weight, counts) for f in (grouped_gemm, grouped_gemm_ref))
            torch.testing.assert_close(y, expected)
    message = f"grouped_gemm: using plain PyTorch: {missing}"
    assert [r.message for r in caplog.records] == [message]


def test_derivative_of_the_weight_gradient_is_an_error():
    x, weight, counts = TestGroupedGemm().inputs(torch.float32).tensors
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    _, dw = torch.autograd.grad(grouped_gemm(*leaves, counts).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        dw.sum().backward()


X, W = torch.ones(4, 3), torch.ones(2, 3, 5)


def counts(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


DY, GRADS = torch.ones(4, 5), torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped_gemm(X[0], W, counts(2, 2)), r"x must be floating of shape \[T, K\]"),
        (lambda: grouped_gemm(X.long(), W, counts(2, 2)), "x must be floating"),
        (lambda: grouped_gemm(X, W, counts(2, 2).int()), r"torch.int64 of shape \[E\] on the cpu"),
        (lambda: grouped_gemm(X, W, counts(2, 2)[None]), r"torch.int64 of shape \[E\] on the cpu"),
        (lambda: grouped_gemm(X, W, counts(4)), r"weight must have shape \[1, K, N\] with K 3"),
        (
            lambda: grouped_gemm(X, W, counts(2, 2), transpose_b=True),
            r"\[2, N, K\] with K 3, .* got \[2, 3, 5\]",
        ),
        (lambda: grouped_gemm(X, [W[0]], counts(2, 2)), r"2 times \[K, N\]"),
        (lambda: grouped_gemm(X, [W[0], W[1].T], counts(2, 2)), r"2 times \[K, N\]"),
        (lambda: grouped_gemm(X, W.half(), counts(2, 2)), "weight must be torch.float32 on cpu"),
        (lambda: grouped_gemm(X, W, counts(2, 3)), r"sum up to 4, .* got \[2, 3\]"),
        (lambda: grouped_gemm(X, W, counts(5, -1)), r"not be negative .* got \[5, -1\]"),
    ],
)
def test_rejects(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def accumulate(**changed: object) -> None:
    call = {"dy": DY, "x": X, "tokens_per_expert": counts(2, 2), "main_grads": GRADS.clone()}
    accumulate_wgrad(**(call | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X[0]}, r"x must be floating of shape \[T, K\], got torch.float32 \[3\]"),
        ({"dy": DY.long()}, r"dy must be floating of shape \[T, N\], got torch.int64"),
        ({"dy": DY[:3]}, r"dy must be torch.float32 \[4, N\] on cpu like x, got .* \[3, 5\]"),
        ({"dy": DY.half()}, "dy must be torch.float32 .* got torch.float16"),
        ({"dy": DY.to("meta")}, "dy must be .* on cpu like x, got .* on meta"),
        ({"tokens_per_expert": counts(2, 2).int()}, r"torch.int64 of shape \[E\] on the cpu"),
        ({"tokens_per_expert": counts(2, 2).to("meta")}, "on the cpu, got .* on meta"),
        ({"tokens_per_expert": counts(2, 5)}, r"sum up to 4, .* got \[2, 5\]"),
        ({"tokens_per_expert": counts(5, -1)}, r"not be negative .* got \[5, -1\]"),
        ({"tokens_per_expert": counts(1, 1)}, r"sum up to 4, .* got \[1, 1\]"),
        ({"tokens_per_expert": counts(4)}, r"shape \[1, 3, 5\], .* got \[2, 3, 5\]"),
        ({"transpose_b": True}, r"shape \[2, 5, 3\], .* got \[2, 3, 5\]"),
        ({"main_grads": [GRADS[0]]}, r"2 times \[3, 5\], .* got \[\[3, 5\]\]"),
        ({"main_grads": [GRADS[0], GRADS[1].T]}, r"2 times \[3, 5\], .* \[5, 3\]"),
        ({"main_grads": GRADS.half()}, "must be torch.float32, like .* got torch.float16"),
        ({"main_grads": [GRADS[0], GRADS[1].to("meta")]}, "on cpu, got torch.float32 on meta"),
        (
            {"dy": DY.half(), "x": X.half(), "main_grads": [GRADS[0].clone(), GRADS[1].half()]},
            "must be torch.float32 or torch.float16, like each other .* got torch.float16",
        ),
    ],
)
def test_accumulation_rejects(changed, message):
    with pytest.raises(ValueError, match=f"accumulate_wgrad: .*{message}"):
        accumulate(**changed)
