"""``--recompute-granularity full`` with ``--mtp-num-layers`` on megatron-core 0.18.

There a layer of multi-token prediction that is computed again passes ``padding_mask`` to a function that does
not take it, and training stops at its first forward pass; 0.19 takes it. Here the mask goes past that
function to what it calls, in the forward pass and again in the backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel.feature import Context, Feature
from accel.patches._layers import Altered
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_CALLED = "_proj_and_transformer_layer"


def passing_the_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``MultiTokenPredictionLayer._checkpointed_forward``."""
    parameters = inspect.signature(original).parameters
    if "padding_mask" in parameters or "kwargs" in parameters:
        return original

    @functools.wraps(original)
    def _checkpointed_forward(
        self: Any, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        forward = functools.partial(getattr(self, _CALLED), padding_mask=padding_mask)
        return original(Altered(self, **{_CALLED: forward}), *args, **kwargs)

    return _checkpointed_forward


def _idle(context: Context) -> str | None:
    if context.megatron.startswith("0.17."):
        return f"megatron-core {context.megatron} has no padding mask there"
    if not context.megatron.startswith("0.18."):
        return f"megatron-core {context.megatron} passes the mask itself"
    args = context.args
    if args is not None and getattr(args, "mtp_num_layers", None) is None:
        return "there is no multi-token prediction"
    if args is not None and getattr(args, "recompute_granularity", None) != "full":
        return "no layer is computed again as a whole"
    return None


FEATURE = Feature(
    name="mtp_recompute",
    summary="compute layers of multi-token prediction again as a whole on megatron-core 0.18",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=_idle,
    patches=(
        Patch(
            target="megatron.core.transformer.multi_token_prediction:"
            "MultiTokenPredictionLayer._checkpointed_forward",
            replacement="accel.patches.mtp_recompute:passing_the_mask",
            how="wrap",
            why="Upstream passes an argument to it that it does not take.",
        ),
    ),
)
