"""Gradients of a pipeline's stage are averaged once, with any number of optimizer instances."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import accel


def shard_of_gradient(instances: int) -> list[float]:
    """Of a weight of which rank r has the gradient r + 1, reduced as a pipeline's schedule does, in three
    iterations."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    try:
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1),
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                num_distributed_optimizer_instances=instances,
            ),
            torch.nn.Linear(16, 16, bias=False),
        )
        (group,) = model.bucket_groups
        found = []
        for _ in range(3):
            model.zero_grad_buffer()
            with model.no_sync():
                model(torch.eye(16)).mul(dist.get_rank() + 1.0).sum().backward()
            model.start_grad_sync()  # `grad_sync_func` of a pipeline's schedule
            model.finish_grad_sync()
            here = group.intra_distributed_optimizer_instance_rank
            (value,) = group.cached_grad_buffer_shard_list[0][here][:200].unique().tolist()
            found.append(value)
        return found
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("gloo_group")
@pytest.mark.distributed(world_size=4)
def test_as_with_one_instance() -> None:
    accel.enable(device="cpu", preset="off")
    try:
        for instances in (1, 2, 4):
            assert shard_of_gradient(instances) == [2.5] * 3, instances
        accel.enable(device="cpu", preset="off", grad_sync_once=False)
        assert shard_of_gradient(2) != [2.5] * 3, "upstream is right by itself: remove the feature"
    finally:
        accel.disable()
