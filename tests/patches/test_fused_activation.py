"""The fused activations at Megatron's seams, against stock: MLPs and what a MoE's experts call."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.log import log_once
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import needs_native

HIDDEN, FFN = 48, 72
FUSIONS = "megatron.core.fusions"


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Stock's functions are compiled; the same operations without the compiler take no seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


pytestmark = [needs_native, pytest.mark.usefixtures("uncompiled")]


@contextmanager
def features(**wanted: bool) -> Iterator[None]:
    """Stock Megatron on this device, with these features alone."""
    accel.enable(preset="off", **wanted)
    try:
        yield
    finally:
        accel.disable()


def test_a_recomputations_leaf_is_not_overwritten() -> None:
    """`CheckpointWithoutOutput` computes again from leaves, where Transformer Engine has the layers."""
    with features(fused_activation=True, inplace_activation_grad=True):
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        leaf, probs = torch.randn(4, 2 * FFN, requires_grad=True), torch.rand(4, 1)
        kept = leaf.detach().clone()
        weighted_bias_swiglu_impl(leaf, None, probs).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.any()
    assert torch.equal(leaf, kept)


class Calls(TorchDispatchMode):
    """The names of all ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def on_both_sides(call: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype) -> None:
    """`call` gives all results in a dtype: ours are at most twice as far from fp64 as stock's."""
    with features():
        exact, stock = call(torch.float64), call(dtype)
    with features(fused_activation=True), Calls() as calls:
        ours = call(dtype)
    assert {"accel::activation_fwd", "accel::activation_bwd"} <= calls.names
    roundings = 16 if dtype == torch.float32 else 2  # bf16 computes in fp32 and rounds at the end
    for i, values in enumerate(zip(ours, stock, exact, strict=True)):
        assert_close_to_baseline(*values, name=f"result {i}", roundings=roundings)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """As much of a distributed job as Megatron's linear layers ask for."""
    from megatron.core import parallel_state, tensor_parallel

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with features():
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
    finally:
        torch.distributed.destroy_process_group()


def mlp_results(dtype: torch.dtype, with_scale: bool = False, **options: Any) -> list[Tensor]:
    """Output and every gradient of an MLP of the local spec, with random weights and biases."""
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        **options,
    )
    spec = get_mlp_module_spec(use_te=False)
    submodules = getattr(spec, "submodules", None) or spec.keywords["submodules"]
    mlp = MLP(config, submodules)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:  # rounded to what every dtype can hold
        return (torch.randn(shape, generator=generator) / 4).bfloat16().to(dtype)

    for parameter in mlp.parameters():
        parameter.data = random(*parameter.shape)
    x = (random(13, HIDDEN) if with_scale else random(7, 2, HIDDEN)).requires_grad_()
    scale = random(13).requires_grad_() if with_scale else None
    y, bias = mlp(x, per_token_scale=scale)
    y = y if bias is None else y + bias
    leaves = [x, *mlp.parameters(), *([] if scale is None else [scale])]
    return [y.detach(), *torch.autograd.grad(y, leaves, random(*y.shape))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": True},
        {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False},
        {"activation_func": F.gelu, "gated_linear_unit": True, "add_bias_linear": True},
        {"activation_func": F.gelu, "gated_linear_unit": True, "add_bias_linear": False},
        {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True},
    ],
    ids=["swiglu+bias", "swiglu", "geglu+bias", "geglu", "gelu+bias"],
)
def test_mlp(options: dict[str, Any], dtype: torch.dtype, one_rank: None) -> None:
    on_both_sides(lambda d: mlp_results(d, bias_activation_fusion=True, **options), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["swiglu", "quick_geglu", "squared_relu"])
def test_mlp_of_an_expert(kind: str, dtype: torch.dtype, one_rank: None) -> None:
    """The probabilities come in as per_token_scale, as in `SequentialMLP` of the local spec."""

    def results(d: torch.dtype) -> list[Tensor]:
        from megatron.core.activations import squared_relu
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        options: dict[str, Any] = {
            "swiglu": {"activation_func": F.silu},
            "squared_relu": {"activation_func": squared_relu},
            "quick_geglu": {
                "activation_func": quick_gelu,
                "glu_linear_offset": 0.5,
                "activation_func_clamp_value": 0.75,
            },
        }[kind]
        options["add_bias_linear"] = False
        fused = kind != "squared_relu"
        return mlp_results(
            d, True, gated_linear_unit=fused, bias_activation_fusion=fused, **options
        )

    on_both_sides(results, dtype)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("module", "name", "with_bias", "options"),
    [
        ("fused_weighted_squared_relu", "weighted_squared_relu_impl", None, ()),
        ("fused_bias_swiglu", "weighted_bias_swiglu_impl", False, ()),
        ("fused_bias_geglu", "weighted_bias_quick_geglu_impl", False, (False, 0.5, 0.75)),
        ("fused_bias_geglu", "weighted_bias_quick_geglu_impl", True, (False, 0.5)),
    ],
)
def test_what_grouped_experts_call(
    module: str, name: str, with_bias: bool | None, options: tuple, weights_dtype: torch.dtype
) -> None:
    def results(dtype: torch.dtype) -> list[Tensor]:
        impl = getattr(importlib.import_module(f"{FUSIONS}.{module}"), name)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator).bfloat16().to(dtype)

        x = (random(9, FFN) * 4 - 2).requires_grad_()
        weights = random(9, 1).to(dtype if dtype == torch.float64 else weights_dtype)
        weights.requires_grad_()
        bias = random(FFN).requires_grad_() if with_bias else None
        between = () if with_bias is None else (bias,)
        y = impl(x * 1, *between, weights, *options)
        leaves = [leaf for leaf in (x, bias, weights) if leaf is not None]
        return [y.detach(), *torch.autograd.grad(y, leaves, random(*y.shape))]

    on_both_sides(results, torch.bfloat16)


@pytest.mark.parametrize(
    ("module", "name", "arguments", "reason"),
    [
        ("fused_bias_swiglu", "bias_swiglu_impl", (None, True), "stored in fp8"),
        ("fused_bias_swiglu", "weighted_bias_swiglu_impl", (None, "w", True), "stored in fp8"),
        (
            "fused_bias_geglu",
            "weighted_bias_quick_geglu_impl",
            (None, "w", True),
            "stored in fp8",
        ),
        (
            "fused_bias_geglu",
            "weighted_bias_quick_geglu_impl",
            ("b", "w", False, 0.0, 0.5),
            "clamped before the bias",
        ),
        ("fused_bias_swiglu", "bias_swiglu_impl", ("fp64",), "a bias of torch.float64 is added"),
        ("fused_bias_geglu", "bias_geglu_impl", ("fp64",), "a bias of torch.float64 is added"),
        ("fused_bias_gelu", "bias_gelu_impl", ("fp64",), "a bias of torch.float64 is added"),
    ],
)
def test_what_upstream_alone_can_do_runs_upstream_and_says_so_once(
    module: str,
    name: str,
    arguments: tuple,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = {"w": torch.rand(5, 1), "b": torch.randn(16), "fp64": torch.randn(16).double()}
    arguments = tuple(tensors.get(a, a) if isinstance(a, str) else a for a in arguments)

    def result() -> list[Tensor]:
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = getattr(importlib.import_module(f"{FUSIONS}.{module}"), name)(x * 1, *arguments)
        return [y.detach(), *torch.autograd.grad(y.sum(), x)]

    stock = result()
    log_once.cache_clear()
    with features(fused_activation=True), caplog.at_level(logging.WARNING, logger="accel"):
        ours = [result(), result()]
    assert all(torch.equal(a, b) for got in ours for a, b in zip(got, stock, strict=True))
    (said,) = [r.message for r in caplog.records if name in r.message]
    assert reason in said


def test_offloaded_input_runs_upstream() -> None:
    """Transformer Engine looks for a mark on what was saved: upstream's function sets it."""
    swiglu = importlib.import_module(f"{FUSIONS}.fused_bias_swiglu")
    marks: list[bool] = []

    def pack(saved: Tensor) -> Tensor:
        marks.append(getattr(saved, "activation_offloading", False))
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with features(fused_activation=True), hooks:
        swiglu.bias_swiglu_impl(torch.randn(5, 16, requires_grad=True), None, False, True)
    assert marks == [True]


def test_bias_of_grouped_experts_is_upstreams_error() -> None:
    swiglu = importlib.import_module(f"{FUSIONS}.fused_bias_swiglu")
    refuses = pytest.raises(NotImplementedError, match="Bias is not supported")
    with features(fused_activation=True), refuses:
        swiglu.weighted_bias_swiglu_impl(torch.randn(5, 16), torch.zeros(16), torch.rand(5, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_in_place_changes_no_bit(dtype: torch.dtype, one_rank: None) -> None:
    from accel.patches import fused_activation

    options = {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": True}

    def results() -> list[Tensor]:
        return mlp_results(dtype, bias_activation_fusion=True, **options)

    found = []
    for inplace in (False, True):
        with features(fused_activation=True, inplace_activation_grad=inplace):
            assert fused_activation.inplace_grad() is inplace
            found.append(results())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_gradient_is_never_written_over_a_leaf() -> None:
    swiglu = importlib.import_module(f"{FUSIONS}.fused_bias_swiglu")
    leaf = torch.randn(5, 16, requires_grad=True)
    kept = leaf.detach().clone()
    with features(fused_activation=True, inplace_activation_grad=True):
        for x in (leaf, leaf[:2]):
            swiglu.bias_swiglu_impl(x, None).sum().backward()
    assert torch.equal(leaf.detach(), kept)


def test_idle_where_nothing_is_fused() -> None:
    from types import SimpleNamespace

    from accel.feature import Context
    from accel.patches.fused_activation import _nothing_fused

    def reason(**args: Any) -> str | None:
        defaults = {"swiglu": False, "squared_relu": False}
        both = {"bias_swiglu_fusion": True, "bias_gelu_fusion": True}
        return _nothing_fused(Context("cpu", "0.19.2", SimpleNamespace(**defaults | both | args)))

    assert reason() is None
    assert reason(swiglu=True, bias_gelu_fusion=False) is None
    assert reason(bias_gelu_fusion=False, squared_relu=True) is None
    assert "not fused" in str(reason(swiglu=True, bias_swiglu_fusion=False))
    assert "not fused" in str(reason(bias_gelu_fusion=False))
    assert _nothing_fused(Context("cpu", "0.19.2")) is None


@pytest.mark.parametrize(
    ("module", "name", "between"),
    [
        ("fused_weighted_squared_relu", "weighted_squared_relu_impl", ()),
        ("fused_bias_swiglu", "weighted_bias_swiglu_impl", (None,)),
        ("fused_bias_geglu", "weighted_bias_quick_geglu_impl", (None,)),
    ],
)
def test_probabilities_in_fp64(module: str, name: str, between: tuple) -> None:
    """``--moe-router-dtype fp64``."""

    def results(weights_dtype: torch.dtype) -> list[Tensor]:
        impl = getattr(importlib.import_module(f"{FUSIONS}.{module}"), name)
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(9, FFN, generator=draw).bfloat16().requires_grad_()
        weights = torch.rand(9, 1, generator=draw).to(weights_dtype).requires_grad_()
        y = impl(x * 1, *between, weights)
        grads = torch.autograd.grad(y.float().sum(), [x, weights])
        assert [t.dtype for t in (y, *grads)] == [torch.bfloat16, torch.bfloat16, weights_dtype]
        return [t.detach().float() for t in (y, *grads)]

    with features(fused_activation=True):
        wide, narrow = results(torch.float64), results(torch.float32)
    for one, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
