"""Cross entropy on the CPU: `accel.ops.cross_entropy` beside eager and compiled PyTorch.

The peers widen the logits to fp32 first, as Megatron does. Bytes, with logits of T V elements: the
forward reads them; the backward reads them and writes their gradient. What is kept for each row is
below 1 % and not counted. In place our backward writes over the logits, as it does in Megatron: the
values then change from one round to the next, their number does not, and no value costs more than
another. Not swept: label smoothing (one addition per element), thread counts (OMP_NUM_THREADS).
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops import cross_entropy
from accel.testing import bench
from accel.testing.bench import OURS, Case, input_sets
from accel.testing.tolerance import assert_close_to_baseline

EAGER = "torch eager"
COMPILE = "torch.compile"

SHAPES = [((1024, 32000), torch.bfloat16), ((1024, 32000), torch.float32)]
QUICK_SHAPES = [((128, 4096), torch.bfloat16)]


def eager(logits: Tensor, target: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, reduction="none")


class Produced(torch.autograd.Function):
    """Logits as a layer would hand them over: no leaf, and free to be written over."""

    @staticmethod
    def forward(ctx: Any, layer: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[None, None]:
        return None, None


def cases(quick: bool) -> Iterator[Case]:
    for shape, dtype in QUICK_SHAPES if quick else SHAPES:
        torch.manual_seed(0)
        logits = torch.randn(shape).to(dtype) * 2
        target = torch.randint(0, shape[1], shape[:1])
        dloss = torch.rand(shape[0]) / shape[0]
        losses: dict[str, Callable[..., Tensor]] = {OURS: cross_entropy, EAGER: eager}
        if not quick:  # compiling takes longer than all the rest
            losses[COMPILE] = torch.compile(eager, fullgraph=True, dynamic=False)
        label = f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}"
        is_target = (shape, dtype) == SHAPES[0]

        def sides(ours, losses=losses):
            return {side: partial(gradient, f) for side, f in {**losses, OURS: ours}.items()}

        yield Case(
            name=f"forward+backward {label}",
            num_bytes=3 * logits.nbytes,
            copy_bytes=logits.nbytes,
            check=partial(_check, losses, logits, target, dloss),
            sides=sides(partial(cross_entropy, inplace=True)),
            input_sets=input_sets(logits.clone(), target, dloss),
            min_over_best=4.0 if is_target else None,
            min_of_limit=0.6 if is_target else None,
        )
        yield Case(
            name=f"same, not in place {label}",
            num_bytes=3 * logits.nbytes,
            copy_bytes=logits.nbytes,
            check=lambda: None,  # checked above
            sides=sides(cross_entropy),
            input_sets=input_sets(logits, target, dloss),
        )


def gradient(loss: Callable[..., Tensor], logits: Tensor, target: Tensor, dloss: Tensor) -> Tensor:
    produced = Produced.apply(torch.zeros((), requires_grad=True), logits)
    return torch.autograd.grad(loss(produced, target), produced, dloss)[0]


def _check(losses: dict[str, Any], logits: Tensor, target: Tensor, dloss: Tensor) -> None:
    logits, target, dloss = logits[:64], target[:64], dloss[:64]
    checked = {**losses, f"{OURS} in place": partial(cross_entropy, inplace=True)}

    def results(loss: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x = Produced.apply(torch.zeros((), requires_grad=True), logits.to(dtype, copy=True))
        out = loss(x, target)
        return [out.detach().clone(), *torch.autograd.grad(out, x, dloss.to(out.dtype))]

    exact = results(eager, torch.float64)
    baseline = results(eager, logits.dtype)
    for side, loss in checked.items():
        for name, *values in zip(
            ["loss", "dlogits"], results(loss, logits.dtype), baseline, exact, strict=True
        ):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=4)


def main(argv: list[str] | None = None) -> int:
    return bench.main("cross_entropy", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
