"""`python -m benchmarks.lab --ranks 2 --rate 50e6`: what the links of a lab give."""

from __future__ import annotations

import argparse
from statistics import median

import torch

from benchmarks.lab import network
from benchmarks.lab.limited import Limit
from benchmarks.lab.probe import Measured, measure

COLUMNS = ("asked", "one way", "both ways", "ring", "computing", "kept", "latency")


def table(rows: dict[float, Measured]) -> str:
    """Medians, a line for each rate."""
    lines = ["".join(f"{column:>11}" for column in COLUMNS)]
    for asked, found in rows.items():
        goodput = (found.one_way, found.both_ways, found.ring, found.computing)
        lines.append(
            "".join(f"{each / 1e6:11.1f}" for each in (asked, *map(median, goodput)))
            + f"{median(found.compute_kept):11.0%}{median(found.latency) * 1e6:8.0f} us"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, nargs="+", default=[50e6], help="bytes per second")
    parser.add_argument("--bytes", type=int, default=4 << 20, help="of the large message")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wrapper", action="store_true", help="not the kernel's links")
    args = parser.parse_args(argv)
    why = "asked for" if args.wrapper else network.reason()
    given = {"num_bytes": args.bytes, "repeats": args.repeats}
    rows: dict[float, Measured] = {}
    if why is None:
        with network.hosts(args.ranks) as lab:
            for rate in args.rate:
                lab.shape(rate)
                rows[rate] = measure(lab, args.ranks, **given)
            kind = lab.kind
    else:
        for rate in args.rate:
            rows[rate] = measure(None, args.ranks, bytes_per_second=rate, **given)
        kind = f"{Limit.kind} ({why})"
    print(f"{kind}, {args.ranks} ranks, messages of {args.bytes} bytes, torch {torch.__version__}")
    print("medians; goodput in MB/s; kept: speed of computation while the ring's messages flow")
    print(table(rows))


if __name__ == "__main__":
    main()
