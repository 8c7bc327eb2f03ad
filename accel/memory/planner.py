"""Which layers recompute, swap or keep what, so that the peak fits a budget and the least time is added.

    x[k, o]    how many layers of kind k take option o; layers with the same options are of one kind
    w          the largest workspace of the options taken: the backward pass has one layer's at a time
    n          micro-batches in flight

    bytes      n sum(saved x) - w >= needed
    link       a layer's copy to the host ends with the forward pass of the layer behind it, where the kernels
               wait for it: an option whose copy takes longer is none, and the last layer has none with a copy
    least      sum((seconds + link / 100) x): a copy that hides takes a little of the kernels' bandwidth

The solver is exact in whole numbers of five digits, so bytes are counted in units of 1e-5 of what is needed:
rounded in favour of a plan, and where that misses the need, against it. What saves the most is known without.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CannotMeet", "Layer", "Option", "Plan", "choose", "table"]

_DIGITS = 100_000
"""The largest number in a row of bytes, and the largest cost; the solver's tolerance is 1e-6."""
_COPY = 0.01
"""Cost of a hidden copy's second."""
_NODES = 1000
"""Of the search, after which it ends with the best plan found; that is some seconds for 80 layers."""


@dataclass(frozen=True)
class Option:
    """What one layer may do with its activations."""

    name: str
    saved: int
    """Bytes of one micro-batch's activations that are not on the device between forward and backward."""
    seconds: float
    """Compute time that it adds to one micro-batch's forward and backward."""
    link: float = 0.0
    """Seconds of its copy to the host, and of that back."""
    workspace: int = 0
    """Bytes that come back, beside what is kept, while this layer's backward runs."""


@dataclass(frozen=True)
class Layer:
    """One layer and what it may do."""

    name: str
    seconds: float
    """Of its forward pass: what the copy of the layer before it hides behind."""
    options: tuple[Option, ...]
    """The first keeps everything: all its numbers are 0."""


@dataclass(frozen=True)
class Plan:
    """One option for each layer."""

    choices: tuple[Option, ...]
    saved: int
    """Bytes off the peak: of all micro-batches in flight, less the workspace."""
    seconds: float
    """Added to each micro-batch."""
    workspace: int
    """Bytes of the peak that are one layer's workspace."""


class CannotMeet(ValueError):
    """No plan saves enough.

    Attributes:
        short: bytes by which the best plan misses.
        best: that plan; it saves the most, and is the fastest that does.
    """

    def __init__(self, short: int, best: Plan) -> None:
        super().__init__(short, best)
        self.short = short
        self.best = best

    def __str__(self) -> str:
        return f"the plan that saves the most saves {self.best.saved} bytes, {self.short} too few"


def choose(layers: Sequence[Layer], needed: int, in_flight: int = 1) -> Plan:
    """The plan that saves enough in the least time.

    Args:
        layers: of one rank, in the order of the forward pass.
        needed: bytes that must go off the peak: the peak with everything kept, less the budget.
        in_flight: micro-batches that have their activations at the peak.

    Raises:
        CannotMeet: no choice saves so much.
        ValueError: an argument is not as described; the message names layer, option and value.
    """
    _check(layers, needed, in_flight)
    if needed <= 0:
        return _plan([layer.options[0] for layer in layers], in_flight)
    problem = _Problem(layers, in_flight)
    best = problem.largest()
    if best.saved < needed:
        raise CannotMeet(needed - best.saved, best)
    return problem.fastest(needed) or best


def table(layers: Sequence[Layer], plan: Plan) -> str:
    """The plan as text, one row for layers that follow each other and have one choice, with their names as in
    ``1-3, 9-11``; bytes and times of a row are sums."""
    rows = [("layers", "choice", "MiB", "ms")]
    pairs = zip(layers, plan.choices, strict=True)
    for choice, group in itertools.groupby(pairs, key=lambda pair: pair[1].name):
        names, options = zip(*((layer.name, option) for layer, option in group), strict=True)
        rows.append((_ranges(names), choice, *_sums(options)))
    rows.append(("total", "", *_sums(plan.choices)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{label:<{widths[0]}}  {choice:<{widths[1]}}  {mib:>{widths[2]}}  {ms:>{widths[3]}}"
        for label, choice, mib, ms in rows
    )


def _ranges(names: Sequence[str]) -> str:
    """Consecutive numbers as their first and last, all else as it is: a rank may have every other chunk of
    the layers, and those of multi-token prediction are counted from 1 again."""
    ends: list[list[str]] = []
    for name in names:
        if ends and ends[-1][-1].isdecimal() and name == str(int(ends[-1][-1]) + 1):
            ends[-1] = [ends[-1][0], name]
        else:
            ends.append([name])
    return ", ".join(map("-".join, ends))


def _sums(options: Sequence[Option]) -> tuple[str, str]:
    """MiB saved of one micro-batch, and milliseconds added to it."""
    saved, seconds = sum(o.saved for o in options), math.fsum(o.seconds for o in options)
    return f"{saved / 2**20:.1f}", f"{seconds * 1e3:.3f}"


def _plan(choices: Sequence[Option], in_flight: int) -> Plan:
    workspace = max(o.workspace for o in choices)
    return Plan(
        choices=tuple(choices),
        saved=in_flight * sum(o.saved for o in choices) - workspace,
        seconds=math.fsum(o.seconds for o in choices),
        workspace=workspace,
    )


def _check(layers: Sequence[Layer], needed: int, in_flight: int) -> None:
    if not isinstance(needed, int):
        raise ValueError(f"needed must be a whole number of bytes, got {needed!r}")
    if not isinstance(in_flight, int) or in_flight < 1:
        raise ValueError(f"in_flight must be a whole number, at least 1, got {in_flight!r}")
    if not layers:
        raise ValueError(f"no layers: {layers!r}")
    for layer in layers:
        where = f"layer {layer.name!r}"
        if not (math.isfinite(layer.seconds) and layer.seconds >= 0):
            raise ValueError(
                f"{where}: seconds must be finite and not negative, got {layer.seconds!r}"
            )
        if not layer.options:
            raise ValueError(f"{where}: no options: {layer.options!r}")
        for at, option in enumerate(layer.options):
            for name in ("saved", "seconds", "link", "workspace"):
                value, whole = getattr(option, name), name in ("saved", "workspace")
                what = f"{where}, option {option.name!r}: {name}"
                if whole and not isinstance(value, int):
                    raise ValueError(f"{what} must be a whole number of bytes, got {value!r}")
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{what} must be finite and not negative, got {value!r}")
                if at == 0 and value != 0:
                    raise ValueError(
                        f"{what} must be 0, for the first option keeps all, got {value!r}"
                    )


class _Problem:
    def __init__(self, layers: Sequence[Layer], in_flight: int) -> None:
        self.in_flight = in_flight
        behind = [*(layer.seconds for layer in layers[1:]), 0.0]
        self.kinds: dict[tuple[Option, ...], list[int]] = {}
        """Options of a kind, and its layers."""
        for at, (layer, seconds) in enumerate(zip(layers, behind, strict=True)):
            options = tuple(o for o in layer.options if o.link <= seconds)
            self.kinds.setdefault(options, []).append(at)
        self.columns = [(k, o) for k, options in enumerate(self.kinds) for o in options]
        self.levels = sorted({o.workspace for _, o in self.columns})
        """What w can be, from 0."""

    def largest(self) -> Plan:
        """Saves the most, and is the fastest that does."""

        def at_most(workspace: int) -> Plan:
            fitting = [[o for o in kind if o.workspace <= workspace] for kind in self.kinds]
            return self._plan([[max(kind, key=lambda o: (o.saved, -_cost(o)))] for kind in fitting])

        return max(
            map(at_most, self.levels),
            key=lambda plan: (plan.saved, -math.fsum(map(_cost, plan.choices))),
        )

    def fastest(self, needed: int) -> Plan | None:
        """None: no plan saves so much, to the unit of bytes."""
        for up in (True, False):
            plan = self._solve(needed, up)
            if plan is None or plan.saved >= needed:
                return plan
        return None

    def _solve(self, needed: int, up: bool) -> Plan | None:
        """With bytes saved rounded up, and needed and workspace down, or the other way."""
        unit = max(1, max(needed, self.levels[-1]) // _DIGITS)
        slowest = max(_cost(o) for _, o in self.columns) or 1.0
        model = _Model()
        x = [model.variable(_DIGITS * _cost(o) / slowest, math.inf) for _, o in self.columns]
        # w, in units, is the sum of the rises to the levels whose z is 1
        units = [_units(level, unit, not up) for level in self.levels]
        rises = [high - low for low, high in itertools.pairwise(units)]
        z = {level: model.variable(0.0, 1) for level in self.levels[1:]}
        for lower, upper in itertools.pairwise(z.values()):
            model.row({lower: 1, upper: -1}, low=0)
        for kind, equal in enumerate(self.kinds.values()):
            own = {j: o for j, (of, o) in zip(x, self.columns, strict=True) if of == kind}
            model.row(dict.fromkeys(own, 1), len(equal), len(equal))
            for level in {o.workspace for o in own.values()} - {0}:
                larger = {j: 1 for j, o in own.items() if o.workspace >= level}
                model.row({**larger, z[level]: -len(equal)}, high=0)
        enough = _units(needed, unit, not up)
        saved = [
            min(_units(self.in_flight * o.saved, unit, up), enough + units[-1])
            for _, o in self.columns
        ]
        lost = {j: -rise for j, rise in zip(z.values(), rises, strict=True)}
        model.row({**dict(zip(x, saved, strict=True)), **lost}, low=enough)
        found = model.solve()
        if found is None:
            return None
        taken: list[list[Option]] = [[] for _ in self.kinds]
        for j, (kind, option) in zip(x, self.columns, strict=True):
            taken[kind] += [option] * round(found[j])
        return self._plan(taken)

    def _plan(self, taken: Sequence[Sequence[Option]]) -> Plan:
        """Of the options of each kind: one for each of its layers, or one for all."""
        choices: dict[int, Option] = {}
        for equal, options in zip(self.kinds.values(), taken, strict=True):
            each = options if len(options) == len(equal) else [*options] * len(equal)
            choices.update(zip(equal, each, strict=True))
        return _plan([choices[at] for at in sorted(choices)], self.in_flight)


def _units(num_bytes: int, unit: int, up: bool) -> int:
    return -(-num_bytes // unit) if up else num_bytes // unit


def _cost(option: Option) -> float:
    return option.seconds + _COPY * option.link


class _Model:
    """A linear program in whole numbers, a variable and a row at a time."""

    def __init__(self) -> None:
        self.variables: list[tuple[float, float]] = []
        self.rows: list[tuple[Mapping[int, float], float, float]] = []

    def variable(self, cost: float, high: float) -> int:
        self.variables.append((cost, high))
        return len(self.variables) - 1

    def row(
        self, terms: Mapping[int, float], low: float = -math.inf, high: float = math.inf
    ) -> None:
        self.rows.append((terms, low, high))

    def solve(self) -> list[float] | None:
        """The variables at the least cost; None: nothing meets the rows."""
        # half a second to import, and most runs plan nothing
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cost, high = zip(*self.variables, strict=True)
        terms, lows, highs = zip(*self.rows, strict=True)
        values = [value for row in terms for value in row.values()]
        at = [(i, j) for i, row in enumerate(terms) for j in row]
        shape = (len(terms), len(cost))
        matrix = csr_array((values, tuple(zip(*at, strict=True))), shape=shape, dtype=float)
        for options in ({"node_limit": _NODES}, {}):
            found = milp(
                cost,
                integrality=[1] * len(cost),
                bounds=Bounds(0, high),
                constraints=LinearConstraint(matrix, lows, highs),
                options={"mip_rel_gap": 0.0, **options},
            )
            if found.x is not None:
                return list(found.x)
            if found.status == 2:  # infeasible
                return None
        raise RuntimeError(f"the solver stopped: {found.message}")
