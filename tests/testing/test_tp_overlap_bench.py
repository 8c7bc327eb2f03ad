"""The rows of `bench tp_overlap`: ours is what the flag does without a number."""

from accel.testing.bench import OURS
from benchmarks.tp_overlap import (
    ALONE,
    AUTO,
    COLLECTIVES,
    PRODUCTS,
    QUICKEST,
    SERIAL,
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

    def run(self, what, quick, payload=None):
        times = {side: [seconds] for side, seconds in SECONDS.items()}
        found = {"num_bytes": 1, "seconds": 1.0, "shape": "S", "rounds": 1}
        if what[0] in ("layers", "layers-longer", "small-layers"):
            times.pop(ALONE)
            return {**found, "directions": {"row": times}, "auto": {"row": "ring of 2"}}, "slow"
        if what == ["gpt"]:
            steps = {side: times[side] for side in (STOCK, AUTO, ALONE, *RINGS)}
            differ = dict.fromkeys((AUTO, ALONE, *RINGS), 0)
            return {
                **found,
                "seconds": steps,
                "differ": differ,
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
        "row, transfers take 1 of the products"
    ]
    assert shares[-1]["case"] == "row, small, transfers take 1 of the products"


def test_a_step():
    differ, step, speed_up = gpt_rows(FakeLink(), quick=True)
    assert differ["ours"] == 0
    assert (step["ours"], step["peers"][QUICKEST]) == (1200, 1000)
    assert (speed_up["ours"], speed_up["peers"]) == (1.25, {QUICKEST: 1.5, ALONE: 0.9375})
    assert OURS not in step["peers"]


def test_a_share_is_of_its_round():
    seconds = {
        **{PRODUCTS: [1.0, 2.0, 1.0], COLLECTIVES: [0.5, 1.0, 2.0]},
        **{SERIAL: [1.5, 3.0, 3.0], AUTO: [1.0, 2.5, 2.5]},
    }
    assert shares(seconds, AUTO) == [1.0, 0.5, 0.5]
