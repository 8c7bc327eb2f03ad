"""Part memory: what the memory features save and cost, on a GPT of four layers of Llama 3 8B.

The same training as part training, with a vocabulary of 32,000 as on the CPU (`bench activation_memory`)
and 16 sequences a step, as many a micro-batch as stock has room for, a side after the other:

    stock            Megatron-LM's own
    accel fast       what the sides below are compared with
    recompute        activations and norms are computed again
    swap             what attention saves goes to the host, where the copies hide
    budget           as much device memory as stock takes with half of its activations
    host optimizer   master and moments live in the host's memory
    least            preset max with all of these but for the host optimizer

Recomputation, swaps and the host's states change no number: their losses are those of accel fast, digit
for digit. So that this can be asked, attention is Triton's on all of accel's sides: cuDNN's gradients, which
are the fastest, are sums in another order each time. A side that is done is not done again.

Limits: while the device steps all states, a step is no shorter than accel fast's and the transfers of these,
in the bus's two directions at once; no peak is less than weights, gradients and states that stay there.
"""

import os
import sys
from dataclasses import replace
from typing import Any

import torch

from accel.memory.host_split import measure_copies
from accel.ops._attention_backends import VARIABLE
from benchmarks.activation_memory import LEAST_FLAGS, SLOWER, SLOWER_IN_BUDGET
from benchmarks.gpu.setting import Setting, read, write_json
from benchmarks.gpu.training import (
    BYTES_PER_PARAMETER,
    LLAMA,
    SIDES,
    TOY,
    Llama,
    fits,
    fitting,
    train,
)

__all__ = ["BASE", "HALVED", "HALVED_TARGET", "TARGETS", "limits"]

BASE, STOCK, BUDGET, HALVED = "accel fast", "stock", "budget", "least"
ON_HOST = "host optimizer"
FAST = SIDES[BASE]
FLAGS = {
    STOCK: SIDES[STOCK],
    BASE: FAST,
    "recompute": (*FAST, "--accel-recompute-activation", "--accel-recompute-norm"),
    "swap": (*FAST, "--accel-swap-attention"),
    BUDGET: (*FAST, "--accel-memory-budget"),
    ON_HOST: (*FAST, "--accel-host-optimizer", "all"),
    HALVED: LEAST_FLAGS,
}
TARGETS = {"recompute": SLOWER, "swap": 1.01, BUDGET: SLOWER_IN_BUDGET, ON_HOST: 1.01}
"""A step's time over that of `BASE`."""
HALVED_TARGET = 0.5
"""The peak of `HALVED` over stock's."""
BYTES_ON_HOST, BYTES_OF_HALVED = 12, 16
"""Of a parameter: master and moments; bf16 weight, remainder, fp32 gradient and moments."""
SEQUENCES = 16
"""Of a step."""
VOCABULARY = 31999
"""Without the tokenizer's own."""
GIB = 1 << 30


def fitting_micro_batch(device_bytes: int) -> Llama:
    """As many sequences a micro-batch as stock has room for: it is activations that are to be saved."""
    layers = min(4, fitting(device_bytes).num_layers)
    for size in (4, 2, 1):
        name = f"Llama 3 8B, {layers} layers, vocabulary {VOCABULARY + 1}, micro-batches of {size}"
        shape = replace(
            LLAMA, num_layers=layers, vocab_size=VOCABULARY, micro_batch_size=size, name=name
        )
        if fits(shape, device_bytes):
            break
    return shape


def budget_of(shape: Llama, stock_peak: int) -> float:
    """GiB: stock's peak less half of what it takes beside weights, gradients and optimizer."""
    kept = BYTES_PER_PARAMETER * sum(shape.parameters)
    return (kept + max(0, stock_peak - kept) / 2) / GIB


def limits(sides: dict[str, Any], parameters: int, link: float) -> dict[str, float]:
    """Side -> what its target's figure cannot be less than.

    Args:
        parameters: of the whole model.
        link: bytes per second, of the slower direction.
    """
    found = {}
    if "ms" in sides.get(BASE, {}):
        found[ON_HOST] = 1 + 1e3 * BYTES_ON_HOST * parameters / link / sides[BASE]["ms"]
    if sides.get(STOCK, {}).get("peak_bytes"):
        found[HALVED] = BYTES_OF_HALVED * parameters / sides[STOCK]["peak_bytes"]
    return found


def flags_of(side: str, shape: Llama, sides: dict[str, Any]) -> tuple[str, ...]:
    flags = (*FLAGS[side], "--log-memory-interval", "1")
    if side != BUDGET:
        return flags
    at = flags.index("--accel-memory-budget") + 1
    budget = budget_of(shape, sides[STOCK]["peak_bytes"])
    return (*flags[:at], f"{budget:.3f}", *flags[at:])


def main() -> int:
    setting = Setting.from_argv()
    shape = TOY
    if not setting.rehearse:
        shape = fitting_micro_batch(torch.cuda.get_device_properties(0).total_memory)
    shape = replace(shape, micro_batches=SEQUENCES // shape.micro_batch_size)
    os.environ.setdefault(VARIABLE, "triton")
    link = min(measure_copies(torch.device(setting.device)))
    file = setting.folder / "memory.json"
    sides: dict[str, Any] = (read(file) or {"sides": {}})["sides"]
    for side in FLAGS:
        if "ms" in sides.get(side, {}):
            continue
        if setting.seconds_left < 0.15 * setting.seconds:
            sides[side] = {"failed": "no time left"}
            continue
        if side == BUDGET and "ms" not in sides[STOCK]:
            sides[side] = {"failed": f"its budget is of {STOCK}, which failed"}
            continue
        flags = flags_of(side, shape, sides)
        sides[side] = made = train(f"memory {side}", flags, shape, setting.folder)
        made["flags"] = " ".join(flags)
        if side != BASE and "ms" in made and "ms" in sides.get(BASE, {}):
            # of this call, whatever is measured again later
            made["base_ms"] = sides[BASE]["ms"]
            made["same_losses"] = made["losses"] == sides[BASE]["losses"]
        print(side, {k: v for k, v in made.items() if k != "features"}, flush=True)
        found = limits(sides, sum(shape.parameters), link)
        write_json(file, {"shape": shape.name, "link": link, "limits": found, "sides": sides})
    return 0 if all("ms" in made for made in sides.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
