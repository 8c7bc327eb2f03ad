"""Gradients of one rank's one micro-batch stay where the backward puts them: no fp32 buffer, nothing added.

Megatron adds each gradient to a buffer in fp32, 4 bytes for each parameter from the first step to the last:
the gradients of other micro-batches are summed in it, and other ranks reduce it. With one rank, and one
micro-batch in a step, nobody does either. Here ``main_grad`` is then the tensor that the backward has made, 2
bytes for each bf16 parameter, and is there from the backward of its layer to the beginning of the next step:
while a step has its most activations, next to none. Nothing is zeroed, added or copied, and the optimizer
reads bf16.

The numbers are those of ``--no-gradient-accumulation-fusion`` bit for bit, up to the order in which the
squares of the gradient norm are summed: upstream's buffer then holds the same bf16 numbers in fp32. With the
fusion, Megatron's default, gradients are not rounded to bf16; it is off where this is on. What a step is
asked for beyond this is served all the same: a second gradient of a parameter is added to the first in fp32,
a parameter without one has zeros, and NaN is looked for as in upstream's buckets.

Idle, and told so, with several ranks or micro-batches, with what steps on the buffer or overlaps its
reduction, under loss scales and CUDA graphs, beside Transformer Engine and Apex, and in programs without
Megatron's arguments, which may sum as many micro-batches as they like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.log import log_once
from accel.ops import l2_norm
from accel.patches._inner_masters import refused
from accel.patches._settings import first_given
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, flag_of, fused_adam_library

_HERE = "accel.patches.unbuffered_gradients"
_NAME = "unbuffered_gradients"
_INSTEAD = f"gradients stay where the backward puts them ({_NAME})"

_BUFFERED = {
    "use_distributed_optimizer": "the optimizer steps on the buffer",
    "use_layer_wise_distributed_optimizer": "the optimizer steps on the buffer",
    "use_megatron_fsdp": "FSDP has buffers of its own",
    "use_torch_fsdp2": "FSDP has buffers of its own",
    "overlap_grad_reduce": "buckets of the buffer are reduced",
    "overlap_param_gather": "buckets of the buffer are gathered into",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights are gathered into the buffer",
    "delay_wgrad_compute": "gradients come outside the backward",
    "calculate_per_token_loss": "gradients are scaled in fp32",
    "save_wgrads_interval": "gradients are saved in fp32",
    "loss_scale": "gradients are scaled in fp32",
    "cuda_graph_impl": "graphs have the buffer's addresses",
    "enable_cuda_graph": "graphs have the buffer's addresses",
    "external_cuda_graph": "graphs have the buffer's addresses",
    "fp8": "weights are no bf16",
    "fp4": "weights are no bf16",
    "perform_rl_step": "a step has any number of micro-batches",
    "rampup_batch_size": "steps come to have more micro-batches",
    "step_batch_size_schedule": "steps come to have more micro-batches",
    "accel_host_optimizer": "gradients travel in fp32",
    "yaml_cfg": "the model's configuration is made by another function",
    "accel_memory_budget": "its plan counts on gradients that are there",
}
"""Option of Megatron's, or wish -> why the buffer is needed."""


def buffered(context: Context) -> str | None:
    """Why gradients need upstream's buffer; None if they do not."""
    args = context.args
    if args is None:
        return "a program without Megatron's arguments says nothing of its micro-batches"
    if reason := refused(args):
        return reason
    if library := fused_adam_library():
        return f"{library} takes the norm of gradients, of tensors of one dtype"
    if (ranks := getattr(args, "world_size", 1)) > 1:
        return f"gradients are reduced among {ranks} ranks"
    whole, micro = getattr(args, "global_batch_size", 1), getattr(args, "micro_batch_size", 1)
    if whole != micro:
        return f"gradients of {whole // micro} micro-batches are summed"
    return _asked_of(args)


def _asked_of(owner: Any) -> str | None:
    """The option that needs the buffer, of arguments or a configuration."""
    option = first_given(_BUFFERED, owner)
    return option and f"{flag_of(option)}: {_BUFFERED[option]}"


@around
def without_fusion(configure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``core_transformer_config_from_args``."""
    config = configure(*args, **kwargs)
    config.gradient_accumulation_fusion = False
    return config


@around
def without_buffer(
    init: Callable[..., None],
    self: Any,
    config: Any,
    ddp_config: Any,
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wraps ``DistributedDataParallel.__init__``."""
    params = [p for p in module.parameters() if p.requires_grad]
    if reason := _is_needed(config, ddp_config, params):
        log_once(_NAME, f"a model has the buffer for its gradients: {reason}")
        init(self, config, ddp_config, module, *args, **kwargs)
        return
    for param in params:  # upstream makes buffers and hooks for those that are trained
        param.requires_grad_(False)
    try:
        init(self, config, ddp_config, module, *args, **kwargs)
    finally:
        for param in params:
            param.requires_grad_(True)
    self.__class__ = _unbuffered(self.__class__)
    self.accel_params = params
    for param in params:
        param.grad_added_to_main_grad = False
        param.register_post_accumulate_grad_hook(_keep)


def _is_needed(config: Any, ddp_config: Any, params: Sequence[Any]) -> str | None:
    """What the arguments do not say of a model."""
    from megatron.core import num_microbatches_calculator as batches

    if config.gradient_accumulation_fusion:
        return "its configuration asks for gradient_accumulation_fusion"
    if reason := _asked_of(config) or _asked_of(ddp_config):
        return reason
    if dtypes := {p.dtype for p in params} - {torch.bfloat16, torch.float32}:
        return f"parameters of {dtypes.pop()}"
    if (world := torch.distributed.get_world_size()) > 1:
        return f"{world} ranks"
    if batches._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return "an unknown number of micro-batches"
    if (count := batches.get_num_microbatches()) > 1:
        return f"{count} micro-batches"
    return None


class _Unbuffered:
    """Methods of a ``DistributedDataParallel`` that has no buffers."""

    accel_params: list[Any]
    ddp_config: Any

    def zero_grad_buffer(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad_buffer(*args, **kwargs)  # type: ignore[misc]
        self._drop()

    def offload_grad_buffers(self, *args: Any, **kwargs: Any) -> None:
        super().offload_grad_buffers(*args, **kwargs)  # type: ignore[misc]
        self._drop()

    def _drop(self) -> None:
        for param in self.accel_params:
            param.grad = None
            param.__dict__.pop("main_grad", None)  # upstream asks whether there is one
            param.grad_added_to_main_grad = False

    def scale_gradients(self, scaling_factor: float) -> None:
        for param in self.accel_params:
            param.main_grad = _gradient(param).float().mul_(scaling_factor)

    @torch.no_grad()
    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        super().finish_grad_sync(*args, **kwargs)  # type: ignore[misc]
        grads = [_gradient(param) for param in self.accel_params]
        nan, large = self.ddp_config.check_for_nan_in_grad, self.ddp_config.check_for_large_grads
        if grads and (nan or large):
            _check(grads, nan, large)


@functools.cache
def _unbuffered(upstream: type) -> type:
    """The class under its own name: a model that has it keeps it when accel is off again."""
    return type(upstream.__name__, (_Unbuffered, upstream), {"__module__": upstream.__module__})


def _keep(param: Any) -> None:
    """Takes over what the backward has accumulated into ``param.grad``."""
    grad, param.grad = param.grad, None
    first = not hasattr(param, "main_grad")
    param.main_grad = grad if first else param.main_grad.float().add_(grad)


def _gradient(param: Any) -> Tensor:
    if not hasattr(param, "main_grad"):
        param.main_grad = torch.zeros_like(param, requires_grad=False)
    grad: Tensor = param.main_grad
    return grad


def _check(grads: Sequence[Tensor], nan: bool, large: bool) -> None:
    """As ``_ParamAndGradBucketGroup.check_grads`` does for a bucket."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine, norm = get_rerun_state_machine(), l2_norm(grads)
    unexpectedly_large = functools.partial(
        machine.is_unexpectedly_large, threshold=10, context="grads"
    )
    checks = [("NaN", torch.isnan, True), ("Inf", torch.isinf, True)] if nan else []
    checks += [("unexpected large grads", unexpectedly_large, False)] if large else []
    for what, rejects, fatal in checks:
        machine.validate_result(
            result=norm,
            rejection_func=rejects,
            message=f"found {what} in local grad norm in backward pass",
            tolerance=0.001,  # upstream's
            fatal=fatal,
        )


FEATURE = Feature(
    name=_NAME,
    summary="leave the gradients of one rank's one micro-batch in bf16, where the backward puts them",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    requires=("shared_weights", "fused_adamw"),
    idle=buffered,
    relieves={"fused_weight_gradient": _INSTEAD, "fused_embedding_gradient": _INSTEAD},
    benchmarks=("step",),
    patches=(
        Patch(
            target="megatron.training.arguments:core_transformer_config_from_args",
            replacement=f"{_HERE}:without_fusion",
            how="wrap",
            why="With the fusion layers add their gradients to a buffer in fp32.",
        ),
        Patch(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            replacement=f"{_HERE}:without_buffer",
            how="wrap",
            why="Upstream makes a buffer in fp32 for gradients that nobody sums or reduces.",
        ),
    ),
)
