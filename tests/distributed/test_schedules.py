"""Pipelines in the order of accel's schedules: stock's losses and gradient norms, digit for digit, and its
weights and moments, bit for bit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.parallel.schedule import Kind
from accel.parallel.schedule.names import named
from accel.patches import _pipeline
from tests.tiers import cases

from . import training
from .against_stock import FreshStore, check_training
from .test_host_optimizer import SHARDED
from .training import reference, shared_folder, tensors, train

PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
MORE = ["--accel-vpp-extra-warmup", "1"]
H1 = ["--accel-schedule", "zb-h1"]

CASES: dict[str, tuple[str, str, list[str]]] = {
    "warmup_1": ("dense", f"{VPP2} --eval-interval 2 --eval-iters 2", MORE),
    "warmup_2_tied": ("tied", VPP2, ["--accel-vpp-extra-warmup", "2"]),
    "warmup_beyond_the_total": ("dense", VPP2, ["--accel-vpp-extra-warmup", "99"]),
    "as_many_micro_batches_as_ranks": ("dense", f"{VPP2} --global-batch-size 4", MORE),
    "groups_of_3": (
        "dense",
        f"{VPP2} --global-batch-size 12 --microbatch-group-size-per-virtual-pipeline-stage 3",
        MORE,
    ),
    "uneven_layout": ("dense", f"{PP2} --pipeline-model-parallel-layout E|tt|t|tL", MORE),
    "recomputed": (
        "dense",
        f"{VPP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        MORE,
    ),
    "some_micro_batches_recomputed": (
        "dense",
        f"{VPP2} --recompute-granularity full --recompute-method block --recompute-num-layers 1"
        " --attention-dropout 0.1 --hidden-dropout 0.1",
        MORE,
    ),
    "swapped": ("dense", VPP2, [*MORE, "--accel-swap-attention", "all"]),
    "mtp": ("mtp", VPP2, MORE),
    "moe_per_token": ("moe", f"{VPP2} --calculate-per-token-loss", MORE),
    "megatrons_order": ("dense", VPP2, ["--accel-schedule", "interleaved"]),
    "1f1b": ("tied", PP2, ["--accel-schedule", "interleaved"]),
    "zb_h1_tied": ("tied", f"{PP2} --eval-interval 2 --eval-iters 2", H1),
    "zb_h1_tied_mtp": ("tied", f"{PP2} --mtp-num-layers 1", H1),
    "zb_h1_moe_grouped": ("moe", f"{PP2} --moe-grouped-gemm", H1),
    "zb_h1_without_fusion": ("dense", f"{PP2} --no-gradient-accumulation-fusion", H1),
    "zb_h1_recomputed_mtp": (
        "mtp",
        f"{PP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        H1,
    ),
}

FOUR = {
    "dp2_overlaps_warmup": ("dense", f"{VPP2} {SHARDED}", MORE),
    "dp2_overlaps_zb_h1": ("dense", f"{PP2} {SHARDED}", H1),
    "tp2_sp_zb_h1": (
        "dense",
        f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce",
        H1,
    ),
    "pp4_warmup": (
        "dense",
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8",
        MORE,
    ),
    "ep2_warmup": ("moe", f"{VPP2} --expert-model-parallel-size 2", MORE),
    "ep2_overlap_zb_h1": (
        "moe",
        f"{PP2} --expert-model-parallel-size 2 --moe-grouped-gemm {SHARDED}",
        [*H1, "--accel-moe-overlap"],
    ),
}

V = {
    "zb-v": f"{PP2} --accel-schedule zb-v",
    "v-half": f"{PP2} --accel-schedule v-half",
    "v-min": f"{PP2} --accel-schedule v-min",
    "dualpipev": f"{PP2} --accel-schedule dualpipev",
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the schedules whose passes accel ran."""
    names = []
    forward_backward = _pipeline.forward_backward

    def noted(**kwargs: Any) -> list[Any]:
        names.append(_pipeline.WANTED.name or "more warm-up")
        return forward_backward(**kwargs)

    monkeypatch.setattr(_pipeline, "forward_backward", noted)
    return names


@pytest.mark.parametrize(
    "case",
    cases(
        CASES,
        "warmup_1 warmup_2_tied groups_of_3 uneven_layout some_micro_batches_recomputed mtp zb_h1_tied_mtp"
        " zb_h1_moe_grouped",
    ),
)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(case: str, fresh_store: FreshStore, ran: list[str]) -> None:
    kind, flags, ours = CASES[case]
    check_training(kind, flags, ours, [], fresh_store)
    assert len(ran) >= 2


@pytest.mark.parametrize("case", cases(FOUR, "tp2_sp_zb_h1 ep2_warmup"))
@pytest.mark.distributed(world_size=4)
def test_four_ranks_train_as_stock(case: str, fresh_store: FreshStore, ran: list[str]) -> None:
    kind, flags, ours = FOUR[case]
    check_training(kind, flags, ours, [], fresh_store)
    assert len(ran) >= 2


@pytest.mark.parametrize("flags", [VPP2, PP2], ids=["warmup", "zb_h1"])
@pytest.mark.parametrize("precision", ["--bf16", "--no-gradient-accumulation-fusion"])
@pytest.mark.distributed(world_size=2)
def test_weights_and_moments_are_stocks(
    flags: str, precision: str, fresh_store: FreshStore, ran: list[str]
) -> None:
    """Adam's first moment is a sum of gradients: equal bits are equal gradients."""
    ours = MORE if flags == VPP2 else H1
    sides = {}
    for name, more in (("ours", ours), ("stock", [])):
        fresh_store()
        folder = shared_folder(f"schedule-{len(flags)}-{precision.strip('-')}-{name}")
        save = ["--save", str(folder), "--save-interval", "3", "--ckpt-format", "torch"]
        train([*flags.split(), precision, "--train-iters", "3", *save, *more])
        rank = int(os.environ["RANK"])
        saved = folder / "iter_0000003" / f"mp_rank_00_{rank:03d}"
        sides[name] = tensors(torch.load(saved / "model_optim_rng.pt", weights_only=False))
    assert len(sides["ours"]) > 20
    assert sides["ours"].keys() == sides["stock"].keys()
    for name, tensor in sides["ours"].items():
        assert torch.equal(tensor, sides["stock"][name]), name
    assert ran


@pytest.mark.parametrize("name", cases(V, "dualpipev"))
@pytest.mark.distributed(world_size=2)
def test_a_v_trains_as_stocks_interleaving(
    name: str, fresh_store: FreshStore, ran: list[str]
) -> None:
    """From one checkpoint, in fp32. Only norms of gradients, which are not clipped here, add up elsewhere."""
    checkpoint, _ = reference("dense")
    load = ["--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]
    shared = ["--train-iters", "4", "--clip-grad", "0", *load]
    shared += ["--eval-interval", "2", "--eval-iters", "2"]
    fresh_store()
    found = train([*V[name].split(), *shared])
    fresh_store()
    expected = train([*VPP2.split(), *shared])
    assert training.losses(found) == training.losses(expected)
    assert _validation(found) == _validation(expected)
    if int(os.environ["RANK"]) == 1:
        assert len(training.losses(found)) == 4
        assert len(_validation(found)) >= 2
    assert set(ran) == {name}


@pytest.mark.parametrize("name", cases(["zb-v", "dualpipev"], "dualpipev"))
@pytest.mark.distributed(world_size=4)
def test_a_v_of_four_ranks_trains_as_1f1b(
    name: str, fresh_store: FreshStore, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight layers, from a checkpoint that 1F1B wrote."""
    folder = shared_folder(f"schedule-v4-{name}")
    shape = ["--num-layers", "8", "--clip-grad", "0", "--bf16", "--micro-batch-size", "1"]
    pp4 = ["--pipeline-model-parallel-size", "4"]
    fresh_store()
    train([*shape, *pp4, "--train-iters", "1", "--save", str(folder), "--save-interval", "1"])
    load = ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]
    runs = []
    for schedule in ([], ["--accel-schedule", name]):
        fresh_store()
        runs.append(train([*shape, *pp4, "--train-iters", "3", *load, *schedule]))
    assert training.losses(runs[0]) == training.losses(runs[1])
    assert len(training.losses(runs[0])) == 3 * (int(os.environ["RANK"]) == 3)
    assert set(ran) == {name}


@pytest.mark.distributed(world_size=2)
def test_a_schedule_of_a_file_trains_as_stock(fresh_store: FreshStore, ran: list[str]) -> None:
    """The last forward of the first rank comes before its first backward."""
    made = named("zb-h1", 2, 1, 4)
    first, *others = made.ranks
    forwards = tuple(action for action in first if action.kind is Kind.FORWARD)
    backwards = tuple(action for action in first if action.kind is not Kind.FORWARD)
    edited = replace(made, ranks=((*forwards, *backwards), *others))
    path = shared_folder(f"edited-{os.environ['RANK']}").with_suffix(".json")
    path.write_text(json.dumps(edited.to_dict()))
    check_training("tied", PP2, ["--accel-schedule", str(path)], [], fresh_store)
    assert len(ran) >= 2


@pytest.mark.distributed(world_size=2)
def test_sequences_of_any_length(
    fresh_store: FreshStore, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is sent behind its sizes."""
    from accel.parallel.schedule.link import GroupLink

    sized = []
    init = GroupLink.__init__

    def with_sizes(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "sized": True})
        sized.append(self.sized)

    monkeypatch.setattr(GroupLink, "__init__", with_sizes)
    check_training("dense", VPP2, MORE, [], fresh_store)
    assert len(sized) == len(ran) > 0


def _validation(output: str) -> list[str]:
    return [line.split("|")[1] for line in output.splitlines() if "validation loss at" in line]
