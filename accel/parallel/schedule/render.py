"""A timeline as a picture (SVG, PNG) and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from os import PathLike
from typing import Any

from accel.parallel.schedule.actions import Action, Kind
from accel.parallel.schedule.engine import Event
from accel.parallel.schedule.simulate import Timeline

__all__ = ["to_chrome_trace", "to_png", "to_svg"]

_COLORS = {
    Kind.FORWARD: ("#4c78a8", "#9ecae9"),
    Kind.BACKWARD: ("#54a24b", "#a1d99b"),
    Kind.BACKWARD_INPUT: ("#54a24b", "#a1d99b"),
    Kind.BACKWARD_WEIGHT: ("#e6a23c", "#fad689"),
}
"""Of the even and of the odd chunks."""
_WAIT = "#e45756"
_WIDTH, _ROW, _BAR, _LEFT, _TOP, _LEGEND = 1200, 28, 22, 64, 34, 200
"""Of the picture; heights of a rank and of its boxes, room for the labels, and for a name in the legend, in
pixels."""


def to_svg(timeline: Timeline) -> str:
    """A row for each rank: a box with its micro-batch for each computation, a red bar for each wait."""
    ranks = len(timeline.events)
    legend, columns = _legend(timeline), _WIDTH // _LEGEND
    height = _TOP + _ROW * ranks + 10 + 20 * -(-len(legend) // columns)
    scale = (_WIDTH - _LEFT - 8) / float(timeline.makespan or 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{escape(caption(timeline))}</text>',
    ]
    for rank in range(ranks):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="8" y="{top + 15}">rank {rank}</text>')
        for event in _waits(timeline, rank):
            parts.append(_box(event, scale, top + _BAR, 3, _WAIT, ""))
        for event in timeline.events[rank]:
            if event.action.kind.computes:
                label = str(event.action.micro_batch)
                parts.append(_box(event, scale, top, _BAR, _color(event.action), label))
    for at, (name, color) in enumerate(legend):
        top = _TOP + _ROW * ranks + 10 + 20 * (at // columns)
        left = 8 + _LEGEND * (at % columns)
        parts.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{left + 16}" y="{top + 10}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def to_png(timeline: Timeline, path: str | PathLike[str], width: float = 12.0) -> None:
    """The same picture, of `width` inches at 150 dots, as a PNG file.

    Raises:
        ImportError: matplotlib is not there; `to_svg` wants nothing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(timeline.events)
    figure = Figure(figsize=(width, 1.2 + 0.36 * ranks), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, events in enumerate(timeline.events):
        boxes = [event for event in events if event.action.kind.computes]
        axes.broken_barh(
            [_place(event) for event in boxes],
            (rank - 0.4, 0.8),
            facecolors=[_color(event.action) for event in boxes],
            edgecolor="white",
            linewidth=0.5,
        )
        axes.broken_barh(
            [_place(event) for event in _waits(timeline, rank)], (rank + 0.4, 0.1), facecolors=_WAIT
        )
        for event in boxes:
            start, length = _place(event)
            label = str(event.action.micro_batch)
            # a digit is about 0.07 inches
            if length * (width - 1) > 0.07 * len(label) * float(timeline.makespan):
                axes.text(start + length / 2, rank, label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, float(timeline.makespan or 1))
    axes.set_xlabel("seconds")
    axes.set_title(caption(timeline), fontsize=9)
    handles = [Patch(color=color, label=name) for name, color in _legend(timeline)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7)
    figure.savefig(path, format="png")


def to_chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """For `chrome://tracing` or Perfetto, as JSON has it; times are in microseconds.

    A rank is a process, with a thread of computations, one of sends and one of receives.
    """
    events: list[dict[str, Any]] = []
    for rank, own in enumerate(timeline.events):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        for thread, name in enumerate(("compute", "send", "receive")):
            events.append(_name("thread_name", rank, thread, name))
        for event in own:
            start, length = _place(event)
            action = event.action
            events.append(
                {
                    "name": f"{action.kind} {action.micro_batch}",
                    "cat": str(action.kind),
                    "ph": "X",
                    "pid": rank,
                    "tid": 1 if action.kind.sends else 2 if action.kind.receives else 0,
                    "ts": start * 1e6,
                    "dur": length * 1e6,
                    "args": {
                        "micro_batch": action.micro_batch,
                        "chunk": action.chunk,
                        "stage": timeline.schedule.stage(rank, action.chunk),
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def caption(timeline: Timeline) -> str:
    """One line: makespan, bubble, what is exposed, and what is held."""
    return (
        f"makespan {float(timeline.makespan):.6g} s, bubble {float(timeline.bubble_share):.1%}, "
        f"exposed transfers up to {float(max(timeline.exposed)):.6g} s, "
        f"in flight up to {max(timeline.in_flight)} chunks"
    )


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _place(event: Event) -> tuple[float, float]:
    """Start and length, in seconds."""
    return float(event.start), float(event.end - event.start)


def _color(action: Action) -> str:
    return _COLORS[action.kind][action.chunk % 2]


def _waits(timeline: Timeline, rank: int) -> Iterator[Event]:
    """Receives that take time."""
    for event in timeline.events[rank]:
        if event.action.kind.receives and event.end > event.start:
            yield event


def _legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Name and color of what is there."""
    there = {(e.action.kind, e.action.chunk % 2) for own in timeline.events for e in own}
    rows = []
    for kind, colors in _COLORS.items():
        for odd, color in enumerate(colors):
            if (kind, odd) in there:
                chunks = (
                    f", {('even', 'odd')[odd]} chunks" if timeline.schedule.num_chunks > 1 else ""
                )
                rows.append((str(kind).replace("_", " ") + chunks, color))
    if any(True for rank in range(len(timeline.events)) for _ in _waits(timeline, rank)):
        rows.append(("receive", _WAIT))
    return rows


def _box(event: Event, scale: float, top: int, height: int, color: str, label: str) -> str:
    start, length = (seconds * scale for seconds in _place(event))
    start += _LEFT
    shown = label and length > 7 * len(label)
    return (
        f"<g><title>{escape(str(event.action))}: {float(event.start):.6g} to {float(event.end):.6g} s</title>"
        f'<rect x="{start:.2f}" y="{top}" width="{length:.2f}" height="{height}" fill="{color}" '
        'stroke="white" stroke-width="0.5"/>'
        + (
            f'<text x="{start + length / 2:.2f}" y="{top + 15}" text-anchor="middle">{label}</text>'
            if shown
            else ""
        )
        + "</g>"
    )
