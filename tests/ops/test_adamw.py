"""`accel.ops.adamw` against torch's own step: every update as close to fp64, copies rounded exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.log import log_once
from accel.ops import adamw, adamw_ref, split_remainder
from accel.ops.adamw import unsupported_reason
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import Inputs, OpContract, change_layout, needs_native, run

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# fp32 stands for itself: from the gradient to the weight its value is rounded in two sums and a product of
# v, the root, two quotients, a sum, a product, the last sum.
ROUNDINGS = 8


def stepped(step: Callable[..., None]) -> Callable[..., list[Tensor]]:
    """The step as a function: [grads, params, exp_avgs, exp_avg_sqs, steps] in one row -> all that it
    changed, copies last."""

    def call(*tensors: Tensor, copied: bool = True, **options: Any) -> list[Tensor]:
        count = len(tensors) // 5
        rows = [list(tensors[i * count : (i + 1) * count]) for i in range(5)]
        grads = rows[0]
        changed = [[t.clone() for t in row] for row in rows[1:]]
        params, exp_avgs, exp_avg_sqs, steps = changed
        copies = [torch.empty_like(g) for g in grads] if copied else []
        with torch.no_grad():
            step(params, grads, exp_avgs, exp_avg_sqs, steps, copies, **options)
        return [*params, *exp_avgs, *exp_avg_sqs, *steps, *copies]

    return call


def tensors_for(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0, step: int = 3
) -> list[Tensor]:
    """What a step takes, as one row; moments as after a few steps."""
    draw = torch.Generator().manual_seed(seed)

    def row(scale: float) -> list[Tensor]:
        return [torch.randn(shape, generator=draw) * scale for shape in shapes]

    grads = [g.to(dtype) for g in row(1.0)]
    second_moments = [v.square() for v in row(0.1)]
    steps = [torch.tensor(float(step)) for _ in shapes]
    return [*grads, *row(0.5), *row(0.1), *second_moments, *steps]


class TestAdamw(OpContract):
    op = staticmethod(stepped(adamw))
    ref = staticmethod(stepped(adamw_ref))
    roundings = dict.fromkeys(OpContract.dtypes, ROUNDINGS)

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        tensors = tensors_for([(7, 43), (), (33,)], dtype, seed)
        options = {**HYPER, "decoupled": seed % 2 == 0, "grad_scale": torch.tensor(0.37)}
        return Inputs(tensors, options, constants=range(len(tensors)))

    def large_inputs(self) -> Inputs:
        tensors = tensors_for([(300, 333), (5,), (16384,), (1,), (70001,)], torch.bfloat16)
        return Inputs(tensors, dict(HYPER), constants=range(len(tensors)))

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """A weight, an average and an fp32 copy are differences of what was there and its change."""
        wide = inputs.to_fp64()
        count = len(wide.tensors) // 5
        before, after = wide.tensors[count:], self.ref(*wide.tensors, **wide.options)
        largest = {
            i: float(before[i].abs().max() + (after[i] - before[i]).abs().max())
            for i in range(2 * count)
            if before[i].numel()
        }
        if inputs.tensors[0].dtype == torch.float32 and len(after) > 4 * count:
            largest |= {4 * count + i: largest[i] for i in range(count) if i in largest}
        return {f"output {i}": magnitude for i, magnitude in largest.items()}

    def opchecks(self):
        w, g, m, v = ([torch.rand(n) for n in (5, 40)] for _ in range(4))
        steps = [torch.tensor(1.0), torch.tensor(1.0)]
        rest = (1e-3, 0.9, 0.95, 1e-8, 0.1, True, True)
        op = torch.ops.accel.adamw_.default
        copies = [t.bfloat16() for t in w]
        yield op, (w, g, m, v, steps, copies, [], torch.tensor(0.5), *rest)
        yield op, (w, [t.bfloat16() for t in g], m, v, steps, [], [], None, *rest)
        pairs = [split_remainder(t) for t in w]
        halves = [p[0] for p in pairs], [p[1] for p in pairs]
        yield op, (halves[0], g, m, v, steps, [], halves[1], None, *rest)

    test_gradients_accumulate_over_micro_batches = None  # there are none


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.sampled_from([(), (0,), (1,), (2, 0, 3), (13, 17), (31,), (64,), (67, 3)]), max_size=5
    ),
    dtype=st.sampled_from(OpContract.dtypes),
    seed=st.integers(0, 99),
    step=st.sampled_from([0, 1, 1000]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.3, 0.5), (0.7, 0.0)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    eps=st.sampled_from([1e-8, 1e-3]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    grad_scale=st.sampled_from([None, 0.25, 3.0]),
)
def test_any_shapes_and_options(
    shapes, dtype, seed, step, betas, weight_decay, eps, flags, grad_scale
):
    decoupled, bias_correction, copied = flags
    tensors = tensors_for(shapes, dtype, seed, step)
    options = {
        "lr": 1e-2,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled": decoupled,
        "bias_correction": bias_correction,
        "copied": copied,
        "grad_scale": None if grad_scale is None else torch.tensor(grad_scale),
    }
    if not shapes:
        assert stepped(adamw)(**options) == []
        return
    TestAdamw().check(Inputs(tensors, options, constants=range(len(tensors))))


class StepContract:
    """What a step writes, whoever computes it: a derived class says what `step` and `kernel` are."""

    step = staticmethod(adamw)
    kernel = staticmethod(torch.ops.accel.adamw_)

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
    def test_ten_steps_are_as_exact_as_torchs_optimizer(self, kind):
        draw = torch.Generator().manual_seed(0)
        start = [torch.randn(n, generator=draw) for n in (4096, 37)]
        grads = [[torch.randn(w.shape, generator=draw) for w in start] for _ in range(10)]
        hyper = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

        def by_torch(dtype: torch.dtype) -> list[Tensor]:
            params = [torch.nn.Parameter(w.to(dtype)) for w in start]
            optimizer = kind(params, **hyper, foreach=False)
            for step in grads:
                for p, g in zip(params, step, strict=True):
                    p.grad = g.to(dtype)
                optimizer.step()
            states = [optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq") for p in params]
            return [*(p.detach() for p in params), *states]

        params, exp_avgs, exp_avg_sqs = ([w.clone() for w in start] for _ in range(3))
        for moment in (*exp_avgs, *exp_avg_sqs):
            moment.zero_()
        steps = [torch.tensor(0.0) for _ in start]
        for step in grads:
            decoupled = kind is torch.optim.AdamW
            self.step(params, step, exp_avgs, exp_avg_sqs, steps, **hyper, decoupled=decoupled)
        assert [float(t) for t in steps] == [10, 10]
        for ours, plain, exact in zip(
            (*params, *exp_avgs, *exp_avg_sqs),
            by_torch(torch.float32),
            by_torch(torch.float64),
            strict=True,
        ):
            assert_close_to_baseline(ours, plain, exact)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_copies_are_the_weights_rounded_to_nearest_even(self, dtype):
        # ties of bf16 among them
        bits = torch.arange(0x3F7F0000, 0x3F820000, 0x400, dtype=torch.int32)
        special = torch.tensor([0.0, -0.0, 1e38, -3.4e38, 65520.0, 1e-40, torch.inf, torch.nan])
        weight = torch.cat([bits.view(torch.float32), special, torch.randn(1000) * 1e-6])
        zeros = [torch.zeros_like(weight) for _ in range(3)]
        copy = torch.empty_like(weight, dtype=dtype)
        hyper = {**HYPER, "weight_decay": 0.0}
        before = weight.clone()
        self.step([weight], *([z] for z in zeros), [torch.tensor(0.0)], [copy], **hyper)
        torch.testing.assert_close(weight, before, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(copy, weight.to(dtype), rtol=0, atol=0, equal_nan=True)

    def test_infinity_and_nan_reach_the_weight(self):
        for bad in (torch.inf, torch.nan):
            grad = torch.zeros(40)
            grad[17] = bad
            w, m, v = torch.ones(40), torch.zeros(40), torch.zeros(40)
            self.step([w], [grad], [m], [v], [torch.tensor(0.0)], **HYPER)
            assert w.isfinite().sum() == 39
            assert not w[17].isfinite()

    def test_a_step_that_parameters_share_counts_as_in_torch(self):
        """torch's loop adds 1 for each parameter that holds the tensor; so do we."""
        results = []
        for step in (self.step, adamw_ref):
            w, g, m, v = ([torch.full((9,), x), torch.full((9,), x)] for x in (1.0, 0.5, 0.1, 0.2))
            shared = torch.tensor(2.0)
            step(w, g, m, v, [shared, shared], **HYPER)
            assert shared == 4
            results.append(w)
        torch.testing.assert_close(*results)

    @pytest.mark.parametrize(
        ("position", "value"),
        [
            (0, [torch.ones(4, dtype=torch.bfloat16)]),
            (1, [torch.ones(3)]),
            (1, [torch.ones(8)[::2]]),
            (1, []),
            (3, [torch.ones(4, dtype=torch.float64)]),
            (4, [torch.tensor(1, dtype=torch.int64)]),
            (4, []),
            (5, [torch.ones(4, dtype=torch.int32)]),
            (5, [torch.ones(5)]),
            (6, [torch.ones(4, dtype=torch.int16)]),
        ],
    )
    def test_the_kernel_checks_again(self, position, value):
        arguments = [[torch.ones(4)], [torch.ones(4)], [torch.ones(4)], [torch.ones(4)]]
        arguments += [[torch.tensor(0.0)], [], []]
        arguments[position] = value
        with pytest.raises(ValueError, match="adamw"):
            self.kernel(*arguments, None, 1e-3, 0.9, 0.95, 1e-8, 0.1, True, True)


@needs_native
class TestSteps(StepContract):
    """By the CPU's kernel."""


@needs_native
def test_autograd_sees_the_change():
    w = torch.ones(8, requires_grad=True)
    y = (w * w).sum()
    with torch.no_grad():
        adamw(
            [w], [torch.ones(8)], [torch.zeros(8)], [torch.zeros(8)], [torch.tensor(0.0)], **HYPER
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@needs_native
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_what_is_not_contiguous_takes_the_reference_and_says_so(layout, caplog):
    log_once.cache_clear()
    inputs = TestAdamw().inputs(torch.float32)
    laid = [change_layout(t, layout) for t in inputs.tensors]
    rows = [laid[i * 3 : i * 3 + 3] for i in range(5)]
    assert unsupported_reason(rows[1], rows[0], *rows[2:]) == "a tensor that is not contiguous"
    params = [t.clone() for t in rows[1]]  # keeps the strides of dense layouts
    with torch.no_grad():
        adamw(params, rows[0], *([t.clone() for t in row] for row in rows[2:]), **HYPER)
    assert "using plain PyTorch: a tensor that is not contiguous" in caplog.text
    want = run(stepped(adamw_ref), Inputs(inputs.tensors, dict(HYPER)), [])[0]
    for got, exact in zip(params, want, strict=False):
        assert torch.equal(got, exact)


def test_fp64_takes_the_reference(caplog):
    log_once.cache_clear()
    inputs = TestAdamw().inputs(torch.float32).to_fp64()
    got, want = (run(op, inputs, [])[0] for op in (stepped(adamw), stepped(adamw_ref)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "params of dtype torch.float64 (the kernels take float32)" in caplog.text


BAD = {
    "grads[0] must be floating, of shape [4]": {"grads": [torch.ones(3)]},
    "got torch.int64 [4]": {"grads": [torch.ones(4, dtype=torch.int64)]},
    "exp_avgs[0] must be floating, of shape [4]": {"exp_avgs": [torch.ones(2, 2)]},
    "needs one of exp_avg_sqs for each of 1 params, got 2": {"exp_avg_sqs": [torch.ones(4)] * 2},
    "needs one of steps for each of 1 params, got 0": {"steps": []},
    "steps[0] must be one number, got [2]": {"steps": [torch.ones(2)]},
    "copies[0] must be floating, of shape [4] and on cpu": {
        "copies": [torch.ones(4, device="meta")]
    },
    "grad_scale must be one number, got [2]": {"grad_scale": torch.ones(2)},
    "grad_scale must be on the cpu like params, got meta": {
        "grad_scale": torch.ones((), device="meta")
    },
    "steps[0] must be on the cpu like params[0], got meta": {
        "steps": [torch.ones((), device="meta")]
    },
    "grads[0] must be floating, of shape [4] and on cpu": {"grads": [torch.ones(4, device="meta")]},
    "exp_avgs[0] must be floating, of shape [4] and on cpu": {
        "exp_avgs": [torch.ones(4, device="meta")]
    },
    "exp_avg_sqs[0] must be floating, of shape [4] and on cpu": {
        "exp_avg_sqs": [torch.ones(4, device="meta")]
    },
    "call it under torch.no_grad()": {"params": [torch.ones(4, requires_grad=True)]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "copies")
    arguments: dict[str, Any] = {name: [torch.ones(4)] for name in names}
    arguments["steps"] = [torch.tensor(0.0)]
    arguments |= BAD[message]
    with pytest.raises(ValueError) as raised:
        adamw(**arguments, **HYPER)
    assert message in str(raised.value)
    assert str(raised.value).startswith("adamw: ")
