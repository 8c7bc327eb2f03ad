"""`to_last_rank`: what arrives is what was given, and what cannot be moved is told on both ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.parallel.schedule import results


class Pipe:
    """Stands for the ranks of a group in turn; what is sent is there to be received."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.ranks = 0, size
        self.sent: deque[Tensor] = deque()
        monkeypatch.setattr(results.dist, "send", self._send)
        monkeypatch.setattr(results.dist, "recv", self._receive)

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.at

    def _send(self, tensor: Tensor, group: Any, group_dst: int) -> None:
        assert (self.at, group_dst) == (0, self.ranks - 1)
        self.sent.append(tensor)

    def _receive(self, tensor: Tensor, group: Any, group_src: int) -> None:
        assert (self.at, group_src) == (self.ranks - 1, 0)
        sent = self.sent.popleft()
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(sent)


def moved(data: list[Any], pipe: Pipe) -> tuple[list[Any], Tensor]:
    """On the last rank, and its tokens."""
    counts = [torch.tensor(7 * (rank == 0), dtype=torch.int32) for rank in range(pipe.ranks)]
    found = []
    for rank, count in enumerate(counts):
        pipe.at = rank
        found.append(results.to_last_rank(data if rank == 0 else [], count, pipe))  # type: ignore[arg-type]
    assert found[:-1] == [[]] * (pipe.ranks - 1)
    assert not pipe.sent
    return found[-1], counts[-1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_arrives_as_it_was(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.tensor([3.25, 7.0], requires_grad=True)
    values = [
        torch.tensor(True),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.empty(0, 4),
        torch.tensor(1 + 2j, dtype=torch.complex128),
    ]
    data = [
        {"lm loss": loss, 3: (1, 2.5, None)},
        [*values, "words", float("inf"), True],
        torch.tensor(-(2**62)),
        0.1,
    ]
    found, tokens = moved(data, Pipe(ranks, monkeypatch))
    assert int(tokens) == 7
    assert torch.equal(found[0]["lm loss"], loss)
    assert found[0][3] == (1, 2.5, None)
    for value, there in zip(values, found[1], strict=False):
        assert (value.dtype, value.shape) == (there.dtype, there.shape)
        assert torch.equal(value, there)
    assert found[1][4:] == ["words", float("inf"), True]
    assert int(found[2]) == -(2**62)
    assert found[3] == 0.1
    if ranks > 1:
        assert not found[0]["lm loss"].requires_grad


def test_nothing_but_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tokens = moved([], Pipe(2, monkeypatch))
    assert found == []
    assert int(tokens) == 7


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), {(1, 2): 3}, torch.eye(2).to_sparse()],
    ids=lambda v: type(v).__name__,
)
def test_both_ranks_say_what_cannot_be_moved(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe(2, monkeypatch)
    for rank in (0, 1):
        pipe.at = rank
        data = [{"lm loss": 1.0}, {"more": [value]}] if rank == 0 else []
        with pytest.raises(TypeError, match=r"data\[1\]\['more'\]\[0\]: \w+ cannot be moved"):
            results.to_last_rank(data, torch.tensor(0), pipe)  # type: ignore[arg-type]
