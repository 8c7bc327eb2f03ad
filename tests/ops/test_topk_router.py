"""The router: see `OpContract`. Ties are compared with `torch.topk` itself."""

import logging

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.log import log_once
from accel.ops import _dispatch, moe_aux_scores, topk_router
from accel.ops.topk_router import (
    SCORE_FUNCTIONS,
    moe_aux_scores_ref,
    topk_router_ref,
    unsupported_reason,
)
from tests.ops.contract import Inputs, OpContract, needs_native, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = [
    {"topk": 2},
    {"topk": 1, "use_pre_softmax": True, "scaling_factor": 1.5},
    {"topk": 4, "use_pre_softmax": True, "num_groups": 6, "group_topk": 2},
    {"topk": 1, "score_function": "sigmoid"},
    {
        "topk": 6,
        "score_function": "sigmoid",
        "num_groups": 4,
        "group_topk": 3,
        "scaling_factor": 2.5,
    },
    {"topk": 3, "score_function": "sqrtsoftplus", "scaling_factor": 0.5},
]


def route(logits: Tensor, bias: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    return topk_router(logits, expert_bias=bias, **options)


def route_ref(logits: Tensor, bias: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    return topk_router_ref(logits, expert_bias=bias, **options)


class TestTopkRouter(OpContract):
    op = staticmethod(route)
    ref = staticmethod(route_ref)
    # Score, sum of the chosen, quotient, scale; the gradient has a sum of products more.
    roundings = {torch.float32: 16}

    def router_inputs(
        self, shape: tuple[int, int], dtype: torch.dtype, options: dict, seed: int = 0
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        # Any two logits of a row differ by more than a rounding, so that fp64 chooses the same.
        logits = torch.rand(shape, generator=generator).argsort(dim=1) / 8 - shape[1] / 16
        softmax = options.get("score_function", "softmax") == "softmax"
        bias = None if softmax else 0.01 * torch.randn(shape[1], generator=generator)
        return Inputs([logits.to(dtype), bias], options, constants=(1,))

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return self.router_inputs((7, 24), dtype, OPTIONS[2 * seed], seed)

    def large_inputs(self) -> Inputs:
        return self.router_inputs((4099, 24), torch.bfloat16, OPTIONS[4])

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """Gradients are differences of terms as large as the scaled incoming gradient."""
        logits, _ = inputs.tensors
        dprobs = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))
        scale = inputs.options.get("scaling_factor") or 1.0
        return {"gradient 0": float(dprobs.abs().max()) * scale} if logits.numel() else {}

    def opchecks(self):
        for options in OPTIONS:
            logits, bias = self.router_inputs((5, 24), torch.float32, options).tensors
            softmax_first = options.get("use_pre_softmax", False)
            groups = options.get("num_groups", 0), options.get("group_topk", 0)
            score = options.get("score_function", "softmax")
            topk = options["topk"]
            fwd = torch.ops.accel.topk_router_fwd.default
            args = (logits, topk, softmax_first, *groups, 1.5, score, bias)
            yield fwd, (logits.clone().requires_grad_(), *args[1:])
            probs, routing_map = fwd(*args)
            bwd = torch.ops.accel.topk_router_bwd.default
            yield bwd, (probs, logits, routing_map, topk, softmax_first, 1.5, score)


class TestMoeAuxScores(OpContract):
    op = staticmethod(moe_aux_scores)
    ref = staticmethod(moe_aux_scores_ref)
    # The scores are fp32 whatever the logits are.
    roundings = {torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        logits = TestTopkRouter().router_inputs((7, 24), dtype, {"topk": 3}, seed).tensors[0]
        return Inputs([logits], {"topk": 3, "score_function": SCORE_FUNCTIONS[seed]})

    def large_inputs(self) -> Inputs:
        logits = TestTopkRouter().large_inputs().tensors[0]
        return Inputs([logits], {"topk": 3, "score_function": "sigmoid"})

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        dscores = torch.randn(inputs.tensors[0].shape, generator=torch.Generator().manual_seed(7))
        return {"gradient 0": float(dscores.abs().max())}

    def opchecks(self):
        for score in SCORE_FUNCTIONS:
            (logits,) = self.inputs(torch.bfloat16).tensors
            fwd = torch.ops.accel.moe_aux_scores_fwd.default
            yield fwd, (logits.clone().requires_grad_(), 3, score)
            bwd = torch.ops.accel.moe_aux_scores_bwd.default
            yield bwd, (torch.randn(logits.shape), logits, score)


@st.composite
def calls(draw) -> Inputs:
    num_tokens = draw(st.sampled_from([0, 1, 3, 17]))
    num_experts = draw(st.sampled_from([1, 2, 7, 16, 17, 64, 67, 72]))
    topk = draw(st.integers(1, min(9, num_experts)))
    score, pre = draw(st.sampled_from(SCORE_FUNCTIONS)), draw(st.booleans())
    options = {
        "topk": topk,
        "score_function": score,
        "use_pre_softmax": pre,
        "scaling_factor": draw(st.sampled_from([None, 2.5])),
    }
    if draw(st.booleans()):
        size = draw(st.sampled_from([n for n in range(1, num_experts + 1) if num_experts % n == 0]))
        fewest, most = -(-topk // size), min(topk, num_experts // size)
        group_topk = draw(st.integers(fewest, most))
        if topk // group_topk <= size:
            options |= {"num_groups": num_experts // size, "group_topk": group_topk}
    shape, dtype = (num_tokens, num_experts), draw(st.sampled_from(DTYPES))
    logits, bias = TestTopkRouter().router_inputs(shape, dtype, options).tensors
    if pre or score != "softmax":
        noise = torch.randn(num_experts, generator=torch.Generator().manual_seed(5))
        bias = draw(st.sampled_from([None, 0.01 * noise]))
    if draw(st.booleans()):
        logits = logits.T.contiguous().T
    return Inputs([logits, bias], options, constants=(1,))


@needs_native
@settings(deadline=None, max_examples=200)
@given(inputs=calls())
def test_matches_reference_for_any_call(inputs):
    """Where the choice is so clear that a rounding changes nothing of it."""
    logits, bias = inputs.to_fp64().tensors
    off = 1e-5 * torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(6)).double()
    shifted = off if bias is None else bias + off
    choices = [route_ref(logits, b, **inputs.options)[1] for b in (bias, shifted)]
    assume(torch.equal(*choices))
    TestTopkRouter().check(inputs)


@needs_native
@settings(deadline=None, max_examples=150)
@given(
    num_experts=st.sampled_from([4, 8, 24, 128, 256]),
    topk=st.integers(1, 4),
    levels=st.sampled_from([1, 2, 3]),
    group=st.booleans(),
    seed=st.integers(0, 9),
)
def test_ties_are_torchs(num_experts, topk, levels, group, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (9, num_experts), generator=generator).float()
    options = {"num_groups": 4, "group_topk": min(topk, 2)} if group else {}
    if group and topk > min(topk, 2) * (num_experts // 4):
        topk = min(topk, 2)
    for pre in (False, True):
        got = topk_router(logits, topk, use_pre_softmax=pre, **options)[1]
        want = topk_router_ref(logits, topk, use_pre_softmax=pre, **options)[1]
        assert torch.equal(got, want)
    assert torch.equal(
        moe_aux_scores(logits, topk)[0], moe_aux_scores_ref(logits, topk, "softmax")[0]
    )


@needs_native
@pytest.mark.parametrize("score", SCORE_FUNCTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_visible(bad, score):
    logits = torch.randn(4, 19, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = bad
    got, want = (f(logits, 3, score_function=score) for f in (topk_router, topk_router_ref))
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], equal_nan=True)


@needs_native
@pytest.mark.parametrize("value", [-200.0, -90.0, -20.0, 20.0, 90.0, 200.0])
@pytest.mark.parametrize("score", SCORE_FUNCTIONS)
def test_extreme_logits(score, value):
    """Scores that underflow or saturate: as torch's, in value and gradient."""
    if score == "sqrtsoftplus" and value == -200:
        pytest.skip("the root has no slope at 0: torch spreads the NaN to experts not chosen")
    logits = torch.linspace(0.9, 1.1, 16)[None] * value
    results = []
    for f in (topk_router, topk_router_ref):
        leaf = logits.clone().requires_grad_()
        probs, _ = f(leaf, 2, score_function=score, use_pre_softmax=True)
        (grad,) = torch.autograd.grad(probs[0, probs[0].argmax()], leaf)
        results.append((probs.detach(), grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7, equal_nan=True)


@needs_native
def test_the_slope_of_very_negative_logits():
    """Of sqrt(softplus(x)), which is e^(x / 2) there: e^(x / 2) / 2, far above what sigmoid(x) keeps."""
    logits = torch.tensor([[-94.0, -95.0, -95.5]], requires_grad=True)
    probs, _ = topk_router(logits, 3, score_function="sqrtsoftplus", scaling_factor=1.0)
    exact = logits.detach().double().requires_grad_()
    wanted, _ = topk_router_ref(exact, 3, score_function="sqrtsoftplus", scaling_factor=1.0)
    dprobs = torch.tensor([[1.0, 2.0, 3.0]])
    (found,) = torch.autograd.grad(probs, logits, dprobs)
    (expected,) = torch.autograd.grad(wanted, exact, dprobs.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


@needs_native
def test_second_derivative_is_an_error():
    logits = torch.randn(3, 8, requires_grad=True)
    probs, _ = topk_router(logits, 2)
    (grad,) = torch.autograd.grad(probs[:, 0].sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        grad.sum().backward()


L = torch.randn(3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topk_router(L[0], 2), r"logits must be floating of shape \[T, E\], got .* \[8\]"),
        (lambda: topk_router(L.long(), 2), "logits must be floating"),
        (lambda: topk_router(L, 0), "topk must be 1 to 8, the number of experts, got 0"),
        (lambda: topk_router(L, 9), "topk must be 1 to 8, the number of experts, got 9"),
        (lambda: topk_router(L, 2, score_function="relu"), "softmax, sigmoid, .* got 'relu'"),
        (lambda: topk_router(L, 2, group_topk=1), "got num_groups None, group_topk 1"),
        (lambda: topk_router(L, 2, num_groups=3, group_topk=1), "8 experts must divide into"),
        (lambda: topk_router(L, 1, num_groups=4, group_topk=2), r"topk 1 must be 2 \(group_topk\)"),
        (lambda: topk_router(L, 5, num_groups=4, group_topk=2), "topk 5 must be 2 .* to 4"),
        (
            lambda: topk_router(L, 2, expert_bias=torch.ones(8)),
            "expert_bias does not go with softmax",
        ),
        (
            lambda: topk_router(L, 2, score_function="sigmoid", expert_bias=torch.ones(7)),
            r"expert_bias must have shape \[8\] on cpu, got \[7\]",
        ),
        (lambda: moe_aux_scores(L, 9), "moe_aux_scores: topk must be 1 to 8"),
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
            lambda o: o.topk_router_fwd(L, 9, False, 0, 0, 1.0, "softmax", None),
            "topk must be 1 to 8",
        ),
        (
            lambda o: o.topk_router_fwd(L, 2, False, 3, 1, 1.0, "softmax", None),
            "do not fit num_groups 3",
        ),
        (
            lambda o: o.topk_router_fwd(L, 2, False, 0, 0, 1.0, "sigmoid", torch.ones(7)),
            r"expert_bias must have shape \[8\]",
        ),
        (
            lambda o: o.topk_router_bwd(L[:2], L, L.bool(), 2, False, 1.0, "softmax"),
            "dprobs must be Float",
        ),
        (lambda o: o.moe_aux_scores_bwd(L[:2], L, "softmax"), "dscores must be float32"),
        (lambda o: o.moe_aux_scores_fwd(L, 2, "relu"), "must be softmax, sigmoid or sqrtsoftplus"),
    ],
)
def test_kernels_check_what_they_read(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ops.accel)


def test_unsupported_dtype_falls_back_and_says_so_once(caplog):
    reason = unsupported_reason(L.double())
    assert "float64" in reason
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            got, want = topk_router(L.double(), 2), topk_router_ref(L.double(), 2)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [r.message for r in caplog.records] == [f"topk_router: using plain PyTorch: {reason}"]


def test_missing_library_falls_back(monkeypatch):
    monkeypatch.setattr(_dispatch, "missing_kernel", lambda op, device: "none here")
    case = TestTopkRouter().inputs(torch.float32, 1)
    got, want = run(route, case), run(route_ref, case)
    assert torch.equal(got[0][0], want[0][0])
    assert torch.equal(got[1][0], want[1][0])


def test_the_routing_map_may_be_changed_before_the_backward() -> None:
    """Megatron pads it in place for quantized experts; the gradient is that of the choice."""
    gradients = []
    for pad in (False, True):
        torch.manual_seed(0)
        logits = torch.randn(8, 4, requires_grad=True)
        probs, routing_map = topk_router(logits, topk=2)
        if pad:
            routing_map[0] = True
        (probs * torch.arange(4.0)).sum().backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)
