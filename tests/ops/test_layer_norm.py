"""LayerNorm against fp64: forward and gradients at most twice as far off as plain PyTorch.

The bits are the same in every run, for every number of threads and past the caches.
"""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import layer_norm, layer_norm_ref
from accel.ops._dispatch import _log_fallback_once
from accel.ops.layer_norm import unsupported_reason
from tests.ops.norm_checks import (
    DTYPES,
    SHAPES,
    assert_matches,
    laid_out,
    make_inputs,
    needs_native,
    run,
    run_with_isa,
)

NUM_VECTORS = 2  # weight, bias


@needs_native
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtypes, zero_centered):
    x, vectors, dy = make_inputs(shape, dtypes, NUM_VECTORS)
    assert_matches(layer_norm, layer_norm_ref, x, vectors, dy, zero_centered=zero_centered)


@needs_native
@settings(deadline=None, max_examples=100)
@given(x=laid_out(), dtypes=st.sampled_from(DTYPES), zero_centered=st.booleans())
def test_matches_reference_for_any_layout(x, dtypes, zero_centered):
    x = x.to(dtypes[0])
    _, vectors, dy = make_inputs(tuple(x.shape), dtypes, NUM_VECTORS, seed=1)
    assert_matches(layer_norm, layer_norm_ref, x, vectors, dy, zero_centered=zero_centered)


def test_reference_is_pytorch():
    x, vectors, _ = make_inputs((8, 48), DTYPES[1], NUM_VECTORS)
    want = torch.nn.functional.layer_norm(x, (48,), *vectors, eps=1e-6)
    assert torch.equal(layer_norm_ref(x, *vectors, 1e-6), want)


@needs_native
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_nan_and_inf_stay_visible(bad, dtypes):
    x, vectors, _ = make_inputs((2, 19), dtypes, NUM_VECTORS)
    x[1, 7] = bad
    y, y_ref = layer_norm(x, *vectors), layer_norm_ref(x, *vectors)
    assert torch.equal(y.isnan(), y_ref.isnan())


@needs_native
@pytest.mark.parametrize("wanted", range(1, 2 ** (1 + NUM_VECTORS)))
def test_any_subset_of_gradients(wanted):
    x, vectors, dy = make_inputs((6, 40), DTYPES[1], NUM_VECTORS)
    _, *every_grad = run(layer_norm, x, vectors, dy)
    leaves = [t.clone().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate((x, *vectors))]
    layer_norm(*leaves).backward(dy)
    for leaf, grad in zip(leaves, every_grad, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        assert leaf.grad is None or torch.equal(leaf.grad, grad)


@needs_native
def test_calls_share_no_memory():
    x, vectors, _ = make_inputs((5, 32), DTYPES[0], NUM_VECTORS)
    first = layer_norm(x, *vectors)
    kept = first.clone()
    second = layer_norm(x + 1, *vectors)
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr() != x.data_ptr()


@needs_native
def test_gradients_accumulate_over_micro_batches():
    x, vectors, dy = make_inputs((24, 40), DTYPES[0], NUM_VECTORS)
    leaves = [v.clone().requires_grad_() for v in vectors]
    want = [torch.zeros_like(v) for v in vectors]
    for rows in torch.arange(24).chunk(3):
        layer_norm(x[rows], *leaves).backward(dy[rows])
        for total, grad in zip(want, run(layer_norm, x[rows], vectors, dy[rows])[2:], strict=True):
            total += grad
    for leaf, total in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, total)


@needs_native
def test_same_bits_each_run_and_for_any_number_of_threads():
    x, vectors, dy = make_inputs((1025, 264), DTYPES[1], NUM_VECTORS)
    first = run(layer_norm, x, vectors, dy)
    threads = torch.get_num_threads()
    try:
        for num_threads in (threads, threads, 1, 3):
            torch.set_num_threads(num_threads)
            for a, b in zip(run(layer_norm, x, vectors, dy), first, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_streaming_stores_change_no_bit():
    """In fp32, y and dx of 64 MiB and more go past the caches; a quarter of the rows does not."""
    x, vectors, dy = make_inputs((8196, 2048), DTYPES[0], NUM_VECTORS)
    y, dx, *_ = run(layer_norm, x, vectors, dy)
    for rows in torch.arange(8196).chunk(4):
        y_part, dx_part, *_ = run(layer_norm, x[rows], vectors, dy[rows])
        assert torch.equal(y[rows], y_part)
        assert torch.equal(dx[rows], dx_part)


ISA_SCRIPT = """
from accel.ops import _native, layer_norm, layer_norm_ref
from tests.ops.norm_checks import DTYPES, SHAPES, assert_matches, make_inputs
assert _native.isa() == {isa!r}
for shape in SHAPES:
    for dtypes in DTYPES:
        assert_matches(layer_norm, layer_norm_ref, *make_inputs(shape, dtypes, 2))
"""


@needs_native
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    result = run_with_isa(isa, ISA_SCRIPT.format(isa=isa))
    if f"this CPU or build has no {isa} kernels" in result.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert result.returncode == 0, result.stderr


@needs_native
def test_opcheck():
    x, vectors, dy = make_inputs((3, 5, 24), DTYPES[2], NUM_VECTORS)
    leaves = [t.clone().requires_grad_() for t in (x, *vectors)]
    torch.library.opcheck(torch.ops.accel.layer_norm_fwd.default, (*leaves, 1e-5, True))
    _, *saved = torch.ops.accel.layer_norm_fwd(x, *vectors, 1e-5, True)
    torch.library.opcheck(torch.ops.accel.layer_norm_bwd.default, (dy, x, vectors[0], *saved, True))


@needs_native
def test_compiles_as_one_graph():
    x, vectors, dy = make_inputs((6, 40), DTYPES[1], NUM_VECTORS)
    compiled = torch.compile(layer_norm, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(compiled, x, vectors, dy), run(layer_norm, x, vectors, dy), strict=True):
        assert torch.equal(a, b)


@needs_native
def test_second_derivative_is_an_error():
    x, vectors, _ = make_inputs((2, 8), DTYPES[0], NUM_VECTORS)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer_norm(x, *vectors).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm_bwd"):
        dx.sum().backward()


ONES = torch.ones(8)


@pytest.mark.parametrize(
    ("x", "vectors", "message"),
    [
        (
            torch.ones(2, 8, dtype=torch.int64),
            [ONES] * NUM_VECTORS,
            "x must be a floating dtype, got torch.int64",
        ),
        (torch.tensor(1.0), [ONES] * NUM_VECTORS, r"x must have shape \[..., N\], got a scalar"),
        (
            torch.ones(2, 7),
            [ONES] * NUM_VECTORS,
            r"weight must have shape \[7\], .* \[2, 7\], got \[8\]",
        ),
        (
            torch.ones(2, 8),
            [torch.ones(8, 1)] * NUM_VECTORS,
            r"weight must have shape \[8\], .* got \[8, 1\]",
        ),
        (
            torch.ones(2, 8),
            [ONES.half()] * NUM_VECTORS,
            "weight must be torch.float32 .* got torch.float16",
        ),
        (
            torch.ones(2, 8),
            [ONES.to("meta")] * NUM_VECTORS,
            "weight must be on cpu like x, got meta",
        ),
        (torch.ones(2, 8), [ONES, torch.ones(9)], r"bias must have shape \[8\], .* got \[9\]"),
        (
            torch.ones(2, 8).half(),
            [ONES, ONES.half()],
            "bias must be torch.float32 like weight, got torch.float16",
        ),
    ],
)
def test_rejects(x, vectors, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(x, *vectors)


def test_unsupported_dtype_falls_back_and_says_so_once(caplog):
    x, vectors, _ = make_inputs((4, 8), (torch.float64, torch.float64), NUM_VECTORS)
    assert "float64" in unsupported_reason(x, *vectors)
    _log_fallback_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            assert torch.equal(layer_norm(x, *vectors), layer_norm_ref(x, *vectors))
    assert [r.message for r in caplog.records] == [
        f"layer_norm: using plain PyTorch: {unsupported_reason(x, *vectors)}"
    ]


def test_missing_library_falls_back(monkeypatch, caplog):
    x, vectors, dy = make_inputs((4, 8), DTYPES[1], NUM_VECTORS)
    monkeypatch.setattr(
        "accel.ops._norm.missing_kernel", lambda op, device_type: "no native kernels here"
    )
    assert unsupported_reason(x, *vectors) == "no native kernels here"
    for a, b in zip(
        run(layer_norm, x, vectors, dy), run(layer_norm_ref, x, vectors, dy), strict=True
    ):
        assert torch.equal(a, b)
