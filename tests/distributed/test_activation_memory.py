"""Recomputed and swapped activations under layouts: stock's losses and gradient norms, digit for digit."""

from __future__ import annotations

from typing import Any

import pytest

from accel.memory.recompute import Recomputed
from accel.memory.swap import Chain
from accel.patches import cpu_offloading, swap_attention
from tests.tiers import cases

from .against_stock import FreshStore, check_training
from .test_host_optimizer import SHARDED

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP2 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
EP2 = "--expert-model-parallel-size 2"
BY_NAME = "--accel-recompute-norm --accel-recompute-activation --accel-swap-attention all"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 16 --offload-modules"

LAYOUTS: dict[str, tuple[str, str, str]] = {
    "tp2_sp": ("dense", f"{TP2} {SHARDED}", BY_NAME),
    "pp2_vpp2": (
        "dense",
        VPP2,
        "--recompute-norm --recompute-norm-num-layers 1 --swap-attention all --swap-modules self_attention",
    ),
    "ep2_and_whole_layers": (
        "moe",
        f"{EP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        BY_NAME,
    ),
    "tp2_sp_megatrons_flags": (
        "dense",
        TP2,
        f"{SELECTIVE} layernorm core_attn mlp",
    ),
    "pp2_vpp2_megatrons_flags": (
        "dense",
        VPP2,
        f"{SELECTIVE} layernorm {OFFLOAD} qkv_linear core_attn attn_proj",
    ),
    "ep2_megatrons_flags": (
        "moe",
        f"{EP2} --moe-grouped-gemm",
        f"{SELECTIVE} layernorm moe_act {OFFLOAD} core_attn attn_proj",
    ),
    "tp2_sp_whole_layers_offloaded": ("dense", TP2, "--cpu-offloading-num-layers 3"),
    "ep2_whole_layers_offloaded": (
        "moe",
        f"{EP2} --moe-grouped-gemm",
        "--cpu-offloading-num-layers 2",
    ),
}
"""Model, flags of both, flags of ours."""


@pytest.mark.parametrize(
    "layout",
    cases(
        LAYOUTS,
        "tp2_sp ep2_and_whole_layers pp2_vpp2_megatrons_flags tp2_sp_whole_layers_offloaded",
    ),
)
@pytest.mark.distributed(world_size=2)
def test_trains_as_stock(
    layout: str, fresh_store: FreshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, swapped = [], []
    free, copy_of = Recomputed.free, Chain.copy_of

    def copied(chain: Chain, tensor: Any) -> Any:
        swapped.append(tensor.nbytes)
        return copy_of(chain, tensor)

    monkeypatch.setattr(Recomputed, "free", lambda *args: freed.append(free(*args)))
    monkeypatch.setattr(Chain, "copy_of", copied)
    monkeypatch.setattr(swap_attention, "MIN_BYTES", 1024)
    monkeypatch.setattr(cpu_offloading, "MIN_BYTES", 1024)
    kind, flags, ours = LAYOUTS[layout]
    check_training(kind, flags, ours.split(), [], fresh_store)
    assert (sum(freed) > 0) == ("recompute" in ours)
    moves = ("swap" in ours or "offload" in ours) and "--recompute-granularity full" not in flags
    assert (sum(swapped) > 0) == moves
