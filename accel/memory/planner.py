"""Which layers recompute, swap or keep what, so that the peak fits a budget and the least time is added.

    x[l, o]    whether layer l takes its option o, one of them      n     micro-batches in flight
    w          the largest workspace of the options taken: the backward pass has one layer's at a time

    bytes      n sum(saved x) - w >= needed
    link       the copies of layers 0..l end with the forward pass of layer l + 1, for every l but the last:
               sum(link x over 0..l) <= sum(seconds of 1..l + 1); the last layer takes no option with a link
    least      sum(seconds x), and among equal times sum(saved x)

Layers that are equal are counted, not told apart: which of them take an option without a link is all one. Of
consecutive ones (and equal layers after them) the last take the longest copies; then what is copied but
not hidden is convex in l, so the link rule holds within the run when it does at the run's end.

Bytes are exact. The solver knows six digits of a row, and loses solutions that meet one with less than that
to spare; so the row of bytes is written in digits to the base 4096 with carries, all small whole numbers,
and its solutions are checked. The time is exact to 1e-9 of the slowest option's, the link rule to 1e-6, and
what is saved too much to a hundredth of the largest option. A search that goes on for more than some seconds
ends with the best plan that it found: equal layers are fast, layers that are all different need not be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CannotMeet", "Layer", "Option", "Plan", "choose", "table"]

_BASE = 1 << 12
_COST = 1e5
"""The largest cost; the solver's tolerance is 1e-6."""
_LINK = 1e3
"""What a row of the link rule allows; the tolerance is the same."""
_SLACK = 1e-7
"""Relative, of the link rule: what meets it exactly has that to spare."""
_TIE = 1e-7
"""Cost of the bytes of the largest option, where the slowest's time costs 1."""
_EQUAL = 1e-9
"""Relative: times that differ by less are equal."""
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
    """Seconds of the host link each way, hidden under compute as far as the link rule says."""
    workspace: int = 0
    """Bytes that come back, beside what is kept, while this layer's backward runs."""


@dataclass(frozen=True)
class Layer:
    """One layer and what it may do."""

    name: str
    seconds: float
    """Of its forward pass: what the copy of an earlier layer hides behind."""
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
    """The plan that saves enough in the least time; of equally fast ones one that saves the least.

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
    plan = problem.fastest(needed)
    if plan is None:
        best = problem.largest()
        raise CannotMeet(needed - best.saved, best)
    return plan


def table(layers: Sequence[Layer], plan: Plan) -> str:
    """The plan as text, one row for consecutive layers with one choice; bytes and times of a row are sums."""
    rows = [("layers", "choice", "MiB", "ms")]
    pairs = zip(layers, plan.choices, strict=True)
    for choice, group in itertools.groupby(pairs, key=lambda pair: pair[1].name):
        names, options = zip(*((layer.name, option) for layer, option in group), strict=True)
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        rows.append((label, choice, *_sums(options)))
    rows.append(("total", "", *_sums(plan.choices)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{label:<{widths[0]}}  {choice:<{widths[1]}}  {mib:>{widths[2]}}  {ms:>{widths[3]}}"
        for label, choice, mib, ms in rows
    )


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


@dataclass(frozen=True)
class _Column:
    """How many of some layers take an option."""

    option: Option
    kind: int
    """Layers with the same options are of one kind."""
    layers: Sequence[int]
    """All of the kind; of an option with a link those of one run."""


class _Problem:
    def __init__(self, layers: Sequence[Layer], in_flight: int) -> None:
        self.in_flight = in_flight
        self.hides = list(itertools.accumulate(layer.seconds for layer in layers[1:]))
        """Seconds that the copies of layers 0..l hide behind, for each l but the last."""
        behind = [*(layer.seconds for layer in layers[1:]), None]
        runs = itertools.groupby(range(len(layers)), lambda at: (layers[at].options, behind[at]))
        self.runs = [list(run) for _, run in runs]
        self.kinds: dict[tuple[Option, ...], list[int]] = {}
        for at, layer in enumerate(layers):
            self.kinds.setdefault(layer.options, []).append(at)
        self.columns = [
            _Column(option, kind, equal)
            for kind, (options, equal) in enumerate(self.kinds.items())
            for option in options
            if not option.link
        ]
        kinds = list(self.kinds)
        self.columns += [
            _Column(option, kinds.index(layers[run[0]].options), run)
            for run in self.runs[:-1]
            for option in layers[run[0]].options
            if 0 < option.link <= self.hides[run[-1]]
        ]
        self.levels = sorted({c.option.workspace for c in self.columns})
        """What w can be, from 0."""
        self.at_most = max(self._at_most(level) for level in self.levels)
        """No plan saves more; where no option has a link, one saves this."""

    def _at_most(self, workspace: int) -> int:
        most = [0] * sum(map(len, self.runs))
        for column in self.columns:
            if column.option.workspace <= workspace:
                for at in column.layers:
                    most[at] = max(most[at], column.option.saved)
        return self.in_flight * sum(most) - workspace

    def fastest(self, needed: int) -> Plan | None:
        """None: no plan saves so much."""
        if needed > self.at_most:
            return None
        slowest = max(c.option.seconds for c in self.columns) or 1.0
        most = max(c.option.saved for c in self.columns) or 1
        times = [_COST * (c.option.seconds / slowest) for c in self.columns]
        plan = self._solve(needed, times)
        if plan is None:
            return None
        bytes_too = [_COST * _TIE * (c.option.saved / most) for c in self.columns]
        fewer = self._solve(needed, [*map(float.__add__, times, bytes_too)])
        return fewer if fewer and fewer.seconds <= plan.seconds * (1 + _EQUAL) else plan

    def largest(self) -> Plan:
        """Saves the most, and is the fastest that does."""
        saved = 0  # by keeping all
        each = _COST / (self.in_flight * max(c.option.saved for c in self.columns) or 1)
        lost = [-each * self.in_flight * c.option.saved for c in self.columns]
        while saved < self.at_most and (plan := self._solve(saved + 1, lost, each)):
            saved = plan.saved
        plan = self.fastest(saved)
        assert plan is not None
        return plan

    def _solve(
        self, needed: int, cost: Sequence[float], workspace_cost: float = 0.0
    ) -> Plan | None:
        """The plan that costs least; None: none saves `needed`.

        Args:
            cost: of each column.
            workspace_cost: of each byte of the largest workspace.
        """
        asked = needed
        while True:
            model = _Model()
            self._write_choices(model, cost)
            self._write_bytes(model, asked, workspace_cost)
            x = model.solve()
            if x is None:
                return None
            plan = self._read([round(x[j]) for j in range(len(self.columns))])
            if plan.saved >= needed:
                return plan
            # not seen yet: the solver let a row pass. What then meets `needed` with less to spare is lost
            asked += needed - plan.saved

    def _read(self, counts: Sequence[int]) -> Plan:
        """Options with links at the ends of runs, the longest last; others from the front in their order."""
        taken: dict[int, Option] = {}
        of_run: dict[int, list[Option]] = {}
        of_kind: dict[int, list[Option]] = {}
        for column, count in zip(self.columns, counts, strict=True):
            into, key = (
                (of_run, column.layers[-1]) if column.option.link else (of_kind, column.kind)
            )
            into.setdefault(key, []).extend([column.option] * count)
        for end, options in of_run.items():
            options.sort(key=lambda o: o.link)
            taken.update(zip(range(end - len(options) + 1, end + 1), options, strict=True))
        for kind, equal in enumerate(self.kinds.values()):
            free = [at for at in equal if at not in taken]
            taken.update(zip(free, of_kind[kind], strict=True))
        return _plan([taken[at] for at in sorted(taken)], self.in_flight)

    def _write_choices(self, model: _Model, cost: Sequence[float]) -> None:
        """The columns, one option for each layer, and the link rule."""
        for column, each in zip(self.columns, cost, strict=True):
            model.variable(each, high=len(column.layers))
        for kind, equal in enumerate(self.kinds.values()):
            model.row(
                {j: 1 for j, c in enumerate(self.columns) if c.kind == kind}, len(equal), len(equal)
            )
        copies = [(j, c) for j, c in enumerate(self.columns) if c.option.link]
        for run in self.runs[:-1]:
            end = run[-1]
            row = {j: c.option.link for j, c in copies if c.layers[-1] <= end}
            if row:  # where nothing hides them none is left
                model.row({j: 1 for j, c in copies if c.layers[-1] == end}, high=len(run))
                row = {j: link / self.hides[end] * _LINK for j, link in row.items()}
                model.row(row, high=_LINK * (1 + _SLACK))

    def _write_bytes(self, model: _Model, needed: int, cost: float) -> None:
        """Saves `needed`; each byte of workspace costs `cost`."""
        # w = sum(rises z): z of a level is 1 where w is that level or more
        rises = {high: high - low for low, high in itertools.pairwise(self.levels)}
        z = {level: model.variable(cost * rise) for level, rise in rises.items()}
        for lower, upper in itertools.pairwise(z.values()):
            model.row({lower: 1, upper: -1}, low=0)
        for kind, equal in enumerate(self.kinds.values()):
            of = [(j, c.option) for j, c in enumerate(self.columns) if c.kind == kind]
            for level in {o.workspace for _, o in of} - {0}:
                row = {j: 1 for j, o in of if o.workspace >= level}
                model.row({**row, z[level]: -len(equal)}, high=0)

        rest = {j: self.in_flight * c.option.saved for j, c in enumerate(self.columns)}
        rest |= {z[level]: -rise for level, rise in rises.items()}
        unit = math.gcd(*rest.values()) or 1
        rest, target = {j: value // unit for j, value in rest.items()}, -(-needed // unit)
        row = {}
        while any(abs(value) >= _BASE for value in rest.values()):
            digits = {j: math.copysign(abs(value) % _BASE, value) for j, value in rest.items()}
            carry = model.variable(0, -2 - len(self.levels), len(self.hides) + 1)
            model.row({**row, **digits, carry: -_BASE}, low=target % _BASE)
            rest = {
                j: (abs(value) // _BASE) * (1 if value > 0 else -1) for j, value in rest.items()
            }
            row, target = {carry: 1}, target // _BASE
        model.row({**row, **rest}, low=target)


class _Model:
    """A linear program in whole numbers, a variable and a row at a time."""

    def __init__(self) -> None:
        self.variables: list[tuple[float, float, float]] = []
        self.rows: list[tuple[Mapping[int, float], float, float]] = []

    def variable(self, cost: float, low: float = 0.0, high: float = 1.0) -> int:
        self.variables.append((cost, low, high))
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

        cost, low, high = zip(*self.variables, strict=True)
        terms, lows, highs = zip(*self.rows, strict=True)
        values = [value for row in terms for value in row.values()]
        at = [(i, j) for i, row in enumerate(terms) for j in row]
        shape = (len(terms), len(cost))
        matrix = csr_array((values, tuple(zip(*at, strict=True))), shape=shape, dtype=float)
        rows = LinearConstraint(matrix, lows, highs)
        for options in ({"node_limit": _NODES}, {}):
            found = milp(
                cost,
                integrality=[1] * len(cost),
                bounds=Bounds(low, high),
                constraints=rows,
                options={"mip_rel_gap": 0.0, **options},
            )
            if found.x is not None:
                return list(found.x)
            if found.status == 2:  # infeasible
                return None
        raise RuntimeError(f"the solver stopped: {found.message}")
