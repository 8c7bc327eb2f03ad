"""``--optimizer adam`` in one pass over memory, which clips its gradients too.

Without Apex and Transformer Engine, Megatron steps with torch's ``AdamW`` (``Adam`` where
``OptimizerConfig.decoupled_weight_decay`` is off), a loop of some ten passes over each parameter, and
clips with three more. Here a step is ``accel.ops.adamw``: gradient, both moments and the master weight
are read once and written once, all parameters of a group in one call. Where the model is in bf16 or
fp16 the same pass writes its weights, so Megatron's copy of main to model parameters falls away;
likewise for the distributed optimizer's shards. The gradient norm is one pass (``accel.ops.l2_norm``), and
clipping none: the step multiplies by the coefficient as it reads (``accel.memory.clip_in_step``), and leaves
``main_grad`` as it was.

The optimizer remains torch's in everything but ``step``: same class hierarchy, same ``state`` (``step``,
``exp_avg``, ``exp_avg_sq``), same ``param_groups``. Checkpoints of every format move both ways. The order
of operations is torch's too; results differ by the rounding of fused multiply-adds, and by the order in
which the squares of the norm are summed.

Left to torch, with a line in the log: ``amsgrad``, ``maximize``, ``capturable``, and learning rates that are
tensors. ``--optimizer-cpu-offload`` builds optimizers of its own, which are not touched. Clipping is a pass
of its own (``accel.ops.scale``) for these, and where one optimizer clips by different norms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.memory.clip_in_step import ClipsInStep, clip_in_step
from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.ops import adamw, l2_norm
from accel.ops import scale as scale_all
from accel.ops._dispatch import log_fallback
from accel.patches._inner_masters import CLIPPING, want
from accel.patches._kernels import kernels
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, fused_adam_installed

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_HERE = "accel.patches.fused_adamw"


FEATURE = Feature(
    name="fused_adamw",
    summary="step Adam and AdamW, clip and cast in one pass over memory",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    aside=fused_adam_installed,
    benchmarks=("adamw",),
    unavailable=kernels("adamw_", "l2_norm", "scale_"),
    switch_on=functools.partial(want, CLIPPING, True),
    patches=(
        Patch(
            target=f"{_OPTIMIZER}:MegatronOptimizer.__init__",
            replacement=f"{_HERE}:with_fused_step",
            how="wrap",
            why="Every Megatron optimizer takes its torch optimizer here, before it looks at it.",
        ),
        Patch(
            target=f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads",
            replacement=f"{_HERE}:writing_model_params",
            how="wrap",
            why="The step is told where the weights of the model are, and writes them in its pass.",
        ),
        Patch(
            target=f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
            replacement=f"{_HERE}:copying_what_is_left",
            how="wrap",
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "6c28b071f2b1"),
            why="The step has written the weights of the model already.",
        ),
        Patch(
            target=f"{_DISTRIBUTED}._copy_main_params_to_model_params",
            replacement=f"{_HERE}:copying_what_is_left",
            how="wrap",
            sources={"0.17.1": "31e81288f3fe", "0.18.2": "4a9ee74491d2", "0.19.2": "4a9ee74491d2"},
            why="The step has written this rank's shards of the model's weights already.",
        ),
        Patch(
            target="megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
            replacement=f"{_HERE}:clipping_in_the_step",
            how="wrap",
            sources={"0.17.1": "90a7d6c8eb50", "0.18.2": "cf07b488fb76", "0.19.2": "cf07b488fb76"},
            why="A step that scales what it reads needs no pass of its own for that.",
        ),
        *(
            Patch(
                target=f"{_OPTIMIZER}:MegatronOptimizer.{name}",
                replacement=f"{_HERE}:clipped_before",
                how="wrap",
                why="A norm that is taken between clipping and the step is that of clipped gradients.",
                optional=True,  # the first until 0.18, the second from 0.19 on
            )
            for name in ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")
        ),
        Patch(
            target="megatron.core.utils:local_multi_tensor_l2_norm",
            replacement=f"{_HERE}:multi_tensor_l2_norm",
            expects=("chunk_size", "noop_flag", "tensor_lists", "per_tensor", "args"),
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "01526c55444a"),
            why="Upstream takes the norm of each tensor by itself; one call sums all squares.",
        ),
        Patch(
            target="megatron.core.utils:local_multi_tensor_scale",
            replacement=f"{_HERE}:multi_tensor_scale",
            expects=("chunk_size", "noop_flag", "tensor_lists", "scale"),
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "a271d86b6125"),
            why="Upstream multiplies into a temporary and copies it back, tensor by tensor.",
        ),
    ),
)


class _OnePassStep(ClipsInStep, torch.optim.Adam):
    """What ``FusedAdam`` and ``FusedAdamW`` share: ``step`` as one call for each parameter group."""

    model_copies: dict[int, Tensor]
    """Address of a main parameter -> the weight in the model that is written along with it; filled
    for the length of a step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale = self.grad_scale()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group, grad_scale)
        self.has_clipped()
        return loss

    def _step_group(self, group: dict[str, Any], grad_scale: Tensor | None) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        exp_avg_sqs: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, params, grads, exp_avgs, exp_avg_sqs, [], steps)
        step = functools.partial(
            adamw,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            grad_scale=grad_scale,
        )
        copies = self.model_copies
        rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True))
        for copied in (True, False):
            if some := [row for row in rows if (row[0].data_ptr() in copies) is copied]:
                w, g, m, v, t = zip(*some, strict=True)
                step(w, g, m, v, t, [copies[p.data_ptr()] for p in w] if copied else [])


class FusedAdam(_OnePassStep):
    """``torch.optim.Adam`` that steps by ``accel.ops.adamw``."""


class FusedAdamW(_OnePassStep, torch.optim.AdamW):
    """``torch.optim.AdamW`` that steps by ``accel.ops.adamw``."""


_FUSED = {torch.optim.Adam: FusedAdam, torch.optim.AdamW: FusedAdamW}


def unsupported_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer keeps torch's step; None if it can have ours."""
    if type(optimizer) not in _FUSED:
        return f"the optimizer is a {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused"):
            if group[option]:
                return f"the optimizer was built with {option}={group[option]}"
        if any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"])):
            return "the learning rate or a beta is a tensor"
        if others := {type(p) for p in group["params"]} - {Tensor, torch.nn.Parameter}:
            return f"parameters of type {others.pop().__name__}"
    return None


@around
def with_fused_step(
    init: Callable[..., None],
    self: Any,
    optimizer: Any,
    config: Any,
    init_state_fn: Callable = lambda x: None,
) -> None:
    if isinstance(optimizer, torch.optim.Adam) or (optimizer and config.optimizer == "adam"):
        _fuse(optimizer)
    init(self, optimizer, config, init_state_fn)


def _fuse(optimizer: Any) -> None:
    """Give an Adam our step. It stays the same object, for others hold it already."""
    if isinstance(optimizer, _OnePassStep | PrecisionAwareAdam):
        return
    if reason := unsupported_reason(optimizer):
        log_fallback("fused_adamw", reason)
        return
    optimizer.__class__ = _FUSED[type(optimizer)]
    optimizer.model_copies = {}
    optimizer._patch_step_function()  # torch's hooks and profiler ranges, as after its __init__
    optimizer.can_clip_in_step()


@around
def writing_model_params(step: Callable[[Any], bool], self: Any) -> bool:
    if not isinstance(self.optimizer, _OnePassStep) or not _copies_are_plain(self):
        return step(self)
    self.optimizer.model_copies = {
        main.data_ptr(): copy
        for main, copy in _main_and_model_params(self)
        if main.numel() and main.data_ptr() != copy.data_ptr()
    }
    try:
        return step(self)
    finally:
        self.optimizer.model_copies = {}


@around
def copying_what_is_left(copy: Callable[[Any], None], self: Any) -> None:
    """After a step that wrote the model's weights: only those without a gradient, which it left out."""
    copies = getattr(self.optimizer, "model_copies", None)
    if not copies:
        return copy(self)
    for group in self.optimizer.param_groups:
        for main in group["params"]:
            if main.grad is None and main.data_ptr() in copies:
                copies[main.data_ptr()].copy_(main)


def _copies_are_plain(self: Any) -> bool:
    """Whether Megatron would just copy: no quantized weights, no weights kept elsewhere."""
    ddp_config = getattr(self, "ddp_config", None)
    special = ("use_megatron_fsdp", "fp8_param_gather", "fp4_param_gather")
    return not (
        self.is_stub_optimizer
        or self.config.use_precision_aware_optimizer
        or self.config.reuse_grad_buf_for_mxfp8_param_ag
        or any(getattr(ddp_config, option, False) for option in special)
    )


def _main_and_model_params(self: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each main parameter and the memory that Megatron would copy it to."""
    if not hasattr(self, "model_param_gbuf_map"):
        model, main = self._get_model_and_main_params_data_float16()
        yield from zip(main, model, strict=True)
        return
    for main_groups, model_groups in (
        (self.shard_fp32_from_float16_groups, self.model_float16_groups),
        (self.shard_fp32_groups, self.model_fp32_groups),
    ):
        for main_group, model_group in zip(main_groups, model_groups, strict=True):
            for main, model in zip(main_group, model_group, strict=True):
                shard = self._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                buffer, _, bucket = self.model_param_gbuf_map[model]
                data = self.buffers[buffer].buckets[bucket].param_data
                yield main, data.view(-1)[shard.start : shard.end]


@around
def clipping_in_the_step(
    clip: Callable[..., None],
    parameters: Any,
    max_norm: float,
    total_norm: Any,
    use_decoupled_grad: bool = False,
) -> None:
    if isinstance(parameters, list):
        coefficient = max_norm / (total_norm + 1.0e-6)
        if isinstance(coefficient, Tensor):  # Transformer Engine's norm, which nobody has read yet
            coefficient = coefficient.clamp(max=1.0)
        if clip_in_step(parameters, coefficient, use_decoupled_grad):
            return
    clip(parameters, max_norm, total_norm, use_decoupled_grad)


@around
def clipped_before(grads: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """For a program that clips by a number of its own before the step, which clips by Megatron's."""
    if isinstance(self.optimizer, ClipsInStep):
        self.optimizer.clip_now()
    return grads(self, *args, **kwargs)


def multi_tensor_l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list, per_tensor: bool, *args: Any
) -> tuple[Tensor, None]:
    """The norm of all tensors of all lists, shape ``[1]``; as upstream, never one for each tensor."""
    tensors = [t.detach() for tensors in tensor_lists for t in tensors]
    return l2_norm(tensors).view(1), None


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list, scale: float
) -> None:
    """``target = source * scale`` for two lists of tensors."""
    sources, targets = tensor_lists
    scale_all([t.detach() for t in sources], [t.detach() for t in targets], scale)
