"""The demo's report: a table for the terminal and one self-contained HTML file.

Both are made from the same dictionary, the content of ``report.json``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["area_chart", "line_chart", "print_report", "to_html"]

_MIB = 1024 * 1024
_CALM = 0.1  # pairs of turns that differ by more say that other programs took the processor


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table on the terminal."""
    losses = report["losses"]
    table = Table(title="loss (mean since the row before), nats per token", title_justify="left")
    for column in ("iteration", "stock", "accel", "accel - stock"):
        table.add_column(column, justify="right")
    for row in _rows(losses):
        table.add_row(*row)
    console.print(table)
    summary = Table(show_header=True, box=None, pad_edge=False)
    for column in ("", "stock", "accel", ""):
        summary.add_column(column, justify="left" if column == "" else "right")
    for name, values in _figures(report):
        summary.add_row(name, *values)
    console.print(summary)
    console.print("\nfeatures on the accel side, as accel's start-up table lists them:")
    for feature in report["features"]["accel"]:
        console.print(
            f"  {feature['name']:<29} {feature['state']:<8} {feature['asked']}", markup=False
        )


def _figures(report: dict[str, Any]) -> list[tuple[str, tuple[str, str, str]]]:
    """Name, stock, accel, and what lies between them."""
    rate, memory = report["tokens_per_second"], report["peak_memory_bytes"]
    losses = report["losses"]
    low, high = report["speedup_quartiles"]
    return [
        (
            "last logged loss",
            (
                f"{losses['stock'][-1]:.4f}",
                f"{losses['accel'][-1]:.4f}",
                f"largest difference of all {report['max_loss_difference']:.4f}",
            ),
        ),
        (
            "tokens per second",
            (f"{rate['stock']:,.0f}", f"{rate['accel']:,.0f}", f"{report['speedup']:.2f} times"),
        ),
        (
            "middle half of the turns",
            ("", "", f"{low:.2f} to {high:.2f} times{_caution(report['speedup_spread'])}"),
        ),
        (
            "peak memory, sum of ranks",
            (
                f"{memory['stock'] / _MIB:.1f} MiB",
                f"{memory['accel'] / _MIB:.1f} MiB",
                f"{memory['accel'] / memory['stock'] - 1:+.1%}",
            ),
        ),
    ]


def _caution(spread: float) -> str:
    busy = spread > _CALM
    return ": the machine was not at rest, do not trust the ratio" if busy else ""


def _rows(losses: dict[str, list[float]]) -> list[tuple[str, str, str, str]]:
    columns = zip(
        losses["iteration"], losses["stock"], losses["accel"], losses["difference"], strict=True
    )
    return [(str(i), f"{s:.4f}", f"{a:.4f}", f"{d:+.4f}") for i, s, a, d in columns]


def to_html(report: dict[str, Any]) -> str:
    """The whole page: no script, no font and no picture from elsewhere."""
    losses, machine = report["losses"], report["machine"]
    curves = line_chart(
        losses["iteration"],
        {"stock": losses["stock"], "accel": losses["accel"]},
        label="loss, nats per token",
        height=300,
    )
    difference = line_chart(
        losses["iteration"],
        {"accel": losses["difference"]},
        label="accel minus stock, nats per token",
        height=150,
        zero_line=True,
    )
    memory = report["step_memory"]
    parts = {
        "tiles": _tiles(report),
        "step": html.escape(memory["shape"]),
        "stock_step": area_chart(memory["stock"], label="stock", top=_largest(memory)),
        "accel_step": area_chart(
            memory["accel"],
            label="accel: recomputed activations and norms, swapped attention",
            top=_largest(memory),
        ),
        "curves": curves,
        "difference": difference,
        "how": "".join(f"<li>{html.escape(line)}</li>" for line in report["method"]),
        "figures": _table(
            ("", "stock", "accel", "difference"),
            [(name, *values) for name, values in _figures(report)],
        ),
        "features": _table(
            ("feature", "stock side", "accel side", "asked for by (accel side)"), _features(report)
        ),
        "patches": _table(
            ("what is changed in Megatron", "by"),
            [(p["target"], p["replacement"]) for p in report["patches"]],
        ),
        "losses": _table(("iteration", "stock", "accel", "accel - stock"), _rows(losses)),
        "samples": "".join(f"<pre>{html.escape(text)}</pre>" for text in report["samples"]),
        "machine": _table(("machine and versions", ""), [(k, str(v)) for k, v in machine.items()]),
    }
    return _PAGE.format(css=_CSS, **parts)


def _features(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    stock = {f["name"]: f["state"] for f in report["features"]["stock"]}
    return [
        (f["name"], stock.get(f["name"], "off"), f["state"], f["asked"])
        for f in report["features"]["accel"]
    ]


def _tiles(report: dict[str, Any]) -> str:
    losses, memory = report["losses"], report["peak_memory_bytes"]
    tiles = (
        (
            f"{losses['accel'][0]:.2f}&#8201;&#8594;&#8201;{losses['accel'][-1]:.2f}",
            "loss, first and last logged",
        ),
        (f"{report['max_loss_difference']:.4f}", "largest difference from stock"),
        (
            f"{report['speedup']:.2f}&#215;",
            f"tokens per second against stock{_caution(report['speedup_spread'])}",
        ),
        (f"{memory['accel'] / memory['stock'] - 1:+.1%}", "peak memory against stock"),
    )
    return "".join(f"<div><strong>{big}</strong><span>{small}</span></div>" for big, small in tiles)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', head)}</thead><tbody>{body}</tbody></table>"


def line_chart(
    x: Sequence[float],
    lines: dict[str, Sequence[float]],
    *,
    label: str,
    height: int,
    zero_line: bool = False,
) -> str:
    """An SVG of one or more lines over the same ``x``; its colours follow the page's theme.

    Args:
        x: ascending, two values or more.
        lines: name (also the CSS class) -> values. The first is drawn broad and the others thin on
            top of it, so that lines that coincide are both seen.
        label: what the values are, with their unit.
        height: of the picture in pixels; it is 760 wide.
        zero_line: show 0, in the middle.
    """
    width, left, right, top, bottom = 760, 56, 70, 26, 26
    ticks = _ticks([v for line in lines.values() for v in line], around_zero=zero_line)
    low, high = ticks[0], ticks[-1]

    def at(x_value: float, y_value: float) -> tuple[float, float]:
        across = (x_value - x[0]) / (x[-1] - x[0])
        up = (y_value - low) / (high - low)
        return (
            left + across * (width - left - right),
            height - bottom - up * (height - top - bottom),
        )

    parts = [f'<text class="label" x="{left}" y="14">{html.escape(label)}</text>']
    for value in ticks:
        y = at(x[0], value)[1]
        kind = "zero" if zero_line and value == 0 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}">{value:g}</text>'
        )
    for value in (x[0], x[len(x) // 2], x[-1]):
        across = at(value, low)[0]
        parts.append(f'<text class="mid" x="{across:.1f}" y="{height - 8}">{value}</text>')
    for n, (name, line) in enumerate(lines.items()):
        points = [at(*p) for p in zip(x, line, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline class="{name} line{n}" points="{path}"/>')
        # Names at the right end would overlap where the lines end together: one below the other.
        y = points[-1][1] + 4 + (n - (len(lines) - 1) / 2) * 16
        parts.append(f'<text class="{name} name" x="{width - right + 8}" y="{y:.1f}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


PARTS = ("weights", "gradients", "activations and temporaries")


def _largest(memory: dict[str, Any]) -> float:
    """Bytes, of both sides."""
    return max(sum(moment) for side in ("stock", "accel") for moment in _moments(memory[side]))


def _moments(side: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Bytes of :data:`PARTS` after each operation."""
    pairs = zip(side["gradients"], side["rest"], strict=True)
    return [(side["weights"], gradients, rest) for gradients, rest in pairs]


def area_chart(side: dict[str, Any], *, label: str, top: float, height: int = 220) -> str:
    """An SVG of the bytes of a step, operation by operation, stacked by what they are.

    Args:
        side: ``weights``, ``gradients``, ``rest`` and ``backward`` as ``activation_memory --samples``
            writes them.
        label: whose step it is.
        top: bytes at the upper end of the scale, which both sides share.
        height: of the picture in pixels; it is 760 wide.
    """
    width, left, right, above, below = 760, 56, 196, 26, 12
    moments = _moments(side)
    ticks = _ticks([0.0, top / _MIB], around_zero=False)

    def across(number: float) -> float:
        return left + number / (len(moments) - 1) * (width - left - right)

    def up(num_bytes: float) -> float:
        return height - below - num_bytes / _MIB / ticks[-1] * (height - above - below)

    parts = [f'<text class="label" x="{left}" y="14">{html.escape(label)}, MiB</text>']
    for value in ticks:
        y = up(value * _MIB)
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}">{value:g}</text>'
        )
    floor = [0] * len(moments)
    for n, name in enumerate(PARTS):
        ceiling = [below_it + moment[n] for below_it, moment in zip(floor, moments, strict=True)]
        edge = [*enumerate(ceiling), *reversed([*enumerate(floor)])]
        path = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in edge)
        parts.append(f'<polygon class="part{n}" points="{path}"/>')
        y = above + 12 + 18 * (len(PARTS) - 1 - n)
        parts.append(
            f'<rect class="part{n}" x="{width - right + 10}" y="{y - 9}" width="10" height="10"/>'
        )
        parts.append(f'<text x="{width - right + 26}" y="{y}">{name}</text>')
        floor = ceiling
    x = across(side["backward"])
    parts.append(
        f'<line class="zero" x1="{x:.1f}" x2="{x:.1f}" y1="{above}" y2="{height - below}"/>'
    )
    parts.append(f'<text x="{x + 4:.1f}" y="{above + 10}">backward</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def _ticks(values: Sequence[float], *, around_zero: bool) -> list[float]:
    """Three to seven round numbers, evenly spaced, that enclose ``values``."""
    low, high = min(values), max(values)
    if around_zero:
        high = max(abs(low), abs(high))
        low = -high
    if low == high:
        low, high = low - 1, high + 1
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(step for n in (1, 2, 5, 10) if (step := n * size) >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.6g}") for n in range(first, last + 1)]


_CSS = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #667078; --line: #dde1e6;
  --page: #fff; --card: #f6f7f9; --stock: #b9c0c8; --accel: #0b6bcb; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #98a1ab; --line: #333a42;
  --page: #14171a; --card: #1d2125; --stock: #5d6670; --accel: #6db3f8; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 800px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 8px; }
.lead, li { color: var(--soft); } .lead { margin: 0 0 24px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tiles div { background: var(--card); border-radius: 8px; padding: 14px 16px; }
.tiles strong { display: block; font-size: 23px; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; margin-top: 12px; display: block; }
svg text { fill: var(--soft); font-size: 12px; } svg .tick { text-anchor: end; }
svg .mid { text-anchor: middle; } svg .grid { stroke: var(--line); } svg .zero { stroke: var(--soft); }
svg polyline { fill: none; stroke-linejoin: round; stroke-width: 2; }
svg polyline.stock { stroke: var(--stock); stroke-width: 7; stroke-linecap: round; }
svg polyline.accel { stroke: var(--accel); }
svg .part0 { fill: var(--stock); } svg .part1 { fill: var(--soft); } svg .part2 { fill: var(--accel); }
svg text.name { font-weight: 600; } svg text.accel { fill: var(--accel); }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; vertical-align: top; }
th { font-weight: 600; color: var(--soft); } details { margin: 12px 0; }
summary { cursor: pointer; color: var(--soft); }
pre { background: var(--card); border-radius: 8px; padding: 12px 16px; overflow-x: auto;
  font-size: 13px; line-height: 1.45; white-space: pre-wrap; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>accel: the demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<style>{css}</style></head><body>
<h1>One script, one import</h1>
<p class="lead">The same Megatron-LM training, stock and with accel, on this machine.</p>
<div class="tiles">{tiles}</div>
<h2>Loss</h2>{curves}{difference}
<details><summary>every logged loss</summary>{losses}</details>
<h2>Speed and memory</h2>{figures}
<h2>Memory of one step</h2>
<p class="lead">{step}: bytes that are allocated after each operation of a forward and a backward pass.</p>
{stock_step}{accel_step}
<h2>What the model writes</h2>
<p class="lead">Sampled from the accel side's checkpoint, loaded by one process.</p>{samples}
<h2>What is active</h2>{features}
<details><summary>every patch on the accel side</summary>{patches}</details>
<h2>How it was measured</h2><ul>{how}</ul>{machine}
</body></html>
"""
