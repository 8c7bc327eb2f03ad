"""The residual addition and the RMSNorm behind it as one kernel, forward and backward.

What a layer adds to the residual stream is read by a norm: that before its MLP, that of the next layer, or
the last one. With ``fused_norm``, both are one kernel that reads the stream once. In the backward pass the
gradient that comes past the norm is added where the norm's is computed. The results have the very bits of the
two steps. Which norm reads which sum is learnt from the first forward pass, so that it serves both layer
specs, whose norms are modules or parts of linear layers, the norm behind the last layer, and hybrid models.

Where dropout is on, the stream is kept in fp32 (``--fp32-residual-connection``), or a layer is computed again
as a whole, so that its norm reads a copy, the two are computed apart. So they are within ``torch.compile``,
and where hooks take what autograd saves: within ``torch.utils.checkpoint(..., use_reentrant=False)``, which
must save the same tensors again, and with ``--cpu-offloading-num-layers`` in all layers. **Not with** norms
that are recomputed or whose inputs are swapped, with ``--overlap-param-gather`` and FSDP, where a norm's
weight may not be there yet when the sum before it is computed, and with CUDA graphs; in a program that has no
command line, each layer's configuration and the wrappers of the model are asked.

A layer's output, as ``torch.autograd.grad`` is given it, has the gradient that comes past the next norm, not
that through it. Where the output has a hook, or keeps its gradient, when the next norm reads it, that norm is
computed again, and from the next pass on the two apart: the gradient is whole. A hook that is set later sees
what comes past the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.feature import Context, Feature
from accel.layers.residual import GATHERED_LATE, ResidualSum, norm_of
from accel.log import log_once
from accel.patches._kernels import kernels
from accel.patches._layers import MAMBA_LAYER, TRANSFORMER_LAYER
from accel.patches._settings import first_given
from accel.patching import Patch, around
from accel.slot import Slot
from accel.upstream import SUPPORTED_RANGE, flag_of, te_serves

_HERE = "accel.patches.fused_add_norm"
SUMS = ("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda")
"""A ``TransformerLayer``'s, and a ``MambaLayer``'s."""

_ON = Slot[bool]()


class AddThenNorm:
    """What a layer has in place of ``get_bias_dropout_add``.

    Args:
        stock: that.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock, self.sum = stock, ResidualSum()

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        plain = self.stock(training, fused)

        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            if not _ON or (training and prob):
                return plain(x_with_bias, residual, prob)
            total = self.sum.add(*x_with_bias, residual)
            if total is None:
                return self.sum.watch(plain(x_with_bias, residual, prob), x_with_bias[0])
            return total

        return add


@around
def with_sums(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps a layer's ``__init__``."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    init(self, *args, **kwargs)
    if reason := _unfit(self.config):
        log_once("fused_add_norm", f"sums and norms are computed apart: {reason}")
        return
    for name in SUMS:
        if hasattr(self, name) and getattr(self, name) is get_bias_dropout_add:
            setattr(self, name, AddThenNorm(get_bias_dropout_add))


@around
def gathering_late(upstream: Callable[..., None], self: Any) -> None:
    """Wraps ``DistributedDataParallel.enable_forward_pre_hook``: a weight comes when its own module runs."""
    if _ON:
        log_once(
            "fused_add_norm",
            "sums and norms are computed apart: parameters are gathered beside the forward pass",
        )
    for param in self.module.parameters():
        setattr(param, GATHERED_LATE, True)
    upstream(self)


@around
def finding_it(
    original: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """Wraps ``rms_norm``."""
    found = norm_of(x, weight, eps, zero_centered)
    return original(x, weight, eps, zero_centered=zero_centered) if found is None else found


def _refuses(context: Context) -> str | None:
    late = ("overlap_param_gather", "use_megatron_fsdp", "use_torch_fsdp2")
    if option := first_given(late, context.args):
        return f"{flag_of(option)}: a norm's weight may come after the sum before it is computed"
    return _unfit(context.args)


def _unfit(options: Any) -> str | None:
    """Why not with these, of the command line or of a ``TransformerConfig``."""
    if "layernorm" in (getattr(options, "recompute_modules", None) or ()):
        return "--recompute-modules layernorm frees what the norm gave"
    offloaded = getattr(options, "offload_modules", None) or ()
    if norms := [name for name in offloaded if name in ("attn_norm", "mlp_norm")]:
        return f"--offload-modules {norms[0]}: what the norm holds was saved with the sum before it"
    graphs = getattr(options, "cuda_graph_impl", None) or "none"
    return None if graphs == "none" else f"not with --cuda-graph-impl {graphs}"


def _idle(context: Context) -> str | None:
    normalization = getattr(context.args, "normalization", None) or "RMSNorm"
    if normalization != "RMSNorm":
        return f"--normalization {normalization}"
    asked = getattr(context.args, "transformer_impl", "transformer_engine")
    return te_serves(context) if asked == "transformer_engine" else None


def switch_on() -> Callable[[], None]:
    return _ON.set(True)


FEATURE = Feature(
    name="fused_add_norm",
    summary="add to the residual stream and normalize the sum in one kernel",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    requires=("norm", "fused_norm"),
    benchmarks=("add_rms_norm",),
    conflicts={
        "recompute_norm": "it frees what the norms gave",
        "memory_budget": "it may have norms recomputed",
        "swap_attention": "what the first norm of a layer holds would stay on the device",
    },
    refuses=_refuses,
    idle=_idle,
    unavailable=kernels("add_rms_norm_fwd", "add_rms_norm_bwd"),
    switch_on=switch_on,
    patches=(
        *(
            Patch(
                target=f"{layer}.__init__",
                replacement=f"{_HERE}:with_sums",
                how="wrap",
                why="Each addition of a layer learns by itself which norm reads it.",
            )
            for layer in (TRANSFORMER_LAYER, MAMBA_LAYER)
        ),
        Patch(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
            "enable_forward_pre_hook",
            replacement=f"{_HERE}:gathering_late",
            how="wrap",
            why="A weight that is gathered when its module runs is not there when the sum is computed.",
        ),
        Patch(
            target="accel.layers.norm:rms_norm",
            replacement=f"{_HERE}:finding_it",
            how="wrap",
            why="What was computed with its input is not computed again.",
        ),
    ),
)
