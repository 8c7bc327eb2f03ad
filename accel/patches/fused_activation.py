"""SwiGLU, GEGLU, bias + GELU and squared ReLU as one kernel each, forward and backward.

Megatron's fused activations are ``torch.compile`` of a chain of operations: each shape is compiled
anew, and the gradient of the bias is a second pass over a tensor of the size of the input. Here
``accel.ops`` computes each of them in one pass, in fp32, rounded once, with the bias's and the
routing probabilities' gradients on the way. Every gradient stays within twice the error of torch in
the same dtype.

It serves what Megatron itself fuses, with Megatron's own flags as the switch: ``--swiglu`` (unless
``--no-bias-swiglu-fusion``), GELU and GEGLU with ``--bias-gelu-fusion`` (Megatron's default),
``--quick-geglu``, the same with routing probabilities in a MoE's experts, and
``--squared-relu`` in either.

Where Megatron does not call a function of its own there is nothing to replace: with
``--no-bias-swiglu-fusion`` or ``--no-bias-gelu-fusion`` the activation runs inside ``MLP.forward`` as
torch operations. Upstream's own function runs, and a log line says so once, for an input that is to
be stored in fp8 or offloaded, for a clamp value together with a bias (upstream clamps before it adds), and
for a bias of another dtype, as under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel import ops
from accel.feature import Context, Feature
from accel.ops._dispatch import log_fallback
from accel.ops._overwriting import overwritable
from accel.patches._kernels import kernels
from accel.patching import Patch
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE

Activation = Callable[..., Tensor]


def inplace_grad() -> bool:
    """Whether the gradient overwrites fc1's output; ``inplace_activation_grad`` says yes."""
    return False


def _inplace(input: Tensor) -> bool:
    """Not over a leaf, as upstream's own recomputation makes of fc1's output, nor a view of one."""
    if not inplace_grad() or torch.compiler.is_compiling():
        return False
    return overwritable(input) is None


def wrap_bias_swiglu(upstream: Activation) -> Activation:
    def bias_swiglu_impl(
        input: Tensor,
        bias: Tensor | None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> Tensor:
        reason = _not_stored_as_it_is(fp8_input_store, cpu_offload_input)
        if reason := reason or _of_two_dtypes(input, bias):
            log_fallback("bias_swiglu_impl", reason)
            return upstream(input, bias, fp8_input_store, cpu_offload_input)
        return ops.swiglu(input, bias, inplace_grad=_inplace(input))

    return bias_swiglu_impl


def wrap_weighted_bias_swiglu(upstream: Activation) -> Activation:
    def weighted_bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
    ) -> Tensor:
        if bias is not None:  # upstream raises: a grouped expert's bias is a list
            return upstream(input, bias, weights, fp8_input_store)
        if reason := _not_stored_as_it_is(fp8_input_store):
            log_fallback("weighted_bias_swiglu_impl", reason)
            return upstream(input, bias, weights, fp8_input_store)
        return ops.swiglu(input, None, weights, inplace_grad=_inplace(input))

    return weighted_bias_swiglu_impl


def wrap_bias_geglu(upstream: Activation) -> Activation:
    def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
        if reason := _of_two_dtypes(input, bias):
            log_fallback("bias_geglu_impl", reason)
            return upstream(input, bias)
        return ops.geglu(input, bias, inplace_grad=_inplace(input))

    return bias_geglu_impl


def wrap_weighted_bias_quick_geglu(upstream: Activation) -> Activation:
    def weighted_bias_quick_geglu_impl(
        input: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        fp8_input_store: bool = False,
        linear_offset: float = 0.0,
        clamp_value: float | None = None,
    ) -> Tensor:
        reason = _not_stored_as_it_is(fp8_input_store) or _of_two_dtypes(input, bias)
        if bias is not None and clamp_value is not None:
            reason = "the input is to be clamped before the bias is added"
        if reason:
            log_fallback("weighted_bias_quick_geglu_impl", reason)
            return upstream(input, bias, weights, fp8_input_store, linear_offset, clamp_value)
        return ops.geglu(
            input,
            bias,
            weights,
            approximate="quick",
            clamp_value=clamp_value,
            offset=linear_offset,
            inplace_grad=_inplace(input),
        )

    return weighted_bias_quick_geglu_impl


def wrap_bias_gelu(upstream: Activation) -> Activation:
    def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
        if reason := _of_two_dtypes(input, bias):
            log_fallback("bias_gelu_impl", reason)
            return upstream(input, bias)
        return ops.bias_gelu(input, bias, inplace_grad=_inplace(input))

    return bias_gelu_impl


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    return ops.squared_relu(input, None, weights, inplace_grad=_inplace(input))


def squared_relu(x: Tensor) -> Tensor:
    return ops.squared_relu(x)


def _not_stored_as_it_is(fp8_input_store: bool, cpu_offload_input: bool = False) -> str | None:
    if fp8_input_store:
        return "the input is to be stored in fp8"
    if cpu_offload_input:
        return "the input is to be offloaded by Transformer Engine"
    return None


def _of_two_dtypes(input: Tensor, bias: Tensor | None) -> str | None:
    if bias is None or bias.dtype == input.dtype:
        return None
    return f"a bias of {bias.dtype} is added to {input.dtype}, as under autocast"


def _nothing_fused(context: Context) -> str | None:
    args: Any = context.args
    if not hasattr(args, "swiglu") or getattr(args, "squared_relu", False):
        return None
    fused = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    return None if fused else "the activation is not fused: --no-bias-swiglu-fusion and the like"


_FUSIONS = "megatron.core.fusions"
_WHY = "One kernel for the activation and all its gradients, in place of compiled operations."


def _patch(
    target: str, replacement: str, source: str, expects: tuple[str, ...], **how: Any
) -> Patch:
    return Patch(
        target=target,
        replacement=f"accel.patches.fused_activation:{replacement}",
        expects=expects,
        sources=dict.fromkeys(SUPPORTED_MEGATRON, source),
        why=_WHY,
        **how,
    )


FEATURE = Feature(
    name="fused_activation",
    summary="run SwiGLU, GEGLU, bias + GELU and squared ReLU as one kernel each",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("swiglu", "geglu", "bias_gelu", "squared_relu"),
    unavailable=kernels("activation_fwd"),
    idle=_nothing_fused,
    patches=(
        _patch(
            f"{_FUSIONS}.fused_bias_swiglu:bias_swiglu_impl",
            "wrap_bias_swiglu",
            "af184648d911",
            ("input", "bias", "fp8_input_store", "cpu_offload_input"),
            how="wrap",
        ),
        _patch(
            f"{_FUSIONS}.fused_bias_swiglu:weighted_bias_swiglu_impl",
            "wrap_weighted_bias_swiglu",
            "4986d1ef4d0d",
            ("input", "bias", "weights", "fp8_input_store"),
            how="wrap",
        ),
        _patch(
            f"{_FUSIONS}.fused_bias_geglu:bias_geglu_impl",
            "wrap_bias_geglu",
            "e938d2fb24a4",
            ("input", "bias"),
            how="wrap",
        ),
        _patch(
            f"{_FUSIONS}.fused_bias_geglu:weighted_bias_quick_geglu_impl",
            "wrap_weighted_bias_quick_geglu",
            "7a23f78fb682",
            ("input", "bias", "weights", "fp8_input_store", "linear_offset", "clamp_value"),
            how="wrap",
        ),
        _patch(
            f"{_FUSIONS}.fused_weighted_squared_relu:weighted_squared_relu_impl",
            "weighted_squared_relu_impl",
            "fe2e2a320e75",
            ("input", "weights"),
        ),
        _patch("megatron.core.activations:squared_relu", "squared_relu", "881a92f170e1", ("x",)),
        Patch(  # upstream's is a bound `autograd.Function.apply`: no parameters of its own to expect
            target=f"{_FUSIONS}.fused_bias_gelu:bias_gelu_impl",
            replacement="accel.patches.fused_activation:wrap_bias_gelu",
            how="wrap",
            why=_WHY,
        ),
    ),
)
