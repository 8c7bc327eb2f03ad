"""Mixtures of experts over a slow link: what of their all-to-alls hides, and what copies of hot experts save.

Exchange   The experts of a layer on two ranks of one thread and one core each, forward and backward, fp32,
           as many rows for each expert, through `routed_experts`. The rate is chosen so that the transfers by
           themselves take 0.5 and 1 times the experts' own work. Measured in turn: that work on rows that are
           there, the transfers, one all-to-all after the other around grouped products as in Megatron, and
           ours in some numbers of slices. Hidden share: 1 - (ours - work) / transfers, with the median of
           what ours takes more than the work of the same round.
GPT        The forward and backward of a real GPT of Megatron's, EP 2, at the rate where transfers take as
           long as the experts. All gradients are compared with Megatron's first.
Hot        Experts whose popularity falls as Zipf's law with exponent 1.2, the first rank's first, at full
           speed, where the work dominates: the layer, and the GPT in preset fast (but for what has to be
           there when it is built), in whose step the experts count for more. The limit is the same with
           experts that are equally popular. Loads of 4 ranks come from the planner, over 200 draws of
           counts and of who owns which expert; beside them those of experts that have moved, and of
           EPLB's replicas, both from the same counts and so as if these had been known before.

The link is of the lab (benchmarks/lab). Ours has `host_batch_scheduling` on, since before the clock starts.
Medians; one allocator for all sides, which keeps freed pages; nothing else may run on the machine. The ranks
are launched three times, and all their rounds count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch

from accel.parallel.experts.plan import (
    longest_over_mean,
    place_eplb,
    place_greedy,
    plan_copies,
    rank_loads,
    slot_loads,
)
from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks.lab.link import Link, hosts_of

NAME = "moe"
PROGRAM = "benchmarks._moe_ranks"
RANKS = 2
RATIOS = (0.5, 1.0)
LAUNCHES = 3
STOCK, GROUPED = "Megatron", "grouped products, no overlap"
COMPUTE, TRANSFERS = "work alone", "transfers alone"
WITHOUT, EVEN = "accel, no copies", "accel, as many rows for each expert"
POPULAR = "accel, experts equally popular"
MOVED, EPLB = "experts moved, the largest first", "EPLB, 4 more replicas"
HIDDEN, FASTER, HOT_FASTER, LONGEST = 0.7, 1.2, 1.3, 1.15


@dataclass(frozen=True)
class Sizes:
    """Of a layer and of a rank's rows, a token once for each of its choices."""

    rows: int
    experts: int
    hidden: int
    ffn: int

    @classmethod
    def of(cls, quick: bool) -> Sizes:
        return cls(64, 8, 32, 48) if quick else cls(2048, 16, 512, 1024)

    def __str__(self) -> str:
        return f"{self.experts} experts of {self.hidden}, {self.ffn} (SwiGLU), {self.rows} rows a rank, fp32"


def zipf_counts(ranks: int, experts: int, rows: int, seed: int) -> list[list[int]]:
    """`[ranks][experts]`: rows drawn with a popularity of (e + 1)^-1.2."""
    draw = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, experts + 1, dtype=torch.float64) ** -1.2
    drawn = torch.multinomial(popularity, ranks * rows, replacement=True, generator=draw)
    return [torch.bincount(each, minlength=experts).tolist() for each in drawn.view(ranks, rows)]


def launched(
    link: Link, what: str, quick: bool, payload: float | None = None
) -> tuple[dict[str, Any], str]:
    """What several launches of the ranks found, their rounds together: much of what differs from run to run
    differs from launch to launch."""
    found, kind = link.run([what], quick, payload)
    for _ in range(0 if quick else LAUNCHES - 1):
        again, _ = link.run([what], quick, payload)
        for side, seconds in again["seconds"].items():
            found["seconds"][side] += seconds
        found["rounds"] += again["rounds"]
        if "error" in found:
            found["error"] = max(found["error"], again["error"])
    return found, kind


def exchange_rows(link: Link, quick: bool) -> tuple[list[dict], float]:
    """And the payload at which transfers take as long as the work."""
    alone, _ = link.run(["alone"], quick)
    rows, payload = [], 0.0
    for ratio in RATIOS[1:] if quick else RATIOS:
        payload = alone["num_bytes"] / (ratio * alone["seconds"])
        taken, _ = link.run(["transfers"], quick, payload)
        payload *= taken["seconds"] / (
            ratio * alone["seconds"]
        )  # a link's rate is not all it gives
        found, kind = launched(link, "exchange", quick, payload)
        took = medians(found["seconds"])
        name = f"{found['shape']}, transfers take {ratio:g} of the work"
        method = (
            f"transfers alone take {took[TRANSFERS] / took[COMPUTE]:.2f} of the work; {kind}; {RANKS} ranks "
            f"of one thread, forward and backward; median of {found['rounds']}, sides in turn"
        )
        sides = [side for side in took if side not in (COMPUTE, TRANSFERS)]
        hidden = {
            side: 1
            - 1e3 * more(found["seconds"][side], found["seconds"][COMPUTE]) / took[TRANSFERS]
            for side in sides
        }
        rows += [
            row(name, "time", "ms", took, method, limit=max(took[COMPUTE], took[TRANSFERS])),
            row(
                name,
                "hidden share",
                "",
                hidden,
                method,
                better="higher",
                limit=1.0,
                target=HIDDEN,
            ),
        ]
    return rows, payload


def gpt_rows(link: Link, quick: bool, payload: float | None) -> list[dict]:
    """Over the slow link; None: at full speed, with hot experts."""
    hot = payload is None
    found, kind = launched(link, "gpt-skewed" if hot else "gpt", quick, payload)
    what = "Zipf's law, full speed, preset fast" if hot else "transfers take 1 of the experts' work"
    name = f"{found['shape']}, {what}"
    took = medians(found["seconds"])
    method = (
        f"EP {RANKS}, forward and backward; {kind}; one thread a rank; median of {found['rounds']}, sides in "
        "turn"
    )
    seconds = found["seconds"]
    targets = {WITHOUT: HOT_FASTER, STOCK: None} if hot else {STOCK: FASTER, GROUPED: None}
    return [
        row(
            name,
            "largest difference of a gradient",
            "",
            {OURS: found["error"]},
            "from Megatron's, of its tensor's largest element",
            target=1e-5,
        ),
        row(name, "step", "ms", took, method, limit=took.get(POPULAR)),
        *(
            row(
                name,
                f"speed-up of a step over {base}",
                "x",
                {OURS: speed_up(seconds[base], seconds[OURS])},
                f"median of ratios of pairs, the medians' is {took[base] / took[OURS]:.3g}; {method}",
                better="higher",
                limit=speed_up(seconds[base], seconds[POPULAR]) if base == WITHOUT else None,
                target=target,
            )
            for base, target in targets.items()
        ),
    ]


def hot_rows(link: Link, quick: bool) -> list[dict]:
    found, kind = launched(link, "hot", quick)
    took = medians(found["seconds"])
    name = f"{found['shape']}, popularity by Zipf's law"
    method = (
        f"{found['copies']} copies; {kind}; {RANKS} ranks of one thread, forward and backward; median of "
        f"{found['rounds']}, sides in turn"
    )
    seconds = found["seconds"]
    faster = {side: speed_up(seconds[WITHOUT], times) for side, times in seconds.items()}
    return [
        row(name, "time", "ms", took, method, limit=took[EVEN]),
        row(name, "max/mean of the ranks' rows", "", found["loads"], method, target=LONGEST),
        row(
            name,
            "speed-up",
            "x",
            {side: value for side, value in faster.items() if side != WITHOUT},
            f"median of ratios of pairs, to {WITHOUT}; {method}",
            better="higher",
            target=HOT_FASTER,
        ),
    ]


def planned_rows(quick: bool) -> list[dict]:
    """Loads of 16 experts on 4 ranks, before and after."""
    ranks, experts, rows, most = 4, 16, 4096, 4
    sides: dict[str, list[float]] = {OURS: [], WITHOUT: [], MOVED: [], EPLB: []}
    owners = [e * ranks // experts for e in range(experts)]
    for seed in range(5 if quick else 200):
        counts = zipf_counts(ranks, experts, rows, seed)
        order = random.Random(seed).sample(range(experts), experts)
        counts = [[rows_of[e] for e in order] for rows_of in counts]
        totals = [sum(of_expert) for of_expert in zip(*counts, strict=True)]
        copies = plan_copies(counts, owners, most, 0)
        loads = {
            OURS: rank_loads(counts, owners, copies),
            WITHOUT: rank_loads(counts, owners),
            MOVED: rank_loads(counts, place_greedy(totals, ranks)),
            EPLB: slot_loads(totals, place_eplb(totals, ranks, experts + most)),
        }
        for side, of_ranks in loads.items():
            sides[side].append(longest_over_mean(of_ranks))
    name = f"{experts} experts on {ranks} ranks, {rows} rows each by Zipf's law, owners drawn"
    method = f"the planner, up to {most} experts copied; of {len(sides[OURS])} draws"
    return [
        row(
            name,
            f"max/mean of the ranks' rows, {what}",
            "",
            {side: of(found) for side, found in sides.items()},
            method,
            limit=1.0,
            target=LONGEST,
        )
        for what, of in (("median", statistics.median), ("largest", max))
    ]


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {side: 1e3 * statistics.median(times) for side, times in seconds.items()}


def more(slower: list[float], faster: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(slower, faster, strict=True))


def speed_up(slower: list[float], faster: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def rows(quick: bool) -> list[dict]:
    with hosts_of(PROGRAM, RANKS) as link:
        found, payload = exchange_rows(link, quick)
        found += gpt_rows(link, quick, payload)
        found += hot_rows(link, quick) + gpt_rows(link, quick, None)
    return found + planned_rows(quick)


def main(argv: list[str] | None = None) -> int:
    args: argparse.Namespace = bench.parser(NAME).parse_args(argv)
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
