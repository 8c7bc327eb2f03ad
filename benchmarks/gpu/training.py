"""Part training: a Llama-3-8B-shaped GPT on one GPU, stock Megatron-LM beside accel's presets.

Layers of Llama 3 8B (hidden 4096, feed-forward 14336, 32 heads over 8 groups, vocabulary 128256,
sequence 4096), as many as fit. All sides train the same mock data from the same weights with the
same script, one after the other: two of them do not fit on the device at once. One side takes its
optimizer's step after 65,536 tokens in place of 16,384, closer to what a GPU sees in a pretraining, in
micro-batches of as many sequences as accel has room for; its time is compared with the datasheet alone.

    model FLOPs of a sequence   6 P S + 6 L S^2 H / 2 x 2 = 6 P S + 6 L S^2 H
                                P: all weights but the embedding's table, which multiplies nothing
                                the second term: causal attention, QK^T and PV forward and twice
                                backward, only the half of S x S that is not masked
    MFU                         model FLOPs over time and the datasheet's peak; recomputation adds none
"""

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu.setting import CHECKOUT, PEAKS, Setting, write_json
from benchmarks.gpu.sides import ScriptError, run_script
from benchmarks.step import STOCK_FLAGS, Shape

sys.path.insert(0, str(CHECKOUT / "examples" / "demo"))
from measure import parse

STEPS, WARM_UP = 14, 4
BYTES_PER_PARAMETER = 18
"""bf16 weight, fp32 gradient, master and two moments."""
ACTIVATION_BYTES_PER_LAYER = 5 << 30
"""Of stock at S = 4096: the probabilities of 32 heads, 1 GiB, are there about four times."""
LOGIT_COPIES = 4
LEAN_BYTES_PER_LAYER = 3 << 29
"""Of accel at S = 4096; it keeps two copies of the logits, in bf16."""
SEQUENCES_OF_LONG_STEP = 16
ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")

LONG_STEP = "accel fast, 65,536 tokens a step"
SIDES = {
    "stock": STOCK_FLAGS,
    "accel fast": ("--accel-preset", "fast"),
    LONG_STEP: ("--accel-preset", "fast"),
    "accel max": ("--accel-preset", "max"),
}


@dataclass(frozen=True)
class Llama(Shape):
    """`benchmarks.step.Shape` with what its FLOPs need."""

    micro_batches: int = 4

    def megatron_flags(self) -> list[str]:
        flags = super().megatron_flags()
        flags[flags.index("--global-batch-size") + 1] = str(self.sequences)
        return flags

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.micro_batches * self.micro_batch_size

    @property
    def parameters(self) -> tuple[int, int]:
        """Of the layers with the output projection, and of the embedding's table."""
        h, f = self.hidden_size, self.ffn_hidden_size
        kv = h * self.num_kv_heads // self.num_heads
        layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
        table = self.vocab_size * h
        return self.num_layers * layer + h + table, table

    @property
    def flops_per_step(self) -> float:
        multiplied, _ = self.parameters
        s, h = self.seq_length, self.hidden_size
        sequence = 6 * multiplied * s + 6 * self.num_layers * s * s * h
        return float(self.sequences * sequence)


LLAMA = Llama(
    "Llama 3 8B",
    *(32, 4096, 14336, 32, 8),
    seq_length=4096,
    micro_batch_size=1,
    vocab_size=128255,
    ranks=1,
    threads=8,
    min_speedup=1.3,
    steps=STEPS,
    flags=("--untie-embeddings-and-output-weights",),
)
TOY = Llama(
    "toy",
    *(1, 64, 128, 4, 2),
    seq_length=64,
    micro_batch_size=1,
    vocab_size=255,
    ranks=1,
    threads=1,
    min_speedup=None,
    steps=6,
    flags=("--untie-embeddings-and-output-weights",),
)


def fits(shape: Llama, device_bytes: int) -> bool:
    """Whether stock has room for it."""
    logits = LOGIT_COPIES * 4 * shape.seq_length * shape.vocab_size
    of_a_sequence = logits + shape.num_layers * ACTIVATION_BYTES_PER_LAYER
    need = BYTES_PER_PARAMETER * sum(shape.parameters) + shape.micro_batch_size * of_a_sequence
    return need < 0.9 * device_bytes


def fitting(device_bytes: int) -> Llama:
    """As many layers of LLAMA as stock has room for, 1 to 8: more would not change the ratio."""
    for num_layers in range(8, 0, -1):
        shape = replace(LLAMA, name=f"Llama 3 8B, {num_layers} layers", num_layers=num_layers)
        if fits(shape, device_bytes):
            return shape
    raise ValueError(f"not one layer of {LLAMA.name} fits into {device_bytes / 2**30:.0f} GiB")


def long_step(shape: Llama, device_bytes: int) -> Llama:
    """16 sequences a step, in micro-batches of as many as accel has room for."""
    of_a_sequence = 2 * 2 * shape.seq_length * shape.vocab_size
    of_a_sequence += shape.num_layers * LEAN_BYTES_PER_LAYER
    room = 0.9 * device_bytes - BYTES_PER_PARAMETER * sum(shape.parameters)
    size = next(n for n in (4, 2, 1) if n * of_a_sequence < room or n == 1)
    return replace(
        shape, micro_batch_size=size, micro_batches=SEQUENCES_OF_LONG_STEP // size, steps=8
    )


def train(side: str, flags: Sequence[str], shape: Llama, folder: Path) -> dict[str, Any]:
    """One side: step time, losses, peak memory, features; or `failed` with the end of its log."""
    log = folder / f"{side.replace(' ', '-')}.log"
    script = CHECKOUT / "examples" / "pretrain_gpt.py"
    try:
        run_script(script, [*shape.megatron_flags(), *flags], log, shape.threads)
    except ScriptError as error:
        return {"failed": str(error)[-2000:]}
    lines = log.read_text(errors="replace").splitlines()
    run = parse(lines)
    milliseconds = [float(m[1]) for line in lines if (m := ELAPSED.search(line))]
    timed = milliseconds[min(WARM_UP, len(milliseconds) // 2) :]
    return {
        "ms": statistics.median(timed),
        "range_ms": [min(timed), max(timed)],
        "losses": [interval.loss for interval in run.intervals],
        "peak_bytes": max(run.peak_bytes.values(), default=0),
        "features": run.features,
    }


def train_sides(
    kinds: Mapping[str, Sequence[str]],
    shape: Llama,
    setting: Setting,
    name: str,
    shapes: Mapping[str, Llama] = MappingProxyType({}),
) -> int:
    """All sides, as far as there is time, into `<name>.json`. Returns the part's exit code.

    Args:
        kinds: side -> its flags.
        shapes: side -> its shape, where it is another than `shape`.
    """
    sides: dict[str, Any] = {}
    peak = PEAKS.get(setting.machine)
    for side, flags in kinds.items():
        if setting.seconds_left < 0.2 * setting.seconds:
            sides[side] = {"failed": "no time left"}
            continue
        own = shapes.get(side, shape)
        sides[side] = made = train(f"{name} {side}", flags, own, setting.folder)
        if "ms" in made:
            rate = own.flops_per_step / (made["ms"] * 1e-3)
            made["sequences"] = own.sequences
            made["micro_batch_size"] = own.micro_batch_size
            made["tokens_per_s"] = own.sequences * own.seq_length / (made["ms"] * 1e-3)
            made["flops_per_s"] = rate
            made["mfu"] = rate / peak if peak else None
        print(side, {k: v for k, v in made.items() if k != "features"}, flush=True)
        write_json(
            setting.folder / f"{name}.json",
            {"shape": shape.name, "peak_flops": peak, "sides": sides},
        )
    return 0 if all("ms" in made for made in sides.values()) else 1


def main() -> int:
    setting = Setting.from_argv()
    shape, device_bytes = TOY, 0
    if not setting.rehearse:
        device_bytes = torch.cuda.get_device_properties(0).total_memory
        shape = fitting(device_bytes)
    shapes = {LONG_STEP: long_step(shape, device_bytes)}
    return train_sides(SIDES, shape, setting, "training", shapes)


if __name__ == "__main__":
    sys.exit(main())
