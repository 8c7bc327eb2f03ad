"""What the experts of mixture-of-experts layers are given, and how evenly.

A `Recorder` counts on each rank, in forward passes that are not computed again. `packed` counts of all ranks
are added up by one all-reduce, and `loads` of the sum is a `LayerLoad` for each layer:

    rows       token copies that an expert gets, after capacity has dropped some
    ranks      rows of the experts of each expert-parallel rank, E / P of P ranks in turn
    max/mean   of experts or of ranks, 1 where all have the same: a layer waits for its busiest rank
    entropy    of the experts' shares of the rows, over that of even shares: from 0 to 1

Layers are numbered from 1 through all pipeline stages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from accel.parallel.experts.plan import longest_over_mean

__all__ = [
    "ON",
    "Copies",
    "LayerLoad",
    "Recorder",
    "computing_again",
    "loads",
    "note_copies",
    "scalars",
    "switch_on",
    "table",
    "to_png",
]

_MIB = 1 << 20
_SINGLE = ("dropped", "bytes moved", "nanoseconds saved", "groups with copies")
"""Columns of what is packed, behind one for each expert and before one for each rank."""


@dataclass(frozen=True)
class Copies:
    """What copies of hot experts did for a layer."""

    ranks: tuple[int, ...]
    """Rows of each expert-parallel rank."""
    bytes_moved: int
    """Over all groups of expert-parallel ranks."""
    seconds_saved: float
    """Mean over the groups."""


@dataclass(frozen=True)
class LayerLoad:
    """One layer, over all ranks."""

    layer: int
    rows: tuple[int, ...]
    """Of each expert."""
    ranks: tuple[int, ...]
    """Rows of each expert-parallel rank, had there been no copies of experts."""
    dropped: int = 0
    """Rows beyond an expert's capacity."""
    copies: Copies | None = None

    @property
    def busiest(self) -> int:
        """The expert with most rows."""
        return self.rows.index(max(self.rows))

    @property
    def entropy(self) -> float:
        total = sum(self.rows)
        if len(self.rows) == 1 or not total:
            return 1.0
        shares = [rows / total for rows in self.rows if rows]
        return sum(share * math.log(1 / share) for share in shares) / math.log(len(self.rows))


def computing_again() -> bool:
    """Whether a backward pass is running: a forward pass within it is of an activation checkpoint."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class _Noted:
    shifted: Tensor
    """Rows that copies added to each rank."""
    bytes_moved: int = 0
    nanoseconds_saved: int = 0


class Recorder:
    """This rank's counts since they were cleared. They stay on the device until they are packed."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._dropped: dict[int, Tensor] = {}
        self._copies: dict[int, _Noted] = {}

    def clear(self) -> None:
        for counts in (self._rows, self._dropped, self._copies):
            counts.clear()

    @torch.no_grad()
    def note_routing(
        self, layer: int, routing_map_TE: Tensor, wanted_TE: Tensor | None = None
    ) -> None:
        """A forward pass of a layer in training: which experts get which tokens.

        Args:
            wanted_TE: the map before capacity dropped some.
        """
        if computing_again():
            return
        kept = routing_map_TE.bool()
        rows = kept.sum(0)
        self._rows[layer] = self._rows[layer] + rows if layer in self._rows else rows
        if wanted_TE is not None:
            dropped = (wanted_TE.bool() & ~kept).sum()
            self._dropped[layer] = self._dropped.get(layer, 0) + dropped

    def note_copies(
        self,
        layer: int,
        loads_before: Sequence[int] | Tensor,
        loads_after: Sequence[int] | Tensor,
        bytes_moved: int,
        seconds_saved: float,
    ) -> None:
        """See `note_copies`, which serves all recorders that are on."""
        if computing_again():
            return
        before, after = (
            torch.as_tensor(each).to(torch.int64) for each in (loads_before, loads_after)
        )
        if before.shape != after.shape or before.dim() != 1:
            raise ValueError(
                f"loads of ranks with shapes {[*before.shape]} and {[*after.shape]}: give one of each rank"
            )
        noted = self._copies.setdefault(layer, _Noted(torch.zeros_like(before)))
        noted.shifted = noted.shifted + (after - before)
        noted.bytes_moved += bytes_moved
        noted.nanoseconds_saved += round(seconds_saved * 1e9)

    def packed(
        self,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        device: torch.device | int | str = "cpu",
        *,
        counts: bool = True,
        speaks: bool = True,
    ) -> Tensor:
        """``[layers, columns]`` int64, to be added up over the world; 0 for layers of other ranks.

        Args:
            num_ranks: of an expert-parallel group.
            counts: whether the tokens of this rank are those of no other that counts.
            speaks: whether this rank tells what its expert-parallel group copied.
        """
        width = num_experts + len(_SINGLE) + num_ranks
        packed = torch.zeros(num_layers, width, dtype=torch.int64, device=device)
        if counts:
            for layer, rows in self._rows.items():
                packed[layer - 1, :num_experts] = rows
            for layer, dropped in self._dropped.items():
                packed[layer - 1, num_experts] = dropped
        if speaks:
            for layer, noted in self._copies.items():
                figures = (noted.bytes_moved, noted.nanoseconds_saved, 1)
                row = packed[layer - 1, num_experts + 1 :]
                row[:3] = torch.tensor(figures)
                row[3:] = noted.shifted
        return packed


ON: list[Recorder] = []
"""Those that count."""


def switch_on(recorder: Recorder) -> Callable[[], None]:
    """Let it count, beside others; returns what ends that."""
    ON.append(recorder)
    return functools.partial(ON.remove, recorder)


def note_copies(
    layer: int,
    loads_before: Sequence[int] | Tensor,
    loads_after: Sequence[int] | Tensor,
    bytes_moved: int,
    seconds_saved: float,
) -> None:
    """What copies of hot experts did in one forward pass of a layer in training; nothing if nobody records.

    The figures are those of the whole expert-parallel group, and each of its ranks notes the same. A pass
    that computes again is not counted.

    Args:
        layer: from 1; those of multi-token prediction come after all others.
        loads_before: rows of each rank of the group without copies.
        loads_after: with them.
        bytes_moved: by the copies and their gradients.
        seconds_saved: what the layer is thought to take less, forward and backward.
    """
    for recorder in ON:
        recorder.note_copies(layer, loads_before, loads_after, bytes_moved, seconds_saved)


def loads(packed: Tensor, num_experts: int) -> list[LayerLoad]:
    """The layers that got rows.

    Args:
        packed: of all ranks, added up.
    """
    found = []
    for layer, row in enumerate(packed.tolist(), 1):
        rows, (dropped, moved, saved, groups) = row[:num_experts], row[num_experts:][: len(_SINGLE)]
        if not any(rows):
            continue
        shifted = row[num_experts + len(_SINGLE) :]
        each = num_experts // len(shifted)
        ranks = tuple(sum(rows[at * each : (at + 1) * each]) for at in range(len(shifted)))
        copies = None
        if groups:
            with_copies = tuple(map(sum, zip(ranks, shifted, strict=True)))
            copies = Copies(with_copies, moved, saved / groups / 1e9)
        found.append(LayerLoad(layer, tuple(rows), ranks, dropped, copies))
    return found


def scalars(load: LayerLoad) -> dict[str, float]:
    """Name -> value, for curves."""
    values = {
        "ranks max over mean": longest_over_mean(load.ranks),
        "experts max over mean": longest_over_mean(load.rows),
        "entropy": load.entropy,
        "rows": sum(load.rows),
        "dropped rows": load.dropped,
    }
    if load.copies is not None:
        values |= {
            "ranks max over mean with copies": longest_over_mean(load.copies.ranks),
            "bytes moved": load.copies.bytes_moved,
            "seconds saved": load.copies.seconds_saved,
        }
    return values


def table(layers: Sequence[LayerLoad]) -> str:
    """A line for each layer, below one of headings.

    >>> copies = Copies(ranks=(20, 20), bytes_moved=3 << 20, seconds_saved=0.0025)
    >>> print(table([LayerLoad(2, (16, 8, 8, 8), (24, 16), 8, copies), LayerLoad(4, (10,) * 4, (20, 20))]))
    layer       rows  ranks  copied  experts  busiest  entropy  dropped  moved MiB  saved ms
        2         40  1.200   1.000    1.600        0   0.9610        8        3.0     2.500
        4         40  1.000       -    1.000        0   1.0000        0          -         -
    """
    form = "{:>5}  {:>9}  {:>5}  {:>6}  {:>7}  {:>7}  {:>7}  {:>7}  {:>9}  {:>8}"
    heads = "layer rows ranks copied experts busiest entropy dropped moved_MiB saved_ms".split()
    lines = [form.format(*(head.replace("_", " ") for head in heads))]
    for load in layers:
        copied, moved, saved = "-", "-", "-"
        if load.copies is not None:
            copied = f"{longest_over_mean(load.copies.ranks):.3f}"
            moved = f"{load.copies.bytes_moved / _MIB:.1f}"
            saved = f"{load.copies.seconds_saved * 1e3:.3f}"
        ranks, experts = (f"{longest_over_mean(rows):.3f}" for rows in (load.ranks, load.rows))
        figures = (load.layer, sum(load.rows), ranks, copied, experts, load.busiest)
        lines.append(form.format(*figures, f"{load.entropy:.4f}", load.dropped, moved, saved))
    return "\n".join(lines)


def to_png(layers: Sequence[LayerLoad], path: str | PathLike[str], title: str) -> None:
    """A heat map, layers by experts: rows of each over the mean of its layer.

    Raises:
        ImportError: matplotlib is not there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ratios = [[rows * len(load.rows) / sum(load.rows) for rows in load.rows] for load in layers]
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(layers)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max(2.0, *map(max, ratios))
    picture = axes.imshow(ratios, aspect="auto", interpolation="nearest", vmin=0, vmax=most)
    axes.set_yticks(range(len(layers)), [str(load.layer) for load in layers], fontsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=9)
    figure.colorbar(picture, label="rows over the layer's mean")
    figure.savefig(path, format="png")
