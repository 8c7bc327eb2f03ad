"""One rank of `bench moe`."""

from __future__ import annotations

import math
import statistics
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.layers.grouped_linear import grouped_linear
from accel.ops.activation import swiglu
from accel.parallel.collectives import Messages
from accel.parallel.experts.exchange import Experts, Product, routed_experts
from accel.parallel.experts.plan import longest_over_mean, plan_copies, rank_loads
from accel.parallel.experts.traffic import Traffic
from accel.parallel.linear import Layout
from accel.testing.bench import OURS
from benchmarks._ranks import (
    SCHEDULED,
    Call,
    Scheduled,
    begin_megatron,
    enabled,
    group,
    in_turn,
    run,
    timed,
)
from benchmarks.moe import (
    COMPUTE,
    EVEN,
    GROUPED,
    POPULAR,
    RANKS,
    STOCK,
    TRANSFERS,
    WITHOUT,
    Sizes,
    zipf_counts,
)


class Layer:
    """The experts of one layer, the rows of this rank, and what they become."""

    def __init__(self, sizes: Sizes, counts: list[list[int]]) -> None:
        self.sizes, self.counts = sizes, counts
        draw = torch.Generator().manual_seed(dist.get_rank())
        self.rows = sum(counts[dist.get_rank()])
        self.x = torch.randn(self.rows, sizes.hidden, generator=draw)
        self.dy = torch.randn(self.rows, sizes.hidden, generator=draw)
        self.probs = torch.rand(self.rows, generator=draw)
        each = sizes.experts // RANKS
        shapes = ((2 * sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn))
        first, second = (
            [(torch.randn(shape, generator=draw) / 30).requires_grad_() for _ in range(each)]
            for shape in shapes
        )
        self.experts = Experts(_mlp, (first, second))

    @property
    def num_bytes(self) -> int:
        """That the rank which sends most sends in a forward and a backward."""
        each = self.sizes.experts // RANKS
        rows = [
            sum(row) - sum(row[rank * each : (rank + 1) * each])
            for rank, row in enumerate(self.counts)
        ]
        return 4 * 4 * self.sizes.hidden * sum(rows) // RANKS

    def ours(self, slices: int = 5, **copies: Any) -> Call:
        traffic = Traffic(self.counts, dist.get_rank(), slices=slices, **copies)

        def step() -> None:
            x, probs = self.x.detach().requires_grad_(), self.probs.detach().requires_grad_()
            y, _ = routed_experts(x, probs, traffic, group(), self.experts)
            self._differentiate(y, x, probs)

        return Scheduled(step)

    def grouped(self, travel: bool = True) -> Call:
        """One all-to-all, grouped products, another one: Megatron's order of things.

        Args:
            travel: else all rows stay, and as many of others' are there already.
        """
        rank, each = dist.get_rank(), self.sizes.experts // RANKS
        counts = torch.tensor(self.counts)
        here = counts[:, rank * each : (rank + 1) * each]
        sent = counts[rank].view(RANKS, each).sum(1).tolist()
        came = here.sum(1).tolist()
        order = torch.arange(sum(came)).split(here.flatten().tolist())
        by_expert = torch.cat([order[r * each + e] for e in range(each) for r in range(RANKS)])
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(back))
        x_there = torch.randn(sum(came), self.sizes.hidden)
        probs_there, dy_there = torch.rand(sum(came)), torch.randn_like(x_there)
        first, second = self.experts.weights

        def compute(x: Tensor, probs: Tensor) -> Tensor:
            layout, rows = Layout(), here.sum(0)
            return _mlp(
                x,
                probs,
                rows,
                lambda x: grouped_linear(x, first, rows, layout),
                lambda x: grouped_linear(x, second, rows, layout),
            )

        def step() -> None:
            x, probs = self.x.detach().requires_grad_(), self.probs.detach().requires_grad_()
            x_here = _AllToAll.apply(x, sent, came)[by_expert]
            probs_here = _AllToAll.apply(probs, sent, came)[by_expert]
            y = _AllToAll.apply(compute(x_here, probs_here)[back], came, sent)
            self._differentiate(y, x, probs)

        def alone() -> None:
            x, probs = x_there.detach().requires_grad_(), probs_there.detach().requires_grad_()
            self._differentiate(compute(x, probs), x, probs, dy_there)

        return step if travel else alone

    def transfers(self) -> None:
        """Both ways at once, as the link can; gloo's all-to-all sometimes goes one way after the other."""
        rank, each = dist.get_rank(), self.sizes.experts // RANKS
        counts = torch.tensor(self.counts)
        sent = counts[rank].view(RANKS, each).sum(1).tolist()
        came = counts[:, rank * each : (rank + 1) * each].sum(1).tolist()
        other = 1 - rank
        for out, into in ((sent, came), (came, sent)) * 2:
            received = self.x.new_empty(into[other], self.sizes.hidden)
            outgoing = self.x.new_zeros(out[other], self.sizes.hidden)
            messages = Messages([(outgoing, other)], [(received, other)], group())
            messages.wait_received()
            messages.wait_sent()

    def _differentiate(self, y: Tensor, x: Tensor, probs: Tensor, dy: Tensor | None = None) -> None:
        weights = (*self.experts.weights[0], *self.experts.weights[1])
        torch.autograd.grad(y, (x, probs, *weights), self.dy if dy is None else dy)


def _mlp(x: Tensor, probs: Tensor, counts: Tensor, first: Product, second: Product) -> Tensor:
    return second(swiglu(first(x)) * probs[:, None])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], came: list[int]) -> Tensor:
        ctx.sizes = sent, came
        out = x.new_empty(sum(came), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), came, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sent, came = ctx.sizes
        dx = grads[0].new_empty(sum(sent), *grads[0].shape[1:])
        dist.all_to_all_single(dx, grads[0].contiguous(), sent, came)
        return dx, None, None


def even(sizes: Sizes) -> list[list[int]]:
    return [[sizes.rows // sizes.experts] * sizes.experts] * RANKS


def alone(quick: bool) -> dict[str, Any]:
    """Seconds of the experts without transfers, and the bytes of these."""
    layer = Layer(Sizes.of(quick), even(Sizes.of(quick)))
    found = in_turn({COMPUTE: layer.grouped(travel=False)}, 3)
    return {"seconds": statistics.median(found[COMPUTE]), "num_bytes": layer.num_bytes}


def sent(quick: bool) -> dict[str, Any]:
    layer = Layer(Sizes.of(quick), even(Sizes.of(quick)))
    return {
        "seconds": statistics.median(in_turn({TRANSFERS: Scheduled(layer.transfers)}, 3)[TRANSFERS])
    }


def exchange(quick: bool) -> dict[str, Any]:
    sizes = Sizes.of(quick)
    layer = Layer(sizes, even(sizes))
    sides = {
        COMPUTE: layer.grouped(travel=False),
        OURS: layer.ours(),
        "accel, 1 slice": layer.ours(1),
        "accel, 2 slices": layer.ours(2),
        "accel, 8 slices": layer.ours(8),
        GROUPED: layer.grouped(),
        TRANSFERS: Scheduled(layer.transfers),
    }
    rounds = 2 if quick else 5
    return {"seconds": in_turn(sides, rounds), "rounds": rounds, "shape": str(sizes)}


def hot(quick: bool) -> dict[str, Any]:
    """Experts whose popularity falls with their number: most rows are for the first rank's."""
    sizes = Sizes.of(quick)
    counts = zipf_counts(RANKS, sizes.experts, sizes.rows, seed=0)
    owners = [e * RANKS // sizes.experts for e in range(sizes.experts)]
    copies = plan_copies(counts, owners, 4, 0)
    layer = Layer(sizes, counts)
    sides = {
        OURS: layer.ours(copies=frozenset(copies)),
        WITHOUT: layer.ours(),
        GROUPED: layer.grouped(),
        EVEN: Layer(sizes, even(sizes)).ours(),
    }
    rounds = 2 if quick else 5
    loads = {
        OURS: longest_over_mean(rank_loads(counts, owners, copies)),
        WITHOUT: longest_over_mean(rank_loads(counts, owners)),
    }
    return {
        "seconds": in_turn(sides, rounds),
        "rounds": rounds,
        "shape": str(sizes),
        "loads": loads,
        "copies": len(copies),
    }


class Gpt:
    """Megatron's own, EP in place of DP, its local spec."""

    def __init__(self, quick: bool, skewed: bool) -> None:
        self.sizes, self.skewed = Sizes.of(quick), skewed
        self.layers, self.length = (1, 32) if quick else (2, self.sizes.rows // 2)
        self.even = torch.zeros(self.sizes.experts)
        self.zipf = -1.2 * torch.arange(1, self.sizes.experts + 1).log()
        self.popularity = self.zipf

    def model(self) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        config = TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.sizes.hidden,
            num_attention_heads=max(1, self.sizes.hidden // 64),
            num_moe_experts=self.sizes.experts,
            moe_ffn_hidden_size=self.sizes.ffn,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            expert_model_parallel_size=RANKS,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
        )
        spec = get_gpt_layer_local_spec(num_experts=self.sizes.experts, moe_grouped_gemm=False)
        model = GPTModel(
            config,
            spec,
            vocab_size=512,
            max_sequence_length=self.length,
            share_embeddings_and_output_weights=False,
        )
        if self.skewed:
            for layer in model.decoder.layers:
                layer.mlp.router.gating = self._biased(layer.mlp.router.gating)
        return model

    def _biased(self, stock: Any) -> Any:
        """Logits that differ from token to token as much as Zipf's law needs, and by popularity."""

        def gating(x: Tensor) -> Tensor:
            logits = stock(x)
            noise = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True)
            return 1.28 * noise + self.popularity  # 1.28: as a Gumbel variable's

        return gating


def gpt(quick: bool, skewed: bool = False) -> dict[str, Any]:
    shape, rounds = Gpt(quick, skewed), 2 if quick else 5
    model = shape.model()
    draw = torch.Generator().manual_seed(3 + dist.get_rank())
    tokens = torch.randint(512, (1, shape.length + 1), generator=draw)
    positions = torch.arange(shape.length)[None]
    mask = torch.ones(1, 1, shape.length, shape.length, dtype=torch.bool).triu(1)
    weights = list(model.parameters())

    def step(side: str) -> float:
        options = sides[side]
        shape.popularity = shape.even if side == POPULAR else shape.zipf
        for weight in weights:
            weight.grad = None
        with enabled(options):
            return timed(
                lambda: (
                    model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean().backward()
                )
            )

    overlapped: dict[str, Any] = {"moe_overlap": True, **SCHEDULED}
    sides = {STOCK: {}, GROUPED: {"grouped_gemm": True}, OURS: overlapped}
    if skewed:
        # the ranks' hosts stand for machines, which share no memory
        overlapped |= {"preset": "fast", "host_shared_memory_collectives": False}
        copied = {**overlapped, "hot_experts": 4, "hot_experts_price": 0}
        sides = {STOCK: {}, WITHOUT: overlapped, OURS: copied, POPULAR: overlapped}
    gradients, seconds, loads = {}, {}, {}
    for side in sides:
        step(side)
        if side in (WITHOUT, POPULAR):
            loads[side] = longest_of(model)
        gradients[side] = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights
        ]
        seconds[side] = []
    for _ in range(rounds):
        for side in sides:
            seconds[side].append(step(side))
    error = torch.tensor(largest_difference(gradients[OURS], gradients[STOCK]))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return {
        "shape": f"GPT of {shape.layers} layers, sequence {shape.length}, {shape.sizes}",
        "seconds": seconds,
        "rounds": rounds,
        "error": float(error),
        "loads": loads,
    }


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Of its tensor's largest element; infinite where it is no number, which no maximum would keep."""
    each = [
        (a - b).abs().max() / b.abs().max().clamp_min(1e-30)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.stack(each).nan_to_num(math.inf, math.inf).max())


def longest_of(model: Any) -> float:
    """The longest rank's rows over the mean, of all layers' last forward together."""
    counts = [layer.mlp.token_dispatcher.accel_counts for layer in model.decoder.layers]
    whole = torch.tensor(counts).sum(0)
    owners = [e * RANKS // whole.shape[1] for e in range(whole.shape[1])]
    return longest_over_mean(rank_loads(whole.tolist(), owners))


if __name__ == "__main__":
    WHATS = {
        "alone": alone,
        "transfers": sent,
        "exchange": exchange,
        "hot": hot,
        "gpt": gpt,
        "gpt-skewed": partial(gpt, skewed=True),
    }
    sys.exit(run(WHATS, partial(begin_megatron, expert_model_parallel_size=RANKS)))
