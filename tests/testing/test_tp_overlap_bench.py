"""The rows of `bench tp_overlap`: ours is what the flag does without a number."""

import pytest

from accel.testing.bench import OURS, outcome
from benchmarks.tp_overlap import (
    ALONE,
    AUTO,
    COLLECTIVES,
    COMPUTATION,
    FASTER,
    GPT_RUNS,
    PRODUCTS,
    QUICKEST,
    RATIOS,
    SCHEDULED_TOO,
    SERIAL,
    SLOWER,
    STOCK,
    gpt_rows,
    layer_rows,
    shares,
)

RINGS = ("accel, ring of 2", "accel, ring of 4")
SECONDS = {
    **{PRODUCTS: 1.0, COLLECTIVES: 0.5, SERIAL: 1.6, STOCK: 1.5},
    **{AUTO: 1.2, ALONE: 1.6, RINGS[0]: 1.3, RINGS[1]: 1.0},
}


class FakeLink:
    """Of ranks that have measured SECONDS."""

    def __init__(self):
        self.asked = {}

    def run(self, what, quick, payload=None):
        self.asked[payload] = what
        times = {side: [seconds] for side, seconds in SECONDS.items()}
        found = {"num_bytes": 1, "seconds": 1.0, "shape": "S", "rounds": 1}
        if what[0] in ("layers", "layers-longer", "small-layers"):
            times.pop(ALONE)
            return {**found, "directions": {"row": times}, "auto": {"row": "ring of 2"}}, "slow"
        if what[0] in ("gpt", "gpt-pairs", "gpt-short"):
            rings = RINGS if what == ["gpt"] else ()
            parts = {COMPUTATION: times[PRODUCTS]}
            parts |= {side: times[side] for side in (COLLECTIVES, SERIAL, *rings)}
            pairs = 1 if what == ["gpt-short"] else 2
            steps = {side: pairs * times[side] for side in (STOCK, AUTO, ALONE)}
            differ = dict.fromkeys((AUTO, ALONE, *rings), 0)
            return {
                **found,
                "seconds": steps | parts,
                "differ": differ,
                "pairs": pairs,
                "elements": 8,
                "auto": "none",
            }, "slow"
        return found, "slow"


def test_ours_is_auto_and_the_best_setting_a_peer():
    time, hidden = layer_rows(FakeLink(), quick=True)
    assert time["ours"] == 1200
    assert time["peers"][QUICKEST] == time["peers"][RINGS[1]] == 1000
    assert AUTO not in time["peers"]
    assert (round(hidden["ours"], 6), round(hidden["peers"][QUICKEST], 6)) == (0.8, 1.2)
    assert hidden["limit"] is None
    assert "auto, which chose ring of 2; quickest: accel, ring of 4" in time["method"]
    assert "above 1" in hidden["method"]


def test_the_target_is_for_the_layers_of_a_model_where_transfers_take_as_long_as_products():
    shares = [row for row in layer_rows(FakeLink(), quick=False) if row["metric"] == "hidden share"]
    assert len(shares) == 5
    assert [row["case"] for row in shares if row["target"] is not None] == [
        "row, rate 1: collectives take 0.50 of the products"
    ]
    assert shares[-1]["case"] == "row, small, rate 1: collectives take 0.50 of the products"


def test_a_step():
    differ, step, hidden, speed_up, paired = gpt_rows(FakeLink(), quick=True)
    assert step["case"] == "S, rate 1: collectives take 0.50 of the computation"
    assert differ["ours"] == 0
    assert (step["ours"], step["peers"][QUICKEST]) == (1200, 1000)
    assert (round(hidden["ours"], 6), round(hidden["peers"][QUICKEST], 6)) == (0.8, 1.2)
    assert (speed_up["ours"], speed_up["peers"]) == (1.25, {QUICKEST: 1.5, ALONE: 0.9375})
    assert OURS not in step["peers"]
    assert paired["ours"] == pytest.approx(1.6 / 1.5), "the flag alone"
    assert paired["peers"] == pytest.approx({SCHEDULED_TOO: 0.8})
    assert outcome(paired) == "falls short"
    assert (
        "median of 2 pairs; 20th to 80th percentile: tp_overlap alone 1.067 to" in paired["method"]
    )


def test_steps_at_every_rate():
    link = FakeLink()
    rows = gpt_rows(link, quick=False)
    cases = list(dict.fromkeys(row["case"].split(":")[0] for row in rows))
    assert cases == [f"S, rate {ratio:g}" for ratio in RATIOS]
    assert [link.asked[1 / ratio] for ratio in RATIOS] == [[GPT_RUNS[ratio]] for ratio in RATIOS]
    assert [row["case"][:11] for row in rows if row["target"] == FASTER] == ["S, rate 1: "]
    paired = [row["case"].split(":")[0] for row in rows if row["target"] == SLOWER]
    assert paired == ["S, rate 0.25", "S, rate 1"]


def test_a_share_is_of_its_round():
    seconds = {
        **{PRODUCTS: [1.0, 2.0, 1.0], COLLECTIVES: [0.5, 1.0, 2.0]},
        **{SERIAL: [1.5, 3.0, 3.0], AUTO: [1.0, 2.5, 2.5]},
    }
    assert shares(seconds, AUTO) == [1.0, 0.5, 0.5]
