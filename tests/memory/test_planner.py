"""Plans of recomputation and swapping, against every choice."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.memory.planner import CannotMeet, Layer, Option, Plan, choose, table

MIB = 1 << 20
KEEP = Option("keep", saved=0, seconds=0.0)

sizes = st.one_of(
    st.integers(0, 8).map(lambda n: n * MIB),
    st.integers(0, 2 * 10**9),
    st.integers(10**9, 10**9 + 2),  # sums that differ by a byte
)
times = st.one_of(
    st.integers(0, 8).map(lambda n: n / 8192),
    st.floats(min_value=0, max_value=1e-3, allow_subnormal=False),
)
copies = st.one_of(st.just(0.0), st.integers(0, 16).map(lambda n: n / 8192))
choosable = st.lists(
    st.builds(Option, st.just("o"), saved=sizes, seconds=times, link=copies, workspace=sizes),
    max_size=3,
).map(lambda options: (KEEP, *options))


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Layer], int]:
    """Layers, some of them equal, and micro-batches in flight."""
    kinds = draw(st.lists(choosable, min_size=1, max_size=3))
    forward = draw(st.lists(st.integers(0, 8), min_size=1, max_size=2))
    layers = draw(
        st.lists(
            st.tuples(st.sampled_from(kinds), st.sampled_from(forward)), min_size=1, max_size=5
        )
    )
    named = [
        Layer(str(at), seconds / 8192, options) for at, (options, seconds) in enumerate(layers)
    ]
    return named, draw(st.integers(1, 4))


def hidden(layers: Sequence[Layer], choices: Sequence[Option]) -> bool:
    """The link rule."""
    behind = [*(layer.seconds for layer in layers[1:]), 0.0]
    return all(o.link <= seconds for o, seconds in zip(choices, behind, strict=True))


def off_peak(choices: Sequence[Option], in_flight: int) -> int:
    return in_flight * sum(o.saved for o in choices) - max(o.workspace for o in choices)


def added(choices: Sequence[Option]) -> float:
    return math.fsum(o.seconds for o in choices)


def every(layers: Sequence[Layer]) -> list[tuple[Option, ...]]:
    found = itertools.product(*(layer.options for layer in layers))
    return [choices for choices in found if hidden(layers, choices)]


def check(plan: Plan, layers: Sequence[Layer], in_flight: int) -> None:
    """The plan is one, and its numbers are those of its choices."""
    assert all(o in layer.options for layer, o in zip(layers, plan.choices, strict=True))
    assert hidden(layers, plan.choices)
    assert plan.saved == off_peak(plan.choices, in_flight)
    assert plan.seconds == added(plan.choices)
    assert plan.workspace == max(o.workspace for o in plan.choices)


def cost(choices: Sequence[Option]) -> float:
    return added(choices) + math.fsum(o.link for o in choices) / 100


@settings(max_examples=150, deadline=None)
@given(models(), st.data())
def test_no_choice_is_better(model: tuple[list[Layer], int], data: st.DataObject) -> None:
    layers, in_flight = model
    choices = every(layers)
    totals = sorted({off_peak(c, in_flight) for c in choices})
    needed = data.draw(
        st.one_of(st.sampled_from(totals), st.integers(0, totals[-1] + MIB))
    ) + data.draw(st.integers(-1, 1))
    slowest = max(cost([o]) for layer in layers for o in layer.options)
    if needed <= 0:
        assert choose(layers, needed, in_flight).choices == (KEEP,) * len(layers)
        return
    if needed > totals[-1]:
        with pytest.raises(CannotMeet) as caught:
            choose(layers, needed, in_flight)
        check(caught.value.best, layers, in_flight)
        assert caught.value.short == needed - totals[-1]
        most = [c for c in choices if off_peak(c, in_flight) == totals[-1]]
        assert cost(caught.value.best.choices) <= min(map(cost, most)) + slowest * 1e-9
        return
    plan = choose(layers, needed, in_flight)
    check(plan, layers, in_flight)
    assert plan.saved >= needed
    # bytes are counted in units, of which each layer and the workspace loses one at most, and the need
    unit = max(
        1, max(needed, max(o.workspace for layer in layers for o in layer.options)) // 100_000
    )
    sure = needed + (len(layers) + 2) * unit if unit > 1 else needed
    enough = [c for c in choices if off_peak(c, in_flight) >= min(sure, totals[-1])]
    assert cost(plan.choices) <= min(map(cost, enough)) + slowest * 1e-9


def test_micro_batches_in_flight_share_the_need() -> None:
    norm = Option("norm", saved=3 * MIB, seconds=1e-4)
    layers = [Layer(str(at), 1e-3, (KEEP, norm)) for at in range(8)]
    for in_flight in (1, 2, 4):
        plan = choose(layers, 12 * MIB, in_flight)
        assert plan.choices.count(norm) == 4 // in_flight
        assert (plan.saved, plan.workspace) == (12 * MIB, 0)
    with pytest.raises(CannotMeet, match=f"saves {24 * MIB} bytes, 1 too few") as caught:
        choose(layers, 24 * MIB + 1)
    assert caught.value.short == 1
    assert caught.value.best.choices == (norm,) * 8
    assert pickle.loads(pickle.dumps(caught.value)).best == caught.value.best


def test_workspace_is_there_once() -> None:
    whole = Option("layer", saved=10, seconds=1.0, workspace=8)
    layers = [Layer(str(at), 1.0, (KEEP, whole)) for at in range(3)]
    for needed, taken in ((1, 1), (2, 1), (3, 2), (12, 2), (13, 3), (22, 3)):
        plan = choose(layers, needed)
        assert (plan.choices.count(whole), plan.saved) == (taken, 10 * taken - 8)
    # in every layer another of 7 costs less than one of 8
    small = replace(whole, name="small", seconds=1.1, workspace=7)
    layers = [Layer(str(at), 1.0, (KEEP, whole, small)) for at in range(3)]
    assert choose(layers, 22).choices == (whole,) * 3
    assert choose(layers, 23).choices == (small,) * 3
    with pytest.raises(CannotMeet) as caught:
        choose(layers, 25, in_flight=1)
    assert (caught.value.short, caught.value.best.choices) == (2, (small,) * 3)
    # a workspace larger than all that is saved
    with pytest.raises(CannotMeet) as caught:
        choose([Layer("0", 1.0, (KEEP, replace(whole, workspace=11)))], 1)
    assert (caught.value.short, caught.value.best.choices) == (1, (KEEP,))


def test_copies_hide_behind_the_layer_that_follows() -> None:
    swap = Option("swap", saved=10, seconds=0.0, link=1.0)
    again = Option("recompute", saved=10, seconds=1.0)
    layers = [Layer(str(at), 1.0, (KEEP, again, swap)) for at in range(4)]
    # the last layer is not swapped, as nothing follows
    assert choose(layers, 30).choices == (swap, swap, swap, KEEP)
    assert choose(layers, 31).choices == (swap, swap, swap, again)
    # layer 2 is too short for the copy of layer 1, and time that was left earlier is no help
    layers[2] = replace(layers[2], seconds=0.75)
    choices = choose(layers, 30).choices
    assert (choices.count(swap), choices.count(again), choices[1] == swap) == (2, 1, False)
    with pytest.raises(CannotMeet) as caught:
        choose([Layer("0", 1.0, (KEEP, swap))], 1)
    assert (caught.value.short, caught.value.best.choices) == (1, (KEEP,))


def test_a_copy_that_is_not_needed_is_not_made() -> None:
    swap = Option("swap", saved=10, seconds=0.0, link=1.0)
    small = Option("small", saved=5, seconds=0.0, link=0.5)
    layers = [Layer(str(at), 1.0, (KEEP, swap, small)) for at in range(4)]
    assert sum(o.saved for o in choose(layers, 15).choices) == 15
    # a little time is worth more than a copy of twice as long, and less than one of 200 times
    layers = [Layer(str(at), 1.0, (KEEP, swap, Option("again", 10, 0.02))) for at in range(4)]
    assert choose(layers, 10).choices.count(swap) == 1
    layers = [Layer(str(at), 1.0, (KEEP, swap, Option("again", 10, 0.005))) for at in range(4)]
    assert choose(layers, 10).choices.count(swap) == 0


def test_nothing_needed_and_all_is_kept() -> None:
    layers = [Layer(str(at), 0.0, (KEEP, Option("free", saved=1, seconds=0.0))) for at in range(2)]
    for needed in (0, -1, -(10**12)):
        assert choose(layers, needed) == Plan((KEEP, KEEP), saved=0, seconds=0.0, workspace=0)


def test_80_layers() -> None:
    """Two kinds, one after the other, with numbers of a large model."""
    rng = random.Random(0)

    def options(scale: float) -> tuple[Option, ...]:
        rest = (
            Option(
                f"option {at}",
                saved=int(scale * rng.randrange(40, 400)) * MIB + 512 * rng.randrange(99),
                seconds=scale * rng.uniform(1e-4, 5e-3),
                link=scale * 4e-3 * (at == 5),
                workspace=int(scale * rng.randrange(200)) * MIB,
            )
            for at in range(7)
        )
        return (KEEP, *rest)

    first, second = options(1.0), options(1.4)
    layers = [Layer(str(at), 6e-3, first if at < 40 else second) for at in range(80)]
    most = sum(max(o.saved for o in layer.options) for layer in layers)
    before = 0.0
    for tenths in range(1, 10):
        plan = choose(layers, most * tenths * 8 // 10, in_flight=8)
        check(plan, layers, in_flight=8)
        assert before <= plan.seconds
        before = plan.seconds
    assert any(o.link for o in plan.choices)


BAD = [
    ({"layers": []}, r"no layers: \[\]"),
    ({"needed": 1.5}, "needed .* got 1.5"),
    ({"in_flight": 0}, "in_flight .* got 0"),
    ({"layers": [Layer("a", 1.0, ())]}, r"layer 'a': no options: \(\)"),
    ({"layers": [Layer("a", -1.0, (KEEP,))]}, "layer 'a': seconds .* got -1.0"),
    ({"layers": [Layer("a", math.nan, (KEEP,))]}, "layer 'a': seconds .* got nan"),
    *(
        (
            {"layers": [Layer("a", 1.0, (replace(KEEP, **{name: value}),))]},
            f"layer 'a', option 'keep': {name} must be 0, .* got {value}",
        )
        for name, value in (("saved", 1), ("seconds", 0.5), ("link", 0.5), ("workspace", 1))
    ),
    *(
        (
            {"layers": [Layer("a", 1.0, (KEEP, replace(KEEP, name="b", **{name: value})))]},
            f"layer 'a', option 'b': {name} must be .* got {value}",
        )
        for name, value in (
            ("saved", -1),
            ("saved", 0.5),
            ("seconds", -0.5),
            ("seconds", math.nan),
            ("link", -0.5),
            ("link", math.inf),
            ("workspace", -1),
            ("workspace", math.nan),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments(arguments: dict, message: str) -> None:
    good = {"layers": [Layer("a", 1.0, (KEEP,))], "needed": 0, "in_flight": 1}
    with pytest.raises(ValueError, match=message):
        choose(**{**good, **arguments})


def test_table() -> None:
    norm = Option("norm", saved=MIB, seconds=1e-4)
    swap = Option("swap", saved=100 * MIB, seconds=0.0, link=1.0)
    layers = [Layer(str(at), 1.0, (KEEP, norm, swap)) for at in range(1, 7)]
    choices = (norm, replace(norm, saved=3 * MIB), norm, swap, KEEP, KEEP)
    plan = Plan(choices, saved=105 * MIB, seconds=3e-4, workspace=0)
    assert table(layers, plan).splitlines() == [
        "layers  choice    MiB     ms",
        "1-3     norm      5.0  0.300",
        "4       swap    100.0  0.000",
        "5-6     keep      0.0  0.000",
        "total           105.0  0.300",
    ]


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ("1 2 5 6", ["1-2, 5-6"]),  # the chunks of one of two stages
        ("1 3 5", ["1, 3, 5"]),
        ("3 4 1", ["3-4, 1"]),  # a prediction ahead behind the last layers
        ("9 10 11", ["9-11"]),
        ("2 1 0", ["2, 1, 0"]),
        ("a b 1", ["a, b, 1"]),
    ],
)
def test_a_row_names_no_layers_but_its_own(names: str, rows: list[str]) -> None:
    layers = [Layer(name, 1.0, (KEEP,)) for name in names.split()]
    plan = Plan((KEEP,) * len(layers), saved=0, seconds=0.0, workspace=0)
    shown = table(layers, plan).splitlines()[1:-1]
    assert [row.partition("  ")[0] for row in shown] == rows
