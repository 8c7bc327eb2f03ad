"""Megatron's gated delta networks without `flash-linear-attention`: the numbers of its own PyTorch path, and
packs that are sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.feature import Context
from accel.patches import gated_delta_net
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import one_rank

TOKENS, BATCH, HIDDEN = 70, 2, 32


def layer(**options: Any) -> Any:
    """A `GatedDeltaNet`; the same weights each time."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1],
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        transformer_impl="transformer_engine",
        **options,
    )
    spec = specs.get_experimental_attention_variant_module_spec(config)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    return build_module(spec, config, layer_number=1, bias=False, pg_collection=groups)


def gradients(module: Any, x: Tensor, **options: Any) -> list[Tensor]:
    """Output, and gradients of the input and of every parameter."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y, _ = module(x, None, **options)
    y.sin().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def tokens(batch: int = BATCH) -> Tensor:
    return torch.randn(TOKENS, batch, HIDDEN, generator=torch.Generator().manual_seed(2))


def check_upstreams_own_path() -> None:
    with one_rank():
        ours, theirs = (gradients(layer(deterministic_mode=own), tokens()) for own in (False, True))
    assert len(ours) > 6
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_the_numbers_of_upstreams_own_path(version: str) -> None:
    run_on(version, check_upstreams_own_path)


def test_packed_sequences_are_sequences() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    x, lengths = tokens(batch=1), (13, 1, 56)
    starts = torch.tensor([0, 13, 14, 70], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    with one_rank():
        module = layer()
        together = gradients(module, x, packed_seq_params=packed)
        apart = [gradients(module, part) for part in x.split(lengths)]
    for i, found in enumerate(together):
        parts = [each[i] for each in apart]
        expected = torch.cat(parts) if i < 2 else torch.stack(parts).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_off_again_it_cannot_be_built() -> None:
    with one_rank(gated_delta_net=False), pytest.raises(ImportError, match="FLA is not installed"):
        layer()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_queries_and_keys(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 24).to(dtype)
    exact = x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    y = gated_delta_net.l2norm(x)
    assert y.dtype == dtype
    assert float((y.double() - exact).abs().max()) <= 2 * torch.finfo(dtype).eps
    assert gated_delta_net.l2norm(x, output_dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"experimental_attention_variant": "gated_delta_net"}, None),
        ({"hybrid_layer_pattern": "G-M*"}, None),
        ({"hybrid_layer_pattern": "M-M*"}, "no gated delta networks"),
        ({"experimental_attention_variant": "dsa"}, "no gated delta networks"),
    ],
)
def test_idle_without_such_layers(args: dict[str, Any] | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    assert gated_delta_net.FEATURE.idle(Context("cpu", "0.19.2", given)) == reason


def test_idle_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_net.importlib.util, "find_spec", lambda name: object())
    reason = gated_delta_net.FEATURE.idle(Context("cpu", "0.19.2"))
    assert reason == "flash-linear-attention is installed"


def test_what_the_package_could_do_beyond_megatrons_calls() -> None:
    q = torch.randn(1, 6, 2, 4)
    call = (q, q, q, -torch.rand(1, 6, 2), torch.rand(1, 6, 2))
    rule, starts = gated_delta_net.chunk_gated_delta_rule, torch.tensor([0, 2, 6])
    o, state = rule(*call, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert (o.shape, state.shape) == ((1, 6, 2, 4), (1, 2, 4, 4))
    with pytest.raises(ValueError, match="need flash-linear-attention"):
        rule(*call, output_final_state=True, cu_seqlens=starts)
    two = [torch.cat([t, t]) for t in call]
    with pytest.raises(ValueError, match="one row of tokens, got a batch of 2"):
        rule(*two, cu_seqlens=starts)
    x, weight = torch.randn(1, 6, 3), torch.randn(3, 4)
    with pytest.raises(ValueError, match="activation 'relu'"):
        gated_delta_net.causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match="need flash-linear-attention"):
        gated_delta_net.causal_conv1d(x, weight, output_final_state=True)
