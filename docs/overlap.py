"""The page about overlapped linear layers, with its picture; docs/generate.py writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

TEXT = """{generated}
# Tensor parallelism that computes while it communicates

[`--accel-tp-overlap`](features/tp_overlap.md) cuts the rows of a tensor-parallel linear layer into pieces.
With sequence parallelism a column-parallel layer multiplies its own rows while those of the other ranks are
on their way, and theirs as they come; a row-parallel layer multiplies the rows of others first, sends each
piece as it is done, and its own rows last. In the backward pass of a row-parallel layer the gradient comes in
the same way, beside the product for the input; with `--accel-tp-overlap-wgrad pieces` that for the weights is
added up piece by piece too, which hides more of a slow link and rounds otherwise. In a column-parallel
layer's, the second gather of the input goes on beside the product for the input, as Megatron has it; what is
reduced of that product leaves piece by piece, and goes on beside the product for the weights.

A piece of a ring leaves as soon as it is there. What nothing hides is the product of the last piece that
comes, or of the first that leaves, so these are small: where products take as long as transfers, two ranks
and four pieces leave a 22nd of that time, where equal pieces leave an eighth and collectives that reduce a
quarter.

```bash
torchrun ... pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel --accel-tp-overlap ...
torchrun ... pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap ...
python -m accel bench tp_overlap    # over a link that is slow, on this machine
```

Two ranks, a column-parallel and a row-parallel layer, forward and backward, Megatron's way above ours
({shape}; {link}; recorded at commit {commit}). Upper lane: products. Lower lane: from where a transfer is
asked for until it is there; pieces wait for those before them.

![timeline](tp_overlap.svg)
"""

_LANES = {"computes": "#4c78a8", "communicates": "#e6a23c"}
_ROW, _BAR, _LEFT, _TOP, _WIDTH = 26, 18, 170, 30, 1200


def pages(docs: Path, generated: str) -> dict[Path, str]:
    """The page, and its picture."""
    report = json.loads((docs / "tp_overlap.json").read_text())
    text = TEXT.format(
        generated=generated,
        shape=report["shape"],
        link=report["link"],
        commit=report["commit"][:12],
    )
    return {docs / "tp_overlap.md": text, docs / "tp_overlap.svg": to_svg(report["sides"])}


def to_svg(sides: Mapping[str, list[list[Any]]]) -> str:
    """A lane of products and one of transfers for each rank, sides below each other, on one scale."""
    rows = [
        (f"{side}, rank {rank} {lane}", lane, [e for e in events if e[0] == lane])
        for side, ranks in sides.items()
        for rank, events in enumerate(ranks)
        for lane in _LANES
    ]
    last = max(end for _, _, events in rows for _, _, end in events)
    scale = (_WIDTH - _LEFT - 10) / last
    height = _TOP + _ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for side, ranks in sides.items():
        took = max(end for events in ranks for _, _, end in events)
        left = _LEFT + took * scale
        first = next(at for at, (label, _, _) in enumerate(rows) if label.startswith(f"{side},"))
        bottom = _TOP + _ROW * (first + 2 * len(ranks)) - 4
        parts.append(
            f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP + _ROW * first - 8}" y2="{bottom}" '
            'stroke="#888"/>'
            f'<text x="{left - 4:.1f}" y="{_TOP + _ROW * first - 10}" text-anchor="end">'
            f"{escape(side)}: {1e3 * took:.0f} ms</text>"
        )
    for at, (label, lane, events) in enumerate(rows):
        top = _TOP + _ROW * at
        parts.append(f'<text x="8" y="{top + 13}">{escape(label)}</text>')
        parts += [
            f'<rect x="{_LEFT + start * scale:.2f}" y="{top}" width="{(end - start) * scale:.2f}" '
            f'height="{_BAR}" fill="{_LANES[lane]}" fill-opacity="0.7" stroke="white" stroke-width="0.5">'
            f"<title>{1e3 * start:.1f} to {1e3 * end:.1f} ms</title></rect>"
            for _, start, end in events
        ]
    return "\n".join([*parts, "</svg>", ""])
