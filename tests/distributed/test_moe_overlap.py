"""`--accel-moe-overlap` and `--accel-hot-experts` under every layout: stock's losses and gradient norms, to
1e-6 in fp32."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.parallel.experts.exchange import Loan
from accel.parallel.experts.expert_overlap import owners_of
from accel.parallel.experts.plan import Copy, rank_loads
from accel.parallel.experts.room import Sizes
from accel.parallel.experts.traffic import Traffic
from accel.patches import _experts, moe_overlap
from tests.tiers import cases

from .against_stock import FreshStore, check_training
from .training import MOE, shared_folder, tensors, train

OVERLAP = ["--accel-moe-overlap", "--accel-moe-overlap-slices", "2"]
HOT = [*OVERLAP, "--accel-hot-experts", "3", "--accel-hot-experts-price", "0"]
AHEAD = [*HOT, "--accel-hot-experts-every", "2"]
STOCK = ["--no-accel-moe-overlap"]

FP32: dict[str, Any] = {"tolerance": 1e-6, "bf16": False}
ZIPF = {**FP32, "changed": "skewed"}
"""With the fixture of that name."""

LAYER_PASSES = 4 * 4 * 2
"""Of a rank: iterations, layers, micro-batches."""

LOCAL = "--transformer-impl local"
GROUPED = "--moe-grouped-gemm"
EIGHT = "--num-experts 8 --moe-router-topk 3"
EP2 = "--expert-model-parallel-size 2"
SHARED = "--moe-shared-expert-intermediate-size 48"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "local": f"{EP2} {LOCAL}",
    "local_grouped_with_permute_fusion": f"{EP2} {LOCAL} {GROUPED} --moe-permute-fusion",
    "te_shaped": f"{EP2} {GROUPED}",
    "one_expert_each": f"{EP2} {LOCAL} --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax",
    "shared_experts": f"{EP2} {GROUPED} {SHARED}",
    "shared_experts_in_steps": f"{EP2} {LOCAL} {SHARED} --moe-shared-expert-overlap",
    "capacity": f"{EP2} {LOCAL} --moe-expert-capacity-factor 0.6",
    "padded_capacity": f"{EP2} {GROUPED} --moe-expert-capacity-factor 1.1 "
    "--moe-pad-expert-input-to-capacity",
    "sharded_optimizer": f"{EP2} {LOCAL} {GROUPED} {SHARDED}",
    "added_to_main_grads": f"{EP2} {GROUPED} {SHARDED} --accel-gradient-accumulation-fusion",
    "recomputed": f"{EP2} {GROUPED} --recompute-granularity selective --recompute-modules moe",
    "recomputed_activation": f"{EP2} {GROUPED} --recompute-granularity selective "
    "--recompute-modules moe_act",
    "recomputed_wholly": f"{EP2} {LOCAL} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "tp2_with_whole_experts": f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-tensor-parallel-size 1 {GROUPED} {SHARED}",
    "pp2_without_other_ranks": f"--pipeline-model-parallel-size 2 {LOCAL}",
}
FOUR = {
    "pp2": f"{EP2} --pipeline-model-parallel-size 2 {GROUPED}",
    "ep4": f"--expert-model-parallel-size 4 {LOCAL} {EIGHT}",
    "tp2_ep4": "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-tensor-parallel-size 1 {GROUPED} {SHARDED}",
    "two_replicas": f"{EP2} {GROUPED} {SHARDED}",
    "vpp2": f"{EP2} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {GROUPED}",
    "cp2": f"{EP2} --context-parallel-size 2 {LOCAL} {GROUPED}",
}


@pytest.mark.parametrize(
    "layout",
    cases(
        LAYOUTS,
        "local te_shaped shared_experts_in_steps padded_capacity added_to_main_grads recomputed"
        " tp2_with_whole_experts",
    ),
)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", LAYOUTS[layout], OVERLAP, STOCK, fresh_store, **FP32)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each loan that was made, how many copies."""
    found: list[int] = []

    def noted(self: Loan, copies: Iterable[Copy], *args: Any) -> None:
        init(self, copies, *args)
        found.append(len(self.copies))

    init = Loan.__init__
    monkeypatch.setattr(Loan, "__init__", noted)
    return found


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers prefer the first experts, by Zipf's law of exponent 1.2."""
    from megatron.core.transformer.moe.router import Router

    gating = Router.gating
    monkeypatch.setattr(
        Router,
        "gating",
        lambda self, x: (
            gating(self, x) - 1.2 * torch.arange(1, self.config.num_moe_experts + 1).log()
        ),
    )


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize(
    "layout",
    cases(["local", "shared_experts", "added_to_main_grads", "recomputed"], "local recomputed"),
)
@pytest.mark.distributed(world_size=2)
def test_hot_experts_train_as_stock(layout: str, fresh_store: FreshStore, lent: list[int]) -> None:
    check_training("moe", f"{LAYOUTS[layout]} {EIGHT}", HOT, STOCK, fresh_store, **ZIPF)
    assert sum(n > 0 for n in lent) >= LAYER_PASSES // 2


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize(
    "layout",
    cases(
        ["local", "shared_experts", "sharded_optimizer", "recomputed", "recomputed_wholly"],
        "sharded_optimizer recomputed_wholly",
    ),
)
@pytest.mark.distributed(world_size=2)
def test_copies_that_are_planned_ahead_train_as_stock(
    layout: str, fresh_store: FreshStore, lent: list[int]
) -> None:
    """They set out before the attention of a layer, also when it is computed again; with the rows where only
    the experts are."""
    check_training("moe", f"{LAYOUTS[layout]} {EIGHT}", AHEAD, STOCK, fresh_store, **ZIPF)
    again = layout.startswith("recomputed")
    assert sum(n > 0 for n in lent) >= LAYER_PASSES // 2 + again * LAYER_PASSES


@pytest.mark.parametrize("layout", cases(FOUR, "cp2"))
@pytest.mark.distributed(world_size=4)
def test_trains_as_stock_on_four(layout: str, fresh_store: FreshStore) -> None:
    check_training("moe", FOUR[layout], OVERLAP, STOCK, fresh_store, **FP32)


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize("layout", cases(FOUR, "vpp2 tp2_ep4"))
@pytest.mark.parametrize("ours", [HOT, AHEAD], ids=["hot", "ahead"])
@pytest.mark.distributed(world_size=4)
def test_hot_experts_train_as_stock_on_four(
    ours: list[str], layout: str, fresh_store: FreshStore, lent: list[int]
) -> None:
    check_training("moe", f"{FOUR[layout]} {EIGHT}", ours, STOCK, fresh_store, **ZIPF)
    assert any(lent)


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize("ours", [OVERLAP, HOT], ids=["overlap", "hot"])
@pytest.mark.parametrize("layout", cases(["ep4", "tp2_ep4", "two_replicas"], "ep4 two_replicas"))
@pytest.mark.distributed(world_size=4)
def test_gradients_are_stocks(layout: str, ours: list[str], fresh_store: FreshStore) -> None:
    """Of every weight, to 1e-6 of its largest: Adam's first moment after one step is a tenth of them."""
    flags = f"{FOUR[layout]} {EIGHT}".replace(SHARDED, "")
    sides = {}
    for name, these in (("ours", ours), ("stock", STOCK)):
        fresh_store()
        folder = shared_folder(f"moe-{layout}-{len(ours)}-{name}")
        save = ["--save", str(folder), "--save-interval", "1", "--ckpt-format", "torch"]
        train([*MOE, *flags.split(), "--clip-grad", "0", "--train-iters", "1", *save, *these])
        files = sorted((folder / "iter_0000001").glob("*/model_optim_rng.pt"))
        saved = {f.parent.name: torch.load(f, weights_only=False) for f in files}
        sides[name] = {f"{f}{n}": t for f, of in saved.items() for n, t in moments(of).items()}
    assert sides["ours"].keys() == sides["stock"].keys()
    assert len(sides["stock"]) > 20
    for name, expected in sides["stock"].items():
        assert (sides["ours"][name] - expected).abs().max() <= 1e-6 * expected.abs().max(), name


def moments(saved: dict[str, Any]) -> dict[str, Tensor]:
    """Adam's first, of all optimizers of a checkpoint."""
    found = tensors(saved["optimizer"])
    return {name: t for name, t in found.items() if name.endswith("exp_avg")}


@pytest.mark.usefixtures("skewed")
@pytest.mark.distributed(world_size=4)
def test_layers_that_run_again_have_the_copies_of_their_first_run(
    fresh_store: FreshStore, lent: list[int]
) -> None:
    """On the first stage a later micro-batch has planned others before the backward."""
    ours = [*AHEAD, "--accel-memory-budget", "0.0001"]
    check_training("moe", f"{FOUR['pp2']} {EIGHT}", ours, STOCK, fresh_store, **ZIPF)
    assert any(lent)


@pytest.mark.distributed(world_size=2)
def test_trains_in_bf16(fresh_store: FreshStore) -> None:
    """Gradients of copies are rounded on their way, so not digit for digit."""
    flags = f"{EP2} {GROUPED} {SHARED} {SHARDED}"
    check_training("moe", flags, HOT, STOCK, fresh_store, 2e-3)


@pytest.mark.parametrize(
    "flags",
    [
        "--overlap-moe-expert-parallel-comm",
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ],
)
@pytest.mark.distributed(world_size=2)
def test_upstreams_own_overlap_runs_without_transformer_engine(
    flags: str, fresh_store: FreshStore
) -> None:
    check_training("moe", f"{EP2} {GROUPED}", flags.split(), [], fresh_store)


@pytest.mark.distributed(world_size=4)
def test_upstreams_own_overlap_runs_in_a_pipeline(fresh_store: FreshStore) -> None:
    """One micro-batch's all-to-all beside another's products, after a warm-up of one more each."""
    flags = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    check_training("moe", FOUR["vpp2"], flags.split(), [], fresh_store)


@pytest.mark.usefixtures("skewed")
@pytest.mark.distributed(world_size=2)
def test_rows_that_one_rank_has_no_room_for_are_one_error_on_all(
    fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing was sent, for which another would wait."""
    free = 100 if os.environ["RANK"] == "0" else 10**9
    monkeypatch.setattr(moe_overlap, "free_bytes", lambda device: free)
    monkeypatch.setattr(moe_overlap, "_sizes", lambda *args: Sizes(0, 1, 1, 0, 0))
    sent: list[Any] = []
    monkeypatch.setattr(moe_overlap, "routed_experts", lambda *args, **kwargs: sent.append(args))
    says = r"MoE layer 1: \d+ tokens go to the experts of rank 0 .* room for 100: --moe-expert-capacity"
    with pytest.raises(MemoryError, match=says):
        train([*MOE, *LAYOUTS["local"].split(), "--train-iters", "1", *OVERLAP])
    assert not sent


@pytest.mark.usefixtures("skewed")
@pytest.mark.parametrize("ours", [HOT, AHEAD], ids=["hot", "ahead"])
@pytest.mark.distributed(world_size=2)
def test_copies_make_room_or_are_left_out_where_there_is_none(
    ours: list[str], fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn: ranks that have room for their rows with the copies alone, and for those without."""
    fitting, kept = moe_overlap._fitting, {"with": [], "without": []}
    monkeypatch.setattr(moe_overlap, "_sizes", lambda *args: Sizes(0, 1, 1, 10**6, 0))

    def tight(layer: Any, traffic: Traffic, experts: Any, loan: Loan | None) -> Any:
        if not traffic.copies:
            return fitting(layer, traffic, experts, loan)
        room = min(kept, key=lambda which: len(kept[which]))
        owners = owners_of(traffic.counts)
        free = rank_loads(traffic.counts, owners, traffic.copies if room == "with" else ())
        for copy in traffic.copies:
            # where they have set out before, their matrices are not free
            free[copy.rank] += 10**6 * ((room == "with") - (loan is not None))
        layer.token_dispatcher.accel_free = free
        found = fitting(layer, traffic, experts, loan)
        kept[room].append(bool(found[0].copies))
        return found

    monkeypatch.setattr(moe_overlap, "_fitting", tight)
    check_training("moe", f"{LAYOUTS['local']} {EIGHT}", ours, STOCK, fresh_store, **ZIPF)
    assert len(kept["without"]) >= LAYER_PASSES // 8
    assert all(kept["with"])
    assert not any(kept["without"])


@pytest.mark.distributed(world_size=2)
def test_experts_that_one_rank_cannot_serve_run_as_stocks_on_both(
    fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, or with hooks, there alone: the ranks would post different collectives."""
    reason, first, routed = _experts.reason, os.environ["RANK"] == "0", []
    monkeypatch.setattr(_experts, "reason", lambda m: "frozen experts" if first else reason(m))
    monkeypatch.setattr(moe_overlap, "routed_experts", lambda *args: routed.append(args))
    check_training("moe", LAYOUTS["shared_experts_in_steps"], HOT, STOCK, fresh_store, **FP32)
    assert not routed
