"""Schedules of computation by name: p ranks, v chunks of each, m micro-batches.

    F, B, W    seconds of a chunk's forward, of its whole backward, and of that one's part for the weights
    bubble     seconds that a rank idles, where all chunks take the same time and transfers take none
    held       most activations of a rank, in chunks of one micro-batch (`in_flight`)

    schedule     v  bubble                     held by rank r                     from
    one_f_one_b  1  (p - 1) (F + B)            p - r                              PipeDream-Flush
    interleaved  v  (p - 1) (F + B)            2 (p - r - 1) + (v - 1) p + 1 + k  arXiv 2104.04473
    dualpipe_v   2  (p - 1) (F&B + B - 3 W)    2 p + 1                            F, W <= B - W; DualPipe

F and B are of one chunk: with v chunks in place of one, each is a v-th. k is `extra_warmup`, which has no
bubble of its own. F&B is a forward and a backward that begin and end together (`paired` in `with_transfers`);
DualPipeV has a smaller bubble where the forward's output is sent before the backward. Fewer are held where
there are fewer micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, count

from accel.parallel.schedule.actions import Action, Kind, Placement, Schedule

__all__ = [
    "dualpipe_v",
    "forward_only",
    "interleaved",
    "one_f_one_b",
]

_F, _B = Kind.FORWARD, Kind.BACKWARD
_I, _W = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def one_f_one_b(p: int, m: int) -> Schedule:
    """p - r - 1 forwards, then a forward and a backward in turn.

    Raises:
        ValueError: p or m is under 1.
    """
    check_counts(p=p, m=m)
    forwards, backwards = ([Action(kind, i, 0) for i in range(m)] for kind in (_F, _B))
    ranks = (_alternate(forwards, backwards, p - r - 1) for r in range(p))
    return Schedule(p, 1, m, Placement.LOOP, tuple(ranks))


def interleaved(
    p: int, v: int, m: int, group_size: int | None = None, extra_warmup: int = 0
) -> Schedule:
    """Megatron's interleaved schedule, and the same with more forwards before the first backward.

    With `extra_warmup`, the forward and the backward that follow each other are of two micro-batches on every
    rank, so that the transfers of one, and the all-to-alls of its experts, can go on behind the other.

    Args:
        group_size: micro-batches that a chunk takes before the next chunk has its turn; p if None. Megatron's
            `--microbatch-group-size-per-virtual-pipeline-stage`.
        extra_warmup: forwards beside Megatron's 2 (p - r - 1) + (v - 1) group_size, as far as there are any.

    Raises:
        ValueError: a count is under 1, v is 1, or m or group_size do not fit p.
    """
    check_counts(p=p, v=v, m=m)
    if v == 1:
        raise ValueError("v = 1: interleaving wants 2 chunks or more; one_f_one_b is for 1")
    if type(extra_warmup) is not int or extra_warmup < 0:
        raise ValueError(f"extra_warmup must be a whole number, 0 or more, got {extra_warmup!r}")
    order = _grouped(p, v, m, group_size)
    forwards = [Action(_F, i, c) for i, c in order]
    backwards = [Action(_B, i, v - 1 - c) for i, c in order]
    fixed = (v - 1) * (group_size or p) + extra_warmup
    ranks = (_alternate(forwards, backwards, 2 * (p - r - 1) + fixed) for r in range(p))
    return Schedule(p, v, m, Placement.LOOP, tuple(ranks))


def forward_only(
    p: int,
    v: int,
    m: int,
    group_size: int | None = None,
    placement: Placement = Placement.LOOP,
) -> Schedule:
    """The forwards of the schedules of that placement.

    Raises:
        ValueError: a count is under 1, m or group_size do not fit p, or v is not 2 in a V.
    """
    check_counts(p=p, v=v, m=m)
    if placement is Placement.LOOP:
        order = _grouped(p, v, m, group_size) if v > 1 else [(i, 0) for i in range(m)]
        return Schedule(p, v, m, placement, (tuple(Action(_F, i, c) for i, c in order),) * p)
    if v != 2 or group_size is not None:
        raise ValueError(f"v = {v}, group_size = {group_size}: a V has 2 chunks and no groups")
    down, up = ([Action(_F, i, c) for i in range(m)] for c in (0, 1))
    # the first comes back when the last rank has had 2 (p - r) - 1 turns
    ranks = (_alternate(down, up, 2 * (p - r) - 2) for r in range(p))
    return Schedule(p, 2, m, placement, tuple(ranks))


def dualpipe_v(p: int, m: int) -> Schedule:
    """DeepSeek's DualPipe cut in half: a forward of one chunk and a backward of the other, back to back.

    Raises:
        ValueError: p or m is under 1, or m under 2 p.
    """
    check_counts(p=p, m=m)
    if m < 2 * p:
        fewer = f", or p of {m // 2}" if m > 1 else ""
        raise ValueError(f"p = {p}, m = {m}: DualPipeV wants m of 2 p = {2 * p} or more{fewer}")
    return Schedule(p, 2, m, Placement.V, tuple(_dualpipe_v(p, r, m) for r in range(p)))


def _dualpipe_v(p: int, r: int, m: int) -> tuple[Action, ...]:
    """Its eight steps. Digits are chunks; w is the oldest backward of weights that is still to do."""
    last = ["b1", "b0"] * (r + 1)
    steps = [
        *["f0"] * (2 * (p - r - 1)),
        *["f0", "f1"] * (r + 1),
        *["i1", "w", "f1"] * (p - r - 1),
        *["f0", "b1", "f1", "b0"] * (m - 2 * p + r + 1),
        *["b1", "f1", "b0"] * (p - r - 1),
        *last[: r + 1],
        *[step.replace("b", "i") for step in last[r + 1 :]],
        *["w", "i0"] * (p - r - 1),
        *["w"] * (r + 1),
    ]
    kinds = {"f": _F, "b": _B, "i": _I}
    numbers = {(kind, chunk): count() for kind in "fb" for chunk in "01"}
    weights: deque[tuple[int, int]] = deque()
    actions = []
    for step in steps:
        if step == "w":
            actions.append(Action(_W, *weights.popleft()))
            continue
        number = next(numbers[step[0].replace("i", "b"), step[1]])
        actions.append(Action(kinds[step[0]], number, int(step[1])))
        if step[0] == "i":
            weights.append((number, int(step[1])))
    return tuple(actions)


def check_counts(**counts: int) -> None:
    """Raises ValueError where one is no whole number, or under 1."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")


def _grouped(p: int, v: int, m: int, group_size: int | None) -> list[tuple[int, int]]:
    """Micro-batch and chunk of each forward: a group through the chunks, then the next group."""
    g = p if group_size is None else group_size
    fitting = [n for n in range(p, m + 1) if m % n == 0 or m % n >= p]
    if type(g) is not int or g not in fitting:
        way_out = (
            f"group_size of {', '.join(map(str, fitting))}" if fitting else f"m of {p} or more"
        )
        raise ValueError(
            f"p = {p}, m = {m}, group_size = {g}: each group, and what is left for the last, must be p"
            f" or more; {way_out} would work"
        )
    return [(i, c) for low in range(0, m, g) for c in range(v) for i in range(low, min(low + g, m))]


def _alternate(first: Sequence[Action], second: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """The first ones, with the second ones between them from `ahead` on."""
    ahead = min(ahead, len(first))
    pairs = zip(first[ahead:], second, strict=False)
    rest = second[len(first) - ahead :]
    return (*first[:ahead], *chain.from_iterable(pairs), *rest)
