"""Turns: strict alternation, nobody waits for who has left, ratios from pairs of turns."""

import json
import threading

import pytest

from accel.testing.turns import Turns, compare_turns


def test_sides_alternate_and_the_last_one_runs_free(tmp_path):
    """The other side makes 4 steps, this one 10: after its last turn nobody is waited for."""
    order: list[str] = []

    def train(me: str, other: str, steps: int) -> None:
        turns = Turns(tmp_path, me, other, first=me == "a", every=2)
        step = turns.around(lambda: order.append(me))
        for _ in range(steps):
            step()
        turns.finish()

    threads = [
        threading.Thread(target=train, args=args) for args in (("b", "a", 4), ("a", "b", 10))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert "".join(order) == "aabbaabb" + "a" * 6
    assert len(json.loads((tmp_path / "a.json").read_text())) == 10


def test_ranks_wait_for_each_other_around_each_step(tmp_path):
    calls: list[str] = []
    turns = Turns(tmp_path, "a", "a", first=True, every=1, barrier=lambda: calls.append("barrier"))
    assert turns.around(lambda x: calls.append("step") or x + 1)(1) == 2
    assert calls == ["barrier", "barrier", "step", "barrier"]


def test_ratio_is_the_median_of_pairs_without_the_warm_up():
    ours = [50, 50, 9, 9, 1, 3, 2, 2, 4, 4, 7]  # the last turn is incomplete
    theirs = [1, 1, 1, 1, 4, 4, 6, 6, 4, 4, 7]
    ratio = compare_turns(ours, theirs, 2)
    assert (ratio.median, ratio.num_turns) == (2.0, 3)
    assert ratio.quartiles == (1.5, 2.5)
    assert ratio.spread == 0.5
    assert ratio.step_seconds == (2.0, 4.0)


def test_too_few_turns_are_an_error():
    with pytest.raises(ValueError, match="make 2 pairs of turns of 2 steps after the first 2"):
        compare_turns([1.0] * 8, [1.0] * 9, 2)
