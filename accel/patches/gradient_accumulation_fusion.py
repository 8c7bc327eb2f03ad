"""``--gradient-accumulation-fusion`` (Megatron's default) without Apex.

Megatron adds each weight gradient straight into ``main_grad`` with two functions of Apex's
extension ``fused_weight_gradient_mlp_cuda``, and refuses to build a linear layer when it is
missing; ``--defer-embedding-wgrad-compute`` imports it at the end of a step. Here the same two
functions are one ``addmm_`` into the accumulation buffer. For bf16 inputs and an fp32 buffer the
product is formed in fp32, so no gradient is rounded to bf16 on its way, as with Apex.

With pipeline stages, ``--mtp-num-layers`` and tied embeddings the last stage's output layer and its lookups
have one weight. Once the output layer has added its gradient to ``main_grad``, upstream takes no other, and
that of the words that are looked up ahead is lost, with Apex too. Here it is added, in the way that upstream
has without pipeline stages; that costs one addition of such a gradient for each micro-batch and, without
``fused_weight_gradient``, zeros of the weight's size for each product of the output layer.

Megatron-FSDP asserts Transformer Engine 2.10 for the fusion: without that, ``--use-megatron-fsdp`` turns it
off, and a line says so.

Where Apex's extension is installed Megatron's layers keep its two functions, and all else is as above.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from accel.feature import Context, Feature
from accel.parallel import linear
from accel.patches._told import told
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, te_installed

AVAILABLE = True
_EXTENSION = "fused_weight_gradient_mlp_cuda"
_LAYERS = "megatron.core.tensor_parallel.layers"


class WeightGradient:
    """Stands in for the module ``fused_weight_gradient_mlp_cuda``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        input_TH: torch.Tensor, grad_output_TO: torch.Tensor, main_grad_OH: torch.Tensor
    ) -> None:
        """``main_grad += grad_output^T @ input``, accumulated in the dtype of ``main_grad`` (fp32)."""
        linear.accumulate(main_grad_OH, grad_output_TO, input_TH)

    @staticmethod
    def wgrad_gemm_accum_fp16(
        input_TH: torch.Tensor, grad_output_TO: torch.Tensor, main_grad_OH: torch.Tensor
    ) -> None:
        """As above for a 16-bit ``main_grad``; the product is rounded once, after the sum."""
        main_grad_OH.addmm_(grad_output_TO.t(), input_TH)


@around
@torch.no_grad()  # the inputs that were kept are those of the graph
def draining(upstream: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wraps ``drain_embedding_wgrad_compute``."""
    from megatron.core.tensor_parallel import layers

    told(upstream, {_EXTENSION: getattr(layers, _EXTENSION)})(*args, **kwargs)


@around
def keeping_lookups(upstream: Callable[[Any], None], self: Any) -> None:
    """Wraps ``LanguageModule.setup_embeddings_and_output_layer``."""
    upstream(self)
    looks_up = getattr(self, "mtp_process", False)
    if looks_up and self.post_process and self.share_embeddings_and_output_weights:
        # beside the gradient that it has added the output layer then returns zeros, not what memory held,
        # and data parallelism adds to `main_grad` what comes with them
        weight = self.shared_embedding_or_output_weight()
        # of weights that 0.19 gathers for each use, as it says itself, the dummies stay what memory held
        if not getattr(weight, "is_gtp_weight_remat", False):
            weight.zero_out_wgrad = True


def without_megatron_fsdp(context: Context) -> list[str]:
    """Changes Megatron's default where Megatron would stop; a line says so."""
    args = context.args
    asked = getattr(args, "use_megatron_fsdp", False)
    if te_installed() or not (asked and getattr(args, "gradient_accumulation_fusion", False)):
        return []
    args.gradient_accumulation_fusion = False
    return [
        "--use-megatron-fsdp: --no-gradient-accumulation-fusion is used, since Megatron-FSDP has the fusion "
        "with Transformer Engine 2.10 or newer alone"
    ]


def _apex_serves(context: Context) -> str | None:
    found = importlib.util.find_spec(_EXTENSION) is not None
    return f"with Apex's {_EXTENSION}" if found else None


FEATURE = Feature(
    name="gradient_accumulation_fusion",
    summary="serve Megatron's --gradient-accumulation-fusion without Apex",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    aside=_apex_serves,
    prepare=without_megatron_fsdp,
    patches=(
        Patch(
            target=f"{_LAYERS}:{_EXTENSION}",
            replacement="accel.patches.gradient_accumulation_fusion:WeightGradient",
            how="provide",
            bound="kept",
            why="The guarded import of Apex's extension failed and left the name unbound.",
        ),
        Patch(
            target=f"{_LAYERS}:_grad_accum_fusion_available",
            replacement="accel.patches.gradient_accumulation_fusion:AVAILABLE",
            why="Linear layers refuse the fusion unless this flag says that the extension is there.",
        ),
        Patch(
            target="megatron.core.utils:drain_embedding_wgrad_compute",
            replacement="accel.patches.gradient_accumulation_fusion:draining",
            how="wrap",
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "e1a56bcb3609"),
            why="It imports Apex's extension for the gradients that --defer-embedding-wgrad-compute leaves.",
        ),
        Patch(
            target=(
                "megatron.core.models.common.language_module.language_module:"
                "LanguageModule.setup_embeddings_and_output_layer"
            ),
            replacement="accel.patches.gradient_accumulation_fusion:keeping_lookups",
            how="wrap",
            why="With pipeline stages upstream loses the gradient of the words that a tied output layer's "
            "stage looks up.",
        ),
    ),
)
