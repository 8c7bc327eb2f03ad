"""Norms and routers that tensor-parallel ranks hold alike stay so in Megatron-FSDP with a per-token loss."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from .against_stock import FreshStore
from .test_resume import numbers
from .training import KINDS, train

PER_TOKEN = """
    --num-layers 1 --bf16 --grad-reduce-in-bf16 --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --no-gradient-accumulation-fusion --calculate-per-token-loss
    --clip-grad 0 --global-batch-size 4 --train-iters 3
""".split()
FSDP = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
""".split()


OFF = "--no-accel-fsdp-replicated-grads"


@pytest.mark.distributed(world_size=4)
def test_replicated_weights_are_trained_with_the_sum_of_their_gradients(
    fresh_store: FreshStore,
) -> None:
    whole = numbers(train([*KINDS["moe"], *PER_TOKEN]))
    fresh_store()
    found, alike = train_and_compare()
    fresh_store()
    _, without = train_and_compare(OFF)
    assert any(name.endswith("router.weight") for name in alike)
    assert any("norm" in name for name in alike)
    assert all(len(steps) == 3 for steps in alike.values())
    assert {name: steps for name, steps in alike.items() if not all(steps)} == {}
    assert not all(map(all, without.values())), "upstream is right: remove the feature"
    assert len(found) == 3 * (int(os.environ["RANK"]) == 3)
    losses, expected = ([float(loss) for loss, _ in rows] for rows in (found, whole))
    for loss, wanted in zip(losses, expected, strict=True):
        # the last digit, and a small part of what the training changed: gradients are rounded to bf16 after
        # sums in another order, and by that a router's choice may turn
        assert loss == pytest.approx(wanted, abs=1.01e-6 + 2**-5 * abs(wanted - expected[0]))


def train_and_compare(*more: str) -> tuple[list[tuple[str, str]], dict[str, list[bool]]]:
    """Losses, and by replicated weight, whether both tensor-parallel ranks had the same after each step."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    kind = param_and_grad_buffer.ParamAndGradBuffer
    upstream = kind.copy_main_weights_to_model_weights  # after each step
    alike: dict[str, list[bool]] = {}

    def compare(self: Any) -> None:
        upstream(self)
        group = parallel_state.get_tensor_model_parallel_group()
        for name, parameter in self.optimizer_named_parameters:
            if getattr(parameter, "sequence_parallel", False):
                mine = parameter._local_tensor.detach().contiguous()
                both = [torch.empty_like(mine) for _ in range(2)]
                dist.all_gather(both, mine, group=group)
                same = torch.tensor([both[0].equal(both[1])], dtype=torch.int32)
                dist.all_reduce(same, dist.ReduceOp.MIN)  # a rank may hold nothing of it
                alike.setdefault(name, []).append(bool(same))

    with mock.patch.object(kind, "copy_main_weights_to_model_weights", compare):
        return numbers(train([*KINDS["moe"], *PER_TOKEN, *FSDP, *more])), alike
