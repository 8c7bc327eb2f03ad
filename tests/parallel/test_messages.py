"""Messages where a batch takes one of each kind between two ranks, as HCCL's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accel.parallel.collectives import _one_for_each


def test_the_nth_message_of_two_ranks_is_in_the_nth_round() -> None:
    def op(kind: str, peer: int, name: str) -> Any:
        return SimpleNamespace(op=kind, group_peer=peer, name=name)

    here = [
        *(op("recv", 1, "k"), op("recv", 1, "v"), op("recv", 2, "k")),
        *(op("send", 1, "q"), op("send", 2, "q"), op("send", 2, "out"), op("send", 2, "lse")),
    ]
    rounds = [[(o.op, o.group_peer, o.name) for o in batch] for batch in _one_for_each(here)]
    assert rounds == [
        [("recv", 1, "k"), ("recv", 2, "k"), ("send", 1, "q"), ("send", 2, "q")],
        [("recv", 1, "v"), ("send", 2, "out")],
        [("send", 2, "lse")],
    ]
    assert _one_for_each([]) == []
