"""Attention over sequences that are split over ranks: what its communication costs, and what memory it takes.

Ring     Causal attention on two ranks of one thread and one core each, fp32, over the slow link of the lab
         (benchmarks/lab). The rate is chosen so that the transfers of a forward and a backward by themselves
         take some 0.25, 0.5 and 1 times the attention itself. Measured in turn: the ring's blocks without
         transfers (each rank takes its own keys twice), its transfers without attention, one after the other,
         and each way to share. Ideal: one rank's attention over the whole sequence, divided by the ranks.
Memory   `examples/pretrain_gpt.py`, one layer of hidden size 128 at a sequence of 32,768 with CP 1, 2 and 4:
         the sum over the ranks of the allocator's peaks. Not with --quick.

Medians; one allocator for all sides, which keeps freed pages; nothing else may run on the machine.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks.lab.link import Link, hosts_of
from benchmarks.step import Shape, peak_of

NAME = "context_parallel"
PROGRAM = "benchmarks._context_parallel_ranks"
RANKS = 2
RATIOS = (0.25, 0.5, 1.0)
ATTENTION, TRANSFERS, SERIAL = "attention alone", "transfers alone", "one after the other"
IDEAL, GATHERED, HEADS, KEPT = "ideal", "all_gather", "a2a", "ring, keys and values kept"
OF_IDEAL = 0.85
TIMES_ONE_RANK = 1.1

LONG = Shape(
    "GPT, 1 layer of 128, sequence 32768",
    *(1, 128, 352, 2, 2),
    seq_length=32768,
    micro_batch_size=1,
    vocab_size=255,
    ranks=1,
    threads=2,
    min_speedup=None,
)


def ring_rows(link: Link, quick: bool) -> list[dict]:
    alone, _ = link.run(["alone"], quick)
    rows = []
    for ratio in RATIOS[1:2] if quick else RATIOS:
        payload = alone["num_bytes"] / (ratio * alone["seconds"])
        sent, _ = link.run(["transfers"], quick, payload)
        payload *= sent["seconds"] / (ratio * alone["seconds"])  # a link's rate is not all it gives
        found, kind = link.run(["ring"], quick, payload)
        method = (
            f"{kind}; {RANKS} ranks of one thread; median of {found['rounds']}, sides in turn; ideal: one "
            f"rank's attention over the whole sequence divided by {RANKS}"
        )
        for direction, seconds in found["directions"].items():
            name = f"{found['shape']}, {direction}, transfers take {ratio:g} of the attention"
            took = {side: 1e3 * statistics.median(times) for side, times in seconds.items()}
            both = direction == "forward and backward"
            how = f"transfers alone take {took[TRANSFERS] / took[IDEAL]:.2f} of ideal; {method}"
            rows += [
                row(name, "time", "ms", took, how, limit=took[IDEAL]),
                row(
                    name,
                    "share of ideal",
                    "",
                    shares(took),
                    how,
                    better="higher",
                    limit=1.0,
                    target=OF_IDEAL if both and ratio == 0.5 else None,
                ),
            ]
    return rows


def shares(took: Mapping[str, float]) -> dict[str, float]:
    """Of the ideal's time, for the sides that attend over all keys."""
    return {
        side: took[IDEAL] / time
        for side, time in took.items()
        if side not in (IDEAL, ATTENTION, TRANSFERS)
    }


def memory_rows() -> list[dict]:
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2, 4):
            split = ("--tensor-model-parallel-size", "1", "--context-parallel-size", str(ranks))
            local = ("--transformer-impl", "local", "--no-create-attention-mask-in-dataloader")
            shape = replace(LONG, ranks=ranks, threads=max(1, 2 // ranks))
            peaks[ranks] = peak_of(shape, Path(folder), *split, *local)
    return [
        row(
            f"{LONG.name}, CP {ranks}",
            "peaks of all ranks added up",
            "MiB",
            {OURS: peaks[ranks], "one rank": peaks[1]},
            "what PyTorch's CPU allocator handed out and had not got back, weights and optimizer included; "
            "bf16, --cp-comm-type p2p, local spec",
            target=TIMES_ONE_RANK * peaks[1],
        )
        for ranks in (2, 4)
    ]


def rows(quick: bool) -> list[dict]:
    with hosts_of(PROGRAM, RANKS) as link:
        found = ring_rows(link, quick)
    return found if quick else found + memory_rows()


def main(argv: list[str] | None = None) -> int:
    args: argparse.Namespace = bench.parser(NAME).parse_args(argv)
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
