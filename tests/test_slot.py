from __future__ import annotations

import pytest

from accel.slot import Slot


def test_it_is_false_while_it_is_empty_whatever_it_holds() -> None:
    slot = Slot[list[int]]()
    assert not slot
    assert slot.get() is None
    off = slot.set([])
    assert slot
    assert slot.get() is slot.value
    off()
    assert not slot
    with pytest.raises(LookupError, match="no active feature fills this slot"):
        assert slot.value


def test_the_latest_value_is_in_place_of_those_before() -> None:
    slot = Slot[int]()
    slot.set(1)
    slot.set(2)
    assert slot.value == 2
