"""A mixture of experts over an expert-parallel group, its rows under way while others are computed.

    forward    rows go to their experts' ranks     beside it: what the caller has, the last slice's own rows
               results come home, slice by slice   the slices after it
    backward   gradients of results go out         what the caller has, the last slice's own rows
               gradients of rows come home         the slices after it, the gradients of the other weights

Slices        of a rank's experts: each is computed with all its rows, those that came and the own, but for
              the last, whose own rows are what there is to do before anything has come. In the backward the
              weight gradients of the first are what there is to do before the second has come.

Letters     P  rows of this rank, one for each choice of each token, those of expert 0 first;   H  hidden
Copies      of an expert on a rank that does not own it (`plan.Copy`): the weights come there instead of that
            rank's rows going to the owner, and their gradients go back and are added there. The routing is
            the same, so the results are. They travel beside the layer's own products, or as a `Loan` that
            was made earlier, beside the attention before the layer.
Bits        rows have those of the products of their piece. A weight's gradient is one product over all rows
            on its owner in the order of their ranks, as it is without overlap; those of rows that copies took
            are added to it, in the order of ranks.
Parts       of a backward pass that is split (`accel.parallel.split_backward`): the weights' gradients come in
            its weights' part, in which no rank waits for another; those of copies travel in its input part.
Streams     of a device, may be two (`streams`): the pieces, what is beside and the weights' gradients take
            turns in them, but not in a weights' part. Messages set out in the order of pieces all the same.
Memory      a buffer of its own for each piece, which autograd keeps; copies, until the backward has used
            them. The rows that were given are not kept, nor are the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from accel.device.streams import one_queue
from accel.ops import grouped_gemm
from accel.ops.grouped_gemm import accumulate_wgrad
from accel.parallel import split_backward
from accel.parallel.collectives import Messages, Outbox
from accel.parallel.experts.journey import Journey
from accel.parallel.experts.plan import Copy
from accel.parallel.experts.streams import OneStream, Streams
from accel.parallel.experts.traffic import Piece, Traffic
from accel.parallel.linear import main_grad_of, weight_gradient_added
from accel.parallel.split_backward import WeightPart

__all__ = ["Experts", "Loan", "routed_experts"]

Product = Callable[[Tensor], Tensor]
"""Rows times the matrices of their experts."""
Pair = tuple[list[Tensor], list[Tensor]]
"""Something of the first layer, something of the second."""


@dataclass(frozen=True)
class Experts:
    """The experts of this rank.

    Args:
        mlp: `(x [T, H], probs [T], counts [n], first, second) -> [T, H]`, of the rows of n experts; `first`
            and `second` are the products with their first and second matrices.
        weights: of the first and of the second layer, a matrix `[N, K]` for each expert.
        into_main_grad: whether their gradients are added to `weight.main_grad`.
    """

    mlp: Callable[[Tensor, Tensor, Tensor, Product, Product], Tensor]
    weights: Pair
    into_main_grad: bool = False


class Loan:
    """Matrices of experts on their way to the ranks that have copies of them.

    Args:
        copies: of all ranks, the same on each.
        owner: the rank of an expert.
        local: which of `experts`' matrices an expert's is, on its owner.
        outbox: of `group`, which they leave from; None: they leave at once.
    """

    def __init__(
        self,
        copies: Iterable[Copy],
        group: dist.ProcessGroup,
        experts: Experts,
        owner: Callable[[int], int],
        local: Callable[[int], int],
        outbox: Outbox | None = None,
    ) -> None:
        self.copies = frozenset(copies)
        rank, layers = group.rank(), experts.weights
        in_order = sorted(self.copies)
        lent = [c for c in in_order if owner(c.expert) == rank]
        self._came: dict[int, Pair] = {
            c.expert: ([torch.empty_like(layers[0][0])], [torch.empty_like(layers[1][0])])
            for c in in_order
            if c.rank == rank
        }
        sends = [(of[local(c.expert)].detach(), c.rank) for c in lent for of in layers]
        receives = [(w[0], owner(e)) for e, pair in self._came.items() for w in pair]
        outbox = outbox or Outbox(group, together=False)
        self._messages = outbox.add(sends, receives)

    def received(self, expert: int) -> Pair:
        """The matrices of an expert of which this rank has a copy."""
        self._messages.wait_received()
        return self._came[expert]

    def wait(self) -> None:
        """Until all came, and nothing that was lent is read any more."""
        self._messages.wait_received()
        self._messages.wait_sent()


def routed_experts(
    x: Tensor,
    probs: Tensor,
    traffic: Traffic,
    group: dist.ProcessGroup,
    experts: Experts,
    beside: Callable[[Tensor], Tensor] | None = None,
    beside_input: Tensor | None = None,
    loan: Loan | None = None,
    streams: Streams | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Send rows to their experts, compute them, and bring the results home.

    Args:
        x: `[P, H]`, this rank's rows, expert after expert as `traffic` counts them.
        probs: `[P]`, what the experts' MLP multiplies each row by.
        group: the expert-parallel group, a rank for each row of the counts.
        experts: those of this rank.
        beside: done while rows are under way, on `beside_input`: the shared experts. So is its backward,
            in which its parameters get their gradients.
        loan: of the copies of `traffic`, if it was made before.
        streams: where pieces are computed; None: one after the other.

    Returns:
        `[P, H]`, each row's result in its place, and what `beside` gave.

    Raises:
        ValueError: counts that do not fit the group, x or probs; a loan of other copies.
    """
    rows = sum(traffic.mine)
    if len(traffic.counts) != group.size() or traffic.rank != group.rank():
        raise ValueError(
            f"routed_experts: counts of {len(traffic.counts)} ranks as rank {traffic.rank} sees them, in a "
            f"group of {group.size()} on rank {group.rank()}"
        )
    if x.ndim != 2 or x.shape[0] != rows or probs.shape != (rows,):
        raise ValueError(
            f"routed_experts: x must be [{rows}, H] and probs [{rows}] by the counts of rank {traffic.rank}, "
            f"got {list(x.shape)} and {list(probs.shape)}"
        )
    if loan is not None and loan.copies != traffic.copies:
        raise ValueError(
            f"routed_experts: a loan of {sorted(loan.copies)} for copies {sorted(traffic.copies)}"
        )
    streams = streams or OneStream()
    run = _Run(traffic, group, experts, beside, loan, streams, keep=torch.is_grad_enabled())
    return _Routed.apply(x, probs, beside_input, run, *experts.weights[0], *experts.weights[1])


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, beside_input: Tensor | None, run: _Run, *weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.run = run
        return run.forward(x, probs, beside_input)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError("routed_experts: a second backward pass through the same graph")
        dx, dprobs, beside_dx, dws = run.backward(grads[0].contiguous(), grads[1])
        return dx, dprobs, beside_dx, None, *dws


class _Product(torch.autograd.Function):
    """Rows times the matrices of their experts; what the matrices' gradients are made of is left."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Tensor, weights: list[Tensor], left: list[Tensor]
    ) -> Tensor:
        ctx.weights, ctx.left = weights, left
        ctx.save_for_backward(x, counts)
        return grouped_gemm(x, weights, counts, transpose_b=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, counts = ctx.saved_tensors
        ctx.left += [grads[0], x]
        return grouped_gemm(grads[0], ctx.weights, counts), None, None, None


class _Begin(torch.autograd.Function):
    """Where a graph begins. A graph keeps its leaves; of this it has what its operations save, and hooks on
    saved tensors may let go of that, to compute it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, differentiable: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _begun(x: Tensor) -> Tensor:
    """`x` as the beginning of a graph, where gradients are enabled."""
    if not torch.is_grad_enabled():
        return x
    return _Begin.apply(x.new_empty(0).requires_grad_(), x.detach())


class _Computed:
    """A piece, and the graph that its backward goes through."""

    def __init__(self, piece: Piece, weights: Pair) -> None:
        self.piece, self.weights, self.counts = piece, weights, piece.counts()
        self.left: Pair = ([], [])
        """Of each layer: dy and x."""

    def forward(self, x: Tensor, probs: Tensor, mlp: Callable[..., Tensor], keep: bool) -> Tensor:
        if not self.piece.blocks:
            return x
        first, second = map(self._product, self.weights, self.left)
        with torch.set_grad_enabled(keep):
            x, probs = _begun(x), _begun(probs)
            y = mlp(x, probs, self.counts, first, second)
        if keep:
            self.begins = get_gradient_edge(x), get_gradient_edge(probs)
            self.end = get_gradient_edge(y)
        return y.detach().contiguous()

    def _product(self, weights: list[Tensor], left: list[Tensor]) -> Product:
        return lambda x: _Product.apply(x, self.counts, weights, left)

    def backward(self, dy: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of rows and of probs, which are of the dtype of `like`."""
        if not self.piece.blocks:
            return dy, like.new_empty(0)
        dx, dprobs = torch.autograd.grad(self.end, self.begins, dy)
        del self.end, self.begins
        return dx.contiguous(), dprobs


class _Run:
    """One forward of one layer, and its backward.

    Args:
        keep: whether there may be a backward.
    """

    def __init__(
        self,
        traffic: Traffic,
        group: dist.ProcessGroup,
        experts: Experts,
        beside: Callable[[Tensor], Tensor] | None,
        loan: Loan | None,
        streams: Streams,
        keep: bool,
    ) -> None:
        self.traffic, self.group, self.experts = traffic, group, experts
        self.beside, self.loan, self.streams, self.keep = beside, loan, streams, keep

    def forward(
        self, x: Tensor, probs: Tensor, beside_input: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x, probs = x.detach().contiguous(), probs.detach().contiguous()
        y, self.like_probs = torch.empty_like(x), probs.new_empty(0)
        outbox = self._outbox(x.device)
        journey = Journey(self.traffic, outbox, x, y, probs)
        loan, self.loan = self.loan or self._lend(outbox), None
        journey.ask()
        apart = self.traffic.apart()
        with self.streams.fork():
            beside_y = self._beside_forward(beside_input)
            with self.streams.turn(1):
                self.apart = self._compute(apart, self._owned(apart), x, probs, y)
        scalars = journey.arrived_scalars()
        self.slices = []
        with self.streams.fork():
            for index, piece in enumerate(journey.pieces):
                with self.streams.turn(index):
                    rows, computed = journey.arrived(index), _Computed(piece, self._owned(piece))
                    self.streams.share((rows, scalars[index]))
                    self.slices.append(computed)
                    results = computed.forward(rows, scalars[index], self.experts.mlp, self.keep)
                    journey.send_home(index, results)
            outbox.post()
            self.guests = [
                self._compute(guest, loan.received(guest.experts[0]), x, probs, y)
                for guest in self.traffic.guests()
            ]
        journey.wait()
        loan.wait()
        return y, beside_y

    def backward(
        self, dy: Tensor, beside_dy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor | None]]:
        dx = torch.empty_like(dy)
        dprobs = self.like_probs.new_empty(dy.shape[0])
        outbox = self._outbox(dy.device)
        journey = Journey(self.traffic, outbox, dy, dx)
        journey.ask()
        scalars: list[Tensor] = []
        sums: Pair = ([], [])
        part = self._later()
        early = min(1, len(self.slices) - 1)  # one, while the second comes
        if part is not None:
            early = 0
        with self.streams.fork():
            beside_dx = self._beside_backward(beside_dy)
            with self.streams.turn(1):
                self._differentiate(self.apart, dy, dx, dprobs)
            for guest in self.guests:
                self._differentiate(guest, dy, dx, dprobs)
            for index, computed in enumerate(self.slices):
                with self.streams.turn(index):
                    rows, of_probs = computed.backward(journey.arrived(index), self.like_probs)
                    journey.send_home(index, rows)
                    scalars.append(of_probs)
                    if index < early:
                        self._add_sums_of(index, sums)
        self.streams.share(scalars)
        home = journey.send_scalars_home(scalars, dprobs)
        outbox.post()
        returned, gradients = self._give_back(outbox)
        outbox.post()
        self.guests = []  # with their matrices, which the weights' part would keep
        if part is None:
            with self.streams.fork():
                for index in range(early, len(self.slices)):
                    with self.streams.turn(index):
                        self._add_sums_of(index, sums)
        returned.wait_received()
        dws = (
            self._weight_gradients(sums, gradients)
            if part is None
            else self._put_off(part, gradients)
        )
        home()
        journey.wait()
        returned.wait_sent()
        return dx, dprobs, beside_dx, dws

    def _beside_forward(self, x: Tensor | None) -> Tensor | None:
        if self.beside is None or x is None:
            return None
        self.beside_dx: list[Tensor] = []
        with torch.set_grad_enabled(self.keep):
            x = _begun(x)
            if self.keep:
                x.register_hook(self.beside_dx.append)
            y = self.beside(x)
        if self.keep:
            self.beside_end = get_gradient_edge(y)
        return y.detach()

    def _beside_backward(self, dy: Tensor | None) -> Tensor | None:
        if self.beside is None or dy is None:
            return None
        torch.autograd.backward([self.beside_end], [dy])
        dx = self.beside_dx.pop() if self.beside_dx else None
        del self.beside_end
        return dx

    def _rows(self, piece: Piece) -> slice:
        if not piece.blocks:
            return slice(0)
        first, last = piece.blocks[0], piece.blocks[-1]
        return slice(self.traffic.rows(first.expert).start, self.traffic.rows(last.expert).stop)

    def _compute(
        self, piece: Piece, weights: Pair, x: Tensor, probs: Tensor, y: Tensor
    ) -> _Computed:
        """Rows of this rank, which lie together."""
        rows = self._rows(piece)
        x, probs = x[rows], probs[rows]
        if self.keep:  # them, and not all rows
            x, probs = x.clone(), probs.clone()
        computed = _Computed(piece, weights)
        y[rows] = computed.forward(x, probs, self.experts.mlp, self.keep)
        return computed

    def _differentiate(self, here: _Computed, dy: Tensor, dx: Tensor, dprobs: Tensor) -> None:
        rows = self._rows(here.piece)
        dx[rows], dprobs[rows] = here.backward(dy[rows], self.like_probs)

    def _owned(self, piece: Piece) -> Pair:
        # the parameters themselves: FSDP may give them other memory in the backward pass
        first, second = (
            [weights[self._local(e)] for e in piece.experts] for weights in self.experts.weights
        )
        return first, second

    def _local(self, expert: int) -> int:
        return expert - self.traffic.owned(self.traffic.rank).start

    def _outbox(self, device: torch.device) -> Outbox:
        """Pieces of another stream than the current one could not wait in it."""
        in_order = isinstance(self.streams, OneStream)
        return Outbox(self.group, together=in_order and one_queue(device))

    def _lend(self, outbox: Outbox) -> Loan:
        traffic = self.traffic
        copies = traffic.copies
        return Loan(copies, self.group, self.experts, traffic.owner, self._local, outbox)

    def _give_back(self, outbox: Outbox) -> tuple[Messages, list[Tensor]]:
        """Send the gradients of the guests' matrices; what is under way, and those of the copies that were
        lent, of each copy the first layer's and the second's."""
        sends = []
        for guest in self.guests:
            owner = self.traffic.owner(guest.piece.experts[0])
            sends += [(self._of_a_guest(dy, x, guest.counts), owner) for dy, x in guest.left]
        layers = [self._gradient(layer) for layer in range(2)]
        lent = [(torch.empty_like(g), c.rank) for c in self.traffic.lent() for g in layers]
        return outbox.add(sends, lent), [gradient for gradient, _ in lent]

    def _of_a_guest(self, dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        """The gradient of a matrix, in the dtype that its owner adds it in."""
        dtype = self._gradient(0).dtype
        if dtype == dy.dtype:
            return torch.ops.accel.grouped_gemm_wgrad(dy, x, counts, True)[0]
        dw = dy.new_zeros(dy.shape[1], x.shape[1], dtype=dtype)
        accumulate_wgrad(dy, x, counts, [dw], transpose_b=True)
        return dw

    def _gradient(self, layer: int) -> Tensor:
        """What a gradient of the layer's matrices is added to, or one like it."""
        weight = self.experts.weights[layer][0]
        return main_grad_of(weight) if self.experts.into_main_grad else weight.detach()

    def _later(self) -> WeightPart | None:
        """Where the weights' gradients are left, if this is the input part of a backward pass."""
        first, second = self.experts.weights
        return split_backward.current() if all(w.is_leaf for w in (*first, *second)) else None

    def _put_off(self, part: WeightPart, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        @torch.no_grad()
        def left() -> list[Tensor | None]:
            sums: Pair = ([], [])
            for index in range(len(self.slices)):
                self._add_sums_of(index, sums)
            return self._weight_gradients(sums, gradients)

        weights = [*self.experts.weights[0], *self.experts.weights[1]]
        part.put_all(weights, left)
        return [None] * len(weights)

    def _weight_gradients(self, found: Pair, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the first layer's matrices, then of the second's; `found`, and what others' copies give."""
        lent = iter(gradients)
        for copy in self.traffic.lent():
            for sums in found:
                sums[self._local(copy.expert)].add_(next(lent))
        if not self.experts.into_main_grad:
            return [*found[0], *found[1]]
        return [weight_gradient_added(w) for weights in self.experts.weights for w in weights]

    def _add_sums_of(self, index: int, found: Pair) -> None:
        """The gradients of the matrices of a slice, whose rows have been through the backward."""
        computed = self.slices[index]
        parts = [computed] if index < self.traffic.slices - 1 else [self.apart, computed]
        if experts := self.traffic.slice_of(self.traffic.rank, index):
            for part in parts:
                self.streams.share((*part.left[0], *part.left[1]))
            for sums, of_layer in zip(found, self._sums(experts, parts), strict=True):
                sums += of_layer
                self.streams.share(of_layer)

    def _sums(self, experts: range, parts: Sequence[_Computed]) -> Pair:
        """Of some experts' matrices, over all rows for them, which are in `parts`; or the main gradients that
        they were added to."""
        parts = [computed for computed in parts if computed.piece.blocks]
        rows_of = dict.fromkeys(experts, 0)
        for computed in parts:
            for block in computed.piece.blocks:
                rows_of[block.expert] += block.rows
        counts = torch.tensor(list(rows_of.values()))
        first, second = (self._sums_of(layer, experts, counts, parts) for layer in range(2))
        return first, second

    def _sums_of(
        self, layer: int, experts: range, counts: Tensor, parts: Sequence[_Computed]
    ) -> list[Tensor]:
        weights = [self.experts.weights[layer][self._local(e)] for e in experts]
        dy, x = self._together(layer, parts) or [
            weights[0].new_empty(0, size) for size in weights[0].shape
        ]
        if self.experts.into_main_grad:
            main_grads = [main_grad_of(w) for w in weights]
            accumulate_wgrad(dy, x, counts, main_grads, transpose_b=True)
            return main_grads
        return list(torch.ops.accel.grouped_gemm_wgrad(dy, x, counts, True).unbind(0))

    @staticmethod
    def _together(layer: int, parts: Sequence[_Computed]) -> list[Tensor]:
        """dy and x of all rows of the parts, expert after expert; nothing of no parts."""
        if len(parts) < 2:
            return [tensor for computed in parts for tensor in computed.left[layer]]
        places = sorted(
            (block, at, rows)
            for at, computed in enumerate(parts)
            for block, rows in computed.piece.places
        )
        return [
            torch.cat([parts[at].left[layer][which][rows] for _, at, rows in places])
            for which in range(2)
        ]
