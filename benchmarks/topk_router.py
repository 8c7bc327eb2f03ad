"""The MoE router on the CPU: `topk_router` beside eager and compiled torch operations.

The peers compute what `megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function` computes.
Bytes, of fp32 logits [T, E]: forward reads them and writes probabilities and a map of one byte, 9 T E;
backward reads logits, map and gradient and writes one, 13 T E. These tensors fit the caches, so the
share of the copy says how much is arithmetic.
"""

import functools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from accel.ops import topk_router
from accel.ops.topk_router import topk_router_ref
from accel.testing import bench
from accel.testing.bench import OURS, Case
from accel.testing.tolerance import assert_close_to_baseline

EAGER, COMPILE = "torch eager", "torch.compile"

SHAPES = {
    "softmax": (4096, 8, {"topk": 2}),  # Mixtral 8x7B
    "sigmoid in groups": (  # DeepSeek-V3
        4096,
        256,
        {
            "topk": 8,
            "score_function": "sigmoid",
            "num_groups": 8,
            "group_topk": 4,
            "scaling_factor": 2.5,
        },
    ),
}
PEER_ROUNDINGS = 64  # peers need not keep our tolerance


def cases(quick: bool) -> Iterator[Case]:
    for name, (num_tokens, num_experts, options) in SHAPES.items():
        num_tokens = 256 if quick else num_tokens
        torch.manual_seed(0)
        logits = torch.randn(num_tokens, num_experts, requires_grad=True)
        dprobs = torch.randn(num_tokens, num_experts)
        sides: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
            OURS: functools.partial(topk_router, **options),
            EAGER: functools.partial(topk_router_ref, **options),
        }
        if not quick:  # compiling takes longer than all the rest
            compiled = torch.compile(topk_router_ref, fullgraph=True, dynamic=False)
            sides[COMPILE] = functools.partial(compiled, **options)
        label = f"{name} {num_tokens}x{num_experts} top {options['topk']}"

        def forward(op, logits=logits):
            return op(logits.detach())

        def both(op, logits=logits, dprobs=dprobs):
            return torch.autograd.grad(op(logits)[0], logits, dprobs)

        def check(sides=sides, logits=logits, dprobs=dprobs) -> None:
            _check(sides, logits, dprobs)

        yield Case(
            name=f"forward {label}",
            num_bytes=9 * logits.numel(),
            copy_bytes=logits.nbytes,
            check=check,
            sides={side: lambda f=op: forward(f) for side, op in sides.items()},
        )
        yield Case(
            name=f"forward+backward {label}",
            num_bytes=22 * logits.numel(),
            copy_bytes=logits.nbytes,
            check=lambda: None,  # the same sides as above
            sides={side: lambda f=op: both(f) for side, op in sides.items()},
        )


def _check(sides: dict[str, Callable[..., tuple[Tensor, Tensor]]], logits: Tensor, dprobs: Tensor):
    def results(op, logits: Tensor, dprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs, routing_map = op(logits)
        return probs.detach(), *torch.autograd.grad(probs, logits, dprobs), routing_map

    exact = results(sides[EAGER], logits.detach().double().requires_grad_(), dprobs.double())
    baseline = results(sides[EAGER], logits, dprobs)
    for side, op in sides.items():
        *got, routing_map = results(op, logits, dprobs)
        assert torch.equal(routing_map, baseline[2]), f"{side}: other experts"
        roundings = 8 if side == OURS else PEER_ROUNDINGS
        for name, *values in zip(("probs", "dlogits"), got, baseline[:2], exact[:2], strict=True):
            assert_close_to_baseline(*values, name=f"{side}: {name}", roundings=roundings)


def main(argv: list[str] | None = None) -> int:
    return bench.main("topk_router", cases, argv)


if __name__ == "__main__":
    sys.exit(main())
