"""AdamW on the CPU: `accel.ops.adamw` beside torch's loop (what stock Megatron runs), foreach and fused.

Bytes per element: fp32 28 (read gradient, weight and two moments, write all but the gradient). With a
bf16 model 30: the fp32 weight is the master, and the model's copy is written as well, by a `copy_` of
its own on torch's sides. With remainders (`accel.ops.remainder`) 28 again: the bf16 weight and 16 bits
are master and copy in one. There torch's sides do what they do with a bf16 model, and the GB/s of every
side count the 28. Clipping, over the same gradients: the norm reads 4, the scaling reads and writes 8,
beside what Megatron does without Apex. Many parameters: the list of a small GPT, 168 tensors of 128 to
2048 x 512 elements, where the cost of a call shows.

torch.compile is timed on the loop over one tensor, and not again beside remainders. Not swept: fp16 (the
traffic of bf16), L2 decay and absent bias correction (scalars), other thread counts (set
OMP_NUM_THREADS).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from accel.ops import adamw, adamw_ref, join_remainder, l2_norm, scale, split_remainder
from accel.testing import bench
from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

EAGER, FOREACH, FUSED, COMPILE = "torch eager", "torch foreach", "torch fused", "torch.compile"
HYPER = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}
BETAS = (0.9, 0.95)
# In a row from the gradient to the weight: see tests/ops/test_adamw.py.
ROUNDINGS = 8
# A remainder cannot tell a tie, which moves by one ulp: at most two roundings (accel/ops/remainder.py).
TIE_ROUNDINGS = 2

GPT_LAYER = [(512,), (1024, 512), (512, 512), (512,), (2048, 512), (512, 1024), (128,)]
MEBI = 1 << 20


class Lists(NamedTuple):
    """What a step takes, in the order of `adamw`."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    copies: list[Tensor]
    remainders: list[Tensor]


Step = Callable[[Lists], None]


def ours(lists: Lists) -> None:
    adamw(*lists, betas=BETAS, **HYPER)


def by_torch(lists: Lists, **kind: bool) -> None:
    adam(
        lists.params,
        lists.grads,
        lists.exp_avgs,
        lists.exp_avg_sqs,
        [],
        lists.steps,
        **kind,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        maximize=False,
        decoupled_weight_decay=True,
        **HYPER,
    )
    for copy, param in zip(lists.copies, lists.params, strict=False):
        copy.copy_(param)


def sides(quick: bool) -> dict[str, Step]:
    found: dict[str, Step] = {
        OURS: ours,
        EAGER: lambda lists: by_torch(lists, foreach=False),
        FOREACH: lambda lists: by_torch(lists, foreach=True),
        FUSED: lambda lists: by_torch(lists, fused=True),
    }
    if not quick:  # compiling takes longer than all the rest
        found[COMPILE] = torch.compile(found[EAGER], fullgraph=True, dynamic=False)
    return found


def draw(shapes: list[tuple[int, ...]], bf16_model: bool) -> Lists:
    torch.manual_seed(0)
    params, grads, exp_avgs = ([torch.randn(s) for s in shapes] for _ in range(3))
    exp_avg_sqs = [torch.rand(s) for s in shapes]
    steps = [torch.tensor(3.0) for _ in shapes]
    copies = [p.bfloat16() for p in params] if bf16_model else []
    return Lists(params, grads, exp_avgs, exp_avg_sqs, steps, copies, [])


def cloned(lists: Lists, dtype: torch.dtype | None = None) -> Lists:
    return Lists(*([t.to(dtype or t.dtype, copy=True) for t in row] for row in lists))


def split(lists: Lists) -> Lists:
    """Masters and copies as bf16 weights with remainders."""
    pairs = [split_remainder(master) for master in lists.params]
    weights, remainders = [w for w, _ in pairs], [r for _, r in pairs]
    return lists._replace(params=weights, copies=[], remainders=remainders)


def joined(lists: Lists) -> Lists:
    """Weights with remainders as masters and copies."""
    masters = [join_remainder(*pair) for pair in zip(lists.params, lists.remainders, strict=True)]
    return lists._replace(params=masters, copies=lists.params, remainders=[])


def check(steps: Mapping[str, Step], starts: Mapping[str, Lists]) -> None:
    exact, baseline = cloned(starts[EAGER], torch.float64), cloned(starts[EAGER])
    adamw_ref(*exact, betas=BETAS, **HYPER)
    adamw_ref(*baseline, betas=BETAS, **HYPER)
    for side, step in steps.items():
        got, roundings = cloned(starts[side]), ROUNDINGS
        step(got)
        if got.remainders:
            got, roundings = joined(got), ROUNDINGS + TIE_ROUNDINGS
        for name in ("params", "exp_avgs", "exp_avg_sqs", "copies"):
            for values in zip(*(getattr(x, name) for x in (got, baseline, exact)), strict=True):
                assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=roundings)


def step_case(
    name: str,
    shapes: list[tuple[int, ...]],
    steps: Mapping[str, Step],
    *,
    bf16_model: bool,
    remainders: bool = False,
    **targets: object,
) -> Case:
    """`remainders`: of a bf16 model, ours keeps these in place of masters and copies."""
    lists = draw(shapes, bf16_model)
    starts = dict.fromkeys(steps, lists)
    if remainders:
        pairs = split(lists)
        starts = {**dict.fromkeys(steps, joined(pairs)), OURS: pairs}  # the same masters: no ties
    num_elements = sum(p.numel() for p in lists.params)

    def call(side: str) -> Callable[[], None]:
        own = cloned(starts[side])  # every side moves weights of its own
        return lambda: steps[side](own)

    return Case(
        name=name,
        num_bytes=num_elements * (30 if bf16_model and not remainders else 28),
        copy_bytes=min(num_elements * 4, 128 * MEBI),
        check=lambda: check(steps, starts),
        sides={side: call(side) for side in steps},
        **targets,
    )


def clip_cases(num_elements: int) -> Iterator[Case]:
    """Megatron's `local_multi_tensor_l2_norm` and `_scale`, word for word, beside ours."""
    torch.manual_seed(0)
    grads = [torch.randn(num_elements // 8) for _ in range(8)]

    def norm_eager() -> Tensor:
        return torch.norm(torch.tensor([torch.norm(g) for g in grads]))

    def scale_eager(targets: list[Tensor] = grads) -> None:
        for source, target in zip(grads, targets, strict=True):
            target.copy_(source * 0.999)

    def check_norm() -> None:
        exact = torch.cat(grads).double().norm()
        assert_close_to_baseline(l2_norm(grads), norm_eager(), exact, name="norm")

    def check_scale() -> None:
        results = [[torch.empty_like(g) for g in grads] for _ in range(2)]
        scale_eager(results[0])
        scale(grads, results[1], 0.999)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    label = f"8 x {num_elements // 8 // MEBI}Mi float32"
    yield Case(
        name=f"norm {label}",
        num_bytes=4 * num_elements,
        copy_bytes=4 * num_elements,
        check=check_norm,
        sides={OURS: lambda: l2_norm(grads), EAGER: norm_eager},
    )
    yield Case(
        name=f"scale {label}",
        num_bytes=8 * num_elements,
        copy_bytes=4 * num_elements,
        check=check_scale,
        sides={OURS: lambda: scale(grads, grads, 1.0), EAGER: scale_eager},
    )


def cases(quick: bool) -> Iterator[Case]:
    steps = sides(quick)
    several = {side: step for side, step in steps.items() if side != COMPILE}
    targets = {} if quick else {"min_of_limit": 0.9, "min_speedups": {FUSED: 1.0, FOREACH: 3.0}}
    for mebi in [1] if quick else [8, 32]:
        shapes = [(mebi * MEBI,)]
        yield step_case(f"{mebi}Mi float32", shapes, steps, bf16_model=False, **targets)
        name = f"{mebi}Mi float32, bf16 model"
        yield step_case(name, shapes, steps, bf16_model=True, **targets)
        name = f"{mebi}Mi bf16 weights with remainders"
        yield step_case(name, shapes, several, bf16_model=True, remainders=True, **targets)
    layers = GPT_LAYER * (2 if quick else 24)
    name = f"{len(layers)} parameters, bf16 model"
    yield step_case(name, layers, several, bf16_model=True, **targets)
    yield from clip_cases((1 if quick else 32) * 8 * MEBI // 8)


def main(argv: list[str] | None = None) -> int:
    return bench.main("adamw", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
