"""Backward passes in two parts: the one for the input now, the one for the weights later.

    input part      a backward pass in which layers put off what gives the gradients of their weights
    weights' part   `WeightPart.compute`: does that, and gives each weight its gradient

    with input_part() as weights:
        loss.backward()         dx, and what nobody puts off: the gradients of norms, biases, embeddings
    ...                         dx is sent, other micro-batches run
    weights.compute()           dW

Kept        by the layer's `work`: what dW is made of, its input and the gradient of its output.
Delivery    by autograd: the weight's AccumulateGrad node runs with all hooks, once for each weight and part.
            In the input part they run too, without a gradient: a hook there must ask `holds`.
Order       dW are computed in the order of the backward. A weight that is used more than once gets their
            sum, added in that order as autograd adds them, and after its last use.
Threads     one backward pass at a time; the thread that autograd runs it in may be any.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.slot import Slot

__all__ = ["WeightPart", "current", "input_part"]

Work = Callable[[], Tensor | None]


class WeightPart:
    """What a backward pass has left for later."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Work]] = deque()
        self._uses: Counter[int] = Counter()
        """Id of a weight -> how many of those that wait are its own."""

    def __len__(self) -> int:
        """How often `put` left something that still waits."""
        return len(self._waiting)

    def holds(self, weight: Tensor) -> bool:
        """Whether some of the weight's gradient is still to come."""
        return self._uses[id(weight)] > 0

    def put(self, weight: Tensor, work: Work) -> None:
        """Leave a gradient for later.

        Args:
            weight: a leaf.
            work: gives the gradient, in a tensor that nobody else holds; or None, where there is none to
                deliver, as it went elsewhere.

        Raises:
            ValueError: the weight is no leaf: what made it waits for its gradient now.
        """
        if not weight.is_leaf:
            raise ValueError(
                f"a gradient of a {list(weight.shape)} tensor was put off that is no leaf: it is computed "
                "from others, whose gradients need it in this backward pass"
            )
        self._waiting.append((weight, work))
        self._uses[id(weight)] += 1

    def put_all(self, weights: Iterable[Tensor], work: Callable[[], list[Tensor | None]]) -> None:
        """Leave the gradients of several weights, which one piece of work gives in the weights' order: the
        first one's turn computes all, each takes its own."""
        gradients = functools.cache(work)
        for weight in weights:
            self.put(weight, lambda: gradients().pop(0))

    def take(self, weight: Tensor) -> None:
        """Put off as well what the input part has already put into `weight.grad`, which is cleared."""
        gradient, weight.grad = weight.grad, None
        if gradient is not None:
            self.put(weight, [gradient].pop)

    def compute(self) -> None:
        """Do the work in the order of `put`; afterwards nothing waits.

        Raises:
            RuntimeError: inside an input part.
        """
        if _CURRENT:
            raise RuntimeError(
                "the weights' part of a backward pass was asked for in an input part"
            )
        sums: dict[int, Tensor] = {}
        while self._waiting:
            weight = self._waiting[0][0]
            self._do_next(sums)
            if id(weight) in sums and not self.holds(weight):
                with torch.enable_grad():
                    _Delivery.apply(weight, sums).backward()

    @torch.no_grad()
    def _do_next(self, sums: dict[int, Tensor]) -> None:
        """In a function of its own: nothing holds what the work is done with, or its result."""
        weight, work = self._waiting.popleft()
        self._uses[id(weight)] -= 1
        if (gradient := work()) is not None:
            found = sums.get(id(weight))
            if found is not None and found.is_sparse:  # add_ takes a sparse one on its right alone
                found, gradient = gradient, found
            sums[id(weight)] = gradient if found is None else found.add_(gradient)


class _Delivery(torch.autograd.Function):
    """A use of a weight whose gradient is known. `torch.autograd.backward([weight], [gradient])` would copy
    it: the node takes only what nobody else holds."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: dict[int, Tensor]) -> Tensor:
        ctx.gradient = lambda: sums.pop(id(weight))
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient(), None


_CURRENT = Slot[WeightPart]()
"""The part that is on, if any; of the process, as autograd has threads of its own."""


@contextlib.contextmanager
def input_part() -> Iterator[WeightPart]:
    """Backward passes inside leave the gradients of weights, where a layer can put them off, in what this
    gives.

    Raises:
        RuntimeError: inside another one.
    """
    if _CURRENT:
        raise RuntimeError("an input part of a backward pass was begun inside another one")
    part = WeightPart()
    off = _CURRENT.set(part)
    try:
        yield part
    finally:
        off()


def current() -> WeightPart | None:
    """Where a layer's backward may leave the gradients of its weights; None: it computes them."""
    return _CURRENT.get()
