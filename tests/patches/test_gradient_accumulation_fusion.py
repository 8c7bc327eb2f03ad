"""A last stage whose output layer shares the words that it looks up ahead: `main_grad` has both gradients."""

from __future__ import annotations

import sys
import types
from unittest import mock

import pytest
import torch
from torch import Tensor

import accel
from accel.patches.gradient_accumulation_fusion import WeightGradient
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import output_with, run_on

from .test_fused_adamw import one_rank

WORDS, LENGTH, BATCH, HIDDEN = 64, 16, 2, 32


def gradient(fused: bool) -> Tensor:
    """What data parallelism finds for the shared weight after two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.common.language_module import language_module
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=fused,
    )
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    tied = {"share_embeddings_and_output_weights": True, "mtp_block_spec": mtp}
    # this process alone is the second stage of two
    with mock.patch.object(language_module, "is_pp_first_stage", return_value=False):
        model = GPTModel(config, layer, WORDS, LENGTH, pre_process=False, **tied).train()
    weight = model.shared_embedding_or_output_weight()
    assert weight is model.embedding.word_embeddings.weight
    weight.data.normal_()
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    generator = torch.Generator().manual_seed(2)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for _ in range(2):
        ids = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
        given = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator).requires_grad_()
        model.set_input_tensor(given)
        parallel(ids, positions, mask, labels=ids).mean().backward()
        assert weight.grad is None
    return weight.main_grad


def check() -> None:
    with one_rank():
        expected, found = gradient(fused=False), gradient(fused=True)
    # of two heads and the lookups; in any order their terms are summed to a rounding each
    terms = 2 * 3 * BATCH * LENGTH
    bound = terms * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_the_words_that_a_tied_last_stage_looks_up_keep_their_gradient(version: str) -> None:
    run_on(version, check)


def check_beside_apex() -> None:
    """In a process of its own: before Megatron is imported there is a stand-in for Apex's extension."""
    calls = []

    def multiply(x_TH: Tensor, dy_TO: Tensor, main_grad_OH: Tensor) -> None:
        calls.append(x_TH.shape)
        WeightGradient.wgrad_gemm_accum_fp32(x_TH, dy_TO, main_grad_OH)

    apex = types.ModuleType("fused_weight_gradient_mlp_cuda")
    apex.wgrad_gemm_accum_fp32 = multiply
    apex.__spec__ = types.SimpleNamespace(loader=None)
    sys.modules[apex.__name__] = apex
    from megatron.core import utils
    from megatron.core.tensor_parallel import layers

    accel.enable(preset="fast")
    features = accel.status()["features"]
    assert features["gradient_accumulation_fusion"]["state"] == "active"
    assert "Apex's" in features["gradient_accumulation_fusion"]["reason"]
    for name in ("fused_weight_gradient", "fused_embedding_gradient"):
        assert features[name]["state"] == "active", features[name]
    accel.disable()
    check()
    products = 2 * (4 + 5 + 2)  # two micro-batches; a layer, the one that predicts ahead, two heads
    assert len(calls) == products
    with one_rank(gradient_accumulation_fusion=True):
        assert layers.fused_weight_gradient_mlp_cuda is apex
        x, dy = torch.randn(2, 4, 1, 3), torch.randn(2, 4, 1, 2)
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        weight.main_grad = torch.zeros(2, 3)
        config = types.SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=True)
        alone = types.SimpleNamespace(size=lambda: 1)
        utils.drain_embedding_wgrad_compute(config, [*x], [*dy], weight, alone)
    torch.testing.assert_close(weight.main_grad, dy.flatten(0, 2).t() @ x.flatten(0, 2))
    assert len(calls) == products + 2


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_beside_apex_its_kernel_multiplies_and_no_gradient_is_lost(version: str) -> None:
    output_with(version, f"import {__name__} as test; test.check_beside_apex()")
