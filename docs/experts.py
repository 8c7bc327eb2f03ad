"""The page about mixtures of experts, with a picture of the ranks' loads; docs/generate.py writes it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from accel.parallel.experts.plan import longest_over_mean, place_eplb, plan_copies

TEXT = """{generated}
# Mixtures of experts

Without Transformer Engine: grouped experts ([`grouped_gemm`](features/grouped_gemm.md) in the local spec,
[`te_layers`](features/te_layers.md) in Megatron's default one), permutation and router as one kernel each
([`fused_moe_permute`](features/fused_moe_permute.md), [`fused_topk_router`](features/fused_topk_router.md)).
By name:

* [`moe_overlap`](features/moe_overlap.md), `--accel-moe-overlap`: tokens travel to their experts and back
  while others are computed;
* [`moe_two_streams`](features/moe_two_streams.md), `--accel-moe-two-streams`: products of some experts beside
  the vector work of others, on GPUs and NPUs;
* [`hot_experts`](features/hot_experts.md), `--accel-hot-experts 3`: copies of experts with many tokens, for
  one micro-batch each, on the ranks whose tokens they are;
* [`expert_migration`](features/expert_migration.md), `--accel-expert-migration 100`: experts change ranks,
  with their optimizer's states, where that evens out their loads;
* [`moe_tp_extend_ep`](features/moe_tp_extend_ep.md), `--accel-moe-tp-extend-ep`: whole experts on the
  tensor-parallel ranks too, tensor parallelism stays in the attention;
* [`moe_load_report`](features/moe_load_report.md), `--accel-moe-load-report 100`: a table, curves and a heat
  map of how evenly experts are loaded;
* [`moe_out_of_memory`](features/moe_out_of_memory.md), in all presets but `off`: where a layer's tokens do
  not fit, the error says how many came, to which expert most, and the flag that bounds them; with
  `--accel-moe-overlap` on all ranks, before the tokens set out.

```bash
torchrun --nproc-per-node 2 examples/pretrain_moe.py --mock-data --expert-model-parallel-size 2 \\
    --accel-moe-overlap --accel-hot-experts 3 --accel-moe-load-report 10 --save checkpoints --save-interval 20
python -m accel bench moe    # over a link that is slow, on this machine
```

## Loads

Rows that each of four ranks computes, of {experts} experts whose popularity falls as Zipf's law with exponent
1.2, the first rank's first, {rows} rows of each rank's own tokens. A number is an expert's, a colour its
owner's; the line is the mean. Copies take a rank's own rows alone, so that no row has a longer way than
before, and the routing, the loss and the gradients stay. Replicas, as many and one more for ranks that
hold as many each (the idea of DeepSeek's EPLB), even out more: with rows from everywhere, and as if the loads
had been known before.

![rows of each rank](experts.svg)

## A heat map

What `--accel-moe-load-report` draws, of the toy of `examples/pretrain_moe.py` on two ranks, over the first
ten iterations of `--mock-data`: layers by experts, rows of each over the mean of its layer.

![rows of each expert over the mean of its layer](experts_heat_map.png)
"""

_RANKS, _EXPERTS, _ROWS, _MOST = 4, 16, 4096, 4
_COLOURS = ("#4c78a8", "#e6a23c", "#59a14f", "#b07aa1")
_BAR, _STEP, _LEFT, _TOP, _GAP, _WIDTH = 20, 26, 60, 26, 40, 900

Block = tuple[int, float]
"""An expert, and how many rows of it."""


def pages(docs: Path, generated: str) -> dict[Path, str]:
    """The page, and its picture."""
    text = TEXT.format(generated=generated, experts=_EXPERTS, rows=_ROWS)
    return {docs / "experts.md": text, docs / "experts.svg": to_svg(sides())}


def sides() -> dict[str, list[list[Block]]]:
    """What is done about the loads -> of each rank, what it computes."""
    popularity = [(e + 1) ** -1.2 for e in range(_EXPERTS)]
    of_rank = [round(_ROWS * p / sum(popularity)) for p in popularity]
    owners = [e * _RANKS // _EXPERTS for e in range(_EXPERTS)]
    copies = set(plan_copies([of_rank] * _RANKS, owners, _MOST, 0))
    found: dict[str, list[list[Block]]] = {"as they are": [], "copies of hot experts": []}
    for side, there in zip(found, (set(), copies), strict=True):
        for rank in range(_RANKS):
            rows = [
                _RANKS - sum((e, r) in there for r in range(_RANKS))
                if owners[e] == rank
                else (e, rank) in there
                for e in range(_EXPERTS)
            ]
            found[side].append([(e, n * of_rank[e]) for e, n in enumerate(rows) if n])
    totals = [_RANKS * rows for rows in of_rank]
    even = -(-(_EXPERTS + len(copies)) // _RANKS) * _RANKS
    slots = place_eplb(totals, _RANKS, even)
    replicas = [sum(held.count(e) for held in slots) for e in range(_EXPERTS)]
    found["as many replicas, placed anew"] = [
        [(e, len(list(same)) * totals[e] / replicas[e]) for e, same in groupby(held)]
        for held in slots
    ]
    return found


def to_svg(found: dict[str, list[list[Block]]]) -> str:
    """A bar for each rank, sides below each other, on one scale."""
    each = _TOP + _RANKS * _STEP + _GAP
    width, height = _LEFT + _WIDTH + 20, each * len(found) - _GAP + 10
    longest = max(_load(blocks) for ranks in found.values() for blocks in ranks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for at, (side, ranks) in enumerate(found.items()):
        parts += _bars(side, ranks, at * each, _WIDTH / longest)
    return "\n".join([*parts, "</svg>", ""])


def _load(blocks: Sequence[Block]) -> float:
    return sum(rows for _, rows in blocks)


def _bars(side: str, ranks: list[list[Block]], top: int, scale: float) -> list[str]:
    loads = [_load(blocks) for blocks in ranks]
    title = f"{side}: the longest rank has {longest_over_mean(loads):.2f} times the mean"
    parts = [f'<text x="{_LEFT}" y="{top + 16}" font-weight="bold">{escape(title)}</text>']
    for rank, blocks in enumerate(ranks):
        y, x = top + _TOP + rank * _STEP, float(_LEFT)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">rank {rank}</text>')
        for expert, rows in blocks:
            colour = _COLOURS[expert * _RANKS // _EXPERTS]
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{rows * scale:.1f}" height="{_BAR}" fill="{colour}" '
                'fill-opacity="0.85" stroke="white"/>'
            )
            if rows * scale > 16:
                middle = x + rows * scale / 2
                parts.append(
                    f'<text x="{middle:.1f}" y="{y + 14}" text-anchor="middle">{expert}</text>'
                )
            x += rows * scale
    mean = _LEFT + sum(loads) / len(loads) * scale
    bottom = top + _TOP + _RANKS * _STEP - _STEP + _BAR + 4
    line = f'x1="{mean:.1f}" x2="{mean:.1f}" y1="{top + _TOP - 4}" y2="{bottom}"'
    parts.append(f'<line {line} stroke="#444444" stroke-dasharray="4 3"/>')
    return parts
