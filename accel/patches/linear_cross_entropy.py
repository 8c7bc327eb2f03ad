"""The output layer and its loss without ever holding the logits: ``--accel-linear-cross-entropy``.

For a long sequence and a large vocabulary the logits are the largest tensors of a training step:
``tokens x vocabulary``, in 16 bits and once more as their gradient. Here the output layer hands its
input on as it is, and the loss makes the logits piece by piece, in the forward and a second time in
the backward; what is held at a time is a few MiB, whatever the number of tokens. The price is that
second product: 8 flops where Megatron needs 6, a third more time in the output layer and its loss,
which is why only the preset ``max`` turns it on.

Works with tensor and sequence parallelism, tied embeddings, pipeline stages and
``--gradient-accumulation-fusion`` (the weight gradient then goes straight into ``main_grad``, in
fp32). Hooks on the output layer's input, such as those of ``--overlap-param-gather``, run as ever.

Whoever needs whole logits gets them, and one line says why: multi-token prediction (it counts
accepted tokens from its logits), ``--defer-embedding-wgrad-compute``, muP's scaled logits, Megatron
FSDP, ``config_logger_dir``, gathered logits, an output layer with a bias, in fp8, or with hooks on
its output, and losses of your own that were set on the model. Hybrid models are served as GPTs are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.feature import Feature
from accel.ops import linear_cross_entropy
from accel.ops._dispatch import log_fallback
from accel.parallel.linear import weight_gradient_added
from accel.patches._kernels import kernels
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


@dataclass(frozen=True)
class Projection:
    """Logits that have not been made: what the output layer was called with."""

    layer: Any
    hidden: Tensor
    """``[s, b, h]``, or this rank's ``[s / tp, b, h]`` in sequence parallel."""
    weight: Any
    """``[v, h]``, a parameter."""

    def loss(self, target: Tensor, ignore_index: int | None = None) -> Tensor:
        """``[s, b]`` fp32 for tokens ``[s, b]``, as ``vocab_parallel_cross_entropy`` of the logits; 0 for
        `ignore_index`.

        Communication is that of ``ColumnParallelLinear``, by Megatron's own functions.
        """
        from megatron.core.tensor_parallel import mappings

        layer, hidden, weight, buffer = self.layer, self.hidden, self.weight, None
        group = layer.tp_group
        if layer.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=group)
        elif layer.allreduce_dgrad:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=group)
        if _goes_to_main_grad(layer, weight):
            buffer = weight.main_grad
            weight = _AddedToMainGrad.apply(weight)
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            group=group if group.size() > 1 else None,
            ignore_index=ignore_index,
            check_target=False,
            grad_buffer=buffer,
        )


class _AddedToMainGrad(torch.autograd.Function):
    """Identity of a weight whose gradient somebody adds to ``main_grad``; tells Megatron's hooks so.

    As ``LinearWithGradAccumulationAndAsyncCommunication.backward``: the hooks run only if autograd
    sees a gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: None) -> Tensor | None:
        return weight_gradient_added(ctx.weight)


def _goes_to_main_grad(layer: Any, weight: Any) -> bool:
    return (
        layer.gradient_accumulation_fusion
        and weight.requires_grad
        and getattr(weight, "main_grad", None) is not None
    )


def defers_logits(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``GPTModel._postprocess`` and ``HybridModel.forward``: the output layer promises logits where
    they become a loss."""
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs).arguments
        if not self.post_process or call.get("labels") is None:
            return upstream(self, *args, **kwargs)  # no loss here
        if reason := whole_logits_needed(self, call):
            log_fallback("linear_cross_entropy", reason)
            return upstream(self, *args, **kwargs)
        with _promising(self.output_layer):
            return upstream(self, *args, **kwargs)

    return postprocess


@contextlib.contextmanager
def _promising(layer: Any) -> Iterator[None]:
    """Within, calling the layer returns a `Projection`; its hooks on the way in run as ever."""

    def forward(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Projection, None]:
        return Projection(layer, input_, layer.weight if weight is None else weight), None

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@around
def takes_promises(
    upstream: Callable[..., Tensor], self: Any, labels: Tensor, logits: Tensor | Projection
) -> Tensor:
    """Wraps ``LanguageModule.compute_language_model_loss``."""
    if not isinstance(logits, Projection):
        return upstream(self, labels, logits)
    # Transformer Engine's loss is 0 there, Megatron's own two are not
    fusion = self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl
    loss = logits.loss(labels.transpose(0, 1).contiguous(), -100 if fusion == "te" else None)
    return loss.transpose(0, 1).contiguous()


def whole_logits_needed(model: Any, call: dict[str, Any]) -> str | None:
    """Why this call of what `defers_logits` wraps must see its logits; None if it need not."""
    from megatron.core.config_logger import has_config_logger_enabled
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def overridden(name: str) -> bool:
        own = getattr(type(model), name, None)
        return name in vars(model) or own is not getattr(LanguageModule, name, None)

    config = model.config
    reasons = {
        "multi-token prediction reads whole logits": config.mtp_num_layers,
        "muP scales whole logits": config.use_mup and config.mup_output_mult != 1.0,
        "defer_embedding_wgrad_compute keeps the gradient of whole logits": (
            config.defer_embedding_wgrad_compute
        ),
        "config_logger_dir writes whole logits": has_config_logger_enabled(config),
        "an output_processor takes them": call.get("output_processor") is not None,
        "the model has a loss of its own": overridden("compute_language_model_loss"),
        "the model scales its logits in a way of its own": overridden("_scale_logits"),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    layer, tied = model.output_layer, model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else layer.weight
    return found or _layer_needs_logits(layer, weight, call.get("runtime_gather_output"))


def _layer_needs_logits(layer: Any, weight: Any, gather: bool | None) -> str | None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    gathers = layer.gather_output if gather is None else gather
    main_grad = weight.main_grad if _goes_to_main_grad(layer, weight) else None
    reasons = {
        f"the output layer is a {type(layer).__name__}": type(layer) is not ColumnParallelLinear,
        "the output layer has a bias": layer.bias is not None,
        "the output layer gathers its logits": gathers and layer.tp_group.size() > 1,
        "the output layer has a forward of its own": "forward" in vars(layer),
        "hooks read what the output layer returns": bool(layer._forward_hooks),
        "hooks read the output layer's gradients": bool(
            layer._backward_hooks or layer._backward_pre_hooks
        ),
        "the output layer's weight is sharded once more": getattr(layer, "gtp_remat_size", 1) > 1,
        "Megatron FSDP shards the weight": hasattr(weight, "__fsdp_param__"),
        "main_grad is not float32": main_grad is not None and main_grad.dtype != torch.float32,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


FEATURE = Feature(
    name="linear_cross_entropy",
    summary="make the logits piece by piece inside the loss, never whole (less memory, more flops)",
    preset="max",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("linear_cross_entropy",),
    unavailable=kernels("cross_entropy_stats"),
    conflicts={
        "mtp_num_layers": "multi-token prediction counts accepted tokens from whole logits",
        "defer_embedding_wgrad_compute": "it keeps the gradient of whole logits",
        "use_megatron_fsdp": "the output layer's weight is gathered inside the layer",
    },
    patches=(
        Patch(
            target="megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
            replacement="accel.patches.linear_cross_entropy:defers_logits",
            how="wrap",
            sources={"0.17.1": "fea0b9db2863", "0.18.2": "07baa135dd28", "0.19.2": "3334bfa66f26"},
            why="Upstream makes all logits and then their loss; here the loss makes them in pieces.",
        ),
        Patch(
            target="megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
            replacement="accel.patches.linear_cross_entropy:defers_logits",
            how="wrap",
            sources={"0.18.2": "1d616c7b6e58", "0.19.2": "44f9659a4e9c"},
            why="As GPTModel._postprocess, in hybrid models.",
            optional=True,
        ),
        Patch(
            target="megatron.core.models.mamba.mamba_model:MambaModel.forward",
            replacement="accel.patches.linear_cross_entropy:defers_logits",
            how="wrap",
            sources={"0.17.1": "25cc9677067a", "0.18.2": "1d616c7b6e58", "0.19.2": "44f9659a4e9c"},
            why="What 0.17 calls HybridModel; later a class derived from it.",
            optional=True,
        ),
        Patch(
            target="megatron.core.models.common.language_module.language_module"
            ":LanguageModule.compute_language_model_loss",
            replacement="accel.patches.linear_cross_entropy:takes_promises",
            how="wrap",
            why="It is given the output layer's input and weight in place of logits.",
        ),
    ),
)
