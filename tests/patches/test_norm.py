"""The norm modules at Megatron's seam: same module contract, same numbers as torch's, gradients reduced."""

from __future__ import annotations

import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accel

HIDDEN = 48


@pytest.fixture(params=["exact", "fast"])
def preset(request: pytest.FixtureRequest) -> Iterator[str]:
    accel.enable(preset=request.param)
    yield request.param
    accel.disable()


def build(normalization: str, **options: Any) -> torch.nn.Module:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization=normalization,
        **options,
    )
    return WrappedTorchNorm(config=config, hidden_size=HIDDEN, eps=1e-5)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_is_torchs_norm_to_every_caller(normalization: str, preset: str) -> None:
    module = build(normalization)
    stock = getattr(torch.nn, normalization)(HIDDEN, eps=1e-5)
    assert isinstance(module, type(stock))
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in stock.state_dict().items()
    }
    x_TH = torch.randn(5, 3, HIDDEN)
    if preset == "exact":
        assert torch.equal(module(x_TH), stock(x_TH))
    else:
        torch.testing.assert_close(module(x_TH), stock(x_TH))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_exact_is_bit_identical_in_bf16_forward_and_backward(normalization: str) -> None:
    accel.enable(preset="exact")
    try:
        ours = build(normalization).bfloat16()
        stock = getattr(torch.nn, normalization)(HIDDEN, eps=1e-5).bfloat16()
        results = []
        for module in (ours, stock):
            torch.manual_seed(1)
            x_TH = torch.randn(7, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            y_TH = module(x_TH)
            y_TH.backward(torch.randn_like(y_TH))
            results.append([y_TH, x_TH.grad, *(p.grad for p in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    finally:
        accel.disable()


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_zero_centred_weights_start_at_zero_and_mean_the_same(
    normalization: str, preset: str
) -> None:
    plain, centred = build(normalization), build(normalization, layernorm_zero_centered_gamma=True)
    assert centred.weight.abs().sum() == 0
    x_TH = torch.randn(4, HIDDEN)
    torch.testing.assert_close(centred(x_TH), plain(x_TH))
    torch.nn.init.normal_(centred.weight)
    with torch.no_grad():
        plain.weight.copy_(1 + centred.weight)
    torch.testing.assert_close(centred(x_TH), plain(x_TH))


def test_flags_that_stock_refuses(preset: str) -> None:
    module = build(
        "RMSNorm",
        sequence_parallel=True,
        tensor_model_parallel_size=2,
        persist_layer_norm=True,
        memory_efficient_layer_norm=True,
    )
    assert all(p.sequence_parallel for p in module.parameters())


def test_l2_norm_and_bad_names(preset: str) -> None:
    x_TH = torch.randn(3, HIDDEN)
    torch.testing.assert_close(
        build("L2Norm")(x_TH).square().mean(-1), torch.ones(3), rtol=1e-3, atol=1e-3
    )
    with pytest.raises(
        ValueError, match="normalization='BatchNorm': use LayerNorm, RMSNorm or L2Norm"
    ):
        build("BatchNorm")


def test_disabled_means_stock() -> None:
    with pytest.raises(AssertionError, match="sequence parallel not supported by torch LayerNorm"):
        build("RMSNorm", sequence_parallel=True, tensor_model_parallel_size=2)


@pytest.mark.distributed(world_size=2)
def test_sequence_parallel_gradient_is_that_of_the_whole_sequence() -> None:
    """Each rank norms its half; Megatron's reduction adds the halves' weight gradients."""
    import torch.distributed as dist
    from megatron.core.distributed.finalize_model_grads import (
        _allreduce_non_tensor_model_parallel_grads,
    )

    accel.enable(preset="fast")
    dist.init_process_group("nccl")
    module = build("RMSNorm", sequence_parallel=True, tensor_model_parallel_size=2)
    torch.manual_seed(0)
    x_TH, dy_TH = torch.randn(2, 8, HIDDEN)
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    module(x_TH[half]).backward(dy_TH[half])
    module.weight.main_grad = module.weight.grad.clone()
    config = type("Config", (), {"sequence_parallel": True, "qk_layernorm": False})()
    _allreduce_non_tensor_model_parallel_grads([_Model(module)], config, dist.group.WORLD)
    reduced = module.weight.main_grad
    module.weight.grad = None
    module(x_TH).backward(dy_TH)
    torch.testing.assert_close(reduced, module.weight.grad)
    dist.destroy_process_group()
    accel.disable()


class _Model(torch.nn.Module):
    """As much of a model as Megatron's gradient reduction looks at."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.ddp_config = type("DDP", (), {"use_megatron_fsdp": False})()


@pytest.mark.parametrize(
    ("normalization", "impl", "idle"),
    [
        ("RMSNorm", "local", True),
        ("RMSNorm", "inference_optimized", False),
        ("LayerNorm", "local", False),
    ],
)
def test_leaves_the_norms_that_another_librarys_spec_makes(
    monkeypatch: pytest.MonkeyPatch, normalization: str, impl: str, idle: bool
) -> None:
    """Liger's replacement makes RMSNorms of its own in the local spec, and nothing else."""
    from megatron.core.models import backends

    from accel.feature import Context
    from accel.patches.norm import FEATURE

    others = types.ModuleType("somebody.patches")
    exec("def layer_norm(self, rms_norm=False, for_qk=False): return 'theirs'", vars(others))
    context = Context(
        "cpu", "0.19.2", SimpleNamespace(normalization=normalization, transformer_impl=impl)
    )
    assert FEATURE.idle(context) is None
    monkeypatch.setattr(backends.LocalSpecProvider, "layer_norm", others.layer_norm)
    reason = FEATURE.idle(context)
    assert (reason is not None) == idle
    assert reason is None or reason.startswith("somebody.patches has replaced")
