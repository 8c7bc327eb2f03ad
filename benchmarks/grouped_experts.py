"""Megatron's experts of the local spec, forward and backward: one after the other, and grouped.

Megatron   `SequentialMLP` as it is: each expert by itself, ATen's threads sharing each of its products.
Grouped    `grouped_gemm` alone, Megatron's activation on all rows.
Fast       `grouped_gemm` and what else preset fast does here: the activation as one kernel.

16 experts of hidden 512 with as many rows each, SwiGLU. All of this process's threads; sides in turn in one
process; medians. Results and gradients of all sides are compared with Megatron's. The limit is products
alone, at the rate of one large product of all rows with a first and a second matrix.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import accel
from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks import _optimizer

NAME = "grouped_experts"
STOCK, GROUPED = "Megatron", "grouped_gemm alone"
SIDES: Mapping[str, Mapping[str, Any]] = {
    STOCK: {"preset": "off"},
    GROUPED: {"preset": "off", "grouped_gemm": True},
    OURS: {"preset": "fast"},
}
EXPERTS, HIDDEN, FASTER = 16, 512, 1.5
SHAPES = [
    (rows, ffn, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for ffn in (256, 1024)
    for rows in (512, 2048)
]
QUICK_SHAPES = [(64, 32, torch.float32)]
ROUNDS, MIN_ROUNDS, CASE_SECONDS = 15, 3, 30
"""Where products are slow, as of bf16 on CPUs that have none: no new round after so long, but so many."""
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Of a tensor's largest element."""


def experts_of(ffn: int, dtype: torch.dtype) -> Any:
    """Those of a GPT of one layer."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=ffn,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=64)
    return model.decoder.layers[0].mlp.experts


def step_of(experts: Any, rows: int, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """A forward and backward, which returns the result and all gradients."""
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, HIDDEN, generator=draw).to(dtype) for _ in range(2))
    probs, counts = torch.rand(rows, generator=draw), torch.full((EXPERTS,), rows // EXPERTS)
    weights = list(experts.parameters())

    def step() -> list[Tensor]:
        inputs = [x.detach().requires_grad_(), probs.detach().requires_grad_()]
        for weight in weights:
            weight.grad = None
        y, _ = experts(inputs[0], counts, inputs[1])
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in (*inputs, *weights))]

    return step


def check(found: Mapping[str, list[Tensor]], tolerance: float) -> None:
    for side, tensors in found.items():
        for ours, stock in zip(tensors, found[STOCK], strict=True):
            worst = float((ours.double() - stock.double()).abs().max() / stock.abs().max())
            if not worst <= tolerance:
                raise RuntimeError(f"{side} differs from Megatron by {worst:.1e}")


def product_milliseconds(rows: int, ffn: int, dtype: torch.dtype) -> float:
    """Three products of all rows with each of an expert's two matrices: forward, both gradients."""
    pairs = [
        (torch.randn(rows, width, dtype=dtype), torch.randn(width, columns, dtype=dtype))
        for width, columns in ((HIDDEN, 2 * ffn), (ffn, HIDDEN))
    ]
    taken = []
    for _ in rounds(9):
        start = time.perf_counter()
        for a, b in pairs * 3:
            a @ b
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def rounds(most: int) -> Iterator[int]:
    begin = time.perf_counter()
    for i in range(most):
        if i < MIN_ROUNDS or time.perf_counter() - begin < CASE_SECONDS:
            yield i


def rows(quick: bool) -> list[dict]:
    found = []
    with _optimizer.alone():
        for num_rows, ffn, dtype in QUICK_SHAPES if quick else SHAPES:
            with _optimizer.enabled({}):
                step = step_of(experts_of(ffn, dtype), num_rows, dtype)
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            results = {}
            for _ in rounds(2 if quick else ROUNDS):
                for side, options in SIDES.items():
                    accel.enable(**options)
                    results[side] = step()  # warms up
                    start = time.perf_counter()
                    step()
                    seconds[side].append(time.perf_counter() - start)
                    accel.disable()
            check(results, TOLERANCES[dtype])
            took = {side: 1e3 * statistics.median(of) for side, of in seconds.items()}
            limit = product_milliseconds(num_rows, ffn, dtype)
            name = (
                f"{EXPERTS} experts of {HIDDEN}, {ffn} (SwiGLU), {num_rows} rows, "
                f"{str(dtype).removeprefix('torch.')}"
            )
            method = (
                f"{torch.get_num_threads()} threads, forward and backward; median of "
                f"{len(seconds[OURS])}, sides in turn"
            )
            faster = {
                side: statistics.median(
                    a / b for a, b in zip(seconds[STOCK], seconds[side], strict=True)
                )
                for side in (OURS, GROUPED)
            }
            found += [
                row(name, "time", "ms", took, method, limit=limit),
                row(
                    name,
                    "speed-up over Megatron",
                    "x",
                    faster,
                    f"median of ratios of pairs; {method}",
                    better="higher",
                    limit=took[STOCK] / limit,
                    target=FASTER,
                ),
            ]
    return found


def main(argv: list[str] | None = None) -> int:
    args: argparse.Namespace = bench.parser(NAME).parse_args(argv)
    logging.disable(logging.WARNING)
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
