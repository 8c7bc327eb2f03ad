"""``python -m accel schedule``: a pipeline schedule, checked, timed and drawn, beside Megatron's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accel.cli import tables
from accel.cli.parser import Parser
from accel.parallel import schedule as schedules
from accel.parallel.schedule import Schedule, Timeline, Times
from accel.parallel.schedule.names import INTERLEAVED, NAMED, named, read

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse(argv)
    try:
        draw = _drawer(args.render)
        schedule = read(args.read) if args.read else _made(args)
        found = {args.read.name if args.read else _name(args): _timed(schedule, args)}
        if not args.read and (stock := _to_compare(schedule.num_chunks, args)) is not None:
            found["Megatron's"] = _timed(stock, args)
        if args.write is not None:
            whole = next(iter(found.values())).schedule
            args.write.write_text(json.dumps(whole.to_dict()) + "\n")
        if draw is not None:
            draw(next(iter(found.values())))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps([_figures(name, timeline) for name, timeline in found.items()], indent=2))
    else:
        for name, timeline in found.items():
            _show(name, timeline)
    return 0


def _parser() -> Parser:
    parser = Parser("schedule")
    add = parser.add_argument
    add("--pp", type=int, default=4, metavar="P", help="ranks of the pipeline (%(default)s)")
    add("--vpp", type=int, metavar="V", help="chunks of a rank (1; of a V: 2)")
    add("--microbatches", type=int, default=16, metavar="M", help="(%(default)s)")
    add("--schedule", default=INTERLEAVED, choices=[INTERLEAVED, *NAMED], help="(%(default)s)")
    add("--extra-warmup", type=int, default=0, metavar="K", help="forwards more than Megatron's")
    add("--group-size", type=int, metavar="G", help="micro-batches of a virtual stage's turn (P)")
    add("--forward", type=float, default=1.0, metavar="S", help="seconds of a chunk (%(default)s)")
    add("--backward", type=float, default=2.0, metavar="S", help="whole (%(default)s)")
    add("--weight", type=float, default=1.0, metavar="S", help="of it the weights' (%(default)s)")
    add(
        "--transfer", type=float, default=0.0, metavar="S", help="seconds on the link (%(default)s)"
    )
    add("--latency", type=float, default=0.0, metavar="S", help="beside these (%(default)s)")
    add("--blocking", action="store_true", help="a transfer holds both its ranks")
    add("--read", type=Path, metavar="FILE", help="take the schedule from a JSON file")
    add("--write", type=Path, metavar="FILE", help="write it, with its transfers, as JSON")
    add(
        "--render",
        type=Path,
        metavar="FILE",
        help="draw it: .png, .svg, or .json for a Chrome trace",
    )
    return parser


def _name(args: Any) -> str:
    if args.schedule != INTERLEAVED or not args.extra_warmup:
        return str(args.schedule)
    return f"{args.schedule}, {args.extra_warmup} more in warm-up"


def _made(args: Any) -> Schedule:
    if args.schedule == INTERLEAVED:
        return _megatrons(1 if args.vpp is None else args.vpp, args, args.extra_warmup)
    chunks = NAMED[args.schedule].chunks
    for flag, value, fits in (
        ("--vpp", args.vpp, (None, chunks)),
        ("--extra-warmup", args.extra_warmup, (0,)),
        ("--group-size", args.group_size, (None,)),
    ):
        if value not in fits:
            raise ValueError(
                f"{flag} {value}: --schedule {args.schedule} has --vpp {chunks}, no extra warm-up "
                "and no groups"
            )
    return named(args.schedule, args.pp, chunks, args.microbatches)


def _megatrons(chunks: int, args: Any, extra_warmup: int = 0) -> Schedule:
    if chunks == 1 and (extra_warmup or args.group_size is not None):
        raise ValueError("--extra-warmup and --group-size are for --vpp 2 or more")
    return named(INTERLEAVED, args.pp, chunks, args.microbatches, args.group_size, extra_warmup)


def _to_compare(chunks: int, args: Any) -> Schedule | None:
    """Megatron's with as many chunks; None where that is what was asked for, or it takes no such counts."""
    if args.schedule == INTERLEAVED and not args.extra_warmup:
        return None
    try:
        return _megatrons(chunks, args)
    except ValueError:
        return None


def _timed(schedule: Schedule, args: Any) -> Timeline:
    times = Times(
        args.forward,
        args.backward,
        args.weight,
        latency=args.latency,
        bytes=args.transfer,
        bandwidth=1.0,
    )
    # a forward and a backward send and receive together, as Megatron has it where transfers block
    paired = args.blocking and schedule.compute_only
    return schedules.simulate(schedule, times, overlap=not args.blocking, paired=paired)


def _drawer(path: Path | None) -> Callable[[Timeline], object] | None:
    if path is None:
        return None
    drawers: dict[str, Callable[[Timeline], object]] = {
        ".png": lambda timeline: schedules.to_png(timeline, path),
        ".svg": lambda timeline: path.write_text(schedules.to_svg(timeline)),
        ".json": lambda timeline: path.write_text(json.dumps(schedules.to_chrome_trace(timeline))),
    }
    if path.suffix not in drawers:
        raise ValueError(f"--render {path}: use a name that ends in {', '.join(drawers)}")
    return drawers[path.suffix]


def _figures(name: str, timeline: Timeline) -> dict[str, Any]:
    """Seconds, and activations in chunks of one micro-batch."""
    return {
        "schedule": name,
        "makespan": float(timeline.makespan),
        "bubble": float(timeline.bubble),
        "bubble_share": float(timeline.bubble_share),
        "ranks": [
            {
                "rank": rank,
                "busy": float(timeline.busy[rank]),
                "idle": float(timeline.idle[rank]),
                "exposed": float(timeline.exposed[rank]),
                "in_flight": timeline.in_flight[rank],
            }
            for rank in range(len(timeline.events))
        ],
    }


def _show(name: str, timeline: Timeline) -> None:
    figures = _figures(name, timeline)
    print(
        f"{name}: {figures['makespan']:g} s, bubble {figures['bubble']:g} s "
        f"({figures['bubble_share']:.1%} of it)"
    )
    rows = [{key: f"{value:g}" for key, value in row.items()} for row in figures["ranks"]]
    tables.show(rows, [[key] for key in rows[0]])
