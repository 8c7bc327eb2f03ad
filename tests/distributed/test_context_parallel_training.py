"""Trainings whose sequences are split over ranks, against one rank: both specs, every way to share, layouts.

As in `test_layouts`: ten iterations in fp32 from one checkpoint.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from tests.tiers import cases

from .test_layouts import RELATIVE_TOLERANCE
from .training import CLIP_AT, ITERATIONS, KINDS, from_checkpoint, losses, reference, train

LOCAL = "--transformer-impl local"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
NODES = "--hierarchical-context-parallel-sizes 2 2"
MINDSPEED = f"{CP4} --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"

TWO_RANKS = {
    "ring": ("dense", f"{CP2} {LOCAL}"),
    "ring_keeps_keys_of_every_other_layer": (
        "dense",
        f"{CP2} --context-parallel-kv-cache-policy half --context-parallel-cache-interval 1",
    ),
    "gathered_recomputed_sharded": (
        "dense",
        f"{CP2} {LOCAL} --context-parallel-algo kvallgather_cp_algo --use-distributed-optimizer"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "each_layer_its_own": ("dense", f"{CP2} {LOCAL} --cp-comm-type p2p a2a all_gather p2p"),
    "swapped": ("dense", f"{CP2} {LOCAL} --accel-swap-attention all"),
    "each_layer_its_own_te": ("dense", f"{CP2} --cp-comm-type p2p a2a all_gather p2p"),
    "without_kernels": ("dense", f"{CP2} {LOCAL} --accel-preset off"),
    "moe_ep2": ("moe", f"{CP2} {LOCAL} --expert-model-parallel-size 2"),
    "window": ("window", f"{CP2} {LOCAL}"),
    "documents": ("documents", CP2),
    "documents_by_heads": ("documents", f"{CP2} --cp-comm-type a2a"),
    "dropout": ("dropout", CP2),
    "sequence_of_4096": ("long", CP2),
    "mla": ("mla", f"{CP2} --cp-comm-type p2p a2a all_gather p2p"),
    "offset_by_heads": ("offset", f"{CP2} --cp-comm-type a2a"),
    "offset_local": ("offset", f"{CP2} {LOCAL} --cp-comm-type p2p a2a all_gather p2p"),
    "off_by_one": ("off_by_one", CP2),
    "off_by_one_local": ("off_by_one", f"{CP2} {LOCAL} --cp-comm-type a2a"),
}
FOUR_RANKS = {
    "two_rings": ("dense", f"{CP4} {LOCAL} --cp-window-size 2 --use-cp-send-recv-overlap"),
    "heads_in_nodes": ("dense", MINDSPEED),
    "tp2_sp": ("dense", f"{CP2} {LOCAL} --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": ("dense", f"{CP2} {LOCAL} --pipeline-model-parallel-size 2"),
    "documents": ("documents", f"{CP4} --cp-comm-type a2a+p2p {NODES}"),
}


def check(kind: str, flags: str) -> None:
    checkpoint, expected = reference(kind)
    found = losses(train([*KINDS[kind], *flags.split(), *from_checkpoint(checkpoint)]))
    assert len(expected) == ITERATIONS
    assert expected[-1] < 0.95 * expected[0], "the reference does not learn"
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        assert found == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    cases(TWO_RANKS, "ring each_layer_its_own_te documents_by_heads offset_by_heads offset_local"),
)
@pytest.mark.distributed(world_size=2)
def test_trains_like_one_rank(layout: str) -> None:
    check(*TWO_RANKS[layout])


@pytest.mark.parametrize("layout", cases(FOUR_RANKS, "two_rings tp2_sp"))
@pytest.mark.distributed(world_size=4)
def test_trains_like_one_rank_on_four(layout: str) -> None:
    check(*FOUR_RANKS[layout])


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
@pytest.mark.distributed(world_size=2)
def test_queries_and_keys_are_clipped(comm_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: Megatron clips in 16 bit alone."""
    checkpoint, expected = reference("clipped")
    importlib.import_module("accel.megatron_adaptor")  # before Megatron, as users do
    from megatron.training import training

    largest: list[float] = []
    clip = training.clip_qk

    def noted(*args: Any, **options: Any) -> float:
        largest.append(clip(*args, **options))
        return largest[-1]

    monkeypatch.setattr(training, "clip_qk", noted)
    flags = [*KINDS["clipped"], *CP2.split(), "--cp-comm-type", comm_type]
    found = losses(train([*flags, *from_checkpoint(checkpoint)]))
    assert len(largest) == ITERATIONS
    assert min(largest) > CLIP_AT, "nothing was clipped"
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq-length 62", r"--seq-length 62 is no multiple of 2 x .* 2: use 60 or 64"),
        (
            "--cp-comm-type a2a --num-attention-heads 3 --num-query-groups 3",
            r"--num-attention-heads 3 is no multiple of .* 1 x 2 ranks.*may be 1, 3",
        ),
        ("--hierarchical-context-parallel-sizes 2 2", r"2 2 do not multiply to .* 2: use one of"),
        ("--cp-comm-type a2a+p2p", r"a2a\+p2p with --hierarchical-context-parallel-sizes None"),
        (
            "--cp-window-size 3",
            r"a window of 3 ranks does not divide the ring of 2: use one of 1, 2",
        ),
        (
            "--ulysses-degree-in-cp 2",
            "--ulysses-degree-in-cp and --context-parallel-algo hybrid_cp_algo",
        ),
        (
            "--context-parallel-algo ring",
            r"--context-parallel-algo ring: use mega.*--cp-comm-type",
        ),
        ("--cp-window-size two", "--accel-context-parallel-window: 'two' is no number of ranks"),
        (
            "--attention-mask-type general",
            "--attention-mask-type general: a split sequence has the mask",
        ),
        ("--context-parallel-kv-cache-policy most", "'most': use none, keys, all"),
    ],
)
def test_bad_input_is_one_error(flags: str, message: str) -> None:
    from accel.session import SESSION

    SESSION.attach()  # an error while features are chosen takes everything back
    with pytest.raises(ValueError, match=message):
        train([*CP2.split(), *LOCAL.split(), "--train-iters", "1", *flags.split()])
