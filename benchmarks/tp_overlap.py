"""`--accel-tp-overlap` on a link that is slow: what of a tensor-parallel layer's communication hides.

Layers   One column-parallel and one row-parallel layer with sequence parallelism, on two ranks of one thread
         and one core each, fp32, through `parallel_linear`. The rate is chosen so that a forward's transfer
         takes 0.25, 0.5, 1 and 2 times its products. Measured in turn: the products alone, the collectives
         alone, one after the other (serial), Megatron's way, which hides a column layer's backward, and ours
         in some numbers of pieces. Hidden share: (serial - ours) / min(collectives, products).
GPT      The forward and backward pass of a real GPT of Megatron's, TP 2 with sequence parallelism, at a rate
         where the collectives of its forward take as long as its linear layers' products. All gradients are
         compared with Megatron's first.

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
NUMBERS = (2, 4, 8, 16)


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {side: 1e3 * statistics.median(times) for side, times in seconds.items()}


def quickest(took: Mapping[str, float]) -> str:
    """Of accel's ways."""
    return min((side for side in took if side.startswith(OURS)), key=took.__getitem__)


def layer_rows(link: Link, quick: bool) -> list[dict]:
    alone, _ = link.run(["products"], quick)
    rows = []
    for ratio in RATIOS[2:3] if quick else RATIOS:
        payload = alone["num_bytes"] / (ratio * alone["seconds"])
        found, kind = link.run(["layers"], quick, payload)
        for direction, seconds in found["directions"].items():
            name = f"{direction}, transfers take {ratio:g} of the products"
            took = medians(seconds)
            method = (
                f"{found['shape']}; {kind}; {RANKS} ranks of one thread; median of {found['rounds']}, "
                "sides in turn"
            )
            best = quickest(took)
            lesser = min(took[PRODUCTS], took[COLLECTIVES])
            hidden = {
                side: (took[SERIAL] - value) / lesser
                for side, value in {OURS: took[best], **took}.items()
                if side not in (PRODUCTS, COLLECTIVES, SERIAL)
            }
            rows += [
                row(name, "time", "ms", {OURS: took[best], **took}, f"accel: {best}; {method}"),
                row(
                    name,
                    "hidden share",
                    "",
                    hidden,
                    f"accel: {best}; auto chose {found['auto'][direction]}; {method}",
                    better="higher",
                    limit=1.0,
                    target=HIDDEN if ratio == 1 else None,
                ),
            ]
    return rows


def gpt_rows(link: Link, quick: bool) -> list[dict]:
    alone, _ = link.run(["gpt-products"], quick)
    found, kind = link.run(["gpt"], quick, alone["num_bytes"] / alone["seconds"])
    name = f"{found['shape']}, transfers take 1 of the products"
    took = medians(found["seconds"])
    best = quickest(took)
    method = (
        f"accel: {best}; auto chose {found['auto']}; TP {RANKS} with sequence parallelism, forward and "
        f"backward; {kind}; one thread a rank; median of {found['rounds']}, sides in turn"
    )
    speed_up = {
        side: statistics.median(
            stock / ours
            for stock, ours in zip(found["seconds"][STOCK], found["seconds"][ours_as], strict=True)
        )
        for side, ours_as in {OURS: best, AUTO: AUTO}.items()
    }
    return [
        row(
            name,
            "elements of gradients that differ",
            "",
            {OURS: found["differ"][best], **found["differ"]},
            f"of {found['elements']}, from Megatron's",
            target=0,
        ),
        row(name, "step", "ms", {OURS: took[best], **took}, method),
        row(
            name,
            "speed-up of a step",
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
