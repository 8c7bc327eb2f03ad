"""`--accel-tp-overlap` on a link that is slow: what of a tensor-parallel layer's communication hides.

Layers   One column-parallel and one row-parallel layer with sequence parallelism, those of the MLP of
         Megatron's 1.3 B with a sequence of 1024, on two ranks of one thread and one core each, fp32, through
         `parallel_linear`. The rate is chosen so that a forward's transfer
         takes 0.25, 0.5, 1 and 2 times its products. Measured in turn: the products alone, the collectives
         alone, one after the other (serial), Megatron's way, which hides a column layer's backward, and ours:
         `auto`, the flag's default, some numbers of pieces, and of a row layer's backward `auto` with dW in
         pieces. Hidden share: (serial - side) / min(products, collectives) of each round, and the median of
         these. The collectives are gloo's: it is above 1 where
         a side's own transfers take less time than these, which `serial` has in full. All sides are with
         host_batch_scheduling. The rate is one for all directions, of which gloo's collectives take other
         shares (its reduce-scatter sends as much as an all-reduce): each case says what these, alone, took of
         its products. Small layers, of half as many products, where transfers take as long as
         these: the fewer the products, the more of them is what pieces and messages cost.
GPT      The forward and backward pass of a real GPT of Megatron's, TP 2 with sequence parallelism, at rates
         where the bytes that its forward sends take 0.25, 0.5, 1 and 2 times as long as its linear layers'
         products. All gradients are compared with Megatron's first. Ours are with host_batch_scheduling, as
         in preset fast; one side is without, tp_overlap alone. Measured too, with host_batch_scheduling: the
         step of which nothing travels (computation: a gather repeats the rank's own rows, a reduction keeps
         them), the collectives that Megatron's step asks for, alone, and Megatron's step in which none goes
         on while something is computed (serial). Hidden share as above, of the lesser of computation and
         collectives. Where `auto` has least and where it has most to win, Megatron's step and tp_overlap
         alone are in 15 rounds, for the row that holds it to at most 1 % above Megatron's.

The link is of the lab (benchmarks/lab): network namespaces with a shaped interface, and without these a
wrapper that counts the time, which the method of each row says. Medians; one allocator for all sides, which
keeps freed pages; nothing else may run on the machine.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks.lab.link import Link, hosts_of

NAME = "tp_overlap"
PROGRAM = "benchmarks._tp_overlap_ranks"
RATIOS = (0.25, 0.5, 1.0, 2.0)
HIDDEN, FASTER, SLOWER = 0.8, 1.25, 1.01
RANKS = 2
STOCK, SERIAL = "Megatron", "one after the other"
PRODUCTS, COLLECTIVES = "products alone", "collectives alone"
COMPUTATION = "computation alone"
AUTO = "accel, auto"
IN_PIECES = "accel, auto, dW in pieces"
"""With `--accel-tp-overlap-wgrad pieces`, of which only a row layer's backward differs."""
ALONE = "tp_overlap alone"
"""`auto`, without host_batch_scheduling."""
SCHEDULED_TOO = "with host_batch_scheduling"
QUICKEST = "accel, the quickest setting"
RELATIVE = (
    "of the lesser of products and gloo's collectives, alone: above 1 where ours send quicker"
)
NUMBERS = (2, 4, 8)


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {side: 1e3 * statistics.median(times) for side, times in seconds.items()}


def shares(seconds: Mapping[str, list[float]], side: str, computes: str = PRODUCTS) -> list[float]:
    """Of each round what hides: a host that slows down for a while does so for a round's sides."""
    measured = (seconds[name] for name in (computes, COLLECTIVES, SERIAL, side))
    return [(serial - took) / min(lesser) for *lesser, serial, took in zip(*measured, strict=True)]


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Of each round."""
    return [a / b for a, b in zip(one, other, strict=True)]


def quickest(took: Mapping[str, float], otherwise: str = "") -> str:
    """Of accel's settings beside `auto`; `otherwise`: there is none."""
    others = (side for side in took if side.startswith(OURS) and side != AUTO)
    return min(others, key=took.__getitem__, default=otherwise)


def ours_first(values: Mapping[str, float], best: str) -> dict[str, float]:
    """`auto`, as whoever gives the flag alone has it, beside the others and the setting that was best."""
    rest = {side: value for side, value in values.items() if side != AUTO}
    return {OURS: values[AUTO], QUICKEST: values[best], **rest}


def layer_rows(link: Link, quick: bool) -> list[dict]:
    alone, _ = link.run(["products"], quick)
    rows = []
    for ratio in RATIOS[2:3] if quick else RATIOS:
        payload = alone["num_bytes"] / (ratio * alone["seconds"])
        found, kind = link.run(["layers-longer" if ratio == 1 else "layers"], quick, payload)
        case = f"rate {ratio:g}"
        rows += direction_rows(found, case, kind, HIDDEN if ratio == 1 else None)
    if quick:
        return rows
    alone, _ = link.run(["small-products"], quick)
    found, kind = link.run(["small-layers"], quick, alone["num_bytes"] / alone["seconds"])
    return rows + direction_rows(found, "small, rate 1", kind, None)


def direction_rows(
    found: Mapping[str, Any], case: str, kind: str, target: float | None
) -> list[dict]:
    """Of each direction its time, and what of the transfers hides."""
    rows = []
    for direction, seconds in found["directions"].items():
        took = medians(seconds)
        measured = statistics.median(ratios(seconds[COLLECTIVES], seconds[PRODUCTS]))
        name = f"{direction}, {case}: collectives take {measured:.2f} of the products"
        best = quickest(took)
        method = (
            f"accel: auto, which chose {found['auto'][direction]}; quickest: {best}; {found['shape']}; "
            f"{kind}; {RANKS} ranks of one thread; all sides with host_batch_scheduling; median of "
            f"{found['rounds']}, sides in turn"
        )
        hidden = ours_first(
            {
                side: statistics.median(shares(seconds, side))
                for side in seconds
                if side not in (PRODUCTS, COLLECTIVES, SERIAL)
            },
            best,
        )
        share = f"{RELATIVE}; {method}"
        rows += [
            row(name, "time", "ms", ours_first(took, best), method),
            row(name, "hidden share", "", hidden, share, better="higher", target=target),
        ]
    return rows


GPT_RUNS = {0.25: "gpt-pairs", 0.5: "gpt-short", 1.0: "gpt", 2.0: "gpt-short"}
"""Of each ratio what the ranks do."""


def gpt_rows(link: Link, quick: bool) -> list[dict]:
    alone, _ = link.run(["gpt-products"], quick)
    rows = []
    for ratio in RATIOS[2:3] if quick else RATIOS:
        payload = alone["num_bytes"] / (ratio * alone["seconds"])
        found, kind = link.run([GPT_RUNS[ratio]], quick, payload)
        rows += step_rows(found, ratio, kind)
    return rows


def step_rows(found: Mapping[str, Any], ratio: float, kind: str) -> list[dict]:
    """Of a GPT's step its time, what of the collectives hides, and how it compares with Megatron's."""
    seconds, rounds, pairs = found["seconds"], found["rounds"], found["pairs"]
    first = {side: times[:rounds] for side, times in seconds.items()}
    measured = statistics.median(ratios(first[COLLECTIVES], first[COMPUTATION]))
    name = f"{found['shape']}, rate {ratio:g}: collectives take {measured:.2f} of the computation"
    took = medians(seconds)
    best = quickest(took, AUTO)
    method = (
        f"accel: auto, which chose {found['auto']}, and host_batch_scheduling; quickest: {best}; TP {RANKS} "
        f"with sequence parallelism, forward and backward; {kind}; one thread a rank; median of {rounds}, of "
        f"Megatron, auto and tp_overlap alone of {pairs}, sides in turn"
    )
    accels = [side for side in found["differ"] if side != ALONE]
    hidden = {side: statistics.median(shares(first, side, COMPUTATION)) for side in accels}
    speed_up = {
        side: statistics.median(ratios(first[STOCK], first[ours_as]))
        for side, ours_as in {OURS: AUTO, QUICKEST: best, ALONE: ALONE}.items()
    }
    rows = [
        row(
            name,
            "elements of gradients that differ",
            "",
            ours_first(found["differ"], best),
            f"of {found['elements']}, from Megatron's",
            target=0,
        ),
        row(name, "step", "ms", ours_first(took, best), method),
        row(
            name,
            "hidden share",
            "",
            ours_first(hidden, best),
            f"of the lesser of computation and collectives, alone; {method}",
            better="higher",
        ),
        row(
            name,
            "speed-up of a step, host_batch_scheduling included",
            "x",
            speed_up,
            f"median of ratios of pairs; {method}",
            better="higher",
            target=FASTER if ratio == 1 else None,
        ),
    ]
    if found["pairs"] > rounds:
        of_pairs = {side: ratios(seconds[side], seconds[STOCK]) for side in (ALONE, AUTO)}
        spread = ", ".join(
            f"{side} {cuts[0]:.3f} to {cuts[-1]:.3f}"
            for side, cuts in ((side, statistics.quantiles(r, n=5)) for side, r in of_pairs.items())
        )
        rows.append(
            row(
                name,
                "tp_overlap's step by Megatron's",
                "",
                {
                    OURS: statistics.median(of_pairs[ALONE]),
                    SCHEDULED_TOO: statistics.median(of_pairs[AUTO]),
                },
                f"accel: tp_overlap alone, auto; median of {pairs} pairs; 20th to 80th percentile: {spread}; "
                f"{kind}",
                target=SLOWER,
            )
        )
    return rows


def trace(quick: bool = False) -> dict[str, Any]:
    """When two layers compute and communicate, where a transfer takes as long as a forward's products."""
    with hosts_of(PROGRAM, RANKS) as link:
        alone, _ = link.run(["products"], quick)
        found, kind = link.run(["trace"], quick, alone["num_bytes"] / alone["seconds"])
    return {**found, "link": kind}


def rows(quick: bool) -> list[dict]:
    with hosts_of(PROGRAM, RANKS) as link:
        return layer_rows(link, quick) + gpt_rows(link, quick)


def main(argv: list[str] | None = None) -> int:
    args: argparse.Namespace = bench.parser(NAME).parse_args(argv)
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
