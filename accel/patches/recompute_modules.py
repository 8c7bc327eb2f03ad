"""``--recompute-granularity selective --recompute-modules ...`` without Transformer Engine.

``layernorm``, ``moe_act``, ``mla_up_proj`` and ``gdn_norm_out`` free a module's output once it was used and
compute it again in the backward pass. Upstream asks Transformer Engine's fp8 state for that and compiles an
extension of its own when training has begun; here it is :class:`accel.memory.recompute.Recomputed`, with all
that it leaves alone, and Megatron's random generators as they were. ``layernorm`` includes the
norms that are parts of linear layers, as in Transformer Engine's spec. ``core_attn`` and ``mlp`` go through
Megatron's own ``checkpoint``, which does not bear a function that returns a parameter itself, as an MLP with
biases does: the backward pass would call itself without end. A view of the parameter is returned there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from accel.feature import Feature
from accel.layers.linear import LayerNormLinear
from accel.memory.recompute import Recomputed, Restorer
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_MEGATRON, SUPPORTED_RANGE, te_serves

_HERE = "accel.patches.recompute_modules"
_RANDOM = "megatron.core.tensor_parallel.random"
_NORMS = ("input_layernorm", "pre_mlp_layernorm")


class CheckpointWithoutOutput:
    """Upstream's, one call of a function whose output is freed until the backward pass.

    Args:
        fp8: whether the function's layers compute in fp8 or fp4.
    """

    def __init__(self, fp8: Any = False) -> None:
        if fp8:
            raise NotImplementedError("an output in fp8 or fp4 is not recomputed without TE")
        self._call: Recomputed | None = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """``run_function(*args)``: a tensor or a tuple with tensors."""
        from megatron.core.transformer.cuda_graphs import is_graph_warmup

        if is_graph_warmup():
            return run_function(*args)
        self._call = Recomputed(megatrons_generators)
        return self._call(run_function, *args)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs until the gradient of `hook_tensor` is there."""
        if self._call is not None:
            self._call.free(hook_tensor)


def megatrons_generators() -> Restorer:
    """Those of the host and the device, and Megatron's own of tensor parallelism."""
    from megatron.core.tensor_parallel import random

    states = random._get_all_rng_states()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with random._fork_rng():
            random._set_all_rng_states(*states)
            yield

    return restored


@around
def no_leaves(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """``checkpoint(function, distribute_saved_activations, *args)`` for a function that may return a
    parameter itself."""

    def viewed(*inputs: Any) -> Any:
        outputs = function(*inputs)
        if isinstance(outputs, tuple):
            return tuple(map(_no_leaf, outputs))
        return _no_leaf(outputs)

    return checkpoint(viewed, *args)


def norms_of(layer: Any) -> dict[str, Any]:
    """The norms of a layer that are modules which it can compute again, by name; of a ``MambaLayer`` none."""
    from megatron.core.transformer.identity_op import IdentityOp

    found = {name: getattr(layer, name, None) for name in _NORMS}
    return {n: norm for n, norm in found.items() if not isinstance(norm, IdentityOp | None)}


def recompute_norms(layer: Any, on: bool = True) -> None:
    """Have a layer free what its norms gave, be they modules or parts of linear layers."""
    norms = norms_of(layer)
    for name in filter(functools.partial(hasattr, layer), _NORMS):
        setattr(layer, f"recompute_{name}", on and name in norms)
    _recompute_in_linear_layers(layer, on)


def _recompute_in_linear_layers(layer: Any, on: bool) -> None:
    for module in layer.modules():
        if isinstance(module, LayerNormLinear):
            module.recompute_norm = on


@around
def in_linear_layers_too(
    init: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """``TransformerLayer.__init__``: upstream's ``layernorm`` passes by norms in linear layers."""
    init(self, config, *args, **kwargs)
    selective = config.recompute_granularity == "selective"
    if selective and "layernorm" in config.recompute_modules:
        _recompute_in_linear_layers(self, True)


def _no_leaf(output: Any) -> Any:
    leaf = isinstance(output, Tensor) and output.is_leaf and output.requires_grad
    return output.view_as(output) if leaf else output


FEATURE = Feature(
    name="recompute_modules",
    summary="serve Megatron's --recompute-modules without Transformer Engine",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    idle=te_serves,
    patches=(
        Patch(
            target=f"{_RANDOM}:CheckpointWithoutOutput",
            replacement=f"{_HERE}:CheckpointWithoutOutput",
            sources=dict.fromkeys(SUPPORTED_MEGATRON, "f4ae31c073b4"),
            why="Upstream's asks Transformer Engine for its fp8 state, and compiles an extension.",
        ),
        Patch(
            target="megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            replacement=f"{_HERE}:in_linear_layers_too",
            how="wrap",
            why="Upstream frees the outputs of norms that are modules, and not of those in linear layers.",
        ),
        Patch(
            target=f"{_RANDOM}:checkpoint",
            replacement=f"{_HERE}:no_leaves",
            how="wrap",
            expects=("function", "distribute_saved_activations", "args"),
            why="A function that returns a parameter itself makes the parameter a part of the graph.",
        ),
    ),
)
