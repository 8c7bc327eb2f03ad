"""`--accel-host-optimizer` under Megatron's own optimizers: what stays on the device, and a step's time.

Memory   of the device after two steps, per parameter and rank, of a bf16 model of large layers: weights,
         masters, moments, gradient buffer; plain and distributed optimizer.
Step     `optimizer.step()` with clipping, sides interleaved in one process, on the same random gradients. On
         the CPU runtime host and device are the same cores and memory: "through the device" copies every
         state twice, which takes its time and hides none, as the streams of a GPU would.
Bits     weights and moments that differ from those of states on the device, at the end of these steps.

Stock is preset off: torch's AdamW, states on the device. "on the device" is accel's one-pass step there.
Checkpoints are in tests/distributed/test_host_optimizer.py.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.testing.bench import OURS, row
from benchmarks import _optimizer
from benchmarks._optimizer import SIZE

DEVICE, THROUGH, SHARED, STOCK = (
    "accel, on the device",
    "accel, through the device",
    "accel, and shared weights",
    "stock",
)
SIDES: dict[str, dict[str, Any]] = {
    OURS: {"fused_adamw": True, "host_optimizer": True},
    THROUGH: {"fused_adamw": True, "host_optimizer": True, "host_optimizer_ratio": 0.0},
    SHARED: {"fused_adamw": True, "host_optimizer": True, "shared_weights": True},
    DEVICE: {"fused_adamw": True},
    STOCK: {},
}
LAYERS, ROUNDS = 24, 14
SLOWER = 1.01
"""A step may take that much longer than with states on the device; MindSpeed says so of an iteration."""


def weights(model: Any) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def moments(optimizer: Any) -> list[Tensor]:
    states = optimizer.chained_optimizers[0].optimizer.state.values()
    return [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states]


def step_rows(rounds: int, layers: int) -> list[dict]:
    with _optimizer.alone():
        built = {}
        for side, options in SIDES.items():
            with _optimizer.enabled(options):
                built[side] = _optimizer.build(layers, distributed=False)
        seconds = _optimizer.take_steps(SIDES, built, rounds)
        differ = {
            side: sum(
                int((a != b).sum())
                for theirs, ours in zip(
                    (weights(built[DEVICE][0]), moments(built[DEVICE][1])),
                    (weights(built[side][0]), moments(built[side][1])),
                    strict=True,
                )
                for a, b in zip(theirs, ours, strict=True)
            )
            for side in (OURS, THROUGH)
        }
        host = built[OURS][1].chained_optimizers[0].optimizer
        (share,) = {host.ratio(arena, torch.float32) for arena in host._all_arenas()}
    counted = {side: times[2:] for side, times in seconds.items()}
    ratios = [a / b for a, b in zip(counted[OURS], counted[DEVICE], strict=True)]
    medians = {side: 1e3 * statistics.median(times) for side, times in counted.items()}
    case = f"{layers} x {SIZE} x {SIZE} bf16, plain optimizer"
    rates = ", ".join(
        f"{name} {value / 1e9:.3g}e9" for name, value in vars(host.host.rates).items() if value
    )
    method = (
        f"{len(ratios)} interleaved steps, {torch.get_num_threads()} thread(s); median of pairs "
        f"{statistics.median(ratios):.3f} of states on the device; the host's share {share:g}, by {rates}"
    )
    same = f"after {rounds} steps, weights and moments"
    return [
        row(case, "step", "ms", medians, method, target=SLOWER * medians[DEVICE]),
        row(case, "values unlike those of states on the device", "values", differ, same, target=0),
    ]


def memory_target(values: dict[str, float], distributed: bool, ranks: int) -> float:
    """Weights and fp32 gradients."""
    return 6.01


def rows(quick: bool) -> list[dict]:
    layers = 2 if quick else LAYERS
    with tempfile.TemporaryDirectory() as name:
        return [
            *step_rows(4 if quick else ROUNDS, layers),
            *_optimizer.memory_rows(Path(__file__), layers, Path(name), memory_target),
        ]


def main(argv: list[str] | None = None) -> int:
    return _optimizer.main("host_optimizer", SIDES, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
