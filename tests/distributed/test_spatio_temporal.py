"""Videos split over 2 and 4 ranks, by frames and by places in turn: who has which tokens, there and back,
gradients against one rank, side inputs, images, bad input, and the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel.context import spatio_temporal
from accel.parallel.context.spatio_temporal import (
    Block,
    Clips,
    Layout,
    gather_clips,
    split_clips,
    switch_blocks,
)
from accel.testing.distributed import launch, under_torchrun

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "video_transformer.py"
DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS: tuple[Layout, ...] = ("BSH", "SBH")
BLOCKS: tuple[Block, ...] = ("spatial", "temporal")
BATCHES = {
    "even": [Clips(2, 4, 8)],
    "uneven": [Clips(2, 5, 7)],
    "ranks with nothing": [Clips(2, 3, 2)],
    "one place": [Clips(1, 4, 1)],
    "several sizes": [Clips(1, 5, 6), Clips(3, 2, 3)],
    "images too": [Clips(2, 1, 5), Clips(2, 5, 7), Clips(1, 1, 3)],
    "images alone": [Clips(3, 1, 4)],
}
HIDDEN = 6

on_2_and_4_ranks = pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.distributed(world_size=n), id=str(n)) for n in (2, 4)],
)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def group(gloo_group: None) -> Any:
    return dist.group.WORLD


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def videos(batch: list[Clips], **how: Any) -> list[Tensor]:
    return [drawn(c.batch, c.time, c.space, HIDDEN, **how) for c in batch]


def own(tensors: list[Tensor], batch: list[Clips], group: Any, **how: Any) -> list[Tensor]:
    return [split_clips(t, c, group, **how) for t, c in zip(tensors, batch, strict=True)]


def rows_of(whole: Tensor, block: Block, layout: Layout, group: Any) -> Tensor:
    """By hand, row for row: what a rank's blocks of that kind see of `[B, T, S, ...]`."""
    if whole.shape[1] > 1:
        dim = 1 if block == "spatial" else 2
        whole = whole.tensor_split(group.size(), dim)[group.rank()]
    batch, times, places = whole.shape[:3]
    if block == "spatial":
        rows = [whole[b, t] for b in range(batch) for t in range(times)]
        tokens = places
    else:
        rows = [whole[b, :, s] for b in range(batch) for s in range(places)]
        tokens = times
    stacked = torch.stack(rows) if rows else whole.new_empty((0, tokens, *whole.shape[3:]))
    return stacked if layout == "BSH" else stacked.transpose(0, 1)


def summed(tensors: list[Tensor]) -> list[Tensor]:
    out = [t.clone() for t in tensors]
    for t in out:
        dist.all_reduce(t)
    return out


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of elements sent with each all-to-all."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(out: Tensor, x: Tensor, *rest: Any) -> Any:
        sent.append(x.numel())
        return exchange(out, x, *rest)

    monkeypatch.setattr(spatio_temporal.dist, "all_to_all_single", counted)
    return sent


@on_2_and_4_ranks
@each_layout
def test_there_and_back(ranks: int, layout: Layout, group: Any, exchanges: list[int]) -> None:
    for (name, batch), dtype in product(BATCHES.items(), DTYPES):
        whole = videos(batch, dtype=dtype)
        parts = {
            block: own(whole, batch, group, block=block, layout=layout, per="token")
            for block in BLOCKS
        }
        for block in BLOCKS:
            for part, c, x in zip(parts[block], batch, whole, strict=True):
                assert torch.equal(part, rows_of(x, block, layout, group)), name
                gathered = gather_clips(part, c, group, block=block, layout=layout)
                assert torch.equal(gathered, x), name
        exchanges.clear()
        for block, other in (BLOCKS, BLOCKS[::-1]):
            there = switch_blocks(parts[block], batch, group, to=other, layout=layout)
            back = switch_blocks(there, batch, group, to=block, layout=layout)
            for got, expected in zip(there + back, parts[other] + parts[block], strict=True):
                assert got.dtype == dtype, name
                assert torch.equal(got, expected), name
        # one for all sizes, none for images
        assert len(exchanges) == (0 if all(c.is_image for c in batch) else 4), name


@on_2_and_4_ranks
def test_one_tensor_of_any_rank_and_stride(ranks: int, group: Any) -> None:
    clips = Clips(2, 5, 7)
    whole = drawn(2, 5, 7, 3, 4)  # heads and their width
    for layout in LAYOUTS:
        x = split_clips(whole, clips, group, block="spatial", layout=layout)
        strided = x.movedim(-1, 0).contiguous().movedim(0, -1)
        assert not strided.is_contiguous() or not x.numel()
        y = switch_blocks(strided, clips, group, to="temporal", layout=layout)
        assert isinstance(y, Tensor)
        assert torch.equal(y, rows_of(whole, "temporal", layout, group))


@pytest.mark.distributed(world_size=4)
def test_groups_of_some_ranks(exchanges: list[int]) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    me, clips = dist.get_rank(), Clips(2, 3, 5)
    whole = drawn(2, 3, 5, HIDDEN, seed=me % 2)
    for group in (pairs[me % 2], alone[me]):
        x = split_clips(whole, clips, group, block="spatial")
        y = switch_blocks(x, clips, group, to="temporal")
        assert torch.equal(y, rows_of(whole, "temporal", "BSH", group))
        assert torch.equal(gather_clips(y, clips, group, block="temporal"), whole)
    assert len(exchanges) == 1  # nothing travels where there is one rank


@on_2_and_4_ranks
@each_layout
def test_gradients_go_the_other_way(
    ranks: int, layout: Layout, group: Any, exchanges: list[int]
) -> None:
    batch = BATCHES["images too"]
    whole, grads = videos(batch), videos(batch, seed=1)
    for block, other in (BLOCKS, BLOCKS[::-1]):
        x = [rows_of(w, block, layout, group).requires_grad_() for w in whole]
        y = switch_blocks(x, batch, group, to=other, layout=layout)
        dy = [rows_of(g, other, layout, group) for g in grads]
        exchanges.clear()
        dx = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert len(exchanges) == 1
        for got, g in zip(dx, grads, strict=True):
            assert torch.equal(got, rows_of(g, block, layout, group))
        # and gradients of gradients
        (first,) = torch.autograd.grad(y[1].pow(2).sum(), x[1], create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x[1])
        assert torch.equal(second, 8 * x[1])


def model(x: Tensor, weights: list[Tensor], sides: list[Tensor]) -> Tensor:
    """Attention (sigmoid) within rows `[rows, tokens, H]`, with a scale for each row, a state for each row or
    token, and a mask of the tokens that nobody sees."""
    scale, state, hidden = sides
    h = x * scale.unsqueeze(1) + (state if state.ndim == 3 else state.unsqueeze(1))
    scores = (h @ weights[0]) @ h.transpose(1, 2)
    scores = scores.masked_fill(hidden.unsqueeze(1), -1e9)
    return x + torch.tanh(scores.sigmoid() @ h @ weights[1])


def trained(batch: list[Clips], group: Any, layout: Layout, local: bool) -> list[Tensor]:
    """The loss of two blocks of each kind, and its gradients; `group` None: the whole batch, by plain torch.

    Args:
        local: sum the losses of own parts, images on the first rank only, rather than gather.
    """
    weights = [drawn(HIDDEN, HIDDEN, seed=s).requires_grad_() for s in range(10, 19)]
    whole = [x.requires_grad_() for x in videos(batch)]
    clip = [(drawn(c.batch, HIDDEN, seed=1) @ weights[8]).sigmoid() for c in batch]
    frame = [torch.tanh(drawn(c.batch, c.time, HIDDEN, seed=2) @ weights[8]) for c in batch]
    hidden = [drawn(c.batch, c.time, c.space, seed=3) > 1 for c in batch]
    x = whole if group is None else own(whole, batch, group, block="spatial", layout=layout)
    for i, block in enumerate(BLOCKS * 2):
        if group is not None and i:
            x = switch_blocks(x, batch, group, to=block, layout=layout)
        w = weights[2 * i : 2 * i + 2]
        if group is None:
            x = [on_one_rank(*one, w, block) for one in zip(x, clip, frame, hidden, strict=True)]
            continue
        how: dict[str, Any] = {"block": block, "layout": layout}
        sides = zip(
            own(clip, batch, group, per="clip", **how),
            own(frame, batch, group, per="frame", **how),
            own(hidden, batch, group, per="token", **how),
            strict=True,
        )
        if layout == "SBH":  # of what is one for each token
            flip = [
                [scale, state.transpose(0, 1) if block == "temporal" else state, mask.t()]
                for scale, state, mask in sides
            ]
            rows = [model(t.transpose(0, 1), w, s) for t, s in zip(x, flip, strict=True)]
            x = [row.transpose(0, 1) for row in rows]
        else:
            x = [model(t, w, list(s)) for t, s in zip(x, sides, strict=True)]
    if group is not None and not local:
        x = [
            gather_clips(t, c, group, block="temporal", layout=layout)
            for t, c in zip(x, batch, strict=True)
        ]
    counts = [1.0] * len(batch)
    if local:
        counts = [float(not c.is_image or group.rank() == 0) for c in batch]
    loss = sum((n * t.pow(2).sum() for n, t in zip(counts, x, strict=True)), torch.zeros(()))
    return [loss.detach(), *torch.autograd.grad(loss, weights + whole)]


def on_one_rank(
    x: Tensor, clip: Tensor, frame: Tensor, hidden: Tensor, weights: list[Tensor], block: Block
) -> Tensor:
    """`model` on `[B, T, S, H]`, without what is tested."""
    batch, times, places = x.shape[:3]
    if block == "spatial":
        sides = [clip.repeat_interleave(times, 0), frame.flatten(0, 1), hidden.flatten(0, 1)]
        return model(x.flatten(0, 1), weights, sides).view_as(x)
    sides = [
        clip.repeat_interleave(places, 0),
        frame.repeat_interleave(places, 0),
        hidden.transpose(1, 2).flatten(0, 1),
    ]
    rows = model(x.transpose(1, 2).flatten(0, 1), weights, sides)
    return rows.view(batch, places, times, -1).transpose(1, 2)


@on_2_and_4_ranks
@each_layout
def test_the_sum_of_gradients_is_that_of_one_rank(ranks: int, layout: Layout, group: Any) -> None:
    for name, batch in BATCHES.items():
        expected = trained(batch, None, layout, local=False)
        assert all(t.abs().sum() > 0 for t in expected), name
        for local in (False, True):
            loss, *grads = trained(batch, group, layout, local)
            found = [summed([loss])[0] if local else loss, *summed(grads)]
            for got, true in zip(found, expected, strict=True):
                error = float((got - true).abs().max() / true.abs().max())
                assert error < 1e-11, f"{name}, local {local}: {error}"


@on_2_and_4_ranks
def test_side_inputs(ranks: int, group: Any) -> None:
    for batch, block, layout in product(BATCHES.values(), BLOCKS, LAYOUTS):
        for clips in batch:
            check_side_inputs(clips, block, layout, group)


def check_side_inputs(c: Clips, block: Block, layout: Layout, group: Any) -> None:
    how: dict[str, Any] = {"block": block, "layout": layout}
    grid = (c.batch, c.time, c.space)
    text, texts = drawn(c.batch, 3, HIDDEN), drawn(*grid[:2], 3, HIDDEN)
    mask = drawn(*grid) > 0
    tokens = 1 if layout == "BSH" else 0  # the dimension of a row's tokens
    for_tokens = rows_of(text[:, None, None].expand(*grid, -1, -1), block, layout, group)
    of_clip = split_clips(text, c, group, per="clip", **how)
    assert torch.equal(of_clip, for_tokens.select(tokens, 0)), c
    for_tokens = rows_of(texts[:, :, None].expand(*grid, -1, -1), block, layout, group)
    of_frame = split_clips(texts, c, group, per="frame", **how)
    if block == "spatial":
        for_tokens = for_tokens.select(tokens, 0)
    assert torch.equal(of_frame, for_tokens), c
    of_token = split_clips(mask, c, group, per="token", **how)
    assert of_token.dtype == torch.bool
    assert torch.equal(of_token, rows_of(mask, block, layout, group)), c


@pytest.mark.distributed(world_size=2)
def test_bad_input_names_the_argument_and_a_way_out(group: Any, exchanges: list[int]) -> None:
    clips = Clips(2, 5, 7)
    x = split_clips(drawn(2, 5, 7, HIDDEN), clips, group, block="spatial")
    mine = (3, 2)[group.rank()]

    def refuses(message: str, call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            call(*args, **options)

    def switch(x: Any, clips: Any, to: Any = "temporal", layout: Any = "BSH") -> Any:
        return switch_blocks(x, clips, group, to=to, layout=layout)

    refuses("to='time': use spatial or temporal", switch, x, clips, to="time")
    refuses("layout='SBHD': use BSH or SBH", switch, x, clips, layout="SBHD")
    shape = f"x: shape [{2 * mine}, 7, {HIDDEN}] in SBH from a spatial block; {clips} on rank "
    refuses(f"{shape}{group.rank()} of 2 is [7, {2 * mine}, ...]", switch, x, clips, layout="SBH")
    refuses("x[1]: shape [4, 7", switch, [x, x.new_zeros(4, 7, 1)], [clips, Clips(4, 1, 8)])
    refuses("x: shape [7]", switch, x.new_zeros(7), clips)
    refuses("clips: 2 for 1 tensors", switch, [x], [clips, clips])
    two = [x, x.float()]
    refuses("x: tensors of torch.float32 on cpu, torch.float64 on cpu", switch, two, [clips] * 2)
    refuses("block='': use", split_clips, x, clips, group, block="")
    for per, lead in (("token", [2, 5, 7]), ("frame", [2, 5]), ("clip", [2])):
        message = f"x: shape [3, 5, 7] for each {per} of {clips}; it must begin with {lead}"
        refuses(message, split_clips, drawn(3, 5, 7), clips, group, block="spatial", per=per)
    refuses("per='row': use", split_clips, x, clips, group, block="spatial", per="row")
    refuses("from a temporal block", gather_clips, x, clips, group, block="temporal")
    refuses("time=0: give a whole number, 1 or more", Clips, 1, 0, 1)
    refuses("space=2.5: give", Clips, 1, 1, 2.5)
    assert exchanges == []


def losses(output: str, steps: int) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)$", output, re.MULTILINE)]
    assert len(found) == steps, output
    return found


@pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2e-6), ("float64", 1e-10)])
def test_the_example_does_not_depend_on_the_ranks(dtype: str, rounding: float) -> None:
    steps = 8
    command = [str(EXAMPLE), "--steps", str(steps), "--dtype", dtype]
    expected = losses(launch(1, command), steps)
    assert expected[-1] < 0.9 * expected[0]
    for ranks in (2, 4):
        found = losses(launch(ranks, command), steps)
        assert found == pytest.approx(expected, rel=rounding), ranks


@pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
def test_the_example_needs_no_launcher() -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "1"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=True, env=one_thread
    )
    losses(alone.stdout, steps=1)
