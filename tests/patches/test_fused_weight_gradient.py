"""Weight gradients in a GPT: stock's, and without a second one of the weight's size beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import one_rank

WORDS, LENGTH, BATCH, HIDDEN = 256, 16, 2, 64


def gradients(*, tied: bool, overlap: bool) -> dict[str, Tensor]:
    """The `main_grad` of each parameter of a GPT after two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
        use_cpu_initialization=True,
    )
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    model = GPTModel(config, layer, WORDS, LENGTH, share_embeddings_and_output_weights=tied)
    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": overlap}
    ddp_config = DistributedDataParallelConfig(**options)
    parallel: Any = DistributedDataParallel(config, ddp_config, model.bfloat16().train())
    generator = torch.Generator().manual_seed(2)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for _ in range(2):
        ids = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
        parallel(ids, positions, mask, labels=ids).mean().backward()
    parallel.finish_grad_sync()
    assert all(p.grad is None for p in model.parameters())
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


def check_gradients() -> None:
    for tied, overlap in itertools.product([False, True], repeat=2):
        with one_rank():
            expected = gradients(tied=tied, overlap=overlap)
        with one_rank(fused_weight_gradient=True):
            found = gradients(tied=tied, overlap=overlap)
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            assert theirs.any()
            # both multiply the same bf16 numbers and sum in fp32, in orders of their own
            bound = BATCH * LENGTH * torch.finfo(torch.float32).eps * float(theirs.abs().max())
            torch.testing.assert_close(found[name], theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_stocks_gradients(version: str) -> None:
    run_on(version, check_gradients)


def held_in_backward() -> float:
    """The most bytes that the backward of an output layer takes, in weights of its size."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = ModelParallelConfig(
        params_dtype=torch.bfloat16, gradient_accumulation_fusion=True, use_cpu_initialization=True
    )
    layer = ColumnParallelLinear(
        *(512, 4096), config=config, init_method=torch.nn.init.normal_, bias=False
    )
    weight = layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    y, _ = layer(torch.randn(4, 1, 512, dtype=torch.bfloat16, requires_grad=True))
    dy = torch.randn_like(y)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(dy)
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    assert weight.main_grad.any()
    return (torch.cuda.max_memory_allocated() - before) / weight.nbytes


def check_memory() -> None:
    with one_rank():
        assert held_in_backward() >= 1
    with one_rank(fused_weight_gradient=True):
        assert held_in_backward() < 0.75  # what the product itself takes for so few rows


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_no_memory_of_the_weights_size_is_taken(version: str) -> None:
    run_on(version, check_memory)
