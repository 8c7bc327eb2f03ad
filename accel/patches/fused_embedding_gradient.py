"""The gradient of the word embeddings, added to the rows of ``main_grad`` that a batch has read.

Upstream's backward fills a gradient of the whole vocabulary, nearly all of it zeros, and adds that to
``main_grad``: three passes over vocabulary x hidden size for a few thousand rows. Here these rows alone are
added.

On a CPU they are added one by one, in fp32 and in the tokens' order: rows that several tokens read are summed
in fp32, where upstream's sums are in bf16, and all others have upstream's bits. On a GPU such sums would be
atomic; there PyTorch's own kernel sums what belongs to one token, as it does for upstream, into as many rows
as there are tokens, and these are added: upstream's bits throughout.

Under ``--gradient-accumulation-fusion`` (Megatron's default), whose promise it is that a weight's gradient
lies in ``main_grad``; an output layer that shares the weight has added its own there before, and data
parallelism adds what comes from other uses of it. Upstream's own code runs, call by call, for weights whose
gradient has hooks, or that FSDP or GTP shards, for gradients that are summed in bf16
(``--grad-reduce-in-bf16``), for a last pipeline stage's copy of the embeddings, which multi-token prediction
looks up, and under ``--deterministic-mode``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.feature import Context, Feature
from accel.ops._dispatch import log_fallback
from accel.parallel.linear import main_grad_of, weight_gradient_added
from accel.patches._linear import upstream_needed
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE


@around
def remembering_its_config(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``__init__``: 0.17's module keeps no configuration."""
    init(self, *args, **kwargs)
    self.accel_config = kwargs["config"]


class _Rows(torch.autograd.Function):
    """``weight[ids]``, whose gradient goes to ``weight.main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        main_grad = main_grad_of(ctx.weight)
        rows, ids = dy.reshape(-1, dy.shape[-1]), ids.reshape(-1)
        if rows.device.type != "cpu":
            rows, ids = summed_by_id(rows, ids)
        main_grad.index_add_(0, ids, rows.to(main_grad.dtype))
        return weight_gradient_added(ctx.weight), None


def summed_by_id(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the rows of each id, as the gradient of `embedding` has it, and its id; then zeros for id 0.

    Args:
        rows: `[T, H]`.
        ids: `[T]`, int32 or int64.

    Returns:
        `[T, H]` and `[T]`. The host waits for nothing.
    """
    ordered, order = ids.sort(stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    number = begins.cumsum(0) - 1  # of an id among those that are there: in their order
    number_of_row = torch.empty_like(number).scatter_(0, order, number)
    id_of_number = torch.zeros_like(ids).scatter_(0, number, ordered)
    sums = torch.ops.aten.embedding_dense_backward(rows, number_of_row, len(ids), -1, False)
    return sums, id_of_number


class _Lookup:
    """Stands for the module while its forward runs, which looks up by ``self.weight[ids]`` when it is
    deterministic."""

    deterministic_mode = True

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def weight(self) -> _Lookup:
        return self

    def __getitem__(self, ids: Tensor) -> Tensor:
        return _Rows.apply(self._module.weight, ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@around
def into_main_grad(forward: Callable[[Any, Tensor], Tensor], self: Any, input_: Tensor) -> Tensor:
    if not _is_served(self):
        return forward(self, input_)
    self.weight.zero_out_wgrad = True  # data parallelism adds what else the weight is used for
    return forward(_Lookup(self), input_)


def _is_served(module: Any) -> bool:
    weight = module.weight
    main_grad = getattr(weight, "main_grad", None)
    if (config := getattr(module, "accel_config", None)) is None:
        log_fallback("fused_embedding_gradient", "embeddings built before accel was on")
        return False
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and main_grad is not None
        and main_grad.dtype == torch.float32
        and hasattr(weight, "grad_added_to_main_grad")
        and not getattr(weight, "shared", False)
        and not weight._backward_hooks
        and not upstream_needed(weight, getattr(module, "gtp_remat_size", 1))
        and not module.deterministic_mode
        and config.gradient_accumulation_fusion
    )


def _idle(context: Context) -> str | None:
    args = context.args
    if args is None:
        return None
    if not getattr(args, "gradient_accumulation_fusion", True):
        return "--no-gradient-accumulation-fusion"
    return None


FEATURE = Feature(
    name="fused_embedding_gradient",
    summary="add the word embeddings' gradient to the rows of main_grad that a batch has read",
    preset="fast",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cpu", "cuda"),
    requires=("gradient_accumulation_fusion",),
    idle=_idle,
    patches=(
        Patch(
            target="megatron.core.tensor_parallel.layers:VocabParallelEmbedding.__init__",
            replacement="accel.patches.fused_embedding_gradient:remembering_its_config",
            how="wrap",
            why="Whether gradients go to main_grad is in the configuration, which 0.17 does not keep.",
        ),
        Patch(
            target="megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
            replacement="accel.patches.fused_embedding_gradient:into_main_grad",
            how="wrap",
            sources={"0.17.1": "cb42682f53de", "0.18.2": "e0352a53cd06", "0.19.2": "52b576ab270a"},
            why="Upstream makes a gradient of the whole vocabulary, and adds that to main_grad.",
        ),
    ),
)
