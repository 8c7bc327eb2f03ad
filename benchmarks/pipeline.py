"""`--accel-schedule` and `--accel-vpp-extra-warmup` over a link that is slow: what of the transfers hides.

Waits    Stages that sleep in place of computing, so that four ranks fit on two cores: a forward of 24 ms
         and a backward of 48, half of it for the weights. Megatron's own function and accel's are called
         through `get_forward_backward_func`, with the same stages, over the same link; a message takes 0.25,
         0.5 and 1 forward. Exposed: what a step takes more than one with messages of 1 kB right after it.
         Hidden: how much of Megatron's exposed time is gone. Nothing else may run on the machine.
GPT      The passes of a real GPT of two virtual stages on two ranks, one core each. All gradients are
         compared with Megatron's first, bit for bit.
Theory   Bubbles of 8 ranks and 32 micro-batches, simulated, against the closed forms.

The link is of the lab (benchmarks/lab): network namespaces with a shaped interface, and without these a
wrapper that counts the time, which the method of each row says. Sides take turns in one process; medians.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel.parallel.schedule import Times, dualpipe_v, interleaved, one_f_one_b, simulate, zb_v
from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks.lab import launch, network

NAME = "pipeline"
RATE = 20e6
"""Bytes per second: slow enough that the transfers themselves cost little of the cores."""
PAYLOAD = 0.956
"""Of it, what is not the frames' heads."""
FORWARD, BACKWARD, WEIGHT = 0.024, 0.048, 0.024
RATIOS = (0.25, 0.5, 1.0)
HIDDEN, PREDICTED = 0.9, 0.05
STOCK, FLUSH = "Megatron", "Megatron, overlapped warm-up and flush"
BLOCKING, STOCK_GROUPS = "Megatron, no overlap", "Megatron, groups of 2 PP"
WARM, GROUPS = "accel, 1 more in warm-up", "accel, groups of 2 PP"


@contextmanager
def link(ranks: int) -> Iterator[tuple[Any, str]]:
    """The lab's hosts, and what they are."""
    reason = network.reason()
    if reason is not None:
        yield None, f"rate-limited wrapper of {RATE / 1e6:g} MB/s ({reason})"
        return
    with network.hosts(ranks, RATE) as hosts:
        yield hosts, f"{hosts.kind} of {RATE / 1e6:g} MB/s"


def measured(what: str, ranks: int, quick: bool) -> tuple[dict[str, Any], str]:
    """What the first rank found, and the link."""
    command = ["-m", "benchmarks._pipeline_ranks", what, *["--quick"] * quick]
    with link(ranks) as (hosts, kind):
        command += [] if hosts is not None else [f"--limit={RATE * PAYLOAD}"]
        outputs = launch.run(hosts, command, ranks, 2400, launch.CHECKOUT_FIRST)
    return json.loads(outputs[0].splitlines()[-1]), kind


def waiting_rows(ranks: int, quick: bool) -> list[dict]:
    found, kind = measured("waits", ranks, quick)
    rows = []
    for case in found["cases"]:
        name = f"PP {ranks} x VPP 2, a transfer of {case['ratio']:g} forwards"
        seconds = {side: statistics.median(times) for side, times in case["seconds"].items()}
        ends = 2 * (ranks - 1) * case["transfer"]
        exposed = {
            side: 1e3 * max(statistics.median(times), 0) for side, times in case["exposed"].items()
        }
        avoidable = {side: max(value - 1e3 * ends, 0) for side, value in exposed.items()}
        method = (
            f"{found['micro_batches']} micro-batches, {case['num_bytes'] / 1e3:.0f} kB a message, {kind}; "
            f"stages sleep; median of {found['rounds']} steps, sides in turn"
        )
        interleaved_ones = (OURS, WARM, GROUPS, STOCK, FLUSH, STOCK_GROUPS, BLOCKING)
        rows += [
            row(name, "step", "ms", {s: 1e3 * v for s, v in seconds.items()}, method),
            row(
                name,
                "exposed transfers of a step",
                "ms",
                {side: exposed[side] for side in interleaved_ones},
                f"median of steps less one with messages of 1 kB each; {1e3 * ends:.1f} ms of it, the way to "
                f"the last rank and back, are in any order; {method}",
                limit=1e3 * ends,
            ),
            row(
                f"{name}: groups of 2 PP",
                "hidden share of what Megatron exposes",
                "",
                {
                    OURS: 1 - avoidable[GROUPS] / avoidable[STOCK],
                    "of all, the way there and back too": 1 - exposed[GROUPS] / exposed[STOCK],
                    "of all that Megatron exposes without overlap": 1
                    - exposed[GROUPS] / exposed[BLOCKING],
                },
                f"of what any order can hide; {method}",
                better="higher",
                limit=1.0,
                target=HIDDEN,
            ),
        ]
        for side, predicted in case["predicted"].items():
            off = abs(seconds[side] / predicted - 1)
            rows.append(
                row(
                    f"{name}: {side}",
                    "step off the simulator's",
                    "",
                    {OURS: off},
                    f"{1e3 * seconds[side]:.1f} ms measured, {1e3 * predicted:.1f} ms predicted by the times "
                    f"of the passes and of a transfer; {method}",
                    target=PREDICTED,
                )
            )
    return rows


def gpt_rows(quick: bool) -> list[dict]:
    found, kind = measured("gpt", 2, quick)
    name = found["shape"]
    method = (
        f"PP 2 x VPP 2, {found['micro_batches']} micro-batches, {found['num_bytes'] / 1e3:.0f} kB a message, "
        f"{kind}; forward and backward passes of a step, one thread a rank; median of {found['rounds']}, "
        "sides in turn"
    )
    seconds = {side: statistics.median(times) for side, times in found["seconds"].items()}
    pairs = [a / b for a, b in zip(found["seconds"][OURS], found["seconds"][STOCK], strict=True)]
    return [
        row(
            name,
            "elements of gradients that differ",
            "",
            {side: found["differ"][side] for side in found["differ"]},
            f"of {found['elements']}, from those of Megatron's own function",
            target=0,
        ),
        row(name, "step", "ms", {side: 1e3 * value for side, value in seconds.items()}, method),
        row(
            name,
            "step against Megatron's",
            "",
            {OURS: statistics.median(pairs)},
            f"median of ratios of pairs; {method}",
        ),
    ]


def theory_rows() -> list[dict]:
    """In forwards of half a rank's layers; a whole backward is two of them, half of it for the weights."""
    p, m = 8, 32
    half, whole = Times(1, 2, 1), Times(2, 4, 2)
    cases = {
        "1F1B": (one_f_one_b(p, m), whole, (p - 1) * 6),
        "interleaved, 2 chunks": (interleaved(p, 2, m), half, (p - 1) * 3),
        "ZB-V": (zb_v(p, m), half, p - 1),
        "DualPipeV": (dualpipe_v(p, m), half, p - 1),
    }
    return [
        row(
            f"{name}, {p} ranks, {m} micro-batches",
            "bubble",
            "forwards of half a rank's layers",
            {OURS: float(simulate(schedule, times).bubble), "closed form": float(closed)},
            "simulated, no transfers",
            limit=float(closed),
            target=closed * 1.05,
        )
        for name, (schedule, times, closed) in cases.items()
    ]


def rows(quick: bool) -> list[dict]:
    made = theory_rows()
    for ranks in (2,) if quick else (2, 4):
        made += waiting_rows(ranks, quick)
    return made + gpt_rows(quick)


def main(argv: list[str] | None = None) -> int:
    args: argparse.Namespace = bench.parser(NAME).parse_args(argv)
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
