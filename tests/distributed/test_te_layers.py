"""The two layer specs are one model: the same losses from the same weights, and checkpoints that each reads
from the other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from accel.testing.distributed import launch, under_torchrun
from tests.tiers import cases

from .test_resume import check_resumption, numbers
from .training import MODEL, MOE, SCRIPT

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
LOCAL = ["--transformer-impl", "local"]
TE = ["--transformer-impl", "transformer_engine"]
LAYOUTS = {
    "one_rank_bf16": (1, ["--bf16"]),
    "one_rank_bf16_files_of_ranks": (1, ["--bf16", "--ckpt-format", "torch"]),
    "tp2_sp_distributed_optimizer": (
        2,
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
            " --dist-ckpt-optim-fully-reshardable"
        ).split(),
    ),
    "ep2_moe": (2, [*MOE, *"--expert-model-parallel-size 2".split()]),
    "pp2_moe_grouped": (
        2,
        [*MOE, *"--pipeline-model-parallel-size 2 --moe-grouped-gemm".split()],
    ),
}


@pytest.mark.parametrize("first", ["local", "te"])
@pytest.mark.parametrize(
    "layout",
    cases(LAYOUTS, "one_rank_bf16_files_of_ranks tp2_sp_distributed_optimizer"),
)
def test_each_spec_goes_on_from_the_others_checkpoint(
    layout: str, first: str, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    one, other = (LOCAL, TE) if first == "local" else (TE, LOCAL)
    flags = ["--ckpt-format", "torch_dist", *flags]
    check_resumption(ranks, flags, tmp_path, first=one, then=other)


@pytest.mark.thorough
def test_the_demo_has_the_same_losses_in_both_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent / "demo"))  # as its scripts import each other
    corpus, training = map(importlib.import_module, ("corpus", "training"))
    for name in ("corpus", "training"):
        del sys.modules[name]
    data = corpus.build(corpus.Recipe.of_this_python())
    found = []
    for spec in (TE, LOCAL):
        folder = tmp_path / spec[1]
        flags = training.QUICK.training_flags(data, folder / "checkpoints", folder / "index")
        found.append(numbers(launch(training.RANKS, [str(SCRIPT), *flags, *spec])))
    assert len(found[0]) == 1 + training.QUICK.iterations // training.QUICK.log_interval
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "fusion",
    [[], pytest.param(["--no-gradient-accumulation-fusion"], marks=pytest.mark.thorough)],
    ids=["", "unfused"],
)
def test_overlapped_and_delayed_steps_are_the_plain_ones(fusion: list[str]) -> None:
    plain = [
        *[str(SCRIPT), *MODEL, *MOE, *TE, *fusion, "--bf16", "--train-iters", "5"],
        *"--expert-model-parallel-size 2 --moe-grouped-gemm --use-distributed-optimizer".split(),
    ]
    delayed = [
        *[*plain, "--overlap-grad-reduce"],
        *["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"],
    ]
    expected = numbers(launch(2, plain))
    assert len(expected) == 5
    assert numbers(launch(2, delayed)) == expected


def test_experts_of_the_op_fuser_are_the_plain_ones() -> None:
    flags = "--moe-grouped-gemm --bf16 --train-iters 5 --expert-model-parallel-size 2".split()
    plain = [str(SCRIPT), *MODEL, *MOE, *TE, *flags]
    fused = [*plain, "--use-transformer-engine-op-fuser"]
    asked = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}  # Megatron 0.19 wants it beside the flag
    expected = numbers(launch(2, plain))
    assert len(expected) == 5
    assert numbers(launch(2, fused, environment=asked)) == expected


def test_an_optimizer_state_in_the_other_specs_order_is_refused(tmp_path: Path) -> None:
    command = [str(SCRIPT), *MODEL, "--use-distributed-optimizer", "--train-iters", "2"]
    launch(1, [*command, *LOCAL, "--save", str(tmp_path), "--save-interval", "2"])
    command[-1] = "3"
    with pytest.raises(pytest.fail.Exception, match="in the order of --transformer-impl local"):
        launch(1, [*command, *TE, "--load", str(tmp_path)])
    launch(1, [*command, *TE, "--load", str(tmp_path), "--no-load-optim"])
