"""Mixtures of experts with all that makes them faster, against preset ``off``, where they run one after the
other and wait for their tokens: losses, gradients, checkpoints both ways, experts without tokens, and what
the tensor-parallel ranks of the attention tell each other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accel.patches import expert_migration
from tests.tiers import cases

from .against_stock import FreshStore, check_checkpoints
from .test_moe_overlap import AHEAD, EIGHT, EP2, HOT, OVERLAP, lent, skewed
from .test_resume import numbers
from .training import MOE, shared_folder, tensors, train

__all__ = ["lent", "skewed"]  # fixtures

OFF = ["--accel-preset", "off", "--accel-norm"]
"""The local spec's norm takes no sequence parallelism without Apex."""
LOCAL = ["--transformer-impl", "local"]
FUSED = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion".split()
SIDES = {"fused": FUSED, "overlap": [*FUSED, *OVERLAP], "hot": [*FUSED, *HOT]}
ATTENTION = "--tensor-model-parallel-size 2 --sequence-parallel"
WHOLE = f"{ATTENTION} --expert-tensor-parallel-size 1"
LAYOUTS = {
    "ep2": (2, EP2),
    "ep4": (4, "--expert-model-parallel-size 4"),
    "tp2_ep4": (4, f"{WHOLE} --expert-model-parallel-size 4"),
    "tp2_ep2_of_two_replicas": (4, f"{WHOLE} {EP2}"),
}


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.distributed(world_size=ranks))
        for layout, (ranks, _) in LAYOUTS.items()
    ],
)
def test_losses_and_gradients_are_stocks(
    layout: str, fresh_store: FreshStore, lent: list[int]
) -> None:
    """Losses of four iterations; gradients of every weight, to 1e-6 of its largest, and their norm: Adam's
    first moments after one step are a tenth of them."""

    def run(name: str, flags: Sequence[str]) -> tuple[list[float], dict[str, Tensor]]:
        shown = [*EIGHT.split(), *LAYOUTS[layout][1].split(), "--clip-grad", "1e6", *flags]
        losses, folder = losses_saving(f"{layout}-{name}", 4, shown, fresh_store)
        return losses, saved(folder, 1)

    expected, gradients = run("off", OFF)
    assert len(gradients) > 20
    for name in SIDES if LAYOUTS[layout][0] == 2 else ["hot"]:
        found, ours = run(name, SIDES[name])
        assert found == pytest.approx(expected, rel=1e-6), name
        assert ours.keys() == gradients.keys()
        for weight, gradient in gradients.items():
            assert_same(ours[weight], gradient)
        assert norm(ours) == pytest.approx(norm(gradients), rel=1e-6), name
    assert any(lent)


# --- what tensor-parallel ranks tell each other


class Edge(torch.autograd.Function):
    """Where a layer begins or ends: `then` runs in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Any) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return dx, None


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)


@pytest.fixture
def at_the_border(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Collectives of MoE layers over the ranks that share an attention: ("forward" or "backward", name)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found: list[tuple[str, str]] = []
    places = [(dist, name, name) for name in COLLECTIVES]
    places += [(mappings, "dist_all_gather_func", "all_gather_into_tensor")]
    places += [(mappings, "dist_reduce_scatter_func", "reduce_scatter_tensor")]
    before: list[Any] = []

    def watch(where: str) -> None:
        ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        assert not before, where

        def watched(call: Any, name: str) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                group = kwargs.get("group") or dist.group.WORLD
                groups = [group, *(a for a in args if isinstance(a, dist.ProcessGroup))]
                if any(dist.get_process_group_ranks(each) == ranks for each in groups):
                    found.append((where, name))
                return call(*args, **kwargs)

            return noted

        for module, attribute, name in places:
            before.append(getattr(module, attribute))
            setattr(module, attribute, watched(before[-1], name))

    def leave() -> None:
        for (module, attribute, _), call in zip(places, before, strict=True):
            setattr(module, attribute, call)
        before.clear()

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states = Edge.apply(hidden_states, leave)
        watch("forward")
        output, *rest = original(self, hidden_states, *args, **kwargs)
        leave()
        return Edge.apply(output, lambda: watch("backward")), *rest

    original = MoELayer.forward
    monkeypatch.setattr(MoELayer, "forward", forward)
    yield found
    assert not before


@pytest.mark.distributed(world_size=4)
def test_whole_experts_need_nothing_of_the_attentions_ranks(
    fresh_store: FreshStore, at_the_border: list[tuple[str, str]]
) -> None:
    """Split ones gather tokens before and scatter sums behind, and their gradients the other way around."""
    model = [*MOE, *LOCAL, *EIGHT.split(), "--moe-router-load-balancing-type", "none"]
    model += [*ATTENTION.split(), *EP2.split(), "--train-iters", "1"]
    for ours in (OFF, [*FUSED, *OVERLAP]):
        fresh_store()
        log = train([*model, "--moe-tp-extend-ep", *ours])
        if os.environ["RANK"] == "0":
            assert "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4" in log
        assert at_the_border == []
    fresh_store()
    train([*model, "--expert-tensor-parallel-size", "2", *OFF])
    pair = ("all_gather", "reduce_scatter")  # of as many rows as each rank has
    assert set(at_the_border) >= {(way, name) for way in ("forward", "backward") for name in pair}


# --- checkpoints


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize("kind", cases(["torch", "torch_dist"], "torch_dist"))
@pytest.mark.distributed(world_size=2)
def test_stock_and_ours_go_on_from_each_others_checkpoints(
    kind: str, fresh_store: FreshStore, lent: list[int]
) -> None:
    """Of experts one after the other and of grouped ones, whose copies and slices no checkpoint knows of."""
    flags = f"{' '.join(LOCAL)} {EIGHT} {EP2} --use-distributed-optimizer --ckpt-format {kind}"
    moe = " ".join([*MOE, flags])
    check_checkpoints(
        f"moe-{kind}", moe, moe, SIDES["hot"], OFF, fresh_store, tolerance=1e-6, bf16=False
    )
    assert any(lent)


# --- experts without tokens

STARVED = [1, 4, 5, 6, 7]
"""Of eight: one, and all of the second rank."""
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
STEPS = 8


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second iteration on some experts get no tokens; their biases go where they go."""
    from megatron.core.transformer.moe.router import Router
    from megatron.training import get_args

    def starving(self: Any, x: Tensor) -> Tensor:
        if get_args().curr_iteration > 0 and self not in since:
            self.expert_bias[STARVED] = -1e9
            since.append(self)
        return gating(self, x)

    since: list[Any] = []
    gating = Router.gating
    monkeypatch.setattr(Router, "gating", starving)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Layer -> the expert that each slot had at first, of the layers in which experts have moved."""
    found: dict[int, list[int]] = {}

    def noting(model: Any, states: Any, orders: dict[int, list[int]]) -> None:
        migrate(model, states, orders)
        for layer, order in orders.items():
            before = found.get(layer, range(len(order)))
            found[layer] = [before[slot] for slot in order]

    migrate = expert_migration.migrate
    monkeypatch.setattr(expert_migration, "migrate", noting)
    return found


@pytest.mark.usefixtures("starved")
@pytest.mark.distributed(world_size=2)
def test_experts_without_tokens_for_eight_steps(
    fresh_store: FreshStore, lent: list[int], placed: dict[int, list[int]]
) -> None:
    """Their moments fade, as stock's do."""

    def run(name: str, flags: Sequence[str], every: int = 1 + STEPS) -> tuple[list[float], Path]:
        shown = [*EIGHT.split(), *BIAS.split(), *EP2.split(), "--moe-router-topk", "2", *flags]
        return losses_saving(f"starved-{name}", 1 + STEPS, shown, fresh_store, every)

    expected, folder = run("off", OFF, every=1)
    once, stocks = (of_experts(folder, at) for at in (1, 1 + STEPS))
    for expert in STARVED:
        assert_same(stocks[1, expert, "0.exp_avg"], 0.9**STEPS * once[1, expert, "0.exp_avg"])
    moving = "--accel-expert-migration 4 --accel-expert-migration-threshold 0".split()
    others = {
        "ahead": [*FUSED, *AHEAD],
        "moved": [*FUSED, *moving],
        "moved_ahead": [*FUSED, *AHEAD, *moving],
    }
    for name, flags in (SIDES | others).items():
        lent.clear()
        placed.clear()
        found, folder = run(name, flags)
        assert found == pytest.approx(expected, rel=1e-6), name
        assert any(lent) == (name in ("hot", "ahead", "moved_ahead"))
        assert bool(placed) == name.startswith("moved")
        for (layer, slot, moment), ours in of_experts(folder, 1 + STEPS).items():
            expert = placed[layer][slot] if layer in placed else slot
            if expert in STARVED:
                assert_same(ours, stocks[layer, expert, moment])


def of_experts(folder: Path, iteration: int) -> dict[tuple[int, int, str], Tensor]:
    """Layer from 1, expert, matrix and moment -> that moment, of a second one the root; Megatron's second
    optimizer has the experts."""
    found = {}
    for name, value in saved(folder, iteration, ("exp_avg", "exp_avg_sq")).items():
        shown = re.fullmatch(r"mp_rank_00_00(\d)\.1\.state\.(\d+)\.(\w+)", name)
        if shown is not None:
            rank, at, moment = int(shown[1]), int(shown[2]), shown[3]
            layer, within = divmod(at, 4 * 2)
            key = 1 + layer, 4 * rank + within // 2, f"{within % 2}.{moment}"
            found[key] = value.sqrt() if moment == "exp_avg_sq" else value
    assert len(found) == 4 * 8 * 2 * 2
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To 1e-6 of the largest."""
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


# --- what they share


def losses_saving(
    name: str, iterations: int, flags: Sequence[str], fresh_store: FreshStore, every: int = 1
) -> tuple[list[float], Path]:
    """Of each iteration, on the last rank, which logs; and where checkpoints of every so many are."""
    fresh_store()
    folder = shared_folder(f"as-stock-{name}")
    save = ["--save", str(folder), "--save-interval", str(every), "--ckpt-format", "torch"]
    log = train([*MOE, *LOCAL, "--train-iters", str(iterations), *save, *flags])
    losses = [float(loss) for loss, _ in numbers(log)]
    logs = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    assert len(losses) == iterations * logs
    return losses, folder


def saved(folder: Path, iteration: int, kinds: Sequence[str] = ("exp_avg",)) -> dict[str, Tensor]:
    """Adam's moments of all ranks, by rank, optimizer and number."""
    files = sorted((folder / f"iter_{iteration:07d}").glob("*/model_optim_rng.pt"))
    states = {file.parent.name: torch.load(file, weights_only=False) for file in files}
    return {
        f"{rank}{name}": moment
        for rank, state in states.items()
        for name, moment in tensors(state["optimizer"]).items()
        if name.rpartition(".")[2] in kinds
    }


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())
