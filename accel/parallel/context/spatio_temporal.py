"""Videos that are split over ranks for blocks that attend within a frame and over time by turns.

    spatial blocks    each rank has some frames, with all places    rows of S tokens, one for each frame
    temporal blocks   each rank has some places, at all times       rows of T tokens, one for each place

Between two blocks of different kind one all-to-all makes the other dimension whole (`switch_blocks`).
`split_clips` takes a rank's part of what the model is given, `gather_clips` puts its output together.

Letters     B  clips of one size;   T  their times (frames);   S  their places (tokens of a frame);
            H  hidden;   R  ranks;   t, s  frames and places of one rank
Layouts     BSH    spatial [B t, S, H]    temporal [B s, T, H]
            SBH    spatial [S, B t, H]    temporal [T, B s, H]
Parts       T / R frames and S / R places, the first ranks one more where R does not divide them; a rank with
            none has rows of none, and takes part
Images      clips of one time are whole on every rank, in blocks of both kinds, and never travel
Batch       of several sizes: a list of tensors and a list of `Clips`, still one all-to-all
Gradients   on a rank are its share: of a parameter, or of a tensor that every rank has, the sum over the
            ranks is what one rank would find. The loss is one of what `gather_clips` returns, the same on
            every rank, from which an image's gradient goes back on the first rank only; no parameters
            after it. A loss of a rank's own parts counts images on the first rank alone
Bits        moved, never added: there and back is the identity
Memory      a buffer for what leaves and one for what comes, each of a rank's tokens; none is kept

Source: dynamic sequence parallelism, Zhao et al. 2024 (arXiv:2403.10266).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Block", "Clips", "Layout", "Per", "gather_clips", "split_clips", "switch_blocks"]

Block = Literal["spatial", "temporal"]
Layout = Literal["BSH", "SBH"]
Per = Literal["token", "frame", "clip"]

_OTHER: dict[Block, Block] = {"spatial": "temporal", "temporal": "spatial"}
_ORDER: dict[tuple[Layout, Block], tuple[int, int, int]] = {
    ("BSH", "spatial"): (0, 1, 2),
    ("BSH", "temporal"): (0, 2, 1),
    ("SBH", "spatial"): (2, 0, 1),
    ("SBH", "temporal"): (1, 0, 2),
}
"""Which dimensions of a grid `[B, T, S, ...]` a layout begins with, before the rows become one dimension."""


@dataclass(frozen=True)
class Clips:
    """Clips of one size, the same on every rank.

    Raises:
        ValueError: anything but whole numbers from 1.
    """

    batch: int
    time: int
    """Frames; images have 1."""
    space: int
    """Tokens of a frame."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r}: give a whole number, 1 or more")

    @property
    def is_image(self) -> bool:
        return self.time == 1


@overload
def switch_blocks(
    x: Tensor, clips: Clips, group: dist.ProcessGroup, *, to: Block, layout: Layout = "BSH"
) -> Tensor: ...


@overload
def switch_blocks(
    x: Sequence[Tensor],
    clips: Sequence[Clips],
    group: dist.ProcessGroup,
    *,
    to: Block,
    layout: Layout = "BSH",
) -> list[Tensor]: ...


def switch_blocks(
    x: Tensor | Sequence[Tensor],
    clips: Clips | Sequence[Clips],
    group: dist.ProcessGroup,
    *,
    to: Block,
    layout: Layout = "BSH",
) -> Tensor | list[Tensor]:
    """This rank's tokens as blocks of the other kind see them, by one all-to-all; gradients go the other way.

    Args:
        x: what blocks of the kind that `to` is not have returned, in the layouts above, fp32, bf16 or any
            other dtype; anything may follow the first two dimensions, the same on every rank.
        clips: of each tensor, the same on every rank.
        to: the kind of the next block.

    Returns:
        as many tensors. An image, and anything in a group of one rank, may be a view of what was given.

    Raises:
        ValueError: a shape that `clips` does not have on this rank, tensors of several dtypes or devices,
            or an unknown layout or block; before anything is sent.
    """
    xs = [x] if isinstance(x, Tensor) else list(x)
    sizes = [clips] if isinstance(clips, Clips) else list(clips)
    _check_choice("to", to, Block)
    _check_choice("layout", layout, Layout)
    if len(xs) != len(sizes):
        raise ValueError(
            f"clips: {len(sizes)} for {len(xs)} tensors; give one Clips for each tensor"
        )
    for i, (tensor, clip) in enumerate(zip(xs, sizes, strict=True)):
        name = "x" if isinstance(x, Tensor) else f"x[{i}]"
        _check_laid_out(name, tensor, clip, group, _OTHER[to], layout)
    if len(kinds := {f"{tensor.dtype} on {tensor.device}" for tensor in xs}) > 1:
        raise ValueError(f"x: tensors of {', '.join(sorted(kinds))}; give one dtype and device")
    out = [
        _lay_out(_grid(tensor, clip, group, _OTHER[to], layout), to, layout)
        if _is_whole(clip, group)
        else tensor
        for tensor, clip in zip(xs, sizes, strict=True)
    ]
    travelling = [i for i, clip in enumerate(sizes) if not _is_whole(clip, group)]
    if travelling:
        split = [sizes[i] for i in travelling]
        arrived = _Switch.apply(split, group, to, layout, *(xs[i] for i in travelling))
        for i, tensor in zip(travelling, arrived, strict=True):
            out[i] = tensor
    return out[0] if isinstance(x, Tensor) else out


def split_clips(
    x: Tensor,
    clips: Clips,
    group: dist.ProcessGroup,
    *,
    block: Block,
    layout: Layout = "BSH",
    per: Per = "token",
) -> Tensor:
    """This rank's part of a tensor that every rank has whole, beside the tokens of a block of that kind.

    Args:
        x: for each token `[B, T, S, ...]`: the model's input, or a mask; for each frame `[B, T, ...]` or for
            each clip `[B, ...]`: embeddings of the time step, states of a text.
        block: the kind of block that it is for.
        per: what `x` has a value for.

    Returns:
        for each token the layout of the tokens, a mask too. For each clip, one for each row of tokens
        `[B t, ...]` or `[B s, ...]`. For each frame, in spatial blocks one for each row `[B t, ...]`, in
        temporal ones one for each token of the row, in its layout.

    Raises:
        ValueError: a shape that `clips` does not have, or an unknown block, layout or `per`.
    """
    _check_choice("block", block, Block)
    _check_choice("layout", layout, Layout)
    _check_choice("per", per, Per)
    lead = {
        "token": (clips.batch, clips.time, clips.space),
        "frame": (clips.batch, clips.time),
        "clip": (clips.batch,),
    }[per]
    if x.shape[: len(lead)] != lead:
        raise ValueError(
            f"x: shape {list(x.shape)} for each {per} of {clips}; it must begin with {list(lead)}"
        )
    times, places = _held(clips, group, block, group.rank())
    if per == "clip":
        return x.repeat_interleave(len(times if block == "spatial" else places), dim=0)
    own = x[:, times.start : times.stop]
    if per == "token":
        return _lay_out(own[:, :, places.start : places.stop], block, layout)
    if block == "spatial":
        return own.flatten(0, 1)
    every_place = own.unsqueeze(2).expand(*own.shape[:2], len(places), *own.shape[2:])
    return _lay_out(every_place, block, layout)


def gather_clips(
    x: Tensor,
    clips: Clips,
    group: dist.ProcessGroup,
    *,
    block: Block,
    layout: Layout = "BSH",
) -> Tensor:
    """`[B, T, S, ...]` of all ranks' tokens, on every rank, where each goes on to the same loss.

    Args:
        x: what a block of that kind has returned.

    Raises:
        ValueError: as `switch_blocks`.
    """
    _check_choice("block", block, Block)
    _check_choice("layout", layout, Layout)
    _check_laid_out("x", x, clips, group, block, layout)
    grid = _grid(x, clips, group, block, layout)
    if not _is_whole(clips, group):
        whole: Tensor = _Gather.apply(grid, clips, group, block)
        return whole
    if group.rank() > 0 and grid.requires_grad:
        grid.register_hook(torch.zeros_like)  # every rank has it; the first one counts it
    return grid


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: use {' or '.join(get_args(choices))}")


def _check_laid_out(
    name: str, x: Tensor, clips: Clips, group: dist.ProcessGroup, block: Block, layout: Layout
) -> None:
    held = [len(part) for part in _held(clips, group, block, group.rank())]
    rows, tokens = held if block == "spatial" else reversed(held)
    lead = (clips.batch * rows, tokens)
    lead = lead if layout == "BSH" else lead[::-1]
    if x.shape[:2] != lead:
        raise ValueError(
            f"{name}: shape {list(x.shape)} in {layout} from a {block} block; {clips} on rank "
            f"{group.rank()} of {group.size()} is [{lead[0]}, {lead[1]}, ...]"
        )


def _is_whole(clips: Clips, group: dist.ProcessGroup) -> bool:
    return clips.is_image or group.size() == 1


def _parts(count: int, ranks: int) -> list[range]:
    """Of `count`, what each rank has: the first ones one more."""
    each, more = divmod(count, ranks)
    ends = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [range(ends[rank], ends[rank + 1]) for rank in range(ranks)]


def _held(clips: Clips, group: dist.ProcessGroup, block: Block, rank: int) -> tuple[range, range]:
    """The times and the places of that rank in blocks of that kind."""
    times, places = range(clips.time), range(clips.space)
    if _is_whole(clips, group):
        return times, places
    if block == "spatial":
        return _parts(clips.time, group.size())[rank], places
    return times, _parts(clips.space, group.size())[rank]


def _grid(
    x: Tensor, clips: Clips, group: dist.ProcessGroup, block: Block, layout: Layout
) -> Tensor:
    """A view `[B, times, places, ...]` of this rank's tokens."""
    times, places = _held(clips, group, block, group.rank())
    rows = len(times if block == "spatial" else places)
    apart = x.unflatten(0 if layout == "BSH" else 1, (clips.batch, rows))
    return apart.movedim((0, 1, 2), _ORDER[layout, block])


def _lay_out(grid: Tensor, block: Block, layout: Layout) -> Tensor:
    """The way back from a grid; a view where that can be."""
    first = 0 if layout == "BSH" else 1
    return grid.movedim(_ORDER[layout, block], (0, 1, 2)).flatten(first, first + 1)


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        clips: Sequence[Clips],
        group: dist.ProcessGroup,
        to: Block,
        layout: Layout,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = clips, group, _OTHER[to], layout
        return tuple(_exchange(xs, clips, group, to, layout))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_Switch.apply(*ctx.how, *grads)


def _exchange(
    xs: Sequence[Tensor],
    clips: Sequence[Clips],
    group: dist.ProcessGroup,
    to: Block,
    layout: Layout,
) -> list[Tensor]:
    ranks = range(group.size())
    out, before, after = [], [], []
    for x, clip in zip(xs, clips, strict=True):
        held = _held(clip, group, to, group.rank())
        shape = (clip.batch, *(len(part) for part in held), *x.shape[2:])
        order = _ORDER[layout, to]
        laid = x.new_empty([shape[dim] for dim in order] + list(x.shape[2:]))
        out.append(laid.flatten(*((0, 1) if layout == "BSH" else (1, 2))))
        before.append(_grid(x, clip, group, _OTHER[to], layout))
        after.append(laid.movedim((0, 1, 2), order))
    leaving = [_with_rank(r, before, clips, group, to) for r in ranks]
    coming = [_with_rank(r, after, clips, group, _OTHER[to]) for r in ranks]
    num_leaving, num_coming = (
        [sum(p.numel() for p in ps) for ps in by] for by in (leaving, coming)
    )
    sent, received = (xs[0].new_empty(sum(counts)) for counts in (num_leaving, num_coming))
    for view, piece in _beside(sent, leaving):
        view.copy_(piece)
    dist.all_to_all_single(received, sent, num_coming, num_leaving, group)
    for view, piece in _beside(received, coming):
        piece.copy_(view)
    return out


def _with_rank(
    rank: int,
    grids: Sequence[Tensor],
    clips: Sequence[Clips],
    group: dist.ProcessGroup,
    block: Block,
) -> list[Tensor]:
    """Of grids that hold the other block's tokens, those that the rank holds in blocks of that kind."""
    pieces = []
    for grid, clip in zip(grids, clips, strict=True):
        times, places = _held(clip, group, block, rank)
        # one of the two is all of them, whatever the grid has
        pieces.append(grid[:, times.start : times.stop, places.start : places.stop])
    return pieces


def _beside(buffer: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Each rank's pieces, one after the other, as views of the buffer beside them."""
    flat = [piece for of_rank in pieces for piece in of_rank]
    parts = buffer.split([piece.numel() for piece in flat])
    return [(part.view(piece.shape), piece) for part, piece in zip(parts, flat, strict=True)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grid: Tensor, clips: Clips, group: dist.ProcessGroup, block: Block
    ) -> Tensor:
        dim = 1 if block == "spatial" else 2
        parts = _parts(clips.time if block == "spatial" else clips.space, group.size())
        ctx.where = dim, parts[group.rank()]
        missing = list(grid.shape)
        missing[dim] = len(parts[0]) - grid.shape[dim]
        if missing[dim]:  # all ranks send as much
            grid = torch.cat([grid, grid.new_zeros(missing)], dim)
        grid = grid.contiguous()
        found = [torch.empty_like(grid) for _ in parts]
        dist.all_gather(found, grid, group)
        pieces = [g.narrow(dim, 0, len(part)) for g, part in zip(found, parts, strict=True)]
        return torch.cat(pieces, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dim, own = ctx.where
        return grads[0].narrow(dim, own.start, len(own)), None, None, None
