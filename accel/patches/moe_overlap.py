"""Mixtures of experts whose tokens travel while other tokens are computed.

Stock waits for the all-to-all that brings tokens to their experts, computes, and waits for the one that
brings the results home; the backward does the same. Here a rank computes its shared experts and some of the
tokens that stay where they are while the others travel, then the experts slice by slice, each slice's
results on their way home under the next. The backward is the same with gradients; the weights' gradients of
the first slice come beside the way to the second, the others last, under the return of the tokens'. Tokens
arrive where the grouped products read them: nothing is sorted after an all-to-all or before it.

``--accel-moe-overlap-slices N`` (5) cuts a rank's experts into N slices, no more than it has; the first and
the last are smaller, as their way is the one beside which little is computed.

Both specs, ``--moe-token-dispatcher-type alltoall``, dropless or with a capacity, shared experts with and
without ``--moe-shared-expert-overlap``, ``--moe-permute-fusion`` or not, tensor parallelism that stays in the
attention (``--expert-tensor-parallel-size 1``: its ranks hold whole experts), recomputation, distributed
optimizer, pipelines. Results are stock's where the product of some rows has the bits that these rows have in
the product of all.

**Not with** ``--overlap-moe-expert-parallel-comm``, which hides the same all-to-alls under another
micro-batch, experts that are split over tensor-parallel ranks, biases, FP8, CUDA graphs, autocast, or experts
that are frozen or have hooks on one of the ranks: those layers run as stock's, and a line says why. After a
layer's first forward pass, experts are to be frozen, thawed or hooked on all ranks at once.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.feature import Context, Feature, Setting
from accel.ops._autocast import autocasts
from accel.ops._dispatch import log_fallback
from accel.parallel.experts import expert_overlap as overlap
from accel.parallel.experts.exchange import Experts, Loan, routed_experts
from accel.parallel.experts.room import Sizes, check_room, fits
from accel.parallel.experts.traffic import Traffic
from accel.parallel.free_memory import free_bytes
from accel.patches import _experts
from accel.patches._expert_counts import layer_of, number_of
from accel.patches._settings import first_given, no_experts, one_expert_rank, whole_number
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE, flag_of, te_layers_asked

_HERE = "accel.patches.moe_overlap"
_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"

_RELIEVED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Layers whose dispatcher does not compute the shared experts."""


_NOTHING = object()


_EXCLUDED = (
    "overlap_moe_expert_parallel_comm",
    "overlap_dispatch_backward_with_experts_wgrad",
    "delay_wgrad_compute",
    "moe_paged_stash",
)


def unserved(layer: Any) -> str | None:
    """Why an MoE layer runs as stock's, whatever its experts are."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config, dispatcher = layer.config, layer.token_dispatcher
    if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
        return f"the dispatcher {type(dispatcher).__name__}"
    if dispatcher.tp_size > 1:
        return "experts that are split over tensor-parallel ranks"
    if config.moe_router_padding_for_quantization:
        return "--moe-router-padding-for-quantization"
    if option := first_given(_EXCLUDED, config):
        return flag_of(option)
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"--cuda-graph-impl {config.cuda_graph_impl}"
    if config.transformer_impl == "inference_optimized":
        return "--transformer-impl inference_optimized"
    if autocasts(next(layer.parameters())):
        return "autocast"
    return None


def served(layer: Any) -> bool:
    """The same on all expert-parallel ranks, where one may have frozen experts, or hooks on them."""
    dispatcher = layer.token_dispatcher
    if dispatcher.ep_size == 1:
        return False
    if (why := unserved(layer)) is None:
        here = _experts.reason(layer.experts)
        found_before, why = getattr(layer, "accel_agreed", (_NOTHING, None))
        if found_before != here:
            why = _agreed(here, dispatcher.ep_group, next(layer.parameters()).device)
            layer.accel_agreed = here, why
    if why is not None:
        log_fallback("moe_overlap", why)
    return why is None


def _agreed(here: str | None, group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What keeps a layer from being served on one of the ranks. All ask at its first forward pass, and where
    they find another reason than before: a change has to come on all of them at once."""
    unserved_ranks = torch.tensor(here is not None, dtype=torch.int32, device=device)
    dist.all_reduce(unserved_ranks, group=group)
    return here or ("experts of another rank" if unserved_ranks.item() else None)


@around
def counting_all(original: Callable[..., Tensor], self: Any, routing_map: Tensor) -> Tensor:
    """Wraps the dispatcher's ``preprocess``: the counts of all ranks on the host, else what upstream's
    leaves."""
    self.accel_counts = self.accel_free = None
    if self.ep_size == 1 or not getattr(self, "accel_serves", True):
        return original(self, routing_map)
    # a program may call the dispatcher alone
    if self.tp_size > 1 or self.config.moe_router_padding_for_quantization:
        return original(self, routing_map)
    if self.drop_and_pad:
        found = original(self, routing_map)
        self.accel_counts = [[self.capacity] * self.num_experts] * self.ep_size
        compared = self.__dict__.setdefault("accel_compared", {True: 0, False: 0})
        kept = torch.is_grad_enabled()
        if self.capacity > compared[kept]:  # else no rank waits for the host
            compared[kept] = self.capacity
            self.accel_free = _of_all(self, _free(routing_map))[:, 0].tolist()
        return found
    whole = _of_all(self, torch.cat([routing_map.sum(dim=0), _free(routing_map)]))
    counts = whole[:, :-1]
    self.accel_counts, self.accel_free = counts.tolist(), whole[:, -1].tolist()
    first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
    here = counts[:, first : last + 1].contiguous()
    rank = self.ep_group.rank()
    self.num_out_tokens = sum(self.accel_counts[rank])
    self.input_splits = counts[rank].view(self.ep_size, -1).sum(1).numpy()
    self.output_splits = here.sum(1).numpy()
    self.output_splits_tp = None
    if self.num_local_experts > 1:
        device = self.permute_idx_device
        self.num_global_tokens_per_local_expert = here.to(device)
    return here.sum(0)


def _free(like: Tensor) -> Tensor:
    return like.new_tensor([free_bytes(like.device)], dtype=torch.int64)


def _of_all(dispatcher: Any, mine: Tensor) -> Tensor:
    """A row for each expert-parallel rank, on the host."""
    whole = mine.new_empty(dispatcher.ep_size, len(mine))
    dist.all_gather_into_tensor(whole, mine, group=dispatcher.ep_group)
    return whole.cpu()


def _sizes(config: Any, experts: Experts, training: bool) -> Sizes:
    """A rank's own rows are there as they leave and as they come home, in the backward too. A row that it
    computes is there as input, result and, if it is kept for the backward, what lies between; at the end of
    the backward as both factors of each weight's gradient, and as its own gradient on the way home. In a
    pipeline, more may be free by then."""
    width = getattr(config, "moe_latent_size", None) or config.hidden_size
    between = (3 if config.gated_linear_unit else 2) * config.moe_ffn_hidden_size if training else 0
    backward = training and config.pipeline_model_parallel_size == 1
    third = width if backward else 0
    each = config.params_dtype.itemsize
    return Sizes(
        own=2 * width * each,
        computed=(2 * width + between + third) * each,
        in_place=(between + third) * each,
        matrices=overlap.matrix_bytes(experts),
        gradients=overlap.gradient_bytes(experts) if backward else 0,
    )


def _fitting(
    layer: Any, traffic: Traffic, experts: Experts, loan: Loan | None
) -> tuple[Traffic, Loan | None]:
    """The same; without copies and the loan of them where only they do not fit.

    Raises:
        MemoryError: rows of a rank do not fit; on all ranks alike.
    """
    free = layer.token_dispatcher.accel_free
    if free is None:
        return traffic, loan
    sizes = _sizes(layer.config, experts, layer.training)
    held = loan.copies if loan else frozenset()
    if fits(traffic, free, sizes, held):
        return traffic, loan
    if loan is not None:
        loan.wait()  # under way until then
    alone = dataclasses.replace(traffic, copies=frozenset())
    factor = layer.config.moe_expert_capacity_factor
    check_room(alone, free, sizes, held, number_of(layer), factor)
    log_fallback("hot_experts", "no memory for copies beside the rows of a micro-batch")
    return alone, None


@around
def beside_the_journey(original: Callable[..., Any], self: Any, hidden_states: Tensor) -> Any:
    """Wraps ``shared_experts_compute``: it waits until the tokens are under way."""
    self.accel_beside = None
    dispatcher = self.token_dispatcher
    dispatcher.accel_serves = serves = served(self)
    if self.use_shared_expert and self.shared_expert_overlap:
        # upstream's own way is for its all-to-alls
        dispatcher.shared_experts = None if serves else self.shared_experts
        _RELIEVED.add(self)
    if not self.use_shared_expert or not serves:
        return original(self, hidden_states)
    whole = _whole_shared if self.shared_expert_overlap else original
    self.accel_beside = (functools.partial(whole, self), hidden_states)
    return None


def _whole_shared(layer: Any, hidden_states: Tensor) -> Tensor:
    """Of a layer whose shared experts were built to be computed in steps: all steps."""
    shared = layer.shared_experts
    shared.pre_forward_comm(hidden_states)
    shared.linear_fc1_forward_and_act()
    shared.linear_fc2_forward()
    shared.post_forward_comm()
    return shared.get_output()


@around
def staying(original: Callable[..., Any], self: Any, hidden_states: Tensor, probs: Tensor) -> Any:
    """Wraps ``dispatch``: the tokens leave with ``routed_experts_compute``."""
    return (hidden_states, probs) if served(self) else original(self, hidden_states, probs)


@around
def there_and_back(
    original: Callable[..., Any], self: Any, hidden_states: Tensor, probs: Tensor
) -> tuple[Tensor, None]:
    """Wraps ``routed_experts_compute``."""
    if not served(self):
        return original(self, hidden_states, probs)
    dispatcher = self.token_dispatcher
    experts = _experts.experts_of(self.experts, hidden_states)
    beside, beside_input = getattr(self, "accel_beside", None) or (None, None)
    group = dispatcher.ep_group
    plan, loan = overlap.current(), getattr(self, "accel_loan", None)
    self.accel_loan = None
    plans_ahead = plan.hot is not None and plan.hot.every is not None
    ahead = getattr(self, "accel_ahead", None) if plans_ahead else None
    traffic = plan.traffic(dispatcher.accel_counts, group, experts, loan, ahead)
    traffic, loan = _fitting(self, traffic, experts, loan)
    if plan.hot is not None and self.training and self.router.layer_number is not None:
        plan.hot.note(layer_of(self.router), traffic, group, experts)
    output, shared = routed_experts(
        *(hidden_states, probs, traffic, group, experts, beside, beside_input, loan),
        streams=plan.streams(hidden_states.device),
    )
    self.accel_beside = None
    self.accel_shared = shared
    dispatcher.tokens_per_expert = None
    return output, None


@around
def at_home(original: Callable[..., Any], self: Any, output: Tensor) -> Tensor:
    """Wraps ``combine``."""
    return output if served(self) else original(self, output)


@around
def adding_shared(
    original: Callable[..., Any], self: Any, output: Tensor, shared_expert_output: Tensor | None
) -> Tensor:
    """Wraps ``postprocess``."""
    shared, self.accel_shared = getattr(self, "accel_shared", None), None
    return original(self, output, shared_expert_output if shared is None else shared)


def refused(context: Context) -> str | None:
    kind = getattr(context.args, "moe_token_dispatcher_type", None)
    if kind in ("allgather", "flex"):
        return f"--moe-token-dispatcher-type {kind}: tokens travel one by one with alltoall only"
    if (split := getattr(context.args, "expert_tensor_parallel_size", None) or 1) > 1:
        return (
            f"--expert-tensor-parallel-size {split}: experts are split; give 1 to keep them whole"
        )
    if te_layers_asked(context.args) and getattr(context.args, "moe_grouped_gemm", False):
        return "Transformer Engine's grouped experts multiply themselves: give --transformer-impl local"
    return None


def idle(context: Context) -> str | None:
    return no_experts(context) or one_expert_rank(context)


def switch_on(slices: int) -> Callable[[], None]:
    off = overlap.switch_on(slices)

    def switch_off() -> None:
        off()
        for layer in _RELIEVED:
            layer.token_dispatcher.shared_experts = layer.shared_experts
        _RELIEVED.clear()

    return switch_off


def _wrap(target: str, replacement: str, why: str) -> Patch:
    return Patch(target=target, replacement=f"{_HERE}:{replacement}", how="wrap", why=why)


FEATURE = Feature(
    name="moe_overlap",
    summary="compute experts while tokens travel to them and back",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("moe",),
    refuses=refused,
    idle=idle,
    settings=(
        Setting(
            name="slices",
            metavar="N",
            summary="how many parts of a rank's experts travel and are computed by themselves",
            parse=lambda given: whole_number(given, "slices of a rank's experts"),
            default=5,
        ),
    ),
    switch_on=switch_on,
    patches=(
        _wrap(
            f"{_DISPATCHER}.preprocess",
            "counting_all",
            "Each rank knows what comes for each of its experts; who computes what needs all counts.",
        ),
        _wrap(
            f"{_LAYER}.shared_experts_compute",
            "beside_the_journey",
            "The shared experts are computed before the tokens set out.",
        ),
        _wrap(
            f"{_LAYER}.dispatch",
            "staying",
            "The first of two all-to-alls that nothing runs beside.",
        ),
        _wrap(
            f"{_LAYER}.routed_experts_compute",
            "there_and_back",
            "All experts wait for all tokens.",
        ),
        _wrap(
            f"{_LAYER}.combine",
            "at_home",
            "The second of two all-to-alls that nothing runs beside.",
        ),
        _wrap(
            f"{_LAYER}.postprocess",
            "adding_shared",
            "What the shared experts gave comes with the tokens.",
        ),
    ),
)
