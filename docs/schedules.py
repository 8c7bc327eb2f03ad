"""The page about pipeline schedules, with its figures and pictures; docs/generate.py writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from accel.parallel.schedule import (
    Schedule,
    Timeline,
    Times,
    dualpipe_v,
    interleaved,
    one_f_one_b,
    simulate,
    to_svg,
    v_half,
    v_min,
    zb_h1,
    zb_v,
)

SHAPES: Mapping[str, tuple[int, Callable[[int, int], Schedule]]] = {
    "1F1B": (1, one_f_one_b),
    "interleaved": (2, lambda p, m: interleaved(p, 2, m)),
    "interleaved, 1 more in warm-up": (2, lambda p, m: interleaved(p, 2, m, extra_warmup=1)),
    "interleaved, groups of 2 p": (2, lambda p, m: interleaved(p, 2, m, 2 * p)),
    "ZB-H1": (1, zb_h1),
    "ZB-V": (2, zb_v),
    "V-Half": (2, v_half),
    "V-Min": (2, v_min),
    "DualPipeV": (2, dualpipe_v),
}
"""Name -> chunks of a rank, and the generator."""
DRAWN = ("interleaved", "interleaved, groups of 2 p", "ZB-V", "DualPipeV")
TRANSFER = 0.5
"""Of the pictures, in forwards."""

TEXT = """{generated}
# Pipeline schedules

A schedule is data: for each rank an ordered list of what it computes, sends and receives
(`accel/parallel/schedule`). It is checked before anything runs (every value is there when it is taken, each
send has its receive in the same order, no rank waits for ever), timed by a simulator that is exact for
whole numbers and fractions, drawn, and run: one executor trains Megatron's models in the order of any of
them.

```bash
torchrun ... pretrain_gpt.py --pipeline-model-parallel-size 4 --accel-schedule zb-v ...
torchrun ... pretrain_gpt.py --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 \\
    --accel-vpp-extra-warmup 1 ...
```

[`--accel-schedule`](features/schedule.md) takes the names below,
[`--accel-vpp-extra-warmup`](features/vpp_extra_warmup.md) a number of forwards. After its fourth step a
training says what its schedule takes by the measured times of its passes and transfers, beside Megatron's.
Without training:

```bash
python -m accel schedule --pp 4 --vpp 2 --microbatches 16 --extra-warmup 1 --transfer 0.3 --render out.svg
python -m accel schedule --schedule zb-v --pp 8 --microbatches 32 --json
python -m accel schedule --pp 4 --microbatches 8 --write mine.json    # edit it, then --read mine.json
```

`interleaved` is Megatron's, action by action, as its own order functions say in the tests; DualPipeV is
that of torch's `ScheduleDualPipeV`. With K more forwards in warm-up, the forward and the backward that
follow each other belong to two micro-batches on every rank, so that the all-to-alls of the experts of one
can go on behind the other; the price is K more chunks in flight.

On a GPU or an NPU a receive holds its stream until the value comes, and with `CUDA_DEVICE_MAX_CONNECTIONS=1`
the only queue; a kernel that runs for the first time may wait until the device has nothing else to do. When
receives are posted is chosen so that, by a model of streams and queues (`accel/parallel/schedule/queues.py`),
no rank waits for another in a circle, and where there is no such choice a training ends in an error before
its first pass: `dualpipev`, and `interleaved` on two ranks, with values of variable length on one queue. No
choice bears kernels that are loaded in the first step of `dualpipev` on four or more ranks, nor of `v-half`
with one queue: `CUDA_MODULE_LOADING=EAGER` loads CUDA's before. Pipelines have not run on several GPUs.

For transfers between ranks a longer warm-up gains nothing: sent in the background, they hide behind the
passes in Megatron's order, but for the first turns, where a rank has no other micro-batch to go on with.
Larger groups (Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`) give it one. 4 ranks, 16
micro-batches, two chunks; exposed time in forwards of a chunk, of which the way to the last rank and back
is in any order:

{exposed}
8 ranks, 32 micro-batches, transfers that take no time; a whole backward takes twice a forward, half of it
for the weights. The unit is the forward pass of half a rank's layers:

{table}
In flight: the most activations that a rank holds, in halves of a rank's layers. The share is that of the
whole time. No schedule with two chunks can idle less than 7, for the last rank begins so late; what the
papers call zero bubble counts each rank's time from its own start.

4 ranks, 8 micro-batches, transfers of half a forward; red: a rank waits for its input:

{pictures}"""


def pages(
    docs: Path, generated: str, table: Callable[[tuple[str, ...], list[tuple[str, ...]]], str]
) -> dict[Path, str]:
    """The page, and its pictures."""
    made = {
        docs / "schedules" / f"{_slug(name)}.svg": to_svg(_timed(name, 4, 8, TRANSFER))
        for name in DRAWN
    }
    pictures = "\n\n".join(f"{name}:\n\n![{name}](schedules/{_slug(name)}.svg)" for name in DRAWN)
    head = ("schedule", "chunks of a rank", "bubble", "share", "in flight")
    rows = [_row(name) for name in SHAPES]
    transfers = (
        "a transfer takes",
        "Megatron's, blocking",
        "Megatron's order",
        "groups of 8",
        "any order",
    )
    text = TEXT.format(
        generated=generated,
        exposed=table(transfers, [_exposed(seconds) for seconds in (0.25, 0.5, 1.0)]),
        table=table(head, rows),
        pictures=pictures,
    )
    return {**made, docs / "schedules.md": text + "\n"}


def _timed(name: str, ranks: int, micro_batches: int, transfer: float = 0) -> Timeline:
    """In the time of half a rank's layers."""
    chunks, generator = SHAPES[name]
    unit = 2 // chunks
    times = Times(unit, 2 * unit, unit, bytes=transfer, bandwidth=1.0)
    return simulate(generator(ranks, micro_batches), times)


def _exposed(transfer: float) -> tuple[str, ...]:
    """What a step takes more for its transfers."""
    p, m = 4, 16
    times = Times(1, 2, 1, bytes=transfer, bandwidth=1.0)
    alone = simulate(interleaved(p, 2, m), Times(1, 2, 1)).makespan
    taken = (
        simulate(interleaved(p, 2, m), times, overlap=False, paired=True),
        simulate(interleaved(p, 2, m), times),
        simulate(interleaved(p, 2, m, 2 * p), times),
    )
    more = [float(each.makespan - alone) for each in taken]
    return tuple(f"{value:g}" for value in (transfer, *more, 2 * (p - 1) * transfer))


def _row(name: str) -> tuple[str, ...]:
    timeline = _timed(name, 8, 32)
    chunks, _ = SHAPES[name]
    held = max(timeline.in_flight) * (2 // chunks)
    share = f"{float(timeline.bubble_share):.1%}"
    return name, str(chunks), f"{float(timeline.bubble):g}", share, str(held)


def _slug(name: str) -> str:
    return "-".join(name.lower().replace(",", "").split())
