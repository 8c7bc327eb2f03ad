"""One op at one shape on several sides: how it is made, checked and timed.

A side that cannot be imported, is wrong or fails is reported in words; it hides no other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu.timing import Times, measure

__all__ = ["COMPILED", "EAGER", "LATE", "OURS", "Work", "run"]

OURS = "accel"
EAGER = "eager"
COMPILED = "torch.compile"
"""Of eager. Timed only where it is asked for: it takes seconds to compile."""
LATE = ("quack", "flash-attn 4")
"""Peers that compile at their first call, too."""
Mode = Literal["forward", "backward", "both"]

ROTATED_BYTES = 512 << 20
"""Of all input sets together: ten times the 50 MiB of an H100's L2."""
ALLOWED = 1e-3
"""Relative error that any side may have, whatever eager PyTorch's is."""
INEXACT = 0.05
"""What a peer may have beyond that and still be timed, with a note."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What `run` times.

    Exactly one of `num_bytes` and `num_flops` says what the work is bound by: the limit is that many
    at the ceiling that this run has measured.
    """

    op: str
    shape: str
    mode: Mode
    make: Callable[[str], tuple]
    """Device -> the arguments of one call."""
    sides: Mapping[str, Callable[..., Any] | str]
    """`OURS`, `EAGER` and peers -> the function, or in words why it is not there."""
    leaves: Sequence[int] = (0,)
    """Which arguments get gradients."""
    outputs: int = 1
    """How many results are compared and, in a backward, have a gradient."""
    num_bytes: int = 0
    num_flops: int = 0
    sustained: bool = False
    """So many operations that the chip's power sets their rate: the ceiling is that of sustained products."""
    target_of_limit: float | None = None
    """The share of the ceiling that we mean to reach."""
    target_us: Mapping[str, float] = field(default_factory=dict)
    """Machine -> microseconds."""
    target_over_best: float | None = None
    """How many times as fast as the fastest peer, of all that any part has timed: part report looks."""
    host_target_us: float | None = None
    """Microseconds that the CPU is busy."""
    reference: Callable[..., Any] | None = None
    """For the check, in place of eager on fp32 inputs."""
    compiled: bool = True
    """Whether `torch.compile` of eager could be a peer."""
    last: bool = False
    """After all that are not: what a run that is cut off leaves out first."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.mode} {self.shape}"


def can_compile(work: Work, device: str) -> bool:
    """Whether `torch.compile` of eager is a peer."""
    return work.compiled and callable(work.sides.get(EAGER)) and device != "cpu"


def _results(work: Work, result: Any) -> list[Tensor]:
    """Those that are compared and differentiated."""
    return list(result[: work.outputs]) if isinstance(result, list | tuple) else [result]


def _wide(arguments: tuple) -> tuple:
    floats = (torch.bfloat16, torch.float16)
    return tuple(
        a.detach().float() if isinstance(a, Tensor) and a.dtype in floats else a for a in arguments
    )


def _clone(value: Any) -> Any:
    """Sides may overwrite what they are given."""
    if isinstance(value, list | tuple):
        return type(value)(_clone(v) for v in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _with_leaves(work: Work, arguments: tuple) -> tuple:
    if work.mode == "forward":
        return arguments
    return tuple(
        a.detach().requires_grad_() if i in work.leaves else a for i, a in enumerate(arguments)
    )


def _outputs(work: Work, function: Callable[..., Any], arguments: tuple) -> list[Tensor]:
    """What the check compares: the results, and the gradients of the leaves."""
    arguments = _with_leaves(work, _clone(arguments))
    results = _results(work, function(*arguments))
    if work.mode == "forward":
        return results
    generator = torch.Generator(results[0].device).manual_seed(5)
    dys = [torch.randn(r.shape, generator=generator, device=r.device).to(r.dtype) for r in results]
    leaves = [arguments[i] for i in work.leaves]
    kept = [result.detach().clone() for result in results]
    return [*kept, *torch.autograd.grad(results, leaves, dys)]


def _errors(outputs: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        float((o.float() - e.float()).norm() / e.float().norm().clamp(min=1e-30))
        for o, e in zip(outputs, exact, strict=True)
    ]


def check(
    work: Work,
    device: str,
    sides: Mapping[str, Callable[..., Any]],
    inexact: dict[str, str] | None = None,
) -> dict[str, str]:
    """Side -> why its results are wrong; empty if all are right.

    With `inexact`, peers that are less exact than allowed, but not far off, are told there.
    """
    times = 2 if device != "cpu" else 3  # the interpreter truncates to bf16, and rounds nothing
    arguments = work.make(device)
    exact = _outputs(work, work.reference or sides[EAGER], _wide(arguments))
    allowed = [ALLOWED] * len(exact)
    if EAGER in sides:
        found = _errors(_outputs(work, sides[EAGER], arguments), exact)
        allowed = [max(times * error, ALLOWED) for error in found]
    wrong = {}
    for side, function in sides.items():
        try:
            errors = _errors(_outputs(work, function, arguments), exact)
        except Exception as error:
            wrong[side] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        if all(e <= a for e, a in zip(errors, allowed, strict=True)):  # false for NaN
            continue
        told = f"relative errors {errors}, allowed {allowed}"
        if inexact is not None and side != OURS and all(e <= INEXACT for e in errors):
            inexact[side] = f"less exact: {told}"
        else:
            wrong[side] = f"wrong: {told}"
    return wrong


def _call(work: Work, function: Callable[..., Any], arguments: tuple) -> tuple[Callable, tuple]:
    """What is timed for one input set, and its arguments."""
    if work.mode == "forward":
        return function, arguments
    arguments = _with_leaves(work, arguments)
    leaves = [arguments[i] for i in work.leaves]
    if work.mode == "backward":
        results = _results(work, function(*arguments))
        dys = [torch.randn_like(result) for result in results]

        def backward(results: list[Tensor], dys: list[Tensor], leaves: list[Tensor]) -> Any:
            return torch.autograd.grad(results, leaves, dys, retain_graph=True)

        return backward, (results, dys, leaves)
    with torch.no_grad():
        dys = [torch.randn_like(result) for result in _results(work, function(*arguments))]

    def both(arguments: tuple, dys: list[Tensor], leaves: list[Tensor]) -> Any:
        return torch.autograd.grad(_results(work, function(*arguments)), leaves, dys)

    return both, (arguments, dys, leaves)


def _num_sets(work: Work, device: str, arguments: tuple) -> int:
    if device == "cpu":
        return 1
    tensors = [t for a in arguments for t in (a if isinstance(a, list | tuple) else [a])]
    num_bytes = sum(t.nbytes for t in tensors if isinstance(t, Tensor))
    return max(1, min(64, -(-ROTATED_BYTES // max(num_bytes, 1))))


def run(
    work: Work, device: str, stream: Any, timed: Collection[str] | None = None
) -> dict[str, Any]:
    """Check every side, then time those that are right. Side -> `Times`, or why there are none.

    With `timed`, of those alone; eager PyTorch still says what is right.
    """
    asked = set(work.sides) if timed is None else {*timed, EAGER} & set(work.sides)
    told: dict[str, Any] = {
        s: f for s, f in work.sides.items() if s in asked and isinstance(f, str)
    }
    sides = {side: f for side, f in work.sides.items() if side in asked and not isinstance(f, str)}
    if timed and COMPILED in timed and can_compile(work, device):
        sides[COMPILED] = torch.compile(sides[EAGER], dynamic=False)
    inexact: dict[str, str] = {}
    wrong = check(work, device, sides, inexact)
    told |= wrong
    calls: dict[str, Callable] = {}
    sets: dict[str, Sequence[tuple]] = {}
    for side, function in sides.items():
        if side in wrong or (timed is not None and side not in timed):
            continue
        first = work.make(device)
        inputs = [first, *(work.make(device) for _ in range(_num_sets(work, device, first) - 1))]
        made = [_call(work, function, arguments) for arguments in inputs]
        calls[side], sets[side] = made[0][0], [arguments for _, arguments in made]
        del inputs, made
    measured = measure(calls, sets, stream)
    for side, note in inexact.items():
        times = measured.get(side)
        if isinstance(times, Times):
            measured[side] = replace(times, note="; ".join(filter(None, [times.note, note])))
    found = {**told, **measured}
    return {side: found[side] for side in (*work.sides, *measured) if side in found}


def as_row(
    work: Work, results: Mapping[str, Any], limits: Mapping[str, float], machine: str
) -> dict:
    """One line of results.json: times of all sides, the limit and the targets."""
    flops = limits["gemm_flops_per_s"]
    if work.sustained:
        flops = limits.get("sustained_gemm_flops_per_s") or flops
    rate = limits["copy_bytes_per_s"] if work.num_bytes else flops
    limit = 1e6 * (work.num_bytes or work.num_flops) / rate
    targets = [work.target_us[machine]] if machine in work.target_us else []
    if work.target_of_limit:
        targets.append(limit / work.target_of_limit)
    return {
        "op": work.op,
        "mode": work.mode,
        "shape": work.shape,
        "limit_us": limit,
        "target_us": min(targets) if targets else None,
        "target_over_best": work.target_over_best,
        "host_target_us": work.host_target_us,
        "sides": {
            side: (
                {"us": t.best, "eager_us": t.eager, "host_us": t.host, "spread_us": t.spread,
                 "rate": (work.num_bytes or work.num_flops) / (t.best * 1e-6), "note": t.note}
                if isinstance(t, Times) else {"absent": str(t)}
            )
            for side, t in results.items()
        },
        "bound": "bytes" if work.num_bytes else "flops",
    }  # fmt: skip
