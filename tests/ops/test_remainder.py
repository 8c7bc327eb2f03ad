"""`split_remainder`, `join_remainder`, and the step of `adamw` on such pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.ops import adamw, adamw_ref, join_remainder, split_remainder
from tests.ops.contract import needs_native

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
EVERY_UPPER_HALF = torch.arange(1 << 16, dtype=torch.int64) << 16
LOWER_HALVES = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
UPPER_HALVES = (
    torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x8000, 0xBF80, 0xFFFF]) << 16
)


def words(bits: Tensor) -> Tensor:
    """int64 bits -> fp32."""
    return bits.to(torch.int32).view(torch.float32)


def bits_of(x: Tensor) -> Tensor:
    """fp32 -> int64 bits, 0 to 2^32 - 1."""
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


SOME = torch.cat(
    [
        words((EVERY_UPPER_HALF[:, None] + LOWER_HALVES).flatten()),
        words((UPPER_HALVES[:, None] + torch.arange(1 << 16)).flatten()),
    ]
)
"""Every upper half with the lower halves that matter, every lower half with some upper ones."""


def check(x: Tensor, weight: Tensor, remainder: Tensor) -> int:
    """The weight is `x` in bfloat16, and `x` comes back, but for the ties; how many there were."""
    back, nan = join_remainder(weight, remainder), x.isnan()
    rounded = x.to(torch.bfloat16)
    torch.testing.assert_close(weight[~nan], rounded[~nan], rtol=0, atol=0)
    assert weight[nan].isnan().all()
    assert back[nan].isnan().all()
    bits = bits_of(x)
    tie = ((bits & 0x1FFFF) == 0x8000) & ~nan
    assert torch.equal(bits_of(back)[~nan], (bits - tie.long())[~nan])
    return int(tie.sum())


def test_the_weight_is_rounded_to_nearest_and_the_master_comes_back() -> None:
    assert check(SOME, *split_remainder(SOME)) > 32_000


def test_a_number_that_came_back_stays() -> None:
    once = join_remainder(*split_remainder(SOME))
    again = join_remainder(*split_remainder(once))
    assert torch.equal(bits_of(again), bits_of(once))


def zeroed() -> tuple[Tensor, Tensor, Tensor]:
    """Weights of either zero that another program has written over others, what is left beside them, and the
    masters that they tell."""
    _, remainder = split_remainder(words(LOWER_HALVES.repeat(2) + (0x3F80 << 16)))
    zeros = torch.zeros(len(LOWER_HALVES), dtype=torch.bfloat16)
    weight = torch.cat([zeros, -zeros])
    distance = remainder.clamp(min=0).to(torch.int64)
    assert (remainder < 0).sum() == 4
    return weight, remainder, words((weight.float().view(torch.int32) & 0xFFFFFFFF) + distance)


def test_a_weight_that_was_set_to_zero_is_no_nan() -> None:
    weight, remainder, masters = zeroed()
    joined = join_remainder(weight, remainder)
    assert torch.equal(bits_of(joined), bits_of(masters))
    assert torch.equal(joined.to(torch.bfloat16), weight)


def compare(
    step: Callable[..., None],
    shapes: Sequence[tuple[int, ...]],
    grad_dtype: torch.dtype,
    seed: int,
    *,
    decoupled: bool,
) -> None:
    """Three steps on pairs against three on their masters."""
    draw = torch.Generator().manual_seed(seed)
    masters, grads, exp_avgs = ([torch.randn(s, generator=draw) for s in shapes] for _ in range(3))
    masters = [join_remainder(*split_remainder(w)) for w in masters]  # none is a tie
    grads = [g.to(grad_dtype) for g in grads]
    exp_avg_sqs = [torch.rand(s, generator=draw) for s in shapes]
    pairs = [split_remainder(w) for w in masters]
    weights, remainders = [w for w, _ in pairs], [r for _, r in pairs]
    copies = [torch.empty_like(w) for w in weights]
    ours, plain = (
        ([*map(torch.clone, exp_avgs)], [*map(torch.clone, exp_avg_sqs)]),
        (
            exp_avgs,
            exp_avg_sqs,
        ),
    )
    for _ in range(3):
        for params, moments, beside in (
            (masters, plain, {"copies": copies}),
            (weights, ours, {"remainders": remainders}),
        ):
            steps = [torch.tensor(4.0) for _ in shapes]
            step(params, grads, *moments, steps, **beside, **HYPER, decoupled=decoupled)
        for w, copy, r, master in zip(weights, copies, remainders, masters, strict=True):
            assert torch.equal(w, copy)
            master.copy_(join_remainder(*split_remainder(master)))
            assert torch.equal(join_remainder(w, r), master)
    for mine, theirs in zip((*ours[0], *ours[1]), (*plain[0], *plain[1]), strict=True):
        assert torch.equal(mine, theirs)


class PairContract:
    """Steps on pairs, whoever computes them: a derived class says what `step` is."""

    step = staticmethod(adamw)
    shapes: Sequence[tuple[int, ...]] = [(), (0,), (13, 9), (64,)]

    def test_a_step_splits_what_it_has_joined(self) -> None:
        """One that has nothing to do."""
        weight, remainder = split_remainder(SOME)
        zeros = [torch.zeros_like(SOME) for _ in range(3)]
        still = {**HYPER, "lr": 0.0, "eps": 1.0}
        self.step([weight], *([z] for z in zeros), [torch.tensor(0.0)], (), [remainder], **still)
        assert check(SOME, weight, remainder) > 32_000

    @pytest.mark.parametrize(
        ("dtype", "decoupled"), [(torch.float32, True), (torch.bfloat16, False)]
    )
    def test_a_step_on_pairs_is_a_step_on_the_masters(self, dtype, decoupled) -> None:
        compare(self.step, self.shapes, dtype, seed=1, decoupled=decoupled)

    def test_a_step_from_a_weight_that_was_set_to_zero(self) -> None:
        weight, remainder, masters = zeroed()
        grad, m = torch.randn(len(masters)), torch.randn(len(masters))
        for params, beside in (([weight], {"remainders": [remainder]}), ([masters], {})):
            steps, moments = [torch.tensor(4.0)], ([m.clone()], [torch.ones_like(m)])
            self.step(params, [grad], *moments, steps, **beside, **HYPER)
        results = join_remainder(weight, remainder), join_remainder(*split_remainder(masters))
        assert torch.equal(*results)
        assert not results[0].isnan().any()

    def test_the_reference_keeps_pairs_as_the_kernel_does(self) -> None:
        torch.manual_seed(0)
        master, grad, m = (torch.randn(1000) for _ in range(3))
        v = torch.rand(1000)
        pairs = []
        for step in (self.step, adamw_ref):
            w, r = split_remainder(master)
            moments = [m.clone()], [v.clone()]
            step([w], [grad], *moments, [torch.tensor(4.0)], (), [r], **HYPER)
            pairs.append(join_remainder(w, r))
        torch.testing.assert_close(*pairs)


@needs_native
class TestPairs(PairContract):
    """By the CPU's kernel."""


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.sampled_from([(), (0,), (1,), (13, 17), (31,), (64,), (67, 3)]), max_size=4),
    grad_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
    decoupled=st.booleans(),
)
def test_steps_on_any_pairs(shapes, grad_dtype, seed, decoupled) -> None:
    compare(adamw, shapes, grad_dtype, seed, decoupled=decoupled)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": [torch.zeros(4)]}, r"params\[0\] with a remainder must be bfloat16"),
        ({"remainders": [torch.zeros(4)]}, r"remainders\[0\] must be int16"),
        ({"remainders": [torch.zeros(3, dtype=torch.int16)]}, r"of shape \[4\]"),
        (
            {"remainders": [torch.zeros(4, dtype=torch.int16)] * 2},
            "one of remainders for each of 1",
        ),
        ({"copies": [torch.zeros(4)]}, "give no copies"),
    ],
)
def test_wrong_pairs_are_refused(changed: dict, message: str) -> None:
    given = {
        "params": [torch.zeros(4, dtype=torch.bfloat16)],
        "remainders": [torch.zeros(4, dtype=torch.int16)],
        **changed,
    }
    rows = [[torch.zeros(4)] for _ in range(3)]
    with pytest.raises(ValueError, match=message):
        adamw(given.pop("params"), *rows, [torch.tensor(0.0)], **given, **HYPER)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x must be torch\.float32, got torch\.float64"):
        split_remainder(torch.zeros(2, dtype=torch.float64))
    weight, remainder = split_remainder(torch.zeros(2))
    with pytest.raises(ValueError, match=r"weight must be torch\.bfloat16"):
        join_remainder(weight.float(), remainder)
    with pytest.raises(ValueError, match=r"shape of weight \[2\], got \[1\]"):
        join_remainder(weight, remainder[:1])
