"""One rank of `bench tp_overlap`."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.parallel import linear_overlap
from accel.parallel.collectives import gather_rows, reduce_scatter_rows
from accel.parallel.linear import Layout, parallel_linear
from accel.parallel.linear_overlap import Overlap
from accel.parallel.overlapped_linear import FORMS
from benchmarks import _ranks
from benchmarks._ranks import Call, Scheduled, group, in_turn, run, timed
from benchmarks._step_collectives import asked_by, at_once, collectives_as, here
from benchmarks._tp_overlap_trace import recorded
from benchmarks.tp_overlap import (
    ALONE,
    AUTO,
    COLLECTIVES,
    COMPUTATION,
    IN_PIECES,
    NUMBERS,
    PRODUCTS,
    RANKS,
    SERIAL,
    STOCK,
)

Layer = Callable[[Overlap | None], Call]
"""A pass of a layer, overlapping so or not at all."""


SHAPE, SMALL_SHAPE = (512, 2048, 4096), (512, 1024, 4096)
"""Rows, K and N of `Layers`: of Megatron's 1.3 B (hidden 2048, ffn 8192) with TP 2 and a sequence of 1024,
and of half as many products."""


class Layers:
    """A column-parallel layer [K, N], and a row-parallel one [N, K] that could follow it.

    Of both T rows of K numbers travel from each rank, and R T rows are multiplied.
    """

    def __init__(self, quick: bool, shape: tuple[int, int, int] = SHAPE) -> None:
        self.rows, self.k, self.n = (64, 128, 256) if quick else shape
        draw = torch.Generator().manual_seed(dist.get_rank())
        whole = RANKS * self.rows
        self.x = torch.randn(self.rows, self.k, generator=draw)
        self.x_whole = torch.randn(whole, self.k, generator=draw)
        self.wide = torch.randn(whole, self.n, generator=draw)
        self.column = torch.randn(self.n, self.k, generator=draw)
        self.row = torch.randn(self.k, self.n, generator=draw)

    def __str__(self) -> str:
        return f"{RANKS} x {self.rows} rows, {self.k} to {self.n} and back, fp32"

    @property
    def num_bytes(self) -> int:
        """That a rank sends in one gather or reduction."""
        return (RANKS - 1) * self.rows * self.k * self.x.element_size()

    def directions(self) -> dict[str, tuple[Call, Call, Call, Layer]]:
        """Direction -> products, collectives, one after the other, and the layer's own pass."""
        x, x_whole, wide, column, row = self.x, self.x_whole, self.wide, self.column, self.row

        def column_back() -> None:
            whole, _ = gather_rows(x, group())
            reduce_scatter_rows(wide @ column, group())
            wide.t() @ whole

        def row_back() -> None:
            whole, _ = gather_rows(x, group())
            (whole @ row, whole.t() @ wide)

        return {
            "column, forward": (
                lambda: x_whole @ column.t(),
                lambda: gather_rows(x, group()),
                lambda: gather_rows(x, group())[0] @ column.t(),
                _forward("column", x, column),
            ),
            "row, forward": (
                lambda: wide @ row.t(),
                lambda: reduce_scatter_rows(x_whole, group()),
                lambda: reduce_scatter_rows(wide @ row.t(), group()),
                _forward("row", wide, row),
            ),
            "row, backward": (
                lambda: (x_whole @ row, x_whole.t() @ wide),
                lambda: gather_rows(x, group()),
                row_back,
                _backward("row", wide, row, x),
            ),
            "column, backward": (
                lambda: (wide @ column, wide.t() @ x_whole),
                lambda: (gather_rows(x, group()), reduce_scatter_rows(x_whole, group())),
                column_back,
                _backward("column", x, column, wide),
            ),
        }


def _forward(mode: Any, x: Tensor, weight: Tensor) -> Layer:
    layout = Layout(mode, group(), sequence_parallel=True)

    def made(chosen: Overlap | None) -> Call:
        return asking(chosen, torch.no_grad()(partial(parallel_linear, x, weight, None, layout)))

    return made


def _backward(mode: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Layer:
    layout = Layout(mode, group(), sequence_parallel=True)

    def made(chosen: Overlap | None) -> Call:
        leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        forward = None if chosen is None else Overlap(1)  # what is chosen is the backward's
        y = asking(forward, partial(parallel_linear, *leaves, None, layout))()
        return asking(chosen, partial(torch.autograd.grad, y, leaves, dy, retain_graph=True))

    return made


def asking(chosen: Overlap | None, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, in which layers ask `chosen`."""

    def asked() -> Any:
        off = (lambda: None) if chosen is None else linear_overlap.switch_on(chosen)
        try:
            return call()
        finally:
            off()

    return asked


def products(quick: bool, shape: tuple[int, int, int] = SHAPE) -> dict[str, Any]:
    """Of a forward, while the other ranks compute as well."""
    layers = Layers(quick, shape)
    call = Scheduled(lambda: layers.x_whole @ layers.column.t())
    found = in_turn({PRODUCTS: call}, 5)
    return {"num_bytes": layers.num_bytes, "seconds": statistics.median(found[PRODUCTS])}


def layers(quick: bool, rounds: int = 3, shape: tuple[int, int, int] = SHAPE) -> dict[str, Any]:
    """Every side with host_batch_scheduling, so that what differs is what hides."""
    made = Layers(quick, shape)
    rounds = 2 if quick else rounds
    directions, chose = {}, {}
    for direction, (product, collective, serial, layer) in made.directions().items():
        auto = Overlap()
        sides = {PRODUCTS: product, COLLECTIVES: collective, SERIAL: serial, STOCK: layer(None)}
        sides[AUTO] = layer(auto)
        numbers = NUMBERS[1:2] if quick else NUMBERS
        for form, number in [*itertools.product(FORMS[:1], numbers), (FORMS[1], NUMBERS[1])]:
            sides[f"accel, {form} of {number}"] = layer(Overlap(number, form))
        if direction == "row, backward":
            sides[IN_PIECES] = layer(Overlap(sums_in_pieces=True))
        scheduled = {side: Scheduled(call) for side, call in sides.items()}
        directions[direction] = in_turn(scheduled, rounds)
        chose[direction] = told(auto)
    return {"directions": directions, "auto": chose, "rounds": rounds, "shape": str(made)}


def trace(quick: bool) -> dict[str, Any]:
    """Events of every rank: a column and a row layer, forward and backward, Megatron's way and ours; the step
    that took the median time."""
    made = Layers(quick)
    leaves = [t.clone().requires_grad_() for t in (made.x, made.column, made.row)]
    layouts = [Layout(mode, group(), sequence_parallel=True) for mode in ("column", "row")]

    def step() -> None:
        x, column, row = leaves
        y = parallel_linear(x, column, None, layouts[0])
        torch.autograd.backward([parallel_linear(y, row, None, layouts[1])], [made.x])

    ours = f"accel, ring of {NUMBERS[1]}"
    sides = {}
    for side, chosen in {STOCK: None, ours: Overlap(NUMBERS[1])}.items():
        call = asking(chosen, step)
        call()
        found = []
        for _ in range(1 if quick else 7):
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, recorded(call))
            found.append(every)
        found.sort(key=lambda ranks: max(end for events in ranks for _, _, end in events))
        sides[side] = found[len(found) // 2]
    return {"sides": sides, "shape": str(made)}


def told(auto: Overlap) -> str:
    """The plans that it found, in the order in which they were asked for."""
    plans = [
        "the plain way" if plan is None else f"{plan.form} of {plan.chunks}"
        for plan in auto.chosen.values()
    ]
    return ", ".join(dict.fromkeys(plans)) or "nothing, as nothing asked"


class Gpt:
    """Megatron's own, TP with sequence parallelism."""

    def __init__(self, quick: bool) -> None:
        self.layers, self.hidden, self.length = (2, 64, 32) if quick else (2, 1536, 256)

    @property
    def num_bytes(self) -> int:
        """That a rank sends in the four collectives of each layer's forward."""
        return self.layers * 4 * (self.length // RANKS) * self.hidden * 4

    def products(self) -> list[tuple[Tensor, Tensor]]:
        """Operands of a layer's four products."""
        hidden, draw = self.hidden, torch.Generator().manual_seed(0)
        shapes = [
            (hidden, 3 * hidden // RANKS),
            (hidden // RANKS, hidden),
            (hidden, 4 * hidden // RANKS),
            (4 * hidden // RANKS, hidden),
        ]
        return [
            (torch.randn(self.length, k, generator=draw), torch.randn(n, k, generator=draw).t())
            for k, n in shapes
        ]

    def model(self) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        config = TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.hidden // 16 if self.hidden < 512 else self.hidden // 128,
            tensor_model_parallel_size=RANKS,
            sequence_parallel=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
        )
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=512,
            max_sequence_length=self.length,
            share_embeddings_and_output_weights=False,
        )


def gpt_products(quick: bool) -> dict[str, Any]:
    shape = Gpt(quick)
    operands = shape.products()
    found = in_turn({PRODUCTS: lambda: [x @ w for x, w in operands]}, 5)
    seconds = shape.layers * statistics.median(found[PRODUCTS])
    return {"num_bytes": shape.num_bytes, "seconds": seconds}


def gpt(quick: bool, every: bool = False, pairs: int = 15) -> dict[str, Any]:
    """Megatron's step and `auto`'s in `pairs` rounds, all others in the first ones of these.

    Args:
        every: number of pieces too.
    """
    shape = Gpt(quick)
    pairs, rounds = (2, 2) if quick else (pairs, 5 if every else 3)
    model = shape.model()
    tokens = torch.randint(512, (1, shape.length + 1), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(shape.length)[None]
    mask = torch.ones(1, 1, shape.length, shape.length, dtype=torch.bool).triu(1)
    weights = list(model.parameters())

    def forward_backward() -> None:
        model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean().backward()

    def step(side: str) -> float:
        for weight in weights:
            weight.grad = None
        call: Call = forward_backward
        with contextlib.ExitStack() as stack:
            stack.enter_context(enabled(sides[side], measured.get(side)))
            if side == COLLECTIVES:
                call = collectives
            elif side in ways:
                call = stack.enter_context(collectives_as(ways[side]))(call)
            return timed(call if side in (STOCK, ALONE) else Scheduled(call))

    sides: dict[str, dict[str, Any]] = {
        STOCK: {},
        AUTO: {"tp_overlap": True},
        ALONE: {"tp_overlap": True},
    }
    measured = {AUTO: Overlap(), ALONE: Overlap()}  # kept from step to step, as a training keeps it
    paired = list(sides)
    for number in (NUMBERS[1:2] if quick else NUMBERS) if every else ():
        sides[f"accel, ring of {number}"] = {"tp_overlap": True, "tp_overlap_chunks": number}
    ours = [side for side in sides if side != STOCK]
    ways = {COMPUTATION: here, SERIAL: at_once}
    with enabled({}, None):
        collectives = asked_by(forward_backward)
    sides |= {side: {} for side in (COMPUTATION, COLLECTIVES, SERIAL)}
    gradients: dict[str, list[Any]] = {}
    seconds: dict[str, list[float]] = {}
    for side in sides:
        step(side)
        gradients[side] = [weight.grad for weight in weights] if side in (STOCK, *ours) else []
        seconds[side] = []
    for turn in range(pairs):
        for side in sides if turn < rounds else paired:
            seconds[side].append(step(side))
    differ = torch.tensor(
        [
            sum(int((a != b).sum()) for a, b in zip(gradients[side], gradients[STOCK], strict=True))
            for side in ours
        ]
        + [sum(weight.numel() for weight in weights)]
    )
    dist.all_reduce(differ)
    return {
        "shape": f"GPT of {shape.layers} layers of {shape.hidden}, sequence {shape.length}, fp32",
        "seconds": seconds,
        "rounds": rounds,
        "pairs": pairs,
        "differ": dict(zip(ours, differ.tolist(), strict=False)),
        "elements": int(differ[-1]),
        "auto": told(measured[AUTO]),
    }


@contextlib.contextmanager
def enabled(options: Mapping[str, Any], measured: Overlap | None) -> Iterator[None]:
    with _ranks.enabled(options):
        if measured is not None:
            linear_overlap.switch_on(measured)
        yield


if __name__ == "__main__":
    WHATS = {
        "products": products,
        "layers": layers,
        "layers-longer": partial(layers, rounds=7),
        "small-products": partial(products, shape=SMALL_SHAPE),
        "small-layers": partial(layers, rounds=7, shape=SMALL_SHAPE),
        "gpt-products": gpt_products,
        "gpt": partial(gpt, every=True),
        "gpt-pairs": gpt,
        "gpt-short": partial(gpt, pairs=3),
        "trace": trace,
    }
    sys.exit(run(WHATS, partial(_ranks.begin_megatron, tensor_model_parallel_size=RANKS)))
