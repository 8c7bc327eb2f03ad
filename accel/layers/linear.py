"""`Linear` and `LayerNormLinear`: one weight, split by column or row, with a norm before it or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.layers import norm
from accel.layers.base import ParallelLayer, refuse_options
from accel.parallel.linear import parallel_linear

__all__ = ["LayerNormLinear", "Linear"]


class Linear(ParallelLayer):
    """`y = x W^T + b`, tensor-parallel.

    Args:
        in_features, out_features: of the whole layer, before it is split over the ranks.
        init_method: fills the weight in place; a normal distribution if None.
        return_bias: return `(y, b)` without adding b.
        params_dtype, device: of the parameters; device "meta" leaves them without values.
        options: what else Transformer Engine takes (userbuffers, symmetric memory, ...): refused if
            set.

    State dict: `weight [N, K]`, `bias [N]`, `_extra_state` (empty).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        ub_name: str | None = None,
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        **options: Any,
    ) -> None:
        refuse_options(type(self).__name__, options)
        super().__init__(
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            parallel_mode=parallel_mode,
            delay_wgrad_compute=delay_wgrad_compute,
            ub_name=ub_name,
        )
        if parallel_mode == "column":
            out_features = self.per_rank(out_features, "out_features")
        elif parallel_mode == "row":
            in_features = self.per_rank(in_features, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        where = {"device": device, "dtype": params_dtype}
        self.register_norm(in_features, where)
        self.new_weight("weight", (out_features, in_features), init_method, **where)
        if bias:
            self.new_bias("bias", out_features, **where)
        else:
            self.bias = None

    def register_norm(self, in_features: int, where: dict[str, Any]) -> None:
        """For `LayerNormLinear`: its parameters come first in the state dict."""

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[..., K]` -> `[..., N]` (see `accel.parallel.parallel_linear` for what the ranks hold).

        `is_first_microbatch` tells Transformer Engine when its FP8 weights are stale: no meaning here.
        """
        weight: Any = self.weight
        y = parallel_linear(x, weight, None if self.return_bias else self.bias, self.layout)
        return (y, self.bias) if self.return_bias else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, TP={self.tp_size}"
        )


class LayerNormLinear(Linear):
    """A norm over the features, then `Linear`.

    Args:
        normalization: `LayerNorm` or `RMSNorm`.
        return_layernorm_output: also return what the norm gave (the rows of this rank).

    State dict: `layer_norm_weight [K]`, `layer_norm_bias [K]` (LayerNorm alone), then those of `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **linear: Any,
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={normalization!r}: use LayerNorm or RMSNorm")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        super().__init__(in_features, out_features, **linear)

    def register_norm(self, in_features: int, where: dict[str, Any]) -> None:
        value = 0.0 if self.zero_centered_gamma else 1.0
        weight: Any = torch.nn.Parameter(torch.full((in_features,), value, **where))
        weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_weight = weight
        if self.normalization == "RMSNorm":
            self.layer_norm_bias = None
            return
        bias: Any = torch.nn.Parameter(torch.zeros(in_features, **where))
        bias.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = bias

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As `Linear.forward`; with `return_layernorm_output`, that is appended to the result."""
        normed = self._norm(x)
        y = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return y
        return (*y, normed) if self.return_bias else (y, normed)

    def _norm(self, x: Tensor) -> Tensor:
        weight, zero_centered = self.layer_norm_weight, self.zero_centered_gamma
        if self.layer_norm_bias is None:
            return norm.rms_norm(x, weight, self.eps, zero_centered=zero_centered)
        return norm.layer_norm(
            x, weight, self.layer_norm_bias, self.eps, zero_centered=zero_centered
        )
