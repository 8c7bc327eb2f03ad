"""Every parallel layout trains the same model: ten iterations in fp32 from one checkpoint, against
one rank.

The layouts differ in the order of fp32 sums only. One such run differs from another by about 1e-7
of the loss; 1e-5 leaves room for ten optimizer steps and is far below what a lost gradient or a
wrong shard would do.
"""

from __future__ import annotations

import os

import pytest

from tests.tiers import cases

from .training import ITERATIONS, KINDS, from_checkpoint, losses, reference, train

RELATIVE_TOLERANCE = 1e-5

LAYOUTS = {
    "tp2": ("dense", "--tensor-model-parallel-size 2"),
    "tp2_sp": ("dense", "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": ("dense", "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": (
        "dense",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "dp2_distributed_optimizer": (
        "dense",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "tp2_sp_linear_cross_entropy": (
        "dense",
        "--tensor-model-parallel-size 2 --sequence-parallel --accel-linear-cross-entropy",
    ),
    "dp2_distributed_optimizer_linear_cross_entropy": (
        "dense",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        " --accel-linear-cross-entropy",
    ),
    "pp2_local_deferred_embedding_gradient": (
        "dense",
        "--pipeline-model-parallel-size 2 --transformer-impl local --defer-embedding-wgrad-compute"
        " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "dp2_local_swap": (
        "dense",
        "--transformer-impl local --accel-swap-attention --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
    ),
    "dp2_local_budget": (
        "dense",
        "--transformer-impl local --accel-memory-budget 0.001 --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
    ),
    "cp2_p2p": ("dense", "--context-parallel-size 2"),
    "cp2_a2a": ("dense", "--context-parallel-size 2 --cp-comm-type a2a"),
    "cp2_distributed_optimizer": (
        "dense",
        "--context-parallel-size 2 --cp-comm-type all_gather --use-distributed-optimizer"
        " --overlap-grad-reduce --overlap-param-gather",
    ),
    "cp2_ep2": ("moe", "--context-parallel-size 2 --expert-model-parallel-size 2"),
    "tp2_sp_mtp": (
        "mtp",
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "tp2_sp_moe_grouped": (
        "moe",
        "--tensor-model-parallel-size 2 --sequence-parallel --moe-grouped-gemm",
    ),
    "tp2_sp_gated_delta": (
        "gated_delta",
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    ),
    "cp2_gated_delta": ("gated_delta", "--context-parallel-size 2"),
    "ep2_alltoall": ("moe", "--expert-model-parallel-size 2"),
    "ep2_allgather": (
        "moe",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather --moe-grouped-gemm",
    ),
    "tp2_ep2_allgather": (
        "moe",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type allgather",
    ),
    "ep2_alltoall_fused": (
        "moe",
        "--expert-model-parallel-size 2 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
        " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}


@pytest.mark.parametrize(
    "layout",
    cases(
        LAYOUTS,
        "tp2_sp pp2_vpp2 dp2_distributed_optimizer tp2_sp_linear_cross_entropy dp2_local_swap"
        " dp2_local_budget cp2_a2a cp2_ep2 cp2_gated_delta tp2_sp_moe_grouped tp2_ep2_allgather"
        " ep2_alltoall_fused",
    ),
)
@pytest.mark.distributed(world_size=2)
def test_trains_like_one_rank(layout: str) -> None:
    kind, flags = LAYOUTS[layout]
    checkpoint, expected = reference(kind)
    found = losses(train([*KINDS[kind], *flags.split(), *from_checkpoint(checkpoint)]))
    assert len(expected) == ITERATIONS
    assert expected[-1] < 0.95 * expected[0], "the reference does not learn"
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        assert found == pytest.approx(expected, rel=RELATIVE_TOLERANCE)
