"""The page about context parallelism, with a picture of who attends to whom; docs/generate.py writes it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from accel.parallel.context.ring import blocks_of, moved, ring_order

TEXT = """{generated}
# Sequences split over ranks

`--context-parallel-size N` without Transformer Engine: [`context_parallel`](features/context_parallel.md) in
the local spec, [`te_layers`](features/te_layers.md) in Megatron's default one. Every sequence is cut into 2 N
chunks, and rank r holds chunks r and 2 N - 1 - r, so that all ranks have the same work below a causal mask.

```bash
torchrun --nproc-per-node 4 pretrain_gpt.py --context-parallel-size 4 ...                  # a ring
torchrun --nproc-per-node 4 pretrain_gpt.py --context-parallel-size 4 --cp-comm-type a2a ...
torchrun --nproc-per-node 4 pretrain_gpt.py --context-parallel-size 4 \\
    --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 ...
python -m accel bench context_parallel    # over a link that is slow, on this machine
```

Who attends to whom, four ranks: rows are chunks of queries, by the rank that holds them; columns are chunks
of keys, in their owner's colour. The number says in which step of the ring the block is computed; while one
is, the next is on its way. Left one ring; right two rings of two neighbours
(`--accel-context-parallel-window 2`), whose keys the other two send each other meanwhile. Both of a rank's
chunks see the first half of an earlier rank's keys; its second chunk alone sees those of a later rank.

![who attends to whom](context_parallel.svg)

| `--cp-comm-type` | what travels, for each rank and layer | needs |
|---|---|---|
| `p2p` | keys and values, N - 1 times forward and again backward, beside the computation; {home} | |
| `all_gather` | keys and values before the attention, their gradients after it | |
| `a2a` | queries, keys, values and results once each way, (N - 1) / N of each | heads divisible by N |
| `a2a+p2p` | `a2a` in groups of neighbours, `p2p` across | heads divisible by the group |

A ring hides its transfers as long as a rank's keys travel faster than its queries attend to them, which
longer sequences and fewer heads of keys make easier. `all_gather` and `a2a` hide nothing; of many ranks,
`a2a` sends least. A window is served by gathering keys, as are documents that begin anywhere
(`--reset-attention-mask`).

Each of the four serves `--softmax-type off-by-one` and `learnable`, and in the default spec `--qk-clip` and
`--log-max-attention-logit` (Megatron needs `--bf16` or `--fp16` for these two).

Video models, whose blocks alternate between space and time, need no attention over ranks but one all-to-all
between two blocks: `accel.parallel.context.spatio_temporal`, with `examples/video_transformer.py`.
"""

_HOME = "three quarters of their gradients, straight to their owners"
_COLOURS = ("#4c78a8", "#e6a23c", "#59a14f", "#b07aa1")
_CELL, _LEFT, _TOP, _GAP = 34, 96, 52, 60
_RANKS = 4


def pages(docs: Path, generated: str) -> dict[Path, str]:
    """The page, and its picture."""
    return {
        docs / "context_parallel.md": TEXT.format(generated=generated, home=_HOME),
        docs / "context_parallel.svg": to_svg({"one ring": 1, "two rings of two": 2}),
    }


def steps(ranks: int, window: int) -> dict[tuple[int, int], tuple[int, bool]]:
    """(chunk of queries, chunk of keys) -> the step in which it is computed, and whether masked."""
    found = {}
    for rank in range(ranks):
        for number, (node, place) in enumerate(ring_order(ranks, window)):
            owner = moved(rank, (-node, -place), ranks, window)
            for block in blocks_of(rank, owner, True):
                for queries in _chunks(rank, block.queries, ranks):
                    for keys in _chunks(owner, block.keys, ranks):
                        found[queries, keys] = number, block.causal
    return found


def _chunks(rank: int, half: str, ranks: int) -> list[int]:
    of = {"first": [rank], "second": [2 * ranks - 1 - rank]}
    return of.get(half, [*of["first"], *of["second"]])


def to_svg(rings: dict[str, int]) -> str:
    """A square of chunks for each window."""
    side = 2 * _RANKS * _CELL
    width, height = (_LEFT + side + _GAP) * len(rings), _TOP + side + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for at, (title, window) in enumerate(rings.items()):
        parts += _square(title, steps(_RANKS, window), at * (_LEFT + side + _GAP) + _LEFT)
    return "\n".join([*parts, "</svg>", ""])


def _square(title: str, found: dict[tuple[int, int], tuple[int, bool]], left: int) -> list[str]:
    order = [chunk for rank in range(_RANKS) for chunk in (rank, 2 * _RANKS - 1 - rank)]
    parts = [f'<text x="{left}" y="16" font-weight="bold">{escape(title)}</text>']
    for column in range(2 * _RANKS):
        parts.append(
            f'<text x="{left + (column + 0.5) * _CELL}" y="{_TOP - 8}" text-anchor="middle">k{column}</text>'
        )
    for row, queries in enumerate(order):
        top = _TOP + row * _CELL
        label = f"rank {row // 2}, q{queries}"
        parts.append(f'<text x="{left - 8}" y="{top + 21}" text-anchor="end">{label}</text>')
        for keys in range(2 * _RANKS):
            box = f'x="{left + keys * _CELL}" y="{top}" width="{_CELL}" height="{_CELL}" stroke="white"'
            if (queries, keys) not in found:
                parts.append(f'<rect {box} fill="#f2f2f2"/>')
                continue
            step, masked = found[queries, keys]
            colour = _COLOURS[min(keys, 2 * _RANKS - 1 - keys)]
            opacity = 0.45 if masked else 0.85
            parts.append(
                f'<rect {box} fill="{colour}" fill-opacity="{opacity}"/>'
                f'<text x="{left + (keys + 0.5) * _CELL}" y="{top + 21}" text-anchor="middle">{step}</text>'
            )
    return parts
