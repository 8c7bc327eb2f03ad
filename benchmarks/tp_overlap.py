"""`--accel-tp-overlap` on a link that is slow: what of a tensor-parallel layer's communication hides.

Layers   One column-parallel and one row-parallel layer with sequence parallelism, those of the MLP of
         Megatron's 1.3 B with a sequence of 1024, on two ranks of one thread and one core each, fp32, through
         `parallel_linear`. The rate is chosen so that a forward's transfer
         takes 0.25, 0.5, 1 and 2 times its products. Measured in turn: the products alone, the collectives
         alone, one after the other (serial), Megatron's way, which hides a column layer's backward, and ours:
         `auto`, the flag's default, and some numbers of pieces. Hidden share: (serial - side) / min(products,
         collectives) of each round, and the median of these. The collectives are gloo's: it is above 1 where
         a side's own transfers take less time than these, which `serial` has in full. All sides are with
         host_batch_scheduling. Small layers, of half as many products, where transfers take as long as
         these: the fewer the products, the more of them is what pieces and messages cost.
GPT      The forward and backward pass of a real GPT of Megatron's, TP 2 with sequence parallelism, at a rate
         where the collectives of its forward take as long as its linear layers' products. All gradients are
         compared with Megatron's first. Ours are with host_batch_scheduling, as in preset fast; one side is
         without, tp_overlap alone.

The link is of the lab (benchmarks/lab): network namespaces with a shaped interface, and without these a
wrapper that counts the time, which the method of each row says. Medians; one allocator for all sides, which
keeps freed pages; nothing else may run on the machine.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks.lab.link import Link, hosts_of

NAME = "tp_overlap"
PROGRAM = "benchmarks._tp_overlap_ranks"
RATIOS = (0.25, 0.5, 1.0, 2.0)
HIDDEN, FASTER = 0.8, 1.25
RANKS = 2
STOCK, SERIAL = "Megatron", "one after the other"
PRODUCTS, COLLECTIVES = "products alone", "collectives alone"
AUTO = "accel, auto"
ALONE = "tp_overlap alone"
"""`auto`, without host_batch_scheduling."""
QUICKEST = "accel, the quickest setting"
RELATIVE = (
    "of the lesser of products and gloo's collectives, alone: above 1 where ours send quicker"
)
NUMBERS = (2, 4, 8)


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {side: 1e3 * statistics.median(times) for side, times in seconds.items()}


def shares(seconds: Mapping[str, list[float]], side: str) -> list[float]:
    """Of each round what hides: a host that slows down for a while does so for a round's sides."""
    measured = (seconds[name] for name in (PRODUCTS, COLLECTIVES, SERIAL, side))
    return [(serial - took) / min(lesser) for *lesser, serial, took in zip(*measured, strict=True)]


def quickest(took: Mapping[str, float]) -> str:
    """Of accel's ways with a number of pieces that is given."""
    return min((s for s in took if s.startswith(OURS) and s != AUTO), key=took.__getitem__)


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
        case = f"transfers take {ratio:g} of the products"
        rows += direction_rows(found, case, kind, HIDDEN if ratio == 1 else None)
    if quick:
        return rows
    alone, _ = link.run(["small-products"], quick)
    found, kind = link.run(["small-layers"], quick, alone["num_bytes"] / alone["seconds"])
    return rows + direction_rows(found, "small, transfers take 1 of the products", kind, None)


def direction_rows(
    found: Mapping[str, Any], case: str, kind: str, target: float | None
) -> list[dict]:
    """Of each direction its time, and what of the transfers hides."""
    rows = []
    for direction, seconds in found["directions"].items():
        name = f"{direction}, {case}"
        took = medians(seconds)
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


def gpt_rows(link: Link, quick: bool) -> list[dict]:
    alone, _ = link.run(["gpt-products"], quick)
    found, kind = link.run(["gpt"], quick, alone["num_bytes"] / alone["seconds"])
    name = f"{found['shape']}, transfers take 1 of the products"
    took = medians(found["seconds"])
    best = quickest(took)
    method = (
        f"accel: auto, which chose {found['auto']}, and host_batch_scheduling; quickest: {best}; TP {RANKS} "
        f"with sequence parallelism, forward and backward; {kind}; one thread a rank; median of "
        f"{found['rounds']}, sides in turn"
    )
    speed_up = {
        side: statistics.median(
            stock / ours
            for stock, ours in zip(found["seconds"][STOCK], found["seconds"][ours_as], strict=True)
        )
        for side, ours_as in {OURS: AUTO, QUICKEST: best, ALONE: ALONE}.items()
    }
    return [
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
            "speed-up of a step, host_batch_scheduling included",
            "x",
            speed_up,
            f"median of ratios of pairs; {method}",
            better="higher",
            target=FASTER,
        ),
    ]


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
